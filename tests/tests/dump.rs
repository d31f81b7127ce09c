//! `perfusion dump`: every thread now, with its stack, its state and its wait.

use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use serde_json::Value;
use system_tests::app::{compile_c, copy_program};
use system_tests::environment::{Need, RECORD, begin, begin_beside, long_form, record_on};
use system_tests::perfusion::{SLACK, Scratch, command, record_pid, run};
use system_tests::profile::{Frame, is_libc};
use system_tests::schedstat::sleeps;
use system_tests::single_file::Packing;
use system_tests::wait::{let_pass, wait_until};
use system_tests::{App, Outcome, Runtime, Sample, Workload, on_runtimes};

use crate::waits::CpuLimit;

fn dump(pid: u32, args: &[&str]) -> Outcome {
    let outcome = run(command(["dump", "--pid", &pid.to_string()]).args(args), SLACK).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    outcome
}

fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn thread(dump: &Value, tid: u32) -> &Value {
    let threads = dump["threads"].as_array().unwrap();
    threads
        .iter()
        .find(|thread| thread["tid"] == tid)
        .unwrap_or_else(|| panic!("no thread {tid}: {dump:#}"))
}

/// Functions of a stack, innermost first.
fn functions(thread: &Value) -> Vec<&str> {
    let stack = thread["stack"].as_array().unwrap();
    stack.iter().map(|frame| frame["function"].as_str().unwrap()).collect()
}

/// True when functions with these parts in their names stand in this order.
fn in_order(functions: &[&str], parts: &[&str]) -> bool {
    let mut rest = functions.iter();
    parts.iter().all(|part| rest.any(|function| function.contains(part)))
}

on_runtimes!(
    all_managed_threads_are_dumped_with_whole_stacks:
    net10 Net10, net10_musl Net10Musl; long: net8 Net8, net9 Net9
);

fn all_managed_threads_are_dumped_with_whole_stacks(runtime: Runtime) {
    let name = format!("dump::managed on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let started = Instant::now();
    let mut app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let ready = Instant::now();
    // So that 2 % are more than the scheduler's tick.
    let_pass(Duration::from_secs(2));
    let slept_before = ready.elapsed().as_secs_f64();
    let outcome = dump(app.pid(), &["--json"]);
    let most = started.elapsed().as_secs_f64();
    let dumped = json(&outcome);

    let asleep = thread(&dumped, app.thread("asleep"));
    let stack = functions(asleep);
    // Innermost first, down to the C library's start of the thread.
    let chain = [
        "futex",
        "Monitor.Wait",
        "TimedWaits.Program.AsleepInner",
        "TimedWaits.Program.AsleepOuter",
    ];
    assert!(in_order(&stack, &chain), "{asleep:#}");
    let root = asleep["stack"].as_array().unwrap().last().unwrap();
    assert!(is_libc(root["module"].as_str().unwrap()), "{root}");
    assert_eq!(
        (&asleep["state"], &asleep["wait_reason"]),
        (&"interruptible".into(), &"event".into())
    );
    let waiting = asleep["waiting_seconds"].as_f64().unwrap();
    assert!(
        waiting >= slept_before * 0.98 && waiting <= most * 1.02,
        "{slept_before} {waiting} {most}"
    );
    assert_eq!(asleep["at_least"], false);
    assert_eq!(asleep["name"], "asleep");
    for (name, method) in [
        ("wait-monitor", "TimedWaits.Program.WaitForLock"),
        ("wait-semaphore", "TimedWaits.Program.WaitForSemaphore"),
        ("wait-delay", "TimedWaits.Program.WaitForDelay"),
        ("wait-sleep", "TimedWaits.Program.Sleep"),
    ] {
        let waiter = thread(&dumped, app.thread(name));
        // Between two waits it writes down the time.
        let waits = ["lock", "semaphore", "task", "sleep", "futex"]
            .iter()
            .any(|reason| waiter["wait_reason"] == *reason);
        let place = if waits { method } else { "TimedWaits." };
        assert!(functions(waiter).iter().any(|function| function.contains(place)), "{waiter:#}");
    }
    let all = dumped["threads"].as_array().unwrap();
    assert_eq!(all[0]["tid"], app.pid(), "the first thread comes first");
    let of_sockets = all.iter().find(|thread| thread["name"] == ".NET Sockets").unwrap();
    assert!(in_order(&functions(of_sockets), &["epoll_wait", "EventLoop"]), "{of_sockets:#}");
    for runtimes_own in
        all.iter().filter(|thread| thread["name"].as_str().unwrap().starts_with(".NET "))
    {
        assert_ne!(runtimes_own["role"], "app", "{runtimes_own:#}");
    }
    let unnamed =
        all.iter().filter(|thread| functions(thread).iter().any(|name| name.contains("[managed]")));
    assert_eq!(unnamed.count(), 0, "{dumped:#}");
    app.ensure_alive().unwrap();

    let text = dump(app.pid(), &[]).stdout;
    let line = text.lines().find(|line| line.contains("\"asleep\"")).unwrap();
    assert!(line.contains("blocked for ") && line.contains(", event (interruptible)"), "{line}");
    app.stop().unwrap();
}

on_runtimes!(
    threads_that_never_get_their_lock_wait_for_a_lock:
    net8 Net8, net11 Net11, net11_musl Net11Musl; long: net9 Net9, net10 Net10
);

fn threads_that_never_get_their_lock_wait_for_a_lock(runtime: Runtime) {
    let name = format!("dump::deadlock on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    check_deadlock(&Workload::dotnet(runtime, "deadlock", &[]).unwrap());
}

#[test]
fn threads_of_a_single_file_program_that_never_get_their_lock_wait_for_a_lock() {
    let needs = [RECORD, &[Need::SingleFile(Runtime::Net9)]].concat();
    let Some(_turn) = begin_beside("dump::deadlock in a single file", &needs) else { return };
    check_deadlock(&Workload::single_file(Runtime::Net9, "deadlock", Packing::Plain).unwrap());
}

fn check_deadlock(workload: &Workload) {
    let app = workload.start().unwrap();
    let dumped = json(&dump(app.pid(), &["--json"]));
    for name in ["first", "second"] {
        let waiter = thread(&dumped, app.thread(name));
        let chain = ["futex", "Deadlock.Program.TakeOther", "Deadlock.Program.Take"];
        assert!(in_order(&functions(waiter), &chain), "{waiter:#}");
        assert_eq!(waiter["wait_reason"], "lock", "{waiter:#}");
    }
    app.stop().unwrap();
}

#[test]
fn a_thread_that_runs_is_dumped_where_it_was_just_seen() {
    let Some(_turn) = begin("dump::running", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("spin").start().unwrap();
    let outcome = dump(app.pid(), &["--json"]);
    let dumped = json(&outcome);
    let spin = thread(&dumped, app.thread("spin"));
    // It has a CPU or wants one; where, it shows itself at the next sample or when it loses the
    // CPU.
    assert!(matches!(spin["state"].as_str(), Some("running" | "runnable")), "{spin:#}");
    assert!(in_order(&functions(spin), &["spin", "run"]), "{spin:#}");
    // As `inspect unwind` takes it.
    let by_argument = run(command(["dump", &app.pid().to_string()]).arg("--json"), SLACK).unwrap();
    assert_eq!(json(&by_argument)["pid"], app.pid(), "{}", by_argument.stderr);
    let main = thread(&dumped, app.pid());
    assert!(in_order(&functions(main), &["read", "main", "_start"]), "{main:#}");
    assert_eq!(main["wait_reason"], "read:pipe");
    let explain = |frame: &Value| {
        let code = [&frame["code"]["target"], &frame["code"]["address"]]
            .map(|word| word.as_str().unwrap());
        let outcome = run(&mut command(["inspect", "unwind", code[0], code[1]]), SLACK).unwrap();
        assert_eq!(outcome.code(), 0, "{frame:#}: {}", outcome.stderr);
        outcome.stdout
    };
    let user = main["stack"].as_array().unwrap().iter().filter(|frame| !frame["code"].is_null());
    let explained: Vec<String> = user.map(explain).collect();
    let starts: Vec<bool> =
        explained.iter().map(|text| text.contains("the thread starts here")).collect();
    assert!(
        starts.len() >= 4 && starts.iter().rposition(|&starts| !starts) == Some(starts.len() - 2)
    );
    assert!(starts.last() == Some(&true) && explained.iter().all(|text| !text.contains("no rule")));
    app.stop().unwrap();
}

#[test]
fn a_process_whose_first_thread_has_ended_is_one_like_others() {
    let Some(_turn) = begin_beside("dump::first_ended", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("first-ended").start().unwrap();
    let pid = app.pid();
    let stat = format!("/proc/{pid}/stat");
    let ended = || fs::read_to_string(&stat).unwrap().contains(") Z ").then_some(());
    wait_until("the first thread to end", SLACK, ended).unwrap();
    // What a .NET process that was killed and had the pid before has left.
    let left = std::env::temp_dir().join(format!("dotnet-diagnostic-{pid}-1-socket"));
    let _listener = UnixListener::bind(&left).unwrap();

    let listed = run(command(["ps"]).arg("--json"), SLACK).unwrap();
    fs::remove_file(&left).unwrap();
    let rows = json(&listed);
    let row = rows.as_array().unwrap().iter().find(|row| row["pid"] == pid).expect("it is listed");
    assert_eq!(
        (&row["mode"], &row["runtime"]["kind"]),
        (&"native".into(), &"native".into()),
        "{row:#}"
    );
    assert!(row["command"].as_str().unwrap().ends_with("first-ended"), "{row:#}");

    let dumped = json(&dump(pid, &["--json"]));
    for (name, function) in [("asleep", "wait_asleep"), ("computes", "compute")] {
        let stack = functions(thread(&dumped, app.thread(name)));
        assert!(in_order(&stack, &[function, "run"]), "{name}: {dumped:#}");
    }

    let (profile, outcome) = record_pid(pid, Duration::from_secs(1), &["--no-attach"]).unwrap();
    for (name, function) in [("asleep", "wait_asleep"), ("computes", "compute")] {
        let tid = app.thread(name).to_string();
        let its = |sample: &Sample| sample.label("thread_id") == tid;
        let picture = || format!("{name}: {}\n{}", outcome.stderr, profile.describe("wall", its));
        let whole = |sample: &Sample| {
            let root = sample.stack.first().is_some_and(Frame::is_of_libc);
            its(sample) && root && sample.positions(&["run", function]).is_some()
        };
        let (all, seen) = (profile.sum("wall", its), profile.sum("wall", whole));
        assert!(all > 0 && seen * 10 >= all * 8, "{seen} of {all} ns:\n{}", picture());
    }
    app.stop().unwrap();
}

#[test]
fn a_real_time_threads_wait_is_never_understated() {
    let Some(_turn) = begin("dump::realtime", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("realtime").start().unwrap();
    if app.ready()["slept"] == 0 {
        let skipped = b"\nSKIPPED dump::realtime: the kernel refuses real-time threads here\n";
        std::io::stderr().write_all(skipped).unwrap();
        return;
    }
    // Longer than it has run in that class, 600 ms: less would be told as unknown for that reason
    // alone.
    let_pass(Duration::from_secs(2));
    let dumped = json(&dump(app.pid(), &["--json"]));
    // It has been reading since after the other one fell asleep.
    let main = thread(&dumped, app.pid())["waiting_seconds"].as_f64().unwrap();
    assert!(main >= 1.9, "{dumped:#}");
    let realtime = thread(&dumped, app.thread("realtime"));
    assert_eq!(realtime["wait_reason"], "sleep", "{realtime:#}");
    // The kernel does not note when such a thread left its CPU: then a least value is told as one.
    let waiting = realtime["waiting_seconds"].as_f64().unwrap();
    assert!(waiting >= main - 0.1 || realtime["at_least"] == true, "{main}: {realtime:#}");
    app.stop().unwrap();
}

#[test]
fn threads_that_want_a_cpu_are_told_from_the_one_that_has_it() {
    let Some(_turn) = begin("dump::starved", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("starved").start().unwrap();
    let ready = app.ready().as_object().unwrap();
    let names: Vec<&String> = ready.keys().filter(|name| *name != "wait-nap").collect();
    let right = |dumped: &Value| {
        let threads: Vec<&Value> =
            names.iter().map(|name| thread(dumped, app.thread(name))).collect();
        let running = threads.iter().filter(|thread| thread["state"] == "running").count();
        let starves = |thread: &&&Value| {
            thread["state"] == "runnable"
                && thread["wait_reason"] == "preempted"
                && thread["at_least"] == true
        };
        let placed = |thread: &&&Value| in_order(&functions(thread), &["want_cpu", "run"]);
        // They have one CPU. Some have waited for it since before the dump began.
        running <= 1
            && threads.iter().any(|thread| starves(&thread))
            && threads.iter().all(|t| placed(&t))
    };
    let mut last = Value::Null;
    // The kernel hides a switch now and then, and on a slow machine all of them may have had the
    // CPU meanwhile.
    let found = (0..10).any(|_| {
        last = json(&dump(app.pid(), &["--json"]));
        right(&last)
    });
    assert!(found, "{last:#}");
    app.stop().unwrap();
}

/// The thread that naps, in the first of many dumps in which it wants a CPU and fits.
fn napper(app: &App, fits: impl Fn(&Value) -> bool) -> Value {
    // It sleeps most of the time: one dump in some meets it so.
    let mut last = Value::Null;
    wait_until("a dump that meets it awake", 3 * SLACK, || {
        last = thread(&json(&dump(app.pid(), &["--json"])), app.thread("wait-nap")).clone();
        (last["state"] == "runnable" && fits(&last)).then(|| last.clone())
    })
    .unwrap_or_else(|error| panic!("{error}: {last:#}"))
}

#[test]
fn a_thread_that_was_woken_wants_a_cpu_for_less_long_than_it_slept_and_waited() {
    let Some(_turn) = begin("dump::woken", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("starved").start().unwrap();
    let found = napper(&app, |thread| !thread["woken_from"].is_null());
    // What it was in the middle of is written down when the next nap begins.
    let naps = || sleeps(app.pid(), app.thread("wait-nap")).unwrap();
    let before = naps();
    wait_until("the next nap", SLACK, || (naps() > before).then_some(())).unwrap();
    let truth = app.stop().unwrap();

    let times: Vec<i64> =
        truth["wait-nap"].as_array().unwrap().iter().map(|time| time.as_i64().unwrap()).collect();
    let longest = times.chunks_exact(2).map(|nap| nap[1] - nap[0]).max().unwrap() as f64 / 1e9;
    assert!(in_order(&functions(&found), &["nanosleep", "wait_nap", "run"]), "{found:#}");
    // Unless the tests run under a limit themselves.
    assert!(found["wait_reason"].is_null() || found["wait_reason"] == "throttled", "{found:#}");
    let from = &found["woken_from"];
    assert_eq!(from["wait_reason"], "sleep", "{found:#}");
    // It asks for 50 ms and never gets less; the scheduler's note of a sleep's begin before the
    // dump may be some milliseconds off.
    let (slept, waited) =
        (from["seconds"].as_f64().unwrap(), found["waiting_seconds"].as_f64().unwrap());
    assert!(slept >= 0.045 || from["at_least"] == true, "{found:#}");
    assert_eq!(found["at_least"], false, "it was woken while it was watched: {found:#}");
    assert!(
        slept + waited <= longest * 1.02 + 0.02,
        "{longest} s at most by its own clock: {found:#}"
    );
}

#[test]
fn a_thread_that_wakes_under_its_cgroups_limit_is_throttled() {
    let Some(_turn) = begin("dump::throttled", &[RECORD, &[Need::C]].concat()) else { return };
    let Some(limit) = CpuLimit::new() else {
        std::io::stderr()
            .write_all(b"\nSKIPPED dump::throttled: no cgroup CPU controller\n")
            .unwrap();
        return;
    };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("limited").start().unwrap();
    limit.hold(app.pid());
    let found = napper(&app, |thread| thread["wait_reason"] == "throttled");
    // Since 6.18 it gets a CPU when it wakes, and loses it before it returns to its own code: that
    // is no part of its nap.
    let from = &found["woken_from"];
    assert!(from.is_null() || from["wait_reason"] == "sleep", "{found:#}");
    app.stop().unwrap();
}

#[test]
fn what_cannot_be_dumped_is_said() {
    let Some(_turn) = begin_beside("dump::errors", RECORD) else { return };
    // Linux has no process with this id: PID_MAX_LIMIT is 4194304.
    let outcome = run(&mut command(["dump", "--pid", "4194305"]), SLACK).unwrap();
    assert_eq!(outcome.code(), 3, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("no process with pid 4194305"), "{}", outcome.stderr);
    let outcome = run(&mut command(["dump"]), SLACK).unwrap();
    assert_eq!(outcome.code(), 2, "{}", outcome.stderr);
}

#[test]
fn a_program_cannot_write_to_the_terminal_by_its_name() {
    let Some(_turn) = begin_beside("dump::names", &[RECORD, &[Need::C]].concat()) else { return };
    let scratch = Scratch::new().unwrap();
    let program = scratch.path("\u{1b}[31mred");
    copy_program(&compile_c("spin", "spin", &[]).unwrap(), &program).unwrap();
    let app = Workload::program(&program).start().unwrap();
    for args in [&[][..], &["--json"]] {
        let outcome = dump(app.pid(), args);
        assert!(
            !outcome.stdout.contains('\u{1b}') && outcome.stdout.contains("[31mred"),
            "{}",
            outcome.stdout
        );
        assert!(
            !outcome.stdout.contains("\\u001b"),
            "nor to whoever prints the JSON: {}",
            outcome.stdout
        );
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap();
    let code = maps.lines().find(|line| line.contains("r-xp") && line.contains("red")).unwrap();
    let address = format!("0x{}", code.split('-').next().unwrap());
    for args in [&[][..], &["--json"]] {
        let pid = app.pid().to_string();
        let mut inspect = command(["inspect", "unwind", &pid, &address]);
        let outcome = run(inspect.args(args), SLACK).unwrap();
        assert!(outcome.stdout.contains("[31mred"), "{} {}", outcome.stdout, outcome.stderr);
        assert!(
            !outcome.stdout.contains('\u{1b}') && !outcome.stdout.contains("\\u001b"),
            "{}",
            outcome.stdout
        );
    }
}

on_runtimes!(
    ten_thousand_threads_are_dumped_each_with_its_stack_and_name:
    net9 Net9; long: net8 Net8, net10 Net10
);

/// More than a scan of waiting threads takes in at once, while four threads keep the CPUs busy.
fn ten_thousand_threads_are_dumped_each_with_its_stack_and_name(runtime: Runtime) {
    let name = format!("dump::ten_thousand on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    // In the short form still more than a label once had values for.
    let count = if long_form() { 10_000 } else { 3_000 };
    let app = Workload::dotnet(runtime, "tenthousand", &[])
        .unwrap()
        .arg(count.to_string())
        .start()
        .unwrap();
    let started = Instant::now();
    let outcome = dump(app.pid(), &["--json"]);
    let took = started.elapsed();
    let dumped = json(&outcome);
    let threads = dumped["threads"].as_array().unwrap();
    let waiters: Vec<&Value> = threads
        .iter()
        .filter(|thread| thread["name"].as_str().unwrap().starts_with("waiter-"))
        .collect();
    let not_reached = dumped["threads_not_reached"].as_u64().unwrap();
    let without =
        threads.iter().filter(|thread| thread["no_stack"] == "not_reached").count() as u64;
    println!("{name}: {} threads in {took:.1?}, {not_reached} not reached", threads.len());
    assert_eq!(not_reached, without);
    // What was not reached is said.
    assert_eq!(
        outcome.stderr.contains(&format!(" {not_reached} of ")),
        not_reached > 0,
        "{}",
        outcome.stderr
    );
    // With four busy threads on few CPUs some may begin a wait of another kind in the last moment.
    assert!(not_reached <= 10, "{not_reached}: {}", outcome.stderr);
    assert_eq!(waiters.len(), count, "each has the name that its runtime has for it");
    let whole = waiters
        .iter()
        // From the C library that waits to the one that started the thread. Monitor.Wait is inlined
        // once WaitForPulse has been compiled again.
        .filter(|waiter| {
            let functions = functions(waiter);
            // Named where the C library's debug file is installed.
            let of_libc = |root: &&str| root.contains("libc.so") || root.contains("clone3");
            let root = functions.last().is_some_and(of_libc);
            root && in_order(&functions, &["pthread_cond_wait", "TenThousand.Program.WaitForPulse"])
        })
        .count();
    let others = waiters.iter().map(|waiter| functions(waiter).join(";"));
    let others: std::collections::BTreeSet<String> = others.collect();
    let others = others.into_iter().take(10).collect::<Vec<_>>().join("\n");
    assert!(
        whole + 10 >= count,
        "{whole} of {} with their stack: {}\n{others}",
        waiters.len(),
        outcome.stderr
    );

    // Each name is a label's value of its own.
    let mut app = app;
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("names.pb.gz");
    let recording = system_tests::Recording::of_pid(app.pid(), &file, &[]).unwrap();
    recording.await_session(&app).unwrap();
    app.perform("pulse").unwrap();
    let_pass(Duration::from_secs(3));
    recording.signal(rustix::process::Signal::INT).unwrap();
    recording.finish_well(SLACK).unwrap();
    let profile = system_tests::Profile::read(&file).unwrap();
    let names: std::collections::BTreeSet<&str> =
        profile.samples.iter().map(|sample| sample.label("thread_name")).collect();
    let waiters = names.iter().filter(|name| name.starts_with("waiter-")).count();
    assert!(
        waiters > count - 100 && !names.contains("[other]"),
        "{waiters} of {} names",
        names.len()
    );
}
