//! Whether a receiver keeps up: how many requests wait for it each time a window comes.

/// So many windows in a row more must wait than at the one before.
pub(super) const WINDOWS: u32 = 5;

/// What is to be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BacklogChange {
    /// Ever more waits.
    FallsBehind,
    /// No more waits than one window makes.
    CaughtUp,
}

/// How what waits for one receiver has changed. It falls behind when ever more has waited for
/// [`WINDOWS`] windows, and more than one window makes. It has caught up when no more than that
/// waits. So the one cannot follow soon after the other.
#[derive(Debug, Default)]
pub(super) struct BacklogTrend {
    waited: Option<u64>,
    rises: u32,
    is_behind: bool,
}

impl BacklogTrend {
    /// A window of so many profiles comes while so many requests of earlier ones wait.
    pub(super) fn window(&mut self, profiles: u64, waiting: u64) -> Option<BacklogChange> {
        let rises = self.waited.replace(waiting).is_some_and(|waited| waiting > waited);
        self.rises = if rises { self.rises.saturating_add(1) } else { 0 };
        if self.is_behind && waiting <= profiles {
            self.is_behind = false;
            return Some(BacklogChange::CaughtUp);
        }
        if !self.is_behind && waiting > profiles && self.rises >= WINDOWS {
            self.is_behind = true;
            return Some(BacklogChange::FallsBehind);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::{BacklogChange, BacklogTrend};

    fn changes(waiting: impl IntoIterator<Item = u64>) -> Vec<(usize, BacklogChange)> {
        let mut trend = BacklogTrend::default();
        let change = |(window, waiting)| Some((window, trend.window(100, waiting)?));
        waiting.into_iter().enumerate().filter_map(change).collect()
    }

    #[test]
    fn a_receiver_that_falls_ever_further_behind_is_said_to_once_and_that_it_has_caught_up() {
        let falls = (0..60).map(|window| window * 90);
        // The spool is full, then it is sent.
        let waits =
            falls.chain(std::iter::repeat_n(5400, 60)).chain((0..=60).rev().map(|left| left * 90));
        assert_eq!(
            changes(waits),
            [(5, BacklogChange::FallsBehind), (179, BacklogChange::CaughtUp)]
        );
    }

    #[test]
    fn a_receiver_that_keeps_up_or_is_slow_now_and_then_is_not_said_to_fall_behind() {
        assert_eq!(changes([0; 100]), []);
        // One service's requests are not taken.
        assert_eq!(changes(0..100), []);
        assert_eq!(changes((0..500).map(|window| 300 + window % 5 * 90)), []);
    }

    #[test]
    fn what_rises_and_falls_while_it_is_behind_is_not_said_again() {
        let waits =
            (0..10).map(|window| window * 90).chain((0..100).map(|window| 700 + window % 7 * 90));
        assert_eq!(changes(waits), [(5, BacklogChange::FallsBehind)]);
    }
}
