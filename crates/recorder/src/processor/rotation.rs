//! Which window an event belongs to.
//!
//! A window that ends is first announced: the collector has read the times of all threads, each at
//! its own moment. Events that are still on their way belong to the old window or to the next one,
//! thread by thread. Those of the next window are put off until the old one is cut.

use foldhash::HashMap;
use perfusion_model::event::{Event, EventKind, MonotonicNs, ShimEvent, ThreadSnapshot};
use std::collections::HashSet;

/// A window's end that was announced.
struct AnnouncedEnd {
    at: MonotonicNs,
    running: Vec<ThreadSnapshot>,
    /// When each thread was looked at.
    looked: HashMap<u32, MonotonicNs>,
    later: Vec<Event>,
}

impl AnnouncedEnd {
    /// Until when events of this kind are the old window's.
    fn end_of(&self, kind: &EventKind) -> MonotonicNs {
        let tid = match kind {
            EventKind::CpuSample(sample) => sample.thread.tid,
            EventKind::WaitStart(wait) => wait.thread.tid,
            EventKind::OffCpu(found) => found.thread.tid,
            EventKind::Wake(wake) => wake.tid,
            EventKind::WaitEnd(end) => end.thread.tid,
            EventKind::ThreadEnd(times) => times.thread.tid,
            EventKind::Rename(rename) => rename.thread.tid,
            // Names serve both windows, and the process table lives through all.
            EventKind::Exec { .. }
            | EventKind::Comm { .. }
            | EventKind::Fork { .. }
            | EventKind::Exit { .. }
            | EventKind::Mmap(_)
            | EventKind::ProcessRecordsLost => return MonotonicNs(u64::MAX),
            EventKind::Shim { event, .. } => {
                return match event {
                    ShimEvent::Method(_)
                    | ShimEvent::NoMethod { .. }
                    | ShimEvent::TypeName { .. }
                    | ShimEvent::CodeUnloaded { .. } => MonotonicNs(u64::MAX),
                    _ => self.at,
                };
            }
        };
        self.looked.get(&tid).copied().unwrap_or(self.at)
    }
}

/// All of an announced window is here.
pub(super) struct ReachedEnd {
    pub(super) at: MonotonicNs,
    /// The threads that existed, each as it was at its own moment.
    pub(super) running: Vec<ThreadSnapshot>,
    /// Events of the next window.
    pub(super) later: Vec<Event>,
}

/// The windows of a recording, one after the other.
#[derive(Default)]
pub(super) struct WindowRotation {
    announced: Option<AnnouncedEnd>,
    /// Ids of threads, first ones of processes among them, that began since the last window's end
    /// was announced, and those that began in that window.
    begun: [HashSet<u32>; 2],
    /// Events of shims after this are not in the recording any more.
    closed: Option<MonotonicNs>,
}

impl WindowRotation {
    /// Gives the event back unless it belongs to the next window: then it waits for that.
    pub(super) fn put_off(&mut self, event: Event) -> Option<Event> {
        let Some(announced) = &mut self.announced else { return Some(event) };
        if event.time <= announced.end_of(&event.kind) {
            return Some(event);
        }
        announced.later.push(event);
        None
    }

    /// A window ends: these were the threads, each at its own moment, `at` the earliest. What comes
    /// from now on may be the next window's.
    pub(super) fn announce(&mut self, at: MonotonicNs, running: Vec<ThreadSnapshot>) {
        let [now, before] = &mut self.begun;
        *before = std::mem::take(now);
        let looked =
            running.iter().map(|snapshot| (snapshot.times.thread.tid, snapshot.at)).collect();
        self.announced = Some(AnnouncedEnd { at, running, looked, later: Vec::new() });
    }

    /// Takes the announced end; `None` when none was announced.
    pub(super) fn reach(&mut self) -> Option<ReachedEnd> {
        let AnnouncedEnd { at, running, later, .. } = self.announced.take()?;
        Some(ReachedEnd { at, running, later })
    }

    /// A thread began, which may be a process's first.
    pub(super) fn note_begun(&mut self, tid: u32) {
        let [now, _] = &mut self.begun;
        now.insert(tid);
    }

    /// Threads that may be in no list of a window which waits for its names.
    pub(super) fn begun(&self) -> impl Iterator<Item = u32> {
        self.begun.iter().flatten().copied()
    }

    /// The kernel source ended at `at`.
    pub(super) fn close(&mut self, at: MonotonicNs) {
        self.closed = Some(at);
    }

    /// True for events after the recording's end.
    pub(super) fn is_closed(&self, time: MonotonicNs) -> bool {
        self.closed.is_some_and(|at| time > at)
    }
}
