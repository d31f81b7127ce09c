//! One attached profiler: everything it knows, so that two profilers of one process, even through
//! the same file, do not know each other: the library itself keeps but the clock's function
//! (`vdso.rs`) and, in exact mode, who takes in whom (`com/exact.rs`). Lives in zeroed memory of
//! its own (`com/object.rs`).

use crate::code::CodeLifetimes;
use crate::com::info::{Info, Mask, Provider};
use crate::contention::Contentions;
use crate::downsampler::{Downsampler, RingShare};
use crate::gate::{EVERYTHING, Gate, UnloadOutcome};
use crate::gc::Gc;
use crate::live::{Live, SurveyResult};
use crate::method;
use crate::recorder;
use crate::region::Guard;
use crate::repeat::{LastAllocations, LastEvents};
use crate::syscall;
use crate::text::BoundedText;
use crate::types::PendingTypes;
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{
    FEATURE_ALLOCATION_SAMPLED, FEATURE_LIVE_OBJECTS, FEATURE_SEEN_TIMES, FEATURE_WAITS_AT_START,
    InstanceState, pack_runtime,
};
use profiler_protocol::load::{
    self, WITH_THREAD_POOL, WITHOUT_ALLOCATIONS, WITHOUT_CONTENTION, WITHOUT_EXCEPTIONS,
    WITHOUT_LIVE_OBJECTS,
};
use profiler_protocol::producer::{InstanceIdentity, ProducerRegion};
use profiler_protocol::record::{Record, RecordBody, WordList};

/// What the service thread is to do; a futex word, changed by callbacks.
pub mod phase {
    /// Go about its work.
    pub const WORK: u32 = 0;
    /// The process ends: answer last questions, then say goodbye.
    pub const CLOSING: u32 = 1;
    /// Goodbye was said; nothing in the runtime may be called any more.
    pub const DONE: u32 = 2;
}

/// How long the end of a process may be held up for last questions, and the pause between two
/// looks.
const FAREWELL_NS: u64 = 45_000_000;
const LOOK_NS: u64 = 500_000;
/// Who ends so soon is all new to a recorder, which has to read the files of its code before it can
/// ask: without names it would have been recorded for nothing.
const SHORT_LIFE_NS: u64 = 2_000_000_000;
const FAREWELL_OF_SHORT_LIFE_NS: u64 = 400_000_000;
/// The callback waits a little longer than the thread that answers.
const GRACE_NS: u64 = 5_000_000;
/// So much of the ring, in eighths, is in use when its reader is called.
const CALL_AT: u64 = 3;
/// Exceptions in a period that are all told of (`thin`): with their stacks they find room in the
/// ring even when all come at once.
pub(crate) const EXCEPTIONS: u32 = 32;
/// Samples of allocations in a period that are all told of, unless told otherwise. One costs the
/// app some 4 µs and the daemon some 10, so no program pays more than some hundredths of a CPU for
/// them; in a window of a minute there are 15,000 and more.
const SAMPLES: u32 = 512;
/// Threads that were named before they had an OS id, and the bytes of a name that are kept.
const PENDING_NAMES: usize = 64;
const NAME_BYTES: usize = 120;

/// EventPipe keywords: gc, contention, exceptions, threading; allocation sampling (.NET 10).
const KEYWORD_GC: u64 = 1;
const KEYWORD_CONTENTION: u64 = 0x4000;
const KEYWORD_EXCEPTION: u64 = 0x8000;
const KEYWORD_THREADING: u64 = 0x1_0000;
const KEYWORD_ALLOCATION_SAMPLED: u64 = 0x800_0000_0000;

/// An attached profiler. All but the first two fields start as zeroes.
pub struct Instance {
    pub(crate) region: ProducerRegion<'static>,
    pub(crate) guard: &'static Guard,
    /// Address of the newest ICorProfilerInfo the runtime has, and its number; set once, before
    /// anything uses them.
    pub(crate) info: AtomicUsize,
    pub(crate) info_level: AtomicU32,
    pub(crate) features: AtomicU64,
    pub(crate) runtime: AtomicU64,
    /// What the recorder wishes to hear (`profiler_protocol::load`).
    wishes: AtomicU64,
    /// 1 when it is a guest of exact mode (`com/exact.rs`), which chooses the allocations to be
    /// told of, says which callbacks it wants, and never leaves.
    guest: AtomicU32,
    /// 1 when it was loaded by environment, and its recorder holds a lock while it lives.
    launched: AtomicU32,
    /// 1 while the runtime tells of each large object by itself.
    told_of_large: AtomicU32,
    /// EventPipe session, 0 for none. Changed by Initialize, and then by the service thread and
    /// those it waits for.
    pub(crate) session: AtomicU64,
    pub(crate) phase: AtomicU32,
    /// Provider handles, once told apart: the runtime's, and the last other one.
    runtime_provider: AtomicUsize,
    counters_provider: AtomicUsize,
    other_provider: AtomicUsize,
    /// The next sample's number.
    pub(crate) samples: AtomicU64,
    pub(crate) allocations: LastAllocations,
    pub(crate) gc: Gc,
    pub(crate) throws: LastEvents,
    /// The same of waits for locks.
    pub(crate) waits: LastEvents,
    /// How many exceptions are thrown.
    pub(crate) thrown: Downsampler,
    /// How many samples of allocations come.
    pub(crate) sampled: Downsampler,
    /// How many large objects come. Apart from the samples, so that garbage does not cost them
    /// their exactness.
    pub(crate) large: Downsampler,
    /// Most of either in a period that are all told of, 0 for [`SAMPLES`].
    pub(crate) samples_limit: AtomicU32,
    pub(crate) contentions: Contentions,
    /// Workers of the thread pool as last told, plus one.
    pub(crate) workers: AtomicU64,
    pub(crate) live: Live,
    pub(crate) types: PendingTypes,
    pub(crate) gate: Gate,
    pub(crate) code: CodeLifetimes,
    /// 1 when the daemon could not be told that code went away: it is to forget all.
    pub(crate) code_untold: AtomicU32,
    /// 1 when the service thread has been woken because the ring fills.
    pub(crate) called: AtomicU32,
    pending_names: [PendingName; PENDING_NAMES],
}

/// A managed thread's name that came before its OS id. `thread` is claimed first, `bytes` are words
/// of UTF-8.
struct PendingName {
    thread: AtomicUsize,
    words: [AtomicU64; NAME_BYTES / 8],
}

impl Instance {
    /// False in a forked child and after goodbye: the region must not be touched.
    pub fn is_alive(&self) -> bool {
        self.guard.alive.load(Ordering::Acquire) != 0
    }

    /// True when somebody listens (then the instance is alive, too). Relaxed: going quiet need not
    /// be instant.
    pub fn is_listening(&self) -> bool {
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
        self.features.load(Ordering::Relaxed)
    }

    /// What the session is for.
    pub(crate) fn wishes(&self) -> u64 {
        self.wishes.load(Ordering::Relaxed)
    }

    /// The next session is for this.
    pub(crate) fn set_wishes(&self, wishes: u64) {
        self.wishes.store(wishes, Ordering::Relaxed);
    }

    /// True when objects are to be watched.
    pub(crate) fn watches(&self) -> bool {
        self.wishes() & (WITHOUT_ALLOCATIONS | WITHOUT_LIVE_OBJECTS) == 0
    }

    /// It is a guest of exact mode.
    pub fn become_guest(&self) {
        self.guest.store(1, Ordering::Relaxed);
    }

    pub(crate) fn is_guest(&self) -> bool {
        self.guest.load(Ordering::Relaxed) != 0
    }

    /// True while the runtime tells of each large object by itself; then events about such objects
    /// say nothing new.
    pub fn is_told_of_large(&self) -> bool {
        self.told_of_large.load(Ordering::Relaxed) != 0
    }

    /// Has the runtime tell of each large object by itself, or not any more. Where it refuses, they
    /// are sampled like others.
    fn ask_for_large(&self, info: Info, wanted: bool) {
        // First, so that an object whose event comes just before it is asked is not told of twice.
        self.told_of_large.store(u32::from(wanted), Ordering::Relaxed);
        let mask = if wanted { Mask::OURS_AND_LARGE } else { Mask::OURS };
        if self.set_mask(info, mask).is_err() {
            self.told_of_large.store(0, Ordering::Relaxed);
            self.count(Counter::RuntimeRefusals);
        }
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
        match self.samples_limit.load(Ordering::Relaxed) {
            0 => SAMPLES,
            limit => limit,
        }
    }

    /// The runtime's interface; `None` before Initialize.
    pub fn info(&self) -> Option<Info> {
        Info::from_address(
            self.info.load(Ordering::Acquire),
            self.info_level.load(Ordering::Relaxed),
        )
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
    pub(crate) fn level(&self, thin: &Downsampler, now_ns: u64, all: u32, room: RingShare) -> u8 {
        let region = self.region();
        thin.level(now_ns, all).max(room.level(region.used(), region.geometry().units))
    }

    /// Has the service thread call the reader when the ring fills, which it may not see for a
    /// while.
    pub(crate) fn call_when_filling(&self) {
        // Relaxed, as where the service thread puts it back: a call too many or too few changes
        // only how soon the ring is read.
        if self.is_ring_filling() && self.called.swap(1, Ordering::Relaxed) == 0 {
            syscall::wake(&self.phase);
        }
    }

    /// Sets everything up but the thread: which runtime this is, the header, the events we want.
    ///
    /// # Errors
    /// The HRESULT that makes the runtime unload us quietly.
    pub fn set_up(&self, info: Info, owner: u64, attached: bool) -> Result<(), i32> {
        let (major, minor, build, clr) = info.runtime();
        let runtime = pack_runtime(major, minor, build, clr);
        let live = if info.has_handles() { FEATURE_LIVE_OBJECTS } else { 0 };
        let sampled = if major >= 10 { FEATURE_ALLOCATION_SAMPLED } else { 0 };
        self.live.set_seed(syscall::random());
        self.set_wishes(load::wishes(owner));
        let waits = !attached && self.wishes() & load::WITH_START_SESSION != 0;
        let waits = if waits { FEATURE_WAITS_AT_START } else { 0 };
        let features = live | sampled | waits | FEATURE_SEEN_TIMES;
        self.features.store(features, Ordering::Relaxed);
        self.runtime.store(runtime, Ordering::Relaxed);
        self.info_level.store(info.level(), Ordering::Relaxed);
        // Release: pairs with the acquire in `info`; the level is set before.
        self.info.store(info.address(), Ordering::Release);
        self.set_mask(info, Mask::OURS)?;
        self.launched.store(u32::from(!attached), Ordering::Relaxed);
        if attached {
            // Unloads before this went unseen.
            self.code.on_unload(syscall::now_ns());
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
        self.send(RecordBody::Hello { runtime: self.runtime.load(Ordering::Relaxed) })
    }

    /// Nothing works without the service thread: takes back what was asked of the runtime.
    pub fn give_up(&self, info: Info) {
        self.set_listening(false);
        self.stop_session(info);
        if self.set_mask(info, Mask::NONE).is_err() {
            self.count(Counter::RuntimeRefusals);
        }
        // Callbacks that began before may still make handles.
        syscall::sleep_ns(LOOK_NS * 10);
        self.live.release_all(&info);
    }

    /// An attach that got no service thread detaches at once; the runtime does so when this
    /// callback has returned.
    pub fn leave_without_thread(&self) {
        let Some(info) = self.info() else { return };
        self.give_up(info);
        self.send(RecordBody::Bye);
        self.region.set_state(InstanceState::Gone);
        if info.request_detach(1).is_err() {
            self.count(Counter::RuntimeRefusals);
        }
    }

    /// Starts the EventPipe session. The runtime may run managed code and deliver events on this
    /// thread before it returns, so everything else is ready by now. .NET 10's ticks are never
    /// asked for: any session that uses the newer event ends them.
    pub fn start_session(&self, info: Info) {
        let sampled = self.features() & FEATURE_ALLOCATION_SAMPLED != 0;
        let wishes = self.wishes();
        let unless = |without, keyword| if wishes & without == 0 { keyword } else { 0 };
        let keywords = KEYWORD_GC
            | unless(WITHOUT_CONTENTION, KEYWORD_CONTENTION)
            | unless(WITHOUT_EXCEPTIONS, KEYWORD_EXCEPTION)
            | if wishes & WITH_THREAD_POOL == 0 { 0 } else { KEYWORD_THREADING };
        let (keywords, level) = match () {
            () if self.is_guest() || wishes & WITHOUT_ALLOCATIONS != 0 => (keywords, 4),
            () if sampled => (keywords | KEYWORD_ALLOCATION_SAMPLED, 4),
            () => (keywords, 5),
        };
        // Before the session: of its events those of large objects are passed over from the first
        // on.
        let large = !self.is_guest() && wishes & WITHOUT_ALLOCATIONS == 0;
        self.ask_for_large(info, large);
        match info.start_session(keywords, level, wishes & WITH_THREAD_POOL != 0) {
            Ok(session) => {
                self.session.store(session, Ordering::Relaxed);
                self.count(Counter::SessionsStarted);
            }
            Err(_) => {
                self.ask_for_large(info, false);
                self.count(Counter::SessionsRefused);
            }
        }
    }

    /// Ends the session, if there is one.
    pub fn stop_session(&self, info: Info) {
        let session = self.session.load(Ordering::Relaxed);
        if session == 0 {
            return;
        }
        match info.stop_session(session) {
            Ok(()) => self.session.store(0, Ordering::Relaxed),
            // Its number is kept: the service thread tries again.
            Err(_) => self.count(Counter::RuntimeRefusals),
        }
        self.ask_for_large(info, false);
    }

    /// Which provider that is. Asked once per provider, in the callback, where the runtime answers
    /// it.
    pub fn provider(&self, provider: usize) -> Provider {
        let known = [
            (&self.runtime_provider, Provider::Runtime),
            (&self.counters_provider, Provider::Counters),
            (&self.other_provider, Provider::Other),
        ];
        // Relaxed: each word is a fact by itself.
        if let Some((_, of)) =
            known.iter().find(|(known, _)| known.load(Ordering::Relaxed) == provider)
        {
            return *of;
        }
        let Some(of) = self.info().and_then(|info| info.provider(provider)) else {
            return Provider::Other;
        };
        for (word, _) in known.iter().filter(|(_, kind)| *kind == of) {
            word.store(provider, Ordering::Relaxed);
        }
        of
    }

    /// A collection has started; `condemned` is the highest generation it collects.
    pub fn on_gc_started(&self, condemned: u8) {
        self.gc.started(condemned);
    }

    /// A collection has finished: look at the objects we watch.
    pub fn on_gc_finished(&self) {
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
    pub fn keep_live_set(&self, info: Info) {
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
                (sent, Some((Counter::ObjectsThinned, samples)))
            }
        };
        if let Some((counter, samples)) = gone.filter(|_| sent) {
            self.region.count(counter, samples.iter().count() as u64);
        }
        sent
    }

    /// A module goes away: no look-up may be under way, and the daemon forgets its code.
    pub fn on_module_unload(&self, module_id: usize) {
        self.count_met(self.gate.unload_module(module_id));
        self.code.on_unload(syscall::now_ns());
        self.types.forget();
        self.tell_unloaded(module_id as u64, &[]);
    }

    /// It has gone.
    pub fn on_module_unloaded(&self, module_id: usize) {
        self.code.on_unload(syscall::now_ns());
        self.gate.module_unloaded(module_id);
    }

    fn tell_unloaded(&self, module_id: u64, ranges: &[u8]) {
        let told = self.is_listening()
            && self.send(RecordBody::CodeUnloaded { module_id, ranges: WordList::new(ranges) });
        if !told {
            // Release: pairs with the swap in `tell_untold`.
            self.code_untold.store(1, Ordering::Release);
        }
    }

    /// Makes up for records about unloaded code that were not sent: the daemon is to forget all
    /// code.
    pub(crate) fn tell_untold(&self) {
        if self.code_untold.swap(0, Ordering::AcqRel) != 0 {
            self.tell_unloaded(0, &EVERYTHING);
        }
    }

    fn count_met(&self, met: UnloadOutcome) {
        match met {
            UnloadOutcome::Nothing => {}
            UnloadOutcome::Waited => self.count(Counter::UnloadsWaited),
            UnloadOutcome::Overran => self.count(Counter::UnloadsOverran),
        }
    }

    /// A dynamic method goes away, and with it its code; the address is used again.
    pub fn on_dynamic_method_unloaded(&self, function: usize) {
        let mut bytes = [0u8; 256];
        let code = self.info().map_or(&[][..], |info| method::code_of(info, function, &mut bytes));
        let tell = || {
            if code.is_empty() {
                self.count(Counter::UnloadsUnknown);
            } else {
                self.tell_unloaded(0, code);
            }
        };
        let met =
            self.gate.unload_dynamic(WordList::new(code), tell, |at_ns| self.code.on_unload(at_ns));
        self.count_met(met);
    }

    /// A managed thread runs on this OS thread.
    pub fn on_thread_assigned(&self, thread: usize, os_thread: u32) {
        let (mut name, mut len) = ([0u8; NAME_BYTES], 0usize);
        for pending in &self.pending_names {
            if pending.thread.load(Ordering::Acquire) == thread {
                let bytes = pending
                    .words
                    .iter()
                    .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
                for (to, byte) in name.iter_mut().zip(bytes.take_while(|byte| *byte != 0)) {
                    *to = byte;
                    len = len.wrapping_add(1);
                }
                pending.thread.store(0, Ordering::Release);
                break;
            }
        }
        if self.is_listening() {
            let name =
                name.get(..len).and_then(|name| core::str::from_utf8(name).ok()).unwrap_or("");
            self.send(RecordBody::ThreadName { os_tid: os_thread, name });
        }
    }

    /// A managed thread has a name. When it does not run yet, the name is kept until it does.
    pub fn on_thread_named(&self, thread: usize, name: &[u16]) {
        let os_thread = self.info().and_then(|info| info.os_thread(thread)).unwrap_or(0);
        let mut text = BoundedText::<NAME_BYTES>::new();
        text.push_utf16(name);
        if os_thread != 0 {
            if self.is_listening() {
                self.send(RecordBody::ThreadName { os_tid: os_thread, name: text.as_str() });
            }
            return;
        }
        // A thread is named by one thread at a time, so an earlier name of its is not in use.
        self.on_thread_destroyed(thread);
        let free = self.pending_names.iter().find(|p| {
            p.thread.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let Some(pending) = free else { return self.count(Counter::NamesCut) };
        let mut told = text.as_str().bytes();
        for word in &pending.words {
            let mut bytes = [0u8; 8];
            for (byte, of_name) in bytes.iter_mut().zip(&mut told) {
                *byte = of_name;
            }
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        // Release: pairs with the acquire in `on_thread_assigned`.
        pending.thread.store(thread, Ordering::Release);
    }

    /// A managed thread is no more: had it a name and never ran, the name goes.
    pub fn on_thread_destroyed(&self, thread: usize) {
        for pending in &self.pending_names {
            pending.thread.compare_exchange(thread, 0, Ordering::AcqRel, Ordering::Relaxed).ok();
        }
    }

    /// Another recorder listens, of whose lock nothing is known.
    pub(crate) fn is_taken_over(&self) {
        self.launched.store(0, Ordering::Relaxed);
    }

    /// False when it is known that its recorder is gone.
    pub(crate) fn may_be_heard(&self) -> bool {
        self.launched.load(Ordering::Relaxed) == 0 || self.info().is_some_and(recorder::lives)
    }

    /// How long last questions are waited for from now on.
    pub(crate) fn farewell_ns(&self) -> u64 {
        let lived_ns = syscall::now_ns().saturating_sub(self.region().created_ns());
        if lived_ns < SHORT_LIFE_NS { FAREWELL_OF_SHORT_LIFE_NS } else { FAREWELL_NS }
    }

    /// The process ends. Holds it up only when somebody listens, and no longer than
    /// [`Instance::farewell_ns`]; afterwards the service thread calls the runtime no more.
    pub fn on_shutdown(&self) {
        let next =
            if self.is_listening() && self.may_be_heard() { phase::CLOSING } else { phase::DONE };
        if self
            .phase
            .compare_exchange(phase::WORK, next, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        if next == phase::CLOSING {
            self.region.set_state(InstanceState::Closing);
            syscall::wake(&self.phase);
            let patience_ns = self.farewell_ns().saturating_add(GRACE_NS);
            let until = syscall::now_ns().saturating_add(patience_ns);
            // A seccomp filter may deny the clock: then the number of looks ends it.
            for _ in 0..patience_ns / LOOK_NS {
                if self.phase.load(Ordering::Acquire) != phase::CLOSING
                    || syscall::now_ns() >= until
                {
                    break;
                }
                syscall::sleep_ns(LOOK_NS);
            }
        }
        // Whoever comes first says goodbye.
        if self.phase.swap(phase::DONE, Ordering::AcqRel) != phase::DONE && next == phase::CLOSING {
            self.set_listening(false);
            self.send(RecordBody::Bye);
        }
        syscall::wake(&self.phase);
        self.region.set_state(InstanceState::Gone);
        self.guard.alive.store(0, Ordering::Release);
    }

    /// Tells the OS ids of the managed threads there are, and where the runtime has them: after an
    /// attach, before any event is asked for.
    pub fn list_threads(&self) {
        let Some(info) = self.info() else { return };
        info.each_thread(|thread| {
            if let Some(os_tid) = info.os_thread(thread) {
                self.send(RecordBody::ThreadAt { os_tid, address: thread as u64 });
            }
        });
    }

    /// The runtime lets go of us: no callback is under way any more, and none will come.
    pub fn on_detached(&self) {
        self.set_listening(false);
        self.region.set_state(InstanceState::Gone);
        self.guard.alive.store(0, Ordering::Release);
        // Exact mode's interface is exact mode's.
        if let Some(info) = self.info().filter(|_| !self.is_guest()) {
            info.release();
        }
    }
}
