//! The counters of all stages as OpenMetrics text. Labels are few and bounded: no process, no service.

use super::cost::daemon_cpu;
use super::counts::Counts;
use super::sinks::SinkCounters;
use super::state::State;
use crate::run::collector::Look;
use crate::run::counters::DAEMON;
use ebpf_common::counter::Counter;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What [`text()`] is: the answer's type.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Counts of what is in a cache now: they may fall.
const GAUGES: &str = "symbolize_";

/// One document.
#[must_use]
pub fn text(state: &State, look: Option<&Look>, sinks: &[SinkCounters]) -> String {
    let mut families = Families(String::new());
    // Equal names of two stages are one family.
    let mut counters: BTreeMap<&str, u64> = BTreeMap::new();
    let looked = look.iter().flat_map(|look| &look.counters).map(|(name, value)| (name.as_str(), *value));
    for (name, value) in looked.chain(state.counters.list()) {
        *counters.entry(name).or_default() += value;
    }
    for (name, value) in counters {
        let kind = if name.starts_with(GAUGES) { "gauge" } else { "counter" };
        let help = help(name);
        families.family(name, kind, help, &[(String::new(), value as f64)]);
    }
    let mut of_sinks: BTreeMap<&str, Vec<(String, f64)>> = BTreeMap::new();
    for (sink, counters) in sinks {
        for (name, value) in counters {
            let label = format!("{{sink=\"{}\"}}", escaped(sink));
            of_sinks.entry(name).or_default().push((label, *value as f64));
        }
    }
    for (name, samples) in of_sinks {
        families.family(&format!("sink_{name}"), "counter", "", &samples);
    }
    let part = |part: &str, value: f64| (format!("{{part=\"{part}\"}}"), value);
    let cpu =
        [part("daemon", daemon_cpu().as_secs_f64()), part("probes", state.cost.probes_cpu().as_secs_f64())];
    families.family("cpu_seconds", "counter", "CPU time of the profiler; of the probes an estimate", &cpu);
    let memory = state.cost.memory();
    let memory = [
        part("resident", memory.resident as f64),
        part("maps", memory.maps as f64),
        part("rings", memory.rings as f64),
    ];
    families.family("memory_bytes", "gauge", "memory of the profiler, the kernel's for it included", &memory);
    let single = |value: f64| [(String::new(), value)];
    let mode = state.mode();
    families.family("memory_limit_bytes", "gauge", "what it may be in all", &single(mode.memory as f64));
    families.family("cpu_limit_cpus", "gauge", "CPUs the profiler may take", &single(mode.cpus));
    let reduced = f64::from(u8::from(mode.reduced.is_some()));
    families.family("reduced", "gauge", "1 in reduced mode: its cgroup allows little", &single(reduced));
    families.family(
        "rate_steps",
        "gauge",
        "steps below the rates asked for, to stay within the CPU limit",
        &single(state.steps().into()),
    );
    families.family("recording", "gauge", "1 while it records", &single(f64::from(u8::from(look.is_some()))));
    let hertz = f64::from(state.frequency());
    families.family("frequency_hertz", "gauge", "CPU samples per second and CPU", &single(hertz));
    let shims = look.map_or(0, |look| look.shims.len());
    families.family("shim_processes", "gauge", "processes whose shim is read", &single(shims as f64));
    let pods = state.pods.count();
    families.family("pods", "gauge", "pods of this node that are known", &single(pods as f64));
    let version = (format!("{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")), 1.0);
    families.family("build", "info", "what runs", &[version]);
    families.0 + "# EOF\n"
}

/// What a counter means.
fn help(name: &str) -> &'static str {
    let probes = Counter::ALL.iter().map(|info| (info.name, info.help));
    let mut all = probes.chain(DAEMON.iter().copied()).chain(Counts::ALL.iter().copied());
    all.find(|(known, _)| *known == name).map_or("", |(_, help)| help)
}

struct Families(String);

impl Families {
    fn family(&mut self, name: &str, kind: &str, help: &str, samples: &[(String, f64)]) {
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let to = &mut self.0;
        // Writing to a String cannot fail.
        writeln!(to, "# TYPE perfusion_{name} {kind}").ok();
        if !help.is_empty() {
            writeln!(to, "# HELP perfusion_{name} {}", escaped(help)).ok();
        }
        for (labels, value) in samples {
            writeln!(to, "perfusion_{name}{suffix}{labels} {value}").ok();
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::text;
    use crate::config::Config;
    use crate::daemon::state::State;
    use crate::run::collector::Look;
    use crate::run::counters::DAEMON;
    use ebpf_common::counter::Counter;
    use std::collections::HashSet;

    /// Those of sinks and shims are known by their beginning.
    #[test]
    fn alerts_and_dashboard_name_metrics_that_there_are() {
        let state = State::of(Config::default());
        let counters = DAEMON.iter().map(|(name, _)| *name).chain(Counter::ALL.iter().map(|info| info.name));
        let counters = counters.map(|name| (name.to_owned(), 1)).collect();
        let look = Look { counters, costs: Vec::new(), shims: Vec::new() };
        let text = text(&state, Some(&look), &[]);
        let known: HashSet<&str> = text
            .lines()
            .filter_map(|line| line.split(['{', ' ']).next())
            .filter(|name| *name != "#")
            .collect();
        let files = [
            include_str!("../../../packaging/monitoring/rules.yaml"),
            include_str!("../../../packaging/monitoring/dashboard.json"),
        ];
        let words =
            files.iter().flat_map(|text| text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
        let named: HashSet<&str> = words.filter(|word| word.starts_with("perfusion_")).collect();
        assert!(named.len() > 20);
        for name in named {
            let of_others =
                ["perfusion_sink_", "perfusion_shim_"].iter().any(|start| name.starts_with(start));
            assert!(known.contains(name) || of_others, "{name}");
        }
    }

    #[test]
    fn each_family_stands_once_and_the_text_ends_as_it_must() {
        let state = State::of(Config::default());
        state.counters.windows.add(3);
        let counters = vec![
            ("cpu_samples".to_owned(), 7),
            ("symbolize_no_symbol".to_owned(), 2),
            ("cpu_samples".to_owned(), 1),
        ];
        let look = Look { counters, costs: Vec::new(), shims: Vec::new() };
        let sinks = vec![("files /\"x\"".to_owned(), vec![("files_written", 5)])];
        let text = text(&state, Some(&look), &sinks);
        for line in [
            "# TYPE perfusion_cpu_samples counter",
            "# HELP perfusion_cpu_samples timer ticks that found a selected thread running",
            "perfusion_cpu_samples_total 8",
            "perfusion_symbolize_no_symbol 2",
            "perfusion_daemon_windows_total 3",
            "perfusion_sink_files_written_total{sink=\"files /\\\"x\\\"\"} 5",
            "perfusion_recording 1",
            "perfusion_reduced 0",
            "perfusion_memory_limit_bytes 268435456",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
        let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert_eq!(families.iter().collect::<HashSet<_>>().len(), families.len());
        assert!(text.ends_with("\n# EOF\n"));
    }
}
