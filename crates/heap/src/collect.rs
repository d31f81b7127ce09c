//! Has the runtime walk its heap, and reads the walk.
//!
//! Two event sessions. The first listens to the walk; its events stream while they are written, so
//! that the runtime's buffer stays small. The second asks for the collection that walks: the
//! runtime runs it before it answers, so a single session would hold the whole walk in the app's
//! memory. The second is ended first, and at once: as long as its keyword is on, every session that
//! begins or ends, another tool's too, would make the runtime collect again (dotnet/runtime
//! `eventtrace.cpp`, `GCHeapCollect`). Both end when this ends, in order or by their sockets.
//!
//! Up to .NET 9 a session's keywords are still counted while it ends, so the end of the second one
//! collects, too, and the end of the first leaves its keywords behind where another tool listens. A
//! third session, without keywords, begins and ends last: then they are counted anew
//! (dotnet/runtime#121462).

use crate::memory_plan::{MemoryPlan, TooLittle, plan};
use crate::read_ahead::ReadAheadStream;
use crate::walk::{HeapSurvey, HeapWalk};
use perfusion_dotnet::attach::ipc::{self, EventStream, EventSubscription, IpcError, IpcTimeout};
use perfusion_dotnet::nettrace::{NettraceError, NettraceEvent, NettraceReader};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::headroom::{Headroom, MemoryCgroups, mib};
use std::collections::HashSet;
use std::io::{self, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Keywords: collections, walk of the heap, types with their names.
const WALK: u64 = 0x1 | 0x10_0000 | 0x8_0000 | 0x100_0000;
/// Keywords: a collection now. Collections are listened to so that the runtime finds out by itself
/// when nobody reads any more.
const COLLECT: u64 = 0x1 | 0x80_0000;
/// Informational.
const LEVEL: u32 = 4;
/// For a runtime that has nothing to do but answer.
const ANSWER: Duration = Duration::from_secs(30);
/// For a collection with a walk: 40 million objects take about ten seconds, and a machine may be
/// loaded.
const COLLECTION: Duration = Duration::from_secs(600);
/// How long an interrupted survey waits for the runtime, so that all is put back in order. Whoever
/// sent the signal waits for the command's end.
const ORDERLY_END: Duration = Duration::from_millis(600);
/// What the runtime calls the thread that sends a session's events (`ep_rt_thread_create`,
/// vm/eventing/eventpipe/ep-rt-coreclr.h). It is a managed one: when it is to begin while the world
/// stands still for a collection, it does so after that, and until then all events stay in the
/// runtime's buffer.
const SENDER: &str = ".NET EventPipe";
/// It looks for events and sleeps a tenth of a second, over and over: who has slept twice has
/// begun. A machine may be loaded.
const SLEPT: u64 = 2;
const BEGINS: Duration = Duration::from_secs(2);
/// Threads among which it is looked for.
const THREADS: usize = 16_384;
/// Between looks at how far it is.
const LOOK: Duration = Duration::from_millis(20);

/// Why there is no survey.
#[derive(Debug, thiserror::Error)]
pub enum SurveyError {
    /// The diagnostics socket.
    #[error(transparent)]
    Ipc(Box<IpcError>),
    /// What the runtime sent.
    #[error("process {pid}: {source}")]
    Stream {
        /// The process.
        pid: u32,
        /// What is wrong with it.
        #[source]
        source: NettraceError,
    },
    /// It is gone.
    #[error("process {pid} ended during the survey")]
    Ended {
        /// The process.
        pid: u32,
    },
    /// It has too little memory left for a survey.
    #[error(
        "process {pid}: a survey of its heap was not begun: it takes at least {} of the process's \
         memory, and {headroom}. The kernel might \
         kill or throttle the process. Raise the limit, or use --force to go on all the same",
        mib(*needed)
    )]
    NoHeadroom {
        /// The process.
        pid: u32,
        /// Bytes.
        needed: u64,
        /// What there is.
        headroom: Box<Headroom>,
    },
    /// It had too little memory left during a survey.
    #[error(
        "process {pid}: the survey of its heap was ended early: {headroom}, and {} must be left. \
         Its runtime gives its buffer back. Raise the \
         limit, use a smaller --buffer, or use --force to go on all the same",
        mib(*floor)
    )]
    HeadroomGone {
        /// The process.
        pid: u32,
        /// Bytes below which a survey ends.
        floor: u64,
        /// What there was.
        headroom: Box<Headroom>,
    },
    /// No walk came.
    #[error("process {pid}: the runtime ended its session without a walk over the heap")]
    NoWalk {
        /// The process.
        pid: u32,
    },
    /// Ctrl-C.
    #[error("interrupted: process {pid} {left}")]
    Interrupted {
        /// The process.
        pid: u32,
        /// In which state it is.
        left: String,
    },
    /// A thread could not be started, or panicked.
    #[error("process {pid}: a thread of perfusion could not run: {source}")]
    Thread {
        /// The process.
        pid: u32,
        /// Why.
        source: io::Error,
    },
}

impl From<IpcError> for SurveyError {
    fn from(error: IpcError) -> Self {
        Self::Ipc(Box::new(error))
    }
}

/// How to take a survey.
#[derive(Clone, Debug)]
pub struct SurveySettings {
    /// Most bytes of the graph.
    pub limit_bytes: usize,
    /// Most MiB of the runtime's buffer, and when to end early for the process's sake.
    pub plan: MemoryPlan,
    /// Weak handles of which it is asked what they watch.
    pub handles: Arc<HashSet<u64>>,
    /// Raised when the walk is over, though not yet understood.
    pub walked: Arc<AtomicBool>,
}

/// How far a survey is, as the runtime's events say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SurveyProgress {
    /// Objects met.
    pub objects: u64,
    /// The collection that was asked for has begun: the managed threads have been stopped.
    pub stopped: bool,
}

/// What one thread tells the other while a survey is taken.
#[derive(Debug, Default)]
struct SurveyState {
    /// Objects met.
    objects: AtomicU64,
    /// Raised when the collection was seen to begin.
    stopped: AtomicBool,
    /// Raised when the survey is over, however it ended.
    over: AtomicBool,
    /// Raised when nothing more is to be read.
    give_up: Arc<AtomicBool>,
}

impl SurveyState {
    /// Each of these is told for itself; nothing else is told by it. Pairs with the stores of the
    /// reader.
    fn progress(&self) -> SurveyProgress {
        let stopped = self.stopped.load(Ordering::Relaxed);
        SurveyProgress { objects: self.objects.load(Ordering::Relaxed), stopped }
    }
}

/// Raises `give_up` a while after `interrupted` was raised: all waits for the runtime end then,
/// whatever they wait for. Ends with the survey.
fn end_waits_after(interrupted: &Arc<AtomicBool>, shared: &Arc<SurveyState>) -> io::Result<()> {
    let (interrupted, shared) = (Arc::clone(interrupted), Arc::clone(shared));
    let run = move || {
        let mut since = None;
        // Pairs with the stores of the signal's thread and of whoever takes the survey; nothing
        // else is told by them.
        while !shared.over.load(Ordering::Relaxed) {
            if interrupted.load(Ordering::Relaxed)
                && since.get_or_insert_with(Instant::now).elapsed() > ORDERLY_END
            {
                return shared.give_up.store(true, Ordering::Relaxed);
            }
            thread::sleep(LOOK);
        }
    };
    thread::Builder::new().name("interrupt".into()).spawn(run).map(drop)
}

/// Plans a survey of the process: see [`plan`]. Where memory is short enough for it to matter how
/// wide the widest object may be, the runtime is asked how large its large objects are, which takes
/// a collection. Raising `interrupted` ends that early.
///
/// # Errors
/// [`SurveyError::NoHeadroom`], and where the runtime cannot be asked.
pub fn planned(
    target: &ProcessHandle,
    wanted_mib: u32,
    force: bool,
    interrupted: &Arc<AtomicBool>,
) -> Result<MemoryPlan, SurveyError> {
    let resident = target.resident_bytes().unwrap_or(0);
    let at_least = planned_for(target, wanted_mib, force, 0)?;
    // No object is larger than its process.
    let at_most = planned_for(target, wanted_mib, force, resident);
    if force || at_most.is_ok_and(|plan| plan.buffer_mib == at_least.buffer_mib) {
        return Ok(at_least);
    }
    let widest = large_object_bytes(target, interrupted)?.unwrap_or(resident);
    planned_for(target, wanted_mib, force, widest)
}

/// Plans a survey of the process, in which no object has more bytes than `widest`.
///
/// # Errors
/// [`SurveyError::NoHeadroom`].
pub fn planned_for(
    target: &ProcessHandle,
    wanted_mib: u32,
    force: bool,
    widest: u64,
) -> Result<MemoryPlan, SurveyError> {
    let headroom = MemoryCgroups::of(target).headroom();
    let resident = target.resident_bytes().unwrap_or(0);
    plan(headroom, resident, widest, wanted_mib, force).map_err(|TooLittle { needed, headroom }| {
        SurveyError::NoHeadroom { pid: target.pid(), needed, headroom: Box::new(headroom) }
    })
}

/// Bytes of the heaps of large and pinned objects, by a collection; `None` where the runtime does
/// not say.
fn large_object_bytes(
    target: &ProcessHandle,
    interrupted: &Arc<AtomicBool>,
) -> Result<Option<u64>, SurveyError> {
    let collected = collect_and_read(target, interrupted, large_objects_told);
    let forgotten = forget(target, interrupted);
    if interrupted.load(Ordering::Relaxed) {
        let paused = "may have been paused for a collection";
        return Err(interrupted_with(target.pid(), paused, forgotten.is_ok()));
    }
    let told = collected?;
    forgotten?;
    Ok(told)
}

/// What the last collection among these events has left of large and pinned objects
/// (`GCHeapStats`: bytes and promoted bytes of generations 0 to 3, two more numbers of 8 bytes,
/// three of 4, the runtime's number, and from version 2 on the bytes of pinned ones).
fn large_objects_told(events: impl io::Read) -> Option<u64> {
    const HEAP_STATS: u32 = 4;
    const LARGE_AT: usize = 6 * 8;
    const PINNED_AT: usize = 10 * 8 + 3 * 4 + 2;
    let mut reader = NettraceReader::new(events).ok()?;
    let mut told = None;
    let mut see = |event: NettraceEvent<'_>| {
        let number = |at: usize| {
            let bytes = event.payload.get(at..)?.first_chunk::<8>()?;
            Some(u64::from_le_bytes(*bytes))
        };
        if event.id == HEAP_STATS
            && let Some(large) = number(LARGE_AT)
        {
            told = Some(large.saturating_add(number(PINNED_AT).unwrap_or(0)));
        }
    };
    while reader.read(&mut see).ok()? {}
    told
}

/// Takes a survey; `progress` is told how far it is. Raising `interrupted` ends it early.
///
/// # Errors
/// See [`SurveyError`].
pub fn survey(
    target: &Arc<ProcessHandle>,
    settings: &SurveySettings,
    interrupted: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(SurveyProgress),
) -> Result<HeapSurvey, SurveyError> {
    let shared = Arc::new(SurveyState::default());
    let pid = target.pid();
    end_waits_after(interrupted, &shared).map_err(|source| SurveyError::Thread { pid, source })?;
    let taken = take(target, settings, interrupted, &shared, progress);
    shared.over.store(true, Ordering::Relaxed);
    taken.map_err(|error| if target.is_alive() { error } else { SurveyError::Ended { pid } })
}

fn take(
    target: &Arc<ProcessHandle>,
    settings: &SurveySettings,
    interrupted: &Arc<AtomicBool>,
    shared: &Arc<SurveyState>,
    progress: &mut dyn FnMut(SurveyProgress),
) -> Result<HeapSurvey, SurveyError> {
    let pid = target.pid();
    let failed = |source| SurveyError::Thread { pid, source };
    let what =
        EventSubscription { keywords: WALK, level: LEVEL, buffer_mib: settings.plan.buffer_mib };
    let senders = target.threads_called(SENDER, THREADS);
    let wait = IpcTimeout::until(ANSWER, &shared.give_up);
    // On a thread, for it may take long and how far it is is to be said meanwhile.
    let opening = {
        let (target, give_up) = (Arc::clone(target), Arc::clone(&shared.give_up));
        let run = move || ipc::listen(&target, &what, give_up, wait);
        thread::Builder::new().name("opening".into()).spawn(run).map_err(failed)?
    };
    while !opening.is_finished() {
        progress(shared.progress());
        thread::sleep(LOOK);
    }
    let opened = opening.join().map_err(|_| failed(io::Error::other("it panicked")))?;
    let events = match opened {
        Err(IpcError::GivenUp { .. }) => {
            return Err(interrupted_with(pid, "was not seen to be paused", false));
        }
        opened => opened?,
    };
    let session = events.session();
    let reading: JoinHandle<ReadWalk> = {
        let shared = Arc::clone(shared);
        let events = ReadAheadStream::of(events, settings.limit_bytes).map_err(failed)?;
        let walk = HeapWalk::new(settings.limit_bytes).with_handles(Arc::clone(&settings.handles));
        let run = move || {
            ReadAheadStream::step_back();
            read(events, walk, &shared)
        };
        thread::Builder::new().name("walk".into()).spawn(run).map_err(failed)?
    };
    wait_for_sender(target, &senders, interrupted);
    // Nothing has stopped yet, nor need it.
    if interrupted.load(Ordering::Relaxed) {
        let put_back = put_back(target, session, shared);
        shared.give_up.store(true, Ordering::Relaxed);
        return Err(interrupted_with(pid, "was not paused", put_back.is_ok()));
    }
    let collecting: JoinHandle<Result<(), IpcError>> = {
        let (target, shared) = (Arc::clone(target), Arc::clone(shared));
        let run = move || collect(&target, &shared);
        thread::Builder::new().name("collection".into()).spawn(run).map_err(failed)?
    };
    let cgroups = MemoryCgroups::of(target);
    let floor = settings.plan.floor_bytes;
    // Pairs with the store of the signal's thread, and of the reader's; nothing else is told by
    // them.
    while !collecting.is_finished() {
        progress(shared.progress());
        if shared.give_up.load(Ordering::Relaxed) {
            let paused = match shared.progress().stopped {
                true => WAS_PAUSED,
                false => "has not been seen to be paused, and may still be",
            };
            return Err(interrupted_with(pid, paused, false));
        }
        if let Some(headroom) = cgroups.headroom().filter(|headroom| headroom.bytes < floor) {
            // Closed sockets are what a runtime finds out soonest: it ends the sessions and gives
            // their memory back.
            shared.give_up.store(true, Ordering::Relaxed);
            return Err(SurveyError::HeadroomGone { pid, floor, headroom: Box::new(headroom) });
        }
        thread::sleep(LOOK);
    }
    let collected = collecting.join();
    // Pairs with the load of whoever waits for it; nothing else is told by it.
    settings.walked.store(true, Ordering::Relaxed);
    let stopped = put_back(target, session, shared);
    if stopped.is_err() || !matches!(collected, Ok(Ok(()))) {
        // The stream may not end by itself.
        shared.give_up.store(true, Ordering::Relaxed);
    }
    while !reading.is_finished() {
        progress(shared.progress());
        if interrupted.load(Ordering::Relaxed) {
            // What was read ahead is understood by nobody any more.
            shared.give_up.store(true, Ordering::Relaxed);
            return Err(interrupted_with(pid, WAS_PAUSED, stopped.is_ok()));
        }
        thread::sleep(LOOK);
    }
    let panicked = |_| failed(io::Error::other("it panicked"));
    let ReadWalk { walk, lost, end } = reading.join().map_err(panicked)?;
    collected.map_err(panicked)??;
    if interrupted.load(Ordering::Relaxed) {
        return Err(interrupted_with(pid, WAS_PAUSED, stopped.is_ok()));
    }
    match end {
        Err(source) => return Err(SurveyError::Stream { pid, source }),
        _ if !walk.has_begun() => return Err(SurveyError::NoWalk { pid }),
        _ => {}
    }
    if let Err(error) = stopped {
        tracing::warn!(
            pid,
            "the runtime may go on listening to itself until it finds our sockets closed: {error}"
        );
    }
    Ok(walk.finish(lost))
}

/// Waits until the thread has begun that sends the events of the session just opened; `others` were
/// there before. Not for ever: without it more is lost, which is told.
fn wait_for_sender(target: &ProcessHandle, others: &[(u32, u64)], interrupted: &AtomicBool) {
    let until = Instant::now() + BEGINS;
    let is_new = |tid: u32| others.iter().all(|(other, _)| *other != tid);
    let has_begun = |&(tid, slept): &(u32, u64)| is_new(tid) && slept >= SLEPT;
    while !target.threads_called(SENDER, THREADS).iter().any(has_begun) {
        if Instant::now() >= until || interrupted.load(Ordering::Relaxed) {
            return tracing::debug!(
                pid = target.pid(),
                "no thread of the runtime is seen to send events"
            );
        }
        thread::sleep(LOOK);
    }
}

/// Nothing is left to be put right in the process.
///
/// # Errors
/// When the survey was given up.
pub fn unless_interrupted(pid: u32, interrupted: &AtomicBool) -> Result<(), SurveyError> {
    if interrupted.load(Ordering::Relaxed) {
        return Err(interrupted_with(pid, WAS_PAUSED, true));
    }
    Ok(())
}

/// The collection was asked for, and is over.
const WAS_PAUSED: &str = "was paused for the collection all the same";

fn interrupted_with(pid: u32, paused: &str, put_back: bool) -> SurveyError {
    let settings = match put_back {
        true => "it has its event settings back",
        false => {
            "it does not answer, and puts its event settings back when it finds our sockets closed"
        }
    };
    SurveyError::Interrupted { pid, left: format!("{paused}; {settings}") }
}

/// Ends the session that listens, and leaves no keywords behind.
fn put_back(target: &ProcessHandle, session: u64, shared: &SurveyState) -> Result<(), IpcError> {
    let wait = IpcTimeout::until(COLLECTION, &shared.give_up);
    ipc::stop_listening(target, session, wait).and_then(|()| forget(target, &shared.give_up))
}

/// Opens the session that makes the runtime collect, and ends it.
fn collect(target: &ProcessHandle, shared: &SurveyState) -> Result<(), IpcError> {
    collect_and_read(target, &shared.give_up, |mut events| {
        // What is left unread holds up nobody.
        io::copy(&mut events, &mut io::sink()).ok();
        Some(())
    })
    .map(drop)
}

/// The same; `read` is given the session's events, and its answer is `None` where it panics.
fn collect_and_read<T: Send + 'static>(
    target: &ProcessHandle,
    give_up: &Arc<AtomicBool>,
    read: impl FnOnce(BufReader<EventStream>) -> Option<T> + Send + 'static,
) -> Result<Option<T>, IpcError> {
    let what = EventSubscription { keywords: COLLECT, level: LEVEL, buffer_mib: 1 };
    let wait = IpcTimeout::until(COLLECTION, give_up);
    let events = ipc::listen(target, &what, Arc::clone(give_up), wait.clone())?;
    let session = events.session();
    // The end of a session waits until its events are read.
    let reading = thread::spawn(move || read(BufReader::new(events)));
    ipc::stop_listening(target, session, wait)?;
    Ok(reading.join().ok().flatten())
}

/// Makes the runtime count the keywords that are asked for.
fn forget(target: &ProcessHandle, give_up: &Arc<AtomicBool>) -> Result<(), IpcError> {
    let what = EventSubscription { keywords: 0, level: 0, buffer_mib: 1 };
    let wait = IpcTimeout::until(ANSWER, give_up);
    let events = ipc::listen(target, &what, Arc::clone(give_up), wait.clone())?;
    ipc::stop_listening(target, events.session(), wait)
}

/// What was read.
struct ReadWalk {
    walk: HeapWalk,
    lost: u64,
    end: Result<(), NettraceError>,
}

fn read(events: ReadAheadStream, mut walk: HeapWalk, shared: &SurveyState) -> ReadWalk {
    let mut reader = match NettraceReader::new(events) {
        Ok(reader) => reader,
        Err(error) => return ReadWalk { walk, lost: 0, end: Err(error) },
    };
    let end = loop {
        match reader.read(&mut |event| walk.event(event)) {
            // Pairs with the loads of `Shared::progress`; nothing else is told by them.
            Ok(true) => {
                shared.objects.store(walk.objects(), Ordering::Relaxed);
                shared.stopped.store(walk.has_stopped_threads(), Ordering::Relaxed);
            }
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    ReadWalk { walk, lost: reader.lost(), end }
}
