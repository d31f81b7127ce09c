//! Show 9: the app dies in mid-recording; the file is written all the same and every loss is
//! accounted for.

use std::time::Duration;

use profiler_protocol::counter::Counter;
use rustix::process::Signal;
use system_tests::environment::{RECORD_NET9, begin};
use system_tests::perfusion::{SLACK, Scratch};
use system_tests::region::{counted, regions};
use system_tests::wait::let_pass;
use system_tests::{App, Profile, Recording, Runtime, Workload, wait_until};

#[test]
fn a_killed_app_leaves_a_complete_file_whose_losses_add_up() {
    dies_of("SIGKILL", |app| app.signal(Signal::KILL).unwrap());
}

#[test]
fn an_aborted_app_leaves_a_complete_file_whose_losses_add_up() {
    dies_of("abort", |app| app.abort().unwrap());
}

fn dies_of(how: &str, end: impl FnOnce(&mut App)) {
    let name = format!("death::dies_of {how}");
    let Some(_turn) = begin(&name, RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("died.pb.gz");
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[])
        .unwrap()
        .env("DOTNET_DbgEnableMiniDump", "0")
        .start()
        .unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let heard = wait_until("allocations and names", SLACK, || {
        let count = |counter| counted(&regions(&app), counter);
        (count(Counter::AllocationSamples) > 1000 && count(Counter::NamesFound) > 10).then_some(())
    });
    assert!(heard.is_ok(), "{}", recording.progress());
    // In the middle of it.
    let_pass(Duration::from_secs(1));
    end(&mut app);
    app.await_exit(SLACK).unwrap();
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
    // Four threads allocate.
    assert_losses_add_up(&profile, &outcome.stderr, 4);
}

/// `in_flight`: how many threads can have been killed between counting a sample and claiming its
/// place in the ring: that one is counted and nowhere, and the line calls it unaccounted.
///
/// Each stage: in = out + Σ dropped by cause (D11), as the loss line says it:
/// `cpu samples 10 = 7 stored + 3 ring full; …`. The line is the same in the file and on stderr.
pub(crate) fn assert_losses_add_up(profile: &Profile, stderr: &str, in_flight: i64) {
    let line = profile
        .comments
        .iter()
        .find(|comment| comment.starts_with("loss: "))
        .expect("no loss line");
    assert!(stderr.contains(line.as_str()), "not on stderr: {line}\n{stderr}");
    let first_number =
        |text: &str| text.split_whitespace().find_map(|word| word.parse::<i64>().ok());
    let mut kinds = 0;
    for part in line.trim_start_matches("loss: ").split("; ") {
        let Some((produced, rest)) = part.split_once(" = ") else { continue };
        let terms: Vec<i64> = rest.split(" + ").map(|term| first_number(term).unwrap()).collect();
        let missing = first_number(produced).unwrap() - terms.iter().sum::<i64>();
        assert!((0..=in_flight).contains(&missing), "{line}\n{:#?}", profile.comments);
        assert!(missing > 0 || !part.contains("unaccounted"), "{line}\n{:#?}", profile.comments);
        kinds += 1;
    }
    assert!(kinds >= 3, "cpu samples, waits and allocations each have a balance: {line}");
    // What the line is made of: each source's own counts agree with it.
    let counter = |name| {
        profile
            .counter(name)
            .unwrap_or_else(|| panic!("no counter {name}: {:#?}", profile.comments))
    };
    assert!(
        line.contains(&format!("allocations {} =", counter("shim_allocation_samples"))),
        "{line}"
    );
    let walked = counter("stacks_walked");
    let ends = ["stacks_exact", "stacks_broken", "stacks_guessed", "stacks_exiting"];
    let judged: i64 = ends.into_iter().map(counter).sum();
    assert_eq!(
        walked, judged,
        "every stack is exact, broken, guessed or of a thread being ended: {line}"
    );
}

#[test]
fn of_more_allocations_than_anyone_can_record_some_stand_for_all() {
    let Some(_turn) = begin("death::more_allocations_than_anyone_can_record", RECORD_NET9) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("flat-out.pb.gz");
    let mut app =
        Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().arg("flat-out").start().unwrap();
    let before = app.mark().unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let heard = wait_until("allocations", SLACK, || {
        (counted(&regions(&app), Counter::AllocationSamples) > 1000).then_some(())
    });
    assert!(heard.is_ok(), "{}", recording.progress());
    let_pass(Duration::from_secs(1));
    // 4 GB/s are 40,000 samples a second. While the recorder stands still, for less than the shim's
    // timeout, also those that stand for all may find the ring full.
    recording.signal(Signal::STOP).unwrap();
    let_pass(Duration::from_secs(1));
    recording.signal(Signal::CONT).unwrap();
    let_pass(Duration::from_secs(1));
    recording.signal(Signal::INT).unwrap();
    let outcome = recording.finish_well(SLACK).unwrap();
    let rate = before.bytes_per_second(app.mark().unwrap());
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    let profile = Profile::read(&file).unwrap();
    assert_losses_add_up(&profile, &outcome.stderr, 0);
    let counter = |name: &str| profile.counter(name).unwrap() as f64;
    let told = counter("shim_allocation_samples") - counter("shim_allocations_downsampled");
    assert!(counter("shim_allocations_downsampled") > 3.0 * told, "{:#?}", profile.comments);
    // What found no room is counted and stood for by nobody; all others are.
    let seconds = profile.duration_ns as f64 / 1e9;
    let share = profile.sum("alloc_space", |_| true) as f64 / seconds / rate;
    assert!(share > 0.3 && share < 1.25, "{share:.3} of {rate:.0} bytes/s:\n{}", outcome.stderr);
}
