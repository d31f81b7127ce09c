//! The way from those who command the collector to it: a channel, and a bell that it can wait for
//! together with the kernel's.

use super::processor::Questions;
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::ProgramCost;
use perfusion_sources::shim::{ShimStatus, Subscriptions};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Instant;

/// What the collector is told to do.
#[derive(Debug)]
pub(crate) enum CollectorCommand {
    /// Put these to the processes' shims.
    Ask(Questions),
    /// A shim was loaded into this process.
    Watch(u32),
    /// The shim is to leave this process.
    Leave(u32),
    /// Subscribe to this in a process, and ask for its names or not.
    Subscribe(u32, Subscriptions, bool),
    /// A window ends now and the next begins, at these rates if they are to be others.
    Cut(Option<SourceRates>),
    /// These cgroups there are now, with what rules say of them.
    Cgroups(HashMap<u64, u32>),
    /// Say how it stands.
    Look(SyncSender<CollectorStatus>),
    /// The recording is over: take the final totals and let the kernel go; the shims are kept for
    /// the last names.
    CloseKernel,
    /// Let the shims go too, and end.
    Finish,
}

/// How the collector's side stands.
#[derive(Debug)]
pub struct CollectorStatus {
    /// Counters of the probes, of perf's rings, of the shims and of the merge: name and value.
    pub counters: Vec<(String, u64)>,
    /// What each program has cost, while the kernel counts.
    pub costs: Vec<ProgramCost>,
    /// Processes whose shims are read.
    pub shims: Vec<ShimStatus>,
}

/// The end of those who command.
#[derive(Clone, Debug)]
pub(super) struct CommandSender {
    to: SyncSender<CollectorCommand>,
    bell: Arc<OwnedFd>,
}

/// The collector's end.
#[derive(Debug)]
pub(super) struct CommandReceiver {
    from: Receiver<CollectorCommand>,
    bell: Arc<OwnedFd>,
}

/// A channel for `bound` commands.
pub(super) fn channel(bound: usize) -> io::Result<(CommandSender, CommandReceiver)> {
    let (to, from) = sync_channel(bound);
    let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
    Ok((CommandSender { to, bell: Arc::clone(&bell) }, CommandReceiver { from, bell }))
}

impl CommandSender {
    /// Waits while there is no room; fails when nobody listens any more.
    pub(super) fn send(
        &self,
        command: CollectorCommand,
    ) -> Result<(), SendError<CollectorCommand>> {
        self.to.send(command)?;
        self.ring();
        Ok(())
    }

    /// Sends without waiting.
    pub(super) fn try_send(
        &self,
        command: CollectorCommand,
    ) -> Result<(), TrySendError<CollectorCommand>> {
        self.to.try_send(command)?;
        self.ring();
        Ok(())
    }

    fn ring(&self) {
        // Refused only after 2⁶⁴ rings that nobody has heard: then it is ringing.
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).ok();
    }
}

impl CommandReceiver {
    /// The next command, if there is one.
    pub(super) fn next(&self) -> Result<CollectorCommand, TryRecvError> {
        self.from.try_recv()
    }

    /// Waits for a command, for `other` to be readable, or for that moment; true when `other` is.
    /// Call it when [`CommandReceiver::next`] has found nothing. If a ring is heard too early, the
    /// next call of that finds its command. A command that is sent later rings again.
    pub(super) fn wait(&self, other: Option<BorrowedFd<'_>>, until: Instant) -> bool {
        let watched = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![watched(self.bell.as_fd())];
        fds.extend(other.map(watched));
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        // Ends early when a signal comes; callers look at the clock.
        poll(&mut fds, left.as_ref()).ok();
        let [of_commands, others @ ..] = fds.as_slice() else { return false };
        if !of_commands.revents().is_empty() {
            // Quiet again; it counts the rings, which do not matter.
            rustix::io::read(&self.bell, &mut [0u8; 8]).ok();
        }
        others.iter().any(|fd| !fd.revents().is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::{CollectorCommand, channel};
    use std::os::fd::AsFd as _;
    use std::sync::mpsc::TryRecvError;
    use std::time::{Duration, Instant};

    /// Far longer than anything here takes: a ring that is not heard fails the test by its end.
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_command_ends_the_wait_and_so_does_the_other_bell() {
        let (commands, inbox) = channel(2).unwrap();
        assert!(matches!(inbox.next(), Err(TryRecvError::Empty)));
        let begin = Instant::now();
        let sender = std::thread::spawn({
            let commands = commands.clone();
            move || commands.send(CollectorCommand::Watch(1)).unwrap()
        });
        assert!(!inbox.wait(None, begin + LONG));
        sender.join().unwrap();
        assert!(matches!(inbox.next(), Ok(CollectorCommand::Watch(1))));

        let (read, write) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write, &[1]).unwrap();
        assert!(inbox.wait(Some(read.as_fd()), begin + LONG));
        assert!(begin.elapsed() < LONG);
        drop(commands);
        assert!(matches!(inbox.next(), Err(TryRecvError::Disconnected)));
    }

    /// A full channel is one whose rings have all been sent.
    #[test]
    fn a_ring_is_not_lost_when_several_commands_are_taken_at_once() {
        let (commands, inbox) = channel(2).unwrap();
        for round in 0..100 {
            commands.try_send(CollectorCommand::Watch(round)).unwrap();
            commands.try_send(CollectorCommand::Leave(round)).unwrap();
            assert!(commands.try_send(CollectorCommand::Watch(0)).is_err());
            let begin = Instant::now();
            inbox.wait(None, begin + LONG);
            assert!(begin.elapsed() < LONG);
            assert!(matches!(inbox.next(), Ok(CollectorCommand::Watch(at)) if at == round));
            assert!(matches!(inbox.next(), Ok(CollectorCommand::Leave(at)) if at == round));
            assert!(matches!(inbox.next(), Err(TryRecvError::Empty)));
        }
    }
}
