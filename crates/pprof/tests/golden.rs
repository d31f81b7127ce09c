//! The same events make the same profile, byte for byte. The events go through the estimates and
//! the window into a profile, which is compared with `golden/profile.pb.gz`.
//!
//! A line of `golden/events.txt` is one event or one name; its fields are parted by tabs. The lines
//! were made from a profile of the demo application. Its stacks, names, threads and types are real.
//! Its values were divided into events, whose weights are made up.
//! `PERFUSION_RENEW_GOLDEN=1` writes the profile anew.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use perfusion_aggregate::collections::{CollectionKind, GarbageCollections};
use perfusion_aggregate::exceptions_and_contentions::{
    ExceptionsAndContentions, LockWait, RuntimeEventSite, Throw,
};
use perfusion_aggregate::heap::{
    SampledAllocations, Site, Weight, age_bucket_seconds, count_bucket,
};
use perfusion_aggregate::threads::{
    StackOrMarker, ThreadAccounts, ThreadRow, WaitReason, WaitStateKey, Waker,
};
use perfusion_aggregate::{Window, WindowLimits, wait_reason};
use perfusion_model::event::{
    Allocation, AllocationKind, HeapKind, MethodBody, MonotonicNs, RegionId, ShimEvent, ThreadId,
    ThreadProgress, ThreadSnapshot, ThreadTimes, UserContext, WaitEnd, WakeOrigin,
};
use perfusion_model::frame::{FrameKey, ImageId, Marker, ProcessId};
use perfusion_model::labels::{CollectionLabels, Labels, NameId, SampleType, Sampling};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_pprof::{ProfileInfo, encode, unpack};
use perfusion_symbolize::{ImageFile, ImageResolver, Symbolizer};
use std::collections::HashMap;
use std::fmt::Debug;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const PID: u32 = 4242;
const PROCESS: ProcessId = ProcessId(0);
const REGION: RegionId = RegionId(1);
const END: MonotonicNs = MonotonicNs(60_000_000_000);

/// Paths of images whose files are not there.
#[derive(Default)]
struct Paths(HashMap<ImageId, String>);

impl ImageResolver for Paths {
    fn image(&self, image: ImageId) -> Option<ImageFile<'_>> {
        let path = self.0.get(&image)?;
        Some(ImageFile { path, file: None, build_id: Some(&[0xab, 0xcd]) })
    }

    fn live_pid(&self, _: ProcessId) -> Option<u32> {
        None
    }
}

/// A recording of one process, and what is known of it when all events are read.
#[derive(Default)]
struct Recording {
    paths: Paths,
    methods: Vec<MethodBody>,
    types: HashMap<u64, Arc<str>>,
    table: StackTable,
    stacks: HashMap<u32, StackId>,
    labels: HashMap<u32, Labels>,
    running: Vec<ThreadSnapshot>,
    threads: ThreadAccounts,
    heap: SampledAllocations,
    runtime: ExceptionsAndContentions,
    collections: GarbageCollections,
}

fn thread(tid: u32) -> ThreadId {
    ThreadId { pid: PID, tid }
}

fn number<T: FromStr<Err: Debug>>(text: &str) -> T {
    text.parse().unwrap()
}

fn frame(text: &str) -> FrameKey {
    if text == "gc" {
        return FrameKey::Marker(Marker::GarbageCollector);
    }
    match text.split_at(1) {
        ("m", id) => managed(number(id)),
        (_, native) => {
            let (image, address) = native.split_once(':').unwrap();
            let address = u64::from_str_radix(address, 16).unwrap();
            FrameKey::Native { image: ImageId(number(image)), address }
        }
    }
}

fn managed(id: u64) -> FrameKey {
    FrameKey::Managed { process: PROCESS, start: id << 12, generation: 0, offset: None }
}

/// Labels have words of the program, so these live as long as it.
fn word(text: &str) -> &'static str {
    String::leak(text.to_owned())
}

impl Recording {
    fn read(events: &str) -> Self {
        let mut recording = Self::default();
        recording.heap.watched_from(REGION, MonotonicNs(1));
        for line in events.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            recording.event(fields[0], &fields[1..]);
        }
        recording
    }

    fn event(&mut self, kind: &str, fields: &[&str]) {
        match (kind, fields) {
            ("image", [id, path]) => {
                self.paths.0.insert(ImageId(number(id)), (*path).to_owned());
            }
            ("method", [id, name, module]) => self.methods.push(MethodBody {
                asked: number::<u64>(id) << 12,
                module_id: 1,
                token: number(id),
                dynamic: false,
                name: (*name).to_owned(),
                module: (*module).to_owned(),
                ranges: vec![(number::<u64>(id) << 12, 0x100)],
                il_map: None,
            }),
            ("type", [id, name]) => {
                self.types.insert(number(id), (*name).into());
            }
            ("stack", [id, frames]) => {
                let frames: Vec<FrameKey> = frames.split(',').map(frame).collect();
                self.stacks.insert(number(id), self.table.intern(&frames));
            }
            ("cpu", [tid, time, stack]) => {
                let stack = self.stack(stack);
                self.threads.cpu_sample(thread(number(tid)), MonotonicNs(number(time)), stack);
            }
            ("wait", fields) => self.wait(fields),
            ("alloc", fields) => self.allocation(fields),
            ("dead", [sample]) => self.heap.dead(REGION, &[number(sample)]),
            ("alive", [sample, generation]) => {
                self.heap.alive(REGION, &[(number(sample), number(generation))]);
            }
            ("collection", [id, generation, begin, length, promoted]) => {
                let (id, generation) = (number(id), number(generation));
                let (begin, length) = (number::<u64>(begin), number::<u64>(length));
                let kind = CollectionKind::of(generation, 1, 0);
                self.collections.pause_begins(REGION, thread(PID), MonotonicNs(begin));
                self.collections.begins(REGION, id, kind, MonotonicNs(begin));
                self.heap.collection(REGION, generation, MonotonicNs(begin));
                self.collections.ends(REGION, id);
                self.collections.left(REGION, id, number(promoted));
                self.collections.pause_ends(REGION, MonotonicNs(begin + length));
            }
            ("throw", [tid, stack, type_name, weight]) => {
                let type_name = Some((*type_name).into());
                let place = self.place(tid, stack);
                let throw = Throw { place, type_name, message: None, rethrown: false };
                self.runtime.thrown(throw, number(weight));
            }
            ("lock", [tid, stack, owner, waited, weight]) => {
                let place = self.place(tid, stack);
                let wait = LockWait { place, owner: owner.parse().ok(), held_at: None };
                self.runtime.waited(wait, number(waited), number(weight));
            }
            ("thread", [tid, name, role, oncpu, runnable, blocked]) => {
                self.thread(
                    number(tid),
                    name,
                    role,
                    [oncpu, runnable, blocked].map(|ns| number(ns)),
                );
            }
            other => panic!("{other:?} is no event"),
        }
    }

    fn stack(&self, id: &str) -> StackId {
        self.stacks[&number(id)]
    }

    fn place(&self, tid: &str, stack: &str) -> RuntimeEventSite {
        let (tid, stack) = (number(tid), self.stack(stack));
        RuntimeEventSite { region: REGION, tid, name: NameId::default(), stack }
    }

    fn wait(&mut self, fields: &[&str]) {
        let &[tid, start, stack, state, syscall, blocked, runnable, weight, waker] = fields else {
            panic!("{fields:?} is no wait")
        };
        let (tid, start, stack) = (number(tid), MonotonicNs(number(start)), self.stack(stack));
        let state = match state {
            "P" => WaitStateKey::Preempted,
            "T" => WaitStateKey::Throttled,
            "I" => WaitStateKey::Interruptible,
            _ => WaitStateKey::Other,
        };
        let syscall = (syscall != "-").then(|| word(syscall));
        let reason = WaitReason { state, syscall, io: false, suspended: false };
        let blocked_ns: u64 = number(blocked);
        self.threads.wait_start(thread(tid), start, stack, reason, 1000, number(weight));
        let by = match waker {
            "timer" | "interrupt" => {
                let is_timer = waker == "timer";
                let origin = if is_timer { WakeOrigin::Timer } else { WakeOrigin::Interrupt };
                self.threads.wake(tid, start, origin, None);
                Some(thread(0))
            }
            _ => waker.parse().ok().map(thread),
        };
        self.threads.wait_end(&WaitEnd {
            thread: thread(tid),
            start,
            blocked_ns,
            runnable_ns: number(runnable),
            waker: by.map(|by| (by, *b"waker\0\0\0\0\0\0\0\0\0\0\0")),
            woken_throttled: false,
            new_thread: false,
        });
    }

    fn allocation(&mut self, fields: &[&str]) {
        let &[tid, time, sample, stack, type_id, size, heap, kind, watched] = fields else {
            panic!("{fields:?} is no allocation")
        };
        let allocation = Allocation {
            sample: number(sample),
            tid: number(tid),
            type_id: number(type_id),
            size: number(size),
            heap: match heap {
                "soh" => HeapKind::Small,
                "loh" => HeapKind::Large,
                _ => HeapKind::Pinned,
            },
            kind: match kind {
                "large" => AllocationKind::Exact,
                "tick" => AllocationKind::Tick { amount: 102_400 },
                _ => AllocationKind::Sampled,
            },
            level: 0,
            watched: (watched == "watched").then_some(0),
            user: UserContext::default(),
            seen: MonotonicNs(0),
        };
        let stack = self.stack(stack);
        self.heap.allocated(REGION, MonotonicNs(number(time)), &allocation, (stack, NameId(0)));
    }

    fn thread(&mut self, tid: u32, name: &str, role: &str, [oncpu, runnable, blocked]: [u64; 3]) {
        let labels = Labels {
            pid: Some(PID),
            process: Some("demo".into()),
            thread_id: Some(tid),
            thread_name: Some(name.into()),
            thread_role: Some(word(role)),
            ..Labels::default()
        };
        self.labels.insert(tid, labels);
        let times = ThreadTimes {
            thread: thread(tid),
            oncpu_ns: oncpu,
            runnable_ns: runnable,
            stolen_ns: 0,
            blocked_ns: blocked,
            since: MonotonicNs(1),
            left_out: 0,
        };
        let progress = ThreadProgress::OnCpu { since: END };
        self.running.push(ThreadSnapshot { times, at: END, progress });
    }

    fn labels(&self, tid: u32) -> Labels {
        self.labels.get(&tid).cloned().unwrap_or_default()
    }

    /// The profile. Tables hash with keys of their own each time, so rows are sorted.
    fn profile(mut self) -> Vec<u8> {
        let mut window = Window::new(WindowLimits::default());
        let threads = std::mem::take(&mut self.threads);
        let rows = sorted(threads.finish(&self.running), |row: &ThreadRow| {
            (row.thread, format!("{:?} {:?} {:?}", row.place, row.reason, row.waker))
        });
        for row in rows {
            self.add_row(&mut window, &row);
        }
        let sites = sorted(self.heap.sites(), |(site, _)| format!("{site:?}"));
        for (site, weight) in sites {
            let columns = [SampleType::AllocObjects, SampleType::AllocSpace];
            self.add_memory(&mut window, site, weight, self.site_labels(site), columns);
        }
        for object in sorted(self.heap.live(), |object| object.sample) {
            let labels = Labels {
                age_seconds: Some(age_bucket_seconds(object.born, END)),
                generation: Some(object.generation),
                survived: Some(count_bucket(self.heap.survived(&object))),
                survived_old: self.heap.survived_old(&object).map(|count| u64::from(count.min(2))),
                sampling: Some(object.sampling()),
                ..self.site_labels(&object.site)
            };
            let columns = [SampleType::InuseObjects, SampleType::InuseSpace];
            self.add_memory(&mut window, &object.site, &object.weight(), labels, columns);
        }
        let (throws, waits) = self.runtime.take();
        for (throw, sum) in sorted(throws, |(throw, _)| format!("{throw:?}")) {
            let labels = Labels { exception_type: throw.type_name, ..self.labels(throw.place.tid) };
            let frames = self.table.frames(throw.place.stack);
            window.add(frames, &labels, SampleType::Exceptions, sum.count);
        }
        for (wait, sum) in sorted(waits, |(wait, _)| format!("{wait:?}")) {
            let owner = wait.owner.map(|tid| format!("owner {PID}/{tid}").into());
            let labels = Labels { lock_owner: owner, ..self.labels(wait.place.tid) };
            let values = [(SampleType::Contentions, sum.count), (SampleType::Delay, sum.ns)];
            window.add_all(self.table.frames(wait.place.stack), &labels, &values);
        }
        let (pauses, _) = self.collections.cut();
        for ((_, kind), sum) in sorted(pauses, |(key, _)| format!("{key:?}")) {
            let labels = Labels {
                pid: Some(PID),
                gc_reason: kind.map(|kind| kind.reason),
                generation: kind.map(|kind| kind.generation),
                collections: kind.map(|kind| {
                    Arc::new(CollectionLabels {
                        kind: kind.kind,
                        count: sum.count,
                        longest_ns: sum.longest_ns,
                        promoted: sum.promoted,
                    })
                }),
                ..Labels::default()
            };
            let frames = [FrameKey::Marker(Marker::GarbageCollector)];
            window.add(&frames, &labels, SampleType::GcPause, sum.pause_ns as f64);
        }
        let wall = [SampleType::Cpu, SampleType::Runnable, SampleType::Blocked];
        window.sum_into(SampleType::Wall, &wall);
        self.encode(&window)
    }

    fn add_row(&self, window: &mut Window, row: &ThreadRow) {
        let marker;
        let frames = match row.place {
            StackOrMarker::Stack(stack) => self.table.frames(stack),
            StackOrMarker::Marker(what) => {
                marker = [FrameKey::Marker(what)];
                &marker
            }
        };
        let waker: Option<Arc<str>> = row.waker.map(|waker| match waker {
            Waker::Thread { id, .. } => format!("waker {}/{}", id.pid, id.tid).into(),
            other => format!("{other:?}").into(),
        });
        let labels = Labels {
            wait_reason: row.reason.map(|reason| wait_reason::name(reason, &[])),
            waker,
            wait_stderr: (row.wait_stderr_ns >= 1.0).then_some(row.wait_stderr_ns.ceil() as u64),
            ..self.labels(row.thread.tid)
        };
        let values = [
            (SampleType::Samples, row.samples as f64),
            (SampleType::Cpu, row.cpu_ns),
            (SampleType::Runnable, row.runnable_ns),
            (SampleType::Blocked, row.blocked_ns),
        ];
        window.add_all(frames, &labels, &values);
    }

    fn site_labels(&self, site: &Site) -> Labels {
        Labels {
            type_name: self.types.get(&site.type_id).cloned(),
            heap: Some(site.heap),
            size_class: Some(site.size_class),
            sampling: Some(site.sampling),
            ..self.labels(site.tid)
        }
    }

    fn add_memory(
        &self,
        window: &mut Window,
        site: &Site,
        weight: &Weight,
        labels: Labels,
        [objects, bytes]: [SampleType; 2],
    ) {
        let by_chance = labels.sampling == Some(Sampling::Random);
        let labels = Labels {
            sampled_objects: Some(weight.seen),
            sampled_bytes: Some(weight.seen_bytes),
            space_stderr: by_chance.then_some(weight.variance.max(0.0).sqrt().round() as u64),
            ..labels
        };
        let values = [(objects, weight.objects), (bytes, weight.bytes)];
        window.add_all(self.table.frames(site.stack), &labels, &values);
    }

    fn encode(&self, window: &Window) -> Vec<u8> {
        let mut symbolizer = Symbolizer::default();
        for method in &self.methods {
            symbolizer.wants_answer(managed(method.token.into()), true);
            symbolizer.observe(PROCESS, &ShimEvent::Method(Box::new(method.clone())));
        }
        symbolizer.resolve(window.frames(), &self.paths);
        let about = ProfileInfo {
            start: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            duration: Duration::from_secs(4),
            period_ns: 10_101_010,
            main_image: Some(ImageId(1)),
            comments: vec!["cpu: 99 Hz".to_owned(), "loss: none".to_owned()],
        };
        encode(window, &symbolizer, &self.paths, &about).unwrap()
    }
}

fn sorted<T, K: Ord>(all: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<T> {
    let mut all: Vec<T> = all.into_iter().collect();
    all.sort_by_key(key);
    all
}

#[test]
fn recorded_events_make_the_same_profile_byte_for_byte() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let events = std::fs::read_to_string(golden.join("events.txt")).unwrap();
    let made = Recording::read(&events).profile();
    let file = golden.join("profile.pb.gz");
    if std::env::var_os("PERFUSION_RENEW_GOLDEN").is_some() {
        std::fs::write(&file, &made).unwrap();
    }
    let bytes = std::fs::read(&file).unwrap();
    let (profile, expected) = (unpack(&made).unwrap(), unpack(&bytes).unwrap());
    // First what tells people most.
    assert_eq!(profile.string_table, expected.string_table);
    assert_eq!(profile.sample.len(), expected.sample.len());
    for (index, (sample, expected)) in profile.sample.iter().zip(&expected.sample).enumerate() {
        assert_eq!(sample, expected, "sample {index}");
    }
    assert!(profile == expected, "tables or comments differ");
    assert!(made == bytes, "only the compression differs");
    for column in 0..SampleType::COUNT {
        assert!(
            profile.sample.iter().any(|sample| sample.value[column] != 0),
            "{} is in the events",
            SampleType::ALL[column].name()
        );
    }
}
