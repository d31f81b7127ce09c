//! A control group of one test.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::environment::{cgroup1, cgroup2};
use crate::wait::wait_until;

/// How long the kernel is given to take ended processes out of a group.
const DEADLINE: Duration = Duration::from_secs(30);

/// A cgroup v2 directory. When it is dropped, whatever is still in it is ended and it is removed.
pub struct Group(PathBuf);

impl Group {
    /// Makes it, at the top of the hierarchy.
    ///
    /// # Errors
    /// Without a cgroup v2 hierarchy that may be written.
    pub fn new(name: &str) -> io::Result<Self> {
        let root = cgroup2().ok_or_else(|| io::Error::other("no cgroup v2 hierarchy"))?;
        let path = root.join(name);
        // A run that was killed leaves those whose names are the same each time. One with processes
        // in it stays, and is an error.
        fs::remove_dir(&path).ok();
        fs::create_dir(&path)?;
        Ok(Self(path))
    }

    /// Makes one whose processes may have so much memory: beyond it they are throttled
    /// (`memory.high`), or ended where memory is version 1's, which knows nothing else.
    ///
    /// # Errors
    /// Where neither version's memory controller is there.
    pub fn with_memory(name: &str, bytes: u64) -> io::Result<Self> {
        if let Ok(group) = Self::new(name)
            && fs::write(group.0.join("memory.high"), bytes.to_string()).is_ok()
        {
            return Ok(group);
        }
        let root = cgroup1("memory").ok_or_else(|| io::Error::other("no memory controller"))?;
        fs::remove_dir(root.join(name)).ok();
        fs::create_dir(root.join(name))?;
        let group = Self(root.join(name));
        fs::write(group.0.join("memory.limit_in_bytes"), bytes.to_string())?;
        Ok(group)
    }

    /// Makes one of the hierarchy that has the memory controller, without a limit and without swap.
    ///
    /// # Errors
    /// Where neither version's memory controller is there.
    pub fn of_memory(name: &str) -> io::Result<Self> {
        if let Ok(group) = Self::new(name)
            && group.0.join("memory.max").exists()
        {
            fs::write(group.0.join("memory.swap.max"), "0").ok();
            return Ok(group);
        }
        let root = cgroup1("memory").ok_or_else(|| io::Error::other("no memory controller"))?;
        fs::remove_dir(root.join(name)).ok();
        fs::create_dir(root.join(name))?;
        let group = Self(root.join(name));
        fs::write(group.0.join("memory.swappiness"), "0").ok();
        Ok(group)
    }

    /// What its processes use, page cache included, bytes.
    ///
    /// # Errors
    /// Without a memory controller.
    pub fn memory_used(&self) -> io::Result<u64> {
        let told = ["memory.current", "memory.usage_in_bytes"]
            .map(|name| fs::read_to_string(self.0.join(name)));
        let told = told.into_iter().find_map(Result::ok).unwrap_or_default();
        told.trim().parse().map_err(io::Error::other)
    }

    /// Limits what its processes may use: beyond it the kernel ends one of them.
    ///
    /// # Errors
    /// Without a memory controller.
    pub fn limit_memory(&self, bytes: u64) -> io::Result<()> {
        let set = |name: &str| fs::write(self.0.join(name), bytes.to_string());
        if self.0.join("memory.max").exists() {
            set("memory.max")
        } else {
            set("memory.limit_in_bytes")
        }
    }

    /// How many of its processes the kernel has ended because they wanted more memory.
    ///
    /// # Errors
    /// Without a memory controller.
    pub fn ended_for_memory(&self) -> io::Result<u64> {
        let told = ["memory.events", "memory.oom_control"]
            .map(|name| fs::read_to_string(self.0.join(name)));
        let told = told.into_iter().find_map(Result::ok).unwrap_or_default();
        let count = told.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
        count.ok_or_else(|| io::Error::other("no count of oom_kill"))
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
        let empty = wait_until("the cgroup to be empty", DEADLINE, || {
            // A shell's children outlive it, and an app may be dropped later than its group.
            for pid in fs::read_to_string(self.0.join("cgroup.procs")).ok()?.lines() {
                if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw)
                    && pid != rustix::process::getpid()
                {
                    // Fails when it has ended meanwhile.
                    kill_process(pid, Signal::KILL).ok();
                }
            }
            // The kernel takes the last one out some time after its parent has heard of its end.
            fs::remove_dir(&self.0).ok()
        });
        if let Err(error) = empty {
            writeln!(io::stderr(), "{} stays: {error}", self.0.display()).ok();
        }
    }
}
