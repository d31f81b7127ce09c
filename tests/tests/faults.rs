//! Faults that the daemon must survive (docs/reliability.md): killed again and again, disks that are full or read-only, configurations that are
//! broken or swapped beneath it, receivers that say nothing, processes by the thousand.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use serde_json::Value;
use system_tests::app::{App, Workload};
use system_tests::environment::{Need, RECORD, RECORD_NET9, Runtime, begin, begin_beside, long_form};
use system_tests::perfusion::{self, Recording, SLACK};
use system_tests::profile::{Profile, Sample};
use system_tests::region::regions;
use system_tests::wait::{let_pass, wait_until};

use crate::kubernetes::windows;
use crate::node::{DEADLINE, Node, group, spin};
use crate::restart::{assert_nothing_left, bpf_objects, still_loaded};

fn daemon(node: &Node) -> Command {
    let mut command = perfusion::command(["daemon", "--config"]);
    command.arg(node.scratch.path("perfusion.yaml"));
    command
}

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
        "selection: {{only: [{{cgroup: /perfusion-test-restarts*}}]}}\nattach: {{policy: all}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    // Moments as in `restart`: from the first system call into the attached recording.
    let (rounds, latest) = if long_form() { (100, 1500) } else { (8, 900) };
    let (mut state, mut seen, mut attached): (u64, BTreeSet<_>, u32) = (7, BTreeSet::new(), 0);
    for round in 0..rounds {
        // The last one surely gets to where it counts.
        let last = round + 1 == rounds;
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let moment = Duration::from_millis((state >> 33) % latest);
        let mut daemon = Recording::spawn(&mut daemon(&node)).unwrap();
        if last {
            daemon.await_progress("attached", DEADLINE).unwrap();
        }
        let_pass(moment);
        let objects = bpf_objects(daemon.pid());
        attached += u32::from(daemon.progress().contains("attached"));
        // One in four is told to end; the others have no time for anything.
        if round % 4 == 3 && daemon.progress().contains("ready") {
            daemon.signal(Signal::TERM).unwrap();
            daemon.finish_well(SLACK).unwrap();
        } else {
            daemon.kill().unwrap();
        }
        app.ensure_alive().unwrap();
        wait_until("BPF objects to go", DEADLINE, || still_loaded(&objects).is_empty().then_some(()))
            .unwrap_or_else(|error| panic!("round {round}, after {moment:?}: {error}"));
        seen.extend(objects);
    }
    assert!(seen.iter().any(|(word, _)| *word == "prog_id"), "no kill met a loaded program");
    assert!(attached > 0, "no kill met a daemon that had attached");

    // The next daemon takes over, as if nothing had been.
    node.start();
    let asked = Instant::now();
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
        "{rounds} daemons ended, {attached} of them attached: a profile with allocations {took:.1?} after the next one was ready, \
         their instances gone after {:.1?}",
        asked.elapsed()
    )
    .unwrap();
    drop(load);
    node.end();
    assert_nothing_left(Path::new("/nowhere"));
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
    // As in `restart`: nothing a user would see, beyond what happens to everybody on a busy machine.
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
        let is_new = |profile: &Profile| u128::try_from(profile.time_ns).is_ok_and(|began| began > now);
        let fits = |(name, profile): &(String, Profile)| name == service && is_new(profile) && fits(profile);
        node.profiles().into_iter().find(fits)
    });
    found.unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress())).1
}

#[test]
fn two_daemons_of_different_folders_are_both_whole_and_one_may_end() {
    let Some(_turn) = begin_beside("faults: two daemons", &[RECORD_NET9, &[Need::Cgroup2]].concat()) else {
        return;
    };
    let group = group("perfusion-test-two").unwrap();
    let workload = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap().env("DD_SERVICE", "shop");
    let app = workload.start().unwrap();
    group.take(app.pid()).unwrap();
    let mut nodes = [Node::new(), Node::new()];
    for node in &mut nodes {
        node.configure(&format!(
            "selection: {{only: [{{cgroup: /perfusion-test-two*}}]}}\nattach: {{policy: all}}\nlimits: {{{}}}\n",
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
    wait_until("the first one's library to leave", DEADLINE, || (regions(&app).len() == 1).then_some(()))
        .unwrap();
    let profile = new_profile(&second, "shop", has_allocations);
    assert_eq!(profile.counter("shim_records_dropped_full").unwrap_or(0), 0);
    second.end();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"], 0, "{truth}");
}

#[test]
fn a_frozen_container_holds_up_nobody_and_is_there_again_when_it_thaws() {
    let Some(_turn) = begin_beside("faults: frozen", &[RECORD_NET9, &[Need::Cgroup2]].concat()) else {
        return;
    };
    let (frozen, awake) = (group("perfusion-test-cold").unwrap(), group("perfusion-test-cool").unwrap());
    let workload = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    let start = |service: &str| workload.clone().env("DD_SERVICE", service).start().unwrap();
    let (cold, warm) = (start("cold"), start("warm"));
    frozen.take(cold.pid()).unwrap();
    awake.take(warm.pid()).unwrap();
    let freeze = |how: &str| {
        fs::write(frozen.path().join("cgroup.freeze"), how).unwrap();
        wait_until("the cgroup to obey", DEADLINE, || {
            let events = fs::read_to_string(frozen.path().join("cgroup.events")).unwrap();
            events.contains(&format!("frozen {how}")).then_some(())
        })
        .unwrap();
    };
    freeze("1");
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{cgroup: /perfusion-test-co*}}]}}\nattach: {{policy: all, retry_after: 1s}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    // Its runtime does not answer; the other one's does.
    new_profile(&node, "warm", has_allocations);
    let failures = || node.metric("perfusion_daemon_attach_failed_total");
    wait_until("an attach to fail", DEADLINE, || (failures() > 0.0).then_some(()))
        .unwrap_or_else(|error| panic!("{error}\n{}", node.daemon().progress()));
    assert!(node.profiles().iter().all(|(service, profile)| service != "cold" || !has_allocations(profile)));
    // Frozen when its library is in it, too: the other one is recorded all the while.
    freeze("0");
    new_profile(&node, "cold", has_allocations);
    freeze("1");
    for _ in 0..2 {
        let profile = new_profile(&node, "warm", has_allocations);
        let threads = profile.sum("wall", |sample| sample.label("pid") == warm.pid().to_string());
        assert!(
            threads >= profile.duration_ns,
            "{threads} ns of all its threads in {} ns",
            profile.duration_ns
        );
    }
    freeze("0");
    new_profile(&node, "cold", has_allocations);
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
    let program = |flags: &[&str]| Workload::native("spin", flags).unwrap().command_line().remove(0);
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
    let has =
        |function: &'static str| move |profile: &Profile| profile.sum("samples", |s| s.has(function)) > 0;
    new_profile(&node, "first", has("spin_here"));
    let done = app.ask("again", "done").unwrap();
    if done["errno"] != 0 {
        let line = format!("\nSKIPPED faults: pid used again: clone3: errno {}\n", done["errno"]);
        std::io::stderr().write_all(line.as_bytes()).unwrap();
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
        of.map(|(_, profile)| profile.sum("samples", |sample| own(sample) && sample.has(function))).sum()
    };
    let all = |service: &str| samples(service, "main");
    let counts = ["first", "second"]
        .map(|service| (all(service), samples(service, "spin_here"), samples(service, "spin_there")));
    let [(first, first_here, first_there), (second, second_here, second_there)] = counts;
    assert_eq!((first_there, second_here), (0, 0), "{counts:?}: what one did stands under the other's name");
    assert!(
        first_here > 0 && second_there > 0 && first >= first_here && second >= second_there,
        "{counts:?}"
    );
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
        *found.entry(link.replace(|character: char| character.is_ascii_digit(), "")).or_default() += 1;
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
        "selection: {{only: [{{cgroup: /perfusion-test-dying*}}]}}\nattach: {{policy: all}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let allocator = Workload::dotnet(Runtime::Net9, "allocator", &[]).unwrap();
    let whole = allocator.clone().env("DD_SERVICE", "whole").start().unwrap();
    group.take(whole.pid()).unwrap();
    new_profile(&node, "whole", has_allocations);
    // What an attach has the app call, the library's own calls last (`profiler-shim/src/syscall.rs`), and the how manieth of each it dies in:
    // it is told to by the kernel as it enters the call.
    let deaths = [
        ("openat", 1),
        ("mmap", 1),
        ("mmap", 4),
        ("mmap", 8),
        ("memfd_create", 1),
        ("ftruncate", 1),
        ("fcntl", 1),
        ("madvise", 1),
        ("prctl", 1),
        ("getrandom", 1),
        ("munmap", 2),
    ];
    let trace = node.scratch.path("trace");
    let (mut of_the_library, mut dead) = (0, Vec::new());
    for (call, which) in deaths {
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
        tracer.arg(&trace).args(["-e", &format!("inject={call}:signal=SIGKILL:when={which}")]);
        let mut tracer = tracer.spawn().unwrap();
        let traced = |thread: &Path| {
            let status = fs::read_to_string(thread.join("status")).unwrap_or_default();
            // The app's own calls count, too: it may be dead before it is known to be traced.
            !status.contains("TracerPid:\t0\n") || status.contains("State:\tZ")
        };
        wait_until("the tracer", DEADLINE, || {
            let threads = fs::read_dir(format!("/proc/{}/task", app.pid())).into_iter().flatten().flatten();
            threads.map(|thread| thread.path()).all(|thread| traced(&thread)).then_some(())
        })
        .unwrap();
        group.take(app.pid()).unwrap();
        let status = app.await_exit(DEADLINE).unwrap_or_else(|error| panic!("{call} {which}: {error}"));
        tracer.wait().unwrap();
        let text = fs::read_to_string(&trace).unwrap();
        assert!(text.contains("killed by SIGKILL"), "{call} {which}: {status}\n{text}");
        of_the_library += usize::from(text.contains("memfd_create(\"perfusion-shim"));
        dead.push(format!("/proc/{}/", app.pid()));
    }
    assert!(of_the_library > 0, "none died in the library");
    writeln!(std::io::stderr(), "{of_the_library} of {} died after the library had begun", deaths.len())
        .unwrap();
    // The living one has a region; of the dead ones none is left, and nothing of their own. A library that was mapped when its process died is a file with
    // symbols like others, and stays open as those do, within a bound.
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
        node.metric("perfusion_daemon_reloads_total") + node.metric("perfusion_daemon_reloads_failed_total")
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
    // Of profiled files some more may be open by now; one that is lost with each reload of a kind would be more.
    for (what, count) in &after {
        let more = count.saturating_sub(before.get(what).copied().unwrap_or(0));
        assert!(more < times / versions.len(), "{count} of {what}: {before:#?}, then {after:#?}");
    }
    assert_eq!(node.metric("perfusion_daemon_recordings_total"), 1.0, "the recording was not begun anew");
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
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "none"]).arg(&at).status();
        assert!(mounted.unwrap().success());
        Self(at)
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
    // Room for bytes, but not for many files: so it is the writing that fails, beyond the floor of free space.
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
        let before = lost(&node);
        wait_until("files that are not written to be counted", DEADLINE, || {
            (lost(&node) > before).then_some(())
        })
        .unwrap_or_else(|error| panic!("{trouble}: {error}\n{}", node.daemon().progress()));
        assert_eq!(node.metric("perfusion_recording"), 1.0, "{trouble}");
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

#[test]
fn a_receiver_that_says_nothing_holds_the_end_up_no_longer_than_promised() {
    let Some(_turn) = begin_beside("faults: silent receiver", &[RECORD, &[Need::C]].concat()) else { return };
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
        "selection: {{only: [{{command: spin}}]}}\nlimits: {{{}}}\nspool: {{directory: {:?}, keep_free: 0B}}\n\
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
    // Five seconds for the sinks, and the rest for the last window on a busy machine.
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    let spooled = fs::read_dir(node.scratch.path("spool")).unwrap().flatten().next().unwrap().path();
    let waiting = fs::read_dir(spooled).unwrap().count();
    assert!(waiting > 0, "what was not taken waits for the next daemon");

    // Told twice, it ends at once.
    node.start();
    hears.recv_timeout(DEADLINE).unwrap();
    let daemon = node.take();
    daemon.signal(Signal::TERM).unwrap();
    let_pass(Duration::from_millis(100));
    let asked = Instant::now();
    daemon.signal(Signal::TERM).ok();
    let outcome = daemon.finish(SLACK).unwrap();
    // Else it waits five seconds for the sinks.
    assert!(asked.elapsed() < Duration::from_millis(4500), "{:?}", asked.elapsed());
    assert!([0, 130].contains(&outcome.code()), "{}", outcome.stderr);
    drop(app);
}

#[test]
fn arguments_and_environment_of_a_process_are_in_nothing_the_daemon_says() {
    let Some(_turn) = begin_beside("faults: secrets", &[RECORD, &[Need::C]].concat()) else { return };
    let workload = Workload::native("spin", &[]).unwrap();
    let app = workload.arg("--password=open-sesame").env("DB_PASSWORD", "abracadabra").start().unwrap();
    let mut node = Node::new();
    node.configure(&format!(
        "selection: {{only: [{{command: spin}}]}}\nlog: {{level: debug}}\nlimits: {{{}}}\n",
        node.kill_switch()
    ));
    node.start();
    let own = app.pid().to_string();
    wait_until("a profile of it", DEADLINE, || {
        let of = |profile: &Profile| profile.samples.iter().any(|sample| sample.label("pid") == own);
        node.profiles().iter().any(|(_, profile)| of(profile)).then_some(())
    })
    .unwrap();
    let mut said = vec![node.get("/metrics"), node.get("/debug/pipeline"), node.daemon().progress()];
    for service in
        fs::read_dir(node.scratch.path("out")).unwrap().flatten().filter(|entry| entry.path().is_dir())
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
    let resident = |node: &Node| node.metric("perfusion_memory_bytes{part=\"resident\"}");
    // As many as the promise is about where the machine is free to, and fewer a second where it is not.
    let (count, rate) = if long_form() { (60_000, 2_000) } else { (1_500, 2_000) };
    let storm = Workload::native("storm", &["-static"]).unwrap().arg(count.to_string()).arg(rate.to_string());
    let mut storm = storm.start().unwrap();
    group.take(storm.pid()).unwrap();
    let truth = storm.await_line("truth", 10 * DEADLINE).unwrap();
    assert_eq!(truth["failed"], 0, "{truth}");
    let started = truth["started"].as_u64().unwrap();
    writeln!(std::io::stderr(), "{started} processes in {} s", truth["seconds"]).unwrap();
    // What it has not got to yet is in its ring.
    windows(&node, 2.0);
    let after_storm = resident(&node);
    // Ten seconds later they are forgotten: of the dead the daemon knows but those that others left just now.
    let dead_ones = || {
        let mut connection = UnixStream::connect(node.scratch.path("run/control.sock")).unwrap();
        write!(connection, "GET /processes HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        // It may have no time to answer now, and says so.
        let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).ok()?;
        let pids =
            answer["processes"].as_array().unwrap().iter().map(|process| process["pid"].as_u64().unwrap());
        Some(pids.filter(|pid| !Path::new(&format!("/proc/{pid}")).exists()).count())
    };
    let forgotten = wait_until("the dead to be forgotten", DEADLINE, || {
        (u64::try_from(dead_ones()?).unwrap() * 20 < started).then_some(())
    });
    assert!(forgotten.is_ok(), "{:?} dead ones of {started} are known", dead_ones());
    assert!(resident(&node) < after_storm * 1.1, "{} after {after_storm}", resident(&node));
    assert!(node.metric("perfusion_recording") == 1.0);
    drop(app);
    node.end();
}
