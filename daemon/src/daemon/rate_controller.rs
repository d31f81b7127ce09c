//! Keeps the profiler within its CPU time: when a window took more, the next one is recorded at
//! lower rates, step by step, and back.
//!
//! Rates change only between windows, so that all samples of one window stand for as much: a
//! profile is as true at a lower rate, only coarser. Exact times need no rate at all.

use super::cost::CpuTime;
use perfusion_sources::SourceRates;
use perfusion_sources::kernel;
use std::time::{Duration, Instant};

/// Each step halves the CPU samples and quarters the stacks of waits: one is 1/32 and 1/1024 at the
/// last.
pub const STEPS: u32 = 5;
/// Least budget of wait stacks: about one a second and CPU.
const LEAST_WAIT_STACKS: u64 = 64 << 10;
/// Least samples of allocations a second of each process.
const LEAST_SAMPLES: u32 = 16;
/// A step back at most doubles the cost: it is made when that leaves room, and when it was so for
/// as many windows.
const EASY: f64 = 0.4;
const EASY_WINDOWS: u32 = 2;
/// To begin costs once (reading all processes and their files, the kernel's verifier), however soon
/// the first window ends: that much time bears it.
const START_BEARS: Duration = Duration::from_secs(60);

/// The steps in force, and what they follow from.
#[derive(Debug)]
pub struct CpuRateController {
    steps: u32,
    easy: u32,
    /// Since when, and the CPU time until then.
    since: (Instant, CpuTime),
    is_first: bool,
}

impl CpuRateController {
    /// A recording begins; the profiler has taken so much CPU time.
    #[must_use]
    pub fn begin(now: Instant, used: CpuTime) -> Self {
        Self { steps: 0, easy: 0, since: (now, used), is_first: true }
    }

    /// Steps below the rates that were asked for.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// A window is over, with so much CPU time taken in all; answers how many CPUs it took.
    pub fn window_over(&mut self, now: Instant, used: CpuTime, budget_cpus: f64) -> f64 {
        let (since, before) = std::mem::replace(&mut self.since, (now, used));
        let least =
            if std::mem::take(&mut self.is_first) { START_BEARS } else { Duration::from_millis(1) };
        let seconds = now.saturating_duration_since(since).max(least).as_secs_f64();
        let cpus = used.since(before).as_secs_f64() / seconds;
        if cpus > budget_cpus {
            self.slower();
        } else if cpus < EASY * budget_cpus && self.steps > 0 {
            self.easy += 1;
            if self.easy >= EASY_WINDOWS {
                (self.easy, self.steps) = (0, self.steps - 1);
            }
        } else {
            self.easy = 0;
        }
        cpus
    }

    /// One step down.
    pub fn slower(&mut self) {
        (self.easy, self.steps) = (0, (self.steps + 1).min(STEPS));
    }

    /// The rates in force, of those that were asked for.
    #[must_use]
    pub fn rates(&self, asked: SourceRates) -> SourceRates {
        let SourceRates {
            kernel: kernel::KernelRates { frequency_hz, wait_stack_budget_bytes_per_s: bytes },
            allocation_samples,
        } = asked;
        SourceRates {
            kernel: kernel::KernelRates {
                frequency_hz: (frequency_hz >> self.steps).max(1),
                wait_stack_budget_bytes_per_s: (bytes >> (2 * self.steps))
                    .max(LEAST_WAIT_STACKS.min(bytes)),
            },
            allocation_samples: (allocation_samples >> self.steps)
                .max(LEAST_SAMPLES.min(allocation_samples)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CpuRateController, CpuTime, STEPS, SourceRates, kernel};
    use std::time::{Duration, Instant};

    const fn asked(
        frequency_hz: u32,
        wait_stack_budget_bytes_per_s: u64,
        allocation_samples: u32,
    ) -> SourceRates {
        SourceRates {
            kernel: kernel::KernelRates { frequency_hz, wait_stack_budget_bytes_per_s },
            allocation_samples,
        }
    }

    /// Of both, half each.
    fn spent(used: Duration) -> CpuTime {
        CpuTime { daemon: used / 2, probes: Some(used / 2) }
    }

    const ASKED: SourceRates = asked(99, 64 << 20, 512);

    #[test]
    fn rates_fall_while_a_window_costs_too_much_and_come_back_when_it_does_not() {
        let start = Instant::now();
        let (mut controller, mut now, mut used) =
            (CpuRateController::begin(start, spent(Duration::ZERO)), start, Duration::ZERO);
        controller.window_over(start, spent(used), 0.1);
        let mut window = |controller: &mut CpuRateController, cpus: f64| {
            now += Duration::from_secs(10);
            used += Duration::from_secs_f64(10.0 * cpus);
            let found = controller.window_over(now, spent(used), 0.1);
            assert!((found - cpus).abs() < 1e-6, "{found}");
            controller.rates(ASKED).kernel.frequency_hz
        };
        let hertz: Vec<u32> = [0.09, 0.2, 0.15, 0.08, 0.03, 0.03, 0.03, 0.08, 0.03, 0.03, 0.03]
            .map(|cpus| window(&mut controller, cpus))
            .to_vec();
        assert_eq!(hertz, [99, 49, 24, 24, 24, 49, 49, 49, 49, 99, 99]);
        assert!((0..20).all(|_| window(&mut controller, 5.0) > 0));
        assert_eq!(controller.steps(), STEPS);
        assert_eq!(controller.rates(ASKED), asked(3, 64 << 10, 16));
    }

    #[test]
    fn the_cost_of_the_start_is_borne_by_a_minute() {
        let start = Instant::now();
        let soon = start + Duration::from_millis(500);
        let mut controller = CpuRateController::begin(start, spent(Duration::ZERO));
        controller.window_over(soon, spent(Duration::from_secs(3)), 0.1);
        assert_eq!(controller.steps(), 0);
        // What comes then has to be paid for when it comes.
        controller.window_over(soon + Duration::from_secs(10), spent(Duration::from_secs(5)), 0.1);
        assert_eq!(controller.steps(), 1);
        let mut dear = CpuRateController::begin(start, spent(Duration::ZERO));
        dear.window_over(soon, spent(Duration::from_secs(8)), 0.1);
        assert_eq!(dear.steps(), 1);
    }

    #[test]
    fn rates_that_are_low_already_do_not_rise() {
        let mut controller = CpuRateController::begin(Instant::now(), CpuTime::default());
        (0..STEPS).for_each(|_| controller.slower());
        assert_eq!(controller.rates(asked(2, 10_000, 8)), asked(1, 10_000, 8));
    }

    #[test]
    fn to_learn_what_the_probes_took_is_no_cost() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let at = |seconds, probes: Option<u32>| {
            let probes = probes.map(|seconds| seconds * second);
            (start + seconds * second, CpuTime { daemon: seconds * second / 100, probes })
        };
        let mut controller = CpuRateController::begin(start, at(0, Some(0)).1);
        let mut took = |(now, spent)| controller.window_over(now, spent, 0.1);
        // Of the first minute, which bears the start: 0.6 s of the daemon, 3 of the probes.
        assert!((took(at(60, Some(3))) - 0.06).abs() < 1e-9);
        // Then the kernel does not say, and then it does.
        assert!((took(at(120, None)) - 0.01).abs() < 1e-9);
        assert!((took(at(180, Some(50))) - 0.01).abs() < 1e-9);
        assert!((took(at(240, Some(53))) - 0.06).abs() < 1e-9);
    }
}
