//! The table of 98 callback slots (ICorProfilerCallback to ICorProfilerCallback11).

use super::callback;
use super::hresult::S_OK;

/// Number of slots.
pub const SLOTS: usize = 98;

/// A table of functions of whatever signature each slot has.
#[repr(C)]
pub struct Vtable([*const (); SLOTS]);

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

const fn table() -> Vtable {
    let mut slots = [ignored as *const (); SLOTS];
    slots[0] = callback::query_interface as *const ();
    slots[1] = callback::add_ref as *const ();
    slots[2] = callback::release as *const ();
    slots[3] = callback::initialize as *const ();
    slots[4] = callback::shutdown as *const ();
    slots[15] = callback::module_unload_started as *const ();
    slots[16] = callback::module_unload_finished as *const ();
    slots[30] = callback::thread_destroyed as *const ();
    slots[31] = callback::thread_assigned_to_os_thread as *const ();
    slots[50] = callback::object_allocated as *const ();
    slots[72] = callback::thread_name_changed as *const ();
    slots[73] = callback::garbage_collection_started as *const ();
    slots[75] = callback::garbage_collection_finished as *const ();
    slots[80] = callback::initialize_for_attach as *const ();
    slots[81] = callback::profiler_attach_complete as *const ();
    slots[82] = callback::profiler_detach_succeeded as *const ();
    slots[94] = callback::dynamic_method_unloaded as *const ();
    slots[95] = callback::event_pipe_event_delivered as *const ();
    slots[97] = callback::load_as_notification_only as *const ();
    Vtable(slots)
}

/// The table.
pub static CALLBACKS: Vtable = table();
