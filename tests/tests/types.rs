//! Issue 5: a type is called alike wherever it is told of, and two types of one name are told
//! apart.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use system_tests::environment::{begin_beside, record_on};
use system_tests::perfusion::{SLACK, Scratch, command, run};
use system_tests::region::{regions, unread};
use system_tests::{Profile, Recording, Runtime, Sample, Workload, on_runtimes, wait_until};

/// For a machine that is busy with other things, too.
const DEADLINE: Duration = Duration::from_secs(300);

/// Types of `types.cs` that the compiler has named, or that the runtime writes in another way, and
/// a part of the name the runtime has for them, where that is another one.
const SHOWN: [(&str, Option<&str>); 8] = [
    ("Types.Maker+closure", Some("Types.Maker.<>c__DisplayClass")),
    ("Types.Maker.Wait(…)+async", Some("Types.Maker.<Wait>d__")),
    ("(Types.Ticket, int)[]", Some("System.ValueTuple<Types.Ticket, int>[]")),
    ("Types.Outer<int>.Inner", None),
    ("Types.Shade[]", None),
    ("Types.Shade?[]", Some("System.Nullable<Types.Shade>[]")),
    ("Types.Ticket[,][]", Some("Types.Ticket[][,]")),
    (
        "System.Func<byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, \
         byte, byte, byte, Types.Ticket>[]",
        None,
    ),
];
/// A type that two load contexts have, and what the core library makes of it.
const TWICE: [&str; 2] =
    ["Types.Ware", "System.Collections.Generic.KeyValuePair<Types.Ware, int>[]"];

on_runtimes!(
    types_are_called_alike_everywhere_and_told_apart: net8 Net8, net10 Net10; long: net9 Net9
);

fn types_are_called_alike_everywhere_and_told_apart(runtime: Runtime) {
    let name = format!("types::alike on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    // The ring holds some hundred records: on a machine so busy that nobody reads it in time some
    // are lost, which tells nothing about names.
    let recorded = (0..4).map(|_| record(runtime));
    let mut whole = recorded
        .filter(|(_, profile, _)| profile.counter("shim_records_dropped_full").unwrap_or(0) == 0);
    let (scratch, profile, heap) = whole.next().expect("a recording without loss");
    let file = scratch.path("types.pb.gz");
    let picture = || profile.describe("alloc_space", |_| true);
    for (shown, raw) in SHOWN {
        let of_type = |sample: &Sample| sample.label("type") == shown;
        assert!(profile.sum("alloc_space", of_type) > 0, "{shown}: {}", picture());
        assert!(profile.sum("inuse_space", of_type) > 0, "{shown}: {}", picture());
        for sample in profile.samples.iter().filter(|sample| of_type(sample)) {
            let told = sample.label("type_raw");
            assert!(raw.map_or(told.is_empty(), |raw| told.contains(raw)), "{shown}: {told:?}");
            assert_eq!(sample.label("type_module"), "", "{shown} is the only one of its name");
        }
        let row = heap.lines().find(|line| line.ends_with(&format!("  {shown}")));
        assert!(row.is_some(), "{shown}: {heap}");
    }
    let thrown = |sample: &&Sample| {
        profile.value(sample, "exceptions") > 0 && sample.has("Types.Maker.Fail")
    };
    let thrown = profile.samples.iter().find(thrown).expect("an exception");
    // Of a nested exception the runtime tells the innermost name only.
    assert_eq!(thrown.label("exception_type"), "Failure<int>", "{:?}", thrown.labels);
    assert_eq!(thrown.label("type_raw"), "Failure[System.Int32]");

    // Each context's are under the method that calls it: 5,000 and 10,000 of 1,016 bytes, of which
    // some 50 and 100 are seen. So many or few as below are four standard deviations away.
    for name in TWICE {
        let modules = |method: &str| -> Vec<&str> {
            let made = |sample: &&Sample| sample.label("type") == name && sample.has(method);
            let mut modules: Vec<&str> = profile
                .samples
                .iter()
                .filter(made)
                .map(|sample| sample.label("type_module"))
                .collect();
            modules.sort_unstable();
            modules.dedup();
            modules
        };
        let (first, second) = (modules("Types.Program.First()"), modules("Types.Program.Second()"));
        let ([first], [second]) = (first.as_slice(), second.as_slice()) else {
            panic!("{name}: {first:?} and {second:?}: {}", picture())
        };
        assert!(
            first != second && first.starts_with("types.dll") && second.starts_with("types.dll")
        );
        if name != TWICE[0] {
            continue;
        }
        for (module, bytes) in [(first, 5_080_000.0), (second, 10_160_000.0)] {
            let of_module = |sample: &Sample| {
                sample.label("type") == name && sample.label("type_module") == *module
            };
            let sum = profile.sum("alloc_space", of_module) as f64;
            assert!(
                (0.4..1.6).contains(&(sum / bytes)),
                "{module}: {sum} of {bytes}: {}",
                picture()
            );
        }
        let report = |arguments: &[&str]| {
            run(
                command(["report", "--type", "alloc_space", "--rows", "100"])
                    .args(arguments)
                    .arg(&file),
                SLACK,
            )
            .unwrap()
            .stdout
        };
        let by_type = report(&["--by", "type"]);
        for module in [first, second] {
            assert!(by_type.contains(&format!("  {name} ({module})")), "{by_type}");
        }
        let by_module = report(&["--only", &format!("type={name}"), "--by", "type_module"]);
        assert!(by_module.contains(first) && by_module.contains(second), "{by_module}");
        let only = report(&["--only", &format!("type={}", SHOWN[0].0)]);
        assert!(only.contains("Types.Maker.Capture(long)"), "{only}");
    }
}

/// Where the profile is, the profile, and what `perfusion heap` says after it.
fn record(runtime: Runtime) -> (Scratch, Profile, String) {
    let mut app = Workload::dotnet(runtime, "types", &[]).unwrap().start().unwrap();
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("types.pb.gz");
    let recording =
        Recording::of_pid(app.pid(), &file, &["--allocation-samples", "100000"]).unwrap();
    recording.await_session(&app).unwrap();
    for order in ["first", "second", "others"] {
        app.perform(order).unwrap();
        let read = wait_until("what was told to be read", SLACK, || {
            (unread(&regions(&app)) == 0).then_some(())
        });
        assert!(read.is_ok(), "{}", recording.progress());
    }
    recording.signal(Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    let heap =
        run(&mut command(["heap", "--rows", "1000", "--pid", &app.pid().to_string()]), SLACK)
            .unwrap();
    app.stop().unwrap();
    let profile = Profile::read(&file).unwrap();
    (scratch, profile, heap.stdout)
}

on_runtimes!(exact_mode_tells_types_of_one_name_apart: net10 Net10; long: net8 Net8, net9 Net9);

fn exact_mode_tells_types_of_one_name_apart(runtime: Runtime) {
    let name = format!("types::exact on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("app.pb.gz");
    let app = Workload::dotnet(runtime, "types", &[]).unwrap().arg("once");
    let mut recording = command(["record", "--exact", "-o"]);
    recording.arg(&file).arg("--").args(app.command_line());
    let outcome = run(&mut recording, DEADLINE).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let account: Value =
        serde_json::from_slice(&std::fs::read(scratch.path("app.exact.json")).unwrap()).unwrap();
    let types = account["processes"][0]["types"].as_array().expect("types");
    let counts = |name: &str| -> Vec<(&str, u64)> {
        let of_name = types.iter().filter(|of| of["name"] == name);
        let counts = of_name.map(|of| {
            (of["module"].as_str().unwrap_or(""), of["allocated"]["objects"].as_u64().unwrap_or(0))
        });
        let mut counts: Vec<_> = counts.collect();
        counts.sort_by_key(|(_, objects)| *objects);
        counts
    };
    let profile = Profile::read(&file).unwrap();
    for (name, objects) in [(TWICE[0], [5_000, 10_000]), (TWICE[1], [1_250, 2_500])] {
        let found = counts(name);
        let [(first, fewer), (second, more)] = found.as_slice() else {
            panic!("{name}: {found:?}")
        };
        assert_eq!([*fewer, *more], objects, "{name}");
        assert!(first != second && first.starts_with("types.dll"), "{name}: {found:?}");
        for (module, objects) in found {
            let sum = profile.sum("alloc_objects", |sample| {
                sample.label("type") == name && sample.label("type_module") == module
            });
            assert_eq!(
                u64::try_from(sum),
                Ok(objects),
                "{name} of {module}: {}",
                profile.describe("alloc_objects", |sample| sample.label("type") == name)
            );
        }
    }
    for (shown, raw) in SHOWN {
        let of: Vec<&Value> = types.iter().filter(|of| of["name"] == shown).collect();
        let [of] = of.as_slice() else { panic!("{shown}: {of:?}") };
        assert_eq!(of["allocated"]["objects"], 2_500, "{shown}");
        let told = of["type_raw"].as_str();
        assert!(
            raw.map_or(told.is_none(), |raw| told.is_some_and(|told| told.contains(raw))),
            "{of}"
        );
        assert_eq!(
            profile.sum("alloc_objects", |sample| sample.label("type") == shown),
            2_500,
            "{shown}"
        );
    }
}
