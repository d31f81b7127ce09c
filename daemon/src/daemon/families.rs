//! Every family of metrics there can be, of which each answer has its name, its type and its
//! meaning: the lists of counters of the stages, those of the sinks, and what is only said here.
//! docs/metrics.md is written from the same lists.

use crate::counts::DaemonCounters;
use ebpf_common::counter::Counter;
use perfusion_export::counts::{SINK, SINK_GAUGES};
use perfusion_recorder::counters::DAEMON;
use perfusion_sources::shim::counters::SHIM_READER;
use profiler_protocol::counter as shim;

/// Counts of what is in a cache now: they may fall.
const GAUGES: &str = "symbolize_";

/// True for the name of a count that says how much there is, not how much there was.
#[must_use]
pub fn may_fall(name: &str) -> bool {
    name.starts_with(GAUGES)
}

/// What its values may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// They only grow, from 0 when the daemon or its recording begins.
    Counter,
    /// They rise and fall.
    Gauge,
    /// They stand still, and their labels say what there is to say.
    Info,
}

impl MetricKind {
    /// What OpenMetrics calls it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
        }
    }

    /// What the names of its samples end with.
    #[must_use]
    pub const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge => "",
            Self::Info => "_info",
        }
    }
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricFamily {
    /// Its name, with neither `perfusion_` nor what its type adds.
    pub name: &'static str,
    /// Its type.
    pub kind: MetricKind,
    /// Its meaning.
    pub help: &'static str,
}

macro_rules! families {
    ($($kind:ident $constant:ident $name:literal $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $constant: MetricFamily =
                MetricFamily { name: $name, kind: MetricKind::$kind, help: $help };
        )*

        /// Those that no stage counts.
        pub const OWN: &[MetricFamily] = &[$($constant),*];
    };
}

families! {
    Info BUILD "build" "what runs: `version`";
    Counter CPU_SECONDS "cpu_seconds" "CPU time of the profiler by `part`: `daemon`, and \
                                       `probes`, which is an estimate, and not there where the \
                                       kernel does not count it";
    Gauge CPU_LIMIT "cpu_limit_cpus" "CPUs the profiler may take, probes included where their \
                                      time is known";
    Gauge MEMORY "memory_bytes" "memory of the profiler by `part`: `resident`, and the kernel's \
                                 for it, `maps` and `rings`";
    Gauge MEMORY_LIMIT "memory_limit_bytes" "what it may be in all";
    Gauge REDUCED "reduced" "1 in reduced mode: its cgroup allows little";
    Gauge RATE_STEPS "rate_steps" "steps below the rates asked for, to stay within the CPU limit; \
                                   5 is the last";
    Gauge FREQUENCY "frequency_hertz" "CPU samples per second and CPU";
    Gauge RECORDING "recording" "1 while there is a recording, also one that is too busy to answer";
    Gauge SWITCHED_OFF "switched_off" "1 for each form of the kill switch that is on, `by`: \
                                       `file`, `signal`, `config`";
    Gauge SHIM_PROCESSES "shim_processes" "processes whose shim is read";
    Gauge PODS "pods" "pods of this node that are known";
}

/// Those of the pipeline, which are there while it records.
pub fn pipeline() -> impl Iterator<Item = MetricFamily> {
    let probes = Counter::ALL.iter().map(|info| (info.name, info.help));
    // Their meanings are comments in the code, which begin with a blank.
    let shims = shim::ALL.iter().map(|(_, name, help)| (*name, help.trim()));
    let reader = SHIM_READER.iter().map(|(name, help)| (*name, help.trim()));
    let counted = probes.chain(shims).chain(reader).chain(DAEMON.iter().copied());
    counted.map(|(name, help)| {
        let kind = if may_fall(name) { MetricKind::Gauge } else { MetricKind::Counter };
        MetricFamily { name, kind, help }
    })
}

/// Those of the daemon around it.
pub fn daemon() -> impl Iterator<Item = MetricFamily> {
    DaemonCounters::ALL.iter().map(|&(name, help)| MetricFamily {
        name,
        kind: MetricKind::Counter,
        help,
    })
}

/// Those of sinks, whose names begin with `sink_` in metrics; each sink has some of them.
pub fn sinks() -> impl Iterator<Item = MetricFamily> {
    let lists = [(MetricKind::Counter, SINK), (MetricKind::Gauge, SINK_GAUGES)];
    lists.into_iter().flat_map(|(kind, list)| {
        list.iter().map(move |&(name, help)| MetricFamily { name, kind, help })
    })
}

#[cfg(test)]
mod tests {
    use super::{OWN, daemon, pipeline, sinks};
    use std::collections::HashSet;

    #[test]
    fn each_family_is_there_once_and_has_a_meaning() {
        let mut names = HashSet::new();
        for family in pipeline().chain(daemon()).chain(OWN.iter().copied()) {
            assert!(names.insert(family.name), "{} is there twice", family.name);
            assert!(
                !family.help.is_empty() && family.help.trim() == family.help,
                "{}",
                family.name
            );
        }
        assert_eq!(
            sinks().map(|family| family.name).collect::<HashSet<_>>().len(),
            sinks().count()
        );
    }
}

#[cfg(test)]
mod sink_tests {
    use crate::daemon::sink_worker::SinkStatus;
    use perfusion_export::Sink;
    use perfusion_export::counts::{SINK, SINK_GAUGES};
    use perfusion_export::deliver::SpoolBacklog;
    use perfusion_export::directory::Files;
    use perfusion_export::directory::ProfileDirectory;
    use perfusion_export::otlp::{Otlp, OtlpOptions};
    use perfusion_export::pyroscope::{Pyroscope, PyroscopeOptions};
    use perfusion_export::receiver::SpoolOptions;
    #[cfg(feature = "object-storage")]
    use perfusion_export::s3::{S3, S3Options};
    use std::collections::BTreeSet;

    #[test]
    fn what_sinks_count_is_described_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let spool = SpoolOptions {
            directory: Some(folder.path().join("spool")),
            ..SpoolOptions::default()
        };
        let url = || "http://a".to_owned();
        let sinks: Vec<Box<dyn Sink>> = vec![
            Box::new(ProfileDirectory::open(folder.path(), &Files::default()).unwrap()),
            Box::new(
                Otlp::open(&OtlpOptions { url: url(), ..OtlpOptions::default() }, &spool).unwrap(),
            ),
            Box::new(
                Pyroscope::open(
                    &PyroscopeOptions { url: url(), ..PyroscopeOptions::default() },
                    &spool,
                )
                .unwrap(),
            ),
            #[cfg(feature = "object-storage")]
            Box::new(
                S3::open(
                    &S3Options { bucket: "profiles".to_owned(), ..S3Options::default() },
                    &spool,
                )
                .unwrap(),
            ),
        ];
        let counters = sinks.iter().flat_map(|sink| sink.counters()).collect();
        let standing = SinkStatus {
            counters,
            backlog: Some(SpoolBacklog::default()),
            ..SinkStatus::default()
        };
        let counted: BTreeSet<&str> = standing.values().map(|(name, _)| name).collect();
        assert_eq!(counted, SINK.iter().chain(SINK_GAUGES).map(|(name, _)| *name).collect());
    }
}
