//! The command line: clap types and the parsing of units, nothing else, one file for each command.
//! `main` maps each command to its stage.

mod config;
mod dump;
mod heap;
mod inspect;
mod leaks;
mod parse;
mod ps;
mod record;
mod report;
mod shim_limits;
mod symbols;
mod values;

pub use config::{ConfigCheckArgs, ConfigCommand, ConfigSourceArgs};
pub use dump::DumpArgs;
pub use heap::HeapArgs;
pub use inspect::{InspectCommand, InspectUnwindArgs};
pub use leaks::LeaksArgs;
pub use parse::parse;
pub use ps::PsArgs;
pub use record::{AllocCounts, RecordArgs};
pub use report::{ReportArgs, ReportFormat, TopOrder};
pub use shim_limits::ShimLimitArgs;
pub use symbols::{SymbolArgs, SymbolsCheckArgs, SymbolsCommand, SymbolsFetchArgs};

use clap::{Args, Parser, Subcommand, ValueEnum};
use config::CONFIG_HELP;
use inspect::INSPECT_EXAMPLES;
use std::path::PathBuf;
use symbols::SYMBOLS_EXAMPLES;

/// Exit codes, also in `--help`.
pub mod exit {
    /// Something not listed below.
    pub const OTHER: u8 = 1;
    /// The command line or the configuration was wrong.
    pub const USAGE: u8 = 2;
    /// No such process, or it ended before the recording began or during a survey of its heap.
    pub const NO_TARGET: u8 = 3;
    /// A privilege or a kernel feature is missing.
    pub const NOT_PERMITTED: u8 = 4;
    /// The output cannot be written.
    pub const OUTPUT: u8 = 5;
    /// The command to start was not found or cannot be executed (as shells say it).
    pub const COMMAND: u8 = 127;
    /// A second signal ended it at once, or a first one before the command to start began (as
    /// shells say it).
    pub const INTERRUPTED: u8 = 130;
}

const EXIT_CODES: &str = "Exit codes:
  0    done
  1    an error not listed here
  2    wrong command line or configuration
  3    no such process, or it ended before it was looked at or while its heap was surveyed
  4    a privilege or a kernel feature is missing (`perfusion doctor` says which)
  5    the output cannot be written
  130  a second Ctrl-C, SIGTERM or SIGHUP ended it at once";

const OF_COMMAND: &str = "  N    record -- CMD: CMD's own exit code; 128+S if signal S ended it
  127  record -- CMD: CMD cannot be started
  130  record -- CMD: interrupted before CMD began";

const DOCTOR_EXAMPLES: &str = "Example:
  sudo perfusion doctor                                      exit code 4: recording cannot start";

const DAEMON_EXAMPLES: &str = "Examples:
  perfusion daemon --config /etc/perfusion/perfusion.yaml
  perfusion daemon --set windows.length=30s --set attach.policy=all

To have it record nothing and attach to nothing while it goes on running:
  touch /run/perfusion/off          until the file is gone (limits.kill_switch)
  kill -USR1 PID                    until kill -USR2 PID
  limits.switched_off: true         in the configuration, from the next reload (kill -HUP PID) \
     until it is false again
/readyz, the metric perfusion_switched_off and the log say by which.";

const CONFIG_EXAMPLES: &str = "Examples:
  perfusion config check /etc/perfusion/perfusion.yaml
  perfusion config show                                      every value, where it comes from
  perfusion config schema > schema.json                      for an editor";

/// Paragraphs below the options.
fn below(paragraphs: &[&str]) -> String {
    paragraphs.join("\n\n")
}

/// Exit codes where there is a program that is started, which has its own.
fn exit_codes_with_command() -> String {
    format!("{EXIT_CODES}\n{OF_COMMAND}")
}

/// System profiler for .NET and native code: CPU, waiting, allocation and live heap in one pprof
/// file.
#[derive(Debug, Parser)]
#[command(
    name = "perfusion",
    version,
    after_help = exit_codes_with_command(),
    max_term_width = 110
)]
pub struct Cli {
    /// Say less: errors only.
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// Say more: perfusion's own log on stderr (twice: in detail).
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Profile running processes, a new one, or the whole host, into one pprof file.
    Record(RecordArgs),
    /// Print a profile: top table, folded stacks, or a flame graph as one HTML file.
    Report(ReportArgs),
    /// Print every thread of a process as it is now: its whole stack, its state, how long it has
    /// been waiting and for what. Nothing is stopped and no signal is sent.
    Dump(DumpArgs),
    /// Tell leaks from caches: what stays in managed memory, by type and allocation stack, over
    /// several moments. The moments are of a running process, or several profiles. Each place has a
    /// verdict and its reason.
    Leaks(LeaksArgs),
    /// Show what is in the managed heap and what holds it: one survey of a running process, or two
    /// compared.
    Heap(HeapArgs),
    /// List processes: runtime and version, container, what profiling they allow and why not more.
    /// A daemon that runs is asked for more of each: stacks taken and lost, what part of a CPU it
    /// costs, and why there is no shim.
    Ps(PsArgs),
    /// Check what this machine allows, and say what to do about what it does not.
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(JsonArgs),
    /// Profile the whole host for as long as it runs: one profile per service and window.
    #[command(after_help = below(&[DAEMON_EXAMPLES, CONFIG_HELP]))]
    Daemon(ConfigSourceArgs),
    /// Check, show or describe the daemon's configuration.
    #[command(after_help = CONFIG_EXAMPLES)]
    Config {
        /// What to do with it.
        #[command(subcommand)]
        what: ConfigCommand,
    },
    /// Explain how stacks are taken: the unwind rule of an address in a process or file.
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect {
        /// What to look at.
        #[command(subcommand)]
        what: InspectCommand,
    },
    /// Look where the symbols of native files are, and fetch those that this host does not have.
    #[command(after_help = SYMBOLS_EXAMPLES)]
    Symbols {
        /// What to do.
        #[command(subcommand)]
        what: SymbolsCommand,
    },
    /// Print the completions of a shell.
    Completions {
        /// Whose.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages (perfusion.1, perfusion-record.1, …).
    Man {
        /// Into this directory.
        directory: PathBuf,
    },
    /// Prints a page of the documentation that is made from the program itself. Internal.
    #[command(hide = true)]
    Reference {
        /// Which.
        page: ReferencePage,
    },
    /// Does for the daemon what takes CAP_DAC_OVERRIDE. Internal.
    #[command(hide = true)]
    AttachHelper,
    /// Copies a file, whole or not at all. Internal: the image has no other program that could.
    #[command(hide = true)]
    Copy {
        /// What.
        from: PathBuf,
        /// Where to.
        to: PathBuf,
    },
    /// Runs a command when the recorder says so. Internal.
    #[command(hide = true)]
    ExecWhenReady(ExecWhenReadyArgs),
}

/// Pages of the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReferencePage {
    /// Every command with its arguments.
    CommandLine,
    /// Every key of the configuration.
    Configuration,
}

/// Commands whose only option is machine-readable output.
#[derive(Debug, Args)]
pub struct JsonArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// The internal command that waits at the gate, its stdin, before it becomes the program.
#[derive(Debug, Args)]
pub struct ExecWhenReadyArgs {
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_show_examples_that_they_take() {
        let mut whole = Cli::command();
        whole.build();
        for name in [
            "record", "report", "dump", "leaks", "heap", "ps", "doctor", "daemon", "config",
            "inspect",
        ] {
            let help = whole.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            let examples: Vec<&str> = help
                .lines()
                .filter_map(|line| {
                    line.trim_start().strip_prefix("sudo ").or(Some(line.trim_start()))
                })
                .filter(|line| {
                    line.starts_with("perfusion ") && !line.starts_with("perfusion.yaml")
                })
                .collect();
            assert!(!examples.is_empty(), "{name}:\n{help}");
            for example in examples {
                // What follows is said of it, or done with it.
                let end = ["   ", " | ", " > "].iter().filter_map(|mark| example.find(mark)).min();
                let words = example[..end.unwrap_or(example.len())].split_whitespace();
                let parsed =
                    Cli::try_parse_from(words).map(|_| ()).map_err(|error| error.to_string());
                assert_eq!(parsed, Ok(()), "{example}");
            }
        }
    }
}
