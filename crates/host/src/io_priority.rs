//! The class and priority a thread's input and output has with the disk: two system calls that
//! rustix does not have.

use std::ffi::{c_int, c_long};
use std::io;

#[cfg(target_arch = "x86_64")]
const SET_AND_GET: [c_long; 2] = [251, 252];
#[cfg(target_arch = "aarch64")]
const SET_AND_GET: [c_long; 2] = [30, 31];

/// `IOPRIO_WHO_PROCESS`: one thread, whatever its name says.
const THREAD: c_int = 1;
/// This one.
const SELF: c_int = 0;
const BEST_EFFORT: c_int = 2;
const IDLE: c_int = 3;
/// The last of the priorities of a class.
const LAST: c_int = 7;
const CLASS_SHIFT: c_int = 13;

unsafe extern "C" {
    // syscall(2).
    fn syscall(number: c_long, ...) -> c_long;
}

/// Makes this thread, and those that it makes from now on, one of the last of its class where its
/// requests come before that. Threads that are idle already, and have the disk when nobody else
/// wants it, stay so.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn step_back() -> io::Result<()> {
    let [set, get] = SET_AND_GET;
    // SAFETY: it takes two numbers and touches no memory of this process.
    let now = unsafe { syscall(get, THREAD, SELF) };
    let now =
        c_int::try_from(now).ok().filter(|now| *now >= 0).ok_or_else(io::Error::last_os_error)?;
    let (class, priority) = (now >> CLASS_SHIFT, now & LAST);
    if class == IDLE || class == BEST_EFFORT && priority == LAST {
        return Ok(());
    }
    // SAFETY: it takes three numbers and touches no memory of this process.
    let refused = unsafe { syscall(set, THREAD, SELF, BEST_EFFORT << CLASS_SHIFT | LAST) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
