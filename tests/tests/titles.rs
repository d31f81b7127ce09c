//! Names and roles of threads: each sample under the name its thread had then, names that are
//! longer than the kernel keeps, and what a thread is for, which its name does not decide.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use system_tests::environment::{RECORD, begin, begin_beside, record_on};
use system_tests::perfusion::{SLACK, Scratch, command, run};
use system_tests::{App, Profile, Recording, Runtime, Sample, Workload, on_runtimes};

/// Records while `work` makes the app do what is looked at.
fn record_meanwhile<T>(
    app: &mut App,
    args: &[&str],
    work: impl FnOnce(&mut App, &Recording) -> T,
) -> (Profile, T) {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("titles.pb.gz");
    let args = [&["--duration", "60s"], args].concat();
    let mut recording = Recording::of_pid(app.pid(), &file, &args).unwrap();
    recording.await_progress("recording", SLACK).unwrap();
    let did = work(app, &recording);
    recording.signal(rustix::process::Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    (Profile::read(&file).unwrap(), did)
}

/// Sums of a column by the thread's name, in nanoseconds.
fn by_name(profile: &Profile, column: &str) -> BTreeMap<String, i64> {
    profile.sum_by(column, "thread_name")
}

fn assert_is(what: &str, found: i64, truth: &Value, tolerance: f64, picture: &str) {
    let truth = truth.as_f64().unwrap();
    let off = (found as f64 / truth - 1.0).abs();
    println!("{what}: {found} of {truth} ns, off by {:.2} %", off * 100.0);
    assert!(off <= tolerance, "{what}: {found} instead of {truth} ns:\n{picture}");
}

#[test]
fn a_thread_that_renames_itself_for_each_task_is_counted_under_each_name() {
    let Some(_turn) = begin_beside("titles::renames_itself", RECORD) else { return };
    let mut app = Workload::native("renames", &["-O1"]).unwrap().start().unwrap();
    let (profile, did) =
        record_meanwhile(&mut app, &[], |app, _| app.ask("go tasks", "did").unwrap());
    let (cpu, blocked, runnable) =
        (by_name(&profile, "cpu"), by_name(&profile, "blocked"), by_name(&profile, "runnable"));
    let picture =
        format!("{cpu:?} {blocked:?} {runnable:?}\n{}", profile.describe("cpu", |_| true));
    // The cut is at the rename: what is off is the system call itself and what the scheduler's
    // clock lags.
    assert_is("A ran", cpu["job-A"], &did["ran_a"], 0.01, &picture);
    assert_is("B ran", cpu["job-B"], &did["ran_b"], 0.01, &picture);
    for (name, key) in [("job-A", "waited_a"), ("job-B", "waited_b")] {
        let off_cpu = blocked[name] + runnable.get(name).copied().unwrap_or(0);
        assert_is(&format!("{name} waited"), off_cpu, &did[key], 0.03, &picture);
    }
    // Samples and stacks are those of the name: nothing else than the naps is waited for, and all
    // CPU time is at a place.
    let unknown = |sample: &Sample| {
        sample.label("thread_name").starts_with("job-")
            && sample.stack.last().is_none_or(|frame| frame.function.starts_with('['))
    };
    let (lost, all) = (profile.sum("cpu", unknown), cpu["job-A"] + cpu["job-B"]);
    assert!(lost * 50 < all, "{lost} of {all} ns nowhere:\n{picture}");
    assert_eq!(app.stop().unwrap(), serde_json::json!({}));
}

#[test]
fn a_thread_with_thousands_of_names_a_second_is_counted_by_its_samples() {
    let Some(_turn) = begin_beside("titles::thousands_of_names", RECORD) else { return };
    let mut app = Workload::native("renames", &["-O1"]).unwrap().start().unwrap();
    let (profile, did) = record_meanwhile(&mut app, &["--frequency", "999"], |app, _| {
        app.ask("go rapid", "did").unwrap()
    });
    let cpu = by_name(&profile, "cpu");
    let picture = format!("{cpu:?}\n{}", profile.describe("cpu", |_| true));
    // More renames than are told of; some 2,000 samples, of which a quarter is B's: a standard
    // deviation of 4 % of B, 1.3 % of A.
    assert!(profile.counter("renames_skipped").unwrap_or(0) > 100, "{picture}");
    assert_is("A ran", cpu["job-A"], &did["ran_a"], 0.06, &picture);
    assert_is("B ran", cpu["job-B"], &did["ran_b"], 0.18, &picture);
    // However it is shared, it is all there.
    let all = did["ran_a"].as_f64().unwrap() + did["ran_b"].as_f64().unwrap();
    let found = (cpu["job-A"] + cpu["job-B"]) as f64;
    assert!((found / all - 1.0).abs() < 0.02, "{found} of {all}:\n{picture}");
}

#[test]
fn a_thread_that_another_one_renames_in_its_sleep_slept_under_both_names() {
    let Some(_turn) = begin_beside("titles::renamed_in_its_sleep", RECORD) else { return };
    let mut app = Workload::native("renames", &["-O1"]).unwrap().start().unwrap();
    let (profile, did) =
        record_meanwhile(&mut app, &[], |app, _| app.ask("go asleep", "did").unwrap());
    let blocked = by_name(&profile, "blocked");
    let picture = format!("{blocked:?}\n{}", profile.describe("blocked", |_| true));
    let [least, most] = ["waited_a", "waited_b"].map(|key| did[key].as_i64().unwrap());
    // The probe's reading of the clock and the program's are the same clock's.
    assert!((least..=most).contains(&blocked["job-A"]), "{least} to {most}: {picture}");

    let both = blocked["job-A"] + blocked["job-B"];
    assert!(blocked["job-B"] > 0 && both >= least, "{picture}");
    let at_nap = |sample: &Sample| {
        sample.label("thread_name").starts_with("job-") && sample.has("pause_for")
    };
    let named = blocked["job-A"] + blocked["job-B"];
    assert!(profile.sum("blocked", at_nap) * 100 >= named * 98, "{picture}");
}

on_runtimes!(
    a_programs_thread_with_a_name_of_the_runtimes_is_the_programs:
    net8 Net8, net10 Net10, net11 Net11, net11_musl Net11Musl; long: net9 Net9
);

fn a_programs_thread_with_a_name_of_the_runtimes_is_the_programs(runtime: Runtime) {
    let name = format!("titles::impostors on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let mut app = Workload::dotnet(runtime, "impostors", &[]).unwrap().start().unwrap();
    let (profile, ()) = record_meanwhile(&mut app, &[], |app, _| app.perform("work").unwrap());
    let ready = app.ready().clone();
    let own: BTreeMap<String, String> = ready
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| name.starts_with("managed ") || name.starts_with("native "))
        .map(|(name, tid)| (tid.to_string(), name.clone()))
        .collect();
    let truth = app.stop().unwrap();
    let everything =
        || profile.describe("wall", |sample| own.contains_key(sample.label("thread_id")));
    for sample in &profile.samples {
        let tid = sample.label("thread_id");
        if own.contains_key(tid) {
            assert_eq!(sample.label("thread_role"), "app", "{}: {}", own[tid], everything());
            assert!(!sample.has("Garbage Collector"), "{}: {}", own[tid], everything());
            assert!(sample.label("wait_kind") != "idle", "{}: {}", own[tid], everything());
        }
    }
    for (tid, name) in &own {
        let cpu = profile.sum("cpu", |sample| sample.label("thread_id") == tid);
        assert_is(name, cpu, &truth[format!("cpu_{name}")], 0.05, &everything());
    }
    // The runtime's own are found beside them.
    let others =
        profile.samples.iter().filter(|sample| !own.contains_key(sample.label("thread_id")));
    let roles: BTreeSet<(&str, &str)> =
        others.map(|sample| (sample.label("thread_name"), sample.label("thread_role"))).collect();
    let has = |name: &str, role| roles.iter().any(|of| of.0.starts_with(name) && of.1 == role);
    assert!(has(".NET Finalizer", "finalizer") && has(".NET Tiered", "tiered_jit"), "{roles:?}");
    assert!(has(".NET EventPipe", "runtime") && has("perfusion-shim", "profiler"), "{roles:?}");
    assert!(!roles.iter().any(|(_, role)| *role == "gc" || *role == "unknown"), "{roles:?}");
    // A worker of the pool is one while it is called otherwise.
    let pool = truth["pool_thread"].to_string();
    let in_pool = |sample: &Sample| {
        sample.label("thread_id") == pool && sample.label("thread_name") == "my own job"
    };
    let cpu = profile.sum("cpu", in_pool);
    assert_is(
        "the pool's worker",
        cpu,
        &truth["cpu_pool"],
        0.05,
        &profile.describe("cpu", in_pool),
    );
    let role = profile
        .samples
        .iter()
        .filter(|sample| in_pool(sample))
        .map(|sample| sample.label("thread_role"));
    assert_eq!(
        role.collect::<BTreeSet<_>>(),
        ["threadpool"].into(),
        "{}",
        profile.describe("cpu", in_pool)
    );
}

/// As `titles.cs` names its threads: what is shown of a name that the runtime told, and of one that
/// the kernel has cut.
const TITLES: [(&str, &str); 6] = [
    ("Обработчик-заказов", "Обработ"),
    ("日本語スレッド名前", "日本語スレ"),
    (r"line\u{a}break\u{9}tab\u{1b}[31mred", r"line\u{a}break\u{9}tab\u{1b}"),
    ("key=value=x", "key=value=x"),
    ("plain-ascii-name-longer-than-15", "plain-ascii-nam"),
    ("😀😀😀😀😀", "😀😀😀"),
];

on_runtimes!(
    long_names_of_threads_are_whole_or_end_with_a_character:
    net8 Net8, net10 Net10, net11 Net11, net11_musl Net11Musl; long: net9 Net9
);

fn long_names_of_threads_are_whole_or_end_with_a_character(runtime: Runtime) {
    let name = format!("titles::long_names on {runtime}");
    // Alone: a name that the runtime tells after the end of the recording is not known.
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let mut app = Workload::dotnet(runtime, "titles", &[]).unwrap().start().unwrap();
    let ready = app.ready().clone();
    let (profile, ()) = record_meanwhile(&mut app, &[], |app, recording| {
        // What is named before the attach and starts in its midst is an older thread that no list
        // has.
        recording.await_session(app).unwrap();
        app.perform("later").unwrap();
    });
    let outcome =
        run(&mut command(["dump", "--pid", &app.pid().to_string(), "--json"]), SLACK).unwrap();
    let text = run(&mut command(["dump", "--pid", &app.pid().to_string()]), SLACK).unwrap();
    let truth = app.stop().unwrap();
    let names_of = |tid: &Value, column: &str| -> BTreeSet<&str> {
        let tid = tid.to_string();
        let of = profile.samples.iter().filter(|sample| sample.label("thread_id") == tid);
        of.filter(|sample| profile.value(sample, column) > 0)
            .map(|sample| sample.label("thread_name"))
            .collect()
    };
    for (number, (whole, cut)) in TITLES.iter().enumerate() {
        for column in ["cpu", "blocked", "alloc_space"] {
            let new = names_of(&truth[format!("new{number}")], column);
            let rows = || {
                let tid = truth[format!("new{number}")].to_string();
                profile.describe(column, |sample| sample.label("thread_id") == tid)
            };
            assert_eq!(new, [*whole].into(), "{column} of a thread that began later: {}", rows());
            let old = names_of(&ready[format!("old{number}")], column);
            assert!(
                old == [*cut].into() || old == [*whole].into(),
                "{column} of an older thread: {old:?}"
            );
        }
    }
    let dump: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let in_dump: BTreeSet<&str> = dump["threads"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|thread| thread["name"].as_str())
        .collect();
    for (whole, cut) in TITLES {
        assert!(in_dump.contains(whole) || in_dump.contains(cut), "{cut}: {in_dump:?}");
    }
    for said in [&outcome.stdout, &text.stdout] {
        assert!(
            !said.contains('\u{fffd}') && !said.contains('\u{1b}') && !said.contains('\t'),
            "{said}"
        );
    }
}
