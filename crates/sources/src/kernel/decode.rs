//! Bytes of the BPF ring and of perf's rings → [`Event`]. Total functions: a record that lies about
//! its lengths is an error, never a panic.

use super::threads;
use bytemuck::AnyBitPattern;
use ebpf_common::event::{
    CERTAIN, FLAG_AT_CALL, FLAG_EXITING, FLAG_IO, FLAG_LIMITED, FLAG_NEW, FLAG_PREEMPTED,
    FLAG_SKIPPED, FLAG_SPAN, FLAG_STACK_SENT, FLAG_THROTTLED, FLAG_USER, FLAG_WAKER,
    FLAG_WALKED_TO_LIMIT, FLAG_WALKED_TO_START, FLAG_WOKEN_THROTTLED, KIND_CPU_SAMPLE,
    KIND_OFF_CPU, KIND_RENAME, KIND_THREAD_END, KIND_WAIT_END, KIND_WAIT_START, KIND_WAKE,
    KIND_WAKER_STACK, OffCpuRecord, RecordHeader, RenameRecord, StackRecord, ThreadEndRecord,
    WaitEndRecord, WakeRecord, skipped_bytes,
};
use ebpf_common::limits::{MAX_KERNEL_FRAMES, OWN_FRAMES, WAKER_FRAMES};
use ebpf_common::machine::GPR;
use perfusion_model::event::{
    BlockedThread, CpuSample, Event, EventKind, Mmap, MonotonicNs, OffCpuStack, OffCpuThread,
    ProbeWalk, Rename, ThreadId, ThreadTimes, TraceSpan, UserContext, UserRegs, WaitEnd, WaitStart,
    WaitState, Wake, WakerStack, WalkEnd,
};
use perfusion_model::text::whole_text;
use perfusion_unwind::native::NATIVE;

/// A record nobody could have written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Shorter than its kind needs, or than it says.
    #[error("record of {len} bytes is too short for {what}")]
    Short {
        /// What did not fit.
        what: &'static str,
        /// Bytes there were.
        len: usize,
    },
    /// An unknown kind.
    #[error("unknown record kind {kind}")]
    Kind {
        /// The tag.
        kind: u32,
    },
}

/// What the thread of a stack worked for, if it has said so. An id of zeroes is none (W3C Trace
/// Context).
fn span(flags: u32, trace: [u8; 16], id: [u8; 8]) -> Option<TraceSpan> {
    (flags & FLAG_SPAN != 0 && trace != [0; 16] && id != [0; 8]).then_some(TraceSpan { trace, id })
}

fn read<T: AnyBitPattern>(
    bytes: &[u8],
    offset: usize,
    what: &'static str,
) -> Result<T, DecodeError> {
    let short = DecodeError::Short { what, len: bytes.len() };
    let end = offset.checked_add(size_of::<T>());
    match end.and_then(|end| bytes.get(offset..end)) {
        Some(bytes) => Ok(bytemuck::pod_read_unaligned(bytes)),
        None => Err(short),
    }
}

/// Decodes a record of the BPF ring.
///
/// # Errors
/// When the record is not one of `ebpf_common::event`.
pub fn ring_record(bytes: &[u8]) -> Result<Event, DecodeError> {
    let header: RecordHeader = read(bytes, 0, "header")?;
    let kind = match header.kind {
        KIND_CPU_SAMPLE => {
            let parts = stack_record(bytes)?;
            EventKind::CpuSample(CpuSample {
                thread: parts.thread,
                comm: parts.record.comm,
                user: parts.user,
                kernel: parts.kernel,
                span: span(parts.record.flags, parts.record.trace_id, parts.record.span_id),
            })
        }
        KIND_WAIT_START => {
            let StackParts { thread, record, user, kernel } = stack_record(bytes)?;
            EventKind::WaitStart(WaitStart {
                thread,
                comm: record.comm,
                user,
                kernel,
                state: wait_state(record.flags, record.state),
                io: record.flags & FLAG_IO != 0,
                ran_ns: record.ran_ns,
                syscall: u32::try_from(record.syscall).ok(),
                weight: weight(record.probability),
                span: span(record.flags, record.trace_id, record.span_id),
            })
        }
        KIND_OFF_CPU => off_cpu(bytes)?,
        KIND_WAKE => {
            let record: WakeRecord = read(bytes, 0, "wake-up")?;
            let kernel_bytes = usize::try_from(record.kernel_bytes).unwrap_or(usize::MAX);
            let kernel = record.kernel.get(..kernel_bytes / 8);
            let short = DecodeError::Short { what: "waker's stack", len: bytes.len() };
            EventKind::Wake(Wake {
                tid: record.tid,
                start: MonotonicNs(record.start_ns),
                kernel: kernel.ok_or(short)?.to_vec(),
                cut: is_cut(kernel_bytes / 8, WAKER_FRAMES),
                by: None,
            })
        }
        KIND_WAKER_STACK => {
            let StackParts { thread, record, user, kernel } = stack_record(bytes)?;
            let by = Some(WakerStack { thread, comm: record.comm, user });
            let cut =
                is_cut(kernel.len(), usize::try_from(MAX_KERNEL_FRAMES).unwrap_or(usize::MAX));
            EventKind::Wake(Wake {
                tid: record.state,
                start: MonotonicNs(record.ran_ns),
                kernel,
                cut,
                by,
            })
        }
        KIND_WAIT_END => {
            let record: WaitEndRecord = read(bytes, 0, "end of a wait")?;
            let waker = ThreadId { pid: record.waker_tgid, tid: record.waker_tid };
            EventKind::WaitEnd(WaitEnd {
                thread: ThreadId { pid: record.tgid, tid: record.tid },
                start: MonotonicNs(record.start_ns),
                blocked_ns: record.blocked_ns,
                runnable_ns: record.runnable_ns,
                waker: (record.flags & FLAG_WAKER != 0).then_some((waker, record.waker_comm)),
                woken_throttled: record.flags & FLAG_WOKEN_THROTTLED != 0,
                new_thread: record.flags & FLAG_NEW != 0,
            })
        }
        KIND_THREAD_END => {
            let record: ThreadEndRecord = read(bytes, 0, "end of a thread")?;
            EventKind::ThreadEnd(ThreadTimes {
                thread: ThreadId { pid: record.tgid, tid: record.tid },
                oncpu_ns: record.oncpu_ns,
                runnable_ns: record.runnable_ns,
                stolen_ns: record.stolen_ns,
                blocked_ns: record.blocked_ns,
                since: MonotonicNs(record.entered_ns),
                left_out: record.left_out,
            })
        }
        KIND_RENAME => {
            let record: RenameRecord = read(bytes, 0, "a thread's new name")?;
            EventKind::Rename(Box::new(Rename {
                thread: ThreadId { pid: record.thread.tgid, tid: record.tid },
                from: record.from,
                to: record.to,
                until: threads::snapshot(record.tid, &record.thread, header.time_ns),
                skipped: record.flags & FLAG_SKIPPED != 0,
            }))
        }
        kind => return Err(DecodeError::Kind { kind }),
    };
    Ok(Event { time: MonotonicNs(header.time_ns), kind })
}

/// Whether a kernel stack with so many frames may have more. Kernels before 5.18 take as many as
/// there is room for, and of those leave out the hook's own (`__bpf_get_stack`,
/// kernel/bpf/stackmap.c).
fn is_cut(frames: usize, room: usize) -> bool {
    frames.saturating_add(usize::try_from(OWN_FRAMES).unwrap_or(0)) >= room
}

struct StackParts {
    thread: ThreadId,
    record: StackRecord,
    user: Option<Box<UserContext>>,
    kernel: Vec<u64>,
}

fn stack_record(bytes: &[u8]) -> Result<StackParts, DecodeError> {
    let record: StackRecord = read(bytes, 0, "stack record")?;
    let short = |what| DecodeError::Short { what, len: bytes.len() };
    let tail = bytes.get(size_of::<StackRecord>()..).unwrap_or_default();
    let size = |bytes: u32| usize::try_from(bytes).unwrap_or(usize::MAX);
    let (walked, tail) =
        tail.split_at_checked(size(record.walked_bytes)).ok_or_else(|| short("user frames"))?;
    let (kernel, tail) =
        tail.split_at_checked(size(record.kernel_bytes)).ok_or_else(|| short("kernel stack"))?;
    let stack = tail.get(..size(record.user_bytes)).ok_or_else(|| short("user stack"))?;
    let user = (record.flags & FLAG_USER != 0).then(|| {
        Box::new(UserContext {
            walk: Some(ProbeWalk {
                time: MonotonicNs(record.header.time_ns),
                space: record.space,
                frames: words(walked),
                end: walk_end(record.flags),
            }),
            regs: UserRegs {
                gpr: record.gpr,
                known: u16::try_from(record.known & 0xffff).unwrap_or(0),
                ip: record.ip,
            },
            stack: stack.to_vec(),
            skipped: skipped_bytes(record.flags, stack_pointer(&record.gpr)),
            limited: record.flags & FLAG_LIMITED != 0,
            exiting: record.flags & FLAG_EXITING != 0,
            asleep: asleep(record.tid, record.exec_ns),
        })
    });
    Ok(StackParts {
        thread: ThreadId { pid: record.tgid, tid: record.tid },
        record,
        user,
        kernel: words(kernel),
    })
}

fn asleep(tid: u32, exec_ns: u64) -> Option<BlockedThread> {
    (exec_ns != 0).then_some(BlockedThread { tid, exec_ns })
}

fn stack_pointer(gpr: &[u64; GPR]) -> u64 {
    gpr.get(NATIVE.stack_pointer.index()).copied().unwrap_or(0)
}

fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

fn walk_end(flags: u32) -> WalkEnd {
    if flags & FLAG_WALKED_TO_START != 0 {
        WalkEnd::ThreadStart
    } else if flags & FLAG_WALKED_TO_LIMIT != 0 {
        WalkEnd::Limit
    } else {
        WalkEnd::HandedOver { exact: flags & FLAG_AT_CALL == 0 }
    }
}

fn off_cpu(bytes: &[u8]) -> Result<EventKind, DecodeError> {
    let record: OffCpuRecord = read(bytes, 0, "off-CPU thread")?;
    let tail = bytes.get(size_of::<OffCpuRecord>()..).unwrap_or_default();
    let seen = if record.flags & FLAG_STACK_SENT != 0 {
        None
    } else {
        let short = |what| DecodeError::Short { what, len: bytes.len() };
        let kernel_bytes = usize::try_from(record.kernel_bytes).unwrap_or(usize::MAX);
        let (kernel, tail) = tail
            .split_at_checked(kernel_bytes)
            .ok_or_else(|| short("off-CPU thread\'s kernel stack"))?;
        let user_bytes = usize::try_from(record.user_bytes).unwrap_or(usize::MAX);
        let stack = tail.get(..user_bytes).ok_or_else(|| short("off-CPU thread\'s user stack"))?;
        Some(OffCpuStack {
            user: (record.flags & FLAG_USER != 0).then(|| {
                Box::new(UserContext {
                    walk: None,
                    regs: UserRegs { gpr: record.gpr, known: u16::MAX, ip: record.ip },
                    stack: stack.to_vec(),
                    skipped: skipped_bytes(record.flags, stack_pointer(&record.gpr)),
                    limited: record.flags & FLAG_LIMITED != 0,
                    exiting: record.flags & FLAG_EXITING != 0,
                    asleep: asleep(record.tid, record.exec_ns),
                })
            }),
            kernel: words(kernel),
            state: wait_state(record.flags, record.state),
            io: record.flags & FLAG_IO != 0,
            syscall: u32::try_from(record.syscall).ok(),
            span: span(record.flags, record.trace_id, record.span_id),
        })
    };
    Ok(EventKind::OffCpu(OffCpuThread {
        thread: ThreadId { pid: record.tgid, tid: record.tid },
        comm: record.comm,
        start: MonotonicNs(record.start_ns),
        off_cpu_ns: (record.off_cpu_ns != 0).then_some(record.off_cpu_ns),
        seen,
    }))
}

/// `TASK_INTERRUPTIBLE`, `TASK_UNINTERRUPTIBLE` and `TASK_RTLOCK_WAIT` of include/linux/sched.h;
/// further bits (killable, freezable, no load) may be set. With the last one threads of a
/// PREEMPT_RT kernel sleep on its spin locks, whatever state they have for afterwards.
fn wait_state(flags: u32, state: u32) -> WaitState {
    if flags & FLAG_THROTTLED != 0 {
        WaitState::Throttled
    } else if flags & FLAG_PREEMPTED != 0 {
        WaitState::Runnable
    } else if state & 1 != 0 {
        WaitState::Interruptible
    } else if state & (2 | 0x1000) != 0 {
        WaitState::Uninterruptible
    } else {
        WaitState::Other(state)
    }
}

/// One over a probability in units of 2⁻³².
fn weight(probability: u64) -> f64 {
    let probability = u32::try_from(probability.min(CERTAIN - 1)).unwrap_or(u32::MAX);
    if probability == u32::MAX { 1.0 } else { 4_294_967_296.0 / f64::from(probability.max(1)) }
}

/// What one of perf's records says.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one at a time, on the stack, and nearly all are events"
)]
pub enum PerfRecord {
    /// An event for the stages behind.
    Event(Box<Event>),
    /// The kernel had no room for this many records.
    Lost(u64),
    /// Nothing of interest.
    Other,
}

// include/uapi/linux/perf_event.h
const RECORD_LOST: u32 = 2;
const RECORD_COMM: u32 = 3;
const RECORD_EXIT: u32 = 4;
const RECORD_FORK: u32 = 7;
const RECORD_MMAP2: u32 = 10;
const MISC_COMM_EXEC: u16 = 1 << 13;
const PROT_EXEC: u32 = 4;
const HEADER_BYTES: usize = 8;
/// `sample_id` at the end of each record: pid, tid, time.
const SAMPLE_ID_BYTES: usize = 16;

/// Splits what a perf ring held into records; the second part of an item is the record's kind and
/// misc flags.
///
/// # Errors
/// When a record's length is impossible; nothing behind it can be read.
pub fn perf_records(
    mut bytes: &[u8],
    each: &mut dyn FnMut(Result<PerfRecord, DecodeError>),
) -> Result<(), DecodeError> {
    while !bytes.is_empty() {
        let len = usize::from(read::<u16>(bytes, 6, "perf record's length")?);
        let record = bytes.get(..len).filter(|record| record.len() >= HEADER_BYTES);
        let record = record.ok_or(DecodeError::Short { what: "perf record", len: bytes.len() })?;
        each(perf_record(record));
        bytes = bytes.get(len..).unwrap_or_default();
    }
    Ok(())
}

fn perf_record(bytes: &[u8]) -> Result<PerfRecord, DecodeError> {
    let kind: u32 = read(bytes, 0, "perf record")?;
    let word = |offset: usize, what| read::<u32>(bytes, offset, what);
    let long = |offset: usize, what| read::<u64>(bytes, offset, what);
    if kind == RECORD_LOST {
        return long(16, "count of lost records").map(PerfRecord::Lost);
    }
    if !matches!(kind, RECORD_COMM | RECORD_EXIT | RECORD_FORK | RECORD_MMAP2) {
        return Ok(PerfRecord::Other);
    }
    let body = bytes.len().saturating_sub(SAMPLE_ID_BYTES);
    let time = MonotonicNs(long(body.saturating_add(8), "perf record's time")?);
    let text = |from: usize| text(bytes.get(from..body).unwrap_or_default());
    let name = |from: usize| {
        whole_text(up_to_zero(bytes.get(from..body).unwrap_or_default())).into_owned()
    };
    let kind = match kind {
        RECORD_COMM => {
            let (pid, tid) = (word(8, "comm")?, word(12, "comm")?);
            let misc: u16 = read(bytes, 4, "comm")?;
            if misc & MISC_COMM_EXEC != 0 {
                EventKind::Exec { pid, comm: name(16) }
            } else {
                EventKind::Comm { thread: ThreadId { pid, tid }, comm: name(16) }
            }
        }
        RECORD_EXIT => {
            EventKind::Exit { thread: ThreadId { pid: word(8, "exit")?, tid: word(16, "exit")? } }
        }
        RECORD_FORK => EventKind::Fork {
            parent: ThreadId { pid: word(12, "fork")?, tid: word(20, "fork")? },
            thread: ThreadId { pid: word(8, "fork")?, tid: word(16, "fork")? },
        },
        _ => {
            if word(64, "mmap's protection")? & PROT_EXEC == 0 {
                return Ok(PerfRecord::Other);
            }
            EventKind::Mmap(Mmap {
                pid: word(8, "mmap")?,
                start: long(16, "mmap")?,
                len: long(24, "mmap")?,
                file_offset: long(32, "mmap")?,
                device: (word(40, "mmap")?, word(44, "mmap")?),
                inode: long(48, "mmap")?,
                path: text(72),
            })
        }
    };
    Ok(PerfRecord::Event(Box::new(Event { time, kind })))
}

/// Text up to the first zero.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(up_to_zero(bytes)).into_owned()
}

fn up_to_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    bytes.get(..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{DecodeError, PerfRecord, perf_records, ring_record, weight};
    use ebpf_common::event::{
        CERTAIN, FLAG_SKIPPED, FLAG_SPAN, FLAG_USER, FLAG_WALKED_TO_START, KIND_CPU_SAMPLE,
        KIND_OFF_CPU, KIND_RENAME, KIND_WAKE, OffCpuRecord, RecordHeader, RenameRecord,
        SKIPPED_PAGES_SHIFT, StackRecord, WakeRecord,
    };
    use ebpf_common::key::{STATE_ON_CPU, SchedulerAccount};
    use perfusion_model::event::{
        BlockedThread, EventKind, MonotonicNs, ProbeWalk, ThreadId, TraceSpan, WalkEnd,
    };
    use perfusion_unwind::native::NATIVE;
    use proptest::prelude::{any, proptest};

    fn sample() -> Vec<u8> {
        let record = StackRecord {
            header: RecordHeader { kind: KIND_CPU_SAMPLE, len: 0, time_ns: 7 },
            tgid: 1,
            tid: 2,
            flags: FLAG_USER,
            kernel_bytes: 16,
            user_bytes: 8,
            ..StackRecord::default()
        };
        let mut bytes = bytemuck::bytes_of(&record).to_vec();
        bytes.extend([1u64, 2, 0x1122_3344_5566_7788].iter().flat_map(|word| word.to_ne_bytes()));
        bytes
    }

    #[test]
    fn a_sample_keeps_its_two_stacks_apart() {
        let event = ring_record(&sample()).unwrap();
        let EventKind::CpuSample(sample) = event.kind else { panic!("{event:?}") };
        assert_eq!(sample.kernel, [1, 2]);
        assert_eq!(sample.user.unwrap().stack, 0x1122_3344_5566_7788u64.to_ne_bytes());
    }

    #[test]
    fn pages_missing_at_the_stack_pointer_are_what_the_copy_begins_behind() {
        let mut bytes = sample();
        let mut record: StackRecord = *bytemuck::from_bytes(&bytes[..size_of::<StackRecord>()]);
        record.gpr[NATIVE.stack_pointer.index()] = 0x7ffc_0000_0f00;
        for (pages, skipped) in [(0u32, 0), (1, 0x100), (3, 0x2100)] {
            record.flags = FLAG_USER | pages << SKIPPED_PAGES_SHIFT;
            bytes[..size_of::<StackRecord>()].copy_from_slice(bytemuck::bytes_of(&record));
            let EventKind::CpuSample(sample) = ring_record(&bytes).unwrap().kind else { panic!() };
            assert_eq!(sample.user.unwrap().skipped, skipped);
        }
    }

    #[test]
    fn a_walk_comes_before_the_two_stacks() {
        let mut bytes = sample();
        let record = StackRecord {
            flags: FLAG_USER | FLAG_WALKED_TO_START,
            walked_bytes: 16,
            kernel_bytes: 8,
            user_bytes: 0,
            space: 3,
            tid: 5,
            exec_ns: 11,
            ..*bytemuck::from_bytes(&bytes[..size_of::<StackRecord>()])
        };
        bytes[..size_of::<StackRecord>()].copy_from_slice(bytemuck::bytes_of(&record));
        let EventKind::CpuSample(sample) = ring_record(&bytes).unwrap().kind else { panic!() };
        let walk = ProbeWalk {
            time: MonotonicNs(7),
            space: 3,
            frames: vec![1, 2],
            end: WalkEnd::ThreadStart,
        };
        assert_eq!(sample.kernel, [0x1122_3344_5566_7788]);
        let user = sample.user.unwrap();
        assert_eq!(
            (user.walk, user.asleep),
            (Some(walk), Some(BlockedThread { tid: 5, exec_ns: 11 }))
        );
    }

    #[test]
    fn a_stack_longer_than_its_record_is_an_error() {
        let bytes = sample();
        let cut = bytes.len() - 1;
        assert_eq!(
            ring_record(&bytes[..cut]).unwrap_err(),
            DecodeError::Short { what: "user stack", len: cut }
        );
    }

    #[test]
    fn an_off_cpu_thread_is_in_the_span_it_says_and_ids_of_zeroes_are_none() {
        let span = |flags, trace_id, span_id| {
            let record = OffCpuRecord {
                header: RecordHeader { kind: KIND_OFF_CPU, len: 0, time_ns: 7 },
                flags,
                trace_id,
                span_id,
                ..OffCpuRecord::default()
            };
            let EventKind::OffCpu(thread) = ring_record(bytemuck::bytes_of(&record)).unwrap().kind
            else {
                panic!()
            };
            thread.seen.unwrap().span
        };
        assert_eq!(
            span(FLAG_SPAN, [1; 16], [2; 8]),
            Some(TraceSpan { trace: [1; 16], id: [2; 8] })
        );
        assert_eq!([span(FLAG_SPAN, [0; 16], [2; 8]), span(FLAG_SPAN, [1; 16], [0; 8])], [None; 2]);
        assert_eq!(span(0, [1; 16], [2; 8]), None);
    }

    #[test]
    fn a_waking_with_as_many_frames_as_there_is_room_for_is_cut() {
        let cut = |frames: u32| {
            let record = WakeRecord {
                header: RecordHeader { kind: KIND_WAKE, len: 0, time_ns: 7 },
                kernel_bytes: frames * 8,
                ..WakeRecord::default()
            };
            let EventKind::Wake(wake) = ring_record(bytemuck::bytes_of(&record)).unwrap().kind
            else {
                panic!()
            };
            wake.cut
        };
        // Of 32, kernels before 5.18 count the two that are left out.
        assert_eq!([0, 29, 30, 32].map(cut), [false, false, true, true]);
    }

    #[test]
    fn a_threads_state_is_its_bits_unless_it_could_go_on() {
        use super::{FLAG_PREEMPTED, FLAG_THROTTLED, WaitState, wait_state};
        use WaitState::{Interruptible, Other, Runnable, Throttled, Uninterruptible};
        // Killable: TASK_WAKEKILL | TASK_UNINTERRUPTIBLE. 0x1000: a spin lock of a PREEMPT_RT
        // kernel. 8: traced.
        let states = [1, 2, 0x102, 0x1000, 8].map(|state| wait_state(0, state));
        assert_eq!(
            states,
            [Interruptible, Uninterruptible, Uninterruptible, Uninterruptible, Other(8)]
        );
        assert_eq!(
            [FLAG_PREEMPTED, FLAG_THROTTLED].map(|flag| wait_state(flag, 1)),
            [Runnable, Throttled]
        );
    }

    #[test]
    fn weights_are_inverse_probabilities() {
        assert!((weight(CERTAIN) - 1.0).abs() < f64::EPSILON);
        assert!((weight(CERTAIN / 4) - 4.0).abs() < f64::EPSILON);
        assert!(weight(0).is_finite());
    }

    #[test]
    fn an_exec_is_told_from_a_renaming() {
        let mut bytes = vec![];
        for misc in [1u16 << 13, 0] {
            bytes.extend(3u32.to_ne_bytes());
            bytes.extend(misc.to_ne_bytes());
            bytes.extend(40u16.to_ne_bytes());
            bytes.extend([5u32, 6].iter().flat_map(|word| word.to_ne_bytes()));
            bytes.extend(*b"name\0\0\0\0");
            bytes.extend([0u64, 99].iter().flat_map(|word| word.to_ne_bytes()));
        }
        let mut seen = vec![];
        perf_records(&bytes, &mut |record| seen.push(record.unwrap())).unwrap();
        let [PerfRecord::Event(exec), PerfRecord::Event(comm)] = &seen[..] else {
            panic!("{seen:?}")
        };
        assert!(matches!(&exec.kind, EventKind::Exec { pid: 5, comm } if comm == "name"));
        assert!(matches!(&comm.kind, EventKind::Comm { thread, .. } if thread.tid == 6));
        assert_eq!(exec.time.0, 99);
    }

    #[test]
    fn a_rename_has_the_times_until_then_unless_they_were_read_in_the_middle_of_an_update() {
        let thread = SchedulerAccount {
            entered_ns: 100,
            since_ns: 150,
            oncpu_ns: 50,
            tgid: 7,
            state: STATE_ON_CPU,
            ..SchedulerAccount::default()
        };
        let of = |thread, flags| {
            let len = u32::try_from(size_of::<RenameRecord>()).unwrap();
            let header = RecordHeader { kind: KIND_RENAME, len, time_ns: 180 };
            let (from, to) = (*b"job-A\0\0\0\0\0\0\0\0\0\0\0", *b"job-B\0\0\0\0\0\0\0\0\0\0\0");
            let record = RenameRecord { header, tid: 8, flags, from, to, thread };
            match ring_record(bytemuck::bytes_of(&record)).unwrap().kind {
                EventKind::Rename(rename) => *rename,
                kind => panic!("{kind:?}"),
            }
        };
        let whole = of(thread, 0);
        assert_eq!((whole.thread, whole.skipped), (ThreadId { pid: 7, tid: 8 }, false));
        assert_eq!((&whole.from[..5], &whole.to[..5]), (&b"job-A"[..], &b"job-B"[..]));
        assert_eq!(
            whole.until.map(|until| (until.times.oncpu_ns, until.at)),
            Some((80, MonotonicNs(180)))
        );
        assert!(of(SchedulerAccount { oncpu_ns: 49, ..thread }, 0).until.is_none());
        assert!(of(thread, FLAG_SKIPPED).skipped);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            ring_record(&bytes).ok();
            perf_records(&bytes, &mut |record| drop(record)).ok();
        }

        #[test]
        fn no_change_to_a_record_makes_it_panic(
            place in any::<proptest::sample::Index>(),
            value in any::<u8>(),
        ) {
            let mut bytes = sample();
            let place = place.index(bytes.len());
            bytes[place] = value;
            ring_record(&bytes).ok();
        }
    }
}
