//! Who is recorded: the rules of the configuration, joined with the cgroups and pods of this node
//! as they are now.

use super::state::DaemonState;
use crate::config::Config;
use crate::error::Error;
use crate::kubernetes::PodSource;
use crate::kubernetes::api::PodWatch;
use crate::kubernetes::logs::PodLogs;
use crate::select::cgroups::{Cgroups, cgroup_id};
use perfusion_host::pods::ShownPodLabels;
use perfusion_recorder::Recording;
use perfusion_sources::kernel::KernelSelection;
use perfusion_sources::kernel::rule_set::RuleSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often cgroups are looked for, where rules look at them: until then a new one is not
/// recorded.
const SCAN: Duration = Duration::from_secs(2);

/// Where the names of pods come from.
enum PodNames {
    None,
    Logs(PodLogs),
    Api(PodWatch),
}

/// Keeps the rules in force up to date.
pub(super) struct Selector {
    state: Arc<DaemonState>,
    cgroups: Cgroups,
    knowledge: PodNames,
    /// When cgroups and pods were last looked at, and how often pods had changed by then.
    scanned: Instant,
    pods_changed: u64,
}

impl Selector {
    /// Nothing is known of pods yet.
    pub(super) fn new(state: Arc<DaemonState>) -> Self {
        Self {
            state,
            cgroups: Cgroups::default(),
            knowledge: PodNames::None,
            scanned: Instant::now(),
            pods_changed: 0,
        }
    }

    /// The rules of a configuration, with the cgroups there are now; `None`: everybody is recorded.
    pub(super) fn rules(&mut self, config: &Config) -> Option<RuleSet> {
        let source = config.kubernetes.pods;
        // Pods that the API server tells of can except themselves, where the probes can tell them
        // by their cgroups.
        let any =
            !config.selection.is_all() || (source == PodSource::Api && self.cgroups.are_known());
        let frequency = self.state.mode().recording(&config.recording).frequency;
        any.then(|| config.selection.rules(&mut self.cgroups, &self.state.pods, source, frequency))
    }

    /// What the probes are told of these rules.
    ///
    /// # Errors
    /// When `cgroup`, whose threads alone are recorded where there are no rules, is none.
    pub(super) fn for_kernel(
        &self,
        config: &Config,
        rules: Option<&RuleSet>,
        cgroup: Option<&Path>,
    ) -> Result<KernelSelection, Error> {
        Ok(match (rules.and_then(|rules| self.of_kernel(config, rules)), cgroup) {
            (Some(rules), _) => KernelSelection::Rules(rules),
            (None, Some(path)) => KernelSelection::Cgroup(cgroup_id(path)?),
            (None, None) => KernelSelection::All,
        })
    }

    /// Of these rules, those of the probes; `None` when they do not matter to them.
    fn of_kernel(&self, config: &Config, rules: &RuleSet) -> Option<RuleSet> {
        let (selection, source) = (config.selection.of_kernel(), config.kubernetes.pods);
        let any = !selection.is_all() || (source == PodSource::Api && self.cgroups.are_known());
        any.then(|| rules.of_kernel(selection.looks_at_cgroups(source)))
    }

    /// Begins to follow the pods of this node, as this configuration says.
    pub(super) fn follow_pods(&mut self, config: &Config) {
        self.forget_pods();
        let options = &config.kubernetes;
        let (labels, annotations) = (options.labels.clone(), options.annotations.clone());
        self.state
            .pods
            .show(ShownPodLabels { labels: labels.clone(), annotations: annotations.clone() });
        self.knowledge = match options.pods {
            PodSource::Logs => {
                let mut logs = PodLogs::of(options.pod_logs.clone());
                logs.read(&self.state.pods, config.selection.names_pods());
                PodNames::Logs(logs)
            }
            PodSource::Api => {
                if !self.cgroups.are_known() {
                    tracing::warn!(
                        "no cgroup v2 hierarchy: pods that want no profile are recorded, and not \
                         attached to"
                    );
                }
                let mut wanted = config.selection.wanted();
                wanted.labels.extend(labels);
                wanted.annotations.extend(annotations);
                let (pods, counters) =
                    (Arc::clone(&self.state.pods), Arc::clone(&self.state.counters));
                match PodWatch::start(options, wanted.with(), pods, counters) {
                    Ok(watch) => PodNames::Api(watch),
                    Err(error) => {
                        tracing::error!(%error, "nothing is known of pods, and none is recorded");
                        PodNames::None
                    }
                }
            }
        };
    }

    /// Ends the thread that asks about pods, where there is one.
    pub(super) fn forget_pods(&mut self) {
        if let PodNames::Api(watch) = std::mem::replace(&mut self.knowledge, PodNames::None) {
            watch.stop();
        }
    }

    /// Looks now and then which pods and cgroups there are, and tells the probes of the recording
    /// in progress.
    pub(super) fn look(&mut self, now: Instant, recording: Option<&Recording>) {
        // A pod that opts out is not to wait for the next scan.
        let changes = self.state.pods.changes();
        if now < self.scanned + SCAN && changes == self.pods_changed {
            return;
        }
        (self.scanned, self.pods_changed) = (now, changes);
        if let PodNames::Logs(logs) = &mut self.knowledge {
            logs.read(&self.state.pods, self.state.config().selection.names_pods());
        }
        self.look_at_cgroups(recording);
    }

    /// Tells the probes of cgroups that came and went.
    fn look_at_cgroups(&mut self, recording: Option<&Recording>) {
        let Some(known) = self.state.selection().filter(|rules| rules.cgroups.is_some()) else {
            return;
        };
        let config = self.state.config();
        let Some(rules) = self.rules(&config).filter(|rules| *rules != *known) else { return };
        let cgroups = self.of_kernel(&config, &rules).and_then(|of_kernel| of_kernel.cgroups);
        if let Some(recording) = recording
            && cgroups.is_none_or(|cgroups| recording.select_cgroups(cgroups))
        {
            self.state.set_selection(Some(rules));
        }
    }
}
