//! Free memory goes back to the kernel. Events are made by one thread and freed by the other, so that what a burst of them has taken lies
//! scattered between what stays; glibc gives back the end of a heap only, unless it is asked.

/// Has all threads share a few heaps, before there are any. glibc makes up to eight for each CPU, and whoever starts threads again and again, as each
/// recording does, ends with garbage and something that stays in each of them (seen: 116 MiB resident of which 6 were in use).
#[cfg(target_env = "gnu")]
pub(crate) fn few_heaps() {
    // mallopt(3).
    unsafe extern "C" {
        fn mallopt(parameter: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
    }
    const M_ARENA_MAX: std::ffi::c_int = -8;
    const HEAPS: std::ffi::c_int = 2;
    // SAFETY: it takes the allocator's own locks, and any number is good.
    unsafe { mallopt(M_ARENA_MAX, HEAPS) };
}

/// Other allocators have their own ways.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn few_heaps() {}

/// Gives back all pages that are wholly free.
#[cfg(target_env = "gnu")]
pub(crate) fn give_back() {
    // malloc_trim(3).
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: it takes the allocator's own locks, and any number is good.
    unsafe { malloc_trim(0) };
}

/// Other allocators give back by themselves.
#[cfg(not(target_env = "gnu"))]
pub(crate) fn give_back() {}
