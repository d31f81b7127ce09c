//! Several attaches at once. One that is stalled, by a process that is stopped or that means harm,
//! holds up its worker for [`ATTACH_TIMEOUT`](super::ATTACH_TIMEOUT) and a little more: so whoever
//! owns processes has one worker at a time, and no user has all.
//!
//! A file system whose server does not answer, such as that of a process's temporary directory, may
//! block one for ever, and no signal ends that. Such an attach is given up after [`LONGEST`], and
//! its thread is abandoned. Until that thread ends nothing else of the same owner is attached to,
//! because that would block as well. The number of such threads in this process is bounded.

use super::{AttachError, Attached, attach};
use perfusion_host::abandoned::AbandonedThreads;
use perfusion_host::priority;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_sources::shim::ShimSettings;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const WORKERS: usize = 4;
/// How long an attach may take. Whatever waits for the process ends by itself before that, unless
/// several things take as long as they may.
const LONGEST: Duration = Duration::from_secs(30);
/// Most abandoned threads that have not ended yet. With so many nothing is attached to any more.
const MOST_ABANDONED: usize = 16;
/// How long the end of the workers is waited for. Most attaches take a tenth of a second; one that
/// is left alone does no harm: what it still loads finds nobody listening, goes quiet within 2 s
/// and leaves.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Who decides how long an attach takes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AttachOwner {
    user: u32,
    cgroup: String,
}

impl AttachOwner {
    fn of(pid: u32) -> Self {
        let target = ProcessHandle::open(pid);
        let user = target.as_ref().ok().and_then(|target| target.file_owner().ok());
        let cgroup = target.ok().and_then(|target| target.cgroup().ok());
        // One that has ended is found out by the attach.
        Self { user: user.map_or(u32::MAX, |(user, _)| user), cgroup: cgroup.unwrap_or_default() }
    }
}

/// Threads that nobody waits for any more, and whose processes they attach to.
struct Abandoned(Mutex<AbandonedThreads<AttachOwner>>);

/// Those of all recordings of this process: each has workers of its own, and what holds an attach
/// up knows nothing of that.
static ABANDONED: Abandoned = Abandoned::new();

impl Abandoned {
    const fn new() -> Self {
        Self(Mutex::new(AbandonedThreads::new()))
    }

    fn add(&self, owner: AttachOwner, thread: JoinHandle<()>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.add(owner, thread);
        let attaches = all.holders().len();
        if attaches == MOST_ABANDONED {
            tracing::warn!(
                attaches,
                "so many attaches are held up that no other is begun before one of them ends: file \
                 systems that processes use do not answer"
            );
        }
    }

    /// What holds up an attach to a process of this owner's before it has begun.
    fn holds_up(&self, owner: &AttachOwner) -> Option<String> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.holders().any(|other| other == owner) {
            return Some(
                "an earlier attach, to this process or another one of its user and cgroup,"
                    .to_owned(),
            );
        }
        let attaches = all.holders().len();
        (attaches >= MOST_ABANDONED).then(|| format!("each of {attaches} other attaches"))
    }
}

/// What became of an attach, and what it was for.
pub type AttachOutcome<T> = (T, Result<Attached, AttachError>);

/// An attach that has not been given up.
struct RunningAttach<T> {
    pid: u32,
    what: T,
    owner: AttachOwner,
    since: Instant,
    thread: JoinHandle<()>,
}

/// The threads, one for each attach.
pub struct AttachWorkers<T> {
    start: Box<dyn Fn(u32, T) -> io::Result<JoinHandle<()>> + Send>,
    running: Vec<RunningAttach<T>>,
    abandoned: &'static Abandoned,
}

impl<T: Clone + PartialEq + Send + 'static> AttachWorkers<T> {
    /// None are at work yet; each attach has settings of its own. `done` is called on their
    /// threads.
    #[must_use]
    pub fn new(
        settings: impl Fn(&T) -> ShimSettings + Clone + Send + 'static,
        done: impl Fn(AttachOutcome<T>) + Clone + Send + 'static,
    ) -> Self {
        Self::with(move |pid, what| attach(pid, settings(what)), done, &ABANDONED)
    }

    fn with(
        attach: impl Fn(u32, &T) -> Result<Attached, AttachError> + Clone + Send + 'static,
        done: impl Fn(AttachOutcome<T>) + Clone + Send + 'static,
        abandoned: &'static Abandoned,
    ) -> Self {
        let start = move |pid, what| {
            let (attach, done) = (attach.clone(), done.clone());
            let work = move || {
                priority::wait_for_others();
                let result = attach(pid, &what);
                done((what, result));
            };
            std::thread::Builder::new().name("attach".into()).spawn(work)
        };
        Self { start: Box::new(start), running: Vec::new(), abandoned }
    }

    /// Begins to attach to `pid` if a worker may be had for it now; false when it has its turn
    /// later. [`AttachWorkers::finished`] is to be told of its end.
    ///
    /// # Errors
    /// When it cannot be begun before an earlier one ends that was given up, and when there is no
    /// thread for it.
    pub fn begin(&mut self, pid: u32, what: &T) -> Result<bool, AttachError> {
        if self.running.len() >= WORKERS {
            return Ok(false);
        }
        let owner = AttachOwner::of(pid);
        if let Some(what) = self.abandoned.holds_up(&owner) {
            return Err(AttachError::HeldUp { pid, what });
        }
        let of_user = self.running.iter().filter(|other| other.owner.user == owner.user).count();
        if of_user >= WORKERS - 1 || self.running.iter().any(|other| other.owner == owner) {
            return Ok(false);
        }
        let thread = (self.start)(pid, what.clone())
            .map_err(|source| AttachError::NoThread { pid, source })?;
        self.running.push(RunningAttach {
            pid,
            what: what.clone(),
            owner,
            since: Instant::now(),
            thread,
        });
        Ok(true)
    }

    /// This attach is over. False when it had been given up.
    pub fn finished(&mut self, what: &T) -> bool {
        let before = self.running.len();
        self.running.retain(|other| other.what != *what);
        self.running.len() < before
    }

    /// True while it is attached to.
    #[must_use]
    pub fn is_running(&self, what: &T) -> bool {
        self.running.iter().any(|other| other.what == *what)
    }

    /// Gives up those that have taken too long. Their threads are abandoned, because nothing can
    /// end what they wait for.
    pub fn give_up(&mut self) -> Vec<(T, AttachError)> {
        self.give_up_after(LONGEST)
    }

    fn give_up_after(&mut self, longest: Duration) -> Vec<(T, AttachError)> {
        let late = self.running.extract_if(.., |one| one.since.elapsed() >= longest);
        late.map(|RunningAttach { pid, what, owner, thread, .. }| {
            self.abandoned.add(owner, thread);
            (what, AttachError::HeldUp { pid, what: "the attach".to_owned() })
        })
        .collect()
    }

    /// Lets them end, for a while.
    pub fn stop(self) {
        let deadline = Instant::now() + END_TIMEOUT;
        for RunningAttach { owner, thread, .. } in self.running {
            if let Some(thread) = join_until(deadline, thread) {
                self.abandoned.add(owner, thread);
            }
        }
    }
}

/// Waits for a thread that may hang in what others decide, no longer than until `deadline`; answers
/// one that is still at work then.
fn join_until(deadline: Instant, thread: JoinHandle<()>) -> Option<JoinHandle<()>> {
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
    }
    if !thread.is_finished() {
        tracing::warn!("a process holds its attach up; it is not waited for");
        return Some(thread);
    }
    // One that panicked has said so.
    thread.join().ok();
    None
}

/// Waits for a thread that attaches as long as [`AttachWorkers::stop`] does.
pub fn join(thread: JoinHandle<()>) {
    join_until(Instant::now() + END_TIMEOUT, thread);
}

#[cfg(test)]
mod tests {
    use super::{Abandoned, AttachOwner, AttachWorkers, END_TIMEOUT, MOST_ABANDONED};
    use crate::attach::ipc::RuntimeInfo;
    use crate::attach::{AttachError, Attached};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    /// For what is done at once, on a machine that is busy with other things.
    const MINUTE: Duration = Duration::from_secs(60);
    /// Nobody has this pid (PID_MAX_LIMIT).
    const NOBODY: u32 = 1 << 23;

    type OutcomeReceiver = Receiver<(&'static str, bool)>;

    /// Attaches to this process are over, well, when the sender says so or has gone; all others
    /// fail at once.
    fn workers(
        abandoned: &'static Abandoned,
    ) -> (AttachWorkers<&'static str>, Sender<()>, OutcomeReceiver) {
        let (release, stalled) = channel::<()>();
        let (tell, told) = channel();
        let stalled = Arc::new(Mutex::new(stalled));
        let attach = move |pid, _: &&str| {
            if pid != std::process::id() {
                return Err(AttachError::NoSuchProcess { pid });
            }
            stalled.lock().unwrap().recv().ok();
            Ok(Attached { pid, info: RuntimeInfo::default(), took: Duration::ZERO })
        };
        let done = move |(what, result): super::AttachOutcome<_>| {
            tell.send((what, result.is_ok())).ok();
        };
        (AttachWorkers::with(attach, done, abandoned), release, told)
    }

    /// Those of a test, not of the process.
    fn abandoned() -> &'static Abandoned {
        Box::leak(Box::new(Abandoned::new()))
    }

    fn held_up(begun: Result<bool, AttachError>) -> String {
        match begun {
            Err(error @ AttachError::HeldUp { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    /// Threads of one process have one owner, as the processes of one service do.
    #[test]
    fn one_that_is_stalled_has_one_worker_and_does_not_hold_the_end_up() {
        let abandoned = abandoned();
        let (mut workers, release, told) = workers(abandoned);
        let me = std::process::id();
        assert!(workers.begin(me, &"stalled").unwrap());
        assert!(!workers.begin(me, &"next").unwrap(), "it is the same owner's");
        for round in 0..100 {
            assert!(workers.begin(NOBODY, &"another").unwrap(), "{round}");
            assert_eq!(told.recv_timeout(MINUTE).unwrap(), ("another", false));
            assert!(workers.finished(&"another"));
        }
        assert!(workers.is_running(&"stalled"));
        let begin = Instant::now();
        workers.stop();
        let took = begin.elapsed();
        // Nobody ever releases it: whatever the machine does beside, that would last.
        assert!(took >= END_TIMEOUT && took < END_TIMEOUT * 30, "{took:?}");
        // The next recording knows of it.
        held_up(self::workers(abandoned).0.begin(me, &"stalled"));
        drop(release);
    }

    #[test]
    fn one_that_takes_too_long_is_given_up_and_its_owner_left_alone_until_it_ends() {
        let (mut workers, release, told) = workers(abandoned());
        let me = std::process::id();
        assert!(workers.begin(me, &"stalled").unwrap());
        assert!(workers.give_up_after(MINUTE).is_empty());
        let given_up = workers.give_up_after(Duration::ZERO);
        assert!(matches!(given_up[..], [("stalled", AttachError::HeldUp { .. })]), "{given_up:?}");
        assert!(!workers.is_running(&"stalled"));
        let why = held_up(workers.begin(me, &"next"));
        assert!(why.contains("an earlier attach"), "{why}");
        assert!(workers.begin(NOBODY, &"another").unwrap(), "others have a worker");
        assert_eq!(told.recv_timeout(MINUTE).unwrap(), ("another", false));
        // That it has come to something after all is told.
        drop(release);
        assert_eq!(told.recv_timeout(MINUTE).unwrap(), ("stalled", true));
        assert!(!workers.finished(&"stalled"));
        let begin = Instant::now();
        while workers.begin(me, &"next").is_err() {
            assert!(begin.elapsed() < MINUTE);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn with_so_many_held_up_nothing_is_begun() {
        let abandoned = abandoned();
        let (release, stalled) = channel::<()>();
        let stalled = Arc::new(Mutex::new(stalled));
        for number in 0..MOST_ABANDONED {
            assert_eq!(abandoned.holds_up(&AttachOwner::of(NOBODY)), None, "{number}");
            let stalled = Arc::clone(&stalled);
            let thread = std::thread::spawn(move || {
                stalled.lock().unwrap().recv().ok();
            });
            abandoned.add(AttachOwner { user: 1, cgroup: number.to_string() }, thread);
        }
        let (mut workers, _release, _told) = workers(abandoned);
        let why = held_up(workers.begin(NOBODY, &"another"));
        assert!(why.contains("16 other attaches"), "{why}");
        drop(release);
        let begin = Instant::now();
        while workers.begin(NOBODY, &"another").is_err() {
            assert!(begin.elapsed() < MINUTE);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
