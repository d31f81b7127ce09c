//! What the names of a stack's frames tell beyond the names.

use perfusion_aggregate::threads::{WaitReason, Waker};
use perfusion_aggregate::wait_reason as words;
use perfusion_model::frame::{FrameKey, ImageId, Marker};
use perfusion_model::stack::StackTable;
use perfusion_model::thread_role;
use perfusion_symbolize::Symbolizer;
use std::sync::Arc;

/// How the kernel names what lies between a traced function and the stack helper (include/trace/bpf_probe.h, kernel/trace/bpf_trace.c).
const TRACING: [&str; 4] = ["bpf_prog_", "bpf_trace_run", "__bpf_trace_", "__traceiter_"];

/// Kernel stacks begin inside the tracepoint that takes them; those frames are ours, not the program's.
pub(super) fn without_own_frames<'a>(symbolizer: &Symbolizer, frames: &'a [FrameKey]) -> &'a [FrameKey] {
    let own = |frame: &&FrameKey| {
        matches!(frame, FrameKey::Kernel(_)) && {
            let name = &symbolizer.symbol(**frame).name;
            TRACING.iter().any(|prefix| name.starts_with(prefix))
        }
    };
    &frames[frames.iter().take_while(own).count()..]
}

/// The frames of a wait with those of who ended it beyond the innermost, the other way round: the two stacks meet at the marker, each with
/// what it was doing in the middle and the start of its thread at its end.
pub(super) fn with_waker(
    symbolizer: &Symbolizer,
    waiting: &[FrameKey],
    waker: Waker,
    stacks: &StackTable,
) -> Vec<FrameKey> {
    let mut frames: Vec<FrameKey> = match waker {
        Waker::Timer => vec![FrameKey::Marker(Marker::WokenByTimer)],
        Waker::Interrupt => vec![FrameKey::Marker(Marker::WokenByInterrupt)],
        Waker::Thread { stack: Some(stack), .. } => {
            without_own_frames(symbolizer, stacks.frames(stack)).iter().rev().copied().collect()
        }
        Waker::Thread { stack: None, .. } | Waker::Other => vec![FrameKey::Marker(Marker::WakerUnknown)],
    };
    frames.push(FrameKey::Marker(Marker::WokenBy));
    frames.extend_from_slice(waiting);
    frames
}

/// The frames of a wait for a lock with those of where its owner was meanwhile beyond the innermost, like those of a waker.
pub(super) fn with_owner(
    symbolizer: &Symbolizer,
    waiting: &[FrameKey],
    held_at: &[FrameKey],
) -> Vec<FrameKey> {
    let held_at = without_own_frames(symbolizer, held_at).iter().rev().copied();
    held_at.chain([FrameKey::Marker(Marker::HeldBy)]).chain(waiting.iter().copied()).collect()
}

/// An exception's stack from the method on that threw it. From .NET 9 on a part of the dispatch is managed code itself (`System.Runtime.EH`,
/// src/coreclr/nativeaot/Runtime.Base of dotnet/runtime), with native helpers in between.
pub(super) fn from_throw<'a>(symbolizer: &Symbolizer, frames: &'a [FrameKey]) -> &'a [FrameKey] {
    let is_managed = |frame: &FrameKey| matches!(frame, FrameKey::Managed { .. });
    let mut rest = frames;
    while let Some(managed) = rest.iter().position(is_managed)
        && let [method, ..] = rest[managed..]
    {
        if !symbolizer.symbol(method).system_name.starts_with("System.Runtime.EH.") {
            return &rest[managed..];
        }
        rest = &rest[managed + 1..];
    }
    frames
}

/// True for a thread that waits for work, not for something the program does.
pub(super) fn is_parked<'a>(
    symbolizer: &Symbolizer,
    role: Option<&str>,
    frames: &[FrameKey],
    file_name: impl Fn(ImageId) -> Option<&'a str>,
) -> bool {
    let managed = frames.iter().filter(|frame| matches!(frame, FrameKey::Managed { .. }));
    thread_role::is_parked(role, managed.map(|&frame| Arc::clone(&symbolizer.symbol(frame).system_name)))
        || thread_role::is_of_the_runtime_alone(frames.iter().filter_map(|&frame| file(frame, &file_name)))
}

/// Where a frame of the program's own part of a stack is: the file's name, or nothing where it is in none.
fn file<'a>(frame: FrameKey, file_name: impl Fn(ImageId) -> Option<&'a str>) -> Option<Option<&'a str>> {
    match frame {
        FrameKey::Kernel(_) => None,
        FrameKey::Native { image, .. } => Some(file_name(image)),
        _ => Some(None),
    }
}

/// Words for a wait in `frames`, which are named.
pub(super) fn wait_reason(symbolizer: &Symbolizer, reason: WaitReason, frames: &[FrameKey]) -> &'static str {
    let kernel = frames.iter().take_while(|frame| matches!(frame, FrameKey::Kernel(_)));
    let sites: Vec<_> = kernel.map(|&frame| Arc::clone(&symbolizer.symbol(frame).name)).collect();
    words::name(reason, &sites)
}
