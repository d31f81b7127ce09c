//! What a process is, what profiling it allows, and why not more: the one place that decides it,
//! for `attach` and for `ps`.

use super::ipc::{self, RuntimeInfo};
use crate::data_descriptor::{ProcessMemoryFile, RuntimeMemory as _, runtime_base};
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::{MapLine, ProcessHandle};
use profiler_protocol::layout::Geometry;
use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::io::Errno;
use serde::Serialize;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// The variable by which a process opts out of being attached to.
pub const OPT_OUT: &str = "PERFUSION_ATTACH";

/// What runs the process's code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DetectedRuntime {
    /// CoreCLR as a shared library.
    CoreClr {
        /// Version, when the path of the library or the runtime itself tells it; several when
        /// several are loaded.
        versions: Vec<String>,
    },
    /// CoreCLR linked into the executable (single-file program).
    SingleFile {
        /// Version, when the runtime tells it.
        versions: Vec<String>,
    },
    /// Compiled ahead of time: there is no profiling interface.
    NativeAot,
    /// Anything else.
    Native,
    /// It cannot be looked at.
    Unseen,
}

impl fmt::Display for DetectedRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, versions) = match self {
            Self::CoreClr { versions } => (".NET", versions.as_slice()),
            Self::SingleFile { versions } => (".NET single-file", versions.as_slice()),
            Self::NativeAot => (".NET NativeAOT", [].as_slice()),
            Self::Native => ("native", [].as_slice()),
            Self::Unseen => ("?", [].as_slice()),
        };
        f.write_str(name)?;
        for (index, version) in versions.iter().enumerate() {
            write!(f, "{}{version}", if index == 0 { " " } else { ", " })?;
        }
        Ok(())
    }
}

/// Why the shim cannot be brought into a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum AttachObstacle {
    /// It has no CLR.
    #[error("no .NET runtime in it")]
    NotDotnet,
    /// NativeAOT.
    #[error("NativeAOT has no profiling interface; it is profiled as native code")]
    NativeAot,
    /// Not our architecture.
    #[error(
        "a {0} process: of its stacks only the part in the kernel is known, and the shim is for \
         64-bit x86"
    )]
    Architecture(String),
    /// Switched off in its environment.
    #[error(
        "started with {0}=0, which lets nobody load the library: without allocations and \
         live objects, unless it is started without that variable"
    )]
    DiagnosticsOff(String),
    /// It asks in its environment not to be touched.
    #[error("it opted out with {OPT_OUT}=off")]
    OptedOut,
    /// The runtime is there, its socket is not.
    #[error("no diagnostics socket: {0}")]
    NoSocket(String),
    /// The same, as its environment says.
    #[error(
        "started with {0}=0, so it has no diagnostics socket at which it could be asked: start it \
         without that variable"
    )]
    SocketOff(String),
    /// Whether its socket is there cannot be seen, for this reason.
    #[error("whether it has a diagnostics socket cannot be seen: {0}")]
    SocketUnseen(String),
    /// It may not make a file as long as the library's region.
    #[error(
        "it may make no file of more than {0} bytes (`ulimit -f`), and the library needs one of \
         {REGION_BYTES} in memory: start it with a larger limit"
    )]
    FileLimit(u64),
    /// Older than .NET 6.
    #[error(".NET {0} is older than 6, the first with notification profilers")]
    TooOld(String),
    /// We may not look.
    #[error(
        "not permitted to look at it: that takes root with CAP_SYS_PTRACE in its user namespace"
    )]
    NotPermitted,
}

/// Bytes of the memory that the library shares.
const REGION_BYTES: u64 = Geometry::DEFAULT.region_bytes();

/// A process as far as attaching is concerned.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// What runs its code.
    pub runtime: DetectedRuntime,
    /// True when a shim's region is mapped already.
    pub shim_loaded: bool,
    /// Why a shim cannot be attached; `None` when it can, as far as can be seen from outside.
    pub why_not: Option<AttachObstacle>,
}

/// True when it says in its environment that it is not to be attached to.
///
/// # Errors
/// When its environment cannot be read now: it has not said that it may be touched then, nor that
/// it may not.
pub fn opted_out(target: &ProcessHandle) -> Result<bool, Errno> {
    Ok(target.environment(OPT_OUT)?.is_some_and(|value| value.eq_ignore_ascii_case("off")))
}

/// Looks at `target` from outside. When `ask` is given, a runtime whose version cannot be seen is
/// asked for it over its diagnostics socket, with that timeout.
///
/// # Errors
/// When the process is gone.
pub fn inspect(target: &ProcessHandle, ask: Option<Duration>) -> Result<Inspection, Errno> {
    let mut clr_paths: Vec<String> = Vec::new();
    let mut shim_loaded = false;
    let look = |line: MapLine| {
        let name = line.name.strip_suffix(" (deleted)").unwrap_or(&line.name);
        if name.ends_with("/libcoreclr.so")
            && clr_paths.len() < 8
            && !clr_paths.iter().any(|p| p == name)
        {
            clr_paths.push(name.to_owned());
        }
        shim_loaded |= perfusion_sources::shim::finder::is_region_name(&line.name);
        true
    };
    match target.maps(look) {
        Ok(()) => {}
        Err(Errno::ACCESS | Errno::PERM) => {
            let why_not = Some(AttachObstacle::NotPermitted);
            return Ok(Inspection {
                runtime: DetectedRuntime::Unseen,
                shim_loaded: false,
                why_not,
            });
        }
        Err(error) => return Err(error),
    }
    let socket = ipc::has_socket(target);
    let has_socket = matches!(socket, Ok(true));
    let mut versions: Vec<String> =
        clr_paths.iter().filter_map(|path| version_in_path(path)).collect();
    if versions.is_empty()
        && has_socket
        && let Some(timeout) = ask
        && let Ok(RuntimeInfo { runtime_version, .. }) = ipc::process_info(target, timeout)
    {
        versions.push(runtime_version);
    }
    let executable = Executable::of(target);
    let runtime = match (clr_paths.is_empty(), has_socket) {
        (false, _) => DetectedRuntime::CoreClr { versions },
        (true, _) if executable.native_aot => DetectedRuntime::NativeAot,
        (true, true) => DetectedRuntime::SingleFile { versions },
        (true, false) if has_runtime_thread(target) && has_runtime_inside(target) => {
            DetectedRuntime::SingleFile { versions }
        }
        (true, false) => DetectedRuntime::Native,
    };
    let why_not = why_not(target, &runtime, &executable, socket);
    Ok(Inspection { runtime, shim_loaded, why_not })
}

fn why_not(
    target: &ProcessHandle,
    runtime: &DetectedRuntime,
    executable: &Executable,
    socket: Result<bool, String>,
) -> Option<AttachObstacle> {
    if let Some(other) = &executable.foreign {
        return Some(AttachObstacle::Architecture(other.clone()));
    }
    let versions = match runtime {
        DetectedRuntime::NativeAot => return Some(AttachObstacle::NativeAot),
        DetectedRuntime::Native => return Some(AttachObstacle::NotDotnet),
        DetectedRuntime::Unseen => return Some(AttachObstacle::NotPermitted),
        DetectedRuntime::CoreClr { versions } | DetectedRuntime::SingleFile { versions } => {
            versions
        }
    };
    if let Some(variable) = diagnostics_off(target) {
        return Some(AttachObstacle::DiagnosticsOff(variable));
    }
    if matches!(opted_out(target), Ok(true)) {
        return Some(AttachObstacle::OptedOut);
    }
    match socket {
        Ok(true) => {}
        Ok(false) => return Some(AttachObstacle::NoSocket(super::no_socket::reason(target))),
        Err(error) => return Some(AttachObstacle::SocketUnseen(error)),
    }
    let major = |version: &String| version.split('.').next()?.parse::<u32>().ok();
    if let Some(old) = versions.iter().find(|version| major(version).is_some_and(|m| m < 6)) {
        return Some(AttachObstacle::TooOld(old.clone()));
    }
    target.file_limit().ok()?.filter(|limit| *limit < REGION_BYTES).map(AttachObstacle::FileLimit)
}

/// The environment variable that keeps profilers out of the process, if there is one.
fn diagnostics_off(target: &ProcessHandle) -> Option<String> {
    ["DOTNET", "COMPlus"].into_iter().find_map(|prefix| {
        ["EnableDiagnostics", "EnableDiagnostics_IPC", "EnableDiagnostics_Profiler"]
            .into_iter()
            .find_map(|knob| {
                let variable = format!("{prefix}_{knob}");
                let value = target.environment(&variable).ok()??;
                // The runtime reads these as hexadecimal numbers (clrconfignative).
                (u64::from_str_radix(value.trim(), 16) == Ok(0)).then_some(variable)
            })
    })
}

/// `9.0.5` of `/usr/share/dotnet/shared/Microsoft.NETCore.App/9.0.5/libcoreclr.so`.
fn version_in_path(path: &str) -> Option<String> {
    let version = path.rsplit('/').nth(1)?;
    let mut parts = version.split(['.', '-']);
    let numbers = parts.by_ref().take(3).filter(|part| part.parse::<u32>().is_ok()).count();
    (numbers == 3).then(|| perfusion_model::text::printable(version))
}

/// What the process's executable file tells.
#[derive(Default)]
struct Executable {
    /// Name of its architecture when it is not ours.
    foreign: Option<String>,
    native_aot: bool,
}

impl Executable {
    fn of(target: &ProcessHandle) -> Self {
        let Ok(mut file) = target.file(&target.in_common("exe")) else { return Self::default() };
        let mut start = [0; 64];
        if file.read_exact(&mut start).is_err() || !start.starts_with(b"\x7fELF") {
            return Self::default();
        }
        // e_ident[EI_CLASS] 1 is 32-bit; e_machine at 18 (ELF specification, figure 1-3).
        let machine = u16::from_le_bytes([start[18], start[19]]);
        let foreign = match (start[4], machine) {
            (2, 62) => None,
            (1, _) => Some("32-bit".to_owned()),
            (_, 183) => Some("64-bit ARM".to_owned()),
            (_, other) => Some(format!("foreign (ELF machine {other})")),
        };
        if foreign.is_some() {
            return Self { foreign, native_aot: false };
        }
        Self { foreign: None, native_aot: has_section(&file, &start, b"__managedcode") }
    }
}

/// True when the ELF file (64-bit, little-endian, its first 64 bytes are `header`) has a section of
/// this name. The file is the process's to forge: at most 256 section headers and 64 KiB of names
/// are read.
fn has_section(file: &File, header: &[u8; 64], name: &[u8]) -> bool {
    let u16_at =
        |bytes: &[u8], at: usize| bytes.get(at..)?.first_chunk().copied().map(u16::from_le_bytes);
    let u32_at =
        |bytes: &[u8], at: usize| bytes.get(at..)?.first_chunk().copied().map(u32::from_le_bytes);
    let u64_at =
        |bytes: &[u8], at: usize| bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes);
    let read = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        let read = file.read_at(&mut bytes, offset).ok()?;
        bytes.truncate(read);
        Some(bytes)
    };
    // Offsets of e_shoff, e_shnum, e_shstrndx, and of sh_name, sh_offset, sh_size in entries of 64
    // bytes (ELF-64, figures 2 and 8).
    let look = || {
        let entries = usize::from(u16_at(header, 60)?).min(256);
        let table = read(u64_at(header, 40)?, entries * 64)?;
        let names = table.chunks_exact(64).nth(usize::from(u16_at(header, 62)?))?;
        let size = usize::try_from(u64_at(names, 32)?).ok()?.min(1 << 16);
        let names = read(u64_at(names, 24)?, size)?;
        Some(table.chunks_exact(64).any(|section| {
            let at = u32_at(section, 0).and_then(|at| usize::try_from(at).ok());
            at.and_then(|at| names.get(at..)?.split(|&b| b == 0).next()) == Some(name)
        }))
    };
    look().unwrap_or(false)
}

/// True when the program exports what debuggers of a runtime look for: any program may name its
/// threads as it likes. True as well where its memory cannot be read.
fn has_runtime_inside(target: &ProcessHandle) -> bool {
    let (Some(base), Ok(memory)) = (runtime_base(target), target.file("mem")) else { return true };
    let look = move || {
        let memory = ProcessMemoryFile(memory);
        memory.word(base).is_none()
            || memory.descriptor(base).is_some()
            || memory.exported(base, "g_dacTable").is_some()
    };
    wait_for(IoPeer::Process(target.pid()), look).unwrap_or(true)
}

/// True when a thread has one of the names the runtime gives to its own (".NET Finalizer", ".NET
/// SigHandler", …).
fn has_runtime_thread(target: &ProcessHandle) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(tasks) = openat(target.directory(), "task", flags, Mode::empty()) else { return false };
    let Ok(entries) = Dir::read_from(&tasks) else { return false };
    entries.take(64).map_while(Result::ok).any(|entry| {
        let Ok(tid) = entry.file_name().to_str().map(str::to_owned) else { return false };
        let mut start = [0; 5];
        let read = target.file(&format!("task/{tid}/comm")).map(|mut file| file.read(&mut start));
        matches!(read, Ok(Ok(5))) && &start == b".NET "
    })
}

#[cfg(test)]
mod tests {
    use super::OPT_OUT;
    use super::{AttachObstacle, DetectedRuntime, has_runtime_thread, inspect};
    use super::{opted_out, version_in_path};
    use perfusion_host::process::handle::ProcessHandle;
    use std::io::Read as _;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn the_version_is_the_folder_of_the_library() {
        let version = |path| version_in_path(path);
        assert_eq!(
            version("/usr/share/dotnet/shared/Microsoft.NETCore.App/9.0.5/libcoreclr.so"),
            Some("9.0.5".into())
        );
        assert_eq!(version("/d/11.0.0-preview.4/libcoreclr.so"), Some("11.0.0-preview.4".into()));
        assert_eq!(version("/app/libcoreclr.so"), None);
        assert_eq!(version("libcoreclr.so"), None);
    }

    #[test]
    fn a_thread_named_like_a_runtimes_makes_no_runtime() {
        let mut shell = Command::new("sh")
            .args(["-c", "printf '.NET Finalizer' > /proc/$$/comm; echo; read -r word"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0];
        shell.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        let target = ProcessHandle::open(shell.id()).unwrap();
        let (is_named, found) = (has_runtime_thread(&target), inspect(&target, None));
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert!(is_named && matches!(found.unwrap().runtime, DetectedRuntime::Native));
    }

    #[test]
    fn who_opts_out_is_told_from_who_cannot_be_asked() {
        for (value, expected) in [("off", true), ("OFF", true), ("on", false)] {
            let mut sleeper = Command::new("sleep").arg("600").env(OPT_OUT, value).spawn().unwrap();
            let target = ProcessHandle::open(sleeper.id()).unwrap();
            // Spawned means that it has its new memory; the kernel notes a little later where the
            // environment lies there.
            let deadline = Instant::now() + Duration::from_secs(10);
            while target.environment(OPT_OUT) == Ok(None) && Instant::now() < deadline {
                std::thread::yield_now();
            }
            let before = opted_out(&target);
            sleeper.kill().unwrap();
            sleeper.wait().unwrap();
            assert_eq!(before, Ok(expected), "{value}");
            assert!(opted_out(&target).is_err(), "it has gone");
        }
    }

    #[test]
    fn a_native_process_is_told_so() {
        // Not the process of the tests: others of them have sockets and threads like a runtime's.
        let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        let found = inspect(&ProcessHandle::open(sleeper.id()).unwrap(), None);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        let found = found.unwrap();
        assert_eq!(found.runtime, DetectedRuntime::Native);
        assert_eq!(found.why_not, Some(AttachObstacle::NotDotnet));
        assert!(!found.shim_loaded);
    }
}
