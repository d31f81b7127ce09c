//! Waits: what a thread waited for, how long and who ended it; and threads that slept before the
//! profiler came.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use system_tests::environment::{Need, RECORD, begin, begin_beside, perfusion_bin, record_on};
use system_tests::perfusion::{self, Recording, SLACK, Scratch, record_pid};
use system_tests::profile::Frame;
use system_tests::schedstat::{Log, Looks};
use system_tests::wait::let_pass;
use system_tests::{App, Profile, Runtime, Sample, Workload, on_runtimes, wait_until};

fn of_thread(tid: u32) -> impl Fn(&Sample) -> bool {
    let tid = tid.to_string();
    move |sample| sample.label("thread_id") == tid
}

on_runtimes!(
    a_thread_asleep_since_before_the_profiler_came_has_its_stack:
    net8 Net8, net11 Net11, net11_musl Net11Musl; long: net9 Net9, net10 Net10
);

fn a_thread_asleep_since_before_the_profiler_came_has_its_stack(runtime: Runtime) {
    let name = format!("waits::asleep_since_before on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let asleep = app.thread("asleep");
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(5), &[]).unwrap();
    app.stop().unwrap();

    let picture =
        || format!("{}\n{}", outcome.stderr, profile.describe("blocked", of_thread(asleep)));
    let all = profile.sum("wall", of_thread(asleep));
    assert!((all - profile.duration_ns).abs() * 100 <= profile.duration_ns, "{}", picture());
    // From the thread's start to where it sleeps, through the runtime, each frame with its name.
    let whole = |sample: &Sample| {
        let chain =
            ["TimedWaits.Program.AsleepOuter", "TimedWaits.Program.AsleepInner", "Wait", "futex"];
        let root = sample.stack.first().is_some_and(Frame::is_of_libc);
        of_thread(asleep)(sample)
            && root
            && sample.positions(&chain).is_some()
            && !sample.has("[managed]")
    };
    let seen =
        profile.sum("blocked", |sample| whole(sample) && sample.label("wait_reason") == "event");
    // All but what passed before the first look, which comes once the probes are in.
    assert!(seen * 100 >= all * 98, "{seen} of {all} ns:\n{}", picture());
    assert!(
        !profile
            .samples
            .iter()
            .any(|sample| of_thread(asleep)(sample) && sample.has("[waiting since before"))
    );
}

/// A kind of wait: the thread that does nothing else, the reason it must be given, and who must
/// have ended it.
struct Expected {
    thread: &'static str,
    reason: &'static str,
    ended_by: EndedBy,
}

/// A budget for the stack of every wait of these programs: what downsampling does is a matter of
/// other tests.
const ALL_STACKS: [&str; 2] = ["--wait-stack-mib", "64"];

enum EndedBy {
    Timer,
    /// The thread of this name in the `ready` line.
    Thread(&'static str),
    /// A thread with this kernel name.
    Named(&'static str),
    /// A child process, which has the name of the thread that made it.
    Child,
}

/// Nanoseconds of the waits the program wrote down, as far as they lie in the recording: begins and
/// ends since 1970.
fn own_account(truth: &serde_json::Value, thread: &str, profile: &Profile) -> i64 {
    let times: Vec<i64> =
        truth[thread].as_array().unwrap().iter().map(|time| time.as_i64().unwrap()).collect();
    let (first, last) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    times.chunks_exact(2).map(|wait| (wait[1].min(last) - wait[0].max(first)).max(0)).sum()
}

fn assert_wait(
    profile: &Profile,
    app: &[(&str, u32)],
    truth: &serde_json::Value,
    kernel: &Looks,
    expected: &Expected,
) {
    let tid = |name: &str| app.iter().find(|(thread, _)| *thread == name).unwrap().1;
    let this = of_thread(tid(expected.thread));
    let picture = || {
        let mut lines = String::new();
        for sample in profile.samples.iter().filter(|sample| this(sample)) {
            let value = |column| profile.value(sample, column);
            let (cpu, runnable, blocked) = (value("cpu"), value("runnable"), value("blocked"));
            let (reason, waker) = (sample.label("wait_reason"), sample.label("waker"));
            lines += &format!(
                "cpu {cpu} runnable {runnable} blocked {blocked} {reason} by {waker}: {}\n",
                sample.text()
            );
        }
        format!("{}: {lines}", expected.thread)
    };
    // A waker's name stands alone beside name and ids, and what is no thread has no ids.
    let apart = |sample: &Sample| {
        let (waker, name) = (sample.label("waker"), sample.label("waker_name"));
        let ids = waker.strip_prefix(name).and_then(|ids| ids.strip_prefix(' '));
        let is_ids = |ids: &str| ids.split('/').filter(|id| id.parse::<u32>().is_ok()).count() == 2;
        if matches!(waker, "" | "timer" | "interrupt" | "[other]") {
            name == waker
        } else {
            ids.is_some_and(is_ids)
        }
    };
    assert!(profile.samples.iter().all(apart), "{}", picture());
    let own = own_account(truth, expected.thread, profile) as f64;
    assert!(
        own > profile.duration_ns as f64 * 0.5,
        "it hardly waited: {own} ns by its own clock; {}",
        picture()
    );
    // Where the runtime's frames have no names (code that was replaced before anybody could ask),
    // the reason is the kernel's.
    let nameless = |sample: &Sample| {
        let unnamed = |frame: &Frame| {
            frame.function.starts_with("[managed]") || frame.function.starts_with("[truncated")
        };
        sample.label("wait_reason") == "futex" && sample.stack.iter().any(unnamed)
    };
    let is_of =
        |sample: &Sample| sample.label("wait_reason") == expected.reason || nameless(sample);
    let waited = |sample: &Sample| this(sample) && is_of(sample);
    let named = profile
        .sum("blocked", |sample| this(sample) && sample.label("wait_reason") == expected.reason);
    assert!(named > 0, "no wait has its reason; {}", picture());
    let blocked = profile.sum("blocked", waited) as f64;
    // By the program's clock a wait also has the way in and out of it: what this thread ran, and
    // what it waited for a CPU.
    let around = (profile.sum("cpu", &this) + profile.sum("runnable", &this)) as f64;
    assert!(
        blocked <= own * 1.02 && blocked + around >= own * 0.98,
        "{blocked} ns blocked for {}, {around} ns run and runnable, {own} ns by its own clock; {}",
        expected.reason,
        picture()
    );
    // None of it was anything else than blocked but what the kernel itself says the thread ran or
    // waited for a CPU. Not even that is in the kernel's account: its CPU was not run.
    let (begin, end) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    let wanted = kernel.wanted_cpu_between(tid(expected.thread), begin, end).unwrap() as f64;
    let stolen =
        profile.sum("runnable", |sample| this(sample) && sample.label("wait_reason") == "stolen");
    assert!(
        blocked >= own * 0.98 - wanted - stolen as f64,
        "{blocked} ns blocked for {}, {own} ns by its own clock; it had or wanted a CPU for \
         {wanted} ns, says the kernel, which was stolen for {stolen} ns; {}",
        expected.reason,
        picture()
    );
    // Beside others that want its CPU, a runtime that spins before it waits (`sched_yield`) may
    // hardly ever block: then by the kernel's account, too.
    if wanted > own * 0.5 {
        println!(
            "{} ran or wanted a CPU for {wanted} of {own} ns: too busy a machine to tell wakers",
            expected.thread
        );
        return;
    }
    let right = |waker: &str| match expected.ended_by {
        EndedBy::Timer => waker == "timer",
        EndedBy::Thread(name) => {
            waker.starts_with(name) && waker.ends_with(&format!("/{}", tid(name)))
        }
        EndedBy::Named(name) => waker.starts_with(name),
        EndedBy::Child => {
            waker.starts_with(expected.thread)
                && !waker.ends_with(&format!("/{}", tid(expected.thread)))
        }
    };
    let by_right =
        profile.sum("blocked", |sample| waited(sample) && right(sample.label("waker"))) as f64;
    // The waits that the recording's start and end cut are not counted: nobody had ended the last
    // one.
    assert!(
        by_right >= blocked * 0.9,
        "{by_right} of {blocked} ns ended by the right one; {}",
        picture()
    );
}

#[test]
fn native_waits_have_their_length_reason_and_waker() {
    use EndedBy::{Child, Thread, Timer};
    let Some(_turn) = begin("waits::native", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().start().unwrap();
    let threads = thread_ids(&app);
    let kernel = Log::start(app.pid());
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(5), &ALL_STACKS).unwrap();
    let kernel = kernel.stop();
    let truth = app.stop().unwrap();
    let wait = |thread, reason, ended_by| Expected { thread, reason, ended_by };
    for expected in [
        wait("wait-sleep", "sleep", Timer),
        wait("wait-poll", "poll", Timer),
        wait("wait-select", "select", Timer),
        wait("wait-epoll", "epoll", Timer),
        wait("wait-futex", "futex", Thread("end-futex")),
        wait("wait-pipe", "read:pipe", Thread("end-pipe")),
        wait("wait-socket", "read:socket", Thread("end-socket")),
        wait("wait-accept", "accept", Thread("end-accept")),
        wait("wait-child", "wait_child", Child),
        wait("wait-fault", "page_fault", Thread("end-fault")),
    ] {
        assert_wait(&profile, &borrowed(&threads), &truth, &kernel, &expected);
    }
}

on_runtimes!(
    managed_waits_have_their_length_reason_and_waker:
    net8 Net8, net11 Net11, net11_musl Net11Musl; long: net9 Net9, net10 Net10
);

fn managed_waits_have_their_length_reason_and_waker(runtime: Runtime) {
    use EndedBy::{Named, Thread, Timer};
    let name = format!("waits::managed on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let threads = thread_ids(&app);
    let kernel = Log::start(app.pid());
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(5), &ALL_STACKS).unwrap();
    let kernel = kernel.stop();
    let truth = app.stop().unwrap();
    let wait = |thread, reason, ended_by| Expected { thread, reason, ended_by };
    for expected in [
        wait("wait-monitor", "lock", Thread("lock-holder")),
        wait("wait-semaphore", "semaphore", Thread("releaser")),
        // The runtime's timer thread or a worker of the pool completes the task.
        wait("wait-delay", "task", Named(".NET T")),
        wait("wait-sleep", "sleep", Timer),
        wait("wait-condition", "condition", Timer),
        wait("wait-join", "join", Timer),
        wait("wait-event", "event", Timer),
        wait("wait-optimised", "event", Timer),
        wait("wait-barrier", "barrier", Timer),
        wait("wait-writer", "lock", Timer),
    ] {
        assert_wait(&profile, &borrowed(&threads), &truth, &kernel, &expected);
    }
    // The pool's threads wait for work, which is hidden, and none of the program's does.
    let of_pool = |sample: &Sample| sample.label("thread_role") == "threadpool";
    let idle = profile.sum("blocked", |sample| {
        of_pool(sample)
            && sample.label("wait_reason") == "thread_pool"
            && sample.label("wait_kind") == "idle"
    });
    assert!(idle > 0, "{}", profile.describe("blocked", of_pool));
    let ids: BTreeSet<String> = threads.iter().map(|(_, tid)| tid.to_string()).collect();
    let hidden = |sample: &Sample| {
        ids.contains(sample.label("thread_id")) && sample.label("wait_kind") == "idle"
    };
    assert_eq!(profile.sum("blocked", hidden), 0, "{}", profile.describe("blocked", hidden));
}

/// Nearly all the ended waits of a thread must have this chain, root first: where it waited,
/// `[woken by]`, what ended it.
fn assert_woken(profile: &Profile, thread: (&str, u32), chain: &[&str], why: &str) {
    let this = of_thread(thread.1);
    let ended = |sample: &Sample| this(sample) && !sample.label("waker").is_empty();
    let chained = |sample: &Sample| ended(sample) && sample.positions(chain).is_some();
    let (all, right) = (profile.sum("blocked", ended), profile.sum("blocked", chained));
    assert!(
        all > 0 && right * 10 >= all * 9,
        "{}: {right} of {all} ns by {chain:?}\n{why}\n{}",
        thread.0,
        profile.describe("blocked", &this)
    );
    let wall = profile.sum("wall", &this);
    assert!(
        (wall - profile.duration_ns).abs() * 100 <= profile.duration_ns,
        "{}: {wall} ns in all, of {}",
        thread.0,
        profile.duration_ns
    );
}

#[test]
fn a_wait_shows_the_stack_that_ended_it() {
    let Some(_turn) = begin("waits::waker_stacks", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().start().unwrap();
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("wakers.pb.gz");
    let args = ["--duration", "3s", "--waker-stacks"];
    let outcome = Recording::of_pid(app.pid(), &file, &args).unwrap().finish_well(SLACK).unwrap();
    let threads = thread_ids(&app);
    app.stop().unwrap();
    let profile = Profile::read(&file).unwrap();

    let by_thread: [(&str, &[&str]); 5] = [
        ("wait-futex", &["wait_futex", "futex_wait", "[woken by]", "futex_wake", "end_futex"]),
        ("wait-pipe", &["wait_pipe", "pipe_read", "[woken by]", "pipe_write", "end_pipe"]),
        ("wait-socket", &["wait_socket", "[woken by]", "unix_stream_sendmsg", "end_socket"]),
        ("wait-accept", &["wait_accept", "[woken by]", "unix_stream_connect", "end_accept"]),
        (
            "wait-fault",
            &["wait_fault", "handle_userfault", "[woken by]", "userfaultfd", "end_fault"],
        ),
    ];
    for (name, chain) in by_thread {
        let tid = app_thread(&threads, name);
        assert_woken(&profile, (name, tid), chain, &outcome.stderr);
        // The start of the waker's thread is the outermost of all.
        let woken = |sample: &&Sample| of_thread(tid)(sample) && sample.positions(chain).is_some();
        let at_its_start = |sample: &Sample| sample.stack.last().unwrap().is_of_libc();
        assert!(profile.samples.iter().filter(woken).all(at_its_start), "{name}");
    }
    let sleeper = app_thread(&threads, "wait-sleep");
    let timer = ["wait_sleep", "[woken by]", "[timer]"];
    assert_woken(&profile, ("wait-sleep", sleeper), &timer, &outcome.stderr);
    let counter = |name| profile.counter(name).unwrap_or(0);
    assert!(counter("waker_stacks") > 0, "{}", outcome.stderr);
    assert_eq!(counter("waker_stacks"), counter("waker_stacks_stored"), "{}", outcome.stderr);

    // The table is about those who waited; the folded stacks have both.
    let report = |args: &[&str]| {
        let only = format!("thread_id={}", app_thread(&threads, "wait-futex"));
        let mut command = perfusion::command(["report", "--type", "blocked", "--only", &only]);
        perfusion::run(command.args(args).arg(&file), SLACK).unwrap().stdout
    };
    let (table, folded) = (report(&["--sort", "cum"]), report(&["--format", "folded"]));
    assert!(table.contains("wait_futex") && !table.contains("end_futex"), "{table}");
    assert!(folded.contains(";wait_futex;") && folded.contains(";end_futex;"), "{folded}");
    let words: Vec<&str> = table.split_whitespace().collect();
    assert!(
        words.join(" ").contains(&format!("wait stacks: {}", wait_stacks(&profile))),
        "{table}"
    );
}

on_runtimes!(a_managed_wait_shows_the_method_that_released_it: net10 Net10);

fn a_managed_wait_shows_the_method_that_released_it(runtime: Runtime) {
    let name = format!("waits::managed_waker_stacks on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let threads = thread_ids(&app);
    let (profile, outcome) = record_pid(
        app.pid(),
        Duration::from_secs(4),
        &["--waker-stacks", "--wait-stack-mib", "64"],
    )
    .unwrap();
    app.stop().unwrap();
    let chains: [(&str, &[&str]); 2] = [
        (
            "wait-monitor",
            &["WaitForLock", "futex_wait", "[woken by]", "futex_wake", "Program.HoldLock"],
        ),
        (
            "wait-semaphore",
            &["WaitForSemaphore", "[woken by]", "SemaphoreSlim.Release", "TimedWaits.Program"],
        ),
    ];
    for (name, chain) in chains {
        assert_woken(&profile, (name, app_thread(&threads, name)), chain, &outcome.stderr);
    }
}

fn app_thread(threads: &[(String, u32)], name: &str) -> u32 {
    threads.iter().find(|(thread, _)| thread == name).unwrap().1
}

fn thread_ids(app: &App) -> Vec<(String, u32)> {
    let ready = app.ready().as_object().unwrap();
    ready.keys().map(|name| (name.clone(), app.thread(name))).collect()
}

fn borrowed(threads: &[(String, u32)]) -> Vec<(&str, u32)> {
    threads.iter().map(|(name, tid)| (name.as_str(), *tid)).collect()
}

#[test]
fn a_long_wait_has_its_stack_though_the_sampler_keeps_one_in_many() {
    let Some(_turn) = begin("waits::downsampled", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("storm").start().unwrap();
    let sleeper = app.thread("wait-long");
    // The least budget: hundreds of thousands of switches a second share it.
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(9), &["--wait-stack-mib", "1"]).unwrap();
    let truth = app.stop().unwrap();

    let picture =
        || format!("{}\n{}", outcome.stderr, profile.describe("blocked", of_thread(sleeper)));
    let counter = |name| profile.counter(name).unwrap();
    let (all, kept) = (counter("waits"), counter("waits_stored"));
    assert!(
        kept * 5 < all,
        "{kept} of {all} waits kept: not downsampled enough to tell\n{}",
        picture()
    );
    // The probability that the profile states is that of all waits.
    let stated = wait_stacks(&profile);
    let words: Vec<&str> = stated.split([' ', ',', ';']).collect();
    let number = |at: usize| words[at].parse::<f64>().unwrap();
    let probability = words.iter().position(|word| *word == "probability:").unwrap() + 1;
    let (least, most, mean) =
        (number(probability), number(probability + 2), number(probability + 4));
    assert!(
        least < mean && mean < most && most <= 1.0 && stated.ends_with("few waits"),
        "{stated}"
    );
    let truth_of_all = kept as f64 / all as f64;
    assert!(
        (mean - truth_of_all).abs() <= truth_of_all * 0.2,
        "{kept} of {all}: {stated}\n{}",
        picture()
    );
    let this = of_thread(sleeper);
    let own = own_account(&truth, "wait-long", &profile) as f64;
    let there = |sample: &Sample| {
        this(sample) && sample.has("wait_long") && sample.label("wait_reason") == "sleep"
    };
    // Each of its waits lasts longer than the time between two scans: none depends on the sampler,
    // and none weighs more than itself. The program has written down the wait that the recording's
    // end cut, if it ended before the program did.
    let all = profile.sum("blocked", there) as f64;
    let ended =
        profile.sum("blocked", |sample| there(sample) && !sample.label("waker").is_empty()) as f64;
    assert!(
        ended <= own * 1.02 && all >= own * 0.95,
        "{all} ns, of which {ended} in waits that ended, and {own} ns by its own clock:\n{}",
        picture()
    );
    // All times stay exact, whatever was downsampled.
    let wall = profile.sum("wall", &this);
    assert!(
        (wall - profile.duration_ns).abs() * 100 <= profile.duration_ns,
        "{wall} ns:\n{}",
        picture()
    );
}

/// What a profile says of the probability with which waits kept their stacks.
fn wait_stacks(profile: &Profile) -> &str {
    profile.comments.iter().find_map(|comment| comment.strip_prefix("wait stacks: ")).unwrap()
}

#[test]
fn a_thread_that_waits_now_and_then_loses_no_wait_to_the_sampler() {
    let Some(_turn) = begin("waits::now_and_then", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("storm").start().unwrap();
    let waiter = app.thread("wait-turns");
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(6), &[]).unwrap();
    let truth = app.stop().unwrap();

    let picture =
        || format!("{}\n{}", outcome.stderr, profile.describe("blocked", of_thread(waiter)));
    let counter = |name| profile.counter(name).unwrap();
    let (all, kept) = (counter("waits"), counter("waits_stored"));
    assert!(
        kept * 5 < all,
        "{kept} of {all} waits kept: not downsampled enough to tell\n{}",
        picture()
    );
    // It has some 20 waits a second, of four kinds in turn. Were some of them left to chance, the
    // others would stand for them, of whatever kind they are.
    let waits: Vec<&[serde_json::Value]> =
        truth["wait-turns"].as_array().unwrap().chunks_exact(2).collect();
    let (begin, end) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    for (turn, reason) in ["sleep", "poll", "select", "epoll"].into_iter().enumerate() {
        let own: i64 = waits
            .iter()
            .skip(turn)
            .step_by(4)
            .map(|wait| {
                (wait[1].as_i64().unwrap().min(end) - wait[0].as_i64().unwrap().max(begin)).max(0)
            })
            .sum();
        let of_kind =
            |sample: &Sample| of_thread(waiter)(sample) && sample.label("wait_reason") == reason;
        let seen = profile.sum("blocked", of_kind) + profile.sum("runnable", of_kind);
        assert!(own > profile.duration_ns / 10, "{own} ns of {reason}: too busy a machine to tell");
        assert!(
            (seen - own).abs() * 50 <= own,
            "{reason}: {seen} ns, {own} by its own clock\n{}",
            picture()
        );
    }
}

/// What a kept wait stands for is 1/p, and one when it was scanned. If those the sampler did not
/// keep are scanned less often, the others stand for too little in the mean.
#[test]
fn a_process_that_changes_its_mappings_puts_off_the_scans_to_all_its_waits() {
    let Some(_turn) = begin("waits::mappings", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("mappings").start().unwrap();
    // The sampler keeps every other wait, once the threads have had their first ones.
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(6), &["--wait-stacks-one-in", "2"]).unwrap();
    app.stop().unwrap();
    assert!(
        wait_stacks(&profile).ends_with("; their probability: 0.5; fixed at 1 in 2"),
        "{}",
        outcome.stderr
    );
    let counter = |name| profile.counter(name).unwrap();
    let (scanned, deferred) = (counter("off_cpu_scanned"), counter("off_cpu_deferred"));
    assert!(scanned >= 100, "{scanned} scans\n{}", outcome.stderr);
    // Nearly always somebody has the lock. Half of the waits are kept: were they not put off, half
    // would be left.
    assert!(
        deferred * 10 >= scanned * 7,
        "{deferred} of {scanned} scans put off\n{}",
        outcome.stderr
    );
}

#[test]
fn a_new_threads_first_wait_is_for_a_cpu() {
    let Some(_turn) = begin("waits::new_threads", &[RECORD, &[Need::C]].concat()) else { return };
    let (workload, scratch) =
        (Workload::native("waits", &["-pthread"]).unwrap(), Scratch::new().unwrap());
    let file = scratch.path("new.pb.gz");
    let before: [OsString; 5] =
        ["--quiet".into(), "record".into(), "-o".into(), file.clone().into(), "--".into()];
    let recorder = Workload::program(perfusion_bin().unwrap());
    let recorder = before.into_iter().chain(workload.command_line()).fold(recorder, Workload::arg);
    // The program has the recorder's standard input and output.
    let mut app = recorder.spawn().unwrap();
    app.await_ready().unwrap();
    app.stop().unwrap();
    let profile = Profile::read(&file).unwrap();
    let of = |marker: &'static str| profile.samples.iter().filter(move |sample| sample.has(marker));
    let older: Vec<String> = of("[waiting since before").map(Sample::text).collect();
    assert!(older.is_empty(), "nothing is older than the program: {older:?}");
    let new: BTreeSet<&str> = of("[not yet run]").map(|sample| sample.label("thread_id")).collect();
    assert!(new.len() >= 10, "of its 15 threads only {new:?} waited for a first CPU");
    for sample in of("[not yet run]") {
        assert_eq!(
            (sample.label("wait_reason"), profile.value(sample, "blocked")),
            ("preempted", 0)
        );
    }
}

#[test]
fn a_short_recording_keeps_more_stacks_than_a_long_ones_share_and_loses_none() {
    let Some(_turn) = begin("waits::allowance", &[RECORD, &[Need::C]].concat()) else { return };
    for (storm, least) in [("storm", 5_000), ("deep-storm", 0)] {
        let app = Workload::native("waits", &["-pthread"]).unwrap().arg(storm).start().unwrap();
        let recorded = || record_pid(app.pid(), Duration::from_secs(1), &[]).unwrap();
        // A storm that hardly gets its CPU has not much to keep.
        let storms = |profile: &Profile| profile.sum("cpu", |_| true) * 2 > profile.duration_ns;
        let (profile, outcome) = (0..10)
            .map(|_| recorded())
            .find(|(profile, _)| storms(profile))
            .expect("a CPU for half a second");
        app.stop().unwrap();
        let counter = |name: &str| profile.counter(name).unwrap();
        let (all, kept) = (counter("waits"), counter("waits_stored"));
        let picture = format!("{storm}: {kept} of {all} waits kept\n{}", outcome.stderr);
        // While something is left of what the start adds, up to 2 MiB in each of ten intervals, all
        // 6 MiB of the second may be its threads': 3,000 stacks of about a kilobyte, and as much
        // for the work, and up to 10,000 by what is added.
        assert!(kept >= all.min(least), "{picture}");
        // Each of them found room in the ring. Where the recorder gets no CPU for a third of a
        // second some do not.
        let lost: i64 = ["waits_ring_full", "wait_ends_ring_full", "cpu_samples_ring_full"]
            .map(counter)
            .iter()
            .sum();
        assert!(lost * 20 <= kept, "{lost} lost: {picture}");
    }
}

#[test]
fn a_stack_whose_pages_a_userfaultfd_holds_back_holds_up_nobody() {
    let Some(_turn) = begin("waits::faulty_stack", &[RECORD, &[Need::C]].concat()) else { return };
    let app =
        Workload::native("waits", &["-pthread"]).unwrap().arg("faulty-stack").start().unwrap();
    let (faulty, asleep) = (app.thread("faulty-stack"), app.thread("asleep"));
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(6), &[]).unwrap();
    app.stop().unwrap();

    let picture = || format!("{}\n{}", outcome.stderr, profile.describe("blocked", |_| true));
    // It is scanned first, and nobody ever fills its pages: the copy ends there, and the thread
    // after it has its stack.
    let whole = |sample: &Sample| of_thread(asleep)(sample) && sample.has("wait_asleep");
    let seen = profile.sum("blocked", whole);
    assert!(seen * 10 >= profile.duration_ns * 9, "{seen} ns:\n{}", picture());
    let kernel =
        |sample: &Sample| of_thread(faulty)(sample) && sample.label("wait_reason") == "sleep";
    let seen = profile.sum("blocked", kernel);
    assert!(
        seen * 10 >= profile.duration_ns * 9,
        "{seen} ns of the one with the faulty stack:\n{}",
        picture()
    );
}

#[test]
fn a_sleeping_thread_has_its_stack_however_large_it_is() {
    let Some(_turn) = begin_beside("waits::large_frame", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let workload = Workload::native("waits", &["-pthread"]).unwrap().arg("large-frame");
    let app = workload.start().unwrap();
    for name in LARGE.map(|(name, _)| name) {
        await_sleep(&app, name);
    }
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(1), &["--no-attach"]).unwrap();
    assert_large_stacks(&profile, &app, 900_000_000, &outcome.stderr);
    app.stop().unwrap();

    // Threads that begin to sleep while they are recorded, of whose functions nothing is known yet.
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("large.pb.gz");
    let before: [OsString; 6] = [
        "--quiet".into(),
        "record".into(),
        "--no-attach".into(),
        "-o".into(),
        file.clone().into(),
        "--".into(),
    ];
    let recorder = Workload::program(perfusion_bin().unwrap());
    let recorder = before.into_iter().chain(workload.command_line()).fold(recorder, Workload::arg);
    let mut app = recorder.spawn().unwrap();
    app.await_ready().unwrap();
    let_pass(Duration::from_secs(1));
    app.send_stop();
    let status = app.await_exit(SLACK).unwrap();
    assert!(status.success(), "{status}");
    assert_large_stacks(&Profile::read(&file).unwrap(), &app, 500_000_000, "");
}

/// Threads of the workload `large-frame`, and the function that makes the stack large.
const LARGE: [(&str, &str); 3] = [
    ("large-frame", "wait_in_large_frame"),
    ("huge-frame", "wait_in_huge_frame"),
    ("recursion", "recurse"),
];

fn await_sleep(app: &App, thread: &str) {
    let wchan = format!("/proc/{}/task/{}/wchan", app.pid(), app.thread(thread));
    let sleeps = || fs::read_to_string(&wchan).unwrap_or_default().contains("nanosleep");
    wait_until("the thread to sleep", SLACK, || sleeps().then_some(())).unwrap();
}

fn assert_large_stacks(profile: &Profile, app: &App, least: i64, log: &str) {
    for (name, function) in LARGE {
        let asleep = |sample: &Sample| {
            of_thread(app.thread(name))(sample) && sample.label("wait_reason") == "sleep"
        };
        let picture = || {
            format!("{name}: {log}\n{}", profile.describe("blocked", of_thread(app.thread(name))))
        };
        let whole = |sample: &Sample| {
            let root = sample.stack.first().is_some_and(Frame::is_of_libc);
            let depth = sample.stack.iter().filter(|frame| frame.function == "recurse").count();
            root && sample.has(function) && depth == if name == "recursion" { 301 } else { 0 }
        };
        let all = profile.sum("blocked", asleep);
        let seen = profile.sum("blocked", |sample| asleep(sample) && whole(sample));
        assert!(all > least && seen * 100 >= all * 99, "{seen} of {all} ns:\n{}", picture());
    }
}

#[test]
fn a_signal_handler_on_a_stack_of_its_own_is_followed_to_what_it_interrupted() {
    let Some(_turn) = begin_beside("waits::handlers", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("handlers").start().unwrap();
    for name in ["wait-below", "wait-above"] {
        await_sleep(&app, name);
    }
    let options = ["--no-attach", "--frequency", "999"];
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(2), &options).unwrap();
    for (name, column, innermost, percent) in [
        ("wait-below", "blocked", "handle_sleep", 99),
        ("wait-above", "blocked", "handle_sleep", 99),
        // Until the probes have learnt the way, which takes a busy machine a while, the daemon has
        // the handler's stack only, and by the time it comes to read on the nap is over.
        ("naps-below", "blocked", "handle_naps", 30),
        ("computes-below", "cpu", "handle_compute", 30),
        ("computes-above", "cpu", "handle_compute", 30),
    ] {
        let this = of_thread(app.thread(name));
        let picture = || format!("{name}: {}\n{}", outcome.stderr, profile.describe(column, &this));
        let whole = |sample: &Sample| {
            let root = sample.stack.first().is_some_and(Frame::is_of_libc);
            root && sample.positions(&["run", "interrupted", innermost]).is_some()
        };
        let all = profile.sum(column, &this);
        let seen = profile.sum(column, |sample| this(sample) && whole(sample));
        assert!(
            all > 100_000_000 && seen * 100 >= all * percent,
            "{seen} of {all} ns:\n{}",
            picture()
        );
        let lies = profile.sum("wall", |sample| this(sample) && sample.has("no unwind rule"));
        assert_eq!(lies, 0, "{}", picture());
    }
    app.stop().unwrap();
}

#[test]
fn a_coroutines_stack_ends_where_the_c_library_began_it() {
    let Some(_turn) = begin_beside("waits::coroutine", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("coroutine").start().unwrap();
    await_sleep(&app, "coroutine");
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(1), &["--no-attach"]).unwrap();
    let its = of_thread(app.thread("coroutine"));
    let picture = || format!("{}\n{}", outcome.stderr, profile.describe("blocked", &its));
    let whole = |sample: &Sample| {
        let [root, function, ..] = &*sample.stack else { return false };
        let asleep = sample.positions(&["in_coroutine", "nanosleep"]).is_some();
        root.is_of_libc() && function.function == "in_coroutine" && asleep
    };
    let all =
        profile.sum("blocked", |sample| its(sample) && sample.label("wait_reason") == "sleep");
    let seen = profile.sum("blocked", |sample| its(sample) && whole(sample));
    assert!(all > 500_000_000 && seen * 100 >= all * 99, "{seen} of {all} ns:\n{}", picture());
    app.stop().unwrap();
}

#[test]
fn a_kernels_worker_that_serves_a_process_has_a_kernel_stack_and_no_other() {
    let Some(_turn) = begin_beside("waits::uring", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("uring").start().unwrap();
    if app.ready()["served"] == 0 {
        let skipped = b"\nSKIPPED waits::uring: the kernel has no io_uring for this process\n";
        std::io::stderr().write_all(skipped).unwrap();
        return;
    }
    let workers = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", app.pid())).unwrap();
        let tids = tasks.filter_map(|task| task.unwrap().file_name().to_str()?.parse::<u32>().ok());
        let comm = |tid: &u32| fs::read_to_string(format!("/proc/{}/task/{tid}/comm", app.pid()));
        tids.filter(|tid| comm(tid).is_ok_and(|comm| comm.starts_with("iou-wrk")))
            .collect::<Vec<u32>>()
    };
    let worker = wait_until("the worker", SLACK, || workers().first().copied()).unwrap();
    let (profile, outcome) =
        record_pid(app.pid(), Duration::from_secs(1), &["--no-attach"]).unwrap();
    let its = of_thread(worker);
    let picture = || format!("{}\n{}", outcome.stderr, profile.describe("wall", &its));
    let lies =
        |sample: &Sample| its(sample) && (sample.has("truncated") || sample.has("[unknown]"));
    assert_eq!(profile.sum("wall", lies), 0, "{}", picture());
    let kernel = |sample: &Sample| {
        sample.stack.first().is_some_and(|frame| frame.mapping.contains("[kernel"))
    };
    let seen = profile.sum("wall", |sample| its(sample) && kernel(sample));
    let all = profile.sum("wall", &its);
    assert!(all > 0 && seen * 10 >= all * 8, "{seen} of {all} ns:\n{}", picture());
    app.stop().unwrap();
}

#[test]
fn a_thread_that_waits_for_a_new_page_of_its_stack_has_its_stack() {
    let Some(_turn) = begin("waits::new_stack", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("new-stack").start().unwrap();
    let (grows, fills) = (app.thread("wait-stack"), app.thread("end-stack"));
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
    let truth = app.stop().unwrap();

    let waiting =
        |sample: &Sample| of_thread(grows)(sample) && sample.label("wait_reason") == "page_fault";
    let picture =
        || format!("{}\n{}", outcome.stderr, profile.describe("blocked", of_thread(grows)));
    let (own, blocked) =
        (own_account(&truth, "wait-stack", &profile), profile.sum("blocked", waiting));
    assert!(blocked * 10 >= own * 9, "{blocked} of {own} ns:\n{}", picture());
    // All of them, also before the probes have learnt to leave these frames, when they copy a stack
    // whose first pages are not there.
    let chain = ["wait_new_stack", "grow_outer", "grow_inner", "handle_userfault"];
    let whole = |sample: &Sample| {
        let root = sample.stack.first().is_some_and(Frame::is_of_libc);
        root && sample.positions(&chain).is_some_and(|at| at[2] == at[0] + 2)
    };
    let seen = profile.sum("blocked", |sample| waiting(sample) && whole(sample));
    assert_eq!(seen, blocked, "{}", picture());
    let by_filler = profile.sum("blocked", |sample| {
        waiting(sample) && sample.label("waker").ends_with(&format!("/{fills}"))
    });
    assert!(by_filler * 10 >= blocked * 8, "{}", picture());
}

/// A cgroup with a CPU limit, gone when dropped (its processes are moved out first).
pub(crate) struct CpuLimit {
    directory: PathBuf,
    root: PathBuf,
}

impl CpuLimit {
    /// 20 ms of CPU time in every 100 ms. `None` where there is no cgroup controller to limit with.
    pub(crate) fn new() -> Option<Self> {
        let v2 = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(v2.join("cgroup.controllers")).unwrap_or_default();
        let (root, limits) = if controllers.split_whitespace().any(|controller| controller == "cpu")
        {
            fs::write(v2.join("cgroup.subtree_control"), "+cpu").ok()?;
            (v2.to_owned(), vec![("cpu.max", "20000 100000")])
        } else {
            let v1 = v2.join("cpu");
            v1.join("cpu.cfs_quota_us").parent().filter(|parent| parent.is_dir())?;
            (v1, vec![("cpu.cfs_period_us", "100000"), ("cpu.cfs_quota_us", "20000")])
        };
        let directory = root.join(format!("perfusion-test-{}", std::process::id()));
        fs::create_dir(&directory).ok()?;
        let limit = Self { directory, root };
        let set =
            |(file, value): &(&str, &str)| fs::write(limit.directory.join(file), value).is_ok();
        limits.iter().all(set).then_some(limit)
    }

    /// Nanoseconds its run queues have been stopped so far. The kernel adds a stop when it ends, a
    /// period of 100 ms later at the most.
    fn throttled_ns(&self) -> i64 {
        let stat = fs::read_to_string(self.directory.join("cpu.stat")).unwrap();
        let value = |name| {
            stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<i64>().ok())
        };
        value("throttled_usec ")
            .map(|usec| usec * 1000)
            .or_else(|| value("throttled_time "))
            .unwrap()
    }

    pub(crate) fn hold(&self, pid: u32) {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for CpuLimit {
    fn drop(&mut self) {
        let inside = fs::read_to_string(self.directory.join("cgroup.procs")).unwrap_or_default();
        for pid in inside.lines() {
            // One that has ended meanwhile is out already.
            fs::write(self.root.join("cgroup.procs"), pid).ok();
        }
        fs::remove_dir(&self.directory).ok();
    }
}

#[test]
fn a_thread_that_has_wanted_a_cpu_since_before_the_profiler_came_has_not_run() {
    let Some(_turn) = begin("waits::starved", &[RECORD, &[Need::C]].concat()) else { return };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("starved").start().unwrap();
    let threads = thread_ids(&app);
    let kernel = Log::start(app.pid());
    // So short that most of them get no CPU in it.
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(1), &[]).unwrap();
    let kernel = kernel.stop();
    app.stop().unwrap();

    let (begin, end) = (profile.time_ns, profile.time_ns + profile.duration_ns);
    for (name, tid) in threads.iter().filter(|(name, _)| name.starts_with("starved")) {
        let this = of_thread(*tid);
        let picture = || {
            format!("{name}: {}\n{}", outcome.stderr, profile.describe("runnable", of_thread(*tid)))
        };
        let (_, most) = kernel.oncpu_between(*tid, begin, end).unwrap();
        let cpu = profile.sum("cpu", &this);
        // The account of one that has a CPU at the moment may be a tick old.
        assert!(
            cpu <= most + 20_000_000,
            "{cpu} ns on a CPU, {most} by the kernel's account; {}",
            picture()
        );
        let wanted = profile.sum("runnable", |sample| this(sample) && sample.has("want_cpu"));
        assert!(
            (cpu + wanted) * 20 >= profile.duration_ns * 19,
            "{cpu} ns on a CPU, it wanted one for {wanted} of {} ns; {}",
            profile.duration_ns,
            picture()
        );
    }
}

fn wall_clock_ns() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as i64
}

#[test]
fn waiting_for_a_cgroups_cpu_limit_is_told_from_waiting_for_a_cpu() {
    let Some(_turn) = begin("waits::throttled", &[RECORD, &[Need::C]].concat()) else { return };
    let Some(limit) = CpuLimit::new() else {
        std::io::stderr()
            .write_all(b"\nSKIPPED waits::throttled: no cgroup CPU controller\n")
            .unwrap();
        return;
    };
    let app = Workload::native("waits", &["-pthread"]).unwrap().arg("spin").start().unwrap();
    limit.hold(app.pid());
    let spin = app.thread("spin");
    let stop = AtomicBool::new(false);
    // Kept in the background, so that the time of the recording can be cut out: begin and end are
    // known afterwards.
    let (log, profile) = thread::scope(|scope| {
        let log = scope.spawn(|| {
            let mut log = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                log.push((wall_clock_ns(), limit.throttled_ns()));
                let_pass(Duration::from_millis(10));
            }
            log
        });
        let recorded = record_pid(app.pid(), Duration::from_secs(5), &[]);
        stop.store(true, Ordering::Relaxed);
        (log.join().unwrap(), recorded.unwrap().0)
    });
    let truth = app.stop().unwrap();
    drop(limit);

    let this = of_thread(spin);
    let picture = || profile.describe("runnable", &this);
    let throttled = profile
        .sum("runnable", |sample| this(sample) && sample.label("wait_reason") == "throttled");
    let others = profile
        .sum("runnable", |sample| this(sample) && sample.label("wait_reason") != "throttled");
    let (cpu, blocked) = (profile.sum("cpu", &this), profile.sum("blocked", &this));
    assert!(cpu * 4 < profile.duration_ns, "{cpu} ns on CPU:\n{}", picture());
    assert!(blocked * 100 < profile.duration_ns, "it never blocks, {blocked} ns:\n{}", picture());
    let at = |moment: i64| log.iter().rfind(|(time, _)| *time <= moment).unwrap().1;
    let kernel = at(profile.time_ns + profile.duration_ns) - at(profile.time_ns);
    // On a busy machine it may take long to use up a fifth of a CPU; it happened all the same. A
    // period at each end may be counted late.
    assert!(kernel > 0, "never throttled, says the kernel:\n{}", picture());
    assert!(
        throttled as f64 >= kernel as f64 * 0.98 - 200e6,
        "throttled {throttled} ns, {kernel} ns by the kernel's account:\n{}",
        picture()
    );
    // Its own clock does not know why it stood still, and sees only what was longer than 5 ms.
    let own = own_account(&truth, "spin", &profile) as f64;
    assert!(
        throttled as f64 <= own * 1.02 && (throttled + others) as f64 >= own * 0.98,
        "throttled {throttled} ns, else runnable {others} ns, {own} ns by its own clock:\n{}",
        picture()
    );
}
