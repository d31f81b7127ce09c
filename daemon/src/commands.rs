//! The commands that only read: `report`, `ps`, `doctor`, `config`.

use crate::cli::{ConfigSources, Format, Ps, Report, Sort, exit};
use crate::config::{Config, Limits, load};
use crate::daemon::{control, sinks};
use crate::error::{Error, say};
use crate::ps::{self, Daemon};
use perfusion_export::file::{self, FileError};
use perfusion_model::units::counted;
use perfusion_report::exact_summary;
use perfusion_report::stacks::{Stacks, View};
use perfusion_report::together::{WINDOW, Windows};
use perfusion_report::{self, ReportError, collections, flame, folded, groups, top, types};
use std::io::{self, Write as _};
use std::path::Path;

/// `perfusion report`.
///
/// # Errors
/// When the file is no profile, the type or label is not in it, or the output cannot be written.
pub fn report(options: &Report, quiet: bool) -> Result<u8, Error> {
    let to_file = options.output.as_deref().is_some_and(|path| !file::is_stdout(path));
    if options.exact {
        let [file] = options.files.as_slice() else {
            return Err(ReportError::OneAtATime { found: options.files.len() }.into());
        };
        let account = perfusion_report::load_account(file)?;
        let width = if to_file { None } else { top::Options::for_stdout().width };
        let shown = exact_summary::text(&account, exact_summary::Options { rows: options.rows, width });
        match &options.output {
            Some(path) => file::write(path, shown.as_bytes())?,
            None => to_stdout(shown.as_bytes())?,
        }
        return Ok(0);
    }
    let window = options.only.iter().find(|only| only.label == WINDOW).map(|only| only.value.as_str());
    let asks_windows = window.is_some() || options.by.iter().any(|label| label == WINDOW);
    let (profile, windows) = match options.files.as_slice() {
        [file] if !asks_windows => (perfusion_report::load(file)?, Windows::new()),
        files => perfusion_report::load_all(files, asks_windows, window)?,
    };
    let stacks = Stacks::new(&profile);
    let sample_type = options.sample_type.as_deref().unwrap_or_else(|| stacks.default_sample_type());
    let view = View { idle: options.idle, only: options.only.clone(), by: options.by.clone() };
    let mut text = Vec::new();
    match options.format() {
        Format::Top => {
            let shown = top::Options {
                limit: options.rows,
                cumulative: options.sort == Sort::Cum,
                view,
                windows,
                ..if to_file { top::Options::default() } else { top::Options::for_stdout() }
            };
            let by_type =
                types::is_known(&stacks, sample_type).then(|| types::table(&profile, sample_type, &shown));
            let table = match (options.by.as_slice(), by_type) {
                // With its intervals.
                ([by], Some(types)) if by == "type" => types,
                ([], more) => {
                    let functions = top::table(&profile, sample_type, &shown)?;
                    let of_collections = (stacks.is_ours() && collections::is_known(sample_type))
                        .then(|| collections::table(&profile, &shown));
                    match more.or(of_collections) {
                        Some(more) => format!("{functions}\n{more}"),
                        None => functions,
                    }
                }
                (by, _) => groups::table(&profile, sample_type, by, &shown)?,
            };
            text.extend(table.into_bytes());
        }
        Format::Folded => {
            let folded::LeftOut { parked, negative } =
                folded::write(&profile, sample_type, &view, &mut text)?;
            if parked > 0 && !quiet {
                let column = stacks.sample_type(sample_type)?;
                let unit = stacks.sample_types().nth(column).map_or("", |(_, unit)| unit);
                say(&top::parked(parked, unit));
            }
            if negative > 0 && !quiet {
                say(&format!(
                    "{} below zero: folded text has no form for a difference, most tools leave such lines out",
                    counted(negative, "stack")
                ));
            }
        }
        Format::Flame => {
            let title = match options.files.as_slice() {
                [file] if !file::is_stdout(file) => file.file_name().unwrap_or_default().to_string_lossy(),
                [_] => "profile".into(),
                files => format!("{} profiles", files.len()).into(),
            };
            text.extend(flame::page(&profile, &title, options.sample_type.as_deref(), &view)?.into_bytes());
        }
    }
    match &options.output {
        Some(path) => file::write(path, &text)?,
        None => to_stdout(&text)?,
    }
    Ok(0)
}

/// `perfusion attach-helper`.
///
/// # Errors
/// When its stdin is no socket of a daemon's, or the capability is not there.
pub fn attach_helper() -> Result<u8, Error> {
    perfusion_dotnet::attach::helper::serve()
        .map(|()| 0)
        .map_err(|source| Error::Internal { what: "helping to attach", source })
}

/// `perfusion ps`.
///
/// # Errors
/// When `/proc` cannot be listed or the output not be written.
pub fn ps(options: &Ps) -> Result<u8, Error> {
    let sources = load::Sources { file: options.config.clone(), flags: Vec::new() };
    let limits = match sources.load() {
        Ok(loaded) => loaded.config.limits,
        // One that was named is meant.
        Err(error) if options.config.is_some() => return Err(error.into()),
        // One that cannot be used is the daemon's trouble: it lies where it usually does, then.
        Err(_) => Limits::default(),
    };
    let path = control::path(&limits.kill_switch);
    let daemon = match control::ask(&path) {
        Ok(Some(answer)) => Daemon::Told(answer),
        Ok(None) => Daemon::None,
        Err(error) => {
            say(&format!("the daemon at {}: {error}", path.display()));
            Daemon::Silent
        }
    };
    let printed = ps::print(options.json, daemon, &mut io::stdout().lock(), &mut io::stderr().lock());
    unless_closed(printed).map_err(|source| Error::Internal { what: "listing processes", source })?;
    Ok(0)
}

/// `perfusion doctor`. Its exit code says whether recording can start.
///
/// # Errors
/// When the output cannot be written.
pub fn doctor(json: bool) -> Result<u8, Error> {
    match crate::doctor::print(json, &mut io::stdout().lock()) {
        Ok(true) => Ok(0),
        Ok(false) => Ok(exit::NOT_PERMITTED),
        Err(error) => unless_closed(Err(error))
            .map(|()| exit::OTHER)
            .map_err(|error| Error::Report(ReportError::Write(error))),
    }
}

/// `perfusion config check`.
///
/// # Errors
/// What is wrong with the configuration.
pub fn config_check(sources: &ConfigSources) -> Result<u8, Error> {
    let loaded = sources.sources().load()?;
    loaded.warn();
    sinks::check_files(&loaded.config).for_each(|problem| tracing::warn!("{problem}"));
    let from = loaded.file.map_or_else(|| "the defaults".to_owned(), |file| file.display().to_string());
    to_stdout(format!("{from}: good\n").as_bytes())?;
    Ok(0)
}

/// `perfusion config show`.
///
/// # Errors
/// What is wrong with the configuration.
pub fn config_show(sources: &ConfigSources) -> Result<u8, Error> {
    let loaded = sources.sources().load()?;
    loaded.warn();
    to_stdout(load::show(&loaded).as_bytes())?;
    Ok(0)
}

/// `perfusion config schema`.
///
/// # Errors
/// When it cannot be written.
pub fn config_schema() -> Result<u8, Error> {
    let text = serde_json::to_string_pretty(&schemars::schema_for!(Config));
    let text = text.map_err(|error| Error::Internal { what: "schema", source: error.into() })?;
    to_stdout(format!("{text}\n").as_bytes())?;
    Ok(0)
}

impl ConfigSources {
    /// For the reader.
    #[must_use]
    pub fn sources(&self) -> load::Sources {
        load::Sources { file: self.config.clone(), flags: self.set.clone() }
    }
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

/// Writes to stdout.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn to_stdout(text: &[u8]) -> Result<(), Error> {
    unless_closed(io::stdout().lock().write_all(text))
        .map_err(|error| Error::Report(ReportError::Write(error)))
}

/// A reader that has seen enough (`| head`) is no failure.
fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
