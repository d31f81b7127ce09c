//! What kept waits stand for, and how their estimates become parts of a thread's exact total.

/// Time of waits that were all kept.
#[derive(Clone, Copy, Default)]
pub(super) struct WaitTimes {
    pub(super) blocked_ns: f64,
    pub(super) runnable_ns: f64,
}

/// Time at one place: of waits that stand for themselves, and of waits that stand for more.
#[derive(Clone, Copy, Default)]
pub(super) struct WaitEstimate {
    pub(super) sure: WaitTimes,
    pub(super) scaled: WaitTimes,
    pub(super) spread: WaitVariance,
}

/// The sampler's effect on sums of waits. Of waits x, each kept with probability p and then
/// weighing w = 1/p, the sum of w·x has a variance that Σ w·(w − 1)·x² over the kept ones estimates
/// without bias; of two such sums the covariance is the same with x·y.
#[derive(Clone, Copy, Default)]
pub(super) struct WaitVariance {
    pub(super) blocked: f64,
    pub(super) both: f64,
    pub(super) runnable: f64,
}

impl WaitVariance {
    pub(super) fn add(&mut self, other: Self, sign: f64) {
        self.blocked += sign * other.blocked;
        self.both += sign * other.both;
        self.runnable += sign * other.runnable;
    }

    /// Variance of `blocked` × the sum of blocked times + `runnable` × the sum of runnable times.
    pub(super) fn variance(self, blocked: f64, runnable: f64) -> f64 {
        blocked * blocked * self.blocked
            + 2.0 * blocked * runnable * self.both
            + runnable * runnable * self.runnable
    }
}

impl WaitEstimate {
    pub(super) fn merge(&mut self, other: Self) {
        for (sum, other) in [(&mut self.sure, other.sure), (&mut self.scaled, other.scaled)] {
            sum.blocked_ns += other.blocked_ns;
            sum.runnable_ns += other.runnable_ns;
        }
        self.spread.add(other.spread, 1.0);
    }

    pub(super) fn add(&mut self, blocked_ns: u64, runnable_ns: u64, weight: f64) {
        let to = if weight > 1.0 { &mut self.scaled } else { &mut self.sure };
        to.blocked_ns += blocked_ns as f64 * weight;
        to.runnable_ns += runnable_ns as f64 * weight;
        let (blocked, runnable, chance) =
            (blocked_ns as f64, runnable_ns as f64, weight * (weight - 1.0));
        let spread = WaitVariance {
            blocked: chance * blocked * blocked,
            both: chance * blocked * runnable,
            runnable: chance * runnable * runnable,
        };
        self.spread.add(spread, 1.0);
    }
}

/// An estimate that is short of the exact total by more standard errors than this, and that is less
/// than half of it, is not short by chance: records were lost, or a long wait came among many short
/// ones and was not kept. The kept waits do not stand for that time. Up to twice the estimate they
/// do: where the budget left some stretches all but without a kept wait, the thread's other waits
/// are the best guess there is, and the stated error says how good it is.
pub(super) const BELIEVED_ERRORS: f64 = 4.0;
pub(super) const BELIEVED_TIMES: f64 = 2.0;

/// What makes a thread's estimates sum to its exact total, as far as chance explains the
/// difference.
pub(super) struct Division {
    /// Factor of what is sure: it stays as it is, except for the rounding of two clocks read apart.
    pub(super) sure: f64,
    /// What is left of the total for what the sampler chose.
    pub(super) rest: f64,
    /// What is left of it for waits without a stack for which none that was kept can stand.
    pub(super) lost: f64,
    /// The estimate of that, X, and of its variance, Q.
    pub(super) more: f64,
    pub(super) variance: f64,
}

impl Division {
    pub(super) fn of(total: f64, sure: f64, more: f64, variance: f64) -> Self {
        let left = (total - sure).max(0.0);
        let believed = (more * BELIEVED_TIMES).max(more + BELIEVED_ERRORS * variance.sqrt());
        let rest = if more > 0.0 { left.min(believed) } else { 0.0 };
        Self {
            sure: if sure > total { total / sure } else { 1.0 },
            rest,
            lost: left - rest,
            more,
            variance,
        }
    }

    /// How far the estimate is from what it is scaled to. No sampling error says how much of that
    /// is a place of which no wait was kept: each row is unsure by its part of it.
    pub(super) fn beyond_estimate(&self) -> f64 {
        self.rest - self.more
    }

    /// The part of a row with estimate Y, of variance R, in the rest. Beale's ratio estimator,
    /// (Y/X)·(1 + R/XY)/(1 + Q/X²), R being the covariance of Y with X, since rows share no waits.
    /// Over all rows it sums to 1, as the ΣR are Q.
    pub(super) fn part(&self, own: f64, variance: f64) -> f64 {
        if self.more > 0.0 {
            (own * self.more + variance) / (self.more * self.more + self.variance)
        } else {
            0.0
        }
    }

    /// Time in the profile for a unit of the estimate.
    pub(super) fn scale(&self) -> f64 {
        if self.more > 0.0 { self.rest / self.more } else { 0.0 }
    }
}
