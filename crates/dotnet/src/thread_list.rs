//! The managed threads of a runtime, as its own list has them. The runtime describes where the list
//! is ([`crate::data_descriptor`], .NET 9 and newer). The list is memory of the process, which may
//! hold anything: its length is bounded, and what it says is said of this process only.

use crate::data_descriptor::{DataDescriptor, ProcessMemoryFile, RuntimeMemory, runtime_base};
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_sources::shim::{ManagedThread, ThreadList, ThreadLists};
use std::sync::Arc;

/// Most bytes of a thread that are read at once.
const MOST_BYTES: u64 = 4096;
/// The longest list that is read for the owners of locks: it is read often.
const MOST_OWNERS: usize = 1 << 12;

/// A thread of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedThread {
    /// The number that managed code has for it. It is used again after the thread's end.
    pub managed_id: u32,
    /// Its id, as its process sees it. One that has not started, or has ended, has an id that is no
    /// thread's.
    pub tid: u32,
    /// It runs managed code, and a collection has to wait for it.
    pub is_cooperative: bool,
}

/// Where the parts of the list are.
#[derive(Clone, Copy, Debug)]
pub struct ThreadListLayout {
    /// Address of the pointer to the thread store.
    store: u64,
    first_link: u64,
    link: u64,
    managed_id: u64,
    tid: u64,
    cooperative: u64,
}

impl ThreadListLayout {
    /// By the description at this address.
    pub fn read(memory: &impl RuntimeMemory, descriptor: u64) -> Option<Self> {
        let described = DataDescriptor::read(memory, descriptor)?;
        Some(Self {
            store: described.variable(memory, "ThreadStore")?,
            first_link: described.offset("ThreadStore", "FirstThreadLink")?,
            link: described.offset("Thread", "LinkNext")?,
            managed_id: described.offset("Thread", "Id")?,
            tid: described.offset("Thread", "OSId")?,
            cooperative: described.offset("Thread", "PreemptiveGCDisabled")?,
        })
    }

    /// All threads, at most so many; `None` when there are more, or when it is no list of threads.
    pub fn threads(&self, memory: &impl RuntimeMemory, most: usize) -> Option<Vec<ListedThread>> {
        let store = Some(self.store).filter(|&store| store != 0)?;
        let first = memory.word(memory.word(store)?.checked_add(self.first_link)?)?;
        // Up to .NET 10 links lead to links, from .NET 11 on to threads. Whose are right have ids
        // of threads, and numbers.
        let list = |leads_to_links| self.list(memory, first, leads_to_links, most);
        list(true).or_else(|| list(false))
    }

    fn list(
        &self,
        memory: &impl RuntimeMemory,
        first: u64,
        leads_to_links: bool,
        most: usize,
    ) -> Option<Vec<ListedThread>> {
        let fields = [self.link, self.managed_id, self.tid, self.cooperative];
        let begin = fields.into_iter().min()?;
        let size = fields.into_iter().max()?.checked_add(8)?.checked_sub(begin)?;
        let size = usize::try_from(Some(size).filter(|&size| size <= MOST_BYTES)?).ok()?;
        let (mut next, mut found, mut bytes) = (first, Vec::new(), vec![0; size]);
        for _ in 0..=most {
            if next == 0 {
                let is_one =
                    found.is_empty() || found.iter().any(|thread: &ListedThread| thread.tid != 0);
                return is_one.then_some(found);
            }
            let thread = if leads_to_links { next.checked_sub(self.link)? } else { next };
            memory.read(thread.checked_add(begin)?, &mut bytes)?;
            let word = |field: u64| word(&bytes, field.checked_sub(begin)?);
            // Above the lower half is the next field.
            let half = |field: u64| Some((word(field)? & u64::from(u32::MAX)) as u32);
            found.push(ListedThread {
                managed_id: Some(half(self.managed_id)?).filter(|&id| id != 0)?,
                tid: u32::try_from(word(self.tid)?).ok()?,
                is_cooperative: half(self.cooperative)? != 0,
            });
            next = word(self.link)?;
        }
        None
    }
}

fn word(bytes: &[u8], at: u64) -> Option<u64> {
    let at = usize::try_from(at).ok()?;
    let word = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Reads the lists of runtimes for the source of their events.
#[derive(Clone, Copy, Debug)]
pub struct RuntimeThreadLists;

impl ThreadLists for RuntimeThreadLists {
    fn open(&self, target: &ProcessHandle) -> Option<Box<dyn ThreadList>> {
        let list = RuntimeThreadList::open(target)?;
        Some(Box::new(list))
    }
}

/// The list of one process.
#[derive(Debug)]
struct RuntimeThreadList {
    pid: u32,
    memory: Arc<ProcessMemoryFile>,
    layout: ThreadListLayout,
}

impl RuntimeThreadList {
    fn open(target: &ProcessHandle) -> Option<Self> {
        let pid = target.pid();
        let memory = Arc::new(ProcessMemoryFile(target.file(&target.in_common("mem")).ok()?));
        let base = runtime_base(target)?;
        let reader = Arc::clone(&memory);
        let layout = wait_for(IoPeer::Process(pid), move || {
            ThreadListLayout::read(&*reader, reader.descriptor(base)?)
        })??;
        Some(Self { pid, memory, layout })
    }
}

impl ThreadList for RuntimeThreadList {
    fn read(&mut self) -> Option<Vec<ManagedThread>> {
        let (memory, layout) = (Arc::clone(&self.memory), self.layout);
        let threads =
            wait_for(IoPeer::Process(self.pid), move || layout.threads(&*memory, MOST_OWNERS))??;
        let threads = threads.into_iter();
        Some(threads.map(|of| ManagedThread { id: of.managed_id, tid: of.tid }).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::{ListedThread, RuntimeMemory, ThreadListLayout};
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

    /// The store's pointer is at 0x1000, the store at 0x1040.
    const LAYOUT: ThreadListLayout = ThreadListLayout {
        store: 0x1000,
        first_link: 8,
        link: 112,
        managed_id: 24,
        tid: 296,
        cooperative: 4,
    };

    /// Two threads, 7 and 8, of which the second is in cooperative mode.
    fn two(leads_to_links: bool) -> Fake {
        let mut memory = Fake(vec![0; 0x1000]);
        let of = |thread: u64| if leads_to_links { thread + LAYOUT.link } else { thread };
        memory.put(LAYOUT.store, &0x1040_u64.to_le_bytes());
        memory.put(0x1040 + LAYOUT.first_link, &of(0x1100).to_le_bytes());
        for (thread, tid, cooperative, next) in
            [(0x1100, 7_u64, 0_u32, of(0x1400)), (0x1400, 8, 1, 0)]
        {
            memory.put(thread + LAYOUT.managed_id, &(tid as u32 + 10).to_le_bytes());
            memory.put(thread + LAYOUT.tid, &tid.to_le_bytes());
            memory.put(thread + LAYOUT.cooperative, &cooperative.to_le_bytes());
            memory.put(thread + LAYOUT.link, &next.to_le_bytes());
        }
        memory
    }

    #[test]
    fn threads_are_found_however_they_are_linked() {
        let thread =
            |managed_id, tid, is_cooperative| ListedThread { managed_id, tid, is_cooperative };
        for leads_to_links in [true, false] {
            let found = LAYOUT.threads(&two(leads_to_links), 2);
            assert_eq!(found, Some(vec![thread(17, 7, false), thread(18, 8, true)]));
        }
    }

    #[test]
    fn a_list_that_is_longer_than_allowed_or_without_an_end_is_none() {
        assert_eq!(LAYOUT.threads(&two(false), 1), None);
        let mut memory = two(false);
        memory.put(0x1400 + LAYOUT.link, &0x1100_u64.to_le_bytes());
        assert_eq!(LAYOUT.threads(&memory, 1000), None);
    }

    #[test]
    fn a_thread_that_does_not_fit_is_not_read() {
        let memory = two(false);
        let far = ThreadListLayout { tid: 1 << 20, ..LAYOUT };
        let end = ThreadListLayout { tid: u64::MAX - 4, ..LAYOUT };
        assert_eq!((far.threads(&memory, 2), end.threads(&memory, 2)), (None, None));
    }

    proptest! {
        #[test]
        fn any_memory_is_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 4096),
            base in 0x1000..0x2000_u64,
        ) {
            let memory = Fake(bytes);
            let found = ThreadListLayout::read(&memory, base);
            let found = found.unwrap_or(LAYOUT).threads(&memory, 100);
            assert!(found.is_none_or(|found| found.len() <= 100));
        }
    }
}
