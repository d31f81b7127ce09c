//! Keeps look-ups and unloads apart: a look-up never starts while code goes away, and an unload
//! waits for the one look-up in flight, that of a dynamic method only where the look-up is about
//! its own code. The flags are each set before the other is read (Dekker), so both orders are
//! sequentially consistent.
//!
//! A module's unload may wait: the runtime calls that back in preemptive mode (vm/ceeload.cpp,
//! `Module::Destruct`). That of a dynamic method it does not (vm/runtimehandles.cpp,
//! `RuntimeMethodHandle_Destroy`: `GCX_COOP`): who waits there holds up a collection, and with it
//! every managed thread.
//!
//! The runtime frees code *after* its last callback about it: a dynamic method when
//! DynamicMethodUnloaded has returned (vm/dynamicmethod.cpp, `LCGMethodResolver::Destroy`), a
//! module's loader heaps when all of its allocator's modules have had their ModuleUnloadFinished
//! (vm/loaderallocator.cpp, `GCLoaderAllocators`), often much later. What may be looked up then is
//! for `code.rs` to say; of dynamic methods, which can go by the thousand, the gate knows where the
//! code of the last ones was.

use crate::code::is_later;
use crate::syscall;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use profiler_protocol::record::WordList;

/// An unload waits at most this long: should the look-up need a lock that the unloading thread
/// holds, both go on.
const TIMEOUT_NS: u64 = 5_000_000_000;
/// The same of a dynamic method's unload.
const DYNAMIC_TIMEOUT_NS: u64 = 1_000_000_000;
const PAUSE_NS: u64 = 50_000;
/// Modules that unload at a time: one, as a rule, but all that one collection found dead begin
/// before the first one ends.
const MODULES: usize = 1024;
/// Runs of code that went away last: a tenth of a second of 20,000 dynamic methods a second.
const GONE: usize = 2048;

/// The gate. All zeroes is open.
pub(crate) struct Gate {
    /// 0, or what the look-up in flight is about: an address in code, or [`NO_CODE`].
    looking: AtomicUsize,
    /// Modules between their two callbacks, and dynamic methods within theirs.
    unloading: AtomicU32,
    /// Those modules, so that an end is only believed whose beginning was seen.
    modules: [AtomicUsize; MODULES],
    /// Shut until this moment.
    shut_until_ns: AtomicU64,
    /// Code of the last dynamic methods that went away.
    gone: [UnloadedCode; GONE],
    gone_count: AtomicU32,
}

/// All addresses, as (start, bytes).
pub(crate) const EVERYTHING: [u8; 16] = *b"\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff";

/// A look-up that is about no address.
pub(crate) const NO_CODE: usize = 1;

struct UnloadedCode {
    start: AtomicUsize,
    bytes: AtomicUsize,
    at_ns: AtomicU64,
}

/// What an unload met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnloadOutcome {
    /// No look-up.
    Nothing,
    /// One, which ended.
    Waited,
    /// One, which took too long.
    Overran,
}

impl Gate {
    /// Runs `look`, which is about this address or about [`NO_CODE`], unless something goes away.
    pub(crate) fn look_up<T>(&self, about: usize, look: impl FnOnce() -> T) -> Option<T> {
        self.looking.store(about, Ordering::SeqCst);
        let open = self.unloading.load(Ordering::SeqCst) == 0
            && self.shut_until_ns.load(Ordering::SeqCst) <= syscall::now_ns();
        let answer = open.then(look);
        self.looking.store(0, Ordering::SeqCst);
        answer
    }

    /// True when what was at `address` at `seen_ns` may have been a dynamic method that went away.
    /// Only to be asked within [`Gate::look_up`].
    pub(crate) fn is_gone(&self, address: usize, seen_ns: u64) -> bool {
        self.gone.iter().any(|gone| {
            // Acquire: pairs with the release in `unload_dynamic`; whoever no longer meets what was
            // here finds it forgotten.
            address.wrapping_sub(gone.start.load(Ordering::Acquire))
                < gone.bytes.load(Ordering::Acquire)
                && !is_later(seen_ns, gone.at_ns.load(Ordering::Relaxed))
        })
    }

    /// A module's unload begins; [`Gate::module_unloaded`] ends it.
    pub(crate) fn unload_module(&self, module: usize) -> UnloadOutcome {
        let known = self.modules.iter().any(|m| m.load(Ordering::Relaxed) == module);
        let take = |m: &AtomicUsize| {
            m.compare_exchange(0, module, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if !known && self.modules.iter().any(take) {
            self.unloading.fetch_add(1, Ordering::SeqCst);
        } else {
            // No room to wait for its end.
            self.shut_for(TIMEOUT_NS);
        }
        self.wait_for_look_up(WordList::new(&EVERYTHING), TIMEOUT_NS)
    }

    /// A module's unload ends. Ignored unless its beginning was seen: it may have been before the
    /// attach.
    pub(crate) fn module_unloaded(&self, module: usize) {
        let give = |m: &AtomicUsize| {
            m.compare_exchange(module, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        if module != 0 && self.modules.iter().any(give) {
            self.unloading.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A dynamic method goes away, whose code is at `code`, as (start, bytes), and is told of by
    /// `tell` while no look-up is about it. `forget` is told when code went of which it is not
    /// remembered where it was.
    pub(crate) fn unload_dynamic(
        &self,
        code: WordList<'_>,
        tell: impl FnOnce(),
        forget: impl Fn(u64),
    ) -> UnloadOutcome {
        self.unloading.fetch_add(1, Ordering::SeqCst);
        let met = self.wait_for_look_up(code, DYNAMIC_TIMEOUT_NS);
        tell();
        let now_ns = syscall::now_ns();
        let mut known = false;
        for (start, bytes) in code.pairs() {
            known = true;
            let at = self.gone_count.fetch_add(1, Ordering::Relaxed) as usize % GONE;
            let Some(gone) = self.gone.get(at) else { continue };
            let before_ns = gone.at_ns.swap(now_ns, Ordering::Relaxed);
            // First: a look-up about something else may be under way.
            if before_ns != 0 {
                forget(before_ns);
            }
            gone.start.store(start as usize, Ordering::Release);
            gone.bytes.store(bytes as usize, Ordering::Release);
        }
        if !known {
            forget(now_ns);
        }
        self.unloading.fetch_sub(1, Ordering::SeqCst);
        met
    }

    /// Callbacks were not delivered for a while: ends may have been missed.
    pub(crate) fn forget(&self) {
        for module in &self.modules {
            if module.swap(0, Ordering::Relaxed) != 0 {
                self.shut_for(TIMEOUT_NS);
                self.unloading.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn shut_for(&self, ns: u64) {
        self.shut_until_ns.fetch_max(syscall::now_ns().saturating_add(ns), Ordering::SeqCst);
    }

    /// Waits for the end of a look-up that is about one of these addresses, as (start, bytes).
    fn wait_for_look_up(&self, addresses: WordList<'_>, timeout_ns: u64) -> UnloadOutcome {
        let is_over = || {
            let about = self.looking.load(Ordering::SeqCst) as u64;
            about == 0 || !addresses.pairs().any(|(start, bytes)| about.wrapping_sub(start) < bytes)
        };
        if is_over() {
            return UnloadOutcome::Nothing;
        }
        let until = syscall::now_ns().saturating_add(timeout_ns);
        // The number of looks also ends the wait where the clock may not be read.
        for _ in 0..timeout_ns / PAUSE_NS {
            if is_over() {
                return UnloadOutcome::Waited;
            }
            if syscall::now_ns() > until {
                break;
            }
            syscall::sleep_ns(PAUSE_NS);
        }
        UnloadOutcome::Overran
    }
}

#[cfg(test)]
mod tests {
    use super::{GONE, Gate, MODULES, NO_CODE, TIMEOUT_NS, UnloadOutcome, UnloadedCode};
    use crate::syscall::now_ns;
    use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use profiler_protocol::record::WordList;
    use std::sync::mpsc::channel;

    fn gate() -> Gate {
        Gate {
            looking: AtomicUsize::new(0),
            unloading: AtomicU32::new(0),
            modules: std::array::from_fn(|_| AtomicUsize::new(0)),
            shut_until_ns: AtomicU64::new(0),
            gone: std::array::from_fn(|_| UnloadedCode {
                start: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                at_ns: AtomicU64::new(0),
            }),
            gone_count: AtomicU32::new(0),
        }
    }

    fn code(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn no_look_up_while_a_module_unloads() {
        let gate = gate();
        assert_eq!(gate.look_up(NO_CODE, || 5), Some(5));
        assert_eq!(gate.unload_module(8), UnloadOutcome::Nothing);
        assert_eq!(gate.look_up(NO_CODE, || 5), None);
        gate.module_unloaded(8);
        assert_eq!(gate.look_up(NO_CODE, || 5), Some(5));
    }

    #[test]
    fn more_modules_at_a_time_than_are_remembered_shut_the_gate() {
        let gate = gate();
        let before = now_ns();
        (1..=MODULES + 1)
            .for_each(|module| assert_eq!(gate.unload_module(module), UnloadOutcome::Nothing));
        assert!(gate.shut_until_ns.load(Ordering::SeqCst) >= before + TIMEOUT_NS);
        (1..=MODULES + 1).for_each(|module| gate.module_unloaded(module));
        assert_eq!(gate.unloading.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn an_end_without_a_beginning_opens_nothing() {
        let gate = gate();
        gate.unload_module(8);
        gate.unload_module(16);
        gate.module_unloaded(8);
        gate.module_unloaded(8);
        gate.module_unloaded(24);
        assert_eq!(gate.unloading.load(Ordering::SeqCst), 1);
        gate.forget();
        assert_eq!(gate.unloading.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn code_of_a_dynamic_method_is_gone_until_other_code_was_seen_there() {
        let gate = gate();
        let no = |_| panic!("its code is known");
        assert_eq!(
            gate.unload_dynamic(WordList::new(&code(&[0x1000, 0x100, 0x9000, 8])), || (), no),
            UnloadOutcome::Nothing
        );
        let now = now_ns();
        for address in [0x1000, 0x10ff, 0x9007] {
            assert_eq!(gate.look_up(NO_CODE, || gate.is_gone(address, 1)), Some(true));
            assert_eq!(
                gate.look_up(NO_CODE, || gate.is_gone(address, now)),
                Some(true),
                "within what clocks differ"
            );
            assert_eq!(
                gate.look_up(NO_CODE, || gate.is_gone(address, now + 1_000_000_000)),
                Some(false)
            );
        }
        assert_eq!(gate.look_up(NO_CODE, || gate.is_gone(0x1100, 1)), Some(false));
    }

    #[test]
    fn a_dynamic_method_that_is_not_remembered_is_told_of() {
        let gate = gate();
        let before = now_ns();
        let forgotten = AtomicU64::new(0);
        let forget = |at| forgotten.store(at, Ordering::Relaxed);
        for n in 0..GONE as u64 {
            gate.unload_dynamic(WordList::new(&code(&[n * 64, 64])), || (), forget);
        }
        assert_eq!(forgotten.load(Ordering::Relaxed), 0);
        let filled = now_ns();
        gate.unload_dynamic(WordList::new(&code(&[0x100_0000, 64])), || (), forget);
        assert!((before..=filled).contains(&forgotten.load(Ordering::Relaxed)), "the oldest one");
        gate.unload_dynamic(WordList::new(&[]), || (), forget);
        assert!(forgotten.load(Ordering::Relaxed) >= filled, "one whose code nobody knows");
    }

    #[test]
    fn a_dynamic_methods_unload_waits_for_no_look_up_of_other_code() {
        let gate = gate();
        for (about, met) in [
            (NO_CODE, UnloadOutcome::Nothing),
            (0x2000, UnloadOutcome::Nothing),
            (0x1080, UnloadOutcome::Overran),
        ] {
            let unload =
                || gate.unload_dynamic(WordList::new(&code(&[0x1000, 0x100])), || (), |_| ());
            assert_eq!(gate.look_up(about, unload), Some(met), "{about:x}");
        }
    }

    #[test]
    fn an_unload_waits_for_the_look_up_in_flight() {
        let gate = gate();
        let (inside, is_inside) = channel();
        let (go_on, may_go_on) = channel::<()>();
        std::thread::scope(|scope| {
            let gate = &gate;
            scope.spawn(move || {
                gate.look_up(NO_CODE, || {
                    inside.send(()).expect("open");
                    may_go_on.recv().expect("open");
                })
            });
            is_inside.recv().expect("open");
            let unload = scope.spawn(move || gate.unload_module(8));
            // Only once the unload has announced itself may the look-up end.
            while gate.unloading.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            go_on.send(()).expect("open");
            assert_ne!(unload.join().expect("no panic"), UnloadOutcome::Overran);
        });
    }
}
