//! What the runtime calls: thunks that turn raw arguments into safe ones. Each checks first that
//! the instance may act: in a forked child and after goodbye nothing happens. All answer S_OK: a
//! profiler's trouble is not the app's.

use super::host;
use super::object::{self, object};
use super::unknown::{self, slice};
use super::vtable::{SLOTS, Vtable, ignored};
use crate::payload::MOST_PAYLOAD;
use crate::runtime::guid::{CALLBACKS, Guid};
use crate::runtime::hresult::{CORPROF_E_PROFILER_CANCEL_ACTIVATION, S_OK};
use crate::runtime::info::{Info, Provider};
use crate::{machine, recorder, service};
use core::ffi::c_void;
use profiler_protocol::load::{WITH_START_SESSION, owner_in_client_data, subscriptions};
use profiler_protocol::record::Registers;

/// What is called.
pub(super) static TABLE: Vtable = {
    let mut slots = [ignored as *const (); SLOTS];
    slots[0] = query_interface as *const ();
    slots[1] = add_ref as *const ();
    slots[2] = release as *const ();
    slots[3] = initialize as *const ();
    slots[4] = shutdown as *const ();
    slots[15] = module_unload_started as *const ();
    slots[16] = module_unload_finished as *const ();
    slots[30] = thread_destroyed as *const ();
    slots[31] = thread_assigned_to_os_thread as *const ();
    slots[50] = object_allocated as *const ();
    slots[72] = thread_name_changed as *const ();
    slots[73] = garbage_collection_started as *const ();
    slots[75] = garbage_collection_finished as *const ();
    slots[80] = initialize_for_attach as *const ();
    slots[81] = profiler_attach_complete as *const ();
    slots[82] = profiler_detach_succeeded as *const ();
    slots[94] = dynamic_method_unloaded as *const ();
    slots[95] = event_pipe_event_delivered as *const ();
    slots[97] = load_as_notification_only as *const ();
    Vtable::new(slots)
};

/// Longest name or client data looked at, in elements.
const MOST: u32 = 1 << 16;

pub(super) unsafe extern "C" fn query_interface(
    this: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    // SAFETY: the runtime passes a GUID or null, and a place for a pointer or null.
    let answer = unsafe { unknown::query(this, interface, out, &CALLBACKS) };
    if answer == S_OK {
        // SAFETY: `this` is the object it was called on.
        unsafe { object(this) }.add_ref();
    }
    answer
}

pub(super) unsafe extern "C" fn add_ref(this: *mut c_void) -> u32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { object(this) }.add_ref()
}

pub(super) unsafe extern "C" fn release(this: *mut c_void) -> u32 {
    // SAFETY: `this` is the object it was called on.
    let (left, last) = unsafe { object(this) }.release();
    if last {
        // SAFETY: that was the last reference. The thread, if any, ended before the runtime let go
        // (`profiler_detach_succeeded`).
        unsafe { object::destroy(this) };
    }
    left
}

pub(super) unsafe extern "C" fn load_as_notification_only(_: *mut c_void, answer: *mut i32) -> i32 {
    // SAFETY: the runtime passes a place for a BOOL or null.
    if let Some(answer) = unsafe { answer.as_mut() } {
        *answer = 1;
    }
    S_OK
}

/// Both ways of being initialised; an attach brings client data. Answers S_OK or declines quietly.
///
/// # Safety
/// `this` is an object, `unknown` an interface pointer of the runtime.
unsafe fn start(this: *mut c_void, unknown: *mut c_void, client_data: Option<&[u8]>) -> i32 {
    // SAFETY: the caller's promise.
    let object = unsafe { object(this) };
    // SAFETY: the caller's promise.
    let Some(info) = (unsafe { Info::query(unknown) }) else {
        return CORPROF_E_PROFILER_CANCEL_ACTIVATION;
    };
    let owner = match client_data {
        Some(data) => owner_in_client_data(data),
        None => info.owner_in_environment(),
    };
    if client_data.is_none() && host::takes_in(object, owner) {
        info.release();
        return CORPROF_E_PROFILER_CANCEL_ACTIVATION;
    }
    let is_for_nobody = client_data.is_none() && !recorder::lives(info);
    if is_for_nobody || object.instance.set_up(info, owner, client_data.is_some()).is_err() {
        info.release();
        return CORPROF_E_PROFILER_CANCEL_ACTIVATION;
    }
    if client_data.is_some() {
        // The service thread starts the session: that takes tens of milliseconds of managed code,
        // and re-enters.
        return S_OK;
    }
    if subscriptions(owner) & WITH_START_SESSION != 0 {
        let region = object.instance.region();
        // Zero or not: it goes on.
        let _beat = recorder::wait_at_start(info, &|| region.lease_words().1);
    }
    object.instance.set_listening(true);
    object.instance.start_session(info);
    // SAFETY: `service_main` takes an object.
    if unsafe { object.start_thread(service_main) } {
        return S_OK;
    }
    object.instance.give_up(info);
    object.instance.on_detached();
    CORPROF_E_PROFILER_CANCEL_ACTIVATION
}

extern "C" fn service_main(this: *mut c_void) -> *mut c_void {
    // SAFETY: `start_thread` passes its own object, which outlives the thread.
    service::run(&unsafe { object(this) }.instance, None);
    core::ptr::null_mut()
}

pub(super) unsafe extern "C" fn initialize(this: *mut c_void, unknown: *mut c_void) -> i32 {
    // SAFETY: what the runtime passes.
    unsafe { start(this, unknown, None) }
}

pub(super) unsafe extern "C" fn initialize_for_attach(
    this: *mut c_void,
    unknown: *mut c_void,
    data: *const u8,
    bytes: u32,
) -> i32 {
    // SAFETY: client data is valid during this call, and `bytes` long.
    let data = unsafe { slice(data, bytes.min(MOST)) };
    // SAFETY: what the runtime passes.
    unsafe { start(this, unknown, Some(data)) }
}

pub(super) unsafe extern "C" fn profiler_attach_complete(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let object = unsafe { object(this) };
    object.instance.set_listening(true);
    object.instance.list_threads();
    // SAFETY: `service_main` takes an object.
    if !unsafe { object.start_thread(service_main) } {
        object.instance.leave_without_thread();
    }
    S_OK
}

pub(super) unsafe extern "C" fn profiler_detach_succeeded(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let object = unsafe { object(this) };
    // After this the runtime unmaps the library: our thread must be out of it.
    object.join_thread();
    object.instance.on_detached();
    S_OK
}

pub(super) unsafe extern "C" fn shutdown(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_shutdown();
    }
    S_OK
}

pub(super) unsafe extern "C" fn module_unload_started(this: *mut c_void, module: usize) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_module_unload(module);
    }
    S_OK
}

pub(super) unsafe extern "C" fn module_unload_finished(
    this: *mut c_void,
    module: usize,
    _: i32,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_module_unloaded(module);
    }
    S_OK
}

pub(super) unsafe extern "C" fn dynamic_method_unloaded(this: *mut c_void, function: usize) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_dynamic_method_unloaded(function);
    }
    S_OK
}

#[inline(never)]
pub(super) unsafe extern "C" fn thread_destroyed(this: *mut c_void, thread: usize) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_thread_destroyed(thread);
    }
    S_OK
}

pub(super) unsafe extern "C" fn thread_assigned_to_os_thread(
    this: *mut c_void,
    thread: usize,
    os_thread: u32,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_thread_assigned(thread, os_thread);
    }
    S_OK
}

pub(super) unsafe extern "C" fn thread_name_changed(
    this: *mut c_void,
    thread: usize,
    count: u32,
    name: *const u16,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        // SAFETY: `count` units at `name`, or null.
        instance.on_thread_named(thread, unsafe { slice(name, count.min(MOST)) });
    }
    S_OK
}

pub(super) unsafe extern "C" fn garbage_collection_started(
    this: *mut c_void,
    count: i32,
    collected: *const i32,
    _: u32,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        // SAFETY: a BOOL for each of `count` generations.
        let collected = unsafe { slice(collected, u32::try_from(count).unwrap_or(0).min(MOST)) };
        let highest = collected.iter().take(3).rposition(|c| *c != 0).unwrap_or(0);
        instance.on_gc_started(highest as u8);
    }
    S_OK
}

pub(super) unsafe extern "C" fn garbage_collection_finished(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_alive() {
        instance.on_gc_finished();
    }
    S_OK
}

/// An object that this thread has just allocated: a large one, or any where another profiler asked
/// for all. As in the callback of events, registers are captured in this frame, which lives until
/// the copy is made.
pub(super) unsafe extern "C" fn object_allocated(
    this: *mut c_void,
    allocated: usize,
    class: usize,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if instance.is_listening() && instance.is_told_of_large() {
        let mut registers = Registers::default();
        machine::capture(&mut registers);
        instance.on_allocated(class as u64, allocated, &registers);
    }
    S_OK
}

/// The callback every event goes through. Its own frame is the first of an allocation's stack:
/// registers are captured here, and `registers` keeps the frame alive until the copy is made.
pub(super) unsafe extern "C" fn event_pipe_event_delivered(
    this: *mut c_void,
    provider: usize,
    id: u32,
    version: u32,
    _metadata_bytes: u32,
    _metadata: *const u8,
    bytes: u32,
    data: *const u8,
    _activity: *const Guid,
    _related: *const Guid,
    _thread: usize,
    _frame_count: u32,
    _frames: *const usize,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let instance = &unsafe { object(this) }.instance;
    if !instance.is_listening() {
        return S_OK;
    }
    // SAFETY: `bytes` bytes at `data`, or null.
    let payload = unsafe { slice(data, bytes.min(MOST_PAYLOAD)) };
    match instance.provider(provider) {
        Provider::Runtime => {
            let mut registers = Registers::default();
            machine::capture(&mut registers);
            instance.on_event(id, version, payload, &registers);
        }
        Provider::Counters => instance.on_counter(payload),
        Provider::Other => {}
    }
    S_OK
}
