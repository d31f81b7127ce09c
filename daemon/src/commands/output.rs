//! What commands write to stdout.

use crate::error::Error;
use perfusion_report::ReportError;
use std::io::{self, Write as _};

/// Writes to stdout.
///
/// # Errors
/// When it cannot be written.
pub(super) fn to_stdout(text: &[u8]) -> Result<(), Error> {
    unless_closed(io::stdout().lock().write_all(text))
        .map_err(|error| Error::Report(ReportError::Write(error)))
}

/// A reader that has seen enough (`| head`) is no failure.
pub(super) fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
