//! Words for what threads wait for, by the frames they wait in.

use crate::naming;
use perfusion_aggregate::runtime_wait::{LockEvents, RuntimeWaits, StackWaits};
use perfusion_aggregate::threads::WaitReason;
use perfusion_host::process::ProcessTable;
use perfusion_model::frame::FrameKey;
use perfusion_symbolize::Symbolizer;
use perfusion_symbolize::wait_functions::WaitFunctions;

/// What is known of the functions in which runtimes wait.
#[derive(Default)]
pub(super) struct WaitReasons {
    /// What the runtimes' own frames mean.
    runtime_waits: RuntimeWaits,
    functions: WaitFunctions,
}

impl WaitReasons {
    /// Learns from the stacks of waits and from `lock_events` what the runtimes' frames mean.
    pub(super) fn learn<'a>(
        &mut self,
        stacks: impl Iterator<Item = &'a [FrameKey]> + Clone,
        lock_events: &LockEvents,
        symbolizer: &mut Symbolizer,
        processes: &ProcessTable,
    ) {
        let functions = self.functions.called(stacks.clone(), processes);
        symbolizer.resolve(functions.iter().map(|&(function, _)| function), processes);
        self.runtime_waits =
            RuntimeWaits::learn(stacks, lock_events, &functions, |frame| symbolizer.symbol(frame));
    }

    /// Learns in which frames threads are held up by a collection.
    pub(super) fn learn_pauses<'a>(
        &mut self,
        waits: impl Iterator<Item = StackWaits<'a>>,
        symbolizer: &Symbolizer,
    ) {
        self.runtime_waits.learn_pauses(waits, |frame| symbolizer.symbol(frame));
    }

    /// Words for a wait in `frames`, which are named.
    pub(super) fn name(
        &self,
        reason: WaitReason,
        frames: &[FrameKey],
        symbolizer: &Symbolizer,
    ) -> &'static str {
        let word = naming::wait_reason(symbolizer, reason, frames);
        // To the kernel, all waits of the runtime are this.
        if word == "futex" {
            let symbol = |frame| symbolizer.symbol(frame);
            self.runtime_waits.name(reason, frames, symbol).unwrap_or(word)
        } else {
            word
        }
    }

    /// Forgets the files that are not mapped any more.
    pub(super) fn keep(&mut self, processes: &ProcessTable) {
        self.functions.keep(processes);
    }
}
