//! Sizes that both sides must agree on, tied together by const assertions.

use core::mem::size_of;

/// Bytes of a page. A probe reads user memory page by page, so that a copy ends cleanly where
/// memory does.
pub const PAGE_BYTES: u32 = 4096;

/// Most pages from the stack pointer on that may be missing: a function that makes itself a large
/// frame faults on the lowest of them first.
pub const MAX_SKIPPED_PAGES: u32 = 8;

/// Most bytes of user stack one record carries. The C# compiler uses up to 90 KiB while the probes
/// know none of its rules.
pub const MAX_STACK_COPY_BYTES: u32 = 128 * 1024;

/// Most of it while the ring is more than half full. Most stacks are shorter.
pub const MAX_CROWDED_COPY_BYTES: u32 = 16 * 1024;

/// Most of it before 5.17. Those kernels have no `bpf_loop`, and their verifiers follow every page
/// of a copy.
pub const MAX_STEPPED_COPY_BYTES: u32 = 64 * 1024;

/// Most of it there in the record of a wait or of a waker: all waits are copied, and their budget
/// is one of bytes.
pub const MAX_STEPPED_WAIT_COPY_BYTES: u32 = MAX_STEPPED_COPY_BYTES / 2;

/// Most kernel frames of one record: the default of `kernel.perf_event_max_stack`.
pub const MAX_KERNEL_FRAMES: u32 = 127;

/// Bytes those frames need.
pub const MAX_KERNEL_STACK_BYTES: u32 = MAX_KERNEL_FRAMES * 8;

/// Most user frames the probes walk: the innermost.
pub const MAX_WALK_FRAMES: u32 = 512;

/// Bytes those frames need.
pub const MAX_WALK_BYTES: u32 = MAX_WALK_FRAMES * 8;

/// Bytes of stack a walk reads ahead at most; at least what the registers one rule saves can be
/// apart in practice.
pub const WALK_WINDOW_BYTES: u32 = 8 * 1024;

/// Bytes behind the fixed part of a record under construction. The extra page lets the verifier see
/// that a whole page always fits behind the last allowed position.
pub const SCRATCH_TAIL_BYTES: u32 =
    MAX_WALK_BYTES + MAX_KERNEL_STACK_BYTES + MAX_STACK_COPY_BYTES + PAGE_BYTES;

/// Most kernel frames that are taken of a waking: enough to see which interrupt it came from,
/// through the layers of the network.
pub const WAKER_FRAMES: usize = 32;

/// Innermost frames of a kernel stack taken by the scheduler's hooks, which are left out: the
/// program and `bpf_trace_run4`.
pub const OWN_FRAMES: u32 = 2;

/// Length of a command name with its terminating zero (`TASK_COMM_LEN`).
pub const COMM_BYTES: usize = 16;

/// Renames of one thread that are told of in a second (2³⁰ ns).
pub const MAX_RENAMES: u32 = 128;

/// Default number of threads whose times can be known at once.
pub const DEFAULT_MAX_THREADS: u32 = 32 * 1024;

/// Places whose rules the probes can know at once, of all processes; a power of two. An entry takes
/// 16 bytes.
pub const DEFAULT_MAX_PLACES: u32 = 64 * 1024;

/// Most different rules; an entry takes 32 bytes. Programs have some thousand.
pub const MAX_RULES: u32 = 32 * 1024;

/// Most processes whose rules the probes can know.
pub const MAX_SPACES: u32 = 16 * 1024;
/// Processes whose threads publish what they work for.
pub const MAX_SPAN_PLACES: u32 = 4 * 1024;
/// Of what a thread publishes: trace id (16), span id (8), whether it is valid (1), flags of the
/// trace, size of attributes (2), and room to whole words.
pub const SPAN_BYTES: usize = 32;

/// Most cgroups, and most users or commands, that rules can tell apart.
pub const MAX_RULED_CGROUPS: u32 = 16 * 1024;
/// See [`MAX_RULED_CGROUPS`].
pub const MAX_RULED_OTHERS: u32 = 1024;

/// Most readers of the task iterator: one that scans, and those that a process holds up.
pub const MAX_VISITORS: u32 = 4;

/// Most processes whose stacks the visitors pass over because reading one took too long.
pub const MAX_PASSED_OVER: u32 = 256;

/// Most processes that can be selected at once.
pub const MAX_SELECTED_PROCESSES: u32 = 8 * 1024;

const _: () = assert!(MAX_KERNEL_STACK_BYTES.is_multiple_of(8));
const _: () = assert!(MAX_WALK_FRAMES.is_power_of_two() && WALK_WINDOW_BYTES.is_power_of_two());
const _: () = assert!(MAX_STACK_COPY_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(MAX_STEPPED_COPY_BYTES <= MAX_STACK_COPY_BYTES);
const _: () = assert!(DEFAULT_MAX_PLACES.is_power_of_two() && MAX_RULES <= 1 << 16);
const _: () = assert!(size_of::<crate::rule::PlaceSet>() == 64, "a cache line");
