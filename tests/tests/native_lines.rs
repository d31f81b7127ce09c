//! Source lines of native code, and inlined functions: a program that is in loops on known lines
//! has its samples there, whether its debug information is in it or in a separate file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::app::sources_of_native;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::gotool::pprof_says;
use system_tests::perfusion::{self, SLACK, Scratch};
use system_tests::profile::Frame;
use system_tests::{Profile, Recording, Workload};

/// The program's functions with a loop. The first one is part of its caller, `work`.
const LOOPS: [&str; 2] = ["multiply", "divide"];

fn source() -> PathBuf {
    sources_of_native().join("lines.c")
}

/// The lines that end in this comment, from 1 on.
fn marked(comment: &str) -> Vec<i64> {
    let text = fs::read_to_string(source()).unwrap();
    let lines = (1..).zip(text.lines());
    lines.filter(|(_, line)| line.ends_with(comment)).map(|(number, _)| number).collect()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The program, with debug information in itself.
fn whole(scratch: &Scratch) -> String {
    let program = scratch.path("lines").to_str().unwrap().to_owned();
    let source = source().to_str().unwrap().to_owned();
    run("gcc", &["-O2", "-g", "-Wl,--build-id", "-o", &program, &source]);
    program
}

/// The same with all that is not needed to run in a separate file, but for what `strip` is told to
/// leave.
fn split(scratch: &Scratch, strip: &[&str]) -> String {
    let program = whole(scratch);
    let debug = format!("{program}.debug");
    run("objcopy", &["--only-keep-debug", &program, &debug]);
    run("strip", &[strip, &[program.as_str()]].concat());
    run("objcopy", &[&format!("--add-gnu-debuglink={debug}"), &program]);
    program
}

fn record(program: &str, file: &Path, arguments: &[&str]) -> Profile {
    let app = Workload::program(program).start().unwrap();
    let arguments = [&["--duration", "4s", "--frequency", "499"], arguments].concat();
    Recording::of_pid(app.pid(), file, &arguments).unwrap().finish_well(SLACK).unwrap();
    drop(app);
    Profile::read(file).unwrap()
}

/// What the samples are on, most first.
fn picture(profile: &Profile) -> String {
    let place = |frame: &Frame| format!("{}:{}", frame.function, frame.source.line);
    let mut sums = std::collections::BTreeMap::<String, i64>::new();
    for sample in &profile.samples {
        let frames: Vec<String> = sample.stack.iter().rev().take(4).map(place).collect();
        *sums.entry(frames.join(" < ")).or_default() += profile.value(sample, "samples");
    }
    let mut sums: Vec<_> = sums.into_iter().filter(|(_, value)| *value > 0).collect();
    sums.sort_by_key(|(_, value)| -value);
    sums.iter().take(8).map(|(text, value)| format!("\n  {value} {text}")).collect()
}

/// Of the samples of both loops, 95 % are on a line of theirs, called from the line of the call.
fn assert_lines(profile: &Profile) {
    for function in LOOPS {
        let inside = marked(&format!("// in {function}"));
        let call = marked(&format!("// call {function}"));
        assert!(inside.len() == 2 && call.len() == 1, "{function}: the program has no such lines");
        let [mut all, mut right] = [0; 2];
        for sample in &profile.samples {
            let at = sample.stack.iter().rposition(|frame| frame.function == function);
            let Some(at) = at else { continue };
            let (frame, caller) = (&sample.stack[at], &sample.stack[at - 1]);
            let value = profile.value(sample, "samples");
            all += value;
            assert_eq!(caller.function, "work", "{}", picture(profile));
            // One place in the code is in both functions, where one is part of the other.
            assert_eq!(frame.location == caller.location, function == "multiply");
            let is_right = frame.source.file.ends_with("lines.c")
                && inside.contains(&frame.source.line)
                && caller.source.line == call[0]
                && frame.source.start_line
                    == inside[0] - if function == "multiply" { 3 } else { 2 };
            right += if is_right { value } else { 0 };
        }
        println!("{function}: {all} samples, {right} on their lines");
        // Others work on this machine, too.
        assert!(all >= 25, "{function}: {all} samples:{}", picture(profile));
        assert!(right * 100 >= all * 95, "{function}: {right} of {all}:{}", picture(profile));
    }
}

#[test]
fn samples_are_on_their_lines_and_inlined_functions_are_frames() {
    let needs = [RECORD, &[Need::C, Need::Go]].concat();
    let Some(_turn) = begin_beside("native_lines::on_their_lines", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("lines.pb.gz");
    let profile = record(&whole(&scratch), &file, &[]);
    assert_lines(&profile);
    assert!(profile.counter("native_lines") > Some(0));
    assert_eq!(profile.counter("native_lines_refused"), Some(0));

    let report = |arguments: &[&str]| {
        let mut command = perfusion::command(["report"]);
        command.arg(&file).args(arguments).arg("-t").arg("cpu");
        let outcome = perfusion::run(&mut command, SLACK).unwrap();
        assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
        outcome.stdout
    };
    let folder = source().parent().unwrap().to_str().unwrap().to_owned();
    let theirs =
        pprof_says(&file, &["-list", "^multiply$", "-sample_index=cpu", "-source_path", &folder]);
    for (what, listed) in [
        ("report --list", report(&["--list", "^multiply$", "--source", &folder])),
        ("go tool pprof -list", theirs.unwrap().unwrap()),
    ] {
        let row = |code: &str| listed.lines().find(|row| row.contains(code)).unwrap_or_default();
        let hot = row("value = value * 31");
        let words: Vec<&str> = hot.split_whitespace().collect();
        assert!(words.len() > 2 && words[0] != "." && words[1] != ".", "{what}: {hot:?}\n{listed}");
        let comment = row("A comment before");
        assert!(comment.trim_start().starts_with(". "), "{what}: {comment:?}\n{listed}");
    }
    let top = report(&["--lines"]);
    let line = marked("// in multiply")[1];
    assert!(top.contains(&format!("multiply lines.c:{line}")), "{top}");
    let folded = report(&["--format", "folded"]);
    assert!(folded.lines().any(|stack| stack.contains(";work;multiply ")), "{folded}");
    let theirs = pprof_says(&file, &["-top", "-sample_index=cpu"]).unwrap().unwrap();
    assert!(theirs.contains("multiply (inline)"), "{theirs}");
}

#[test]
fn lines_come_from_a_separate_debug_file() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin_beside("native_lines::separate", &needs) else { return };
    // Without any symbols, and with those that programs of distributions keep.
    for strip in [&["--strip-all"], &["--strip-debug"]] {
        let scratch = Scratch::new().unwrap();
        let profile = record(&split(&scratch, strip), &scratch.path("lines.pb.gz"), &[]);
        assert_lines(&profile);
    }
}

#[test]
fn a_stripped_program_has_no_lines_and_nobody_has_who_asks_for_none() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin_beside("native_lines::none", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let (program, file) = (whole(&scratch), scratch.path("lines.pb.gz"));
    let own = |profile: &Profile| -> Vec<Frame> {
        let frames = profile.samples.iter().flat_map(|sample| sample.stack.clone());
        frames.filter(|frame| frame.mapping.ends_with("/lines")).collect()
    };
    let frames = own(&record(&program, &file, &["--no-lines"]));
    assert!(frames.iter().any(|frame| frame.function == "work"));
    assert!(frames.iter().all(|frame| frame.source.line == 0 && frame.function != "multiply"));
    run("strip", &[&program]);
    let frames = own(&record(&program, &file, &[]));
    assert!(frames.iter().any(|frame| frame.function.starts_with("[lines]+0x")));
    assert!(frames.iter().all(|frame| frame.source.line == 0 && frame.function != "multiply"));
}
