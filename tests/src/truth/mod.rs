//! What `cargo xtask truth` does: records workloads whose call chains are known and publishes how
//! true their profiles were.

pub mod allocations;
pub mod cases;
pub mod downsampling;
pub mod judge;
pub mod live;
pub mod measure;
pub mod perf;
pub mod published;
pub mod report;
pub mod tap;
pub mod verdicts;
