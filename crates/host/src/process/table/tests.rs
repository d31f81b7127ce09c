//! Processes that come, fork, exec, lose records and end.

use super::held_memory::MAX_MAPPING_BYTES;
use super::lost_records::{DOUBT_INTERVAL, LONGEST_DOUBT_INTERVAL};
use super::observe::MAX_INHERITED;
use super::registry::{FEW, MAX_PROCESSES};
use super::*;
use crate::process::code_cache::CodeCache;
use crate::process::container::home;
use crate::process::thread_contexts::ThreadContextLookup;
use crate::process::thread_variable::tests::library;
use crate::process::{ProcessError, published};
use ebpf_common::key::{SPAN_DESCRIPTOR, SpanPlace};
use perfusion_model::event::{
    Event, EventKind, Mmap, ProbeWalk, RegionId, ShimEvent, ThreadId, UserContext, UserRegs,
    WalkEnd,
};
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_unwind::managed::JitBody;
use perfusion_unwind::unwinder::UnwindLimits;
use std::io::Write as _;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

fn event(kind: EventKind) -> Event {
    Event { time: MonotonicNs(1), kind }
}

fn at(seconds: u64, kind: EventKind) -> Event {
    Event { time: MonotonicNs(seconds * 1_000_000_000), kind }
}

fn thread(pid: u32) -> ThreadId {
    ThreadId { pid, tid: pid }
}

fn mmap(pid: u32, start: u64, len: u64, path: &str) -> EventKind {
    let inode = u64::from(path.starts_with('/'));
    EventKind::Mmap(Mmap {
        pid,
        start,
        len,
        file_offset: 0,
        device: (0, 1),
        inode,
        path: path.into(),
    })
}

/// A pid no process can have (kernel limit 2^22), and so have those that follow.
const NOBODY: u32 = 5_000_000;

/// Kills and reaps.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// A child that waits in a system call, and its context: stack pointer and PC as /proc states
/// them, stack from its memory.
fn sleeper() -> (Sleeper, UserContext) {
    let child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
    let pid = child.id();
    let child = Sleeper(child);
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let line = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap();
        let fields: Vec<&str> = line.split_whitespace().collect();
        let number = |s: &str| u64::from_str_radix(s.trim_start_matches("0x"), 16).unwrap();
        // clock_nanosleep: it got to the end of its start-up.
        if let ["230", .., sp, pc] = fields[..] {
            let mut regs = UserRegs { ip: number(pc), known: 1 << 7, ..UserRegs::default() };
            regs.gpr[7] = number(sp);
            let mut stack = vec![0; 16 << 10];
            let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
            let length = memory.read_at(&mut stack, regs.gpr[7]).unwrap();
            stack.truncate(length);
            return (child, UserContext { regs, stack, ..UserContext::default() });
        }
        assert!(Instant::now() < deadline, "sleep never slept: {line}");
        std::thread::yield_now();
    }
}

#[test]
fn a_sleeping_process_is_walked_to_its_start_by_files_found_through_its_mappings() {
    let (child, context) = sleeper();
    let mut table = ProcessTable::new();
    let id = table.adopt(child.0.id()).unwrap();
    let done = table.finish(child.0.id(), &context, UnwindLimits::default());
    assert!(done.reached_thread_start, "{done:?}");
    assert_eq!((done.guessed, done.broken), (0, None));
    let paths: Vec<String> = done
        .frames
        .iter()
        .map(|frame| match frame {
            FrameKey::Native { image, .. } => table.image(*image).unwrap().path.to_string(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(paths.first().unwrap().contains("libc"), "{paths:?}");
    assert!(!paths.last().unwrap().contains("libc"), "{paths:?}");
    assert_eq!(table.info(id).unwrap().name.as_str(), "sleep");
    let FrameKey::Native { image, .. } = done.frames[0] else { unreachable!() };
    assert!(table.image(image).unwrap().build_id.is_some());
}

#[test]
fn probes_that_walk_nothing_get_no_rules_and_a_copy_of_theirs_is_walked_once() {
    let (child, mut context) = sleeper();
    let pid = child.0.id();
    // As on a kernel before 5.17: no rules, so no frames either.
    context.walk = Some(ProbeWalk {
        time: MonotonicNs::now(),
        space: 0,
        frames: Vec::new(),
        end: WalkEnd::HandedOver { exact: true },
    });
    let mut table = ProcessTable::new();
    table.push_no_rules();
    let first = table.finish(pid, &context, UnwindLimits::default());
    assert!(first.reached_thread_start && !first.seen_before, "{first:?}");
    let second = table.finish(pid, &context, UnwindLimits::default());
    assert!(second.seen_before && second.frames == first.frames, "{second:?}");
    assert_eq!((table.counters().rules_pushed, table.updates.take().0.len()), (0, 0));
    // Where they could walk, the same context is what they have no rules for yet.
    let mut table = ProcessTable::new();
    assert_eq!(
        table.finish(pid, &context, UnwindLimits::default()).frames.len(),
        first.frames.len()
    );
    assert!(table.counters().rules_pushed > 0);
}

#[test]
fn a_look_for_spans_ends_with_the_processs_share_of_work() {
    let (child, _) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    table.adopt(pid).unwrap();
    assert_eq!(table.thread_pointers(pid), Some(None), "nothing has it");
    let known = |table: &ProcessTable| {
        let ids: Vec<ImageId> =
            table.registry.live[&pid].space.images.values().copied().flatten().collect();
        assert!(!ids.is_empty() && ids.iter().all(|id| table.images.is_asked(*id)));
    };
    known(&table);
    // One of its libraries has, mapped where nothing else is.
    let own = (0x3000, object::elf::R_X86_64_TLSDESC, 1, 0);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&library(published::THREAD_VARIABLE, &[own], &[])).unwrap();
    let meta = file.as_file().metadata().unwrap();
    let start = 0x10_0000;
    table.observe(&event(EventKind::Mmap(Mmap {
        pid,
        start,
        len: 0x1000,
        file_offset: 0,
        device: (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev())),
        inode: meta.ino(),
        path: file.path().to_str().unwrap().to_owned(),
    })));
    let place =
        SpanPlace { address: start + 0x3000, offset: 0, kind: SPAN_DESCRIPTOR, entry_bytes: 16 };
    assert_eq!(table.thread_pointers(pid), Some(Some(place)));
    let process = table.registry.live.get_mut(&pid).unwrap();
    table.common.spend(&mut process.share, Duration::from_secs(60));
    assert_eq!((table.thread_pointers(pid), table.counters().budget_refusals), (None, 1));
    if cfg!(target_arch = "x86_64") {
        assert_eq!(
            (table.find_spans(pid), table.counters().budget_refusals),
            (ThreadContextLookup::PutOff, 2)
        );
    }
}

#[test]
fn a_stack_of_a_process_that_is_gone_says_so() {
    let mut table = ProcessTable::new();
    let done = table.finish(NOBODY, &UserContext::default(), UnwindLimits::default());
    assert_eq!(done.broken, Some(Marker::TruncatedProcessGone));
    assert_eq!(table.counters().stacks_of_gone_processes, 1);
}

#[test]
fn exec_makes_a_new_process_with_no_mappings() {
    let (child, _) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    let before = table.adopt(pid).unwrap();
    assert!(table.mappings(pid).next().is_some());
    table.observe(&event(EventKind::Exec { pid, comm: "other".into() }));
    let after = table.id(pid).unwrap();
    assert_ne!(before, after);
    assert!(table.mappings(pid).next().is_none());
    assert_eq!(
        (table.info(after).unwrap().exec_count, table.info(after).unwrap().name.as_str()),
        (1, "other")
    );
    assert_eq!(table.info(before).unwrap().name.as_str(), "sleep", "what was is still known");
}

#[test]
fn a_fork_inherits_mappings_and_a_new_thread_is_no_process() {
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "parent".into() }));
    table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "//anon")));
    let (parent, child) = (thread(NOBODY), thread(NOBODY + 1));
    table.observe(&event(EventKind::Fork { parent, thread: child }));
    assert_eq!(table.mappings(child.pid).count(), 1);
    let same = ThreadId { pid: NOBODY, tid: NOBODY + 2 };
    table.observe(&event(EventKind::Fork { parent, thread: same }));
    assert_eq!(table.id(NOBODY + 2), None);
    table.observe(&event(mmap(NOBODY, 0x5000, 0x1000, "//anon")));
    assert_eq!((table.mappings(NOBODY).count(), table.mappings(child.pid).count()), (2, 1));
}

/// Of a process that was there before us and has never been seen in them.
#[test]
fn files_of_a_fork_that_is_gone_are_found_with_its_parent() {
    let found = |forked: MonotonicNs| {
        let mut table = ProcessTable::new();
        let (parent, child) = (thread(std::process::id()), thread(NOBODY));
        table.adopt(parent.pid).unwrap();
        let kind = EventKind::Fork { parent, thread: child };
        table.observe(&Event { time: forked, kind });
        let regs =
            UserRegs { ip: home as *const () as u64, known: u16::MAX, ..UserRegs::default() };
        table.finish(
            child.pid,
            &UserContext { regs, ..UserContext::default() },
            UnwindLimits::default(),
        );
        table.main_image(child.pid)
    };
    assert!(found(MonotonicNs::now()).is_some());
    assert_eq!(
        found(MonotonicNs(0)),
        None,
        "changed since: it may be another file under the same number"
    );
}

#[test]
fn after_lost_records_running_processes_are_read_anew() {
    let (child, context) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    // As if its exec record, and the mappings after it, had been lost.
    table.observe(&event(EventKind::Exec { pid, comm: "before".into() }));
    table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "ended".into() }));
    let (before, ended) = (table.id(pid), table.id(NOBODY));
    table
        .common
        .spend(&mut table.registry.live.get_mut(&pid).unwrap().share, Duration::from_millis(3));
    table.observe(&event(EventKind::ProcessRecordsLost));
    let done = table.finish(pid, &context, UnwindLimits::default());
    assert!(done.reached_thread_start, "{done:?}");
    assert_ne!(table.id(pid), before);
    assert_eq!(table.id(NOBODY), ended);
    assert!(
        table.registry.live[&pid].share.time() >= Duration::from_millis(3),
        "what it has used up stays so"
    );
    table.observe(&event(EventKind::ProcessRecordsLost));
    assert_eq!(table.counters().doubts, 1, "not twice a second");
}

#[test]
fn what_is_known_of_a_process_outlives_lost_records_where_it_is_still_so() {
    let (child, context) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    let id = table.adopt(pid).unwrap();
    let whole = table.finish(pid, &context, UnwindLimits::default());
    let mapped: Vec<Mapping> = table.mappings(pid).cloned().collect();
    // As if the record of one that covers code had been lost, and of another that was taken
    // away again.
    table.observe(&event(mmap(pid, 0x1_0000, 0x1000, "/somewhere")));
    table.observe(&event(mmap(pid, mapped[0].range.start, 0x1000, "/elsewhere")));
    let steps = table.registry.live[&pid].code.len();
    table.observe(&event(EventKind::ProcessRecordsLost));
    assert!(table.registry.live[&pid].space.in_doubt);
    assert_eq!(table.finish(pid, &context, UnwindLimits::default()).frames, whole.frames);
    assert_eq!(table.id(pid), Some(id));
    assert!(
        !table.registry.live[&pid].space.in_doubt
            && table.registry.live[&pid].code.len() >= steps
            && steps > 0
    );
    assert_eq!(table.mappings(pid).cloned().collect::<Vec<_>>(), mapped);
}

#[test]
fn losses_that_go_on_are_not_made_up_for_every_second() {
    let mut table = ProcessTable::new();
    let mut intervals = Vec::new();
    for _ in 0..6 {
        table.observe(&event(EventKind::ProcessRecordsLost));
        intervals.push(table.lost.interval.delay().as_secs());
        table.lost.doubted = Instant::now().checked_sub(table.lost.interval.delay());
    }
    assert_eq!(intervals, [1, 2, 4, 8, 16, 16]);
    table.lost.doubted = Instant::now().checked_sub(3 * LONGEST_DOUBT_INTERVAL);
    table.observe(&event(EventKind::ProcessRecordsLost));
    assert_eq!(table.lost.interval.delay(), DOUBT_INTERVAL);
}

#[test]
fn a_file_that_is_rewritten_and_mapped_again_is_another_one() {
    let pid = std::process::id();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().canonicalize().unwrap().join("plugin.so");
    std::fs::write(&path, "the first").unwrap();
    let meta = path.metadata().unwrap();
    let device = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let path_text = path.to_str().unwrap().to_owned();
    let map = |start: u64| {
        let (inode, path) = (meta.ino(), path_text.clone());
        EventKind::Mmap(Mmap { pid, start, len: 0x1000, file_offset: 0, device, inode, path })
    };
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid, comm: "host".into() }));
    for start in [0x1000, 0x5000] {
        table.observe(&event(map(start)));
    }
    let steps = |table: &mut ProcessTable| {
        for ip in [0x1010, 0x5010] {
            let regs = UserRegs { ip, known: 0, ..UserRegs::default() };
            let context = UserContext { regs, ..UserContext::default() };
            table.finish(pid, &context, UnwindLimits::default());
        }
        table.registry.live[&pid].code.steps.len()
    };
    assert_eq!(steps(&mut table), 2);
    table.observe(&event(map(0x1000)));
    assert_eq!(table.registry.live[&pid].code.steps.len(), 2, "the same file at the same place");
    let first = table.main_image(pid).unwrap();
    std::fs::write(&path, "the second one").unwrap();
    assert_eq!(path.metadata().unwrap().ino(), meta.ino());
    table.observe(&event(map(0x1000)));
    assert_eq!(table.registry.live[&pid].code.steps.len(), 0, "wherever it is mapped");
    assert_ne!(table.main_image(pid).unwrap(), first);
    // And when nobody has time to look at it.
    assert_eq!(steps(&mut table), 2);
    table
        .common
        .spend(&mut table.registry.live.get_mut(&pid).unwrap().share, Duration::from_secs(60));
    table.observe(&event(map(0x1000)));
    assert_eq!(table.registry.live[&pid].code.steps.len(), 0);
}

#[test]
fn the_end_of_processes_that_was_not_reported_is_found_out() {
    let mut table = ProcessTable::new();
    let parent = thread(std::process::id());
    table.adopt(parent.pid).unwrap();
    for child in 1..=u32::try_from(MAX_PROCESSES).unwrap() + 5 {
        table.observe(&event(EventKind::Fork { parent, thread: thread(NOBODY + child) }));
    }
    assert_eq!(
        (table.registry.live.len(), table.counters().processes_refused),
        (7, 0),
        "when the table is full"
    );
    table.observe(&event(EventKind::Exit { thread: thread(NOBODY + MAX_PROCESSES as u32 + 1) }));
    let capacities = |table: &ProcessTable| {
        [table.registry.live.capacity(), table.registry.identities.capacity()]
    };
    assert!(capacities(&table).into_iter().all(|capacity| capacity >= MAX_PROCESSES));
    table.forget_gone(&HashSet::new(), &mut HashSet::new());
    assert_eq!(table.registry.live.len(), 2, "one whose end was reported is kept for late stacks");
    assert!(
        capacities(&table).into_iter().all(|capacity| capacity < 4 * FEW),
        "{:?}",
        capacities(&table)
    );
}

#[test]
fn mappings_of_all_processes_are_bounded_and_read_anew_when_they_are_needed() {
    let (child, context) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    let id = table.adopt(pid).unwrap();
    let whole = table.finish(pid, &context, UnwindLimits::default());
    assert!(whole.reached_thread_start);
    let long = "x".repeat(4000);
    for other in 0..12 {
        table.observe(&event(EventKind::Exec { pid: NOBODY + other, comm: "greedy".into() }));
        for file in 0..1000u64 {
            let path = format!("/{file}{long}");
            table.observe(&event(mmap(NOBODY + other, file * 0x2000, 0x1000, &path)));
        }
    }
    let held: usize =
        table.registry.live.values().map(|process| process.space.mappings.held_bytes()).sum();
    assert!(held <= MAX_MAPPING_BYTES && held > MAX_MAPPING_BYTES / 2, "{held}");
    assert!(table.counters().mappings_evicted > 1);
    assert!(table.registry.live[&pid].space.mappings.is_empty(), "it was sampled longest ago");
    assert_eq!(table.finish(pid, &context, UnwindLimits::default()).frames, whole.frames);
    assert_eq!(table.id(pid), Some(id));
}

#[test]
fn files_that_are_mapped_no_more_are_forgotten() {
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "loads".into() }));
    for inode in 1..10_000 {
        table.observe(&event(EventKind::Mmap(Mmap {
            pid: NOBODY,
            start: 0x1000,
            len: 0x1000,
            file_offset: 0,
            device: (0, 1),
            inode,
            path: "/plugin".into(),
        })));
    }
    assert!(table.registry.live[&NOBODY].space.images.len() < 100);
}

#[test]
fn the_files_of_a_parent_are_copied_only_when_they_are_few() {
    for (files, inherited) in [(MAX_INHERITED, MAX_INHERITED), (MAX_INHERITED + 1, 0)] {
        let mut table = ProcessTable::new();
        table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "parent".into() }));
        let parent = table.registry.live.get_mut(&NOBODY).unwrap();
        parent
            .space
            .images
            .extend((0..files as u64).map(|inode| (((0, 1), inode), Some(ImageId(0)))));
        let fork = EventKind::Fork { parent: thread(NOBODY), thread: thread(NOBODY + 1) };
        table.observe(&event(fork));
        assert_eq!(table.registry.live[&(NOBODY + 1)].space.images.len(), inherited);
    }
}

#[test]
fn an_exited_process_is_kept_for_late_samples_and_then_dropped() {
    let mut table = ProcessTable::new();
    table.observe(&at(1, EventKind::Exec { pid: NOBODY, comm: "short".into() }));
    table.observe(&at(2, EventKind::Exit { thread: thread(NOBODY) }));
    let id = table.id(NOBODY).unwrap();
    table.observe(&at(13, EventKind::Exit { thread: thread(NOBODY + 9) }));
    assert_eq!(table.id(NOBODY), None);
    assert_eq!(table.info(id).unwrap().name.as_str(), "short");
}

#[test]
fn a_process_whose_main_thread_ended_is_kept_while_others_run() {
    let mut table = ProcessTable::new();
    let (own, (stop, stopped)) = (std::process::id(), std::sync::mpsc::channel::<()>());
    let other = std::thread::spawn(move || stopped.recv());
    table.adopt(own).unwrap();
    table.observe(&at(2, EventKind::Exit { thread: thread(own) }));
    table.observe(&at(13, EventKind::Exit { thread: thread(NOBODY) }));
    assert!(table.id(own).is_some());
    assert_eq!(table.registry.exited.len(), 1, "looked at again later");
    drop(stop);
    assert!(other.join().unwrap().is_err());
}

#[test]
fn the_start_of_a_forked_process_is_filled_in() {
    let (child, context) = sleeper();
    let pid = child.0.id();
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid, comm: "sleep".into() }));
    let id = table.id(pid).unwrap();
    assert_eq!(table.info(id).unwrap().start_ticks, None);
    // As if that were a while ago, and a mapping had not been reported.
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
    table.registry.live.get_mut(&pid).unwrap().space.set_refreshed(long_ago);
    let done = table.finish(pid, &context, UnwindLimits::default());
    assert!(done.reached_thread_start, "by maps read again: {done:?}");
    assert_eq!(table.info(id).unwrap().start_ticks, crate::process::start_ticks(pid));
}

#[test]
fn caches_of_all_processes_are_bounded_and_the_longest_unused_goes_first() {
    let mut table = ProcessTable::new();
    for (pid, start) in [(NOBODY, 0x1000u64), (NOBODY + 1, 0x2000)] {
        table.observe(&event(EventKind::Exec { pid, comm: String::new() }));
        let process = table.registry.live.get_mut(&pid).unwrap();
        let body = JitBody::without_entries(start..start + 0x100, 1);
        process.code.learn(body, Instant::now());
    }
    table.registry.live.get_mut(&NOBODY).unwrap().used += Duration::from_secs(1);
    table.held.cached = 2;
    table.evict_caches(1);
    assert_eq!(
        (table.registry.live[&NOBODY].code.len(), table.registry.live[&(NOBODY + 1)].code.len()),
        (1, 0)
    );
    assert_eq!((table.held.cached, table.counters().caches_evicted), (1, 1));
}

#[test]
fn stacks_walked_by_rules_that_were_dropped_for_want_of_room_are_kept() {
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid: NOBODY, comm: String::new() }));
    table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "//anon")));
    let process = table.registry.live.get_mut(&NOBODY).unwrap();
    let space = process.code.pushed.open_space(&mut RuleUpdates::default());
    process.code.clear(&mut table.updates);
    table.push_rules(|updates| assert_eq!(updates, [RuleUpdate::NoSpace { pid: NOBODY }]));
    let walk = |space, time| {
        let frames = vec![0x1010 << 1 | 1, 0x1020 << 1];
        let walk = ProbeWalk { time, space, frames, end: WalkEnd::ThreadStart };
        UserContext { walk: Some(walk), ..UserContext::default() }
    };
    let mut finish =
        |space, time| table.finish(NOBODY, &walk(space, time), UnwindLimits::default());
    let now = MonotonicNs::now();
    assert_eq!(finish(space, now).frames.len(), 2);
    assert_eq!(finish(space + 1, now).broken, Some(Marker::TruncatedStale), "another program's");
    // Code that is replaced while the probes may still walk by what was there.
    table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "/code")));
    let mut finish =
        |space, time| table.finish(NOBODY, &walk(space, time), UnwindLimits::default());
    assert_eq!(finish(space, MonotonicNs::now()).broken, Some(Marker::TruncatedStale));
    let later = MonotonicNs(MonotonicNs::now().0 + 10_000_000_000);
    assert_eq!(finish(space, later).broken, None);
}

#[test]
fn the_number_of_processes_is_bounded() {
    let mut table = ProcessTable::new();
    // As if all of them were there.
    table.registry.searched = Instant::now().checked_add(Duration::from_secs(600));
    for pid in 0..u32::try_from(MAX_PROCESSES).unwrap() + 5 {
        table.observe(&event(EventKind::Exec { pid: NOBODY + pid, comm: String::new() }));
    }
    assert_eq!(table.counters().processes_refused, 5);
}

#[test]
fn a_stack_of_a_process_that_finds_no_room_says_so_and_reads_nothing() {
    let mut table = ProcessTable::new();
    table.registry.searched = Instant::now().checked_add(Duration::from_secs(600));
    for pid in 0..u32::try_from(MAX_PROCESSES).unwrap() {
        table.observe(&event(EventKind::Exec { pid: NOBODY + pid, comm: String::new() }));
    }
    let done = table.finish(std::process::id(), &UserContext::default(), UnwindLimits::default());
    assert_eq!(done.broken, Some(Marker::TruncatedNotKnown));
    assert_eq!(
        (table.counters().processes_refused, table.counters().stacks_of_gone_processes),
        (1, 0)
    );
    // Of one that is not there it would be found that it is gone, if anything were asked.
    assert!(matches!(table.adopt(NOBODY - 1), Err(ProcessError::Full { .. })));
}

#[test]
fn a_clr_is_known_by_its_runtime_or_its_code_memory() {
    let mut table = ProcessTable::new();
    table.observe(&event(EventKind::Exec { pid: NOBODY, comm: "app".into() }));
    let id = table.id(NOBODY).unwrap();
    assert!(!table.info(id).unwrap().is_clr);
    table.observe(&event(mmap(NOBODY, 0x1000, 0x1000, "/memfd:doublemapper (deleted)")));
    assert!(table.info(id).unwrap().is_clr);
}

#[test]
fn unloaded_code_gets_a_new_generation_when_its_place_is_used_again() {
    let mut cache = CodeCache::new(NOBODY);
    let learn = |cache: &mut CodeCache, start: u64, method: u64| {
        cache.learn(JitBody::without_entries(start..start + 0x100, method), Instant::now());
        cache.bodies.get(start).unwrap().generation
    };
    assert_eq!(learn(&mut cache, 0x1000, 1), 0);
    cache.forget(&(0x10f0..0x10f1));
    assert!(cache.bodies.len() == 0);
    assert_eq!(learn(&mut cache, 0x1000, 1), 1);
    // What was dropped to save room is the same code when it is there again,
    cache.clear(&mut RuleUpdates::default());
    assert_eq!(learn(&mut cache, 0x1000, 1), 1);
    // unless it was unloaded meanwhile,
    cache.clear(&mut RuleUpdates::default());
    cache.forget(&(0x1000..0x1010));
    assert_eq!(learn(&mut cache, 0x1000, 1), 2);
    // or it is another method's, or was covered by one.
    cache.clear(&mut RuleUpdates::default());
    assert_eq!(learn(&mut cache, 0x1000, 2), 3);
    cache.clear(&mut RuleUpdates::default());
    assert_eq!(learn(&mut cache, 0xf80, 3), 0);
    assert_eq!(learn(&mut cache, 0x1000, 2), 4);
    // Not even when very many were dropped.
    for start in 1..40_000 {
        learn(&mut cache, 0x1_0000 + start * 0x100, 1);
    }
    assert!(learn(&mut cache, 0x1000, 5) > 4);
}

#[test]
fn a_shims_notice_of_unloaded_code_is_taken_for_its_own_process_only() {
    let mut table = ProcessTable::new();
    for pid in [NOBODY, NOBODY + 1] {
        table.observe(&event(EventKind::Exec { pid, comm: String::new() }));
        let process = table.registry.live.get_mut(&pid).unwrap();
        process.code.learn(JitBody::without_entries(0x1000..0x1100, 1), Instant::now());
    }
    let unloaded = ShimEvent::CodeUnloaded { ranges: vec![(0x1000, 0x10), (u64::MAX, u64::MAX)] };
    table.observe(&event(EventKind::Shim { pid: NOBODY, region: RegionId(0), event: unloaded }));
    assert!(table.registry.live[&NOBODY].code.bodies.len() == 0);
    assert_eq!(table.registry.live[&(NOBODY + 1)].code.bodies.len(), 1);
}
