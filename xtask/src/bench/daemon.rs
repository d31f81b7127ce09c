//! A running `perfusion record`, seen from outside: its BPF programs and maps, its time and its
//! memory, all as the kernel counts them.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use ebpf_common::counter::{COUNTERS, Counter};
use ebpf_common::stage::{OF_SAMPLES, Stages};
use serde_json::Value;

use super::{load::cpu_seconds, smaps, statistics};
use crate::{exec::output, paths::WorkspacePaths};

/// `BPF_PROG_TYPE_PERF_EVENT`, as /proc/PID/fdinfo shows it: the CPU sampler.
const PERF_EVENT: &str = "7";
/// `BPF_MAP_TYPE_PERCPU_ARRAY`: among the probes' maps their counters and the times of stages, told
/// by their size.
const PER_CPU_ARRAY: &str = "6";
/// What the daemon logs once its programs are in the kernel, and the log's level of that.
const LOADED: &str = "milliseconds=";
const LOG: &str = "warn,perfusion_sources::kernel::load=debug";
/// The shim's shared memory, in a process's maps (docs/shim-protocol.md).
pub(super) const REGION: &str = "/memfd:perfusion";
/// How long a start may take before it counts as failed.
const START_DEADLINE: Duration = Duration::from_secs(20);

/// What the kernel knows of one loaded program.
pub(super) struct LoadedProgram {
    pub(super) name: String,
    pub(super) runs: u64,
    pub(super) run_ns: u64,
}

impl LoadedProgram {
    /// What one run of it is, told by its name.
    pub(super) fn what(&self) -> &'static str {
        match self.name.as_str() {
            name if name.contains("switch") => "one context switch, kept stacks included",
            name if name.contains("process") => "process life",
            name if name.contains("wak") => "one wake-up",
            name if name.contains("sample") || name.contains("cpu") => "one CPU sample",
            _ => "another event",
        }
    }

    pub(super) fn budget(&self) -> &'static str {
        match self.what() {
            "one CPU sample" => "4 µs, 40 frames: a figure of its own",
            "one context switch, kept stacks included" => {
                "0.4 µs when not kept: a figure of its own"
            }
            _ => "",
        }
    }
}

/// Runs of programs, and the nanoseconds they took, as the kernel measured them.
#[derive(Clone, Copy, Default)]
pub(super) struct Runs {
    pub(super) runs: f64,
    pub(super) ns: f64,
}

impl Runs {
    pub(super) fn since(self, before: Self) -> Self {
        Self { runs: self.runs - before.runs, ns: self.ns - before.ns }
    }
}

/// All programs' runs.
#[derive(Clone, Copy, Default)]
pub(super) struct ProgramRuns {
    /// Those at the scheduler's tracepoints.
    pub(super) scheduler: Runs,
    /// The one that takes CPU samples.
    pub(super) sampler: Runs,
    /// The one that does nothing: what it takes is what the measuring adds to each run.
    pub(super) nothing: Runs,
    /// All others.
    pub(super) others: Runs,
}

impl ProgramRuns {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            scheduler: self.scheduler.since(before.scheduler),
            sampler: self.sampler.since(before.sampler),
            nothing: self.nothing.since(before.nothing),
            others: self.others.since(before.others),
        }
    }

    /// All but the one that does nothing.
    pub(super) fn all(self) -> Runs {
        let parts = [self.scheduler, self.sampler, self.others];
        Runs {
            runs: parts.iter().map(|part| part.runs).sum(),
            ns: parts.iter().map(|part| part.ns).sum(),
        }
    }

    /// Nanoseconds of a run that are the measuring's.
    pub(super) fn measuring_ns(self) -> f64 {
        self.nothing.ns / self.nothing.runs
    }
}

/// A recording in progress. Dropping it kills it.
pub(super) struct Recorder {
    child: Child,
    began: Instant,
    /// Hears that the recording has begun: Ctrl-C is understood from then on.
    recording: Receiver<()>,
    /// Hears how many milliseconds it took to load the programs.
    loaded: Receiver<f64>,
}

/// Counters of the probes, of all CPUs together.
pub(super) struct ProbeCounts([u64; COUNTERS]);

impl ProbeCounts {
    pub(super) fn get(&self, counter: Counter) -> f64 {
        self.0.get(counter as usize).copied().unwrap_or(0) as f64
    }

    /// What was counted since `before`.
    pub(super) fn since(mut self, before: &ProbeCounts) -> ProbeCounts {
        for (now, before) in self.0.iter_mut().zip(before.0) {
            *now = now.saturating_sub(before);
        }
        self
    }
}

impl Recorder {
    /// Begins to record a process.
    pub(super) fn start(paths: &WorkspacePaths, pid: u32) -> Result<Recorder> {
        Recorder::start_with(paths, &["--pid", &pid.to_string()])
    }

    /// Begins to record with these options.
    pub(super) fn start_with(paths: &WorkspacePaths, whom: &[&str]) -> Result<Recorder> {
        Recorder::start_program(&paths.perfusion(), paths, whom)
    }

    /// Begins to record with another build of the program.
    pub(super) fn start_program(
        program: &Path,
        paths: &WorkspacePaths,
        whom: &[&str],
    ) -> Result<Recorder> {
        let began = Instant::now();
        let mut child = Command::new(program)
            .env("PERFUSION_LOG", LOG)
            .arg("record")
            .args(whom)
            .arg("--output")
            .arg(paths.target.join("bench/profile.pb.gz"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("{}: did not start", program.display()))?;
        let stderr = child.stderr.take().context("perfusion has no standard error")?;
        let (sender, recording) = channel();
        let (load_sender, loaded) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // Nobody may wait for these any more.
                if line.starts_with("recording ") {
                    sender.send(()).ok();
                } else if let Some((_, time)) = line.split_once(LOADED) {
                    time.trim().parse().ok().and_then(|time| load_sender.send(time).ok());
                } else {
                    println!("  perfusion: {line}");
                }
            }
        });
        Ok(Recorder { child, began, recording, loaded })
    }

    /// How long the programs took to load, all together; once it records.
    pub(super) fn load_milliseconds(&self) -> Result<f64> {
        self.loaded
            .recv_timeout(START_DEADLINE)
            .context("perfusion did not say how long loading took")
    }

    /// Waits until the sampler has run, and returns how long after the start that was.
    pub(super) fn first_sample(&mut self) -> Result<Duration> {
        // Runs are counted only then.
        let _statistics = statistics::Enabled::enable()?;
        loop {
            let sampled = self.descriptors()?.iter().any(|facts| {
                facts.get("prog_type").is_some_and(|kind| kind == PERF_EVENT)
                    && facts.get("run_cnt").is_some_and(|runs| runs != "0")
            });
            if sampled {
                return Ok(self.began.elapsed());
            }
            if let Some(status) = self.child.try_wait().context("waiting for perfusion")? {
                bail!("perfusion ended before its first sample: {status}");
            }
            if self.began.elapsed() > START_DEADLINE {
                bail!("no sample within {} s of the start", START_DEADLINE.as_secs());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the shim is in the process.
    pub(super) fn attached(&self, pid: u32) -> Result<()> {
        let path = format!("/proc/{pid}/maps");
        loop {
            let maps = fs::read_to_string(&path).with_context(|| path.clone())?;
            if maps.contains(REGION) {
                return Ok(());
            }
            if self.began.elapsed() > START_DEADLINE {
                bail!("no shim in pid {pid} within {} s of the start", START_DEADLINE.as_secs());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Its programs by id.
    pub(super) fn programs(&self) -> Result<BTreeMap<u64, LoadedProgram>> {
        let mut programs = BTreeMap::new();
        for facts in self.descriptors()?.iter().filter(|facts| facts.contains_key("prog_type")) {
            let Some(id) = facts.get("prog_id") else { continue };
            let text = output(Command::new("bpftool").args(["--json", "prog", "show", "id", id]))?;
            let program: Value = serde_json::from_str(&text).context("output of bpftool")?;
            let number = |key: &str| program[key].as_u64().unwrap_or(0);
            let name = program["name"].as_str().unwrap_or("?").to_owned();
            programs.insert(
                number("id"),
                LoadedProgram { name, runs: number("run_cnt"), run_ns: number("run_time_ns") },
            );
        }
        if programs.is_empty() {
            bail!("perfusion (pid {}) holds no BPF program", self.child.id());
        }
        Ok(programs)
    }

    /// What its programs took so far.
    pub(super) fn work(&self) -> Result<ProgramRuns> {
        let mut work = ProgramRuns::default();
        for program in self.programs()?.values() {
            let part = match program.name.as_str() {
                "nothing" => &mut work.nothing,
                "cpu_sample" => &mut work.sampler,
                name if name.starts_with("sched_") => &mut work.scheduler,
                _ => &mut work.others,
            };
            part.runs += program.runs as f64;
            part.ns += program.run_ns as f64;
        }
        Ok(work)
    }

    /// The probes' counters.
    pub(super) fn counts(&self) -> Result<ProbeCounts> {
        self.words_of_all_cpus(0).map(ProbeCounts)
    }

    /// Nanoseconds of each stage of CPU samples so far, if they are measured.
    pub(super) fn stages(&self) -> Result<Stages> {
        self.words_of_all_cpus(OF_SAMPLES)
    }

    /// The value of `key` in the per-CPU array with values of so many words, summed up over the
    /// CPUs.
    fn words_of_all_cpus<const WORDS: usize>(&self, key: u32) -> Result<[u64; WORDS]> {
        let size = (WORDS * size_of::<u64>()).to_string();
        let all = self.descriptors()?;
        let map = all.iter().find(|facts| {
            facts.get("map_type").is_some_and(|kind| kind == PER_CPU_ARRAY)
                && facts.get("value_size") == Some(&size)
        });
        let id = map.and_then(|facts| facts.get("map_id"));
        let id =
            id.with_context(|| format!("perfusion holds no per-CPU array of {WORDS} words"))?;
        let text = output(Command::new("bpftool").args(["--json", "map", "dump", "id", id]))?;
        let dump: Value = serde_json::from_str(&text).context("output of bpftool")?;
        let mut sums = [0; WORDS];
        for cpu in dump[key as usize]["values"].as_array().context("bpftool: no values of a map")? {
            let digits = cpu["value"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let bytes: Vec<u8> = digits
                .filter_map(|byte| u8::from_str_radix(byte.trim_start_matches("0x"), 16).ok())
                .collect();
            let (words, _) = bytes.as_chunks::<8>();
            for (sum, word) in sums.iter_mut().zip(words) {
                *sum += u64::from_ne_bytes(*word);
            }
        }
        Ok(sums)
    }

    /// User and system time it has used.
    pub(super) fn cpu_seconds(&self) -> Result<f64> {
        cpu_seconds(self.child.id())
    }

    /// Memory of its own, page tables aside. The BPF ring is mapped twice, one behind the other,
    /// and is a map besides: it is counted there.
    pub(super) fn rss_bytes(&self) -> Result<u64> {
        let mappings = smaps::mappings(self.child.id())?;
        Ok(smaps::rss(&mappings, |name| !name.ends_with("anon_inode:bpf-map")))
    }

    /// Memory of its BPF maps, each counted once.
    pub(super) fn map_bytes(&self) -> Result<u64> {
        let mut maps = BTreeMap::new();
        for facts in self.descriptors()? {
            if let (Some(id), Some(bytes)) = (facts.get("map_id"), facts.get("memlock")) {
                maps.insert(id.clone(), bytes.parse::<u64>().unwrap_or(0));
            }
        }
        Ok(maps.values().sum())
    }

    /// Ends the recording as Ctrl-C does and waits until the profile is written.
    pub(super) fn finish(mut self) -> Result<()> {
        self.recording
            .recv_timeout(START_DEADLINE)
            .context("perfusion did not say that it records")?;
        output(Command::new("kill").args(["-INT", &self.child.id().to_string()]))?;
        let status = self.child.wait().context("waiting for perfusion")?;
        if !status.success() {
            bail!("perfusion record: expected exit code 0, found {status}");
        }
        Ok(())
    }

    /// `key: value` of each of its open descriptors.
    fn descriptors(&self) -> Result<Vec<BTreeMap<String, String>>> {
        let folder = format!("/proc/{}/fdinfo", self.child.id());
        let mut all = Vec::new();
        for entry in fs::read_dir(&folder).with_context(|| folder.clone())? {
            // A descriptor may be closed between listing and reading.
            let Ok(text) = entry.and_then(|entry| fs::read_to_string(entry.path())) else {
                continue;
            };
            let facts = text.lines().filter_map(|line| line.split_once(':'));
            all.push(facts.map(|(key, value)| (key.to_owned(), value.trim().to_owned())).collect());
        }
        Ok(all)
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Finished ones are gone already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
