//! The harness of the system tests: builds and starts workloads, runs `perfusion`, reads profiles
//! back. The tests themselves live in `tests/main.rs`. Nothing here sleeps for a condition: every
//! wait has one and a deadline.
//!
//! What the tests need is named by environment variables, which `cargo xtask test` sets
//! ([`environment`]). A test whose needs are not met says `SKIPPED name: reason` on stderr; with
//! `PERFUSION_TESTS_REQUIRED=1` (CI) it fails instead.

pub mod app;
pub mod bpf;
pub mod cgroup;
pub mod environment;
pub mod foreign;
pub mod gotool;
pub mod perfusion;
pub mod profile;
pub mod region;
pub mod schedstat;
pub mod single_file;
pub mod source_lines;
pub mod truth;
pub mod turn;
pub mod wait;

pub use app::{App, Compiler, Workload};
pub use environment::{Need, Runtime, begin, begin_beside, long_form};
pub use perfusion::{Outcome, Recording};
pub use profile::{Profile, Sample};
pub use wait::wait_until;
