//! What the daemon's threads share: the configuration, counters of what happens outside the
//! pipeline, and what it all costs.

use super::attach_report::AttachReport;
use super::cost::Cost;
use super::mode::ResourceMode;
use super::rates::CurrentRates;
use super::recording_watch::RecordingWatch;
use super::switch::Switch;
use super::symbol_requests::SymbolRequests;
use crate::config::Config;
use crate::counts::DaemonCounters;
use perfusion_host::pods::Pods;
use perfusion_sources::kernel::rule_set::RuleSet;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Shared by all threads.
pub struct DaemonState {
    config: Mutex<Arc<Config>>,
    host: String,
    /// The rates in force.
    pub rates: CurrentRates,
    mode: Mutex<Arc<ResourceMode>>,
    /// What became of attaching to processes, as of the attacher's last round.
    pub attaches: AttachReport,
    /// The recording in progress.
    pub recording: RecordingWatch,
    /// Who is recorded; `None`: everybody.
    selection: Mutex<Option<Arc<RuleSet>>>,
    /// Which forms of the kill switch are on.
    switch: Mutex<Switch>,
    /// Why no recording could begin, in words.
    failure: Mutex<Option<String>>,
    /// The daemon ends, and with it the recording.
    is_ending: AtomicBool,
    /// When the daemon last looked at its clocks.
    beat: Mutex<Instant>,
    /// What is other than configured, in words; for each profile.
    remarks: Mutex<Vec<String>>,
    /// The pods of this node.
    pub pods: Arc<Pods>,
    /// Native symbols that servers are asked for.
    pub symbols: SymbolRequests,
    /// Counters.
    pub counters: Arc<DaemonCounters>,
    /// What it costs.
    pub cost: Cost,
}

impl DaemonState {
    /// With a configuration that was checked.
    #[must_use]
    pub fn new(config: Config, mode: ResourceMode) -> Self {
        let rates = CurrentRates::new(config.recording.frequency);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self {
            config: Mutex::new(Arc::new(config)),
            host,
            rates,
            mode: Mutex::new(Arc::new(mode)),
            attaches: AttachReport::default(),
            recording: RecordingWatch::default(),
            selection: Mutex::default(),
            switch: Mutex::default(),
            failure: Mutex::default(),
            is_ending: AtomicBool::new(false),
            beat: Mutex::new(Instant::now()),
            remarks: Mutex::default(),
            pods: Arc::default(),
            symbols: SymbolRequests::default(),
            counters: Arc::default(),
            cost: Cost::default(),
        }
    }

    /// On a host that allows all.
    #[cfg(test)]
    pub(super) fn of(config: Config) -> Self {
        let mode = ResourceMode::of(&config, &super::cgroup_limits::CgroupLimits::default(), 1.0);
        Self::new(config, mode)
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another in force.
    pub fn set_config(&self, config: Config) {
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(config);
    }

    /// The daemon ends: said before its recording is told to.
    pub fn ends(&self) {
        // Pairs with `is_ending`, read by the recording's processor after it was told to end.
        self.is_ending.store(true, Ordering::Release);
    }

    /// True when no other recording follows.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        // Pairs with `ends`.
        self.is_ending.load(Ordering::Acquire)
    }

    /// Who is recorded; `None`: everybody.
    #[must_use]
    pub fn selection(&self) -> Option<Arc<RuleSet>> {
        self.selection.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// These are recorded from now on.
    pub fn set_selection(&self, rules: Option<RuleSet>) {
        *self.selection.lock().unwrap_or_else(PoisonError::into_inner) = rules.map(Arc::new);
    }

    /// What the daemon may take.
    #[must_use]
    pub fn mode(&self) -> Arc<ResourceMode> {
        Arc::clone(&self.mode.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on it is this.
    pub fn set_mode(&self, mode: ResourceMode) {
        *self.mode.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(mode);
    }

    /// Which forms of the kill switch are on.
    #[must_use]
    pub fn switch(&self) -> Switch {
        *self.switch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These are on now; answers which were before.
    pub fn set_switch(&self, switch: Switch) -> Switch {
        std::mem::replace(&mut *self.switch.lock().unwrap_or_else(PoisonError::into_inner), switch)
    }

    /// By what it is switched off, in words.
    #[must_use]
    pub fn switched_off(&self) -> Option<String> {
        self.switch().text(&self.config().limits.kill_switch)
    }

    /// Why no recording could begin; `None` when one has.
    pub fn set_failure(&self, why: Option<String>) {
        // Errors can be of several lines, and services' managers and logs take one.
        let why = why.map(|why| why.lines().collect::<Vec<_>>().join(" "));
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }

    /// Why nothing is recorded, in words, where that is known.
    #[must_use]
    pub fn idle(&self) -> Option<String> {
        let failure = || self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.switched_off().or_else(failure)
    }

    /// When the daemon last looked at its clocks.
    #[must_use]
    pub fn last_beat(&self) -> Instant {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It looks at them now.
    pub fn beat(&self) {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// What is other than configured, one line each.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says so from now on.
    pub fn set_remarks(&self, remarks: Vec<String>) {
        *self.remarks.lock().unwrap_or_else(PoisonError::into_inner) = remarks;
    }

    /// Labels of every profile.
    #[must_use]
    pub fn labels(&self, config: &Config) -> BTreeMap<String, String> {
        let mut labels = config.services.labels.clone();
        // In a pod the host's own name is not to be had: what the system calls one is the pod's.
        let host = config.kubernetes.node.as_ref().unwrap_or(&self.host);
        labels.entry("host.name".to_owned()).or_insert_with(|| host.clone());
        if let Some(node) = &config.kubernetes.node {
            labels.entry("k8s.node.name".to_owned()).or_insert_with(|| node.clone());
        }
        labels
    }
}
