//! Free memory goes back to the kernel. Events are made by one thread and freed by the other, so that what a burst of them has taken lies
//! scattered between what stays; glibc gives back the end of a heap only, unless it is asked.

/// Gives back all pages that are wholly free.
#[cfg(target_env = "gnu")]
pub(super) fn give_back() {
    // malloc_trim(3).
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: it takes the allocator's own locks, and any number is good.
    unsafe { malloc_trim(0) };
}

/// Other allocators give back by themselves.
#[cfg(not(target_env = "gnu"))]
pub(super) fn give_back() {}
