//! What a command can fail with, and the exit code of each (listed in `--help`).

use crate::cli::exit;
use crate::config::load::ConfigError;
use crate::end_signals::is_ignored;
use crate::memory_guard::MemoryError;
use crate::select::cgroups::NoCgroup;
use crate::symbols::{CacheError, UnusableUrl};
use perfusion_dotnet::attach::AttachError;
use perfusion_dotnet::attach::policy::AttachObstacle;
use perfusion_dotnet::counts::startup::StartupError;
use perfusion_export::SinkError;
use perfusion_export::file::FileError;
use perfusion_heap::collect::SurveyError;
use perfusion_host::process::ProcessError;
use perfusion_host::process::explain::ExplainError;
use perfusion_host::process::survival::DeathAfterRequest;
use perfusion_pprof::PprofError;
use perfusion_report::ReportError;
use perfusion_sources::kernel::KernelError;
use perfusion_sources::launch::LaunchError;
use perfusion_symbolize::native::NativeError;
use std::io::{self, Write as _};
use tokio::signal::unix::{SignalKind, signal};

/// Says a line on stderr, in one write: the recorder, and the child that is to become the program
/// it starts, may speak at once.
pub fn say(line: &str) {
    // Nobody is left to tell when stderr is gone.
    io::stderr().write_all(format!("{line}\n").as_bytes()).ok();
}

/// From here on a file that becomes longer than the user's limit (`ulimit -f`) is an error of the
/// write, not the silent end of this program. The handler stays when its runtime is gone; a program
/// that is started does not inherit it.
///
/// # Errors
/// When the handler cannot be installed.
pub fn outlive_long_files() -> io::Result<()> {
    // No signal of which Rust's libraries have a name (arch/x86/include/uapi/asm/signal.h).
    let too_long = SignalKind::from_raw(25);
    // Who has us ignore it wants the same of the programs we start, and those have no handler of
    // ours.
    if is_ignored(too_long) {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _inside = runtime.enter();
    signal(too_long).map(drop)
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel source.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A process to record is not there.
    #[error("no process with pid {pid}; `perfusion ps` lists what there is")]
    NoProcess {
        /// Its pid.
        pid: u32,
    },
    /// A process that `/proc` does not show to this user.
    #[error(
        "process {pid} is there, but /proc does not show it: it is mounted with hidepid; run \
         perfusion as root with CAP_SYS_PTRACE, or as a member of the group of its gid= option"
    )]
    Hidden {
        /// Its pid.
        pid: u32,
    },
    /// Nothing can be read of a process, which may well be there.
    #[error("/proc/{pid}: {source}")]
    ProcessUnreadable {
        /// Its pid.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// A pid that names a thread.
    #[error("{tid} is a thread of process {pid}: name the process, {pid}")]
    IsThread {
        /// What was given.
        tid: u32,
        /// Its process.
        pid: u32,
    },
    /// A process without a runtime that could be asked about its memory.
    #[error("process {pid} ({name}): {why}; `perfusion ps` lists processes with a .NET runtime")]
    NotManaged {
        /// Its pid.
        pid: u32,
        /// Its name.
        name: String,
        /// Why it cannot be asked.
        why: AttachObstacle,
    },
    /// A process whose heap cannot be surveyed now.
    #[error(
        "process {pid} ({name}) is recorded with --exact, which ends the runtime's walk over its \
         heap: a survey would see one object. \
             Take it when that recording has ended"
    )]
    CountedExactly {
        /// Its pid.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// The cgroup that was named is none.
    #[error(transparent)]
    Cgroup(#[from] NoCgroup),
    /// The program could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The runtimes cannot be told at their start to count.
    #[error(transparent)]
    Startup(#[from] StartupError),
    /// The program could not be started with the shim.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The output.
    #[error(transparent)]
    Output(#[from] FileError),
    /// An output that has no place beside it.
    #[error("--exact writes a second file beside the profile, and {} has no place for one: name a \
         file with -o", path.display())]
    ExactNeedsFile {
        /// What was given.
        path: std::path::PathBuf,
    },
    /// The daemon's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A sink of the daemon cannot be opened.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// Nobody to ask.
    #[error(
        "no symbol server: name one with --symbol-server URL, or some in the environment's \
         DEBUGINFOD_URLS (sudo passes it on with --preserve-env=DEBUGINFOD_URLS)"
    )]
    NoSymbolServer,
    /// A URL of a symbol server.
    #[error("--symbol-server: {0}")]
    SymbolServer(#[from] UnusableUrl),
    /// Where symbols are kept.
    #[error(transparent)]
    SymbolCache(#[from] CacheError),
    /// A file without symbols of any kind.
    #[error("{}: {source}", path.display())]
    SymbolsOf {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: NativeError,
    },
    /// Another daemon runs.
    #[error("another daemon runs here: pid {pid} (it holds {})", path.display())]
    AlreadyRuns {
        /// Its pid, as it wrote it.
        pid: String,
        /// The file both want to hold.
        path: std::path::PathBuf,
    },
    /// The file that says so cannot be had.
    #[error("the daemon's lock file {}: {source}{}", path.display(), hint(source))]
    LockFile {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The address for metrics cannot be had.
    #[error("telemetry.listen: {listen}: {source}")]
    Listen {
        /// The address.
        listen: std::net::SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The profile could not be made.
    #[error(transparent)]
    Pprof(#[from] PprofError),
    /// An address could not be looked up.
    #[error(transparent)]
    Inspect(#[from] ExplainError),
    /// A report.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// A survey of a heap.
    #[error(transparent)]
    Survey(#[from] SurveyError),
    /// A program was not started for want of memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// What was asked of a process may have been its end.
    #[error("{0}")]
    Death(Box<DeathAfterRequest>),
    /// Nothing to write: what holds the objects is not known.
    #[error("{}: not written, for what holds the objects is not known", path.display())]
    NoWays {
        /// The output.
        path: std::path::PathBuf,
    },
    /// No iterator.
    #[error("dump: the kernel does not show sleeping threads: {lack} (`perfusion doctor`)")]
    NoOffCpuScans {
        /// The kernel's answer.
        lack: String,
    },
    /// The process has ended.
    #[error("process {pid} has ended, and only its parent has not asked for it yet (a zombie)")]
    Zombie {
        /// Its pid.
        pid: u32,
    },
    /// A thread of the kernel.
    #[error(
        "pid {pid} ({name}) is a thread of the kernel: expected a process with memory of its own, \
         found none; what the kernel does for a \
         process stands in the stacks of that process, and `perfusion ps` lists those there are"
    )]
    KernelThread {
        /// Its pid.
        pid: u32,
        /// Its name.
        name: String,
    },
    /// The kernel lets nobody look at the process who has no more rights than this program.
    #[error(
        "process {pid} ({name}) cannot be recorded: expected to read /proc/{pid}/maps, found \
         {source}; without it nothing in the process has a \
         name. It belongs to a user namespace around the one perfusion runs in, or a security \
         module protects it: run perfusion on the host and \
         not in a container, or name another process (`perfusion ps` lists which can be seen)"
    )]
    Unseen {
        /// Its pid.
        pid: u32,
        /// Its name.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The process ended while it was looked at.
    #[error("process {pid} ended while its threads were looked at")]
    Gone {
        /// Its pid.
        pid: u32,
    },
    /// A thread or the runtime of this program.
    #[error("{what}: {source}")]
    Internal {
        /// What was being done.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The sinks did not end.
    #[error(
        "the sinks have not ended after {0:?}: a disk or mount does not answer, and what they had \
         not written is lost"
    )]
    SinksHang(std::time::Duration),
    /// A signal came before the program to record was let go.
    #[error("interrupted before {command} began: it was not started, and no file was written")]
    NotStarted {
        /// The program, as given.
        command: String,
    },
    /// A thread of this program panicked.
    #[error("the recording failed: a thread of perfusion ended early; please report this")]
    Failed,
}

/// What to do about a refusal.
fn hint(refused: &io::Error) -> &'static str {
    match refused.kind() {
        io::ErrorKind::PermissionDenied => ": the daemon is to run as root (`perfusion doctor`)",
        _ => "",
    }
}

impl From<DeathAfterRequest> for Error {
    fn from(death: DeathAfterRequest) -> Self {
        Self::Death(Box::new(death))
    }
}

impl Error {
    /// A failure of a thread or of the runtime of this program while it did `what`.
    pub(crate) fn internal(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::Internal { what, source }
    }

    /// The process's exit code for it.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Kernel(KernelError::NoProcess { .. })
            | Self::NoProcess { .. }
            | Self::Inspect(ExplainError::Process(ProcessError::Gone { .. }))
            | Self::IsThread { .. }
            | Self::Gone { .. }
            | Self::Zombie { .. }
            | Self::KernelThread { .. }
            | Self::Attach(AttachError::NoSuchProcess { .. } | AttachError::Ended { .. })
            | Self::Survey(SurveyError::Ended { .. })
            | Self::Death(_)
            | Self::Cgroup(_) => exit::NO_TARGET,
            Self::Launch(LaunchError::Spawn { .. } | LaunchError::Interpreter { .. }) => {
                exit::COMMAND
            }
            Self::NoOffCpuScans { .. }
            | Self::Unseen { .. }
            | Self::Hidden { .. }
            | Self::ProcessUnreadable { .. }
            | Self::NotManaged { why: AttachObstacle::NotPermitted, .. }
            | Self::Attach(AttachError::Unreadable { .. }) => exit::NOT_PERMITTED,
            Self::Kernel(
                KernelError::Feature(_)
                | KernelError::ProcessUnreadable { .. }
                | KernelError::BtfUnreadable { .. }
                | KernelError::KernelBtf(_)
                | KernelError::Btf { .. }
                | KernelError::Load { .. }
                | KernelError::MapForbidden { .. }
                | KernelError::Program { .. }
                | KernelError::Sampler { .. }
                | KernelError::Perf { .. }
                | KernelError::PerfRing { .. }
                | KernelError::FewOpenFiles { .. },
            ) => exit::NOT_PERMITTED,
            Self::Inspect(ExplainError::Process(ProcessError::Read { source, .. }))
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                exit::NOT_PERMITTED
            }
            Self::LockFile { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                exit::NOT_PERMITTED
            }
            Self::Config(_)
            | Self::ExactNeedsFile { .. }
            | Self::Report(ReportError::NoValue { .. }) => exit::USAGE,
            Self::Attach(AttachError::OtherProfiler { .. }) => exit::USAGE,
            Self::Output(_)
            | Self::Sink(_)
            | Self::SinksHang(_)
            | Self::SymbolCache(_)
            | Self::Report(ReportError::Write(_)) => exit::OUTPUT,
            Self::NotStarted { .. } => exit::INTERRUPTED,
            _ => exit::OTHER,
        }
    }
}
