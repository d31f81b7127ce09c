//! Show 7: other profilers in the same process, of another kind or our own.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use serde_json::Value;
use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, RECORD_NET9, begin_beside, record_on};
use system_tests::perfusion::{Heard, SLACK, Scratch, command, record_allocations, run};
use system_tests::wait::let_pass;
use system_tests::{Profile, Runtime, Sample, Workload, on_runtimes};

const LENGTH: Duration = Duration::from_secs(4);

/// The profile's bytes and the app's own.
fn assert_counted_once(what: &str, profile: &Profile, heard: &Heard) {
    let counted = profile.sum("alloc_space", |_| true) as f64;
    // Each hears its own session only. On a runtime where that is not so, what follows tells
    // whether repeats are dropped.
    for repeats in ["shim_allocation_repeats", "shim_gc_repeats", "shim_runtime_repeats"] {
        assert_eq!(profile.counter(repeats), Some(0), "{what}: {repeats}");
    }
    heard.assert_holds(profile, counted, format_args!("{what}: {:#?}", profile.comments));
    let stacks = profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make"));
    assert!(
        stacks as f64 > counted * 0.9,
        "{what}: stacks:\n{}",
        profile.describe("alloc_space", |_| true)
    );
}

#[test]
fn another_profiler_in_the_main_slot_changes_nothing() {
    beside_a_main_profiler(Runtime::Net9, "0");
}

on_runtimes!(
    another_profilers_own_session_doubles_nothing: net10 Net10; long: net8 Net8, net9 Net9
);

fn another_profilers_own_session_doubles_nothing(runtime: Runtime) {
    beside_a_main_profiler(runtime, "1");
}

fn beside_a_main_profiler(runtime: Runtime, session: &str) {
    let name = format!("coexistence::main_slot {runtime} session={session}");
    let Some(_turn) = begin_beside(&name, &[RECORD, &[Need::Clr(runtime), Need::C]].concat())
    else {
        return;
    };
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
        // Code that ran once, while the session started, may be past when its question is sent: as
        // in the tests of names.
        assert!(
            unnamed <= 2 + all / 100,
            "{}",
            profile.describe("cpu", |sample| sample.has("[managed]"))
        );
    }
}

/// A tool that a program waits for as it starts, and that takes longer than any program does to
/// start by itself. The library comes with the program's environment, once the tool has let go: a
/// second one, loaded because the first did not come, would tell of all of it once more.
#[test]
fn a_program_that_waits_for_a_tool_as_it_starts_is_told_of_once() {
    let Some(_turn) = begin_beside("coexistence::waits_for_a_tool", &record_on(Runtime::Net10))
    else {
        return;
    };
    const OBJECTS: i64 = 1_000_000;
    let scratch = Scratch::new().unwrap();
    let (socket, file) = (scratch.path("tool"), scratch.path("app.pb.gz"));
    let listener = UnixListener::bind(&socket).unwrap();
    let tool = std::thread::spawn(move || {
        let (mut program, _) = listener.accept().unwrap();
        let mut hello = [0; 34];
        program.read_exact(&mut hello).unwrap();
        let_pass(Duration::from_secs(7));
        // ResumeRuntime of the runtime's diagnostics protocol.
        program.write_all(b"DOTNET_IPC_V1\0\x14\0\x04\x01\0\0").unwrap();
        let mut answer = [0; 20];
        program.read_exact(&mut answer).unwrap();
        program
    });
    let app = Workload::dotnet(Runtime::Net10, "children", &[]).unwrap();
    let app = ["0", &OBJECTS.to_string(), "1"].into_iter().fold(app, Workload::arg);
    let mut recording = command(["record", "-o"]);
    recording.arg(&file).arg("--").args(app.command_line());
    recording.env("DOTNET_DiagnosticPorts", format!("{},connect,suspend", socket.display()));
    let outcome = run(&mut recording, SLACK).unwrap();
    tool.join().unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let profile = Profile::read(&file).unwrap();
    let made = profile.sum("alloc_objects", |sample| sample.label("type") == "Family.Small");
    // Of 24 MB one sample each 100 KiB: some 230, give or take 15.
    assert!(
        (OBJECTS * 7 / 10..OBJECTS * 13 / 10).contains(&made),
        "{made} of {OBJECTS}: {}",
        outcome.stderr
    );
    assert_eq!(profile.counter("shim_sessions_started"), Some(1), "{:#?}", profile.comments);
}
