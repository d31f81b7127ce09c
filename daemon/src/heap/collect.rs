//! Has the runtime walk its heap, and reads the walk.
//!
//! Two event sessions. The first listens to the walk; its events stream while they are written, so that the runtime's buffer stays small.
//! The second asks for the collection that walks: the runtime runs it before it answers, so a single session would hold the whole walk
//! in the app's memory. The second is ended first, and at once: as long as its keyword is on, every session that begins or ends, another
//! tool's too, would make the runtime collect again (dotnet/runtime `eventtrace.cpp`, `GCHeapCollect`). Both end when this ends, in order or
//! by their sockets.
//!
//! Up to .NET 9 a session's keywords are still counted while it ends, so the end of the second one collects, too, and the end of the first leaves
//! its keywords behind where another tool listens. A third session, without keywords, begins and ends last: then they are counted anew
//! (dotnet/runtime#121462).

use super::ahead::Ahead;
use super::nettrace::{NettraceError, Reader};
use super::walk::{Survey, Walk};
use crate::attach::ipc::{self, IpcError, Listen};
use crate::attach::target::Target;
use std::collections::HashSet;
use std::io::{self, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Keywords: collections, walk of the heap, types with their names.
const WALK: u64 = 0x1 | 0x10_0000 | 0x8_0000 | 0x100_0000;
/// Keywords: a collection now. Collections are listened to so that the runtime finds out by itself when nobody reads any more.
const COLLECT: u64 = 0x1 | 0x80_0000;
/// Informational.
const LEVEL: u32 = 4;
/// For a runtime that has nothing to do but answer.
const ANSWER: Duration = Duration::from_secs(30);
/// For a collection with a walk: 40 million objects take about ten seconds, and a machine may be loaded.
const COLLECTION: Duration = Duration::from_secs(600);
/// How long an interrupted survey waits for the collection, so that all is put back in order.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the runtime calls the thread that sends a session's events (`ep_rt_thread_create`, vm/eventing/eventpipe/ep-rt-coreclr.h). It is a managed one: when it is
/// to begin while the world stands still for a collection, it does so after that, and until then all events stay in the runtime's buffer.
const SENDER: &str = ".NET EventPipe";
/// It looks for events and sleeps a tenth of a second, over and over: who has slept twice has begun. A machine may be loaded.
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
pub(super) struct Settings {
    /// Most bytes of the graph.
    pub(super) limit_bytes: usize,
    /// Most MiB of the runtime's buffer.
    pub(super) buffer_mib: u32,
    /// Weak handles of which it is asked what they watch.
    pub(super) handles: Arc<HashSet<u64>>,
    /// Raised when the walk is over, though not yet understood.
    pub(super) walked: Arc<AtomicBool>,
}

/// What one thread tells the other while a survey is taken.
#[derive(Debug, Default)]
struct Shared {
    /// Objects met.
    objects: AtomicU64,
    /// Raised when nothing more is to be read.
    give_up: Arc<AtomicBool>,
}

/// Takes a survey; `progress` is told how many objects were met. Raising `interrupted` ends it early.
///
/// # Errors
/// See [`SurveyError`].
pub(super) fn survey(
    target: &Arc<Target>,
    settings: &Settings,
    interrupted: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<Survey, SurveyError> {
    take(target, settings, interrupted, progress)
        .map_err(|error| if target.is_alive() { error } else { SurveyError::Ended { pid: target.pid() } })
}

fn take(
    target: &Arc<Target>,
    settings: &Settings,
    interrupted: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<Survey, SurveyError> {
    let pid = target.pid();
    let failed = |source| SurveyError::Thread { pid, source };
    let shared = Arc::new(Shared::default());
    let what = Listen { keywords: WALK, level: LEVEL, buffer_mib: settings.buffer_mib };
    let senders = target.threads_called(SENDER, THREADS);
    let events = ipc::listen(target, &what, Arc::clone(&shared.give_up), ANSWER)?;
    let session = events.session();
    let reading: JoinHandle<Read> = {
        let shared = Arc::clone(&shared);
        let events = Ahead::of(events, settings.limit_bytes).map_err(failed)?;
        let walk = Walk::new(settings.limit_bytes).with_handles(Arc::clone(&settings.handles));
        let run = move || {
            Ahead::step_back();
            read(events, walk, &shared.objects)
        };
        thread::Builder::new().name("walk".into()).spawn(run).map_err(failed)?
    };
    wait_for_sender(target, &senders, interrupted);
    // Nothing has stopped yet, nor need it.
    if interrupted.load(Ordering::Relaxed) {
        let put_back = put_back(target, session, &shared);
        shared.give_up.store(true, Ordering::Relaxed);
        return Err(interrupted_with(pid, "was not paused", put_back.is_ok()));
    }
    let collecting: JoinHandle<Result<(), IpcError>> = {
        let (target, shared) = (Arc::clone(target), Arc::clone(&shared));
        let run = move || collect(&target, &shared);
        thread::Builder::new().name("collection".into()).spawn(run).map_err(failed)?
    };
    // Pairs with the store of the signal's thread, and of the reader's; nothing else is told by them.
    let mut since = None;
    while !collecting.is_finished() {
        progress(shared.objects.load(Ordering::Relaxed));
        if interrupted.load(Ordering::Relaxed) && since.get_or_insert_with(Instant::now).elapsed() > PATIENCE
        {
            shared.give_up.store(true, Ordering::Relaxed);
            return Err(interrupted_with(pid, "is paused by now, or will be", false));
        }
        thread::sleep(LOOK);
    }
    let collected = collecting.join();
    // Pairs with the load of whoever waits for it; nothing else is told by it.
    settings.walked.store(true, Ordering::Relaxed);
    let stopped = put_back(target, session, &shared);
    if stopped.is_err() || !matches!(collected, Ok(Ok(()))) {
        // The stream may not end by itself.
        shared.give_up.store(true, Ordering::Relaxed);
    }
    while !reading.is_finished() {
        progress(shared.objects.load(Ordering::Relaxed));
        if interrupted.load(Ordering::Relaxed) {
            shared.give_up.store(true, Ordering::Relaxed);
        }
        thread::sleep(LOOK);
    }
    let panicked = |_| failed(io::Error::other("it panicked"));
    let Read { walk, lost, end } = reading.join().map_err(panicked)?;
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

/// Waits until the thread has begun that sends the events of the session just opened; `others` were there before. Not for ever: without it more is lost, which is told.
fn wait_for_sender(target: &Target, others: &[(u32, u64)], interrupted: &AtomicBool) {
    let until = Instant::now() + BEGINS;
    let is_new = |tid: u32| others.iter().all(|(other, _)| *other != tid);
    let has_begun = |&(tid, slept): &(u32, u64)| is_new(tid) && slept >= SLEPT;
    while !target.threads_called(SENDER, THREADS).iter().any(has_begun) {
        if Instant::now() >= until || interrupted.load(Ordering::Relaxed) {
            return tracing::debug!(pid = target.pid(), "no thread of the runtime is seen to send events");
        }
        thread::sleep(LOOK);
    }
}

/// Nothing is left to be put right in the process.
///
/// # Errors
/// When the survey was given up.
pub(super) fn unless_interrupted(pid: u32, interrupted: &AtomicBool) -> Result<(), SurveyError> {
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
        false => "it does not answer, and puts its event settings back when it finds our sockets closed",
    };
    SurveyError::Interrupted { pid, left: format!("{paused}; {settings}") }
}

/// Ends the session that listens, and leaves no keywords behind.
fn put_back(target: &Target, session: u64, shared: &Shared) -> Result<(), IpcError> {
    ipc::stop_listening(target, session, COLLECTION).and_then(|()| forget(target, shared))
}

/// Opens the session that makes the runtime collect, and ends it.
fn collect(target: &Target, shared: &Shared) -> Result<(), IpcError> {
    let what = Listen { keywords: COLLECT, level: LEVEL, buffer_mib: 1 };
    let events = ipc::listen(target, &what, Arc::clone(&shared.give_up), COLLECTION)?;
    let session = events.session();
    // The end of a session waits until its events are read.
    let draining = thread::spawn(move || io::copy(&mut BufReader::new(events), &mut io::sink()));
    let stopped = ipc::stop_listening(target, session, COLLECTION);
    drop(draining);
    stopped
}

/// Makes the runtime count the keywords that are asked for.
fn forget(target: &Target, shared: &Shared) -> Result<(), IpcError> {
    let what = Listen { keywords: 0, level: 0, buffer_mib: 1 };
    let events = ipc::listen(target, &what, Arc::clone(&shared.give_up), ANSWER)?;
    ipc::stop_listening(target, events.session(), ANSWER)
}

/// What was read.
struct Read {
    walk: Walk,
    lost: u64,
    end: Result<(), NettraceError>,
}

fn read(events: Ahead, mut walk: Walk, objects: &AtomicU64) -> Read {
    let mut reader = match Reader::new(events) {
        Ok(reader) => reader,
        Err(error) => return Read { walk, lost: 0, end: Err(error) },
    };
    let end = loop {
        match reader.read(&mut |event| walk.event(event)) {
            Ok(true) => objects.store(walk.objects(), Ordering::Relaxed),
            Ok(false) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    Read { walk, lost: reader.lost(), end }
}
