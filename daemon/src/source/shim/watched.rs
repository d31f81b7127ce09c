//! Which weak handle watches which sampled object, as it stands in the process's memory ([`profiler_protocol::live::SLOT_WORDS`]). The runtime's walk over
//! its heap tells of weak handles, too, and so which object that is.

use super::super::RegionId;
use crate::process::memory::ProcessMemory;
use crate::unwind::TargetMemory as _;
use profiler_protocol::live::{GROUP, SLOT_WORDS, groups};

/// A handle that watches an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Watched {
    /// Region its library tells through.
    pub region: RegionId,
    /// Number of the object's sample.
    pub sample: u64,
    /// The handle.
    pub handle: u64,
}

/// All that watch one of at most `most` objects, whose slots lie at `address`. A process may say what it likes there: then what it is told to hold is as wrong as all
/// else that it tells of itself.
pub(super) fn read(memory: &ProcessMemory, address: u64, most: u32, region: RegionId) -> Vec<Watched> {
    let slots = groups(usize::try_from(most).unwrap_or(0)).saturating_mul(GROUP);
    let mut bytes = vec![0; slots.saturating_mul(SLOT_WORDS * 8)];
    let read = memory.read(address, &mut bytes);
    bytes.truncate(read);
    of_bytes(&bytes, region)
}

fn of_bytes(bytes: &[u8], region: RegionId) -> Vec<Watched> {
    let (words, _) = bytes.as_chunks::<8>();
    let (slots, _) = words.as_chunks::<SLOT_WORDS>();
    let slot = |&[handle, sample, _key]: &[[u8; 8]; SLOT_WORDS]| Watched {
        region,
        sample: u64::from_le_bytes(sample) >> 8,
        handle: u64::from_le_bytes(handle),
    };
    slots.iter().map(slot).filter(|watched| watched.handle != 0).collect()
}

#[cfg(test)]
mod tests {
    use super::{Watched, of_bytes};
    use crate::source::RegionId;

    #[test]
    fn slots_with_a_handle_watch_an_object_and_half_a_slot_is_none() {
        let words = [0x7f00_u64, 5 << 8 | 2, 9, 0, 6 << 8, 9, 0x7f08, 7 << 8, 9, 0x7f10, 8 << 8];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let watched = |sample, handle| Watched { region: RegionId(3), sample, handle };
        assert_eq!(of_bytes(&bytes, RegionId(3)), [watched(5, 0x7f00), watched(7, 0x7f08)]);
    }
}
