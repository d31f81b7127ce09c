//! A process that becomes another program while it is recorded: what ran before bears the name it
//! had then, and no time is lost or counted twice, whichever thread called `execve`.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use system_tests::app::{compile_c, copy_program};
use system_tests::environment::{Need, RECORD, begin, begin_beside};
use system_tests::perfusion::{self, Recording, SLACK, Scratch, record_pid};
use system_tests::profile::Sample;
use system_tests::{Profile, Workload};

/// Records a process that becomes another one on the way. Answers the profile, the process, the
/// thread that called `execve`, and how long each program burned a CPU by its own clock.
fn recorded(caller: &str) -> (Profile, u32, u32, [i64; 2]) {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("becomes.pb.gz");
    // A process is called as its executable: the two programs are files of their own.
    let program = compile_c("becomes", "becomes", &["-pthread"]).unwrap();
    let [before, after] = ["before", "after"].map(|name| scratch.path(name));
    for copy in [&before, &after] {
        copy_program(&program, copy).unwrap();
    }
    let workload = Workload::program(before).env("AFTER", after).arg(caller);
    let mut app = workload.start().unwrap();
    let (pid, thread) = (app.pid(), app.thread("caller"));
    let mut recording = Recording::of_pid(pid, &file, &[]).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    let became = app.ask("go", "became").unwrap();
    recording.signal(Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    app.stop().unwrap();
    let burnt = ["before", "after"].map(|name| became[name].as_i64().unwrap());
    (Profile::read(&file).unwrap(), pid, thread, burnt)
}

fn assert_programs_are_told_apart(profile: &Profile, burnt: [i64; 2]) {
    for (program, burnt) in ["before", "after"].into_iter().zip(burnt) {
        let function = format!("burn_{program}");
        let cpu = |fits: &dyn Fn(&Sample) -> bool| {
            profile.sum("cpu", |sample| sample.has(&function) && fits(sample))
        };
        let own = cpu(&|sample| {
            sample.label("process") == program && sample.label("thread_name") == program
        });
        let all = cpu(&|_| true);
        let picture = || profile.describe("cpu", |_| true);
        assert_eq!(own, all, "{function} stands under another program:\n{}", picture());
        // The thread's clock is the scheduler's account; around the burning there is little else,
        // of which some may be sampled with it.
        assert!(
            (own - burnt).abs() * 20 <= burnt,
            "{function}: {own} ns, by its own clock {burnt}:\n{}",
            picture()
        );
    }
}

fn wall(profile: &Profile, tid: u32, program: &str) -> i64 {
    let tid = tid.to_string();
    let fits =
        |sample: &Sample| sample.label("thread_id") == tid && sample.label("process") == program;
    ["cpu", "runnable", "blocked"].into_iter().map(|column| profile.sum(column, fits)).sum()
}

fn assert_whole(profile: &Profile, sum: i64, what: &str) {
    let duration = profile.duration_ns;
    let picture = || profile.describe("wall", |_| true);
    assert!(
        (sum - duration).abs() * 100 <= duration,
        "{what}: {sum} of {duration} ns:\n{}",
        picture()
    );
}

#[test]
fn the_first_thread_becomes_another_program() {
    let Some(_turn) = begin_beside("exec::first_thread", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let (profile, pid, caller, burnt) = recorded("first");
    assert_eq!(caller, pid);
    assert_programs_are_told_apart(&profile, burnt);
    let parts = ["before", "after"].map(|program| wall(&profile, pid, program));
    assert_whole(&profile, parts.iter().sum(), "both programs");
    for (part, burnt) in parts.into_iter().zip(burnt) {
        assert!(part * 100 >= burnt * 99, "{parts:?} of {burnt:?}");
    }
}

#[test]
fn another_thread_than_the_first_becomes_another_program() {
    let Some(_turn) = begin_beside("exec::other_thread", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let (profile, pid, caller, burnt) = recorded("second");
    assert_ne!(caller, pid);
    assert_programs_are_told_apart(&profile, burnt);
    // The caller's own life ends with its program, and goes on under the process's id.
    let (before, after) = (wall(&profile, caller, "before"), wall(&profile, pid, "after"));
    assert_eq!(wall(&profile, caller, "after"), 0, "{}", profile.describe("wall", |_| true));
    assert_whole(&profile, before + after, "the thread that calls execve");
    assert!(
        before * 100 >= burnt[0] * 99 && after * 100 >= burnt[1] * 99,
        "{before} {after} {burnt:?}"
    );
    // The first thread ended where the other took its place; either may have waited for a CPU to do
    // so.
    let first = wall(&profile, pid, "before");
    let queued = profile.sum("runnable", |sample| sample.label("process") == "before");
    assert!(
        ((first - before).abs() - queued) * 100 <= profile.duration_ns,
        "{first} {before}, runnable {queued}"
    );
    let waited = profile.sum("blocked", |sample| {
        sample.label("thread_id") == pid.to_string()
            && sample.label("process") == "before"
            && sample.has("wait_for_the_other")
    });
    assert!(
        waited * 100 >= first * 95,
        "{waited} of {first}:\n{}",
        profile.describe("blocked", |_| true)
    );
}

#[test]
fn a_started_program_is_recorded_from_its_first_instruction_and_not_before() {
    let Some(_turn) = begin_beside("exec::started_program", RECORD) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("started.pb.gz");
    let mut command = perfusion::command(["record", "-o"]);
    command.arg(&file).args([
        "--",
        "/bin/sh",
        "-c",
        "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done",
    ]);
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let picture = || profile.describe("wall", |_| true);
    // Its executable's name, whatever the link to it is called.
    let shell = std::fs::canonicalize("/bin/sh").unwrap();
    let shell = shell.file_name().unwrap().to_str().unwrap();
    let of_shell = profile.sum("wall", |sample| sample.label("process") == shell);
    assert!(of_shell > 0 && of_shell == profile.sum("wall", |_| true), "{}", picture());
}

/// A process that is killed with its test.
struct Loop(std::process::Child);

impl Drop for Loop {
    fn drop(&mut self) {
        // Both fail only for a child that is gone already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[test]
fn programs_that_live_for_a_millisecond_have_their_stacks() {
    let Some(_turn) = begin("exec::short_lives", RECORD) else { return };
    let shell =
        Loop(Command::new("/bin/sh").args(["-c", "while :; do /bin/true; done"]).spawn().unwrap());
    let (profile, outcome) =
        record_pid(shell.0.id(), Duration::from_secs(3), &["--no-attach"]).unwrap();
    let counter = |name: &str| {
        profile.counter(name).unwrap_or_else(|| panic!("no {name}: {}", outcome.stderr))
    };
    let (walked, broken) = (counter("stacks_walked"), counter("stacks_broken"));
    // While a program replaces another one, and when it has given back its memory at its end, there
    // is no stack to be copied.
    let gone = counter("stack_unreadable");
    assert!(
        walked > 100 && (broken - gone) * 50 <= walked,
        "{walked}, {broken}, {gone}: {}",
        outcome.stderr
    );
    assert_eq!(counter("images_failed"), 0, "{}", outcome.stderr);
    let whole = |sample: &Sample| {
        let in_program =
            sample.stack[0].mapping.ends_with("/true") || sample.stack[0].mapping.contains("/ld-");
        sample.label("process") == "true" && in_program && !sample.has("[truncated")
    };
    assert!(profile.sum("wall", whole) > 0, "{}", profile.describe("wall", |_| true));
}
