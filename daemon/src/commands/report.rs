//! `perfusion report`: a profile as text or as a page.

use super::output::to_stdout;
use crate::cli::{ReportArgs, ReportFormat, TopOrder};
use crate::error::{Error, say};
use perfusion_export::file;
use perfusion_model::units::counted;
use perfusion_report::exact_summary;
use perfusion_report::merge::{WINDOW, WindowLengths};
use perfusion_report::stacks::{ProfileStacks, ProfileView};
use perfusion_report::{self, ReportError, collections, flame, folded, groups, list, top, types};

/// `perfusion report`.
///
/// # Errors
/// When the file is no profile, the type or label is not in it, or the output cannot be written.
pub fn report(options: &ReportArgs, quiet: bool) -> Result<u8, Error> {
    let to_file = options.output.as_deref().is_some_and(|path| !file::is_stdout(path));
    if options.exact {
        let [file] = options.files.as_slice() else {
            return Err(ReportError::OneAtATime { found: options.files.len() }.into());
        };
        let account = perfusion_report::load_account(file)?;
        let width = if to_file { None } else { top::TableOptions::for_stdout().width };
        let shown = exact_summary::text(
            &account,
            exact_summary::SummaryOptions { rows: options.rows, width },
        );
        match &options.output {
            Some(path) => file::write(path, shown.as_bytes())?,
            None => to_stdout(shown.as_bytes())?,
        }
        return Ok(0);
    }
    let window =
        options.only.iter().find(|only| only.label == WINDOW).map(|only| only.value.as_str());
    let by = options.by();
    let asks_windows = window.is_some() || by.iter().any(|label| label == WINDOW);
    let (profile, windows) = match options.files.as_slice() {
        [file] if !asks_windows => (perfusion_report::load(file)?, WindowLengths::new()),
        files => perfusion_report::load_all(files, asks_windows, window)?,
    };
    let stacks = ProfileStacks::new(&profile);
    let sample_type =
        options.sample_type.as_deref().unwrap_or_else(|| stacks.default_sample_type());
    let view = ProfileView {
        idle: options.idle,
        only: options.only.clone(),
        by: by.clone(),
        lines: options.lines,
    };
    let mut text = Vec::new();
    match options.format() {
        ReportFormat::Top if options.list.is_some() => {
            let functions = options.list.clone().unwrap_or_default();
            let listed = list::ListOptions { functions, sources: options.source.clone(), view };
            text.extend(list::text(&profile, sample_type, &listed)?.into_bytes());
        }
        ReportFormat::Top => {
            let shown = top::TableOptions {
                limit: options.rows,
                cumulative: options.sort == TopOrder::Cum,
                view,
                windows,
                ..if to_file {
                    top::TableOptions::default()
                } else {
                    top::TableOptions::for_stdout()
                }
            };
            let by_type = types::is_known(&stacks, sample_type)
                .then(|| types::table(&profile, sample_type, &shown));
            let table = match (by.as_slice(), by_type) {
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
        ReportFormat::Folded => {
            let folded::UnshownStacks { parked, negative } =
                folded::write(&profile, sample_type, &view, &mut text)?;
            if parked > 0 && !quiet {
                let column = stacks.sample_type(sample_type)?;
                let unit = stacks.sample_types().nth(column).map_or("", |(_, unit)| unit);
                say(&top::parked(parked, unit));
            }
            if negative > 0 && !quiet {
                say(&format!(
                    "{} below zero: folded text has no form for a difference, most tools leave \
                     such lines out",
                    counted(negative, "stack")
                ));
            }
        }
        ReportFormat::Flame => {
            let title = match options.files.as_slice() {
                [file] if !file::is_stdout(file) => {
                    file.file_name().unwrap_or_default().to_string_lossy()
                }
                [_] => "profile".into(),
                files => format!("{} profiles", files.len()).into(),
            };
            text.extend(
                flame::page(&profile, &title, options.sample_type.as_deref(), &view)?.into_bytes(),
            );
        }
    }
    match &options.output {
        Some(path) => file::write(path, &text)?,
        None => to_stdout(&text)?,
    }
    Ok(0)
}
