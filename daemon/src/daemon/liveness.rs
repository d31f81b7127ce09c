//! Whether this daemon is alive: its recording's threads and the helper that attaches. The
//! service's manager and the health checks are told from here.

use super::notify::Notify;
use super::recording::ActiveRecording;
use super::state::DaemonState;
use perfusion_dotnet::attach::helper::Helper;
use std::sync::Arc;
use std::time::Instant;

/// Watches what may end or hang beside this thread.
pub(super) struct Liveness {
    state: Arc<DaemonState>,
    notify: Notify,
    /// A thread of the recording does not move.
    hangs: bool,
    alive_at: Instant,
    /// While it lives.
    helper: Option<Helper>,
}

impl Liveness {
    /// All is well yet.
    pub(super) fn new(state: Arc<DaemonState>, helper: Option<Helper>) -> Self {
        let notify = Notify::from_environment();
        Self { state, notify, hangs: false, alive_at: Instant::now(), helper }
    }

    /// The service's manager.
    pub(super) fn manager(&self) -> &Notify {
        &self.notify
    }

    /// True while a thread of the recording does not move.
    pub(super) fn hangs(&self) -> bool {
        self.hangs
    }

    /// Says that all is well to health checks, unless a thread of the recording hangs: then only
    /// another daemon can help.
    pub(super) fn beat(&mut self, active: Option<&mut ActiveRecording>) {
        let hanging = active.and_then(ActiveRecording::hanging);
        if let Some(thread) = hanging.filter(|_| !self.hangs) {
            tracing::error!(
                "the {thread} has not moved for a minute: this daemon is no longer alive"
            );
        }
        if self.hangs && hanging.is_none() {
            tracing::warn!(
                "it moves again: this daemon is alive. The window in progress is as much longer"
            );
        }
        self.hangs = hanging.is_some();
        if !self.hangs {
            self.state.beat();
        }
    }

    /// Says once that the helper has ended. There is nobody who could start another one.
    pub(super) fn look_at_helper(&mut self) {
        if let Some(status) = self.helper.as_mut().and_then(Helper::ended) {
            self.helper = None;
            self.state.counters.helpers_ended.add(1);
            tracing::error!(
                %status,
                "the helper that attaches has ended: .NET processes of other users are not \
                 attached to until the daemon starts again"
            );
        }
    }

    /// Tells the service's manager that this daemon lives, as often as that asks.
    pub(super) fn tell_manager(&mut self, now: Instant) {
        if self.notify.alive_every().is_some_and(|every| now >= self.alive_at + every) {
            self.alive_at = now;
            self.notify.alive();
        }
    }
}
