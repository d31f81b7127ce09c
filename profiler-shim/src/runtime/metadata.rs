//! Calls into a module's metadata: IMetaDataImport2, by slot.

use super::slot::invoke;
use core::ffi::c_void;

/// An IMetaDataImport2, released when dropped. Used on the service thread within one look-up only.
pub(crate) struct Metadata {
    pointer: *mut c_void,
}

/// A blob the runtime owns, as bytes; at most 64 KiB of it.
///
/// # Safety
/// `pointer` is null or points to `bytes` bytes that do not change; the caller does not use them
/// after the look-up.
pub(super) unsafe fn blob(pointer: *const u8, bytes: u32) -> &'static [u8] {
    if pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(pointer, (bytes as usize).min(1 << 16)) }
}

/// Name buffers: UTF-16 with a zero at the end.
pub(crate) type NameBuffer = [u16; 512];

impl Metadata {
    /// Takes over an interface pointer.
    ///
    /// # Safety
    /// `pointer` is an IMetaDataImport2 with a reference that is given away.
    pub(super) unsafe fn new(pointer: *mut c_void) -> Self {
        Self { pointer }
    }

    /// A type's name (namespace included, where it has one) and whether it is nested.
    #[must_use]
    pub(crate) fn type_def(&self, token: u32, name: &mut NameBuffer) -> Option<bool> {
        let (mut needed, mut flags, mut extends) = (0u32, 0u32, 0u32);
        let answer = invoke!(
            self.pointer,
            12,
            (u32, *mut u16, u32, *mut u32, *mut u32, *mut u32),
            token,
            name.as_mut_ptr(),
            512,
            &raw mut needed,
            &raw mut flags,
            &raw mut extends
        );
        // Visibility, the low three bits, is 2 or more for nested types (corhdr.h, CorTypeAttr).
        (answer >= 0).then_some(flags & 7 >= 2)
    }

    /// The type around a nested one.
    #[must_use]
    pub(crate) fn enclosing(&self, token: u32) -> Option<u32> {
        let mut outer = 0u32;
        let answer = invoke!(self.pointer, 62, (u32, *mut u32), token, &raw mut outer);
        (answer == 0 && outer & 0xff_ffff != 0).then_some(outer)
    }

    /// A referenced type's name, and the token of the scope it is in.
    #[must_use]
    pub(crate) fn type_ref(&self, token: u32, name: &mut NameBuffer) -> Option<u32> {
        let (mut scope, mut needed) = (0u32, 0u32);
        let answer = invoke!(
            self.pointer,
            14,
            (u32, *mut u32, *mut u16, u32, *mut u32),
            token,
            &raw mut scope,
            name.as_mut_ptr(),
            512,
            &raw mut needed
        );
        (answer >= 0).then_some(scope)
    }

    /// A constructed type's signature.
    #[must_use]
    pub(crate) fn type_spec(&self, token: u32) -> &'static [u8] {
        let (mut signature, mut bytes) = (core::ptr::null::<u8>(), 0u32);
        let answer = invoke!(
            self.pointer,
            44,
            (u32, *mut *const u8, *mut u32),
            token,
            &raw mut signature,
            &raw mut bytes
        );
        if answer < 0 {
            return &[];
        }
        // SAFETY: lies in the module's metadata, which the gate keeps loaded for this look-up.
        unsafe { blob(signature, bytes) }
    }

    /// A method's declaring type, name and signature.
    #[must_use]
    pub(crate) fn method(&self, token: u32, name: &mut NameBuffer) -> Option<(u32, &'static [u8])> {
        let (mut class, mut needed, mut attributes, mut rva, mut flags) =
            (0u32, 0u32, 0u32, 0u32, 0u32);
        let (mut signature, mut bytes) = (core::ptr::null::<u8>(), 0u32);
        let answer = invoke!(
            self.pointer,
            30,
            (
                u32,
                *mut u32,
                *mut u16,
                u32,
                *mut u32,
                *mut u32,
                *mut *const u8,
                *mut u32,
                *mut u32,
                *mut u32
            ),
            token,
            &raw mut class,
            name.as_mut_ptr(),
            512,
            &raw mut needed,
            &raw mut attributes,
            &raw mut signature,
            &raw mut bytes,
            &raw mut rva,
            &raw mut flags
        );
        // SAFETY: lies in the module's metadata, which the gate keeps loaded for this look-up.
        (answer >= 0).then(|| (class, unsafe { blob(signature, bytes) }))
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        invoke!(self.pointer, 2, ());
    }
}
