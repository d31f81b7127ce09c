//! What becomes of a process after it was asked for something that costs it memory. A process that
//! dies within seconds of a request may have died of it, and whoever made the request is to say so.

use super::ExitPoller;
use super::headroom::{MemoryCgroups, OomKills};
use crate::process::handle::ProcessHandle;
use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// An end that comes later than this after a request is not put down to it.
pub const SOON: Duration = Duration::from_secs(10);
/// Between looks at whether it lives.
const LOOK: Duration = Duration::from_millis(20);
/// A process is gone a moment before its cgroup has counted the kill.
const COUNTED: Duration = Duration::from_millis(200);

/// A process that something was asked of.
pub struct SurvivalCheck {
    pid: u32,
    what: &'static str,
    asked: Instant,
    process: ExitPoller,
    cgroups: MemoryCgroups,
    kills: OomKills,
    /// When it was first seen to be gone.
    gone: OnceLock<Instant>,
}

/// It ended soon after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeathAfterRequest {
    /// Its pid.
    pub pid: u32,
    /// What was asked of it.
    pub what: &'static str,
    /// How long before it was seen to be gone.
    pub after: Duration,
    /// The cgroup in which the kernel has killed for want of memory meanwhile.
    pub killed_in: Option<PathBuf>,
}

impl fmt::Display for DeathAfterRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, what, after, killed_in } = self;
        let after = after.as_secs_f64();
        match killed_in {
            Some(cgroup) => write!(
                f,
                "process {pid} was killed {after:.1} s after perfusion asked for {what}: the \
                 kernel counted a kill for want of memory in \
                 its cgroup {} (oom_kill). What perfusion asked for takes memory there and may be \
                 the cause",
                cgroup.display()
            ),
            None => write!(
                f,
                "process {pid} ended {after:.1} s after perfusion asked for {what}: no kill for \
                 want of memory was counted in its cgroups"
            ),
        }
    }
}

impl SurvivalCheck {
    /// From now on. `what` is asked for.
    #[must_use]
    pub fn of(target: &ProcessHandle, what: &'static str) -> Self {
        let cgroups = MemoryCgroups::of(target);
        let kills = cgroups.oom_kills();
        let pid = target.pid();
        let (asked, process) = (Instant::now(), ExitPoller::new(pid));
        Self { pid, what, asked, process, cgroups, kills, gone: OnceLock::new() }
    }

    /// The process that was asked.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True when it was asked longer ago than this.
    #[must_use]
    pub fn is_older_than(&self, age: Duration) -> bool {
        self.asked.elapsed() > age
    }

    /// Whether it has been seen to be gone, or is gone now. Why may not be known yet.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        if self.gone.get().is_none() && !self.process.is_running() {
            self.gone.get_or_init(Instant::now);
        }
        self.gone.get().is_some()
    }

    /// Its end, once it is gone and its cgroup has had time to count a kill. Does not wait.
    #[must_use]
    pub fn death_by_now(&self) -> Option<DeathAfterRequest> {
        if !self.is_gone() {
            return None;
        }
        let gone = *self.gone.get()?;
        let killed_in = self.cgroups.killed_since(&self.kills);
        if killed_in.is_none() && gone.elapsed() < COUNTED {
            return None;
        }
        let after = gone.saturating_duration_since(self.asked);
        Some(DeathAfterRequest { pid: self.pid, what: self.what, after, killed_in })
    }

    /// Whether it is gone by now, or goes within `wait`. Takes somewhat longer where it does.
    #[must_use]
    pub fn death(&self, wait: Duration) -> Option<DeathAfterRequest> {
        let until = Instant::now() + wait;
        loop {
            let death = self.death_by_now();
            if death.is_some() || !self.is_gone() && Instant::now() >= until {
                return death;
            }
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DeathAfterRequest, SurvivalCheck};
    use crate::process::handle::ProcessHandle;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    #[test]
    fn an_end_is_seen_and_nobody_is_blamed_for_one_that_no_cgroup_counts() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let aftermath = SurvivalCheck::of(&ProcessHandle::open(child.id()).unwrap(), "a survey");
        assert_eq!(aftermath.death(Duration::ZERO), None);
        drop(child.stdin.take());
        let death = aftermath.death(Duration::from_secs(60)).unwrap();
        child.wait().unwrap();
        assert_eq!((death.pid, death.what), (child.id(), "a survey"));
    }

    #[test]
    fn a_kill_names_the_cgroup() {
        let death = DeathAfterRequest {
            pid: 7,
            what: "a survey of its heap",
            after: Duration::from_millis(1500),
            killed_in: Some("/pods/x".into()),
        };
        let said = death.to_string();
        assert!(
            said.contains("process 7 was killed 1.5 s after") && said.contains("/pods/x"),
            "{said}"
        );
        let said = DeathAfterRequest { killed_in: None, ..death }.to_string();
        assert!(said.contains("process 7 ended 1.5 s after"), "{said}");
    }
}
