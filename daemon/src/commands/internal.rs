//! Commands that this program calls itself.

use crate::error::Error;
use perfusion_export::file::{self, FileError};
use std::path::Path;

/// `perfusion attach-helper`.
///
/// # Errors
/// When its stdin is no socket of a daemon's, or the capability is not there.
pub fn attach_helper() -> Result<u8, Error> {
    perfusion_dotnet::attach::helper::serve()
        .map(|()| 0)
        .map_err(|source| Error::Internal { what: "helping to attach", source })
}

/// `perfusion copy`.
///
/// # Errors
/// When one cannot be read or the other not be written.
pub fn copy(from: &Path, to: &Path) -> Result<u8, Error> {
    let bytes =
        std::fs::read(from).map_err(|source| FileError { path: from.to_owned(), step: "read", source })?;
    file::write(to, &bytes)?;
    Ok(0)
}
