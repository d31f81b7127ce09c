//! How long the collector waits between two rounds. Each round costs the host the same, however
//! little there is to read (the caches of the CPU are cold by then): where nothing new happens,
//! rounds are rare.

use std::time::{Duration, Instant};

/// The delay while a process waits with its end.
const AT_ONCE: Duration = Duration::from_millis(2);
/// The delay while a shim's ring fills, or after an answer was withheld.
const QUICK: Duration = Duration::from_millis(5);
/// The delay while programs begin, and code comes and goes. Names can be asked for only while the
/// code is still there.
const LIVELY: Duration = Duration::from_millis(20);
/// The delay in all other cases. The BPF ring holds about a second of samples, a shim's ring some
/// 400 allocations.
const CALM: Duration = Duration::from_millis(100);
/// It is calm when nothing new has happened for so long. Most programs show what they do within
/// that time.
const CALM_AFTER: Duration = Duration::from_secs(1);
/// After an answer that was withheld, rounds are quick for this long: its code is asked about again
/// when it is seen again, and the sooner that is, the rarer something is unloaded in between.
const WITHHELD: Duration = Duration::from_millis(200);
/// Parts of a ring, in 1/256: when a round finds so much used, the next is a quick one ...
const FILLS: u64 = 256 / 8;
/// ... or comes, when it is calm, as soon as so much will be used if it goes on like that.
const FILLED: u32 = 256 / 4;

/// What one round has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundResult {
    /// There may be code that should be seen soon ([`perfusion_model::event::Event::is_change`]).
    pub(super) change: bool,
    /// A shim did not tell a name yet.
    pub(super) withheld: bool,
    /// A process waits with its end.
    pub(super) waited_for: bool,
    /// How much of the fullest ring was used, in 1/256: of the shims' and the kernel's.
    pub(super) shims: u64,
    pub(super) kernel: u64,
}

/// When the next round is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Due {
    /// No round begins before, whatever happens.
    pub(super) soonest: Duration,
    /// The round begins at the latest then, and before that when something happens.
    pub(super) latest: Duration,
}

#[derive(Debug)]
pub(super) struct DrainRateController {
    /// When something new happened last.
    news: Instant,
    withheld: Option<Instant>,
    calm: bool,
    /// When the last round was.
    last: Instant,
}

impl DrainRateController {
    pub(super) fn new(now: Instant) -> Self {
        Self { news: now, withheld: None, calm: false, last: now }
    }

    /// Something new happens.
    pub(super) fn news(&mut self, now: Instant) {
        self.news = now;
    }

    /// How long to wait after a round that has found this.
    pub(super) fn next(&mut self, found: RoundResult, now: Instant) -> Due {
        if found.withheld {
            self.withheld = Some(now);
        }
        let withheld = self.withheld.is_some_and(|at| now.duration_since(at) < WITHHELD);
        let fullest = found.shims.max(found.kernel);
        let since = now.duration_since(std::mem::replace(&mut self.last, now));
        let fills_in = u32::try_from(fullest).map_or(Duration::ZERO, |fullest| {
            since.saturating_mul(FILLED).checked_div(fullest).unwrap_or(CALM)
        });
        let much = if self.calm { fills_in < LIVELY } else { fullest >= FILLS };
        let quick = found.waited_for || withheld || !self.calm && found.shims >= FILLS;
        if quick || found.change || much {
            self.news = now;
        }
        self.calm = now.duration_since(self.news) >= CALM_AFTER;
        let (soonest, latest) = match (quick, self.calm) {
            (true, _) if found.waited_for => (AT_ONCE, AT_ONCE),
            (true, _) => (QUICK, QUICK),
            (false, false) => (LIVELY, LIVELY),
            (false, true) => (LIVELY, fills_in.clamp(LIVELY, CALM)),
        };
        Due { soonest, latest }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        AT_ONCE, CALM, CALM_AFTER, DrainRateController, Due, FILLS, LIVELY, QUICK, RoundResult,
        WITHHELD,
    };
    use std::time::{Duration, Instant};

    const fn due(soonest: Duration, latest: Duration) -> Due {
        Due { soonest, latest }
    }

    #[test]
    fn rounds_are_rare_only_after_a_while_without_news() {
        let (begin, nothing) = (Instant::now(), RoundResult::default());
        let mut controller = DrainRateController::new(begin);
        let later = begin + CALM_AFTER;
        assert_eq!(controller.next(nothing, later - Duration::from_millis(1)), due(LIVELY, LIVELY));
        assert_eq!(controller.next(nothing, later), due(LIVELY, CALM));
        // An eighth of a ring a second is not much, an eighth of it in a twentieth of that is.
        let filling = RoundResult { shims: FILLS, ..nothing };
        assert_eq!(controller.next(filling, later + 10 * CALM), due(LIVELY, CALM));
        let often = later + 10 * CALM + CALM / 2;
        assert_eq!(
            controller.next(RoundResult { kernel: 2 * FILLS, ..nothing }, often),
            due(LIVELY, CALM / 2)
        );
        assert_eq!(
            controller.next(RoundResult { shims: 256, ..nothing }, often + CALM / 2),
            due(LIVELY, LIVELY)
        );
        assert_eq!(controller.next(nothing, often + CALM / 2), due(LIVELY, LIVELY));
        assert_eq!(controller.next(filling, often + CALM), due(QUICK, QUICK));
        assert_eq!(
            controller.next(RoundResult { kernel: FILLS, ..nothing }, often + CALM),
            due(LIVELY, LIVELY)
        );
        let later = often + 2 * CALM;
        assert_eq!(controller.next(nothing, later + CALM_AFTER), due(LIVELY, CALM));
        controller.news(later + CALM_AFTER);
        assert_eq!(controller.next(nothing, later + CALM_AFTER), due(LIVELY, LIVELY));
    }

    #[test]
    fn rounds_are_quick_while_something_is_waited_for() {
        let (begin, nothing) = (Instant::now(), RoundResult::default());
        for (found, quick) in [
            (RoundResult { waited_for: true, ..nothing }, AT_ONCE),
            (RoundResult { withheld: true, ..nothing }, QUICK),
        ] {
            let mut controller = DrainRateController::new(begin);
            let calm = begin + 2 * CALM_AFTER;
            assert_eq!(controller.next(nothing, calm), due(LIVELY, CALM));
            assert_eq!(controller.next(found, calm), due(quick, quick));
            let still = if found.withheld { due(QUICK, QUICK) } else { due(LIVELY, LIVELY) };
            assert_eq!(controller.next(nothing, calm + WITHHELD - LIVELY), still);
            assert_eq!(controller.next(nothing, calm + WITHHELD), due(LIVELY, LIVELY));
        }
    }
}
