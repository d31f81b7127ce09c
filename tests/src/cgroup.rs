//! A control group of one test.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::environment::cgroup2;

/// A cgroup v2 directory, removed when dropped. It must be empty by then: tests end their processes first.
pub struct Group(PathBuf);

impl Group {
    /// Makes it, at the top of the hierarchy.
    ///
    /// # Errors
    /// Without a cgroup v2 hierarchy that may be written.
    pub fn new(name: &str) -> io::Result<Self> {
        let root = cgroup2().ok_or_else(|| io::Error::other("no cgroup v2 hierarchy"))?;
        let path = root.join(name);
        // A run that was killed leaves those whose names are the same each time. One with processes in it stays, and is an error.
        fs::remove_dir(&path).ok();
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into it.
    ///
    /// # Errors
    /// As the kernel says.
    pub fn take(&self, pid: u32) -> io::Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Not empty after a failed test, whose processes end later.
        fs::remove_dir(&self.0).ok();
    }
}
