//! Dates of the wall clock, in UTC: for names of files and lines of indices, which must be the same
//! everywhere.

use chrono::{DateTime, NaiveDateTime};
use std::time::Duration;

const COMPACT: &str = "%Y%m%dT%H%M%S%.3fZ";

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc(DateTime<chrono::Utc>);

impl Utc {
    /// The moment this long after 1970.
    #[must_use]
    pub fn of(since_epoch: Duration) -> Self {
        let millis = i64::try_from(since_epoch.as_millis()).ok();
        let moment = millis.and_then(DateTime::from_timestamp_millis);
        Self(moment.unwrap_or(DateTime::<chrono::Utc>::MAX_UTC))
    }

    /// `2026-11-21T21:37:00.000Z`.
    #[must_use]
    pub fn iso(self) -> String {
        self.0.format("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
    }

    /// `20261121T213700.000Z`: the same for names of files.
    #[must_use]
    pub fn compact(self) -> String {
        self.0.format(COMPACT).to_string()
    }
}

/// Reads what [`Utc::compact`] wrote, and no other form of it.
#[must_use]
pub fn parse_compact(text: &str) -> Option<Duration> {
    let moment = NaiveDateTime::parse_from_str(text, COMPACT).ok()?.and_utc();
    let since_epoch = Duration::from_millis(u64::try_from(moment.timestamp_millis()).ok()?);
    (Utc::of(since_epoch).compact() == text).then_some(since_epoch)
}

#[cfg(test)]
mod tests {
    use super::{Utc, parse_compact};
    use proptest::prelude::{prop_assert_eq, proptest};
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_795_297_020, "2026-11-21T21:37:00.000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(Utc::of(Duration::from_secs(seconds)).iso(), date);
        }
        for other in [
            "20260001T000000.000X",
            "20260001T000000.000Z",
            "20261121T213760.000Z",
            "20261121T213700.0000Z",
            "2026-11-21T21:37:00.000Z",
            "20261121T213700.000+00",
            "19691231T235959.000Z",
        ] {
            assert_eq!(parse_compact(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn a_date_is_read_back(millis in 0u64..200_000_000_000_000) {
            let time = Duration::from_millis(millis);
            prop_assert_eq!(parse_compact(&Utc::of(time).compact()), Some(time));
        }
    }
}
