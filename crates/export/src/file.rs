//! Files that appear whole or not at all: written to a new file beside the target, synced, renamed.

use perfusion_host::locked_files::{self, LockedFileName};
use rustix::fs::{
    Advice, AtFlags, CWD, Mode, OFlags, fadvise, fsync, openat, renameat, statvfs, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// How files are called before they have their own name.
const NAMING: LockedFileName = LockedFileName { prefix: ".perfusion-", suffix: ".tmp" };
/// How often a new file is made, when the sweep of another recorder takes it away before it is
/// locked.
const ATTEMPTS: u32 = 100;

/// A file was not written; nothing of it is left.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {step}: {source}{}", path.display(), advice(.source))]
pub struct FileError {
    /// The target.
    pub path: PathBuf,
    /// What failed.
    pub step: &'static str,
    /// Why.
    #[source]
    pub source: io::Error,
}

fn advice(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::FileTooLarge {
        " (ulimit -f, or the file system's own limit)"
    } else {
        ""
    }
}

/// What a directory's file system lacks to take so many bytes and keep as many free beside them.
///
/// # Errors
/// When it does not say.
pub fn shortfall(directory: &Path, bytes: u64, keep_free: u64) -> io::Result<u64> {
    let room = statvfs(directory)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    Ok(keep_free.saturating_add(bytes).saturating_sub(free))
}

/// Makes a directory, and those it lies in, for their owner alone; what is there stays as it is.
///
/// # Errors
/// When it cannot be made.
pub fn make_directory(path: &Path) -> Result<(), FileError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(failing(path, "make the directory"))
}

/// True for `-`, by which commands mean standard output.
#[must_use]
pub fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes `bytes` to `path`, over what is there. A symbolic link to a file is replaced, not
/// followed; a device or pipe is written into, and so is standard output, which `-` means.
///
/// # Errors
/// When the directory cannot be written, the disk is full, or `path` is a directory. Nothing
/// partial is left.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let fail = |step| failing(path, step);
    match Destination::of(path)? {
        Destination::Special if is_stdout(path) => {
            let mut stdout = io::stdout().lock();
            stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(fail("write"))
        }
        Destination::Special => {
            let mut special = OpenOptions::new().write(true).open(path).map_err(fail("open"))?;
            special.write_all(bytes).map_err(fail("write"))
        }
        Destination::Beside(mut new, name) => {
            new.file.write_all(bytes).map_err(fail("write"))?;
            new.file.sync_all().map_err(fail("sync to disk"))?;
            let listed = new.listed();
            new.rename(name).map_err(|error| fail("rename into place")(error.into()))?;
            // The name itself must survive a crash too. Some file systems cannot sync a directory:
            // the file is complete anyway.
            if let Some(listed) = listed {
                fsync(listed).ok();
            }
            Ok(())
        }
    }
}

/// Writes `bytes` to a new file in a directory that is looked after ([`sweep`]): for what is soon
/// done with. A daemon that dies leaves all of it or nothing; a machine that fails may leave less
/// of it, so whoever reads it must know how long it is.
///
/// # Errors
/// As [`write()`].
pub fn write_into(directory: &Path, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    stage(directory, name, bytes)?.rename()
}

/// Writes `bytes` to a file that is not yet there under its name, and has the kernel begin to write
/// them to the disk.
///
/// # Errors
/// As [`write()`].
pub fn stage(directory: &Path, name: &str, bytes: &[u8]) -> Result<Staged, FileError> {
    let path = directory.join(name);
    // Others may write in the directory that it lies in, and lead nobody elsewhere by a link.
    let mut new = NewFile::make(directory, OFlags::NOFOLLOW)
        .map_err(|error| not_made(&path, directory, error))?;
    new.file.write_all(bytes).map_err(failing(&path, "write"))?;
    // POSIX_FADV_DONTNEED begins to write what is dirty and does not wait (mm/fadvise.c). Where it
    // is not understood, `publish` waits longer.
    fadvise(&new.file, 0, None, Advice::DontNeed).ok();
    Ok(Staged { new, path })
}

/// A file of [`stage`]. Dropping it removes it.
pub struct Staged {
    new: NewFile,
    path: PathBuf,
}

impl Staged {
    /// Waits until its bytes are on the disk, and gives it its name: it is never there in part,
    /// even if the machine fails.
    ///
    /// # Errors
    /// As [`write()`].
    pub fn publish(self) -> Result<(), FileError> {
        self.new.file.sync_data().map_err(failing(&self.path, "sync to disk"))?;
        self.rename()
    }

    fn rename(self) -> Result<(), FileError> {
        let name = self.path.file_name().unwrap_or_default();
        self.new
            .rename(name)
            .map_err(|error| failing(&self.path, "rename into place")(error.into()))
    }
}

/// Removes a file. One that somebody has taken away is gone as well.
///
/// # Errors
/// When it is still there.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes what killed recorders left in a directory.
pub fn sweep(directory: &Path) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let Ok(listed) = openat(CWD, directory, flags, Mode::empty()) {
        locked_files::sweep(&listed, NAMING, &[geteuid().as_raw()], |name| {
            unlinkat(&listed, name, AtFlags::empty())
        });
    }
}

/// Checks, before anything is recorded, that [`write()`] to `path` will be able to make its file.
///
/// # Errors
/// As [`write()`].
pub fn check(path: &Path) -> Result<(), FileError> {
    Destination::of(path).map(drop)
}

/// True for what is written into, never replaced: a device, pipe or socket, also behind a link.
#[must_use]
pub fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

fn failing(path: &Path, step: &'static str) -> impl Fn(io::Error) -> FileError + use<> {
    let path = path.to_owned();
    move |source| FileError { path: path.clone(), step, source }
}

/// Why there is no new file for `path` in `directory`, in the words of who gave the path: the new
/// file's own name is nothing to them.
fn not_made(path: &Path, directory: &Path, error: Errno) -> FileError {
    let (step, source) = match error {
        // In /proc and /sys the kernel answers so to whoever makes a file.
        Errno::NOENT if directory.is_dir() => {
            ("its directory takes no files of anybody", error.into())
        }
        Errno::NOENT => {
            let todo = format!("create {} first", directory.display());
            ("its directory does not exist", io::Error::new(io::ErrorKind::NotFound, todo))
        }
        error => ("create a file in its directory", error.into()),
    };
    failing(path, step)(source)
}

/// Where bytes for a path go.
enum Destination<'a> {
    /// A device, pipe or socket, also behind a link (`/dev/null`, `/dev/stdout`): written into,
    /// never replaced.
    Special,
    /// A new file in the path's directory, and the name it gets in the end.
    Beside(NewFile, &'a OsStr),
}

impl<'a> Destination<'a> {
    /// Makes the new file, too. What killed recorders left in the directory goes.
    fn of(path: &'a Path) -> Result<Self, FileError> {
        let fail = |step| failing(path, step);
        if is_stdout(path) {
            return Ok(Self::Special);
        }
        let Some(name) = path.file_name() else {
            let todo = io::Error::new(io::ErrorKind::InvalidInput, "give the path of a file");
            return Err(fail("the path has no file name")(todo));
        };
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => {
                let todo =
                    io::Error::new(io::ErrorKind::IsADirectory, "give the path of a file in it");
                return Err(fail("it is a directory")(todo));
            }
            Ok(found) if !found.is_file() => return Ok(Self::Special),
            // A file that is somebody's open descriptor, such as /dev/stdout under a redirection:
            // the link must stay.
            Ok(_) if is_descriptor(path) => return Ok(Self::Special),
            _ => {}
        }
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sweep(directory);
        let new = NewFile::make(directory, OFlags::empty())
            .map_err(|error| not_made(path, directory, error))?;
        Ok(Self::Beside(new, name))
    }
}

/// True for a name in procfs, also behind links of /dev: `/dev/stdout` is `/proc/self/fd/1`.
fn is_descriptor(path: &Path) -> bool {
    let directory = |path: &Path| path.parent().and_then(|parent| parent.canonicalize().ok());
    let target = std::fs::read_link(path)
        .ok()
        .filter(|_| directory(path).is_some_and(|at| at == Path::new("/dev")));
    directory(target.as_deref().unwrap_or(path)).is_some_and(|at| at.starts_with("/proc"))
}

/// A file that is not yet where it belongs. Dropping it removes it.
struct NewFile {
    directory: OwnedFd,
    /// Its name so far; `None` once it has its own.
    name: Option<String>,
    /// Locked, so that no sweep takes it.
    file: File,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // What cannot be removed is for the next sweep.
            unlinkat(&self.directory, name, AtFlags::empty()).ok();
        }
    }
}

impl NewFile {
    /// A file that did not exist before (O_EXCL), in a directory that is opened with these flags,
    /// too; readable by its owner and, by umask, others.
    fn make(directory: &Path, more: OFlags) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | more;
        let directory = openat(CWD, directory, flags, Mode::empty())?;
        for _ in 0..ATTEMPTS {
            let name = NAMING.fresh()?;
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = openat(&directory, &name, flags, Mode::from_raw_mode(0o644))?;
            let new = Self {
                directory: directory.try_clone().map_err(errno)?,
                name: Some(name),
                file: file.into(),
            };
            match locked_files::hold(&new.file) {
                Ok(false) => {}
                // On a file system without locks nobody can sweep either: it asks for the lock,
                // too.
                Ok(true) | Err(_) => return Ok(new),
            }
        }
        Err(Errno::BUSY)
    }

    fn rename(mut self, to: &OsStr) -> Result<(), Errno> {
        let Some(name) = &self.name else { return Ok(()) };
        renameat(&self.directory, name, &self.directory, to)?;
        self.name = None;
        Ok(())
    }

    /// The directory opened for reading, which may be forbidden where making files in it is not.
    fn listed(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(&self.directory, ".", flags, Mode::empty()).ok()
    }
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_is_written_over_and_nothing_else_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.pb.gz");
        check(&path).unwrap();
        assert!(names(directory.path()).is_empty());
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(names(directory.path()), ["a.pb.gz"]);
    }

    #[test]
    fn what_a_killed_recorder_left_goes_and_what_a_living_one_needs_stays() {
        let directory = tempfile::tempdir().unwrap();
        let left = ".perfusion-0123456789abcdef.tmp";
        std::fs::write(directory.path().join(left), "half").unwrap();
        let path = directory.path().join("a.pb.gz");
        let Destination::Beside(living, _) = Destination::of(&path).unwrap() else {
            panic!("a device?")
        };
        assert!(!names(directory.path()).contains(&left.to_owned()));
        check(&path).unwrap();
        assert_eq!(names(directory.path()), [living.name.clone().unwrap()]);
        drop(living);
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn a_descriptor_of_a_file_is_written_into_and_its_link_stays() {
        use std::os::fd::AsRawFd as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("redirected");
        let file = File::create(&path).unwrap();
        // /dev/fd is a link to /proc/self/fd.
        for by in ["/proc/self/fd", "/dev/fd"] {
            let descriptor = PathBuf::from(format!("{by}/{}", file.as_raw_fd()));
            check(&descriptor).unwrap();
            write(&descriptor, by.as_bytes()).unwrap();
            assert!(std::fs::read(&path).unwrap().starts_with(by.as_bytes()));
            assert_eq!(std::fs::read_link(&descriptor).unwrap(), path);
        }
        assert!(is_descriptor(Path::new("/dev/stdout")) && !is_descriptor(&path));
    }

    #[test]
    fn a_link_is_replaced_and_its_target_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let victim = directory.path().join("victim");
        std::fs::write(&victim, "keep").unwrap();
        let path = directory.path().join("out");
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"keep");
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn errors_name_the_path_and_leave_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("no/such/out.pb.gz");
        let error = write(&missing, b"x").unwrap_err().to_string();
        let expected = format!(
            "cannot write {}: its directory does not exist: create {} first",
            missing.display(),
            missing.parent().unwrap().display()
        );
        assert_eq!(error, expected);
        assert_eq!(
            write_into(missing.parent().unwrap(), "out.pb.gz", b"x").unwrap_err().to_string(),
            expected
        );
        let refused = write(Path::new("/proc/out.pb.gz"), b"x").unwrap_err();
        assert_eq!(refused.step, "its directory takes no files of anybody");
        let expected = format!(
            "cannot write {}: it is a directory: give the path of a file in it",
            directory.path().display()
        );
        assert_eq!(write(directory.path(), b"x").unwrap_err().to_string(), expected);
        assert_eq!(check(directory.path()).unwrap_err().to_string(), expected);
        assert!(write(Path::new("/"), b"x").is_err());
        let below_a_file = write(Path::new("/proc/self/status/out.pb.gz"), b"x").unwrap_err();
        assert_eq!(below_a_file.source.kind(), io::ErrorKind::NotADirectory);
        assert!(names(directory.path()).is_empty());
    }
}
