//! The arguments of `perfusion inspect`.

use super::below;
use super::values::parse_address;
use clap::{Args, Subcommand};

const INSPECT_UNWIND: &str = "\
Two answers are given, because the same address means two things. It can be the next instruction \
to run, in the innermost frame or in one that a signal interrupted. Then the place in a prologue \
or epilogue counts. It can also be a return address. Then the code is inside the call before it, \
and one byte less is looked up.

In the rule, `[x]` is the word of stack at x, CFA the caller's stack pointer before its call. \
Registers not named are lost.";

pub(super) const INSPECT_EXAMPLES: &str = "Examples:
  perfusion inspect unwind 4242 0x7f3c12345678               an address in a process's memory
  perfusion dump 4242 --addresses                            addresses to ask for
  perfusion inspect unwind /lib/x86_64-linux-gnu/libc.so.6 0x27200";

/// `perfusion inspect`.
#[derive(Debug, Subcommand)]
pub enum InspectCommand {
    /// Print the rule by which stacks leave the code at an address, and where that rule comes from.
    Unwind(InspectUnwindArgs),
}

/// `perfusion inspect unwind`.
#[derive(Debug, Args)]
#[command(after_help = below(&[INSPECT_UNWIND, INSPECT_EXAMPLES]))]
pub struct InspectUnwindArgs {
    /// A running process by its pid, or a file. The file is ELF (program, library) or PE (.NET
    /// assembly compiled ahead of time, as the framework's are). An assembly with IL only has no
    /// code before it runs. A file whose name is a number: ./123.
    #[arg(value_name = "FILE|PID")]
    pub target: String,
    /// 0x… or decimal. In a process: an address in its memory. In a file: an ELF virtual address
    /// (as nm and objdump print it) or a PE relative virtual address.
    #[arg(value_name = "ADDR", value_parser = parse_address)]
    pub address: u64,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}
