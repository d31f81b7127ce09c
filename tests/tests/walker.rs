//! The probes' walker against the unwinder: the same stack whoever walked it, and nearly all of it
//! walked by the probes.

use std::collections::BTreeMap;
use std::time::Duration;

use perfusion_host::process::ProcessTable;
use perfusion_model::event::{Event, EventKind, ProbeWalk, UserContext, WalkEnd};
use perfusion_model::frame::Marker;
use perfusion_sources::kernel::rules::RuleCache;
use perfusion_sources::kernel::{KernelOptions, KernelSelection, KernelSource};
use perfusion_unwind::unwinder::{UnwindLimits, UnwoundStack};
use system_tests::environment::{RECORD_NET9, begin_beside, record_on};
use system_tests::{Runtime, Workload, on_runtimes, wait_until};

const DEADLINE: Duration = Duration::from_secs(120);

/// The stages between the probes and finished stacks.
struct Stages {
    kernel: KernelSource,
    processes: ProcessTable,
    rules: RuleCache,
}

impl Stages {
    fn start(pid: u32, options: KernelOptions) -> Self {
        let mut kernel = KernelSource::start(&KernelOptions {
            selection: KernelSelection::Pids(vec![pid]),
            ..options
        })
        .unwrap();
        let rules = kernel.take_rules().unwrap();
        Self { kernel, processes: ProcessTable::new(), rules }
    }

    /// Drains once, hands each user context of `pid` to `each`, and pushes rules.
    fn round(&mut self, pid: u32, mut each: impl FnMut(&mut ProcessTable, &UserContext)) {
        let mut events: Vec<Event> = Vec::new();
        self.kernel.drain(&mut |event| events.push(event));
        events.sort_by_key(|event| event.time);
        for event in events {
            self.processes.observe(&event);
            let (thread, user) = match &event.kind {
                EventKind::CpuSample(sample) => (sample.thread, &sample.user),
                EventKind::WaitStart(wait) => (wait.thread, &wait.user),
                _ => continue,
            };
            if let Some(user) = user
                && thread.pid == pid
            {
                each(&mut self.processes, user);
            }
        }
        self.processes.push_rules(|updates| self.rules.push_rules(updates));
    }
}

fn finish(processes: &mut ProcessTable, pid: u32, context: &UserContext) -> UnwoundStack {
    processes.finish(pid, context, UnwindLimits::default())
}

on_runtimes!(both_walkers_find_the_same_stacks: net10 Net10; long: net8 Net8, net9 Net9);

fn both_walkers_find_the_same_stacks(runtime: Runtime) {
    let name = format!("walker::both on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    for (workload, most) in [("callheavy", 1500), ("waits", 500)] {
        let app = Workload::dotnet(runtime, workload, &[]).unwrap().start().unwrap();
        let pid = app.pid();
        let options =
            KernelOptions { copies_all: true, frequency_hz: 1999, ..KernelOptions::default() };
        let mut stages = Stages::start(pid, options);
        let (mut compared, mut not_comparable) = (0u32, 0u32);
        let mut differences: BTreeMap<String, u32> = BTreeMap::new();
        wait_until("stacks walked by both", DEADLINE, || {
            stages.round(pid, |processes, context| {
                let walk = context.walk.clone().unwrap();
                // Everything once more from the innermost frame on, as if the probes had found
                // nothing.
                let nothing = ProbeWalk {
                    frames: Vec::new(),
                    end: WalkEnd::HandedOver { exact: true },
                    ..walk
                };
                let whole =
                    finish(processes, pid, &UserContext { walk: Some(nothing), ..context.clone() });
                // Where the copy ends the unwinder does; the probes read on.
                if walk.end != WalkEnd::ThreadStart || whole.broken == Some(Marker::TruncatedCopy) {
                    not_comparable += 1;
                    return;
                }
                let probed = finish(
                    processes,
                    pid,
                    &UserContext { walk: Some(walk), stack: Vec::new(), ..context.clone() },
                );
                compared += 1;
                if (&probed.frames, probed.reached_thread_start)
                    != (&whole.frames, whole.reached_thread_start)
                {
                    *differences.entry(format!("{probed:?}\n   {whole:?}")).or_default() += 1;
                }
            });
            (compared >= most).then_some(())
        })
        .unwrap();
        let counters = stages.processes.counters();
        eprintln!(
            "{runtime} {workload}: {compared} stacks compared, {not_comparable} not comparable, {} \
             updates",
            counters.rules_pushed
        );
        assert!(differences.is_empty(), "{runtime} {workload}: {differences:#?}");
        assert_eq!(counters.stacks_stale, 0);
        app.stop().unwrap();
    }
}

#[test]
fn after_a_while_the_probes_walk_nearly_all_frames_themselves() {
    let Some(_turn) = begin_beside("walker::learned", RECORD_NET9) else { return };
    let app = Workload::dotnet(Runtime::Net9, "callheavy", &[]).unwrap().start().unwrap();
    let pid = app.pid();
    let options = KernelOptions { frequency_hz: 1999, ..KernelOptions::default() };
    let mut stages = Stages::start(pid, options);
    let (mut stacks, mut by_probes, mut by_daemon, mut unfinished) = (0u64, 0usize, 0usize, 0u64);
    wait_until("8000 stacks", DEADLINE, || {
        stages.round(pid, |processes, context| {
            let walked = context.walk.as_ref().unwrap().frames.len();
            let done = finish(processes, pid, context);
            stacks += 1;
            // The first ones are the update, of 2 s at the thread's full speed; the promise is
            // stated after 10.
            if stacks > 4000 {
                by_probes += walked;
                by_daemon += done.frames.len() - walked;
                unfinished += u64::from(!done.reached_thread_start);
            }
        });
        (stacks >= 8000).then_some(())
    })
    .unwrap();
    app.stop().unwrap();
    let all = by_probes + by_daemon;
    assert!(by_daemon * 100 <= all, "{by_daemon} of {all} frames were left to the daemon");
    assert!(
        unfinished * 1000 <= stacks,
        "{unfinished} of {stacks} stacks do not reach the thread's start"
    );
}
