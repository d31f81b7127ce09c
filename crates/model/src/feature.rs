//! Features of a recording, and which of them rules leave out of a process.

use ebpf_common::config::{
    RULE_CPU, RULE_DOWNSAMPLES, RULE_FEATURES, RULE_RECORDED, RULE_TAKES, RULE_WAITS,
};

/// The features that the probes see to.
pub const OF_KERNEL: u32 = RULE_RECORDED | RULE_CPU | RULE_WAITS;

/// What a process has or has not. The first three are the probes' business, and they know nothing
/// of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Feature {
    /// The process is recorded at all, and attached to.
    Recorded = RULE_RECORDED,
    /// CPU samples.
    Cpu = RULE_CPU,
    /// Waits.
    Waits = RULE_WAITS,
    /// Allocations, and of them the objects that live on.
    Allocations = 8,
    /// Objects that live on.
    LiveObjects = 16,
    /// Names of managed code, asked of the runtime.
    Names = 32,
    /// Exceptions.
    Exceptions = 64,
    /// Waits for locks, as the runtime tells of them.
    Contention = 128,
}

impl Feature {
    /// All but the first, with their names in the configuration.
    pub const NAMED: [(Self, &'static str); 7] = [
        (Self::Cpu, "cpu"),
        (Self::Waits, "waits"),
        (Self::Allocations, "allocations"),
        (Self::LiveObjects, "live_objects"),
        (Self::Names, "names"),
        (Self::Exceptions, "exceptions"),
        (Self::Contention, "contention"),
    ];

    /// That those have it of whom a rule is true, where not everybody has it.
    #[must_use]
    pub const fn given(self) -> u32 {
        self as u32
    }

    /// That those do not have it of whom a rule is true.
    #[must_use]
    pub const fn taken(self) -> u32 {
        (self as u32) << RULE_TAKES
    }
}

/// That of those of whom a rule is true one CPU sample in 2ⁿ is kept; n is at most 8.
#[must_use]
pub fn downsampled(n: u32) -> u32 {
    ((1 << n.min(8)) - 1) << RULE_DOWNSAMPLES
}

/// What rules leave out of a process that is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExcludedFeatures(pub u32);

impl ExcludedFeatures {
    /// True when it goes without this.
    #[must_use]
    pub const fn has(self, feature: Feature) -> bool {
        self.0 & feature as u32 != 0
    }

    /// True when nothing is left that the shim is for.
    #[must_use]
    pub fn all_of_shim(self) -> bool {
        use Feature::{Allocations, Contention, Exceptions, Names};
        [Allocations, Contention, Exceptions, Names].into_iter().all(|feature| self.has(feature))
    }

    /// One CPU sample in so many is kept.
    #[must_use]
    pub const fn one_sample_in(self) -> u32 {
        1 << (self.0 >> RULE_DOWNSAMPLES).count_ones()
    }

    /// What either leaves out.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// What both leave out.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The excluded features of the shim.
    #[must_use]
    pub const fn of_shim(self) -> Self {
        Self(self.0 & RULE_FEATURES & !OF_KERNEL)
    }

    /// The excluded features of the probes. A process without a CLR has no others.
    #[must_use]
    pub const fn of_probes(self) -> Self {
        Self(self.0 & !self.of_shim().0)
    }

    /// The features that are left out, by their names in the configuration.
    pub fn features(self) -> impl Iterator<Item = &'static str> {
        Feature::NAMED
            .into_iter()
            .filter(move |(feature, _)| self.has(*feature))
            .map(|(_, name)| name)
    }

    /// The same in one line.
    #[must_use]
    pub fn names(self) -> String {
        let names: Vec<&str> = self.features().collect();
        if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }
    }
}
