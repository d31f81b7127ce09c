//! What can be wrong with a native file.

/// Why a file's symbols could not be read.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// The file cannot be read.
    #[error("cannot read the file: {0}")]
    Read(#[from] std::io::Error),
    /// It is not what it should be.
    #[error("not a usable ELF file: {0}")]
    Format(&'static str),
    /// More tables than the limit.
    #[error("its symbol tables have {found} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Bytes of all tables.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The files before it used up what may be copied for one window.
    #[error("its symbol tables have {found} bytes, and {left} are left for this window")]
    Budget {
        /// Bytes of all tables.
        found: u64,
        /// Bytes left.
        left: u64,
    },
    /// The private copy could not be made.
    #[error("cannot make a private copy: {0}")]
    Copy(#[from] rustix::io::Errno),
    /// blazesym gave up.
    #[error("symbols not read: {0}")]
    Symbols(#[from] blazesym::Error),
    /// blazesym panicked over it.
    #[error("the ELF reader panicked")]
    Panic,
}
