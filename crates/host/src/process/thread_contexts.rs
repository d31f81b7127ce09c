//! When to look whether the threads of a process publish what they work for ([`super::published`]):
//! at its first stack, and then less and less often, for they may begin to at any time.

use perfusion_model::backoff::Backoff;
use perfusion_model::frame::ProcessId;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_secs(1);
/// After a look that the process's share of work did not suffice for; the share grows meanwhile.
const SOON: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);

/// What a look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadContextLookup {
    /// Where threads publish.
    There,
    /// That they do not.
    Nothing,
    /// It could not be done, or not to its end: the process has used up its share of work.
    PutOff,
}

/// Processes with stacks.
#[derive(Debug, Default)]
pub struct ThreadContextSchedule {
    by_pid: HashMap<u32, ScheduledLookup>,
}

#[derive(Clone, Copy, Debug)]
struct ScheduledLookup {
    /// Which one it was: the pid may be another's by now, or its program another one, and nobody
    /// has been told.
    process: ProcessId,
    next: NextLookup,
}

#[derive(Clone, Copy, Debug)]
enum NextLookup {
    /// Found.
    Never,
    At {
        at: Instant,
        backoff: Backoff,
    },
}

impl ThreadContextSchedule {
    /// Whether it is time to look at this process.
    #[must_use]
    pub fn is_due(&self, pid: u32, process: ProcessId, now: Instant) -> bool {
        match self.by_pid.get(&pid) {
            Some(look) if look.process == process => match look.next {
                NextLookup::Never => false,
                NextLookup::At { at, .. } => now >= at,
            },
            _ => true,
        }
    }

    /// It was looked at. True when what was found before, of whoever had this pid, does not hold
    /// any more.
    pub fn looked(
        &mut self,
        pid: u32,
        process: ProcessId,
        now: Instant,
        found: ThreadContextLookup,
    ) -> bool {
        let before = self.by_pid.get(&pid).copied();
        let mut backoff = match before {
            Some(ScheduledLookup { process: same, next: NextLookup::At { backoff, .. } })
                if same == process =>
            {
                backoff
            }
            _ => Backoff::new(FIRST, LONGEST),
        };
        let next = match found {
            ThreadContextLookup::There => NextLookup::Never,
            ThreadContextLookup::Nothing => NextLookup::At { at: now + backoff.failed(), backoff },
            ThreadContextLookup::PutOff => NextLookup::At { at: now + SOON, backoff },
        };
        self.by_pid.insert(pid, ScheduledLookup { process, next });
        found != ThreadContextLookup::There
            && matches!(before, Some(ScheduledLookup { next: NextLookup::Never, .. }))
    }

    /// There was no room to say what was found: later there may be.
    pub fn refused(&mut self, pid: u32, now: Instant) {
        if let Some(look) = self.by_pid.get_mut(&pid) {
            let backoff = Backoff::new(LONGEST, LONGEST);
            look.next = NextLookup::At { at: now + LONGEST, backoff };
        }
    }

    /// It has ended or become another program; true when its threads were found to publish.
    pub fn forget(&mut self, pid: u32) -> bool {
        matches!(self.by_pid.remove(&pid), Some(ScheduledLookup { next: NextLookup::Never, .. }))
    }

    /// Forgets all processes but these; answers those whose threads were found to publish.
    pub fn keep(&mut self, alive: &HashSet<u32>) -> Vec<u32> {
        let gone: Vec<u32> =
            self.by_pid.keys().filter(|pid| !alive.contains(pid)).copied().collect();
        gone.into_iter().filter(|pid| self.forget(*pid)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, LONGEST, SOON, ThreadContextLookup, ThreadContextSchedule};
    use perfusion_model::frame::ProcessId;
    use std::collections::HashSet;
    use std::time::{Duration, Instant};

    const ONE: ProcessId = ProcessId(1);
    const OTHER: ProcessId = ProcessId(2);

    #[test]
    fn a_process_is_looked_at_less_and_less_often_until_something_is_found() {
        let (mut looks, mut now) = (ThreadContextSchedule::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert!(looks.is_due(7, ONE, now));
            assert!(!looks.looked(7, ONE, now, ThreadContextLookup::Nothing));
            let begin = now;
            while !looks.is_due(7, ONE, now) {
                now += Duration::from_millis(500);
            }
            pauses.push(now - begin);
        }
        assert_eq!((pauses[0], pauses[1], pauses[8]), (FIRST, 2 * FIRST, LONGEST));
        assert!(!looks.looked(7, ONE, now, ThreadContextLookup::There));
        assert!(!looks.is_due(7, ONE, now + 10 * LONGEST) && looks.is_due(8, ONE, now));
        assert!(looks.keep(&HashSet::from([7])).is_empty());
        assert_eq!(looks.keep(&HashSet::new()), [7]);
        assert!(looks.is_due(7, ONE, now));
    }

    #[test]
    fn whoever_has_the_pid_now_is_looked_at_and_what_was_found_of_the_one_before_does_not_hold() {
        let (mut looks, now) = (ThreadContextSchedule::default(), Instant::now());
        looks.looked(7, ONE, now, ThreadContextLookup::There);
        // Its exec, or its end and the beginning of another one, was in no record.
        assert!(looks.is_due(7, OTHER, now));
        assert!(
            looks.looked(7, OTHER, now, ThreadContextLookup::Nothing),
            "the probes are to be told"
        );
        assert!(
            !looks.is_due(7, OTHER, now)
                && !looks.looked(7, OTHER, now, ThreadContextLookup::Nothing)
        );
        looks.looked(7, OTHER, now, ThreadContextLookup::There);
        assert!(
            !looks.looked(7, ONE, now, ThreadContextLookup::There),
            "they have been told of another place"
        );
        assert!(looks.looked(7, OTHER, now, ThreadContextLookup::PutOff) && !looks.forget(7));
    }

    #[test]
    fn what_was_put_off_is_soon_tried_again_and_what_found_no_room_later() {
        let (mut looks, now) = (ThreadContextSchedule::default(), Instant::now());
        for _ in 0..5 {
            looks.looked(7, ONE, now, ThreadContextLookup::PutOff);
        }
        assert!(!looks.is_due(7, ONE, now) && looks.is_due(7, ONE, now + SOON));
        looks.looked(7, ONE, now, ThreadContextLookup::There);
        looks.refused(7, now);
        assert!(!looks.is_due(7, ONE, now + LONGEST / 2) && looks.is_due(7, ONE, now + LONGEST));
        assert!(!looks.forget(7), "nobody was told of it");
    }
}
