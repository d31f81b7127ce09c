//! Source lines of native code, and inlined functions: a program that is in loops on known lines
//! has its samples there, whether its debug information is in it or in a separate file.

use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::app::sources_of_native;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::gotool::pprof_says;
use system_tests::perfusion::{SLACK, Scratch};
use system_tests::profile::Frame;
use system_tests::source_lines::{self, check_listed, report};
use system_tests::{Profile, Recording, Workload};

/// The program's functions with a loop. The first one is part of its caller, `work`.
const LOOPS: [&str; 2] = ["multiply", "divide"];

fn source() -> PathBuf {
    sources_of_native().join("lines.c")
}

fn marked(comment: &str) -> Vec<i64> {
    source_lines::marked(&source(), comment).unwrap()
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
    source_lines::picture(profile, &profile.samples, |sample| {
        sample.stack.iter().rev().take(4).collect()
    })
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

    let rows = ("value = value * 31", "A comment before");
    check_listed(&file, &source(), "^multiply$", rows).unwrap();
    let top = report(&file, &["--lines"]).unwrap();
    let line = marked("// in multiply")[1];
    assert!(top.contains(&format!("multiply lines.c:{line}")), "{top}");
    let folded = report(&file, &["--format", "folded"]).unwrap();
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
