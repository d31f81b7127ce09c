//! The library's two exports and its class factories, one for each profiler in it. They have no state and are never freed.

use super::guid::{CLASS, EXACT_CLASS, Guid, ICLASS_FACTORY, IUNKNOWN};
use super::hresult::{CLASS_E_NOAGGREGATION, E_NOINTERFACE, E_OUTOFMEMORY, E_POINTER, S_FALSE, S_OK};
use super::{callback, exact, object};
use core::ffi::c_void;

#[repr(C)]
struct FactoryTable {
    query_interface: unsafe extern "C" fn(*mut c_void, *const Guid, *mut *mut c_void) -> i32,
    add_ref: extern "C" fn(*mut c_void) -> u32,
    release: extern "C" fn(*mut c_void) -> u32,
    create_instance: unsafe extern "C" fn(*mut c_void, *mut c_void, *const Guid, *mut *mut c_void) -> i32,
    lock_server: extern "C" fn(*mut c_void, i32) -> i32,
}

#[repr(C)]
struct Factory {
    table: &'static FactoryTable,
}

static TABLE: FactoryTable = FactoryTable { query_interface, add_ref, release, create_instance, lock_server };
static FACTORY: Factory = Factory { table: &TABLE };
static EXACT_TABLE: FactoryTable =
    FactoryTable { query_interface, add_ref, release, create_instance: create_exact, lock_server };
static EXACT_FACTORY: Factory = Factory { table: &EXACT_TABLE };

fn pointer(factory: &'static Factory) -> *mut c_void {
    (&raw const *factory).cast_mut().cast()
}

/// Hands out the class factory.
///
/// # Safety
/// `class` and `interface` point to GUIDs and `out` to a pointer, or are null: what the runtime passes.
#[cfg_attr(all(feature = "freestanding", not(test)), unsafe(export_name = "DllGetClassObject"))]
pub unsafe extern "C" fn dll_get_class_object(
    class: *const Guid,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    // SAFETY: the caller's promise.
    let class = unsafe { class.as_ref() };
    let factory = match class {
        Some(class) if *class == CLASS => &FACTORY,
        Some(class) if *class == EXACT_CLASS => &EXACT_FACTORY,
        _ => return E_NOINTERFACE,
    };
    // SAFETY: the caller's promise.
    unsafe { query_interface(pointer(factory), interface, out) }
}

/// Never: the runtime unloads us after a detach of its own accord.
#[cfg_attr(all(feature = "freestanding", not(test)), unsafe(export_name = "DllCanUnloadNow"))]
pub extern "C" fn dll_can_unload_now() -> i32 {
    S_FALSE
}

unsafe extern "C" fn query_interface(
    this: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    // SAFETY: the runtime passes a GUID or null.
    let interface = unsafe { interface.as_ref() };
    // SAFETY: the runtime passes a place for a pointer or null.
    let (Some(interface), Some(out)) = (interface, unsafe { out.as_mut() }) else { return E_POINTER };
    if *interface == IUNKNOWN || *interface == ICLASS_FACTORY {
        *out = this;
        S_OK
    } else {
        E_NOINTERFACE
    }
}

extern "C" fn add_ref(_: *mut c_void) -> u32 {
    1
}

extern "C" fn release(_: *mut c_void) -> u32 {
    1
}

unsafe extern "C" fn create_instance(
    _: *mut c_void,
    outer: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    if !outer.is_null() {
        return CLASS_E_NOAGGREGATION;
    }
    let Some(object) = object::create() else { return E_OUTOFMEMORY };
    let this = object.as_ptr().cast();
    // SAFETY: a fresh object; the other arguments are the runtime's.
    let answer = unsafe { callback::query_interface(this, interface, out) };
    // SAFETY: gives up the reference `create` made; the runtime's own keeps the object, if it took one.
    unsafe { callback::release(this) };
    answer
}

unsafe extern "C" fn create_exact(
    _: *mut c_void,
    outer: *mut c_void,
    interface: *const Guid,
    out: *mut *mut c_void,
) -> i32 {
    if !outer.is_null() {
        return CLASS_E_NOAGGREGATION;
    }
    let Some(object) = exact::create() else { return E_OUTOFMEMORY };
    // SAFETY: a fresh object; the other arguments are the runtime's.
    unsafe { exact::query_interface(object.as_ptr(), interface, out) }
}

extern "C" fn lock_server(_: *mut c_void, _: i32) -> i32 {
    S_OK
}
