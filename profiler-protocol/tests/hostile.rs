//! A peer that writes whatever it likes into the region, before and while the daemon reads: the
//! consumer answers with errors, never panics, and reads only what lies in the file.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "a failed expectation is a failed test")]

mod shared;

use profiler_protocol::consumer::{
    Consumer, ConsumerError, Drained, MIN_SCRATCH_BYTES, Quota, RegionMemory, SCRATCH_BYTES,
};
use profiler_protocol::layout::{
    EVENT_HEAD_AT, EVENT_TAIL_AT, Geometry, HEADER_USED_BYTES, MIN_UNITS, REQUEST_TAIL_AT,
    STATE_AT, UNITS_AT, VERSION, VERSION_AT,
};
use profiler_protocol::position::{Extent, commit_word};
use profiler_protocol::producer::InstanceIdentity;
use profiler_protocol::record::{Record, RecordBody};
use profiler_protocol::request::{Request, RequestReader};
use proptest::prelude::{any, proptest};
use shared::{PlainMemory, SharedWords};
use std::convert::Infallible;
use std::sync::atomic::AtomicBool;

const SMALL: Geometry = Geometry { units: MIN_UNITS, request_slots: 8 };

type Opened = Consumer<PlainMemory>;

fn poke(memory: &PlainMemory, offset: u64, value: u64) {
    memory.write_at(offset, &value.to_le_bytes()).expect("in bounds");
}

fn open(shared: &SharedWords) -> Opened {
    Consumer::open(shared.memory(), SMALL.region_bytes()).expect("a region")
}

fn drain(consumer: &mut Opened) -> Result<Drained, ConsumerError<Infallible>> {
    consumer.drain(&mut vec![0; SCRATCH_BYTES], Quota::RING, &mut |r| {
        std::hint::black_box(r);
    })
}

fn honest() -> SharedWords {
    let shared = SharedWords::new(SMALL);
    let region = shared.region();
    region.publish(InstanceIdentity::default());
    for time_ns in 0..20 {
        let record = Record { tid: 1, time_ns, body: RecordBody::GcEnd { number: 3 } };
        let mut grant = region.try_reserve(record.body.record_bytes()).expect("room");
        record.encode(&mut grant);
        grant.commit();
    }
    shared
}

#[test]
fn a_head_that_jumps_is_a_lie() {
    for head in [21 + SMALL.units, u64::MAX, 1 << 63] {
        let shared = honest();
        let mut consumer = open(&shared);
        assert_eq!(drain(&mut consumer).map(|d| d.records), Ok(20));
        poke(&shared.memory(), EVENT_HEAD_AT, head);
        assert_eq!(drain(&mut consumer), Err(ConsumerError::HeadJump { tail: 20, head }));
    }
    let shared = honest();
    let mut consumer = open(&shared);
    assert!(drain(&mut consumer).is_ok());
    poke(&shared.memory(), EVENT_HEAD_AT, 5);
    assert_eq!(
        drain(&mut consumer),
        Err(ConsumerError::HeadJump { tail: 20, head: 5 }),
        "nor may it go back"
    );
}

#[test]
fn impossible_lengths_are_lies() {
    for (units, bytes) in [(0, 0), (0, 8), (1, 65), (2049, 8), (0x3fff, 0x3_ffff), (30, 8)] {
        let shared = honest();
        let word = commit_word(2, SMALL.units, Extent { units, bytes });
        poke(&shared.memory(), SMALL.commit_offset() + 16, word);
        let mut consumer = open(&shared);
        assert_eq!(drain(&mut consumer), Err(ConsumerError::Commit { position: 2, units, bytes }));
    }
}

#[test]
fn a_record_that_lies_inside_is_counted_and_the_next_one_read() {
    let shared = honest();
    // Record 4 becomes a TypeName whose strings are 4 GiB long, record 5 one of a kind from the
    // future.
    poke(&shared.memory(), SMALL.data_offset() + 4 * 64, 3);
    poke(&shared.memory(), SMALL.data_offset() + 4 * 64 + 16, u64::MAX);
    poke(&shared.memory(), SMALL.data_offset() + 5 * 64, 999);
    let drained = drain(&mut open(&shared)).expect("frames are sound");
    assert_eq!((drained.records, drained.malformed, drained.unknown), (18, 1, 1));
}

#[test]
fn positions_stay_private() {
    let shared = honest();
    let mut consumer = open(&shared);
    assert!(drain(&mut consumer).is_ok());
    poke(&shared.memory(), EVENT_TAIL_AT, 3);
    assert_eq!(drain(&mut consumer).map(|d| d.records), Ok(0), "nothing is read twice");
}

#[test]
fn an_absurd_request_tail_or_state_is_a_lie() {
    let shared = honest();
    let mut consumer = open(&shared);
    poke(&shared.memory(), REQUEST_TAIL_AT, 9);
    assert_eq!(
        consumer.request(&[Request::Detach]),
        Err(ConsumerError::RequestTail { head: 0, tail: 9 })
    );
    poke(&shared.memory(), STATE_AT, 77);
    assert_eq!(drain(&mut consumer), Err(ConsumerError::State { found: 77 }));
}

#[test]
fn a_header_for_another_file_is_refused() {
    let shared = honest();
    let open = |bytes| Consumer::open(shared.memory(), bytes).err();
    assert!(matches!(open(SMALL.region_bytes() - 1), Some(ConsumerError::Geometry { .. })));
    poke(&shared.memory(), UNITS_AT, 2048);
    assert!(matches!(open(u64::MAX), Some(ConsumerError::Geometry { .. })));
    let other = VERSION + 1;
    poke(&shared.memory(), VERSION_AT, other.into());
    assert_eq!(open(SMALL.region_bytes()), Some(ConsumerError::Version { found: other }));
    poke(&shared.memory(), 0, 0);
    assert_eq!(open(SMALL.region_bytes()), Some(ConsumerError::NotARegion { found: 0 }));
}

#[test]
fn a_full_ring_stays_full_for_a_producer_whose_daemon_writes_nonsense() {
    let shared = honest();
    for tail in [21, u64::MAX, 1 << 40] {
        poke(&shared.memory(), EVENT_TAIL_AT, tail);
        assert!(shared.region().try_reserve(64).is_none(), "tail {tail}");
    }
    poke(&shared.memory(), EVENT_TAIL_AT, 20);
    assert!(shared.region().try_reserve(64).is_some());
}

#[test]
fn a_noisy_request_ring_yields_no_nonsense() {
    let shared = honest();
    let region = shared.region();
    let mut reader = RequestReader::new();
    for offset in (SMALL.request_offset()..SMALL.commit_offset()).step_by(8) {
        poke(&shared.memory(), offset, 0x0101_0101_0101_0101);
    }
    for head in [8, 7, u64::MAX, 3] {
        poke(&shared.memory(), profiler_protocol::layout::REQUEST_HEAD_AT, head);
        for _ in 0..20 {
            assert_eq!(reader.take(&region), None);
        }
    }
}

#[test]
fn a_peer_that_rewrites_everything_meanwhile_never_panics_the_consumer() {
    let shared = honest();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let memory = shared.memory();
            let mut noise = 1u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                noise ^= noise << 13;
                noise ^= noise >> 7;
                noise ^= noise << 17;
                // Heads that are believable, commit words of this lap with random sizes, random
                // payloads.
                poke(&memory, EVENT_HEAD_AT, 20 + noise % 1100);
                poke(&memory, EVENT_TAIL_AT, noise >> 33 & 31);
                let position = noise % 1024;
                let extent = Extent { units: noise >> 20 & 15, bytes: noise >> 40 & 0x7f };
                poke(
                    &memory,
                    SMALL.commit_offset() + 8 * position,
                    commit_word(position, SMALL.units, extent),
                );
                poke(&memory, SMALL.data_offset() + 64 * position, noise >> 50);
                poke(&memory, SMALL.data_offset() + (noise >> 30 & 0xfff8), noise);
            }
        });
        let mut scratch = vec![0; MIN_SCRATCH_BYTES];
        let (mut lies, mut records) = (0u64, 0u64);
        let begin = std::time::Instant::now();
        // On a busy machine the noise needs its share of a CPU first.
        let quiet = |lies, records| lies == 0 || records == 0;
        for round in 0u32.. {
            if round >= 3000 && !(quiet(lies, records) && begin.elapsed().as_secs() < 300) {
                break;
            }
            let Ok(mut consumer) = Consumer::open(shared.memory(), SMALL.region_bytes()) else {
                lies += 1;
                continue;
            };
            for _ in 0..5 {
                match consumer.drain(&mut scratch, Quota::RING, &mut |_| records += 1) {
                    Ok(_) => {}
                    Err(_) => {
                        lies += 1;
                        break;
                    }
                }
                lies += u64::from(consumer.skip_hole(&mut scratch, true).is_err());
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(lies > 0 && records > 0, "{lies} lies, {records} records: the noise was not noisy");
    });
}

proptest! {
    #[test]
    fn any_header_is_opened_or_refused(
        words in proptest::collection::vec(any::<u64>(), HEADER_USED_BYTES / 8),
        keep in any::<u128>(),
    ) {
        let shared = honest();
        let memory = shared.memory();
        for (index, word) in words.iter().enumerate() {
            // Most words stay as an honest peer wrote them, so that many headers get past the first
            // checks.
            if keep >> index & 1 == 0 && keep >> (index ^ 1) & 3 == 0 {
                poke(&memory, 8 * index as u64, *word);
            }
        }
        if let Ok(mut consumer) = Consumer::open(memory, SMALL.region_bytes()) {
            std::hint::black_box(drain(&mut consumer).is_ok());
            let requests = [Request::Name { address: 1, seen_ns: 2 }, Request::Detach];
            std::hint::black_box(consumer.request(&requests).is_ok());
            std::hint::black_box(consumer.skip_hole(&mut [0; 4096], true).is_ok());
        }
    }

    #[test]
    fn any_commit_words_and_data_are_survived(
        commits in proptest::collection::vec(
            (0..MIN_UNITS + 76, 0u64..3, 0u64..2400, 0u64..2400),
            0..64,
        ),
        data in proptest::collection::vec((0u64..8192, any::<u64>()), 0..64),
        head in 0..MIN_UNITS + 176,
    ) {
        let shared = honest();
        let memory = shared.memory();
        for (position, lap, units, bytes) in commits {
            let extent = Extent { units, bytes };
            let word = commit_word(position + lap * SMALL.units, SMALL.units, extent);
            poke(&memory, SMALL.commit_offset() + 8 * (position % SMALL.units), word);
        }
        for (word, value) in data {
            poke(&memory, SMALL.data_offset() + 8 * word, value);
        }
        poke(&memory, EVENT_HEAD_AT, head);
        if let Ok(mut consumer) = Consumer::open(memory, SMALL.region_bytes()) {
            for _ in 0..3 {
                std::hint::black_box(drain(&mut consumer).is_ok());
            }
        }
    }
}

/// The peer truncated its file, or the process is gone.
struct Failing(u64);

impl RegionMemory for Failing {
    type Error = &'static str;

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), &'static str> {
        if offset + bytes.len() as u64 > self.0 {
            return Err("past the end");
        }
        let shared = honest();
        match shared.memory().read_at(offset, bytes) {
            Ok(()) => Ok(()),
            Err(never) => match never {},
        }
    }

    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), &'static str> {
        Err("read only")
    }
}

#[test]
fn memory_that_fails_is_an_error() {
    assert_eq!(
        Consumer::open(Failing(100), SMALL.region_bytes()).err(),
        Some(ConsumerError::Memory("past the end"))
    );
    let mut consumer =
        Consumer::open(Failing(4096), SMALL.region_bytes()).expect("the header is there");
    let mut scratch = vec![0; SCRATCH_BYTES];
    let drained = consumer.drain(&mut scratch, Quota::RING, &mut |_| {});
    assert_eq!(drained, Err(ConsumerError::Memory("past the end")));
    assert_eq!(consumer.beat(1, 2, 3), Err(ConsumerError::Memory("read only")));
    assert_eq!(
        consumer.drain(&mut [0; 100], Quota::RING, &mut |_| {}),
        Err(ConsumerError::Scratch { bytes: 100 })
    );
}
