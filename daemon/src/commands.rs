//! The commands that only read: `report`, `ps`, `doctor`.

use crate::cli::{Format, Report};
use crate::error::Error;
use crate::report::{self, ReportError, folded, top};
use crate::sink::file;
use std::io::{self, Write as _};

/// `perfusion report`.
///
/// # Errors
/// When the file is no profile, the type is not in it, or the output cannot be written.
pub fn report(options: &Report) -> Result<u8, Error> {
    let profile = report::load(&options.file)?;
    let stacks = report::stacks::Stacks::new(&profile);
    let sample_type = options.sample_type.as_deref().unwrap_or_else(|| stacks.default_sample_type());
    let mut text = Vec::new();
    match options.format {
        Format::Top => {
            let shown = match options.output {
                Some(_) => {
                    top::Options { limit: options.rows, idle: options.idle, ..top::Options::default() }
                }
                None => {
                    top::Options { limit: options.rows, idle: options.idle, ..top::Options::for_stdout() }
                }
            };
            text.extend(top::table(&profile, sample_type, &shown)?.into_bytes());
        }
        Format::Folded => folded::write(&profile, sample_type, &mut text)?,
        Format::Flame => {}
    }
    match &options.output {
        Some(path) => file::write(path, &text)?,
        None => match io::stdout().lock().write_all(&text) {
            // `| head` is no failure.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            written => written.map_err(|error| Error::Report(ReportError::Write(error)))?,
        },
    }
    Ok(0)
}

/// `perfusion ps`.
///
/// # Errors
/// x
pub fn ps(_json: bool) -> Result<u8, Error> {
    Ok(0)
}

/// `perfusion doctor`.
///
/// # Errors
/// x
pub fn doctor(_json: bool) -> Result<u8, Error> {
    Ok(0)
}
