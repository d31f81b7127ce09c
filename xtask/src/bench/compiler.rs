//! What a recording costs a program that lives two seconds, and how many of its stacks are exact:
//! the C# compiler that compiles one file.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use super::median::median_interval;
use super::{Bench, FigureRow, counter};
use crate::paths::WorkspacePaths;

/// Heading, and what the figures include.
pub(super) const HOW: &str = "\
A short program from its first instruction to its last: the C# compiler compiles one file on .NET \
     9, 20 rounds
In each round the compiler runs alone and recorded (`perfusion record -- dotnet csc.dll …`, \
     everything on), in turns forwards and backwards. *Recorded* includes
the recorder's own start and the writing of the file. The compiler is Roslyn without precompiled \
     code, as in the system tests, so the runtime compiles it method
by method. Every stack is a first one. A stack is *exact* when it reaches the thread's start \
     without a guess. The stacks of threads that the kernel was ending
are counted apart, because their memory is gone.
";

const ROUNDS: usize = 20;
const RUNTIME: &str = "9";

/// What it compiles: enough for generic methods, lambdas and a query.
const SOURCE: &str = "using System; using System.Collections.Generic; using System.Linq;
class Words {
    static IEnumerable<KeyValuePair<string, int>> Count(IEnumerable<string> words) =>
        words.GroupBy(word => word).Select(group => KeyValuePair.Create(group.Key, group.Count()));
    static void Main(string[] words) {
        foreach (var (word, count) in Count(words).OrderBy(pair => pair.Key)) \
        Console.WriteLine($\"{word} {count}\");
    }
}
";

/// Stacks of all recorded runs, by how they ended.
#[derive(Default)]
struct StackEndings {
    walked: f64,
    exact: f64,
    guessed: f64,
    broken: f64,
    exiting: f64,
}

pub(super) fn costs(bench: &Bench<'_>) -> Result<Vec<FigureRow>> {
    let source = bench.paths.target.join("bench/Words.cs");
    fs::write(&source, SOURCE)
        .with_context(|| format!("{}: cannot be written", source.display()))?;
    let profile = bench.paths.target.join("bench/compiler.pb.gz");
    let (mut alone, mut recorded, mut later) = (Vec::new(), Vec::new(), Vec::new());
    let mut stacks = StackEndings::default();
    for round in 0..ROUNDS {
        let mut seconds = [0.0; 2];
        let turns = if round % 2 == 0 { [false, true] } else { [true, false] };
        for is_recorded in turns {
            let recorder = is_recorded.then_some(profile.as_path());
            seconds[usize::from(is_recorded)] = compile(bench.paths, &source, recorder)?;
        }
        stacks.add(&profile)?;
        alone.push(seconds[0]);
        recorded.push(seconds[1]);
        later.push(seconds[1] - 1.1 * seconds[0]);
    }
    let time = |what, budget, values: &[f64]| {
        let [median, low, high] = median_interval(values);
        let measured =
            format!("{median:.2} s (95 % interval {low:.2} to {high:.2}), median of {ROUNDS}");
        FigureRow { what, measured, budget }
    };
    let StackEndings { walked, exact, guessed, broken, exiting } = stacks;
    Ok(vec![
        time("alone", "", &alone),
        time("recorded", "", &recorded),
        time("recorded, less 1.1 times alone in the same round", "0.25 s", &later),
        FigureRow {
            what: "exact stacks, of those of threads that the kernel was not ending",
            measured: format!(
                "{:.3} % of {}: {guessed} guessed, {broken} broken; beside them {exiting} of \
                 threads being ended",
                exact / (walked - exiting) * 100.0,
                walked - exiting
            ),
            budget: "99.9 %",
        },
    ])
}

impl StackEndings {
    fn add(&mut self, profile: &Path) -> Result<()> {
        let of = |name| counter(profile, name);
        self.walked += of("stacks_walked")?;
        self.exact += of("stacks_exact")?;
        self.guessed += of("stacks_guessed")?;
        self.broken += of("stacks_broken")?;
        self.exiting += of("stacks_exiting")?;
        Ok(())
    }
}

/// Seconds from the start of the command to its end.
fn compile(paths: &WorkspacePaths, source: &Path, profile: Option<&Path>) -> Result<f64> {
    let dotnet = paths.dotnet(RUNTIME);
    let mut command = match profile {
        Some(profile) => {
            let mut command = Command::new(paths.perfusion());
            command.args(["--quiet", "record", "--output"]).arg(profile).arg("--").arg(dotnet);
            command
        }
        None => Command::new(dotnet),
    };
    command
        .arg(paths.toolchain.join("csc/csc.dll"))
        .arg(paths.target.join("bench/Words.dll"))
        .arg(source);
    command.stdout(Stdio::null());
    let began = Instant::now();
    let status = command.status().with_context(|| format!("{command:?}: cannot be started"))?;
    let seconds = began.elapsed().as_secs_f64();
    if !status.success() {
        bail!("{command:?}: expected exit code 0, found {status}");
    }
    Ok(seconds)
}
