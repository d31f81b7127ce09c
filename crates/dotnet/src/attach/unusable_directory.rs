//! Why a directory is not used for the shim.

use perfusion_host::system_limits::{name, remedy};
use perfusion_model::text::printable;
use rustix::io::Errno;
use std::fmt;
use std::path::PathBuf;

/// Why a directory is not used.
#[derive(Debug)]
pub enum UnusableDirectory {
    /// A system call failed.
    System(&'static str, Errno),
    /// The file system of a user namespace that has no number for any user of ours (EOVERFLOW), and
    /// we may not become the process's user, who has one.
    UnknownUser,
    /// Mounted noexec: the loader could not map the library.
    NoExec,
    /// Mounted read-only.
    ReadOnly,
    /// It, or a directory or link on the way to it, belongs to somebody who has no say about the
    /// process.
    Owner {
        /// Which.
        path: PathBuf,
        /// Whose it is.
        uid: u32,
    },
    /// Others may rename files in it, or in a directory on the way (writable for group or others
    /// without the sticky bit).
    NotSticky {
        /// Which.
        path: PathBuf,
    },
    /// Others may make files in it, now or when the library has gone.
    Shared,
    /// Its path has characters that the profiler list of the environment cannot hold, or is no
    /// UTF-8.
    Unquotable,
}

impl std::error::Error for UnusableDirectory {}

impl fmt::Display for UnusableDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System(step, source) => match name(source.raw_os_error()) {
                Some(name) => write!(f, "{step}: {source} [{name}]"),
                None => write!(f, "{step}: {source}"),
            },
            Self::UnknownUser => write!(
                f,
                "create: {}: its file system knows no user of ours; that takes CAP_SETUID and \
                 CAP_SETGID",
                Errno::OVERFLOW
            ),
            Self::NoExec => f.write_str("mounted noexec"),
            Self::ReadOnly => f.write_str("mounted read-only"),
            Self::Owner { path, uid } => write!(
                f,
                "{} belongs to user {uid}, who is neither root nor the process's own",
                printable(&path.to_string_lossy())
            ),
            Self::NotSticky { path } => write!(
                f,
                "{} is writable for group or others without the sticky bit",
                printable(&path.to_string_lossy())
            ),
            Self::Shared => f.write_str("others than its owner may write in it"),
            Self::Unquotable => f.write_str(
                "its path is not UTF-8, has `;` or `=` in it, or, for a start, is not ASCII or too \
                 long",
            ),
        }
    }
}

/// Directories that were tried, and what was wrong with each.
pub struct TriedDirectories<'a, E>(pub &'a [(PathBuf, E)]);

impl<E: fmt::Display> fmt::Display for TriedDirectories<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (path, why)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {why}", printable(&path.to_string_lossy()))?;
        }
        Ok(())
    }
}

/// What to do where a limit on open files is what was wrong with one of them.
pub(super) fn advice(tried: &[(PathBuf, UnusableDirectory)]) -> String {
    let limited = tried.iter().find_map(|(_, why)| match why {
        UnusableDirectory::System(_, errno @ (Errno::MFILE | Errno::NFILE)) => {
            remedy(errno.raw_os_error())
        }
        _ => None,
    });
    limited.map_or_else(String::new, |remedy| format!(": {remedy}"))
}
