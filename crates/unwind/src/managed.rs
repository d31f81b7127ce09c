//! Managed code: which method body a PC is in, and its rule. JIT bodies are found in the process's
//! memory, ReadyToRun ones in the exception directory of their file.
//!
//! *JIT.* The eight bytes before a body point to its `RealCodeHeader` (dotnet/runtime
//! src/coreclr/vm/codeman.h): debug info, EH info, GC info and MethodDesc pointers, then at +32 the
//! number of unwind entries and that many RUNTIME_FUNCTIONs, the same in .NET 8, 9 and 10. Entry 0
//! is the body, the others its funclets, right behind it; all offsets count from the code heap's
//! base, which is therefore the body's start minus entry 0's begin. Bodies start at multiples of
//! 16, on aarch64 of 8 (`CODE_SIZE_ALIGN` in cgencpu.h), so the body of a PC is found by going back
//! in such steps to the first address that has such a header. Code heaps hold bodies in no
//! particular order but never one inside another: the nearest header decides. *ReadyToRun.* PE data
//! directory 3 is an array of RUNTIME_FUNCTIONs sorted by begin; funclets have entries of their
//! own. *Neither.* What is left in JIT memory, and the call thunks of ReadyToRun images, are stubs,
//! which are replayed. What an entry and its unwind information look like is the machine's.

use super::TargetMemory;
use super::machine::TargetMachine;
use super::rule::{Rule, RuleRefusal};
pub use super::unwind_format::{FunctionOffset, ReadAt, RuntimeFunction, UnwindFormat};
use std::cell::Cell;
use std::ops::Range;

/// Bytes of code that are read for an epilogue or a stub.
pub const CODE_BYTES: usize = 192;
/// Longest method body that is found by going back, bytes; the longest in ASP.NET Core's JIT code
/// has under 100 KiB.
pub const MAX_BODY_BYTES: u64 = 1 << 20;
/// Most bytes of an entry.
const MAX_ENTRY_BYTES: usize = 12;
/// Most unwind entries (the body and its funclets) one method may have.
const MAX_ENTRIES: usize = 4096;
/// Most headers that look right at first sight and are read, in one search.
const MAX_CANDIDATES: u32 = 64;
/// Bytes of code read at a time.
const CHUNK_BYTES: u64 = 4096;
/// What the shortest reading costs, in bytes of a long one.
const LEAST_READ_BYTES: u64 = 64;
/// `RealCodeHeader::nUnwindInfos`.
const HEADER_COUNT_AT: usize = 32;
/// `RealCodeHeader::unwindInfos`.
const HEADER_ENTRIES_AT: usize = 36;

/// A JIT-compiled body with its funclets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JitBody {
    /// First byte of the body and first byte after its last funclet.
    pub range: Range<u64>,
    /// Base its entries count from.
    base: u64,
    entries: Vec<RuntimeFunction>,
    /// Unwind information of the body, kept so that callers in it can be left after the process is
    /// gone.
    body_unwind: Vec<u8>,
    /// Address and pointers of the header: they change when the place is given to another method.
    identity: [u64; 5],
}

/// How much work a search may still do, bytes of target memory.
#[derive(Debug, Clone, Copy)]
pub struct SearchBudget {
    /// Bytes left.
    pub bytes: u64,
}

impl SearchBudget {
    fn spend(&mut self, bytes: u64) -> Result<(), RuleRefusal> {
        let left = self.bytes.checked_sub(bytes);
        self.bytes = left.unwrap_or(0);
        left.map(drop).ok_or(RuleRefusal::Budget)
    }
}

impl JitBody {
    /// Finds the body that covers `pc` in a mapping that begins at `floor`; `Ok(None)` when there
    /// is none: a stub.
    ///
    /// # Errors
    /// [`RuleRefusal::Unreadable`] when the code itself cannot be read, [`RuleRefusal::Budget`].
    pub fn find(
        machine: &TargetMachine,
        memory: &dyn TargetMemory,
        pc: u64,
        floor: u64,
        budget: &mut SearchBudget,
    ) -> Result<Option<Self>, RuleRefusal> {
        let align = machine.unwind_info.body_align;
        let lowest = floor.max(pc.saturating_sub(MAX_BODY_BYTES));
        let mut candidates = MAX_CANDIDATES;
        // One chunk at a time, downwards; each holds the pointers before the starts in (from + 8,
        // upper + 8].
        let first = pc & !(align - 1);
        let mut upper = first;
        let mut chunk = vec![0u8; usize::try_from(CHUNK_BYTES).unwrap_or_default()];
        while upper > lowest {
            let from = upper.saturating_sub(CHUNK_BYTES).max(lowest & !7);
            let length = usize::try_from(upper - from).unwrap_or_default().min(chunk.len());
            budget.spend(CHUNK_BYTES)?;
            let Some(bytes) = chunk.get_mut(..length) else { return Err(RuleRefusal::Unreadable) };
            if memory.read(from, bytes) < length {
                return if upper == first { Err(RuleRefusal::Unreadable) } else { Ok(None) };
            }
            let mut start = upper;
            while start >= from.saturating_add(8) {
                let at = usize::try_from(start - 8 - from).unwrap_or(usize::MAX);
                if let Some(header) = u64_at(bytes, at).filter(|&h| is_pointer(machine, h)) {
                    let counted = CountedMemory { memory, bytes: Cell::new(0) };
                    let body = Self::at(machine, &counted, start, header);
                    budget.spend(counted.bytes.get())?;
                    if let Some(body) = body {
                        return Ok(body.function(pc).is_some().then_some(body));
                    }
                    candidates -= 1;
                    if candidates == 0 {
                        return Ok(None);
                    }
                }
                let Some(next) = start.checked_sub(align) else { return Ok(None) };
                start = next;
            }
            upper = start;
        }
        Ok(None)
    }

    /// Reads and checks the header that would make `start` a body.
    fn at(
        machine: &TargetMachine,
        memory: &dyn TargetMemory,
        start: u64,
        header: u64,
    ) -> Option<Self> {
        let format = &machine.unwind_info;
        let mut fixed = [0u8; HEADER_ENTRIES_AT + MAX_ENTRY_BYTES];
        let fixed = fixed.get_mut(..HEADER_ENTRIES_AT + format.entry_bytes)?;
        if memory.read(header, fixed) < fixed.len() {
            return None;
        }
        let pointer = |i: usize| u64_at(fixed, i * 8);
        let identity = [header, pointer(0)?, pointer(1)?, pointer(2)?, pointer(3)?];
        let [_, debug, exceptions, gc, method] = identity;
        let somewhere = 0x1000..machine.user_end;
        let optional = |p: u64| p == 0 || somewhere.contains(&p);
        if !optional(debug)
            || !optional(exceptions)
            || !somewhere.contains(&gc)
            || !is_pointer(machine, method)
        {
            return None;
        }
        let count = usize::try_from(u32_at(fixed, HEADER_COUNT_AT)?).ok()?;
        let first = fixed.get(HEADER_ENTRIES_AT..)?;
        // Where it begins says where the base is, and from there the rest is read.
        let base = start.checked_sub(u64::from(u32_at(first, 0)?))?;
        let read =
            |offset: u32, into: &mut [u8]| memory.read(base.wrapping_add(u64::from(offset)), into);
        let first = (format.entry)(first, &read)?;
        if !(1..=MAX_ENTRIES).contains(&count) || first.begin >= first.end {
            return None;
        }
        let mut entries = vec![first];
        if count > 1 {
            let mut bytes = vec![0u8; (count - 1) * format.entry_bytes];
            let at = header.checked_add(u64::try_from(fixed.len()).ok()?)?;
            if memory.read(at, &mut bytes) < bytes.len() {
                return None;
            }
            // In order; one that is not ends the search before the next is looked at.
            for entry in bytes.chunks_exact(format.entry_bytes) {
                let (before, entry) = (entries.last()?.end, (format.entry)(entry, &read)?);
                if before > entry.begin || entry.begin >= entry.end {
                    return None;
                }
                entries.push(entry);
            }
        }
        let end = base + u64::from(entries.last()?.end);
        // The whole is no longer than a search goes back.
        if end - start > MAX_BODY_BYTES {
            return None;
        }
        let body_unwind = (format.info)(first.unwind, &read)?;
        if !(format.is_plausible)(&body_unwind, first) {
            return None;
        }
        Some(Self { range: start..end, base, entries, body_unwind, identity })
    }

    /// Whether the same body is still there; `None` when that cannot be read, as of a process that
    /// is gone.
    #[must_use]
    pub fn is_current(&self, machine: &TargetMachine, memory: &dyn TargetMemory) -> Option<bool> {
        let mut pointer = [0u8; 8];
        if memory.read(self.range.start.wrapping_sub(8), &mut pointer) < pointer.len() {
            return None;
        }
        let header = u64::from_le_bytes(pointer);
        let same = |now: Self| now == *self;
        Some(
            header == self.identity[0]
                && Self::at(machine, memory, self.range.start, header).is_some_and(same),
        )
    }

    /// Address of its MethodDesc.
    #[must_use]
    pub fn method(&self) -> u64 {
        self.identity[4]
    }

    /// A body of this method without entries, so without rules: for tests of what keeps bodies.
    #[must_use]
    pub fn without_entries(range: Range<u64>, method: u64) -> Self {
        Self {
            range,
            base: 0,
            entries: Vec::new(),
            body_unwind: Vec::new(),
            identity: [0, 0, 0, 0, method],
        }
    }

    fn function(&self, pc: u64) -> Option<RuntimeFunction> {
        let offset = u32::try_from(pc.checked_sub(self.base)?).ok()?;
        self.entries.iter().find(|f| (f.begin..f.end).contains(&offset)).copied()
    }

    /// The rule at `pc`, which the body covers. `exact` says that `pc` is the next instruction to
    /// run, not inside a call.
    ///
    /// # Errors
    /// As the machine's [`UnwindFormat::rule`].
    pub fn rule(
        &self,
        machine: &TargetMachine,
        memory: &dyn TargetMemory,
        pc: u64,
        exact: bool,
    ) -> Result<Rule, RuleRefusal> {
        let function = self.function(pc).ok_or(RuleRefusal::NoEntry)?;
        let read = |offset: u32, into: &mut [u8]| {
            memory.read(self.base.wrapping_add(u64::from(offset)), into)
        };
        let info = |at: u32| {
            if self.entries.first().is_some_and(|body| body.unwind == at) {
                return Some(self.body_unwind.clone());
            }
            (machine.unwind_info.info)(at, &read)
        };
        let offset = u32::try_from(pc.wrapping_sub(self.base))
            .ok()
            .and_then(|o| o.checked_sub(function.begin));
        let offset = offset.ok_or(RuleRefusal::NoEntry)?;
        (machine.unwind_info.rule)(
            FunctionOffset { function, offset, exact, base: self.base },
            &info,
            &read,
        )
    }
}

/// Memory of which it is known how much was asked for.
struct CountedMemory<'a> {
    memory: &'a dyn TargetMemory,
    bytes: Cell<u64>,
}

impl TargetMemory for CountedMemory<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        let bytes = u64::try_from(into.len()).unwrap_or(u64::MAX).max(LEAST_READ_BYTES);
        self.bytes.set(self.bytes.get().saturating_add(bytes));
        self.memory.read(address, into)
    }
}

/// A 8-byte aligned address a process could have memory at.
fn is_pointer(machine: &TargetMachine, value: u64) -> bool {
    value.is_multiple_of(8) && (0x1_0000..machine.user_end).contains(&value)
}

/// Little-endian u32 at `offset`.
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes.get(offset..)?.first_chunk::<4>().map(|b| u32::from_le_bytes(*b))
}

/// Little-endian u64 at `offset`.
fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes.get(offset..)?.first_chunk::<8>().map(|b| u64::from_le_bytes(*b))
}

/// Reads a PE image by relative virtual address.
pub trait PeImage {
    /// Bytes read from `rva`; fewer than asked where the section ends.
    fn read(&self, rva: u32, into: &mut [u8]) -> usize;
}

/// The exception directory of a ReadyToRun image.
#[derive(Debug, Default)]
pub struct ExceptionDirectory {
    bytes: Vec<u8>,
}

impl ExceptionDirectory {
    /// The directory with these contents.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Bytes held.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The function of `machine` that covers `rva` in `image`.
    #[must_use]
    pub fn function(
        &self,
        machine: &TargetMachine,
        image: &dyn PeImage,
        rva: u32,
    ) -> Option<RuntimeFunction> {
        let format = &machine.unwind_info;
        let entry = |i: usize| self.bytes.get(i.checked_mul(format.entry_bytes)?..);
        let (mut low, mut high) = (0, self.bytes.len() / format.entry_bytes);
        while low < high {
            let middle = low + (high - low) / 2;
            if u32_at(entry(middle)?, 0)? <= rva {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let found = (format.entry)(entry(low.checked_sub(1)?)?, &|at, into| image.read(at, into))?;
        (found.begin..found.end).contains(&rva).then_some(found)
    }

    /// The rule at `rva` in `function`, as [`JitBody::rule`].
    ///
    /// # Errors
    /// As the machine's [`UnwindFormat::rule`].
    pub fn rule(
        &self,
        machine: &TargetMachine,
        image: &dyn PeImage,
        function: RuntimeFunction,
        rva: u32,
        exact: bool,
    ) -> Result<Rule, RuleRefusal> {
        let read = |at: u32, into: &mut [u8]| image.read(at, into);
        let info = |at: u32| (machine.unwind_info.info)(at, &read);
        let offset = rva.checked_sub(function.begin).ok_or(RuleRefusal::NoEntry)?;
        (machine.unwind_info.rule)(
            FunctionOffset { function, offset, exact, base: 0 },
            &info,
            &read,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::{Cfa, Register};
    use super::super::x86_64::X86_64;
    use super::*;
    use proptest::prelude::{any, prop, proptest};

    /// Memory of a made-up process: one block.
    struct Block {
        address: u64,
        bytes: Vec<u8>,
    }

    impl TargetMemory for Block {
        fn read(&self, address: u64, into: &mut [u8]) -> usize {
            let Some(from) =
                address.checked_sub(self.address).and_then(|o| usize::try_from(o).ok())
            else {
                return 0;
            };
            let Some(there) = self.bytes.get(from..) else { return 0 };
            let length = there.len().min(into.len());
            into[..length].copy_from_slice(&there[..length]);
            length
        }
    }

    const HEAP: u64 = 0x7f00_0000_0000;

    impl Block {
        fn put(&mut self, at: usize, bytes: &[u8]) {
            self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// A heap with one body of 0x100 bytes at 0x1010 and one funclet behind it.
    fn heap() -> Block {
        let mut block = Block { address: HEAP, bytes: vec![0x90; 0x4000] };
        block.put(0x1008, &(HEAP + 0x3000).to_le_bytes());
        block.put(0x3000, &[0; 16]);
        block.put(0x3010, &(HEAP + 0x3800).to_le_bytes());
        block.put(0x3018, &(HEAP + 0x3808).to_le_bytes());
        block.put(0x3020, &2u32.to_le_bytes());
        for (i, word) in [0x1010u32, 0x1110, 0x3900, 0x1110, 0x1140, 0x3900].iter().enumerate() {
            block.put(0x3024 + i * 4, &word.to_le_bytes());
        }
        block.put(0x3900, &[0x19, 5, 2, 0, 5, 0x72, 1, 0x50]);
        block
    }

    fn find(block: &Block, pc: u64) -> Option<JitBody> {
        JitBody::find(&X86_64, block, pc, HEAP, &mut SearchBudget { bytes: 1 << 20 }).unwrap()
    }

    #[test]
    fn a_body_is_found_from_any_pc_inside_it_and_its_funclets() {
        let block = heap();
        for pc in [0x1010, 0x1011, 0x110f, 0x1110, 0x113f] {
            let body = find(&block, HEAP + pc).unwrap();
            assert_eq!(body.range, HEAP + 0x1010..HEAP + 0x1140, "pc {pc:#x}");
        }
        assert_eq!(find(&block, HEAP + 0x1140), None, "behind it");
        assert_eq!(find(&block, HEAP + 0x100f), None, "before it");
    }

    #[test]
    fn rules_follow_the_prologue() {
        let block = heap();
        let body = find(&block, HEAP + 0x1020).unwrap();
        let cfa = |pc, exact| body.rule(&X86_64, &block, HEAP + pc, exact).unwrap().cfa;
        assert_eq!(cfa(0x1010, true), Cfa::Register { base: Register::RSP, offset: 8 });
        assert_eq!(cfa(0x1050, true), Cfa::Register { base: Register::RSP, offset: 80 });
        assert_eq!(cfa(0x1120, false), Cfa::Register { base: Register::RSP, offset: 80 });
    }

    #[test]
    fn another_method_at_the_same_place_is_noticed() {
        let mut block = heap();
        let body = find(&block, HEAP + 0x1020).unwrap();
        assert_eq!(body.is_current(&X86_64, &block), Some(true));
        block.put(0x3018, &(HEAP + 0x3810).to_le_bytes());
        assert_eq!(body.is_current(&X86_64, &block), Some(false));
    }

    #[test]
    fn a_search_stops_when_its_budget_is_spent() {
        let block = Block { address: HEAP, bytes: vec![0x90; 1 << 20] };
        let found = JitBody::find(
            &X86_64,
            &block,
            HEAP + 0xf_0000,
            HEAP,
            &mut SearchBudget { bytes: 64 << 10 },
        );
        assert_eq!(found, Err(RuleRefusal::Budget));
    }

    #[test]
    fn headers_that_are_none_cost_what_is_read_of_them() {
        let mut block = heap();
        // Before each place where a body could begin, a pointer to a header of very many entries,
        // the last of which is not behind the others.
        let header = 0x3010;
        block.bytes.resize(0x2_0000, 0x90);
        block.put(0x3020, &4000u32.to_le_bytes());
        for entry in 0..3999u32 {
            let begin = 0x1010 + 8 * entry;
            let words = [begin, begin + 8, 0x3900];
            let at = header + 0x14 + 12 * entry as usize;
            words
                .iter()
                .enumerate()
                .for_each(|(i, word)| block.put(at + 4 * i, &word.to_le_bytes()));
        }
        block.put(header + 0x14 + 12 * 3999, &[0; 12]);
        let pointer = (HEAP + 0x3000).to_le_bytes();
        (0x1008..0x2008).step_by(16).for_each(|at| block.put(at, &pointer));
        let mut budget = SearchBudget { bytes: 1 << 30 };
        let found = JitBody::find(&X86_64, &block, HEAP + 0x2000, HEAP, &mut budget);
        assert_eq!(found, Ok(None));
        let spent = (1 << 30) - budget.bytes;
        assert!(spent > u64::from(MAX_CANDIDATES) * 3999 * 12, "{spent}");
    }

    #[test]
    fn the_exception_directory_finds_the_function_that_covers_an_address() {
        let words = [0x10u32, 0x20, 1, 0x20, 0x28, 2, 0x40, 0x50, 3];
        let directory =
            ExceptionDirectory::new(words.iter().flat_map(|w| w.to_le_bytes()).collect());
        assert_eq!(directory.function(&X86_64, &Flat(Vec::new()), 0x1f).map(|f| f.unwind), Some(1));
        assert_eq!(directory.function(&X86_64, &Flat(Vec::new()), 0x20).map(|f| f.unwind), Some(2));
        assert_eq!(directory.function(&X86_64, &Flat(Vec::new()), 0x30), None);
        assert_eq!(directory.function(&X86_64, &Flat(Vec::new()), 0x0), None);
        assert_eq!(directory.function(&X86_64, &Flat(Vec::new()), 0x50), None);
    }

    struct Flat(Vec<u8>);

    impl PeImage for Flat {
        fn read(&self, rva: u32, into: &mut [u8]) -> usize {
            Block { address: 0, bytes: self.0.clone() }.read(u64::from(rva), into)
        }
    }

    proptest! {
        #[test]
        fn hostile_jit_memory_ends_in_an_answer(
            noise in prop::collection::vec(any::<(u16, u32)>(), 0..64), pc in 0u64..0x4000,
        ) {
            let mut block = heap();
            for (at, value) in noise {
                block.put(usize::from(at) % 0x3ff8, &value.to_le_bytes());
            }
            if let Some(body) = find(&block, HEAP + pc) {
                body.rule(&X86_64, &block, HEAP + pc, true).ok();
                std::hint::black_box(body.is_current(&X86_64, &block));
            }
        }

        #[test]
        fn hostile_exception_directories_end_in_an_answer(
            bytes in any::<Vec<u8>>(),
            image in any::<Vec<u8>>(),
            rva in any::<u32>(),
        ) {
            let directory = ExceptionDirectory::new(bytes);
            if let Some(function) = directory.function(&X86_64, &Flat(image.clone()), rva) {
                directory.rule(&X86_64, &Flat(image), function, rva, true).ok();
            }
        }
    }
}
