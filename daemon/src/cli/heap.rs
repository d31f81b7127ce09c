//! The arguments of `perfusion heap`.

use super::{EXIT_CODES, below};
use clap::{ArgGroup, Args};
use std::path::PathBuf;

const HEAP_EXAMPLES: &str = "Examples:
  perfusion heap --pid 4242 -o before.pb.gz                  what is there, what holds it
  perfusion heap --diff before.pb.gz after.pb.gz             what has grown";

const HEAP_HELP: &str = "\
No library is loaded for this: the runtime itself reports its heap over its diagnostics socket \
(.NET 6 and newer). So a process that says PERFUSION_ATTACH=off is surveyed as well, if you name \
it. The survey pauses the app, and says for how long. It does not begin if the process has too \
little memory left, in a cgroup or on the machine. --force begins it all the same. Ctrl-C ends it \
within a second. If the runtime answers by then, its events are switched off first. Else the \
runtime switches them off when the connection is closed.";

/// Memory for a survey, and for the runtime's buffer, MiB, unless told otherwise.
pub(super) const MEMORY_MIB: u32 = 1024;
/// See [`MEMORY_MIB`].
pub(super) const BUFFER_MIB: u32 = 256;

/// `perfusion heap`.
#[derive(Debug, Args)]
#[command(
    after_help = below(&[HEAP_EXAMPLES, HEAP_HELP, EXIT_CODES]),
    group = ArgGroup::new("source").required(true).multiple(false)
)]
pub struct HeapArgs {
    /// Survey this process. Its managed threads are stopped for a full collection and a walk over
    /// its heap (twice up to .NET 9).
    #[arg(
        short,
        long,
        value_name = "PID",
        group = "source",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub pid: Option<u32>,
    /// Compare two surveys that were written with --output, the earlier first.
    #[arg(
        long,
        num_args = 2,
        value_names = ["BEFORE", "AFTER"],
        group = "source",
        conflicts_with_all = ["output", "memory", "buffer", "force"]
    )]
    pub diff: Vec<PathBuf>,
    /// Write the survey here as pprof too. It has a sample for each way in which objects are held,
    /// and its stack is that way.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Most types shown, with what holds them.
    #[arg(short = 'n', long, value_name = "ROWS", default_value_t = 10)]
    pub rows: usize,
    /// Most memory for the survey, in MiB. It takes about 16 bytes an object and 4 a reference,
    /// with dominated sizes 48 and 16. With less, first the dominated sizes are left out, then what
    /// holds the objects. Types are counted always.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = MEMORY_MIB,
        value_parser = clap::value_parser!(u32).range(16..=1_048_576)
    )]
    pub memory: u32,
    /// Most memory the runtime takes, inside the process, for events that were not read yet, in
    /// MiB. It takes less if the limits of the process's cgroups leave less.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = BUFFER_MIB,
        value_parser = clap::value_parser!(u32).range(16..=4096)
    )]
    pub buffer: u32,
    /// Go on although the process has too little memory left, by the limits of its cgroups or on
    /// the machine. The kernel may kill it then.
    #[arg(long)]
    pub force: bool,
}
