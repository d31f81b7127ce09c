//! What the daemon's threads share: the configuration, counters of what happens outside the pipeline, and what it all costs.

use super::cost::Cost;
use crate::config::Config;
use crate::run::Watcher;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// A number that grows. Nothing is ordered by it.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Adds to it.
    pub fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counts {
    ($($field:ident $help:literal;)*) => {
        /// What is counted outside the pipeline.
        #[derive(Debug, Default)]
        pub struct Counts {
            $(#[doc = $help] pub $field: Count,)*
        }

        impl Counts {
            /// Name and value of each.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$((concat!("daemon_", stringify!($field)), self.$field.get()),)*]
            }
        }
    };
}

counts! {
    windows "Windows encoded.";
    profiles "Profiles made: one per service and window.";
    profiles_failed "Profiles that could not be encoded.";
    profiles_dropped "Profiles dropped because the sinks were busy with earlier windows.";
    services_folded "Services that shared the profile of the rest because there were too many.";
    reloads "Times the configuration was read again and used.";
    reloads_failed "Times the configuration was read again and refused.";
    recordings "Recordings begun.";
    attached "Processes the shim was loaded into.";
    attach_failed "Times the shim could not be loaded into a process.";
}

/// Shared by all threads.
pub struct State {
    config: Mutex<Arc<Config>>,
    host: String,
    frequency: AtomicU32,
    /// Speaks with the recording, while there is one.
    watcher: Mutex<Option<Watcher>>,
    /// When the daemon last looked at its clocks.
    beat: Mutex<Instant>,
    /// What is other than configured, in words; for each profile.
    remarks: Mutex<Vec<String>>,
    /// Counters.
    pub counters: Counts,
    /// What it costs.
    pub cost: Cost,
}

impl State {
    /// With a configuration that was checked.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let frequency = AtomicU32::new(config.recording.frequency);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self {
            config: Mutex::new(Arc::new(config)),
            host,
            frequency,
            watcher: Mutex::default(),
            beat: Mutex::new(Instant::now()),
            remarks: Mutex::default(),
            counters: Counts::default(),
            cost: Cost::default(),
        }
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

    /// Who speaks with the recording, while there is one.
    #[must_use]
    pub fn watcher(&self) -> Option<Watcher> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A recording has begun, or ended.
    pub fn set_watcher(&self, watcher: Option<Watcher>) {
        *self.watcher.lock().unwrap_or_else(PoisonError::into_inner) = watcher;
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

    /// They are so many from now on.
    pub fn set_frequency(&self, hz: u32) {
        self.frequency.store(hz, Ordering::Relaxed);
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
        labels.entry("host.name".to_owned()).or_insert_with(|| self.host.clone());
        labels
    }
}
