//! What runs on the app's threads: events of the runtime's provider become records, and so do large
//! objects. Nothing here waits or allocates, and no event looks at its object, which may be none
//! yet.

use crate::contention::{CONTENTIONS, level_for};
use crate::downsampler::RingShare;
use crate::instance::{EXCEPTIONS, Instance};
use crate::live::WatchOutcome;
use crate::machine::thread_block;
use crate::payload::{
    AllocationEvent, Payload, ThrowKind, contention_start, contention_stop, counter, pool_adjusted,
    promoted, sampled, thrown, tick,
};
use crate::repeat::mix;
use crate::runtime::heap::{Handles as _, RuntimeHeap as _};
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

/// Bytes of an exception's type name that are told, and of its message.
const TYPE_NAME_BYTES: usize = 512;
const MESSAGE_BYTES: usize = 512;

/// Of a heap, as events and records have it.
const LARGE: u8 = 1;
/// The large objects' generation, as the profiling interface has it (COR_PRF_GC_LARGE_OBJECT_HEAP).
const LARGE_GENERATION: u8 = 3;

/// The level of a sample that stands for `bytes` where others are chosen at `level`: its chance is
/// at least its share, so that large objects are known as well as many small ones.
fn level_of_sample(level: u8, bytes: u64) -> u8 {
    let larger = (bytes / SAMPLING_BYTES).checked_ilog2().and_then(|bits| u8::try_from(bits).ok());
    level.saturating_sub(larger.unwrap_or(0))
}

impl Instance {
    /// An event of the runtime's provider. `registers` were captured in a frame that lives until
    /// this returns.
    pub(crate) fn on_event(&self, id: u32, version: u32, payload: &[u8], registers: &Registers) {
        let sampled_mode = self.features() & FEATURE_ALLOCATION_SAMPLED != 0;
        let is_subscribed = |what| self.subscriptions() & what != 0;
        let known = match id {
            // Another session's, if such are delivered.
            80 if is_subscribed(WITHOUT_EXCEPTIONS) => return,
            81 | 91 if is_subscribed(WITHOUT_CONTENTION) => return,
            55 if is_subscribed(WITH_THREAD_POOL) => self.on_pool_adjusted(payload),
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
    pub(crate) fn on_chosen(
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
    pub(crate) fn on_allocated(&self, type_id: u64, object: usize, registers: &Registers) {
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
        if self.allocations.repeats.is_repeat(thread_block(), event.address, self.gc.count()) {
            self.count(Counter::AllocationRepeats);
            return;
        }
        self.count(Counter::AllocationSamples);
        // The two draw from different sequences: an estimate of both has the variance of
        // independent ones.
        let (sampler, seed, room) = match event.exact {
            // Each is told of, as long as it finds room.
            true => (&self.allocations.large, !self.seed(), RingShare::Last),
            false => (&self.allocations.sampled, self.seed(), RingShare::Usual),
        };
        if event.exact {
            self.count(Counter::LargeObjects);
        }
        let level = self.level(sampler, began_ns, self.samples_limit(), room);
        let level = level_of_sample(level, event.size.max(event.amount));
        if !sampler.chosen(level, seed) {
            self.count(Counter::AllocationsDownsampled);
            if event.exact {
                self.count(Counter::LargeObjectsDownsampled);
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
        let sample = self.allocations.next_sample.fetch_add(1, Ordering::Relaxed);
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
        let asked = self.subscriptions() & WITH_EXCEPTION_MESSAGES != 0;
        let thrown = thrown(payload, &mut type_name, asked.then_some(&mut message))?;
        let mut name = mix(registers.sp ^ u64::from(thread) << 32);
        for bytes in payload.chunks(8) {
            let word = bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            name = mix(name ^ word);
        }
        if self.exceptions.repeats.is_repeat(thread, name, began_ns) {
            self.count(Counter::RuntimeRepeats);
        } else {
            self.count(Counter::Exceptions);
            if thrown == ThrowKind::Cut {
                self.count(Counter::MessagesCut);
            }
            let rethrown = thrown == ThrowKind::Again;
            let level =
                self.level(&self.exceptions.sampler, began_ns, EXCEPTIONS, RingShare::Usual);
            if self.exceptions.sampler.chosen(level, self.seed()) {
                let message = asked.then_some(message.as_str());
                let at = StackHead { level, registers: *registers, ..StackHead::default() };
                let head = ExceptionHead { at, rethrown, type_name: type_name.as_str(), message };
                self.tell_exception((began_ns, thread), head);
            } else {
                self.count(Counter::ExceptionsDownsampled);
            }
        }
        self.exceptions.repeats.done(thread, syscall::now_ns());
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
        self.contentions.open.begins(syscall::thread_id(), owner);
        Some(())
    }

    fn on_contention_stop(&self, payload: &[u8], registers: &Registers) -> Option<()> {
        let waited_ns = contention_stop(payload)?;
        let now_ns = syscall::now_ns();
        let thread = syscall::thread_id();
        if self.contentions.repeats.is_repeat(thread, waited_ns, now_ns) {
            self.count(Counter::RuntimeRepeats);
        } else {
            self.count(Counter::Contentions);
            // One that began before anybody listened has its stack and its length all the same.
            let owner = self.contentions.open.ends(thread).unwrap_or_else(|| {
                self.count(Counter::ContentionsUnmatched);
                0
            });
            let level =
                self.level(&self.contentions.open.sampler, now_ns, CONTENTIONS, RingShare::Usual);
            let level = level_for(level, waited_ns);
            if self.contentions.open.sampler.chosen(level, self.seed()) {
                let at = StackHead { level, registers: *registers, ..StackHead::default() };
                self.tell_contention((now_ns, thread), ContentionHead { at, waited_ns, owner });
            } else {
                self.count(Counter::ContentionsDownsampled);
            }
        }
        self.contentions.repeats.done(thread, syscall::now_ns());
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
    pub(crate) fn on_counter(&self, payload: &[u8]) {
        // Items in the queues of the thread pool (`ThreadPool.PendingWorkItemCount`).
        match counter(payload, "threadpool-queue-length") {
            Some(Some(items)) if self.subscriptions() & WITH_THREAD_POOL != 0 => {
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
                WatchOutcome::Downsampled => (0, Counter::ObjectsDownsampled),
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
