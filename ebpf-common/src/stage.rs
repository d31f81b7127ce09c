//! What a stack record takes, by its stages: measured in the probes when `Config::times_stages`
//! says so, for `cargo xtask bench`. The verifier drops the code otherwise. Each stage has the
//! reading of one clock in it.

/// Values of the map `STAGES`: nanoseconds of each stage, of the records of one kind.
pub type Stages = [u64; STAGES];

/// The user part: registers, the walk, what is handed over.
pub const STAGE_USER: usize = 0;
/// The kernel stack.
pub const STAGE_KERNEL: usize = 1;
/// The copy of what was not walked.
pub const STAGE_COPY: usize = 2;
/// Into the ring.
pub const STAGE_SEND: usize = 3;
/// How many there are.
pub const STAGES: usize = 4;

/// Key in `STAGES`: CPU samples.
pub const OF_SAMPLES: u32 = 0;
/// Key in `STAGES`: kept waits and their wakers.
pub const OF_WAITS: u32 = 1;
/// Entries of `STAGES`.
pub const STAGE_KINDS: u32 = 2;
