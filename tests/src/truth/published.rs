//! One program, published in the ways that people publish: are its stacks exact, has its code
//! names, and is the CPU time of its methods what the program itself has measured?

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::app::{Workload, copy_program};
use crate::environment::{Need, Runtime, published};
use crate::perfusion::{SLACK, Scratch, command};
use crate::single_file::Packing;
use crate::{Profile, Recording};

/// The methods that measure themselves, and the names of their figures.
const METHODS: [(&str, &str); 3] = [
    ("Shop.ParseOrder(", "parse_ms"),
    ("Shop.PriceOrder(", "price_ms"),
    ("Shop.HashOrder<", "hash_ms"),
];

/// Samples a second in the report. A turn of a method takes 0.1 to 0.3 ms. At 1,999 Hz, whose
/// period is as long as two turns, neighbours were off by up to 20 %, one more and the other less.
const FREQUENCY_HZ: u32 = 199;
/// Seconds of a run.
const SECONDS: u32 = 40;

/// Fewer stacks say nothing.
const FEWEST_STACKS: i64 = 500;
/// Stacks beyond a thousandth that may not be exact. The program prints as the last thing it does,
/// for which some runtimes compile much, and on a busy machine it is gone before that code is read:
/// up to 25 stacks were seen.
const LAST_STACKS: i64 = 50;
/// Part of a method's CPU time that its own two readings of the clock leave out.
const OUTSIDE: f64 = 0.05;
/// Standard deviations that an estimate may be off.
const DEVIATIONS: f64 = 4.0;

/// How the program was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// An assembly that an installed runtime runs.
    Installed(Runtime),
    /// One file with the runtime, made by the tests' own bundler.
    OneFile(Runtime, Packing),
    /// One file with the runtime, by the SDK.
    Single,
    /// The same without what the program does not use.
    Trimmed,
    /// NativeAOT by the SDK, with its debug file beside it.
    Aot,
    /// The same without the debug file.
    AotAlone,
    /// NativeAOT with its symbols in the file.
    AotUnstripped,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Installed(Runtime::Net8),
        Self::Installed(Runtime::Net9),
        Self::Installed(Runtime::Net10),
        Self::Installed(Runtime::Net11),
        Self::OneFile(Runtime::Net9, Packing::Plain),
        Self::OneFile(Runtime::Net10, Packing::Plain),
        Self::OneFile(Runtime::Net10, Packing::Compressed),
        Self::Single,
        Self::Trimmed,
        Self::Aot,
        Self::AotAlone,
        Self::AotUnstripped,
    ];

    /// As the table has it.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Installed(runtime) => format!("{runtime}, installed"),
            Self::OneFile(runtime, Packing::Plain) => format!("{runtime}, one file"),
            Self::OneFile(runtime, Packing::Compressed) => {
                format!("{runtime}, one file, compressed")
            }
            Self::Single => "10.0.12, one file by the SDK".into(),
            Self::Trimmed => "10.0.12, one file by the SDK, trimmed".into(),
            Self::Aot => "NativeAOT, stripped, with its debug file".into(),
            Self::AotAlone => "NativeAOT, stripped, without its debug file".into(),
            Self::AotUnstripped => "NativeAOT with its symbols".into(),
        }
    }

    /// What it needs beside what every recording needs.
    #[must_use]
    pub fn needs(self) -> Vec<Need> {
        match self {
            Self::Installed(runtime) => {
                vec![Need::Published, Need::RuntimeAsync, Need::Clr(runtime)]
            }
            Self::OneFile(runtime, _) => {
                vec![Need::Published, Need::RuntimeAsync, Need::SingleFile(runtime)]
            }
            _ => vec![Need::Published],
        }
    }

    fn is_native(self) -> bool {
        matches!(self, Self::Aot | Self::AotAlone | Self::AotUnstripped)
    }

    fn build(self, scratch: &Scratch) -> anyhow::Result<Workload> {
        let of_sdk = |way: &str| published(way).with_context(|| format!("no program `{way}`"));
        let program: PathBuf = match self {
            Self::Installed(runtime) => return Workload::work(runtime, None),
            Self::OneFile(runtime, packing) => return Workload::work(runtime, Some(packing)),
            Self::Single => of_sdk("single")?,
            Self::Trimmed => of_sdk("trim")?,
            Self::Aot => of_sdk("aot")?,
            Self::AotAlone => {
                let alone = scratch.path("Work");
                copy_program(&of_sdk("aot")?, &alone)?;
                alone
            }
            Self::AotUnstripped => of_sdk("aotes")?,
        };
        Ok(Workload::program(program))
    }
}

/// CPU time of a method.
#[derive(Clone, Copy, Debug)]
pub struct MethodTime {
    /// Its name, or the beginning of it.
    pub method: &'static str,
    /// By the profile, ms.
    pub found: f64,
    /// By the program's own clock, ms.
    pub expected: f64,
    /// Samples of it.
    pub samples: i64,
}

impl MethodTime {
    /// How far the profile is off, as a part of what is right.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.found / self.expected - 1.0
    }

    /// One standard deviation of that.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        1.0 / (self.samples.max(1) as f64).sqrt()
    }
}

/// What one recording shows.
#[derive(Clone, Debug)]
pub struct Measured {
    /// How the program was published.
    pub way: Way,
    /// Stacks that were walked, without those of threads whose memory was being taken.
    pub stacks: i64,
    /// Those of them that are exact.
    pub exact: i64,
    /// CPU time of frames of managed code, each stack's as often as it has some, ns. Of NativeAOT
    /// that of all frames in the program's file: nothing tells its managed code apart.
    pub managed: i64,
    /// The part of it that has names.
    pub named: i64,
    /// What the program has measured.
    pub methods: Vec<MethodTime>,
    /// The largest stacks with something wrong.
    pub picture: String,
}

impl Measured {
    /// What of it is not as promised.
    #[must_use]
    pub fn broken_promises(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let bad = self.stacks - self.exact;
        if self.stacks < FEWEST_STACKS || bad > self.stacks / 1000 + LAST_STACKS {
            broken.push(format!("{bad} of {} stacks are not exact", self.stacks));
        }
        // Without symbols the native part of a NativeAOT program has no names.
        let least = if self.way == Way::AotAlone { 0.9 } else { 0.99 };
        if percent(self.named, self.managed) < 100.0 * least {
            broken.push(format!("names: {:.2} %", percent(self.named, self.managed)));
        }
        for time in &self.methods {
            if time.error().abs() > OUTSIDE + DEVIATIONS * time.deviation() {
                broken.push(format!(
                    "{}…: {:.0} ms of {:.0}",
                    time.method, time.found, time.expected
                ));
            }
        }
        broken
    }
}

/// Records the program from its start to its end, while it works for so many seconds on one thread.
///
/// # Errors
/// When it cannot be built or recorded, or says nothing.
pub fn measure(way: Way, seconds: u32, frequency_hz: u32) -> anyhow::Result<Measured> {
    let scratch = Scratch::new()?;
    let workload = way.build(&scratch)?;
    let file = scratch.path("published.pb.gz");
    let mut record = command(["record", "-F", &frequency_hz.to_string(), "-o"]);
    record.arg(&file).arg("--").args(workload.command_line());
    record.args([seconds.to_string(), "1".into()]).env_remove("DEBUGINFOD_URLS");
    let outcome = Recording::spawn(&mut record)?.finish_well(SLACK)?;
    let last = outcome.stdout.lines().last().context("the program has said nothing")?;
    let truth: Value = serde_json::from_str(last).with_context(|| last.to_owned())?;
    let profile = Profile::read(&file)?;
    let counter = |name| profile.counter(name).unwrap_or(0);
    let (managed, named) = names(&profile, way);
    ensure!(managed > 0, "no managed code: {}", profile.describe("cpu", |_| true));
    let methods = METHODS.iter().map(|&(method, figure)| {
        let expected = truth.get(figure).and_then(Value::as_f64);
        Ok(MethodTime {
            method,
            found: profile.sum("cpu", |sample| sample.has(method)) as f64 / 1e6,
            expected: expected.with_context(|| format!("no {figure} in {truth}"))?,
            samples: profile.sum("samples", |sample| sample.has(method)),
        })
    });
    Ok(Measured {
        way,
        stacks: counter("stacks_walked") - counter("stacks_exiting"),
        exact: counter("stacks_exact"),
        managed,
        named,
        methods: methods.collect::<anyhow::Result<_>>()?,
        picture: profile.describe("cpu", |sample| {
            sample.has("[truncated") || sample.has("[guessed") || sample.has("[managed]")
        }),
    })
}

/// CPU time of frames that should have names, and of those that have.
fn names(profile: &Profile, way: Way) -> (i64, i64) {
    let (mut all, mut named) = (0, 0);
    for sample in &profile.samples {
        let cpu = profile.value(sample, "cpu");
        for frame in &sample.stack {
            let file = Path::new(&frame.mapping).file_name().and_then(|name| name.to_str());
            let file = file.unwrap_or(&frame.mapping);
            let has_no_name = frame.function.is_empty() || frame.function.starts_with('[');
            let counts = if way.is_native() {
                file == "Work"
            } else {
                file.ends_with(".dll") || frame.function.starts_with("[managed]")
            };
            if counts {
                all += cpu;
                named += if has_no_name { 0 } else { cpu };
            }
        }
    }
    (all, named)
}

fn percent(part: i64, all: i64) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}

/// The section of the report.
#[must_use]
pub fn markdown(all: &[Measured]) -> String {
    let mut text = format!(
        "\n## One program, published in several ways\n\
        It is recorded from its first instruction to its last, {SECONDS} s, at {FREQUENCY_HZ} Hz. \
        Three of its methods measure their own CPU time. **Named** is the part of managed frames \
        with names, weighed by CPU time; of NativeAOT it is that of all frames in the program's \
        file, native ones too. The errors are \
        those of the profile against the program's own clock, with one standard deviation of \
        sampling. A turn of a method takes 0.1 to 0.3 ms. At 1,999 Hz, whose period is as long as \
        two turns, errors of up to 20 % were seen, one method's more and its neighbour's less.\n\n\
        | published as | stacks | exact % | named % | parse | price | hash |\n\
        |---|---|---|---|---|---|---|\n"
    );
    for measured in all {
        text += &format!(
            "| {} | {} | {:.3} | {:.2} |",
            measured.way.name(),
            measured.stacks,
            percent(measured.exact, measured.stacks),
            percent(measured.named, measured.managed)
        );
        for time in &measured.methods {
            text += &format!(" {:+.1} % ± {:.1} |", 100.0 * time.error(), 100.0 * time.deviation());
        }
        text.push('\n');
    }
    text
}

/// The same for programs.
#[must_use]
pub fn json(all: &[Measured]) -> Value {
    let of = |measured: &Measured| {
        json!({
            "way": measured.way.name(),
            "stacks": measured.stacks,
            "exact": measured.exact,
            "named_percent": percent(measured.named, measured.managed),
            "errors": measured.methods.iter().map(MethodTime::error).collect::<Vec<_>>(),
        })
    };
    all.iter().map(of).collect()
}

/// Measures all ways that can be measured here, and says what cannot.
///
/// # Errors
/// When one cannot be measured although all is there.
pub fn measure_all() -> anyhow::Result<Vec<Measured>> {
    let mut all = Vec::new();
    for way in Way::ALL {
        if let Some(reason) = way.needs().into_iter().find_map(Need::missing) {
            println!("SKIPPED {}: {reason}", way.name());
            continue;
        }
        let measured = measure(way, SECONDS, FREQUENCY_HZ)?;
        let broken = measured.broken_promises();
        let verdict = if broken.is_empty() { "as promised".into() } else { broken.join("; ") };
        println!("{}: {verdict}", way.name());
        all.push(measured);
    }
    Ok(all)
}
