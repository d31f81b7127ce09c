//! Every interleaving (within a bound) of two producers and the consumer on a ring so small that it
//! wraps and fills: `RUSTFLAGS="--cfg loom" cargo test --package profiler-protocol --release --test
//! loom`.
#![cfg(loom)]
#![allow(clippy::expect_used, reason = "a failed expectation is a failed test")]

use loom::sync::Arc;
use loom::sync::atomic::fence;
use profiler_protocol::consumer::{Consumer, MIN_SCRATCH_BYTES, Quota, RegionMemory};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{EVENT_HEAD_AT, Geometry};
use profiler_protocol::producer::{InstanceIdentity, ProducerRegion};
use profiler_protocol::record::{Record, RecordBody};
use profiler_protocol::sync::{AtomicU64, Ordering};
use std::convert::Infallible;

const TINY: Geometry = Geometry { units: 2, request_slots: 1 };

/// `pread` and `pwrite`: words in no order within a call, calls in order. Of the header only
/// event_head is read while others write, as each further word would multiply the interleavings for
/// nothing.
struct Pread {
    words: Arc<Vec<AtomicU64>>,
    opened: std::cell::Cell<bool>,
}

impl RegionMemory for Pread {
    type Error = Infallible;

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Infallible> {
        let first = (offset / 8) as usize;
        let only = (offset == 0 && self.opened.get()).then_some((EVENT_HEAD_AT / 8) as usize);
        for (index, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            if only.is_none_or(|only| only == index) {
                if only.is_some() {
                    // Loom 0.7 compares an access with the last one alone: a producer's own look at
                    // the head hides ours from its reservation, and the two are never tried the
                    // other way round, unless ours could have changed something.
                    self.words[index].fetch_or(0, Ordering::Relaxed);
                }
                chunk.copy_from_slice(
                    &self.words[first + index].load(Ordering::Relaxed).to_le_bytes(),
                );
            }
        }
        fence(Ordering::Acquire);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        fence(Ordering::Release);
        for (index, chunk) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(chunk.try_into().expect("eight bytes"));
            self.words[(offset / 8) as usize + index].store(word, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn write(words: &[AtomicU64], tid: u32, time_ns: u64) {
    let region = ProducerRegion::new(words, TINY).expect("enough words");
    if let Some(mut grant) = region.try_reserve(16) {
        Record { tid, time_ns, body: RecordBody::PauseEnd }.encode(&mut grant);
        grant.commit();
    }
}

/// A region that is `publish`ed, and its consumer.
fn opened() -> (Arc<Vec<AtomicU64>>, Consumer<Pread>) {
    let count = (TINY.region_bytes() / 8) as usize;
    let words: Arc<Vec<AtomicU64>> = Arc::new((0..count).map(|_| AtomicU64::new(0)).collect());
    ProducerRegion::new(&words, TINY).expect("enough words").publish(InstanceIdentity::default());
    let memory = Pread { words: Arc::clone(&words), opened: std::cell::Cell::new(false) };
    let consumer = Consumer::open(memory, TINY.region_bytes()).expect("a region");
    consumer.memory().opened.set(true);
    (words, consumer)
}

/// Runs it in every order with so many preemptions, or with as many as `LOOM_MAX_PREEMPTIONS` says.
fn check(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = model.preemption_bound.or(Some(preemptions));
    model.check(run);
}

#[test]
fn nothing_is_dropped_while_there_is_room() {
    check(2, || {
        let (words, mut consumer) = opened();
        // As many records as the ring holds, so that it is never full.
        let producers: Vec<_> = [1u32, 2]
            .into_iter()
            .map(|tid| {
                let words = Arc::clone(&words);
                loom::thread::spawn(move || write(&words, tid, u64::from(tid) * 10))
            })
            .collect();
        let mut scratch = vec![0; MIN_SCRATCH_BYTES];
        let mut seen = 0;
        let mut drain = |consumer: &mut Consumer<Pread>| {
            consumer.drain(&mut scratch, Quota::RING, &mut |_| seen += 1).expect("an honest peer");
        };
        drain(&mut consumer);
        drain(&mut consumer);
        for producer in producers {
            producer.join().expect("no panic");
        }
        drain(&mut consumer);
        assert_eq!(seen, 2);
    });
}

#[test]
fn every_record_arrives_whole_and_once_or_is_counted_as_dropped() {
    // Two take half a minute.
    check(1, || {
        let (words, mut consumer) = opened();
        let region = ProducerRegion::new(&words, TINY).expect("enough words");
        let producers: Vec<_> = [1u32, 2]
            .into_iter()
            .map(|tid| {
                let words = Arc::clone(&words);
                loom::thread::spawn(move || {
                    write(&words, tid, u64::from(tid) * 10);
                    write(&words, tid, u64::from(tid) * 10 + 1);
                })
            })
            .collect();
        let mut scratch = vec![0; MIN_SCRATCH_BYTES];
        let mut seen = Vec::new();
        let mut drain = |consumer: &mut Consumer<Pread>| {
            let drained = consumer
                .drain(&mut scratch, Quota::RING, &mut |r| {
                    assert_eq!(r.body, RecordBody::PauseEnd);
                    assert_eq!(
                        r.time_ns / 10,
                        u64::from(r.tid),
                        "half of one record, half of another"
                    );
                    seen.push(r.time_ns);
                })
                .expect("an honest peer");
            assert_eq!((drained.malformed, drained.unknown, drained.skipped), (0, 0, 0));
        };
        drain(&mut consumer);
        drain(&mut consumer);
        for producer in producers {
            producer.join().expect("no panic");
        }
        drain(&mut consumer);
        let total = seen.len() as u64 + region.counter(Counter::RecordsDroppedFull);
        assert_eq!(total, 4, "{seen:?}");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(
            seen.len() as u64,
            region.counter(Counter::RecordsWritten),
            "a record was seen twice"
        );
    });
}
