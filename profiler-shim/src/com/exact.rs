//! The profiler of exact mode as a COM object: its table of callbacks, and thunks that turn raw
//! arguments into safe ones. It lives as long as the process: the runtime lets no profiler go that
//! sees allocations (0x80131372).
//! What its guest ([`super::host`]) would be called for is passed on to it here.

use super::callback;
use super::host::{ExactObject, exact, guest, have_named, set_host, tell_chosen};
use super::unknown::{self, not_counted, slice};
use super::vtable::{SLOTS, Vtable, ignored};
use crate::exact::{Allocated, Exact};
use crate::runtime::guid::{CALLBACKS, Guid};
use crate::runtime::hresult::{CORPROF_E_PROFILER_CANCEL_ACTIVATION, E_FAIL, S_OK};
use crate::runtime::info::Info;
use crate::syscall;
use core::ffi::c_void;
use core::ptr::NonNull;

/// COR_PRF_GC_INDUCED.
const INDUCED: u32 = 1;

static TABLE: Vtable = {
    let mut slots = [ignored as *const (); SLOTS];
    slots[0] = query_interface as *const ();
    slots[1] = not_counted as *const ();
    slots[2] = not_counted as *const ();
    slots[3] = initialize as *const ();
    slots[4] = shutdown as *const ();
    slots[15] = module_unload_started as *const ();
    slots[16] = module_unload_finished as *const ();
    slots[30] = thread_destroyed as *const ();
    slots[31] = thread_assigned_to_os_thread as *const ();
    slots[42] = runtime_suspend_started as *const ();
    slots[46] = runtime_resume_finished as *const ();
    slots[50] = object_allocated as *const ();
    // ObjectsAllocatedByClass: what it tells is known better.
    slots[51] = refused as *const ();
    slots[52] = object_references as *const ();
    slots[72] = thread_name_changed as *const ();
    slots[73] = garbage_collection_started as *const ();
    slots[75] = garbage_collection_finished as *const ();
    slots[76] = finalizeable_object_queued as *const ();
    slots[77] = root_references2 as *const ();
    slots[87] = moved_references2 as *const ();
    slots[88] = surviving_references2 as *const ();
    slots[94] = dynamic_method_unloaded as *const ();
    slots[95] = event_pipe_event_delivered as *const ();
    Vtable::new(slots)
};

/// Makes the object, and its memory.
pub(super) fn create() -> Option<NonNull<c_void>> {
    let exact = Exact::new()?;
    let memory = syscall::map_private(size_of::<ExactObject>(), false)?;
    // SAFETY: fresh memory of that size, page-aligned, known to nobody.
    unsafe { memory.cast::<ExactObject>().write(ExactObject { vtable: &TABLE, exact }) };
    Some(memory)
}

/// Calls the guest's callback of that name.
macro_rules! pass_on {
    ($callback:ident($($argument:expr),*)) => {
        match guest() {
            // SAFETY: an object of which a reference is held for ever (`takes_in`); the arguments
            // are the runtime's.
            Some(guest) => unsafe { callback::$callback(guest $(, $argument)*) },
            None => S_OK,
        }
    };
}

pub(super) unsafe extern "C" fn query_interface(
    this: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    // SAFETY: the runtime passes a GUID or null, and a place for a pointer or null.
    unsafe { unknown::query(this, interface, out, &CALLBACKS) }
}

extern "C" fn refused() -> i32 {
    E_FAIL
}

extern "C" fn keep_time(this: *mut c_void) -> *mut c_void {
    // SAFETY: `initialize` passes its own object.
    unsafe { exact(this) }.keep_time();
    core::ptr::null_mut()
}

unsafe extern "C" fn initialize(this: *mut c_void, unknown: *mut c_void) -> i32 {
    // SAFETY: an interface pointer of the runtime's.
    let Some(info) = (unsafe { Info::query(unknown) }) else {
        return CORPROF_E_PROFILER_CANCEL_ACTIVATION;
    };
    // SAFETY: `this` is the object it was called on.
    if !unsafe { exact(this) }.set_up(info) {
        info.release();
        return CORPROF_E_PROFILER_CANCEL_ACTIVATION;
    }
    // SAFETY: as above; the object lives as long as the process.
    unsafe { set_host(this) };
    // SAFETY: as above.
    unsafe { exact(this) }.start_session();
    // Never joined: it ends with the process. Without it lifetimes in time are 0, and counts of a
    // process that is killed end with its last collection; nothing else depends on it. SAFETY:
    // `keep_time` expects the object, which lives for ever.
    unsafe { syscall::spawn(keep_time, this) };
    S_OK
}

unsafe extern "C" fn shutdown(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.end(have_named);
    pass_on!(shutdown())
}

unsafe extern "C" fn module_unload_started(this: *mut c_void, module: usize) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.module_unloads();
    pass_on!(module_unload_started(module))
}

unsafe extern "C" fn module_unload_finished(this: *mut c_void, module: usize, status: i32) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.module_unloads();
    pass_on!(module_unload_finished(module, status))
}

unsafe extern "C" fn dynamic_method_unloaded(_: *mut c_void, function: usize) -> i32 {
    pass_on!(dynamic_method_unloaded(function))
}

unsafe extern "C" fn thread_destroyed(_: *mut c_void, thread: usize) -> i32 {
    pass_on!(thread_destroyed(thread))
}

unsafe extern "C" fn thread_assigned_to_os_thread(
    _: *mut c_void,
    thread: usize,
    os_thread: u32,
) -> i32 {
    pass_on!(thread_assigned_to_os_thread(thread, os_thread))
}

unsafe extern "C" fn thread_name_changed(
    _: *mut c_void,
    thread: usize,
    count: u32,
    name: *const u16,
) -> i32 {
    pass_on!(thread_name_changed(thread, count, name))
}

unsafe extern "C" fn runtime_suspend_started(this: *mut c_void, _reason: i32) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.suspending();
    S_OK
}

unsafe extern "C" fn runtime_resume_finished(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.resumed();
    S_OK
}

unsafe extern "C" fn object_allocated(this: *mut c_void, object: usize, class: usize) -> i32 {
    // SAFETY: `this` is the object it was called on.
    let exact = unsafe { exact(this) };
    if !exact.noted(object, class) {
        note(exact, object, class);
    }
    S_OK
}

/// What is left to be done about one object in many. Away from the callback, which so keeps no
/// registers for it.
#[cold]
#[inline(never)]
fn note(exact: &Exact, object: usize, class: usize) {
    let Allocated { chosen, first } = exact.allocated(object, class);
    // Before anything lets a collection in, after which it is elsewhere.
    if let Some(bytes) = chosen {
        tell_chosen(object, class, bytes);
    }
    if let Some(first) = first {
        exact.describe(class, first);
    }
}

unsafe extern "C" fn garbage_collection_started(
    this: *mut c_void,
    count: i32,
    flags: *const i32,
    reason: u32,
) -> i32 {
    // SAFETY: a BOOL for each of `count` generations.
    let collected = unsafe { slice(flags, u32::try_from(count).unwrap_or(0)) };
    let highest = collected.iter().take(3).rposition(|c| *c != 0).unwrap_or(0);
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.collection_starts(highest as u8, reason == INDUCED, have_named);
    pass_on!(garbage_collection_started(count, flags, reason))
}

unsafe extern "C" fn garbage_collection_finished(this: *mut c_void) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.collection_ends();
    pass_on!(garbage_collection_finished())
}

unsafe extern "C" fn finalizeable_object_queued(
    this: *mut c_void,
    _flags: u32,
    object: usize,
) -> i32 {
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.waits_for_finalizer(object);
    S_OK
}

/// Its answer ends the walk through all living objects that the runtime makes after each
/// collection.
unsafe extern "C" fn object_references(
    this: *mut c_void,
    _object: usize,
    class: usize,
    count: u32,
    to: *const usize,
) -> i32 {
    // SAFETY: `count` references.
    let to = unsafe { slice(to, count) };
    // SAFETY: `this` is the object it was called on.
    if unsafe { exact(this) }.alive(class, to) { S_OK } else { E_FAIL }
}

unsafe extern "C" fn root_references2(
    this: *mut c_void,
    count: u32,
    objects: *const usize,
    kinds: *const u32,
    flags: *const u32,
    _ids: *const usize,
) -> i32 {
    // SAFETY: `count` objects.
    let objects = unsafe { slice(objects, count) };
    // SAFETY: as many kinds.
    let kinds = unsafe { slice(kinds, count) };
    // SAFETY: as many flags.
    let flags = unsafe { slice(flags, count) };
    let roots = objects
        .iter()
        .zip(kinds)
        .zip(flags)
        .map(|((object, kind), flags)| (*object, *kind, *flags));
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.rooted(roots);
    S_OK
}

unsafe extern "C" fn moved_references2(
    this: *mut c_void,
    count: u32,
    old: *const usize,
    new: *const usize,
    bytes: *const usize,
) -> i32 {
    // SAFETY: `count` old addresses.
    let old = unsafe { slice(old, count) };
    // SAFETY: as many new ones.
    let new = unsafe { slice(new, count) };
    // SAFETY: as many lengths.
    let bytes = unsafe { slice(bytes, count) };
    let ranges = old.iter().zip(new).zip(bytes).map(|((old, new), bytes)| (*old, *new, *bytes));
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.survived(ranges);
    S_OK
}

unsafe extern "C" fn surviving_references2(
    this: *mut c_void,
    count: u32,
    start: *const usize,
    bytes: *const usize,
) -> i32 {
    // SAFETY: `count` addresses.
    let start = unsafe { slice(start, count) };
    // SAFETY: as many lengths.
    let bytes = unsafe { slice(bytes, count) };
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }
        .survived(start.iter().zip(bytes).map(|(start, bytes)| (*start, *start, *bytes)));
    S_OK
}

unsafe extern "C" fn event_pipe_event_delivered(
    this: *mut c_void,
    provider: usize,
    id: u32,
    version: u32,
    metadata_bytes: u32,
    metadata: *const u8,
    bytes: u32,
    data: *const u8,
    activity: *const Guid,
    related: *const Guid,
    thread: usize,
    frame_count: u32,
    frames: *const usize,
) -> i32 {
    // SAFETY: `bytes` bytes at `data`, or null.
    let payload = unsafe { slice(data, bytes) };
    // SAFETY: `this` is the object it was called on.
    unsafe { exact(this) }.event(provider, id, payload);
    pass_on!(event_pipe_event_delivered(
        provider,
        id,
        version,
        metadata_bytes,
        metadata,
        bytes,
        data,
        activity,
        related,
        thread,
        frame_count,
        frames
    ))
}
