//! What a survey costs the process that is surveyed, and whether its limits allow that.
//!
//! The runtime keeps events that were not read yet in its buffer. A walk writes them faster than
//! they are read, so the buffer is used whole. Beyond it a survey took 0.2 to 5 MiB of .NET 8, 9,
//! 10 and 11, with 50, 300 and 2,000 MB of small objects: the runtime's first event session, its
//! types' names, the collection's mark stack. Of an object with many references the runtime copies
//! all of them before it tells of them (dotnet/runtime `gcenv.ee.cpp`, `HeapWalkHelper`): a list of
//! 2.5 million objects takes 20 MB more. An object with so many is a large one, and no larger than
//! all of these.

use perfusion_host::process::headroom::{Headroom, mib};

/// Bytes beyond the buffer, whatever the heap: some more than was measured.
const BESIDE: u64 = 6 << 20;
/// And one byte for so many of the process: its collection marks more where there is more.
const PART: u64 = 256;
/// A buffer of less holds less than what a walk writes between two looks of the thread that sends
/// it.
pub(crate) const LEAST_BUFFER_MIB: u32 = 16;
/// A survey ends early where less is left: half of what is kept free beside the buffer.
const FLOOR: u64 = BESIDE / 2;

/// What a survey may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The runtime's buffer, MiB.
    pub buffer_mib: u32,
    /// The survey ends early when fewer bytes than this are left; 0 where it is to go on whatever
    /// happens.
    pub floor_bytes: u64,
    /// What is to be said of it.
    pub note: Option<String>,
}

/// There is too little.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooLittle {
    /// Bytes needed at the least.
    pub needed: u64,
    /// What there is.
    pub headroom: Headroom,
}

/// Plans a survey with a buffer of `wanted_mib`, of a process that has so many bytes resident, and
/// no object of more bytes than `widest`.
pub fn plan(
    headroom: Option<Headroom>,
    resident: u64,
    widest: u64,
    wanted_mib: u32,
    force: bool,
) -> Result<MemoryPlan, TooLittle> {
    let whole = MemoryPlan { buffer_mib: wanted_mib, floor_bytes: 0, note: None };
    let Some(headroom) = headroom else { return Ok(whole) };
    let beside = (BESIDE + resident / PART).saturating_add(widest);
    let needed = |buffer_mib: u32| (u64::from(buffer_mib) << 20) + beside;
    let floor_bytes = if force { 0 } else { FLOOR };
    if headroom.bytes >= needed(wanted_mib) {
        return Ok(MemoryPlan { floor_bytes, ..whole });
    }
    let fits = u32::try_from(headroom.bytes.saturating_sub(beside) >> 20).unwrap_or(u32::MAX);
    let least = LEAST_BUFFER_MIB.min(wanted_mib);
    if fits < least && !force {
        return Err(TooLittle { needed: needed(least), headroom });
    }
    let buffer_mib = fits.max(least);
    let note = format!(
        "the runtime's buffer is {buffer_mib} MiB instead of {wanted_mib}, because {headroom}; \
         a survey takes {} with this buffer. Events that do not fit into it are lost, and the \
         survey says so",
        mib(needed(buffer_mib))
    );
    Ok(MemoryPlan { buffer_mib, floor_bytes, note: Some(note) })
}

#[cfg(test)]
mod tests {
    use super::{BESIDE, FLOOR, plan};
    use perfusion_host::process::headroom::{Headroom, LimitKind};

    fn left(mib: u64) -> Option<Headroom> {
        Some(Headroom {
            bytes: mib << 20,
            kind: LimitKind::Max,
            limit: 400 << 20,
            used: (400 - mib) << 20,
            reclaimable: 0,
            cgroup: "/a".into(),
        })
    }

    #[test]
    fn the_buffer_shrinks_to_what_is_left_and_no_further_than_is_of_use() {
        let buffer =
            |mib, force| plan(left(mib), 300 << 20, 0, 256, force).map(|plan| plan.buffer_mib);
        assert_eq!(buffer(320, false), Ok(256));
        assert_eq!(buffer(64, false), Ok(56));
        assert_eq!(buffer(24, false), Ok(16));
        let refused = buffer(16, false).unwrap_err();
        assert_eq!(refused.needed, (16 << 20) + BESIDE + (300 << 20) / 256);
        assert_eq!((buffer(16, true), buffer(0, true), buffer(64, true)), (Ok(16), Ok(16), Ok(56)));
        // A list of 2.5 million objects has its references copied.
        let wide =
            |mib| plan(left(mib), 300 << 20, 20 << 20, 256, false).map(|plan| plan.buffer_mib);
        assert_eq!((wide(320), wide(64)), (Ok(256), Ok(36)));
        assert!(wide(40).is_err());
        // A larger heap takes more beside the buffer.
        assert!(plan(left(24), 2000 << 20, 0, 256, false).is_err());
    }

    #[test]
    fn what_differs_from_what_was_asked_for_is_said_with_the_figures() {
        let shrunk = plan(left(64), 300 << 20, 0, 256, false).unwrap();
        let note = shrunk.note.unwrap();
        for part in ["56 MiB instead of 256", "/a has 64.0 MiB left", "memory.max is 400.0 MiB"] {
            assert!(note.contains(part), "{note}");
        }
        assert_eq!(shrunk.floor_bytes, FLOOR);
        let whole = plan(left(320), 300 << 20, 0, 256, false).unwrap();
        assert_eq!((whole.note, whole.floor_bytes), (None, FLOOR));
        let unknown = plan(None, 300 << 20, 0, 256, false).unwrap();
        assert_eq!((unknown.buffer_mib, unknown.note, unknown.floor_bytes), (256, None, 0));
        assert_eq!(plan(left(1), 0, 0, 256, true).unwrap().floor_bytes, 0, "it was told to go on");
    }
}
