//! Managed code: which method body a PC is in, and its rule. JIT bodies are found in the process's memory, ReadyToRun ones
//! in the exception directory of their file.
//!
//! *JIT.* The eight bytes before a body point to its `RealCodeHeader` (dotnet/runtime src/coreclr/vm/codeman.h): debug info, EH info,
//! GC info and MethodDesc pointers, then at +32 the number of unwind entries and that many RUNTIME_FUNCTIONs, the same in
//! .NET 8, 9 and 10. Entry 0 is the body, the others its funclets, right behind it; all offsets count from the code heap's base, which is
//! therefore the body's start minus entry 0's begin. Bodies start at multiples of 16 (`CODE_SIZE_ALIGN` in codeman.cpp), so the body of a
//! PC is found by going back in steps of 16 to the first address that has such a header. Code heaps hold bodies in
//! no particular order but never one inside another: the nearest header decides.
//! *ReadyToRun.* PE data directory 3 is an array of RUNTIME_FUNCTIONs sorted by begin; funclets have entries of their own.
//! *Neither.* What is left in JIT memory, and the call thunks of ReadyToRun images, are stubs: `epilogue.rs` replays them.

use super::TargetMemory;
use super::epilogue::{self, CODE_BYTES};
use super::rule::{Cfa, FrameKind, Refusal, Rule};
use super::unwind_info::{self, FUNCTION_BYTES, HEADER_BYTES, Header, RuntimeFunction, u32_at, u64_at};
use std::ops::Range;

/// Longest method body that is found by going back, bytes; the longest in ASP.NET Core's JIT code has under 100 KiB.
pub const MAX_BODY_BYTES: u64 = 1 << 20;
/// Most unwind entries (the body and its funclets) one method may have.
const MAX_ENTRIES: usize = 4096;
/// Most headers that look right at first sight and are read, in one search.
const MAX_CANDIDATES: u32 = 64;
/// Bytes of code read at a time.
const CHUNK_BYTES: u64 = 4096;
/// `CODE_SIZE_ALIGN`.
const BODY_ALIGN: u64 = 16;
/// `RealCodeHeader::nUnwindInfos`.
const HEADER_COUNT_AT: usize = 32;
/// `RealCodeHeader::unwindInfos`.
const HEADER_ENTRIES_AT: usize = 36;
/// User addresses are below this (x86-64 with four-level tables, and what a process gets without asking for more).
const USER_END: u64 = 1 << 47;

/// A JIT-compiled body with its funclets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JitBody {
    /// First byte of the body and first byte after its last funclet.
    pub range: Range<u64>,
    /// Base its entries count from.
    base: u64,
    entries: Vec<RuntimeFunction>,
    /// UNWIND_INFO of the body, kept so that callers in it can be left after the process is gone.
    body_unwind: Vec<u8>,
    /// Address and pointers of the header: they change when the place is given to another method.
    identity: [u64; 5],
}

/// How much work a search may still do, bytes of target memory.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Bytes left.
    pub bytes: u64,
}

impl Budget {
    fn spend(&mut self, bytes: u64) -> Result<(), Refusal> {
        self.bytes = self.bytes.checked_sub(bytes).ok_or(Refusal::Budget)?;
        Ok(())
    }
}

impl JitBody {
    /// Finds the body that covers `pc` in a mapping that begins at `floor`; `Ok(None)` when there is none: a stub.
    ///
    /// # Errors
    /// [`Refusal::Unreadable`] when the code itself cannot be read, [`Refusal::Budget`].
    pub fn find(
        memory: &dyn TargetMemory,
        pc: u64,
        floor: u64,
        budget: &mut Budget,
    ) -> Result<Option<Self>, Refusal> {
        let lowest = floor.max(pc.saturating_sub(MAX_BODY_BYTES));
        let mut candidates = MAX_CANDIDATES;
        // One chunk at a time, downwards; each holds the pointers before the starts in (from + 8, upper + 8].
        let mut upper = pc & !(BODY_ALIGN - 1);
        let mut chunk = vec![0u8; usize::try_from(CHUNK_BYTES).unwrap_or_default()];
        while upper > lowest {
            let from = upper.saturating_sub(CHUNK_BYTES).max(lowest & !7);
            let length = usize::try_from(upper - from).unwrap_or_default().min(chunk.len());
            budget.spend(CHUNK_BYTES)?;
            let Some(bytes) = chunk.get_mut(..length) else { return Err(Refusal::Unreadable) };
            if memory.read(from, bytes) < length {
                return if upper == pc & !(BODY_ALIGN - 1) { Err(Refusal::Unreadable) } else { Ok(None) };
            }
            let mut start = upper;
            while start >= from.saturating_add(8) {
                let at = usize::try_from(start - 8 - from).unwrap_or(usize::MAX);
                if let Some(header) = u64_at(bytes, at).filter(|&h| is_pointer(h)) {
                    budget.spend(u64::try_from(HEADER_ENTRIES_AT).unwrap_or_default())?;
                    if let Some(body) = Self::at(memory, start, header) {
                        return Ok(body.function(pc).is_some().then_some(body));
                    }
                    candidates -= 1;
                    if candidates == 0 {
                        return Ok(None);
                    }
                }
                let Some(next) = start.checked_sub(BODY_ALIGN) else { return Ok(None) };
                start = next;
            }
            upper = start;
        }
        Ok(None)
    }

    /// Reads and checks the header that would make `start` a body.
    fn at(memory: &dyn TargetMemory, start: u64, header: u64) -> Option<Self> {
        let mut fixed = [0u8; HEADER_ENTRIES_AT + FUNCTION_BYTES];
        if memory.read(header, &mut fixed) < fixed.len() {
            return None;
        }
        let pointer = |i: usize| u64_at(&fixed, i * 8);
        let identity = [header, pointer(0)?, pointer(1)?, pointer(2)?, pointer(3)?];
        let [_, debug, exceptions, gc, method] = identity;
        let optional = |p: u64| p == 0 || (0x1000..USER_END).contains(&p);
        if !optional(debug)
            || !optional(exceptions)
            || !(0x1000..USER_END).contains(&gc)
            || !is_pointer(method)
        {
            return None;
        }
        let count = usize::try_from(u32_at(&fixed, HEADER_COUNT_AT)?).ok()?;
        let first = RuntimeFunction::decode(fixed.get(HEADER_ENTRIES_AT..)?)?;
        let base = start.checked_sub(u64::from(first.begin))?;
        if !(1..=MAX_ENTRIES).contains(&count) || first.begin >= first.end {
            return None;
        }
        let mut entries = vec![first];
        if count > 1 {
            let mut bytes = vec![0u8; (count - 1) * FUNCTION_BYTES];
            let at = header.checked_add(u64::try_from(fixed.len()).ok()?)?;
            if memory.read(at, &mut bytes) < bytes.len() {
                return None;
            }
            entries.extend(bytes.chunks_exact(FUNCTION_BYTES).filter_map(RuntimeFunction::decode));
        }
        // Funclets follow in order; the whole is no longer than a search goes back.
        let ordered = entries.windows(2).all(|w| w[0].end <= w[1].begin && w[1].begin < w[1].end);
        let end = base + u64::from(entries.last()?.end);
        if !ordered || end - start > MAX_BODY_BYTES {
            return None;
        }
        let unwind_at = base.checked_add(u64::from(first.unwind))?;
        let body_unwind = read_unwind_info(|from, into| memory.read(unwind_at.wrapping_add(from), into))?;
        if u32::from(Header::decode(&body_unwind)?.prologue) > first.end - first.begin {
            return None;
        }
        Some(Self { range: start..end, base, entries, body_unwind, identity })
    }

    /// True when the same body is still there; also when the process is gone.
    #[must_use]
    pub fn is_current(&self, memory: &dyn TargetMemory) -> bool {
        let mut pointer = [0u8; 8];
        if memory.read(self.range.start.wrapping_sub(8), &mut pointer) < pointer.len() {
            return true;
        }
        let header = u64::from_le_bytes(pointer);
        header == self.identity[0]
            && Self::at(memory, self.range.start, header).is_some_and(|now| now == *self)
    }

    /// A body without entries.
    #[cfg(test)]
    pub(crate) fn for_test(range: Range<u64>) -> Self {
        Self { range, base: 0, entries: Vec::new(), body_unwind: Vec::new(), identity: [0; 5] }
    }

    fn function(&self, pc: u64) -> Option<RuntimeFunction> {
        let offset = u32::try_from(pc.checked_sub(self.base)?).ok()?;
        self.entries.iter().find(|f| (f.begin..f.end).contains(&offset)).copied()
    }

    /// The rule at `pc`, which the body covers. `exact` says that `pc` is the next instruction to run, not inside a call.
    ///
    /// # Errors
    /// As [`unwind_info::rule`].
    pub fn rule(&self, memory: &dyn TargetMemory, pc: u64, exact: bool) -> Result<Rule, Refusal> {
        let function = self.function(pc).ok_or(Refusal::NoEntry)?;
        let unwind = |offset: u32| {
            if self.entries.first().is_some_and(|body| body.unwind == offset) {
                return Some(self.body_unwind.clone());
            }
            let address = self.base.checked_add(u64::from(offset))?;
            read_unwind_info(|from, into| memory.read(address.wrapping_add(from), into))
        };
        let code = |into: &mut [u8]| memory.read(pc, into);
        rule_in(function, self.base, pc, exact, unwind, code)
    }
}

/// Reads one UNWIND_INFO through `read(offset, into)`: the fixed part first, then as much as that says.
fn read_unwind_info(read: impl Fn(u64, &mut [u8]) -> usize) -> Option<Vec<u8>> {
    let mut info = vec![0u8; HEADER_BYTES];
    if read(0, &mut info) < HEADER_BYTES {
        return None;
    }
    let needed = Header::decode(&info).map_or(HEADER_BYTES, |h| h.needed_bytes());
    info.resize(needed, 0);
    (read(0, &mut info) == needed).then_some(info)
}

fn rule_in(
    function: RuntimeFunction,
    base: u64,
    pc: u64,
    exact: bool,
    unwind: impl Fn(u32) -> Option<Vec<u8>>,
    code: impl FnOnce(&mut [u8]) -> usize,
) -> Result<Rule, Refusal> {
    let offset = u32::try_from(pc.wrapping_sub(base)).ok().and_then(|o| o.checked_sub(function.begin));
    let offset = offset.ok_or(Refusal::NoEntry)?;
    if exact {
        let header = unwind(function.unwind).and_then(|i| Header::decode(&i)).ok_or(Refusal::Malformed)?;
        if offset >= u32::from(header.prologue) {
            let range =
                base.wrapping_add(u64::from(function.begin))..base.wrapping_add(u64::from(function.end));
            let mut bytes = [0u8; CODE_BYTES];
            let length = code(&mut bytes);
            if length == 0 {
                return Err(Refusal::Unreadable);
            }
            if let Some(rule) = epilogue::epilogue(bytes.get(..length).unwrap_or_default(), pc, &range) {
                return Ok(rule);
            }
        }
    }
    unwind_info::rule(function, offset, unwind)
}

/// A 8-byte aligned address a process could have memory at.
fn is_pointer(value: u64) -> bool {
    value.is_multiple_of(8) && (0x1_0000..USER_END).contains(&value)
}

/// The rule for `pc`, with the code from there on, in memory without method bodies: it must run straight to a jump or a return.
///
/// # Errors
/// [`Refusal::Unreadable`], [`Refusal::Unsupported`].
pub fn stub_rule(code: &[u8], pc: u64) -> Result<Rule, Refusal> {
    if code.is_empty() { Err(Refusal::Unreadable) } else { epilogue::stub(code, pc) }
}

/// First bytes of `OnHijackTripThread` (runtime src/coreclr/vm/amd64/asmhelpers.S): push rax, rbp, rbx, r15, r14, r13, r12. No other
/// function of libcoreclr 8.0.32, 9.0.5 and 10.0.13 begins so.
pub const HIJACK_PROLOGUE: [u8; 11] = [0x50, 0x55, 0x53, 0x41, 0x57, 0x41, 0x56, 0x41, 0x55, 0x41, 0x54];

/// The rule inside `OnHijackTripThread`, at `offset` from its start, given what its call frame information says.
///
/// To suspend a thread the runtime puts this function's address in place of a managed return address (threadsuspend.cpp,
/// `Thread::HijackThread`), so it is entered by a `ret`: there is no return address on the stack until its first push made room and
/// `OnHijackWorker` wrote the true one there. Its CFI is that of a called function, one word too high.
///
/// # Errors
/// [`Refusal::Unsupported`] at the first instruction: the return address is in the runtime's `Thread` object only.
pub fn hijack_rule(mut rule: Rule, offset: u64) -> Result<Rule, Refusal> {
    let Cfa::Register { base, offset: cfa } = rule.cfa else { return Err(Refusal::Unsupported) };
    if offset == 0 {
        return Err(Refusal::Unsupported);
    }
    rule.cfa = Cfa::Register { base, offset: cfa.saturating_sub(8) };
    rule.kind = FrameKind::Stub { words: 1 };
    Ok(rule)
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

    fn get(&self, i: usize) -> Option<RuntimeFunction> {
        self.bytes.get(i.checked_mul(FUNCTION_BYTES)?..).and_then(RuntimeFunction::decode)
    }

    /// The function that covers `rva`.
    #[must_use]
    pub fn function(&self, rva: u32) -> Option<RuntimeFunction> {
        let (mut low, mut high) = (0, self.bytes.len() / FUNCTION_BYTES);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle)?.begin <= rva {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        self.get(low.checked_sub(1)?).filter(|f| (f.begin..f.end).contains(&rva))
    }

    /// The rule at `rva` in `function`, as [`JitBody::rule`].
    ///
    /// # Errors
    /// As [`unwind_info::rule`].
    pub fn rule(
        &self,
        image: &dyn PeImage,
        function: RuntimeFunction,
        rva: u32,
        exact: bool,
    ) -> Result<Rule, Refusal> {
        let unwind = |offset: u32| {
            read_unwind_info(|from, into| {
                u32::try_from(from)
                    .ok()
                    .and_then(|f| offset.checked_add(f))
                    .map_or(0, |at| image.read(at, into))
            })
        };
        rule_in(function, 0, u64::from(rva), exact, unwind, |into| image.read(rva, into))
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::Register;
    use super::*;
    use proptest::prelude::{any, prop, proptest};

    /// Memory of a made-up process: one block.
    struct Block {
        address: u64,
        bytes: Vec<u8>,
    }

    impl TargetMemory for Block {
        fn read(&self, address: u64, into: &mut [u8]) -> usize {
            let Some(from) = address.checked_sub(self.address).and_then(|o| usize::try_from(o).ok()) else {
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
        JitBody::find(block, pc, HEAP, &mut Budget { bytes: 1 << 20 }).unwrap()
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
        let cfa = |pc, exact| body.rule(&block, HEAP + pc, exact).unwrap().cfa;
        assert_eq!(cfa(0x1010, true), Cfa::Register { base: Register::RSP, offset: 8 });
        assert_eq!(cfa(0x1050, true), Cfa::Register { base: Register::RSP, offset: 80 });
        assert_eq!(cfa(0x1120, false), Cfa::Register { base: Register::RSP, offset: 80 });
    }

    #[test]
    fn another_method_at_the_same_place_is_noticed() {
        let mut block = heap();
        let body = find(&block, HEAP + 0x1020).unwrap();
        assert!(body.is_current(&block));
        block.put(0x3018, &(HEAP + 0x3810).to_le_bytes());
        assert!(!body.is_current(&block));
    }

    #[test]
    fn a_search_stops_when_its_budget_is_spent() {
        let block = Block { address: HEAP, bytes: vec![0x90; 1 << 20] };
        let found = JitBody::find(&block, HEAP + 0xf_0000, HEAP, &mut Budget { bytes: 64 << 10 });
        assert_eq!(found, Err(Refusal::Budget));
    }

    #[test]
    fn the_exception_directory_finds_the_function_that_covers_an_address() {
        let words = [0x10u32, 0x20, 1, 0x20, 0x28, 2, 0x40, 0x50, 3];
        let directory = ExceptionDirectory::new(words.iter().flat_map(|w| w.to_le_bytes()).collect());
        assert_eq!(directory.function(0x1f).map(|f| f.unwind), Some(1));
        assert_eq!(directory.function(0x20).map(|f| f.unwind), Some(2));
        assert_eq!(directory.function(0x30), None);
        assert_eq!(directory.function(0x0), None);
        assert_eq!(directory.function(0x50), None);
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
                body.rule(&block, HEAP + pc, true).ok();
                std::hint::black_box(body.is_current(&block));
            }
            stub_rule(block.bytes.get(usize::try_from(pc).unwrap()..).unwrap_or_default(), HEAP + pc).ok();
        }

        #[test]
        fn hostile_exception_directories_end_in_an_answer(bytes in any::<Vec<u8>>(), image in any::<Vec<u8>>(), rva in any::<u32>()) {
            let directory = ExceptionDirectory::new(bytes);
            if let Some(function) = directory.function(rva) {
                directory.rule(&Flat(image), function, rva, true).ok();
            }
        }
    }
}
