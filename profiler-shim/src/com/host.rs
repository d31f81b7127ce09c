//! Exact mode and its guest.
//!
//! The profiler of exact mode has a guest, the one that tells of names, events and chosen objects:
//! the runtime was to load that beside it as a notification-only one, and is told that it does not
//! want to be. For each object the runtime goes through all its 32 places for such profilers as
//! soon as one of them is taken (`ProfControlBlock::DoProfilerCallback`, inc/profilepriv.inl): a
//! sixth of all that exact mode cost on .NET 10.

use super::object::{ProfilerObject, object};
use super::vtable::Vtable;
use crate::exact::Exact;
use crate::{machine, service};
use core::ffi::c_void;
use core::sync::atomic::{AtomicUsize, Ordering};
use profiler_protocol::record::Registers;

/// What the runtime holds a pointer to.
#[repr(C)]
pub(super) struct ExactObject {
    pub(super) vtable: &'static Vtable,
    pub(super) exact: Exact,
}

/// Address of the object of exact mode, once it counts; 0 before, and without it.
static HOST: AtomicUsize = AtomicUsize::new(0);
/// Address of its guest, 0 without one.
static GUEST: AtomicUsize = AtomicUsize::new(0);

/// The profiler behind a pointer the runtime passes.
///
/// # Safety
/// `this` is an [`ExactObject`].
pub(super) unsafe fn exact<'a>(this: *mut c_void) -> &'a Exact {
    // SAFETY: the caller's promise; it is never freed, and all that changes in it is atomic.
    let object = unsafe { &*this.cast::<ExactObject>() };
    &object.exact
}

/// Exact mode counts, and may have a guest.
///
/// # Safety
/// `this` is an [`ExactObject`] that lives as long as the process.
pub(super) unsafe fn set_host(this: *mut c_void) {
    // Release: pairs with the acquire in `takes_in`.
    HOST.store(this.addr(), Ordering::Release);
}

/// The guest, if there is one by now.
#[inline]
pub(super) fn guest() -> Option<*mut c_void> {
    // Acquire: pairs with the release in `takes_in`.
    let guest = GUEST.load(Ordering::Acquire);
    (guest != 0).then_some(guest as *mut c_void)
}

/// Has the guest, if there is one by now, tell of an object that this thread has just allocated.
#[cold]
#[inline(never)]
pub(super) fn tell_chosen(allocated: usize, class: usize, bytes: (u64, u64)) {
    let Some(guest) = guest() else { return };
    // SAFETY: `takes_in` took a reference, which is never given back.
    let instance = &unsafe { object(guest) }.instance;
    if instance.is_listening() {
        let mut registers = Registers::default();
        machine::capture(&mut registers);
        instance.on_chosen(class as u64, allocated, bytes, &registers);
    }
}

/// Has the guest's thread name a class and tell [`named`] of it.
pub(super) fn have_named(class: usize) {
    if let Some(guest) = guest() {
        // SAFETY: `takes_in` took a reference, which is never given back.
        unsafe { object(guest) }.instance.types.add(class as u64);
    }
}

/// The name of a class: exact mode may wait for it.
fn named(class: usize, module_id: usize, name: &str, module: &str) {
    // Acquire: pairs with the release in `set_host`.
    let host = HOST.load(Ordering::Acquire);
    if host != 0 {
        // SAFETY: from `set_host`; the object lives as long as the process.
        unsafe { exact(host as *mut c_void) }.named(class, module_id, name, module);
    }
}

extern "C" fn guest_main(this: *mut c_void) -> *mut c_void {
    // SAFETY: `start_thread` passes its own object, which is never freed.
    service::run(&unsafe { object(this) }.instance, Some(named));
    core::ptr::null_mut()
}

/// Takes in a profiler that the runtime is about to load beside exact mode: it is called from here
/// on, by way of the runtime's interface for exact mode, and tells of the objects that are chosen
/// here instead of those that the runtime would choose, which would cost each object more than all
/// that is done here. False without exact mode, or when there is a guest already. If true the
/// runtime is to be told that it is not wanted.
pub(super) fn takes_in(wanted: &ProfilerObject, owner: u64) -> bool {
    // Acquire: pairs with the release in `set_host`.
    let host = HOST.load(Ordering::Acquire);
    if host == 0 || GUEST.load(Ordering::Relaxed) != 0 {
        return false;
    }
    // SAFETY: from `set_host`; the object lives as long as the process.
    let Some(info) = unsafe { exact(host as *mut c_void) }.info() else { return false };
    wanted.instance.become_guest();
    if wanted.instance.set_up(info, owner, false).is_err() {
        return false;
    }
    // For ever: threads may be on their way to it whenever it leaves.
    wanted.add_ref();
    // Release: pairs with the acquire in `guest`; what it needs is set up. The runtime loads
    // profilers one after the other.
    GUEST.store((&raw const *wanted).addr(), Ordering::Release);
    wanted.instance.set_listening(true);
    wanted.instance.start_session(info);
    // SAFETY: `guest_main` takes an object.
    if !unsafe { wanted.start_thread(guest_main) } {
        wanted.instance.give_up(info);
        wanted.instance.on_detached();
    }
    true
}
