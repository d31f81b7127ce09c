//! 1. EVENTS IN. What a record looked like in the kernel's or a shim's ring stays in [`kernel`] and
//!    [`shim`]. They make [`Event`](perfusion_model::event::Event)s of it, and [`order`] sorts
//!    these by time. No symbols, no procfs here.

pub mod kernel;
pub mod launch;
pub mod order;
pub mod shim;

/// What can be changed while a recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Of the probes.
    pub kernel: kernel::Rates,
    /// As [`shim::ShimLimits::allocation_samples`].
    pub allocation_samples: u32,
}
