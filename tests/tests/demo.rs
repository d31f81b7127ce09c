//! Show 1 and 2: the file is a pprof that everyone accepts, and each part of the demo app is seen
//! as what it is. One recording of the demo on .NET 9 serves most of these tests.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use system_tests::environment::{
    Need, RECORD_NET9, begin_beside, cache_dir, perfusion_bin, record_on,
};
use system_tests::{
    App, Profile, Recording, Runtime, Sample, Workload, gotool, on_runtimes, perfusion,
};

/// Long enough for 3 full collections and 4 pipe reads a bucket; the demo's rarest event comes once
/// in 2 s.
const LENGTH: Duration = Duration::from_secs(8);

struct Demo {
    profile: Profile,
    file: PathBuf,
}

fn start(runtime: Runtime) -> App {
    let mut app = Workload::dotnet(runtime, "demo", &["shop_native"]).unwrap().spawn().unwrap();
    // The demo says one line for people; JSON is for the other workloads.
    app.await_text("demo:", perfusion::SLACK).unwrap();
    app
}

fn record(runtime: Runtime, length: Duration, arguments: &[&str]) -> Demo {
    let mut app = start(runtime);
    let file = cache_dir().join(format!("demo-{}{}.pb.gz", runtime.major(), arguments.concat()));
    let seconds = format!("{}s", length.as_secs());
    let arguments = [&["--duration", &seconds], arguments].concat();
    let recording = Recording::of_pid(app.pid(), &file, &arguments).unwrap();
    recording.finish_well(length + perfusion::SLACK).unwrap();
    app.ensure_alive().unwrap();
    Demo { profile: Profile::read(&file).unwrap(), file }
}

fn demo() -> &'static Demo {
    static DEMO: OnceLock<Demo> = OnceLock::new();
    DEMO.get_or_init(|| record(Runtime::Net9, LENGTH, &[]))
}

fn has_cpu<'a>(profile: &'a Profile, parts: &'a [&'a str]) -> impl Iterator<Item = &'a Sample> {
    profile
        .samples
        .iter()
        .filter(move |sample| profile.value(sample, "cpu") > 0 && sample.positions(parts).is_some())
}

#[test]
fn all_thirteen_sample_types_are_there_in_order_and_cpu_comes_first() {
    let Some(_turn) = begin_beside("demo::all_thirteen_sample_types", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let expected = [
        ("samples", "count"),
        ("cpu", "nanoseconds"),
        ("runnable", "nanoseconds"),
        ("blocked", "nanoseconds"),
        ("wall", "nanoseconds"),
        ("alloc_objects", "count"),
        ("alloc_space", "bytes"),
        ("inuse_objects", "count"),
        ("inuse_space", "bytes"),
        ("exceptions", "count"),
        ("contentions", "count"),
        ("delay", "nanoseconds"),
        ("gc_pause", "nanoseconds"),
    ];
    let found: Vec<(&str, &str)> =
        profile.types.iter().map(|(name, unit)| (name.as_str(), unit.as_str())).collect();
    assert_eq!(found, expected);
    assert_eq!(profile.default_type, "cpu");
}

#[test]
fn google_pprof_calls_the_file_valid() {
    let Some(_turn) = begin_beside(
        "demo::google_pprof_calls_the_file_valid",
        &[RECORD_NET9, &[Need::Go]].concat(),
    ) else {
        return;
    };
    let said = gotool::check_valid(&demo().file).unwrap();
    assert!(said.contains("valid"), "{said}");
}

#[test]
fn go_tool_pprof_prints_a_top_table_for_every_sample_type() {
    let Some(_turn) = begin_beside("demo::go_tool_pprof", &[RECORD_NET9, &[Need::Go]].concat())
    else {
        return;
    };
    let demo = demo();
    for (name, _) in &demo.profile.types {
        let table = gotool::pprof_top(&demo.file, name).unwrap();
        assert!(table.contains("flat%"), "-sample_index={name}:\n{table}");
    }
}

#[test]
fn perfusion_report_prints_top_folded_and_flame_of_its_own_file() {
    let Some(_turn) = begin_beside("demo::perfusion_report", RECORD_NET9) else { return };
    let demo = demo();
    let scratch = perfusion::Scratch::new().unwrap();
    let run = |args: &[&str]| {
        let outcome = perfusion::run(
            perfusion::command(["report"]).arg(&demo.file).args(args),
            perfusion::SLACK,
        )
        .unwrap();
        assert_eq!(outcome.code(), 0, "report {args:?}: {}", outcome.stderr);
        outcome.stdout
    };
    assert!(run(&[]).contains("Demo.Orders.PriceOrders"));
    let folded = run(&["--format", "folded", "--type", "cpu"]);
    let mut sum = 0;
    for line in folded.lines() {
        let (stack, value) = line.rsplit_once(' ').unwrap();
        assert!(!stack.is_empty(), "{line}");
        sum += value.parse::<i64>().unwrap();
    }
    assert_eq!(sum, demo.profile.sum("cpu", |_| true), "folded stacks must add up to the column");
    let orders = folded.lines().find(|line| line.contains("Demo.Orders.PriceOrders")).unwrap();
    let at = |part| orders.find(part).unwrap_or(usize::MAX);
    assert!(at("Demo.Orders.Run") < at("Demo.Orders.PriceOrders"), "root first: {orders}");
    let reasons = run(&["--type", "blocked", "--by", "wait_reason"]);
    assert!(
        reasons.starts_with("blocked by wait_reason: ") && reasons.contains("read:pipe"),
        "{reasons}"
    );
    let piped = format!(
        "exec {} report - -o - <{}",
        perfusion_bin().unwrap().display(),
        demo.file.display()
    );
    let piped = perfusion::run(Command::new("sh").args(["-c", &piped]), perfusion::SLACK).unwrap();
    assert_eq!((piped.code(), piped.stdout), (0, run(&[])), "{}", piped.stderr);
    let html = scratch.path("flame.html");
    run(&["--format", "flame", "-o", html.to_str().unwrap()]);
    let html = std::fs::read_to_string(html).unwrap();
    assert!(html.contains("PriceOrders"));
    for outside in ["src=\"http", "href=\"http", "@import", "src='http"] {
        assert!(
            !html.contains(outside),
            "the flame graph must be self-contained, but has {outside}"
        );
    }
}

on_runtimes!(
    cpu_and_allocations_of_one_method_meet_on_one_location: net9 Net9, net10 Net10; long: net8 Net8
);

fn cpu_and_allocations_of_one_method_meet_on_one_location(runtime: Runtime) {
    let needs = record_on(runtime);
    let Some(_turn) = begin_beside(&format!("demo::cpu_and_allocations_meet on {runtime}"), &needs)
    else {
        return;
    };
    // With lines each of them is a location.
    let profile = &record(runtime, Duration::from_secs(4), &["--no-lines"]).profile;
    let cpu = profile.locations("cpu", "Demo.Orders.PriceOrders");
    let allocated = profile.locations("alloc_space", "Demo.Orders.PriceOrders");
    assert!(
        cpu.intersection(&allocated).next().is_some(),
        "{runtime}: cpu {cpu:?}, alloc_space {allocated:?}"
    );
    assert!(
        cpu.len() == 1,
        "{runtime}: tiers and bodies of one method are one location, found {cpu:?}"
    );
    assert_unresolved_managed_share(profile, runtime);
}

/// Names come from the shim, for every body the stacks meet: what stays `[managed] 0x…` is a
/// failure of the look-up.
fn assert_unresolved_managed_share(profile: &Profile, runtime: Runtime) {
    let all = profile.sum("cpu", |_| true);
    let unresolved = profile.sum("cpu", |sample| sample.has("[managed]"));
    // 0.5 %: code that lives shorter than the look-up's way to the shim and back (dynamic methods
    // at start) has no name.
    assert!(
        unresolved * 200 <= all,
        "{runtime}: {unresolved} of {all} ns without names:\n{}",
        profile.describe("cpu", |sample| sample.has("[managed]"))
    );
}

on_runtimes!(
    threads_of_the_runtime_that_wait_for_work_are_parked: net9 Net9, net10 Net10; long: net8 Net8
);

fn threads_of_the_runtime_that_wait_for_work_are_parked(runtime: Runtime) {
    let needs = record_on(runtime);
    let Some(_turn) = begin_beside(&format!("demo::parked on {runtime}"), &needs) else { return };
    let recorded;
    let profile = if runtime == Runtime::Net9 {
        &demo().profile
    } else {
        recorded = record(runtime, Duration::from_secs(4), &[]);
        &recorded.profile
    };
    let blocked = |role: &str, kind: &str| {
        profile.sum("blocked", |sample| {
            sample.label("thread_role") == role && sample.label("wait_kind") == kind
        })
    };
    for role in ["runtime", "timer"] {
        let (parked, shown) = (blocked(role, "idle"), blocked(role, ""));
        // 5 %: a page fault, a lock of the kernel, and the wait whose beginning nobody saw.
        assert!(
            parked > shown * 20,
            "{runtime}: of {role} {parked} ns are parked, {shown} not:\n{}",
            profile.describe("blocked", |sample| sample.label("thread_role") == role
                && sample.label("wait_kind").is_empty())
        );
    }
    let misjudged = profile.sum("blocked", |sample| {
        sample.label("thread_role") == "app" && sample.label("thread_name").starts_with(".NET ")
    });
    assert_eq!(misjudged, 0, "{:?}", profile.sum_by("blocked", "thread_name"));
}

#[test]
fn waiting_methods_are_blocked_with_their_managed_callers() {
    let Some(_turn) = begin_beside("demo::waiting_methods", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let blocked =
        |chain: &[&str]| profile.sum("blocked", |sample| sample.positions(chain).is_some());
    let length = LENGTH.as_nanos() as i64;
    // Asleep 100 of every 100 ms and a bit, waiting for a byte 50 of 50: nearly all the time that
    // it does not wait for a CPU, on a busy machine. 90 % leaves room for the wait that was in
    // progress when the recording began, whose stack nobody saw (100 ms of 8 s).
    for (thread, chain) in [
        ("mailer", ["Demo.Mailer.Run", "Demo.Mailer.WaitForSlot"]),
        ("audit", ["Demo.Audit.Run", "Demo.Audit.ReadEntry"]),
    ] {
        let value = blocked(&chain);
        let queued = profile.sum("runnable", |sample| sample.label("thread_name") == thread);
        assert!(
            value > (length - queued) * 9 / 10 && value > length / 2,
            "{chain:?}: blocked {value} of {length} ns, for a CPU {queued}:\n{}",
            profile.describe("blocked", |_| true)
        );
    }
    // The lock is held 30 of 50 ms; its owner never waits for it long.
    let lock = blocked(&["Demo.Stock.Run", "Demo.Stock.WaitForShelf"]);
    assert!(
        lock > length * 4 / 10 && lock < length * 7 / 10,
        "waited {lock} of {length} ns for a lock held 60 % of the time"
    );
}

#[test]
fn a_generic_method_shows_its_real_type_argument() {
    let Some(_turn) = begin_beside("demo::a_generic_method", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let median: Vec<&str> = profile
        .functions()
        .into_iter()
        .filter(|name| name.contains("Demo.Statistics.Median"))
        .collect();
    assert!(
        median.iter().any(|name| name.contains("Demo.Money")),
        "Median is called with Demo.Money; found {median:?}"
    );
}

#[test]
fn an_async_method_has_its_readable_name() {
    let Some(_turn) = begin_beside("demo::an_async_method", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let cpu = profile.sum("cpu", |sample| sample.has("Demo.Frontend.HandleRequestAsync"));
    // As a function: the runtime's own generic methods carry the state machine as a type argument,
    // which is true.
    let generated: Vec<&str> = profile
        .functions()
        .into_iter()
        .filter(|name| {
            name.starts_with("Demo.Frontend") && name.contains("<HandleRequestAsync>d__")
        })
        .collect();
    assert!(
        cpu > 0,
        "no cpu in Demo.Frontend.HandleRequestAsync; the compiler's name for it: {generated:?}"
    );
    assert!(generated.is_empty(), "the compiler's name is shown: {generated:?}");
}

#[test]
fn a_native_function_sits_between_the_managed_ones_around_it() {
    let Some(_turn) = begin_beside("demo::a_native_function", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let inside = ["Demo.Codec.Run", "Demo.Codec.Encode", "shop_encode", "Demo.Codec.OnBlock"];
    assert!(
        has_cpu(profile, &inside).count() > 0,
        "no stack {inside:?}:\n{}",
        profile.describe("cpu", |s| s.has("Codec"))
    );
    let native = profile.sum("cpu", |sample| {
        sample.stack.last().is_some_and(|frame| frame.function.contains("shop_encode"))
    });
    let orphans = profile
        .sum("cpu", |sample| sample.has("shop_encode") && sample.positions(&inside[..3]).is_none());
    assert!(
        native > 0 && orphans == 0,
        "shop_encode's own cpu {native} ns, of which {orphans} ns without its managed caller"
    );
}

#[test]
fn garbage_collection_has_cpu_and_pauses_under_one_frame() {
    let Some(_turn) = begin_beside("demo::garbage_collection", RECORD_NET9) else { return };
    let profile = &demo().profile;
    let cpu = profile.sum("cpu", |sample| sample.has("Garbage Collector"));
    let pauses = profile.sum("gc_pause", |_| true);
    // 8 induced full collections of a few MiB: at least a tenth of a millisecond each, and less
    // than a tenth of the time in all.
    assert!(
        cpu > 800_000,
        "Garbage Collector has {cpu} ns of cpu:\n{}",
        profile.describe("cpu", |s| s.has("Collect"))
    );
    assert!(pauses > 800_000 && pauses < LENGTH.as_nanos() as i64 / 10, "gc_pause is {pauses} ns");
}

#[test]
fn threads_carry_their_full_managed_names() {
    let Some(_turn) = begin_beside("demo::threads_carry_their_names", RECORD_NET9) else { return };
    let walls = demo().profile.sum_by("wall", "thread_name");
    for name in [
        "orders",
        "statistics",
        "stock-owner",
        "stock-waiter",
        "mailer",
        "audit",
        "sessions",
        "payments",
        "housekeeping",
    ] {
        assert!(walls.get(name).is_some_and(|wall| *wall > 0), "no thread {name}: {walls:?}");
    }
}
