//! The way from those who command the collector to it: a channel, and a bell that it can wait for together with the kernel's.

use super::collector::Command;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SendError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::time::Instant;

/// The end of those who command.
#[derive(Clone, Debug)]
pub(super) struct Commands {
    to: SyncSender<Command>,
    bell: Arc<OwnedFd>,
}

/// The collector's end.
#[derive(Debug)]
pub(super) struct Inbox {
    from: Receiver<Command>,
    bell: Arc<OwnedFd>,
}

/// A channel for `bound` commands.
pub(super) fn channel(bound: usize) -> io::Result<(Commands, Inbox)> {
    let (to, from) = sync_channel(bound);
    let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
    Ok((Commands { to, bell: Arc::clone(&bell) }, Inbox { from, bell }))
}

impl Commands {
    /// Waits while there is no room; fails when nobody listens any more.
    pub(super) fn send(&self, command: Command) -> Result<(), SendError<Command>> {
        self.to.send(command)?;
        self.ring();
        Ok(())
    }

    /// Never waits.
    pub(super) fn try_send(&self, command: Command) -> Result<(), TrySendError<Command>> {
        self.to.try_send(command)?;
        self.ring();
        Ok(())
    }

    fn ring(&self) {
        // Refused only after 2⁶⁴ rings that nobody has heard: then it is ringing.
        rustix::io::write(&self.bell, &1u64.to_ne_bytes()).ok();
    }
}

impl Inbox {
    /// The next command, if there is one.
    pub(super) fn next(&self) -> Result<Command, TryRecvError> {
        self.from.try_recv()
    }

    /// Waits for a command, for `other` to be readable, or for that moment; true when `other` is. To be called when [`Inbox::next`] has found nothing: a
    /// ring that is heard here too early is of a command that is found by the next look, and one that is sent later rings again.
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
    use super::{Command, channel};
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
            move || commands.send(Command::Watch(1)).unwrap()
        });
        assert!(!inbox.wait(None, begin + LONG));
        sender.join().unwrap();
        assert!(matches!(inbox.next(), Ok(Command::Watch(1))));

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
            commands.try_send(Command::Watch(round)).unwrap();
            commands.try_send(Command::Leave(round)).unwrap();
            assert!(commands.try_send(Command::Watch(0)).is_err());
            let begin = Instant::now();
            inbox.wait(None, begin + LONG);
            assert!(begin.elapsed() < LONG);
            assert!(matches!(inbox.next(), Ok(Command::Watch(at)) if at == round));
            assert!(matches!(inbox.next(), Ok(Command::Leave(at)) if at == round));
            assert!(matches!(inbox.next(), Err(TryRecvError::Empty)));
        }
    }
}
