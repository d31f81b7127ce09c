//! Profiles in pprof's format: built from a [`Window`](perfusion_aggregate::Window), validated,
//! split, written, and read back, also those of other tools.
//!
//! [`loss`] writes and reads the comment that says what was lost.
//!
//! ```text
//! symbolizer.resolve(window.frames(), &directory);
//! let about = ProfileInfo { start, duration, period_ns, main_image, comments };
//! let bytes = pprof::encode(&window, &symbolizer, &directory, &about)?; // checked before
//! let profile = pprof::decode(&bytes)?;                                    // gunzip + validate
//! ```
//! - all thirteen sample types in one profile; `default_sample_type` is cpu, period and period type
//!   are cpu's;
//! - a native or kernel location is an address, a managed one a function, whatever body or tier
//!   ran;
//! - addresses are those of the ELF file, so that the mapping's start, limit and offset are the
//!   file's own and a server can symbolize again; managed code has one pseudo mapping per module;
//! - values are rounded so that each column's sum is right: what is cut from one sample is added to
//!   the next.
//!
//! Samples are encoded one at a time into the compressor: memory is the output and the tables,
//! never the whole message.

#![deny(clippy::as_conversions)]

mod builder;
pub mod encode;
mod error;
pub mod loss;
pub mod proto;
pub mod read;
pub mod split;
pub mod stream;
pub mod validate;

pub use encode::{ProfileInfo, decode, encode, encode_entries, message, pack, unpack};
pub use error::{PprofError, ReadRefusal};
pub use validate::{Invalid, validate};

/// Begins the comment that a runtime cannot tell of live objects.
pub const INUSE_NOT_AVAILABLE: &str = "inuse: not available";

/// Begins the comment that says which version has recorded a profile.
pub(crate) const PERFUSION_PREFIX: &str = "perfusion ";

/// Comments that begin with this are the loss line, which reports show.
pub const LOSS_PREFIX: &str = "loss: ";
/// The rest of that line of a survey that is whole.
pub const NO_LOSS: &str = "none";

/// Begins each line about what exact mode has counted, on stderr and in the profile's comments.
pub const EXACT_PREFIX: &str = "exact: ";
/// Begins such a line where the runtime has counted.
pub const COUNTS_PREFIX: &str = "counts: ";
/// In such lines, begins what was not counted, or not told of.
pub const LOST_PREFIX: &str = "LOST: ";

/// True of a comment about what was counted that says that this is not all.
#[must_use]
pub fn tells_of_uncounted(comment: &str) -> bool {
    let said =
        [EXACT_PREFIX, COUNTS_PREFIX].into_iter().find_map(|prefix| comment.strip_prefix(prefix));
    said.is_some_and(|said| said.contains(LOST_PREFIX))
}

/// Begins each line about what the recording lacks for want of a right, on stderr and in the
/// profile's comments.
pub const LIMITED: &str = "limited: ";

/// Begins each comment of the profile about a process without a shim.
pub const WITHOUT_SHIM: &str = "no allocations or live objects: ";
/// Comments that begin with this say what became of a thread pool; reports of waits show them.
pub const POOL_PREFIX: &str = "thread pool of ";
/// The comment that begins with this says with what probability waits kept their stacks; reports of
/// waits show it.
pub const WAIT_STACKS_PREFIX: &str = "wait stacks: ";
/// How the comment begins that a window was recorded at lower rates than was asked for.
pub const RATES_LOWERED_PREFIX: &str = "rates lowered, ";
/// File name of the mapping of kernel code.
pub const KERNEL_MAPPING: &str = "[kernel.kallsyms]";
/// File name of the mapping of managed code whose module is not known, and of runtime stubs.
pub const MANAGED_MAPPING: &str = "[managed]";
