//! Why a profile is not read or not written.

use super::validate::Invalid;
use flate2::read::MultiGzDecoder;
use std::borrow::Cow;
use std::io::Read as _;

/// A profile that unpacks to more is refused: nothing this program writes comes near.
pub(super) const MAX_UNPACKED_BYTES: u64 = 2 << 30;

/// The reason why a profile was not written or read.
#[derive(Debug, thiserror::Error)]
pub enum PprofError {
    /// The compressor failed, or the input is no gzip stream.
    #[error("gzip: {0}")]
    Gzip(#[from] std::io::Error),
    /// Not the expected message.
    #[error("not a pprof profile: {0}")]
    Message(#[from] prost::DecodeError),
    /// It breaks a rule of the format.
    #[error("invalid profile: {0}")]
    Invalid(#[from] Invalid),
    /// A reader of profiles refuses it.
    #[error("no profile that can be read: {0}")]
    Refused(#[from] ReadRefusal),
    /// Its names and locations take more memory than there is for them.
    #[error("its names and locations take more than {0} bytes of memory, the limit for them")]
    LargeTables(usize),
    /// It is larger than any real one.
    #[error("the profile unpacks to more than {MAX_UNPACKED_BYTES} bytes")]
    TooLarge,
}

/// Why pprof refuses a profile; its own words are in brackets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadRefusal {
    /// No bytes.
    #[error("nothing (pprof: empty input file)")]
    Empty,
    /// Not the wire format, or a field of another type than the format has.
    #[error("no message of the format (pprof: unrecognized profile format)")]
    Wire,
    /// A second time stamp: profiles have one.
    #[error(
        "two or more profiles one after the other in one file (pprof: concatenated profiles \
         detected)"
    )]
    Concatenated,
    /// The string table begins with something.
    #[error(
        "the first string of the string table: expected the empty string, found `{found}` (pprof: \
         string_table[0] must be '')"
    )]
    FirstString {
        /// How it begins.
        found: String,
    },
    /// A string index outside the table.
    #[error(
        "{place}: expected {}, found {found} (pprof: malformed profile format)",
        expected_index(*len)
    )]
    String {
        /// Where it stands.
        place: String,
        /// The index.
        found: i64,
        /// Size of the table.
        len: usize,
    },
    /// No sample types.
    #[error("no sample types (pprof: profiles have empty common sample type list)")]
    NoTypes,
    /// Samples without types of their values.
    #[error("samples, but no sample types (pprof: missing sample type information)")]
    SamplesWithoutTypes,
    /// A sample with another number of values than there are types.
    #[error(
        "sample {sample}: expected a value for each of {types} sample types, found {found} values \
         (pprof: mismatch: sample has {found} values vs. {types} types)"
    )]
    Values {
        /// Which of the samples, from 1.
        sample: usize,
        /// Values found.
        found: usize,
        /// Sample types.
        types: usize,
    },
    /// A sample with a location that is not in the table.
    #[error(
        "sample {sample}: expected locations of the file's table, found location {id}, which is \
         not in it (pprof: sample has nil location)"
    )]
    NoLocation {
        /// Which of the samples, from 1.
        sample: usize,
        /// The location.
        id: u64,
    },
    /// A line with a function that is not in the table.
    #[error(
        "location {id}: expected functions of the file's table, found function {function}, which \
         is not in it (pprof: location id: {id} has a line with nil function)"
    )]
    NoFunction {
        /// The location.
        id: u64,
        /// The function.
        function: u64,
    },
    /// Id 0.
    #[error(
        "a {table}: expected an id from 1 on, found 0 (pprof: found {table} with reserved ID=0)"
    )]
    ReservedId {
        /// The table.
        table: &'static str,
    },
    /// An id that stands twice.
    #[error(
        "the {table}s: expected one with id {id}, found two (pprof: multiple {table}s with same \
         id: {id})"
    )]
    TwiceId {
        /// The table.
        table: &'static str,
        /// The id.
        id: u64,
    },
}

/// What is expected of a string's index.
fn expected_index(len: usize) -> String {
    match len {
        0 => "an index into a string table, of which the file has none".to_owned(),
        len => format!("an index below {len}, the length of the string table"),
    }
}

/// The message in a gzip file of one or more members; what is no gzip file as it is.
pub(super) fn gunzip(bytes: &[u8]) -> Result<Cow<'_, [u8]>, PprofError> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(Cow::Borrowed(bytes));
    }
    let mut unpacked = Vec::new();
    MultiGzDecoder::new(bytes).take(MAX_UNPACKED_BYTES + 1).read_to_end(&mut unpacked)?;
    if u64::try_from(unpacked.len()).is_ok_and(|len| len > MAX_UNPACKED_BYTES) {
        return Err(PprofError::TooLarge);
    }
    Ok(Cow::Owned(unpacked))
}
