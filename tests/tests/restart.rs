//! Show 8: the profiler dies at any moment; the app does not notice, nothing stays behind, and the
//! next profiler starts afresh.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;
use system_tests::environment::{Need, RECORD_NET9, begin, long_form, perfusion_bin};
use system_tests::perfusion::{SLACK, Scratch, record_allocations};
use system_tests::region::{digest, regions};
use system_tests::wait::let_pass;
use system_tests::{Recording, Runtime, Workload, wait_until};

/// Ids of the BPF programs and maps a process holds, as (word in fdinfo, id).
pub(crate) fn bpf_objects(pid: u32) -> BTreeSet<(&'static str, u32)> {
    let mut ids = BTreeSet::new();
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return ids };
    for text in entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok()) {
        for line in text.lines() {
            for word in ["prog_id", "map_id"] {
                if let Some(id) = line
                    .strip_prefix(word)
                    .and_then(|rest| rest.trim_start_matches(':').trim().parse().ok())
                {
                    ids.insert((word, id));
                }
            }
        }
    }
    ids
}

/// Those of `ids` that the kernel still has.
pub(crate) fn still_loaded(ids: &BTreeSet<(&'static str, u32)>) -> BTreeSet<(&'static str, u32)> {
    let programs = aya::programs::loaded_programs()
        .filter_map(Result::ok)
        .map(|program| ("prog_id", program.id()));
    let maps = aya::maps::loaded_maps().filter_map(Result::ok).map(|map| ("map_id", map.id()));
    programs.chain(maps).filter(|id| ids.contains(id)).collect()
}

/// Where libraries of started programs lie.
const STARTED: &str = "/run/perfusion-record";

/// Fails when files of ours are left. Another recorder on this host may just be making one of its
/// own.
pub(crate) fn assert_nothing_left(outputs: &Path) {
    let gone = wait_until("a clean host", Duration::from_secs(10), || {
        leftovers(outputs).is_empty().then_some(())
    });
    assert!(gone.is_ok(), "{:?}", leftovers(outputs));
}

/// Files of ours that nobody holds: libraries in the places where they may be put, and unfinished
/// outputs in `outputs`.
fn leftovers(outputs: &Path) -> Vec<PathBuf> {
    let places = [
        std::env::temp_dir(),
        PathBuf::from("/tmp"),
        PathBuf::from("/dev/shm"),
        PathBuf::from(STARTED),
        outputs.to_path_buf(),
    ];
    let entries =
        places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().filter_map(Result::ok);
    let ours = entries.map(|entry| entry.path()).filter(|path| {
        let name =
            path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let library = name.starts_with("perfusion-") && name.ends_with(".so");
        let unfinished =
            path.parent() == Some(outputs) && name.starts_with('.') && name.ends_with(".tmp");
        library && !is_held(path) || unfinished
    });
    ours.collect::<BTreeSet<_>>().into_iter().collect()
}

/// True while the recorder that has put it there lives.
fn is_held(library: &Path) -> bool {
    fs::File::open(library)
        .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_err())
}

#[test]
fn killing_the_profiler_at_random_moments_never_hurts_the_app() {
    let Some(_turn) = begin("restart::killing_the_profiler", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    // How long the way into a recording is on this machine; the first one is killed there.
    let begun = Instant::now();
    let mut recording = Recording::of_pid(app.pid(), &scratch.path("killed.pb.gz"), &[]).unwrap();
    recording.await_progress("recording pid", SLACK).unwrap();
    let way = begun.elapsed();
    // A fixed sequence (Knuth's 64-bit LCG), so that a failure can be repeated: moments from the
    // first system call of the start, through loading and attaching, into the recording.
    let longest = if long_form() { 3 * way } else { 3 * way / 2 };
    let mut state: u64 = 42;
    let mut moment = way;
    let mut seen = BTreeSet::new();
    for round in 0..if long_form() { 20 } else { 10 } {
        let objects = bpf_objects(recording.pid());
        recording.kill().unwrap();
        app.ensure_alive().unwrap();
        let gone = wait_until("BPF objects to go", SLACK, || {
            still_loaded(&objects).is_empty().then_some(())
        });
        assert!(
            gone.is_ok(),
            "round {round}, killed after {moment:?}: left behind {:?}",
            still_loaded(&objects)
        );
        seen.extend(objects);
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        moment = longest.mul_f64((state >> 33) as f64 / f64::from(1u32 << 31));
        recording = Recording::of_pid(app.pid(), &scratch.path("killed.pb.gz"), &[]).unwrap();
        let_pass(moment);
    }
    // Had every kill come before the programs were loaded, nothing would have been shown.
    assert!(
        seen.iter().any(|(word, _)| *word == "prog_id"),
        "no kill met a loaded BPF program: {seen:?}"
    );
    assert!(still_loaded(&seen).is_empty(), "left behind: {:?}", still_loaded(&seen));

    // The last one is killed while it surely receives events; then the shim must notice by itself.
    let attached = wait_until("the region to fill", SLACK, || {
        let before = digest(&regions(&app));
        let_pass(Duration::from_millis(100));
        (!regions(&app).is_empty() && digest(&regions(&app)) != before).then_some(())
    });
    assert!(attached.is_ok(), "no events in the region; perfusion said:\n{}", recording.progress());
    recording.kill().unwrap();
    // Quiet within 2 s: what is written later than that is a change between two looks after it.
    let_pass(Duration::from_secs(2));
    let quiet = digest(&regions(&app));
    let_pass(Duration::from_millis(1500));
    assert_eq!(
        digest(&regions(&app)),
        quiet,
        "the shim still writes 2 s after its profiler's death"
    );

    // The next one sees everything, and sweeps what the dead ones left.
    let heard = record_allocations(&mut app, 1, Duration::from_secs(2)).unwrap();
    let (profile, outcome) = &heard.profiles[0];
    let allocated =
        profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) as f64;
    heard.assert_holds(profile, allocated, &outcome.stderr);
    assert_nothing_left(scratch.path("killed.pb.gz").parent().unwrap());
    // It computed the right thing all the time.
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    // No stall that a user would see: a profiler that stops the app for its attach or its death
    // would show here. The runtime's own collections and a busy machine make some 20 ms; the attach
    // blocks no thread of the app.
    assert!(truth["longest_pause_ms"].as_f64().unwrap() < 1000.0, "{truth}");
}

#[test]
fn an_interrupted_recording_writes_its_file_and_leaves_nothing() {
    let Some(_turn) = begin("restart::an_interrupted_recording", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("interrupted.pb.gz");
    let app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let attached = wait_until("the region", SLACK, || (!regions(&app).is_empty()).then_some(()));
    assert!(attached.is_ok(), "{}", recording.progress());
    let_pass(Duration::from_secs(1));
    let objects = bpf_objects(recording.pid());
    assert!(!objects.is_empty());
    recording.signal(Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    assert!(still_loaded(&objects).is_empty());
    let profile = system_tests::Profile::read(&file).unwrap();
    assert!(profile.sum("alloc_space", |_| true) > 0);
    app.stop().unwrap();
}

/// Children of a process that have not become something else than `perfusion`.
fn waiting_children(recorder: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{recorder}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let children: Vec<u32> = children
        .flat_map(|text| {
            text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
        })
        .collect();
    children.into_iter().filter(|&pid| waits_at_the_gate(pid)).collect()
}

fn waits_at_the_gate(pid: u32) -> bool {
    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments.split(|byte| *byte == 0).nth(1) == Some(b"exec-when-ready")
}

#[test]
fn a_recorder_killed_while_its_program_waits_at_the_gate_leaves_nothing() {
    let Some(_turn) = begin("restart::killed_at_the_gate", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let ran = scratch.path("ran");
    let started = Path::new(STARTED);
    let there = || -> BTreeSet<_> {
        fs::read_dir(started)
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name())
            .collect()
    };
    // Keepers of recordings before this one may still have to end.
    let others = there();
    let mut attempts = 0..10;
    let waiting = loop {
        let mut command = system_tests::perfusion::command(["record", "-o"]);
        command.arg(scratch.path("x.pb.gz")).arg("--").arg("/bin/touch").arg(&ran);
        let recorder = Recording::spawn(&mut command).unwrap();
        // Loading the probes takes far longer than a look at the children; where this test had no
        // CPU meanwhile, once more.
        let waiting = wait_until("the waiting child", SLACK, || {
            waiting_children(recorder.pid())
                .pop()
                .map(Some)
                .or_else(|| ran.exists().then_some(None))
        });
        if let Some(waiting) = waiting.unwrap()
            && is_shut_in(&recorder, waiting)
        {
            recorder.kill().unwrap();
            break waiting;
        }
        recorder.signal(Signal::CONT).unwrap();
        recorder.finish_well(SLACK).unwrap();
        fs::remove_file(&ran).unwrap();
        assert!(attempts.next().is_some(), "the gate was always open before it was seen");
    };
    // The kernel gives a pid to somebody else only after all others (pid_max): a gate seen under it
    // again would still be this one.
    wait_until("the waiting child to go", SLACK, || (!waits_at_the_gate(waiting)).then_some(()))
        .unwrap();
    assert!(!ran.exists(), "a program that nobody records any more has run");
    // All it left is the library it had placed, which the next start sweeps.
    let own: BTreeSet<_> = there().difference(&others).cloned().collect();
    assert!(own.len() <= 1, "{own:?}");
    let mut next = system_tests::perfusion::command(["record", "-o"]);
    next.arg(scratch.path("y.pb.gz")).arg("--").arg("/bin/touch").arg(&ran);
    assert_eq!(system_tests::perfusion::run(&mut next, SLACK).unwrap().code(), 0);
    assert!(ran.exists());
    assert!(there().is_subset(&others), "{:?}", there());
}

/// Stops the recorder; true when its child then sleeps at its gate, which nobody opens any more.
fn is_shut_in(recorder: &Recording, child: u32) -> bool {
    recorder.signal(Signal::STOP).unwrap();
    let state = |stat: PathBuf| {
        let text = fs::read_to_string(stat).unwrap_or_default();
        text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
    };
    let stopped = || {
        let mut tasks = fs::read_dir(format!("/proc/{}/task", recorder.pid())).unwrap();
        tasks.all(|task| {
            task.is_ok_and(|task| !matches!(state(task.path().join("stat")), Some('R' | 'S' | 'D')))
        })
    };
    wait_until("the recorder to stand still", SLACK, || stopped().then_some(())).unwrap();
    wait_until("the child to sleep or to go on", SLACK, || {
        let there = waits_at_the_gate(child);
        let asleep = state(PathBuf::from(format!("/proc/{child}/stat"))) == Some('S');
        (asleep || !there).then_some(there)
    })
    .unwrap()
}

#[test]
fn a_program_started_by_a_recording_has_the_stdin_of_the_recorder() {
    let Some(_turn) = begin("restart::stdin", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let text = scratch.path("text");
    fs::write(&text, "first\nsecond\n").unwrap();
    // The shell takes the first line, and what the recorded program sees begins after it: one open
    // file, with one position.
    let script =
        "exec < \"$1\"; read line; \"$2\" record -o \"$3\" -- /bin/cat; echo \"then $(cat)\"";
    let mut command = std::process::Command::new("sh");
    command.args(["-c", script, "sh"]).arg(&text);
    command.arg(perfusion_bin().unwrap()).arg(scratch.path("x.pb.gz"));
    let outcome = system_tests::perfusion::run(&mut command, SLACK).unwrap();
    assert_eq!(outcome.stdout, "second\nthen \n", "{}", outcome.stderr);
}

#[test]
fn what_a_recorder_leaves_that_dies_while_it_writes_goes_with_the_next() {
    let needs = [RECORD_NET9, &[Need::C]].concat();
    let Some(_turn) = begin("restart::dies_while_it_writes", &needs) else { return };
    let scratch = Scratch::new().unwrap();
    let outputs = scratch.path("outputs");
    fs::create_dir(&outputs).unwrap();
    let file = outputs.join("x.pb.gz");
    let app = Workload::program("/bin/sleep").arg("600").spawn().unwrap();
    // Everything is written and synced then, but not yet where it belongs.
    let mut command =
        Workload::native("die_at_rename", &[]).unwrap().arg(perfusion_bin().unwrap()).command();
    command.args(["record", "--duration", "1s", "--pid", &app.pid().to_string(), "-o"]).arg(&file);
    let outcome = system_tests::perfusion::run(&mut command, SLACK).unwrap();
    let killed = std::os::unix::process::ExitStatusExt::signal(&outcome.status);
    assert_eq!(killed, Some(Signal::SYS.as_raw()), "{}", outcome.stderr);
    let names = || -> Vec<String> {
        let entries = fs::read_dir(&outputs).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert!(names().iter().any(|name| name.ends_with(".tmp")), "it died elsewhere: {:?}", names());
    assert!(!file.exists());
    Recording::of_pid(app.pid(), &file, &["--duration", "500ms"])
        .unwrap()
        .finish_well(SLACK)
        .unwrap();
    assert_eq!(names(), ["x.pb.gz"]);
}
