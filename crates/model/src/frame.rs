//! What a frame is before it has a name.

use std::num::NonZero;

/// A process of this recording: index into the process table, unique per (pid, start time, exec
/// count).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u32);

/// A file that was mapped: index into the image table, unique per (device, inode, ctime, size).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageId(pub u32);

/// One frame. Addresses of callers are already the return address minus one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FrameKey {
    /// Kernel text address.
    Kernel(u64),
    /// Native code: virtual address inside the ELF file (as its program headers number it).
    Native {
        /// The file.
        image: ImageId,
        /// ELF virtual address.
        address: u64,
    },
    /// Managed code, JIT-compiled or ReadyToRun: the body's first address in the process.
    /// `generation` grows when code at this address was unloaded and replaced.
    Managed {
        /// The process.
        process: ProcessId,
        /// Start of the method body (of its main function, also for a frame inside a funclet).
        start: u64,
        /// How often this address was given to new code before.
        generation: u32,
        /// Where in the body, in bytes and one more; `None` where only the method matters: frames
        /// of one method are one frame then.
        offset: Option<NonZero<u32>>,
    },
    /// A runtime stub in JIT memory (precode, dispatch): no method of its own.
    Stub {
        /// The process.
        process: ProcessId,
        /// Its address.
        address: u64,
    },
    /// Code no mapping explains.
    Unknown {
        /// The process.
        process: ProcessId,
        /// Its address.
        address: u64,
    },
    /// Something that the profiler has to say at this place; it is no frame of the program.
    Marker(Marker),
}

impl FrameKey {
    /// The same without where in the body of a method it is: what names it.
    #[must_use]
    pub const fn body(self) -> Self {
        match self {
            Self::Managed { process, start, generation, .. } => {
                Self::Managed { process, start, generation, offset: None }
            }
            other => other,
        }
    }

    /// The same at another place in the body, in bytes; `None` for no place.
    #[must_use]
    pub fn at(self, offset: Option<u32>) -> Self {
        let Self::Managed { process, start, generation, .. } = self else { return self };
        let offset = offset.and_then(|offset| NonZero::new(offset.checked_add(1)?));
        Self::Managed { process, start, generation, offset }
    }
}

/// Synthetic frames. Each has a counter of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Marker {
    /// The copy of the stack ended before the stack did.
    TruncatedCopy,
    /// More frames than the limit.
    TruncatedDepth,
    /// No rule and no guess led on from the innermost known frame.
    TruncatedNoRule,
    /// Memory that was needed (code or unwind data) could not be read.
    TruncatedUnreadable,
    /// The process was gone before its mappings could be read.
    TruncatedProcessGone,
    /// There were too many processes to take up this one.
    TruncatedNotKnown,
    /// The probes walked it by rules of code that was replaced meanwhile.
    TruncatedStale,
    /// The kernel had begun to end the thread, and its memory was gone: there was no stack to be
    /// read. Nothing went wrong.
    Exiting,
    /// The frame above this one (its caller) was guessed by frame pointer, or by a search of the
    /// stack.
    Guessed,
    /// The wait began before the recording: no stack was seen.
    WaitingSinceBefore,
    /// A new thread's wait for its first CPU: it has no stack yet.
    NotYetRun,
    /// On CPU for less than a sampling period: no stack was seen.
    NotSampled,
    /// Waits whose stack was lost on the way (ring full), or was not kept while none that was can
    /// stand for them: their time is exact, their place is not known.
    StackLost,
    /// Parent of all frames of collector threads.
    GarbageCollector,
    /// The window had no room for another stack: only the sums are kept.
    Overflow,
    /// Inside the innermost frame of a wait: the frames beyond are those of the thread that ended
    /// it, innermost first.
    WokenBy,
    /// Stands in place of those: a timer ended the wait.
    WokenByTimer,
    /// Another interrupt did.
    WokenByInterrupt,
    /// Inside the innermost frame of a wait for a lock: the frames beyond are those of the thread
    /// that held it, innermost first.
    HeldBy,
    /// A thread did whose stack is not known: it is not recorded, or the stack was lost on the way.
    WakerUnknown,
}
