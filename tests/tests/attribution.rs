//! Issue 5: allocations are attributed wherever they happen: in static constructors, in methods
//! made at run time, in finalizers, on threads without a frame of the program's, by the runtime
//! itself, and while it compiles.

use rustix::process::Signal;
use system_tests::environment::{begin_beside, record_on};
use system_tests::perfusion::{SLACK, Scratch};
use system_tests::region::{regions, unread};
use system_tests::{Profile, Recording, Runtime, Sample, Workload, on_runtimes, wait_until};

/// Types of `attribution.cs`, and frames that the stacks of all their allocations have, from the
/// root on.
const PLACES: [(&str, &[&str]); 7] = [
    ("Attribution.ByStatic[]", &["Attribution.Program", "Attribution.InStatic..cctor()"]),
    ("Attribution.ByDynamic[]", &["Attribution.Program.InDynamic", "MadeAtRunTime"]),
    ("Attribution.ByExpression[]", &["Attribution.Program.InExpression", "lambda_method"]),
    ("Attribution.ByFinalizer[]", &["Attribution.Buried.Finalize()"]),
    (
        "Attribution.ByFramework[]",
        &["System.Threading.Thread", "System.Threading.Tasks.Task", "ToArray()"],
    ),
    (
        "Attribution.ByRuntime[]",
        &["Attribution.Program.InRuntime()", "System.Array.CreateInstance"],
    ),
    (
        "string",
        &[
            "Attribution.Program.WhileCompiling()",
            "System.Runtime.CompilerServices.RuntimeHelpers.PrepareMethod",
        ],
    ),
];

on_runtimes!(
    allocations_have_their_stack_wherever_they_happen:
    net8 Net8, net10 Net10, net11 Net11; long: net9 Net9
);

fn allocations_have_their_stack_wherever_they_happen(runtime: Runtime) {
    let name = format!("attribution::allocations on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    // The ring holds some hundred records: on a machine so busy that nobody reads it in time some
    // are lost, which tells nothing about stacks.
    let recorded = (0..4)
        .map(|_| record(runtime))
        .find(|(profile, _)| profile.counter("shim_records_dropped_full").unwrap_or(0) == 0);
    let (profile, truth) = recorded.expect("a recording without loss");
    for (of, place) in PLACES {
        let made = |sample: &Sample| sample.label("type") == of && sample.label("heap") == "soh";
        // The compiler's own frames are large: on .NET 10 the copy of the stack ends among them,
        // and its caller is not on it.
        let in_compiler = |sample: &Sample| {
            sample.stack.iter().any(|frame| frame.mapping.ends_with("/libclrjit.so"))
        };
        let there = profile.sum("alloc_space", |sample| {
            made(sample)
                && (sample.positions(place).is_some() || of == "string" && in_compiler(sample))
        });
        let picture = || profile.describe("alloc_space", made);
        // On .NET 10 an object of 60,024 bytes is seen with a probability of 0.44: of 100 the
        // estimate has a standard deviation of 11 %, and five of those are 56 %. The stride sees
        // every second one, and what is left of it at both ends: one or two in 100.
        let (bytes, tolerance) =
            (truth[of].as_f64().unwrap(), if runtime >= Runtime::Net10 { 0.56 } else { 0.05 });
        let share = there as f64 / bytes;
        println!("{name}: {of}: {share:.3} of its bytes where they were allocated");
        assert!((share - 1.0).abs() <= tolerance, "{of}: {there} of {bytes}: {}", picture());
        // Strings are made everywhere.
        let elsewhere = profile.sum("alloc_space", made) - there;
        assert!(of == "string" || elsewhere == 0, "{of}: {elsewhere} elsewhere: {}", picture());
    }
    let role = |of: &str| {
        let made = profile.samples.iter().filter(|sample| sample.label("type") == of);
        made.map(|sample| sample.label("thread_role")).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(role("Attribution.ByFinalizer[]"), ["finalizer"].into());
    let of_program = |sample: &Sample| {
        sample.label("type") == "Attribution.ByFramework[]" && sample.has("Attribution.Program")
    };
    assert_eq!(
        profile.sum("alloc_space", of_program),
        0,
        "{}",
        profile.describe("alloc_space", of_program)
    );
}

fn record(runtime: Runtime) -> (Profile, serde_json::Value) {
    let mut app = Workload::dotnet(runtime, "attribution", &[]).unwrap().start().unwrap();
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("attribution.pb.gz");
    let recording =
        Recording::of_pid(app.pid(), &file, &["--allocation-samples", "100000"]).unwrap();
    recording.await_session(&app).unwrap();
    for place in ["static", "dynamic", "expression", "finalizer", "framework", "runtime", "compile"]
    {
        app.perform(place).unwrap();
        let read = wait_until("what was told to be read", SLACK, || {
            (unread(&regions(&app)) == 0).then_some(())
        });
        assert!(read.is_ok(), "{}", recording.progress());
    }
    recording.signal(Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    let truth = app.stop().unwrap();
    (Profile::read(&file).unwrap(), truth)
}
