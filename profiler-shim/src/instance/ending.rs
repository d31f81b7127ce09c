//! The end of a process or of an attach: last questions, goodbye, and what is given back.

use super::{Instance, phase};
use crate::recorder;
use crate::runtime::info::{Info, Mask};
use crate::syscall;
use core::sync::atomic::Ordering;
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::InstanceState;
use profiler_protocol::record::RecordBody;

/// How long the end of a process may be held up for last questions, and the pause between two
/// looks.
const FAREWELL_NS: u64 = 45_000_000;
const LOOK_NS: u64 = 500_000;
/// Who ends so soon is all new to a recorder, which has to read the files of its code before it can
/// ask: without names it would have been recorded for nothing.
const SHORT_LIFE_NS: u64 = 2_000_000_000;
const FAREWELL_OF_SHORT_LIFE_NS: u64 = 400_000_000;
/// The callback waits a little longer than the thread that answers.
const GRACE_NS: u64 = 5_000_000;

impl Instance {
    /// Another recorder listens, of whose lock nothing is known.
    pub(crate) fn is_taken_over(&self) {
        self.role.launched.store(0, Ordering::Relaxed);
    }

    /// False when it is known that its recorder is gone.
    pub(crate) fn may_be_heard(&self) -> bool {
        self.role.launched.load(Ordering::Relaxed) == 0 || self.info().is_some_and(recorder::lives)
    }

    /// How long last questions are waited for from now on.
    pub(crate) fn farewell_ns(&self) -> u64 {
        let lived_ns = syscall::now_ns().saturating_sub(self.region().created_ns());
        if lived_ns < SHORT_LIFE_NS { FAREWELL_OF_SHORT_LIFE_NS } else { FAREWELL_NS }
    }

    /// The process ends. Holds it up only when somebody listens, and no longer than
    /// [`Instance::farewell_ns`]; afterwards the service thread calls the runtime no more.
    pub(crate) fn on_shutdown(&self) {
        let next =
            if self.is_listening() && self.may_be_heard() { phase::CLOSING } else { phase::DONE };
        if self
            .service
            .phase
            .compare_exchange(phase::WORK, next, Ordering::AcqRel, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        if next == phase::CLOSING {
            self.region.set_state(InstanceState::Closing);
            syscall::wake(&self.service.phase);
            let timeout_ns = self.farewell_ns().saturating_add(GRACE_NS);
            let until = syscall::now_ns().saturating_add(timeout_ns);
            // A seccomp filter may deny the clock: then the number of looks ends it.
            for _ in 0..timeout_ns / LOOK_NS {
                if self.service.phase.load(Ordering::Acquire) != phase::CLOSING
                    || syscall::now_ns() >= until
                {
                    break;
                }
                syscall::sleep_ns(LOOK_NS);
            }
        }
        // Whoever comes first says goodbye.
        if self.service.phase.swap(phase::DONE, Ordering::AcqRel) != phase::DONE
            && next == phase::CLOSING
        {
            self.set_listening(false);
            self.send(RecordBody::Bye);
        }
        syscall::wake(&self.service.phase);
        self.region.set_state(InstanceState::Gone);
        self.guard.alive.store(0, Ordering::Release);
    }

    /// An attach that got no service thread detaches at once; the runtime does so when this
    /// callback has returned.
    pub(crate) fn leave_without_thread(&self) {
        let Some(info) = self.info() else { return };
        self.give_up(info);
        self.send(RecordBody::Bye);
        self.region.set_state(InstanceState::Gone);
        if info.request_detach(1).is_err() {
            self.count(Counter::RuntimeRefusals);
        }
    }

    /// Nothing works without the service thread: takes back what was asked of the runtime.
    pub(crate) fn give_up(&self, info: Info) {
        self.set_listening(false);
        self.stop_session(info);
        if self.set_mask(info, Mask::NONE).is_err() {
            self.count(Counter::RuntimeRefusals);
        }
        // Callbacks that began before may still make handles.
        syscall::sleep_ns(LOOK_NS * 10);
        self.live.release_all(&info);
    }

    /// The runtime lets go of us: no callback is under way any more, and none will come.
    pub(crate) fn on_detached(&self) {
        self.set_listening(false);
        self.region.set_state(InstanceState::Gone);
        self.guard.alive.store(0, Ordering::Release);
        // Exact mode's interface is exact mode's.
        if let Some(info) = self.info().filter(|_| !self.is_guest()) {
            info.release();
        }
    }
}
