//! Code that goes away: no look-up may be under way, and the daemon forgets it.

use super::Instance;
use crate::code::CodeLifetimes;
use crate::gate::{EVERYTHING, Gate, UnloadOutcome};
use crate::method;
use crate::syscall;
use core::sync::atomic::{AtomicU32, Ordering};
use profiler_protocol::counter::Counter;
use profiler_protocol::record::{RecordBody, WordList};

/// What is known about code that goes away.
pub(crate) struct CodeUnloads {
    pub(crate) gate: Gate,
    pub(crate) lifetimes: CodeLifetimes,
    /// 1 when the daemon could not be told that code went away: it is to forget all.
    pub(crate) untold: AtomicU32,
}

impl Instance {
    /// A module goes away: no look-up may be under way, and the daemon forgets its code.
    pub(crate) fn on_module_unload(&self, module_id: usize) {
        self.count_met(self.code.gate.unload_module(module_id));
        self.code.lifetimes.on_unload(syscall::now_ns());
        self.types.forget();
        self.tell_unloaded(module_id as u64, &[]);
    }

    /// It has gone.
    pub(crate) fn on_module_unloaded(&self, module_id: usize) {
        self.code.lifetimes.on_unload(syscall::now_ns());
        self.code.gate.module_unloaded(module_id);
    }

    fn tell_unloaded(&self, module_id: u64, ranges: &[u8]) {
        let told = self.is_listening()
            && self.send(RecordBody::CodeUnloaded { module_id, ranges: WordList::new(ranges) });
        if !told {
            // Release: pairs with the swap in `tell_untold`.
            self.code.untold.store(1, Ordering::Release);
        }
    }

    /// Makes up for records about unloaded code that were not sent: the daemon is to forget all
    /// code.
    pub(crate) fn tell_untold(&self) {
        if self.code.untold.swap(0, Ordering::AcqRel) != 0 {
            self.tell_unloaded(0, &EVERYTHING);
        }
    }

    fn count_met(&self, met: UnloadOutcome) {
        match met {
            UnloadOutcome::Nothing => {}
            UnloadOutcome::Waited => self.count(Counter::UnloadsWaited),
            UnloadOutcome::Overran => self.count(Counter::UnloadsOverran),
        }
    }

    /// A dynamic method goes away, and with it its code; the address is used again.
    pub(crate) fn on_dynamic_method_unloaded(&self, function: usize) {
        let mut bytes = [0u8; 256];
        let code = self.info().map_or(&[][..], |info| method::code_of(info, function, &mut bytes));
        let tell = || {
            if code.is_empty() {
                self.count(Counter::UnloadsUnknown);
            } else {
                self.tell_unloaded(0, code);
            }
        };
        let met = self.code.gate.unload_dynamic(WordList::new(code), tell, |at_ns| {
            self.code.lifetimes.on_unload(at_ns)
        });
        self.count_met(met);
    }
}
