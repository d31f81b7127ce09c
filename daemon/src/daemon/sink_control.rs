//! The sinks of the configuration in force: opened, replaced when it changes, and watched.

use super::sinks::{self, OpenedSinks, SinkOpener, Sinks};
use crate::config::Config;
use crate::error::Error;
use perfusion_export::SinkError;
use std::collections::BTreeSet;
use std::time::Duration;

/// How long sinks may take to open when the daemon starts, on a host that may just be starting
/// itself.
const FIRST_SINKS_OPEN: Duration = Duration::from_secs(30);
/// The same of those of another configuration: nothing else is looked at meanwhile.
const SINKS_OPEN: Duration = Duration::from_secs(5);
/// A sink that is at one thing for so long is said to be.
const SINK_HANGS: Duration = Duration::from_secs(30);

/// The sinks at work.
pub(super) struct SinkControl {
    opener: SinkOpener,
    sinks: Sinks,
    /// Those that hang now.
    hanging: BTreeSet<String>,
}

impl SinkControl {
    /// Puts the sinks of this configuration to work.
    ///
    /// # Errors
    /// When one cannot be opened, or has no thread.
    pub(super) fn start(config: &Config) -> Result<Self, Error> {
        let mut opener = SinkOpener::default();
        let opened = opener.open(config, FIRST_SINKS_OPEN)?;
        let sinks = Sinks::start(opened).map_err(Error::internal("starting a thread"))?;
        Ok(Self { opener, sinks, hanging: BTreeSet::new() })
    }

    /// The sinks themselves.
    pub(super) fn sinks(&self) -> &Sinks {
        &self.sinks
    }

    /// Opens the sinks of another configuration, if they are not the ones at work.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub(super) fn open_others(
        &mut self,
        before: &Config,
        config: &Config,
    ) -> Result<Option<OpenedSinks>, SinkError> {
        let other = sinks::differ(before, config) || self.sinks.is_incomplete();
        other.then(|| self.opener.open(config, SINKS_OPEN)).transpose()
    }

    /// Puts others in the place of those at work.
    pub(super) fn replace(&mut self, opened: OpenedSinks) {
        if let Err(error) = self.sinks.replace(opened) {
            tracing::error!(%error, "no thread for a sink: it is as it was until the configuration \
                 is read again");
        }
    }

    /// Says when a sink takes long over one thing, and when it goes on.
    pub(super) fn look(&mut self) {
        self.sinks.look();
        let standing = self.sinks.watcher().standing();
        let hangs: BTreeSet<String> = standing
            .into_iter()
            .filter(|standing| standing.still >= SINK_HANGS)
            .map(|standing| standing.sink)
            .collect();
        for sink in hangs.difference(&self.hanging) {
            tracing::error!(
                sink,
                "does not come back from one write for {SINK_HANGS:?}: its disk or mount does not \
                 answer, and its profiles wait for it"
            );
        }
        for sink in self.hanging.difference(&hangs) {
            tracing::warn!(sink, "goes on");
        }
        self.hanging = hangs;
    }

    /// Those at work, to be closed.
    pub(super) fn into_sinks(self) -> Sinks {
        self.sinks
    }
}
