//! The arguments of `perfusion leaks`.

use super::heap::{BUFFER_MIB, MEMORY_MIB};
use super::values::{parse_duration, parse_seconds};
use super::{EXIT_CODES, ShimLimitArgs, below};
use clap::{ArgGroup, Args};
use std::path::PathBuf;
use std::time::Duration;

const LEAKS_EXAMPLES: &str = "Examples:
  perfusion leaks --pid 4242                                 two minutes from now on
  perfusion leaks --pid 4242 -d 30m -w 1m                    a slow leak
  perfusion leaks --pid 4242 --heap                          and what holds it
  perfusion leaks /var/lib/perfusion/profiles/shop/*.pb.gz   what the daemon has written";

/// `perfusion leaks`.
#[derive(Debug, Args)]
#[command(
    after_help = below(&[LEAKS_EXAMPLES, EXIT_CODES]),
    group = ArgGroup::new("source").required(true).multiple(false)
)]
pub struct LeaksArgs {
    /// Watch this process. What it allocated before is not seen.
    #[arg(
        short,
        long,
        value_name = "PID",
        group = "source",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub pid: Option<u32>,
    /// Profiles of windows that follow each other, as the daemon writes them, in any order and of
    /// any number of services. Each is one moment. Of each process the last unbroken stretch is
    /// judged.
    #[arg(
        value_name = "FILE",
        group = "source",
        conflicts_with_all = ["duration", "window", "heap", "live_objects", "allocation_samples"]
    )]
    pub files: Vec<PathBuf>,
    /// How long a process is watched. Less than a minute is too short for a verdict about growth.
    #[arg(short, long, value_name = "TIME", default_value = "2m", value_parser = parse_duration)]
    pub duration: Duration,
    /// Time between two moments, a second at least.
    #[arg(short, long, value_name = "TIME", default_value = "5s", value_parser = parse_seconds)]
    pub window: Duration,
    /// Most places shown.
    #[arg(short = 'n', long, value_name = "ROWS", default_value_t = 10)]
    pub rows: usize,
    /// At the end, say what holds the objects that were seen of each place shown. That takes a
    /// survey of the heap (`perfusion heap`). It stops the managed threads for a full collection
    /// and a walk (twice up to .NET 9). It is left out after Ctrl-C.
    #[arg(long)]
    pub heap: bool,
    /// Most memory for that survey, in MiB. It takes about 24 bytes an object and 4 a reference.
    #[arg(
        long,
        value_name = "MIB",
        requires = "heap",
        default_value_t = MEMORY_MIB,
        value_parser = clap::value_parser!(u32).range(16..=1_048_576)
    )]
    pub memory: u32,
    /// Most memory the runtime takes for that survey, inside the process, for events that were not
    /// read yet, in MiB.
    #[arg(
        long,
        value_name = "MIB",
        requires = "heap",
        default_value_t = BUFFER_MIB,
        value_parser = clap::value_parser!(u32).range(16..=4096)
    )]
    pub buffer: u32,
    /// Go on although the process has too little memory left, by the limits of its cgroups or on
    /// the machine. The kernel may kill it then.
    #[arg(long)]
    pub force: bool,
    /// How much each .NET process tells.
    #[command(flatten)]
    pub limits: ShimLimitArgs,
}
