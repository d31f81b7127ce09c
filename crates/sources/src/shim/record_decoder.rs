//! The records of one region become events. Thread ids and times are translated to the initial
//! namespaces, and only answers to questions are accepted.

use super::counters::ReaderTotals;
use super::lock_owners::{self, LockOwners, ThreadLists};
use super::names::NameRequests;
use super::namespace::{ClockOffset, NamespaceThreads};
use super::type_names::RegionTypeNames;
use crate::shim::Subscriptions;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::event::{
    Allocation, AllocationKind, Contention, Event, EventKind, Exception, HeapKind, IlMap,
    IlMapEntry, MethodBody, MonotonicNs, RegionId, RuntimeSample, ShimEvent, UserContext, UserRegs,
};
use perfusion_unwind::native::NATIVE;
use profiler_protocol::layout::unpack_runtime;
use profiler_protocol::record::{AllocationHead, Record, RecordBody, Registers, StackHead};

/// Characters of a thread's name that are kept.
const THREAD_NAME_CHARS: usize = 128;
/// Characters of an exception's type that are kept.
const TYPE_NAME_CHARS: usize = 256;
/// The same of what an exception says.
const MESSAGE_CHARS: usize = 200;
/// Events may wait in the ring while the daemon is busy, but not longer than this.
const OLDEST_NS: u64 = 60_000_000_000;

/// What turns the records of one region into events, with what must be known between two records.
pub(super) struct RecordDecoder {
    id: RegionId,
    types: RegionTypeNames,
    pub(super) offset: ClockOffset,
    /// Records from before this are of an earlier recorder's time.
    not_before_ns: u64,
    said_bye: bool,
    /// Whether records of exceptions, of contentions were left out since that was last asked.
    not_covered: [bool; 2],
    /// The shim watches objects.
    watches: bool,
    /// The runtime's major version, once its shim has told.
    version: Option<u16>,
}

/// What a record is decoded with: its process, and what this recorder keeps of it.
pub(super) struct RecordContext<'a> {
    pub(super) target: &'a ProcessHandle,
    pub(super) threads: &'a mut NamespaceThreads,
    pub(super) names: &'a mut NameRequests,
    pub(super) owners: &'a mut LockOwners,
    /// Tell who owns locks.
    pub(super) lists: Option<&'a dyn ThreadLists>,
    pub(super) now: MonotonicNs,
    /// What is subscribed to here, where that differs from elsewhere.
    pub(super) subscriptions: Option<Subscriptions>,
    pub(super) totals: &'a mut ReaderTotals,
}

impl RecordDecoder {
    /// For a region in which nothing before `not_before_ns` is for this recorder.
    pub(super) fn new(
        id: RegionId,
        types: RegionTypeNames,
        offset: ClockOffset,
        not_before_ns: u64,
        watches: bool,
    ) -> Self {
        Self {
            id,
            types,
            offset,
            not_before_ns,
            said_bye: false,
            not_covered: [false; 2],
            watches,
            version: None,
        }
    }

    /// Whether all records of exceptions, of contentions were taken since that was last asked.
    pub(super) fn take_covered(&mut self) -> [bool; 2] {
        std::mem::take(&mut self.not_covered).map(|not_covered| !not_covered)
    }

    /// True once the region's last event is out; it counts as out from now on.
    pub(super) fn says_bye(&mut self) -> bool {
        std::mem::replace(&mut self.said_bye, true)
    }

    /// Hands the event of a record to `sink`.
    pub(super) fn record(
        &mut self,
        record: &Record<'_>,
        context: &mut RecordContext<'_>,
        sink: &mut dyn FnMut(Event),
    ) {
        let subscriptions = context.subscriptions;
        let is_left_out =
            |is_on: fn(Subscriptions) -> bool| subscriptions.is_some_and(|all| !is_on(all));
        let (target, now) = (context.target, context.now);
        let (threads, names) = (&mut *context.threads, &mut *context.names);
        let totals = &mut *context.totals;
        let told = record.time_ns.wrapping_sub(self.offset.ns.cast_unsigned());
        let time = plausible(told, now.0, || MonotonicNs::now().0);
        // Clocks of two CPUs may differ by a little.
        totals.times_corrected +=
            u64::from(time != told && told.wrapping_sub(now.0) > 1_000_000_000);
        let mut thread = |tid: u32| {
            let outer = threads.outer(target, tid);
            totals.threads_unknown += u64::from(outer.is_none());
            outer.unwrap_or(0)
        };
        let event = match record.body {
            _ if told < self.not_before_ns && !matches!(record.body, RecordBody::Bye) => {
                totals.records_stale += 1;
                return;
            }
            RecordBody::Skip => return,
            RecordBody::Allocation(..) if is_left_out(|all| all.allocations) => {
                return totals.records_left_out += 1;
            }
            RecordBody::Exception(..) if is_left_out(|all| all.exceptions) => {
                self.not_covered[0] = true;
                return totals.records_left_out += 1;
            }
            RecordBody::Contention(..) if is_left_out(|all| all.contention) => {
                self.not_covered[1] = true;
                return totals.records_left_out += 1;
            }
            RecordBody::Hello { runtime } => {
                let (major, minor, build, _) = unpack_runtime(runtime);
                self.version = Some(major).filter(|&major| major != 0);
                if major >= lock_owners::FIRST_VERSION {
                    context.owners.expect();
                }
                ShimEvent::Hello { runtime: (major, minor, build), watches: self.watches }
            }
            RecordBody::Allocation(head, stack) => {
                let mut allocation = allocation(&head, stack, thread(record.tid));
                allocation.seen = MonotonicNs(told.min(time));
                if is_left_out(|all| all.live_objects) {
                    allocation.watched = None;
                }
                ShimEvent::Allocation(Box::new(allocation))
            }
            RecordBody::TypeName { type_id, module_id, name, module } => {
                if !self.types.take(type_id, name.len() + module.len()) {
                    totals.types_refused += 1;
                    return;
                }
                let (name, module) = (name.to_owned(), module.to_owned());
                ShimEvent::TypeName { type_id, module_id, name, module }
            }
            RecordBody::Method {
                asked,
                module_id,
                token,
                dynamic,
                ranges,
                name,
                module,
                il_map,
            } => {
                let ranges: Vec<(u64, u32)> = ranges
                    .pairs()
                    .filter(|&(start, bytes)| bytes > 0 && start.checked_add(bytes).is_some())
                    .map(|(start, bytes)| (start, u32::try_from(bytes).unwrap_or(u32::MAX)))
                    .collect();
                if !names.found(asked, module_id, &ranges) {
                    totals.names_unasked += 1;
                    return;
                }
                let (name, module) = (name.to_owned(), module.to_owned());
                let entry = |[il, start, end]: [u32; 3]| IlMapEntry { il, start, end };
                let il_map = il_map.map(|map| {
                    let entries = map.iter().map(entry).collect();
                    Box::new(IlMap { module_base: map.base, entries })
                });
                ShimEvent::Method(Box::new(MethodBody {
                    asked,
                    module_id,
                    token,
                    dynamic,
                    name,
                    module,
                    ranges,
                    il_map,
                }))
            }
            RecordBody::NoMethod { asked, hresult } => match names.not_found(asked, hresult) {
                Some(sent_ns) => {
                    ShimEvent::NoMethod { asked, hresult, seen: self.offset.seen(sent_ns) }
                }
                None => {
                    totals.names_unasked += 1;
                    return;
                }
            },
            RecordBody::CodeUnloaded { module_id, ranges } => {
                let ranges = names.unloaded(module_id, ranges.pairs());
                if ranges.is_empty() {
                    return;
                }
                ShimEvent::CodeUnloaded { ranges }
            }
            RecordBody::GcStart { number, generation, reason, kind } => {
                ShimEvent::GcStart { number, generation, reason, kind, tid: thread(record.tid) }
            }
            RecordBody::GcEnd { number } => ShimEvent::GcEnd { number },
            RecordBody::PauseBegin { reason } => ShimEvent::PauseBegin {
                reason: u8::try_from(reason).unwrap_or(u8::MAX),
                tid: thread(record.tid),
            },
            RecordBody::PauseEnd => ShimEvent::PauseEnd { tid: thread(record.tid) },
            RecordBody::GcHeap { number, promoted } => ShimEvent::GcHeap { number, promoted },
            RecordBody::PauseCpu { suspender, cpu_ns } => {
                ShimEvent::PauseCpu { tid: thread(suspender), cpu_ns }
            }
            RecordBody::PoolAdjusted { workers, reason } => {
                ShimEvent::PoolAdjusted { workers, reason }
            }
            RecordBody::PoolQueue { items } => ShimEvent::PoolQueue { items },
            RecordBody::Exception(head, stack) => ShimEvent::Exception(Box::new(Exception {
                at: runtime_sample(
                    &head.at,
                    stack,
                    thread(record.tid),
                    MonotonicNs(told.min(time)),
                ),
                rethrown: head.rethrown,
                type_name: head.type_name.chars().take(TYPE_NAME_CHARS).collect(),
                message: head.message.map(|message| message.chars().take(MESSAGE_CHARS).collect()),
            })),
            RecordBody::Contention(head, stack) => {
                let tid = thread(record.tid);
                let owner = match (head.owner, self.version) {
                    // Of a version that is not known it may be a thread's id or a number.
                    (0, _) | (_, None) => None,
                    (tid, Some(..lock_owners::FIRST_VERSION)) => {
                        Some(thread(tid)).filter(|&owner| owner != 0)
                    }
                    (id, Some(_)) => {
                        let began = MonotonicNs(time.saturating_sub(head.waited_ns));
                        let (owners, lists) = (&mut *context.owners, context.lists);
                        owners.owner(lists, threads, target, (id, began))
                    }
                };
                totals.owners_unknown += u64::from(head.owner != 0 && owner.is_none());
                let at = runtime_sample(&head.at, stack, tid, MonotonicNs(told.min(time)));
                ShimEvent::Contention(Box::new(Contention { at, waited_ns: head.waited_ns, owner }))
            }
            RecordBody::ObjectsDead(samples) => {
                ShimEvent::ObjectsDead { samples: samples.iter().collect() }
            }
            RecordBody::ObjectsAlive(samples) => ShimEvent::ObjectsAlive {
                samples: samples.iter().map(|word| (word >> 8, word.to_le_bytes()[0])).collect(),
            },
            RecordBody::ObjectsDropped { level, samples } => {
                ShimEvent::ObjectsDropped { level, samples: samples.iter().collect() }
            }
            RecordBody::ThreadName { os_tid: 0, .. } => ShimEvent::Mark,
            // Of one without a name the id alone was to be learnt, while it runs.
            RecordBody::ThreadName { os_tid, name } => match thread(os_tid) {
                0 => return,
                _ if name.is_empty() => return,
                tid => ShimEvent::ThreadName {
                    tid,
                    name: name.chars().take(THREAD_NAME_CHARS).collect(),
                },
            },
            RecordBody::ThreadAt { os_tid, address } => match thread(os_tid) {
                0 => return,
                tid => ShimEvent::ThreadAt { tid, address },
            },
            RecordBody::Bye => {
                if self.says_bye() {
                    return;
                }
                ShimEvent::Bye
            }
        };
        let kind = EventKind::Shim { pid: target.pid(), region: self.id, event };
        sink(Event { time: MonotonicNs(time), kind });
    }
}

/// The time of a record that says it was written at `told`, in a ring whose reading began at
/// `began`. Records are written while the ring is read, and events of the kernel lie between them:
/// one that is later than `began` keeps its time, unless it is ahead of the clock too.
fn plausible(told: u64, began: u64, clock: impl FnOnce() -> u64) -> u64 {
    let latest = if told > began { clock().max(began) } else { began };
    told.clamp(began.saturating_sub(OLDEST_NS), latest)
}

fn allocation(head: &AllocationHead, stack: &[u8], tid: u32) -> Allocation {
    Allocation {
        sample: head.sample,
        tid,
        type_id: head.type_id,
        size: head.size,
        heap: match head.heap {
            0 => HeapKind::Small,
            1 => HeapKind::Large,
            _ => HeapKind::Pinned,
        },
        kind: match (head.exact, head.sampled) {
            (true, _) => AllocationKind::Exact,
            (false, true) if head.amount > head.size => {
                AllocationKind::Chosen { bytes: head.amount }
            }
            (false, true) => AllocationKind::Sampled,
            (false, false) => AllocationKind::Tick { amount: head.amount },
        },
        level: head.level,
        watched: head.watched.checked_sub(1),
        user: UserContext {
            walk: None,
            regs: registers(&head.registers),
            stack: stack.to_vec(),
            skipped: 0,
            limited: head.limited,
            exiting: false,
            asleep: None,
        },
        seen: MonotonicNs(0),
    }
}

fn runtime_sample(head: &StackHead, stack: &[u8], tid: u32, seen: MonotonicNs) -> RuntimeSample {
    let user = UserContext {
        walk: None,
        regs: registers(&head.registers),
        stack: stack.to_vec(),
        skipped: 0,
        limited: head.limited,
        exiting: false,
        asleep: None,
    };
    RuntimeSample { tid, weight: f64::from(head.level).exp2(), user, seen }
}

/// The registers the shim captures, at their places.
fn registers(captured: &Registers) -> UserRegs {
    let mut regs = UserRegs { ip: captured.pc, ..UserRegs::default() };
    let values = [captured.sp, captured.fp].into_iter().chain(captured.saved);
    for (place, value) in NATIVE.registers.captured_places.into_iter().zip(values) {
        if let Some(register) = regs.gpr.get_mut(usize::from(place)) {
            *register = value;
            regs.known |= 1 << place;
        }
    }
    regs
}

#[cfg(test)]
mod tests {
    use super::{OLDEST_NS, plausible};

    #[test]
    fn a_record_that_is_written_while_the_ring_is_read_keeps_its_time() {
        const BEGAN: u64 = 100_000_000_000;
        let clock = || BEGAN + 5_000;
        assert_eq!(plausible(BEGAN + 3_000, BEGAN, clock), BEGAN + 3_000);
        assert_eq!(plausible(BEGAN + 9_000, BEGAN, clock), BEGAN + 5_000, "not yet");
        assert_eq!(plausible(u64::MAX, BEGAN, clock), BEGAN + 5_000);
        assert_eq!(plausible(BEGAN - 3_000, BEGAN, || unreachable!()), BEGAN - 3_000);
        assert_eq!(plausible(0, BEGAN, || unreachable!()), BEGAN - OLDEST_NS);
    }
}
