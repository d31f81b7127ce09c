//! The instance's memory: the sealed memfd as words, and the page that tells a forked child to keep
//! quiet.

use crate::syscall;
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use profiler_protocol::exact::LEAST_ADDRESS_SPACE;
use profiler_protocol::layout::Geometry;
use profiler_protocol::producer::ProducerRegion;
use profiler_protocol::sync::AtomicU64;

/// Words of `profiler_protocol::layout::REGION_NAME` as the system call wants it.
const NAME: &core::ffi::CStr = c"perfusion-shim";

/// Lives in a page of its own that a forked child sees zeroed: there, nothing may touch the region,
/// which is not mapped.
#[repr(C)]
pub(crate) struct Guard {
    /// 1 while the region may be touched (never in a forked child, nor after the instance has said
    /// goodbye).
    pub(crate) alive: AtomicU32,
    /// 1 while somebody listens: the event path does nothing else.
    pub(crate) listening: AtomicU32,
}

const GUARD_BYTES: usize = 4096;

/// The mapped region and its guard.
pub(crate) struct RegionMapping {
    memory: NonNull<c_void>,
    bytes: usize,
    guard: NonNull<c_void>,
}

impl RegionMapping {
    /// Makes both.
    #[must_use]
    pub(crate) fn new(geometry: Geometry) -> Option<Self> {
        let bytes = usize::try_from(geometry.region_bytes()).ok()?;
        let filled = syscall::is_memory_accounted();
        let memory = syscall::map_sealed_memfd(NAME, bytes, bytes, filled)?;
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
    /// The caller keeps the mapping until the last use of what it gets: [`RegionMapping::unmap`]
    /// comes after that.
    #[must_use]
    pub(crate) unsafe fn region(&self, geometry: Geometry) -> Option<ProducerRegion<'static>> {
        let words = self.memory.cast::<AtomicU64>();
        // SAFETY: `bytes` bytes of readable and writable memory, page-aligned; other processes
        // change it, hence atomics. The seals keep the file from shrinking under the mapping.
        let words = unsafe { core::slice::from_raw_parts(words.as_ptr(), self.bytes / 8) };
        ProducerRegion::new(words, geometry)
    }

    /// The guard.
    ///
    /// # Safety
    /// As [`RegionMapping::region`].
    #[must_use]
    pub(crate) unsafe fn guard(&self) -> &'static Guard {
        // SAFETY: a zeroed page, of which a `Guard` is the first 8 bytes; all its bit patterns are
        // valid.
        unsafe { self.guard.cast::<Guard>().as_ref() }
    }

    /// Gives the memory back.
    ///
    /// # Safety
    /// Nothing that came from `region` or `guard` is used any more, by any thread.
    pub(crate) unsafe fn unmap(&self) {
        // SAFETY: from `Mapping::new`; the caller's promise.
        unsafe { syscall::unmap(self.memory, self.bytes) };
        // SAFETY: as above.
        unsafe { syscall::unmap(self.guard, GUARD_BYTES) };
    }
}

/// The memory of exact mode, which is never given back: a main profiler that sees allocations stays
/// until the process ends (0x80131372).
pub(crate) mod lasting {
    use super::{AtomicU64, GUARD_BYTES, LEAST_ADDRESS_SPACE, NonNull, c_void, syscall};
    use core::sync::atomic::{AtomicUsize, Ordering};

    /// # Safety
    /// `words` words of zeroed memory that is never unmapped.
    unsafe fn words(memory: NonNull<c_void>, words: usize) -> &'static [AtomicU64] {
        // SAFETY: the caller's promise; mappings are page-aligned, and all bit patterns are valid.
        unsafe { core::slice::from_raw_parts(memory.cast::<AtomicU64>().as_ptr(), words) }
    }

    /// True where there is so little address space that the process would lack what exact mode
    /// takes.
    #[must_use]
    pub(crate) fn is_scarce() -> bool {
        syscall::address_space() < LEAST_ADDRESS_SPACE
    }

    /// Words of a sealed memfd from its beginning on, which nobody has touched yet.
    pub(crate) struct TableMemory(&'static [AtomicU64]);

    /// A sealed memfd of so many words, of which the first `mapped` are there; not in a forked
    /// child.
    #[must_use]
    pub(crate) fn shared(
        name: &core::ffi::CStr,
        count: usize,
        mapped: usize,
    ) -> Option<TableMemory> {
        let memory =
            syscall::map_sealed_memfd(name, count.checked_mul(8)?, mapped.checked_mul(8)?, false)?;
        // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
        Some(TableMemory(unsafe { words(memory, mapped) }))
    }

    impl TableMemory {
        /// Those before word `second`, which are open, and rooms from there to word `third` and
        /// from there to the end.
        #[must_use]
        pub(crate) fn in_parts(
            self,
            second: usize,
            third: usize,
        ) -> (&'static [AtomicU64], GrowableWords, GrowableWords) {
            let (before, last) = self.0.split_at_checked(third).unwrap_or((self.0, &[]));
            let (first, middle) = before.split_at_checked(second).unwrap_or((before, &[]));
            (first, room_of(middle), room_of(last))
        }
    }

    /// Takes the access to a part of a [`TableMemory`], to which nobody else refers. Where the
    /// kernel does not, as with larger pages, all of it is open.
    fn room_of(part: &'static [AtomicU64]) -> GrowableWords {
        let memory = NonNull::from(part).cast::<c_void>();
        // SAFETY: of one mapping of a memfd, of which nobody has touched a word.
        let is_shut = unsafe { syscall::shut(memory.addr().get(), part.len().wrapping_mul(8)) };
        let open = if is_shut { 0 } else { part.len() };
        GrowableWords { memory, most: part.len(), open: AtomicUsize::new(open) }
    }

    /// So many words, all of them open.
    #[inline(never)]
    #[must_use]
    pub(crate) fn whole(count: usize) -> Option<&'static [AtomicU64]> {
        let memory = syscall::map_private(count.checked_mul(8)?, false)?;
        // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
        Some(unsafe { words(memory, count) })
    }

    /// Address space for words, of which those that are needed are opened, in steps.
    pub(crate) struct GrowableWords {
        memory: NonNull<c_void>,
        most: usize,
        /// How many words are open. Stored with release once they are, loaded with acquire by
        /// whoever opens and relaxed by readers, who get the numbers of words from those who opened
        /// them.
        open: AtomicUsize,
    }

    // SAFETY: the memory is one mapping for as long as the process lives, and is used as atomics
    // only.
    unsafe impl Sync for GrowableWords {}
    // SAFETY: as above.
    unsafe impl Send for GrowableWords {}

    impl GrowableWords {
        /// Room for `most` words; for `least` where address space is limited, and for none where it
        /// is so small that the app would lack what is reserved here, or the kernel refuses.
        #[inline(never)]
        #[must_use]
        pub(crate) fn new(most: usize, least: usize) -> Self {
            let is_limited = most > least && syscall::is_address_space_limited();
            let wanted = if is_limited { [least, 0] } else { [most, least] };
            let is_scarce = is_scarce();
            let made =
                wanted.into_iter().filter(|count| *count != 0 && !is_scarce).find_map(|most| {
                    let memory = syscall::reserve(most.checked_mul(8)?)?;
                    Some((memory, most))
                });
            let (memory, most) = made.unwrap_or((NonNull::<AtomicU64>::dangling().cast(), 0));
            Self { memory, most, open: AtomicUsize::new(0) }
        }

        /// Words there could be.
        #[inline]
        #[must_use]
        pub(crate) fn most(&self) -> usize {
            self.most
        }

        /// Those that are open.
        #[inline]
        #[must_use]
        pub(crate) fn words(&self) -> &'static [AtomicU64] {
            let open = self.open.load(Ordering::Relaxed);
            // SAFETY: so many are open, none of them where there is no memory, and none is ever
            // closed; zeroed at first.
            unsafe { words(self.memory, open) }
        }

        /// Opens words until there are so many. False: there is no room, or no memory.
        #[inline]
        #[must_use]
        pub(crate) fn opens(&self, count: usize) -> bool {
            count <= self.open.load(Ordering::Acquire) || self.open_more(count)
        }

        #[cold]
        #[inline(never)]
        fn open_more(&self, count: usize) -> bool {
            if count > self.most {
                return false;
            }
            // What is open and not used stays small beside what is used: dumps have it, and locked
            // memory.
            let wanted = count.wrapping_add(count / 8).wrapping_add(STEP);
            let until = wanted.next_multiple_of(STEP).min(self.most);
            let from = self.open.load(Ordering::Acquire);
            let Some(more) = until.checked_sub(from) else { return true };
            let address = self.memory.addr().get().wrapping_add(from.wrapping_mul(8));
            // SAFETY: within the mapping; steps are whole pages, and the kernel rounds the
            // mapping's end up to one.
            let opened = unsafe { syscall::open(address, more.wrapping_mul(8)) };
            if opened {
                // Another thread may have opened more meanwhile.
                self.open.fetch_max(until, Ordering::Release);
            }
            opened
        }
    }

    /// Words of a step: 64 KiB, a page where pages are largest.
    const STEP: usize = 1 << 13;

    /// A page that a forked child sees zeroed.
    #[must_use]
    pub(crate) fn guard() -> Option<&'static [AtomicU64]> {
        let memory = syscall::map_private(GUARD_BYTES, true)?;
        // SAFETY: just mapped with this size, zeroed; nobody unmaps it.
        Some(unsafe { words(memory, GUARD_BYTES / 8) })
    }
}

#[cfg(test)]
mod tests {
    use super::RegionMapping;
    use super::lasting::GrowableWords;
    use core::sync::atomic::Ordering;
    use profiler_protocol::layout::Geometry;

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }

    #[test]
    fn what_is_reserved_cannot_be_touched_before_it_is_opened_and_is_opened_in_small_steps() {
        let room = GrowableWords::new(1 << 33, 1 << 20);
        assert!(room.words().is_empty());
        let mut opened = 0;
        for count in [1, 1 << 13, 1 << 20, 1 << 21] {
            assert!(room.opens(count));
            let words = room.words();
            assert!(
                (count..=count + count / 8 + (2 << 13)).contains(&words.len()),
                "{}",
                words.len()
            );
            assert!(words.len() >= opened);
            opened = words.len();
            let last = words.last().expect("open");
            last.store(7, Ordering::Relaxed);
            let behind = (&raw const *last).addr() + 8;
            assert!(!crate::syscall::readable(behind));
        }
        assert!(!room.opens(room.most() + 1));
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let start = format!("{:x}-", (&raw const room.words()[0]).addr());
        let of_it = smaps.split_once(&start).expect("mapped").1;
        let flags = of_it.lines().find(|line| line.starts_with("VmFlags:")).expect("flags");
        assert!(flags.contains(" dc") && flags.contains(" dd"), "no fork, no dump: {flags}");
    }

    #[test]
    fn a_forked_child_sees_itself_as_not_alive_and_has_no_region() {
        let mapping = RegionMapping::new(Geometry::DEFAULT).expect("memory");
        // SAFETY: unmapped at the end of this test, after the last use.
        let guard = unsafe { mapping.guard() };
        guard.alive.store(1, Ordering::Relaxed);
        guard.listening.store(1, Ordering::Relaxed);
        // SAFETY: the child below only reads memory, makes two system calls and leaves.
        let child = unsafe { fork() };
        if child == 0 {
            let quiet = guard.alive.load(Ordering::Relaxed) == 0
                && guard.listening.load(Ordering::Relaxed) == 0;
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
