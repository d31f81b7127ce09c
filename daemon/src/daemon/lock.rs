//! The file that only one daemon of a host can hold.

use crate::error::Error;
use rustix::fs::{FlockOperation, Mode as FileMode, OFlags, flock, open};
use rustix::io::Errno;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

/// Holds the file that only one daemon can hold.
pub(super) fn hold(directory: &Path) -> Result<File, Error> {
    let path = directory.join("daemon.lock");
    let failed = |source| Error::LockFile { path: path.clone(), source };
    DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
    // Where others may write, one may lay a link or a pipe there: what it leads to is not ours to
    // touch.
    let flags =
        OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut file = match open(&path, flags, FileMode::RUSR | FileMode::WUSR) {
        Ok(file) => File::from(file),
        Err(Errno::LOOP) => {
            return Err(failed(io::Error::other("it is a symbolic link: remove it")));
        }
        Err(error) => return Err(failed(error.into())),
    };
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() || found.nlink() != 1 || found.uid() != rustix::process::geteuid().as_raw()
    {
        return Err(failed(io::Error::other("it is not a file of this daemon's own: remove it")));
    }
    // Whoever may read it could take the lock; one that is there already may be anybody's to read.
    file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut pid = String::new();
        // Its pid is for people; without it the message is still right.
        (&mut file).take(16).read_to_string(&mut pid).ok();
        return Err(Error::AlreadyRuns { pid: pid.trim().to_owned(), path });
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::hold;
    use rustix::fs::{CWD, FileType, Mode};
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn the_file_that_one_daemon_holds_is_nobody_elses_to_open() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("daemon.lock");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let first = hold(directory.path()).unwrap();
        assert_eq!(mode(), 0o600);
        let error = hold(directory.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        // What others have put there is not touched, wherever it leads.
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "kept").unwrap();
        let refused = |lay: &dyn Fn()| {
            std::fs::remove_file(&path).unwrap();
            lay();
            let error = hold(directory.path()).unwrap_err();
            let why = std::error::Error::source(&error).unwrap().to_string();
            assert!(why.contains("remove it"), "{error}: {why}");
            assert_eq!(std::fs::read_to_string(&secret).unwrap(), "kept");
        };
        refused(&|| std::os::unix::fs::symlink(&secret, &path).unwrap());
        refused(&|| std::fs::hard_link(&secret, &path).unwrap());
        refused(&|| rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap());
        std::fs::remove_file(&path).unwrap();
        drop(hold(directory.path()).unwrap());
        // Of a daemon that was not so careful.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        hold(directory.path()).unwrap();
        assert_eq!(mode(), 0o600);
    }
}
