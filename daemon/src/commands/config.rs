//! `perfusion config`: the daemon's configuration checked, shown, and its schema.

use super::output::to_stdout;
use crate::cli::ConfigSourceArgs;
use crate::config::{Config, load};
use crate::daemon::sinks;
use crate::error::Error;

/// `perfusion config check`.
///
/// # Errors
/// What is wrong with the configuration.
pub fn check(sources: &ConfigSourceArgs) -> Result<u8, Error> {
    let loaded = sources.sources().load()?;
    loaded.warn();
    sinks::check_files(&loaded.config).for_each(|problem| tracing::warn!("{problem}"));
    let from =
        loaded.file.map_or_else(|| "the defaults".to_owned(), |file| file.display().to_string());
    to_stdout(format!("{from}: good\n").as_bytes())?;
    Ok(0)
}

/// `perfusion config show`.
///
/// # Errors
/// What is wrong with the configuration.
pub fn show(sources: &ConfigSourceArgs) -> Result<u8, Error> {
    let loaded = sources.sources().load()?;
    loaded.warn();
    to_stdout(load::show(&loaded).as_bytes())?;
    Ok(0)
}

/// `perfusion config schema`.
///
/// # Errors
/// When it cannot be written.
pub fn schema() -> Result<u8, Error> {
    let text = serde_json::to_string_pretty(&schemars::schema_for!(Config));
    let text = text.map_err(|error| Error::Internal { what: "schema", source: error.into() })?;
    to_stdout(format!("{text}\n").as_bytes())?;
    Ok(0)
}

impl ConfigSourceArgs {
    /// For the reader.
    #[must_use]
    pub fn sources(&self) -> load::ValueSources {
        load::ValueSources { file: self.config.clone(), flags: self.set.clone() }
    }
}
