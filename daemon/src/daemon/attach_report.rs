//! What the attacher has to say about processes and services, for everybody else: profiles, the
//! control socket.

use super::attach_coverage::AttachCoverage;
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The attacher's last round.
#[derive(Default)]
pub struct AttachReport(Mutex<AttachRound>);

/// One round over all processes with a CLR.
#[derive(Default)]
pub struct AttachRound {
    /// Why processes are not attached to, by pid and start time.
    pub unattached: HashMap<(u32, u64), String>,
    /// What shims leave out of the processes of services.
    pub excluded: HashMap<Arc<str>, ServiceExclusions>,
    /// Which of the processes of services have shims.
    pub coverage: HashMap<Arc<str>, AttachCoverage>,
}

impl AttachReport {
    /// This is the last round from now on.
    pub fn publish(&self, round: AttachRound) {
        *self.lock() = round;
    }

    /// Why processes with a CLR are not attached to, by pid and start time.
    #[must_use]
    pub fn unattached(&self) -> HashMap<(u32, u64), String> {
        self.lock().unattached.clone()
    }

    /// What shims leave out of the processes of this service.
    #[must_use]
    pub fn excluded(&self, service: &str) -> Option<ServiceExclusions> {
        self.lock().excluded.get(service).copied()
    }

    /// Which of the .NET processes of this service have shims.
    #[must_use]
    pub fn coverage(&self, service: &str) -> AttachCoverage {
        self.lock().coverage.get(service).cloned().unwrap_or_default()
    }

    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, AttachRound> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
