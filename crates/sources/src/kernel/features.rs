//! Probes the running kernel and this process's rights, and says what is missing in terms of what
//! to do about it. The one place that knows which kernel and which capabilities the probes need.

use crate::kernel::{btf, perf};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::system_limits::explain;
use perfusion_unwind::native::NATIVE;
use rustix::fs::{Mode, OFlags, openat};
use rustix::process::{Resource, Rlimit};
use std::fmt::{self, Display, Formatter};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::{fs, io};

/// Before this kernel maps and programs count against RLIMIT_MEMLOCK.
const UNLIMITED_MAPS: (u32, u32) = (5, 11);

/// What the probes' maps take, and as much again: for rings and stacks of machines with many CPUs.
const MAP_BYTES: u64 = 64 << 20;

/// From here on the probes can walk stacks: `bpf_loop` came with 5.17.
const WALKS: (u32, u32) = (5, 17);

/// From here on a program may read the memory of a thread that does not run:
/// `bpf_copy_from_user_task` came with 5.18.
const OFF_CPU_SCANS: (u32, u32) = (5, 18);

/// Below this limit for the length of files a profile may not fit, nor the part of a file in which
/// functions are looked up.
const ROOMY_FILE_BYTES: u64 = 1 << 30;
/// Address space below this is mentioned: recordings of the system tests had up to 0.8 GiB of it.
const ROOMY_ADDRESS_BYTES: u64 = 1 << 30;

/// Inode of the initial pid namespace (`PROC_PID_INIT_INO`, include/linux/proc_ns.h).
pub const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// 1 where the kernel counts the run time of eBPF programs all the time.
const BPF_STATS: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// When the probes' CPU time is known (bpf_enable_stats, kernel/bpf/syscall.c).
pub const PROBES_COUNTED: &str =
    "the kernel counts it for CAP_SYS_ADMIN or with kernel.bpf_stats_enabled=1";

/// Capabilities of which each is needed, unless the stronger one is there
/// (include/uapi/linux/capability.h).
const NEEDED: [(Capability, Option<Capability>); 3] = [
    (Capability { bit: 39, name: "CAP_BPF" }, Some(SYS_ADMIN)),
    (Capability { bit: 38, name: "CAP_PERFMON" }, Some(SYS_ADMIN)),
    (Capability { bit: 19, name: "CAP_SYS_PTRACE" }, None),
];
const SYS_ADMIN: Capability = Capability { bit: 21, name: "CAP_SYS_ADMIN" };
/// Mapped files by their mapping (`/proc/PID/map_files`), unless CAP_SYS_ADMIN is there
/// (`checkpoint_restore_ns_capable`).
const CHECKPOINT_RESTORE: Capability = Capability { bit: 40, name: "CAP_CHECKPOINT_RESTORE" };
/// What files of other users allow only to them: the directories below /proc/PID, for which
/// CAP_DAC_READ_SEARCH is enough, and connecting to the diagnostics socket, for which it is not.
/// The daemon leaves that to a helper (`perfusion_dotnet::attach::helper`).
const DAC_OVERRIDE: Capability = Capability { bit: 1, name: "CAP_DAC_OVERRIDE" };
const DAC_READ_SEARCH: Capability = Capability { bit: 2, name: "CAP_DAC_READ_SEARCH" };
/// Addresses in `/proc/kallsyms` (`kallsyms_show_value`).
const SYSLOG: Capability = Capability { bit: 34, name: "CAP_SYSLOG" };
/// Limits above the hard one.
const SYS_RESOURCE: Capability = Capability { bit: 24, name: "CAP_SYS_RESOURCE" };
/// Without these less is recorded: see [`FeatureLimit`].
const WANTED: [Capability; 3] = [CHECKPOINT_RESTORE, DAC_OVERRIDE, SYSLOG];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Capability {
    bit: u32,
    name: &'static str,
}

/// What the kernel or this process lacks.
#[derive(Debug, thiserror::Error)]
pub enum FeatureError {
    /// Too old a kernel.
    #[error(
        "Linux {release}: expected at least {}.{}, found {release}; run on a newer kernel",
        NATIVE.oldest_kernel.0,
        NATIVE.oldest_kernel.1
    )]
    Old {
        /// `uname -r`.
        release: String,
    },
    /// Not root, and nothing given instead.
    #[error(
        "recording needs root or capabilities: running as uid {uid} without {missing}; run with \
         sudo, or grant the file \
         the capabilities (setcap {})",
        file_capabilities()
    )]
    NotRoot {
        /// Effective user id.
        uid: u32,
        /// What is missing.
        missing: MissingCapabilities,
    },
    /// Root, but without a capability (a container).
    #[error(
        "missing capability: expected {missing}, found CapEff {found:016x} in /proc/self/status; \
         add it to the container's or service's capabilities"
    )]
    Capability {
        /// What is missing.
        missing: MissingCapabilities,
        /// The effective set.
        found: u64,
    },
    /// No type information.
    #[error(
        "{}: expected the kernel's BTF, found {source}; use a kernel built with \
         CONFIG_DEBUG_INFO_BTF=y, or mount /sys",
        btf::PATH
    )]
    NoBtf {
        /// Why it cannot be read.
        source: io::Error,
    },
    /// Locked down.
    #[error(
        "{LOCKDOWN}: expected none or integrity, found confidentiality, in which eBPF may not read \
         memory; boot without lockdown=confidentiality"
    )]
    Lockdown,
    /// Another pid namespace.
    #[error(
        "/proc/self/ns/pid: expected the initial pid namespace {INITIAL_PID_NAMESPACE}, found \
         {found}; run with hostPID: true or --pid=host"
    )]
    PidNamespace {
        /// The link's text.
        found: String,
    },
    /// perf refused.
    #[error("perf_event_open: expected a descriptor, found {source} (kernel.perf_event_paranoid is \
         {paranoid}); {}", advice(.source, .paranoid))]
    Perf {
        /// What it answered.
        source: io::Error,
        /// The setting.
        paranoid: String,
    },
    /// A file that every Linux has.
    #[error("{path}: {source}; mount /proc")]
    Proc {
        /// The file.
        path: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn advice(error: &io::Error, paranoid: &str) -> &'static str {
    match error.kind() {
        // A patch of theirs, which knows no CAP_PERFMON ("Allow further restriction of
        // perf_event_open").
        io::ErrorKind::PermissionDenied if paranoid.parse().is_ok_and(|level: i32| level > 2) => {
            "above 2 the kernels of Debian and Ubuntu ask for CAP_SYS_ADMIN, whatever CAP_PERFMON \
             allows: set kernel.perf_event_paranoid to 2, or grant CAP_SYS_ADMIN (the chart's \
             sysAdmin: true; the deb's unit has it)"
        }
        io::ErrorKind::PermissionDenied => {
            "a seccomp profile, an LSM or perf_event_paranoid forbids it: allow the system call \
             (seccompProfile: Unconfined) and grant CAP_PERFMON"
        }
        _ => "the kernel must be built with CONFIG_PERF_EVENTS=y",
    }
}

/// Names of missing capabilities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingCapabilities(Vec<&'static str>);

impl Display for MissingCapabilities {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(", "))
    }
}

/// Whether it is a right that is lacking.
fn is_forbidden(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// The right that opening mapped files takes, where it is that which is lacking.
fn lacking(error: &io::Error) -> String {
    if is_forbidden(error) {
        format!("without {} (or {}) ", CHECKPOINT_RESTORE.name, SYS_ADMIN.name)
    } else {
        String::new()
    }
}

/// What a recording lacks, though there can be one.
#[derive(Debug, thiserror::Error)]
pub enum FeatureLimit {
    /// Mapped files cannot be opened.
    #[error(
        "/proc/PID/map_files: {}; {}stacks are guessed, and .NET has no names, allocations or live \
         objects{}",
        explain(source), lacking(source), if is_forbidden(source) { ": run as root" } else { "" }
    )]
    MappedFiles {
        /// The system's answer.
        source: io::Error,
    },
    /// Files of others.
    #[error(
        "without {} stacks of other users' processes are guessed, and .NET there has no names, \
         allocations or live objects",
        DAC_OVERRIDE.name
    )]
    OtherUsers,
    /// Their diagnostics sockets.
    #[error(
        "without {} nothing is loaded into .NET processes of other users: no names, allocations or \
         live objects there",
        DAC_OVERRIDE.name
    )]
    SocketsOfOthers,
    /// The kernel hides its addresses.
    #[error(
        "/proc/kallsyms: no addresses in it; without {} functions of the kernel have no names",
        SYSLOG.name
    )]
    KernelSymbols,
    /// No long files.
    #[error(
        "files may have {bytes} bytes at most (ulimit -f): functions of longer native files have \
         no names, and a longer profile is not \
         written; record with ulimit -f unlimited"
    )]
    FileLength {
        /// The limit.
        bytes: u64,
    },
    /// Little address space.
    #[error(
        "RLIMIT_AS: expected at least {ROOMY_ADDRESS_BYTES} bytes, found {bytes}: a recording that \
         finds no more ends with ENOMEM; allow more (ulimit -v unlimited, LimitAS=infinity)"
    )]
    AddressSpace {
        /// The limit.
        bytes: u64,
    },
    /// Maps count as locked memory here, and little of that is allowed.
    #[error(
        "RLIMIT_MEMLOCK: expected {MAP_BYTES} bytes or {}, found at most {bytes}: before Linux \
         {}.{} eBPF maps count against it, and if \
         they do not fit nothing is recorded; allow more (ulimit -l unlimited, \
         LimitMEMLOCK=infinity), or grant the capability",
        SYS_RESOURCE.name, UNLIMITED_MAPS.0, UNLIMITED_MAPS.1
    )]
    LockedMemory {
        /// The hard limit.
        bytes: u64,
    },
    /// A kernel without `bpf_loop`.
    #[error(
        "Linux {release}: expected at least {}.{}, on which stacks are walked where they are; here \
         they are copied, which costs more, and of \
         those longer than --stack-kib (recording.stack_copy) the outer frames are missing, under \
         [truncated: stack copy ended]", WALKS.0, WALKS.1
    )]
    Walks {
        /// `uname -r`.
        release: String,
    },
    /// Nobody counts the probes' run time.
    #[error(
        "the probes' CPU time is not known, so limits.cpu and the metrics of `perfusion daemon` \
         are about the daemon alone: {PROBES_COUNTED}; \
         `sysctl kernel.bpf_stats_enabled=1` on the host, or grant the capability"
    )]
    ProbesTime,
    /// A kernel without sleepable iterators.
    #[error(
        "Linux {release}: expected at least {}.{}, which can read the memory of sleeping threads; \
         those that sleep from before the \
         recording on have their time, but no stack, and `perfusion dump` cannot run",
        OFF_CPU_SCANS.0,
        OFF_CPU_SCANS.1
    )]
    OffCpuScans {
        /// `uname -r`.
        release: String,
    },
}

/// What `setcap` needs to be told for a complete recording by whoever may execute the file.
fn file_capabilities() -> String {
    let names: Vec<String> = NEEDED
        .iter()
        .map(|(capability, _)| capability)
        .chain(&WANTED)
        .chain(maps_are_locked_memory().then_some(&SYS_RESOURCE))
        .map(|capability| capability.name.to_lowercase())
        .collect();
    format!("{}=ep", names.join(","))
}

/// A check: its name, and what is missing if it fails.
pub type FeatureCheck = (&'static str, Result<(), FeatureError>);

/// Everything that recording needs, each tried.
pub fn checks() -> [FeatureCheck; 6] {
    [
        ("kernel release", release()),
        ("capabilities", capabilities()),
        ("BTF", type_information()),
        ("lockdown", lockdown()),
        ("pid namespace", pid_namespace()),
        ("perf events", perf_events()),
    ]
}

/// What makes a recording complete, each tried where that can be done without touching another
/// process. `has_helper`: another process of this program connects to the sockets of other users.
pub fn limits(has_helper: bool) -> [(&'static str, Result<(), FeatureLimit>); 8] {
    [
        ("mapped files", mapped_files()),
        ("other users", other_users(has_helper)),
        ("kernel symbols", kernel_symbols()),
        ("locked memory", locked_memory()),
        ("walks in the kernel", walks()),
        ("sleeping threads", off_cpu_scans()),
        ("length of files", file_length()),
        ("address space", address_space()),
    ]
}

/// Everything that is missing; empty when recording can start.
#[must_use]
pub fn problems() -> Vec<FeatureError> {
    checks().into_iter().filter_map(|(_, result)| result.err()).collect()
}

/// The first thing that is missing.
///
/// # Errors
/// When something is.
pub fn check() -> Result<(), FeatureError> {
    release()?;
    capabilities()?;
    type_information()?;
    lockdown()?;
    pid_namespace()?;
    perf_events()
}

fn release() -> Result<(), FeatureError> {
    older_than(NATIVE.oldest_kernel).map_or(Ok(()), |release| Err(FeatureError::Old { release }))
}

fn walks() -> Result<(), FeatureLimit> {
    older_than(WALKS).map_or(Ok(()), |release| Err(FeatureLimit::Walks { release }))
}

fn off_cpu_scans() -> Result<(), FeatureLimit> {
    without_scans().map_or(Ok(()), |release| Err(FeatureLimit::OffCpuScans { release }))
}

/// Whether it can be known what the probes take, which only the daemon asks.
///
/// # Errors
/// [`FeatureLimit::ProbesTime`].
pub fn probes_time() -> Result<(), FeatureLimit> {
    // A /proc that cannot be read has been reported by then.
    let may_ask = effective().map_or(true, |set| has(set, SYS_ADMIN));
    let counts = fs::read_to_string(BPF_STATS).is_ok_and(|text| text.trim() == "1");
    if may_ask || counts { Ok(()) } else { Err(FeatureLimit::ProbesTime) }
}

/// The kernel's release, when it is too old to show sleeping threads.
#[must_use]
pub(crate) fn without_scans() -> Option<String> {
    older_than(OFF_CPU_SCANS)
}

/// The kernel's release, when it is older than that. One that cannot be read is not held against
/// the kernel.
fn older_than(needed: (u32, u32)) -> Option<String> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    version(&release).is_some_and(|found| found < needed).then_some(release)
}

fn maps_are_locked_memory() -> bool {
    older_than(UNLIMITED_MAPS).is_some()
}

/// Allows this process as much locked memory as it may have, where maps need it. (aya does so when
/// a map is refused, but what it tries of the kernel before that would be refused for want of it,
/// and taken for unknown.)
pub(crate) fn raise_locked_memory() {
    if maps_are_locked_memory() {
        let raised =
            rustix::process::setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None });
        if raised.is_err() {
            let limit = rustix::process::getrlimit(Resource::Memlock);
            // Refused means that a map is refused too, which is told.
            rustix::process::setrlimit(
                Resource::Memlock,
                Rlimit { current: limit.maximum, ..limit },
            )
            .ok();
        }
    }
}

fn locked_memory() -> Result<(), FeatureLimit> {
    // A /proc that cannot be read has been reported by then.
    if !maps_are_locked_memory() || effective().map_or(true, |set| has(set, SYS_RESOURCE)) {
        return Ok(());
    }
    match rustix::process::getrlimit(Resource::Memlock).maximum {
        Some(bytes) if bytes < MAP_BYTES => Err(FeatureLimit::LockedMemory { bytes }),
        _ => Ok(()),
    }
}

fn file_length() -> Result<(), FeatureLimit> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(bytes) if bytes < ROOMY_FILE_BYTES => Err(FeatureLimit::FileLength { bytes }),
        _ => Ok(()),
    }
}

fn address_space() -> Result<(), FeatureLimit> {
    match rustix::process::getrlimit(Resource::As).current {
        Some(bytes) if bytes < ROOMY_ADDRESS_BYTES => Err(FeatureLimit::AddressSpace { bytes }),
        _ => Ok(()),
    }
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|letter: char| !letter.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn effective() -> Result<u64, FeatureError> {
    const PATH: &str = "/proc/self/status";
    let failed = |source| FeatureError::Proc { path: PATH, source };
    let status = fs::read_to_string(PATH).map_err(failed)?;
    let found = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let found = found.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    found.ok_or_else(|| failed(io::Error::other("no CapEff line")))
}

fn has(set: u64, capability: Capability) -> bool {
    set & (1 << capability.bit) != 0
}

fn capabilities() -> Result<(), FeatureError> {
    let found = effective()?;
    let missing = missing(found);
    let uid = rustix::process::geteuid().as_raw();
    match (missing.0.is_empty(), uid) {
        (true, _) => Ok(()),
        (false, 0) => Err(FeatureError::Capability { missing, found }),
        (false, _) => Err(FeatureError::NotRoot { uid, missing }),
    }
}

fn missing(set: u64) -> MissingCapabilities {
    let has = |capability: Capability| has(set, capability);
    let lacks = |(needed, stronger): &(Capability, Option<Capability>)| {
        !has(*needed) && !stronger.is_some_and(has)
    };
    MissingCapabilities(
        NEEDED.iter().filter(|pair| lacks(pair)).map(|(needed, _)| needed.name).collect(),
    )
}

/// Opens a file of this process by its mapping, as mapped files of others and the shims' regions
/// are opened.
///
/// # Errors
/// [`FeatureLimit::MappedFiles`].
pub fn mapped_files() -> Result<(), FeatureLimit> {
    let me = ProcessHandle::open(std::process::id())
        .map_err(|error| FeatureLimit::MappedFiles { source: error.into() })?;
    let mut mapped = None;
    let listed = me.maps(|line| {
        mapped = (line.inode != 0).then(|| format!("map_files/{:x}-{:x}", line.start, line.end));
        mapped.is_none()
    });
    let opened = listed.and_then(|()| match &mapped {
        Some(name) => {
            openat(me.directory(), name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map(drop)
        }
        None => Ok(()),
    });
    opened.map_err(|error| FeatureLimit::MappedFiles { source: error.into() })
}

fn other_users(has_helper: bool) -> Result<(), FeatureLimit> {
    // A /proc that cannot be read has been reported by then.
    let Ok(set) = effective() else { return Ok(()) };
    match (has(set, DAC_OVERRIDE), has(set, DAC_READ_SEARCH)) {
        (true, _) => Ok(()),
        (false, true) if has_helper => Ok(()),
        (false, true) => Err(FeatureLimit::SocketsOfOthers),
        (false, false) => Err(FeatureLimit::OtherUsers),
    }
}

fn kernel_symbols() -> Result<(), FeatureLimit> {
    let Ok(file) = fs::File::open("/proc/kallsyms") else {
        return Err(FeatureLimit::KernelSymbols);
    };
    // Some symbols of per-CPU data are at address 0 for everybody; hidden ones are all there. The
    // first ones are functions.
    let lines = BufReader::new(file).lines().map_while(Result::ok).take(100);
    let shown = |line: String| {
        line.split(' ').next().is_some_and(|address| address.bytes().any(|b| b != b'0'))
    };
    if lines.into_iter().any(shown) { Ok(()) } else { Err(FeatureLimit::KernelSymbols) }
}

fn type_information() -> Result<(), FeatureError> {
    fs::File::open(Path::new(btf::PATH)).map(drop).map_err(|source| FeatureError::NoBtf { source })
}

fn lockdown() -> Result<(), FeatureError> {
    // Without securityfs nothing can be said; loading will tell.
    let text = fs::read_to_string(LOCKDOWN).unwrap_or_default();
    if text.contains("[confidentiality]") { Err(FeatureError::Lockdown) } else { Ok(()) }
}

fn pid_namespace() -> Result<(), FeatureError> {
    const PATH: &str = "/proc/self/ns/pid";
    let link = fs::read_link(PATH).map_err(|source| FeatureError::Proc { path: PATH, source })?;
    let found = link.to_string_lossy();
    if found == INITIAL_PID_NAMESPACE {
        Ok(())
    } else {
        Err(FeatureError::PidNamespace { found: found.into_owned() })
    }
}

fn perf_events() -> Result<(), FeatureError> {
    let allowed_cpus = rustix::thread::sched_getcpu();
    let cpu = u32::try_from(allowed_cpus).unwrap_or(0);
    perf::permitted(cpu).map_err(|source| FeatureError::Perf {
        source,
        paranoid: fs::read_to_string("/proc/sys/kernel/perf_event_paranoid")
            .map_or_else(|_| "unreadable".to_owned(), |text| text.trim().to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::{FeatureError, FeatureLimit, advice, missing, version};
    use rustix::io::Errno;
    use std::io;

    #[test]
    fn releases_are_read() {
        assert_eq!(version("6.18.44-fc"), Some((6, 18)));
        assert_eq!(version("5.4"), Some((5, 4)));
        assert!(version("5.9.16") < Some(super::NATIVE.oldest_kernel));
        assert_eq!(version("mystery"), None);
    }

    #[test]
    fn missing_capabilities_are_named() {
        assert_eq!(missing(u64::MAX).0, Vec::<&str>::new());
        assert_eq!(
            missing(1 << 21 | 1 << 19).0,
            Vec::<&str>::new(),
            "CAP_SYS_ADMIN includes the newer two"
        );
        assert_eq!(missing(1 << 38 | 1 << 19).to_string(), "CAP_BPF");
        assert_eq!(missing(0).to_string(), "CAP_BPF, CAP_PERFMON, CAP_SYS_PTRACE");
    }

    #[test]
    fn each_message_says_what_to_do() {
        let error = FeatureError::NotRoot { uid: 1000, missing: missing(0) };
        assert!(error.to_string().contains("sudo"), "{error}");
        let setcap = "cap_bpf,cap_perfmon,cap_sys_ptrace,cap_checkpoint_restore,\
                      cap_dac_override,cap_syslog=ep";
        assert!(error.to_string().contains(&format!("(setcap {setcap})")), "{error}");
        assert!(FeatureLimit::OtherUsers.to_string().contains("CAP_DAC_OVERRIDE"));
        assert!(
            FeatureLimit::ProbesTime.to_string().contains("`sysctl kernel.bpf_stats_enabled=1`")
        );
        let mapped = |errno: Errno| FeatureLimit::MappedFiles { source: errno.into() }.to_string();
        let refused = mapped(Errno::PERM);
        assert!(refused.contains("without CAP_CHECKPOINT_RESTORE (or CAP_SYS_ADMIN) stacks"));
        assert!(refused.ends_with(": run as root"), "{refused}");
        let few_files = mapped(Errno::MFILE);
        assert!(few_files.contains("RLIMIT_NOFILE is ") && !few_files.contains("CAP_"));
        assert!(!few_files.contains("root"), "{few_files}");
        let refused = io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(
            advice(&refused, "2").contains("seccomp")
                && advice(&refused, "unreadable").contains("seccomp")
        );
        assert!(advice(&refused, "4").contains("CAP_SYS_ADMIN"));
    }
}
