//! How much may be done for one process, and for all of them together, in a second. What a process
//! maps and runs decides how much work each of its stacks is, so it may use up its share; and many
//! processes may do that at once. Therefore each has a little of its own that no other can use up,
//! and what goes beyond comes out of a common store. A process that was just made has nothing of
//! its own yet: else whoever makes very many had very many shares.

use super::guarded_io;
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_secs(1);

/// Of one thing, per [`PERIOD`].
struct BudgetLimits {
    /// A process's own.
    own: u64,
    /// Most that one process may use.
    most: u64,
    /// What all processes together may use beyond their own.
    common: u64,
}

/// CPU time for opening files and looking up rules. One thread does that, and more than that.
const TIME_NS: BudgetLimits =
    BudgetLimits { own: 10_000_000, most: 250_000_000, common: 750_000_000 };
/// Rules pushed to the probes, which know 65,536 and forget those that were not used lately: at
/// this rate it takes seconds to have them forget one, and what is in use is used more often.
const RULES: BudgetLimits = BudgetLimits { own: 256, most: 8192, common: 16_384 };

/// What was used in this period.
#[derive(Clone, Copy, Debug, Default)]
struct BudgetUse {
    time_ns: u64,
    rules: u64,
}

/// What one process has used.
#[derive(Clone, Debug)]
pub(super) struct ProcessBudget {
    since: Instant,
    used: BudgetUse,
    /// CPU time since it was made.
    time: Duration,
    /// When it was made, what was told of it since, and the CPU time that took beside look-ups.
    made: Instant,
    records: u64,
    handling: Duration,
}

/// What all have used of what is nobody's own.
#[derive(Debug, Default)]
pub(super) struct CommonBudget {
    since: Option<Instant>,
    used: BudgetUse,
}

impl ProcessBudget {
    /// Of a process that was just made.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            used: BudgetUse { time_ns: TIME_NS.own, rules: RULES.own },
            time: Duration::ZERO,
            made: now,
            records: 0,
            handling: Duration::ZERO,
        }
    }

    /// CPU time spent on the process since it was made.
    pub(super) fn time(&self) -> Duration {
        self.time
    }

    /// One more record was told of it, which took so much CPU time beside look-ups.
    pub(super) fn handled(&mut self, time: Duration) {
        self.records += 1;
        self.handling = self.handling.saturating_add(time);
    }

    /// Records told of it, all CPU time spent on it, and since when.
    pub(super) fn cost(&self) -> (u64, Duration, Instant) {
        (self.records, self.time.saturating_add(self.handling), self.made)
    }

    /// Begins a new period when one is over; true when it did. A single look-up may take more time
    /// than there is for a period; it comes out of those that follow.
    pub(super) fn refill(&mut self, now: Instant) -> bool {
        let since = now.duration_since(self.since);
        let over = since >= PERIOD;
        if over {
            let paid = TIME_NS.most.saturating_mul(since.as_secs() / PERIOD.as_secs());
            let used = BudgetUse { time_ns: self.used.time_ns.saturating_sub(paid), rules: 0 };
            (self.since, self.used) = (now, used);
        }
        over
    }
}

impl CommonBudget {
    /// Begins a new period when one is over.
    pub(super) fn refill(&mut self, now: Instant) {
        if self.since.is_none_or(|since| now.duration_since(since) >= PERIOD) {
            *self = Self { since: Some(now), used: BudgetUse::default() };
        }
    }

    /// True while time may be spent on the process.
    pub(super) fn has_time(&self, share: &ProcessBudget) -> bool {
        TIME_NS.allow(share.used.time_ns, self.used.time_ns)
    }

    /// So much time was spent on the process.
    pub(super) fn spend(&mut self, share: &mut ProcessBudget, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        TIME_NS.add(&mut share.used.time_ns, &mut self.used.time_ns, ns);
        share.time += time;
    }

    /// Takes one rule for the process; false when there is none left.
    pub(super) fn take_rule(&mut self, share: &mut ProcessBudget) -> bool {
        let allowed = RULES.allow(share.used.rules, self.used.rules);
        if allowed {
            RULES.add(&mut share.used.rules, &mut self.used.rules, 1);
        }
        allowed
    }
}

impl BudgetLimits {
    fn allow(&self, used: u64, common: u64) -> bool {
        used < self.own || used < self.most && common < self.common
    }

    fn add(&self, used: &mut u64, common: &mut u64, amount: u64) {
        let beyond = used.saturating_sub(self.own);
        *used = used.saturating_add(amount);
        *common = common.saturating_add(used.saturating_sub(self.own) - beyond);
    }
}

/// CPU time of this thread, and of the others that have worked for it while it waited: unlike the
/// clock it does not count what other programs take.
pub fn cpu_time() -> Duration {
    guarded_io::thread_time() + guarded_io::time_of_others()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Spends in steps of a millisecond until nothing is left; answers the milliseconds.
    fn use_up(common: &mut CommonBudget, share: &mut ProcessBudget) -> u64 {
        let mut ms = 0;
        while common.has_time(share) {
            common.spend(share, Duration::from_millis(1));
            ms += 1;
        }
        ms
    }

    #[test]
    fn many_greedy_processes_leave_each_other_one_its_own() {
        let start = Instant::now();
        let mut common = CommonBudget::default();
        common.refill(start);
        let mut shares: Vec<ProcessBudget> = (0..10).map(|_| ProcessBudget::new(start)).collect();
        let now = start + PERIOD;
        common.refill(now);
        assert!(shares.iter_mut().all(|share| share.refill(now)));
        let used: Vec<u64> = shares.iter_mut().map(|share| use_up(&mut common, share)).collect();
        // 240 ms of the common store each, until the fourth finds a rest of it.
        assert_eq!(used, [250, 250, 250, 40, 10, 10, 10, 10, 10, 10]);
        // One that was just made has nothing of its own.
        assert_eq!(use_up(&mut common, &mut ProcessBudget::new(now)), 0);
        assert!(!shares[0].refill(now) && !common.has_time(&shares[0]));
        let next = now + PERIOD;
        common.refill(next);
        assert!(shares[0].refill(next) && common.has_time(&shares[0]));
    }

    #[test]
    fn time_taken_at_once_is_paid_back() {
        let start = Instant::now();
        let (mut common, mut share) = (CommonBudget::default(), ProcessBudget::new(start));
        common.spend(&mut share, Duration::from_secs(1));
        let mut allowed = |seconds: u32| {
            common.refill(start + seconds * PERIOD);
            share.refill(start + seconds * PERIOD);
            common.has_time(&share)
        };
        assert_eq!([1, 2, 3, 4, 5].map(&mut allowed), [false, false, false, true, true]);
        common.spend(&mut share, Duration::from_secs(1));
        share.refill(start + 9 * PERIOD);
        assert!(common.has_time(&share), "in one go too");
    }

    #[test]
    fn what_is_done_by_a_thread_that_can_be_left_behind_is_time_as_well() {
        let busy = Duration::from_millis(5);
        let before = cpu_time();
        guarded_io::wait_for(guarded_io::IoPeer::Process(u32::MAX - 2), move || {
            let begin = guarded_io::thread_time();
            while guarded_io::thread_time() - begin < busy {}
        });
        assert!(cpu_time() - before >= busy);
    }

    #[test]
    fn rules_are_shared_in_the_same_way() {
        let start = Instant::now();
        let mut common = CommonBudget::default();
        common.refill(start + PERIOD);
        let mut learn = |count: u64| {
            let mut share = ProcessBudget::new(start);
            share.refill(start + PERIOD);
            (0..count).filter(|_| common.take_rule(&mut share)).count() as u64
        };
        let pushed: Vec<u64> = (0..4).map(|_| learn(100_000)).collect();
        let rest = RULES.common - 2 * (RULES.most - RULES.own) + RULES.own;
        assert_eq!(pushed, [RULES.most, RULES.most, rest, RULES.own]);
    }
}
