//! Waits of which one in 100 keeps its stack: is the true time of each place inside the interval
//! the profile states, as often as it says?
//!
//! Estimator: a kept wait stands for 1/p; a thread's estimates then share its exact waiting time T
//! (Beale's ratio estimator, crates/aggregate/src/threads.rs). The standard error is in the label
//! `wait_stderr` of each row. The rows of one place differ by who woke the thread; their errors are
//! added as if independent. Truth: the program's own account of its naps, of which the profile
//! should have the same share.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::app::{Compiler, Workload};
use crate::perfusion::record_pid;

/// Fewest naps a recording is judged by: some 30 of them kept their stack, without which the normal
/// distribution is a poor guide. How many there are does not depend on which ones the sampler
/// chose, so leaving recordings out for that biases nothing.
const FEWEST_NAPS: u64 = 3000;
/// Longest recording: on a machine so busy that the program cannot nap that often, a longer one is
/// tried.
const LONGEST: Duration = Duration::from_secs(60);

/// Of so many waits one keeps its stack.
const ONE_IN: f64 = 100.0;

/// Half the width of a 99 % interval of a normal distribution, in standard deviations.
pub const HALF_WIDTH: f64 = 2.576;

/// One recording with downsampled waits.
#[derive(Clone, Copy, Debug)]
pub struct Repetition {
    /// Share of the short naps in all waiting, by the profile.
    pub estimate: f64,
    /// Its standard error, as the profile states it.
    pub stderr: f64,
    /// The same share by the program's own clocks.
    pub truth: f64,
    /// Naps in the recording; about one in 100 of them kept its stack.
    pub naps: u64,
    /// What the standard error is in truth, by the program's own account of every nap: of the first
    /// order.
    pub true_stderr: f64,
    /// The same if all naps of a place were equally long.
    pub even_stderr: f64,
}

impl Repetition {
    /// How far the estimate is from the truth, in stated standard errors.
    pub fn deviation(self) -> f64 {
        (self.estimate - self.truth) / self.stderr
    }

    /// True when no few naps were very much longer than the rest, as those of a thread that finds
    /// no CPU on a busy machine are: a recording that misses them states too small an error. Which
    /// waits the sampler keeps has no part in this.
    pub fn is_even(self) -> bool {
        self.true_stderr <= self.even_stderr * 1.2
    }

    /// True when the truth is inside the stated 99 % interval.
    pub fn covered(self) -> bool {
        self.deviation().abs() <= HALF_WIDTH
    }
}

/// Records the program `repetitions` times.
///
/// # Errors
/// When the program or the recorder fails, or a profile states no error, or the machine is too
/// busy.
pub fn repeat(repetitions: usize, length: Duration) -> anyhow::Result<Vec<Repetition>> {
    let mut length = length;
    let mut app = Workload::compiled(Compiler::C, "naps.c", &["-O2"])?.start()?;
    let thread = app.thread("napper").to_string();
    let mut results = Vec::new();
    while results.len() < repetitions {
        let (profile, _) =
            record_pid(app.pid(), length, &["--wait-stacks-one-in", &ONE_IN.to_string()])?;
        let end = profile.time_ns + profile.duration_ns;
        let told = app.ask(&format!("window {} {end}", profile.time_ns), "waited")?;
        let number = |name: &str| {
            told.get(name).and_then(Value::as_f64).with_context(|| format!("no {name} in {told}"))
        };
        let count = [number("short_naps")?, number("long_naps")?];
        let naps = (count[0] + count[1]) as u64;
        if naps < FEWEST_NAPS {
            ensure!(length < LONGEST, "only {naps} naps in {length:?}: the machine is too busy");
            length *= 2;
            continue;
        }
        let mut waited = [0.0; 2];
        let mut variance = 0.0;
        for sample in profile.samples.iter().filter(|sample| sample.label("thread_id") == thread) {
            let ns = (profile.value(sample, "blocked") + profile.value(sample, "runnable")) as f64;
            for (place, waited) in ["short_nap", "long_nap"].into_iter().zip(&mut waited) {
                *waited += if sample.has(place) { ns } else { 0.0 };
            }
            if sample.has("short_nap") {
                let stderr: f64 = sample.label("wait_stderr").parse().unwrap_or(0.0);
                variance += stderr * stderr;
            }
        }
        let all: f64 = waited.iter().sum();
        ensure!(
            variance > 0.0,
            "the profile states no error of the short naps: {}",
            profile.describe("blocked", |_| true)
        );
        let (short, long) = (number("short")? * 1e-9, number("long")? * 1e-9);
        let truth = short / (short + long);
        // Of a sum of waits x, each kept with probability 1/w and then weighing w, the variance is
        // Σ(w − 1)·x². The share moves by 1 − R of a short nap's weight, by −R of a long one's.
        let error = |of_short: f64, of_long: f64| {
            let variance = (1.0 - truth).powi(2) * of_short + truth.powi(2) * of_long;
            ((ONE_IN - 1.0) * variance).sqrt() / (short + long)
        };
        results.push(Repetition {
            estimate: waited[0] / all,
            stderr: variance.sqrt() / all,
            truth,
            naps,
            true_stderr: error(number("short_squares")?, number("long_squares")?),
            even_stderr: error(short * short / count[0], long * long / count[1]),
        });
    }
    app.stop()?;
    Ok(results)
}

/// The section of the report.
pub fn markdown(repetitions: &[Repetition], length: Duration) -> String {
    let count = repetitions.len();
    let naps =
        repetitions.iter().map(|repetition| repetition.naps).sum::<u64>() / count.max(1) as u64;
    let (mean, of_mean) = mean_error(repetitions);
    let even: Vec<Repetition> =
        repetitions.iter().copied().filter(|repetition| repetition.is_even()).collect();
    format!(
        "\n## Downsampled waits\nA thread naps at two places, chosen by chance. One wait in 100 \
         keeps its stack (`--wait-stacks-one-in 100`). The figures are of {count} \
         recordings of {} s or more with {naps} naps each, mean. A kept wait stands for 100, and a \
         thread's estimates share its exact waiting time T. \
         Let w = 1/p and R be a place's share of the thread. The variance of its estimate T·R is \
         (T/Σwx)²·[(1−R)²·Σw(w−1)x² of its own kept waits x + \
         R²·Σw(w−1)x² of the others]. That is a ratio estimator's to first order. Its root is the \
         label `wait_stderr`.\n\n\
         - Truth (the program's own clocks) inside the stated 99 % interval (± {HALF_WIDTH} \
         standard errors): **{} of {count}**; promised: 97 of 100.\n\
         - Mean of estimate − truth, of the short naps' share: {:.2} ± {:.2} points (one standard \
         error); of an unbiased estimate 0.\n\
         - Root mean square of (estimate − truth) / stated standard error: {:.2}; of a right one \
         1.\n\n\
         The interval is a normal distribution's. Some waits may be very much longer than the \
         rest, when a thread finds no CPU on a busy machine. A \
         recording that missed them states too small an error, and fewer contain the truth. The \
         mean stays right. Without such waits, by the program's own \
         account: {} of {} recordings. The interval of {} of them contained the truth.\n",
        length.as_secs_f64(),
        covered(repetitions),
        mean * 100.0,
        of_mean * 100.0,
        spread(repetitions),
        even.len(),
        count,
        covered(&even),
    )
}

/// For machines.
pub fn json(repetitions: &[Repetition]) -> Value {
    let one = |repetition: &Repetition| {
        json!({
            "estimate": repetition.estimate, "stderr": repetition.stderr, "truth": repetition.truth,
            "naps": repetition.naps,
            "true_stderr": repetition.true_stderr, "even": repetition.is_even(),
        })
    };
    json!({
        "covered": covered(repetitions), "mean_error": mean_error(repetitions).0,
        "spread": spread(repetitions),
        "repetitions": repetitions.iter().map(one).collect::<Vec<_>>(),
    })
}

/// Mean of estimate − truth, and the true standard error of that mean: of an unbiased estimate the
/// first is 0, give or take the second.
pub fn mean_error(repetitions: &[Repetition]) -> (f64, f64) {
    let count = repetitions.len().max(1) as f64;
    let mean =
        repetitions.iter().map(|repetition| repetition.estimate - repetition.truth).sum::<f64>()
            / count;
    let variance = repetitions.iter().map(|repetition| repetition.true_stderr.powi(2)).sum::<f64>();
    (mean, variance.sqrt() / count)
}

/// Root of the mean square of (estimate − truth) / standard error: 1 when the stated errors are
/// neither too small nor too large.
pub fn spread(repetitions: &[Repetition]) -> f64 {
    let count = repetitions.len().max(1) as f64;
    (repetitions.iter().map(|repetition| repetition.deviation().powi(2)).sum::<f64>() / count)
        .sqrt()
}

/// How many were covered.
pub fn covered(repetitions: &[Repetition]) -> usize {
    repetitions.iter().filter(|repetition| repetition.covered()).count()
}
