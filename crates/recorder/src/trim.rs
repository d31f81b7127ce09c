//! Free memory goes back to the kernel. Events are made by one thread and freed by the other, so that what a burst of them has taken lies
//! scattered between what stays; glibc gives back the end of a heap only, unless it is asked.

/// Has all threads share a few heaps, and has what is large mapped by itself, before there is any. glibc makes up to eight heaps for each CPU, and whoever
/// starts threads again and again, as each recording does, ends with garbage and something that stays in each of them (seen: 116 MiB resident of which
/// 6 were in use). And after the first large buffer that is freed it takes those up to that size from the heaps (mallopt(3), `M_MMAP_THRESHOLD`), where
/// they stay between what is in use: tables and encoded profiles of each window.
#[cfg(target_env = "gnu")]
pub fn prepare() {
    // mallopt(3).
    unsafe extern "C" {
        fn mallopt(parameter: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
    }
    const M_MMAP_THRESHOLD: std::ffi::c_int = -3;
    const M_ARENA_MAX: std::ffi::c_int = -8;
    const HEAPS: std::ffi::c_int = 2;
    /// glibc's own before it has learned another.
    const LARGE_BYTES: std::ffi::c_int = 128 << 10;
    for (parameter, value) in [(M_ARENA_MAX, HEAPS), (M_MMAP_THRESHOLD, LARGE_BYTES)] {
        // SAFETY: it takes the allocator's own locks, and any number is good.
        unsafe { mallopt(parameter, value) };
    }
}

/// Other allocators have their own ways.
#[cfg(not(target_env = "gnu"))]
pub fn prepare() {}

/// Gives back all pages that are wholly free.
#[cfg(target_env = "gnu")]
pub fn give_back() {
    // malloc_trim(3).
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: it takes the allocator's own locks, and any number is good.
    unsafe { malloc_trim(0) };
}

/// Other allocators give back by themselves.
#[cfg(not(target_env = "gnu"))]
pub fn give_back() {}
