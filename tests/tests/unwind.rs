//! Show 3: stacks are exact: every physical frame, in order, nothing else.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use rustix::process::Signal;
use system_tests::app::compile_c;
use system_tests::environment::{Need, RECORD, begin_beside, long_form, record_on};
use system_tests::perfusion::{Recording, SLACK, Scratch, record_pid};
use system_tests::profile::Frame;
use system_tests::{Profile, Runtime, Sample, Workload, on_runtimes, wait_until};

/// The call chain of `callheavy.cs` from the method that loops to the innermost.
const CHAIN: [&str; 10] = ["Root", "L1", "L2", "L3", "L4", "L5", "L6", "L7", "L8", "Tiny"];

/// `CallHeavy.Program.L3(System.Int32)` → `CallHeavy.Program.L3`.
fn without_parameters(function: &str) -> &str {
    function.split('(').next().unwrap_or(function)
}

/// The user part of a stack: the kernel's frames, if the sample met some, come innermost.
fn user_frames(sample: &Sample) -> Vec<&Frame> {
    sample.stack.iter().take_while(|frame| !frame.mapping.starts_with("[kernel")).collect()
}

/// True when `sample` is `root`, then an unbroken piece of the chain that begins with Root.
fn is_exact(frames: &[&Frame], root: &[String]) -> bool {
    let names: Vec<&str> = frames.iter().map(|frame| without_parameters(&frame.function)).collect();
    if names.len() < root.len() || names.iter().zip(root).any(|(name, expected)| name != expected) {
        return false;
    }
    let inner = names.get(root.len()..).unwrap_or_default();
    inner.len() <= CHAIN.len()
        && inner.iter().zip(CHAIN).all(|(name, link)| *name == format!("CallHeavy.Program.{link}"))
}

/// What precedes Root in most of the samples: the way from the thread's start to the loop.
fn usual_root(profile: &Profile, samples: &[&Sample]) -> Vec<String> {
    let mut counts: BTreeMap<Vec<String>, i64> = BTreeMap::new();
    for sample in samples {
        let frames = user_frames(sample);
        let names: Vec<String> =
            frames.iter().map(|frame| without_parameters(&frame.function).to_owned()).collect();
        if let Some(at) = names.iter().position(|name| name == "CallHeavy.Program.Root") {
            *counts.entry(names[..at].to_vec()).or_insert(0) += profile.value(sample, "samples");
        }
    }
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(names, _)| names).unwrap_or_default()
}

#[test]
fn a_library_that_is_rewritten_in_place_and_loaded_again_is_another_one() {
    let Some(_turn) = begin_beside("unwind::rewritten_library", &[RECORD, &[Need::C]].concat())
    else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let (file, library) = (scratch.path("reloads.pb.gz"), scratch.path("plugin.so"));
    let plugin = |name: &str, frame: &str| {
        let (name, frame) = (format!("-DPLUGIN={name}"), format!("-DFRAME={frame}"));
        let output = format!("{}.so", &name[9..]);
        compile_c("reloads", &output, &["-shared", "-fPIC", "-fomit-frame-pointer", &name, &frame])
            .unwrap()
    };
    let mut app = Workload::native("reloads", &[])
        .unwrap()
        .arg(&library)
        .arg(plugin("first", "4096"))
        .arg(plugin("second", "8192"))
        .start()
        .unwrap();
    let mut recording = Recording::of_pid(app.pid(), &file, &["--frequency", "999"]).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    let reloaded = app.ask("go", "reloaded").unwrap();
    recording.signal(Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    app.stop().unwrap();
    assert_eq!(reloaded["same"], true, "else there is nothing to be mistaken about");
    let profile = Profile::read(&file).unwrap();
    let picture = || profile.describe("cpu", |_| true);
    let whole = |sample: &Sample| sample.has("main") && sample.has("run");
    let second = profile.sum("cpu", |sample| sample.has("second_burn") && whole(sample));
    // Until they are told that the code is another one, the probes walk by the first's rules; how
    // long that is depends on the machine's load.
    let marked = profile.sum("cpu", |sample| sample.has("[truncated: code replaced]"));
    let burnt = reloaded["second"].as_i64().unwrap();
    // Those of the first, whose symbols are gone, do not bear the second's names.
    assert!(
        (second + marked - burnt).abs() * 10 <= burnt,
        "{second} + {marked} of {burnt} ns\n{}",
        picture()
    );
    assert!(second * 4 >= burnt, "{second} of {burnt} ns\n{}", picture());
    let in_library = profile.sum("cpu", |sample| sample.has("[plugin.so]+") && whole(sample));
    let burnt = reloaded["first"].as_i64().unwrap();
    assert!((in_library - burnt).abs() * 10 <= burnt, "{in_library} of {burnt} ns\n{}", picture());
}

#[test]
fn code_that_nothing_is_known_of_is_left_by_a_search_of_the_stack_and_marked() {
    let Some(_turn) = begin_beside("unwind::uncharted", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    // Not bound from the start: the frames of the loader, which binds a function when it is called
    // first, are left on the stack and lead on as true ones do.
    let app = Workload::native("uncharted", &["-pthread", "-Wl,-z,lazy"]).unwrap().start().unwrap();
    let waits_in = || {
        fs::read_to_string(format!("/proc/{}/task/{}/wchan", app.pid(), app.thread("asleep")))
            .unwrap()
    };
    wait_until("the thread to sleep", SLACK, || waits_in().contains("nanosleep").then_some(()))
        .unwrap();
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(2), &["--no-attach", "--frequency", "999"])
            .unwrap();
    for (name, column) in [
        ("bare", "cpu"),
        ("framed", "cpu"),
        ("keeping", "cpu"),
        ("pushing", "cpu"),
        ("asleep", "blocked"),
    ] {
        let id = app.thread(name).to_string();
        let of_thread = |sample: &Sample| sample.label("thread_id") == id;
        let caller = format!("calls_{name}");
        let chain = ["enter", &caller, "[guessed caller]", name];
        let right = |sample: &Sample| {
            let root = sample.stack.first().is_some_and(Frame::is_of_libc);
            root && sample
                .positions(&chain)
                .is_some_and(|at| at.iter().is_sorted_by(|a, b| **b == **a + 1))
        };
        let seen = profile.sum(column, |sample| of_thread(sample) && right(sample));
        let all = profile.sum(column, of_thread);
        let picture = || format!("{}\n{}", profile.describe(column, of_thread), outcome.stderr);
        assert!(all > 100_000_000, "{name}: {all} ns\n{}", picture());
        // Before its first sample a thread that only runs has no stack.
        assert!(seen * 100 >= all * 98, "{name}: {seen} of {all} ns\n{}", picture());
    }
    app.stop().unwrap();
    assert!(profile.counter("guessed_frames").unwrap() >= 5, "{}", outcome.stderr);
}

on_runtimes!(
    tier1_call_chains_without_frame_pointers_are_exact:
    net8 Net8, net11 Net11, net11_musl Net11Musl; long: net9 Net9, net10 Net10
);

fn tier1_call_chains_without_frame_pointers_are_exact(runtime: Runtime) {
    let name = format!("unwind::tier1_call_chains on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
    // 1999 Hz: the promise is 1 bad stack in 1000, so it takes thousands to see it kept.
    let length = Duration::from_secs(if long_form() { 30 } else { 3 });
    let thread = app.thread("callheavy").to_string();
    let (mut total, mut bad) = (0, 0);
    // Below some thousand samples the share says little. A loaded machine gives the thread a part
    // of a CPU: it takes longer then.
    for _ in 0..16 {
        let (profile, outcome) = record_pid(app.pid(), length, &["--frequency", "1999"]).unwrap();
        let (samples, wrong) = judge(runtime, &profile, &thread, &outcome.stderr);
        total += samples;
        bad += wrong;
        if total >= 3000 {
            break;
        }
    }
    app.stop().unwrap();
    assert!(total >= 3000, "{runtime}: only {total} samples");
    assert!(bad * 1000 <= total, "{runtime}: {bad} of {total} stacks are not exact");
}

/// How many samples the thread has, and how many of their stacks are not exact.
fn judge(runtime: Runtime, profile: &Profile, thread: &str, log: &str) -> (i64, i64) {
    let samples: Vec<&Sample> = profile
        .samples
        .iter()
        .filter(|s| s.label("thread_id") == thread && profile.value(s, "samples") > 0)
        .collect();
    let root = usual_root(profile, &samples);
    let total: i64 = samples.iter().map(|sample| profile.value(sample, "samples")).sum();
    let mut wrong: Vec<(i64, String)> = Vec::new();
    for sample in samples.iter().filter(|sample| !is_exact(&user_frames(sample), &root)) {
        wrong.push((profile.value(sample, "samples"), sample.text()));
    }
    wrong.sort();
    wrong.reverse();
    let bad: i64 = wrong.iter().map(|(count, _)| count).sum();
    let worst: Vec<String> =
        wrong.iter().take(20).map(|(count, text)| format!("{count:>6} {text}")).collect();
    let picture = format!(
        "{runtime}: {bad} of {total} stacks are not exact; root {root:?}\n{}\n{log}",
        worst.join("\n")
    );
    if bad > 0 {
        eprintln!("{picture}");
    }
    // The root itself: the thread's start in libc, the runtime, managed start, the loop.
    let first = samples
        .iter()
        .find(|sample| is_exact(&user_frames(sample), &root))
        .map(|sample| &sample.stack[0]);
    assert!(first.is_some_and(Frame::is_of_libc), "the stack does not begin in libc: {picture}");
    assert!(root.last().is_some_and(|name| name == "CallHeavy.Program.Loop"), "{picture}");
    // .NET 10 has Thread.StartCallback between the two; before, it and what follows it left by tail
    // calls.
    assert!(root.iter().any(|name| name == "Workload.Start"), "{picture}");
    (total, bad)
}

on_runtimes!(
    waiting_threads_show_their_whole_stack_down_to_the_start:
    net10 Net10, net11_musl Net11Musl; long: net8 Net8, net9 Net9
);

fn waiting_threads_show_their_whole_stack_down_to_the_start(runtime: Runtime) {
    let name = format!("unwind::waiting_threads on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "waits", &[]).unwrap().start().unwrap();
    let length = Duration::from_secs(6);
    let (profile, _) = record_pid(app.pid(), length, &[]).unwrap();
    for (thread, chain, longest_ns) in [
        (
            "wait-monitor",
            [
                "Waits.Program.MonitorLoop",
                "Waits.Program.MonitorOuter",
                "Waits.Program.MonitorInner",
            ],
            90_000_000,
        ),
        (
            "wait-sleep",
            ["Waits.Program.SleepLoop", "Waits.Program.SleepOuter", "Waits.Program.SleepInner"],
            51_000_000,
        ),
        (
            "wait-pipe",
            ["Waits.Program.PipeLoop", "Waits.Program.PipeOuter", "Waits.Program.PipeInner"],
            41_000_000,
        ),
    ] {
        let id = app.thread(thread).to_string();
        let of_thread = |sample: &Sample| sample.label("thread_id") == id;
        let blocked = profile.sum("blocked", of_thread);
        let whole = profile.sum("blocked", |sample| {
            of_thread(sample)
                && sample.stack[0].is_of_libc()
                && sample.positions(&chain).is_some_and(|at| {
                    // The three are neighbours, and what is below them is the way from the thread's
                    // start.
                    at[1] == at[0] + 1
                        && at[2] == at[1] + 1
                        && sample.positions(&["Workload.Start", chain[0]])
                            == Some(vec![at[0] - 1, at[0]])
                })
        });
        let picture = format!(
            "{runtime} {thread}: {whole} of {blocked} ns blocked\n{}",
            profile.describe("blocked", of_thread)
        );
        // For a CPU, too: on a busy machine that is some percent of its time, with nothing else
        // running less than one.
        let runnable = profile.sum("runnable", of_thread);
        assert!(
            blocked + runnable > profile.duration_ns * 95 / 100,
            "it does nothing but wait: {picture}"
        );
        assert!(
            blocked > profile.duration_ns * 80 / 100,
            "{runnable} ns of them for a CPU: {picture}"
        );
        // All but the wait in progress when the recording began (its stack was taken before anyone
        // looked), twice over for one more that a GC or the attach itself causes.
        assert!(blocked - whole <= 2 * longest_ns, "{picture}");
    }
    app.stop().unwrap();
}
