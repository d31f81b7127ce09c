//! The library's two exports and its class factories, one for each profiler in it. They have no
//! state and are never freed.

use super::unknown::{self, not_counted};
use super::{callback, exact, object};
use crate::runtime::guid::{CLASS, EXACT_CLASS, Guid, ICLASS_FACTORY};
use crate::runtime::hresult::{CLASS_E_NOAGGREGATION, E_NOINTERFACE, E_OUTOFMEMORY, S_FALSE, S_OK};
use core::ffi::c_void;

#[repr(C)]
struct FactoryTable {
    query_interface: unsafe extern "C" fn(*mut c_void, *const Guid, *mut *mut c_void) -> i32,
    add_ref: extern "C" fn(*mut c_void) -> u32,
    release: extern "C" fn(*mut c_void) -> u32,
    create_instance: CreateInstance,
    lock_server: extern "C" fn(*mut c_void, i32) -> i32,
}

#[repr(C)]
struct Factory {
    table: &'static FactoryTable,
}

type CreateInstance =
    unsafe extern "C" fn(*mut c_void, *mut c_void, *const Guid, *mut *mut c_void) -> i32;

const fn table(create_instance: CreateInstance) -> FactoryTable {
    FactoryTable {
        query_interface,
        add_ref: not_counted,
        release: not_counted,
        create_instance,
        lock_server,
    }
}

static TABLE: FactoryTable = table(create_instance);
static FACTORY: Factory = Factory { table: &TABLE };
static EXACT_TABLE: FactoryTable = table(create_exact);
static EXACT_FACTORY: Factory = Factory { table: &EXACT_TABLE };

fn pointer(factory: &'static Factory) -> *mut c_void {
    (&raw const *factory).cast_mut().cast()
}

/// Hands out the class factory.
///
/// # Safety
/// `class` and `interface` point to GUIDs and `out` to a pointer, or are null: what the runtime
/// passes.
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
    // SAFETY: the runtime passes a GUID or null, and a place for a pointer or null.
    unsafe { unknown::query(this, interface, out, &[ICLASS_FACTORY]) }
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
    let Some(object) = object::create(&callback::TABLE) else { return E_OUTOFMEMORY };
    let this = object.as_ptr().cast();
    // SAFETY: a fresh object; the other arguments are the runtime's.
    let answer = unsafe { callback::query_interface(this, interface, out) };
    // SAFETY: gives up the reference `create` made; the runtime's own keeps the object, if it took
    // one.
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
