//! Dates of the wall clock, in UTC: for names of files and lines of indices, which must be the same
//! everywhere.

use std::time::Duration;

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Utc {
    year: i64,
    month: i64,
    day: i64,
    second_of_day: i64,
    milli: u32,
}

/// Days from 1970-01-01 to the first of March of year 0, from where leap days come last in a year.
const EPOCH_DAYS: i64 = 719_468;
/// Days of four hundred years: after so many the calendar repeats.
const ERA_DAYS: i64 = 146_097;

impl Utc {
    /// The moment this long after 1970.
    #[must_use]
    pub fn of(since_epoch: Duration) -> Self {
        let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
        let days = seconds / 86_400 + EPOCH_DAYS;
        let (era, day_of_era) = (days / ERA_DAYS, days % ERA_DAYS);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        // Months from March on: five of them always have 153 days.
        let from_march = (5 * day_of_year + 2) / 153;
        let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
        Self {
            year: year_of_era + era * 400 + i64::from(month <= 2),
            month,
            day: day_of_year - (153 * from_march + 2) / 5 + 1,
            second_of_day: seconds % 86_400,
            milli: since_epoch.subsec_millis(),
        }
    }

    fn time(self) -> (i64, i64, i64) {
        (self.second_of_day / 3_600, self.second_of_day / 60 % 60, self.second_of_day % 60)
    }

    /// `2026-11-21T21:37:00.000Z`.
    #[must_use]
    pub fn iso(self) -> String {
        let (hour, minute, second) = self.time();
        let Self { year, month, day, milli, .. } = self;
        format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
    }

    /// `20261121T213700.000Z`: the same for names of files.
    #[must_use]
    pub fn compact(self) -> String {
        self.iso().replace(['-', ':'], "")
    }
}

/// Reads what [`Utc::compact`] wrote.
#[must_use]
pub fn parse_compact(text: &str) -> Option<Duration> {
    let number = |from: usize, length: usize| -> Option<i64> {
        let digits = text.get(from..from + length)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
    };
    if text.len() != 20
        || text.get(8..9) != Some("T")
        || text.get(15..16) != Some(".")
        || !text.ends_with('Z')
    {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(4, 2)?, number(6, 2)?);
    let (hour, minute, second, milli) =
        (number(9, 2)?, number(11, 2)?, number(13, 2)?, number(16, 3)?);
    let year = if month <= 2 { year - 1 } else { year };
    let from_march = if month > 2 { month - 3 } else { month + 9 };
    let year_of_era = year % 400;
    let day_of_era =
        year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + (153 * from_march + 2) / 5 + day
            - 1;
    let days = year / 400 * ERA_DAYS + day_of_era - EPOCH_DAYS;
    let seconds = u64::try_from(days * 86_400 + hour * 3_600 + minute * 60 + second).ok()?;
    Some(Duration::from_secs(seconds) + Duration::from_millis(u64::try_from(milli).ok()?))
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
        assert_eq!(parse_compact("20260001T000000.000X"), None);
    }

    proptest! {
        #[test]
        fn a_date_is_read_back(millis in 0u64..200_000_000_000_000) {
            let time = Duration::from_millis(millis);
            prop_assert_eq!(parse_compact(&Utc::of(time).compact()), Some(time));
        }
    }
}
