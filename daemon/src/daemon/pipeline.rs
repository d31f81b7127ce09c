//! `/debug/pipeline`: how each stage stands right now, as JSON, for whoever asks why something is
//! missing.

use super::cost::daemon_cpu;
use super::sink_worker::SinkStatus;
use super::state::DaemonState;
use perfusion_export::deliver::SpoolBacklog;
use perfusion_export::failure_states::CauseSum;
use serde_json::{Map, Value, json};

/// One document. Says nothing of single processes or files of its own accord: what a receiver
/// answered is its own. Services are named only where a receiver did not take their requests.
#[must_use]
pub fn text(state: &DaemonState, sinks: &[SinkStatus]) -> String {
    let look = state.recording.status();
    let (mode, memory, config) = (state.mode(), state.cost.memory(), state.config());
    let asked = mode.recording(&config.recording);
    let counters: Map<String, Value> = look
        .iter()
        .flat_map(|look| &look.counters)
        .filter(|(_, value)| *value > 0)
        .map(|(name, value)| (name.clone(), json!(value)))
        .collect();
    let programs: Vec<Value> = look
        .iter()
        .flat_map(|look| &look.costs)
        .map(|cost| {
            let seconds = cost.total_ns as f64 / 1e9;
            json!({ "name": cost.name, "runs_counted": cost.runs, "seconds_counted": seconds })
        })
        .collect();
    let sinks: Map<String, Value> = sinks
        .iter()
        .map(|standing| {
            let values = standing.values().map(|(name, value)| (name.to_owned(), json!(value)));
            let trouble = standing
                .backlog
                .iter()
                .map(|backlog| ("trouble".to_owned(), json!(backlog.trouble)));
            let causes =
                standing.backlog.iter().map(|backlog| ("causes".to_owned(), causes(backlog)));
            (standing.sink.clone(), Value::Object(values.chain(trouble).chain(causes).collect()))
        })
        .collect();
    let daemon: Map<String, Value> = state
        .counters
        .list()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    let document = json!({
        "recording": state.recording.is_active(),
        "switched_off": state.switched_off(),
        "reduced_mode": mode.reduced,
        "remarks": state.remarks(),
        "rates": {
            "frequency_hz": state.rates.frequency(),
            "asked_frequency_hz": asked.frequency,
            "steps": state.rates.steps(),
        },
        "cpu": {
            "limit_cpus": mode.cpus,
            "daemon_seconds": daemon_cpu().as_secs_f64(),
            "probes_seconds": state.cost.probes_cpu().map(|probes| probes.as_secs_f64()),
        },
        "memory": {
            "limit_bytes": mode.memory,
            "resident_bytes": memory.resident,
            "maps_bytes": memory.maps,
            "rings_bytes": memory.rings,
        },
        "pods": state.pods.count(),
        "shims": look.as_ref().map_or(0, |look| look.shims.len()),
        "programs": programs,
        "counters": counters,
        "daemon": daemon,
        "sinks": sinks,
    });
    format!("{document:#}")
}

/// What was not taken lately, or not at once, by service and cause.
fn causes(backlog: &SpoolBacklog) -> Value {
    let cause = |sum: &CauseSum| {
        json!({
            "service": sum.service,
            "cause": sum.cause,
            "count": sum.count,
            "of": sum.unit,
            "lasts": sum.lasts,
        })
    };
    backlog.causes.iter().map(cause).collect()
}

#[cfg(test)]
mod tests {
    use super::text;
    use crate::config::Config;
    use crate::daemon::sink_worker::SinkStatus;
    use crate::daemon::state::DaemonState;
    use perfusion_export::deliver::SpoolBacklog;
    use serde_json::{Value, json};
    use std::time::Duration;

    #[test]
    fn a_daemon_that_is_switched_off_says_so() {
        let state = DaemonState::of(Config::default());
        let counters = vec![("files_written", 5)];
        let backlog = |trouble: Option<&str>| {
            let trouble = trouble.map(str::to_owned);
            Some(SpoolBacklog { requests: 3, bytes: 17, trouble, ..SpoolBacklog::default() })
        };
        let sinks = vec![
            SinkStatus {
                sink: "files /x".to_owned(),
                counters,
                dropped: 2,
                busy: Duration::from_secs(9),
                ..SinkStatus::default()
            },
            SinkStatus {
                sink: "otlp a".to_owned(),
                backlog: backlog(Some("away")),
                ..SinkStatus::default()
            },
            SinkStatus {
                sink: "otlp b".to_owned(),
                backlog: backlog(None),
                ..SinkStatus::default()
            },
        ];
        let document: Value = serde_json::from_str(&text(&state, &sinks)).unwrap();
        assert_eq!(document["recording"], false);
        assert_eq!(
            document["sinks"]["files /x"],
            json!({ "files_written": 5, "profiles_dropped": 2, "profiles_lost_at_end": 0,
            "busy_seconds": 9 })
        );
        let waits = |trouble| {
            json!({
                "requests_waiting": 3,
                "waiting_bytes": 17,
                "trouble": trouble,
                "causes": [],
                "profiles_dropped": 0,
                "profiles_lost_at_end": 0,
                "busy_seconds": 0,
            })
        };
        assert_eq!(document["sinks"]["otlp a"], waits(json!("away")));
        assert_eq!(document["sinks"]["otlp b"], waits(Value::Null));
        assert_eq!(document["memory"]["limit_bytes"], 256 << 20);
        assert_eq!(document["reduced_mode"], Value::Null);
    }
}
