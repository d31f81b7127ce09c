//! What a thread says it works for: OpenTelemetry's thread context (OTEP 4947), a record behind a
//! pointer in thread-local memory. The daemon has found out where that is (`SPANS`); the thread is
//! interrupted, on its way off the CPU or asleep, as its record's protocol asks of readers.

use crate::config::{Task, setting};
use crate::maps::{SPANS, count};
use aya_ebpf::helpers::generated::{bpf_copy_from_user_task, bpf_probe_read_user};
use core::ffi::c_void;
use core::mem::size_of;
use ebpf_common::counter::Counter;
use ebpf_common::event::FLAG_SPAN;
use ebpf_common::key::{SPAN_DESCRIPTOR, SPAN_DISTANCE, SPAN_INDEX, SPAN_STATIC, SpanPlace};
use ebpf_common::limits::SPAN_BYTES;

/// Bytes of the record up to the one that says whether it is valid.
const READ_BYTES: u32 = 25;
const VALID: usize = 24;

/// `TLS_DTV_UNALLOCATED` of glibc (sysdeps/generic/dl-dtv.h): the thread has not used the module's
/// variables yet.
const UNALLOCATED: u64 = u64::MAX;

/// Memory of the process of a thread.
trait ThreadMemory: Copy {
    /// Reads `bytes` bytes at `address`; false when they are not to be had, whatever the address
    /// is.
    ///
    /// # Safety
    /// `into` has room for them.
    unsafe fn read(self, into: *mut c_void, bytes: u32, address: u64) -> bool;
}

/// That of the current thread: what is in memory now.
#[derive(Clone, Copy)]
struct CurrentThread;

impl ThreadMemory for CurrentThread {
    #[inline(always)]
    unsafe fn read(self, into: *mut c_void, bytes: u32, address: u64) -> bool {
        // SAFETY: the caller's promise.
        (unsafe { bpf_probe_read_user(into, bytes, address as *const c_void) }) == 0
    }
}

/// That of a thread that sleeps, for programs that may.
#[derive(Clone, Copy)]
struct SleepingThread(Task);

impl ThreadMemory for SleepingThread {
    #[inline(always)]
    unsafe fn read(self, into: *mut c_void, bytes: u32, address: u64) -> bool {
        let task = self.0.pointer.cast_mut().cast();
        // SAFETY: the caller's promise; the iterator holds a reference to the task.
        (unsafe { bpf_copy_from_user_task(into, bytes, address as *const c_void, task, 0) }) == 0
    }
}

/// Puts trace and span of the current thread into its record; answers the flag that says so.
#[inline(always)]
pub(crate) fn of_current(
    task: Task,
    tgid: u32,
    room: &mut [u8; SPAN_BYTES],
    ids: (&mut [u8; 16], &mut [u8; 8]),
) -> u32 {
    if setting!(spans) == 0 { 0 } else { of(CurrentThread, task, tgid, room, ids) }
}

/// The same of a thread that sleeps: while it does nobody else changes what it has said.
#[inline(always)]
pub(crate) fn of_off_cpu(
    task: Task,
    tgid: u32,
    room: &mut [u8; SPAN_BYTES],
    ids: (&mut [u8; 16], &mut [u8; 8]),
) -> u32 {
    if setting!(spans) == 0 { 0 } else { of(SleepingThread(task), task, tgid, room, ids) }
}

#[inline(always)]
fn of(
    memory: impl ThreadMemory,
    task: Task,
    tgid: u32,
    room: &mut [u8; SPAN_BYTES],
    (trace, span): (&mut [u8; 16], &mut [u8; 8]),
) -> u32 {
    // SAFETY: values are plain integers; the daemon alone writes them.
    let Some(&place) = (unsafe { SPANS.get(tgid) }) else { return 0 };
    let address = task.thread_pointer().and_then(|pointer| variable(memory, &place, pointer));
    let Some(address) = address else { return 0 };
    let Some(context) = word(memory, address).filter(|context| *context != 0) else { return 0 };
    // SAFETY: `room` has so many bytes.
    if !unsafe { memory.read(room.as_mut_ptr().cast(), READ_BYTES, context) } {
        count(Counter::SpansUnreadable);
        return 0;
    }
    if room[VALID] != 1 {
        return 0;
    }
    let (mut in_trace, mut in_span) = (0, 0);
    let mut at = 0;
    while at < 16 {
        trace[at] = room[at];
        in_trace |= room[at];
        at += 1;
    }
    while at < 24 {
        span[at - 16] = room[at];
        in_span |= room[at];
        at += 1;
    }
    // An id of zeroes is none (W3C Trace Context).
    if in_trace == 0 || in_span == 0 {
        return 0;
    }
    count(Counter::Spans);
    FLAG_SPAN
}

/// Address of the thread's variable.
#[inline(always)]
fn variable(memory: impl ThreadMemory, place: &SpanPlace, pointer: u64) -> Option<u64> {
    let word = |address| word(memory, address);
    let (module, offset) = match place.kind {
        SPAN_STATIC => return Some(pointer.wrapping_add(place.offset)),
        SPAN_DISTANCE => return Some(pointer.wrapping_add(word(place.address)?)),
        SPAN_DESCRIPTOR => {
            // Behind the function, what it is called with: how far behind the thread pointer the
            // variable is, which is negative on x86-64, or the address of an index. (0: not looked
            // up yet.)
            let argument = word(place.address.wrapping_add(8))?;
            if (argument as i64) < 0 {
                return Some(pointer.wrapping_add(argument));
            }
            (word(argument)?, word(argument.wrapping_add(8))?)
        }
        SPAN_INDEX => (word(place.address)?, word(place.address.wrapping_add(8))?),
        _ => (word(place.address)?, place.offset),
    };
    // The vector's address is the second word behind the thread pointer (glibc: `tcbhead_t.dtv`;
    // musl: `struct pthread.dtv`).
    let vector = word(pointer.wrapping_add(8))?;
    // A thread's vector grows when it uses a module that came after it. How many entries there are
    // is said before the first with glibc (`dtv_t` of index -1), in the first with musl.
    let count = word(if place.entry_bytes == 16 { vector.wrapping_sub(16) } else { vector })?;
    if module == 0 || module > count {
        return None;
    }
    let block = word(vector.wrapping_add(module.wrapping_mul(u64::from(place.entry_bytes))))?;
    if block == 0 || block == UNALLOCATED {
        return None;
    }
    Some(block.wrapping_add(offset))
}

/// A word of the process's memory.
#[inline(always)]
fn word(memory: impl ThreadMemory, address: u64) -> Option<u64> {
    let mut word = 0u64;
    // SAFETY: room for exactly so many bytes.
    let read = unsafe { memory.read((&raw mut word).cast(), size_of::<u64>() as u32, address) };
    read.then_some(word)
}
