//! When windows end, and what their cost says about the next one's rates.

use super::rate_controller;
use super::recording::ActiveRecording;
use super::schedule::Schedule;
use super::state::DaemonState;
use crate::config::WindowsConfig;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Ends windows in time.
pub(super) struct WindowTimer {
    state: Arc<DaemonState>,
    schedule: Schedule,
    /// It was logged that rates are at their lowest and that the cost is too high all the same.
    said_lowest: bool,
}

impl WindowTimer {
    /// A window begins now.
    pub(super) fn begin(state: Arc<DaemonState>) -> Self {
        let schedule =
            Schedule::begin(state.config().windows.clone(), Instant::now(), SystemTime::now());
        Self { state, schedule, said_lowest: false }
    }

    /// The present window began just now, and ends as this configuration says.
    pub(super) fn restart(&mut self, windows: &WindowsConfig) {
        self.schedule = Schedule::begin(windows.clone(), Instant::now(), SystemTime::now());
    }

    /// How long the window has still to go.
    pub(super) fn left(&self) -> Duration {
        self.schedule.left(Instant::now(), SystemTime::now())
    }

    /// True when the window is over; the next has begun then.
    pub(super) fn is_over(&mut self) -> bool {
        self.schedule.is_over(Instant::now(), SystemTime::now())
    }

    /// A window ends; the next has the rates that the CPU time of this one suggests.
    pub(super) fn window_over(&mut self, active: &mut ActiveRecording) {
        let before = active.rates().steps();
        let budget = self.state.mode().cpus;
        let took = active.rates().window_over(Instant::now(), self.state.cost.spent(), budget);
        if took > budget {
            self.state.counters.windows_over_cpu.add(1);
        }
        let steps = active.rates().steps();
        active.cut();
        let is_lowest = steps == rate_controller::STEPS;
        let too_much = is_lowest && steps == before && took > budget;
        let hertz = self.state.rates.frequency();
        let what = format!("the last window took {took:.3} CPUs, limits.cpu is {budget:.3}");
        if steps < before {
            tracing::info!(
                steps,
                "{what}: the next is recorded at {hertz} samples a second and CPU again"
            );
        } else if steps > before {
            tracing::warn!(
                steps,
                "{what}: the next is recorded at {hertz} samples a second and CPU"
            );
        } else if too_much && !self.said_lowest {
            tracing::warn!(
                steps,
                "{what}, and rates do not go below {hertz} samples a second and CPU: what it costs \
                 to follow this node's threads and processes is more than that"
            );
        }
        // Said anew only after a step up.
        self.said_lowest = is_lowest && (self.said_lowest || too_much);
    }
}
