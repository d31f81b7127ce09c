//! What a recording does about the memory that it makes processes use: it looks before a program is
//! started with something that grows, while that grows, and at the ends of processes that the shim
//! was loaded into.

use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::headroom::{Headroom, MemoryCgroups, OomKills, mib};
use perfusion_host::process::survival::{DeathAfterRequest, SOON, SurvivalCheck};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What exact mode takes at the start of a program. Its tables grow with the objects that live.
pub const EXACT_BYTES: u64 = 64 << 20;
/// What counting by the runtime takes beside its buffer.
pub const COUNTS_BYTES: u64 = 8 << 20;
/// The smallest buffer that counting by the runtime is begun with, MiB.
const LEAST_COUNTS_MIB: u32 = 8;
/// Below so much of what is left a recording that makes a program use more and more ends.
const FLOOR: u64 = 16 << 20;

/// Longest that the reasons of ends are waited for, of processes that are gone already.
const REASONS: Duration = Duration::from_millis(300);
/// Processes that are watched after an attach, at most; each has a descriptor.
const MOST_ATTACHED: usize = 256;

/// There is too little memory for what a program would be started with.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// From the start on.
    #[error(
        "{what} takes {} of the program's memory or more, and {headroom}. The program was not \
         started, because the kernel might kill it. \
         Raise the limit, or use --force to go on all the same",
        mib(*needed)
    )]
    TooLittle {
        /// The option.
        what: &'static str,
        /// Bytes.
        needed: u64,
        /// What there is.
        headroom: Box<Headroom>,
    },
}

/// Refuses to start a program in the cgroups of this process with something that takes so many
/// bytes.
///
/// # Errors
/// [`MemoryError::TooLittle`].
pub fn check_start(what: &'static str, needed: u64, force: bool) -> Result<(), MemoryError> {
    enough(MemoryCgroups::own().headroom(), what, needed, force)
}

fn enough(
    headroom: Option<Headroom>,
    what: &'static str,
    needed: u64,
    force: bool,
) -> Result<(), MemoryError> {
    match headroom {
        Some(headroom) if headroom.bytes < needed && !force => {
            Err(MemoryError::TooLittle { what, needed, headroom: Box::new(headroom) })
        }
        _ => Ok(()),
    }
}

/// The buffer for counting by the runtime, MiB: `wanted_mib`, or what is left beside the rest.
///
/// # Errors
/// [`MemoryError::TooLittle`] where that is of no use.
pub fn counts_buffer(wanted_mib: u32, force: bool) -> Result<u32, MemoryError> {
    let headroom = MemoryCgroups::own().headroom();
    let left = headroom.as_ref().map_or(u64::MAX, |headroom| headroom.bytes);
    let fits = u32::try_from(left.saturating_sub(COUNTS_BYTES) >> 20).unwrap_or(u32::MAX);
    let needed = COUNTS_BYTES + (u64::from(LEAST_COUNTS_MIB) << 20);
    enough(headroom, "--alloc-counts", needed, force)?;
    Ok(wanted_mib.min(fits.max(LEAST_COUNTS_MIB)))
}

/// The memory of a program that was started with something that grows.
pub struct Growing {
    cgroups: MemoryCgroups,
    kills: OomKills,
    floor: u64,
}

impl Growing {
    /// Of the process with this pid; with `force` nothing is too little.
    #[must_use]
    pub fn of(pid: u32, force: bool) -> Self {
        let cgroups =
            ProcessHandle::open(pid).map(|target| MemoryCgroups::of(&target)).unwrap_or_default();
        let kills = cgroups.oom_kills();
        Self { cgroups, kills, floor: if force { 0 } else { FLOOR } }
    }

    /// The program's cgroup, if the kernel has killed there for want of memory since.
    #[must_use]
    pub fn killed_in(&self) -> Option<PathBuf> {
        self.cgroups.killed_since(&self.kills)
    }

    /// Why the recording is to end now, if it is.
    #[must_use]
    pub fn is_too_much(&self) -> Option<String> {
        let headroom = self.cgroups.headroom().filter(|headroom| headroom.bytes < self.floor)?;
        Some(format!(
            "the recording ends early, because it takes more and more of the program's memory: \
             {headroom}, and {} must be left. \
             Raise the limit, or use --force to go on all the same",
            mib(self.floor)
        ))
    }
}

/// Processes that the shim was loaded into, and which of them ended soon after.
#[derive(Clone, Default)]
pub struct AttachedProcesses(Arc<Mutex<(Vec<SurvivalCheck>, Vec<DeathAfterRequest>)>>);

impl AttachedProcesses {
    fn lock(&self) -> MutexGuard<'_, (Vec<SurvivalCheck>, Vec<DeathAfterRequest>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The shim is about to be loaded into a process.
    pub fn attaching(&self, pid: u32) {
        if self.lock().0.len() >= MOST_ATTACHED {
            return;
        }
        let Ok(target) = ProcessHandle::open(pid) else { return };
        let aftermath = SurvivalCheck::of(&target, "its shim to be loaded");
        self.lock().0.push(aftermath);
    }

    /// The last attach of a process ended before anything was asked of it that costs memory. Its
    /// end is not put down to us.
    pub fn not_asked(&self, pid: u32) {
        let living = &mut self.lock().0;
        if let Some(last) = living.iter().rposition(|aftermath| aftermath.pid() == pid) {
            living.remove(last);
        }
    }

    /// Looks which have ended. Does not wait. To be asked a few times a second.
    pub fn look(&self) {
        let (living, dead) = &mut *self.lock();
        living.retain(|aftermath| {
            let death = aftermath.death_by_now();
            let is_over = death.is_some() || aftermath.is_older_than(SOON) && !aftermath.is_gone();
            dead.extend(death);
            !is_over
        });
    }

    /// Looks which have ended, and answers those that are new.
    #[must_use]
    pub fn take_deaths(&self) -> Vec<DeathAfterRequest> {
        self.look();
        std::mem::take(&mut self.lock().1)
    }

    /// Those that have ended soon after, as far as they were looked at. Waits a moment for the
    /// reasons of those that are just gone.
    #[must_use]
    pub fn deaths(&self) -> Vec<DeathAfterRequest> {
        let until = Instant::now() + REASONS;
        loop {
            self.look();
            let all = self.lock();
            if Instant::now() >= until || !all.0.iter().any(SurvivalCheck::is_gone) {
                return all.1.clone();
            }
            drop(all);
            std::thread::sleep(REASONS / 15);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{AttachedProcesses, enough};
    use perfusion_host::process::headroom::{Headroom, LimitKind};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_program_is_not_started_with_what_it_has_no_memory_for() {
        let left = |mib: u64| {
            let (limit, used) = (100 << 20, (100 - mib) << 20);
            let kind = LimitKind::Limit;
            Some(Headroom {
                bytes: mib << 20,
                kind,
                limit,
                used,
                reclaimable: 0,
                cgroup: "/a".into(),
            })
        };
        let refused = enough(left(63), "--exact", 64 << 20, false).unwrap_err().to_string();
        for part in ["--exact", "64.0 MiB", "63.0 MiB left", "/a", "--force"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(enough(left(64), "--exact", 64 << 20, false).is_ok());
        assert!(enough(left(1), "--exact", 64 << 20, true).is_ok());
        assert!(enough(None, "--exact", 64 << 20, false).is_ok());
    }

    #[test]
    fn a_process_that_ends_after_its_attach_is_noted() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let attached = AttachedProcesses::default();
        attached.attaching(child.id());
        assert!(attached.deaths().is_empty());
        drop(child.stdin.take());
        let until = Instant::now() + Duration::from_secs(60);
        while attached.deaths().is_empty() && Instant::now() < until {
            std::thread::yield_now();
        }
        assert_eq!(attached.deaths()[0].pid, child.id());
        child.wait().unwrap();
    }

    #[test]
    fn an_end_is_not_put_down_to_an_attach_that_asked_for_nothing() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let attached = AttachedProcesses::default();
        attached.attaching(child.id());
        attached.attaching(child.id());
        attached.not_asked(child.id());
        assert_eq!(attached.lock().0.len(), 1, "the attach before it may have asked");
        attached.not_asked(child.id());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(attached.deaths(), []);
    }

    #[test]
    fn a_look_at_many_that_have_ended_does_not_wait_for_each() {
        let attached = AttachedProcesses::default();
        let mut children: Vec<_> = (0..20)
            .map(|_| {
                let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
                attached.attaching(child.id());
                child
            })
            .collect();
        for child in &mut children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        let begin = Instant::now();
        attached.look();
        let looked = begin.elapsed();
        assert_eq!(attached.deaths().len(), 20);
        assert!(looked < Duration::from_secs(2), "{looked:?}");
    }
}
