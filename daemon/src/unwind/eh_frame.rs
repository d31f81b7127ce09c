//! (DWARF call frame information, address) → rule, for native code. One address at a time: no table is compiled.
//!
//! `.eh_frame` is found through the sorted table of `.eh_frame_hdr` (LSB 5.0, 10.6.2); where that table is missing, and for
//! `.debug_frame`, an index of (start, end, offset) is made once by reading the section from end to end.
//! Facts relied on: a CIE with augmentation `S` marks a signal frame (gcc unwind-dw2.c); glibc's `clone3`, `_start` and the
//! vDSO state the end of the stack by an undefined return address (glibc sysdeps/unix/sysv/linux/x86_64/clone3.S).
//! Of DWARF expressions those that occur are evaluated: PLT entries (binutils elf_x86_64_eh_frame_plt: the place in the
//! 16-byte entry decides, and the address is known here), signal frames (glibc sigaction.c: register plus offset, one
//! dereference) and hand-written assembly that keeps the CFA in its frame (OpenSSL).
//! On aarch64 the return address stays in x30 unless it says otherwise, and whether it is signed (`DW_CFA_AARCH64_negate_ra_state`) need not
//! be known: signatures are always taken off.

use super::machine::{Machine, NATIVE};
use super::rule::{Cfa, FrameKind, Refusal, Register, Rule, Saved};
use gimli::{
    BaseAddresses, CfaRule, DebugFrame, EhFrame, EndianSlice, LittleEndian, Operation, RegisterRule,
    UnwindContext, UnwindSection,
};
use std::ops::Range;
use std::sync::OnceLock;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// Longest FDE that is executed, bytes: the longest of Chromium's has under 20 KiB.
const MAX_FDE_BYTES: usize = 32 << 10;
/// Most entries an index made by reading the whole section may have.
const MAX_INDEX: usize = 2 << 20;
/// Most operations of one DWARF expression, and values on its stack.
const MAX_OPERATIONS: usize = 64;
/// Where the rows of `.eh_frame_hdr`'s table begin.
const TABLE_AT: usize = 12;

/// A section's bytes and the address the file gives it.
#[derive(Debug, Default, Clone)]
pub struct Section {
    /// Virtual address in the file's own numbering.
    pub address: u64,
    /// Contents.
    pub bytes: Vec<u8>,
}

/// The unwind sections of one ELF image; each may be missing.
#[derive(Debug)]
pub struct UnwindSections {
    machine: &'static Machine,
    /// `.eh_frame_hdr`.
    pub eh_frame_hdr: Option<Section>,
    /// `.eh_frame`.
    pub eh_frame: Option<Section>,
    /// `.debug_frame`.
    pub debug_frame: Option<Section>,
    /// Addresses of `.plt`, `.plt.got` and `.plt.sec`: lld writes no call frame information for them.
    pub plt: Vec<Range<u64>>,
    eh_index: OnceLock<Vec<IndexEntry>>,
    debug_index: OnceLock<Vec<IndexEntry>>,
}

/// A rule and the range its FDE covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The rule.
    pub rule: Rule,
    /// Addresses of the function, or of the part of it, that the FDE is for.
    pub function: Range<u64>,
    /// Which table says so.
    pub table: Table,
}

/// A table of call frame information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// `.eh_frame`.
    EhFrame,
    /// `.debug_frame`.
    DebugFrame,
}

impl Found {
    /// True when the rule says that a register is saved below the stack pointer. Clang writes that for the instructions after an
    /// epilogue's pops (it moves the CFA, but does not restore the registers), where the memory may be overwritten already and the
    /// register itself holds the value; a few leaf functions save into the red zone in earnest. The code tells which.
    #[must_use]
    pub fn saves_below_stack(&self) -> bool {
        let Cfa::Register { base: Register::RSP, offset } = self.rule.cfa else { return false };
        self.rule
            .registers
            .iter()
            .any(|saved| matches!(saved, Saved::AtCfa(at) if at.saturating_add(offset) < 0))
    }
}

#[derive(Debug, Clone, Copy)]
struct IndexEntry {
    start: u64,
    end: u64,
    offset: usize,
}

impl UnwindSections {
    /// Sections of this machine with the given contents.
    #[must_use]
    pub fn new(
        eh_frame_hdr: Option<Section>,
        eh_frame: Option<Section>,
        debug_frame: Option<Section>,
    ) -> Self {
        Self::of(NATIVE, eh_frame_hdr, eh_frame, debug_frame)
    }

    /// The same of another machine.
    #[must_use]
    pub fn of(
        machine: &'static Machine,
        eh_frame_hdr: Option<Section>,
        eh_frame: Option<Section>,
        debug_frame: Option<Section>,
    ) -> Self {
        Self {
            machine,
            eh_frame_hdr,
            eh_frame,
            debug_frame,
            plt: Vec::new(),
            eh_index: OnceLock::new(),
            debug_index: OnceLock::new(),
        }
    }

    /// Bytes held.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let sections = [&self.eh_frame_hdr, &self.eh_frame, &self.debug_frame];
        let indexes = [&self.eh_index, &self.debug_index];
        let index_bytes =
            indexes.iter().filter_map(|i| i.get()).map(|i| i.len() * size_of::<IndexEntry>()).sum::<usize>();
        sections.iter().filter_map(|s| s.as_ref()).map(|s| s.bytes.len()).sum::<usize>() + index_bytes
    }

    /// True when `address` is in a procedure linkage table: straight code of which a replay finds the rule.
    #[must_use]
    pub fn is_plt(&self, address: u64) -> bool {
        self.plt.iter().any(|range| range.contains(&address))
    }

    /// The rule at `address` (the file's numbering).
    ///
    /// # Errors
    /// [`Refusal`] when no table covers it or what covers it cannot be used.
    pub fn rule(&self, address: u64) -> Result<Found, Refusal> {
        match self.eh_rule(address) {
            Err(Refusal::NoEntry) => {
                self.debug_rule(address).map(|found| Found { table: Table::DebugFrame, ..found })
            }
            found => found,
        }
    }

    fn eh_rule(&self, address: u64) -> Result<Found, Refusal> {
        let section = self.eh_frame.as_ref().ok_or(Refusal::NoEntry)?;
        let mut eh_frame = EhFrame::new(&section.bytes, LittleEndian);
        eh_frame.set_vendor(self.machine.vendor);
        let mut bases = BaseAddresses::default().set_eh_frame(section.address);
        if let Some(hdr) = &self.eh_frame_hdr {
            bases = bases.set_eh_frame_hdr(hdr.address);
            if let Some(found) = by_table(self.machine, hdr, &eh_frame, section.address, &bases, address) {
                return found;
            }
        }
        let index = self.eh_index.get_or_init(|| make_index(&eh_frame, &bases));
        by_index(self.machine, index, &eh_frame, &bases, address)
    }

    fn debug_rule(&self, address: u64) -> Result<Found, Refusal> {
        let section = self.debug_frame.as_ref().ok_or(Refusal::NoEntry)?;
        let mut debug_frame = DebugFrame::new(&section.bytes, LittleEndian);
        debug_frame.set_address_size(8);
        debug_frame.set_vendor(self.machine.vendor);
        let bases = BaseAddresses::default();
        let index = self.debug_index.get_or_init(|| make_index(&debug_frame, &bases));
        by_index(self.machine, index, &debug_frame, &bases, address)
    }
}

/// Looks in the sorted table. `None` when there is none of the one form all linkers write: four bytes of version and encodings,
/// the place of `.eh_frame`, the number of rows, then rows of two offsets from the section's own address. Read here and not by gimli
/// (0.34): that multiplies the number of rows without a check.
fn by_table(
    machine: &Machine,
    hdr: &Section,
    eh_frame: &EhFrame<Bytes<'_>>,
    eh_frame_address: u64,
    bases: &BaseAddresses,
    address: u64,
) -> Option<Result<Found, Refusal>> {
    let (head, table) = hdr.bytes.split_first_chunk::<TABLE_AT>()?;
    let [1, 0x1b, 0x03, 0x3b, _, _, _, _, count @ ..] = *head else { return None };
    let count = usize::try_from(u32::from_le_bytes(count)).ok()?;
    let (rows, _) = table.as_chunks::<8>();
    let rows = rows.get(..count).unwrap_or(rows);
    if rows.is_empty() {
        return None;
    }
    let at =
        |[a, b, c, d]: [u8; 4]| hdr.address.wrapping_add_signed(i64::from(i32::from_le_bytes([a, b, c, d])));
    let after = rows.partition_point(|&[a, b, c, d, ..]| at([a, b, c, d]) <= address);
    let Some(&[.., a, b, c, d]) = after.checked_sub(1).and_then(|row| rows.get(row)) else {
        return Some(Err(Refusal::NoEntry));
    };
    let offset = at([a, b, c, d]).checked_sub(eh_frame_address).and_then(|o| usize::try_from(o).ok());
    let Some(offset) = offset else { return Some(Err(Refusal::Malformed)) };
    Some(fde_rule(machine, eh_frame, bases, offset, address, EhFrame::cie_from_offset))
}

/// Reads every FDE of a section once.
fn make_index<'a, S: UnwindSection<Bytes<'a>>>(section: &S, bases: &BaseAddresses) -> Vec<IndexEntry> {
    let mut index = Vec::new();
    let mut entries = section.entries(bases);
    // An entry that does not parse ends the section: what follows has no known place.
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else { continue };
        let offset = partial.offset();
        // An FDE of a CIE this reader cannot parse is skipped alone.
        let Ok(fde) = partial.parse(S::cie_from_offset) else { continue };
        let (start, end) = (fde.initial_address(), fde.end_address());
        if start < end {
            index.push(IndexEntry { start, end, offset });
        }
        if index.len() == MAX_INDEX {
            break;
        }
    }
    index.sort_unstable_by_key(|e| e.start);
    index
}

fn by_index<'a, S: UnwindSection<Bytes<'a>>>(
    machine: &Machine,
    index: &[IndexEntry],
    section: &S,
    bases: &BaseAddresses,
    address: u64,
) -> Result<Found, Refusal> {
    let after = index.partition_point(|e| e.start <= address);
    let entry = after.checked_sub(1).and_then(|i| index.get(i)).ok_or(Refusal::NoEntry)?;
    if address >= entry.end {
        return Err(Refusal::NoEntry);
    }
    fde_rule(machine, section, bases, entry.offset, address, S::cie_from_offset)
}

fn fde_rule<'a, S, F>(
    machine: &Machine,
    section: &S,
    bases: &BaseAddresses,
    offset: usize,
    address: u64,
    cie: F,
) -> Result<Found, Refusal>
where
    S: UnwindSection<Bytes<'a>>,
    F: FnMut(&S, &BaseAddresses, S::Offset) -> gimli::Result<gimli::CommonInformationEntry<Bytes<'a>>>,
{
    let fde = section.fde_from_offset(bases, S::Offset::from(offset), cie).map_err(|_| Refusal::Malformed)?;
    if !fde.contains(address) {
        return Err(Refusal::NoEntry);
    }
    if fde.entry_len() > MAX_FDE_BYTES || fde.cie().entry_len() > MAX_FDE_BYTES {
        return Err(Refusal::Unsupported);
    }
    let return_address = gimli::Register(machine.return_column);
    if fde.cie().return_address_register() != return_address {
        return Err(Refusal::Unsupported);
    }
    let mut context = UnwindContext::new();
    let row =
        fde.unwind_info_for_address(section, bases, &mut context, address).map_err(|_| Refusal::Malformed)?;
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            Cfa::Register { base: general(machine, *register)?, offset: narrow(*offset)? }
        }
        CfaRule::Expression(expression) => {
            let expression = expression.get(section).map_err(|_| Refusal::Malformed)?;
            match evaluate(machine, expression, fde.cie().encoding(), address)? {
                Value::Register { base, offset } => Cfa::Register { base, offset: narrow(offset)? },
                Value::Deref { base, offset, add } => {
                    Cfa::Deref { base, offset: narrow(offset)?, add: narrow(add)? }
                }
                Value::Constant(_) => return Err(Refusal::Unsupported),
            }
        }
    };
    let mut rule = machine.call(cfa);
    if fde.is_signal_trampoline() {
        rule.kind = FrameKind::Signal;
    }
    for (register, how) in row.registers() {
        let saved = match how {
            RegisterRule::Undefined => Saved::Lost,
            RegisterRule::SameValue => Saved::Same,
            RegisterRule::Offset(offset) => Saved::AtCfa(narrow(*offset)?),
            RegisterRule::ValOffset(offset) => Saved::CfaPlus(narrow(*offset)?),
            RegisterRule::Register(other) => Saved::InRegister(general(machine, *other)?),
            RegisterRule::Expression(expression) => {
                let expression = expression.get(section).map_err(|_| Refusal::Malformed)?;
                match evaluate(machine, expression, fde.cie().encoding(), address)? {
                    Value::Register { base, offset } => Saved::AtRegister { base, offset: narrow(offset)? },
                    Value::Deref { .. } | Value::Constant(_) => Saved::Lost,
                }
            }
            RegisterRule::ValExpression(_) | RegisterRule::Architectural | RegisterRule::Constant(_) => {
                Saved::Lost
            }
        };
        if *register == return_address {
            // A return address that is saved in a way not understood must not look like the start of the thread.
            if saved == Saved::Lost && !matches!(how, RegisterRule::Undefined) {
                return Err(Refusal::Unsupported);
            }
            rule.return_address = match (saved, machine.link) {
                (Saved::Same, Some(link)) => Saved::InRegister(link),
                _ => saved,
            };
        } else if let Some(register) = machine.register(register.0) {
            rule.registers[register.index()] = saved;
        }
    }
    // `Same` for the return address would mean the frame has none of its own: a loop.
    if rule.return_address == Saved::Same {
        return Err(Refusal::Malformed);
    }
    Ok(Found { rule, function: fde.initial_address()..fde.end_address(), table: Table::EhFrame })
}

fn general(machine: &Machine, register: gimli::Register) -> Result<Register, Refusal> {
    machine.register(register.0).ok_or(Refusal::Unsupported)
}

fn narrow(offset: i64) -> Result<i32, Refusal> {
    i32::try_from(offset).map_err(|_| Refusal::Unsupported)
}

/// Value of an expression as far as it can be known before a frame is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    Constant(u64),
    Register { base: Register, offset: i64 },
    Deref { base: Register, offset: i64, add: i64 },
}

impl Value {
    fn plus(self, n: i64) -> Self {
        match self {
            Self::Constant(c) => Self::Constant(c.wrapping_add_signed(n)),
            Self::Register { base, offset } => Self::Register { base, offset: offset.wrapping_add(n) },
            Self::Deref { base, offset, add } => Self::Deref { base, offset, add: add.wrapping_add(n) },
        }
    }

    fn constant(self) -> Result<u64, Refusal> {
        match self {
            Self::Constant(c) => Ok(c),
            _ => Err(Refusal::Unsupported),
        }
    }
}

/// Evaluates an expression at `address`, the only register whose value is known.
fn evaluate(
    machine: &Machine,
    expression: gimli::Expression<Bytes<'_>>,
    encoding: gimli::Encoding,
    address: u64,
) -> Result<Value, Refusal> {
    let mut operations = expression.operations(encoding);
    let mut stack: Vec<Value> = Vec::new();
    for _ in 0..MAX_OPERATIONS {
        let Some(operation) = operations.next().map_err(|_| Refusal::Malformed)? else {
            return stack.pop().ok_or(Refusal::Malformed);
        };
        let mut pop = || stack.pop().ok_or(Refusal::Malformed);
        let value = match operation {
            Operation::Nop => continue,
            Operation::UnsignedConstant { value } => Value::Constant(value),
            Operation::SignedConstant { value } => Value::Constant(value.cast_unsigned()),
            Operation::RegisterOffset { register, offset, .. }
                if Some(register.0) == machine.instruction_pointer =>
            {
                Value::Constant(address.wrapping_add_signed(offset))
            }
            Operation::RegisterOffset { register, offset, .. } => {
                Value::Register { base: general(machine, register)?, offset }
            }
            Operation::PlusConstant { value } => pop()?.plus(value.cast_signed()),
            Operation::Plus => match (pop()?, pop()?) {
                (Value::Constant(c), other) | (other, Value::Constant(c)) => other.plus(c.cast_signed()),
                _ => return Err(Refusal::Unsupported),
            },
            Operation::Minus => {
                let right = pop()?.constant()?;
                pop()?.plus(right.wrapping_neg().cast_signed())
            }
            Operation::And => Value::Constant(pop()?.constant()? & pop()?.constant()?),
            Operation::Shl => {
                let count = pop()?.constant()?;
                let value = pop()?.constant()?;
                Value::Constant(u32::try_from(count).ok().and_then(|c| value.checked_shl(c)).unwrap_or(0))
            }
            Operation::Ge => {
                let right = pop()?.constant()?.cast_signed();
                Value::Constant(u64::from(pop()?.constant()?.cast_signed() >= right))
            }
            Operation::Deref { size: 8, space: false, .. } => match pop()? {
                Value::Register { base, offset } => Value::Deref { base, offset, add: 0 },
                _ => return Err(Refusal::Unsupported),
            },
            _ => return Err(Refusal::Unsupported),
        };
        stack.push(value);
    }
    Err(Refusal::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::x86_64::X86_64;
    use proptest::prelude::{any, proptest};

    fn at(bytes: &[u8], address: u64) -> Result<Value, Refusal> {
        let encoding = gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 4 };
        evaluate(&X86_64, gimli::Expression(EndianSlice::new(bytes, LittleEndian)), encoding, address)
    }

    #[test]
    fn a_plt_entry_has_one_word_more_once_it_pushed_its_index() {
        // breg7 8; breg16 0; lit15; and; lit11; ge; lit3; shl; plus
        let plt = [0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22];
        assert_eq!(at(&plt, 0x1020), Ok(Value::Register { base: Register::RSP, offset: 8 }));
        assert_eq!(at(&plt, 0x102b), Ok(Value::Register { base: Register::RSP, offset: 16 }));
    }

    #[test]
    fn a_cfa_kept_in_the_frame_is_one_dereference() {
        // breg7 40; deref; plus_uconst 8
        let saved = [0x77, 40, 0x06, 0x23, 8];
        assert_eq!(at(&saved, 0), Ok(Value::Deref { base: Register::RSP, offset: 40, add: 8 }));
    }

    /// One FDE for 0x5000..0x5010 behind one CIE, as gcc writes them, at 0x2000.
    fn eh_frame() -> Section {
        let mut bytes =
            vec![20, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1, 0, 0];
        bytes.extend([20, 0, 0, 0, 28, 0, 0, 0]);
        bytes.extend((0x5000i32 - 0x2020).to_le_bytes());
        bytes.extend(0x10u32.to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0; 4]);
        Section { address: 0x2000, bytes }
    }

    #[test]
    fn the_table_is_searched_and_its_count_not_believed() {
        for count in [1, 0, 2, u32::MAX] {
            let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
            hdr.extend(count.to_le_bytes());
            for place in [0x5000i32, 0x2018] {
                hdr.extend((place - 0x3000).to_le_bytes());
            }
            let hdr = Some(Section { address: 0x3000, bytes: hdr });
            let sections = UnwindSections::of(&X86_64, hdr, Some(eh_frame()), None);
            let found = sections.rule(0x500f).unwrap();
            assert_eq!((found.function, found.rule), (0x5000..0x5010, X86_64.frameless()));
            assert_eq!(sections.rule(0x5010), Err(Refusal::NoEntry));
            assert_eq!(sections.rule(0x4fff), Err(Refusal::NoEntry));
        }
    }

    #[test]
    fn a_table_of_another_form_is_passed_over() {
        // DW_EH_PE_udata8 as count, and so many rows that their bytes overflow: found by the fuzzer in gimli's reader.
        let mut hdr = vec![1, 0x1b, 0x04, 0x3b, 0, 0, 0, 0];
        hdr.extend(u64::MAX.to_le_bytes());
        hdr.extend([0xff; 8]);
        let sections = UnwindSections::of(
            &X86_64,
            Some(Section { address: 0x3000, bytes: hdr }),
            Some(eh_frame()),
            None,
        );
        assert!(sections.rule(0x5000).is_ok());
    }

    proptest! {
        #[test]
        fn random_sections_give_a_rule_or_a_refusal(
            hdr in any::<Vec<u8>>(), eh in any::<Vec<u8>>(), debug in any::<Vec<u8>>(), address in any::<u64>(),
        ) {
            let section = |bytes| Some(Section { address: 0x1000, bytes });
            let sections = UnwindSections::of(&X86_64, section(hdr), section(eh), section(debug));
            sections.rule(address).ok();
        }

        #[test]
        fn random_expressions_end(bytes in any::<Vec<u8>>(), address in any::<u64>()) {
            at(&bytes, address).ok();
        }
    }
}
