//! The probes' rules, written from here. They are a cache: whatever is missing, the finisher does.

use crate::process::Lesson;
use aya::maps::{HashMap as BpfHashMap, MapData, MapError};
use ebpf_common::rule::{RuleKey, UnwindRule};

/// The maps `RULES` and `SPACES`.
#[derive(Debug)]
pub struct RuleCache {
    rules: BpfHashMap<MapData, RuleKey, UnwindRule>,
    spaces: BpfHashMap<MapData, u32, u32>,
    refused: u64,
}

impl RuleCache {
    pub(super) fn new(
        rules: BpfHashMap<MapData, RuleKey, UnwindRule>,
        spaces: BpfHashMap<MapData, u32, u32>,
    ) -> Self {
        Self { rules, spaces, refused: 0 }
    }

    /// Brings lessons to the probes, in order.
    pub fn teach(&mut self, lessons: impl IntoIterator<Item = Lesson>) {
        for lesson in lessons {
            let taught = match lesson {
                Lesson::Rule { key, rule } => self.rules.insert(key, rule, 0),
                Lesson::Space { pid, space } => self.spaces.insert(pid, space, 0),
                Lesson::Forget { key } => gone(self.rules.remove(&key)),
                Lesson::NoSpace { pid } => gone(self.spaces.remove(&pid)),
            };
            self.refused += u64::from(taught.is_err());
        }
    }

    /// Lessons the maps had no room for.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

/// An entry that has left by itself is as good as removed.
fn gone(removed: Result<(), MapError>) -> Result<(), MapError> {
    match removed {
        Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
