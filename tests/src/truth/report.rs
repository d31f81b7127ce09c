//! The report as text (docs/truth.md) and as JSON.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::truth::judge::Shares;
use crate::truth::measure::{Measured, Mode};

/// What became of one workload.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// What its known stacks are.
    pub about: &'static str,
    /// Why it could not run on this machine.
    pub skipped: Option<String>,
    /// A recording each, or why there is none.
    pub results: Vec<Result<Measured, String>>,
}

/// Promised: exact stacks, of all.
const EXACT_PERCENT: f64 = 99.9;
/// Promised: complete stacks, of all.
const COMPLETE_PERCENT: f64 = 99.99;
/// Promised: guessed frames, of all, at most.
const GUESSED_PERCENT: f64 = 0.1;

/// The promises one recording does not keep, in words.
pub fn broken_promises(measured: &Measured) -> Vec<String> {
    let mut broken = Vec::new();
    for (what, shares) in [("CPU", &measured.on_cpu), ("waits", &measured.off_cpu)] {
        let mut check = |name: &str, value: Option<f64>, kept: fn(f64) -> bool| {
            if let Some(value) = value.filter(|value| !kept(*value)) {
                broken.push(format!("{what}: {} % {name}", number(value)));
            }
        };
        check("exact", shares.percent(shares.exact), |value| value >= EXACT_PERCENT);
        check("complete", shares.percent(shares.complete), |value| value >= COMPLETE_PERCENT);
        check("wrong frames", shares.percent_of_frames(shares.wrong_frames), |value| value <= 0.0);
        check("guessed frames", shares.percent_of_frames(shares.guessed_frames), |value| {
            value <= GUESSED_PERCENT
        });
    }
    for (name, error) in [("wall law", measured.wall_error), ("cpu", measured.cpu_error)] {
        if let Some(error) = error.filter(|error| *error > 0.01) {
            broken.push(format!("{name} off by {} %", number(error * 100.0)));
        }
    }
    if let Some(error) = measured.wait_error.filter(|error| *error > 0.02) {
        broken.push(format!("wait time off by {} %", number(error * 100.0)));
    }
    broken
}

/// As many digits as tell 99.9 from 99.99 and no more than that.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn optional(value: Option<f64>, factor: f64) -> String {
    value.map_or_else(|| "–".to_owned(), |value| number(value * factor))
}

fn shares_columns(shares: &Shares) -> String {
    [
        optional(shares.percent(shares.complete), 1.0),
        optional(shares.percent(shares.exact), 1.0),
        optional(shares.percent_of_frames(shares.wrong_frames), 1.0),
        optional(shares.percent_of_frames(shares.guessed_frames), 1.0),
        optional(shares.percent(shares.in_runtime), 1.0),
        optional(shares.percent(shares.unseen), 1.0),
    ]
    .join(" | ")
}

fn stacks_table(entries: &[Entry], unit: &str, of: fn(&Measured) -> (&Shares, String)) -> String {
    let mut text = format!(
        "| workload | recorded | {unit} | complete % | exact % | wrong frames % | guessed frames % \
         | in the runtime % | unseen % |\n|---|---|---|---|---|---|---|---|---|\n"
    );
    for (entry, measured) in measured(entries) {
        let (shares, total) = of(measured);
        if shares.total > 0.0 {
            text += &format!(
                "| {} | {} | {total} | {} |\n",
                entry.name,
                measured.mode.name(),
                shares_columns(shares)
            );
        }
    }
    text
}

/// Recordings of our own.
fn own(entries: &[Entry]) -> impl Iterator<Item = (&Entry, &Measured)> {
    measured(entries).filter(|(_, measured)| measured.mode != Mode::Perf)
}

fn measured(entries: &[Entry]) -> impl Iterator<Item = (&Entry, &Measured)> {
    entries
        .iter()
        .flat_map(|entry| entry.results.iter().flatten().map(move |measured| (entry, measured)))
}

/// The tables, without a headline.
pub fn markdown(entries: &[Entry]) -> String {
    let mut text = String::from("\n## CPU samples\n");
    text += &stacks_table(entries, "samples", |measured| {
        (&measured.on_cpu, format!("{:.0}", measured.on_cpu.total))
    });
    text += "\n## Waits\nShares of the time the threads were blocked or runnable.\n\n";
    text += &stacks_table(entries, "s", |measured| {
        (&measured.off_cpu, format!("{:.1}", measured.off_cpu.total / 1e9))
    });
    text += "\n## Times and costs\nErrors are the largest of any thread, in percent. `process`: \
         complete stacks among the CPU samples of all threads \
             of the process, the runtime's own included.\n\n\
             | workload | recorded | process complete % | wall law | cpu | wait time | ns a CPU \
         sample | ns a switch |\n|---|---|---|---|---|---|---|---|\n";
    for (entry, measured) in own(entries) {
        text += &format!(
            "| {} | {} | {} | {} | {} | {} | {} | {} |\n",
            entry.name,
            measured.mode.name(),
            optional(measured.process.percent(measured.process.complete), 1.0),
            optional(measured.wall_error, 100.0),
            optional(measured.cpu_error, 100.0),
            optional(measured.wait_error, 100.0),
            measured.ns_per_sample.map_or("–".to_owned(), |ns| format!("{ns:.0}")),
            measured.ns_per_switch.map_or("–".to_owned(), |ns| format!("{ns:.0}")),
        );
    }
    text += "\n## What is not as promised\n";
    let before = text.len();
    for entry in entries {
        if let Some(reason) = &entry.skipped {
            text += &format!("- {}: skipped: {reason}\n", entry.name);
        }
        for result in &entry.results {
            match result {
                Err(reason) => text += &format!("- {}: not measured: {reason}\n", entry.name),
                Ok(measured) if measured.mode == Mode::Perf => {}
                Ok(measured) => {
                    let broken = broken_promises(measured);
                    if !broken.is_empty() {
                        text += &format!(
                            "- {}, {}: {}\n",
                            entry.name,
                            measured.mode.name(),
                            broken.join("; ")
                        );
                    }
                }
            }
        }
    }
    if text.len() == before {
        text += "Nothing.\n";
    }
    text += "\n## Losses and doubts by cause\nCounters of each recording that are not zero \
         (docs/metrics.md says what they mean).\n\n";
    for (entry, measured) in own(entries) {
        let mut losses: Vec<String> =
            measured.losses.iter().map(|(name, value)| format!("{name} {value}")).collect();
        if measured.collections > 0.0 {
            losses.push(format!(
                "{:.0} CPU samples in collections, not judged",
                measured.collections
            ));
        }
        let losses = if losses.is_empty() { "none".to_owned() } else { losses.join(", ") };
        text += &format!("- {}, {}: {losses}\n", entry.name, measured.mode.name());
    }
    text += "\n## The workloads\n";
    let mut told = BTreeMap::new();
    for entry in entries {
        told.entry(entry.about).or_insert_with(Vec::new).push(entry.name.as_str());
    }
    for (about, names) in told {
        text += &format!("- {}: {about}\n", names.join(", "));
    }
    text
}

/// Everything, for machines.
pub fn json(machine: &str, entries: &[Entry]) -> Value {
    let shares = |shares: &Shares| {
        json!({
            "total": shares.total, "complete": shares.complete, "exact": shares.exact,
            "unseen": shares.unseen, "in_runtime": shares.in_runtime,
            "frames": shares.frames, "wrong_frames": shares.wrong_frames,
            "guessed_frames": shares.guessed_frames,
            "worst": shares
                .worst(10)
                .into_iter()
                .map(|(stack, value)| json!({"stack": stack, "value": value}))
                .collect::<Vec<_>>(),
        })
    };
    let result = |result: &Result<Measured, String>| match result {
        Err(reason) => json!({ "error": reason }),
        Ok(measured) => json!({
            "recorded": measured.mode.name(),
            "cpu_samples": shares(&measured.on_cpu),
            "waits_ns": shares(&measured.off_cpu),
            "collections": measured.collections,
            "process": {"total": measured.process.total, "complete": measured.process.complete},
            "roots": measured
                .roots
                .iter()
                .map(|(first, root)| json!({"first": first, "root": root}))
                .collect::<Vec<_>>(),
            "wall_error": measured.wall_error, "cpu_error": measured.cpu_error,
            "wait_error": measured.wait_error,
            "ns_per_sample": measured.ns_per_sample, "ns_per_switch": measured.ns_per_switch,
            "losses": measured.losses,
        }),
    };
    json!({
        "machine": machine,
        "workloads": entries.iter().map(|entry| json!({
            "name": entry.name, "about": entry.about, "skipped": entry.skipped,
            "results": entry.results.iter().map(result).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
    })
}

/// What a developer looks at when a workload is not exact: the roots that were learned and the
/// largest wrong stacks.
pub fn picture(measured: &Measured) -> String {
    let mut text = String::new();
    for (first, root) in &measured.roots {
        text += &format!("    to {first}: {root}\n");
    }
    for (what, shares) in [("CPU", &measured.on_cpu), ("waits", &measured.off_cpu)] {
        text += &format!(
            "    {what}: {:.0}; complete {} %, exact {} %, wrong frames {} %, guessed {} %, in the \
             runtime {} %\n",
            shares.total,
            optional(shares.percent(shares.complete), 1.0),
            optional(shares.percent(shares.exact), 1.0),
            optional(shares.percent_of_frames(shares.wrong_frames), 1.0),
            optional(shares.percent_of_frames(shares.guessed_frames), 1.0),
            optional(shares.percent(shares.in_runtime), 1.0),
        );
        for (stack, value) in shares.worst(8) {
            text += &format!("      {value:>12.0} {stack}\n");
        }
    }
    text
}
