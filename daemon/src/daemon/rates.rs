//! The sampling rates in force, which the daemon lowers to stay within its CPU limit.

use std::sync::atomic::{AtomicU32, Ordering};

/// Written by the daemon's own thread; read for metrics. Nothing is ordered by it.
pub struct CurrentRates {
    frequency: AtomicU32,
    steps: AtomicU32,
}

impl CurrentRates {
    /// As configured.
    pub(super) fn new(frequency: u32) -> Self {
        Self { frequency: AtomicU32::new(frequency), steps: AtomicU32::new(0) }
    }

    /// CPU samples per second and CPU.
    #[must_use]
    pub fn frequency(&self) -> u32 {
        self.frequency.load(Ordering::Relaxed)
    }

    /// Steps below the configured rates.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.steps.load(Ordering::Relaxed)
    }

    /// From now on there are `frequency` samples, `steps` steps below the configured rates.
    pub(super) fn set(&self, frequency: u32, steps: u32) {
        self.frequency.store(frequency, Ordering::Relaxed);
        self.steps.store(steps, Ordering::Relaxed);
    }
}
