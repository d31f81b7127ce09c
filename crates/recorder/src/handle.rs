//! Lets other threads speak with a recording.

use crate::commands::{self, CollectorCommand, CollectorStatus, CommandSender};
use crate::mailbox::ProcessorMailbox;
use crate::processor::ManagedProcess;
use perfusion_host::process::table::ProcessStatus;
use perfusion_sources::shim::Subscriptions;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

/// The collector and the processor answer at once, unless they are too busy.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Tells the collector of processes that a shim was loaded into, and asks how the recording stands.
#[derive(Clone)]
pub struct RecordingHandle {
    pub(crate) commands: CommandSender,
    pub(crate) mailbox: Arc<ProcessorMailbox>,
}

impl RecordingHandle {
    /// The handle of a recording that never answers.
    ///
    /// # Errors
    /// When there is no pipe for it.
    pub fn of_nobody() -> io::Result<Self> {
        let (commands, collector) = commands::channel(1)?;
        // As if it hung.
        std::mem::forget(collector);
        Ok(Self { commands, mailbox: Arc::default() })
    }

    /// A shim was loaded into `pid`.
    pub fn watch(&self, pid: u32) {
        // Fails only when the recording is over.
        self.commands.send(CollectorCommand::Watch(pid)).ok();
    }

    /// The shim is to leave `pid`.
    pub fn leave(&self, pid: u32) {
        // Fails only when the recording is over, and then it leaves anyway.
        self.commands.send(CollectorCommand::Leave(pid)).ok();
    }

    /// The shim of `pid` is to tell this, and is asked for names or not.
    pub fn subscribe(&self, pid: u32, subscriptions: Subscriptions, names: bool) {
        self.mailbox.request_names(pid, names);
        // Fails only when the recording is over.
        self.commands.send(CollectorCommand::Subscribe(pid, subscriptions, names)).ok();
    }

    /// The processes that run a CLR, of those that were seen on or off a CPU.
    #[must_use]
    pub fn managed(&self) -> Vec<ManagedProcess> {
        self.mailbox.managed()
    }

    /// How the processes stand; `None` when the recording is over or too busy to say.
    #[must_use]
    pub fn standings(&self) -> Option<Vec<ProcessStatus>> {
        let (answer, answered) = sync_channel(1);
        if !self.mailbox.request_standings(answer) {
            return None;
        }
        answered.recv_timeout(ANSWER_TIMEOUT).ok()
    }

    /// How all stages stand; `None` when the recording is over or too busy to say.
    #[must_use]
    pub fn look(&self) -> Option<CollectorStatus> {
        let (answer, answered) = sync_channel(1);
        self.commands.try_send(CollectorCommand::Look(answer)).ok()?;
        let mut look = answered.recv_timeout(ANSWER_TIMEOUT).ok()?;
        look.counters.extend(self.mailbox.counters());
        Some(look)
    }
}
