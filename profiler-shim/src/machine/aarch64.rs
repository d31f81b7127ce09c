//! aarch64 (AAPCS64). Built; no machine to run it was at hand.

use core::arch::asm;
use profiler_protocol::record::Registers;
use profiler_protocol::sync::AtomicU64;

/// Numbers of system calls (`include/uapi/asm-generic/unistd.h`).
pub(crate) mod number {
    pub(crate) const READ: usize = 63;
    pub(crate) const RT_SIGPROCMASK: usize = 135;
    pub(crate) const NANOSLEEP: usize = 101;
    pub(crate) const GETPID: usize = 172;
    pub(crate) const MMAP: usize = 222;
    pub(crate) const MUNLOCK: usize = 229;
    pub(crate) const MUNMAP: usize = 215;
    pub(crate) const MADVISE: usize = 233;
    pub(crate) const OPENAT: usize = 56;
    pub(crate) const FLOCK: usize = 32;
    pub(crate) const MPROTECT: usize = 226;
    pub(crate) const CLOSE: usize = 57;
    pub(crate) const FCNTL: usize = 25;
    pub(crate) const FTRUNCATE: usize = 46;
    pub(crate) const PRCTL: usize = 167;
    pub(crate) const GETTID: usize = 178;
    pub(crate) const FUTEX: usize = 98;
    pub(crate) const CLOCK_GETTIME: usize = 113;
    pub(crate) const FALLOCATE: usize = 47;
    pub(crate) const GETRANDOM: usize = 278;
    pub(crate) const PRLIMIT64: usize = 261;
    pub(crate) const MEMFD_CREATE: usize = 279;
}

/// A system call; the answer is negative errno or the value.
///
/// # Safety
/// As the call's manual page says for these arguments.
pub(crate) unsafe fn call(
    number: usize,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> isize {
    let answer: isize;
    // SAFETY: the kernel keeps all registers but x0 (arch/arm64/kernel/entry.S).
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a.cast_signed() => answer,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    answer
}

/// The thread pointer of this thread; in glibc and musl the control block that it points to lies at
/// the upper end of a thread's stack mapping (nptl/allocatestack.c; musl
/// src/thread/pthread_create.c), for the main thread elsewhere.
#[must_use]
pub(crate) fn thread_block() -> usize {
    let base: usize;
    // SAFETY: reads a register that user code may read.
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

/// Callee-saved registers, sp and pc of this very place. Inlined: what it captures is its caller's
/// frame, which the library's `.eh_frame` describes at that pc.
#[inline(always)]
pub(crate) fn capture(registers: &mut Registers) {
    // SAFETY: stores eight words into `registers` (repr(C), in this order); touches no other memory
    // and no stack.
    unsafe {
        asm!(
            "adr {t}, .",
            "mov {s}, sp",
            "stp {t}, {s}, [{r}]",
            "stp x29, x19, [{r}, #16]",
            "stp x20, x21, [{r}, #32]",
            "stp x22, x23, [{r}, #48]",
            r = in(reg) registers,
            t = out(reg) _,
            s = out(reg) _,
            options(nostack, preserves_flags),
        );
    }
}

/// `words` (at most `to.len()`) words at address `from`, which `syscall::readable` has
/// found so page by page.
pub(crate) fn copy_words(from: usize, to: &[AtomicU64], words: usize) {
    // SAFETY: the source is this thread's live stack, readable as just asked of the kernel; the
    // target is a reserved part of the ring that no other thread writes and nobody reads before its
    // commit. Assembly, so no claim is made about types.
    unsafe {
        asm!(
            "2: cbz {n}, 3f",
            "ldr {t}, [{from}], #8",
            "str {t}, [{to}], #8",
            "sub {n}, {n}, #1",
            "b 2b",
            "3:",
            n = inout(reg) words.min(to.len()) => _,
            from = inout(reg) from => _,
            to = inout(reg) to.as_ptr() => _,
            t = out(reg) _,
            options(nostack, preserves_flags),
        );
    }
}
