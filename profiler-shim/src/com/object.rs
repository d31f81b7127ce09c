//! An instance as a COM object: where it lives, who counts its references, its thread, and its end.

use super::vtable::Vtable;
use crate::instance::Instance;
use crate::region::RegionMapping;
use crate::syscall::{self, PthreadId};
use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use profiler_protocol::layout::Geometry;

/// What the runtime holds a pointer to.
#[repr(C)]
pub(crate) struct ProfilerObject {
    vtable: &'static Vtable,
    references: AtomicU32,
    mapping: RegionMapping,
    /// The service thread, 0 for none.
    thread: AtomicUsize,
    /// The profiler.
    pub(crate) instance: Instance,
}

/// Makes an object with one reference, whose callbacks are in that table, and its region.
pub(crate) fn create(vtable: &'static Vtable) -> Option<NonNull<ProfilerObject>> {
    let memory = syscall::map_private(size_of::<ProfilerObject>(), false)?;
    let object = memory.cast::<ProfilerObject>().as_ptr();
    let Some(mapping) = RegionMapping::new(Geometry::DEFAULT) else {
        // SAFETY: made above, known to nobody.
        unsafe { syscall::unmap(memory, size_of::<ProfilerObject>()) };
        return None;
    };
    // SAFETY: the mapping is given up in `destroy` only, after the last reference.
    let region = unsafe { mapping.region(Geometry::DEFAULT) }?;
    // SAFETY: as above.
    let guard = unsafe { mapping.guard() };
    /// Writes one field of the memory just made.
    macro_rules! set {
        ($($field:ident).+, $value:expr) => {
            // SAFETY: in bounds of the memory made above, and aligned.
            let place = unsafe { &raw mut (*object).$($field).+ };
            // SAFETY: as above; nobody else knows the memory yet.
            unsafe { place.write($value) };
        };
    }
    // The memory is zeroed, and zeroes are valid for all other fields.
    set!(vtable, vtable);
    set!(references, AtomicU32::new(1));
    set!(mapping, mapping);
    set!(instance.region, region);
    set!(instance.guard, guard);
    Some(memory.cast())
}

/// The object behind a pointer the runtime passes.
///
/// # Safety
/// `this` came from [`create`], and a reference is held.
pub(crate) unsafe fn object<'a>(this: *mut c_void) -> &'a ProfilerObject {
    // SAFETY: the caller's promise. All that changes in an object is atomic.
    unsafe { &*this.cast::<ProfilerObject>() }
}

impl ProfilerObject {
    /// One more reference.
    pub(crate) fn add_ref(&self) -> u32 {
        self.references.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// One less; true when it was the last.
    pub(crate) fn release(&self) -> (u32, bool) {
        // AcqRel: whoever frees sees everything the others did.
        let before = self.references.fetch_sub(1, Ordering::AcqRel);
        (before.wrapping_sub(1), before == 1)
    }

    /// Starts the service thread. The last thing of a successful Initialize: failing one unmaps the
    /// library under the thread.
    ///
    /// # Safety
    /// `main` takes an object.
    pub(crate) unsafe fn start_thread(
        &self,
        main: extern "C" fn(*mut c_void) -> *mut c_void,
    ) -> bool {
        let this = (&raw const *self).cast_mut().cast::<c_void>();
        // SAFETY: the caller's promise; the thread is joined before the object goes
        // (`join_thread`).
        let Some(thread) = (unsafe { syscall::spawn(main, this) }) else { return false };
        // Release: pairs with the swap in `join_thread`.
        self.thread.store(thread, Ordering::Release);
        true
    }

    /// Waits until the service thread has left the library's code.
    pub(crate) fn join_thread(&self) {
        let thread: PthreadId = self.thread.swap(0, Ordering::AcqRel);
        if thread != 0 {
            // SAFETY: from `spawn`; the swap makes sure of once; only the runtime's detaching
            // thread calls this.
            unsafe { syscall::join(thread) };
        }
    }
}

/// Frees the object and its region.
///
/// # Safety
/// No reference is left, and no thread is inside.
pub(crate) unsafe fn destroy(this: *mut c_void) {
    let Some(memory) = NonNull::new(this) else { return };
    // SAFETY: the caller's promise: ours alone.
    let object = unsafe { object(this) };
    object.join_thread();
    // SAFETY: nobody is left to use region or guard.
    unsafe { object.mapping.unmap() };
    // SAFETY: from `map_private` in `create`; `object` is not used after.
    unsafe { syscall::unmap(memory, size_of::<ProfilerObject>()) };
}
