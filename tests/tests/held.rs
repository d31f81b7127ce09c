//! A file system that does not answer (FUSE): what a process does with one holds up nobody else's
//! profile.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use system_tests::environment::{Need, RECORD, begin};
use system_tests::perfusion::{self, Recording, SLACK, Scratch};
use system_tests::profile::Frame;
use system_tests::schedstat::schedstat;
use system_tests::{App, Profile, Sample, Workload, wait_until};

const FUSE: Need = Need::File("/dev/fuse");

/// The workload with its file system mounted at `directory` while it starts.
fn held(directory: &Path, what: &str) -> App {
    std::fs::create_dir(directory).unwrap();
    Workload::native("held", &["-pthread"]).unwrap().arg(directory).arg(what).start().unwrap()
}

/// A profile of both processes, written while the first one's file system does not answer; and what
/// was said. The recording goes on until `held_up` is said and the other one's thread has had a CPU
/// for two seconds since.
fn record(held: App, other: &App, file: &Path, held_up: &str) -> (Profile, String) {
    let recording = held_up_recording(&[held.pid(), other.pid()], file, held_up);
    // From here on: a scan that is given up is begun anew, and it is that one which sees the
    // others and passes the process over.
    let cpu = || schedstat(other.pid()).get(&other.thread("spin")).map(|account| account.oncpu);
    let begin = cpu().unwrap();
    wait_until("two seconds of a CPU", SLACK, || (cpu()? - begin > 2_000_000_000).then_some(()))
        .unwrap();
    recording.signal(Signal::INT).unwrap();
    let written = wait_until("the profile", SLACK, || file.exists().then_some(()));
    let progress = recording.progress();
    // Threads of perfusion that are held up end only now, and perfusion with them.
    held.stop().unwrap();
    assert!(written.is_ok(), "it waits for the file system:\n{progress}");
    let outcome = recording.finish_well(SLACK).unwrap();
    (Profile::read(file).unwrap(), outcome.stderr)
}

/// A recording that has said so. Each sleeping thread of a recording is read once, so one that ran
/// out of them is followed by another.
fn held_up_recording(pids: &[u32], file: &Path, held_up: &str) -> Recording {
    const AT_ONCE: Duration = Duration::from_secs(15);
    for _ in 0..8 {
        let mut command = perfusion::command(["record", "--no-attach", "-o"]);
        command.arg(file);
        for pid in pids {
            command.arg("--pid").arg(pid.to_string());
        }
        let mut recording = Recording::spawn(&mut command).unwrap();
        recording.await_progress("recording ", SLACK).unwrap();
        if recording.await_progress(held_up, AT_ONCE).is_ok() {
            return recording;
        }
        recording.signal(Signal::INT).unwrap();
        recording.finish(SLACK).unwrap();
        std::fs::remove_file(file).unwrap();
    }
    panic!("nothing was held up: no recording said {held_up:?}");
}

#[test]
fn a_stack_in_a_file_that_is_never_read_holds_up_no_scan_to_others() {
    let Some(_turn) = begin("held::stack", &[RECORD, &[Need::C, FUSE]].concat()) else { return };
    if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1) {
        std::io::stderr()
            .write_all(b"\nSKIPPED held::stack: one CPU, on which nothing changes while it reads\n")
            .unwrap();
        return;
    }
    let scratch = Scratch::new().unwrap();
    let held = held(&scratch.path("mount"), "stack");
    // Started later, so it is scanned later: the kernel goes by thread ids.
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("spin").start().unwrap();
    // Which thread's scan meets the file is chance: the pages change all the time, on another CPU
    // than the one that reads them.
    let held_up = "reading the stack of a sleeping thread takes more than a second";
    let (profile, log) = record(held, &app, &scratch.path("held.pb.gz"), held_up);

    let picture = || format!("{log}\n{}", profile.describe("blocked", |_| true));
    assert!(profile.counter("scans_held").unwrap() > 0, "{}", picture());
    assert!(profile.counter("stack_passed_over").unwrap() > 0, "{}", picture());
    // Its first thread sleeps all the time, and only a scan sees its stack.
    let first = app.pid().to_string();
    let of_first = |sample: &Sample| sample.label("thread_id") == first;
    let whole = |sample: &Sample| {
        of_first(sample) && sample.has("main") && sample.label("wait_reason") == "read:pipe"
    };
    let (seen, all) = (profile.sum("blocked", whole), profile.sum("wall", of_first));
    assert!(seen * 10 >= all * 9, "{seen} of {all} ns:\n{}", picture());
    app.stop().unwrap();
}

#[test]
fn a_program_of_a_file_system_that_does_not_answer_holds_up_nobody_elses_stacks() {
    let Some(_turn) = begin("held::program", &[RECORD, &[Need::C, FUSE]].concat()) else { return };
    let scratch = Scratch::new().unwrap();
    let held = held(&scratch.path("mount"), "program");
    let held_pid = held.pid().to_string();
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("spin").start().unwrap();
    let (profile, log) =
        record(held, &app, &scratch.path("held.pb.gz"), "a file system does not answer");

    let picture = || format!("{log}\n{}", profile.describe("cpu", |_| true));
    assert!(profile.counter("calls_given_up").unwrap() > 0, "nothing was held up: {}", picture());
    // Its time is known, its code is not.
    assert!(profile.sum("cpu", |sample| sample.label("pid") == held_pid) > 0, "{}", picture());
    let spin = app.thread("spin").to_string();
    let of_spin = |sample: &Sample| sample.label("thread_id") == spin;
    let whole = |sample: &Sample| {
        let root = sample.stack.first().is_some_and(Frame::is_of_libc);
        of_spin(sample) && root && sample.positions(&["run", "spin"]).is_some()
    };
    let (seen, all) = (profile.sum("samples", whole), profile.sum("samples", of_spin));
    assert!(all > 20 && seen * 100 >= all * 95, "{seen} of {all}:\n{}", picture());
    app.stop().unwrap();
}
