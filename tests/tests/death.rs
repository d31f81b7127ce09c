//! Show 9: the app dies in mid-recording; the file is written all the same and every loss is accounted for.

use std::time::Duration;

use rustix::process::Signal;
use system_tests::environment::{RECORD_NET9, begin};
use system_tests::perfusion::{SLACK, Scratch, record_pid};
use system_tests::wait::let_pass;
use system_tests::{Profile, Recording, Runtime, Workload};

#[test]
fn a_killed_app_leaves_a_complete_file_whose_losses_add_up() {
    dies_of(Signal::KILL);
}

#[test]
fn an_aborted_app_leaves_a_complete_file_whose_losses_add_up() {
    dies_of(Signal::ABORT);
}

fn dies_of(signal: Signal) {
    let name = format!("death::dies_of {signal:?}");
    let Some(_turn) = begin(&name, RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("died.pb.gz");
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[])
        .unwrap()
        .env("DOTNET_DbgEnableMiniDump", "0")
        .start()
        .unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let_pass(Duration::from_secs(3));
    app.signal(signal).unwrap();
    app.await_exit(Duration::from_secs(10)).unwrap();
    let outcome = recording.finish_well(SLACK).unwrap();
    let profile = Profile::read(&file).unwrap();
    assert!(
        profile.sum("cpu", |sample| sample.has("Allocator.Program")) > 0,
        "{}",
        profile.describe("cpu", |_| true)
    );
    assert!(
        profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) > 0,
        "{:#?}",
        profile.comments
    );
    assert_losses_add_up(&profile, &outcome.stderr);
}

/// Each stage: in = out + Σ dropped by cause (D11).
fn assert_losses_add_up(profile: &Profile, stderr: &str) {
    let checked =
        profile.comments.iter().filter(|line| line.contains("produced") && line.contains('=')).count();
    assert!(checked > 0, "no line says produced = stored + dropped: {:#?}\n{stderr}", profile.comments);
}

#[test]
fn more_events_than_anyone_can_record_are_dropped_and_counted() {
    let Some(_turn) = begin("death::more_events_than_anyone_can_record", RECORD_NET9) else { return };
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().arg("flat-out").start().unwrap();
    let before = app.mark().unwrap();
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(4), &[]).unwrap();
    let rate = before.bytes_per_second(app.mark().unwrap());
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    assert_losses_add_up(&profile, &outcome.stderr);
    // Never more than there was, and still a sample of it.
    let share = profile.sum("alloc_space", |_| true) as f64 / (profile.duration_ns as f64 / 1e9) / rate;
    assert!(share > 0.02 && share < 1.25, "{share:.3} of {rate:.0} bytes/s:\n{}", outcome.stderr);
}
