//! What is asked of the runtime about objects in its heap.

use super::hresult::S_OK;
use super::info::Info;
use super::slot::invoke;
use crate::repeat::mix;
use core::ffi::c_void;
use core::sync::atomic::AtomicU64;

/// What is asked of the runtime while objects are counted.
pub(crate) trait RuntimeHeap {
    /// Bytes of an object, not rounded up.
    fn size(&self, object: usize) -> Option<u64>;
    /// True for an object that no collection looks at (the frozen heap, .NET 8+).
    fn is_frozen(&self, object: usize) -> bool;
    /// Writes where the generations lie, four words each: generation (low half), first address,
    /// bytes in use, bytes reserved. Answers how many.
    fn generations(&self, to: &[AtomicU64]) -> usize;
    /// A number that tells a class from another one at the same address later, not 0; and whether
    /// it is an array.
    fn identity(&self, class: usize) -> (u64, bool);
    /// The word at an address in an object or at the beginning of its class, which is its method
    /// table. While nothing can free either.
    fn word(&self, address: usize) -> u64;
}

/// What a look needs of the runtime.
pub(crate) trait Objects {
    /// Class of a living object.
    fn class_of(&self, object: usize) -> Option<usize>;
}

/// The runtime's handles (Info13, .NET 7+).
pub(crate) trait Handles {
    /// A weak handle on the object at `address`.
    fn create(&self, address: usize) -> Option<usize>;
    /// Gives it up.
    fn destroy(&self, handle: usize);
    /// The object, 0 when it is dead, `None` when the runtime refuses to say.
    fn object(&self, handle: usize) -> Option<usize>;
    /// The generation a living object is in (3: large, 4: pinned object heap).
    fn generation(&self, object: usize) -> Option<u8>;
}

impl Info {
    /// Calls `each` for every object in the heap, while the world stands still. False: the runtime
    /// refuses, or cannot (before .NET 9).
    #[must_use]
    pub(crate) fn each_object<F: FnMut(usize)>(self, mut each: F) -> bool {
        type Callback = extern "C" fn(usize, *mut c_void) -> i32;
        let state = (&raw mut each).cast::<c_void>();
        self.level >= 15
            && invoke!(self.pointer, 114, (Callback, *mut c_void), hand_on::<F>, state) == S_OK
    }
}

impl Objects for Info {
    #[inline]
    fn class_of(&self, object: usize) -> Option<usize> {
        let mut class = 0usize;
        let answer = invoke!(self.pointer, 3, (usize, *mut usize), object, &raw mut class);
        (answer == S_OK).then_some(class)
    }
}

impl RuntimeHeap for Info {
    fn size(&self, object: usize) -> Option<u64> {
        let mut bytes = 0usize;
        let answer = invoke!(self.pointer, 80, (usize, *mut usize), object, &raw mut bytes);
        (answer == S_OK && bytes != 0).then_some(bytes as u64)
    }

    fn is_frozen(&self, object: usize) -> bool {
        let mut frozen = 0i32;
        let answer = invoke!(self.pointer, 94, (usize, *mut i32), object, &raw mut frozen);
        answer == S_OK && frozen != 0
    }

    fn generations(&self, to: &[AtomicU64]) -> usize {
        let most = u32::try_from(to.len() / 4).unwrap_or(0);
        let mut count = 0u32;
        // COR_PRF_GC_GENERATION_RANGE: generation (4 bytes and 4 of padding), first address, bytes,
        // bytes reserved.
        let answer = invoke!(
            self.pointer,
            54,
            (u32, *mut u32, *mut AtomicU64),
            most,
            &raw mut count,
            to.as_ptr().cast_mut()
        );
        if answer == S_OK { count.min(most) as usize } else { 0 }
    }

    fn identity(&self, class: usize) -> (u64, bool) {
        if let Some((kind, inner, rank)) = self.array(class) {
            return (mix(mix(inner as u64) ^ u64::from(kind) << 32 ^ u64::from(rank)) | 1, true);
        }
        let Ok(found) = self.class(class) else { return (1, true) };
        let mut identity = mix(found.module as u64 ^ u64::from(found.token) << 40);
        for argument in found.arguments.ids() {
            identity = mix(identity ^ *argument as u64);
        }
        (identity | 1, false)
    }

    #[inline]
    fn word(&self, address: usize) -> u64 {
        // SAFETY: the first two words of an object, or the first of its method table; the caller
        // says that nothing can free them now.
        unsafe { core::ptr::with_exposed_provenance::<u64>(address).read() }
    }
}

impl Handles for Info {
    fn create(&self, address: usize) -> Option<usize> {
        let mut handle = 0usize;
        // 1: COR_PRF_HANDLE_TYPE_WEAK.
        let answer =
            invoke!(self.pointer, 108, (usize, u32, *mut usize), address, 1, &raw mut handle);
        (answer == S_OK && handle != 0).then_some(handle)
    }

    fn destroy(&self, handle: usize) {
        invoke!(self.pointer, 109, (usize), handle);
    }

    fn object(&self, handle: usize) -> Option<usize> {
        let mut object = 0usize;
        let answer = invoke!(self.pointer, 110, (usize, *mut usize), handle, &raw mut object);
        (answer == S_OK).then_some(object)
    }

    fn generation(&self, object: usize) -> Option<u8> {
        /// COR_PRF_GC_GENERATION_RANGE.
        #[repr(C)]
        #[derive(Default)]
        struct GenerationRange {
            generation: u32,
            start: usize,
            bytes: usize,
            reserved: usize,
        }
        let mut range = GenerationRange::default();
        let answer =
            invoke!(self.pointer, 55, (usize, *mut GenerationRange), object, &raw mut range);
        (answer == S_OK).then_some(range.generation.min(4) as u8)
    }
}

extern "C" fn hand_on<F: FnMut(usize)>(object: usize, each: *mut c_void) -> i32 {
    // SAFETY: `Info::each_object` passes its own closure, which lives until the runtime has gone
    // through all, and nobody else uses meanwhile.
    unsafe { (*each.cast::<F>())(object) };
    // TRUE: go on.
    1
}
