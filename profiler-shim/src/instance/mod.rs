//! One attached profiler: everything it knows, so that two profilers of one process, even through
//! the same file, do not know each other: the library itself keeps but the clock's function
//! (`vdso.rs`) and, in exact mode, who takes in whom (`com/host.rs`). Lives in zeroed memory of
//! its own (`com/object.rs`).

mod ending;
mod session;
mod thread_names;
mod unload;

use crate::contention::Contentions;
use crate::downsampler::{Downsampler, RingShare};
use crate::gc::Gc;
use crate::live::{Live, SurveyResult};
use crate::region::Guard;
use crate::repeat::{LastAllocations, LastEvents};
use crate::runtime::info::{Info, InfoCell, Mask, Provider, ProviderCache};
use crate::syscall;
use crate::types::PendingTypes;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{
    FEATURE_ALLOCATION_SAMPLED, FEATURE_LIVE_OBJECTS, FEATURE_SEEN_TIMES, FEATURE_WAITS_AT_START,
    pack_runtime,
};
use profiler_protocol::load;
use profiler_protocol::producer::{InstanceIdentity, ProducerRegion};
use profiler_protocol::record::{Record, RecordBody};
use session::Session;
use thread_names::ThreadNames;
use unload::CodeUnloads;

/// What the service thread is to do; a futex word, changed by callbacks.
pub(crate) mod phase {
    /// Go about its work.
    pub(crate) const WORK: u32 = 0;
    /// The process ends: answer last questions, then say goodbye.
    pub(crate) const CLOSING: u32 = 1;
    /// Goodbye was said; nothing in the runtime may be called any more.
    pub(crate) const DONE: u32 = 2;
}

/// So much of the ring, in eighths, is in use when its reader is called.
const CALL_AT: u64 = 3;
/// Exceptions in a period that are all told of ([`crate::downsampler`]): with their stacks they
/// find room in the ring even when all come at once.
pub(crate) const EXCEPTIONS: u32 = 32;
/// Samples of allocations in a period that are all told of, unless told otherwise. One costs the
/// app some 4 µs and the daemon some 10, so no program pays more than some hundredths of a CPU for
/// them; in a window of a minute there are 15,000 and more.
const SAMPLES: u32 = 512;

/// An attached profiler. All but the first two fields start as zeroes.
pub(crate) struct Instance {
    pub(crate) region: ProducerRegion<'static>,
    pub(crate) guard: &'static Guard,
    runtime: RuntimeLink,
    session: Session,
    role: Role,
    pub(crate) service: ServiceSignals,
    pub(crate) allocations: AllocationSampling,
    pub(crate) exceptions: ExceptionSampling,
    pub(crate) contentions: ContentionSampling,
    pub(crate) gc: Gc,
    /// Workers of the thread pool as last told, plus one.
    pub(crate) workers: AtomicU64,
    pub(crate) live: Live,
    pub(crate) types: PendingTypes,
    pub(crate) code: CodeUnloads,
    thread_names: ThreadNames,
}

/// What is known of the runtime.
struct RuntimeLink {
    /// The newest ICorProfilerInfo it has.
    info: InfoCell,
    providers: ProviderCache,
    /// `FEATURE_` bits.
    features: AtomicU64,
    /// [`pack_runtime`].
    version: AtomicU64,
}

/// How the instance came here.
struct Role {
    /// 1 when it is a guest of exact mode (`com/host.rs`), which chooses the allocations to be told
    /// of, says which callbacks it wants, and never leaves.
    guest: AtomicU32,
    /// 1 when it was loaded by environment, and its recorder holds a lock while it lives.
    launched: AtomicU32,
}

/// What the service thread is told.
pub(crate) struct ServiceSignals {
    /// [`phase`].
    pub(crate) phase: AtomicU32,
    /// 1 when it has been woken because the ring fills.
    pub(crate) called: AtomicU32,
}

/// Which allocations are sampled.
pub(crate) struct AllocationSampling {
    /// The next sample's number.
    pub(crate) next_sample: AtomicU64,
    pub(crate) repeats: LastAllocations,
    /// How many samples come.
    pub(crate) sampled: Downsampler,
    /// How many large objects come. Apart from the samples, so that garbage does not cost them
    /// their exactness.
    pub(crate) large: Downsampler,
    /// Most of either in a period that are all told of, 0 for [`SAMPLES`].
    pub(crate) limit: AtomicU32,
}

/// Which exceptions are told of.
pub(crate) struct ExceptionSampling {
    pub(crate) repeats: LastEvents,
    /// How many are thrown.
    pub(crate) sampler: Downsampler,
}

/// Which waits for locks are told of.
pub(crate) struct ContentionSampling {
    pub(crate) repeats: LastEvents,
    pub(crate) open: Contentions,
}

impl Instance {
    /// False in a forked child and after goodbye: the region must not be touched.
    pub(crate) fn is_alive(&self) -> bool {
        self.guard.alive.load(Ordering::Acquire) != 0
    }

    /// True when somebody listens (then the instance is alive, too). Relaxed: going quiet need not
    /// be instant.
    pub(crate) fn is_listening(&self) -> bool {
        self.guard.listening.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn set_listening(&self, listening: bool) {
        self.guard.listening.store(u32::from(listening), Ordering::Relaxed);
    }

    pub(crate) fn region(&self) -> &ProducerRegion<'static> {
        &self.region
    }

    pub(crate) fn count(&self, counter: Counter) {
        self.region.count(counter, 1);
    }

    pub(crate) fn features(&self) -> u64 {
        self.runtime.features.load(Ordering::Relaxed)
    }

    /// It is a guest of exact mode.
    pub(crate) fn become_guest(&self) {
        self.role.guest.store(1, Ordering::Relaxed);
    }

    pub(crate) fn is_guest(&self) -> bool {
        self.role.guest.load(Ordering::Relaxed) != 0
    }

    /// Says which callbacks it wants, unless exact mode has said so.
    pub(crate) fn set_mask(&self, info: Info, mask: Mask) -> Result<(), i32> {
        if self.is_guest() { Ok(()) } else { info.set_mask(mask) }
    }

    /// Where the instance's random choices begin.
    pub(crate) fn seed(&self) -> u64 {
        self.live.seed()
    }

    /// Samples of allocations in a period that are all told of.
    pub(crate) fn samples_limit(&self) -> u32 {
        match self.allocations.limit.load(Ordering::Relaxed) {
            0 => SAMPLES,
            limit => limit,
        }
    }

    /// The runtime's interface; `None` before Initialize.
    pub(crate) fn info(&self) -> Option<Info> {
        self.runtime.info.get()
    }

    /// Writes a record now. False when the ring had no room (counted).
    pub(crate) fn send(&self, body: RecordBody<'_>) -> bool {
        let Some(mut grant) = self.region.try_reserve(body.record_bytes()) else { return false };
        Record { tid: syscall::thread_id(), time_ns: syscall::now_ns(), body }.encode(&mut grant);
        grant.commit();
        true
    }

    /// True when so much of the ring is in use that its reader is to be called: it comes by itself
    /// in time while no more than that is written between two rounds of its.
    pub(crate) fn is_ring_filling(&self) -> bool {
        self.region.used() >= self.region.geometry().units / 8 * CALL_AT
    }

    /// The level of an event of which so many are all told of in a period: by how many come, and by
    /// the room there is. Not inlined: the library's size has a bound.
    #[inline(never)]
    pub(crate) fn level(
        &self,
        sampler: &Downsampler,
        now_ns: u64,
        all: u32,
        room: RingShare,
    ) -> u8 {
        let region = self.region();
        sampler.level(now_ns, all).max(room.level(region.used(), region.geometry().units))
    }

    /// Has the service thread call the reader when the ring fills, which it may not see for a
    /// while.
    pub(crate) fn call_when_filling(&self) {
        // Relaxed, as where the service thread puts it back: a call too many or too few changes
        // only how soon the ring is read.
        if self.is_ring_filling() && self.service.called.swap(1, Ordering::Relaxed) == 0 {
            syscall::wake(&self.service.phase);
        }
    }

    /// Sets everything up but the thread: which runtime this is, the header, the events we want.
    ///
    /// # Errors
    /// The HRESULT that makes the runtime unload us quietly.
    pub(crate) fn set_up(&self, info: Info, owner: u64, attached: bool) -> Result<(), i32> {
        let (major, minor, build, clr) = info.runtime();
        let runtime = pack_runtime(major, minor, build, clr);
        let live = if info.has_handles() { FEATURE_LIVE_OBJECTS } else { 0 };
        let sampled = if major >= 10 { FEATURE_ALLOCATION_SAMPLED } else { 0 };
        self.live.set_seed(syscall::random());
        self.set_subscriptions(load::subscriptions(owner));
        let waits = !attached && self.subscriptions() & load::WITH_START_SESSION != 0;
        let waits = if waits { FEATURE_WAITS_AT_START } else { 0 };
        let features = live | sampled | waits | FEATURE_SEEN_TIMES;
        self.runtime.features.store(features, Ordering::Relaxed);
        self.runtime.version.store(runtime, Ordering::Relaxed);
        self.runtime.info.set(info);
        self.set_mask(info, Mask::OURS)?;
        self.role.launched.store(u32::from(!attached), Ordering::Relaxed);
        if attached {
            // Unloads before this went unseen.
            self.code.lifetimes.on_unload(syscall::now_ns());
        }
        self.region.publish(InstanceIdentity {
            instance: syscall::random(),
            pid: u64::from(syscall::process_id()),
            created_ns: syscall::now_ns(),
            runtime,
            features,
            owner,
            slots: self.live.slots_at(),
        });
        self.guard.alive.store(1, Ordering::Release);
        // The region's first record: whoever reads a later one knows that all samples before it are
        // nobody's any more.
        self.say_hello();
        Ok(())
    }

    /// Says who we are, before anything else. False when the ring had no room.
    pub(crate) fn say_hello(&self) -> bool {
        self.send(RecordBody::Hello { runtime: self.runtime.version.load(Ordering::Relaxed) })
    }

    /// True while there is an EventPipe session.
    pub(crate) fn has_session(&self) -> bool {
        self.session.id.load(Ordering::Relaxed) != 0
    }

    /// Which provider that is. Asked in the callback of its events.
    pub(crate) fn provider(&self, provider: usize) -> Provider {
        self.runtime.providers.kind(provider, &self.runtime.info)
    }

    /// A collection has started; `condemned` is the highest generation it collects.
    pub(crate) fn on_gc_started(&self, condemned: u8) {
        self.gc.started(condemned);
    }

    /// A collection has finished: look at the objects we watch.
    pub(crate) fn on_gc_finished(&self) {
        let finished = self.gc.finished();
        if !self.is_listening() {
            self.gc.survey_missed();
            return;
        }
        let Some(condemned) = finished else {
            self.count(Counter::SurveysSkipped);
            return;
        };
        let Some(info) = self.info().filter(|i| i.has_handles()) else { return };
        let watched = self.live.watched();
        let began_ns = syscall::thread_cpu_ns();
        let surveyed = self.live.survey(&info, condemned, &mut |found| self.tell_found(found));
        // CPU time: the set's size does not make the pause longer by what the kernel gives to
        // others meanwhile.
        let spent_ns = syscall::thread_cpu_ns().saturating_sub(began_ns);
        let Some(deferred) = surveyed else {
            self.count(Counter::SurveysSkipped);
            return self.gc.survey_missed();
        };
        self.count(Counter::Surveys);
        self.region.count(Counter::SurveyNs, spent_ns);
        // A look that is not over has not been a fast one.
        let looked_at = if deferred == 0 { condemned } else { 0 };
        if self.live.account(watched, spent_ns, looked_at) {
            self.count(Counter::LiveSetShrunk);
        }
        if deferred != 0 {
            self.region.count(Counter::SurveysDeferred, deferred);
            self.gc.survey_missed();
        }
    }

    /// Keeps the set of watched objects as large as it may be. Called by the service thread, every
    /// round.
    pub(crate) fn keep_live_set(&self, info: Info) {
        if info.has_handles() {
            self.live.keep(&info, &mut |found| self.tell_found(found));
        }
    }

    /// Sends what was found out about watched objects. False when the ring had no room.
    pub(crate) fn tell_found(&self, found: SurveyResult<'_>) -> bool {
        let (sent, gone) = match found {
            SurveyResult::Dead(samples) => {
                (self.send(RecordBody::ObjectsDead(samples)), Some((Counter::ObjectsDead, samples)))
            }
            SurveyResult::Alive(samples) => (self.send(RecordBody::ObjectsAlive(samples)), None),
            SurveyResult::Dropped { level, samples } => {
                let sent = self.send(RecordBody::ObjectsDropped { level, samples });
                (sent, Some((Counter::ObjectsDownsampled, samples)))
            }
        };
        if let Some((counter, samples)) = gone.filter(|_| sent) {
            self.region.count(counter, samples.iter().count() as u64);
        }
        sent
    }
}
