//! Finished windows on their way to the sinks. They wait as the bytes of their files, so the queue is bounded by those: a disk that is slow for a
//! while costs no window as long as there is room.

use crate::sink::Finished;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// What one service did in one window takes so much beside its profile: names, labels, times.
const BESIDE: u64 = 1 << 10;

/// The end that recordings have.
#[derive(Clone)]
pub struct Out {
    to: Sender<Vec<Finished>>,
    waiting: Arc<AtomicU64>,
}

/// The end that the sinks have.
pub struct In {
    from: Receiver<Vec<Finished>>,
    waiting: Arc<AtomicU64>,
}

/// Both ends of one.
#[must_use]
pub fn new() -> (Out, In) {
    let ((to, from), waiting) = (channel(), Arc::<AtomicU64>::default());
    (Out { to, waiting: Arc::clone(&waiting) }, In { from, waiting })
}

impl Out {
    /// Hands a window over. It comes back where it and those that wait are more than `room` bytes, unless none waits, and where nobody takes any.
    ///
    /// # Errors
    /// The window.
    pub fn give(&self, window: Vec<Finished>, room: u64) -> Result<(), Vec<Finished>> {
        let bytes: u64 = window.iter().map(bytes_of).sum();
        // Pairs with the subtraction in `In::done`. Relaxed: it is a bound, and the windows themselves go through the channel.
        let before = self.waiting.fetch_add(bytes, Ordering::Relaxed);
        let given = if before > 0 && before.saturating_add(bytes) > room {
            Err(window)
        } else {
            self.to.send(window).map_err(|unsent| unsent.0)
        };
        if given.is_err() {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
        }
        given
    }
}

impl In {
    /// The next window; each of its profiles counts as waiting until it is [`done`](Self::done).
    ///
    /// # Errors
    /// When none came in that time, or none is left and nobody can hand over more.
    pub fn next(&self, at_most: Duration) -> Result<Vec<Finished>, RecvTimeoutError> {
        self.from.recv_timeout(at_most)
    }

    /// The sinks have had this one.
    pub fn done(&self, finished: Finished) {
        // Pairs with the addition in `Out::give`.
        self.waiting.fetch_sub(bytes_of(&finished), Ordering::Relaxed);
    }
}

fn bytes_of(finished: &Finished) -> u64 {
    u64::try_from(finished.profile.bytes().len()).unwrap_or(u64::MAX).saturating_add(BESIDE)
}

#[cfg(test)]
mod tests {
    use super::{BESIDE, new};
    use crate::sink::{Finished, Packed};
    use std::collections::BTreeMap;
    use std::time::{Duration, SystemTime};

    fn window(profiles: usize) -> Vec<Finished> {
        let finished = Finished {
            service: "web".into(),
            labels: BTreeMap::new(),
            start: SystemTime::now(),
            duration: Duration::from_secs(10),
            profile: Packed::new(vec![0; 1000]),
        };
        vec![finished; profiles]
    }

    #[test]
    fn windows_wait_as_long_as_there_is_room_and_one_always_may() {
        let ((out, sinks), each) = (new(), 1000 + BESIDE);
        assert!(out.give(window(9), 5 * each).is_ok(), "nothing else waits");
        assert_eq!(out.give(window(1), 9 * each).unwrap_err().len(), 1);
        assert!(out.give(window(1), 10 * each).is_ok() && out.give(window(1), 10 * each).is_err());
        let mut taken = sinks.next(Duration::ZERO).unwrap().into_iter();
        // The sinks are at work with it: its room comes back profile by profile.
        sinks.done(taken.next().unwrap());
        assert!(out.give(window(2), 10 * each).is_err() && out.give(window(1), 10 * each).is_ok());
        taken.for_each(|finished| sinks.done(finished));
        for _ in 0..2 {
            sinks.next(Duration::ZERO).unwrap().into_iter().for_each(|finished| sinks.done(finished));
        }
        assert!(out.give(window(9), 0).is_ok(), "all is done");
        drop(sinks);
        assert!(out.give(window(1), u64::MAX).is_err());
    }
}
