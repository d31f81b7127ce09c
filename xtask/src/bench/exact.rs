//! What exact mode costs a program that does nothing but make objects, beside the runtime's own
//! floor: a profiler that counts them and does nothing else.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

use super::median::median_interval;
use super::{Bench, FigureRow, load, native};
use crate::paths::WorkspacePaths;

/// Heading, and what the figures include.
pub(super) const HOW: &str = "\
Exact mode: CPU time for each object of 32 bytes that one thread makes in a loop, 10 rounds on \
     each of .NET 8, 9 and 10
CPU time of the whole process, collections included. *Counting* is a main profiler that receives \
     each object and counts (`xtask/native/counting.c`). That is the
runtime's own floor. *With survivors* receives those as well (`MONITOR_GC`), as exact mode must. \
     In each round all four take turns, forwards and backwards. Each ratio
is of one round, with the 95 % interval of its median.
";

const ROUNDS: usize = 10;
const RUNTIMES: [&str; 3] = ["8", "9", "10"];
const SETTLING_SECONDS: f64 = 1.5;
const WINDOW_SECONDS: f64 = 2.0;

/// Says which process it is, and becomes the program.
const BECOME: &str = r#"echo "$$"; exec "$0" "$@""#;

#[derive(Clone, Copy)]
enum CountingMode {
    Plain,
    Counting,
    WithSurvivors,
    Exact,
}

const TURNS: [CountingMode; 4] =
    [CountingMode::Plain, CountingMode::Counting, CountingMode::WithSurvivors, CountingMode::Exact];

/// Values of all rounds on one runtime.
#[derive(Default)]
struct ExactCosts {
    nanoseconds: [Vec<f64>; 4],
    of_plain: [Vec<f64>; 4],
    of_counting: Vec<f64>,
    of_survivors: Vec<f64>,
}

pub(super) fn costs(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    let counting = native::library(bench.paths, "counting")?;
    let mut all = Vec::new();
    for runtime in RUNTIMES {
        let measured =
            measure(bench.paths, &counting, runtime).with_context(|| format!(".NET {runtime}"))?;
        all.push((runtime, measured));
        bench.steps.step(&format!("{ROUNDS} rounds on .NET {runtime}"));
    }
    let row = |what, budget, unit: &str, values: &dyn Fn(&ExactCosts) -> Vec<f64>| {
        let one = |(runtime, measured): &(&str, ExactCosts)| {
            let [median, low, high] = median_interval(&values(measured));
            format!(".NET {runtime}: {median:.1}{unit} ({low:.1} to {high:.1})")
        };
        FigureRow { what, measured: all.iter().map(one).collect::<Vec<_>>().join("; "), budget }
    };
    let plain = |how: CountingMode| move |m: &ExactCosts| m.of_plain[how as usize].clone();
    Ok(vec![
        row("an object of a plain run", "", " ns", &|m| {
            m.nanoseconds[CountingMode::Plain as usize].clone()
        }),
        row("an object in exact mode", "", " ns", &|m| {
            m.nanoseconds[CountingMode::Exact as usize].clone()
        }),
        row("counting, of plain", "", "×", &plain(CountingMode::Counting)),
        row("counting with survivors, of plain", "", "×", &plain(CountingMode::WithSurvivors)),
        row("exact mode, of plain", "10×", "×", &plain(CountingMode::Exact)),
        row("exact mode, of counting", "1.5×", "×", &|m| m.of_counting.clone()),
        row("exact mode, of counting with survivors", "1.5×", "×", &|m| m.of_survivors.clone()),
    ])
}

fn measure(paths: &WorkspacePaths, counting: &PathBuf, runtime: &str) -> Result<ExactCosts> {
    let mut measured = ExactCosts::default();
    for round in 0..ROUNDS {
        let mut turns = TURNS;
        if round % 2 == 1 {
            turns.reverse();
        }
        let mut of_turn = [0.0; 4];
        for how in turns {
            of_turn[how as usize] = nanoseconds(paths, counting, runtime, how)?;
        }
        let [plain, counted, survivors, exact] = of_turn;
        for (turn, value) in of_turn.into_iter().enumerate() {
            measured.nanoseconds[turn].push(value);
            measured.of_plain[turn].push(value / plain);
        }
        measured.of_counting.push(exact / counted);
        measured.of_survivors.push(exact / survivors);
    }
    Ok(measured)
}

/// CPU time of the process for each object.
fn nanoseconds(
    paths: &WorkspacePaths,
    counting: &PathBuf,
    runtime: &str,
    how: CountingMode,
) -> Result<f64> {
    let mut command = Command::new("sh");
    match how {
        CountingMode::Plain => {}
        CountingMode::Counting | CountingMode::WithSurvivors => {
            command
                .env("CORECLR_ENABLE_PROFILING", "1")
                .env("CORECLR_PROFILER", native::CLASS)
                .env("CORECLR_PROFILER_PATH", counting);
            if matches!(how, CountingMode::WithSurvivors) {
                command.env("COUNTING_GC", "1");
            }
        }
        CountingMode::Exact => {
            command = Command::new(paths.perfusion());
            command.args(["--quiet", "record", "--exact", "--output"]);
            command.arg(paths.target.join("bench/exact.pb.gz")).args(["--", "sh"]);
        }
    }
    command
        .args(["-c", BECOME])
        .arg(paths.dotnet(runtime))
        .arg(load::dll(paths))
        .args(["micro", "1"]);
    let mut app = load::App::begin(&mut command)?;
    let line = app.line()?;
    let pid: u32 = line
        .trim()
        .parse()
        .with_context(|| format!("the start: expected a pid, found {line:?}"))?;
    let ready = app.line()?;
    if ready != "ready\n" {
        bail!("the load app: expected \"ready\", found {ready:?}");
    }
    load::pass(SETTLING_SECONDS);
    let [_, per_cpu_second] = app.rates_of(pid, WINDOW_SECONDS)?;
    app.end()?;
    Ok(1e9 / per_cpu_second)
}
