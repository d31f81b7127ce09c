//! What a delivery has done so far, and what waits in its spool, in numbers.

use crate::failure_states::CauseSum;
use crate::spool;

/// What a delivery did; each grows only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeliveryCounters {
    /// Requests taken.
    pub sent: u64,
    /// Their bytes, as they went over the wire.
    pub sent_bytes: u64,
    /// Requests that were not taken and will not be.
    pub refused: u64,
    /// Of those, given up because they are longer than the receiver takes.
    pub too_large: u64,
    /// Of those, given up after their number of tries.
    pub tries_over: u64,
    /// Requests, and windows that waited in the spool, of which others were made.
    pub split: u64,
    /// Requests made of other requests.
    pub parts: u64,
    /// Profiles that the receiver dropped from requests it took.
    pub rejected_profiles: u64,
    /// Attempts to send that are to be repeated.
    pub retries: u64,
    /// Attempts to read from the spool that are to be repeated.
    pub reads_failed: u64,
    /// Lost in the spool, see [`spool::SpoolLosses`].
    pub lost: spool::SpoolLosses,
}

impl DeliveryCounters {
    /// What each sink over a network counts, by the names its metrics have; `made` requests were
    /// put.
    #[must_use]
    pub fn counters(&self, made: u64) -> [(&'static str, u64); 13] {
        [
            ("requests_made", made + self.parts),
            ("requests_sent", self.sent),
            ("sent_bytes", self.sent_bytes),
            ("requests_refused", self.refused),
            ("requests_too_large", self.too_large),
            ("requests_tries_over", self.tries_over),
            ("requests_split", self.split),
            ("requests_evicted", self.lost.evicted),
            ("requests_expired", self.lost.expired),
            ("requests_not_spooled", self.lost.refused),
            ("requests_spool_lost", self.lost.gone),
            ("retries", self.retries),
            ("spool_reads_failed", self.reads_failed),
        ]
    }
}

/// What waits to be sent, now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpoolBacklog {
    /// Requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Why the last attempt failed; none after one that did not.
    pub trouble: Option<String>,
    /// What was not taken lately, or not at once, by service and cause.
    pub causes: Vec<CauseSum>,
}

impl SpoolBacklog {
    /// What of it is a number, by the names of [`crate::counts::SINK_GAUGES`].
    #[must_use]
    pub fn gauges(&self) -> [(&'static str, u64); 2] {
        [("requests_waiting", self.requests), ("waiting_bytes", self.bytes)]
    }
}
