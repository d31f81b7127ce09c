//! Puts the shim's library where a process can load it, and takes it away again. Directories are
//! opened below the process's root and the file is made there by descriptor, exclusively and
//! without following a link, so neither the process nor its neighbours choose what is written or
//! removed. The file is locked (flock) for as long as somebody needs it: a file with our name that
//! nobody locks was left behind by a crash, and [`sweep`] removes it.
//!
//! Who loads the library does so by its path, perhaps later than we think. For a process that is
//! asked to load it now, nobody but itself and its masters may be able to change what the path
//! means while the file is there (`trusted`). A program that is started with the path in its
//! environment hands it on to children that outlive us: nobody else may ever be able to use the
//! path, also when the file has gone ([`write_copy_for_start`]).

pub use super::shim_file::is_ours;

use super::helper;
use super::shim_file::{self, NAMING};
use super::trusted;
use super::unusable_directory::{TriedDirectories, UnusableDirectory, advice};
use perfusion_host::abandoned::AbandonedThreads;
use perfusion_host::locked_files;
use perfusion_host::process::handle::ProcessHandle;
use profiler_protocol::load::LOCK_PATH_BYTES;
use rustix::fs::{
    AtFlags, Mode, OFlags, StatVfsMountFlags, fchmod, fstat, fstatvfs, mkdirat, openat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
/// Not `/run/perfusion`: what a service manager makes for the daemon goes when the daemon ends.
const START_DIRECTORY: &str = "perfusion-record";
/// Roots visited by the sweep, at most.
const ROOTS: usize = 4096;

/// The library could not be placed.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid}: no directory for the shim's library: {}{}",
    TriedDirectories(tried),
    advice(tried)
)]
pub struct ShimCopyError {
    /// The process.
    pub pid: u32,
    /// Each directory below its root, and what was wrong with it.
    pub tried: Vec<(PathBuf, UnusableDirectory)>,
}

/// The library at its place. Dropping it removes the file; a process that has loaded it keeps its
/// mapping.
#[derive(Debug)]
pub struct ShimCopy {
    directory: OwnedFd,
    name: String,
    path: String,
    /// Holds the lock that tells the sweep of another recorder to leave the file alone.
    locked: File,
    removes: bool,
}

/// Libraries that processes may load later than they should have, until they end. At most so many;
/// beyond, files are left to the next sweep.
static KEPT: Mutex<RetainedCopies> =
    Mutex::new(RetainedCopies { placed: Vec::new(), removers: AbandonedThreads::new() });
const MOST_KEPT: usize = 64;

struct RetainedCopies {
    placed: Vec<(ProcessHandle, ShimCopy)>,
    /// What removes those of the dead.
    removers: AbandonedThreads<()>,
}

impl ShimCopy {
    /// Path in the process's mount namespace.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Leaves the file where it is for as long as `target` lives, or this process does; then it is
    /// the next sweep's.
    pub(super) fn keep_until_end_of(mut self, target: ProcessHandle) {
        remove_copies_of_ended_processes();
        let Ok(mut kept) = KEPT.lock() else { return };
        if kept.placed.len() < MOST_KEPT {
            kept.placed.push((target, self));
        } else {
            self.removes = false;
        }
    }
}

/// Removes what was kept for processes that have ended: each costs a file and four descriptors. For
/// whoever looks at processes again and again.
pub fn remove_copies_of_ended_processes() {
    let Ok(mut kept) = KEPT.lock() else { return };
    // A thread does it that may hang: the file system was the process's to choose. One at a time;
    // those that die meanwhile are kept until it ends.
    if kept.removers.holders().len() > 0 {
        return;
    }
    let dead = kept.placed.extract_if(.., |(target, _)| !target.is_alive());
    let dead: Vec<ShimCopy> = dead.map(|(_, placed)| placed).collect();
    if !dead.is_empty() {
        let thread = std::thread::Builder::new().name("attach-remove".to_owned());
        if let Ok(thread) = thread.spawn(move || drop(dead)) {
            kept.removers.add((), thread);
        }
    }
}

impl Drop for ShimCopy {
    fn drop(&mut self) {
        if self.removes {
            // Already removed by somebody else is as good; a directory that went read-only is left
            // to the next sweep.
            remove(&self.directory, &self.name).ok();
        }
    }
}

/// Writes `library` into the first fitting directory of `target`: `TMPDIR`, `/tmp`, `/dev/shm`.
///
/// # Errors
/// [`ShimCopyError`] lists every directory tried.
pub fn write_copy(target: &ProcessHandle, library: &[u8]) -> Result<ShimCopy, ShimCopyError> {
    let mut tried = Vec::new();
    for path in directories(target) {
        match write_copy_in(target, &path, library) {
            Ok(placed) => return Ok(placed),
            Err(why) => tried.push((path, why)),
        }
    }
    Err(ShimCopyError { pid: target.pid(), tried })
}

fn directories(target: &ProcessHandle) -> Vec<PathBuf> {
    let mut all = target.temporary_directories();
    all.push(PathBuf::from("/dev/shm"));
    all
}

/// Writes `library` where this process and the programs it starts can load it, and nobody else can
/// ever make a file of that name: a directory of our own in `/run`, `/var/lib` or, of a user, in
/// `XDG_RUNTIME_DIR` or the home directory. It stays there.
///
/// # Errors
/// [`ShimCopyError`] lists every directory tried.
pub fn write_copy_for_start(me: &ProcessHandle, library: &[u8]) -> Result<ShimCopy, ShimCopyError> {
    let mut tried = Vec::new();
    for path in start_directories() {
        let made =
            own_directory(me, &path).and_then(|directory| write_into(me, directory, library));
        let fits =
            |placed: &ShimCopy| placed.path.is_ascii() && placed.path.len() <= LOCK_PATH_BYTES;
        match made.and_then(|placed| {
            if fits(&placed) { Ok(placed) } else { Err(UnusableDirectory::Unquotable) }
        }) {
            Ok(placed) => return Ok(placed),
            Err(why) => tried.push((path, why)),
        }
    }
    Err(ShimCopyError { pid: me.pid(), tried })
}

/// Directories for what programs that are started, and their children, are told the path of, each
/// made and checked when it is asked for.
pub(crate) fn checked_start_directories(
    me: &ProcessHandle,
) -> impl Iterator<Item = (PathBuf, Result<PathBuf, UnusableDirectory>)> {
    start_directories().into_iter().map(|path| {
        let made = own_directory(me, &path).map(|(_, path)| path);
        (path, made)
    })
}

/// Where libraries for programs that are started lie. The environment of root may be another user's
/// (`sudo -E`), so it has no say then. Below `/tmp` others could use the name only after somebody
/// with the right to has removed the directory.
fn start_directories() -> Vec<PathBuf> {
    let user = geteuid().as_raw();
    let own = match user {
        0 => vec![PathBuf::from("/run"), PathBuf::from("/var/lib")],
        _ => {
            let variable = |name| std::env::var_os(name).map(PathBuf::from);
            let homes =
                [variable("XDG_RUNTIME_DIR"), variable("HOME").map(|home| home.join(".cache"))];
            homes.into_iter().flatten().filter(|path| path.is_absolute()).collect()
        }
    };
    let own = own.into_iter().map(|path| path.join(START_DIRECTORY));
    own.chain([PathBuf::from(format!("/tmp/{START_DIRECTORY}-{user}"))]).collect()
}

/// Makes the last directory of `path` if it is not there. It must be ours, and only ours to write.
fn own_directory(me: &ProcessHandle, path: &Path) -> Result<(OwnedFd, PathBuf), UnusableDirectory> {
    let user = geteuid();
    let system = |step| move |error| UnusableDirectory::System(step, error);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(UnusableDirectory::System("open", Errno::INVAL));
    };
    let owners = [0, user.as_raw()];
    let (parent, parent_path) = trusted::open(me.root().map_err(system("open"))?, parent, &owners)?;
    // Root's programs may become other users, who load the library too.
    let mode = if user.is_root() { Mode::from_raw_mode(0o755) } else { Mode::RWXU };
    match mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(UnusableDirectory::System("mkdir", error)),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(&parent, name, flags, Mode::empty()).map_err(system("open"))?;
    let status = fstat(&directory).map_err(system("stat"))?;
    let path = parent_path.join(name);
    if status.st_uid != user.as_raw() {
        return Err(UnusableDirectory::Owner { path, uid: status.st_uid });
    }
    if Mode::from_raw_mode(status.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
        return Err(UnusableDirectory::Shared);
    }
    // The umask, or a recorder that died here before.
    fchmod(&directory, mode).map_err(system("chmod"))?;
    Ok((directory, path))
}

fn write_copy_in(
    target: &ProcessHandle,
    path: &Path,
    library: &[u8],
) -> Result<ShimCopy, UnusableDirectory> {
    let system = |step| move |error| UnusableDirectory::System(step, error);
    let masters = target.masters().map_err(system("/proc/PID/status"))?;
    let root = target.root().map_err(system("open"))?;
    write_into(target, trusted::open(root, path, &masters)?, library)
}

fn write_into(
    target: &ProcessHandle,
    (directory, path): (OwnedFd, PathBuf),
    library: &[u8],
) -> Result<ShimCopy, UnusableDirectory> {
    let mount = fstatvfs(&directory).map_err(|e| UnusableDirectory::System("statvfs", e))?.f_flag;
    if mount.contains(StatVfsMountFlags::NOEXEC) {
        return Err(UnusableDirectory::NoExec);
    }
    if mount.contains(StatVfsMountFlags::RDONLY) {
        return Err(UnusableDirectory::ReadOnly);
    }
    if path.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b';' | b'=')) {
        return Err(UnusableDirectory::Unquotable);
    }
    // The sweep of another recorder may remove a file between its creation and its locking: begin
    // again then.
    let mut last = UnusableDirectory::System("lock", Errno::WOULDBLOCK);
    for _ in 0..3 {
        let directory =
            directory.try_clone().map_err(|e| UnusableDirectory::System("dup", errno(&e)))?;
        match write_locked(target, directory, &path, library) {
            Ok(placed) => return Ok(placed),
            Err(why @ UnusableDirectory::System("lock", _)) => last = why,
            Err(why) => return Err(why),
        }
    }
    Err(last)
}

fn write_locked(
    target: &ProcessHandle,
    directory: OwnedFd,
    path: &Path,
    library: &[u8],
) -> Result<ShimCopy, UnusableDirectory> {
    let name = NAMING.fresh().map_err(|e| UnusableDirectory::System("/dev/urandom", e))?;
    let Some(inside) = path.join(&name).to_str().map(str::to_owned) else {
        return Err(UnusableDirectory::Unquotable);
    };
    let file = match create(&directory, &name) {
        // The file system belongs to a user namespace that does not know our user: make the file as
        // the process's own.
        Err(Errno::OVERFLOW) => create_as(target, &directory, &name)?,
        other => other.map_err(|e| UnusableDirectory::System("create", e))?,
    };
    // From here on `placed` removes the file when it is dropped, on failure too.
    let mut placed =
        ShimCopy { directory, name, path: inside, locked: File::from(file), removes: true };
    if !locked_files::hold(&placed.locked).map_err(|e| UnusableDirectory::System("lock", e))? {
        return Err(UnusableDirectory::System("lock", Errno::WOULDBLOCK));
    }
    placed.locked.write_all(library).map_err(|e| UnusableDirectory::System("write", errno(&e)))?;
    // The process's user is seldom ours; the umask must not hide the library from it.
    fchmod(&placed.locked, Mode::from_raw_mode(0o555))
        .map_err(|e| UnusableDirectory::System("chmod", e))?;
    Ok(placed)
}

fn create(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    match shim_file::create(directory, name) {
        // The process's user alone may write there, and the helper, if there is one.
        Err(Errno::ACCESS) => helper::make(directory, name).unwrap_or(Err(Errno::ACCESS)),
        made => made,
    }
}

/// Removes a file that [`create`] may have made.
fn remove(directory: impl AsFd, name: &str) -> Result<(), Errno> {
    match unlinkat(&directory, name, AtFlags::empty()) {
        Err(Errno::ACCESS) => helper::remove(&directory, name).unwrap_or(Err(Errno::ACCESS)),
        removed => removed,
    }
}

/// Makes the file on a thread of its own that has become the target's user: ids are per thread in
/// Linux, and this one ends with it. That takes capabilities which neither the unit nor the pod
/// has.
fn create_as(
    target: &ProcessHandle,
    directory: &OwnedFd,
    name: &str,
) -> Result<OwnedFd, UnusableDirectory> {
    let system = |error| UnusableDirectory::System("create", error);
    let (uid, gid) = target.file_owner().map_err(system)?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let become_it = || {
        set_thread_groups(&[])?;
        // Only the effective ids: who may signal a thread is decided by its real and saved ones
        // (kernel/signal.c, kill_ok_by_cred), so the target's user must never own those.
        set_thread_res_gid(None, gid, None)?;
        set_thread_res_uid(None, uid, None)
    };
    let work = || {
        become_it().map_err(|error| {
            if error == Errno::PERM { UnusableDirectory::UnknownUser } else { system(error) }
        })?;
        create(directory, name).map_err(system)
    };
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or(Err(system(Errno::IO)))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// Begins a [`sweep`] beside the recording, which need not wait for a look into thousands of roots.
/// Nobody waits for its end either: it may hang on a file system whose server is gone. Every step
/// of it is good by itself, and the next recorder goes on. Without a thread that one does all of
/// it.
pub fn begin_sweep() {
    std::thread::Builder::new().name("sweep".to_owned()).spawn(sweep).map(drop).ok();
}

/// Removes libraries that a crashed recorder left below the root of any process: regular files of
/// ours (or of the process's user) with our kind of name that nobody holds locked. Returns how many
/// were removed. (A FUSE mount of a container cannot make this hang: unless it was made by the
/// host's root, the kernel refuses us at once, `fuse_allow_current_process`.)
pub fn sweep() -> usize {
    let mut seen = HashSet::new();
    let Ok(pids) = perfusion_host::process::all_pids() else { return 0 };
    let mut removed = sweep_starts();
    for target in pids.into_iter().filter_map(|pid| ProcessHandle::open(pid).ok()) {
        if seen.len() >= ROOTS {
            break;
        }
        // Ours, or made in the name of the process's user.
        let Ok((user, _)) = target.file_owner() else { continue };
        let owners = [geteuid().as_raw(), user];
        for path in directories(&target) {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK;
            let Ok(directory) = target.open_in_root(&path, flags) else { continue };
            let Ok(status) = fstat(&directory) else { continue };
            // Processes of one container share their directories.
            if seen.insert((status.st_dev, status.st_ino, user)) {
                removed += locked_files::sweep(&directory, NAMING, &owners, |name| {
                    remove(&directory, name)
                });
            }
        }
    }
    removed
}

/// The same for libraries of programs that were started, in our own root. The directories stay.
fn sweep_starts() -> usize {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let all = start_directories();
    let opened =
        all.iter().filter_map(|path| openat(rustix::fs::CWD, path, flags, Mode::empty()).ok());
    let swept = |directory: OwnedFd| {
        locked_files::sweep(&directory, NAMING, &[geteuid().as_raw()], |name| {
            remove(&directory, name)
        })
    };
    opened.map(swept).sum()
}

#[cfg(test)]
mod tests {
    use super::{
        NAMING, ShimCopyError, UnusableDirectory, create_as, own_directory, remove,
        remove_copies_of_ended_processes, write_copy_in, write_into,
    };
    use perfusion_host::locked_files;
    use perfusion_host::process::handle::ProcessHandle;
    use rustix::io::Errno;
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    use std::fs::{File, Permissions, read_dir, set_permissions};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;
    use std::time::{Duration, Instant};

    fn me() -> ProcessHandle {
        ProcessHandle::open(std::process::id()).unwrap()
    }

    #[test]
    fn the_library_is_there_while_it_is_held_and_gone_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let placed = write_copy_in(&me(), folder.path(), b"library").unwrap();
        assert_eq!(std::fs::read(placed.path()).unwrap(), b"library");
        assert_eq!(std::fs::metadata(placed.path()).unwrap().permissions().mode() & 0o777, 0o555);
        drop(placed);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn too_few_open_files_are_told_with_their_name_the_limit_and_the_remedy() {
        let failed = |errno| {
            let why = || UnusableDirectory::System("open", errno);
            ShimCopyError { pid: 7, tried: vec![("/tmp".into(), why()), ("/x".into(), why())] }
                .to_string()
        };
        let told = failed(Errno::MFILE);
        let start = "process 7: no directory for the shim's library: /tmp: open: Too many open \
                     files (os error 24) [EMFILE]; /x: open: ";
        assert!(told.starts_with(start), "{told}");
        assert_eq!(told.matches("RLIMIT_NOFILE is ").count(), 1, "{told}");
        assert!(told.ends_with("allow more (ulimit -n, LimitNOFILE=)"), "{told}");
        assert!(failed(Errno::ACCESS).ends_with("(os error 13) [EACCES]"));
    }

    #[test]
    fn the_sweep_leaves_a_library_alone_that_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let held = write_copy_in(&me(), folder.path(), b"in use").unwrap();
        let directory = File::open(folder.path()).unwrap();
        let owners = [rustix::process::geteuid().as_raw()];
        let sweep =
            || locked_files::sweep(&directory, NAMING, &owners, |name| remove(&directory, name));
        assert_eq!(sweep(), 0);
        // As a crash would leave it: there, but no longer locked.
        std::fs::copy(held.path(), folder.path().join("perfusion-shim-0123456789abcdef.so"))
            .unwrap();
        assert_eq!(sweep(), 1);
        assert!(std::fs::exists(held.path()).unwrap());
    }

    #[test]
    fn what_was_kept_for_a_process_is_removed_when_it_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        let placed = write_copy_in(&me(), folder.path(), b"library").unwrap();
        placed.keep_until_end_of(ProcessHandle::open(sleeper.id()).unwrap());
        remove_copies_of_ended_processes();
        assert_eq!(read_dir(folder.path()).unwrap().count(), 1);
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        let begin = Instant::now();
        while read_dir(folder.path()).unwrap().count() > 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
            remove_copies_of_ended_processes();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn without_the_right_to_become_the_processs_user_that_is_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let directory = OwnedFd::from(File::open(folder.path()).unwrap());
        // Capabilities are each thread's own.
        let made = std::thread::spawn(move || {
            let none = CapabilitySet::empty();
            set_capabilities(
                None,
                CapabilitySets { effective: none, permitted: none, inheritable: none },
            )
            .unwrap();
            create_as(&me(), &directory, "perfusion-shim-0123456789abcdef.so")
        });
        let why = made.join().unwrap().unwrap_err();
        assert!(matches!(why, UnusableDirectory::UnknownUser), "{why}");
        assert!(why.to_string().contains("Value too large"), "{why}");
        assert_eq!(read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn directories_where_others_could_swap_the_library_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(
            write_copy_in(&me(), folder.path(), b"x"),
            Err(UnusableDirectory::NotSticky { .. })
        ));
        set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        write_copy_in(&me(), folder.path(), b"x").unwrap();
    }

    #[test]
    fn a_directory_for_programs_that_are_started_is_ours_alone_or_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let ours = folder.path().join("ours");
        let (directory, path) = own_directory(&me(), &ours).unwrap();
        let user = rustix::process::geteuid();
        let mode = std::fs::metadata(&ours).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, if user.is_root() { 0o755 } else { 0o700 });
        let placed = write_into(&me(), (directory, path), b"library").unwrap();
        assert!(placed.path().starts_with(ours.canonicalize().unwrap().to_str().unwrap()));
        drop(placed);
        // The name means something only as long as this directory does, so it stays.
        own_directory(&me(), &ours).unwrap();
        for mode in [0o775, 0o757, 0o1777] {
            set_permissions(&ours, Permissions::from_mode(mode)).unwrap();
            assert!(
                matches!(own_directory(&me(), &ours), Err(UnusableDirectory::Shared)),
                "{mode:o}"
            );
        }
        set_permissions(&ours, Permissions::from_mode(0o700)).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&ours, &link).unwrap();
        assert!(matches!(own_directory(&me(), &link), Err(UnusableDirectory::System("open", _))));
        if user.is_root() {
            std::os::unix::fs::chown(&ours, Some(1234), None).unwrap();
            assert!(matches!(
                own_directory(&me(), &ours),
                Err(UnusableDirectory::Owner { uid: 1234, .. })
            ));
        }
        set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(
            own_directory(&me(), &folder.path().join("new")),
            Err(UnusableDirectory::NotSticky { .. })
        ));
    }

    #[test]
    fn paths_the_profiler_list_cannot_hold_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("a;b");
        std::fs::create_dir(&odd).unwrap();
        assert!(matches!(write_copy_in(&me(), &odd, b"x"), Err(UnusableDirectory::Unquotable)));
    }
}
