//! What runs on the app's threads: events of the runtime's provider become records, and so do large
//! objects. Nothing here waits or allocates, and no event looks at its object, which may be none
//! yet; payloads are read with bounds (layouts: docs.microsoft.com "garbage-collection-events",
//! ClrEtwAll.man of dotnet/runtime).

use crate::contention::{CONTENTIONS, level_for};
use crate::downsampler::RingShare;
use crate::exact::RuntimeHeap as _;
use crate::instance::{EXCEPTIONS, Instance};
use crate::live::{Handles as _, WatchOutcome};
use crate::machine::thread_block;
use crate::repeat::mix;
use crate::stack::{self, StackExtent};
use crate::syscall;
use crate::text::BoundedText;
use core::sync::atomic::Ordering;
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::FEATURE_ALLOCATION_SAMPLED;
use profiler_protocol::live::{SAMPLING_BYTES, importance};
use profiler_protocol::load::{
    WITH_EXCEPTION_MESSAGES, WITH_THREAD_POOL, WITHOUT_CONTENTION, WITHOUT_EXCEPTIONS,
};
use profiler_protocol::producer::Grant;
use profiler_protocol::record::{
    AllocationHead, ContentionHead, ExceptionHead, PREFIX_WORDS, RecordBody, Registers, StackHead,
    encode_prefix,
};

/// Bytes of a payload that are looked at.
pub const MOST_PAYLOAD: u32 = 1 << 16;
/// Bytes of an exception's type name that are told, and of its message.
const TYPE_NAME_BYTES: usize = 512;
const MESSAGE_BYTES: usize = 512;

/// Reads a packed little-endian payload from the front.
struct Payload<'a>(&'a [u8]);

impl Payload<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
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

    /// Reads one; its beginning also where its end is missing.
    fn text<const N: usize>(&mut self, to: &mut BoundedText<N>) -> Option<()> {
        to.push_units(self.0.as_chunks().0.iter().copied().map(u16::from_le_bytes));
        self.string()
    }
}

/// Of a heap, as events and records have it.
const LARGE: u8 = 1;
/// The large objects' generation, as the profiling interface has it (COR_PRF_GC_LARGE_OBJECT_HEAP).
const LARGE_GENERATION: u8 = 3;

/// An allocation, as either event tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AllocationEvent {
    type_id: u64,
    address: u64,
    size: u64,
    amount: u64,
    heap: u8,
    sampled: bool,
    exact: bool,
}

/// AllocationTick, version 4 (.NET 6–10): amount u32, kind u32, clr u16, amount64 u64, type u64,
/// name z, heap index u32, address u64, size u64.
fn tick(payload: &[u8], version: u32) -> Option<AllocationEvent> {
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
    Some(AllocationEvent {
        type_id,
        address,
        size,
        amount,
        heap: heap(kind)?,
        sampled: false,
        exact: false,
    })
}

/// AllocationSampled, version 0 (.NET 10): kind u32, clr u16, type u64, name z, address u64, size
/// u64, offset u64.
fn sampled(payload: &[u8]) -> Option<AllocationEvent> {
    let mut payload = Payload(payload);
    let kind = payload.u32()?;
    payload.u16()?;
    let type_id = payload.u64()?;
    payload.string()?;
    let address = payload.u64()?;
    let size = payload.u64()?;
    payload.u64()?;
    Some(AllocationEvent {
        type_id,
        address,
        size,
        amount: 0,
        heap: heap(kind)?,
        sampled: true,
        exact: false,
    })
}

/// GCHeapStats version 1 or 2: size and promoted bytes of generations 0 to 2 and of large objects,
/// u64 each; finalizable bytes and objects u64, pinned objects, sync blocks and handles u32, clr
/// u16; from version 2 on size and promoted bytes of pinned objects. Answers all promoted bytes.
fn promoted(payload: &[u8]) -> Option<u64> {
    let mut payload = Payload(payload);
    let mut total = 0u64;
    for _ in 0..4 {
        payload.u64()?;
        total = total.wrapping_add(payload.u64()?);
    }
    payload.take::<30>()?;
    payload.u64();
    Some(total.wrapping_add(payload.u64().unwrap_or(0)))
}

/// What is told of an exception beside its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThrowKind {
    First,
    Again,
    /// The message ends beyond what is looked at, and behind it stands which of the two it is.
    Cut,
}

/// ExceptionThrown version 1: type z, message z, address u64, hresult u32, flags u16. The message,
/// which may hold anything, is passed over unless it is asked for.
fn thrown<const N: usize, const M: usize>(
    payload: &[u8],
    type_name: &mut BoundedText<N>,
    message: Option<&mut BoundedText<M>>,
) -> Option<ThrowKind> {
    const RETHROWN: u16 = 4;
    let is_cut = payload.len() >= MOST_PAYLOAD as usize;
    let mut payload = Payload(payload);
    payload.text(type_name)?;
    let flags = || {
        match message {
            Some(message) => payload.text(message)?,
            None => payload.string()?,
        }
        payload.u64()?;
        payload.u32()?;
        payload.u16()
    };
    match flags() {
        Some(flags) if flags & RETHROWN != 0 => Some(ThrowKind::Again),
        Some(_) => Some(ThrowKind::First),
        None => is_cut.then_some(ThrowKind::Cut),
    }
}

/// ContentionStart: flags u8 (0 managed), clr u16; from version 2 on (.NET 8) lock u64, object u64,
/// owner's thread u64. Answers the owner, 0 when it is not told.
fn contention_start(payload: &[u8]) -> Option<u32> {
    let mut payload = Payload(payload);
    payload.u8()?;
    payload.u16()?;
    payload.u64();
    payload.u64();
    Some(payload.u64().and_then(|owner| u32::try_from(owner).ok()).unwrap_or(0))
}

/// ContentionStop version 1: flags u8, clr u16, duration f64 in nanoseconds.
fn contention_stop(payload: &[u8]) -> Option<u64> {
    let mut payload = Payload(payload);
    payload.u8()?;
    payload.u16()?;
    let waited_ns = f64::from_le_bytes(payload.take()?);
    (waited_ns >= 0.0).then_some(waited_ns as u64)
}

/// ThreadPoolWorkerThreadAdjustmentAdjustment: throughput f64, workers u32, reason u32.
fn pool_adjusted(payload: &[u8]) -> Option<(u32, u32)> {
    let mut payload = Payload(payload);
    payload.u64()?;
    Some((payload.u32()?, payload.u32()?))
}

/// `EventCounters` of the provider System.Runtime: name z, name to be shown z, value f64, …, the
/// same for all counters that are read and not counted up. Answers the value of this counter;
/// `None` of another one.
fn counter(payload: &[u8], name: &str) -> Option<Option<u64>> {
    let mut payload = Payload(payload);
    if !name.bytes().map(u16::from).chain([0]).all(|unit| payload.u16() == Some(unit)) {
        return None;
    }
    let mut value = || {
        payload.string()?;
        payload.take().map(f64::from_le_bytes).filter(|value| *value >= 0.0)
    };
    Some(value().map(|value| value as u64))
}

/// The level of a sample that stands for `bytes` where others are chosen at `level`: its chance is
/// at least its share, so that large objects are known as well as many small ones.
fn level_of_sample(level: u8, bytes: u64) -> u8 {
    let larger = (bytes / SAMPLING_BYTES).checked_ilog2().and_then(|bits| u8::try_from(bits).ok());
    level.saturating_sub(larger.unwrap_or(0))
}

fn heap(kind: u32) -> Option<u8> {
    u8::try_from(kind).ok().filter(|k| *k <= 2)
}

impl Instance {
    /// An event of the runtime's provider. `registers` were captured in a frame that lives until
    /// this returns.
    pub fn on_event(&self, id: u32, version: u32, payload: &[u8], registers: &Registers) {
        let sampled_mode = self.features() & FEATURE_ALLOCATION_SAMPLED != 0;
        let wishes = |what| self.wishes() & what != 0;
        let known = match id {
            // Another session's, if such are delivered.
            80 if wishes(WITHOUT_EXCEPTIONS) => return,
            81 | 91 if wishes(WITHOUT_CONTENTION) => return,
            55 if wishes(WITH_THREAD_POOL) => self.on_pool_adjusted(payload),
            // Of workers that begin, wait and end, and of other threads: they come with the
            // keyword.
            50..=71 | 85..=89 => return,
            // Another one's: exact mode has chosen others.
            10 | 303 if self.is_guest() => return,
            10 if !sampled_mode => {
                tick(payload, version).map(|sample| self.on_allocation(&sample, registers))
            }
            303 if sampled_mode => {
                sampled(payload).map(|sample| self.on_allocation(&sample, registers))
            }
            1 => self.on_gc_start(payload),
            2 => self.on_gc_end(payload),
            9 => self.on_suspend(payload),
            3 => {
                self.on_resume();
                Some(())
            }
            4 => self.on_heap_stats(payload),
            80 => self.on_exception(payload, registers),
            81 => self.on_contention_start(payload),
            91 => self.on_contention_stop(payload, registers),
            _ => {
                self.count(Counter::EventsForeign);
                return;
            }
        };
        if known.is_none() {
            self.count(Counter::EventsMalformed);
        }
    }

    /// An object that exact mode has chosen by chance, as AllocationSampled would have, from
    /// `amount` bytes. `registers` were captured in a frame that lives until this returns.
    pub fn on_chosen(
        &self,
        type_id: u64,
        object: usize,
        (size, amount): (u64, u64),
        registers: &Registers,
    ) {
        let generation = self.info().and_then(|info| info.generation(object)).unwrap_or(0);
        // Large and pinned objects have heaps of their own from the first.
        let heap = generation.saturating_sub(2);
        let address = object as u64;
        let sample =
            AllocationEvent { type_id, address, size, amount, heap, sampled: true, exact: false };
        self.on_allocation(&sample, registers);
    }

    /// An object that this thread has just allocated, and that is one by now. `registers` were
    /// captured in a frame that lives until this returns.
    pub fn on_allocated(&self, type_id: u64, object: usize, registers: &Registers) {
        let Some(info) = self.info() else { return };
        // Large ones that are pinned come here too, and lie elsewhere: the events tell of these.
        // Others, when another profiler has asked for all.
        match info.generation(object) {
            Some(LARGE_GENERATION) => {}
            Some(_) => return,
            None => return self.count(Counter::RuntimeRefusals),
        }
        let Some(bytes) = info.size(object) else { return self.count(Counter::RuntimeRefusals) };
        let (address, size) = (object as u64, bytes.div_ceil(8).wrapping_mul(8));
        let sample = AllocationEvent {
            type_id,
            address,
            size,
            amount: 0,
            heap: LARGE,
            sampled: false,
            exact: true,
        };
        self.on_allocation(&sample, registers);
    }

    fn on_allocation(&self, event: &AllocationEvent, registers: &Registers) {
        if event.heap == LARGE && !event.exact && self.is_told_of_large() {
            return self.count(Counter::LargeObjectEvents);
        }
        let began_ns = syscall::now_ns();
        if self.allocations.is_repeat(thread_block(), event.address, self.gc.count()) {
            self.count(Counter::AllocationRepeats);
            return;
        }
        self.count(Counter::AllocationSamples);
        // The two draw from different sequences: an estimate of both has the variance of
        // independent ones.
        let (thin, seed, room) = match event.exact {
            // Each is told of, as long as it finds room.
            true => (&self.large, !self.seed(), RingShare::Last),
            false => (&self.sampled, self.seed(), RingShare::Usual),
        };
        if event.exact {
            self.count(Counter::LargeObjects);
        }
        let level = self.level(thin, began_ns, self.samples_limit(), room);
        let level = level_of_sample(level, event.size.max(event.amount));
        if !thin.chosen(level, seed) {
            self.count(Counter::AllocationsThinned);
            if event.exact {
                self.count(Counter::LargeObjectsThinned);
            }
            return;
        }
        let thread = syscall::thread_id();
        // Room first: an object whose sample cannot be told is not watched either.
        let head = (AllocationHead::KIND, thread, began_ns, AllocationHead::WORDS);
        let dropped = Counter::AllocationsDroppedFull;
        let Some((mut grant, extent)) = self.room_with_stack(head, registers, dropped) else {
            return;
        };
        let sample = self.samples.fetch_add(1, Ordering::Relaxed);
        let watched = self.watch(event.address as usize, sample, (event.size, level));
        if !self.types.add(event.type_id) {
            self.count(Counter::TypesQueueFull);
        }
        AllocationHead {
            sample,
            type_id: event.type_id,
            size: event.size,
            amount: event.amount,
            heap: event.heap,
            sampled: event.sampled,
            exact: event.exact,
            watched,
            level,
            limited: extent.limited,
            stack_bytes: extent.bytes as u32,
            registers: *registers,
        }
        .encode(&mut grant);
        commit_with_stack(grant, extent);
        let spent_ns = syscall::now_ns().saturating_sub(began_ns);
        self.region().count(Counter::AllocationNs, spent_ns);
    }

    /// Begins a record of this kind, thread and time, with so many words before this thread's
    /// stack; how much there is of that. `None` without room, which is counted.
    fn room_with_stack(
        &self,
        (kind, thread, began_ns, words): (u16, u32, u64, u64),
        registers: &Registers,
        dropped: Counter,
    ) -> Option<(Grant<'static>, StackExtent)> {
        let extent = stack::extent(registers.sp as usize, stack::LIMIT);
        if extent.cut {
            self.count(Counter::StacksCut);
        }
        let words = PREFIX_WORDS.wrapping_add(words).wrapping_add(stack_words(extent));
        let Some(mut grant) = self.region().try_reserve_sample(words.wrapping_mul(8)) else {
            self.count(dropped);
            return None;
        };
        self.call_when_filling();
        encode_prefix(&mut grant, kind, thread, began_ns);
        Some((grant, extent))
    }

    fn on_exception(&self, payload: &[u8], registers: &Registers) -> Option<()> {
        let began_ns = syscall::now_ns();
        let thread = syscall::thread_id();
        let mut type_name = BoundedText::<TYPE_NAME_BYTES>::new();
        let mut message = BoundedText::<MESSAGE_BYTES>::new();
        let asked = self.wishes() & WITH_EXCEPTION_MESSAGES != 0;
        let thrown = thrown(payload, &mut type_name, asked.then_some(&mut message))?;
        let mut name = mix(registers.sp ^ u64::from(thread) << 32);
        for bytes in payload.chunks(8) {
            let word = bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            name = mix(name ^ word);
        }
        if self.throws.is_repeat(thread, name, began_ns) {
            self.count(Counter::RuntimeRepeats);
        } else {
            self.count(Counter::Exceptions);
            if thrown == ThrowKind::Cut {
                self.count(Counter::MessagesCut);
            }
            let rethrown = thrown == ThrowKind::Again;
            let level = self.level(&self.thrown, began_ns, EXCEPTIONS, RingShare::Usual);
            if self.thrown.chosen(level, self.seed()) {
                let message = asked.then_some(message.as_str());
                let at = StackHead { level, registers: *registers, ..StackHead::default() };
                let head = ExceptionHead { at, rethrown, type_name: type_name.as_str(), message };
                self.tell_exception((began_ns, thread), head);
            } else {
                self.count(Counter::ExceptionsThinned);
            }
        }
        self.throws.done(thread, syscall::now_ns());
        Some(())
    }

    /// Tells of it with the stack that its registers are of.
    fn tell_exception(&self, (began_ns, thread): (u64, u32), head: ExceptionHead<'_>) {
        let StackHead { level, registers, .. } = head.at;
        let record = (ExceptionHead::KIND, thread, began_ns, head.words());
        let dropped = Counter::ExceptionsDroppedFull;
        let Some((mut grant, extent)) = self.room_with_stack(record, &registers, dropped) else {
            return;
        };
        ExceptionHead { at: stack_head(level, extent, &registers), ..head }.encode(&mut grant);
        commit_with_stack(grant, extent);
    }

    fn on_contention_start(&self, payload: &[u8]) -> Option<()> {
        let owner = contention_start(payload)?;
        self.contentions.begins(syscall::thread_id(), owner);
        Some(())
    }

    fn on_contention_stop(&self, payload: &[u8], registers: &Registers) -> Option<()> {
        let waited_ns = contention_stop(payload)?;
        let now_ns = syscall::now_ns();
        let thread = syscall::thread_id();
        if self.waits.is_repeat(thread, waited_ns, now_ns) {
            self.count(Counter::RuntimeRepeats);
        } else {
            self.count(Counter::Contentions);
            // One that began before anybody listened has its stack and its length all the same.
            let owner = self.contentions.ends(thread).unwrap_or_else(|| {
                self.count(Counter::ContentionsUnmatched);
                0
            });
            let level = self.level(&self.contentions.thin, now_ns, CONTENTIONS, RingShare::Usual);
            let level = level_for(level, waited_ns);
            if self.contentions.thin.chosen(level, self.seed()) {
                let at = StackHead { level, registers: *registers, ..StackHead::default() };
                self.tell_contention((now_ns, thread), ContentionHead { at, waited_ns, owner });
            } else {
                self.count(Counter::ContentionsThinned);
            }
        }
        self.waits.done(thread, syscall::now_ns());
        Some(())
    }

    /// Tells of it with the stack that its registers are of.
    fn tell_contention(&self, (now_ns, thread): (u64, u32), head: ContentionHead) {
        let StackHead { level, registers, .. } = head.at;
        let record = (ContentionHead::KIND, thread, now_ns, ContentionHead::WORDS);
        let dropped = Counter::ContentionsDroppedFull;
        let Some((mut grant, extent)) = self.room_with_stack(record, &registers, dropped) else {
            return;
        };
        ContentionHead { at: stack_head(level, extent, &registers), ..head }.encode(&mut grant);
        commit_with_stack(grant, extent);
    }

    /// The runtime adjusts under a lock of its own, and says so only when the number is another.
    fn on_pool_adjusted(&self, payload: &[u8]) -> Option<()> {
        let (workers, reason) = pool_adjusted(payload)?;
        let told = u64::from(workers).wrapping_add(1);
        if self.workers.swap(told, Ordering::Relaxed) == told {
            self.count(Counter::RuntimeRepeats);
        } else {
            self.send(RecordBody::PoolAdjusted { workers, reason });
        }
        Some(())
    }

    /// An event of the provider of the runtime's counters.
    pub fn on_counter(&self, payload: &[u8]) {
        // Items in the queues of the thread pool (`ThreadPool.PendingWorkItemCount`).
        match counter(payload, "threadpool-queue-length") {
            Some(Some(items)) if self.wishes() & WITH_THREAD_POOL != 0 => {
                self.send(RecordBody::PoolQueue { items });
            }
            // Another session's, if such are delivered; another counter.
            Some(Some(_)) | None => {}
            Some(None) => self.count(Counter::EventsMalformed),
        }
    }

    /// Watches the object, if it is its turn. As in the record: 0, or 1 more than the level.
    fn watch(&self, address: usize, sample: u64, (size, level): (u64, u8)) -> u8 {
        let Some(info) = self.info().filter(|i| i.has_handles() && self.watches()) else {
            return 0;
        };
        // Asked again, within: the service thread waits for us before it gives up the last handles.
        let _watching = self.live.watching();
        if !self.is_listening() {
            return 0;
        }
        let (watched, counter) =
            match self.live.watch(&info, address, sample, importance(size, level), &mut |found| {
                self.tell_found(found)
            }) {
                WatchOutcome::Watched { level } => {
                    (level.saturating_add(1), Counter::HandlesCreated)
                }
                WatchOutcome::Thinned => (0, Counter::ObjectsThinned),
                WatchOutcome::Full => (0, Counter::HandlesFull),
                WatchOutcome::Refused => (0, Counter::HandlesRefused),
            };
        self.count(counter);
        watched
    }

    /// GCStart version 2: count u32, depth u32, reason u32, type u32.
    fn on_gc_start(&self, payload: &[u8]) -> Option<()> {
        let mut payload = Payload(payload);
        let (number, depth, reason, kind) =
            (payload.u32()?, payload.u32()?, payload.u32()?, payload.u32()?);
        if self.gc.reported.started(number) {
            let byte = |n: u32| u8::try_from(n).unwrap_or(u8::MAX);
            self.send(RecordBody::GcStart {
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

    /// GCEnd version 1: count u32, depth u32. One whose start was not told is the end of a
    /// collection that was going on when the session began, or a repeat; of repeats the starts
    /// count.
    fn on_gc_end(&self, payload: &[u8]) -> Option<()> {
        let number = Payload(payload).u32()?;
        if self.gc.reported.ended(number) {
            self.gc.ended(number);
            self.send(RecordBody::GcEnd { number });
        }
        Some(())
    }

    /// What a collection left is told right after its end, on the same thread
    /// (`GCHeap::UpdatePostGCCounters`, gc/gcee.cpp of dotnet/runtime).
    fn on_heap_stats(&self, payload: &[u8]) -> Option<()> {
        let promoted = promoted(payload)?;
        if let Some(number) = self.gc.left() {
            self.send(RecordBody::GcHeap { number, promoted });
        }
        Some(())
    }

    /// GCSuspendEEBegin version 1: reason u32, count u32.
    fn on_suspend(&self, payload: &[u8]) -> Option<()> {
        let reason = u64::from(Payload(payload).u32()?);
        if self.gc.pause_begins(syscall::thread_id(), syscall::thread_cpu_ns()) {
            self.send(RecordBody::PauseBegin { reason });
        } else {
            self.count(Counter::GcRepeats);
        }
        Some(())
    }

    /// GCRestartEEEnd.
    fn on_resume(&self) {
        if let Some((suspender, before_ns)) = self.gc.pause_ends() {
            // A background collection lets the others run again on a thread of its own.
            let cpu_ns = syscall::cpu_ns_of(suspender).saturating_sub(before_ns);
            self.send(RecordBody::PauseCpu { suspender, cpu_ns });
            self.send(RecordBody::PauseEnd);
        }
    }
}

fn stack_words(extent: StackExtent) -> u64 {
    (extent.bytes / 8) as u64
}

fn stack_head(level: u8, extent: StackExtent, registers: &Registers) -> StackHead {
    StackHead {
        level,
        limited: extent.limited,
        stack_bytes: extent.bytes as u32,
        registers: *registers,
    }
}

/// The rest of a record that [`Instance::room_with_stack`] made room for.
fn commit_with_stack(mut grant: Grant<'_>, extent: StackExtent) {
    if let Some(runs) = grant.skip(stack_words(extent)) {
        stack::copy(extent, runs);
        grant.commit();
    }
}

#[cfg(test)]
mod tests {
    use super::{
        AllocationEvent, MOST_PAYLOAD, ThrowKind, contention_start, contention_stop, counter,
        pool_adjusted, promoted, sampled, thrown, tick,
    };
    use crate::text::BoundedText;
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
        let read = AllocationEvent {
            type_id: 0x7f00,
            address: 0xabc0,
            size: 85_024,
            amount: 106_496,
            heap: 1,
            sampled: false,
            exact: false,
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
        let read = AllocationEvent {
            type_id: 0x7f00,
            address: 0xabc0,
            size: 48,
            amount: 0,
            heap: 2,
            sampled: true,
            exact: false,
        };
        assert_eq!(sampled(&bytes), Some(read));
    }

    #[test]
    fn promoted_bytes_of_all_generations_are_summed() {
        let pairs = |generations: &[(u64, u64)]| -> Vec<u8> {
            generations
                .iter()
                .flat_map(|(size, promoted)| [size.to_le_bytes(), promoted.to_le_bytes()])
                .flatten()
                .collect()
        };
        let first =
            payload(&[&pairs(&[(1_000, 1), (1_000, 20), (1_000, 300), (1_000, 4_000)]), &[9; 30]]);
        assert_eq!(promoted(&first), Some(4_321));
        assert_eq!(promoted(&payload(&[&first, &pairs(&[(1_000, 50_000)])])), Some(54_321));
        assert_eq!(promoted(&first[..93]), None);
    }

    const NO_MESSAGE: Option<&mut BoundedText<1>> = None;

    #[test]
    fn an_exceptions_type_is_read_and_its_message_where_that_is_asked_for() {
        let rethrown = |flags: u16| {
            let bytes = payload(&[
                &[b'O', 0, b'h', 0, 0, 0],
                &[b's', 0, b'e', 0, b'c', 0, 0, 0],
                &[0; 12],
                &flags.to_le_bytes(),
                &[9, 0],
            ]);
            let (mut name, mut message) = (BoundedText::<16>::new(), BoundedText::<8>::new());
            let rethrown = thrown(&bytes, &mut name, NO_MESSAGE);
            assert_eq!(name.as_str(), "Oh");
            assert_eq!(thrown(&bytes, &mut BoundedText::<16>::new(), Some(&mut message)), rethrown);
            assert_eq!(message.as_str(), "sec");
            assert_eq!(
                thrown(&bytes[..bytes.len() - 4], &mut BoundedText::<16>::new(), NO_MESSAGE),
                None
            );
            rethrown
        };
        assert_eq!([0x10, 0x14].map(rethrown), [Some(ThrowKind::First), Some(ThrowKind::Again)]);
        let endless = payload(&[&[b'O', 0, b'h', 0, 0, 0], &[b's', 0].repeat(40_000)]);
        let of =
            |bytes: usize| thrown(&endless[..bytes], &mut BoundedText::<16>::new(), NO_MESSAGE);
        let mut message = BoundedText::<8>::new();
        let begun = thrown(
            &endless[..MOST_PAYLOAD as usize],
            &mut BoundedText::<16>::new(),
            Some(&mut message),
        );
        assert_eq!((begun, message.as_str()), (Some(ThrowKind::Cut), "ssssssss"));
        let most = MOST_PAYLOAD as usize;
        assert_eq!((of(most), of(most - 1), of(100)), (Some(ThrowKind::Cut), None, None));
    }

    #[test]
    fn a_lock_s_owner_and_a_wait_s_length_are_read() {
        let start = payload(&[&[0, 9, 0], &[1; 16], &4242u64.to_le_bytes()]);
        assert_eq!(
            (contention_start(&start), contention_start(&start[..3])),
            (Some(4242), Some(0))
        );
        let stop = |ns: f64| contention_stop(&payload(&[&[0, 9, 0], &ns.to_le_bytes()]));
        assert_eq!(
            [1_500.7, 0.0, -1.0, f64::NAN, f64::INFINITY].map(stop),
            [Some(1_500), Some(0), None, None, Some(u64::MAX)]
        );
        assert_eq!(contention_stop(&[0; 10]), None);
    }

    #[test]
    fn the_number_of_workers_and_why_it_changed_are_read() {
        let adjusted =
            payload(&[&7.5f64.to_le_bytes(), &12u32.to_le_bytes(), &6u32.to_le_bytes(), &[9, 0]]);
        assert_eq!(
            (pool_adjusted(&adjusted), pool_adjusted(&adjusted[..15])),
            (Some((12, 6)), None)
        );
        let text = |text: &str| {
            text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect::<Vec<_>>()
        };
        let told =
            payload(&[&text("queue"), &text("Queue Length"), &41.0f64.to_le_bytes(), &[0; 8]]);
        assert_eq!(
            (counter(&told, "queue"), counter(&told, "que"), counter(&told, "queues")),
            (Some(Some(41)), None, None)
        );
        let short = told.len() - 9;
        assert_eq!(
            (counter(&told[..short], "queue"), counter(&told[..9], "queue")),
            (Some(None), None)
        );
        let negative = payload(&[&text("queue"), &text(""), &(-1.0f64).to_le_bytes()]);
        assert_eq!(counter(&negative, "queue"), Some(None));
    }

    proptest! {
        #[test]
        fn any_payload_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), version: u32) {
            std::hint::black_box((tick(&bytes, version).is_some(), sampled(&bytes).is_some()));
            std::hint::black_box((promoted(&bytes), thrown(&bytes, &mut BoundedText::<8>::new(), Some(&mut BoundedText::<8>::new()))));
            std::hint::black_box((contention_start(&bytes), contention_stop(&bytes), pool_adjusted(&bytes)));
        }
    }
}
