//! Several attaches at once. One that is stalled, by a process that is stopped or that means harm, holds up its worker for
//! [`ATTACH_TIMEOUT`](super::ATTACH_TIMEOUT) and a little more: so whoever owns processes has one worker at a time, and no user has all.

use super::target::Target;
use super::{AttachError, Attached, Settings, attach};
use crate::daemon::neighbour;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const WORKERS: usize = 4;
/// How long the end of the workers is waited for. Most attaches take a tenth of a second; one that is left alone does no harm: what it still
/// loads finds nobody listening, goes quiet within 2 s and leaves.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// Who decides how long an attach takes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Owner {
    user: u32,
    cgroup: String,
}

impl Owner {
    fn of(pid: u32) -> Self {
        let target = Target::open(pid);
        let user = target.as_ref().ok().and_then(|target| target.file_owner().ok());
        let cgroup = target.ok().and_then(|target| target.cgroup().ok());
        // One that has ended is found out by the attach.
        Self { user: user.map_or(u32::MAX, |(user, _)| user), cgroup: cgroup.unwrap_or_default() }
    }
}

/// What became of an attach, and what it was for.
pub type Done<T> = (T, Result<Attached, AttachError>);

/// The threads. Dropping it lets them end when they are ready.
pub struct Workers<T> {
    jobs: Sender<(u32, T)>,
    threads: Vec<JoinHandle<()>>,
    running: Vec<(T, Owner)>,
}

impl<T: Clone + PartialEq + Send + 'static> Workers<T> {
    /// Starts them; each attach has settings of its own. `done` is called on their threads.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn start(
        settings: impl Fn(&T) -> Settings + Clone + Send + 'static,
        done: impl Fn(Done<T>) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        Self::with(move |pid, what| attach(pid, settings(what)), done)
    }

    fn with(
        attach: impl Fn(u32, &T) -> Result<Attached, AttachError> + Clone + Send + 'static,
        done: impl Fn(Done<T>) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let thread = |_| {
            let (queue, attach, done) = (Arc::clone(&queue), attach.clone(), done.clone());
            let work = move || {
                neighbour::wait_for_others();
                while let Some((pid, what)) = next(&queue) {
                    let result = attach(pid, &what);
                    done((what, result));
                }
            };
            std::thread::Builder::new().name("attach".into()).spawn(work)
        };
        let threads = (0..WORKERS).map(thread).collect::<io::Result<_>>()?;
        Ok(Self { jobs, threads, running: Vec::new() })
    }

    /// Begins to attach to `pid` if a worker may be had for it now; false otherwise. [`Workers::finished`] is to be told of its end.
    pub fn begin(&mut self, pid: u32, what: &T) -> bool {
        if self.running.len() >= WORKERS {
            return false;
        }
        let owner = Owner::of(pid);
        let of_user = self.running.iter().filter(|(_, other)| other.user == owner.user).count();
        if of_user >= WORKERS - 1 || self.running.iter().any(|(_, other)| *other == owner) {
            return false;
        }
        // Fails only when all threads have panicked, which was said.
        let sent = self.jobs.send((pid, what.clone())).is_ok();
        if sent {
            self.running.push((what.clone(), owner));
        }
        sent
    }

    /// This attach is over.
    pub fn finished(&mut self, what: &T) {
        self.running.retain(|(other, _)| other != what);
    }

    /// True while it is attached to.
    #[must_use]
    pub fn is_running(&self, what: &T) -> bool {
        self.running.iter().any(|(other, _)| other == what)
    }

    /// Lets them end, for a while.
    pub fn stop(self) {
        drop(self.jobs);
        self.threads.into_iter().fold(Instant::now() + PATIENCE, join_until);
    }
}

fn next<T>(queue: &Mutex<Receiver<T>>) -> Option<T> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

/// Waits for a thread that may hang in what others decide, no longer than until `deadline`, which it answers.
fn join_until(deadline: Instant, thread: JoinHandle<()>) -> Instant {
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::sleep(LOOK_AGAIN);
    }
    if thread.is_finished() {
        // One that panicked has said so.
        thread.join().ok();
    } else {
        tracing::warn!("a process holds its attach up; it is not waited for");
    }
    deadline
}

/// Waits for a thread that attaches as long as [`Workers::stop`] does.
pub fn join(thread: JoinHandle<()>) {
    join_until(Instant::now() + PATIENCE, thread);
}

#[cfg(test)]
mod tests {
    use super::{PATIENCE, Workers};
    use crate::attach::AttachError;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    /// Threads of one process have one owner, as the processes of one service do.
    #[test]
    fn one_that_is_stalled_has_one_worker_and_does_not_hold_the_end_up() {
        let (release, stalled) = channel::<()>();
        let (tell, told) = channel();
        let stalled = std::sync::Arc::new(std::sync::Mutex::new(stalled));
        let attach = move |pid, _: &&str| {
            if pid == std::process::id() {
                stalled.lock().unwrap().recv().ok();
            }
            Err(AttachError::NoSuchProcess { pid })
        };
        let mut workers = Workers::with(attach, move |(what, _)| tell.send(what).unwrap()).unwrap();
        let me = std::process::id();
        assert!(workers.begin(me, &"stalled"));
        assert!(!workers.begin(me, &"next"), "it is the same owner's");
        // Nobody has this pid (PID_MAX_LIMIT).
        for round in 0..100 {
            assert!(workers.begin(1 << 23, &"another"), "{round}");
            assert_eq!(told.recv_timeout(Duration::from_secs(60)).unwrap(), "another");
            workers.finished(&"another");
        }
        assert!(workers.is_running(&"stalled"));
        let begin = Instant::now();
        workers.stop();
        let took = begin.elapsed();
        // Nobody ever releases it: whatever the machine does beside, that would last.
        assert!(took >= PATIENCE && took < PATIENCE * 30, "{took:?}");
        drop(release);
    }
}
