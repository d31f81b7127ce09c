//! Calls of the runtime's interfaces by the numbers of their slots.

use core::ffi::c_void;

/// Reads the function address in slot `slot` of the interface at `this`.
///
/// # Safety
/// `this` is a live COM interface pointer with more than `slot` slots.
pub(super) unsafe fn slot(this: *mut c_void, slot: usize) -> *const () {
    // SAFETY: a COM object begins with the pointer to its table.
    let table = unsafe { *this.cast::<*const *const ()>() };
    // SAFETY: the table has that many entries.
    let entry = unsafe { table.add(slot) };
    // SAFETY: as above.
    unsafe { *entry }
}

/// Calls a slot: `invoke!(pointer, number, (types…), arguments…)`.
macro_rules! invoke {
    ($this:expr, $slot:literal, ($($type:ty),*) $(, $argument:expr)*) => {{
        let this: *mut core::ffi::c_void = $this;
        // SAFETY: `this` is the runtime's interface, which is held; the slot exists at its level.
        let function = unsafe { $crate::runtime::slot::slot(this, $slot) };
        type Signature = unsafe extern "C" fn(*mut core::ffi::c_void $(, $type)*) -> i32;
        // SAFETY: the slot's signature in corprof.idl (cor.h for metadata) is this one.
        let function = unsafe { core::mem::transmute::<*const (), Signature>(function) };
        // SAFETY: all pointers passed are to live locals of the sizes the slot asks for.
        unsafe { function(this $(, $argument)*) }
    }};
}
pub(super) use invoke;
