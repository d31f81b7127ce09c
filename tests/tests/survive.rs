//! What is hard on a runtime while it is profiled: the app computes what it computes alone, ends as
//! it ends alone, and the recording ends well.
//!
//! The long form (`cargo xtask test --long survive`) goes on for ten minutes with each.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use profiler_protocol::counter::Counter;
use rustix::process::Signal;
use serde_json::Value;
use system_tests::environment::{Need, begin_beside, long_form, record_on};
use system_tests::perfusion::{Outcome, SLACK, Scratch, memory};
use system_tests::region::{counted, regions};
use system_tests::{App, Profile, Recording, Runtime, Sample, Workload, on_runtimes, wait_until};

use crate::death::assert_losses_add_up;

/// What the promise says of each.
const LONG: Duration = Duration::from_secs(600);

/// A mode of the workload `survive` (its head says what each does).
#[derive(Clone, Copy)]
struct Hardship {
    mode: &'static str,
    /// How much of it a round has.
    amount: u32,
    /// How many rounds there are at least, once the shim is at work.
    rounds: u32,
    /// How long they go on in the long form.
    long: Duration,
    env: &'static [(&'static str, &'static str)],
}

/// What has come of it.
struct Survived {
    /// Of the whole life of the app.
    truth: Value,
    profile: Profile,
    outcome: Outcome,
    /// Rounds while the shim was surely at work.
    rounds: u32,
}

impl Survived {
    fn picture(&self) -> String {
        format!("{}\n{}", self.truth, self.outcome.stderr)
    }

    fn counter(&self, name: &str) -> i64 {
        self.profile.counter(name).unwrap_or_else(|| panic!("no counter {name}"))
    }

    fn truth(&self, name: &str) -> u64 {
        self.truth[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.truth))
    }

    /// Samples of CPU time and of allocations in the app's own code.
    fn own(&self) -> impl Iterator<Item = &Sample> {
        let weigh = |sample: &Sample| {
            self.profile.value(sample, "cpu") > 0 || self.profile.value(sample, "alloc_space") > 0
        };
        self.profile.samples.iter().filter(move |sample| weigh(sample) && sample.has("Survive."))
    }

    /// Of a hundred of the app's own samples, so many have a frame of managed code without a name.
    fn unnamed_percent(&self) -> f64 {
        let (mut unnamed, mut all) = (0.0, 0.0);
        for sample in self.own() {
            all += 1.0;
            unnamed += f64::from(u8::from(sample.has("[managed]")));
        }
        unnamed / all * 100.0
    }
}

fn workload(runtime: Runtime, mode: &str, amount: u32) -> Workload {
    Workload::dotnet(runtime, "survive", &["forks"]).unwrap().arg(mode).arg(amount.to_string())
}

fn needs(runtime: Runtime) -> Vec<Need> {
    [&record_on(runtime)[..], &[Need::C]].concat()
}

/// Allocations are heard of, objects are watched, and the recorder has been told names: it has
/// stacks of them.
fn is_at_work(app: &App) -> bool {
    let regions = regions(app);
    let count = |counter| counted(&regions, counter);
    count(Counter::AllocationSamples) > 0
        && count(Counter::HandlesCreated) > 0
        && count(Counter::NamesFound) > 10
}

impl Hardship {
    /// Rounds of the app before it is recorded (which say what is right), then while it is, then
    /// one after it.
    fn endured_by(self, runtime: Runtime) -> Option<Survived> {
        let env: String =
            self.env.iter().map(|(variable, value)| format!(" {variable}={value}")).collect();
        let name = format!("survive::{}{env} on {runtime}", self.mode);
        let _turn = begin_beside(&name, &needs(runtime))?;
        let scratch = Scratch::new().unwrap();
        let file = scratch.path("survived.pb.gz");
        let mut workload = workload(runtime, self.mode, self.amount);
        for (variable, value) in self.env {
            workload = workload.env(*variable, *value);
        }
        let mut app = workload.start().unwrap();
        app.perform("go").unwrap();
        let first = app.mark().unwrap();
        let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
        let go = |app: &mut App| {
            app.perform("go").unwrap_or_else(|error| panic!("{error:#}\n{}", recording.progress()));
        };
        // The session begins while the app stands still: the runtime runs managed code for it, and
        // beside threads that have a collection at every allocation that takes minutes on a busy
        // machine. (`attach::attached_and_detached…` attaches beside threads at work.)
        wait_until("a session", SLACK, || {
            (counted(&regions(&app), Counter::SessionsStarted) > 0).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", recording.progress()));
        let (begun, mut others) = (Instant::now(), 1);
        while !is_at_work(&app) {
            assert!(
                begun.elapsed() < SLACK,
                "no allocations are heard of:\n{}",
                recording.progress()
            );
            go(&mut app);
            others += 1;
        }
        let (begun, mut rounds) = (Instant::now(), 0);
        let (from, rss) = (app.mark().unwrap(), memory(app.pid(), "VmRSS"));
        while rounds < self.rounds || long_form() && begun.elapsed() < self.long {
            go(&mut app);
            rounds += 1;
        }
        let (took, to) = (begun.elapsed(), app.mark().unwrap());
        println!(
            "{name}: {rounds} rounds in {took:.1?}; the app's memory was {rss} MiB and is {} MiB, \
             the recorder's was at most {} MiB",
            memory(app.pid(), "VmRSS"),
            memory(recording.pid(), "VmHWM")
        );
        recording.signal(Signal::INT).unwrap();
        let outcome = recording.finish_well(SLACK).unwrap();
        let last = app.mark().unwrap();
        // It is alone again, and still right.
        wait_until("the library to leave", SLACK, || regions(&app).is_empty().then_some(()))
            .unwrap();
        app.perform("go").unwrap();
        others += 1;
        let truth = app.stop().unwrap();
        let survived = Survived { truth, profile: Profile::read(&file).unwrap(), outcome, rounds };
        let counter = |name| survived.counter(name);
        let picture = || survived.picture();
        assert_eq!(survived.truth("rounds"), u64::from(others + rounds), "{}", picture());
        assert_eq!(survived.truth("mistakes"), 0, "{}", picture());
        // It was recorded all the time: what is in the profile is what the app says of itself, but
        // for what is counted as lost.
        let heard = counter("shim_allocation_samples");
        // Those downsampled are stood for by others.
        let told = heard - counter("shim_allocations_downsampled");
        let kept = 1.0 - counter("shim_allocations_dropped_full") as f64 / told as f64;
        let bytes = survived.profile.sum("alloc_space", |_| true) as f64;
        let least = (to.allocated_bytes - from.allocated_bytes) * kept;
        let most = last.allocated_bytes - first.allocated_bytes;
        // Five standard errors of so many samples. A tick (.NET 8 and 9) counts the 8 KB that a
        // thread is given to allocate in, and what a collection or the thread's end leaves unused
        // of them: with a collection at every allocation several times what is allocated.
        let tolerance = 0.2 + 5.0 / (told as f64).sqrt();
        let is_sampled = runtime >= Runtime::Net10;
        // .NET 10 draws where its next sample lies when a thread is given room to allocate in. A
        // collection at every allocation takes that room away each time, before a sample is
        // reached, and its samples stand for less than half of all (3.4e8 bytes of 7.5e8 seen): so
        // the runtime samples then.
        let is_all = !(is_sampled && self.env.iter().any(|(name, _)| *name == "DOTNET_GCStress"));
        assert!(
            (!is_all || bytes > least * (1.0 - tolerance))
                && (!is_sampled || bytes < most * (1.0 + tolerance)),
            "{bytes:.2e} of the app's own {least:.2e} to {most:.2e} bytes:\n{}",
            picture()
        );
        assert!(survived.own().count() > 0, "{}", survived.profile.describe("cpu", |_| true));
        assert!(counter("shim_handles_created") > 0, "{}", picture());
        assert_losses_add_up(&survived.profile, &survived.outcome.stderr, 0);
        // It has told nothing that the recorder could not believe.
        assert_eq!(counter("shim_regions_disabled"), 0, "{}", picture());
        assert_eq!(counter("shim_events_malformed"), 0, "{}", picture());
        println!(
            "{name}: {bytes:.2e} bytes allocated by the profile, {least:.2e} to {most:.2e} by the \
             app; {heard} allocation samples, {} objects \
             watched, {:.2} % of samples with a frame without a name; {}",
            counter("shim_handles_created"),
            survived.unnamed_percent(),
            survived.truth
        );
        Some(survived)
    }
}

on_runtimes!(
    collections_without_end_and_objects_of_every_kind: net10 Net10; long: net8 Net8, net9 Net9
);

fn collections_without_end_and_objects_of_every_kind(runtime: Runtime) {
    let server: &[_] = &[("DOTNET_gcServer", "1")];
    let modes: &[_] = if long_form() { &[&[], server] } else { &[&[]] };
    for env in modes {
        let hardship =
            Hardship { mode: "collections", amount: 3000, rounds: 2, long: LONG / 2, env };
        let Some(survived) = hardship.endured_by(runtime) else { return };
        assert!(survived.truth("full_collections") > 10, "{}", survived.truth);
        assert!(
            survived.truth("collections") > survived.truth("full_collections"),
            "{}",
            survived.truth
        );
        // Objects were seen to die at the ends of collections.
        assert!(survived.counter("shim_objects_dead") > 0, "{}", survived.picture());
    }
}

on_runtimes!(a_collection_at_every_allocation: net8 Net8; long: net9 Net9, net10 Net10);

/// `DOTNET_GCStress=3`: a full collection at every allocation that the runtime's own code makes,
/// and at transitions between managed code and it.
fn a_collection_at_every_allocation(runtime: Runtime) {
    let modes = [("collections", 10), ("exceptions", 12), ("threads", 50), ("code", 4)];
    let modes = if long_form() { &modes[..] } else { &modes[..1] };
    for (mode, amount) in modes.iter().copied() {
        let env = &[("DOTNET_GCStress", "3")];
        let hardship = Hardship { mode, amount, rounds: 2, long: LONG / 4, env };
        let Some(survived) = hardship.endured_by(runtime) else { return };
        // A round has some ten collections without it.
        let collections = survived.truth("full_collections");
        assert!(collections > survived.truth("rounds") * 100, "{}", survived.truth);
        assert!(survived.counter("shim_surveys") > 100, "{}", survived.picture());
    }
}

on_runtimes!(threads_that_come_and_go: net8 Net8; long: net9 Net9, net10 Net10);

/// In the long form it is a thousand a round, without end: the promise is of ten thousand.
fn threads_that_come_and_go(runtime: Runtime) {
    let hardship = Hardship {
        mode: "threads",
        amount: 1000,
        rounds: if long_form() { 10 } else { 2 },
        long: LONG,
        env: &[],
    };
    let Some(survived) = hardship.endured_by(runtime) else { return };
    assert_eq!(survived.truth("subjects"), survived.truth("rounds") * 1000, "{}", survived.truth);
}

on_runtimes!(exceptions_in_flight_of_every_kind: net9 Net9; long: net8 Net8, net10 Net10);

fn exceptions_in_flight_of_every_kind(runtime: Runtime) {
    let hardship = Hardship { mode: "exceptions", amount: 240, rounds: 2, long: LONG, env: &[] };
    let Some(survived) = hardship.endured_by(runtime) else { return };
    let thrown = survived.profile.sum("exceptions", |sample| sample.has("Survive.Exceptions"));
    // Each subject has thrown one at least, and 960 of them are a round.
    assert!(
        thrown >= i64::from(survived.rounds) * 960 / 2,
        "{thrown} thrown:\n{}",
        survived.picture()
    );
}

on_runtimes!(
    load_contexts_and_dynamic_methods_that_come_and_go: net10 Net10; long: net8 Net8, net9 Net9
);

fn load_contexts_and_dynamic_methods_that_come_and_go(runtime: Runtime) {
    let hardship = Hardship { mode: "code", amount: 40, rounds: 2, long: LONG, env: &[] };
    let Some(survived) = hardship.endured_by(runtime) else { return };
    // Each round has found 40 contexts and 80 methods dead.
    assert_eq!(survived.truth("subjects"), survived.truth("rounds") * 120, "{}", survived.truth);
    // Code that has gone gives its addresses to other code, which may stay without a name, but has
    // no other's: who calls whom is known.
    let mut seen = [0; 3];
    for sample in survived.own() {
        let has = |function| sample.has(function);
        let others: &[&str] = match () {
            () if has("Survive.Code.Even") => &["passing_odd", "Survive.Guest", "Survive.Code.Odd"],
            () if has("Survive.Code.Odd") => {
                &["passing_even", "Survive.Guest", "Survive.Code.Even"]
            }
            () if has("Survive.Code.Context") => &["passing_"],
            () if has("Survive.Code.Dynamic") => &["Survive.Guest"],
            () => &[],
        };
        for other in others {
            assert!(!has(other), "{other} has no business in {}", sample.text());
        }
        for (seen, name) in
            seen.iter_mut().zip(["passing_odd", "passing_even", "Survive.Guest.Run"])
        {
            *seen += i32::from(has(name));
        }
    }
    println!("samples with passing_odd, passing_even and Guest.Run: {seen:?}");
}

on_runtimes!(
    children_that_are_started_all_the_time:
    net9 Net9, net11_musl Net11Musl; long: net8 Net8, net10 Net10
);

fn children_that_are_started_all_the_time(runtime: Runtime) {
    Hardship { mode: "starts", amount: 20, rounds: 2, long: LONG, env: &[] }.endured_by(runtime);
}

on_runtimes!(
    forked_children_keep_out_of_the_parents_region: net8 Net8; long: net9 Net9, net10 Net10
);

/// A forked child has the shim's code and the runtime that calls it, but neither the region nor the
/// shim's thread. Children that go on as managed code allocate: the runtime calls the shim there.
fn forked_children_keep_out_of_the_parents_region(runtime: Runtime) {
    // A collection in the child would wait for threads that are not there; so would the compiler.
    let env = &[
        ("DOTNET_GCgen0size", "0x10000000"),
        ("DOTNET_TieredCompilation", "0"),
        ("DOTNET_gcConcurrent", "0"),
    ];
    let hardship = Hardship { mode: "forks", amount: 20, rounds: 2, long: LONG, env };
    let Some(survived) = hardship.endured_by(runtime) else { return };
    // The children would have said so (`mistakes`), and they know how to look.
    assert!(survived.truth("rounds_with_a_region") >= survived.rounds.into(), "{}", survived.truth);
    assert_eq!(survived.counter("shim_regions_adopted"), 1, "{}", survived.picture());
    // Nobody has left anything half written.
    assert_eq!(survived.counter("shim_holes"), 0, "{}", survived.picture());
}

/// How an app has died, and what it said last.
#[derive(Debug)]
struct Death {
    signal: Option<i32>,
    code: Option<i32>,
    words: String,
}

impl Death {
    /// Its words, each line once, without numbers: how deep a stack was is not the same twice.
    fn lines(&self) -> BTreeSet<String> {
        let plain = |line: &str| line.replace(|c: char| c.is_ascii_digit(), "").trim().to_owned();
        self.words.lines().map(plain).filter(|line| !line.is_empty()).collect()
    }
}

/// An app of threads that allocate and throw, which dies of `how`, recorded or not.
fn death_of(runtime: Runtime, how: &str, recorded: bool) -> Death {
    let scratch = Scratch::new().unwrap();
    let (file, words) = (scratch.path("died.pb.gz"), scratch.path("stderr"));
    let shell =
        Workload::program("/bin/sh").arg("-c").arg("exec 2>\"$0\"; exec \"$@\"").arg(&words);
    let program = workload(runtime, "busy", 0);
    let shell = program.command_line().into_iter().fold(shell, |shell, word| shell.arg(word));
    let mut app = shell.env("DOTNET_DbgEnableMiniDump", "0").start().unwrap();
    let recording = recorded.then(|| {
        let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
        wait_until("allocations", SLACK, || is_at_work(&app).then_some(()))
            .unwrap_or_else(|error| panic!("{error}\n{}", recording.progress()));
        // By now the recorder knows names of what these threads do again and again.
        let heard = |app: &App| counted(&regions(app), Counter::AllocationSamples);
        let so_far = heard(&app);
        wait_until("more of them", SLACK, || (heard(&app) > so_far + 500).then_some(())).unwrap();
        recording
    });
    if how == "abort" {
        app.abort().unwrap();
    } else {
        let survived = app.perform(how);
        assert!(survived.is_err(), "it is alive");
    }
    let status = app.await_exit(SLACK).unwrap();
    if let Some(recording) = recording {
        // It ends when its target has.
        let outcome = recording.finish_well(SLACK).unwrap();
        let profile = Profile::read(&file).unwrap();
        let allocated = profile.sum("alloc_space", |sample| sample.has("Survive."));
        assert!(allocated > 0, "{}\n{}", outcome.stderr, profile.describe("alloc_space", |_| true));
    }
    Death {
        signal: status.signal(),
        code: status.code(),
        words: fs::read_to_string(&words).unwrap(),
    }
}

fn dies_as_alone(runtime: Runtime, how: &str, says: &[&str]) {
    let name = format!("survive::{how} on {runtime}");
    let Some(_turn) = begin_beside(&name, &needs(runtime)) else { return };
    let (alone, recorded) = (death_of(runtime, how, false), death_of(runtime, how, true));
    assert_eq!(
        (recorded.signal, recorded.code),
        (alone.signal, alone.code),
        "{alone:#?}\n{recorded:#?}"
    );
    assert_eq!(alone.signal, Some(Signal::ABORT.as_raw()), "{alone:#?}");
    assert_eq!(recorded.lines(), alone.lines(), "{alone:#?}\n{recorded:#?}");
    for words in says {
        assert!(recorded.words.contains(words), "{recorded:#?}");
    }
}

on_runtimes!(fail_fast_is_the_runtimes_own_end: net9 Net9; long: net8 Net8, net10 Net10);

fn fail_fast_is_the_runtimes_own_end(runtime: Runtime) {
    dies_as_alone(runtime, "abort", &["asked to abort", "System.Environment.FailFast"]);
}

on_runtimes!(stack_overflow_is_the_runtimes_own_end: net10 Net10; long: net8 Net8, net9 Net9);

fn stack_overflow_is_the_runtimes_own_end(runtime: Runtime) {
    dies_as_alone(runtime, "overflow", &["Stack overflow.", "Survive.Deaths.Deep("]);
}

on_runtimes!(
    a_stack_that_ends_in_an_allocation_ends_the_process:
    net8 Net8, net11_musl Net11Musl; long: net9 Net9, net10 Net10
);

/// There the runtime's code or the shim's is what finds no room, not the app's: what the runtime
/// says of that depends on where it was, and so does its signal. It dies of one, at once.
fn a_stack_that_ends_in_an_allocation_ends_the_process(runtime: Runtime) {
    let name = format!("survive::overflow-allocating on {runtime}");
    let Some(_turn) = begin_beside(&name, &needs(runtime)) else { return };
    let recorded = death_of(runtime, "overflow-allocating", true);
    let ends = [Signal::ABORT, Signal::SEGV].map(|signal| Some(signal.as_raw()));
    assert!(ends.contains(&recorded.signal), "{recorded:#?}");
    println!(
        "{name}: {:?}, {}",
        recorded.signal,
        recorded.words.lines().next().unwrap_or_default()
    );
}
