//! What the probes and the daemon cost: each run, of a CPU, in memory.

use std::path::{Path, PathBuf};

use anyhow::Result;
use ebpf_common::counter::Counter;
use ebpf_common::stage::{STAGE_COPY, STAGE_KERNEL, STAGE_SEND, STAGE_USER};

use super::{Bench, FigureRow, crowd, daemon, load, median::median, statistics};
use crate::setup::debian;

/// After so long the probes know the rules of nearly all code the app runs.
const LEARNING_SECONDS: f64 = 2.0;

/// Medians of 5 starts.
pub(super) fn start_to_first_sample(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    let app = load::App::start(bench.paths)?;
    let (mut times, mut loads) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let mut daemon = daemon::Recorder::start(bench.paths, app.pid())?;
        times.push(daemon.first_sample()?.as_secs_f64() * 1e3);
        loads.push(daemon.load_milliseconds()?);
        load::pass(0.5);
        daemon.finish()?;
    }
    let row = |what, times, budget| FigureRow {
        what,
        measured: format!("{:.0} ms", median(times)),
        budget,
    };
    Ok(vec![
        row("start to first sample, median of 5", times, "300 ms"),
        row("of that, all programs through the kernel's verifier", loads, "50 ms"),
    ])
}

/// A sample in a hundredth of a second finds none of its code and data in the CPU's caches; at ten
/// times the frequency some, at fifty times most: what the three differ by is waiting for memory.
pub(super) fn sample(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const SECONDS: f64 = 10.0;
    const WHAT: [[&str; 2]; 3] = [
        ["99", "one CPU sample at 99 Hz, caches cold"],
        ["999", "one CPU sample at 999 Hz"],
        ["4999", "one CPU sample at 4,999 Hz, caches warm"],
    ];
    let _statistics = statistics::Enabled::enable()?;
    let app = load::App::start_working(bench.paths)?;
    let pid = app.pid().to_string();
    let mut rows = Vec::new();
    for [frequency, what] in WHAT {
        let options = ["--pid", &pid, "--frequency", frequency, "--time-stages"];
        let mut daemon = daemon::Recorder::start_with(bench.paths, &options)?;
        daemon.first_sample()?;
        daemon.attached(app.pid())?;
        load::pass(SECONDS);
        let (before, stages_before) = (daemon.counts()?, daemon.stages()?);
        let work_before = daemon.work()?;
        load::pass(SECONDS);
        let ns = daemon.work()?.since(work_before).sampler.ns;
        let (counts, stages) = (daemon.counts()?.since(&before), daemon.stages()?);
        daemon.finish()?;
        let samples = counts.get(Counter::CpuSamples);
        let handed_over = counts.get(Counter::WalksHandedOver);
        let frames = counts.get(Counter::WalkFrames);
        let walks =
            handed_over + counts.get(Counter::WalksToStart) + counts.get(Counter::WalksTruncated);
        let of = |stage: usize| (stages[stage] - stages_before[stage]) as f64 / samples / 1e3;
        rows.push(FigureRow {
            what,
            measured: format!(
                "{:.2} µs, mean of {samples} with {:.1} frames",
                ns / samples / 1e3,
                frames / walks
            ),
            budget: "",
        });
        rows.push(FigureRow {
            what: "of that its user part (with one reading of the clock, as each part)",
            measured: format!("{:.2} µs", of(STAGE_USER)),
            budget: "4 µs, 40 frames",
        });
        rows.push(FigureRow {
            what: "kernel stack; copy of what was not walked; into the ring",
            measured: format!(
                "{:.2}; {:.2}; {:.2} µs",
                of(STAGE_KERNEL),
                of(STAGE_COPY),
                of(STAGE_SEND)
            ),
            budget: "",
        });
        rows.push(FigureRow {
            what: "frames found in the rule cache, of those looked for",
            measured: format!("{:.3} %", frames / (frames + handed_over) * 100.0),
            budget: "99 %",
        });
    }
    Ok(rows)
}

/// Heading and text of [`cold`].
pub(super) const COLD_HOW: &str = "One CPU sample at 99 Hz of an app that leaves nothing in the \
    caches\nThe app of the figure above goes through 8 MB of memory for each thread, 40 frames \
    deep. Each turn records it for 5 s after 4 s. If `PERFUSION_BEFORE` names another build of \
    the program, both record in turns, and a ratio is that of two neighbours.";

/// The sampler's time and its user part, in µs, over some seconds.
fn sampled(bench: &Bench<'_>, program: &Path, pid: u32) -> Result<[f64; 2]> {
    const SECONDS: f64 = 5.0;
    let pid_text = pid.to_string();
    let options = ["--pid", &pid_text, "--frequency", "99", "--time-stages"];
    let mut daemon = daemon::Recorder::start_program(program, bench.paths, &options)?;
    daemon.first_sample()?;
    daemon.attached(pid)?;
    load::pass(4.0);
    let (work, stages) = (daemon.work()?, daemon.stages()?);
    load::pass(SECONDS);
    let (sampler, stages_after) = (daemon.work()?.since(work).sampler, daemon.stages()?);
    daemon.finish()?;
    let user = stages_after[STAGE_USER] - stages[STAGE_USER];
    Ok([sampler.ns / sampler.runs / 1e3, user as f64 / sampler.runs / 1e3])
}

/// What a sample costs where all memory but the app's own is far away.
pub(super) fn cold(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const TURNS: usize = 6;
    const MEGABYTES: u32 = 8;
    let _statistics = statistics::Enabled::enable()?;
    let app = load::App::start_streaming(bench.paths, MEGABYTES)?;
    let before = std::env::var_os("PERFUSION_BEFORE").map(PathBuf::from);
    let (mut now, mut ratios) = (Vec::new(), Vec::new());
    for turn in 0..TURNS {
        let measure = |program: &Path| sampled(bench, program, app.pid());
        let own = bench.paths.perfusion();
        let (ours, theirs) = match &before {
            None => (measure(&own)?, None),
            Some(before) if turn.is_multiple_of(2) => {
                let theirs = measure(before)?;
                (measure(&own)?, Some(theirs))
            }
            Some(before) => (measure(&own)?, Some(measure(before)?)),
        };
        now.push(ours);
        ratios.extend(theirs.map(|theirs| [ours[0] / theirs[0], ours[1] / theirs[1]]));
    }
    let of = |all: &[[f64; 2]], part: usize| median(all.iter().map(|one| one[part]).collect());
    let mut rows = vec![FigureRow {
        what: "one CPU sample; of that its user part",
        measured: format!("{:.2}; {:.2} µs, medians of {TURNS}", of(&now, 0), of(&now, 1)),
        budget: "",
    }];
    if before.is_some() {
        rows.push(FigureRow {
            what: "the same, of the build before",
            measured: format!("{:.2}; {:.2}", of(&ratios, 0), of(&ratios, 1)),
            budget: "0.6",
        });
    }
    Ok(rows)
}

/// Once as it comes, once with the stacks of wakers, and once with nearly no stack kept, which
/// shows what the times alone cost.
///
/// The kernel measures by reading a clock before and after each run, and one such reading is in
/// what it measures; there are some three runs to a switch. What a program took that does nothing
/// is told, and taken off what stands beside a budget: without `kernel.bpf_stats_enabled`, as a
/// kernel comes, there is none of it.
pub(super) fn switches(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const PER_SECOND: u32 = 100_000;
    const SECONDS: f64 = 5.0;
    let _statistics = statistics::Enabled::enable()?;
    let app = load::App::start_switching(bench.paths, PER_SECOND)?;
    let pid = app.pid().to_string();
    let mut rows = Vec::new();
    let cases: [(&[&str], &'static str, [&'static str; 2], &'static str); 3] = [
        (
            &[],
            "one context switch with its wake-up, stacks kept as the budget allows",
            ["", "6 % at 100,000 switches/s"],
            "all probes together, of one CPU",
        ),
        (
            &["--waker-stacks"],
            "the same with `--waker-stacks`, out of the same budget",
            ["", ""],
            "all probes together then, of one CPU",
        ),
        (
            &["--wait-stacks-one-in", "1000"],
            "the same, 1 stack in 1,000 kept",
            ["0.4 µs, not kept", ""],
            "all probes together then, of one CPU",
        ),
    ];
    for (case, what, [budget, budget_of_all], whole) in cases {
        let options = [&["--pid", &pid, "--time-stages"], case].concat();
        let mut daemon = daemon::Recorder::start_with(bench.paths, &options)?;
        daemon.first_sample()?;
        daemon.attached(app.pid())?;
        load::pass(SECONDS);
        let (before, work_before) = (daemon.counts()?, daemon.work()?);
        load::pass(SECONDS);
        let work = daemon.work()?.since(work_before);
        let counts = daemon.counts()?.since(&before);
        daemon.finish()?;
        let switches = counts.get(Counter::Waits);
        let kept = counts.get(Counter::WaitsStored) / switches * 100.0;
        let wakers = counts.get(Counter::WakerStacksStored) / SECONDS;
        let measuring = work.measuring_ns();
        let of_a_switch = |ns: f64| ns / switches / 1e3;
        rows.push(FigureRow {
            what,
            measured: format!(
                "{:.2} µs; as measured {:.2}, with {:.1} runs of {measuring:.0} ns for the \
                 measuring; {:.0} switches/s, {kept:.1} % of the stacks \
                 kept, {wakers:.0} wakers' stacks/s",
                of_a_switch(work.scheduler.ns - work.scheduler.runs * measuring),
                of_a_switch(work.scheduler.ns),
                work.scheduler.runs / switches,
                switches / SECONDS
            ),
            budget,
        });
        let all = work.all();
        let of_a_cpu = |ns: f64| ns / 1e9 / SECONDS * 100.0;
        rows.push(FigureRow {
            what: whole,
            measured: format!(
                "{:.2} %; as measured {:.2} %",
                of_a_cpu(all.ns - all.runs * measuring),
                of_a_cpu(all.ns)
            ),
            budget: budget_of_all,
        });
    }
    Ok(rows)
}

pub(super) fn steady(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    costs(bench, &[])
}

pub(super) fn thrifty(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    costs(bench, &["--wait-stack-mib", "1"])
}

fn costs(bench: &Bench<'_>, options: &[&str]) -> Result<Vec<FigureRow>> {
    const SECONDS: f64 = 10.0;
    let _statistics = statistics::Enabled::enable()?;
    let app = load::App::start(bench.paths)?;
    let pid = app.pid().to_string();
    let mut daemon =
        daemon::Recorder::start_with(bench.paths, &[&["--pid", &pid], options].concat())?;
    daemon.first_sample()?;
    daemon.attached(app.pid())?;
    load::pass(LEARNING_SECONDS);
    let (programs_before, cpu_before) = (daemon.programs()?, daemon.cpu_seconds()?);
    load::pass(SECONDS);
    let (programs_after, cpu_after) = (daemon.programs()?, daemon.cpu_seconds()?);
    let (rss, maps) = (daemon.rss_bytes()?, daemon.map_bytes()?);
    daemon.finish()?;

    let mut rows = Vec::new();
    let mut probes_ns = 0.0;
    for (id, program) in &programs_after {
        let before =
            programs_before.get(id).map_or((0, 0), |program| (program.runs, program.run_ns));
        let (runs, ns) = ((program.runs - before.0) as f64, (program.run_ns - before.1) as f64);
        probes_ns += ns;
        if runs > 0.0 {
            rows.push(FigureRow {
                what: program.what(),
                measured: format!(
                    "{:.2} µs a run of `{}`, {:.0} runs/s",
                    ns / runs / 1e3,
                    program.name,
                    runs / SECONDS
                ),
                budget: program.budget(),
            });
        }
    }
    let probes = probes_ns / 1e9 / SECONDS;
    let cpu = (cpu_after - cpu_before) / SECONDS;
    rows.push(FigureRow {
        what: "CPU of daemon + probes, of one CPU",
        measured: format!("{:.2} % + {:.2} %", cpu * 100.0, probes * 100.0),
        budget: "1 % of the node",
    });
    rows.push(memory(rss, maps));
    Ok(rows)
}

fn memory(rss: u64, maps: u64) -> FigureRow {
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    FigureRow {
        what: "memory: RSS + BPF maps",
        measured: format!("{:.1} MiB + {:.1} MiB", mebibytes(rss), mebibytes(maps)),
        budget: "100 MiB with 50 processes",
    }
}

pub(super) fn crowd_memory(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const SECONDS: f64 = 20.0;
    debian::install(bench.steps, &crowd::PACKAGES)?;
    let crowd = crowd::Crowd::start(bench.paths)?;
    let mut daemon = daemon::Recorder::start_with(bench.paths, &["--all", "--attach"])?;
    daemon.first_sample()?;
    load::pass(SECONDS);
    let (processes, executables) = crowd.count()?;
    let (rss, maps) = (daemon.rss_bytes()?, daemon.map_bytes()?);
    daemon.finish()?;
    let whom = FigureRow {
        what: "processes, with what else ran on the host left out",
        measured: format!("{processes} of {executables} executables"),
        budget: "",
    };
    Ok(vec![whom, memory(rss, maps)])
}
