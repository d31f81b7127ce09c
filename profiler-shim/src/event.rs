//! What runs on the app's threads: events of the runtime's provider become records. Nothing here waits, allocates or looks at an
//! object; payloads are read with bounds (layouts: docs.microsoft.com "garbage-collection-events", ClrEtwAll.man of dotnet/runtime).

use crate::instance::Instance;
use crate::live::Watch;
use crate::stack;
use crate::syscall;
use core::sync::atomic::Ordering;
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::FEATURE_ALLOCATION_SAMPLED;
use profiler_protocol::record::{AllocationHead, Body, PREFIX_WORDS, Registers, encode_prefix};

/// Reads a packed little-endian payload from the front.
struct Payload<'a>(&'a [u8]);

impl Payload<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Passes a zero-terminated UTF-16 string.
    fn string(&mut self) -> Option<()> {
        while self.u16()? != 0 {}
        Some(())
    }
}

/// An allocation, as either event tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sample {
    type_id: u64,
    address: u64,
    size: u64,
    amount: u64,
    heap: u8,
    sampled: bool,
}

/// AllocationTick, version 4 (.NET 6–10): amount u32, kind u32, clr u16, amount64 u64, type u64, name z, heap index u32,
/// address u64, size u64.
fn tick(payload: &[u8], version: u32) -> Option<Sample> {
    if version < 4 {
        return None;
    }
    let mut payload = Payload(payload);
    payload.u32()?;
    let kind = payload.u32()?;
    payload.u16()?;
    let amount = payload.u64()?;
    let type_id = payload.u64()?;
    payload.string()?;
    payload.u32()?;
    let address = payload.u64()?;
    let size = payload.u64()?;
    Some(Sample { type_id, address, size, amount, heap: heap(kind)?, sampled: false })
}

/// AllocationSampled, version 0 (.NET 10): kind u32, clr u16, type u64, name z, address u64, size u64, offset u64.
fn sampled(payload: &[u8]) -> Option<Sample> {
    let mut payload = Payload(payload);
    let kind = payload.u32()?;
    payload.u16()?;
    let type_id = payload.u64()?;
    payload.string()?;
    let address = payload.u64()?;
    let size = payload.u64()?;
    payload.u64()?;
    Some(Sample { type_id, address, size, amount: 0, heap: heap(kind)?, sampled: true })
}

fn heap(kind: u32) -> Option<u8> {
    u8::try_from(kind).ok().filter(|k| *k <= 2)
}

impl Instance {
    /// An event of the runtime's provider. `registers` were captured in a frame that lives until this returns.
    pub fn on_event(&self, id: u32, version: u32, payload: &[u8], registers: &Registers) {
        let sampled_mode = self.features() & FEATURE_ALLOCATION_SAMPLED != 0;
        let known = match id {
            10 if !sampled_mode => {
                tick(payload, version).map(|sample| self.on_allocation(&sample, registers))
            }
            303 if sampled_mode => sampled(payload).map(|sample| self.on_allocation(&sample, registers)),
            1 => self.on_gc_start(payload),
            2 => self.on_gc_end(payload),
            9 => self.on_suspend(payload),
            3 => {
                self.on_resume();
                Some(())
            }
            _ => {
                self.count(Counter::EventsForeign);
                return;
            }
        };
        if known.is_none() {
            self.count(Counter::EventsMalformed);
        }
    }

    fn on_allocation(&self, event: &Sample, registers: &Registers) {
        let began_ns = syscall::now_ns();
        let thread = syscall::thread_id();
        if self.allocations.is_repeat(thread, event.address, self.gc.count()) {
            self.count(Counter::AllocationRepeats);
            return;
        }
        self.count(Counter::AllocationSamples);
        let extent = stack::extent(registers.sp as usize, self.stack_limit());
        if extent.cut {
            self.count(Counter::StacksCut);
        }
        let stack_words = (extent.bytes / 8) as u64;
        let words = PREFIX_WORDS.wrapping_add(AllocationHead::WORDS).wrapping_add(stack_words);
        // Room first: an object whose sample cannot be told is not watched either.
        let Some(mut grant) = self.region().try_reserve(words.wrapping_mul(8)) else {
            self.count(Counter::AllocationsDroppedFull);
            return;
        };
        let sample = self.samples.fetch_add(1, Ordering::Relaxed);
        let watched = self.watch(event.address as usize, sample, event.size);
        if !self.types.add(event.type_id) {
            self.count(Counter::TypesQueueFull);
        }
        encode_prefix(&mut grant, 2, thread, began_ns);
        AllocationHead {
            sample,
            type_id: event.type_id,
            size: event.size,
            amount: event.amount,
            heap: event.heap,
            sampled: event.sampled,
            watched,
            limited: extent.limited,
            stack_bytes: extent.bytes as u32,
            registers: *registers,
        }
        .encode(&mut grant);
        if let Some(runs) = grant.skip(stack_words) {
            stack::copy(extent, runs);
            grant.commit();
        }
        let spent_ns = syscall::now_ns().saturating_sub(began_ns);
        self.region().count(Counter::AllocationNs, spent_ns);
    }

    /// Watches the object, if it is its turn. As in the record: 0, or 1 more than the level.
    fn watch(&self, address: usize, sample: u64, size: u64) -> u8 {
        let Some(info) = self.info().filter(|i| i.has_handles()) else { return 0 };
        let (watched, counter) =
            match self.live.watch(&info, address, sample, size, &mut |found| self.tell_found(found)) {
                Watch::Watched { level } => (level.saturating_add(1), Counter::HandlesCreated),
                Watch::Thinned => (0, Counter::ObjectsThinned),
                Watch::Full => (0, Counter::HandlesFull),
                Watch::Refused => (0, Counter::HandlesRefused),
            };
        self.count(counter);
        watched
    }

    /// GCStart version 2: count u32, depth u32, reason u32, type u32.
    fn on_gc_start(&self, payload: &[u8]) -> Option<()> {
        let mut payload = Payload(payload);
        let (number, depth, reason, kind) = (payload.u32()?, payload.u32()?, payload.u32()?, payload.u32()?);
        if self.gc.reported.started(number) {
            let byte = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
            self.send(Body::GcStart {
                number,
                generation: byte(depth),
                reason: byte(reason),
                kind: byte(kind),
            });
        } else {
            self.count(Counter::GcRepeats);
        }
        Some(())
    }

    /// GCEnd version 1: count u32, depth u32.
    fn on_gc_end(&self, payload: &[u8]) -> Option<()> {
        let number = Payload(payload).u32()?;
        if self.gc.reported.ended(number) {
            self.send(Body::GcEnd { number });
        } else {
            self.count(Counter::GcRepeats);
        }
        Some(())
    }

    /// GCSuspendEEBegin version 1: reason u32, count u32.
    fn on_suspend(&self, payload: &[u8]) -> Option<()> {
        let reason = u64::from(Payload(payload).u32()?);
        if self.gc.pause_begins() {
            self.send(Body::PauseBegin { reason });
        } else {
            self.count(Counter::GcRepeats);
        }
        Some(())
    }

    /// GCRestartEEEnd.
    fn on_resume(&self) {
        if self.gc.pause_ends() {
            self.send(Body::PauseEnd);
        } else {
            self.count(Counter::GcRepeats);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Sample, sampled, tick};
    use proptest::prelude::{any, proptest};

    fn payload(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn an_allocation_tick_of_version_4_is_read_and_older_ones_are_not() {
        let name = [b'A', 0, b'b', 0, 0, 0];
        let bytes = payload(&[
            &100_u32.to_le_bytes(),
            &1_u32.to_le_bytes(),
            &9_u16.to_le_bytes(),
            &106_496_u64.to_le_bytes(),
            &0x7f00_u64.to_le_bytes(),
            &name,
            &0_u32.to_le_bytes(),
            &0xabc0_u64.to_le_bytes(),
            &85_024_u64.to_le_bytes(),
        ]);
        let read = Sample {
            type_id: 0x7f00,
            address: 0xabc0,
            size: 85_024,
            amount: 106_496,
            heap: 1,
            sampled: false,
        };
        assert_eq!(tick(&bytes, 4), Some(read));
        assert_eq!(tick(&bytes, 3), None);
        assert_eq!(tick(&bytes[..bytes.len() - 1], 4), None);
    }

    #[test]
    fn an_allocation_sample_is_read() {
        let bytes = payload(&[
            &2_u32.to_le_bytes(),
            &9_u16.to_le_bytes(),
            &0x7f00_u64.to_le_bytes(),
            &[0, 0],
            &0xabc0_u64.to_le_bytes(),
            &48_u64.to_le_bytes(),
            &17_u64.to_le_bytes(),
        ]);
        let read = Sample { type_id: 0x7f00, address: 0xabc0, size: 48, amount: 0, heap: 2, sampled: true };
        assert_eq!(sampled(&bytes), Some(read));
    }

    proptest! {
        #[test]
        fn any_payload_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), version: u32) {
            std::hint::black_box((tick(&bytes, version).is_some(), sampled(&bytes).is_some()));
        }
    }
}
