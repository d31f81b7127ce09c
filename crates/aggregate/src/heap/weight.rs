//! What one sampled allocation stands for.

use perfusion_model::event::AllocationKind;
use std::ops::AddAssign;

/// Probability with which the runtime samples each single byte (.NET 10 `AllocationSampled`,
/// `docs/design/features/RandomizedAllocationSampling.md` of dotnet/runtime): a mean distance of
/// 100 KiB.
pub const SAMPLED_BYTE_PROBABILITY: f64 = 1.0 / 102_400.0;

/// The objects and bytes that samples stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weight {
    /// Objects.
    pub objects: f64,
    /// Bytes.
    pub bytes: f64,
    /// The number of samples.
    pub seen: u64,
    /// Their own bytes.
    pub seen_bytes: u64,
    /// Variance of `bytes`: Σ bytes²·(1−π) (`aggregate::interval`). Without a meaning where the
    /// runtime samples by a stride.
    pub variance: f64,
}

impl AddAssign for Weight {
    fn add_assign(&mut self, other: Self) {
        self.objects += other.objects;
        self.bytes += other.bytes;
        self.seen += other.seen;
        self.seen_bytes = self.seen_bytes.saturating_add(other.seen_bytes);
        self.variance += other.variance;
    }
}

/// The weight of one sampled allocation of `size` bytes. `AllocationSampled`: the object was chosen
/// with probability 1−q^size, so it stands for the inverse; unbiased. `AllocationTick`: it stands
/// for the bytes since the last tick, as the event says; biased where allocations are in step with
/// the stride. A large object stands for itself. Where many samples come the library tells one in
/// 2^`level` of them, by chance, so each stands for as many.
#[must_use]
pub fn weight(kind: AllocationKind, size: u64, level: u8) -> Weight {
    let seen_bytes = size.max(1);
    let size = seen_bytes as f64;
    let told = (-f64::from(level)).exp2();
    match kind {
        AllocationKind::Sampled | AllocationKind::Chosen { .. } => {
            let trials = match kind {
                AllocationKind::Chosen { bytes } => size.max(bytes as f64),
                _ => size,
            };
            // 1 − q^size through expm1/ln_1p: the direct form loses all digits for small objects.
            let chosen = -(trials * (-SAMPLED_BYTE_PROBABILITY).ln_1p()).exp_m1() * told;
            let bytes = size / chosen;
            let variance = bytes * bytes * (1.0 - chosen);
            Weight { objects: 1.0 / chosen, bytes, seen: 1, seen_bytes, variance }
        }
        AllocationKind::Exact => {
            let bytes = size / told;
            let variance = bytes * bytes * (1.0 - told);
            Weight { objects: 1.0 / told, bytes, seen: 1, seen_bytes, variance }
        }
        AllocationKind::Tick { amount } => {
            let bytes = (amount as f64).max(size) / told;
            Weight { objects: bytes / size, bytes, seen: 1, seen_bytes, variance: 0.0 }
        }
    }
}
