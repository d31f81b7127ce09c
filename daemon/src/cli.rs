//! The command line: clap types and the parsing of units, nothing else. `main` maps each command to
//! its stage.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgGroup, Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use perfusion_export::quantity::HumanDuration;
use perfusion_report::stacks::LabelFilter;
use perfusion_sources::shim::{ALLOCATION_SAMPLES, LIVE_OBJECTS, ShimLimits};
use std::{
    collections::HashSet,
    ffi::OsString,
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

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
}

const EXIT_CODES: &str = "Exit codes:
  0    done
  1    an error not listed here
  2    wrong command line or configuration
  3    no such process, or it ended before it was looked at or while its heap was surveyed
  4    a privilege or a kernel feature is missing (`perfusion doctor` says which)
  5    the output cannot be written";

const OF_COMMAND: &str = "  N    record -- CMD: CMD's own exit code; 128+S if signal S ended it
  127  record -- CMD: CMD cannot be started";

const RECORD_EXAMPLES: &str = "Examples:
  perfusion record --pid 4242 --duration 10s -o app.pb.gz    a process that runs
  perfusion record -o app.pb.gz -- dotnet app.dll            a program, from its start
  perfusion record --all --attach -d 10s -o host.pb.gz       the whole host
  perfusion report app.pb.gz                                 what is in it";

const REPORT_EXAMPLES: &str = "Examples:
  perfusion report app.pb.gz --type alloc_space              who allocates most
  perfusion report app.pb.gz --type blocked --sort cum       where threads wait, callers first
  perfusion report app.pb.gz -t blocked --by thread_name,wait_reason
  perfusion report app.pb.gz -t cpu --only thread=worker1    one thread of it
  perfusion report app.pb.gz -f flame -o app.html            every sample type as a flame graph
  perfusion report /var/lib/perfusion/profiles/shop/*.pb.gz  what the daemon has written, as one \
     profile
  perfusion report shop/*.pb.gz -t alloc_space --by window,type -n 3
                                                             the rates of the top three types, \
     minute by minute";

const DUMP_EXAMPLES: &str = "Examples:
  perfusion dump 4242                                        every thread now
  perfusion dump 4242 --json | jq '.threads[].state'         the same for programs";

const LEAKS_EXAMPLES: &str = "Examples:
  perfusion leaks --pid 4242                                 two minutes from now on
  perfusion leaks --pid 4242 -d 30m -w 1m                    a slow leak
  perfusion leaks --pid 4242 --heap                          and what holds it
  perfusion leaks /var/lib/perfusion/profiles/shop/*.pb.gz   what the daemon has written";

const HEAP_EXAMPLES: &str = "Examples:
  perfusion heap --pid 4242 -o before.pb.gz                  what is there, what holds it
  perfusion heap --diff before.pb.gz after.pb.gz             what has grown";

const PS_EXAMPLES: &str = "Examples:
  perfusion ps                                               .NET processes first
  perfusion ps --json | jq '.[] | select(.mode == \"can_attach\") | .pid'";

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
#[command(name = "perfusion", version, after_help = exit_codes_with_command(), max_term_width = 110)]
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
    /// several moments of a running process or several profiles, each with a verdict and its
    /// reason.
    Leaks(LeaksArgs),
    /// Show what is in the managed heap and what holds it: one survey of a running process, or two
    /// compared.
    Heap(HeapArgs),
    /// List processes: runtime and version, container, what profiling they allow and why not more.
    /// Where a daemon runs it is asked: how many stacks it has of each, how many it lost, what part
    /// of a CPU the process costs it, and why it did not attach.
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

/// `perfusion record`.
#[derive(Debug, Args)]
#[command(after_help = below(&[RECORD_EXAMPLES, &exit_codes_with_command()]), group = ArgGroup::new("target").required(true).multiple(false))]
pub struct RecordArgs {
    /// Processes to profile, with the children they make from now on: separated by commas, or given
    /// again.
    #[arg(short, long, value_name = "PID", value_delimiter = ',', group = "target", value_parser = clap::value_parser!(u32).range(1..))]
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
    /// Stop after this long (500ms, 10s, 5m, 1h). Default: until Ctrl-C (a second one gives the
    /// recording up, exit code 130) or until every target has ended. A CMD that still runs then
    /// goes on; perfusion writes the file and waits for it, to end with its exit code.
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// The profile's file.
    #[arg(short, long, value_name = "FILE", default_value = "perfusion.pb.gz")]
    pub output: PathBuf,
    /// CPU samples per second and CPU.
    #[arg(short = 'F', long, value_name = "HZ", default_value_t = 99, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub frequency: u32,
    /// Load the shim into the .NET processes of --all or --cgroup too, as many as run at the start
    /// (with --pid and CMD it is loaded anyway).
    #[arg(long, conflicts_with = "no_attach")]
    pub attach: bool,
    /// Never load the shim: no managed names beyond a perf map, no allocations.
    #[arg(long)]
    pub no_attach: bool,
    /// Count every object of CMD and its .NET children: allocations, survivors of each collection,
    /// promotions, lifetimes per type. The profile's allocations are exact then, and
    /// FILE.exact.json, which `report --exact` prints, has the rest. Boxed values, of which .NET 10
    /// tells nobody, are found by its collections and at its end. CMD runs 7 to 16 times slower
    /// where it does nothing but allocate, without background collections, and must not have a
    /// profiler of its own (an APM agent's).
    #[arg(long, requires = "command", conflicts_with = "no_attach")]
    pub exact: bool,
    /// Have the runtimes of CMD and its .NET children (8 and newer) count what they allocate, per
    /// type, from their start on, and tell of each type so often: low 5, high 100 times a second.
    /// CMD runs up to 14 times slower where it allocates much. The last objects of each type are
    /// not told of; --exact counts those, too.
    #[arg(long, value_name = "OFTEN", requires = "command", conflicts_with_all = ["exact", "no_attach"])]
    pub alloc_counts: Option<AllocCounts>,
    /// Most bytes of user stack copied per sample and wait, in KiB (before Linux 5.17 at most 64,
    /// of a wait 32); only what a thread uses is copied.
    #[arg(long, value_name = "KIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(4..=128))]
    pub stack_kib: u32,
    /// Budget for the stacks of waits, in MiB per second: a sixth of it for threads that wait more
    /// than 32 times a second, the rest for those whose waits are few; what four seconds leave of
    /// it may be used later, and a recording begins with as much. Above it, waits keep their exact
    /// timing and their stacks are sampled with a known probability.
    #[arg(long, value_name = "MIB", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub wait_stack_mib: u32,
    /// Take the stack of whoever ends a wait too, of the threads that are recorded: in the flame
    /// graph and in folded stacks it stands upside down on the waiting stack, above a frame [woken
    /// by]. Comes out of the same budget.
    #[arg(long)]
    pub waker_stacks: bool,
    /// Tell CPU time and waits apart by what their threads worked for, where those publish it
    /// (OpenTelemetry's thread context): labels trace_id and span_id. Files grow: stacks of
    /// different spans are not summed up.
    #[arg(long)]
    pub spans: bool,
    /// Go on although a process has too little memory left below its cgroups' limits or on the
    /// machine. The kernel may kill it then.
    #[arg(long)]
    pub force: bool,
    /// How much each .NET process tells.
    #[command(flatten)]
    pub limits: ShimLimitArgs,
    /// Do not ask runtimes for exceptions (sample type `exceptions`): a program that throws many
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
    /// Ask runtimes how many workers their thread pools have, and why that changes (starvation,
    /// workers added), and how much work waits. `report --type blocked` shows it.
    #[arg(long)]
    pub thread_pool: bool,
    /// Keep the stack of one wait in so many, chosen by chance, whatever the budget: for tests of
    /// the estimates.
    #[arg(long, value_name = "N", hide = true)]
    pub wait_stacks_one_in: Option<NonZeroU32>,
    /// Measure what the stages of a stack record take in the kernel: for `cargo xtask bench`.
    #[arg(long, hide = true)]
    pub time_stages: bool,
}

/// How often runtimes tell what they have counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AllocCounts {
    /// 5 times a second of each type.
    Low,
    /// 100 times a second of each type.
    High,
}

/// `perfusion report`.
#[derive(Debug, Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub struct ReportArgs {
    /// A pprof file, gzipped or not; - is standard input. Several are shown as one, each sample
    /// with a label `window`: when its file began (--by window: how much in each, and per second).
    /// What was alive (inuse_*) is that of the last moment, or of each with --by window.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print what `record --exact` has counted: FILE is its profile, or the .exact.json beside it.
    /// Nothing else but -n and -o matters then.
    #[arg(long)]
    pub exact: bool,
    /// Sample type, for example cpu, blocked, alloc_space, inuse_space. Default: the profile's own
    /// default.
    #[arg(short = 't', long = "type", value_name = "TYPE")]
    pub sample_type: Option<String>,
    /// top: table of functions; folded: one stack a line; flame: one HTML file with all sample
    /// types. Default: top, or flame where the output's name ends in .html.
    #[arg(short, long, value_enum)]
    pub format: Option<ReportFormat>,
    /// Rows of the top table; with --by window and more, of each window.
    #[arg(short = 'n', long, value_name = "ROWS", default_value_t = 20)]
    pub rows: usize,
    /// Order of the top table: what a function uses itself (flat), or with all it calls (cum).
    #[arg(long, value_enum, default_value_t = TopOrder::Flat)]
    pub sort: TopOrder,
    /// Sum by the values of a label instead of by functions, for example thread, thread_name,
    /// thread_role, process, wait_reason, waker, waker_name, type, generation, window (one that is
    /// not there is answered with those that are). Several, separated by commas or given again: a
    /// row for each combination; (none) are those without the label. Folded stacks and the flame
    /// graph get the values as their roots.
    #[arg(long, value_name = "LABEL", value_delimiter = ',')]
    pub by: Vec<String>,
    /// Show only what has this value of a label, for example thread=poster1, pid=4242 or
    /// wait_reason=futex. More than one: all must hold.
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_only)]
    pub only: Vec<LabelFilter>,
    /// Write here instead of to stdout (-).
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Show threads that are parked for want of work too: pool workers, the runtime's own threads.
    /// The flame graph has them behind a switch.
    #[arg(long)]
    pub idle: bool,
}

impl ReportArgs {
    /// How it is written.
    #[must_use]
    pub fn format(&self) -> ReportFormat {
        let is_page = self.output.as_deref().is_some_and(is_page);
        self.format.unwrap_or(if is_page { ReportFormat::Flame } else { ReportFormat::Top })
    }
}

/// True for the name of a web page.
fn is_page(path: &Path) -> bool {
    path.extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("html") || end.eq_ignore_ascii_case("htm"))
}

/// `perfusion dump`.
#[derive(Debug, Args)]
#[command(after_help = below(&[DUMP_EXAMPLES, EXIT_CODES]), group = ArgGroup::new("process").required(true).multiple(false))]
pub struct DumpArgs {
    /// The process.
    #[arg(value_name = "PID", group = "process", value_parser = clap::value_parser!(u32).range(1..))]
    target: Option<u32>,
    /// The same, as `record` has it.
    #[arg(short, long, value_name = "PID", group = "process", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// Print with each frame what `perfusion inspect unwind` takes to explain it (JSON has it
    /// always): a file and the address in it, or the pid and the address where a managed method
    /// begins.
    #[arg(long)]
    pub addresses: bool,
    /// Write here instead of to stdout (-).
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Never load the shim: no managed names beyond a perf map.
    #[arg(long)]
    pub no_attach: bool,
    /// Most bytes of user stack copied per thread, in KiB; only what a thread uses is copied.
    #[arg(long, value_name = "KIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(4..=128))]
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

/// Orders of `report`'s table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopOrder {
    /// By a function's own value.
    Flat,
    /// By its value and that of what it calls.
    Cum,
}

/// `perfusion leaks`.
#[derive(Debug, Args)]
#[command(after_help = below(&[LEAKS_EXAMPLES, EXIT_CODES]), group = ArgGroup::new("source").required(true).multiple(false))]
pub struct LeaksArgs {
    /// Watch this process. What it allocated before is not seen.
    #[arg(short, long, value_name = "PID", group = "source", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Profiles of windows that follow each other, as the daemon writes them, in any order and of
    /// any number of services: each is one moment. Of each process the last unbroken stretch is
    /// judged.
    #[arg(value_name = "FILE", group = "source", conflicts_with_all = ["duration", "window", "heap", "live_objects", "allocation_samples"])]
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
    /// survey of the heap (`perfusion heap`), which stops the managed threads for a full collection
    /// and a walk (twice up to .NET 9). Not after Ctrl-C.
    #[arg(long)]
    pub heap: bool,
    /// Most memory for that survey, in MiB: about 24 bytes an object and 4 a reference.
    #[arg(long, value_name = "MIB", requires = "heap", default_value_t = MEMORY_MIB, value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    pub memory: u32,
    /// Most memory the runtime takes for that survey, inside the process, for events that were not
    /// read yet, in MiB.
    #[arg(long, value_name = "MIB", requires = "heap", default_value_t = BUFFER_MIB, value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub buffer: u32,
    /// Go on where the process has too little memory left (its cgroups' limits, the machine's
    /// memory): the kernel may kill it then.
    #[arg(long)]
    pub force: bool,
    /// How much each .NET process tells.
    #[command(flatten)]
    pub limits: ShimLimitArgs,
}

/// How much each .NET process tells of its objects.
#[derive(Debug, Args)]
pub struct ShimLimitArgs {
    /// Sampled objects watched at a time in each .NET process, 256 to 65536. When there are more,
    /// chance chooses which, and these stand for all.
    #[arg(long, value_name = "N", default_value_t = LIVE_OBJECTS, value_parser = clap::value_parser!(u32).range(256..=65_536))]
    pub live_objects: u32,
    /// Samples of allocations in a second of which each .NET process tells of all, 16 to 1000000 (a
    /// sample for each 100 KiB), and as many large objects (85,000 bytes or more), which are not
    /// sampled. Of more, chance chooses about as many, larger ones first, and these stand for all.
    #[arg(long, value_name = "N", default_value_t = ALLOCATION_SAMPLES, value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub allocation_samples: u32,
}

impl ShimLimitArgs {
    /// As the library is told.
    #[must_use]
    pub fn limits(&self) -> ShimLimits {
        ShimLimits { live_objects: self.live_objects, allocation_samples: self.allocation_samples }
    }
}

/// Memory for a survey, and for the runtime's buffer, MiB, unless told otherwise.
const MEMORY_MIB: u32 = 1024;
/// See [`MEMORY_MIB`].
const BUFFER_MIB: u32 = 256;

/// `perfusion heap`.
#[derive(Debug, Args)]
#[command(after_help = below(&[HEAP_EXAMPLES, HEAP_HELP, EXIT_CODES]), group = ArgGroup::new("source").required(true).multiple(false))]
pub struct HeapArgs {
    /// Survey this process. Its managed threads are stopped for a full collection and a walk over
    /// its heap (twice up to .NET 9).
    #[arg(short, long, value_name = "PID", group = "source", value_parser = clap::value_parser!(u32).range(1..))]
    pub pid: Option<u32>,
    /// Compare two surveys that were written with --output, the earlier first.
    #[arg(long, num_args = 2, value_names = ["BEFORE", "AFTER"], group = "source", conflicts_with_all = ["output", "memory", "buffer", "force"])]
    pub diff: Vec<PathBuf>,
    /// Write the survey here as pprof too: a sample for each way in which objects are held, its
    /// stack the way.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Most types shown, with what holds them.
    #[arg(short = 'n', long, value_name = "ROWS", default_value_t = 10)]
    pub rows: usize,
    /// Most memory for the survey, in MiB: about 16 bytes an object and 4 a reference, with
    /// dominated sizes 48 and 16. With less, dominated sizes are left out first, then what holds
    /// the objects; types are counted always.
    #[arg(long, value_name = "MIB", default_value_t = MEMORY_MIB, value_parser = clap::value_parser!(u32).range(16..=1_048_576))]
    pub memory: u32,
    /// Most memory the runtime takes, inside the process, for events that were not read yet, in
    /// MiB. Less is taken where the limits of the process's cgroups leave less.
    #[arg(long, value_name = "MIB", default_value_t = BUFFER_MIB, value_parser = clap::value_parser!(u32).range(16..=4096))]
    pub buffer: u32,
    /// Go on where the process has too little memory left (its cgroups' limits, the machine's
    /// memory): the kernel may kill it then.
    #[arg(long)]
    pub force: bool,
}

const HEAP_HELP: &str = "\
No library is loaded for this: the runtime itself reports its heap over its diagnostics socket \
     (.NET 6 and newer). So a process that says \
PERFUSION_ATTACH=off is surveyed as well, if you name it. The survey pauses the app, and \
says for how long. It is not begun where the process has too little memory left for it, in a \
     cgroup or on the machine; --force begins it all the same. Ctrl-C ends it within \
a second. If the runtime answers by then, its events are switched off first. Else the runtime \
     switches them off when the connection is closed.";

/// Output formats of `report`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// Table of functions.
    Top,
    /// One stack a line, root first, `;` between frames, a space, the value.
    Folded,
    /// One self-contained HTML file.
    Flame,
}

/// Where the daemon's configuration comes from.
#[derive(Debug, Args)]
#[command(after_help = CONFIG_HELP)]
pub struct ConfigSourceArgs {
    /// The YAML file. Default: /etc/perfusion/perfusion.yaml, if it is there.
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A value by its dotted name, such as windows.length=30s; goes before the environment and the
    /// file.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// `perfusion config check`.
#[derive(Debug, Args)]
pub struct ConfigCheckArgs {
    /// The YAML file: the same as with --config.
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    #[command(flatten)]
    sources: ConfigSourceArgs,
}

impl ConfigCheckArgs {
    /// Where the configuration comes from, the file named either way.
    #[must_use]
    pub fn sources(&self) -> ConfigSourceArgs {
        let config = self.file.as_ref().or(self.sources.config.as_ref()).cloned();
        ConfigSourceArgs { config, set: self.sources.set.clone() }
    }
}

const CONFIG_HELP: &str = "\
Flags go before the environment, the environment before the file. The variable of windows.length \
     is PERFUSION_WINDOWS_LENGTH.
The daemon reads it again on SIGHUP, and keeps what it has when something is wrong. log, \
     limits.lower_priority and the place of the control socket \
(beside limits.kill_switch) change when it starts again. `perfusion config schema` lists every \
     value.";

/// `perfusion config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say whether it can be used; exit code 2 and what is wrong where, if not.
    Check(ConfigCheckArgs),
    /// Print all values as one file, with where they come from.
    Show(ConfigSourceArgs),
    /// Print the JSON schema of the file.
    Schema,
}

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
    /// A running process by its pid, or a file: ELF (program, library) or PE (.NET assembly
    /// compiled ahead of time, as the framework's are; one with IL only has no code before it
    /// runs). A file whose name is a number: ./123.
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

const INSPECT_UNWIND: &str = "\
Two answers are given, since the same address means two things. As the next instruction to run \
     (innermost frame, or interrupted by \
a signal) the place in a prologue or epilogue counts. As a return address the code is inside the \
     call before it: what is looked up is \
one byte less.

In the rule, `[x]` is the word of stack at x, CFA the caller's stack pointer before its call. \
     Registers not named are lost.";

const INSPECT_EXAMPLES: &str = "Examples:
  perfusion inspect unwind 4242 0x7f3c12345678               an address in a process's memory
  perfusion dump 4242 --addresses                            addresses to ask for
  perfusion inspect unwind /lib/x86_64-linux-gnu/libc.so.6 0x27200";

/// `perfusion ps`.
#[derive(Debug, Args)]
#[command(after_help = PS_EXAMPLES)]
pub struct PsArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The daemon's configuration, which says where it is to be asked. Default:
    /// /etc/perfusion/perfusion.yaml.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
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

/// What clap's own rules let through. It does not ask for an argument that conflicts with a given
/// one, so `requires = "command"` says nothing beside --pid, which is in CMD's group.
fn refuse(command: &CliCommand) -> Result<(), clap::Error> {
    let CliCommand::Record(record) = command else { return Ok(()) };
    let refused = |kind, text: String| {
        let mut whole = Cli::command();
        whole.build();
        match whole.find_subcommand_mut("record") {
            Some(record) => Err(record.error(kind, text)),
            None => Err(whole.error(kind, text)),
        }
    };
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
        return refused(ErrorKind::MissingRequiredArgument, text);
    }
    if is_page(&record.output) {
        let text = format!(
            "--output {}: what is recorded is a pprof file, not a page: record to a .pb.gz, then \
             `perfusion report FILE --format flame --output {0}`",
            record.output.display()
        );
        return refused(ErrorKind::ValueValidation, text);
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

/// Reads `label=value`.
///
/// # Errors
/// Says what is expected.
pub fn parse_only(text: &str) -> Result<LabelFilter, String> {
    match text.split_once('=') {
        Some((label, value)) if !label.is_empty() => {
            Ok(LabelFilter { label: label.to_owned(), value: value.to_owned() })
        }
        _ => Err(format!("`{text}`: expected LABEL=VALUE, as in wait_reason=futex")),
    }
}

/// Reads `0x7f00` or decimal digits.
///
/// # Errors
/// Says what was found and what is expected.
pub fn parse_address(text: &str) -> Result<u64, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|_| {
        format!("`{text}` is no address: expected 0x and hexadecimal digits, or decimal digits")
    })
}

/// Reads a length of time as the configuration has them.
fn parse_duration(text: &str) -> Result<Duration, String> {
    text.parse().map(|HumanDuration(duration)| duration)
}

/// The same of a second and more.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if duration < Duration::from_secs(1) {
        Err("expected 1s or more".to_owned())
    } else {
        Ok(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, CliCommand, ConfigCommand, ReportFormat, parse, parse_address};
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

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

    #[test]
    fn labels_to_group_by_may_be_several() {
        let by = |words: &[&str]| match Cli::try_parse_from(
            ["perfusion", "report", "x"].iter().chain(words),
        ) {
            Ok(Cli { command: CliCommand::Report(report), .. }) => report.by,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            by(&["--by", "thread_name,wait_reason", "--by", "waker"]),
            ["thread_name", "wait_reason", "waker"]
        );
        assert!(by(&[]).is_empty());
    }

    #[test]
    fn addresses_are_hexadecimal_with_0x_only() {
        assert_eq!(parse_address("0x1f"), Ok(31));
        assert_eq!(parse_address("31"), Ok(31));
        for bad in ["1f", "0x", "", "-1", "0x1_0000_0000_0000_0000", "x1"] {
            assert!(parse_address(bad).is_err(), "{bad}");
        }
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
    fn the_name_of_a_page_asks_for_the_flame_graph() {
        let format = |words: &[&str]| match parse(["perfusion", "report", "x"].iter().chain(words))
        {
            Ok(Cli { command: CliCommand::Report(report), .. }) => report.format(),
            other => panic!("{other:?}"),
        };
        assert_eq!(format(&[]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.txt"]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.HTML"]), ReportFormat::Flame);
        assert_eq!(format(&["-o", "x.html", "-f", "folded"]), ReportFormat::Folded);
        let error = parse(["perfusion", "record", "--all", "-o", "x.html"]).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("--format flame"), "{error}");
    }

    #[test]
    fn a_configuration_is_named_with_and_without_the_option() {
        let check =
            |words: &[&str]| match parse(["perfusion", "config", "check"].iter().chain(words)) {
                Ok(Cli {
                    command: CliCommand::Config { what: ConfigCommand::Check(check) },
                    ..
                }) => Some(check.sources().config),
                _ => None,
            };
        let file = Some(Some("f.yaml".into()));
        assert_eq!(
            (check(&["f.yaml"]), check(&["-c", "f.yaml"]), check(&[])),
            (file.clone(), file, Some(None))
        );
        assert_eq!(check(&["f.yaml", "-c", "g.yaml"]), None);
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
