//! `record --alloc-counts`: what each .NET process of a started program allocates, counted per type
//! by the runtime itself (GCSampledObjectAllocation events). It counts only when somebody wants
//! that as it starts ([`startup`]). Its events go to a session that this program opens while the
//! library holds up the start (`profiler-shim/src/recorder.rs`), for a second at most and only
//! while this program lives. One thread a process reads the stream into a [`tally`].

pub mod startup;
pub mod tally;

use crate::attach::ipc::{self, EventStream, EventSubscription, IpcError, IpcTimeout};
use crate::exact::{Ending, ExactAccount, ExactCount, ExactProcess, ExactType};
use crate::nettrace::{NettraceError, NettraceReader};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::start_ticks;
use perfusion_pprof::COUNTS_PREFIX;
use perfusion_sources::shim::{HoldStarts, StartHold};
use profiler_protocol::load::START_WAIT_NS;
use startup::{StartupError, StartupSession};
use std::ffi::OsString;
use std::io::{self, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tally::{ProcessTally, Tally};

/// Keywords: types, and with their names.
const TYPES: u64 = 0x8_0000 | 0x100_0000;
/// Informational.
const LEVEL: u32 = 4;
/// Most memory a process takes for events that were not read yet; the rest is dropped and counted.
pub const BUFFER_MIB: u32 = 64;
/// Processes that are counted, at most.
const PROCESSES: usize = 256;
const READ_BYTES: usize = 256 << 10;
/// Between looks at whether all is over.
const LOOK: Duration = Duration::from_millis(100);
/// For a runtime to end its session, and to send what it still has.
pub const ENDING: Duration = Duration::from_secs(15);
/// The same where somebody has sent a signal and waits for the end.
pub const ENDING_ON_SIGNAL: Duration = Duration::from_millis(600);
/// Runtimes that are counted in one process: it has one after the other, by exec.
const OF_ONE: usize = 8;
/// For a runtime to open a session. It waits for that no longer than [`START_WAIT_NS`], and has
/// nothing else to do.
const ANSWER: Duration = Duration::from_nanos(START_WAIT_NS);

/// How often the runtime tells of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TypeEventRate {
    /// 5 times a second.
    Low,
    /// 100 times a second.
    High,
}

impl TypeEventRate {
    /// Keywords GCSampledObjectAllocationHigh and GCSampledObjectAllocationLow.
    fn keyword(self) -> u64 {
        match self {
            Self::Low => 0x200_0000,
            Self::High => 0x20_0000,
        }
    }
}

/// One runtime that is counted.
#[derive(Debug)]
struct CountedRuntime {
    pid: u32,
    ticks: Option<u64>,
    name: String,
    /// A thread opens its session, or reads it.
    is_served: bool,
    /// Its session while its events are read.
    session: Option<u64>,
    /// What was counted, or why nothing was.
    result: Option<Result<ProcessTally, String>>,
}

#[derive(Debug, Default)]
struct KnownRuntimes {
    runtimes: Vec<CountedRuntime>,
    /// Runtimes beyond those that are counted.
    left_out: usize,
}

#[derive(Debug, Default)]
struct CountingState {
    /// Most memory each process takes for events that were not read yet, MiB.
    buffer_mib: u32,
    known: Mutex<KnownRuntimes>,
    over: AtomicBool,
    give_up: Arc<AtomicBool>,
}

impl CountingState {
    fn known(&self) -> MutexGuard<'_, KnownRuntimes> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, at: usize, change: impl FnOnce(&mut CountedRuntime)) {
        if let Some(of) = self.known().runtimes.get_mut(at) {
            change(of);
        }
    }
}

/// Where whoever finds the shims' regions tells of runtimes that are held up at their start.
#[derive(Clone, Debug)]
pub struct Starts {
    rate: TypeEventRate,
    shared: Arc<CountingState>,
}

impl HoldStarts for Starts {
    /// A runtime of this process has been held up for so long. A thread of its own opens its
    /// session.
    fn begin(&self, pid: u32, waited: Duration) -> StartHold {
        let hold = StartHold::default();
        let at = {
            let mut known = self.shared.known();
            let of_it = known.runtimes.iter().filter(|of| of.pid == pid).count();
            // Pairs with the store in `finish`.
            let is_over = self.shared.over.load(Ordering::Relaxed);
            if is_over || known.runtimes.len() >= PROCESSES || of_it >= OF_ONE {
                known.left_out += usize::from(!is_over);
                hold.end();
                return hold;
            }
            let (ticks, name) = (start_ticks(pid), name(pid));
            known.runtimes.push(CountedRuntime {
                pid,
                ticks,
                name,
                is_served: true,
                session: None,
                result: None,
            });
            known.runtimes.len() - 1
        };
        let (starts, held) = (self.clone(), hold.clone());
        let serve = move || starts.serve(at, pid, Instant::now().checked_sub(waited), &held);
        if let Err(error) = thread::Builder::new().name("runtime".into()).spawn(serve) {
            self.shared
                .change(at, |of| (of.is_served, of.result) = (false, Some(Err(error.to_string()))));
            hold.end();
        }
        hold
    }
}

impl Starts {
    fn serve(&self, at: usize, pid: u32, held_since: Option<Instant>, hold: &StartHold) {
        let opened = self.open(pid);
        hold.end();
        let is_late = held_since.is_none_or(|since| since.elapsed() >= ANSWER);
        let shared = &self.shared;
        let result = match opened {
            Ok(events) => {
                shared.change(at, |of| of.session = Some(events.session()));
                let read = read(events, pid).map_err(|why| {
                    format!(
                        "its events cannot be read any more, and none of its counts is used: {why}"
                    )
                });
                read.map(|tallied| ProcessTally { is_late, ..tallied })
            }
            Err(error) => Err(error.to_string()),
        };
        shared.change(at, |of| (of.session, of.is_served, of.result) = (None, false, Some(result)));
    }

    fn open(&self, pid: u32) -> Result<EventStream, IpcError> {
        let target = ProcessHandle::open(pid).map_err(|source| IpcError::System {
            pid,
            step: "opening /proc/PID",
            source,
        })?;
        let what = EventSubscription {
            keywords: self.rate.keyword() | TYPES,
            level: LEVEL,
            buffer_mib: self.shared.buffer_mib,
        };
        let give_up = &self.shared.give_up;
        let wait = IpcTimeout::until(ANSWER, give_up);
        let open = |stacks| {
            ipc::listen_from_start(&target, &what, stacks, Arc::clone(give_up), wait.clone())
        };
        match open(false) {
            Err(error) if error.is_unknown_command() => open(true),
            opened => opened,
        }
    }
}

fn name(pid: u32) -> String {
    ProcessHandle::open(pid)
        .map(|target| perfusion_host::process::name::of(&target))
        .unwrap_or_default()
}

/// The counting of one recording.
#[derive(Debug)]
pub struct Counting {
    session: Option<StartupSession>,
    starts: Starts,
}

impl Counting {
    /// Prepares what programs have in their environment. A runtime keeps up to `buffer_mib` MiB of
    /// events that were not read yet.
    ///
    /// # Errors
    /// See [`StartupError`].
    pub fn open(rate: TypeEventRate, buffer_mib: u32) -> Result<Self, StartupError> {
        let session = Some(StartupSession::open(rate)?);
        let shared = Arc::new(CountingState { buffer_mib, ..CountingState::default() });
        Ok(Self { session, starts: Starts { rate, shared } })
    }

    /// What the program must have in its environment.
    #[must_use]
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        self.session.iter().flat_map(StartupSession::environment).collect()
    }

    /// Where runtimes that are held up are to be told of.
    #[must_use]
    pub fn starts(&self) -> Starts {
        self.starts.clone()
    }

    /// Counts nobody more: whoever starts from now on is not held up, and does not count.
    pub fn cease(&mut self) {
        self.starts.shared.over.store(true, Ordering::Relaxed);
        self.session = None;
    }

    /// Ends the counting in all processes. A runtime that has not ended its session after
    /// `guarded_io` is not waited for; what it had told by then is counted, and the rest is said to
    /// be missing.
    #[must_use]
    pub fn finish(mut self, timeout: Duration) -> RecordingCounts {
        self.cease();
        let shared = &self.starts.shared;
        let until = Instant::now() + timeout;
        let is_read = || shared.known().runtimes.iter().all(|of| !of.is_served);
        let open: Vec<(u32, u64)> =
            shared.known().runtimes.iter().filter_map(|of| Some((of.pid, of.session?))).collect();
        for (pid, session) in open {
            let stop = move || {
                let target = ProcessHandle::open(pid).ok()?;
                // One that has ended, or does not answer, ends its stream by that.
                ipc::stop_listening(&target, session, timeout).ok()
            };
            thread::Builder::new().name("stop".into()).spawn(stop).ok();
        }
        while !is_read() && Instant::now() < until {
            thread::sleep(LOOK / 10);
        }
        shared.give_up.store(true, Ordering::Relaxed);
        // A reader looks at that ten times a second.
        let until = Instant::now() + LOOK * 20;
        while !is_read() && Instant::now() < until {
            thread::sleep(LOOK / 10);
        }
        let known = std::mem::take(&mut *shared.known());
        let mut counted = RecordingCounts { processes: Vec::new(), left_out: known.left_out };
        for CountedRuntime { pid, ticks, name, result, .. } in known.runtimes {
            let result = result.unwrap_or_else(|| Err("its events did not end".to_owned()));
            counted.processes.push((ticks, ProcessCounts { pid, name, result }));
        }
        counted.processes.sort_by_key(|(ticks, of)| (*ticks, of.pid));
        counted
    }
}

/// # Errors
/// When events cannot be read any more though they go on: what was counted until then is of a part
/// of the process's time.
fn read(events: EventStream, pid: u32) -> Result<ProcessTally, NettraceError> {
    let mut tally = Tally::new(ProcessHandle::open(pid).ok());
    let mut reader = match NettraceReader::new(BufReader::with_capacity(READ_BYTES, events)) {
        Ok(reader) => reader,
        Err(NettraceError::Read(ended)) => return Ok(tally.finish(0, Some(why_ended(&ended)))),
        Err(malformed) => return Err(malformed),
    };
    let end = loop {
        match reader.read(&mut |event| tally.event(event)) {
            Ok(true) => tally.look(),
            Ok(false) => break None,
            Err(NettraceError::Read(ended)) => break Some(why_ended(&ended)),
            Err(malformed) => return Err(malformed),
        }
    };
    Ok(tally.finish(reader.lost(), end))
}

fn why_ended(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            "it was killed, crashed or became another program".to_owned()
        }
        _ => error.to_string(),
    }
}

/// One process.
#[derive(Debug)]
pub struct ProcessCounts {
    /// Its pid.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// What it allocated, or why that is not known.
    pub result: Result<ProcessTally, String>,
}

/// What was counted.
#[derive(Debug)]
pub struct RecordingCounts {
    /// The processes in the order they started, with when that was.
    pub processes: Vec<(Option<u64>, ProcessCounts)>,
    /// Processes beyond those that are counted.
    pub left_out: usize,
}

impl RecordingCounts {
    /// As exact mode has it, for the profile.
    #[must_use]
    pub fn account(&self) -> ExactAccount {
        let process = |of: &ProcessCounts| {
            let process =
                ExactProcess { pid: of.pid, name: of.name.clone(), ..ExactProcess::default() };
            let Ok(tallied) = &of.result else {
                return ExactProcess { ending: Ending::Declined, ..process };
            };
            let types = tallied.types.iter().map(|found| ExactType {
                name: found.name.shown.to_string(),
                type_raw: found.name.raw.as_deref().map(str::to_owned),
                class: found.id.unwrap_or(0),
                allocated: ExactCount { objects: found.objects, bytes: found.bytes },
                ..ExactType::default()
            });
            ExactProcess { types: types.collect(), ..process }
        };
        let processes = self.processes.iter().map(|(_, of)| process(of)).collect();
        ExactAccount { processes, ..ExactAccount::default() }
    }

    /// What a person is told right after the recording, and what stands in the profile's comments:
    /// a line a process.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.processes.iter().map(|(_, of)| line(of)).collect();
        if self.processes.is_empty() {
            lines.push(
                "no .NET runtime loaded the shim: no .NET program, one with \
                 DOTNET_EnableDiagnostics(_Profiler)=0, or one that does not see the shim's file"
                    .to_owned(),
            );
        }
        if self.left_out > 0 {
            lines.push(format!("{} more processes are not counted", self.left_out));
        }
        lines.into_iter().map(|line| format!("{COUNTS_PREFIX}{line}")).collect()
    }
}

fn line(of: &ProcessCounts) -> String {
    let who = format!("pid {} ({})", of.pid, of.name);
    match &of.result {
        Ok(tallied) => format!("{who}: {tallied}"),
        Err(why) => format!("{who}: not counted: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{ProcessCounts, RecordingCounts};
    use crate::counts::tally::{ProcessTally, TypeTally};
    use crate::exact::Ending;
    use perfusion_pprof::tells_of_uncounted;
    use perfusion_symbolize::types::TypeName;

    #[test]
    fn what_was_counted_in_part_says_so_and_what_was_not_leaves_estimates_alone() {
        let types =
            vec![TypeTally { id: Some(7), name: TypeName::of("Order"), objects: 5, bytes: 120 }];
        let of = |pid, result| {
            (Some(u64::from(pid)), ProcessCounts { pid, name: "shop".to_owned(), result })
        };
        let whole = ProcessTally { types: types.clone(), ..ProcessTally::default() };
        let killed =
            ProcessTally { types, broken: Some("it ended".to_owned()), ..ProcessTally::default() };
        let processes = vec![
            of(1, Ok(whole)),
            of(2, Ok(killed)),
            of(3, Err("its events make no sense".to_owned())),
        ];
        let counted = RecordingCounts { processes, left_out: 0 };
        let lossy: Vec<bool> =
            counted.lines().iter().map(|line| tells_of_uncounted(line)).collect();
        assert_eq!(lossy, [false, true, false], "{:?}", counted.lines());
        let found = counted.account().processes;
        let found: Vec<_> = found.iter().map(|of| (of.pid, of.types.len(), of.ending)).collect();
        assert_eq!(found, [(1, 1, Ending::Ended), (2, 1, Ending::Ended), (3, 0, Ending::Declined)]);
    }
}
