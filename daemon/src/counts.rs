//! What is counted outside the pipeline, in words: for docs/metrics.md and /metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that grows. Nothing is ordered by it.
#[derive(Debug, Default)]
pub struct DaemonCounter(AtomicU64);

impl DaemonCounter {
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
    ($($field:ident $name:literal $help:literal;)*) => {
        /// What is counted outside the pipeline.
        #[derive(Debug, Default)]
        pub struct DaemonCounters {
            $(#[doc = $help] pub $field: DaemonCounter,)*
        }

        impl DaemonCounters {
            /// Name and meaning of each.
            pub const ALL: &[(&str, &str)] = &[$(($name, $help)),*];

            /// Name and value of each.
            #[must_use]
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$(($name, self.$field.get()),)*]
            }
        }
    };
}

counts! {
    windows "daemon_windows" "windows encoded";
    profiles "daemon_profiles" "profiles made: one per service and window";
    profiles_failed "daemon_profiles_failed" "profiles that could not be encoded";
    services_folded "daemon_services_folded" "services that shared the profile of the rest \
        because there were too many";
    reloads "daemon_reloads" "times the configuration was read again and used";
    reloads_failed "daemon_reloads_failed" "times the configuration was read again and refused";
    recordings "daemon_recordings" "recordings begun";
    attached "daemon_attached" "processes the shim was loaded into";
    attach_failed "daemon_attach_failed" "times the shim could not be loaded into a process";
    attach_no_headroom "daemon_attach_no_headroom" "of the failed ones, attaches that were not \
        begun because the process has too little memory left, in a cgroup or on the machine";
    attached_killed "daemon_attached_killed" "processes that the kernel killed for want of memory \
        within ten seconds of an attach";
    helpers_ended "daemon_helpers_ended" "times the helper ended that alone may attach to other \
        users' processes; nothing new of theirs is attached to from then on";
    windows_over_cpu "daemon_windows_over_cpu" "windows that took more CPU time than limits.cpu; \
        the next is recorded at lower rates, while there are any";
    memory_shed "daemon_memory_shed" "times caches were dropped to stay within limits.memory";
    memory_cuts "daemon_memory_cuts" "windows that ended early to stay within limits.memory";
    pod_lists "daemon_pod_lists" "times the API server was asked for all pods of the node";
    pod_watches "daemon_pod_watches" "times the API server was asked to tell what changes";
    pod_changes "daemon_pod_changes" "changes of pods and versions it told of";
    pod_failures "daemon_pod_failures" "times it did not answer, or not as it should";
    symbols_fetched "daemon_symbols_fetched" "debug files that servers sent (symbols.urls)";
    symbols_not_found "daemon_symbols_not_found" "debug files that no server has";
    symbols_refused "daemon_symbols_refused" "files that servers sent and that were not used: of \
        another build, without symbols, or too long";
    symbols_failed "daemon_symbols_failed" "debug files that could not be fetched: a server did \
        not answer in time, or not as it should";
    log_lines_lost "daemon_log_lines_lost" "lines of the log that nobody took in time, or that \
        could not be written";
}
