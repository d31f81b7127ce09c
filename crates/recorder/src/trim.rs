//! Gives free memory back to the kernel. One thread makes events and another frees them, so the
//! memory of a burst lies scattered. glibc gives back only the end of a heap, unless it is asked.

/// Makes all threads share a few heaps, and maps large buffers one by one. To be called before
/// there is a second thread. glibc makes up to eight heaps per CPU. A program that keeps starting
/// threads leaves garbage in each (seen: 116 MiB resident, 6 in use). After the first large buffer
/// is freed, glibc takes buffers up to that size from the heaps (mallopt(3), `M_MMAP_THRESHOLD`).
/// There they lie between memory in use.
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
