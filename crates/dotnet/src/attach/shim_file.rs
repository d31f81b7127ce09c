//! The shim's file in a directory of a process: its name, and making and removing it by this
//! process's own rights.

use perfusion_host::locked_files::LockedFileName;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// What the library's files are called.
pub(super) const NAMING: LockedFileName =
    LockedFileName { prefix: "perfusion-shim-", suffix: ".so" };

/// True for the name of a file of the library, deleted or not.
pub fn is_ours(file_name: &str) -> bool {
    file_name.starts_with(NAMING.prefix)
}

/// Makes a file that was not there, by this process's own rights.
///
/// # Errors
/// The system call's.
pub(super) fn create(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(directory, name, flags, Mode::RUSR | Mode::WUSR)
}

/// Removes a regular file, by this process's own rights.
///
/// # Errors
/// The system call's; `INVAL` for what is no regular file.
pub(super) fn remove(directory: impl AsFd, name: &str) -> Result<(), Errno> {
    let status = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    unlinkat(&directory, name, AtFlags::empty())
}
