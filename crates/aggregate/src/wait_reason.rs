//! Words for what a thread waits for, from its state, its system call and where in the kernel it
//! waits.

use super::threads::{WaitReason, WaitStateKey};
use std::sync::Arc;

/// The `wait_reason` label. `kernel` are the names of the wait's kernel frames, innermost first.
///
/// In this order: what the scheduler knows (`preempted`, `throttled`), locks inside the kernel,
/// faults, then the system call's family, with what is behind the descriptor for reads and writes.
/// `io` is block input or output, where nothing says better what for.
#[must_use]
pub fn name(reason: WaitReason, kernel: &[Arc<str>]) -> &'static str {
    let at = |sites: &[&str]| kernel.iter().any(|frame| sites.contains(&plain(frame)));
    match reason.state {
        WaitStateKey::Preempted if at(YIELD) => return "yield",
        WaitStateKey::Preempted => return "preempted",
        WaitStateKey::Stolen => return "stolen",
        WaitStateKey::Throttled => return "throttled",
        WaitStateKey::Other => return "stopped",
        WaitStateKey::Interruptible | WaitStateKey::Uninterruptible => {}
    }
    // A mutex of the program's that inherits priorities is waited for as one of the kernel's is
    // (kernel/futex/pi.c).
    let is_kernels = !at(&["futex_lock_pi", "futex_wait_requeue_pi"]);
    if is_kernels
        && kernel.iter().any(|frame| LOCKS.iter().any(|lock| plain(frame).starts_with(lock)))
    {
        return "lock";
    }
    if at(FAULT) {
        return if reason.io { "page_fault:io" } else { "page_fault" };
    }
    let family = reason.syscall.unwrap_or("kernel");
    match family {
        "read" | "write" => direction(family, kernel, reason.io),
        "restart" if at(&["do_restart_poll"]) => "poll",
        "restart" if kernel.iter().any(|frame| plain(frame).starts_with("futex_")) => "futex",
        // The last of those that go on with what a stop has interrupted (`restart_block.fn`).
        "restart" if !kernel.is_empty() => "sleep",
        "restart" => "syscall",
        "recv" => "read:socket",
        "send" => "write:socket",
        "kernel" | "syscall" | "open" | "sync" | "memory" | "exec" | "clone" | "exit"
            if reason.io =>
        {
            "io"
        }
        family => family,
    }
}

/// A kernel function's name without what the compiler appended to it (`.part.0`, `.constprop.0`).
fn plain(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// `sched_yield` (kernel/sched/syscalls.c).
const YIELD: &[&str] = &["do_sched_yield", "__do_sys_sched_yield", "__x64_sys_sched_yield"];

/// Slow paths of the kernel's sleeping locks (kernel/locking/), by how their names begin.
const LOCKS: &[&str] = &[
    "__mutex_lock",
    "mutex_lock",
    "__ww_mutex_lock",
    "rwsem_down_",
    "__down_common",
    "__down",
    "rt_mutex_slowlock",
    "__rt_mutex_slowlock",
    "rtlock_slowlock",
    "percpu_rwsem_wait",
    "__percpu_down_read",
];

/// A page fault of the program, or of the kernel on its behalf (arch/x86/mm/fault.c, mm/memory.c).
const FAULT: &[&str] = &[
    "exc_page_fault",
    "asm_exc_page_fault",
    "handle_mm_fault",
    "handle_userfault",
    "do_user_addr_fault",
];

/// What a read or write waits for, by where it does (fs/pipe.c, net/, drivers/tty/, fs/).
fn direction(family: &'static str, kernel: &[Arc<str>], io: bool) -> &'static str {
    // Function, name for reading, name for writing.
    const SITES: &[(&str, &str, &str)] = &[
        ("pipe_read", "read:pipe", "read:pipe"),
        ("anon_pipe_read", "read:pipe", "read:pipe"),
        ("fifo_pipe_read", "read:pipe", "read:pipe"),
        ("pipe_write", "write:pipe", "write:pipe"),
        ("anon_pipe_write", "write:pipe", "write:pipe"),
        ("fifo_pipe_write", "write:pipe", "write:pipe"),
        ("eventfd_read", "read:eventfd", "read:eventfd"),
        ("eventfd_write", "write:eventfd", "write:eventfd"),
        ("timerfd_read", "read:timer", "read:timer"),
        ("timerfd_read_iter", "read:timer", "read:timer"),
        ("signalfd_read", "read:signal", "read:signal"),
        ("signalfd_read_iter", "read:signal", "read:signal"),
        ("inotify_read", "read:inotify", "read:inotify"),
        ("userfaultfd_read", "read:userfault", "read:userfault"),
        ("userfaultfd_read_iter", "read:userfault", "read:userfault"),
        ("n_tty_read", "read:tty", "read:tty"),
        ("n_tty_write", "write:tty", "write:tty"),
        ("tty_read", "read:tty", "read:tty"),
        ("tty_write", "write:tty", "write:tty"),
        ("fuse_simple_request", "read:fuse", "write:fuse"),
        ("fuse_dev_do_read", "read:fuse", "read:fuse"),
        ("sock_read_iter", "read:socket", "read:socket"),
        ("sock_recvmsg", "read:socket", "read:socket"),
        ("sock_write_iter", "write:socket", "write:socket"),
        ("sock_sendmsg", "write:socket", "write:socket"),
    ];
    let site =
        kernel.iter().find_map(|frame| SITES.iter().find(|(site, ..)| *site == plain(frame)));
    match (site, family) {
        (Some((_, read, _)), "read") => read,
        (Some((.., write)), _) => write,
        (None, _) if io => "io",
        (None, family) => family,
    }
}

/// Family of a system call by its x86-64 number (`arch/x86/entry/syscalls/syscall_64.tbl` of
/// Linux); `syscall` for all others.
#[must_use]
pub fn family(number: u32) -> &'static str {
    match number {
        0 | 17 | 19 | 295 | 327 | 40 | 275 | 326 => "read",
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
        208 | 333 => "aio",
        219 => "restart",
        426 => "io_uring",
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
    use crate::threads::{WaitReason, WaitStateKey};
    use std::sync::Arc;

    fn reason(state: WaitStateKey, syscall: Option<u32>, io: bool, sites: &[&str]) -> &'static str {
        let sites: Vec<Arc<str>> = sites.iter().map(|&site| site.into()).collect();
        name(
            WaitReason { state, syscall: syscall.map(super::family), io, suspended: false },
            &sites,
        )
    }

    #[test]
    fn what_the_scheduler_knows_wins_over_the_system_call() {
        use WaitStateKey::{Interruptible, Other, Preempted, Throttled};
        assert_eq!(reason(Preempted, Some(202), false, &[]), "preempted");
        assert_eq!(reason(Preempted, Some(24), false, &["schedule", "do_sched_yield"]), "yield");
        assert_eq!(reason(Throttled, Some(202), false, &[]), "throttled");
        assert_eq!(reason(Other, Some(202), false, &["do_signal_stop"]), "stopped");
        assert_eq!(reason(Interruptible, Some(202), false, &["futex_wait"]), "futex");
        assert_eq!(reason(Interruptible, Some(9_999), false, &[]), "syscall");
        // io_getevents and io_pgetevents (libaio), io_uring_enter.
        let rings = [208, 333, 426].map(|number| reason(Interruptible, Some(number), false, &[]));
        assert_eq!(rings, ["aio", "aio", "io_uring"]);
    }

    #[test]
    fn what_a_stop_has_interrupted_goes_on_as_what_it_was() {
        let of = |sites: &[&str]| reason(WaitStateKey::Interruptible, Some(219), false, sites);
        assert_eq!(of(&["schedule", "do_sys_poll", "do_restart_poll", "do_syscall_64"]), "poll");
        assert_eq!(
            of(&["schedule", "futex_do_wait", "futex_wait_restart", "do_syscall_64"]),
            "futex"
        );
        assert_eq!(of(&["schedule", "do_nanosleep", "hrtimer_nanosleep_restart"]), "sleep");
        assert_eq!(of(&[]), "syscall");
    }

    #[test]
    fn a_mutex_that_inherits_priorities_is_the_programs() {
        let sites = ["schedule", "rt_mutex_slowlock_block", "futex_lock_pi", "do_futex"];
        assert_eq!(reason(WaitStateKey::Interruptible, Some(202), false, &sites), "futex");
    }

    #[test]
    fn locks_and_faults_are_told_from_the_system_call_they_happen_in() {
        use WaitStateKey::{Interruptible, Uninterruptible};
        let lock =
            ["schedule", "rwsem_down_write_slowpath", "down_write_killable", "vm_mmap_pgoff"];
        assert_eq!(reason(Uninterruptible, Some(9), false, &lock), "lock");
        assert_eq!(reason(Uninterruptible, Some(1), false, &["__mutex_lock.constprop.0"]), "lock");
        let fault = [
            "schedule",
            "handle_userfault",
            "handle_mm_fault",
            "exc_page_fault",
            "asm_exc_page_fault",
        ];
        assert_eq!(reason(Interruptible, None, false, &fault), "page_fault");
        assert_eq!(
            reason(Uninterruptible, Some(0), true, &["folio_wait_bit", "handle_mm_fault"]),
            "page_fault:io"
        );
        assert_eq!(reason(Interruptible, None, false, &["kthread"]), "kernel");
    }

    #[test]
    fn reads_and_writes_say_what_is_behind_the_descriptor() {
        let read = |io, sites: &[&str]| reason(WaitStateKey::Interruptible, Some(0), io, sites);
        assert_eq!(read(false, &["schedule", "anon_pipe_read", "vfs_read"]), "read:pipe");
        assert_eq!(
            read(false, &["unix_stream_read_generic", "sock_recvmsg", "sock_read_iter"]),
            "read:socket"
        );
        assert_eq!(read(true, &["io_schedule", "folio_wait_bit_common", "filemap_read"]), "io");
        assert_eq!(read(false, &["vfs_read"]), "read");
        assert_eq!(reason(WaitStateKey::Interruptible, Some(45), false, &[]), "read:socket");
    }
}
