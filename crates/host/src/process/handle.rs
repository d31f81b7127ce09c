//! One process as `/proc` shows it, held by a descriptor of its `/proc/PID` directory, so that
//! every later read is of this very process even when its pid is given to another one. Everything
//! read here can be written by the process: bounded, never believed.

use crate::process::guarded_io::{ForeignFile, ForeignReader, IoPeer, wait_for};
use crate::process::mapping::{MapsFields, parse_fields};
use perfusion_model::text::printable;
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

/// Most bytes read of one `/proc` text file. A process can point its environment at any of its
/// memory (PR_SET_MM).
const TEXT_BYTES: u64 = 1 << 20;
/// Most bytes of an environment: all that an exec may be given, arguments included, is three
/// quarters of the default size of a stack (fs/exec.c, `bprm_stack_limits`).
const ENVIRONMENT_BYTES: u64 = 6 << 20;
/// Most bytes of one line of `maps`: a path of PATH_MAX with every byte escaped as `\ooo`, and the
/// numbers.
const MAPS_LINE_BYTES: u64 = 4 * 4096 + 128;
/// Most lines of `maps` looked at; the kernel's default limit (vm.max_map_count) is 65,530.
const MAPS_LINES: usize = 262_144;

/// A process that was there when [`ProcessHandle::open`] was called.
#[derive(Debug)]
pub struct ProcessHandle {
    pid: u32,
    directory: OwnedFd,
}

/// One line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapLine {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device, major and minor.
    pub device: (u32, u32),
    /// Inode, 0 for anonymous memory.
    pub inode: u64,
    /// True when the mapping can be executed.
    pub executable: bool,
    /// The name as the kernel prints it, escapes and ` (deleted)` included.
    pub name: String,
}

impl ProcessHandle {
    /// Takes hold of the process with this pid in the initial namespace.
    ///
    /// # Errors
    /// `NOENT` when there is none.
    pub fn open(pid: u32) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { pid, directory: openat(CWD, format!("/proc/{pid}"), flags, Mode::empty())? })
    }

    /// Its pid in the initial namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True while the process exists and is no zombie (a zombie has no memory left to profile).
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.lives("stat") || self.survivor().is_some()
    }

    /// Whether the thread that `stat` is of has not ended. An error other than those of a process
    /// that is gone (EMFILE) does not say that it has.
    fn lives(&self, stat: &str) -> bool {
        match self.field(stat, 3) {
            Ok(state) => !matches!(state.as_str(), "Z" | "X" | "x"),
            Err(error) => !matches!(error, Errno::NOENT | Errno::SRCH),
        }
    }

    /// A thread that has not ended; asked once the first one has.
    fn survivor(&self) -> Option<String> {
        let found = self.tids()?.find(|tid| self.lives(&format!("task/{tid}/stat")))?;
        Some(found.to_string())
    }

    fn tids(&self) -> Option<impl Iterator<Item = u32>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let tasks = openat(&self.directory, "task", flags, Mode::empty()).ok()?;
        let tids = Dir::read_from(&tasks).ok()?;
        Some(tids.filter_map(|entry| entry.ok()?.file_name().to_str().ok()?.parse().ok()))
    }

    /// Threads with this name, among the first so many, and how often each has gone to sleep.
    #[must_use]
    pub fn threads_called(&self, name: &str, among: usize) -> Vec<(u32, u64)> {
        let is_called = |tid: &u32| {
            self.text(&format!("task/{tid}/comm"))
                .is_ok_and(|comm| comm.trim_end_matches('\n') == name)
        };
        let sleeps = |tid: u32| {
            let sleeps =
                self.status_field(&format!("task/{tid}/status"), "voluntary_ctxt_switches").ok()?;
            Some((tid, sleeps.parse().ok()?))
        };
        self.tids().into_iter().flatten().take(among).filter(is_called).filter_map(sleeps).collect()
    }

    /// Where a file is that shows what all threads have in common while they live: memory, program,
    /// root. A first thread that has ended before the others (`pthread_exit` in `main`) has none of
    /// it any more.
    #[must_use]
    pub fn in_common(&self, name: &str) -> String {
        let survivor = if self.lives("stat") { None } else { self.survivor() };
        survivor.map_or_else(|| name.to_owned(), |tid| format!("task/{tid}/{name}"))
    }

    /// A file below `/proc/PID`, for reading.
    ///
    /// # Errors
    /// `SRCH` or `NOENT` when the process is gone, `ACCESS` when it is not ours to look at.
    pub fn file(&self, name: &str) -> Result<File, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(File::from(openat(&self.directory, name, flags, Mode::empty())?))
    }

    /// The directory itself.
    #[must_use]
    pub fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    /// The same, for what the kernel reads from the process's memory or under the lock of its
    /// address space (`maps`, `environ`, `cmdline`): the process can hold that up.
    fn reader(&self, name: &str) -> Result<ForeignReader, Errno> {
        Ok(ForeignFile::of_process(self.file(&self.in_common(name))?, self.pid).reader())
    }

    /// At most so many bytes of one of these.
    fn memory(&self, name: &str, most: u64) -> Result<Vec<u8>, Errno> {
        let mut bytes = Vec::new();
        self.reader(name)?.take(most).read_to_end(&mut bytes).map_err(|error| errno(&error))?;
        Ok(bytes)
    }

    /// What the kernel knows without asking the process: `stat`, `status`, `comm`, `cgroup`,
    /// `uid_map`, `limits`.
    fn text(&self, name: &str) -> Result<String, Errno> {
        let mut bytes = Vec::new();
        self.file(name)?.take(TEXT_BYTES).read_to_end(&mut bytes).map_err(|error| errno(&error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Command name (`comm`), control characters removed.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn comm(&self) -> Result<String, Errno> {
        Ok(printable(self.text("comm")?.trim_end_matches('\n')))
    }

    /// Field `number` of `stat`, counted from 1 as in proc_pid_stat(5), for fields after the
    /// command name.
    fn stat_field(&self, number: usize) -> Result<String, Errno> {
        self.field("stat", number)
    }

    /// The same of a thread's `stat`.
    fn field(&self, stat: &str, number: usize) -> Result<String, Errno> {
        let stat = self.text(stat)?;
        // The name (field 2) may hold spaces and parentheses; the last one closes it.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        rest.split_ascii_whitespace()
            .nth(number.saturating_sub(3))
            .map(str::to_owned)
            .ok_or(Errno::IO)
    }

    /// Its command line, arguments joined by spaces: at most so many bytes of it, as text fit to be
    /// printed.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn command_line(&self, most: u64) -> Result<String, Errno> {
        let bytes = self.memory("cmdline", most)?;
        let arguments = bytes.split(|&byte| byte == 0).map(String::from_utf8_lossy);
        Ok(printable(arguments.collect::<Vec<_>>().join(" ").trim_end()))
    }

    /// When it started, in clock ticks since boot (field 22 of `stat`).
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn start_ticks(&self) -> Result<u64, Errno> {
        self.stat_field(22)?.parse().map_err(|_| Errno::IO)
    }

    /// True for a thread of the kernel (`PF_KTHREAD`, linux/sched.h, in field 9 of `stat`).
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.stat_field(9)
            .ok()
            .and_then(|flags| flags.parse::<u32>().ok())
            .is_some_and(|f| f & 0x0020_0000 != 0)
    }

    /// True when it reads the same start times of processes as we do. False when that cannot be
    /// told.
    #[must_use]
    pub fn shares_our_time_namespace(&self) -> bool {
        let theirs =
            rustix::fs::readlinkat(self.directory(), self.in_common("ns/time"), Vec::new());
        let ours = rustix::fs::readlink("/proc/self/ns/time", Vec::new());
        matches!((theirs, ours), (Ok(theirs), Ok(ours)) if theirs == ours)
    }

    /// True when it lives in a pid namespace below the initial one.
    #[must_use]
    pub fn is_in_pid_namespace(&self) -> bool {
        self.status_field("status", "NSpid")
            .is_ok_and(|ids| ids.split_ascii_whitespace().nth(1).is_some())
    }

    /// What the process itself calls its thread `tid`.
    #[must_use]
    pub fn namespace_tid(&self, tid: u32) -> Option<u32> {
        let ids = self.status_field(&format!("task/{tid}/status"), "NSpid").ok()?;
        ids.split_ascii_whitespace().next_back()?.parse().ok()
    }

    fn status_field(&self, file: &str, name: &str) -> Result<String, Errno> {
        let status = self.text(file)?;
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.map(|value| value.trim().to_owned()).ok_or(Errno::NOENT)
    }

    /// Whether a filter decides on its system calls (`SECCOMP_MODE_FILTER`, linux/seccomp.h).
    #[must_use]
    pub fn has_seccomp_filter(&self) -> bool {
        self.status_field("status", "Seccomp").is_ok_and(|mode| mode == "2")
    }

    /// Its pid as it sees itself: the last number of `NSpid`.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn namespace_pid(&self) -> Result<u32, Errno> {
        let ids = self.status_field("status", "NSpid")?;
        ids.split_ascii_whitespace().next_back().and_then(|id| id.parse().ok()).ok_or(Errno::IO)
    }

    /// User and group with which it makes files: the last numbers of `Uid` and `Gid`.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn file_owner(&self) -> Result<(u32, u32), Errno> {
        let last = |name| {
            let ids = self.status_field("status", name)?;
            ids.split_ascii_whitespace().next_back().and_then(|id| id.parse().ok()).ok_or(Errno::IO)
        };
        Ok((last("Uid")?, last("Gid")?))
    }

    /// Groups it is in besides the one with which it makes files.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn groups(&self) -> Result<Vec<u32>, Errno> {
        let groups = self.status_field("status", "Groups")?;
        Ok(groups.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect())
    }

    /// Whether permissions of files are nothing to it (`CAP_DAC_OVERRIDE`, linux/capability.h).
    #[must_use]
    pub fn overrides_permissions(&self) -> bool {
        let effective = self.status_field("status", "CapEff").ok();
        effective
            .and_then(|bits| u64::from_str_radix(&bits, 16).ok())
            .is_some_and(|bits| bits & (1 << 1) != 0)
    }

    /// Value of `name` in the environment it was started with.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`]; and when there is more of it than a program can be started with,
    /// and `name` not in that: it may be in the rest.
    pub fn environment(&self, name: &str) -> Result<Option<String>, Errno> {
        let mut reader =
            BufReader::with_capacity(1 << 16, self.reader("environ")?.take(ENVIRONMENT_BYTES));
        let mut entry = Vec::new();
        loop {
            entry.clear();
            if reader.read_until(0, &mut entry).map_err(|error| errno(&error))? == 0 {
                break;
            }
            let value =
                entry.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
            if let Some(value) = value {
                return Ok(Some(
                    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned(),
                ));
            }
        }
        if reader.get_ref().limit() == 0 { Err(Errno::TOOBIG) } else { Ok(None) }
    }

    /// What it was started with: the program as it was called, and its arguments.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn arguments(&self) -> Result<Vec<String>, Errno> {
        let bytes = self.memory("cmdline", TEXT_BYTES)?;
        let bytes = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
        Ok(bytes
            .split(|&b| b == 0)
            .map(|argument| String::from_utf8_lossy(argument).into_owned())
            .collect())
    }

    /// Its present directory, as it sees it; `None` when that is outside its root, or was deleted.
    fn cwd(&self) -> Option<PathBuf> {
        let read =
            |name| rustix::fs::readlinkat(&self.directory, self.in_common(name), Vec::new()).ok();
        let text = |link: std::ffi::CString| link.into_string().ok();
        let (cwd, root) = (read("cwd").and_then(text)?, read("root").and_then(text)?);
        let inside = if root == "/" { cwd } else { cwd.strip_prefix(&root)?.to_owned() };
        Some(PathBuf::from(inside)).filter(|path| path.is_absolute())
    }

    /// File name of its executable.
    #[must_use]
    pub(crate) fn executable_name(&self) -> Option<String> {
        let link =
            rustix::fs::readlinkat(&self.directory, self.in_common("exe"), Vec::new()).ok()?;
        let path = link.to_string_lossy();
        let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
        path.rsplit('/').next().filter(|name| !name.is_empty()).map(str::to_owned)
    }

    /// The id of its container, from the last path component of its cgroup that holds 64
    /// hexadecimal digits (docker, containerd, CRI-O and podman all name it so), or `None`.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn container(&self) -> Result<Option<String>, Errno> {
        Ok(crate::process::container::container_id(&self.cgroup()?).map(str::to_owned))
    }

    /// Bytes of its memory that are resident, as the kernel counts them.
    #[must_use]
    pub fn resident_bytes(&self) -> Option<u64> {
        let field = self.status_field("status", "VmRSS").ok()?;
        field.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    }

    /// Its cgroups, as the kernel prints them.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn cgroup(&self) -> Result<String, Errno> {
        self.text("cgroup")
    }

    /// Uid of the pod it runs in, as the pod's cgroup has it.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn pod(&self) -> Result<Option<String>, Errno> {
        Ok(crate::process::container::pod_id(&self.cgroup()?))
    }

    /// Calls `each` for every mapping until it returns false.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn maps(&self, mut each: impl FnMut(MapLine) -> bool) -> Result<(), Errno> {
        let mut reader = BufReader::with_capacity(1 << 16, self.reader("maps")?);
        let mut line = Vec::new();
        for _ in 0..MAPS_LINES {
            line.clear();
            let read = reader.by_ref().take(MAPS_LINE_BYTES).read_until(b'\n', &mut line);
            if read.map_err(|error| errno(&error))? == 0 {
                break;
            }
            if let Some(parsed) = parse_map_line(&String::from_utf8_lossy(&line))
                && !each(parsed)
            {
                break;
            }
        }
        Ok(())
    }

    /// Its root directory, as a place to start from.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn root(&self) -> Result<OwnedFd, Errno> {
        // A magic link of the kernel's, the only one that is followed.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&self.directory, self.in_common("root"), flags, Mode::empty())
    }

    /// How long a file it may make, where that is limited (RLIMIT_FSIZE).
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn file_limit(&self) -> Result<Option<u64>, Errno> {
        let limits = self.text("limits")?;
        let soft = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max file size")?.split_whitespace().next());
        Ok(soft.and_then(|soft| soft.parse().ok()))
    }

    /// Whom it is at the mercy of anyway: root, root of its user namespace, and its own user.
    ///
    /// # Errors
    /// As [`ProcessHandle::file`].
    pub fn masters(&self) -> Result<Vec<u32>, Errno> {
        let mut all = vec![0, self.file_owner()?.0];
        all.extend(root_of_namespace(&self.text("uid_map")?));
        Ok(all)
    }

    /// Opens a path below the process's root directory. Symbolic links on the way are followed as
    /// the process would follow them, but never out of its root and never through `/proc`'s magic
    /// links.
    ///
    /// # Errors
    /// The system call's.
    pub fn open_in_root(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        open_below(&self.root()?, path, flags)
    }

    /// The same of a regular file for reading, which its file system may hold up
    /// (`host::process::guarded_io`).
    ///
    /// # Errors
    /// The system call's; `TimedOut` where it is held up, `InvalidInput` where it is no regular
    /// file.
    pub fn open_regular_in_root(&self, path: &Path) -> io::Result<ForeignFile> {
        open_regular_below(self.root()?, path, IoPeer::Process(self.pid))
    }

    /// Where the process keeps temporary files: `TMPDIR` of its environment, where that is relative
    /// below its present directory, then `/tmp`.
    #[must_use]
    pub fn temporary_directories(&self) -> Vec<PathBuf> {
        let own = self
            .environment("TMPDIR")
            .ok()
            .flatten()
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        let own = own.and_then(|path| {
            if path.is_absolute() { Some(path) } else { Some(self.cwd()?.join(path)) }
        });
        let mut found: Vec<PathBuf> = own.into_iter().collect();
        if !found.iter().any(|path| path == Path::new("/tmp")) {
            found.push(PathBuf::from("/tmp"));
        }
        found
    }
}

/// Opens a regular file for reading as [`ProcessHandle::open_regular_in_root`] does, below the root
/// of `pid`, or below ours for `None`.
///
/// # Errors
/// As there.
pub fn open_regular(pid: Option<u32>, path: &Path) -> io::Result<ForeignFile> {
    let Some(pid) = pid else {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        // No process has this pid: calls that our own file systems hold up have an account too.
        return open_regular_below(
            openat(CWD, "/", flags, Mode::empty())?,
            path,
            IoPeer::Process(0),
        );
    };
    ProcessHandle::open(pid)?.open_regular_in_root(path)
}

fn open_regular_below(root: OwnedFd, path: &Path, holder: IoPeer) -> io::Result<ForeignFile> {
    let path = path.to_owned();
    let open = move || {
        // A handle first: opening a device may do something.
        let handle = open_below(&root, &path, OFlags::PATH)?;
        match FileType::from_raw_mode(fstat(&handle)?.st_mode) {
            FileType::RegularFile => {}
            _ => return Err(ErrorKind::InvalidInput.into()),
        }
        let link = format!("/proc/self/fd/{}", handle.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        ForeignFile::opened(File::from(openat(CWD, link, flags, Mode::empty())?))
    };
    wait_for(holder, open).ok_or(ErrorKind::TimedOut)?
}

/// Opens `path` below `root`, whose links may lead anywhere below it only.
///
/// # Errors
/// The system's error.
pub(crate) fn open_below(root: &OwnedFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// The system's error number of an I/O error; ETIMEDOUT for a call that was not waited for any
/// longer (`host::process::guarded_io`), EIO for another one that has none.
pub fn errno(error: &io::Error) -> Errno {
    let without = if error.kind() == ErrorKind::TimedOut { Errno::TIMEDOUT } else { Errno::IO };
    Errno::from_io_error(error).unwrap_or(without)
}

/// Who is root in a user namespace with this `uid_map`: lines of first id inside, first id outside,
/// how many (user_namespaces(7)).
fn root_of_namespace(uid_map: &str) -> Option<u32> {
    uid_map.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace().map(str::parse);
        matches!(fields.next(), Some(Ok(0_u32))).then(|| fields.next()?.ok()).flatten()
    })
}

fn parse_map_line(line: &str) -> Option<MapLine> {
    let MapsFields { range, executable, file_offset, device, inode, path } =
        parse_fields(line.trim_end_matches('\n'))?;
    let name = path.to_owned();
    Some(MapLine {
        start: range.start,
        end: range.end,
        offset: file_offset,
        device,
        inode,
        executable,
        name,
    })
}

#[cfg(test)]
mod tests {
    use super::{MapLine, ProcessHandle, parse_map_line, root_of_namespace};
    use perfusion_model::text::printable;
    use proptest::{prop_assert, proptest};

    #[test]
    fn lines_of_maps_are_split_into_their_fields() {
        let line = "7f0c1a200000-7f0c1a451000 rw-s 00000000 00:01 2083                       \
             /memfd:perfusion-shim (deleted)\n";
        let expected = MapLine {
            start: 0x7f0c_1a20_0000,
            end: 0x7f0c_1a45_1000,
            offset: 0,
            device: (0, 1),
            inode: 2083,
            executable: false,
            name: "/memfd:perfusion-shim (deleted)".to_owned(),
        };
        assert_eq!(parse_map_line(line), Some(expected));
        let anonymous = parse_map_line("00400000-00401000 r-xp 00000000 00:00 0 \n").unwrap();
        assert!(anonymous.executable && anonymous.name.is_empty());
    }

    #[test]
    fn this_process_is_seen_as_it_is() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        assert!(me.is_alive() && !me.is_kernel_thread());
        assert!(me.start_ticks().unwrap() > 0);
        assert_eq!(me.environment("NO_SUCH_VARIABLE_HERE").unwrap(), None);
        let mut executable = 0;
        me.maps(|line| {
            executable += usize::from(line.executable);
            true
        })
        .unwrap();
        assert!(executable > 0);
    }

    #[test]
    fn root_of_a_user_namespace_is_found_in_its_map() {
        assert_eq!(root_of_namespace("         0          0 4294967295\n"), Some(0));
        assert_eq!(
            root_of_namespace("1 100000 65536\n         0       1000          1\n"),
            Some(1000)
        );
        assert_eq!(root_of_namespace("1000 1000 1\n"), None);
        assert_eq!(root_of_namespace(""), None);
    }

    #[test]
    fn control_characters_never_reach_a_terminal() {
        assert_eq!(printable("a\u{1b}[31mb\n"), "a\u{fffd}[31mb\u{fffd}");
    }

    proptest! {
        #[test]
        fn any_line_is_parsed_or_refused(line in ".{0,200}") {
            if let Some(map) = parse_map_line(&line) {
                prop_assert!(line.contains(&map.name));
            }
        }
    }
}
