//! Show 7: other profilers in the same process, of another kind or our own.

use std::time::Duration;

use serde_json::Value;
use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin_beside};
use system_tests::perfusion::{Heard, Scratch, record_allocations};
use system_tests::{Profile, Runtime, Sample, Workload, on_runtimes};

const LENGTH: Duration = Duration::from_secs(4);

/// The profile's bytes and the app's own.
fn assert_counted_once(what: &str, profile: &Profile, heard: &Heard) {
    let counted = profile.sum("alloc_space", |_| true) as f64;
    // Each hears its own session only. On a runtime where that is not so, what follows tells whether repeats are dropped.
    for repeats in ["shim_allocation_repeats", "shim_gc_repeats", "shim_runtime_repeats"] {
        assert_eq!(profile.counter(repeats), Some(0), "{what}: {repeats}");
    }
    heard.assert_holds(profile, counted, format_args!("{what}: {:#?}", profile.comments));
    let stacks = profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make"));
    assert!(stacks as f64 > counted * 0.9, "{what}: stacks:\n{}", profile.describe("alloc_space", |_| true));
}

#[test]
fn another_profiler_in_the_main_slot_changes_nothing() {
    beside_a_main_profiler(Runtime::Net9, "0");
}

on_runtimes!(another_profilers_own_session_doubles_nothing: net10 Net10; long: net8 Net8, net9 Net9);

fn another_profilers_own_session_doubles_nothing(runtime: Runtime) {
    beside_a_main_profiler(runtime, "1");
}

fn beside_a_main_profiler(runtime: Runtime, session: &str) {
    let name = format!("coexistence::main_slot {runtime} session={session}");
    let Some(_turn) = begin_beside(&name, &[RECORD, &[Need::Clr(runtime), Need::C]].concat()) else { return };
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
    let heard = record_allocations(&mut app, 1, LENGTH).unwrap();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    assert_counted_once(&name, &heard.profiles[0].0, &heard);
    // The other one was there and did its work all the time.
    let counts: Value = serde_json::from_str(&std::fs::read_to_string(&counts).unwrap()).unwrap();
    assert!(counts["collections"].as_u64().unwrap() > 0, "{counts}");
    assert!(session == "0" || counts["allocation_events"].as_u64().unwrap() > 100, "{counts}");
}

#[test]
fn two_recorders_on_one_process_both_get_complete_files() {
    let Some(_turn) = begin_beside("coexistence::two_recorders", RECORD_NET9) else { return };
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    let heard = record_allocations(&mut app, 2, LENGTH).unwrap();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    for (profile, outcome) in &heard.profiles {
        assert_counted_once(&outcome.stderr, profile, &heard);
        let samples = |fits: &dyn Fn(&Sample) -> bool| profile.sum("samples", fits);
        let (all, unnamed) = (samples(&|_| true), samples(&|sample| sample.has("[managed]")));
        // Code that ran once, while the session started, may be past when its question is sent: as in the tests of names.
        assert!(unnamed <= 2 + all / 100, "{}", profile.describe("cpu", |sample| sample.has("[managed]")));
    }
}
