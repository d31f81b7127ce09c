//! The EventPipe session: what the recorder subscribes to, and what the runtime is asked to tell.

use super::Instance;
use crate::runtime::info::{Info, Mask};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use profiler_protocol::counter::Counter;
use profiler_protocol::layout::FEATURE_ALLOCATION_SAMPLED;
use profiler_protocol::load::{
    WITH_THREAD_POOL, WITHOUT_ALLOCATIONS, WITHOUT_CONTENTION, WITHOUT_EXCEPTIONS,
    WITHOUT_LIVE_OBJECTS,
};

/// EventPipe keywords: gc, contention, exceptions, threading; allocation sampling (.NET 10).
const KEYWORD_GC: u64 = 1;
const KEYWORD_CONTENTION: u64 = 0x4000;
const KEYWORD_EXCEPTION: u64 = 0x8000;
const KEYWORD_THREADING: u64 = 0x1_0000;
const KEYWORD_ALLOCATION_SAMPLED: u64 = 0x800_0000_0000;

/// The session, and what it is for.
pub(super) struct Session {
    /// Its number, 0 for none. Changed by Initialize, and then by the service thread and those it
    /// waits for.
    pub(super) id: AtomicU64,
    /// What the recorder subscribes to (`profiler_protocol::load`).
    subscriptions: AtomicU64,
    /// 1 while the runtime tells of each large object by itself.
    told_of_large: AtomicU32,
}

impl Instance {
    /// What the session is for.
    pub(crate) fn subscriptions(&self) -> u64 {
        self.session.subscriptions.load(Ordering::Relaxed)
    }

    /// The next session is for this.
    pub(crate) fn set_subscriptions(&self, subscriptions: u64) {
        self.session.subscriptions.store(subscriptions, Ordering::Relaxed);
    }

    /// True when objects are to be watched.
    pub(crate) fn watches(&self) -> bool {
        self.subscriptions() & (WITHOUT_ALLOCATIONS | WITHOUT_LIVE_OBJECTS) == 0
    }

    /// True while the runtime tells of each large object by itself; then events about such objects
    /// say nothing new.
    pub(crate) fn is_told_of_large(&self) -> bool {
        self.session.told_of_large.load(Ordering::Relaxed) != 0
    }

    /// Has the runtime tell of each large object by itself, or not any more. Where it refuses, they
    /// are sampled like others.
    fn ask_for_large(&self, info: Info, wanted: bool) {
        // First, so that an object whose event comes just before it is asked is not told of twice.
        self.session.told_of_large.store(u32::from(wanted), Ordering::Relaxed);
        let mask = if wanted { Mask::OURS_AND_LARGE } else { Mask::OURS };
        if self.set_mask(info, mask).is_err() {
            self.session.told_of_large.store(0, Ordering::Relaxed);
            self.count(Counter::RuntimeRefusals);
        }
    }

    /// Starts the EventPipe session. The runtime may run managed code and deliver events on this
    /// thread before it returns, so everything else is ready by now. .NET 10's ticks are never
    /// asked for: any session that uses the newer event ends them.
    pub(crate) fn start_session(&self, info: Info) {
        let sampled = self.features() & FEATURE_ALLOCATION_SAMPLED != 0;
        let subscriptions = self.subscriptions();
        let unless = |without, keyword| if subscriptions & without == 0 { keyword } else { 0 };
        let keywords = KEYWORD_GC
            | unless(WITHOUT_CONTENTION, KEYWORD_CONTENTION)
            | unless(WITHOUT_EXCEPTIONS, KEYWORD_EXCEPTION)
            | if subscriptions & WITH_THREAD_POOL == 0 { 0 } else { KEYWORD_THREADING };
        let (keywords, level) = match () {
            () if self.is_guest() || subscriptions & WITHOUT_ALLOCATIONS != 0 => (keywords, 4),
            () if sampled => (keywords | KEYWORD_ALLOCATION_SAMPLED, 4),
            () => (keywords, 5),
        };
        // Before the session: of its events those of large objects are passed over from the first
        // on.
        let large = !self.is_guest() && subscriptions & WITHOUT_ALLOCATIONS == 0;
        self.ask_for_large(info, large);
        match info.start_session(keywords, level, subscriptions & WITH_THREAD_POOL != 0) {
            Ok(session) => {
                self.session.id.store(session, Ordering::Relaxed);
                self.count(Counter::SessionsStarted);
            }
            Err(_) => {
                self.ask_for_large(info, false);
                self.count(Counter::SessionsRefused);
            }
        }
    }

    /// Ends the session, if there is one.
    pub(crate) fn stop_session(&self, info: Info) {
        let session = self.session.id.load(Ordering::Relaxed);
        if session == 0 {
            return;
        }
        match info.stop_session(session) {
            Ok(()) => self.session.id.store(0, Ordering::Relaxed),
            // Its number is kept: the service thread tries again.
            Err(_) => self.count(Counter::RuntimeRefusals),
        }
        self.ask_for_large(info, false);
    }
}
