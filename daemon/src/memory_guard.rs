//! What a recording does about the memory that it makes processes use: it looks before a program is started with something that grows,
//! while that grows, and at the ends of processes that the shim was loaded into.

use crate::attach::target::Target;
use crate::error::Error;
use crate::process::aftermath::{Aftermath, Death, SOON};
use crate::process::headroom::{Headroom, MemoryCgroups, mib};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What exact mode takes at the start of a program. Its tables grow with the objects that live.
pub const EXACT_BYTES: u64 = 64 << 20;
/// What counting by the runtime takes beside its buffer.
pub const COUNTS_BYTES: u64 = 8 << 20;
/// The smallest buffer that counting by the runtime is begun with, MiB.
const LEAST_COUNTS_MIB: u32 = 8;
/// Below so much of what is left a recording that makes a program use more and more ends.
const FLOOR: u64 = 16 << 20;

/// Processes that are watched after an attach, at most; each has a descriptor.
const MOST_ATTACHED: usize = 256;

/// There is too little memory for what a program would be started with.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// From the start on.
    #[error(
        "{what} takes {} of the program's memory or more, and {headroom}. The program was not started, because the kernel might kill it. \
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

/// Refuses to start a program in the cgroups of this process with something that takes so many bytes.
///
/// # Errors
/// [`MemoryError::TooLittle`].
pub fn check_start(what: &'static str, needed: u64, force: bool) -> Result<(), Error> {
    enough(MemoryCgroups::own().headroom(), what, needed, force).map_err(Error::from)
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
pub fn counts_buffer(wanted_mib: u32, force: bool) -> Result<u32, Error> {
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
    floor: u64,
}

impl Growing {
    /// Of the process with this pid; with `force` nothing is too little.
    #[must_use]
    pub fn of(pid: u32, force: bool) -> Self {
        let cgroups = Target::open(pid).map(|target| MemoryCgroups::of(&target)).unwrap_or_default();
        Self { cgroups, floor: if force { 0 } else { FLOOR } }
    }

    /// Why the recording is to end now, if it is.
    #[must_use]
    pub fn is_too_much(&self) -> Option<String> {
        let headroom = self.cgroups.headroom().filter(|headroom| headroom.bytes < self.floor)?;
        Some(format!(
            "the recording ends early, because it takes more and more of the program's memory: {headroom}, and {} must be left. \
             Raise the limit, or use --force to go on all the same",
            mib(self.floor)
        ))
    }
}

/// Processes that the shim was loaded into, and which of them ended soon after.
#[derive(Clone, Default)]
pub struct AttachedProcesses(Arc<Mutex<(Vec<Aftermath>, Vec<Death>)>>);

impl AttachedProcesses {
    /// The shim is about to be loaded into a process.
    pub fn attaching(&self, pid: u32) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).0.len() >= MOST_ATTACHED {
            return;
        }
        let Ok(target) = Target::open(pid) else { return };
        let aftermath = Aftermath::of(&target, "its shim to be loaded");
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.push(aftermath);
    }

    /// Looks which have ended. To be asked a few times a second.
    pub fn look(&self) {
        let (living, dead) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        living.retain(|aftermath| {
            let death = aftermath.death(Duration::ZERO);
            let is_over = death.is_some() || aftermath.is_older_than(SOON);
            dead.extend(death);
            !is_over
        });
    }

    /// Looks which have ended, and answers those that are new.
    #[must_use]
    pub fn take_deaths(&self) -> Vec<Death> {
        self.look();
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).1)
    }

    /// Those that have ended soon after, as far as they were looked at.
    #[must_use]
    pub fn deaths(&self) -> Vec<Death> {
        self.look();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::{AttachedProcesses, enough};
    use crate::process::headroom::{Headroom, LimitKind};
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn a_program_is_not_started_with_what_it_has_no_memory_for() {
        let left = |mib: u64| {
            let (limit, used) = (100 << 20, (100 - mib) << 20);
            let kind = LimitKind::Limit;
            Some(Headroom { bytes: mib << 20, kind, limit, used, reclaimable: 0, cgroup: "/a".into() })
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
}
