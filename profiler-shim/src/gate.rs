//! Keeps look-ups and unloads apart: a look-up never starts while code goes away, and an unload waits for the one look-up in flight. The
//! flags are each set before the other is read (Dekker), so both orders are sequentially consistent.
//!
//! The runtime frees code *after* its last callback about it: a dynamic method when DynamicMethodUnloaded has returned
//! (vm/dynamicmethod.cpp, `LCGMethodResolver::Destroy`), a module's loader heaps when all of its allocator's modules have had their
//! ModuleUnloadFinished (vm/loaderallocator.cpp, `GCLoaderAllocators`), often much later: see `code.rs`. The gate keeps its distance for
//! [`SETTLE_NS`] more.

use crate::syscall;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// An unload waits at most this long: should the look-up need a lock that the unloading thread holds, both go on.
const PATIENCE_NS: u64 = 5_000_000_000;
const PAUSE_NS: u64 = 50_000;
/// Looks within [`PATIENCE_NS`]; also ends the wait where the clock may not be read.
const LOOKS: u64 = PATIENCE_NS / PAUSE_NS;
/// How long after its last callback code may still be on its way out.
const SETTLE_NS: u64 = 100_000_000;
/// Modules that unload at a time; one, as a rule.
const MODULES: usize = 64;
/// Runs of code that went away lately: room for 20,000 dynamic methods a second.
const GONE: usize = 2048;

/// The gate. All zeroes is open.
pub struct Gate {
    looking: AtomicU32,
    /// Modules between their two callbacks, and dynamic methods within theirs.
    unloading: AtomicU32,
    /// Those modules, so that an end is only believed whose beginning was seen.
    modules: [AtomicUsize; MODULES],
    /// Shut until this moment.
    shut_until_ns: AtomicU64,
    /// Code of dynamic methods that went away lately, written while the gate is shut, read while it is open.
    gone: [Gone; GONE],
    gone_count: AtomicU32,
}

struct Gone {
    start: AtomicUsize,
    bytes: AtomicUsize,
    until_ns: AtomicU64,
}

/// What an unload met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Met {
    /// No look-up.
    Nothing,
    /// One, which ended.
    Waited,
    /// One, which took too long.
    Overran,
}

impl Gate {
    /// Runs `look` unless something goes away.
    pub fn look_up<T>(&self, look: impl FnOnce() -> T) -> Option<T> {
        self.looking.store(1, Ordering::SeqCst);
        let open = self.unloading.load(Ordering::SeqCst) == 0
            && self.shut_until_ns.load(Ordering::SeqCst) <= syscall::now_ns();
        let answer = open.then(look);
        self.looking.store(0, Ordering::SeqCst);
        answer
    }

    /// True for the code of a dynamic method that went away lately. Only to be asked within [`Gate::look_up`].
    pub fn is_gone(&self, address: usize) -> bool {
        let now_ns = syscall::now_ns();
        self.gone.iter().any(|gone| {
            // Relaxed: written behind the gate.
            address.wrapping_sub(gone.start.load(Ordering::Relaxed)) < gone.bytes.load(Ordering::Relaxed)
                && now_ns < gone.until_ns.load(Ordering::Relaxed)
        })
    }

    /// A module's unload begins; [`Gate::module_unloaded`] ends it.
    pub fn unload_module(&self, module: usize) -> Met {
        let known = self.modules.iter().any(|m| m.load(Ordering::Relaxed) == module);
        let take =
            |m: &AtomicUsize| m.compare_exchange(0, module, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !known && self.modules.iter().any(take) {
            self.unloading.fetch_add(1, Ordering::SeqCst);
        } else {
            // No room to wait for its end.
            self.shut_for(PATIENCE_NS);
        }
        self.wait_for_look_up()
    }

    /// A module's unload ends. Ignored unless its beginning was seen: it may have been before the attach.
    pub fn module_unloaded(&self, module: usize) {
        let give =
            |m: &AtomicUsize| m.compare_exchange(module, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if module != 0 && self.modules.iter().any(give) {
            self.shut_for(SETTLE_NS);
            self.unloading.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A dynamic method goes away: `ranges` tells its code, as (start, bytes), while no look-up runs.
    pub fn unload_dynamic<R>(&self, ranges: impl FnOnce() -> R) -> Met
    where
        R: IntoIterator<Item = (usize, usize)>,
    {
        self.unloading.fetch_add(1, Ordering::SeqCst);
        let met = self.wait_for_look_up();
        let now_ns = syscall::now_ns();
        let mut known = false;
        for (start, bytes) in ranges() {
            known = true;
            let at = self.gone_count.fetch_add(1, Ordering::Relaxed) as usize % GONE;
            let Some(gone) = self.gone.get(at) else { continue };
            let before_ns = gone.until_ns.swap(now_ns.saturating_add(SETTLE_NS), Ordering::Relaxed);
            gone.start.store(start, Ordering::Relaxed);
            gone.bytes.store(bytes, Ordering::Relaxed);
            // What was there must be kept away from by other means, if it is young.
            self.shut_until_ns.fetch_max(before_ns, Ordering::SeqCst);
        }
        if !known {
            self.shut_for(SETTLE_NS);
        }
        self.unloading.fetch_sub(1, Ordering::SeqCst);
        met
    }

    /// Callbacks were not delivered for a while: ends may have been missed.
    pub fn forget(&self) {
        for module in &self.modules {
            if module.swap(0, Ordering::Relaxed) != 0 {
                self.shut_for(PATIENCE_NS);
                self.unloading.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn shut_for(&self, ns: u64) {
        self.shut_until_ns.fetch_max(syscall::now_ns().saturating_add(ns), Ordering::SeqCst);
    }

    fn wait_for_look_up(&self) -> Met {
        if self.looking.load(Ordering::SeqCst) == 0 {
            return Met::Nothing;
        }
        let until = syscall::now_ns().saturating_add(PATIENCE_NS);
        for _ in 0..LOOKS {
            if self.looking.load(Ordering::SeqCst) == 0 {
                return Met::Waited;
            }
            if syscall::now_ns() > until {
                break;
            }
            syscall::sleep_ns(PAUSE_NS);
        }
        Met::Overran
    }
}

#[cfg(test)]
mod tests {
    use super::{GONE, Gate, Gone, Met, SETTLE_NS};
    use crate::syscall::{now_ns, sleep_ns};
    use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
    use std::sync::mpsc::channel;

    fn gate() -> Gate {
        Gate {
            looking: AtomicU32::new(0),
            unloading: AtomicU32::new(0),
            modules: std::array::from_fn(|_| AtomicUsize::new(0)),
            shut_until_ns: AtomicU64::new(0),
            gone: std::array::from_fn(|_| Gone {
                start: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                until_ns: AtomicU64::new(0),
            }),
            gone_count: AtomicU32::new(0),
        }
    }

    fn wait_until_open(gate: &Gate) -> u64 {
        let began = now_ns();
        while gate.look_up(|| ()).is_none() {
            assert!(now_ns() - began < 60_000_000_000, "the gate stays shut");
            sleep_ns(1_000_000);
        }
        now_ns() - began
    }

    #[test]
    fn no_look_up_while_a_module_unloads_nor_shortly_after() {
        let gate = gate();
        assert_eq!(gate.look_up(|| 5), Some(5));
        let before = now_ns();
        assert_eq!(gate.unload_module(8), Met::Nothing);
        assert_eq!(gate.look_up(|| 5), None);
        gate.module_unloaded(8);
        wait_until_open(&gate);
        assert!(now_ns() - before >= SETTLE_NS);
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
    fn code_of_a_dynamic_method_stays_gone_for_a_while_and_other_code_does_not() {
        let gate = gate();
        let before = now_ns();
        assert_eq!(gate.unload_dynamic(|| [(0x1000, 0x100), (0x9000, 8)]), Met::Nothing);
        let gone = [0x1000, 0x10ff, 0x9007].map(|address| gate.look_up(|| gate.is_gone(address)));
        // Only within the time, which a loaded machine may overrun.
        if now_ns() - before < SETTLE_NS {
            assert_eq!(gone, [Some(true); 3]);
        }
        assert_eq!(gate.look_up(|| gate.is_gone(0x1100)), Some(false));
        while gate.look_up(|| gate.is_gone(0x1000)) == Some(true) {
            sleep_ns(1_000_000);
        }
        assert!(now_ns() - before >= SETTLE_NS);
    }

    #[test]
    fn more_dynamic_methods_than_are_remembered_shut_the_gate() {
        let gate = gate();
        let before = now_ns();
        for n in 0..=GONE {
            gate.unload_dynamic(|| [(n * 64, 64)]);
        }
        if now_ns() - before < SETTLE_NS {
            assert!(gate.shut_until_ns.load(Ordering::SeqCst) >= before + SETTLE_NS);
        }
        wait_until_open(&gate);
    }

    #[test]
    fn an_unload_waits_for_the_look_up_in_flight() {
        let gate = gate();
        let (inside, is_inside) = channel();
        let (go_on, may_go_on) = channel::<()>();
        std::thread::scope(|scope| {
            let gate = &gate;
            scope.spawn(move || {
                gate.look_up(|| {
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
            assert_ne!(unload.join().expect("no panic"), Met::Overran);
        });
    }
}
