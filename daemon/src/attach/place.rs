//! Puts the shim's library where a process can load it, and takes it away again. Directories are opened below the process's root
//! and the file is made there by descriptor, exclusively and without following a link, so neither the process nor its
//! neighbours choose what is written or removed. The file is locked (flock) for as long as somebody needs it: a file with
//! our name that nobody locks was left behind by a crash, and [`sweep`] removes it.

use super::target::{Target, printable};
use crate::leftover::{self, Naming};
use rustix::fs::{AtFlags, Mode, OFlags, StatVfsMountFlags, fchmod, fstat, fstatvfs, openat, unlinkat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

const NAMING: Naming = Naming { prefix: "perfusion-shim-", suffix: ".so" };
/// Roots visited by the sweep, at most.
const ROOTS: usize = 4096;

/// The library could not be placed.
#[derive(Debug, thiserror::Error)]
#[error("process {pid}: no directory for the shim's library: {}", Tried(tried))]
pub struct PlaceError {
    /// The process.
    pub pid: u32,
    /// Each directory below its root, and what was wrong with it.
    pub tried: Vec<(PathBuf, Unfit)>,
}

/// Why a directory is not used.
#[derive(Debug)]
pub enum Unfit {
    /// A system call failed.
    System(&'static str, Errno),
    /// Mounted noexec: the loader could not map the library.
    NoExec,
    /// Mounted read-only.
    ReadOnly,
    /// Anybody may rename files in it (writable for others without the sticky bit).
    NotSticky,
    /// Its path has characters that the profiler list of the environment cannot hold, or is no UTF-8.
    Unquotable,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(step, source) => write!(f, "{step}: {source}"),
            Self::NoExec => f.write_str("mounted noexec"),
            Self::ReadOnly => f.write_str("mounted read-only"),
            Self::NotSticky => f.write_str("writable for everybody without the sticky bit"),
            Self::Unquotable => f.write_str("its path is no UTF-8 or has `;` or `=` in it"),
        }
    }
}

struct Tried<'a>(&'a [(PathBuf, Unfit)]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (path, why)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {why}", printable(&path.to_string_lossy()))?;
        }
        Ok(())
    }
}

/// The library at its place. Dropping it removes the file; a process that has loaded it keeps its mapping.
#[derive(Debug)]
pub struct Placed {
    directory: OwnedFd,
    name: String,
    path: String,
    /// Holds the lock that tells the sweep of another recorder to leave the file alone.
    locked: File,
}

impl Placed {
    /// Path in the process's mount namespace.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        // Already removed by somebody else is as good; a directory that went read-only is left to the next sweep.
        unlinkat(&self.directory, &*self.name, AtFlags::empty()).ok();
    }
}

/// Writes `library` into the first fitting directory of `target`: `TMPDIR`, `/tmp`, `/dev/shm`.
///
/// # Errors
/// [`PlaceError`] lists every directory tried.
pub fn place(target: &Target, library: &[u8]) -> Result<Placed, PlaceError> {
    let mut tried = Vec::new();
    for path in directories(target) {
        match place_in(target, &path, library) {
            Ok(placed) => return Ok(placed),
            Err(why) => tried.push((path, why)),
        }
    }
    Err(PlaceError { pid: target.pid(), tried })
}

fn directories(target: &Target) -> Vec<PathBuf> {
    let mut all = target.temporary_directories();
    all.push(PathBuf::from("/dev/shm"));
    all
}

fn place_in(target: &Target, path: &Path, library: &[u8]) -> Result<Placed, Unfit> {
    let directory = target
        .open_in_root(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)
        .map_err(|e| Unfit::System("open", e))?;
    let mount = fstatvfs(&directory).map_err(|e| Unfit::System("statvfs", e))?.f_flag;
    if mount.contains(StatVfsMountFlags::NOEXEC) {
        return Err(Unfit::NoExec);
    }
    if mount.contains(StatVfsMountFlags::RDONLY) {
        return Err(Unfit::ReadOnly);
    }
    let mode = Mode::from_raw_mode(fstat(&directory).map_err(|e| Unfit::System("stat", e))?.st_mode);
    if mode.contains(Mode::WOTH) && !mode.contains(Mode::SVTX) {
        return Err(Unfit::NotSticky);
    }
    if path.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b';' | b'=')) {
        return Err(Unfit::Unquotable);
    }
    // The sweep of another recorder may remove a file between its creation and its locking: begin again then.
    let mut last = Unfit::System("lock", Errno::WOULDBLOCK);
    for _ in 0..3 {
        let directory = directory.try_clone().map_err(|e| Unfit::System("dup", errno(&e)))?;
        match write_locked(target, directory, path, library) {
            Ok(placed) => return Ok(placed),
            Err(why @ Unfit::System("lock", _)) => last = why,
            Err(why) => return Err(why),
        }
    }
    Err(last)
}

fn write_locked(target: &Target, directory: OwnedFd, path: &Path, library: &[u8]) -> Result<Placed, Unfit> {
    let name = NAMING.fresh().map_err(|e| Unfit::System("/dev/urandom", e))?;
    let Some(inside) = path.join(&name).to_str().map(str::to_owned) else {
        return Err(Unfit::Unquotable);
    };
    let file = match create(&directory, &name) {
        // The file system belongs to a user namespace that does not know our user: make the file as the process's own.
        Err(Errno::OVERFLOW) => create_as(target, &directory, &name),
        other => other,
    };
    let file = file.map_err(|e| Unfit::System("create", e))?;
    // From here on `placed` removes the file when it is dropped, on failure too.
    let mut placed = Placed { directory, name, path: inside, locked: File::from(file) };
    if !leftover::hold(&placed.locked).map_err(|e| Unfit::System("lock", e))? {
        return Err(Unfit::System("lock", Errno::WOULDBLOCK));
    }
    placed.locked.write_all(library).map_err(|e| Unfit::System("write", errno(&e)))?;
    // The process's user is seldom ours; the umask must not hide the library from it.
    fchmod(&placed.locked, Mode::from_raw_mode(0o555)).map_err(|e| Unfit::System("chmod", e))?;
    Ok(placed)
}

fn create(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::RUSR | Mode::WUSR)
}

/// Makes the file on a thread of its own that has become the target's user: ids are per thread in Linux, and this one ends with it.
fn create_as(target: &Target, directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let (uid, gid) = target.file_owner()?;
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let work = || {
        set_thread_groups(&[])?;
        // Only the effective ids: who may signal a thread is decided by its real and saved ones (kernel/signal.c,
        // kill_ok_by_cred), so the target's user must never own those.
        set_thread_res_gid(None, gid, None)?;
        set_thread_res_uid(None, uid, None)?;
        create(directory, name)
    };
    std::thread::scope(|scope| scope.spawn(work).join()).unwrap_or(Err(Errno::IO))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A [`sweep`] that goes on beside the recording, which need not wait for a look into thousands of roots. Dropping it waits for its end.
#[derive(Debug)]
pub struct Sweeping(Option<JoinHandle<usize>>);

impl Sweeping {
    /// Begins; without a thread the next recorder sweeps.
    #[must_use]
    pub fn begin() -> Self {
        Self(std::thread::Builder::new().name("sweep".to_owned()).spawn(sweep).ok())
    }
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        // A panic in it has been printed; nothing depends on its result.
        self.0.take().map(JoinHandle::join);
    }
}

/// Removes libraries that a crashed recorder left below the root of any process: regular files of ours (or of the process's user) with our kind of name
/// that nobody holds locked. Returns how many were removed. (A FUSE mount of a container cannot make this hang: unless it was
/// made by the host's root, the kernel refuses us at once, `fuse_allow_current_process`.)
pub fn sweep() -> usize {
    let mut seen = HashSet::new();
    let Ok(pids) = crate::process::all_pids() else { return 0 };
    let mut removed = 0;
    for target in pids.into_iter().filter_map(|pid| Target::open(pid).ok()) {
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
                removed += leftover::sweep(&directory, NAMING, &owners);
            }
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::{NAMING, Unfit, place_in};
    use crate::attach::target::Target;
    use crate::leftover;
    use std::fs::{File, Permissions, read_dir, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;

    fn me() -> Target {
        Target::open(std::process::id()).unwrap()
    }

    #[test]
    fn the_library_is_there_while_it_is_held_and_gone_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let placed = place_in(&me(), folder.path(), b"library").unwrap();
        assert_eq!(std::fs::read(placed.path()).unwrap(), b"library");
        assert_eq!(std::fs::metadata(placed.path()).unwrap().permissions().mode() & 0o777, 0o555);
        drop(placed);
        assert_eq!(read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_sweep_leaves_a_library_alone_that_is_held() {
        let folder = tempfile::tempdir().unwrap();
        let held = place_in(&me(), folder.path(), b"in use").unwrap();
        let directory = File::open(folder.path()).unwrap();
        let owners = [rustix::process::geteuid().as_raw()];
        assert_eq!(leftover::sweep(&directory, NAMING, &owners), 0);
        // As a crash would leave it: there, but no longer locked.
        std::fs::copy(held.path(), folder.path().join("perfusion-shim-0123456789abcdef.so")).unwrap();
        assert_eq!(leftover::sweep(&directory, NAMING, &owners), 1);
        assert!(std::fs::exists(held.path()).unwrap());
    }

    #[test]
    fn directories_where_others_could_swap_the_library_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        set_permissions(folder.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(place_in(&me(), folder.path(), b"x"), Err(Unfit::NotSticky)));
        set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        place_in(&me(), folder.path(), b"x").unwrap();
    }

    #[test]
    fn paths_the_profiler_list_cannot_hold_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let odd = folder.path().join("a;b");
        std::fs::create_dir(&odd).unwrap();
        assert!(matches!(place_in(&me(), &odd, b"x"), Err(Unfit::Unquotable)));
    }
}
