//! Whether the recorder is alive that loaded this process's library by environment. A process that
//! was started for a recorder waits for it at its start and at its end. It waits only while the
//! recorder holds a lock, which the kernel takes from a killed recorder. The lock's file is the
//! library, so a process that could load the library can see the lock, in every namespace.

use crate::runtime::info::Info;
use crate::syscall;
use profiler_protocol::load::{LOCK_PATH_BYTES, START_WAIT_NS};

/// Pause between two looks, and looks between two looks at the lock.
const LOOK_NS: u64 = 500_000;
const LOOKS_OF_LOCK: u64 = 64;

/// True while the recorder holds its lock.
#[must_use]
#[inline(never)]
pub(crate) fn lives(info: Info) -> bool {
    let mut path = [0; LOCK_PATH_BYTES + 2];
    syscall::is_locked(info.lock_in_environment(&mut path))
}

/// Waits for the recorder until `answer` is not 0, and answers that. 0: the recorder is gone, or
/// [`START_WAIT_NS`] are over.
#[must_use]
#[inline(never)]
pub(crate) fn wait_at_start(info: Info, answer: &dyn Fn() -> u64) -> u64 {
    let until = syscall::now_ns().saturating_add(START_WAIT_NS);
    // The number of looks ends it where a seccomp filter denies the clock.
    for look in 0..START_WAIT_NS / LOOK_NS {
        if is_due(look) && !lives(info) {
            return 0;
        }
        let said = answer();
        if said != 0 || syscall::now_ns() >= until {
            return said;
        }
        syscall::sleep_ns(LOOK_NS);
    }
    0
}

/// True for the first of some looks, at which the lock is looked at too.
#[must_use]
pub(crate) fn is_due(look: u64) -> bool {
    look.is_multiple_of(LOOKS_OF_LOCK)
}
