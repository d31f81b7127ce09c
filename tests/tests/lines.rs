//! Source lines of managed code: a thread that is in a loop on known lines has its samples there,
//! in every tier the compiler has.

use std::path::PathBuf;
use std::time::Duration;

use system_tests::environment::{Need, begin_beside, record_on, sources};
use system_tests::perfusion::{self, SLACK, Scratch};
use system_tests::source_lines::{self, check_listed, report};
use system_tests::{Profile, Recording, Runtime, Sample, Workload, on_runtimes};

/// Threads of the workload, and the function with the loop of each.
const LOOPS: [(&str, &str); 5] = [
    ("multiply", "Lines.Hot("),
    ("divide", "Lines.Hot("),
    ("inlined", "Lines.Hot("),
    ("generic", "Lines.Loop<"),
    ("later", "Lines.HotAsync("),
];

/// How the loops are compiled.
#[derive(Clone, Copy, Debug)]
enum Tier {
    /// Not optimised, for good: one call each, and no replacement on the stack.
    Zero,
    /// Not optimised at first, and replaced while it runs.
    Osr,
    /// Optimised after some calls, with what these told.
    One,
    /// Optimised from the first call on.
    Full,
}

impl Tier {
    fn workload(self, runtime: Runtime) -> Workload {
        let (calls, environment): (&str, &[(&str, &str)]) = match self {
            Self::Zero => {
                ("once", &[("DOTNET_TC_OnStackReplacement", "0"), ("DOTNET_TC_CallCounting", "0")])
            }
            Self::Osr => ("once", &[]),
            Self::One => ("often", &[]),
            Self::Full => ("often", &[("DOTNET_TieredCompilation", "0")]),
        };
        let workload = Workload::dotnet(runtime, "lines", &[]).unwrap().arg(calls);
        environment.iter().fold(workload, |workload, (name, value)| workload.env(name, value))
    }
}

fn source() -> PathBuf {
    sources().join("workloads/dotnet/lines/lines.cs")
}

fn marked(comment: &str) -> Vec<i64> {
    source_lines::marked(&source(), comment).unwrap()
}

fn record(tier: Tier, runtime: Runtime, file: &std::path::Path) -> Profile {
    let app = tier.workload(runtime).start().unwrap();
    let arguments = ["--duration", "4s", "--frequency", "499"];
    Recording::of_pid(app.pid(), file, &arguments).unwrap().finish_well(SLACK).unwrap();
    app.stop().unwrap();
    Profile::read(file).unwrap()
}

/// Of the samples of a thread in its loop: how many, how many of them on the loop's lines, and how
/// many have their caller on the line of the call.
fn judge(profile: &Profile, thread: &str, function: &str) -> [i64; 3] {
    let (inside, call) = (marked(&format!("// in {thread}")), marked(&format!("// call {thread}")));
    assert!(!inside.is_empty() && call.len() == 1, "{thread}: the workload has no such lines");
    let frame =
        |sample: &Sample| sample.stack.iter().rposition(|frame| frame.function.contains(function));
    let is_in = |sample: &Sample| sample.label("thread_name") == thread && frame(sample).is_some();
    let on_line = |sample: &Sample| {
        let source = &sample.stack[frame(sample).unwrap_or_default()].source;
        source.file.ends_with("lines.cs") && inside.contains(&source.line)
    };
    let is_called = |sample: &Sample| {
        let caller = frame(sample).and_then(|at| sample.stack.get(at.checked_sub(1)?));
        caller.is_some_and(|caller| caller.source.line == call[0])
    };
    [
        profile.sum("samples", is_in),
        profile.sum("samples", |sample| is_in(sample) && on_line(sample)),
        profile.sum("samples", |sample| is_in(sample) && is_called(sample)),
    ]
}

/// What a thread's samples are on, most first.
fn picture(profile: &Profile, thread: &str) -> String {
    let samples = profile.samples.iter().filter(|sample| sample.label("thread_name") == thread);
    source_lines::picture(profile, samples, |sample| {
        sample.stack.iter().rev().filter(|frame| frame.function.contains("Lines")).collect()
    })
}

fn samples_are_on_their_lines(runtime: Runtime) {
    let name = format!("lines::samples_are_on_their_lines {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    for tier in [Tier::Zero, Tier::Osr, Tier::One, Tier::Full] {
        let profile = record(tier, runtime, &scratch.path("lines.pb.gz"));
        for (thread, function) in LOOPS {
            let [all, right, called] = judge(&profile, thread, function);
            println!(
                "{runtime} {tier:?} {thread}: {all} samples, {right} on their lines, {called} \
                 called from theirs"
            );
            let picture = || picture(&profile, thread);
            // Five threads share the CPUs for four seconds, and others work on the machine, too.
            assert!(all >= 20, "{tier:?} {thread}: {all} samples:{}", picture());
            assert!(right * 100 >= all * 95, "{tier:?} {thread}: {right} of {all}:{}", picture());
            // The task's machinery is between an asynchronous method and its caller.
            if thread != "later" {
                assert!(
                    called * 100 >= all * 95,
                    "{tier:?} {thread}: {called} of {all} called:{}",
                    picture()
                );
            }
        }
    }
}

on_runtimes!(samples_are_on_their_lines: net8 Net8, net9 Net9, net10 Net10, net11 Net11);

#[test]
fn the_source_is_listed_with_what_its_lines_take() {
    let needs = [record_on(Runtime::Net9), vec![Need::Go]].concat();
    let Some(_turn) = begin_beside("lines::the_source_is_listed", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("lines.pb.gz");
    record(Tier::One, Runtime::Net9, &file);
    let rows = ("result = result * 31 + i", "A comment between");
    check_listed(&file, &source(), r"Lines\.Hot\(", rows).unwrap();
    let top = report(&file, &["--lines"]).unwrap();
    let line = marked("// in multiply")[1];
    assert!(top.contains(&format!("lines.cs:{line}")), "{top}");
}

#[test]
fn who_asks_for_no_lines_has_none() {
    let Some(_turn) = begin_beside("lines::who_asks_for_none", &record_on(Runtime::Net9)) else {
        return;
    };
    let app = Tier::One.workload(Runtime::Net9).start().unwrap();
    let (profile, _) =
        perfusion::record_pid(app.pid(), Duration::from_secs(2), &["--no-lines"]).unwrap();
    app.stop().unwrap();
    let frames = profile.samples.iter().flat_map(|sample| &sample.stack);
    assert!(frames.clone().any(|frame| frame.function.contains("Lines.Hot(")));
    assert_eq!(
        frames.filter(|frame| frame.source.line != 0 && frame.mapping.ends_with(".dll")).count(),
        0
    );
}
