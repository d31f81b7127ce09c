//! Another configuration for a daemon at work.

use super::memory_budget;
use super::sinks::OpenedSinks;
use super::{Daemon, RecordingRequest};
use crate::config::Config;
use crate::error::Error;
use crate::select::cgroups::cgroup_id;
use std::sync::Arc;

impl Daemon {
    /// Reads the configuration again. One that cannot be used changes nothing.
    pub(super) fn reload(&mut self) -> Result<(), Error> {
        self.liveness.manager().reloading();
        let before = self.state.config();
        let (config, new_sinks) = match self.read_again(&before) {
            Ok(new) => new,
            Err(error) => {
                self.state.counters.reloads_failed.add(1);
                tracing::error!(%error, "the configuration stays as it was");
                self.liveness.manager().ready(
                    "recording with the configuration as it was: the new one cannot be used",
                );
                return Ok(());
            }
        };
        let anew = self.put_in_force(&before, config);
        if let Some(sinks) = new_sinks {
            self.sinks.replace(sinks);
        }
        self.endpoints.listen_again(&before, self.sinks.sinks());
        if !anew && before.selection != self.state.config().selection {
            // What shims do changes within the recording.
            let rules = self.selector.rules(&self.state.config());
            self.state.set_selection(rules);
        }
        if anew && let Some(active) = self.recording.take() {
            active.end()?;
        }
        self.try_anew();
        let new = self.state.config();
        self.follow_switch()?;
        if !Arc::ptr_eq(&new, &self.state.config()) {
            // What is recorded is what it was before, and that was said.
            return Ok(());
        }
        if self.recording.is_some() {
            // Not all that changes takes a new recording.
            self.retry.begun(RecordingRequest::of(&new));
        }
        self.state.counters.reloads.add(1);
        tracing::info!("the configuration was read again");
        self.liveness.manager().ready(&self.status());
        Ok(())
    }

    /// The new configuration, and its sinks where they are others than before.
    fn read_again(&mut self, before: &Config) -> Result<(Config, Option<OpenedSinks>), Error> {
        let loaded = self.sources.load()?;
        loaded.warn();
        // Asked now: the recording in progress ends only for one that can begin.
        if loaded.config.recording.cgroup != before.recording.cgroup {
            loaded.config.recording.cgroup.as_deref().map(cgroup_id).transpose()?;
        }
        let new_sinks = self.sinks.open_others(before, &loaded.config)?;
        Ok((loaded.config, new_sinks))
    }

    /// Puts a configuration in force. True when it takes another recording.
    fn put_in_force(&mut self, before: &Config, config: Config) -> bool {
        let mode = self.host.mode(&config);
        if before.limits.kill_switch != config.limits.kill_switch {
            // The lock stays where it is.
            tracing::warn!("the control socket moves when the daemon starts again");
        }
        let anew = self.state.mode().recording(&before.recording)
            != mode.recording(&config.recording)
            || before.selection.of_kernel() != config.selection.of_kernel()
            || before.kubernetes.pods != config.kubernetes.pods;
        let other_pods = before.kubernetes != config.kubernetes
            || before.selection.wanted() != config.selection.wanted();
        if let Some(active) = &self.recording {
            active.recording().allow_stacks(memory_budget::for_stacks(mode.memory));
        }
        self.state.set_mode(mode);
        if before.windows != config.windows {
            self.window_timer.restart(&config.windows);
        }
        if before.symbols != config.symbols {
            self.state.symbols.news.look_in(config.symbols.places());
        }
        if before.log != config.log {
            tracing::warn!("log takes effect when the daemon starts again");
        }
        if before.limits.lower_priority != config.limits.lower_priority {
            tracing::warn!("limits.lower_priority takes effect when the daemon starts again");
        }
        self.state.set_config(config);
        if other_pods {
            self.selector.follow_pods(&self.state.config());
        }
        anew
    }
}
