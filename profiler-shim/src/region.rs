//! The instance's memory: the sealed memfd as words, and the page that tells a forked child to keep quiet.

use crate::syscall;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use profiler_protocol::layout::Geometry;
use profiler_protocol::producer::Region;
use profiler_protocol::sync::AtomicU64;

/// Words of `profiler_protocol::layout::REGION_NAME` as the system call wants it.
const NAME: &core::ffi::CStr = c"perfusion-shim";

/// Lives in a page of its own that a forked child sees zeroed: there, nothing may touch the region, which is not mapped.
#[repr(C)]
pub struct Guard {
    /// 1 while the region may be touched (never in a forked child, nor after the instance has said goodbye).
    pub alive: AtomicU32,
    /// 1 while somebody listens: the event path does nothing else.
    pub listening: AtomicU32,
}

const GUARD_BYTES: usize = 4096;

/// The mapped region and its guard.
pub struct Mapping {
    memory: NonNull<c_void>,
    bytes: usize,
    guard: NonNull<c_void>,
}

impl Mapping {
    /// Makes both.
    #[must_use]
    pub fn new(geometry: Geometry) -> Option<Self> {
        let bytes = usize::try_from(geometry.region_bytes()).ok()?;
        let memory = syscall::map_sealed_memfd(NAME, bytes)?;
        let Some(guard) = syscall::map_private(GUARD_BYTES, true) else {
            // SAFETY: made two lines above, known to nobody.
            unsafe { syscall::unmap(memory, bytes) };
            return None;
        };
        Some(Self { memory, bytes, guard })
    }

    /// The region's words.
    ///
    /// # Safety
    /// The caller keeps the mapping until the last use of what it gets: [`Mapping::unmap`] comes after that.
    #[must_use]
    pub unsafe fn region(&self, geometry: Geometry) -> Option<Region<'static>> {
        let words = self.memory.cast::<AtomicU64>();
        // SAFETY: `bytes` bytes of readable and writable memory, page-aligned; other processes change it, hence atomics. The
        // seals keep the file from shrinking under the mapping.
        let words = unsafe { core::slice::from_raw_parts(words.as_ptr(), self.bytes / 8) };
        Region::new(words, geometry)
    }

    /// The guard.
    ///
    /// # Safety
    /// As [`Mapping::region`].
    #[must_use]
    pub unsafe fn guard(&self) -> &'static Guard {
        // SAFETY: a zeroed page, of which a `Guard` is the first 8 bytes; all its bit patterns are valid.
        unsafe { self.guard.cast::<Guard>().as_ref() }
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// Nothing that came from `region` or `guard` is used any more, by any thread.
    pub unsafe fn unmap(&self) {
        // SAFETY: from `Mapping::new`; the caller's promise.
        unsafe { syscall::unmap(self.memory, self.bytes) };
        // SAFETY: as above.
        unsafe { syscall::unmap(self.guard, GUARD_BYTES) };
    }
}

/// The memory of exact mode, which is never given back: a main profiler that sees allocations stays until the process ends (0x80131372).
pub mod lasting {
    use super::{AtomicU64, GUARD_BYTES, NonNull, c_void, syscall};

    /// # Safety
    /// `words` words of zeroed memory that is never unmapped.
    unsafe fn words(memory: NonNull<c_void>, words: usize) -> &'static [AtomicU64] {
        // SAFETY: the caller's promise; mappings are page-aligned, and all bit patterns are valid.
        unsafe { core::slice::from_raw_parts(memory.cast::<AtomicU64>().as_ptr(), words) }
    }

    /// A sealed memfd of so many words; not there in a forked child.
    #[must_use]
    pub fn shared(name: &core::ffi::CStr, count: usize) -> Option<&'static [AtomicU64]> {
        let memory = syscall::map_sealed_memfd(name, count.checked_mul(8)?)?;
        // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
        Some(unsafe { words(memory, count) })
    }

    /// Room for `most` words; for `least` where address space is counted (RLIMIT_AS, `vm.overcommit_memory` 2) or the machine has little, for there it is the
    /// app that would lack what is taken here.
    #[inline(never)]
    #[must_use]
    pub fn room(most: usize, least: usize) -> Option<&'static [AtomicU64]> {
        let is_limited = most > least && syscall::is_address_space_limited();
        let most = if is_limited { least } else { most };
        [most, least].into_iter().find_map(|count| {
            let memory = syscall::reserve(count.checked_mul(8)?)?;
            // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
            Some(unsafe { words(memory, count) })
        })
    }

    /// A page that a forked child sees zeroed.
    #[must_use]
    pub fn guard() -> Option<&'static [AtomicU64]> {
        let memory = syscall::map_private(GUARD_BYTES, true)?;
        // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
        Some(unsafe { words(memory, GUARD_BYTES / 8) })
    }
}

#[cfg(test)]
mod tests {
    use super::Mapping;
    use core::sync::atomic::Ordering;
    use profiler_protocol::layout::Geometry;

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }

    #[test]
    fn a_forked_child_sees_itself_as_not_alive_and_has_no_region() {
        let mapping = Mapping::new(Geometry::DEFAULT).expect("memory");
        // SAFETY: unmapped at the end of this test, after the last use.
        let guard = unsafe { mapping.guard() };
        guard.alive.store(1, Ordering::Relaxed);
        guard.listening.store(1, Ordering::Relaxed);
        // SAFETY: the child below only reads memory, makes two system calls and leaves.
        let child = unsafe { fork() };
        if child == 0 {
            let quiet =
                guard.alive.load(Ordering::Relaxed) == 0 && guard.listening.load(Ordering::Relaxed) == 0;
            let unmapped = !crate::syscall::readable(mapping.memory.addr().get());
            // SAFETY: ends the child without running anything of the parent's.
            unsafe { _exit(i32::from(!(quiet && unmapped))) };
        }
        let mut status = -1;
        // SAFETY: writes one status, which lives here.
        unsafe { waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(guard.alive.load(Ordering::Relaxed), 1);
        // SAFETY: `guard` is not used after.
        unsafe { mapping.unmap() };
    }
}
