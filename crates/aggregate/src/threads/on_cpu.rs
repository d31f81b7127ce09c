//! Where a thread was on a CPU.

use super::StackOrMarker;
use foldhash::HashMap;
use perfusion_model::frame::Marker;
use perfusion_model::stack::StackId;
use std::hash::Hash;
use std::ops::AddAssign;

/// What is known of where it ran, of all it did or of a part.
#[derive(Default)]
pub(super) struct OnCpu {
    /// CPU samples.
    samples: HashMap<StackId, u64>,
    /// How long it ran before it left the CPU so, in ns, kept waits standing for others: what is
    /// known where nothing was sampled.
    before_wait: HashMap<StackId, f64>,
}

impl OnCpu {
    pub(super) fn sampled(&mut self, stack: StackId) {
        add(&mut self.samples, [(stack, 1)]);
    }

    pub(super) fn left(&mut self, stack: StackId, ran_ns: u64, weight: f64) {
        add(&mut self.before_wait, [(stack, ran_ns as f64 * weight)]);
    }

    pub(super) fn merge(&mut self, other: Self) {
        add(&mut self.samples, other.samples);
        add(&mut self.before_wait, other.before_wait);
    }

    /// True when nothing is known.
    pub(super) fn is_empty(&self) -> bool {
        self.samples.is_empty() && self.before_wait.is_empty()
    }

    /// All samples.
    pub(super) fn samples(&self) -> u64 {
        self.samples.values().sum()
    }

    /// How long it ran before it left the CPU, in ns, as far as that is known.
    pub(super) fn ran_ns(&self) -> f64 {
        self.before_wait.values().sum()
    }

    /// The same samples with stacks of the next window.
    pub(super) fn carried(self, carry: &mut dyn FnMut(StackId) -> StackId) -> Self {
        let mut carried = Self::default();
        add(&mut carried.samples, self.samples.into_iter().map(|(stack, n)| (carry(stack), n)));
        add(
            &mut carried.before_wait,
            self.before_wait.into_iter().map(|(stack, ran)| (carry(stack), ran)),
        );
        carried
    }

    /// Samples at each place, and its share of the time: by the samples, else by what ran before it
    /// left the CPU there; all of it at a marker where neither is known.
    pub(super) fn shares(self, unknown: Marker) -> Vec<(StackOrMarker, u64, f64)> {
        let samples: u64 = self.samples.values().sum();
        if samples > 0 {
            let share = |n| n as f64 / samples as f64;
            return self
                .samples
                .into_iter()
                .map(|(stack, n)| (StackOrMarker::Stack(stack), n, share(n)))
                .collect();
        }
        let all: f64 = self.before_wait.values().sum();
        if all > 0.0 {
            let ran = self.before_wait.into_iter().filter(|(_, ran)| *ran > 0.0);
            return ran.map(|(stack, ran)| (StackOrMarker::Stack(stack), 0, ran / all)).collect();
        }
        vec![(StackOrMarker::Marker(unknown), 0, 1.0)]
    }
}

fn add<K: Eq + Hash, V: Default + AddAssign>(
    all: &mut HashMap<K, V>,
    more: impl IntoIterator<Item = (K, V)>,
) {
    for (key, value) in more {
        *all.entry(key).or_default() += value;
    }
}
