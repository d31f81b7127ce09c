//! What the library costs the app it is in, apart from what events cost: a later start, and memory.

use std::{
    process::Command,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail};

use super::median::median_interval;
use super::{Bench, FigureRow, comment, daemon, load, smaps};
use crate::paths::WorkspacePaths;

/// Heading, and what the figures include.
pub(super) const HOW: &str = "\
What the shim costs the app: its start, and memory; 20 rounds on each of .NET 8, 9 and 10
In each round the same program starts three times, in turns forwards and backwards: without the \
     shim, with the shim alone, and by `perfusion record -- CMD`.
A difference is that of two starts of one round. It has the 95 % interval of its median (by order \
     statistics, whatever the distribution).

- *Later* is the additional time from just before the execution of `dotnet` to the program's first \
     line of output.
- *CPU time* is that of its threads until then. It hardly depends on what else runs.
- *Alone*: loaded by the same environment variables, event session and ring included, while nobody \
     reads the ring.
- *Recorded*: the real thing, with all that the recorder does meanwhile on the same CPUs. Its own \
     start is a figure of its own. The longer end of a recorded
  process (15 to 40 ms, [shim-protocol.md](shim-protocol.md)) is not included.
- *Memory* is read when the program has made 1 GB of objects, kept most of them, and run a full \
     collection. By then the whole ring has been written, and as
  many objects are watched as may be (4,096, the default). It is the growth of everything in the \
     app, whatever its cause.
- *Of its own*: memory that belongs to no file: the ring, the shim's tables and stacks, and the \
     runtime's handles. It includes what the runtime allocates and
  compiles because of the requested events.
- *Pages of files*: those of the shim, and those of the runtime (above all \
     `System.Private.CoreLib.dll`) that it would not have touched. Other processes share
  them, and the kernel may drop them.

The runtime's own `NativeRuntimeEventSource` causes most of these pages, of the compiled code and \
     of the later start. It describes all its events by reflection as
soon as any session asks the runtime for any.
";

const ROUNDS: usize = 20;
const RUNTIMES: [&str; 3] = ["8", "9", "10"];

/// The variable that names the library for a runtime, and the one without which it is not looked
/// at.
const LIBRARIES: &str = "CORECLR_NOTIFICATION_PROFILERS";
const ENABLE: &str = "CORECLR_ENABLE_NOTIFICATION_PROFILERS";

/// Says which process it is, when that was, and which library was given to it, and becomes the
/// program. The time is told, not taken where the line is read: a recorder may keep the reader from
/// its CPU then.
const BECOME: &str = r#"echo "$$ $(date +%s%N) $CORECLR_NOTIFICATION_PROFILERS"; exec "$0" "$@""#;

/// Tiered compilation and what the collector gives back come after the collection.
const SETTLING_SECONDS: f64 = 0.5;

#[derive(Clone, Copy, PartialEq, Eq)]
enum ShimMode {
    Without,
    Alone,
    Recorded,
}

/// A started program.
struct Start {
    app: load::App,
    pid: u32,
    milliseconds: f64,
    /// CPU time of its threads until then.
    cpu_milliseconds: f64,
    /// Value of [`LIBRARIES`].
    libraries: String,
}

/// Bytes of a program.
struct ProgramMemory {
    resident: u64,
    own: u64,
    region: u64,
    library: u64,
}

/// What was measured on a runtime, a value for each round: milliseconds and bytes.
#[derive(Default)]
struct ShimCosts {
    start: Vec<f64>,
    later_alone: Vec<f64>,
    later_recorded: Vec<f64>,
    cpu: Vec<f64>,
    more_cpu_alone: Vec<f64>,
    more_cpu_recorded: Vec<f64>,
    resident: Vec<f64>,
    more_resident: Vec<f64>,
    more_own: Vec<f64>,
    region: Vec<f64>,
    more_of_files: Vec<f64>,
}

pub(super) fn costs(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    let mut all = Vec::new();
    for runtime in RUNTIMES {
        all.push((
            runtime,
            measure(bench.paths, runtime).with_context(|| format!(".NET {runtime}"))?,
        ));
        bench.steps.step(&format!("{ROUNDS} rounds on .NET {runtime}"));
    }
    let row = |what, budget, (unit, size): (&str, f64), values: fn(&ShimCosts) -> &[f64]| {
        let one = |(runtime, measured): &(&str, ShimCosts)| {
            let [median, low, high] = median_interval(values(measured)).map(|value| value / size);
            format!(".NET {runtime}: {median:.2} {unit} ({low:.2} to {high:.2})")
        };
        FigureRow { what, measured: all.iter().map(one).collect::<Vec<_>>().join("; "), budget }
    };
    let (ms, mebibytes) = (("ms", 1.0), ("MiB", f64::from(1 << 20)));
    Ok(vec![
        row("start without the shim", "", ms, |m| &m.start),
        row("later with the shim alone", "50 ms", ms, |m| &m.later_alone),
        row("later when recorded", "50 ms", ms, |m| &m.later_recorded),
        row("CPU time until then without the shim", "", ms, |m| &m.cpu),
        row("more CPU time with the shim alone", "", ms, |m| &m.more_cpu_alone),
        row("more CPU time when recorded", "", ms, |m| &m.more_cpu_recorded),
        row("memory (RSS) without the shim", "", mebibytes, |m| &m.resident),
        row("more memory (RSS) when recorded", "4 MiB", mebibytes, |m| &m.more_resident),
        row("of that memory of its own", "4 MiB", mebibytes, |m| &m.more_own),
        row("of that the ring", "", mebibytes, |m| &m.region),
        row("the rest: pages of files", "", mebibytes, |m| &m.more_of_files),
    ])
}

fn measure(paths: &WorkspacePaths, runtime: &str) -> Result<ShimCosts> {
    let mut measured = ShimCosts::default();
    let mut libraries = String::new();
    // The first round fills the caches and is not counted; it begins with the recorder, who says
    // how the library is loaded.
    for round in 0..=ROUNDS {
        let mut turns = [ShimMode::Recorded, ShimMode::Alone, ShimMode::Without];
        if round % 2 == 1 {
            turns.reverse();
        }
        let (mut milliseconds, mut cpu, mut memory) = ([0.0; 3], [0.0; 3], [None, None, None]);
        for how in turns {
            let mut start = Start::new(paths, runtime, how, &libraries)?;
            milliseconds[how as usize] = start.milliseconds;
            cpu[how as usize] = start.cpu_milliseconds;
            if how == ShimMode::Recorded {
                libraries.clone_from(&start.libraries);
            }
            memory[how as usize] = Some(start.memory(how)?);
            start.app.end()?;
        }
        let [Some(without), _, Some(recorded)] = memory else {
            bail!("a round without all its turns")
        };
        if round == 0 {
            continue;
        }
        let [start, alone, later] = milliseconds;
        measured.start.push(start);
        measured.later_alone.push(alone - start);
        measured.later_recorded.push(later - start);
        let [start, alone, later] = cpu;
        measured.cpu.push(start);
        measured.more_cpu_alone.push(alone - start);
        measured.more_cpu_recorded.push(later - start);
        let resident = recorded.resident as f64 - without.resident as f64;
        let own = recorded.own as f64 - without.own as f64;
        measured.resident.push(without.resident as f64);
        measured.more_resident.push(resident);
        measured.more_own.push(own);
        measured.region.push(recorded.region as f64);
        measured.more_of_files.push(resident - own);
    }
    // Else it was the memory of fewer objects than are watched by default.
    comment(&profile(paths), "shim_objects_downsampled")
        .context("more objects than can be watched")?;
    Ok(measured)
}

fn profile(paths: &WorkspacePaths) -> std::path::PathBuf {
    paths.target.join("bench/shim.pb.gz")
}

impl Start {
    /// Starts the program, and returns when it has said its first line.
    fn new(paths: &WorkspacePaths, runtime: &str, how: ShimMode, libraries: &str) -> Result<Start> {
        let mut command = Command::new("sh");
        if how == ShimMode::Recorded {
            command = Command::new(paths.perfusion());
            // Each sample is told of, so that as many objects are watched as may be.
            command.args(["--quiet", "record", "--allocation-samples", "1000000", "--output"]);
            command.arg(profile(paths)).args(["--", "sh"]);
        }
        command.args(["-c", BECOME]).arg(paths.dotnet(runtime)).arg(load::dll(paths)).arg("idle");
        if how == ShimMode::Alone {
            // The recorder's copy of the library has gone with it.
            let (_, class) =
                libraries.split_once('=').context("no library in the recorded environment")?;
            let library = format!("{}={class}", paths.shim().display());
            command.env(ENABLE, "1").env(LIBRARIES, library);
        }
        let mut app = load::App::begin(&mut command)?;
        let line = app.line()?;
        let ready = app.line()?;
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?;
        let mut words = line.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse::<u64>().ok());
        let (Some(pid), Some(began)) = (number(), number()) else {
            bail!("the start: expected \"PID NANOSECONDS\", found {line:?}");
        };
        if ready != "ready\n" {
            bail!("the load app: expected \"ready\", found {ready:?}");
        }
        let pid = u32::try_from(pid).context("the app's pid")?;
        let took =
            now.checked_sub(Duration::from_nanos(began)).context("the clock went backwards")?;
        Ok(Start {
            app,
            pid,
            milliseconds: took.as_secs_f64() * 1e3,
            cpu_milliseconds: load::threads_cpu_milliseconds(pid)?,
            libraries: words.collect(),
        })
    }

    /// Its memory, with many objects unless nobody would hear of them.
    fn memory(&mut self, how: ShimMode) -> Result<ProgramMemory> {
        if how != ShimMode::Alone {
            self.app.ask("fill")?;
            load::pass(SETTLING_SECONDS);
        }
        let mappings = smaps::mappings(self.pid)?;
        let file = self.libraries.split_once('=').map(|(file, _)| file);
        let memory = ProgramMemory {
            resident: smaps::rss(&mappings, |_| true),
            own: mappings.iter().map(smaps::SmapsEntry::own).sum(),
            region: smaps::rss(&mappings, |name| name.contains(daemon::REGION)),
            library: smaps::rss(&mappings, |name| file.is_some_and(|file| name.ends_with(file))),
        };
        let there = how != ShimMode::Without;
        if (memory.region != 0, memory.library != 0) != (there, there) {
            bail!(
                "pid {}: {} bytes of ring, {} of library",
                self.pid,
                memory.region,
                memory.library
            );
        }
        Ok(memory)
    }
}
