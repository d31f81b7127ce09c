//! Keeps look-ups and unloads apart: a look-up never starts while code is unloading, and an unload waits (briefly) for the one
//! look-up in flight. Two flags, each set before the other is read (Dekker), so both orders are sequentially consistent.

use crate::syscall;
use core::sync::atomic::{AtomicU32, Ordering};

/// An unload waits at most this long: should the look-up need a lock that the unloading thread holds, both go on.
const PATIENCE_NS: u64 = 100_000_000;
const PAUSE_NS: u64 = 50_000;

/// The gate.
#[derive(Default)]
pub struct Gate {
    looking: AtomicU32,
    unloading: AtomicU32,
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
    /// Runs `look` unless something is unloading.
    pub fn look_up<T>(&self, look: impl FnOnce() -> T) -> Option<T> {
        self.looking.store(1, Ordering::SeqCst);
        let answer = (self.unloading.load(Ordering::SeqCst) == 0).then(look);
        self.looking.store(0, Ordering::SeqCst);
        answer
    }

    /// An unload begins; each is ended by [`Gate::unloaded`].
    pub fn unload(&self) -> Met {
        self.unloading.fetch_add(1, Ordering::SeqCst);
        if self.looking.load(Ordering::SeqCst) == 0 {
            return Met::Nothing;
        }
        let until = syscall::now_ns().saturating_add(PATIENCE_NS);
        while self.looking.load(Ordering::SeqCst) != 0 {
            if syscall::now_ns() > until {
                return Met::Overran;
            }
            syscall::sleep_ns(PAUSE_NS);
        }
        Met::Waited
    }

    /// An unload has ended.
    pub fn unloaded(&self) {
        // Never below zero, even when the runtime reports an end whose beginning was before the attach.
        let less = |n: u32| Some(n.saturating_sub(1));
        self.unloading.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::{Gate, Met};
    use std::sync::mpsc::channel;

    #[test]
    fn no_look_up_while_something_unloads() {
        let gate = Gate::default();
        assert_eq!(gate.look_up(|| 5), Some(5));
        assert_eq!(gate.unload(), Met::Nothing);
        assert_eq!(gate.look_up(|| 5), None);
        gate.unloaded();
        gate.unloaded();
        assert_eq!(gate.look_up(|| 5), Some(5));
    }

    #[test]
    fn an_unload_waits_for_the_look_up_in_flight() {
        let gate = Gate::default();
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
            let unload = scope.spawn(move || gate.unload());
            // Only once the unload has announced itself may the look-up end.
            while gate.unloading.load(std::sync::atomic::Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            go_on.send(()).expect("open");
            assert_ne!(unload.join().expect("no panic"), Met::Overran);
        });
    }
}
