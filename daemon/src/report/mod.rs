//! Profiles for people: reads a pprof file back and shows it.
//!
//! ```text
//! let profile = report::load(path)?;
//! print!("{}", report::top::table(&profile, "cpu", &report::top::Options { limit: 10, ..Default::default() })?);
//! print!("{}", report::types::table(&profile, "alloc_space", &report::top::Options::default()));
//! print!("{}", report::collections::table(&profile, &report::top::Options::default()));
//! report::folded::write(&profile, "blocked", &View::default(), &mut std::io::stdout())?;
//! let html = report::flame::page(&profile, "shop, pid 4242", None, &View::default())?;
//! ```
//! Works on any valid pprof, not only our own. Names in a file are data: control characters are escaped wherever they are shown.

pub mod clock;
pub mod collections;
pub mod flame;
pub mod folded;
pub mod groups;
pub mod stacks;
pub mod top;
pub mod types;
pub mod units;

use crate::pprof::proto::Profile;
use crate::pprof::{PprofError, decode};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Largest file read.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// Why a report cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is larger than any profile.
    #[error("{} has more than {MAX_FILE_BYTES} bytes: not a profile", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is not a valid profile.
    #[error("{}: {source}", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: PprofError,
    },
    /// No such sample type.
    #[error("the profile has no sample type `{asked}`; it has {available}")]
    NoSampleType {
        /// What was asked for.
        asked: String,
        /// What there is.
        available: String,
    },
    /// No such label.
    #[error("no sample of the profile has the label `{asked}`; there are {available}")]
    NoLabel {
        /// What was asked for.
        asked: String,
        /// What there is.
        available: String,
    },
    /// Nothing is in the file.
    #[error("{}: the file is empty: no profile was written into it", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The output cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[from] std::io::Error),
}

/// Reads and checks a profile; `-` is standard input.
///
/// # Errors
/// When the file cannot be read or is no valid pprof.
pub fn load(path: &Path) -> Result<Profile, ReportError> {
    let fail = |source| ReportError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let input: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(std::io::stdin().lock()),
        _ => Box::new(File::open(path).map_err(fail)?),
    };
    input.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.is_empty() {
        return Err(ReportError::Empty { path: path.to_owned() });
    }
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_FILE_BYTES) {
        return Err(ReportError::TooLarge { path: path.to_owned() });
    }
    decode(&bytes).map_err(|source| ReportError::Profile { path: path.to_owned(), source })
}
