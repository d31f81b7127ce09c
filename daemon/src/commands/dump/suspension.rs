//! Which threads a runtime waits for when it is to stop all managed threads: those in cooperative
//! mode.
//!
//! The runtime says where that stands, in the description of its own data
//! ([`perfusion_dotnet::data_descriptor`]), with the offsets of `Thread` and `ThreadStore`.

use super::{DumpedState, DumpedThread};
use perfusion_dotnet::attach::AttachError;
use perfusion_dotnet::attach::ipc::IpcError;
use perfusion_dotnet::data_descriptor::{
    DataDescriptor, ProcessMemoryFile, RuntimeMemory, runtime_base,
};
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::ProcessHandle;
use serde::Serialize;
use std::collections::HashSet;

/// Most threads looked at.
const MOST_THREADS: usize = 1 << 16;

/// A thread that is blocked for so long in cooperative mode waits for something else than the
/// runtime itself.
const BLOCKED_SECONDS: f64 = 0.05;

/// Managed threads are to stand still, and some do not let themselves be stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suspension {
    /// True when the runtime did not answer either: it waits by now. Else the next collection
    /// would.
    pub pending: bool,
    /// Threads in cooperative mode that are blocked, or, while it waits, run: it waits for each of
    /// them. Empty where they cannot be told (.NET 8 and older).
    pub held_up_by: Vec<u32>,
}

/// What the runtime waits for, by who was in cooperative mode twice.
pub(super) fn of(
    threads: &[DumpedThread],
    cooperative: Option<(HashSet<u32>, HashSet<u32>)>,
    silent: bool,
) -> Option<Suspension> {
    let (before, after) = cooperative.unwrap_or_default();
    let stays =
        |thread: &&DumpedThread| before.contains(&thread.tid) && after.contains(&thread.tid);
    let is_blocked = |thread: &DumpedThread| {
        let waits = !matches!(thread.state, DumpedState::Running | DumpedState::Runnable);
        waits && thread.waiting_seconds.is_some_and(|seconds| seconds >= BLOCKED_SECONDS)
    };
    let held_up_by: Vec<u32> = threads
        .iter()
        .filter(stays)
        .filter(|thread| silent || is_blocked(thread))
        .map(|thread| thread.tid)
        .collect();
    (silent || !held_up_by.is_empty()).then_some(Suspension { pending: silent, held_up_by })
}

/// True when the runtime was asked and has not answered.
pub(super) fn is_silence(error: &AttachError) -> bool {
    let (AttachError::Busy(error) | AttachError::Ipc(error)) = error else { return false };
    matches!(**error, IpcError::GivenUp { .. } | IpcError::TimedOut { .. })
}

/// Threads in cooperative mode now; `None` where the runtime does not say.
pub(super) fn cooperative(target: &ProcessHandle) -> Option<HashSet<u32>> {
    let (base, pid) = (runtime_base(target)?, target.pid());
    let memory = target.file("mem").ok()?;
    wait_for(IoPeer::Process(pid), move || {
        let memory = ProcessMemoryFile(memory);
        threads(&memory, memory.descriptor(base)?)
    })?
}

/// Offsets of what is needed.
struct ThreadLayout {
    /// Address of the pointer to the thread store.
    store: u64,
    first_link: u64,
    link: u64,
    id: u64,
    cooperative: u64,
}

impl ThreadLayout {
    fn read(memory: &impl RuntimeMemory, descriptor: u64) -> Option<Self> {
        let described = DataDescriptor::read(memory, descriptor)?;
        Some(Self {
            store: described.variable(memory, "ThreadStore")?,
            first_link: described.offset("ThreadStore", "FirstThreadLink")?,
            link: described.offset("Thread", "LinkNext")?,
            id: described.offset("Thread", "OSId")?,
            cooperative: described.offset("Thread", "PreemptiveGCDisabled")?,
        })
    }
}

/// Threads in cooperative mode, by the description at this address.
fn threads(memory: &impl RuntimeMemory, descriptor: u64) -> Option<HashSet<u32>> {
    let layout = ThreadLayout::read(memory, descriptor)?;
    let store = memory.word(memory_address(layout.store)?)?;
    let first = memory.word(store.checked_add(layout.first_link)?)?;
    // Up to .NET 10 links lead to links, from .NET 11 on to threads. Whose are right have ids of
    // threads.
    let by_links = list(memory, &layout, first, true);
    by_links.or_else(|| list(memory, &layout, first, false))
}

/// Null leads nowhere.
fn memory_address(address: u64) -> Option<u64> {
    (address != 0).then_some(address)
}

fn list(
    memory: &impl RuntimeMemory,
    layout: &ThreadLayout,
    first: u64,
    leads_to_links: bool,
) -> Option<HashSet<u32>> {
    let (mut next, mut found) = (first, HashSet::new());
    for _ in 0..MOST_THREADS {
        if next == 0 {
            return Some(found);
        }
        let thread = if leads_to_links { next.checked_sub(layout.link)? } else { next };
        let id = memory.word(thread.checked_add(layout.id)?)?;
        // One that has not started, or has ended, has none that is a thread's (`0xbaadf00d`, 0).
        let tid = u32::try_from(id).ok()?;
        if memory.half(thread.checked_add(layout.cooperative)?)? != 0 {
            found.insert(tid);
        }
        next = memory.word(thread.checked_add(layout.link)?)?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{RuntimeMemory, ThreadLayout, list};
    use proptest::prelude::{any, proptest};

    /// Memory from address 0x1000 on.
    struct Fake(Vec<u8>);

    impl Fake {
        fn put(&mut self, address: u64, bytes: &[u8]) {
            let at = usize::try_from(address - 0x1000).unwrap();
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    impl RuntimeMemory for Fake {
        fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
            let at = usize::try_from(address.checked_sub(0x1000)?).ok()?;
            into.copy_from_slice(self.0.get(at..at.checked_add(into.len())?)?);
            Some(())
        }
    }

    const LAYOUT: ThreadLayout =
        ThreadLayout { store: 0, first_link: 0, link: 112, id: 296, cooperative: 4 };

    /// Two threads, 7 and 8, of which the second is in cooperative mode.
    fn two(leads_to_links: bool) -> (Fake, u64) {
        let mut memory = Fake(vec![0; 0x1000]);
        let of = |thread: u64| if leads_to_links { thread + LAYOUT.link } else { thread };
        for (thread, id, cooperative, next) in [(0x1100, 7, 0, of(0x1400)), (0x1400, 8, 1, 0_u64)] {
            memory.put(thread + LAYOUT.id, &u64::to_le_bytes(id));
            memory.put(thread + LAYOUT.cooperative, &u32::to_le_bytes(cooperative));
            memory.put(thread + LAYOUT.link, &next.to_le_bytes());
        }
        (memory, of(0x1100))
    }

    #[test]
    fn threads_in_cooperative_mode_are_found_however_they_are_linked() {
        for leads_to_links in [true, false] {
            let (memory, first) = two(leads_to_links);
            assert_eq!(list(&memory, &LAYOUT, first, leads_to_links), Some([8].into()));
        }
    }

    #[test]
    fn a_list_without_an_end_has_one() {
        let (mut memory, first) = two(false);
        memory.put(0x1400 + LAYOUT.link, &0x1100_u64.to_le_bytes());
        assert_eq!(list(&memory, &LAYOUT, first, false), None);
    }

    proptest! {
        #[test]
        fn any_memory_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 4096),
            base in 0x1000..0x2000_u64,
        ) {
            let found = super::threads(&Fake(bytes), base);
            assert!(found.is_none_or(|found| found.len() <= super::MOST_THREADS));
        }
    }
}
