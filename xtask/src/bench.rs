//! `cargo xtask bench [FIGURE [--write]]`: what profiling costs, measured on a real CLR under a
//! real kernel, one function per figure. A run of all figures writes docs/benchmarks.md; one figure
//! is printed, and with `--write` replaces its section there. Nothing here judges: the budgets
//! stand beside the values.

mod allocation;
mod compiler;
mod crowd;
mod daemon;
mod exact;
mod listening;
mod load;
mod median;
mod native;
mod probes;
mod shim;
mod smaps;
mod statistics;
mod throughput;
mod web;

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    build,
    exec::{StepLog, need_root, output},
    paths::WorkspacePaths,
    setup::{self, debian},
};

/// One line of the result.
struct FigureRow {
    what: &'static str,
    measured: String,
    budget: &'static str,
}

/// What a figure needs.
struct Bench<'a> {
    paths: &'a WorkspacePaths,
    steps: &'a StepLog,
}

type Figure = fn(&Bench<'_>) -> Result<Vec<FigureRow>>;

/// Name on the command line, what it measures and how (a heading, and text below it where more is
/// to be said), and the code that does it.
const FIGURES: [(&str, &str, Figure); 16] = [
    (
        "start",
        "From starting `perfusion record` to the first sample in the kernel",
        probes::start_to_first_sample,
    ),
    (
        "sample",
        "10 s of CPU samples of an app that is busy on all CPUs with 40 managed and native frames, \
         after 10 s, everything on",
        probes::sample,
    ),
    ("cold", probes::COLD_HOW, probes::cold),
    (
        "switches",
        "5 s of an app that only switches, 100,000 times a second, after 5 s, everything on",
        probes::switches,
    ),
    (
        "steady",
        "10 s of a recording that has run for 2 s, with everything on, 99 Hz, the app busy on all \
         CPUs",
        probes::steady,
    ),
    (
        "thrifty",
        "The same with `--wait-stack-mib 1`: the times of waits are exact as ever, their stacks \
         are a sample",
        probes::thrifty,
    ),
    (
        "throughput",
        "Operations per second of the app, recorded against not recorded, in alternation",
        throughput::throughput,
    ),
    (
        "kestrel",
        "Requests of about half a millisecond a Kestrel app answers in a second, all CPUs busy, \
         clients included, recorded against not recorded, in alternation",
        throughput::kestrel,
    ),
    (
        "small-requests",
        "The same with requests of about 30 µs, 80,000 context switches a second",
        throughput::small_requests,
    ),
    (
        "micro",
        "Objects of 32 bytes a second, made by all CPUs and nothing else, recorded against not \
         recorded, in alternation",
        throughput::micro,
    ),
    (
        "micro-10",
        "The same on .NET 10, whose runtime samples allocations itself",
        throughput::micro_sampled,
    ),
    (
        "allocation",
        "An app that allocates 400 MB/s, seen by its own profile at 4,999 Hz",
        allocation::allocation,
    ),
    (
        "crowd",
        "20 s of a whole host: a browser, Node, CoreCLR, and programs that share libLLVM",
        probes::crowd_memory,
    ),
    ("compiler", compiler::HOW, compiler::costs),
    ("shim", shim::HOW, shim::costs),
    ("exact", exact::HOW, exact::costs),
];

/// Compiles the program that is measured with, to `target/bench/load.dll`.
pub(crate) fn compile_load(paths: &WorkspacePaths) -> Result<()> {
    load::compile(paths)
}

pub(crate) fn bench(
    paths: &WorkspacePaths,
    steps: &StepLog,
    only: Option<&str>,
    write: bool,
) -> Result<()> {
    need_root("measuring probes")?;
    let known: Vec<&str> = FIGURES.iter().map(|(name, ..)| *name).collect();
    if let Some(name) = only.filter(|name| !known.contains(name)) {
        bail!("unknown figure `{name}`: expected one of {}", known.join(", "));
    }
    let machine = machine()?;
    build::build(paths, steps)?;
    setup::pinned_dotnets(paths, steps)?;
    debian::install(steps, &[("bpftool", "names and run times of loaded programs")])?;
    load::compile(paths)?;
    let bench = Bench { paths, steps };

    let mut document = format!(
        "# What profiling costs\nWritten by `cargo xtask bench` on {machine}. Probe times are the \
         kernel's own (`kernel.bpf_stats_enabled`, which is on for these figures only).\n"
    );
    let file = paths.root.join("docs/benchmarks.md");
    if only.is_some() {
        document = fs::read_to_string(&file)
            .with_context(|| format!("{}: cannot be read", file.display()))?;
    }
    for (name, how, figure) in FIGURES {
        if only.is_some_and(|only| only != name) {
            continue;
        }
        steps.step(&format!("measuring {name}"));
        let (heading, more) = how.split_once('\n').unwrap_or((how, ""));
        let mut text = format!("\n## {heading}\n");
        if only.is_some() {
            text.push_str(&format!("Measured alone on {machine}.\n\n"));
        }
        if !more.is_empty() {
            text.push_str(&format!("{more}\n"));
        }
        text.push_str("| what | measured | budget |\n|---|---|---|\n");
        for row in figure(&bench).with_context(|| format!("figure {name}"))? {
            text.push_str(&format!("| {} | {} | {} |\n", row.what, row.measured, row.budget));
        }
        print!("{text}");
        document = with_section(&document, &text);
    }
    if only.is_none() || write {
        fs::write(&file, document)
            .with_context(|| format!("{}: cannot be written", file.display()))?;
        steps.step(&format!("wrote {}", file.display()));
    }
    Ok(())
}

/// The document with this section, which begins with its heading, in the place of the one that has
/// the same heading, or at the end.
fn with_section(document: &str, section: &str) -> String {
    const HEADING: &str = "\n## ";
    let heading = section.split_inclusive('\n').take(2).collect::<String>();
    let Some((before, rest)) = document.split_once(&heading) else {
        return document.to_owned() + section;
    };
    let after = rest.find(HEADING).map_or("", |at| &rest[at..]);
    [before, section, after].concat()
}

/// Kernel, processor, number of CPUs and how busy they are with other things: what another run's
/// figures differ by.
fn machine() -> Result<String> {
    let cpu = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown", |(_, name)| name);
    let kernel = output(Command::new("uname").arg("-r"))?;
    let cpus = output(&mut Command::new("nproc"))?;
    let load = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    let busy = load.split(' ').next().unwrap_or_default();
    Ok(format!(
        "Linux {}, {} × {model}, load average before it began {busy}",
        kernel.trim(),
        cpus.trim()
    ))
}

/// A number among the comments of a profile, which is not 0.
fn comment(profile: &Path, name: &str) -> Result<f64> {
    let number = counter(profile, name)?;
    if number > 0.0 {
        Ok(number)
    } else {
        bail!("{}: no {name} in its comments", profile.display())
    }
}

/// A counter among the comments of a profile, 0 where it has none of that name.
fn counter(profile: &Path, name: &str) -> Result<f64> {
    let comments = output(Command::new("go").args(["tool", "pprof", "-comments"]).arg(profile))?;
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok();
    Ok(comments.lines().find_map(value).unwrap_or(0.0))
}

#[cfg(test)]
mod tests {
    use super::with_section;

    #[test]
    fn a_section_takes_its_own_place() {
        let document = "# Title\n\n## A\nold\n\n## B\nb\n";
        assert_eq!(with_section(document, "\n## A\nnew\n"), "# Title\n\n## A\nnew\n\n## B\nb\n");
        assert_eq!(with_section(document, "\n## B\nnew\n"), "# Title\n\n## A\nold\n\n## B\nnew\n");
        assert_eq!(with_section("# Title\n", "\n## C\nc\n"), "# Title\n\n## C\nc\n");
    }
}
