//! Keeps the profiler within its memory: what to do when there is too much of it, the cheaper
//! first.
//!
//! What a window takes is mostly its stacks, and to end it takes as much again and more: the stacks
//! with their estimates, then the profiles of all services as files. So stacks have a part of the
//! memory that leaves room for that, and when it is nearly full the window ends.

use perfusion_model::backoff::Backoff;
use std::time::{Duration, Instant};

/// What was done needs a moment to show.
const PAUSE: Duration = Duration::from_secs(2);
/// When it does not help, it is not done all the time.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Part of the memory for the stacks of a window: a quarter, and almost twice that when it ends.
const STACKS: u64 = 4;
/// Part of the memory for windows that wait for the sinks, as the bytes of their files.
const WINDOWS: u64 = 16;
/// When so much of it is taken the window ends: what comes until it has still finds room.
const NEARLY_FULL: f64 = 0.7;

/// Until a cut shows it takes as long as the processor has work before it.
const CUT_SHOWS: Duration = Duration::from_secs(15);

/// Of so much memory, the bytes that a window's stacks may take.
#[must_use]
pub fn for_stacks(memory: u64) -> u64 {
    memory / STACKS
}

/// Of so much memory, the bytes that windows which wait for the sinks may take.
#[must_use]
pub fn for_windows(memory: u64) -> u64 {
    memory / WINDOWS
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relief {
    /// Drop what is only remembered to be quick.
    Shed,
    /// End the window now, with the stacks and values it holds, and record the next one at lower
    /// rates.
    Cut,
}

/// How long there has been too much.
#[derive(Debug, Default)]
pub struct MemoryBudget {
    /// Times something was done in a row.
    tries: u32,
    next: Option<Instant>,
    /// When a window was ended for its stacks, while they are not seen to take less.
    cut: Option<Instant>,
}

impl MemoryBudget {
    /// Looks at how much memory is used, and what part of the stacks' budget is used.
    pub fn look(&mut self, now: Instant, used: u64, bound: u64, fill: f64) -> Option<Relief> {
        if fill < NEARLY_FULL {
            self.cut = None;
        } else if self.cut.is_none_or(|cut| now >= cut + CUT_SHOWS) {
            self.cut = Some(now);
            return Some(Relief::Cut);
        }
        if used <= bound {
            *self = Self { cut: self.cut, ..Self::default() };
            return None;
        }
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        self.tries = self.tries.saturating_add(1);
        // Both remedies have been tried when the pause doubles.
        self.next = Some(now + Backoff::new(PAUSE, LONGEST_PAUSE).after(self.tries / 2));
        Some(if self.tries % 2 == 1 { Relief::Shed } else { Relief::Cut })
    }
}

#[cfg(test)]
mod tests {
    use super::{MemoryBudget, Relief};
    use std::time::{Duration, Instant};

    #[test]
    fn caches_go_first_then_the_window_and_what_does_not_help_is_done_less_and_less_often() {
        let (mut budget, start) = (MemoryBudget::default(), Instant::now());
        let mut done = Vec::new();
        for second in 0..200 {
            if let Some(relief) = budget.look(start + Duration::from_secs(second), 2, 1, 0.0) {
                done.push((second, relief));
            }
        }
        let (times, what): (Vec<u64>, Vec<Relief>) = done.into_iter().unzip();
        assert_eq!(times, [0, 2, 6, 10, 18, 26, 42, 58, 90, 122, 182]);
        assert!(what.chunks(2).all(|pair| pair[0] == Relief::Shed));
        assert!(what.iter().skip(1).step_by(2).all(|relief| *relief == Relief::Cut));
        assert_eq!(budget.look(start, 1, 1, 0.0), None);
        assert_eq!(budget.look(start, 2, 1, 0.0), Some(Relief::Shed));
    }

    #[test]
    fn a_window_whose_stacks_have_little_room_left_ends_before_memory_is_short() {
        let (mut budget, start) = (MemoryBudget::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(budget.look(start, 1, 9, 0.5), None);
        assert_eq!(budget.look(start, 1, 9, 0.8), Some(Relief::Cut));
        // What it says is old.
        assert_eq!(budget.look(start + 9 * second, 1, 9, 0.9), None);
        assert_eq!(budget.look(start + 16 * second, 1, 9, 0.9), Some(Relief::Cut));
        assert_eq!(budget.look(start + 17 * second, 1, 9, 0.1), None);
        assert_eq!(budget.look(start + 18 * second, 1, 9, 0.8), Some(Relief::Cut));
    }
}
