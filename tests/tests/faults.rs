//! Faults that the daemon must survive (docs/reliability.md): killed again and again, disks that
//! are full or read-only, configurations that are broken or swapped beneath it, receivers that say
//! nothing, processes by the thousand.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use ::perfusion_export::directory::Files;
use ::perfusion_export::directory::ProfileDirectory;
use ::perfusion_export::quantity::ByteSize;
use ::perfusion_export::spool::{ItemKind, Spool, SpoolLimits, SpoolLosses};
use ::perfusion_export::{FinishedProfile, Packed, Sink as _};
use ::perfusion_pprof;
use rustix::process::Signal;
use serde_json::Value;
use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{
    Need, RECORD, RECORD_NET9, Runtime, begin, begin_beside, long_form, skip,
};
use system_tests::perfusion::{self, Recording, SLACK, Scratch, record_allocations_beside};
use system_tests::profile::{Profile, Sample};
use system_tests::region::regions;
use system_tests::wait::{let_pass, wait_until};

use crate::kubernetes::windows;
use crate::node::{DEADLINE, Node, free_port, group, spin};
use crate::restart::{assert_nothing_left, bpf_objects, still_loaded};

fn daemon(node: &Node) -> Command {
    let mut command = perfusion::command(["daemon", "--config"]);
    command.arg(node.scratch.path("perfusion.yaml"));
    command
}

/// Its log says so, and no more than that of a process it has not attached to.
fn has_attached(daemon: &Recording) -> bool {
    daemon
        .progress()
        .lines()
        .any(|line| line.contains(" attached ") && !line.contains("not attached"))
}

/// How soon the next daemon is in the app again, from when it is ready on.
const ATTACHES_ANEW: Duration = Duration::from_secs(2);

#[test]
fn a_daemon_killed_and_started_again_and_again_hurts_no_app_and_leaves_nothing() {
    let needs = [RECORD_NET9, &[Need::Cgroup2]].concat();
    let Some(_turn) = begin("faults: restarts", &needs) else { return };
    let group = group("perfusion-test-restarts").unwrap();
    let mut app = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    group.take(app.pid()).unwrap();
    // What the machine does to a program that nobody records.
    let other = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().start().unwrap();
    // In the long form under load: it shares each CPU with another one that is recorded.
    let cpus = if long_form() { std::thread::available_parallelism().unwrap().get() } else { 0 };
    let load: Vec<App> = (0..cpus).map(|_| spin()).collect();
    load.iter().for_each(|app| group.take(app.pid()).unwrap());
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-restarts*}}]}}\nattach: \
         {{policy: all}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    // Moments as in `restart`: from the first system call into the attached recording.
    let (rounds, latest) = if long_form() { (100, 1500) } else { (8, 900) };
    let (mut state, mut seen, mut attached): (u64, BTreeSet<_>, u32) = (7, BTreeSet::new(), 0);
    for round in 0..rounds {
        // Every other one surely gets to where it counts, the last one among them.
        let attaches = round % 2 == 1;
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = Duration::from_millis((state >> 33) % latest);
        let daemon = Recording::spawn(&mut daemon(&node)).unwrap();
        if attaches {
            wait_until("an attach", DEADLINE, || has_attached(&daemon).then_some(())).unwrap();
        }
        let_pass(moment);
        let objects = bpf_objects(daemon.pid());
        attached += u32::from(has_attached(&daemon));
        // One in four is told to end; the others have no time for anything.
        if round % 4 == 3 && daemon.progress().contains("ready") {
            daemon.signal(Signal::TERM).unwrap();
            daemon.finish_well(SLACK).unwrap();
        } else {
            daemon.kill().unwrap();
        }
        app.ensure_alive().unwrap();
        wait_until("BPF objects to go", DEADLINE, || {
            still_loaded(&objects).is_empty().then_some(())
        })
        .unwrap_or_else(|error| panic!("round {round}, after {moment:?}: {error}"));
        seen.extend(objects);
    }
    assert!(seen.iter().any(|(word, _)| *word == "prog_id"), "no kill met a loaded program");
    assert!(attached >= rounds / 2, "{attached} of {rounds} had attached");

    // The next daemon takes over, as if nothing had been. How soon is the best of a few, for any of
    // them may have to wait for a CPU.
    let mut attached_anew = Duration::MAX;
    let mut asked = Instant::now();
    for last in [false, false, true] {
        node.start();
        asked = Instant::now();
        wait_until("the next daemon to be in the app", DEADLINE, || {
            (node.metric("perfusion_daemon_attached_total") >= 1.0).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
        attached_anew = attached_anew.min(asked.elapsed());
        if last || attached_anew < ATTACHES_ANEW {
            break;
        }
        node.take().kill().unwrap();
    }
    wait_until("a profile with names and allocations", DEADLINE, || {
        let whole = |profile: &Profile| {
            profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) > 0
                && profile.sum("cpu", |sample| sample.has("Allocator.Program.Make")) > 0
        };
        node.profiles().iter().rfind(|(_, profile)| whole(profile)).map(drop)
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    let took = asked.elapsed();
    assert!(node.profiles().iter().all(|(_, profile)| !profile.samples.is_empty()));
    // It tells those of the dead to leave, and one is left, its own.
    wait_until("the instances of killed daemons to leave", DEADLINE, || {
        (regions(&app).len() == 1).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{:?}\n{}", regions(&app), node.daemon().progress()));
    writeln!(
        std::io::stderr(),
        "{rounds} daemons ended, {attached} of them attached: the next one is in the app \
         {attached_anew:.1?} after it was ready, has a profile with allocations after {took:.1?}, \
         their instances gone after {:.1?}",
        asked.elapsed()
    )
    .unwrap();
    assert!(attached_anew < ATTACHES_ANEW, "{attached_anew:?}");
    drop(load);
    node.end();
    assert_nothing_left(Path::new("/nowhere"));
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    // As in `restart`: nothing a user would see, beyond what happens to everybody on a busy
    // machine.
    let pause = |truth: &Value| truth["longest_pause_ms"].as_f64().unwrap();
    let others = pause(&other.stop().unwrap());
    assert!(pause(&truth) < 1000.0 + 2.0 * others, "{truth}; the other one's {others} ms");
}

fn has_allocations(profile: &Profile) -> bool {
    profile.sum("alloc_space", |sample| sample.has("Allocator.Program.Make")) > 0
}

/// Waits for a profile of a service that began after now.
fn new_profile(node: &Node, service: &str, fits: impl Fn(&Profile) -> bool) -> Profile {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos();
    let found = wait_until(&format!("a profile of {service}"), DEADLINE, || {
        let is_new =
            |profile: &Profile| u128::try_from(profile.time_ns).is_ok_and(|began| began > now);
        let fits = |(name, profile): &(String, Profile)| {
            name == service && is_new(profile) && fits(profile)
        };
        node.profiles().into_iter().find(fits)
    });
    found.unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress())).1
}

#[test]
fn two_daemons_of_different_folders_are_both_whole_and_one_may_end() {
    let Some(_turn) =
        begin_beside("faults: two daemons", &[RECORD_NET9, &[Need::Cgroup2]].concat())
    else {
        return;
    };
    let group = group("perfusion-test-two").unwrap();
    let workload =
        Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().env("DD_SERVICE", "shop");
    let app = workload.start().unwrap();
    group.take(app.pid()).unwrap();
    let mut nodes = [Node::new(), Node::new()];
    for node in &mut nodes {
        node.configure(&format!(
            "selection: {{only: [{{cgroup: /perfusion-test-two*}}]}}\nattach: \
             {{policy: all}}\nlimits: {{{}}}\n",
            node.kill_switch()
        ));
        node.start();
    }
    // Each has a library of its own in the process, and hears every allocation once.
    let [first, second] = &nodes;
    for node in [first, second, first] {
        new_profile(node, "shop", has_allocations);
    }
    assert_eq!(regions(&app).len(), 2);
    let [first, second] = nodes;
    first.end();
    wait_until("the first one's library to leave", DEADLINE, || {
        (regions(&app).len() == 1).then_some(())
    })
    .unwrap();
    let profile = new_profile(&second, "shop", has_allocations);
    assert_eq!(profile.counter("shim_records_dropped_full").unwrap_or(0), 0);
    second.end();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}

#[test]
fn a_recorder_beside_a_daemon_and_the_daemon_are_both_whole() {
    let Some(_turn) =
        begin_beside("faults: recorder beside a daemon", &[RECORD_NET9, &[Need::Cgroup2]].concat())
    else {
        return;
    };
    let group = group("perfusion-test-guest").unwrap();
    let workload =
        Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().env("DD_SERVICE", "guest");
    let mut app = workload.start().unwrap();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    // Beside other tests the daemon would lower its rates, down to three samples a second.
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-guest*}}]}}\nattach: \
         {{policy: all}}\nlimits: {{cpu: 100%, {}}}\n",
        node.kill_switch()
    ));
    node.start();
    new_profile(&node, "guest", has_allocations);
    let wall = || {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        i64::try_from(now.as_nanos()).unwrap()
    };
    // The app's own marks lie between the inner times and the outer ones.
    let (before, from, begun) = (wall(), app.mark().unwrap(), wall());
    let heard = record_allocations_beside(&mut app, 1, 1, Duration::from_secs(3)).unwrap();
    let (ended, to, after) = (wall(), app.mark().unwrap(), wall());
    // The recorder has all and each once, by the app's own account.
    let (profile, outcome) = &heard.profiles[0];
    let made = |sample: &Sample| sample.has("Allocator.Program.Make");
    let allocated = profile.sum("alloc_space", |_| true) as f64;
    heard.assert_holds(profile, allocated, &outcome.stderr);
    assert!(
        profile.sum("alloc_space", made) as f64 > 0.9 * allocated,
        "{}",
        profile.describe("alloc_space", |_| true)
    );
    assert!(profile.sum("cpu", made) > 0, "{}", profile.describe("cpu", |_| true));
    // And so has the daemon, in its windows of that time; the last of them may still have to be
    // written.
    new_profile(&node, "guest", has_allocations);
    let all = node.profiles();
    let end = |profile: &Profile| profile.time_ns + profile.duration_ns;
    let mut touched: Vec<&Profile> = all
        .iter()
        .filter(|(name, profile)| {
            name == "guest" && end(profile) > before && profile.time_ns < after
        })
        .map(|(_, profile)| profile)
        .collect();
    touched.sort_by_key(|profile| profile.time_ns);
    // Each window goes on where the one before it ended. How many there are is the machine's
    // matter: a late window is a longer one.
    for pair in touched.windows(2) {
        let gap = (pair[1].time_ns - end(pair[0])).abs();
        assert!(gap <= 50_000_000, "{gap} ns between two windows");
    }
    let windows: Vec<&Profile> = touched
        .iter()
        .copied()
        .filter(|profile| profile.time_ns >= begun && end(profile) <= ended)
        .collect();
    let bytes = |of: &[&Profile]| {
        of.iter().map(|profile| profile.sum("alloc_space", |_| true)).sum::<i64>() as f64
    };
    let (most, least, own) =
        (bytes(&touched), bytes(&windows), to.allocated_bytes - from.allocated_bytes);
    let picture = || {
        format!(
            "{} windows within {} touched of {:?} s in {:.1} s: {least:.0} and {most:.0} bytes, \
             the app's own {own:.0}; the recorder {allocated:.0} of {:.0} to {:.0}\n{}\n{:#?}",
            windows.len(),
            touched.len(),
            touched.iter().map(|profile| profile.duration_ns as f64 / 1e9).collect::<Vec<_>>(),
            (ended - begun) as f64 / 1e9,
            heard.least_bytes,
            heard.most_bytes,
            node.daemon().progress(),
            windows.last().map(|profile| &profile.comments)
        )
    };
    writeln!(std::io::stderr(), "{}", picture().lines().next().unwrap_or_default()).unwrap();
    assert!(!windows.is_empty(), "{}", picture());
    // Thousands of samples: a few percent by chance. An app goes slower while a recorder begins,
    // which is at the ends of this time, so it is its bytes that are compared: those of the windows
    // within are some of its own, and its own are some of those touched. Events that are heard
    // twice give 2.
    assert!(least < 1.1 * own && 0.9 * own < most, "{}", picture());
    assert!(windows.iter().any(|profile| profile.sum("cpu", made) > 0), "{}", picture());
    // Each its own library, and the recorder's has left.
    wait_until("the recorder's library to leave", DEADLINE, || {
        (regions(&app).len() == 1).then_some(())
    })
    .unwrap();
    new_profile(&node, "guest", has_allocations);
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0);
    node.end();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}

#[test]
fn a_frozen_container_holds_up_nobody_and_is_there_again_when_it_thaws() {
    let Some(_turn) = begin_beside("faults: frozen", &[RECORD_NET9, &[Need::Cgroup2]].concat())
    else {
        return;
    };
    stands_still("cold", |frozen, _, how| {
        let how = u32::from(how).to_string();
        fs::write(frozen.path().join("cgroup.freeze"), &how).unwrap();
        wait_until("the cgroup to obey", DEADLINE, || {
            let events = fs::read_to_string(frozen.path().join("cgroup.events")).unwrap();
            events.contains(&format!("frozen {how}")).then_some(())
        })
        .unwrap();
    });
}

/// Stops all threads of a process as a debugger does, until its stdin ends.
const DEBUGGER: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
pid, seize, interrupt, wall = int(sys.argv[1]), 0x4206, 0x4207, 0x40000000
stopped = set()
while True:
    left = {int(tid) for tid in os.listdir(f"/proc/{pid}/task")} - stopped
    if not left:
        break
    for tid in left:
        if not any(libc.ptrace(request, tid, None, None) for request in (seize, interrupt)):
            os.waitpid(tid, wall)
            stopped.add(tid)
print("ready {}", flush=True)
sys.stdin.read()
"#;

#[test]
fn a_process_that_a_debugger_has_stopped_holds_up_nobody_and_is_there_again_when_it_goes_on() {
    let needs = [RECORD_NET9, &[Need::Cgroup2, Need::Program("python3")]].concat();
    let Some(_turn) = begin_beside("faults: stopped by a debugger", &needs) else { return };
    let mut debugger = None;
    stands_still("held", move |_, app, how| {
        // The kernel has all go on whose tracer is gone.
        drop(debugger.take());
        let states = || {
            let threads = fs::read_dir(format!("/proc/{}/task", app.pid())).unwrap().flatten();
            let state = |status: String| {
                status.lines().find(|line| line.starts_with("State:")).map(str::to_owned)
            };
            threads
                .filter_map(|thread| state(fs::read_to_string(thread.path().join("status")).ok()?))
                .collect::<Vec<_>>()
        };
        if how {
            let python =
                Workload::program("python3").arg("-c").arg(DEBUGGER).arg(app.pid().to_string());
            debugger = Some(python.start().unwrap());
            assert!(states().iter().all(|state| state.contains("tracing stop")), "{:?}", states());
        } else {
            wait_until("it to go on", DEADLINE, || {
                (!states().iter().any(|state| state.contains("tracing stop"))).then_some(())
            })
            .unwrap();
        }
    });
}

/// A process that stands still beside one that does not, when the daemon comes and later, when its
/// library is in it: `still` stops and wakes it.
fn stands_still(name: &'static str, mut still: impl FnMut(&Group, &App, bool)) {
    let (resting, awake) = (
        group(&format!("perfusion-test-{name}")).unwrap(),
        group(&format!("perfusion-test-{name}-not")).unwrap(),
    );
    let workload = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    let start = |service: &str| workload.clone().env("DD_SERVICE", service).start().unwrap();
    let (cold, warm) = (start(name), start("warm"));
    resting.take(cold.pid()).unwrap();
    awake.take(warm.pid()).unwrap();
    still(&resting, &cold, true);
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-{name}*}}]}}\nattach: \
         {{policy: all, retry_after: 1s}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    // Its runtime does not answer; the other one's does.
    new_profile(&node, "warm", has_allocations);
    let failures = || node.metric("perfusion_daemon_attach_failed_total");
    wait_until("an attach to fail", DEADLINE, || (failures() > 0.0).then_some(()))
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert!(
        node.profiles()
            .iter()
            .all(|(service, profile)| service != name || !has_allocations(profile))
    );
    // Still when its library is in it, too: the other one is recorded all the while.
    still(&resting, &cold, false);
    new_profile(&node, name, has_allocations);
    still(&resting, &cold, true);
    for _ in 0..2 {
        let profile = new_profile(&node, "warm", has_allocations);
        let threads = profile.sum("wall", |sample| sample.label("pid") == warm.pid().to_string());
        assert!(
            threads >= profile.duration_ns,
            "{threads} ns of all its threads in {} ns",
            profile.duration_ns
        );
    }
    still(&resting, &cold, false);
    new_profile(&node, name, has_allocations);
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0);
    node.end();
    for app in [cold, warm] {
        assert_eq!(app.stop().unwrap()["mistakes"], 0);
    }
}

#[test]
fn a_pid_that_is_used_again_is_another_process() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("faults: pid used again", &needs) else { return };
    let group = group("perfusion-test-again").unwrap();
    let program =
        |flags: &[&str]| Workload::native("spin", flags).unwrap().command_line().remove(0);
    // The same file but for the name of its function.
    let (here, there) = (program(&[]), program(&["-Dspin_here=spin_there"]));
    let helper = Workload::native("again", &[]).unwrap().arg(here).arg(there);
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-again*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    let mut app = helper.start().unwrap();
    let pid = u32::try_from(app.ready()["pid"].as_u64().unwrap()).unwrap();
    group.take(app.pid()).unwrap();
    group.take(pid).unwrap();
    node.start();
    let has = |function: &'static str| {
        move |profile: &Profile| profile.sum("samples", |s| s.has(function)) > 0
    };
    new_profile(&node, "first", has("spin_here"));
    let done = app.ask("again", "done").unwrap();
    if done["errno"] != 0 {
        skip(
            "faults: pid used again",
            &format!("clone3 gives no chosen pid: errno {}", done["errno"]),
        );
        return;
    }
    assert_eq!(done["pid"], pid);
    for _ in 0..2 {
        new_profile(&node, "second", has("spin_there"));
    }
    let own = |sample: &Sample| sample.label("pid") == pid.to_string();
    let profiles = node.profiles();
    let samples = |service: &str, function: &str| -> i64 {
        let of = profiles.iter().filter(|(name, _)| name == service);
        of.map(|(_, profile)| profile.sum("samples", |sample| own(sample) && sample.has(function)))
            .sum()
    };
    let counts = ["first", "second"]
        .map(|service| (samples(service, "spin_here"), samples(service, "spin_there")));
    let [(first_here, first_there), (second_here, second_there)] = counts;
    assert_eq!(
        (first_there, second_here),
        (0, 0),
        "{counts:?}: what one did stands under the other's name"
    );
    assert!(first_here > 0 && second_there > 0, "{counts:?}");
    // A stack that does not reach `main`, as one taken before the new program's rules were read,
    // says so itself.
    for (service, profile) in &profiles {
        let cut = |sample: &Sample| {
            own(sample) && sample.has("spin_") && !sample.has("main") && !sample.has("[truncated")
        };
        assert_eq!(
            profile.sum("samples", cut),
            0,
            "{service}: {}",
            profile.describe("samples", cut)
        );
    }
    drop(app);
    node.end();
}

/// What the descriptors of a process stand for.
fn links(pid: u32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    // One that was closed meanwhile is none.
    let links = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    links.map(|link| link.to_string_lossy().into_owned()).collect()
}

/// The same, without their numbers, and how many of each there are.
fn descriptors(pid: u32) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for link in links(pid) {
        *found
            .entry(link.replace(|character: char| character.is_ascii_digit(), ""))
            .or_default() += 1;
    }
    found
}

#[test]
fn an_app_that_dies_in_a_call_of_the_library_costs_the_daemon_nothing() {
    let needs = [RECORD_NET9, &[Need::Cgroup2, Need::Program("strace")]].concat();
    let Some(_turn) = begin_beside("faults: dies in a call", &needs) else { return };
    let group = group("perfusion-test-dying").unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-dying*}}]}}\nattach: \
         {{policy: all}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let allocator = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    let whole = allocator.clone().env("DD_SERVICE", "whole").start().unwrap();
    group.take(whole.pid()).unwrap();
    new_profile(&node, "whole", has_allocations);
    // What an attach has the app call, the library's own calls last
    // (`profiler-shim/src/syscall.rs`), the how manieth of each it dies in, and of what: it is told
    // to by the kernel as it enters the call. Of SIGSYS, as of a call that a filter forbids, no
    // runtime hears; what it hears of and was not raised by itself (SIGSEGV, SIGABRT) it may take
    // for nothing. The library's own thread blocks all signals.
    let deaths = [
        ("openat", 1, "SIGKILL"),
        ("mmap", 1, "SIGSYS"),
        ("mmap", 4, "SIGKILL"),
        ("mmap", 8, "SIGSYS"),
        ("memfd_create", 1, "SIGSYS"),
        ("ftruncate", 1, "SIGKILL"),
        ("fcntl", 1, "SIGSYS"),
        ("madvise", 1, "SIGKILL"),
        ("prctl", 1, "SIGKILL"),
        ("getrandom", 1, "SIGKILL"),
        ("munmap", 2, "SIGKILL"),
    ];
    let trace = node.scratch.path("trace");
    let (mut of_the_library, mut dead) = (0, Vec::new());
    for (call, which, signal) in deaths {
        let mut app = allocator.start().unwrap();
        let mut tracer = Command::new("strace");
        tracer.args([
            "-f",
            "-qq",
            "-e",
            &format!("trace=openat,memfd_create,{call}"),
            "-p",
            &app.pid().to_string(),
            "-o",
        ]);
        tracer.arg(&trace).args(["-e", &format!("inject={call}:signal={signal}:when={which}")]);
        let mut tracer = tracer.spawn().unwrap();
        let traced = |thread: &Path| {
            let status = fs::read_to_string(thread.join("status")).unwrap_or_default();
            // The app's own calls count, too: it may be dead before it is known to be traced.
            !status.contains("TracerPid:\t0\n") || status.contains("State:\tZ")
        };
        wait_until("the tracer", DEADLINE, || {
            let threads =
                fs::read_dir(format!("/proc/{}/task", app.pid())).into_iter().flatten().flatten();
            threads.map(|thread| thread.path()).all(|thread| traced(&thread)).then_some(())
        })
        .unwrap();
        group.take(app.pid()).unwrap();
        let status =
            app.await_exit(DEADLINE).unwrap_or_else(|error| panic!("{call} {which}: {error}"));
        tracer.wait().unwrap();
        let text = fs::read_to_string(&trace).unwrap();
        assert!(
            text.contains(&format!("killed by {signal}")),
            "{call} {which}, {signal}: {status}\n{text}"
        );
        of_the_library += usize::from(text.contains("memfd_create(\"perfusion-shim"));
        dead.push(format!("/proc/{}/", app.pid()));
    }
    assert!(of_the_library > 0, "none died in the library");
    writeln!(
        std::io::stderr(),
        "{of_the_library} of {} died after the library had begun",
        deaths.len()
    )
    .unwrap();
    // The living one has a region; of the dead ones none is left, and nothing of their own. A
    // library that was mapped when its process died is a file with symbols like others, and stays
    // open as those do, within a bound.
    let left = || {
        let links = links(node.daemon().pid());
        let of_the_dead =
            links.iter().any(|link| dead.iter().any(|dead| format!("{link}/").starts_with(dead)));
        let regions = links.iter().filter(|link| link.starts_with("/memfd:perfusion-shim")).count();
        (of_the_dead || regions > 1).then_some(links)
    };
    wait_until("the daemon to let go of the dead", DEADLINE, || left().is_none().then_some(()))
        .unwrap_or_else(|error| panic!("{error}\n{:#?}", left()));
    // It is recorded as if nothing had been.
    new_profile(&node, "whole", has_allocations);
    node.end();
    assert_nothing_left(Path::new("/nowhere"));
    assert_eq!(whole.stop().unwrap()["mistakes"], 0);
}

#[test]
fn reloads_without_end_keep_the_recording_and_the_old_values_when_the_new_are_wrong() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("faults: reloads", &needs) else { return };
    let group = group("perfusion-test-reloads").unwrap();
    let app = spin();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-reloads*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    // As a ConfigMap is mounted: the file is a link through a folder that is swapped.
    let good = fs::read_to_string(node.scratch.path("perfusion.yaml")).unwrap();
    let versions = [
        good.clone(),
        format!("{good}windos: {{}}\n"),
        format!("{good}services: {{max: 7}}\n"),
        format!("{good}recording: {{frequency: 0}}\n"),
    ];
    for (number, text) in versions.iter().enumerate() {
        fs::create_dir(node.scratch.path(&format!("v{number}"))).unwrap();
        fs::write(node.scratch.path(&format!("v{number}/perfusion.yaml")), text).unwrap();
    }
    let turn_to = |node: &Node, number: usize| {
        let (new, data) = (node.scratch.path("new"), node.scratch.path("data"));
        symlink(format!("v{number}"), &new).unwrap();
        fs::rename(new, data).unwrap();
    };
    turn_to(&node, 0);
    fs::remove_file(node.scratch.path("perfusion.yaml")).unwrap();
    symlink("data/perfusion.yaml", node.scratch.path("perfusion.yaml")).unwrap();
    node.start();
    let count = |node: &Node| {
        node.metric("perfusion_daemon_reloads_total")
            + node.metric("perfusion_daemon_reloads_failed_total")
    };
    let reload = |number: usize| {
        let before = count(&node);
        turn_to(&node, number);
        node.daemon().signal(Signal::HUP).unwrap();
        wait_until("a reload", DEADLINE, || (count(&node) > before).then_some(())).unwrap();
    };
    for number in 0..versions.len() {
        reload(number);
    }
    // Files of what is profiled are opened in the first windows.
    wait_until("windows", DEADLINE, || (node.profiles().len() >= 3).then_some(())).unwrap();
    let (before, times) = (descriptors(node.daemon().pid()), if long_form() { 1000 } else { 60 });
    for round in 0..times {
        reload(round % versions.len());
    }
    // Windows go on.
    wait_until("windows", DEADLINE, || (node.profiles().len() >= 5).then_some(())).unwrap();
    let after = descriptors(node.daemon().pid());
    // Mapped files are opened with the processes that come, also of the tests beside this one, and
    // closed by their own rules: a reload has nothing to do with them. Of the rest, one that is
    // lost with each reload of a kind would be more than this.
    let scratch = node
        .scratch
        .path("")
        .to_string_lossy()
        .replace(|character: char| character.is_ascii_digit(), "");
    let mapped = |what: &str| {
        what.starts_with('/')
            && !["/proc/", "/sys/", &scratch].iter().any(|its| what.starts_with(its))
    };
    for (what, count) in after.iter().filter(|(what, _)| !mapped(what)) {
        let more = count.saturating_sub(before.get(what).copied().unwrap_or(0));
        assert!(more < times / versions.len(), "{count} of {what}: {before:#?}, then {after:#?}");
    }
    assert_eq!(
        node.metric("perfusion_daemon_recordings_total"),
        1.0,
        "the recording was not begun anew"
    );
    let failed = node.metric("perfusion_daemon_reloads_failed_total");
    assert_eq!(failed, f64::from(u32::try_from((times + versions.len()) / 2).unwrap()));
    // No window was missed: each begins where the one before ended.
    let times: Vec<(i64, i64)> =
        node.profiles().iter().map(|(_, profile)| (profile.time_ns, profile.duration_ns)).collect();
    assert!(times.len() >= 3, "{times:?}");
    for pair in times.windows(2) {
        let gap = (pair[1].0 - pair[0].0 - pair[0].1).abs();
        // The wall clock says when a window began, the monotonic one how long it was.
        assert!(gap < 500_000_000, "{gap} ns between {pair:?}");
    }
    drop(app);
    node.end();
}

/// A file system of a test, gone with it.
struct Mounted(PathBuf);

impl Mounted {
    fn tmpfs(at: PathBuf, options: &str) -> Self {
        fs::create_dir_all(&at).unwrap();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(&at).status();
        assert!(mounted.unwrap().success());
        Self(at)
    }

    /// One on a loop device; why there is none.
    fn ext4(image: &Path, at: PathBuf) -> Result<Self, String> {
        fs::create_dir_all(&at).unwrap();
        fs::File::create(image).unwrap().set_len(64 << 20).unwrap();
        let run = |command: &mut Command| match command.output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(error) => Err(error.to_string()),
        };
        run(Command::new("mkfs.ext4").arg("-q").arg(image))
            .map_err(|error| format!("mkfs.ext4: {error}"))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(image).arg(&at))
            .map_err(|error| format!("mount -o loop: {error}"))?;
        Ok(Self(at))
    }

    fn again(&self, options: &str) {
        let remounted = Command::new("mount").args(["-o", options]).arg(&self.0).status().unwrap();
        assert!(remounted.success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        Command::new("umount").arg("--lazy").arg(&self.0).status().ok();
    }
}

#[test]
fn a_full_or_read_only_disk_costs_the_files_of_that_time_and_nothing_else() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("faults: disk", &needs) else { return };
    let group = group("perfusion-test-disk").unwrap();
    let app = spin();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-disk*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    // Room for bytes, but not for many files: so it is the writing that fails, beyond the floor of
    // free space.
    let disk = Mounted::tmpfs(node.scratch.path("out"), "size=16m,nr_inodes=40");
    node.start();
    let files = |node: &Node| node.profiles().len();
    // There is one sink.
    let metric = |node: &Node, name: &str| {
        let (text, name) = (node.get("/metrics"), format!("perfusion_sink_{name}_total{{"));
        let line = text.lines().find(|line| line.starts_with(&name)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    wait_until("a profile", DEADLINE, || (files(&node) > 0).then_some(())).unwrap();
    for trouble in ["no inode", "no byte", "read-only"] {
        let fill = disk.0.join("fill");
        fs::create_dir(&fill).unwrap();
        match trouble {
            "no inode" => {
                for number in 0.. {
                    if fs::write(fill.join(number.to_string()), "").is_err() {
                        break;
                    }
                }
            }
            "no byte" => {
                fs::write(fill.join("large"), vec![1; 32 << 20]).unwrap_err();
            }
            _ => disk.again("remount,ro"),
        }
        let lost = |node: &Node| metric(node, "files_failed") + metric(node, "files_no_room");
        let (before, kept) = (lost(&node), files(&node));
        wait_until("files that are not written to be counted", DEADLINE, || {
            (lost(&node) > before).then_some(())
        })
        .unwrap_or_else(|error| panic!("{trouble}: {error}\n{}", node.daemon().progress()));
        assert_eq!(node.metric("perfusion_recording"), 1.0, "{trouble}");
        // Not all of them would make room for one more.
        assert!(files(&node) >= kept, "{trouble}: {kept} files were there, {} are", files(&node));
        if trouble == "read-only" {
            disk.again("remount,rw");
        }
        fs::remove_dir_all(&fill).unwrap();
        let written = metric(&node, "files_written");
        wait_until("files again, without a restart", DEADLINE, || {
            (metric(&node, "files_written") > written).then_some(())
        })
        .unwrap_or_else(|error| panic!("after {trouble}: {error}\n{}", node.daemon().progress()));
    }
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0);
    // All that is there is whole (reading checks it), and nothing is there beside it.
    assert!(files(&node) > 1);
    drop(app);
    let (daemon, out) = (node.take(), disk.0.clone());
    daemon.signal(Signal::TERM).unwrap();
    daemon.finish_well(2 * SLACK).unwrap();
    for service in fs::read_dir(out).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        for file in fs::read_dir(service.path()).unwrap().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            assert!(name.ends_with(".pb.gz"), "{name}");
        }
    }
}

/// A file system where every write waits, for as long as this is there.
struct Frozen<'a>(&'a Mounted);

impl<'a> Frozen<'a> {
    fn new(mounted: &'a Mounted) -> Self {
        let frozen = Self(mounted);
        assert!(frozen.run("--freeze"));
        frozen
    }

    fn run(&self, what: &str) -> bool {
        Command::new("fsfreeze").arg(what).arg(&self.0.0).status().unwrap().success()
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.run("--unfreeze");
    }
}

#[test]
fn a_disk_that_does_not_answer_holds_up_its_own_sink_and_nobody_else() {
    let name = "faults: frozen disk";
    let needs = [RECORD, &[Need::C, Need::Program("fsfreeze")]].concat();
    let Some(_turn) = begin_beside(name, &needs) else { return };
    let mut node = Node::new();
    let disk = match Mounted::ext4(&node.scratch.path("disk"), node.scratch.path("out")) {
        Ok(disk) => disk,
        Err(why) => return skip(name, &why),
    };
    let app = spin();
    // Nobody listens there: what is made for it waits in its spool, on another disk.
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}]}}\nlimits: {{{}}}\nspool: \
         {{directory: {:?}, keep_free: 0B}}\n\
         otlp: [{{url: \"http://127.0.0.1:{}\", protocol: http}}]\n",
        node.kill_switch(),
        node.scratch.path("spool"),
        free_port(),
    ));
    node.start();
    let of = |node: &Node, sink: &str, name: &str| {
        let (text, name) = (node.get("/metrics"), format!("perfusion_sink_{name}{{sink=\"{sink}"));
        let line =
            text.lines().find(|line| line.starts_with(&name)).unwrap_or_else(|| panic!("{text}"));
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    let grows = |node: &Node, sink: &str, name: &str, by: f64| {
        let before = of(node, sink, name);
        wait_until(name, DEADLINE, || (of(node, sink, name) >= before + by).then_some(()))
            .unwrap_or_else(|error| panic!("{sink}: {error}\n{}", node.daemon().progress()));
    };
    grows(&node, "files", "files_written_total", 2.0);
    let frozen = Frozen::new(&disk);
    grows(&node, "files", "busy_seconds", 2.0);
    let written = of(&node, "files", "files_written_total");
    grows(&node, "otlp", "requests_made_total", 5.0);
    assert!(of(&node, "files", "busy_seconds") > 2.0, "it has been at one thing all the while");
    assert!(of(&node, "files", "files_written_total") <= written);
    // A reload is over soon: it is refused where opening the folder waits for the disk, too.
    let file = node.scratch.path("perfusion.yaml");
    let other = fs::read_to_string(&file).unwrap().replace("keep_free: 1MiB", "keep_free: 2MiB");
    fs::write(&file, other).unwrap();
    node.daemon().signal(Signal::HUP).unwrap();
    let outcomes = ["the configuration was read again", "does not answer within"];
    wait_until("the end of the reload", DEADLINE, || {
        let said = node.daemon().progress();
        outcomes.iter().any(|outcome| said.contains(outcome)).then_some(())
    })
    .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    if node.daemon().progress().contains("does not answer within") {
        node.daemon().signal(Signal::HUP).unwrap();
        wait_until("the end of another reload, for which no thread more waits", DEADLINE, || {
            node.daemon().progress().contains("has not answered since").then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    }
    grows(&node, "otlp", "requests_made_total", 2.0);
    assert!(node.get("/healthz").starts_with("HTTP/1.1 200"));
    if long_form() {
        wait_until("the sink to be named", DEADLINE, || {
            node.daemon().progress().contains("does not come back from one write").then_some(())
        })
        .unwrap();
    }
    drop(frozen);
    grows(&node, "files", "files_written_total", 5.0);
    wait_until("what waited to be written, all of it", DEADLINE, || {
        let made = of(&node, "otlp", "requests_made_total");
        (of(&node, "files", "files_written_total") == made).then_some(())
    })
    .unwrap();
    assert_eq!(of(&node, "files", "profiles_dropped_total"), 0.0);
    // An end does not wait for it for ever, and says what is lost. The kernel lets the process go
    // with the thaw.
    let frozen = Frozen::new(&disk);
    grows(&node, "files", "busy_seconds", 2.0);
    let mut daemon = node.told_to_end();
    daemon.await_progress("does not come back from one write for", DEADLINE).unwrap();
    daemon.await_progress("the sinks have not ended after 20s", DEADLINE).unwrap();
    drop((frozen, app));
    let outcome = daemon.finish(2 * SLACK).unwrap();
    assert_eq!(outcome.code(), 5, "{}", outcome.stderr);
}

#[test]
fn a_disk_short_of_space_keeps_its_floor_at_the_cost_of_as_many_of_the_oldest_as_that_takes() {
    let Some(_turn) = begin_beside("faults: short disk", &[Need::Root]) else { return };
    let scratch = Scratch::new().unwrap();
    let disk = Mounted::tmpfs(scratch.path("disk"), "size=1m");
    let now = SystemTime::now();
    // Half of the disk, which is eight payloads.
    let (floor, payload) = (512 << 10, vec![1; 64 << 10]);
    let limits = SpoolLimits { bytes: u64::MAX, age: Duration::from_secs(3600), free_bytes: floor };
    let mut spool = Spool::open(&disk.0.join("spool"), limits).unwrap();
    let put = |spool: &mut Spool| spool.put_as(now, ItemKind::Request, 0, &payload);
    (0..20).for_each(|_| put(&mut spool).unwrap());
    assert_eq!(
        (spool.len(), spool.lost()),
        (8, SpoolLosses { evicted: 12, ..SpoolLosses::default() })
    );
    // Somebody else takes what four have, and the next one has to fit, too.
    let other = disk.0.join("other");
    fs::write(&other, vec![1; 256 << 10]).unwrap();
    put(&mut spool).unwrap();
    assert_eq!(
        (spool.len(), spool.lost()),
        (4, SpoolLosses { evicted: 17, ..SpoolLosses::default() })
    );
    // More than all that waits would give back.
    fs::write(&other, vec![1; 704 << 10]).unwrap();
    put(&mut spool).unwrap_err();
    assert_eq!(
        (spool.len(), spool.lost()),
        (4, SpoolLosses { evicted: 17, refused: 1, ..SpoolLosses::default() })
    );
    fs::remove_file(&other).unwrap();
    put(&mut spool).unwrap();
    assert_eq!((spool.len(), spool.lost().evicted), (5, 17));
    fs::remove_dir_all(disk.0.join("spool")).unwrap();

    // Files likewise. Each is a twentieth of the disk or so, of names that hardly pack.
    let options = Files { keep_free: ByteSize(floor), ..Files::default() };
    let mut files = ProfileDirectory::open(&disk.0.join("files"), &options).unwrap();
    let names = (0..12_000_u32).map(|number| format!("{:08x}", number.wrapping_mul(2_654_435_761)));
    let mut finished = FinishedProfile {
        service: "shop".into(),
        labels: BTreeMap::new(),
        start: now,
        duration: Duration::from_secs(60),
        profile: Packed::new(
            perfusion_pprof::pack(&perfusion_pprof::proto::Profile {
                string_table: names.collect(),
                ..Default::default()
            })
            .unwrap(),
        ),
    };
    for _ in 0..30 {
        finished.start += Duration::from_secs(1);
        files.put(&finished).unwrap();
        files.window_over();
    }
    let free = rustix::fs::statvfs(&disk.0).unwrap();
    // A file takes whole pages, and the index has its own.
    let free = free.f_bavail * free.f_frsize;
    assert!(free + (32 << 10) >= floor, "{free}");
    let counters: BTreeMap<_, _> = files.counters().into_iter().collect();
    assert_eq!(
        (counters["files_written"], counters["files_failed"], counters["files_no_room"]),
        (30, 0, 0)
    );
    assert!((5..30).contains(&counters["files_evicted"]), "{counters:?}");
    fs::write(&other, vec![1; 512 << 10]).ok();
    files.put(&finished).unwrap_err();
    assert_eq!(
        files.counters().into_iter().collect::<BTreeMap<_, _>>()["files_evicted"],
        counters["files_evicted"]
    );
}

/// What the daemon gives receivers when it is told to end.
const SINKS_HAVE: Duration = Duration::from_millis(1500);
/// Then there are the names and the file of the last window, of one program here, and the probes'
/// way out of the kernel: seconds of waiting for RCU where other tests keep the CPUs busy (four, on
/// two CPUs with ten times as much to do as they can).
const LAST_WINDOW: Duration = Duration::from_secs(5);
/// Told twice it looks at signals every 50 ms; the kernel takes the probes with it.
const AT_ONCE: Duration = Duration::from_secs(1);

#[test]
fn a_receiver_that_says_nothing_holds_the_end_up_no_longer_than_promised() {
    let Some(_turn) = begin_beside("faults: silent receiver", &[RECORD, &[Need::C]].concat())
    else {
        return;
    };
    let app = spin();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let receiver = listener.local_addr().unwrap();
    let (heard, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut first = [0];
            stream.read_exact(&mut first).ok();
            open.push(stream);
            heard.send(()).ok();
        }
    });
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}]}}\nlimits: {{{}}}\nspool: \
         {{directory: {:?}, keep_free: 0B}}\n\
         otlp: [{{url: \"http://{receiver}\", protocol: http, timeout: 1h}}]\n",
        node.kill_switch(),
        node.scratch.path("spool"),
    ));
    node.start();
    hears.recv_timeout(DEADLINE).unwrap();
    let daemon = node.take();
    let asked = Instant::now();
    daemon.signal(Signal::TERM).unwrap();
    daemon.finish_well(SLACK).unwrap();
    let ended = asked.elapsed();
    assert!(ended < SINKS_HAVE + LAST_WINDOW, "{ended:?}");
    let spooled =
        fs::read_dir(node.scratch.path("spool")).unwrap().flatten().next().unwrap().path();
    let waiting = fs::read_dir(spooled).unwrap().flatten();
    let waiting = waiting
        .filter(|file| file.path().extension().is_some_and(|kind| kind == "spooled"))
        .count();
    assert!(waiting > 0, "what was not taken waits for the next daemon");

    // Told twice, it ends at once.
    node.start();
    hears.recv_timeout(DEADLINE).unwrap();
    let mut daemon = node.take();
    daemon.signal(Signal::TERM).unwrap();
    daemon.await_progress("told to end", DEADLINE).unwrap();
    let asked = Instant::now();
    daemon.signal(Signal::TERM).unwrap();
    let outcome = daemon.finish(SLACK).unwrap();
    let ended_at_once = asked.elapsed();
    writeln!(
        std::io::stderr(),
        "told to end with a silent receiver: {ended:.1?}; told twice: {ended_at_once:.1?}"
    )
    .unwrap();
    // 130: it gave up what it was about to do.
    assert_eq!(outcome.code(), 130, "{}", outcome.stderr);
    assert!(ended_at_once < AT_ONCE, "{ended_at_once:?}");
    drop(app);
}

#[test]
fn arguments_and_environment_of_a_process_are_in_nothing_the_daemon_says() {
    let Some(_turn) = begin_beside("faults: secrets", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let workload = Workload::native("spin", &[]).unwrap();
    let app =
        workload.arg("--password=open-sesame").env("DB_PASSWORD", "abracadabra").start().unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}]}}\nlog: {{level: debug}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let own = app.pid().to_string();
    wait_until("a profile of it", DEADLINE, || {
        let of =
            |profile: &Profile| profile.samples.iter().any(|sample| sample.label("pid") == own);
        node.profiles().iter().any(|(_, profile)| of(profile)).then_some(())
    })
    .unwrap();
    let mut said =
        vec![node.get("/metrics"), node.get("/debug/pipeline"), node.daemon().progress()];
    for service in fs::read_dir(node.scratch.path("out"))
        .unwrap()
        .flatten()
        .filter(|entry| entry.path().is_dir())
    {
        for file in fs::read_dir(service.path()).unwrap().flatten() {
            let mut bytes = Vec::new();
            let file = fs::File::open(file.path()).unwrap();
            flate2::read::MultiGzDecoder::new(file).read_to_end(&mut bytes).unwrap();
            said.push(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    // Where it is named by what may be told, a secret would be found, too.
    assert!(said.iter().any(|text| text.contains("spin_here")));
    for text in said {
        for secret in ["open-sesame", "abracadabra"] {
            assert!(!text.contains(secret), "{text}");
        }
    }
    drop(app);
    node.end();
}

/// How long after a storm nothing of its dead is known any more: they are kept for ten seconds for
/// samples that come late (`crates/host/src/process/table.rs`), by the time of the events, which
/// come a second late; and what is due is done with the next event and window. Twice that for a
/// machine that others keep busy.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(25);
/// Of its memory before the storm, so much more may be there after it.
const GROWTH: f64 = 0.10;

#[test]
fn a_storm_of_processes_leaves_nothing_in_the_daemon() {
    let needs = [RECORD, &[Need::C, Need::Cgroup2]].concat();
    let Some(_turn) = begin_beside("faults: fork storm", &needs) else { return };
    let group = group("perfusion-test-storm").unwrap();
    let app = spin();
    group.take(app.pid()).unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-storm*}}]}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    wait_until("a profile", DEADLINE, || (!node.profiles().is_empty()).then_some(())).unwrap();
    let rage = |count: u32, rate: u32| -> u64 {
        let storm = Workload::native("storm", &["-static"]).unwrap();
        let mut storm = storm.arg(count.to_string()).arg(rate.to_string()).start().unwrap();
        group.take(storm.pid()).unwrap();
        let truth = storm.await_line("truth", 10 * DEADLINE).unwrap();
        assert_eq!(truth["failed"], 0, "{truth}");
        writeln!(std::io::stderr(), "{} processes in {} s", truth["started"], truth["seconds"])
            .unwrap();
        // What it has not got to yet is in its ring.
        windows(&node, 2.0);
        truth["started"].as_u64().unwrap()
    };
    // The dead that it knows; `None` when it has no time to answer now.
    let dead = || -> Option<BTreeSet<u64>> {
        let mut connection = UnixStream::connect(node.scratch.path("run/control.sock")).unwrap();
        write!(connection, "GET /processes HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).ok()?;
        let pids = answer["processes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|known| known["pid"].as_u64().unwrap());
        Some(pids.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()).collect())
    };
    // Those that were dead at once after it are not known any more; others of this host die all the
    // time. How long that took.
    let forgets = || -> Duration {
        let asked = Instant::now();
        let of_the_storm = wait_until("who is dead", DEADLINE, dead).unwrap();
        let known = || Some(dead()?.intersection(&of_the_storm).count());
        wait_until("the dead to be forgotten", DEADLINE, || (known()? == 0).then_some(()))
            .unwrap_or_else(|error| {
                panic!("{error}: {:?} of {} are known", known(), of_the_storm.len())
            });
        asked.elapsed()
    };
    // As many as the promise is about where the machine is free to, and fewer a second where it is
    // not. A tenth of that, before, has it make all room it needs for so much at once.
    let (count, rate) = if long_form() { (60_000, 2_000) } else { (1_500, 2_000) };
    rage(count / 10, rate);
    // The least of a few looks: a window in progress takes memory and gives it back.
    let least = |looks: u32| {
        (0..looks).fold(f64::INFINITY, |least, _| {
            let_pass(Duration::from_millis(250));
            least.min(node.memory())
        })
    };
    let before = least(12);
    let started = rage(count, rate);
    let after_storm = node.memory();
    let took = forgets();
    let mut after = f64::INFINITY;
    let given_back = wait_until("its memory to be as before", Duration::from_secs(30), || {
        after = after.min(node.memory());
        (after <= before * (1.0 + GROWTH)).then_some(())
    });
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let text = format!(
        "a storm of {started}: memory {:.1} MiB before, {:.1} at once after, {:.1} at last; its \
         dead forgotten after {took:.1?}",
        mib(before),
        mib(after_storm),
        mib(after)
    );
    std::io::stderr().write_all(format!("{text}\n").as_bytes()).unwrap();
    assert!(took < FORGOTTEN_WITHIN, "{text}");
    assert!(given_back.is_ok(), "{text}\n{}", node.get("/debug/pipeline"));
    assert!(node.metric("perfusion_recording") == 1.0);
    drop(app);
    node.end();
}

#[test]
fn a_log_that_cannot_be_written_ends_nothing_and_its_lines_are_counted() {
    let Some(_turn) = begin("faults: log", RECORD) else { return };
    let node = Node::new();
    node.configure(&format!("limits: {{{}}}\n", node.kill_switch()));
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut running = daemon(&node).stderr(full).spawn().unwrap();
    let lives = wait_until("a window of a daemon whose log is full", DEADLINE, || {
        std::net::TcpStream::connect(("127.0.0.1", node.port)).ok()?;
        let lost = node.metric("perfusion_daemon_log_lines_lost_total");
        (lost > 0.0 && node.metric("perfusion_daemon_windows_total") > 0.0).then_some(())
    });
    let told =
        rustix::process::kill_process(rustix::process::Pid::from_child(&running), Signal::TERM);
    let ended = wait_until("its end", SLACK, || running.try_wait().unwrap());
    running.kill().ok();
    running.wait().unwrap();
    lives.unwrap();
    told.unwrap();
    assert_eq!(ended.unwrap().code(), Some(0));
}
