//! `cargo xtask bench [FIGURE [--write]]`: what profiling costs, measured on a real CLR under a
//! real kernel, one function per figure. A run of all figures writes docs/benchmarks.md; one figure
//! is printed, and with `--write` replaces its section there. Nothing here judges: the budgets
//! stand beside the values.

mod compiler;
mod crowd;
mod daemon;
mod exact;
mod listening;
mod load;
mod native;
mod shim;
mod smaps;
mod statistics;
mod web;

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};
use ebpf_common::counter::Counter;
use ebpf_common::stage::{STAGE_COPY, STAGE_KERNEL, STAGE_SEND, STAGE_USER};

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

/// After so long the probes know the rules of nearly all code the app runs.
const LEARNING_SECONDS: f64 = 2.0;

type Figure = fn(&Bench<'_>) -> Result<Vec<FigureRow>>;

/// Name on the command line, what it measures and how (a heading, and text below it where more is
/// to be said), and the code that does it.
const FIGURES: [(&str, &str, Figure); 15] = [
    (
        "start",
        "From starting `perfusion record` to the first sample in the kernel",
        start_to_first_sample,
    ),
    (
        "sample",
        "10 s of CPU samples of an app that is busy on all CPUs with 40 managed and native frames, \
         after 10 s, everything on",
        sample,
    ),
    (
        "switches",
        "5 s of an app that only switches, 100,000 times a second, after 5 s, everything on",
        switches,
    ),
    (
        "steady",
        "10 s of a recording that has run for 2 s, with everything on, 99 Hz, the app busy on all \
         CPUs",
        steady,
    ),
    (
        "thrifty",
        "The same with `--wait-stack-mib 1`: the times of waits are exact as ever, their stacks \
         are a sample",
        thrifty,
    ),
    (
        "throughput",
        "Operations per second of the app, recorded against not recorded, in alternation",
        throughput,
    ),
    (
        "kestrel",
        "Requests of about half a millisecond a Kestrel app answers in a second, all CPUs busy, \
         clients included, recorded against not recorded, in alternation",
        kestrel,
    ),
    (
        "small-requests",
        "The same with requests of about 30 µs, 80,000 context switches a second",
        small_requests,
    ),
    (
        "micro",
        "Objects of 32 bytes a second, made by all CPUs and nothing else, recorded against not \
         recorded, in alternation",
        micro,
    ),
    ("micro-10", "The same on .NET 10, whose runtime samples allocations itself", micro_sampled),
    (
        "allocation",
        "An app that allocates 400 MB/s, seen by its own profile at 4,999 Hz",
        allocation,
    ),
    (
        "crowd",
        "20 s of a whole host: a browser, Node, CoreCLR, and programs that share libLLVM",
        crowd_memory,
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

/// Medians of 5 starts.
fn start_to_first_sample(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
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
fn sample(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
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

/// Once as it comes, once with the stacks of wakers, and once with nearly no stack kept, which
/// shows what the times alone cost.
///
/// The kernel measures by reading a clock before and after each run, and one such reading is in
/// what it measures; there are some three runs to a switch. What a program took that does nothing
/// is told, and taken off what stands beside a budget: without `kernel.bpf_stats_enabled`, as a
/// kernel comes, there is none of it.
fn switches(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
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

fn steady(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    costs(bench, &[])
}

fn thrifty(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
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

fn crowd_memory(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
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

/// The app that works and switches.
fn throughput(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "9", &[])
}

/// The app that does nothing but allocate.
fn micro(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "9", &["micro"])
}

/// The same where the runtime itself samples allocations.
fn micro_sampled(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    throughput_with(bench, "10", &["micro"])
}

fn throughput_with(bench: &Bench<'_>, runtime: &str, arguments: &[&str]) -> Result<Vec<FigureRow>> {
    let listener = listening::Listener::new(bench.paths)?;
    let mut app = load::App::start_with_listener(bench.paths, runtime, arguments, &listener)?;
    throughput_of(bench, &mut app, listener)
}

/// The Kestrel app, and clients that keep all CPUs busy with requests that take it half a
/// millisecond each.
fn kestrel(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    kestrel_of(bench, 500)
}

/// The same with as many requests as it can answer.
fn small_requests(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    kestrel_of(bench, 10)
}

fn kestrel_of(bench: &Bench<'_>, orders: u32) -> Result<Vec<FigureRow>> {
    let listener = listening::Listener::new(bench.paths)?;
    let (mut app, clients) = web::start(bench.paths, orders, &listener)?;
    let rows = throughput_of(bench, &mut app, listener)?;
    clients.end()?;
    app.end()?;
    Ok(rows)
}

/// What happens to the app in a window.
#[derive(Clone, Copy)]
enum BenchWindow {
    Plain,
    Listening,
    Recorded,
}

/// Rounds of windows, every second one backwards, so that drift cancels out; the interval is of the
/// rounds' ratios. A recorded window begins once the shim is there and the probes have learned the
/// app's code: the start is a figure of its own, and the daemon is busy with what is new for some
/// five seconds.
fn throughput_of(
    bench: &Bench<'_>,
    app: &mut load::App,
    mut listener: listening::Listener,
) -> Result<Vec<FigureRow>> {
    const ROUNDS: usize = 20;
    const SETTLING_SECONDS: f64 = 2.0;
    const NEWS_SECONDS: f64 = 6.0;
    const WINDOW_SECONDS: f64 = 4.0;
    load::pass(NEWS_SECONDS); // tiered compilation settles
    let mut ratios: [Vec<f64>; 4] = Default::default();
    let mut daemons = Vec::new();
    for round in 0..ROUNDS {
        let mut windows = [BenchWindow::Plain, BenchWindow::Listening, BenchWindow::Recorded];
        if round % 2 == 1 {
            windows.reverse();
        }
        let mut rates = [[0.0; 2]; 3];
        for window in windows {
            let of_window = &mut rates[window as usize];
            match window {
                BenchWindow::Plain => {
                    load::pass(SETTLING_SECONDS);
                    *of_window = app.rates(WINDOW_SECONDS)?;
                }
                BenchWindow::Listening => {
                    listener.listen(true)?;
                    load::pass(SETTLING_SECONDS);
                    *of_window = app.rates(WINDOW_SECONDS)?;
                    listener.listen(false)?;
                }
                BenchWindow::Recorded => {
                    let mut daemon = daemon::Recorder::start(bench.paths, app.pid())?;
                    daemon.first_sample()?;
                    daemon.attached(app.pid())?;
                    load::pass(NEWS_SECONDS);
                    let before = daemon.cpu_seconds()?;
                    *of_window = app.rates(WINDOW_SECONDS)?;
                    daemons.push((daemon.cpu_seconds()? - before) / WINDOW_SECONDS * 100.0);
                    daemon.finish()?;
                }
            }
        }
        let [[plain, plain_cpu], [_, listening_cpu], [recorded, recorded_cpu]] = rates;
        let of_round = [
            recorded / plain,
            recorded_cpu / plain_cpu,
            listening_cpu / plain_cpu,
            recorded_cpu / listening_cpu,
        ];
        for (ratios, ratio) in ratios.iter_mut().zip(of_round) {
            ratios.push(ratio * 100.0);
        }
        bench.steps.step(&format!("round {} of {ROUNDS}", round + 1));
    }
    let row = |what, budget, ratios: &[f64]| {
        let [median, low, high] = median_interval(ratios);
        let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = ratios.iter().copied().fold(0.0, f64::max);
        FigureRow {
            what,
            measured: format!(
                "{median:.2} % (95 % interval {low:.2} to {high:.2}), median of {} from \
                 {lowest:.2} to {highest:.2}",
                ratios.len()
            ),
            budget,
        }
    };
    let [of_time, of_cpu, listening, of_listening] = &ratios;
    Ok(vec![
        row("operations per second with everything on, of without", "99 %", of_time),
        row("the same per second of CPU time the app got", "99 %", of_cpu),
        row(
            "of that what the runtime keeps when it tells its events to nobody \
             (`xtask/native/listening.c`)",
            "",
            listening,
        ),
        row("what is left to shim, probes and cold caches: recorded, of that", "", of_listening),
        daemon_row(&daemons),
    ])
}

fn daemon_row(percents: &[f64]) -> FigureRow {
    let [median, low, high] = median_interval(percents);
    FigureRow {
        what: "CPU of the daemon meanwhile, of one CPU",
        measured: format!("{median:.1} % (95 % interval {low:.1} to {high:.1})"),
        budget: "1 % of the node",
    }
}

/// CPU time below the shim's event callback, by the number of allocation samples it took: all of
/// them with their stacks, so that chance, which is cheaper, decides on none.
fn allocation(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    const CALLBACK: &str = "event_pipe_event_delivered";
    let mut all = Vec::new();
    for runtime in ["8", "9", "10"] {
        let app = load::App::start_allocating(bench.paths, runtime)?;
        load::pass(2.0); // tiered compilation settles
        let perfusion = bench.paths.perfusion();
        let profile = bench.paths.target.join("bench/allocation.pb.gz");
        output(
            Command::new(&perfusion)
                .args([
                    "record",
                    "--frequency",
                    "4999",
                    "--duration",
                    "8s",
                    "--allocation-samples",
                    "1000000",
                ])
                .args(["--pid", &app.pid().to_string(), "--output"])
                .arg(&profile),
        )?;
        let folded = output(
            Command::new(&perfusion)
                .arg("report")
                .arg(&profile)
                .args(["--format", "folded", "--type", "cpu"]),
        )?;
        let inside = folded.lines().filter(|line| line.contains(CALLBACK));
        let ns: f64 = inside.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
        let samples = comment(&profile, "shim_allocation_samples")?;
        all.push(format!(".NET {runtime}: {:.2} µs, mean of {samples}", ns / samples / 1e3));
        app.end()?;
    }
    Ok(vec![FigureRow {
        what: "one allocation sample in the app, stack copied",
        measured: all.join("; "),
        budget: "5 µs",
    }])
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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.get(middle.wrapping_sub(1))) {
        (Some(upper), Some(lower)) if values.len().is_multiple_of(2) => {
            f64::midpoint(*upper, *lower)
        }
        (Some(upper), _) => *upper,
        (None, _) => 0.0,
    }
}

/// The median, and the interval that holds the true one with 95 %: of n values as many are below it
/// as heads come up when n coins are thrown. So the k-th value from either end is on its own side
/// of it unless fewer than k heads come up, for which there is a chance of 2.5 % at most.
fn median_interval(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let mut chance = 0.5_f64.powf(n as f64);
    let (mut k, mut fewer) = (0, chance);
    while fewer <= 0.025 && k < n {
        k += 1;
        chance *= (n + 1 - k) as f64 / k as f64;
        fewer += chance;
    }
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    let k = k.max(1);
    [median(sorted.clone()), at(k - 1), at(n.saturating_sub(k))]
}

#[cfg(test)]
mod tests {
    use super::{median, median_interval, with_section};

    #[test]
    fn median_of_odd_and_even() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }

    /// Tables of the sign test have these ranks: 6 and 15 of 20 values, 3 and 10 of 12, and none of
    /// 5.
    #[test]
    fn interval_of_a_median() {
        let of = |n: u32| median_interval(&(1..=n).rev().map(f64::from).collect::<Vec<_>>());
        for (n, expected) in [(20, [10.5, 6.0, 15.0]), (12, [6.5, 3.0, 10.0]), (5, [3.0, 1.0, 5.0])]
        {
            assert!(
                of(n).iter().zip(expected).all(|(found, right)| (found - right).abs() < 1e-9),
                "{n}"
            );
        }
    }

    #[test]
    fn a_section_takes_its_own_place() {
        let document = "# Title\n\n## A\nold\n\n## B\nb\n";
        assert_eq!(with_section(document, "\n## A\nnew\n"), "# Title\n\n## A\nnew\n\n## B\nb\n");
        assert_eq!(with_section(document, "\n## B\nnew\n"), "# Title\n\n## A\nold\n\n## B\nnew\n");
        assert_eq!(with_section("# Title\n", "\n## C\nc\n"), "# Title\n\n## C\nc\n");
    }
}
