//! Walks over code that the tests write down, and looks at compiled bodies.

use super::jit::{BODIES_AT_ONCE, UNSEEN, looks};
use super::*;
use crate::process::cached_bodies::RECHECK;
use crate::process::cached_steps::{CachedStep, DROPPED_PART, MAX_STEPS, place};
use crate::process::mapping::Mappings;
use crate::process::rule_update::RuleUpdate;
use perfusion_model::event::{Mmap, MonotonicNs};
use perfusion_model::frame::ProcessId;
use perfusion_unwind::TargetMemory;
use perfusion_unwind::managed::JitBody;
use perfusion_unwind::unwinder::{CodeLookup as _, FrameRule};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_full_cache_drops_some_places_and_the_rules_of_those_only() {
    let mmap = Mmap {
        pid: 1,
        start: 0,
        len: 1 << 30,
        file_offset: 0,
        device: (0, 0),
        inode: 0,
        path: String::new(),
    };
    let mut mappings = Mappings::default();
    mappings.insert(Mapping::new(&mmap).unwrap());
    let mut process = LiveProcess::new(ProcessId(0), 1, None, Arc::new(mappings));
    let step = FrameRule {
        frame: FrameKey::Unknown { process: process.id, address: 0 },
        rule: Ok(Arc::new(NATIVE.frameless())),
    };
    // A quarter of a quarter where threads were interrupted, all others callers.
    let (quarter, now) = (MAX_STEPS / DROPPED_PART, MonotonicNs::now());
    let exact = quarter / 4;
    for n in 0..MAX_STEPS {
        let pushed = (n % 2 == 0).then_some(now);
        let key = place(n as u64, n < exact);
        process.code.steps.insert(key, CachedStep { step: step.clone(), checked: None, pushed });
    }
    process.code.pushed.open_space(&mut RuleUpdates::default());
    let (mut counters, mut updates) = (ProcessTableCounters::default(), RuleUpdates::default());
    let mut view = CodeView {
        process: &mut process,
        images: &mut ImageCache::default(),
        rules: &mut InternedRules::default(),
        counters: &mut counters,
        updates: &mut updates,
        common: &mut CommonBudget::default(),
        now: Instant::now() + Duration::from_secs(1),
        push: RulePush::Off,
        asleep: None,
        offsets: false,
    };
    view.look_up(0x1_0000, true);
    assert_eq!(view.process.code.steps.len(), MAX_STEPS - quarter + 1);
    assert!((0..exact as u64).all(|n| view.process.code.steps.get(place(n, true)).is_none()));
    view.process.code.pushed.take_back(view.updates);
    let updates = view.updates.take().0;
    assert!(
        updates.iter().all(|update| matches!(update, RuleUpdate::Forget { .. })),
        "no space is closed"
    );
    assert!(updates.len() > exact / 4 && updates.len() <= quarter);
    assert_eq!(view.counters.steps_cleared, 1);
    // What the probes have walked by one that was dropped is a frame all the same.
    assert!(view.walked(0, true, now).is_some());
    // A rule counts from when it has come to the probes, not from when it was pushed: until
    // then they go by another one.
    let waiting = CachedStep { step, checked: None, pushed: None };
    view.process.code.steps.insert(place(0x10, false), waiting);
    view.process.code.forget(&(0x2000..0x2001));
    view.push_rule(place(0x10, false));
    assert!(view.walked(0x10, false, MonotonicNs::now()).is_none());
    let (updates, touched) = view.updates.take();
    assert!(matches!(updates[..], [RuleUpdate::Rule { .. }]) && touched.contains(&1));
    view.process.code.updates_arrived(MonotonicNs::now());
    assert!(view.walked(0x10, false, MonotonicNs::now()).is_some());
    // No time to look is no answer, and neither is memory that is not to be had.
    assert_eq!(view.follows_call(2 << 30), Some(false), "nothing is there");
    assert_eq!(view.follows_call(0x20), None);
    assert_eq!(view.counters.budget_refusals, 0);
    view.common.spend(&mut view.process.share, Duration::from_secs(60));
    assert_eq!(view.follows_call(0x20), None);
    view.process.code.forget(&(0x2000..0x2001));
    assert!(view.walked(2, true, MonotonicNs::now()).is_none(), "code was replaced a moment ago");
}

/// Memory with the same word everywhere, which takes its time.
struct Slow(Duration);

impl TargetMemory for Slow {
    fn read(&self, _address: u64, into: &mut [u8]) -> usize {
        std::thread::sleep(self.0);
        into.fill(0);
        into.len()
    }
}

#[test]
fn a_batch_of_looks_ends_when_its_time_does_but_not_before_the_first() {
    let body = |n: u64| (n << 12, JitBody::without_entries(n << 12..(n << 12) + 0x100, n));
    let batch = || (1..=BODIES_AT_ONCE as u64).map(body).collect::<Vec<_>>();
    let pause = Duration::from_millis(5);
    let seen = looks(batch(), &Slow(pause), 4 * pause);
    assert!((1..=4).contains(&seen.len()) && seen[0].0 == 1 << 12, "{seen:?}");
    assert_eq!(looks(batch(), &Slow(pause), Duration::ZERO).len(), 1);
    assert_eq!(
        looks(batch(), &Slow(Duration::ZERO), Duration::from_secs(60)).len(),
        BODIES_AT_ONCE
    );
}

#[test]
fn bodies_that_cannot_be_seen_do_not_fill_the_next_batch() {
    let pid = std::process::id();
    let mut process =
        LiveProcess::new(ProcessId(0), pid, crate::process::start_ticks(pid), Arc::default());
    let looked = Instant::now();
    // Where nothing is.
    let starts: Vec<u64> = (1..=2 * BODIES_AT_ONCE as u64).map(|n| n << 12).collect();
    for start in &starts {
        let body = JitBody::without_entries(*start..start + 0x100, 1);
        process.code.bodies.insert(body, looked);
    }
    let (images, rules) = (&mut ImageCache::default(), &mut InternedRules::default());
    let (counters, updates) = (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
    let (process, common) = (&mut process, &mut CommonBudget::default());
    let (now, push) = (looked + RECHECK, RulePush::Off);
    let mut view = CodeView {
        process,
        images,
        rules,
        counters,
        updates,
        common,
        now,
        push,
        asleep: None,
        offsets: false,
    };
    let used = |view: &CodeView<'_>| {
        view.process.code.bodies.iter().filter(|(_, known)| known.is_used).count()
    };
    for _ in 0..2 * BODIES_AT_ONCE {
        let Some((first, _)) = view.process.code.bodies.iter().find(|(_, known)| known.is_used)
        else {
            break;
        };
        let (first, before) = (*first, used(&view));
        assert_eq!(view.look_at_bodies(first), None);
        assert!(used(&view) < before, "none of them comes again before it is met");
    }
    assert_eq!(used(&view), 0);
}

#[test]
fn why_there_was_no_rule_is_found_out_again() {
    let pid = std::process::id();
    let mmap = Mmap {
        pid,
        start: 0x1_0000,
        len: 0x1_0000,
        file_offset: 0,
        device: (0, 0),
        inode: 0,
        path: "//anon".into(),
    };
    let mut mappings = Mappings::default();
    mappings.insert(Mapping::new(&mmap).unwrap());
    let mut process = LiveProcess::new(ProcessId(0), pid, None, Arc::new(mappings));
    process.space.is_clr = true;
    let (start, looked) = (0x1_1000, Instant::now());
    // The body was just looked at and is there; the steps in it were found a while ago.
    let body = JitBody::without_entries(start..start + 0x100, 1);
    process.code.bodies.insert(body, looked + RECHECK);
    let frame = FrameKey::Managed { process: process.id, start, generation: 0, offset: None };
    let [found, not] = [Ok(Arc::new(NATIVE.frameless())), Err(RuleRefusal::Unsupported)];
    for (pc, rule) in [(start + 0x10, found), (start + 0x20, not)] {
        let step = FrameRule { frame, rule };
        process
            .code
            .steps
            .insert(place(pc, false), CachedStep { step, checked: Some(looked), pushed: None });
    }
    let (images, rules) = (&mut ImageCache::default(), &mut InternedRules::default());
    let (counters, updates) = (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
    let (process, common) = (&mut process, &mut CommonBudget::default());
    let (now, push) = (looked + RECHECK, RulePush::Off);
    let mut view = CodeView {
        process,
        images,
        rules,
        counters,
        updates,
        common,
        now,
        push,
        asleep: None,
        offsets: false,
    };
    assert!(view.look_up(start + 0x10, false).rule.is_ok(), "not derived again");
    let again = view.look_up(start + 0x20, false);
    assert!(again.rule.is_err() && again.rule != Err(RuleRefusal::Unsupported), "{again:?}");
}

#[test]
fn code_that_cannot_be_looked_at_again_is_not_taken_for_the_same_while_its_process_lives() {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let pid = child.id();
    // As far as is known there is code; nothing of it can be read, for there is nothing.
    let mmap = Mmap {
        pid,
        start: 0x1_0000,
        len: 0x1_0000,
        file_offset: 0,
        device: (0, 0),
        inode: 0,
        path: "//anon".into(),
    };
    let mut mappings = Mappings::default();
    mappings.insert(Mapping::new(&mmap).unwrap());
    let ticks = crate::process::start_ticks(pid);
    let mut process = LiveProcess::new(ProcessId(0), pid, ticks, Arc::new(mappings));
    process.space.is_clr = true;
    let (start, pc, looked) = (0x1_1000, 0x1_1010, Instant::now());
    let body = JitBody::without_entries(start..start + 0x100, 1);
    process.code.bodies.insert(body, looked);
    let frame = FrameKey::Managed { process: process.id, start, generation: 0, offset: None };
    let step = FrameRule { frame, rule: Ok(Arc::new(NATIVE.frameless())) };
    let cached =
        CachedStep { step: step.clone(), checked: Some(looked), pushed: Some(MonotonicNs(0)) };
    process.code.steps.insert(place(pc, false), cached);
    let (images, rules) = (&mut ImageCache::default(), &mut InternedRules::default());
    let (counters, updates) = (&mut ProcessTableCounters::default(), &mut RuleUpdates::default());
    let (process, common) = (&mut process, &mut CommonBudget::default());
    let (now, push) = (looked + RECHECK, RulePush::Off);
    let mut view = CodeView {
        process,
        images,
        rules,
        counters,
        updates,
        common,
        now,
        push,
        asleep: None,
        offsets: false,
    };
    assert_eq!(view.has_body(pc), Ok(true), "for a moment it is");
    view.now = looked + UNSEEN;
    let unseen = view.look_up(pc, false);
    assert_eq!(unseen, FrameRule { frame: view.unknown(pc), rule: Err(RuleRefusal::Unreadable) });
    assert_eq!(view.walked(pc, false, MonotonicNs::now()), None);
    assert_eq!(view.process.code.bodies.get(start).unwrap().checked, looked, "nobody has looked");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(view.has_body(pc), Ok(true), "of a process that has ended it is what it was");
}
