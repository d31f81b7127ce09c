//! Words for what a thread waits for, from its state and its system call.

use super::threads::{WaitReason, WaitStateKey};

/// The `wait_reason` label: `preempted`, the system call's family, or the scheduler state where there is no system call.
#[must_use]
pub fn name(reason: WaitReason) -> &'static str {
    match (reason.state, reason.syscall) {
        (WaitStateKey::Preempted, _) => "preempted",
        (WaitStateKey::Stolen, _) => "stolen",
        (_, Some(number)) => syscall_x86_64(number),
        // Outside a system call a thread sleeps only inside a fault or an exception handler of the kernel.
        (WaitStateKey::Uninterruptible, None) => "page_fault",
        (WaitStateKey::Interruptible, None) => "kernel",
        (WaitStateKey::Other, None) => "stopped",
    }
}

/// Family of a system call by its x86-64 number (`arch/x86/entry/syscalls/syscall_64.tbl` of Linux).
fn syscall_x86_64(number: u32) -> &'static str {
    match number {
        0 | 17 | 19 | 295 | 327 => "read",
        1 | 18 | 20 | 296 | 328 => "write",
        7 | 271 => "poll",
        23 | 270 => "select",
        232 | 281 | 441 => "epoll",
        24 => "yield",
        34 => "pause",
        35 | 230 => "sleep",
        42 => "connect",
        43 | 288 => "accept",
        44 | 46 | 307 => "send",
        45 | 47 | 299 => "recv",
        61 | 247 => "wait_child",
        72 | 73 => "file_lock",
        74 | 75 | 26 | 277 => "sync",
        128 | 130 => "signal",
        202 | 449 | 455 | 456 => "futex",
        208 | 426 => "io_uring",
        2 | 257 | 437 => "open",
        9 | 10 | 11 | 12 | 25 | 28 => "memory",
        56 | 57 | 58 | 435 => "clone",
        59 | 322 => "exec",
        60 | 231 => "exit",
        65 | 220 => "semaphore",
        69 | 70 | 242 | 243 => "message_queue",
        _ => "syscall",
    }
}

#[cfg(test)]
mod tests {
    use super::name;
    use crate::aggregate::threads::{WaitReason, WaitStateKey};

    #[test]
    fn preemption_wins_over_the_system_call() {
        let reason = |state, syscall| name(WaitReason { state, syscall });
        assert_eq!(reason(WaitStateKey::Preempted, Some(202)), "preempted");
        assert_eq!(reason(WaitStateKey::Interruptible, Some(202)), "futex");
        assert_eq!(reason(WaitStateKey::Uninterruptible, None), "page_fault");
        assert_eq!(reason(WaitStateKey::Interruptible, Some(9_999)), "syscall");
    }
}
