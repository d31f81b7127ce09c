//! Show 8: the profiler dies at any moment; the app does not notice, nothing stays behind, and the next profiler starts afresh.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use system_tests::environment::{RECORD_NET9, begin, long_form};
use system_tests::perfusion::{SLACK, Scratch, record_pid};
use system_tests::wait::let_pass;
use system_tests::{App, Recording, Runtime, Workload, wait_until};

/// Ids of the BPF programs and maps a process holds, as (word in fdinfo, id).
fn bpf_objects(pid: u32) -> BTreeSet<(&'static str, u32)> {
    let mut ids = BTreeSet::new();
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return ids };
    for text in entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok()) {
        for line in text.lines() {
            for word in ["prog_id", "map_id"] {
                if let Some(id) =
                    line.strip_prefix(word).and_then(|rest| rest.trim_start_matches(':').trim().parse().ok())
                {
                    ids.insert((word, id));
                }
            }
        }
    }
    ids
}

/// Those of `ids` that the kernel still has.
fn still_loaded(ids: &BTreeSet<(&'static str, u32)>) -> BTreeSet<(&'static str, u32)> {
    let programs =
        aya::programs::loaded_programs().filter_map(Result::ok).map(|program| ("prog_id", program.id()));
    let maps = aya::maps::loaded_maps().filter_map(Result::ok).map(|map| ("map_id", map.id()));
    programs.chain(maps).filter(|id| ids.contains(id)).collect()
}

/// Our regions in the app: memfds with our name, still mapped there.
fn regions(app: &App) -> Vec<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap();
    let ours = maps.lines().filter(|line| line.contains("/memfd:") && line.contains("perfusion"));
    ours.filter_map(|line| {
        Some(PathBuf::from(format!("/proc/{}/map_files/{}", app.pid(), line.split(' ').next()?)))
    })
    .collect()
}

/// A digest of all bytes of the regions: it changes whenever the shim writes anything.
fn digest(regions: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for region in regions {
        let Ok(file) = fs::File::open(region) else { continue };
        let mut block = vec![0; 1 << 16];
        let mut offset = 0;
        while let Ok(read @ 1..) = file.read_at(&mut block, offset) {
            block[..read].hash(&mut hasher);
            offset += read as u64;
        }
    }
    hasher.finish()
}

/// Files of ours: libraries in the places where they may be put, and unfinished outputs in `outputs`.
fn leftovers(outputs: &Path) -> Vec<PathBuf> {
    let places =
        [std::env::temp_dir(), PathBuf::from("/tmp"), PathBuf::from("/dev/shm"), outputs.to_path_buf()];
    let entries = places.iter().filter_map(|place| fs::read_dir(place).ok()).flatten().filter_map(Result::ok);
    let ours = entries.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let library = name.contains("perfusion") && name.ends_with(".so");
        let unfinished = path.parent() == Some(outputs) && name.starts_with('.') && name.ends_with(".tmp");
        library || unfinished
    });
    ours.collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn killing_the_profiler_at_random_moments_never_hurts_the_app() {
    let Some(_turn) = begin("restart::killing_the_profiler", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    // A fixed sequence (Knuth's 64-bit LCG), so that a failure can be repeated: moments from 0 to 0.6 s reach from the first
    // system call of the start, through loading and attaching, into the recording; the long form's, twice as long, also when a
    // busy machine loads slowly.
    let longest_ms = if long_form() { 1200 } else { 600 };
    let mut state: u64 = 42;
    let mut seen = BTreeSet::new();
    for round in 0..20 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = Duration::from_millis((state >> 33) % longest_ms);
        let recording = Recording::of_pid(app.pid(), &scratch.path("killed.pb.gz"), &[]).unwrap();
        let_pass(moment);
        let objects = bpf_objects(recording.pid());
        recording.kill().unwrap();
        app.ensure_alive().unwrap();
        let gone = wait_until("BPF objects to go", Duration::from_secs(5), || {
            still_loaded(&objects).is_empty().then_some(())
        });
        assert!(
            gone.is_ok(),
            "round {round}, killed after {moment:?}: left behind {:?}",
            still_loaded(&objects)
        );
        seen.extend(objects);
    }
    // Had every kill come before the programs were loaded, nothing would have been shown.
    assert!(seen.iter().any(|(word, _)| *word == "prog_id"), "no kill met a loaded BPF program: {seen:?}");
    assert!(still_loaded(&seen).is_empty(), "left behind: {:?}", still_loaded(&seen));

    // The last one is killed while it surely receives events; then the shim must notice by itself.
    let recording = Recording::of_pid(app.pid(), &scratch.path("killed.pb.gz"), &[]).unwrap();
    let attached = wait_until("the region to fill", Duration::from_secs(20), || {
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
    assert_eq!(digest(&regions(&app)), quiet, "the shim still writes 2 s after its profiler's death");

    // The next one sees everything, and sweeps what the dead ones left.
    let before = app.mark().unwrap();
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(3), &[]).unwrap();
    let rate = before.bytes_per_second(app.mark().unwrap());
    let allocated = profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) as f64;
    let share = allocated / (profile.duration_ns as f64 / 1e9) / rate;
    assert!((0.8..1.25).contains(&share), "{share:.2} of the app's own allocation rate:\n{}", outcome.stderr);
    let left = leftovers(scratch.path("killed.pb.gz").parent().unwrap());
    assert!(left.is_empty(), "{left:?}");
    // It computed the right thing all the time.
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    // No stall that a user would see: a profiler that stops the app for its attach or its death would show here. The runtime's own
    // collections and a busy machine make some 20 ms; the attach blocks no thread of the app.
    assert!(truth["longest_pause_ms"].as_f64().unwrap() < 1000.0, "{truth}");
}

#[test]
fn an_interrupted_recording_writes_its_file_and_leaves_nothing() {
    let Some(_turn) = begin("restart::an_interrupted_recording", RECORD_NET9) else { return };
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("interrupted.pb.gz");
    let app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    let attached =
        wait_until("the region", Duration::from_secs(20), || (!regions(&app).is_empty()).then_some(()));
    assert!(attached.is_ok(), "{}", recording.progress());
    let_pass(Duration::from_secs(1));
    let objects = bpf_objects(recording.pid());
    assert!(!objects.is_empty());
    recording.signal(rustix::process::Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    assert!(still_loaded(&objects).is_empty());
    let profile = system_tests::Profile::read(&file).unwrap();
    assert!(profile.sum("alloc_space", |_| true) > 0);
    app.stop().unwrap();
}
