//! The probes' own log, by aya-log: how each hook begins, and the first loss of each kind with its
//! cause. It is off unless the daemon shows it (`PERFUSION_LOG=probes=debug`). The level is in
//! read-only data, so that the verifier removes the calls where it is off.
//!
//! Each line is a function of its own that is not inlined: a call site costs one comparison and a
//! call, and the text takes no room on the hook's stack. Nothing of the unwinder writes here.

use crate::maps::count;
use aya_ebpf::macros::map;
use aya_ebpf::maps::Array;
use aya_log_ebpf::debug;
use aya_log_ebpf::macro_support::{Level, level_enabled};
use ebpf_common::counter::{COUNTERS, Counter};

/// The lines about set-up, behind those of the counters.
#[derive(Clone, Copy)]
pub(crate) enum SetUp {
    Sampler = COUNTERS as isize,
    Scheduler,
    TaskIterator,
}

/// How many lines there are, each told once.
pub(crate) const LINES: u32 = SetUp::TaskIterator as u32 + 1;

/// Which lines of the log have been told, by number. Written by the probes while the log is on.
#[map]
static LINES_TOLD: Array<u64> = Array::with_max_entries(LINES, 0);

/// Whether anybody reads the log: a constant to the verifier.
#[inline(always)]
fn is_on() -> bool {
    level_enabled(Level::Debug)
}

/// Whether a line has not been told yet. CPUs that ask at the same moment may both tell it.
#[inline(always)]
fn is_first(line: u32) -> bool {
    let Some(told) = LINES_TOLD.get_ptr_mut(line) else { return false };
    // SAFETY: a word of the map, which outlives the program.
    if unsafe { told.read_volatile() } != 0 {
        return false;
    }
    // SAFETY: as above.
    unsafe { told.write_volatile(1) };
    true
}

/// Counts something lost, and tells of the first. `whom` is the thread or process it happened to,
/// `cause` what the kernel answered, or 0.
#[inline(always)]
pub(crate) fn lost(counter: Counter, whom: u32, cause: i64) {
    count(counter);
    if is_on() && is_first(counter as u32) {
        tell_loss(counter, whom, cause);
    }
}

/// Tells that a hook runs for the first time, on which CPU, for which thread.
#[inline(always)]
pub(crate) fn began(what: SetUp, whom: u32) {
    if is_on() && is_first(what as u32) {
        match what {
            SetUp::Sampler => sampler(whom),
            SetUp::Scheduler => scheduler(whom),
            SetUp::TaskIterator => task_iterator(whom),
        }
    }
}

/// Functions that write a line each.
macro_rules! lines {
    ($($name:ident($($argument:ident: $type:ty),*) $text:literal;)*) => {
        $(#[inline(never)]
        fn $name($($argument: $type),*) {
            debug!(&(), target: "probes", $text, $($argument),*);
        })*
    };
}

lines! {
    sampler(whom: u32) "CPU samples begin: thread {}";
    scheduler(whom: u32) "waits begin: thread {} leaves a CPU";
    task_iterator(whom: u32) "sleeping threads are read: thread {}";
}

/// Lines about losses, each with its counter.
macro_rules! losses {
    (
        fn $tell:ident($($all:ident: $of:ty),*);
        $($counter:ident $name:ident($($argument:ident: $type:ty),*) $text:literal;)*
    ) => {
        lines! { $($name($($argument: $type),*) $text;)* }

        /// The caller's counter is a constant, which leaves one of these.
        #[inline(always)]
        fn $tell(counter: Counter, $($all: $of),*) {
            match counter {
                $(Counter::$counter => $name($($argument),*),)*
                _ => {}
            }
        }
    };
}

losses! {
    fn tell_loss(whom: u32, cause: i64);
    CpuSamplesRingFull samples_ring_full(whom: u32)
        "first CPU sample lost: the ring is full; thread {}";
    CpuSamplesBusy samples_busy(whom: u32)
        "first CPU sample lost: this CPU's buffer is in use; thread {}";
    WaitsRingFull waits_ring_full(whom: u32)
        "first stack of a wait lost: the ring is full; thread {}";
    WaitsBusy waits_busy(whom: u32)
        "first stack of a wait lost: this CPU's buffer is in use; thread {}";
    WaitEndsRingFull wait_ends_ring_full(whom: u32)
        "first end of a wait lost: the ring is full; thread {}";
    ThreadEndsRingFull thread_ends_ring_full(whom: u32)
        "first end of a thread not sent: the ring is full; thread {}";
    ThreadMapFull thread_map_full(whom: u32, cause: i64)
        "first thread without times: the map of threads has no room; thread {}, kernel's answer {}";
    SelectedMapFull selected_map_full(whom: u32, cause: i64)
        "first process not selected: the map of selected processes is full; process {}, \
         kernel's answer {}";
    KernelStackFailed kernel_stack_failed(whom: u32, cause: i64)
        "first kernel stack refused: thread {}, kernel's answer {}";
    OffCpuRingFull off_cpu_ring_full(whom: u32)
        "first sleeping thread lost: the ring is full; thread {}";
    WakesRingFull wakes_ring_full(whom: u32) "first wake-up lost: the ring is full; thread {}";
    WakerStacksRingFull wakers_ring_full(whom: u32)
        "first waker's stack lost: the ring is full; thread {}";
    WakerStacksBusy wakers_busy(whom: u32)
        "first waker's stack lost: this CPU's buffer is in use; thread {}";
    RenamesRingFull renames_ring_full(whom: u32) "first rename lost: the ring is full; thread {}";
    CpuBeyondMaps cpu_beyond_maps(whom: u32)
        "first event on a CPU that was not possible at start: CPU {}";
}
