//! The answers that matter here.

/// Done.
pub(crate) const S_OK: i32 = 0;
/// Done, and the answer is no.
pub(crate) const S_FALSE: i32 = 1;
/// No such interface.
pub(crate) const E_NOINTERFACE: i32 = 0x8000_4002_u32.cast_signed();
/// A null pointer where none may be.
pub(crate) const E_POINTER: i32 = 0x8000_4003_u32.cast_signed();
/// Something failed.
pub(crate) const E_FAIL: i32 = 0x8000_4005_u32.cast_signed();
/// No memory.
pub(crate) const E_OUTOFMEMORY: i32 = 0x8007_000e_u32.cast_signed();
/// Outer objects are not supported.
pub(crate) const CLASS_E_NOAGGREGATION: i32 = 0x8004_0110_u32.cast_signed();
/// Declines to be loaded, without an error in the runtime's log (corerror.h).
pub(crate) const CORPROF_E_PROFILER_CANCEL_ACTIVATION: i32 = 0x8013_1375_u32.cast_signed();
