//! How much this daemon may take, of what the configuration and its cgroup allow. Where that is
//! little it begins with smaller tables and lower rates, the reduced mode, and says so.

use super::cgroup_limits::CgroupLimits;
use crate::config::{Config, LimitsConfig, RecordingConfig};
use ebpf_common::limits::{DEFAULT_MAX_PLACES, DEFAULT_MAX_THREADS};
use perfusion_export::quantity::ByteSize;
use perfusion_host::cpus::CpusError;

/// With less of one of them the mode is reduced.
const ENOUGH_CPUS: f64 = 1.0;
const ENOUGH_MEMORY: u64 = 512 << 20;
/// Part of a cgroup's limit that is ours to use: the rest is for page cache and for what comes
/// between two looks.
const PART_OF_CPUS: f64 = 0.5;
const PART_OF_MEMORY: f64 = 0.6;
/// Part of the memory that the ring to the probes may take; four times as much may be on its way
/// behind it.
const RING_PART: u64 = 16;

/// What is recorded in reduced mode at most.
const REDUCED_HZ: u32 = 49;
const REDUCED_WAIT_STACKS: u64 = 2 << 20;
const REDUCED_LIVE_OBJECTS: u32 = 1024;
const REDUCED_ALLOCATION_SAMPLES: u32 = 128;
const REDUCED_RING: u64 = 4 << 20;

/// What this host has for the daemon, whatever the configuration allows it.
pub(super) struct HostLimits {
    cgroup: CgroupLimits,
    cpus: f64,
}

impl HostLimits {
    /// What this process's cgroup allows, and the CPUs there are.
    ///
    /// # Errors
    /// When the CPUs cannot be counted.
    pub(super) fn read() -> Result<Self, CpusError> {
        let cgroup = CgroupLimits::read();
        Ok(Self { cgroup, cpus: perfusion_host::cpus::online()?.len() as f64 })
    }

    /// What the daemon may take with this configuration.
    pub(super) fn mode(&self, config: &Config) -> ResourceMode {
        ResourceMode::of(config, &self.cgroup, self.cpus)
    }
}

/// What this daemon may take.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceMode {
    /// Why it is reduced, in words.
    pub reduced: Option<String>,
    /// Bytes of memory: resident, maps and rings together.
    pub memory: u64,
    /// CPUs, daemon and probes together.
    pub cpus: f64,
}

impl ResourceMode {
    /// On a host with so many CPUs.
    #[must_use]
    pub fn of(config: &Config, allowed: &CgroupLimits, host_cpus: f64) -> Self {
        let LimitsConfig { cpu, memory, .. } = &config.limits;
        let mut why = Vec::new();
        if let Some(cpus) = allowed.cpus.filter(|cpus| *cpus < ENOUGH_CPUS) {
            why.push(format!("its cgroup allows {cpus:.2} CPUs, less than {ENOUGH_CPUS}"));
        }
        if let Some(bytes) = allowed.memory.filter(|bytes| *bytes < ENOUGH_MEMORY) {
            why.push(format!(
                "its cgroup allows {} MiB of memory, less than {}",
                bytes >> 20,
                ENOUGH_MEMORY >> 20
            ));
        }
        let own_memory =
            allowed.memory.map_or(u64::MAX, |bytes| (bytes as f64 * PART_OF_MEMORY) as u64);
        let own_cpus = allowed.cpus.map_or(f64::INFINITY, |cpus| cpus * PART_OF_CPUS);
        Self {
            reduced: (!why.is_empty()).then(|| why.join(" and ")),
            memory: memory.0.min(own_memory),
            cpus: (cpu.0 * host_cpus).min(own_cpus),
        }
    }

    /// What is recorded of what was asked for.
    #[must_use]
    pub fn recording(&self, asked: &RecordingConfig) -> RecordingConfig {
        let mut what = asked.clone();
        // The ring is a power of two, and stays one.
        while what.ring.0 > 1 << 20 && what.ring.0 > self.memory / RING_PART {
            what.ring = ByteSize(what.ring.0 / 2);
        }
        if self.reduced.is_some() {
            what.frequency = what.frequency.min(REDUCED_HZ);
            what.wait_stacks = ByteSize(what.wait_stacks.0.min(REDUCED_WAIT_STACKS));
            what.live_objects = what.live_objects.min(REDUCED_LIVE_OBJECTS);
            what.allocation_samples = what.allocation_samples.min(REDUCED_ALLOCATION_SAMPLES);
            what.ring = ByteSize(what.ring.0.min(REDUCED_RING));
        }
        what
    }

    /// Threads and places of code the probes can know at once.
    #[must_use]
    pub fn tables(&self) -> (u32, u32) {
        let part = if self.reduced.is_some() || self.memory < ENOUGH_MEMORY / 4 { 4 } else { 1 };
        (DEFAULT_MAX_THREADS, DEFAULT_MAX_PLACES / part)
    }

    /// For each profile and the log.
    #[must_use]
    pub fn remarks(&self, asked: &RecordingConfig) -> Vec<String> {
        let RecordingConfig {
            frequency, wait_stacks, live_objects, allocation_samples, ring, ..
        } = self.recording(asked);
        let remark = |why: &String| {
            format!(
                "reduced mode: {why}; {frequency} CPU samples per second and CPU, wait stacks of \
                 {wait_stacks} a second, \
                 {live_objects} live objects of each process and {allocation_samples} samples of \
                 its allocations a second, a ring of {ring}"
            )
        };
        let smaller = (self.reduced.is_none() && ring < asked.ring).then(|| {
            format!(
                "recording.ring: {} was asked for and it is {ring}, since limits.memory or its \
                 cgroup leaves the daemon {}",
                asked.ring,
                ByteSize(self.memory)
            )
        });
        self.reduced.iter().map(remark).chain(smaller).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::ResourceMode;
    use crate::config::Config;
    use crate::daemon::cgroup_limits::CgroupLimits;
    use perfusion_export::quantity::ByteSize;

    fn mode(config: &Config, cpus: Option<f64>, memory: Option<u64>) -> ResourceMode {
        ResourceMode::of(config, &CgroupLimits { cpus, memory }, 4.0)
    }

    #[test]
    fn less_than_a_cpu_or_half_a_gibibyte_is_a_reduced_mode_that_has_a_name() {
        let config = Config::default();
        let full = mode(&config, Some(1.0), Some(512 << 20));
        assert_eq!(
            (full.reduced.as_deref(), full.recording(&config.recording)),
            (None, config.recording.clone())
        );
        for (cpus, memory, name) in [
            (Some(0.5), None, "0.50 CPUs"),
            (None, Some(300 << 20), "300 MiB of memory"),
            (Some(0.25), Some(100 << 20), "0.25 CPUs, less than 1 and its cgroup allows 100 MiB"),
        ] {
            let reduced = mode(&config, cpus, memory);
            let remark = reduced.remarks(&config.recording).remove(0);
            assert!(
                remark.starts_with("reduced mode: its cgroup allows") && remark.contains(name),
                "{remark}"
            );
            let what = reduced.recording(&config.recording);
            assert!(
                what.frequency < config.recording.frequency && what.ring < config.recording.ring
            );
            assert!(memory.is_none_or(|limit| reduced.memory < limit));
            assert!(cpus.is_none_or(|limit| reduced.cpus <= limit));
        }
    }

    #[test]
    fn lower_rates_that_were_asked_for_stay_and_the_ring_fits_into_the_memory() {
        let mut config = Config::default();
        config.recording.frequency = 7;
        config.recording.ring = ByteSize(64 << 20);
        config.limits.memory = ByteSize(100 << 20);
        let small = mode(&config, None, None);
        let what = small.recording(&config.recording);
        let remarks = small.remarks(&config.recording);
        assert!(remarks.len() == 1 && remarks[0].contains("recording.ring: 64MiB"), "{remarks:?}");
        assert_eq!((what.frequency, what.ring, small.reduced), (7, ByteSize(4 << 20), None));
        assert_eq!(mode(&config, Some(0.1), None).recording(&config.recording).frequency, 7);
    }
}
