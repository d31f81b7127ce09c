//! Whether the wall clock may say how old something is. One that was set wrong makes all that waits
//! or is kept look too old at once, and what is removed for that does not come back with the right
//! time. So its progress is compared with the clock that nobody sets: after a jump nothing goes for
//! its age, until the clock is back where it was or has gone on evenly for long enough to be meant.
//! Bounds of size and number hold all the while.
//!
//! The judgement is the process's: there is one wall clock, and sinks come and go with reloads.

use rustix::time::{ClockId, clock_gettime};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// What is further off is of a clock that was set, by a time zone or by years. One that is put
/// right by less has caught up soon.
pub const JUMP: Duration = Duration::from_secs(600);
/// How long a clock goes on evenly after a jump before it is believed. Who keeps it right (NTP)
/// looks at it every 17 minutes or more often.
const STEADY: Duration = Duration::from_secs(3600);

static CLOCK: Mutex<Clock> = Mutex::new(Clock::new());

/// A moment by the wall clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    /// The time.
    pub wall: SystemTime,
    /// Something may go because it is too old by it.
    pub tells_age: bool,
}

impl Now {
    /// Reads the clock and judges it.
    #[must_use]
    pub fn read() -> Self {
        // First, so that no look is older than the one before.
        let mut clock = CLOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let reading = ClockReading { wall: SystemTime::now(), even: since_boot() };
        Self { wall: reading.wall, tells_age: clock.look(reading) }
    }
}

/// By the clock that nobody sets. It goes on while the machine sleeps, as the wall clock does.
fn since_boot() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    // Neither is ever negative.
    Duration::new(
        time.tv_sec.try_into().unwrap_or_default(),
        time.tv_nsec.try_into().unwrap_or_default(),
    )
}

/// Both clocks at one moment.
#[derive(Clone, Copy, Debug)]
struct ClockReading {
    wall: SystemTime,
    /// [`since_boot`].
    even: Duration,
}

impl ClockReading {
    /// How far the wall clock is from where it would be, had it gone on evenly since an earlier
    /// reading; and whether it is ahead.
    fn off_since(self, before: Self) -> (Duration, bool) {
        let passed = self.even.saturating_sub(before.even);
        match self.wall.duration_since(before.wall + passed) {
            Ok(ahead) => (ahead, true),
            Err(behind) => (behind.duration(), false),
        }
    }

    fn follows(self, before: Self) -> bool {
        self.off_since(before).0 <= JUMP
    }
}

#[derive(Debug)]
struct Clock {
    /// The last reading that was believed.
    believed: Option<ClockReading>,
    /// The first one after a jump, from which the clock has gone on evenly.
    jumped: Option<ClockReading>,
}

impl Clock {
    const fn new() -> Self {
        Self { believed: None, jumped: None }
    }

    /// True when ages may be told by the reading. Before the first there is nothing to doubt it by.
    fn look(&mut self, now: ClockReading) -> bool {
        let Some(before) = self.believed else {
            self.believed = Some(now);
            return true;
        };
        if now.follows(before) {
            if self.jumped.is_some() {
                tracing::info!("the wall clock is back where it was");
            }
        } else {
            let Some(since) = self.jumped.filter(|since| now.follows(*since)) else {
                let (by, ahead) = now.off_since(before);
                tracing::warn!(
                    by = ?Duration::from_secs(by.as_secs()),
                    ahead,
                    "the wall clock has jumped: no profile is removed for its age before the clock \
                     has gone on evenly for an hour"
                );
                self.jumped = Some(now);
                return false;
            };
            if now.even.saturating_sub(since.even) < STEADY {
                return false;
            }
            tracing::info!("the wall clock has gone on evenly since it jumped, and is believed");
        }
        (self.believed, self.jumped) = (Some(now), None);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);
    const YEAR: Duration = Duration::from_secs(366 * 86_400);

    /// A clock that is looked at each minute.
    struct Looks {
        clock: Clock,
        now: ClockReading,
    }

    impl Looks {
        /// So many minutes pass, and it is set ahead by so much before: what was said then.
        fn pass(&mut self, minutes: u32, ahead: Duration) -> Vec<bool> {
            self.now.wall += ahead;
            let look = |_| {
                self.now =
                    ClockReading { wall: self.now.wall + MINUTE, even: self.now.even + MINUTE };
                self.clock.look(self.now)
            };
            (0..minutes).map(look).collect()
        }
    }

    fn looks() -> Looks {
        let wall = SystemTime::UNIX_EPOCH + YEAR * 50;
        Looks { clock: Clock::new(), now: ClockReading { wall, even: since_boot() } }
    }

    #[test]
    fn a_clock_that_goes_on_or_is_put_right_by_a_little_tells_ages() {
        let mut looks = looks();
        assert_eq!(looks.pass(100, Duration::ZERO), [true; 100]);
        // Little by little it may get anywhere.
        assert!((0..50).all(|_| looks.pass(3, JUMP) == [true; 3]));
    }

    #[test]
    fn after_a_jump_nothing_is_old_until_the_clock_has_gone_on_for_an_hour() {
        let mut looks = looks();
        looks.pass(1, Duration::ZERO);
        assert_eq!(looks.pass(60, YEAR), [false; 60]);
        // Another jump begins another hour.
        assert_eq!(looks.pass(60, YEAR), [false; 60]);
        assert_eq!(looks.pass(2, Duration::ZERO), [true; 2]);
    }

    #[test]
    fn a_clock_that_is_back_where_it_was_is_believed_at_once() {
        let mut looks = looks();
        looks.pass(1, Duration::ZERO);
        assert_eq!(looks.pass(5, YEAR), [false; 5]);
        looks.now.wall -= YEAR;
        assert_eq!(looks.pass(5, Duration::ZERO), [true; 5]);
        // Backwards, too: forwards again it would make all look old.
        looks.now.wall -= YEAR;
        assert_eq!(looks.pass(2, Duration::ZERO), [false; 2]);
        assert_eq!(looks.pass(2, YEAR), [true; 2]);
    }
}
