//! Show 7: other profilers in the same process, of another kind or our own.

use std::time::Duration;

use serde_json::Value;
use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin};
use system_tests::perfusion::{SLACK, Scratch, record_pid};
use system_tests::{App, Profile, Recording, Runtime, Sample, Workload, on_runtimes};

const LENGTH: Duration = Duration::from_secs(4);

/// The profile's bytes a second over the app's own, measured around the recording.
fn assert_counted_once(what: &str, profile: &Profile, truth_per_second: f64) {
    let per_second = profile.sum("alloc_space", |_| true) as f64 / (profile.duration_ns as f64 / 1e9);
    let ratio = per_second / truth_per_second;
    // About 8000 samples: 1 % by chance. The app's rate moves by more when recorders start and stop beside it. A doubled event
    // stream gives 2.
    assert!(
        (0.8..1.25).contains(&ratio),
        "{what}: {ratio:.2} of the app's own {truth_per_second:.0} bytes/s\n{:#?}",
        profile.comments
    );
    let stacks = profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make"));
    assert!(
        stacks as f64 > per_second * 0.9 * (profile.duration_ns as f64 / 1e9),
        "{what}: stacks:\n{}",
        profile.describe("alloc_space", |_| true)
    );
}

fn measured(app: &mut App, mut record: impl FnMut(&App)) -> f64 {
    let before = app.mark().unwrap();
    record(app);
    before.bytes_per_second(app.mark().unwrap())
}

#[test]
fn another_profiler_in_the_main_slot_changes_nothing() {
    beside_a_main_profiler(Runtime::Net9, "0");
}

on_runtimes!(another_profilers_own_session_doubles_nothing: net8 Net8, net10 Net10; long: net9 Net9);

fn another_profilers_own_session_doubles_nothing(runtime: Runtime) {
    beside_a_main_profiler(runtime, "1");
}

fn beside_a_main_profiler(runtime: Runtime, session: &str) {
    let name = format!("coexistence::main_slot {runtime} session={session}");
    let Some(_turn) = begin(&name, &[RECORD, &[Need::Clr(runtime), Need::C]].concat()) else { return };
    let scratch = Scratch::new().unwrap();
    let counts = scratch.path("counts.json");
    let library = compile_c("main_profiler", "main_profiler.so", &["-shared", "-fPIC"]).unwrap();
    let mut app = Workload::dotnet(runtime, "allocator", &[])
        .unwrap()
        .env("CORECLR_ENABLE_PROFILING", "1")
        .env("CORECLR_PROFILER", "{5f7ac2d0-9d9e-4a1c-8e59-7d3f5d8a1111}")
        .env("CORECLR_PROFILER_PATH", library)
        .env("MAIN_PROFILER_SESSION", session)
        .env("MAIN_PROFILER_OUT", &counts)
        .start()
        .unwrap();
    let mut profile = None;
    let rate = measured(&mut app, |app| profile = Some(record_pid(app.pid(), LENGTH, &[]).unwrap().0));
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    assert_counted_once(&name, &profile.unwrap(), rate);
    // The other one was there and did its work all the time.
    let counts: Value = serde_json::from_str(&std::fs::read_to_string(&counts).unwrap()).unwrap();
    assert!(counts["collections"].as_u64().unwrap() > 0, "{counts}");
    assert!(session == "0" || counts["allocation_events"].as_u64().unwrap() > 100, "{counts}");
}

#[test]
fn two_recorders_on_one_process_both_get_complete_files() {
    let Some(_turn) = begin("coexistence::two_recorders", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let files = [scratch.path("one.pb.gz"), scratch.path("two.pb.gz")];
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    let rate = measured(&mut app, |app| {
        let start = |file| Recording::of_pid(app.pid(), file, &["--duration", "4s"]).unwrap();
        let both = [start(&files[0]), start(&files[1])];
        for recording in both {
            recording.finish_well(LENGTH + SLACK).unwrap();
        }
    });
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    for file in &files {
        let profile = Profile::read(file).unwrap();
        assert_counted_once(&file.display().to_string(), &profile, rate);
        let samples = |fits: &dyn Fn(&Sample) -> bool| profile.sum("samples", fits);
        let (all, unnamed) = (samples(&|_| true), samples(&|sample| sample.has("[managed]")));
        // Code that ran once, while the session started, may be past when its question is sent: as in the tests of names.
        assert!(unnamed <= 2 + all / 100, "{}", profile.describe("cpu", |sample| sample.has("[managed]")));
    }
}
