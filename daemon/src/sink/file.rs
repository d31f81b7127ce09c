//! Files that appear whole or not at all: written to a new file beside the target, synced, renamed.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// How many names are tried for the temporary file before something is wrong with the directory.
const ATTEMPTS: u32 = 100;

/// A file was not written; nothing of it is left.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {step}: {source}", path.display())]
pub struct FileError {
    /// The target.
    pub path: PathBuf,
    /// What failed.
    pub step: &'static str,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// Writes `bytes` to `path`, over what is there. A symbolic link to a file is replaced, not followed; a device or pipe is written into.
///
/// # Errors
/// When the directory cannot be written, the disk is full, or `path` is a directory. Nothing partial is left.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let fail = |step| move |source| FileError { path: path.to_owned(), step, source };
    let Some(name) = path.file_name() else {
        return Err(fail("the path has no file name")(io::ErrorKind::InvalidInput.into()));
    };
    if path.is_dir() {
        return Err(fail("it is a directory")(io::ErrorKind::IsADirectory.into()));
    }
    if is_special(path) {
        let mut special = OpenOptions::new().write(true).open(path).map_err(fail("open"))?;
        return special.write_all(bytes).map_err(fail("write"));
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (mut file, temporary) = create_beside(directory, name).map_err(fail("new file beside it"))?;
    let written = file
        .write_all(bytes)
        .map_err(fail("write"))
        .and_then(|()| file.sync_all().map_err(fail("sync to disk")))
        .and_then(|()| std::fs::rename(&temporary, path).map_err(fail("rename into place")));
    if written.is_err() {
        // The first error is the one to report; a leftover that cannot be removed is as well named by it.
        std::fs::remove_file(&temporary).ok();
        return written;
    }
    // The name itself must survive a crash too. Some file systems cannot sync a directory: the file is complete anyway.
    File::open(directory).and_then(|directory| directory.sync_all()).ok();
    Ok(())
}

/// Checks, before anything is recorded, that [`write()`] to `path` will be able to make its file.
///
/// # Errors
/// As [`write()`].
pub fn check(path: &Path) -> Result<(), FileError> {
    let fail = |step| move |source| FileError { path: path.to_owned(), step, source };
    let Some(name) = path.file_name() else {
        return Err(fail("the path has no file name")(io::ErrorKind::InvalidInput.into()));
    };
    if path.is_dir() {
        return Err(fail("it is a directory")(io::ErrorKind::IsADirectory.into()));
    }
    if is_special(path) {
        return Ok(());
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (_, temporary) = create_beside(directory, name).map_err(fail("new file beside it"))?;
    std::fs::remove_file(temporary).map_err(fail("remove the test file"))
}

/// True for a device, pipe or socket, also behind a link (`/dev/null`, `/dev/stdout`): written into, never replaced.
fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir())
}

/// A file that did not exist before (O_EXCL), readable by its owner and, by umask, others.
fn create_beside(directory: &Path, name: &std::ffi::OsStr) -> io::Result<(File, PathBuf)> {
    let pid = std::process::id();
    for attempt in 0..ATTEMPTS {
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{pid}.{attempt}.tmp"));
        let temporary = directory.join(temporary);
        match OpenOptions::new().write(true).create_new(true).mode(0o644).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{ATTEMPTS} temporary files are in the way")))
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
        assert!(error.contains("no/such/out.pb.gz"), "{error}");
        assert!(write(directory.path(), b"x").is_err());
        assert!(check(directory.path()).is_err());
        assert!(write(Path::new("/"), b"x").is_err());
        assert!(names(directory.path()).is_empty());
    }
}
