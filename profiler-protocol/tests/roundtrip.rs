//! What one side writes the other reads: records, requests, lease; full rings; wrapping; holes.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "a failed expectation is a failed test")]

mod shared;

use profiler_protocol::consumer::{Consumer, Quota, SCRATCH_BYTES};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{
    Geometry, InstanceState, MIN_UNITS, VERSION, pack_runtime, unpack_runtime,
};
use profiler_protocol::lease::{Lease, LeaseState, SILENCE_NS};
use profiler_protocol::live::MAX_LEVEL;
use profiler_protocol::load;
use profiler_protocol::producer::{InstanceIdentity, ProducerRegion};
use profiler_protocol::record::{
    AllocationHead, ContentionHead, ExceptionHead, IlMapList, Put, Record, RecordBody, Registers,
    StackHead, WordList, decode,
};
use profiler_protocol::request::{Request, RequestReader};
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};
use shared::SharedWords;

const SMALL: Geometry = Geometry { units: MIN_UNITS, request_slots: 8 };

struct Bytes(Vec<u8>);

impl Put for Bytes {
    fn put(&mut self, word: u64) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }
}

fn write(region: &ProducerRegion<'_>, record: &Record<'_>) -> bool {
    let Some(mut grant) = region.try_reserve(record.body.record_bytes()) else { return false };
    record.encode(&mut grant);
    grant.commit();
    true
}

#[derive(Clone, Debug)]
enum Owned {
    Hello(u64),
    Allocation(AllocationHead, Vec<u64>),
    TypeName([u64; 2], String, String),
    Method(u64, u64, u32, bool, Vec<u64>, String, String, Option<(u64, Vec<[u32; 3]>)>),
    NoMethod(u64, i32),
    CodeUnloaded(u64, Vec<u64>),
    GcStart(u32, u8, u8, u8),
    GcEnd(u32),
    PauseBegin(u64),
    PauseEnd,
    Dead(Vec<u64>),
    Alive(Vec<u64>),
    Dropped(u8, Vec<u64>),
    ThreadName(u32, String),
    Bye,
    GcHeap(u32, u64),
    PauseCpu(u32, u64),
    Exception(StackHead, bool, String, Option<String>, Vec<u64>),
    Contention(ContentionHead, Vec<u64>),
    PoolAdjusted(u32, u32),
    PoolQueue(u64),
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn with_body<T>(owned: &Owned, f: impl FnOnce(RecordBody<'_>) -> T) -> T {
    let list = match owned {
        Owned::Allocation(_, w) | Owned::Method(_, _, _, _, w, ..) | Owned::CodeUnloaded(_, w) => {
            bytes_of(w)
        }
        Owned::Dead(w) | Owned::Alive(w) | Owned::Dropped(_, w) => bytes_of(w),
        Owned::Exception(.., w) | Owned::Contention(_, w) => bytes_of(w),
        _ => Vec::new(),
    };
    let ranges = WordList::new(&list);
    let map: Vec<u8> = match owned {
        Owned::Method(.., Some((_, entries))) => {
            entries.as_flattened().iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        _ => Vec::new(),
    };
    f(match owned {
        Owned::Hello(runtime) => RecordBody::Hello { runtime: *runtime },
        Owned::Allocation(head, _) => RecordBody::Allocation(*head, &list),
        Owned::TypeName([type_id, module_id], name, module) => {
            RecordBody::TypeName { type_id: *type_id, module_id: *module_id, name, module }
        }
        Owned::Method(asked, module_id, token, dynamic, _, name, module, il) => {
            RecordBody::Method {
                asked: *asked,
                module_id: *module_id,
                token: *token,
                dynamic: *dynamic,
                ranges,
                name,
                module,
                il_map: il.as_ref().map(|(base, _)| IlMapList::new(*base, &map)),
            }
        }
        Owned::NoMethod(asked, hresult) => {
            RecordBody::NoMethod { asked: *asked, hresult: *hresult }
        }
        Owned::CodeUnloaded(module_id, _) => {
            RecordBody::CodeUnloaded { module_id: *module_id, ranges }
        }
        Owned::GcStart(number, generation, reason, kind) => RecordBody::GcStart {
            number: *number,
            generation: *generation,
            reason: *reason,
            kind: *kind,
        },
        Owned::GcEnd(number) => RecordBody::GcEnd { number: *number },
        Owned::PauseBegin(reason) => RecordBody::PauseBegin { reason: *reason },
        Owned::PauseEnd => RecordBody::PauseEnd,
        Owned::Dead(_) => RecordBody::ObjectsDead(ranges),
        Owned::Alive(_) => RecordBody::ObjectsAlive(ranges),
        Owned::Dropped(level, _) => RecordBody::ObjectsDropped { level: *level, samples: ranges },
        Owned::ThreadName(os_tid, name) => RecordBody::ThreadName { os_tid: *os_tid, name },
        Owned::Bye => RecordBody::Bye,
        Owned::GcHeap(number, promoted) => {
            RecordBody::GcHeap { number: *number, promoted: *promoted }
        }
        Owned::PoolAdjusted(workers, reason) => {
            RecordBody::PoolAdjusted { workers: *workers, reason: *reason }
        }
        Owned::PoolQueue(items) => RecordBody::PoolQueue { items: *items },
        Owned::PauseCpu(suspender, cpu_ns) => {
            RecordBody::PauseCpu { suspender: *suspender, cpu_ns: *cpu_ns }
        }
        Owned::Exception(at, rethrown, type_name, message, _) => {
            let message = message.as_deref();
            RecordBody::Exception(
                ExceptionHead { at: *at, rethrown: *rethrown, type_name, message },
                &list,
            )
        }
        Owned::Contention(head, _) => RecordBody::Contention(*head, &list),
    })
}

fn allocation() -> impl Strategy<Value = Owned> {
    let words = proptest::collection::vec(any::<u64>(), 0..64);
    (any::<[u64; 12]>(), any::<[bool; 3]>(), (0u8..3, 0..=MAX_LEVEL), words).prop_map(
        |(w, b, (heap, level), stack)| {
            let registers =
                Registers { pc: w[4], sp: w[5], fp: w[6], saved: [w[7], w[8], w[9], w[10], w[11]] };
            let head = AllocationHead {
                sample: w[0],
                type_id: w[1],
                size: w[2],
                amount: w[3],
                heap,
                sampled: b[0],
                exact: b[2],
                watched: w[5].to_le_bytes()[0],
                level,
                limited: b[1],
                stack_bytes: 8 * u32::try_from(stack.len()).expect("short"),
                registers,
            };
            Owned::Allocation(head, stack)
        },
    )
}

fn stack() -> impl Strategy<Value = (StackHead, Vec<u64>)> {
    let words = proptest::collection::vec(any::<u64>(), 0..64);
    (any::<[u64; 8]>(), 0..=MAX_LEVEL, any::<bool>(), words).prop_map(
        |(w, level, limited, stack)| {
            let registers =
                Registers { pc: w[0], sp: w[1], fp: w[2], saved: [w[3], w[4], w[5], w[6], w[7]] };
            let stack_bytes = 8 * u32::try_from(stack.len()).expect("short");
            (StackHead { level, limited, stack_bytes, registers }, stack)
        },
    )
}

fn il_map() -> impl Strategy<Value = Option<(u64, Vec<[u32; 3]>)>> {
    let entries = proptest::collection::vec(any::<[u32; 3]>(), 0..20);
    proptest::option::of((any::<u64>(), entries))
}

fn owned() -> impl Strategy<Value = Owned> {
    let pairs = || {
        proptest::collection::vec(any::<(u64, u64)>(), 0..8)
            .prop_map(|v| v.into_iter().flat_map(|(a, b)| [a, b]).collect::<Vec<_>>())
    };
    let words = || proptest::collection::vec(any::<u64>(), 0..100);
    prop_oneof![
        any::<u64>().prop_map(Owned::Hello),
        allocation(),
        (any::<[u64; 2]>(), ".{0,40}", ".{0,20}").prop_map(|(t, n, m)| Owned::TypeName(t, n, m)),
        (any::<(u64, u64, u32, bool)>(), pairs(), ".{0,60}", ".{0,20}", il_map())
            .prop_map(|((a, m, t, d), r, n, s, i)| Owned::Method(a, m, t, d, r, n, s, i)),
        any::<(u64, i32)>().prop_map(|(a, h)| Owned::NoMethod(a, h)),
        (any::<u64>(), pairs()).prop_map(|(m, r)| Owned::CodeUnloaded(m, r)),
        any::<(u32, u8, u8, u8)>().prop_map(|(n, g, r, k)| Owned::GcStart(n, g, r, k)),
        any::<u32>().prop_map(Owned::GcEnd),
        any::<u64>().prop_map(Owned::PauseBegin),
        Just(Owned::PauseEnd),
        words().prop_map(Owned::Dead),
        words().prop_map(Owned::Alive),
        (any::<u8>(), words()).prop_map(|(l, w)| Owned::Dropped(l, w)),
        (any::<u32>(), ".{0,30}").prop_map(|(t, n)| Owned::ThreadName(t, n)),
        Just(Owned::Bye),
        any::<(u32, u64)>().prop_map(|(n, p)| Owned::GcHeap(n, p)),
        any::<(u32, u64)>().prop_map(|(t, c)| Owned::PauseCpu(t, c)),
        any::<(u32, u32)>().prop_map(|(w, r)| Owned::PoolAdjusted(w, r)),
        any::<u64>().prop_map(Owned::PoolQueue),
        (stack(), any::<bool>(), ".{0,40}", proptest::option::of(".{0,40}"))
            .prop_map(|((h, s), r, n, m)| Owned::Exception(h, r, n, m, s)),
        (stack(), any::<u64>(), any::<u32>()).prop_map(|((at, s), waited_ns, owner)| {
            Owned::Contention(ContentionHead { at, waited_ns, owner }, s)
        }),
    ]
}

proptest! {
    #[test]
    fn every_record_reads_as_it_was_written(owned in owned(), tid: u32, time_ns: u64) {
        with_body(&owned, |body| {
            let record = Record { tid, time_ns, body };
            let mut bytes = Bytes(Vec::new());
            record.encode(&mut bytes);
            assert_eq!(bytes.0.len() as u64, body.record_bytes());
            assert_eq!(decode(&bytes.0), Ok(Some(record)));
        });
    }

    #[test]
    fn any_bytes_decode_to_something_without_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        kind in 0u16..22,
    ) {
        let mut bytes = bytes;
        for (to, from) in bytes.iter_mut().zip(kind.to_le_bytes()) {
            *to = from;
        }
        std::hint::black_box(decode(&bytes).is_ok());
    }

    #[test]
    fn records_of_all_sizes_wrap_and_arrive_in_order(
        sizes in proptest::collection::vec(0usize..600, 1..200),
    ) {
        let shared = SharedWords::new(SMALL);
        let region = shared.region();
        region.publish(InstanceIdentity::default());
        let mut consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
        let mut scratch = vec![0; SCRATCH_BYTES];
        let (mut written, mut read) = (Vec::new(), Vec::new());
        for (number, size) in sizes.iter().enumerate() {
            let samples = bytes_of(&vec![number as u64; *size]);
            let body = if *size > 512 {
                RecordBody::PauseEnd
            } else {
                RecordBody::ObjectsDead(WordList::new(&samples))
            };
            let record = Record { tid: 1, time_ns: number as u64, body };
            if write(&region, &record) {
                written.push(number as u64);
            }
            if number % 3 == 0 {
                let drained = consumer.drain(&mut scratch, Quota::RING, &mut |r| {
                    if let RecordBody::ObjectsDead(words) = r.body {
                        assert!(words.iter().all(|w| w == r.time_ns));
                    }
                    read.push(r.time_ns);
                }).expect("an honest peer");
                assert_eq!(drained.malformed + drained.unknown, 0);
            }
        }
        consumer.drain(&mut scratch, Quota::RING, &mut |r| read.push(r.time_ns)).expect("an honest \
             peer");
        assert_eq!(written, read);
        let written = region.counter(Counter::RecordsWritten);
        let dropped = region.counter(Counter::RecordsDroppedFull);
        assert_eq!(written + dropped, sizes.len() as u64);
    }
}

#[test]
fn a_full_ring_drops_and_counts_and_recovers() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity { instance: 7, ..InstanceIdentity::default() });
    let bye = Record { tid: 1, time_ns: 2, body: RecordBody::Bye };
    let tried = 2 * SMALL.units;
    let fit = (0..tried).filter(|_| write(&region, &bye)).count() as u64;
    assert_eq!(fit, SMALL.units);
    assert_eq!(region.counter(Counter::RecordsDroppedFull), tried - SMALL.units);
    let mut consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    assert_eq!(consumer.identity().instance, 7);
    let mut scratch = vec![0; SCRATCH_BYTES];
    let quota = Quota { records: 100, bytes: u64::MAX };
    let drained = consumer.drain(&mut scratch, quota, &mut |_| {}).expect("an honest peer");
    assert_eq!((drained.records, drained.more), (100, true));
    assert_eq!((0..tried).filter(|_| write(&region, &bye)).count(), 100);
    let drained = consumer.drain(&mut scratch, Quota::RING, &mut |_| {}).expect("an honest peer");
    assert_eq!((drained.records, drained.more, drained.pending), (SMALL.units, false, None));
}

#[test]
fn a_second_consumer_goes_on_where_the_first_one_stopped() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    let mut scratch = vec![0; SCRATCH_BYTES];
    for time_ns in 0..10 {
        assert!(write(&region, &Record { tid: 1, time_ns, body: RecordBody::PauseEnd }));
        if time_ns == 4 {
            let mut first =
                Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
            first.drain(&mut scratch, Quota::RING, &mut |_| {}).expect("an honest peer");
        }
    }
    let mut second = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    let mut times = Vec::new();
    second
        .drain(&mut scratch, Quota::RING, &mut |r| times.push(r.time_ns))
        .expect("an honest peer");
    assert_eq!(times, [5, 6, 7, 8, 9]);
}

#[test]
fn a_hole_left_by_a_dead_producer_is_waited_for_then_skipped() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    let mut consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    let mut scratch = vec![0; SCRATCH_BYTES];
    let lost = region.try_reserve(200).expect("room");
    assert!(write(&region, &Record { tid: 1, time_ns: 5, body: RecordBody::PauseEnd }));
    let drained = consumer.drain(&mut scratch, Quota::RING, &mut |_| {}).expect("an honest peer");
    assert_eq!((drained.records, drained.pending), (0, Some(0)));
    assert_eq!(consumer.skip_hole(&mut scratch, false), Ok(4));
    let drained = consumer.drain(&mut scratch, Quota::RING, &mut |_| {}).expect("an honest peer");
    assert_eq!((drained.records, drained.pending), (1, None));
    // The producer was only slow: its late commit is of an old position and hurts nobody.
    drop(lost);
    assert_eq!(
        consumer.drain(&mut scratch, Quota::RING, &mut |_| {}).expect("an honest peer").units,
        0
    );
    std::mem::forget(region.try_reserve(64));
    assert_eq!(consumer.skip_hole(&mut scratch, false), Ok(0), "nothing committed behind it yet");
    assert_eq!(consumer.skip_hole(&mut scratch, true), Ok(1), "the process is gone");
}

/// A recorder may read what a library of an earlier build left in a process, and believes it by its
/// version alone.
#[test]
fn what_is_written_has_the_bytes_of_its_version() {
    let registers = Registers { pc: 1, sp: 2, fp: 3, saved: [4, 5, 6, 7, 8] };
    let at = StackHead { level: 1, limited: true, stack_bytes: 16, registers };
    let allocation = AllocationHead {
        sample: 1,
        type_id: 2,
        size: 3,
        amount: 4,
        heap: 2,
        sampled: true,
        exact: true,
        watched: 3,
        level: 5,
        limited: true,
        stack_bytes: 16,
        registers,
    };
    let text = |text: &str| text.to_owned();
    let each = [
        Owned::Hello(1),
        Owned::Allocation(allocation, vec![1, 2]),
        Owned::TypeName([1, 2], text("Type"), text("module.dll")),
        Owned::Method(1, 2, 3, true, vec![4, 5], text("Method"), text("module.dll"), None),
        Owned::NoMethod(1, -2),
        Owned::CodeUnloaded(1, vec![2, 3]),
        Owned::GcStart(1, 2, 3, 4),
        Owned::GcEnd(1),
        Owned::PauseBegin(1),
        Owned::PauseEnd,
        Owned::Dead(vec![1]),
        Owned::Alive(vec![1 << 8 | 2]),
        Owned::Dropped(1, vec![2]),
        Owned::ThreadName(1, text("name")),
        Owned::Bye,
        Owned::GcHeap(1, 2),
        Owned::PauseCpu(1, 2),
        Owned::Exception(at, true, text("Type"), Some(text("message")), vec![1, 2]),
        Owned::Exception(at, false, text("Type"), None, vec![1, 2]),
        Owned::Contention(ContentionHead { at, waited_ns: 1, owner: 2 }, vec![1, 2]),
        Owned::PoolAdjusted(1, 2),
        Owned::PoolQueue(1),
    ];
    let mut bytes = Bytes(Vec::new());
    for owned in &each {
        with_body(owned, |body| Record { tid: 7, time_ns: 9, body }.encode(&mut bytes));
    }
    let requests = [
        Request::Name { address: 1, seen_ns: 2 },
        Request::Settings { handles: 1, samples: 2 },
        Request::Heard,
        Request::Detach,
    ];
    requests.iter().flat_map(|request| request.words()).for_each(|word| bytes.put(word));
    for subscriptions in
        [load::WITHOUT_EXCEPTIONS, load::WITHOUT_CONTENTION, load::WITH_THREAD_POOL]
    {
        bytes.put(load::number(0, subscriptions));
    }
    for subscriptions in
        [load::WITHOUT_ALLOCATIONS, load::WITHOUT_LIVE_OBJECTS, load::WITH_EXCEPTION_MESSAGES]
    {
        bytes.put(load::number(u64::MAX, subscriptions));
    }
    // FNV-1a.
    let sum = bytes.0.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    });
    assert_eq!(
        (VERSION, sum),
        (4, 0x5479_4c54_330f_3acd),
        "{sum:#x}: what is written has other bytes; raise the version"
    );
}

#[test]
fn an_abandoned_record_is_skipped() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    let mut consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    drop(region.try_reserve(100));
    let drained = consumer
        .drain(&mut vec![0; SCRATCH_BYTES], Quota::RING, &mut |_| {})
        .expect("an honest peer");
    assert_eq!((drained.records, drained.skipped), (0, 1));
    assert_eq!(region.counter(Counter::RecordsAbandoned), 1);
}

#[test]
fn requests_arrive_once_and_in_order_over_many_laps() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    let mut consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    let mut reader = RequestReader::new();
    let asked: Vec<Request> =
        (0..50).map(|n| Request::Name { address: n, seen_ns: n << 32 }).collect();
    let (mut next, mut seen) = (0, Vec::new());
    while seen.len() < asked.len() {
        next += consumer.request(&asked[next..]).expect("an honest peer");
        for _ in 0..3 {
            seen.extend(reader.take(&region));
        }
    }
    assert_eq!(seen, asked);
    let last = [Request::Settings { handles: 7, samples: 9 }, Request::Heard, Request::Detach];
    assert_eq!(consumer.request(&last), Ok(last.len()));
    for request in last {
        assert_eq!(reader.take(&region), Some(request));
    }
    assert_eq!(reader.take(&region), None);
    region.set_state(InstanceState::Closing);
    assert_eq!(consumer.refresh().expect("an honest peer").state, InstanceState::Closing);
}

#[test]
fn the_lease_counts_changes_of_the_heartbeat_only() {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    let consumer = Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region");
    let mut lease = Lease::new(0);
    let mut at = |now| {
        let (listener, heartbeat, period) = region.lease_words();
        lease.observe(listener, heartbeat, period, now)
    };
    assert_eq!(at(1), LeaseState::Listening, "being loaded counts as a beat");
    assert_eq!(at(SILENCE_NS), LeaseState::Quiet);
    consumer.beat(9, 77, 100_000_000).expect("memory");
    assert_eq!(at(3_000_000_000), LeaseState::Listening);
    assert_eq!(at(4_700_000_000), LeaseState::Listening);
    assert_eq!(at(4_800_000_000), LeaseState::Quiet, "the same value is no beat");
    consumer.beat(9, 78, 100_000_000).expect("memory");
    assert_eq!(at(5_000_000_000), LeaseState::Listening);
    consumer.beat(10, 79, 100_000_000).expect("memory");
    assert_eq!(
        at(5_000_000_001),
        LeaseState::Replaced,
        "another listener, without a silence between"
    );
    assert_eq!(at(5_000_000_002), LeaseState::Listening, "told once");
    consumer.release(80).expect("memory");
    assert_eq!(at(5_000_000_003), LeaseState::Quiet, "released: at once");
    assert_eq!(at(606_000_000_000), LeaseState::Abandoned);
}

#[test]
fn runtime_versions_pack() {
    assert_eq!(unpack_runtime(pack_runtime(10, 0, 13, 9)), (10, 0, 13, 9));
}
