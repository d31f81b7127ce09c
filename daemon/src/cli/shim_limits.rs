//! The arguments that `perfusion record` and `perfusion leaks` share.

use clap::Args;
use perfusion_sources::shim::{ALLOCATION_SAMPLES, LIVE_OBJECTS, ShimLimits};

/// How much each .NET process tells of its objects.
#[derive(Debug, Args)]
pub struct ShimLimitArgs {
    /// Sampled objects watched at a time in each .NET process, 256 to 65536. When there are more,
    /// chance chooses which, and these stand for all.
    #[arg(
        long,
        value_name = "N",
        default_value_t = LIVE_OBJECTS,
        value_parser = clap::value_parser!(u32).range(256..=65_536)
    )]
    pub live_objects: u32,
    /// Allocation samples a second up to which each .NET process reports all, 16 to 1000000. There
    /// is one for each 100 KiB. The same limit holds for large objects (85,000 bytes or more),
    /// which are not sampled. Of more, chance chooses about as many, larger ones first, and these
    /// stand for all.
    #[arg(
        long,
        value_name = "N",
        default_value_t = ALLOCATION_SAMPLES,
        value_parser = clap::value_parser!(u32).range(16..=1_000_000)
    )]
    pub allocation_samples: u32,
}

impl ShimLimitArgs {
    /// As the shim is told.
    #[must_use]
    pub fn limits(&self) -> ShimLimits {
        ShimLimits { live_objects: self.live_objects, allocation_samples: self.allocation_samples }
    }
}
