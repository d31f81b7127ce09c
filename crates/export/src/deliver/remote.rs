//! A receiver and its answers.

use std::time::{Duration, Instant};

/// What became of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Taken.
    Accepted {
        /// So many of the profiles in it the receiver refused. They are not sent again.
        rejected: u64,
        /// What it says of that.
        remark: Option<String>,
    },
    /// It will never be taken, for its own sake.
    Refused(String),
    /// It is longer than the receiver takes.
    TooLarge(String),
    /// It is not taken, and no other would be: a token has run out, a path is gone.
    Denied(String),
    /// The receiver failed, of its own fault or on this request each time.
    Failed(String),
    /// It may be taken later.
    Later {
        /// What the receiver asked for, where it did.
        after: Option<Duration>,
        /// Why not now.
        reason: String,
    },
    /// Nobody was there to answer.
    Unreached(String),
}

/// A receiver.
pub trait Remote: Send + 'static {
    /// Sends one request and waits for the answer, at most until `deadline`, which may come nearer
    /// meanwhile.
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> SendOutcome;

    /// Whose profile is in a request; empty where that is not known.
    fn service(&self, _payload: &[u8]) -> String {
        String::new()
    }

    /// Bytes of a request before compression.
    fn raw_bytes(&self, payload: &[u8]) -> usize {
        payload.len()
    }

    /// The same in smaller requests; none where it is of one sample, or cannot be split.
    fn split(&self, _payload: &[u8]) -> Vec<Vec<u8>> {
        Vec::new()
    }
}
