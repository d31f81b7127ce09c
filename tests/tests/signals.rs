//! Signals end a recording in order: with a whole file where it has begun, and with nothing started
//! where it has not.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::perfusion::{SLACK, Scratch, command};
use system_tests::wait::wait_until;
use system_tests::{Profile, Recording, Workload};

/// `perfusion ARGUMENTS` behind another program with its own arguments.
fn behind(program: &str, own: &[&str], arguments: &[&str]) -> Command {
    let plain = command(arguments);
    let mut command = Command::new(program);
    command.args(own).arg(plain.get_program()).args(plain.get_args());
    command
}

/// As from a terminal: tests may run where SIGHUP is ignored.
fn at_terminal(arguments: &[&str]) -> Command {
    behind("env", &["--default-signal=HUP"], arguments)
}

/// True when a process has a handler for this signal.
fn handles(pid: u32, signal: Signal) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    caught.is_some_and(|set| set & 1 << (signal.as_raw() - 1) != 0)
}

#[test]
fn the_end_of_the_terminal_ends_a_recording_with_its_file() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin_beside("signals::hangup", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let file = scratch.path("hangup.pb.gz");
    let mut record = at_terminal(&["record", "--pid", &app.pid().to_string(), "-o"]);
    let mut recording = Recording::spawn(record.arg(&file)).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    recording.signal(Signal::HUP).unwrap();
    recording.finish_well(SLACK).unwrap();
    Profile::read(&file).unwrap();
}

#[test]
fn a_recording_under_nohup_goes_on_when_the_terminal_ends() {
    const LENGTH: Duration = Duration::from_secs(2);
    let needs = [RECORD, &[Need::C, Need::Program("nohup")]].concat();
    let Some(_turn) = begin_beside("signals::nohup", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let (pid, file) = (app.pid().to_string(), scratch.path("nohup.pb.gz"));
    let mut record = behind("nohup", &[], &["record", "-d", "2s", "--pid", &pid, "-o"]);
    let mut recording = Recording::spawn(record.arg(&file)).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    recording.signal(Signal::HUP).unwrap();
    recording.finish_well(LENGTH + SLACK).unwrap();
    let recorded = Profile::read(&file).unwrap().duration_ns;
    assert!(u128::try_from(recorded).unwrap() >= LENGTH.as_nanos(), "{recorded} ns");
}

#[test]
fn a_signal_before_the_program_begins_starts_nothing() {
    let Some(_turn) = begin_beside("signals::before_the_program", RECORD) else { return };
    let scratch = Scratch::new().unwrap();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let (mark, file) = (scratch.path("mark"), scratch.path("none.pb.gz"));
        let mut record = at_terminal(&["record", "-o"]);
        record.arg(&file).args(["--", "touch"]).arg(&mark);
        let recording = Recording::spawn(&mut record).unwrap();
        let pid = recording.pid();
        wait_until("a handler", SLACK, || handles(pid, signal).then_some(())).unwrap();
        recording.signal(signal).unwrap();
        let outcome = recording.finish(SLACK).unwrap();
        assert_eq!(outcome.code(), 130, "{signal:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains("was not started"), "{}", outcome.stderr);
        assert!(!mark.exists() && !file.exists(), "{signal:?}");
    }
}
