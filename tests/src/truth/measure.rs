//! Records one workload and takes every figure of it: attached to the running program, or started
//! by the recorder.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::app::Workload;
use crate::bpf::{self, Cost};
use crate::environment::perfusion_bin;
use crate::perfusion::{Recording, SLACK, Scratch};
use crate::profile::{Profile, Sample};
use crate::schedstat::{self, Looks};
use crate::truth::judge::{
    Chains, Moments, Roots, Shares, has_user_part, is_collection, is_complete, is_exiting, judge,
    picture,
};
use crate::wait::let_pass;

/// Counters of a profile that tell of something lost or in doubt, by parts of their names.
const LOSS_WORDS: [&str; 17] = [
    "ring_full",
    "_busy",
    "_lost",
    "_torn",
    "downsampled",
    "dropped",
    "refus",
    "_bad",
    "missed",
    "_failed",
    "unreadable",
    "_limited",
    "broken",
    "guessed",
    "overflow",
    "abandoned",
    "malformed",
];
/// Share of the recording a thread must have been on a CPU for its CPU time to be compared with
/// schedstat alone: of less, the 10 ms between two looks at either end leave too much open.
const BUSY: f64 = 0.1;

/// How the recorder met the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `record --pid`, while the chains run.
    Attached,
    /// `record -- CMD`, from the first instruction to the last.
    Launched,
    /// Attached, by `perf record -g`.
    Perf,
}

impl Mode {
    /// For the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::Launched => "from its start",
            Self::Perf => "by `perf record -g`",
        }
    }
}

/// How to record.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long an attached recording is, and how long the chains run in a launched one.
    pub length: Duration,
    /// CPU samples a second.
    pub frequency_hz: u32,
}

/// All figures of one recording.
#[derive(Clone, Debug)]
pub struct Measured {
    /// How.
    pub mode: Mode,
    /// CPU samples of the declared threads.
    pub on_cpu: Shares,
    /// Waits of the declared threads (runnable and blocked), by nanoseconds.
    pub off_cpu: Shares,
    /// CPU samples of the declared threads in a collection, which are not judged.
    pub collections: f64,
    /// All samples of the process: only whether they are complete.
    pub process: Shares,
    /// The way from the thread's start to the first function of each chain.
    pub roots: Vec<(String, String)>,
    /// Largest |on-CPU + runnable + blocked − wall| of a declared thread, of wall; attached only.
    pub wall_error: Option<f64>,
    /// Largest distance of a busy declared thread's on-CPU time from what schedstat leaves open, of
    /// schedstat; of the sum of all threads when none is busy; attached only.
    pub cpu_error: Option<f64>,
    /// (profile − program) / program of the time in the functions that wait, or how far the blocked
    /// part of it lies outside what the kernel leaves open, whichever is more; attached only.
    pub wait_error: Option<f64>,
    /// Nanoseconds of the CPU sampler by CPU sample stored.
    pub ns_per_sample: Option<f64>,
    /// Nanoseconds of one run of the switch program, kept stacks included.
    pub ns_per_switch: Option<f64>,
    /// Counters of losses and doubts that are not zero.
    pub losses: BTreeMap<String, i64>,
}

/// What a workload declared in its `ready` line.
#[derive(Debug)]
pub(crate) struct Declared {
    /// By thread id as the profile's labels have it.
    chains: BTreeMap<String, Chains>,
}

impl Declared {
    pub(crate) fn read(ready: &Value) -> anyhow::Result<Self> {
        let by_name = ready
            .get("chains")
            .and_then(Value::as_object)
            .context("no `chains` in the ready line")?;
        let mut chains = BTreeMap::new();
        for (name, lists) in by_name {
            let tid = ready.get(name).and_then(Value::as_u64);
            let tid = tid.with_context(|| format!("no thread id of {name} in the ready line"))?;
            let lists =
                lists.as_array().with_context(|| format!("the chains of {name} are no list"))?;
            let lists = lists.iter().map(chain).collect::<anyhow::Result<Chains>>()?;
            ensure!(lists.iter().all(|chain| !chain.is_empty()), "{name} has an empty chain");
            chains.insert(tid.to_string(), lists);
        }
        ensure!(!chains.is_empty(), "the workload declares no chain");
        Ok(Self { chains })
    }

    fn of(&self, sample: &Sample) -> Option<&Chains> {
        self.chains.get(sample.label("thread_id"))
    }
}

/// A list of names; `Name*300` stands for 300 frames of it.
fn chain(list: &Value) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for name in list.as_array().context("a chain is no list")? {
        let text = name.as_str().context("a name is no text")?;
        match text
            .rsplit_once('*')
            .and_then(|(name, count)| Some((name, count.parse::<usize>().ok()?)))
        {
            Some((name, count)) => names.extend(std::iter::repeat_n(name.to_owned(), count)),
            None => names.push(text.to_owned()),
        }
    }
    Ok(names)
}

/// Looks at the recorder's programs until it is told to stop, and remembers the last it saw.
struct CostLog {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<BTreeMap<String, Cost>>,
}

impl CostLog {
    fn start(pid: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut last = BTreeMap::new();
            while !stopping.load(Ordering::Relaxed) {
                let now = bpf::programs_of(pid);
                if !now.is_empty() {
                    last = now;
                }
                let_pass(Duration::from_millis(100));
            }
            last
        });
        Self { stop, thread }
    }

    fn stop(self) -> BTreeMap<String, Cost> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// Starts the program, waits until its chains run, records it.
///
/// # Errors
/// When the program or the recorder fails.
pub fn attached(workload: &Workload, options: Options) -> anyhow::Result<Measured> {
    let app = workload.start()?;
    let declared = Declared::read(app.ready())?;
    let scratch = Scratch::new()?;
    let file = scratch.path("profile.pb.gz");
    let (length, frequency) =
        (format!("{}ms", options.length.as_millis()), options.frequency_hz.to_string());
    let times = schedstat::Log::start(app.pid());
    let recording =
        Recording::of_pid(app.pid(), &file, &["--duration", &length, "--frequency", &frequency])?;
    let costs = CostLog::start(recording.pid());
    let outcome = recording.finish_well(options.length + SLACK);
    let (costs, times) = (costs.stop(), times.stop());
    outcome?;
    let truth = app.stop()?;
    let profile = Profile::read(&file)?;
    let mut measured = figures(&profile, &declared, Mode::Attached, &costs);
    measured.wall_error = wall_error(&profile, &declared);
    measured.cpu_error = cpu_error(&profile, &declared, &times);
    measured.wait_error = wait_error(&profile, &truth, &times)?;
    Ok(measured)
}

/// Has the recorder start the program, lets its chains run, has it end.
///
/// # Errors
/// When the program or the recorder fails.
pub fn launched(workload: &Workload, options: Options) -> anyhow::Result<Measured> {
    let scratch = Scratch::new()?;
    let file = scratch.path("profile.pb.gz");
    let mut recorder =
        Workload::program(perfusion_bin().context("PERFUSION_BIN names no perfusion")?);
    for argument in
        ["--quiet", "record", "--frequency", &options.frequency_hz.to_string(), "--output"]
    {
        recorder = recorder.arg(argument);
    }
    recorder = recorder.arg(&file).arg("--");
    for argument in workload.command_line() {
        recorder = recorder.arg(argument);
    }
    for (name, value) in workload.environment() {
        recorder = recorder.env(name, value);
    }
    // The program has the recorder's standard input and output.
    let mut app = recorder.spawn()?;
    let costs = CostLog::start(app.pid());
    app.await_ready()?;
    let declared = Declared::read(app.ready())?;
    let_pass(options.length);
    let truth = app.stop();
    let costs = costs.stop();
    truth?;
    Ok(figures(&Profile::read(&file)?, &declared, Mode::Launched, &costs))
}

fn figures(
    profile: &Profile,
    declared: &Declared,
    mode: Mode,
    costs: &BTreeMap<String, Cost>,
) -> Measured {
    let cost = |program: &str| {
        costs.iter().find(|(name, _)| name.contains(program)).map(|(_, cost)| *cost)
    };
    let per = |ns: u64, count: f64| (count > 0.0).then(|| ns as f64 / count);
    let stored = profile.counter("cpu_samples_stored").unwrap_or(0) as f64;
    Measured {
        ns_per_sample: cost("cpu_sample").and_then(|cost| per(cost.run_ns, stored)),
        ns_per_switch: cost("sched_switch").and_then(|cost| per(cost.run_ns, cost.runs as f64)),
        losses: losses(profile),
        ..judged(profile, declared, mode)
    }
}

/// The shares alone.
pub(crate) fn judged(profile: &Profile, declared: &Declared, mode: Mode) -> Measured {
    let moments = match mode {
        Mode::Attached | Mode::Perf => Moments::Steady,
        Mode::Launched => Moments::WholeLife,
    };
    let roots = Roots::learn(profile, |sample| declared.of(sample));
    let (mut on_cpu, mut off_cpu, mut process) =
        (Shares::default(), Shares::default(), Shares::default());
    let mut collections = 0.0;
    for sample in &profile.samples {
        let value = |column| profile.value(sample, column) as f64;
        if is_exiting(sample) {
            continue;
        }
        let (samples, waited) = (value("samples"), value("blocked") + value("runnable"));
        if samples > 0.0 && has_user_part(sample) {
            process.total += samples;
            process.complete += if is_complete(sample) { samples } else { 0.0 };
        }
        let Some(chains) = declared.of(sample) else { continue };
        if is_collection(sample) {
            collections += samples;
            continue;
        }
        let verdict = judge(sample, chains, &roots, moments);
        if samples > 0.0 {
            on_cpu.add(verdict, samples, || picture(sample, verdict));
        }
        if waited > 0.0 && verdict.not_yet_run {
            off_cpu.unseen += waited;
        } else if waited > 0.0 {
            off_cpu.add(verdict, waited, || picture(sample, verdict));
        }
    }
    Measured {
        mode,
        on_cpu,
        off_cpu,
        process,
        collections,
        roots: roots.all().map(|(first, root)| (first.to_owned(), root.join(" > "))).collect(),
        wall_error: None,
        cpu_error: None,
        wait_error: None,
        ns_per_sample: None,
        ns_per_switch: None,
        losses: BTreeMap::new(),
    }
}

fn losses(profile: &Profile) -> BTreeMap<String, i64> {
    let counters = profile.comments.iter().filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.trim(), value.split_whitespace().next()?.parse::<i64>().ok()?))
    });
    counters
        .filter(|(name, value)| *value != 0 && LOSS_WORDS.iter().any(|word| name.contains(word)))
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn of_thread<'a>(tid: &'a str) -> impl Fn(&Sample) -> bool + 'a {
    move |sample| sample.label("thread_id") == tid
}

fn largest(errors: impl Iterator<Item = f64>) -> Option<f64> {
    errors.map(f64::abs).max_by(f64::total_cmp)
}

fn wall_error(profile: &Profile, declared: &Declared) -> Option<f64> {
    let wall = profile.duration_ns as f64;
    largest(declared.chains.keys().map(|tid| {
        let states =
            ["cpu", "runnable", "blocked"].map(|column| profile.sum(column, of_thread(tid)));
        (states.iter().sum::<i64>() as f64 - wall) / wall
    }))
}

/// How far on-CPU time lies outside what the looks at schedstat around the recording's two ends
/// leave open, in parts of it.
fn cpu_error(profile: &Profile, declared: &Declared, times: &Looks) -> Option<f64> {
    let (begin, end) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    let mut threads = Vec::new();
    for tid in declared.chains.keys() {
        // Threads that came or went meanwhile have no account of the whole.
        if let Some((least, most)) = times.oncpu_between(tid.parse().ok()?, begin, end) {
            threads.push((profile.sum("cpu", of_thread(tid)), least, most));
        }
    }
    let busy = profile.duration_ns as f64 * BUSY;
    let error = |(ours, least, most): (i64, i64, i64)| {
        let outside = (least - ours).max(ours - most).max(0) as f64;
        (least as f64 > busy).then(|| outside / least as f64)
    };
    let sum =
        threads.iter().fold((0, 0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2));
    largest(threads.iter().copied().filter_map(error)).or_else(|| error(sum))
}

/// The program tells, by thread, the function that waits and when it was in it:
/// `{"waits":{"TID":{"in":"NAME","at":[[FROM,TO],…]}}}` in nanoseconds of wall-clock time.
fn wait_error(profile: &Profile, truth: &Value, times: &Looks) -> anyhow::Result<Option<f64>> {
    let Some(waits) = truth.get("waits").and_then(Value::as_object) else { return Ok(None) };
    let (begin, end) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    let mut errors = Vec::new();
    for (tid, told) in waits {
        let function = told.get("in").and_then(Value::as_str).context("waits without `in`")?;
        let mut own = 0i64;
        for interval in told.get("at").and_then(Value::as_array).context("waits without `at`")? {
            let moment =
                |index: usize| interval.get(index).and_then(Value::as_i64).context("no time");
            own += (moment(1)?.min(end) - moment(0)?.max(begin)).max(0);
        }
        ensure!(own > 0, "thread {tid} never was in {function} during the recording");
        // All its time there: what it takes to go to sleep and to come back is in its own clock
        // too.
        let there = |sample: &Sample| {
            sample.label("thread_id") == tid
                && (sample.has(function) || sample.has("[waiting since before"))
        };
        errors.push((profile.sum("wall", there) - own) as f64 / own as f64);
        // Of it everything is blocked but what the thread ran or waited for a CPU by the kernel's
        // account, and what was stolen from it.
        let wanted =
            times.wanted_cpu_between(tid.parse()?, begin, end).context("no schedstat of it")?;
        let of_tid = of_thread(tid);
        let stolen = profile
            .sum("runnable", |sample| of_tid(sample) && sample.label("wait_reason") == "stolen");
        let blocked = profile.sum("blocked", there);
        let outside = (own - wanted - stolen - blocked).max(blocked - own).max(0);
        errors.push(outside as f64 / own as f64);
    }
    Ok(largest(errors.into_iter()))
}
