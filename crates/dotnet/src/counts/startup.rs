//! The session that makes a runtime count from its first object on. A runtime checks once at its
//! start, before any tool can connect, whether a session enables allocation events
//! (`ETW::TypeSystemLog::PostRegistrationInit` of dotnet/runtime). So the environment of the
//! programs begins such a session. Its output is discarded: its file is a link to `/dev/null`, in a
//! directory that is removed when the recording ends.
//!
//! Nothing waits for that file. Where the directory cannot be seen, or is gone, the runtime has no
//! such session and does not count.

use super::TypeEventRate;
use crate::attach::ipc::RUNTIME_PROVIDER;
use crate::attach::shim_copy;
use crate::attach::unusable_directory::{TriedDirectories, UnusableDirectory};
use perfusion_host::locked_files::{self, LockedFileName};
use perfusion_host::process::handle::ProcessHandle;
use rustix::fs::{
    AtFlags, Dir, FlockOperation, Mode, OFlags, flock, fstat, mkdirat, openat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

const NAMING: LockedFileName = LockedFileName { prefix: "perfusion-counts-", suffix: ".d" };
const LINK: &str = "null";
/// Entries of a directory that a sweep looks at, at most.
const DIRECTORY_ENTRIES: usize = 65_536;

/// The runtime's variables. A program has one such session, so one that is there already stays.
const ENABLE: &str = "DOTNET_EnableEventPipe";
const OUTPUT: &str = "DOTNET_EventPipeOutputPath";

/// The programs cannot have such a session.
#[derive(Debug, thiserror::Error)]
pub enum StartupError {
    /// No directory can hold its file.
    #[error("no directory for the runtimes' start session: {}", TriedDirectories(tried))]
    NoDirectory {
        /// Each directory, and what was wrong with it.
        tried: Vec<(PathBuf, io::Error)>,
    },
    /// Its only place is taken.
    #[error(
        "{ENABLE} is set in this environment, and --alloc-counts needs it for itself: expected it \
         unset; run `env -u {ENABLE} perfusion record …`"
    )]
    Taken,
}

/// The directory. Dropping it removes it, and programs that start later do not count.
#[derive(Debug)]
pub struct StartupSession {
    parent: OwnedFd,
    name: String,
    path: PathBuf,
    rate: TypeEventRate,
    /// Holds the lock that tells the sweep of another recorder to leave the directory alone.
    directory: OwnedFd,
}

impl StartupSession {
    /// Makes the directory, after removing those of killed recorders.
    ///
    /// # Errors
    /// See [`StartupError`].
    pub fn open(rate: TypeEventRate) -> Result<Self, StartupError> {
        if std::env::var_os(ENABLE).is_some_and(|value| value != "0") {
            return Err(StartupError::Taken);
        }
        let mut tried = Vec::new();
        let me = ProcessHandle::open(std::process::id()).map_err(|error| {
            StartupError::NoDirectory { tried: vec![("/proc/self".into(), error.into())] }
        })?;
        for (path, made) in shim_copy::checked_start_directories(&me) {
            match made
                .map_err(|why: UnusableDirectory| io::Error::other(why))
                .and_then(|found| Self::make(&found, rate))
            {
                Ok(session) => return Ok(session),
                Err(why) => tried.push((path, why)),
            }
        }
        Err(StartupError::NoDirectory { tried })
    }

    fn make(directory: &Path, rate: TypeEventRate) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let parent = openat(rustix::fs::CWD, directory, flags, Mode::empty())?;
        sweep(&parent);
        let name = NAMING.fresh()?;
        mkdirat(&parent, &name, Mode::RWXU)?;
        let made = openat(&parent, &name, flags, Mode::empty())?;
        let session = Self { parent, path: directory.join(&name), name, rate, directory: made };
        if !locked_files::hold(&session.directory)? {
            return Err(Errno::WOULDBLOCK.into());
        }
        symlinkat("/dev/null", &session.directory, LINK)?;
        // Programs of root may become other users.
        let mode = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
        rustix::fs::fchmod(&session.directory, mode)?;
        Ok(session)
    }

    /// What a program and its children must have in their environment.
    #[must_use]
    pub fn environment(&self) -> Vec<(OsString, OsString)> {
        let config = format!("{RUNTIME_PROVIDER}:{:#x}:{}", self.rate.keyword(), super::LEVEL);
        let mut variables: Vec<(OsString, OsString)> = [
            (ENABLE, "1"),
            ("DOTNET_EventPipeConfig", &config),
            // Nobody reads it: no list of methods at the end, no stacks, no thread that writes, and
            // the least memory.
            ("DOTNET_EventPipeRundown", "0"),
            ("DOTNET_EventPipeEnableStackwalk", "0"),
            ("DOTNET_EventPipeOutputStreaming", "0"),
            ("DOTNET_EventPipeCircularMB", "1"),
        ]
        .map(|(name, value)| (name.into(), value.into()))
        .into();
        variables.push((OUTPUT.into(), self.path.join(LINK).into()));
        variables
    }
}

impl Drop for StartupSession {
    fn drop(&mut self) {
        remove(&self.parent, &self.directory, &self.name);
    }
}

/// What somebody else has removed already is as good.
fn remove(parent: &OwnedFd, directory: &OwnedFd, name: &str) -> bool {
    unlinkat(directory, LINK, AtFlags::empty()).ok();
    unlinkat(parent, name, AtFlags::REMOVEDIR).is_ok()
}

/// Removes directories of this kind that nobody holds any more. Returns how many.
fn sweep(parent: &OwnedFd) -> usize {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let me = rustix::process::geteuid().as_raw();
    let left = |name: &str| {
        let Ok(directory) = openat(parent, name, flags, Mode::empty()) else { return false };
        fstat(&directory).is_ok_and(|status| status.st_uid == me)
            && flock(&directory, FlockOperation::NonBlockingLockExclusive).is_ok()
            && remove(parent, &directory, name)
    };
    let Ok(entries) = Dir::read_from(parent) else { return 0 };
    let names = entries.take(DIRECTORY_ENTRIES).map_while(Result::ok);
    names
        .filter(|entry| {
            entry.file_name().to_str().is_ok_and(|name| NAMING.fits(name) && left(name))
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::{LINK, NAMING, OUTPUT, StartupSession};
    use crate::counts::TypeEventRate;
    use std::path::Path;

    #[test]
    fn programs_write_to_nowhere_while_the_recording_goes_on_and_cannot_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let session = StartupSession::make(folder.path(), TypeEventRate::High).unwrap();
        let environment = session.environment();
        let value = |name: &str| {
            let (_, value) = environment.iter().find(|(of, _)| of == name).unwrap();
            value.to_str().unwrap()
        };
        assert_eq!(value("DOTNET_EventPipeConfig"), "Microsoft-Windows-DotNETRuntime:0x200000:4");
        let output = Path::new(value(OUTPUT));
        std::fs::write(output, b"events").unwrap();
        assert_eq!(std::fs::read(output).unwrap(), b"");
        drop(session);
        assert!(std::fs::write(output, b"events").is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_a_killed_recorder_left_is_removed_by_the_next_one_and_what_is_held_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let held = StartupSession::make(folder.path(), TypeEventRate::Low).unwrap();
        let left = folder.path().join(NAMING.fresh().unwrap());
        std::fs::create_dir(&left).unwrap();
        std::os::unix::fs::symlink("/dev/null", left.join(LINK)).unwrap();
        let other = folder.path().join("other");
        std::fs::create_dir(&other).unwrap();
        let next = StartupSession::make(folder.path(), TypeEventRate::Low).unwrap();
        assert!(!left.exists() && other.exists());
        assert!(held.path.join(LINK).is_symlink() && next.path.join(LINK).is_symlink());
    }
}
