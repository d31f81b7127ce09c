//! Manual pages and shell completions, made from the command line's types, so that they cannot say anything else.

use crate::cli::Cli;
use crate::error::Error;
use crate::sink::file::{self, FileError};
use clap::CommandFactory as _;
use clap_complete::Shell;
use std::path::Path;

/// `perfusion completions`.
///
/// # Errors
/// When stdout cannot be written.
pub fn completions(shell: Shell) -> Result<u8, Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "perfusion", &mut script);
    crate::commands::to_stdout(&script)?;
    Ok(0)
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
    file::write(&path, &text)?;
    command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
        .try_for_each(|below| page(below, directory))
}

#[cfg(test)]
mod tests {
    use super::pages;

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
            assert!(text.contains(says), "{file}:\n{text}");
        }
        assert!(!directory.path().join("perfusion-exec-when-ready.1").exists());
    }
}
