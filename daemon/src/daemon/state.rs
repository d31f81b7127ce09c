//! What the daemon's threads share: the configuration, counters of what happens outside the
//! pipeline, and what it all costs.

use super::attach_coverage::AttachCoverage;
use super::cost::Cost;
use super::mode::ResourceMode;
use super::switch::Switch;
use crate::config::Config;
use crate::counts::DaemonCounters;
use perfusion_host::pods::Pods;
use perfusion_recorder::RecordingHandle;
use perfusion_recorder::commands::CollectorStatus;
use perfusion_sources::kernel::rule_set::{RuleSet, ServiceExclusions};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer of the recording's stages is good for all who ask.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Shared by all threads.
pub struct DaemonState {
    config: Mutex<Arc<Config>>,
    host: String,
    frequency: AtomicU32,
    /// Below the rates that were asked for.
    steps: AtomicU32,
    mode: Mutex<Arc<ResourceMode>>,
    /// Why processes with a CLR are not attached to, by pid and start time.
    unattached: Mutex<HashMap<(u32, u64), String>>,
    /// Who is recorded; `None`: everybody.
    selection: Mutex<Option<Arc<RuleSet>>>,
    /// What shims leave out of the processes of services.
    left_out: Mutex<HashMap<Arc<str>, ServiceExclusions>>,
    /// Which of the processes of services have shims.
    covered: Mutex<HashMap<Arc<str>, AttachCoverage>>,
    /// Speaks with the recording, while there is one.
    watcher: Mutex<Option<RecordingHandle>>,
    /// What it said when it was asked last, and when that was.
    looked: Mutex<Option<(Instant, Option<Arc<CollectorStatus>>)>>,
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
    /// Counters.
    pub counters: Arc<DaemonCounters>,
    /// What it costs.
    pub cost: Cost,
}

impl DaemonState {
    /// With a configuration that was checked.
    #[must_use]
    pub fn new(config: Config, mode: ResourceMode) -> Self {
        let frequency = AtomicU32::new(config.recording.frequency);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self {
            config: Mutex::new(Arc::new(config)),
            host,
            frequency,
            steps: AtomicU32::new(0),
            mode: Mutex::new(Arc::new(mode)),
            unattached: Mutex::default(),
            selection: Mutex::default(),
            left_out: Mutex::default(),
            covered: Mutex::default(),
            watcher: Mutex::default(),
            looked: Mutex::default(),
            switch: Mutex::default(),
            failure: Mutex::default(),
            is_ending: AtomicBool::new(false),
            beat: Mutex::new(Instant::now()),
            remarks: Mutex::default(),
            pods: Arc::default(),
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

    /// Why processes with a CLR are not attached to, by pid and start time.
    #[must_use]
    pub fn unattached(&self) -> HashMap<(u32, u64), String> {
        self.unattached.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// These are the reasons now.
    pub fn set_unattached(&self, reasons: HashMap<(u32, u64), String>) {
        *self.unattached.lock().unwrap_or_else(PoisonError::into_inner) = reasons;
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

    /// What shims leave out of the processes of this service.
    #[must_use]
    pub fn left_out(&self, service: &str) -> Option<ServiceExclusions> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner).get(service).copied()
    }

    /// This is left out of services now.
    pub fn set_left_out(&self, of_services: HashMap<Arc<str>, ServiceExclusions>) {
        *self.left_out.lock().unwrap_or_else(PoisonError::into_inner) = of_services;
    }

    /// Which of the .NET processes of this service have shims.
    #[must_use]
    pub fn covered(&self, service: &str) -> AttachCoverage {
        let covered = self.covered.lock().unwrap_or_else(PoisonError::into_inner);
        covered.get(service).cloned().unwrap_or_default()
    }

    /// These have now.
    pub fn set_covered(&self, of_services: HashMap<Arc<str>, AttachCoverage>) {
        *self.covered.lock().unwrap_or_else(PoisonError::into_inner) = of_services;
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

    /// Who speaks with the recording, while there is one.
    #[must_use]
    pub fn watcher(&self) -> Option<RecordingHandle> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A recording has begun, or ended.
    pub fn set_watcher(&self, watcher: Option<RecordingHandle>) {
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = watcher;
        // After that: who asks the old one meanwhile keeps its answer no longer than any other.
        *self.looked.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// How the recording's stages stand, or stood within [`LOOK_AGAIN`]: to say it takes the thread
    /// that drains the rings, and whoever may ask over the network may ask without end. `None`
    /// where there is no recording, or it is too busy to say.
    #[must_use]
    pub fn look(&self) -> Option<Arc<CollectorStatus>> {
        // Held while it is asked: others wait for the same answer.
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let watcher = self.watcher()?;
        if let Some((at, look)) = &*looked
            && at.elapsed() < LOOK_AGAIN
        {
            return look.clone();
        }
        let look = watcher.look().map(Arc::new);
        *looked = Some((Instant::now(), look.clone()));
        look
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

    /// CPU samples per second and CPU at the moment.
    #[must_use]
    pub fn frequency(&self) -> u32 {
        self.frequency.load(Ordering::Relaxed)
    }

    /// Steps below the rates that were asked for.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.steps.load(Ordering::Relaxed)
    }

    /// They are so many from now on, that many steps below what was asked for.
    pub fn set_frequency(&self, hz: u32, steps: u32) {
        self.frequency.store(hz, Ordering::Relaxed);
        self.steps.store(steps, Ordering::Relaxed);
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
