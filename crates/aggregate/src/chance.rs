//! With what probability waits kept their stacks, as the records of the kept ones tell it: what the
//! estimates of a window stand on.

use std::num::NonZeroU32;

/// The probabilities of one window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Chances {
    kept: u64,
    /// Sum of 1/p over the kept ones. Its mean is the number of all waits, so `kept` over it
    /// estimates the mean of p over all of them.
    stand_for: f64,
    /// Largest and smallest 1/p.
    rarest: f64,
    surest: f64,
}

impl Chances {
    /// A wait kept its stack; `weight` is one over the probability with which it did.
    pub fn kept(&mut self, weight: f64) {
        self.surest = if self.kept == 0 { weight } else { self.surest.min(weight) };
        self.rarest = self.rarest.max(weight);
        self.stand_for += weight;
        self.kept += 1;
    }

    /// In words; `one_in` is what was asked for in place of a budget.
    #[must_use]
    pub fn text(&self, one_in: Option<NonZeroU32>) -> String {
        let by = match one_in {
            Some(waits) => format!("fixed at 1 in {waits}"),
            None => "chosen by the budget, more for threads with few waits".to_owned(),
        };
        if self.kept == 0 {
            return format!("0 kept; their probability: {by}");
        }
        let (least, most) = (1.0 / self.rarest, 1.0 / self.surest);
        let range = if self.rarest > self.surest {
            let mean = self.kept as f64 / self.stand_for;
            format!(
                "{} to {}, {} in the mean of all waits",
                number(least),
                number(most),
                number(mean)
            )
        } else {
            number(most)
        };
        format!("{} kept; their probability: {range}; {by}", self.kept)
    }
}

/// A probability to three digits.
fn number(p: f64) -> String {
    // Not below 2⁻³², which has nine behind the point.
    let zeros = (1..=9).take_while(|&zeros| p < 0.1f64.powi(zeros)).count();
    let text = format!("{p:.*}", zeros + 3);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::Chances;
    use std::num::NonZeroU32;

    #[test]
    fn the_mean_is_that_of_all_waits_and_not_of_the_kept_ones() {
        let mut chances = Chances::default();
        // 100 waits that were sure, and 1,000 of which one in 100 was kept.
        (0..100).for_each(|_| chances.kept(1.0));
        (0..10).for_each(|_| chances.kept(100.0));
        assert_eq!(
            chances.text(None),
            "110 kept; their probability: 0.01 to 1, 0.1 in the mean of all waits; chosen by the \
             budget, more for threads with few waits"
        );
    }

    #[test]
    fn a_fixed_probability_is_told_as_such() {
        let mut chances = Chances::default();
        let one_in = |waits| NonZeroU32::new(waits);
        assert_eq!(chances.text(one_in(8)), "0 kept; their probability: fixed at 1 in 8");
        chances.kept(8.0);
        chances.kept(8.0);
        assert_eq!(chances.text(one_in(8)), "2 kept; their probability: 0.125; fixed at 1 in 8");
    }

    #[test]
    fn small_probabilities_keep_their_digits() {
        let of = |p: f64| {
            let mut chances = Chances::default();
            chances.kept(1.0 / p);
            chances.text(NonZeroU32::new(1))
        };
        for (p, text) in [
            (1.0, "1"),
            (0.123_456, "0.123"),
            (0.012_345, "0.0123"),
            (1.0 / 1_048_576.0, "0.000000954"),
        ] {
            assert!(of(p).contains(&format!(": {text};")), "{}", of(p));
        }
    }
}
