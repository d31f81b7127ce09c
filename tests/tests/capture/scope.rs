//! Whose events are recorded, what happens when there are too many, and what is left behind.

use std::collections::{HashMap, HashSet};
use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use perfusion_model::event::{Event, EventKind};
use perfusion_model::feature::Feature;
use perfusion_sources::kernel::rule_set::RuleSet;
use perfusion_sources::kernel::{KernelOptions, KernelSelection, KernelSource};
use system_tests::environment::skip;
use system_tests::wait_until;

use super::{
    DEADLINE, NEEDS, Process, Worker, assert_laws, begin, collect, counters, own_options,
    records_stored, settled, times, yielding,
};

#[test]
fn children_are_followed_from_fork_to_exit() {
    let Some(_turn) = begin("capture: process life", NEEDS) else { return };
    let mut source = KernelSource::start(&own_options()).unwrap();
    let child = Command::new("/bin/true").spawn().unwrap();
    let pid = child.id();
    let mut events = Vec::new();
    let status = { child }.wait().unwrap();
    assert!(status.success());
    let of_child = |event: &&Event| match &event.kind {
        EventKind::Exec { pid: of, .. } => *of == pid,
        EventKind::Fork { thread, .. } | EventKind::Exit { thread } => thread.pid == pid,
        EventKind::Mmap(mmap) => mmap.pid == pid,
        EventKind::ThreadEnd(end) => end.thread.pid == pid,
        _ => false,
    };
    let life = wait_until("the child's end", DEADLINE, || {
        collect(&mut source, &mut events);
        let life: Vec<&Event> = events.iter().filter(of_child).collect();
        let ends = |event: &&Event| matches!(event.kind, EventKind::ThreadEnd(_));
        let exits = |event: &&Event| matches!(event.kind, EventKind::Exit { .. });
        (life.iter().any(ends) && life.iter().any(exits))
            .then(|| life.iter().map(|event| (*event).clone()).collect::<Vec<_>>())
    })
    .unwrap();
    let time = |wanted: &dyn Fn(&EventKind) -> bool| {
        life.iter()
            .find(|event| wanted(&event.kind))
            .map_or_else(|| panic!("{life:?}"), |event| event.time)
    };
    let fork = time(
        &|kind| matches!(kind, EventKind::Fork { parent, .. } if parent.pid == std::process::id()),
    );
    let exec = time(&|kind| matches!(kind, EventKind::Exec { comm, .. } if comm == "true"));
    let mapped = time(&|kind| match kind {
        EventKind::Mmap(mmap) => mmap.path.ends_with("/true") && mmap.inode != 0,
        _ => false,
    });
    let libc = time(&|kind| matches!(kind, EventKind::Mmap(mmap) if mmap.path.contains("libc")));
    let exit = time(&|kind| matches!(kind, EventKind::Exit { .. }));
    assert!(fork < exec && exec < mapped && mapped < libc && libc < exit, "{life:?}");
    assert!(
        times(&mut source).values().all(|thread| thread.times.thread.pid != pid),
        "its entry is gone"
    );
    let strangers: HashSet<u32> = source_pids(&events)
        .into_iter()
        .filter(|of| *of != pid && *of != std::process::id())
        .collect();
    assert!(strangers.is_empty(), "events of {strangers:?}, which nobody selected");
}

fn source_pids(events: &[Event]) -> Vec<u32> {
    events
        .iter()
        .filter_map(|event| match &event.kind {
            EventKind::CpuSample(sample) => Some(sample.thread.pid),
            EventKind::WaitStart(wait) => Some(wait.thread.pid),
            EventKind::OffCpu(thread) => Some(thread.thread.pid),
            EventKind::WaitEnd(wait) => Some(wait.thread.pid),
            EventKind::ThreadEnd(end) => Some(end.thread.pid),
            EventKind::Rename(rename) => Some(rename.thread.pid),
            EventKind::Mmap(mmap) => Some(mmap.pid),
            EventKind::Exec { pid, .. } => Some(*pid),
            EventKind::Fork { thread, .. }
            | EventKind::Exit { thread }
            | EventKind::Comm { thread, .. } => Some(thread.pid),
            // It names only the thread, whose wait has named the process.
            EventKind::Wake(_) | EventKind::Shim { .. } | EventKind::ProcessRecordsLost => None,
        })
        .collect()
}

#[test]
fn a_full_ring_drops_and_counts() {
    let Some(_turn) = begin("capture: full ring", NEEDS) else { return };
    let workers: Vec<_> = (0..4).map(|_| yielding()).collect();
    let options = KernelOptions {
        ring_bytes: 64 * 1024,
        frequency_hz: 1000,
        wait_stack_budget_bytes_per_s: 1 << 30,
        ..own_options()
    };
    let mut source = KernelSource::start(&options).unwrap();
    let full = ["cpu_samples_ring_full", "waits_ring_full"];
    let counted = wait_until("drops of both kinds", DEADLINE, || {
        let counters = counters(&source);
        full.iter().all(|name| counters[name] > 0).then_some(())
    });
    for worker in workers {
        worker.stop();
    }
    counted.unwrap();
    let mut events = Vec::new();
    let last = wait_until("an empty ring", DEADLINE, || {
        collect(&mut source, &mut events);
        let counters = counters(&source);
        (counters["records_read"] == records_stored(&counters)).then_some(counters)
    });
    assert_laws(&last.unwrap());
}

#[test]
fn the_profiler_leaves_itself_out_and_nothing_behind() {
    let Some(_turn) = begin("capture: leaves nothing behind", NEEDS) else { return };
    let mine = || {
        let mut links = Vec::new();
        for entry in fs::read_dir("/proc/self/fd").unwrap() {
            let link = fs::read_link(entry.unwrap().path()).unwrap_or_default();
            let link = link.to_string_lossy().into_owned();
            if link.contains("bpf") || link.contains("perf_event") {
                links.push(link);
            }
        }
        links
    };
    assert_eq!(mine(), Vec::<String>::new());
    let worker = Worker::start("own", || thread::sleep(Duration::from_millis(1)));
    let mut source = KernelSource::start(&KernelOptions::default()).unwrap();
    let mut events = Vec::new();
    wait_until("100 events of others", DEADLINE, || {
        collect(&mut source, &mut events);
        (events.len() >= 100).then_some(())
    })
    .unwrap();
    let all = times(&mut source);
    worker.stop();
    assert!(!source_pids(&events).contains(&std::process::id()));
    assert!(
        all.len() > 20 && all.values().all(|thread| thread.times.thread.pid != std::process::id())
    );
    // The kernel thread that every Linux has sleeps, and is known all the same.
    assert!(all.contains_key(&2), "kthreadd");
    assert!(!mine().is_empty());
    assert_laws(&settled(&source));
    drop(source);
    assert_eq!(mine(), Vec::<String>::new());
}

#[test]
fn a_cgroup_is_selected_by_its_id() {
    use std::os::unix::fs::MetadataExt as _;
    let Some(_turn) = begin("capture: cgroup", NEEDS) else { return };
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let home = mounts
        .lines()
        .find_map(|line| line.split(" cgroup2 ").next().filter(|start| start.len() < line.len()));
    let Some(home) = home.and_then(|start| start.split(' ').nth(1)) else {
        // Past the capture of the test runner, as the harness does it.
        skip("capture: cgroup", "no cgroup v2 hierarchy is mounted");
        return;
    };
    let group = tempfile::Builder::new().prefix("perfusion-test-").tempdir_in(home).unwrap();
    let id = fs::metadata(group.path()).unwrap().ino();
    let child = Process(
        Command::new("/bin/sh").args(["-c", "while :; do /bin/true; done"]).spawn().unwrap(),
    );
    let (pid, procs) = (child.0.id(), group.path().join("cgroup.procs"));
    fs::write(&procs, pid.to_string()).unwrap();
    let options =
        KernelOptions { selection: KernelSelection::Cgroup(id), ..KernelOptions::default() };
    let mut source = KernelSource::start(&options).unwrap();
    let mut events = Vec::new();
    let from_probes = |event: &&Event| {
        matches!(
            event.kind,
            EventKind::CpuSample(_)
                | EventKind::WaitStart(_)
                | EventKind::WaitEnd(_)
                | EventKind::ThreadEnd(_)
        )
    };
    let seen = wait_until("10 threads of the cgroup to end", DEADLINE, || {
        collect(&mut source, &mut events);
        let ends =
            events.iter().filter(|event| matches!(event.kind, EventKind::ThreadEnd(_))).count();
        (ends >= 10).then(|| times(&mut source))
    });
    drop(child);
    // A child of the shell may still be ending.
    wait_until("an empty cgroup", DEADLINE, || {
        fs::read_to_string(&procs).unwrap().is_empty().then_some(())
    })
    .unwrap();
    fs::remove_dir(group.path()).unwrap();
    let seen = seen.unwrap();
    assert!(seen.contains_key(&pid) && seen.len() < 5, "{seen:?}");
    assert!(
        source_pids(&events.iter().filter(from_probes).cloned().collect::<Vec<_>>()).contains(&pid)
    );
    assert_laws(&settled(&source));
}

/// A thread that leaves the selection has no more events, not even its end.
#[test]
fn what_becomes_another_program_than_is_selected_ends_with_what_was_seen_of_it() {
    const CHILDREN: usize = 40;
    let Some(_turn) = begin("capture: leaving the selection", NEEDS) else { return };
    let directory = tempfile::tempdir().unwrap();
    let shell = directory.path().join("chosen-shell");
    std::os::unix::fs::symlink("/bin/sh", &shell).unwrap();
    let mut name = [0; 16];
    name[..12].copy_from_slice(b"chosen-shell");
    let others = RuleSet::of_everybody().others & !Feature::Recorded.given();
    let commands = HashMap::from([(name, Feature::Recorded.given())]);
    let rules = RuleSet { others, commands, ..RuleSet::default() };
    let options =
        KernelOptions { selection: KernelSelection::Rules(rules), ..KernelOptions::default() };
    let mut source = KernelSource::start(&options).unwrap();
    let script = format!(
        "i=0; while [ $i -lt {CHILDREN} ]; do /bin/true; i=$((i+1)); done; echo done; read end"
    );
    let mut command = Command::new(&shell);
    command.args(["-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = Process(command.spawn().unwrap());
    child.0.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
    let mut events = Vec::new();
    let seen = wait_until("nobody but the shell", DEADLINE, || {
        collect(&mut source, &mut events);
        let seen = times(&mut source);
        seen.keys().all(|tid| *tid == child.0.id()).then_some(seen)
    })
    .unwrap();
    assert_eq!(seen.len(), 1, "{seen:?}");
    collect(&mut source, &mut events);
    let ends: Vec<_> = events
        .iter()
        .filter_map(|event| match &event.kind {
            EventKind::ThreadEnd(end) => Some((end.thread, end.since)),
            _ => None,
        })
        // The shell has its name a moment before it is told that it is another program: a switch
        // between is one of the program before.
        .filter(|(thread, _)| thread.tid != child.0.id())
        .collect();
    assert_eq!(ends.len(), CHILDREN, "{ends:?}");
    assert_eq!(ends.iter().collect::<HashSet<_>>().len(), CHILDREN, "each of them once: {ends:?}");
    let counters = settled(&source);
    assert_eq!(counters["threads_left"], CHILDREN as u64);
    assert_laws(&counters);
}

/// Prints what the probes cost, by the kernel's own statistics. A figure, not a promise: run by
/// hand or by the benchmarks.
#[test]
#[ignore = "prints figures, asserts nothing"]
fn what_a_switch_and_a_sample_cost() {
    const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";
    let Some(_turn) = begin("capture: costs", NEEDS) else { return };
    let before = fs::read_to_string(SWITCH).unwrap();
    fs::write(SWITCH, "1").unwrap();
    // The clamp to the least budget: nearly no wait is kept.
    for (what, budget) in [("no stacks", 0), ("all stacks", 1 << 40)] {
        for (who, selection) in [
            ("all", KernelSelection::All),
            ("pid", KernelSelection::Pids(vec![std::process::id()])),
            ("others", KernelSelection::Pids(vec![1])),
        ] {
            let options = KernelOptions {
                wait_stack_budget_bytes_per_s: budget,
                selection,
                exclude_self: false,
                ring_bytes: 64 << 20,
                ..KernelOptions::default()
            };
            let begun = Instant::now();
            let mut source = KernelSource::start(&options).unwrap();
            let started = begun.elapsed();
            let (mut near, mut far) = (std::io::pipe().unwrap(), std::io::pipe().unwrap());
            let partner = thread::spawn(move || {
                let mut byte = [0];
                while near.0.read_exact(&mut byte).is_ok() && far.1.write_all(&byte).is_ok() {}
            });
            let mut stored = Vec::new();
            let mut rounds = 0u32;
            let length = Instant::now();
            while length.elapsed() < Duration::from_secs(1) {
                near.1.write_all(b".").unwrap();
                far.0.read_exact(&mut [0]).unwrap();
                rounds += 1;
                if rounds.is_multiple_of(256) {
                    collect(&mut source, &mut stored);
                    stored.clear();
                }
            }
            let costs: Vec<String> = source
                .costs()
                .iter()
                .filter(|cost| cost.runs > 0)
                .map(|cost| {
                    format!("{} {} ns ({})", cost.name, cost.total_ns / cost.runs, cost.runs)
                })
                .collect();
            let counters = counters(&source);
            eprintln!(
                "{what}, {who}: start {started:?}, {} rounds, {} of {} waits kept; {}",
                rounds,
                counters["waits_stored"],
                counters["waits"],
                costs.join(", ")
            );
            drop(near.1);
            partner.join().unwrap();
        }
    }
    fs::write(SWITCH, before).unwrap();
}
