//! User stacks: walked here by the rules the daemon has taught, copied from the first frame without a rule on.

pub(crate) mod copy;
pub(crate) mod walk;

/// Hides from the compiler what it knows of a value, so that it keeps the checks the verifier needs.
#[inline(always)]
pub(crate) fn opaque<T: Copy>(value: T) -> T {
    // SAFETY: a valid, aligned local.
    unsafe { core::ptr::read_volatile(&raw const value) }
}
