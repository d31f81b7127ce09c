//! Events in. [`kernel`] loads the probes and reads their ring. [`shim`] finds the shims' rings,
//! reads them and detaches shims. Both turn records into
//! [`Event`](perfusion_model::event::Event)s, and [`order`] sorts these by time.

pub mod kernel;
pub mod launch;
pub mod order;
pub mod shim;

/// What can be changed while a recording goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceRates {
    /// Of the probes.
    pub kernel: kernel::KernelRates,
    /// As [`shim::ShimLimits::allocation_samples`].
    pub allocation_samples: u32,
}
