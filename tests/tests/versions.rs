//! Upgrade and downgrade: what a recorder and the library of another version do with each other in
//! one process.

use std::path::Path;
use std::time::Duration;

use perfusion_dotnet::attach::launch::launch;
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{HEADER_BYTES, VERSION};
use profiler_protocol::load::LOCK_VARIABLE;
use system_tests::app::{App, Workload};
use system_tests::environment::{Need, RECORD_NET9, Runtime, begin_beside};
use system_tests::perfusion::{Scratch, record_allocations_beside};
use system_tests::region::{counted, digest, regions};
use system_tests::wait::wait_until;

const DEADLINE: Duration = Duration::from_secs(60);

/// The library as this code makes it, but for the one instruction that writes the version into its
/// region.
fn library_of_version(version: u32, to: &Path) {
    let word = |version: u32| (u64::from(version) | HEADER_BYTES << 32).to_le_bytes();
    let mut library = perfusion_artefacts::shim().unwrap().to_vec();
    let own = word(VERSION);
    let places: Vec<usize> =
        (0..library.len() - own.len()).filter(|&at| library[at..].starts_with(&own)).collect();
    let &[at] = &places[..] else { panic!("the version is written at {places:?}") };
    library[at..at + own.len()].copy_from_slice(&word(version));
    std::fs::write(to, library).unwrap();
}

/// An app into which a recorder of that version has loaded its library, and which has lost its
/// recorder.
fn app_with(library: &Path) -> App {
    let other = ShimSettings::new(Subscriptions::default()).unwrap();
    let launch = launch(&other, false).unwrap();
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    for (name, value) in &launch.environment {
        // The lock is that of the recorder, who lives until the app has started.
        let value = if *name == LOCK_VARIABLE {
            value.clone()
        } else {
            value.to_string_lossy().replace(launch.library.path(), library.to_str().unwrap()).into()
        };
        app = app.env(name, value);
    }
    app.start().unwrap()
}

/// Waits until nothing writes into the regions any more.
fn await_quiet(regions: &[std::path::PathBuf]) {
    let mut last = digest(regions);
    wait_until("the library of the other version to go quiet", DEADLINE, || {
        std::thread::sleep(Duration::from_millis(300));
        let now = digest(regions);
        (std::mem::replace(&mut last, now) == now).then_some(())
    })
    .unwrap();
}

#[test]
fn a_recorder_and_the_library_of_another_version_leave_each_other_alone_and_the_app_is_well() {
    let Some(_turn) = begin_beside("versions: layout", &[RECORD_NET9, &[Need::Shim]].concat())
    else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    // To the older side the newer one is what the older one is to it: this recorder is both. Each
    // has an app of its own, at the same time.
    let meets = |version: u32| {
        let library = scratch.path(&format!("library-{version}.so"));
        library_of_version(version, &library);
        let mut app = app_with(&library);
        let other = wait_until("its region", DEADLINE, || {
            Some(regions(&app)).filter(|found| !found.is_empty())
        })
        .unwrap();
        // It was there from the start, and counts until it finds that nobody reads.
        await_quiet(&other);
        // Until its own library is read, however long a busy machine takes for that.
        let heard = record_allocations_beside(&mut app, 0, 1, Duration::from_secs(1)).unwrap();
        let [(profile, outcome)] = &heard.profiles[..] else { panic!("{heard:?}") };
        // It says why, and records all the same, by a library of its own.
        let said = format!("expected layout version {VERSION}, found {version}");
        assert!(outcome.stderr.contains(&said), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("the library of another version"), "{}", outcome.stderr);
        let of_app = || profile.describe("alloc_space", |sample| !sample.label("type").is_empty());
        assert!(
            profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) > 0,
            "{}",
            of_app()
        );
        assert!(profile.functions().iter().any(|name| name.contains("Allocator.Program.Run")));
        assert_eq!(profile.counter("shim_regions_refused"), Some(1), "{:#?}", profile.comments);
        // Its own has left; the other one stays, and without a recorder it does nothing.
        // The runtime takes its time to unload a library (0.3 s, or 5 s when a thread was inside).
        let left = || (regions(&app) == other).then_some(());
        wait_until("its own region to be unmapped", DEADLINE, left)
            .unwrap_or_else(|error| panic!("{error}: {:?}, and before {other:?}", regions(&app)));
        await_quiet(&other);
        assert_eq!(counted(&other, Counter::RequestsTaken), 0, "nothing was written for it");
        let truth = app.stop().unwrap();
        assert_eq!(truth["mistakes"], 0, "{truth}");
    };
    let meets = &meets;
    std::thread::scope(|scope| {
        let both = [VERSION - 1, VERSION + 1].map(|version| scope.spawn(move || meets(version)));
        // What one of them says when it fails has been printed.
        for meeting in both {
            meeting.join().unwrap();
        }
    });
}
