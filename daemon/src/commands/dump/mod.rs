//! `perfusion dump`: all threads of a process as they are at one moment. A short recording: the
//! task iterator shows the threads that wait, the scheduler's hooks what they do meanwhile, the CPU
//! sampler those that run.

mod observe;
mod print;
mod suspension;

pub use suspension::Suspension;

use crate::cli;
use crate::commands::target::check_target;
use crate::error::{Error, say};
use perfusion_aggregate::threads::{WaitInProgress, WaitStateKey};
use perfusion_dotnet::attach;
use perfusion_export::file;
use perfusion_host::process::ProcessTable;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::{max_sample_rate, raise_open_files};
use perfusion_model::event::{MonotonicNs, ThreadId, ThreadProgress, ThreadSnapshot};
use perfusion_model::frame::FrameKey;
use perfusion_model::stack::StackId;
use perfusion_model::text::clean;
use perfusion_model::text::whole_text;
use perfusion_recorder::processor::Processor;
use perfusion_sources::kernel::{KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::order::EventOrder;
use perfusion_sources::shim::{ShimLimits, ShimSource};
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use perfusion_symbolize::{SymbolModule, file_name};
use serde::Serialize;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// So that a thread that runs is met soon.
const FREQUENCY_HZ: u32 = 999;
/// How long names are waited for.
const NAMES: Duration = Duration::from_secs(2);
/// What the label `wait_reason` has for it.
const THROTTLED: &str = "throttled";
/// Time between two rounds, and two questions for the same names.
const ROUND: Duration = Duration::from_millis(5);
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// All threads of a process.
#[derive(Debug, Serialize)]
pub struct ThreadDump {
    /// The process.
    pub pid: u32,
    /// Its name.
    pub process: String,
    /// Threads that wait and that the scan did not reach before it made no more progress: they have
    /// no stack.
    pub threads_not_reached: usize,
    /// What its runtime waits for, where that was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
    /// Its threads, the first one first.
    pub threads: Vec<DumpedThread>,
}

/// One thread.
#[derive(Debug, Serialize)]
pub struct DumpedThread {
    /// The kernel's id.
    pub tid: u32,
    /// The runtime's name of it, else the kernel's.
    pub name: String,
    /// What it is for, as in the label `thread_role`.
    pub role: &'static str,
    /// What it does.
    pub state: DumpedState,
    /// What it waits for, as in the label `wait_reason`; absent when it runs, when it was woken and
    /// waits for no more than a CPU, or when nothing is known of its wait.
    pub wait_reason: Option<&'static str>,
    /// How long it has been waiting for that; absent when it runs.
    pub waiting_seconds: Option<f64>,
    /// True when it has been waiting for longer than that.
    pub at_least: bool,
    /// What it waited for until it was woken, when all it waits for now is a CPU.
    pub woken_from: Option<WokenFrom>,
    /// How old the stack of a thread is that runs, or that has begun to wait since it was taken; 0
    /// for one that waits there now.
    pub stack_age_seconds: Option<f64>,
    /// Innermost first.
    pub stack: Vec<DumpedFrame>,
    /// Why there is no stack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_stack: Option<NoStack>,
}

/// Why a thread has no stack here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoStack {
    /// It waits, and the scan of waiting threads did not get to it.
    NotReached,
    /// It ran, and was not met.
    NotMet,
}

/// A wait that is over, though its thread has not run since.
#[derive(Debug, Serialize)]
pub struct WokenFrom {
    /// What the thread waited for, as in the label `wait_reason`; absent when nothing is known of
    /// it.
    pub wait_reason: Option<&'static str>,
    /// How long.
    pub seconds: f64,
    /// True when it was longer than that.
    pub at_least: bool,
}

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DumpedState {
    /// It has a CPU.
    Running,
    /// It waits for a CPU.
    Runnable,
    /// It waits for something else, and a signal would wake it.
    Interruptible,
    /// It waits for something else, and no signal would wake it.
    Uninterruptible,
    /// Stopped, or being traced.
    Stopped,
    /// It waits for something else.
    Blocked,
}

/// One frame.
#[derive(Debug, Serialize)]
pub struct DumpedFrame {
    /// Function, or what the profiler has to say at this place, in brackets.
    pub function: String,
    /// File or managed module it is in.
    pub module: Option<String>,
    /// Where its code is; `None` for the kernel's and for the profiler's own remarks.
    pub code: Option<CodeAddress>,
}

/// A place in code, as `perfusion inspect unwind` takes it.
#[derive(Debug, Serialize)]
pub struct CodeAddress {
    /// A file as the process has mapped it, or the process's pid.
    pub target: String,
    /// 0x…: of the instruction, or the one behind the call; of a managed method where it begins.
    /// The file's own address (ELF), or one in the process's memory.
    pub address: String,
}

/// `perfusion dump`.
///
/// # Errors
/// See [`Error`].
pub fn dump(options: &cli::DumpArgs, quiet: bool) -> Result<u8, Error> {
    check_target(options.pid())?;
    if let Some(output) = &options.output {
        file::check(output)?;
    }
    let dump = take(options, quiet)?;
    if dump.threads_not_reached > 0 {
        say(&observe::not_reached(&dump));
    }
    let mut text = Vec::new();
    let printed = if options.json {
        serde_json::to_writer_pretty(&mut text, &dump)
            .map_err(io::Error::from)
            .and_then(|()| writeln!(text))
    } else {
        print::text(&dump, options.addresses, &mut text)
    };
    printed.map_err(|source| Error::Internal { what: "printing", source })?;
    match &options.output {
        Some(path) => file::write(path, &text)?,
        None => crate::commands::output::to_stdout(&text)?,
    }
    Ok(0)
}

/// As often as the kernel allows.
fn frequency() -> u32 {
    let most = max_sample_rate().and_then(|most| u32::try_from(most).ok()).unwrap_or(FREQUENCY_HZ);
    FREQUENCY_HZ.min(most.max(1))
}

/// The stages of a recording, in one thread.
struct Session {
    kernel: KernelSource,
    shims: ShimSource,
    order: EventOrder,
    processor: Processor,
}

impl Session {
    /// Reads all sources once and asks for the names that are missing.
    fn round(&mut self) {
        let start = MonotonicNs::now();
        let (order, shims) = (&mut self.order, &mut self.shims);
        self.kernel.drain(&mut |event| {
            shims.observe(&event);
            order.push(event);
        });
        shims.drain(&mut |event| order.push(event));
        let mut events = Vec::new();
        order.end_round(start, &mut events);
        self.digest(events);
    }

    fn digest(&mut self, events: Vec<perfusion_model::event::Event>) {
        for event in events {
            self.processor.event(event);
        }
        // The recording is too short for rule updates of the probes to pay.
        self.processor.processes.push_rules(drop);
        self.processor.take_questions().put_to(&mut self.shims);
    }
}

fn take(options: &cli::DumpArgs, quiet: bool) -> Result<ThreadDump, Error> {
    let pid = options.pid();
    attach::shim_copy::begin_sweep();
    // What waits for locks tell of the runtime's waiting function is of use.
    let settings =
        ShimSettings::new(Subscriptions { exceptions: false, ..Subscriptions::default() })
            .map_err(|source| Error::Internal { what: "random number", source: source.into() })?;
    raise_open_files();
    let kernel = KernelSource::start(&KernelOptions {
        frequency_hz: frequency(),
        selection: KernelSelection::Pids(vec![pid]),
        stack_copy_bytes: options.stack_kib * 1024,
        ..KernelOptions::default()
    })?;
    if let Some(lack) = kernel.scans_lack() {
        return Err(Error::NoOffCpuScans { lack: lack.to_owned() });
    }
    let mut processes = ProcessTable::new();
    // One that cannot be read has stacks that say so.
    processes.adopt(pid).ok();
    let mut session = Session {
        kernel,
        shims: ShimSource::new(settings.owner, ShimLimits::default()),
        order: EventOrder::default(),
        processor: Processor::new(processes),
    };
    let give_up = Arc::new(AtomicBool::new(false));
    let attaching = (!options.no_attach).then(|| {
        let give_up = Arc::clone(&give_up);
        std::thread::spawn(move || attach::attach_until(pid, settings, &give_up))
    });
    let target = ProcessHandle::open(pid).ok();
    let silent = observe::observe(&mut session, pid, attaching, (&give_up, quiet));
    // Who is in cooperative mode for a moment only holds up nobody.
    let before = target.as_ref().and_then(suspension::cooperative);

    let order = &mut session.order;
    session.kernel.scan_last(&mut |event| order.push(event));
    let after = target.as_ref().and_then(suspension::cooperative);
    let before_freeze = MonotonicNs::now();
    let at = session.kernel.freeze();
    let snapshots = session.kernel.thread_times();
    session.kernel.drain(&mut |event| order.push(event));
    session.shims.drain(&mut |event| order.push(event));
    let mut events = Vec::new();
    order.finish(&mut events);
    session.digest(events);
    session.processor.still_there(&snapshots, before_freeze);
    await_names(&mut session);
    let staying = session.shims.detach_all();
    if !staying.is_empty() {
        tracing::warn!(pids = ?staying, "the shim has not left the process yet; it will when its \
             lease runs out");
    }

    let processor = &mut session.processor;
    let snapshots: Vec<&ThreadSnapshot> =
        snapshots.iter().filter(|snapshot| snapshot.times.thread.pid == pid).collect();
    let stacks: Vec<StackId> =
        snapshots.iter().filter_map(|snapshot| place(processor, snapshot).stack).collect();
    processor.name_stacks(&stacks);
    let mut threads: Vec<DumpedThread> =
        snapshots.iter().map(|snapshot| thread(processor, snapshot, at)).collect();
    if threads.is_empty() {
        return Err(Error::Gone { pid });
    }
    threads.sort_by_key(|thread| (thread.tid != pid, thread.tid));
    let process = processor.labels(ThreadId { pid, tid: pid }, false).process;
    let suspension = suspension::of(&threads, before.zip(after), silent);
    let process = process.map_or_else(String::new, |name| clean(&name).into_owned());
    let not_reached = |thread: &&DumpedThread| thread.no_stack == Some(NoStack::NotReached);
    let threads_not_reached = threads.iter().filter(not_reached).count();
    Ok(ThreadDump { pid, process, suspension, threads_not_reached, threads })
}

fn await_names(session: &mut Session) {
    let (begin, mut asked) = (Instant::now(), Instant::now());
    loop {
        let order = &mut session.order;
        session.shims.drain(&mut |event| order.push(event));
        let mut events = Vec::new();
        order.finish(&mut events);
        session.digest(events);
        let open = session.processor.unanswered(MonotonicNs::now());
        if open.is_empty() || begin.elapsed() > NAMES {
            return;
        }
        if asked.elapsed() > ASK_AGAIN {
            asked = Instant::now();
            for request in open {
                session.shims.ask(request.pid, request.address, request.seen);
            }
        }
        std::thread::sleep(ROUND);
    }
}

/// Where a thread was seen.
struct LastSeen {
    stack: Option<StackId>,
    /// The wait it is in now, when the stack is of that.
    wait: Option<WaitInProgress>,
    /// When it was seen there running, or leaving its CPU for another wait than the present one.
    ran: Option<MonotonicNs>,
}

fn place(processor: &Processor, snapshot: &ThreadSnapshot) -> LastSeen {
    let (threads, tid) = (processor.threads(), snapshot.times.thread.tid);
    if let ThreadProgress::Waiting { start, .. } = snapshot.progress
        && let Some(wait) = threads.waiting(tid).filter(|wait| wait.start == start)
    {
        return LastSeen { stack: Some(wait.stack), wait: Some(wait), ran: None };
    }
    let last = threads.last_run(tid);
    LastSeen { stack: last.map(|(_, stack)| stack), wait: None, ran: last.map(|(time, _)| time) }
}

fn thread(processor: &Processor, snapshot: &ThreadSnapshot, at: MonotonicNs) -> DumpedThread {
    let id = snapshot.times.thread;
    let labels = processor.labels(id, true);
    let name = labels.thread_name.map_or_else(|| comm(id), |name| name.to_string());
    let seconds =
        |since: MonotonicNs| Duration::from_nanos(at.0.saturating_sub(since.0)).as_secs_f64();
    let LastSeen { stack, wait, ran } = place(processor, snapshot);
    let frames = stack.map_or(&[][..], |stack| processor.frames(stack));
    let mut thread = DumpedThread {
        tid: id.tid,
        name: clean(&name).into_owned(),
        role: labels.thread_role.unwrap_or_default(),
        state: DumpedState::Running,
        wait_reason: wait.map(|wait| processor.wait_reason(wait.reason, frames)),
        waiting_seconds: None,
        at_least: false,
        woken_from: None,
        stack_age_seconds: stack.map(|_| ran.map_or(0.0, seconds)),
        stack: stack_of(processor, id.pid, frames),
        no_stack: frames.is_empty().then_some(match snapshot.progress {
            ThreadProgress::Waiting { .. } => NoStack::NotReached,
            ThreadProgress::OnCpu { .. } => NoStack::NotMet,
        }),
    };
    if let Some(parts) = WaitParts::of(snapshot, wait.and_then(|wait| wait.left_cpu)) {
        thread.state = match wait {
            _ if parts.wants_cpu => DumpedState::Runnable,
            Some(wait) => state(wait.reason.state),
            None => DumpedState::Blocked,
        };
        thread.waiting_seconds = Some(parts.now.seconds());
        thread.at_least = parts.now.at_least;
        if let Some(slept) = parts.slept {
            let (seconds, at_least) = (slept.seconds(), slept.at_least);
            let wait_reason = thread.wait_reason.take();
            thread.woken_from = Some(WokenFrom { wait_reason, seconds, at_least });
            thread.wait_reason = parts.limited.then_some(THROTTLED);
        }
    }
    thread
}

/// How long something lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AtLeastDuration {
    ns: u64,
    /// Or longer.
    at_least: bool,
}

impl AtLeastDuration {
    fn seconds(self) -> f64 {
        Duration::from_nanos(self.ns).as_secs_f64()
    }
}

/// A wait in progress: what the thread waits for now, and the sleep it was woken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WaitParts {
    now: AtLeastDuration,
    wants_cpu: bool,
    /// It was woken when its cgroup had used up its CPU limit.
    limited: bool,
    slept: Option<AtLeastDuration>,
}

impl WaitParts {
    /// `left_cpu`: when the scheduler last saw it on a CPU.
    fn of(snapshot: &ThreadSnapshot, left_cpu: Option<MonotonicNs>) -> Option<Self> {
        let ThreadSnapshot { times, at, progress } = *snapshot;
        let ThreadProgress::Waiting {
            start,
            blocked_ns,
            runnable_ns,
            new_thread,
            woken_throttled,
            ..
        } = progress
        else {
            return None;
        };
        // It waited when it entered the recording: the wait is older, unless the thread is not, and
        // the scheduler may know how old.
        let older = start <= times.since && !new_thread;
        let left_cpu = left_cpu.filter(|_| older);
        let blocked = |until: u64| AtLeastDuration {
            ns: until.saturating_sub(left_cpu.unwrap_or(start).0),
            at_least: older && left_cpu.is_none(),
        };
        let woken = blocked_ns > 0;
        Some(match runnable_ns {
            0 => Self { now: blocked(at.0), wants_cpu: false, limited: false, slept: None },
            // Of one that wanted a CPU when it entered the recording it is not known since when: it
            // may have slept after it last ran.
            ns => Self {
                now: AtLeastDuration { ns, at_least: older && !woken },
                wants_cpu: true,
                limited: woken_throttled,
                slept: woken.then(|| blocked(at.0.saturating_sub(ns))),
            },
        })
    }
}

fn state(state: WaitStateKey) -> DumpedState {
    match state {
        WaitStateKey::Interruptible => DumpedState::Interruptible,
        WaitStateKey::Uninterruptible => DumpedState::Uninterruptible,
        WaitStateKey::Other => DumpedState::Stopped,
        WaitStateKey::Preempted | WaitStateKey::Throttled | WaitStateKey::Stolen => {
            DumpedState::Runnable
        }
    }
}

fn stack_of(processor: &Processor, pid: u32, frames: &[FrameKey]) -> Vec<DumpedFrame> {
    // Callers are looked up one byte before where they go on; the innermost frame of user code is
    // at its very instruction.
    let innermost =
        frames.iter().position(|key| !matches!(key, FrameKey::Kernel(_) | FrameKey::Marker(_)));
    let named = |(index, &key)| frame(processor, key, pid, u64::from(Some(index) != innermost));
    frames.iter().enumerate().map(named).collect()
}

/// `behind`: bytes from the address in `key` to where it goes on.
fn frame(processor: &Processor, key: FrameKey, pid: u32, behind: u64) -> DumpedFrame {
    let symbol = processor.symbolizer.symbol(key);
    let module = match &symbol.module {
        SymbolModule::Kernel => Some("kernel".to_owned()),
        SymbolModule::Image(image) => processor
            .processes
            .image(*image)
            .map(|image| clean(file_name(&image.path)).into_owned()),
        SymbolModule::Managed(module) => Some(clean(module).into_owned()),
        SymbolModule::Jit | SymbolModule::None => None,
    };
    let code = match key {
        FrameKey::Native { image, address } => processor
            .processes
            .image(image)
            .map(|image| (clean(&image.path).into_owned(), address.wrapping_add(behind))),
        FrameKey::Managed { start, .. } => Some((pid.to_string(), start)),
        FrameKey::Stub { address, .. } | FrameKey::Unknown { address, .. } => {
            Some((pid.to_string(), address.wrapping_add(behind)))
        }
        FrameKey::Kernel(_) | FrameKey::Marker(_) => None,
    };
    let code =
        code.map(|(target, address)| CodeAddress { target, address: format!("{address:#x}") });
    DumpedFrame { function: clean(&symbol.name).into_owned(), module, code }
}

/// The kernel's name of a thread nothing was heard of; empty when it is gone.
fn comm(id: ThreadId) -> String {
    let text = std::fs::read(format!("/proc/{}/task/{}/comm", id.pid, id.tid)).unwrap_or_default();
    whole_text(text.strip_suffix(b"\n").unwrap_or(&text)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::{AtLeastDuration, WaitParts};
    use perfusion_model::event::{
        MonotonicNs, ThreadId, ThreadProgress, ThreadSnapshot, ThreadTimes,
    };

    /// At 1,000, of a thread that entered the recording at 100.
    fn parts(progress: ThreadProgress, left_cpu: Option<u64>) -> Option<WaitParts> {
        let times = ThreadTimes {
            thread: ThreadId { pid: 7, tid: 8 },
            oncpu_ns: 0,
            runnable_ns: 0,
            stolen_ns: 0,
            blocked_ns: 0,
            since: MonotonicNs(100),
            left_out: 0,
        };
        WaitParts::of(
            &ThreadSnapshot { times, at: MonotonicNs(1_000), progress },
            left_cpu.map(MonotonicNs),
        )
    }

    fn waiting(start: u64, runnable_ns: u64) -> ThreadProgress {
        ThreadProgress::Waiting {
            start: MonotonicNs(start),
            blocked_ns: 1_000 - start - runnable_ns,
            runnable_ns,
            kept: true,
            new_thread: false,
            woken_throttled: false,
        }
    }

    fn exactly(ns: u64) -> AtLeastDuration {
        AtLeastDuration { ns, at_least: false }
    }

    fn at_least(ns: u64) -> AtLeastDuration {
        AtLeastDuration { ns, at_least: true }
    }

    #[test]
    fn a_thread_that_sleeps_has_slept_since_it_left_its_cpu() {
        let slept = |start, left_cpu| {
            let parts = parts(waiting(start, 0), left_cpu).unwrap();
            assert_eq!((parts.wants_cpu, parts.slept), (false, None));
            parts.now
        };
        assert_eq!(slept(400, None), exactly(600));
        assert_eq!(
            slept(400, Some(390)),
            exactly(600),
            "the switch is known better than the scheduler's note"
        );
        assert_eq!([slept(100, None), slept(100, Some(20))], [at_least(900), exactly(980)]);
        assert_eq!(parts(ThreadProgress::OnCpu { since: MonotonicNs(400) }, None), None);
    }

    #[test]
    fn a_thread_that_was_woken_wants_a_cpu_since_then_and_not_for_as_long_as_it_slept() {
        for (start, left_cpu, slept) in
            [(400, None, exactly(590)), (100, None, at_least(890)), (100, Some(20), exactly(970))]
        {
            let woken =
                WaitParts { now: exactly(10), wants_cpu: true, limited: false, slept: Some(slept) };
            assert_eq!(parts(waiting(start, 10), left_cpu), Some(woken));
        }
    }

    #[test]
    fn a_thread_that_has_wanted_a_cpu_all_the_time_has_no_sleep_before() {
        let wants = |now| Some(WaitParts { now, wants_cpu: true, limited: false, slept: None });
        assert_eq!(parts(waiting(400, 600), None), wants(exactly(600)), "preempted");
        // The scheduler knows when it last ran, not whether it slept after that.
        assert_eq!(parts(waiting(100, 900), Some(20)), wants(at_least(900)));
        let ThreadProgress::Waiting { start, blocked_ns, runnable_ns, kept, .. } =
            waiting(100, 900)
        else {
            unreachable!()
        };
        let new = ThreadProgress::Waiting {
            start,
            blocked_ns,
            runnable_ns,
            kept,
            new_thread: true,
            woken_throttled: false,
        };
        assert_eq!(parts(new, None), wants(exactly(900)), "it is no older than that");
    }
}
