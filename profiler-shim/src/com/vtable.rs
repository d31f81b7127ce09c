//! The table of 98 callback slots (ICorProfilerCallback to ICorProfilerCallback11).

use crate::runtime::hresult::S_OK;

/// Number of slots.
pub(crate) const SLOTS: usize = 98;

/// A table of functions of whatever signature each slot has.
#[repr(C)]
pub(crate) struct Vtable([*const (); SLOTS]);

// SAFETY: code addresses, never changed.
unsafe impl Sync for Vtable {}

/// For every callback we do not care about: the caller cleans up its arguments (System V ABI), so
/// one function without any serves all signatures.
pub(super) extern "C" fn ignored() -> i32 {
    S_OK
}

impl Vtable {
    /// A table of these functions.
    pub(super) const fn new(slots: [*const (); SLOTS]) -> Self {
        Self(slots)
    }
}
