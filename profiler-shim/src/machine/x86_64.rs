//! x86-64 (System V ABI, x86-64 supplement).

use core::arch::asm;
use profiler_protocol::record::Registers;
use profiler_protocol::sync::AtomicU64;

/// Numbers of system calls (`arch/x86/entry/syscalls/syscall_64.tbl`).
pub(crate) mod number {
    pub(crate) const READ: usize = 0;
    pub(crate) const RT_SIGPROCMASK: usize = 14;
    pub(crate) const NANOSLEEP: usize = 35;
    pub(crate) const GETPID: usize = 39;
    pub(crate) const MMAP: usize = 9;
    pub(crate) const MUNLOCK: usize = 150;
    pub(crate) const MUNMAP: usize = 11;
    pub(crate) const MADVISE: usize = 28;
    pub(crate) const OPENAT: usize = 257;
    pub(crate) const FLOCK: usize = 73;
    pub(crate) const MPROTECT: usize = 10;
    pub(crate) const CLOSE: usize = 3;
    pub(crate) const FCNTL: usize = 72;
    pub(crate) const FTRUNCATE: usize = 77;
    pub(crate) const PRCTL: usize = 157;
    pub(crate) const GETTID: usize = 186;
    pub(crate) const FUTEX: usize = 202;
    pub(crate) const CLOCK_GETTIME: usize = 228;
    pub(crate) const FALLOCATE: usize = 285;
    pub(crate) const GETRANDOM: usize = 318;
    pub(crate) const PRLIMIT64: usize = 302;
    pub(crate) const MEMFD_CREATE: usize = 319;
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
    // SAFETY: the kernel keeps all registers but rax, rcx and r11 (System V ABI, x86-64 supplement,
    // A.2.1).
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number.cast_signed() => answer,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// The thread control block of this thread; in glibc and musl it lies at the upper end of a
/// thread's stack mapping (nptl/allocatestack.c; musl src/thread/pthread_create.c), for the main
/// thread elsewhere.
#[must_use]
pub(crate) fn thread_block() -> usize {
    let base: usize;
    // SAFETY: fs:0 is the thread control block's pointer to itself (ELF TLS ABI, variant II),
    // readable in every thread.
    unsafe { asm!("mov {}, fs:[0]", out(reg) base, options(nostack, readonly, preserves_flags)) };
    base
}

/// The callee-saved registers, rsp and rip of this very place. Inlined: what it captures is its
/// caller's frame, which the library's `.eh_frame` describes at that rip.
#[inline(always)]
pub(crate) fn capture(registers: &mut Registers) {
    // SAFETY: stores eight words into `registers` (repr(C), in this order); touches no other memory
    // and no stack.
    unsafe {
        asm!(
            "lea {t}, [rip]",
            "mov [{r}], {t}",
            "mov [{r} + 8], rsp",
            "mov [{r} + 16], rbp",
            "mov [{r} + 24], rbx",
            "mov [{r} + 32], r12",
            "mov [{r} + 40], r13",
            "mov [{r} + 48], r14",
            "mov [{r} + 56], r15",
            r = in(reg) registers,
            t = out(reg) _,
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
            "rep movsq",
            inout("rcx") words.min(to.len()) => _,
            inout("rsi") from => _,
            inout("rdi") to.as_ptr() => _,
            options(nostack, preserves_flags),
        );
    }
}
