//! The arguments of `perfusion dump`.

use super::{EXIT_CODES, below};
use clap::{ArgGroup, Args};
use std::path::PathBuf;

const DUMP_EXAMPLES: &str = "Examples:
  perfusion dump 4242                                        every thread now
  perfusion dump 4242 --json | jq '.threads[].state'         the same for programs";

/// `perfusion dump`.
#[derive(Debug, Args)]
#[command(
    after_help = below(&[DUMP_EXAMPLES, EXIT_CODES]),
    group = ArgGroup::new("process").required(true).multiple(false)
)]
pub struct DumpArgs {
    /// The process.
    #[arg(
        value_name = "PID",
        group = "process",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    target: Option<u32>,
    /// The same, as `record` has it.
    #[arg(
        short,
        long,
        value_name = "PID",
        group = "process",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pid: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Print with each frame what `perfusion inspect unwind` takes to explain it: a file and the
    /// address in it. For a managed method it is the pid and the address where the method begins.
    /// JSON has it always.
    #[arg(long)]
    pub addresses: bool,
    /// Write here instead of to stdout (-).
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Never load the shim: names of managed methods are read from memory.
    #[arg(long)]
    pub no_attach: bool,
    /// Most bytes of user stack copied per thread, in KiB; only what a thread uses is copied.
    #[arg(
        long,
        value_name = "KIB",
        default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(4..=128)
    )]
    pub stack_kib: u32,
}

impl DumpArgs {
    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        // The parser asks for one of them.
        self.target.or(self.pid).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, CliCommand};
    use clap::Parser as _;

    #[test]
    fn a_dump_takes_its_process_with_and_without_the_option() {
        let dump =
            |args: &[&str]| match Cli::try_parse_from(["perfusion", "dump"].iter().chain(args)) {
                Ok(Cli { command: CliCommand::Dump(dump), .. }) => Some(dump.pid()),
                _ => None,
            };
        assert_eq!(
            (dump(&["42"]), dump(&["--pid", "42"]), dump(&["-p42", "--json"])),
            (Some(42), Some(42), Some(42))
        );
        assert_eq!(
            (dump(&[]), dump(&["0"]), dump(&["1", "2"]), dump(&["1", "--pid", "2"])),
            (None, None, None, None)
        );
    }
}
