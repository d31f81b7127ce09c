//! The kernel's clock without a system call, which costs ten times as much: `clock_gettime` of the
//! library that the kernel maps into each process (vdso(7)). Looked for in its own table and not
//! asked of the C library, whose function other libraries may have taken the place of
//! (libfaketime): the probes' times are the kernel's, and these must be the same.

use core::ffi::{CStr, c_ulong};
use core::mem::transmute;
use core::ptr::with_exposed_provenance;
use core::sync::atomic::{AtomicUsize, Ordering};

#[cfg(target_arch = "aarch64")]
const NAME: &CStr = c"__kernel_clock_gettime";
#[cfg(target_arch = "x86_64")]
const NAME: &CStr = c"__vdso_clock_gettime";

/// `struct timespec`.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Timespec {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: i64,
}

/// What the clock is told to be read with: the clock's number, and where to write its time. Answers
/// 0, or negative errno.
type ClockGettime = unsafe extern "C" fn(i32, *mut Timespec) -> i32;

/// Where the function is: [`UNKNOWN`], [`NONE`], or its address.
static CLOCK: AtomicUsize = AtomicUsize::new(UNKNOWN);
const UNKNOWN: usize = 0;
const NONE: usize = 1;

// Bound at load time to whichever C library the process has; it answers from what the kernel told
// the process at its start.
unsafe extern "C" {
    fn getauxval(kind: c_ulong) -> c_ulong;
}

/// CLOCK_MONOTONIC; `None` where the kernel maps no such library, or has another clock.
pub(crate) fn monotonic() -> Option<Timespec> {
    // Relaxed: a number, which is the same whoever finds it; what it points to was there before the
    // process began.
    let address = match CLOCK.load(Ordering::Relaxed) {
        UNKNOWN => {
            let found = find().unwrap_or(NONE);
            CLOCK.store(found, Ordering::Relaxed);
            found
        }
        known => known,
    };
    if address == NONE {
        return None;
    }
    // SAFETY: the address of the function of that name in the kernel's own library, which is of
    // this type and stays mapped (vdso(7)).
    let clock_gettime =
        unsafe { transmute::<*const (), ClockGettime>(with_exposed_provenance(address)) };
    let mut time = Timespec::default();
    // SAFETY: writes one timespec, which lives here. 1 is CLOCK_MONOTONIC.
    let answer = unsafe { clock_gettime(1, &raw mut time) };
    (answer == 0).then_some(time)
}

fn find() -> Option<usize> {
    const AT_SYSINFO_EHDR: c_ulong = 33;
    // SAFETY: takes a number, changes nothing.
    let base =
        usize::try_from(unsafe { getauxval(AT_SYSINFO_EHDR) }).ok().filter(|base| *base != 0)?;
    // The header alone until it has said how much there is; it is at the start of a page.
    VdsoImage { base, bytes: 4096 }.whole()?.function(NAME)
}

/// An ELF image in memory, as the kernel lays its own out: one segment that begins with the file's
/// header and holds everything, at addresses from its start. (arch/*/*vdso*/vdso*.lds.S, lib/vdso).
#[derive(Clone, Copy)]
struct VdsoImage {
    base: usize,
    bytes: usize,
}

impl VdsoImage {
    /// The same, as large as its segment says.
    fn whole(self) -> Option<Self> {
        const PT_LOAD: u32 = 1;
        let loaded = self.segment(PT_LOAD)?;
        let (offset, address, bytes) = loaded;
        // Linked to addresses from 0: what its tables say are offsets.
        (offset == 0 && address == 0).then_some(Self { bytes, ..self })
    }

    fn function(self, name: &CStr) -> Option<usize> {
        const PT_DYNAMIC: u32 = 2;
        const STRINGS: u64 = 5;
        const SYMBOLS: u64 = 6;
        const SYMBOL_BYTES: usize = 24;
        let (_, dynamic, bytes) = self.segment(PT_DYNAMIC)?;
        let entry = |wanted: u64| {
            let mut at = (dynamic..dynamic.checked_add(bytes)?).step_by(16);
            let at = at.find(|at| self.word(*at) == Some(wanted))?;
            usize::try_from(self.word(at.checked_add(8)?)?).ok()
        };
        let (symbols, strings) = (entry(SYMBOLS)?, entry(STRINGS)?);
        // The names come right after the table of those that have them (the linker script of each
        // architecture).
        let symbol = (symbols..strings).step_by(SYMBOL_BYTES).find(|symbol| {
            let start = self.half(*symbol).and_then(|start| usize::try_from(start).ok());
            start
                .and_then(|start| strings.checked_add(start))
                .is_some_and(|start| self.holds(start, name))
        })?;
        let offset = usize::try_from(self.word(symbol.checked_add(8)?)?).ok()?;
        (offset != 0 && offset < self.bytes).then(|| self.base.checked_add(offset))?
    }

    /// File offset, address and size of the first segment of a kind.
    fn segment(self, kind: u32) -> Option<(usize, usize, usize)> {
        const HEADER_BYTES: usize = 56;
        const MOST: usize = 16;
        let first = usize::try_from(self.word(32)?).ok()?;
        let mut headers = (first..).step_by(HEADER_BYTES).take(MOST);
        let header = headers.find(|header| self.half(*header) == Some(kind))?;
        let word = |at: usize| usize::try_from(self.word(header.checked_add(at)?)?).ok();
        Some((word(8)?, word(16)?, word(40)?))
    }

    fn holds(self, at: usize, text: &CStr) -> bool {
        let mut at = at;
        text.to_bytes_with_nul().iter().all(|expected| {
            let byte = self.read::<u8>(at);
            at = at.wrapping_add(1);
            byte == Some(*expected)
        })
    }

    fn word(self, at: usize) -> Option<u64> {
        self.read(at)
    }

    fn half(self, at: usize) -> Option<u32> {
        self.read(at)
    }

    fn read<T: Copy>(self, at: usize) -> Option<T> {
        let end = at.checked_add(size_of::<T>())?;
        let address = self.base.checked_add(at).filter(|_| end <= self.bytes)?;
        // SAFETY: inside the image, which the kernel keeps mapped and does not change. All bytes
        // make a number, which is all `T` is in this file.
        Some(unsafe { with_exposed_provenance::<T>(address).read_unaligned() })
    }
}

#[cfg(test)]
mod tests {
    use super::{NAME, NONE, UNKNOWN, VdsoImage, find, monotonic};
    use crate::syscall::clock_of_the_kernel;

    #[test]
    fn the_kernels_library_is_found_and_its_clock_is_that_of_the_system_call() {
        assert!(!matches!(find(), None | Some(UNKNOWN | NONE)));
        for _ in 0..1_000 {
            let before = clock_of_the_kernel(1);
            let time = monotonic().expect("a clock");
            let between =
                time.seconds.cast_unsigned() * 1_000_000_000 + time.nanoseconds.cast_unsigned();
            assert!((before..=clock_of_the_kernel(1)).contains(&between));
        }
    }

    #[test]
    fn what_is_cut_or_has_no_such_function_is_not_called() {
        let file = std::fs::read("/proc/self/exe").expect("this program");
        let of = |bytes: usize| VdsoImage { base: file.as_ptr().expose_provenance(), bytes };
        // Not the kernel's: more than one segment, and none of its names.
        assert_eq!(of(file.len()).whole().and_then(|image| image.function(NAME)), None);
        for bytes in 0..4096 {
            assert_eq!(of(bytes).function(NAME), None, "{bytes}");
        }
    }
}
