//! The kernel source against what the kernel itself says: times against schedstat, stacks against
//! what was put on them, counters against each other. The test's own threads are the workload.

mod hotplug;
mod log;
mod scope;
mod stacks;
mod times;

use std::collections::{BTreeMap, HashMap};
use std::io::Write as _;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fs, thread};

use perfusion_model::event::{Event, ThreadSnapshot};
use perfusion_sources::kernel::{KernelOptions, KernelSelection, KernelSource};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use system_tests::environment;
use system_tests::environment::Need;
use system_tests::turn::Turn;
use system_tests::wait_until;

const NEEDS: &[Need] = &[Need::Root, Need::Btf];
const DEADLINE: Duration = Duration::from_secs(120);

/// Begins a test: its turn, its needs, and the probes for this very process (`cargo xtask test`
/// names their file).
fn begin(name: &str, needs: &[Need]) -> Option<Turn> {
    let turn = environment::begin(name, needs)?;
    let required = std::env::var_os("PERFUSION_TESTS_REQUIRED").is_some_and(|value| value == "1");
    perfusion_artefacts::provide_from_environment().unwrap();
    if perfusion_artefacts::probes().is_some() {
        return Some(turn);
    }
    assert!(!required, "{name} cannot run: PERFUSION_PROBES is not set");
    // Past the capture of the test runner, as the harness does it.
    writeln!(std::io::stderr(), "SKIPPED {name}: PERFUSION_PROBES is not set").ok();
    None
}

/// A child process that does not outlive its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a child that is gone already.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn own_options() -> KernelOptions {
    KernelOptions {
        selection: KernelSelection::Pids(vec![std::process::id()]),
        exclude_self: false,
        ..KernelOptions::default()
    }
}

/// The same with the probes for kernels before 5.17. `None` on those from 6.9 on that are built for
/// FRED and leave 16 bytes free above the registers on a kernel stack
/// (`TOP_OF_KERNEL_STACK_PADDING`, arch/x86/include/asm/thread_info.h), as none of the older ones
/// does.
pub(super) fn older_options() -> Option<KernelOptions> {
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap();
    if symbols.contains(" asm_fred_entrypoint_user") {
        writeln!(
            std::io::stderr(),
            "nothing to try: this kernel's stacks are not those of older ones"
        )
        .ok();
        return None;
    }
    Some(KernelOptions { older_probes: true, ..own_options() })
}

fn own_tid() -> u32 {
    rustix::thread::gettid().as_raw_pid().unsigned_abs()
}

/// A thread that runs `step` until it is stopped.
struct Worker {
    tid: u32,
    /// An address on its stack.
    stack: u64,
    stop: Arc<AtomicBool>,
    handle: JoinHandle<()>,
}

impl Worker {
    fn start(name: &str, mut step: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let (sender, receiver) = mpsc::channel();
        let handle = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let place = 0u8;
            sender.send((own_tid(), (&raw const place).addr() as u64)).unwrap();
            while !seen.load(Ordering::Relaxed) {
                step();
            }
        });
        let (tid, stack) = receiver.recv().unwrap();
        Self { tid, stack, stop, handle: handle.unwrap() }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.handle.join().unwrap();
    }
}

/// A thread that gives its CPU to the others of its kind all the time: they have one CPU between
/// them, however many the machine has.
fn yielding() -> Worker {
    let mut is_bound = false;
    Worker::start("yield", move || {
        if !is_bound {
            let allowed = sched_getaffinity(None).unwrap();
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            is_bound = true;
        }
        thread::yield_now();
    })
}

fn spin(duration: Duration) {
    let start = Instant::now();
    while start.elapsed() < duration {
        std::hint::spin_loop();
    }
}

/// Alternates between running and sleeping so that `percent` of the time is CPU time.
fn duty(percent: u64) -> impl FnMut() + Send + 'static {
    let period = Duration::from_millis(10);
    let mut due = Instant::now();
    move || {
        spin(period * u32::try_from(percent).unwrap() / 100);
        due += period;
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

/// Time on a CPU in ns, by the kernel's own account.
fn schedstat(tid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

/// Looks at schedstat around one look at our own times: whatever the machine does in between, the
/// truth lies between the two.
struct Look {
    before: HashMap<u32, u64>,
    ours: HashMap<u32, ThreadSnapshot>,
    after: HashMap<u32, u64>,
}

impl Look {
    fn take(source: &mut KernelSource, tids: &[u32]) -> Self {
        let all = || tids.iter().map(|tid| (*tid, schedstat(*tid))).collect();
        Self { before: all(), ours: times(source), after: all() }
    }

    /// The least and the most that schedstat can have grown between two looks at our times.
    fn bounds(first: &Self, last: &Self, tid: u32) -> (f64, f64) {
        let least = last.before[&tid].saturating_sub(first.after[&tid]);
        (least as f64, (last.after[&tid] - first.before[&tid]) as f64)
    }
}

fn collect(source: &mut KernelSource, into: &mut Vec<Event>) {
    source.drain(&mut |event| into.push(event));
}

fn times(source: &mut KernelSource) -> HashMap<u32, ThreadSnapshot> {
    source.thread_times().into_iter().map(|thread| (thread.times.thread.tid, thread)).collect()
}

fn counters(source: &KernelSource) -> BTreeMap<&'static str, u64> {
    source.counters().into_iter().map(|(info, value)| (info.name, value)).collect()
}

/// What is produced, and what that is the sum of: stored and dropped by cause.
const LAWS: [(&str, &[&str]); 4] = [
    ("cpu_samples", &["cpu_samples_stored", "cpu_samples_ring_full", "cpu_samples_busy"]),
    ("waits", &["waits_downsampled", "waits_stored", "waits_ring_full", "waits_busy"]),
    ("thread_ends", &["thread_ends_stored", "thread_ends_ring_full"]),
    (
        "off_cpu_scanned",
        &["off_cpu_stored", "off_cpu_ring_full", "off_cpu_torn", "off_cpu_deferred"],
    ),
];

/// The first law that does not hold.
fn broken_law(counters: &BTreeMap<&'static str, u64>) -> Option<&'static str> {
    let sum = |names: &[&str]| names.iter().map(|name| counters[name]).sum::<u64>();
    LAWS.into_iter().find(|(all, parts)| counters[all] != sum(parts)).map(|(all, _)| all)
}

/// The counters when nobody is between counting a thing and saying what became of it: a thread that
/// has been joined may still be in the hook of its end.
fn settled(source: &KernelSource) -> BTreeMap<&'static str, u64> {
    let settled = wait_until("hooks that are under way", DEADLINE, || {
        Some(counters(source)).filter(|counters| broken_law(counters).is_none())
    });
    settled.unwrap_or_else(|_| counters(source))
}

fn assert_laws(counters: &BTreeMap<&'static str, u64>) {
    assert_eq!(broken_law(counters), None, "{counters:?}");
    for never in [
        "cpu_samples_busy",
        "waits_busy",
        "cpu_beyond_maps",
        "records_bad",
        "perf_bad",
        "thread_torn",
        "thread_late",
    ] {
        assert_eq!(counters[never], 0, "{never}: {counters:?}");
    }
}

fn records_stored(counters: &BTreeMap<&'static str, u64>) -> u64 {
    counters.iter().filter(|(name, _)| name.ends_with("_stored")).map(|(_, value)| value).sum()
}
