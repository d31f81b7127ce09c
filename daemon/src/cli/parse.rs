//! From words to a command: what clap's own rules let through is refused, and no hidden word is
//! suggested.

use super::record::RecordArgs;
use super::report::{ReportArgs, has_unknown_ending, is_page};
use super::{Cli, CliCommand};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory as _, Parser as _};
use std::collections::HashSet;
use std::ffi::OsString;

/// Reads a command line.
///
/// # Errors
/// What clap says of it, help and version included; no word is suggested that help does not show.
pub fn parse<W: Into<OsString> + Clone>(
    words: impl IntoIterator<Item = W>,
) -> Result<Cli, clap::Error> {
    let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
    let cli =
        Cli::try_parse_from(&words).map_err(|error| with_tip(without_hidden(error), &words))?;
    refuse(&cli.command)?;
    Ok(cli)
}

/// What clap's own rules let through.
fn refuse(command: &CliCommand) -> Result<(), clap::Error> {
    match command {
        CliCommand::Record(record) => refuse_record(record),
        CliCommand::Report(report) => refuse_report(report),
        _ => Ok(()),
    }
}

/// The error of a subcommand.
fn refused(subcommand: &str, kind: ErrorKind, text: String) -> Result<(), clap::Error> {
    let mut whole = Cli::command();
    whole.build();
    match whole.find_subcommand_mut(subcommand) {
        Some(of) => Err(of.error(kind, text)),
        None => Err(whole.error(kind, text)),
    }
}

fn refuse_report(report: &ReportArgs) -> Result<(), clap::Error> {
    let output = report.output.as_deref().filter(|path| has_unknown_ending(path));
    match output {
        Some(output) if report.format.is_none() && !report.exact => refused(
            "report",
            ErrorKind::ValueValidation,
            format!(
                "--output {}: no format of that ending is known: choose one with --format, as in \
                 `--format flame`; .html is a flame graph, .txt the table",
                output.display()
            ),
        ),
        _ => Ok(()),
    }
}

/// clap does not ask for an argument that conflicts with a given one, so `requires = "command"`
/// says nothing beside --pid, which is in CMD's group.
fn refuse_record(record: &RecordArgs) -> Result<(), clap::Error> {
    let of_command = [("--exact", record.exact), ("--alloc-counts", record.alloc_counts.is_some())];
    if let Some((option, _)) =
        of_command.iter().find(|(_, given)| *given && record.command.is_empty())
    {
        let text = format!(
            "{option} counts from a program's start and cannot be had of one that runs: expected \
             -- CMD, as in \
             `perfusion record {option}{} -- dotnet app.dll`",
            if record.exact { "" } else { " low" },
        );
        return refused("record", ErrorKind::MissingRequiredArgument, text);
    }
    if is_page(&record.output) {
        let text = format!(
            "--output {}: what is recorded is a pprof file, not a page: record to a .pb.gz, then \
             `perfusion report FILE --format flame --output {0}`",
            record.output.display()
        );
        return refused("record", ErrorKind::ValueValidation, text);
    }
    Ok(())
}

/// Says where a program or a pid goes that stands bare behind `record`.
fn with_tip(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    let is_word = |word: &&OsString| !word.to_string_lossy().starts_with('-');
    let is_record = words.iter().skip(1).find(is_word).is_some_and(|word| word == "record");
    let bare = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if !word.starts_with('-') => word.clone(),
        _ => return error,
    };
    if error.kind() == ErrorKind::UnknownArgument && is_record {
        let is_pid = bare.bytes().all(|byte| byte.is_ascii_digit());
        let tip = if is_pid {
            format!("a process that runs: --pid {bare}")
        } else {
            format!("a program to start stands behind two dashes: -- {bare} …")
        };
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Clap looks for similar words among the hidden ones too.
fn without_hidden(mut error: clap::Error) -> clap::Error {
    let mut hidden = HashSet::new();
    add_hidden(&Cli::command(), &mut hidden);
    for kind in [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg] {
        let mut words = match error.remove(kind) {
            Some(ContextValue::String(word)) => vec![word],
            Some(ContextValue::Strings(words)) => words,
            _ => continue,
        };
        words.retain(|word| !hidden.contains(word));
        if !words.is_empty() {
            error.insert(kind, ContextValue::Strings(words));
        }
    }
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        // "'record --frequency' exists"; the other tips repeat what was typed.
        tips.retain(|tip| {
            let tip = tip.to_string();
            !tip.ends_with(" exists") || !tip.split([' ', '\'']).any(|word| hidden.contains(word))
        });
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// Hidden subcommands, and hidden options with their dashes, of a command and all below it.
fn add_hidden(command: &clap::Command, hidden: &mut HashSet<String>) {
    let options = command.get_arguments().filter(|option| option.is_hide_set());
    hidden.extend(options.filter_map(clap::Arg::get_long).map(|long| format!("--{long}")));
    for below in command.get_subcommands() {
        if below.is_hide_set() {
            hidden.insert(below.get_name().to_owned());
        }
        add_hidden(below, hidden);
    }
}

#[cfg(test)]
mod tests {
    use super::parse;
    use crate::cli::{Cli, CliCommand};
    use clap::Parser as _;

    #[test]
    fn no_hidden_word_is_suggested() {
        let refused = |words: &[&str]| {
            let words = ["perfusion"].iter().chain(words);
            let error =
                parse(words.clone()).err().map(|error| error.to_string()).unwrap_or_default();
            // Clap alone would have said it.
            let alone =
                Cli::try_parse_from(words).err().map(|error| error.to_string()).unwrap_or_default();
            (error, alone)
        };
        for (words, hidden, shown) in [
            (&["copi"][..], "'copy'", "'config'"),
            (&["exec-when-redy"], "exec-when-ready", "unrecognized subcommand"),
            (
                &["record", "--time-stage", "--all"],
                "--time-stages'",
                "unexpected argument '--time-stage'",
            ),
            (&["--time-stage", "record"], "--time-stages'", "unexpected argument '--time-stage'"),
            (&["record", "--wait-stacks-one", "5"], "--wait-stacks-one-in", "unexpected argument"),
        ] {
            let (error, alone) = refused(words);
            assert!(alone.contains(hidden), "{words:?} suggests nothing hidden any more: {alone}");
            assert!(!error.contains(hidden) && error.contains(shown), "{words:?}: {error}");
        }
        let (error, alone) = refused(&["record", "--frequenzy", "5"]);
        assert!(error.contains("'--frequency'") && error == alone, "{error}");
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_program() {
        let cli = Cli::try_parse_from([
            "perfusion",
            "record",
            "-o",
            "x",
            "--",
            "dotnet",
            "app.dll",
            "--all",
            "-d",
        ]);
        let Ok(Cli { command: CliCommand::Record(record), .. }) = cli else { panic!("{cli:?}") };
        assert_eq!(record.command, ["dotnet", "app.dll", "--all", "-d"]);
        assert!(!record.all);
    }

    #[test]
    fn what_counts_from_the_start_needs_a_program() {
        let refusal = |words: &[&str]| {
            let error = parse(["perfusion", "record"].iter().chain(words)).err()?;
            Some((error.exit_code(), error.to_string()))
        };
        for option in [&["--exact"][..], &["--alloc-counts", "low"]] {
            for target in [&["--pid", "1"][..], &["--all"], &["--cgroup", "/x"]] {
                let (code, text) = refusal(&[option, target].concat()).unwrap();
                assert!(
                    code == 2 && text.contains(&format!("{} -- dotnet", option.join(" "))),
                    "{text}"
                );
            }
            assert_eq!(refusal(&[option, &["--", "app"]].concat()), None);
        }
    }

    #[test]
    fn a_bare_target_is_told_where_it_goes() {
        let refusal =
            |words: &[&str]| parse(["perfusion"].iter().chain(words)).unwrap_err().to_string();
        let text = refusal(&["record", "dotnet", "app.dll"]);
        assert!(text.contains("'dotnet'") && text.contains("-- dotnet …"), "{text}");
        let text = refusal(&["-q", "record", "-o", "x.pb.gz", "4242"]);
        assert!(text.contains("'4242'") && text.contains("--pid 4242"), "{text}");
        let text = refusal(&["ps", "4242"]);
        assert!(!text.contains("--pid"), "{text}");
    }

    #[test]
    fn exactly_one_target_is_needed() {
        for bad in [
            &["perfusion", "record"][..],
            &["perfusion", "record", "--all", "-p", "1"],
            &["perfusion", "record", "-p", "0"],
        ] {
            assert!(Cli::try_parse_from(bad).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["perfusion", "record", "-p", "1,2", "-p", "3"]).is_ok());
    }
}
