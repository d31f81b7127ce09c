//! What the probes leave out of the processes of services, window by window.

use foldhash::HashMap;
use perfusion_model::feature::ExcludedFeatures;
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use std::sync::Arc;

/// Exclusions by service.
pub(super) type ExclusionsByService = HashMap<Arc<str>, ServiceExclusions>;

/// Exclusions of the window in progress, and of the one that was over last.
#[derive(Default)]
pub(super) struct WindowExclusions {
    in_progress: ExclusionsByService,
    last: ExclusionsByService,
}

impl WindowExclusions {
    /// The probes leave this out of a thread of the service.
    pub(super) fn note(&mut self, service: &Arc<str>, excluded: ExcludedFeatures) {
        ServiceExclusions::add(&mut self.in_progress, service, excluded);
    }

    /// Takes those of the window that ends.
    pub(super) fn take(&mut self) -> ExclusionsByService {
        std::mem::take(&mut self.in_progress)
    }

    /// A window with these is over.
    pub(super) fn window_is_over(&mut self, exclusions: ExclusionsByService) {
        self.last = exclusions;
    }

    /// Those of a service in the window that was over last.
    pub(super) fn of_last_window(&self, service: &str) -> Option<ServiceExclusions> {
        self.last.get(service).copied()
    }
}
