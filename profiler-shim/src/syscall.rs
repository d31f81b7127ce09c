//! System calls and the few things asked of the thread library. What is the processor's is in
//! [`crate::machine`]. The raw calls are private; what is public is safe to call with any
//! arguments.

use crate::machine::call;
use crate::machine::number::{
    CLOCK_GETTIME, CLOSE, FALLOCATE, FCNTL, FLOCK, FTRUNCATE, FUTEX, GETPID, GETRANDOM, GETTID,
    MADVISE, MEMFD_CREATE, MMAP, MPROTECT, MUNLOCK, MUNMAP, NANOSLEEP, OPENAT, PRCTL, PRLIMIT64,
    READ, RT_SIGPROCMASK,
};
use crate::vdso::{self, Timespec};
use core::ffi::c_void;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU32;

/// CLOCK_MONOTONIC, nanoseconds.
#[must_use]
pub(crate) fn now_ns() -> u64 {
    vdso::monotonic().map_or_else(|| clock_of_the_kernel(1), nanoseconds)
}

/// CPU time of this thread (CLOCK_THREAD_CPUTIME_ID), nanoseconds; 0 where the kernel does not
/// tell.
#[must_use]
pub(crate) fn thread_cpu_ns() -> u64 {
    clock_of_the_kernel(3)
}

/// CPU time of a thread of this process, nanoseconds; 0 where the kernel does not tell. A thread's
/// clock is its id inverted, then CPUCLOCK_PERTHREAD and CPUCLOCK_SCHED
/// (include/linux/posix-timers_types.h).
#[must_use]
pub(crate) fn cpu_ns_of(thread: u32) -> u64 {
    let id = !thread.cast_signed() << 3 | 4 | 2;
    clock_of_the_kernel(id as usize)
}

/// A clock, asked of the kernel.
pub(crate) fn clock_of_the_kernel(id: usize) -> u64 {
    let mut time = Timespec::default();
    // SAFETY: writes one timespec, which lives here.
    unsafe { call(CLOCK_GETTIME, id, (&raw mut time).addr(), 0, 0, 0, 0) };
    nanoseconds(time)
}

fn nanoseconds(time: Timespec) -> u64 {
    time.seconds
        .cast_unsigned()
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.nanoseconds.cast_unsigned())
}

/// True while somebody holds an exclusive `flock` on the file at this path. False too where there
/// is none, or no system call to ask with.
#[must_use]
pub(crate) fn is_locked(path: &core::ffi::CStr) -> bool {
    const SHARED_NONBLOCK: usize = 1 | 4;
    const EWOULDBLOCK: isize = -11;
    let Some(file) = open_for_reading(path) else { return false };
    // SAFETY: our own descriptor, which nobody else knows.
    let answer = unsafe { call(FLOCK, file, SHARED_NONBLOCK, 0, 0, 0, 0) };
    // SAFETY: as above; a lock of ours goes with it.
    unsafe { call(CLOSE, file, 0, 0, 0, 0, 0) };
    answer == EWOULDBLOCK
}

/// Opens a file without waiting for it.
fn open_for_reading(path: &core::ffi::CStr) -> Option<usize> {
    const AT_FDCWD: usize = -100isize as usize;
    const RDONLY_NONBLOCK_CLOEXEC: usize = 0o4000 | 0o2000000;
    // SAFETY: reads a C string that lives as long as the call.
    let file =
        unsafe { call(OPENAT, AT_FDCWD, path.as_ptr().addr(), RDONLY_NONBLOCK_CLOEXEC, 0, 0, 0) };
    usize::try_from(file).ok()
}

/// True where the kernel gives no more memory than it has (`vm.overcommit_memory` 2). There it may
/// refuse a page of a memfd that is touched first, by a SIGBUS. False too where it does not tell.
#[must_use]
pub(crate) fn is_memory_accounted() -> bool {
    let Some(file) = open_for_reading(c"/proc/sys/vm/overcommit_memory") else { return false };
    let mut first = 0u8;
    // SAFETY: writes at most the one byte of `first`.
    unsafe { call(READ, file, (&raw mut first).expose_provenance(), 1, 0, 0, 0) };
    // SAFETY: our own descriptor, which nobody else knows.
    unsafe { call(CLOSE, file, 0, 0, 0, 0, 0) };
    first == b'2'
}

/// This thread's id, as the process sees it.
#[must_use]
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes nothing, changes nothing.
    let id = unsafe { call(GETTID, 0, 0, 0, 0, 0, 0) };
    u32::try_from(id).unwrap_or(0)
}

/// This process's id, as it sees itself.
#[must_use]
pub(crate) fn process_id() -> u32 {
    // SAFETY: takes nothing, changes nothing.
    let id = unsafe { call(GETPID, 0, 0, 0, 0, 0, 0) };
    u32::try_from(id).unwrap_or(0)
}

/// A random number; the clock where the kernel gives none.
#[must_use]
pub(crate) fn random() -> u64 {
    let mut word = 0u64;
    // SAFETY: writes at most the 8 bytes of `word`. Flag 1: do not block.
    let got = unsafe { call(GETRANDOM, (&raw mut word).addr(), 8, 1, 0, 0, 0) };
    if got == 8 { word } else { now_ns() ^ u64::from(thread_id()) << 40 }
}

/// Sleeps for `ns` nanoseconds, or less when a signal comes.
pub(crate) fn sleep_ns(ns: u64) {
    let time = timespec(ns);
    // SAFETY: reads one timespec, which lives here; the remainder is not asked for.
    unsafe { call(NANOSLEEP, (&raw const time).addr(), 0, 0, 0, 0, 0) };
}

fn timespec(ns: u64) -> Timespec {
    Timespec {
        seconds: (ns / 1_000_000_000).cast_signed(),
        nanoseconds: (ns % 1_000_000_000).cast_signed(),
    }
}

/// Sleeps while `word` is `value`, at most `ns` nanoseconds.
pub(crate) fn wait(word: &AtomicU32, value: u32, ns: u64) {
    let time = timespec(ns);
    // SAFETY: `word` and `time` live as long as the call. 128 is FUTEX_WAIT_PRIVATE.
    unsafe {
        call(FUTEX, word.as_ptr().addr(), 128, value as usize, (&raw const time).addr(), 0, 0)
    };
}

/// Wakes whoever waits for `word`.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: `word` is only used as a key. 129 is FUTEX_WAKE_PRIVATE.
    unsafe { call(FUTEX, word.as_ptr().addr(), 129, i32::MAX as usize, 0, 0, 0) };
}

/// True when the 8 bytes at `address` can be read now. Asks the kernel, so it never faults:
/// `rt_sigprocmask` copies the new mask from user memory first (kernel/signal.c,
/// `SYSCALL_DEFINE4(rt_sigprocmask)`) and only then refuses a bad `how`.
#[must_use]
pub(crate) fn readable(address: usize) -> bool {
    // SAFETY: `how` is invalid, so nothing is changed whatever the address holds.
    let answer = unsafe { call(RT_SIGPROCMASK, usize::MAX, address, 0, 8, 0, 0) };
    answer == EINVAL
}

/// The word at `address`, if it can be read.
#[must_use]
pub(crate) fn read_word(address: usize) -> Option<u64> {
    if address & 7 != 0 || !readable(address) {
        return None;
    }
    let word = core::ptr::with_exposed_provenance::<u64>(address);
    // SAFETY: aligned, and just found readable; callers ask for memory that the gate keeps where it
    // is.
    Some(unsafe { word.read_volatile() })
}

const MADV_DONTNEED: usize = 4;
const EINVAL: isize = -22;

/// A new mapping without access. It takes no more memory than what is touched of it, also where the
/// program has called `mlockall(MCL_FUTURE)`: the kernel would fill it when it is opened.
fn map(bytes: usize, flags: usize, file: usize) -> Option<NonNull<c_void>> {
    // SAFETY: at a place the kernel chooses: PROT_NONE.
    let memory = pointer(unsafe { call(MMAP, 0, bytes, 0, flags, file, 0) })?;
    // Refused for locked memory only. A program that locks nothing may have a seccomp filter that
    // ends it for the call below.
    // SAFETY: the mapping just made, in whole, of which nobody has touched anything.
    let answer = unsafe { call(MADVISE, memory.addr().get(), bytes, MADV_DONTNEED, 0, 0, 0) };
    if answer == EINVAL {
        // SAFETY: the mapping just made, in whole.
        unsafe { call(MUNLOCK, memory.addr().get(), bytes, 0, 0, 0, 0) };
    }
    Some(memory)
}

/// Fresh private memory, zeroed; in a forked child it reads as zeros again when `wiped_in_child`.
#[must_use]
pub(crate) fn map_private(bytes: usize, wiped_in_child: bool) -> Option<NonNull<c_void>> {
    const MADV_WIPEONFORK: usize = 18;
    const PRIVATE_ANONYMOUS: usize = 0x22;
    let memory = map(bytes, PRIVATE_ANONYMOUS, usize::MAX)?;
    // SAFETY: the mapping just made, in whole.
    let mut is_ready = unsafe { open(memory.addr().get(), bytes) };
    if is_ready && wiped_in_child {
        // SAFETY: the mapping just made, in whole.
        let answer = unsafe { call(MADVISE, memory.addr().get(), bytes, MADV_WIPEONFORK, 0, 0, 0) };
        is_ready = answer == 0;
    }
    if !is_ready {
        // SAFETY: the mapping just made, which nobody else knows.
        unsafe { unmap(memory, bytes) };
        return None;
    }
    Some(memory)
}

const MADV_DONTFORK: usize = 10;
const MADV_DONTDUMP: usize = 16;

/// Address space for as long as the process lives, without access: no dump gathers it, no
/// `mlockall` fills it, and no forked child has it.
#[must_use]
pub(crate) fn reserve(bytes: usize) -> Option<NonNull<c_void>> {
    const PRIVATE_ANONYMOUS_NORESERVE: usize = 0x4022;
    let memory = map(bytes, PRIVATE_ANONYMOUS_NORESERVE, usize::MAX)?;
    for advice in [MADV_DONTFORK, MADV_DONTDUMP] {
        // SAFETY: the mapping just made, in whole. Where the kernel refuses, a dump or a fork costs
        // more.
        unsafe { call(MADVISE, memory.addr().get(), bytes, advice, 0, 0, 0) };
    }
    Some(memory)
}

/// Takes the access to a part of what [`map_sealed_memfd`] made, until [`open`] gives it back.
/// False: the kernel does not.
///
/// # Safety
/// `address` and `bytes` are within one such mapping, of which nobody has touched this part.
#[must_use]
pub(crate) unsafe fn shut(address: usize, bytes: usize) -> bool {
    // SAFETY: the caller's promise. PROT_NONE. Where pages are larger than the address says,
    // nothing changes.
    let answer = unsafe { call(MPROTECT, address, bytes, 0, 0, 0, 0) };
    answer == 0
}

/// Gives access to a part of what [`map`] made: zeroed memory, of which none counts as used before
/// it is written. False: the kernel has none (`vm.overcommit_memory` 2).
///
/// # Safety
/// `address` is a multiple of a page's bytes, and so is `bytes` unless it goes to the mapping's
/// end; both are within one such mapping.
#[must_use]
pub(crate) unsafe fn open(address: usize, bytes: usize) -> bool {
    // SAFETY: the caller's promise. PROT_READ|PROT_WRITE.
    let answer = unsafe { call(MPROTECT, address, bytes, 3, 0, 0, 0) };
    answer == 0
}

/// True where a mapping of 1 TiB is refused: address space is limited.
#[must_use]
pub(crate) fn is_address_space_limited() -> bool {
    const MUCH: usize = 1 << 40;
    let Some(memory) = reserve(MUCH) else { return true };
    // SAFETY: the mapping just made, which nobody else knows.
    unsafe { call(MUNMAP, memory.addr().get(), MUCH, 0, 0, 0, 0) };
    false
}

/// Most bytes of address space the process may have (RLIMIT_AS).
#[must_use]
pub(crate) fn address_space() -> usize {
    limit(9)
}

/// A soft limit of the process.
fn limit(of: usize) -> usize {
    let mut limits = [usize::MAX; 2];
    // SAFETY: `limits` is a struct rlimit64, soft limit first, and lives as long as the call;
    // nothing is set.
    unsafe { call(PRLIMIT64, 0, of, 0, limits.as_mut_ptr().expose_provenance(), 0, 0) };
    let [soft, _] = limits;
    soft
}

fn pointer(address: isize) -> Option<NonNull<c_void>> {
    if (-4095..=0).contains(&address) {
        return None;
    }
    NonNull::new(core::ptr::with_exposed_provenance_mut(address.cast_unsigned()))
}

/// A sealed memfd of `bytes` (zeroed), of which the first `mapped` are mapped, shared and not
/// inherited by forked children; no descriptor is kept. `filled`: it has its memory already, so
/// that nobody is refused a page of it later.
#[must_use]
pub(crate) fn map_sealed_memfd(
    name: &core::ffi::CStr,
    bytes: usize,
    mapped: usize,
    filled: bool,
) -> Option<NonNull<c_void>> {
    const CLOEXEC_SEALING: usize = 3;
    const NOEXEC_SEAL: usize = 8; // Linux 6.3
    const F_ADD_SEALS: usize = 1033;
    const SEAL_SHRINK_GROW: usize = 1 | 2 | 4;
    const SHARED: usize = 1;
    const RLIMIT_FSIZE: usize = 1;
    // Beyond that limit the kernel does not refuse, it sends SIGXFSZ (`inode_newsize_ok`,
    // fs/attr.c).
    if limit(RLIMIT_FSIZE) < bytes {
        return None;
    }
    // SAFETY: `name` is a C string that lives as long as the call.
    let mut file = unsafe {
        call(MEMFD_CREATE, name.as_ptr().addr(), CLOEXEC_SEALING | NOEXEC_SEAL, 0, 0, 0, 0)
    };
    if file < 0 {
        // SAFETY: as above, without the newer flag.
        file = unsafe { call(MEMFD_CREATE, name.as_ptr().addr(), CLOEXEC_SEALING, 0, 0, 0, 0) };
    }
    let file = usize::try_from(file).ok()?;
    // SAFETY: our own file, not yet shared.
    let mut sized = unsafe { call(FTRUNCATE, file, bytes, 0, 0, 0, 0) };
    if filled && sized == 0 {
        // SAFETY: as above.
        sized = unsafe { call(FALLOCATE, file, 0, 0, mapped, 0, 0) };
    }
    // SAFETY: our own file.
    let sealed = unsafe { call(FCNTL, file, F_ADD_SEALS, SEAL_SHRINK_GROW, 0, 0, 0) };
    let memory = map(mapped, SHARED, file);
    // SAFETY: our own descriptor, which nobody else knows.
    unsafe { call(CLOSE, file, 0, 0, 0, 0, 0) };
    let memory = memory?;
    // SAFETY: the mapping just made, in whole.
    let opened = unsafe { open(memory.addr().get(), mapped) };
    // SAFETY: the mapping just made, in whole.
    let advised = unsafe { call(MADVISE, memory.addr().get(), mapped, MADV_DONTFORK, 0, 0, 0) };
    // SAFETY: as above. A refusal makes a dump larger.
    unsafe { call(MADVISE, memory.addr().get(), mapped, MADV_DONTDUMP, 0, 0, 0) };
    if sized != 0 || sealed != 0 || advised != 0 || !opened {
        // SAFETY: the mapping just made, which nobody else knows.
        unsafe { call(MUNMAP, memory.addr().get(), mapped, 0, 0, 0, 0) };
        return None;
    }
    Some(memory)
}

/// Gives memory back.
///
/// # Safety
/// It came from `map_private` or `map_sealed_memfd` with this size, and nothing refers to it any
/// more.
pub(crate) unsafe fn unmap(memory: NonNull<c_void>, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { call(MUNMAP, memory.addr().get(), bytes, 0, 0, 0, 0) };
}

/// Blocks all signals an app uses in this thread and answers the old mask. Left open: those a
/// faulting instruction raises, and the real-time ones, since the runtime interrupts threads that
/// run managed code with one (pal/src/exception/signal.cpp).
#[must_use]
pub(crate) fn block_signals() -> u64 {
    // Bit n − 1 is signal n: 4 ILL, 5 TRAP, 7 BUS, 8 FPE, 11 SEGV stay open, and so do 32 and
    // above.
    const OPEN: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10 | !0 << 31;
    let (new, mut old) = (!OPEN, 0u64);
    // SAFETY: reads and writes one 8-byte mask each, which live here. 0 is SIG_BLOCK.
    unsafe { call(RT_SIGPROCMASK, 0, (&raw const new).addr(), (&raw mut old).addr(), 8, 0, 0) };
    old
}

/// Restores what [`block_signals`] answered.
pub(crate) fn restore_signals(mask: u64) {
    // SAFETY: reads one 8-byte mask, which lives here. 2 is SIG_SETMASK.
    unsafe { call(RT_SIGPROCMASK, 2, (&raw const mask).addr(), 0, 8, 0, 0) };
}

/// Names this thread (at most 15 bytes are kept).
pub(crate) fn name_thread(name: &core::ffi::CStr) {
    // SAFETY: reads a C string that lives as long as the call. 15 is PR_SET_NAME.
    unsafe { call(PRCTL, 15, name.as_ptr().addr(), 0, 0, 0, 0) };
}

/// A thread of our own: `pthread_t`.
pub(crate) type PthreadId = usize;

/// Its stack. It runs managed code, and musl's default of 128 KiB is not enough for that: the
/// runtime gives its own threads 1.5 MiB there (`GetDefaultStackSizeSetting`, vm/threads.cpp). Only
/// what is touched takes memory.
const STACK_BYTES: usize = 2 << 20;

/// Room for a `pthread_attr_t`: 56 bytes in musl and in glibc for x86-64, 64 in glibc for aarch64.
#[repr(C, align(16))]
struct Attributes([u64; 16]);

// Bound at load time to whichever C library the process has.
unsafe extern "C" {
    fn pthread_create(
        thread: *mut PthreadId,
        attributes: *const c_void,
        start: extern "C" fn(*mut c_void) -> *mut c_void,
        argument: *mut c_void,
    ) -> i32;
    fn pthread_join(thread: PthreadId, result: *mut *mut c_void) -> i32;
    fn pthread_attr_init(attributes: *mut c_void) -> i32;
    fn pthread_attr_setstacksize(attributes: *mut c_void, bytes: usize) -> i32;
    fn pthread_attr_destroy(attributes: *mut c_void) -> i32;
}

/// Starts a thread with the app's signals blocked.
///
/// # Safety
/// `argument` is what `start` expects, and stays valid until [`join`].
pub(crate) unsafe fn spawn(
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> Option<PthreadId> {
    let mut thread: PthreadId = 0;
    let mut room = Attributes([0; 16]);
    let attributes: *mut c_void = (&raw mut room).cast();
    // SAFETY: `room` is large enough for the library's type, and lives as long as it is used.
    if unsafe { pthread_attr_init(attributes) } != 0 {
        return None;
    }
    // SAFETY: initialised above.
    let mut answer = unsafe { pthread_attr_setstacksize(attributes, STACK_BYTES) };
    if answer == 0 {
        let mask = block_signals();
        // SAFETY: the caller's promise about `argument`; initialised attributes.
        answer = unsafe { pthread_create(&raw mut thread, attributes, start, argument) };
        restore_signals(mask);
    }
    // SAFETY: initialised above, and not used after.
    unsafe { pthread_attr_destroy(attributes) };
    (answer == 0).then_some(thread)
}

/// Waits until the thread has left the library's code for good.
///
/// # Safety
/// `thread` came from [`spawn`], is joined once, and is not the caller.
pub(crate) unsafe fn join(thread: PthreadId) {
    // SAFETY: the caller's promise; the result is not asked for.
    unsafe { pthread_join(thread, null_mut()) };
}

/// Runs `work` on a thread of its own and waits for its end. False when there was none to be had.
pub(crate) fn run_apart<T: Sync>(work: fn(&T), argument: &T) -> bool {
    struct ThreadCall<'a, T> {
        work: fn(&T),
        argument: &'a T,
    }
    extern "C" fn enter<T: Sync>(call: *mut c_void) -> *mut c_void {
        // SAFETY: the `Call` below, which outlives the thread because it is joined.
        let call = unsafe { &*call.cast::<ThreadCall<'_, T>>() };
        (call.work)(call.argument);
        null_mut()
    }
    let mut call = ThreadCall { work, argument };
    // SAFETY: `enter` expects a `Call` of the same type; it lives until the join.
    let Some(thread) = (unsafe { spawn(enter::<T>, (&raw mut call).cast()) }) else { return false };
    // SAFETY: just spawned, joined once, by another thread.
    unsafe { join(thread) };
    true
}

#[cfg(test)]
mod tests {
    use super::{
        map_private, map_sealed_memfd, now_ns, random, readable, sleep_ns, thread_id, unmap,
    };

    #[test]
    fn unreadable_addresses_are_told_from_readable_ones() {
        let here = 5u64;
        assert!(readable((&raw const here).addr()));
        assert_eq!(super::read_word((&raw const here).addr()), Some(5));
        assert_eq!(super::read_word(8), None);
        assert!(!readable(0));
        assert!(!readable(0x7fff_ffff_f000));
        assert!(!readable(usize::MAX - 7));
        let page = map_private(4096, true).expect("memory");
        assert!(readable(page.addr().get()));
        // SAFETY: made above, not used after.
        unsafe { unmap(page, 4096) };
    }

    #[test]
    fn the_clock_moves_and_ids_are_real() {
        let before = now_ns();
        sleep_ns(1_000_000);
        assert!(now_ns() >= before + 1_000_000);
        assert_ne!(random(), random());
        assert!(thread_id() > 0);
        assert_eq!(super::process_id(), std::process::id());
    }

    #[test]
    fn work_done_apart_is_done_on_another_thread_before_it_returns() {
        let there = core::sync::atomic::AtomicU32::new(0);
        let work = |there: &core::sync::atomic::AtomicU32| {
            there.store(thread_id(), core::sync::atomic::Ordering::Relaxed);
        };
        assert!(super::run_apart(work, &there));
        let there = there.into_inner();
        assert!(there != 0 && there != thread_id());
    }

    #[test]
    fn work_done_apart_has_the_stack_that_managed_code_needs() {
        unsafe extern "C" {
            fn pthread_self() -> super::PthreadId;
            fn pthread_getattr_np(
                thread: super::PthreadId,
                attributes: *mut core::ffi::c_void,
            ) -> i32;
            fn pthread_attr_getstacksize(
                attributes: *const core::ffi::c_void,
                bytes: *mut usize,
            ) -> i32;
        }
        let found = core::sync::atomic::AtomicUsize::new(0);
        let work = |found: &core::sync::atomic::AtomicUsize| {
            let (mut room, mut bytes) = (super::Attributes([0; 16]), 0);
            let attributes: *mut core::ffi::c_void = (&raw mut room).cast();
            // SAFETY: takes nothing, changes nothing.
            let me = unsafe { pthread_self() };
            // SAFETY: of this thread, into room that is large enough.
            assert_eq!(unsafe { pthread_getattr_np(me, attributes) }, 0);
            // SAFETY: initialised by the call above.
            assert_eq!(unsafe { pthread_attr_getstacksize(attributes, &raw mut bytes) }, 0);
            // SAFETY: as above, and not used after.
            unsafe { super::pthread_attr_destroy(attributes) };
            found.store(bytes, core::sync::atomic::Ordering::Relaxed);
        };
        assert!(super::run_apart(work, &found));
        assert_eq!(found.into_inner(), super::STACK_BYTES);
    }

    #[test]
    fn the_region_is_found_by_its_name_in_maps() {
        let memory = map_sealed_memfd(c"perfusion-test", 8192, 8192, false).expect("memory");
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let line = format!("{:x}-", memory.addr());
        assert!(
            maps.lines()
                .any(|l| l.starts_with(&line) && l.ends_with("/memfd:perfusion-test (deleted)"))
        );
        // SAFETY: made above, not used after.
        unsafe { unmap(memory, 8192) };
    }

    #[test]
    fn a_filled_region_has_its_memory_before_it_is_touched_and_another_has_not() {
        use std::os::unix::fs::MetadataExt as _;
        let bytes = 1 << 20;
        for filled in [false, true] {
            let memory = map_sealed_memfd(c"perfusion-test", bytes, bytes, filled).expect("memory");
            let start = memory.addr().get();
            let file = format!("/proc/self/map_files/{start:x}-{:x}", start + bytes);
            match std::fs::metadata(&file) {
                // Blocks are of 512 bytes (stat(2)).
                Ok(found) => assert_eq!(found.blocks() != 0, filled, "{} blocks", found.blocks()),
                // Only root may follow it.
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
            }
            // SAFETY: made above, not used after.
            unsafe { unmap(memory, bytes) };
        }
        let setting = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").expect("a setting");
        assert_eq!(super::is_memory_accounted(), setting.trim() == "2");
    }
}
