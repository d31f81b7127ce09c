//! When to look whether the threads of a process publish what they work for ([`super::published`]): at its first stack, and then less and less often,
//! for they may begin to at any time.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// Processes with stacks.
#[derive(Debug, Default)]
pub struct Looks {
    by_pid: HashMap<u32, Look>,
}

#[derive(Clone, Copy, Debug)]
enum Look {
    Found,
    Again { at: Instant, pause: Duration },
}

impl Looks {
    /// Whether it is time to look at this process.
    #[must_use]
    pub fn is_due(&self, pid: u32, now: Instant) -> bool {
        match self.by_pid.get(&pid) {
            Some(Look::Found) => false,
            Some(Look::Again { at, .. }) => now >= *at,
            None => true,
        }
    }

    /// It was looked at.
    pub fn looked(&mut self, pid: u32, now: Instant, found: bool) {
        let next = match self.by_pid.get(&pid) {
            _ if found => Look::Found,
            Some(Look::Again { pause, .. }) => {
                let pause = pause.saturating_mul(2).min(LONGEST);
                Look::Again { at: now + pause, pause }
            }
            Some(Look::Found) | None => Look::Again { at: now + FIRST, pause: FIRST },
        };
        self.by_pid.insert(pid, next);
    }

    /// It has ended or become another program; true when its threads were found to publish.
    pub fn forget(&mut self, pid: u32) -> bool {
        matches!(self.by_pid.remove(&pid), Some(Look::Found))
    }

    /// Forgets all processes but these; answers those whose threads were found to publish.
    pub fn keep(&mut self, alive: &HashSet<u32>) -> Vec<u32> {
        let gone: Vec<u32> = self.by_pid.keys().filter(|pid| !alive.contains(pid)).copied().collect();
        gone.into_iter().filter(|pid| self.forget(*pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, LONGEST, Looks};
    use std::collections::HashSet;
    use std::time::{Duration, Instant};

    #[test]
    fn a_process_is_looked_at_less_and_less_often_until_something_is_found() {
        let (mut looks, mut now) = (Looks::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert!(looks.is_due(7, now));
            looks.looked(7, now, false);
            let begin = now;
            while !looks.is_due(7, now) {
                now += Duration::from_millis(500);
            }
            pauses.push(now - begin);
        }
        assert_eq!((pauses[0], pauses[1], pauses[8]), (FIRST, 2 * FIRST, LONGEST));
        looks.looked(7, now, true);
        assert!(!looks.is_due(7, now + 10 * LONGEST) && looks.is_due(8, now));
        assert!(looks.keep(&HashSet::from([7])).is_empty());
        assert_eq!(looks.keep(&HashSet::new()), [7]);
        assert!(looks.is_due(7, now));
    }
}
