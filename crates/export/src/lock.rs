//! One process at a time uses a directory of profiles or a spool: two would send and remove what is the other's. A lock of a file in it (flock)
//! says so to all processes that see the directory, in whatever container; it goes with the process, however that ends.
//!
//! Within a process the lock is shared: while a reload puts other sinks in place of those at work, both have it, and take turns.

use super::file::FileError;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The file's name.
pub const NAME: &str = ".perfusion.lock";
/// How often the file is made, when another process takes an empty directory away with it.
const ATTEMPTS: u32 = 10;

/// What this process holds, by the file's path. A file system may take long over a lock: meanwhile nobody waits but for the same one.
static HELD: Mutex<BTreeMap<PathBuf, Arc<Mutex<Weak<Lock>>>>> = Mutex::new(BTreeMap::new());

/// A directory is this process's for as long as any of these lives.
#[derive(Debug)]
pub struct Lock {
    /// The lock goes when it is closed.
    file: File,
}

/// Takes the lock of a directory that is there. On a file system that knows no locks nobody is kept out.
///
/// # Errors
/// When another process has it, or its file cannot be made.
pub fn hold(directory: &Path) -> Result<Arc<Lock>, FileError> {
    let fail = |step, source: io::Error| FileError { path: directory.join(NAME), step, source };
    let path =
        fs::canonicalize(directory).map_err(|source| fail("look for its directory", source))?.join(NAME);
    let held = slot(&path);
    let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
    // One of a file that somebody removed keeps nobody out.
    if let Some(lock) = held.upgrade().filter(|lock| is_of(lock, &path)) {
        return Ok(lock);
    }
    let file = take(&path).map_err(|error| match error {
        Errno::WOULDBLOCK => {
            let todo =
                "another process uses this directory: give each daemon one of its own, or end the other one";
            fail("lock", io::Error::new(io::ErrorKind::WouldBlock, todo))
        }
        error => fail("make the lock's file", error.into()),
    })?;
    let lock = Arc::new(Lock { file });
    *held = Arc::downgrade(&lock);
    Ok(lock)
}

/// Where a file's lock is, or will be. Of those that nobody has in hand, and that hold no lock, none stays.
fn slot(path: &Path) -> Arc<Mutex<Weak<Lock>>> {
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    held.retain(|_, slot| {
        Arc::strong_count(slot) > 1 || slot.try_lock().is_ok_and(|lock| lock.strong_count() > 0)
    });
    Arc::clone(held.entry(path.to_owned()).or_default())
}

fn is_of(lock: &Lock, path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|there| lock.is_file(&there))
}

impl Lock {
    /// True for what is known of the lock's own file.
    #[must_use]
    pub fn is_file(&self, there: &fs::Metadata) -> bool {
        let id = |found: &fs::Metadata| (found.dev(), found.ino());
        self.file.metadata().is_ok_and(|ours| id(&ours) == id(there))
    }
}

fn take(path: &Path) -> Result<File, Errno> {
    // Nobody's link or pipe leads elsewhere. A file open for writing would keep the file system from being made read-only.
    let flags = OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut access = OFlags::RDONLY;
    for _ in 0..ATTEMPTS {
        let file = File::from(openat(CWD, path, flags | access, Mode::RUSR | Mode::WUSR)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // A lock of a file that is gone keeps nobody out.
            Ok(()) if fstat(&file)?.st_nlink == 0 => {}
            Err(Errno::WOULDBLOCK) => return Err(Errno::WOULDBLOCK),
            // NFS wants it open for writing.
            Err(Errno::BADF) if access == OFlags::RDONLY => access = OFlags::RDWR,
            Ok(()) | Err(_) => return Ok(file),
        }
    }
    Err(Errno::BUSY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_shared_within_the_process_and_refused_to_others() {
        let directory = tempfile::tempdir().unwrap();
        // Whoever opens the file anew is to a lock as another process is.
        let elsewhere = || take(&directory.path().join(NAME));
        let (old, new) = (hold(directory.path()).unwrap(), hold(&directory.path().join(".")).unwrap());
        assert!(Arc::ptr_eq(&old, &new));
        drop(old);
        assert_eq!(elsewhere().unwrap_err(), Errno::WOULDBLOCK);
        drop(new);
        let other = elsewhere().unwrap();
        let error = hold(directory.path()).unwrap_err().to_string();
        let path = directory.path().join(NAME);
        assert!(error.contains(path.to_str().unwrap()) && error.contains("one of its own"), "{error}");
        drop(other);
        hold(directory.path()).unwrap();
    }

    #[test]
    fn a_lock_that_takes_long_holds_up_nobody_elsewhere() {
        let [slow, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let slow = slot(&slow.path().canonicalize().unwrap().join(NAME));
        let taking = slow.lock().unwrap();
        hold(other.path()).unwrap();
        drop(taking);
        drop(slow);
    }

    #[test]
    fn many_that_take_one_at_once_share_it() {
        let directory = tempfile::tempdir().unwrap();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = directory.path().to_owned();
                std::thread::spawn(move || hold(&path).map_err(|error| error.to_string()))
            })
            .collect();
        let locks: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
        assert!(locks.iter().all(|lock| Arc::ptr_eq(lock, &locks[0])));
    }

    #[test]
    fn what_lies_in_the_place_of_the_file_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = directory.path().join("elsewhere");
        std::os::unix::fs::symlink(&elsewhere, directory.path().join(NAME)).unwrap();
        assert!(hold(directory.path()).is_err());
        assert!(!elsewhere.exists());
    }
}
