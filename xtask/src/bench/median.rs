//! Medians of what was measured, and how sure they are.

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.get(middle.wrapping_sub(1))) {
        (Some(upper), Some(lower)) if values.len().is_multiple_of(2) => {
            f64::midpoint(*upper, *lower)
        }
        (Some(upper), _) => *upper,
        (None, _) => 0.0,
    }
}

/// The median, and the interval that holds the true one with 95 %: of n values as many are below it
/// as heads come up when n coins are thrown. So the k-th value from either end is on its own side
/// of it unless fewer than k heads come up, for which there is a chance of 2.5 % at most.
pub(super) fn median_interval(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let mut chance = 0.5_f64.powf(n as f64);
    let (mut k, mut fewer) = (0, chance);
    while fewer <= 0.025 && k < n {
        k += 1;
        chance *= (n + 1 - k) as f64 / k as f64;
        fewer += chance;
    }
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    let k = k.max(1);
    [median(sorted.clone()), at(k - 1), at(n.saturating_sub(k))]
}

#[cfg(test)]
mod tests {
    use super::{median, median_interval};

    #[test]
    fn median_of_odd_and_even() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median(vec![4.0, 1.0, 2.0, 3.0]) - 2.5).abs() < 1e-9);
    }

    /// Tables of the sign test have these ranks: 6 and 15 of 20 values, 3 and 10 of 12, and none of
    /// 5.
    #[test]
    fn interval_of_a_median() {
        let of = |n: u32| median_interval(&(1..=n).rev().map(f64::from).collect::<Vec<_>>());
        for (n, expected) in [(20, [10.5, 6.0, 15.0]), (12, [6.5, 3.0, 10.0]), (5, [3.0, 1.0, 5.0])]
        {
            assert!(
                of(n).iter().zip(expected).all(|(found, right)| (found - right).abs() < 1e-9),
                "{n}"
            );
        }
    }
}
