//! Issue 5: `record --alloc-counts`: what the runtimes count of their own objects, for the program
//! and its children.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use system_tests::environment::{begin, begin_beside, record_on};
use system_tests::perfusion::{Scratch, command, run};
use system_tests::{Profile, Recording, Runtime, Workload, on_runtimes, wait_until};

/// For a machine that is busy with other things, too.
const DEADLINE: Duration = Duration::from_secs(120);

/// Objects and bytes by type, of each process.
type Truth = BTreeMap<u64, BTreeMap<String, [i64; 2]>>;

fn truth(stdout: &str) -> anyhow::Result<Truth> {
    let lines = stdout.lines().filter_map(|line| line.strip_prefix("truth "));
    let processes = lines.map(|line| {
        let said: Value = serde_json::from_str(line)?;
        let types = serde_json::from_value(said["types"].clone())?;
        Ok((said["pid"].as_u64().context("no pid")?, types))
    });
    processes.collect()
}

/// What the profile has of a type of a process.
fn counted(profile: &Profile, pid: u64, name: &str) -> [i64; 2] {
    ["alloc_objects", "alloc_space"].map(|column| {
        profile.sum(column, |sample| {
            sample.label("type") == name && sample.label("pid") == pid.to_string()
        })
    })
}

fn record(
    runtime: Runtime,
    often: &str,
    arguments: &[&str],
) -> anyhow::Result<(Truth, Profile, String)> {
    let scratch = Scratch::new()?;
    let file = scratch.path("app.pb.gz");
    let app = arguments
        .iter()
        .fold(Workload::dotnet(runtime, "children", &[])?, |app, arg| app.arg(*arg));
    let mut recording = command(["record", "--alloc-counts", often, "-o"]);
    recording.arg(&file).arg("--").args(app.command_line());
    let outcome = run(&mut recording, DEADLINE)?;
    anyhow::ensure!(outcome.code() == 0, "{}", outcome.stderr);
    let report = run(
        command(["report"]).arg(&file).args(["--type", "alloc_objects", "--by", "type"]),
        DEADLINE,
    )?;
    Ok((truth(&outcome.stdout)?, Profile::read(&file)?, outcome.stderr + &report.stdout))
}

on_runtimes!(
    each_process_counts_what_it_allocates:
    net8 Net8, net10 Net10, net11 Net11, net11_musl Net11Musl; long: net9 Net9
);

fn each_process_counts_what_it_allocates(runtime: Runtime) {
    let name = format!("counts::each_process on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let often = if runtime == Runtime::Net8 { "low" } else { "high" };
    let (truth, profile, said) = record(runtime, often, &["1", "300000", "2"]).unwrap();
    assert_eq!(truth.len(), 2, "{said}");
    let pids: Vec<&u64> = truth.keys().collect();
    let mut told = 0.0;
    for (pid, types) in &truth {
        let line =
            said.lines().find(|line| line.starts_with(&format!("counts: pid {pid} (children): ")));
        assert!(line.is_some_and(|line| !line.contains("missing")), "{said}");
        for (of, [objects, bytes]) in types {
            let [found, found_bytes] = counted(&profile, *pid, of);
            // Of a type of which each thread makes one object the first thread's is told of.
            if of == "Family.Cell[,]" {
                assert_eq!((found, found_bytes), (1, bytes / objects), "{of}: {said}");
                continue;
            }
            // Of each of the two threads fewer than 1,000 objects for each thread of the runtime,
            // of which this program has ten at most.
            assert!(
                found <= *objects && found >= objects - 2 * 10 * 1000,
                "{of}: {found} of {objects}\n{said}"
            );
            // An array of three bytes takes 27; 32 with what comes up to the next object.
            let least = found * if of == "Family.Cell[]" { 27 } else { bytes / objects };
            assert!(
                found_bytes <= *bytes && found_bytes >= least,
                "{of}: {found_bytes} of {bytes}\n{said}"
            );
            told += found as f64 / *objects as f64 / (truth.len() * (types.len() - 1)) as f64;
        }
    }
    println!("{name}: {:.2} % of the objects were told of", told * 100.0);
    let of_family = |sample: &&system_tests::Sample| sample.label("type").starts_with("Family.");
    let mut family = profile
        .samples
        .iter()
        .filter(of_family)
        .filter(|sample| profile.value(sample, "alloc_objects") > 0);
    assert!(
        family
            .all(|sample| sample.label("sampling") == "counted"
                && !sample.label("process").is_empty()),
        "{pids:?}"
    );
    assert!(
        said.contains("Family.Outer<int>.Inner<string[]>")
            && said.contains("counted: by the runtime"),
        "{said}"
    );
    assert!(
        profile
            .comments
            .iter()
            .any(|line| line.contains("counted by the runtime per process and type"))
    );
}

on_runtimes!(
    a_program_that_becomes_another_by_exec_is_let_go_on_and_counted_until_then:
    net8 Net8, net10 Net10
);

fn a_program_that_becomes_another_by_exec_is_let_go_on_and_counted_until_then(runtime: Runtime) {
    let name = format!("counts::exec on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    const OBJECTS: i64 = 300_000;
    // Had the second runtime been held up, nobody would have ended.
    let (truth, profile, said) =
        record(runtime, "high", &["0", &OBJECTS.to_string(), "1", "become"]).unwrap();
    let [(pid, last)] = truth.into_iter().collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(last["Family.Small"][0], 2 * OBJECTS, "{said}");
    let start = format!("counts: pid {pid} (children): ");
    let lines: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix(&start)).collect();
    // The first one's socket file has the second one's name and is in its way, so its runtime has
    // none.
    let [first, second] = lines[..] else { panic!("{said}") };
    assert!(first.contains("became another program"), "{first}");
    assert!(
        second.starts_with("not counted: ") && second.contains("by exec left the file"),
        "{second}"
    );
    // One process whose runtimes were not all counted has estimates of all of them, by some 200
    // samples of this type.
    let found = counted(&profile, pid, "Family.Small")[0] as f64;
    assert!((found / (3 * OBJECTS) as f64 - 1.0).abs() < 0.3, "{found}: {said}");
}

on_runtimes!(nobody_is_left_waiting_when_the_recorder_is_killed: net8 Net8, net10 Net10);

fn nobody_is_left_waiting_when_the_recorder_is_killed(runtime: Runtime) {
    let name = format!("counts::killed on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    let (fifo, told) = (scratch.path("go"), scratch.path("told"));
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let app = Workload::dotnet(runtime, "children", &[])
        .unwrap()
        .arg("1")
        .arg("1000")
        .arg("1")
        .arg("wait");
    let line: Vec<String> =
        app.command_line().iter().map(|part| part.to_string_lossy().into_owned()).collect();
    // A shell between, so that the program's ends of pipes are not the recorder's.
    let script = format!("exec {} < {} > {}", line.join(" "), fifo.display(), told.display());
    let mut recording = command(["record", "--alloc-counts", "low", "-o"]);
    recording.arg(scratch.path("app.pb.gz")).args(["--", "sh", "-c", &script]);
    let recording = Recording::spawn(&mut recording).unwrap();
    // Opens when the shell does.
    let mut go = std::fs::OpenOptions::new().write(true).open(&fifo).unwrap();
    let said = || std::fs::read_to_string(&told).unwrap_or_default();
    wait_until("the program", DEADLINE, || said().contains("waits").then_some(())).unwrap();
    recording.kill().unwrap();
    std::io::Write::write_all(&mut go, b"go\n").unwrap();
    // What its child has in its environment is nobody's any more.
    wait_until("the child", DEADLINE, || (said().matches("truth ").count() == 2).then_some(()))
        .unwrap();
}
