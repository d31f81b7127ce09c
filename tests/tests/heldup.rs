//! A runtime that does not answer: one whose suspension is pending, because a thread is in native
//! code that the runtime knows nothing of.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use system_tests::environment::{Need, begin, record_on};
use system_tests::perfusion::{Recording, SLACK, Scratch, command};
use system_tests::wait::let_pass;
use system_tests::{App, Profile, Runtime, Workload, on_runtimes};

/// How long the runtime is stuck. Longer than all commands here together, in a busy machine's time
/// too.
const STUCK_SECONDS: &str = "40";
/// A second is promised; a busy machine takes its time to start threads and to end a process.
const PROMPT: Duration = Duration::from_millis(1500);

fn stuck(runtime: Runtime) -> App {
    let workload = Workload::dotnet(runtime, "heldup", &["holdup"]).unwrap();
    let mut app = workload.arg(STUCK_SECONDS).start().unwrap();
    app.perform("stick").unwrap();
    app
}

/// Whether whoever has started the tests has them ignore SIGINT, as a shell does with what it
/// starts in the background. Programs that the tests start inherit that.
fn is_interrupt_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(ignored.trim(), 16).unwrap() & 1 << (Signal::INT.as_raw() - 1) != 0
}

on_runtimes!(a_runtime_that_is_stuck_holds_up_no_command: net10 Net10; long: net8 Net8, net9 Net9);

fn a_runtime_that_is_stuck_holds_up_no_command(runtime: Runtime) {
    let name = format!("heldup::commands on {runtime}");
    let needs = [record_on(runtime), vec![Need::C]].concat();
    let Some(_turn) = begin(&name, &needs) else { return };
    let mut app = stuck(runtime);
    let (pid, scratch) = (app.pid().to_string(), Scratch::new().unwrap());

    for signal in [Signal::INT, Signal::TERM] {
        let mut survey = Recording::spawn(command(["heap"]).args(["--pid", &pid])).unwrap();
        survey.await_progress("is asked for a full collection", SLACK).unwrap();
        survey.await_progress("has not been seen to begin", SLACK).unwrap();
        let began = Instant::now();
        survey.signal(signal).unwrap();
        let outcome = survey.finish(SLACK).unwrap();
        assert!(began.elapsed() < PROMPT, "{signal:?}: {:?}: {}", began.elapsed(), outcome.stderr);
        assert_eq!(outcome.code(), 1, "{}", outcome.stderr);
        assert!(outcome.stderr.contains("interrupted"), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("are stopped"), "nobody saw that: {}", outcome.stderr);
    }

    // What its duration says, and at most two seconds more.
    let (file, began) = (scratch.path("stuck.pb.gz"), Instant::now());
    let recording = Recording::of_pid(app.pid(), &file, &["--duration", "3s"]).unwrap();
    let outcome = recording.finish(SLACK).unwrap();
    assert!(began.elapsed() < Duration::from_secs(3 + 2) + PROMPT, "{:?}", began.elapsed());
    let said = ["no answer on the diagnostics socket", "had not answered"];
    assert!(said.iter().any(|words| outcome.stderr.contains(words)), "{}", outcome.stderr);
    let covered = Profile::read(&file).unwrap().duration_ns;
    assert!((3_000_000_000..4_500_000_000).contains(&covered), "{covered} ns");

    for signal in [Signal::INT, Signal::TERM] {
        for args in [
            &["record", "--output", file.to_str().unwrap(), "--pid"][..],
            &["leaks", "--duration", "30s", "--heap", "--pid"],
            &["dump"],
        ] {
            // `dump` leaves both signals as it finds them.
            if args[0] == "dump" && signal == Signal::INT && is_interrupt_ignored() {
                continue;
            }
            let mut recording = Recording::spawn(command(args).arg(&pid)).unwrap();
            if args[0] == "record" {
                // Its probes are loaded before, which takes as long as the machine is busy.
                recording.await_progress("recording pid", SLACK).unwrap();
            }
            // In the middle of its attach.
            let_pass(Duration::from_secs(1));
            let began = Instant::now();
            recording.signal(signal).unwrap();
            let outcome = recording.finish(SLACK).unwrap();
            assert!(
                began.elapsed() < PROMPT,
                "{args:?}: {:?}: {}",
                began.elapsed(),
                outcome.stderr
            );
        }
    }
    app.ensure_alive().unwrap();
    let truth = app.stop().unwrap();
    assert!(truth["rounds"].as_f64() > truth["rounds_before"].as_f64(), "it goes on: {truth}");
}

on_runtimes!(
    a_dump_names_who_holds_up_the_runtime: net9 Net9, net10 Net10, net11 Net11, net11_musl Net11Musl
);

fn a_dump_names_who_holds_up_the_runtime(runtime: Runtime) {
    let name = format!("heldup::dump on {runtime}");
    let needs = [record_on(runtime), vec![Need::C]].concat();
    let Some(_turn) = begin(&name, &needs) else { return };
    let app = stuck(runtime);
    let dump = Recording::spawn(command(["dump", "--json"]).arg(app.pid().to_string())).unwrap();
    let outcome = dump.finish_well(SLACK).unwrap();
    let dump: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let threads = dump["threads"].as_array().unwrap();
    let holder = threads.iter().find(|thread| thread["name"] == "holder").expect(&outcome.stdout);
    assert_eq!(dump["suspension"]["pending"], true, "{}", outcome.stderr);
    assert_eq!(
        dump["suspension"]["held_up_by"],
        serde_json::json!([holder["tid"]]),
        "{}",
        outcome.stdout
    );
}
