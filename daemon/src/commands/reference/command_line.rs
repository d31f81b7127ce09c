//! The page about every command and its arguments.

use crate::cli::Cli;
use clap::{Arg, Command, CommandFactory as _};

const INTRODUCTION: &str = "# Every option

The command `perfusion reference command-line` writes this page. [Command line](commands.md) has
examples.

Every command takes `-h`, which prints a summary, and `--help`, which prints what stands here.
`perfusion --version` prints the version.
";

pub(super) fn page() -> String {
    let mut whole = Cli::command().disable_help_subcommand(true);
    whole.build();
    let mut page = INTRODUCTION.to_owned();
    push_heading(&mut page, "Options of every command");
    push_arguments(&mut page, whole.get_arguments().filter(|argument| argument.is_global_set()));
    for command in whole.get_subcommands_mut().filter(|command| !command.is_hide_set()) {
        push_command(&mut page, command);
    }
    push_heading(&mut page, "Exit codes");
    push_notes(&mut page, &whole);
    page.truncate(page.trim_end().len());
    page + "\n"
}

/// A text of the command line as a sentence: its full stop is cut off there.
fn sentence(text: &str) -> String {
    let has_end = text.is_empty() || text.ends_with(['.', ':', '!', '?']);
    format!("{text}{}", if has_end { "" } else { "." })
}

/// A command and those below it, each under a heading of the same level.
fn push_command(page: &mut String, command: &mut Command) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    push_heading(page, &format!("`{name}`"));
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        push_line(page, &format!("{}\n", sentence(&about.to_string())));
    }
    let usage = command.render_usage().to_string();
    push_code(page, usage.trim_start_matches("Usage: "));
    push_arguments(page, command.get_arguments().filter(|argument| !argument.is_global_set()));
    push_notes(page, command);
    for below in command.get_subcommands_mut().filter(|below| !below.is_hide_set()) {
        push_command(page, below);
    }
}

fn push_arguments<'a>(page: &mut String, arguments: impl Iterator<Item = &'a Arg>) {
    let is_shown = |argument: &&Arg| {
        !argument.is_hide_set() && !["help", "version"].contains(&argument.get_id().as_str())
    };
    for argument in arguments.filter(is_shown) {
        push_argument(page, argument);
    }
    page.push('\n');
}

fn push_argument(page: &mut String, argument: &Arg) {
    let short = argument.get_short().map(|short| format!("`-{short}`, ")).unwrap_or_default();
    let help = argument.get_long_help().or_else(|| argument.get_help());
    let help = help.map(|help| sentence(&help.to_string())).unwrap_or_default();
    let takes_values = argument.get_action().takes_values();
    let defaults = argument.get_default_values().iter().filter(|_| takes_values);
    let defaults: String =
        defaults.map(|value| format!(" Default: `{}`.", value.to_string_lossy())).collect();
    push_line(page, &format!("- {short}`{argument}`: {help}{defaults}"));
    for value in argument.get_possible_values().iter().filter(|_| takes_values) {
        let help = value
            .get_help()
            .map(|help| format!(": {}", sentence(&help.to_string())))
            .unwrap_or_default();
        push_line(page, &format!("  - `{}`{help}", value.get_name()));
    }
}

/// What stands below the options of a command. Indented lines are examples and tables.
fn push_notes(page: &mut String, command: &Command) {
    let notes = command.get_after_long_help().or_else(|| command.get_after_help());
    let notes = notes.map(ToString::to_string).unwrap_or_default();
    let mut lines = notes.lines().peekable();
    while let Some(line) = lines.next() {
        if line.is_empty() {
            push_break(page);
            continue;
        }
        if !line.starts_with("  ") {
            push_line(page, line);
            continue;
        }
        let mut code = line.to_owned();
        while let Some(next) = lines.next_if(|next| next.starts_with("  ")) {
            code.push('\n');
            code.push_str(next);
        }
        push_code(page, &code);
    }
}

fn push_heading(page: &mut String, heading: &str) {
    push_break(page);
    push_line(page, &format!("## {heading}\n"));
}

fn push_code(page: &mut String, code: &str) {
    push_break(page);
    push_line(page, &format!("```text\n{code}\n```\n"));
}

/// One empty line, whatever stands before it.
fn push_break(page: &mut String) {
    page.truncate(page.trim_end().len());
    page.push_str("\n\n");
}

fn push_line(page: &mut String, line: &str) {
    page.push_str(line);
    page.push('\n');
}
