//! Which weak handle watches which sampled object, as it stands in the process's memory
//! ([`profiler_protocol::live::SLOT_WORDS`]). The runtime's walk over its heap tells of weak
//! handles, too, and so which object that is.

use perfusion_host::process::memory::ProcessMemory;
use perfusion_model::event::RegionId;
use perfusion_unwind::TargetMemory as _;
use profiler_protocol::live::{GROUP, SLOT_WORDS, groups};
use std::collections::HashSet;

/// A handle that watches an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WatchedObject {
    /// Region its library tells through.
    pub region: RegionId,
    /// Number of the object's sample.
    pub sample: u64,
    /// The handle.
    pub handle: u64,
}

/// All that watch one of at most `most` objects, whose slots lie at `address`; `None` where these
/// cannot be read. A process may say what it likes there: then what it is told to hold is as wrong
/// as all else that it tells of itself.
pub(super) fn read(
    memory: &ProcessMemory,
    address: u64,
    most: u32,
    region: RegionId,
) -> Option<Vec<WatchedObject>> {
    let slots = groups(usize::try_from(most).unwrap_or(0)).saturating_mul(GROUP);
    let mut bytes = vec![0; slots.saturating_mul(SLOT_WORDS * 8)];
    let read = memory.read(address, &mut bytes);
    (read == bytes.len()).then(|| of_bytes(&bytes, region))
}

/// The handles that watch the same at both times: one that was given up in between may watch
/// something else by now, but a sample's number comes once.
#[must_use]
pub fn same(before: &[WatchedObject], after: &[WatchedObject]) -> HashSet<u64> {
    let after: HashSet<&WatchedObject> = after.iter().collect();
    before.iter().filter(|watched| after.contains(watched)).map(|watched| watched.handle).collect()
}

fn of_bytes(bytes: &[u8], region: RegionId) -> Vec<WatchedObject> {
    let (words, _) = bytes.as_chunks::<8>();
    let (slots, _) = words.as_chunks::<SLOT_WORDS>();
    let slot = |&[handle, sample, _key]: &[[u8; 8]; SLOT_WORDS]| WatchedObject {
        region,
        sample: u64::from_le_bytes(sample) >> 8,
        handle: u64::from_le_bytes(handle),
    };
    slots.iter().map(slot).filter(|watched| watched.handle != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::{WatchedObject, of_bytes, same};
    use perfusion_model::event::RegionId;

    #[test]
    fn slots_with_a_handle_watch_an_object_and_half_a_slot_is_none() {
        let words = [0x7f00_u64, 5 << 8 | 2, 9, 0, 6 << 8, 9, 0x7f08, 7 << 8, 9, 0x7f10, 8 << 8];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let watched = |sample, handle| WatchedObject { region: RegionId(3), sample, handle };
        assert_eq!(of_bytes(&bytes, RegionId(3)), [watched(5, 0x7f00), watched(7, 0x7f08)]);
    }

    #[test]
    fn a_handle_that_is_anothers_by_now_is_not_the_same() {
        let watched = |sample, handle| WatchedObject { region: RegionId(3), sample, handle };
        let before = [watched(5, 0x7f00), watched(6, 0x7f08), watched(7, 0x7f10)];
        let after = [watched(7, 0x7f10), watched(8, 0x7f00), watched(9, 0x7f18)];
        assert_eq!(same(&before, &after), [0x7f10].into());
    }
}
