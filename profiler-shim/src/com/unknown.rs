//! What every object here has in common: how it answers to the names of its interfaces, and how raw
//! arguments are read.

use crate::runtime::guid::{Guid, IUNKNOWN};
use crate::runtime::hresult::{E_NOINTERFACE, E_POINTER, S_OK};
use core::ffi::c_void;

/// IUnknown::QueryInterface of an object whose interfaces are all at one address. Counts no
/// reference.
///
/// # Safety
/// `interface` points to a GUID and `out` to a place for a pointer, or they are null: what the
/// runtime passes.
#[inline(never)]
pub(super) unsafe fn query(
    this: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
    interfaces: &[Guid],
) -> i32 {
    // SAFETY: the caller's promise.
    let interface = unsafe { interface.as_ref() };
    // SAFETY: the caller's promise.
    let (Some(interface), Some(out)) = (interface, unsafe { out.as_mut() }) else {
        return E_POINTER;
    };
    if *interface != IUNKNOWN && !interfaces.contains(interface) {
        return E_NOINTERFACE;
    }
    *out = this;
    S_OK
}

/// AddRef and Release of an object that is never freed.
pub(super) extern "C" fn not_counted(_: *mut c_void) -> u32 {
    1
}

/// A slice of what the runtime passes as pointer and length.
///
/// # Safety
/// `pointer` is null or points to `count` elements that stay as they are for the call.
pub(super) unsafe fn slice<'a, T>(pointer: *const T, count: u32) -> &'a [T] {
    if pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(pointer, count as usize) }
}
