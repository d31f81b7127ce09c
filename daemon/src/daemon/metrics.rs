//! The counters of all stages as OpenMetrics text. Labels are few and bounded: no process, no
//! service. What there can be is in `families`.

use super::cost::daemon_cpu;
use super::families::{self, MetricFamily, MetricKind};
use super::sink_worker::SinkStatus;
use super::state::DaemonState;
use perfusion_recorder::commands::CollectorStatus;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What [`text()`] is: the answer's type.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// One document. Each family is there, with its type and meaning; those of the pipeline have values
/// while it stands.
#[must_use]
pub fn text(state: &DaemonState, look: Option<&CollectorStatus>, sinks: &[SinkStatus]) -> String {
    let mut document = Document(String::new());
    pipeline(&mut document, look);
    let counted: BTreeMap<&str, u64> = state.counters.list().into_iter().collect();
    for family in families::daemon() {
        document.family(family, &single(counted.get(family.name).copied().unwrap_or(0) as f64));
    }
    of_sinks(&mut document, sinks);
    let label =
        |label: &str, of: &str, value: f64| (format!("{{{label}=\"{}\"}}", escaped(of)), value);
    let part = |of: &str, value: f64| label("part", of, value);
    let mut cpu = vec![part("daemon", daemon_cpu().as_secs_f64())];
    cpu.extend(state.cost.probes_cpu().map(|probes| part("probes", probes.as_secs_f64())));
    document.family(families::CPU_SECONDS, &cpu);
    let memory = state.cost.memory();
    let memory = [
        part("resident", memory.resident as f64),
        part("maps", memory.maps as f64),
        part("rings", memory.rings as f64),
    ];
    document.family(families::MEMORY, &memory);
    let mode = state.mode();
    document.family(families::MEMORY_LIMIT, &single(mode.memory as f64));
    document.family(families::CPU_LIMIT, &single(mode.cpus));
    document.family(families::REDUCED, &single(truth(mode.reduced.is_some())));
    document.family(families::RATE_STEPS, &single(state.rates.steps().into()));
    document.family(families::RECORDING, &single(truth(state.recording.is_active())));
    let switch = state.switch().list().map(|(by, is_on)| label("by", by, truth(is_on)));
    document.family(families::SWITCHED_OFF, &switch);
    document.family(families::FREQUENCY, &single(state.rates.frequency().into()));
    let shims = look.map_or(0, |look| look.shims.len());
    document.family(families::SHIM_PROCESSES, &single(shims as f64));
    document.family(families::PODS, &single(state.pods.count() as f64));
    document.family(families::BUILD, &[label("version", env!("CARGO_PKG_VERSION"), 1.0)]);
    document.0 + "# EOF\n"
}

fn pipeline(document: &mut Document, look: Option<&CollectorStatus>) {
    // Equal names of two stages are one family.
    let mut counted: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, value) in look.iter().flat_map(|look| &look.counters) {
        *counted.entry(name).or_default() += value;
    }
    for family in families::pipeline() {
        // One that nobody has counted yet is at 0 while it could be; a zero for want of an answer
        // would be a fall.
        let value = counted.remove(family.name).or(look.map(|_| 0));
        match value {
            Some(value) => document.family(family, &single(value as f64)),
            None => document.family(family, &[]),
        }
    }
    // What is in no list is a mistake that a test finds; its value is shown all the same.
    for (name, value) in counted {
        document.describe(name, MetricKind::Counter, "not described");
        document.sample(name, MetricKind::Counter, "", value as f64);
    }
}

fn of_sinks(document: &mut Document, sinks: &[SinkStatus]) {
    for family in families::sinks() {
        let name = format!("sink_{}", family.name);
        document.describe(&name, family.kind, family.help);
        for standing in sinks {
            for (_, value) in standing.values().filter(|(known, _)| *known == family.name) {
                let labels = format!("{{sink=\"{}\"}}", escaped(&standing.sink));
                document.sample(&name, family.kind, &labels, value as f64);
            }
        }
    }
}

fn single(value: f64) -> [(String, f64); 1] {
    [(String::new(), value)]
}

fn truth(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

struct Document(String);

impl Document {
    fn family(&mut self, family: MetricFamily, samples: &[(String, f64)]) {
        self.describe(family.name, family.kind, family.help);
        for (labels, value) in samples {
            self.sample(family.name, family.kind, labels, *value);
        }
    }

    // Writing to a String cannot fail.
    fn describe(&mut self, name: &str, kind: MetricKind, help: &str) {
        writeln!(self.0, "# TYPE perfusion_{name} {}", kind.name()).ok();
        writeln!(self.0, "# HELP perfusion_{name} {}", escaped(help)).ok();
    }

    fn sample(&mut self, name: &str, kind: MetricKind, labels: &str, value: f64) {
        writeln!(self.0, "perfusion_{name}{}{labels} {value}", kind.suffix()).ok();
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::text;
    use crate::config::Config;
    use crate::daemon::families;
    use crate::daemon::sink_worker::SinkStatus;
    use crate::daemon::state::DaemonState;
    use crate::daemon::switch::Switch;
    use perfusion_export::deliver::SpoolBacklog;
    use perfusion_recorder::RecordingHandle;
    use perfusion_recorder::commands::CollectorStatus;
    use std::collections::HashSet;
    use std::time::Duration;

    #[test]
    fn alerts_and_dashboard_name_metrics_that_there_are() {
        let sinks = families::sinks()
            .map(|family| format!("perfusion_sink_{}{}", family.name, family.kind.suffix()));
        let all =
            families::pipeline().chain(families::daemon()).chain(families::OWN.iter().copied());
        let known = all.map(|family| format!("perfusion_{}{}", family.name, family.kind.suffix()));
        let known: HashSet<String> = known.chain(sinks).collect();
        let files = [
            include_str!("../../../packaging/monitoring/rules.yaml"),
            include_str!("../../../packaging/monitoring/dashboard.json"),
        ];
        let words = files
            .iter()
            .flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
        let named: HashSet<&str> = words.filter(|word| word.starts_with("perfusion_")).collect();
        assert!(named.len() > 20);
        for name in named {
            assert!(known.contains(name), "{name}");
        }
    }

    #[test]
    fn what_the_pipeline_counts_has_no_value_while_there_is_none() {
        let state = DaemonState::of(Config::default());
        state.set_switch(Switch { file: true, ..Switch::default() });
        let text = text(&state, None, &[]);
        assert!(text.contains("# TYPE perfusion_cpu_samples counter\n"));
        assert!(!text.contains("\nperfusion_cpu_samples_total"));
        for line in [
            "perfusion_recording 0",
            "perfusion_switched_off{by=\"file\"} 1",
            "perfusion_switched_off{by=\"config\"} 0",
            "perfusion_daemon_windows_total 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
    }

    #[test]
    fn a_recording_that_answers_too_late_is_one() {
        let state = DaemonState::of(Config::default());
        state.recording.begun(RecordingHandle::of_nobody().unwrap());
        let look = state.recording.handle().unwrap().look();
        assert!(look.is_none() && text(&state, None, &[]).contains("\nperfusion_recording 1\n"));
    }

    #[test]
    fn each_family_stands_once_and_the_text_ends_as_it_must() {
        let state = DaemonState::of(Config::default());
        state.counters.windows.add(3);
        let counters = vec![
            ("cpu_samples".to_owned(), 7),
            ("symbolize_no_symbol".to_owned(), 2),
            ("cpu_samples".to_owned(), 1),
        ];
        let look = CollectorStatus { counters, costs: Vec::new(), shims: Vec::new() };
        state.recording.begun(RecordingHandle::of_nobody().unwrap());
        let backlog = SpoolBacklog {
            requests: 3,
            bytes: 17,
            trouble: Some("away".to_owned()),
            ..SpoolBacklog::default()
        };
        let sinks = vec![
            SinkStatus {
                sink: "files /\"x\"".to_owned(),
                counters: vec![("files_written", 5)],
                ..SinkStatus::default()
            },
            SinkStatus {
                sink: "otlp http://a".to_owned(),
                backlog: Some(backlog),
                dropped: 2,
                busy: Duration::from_secs(9),
                ..SinkStatus::default()
            },
        ];
        let text = text(&state, Some(&look), &sinks);
        for line in [
            "# TYPE perfusion_cpu_samples counter",
            "# HELP perfusion_cpu_samples timer ticks that found a selected thread running",
            "perfusion_cpu_samples_total 8",
            "perfusion_symbolize_no_symbol 2",
            "# HELP perfusion_shim_objects_dead Sampled objects found dead.",
            "perfusion_shim_objects_dead_total 0",
            "perfusion_daemon_windows_total 3",
            "perfusion_sink_files_written_total{sink=\"files /\\\"x\\\"\"} 5",
            "# TYPE perfusion_sink_requests_waiting gauge",
            "perfusion_sink_requests_waiting{sink=\"otlp http://a\"} 3",
            "perfusion_sink_waiting_bytes{sink=\"otlp http://a\"} 17",
            "perfusion_sink_profiles_dropped_total{sink=\"otlp http://a\"} 2",
            "perfusion_sink_busy_seconds{sink=\"otlp http://a\"} 9",
            "perfusion_recording 1",
            "perfusion_reduced 0",
            "perfusion_memory_limit_bytes 268435456",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
        let families: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert_eq!(families.iter().collect::<HashSet<_>>().len(), families.len());
        assert!(text.ends_with("\n# EOF\n"));
    }
}
