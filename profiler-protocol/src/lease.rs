//! Does anybody listen? A beat is a *change* of the heartbeat word, timed by the shim's own clock.
//! Pure.

/// Without a beat for this long the shim goes quiet, unless three periods are longer.
pub const SILENCE_NS: u64 = 1_800_000_000;
/// A daemon cannot ask for more timeout than this.
const MOST_SILENCE_NS: u64 = 10_000_000_000;
/// Without a beat for this long the instance detaches.
const DETACH_NS: u64 = 600_000_000_000;

/// What the shim knows about its listener.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    listener: u64,
    heartbeat: u64,
    period_ns: u64,
    last_beat_ns: u64,
    released: bool,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Somebody listens.
    Listening,
    /// Somebody listens, and it is not who did before. Told once.
    Replaced,
    /// Nobody does for now.
    Quiet,
    /// Nobody has for ten minutes.
    Abandoned,
}

impl Lease {
    /// A fresh lease at `now_ns`: being loaded counts as a beat.
    #[must_use]
    pub const fn new(now_ns: u64) -> Self {
        Self { listener: 0, heartbeat: 0, period_ns: 0, last_beat_ns: now_ns, released: false }
    }

    /// Who listened last, 0 before anybody has.
    #[must_use]
    pub const fn listener(&self) -> u64 {
        self.listener
    }

    /// Takes in the three lease words as read at `now_ns`.
    pub fn observe(
        &mut self,
        listener: u64,
        heartbeat: u64,
        period_ns: u64,
        now_ns: u64,
    ) -> LeaseState {
        if heartbeat != self.heartbeat {
            self.heartbeat = heartbeat;
            self.period_ns = period_ns;
            // A listener that leaves writes 0 with its last change; the next one's first beat ends
            // that.
            self.released = listener == 0;
            if !self.released {
                self.last_beat_ns = now_ns;
            }
        }
        let replaced = listener != 0 && self.listener != 0 && listener != self.listener;
        if listener != 0 {
            self.listener = listener;
        }
        let silent_ns = now_ns.saturating_sub(self.last_beat_ns);
        let timeout_ns = SILENCE_NS.max(self.period_ns.saturating_mul(3)).min(MOST_SILENCE_NS);
        if silent_ns >= DETACH_NS {
            LeaseState::Abandoned
        } else if self.released || silent_ns >= timeout_ns {
            LeaseState::Quiet
        } else if replaced {
            LeaseState::Replaced
        } else {
            LeaseState::Listening
        }
    }
}
