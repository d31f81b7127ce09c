//! `perfusion heap`: what is in the managed heap, and what holds it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use perfusion_dotnet::attach::ipc::{EventSubscription, listen, stop_listening};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::units::grouped;
use rustix::process::Signal;
use system_tests::environment::{Need, begin, begin_beside, long_form};
use system_tests::perfusion::{Recording, SLACK, Scratch, command, memory, run};
use system_tests::single_file::Packing;
use system_tests::{Outcome, Profile, Runtime, Sample, Workload, on_runtimes};

/// A kind of root that differs from runtime to runtime.
const THREAD_STATIC: &str = "thread-static";

/// What holds each class of `holders.cs`, how many objects of it there are, and names that stand on
/// the way, from the root on.
const HELD: [(&str, i64, &[&str]); 6] = [
    ("Holders.ByEvent", 1000, &["static field Holders.Feed.Changed", "System.EventHandler"]),
    (
        "Holders.ByTimer",
        200,
        &[
            "System.Threading.TimerQueueTimer",
            "System.Threading.TimerCallback",
            "Holders.Program+closure",
        ],
    ),
    (
        "Holders.ByTable",
        300,
        &[
            "static field Holders.Program.keys",
            "Holders.TableKey",
            "dependent handle (ConditionalWeakTable)",
        ],
    ),
    ("Holders.ByThreadStatic", 400, &[THREAD_STATIC, "Holders.ByThreadStatic[]"]),
    (
        "Holders.ByThreadLocal",
        600,
        &[
            "static field Holders.Program.local",
            "System.Threading.ThreadLocal<Holders.ByThreadLocal[]>",
        ],
    ),
    (
        "Holders.ByAsync",
        500,
        &["static field Holders.Program.gate", "Holders.Program.Hold(…)+async"],
    ),
];

fn heap(args: &[&str]) -> Outcome {
    let outcome = run(command(["heap"]).args(args), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    outcome
}

on_runtimes!(
    a_survey_names_what_holds_objects_and_leaves_the_app_as_it_was:
    net8 Net8, net10 Net10, net11 Net11, net10_musl Net10Musl, net11_musl Net11Musl;
    long: net9 Net9
);

fn a_survey_names_what_holds_objects_and_leaves_the_app_as_it_was(runtime: Runtime) {
    let name = format!("heap::a_survey on {runtime}");
    let Some(_turn) = begin_beside(&name, &[Need::Root, Need::Perfusion, Need::Clr(runtime)])
    else {
        return;
    };
    let mut app = Workload::dotnet(runtime, "holders", &[]).unwrap().start().unwrap();
    let (pid, scratch) = (app.pid().to_string(), Scratch::new().unwrap());
    let files = [scratch.path("before.pb.gz"), scratch.path("after.pb.gz")];
    let files = files.each_ref().map(|file| file.to_str().unwrap());
    let first = heap(&["--pid", &pid, "--rows", "1000", "--output", files[0]]);
    assert!(first.stderr.contains("the app was paused for "), "{}", first.stderr);

    let profile = Profile::read(files[0].as_ref()).unwrap();
    for (held, count, holders) in HELD {
        // Before .NET 9 the runtime tells no thread-static field from other things behind handles.
        let thread_static =
            if runtime == Runtime::Net8 { "handle (strong)" } else { "thread-static field" };
        let holders: Vec<&str> = holders
            .iter()
            .map(|&name| if name == THREAD_STATIC { thread_static } else { name })
            .collect();
        let of_type =
            |sample: &&Sample| sample.stack.last().is_some_and(|frame| frame.function == held);
        let samples: Vec<&Sample> = profile.samples.iter().filter(of_type).collect();
        let objects: i64 = samples.iter().map(|sample| profile.value(sample, "objects")).sum();
        assert_eq!(objects, count, "{held}: {}", first.stdout);
        for sample in samples {
            assert!(sample.positions(&holders).is_some(), "{held}: {}", sample.text());
        }
        let row = first
            .stdout
            .lines()
            .find(|line| line.ends_with(&format!("  {held}")))
            .expect(&first.stdout);
        assert!(row.contains(&format!(" {} ", grouped(count))), "{row}");
    }

    app.perform("grow").unwrap();
    heap(&["--pid", &pid, "--output", files[1]]);
    let diff = heap(&["--diff", files[0], files[1]]).stdout;
    let grown = diff.lines().find(|line| line.ends_with("  Holders.ByEvent")).expect(&diff);
    assert!(grown.contains(" +500 ") && grown.contains(" 1,500 "), "{diff}");
    assert!(diff.contains("static field Holders.Feed.Changed"), "{diff}");

    // Had a keyword been left on, the begin or end of any other session would make the runtime
    // collect.
    let target = ProcessHandle::open(app.pid()).unwrap();
    let what = EventSubscription { keywords: 1, level: 4, buffer_mib: 1 };
    let events = listen(&target, &what, Arc::new(AtomicBool::new(false)), SLACK).unwrap();
    stop_listening(&target, events.session(), SLACK).unwrap();
    let truth = app.stop().unwrap();
    let collections = |name: &str| truth[name].as_i64().unwrap();
    // Two surveys. Up to .NET 9 the runtime collects once more when it is told to stop.
    let expected = if runtime >= Runtime::Net10 { 2 } else { 4 };
    assert_eq!(collections("collections") - collections("collections_before"), expected, "{truth}");
}

#[test]
fn static_fields_of_a_single_file_program_have_their_class() {
    let needs =
        [Need::Root, Need::Perfusion, Need::Clr(Runtime::Net9), Need::SingleFile(Runtime::Net9)];
    let Some(_turn) = begin_beside("heap::single_file", &needs) else { return };
    for (packing, field) in [
        (Packing::Plain, "static field Holders.Feed.Changed"),
        // What the runtime has unpacked into its memory is not read.
        (Packing::Compressed, "static field Changed"),
    ] {
        let app =
            Workload::single_file(Runtime::Net9, "holders", packing).unwrap().start().unwrap();
        let text = heap(&["--pid", &app.pid().to_string(), "--rows", "1000"]).stdout;
        assert!(text.contains(&format!("    {field}\n")), "{text}");
        app.stop().unwrap();
    }
}

/// With server collections other threads walk than say that a collection begins, and their events
/// come in no order.
#[test]
fn a_survey_of_an_app_with_server_collections_is_whole() {
    let needs = [Need::Root, Need::Perfusion, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin_beside("heap::server_collections", &needs) else { return };
    let workload = Workload::dotnet(Runtime::Net9, "holders", &[]).unwrap();
    let app = workload.env("DOTNET_gcServer", "1").env("DOTNET_GCHeapCount", "4").start().unwrap();
    for _ in 0..3 {
        let text = heap(&["--pid", &app.pid().to_string(), "--rows", "1000"]).stdout;
        for (held, count, _) in HELD {
            let row = text.lines().find(|line| line.ends_with(&format!("  {held}"))).expect(&text);
            assert!(row.contains(&format!(" {} ", grouped(count))), "{row}");
        }
        assert!(text.contains("    static field Holders.Feed.Changed\n"), "{text}");
    }
    app.stop().unwrap();
}

#[test]
fn a_survey_that_is_interrupted_says_so_and_leaves_the_app_as_it_was() {
    let needs = [Need::Root, Need::Perfusion, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin_beside("heap::interrupted", &needs) else { return };
    let app = Workload::dotnet(Runtime::Net9, "holders", &[]).unwrap().start().unwrap();
    let pid = app.pid().to_string();
    // A machine may be so busy that a survey is over before anybody has seen it begin.
    let interrupted = (0..10).any(|_| {
        let mut survey = Recording::spawn(command(["heap"]).args(["--pid", &pid])).unwrap();
        survey.await_progress("is asked for a full collection", SLACK).unwrap();
        survey.signal(Signal::INT).unwrap();
        let outcome = survey.finish(SLACK).unwrap();
        // A busy runtime may not have answered within the time that a signal leaves.
        let ends = ["; it has its event settings back", "when it finds our sockets closed"];
        let all_said = outcome.stderr.contains(&format!("interrupted: process {pid} "))
            && ends.iter().any(|words| outcome.stderr.contains(words));
        assert!(outcome.code() == 0 || all_said, "{}", outcome.stderr);
        assert_eq!(outcome.code() == 0, !outcome.stdout.is_empty(), "{}", outcome.stdout);
        outcome.code() == 1
    });
    assert!(interrupted, "each was over before");
    let text = heap(&["--pid", &pid, "--rows", "1000"]).stdout;
    for (held, count, _) in HELD {
        let row = text.lines().find(|line| line.ends_with(&format!("  {held}"))).expect(&text);
        assert!(row.contains(&format!(" {} ", grouped(count))), "{row}");
    }
    app.stop().unwrap();
}

on_runtimes!(
    a_heap_of_very_many_objects_is_counted_within_its_memory:
    net10 Net10; long: net8 Net8, net9 Net9
);

/// In the long form 40 million objects, 4 GB of them, within the command's default of 1 GiB; else a
/// fortieth, within a sixteenth.
fn a_heap_of_very_many_objects_is_counted_within_its_memory(runtime: Runtime) {
    let name = format!("heap::very_many on {runtime}");
    let needs = [Need::Root, Need::Perfusion, Need::Clr(runtime)];
    // Where others take the CPUs the runtime has no room for so much that is not read yet.
    let Some(_turn) =
        (if long_form() { begin(&name, &needs) } else { begin_beside(&name, &needs) })
    else {
        return;
    };
    let (orders, limit_mib): (i64, u64) =
        if long_form() { (10_000_000, 1024) } else { (250_000, 64) };
    let slack = if long_form() { SLACK * 10 } else { SLACK };
    let app =
        Workload::dotnet(runtime, "orders", &[]).unwrap().arg(orders.to_string()).start().unwrap();
    let (begun, before) = (Instant::now(), memory(app.pid(), "VmRSS"));
    let mut survey = command(["heap"]);
    survey.args([
        "--pid",
        &app.pid().to_string(),
        "--memory",
        &limit_mib.to_string(),
        "--rows",
        "1000",
    ]);
    let survey = Recording::spawn(&mut survey).unwrap();
    // The most it had until then, so that the last look before its end is the one that counts.
    let (mut most, mut app_most) = (0, before);
    loop {
        let now = memory(survey.pid(), "VmHWM");
        if now == 0 && most > 0 || begun.elapsed() > slack {
            break;
        }
        most = most.max(now);
        app_most = app_most.max(memory(app.pid(), "VmRSS"));
        std::thread::sleep(Duration::from_millis(5));
    }
    let outcome = survey.finish_well(slack).unwrap();
    let took = begun.elapsed();
    for (of, count) in [("Orders.Order", orders), ("Orders.Line", 2 * orders)] {
        let row = outcome.stdout.lines().find(|line| line.ends_with(&format!("  {of}")));
        let row = row.unwrap_or_else(|| panic!("no {of}: {} {}", outcome.stdout, outcome.stderr));
        assert!(row.contains(&format!(" {} ", grouped(count))), "{row}");
    }
    assert!(most <= limit_mib, "{most} MiB of {limit_mib}: {}", outcome.stderr);
    // Where the runtime has no room for what is not read yet, the sums are no sums of the heap, and
    // say so.
    if !long_form() {
        let part = heap(&["--pid", &app.pid().to_string(), "--buffer", "16", "--quiet"]).stdout;
        let is_all = part.lines().any(|line| {
            line.ends_with("  Orders.Order") && line.contains(&format!(" {} ", grouped(orders)))
        });
        assert!(is_all != part.starts_with("NOT ALL of the heap, "), "{part}");
        println!("{name}: with a buffer of 16 MiB {}", part.lines().next().unwrap_or_default());
    }
    let truth = app.stop().unwrap();
    assert_eq!(truth["orders"].as_i64(), Some(orders), "{truth}");
    let paused =
        outcome.stderr.lines().find(|line| line.contains("paused for")).unwrap_or_default();
    println!(
        "{name}: {orders} orders in a heap of {} bytes: {took:.1?}, {most} MiB of {limit_mib} at \
         most, the app {before} to {app_most} MiB; {paused}\n{}",
        truth["heap_bytes"],
        outcome.stdout.lines().take(6).collect::<Vec<_>>().join("\n")
    );
}
