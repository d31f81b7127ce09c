//! Manual pages and shell completions, made from the command line's types, so that they cannot say anything else.

use crate::cli::Cli;
use crate::error::Error;
use clap::CommandFactory as _;
use clap_complete::Shell;
use perfusion_export::file::{self, FileError};
use std::path::Path;

/// `perfusion completions`.
///
/// # Errors
/// When stdout cannot be written.
pub fn completions(shell: Shell) -> Result<u8, Error> {
    crate::commands::output::to_stdout(&script(shell))?;
    Ok(0)
}

fn script(shell: Shell) -> Vec<u8> {
    // A command's name is borrowed for the program's life. Once, and the program ends then.
    let whole: &'static clap::Command = Box::leak(Box::new(Cli::command()));
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(whole), "perfusion", &mut script);
    script
}

/// The command without what help does not show either: completions have all they are given.
fn shown(command: &'static clap::Command) -> clap::Command {
    let mut copy = clap::Command::new(command.get_name()).version(command.get_version().unwrap_or_default());
    if let Some(about) = command.get_about() {
        copy = copy.about(about.clone());
    }
    copy.args(command.get_arguments().filter(|option| !option.is_hide_set()).cloned())
        .subcommands(command.get_subcommands().filter(|below| !below.is_hide_set()).map(shown))
}

/// `perfusion man`: one page for the program and one for each command.
///
/// # Errors
/// When a page cannot be written.
pub fn pages(directory: &Path) -> Result<u8, Error> {
    let mut whole = Cli::command().disable_help_subcommand(true);
    whole.build();
    page(&whole, directory)?;
    Ok(0)
}

fn page(command: &clap::Command, directory: &Path) -> Result<(), Error> {
    let manual = clap_mangen::Man::new(command.clone());
    let path = directory.join(manual.get_filename());
    let mut text = Vec::new();
    manual.render(&mut text).map_err(|source| FileError { path: path.clone(), step: "render", source })?;
    file::write(&path, notes(&String::from_utf8_lossy(&text)).as_bytes())?;
    command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
        .try_for_each(|below| page(below, directory))
}

/// The page with what stands below the options as it stands there: examples and exit codes, line by line. The library has them as one paragraph under a
/// heading that says nothing.
fn notes(page: &str) -> String {
    let Some((above, below)) = page.split_once("\n.SH EXTRA\n") else { return page.to_owned() };
    let (notes, rest) = match below.find("\n.SH ") {
        Some(end) => below.split_at(end),
        None => (below.trim_end_matches('\n'), "\n"),
    };
    format!("{above}\n.SH NOTES\n.nf\n{notes}\n.fi{rest}")
}

#[cfg(test)]
mod tests {
    use super::{pages, script};
    use clap_complete::Shell;

    #[test]
    fn completions_have_what_help_shows() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = String::from_utf8(script(shell)).unwrap();
            for word in ["record", "frequency", "inspect", "unwind", "completions"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
            for hidden in ["exec-when-ready", "time-stages", "wait-stacks-one-in"] {
                assert!(!script.contains(hidden), "{shell}: {hidden}");
            }
        }
    }

    #[test]
    fn every_command_has_its_page() {
        let directory = tempfile::tempdir().unwrap();
        pages(directory.path()).unwrap();
        for (file, says) in [
            ("perfusion.1", "perfusion\\-record(1)"),
            ("perfusion-record.1", "\\-\\-duration"),
            ("perfusion-inspect-unwind.1", "ADDR"),
        ] {
            let text = std::fs::read_to_string(directory.path().join(file)).unwrap();
            assert!(text.contains(says) && !text.contains(".SH EXTRA"), "{file}:\n{text}");
        }
        let report = std::fs::read_to_string(directory.path().join("perfusion-report.1")).unwrap();
        let notes = report.split_once(".SH NOTES\n.nf\n").unwrap().1.split_once("\n.fi\n").unwrap().0;
        assert!(
            notes.lines().filter(|line| line.contains("perfusion report app.pb.gz")).count() >= 4,
            "{notes}"
        );
        assert!(!directory.path().join("perfusion-exec-when-ready.1").exists());
    }
}
