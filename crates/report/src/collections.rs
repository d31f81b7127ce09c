//! The table of collections: how many there were of each kind and why, how long they stopped the
//! program, what they left and what CPU time they took. All of it is in the samples of `gc_pause`,
//! in labels beside the pauses.

use super::stacks::{CodeKind, ProfileStacks};
use super::top::{NO_DURATION, TableOptions};
use perfusion_model::labels::SampleType;
use perfusion_model::text::clean;
use perfusion_model::units::{grouped, human, percent};
use perfusion_pprof::proto::{Profile, Sample};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How the parent frame of collections is called.
const ROOT: &str = "Garbage Collector";

/// Name and pid.
type ProcessKey<'a> = (&'a str, i64);

/// Generation, kind and reason of collections; all unknown for pauses without one.
type CollectionKey<'a> = (Option<i64>, &'a str, &'a str);

#[derive(Clone, Copy, Default)]
struct PauseSum {
    count: i64,
    pause_ns: i64,
    longest_ns: i64,
    promoted: i64,
}

#[derive(Default)]
struct ProcessCollections<'a> {
    rows: BTreeMap<CollectionKey<'a>, PauseSum>,
    /// CPU time of everything, and of collections: on the collector's own threads and on the
    /// program's.
    cpu_ns: i64,
    collectors_ns: i64,
    others_ns: i64,
}

/// True for the sample type the table belongs to.
#[must_use]
pub fn is_known(sample_type: &str) -> bool {
    sample_type == SampleType::GcPause.name()
}

/// A table for each process that had collections, most pauses first.
#[must_use]
pub fn table(profile: &Profile, options: &TableOptions) -> String {
    let stacks = ProfileStacks::new(profile);
    let column = |of: SampleType| stacks.sample_type(of.name()).ok();
    let mut processes: BTreeMap<ProcessKey<'_>, ProcessCollections<'_>> = BTreeMap::new();
    for sample in stacks.samples().filter(|sample| stacks.is_asked(sample, &options.view.only)) {
        let value = |of| column(of).and_then(|at| sample.value.get(at)).copied().unwrap_or(0);
        let pid = stacks.number(sample, "pid").unwrap_or(0);
        let process =
            processes.entry((stacks.label(sample, "process").unwrap_or(""), pid)).or_default();
        add(process, &stacks, sample, value(SampleType::GcPause), value(SampleType::Cpu));
    }
    let mut processes: Vec<(ProcessKey<'_>, ProcessCollections<'_>)> =
        processes.into_iter().filter(|(_, process)| !process.rows.is_empty()).collect();
    let paused = |process: &ProcessCollections<'_>| {
        process.rows.values().map(|sum| sum.pause_ns).fold(0, i64::saturating_add)
    };
    processes.sort_by_key(|((_, pid), process)| (std::cmp::Reverse(paused(process)), *pid));
    let texts =
        processes.into_iter().map(|(process, of)| text(process, of, stacks.duration_ns(), options));
    texts.collect::<Vec<_>>().join("\n")
}

fn add<'a>(
    of: &mut ProcessCollections<'a>,
    stacks: &ProfileStacks<'a>,
    sample: &'a Sample,
    pause_ns: i64,
    cpu_ns: i64,
) {
    of.cpu_ns = of.cpu_ns.saturating_add(cpu_ns);
    let root = stacks.frames(sample).last();
    if cpu_ns > 0 && root.is_some_and(|frame| frame.kind == CodeKind::Note && frame.name == ROOT) {
        let gc = stacks.label(sample, "thread_role") == Some("gc");
        let sum = if gc { &mut of.collectors_ns } else { &mut of.others_ns };
        *sum = sum.saturating_add(cpu_ns);
    }
    if pause_ns > 0 {
        let (text, number) = (|key| stacks.label(sample, key), |key| stacks.number(sample, key));
        let row = (
            number("generation"),
            text("gc_kind").unwrap_or("?"),
            text("gc_reason").unwrap_or("?"),
        );
        let sum = of.rows.entry(row).or_default();
        let counted = |key| number(key).filter(|&value| value > 0).unwrap_or(0);
        sum.count = sum.count.saturating_add(counted("collections"));
        sum.pause_ns = sum.pause_ns.saturating_add(pause_ns);
        sum.longest_ns = sum.longest_ns.max(counted("longest_pause"));
        sum.promoted = sum.promoted.saturating_add(counted("promoted"));
    }
}

fn text(
    (name, pid): ProcessKey<'_>,
    of: ProcessCollections<'_>,
    duration_ns: Option<i64>,
    options: &TableOptions,
) -> String {
    let (bold, dim, plain) =
        if options.colour { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{content}").unwrap_or_default();
    let mut rows: Vec<(CollectionKey<'_>, PauseSum)> = of.rows.into_iter().collect();
    rows.sort_by_key(|(row, sum)| (std::cmp::Reverse(sum.pause_ns), *row));
    let total = |part: fn(&PauseSum) -> i64| {
        rows.iter().map(|(_, sum)| part(sum)).fold(0i64, i64::saturating_add)
    };
    let (count, paused) = (total(|sum| sum.count), total(|sum| sum.pause_ns));
    let ns = |value: i64| human(value, "nanoseconds");
    let (length, share) = match duration_ns {
        Some(duration) => (
            format!(" in {}", ns(duration)),
            format!(", {} of the time", percent(paused, duration)),
        ),
        None => (String::new(), format!("; {NO_DURATION}")),
    };
    line(format!(
        "{bold}collections of {} {pid}{plain}: {}{length}; the program stood still for {}{share}",
        clean(name),
        grouped(count),
        ns(paused),
    ));
    line(format!(
        "{dim}{:>10} {:>9} {:>10} {:>10} {:>10}  generation, kind, reason{plain}",
        "count", "paused", "mean", "longest", "promoted"
    ));
    let in_background =
        rows.iter().take(options.limit).any(|((_, kind, _), _)| *kind == "background");
    for ((generation, kind, reason), sum) in rows.into_iter().take(options.limit) {
        let of_what = match generation {
            Some(generation) => format!("{generation} {} {}", clean(kind), clean(reason)),
            None => "pauses whose collection is not known".to_owned(),
        };
        let mean = sum.pause_ns.checked_div(sum.count).map_or_else(|| "?".to_owned(), ns);
        line(format!(
            "{:>10} {:>9} {mean:>10} {:>10} {:>10}  {of_what}",
            grouped(sum.count),
            ns(sum.pause_ns),
            ns(sum.longest_ns),
            human(sum.promoted, "bytes"),
        ));
    }
    if in_background {
        line(format!(
            "{dim}mean: of a collection, and one in the background pauses twice; longest: of a \
             single pause{plain}"
        ));
    }
    // CPU samples have no label of a pause: what a filter leaves of them says nothing of these
    // collections.
    if !options.view.only.is_empty() {
        return text;
    }
    line(format!(
        "{dim}CPU time in collections: {}, {} of the process's; {} on the collector's own threads, \
         {} on the program's{plain}",
        ns(of.collectors_ns.saturating_add(of.others_ns)),
        percent(of.collectors_ns.saturating_add(of.others_ns), of.cpu_ns),
        ns(of.collectors_ns),
        ns(of.others_ns),
    ));
    text
}
