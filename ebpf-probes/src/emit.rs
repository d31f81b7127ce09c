//! Fills records and puts them into the ring, or counts why not.

use crate::config::{Task, setting};
use crate::log::lost;
use crate::machine::{self, Native};
use crate::maps::{RING, SCRATCH, STAGES, add, count};
use crate::{span, unwind};
use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_NO_WAKEUP, BPF_RB_RING_SIZE};
use aya_ebpf::helpers::generated::{
    bpf_get_smp_processor_id, bpf_get_stack, bpf_ktime_get_ns, bpf_ringbuf_output,
    bpf_ringbuf_query,
};
use core::ffi::c_void;
use core::mem::size_of;
use ebpf_common::counter::Counter;
use ebpf_common::event::MAX_RECORD_BYTES;
use ebpf_common::event::{
    FLAG_AT_CALL, FLAG_EXITING, FLAG_LIMITED, FLAG_USER, FLAG_WALKED_TO_LIMIT,
    FLAG_WALKED_TO_START, KIND_CPU_SAMPLE, KIND_WAKER_STACK, RecordHeader, StackRecord,
};
use ebpf_common::limits::{
    MAX_CROWDED_COPY_BYTES, MAX_KERNEL_STACK_BYTES, MAX_STEPPED_COPY_BYTES,
    MAX_STEPPED_WAIT_COPY_BYTES, MAX_WALK_BYTES,
};
use ebpf_common::machine::WalkMachine as _;
use ebpf_common::rule::{PC, SP};
use ebpf_common::scratch::Scratch;
use ebpf_common::stage::{OF_SAMPLES, OF_WAITS, STAGE_COPY, STAGE_KERNEL, STAGE_SEND, STAGE_USER};
use ebpf_common::walk::opaque;

/// `PF_KTHREAD` of include/linux/sched.h: a thread without user registers.
pub(crate) const PF_KTHREAD: u32 = 0x0020_0000;

/// `PF_EXITING` of include/linux/sched.h: a thread on its way out, which gives its memory back.
pub(crate) const PF_EXITING: u32 = 4;

/// What the hook knows; the rest is read from the task.
pub(crate) struct HookContext {
    pub(crate) kind: u32,
    pub(crate) time_ns: u64,
    pub(crate) tgid: u32,
    pub(crate) tid: u32,
    pub(crate) flags: u32,
    pub(crate) state: u32,
    pub(crate) ran_ns: u64,
    pub(crate) exec_ns: u64,
    pub(crate) probability: u64,
    /// Whether a kernel stack is to be taken (not when user code was interrupted), without how many
    /// of its innermost frames.
    pub(crate) kernel_stack: Option<u32>,
}

/// Why a stack record was not stored.
pub(crate) enum RecordLoss {
    /// It had so many bytes.
    RingFull(u32),
    Busy,
}

/// Sends a stack record of the current task; answers its bytes.
///
/// `ctx` must be the program's own context and `task` the current task.
#[inline(always)]
pub(crate) fn stack_record<const LOOPS: bool>(
    ctx: *mut c_void,
    task: Task,
    hook: &HookContext,
) -> Result<u32, RecordLoss> {
    // SAFETY: a helper without arguments.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let Some(scratch) = SCRATCH.get_ptr_mut(cpu) else {
        lost(Counter::CpuBeyondMaps, cpu, 0);
        return Err(RecordLoss::Busy);
    };
    // SAFETY: the pointer is this CPU's entry, used by one hook at a time, which `busy` watches.
    let scratch = unsafe { &mut *scratch };
    if scratch.busy != 0 {
        return Err(RecordLoss::Busy);
    }
    scratch.busy = 1;
    let sent = fill_and_send::<LOOPS>(ctx, task, scratch, hook);
    scratch.busy = 0;
    sent
}

#[inline(always)]
fn fill_and_send<const LOOPS: bool>(
    ctx: *mut c_void,
    task: Task,
    scratch: &mut Scratch,
    hook: &HookContext,
) -> Result<u32, RecordLoss> {
    let mut stages = StageClock::start(hook.kind);
    let record = &mut scratch.record;
    record.tgid = hook.tgid;
    record.tid = hook.tid;
    record.comm = task.comm();
    record.state = hook.state;
    record.ran_ns = hook.ran_ns;
    record.exec_ns = hook.exec_ns;
    record.probability = hook.probability;
    record.syscall = -1;
    let mut flags = hook.flags;

    record.space = 0;
    record.known = 0;
    let (mut walked_bytes, mut user_bytes) = (0, 0);
    let mut copied_from = None;
    let task_flags = task.flags();
    if task_flags & PF_EXITING != 0 {
        flags |= FLAG_EXITING;
    }
    if task_flags & PF_KTHREAD == 0 {
        let regs = if LOOPS {
            machine::registers(task)
        } else {
            // SAFETY: the tail is free until the registers have been looked at, and larger. Behind
            // a record of whole words it is aligned.
            unsafe { machine::copied_registers(task, scratch.tail.as_mut_ptr().cast()) }
        };
        if machine::is_user(regs) {
            flags |= FLAG_USER;
            record.ip = machine::instruction(regs);
            record.known = 0xffff;
            record.syscall = machine::system_call(regs);
            machine::general(&mut record.gpr, regs);
            copied_from = Some(machine::stack(regs));
            if hook.kind != KIND_WAKER_STACK {
                let ids = (&mut record.trace_id, &mut record.span_id);
                flags |= span::of_current(task, hook.tgid, &mut scratch.span, ids);
            }
            if LOOPS && unwind::walk::user(scratch, hook.tgid, hook.tid, regs) {
                walked_bytes = scratch.walk.frames * 8;
                flags |= walked(scratch);
                if setting!(copies_all) == 0 {
                    copied_from = hand_over(scratch);
                    if scratch.walk.end == 0 && scratch.walk.exact == 0 {
                        flags |= FLAG_AT_CALL;
                    }
                }
            }
        } else if machine::is_user_32_bit(regs) {
            count(Counter::User32Bit);
        }
    }
    stages.ended(STAGE_USER);
    let mut kernel_bytes = 0;
    if let Some(skipped) = hook.kernel_stack {
        // Read back and checked for the verifier, which does not follow the count of frames through
        // the walk.
        let walked_bytes = opaque(walked_bytes);
        if walked_bytes > MAX_WALK_BYTES {
            return Err(RecordLoss::Busy);
        }
        let target = scratch.tail.as_mut_ptr().wrapping_add(walked_bytes as usize);
        // SAFETY: behind the frames the tail has `MAX_KERNEL_STACK_BYTES` and more.
        let got = unsafe {
            bpf_get_stack(ctx, target.cast(), MAX_KERNEL_STACK_BYTES, u64::from(skipped))
        };
        if got < 0 {
            lost(Counter::KernelStackFailed, hook.tid, got);
        } else {
            kernel_bytes = got as u32;
        }
    }
    stages.ended(STAGE_KERNEL);
    if let Some(from) = copied_from {
        let limit = setting!(stack_copy_bytes);
        // Constants to the verifier.
        let limit = if LOOPS {
            limit
        } else if hook.kind == KIND_CPU_SAMPLE {
            limit.min(MAX_STEPPED_COPY_BYTES)
        } else {
            limit.min(MAX_STEPPED_WAIT_COPY_BYTES)
        };
        // A daemon that is behind loses fewer records when these are short.
        let crowded = LOOPS && ring_half_full();
        let room = task.stack_room(from, limit);
        let room = if crowded { room.min(MAX_CROWDED_COPY_BYTES) } else { room };
        let copy =
            unwind::copy::stack::<LOOPS>(scratch, walked_bytes + kernel_bytes, from, room, limit);
        user_bytes = copy.bytes;
        flags |= copy.flags;
        if copy.limited || crowded && user_bytes >= MAX_CROWDED_COPY_BYTES {
            flags |= FLAG_LIMITED;
            count(Counter::StackLimited);
        } else if user_bytes == 0 {
            count(Counter::StackUnreadable);
        }
    }
    stages.ended(STAGE_COPY);
    let record = &mut scratch.record;
    record.flags = flags;
    record.walked_bytes = walked_bytes;
    record.kernel_bytes = kernel_bytes;
    record.user_bytes = user_bytes;
    let len = size_of::<StackRecord>() as u32 + walked_bytes + kernel_bytes + user_bytes;
    record.header = RecordHeader { kind: hook.kind, len, time_ns: hook.time_ns };
    // Read back, so that the compiler keeps the check that the verifier needs.
    // SAFETY: a valid, aligned field.
    let len = unsafe { core::ptr::read_volatile(&raw const record.header.len) };
    if len > MAX_RECORD_BYTES {
        return Err(RecordLoss::Busy);
    }
    // SAFETY: so many bytes are the record and what follows it in `scratch`.
    let sent = unsafe { send((&raw mut scratch.record).cast(), len) };
    stages.ended(STAGE_SEND);
    if sent { Ok(len) } else { Err(RecordLoss::RingFull(len)) }
}

/// Measures what the stages of a record take, if that is asked for.
struct StageClock {
    kind: u32,
    since_ns: u64,
}

impl StageClock {
    #[inline(always)]
    fn start(record_kind: u32) -> Self {
        let kind = if record_kind == KIND_CPU_SAMPLE { OF_SAMPLES } else { OF_WAITS };
        Self { kind, since_ns: Self::now() }
    }

    #[inline(always)]
    fn now() -> u64 {
        // SAFETY: a helper without arguments.
        if setting!(times_stages) != 0 { unsafe { bpf_ktime_get_ns() } } else { 0 }
    }

    #[inline(always)]
    fn ended(&mut self, stage: usize) {
        if setting!(times_stages) == 0 {
            return;
        }
        let now = Self::now();
        if let Some(stages) = STAGES.get_ptr_mut(self.kind) {
            let took = stages.cast::<u64>().wrapping_add(stage);
            // SAFETY: one of `STAGES` words of this CPU's entry; the hooks do not interrupt each
            // other's records.
            unsafe { *took += now - self.since_ns }
        }
        self.since_ns = now;
    }
}

/// Notes how a walk ended; answers the flags that say so.
#[inline(always)]
fn walked(scratch: &mut Scratch) -> u32 {
    let walk = &scratch.walk;
    scratch.record.space = walk.space;
    add(Counter::WalkFrames, u64::from(walk.frames));
    let end = walk.end as u32;
    count(match end {
        FLAG_WALKED_TO_START => Counter::WalksToStart,
        FLAG_WALKED_TO_LIMIT => Counter::WalksTruncated,
        _ => Counter::WalksHandedOver,
    });
    end
}

/// Puts the registers of the frame a walk ended at into the record; answers from where on the stack
/// is to be copied, if at all.
#[inline(always)]
fn hand_over(scratch: &mut Scratch) -> Option<u64> {
    let (walk, record) = (&scratch.walk, &mut scratch.record);
    if walk.end != 0 {
        return None;
    }
    // Without a step the registers are all there already, and all known.
    if walk.frames != 0 {
        let mut known = 0;
        let mut register = 0;
        while register < PC {
            let place = Native::GPR_PLACES[register];
            record.gpr[place as usize] = walk.registers[register];
            known |= ((walk.known >> register) & 1) << place;
            register += 1;
        }
        record.known = known;
        record.ip = walk.registers[PC];
    }
    Some(walk.registers[SP])
}

/// Sends a small record whose `header.len` is its size.
#[inline(always)]
pub(crate) fn small_record<T>(record: &mut T) -> bool {
    // SAFETY: exactly the bytes of `record`, all of them initialised integers.
    unsafe { send((&raw mut *record).cast(), size_of::<T>() as u32) }
}

/// Whether the daemon is behind, so that what can wait or be shorter leaves the ring's room to what
/// cannot.
#[inline(always)]
pub(crate) fn ring_half_full() -> bool {
    let ring: *mut c_void = (&raw const RING).cast_mut().cast();
    // SAFETY: the ring map.
    let used = unsafe { bpf_ringbuf_query(ring, u64::from(BPF_RB_AVAIL_DATA)) };
    // SAFETY: the ring map.
    let size = unsafe { bpf_ringbuf_query(ring, u64::from(BPF_RB_RING_SIZE)) };
    used > size / 2
}

/// Copies `len` bytes into the ring. No wake-up: the daemon polls, and a wake-up inside the
/// scheduler's hooks is best avoided.
///
/// # Safety
/// `data` must have `len` initialised bytes.
#[inline(always)]
pub(crate) unsafe fn send(data: *mut c_void, len: u32) -> bool {
    let ring = (&raw const RING).cast_mut().cast();
    // SAFETY: `ring` is the ring map, the rest the caller's promise.
    (unsafe { bpf_ringbuf_output(ring, data, u64::from(len), u64::from(BPF_RB_NO_WAKEUP)) }) == 0
}
