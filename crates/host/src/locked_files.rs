//! Files that must not outlive a recorder, however it ends: each is locked (flock) for as long as
//! somebody needs it, so one with our kind of name that nobody locks was left behind by a crash. A
//! lock tells more than a pid in the name: the recorder may live in another pid namespace, and its
//! pid may be somebody else's by now.

use rustix::fs::{Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd;

/// Entries of a directory looked at by a sweep, at most.
const DIRECTORY_ENTRIES: usize = 65_536;

/// How the files are called: `prefix`, 16 random hexadecimal digits, `suffix`.
#[derive(Clone, Copy, Debug)]
pub struct LockedFileName {
    /// Before the digits.
    pub prefix: &'static str,
    /// After the digits.
    pub suffix: &'static str,
}

impl LockedFileName {
    /// A name nobody can guess.
    ///
    /// # Errors
    /// When `/dev/urandom` cannot be read.
    pub fn fresh(self) -> Result<String, Errno> {
        Ok(format!("{}{:016x}{}", self.prefix, random()?, self.suffix))
    }

    /// True for a name of this kind.
    #[must_use]
    pub fn fits(self, name: &str) -> bool {
        let digits = name.strip_prefix(self.prefix).and_then(|rest| rest.strip_suffix(self.suffix));
        digits.is_some_and(|digits| {
            digits.len() == 16
                && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        })
    }
}

/// A number nobody can guess.
///
/// # Errors
/// When `/dev/urandom` cannot be read.
pub fn random() -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Locks a file that was just made. False when a sweep came between: then the file is gone already,
/// and another has to be made.
///
/// # Errors
/// When the file system knows no locks.
pub fn hold(file: impl AsFd) -> Result<bool, Errno> {
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fstat(&file)?.st_nlink != 0),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes from `directory`, with `unlink`, the regular files of these owners that are called so
/// and that nobody holds. Returns how many.
pub fn sweep(
    directory: impl AsFd,
    naming: LockedFileName,
    owners: &[u32],
    unlink: impl Fn(&str) -> Result<(), Errno>,
) -> usize {
    let Ok(entries) = Dir::read_from(&directory) else { return 0 };
    let names = entries.take(DIRECTORY_ENTRIES).map_while(Result::ok);
    let left = |name: &str| naming.fits(name) && remove(directory.as_fd(), name, owners, &unlink);
    names.filter(|entry| entry.file_name().to_str().is_ok_and(left)).count()
}

fn remove(
    directory: impl AsFd,
    name: &str,
    owners: &[u32],
    unlink: impl Fn(&str) -> Result<(), Errno>,
) -> bool {
    // What the name stands for is looked at without following a link, and without waiting for the
    // other end of a pipe.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let Ok(file) = openat(&directory, name, flags, Mode::empty()) else { return false };
    let Ok(status) = fstat(&file) else { return false };
    FileType::from_raw_mode(status.st_mode) == FileType::RegularFile
        && owners.contains(&status.st_uid)
        && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        && unlink(name).is_ok()
}

#[cfg(test)]
mod tests {
    use super::{LockedFileName, hold};
    use std::fs::File;
    use std::os::unix::fs::symlink;

    const NAMING: LockedFileName = LockedFileName { prefix: "ours-", suffix: ".x" };

    #[test]
    fn the_sweep_removes_what_a_crash_left_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let held = File::create(at(&NAMING.fresh().unwrap())).unwrap();
        assert!(hold(&held).unwrap());
        File::create(at("ours-0123456789abcdef.x")).unwrap();
        File::create(at("ours-0123456789abcdeg.x")).unwrap();
        File::create(at("ours-0123456789abcdef.y")).unwrap();
        File::create(at("victim")).unwrap();
        symlink(at("victim"), at("ours-fedcba9876543210.x")).unwrap();
        std::fs::create_dir(at("ours-00000000000000dd.x")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("ours-00000000000000ff.x"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let me = rustix::process::geteuid().as_raw();
        let directory = File::open(folder.path()).unwrap();
        let unlink =
            |name: &str| rustix::fs::unlinkat(&directory, name, rustix::fs::AtFlags::empty());
        let sweep = |owner| super::sweep(&directory, NAMING, &[owner], unlink);
        assert_eq!(sweep(me + 1), 0, "another user's");
        assert_eq!(sweep(me), 1);
        assert!(!at("ours-0123456789abcdef.x").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 7);
        drop(held);
        assert_eq!(sweep(me), 1, "nobody holds it any more");
    }

    #[test]
    fn a_file_that_was_swept_before_it_was_held_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(!hold(&file).unwrap());
    }
}
