//! Records under construction, in the probes' own memory.

use crate::event::{OffCpuRecord, StackRecord};
use crate::key::WalkState;
use crate::limits::{SCRATCH_TAIL_BYTES, SPAN_BYTES};

/// A record of the task iterator under construction. Each visitor has one: one that is held up may
/// write to its long after the next one began.
#[repr(C)]
pub struct OffCpuScratch {
    /// The fixed part.
    pub record: OffCpuRecord,
    /// Kernel stack, then user stack, without a gap.
    pub tail: [u8; SCRATCH_TAIL_BYTES as usize],
    /// The copy behind the kernel stack.
    pub copy: StackCopy,
    /// What the thread has published.
    pub span: [u8; SPAN_BYTES],
}

/// A copy of a stack in progress.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct StackCopy {
    /// Address of the first byte, in the end behind the pages skipped.
    pub from: u64,
    /// Where in the tail it goes.
    pub at: u32,
    /// Bytes copied.
    pub bytes: u32,
    /// Most bytes.
    pub limit: u32,
    /// Pages at the stack pointer that are not in memory.
    pub skipped: u32,
}

/// A record under construction; one per CPU. What is used all the time comes first: an instruction
/// of the probes reaches 32 KiB.
#[repr(C)]
pub struct Scratch {
    /// 1 while in use: a second use on top of the first is refused and counted.
    pub busy: u64,
    /// The copy behind the user frames and the kernel stack.
    pub copy: StackCopy,
    /// The walk behind the user frames.
    pub walk: WalkState,
    /// What a thread published.
    pub span: [u8; SPAN_BYTES],
    /// The fixed part.
    pub record: StackRecord,
    /// User frames, kernel stack, user stack, without gaps.
    pub tail: [u8; SCRATCH_TAIL_BYTES as usize],
}
