//! The arguments of `perfusion record`.

use super::values::parse_duration;
use super::{ShimLimitArgs, SymbolArgs, below, exit_codes_with_command};
use clap::{ArgGroup, Args, ValueEnum};
use perfusion_sources::shim::Subscriptions;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

const RECORD_EXAMPLES: &str = "Examples:
  perfusion record --pid 4242 --duration 10s -o app.pb.gz    a process that runs
  perfusion record -o app.pb.gz -- dotnet app.dll            a program, from its start
  perfusion record --all --attach -d 10s -o host.pb.gz       the whole host
  perfusion report app.pb.gz                                 what is in it";

/// `perfusion record`.
#[derive(Debug, Args)]
#[command(
    after_help = below(&[RECORD_EXAMPLES, &exit_codes_with_command()]),
    group = ArgGroup::new("target").required(true).multiple(false)
)]
pub struct RecordArgs {
    /// Processes to profile, separated by commas or given again. Children that they make from now
    /// on belong to them.
    #[arg(
        short,
        long,
        value_name = "PID",
        value_delimiter = ',',
        group = "target",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub pid: Vec<u32>,
    /// Profile every process of the host.
    #[arg(short, long, group = "target")]
    pub all: bool,
    /// Profile the processes of this cgroup v2 directory, for example
    /// /sys/fs/cgroup/system.slice/app.service.
    #[arg(long, value_name = "DIR", group = "target")]
    pub cgroup: Option<PathBuf>,
    /// Start this program and profile it from its first instruction until it ends.
    #[arg(last = true, value_name = "CMD", group = "target")]
    pub command: Vec<String>,
    /// Stop after this long (500ms, 10s, 5m, 1h). Default: until Ctrl-C or until every target has
    /// ended. A second Ctrl-C gives the recording up (exit code 130). If CMD still runs after this
    /// time, perfusion writes the file and waits for CMD. It ends with CMD's exit code.
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// The profile's file.
    #[arg(short, long, value_name = "FILE", default_value = "perfusion.pb.gz")]
    pub output: PathBuf,
    /// CPU samples per second and CPU.
    #[arg(
        short = 'F',
        long,
        value_name = "HZ",
        default_value_t = 99,
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    pub frequency: u32,
    /// Load the shim into the .NET processes of --all or --cgroup too, as many as run at the start.
    /// With --pid and CMD it is loaded anyway.
    #[arg(long, conflicts_with = "no_attach")]
    pub attach: bool,
    /// Never load the shim: names of managed methods are read from memory, no allocations.
    #[arg(long)]
    pub no_attach: bool,
    /// Count every object of CMD and its .NET children: allocations, survivors of each collection,
    /// promotions, lifetimes per type. The profile's allocations are exact then. FILE.exact.json
    /// has the rest, and `report --exact` prints it. .NET 10 does not report boxed values; its
    /// collections and its end find them. CMD runs without background collections. If it does
    /// nothing but allocate, it is 7 to 16 times slower. It must not have a profiler of its own (an
    /// APM agent's).
    #[arg(long, requires = "command", conflicts_with = "no_attach")]
    pub exact: bool,
    /// Have the runtimes of CMD and its .NET children (8 and newer) count their allocations per
    /// type from their start on. Each type is reported 5 (low) or 100 (high) times a second. If CMD
    /// allocates much, it runs up to 14 times slower. The last objects of each type are not
    /// reported. --exact counts those, too.
    #[arg(
        long,
        value_name = "OFTEN",
        requires = "command",
        conflicts_with_all = ["exact", "no_attach"]
    )]
    pub alloc_counts: Option<AllocCounts>,
    /// Most bytes of user stack copied per sample and wait, in KiB. Only what a thread uses is
    /// copied. Before Linux 5.17 the limit is 64, and 32 for a wait.
    #[arg(
        long,
        value_name = "KIB",
        default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(4..=128)
    )]
    pub stack_kib: u32,
    /// Budget for the stacks of waits, in MiB per second. A sixth of it is for threads that wait
    /// more than 32 times a second, the rest for the others. What four seconds leave of it may be
    /// used later, and a recording begins with as much. Above it, waits keep their exact times, and
    /// their stacks are sampled with a known probability.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 6,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub wait_stack_mib: u32,
    /// Take the stack of the thread that ends a wait too, if it is recorded. Flame graph and folded
    /// stacks show it upside down on the waiting stack, above a frame [woken by]. It comes out of
    /// the same budget.
    #[arg(long)]
    pub waker_stacks: bool,
    /// Tell CPU time and waits apart by the span that their threads work for, with the labels
    /// trace_id and span_id. Threads must publish it (OpenTelemetry's thread context). Files grow,
    /// because stacks of different spans are not summed up.
    #[arg(long)]
    pub spans: bool,
    /// Go on although a process has too little memory left, by the limits of its cgroups or on the
    /// machine. The kernel may kill it then.
    #[arg(long)]
    pub force: bool,
    /// How much each .NET process tells.
    #[command(flatten)]
    pub limits: ShimLimitArgs,
    /// Do not ask runtimes for exceptions (sample type `exceptions`). A program that throws many
    /// thousand a second pays nothing then.
    #[arg(long)]
    pub no_exceptions: bool,
    /// Record what exceptions say, too (label `exception_message`). Messages may hold anything,
    /// users' data among it.
    #[arg(long, conflicts_with = "no_exceptions")]
    pub exception_messages: bool,
    /// Do not ask runtimes for waits for locks (`contentions`, `delay`). `blocked` has them all the
    /// same.
    #[arg(long)]
    pub no_contention: bool,
    /// Ask runtimes how many workers their thread pools have, why that changes (starvation, workers
    /// added), and how much work waits. `report --type blocked` shows it.
    #[arg(long)]
    pub thread_pool: bool,
    /// Do not find source lines. They are found for assemblies that have their PDB, and for native
    /// files with debug information, where inlined functions are frames, too: `report --lines`,
    /// `report --list`, `go tool pprof -list`.
    #[arg(long)]
    pub no_lines: bool,
    /// Where symbols of native files come from.
    #[command(flatten)]
    pub symbols: SymbolArgs,
    /// Keep the stack of one wait in so many, chosen by chance, whatever the budget: for tests of
    /// the estimates.
    #[arg(long, value_name = "N", hide = true)]
    pub wait_stacks_one_in: Option<NonZeroU32>,
    /// Measure what the stages of a stack record take in the kernel: for `cargo xtask bench`.
    #[arg(long, hide = true)]
    pub time_stages: bool,
}

impl RecordArgs {
    /// What the shims are asked for.
    #[must_use]
    pub fn subscriptions(&self) -> Subscriptions {
        Subscriptions {
            exceptions: !self.no_exceptions,
            exception_messages: self.exception_messages,
            contention: !self.no_contention,
            thread_pool: self.thread_pool,
            il_maps: !self.no_lines,
            start_session: self.alloc_counts.is_some(),
            ..Subscriptions::default()
        }
    }
}

/// How often runtimes tell what they have counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AllocCounts {
    /// 5 times a second of each type.
    Low,
    /// 100 times a second of each type.
    High,
}
