//! Which threads a runtime waits for when it is to stop all managed threads: those in cooperative
//! mode.
//!
//! The runtime says where that stands, in a description of its own data that debuggers read
//! (dotnet/runtime `docs/design/datacontracts/`, .NET 9 and newer): the symbol
//! `DotNetRuntimeContractDescriptor` of `libcoreclr.so` leads to JSON with the offsets of `Thread`
//! and `ThreadStore`. All of it is memory of the process, which may hold anything: sizes and counts
//! are bounded, it is read by a thread that can be abandoned, and what it says is said of this
//! process only.

use super::{DumpedState, DumpedThread};
use object::endian::LittleEndian as LE;
use object::{elf, pod};
use perfusion_dotnet::attach::AttachError;
use perfusion_dotnet::attach::ipc::IpcError;
use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::{MapLine, ProcessHandle};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

const SYMBOL: &[u8] = b"DotNetRuntimeContractDescriptor";
/// `DNCCDAC\0`.
const MAGIC: u64 = 0x0043_4144_4343_4e44;
/// Most bytes of JSON; .NET 11 has 17 KiB.
const MOST_JSON: usize = 1 << 18;
/// Most pointers beside it, symbols looked at, program headers, dynamic entries and threads.
const MOST_POINTERS: u64 = 1024;
const MOST_SYMBOLS: u64 = 8192;
const MOST_HEADERS: u16 = 64;
const MOST_DYNAMIC: usize = 256;
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
    /// them. Empty where they cannot be told (.NET 8 and older, single-file programs).
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
    let mut base = None;
    let find = |line: MapLine| {
        let name = line.name.strip_suffix(" (deleted)").unwrap_or(&line.name);
        if line.offset == 0 && name.ends_with("/libcoreclr.so") {
            base = Some(line.start);
        }
        base.is_none()
    };
    target.maps(find).ok()?;
    let (base, pid) = (base?, target.pid());
    let memory = target.file("mem").ok()?;
    wait_for(IoPeer::Process(pid), move || threads(&ProcessMemoryFile(memory), base))?
}

/// What is read from.
trait MemoryReader {
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()>;

    fn word(&self, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    fn half(&self, address: u64) -> Option<u32> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Some(u32::from_le_bytes(bytes))
    }
}

struct ProcessMemoryFile(File);

impl MemoryReader for ProcessMemoryFile {
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.0.read_exact_at(into, address).ok()
    }
}

/// Where a symbol is, of the file that is mapped at `base`.
fn symbol(memory: &impl MemoryReader, base: u64) -> Option<u64> {
    let mut header = [0; 64];
    memory.read(base, &mut header)?;
    let (header, _) = pod::from_bytes::<elf::FileHeader64<LE>>(&header).ok()?;
    if header.e_ident.magic != elf::ELFMAG {
        return None;
    }
    let at = base.checked_add(header.e_phoff.get(LE))?;
    let size = size_of::<elf::ProgramHeader64<LE>>();
    let dynamic = (0..header.e_phnum.get(LE).min(MOST_HEADERS)).find_map(|index| {
        let mut bytes = [0; 56];
        memory.read(at.checked_add(u64::from(index) * size as u64)?, &mut bytes)?;
        let (segment, _) = pod::from_bytes::<elf::ProgramHeader64<LE>>(&bytes).ok()?;
        let is_dynamic = segment.p_type.get(LE) == elf::PT_DYNAMIC;
        is_dynamic.then(|| base.checked_add(segment.p_vaddr.get(LE)))?
    })?;
    let (mut symbols, mut names) = (None, None);
    for index in 0..MOST_DYNAMIC as u64 {
        let entry = dynamic.checked_add(index * 16)?;
        let (tag, value) = (memory.word(entry)?, memory.word(entry.checked_add(8)?)?);
        // The loader has made addresses of these (glibc does, musl does not).
        let address = if value < base { base.checked_add(value)? } else { value };
        match i64::try_from(tag).ok()? {
            elf::DT_NULL => break,
            elf::DT_SYMTAB => symbols = Some(address),
            elf::DT_STRTAB => names = Some(address),
            _ => {}
        }
    }
    let (symbols, names) = (symbols?, names?);
    let mut name = [0; SYMBOL.len() + 1];
    (0..MOST_SYMBOLS).find_map(|index| {
        let at = symbols.checked_add(index * 24)?;
        let name_at = names.checked_add(u64::from(memory.half(at)?))?;
        memory.read(name_at, &mut name)?;
        let is_it = name.strip_suffix(b"\0") == Some(SYMBOL);
        is_it.then(|| base.checked_add(memory.word(at.checked_add(8)?)?))?
    })
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
    fn read(memory: &impl MemoryReader, at: u64) -> Option<Self> {
        let size = usize::try_from(memory.half(at.checked_add(12)?)?).ok()?;
        if memory.word(at)? != MAGIC || size > MOST_JSON {
            return None;
        }
        let mut text = vec![0; size];
        memory.read(memory.word(at.checked_add(16)?)?, &mut text)?;
        let json: Value = serde_json::from_slice(text.strip_suffix(b"\0").unwrap_or(&text)).ok()?;
        let offset = |of: &str, field: &str| number(json.get("types")?.get(of)?.get(field)?);
        let pointer = number(json.get("globals")?.get("ThreadStore")?)?;
        if pointer >= u64::from(memory.half(at.checked_add(24)?)?).min(MOST_POINTERS) {
            return None;
        }
        let pointers = memory.word(at.checked_add(32)?)?;
        Some(Self {
            store: memory.word(pointers.checked_add(pointer * 8)?)?,
            first_link: offset("ThreadStore", "FirstThreadLink")?,
            link: offset("Thread", "LinkNext")?,
            id: offset("Thread", "OSId")?,
            cooperative: offset("Thread", "PreemptiveGCDisabled")?,
        })
    }
}

/// `16`, `[16, "type"]`, `[[3], "pointer"]`: an offset, or the number of a pointer.
fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Array(parts) => number(parts.first()?),
        value => value.as_u64(),
    }
}

fn threads(memory: &impl MemoryReader, base: u64) -> Option<HashSet<u32>> {
    let layout = ThreadLayout::read(memory, symbol(memory, base)?)?;
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
    memory: &impl MemoryReader,
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
    use super::{MemoryReader, ThreadLayout, list, number};
    use proptest::prelude::{any, proptest};

    /// Memory from address 0x1000 on.
    struct Fake(Vec<u8>);

    impl Fake {
        fn put(&mut self, address: u64, bytes: &[u8]) {
            let at = usize::try_from(address - 0x1000).unwrap();
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    impl MemoryReader for Fake {
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

    #[test]
    fn offsets_come_with_and_without_their_types() {
        let of = |text: &str| number(&serde_json::from_str(text).unwrap());
        assert_eq!(
            [of("16"), of("[16, \"pointer\"]"), of("[[3], \"pointer\"]")],
            [Some(16), Some(16), Some(3)]
        );
        assert_eq!(of("\"x\""), None);
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
