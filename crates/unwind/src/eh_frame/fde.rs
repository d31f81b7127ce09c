//! One section of call frame information in memory: the index of its FDEs, and what the FDE that
//! covers an address says about it.

use super::expression::{ExpressionValue, SectionBytes, evaluate, general, narrow};
use crate::machine::TargetMachine;
use crate::rule::{Cfa, FrameKind, Register, Rule, RuleRefusal, Saved};
use gimli::{
    BaseAddresses, CfaRule, CommonInformationEntry, FrameDescriptionEntry, RegisterRule,
    UnwindContext, UnwindOffset, UnwindSection,
};
use std::ops::Range;

/// Longest CIE or FDE that is looked into, bytes: the longest of Chromium's has under 20 KiB.
pub(super) const MAX_ENTRY_BYTES: usize = 32 << 10;
/// Most entries looked at when an index is made by reading the whole section, whether they turn out
/// to be of use or not; what is behind them is in no index. Only Go's programs need one, and the
/// largest of those have some 100,000 functions.
const MAX_INDEX: usize = 512 << 10;
/// Most bytes of CIEs read for one index: each FDE that names another one than the FDE before it
/// has its own parsed anew.
const MAX_INDEX_CIE_BYTES: usize = 32 << 20;
/// Bytes of the length a CIE or FDE begins with.
pub(super) const LENGTH_BYTES: usize = 4;

/// A rule and the range its FDE covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FdeRule {
    /// The rule.
    pub rule: Rule,
    /// Addresses of the function, or of the part of it, that the FDE is for.
    pub function: Range<u64>,
    /// Which table says so.
    pub table: CfiTable,
}

/// A table of call frame information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CfiTable {
    /// `.eh_frame`.
    EhFrame,
    /// `.debug_frame`.
    DebugFrame,
}

impl FdeRule {
    /// True when the rule says that a register is saved below the stack pointer. Clang writes that
    /// for the instructions after an epilogue's pops (it moves the CFA, but does not restore the
    /// registers), where the memory may be overwritten already and the register itself holds the
    /// value; a few leaf functions save into the red zone in earnest. The code tells which.
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
pub(super) struct IndexEntry {
    start: u64,
    end: u64,
    offset: usize,
}

/// A section of call frame information in memory.
pub(super) struct Dwarf<'a, S> {
    pub(super) table: CfiTable,
    pub(super) section: S,
    /// The same bytes, for looking at an entry's length before it is parsed: a CIE's augmentation
    /// alone may take up the section, and gimli parses a CIE for each FDE that names it.
    pub(super) bytes: &'a [u8],
    pub(super) bases: BaseAddresses,
}

type Cie<'a> = CommonInformationEntry<SectionBytes<'a>>;

impl<'a, S: UnwindSection<SectionBytes<'a>>> Dwarf<'a, S> {
    /// Length of the CIE or FDE at `offset`, when it is one that is looked into. The form with
    /// 64-bit lengths, which says `u32::MAX` first, is for sections of more than 4 GiB.
    fn entry_bytes(&self, offset: usize) -> Option<usize> {
        let length = self.bytes.get(offset..)?.first_chunk::<LENGTH_BYTES>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        (length <= MAX_ENTRY_BYTES).then_some(length + LENGTH_BYTES)
    }

    fn cie(&self, offset: S::Offset) -> gimli::Result<Cie<'a>> {
        // What parsing says of a CIE that is not to be parsed.
        self.entry_bytes(UnwindOffset::into(offset)).ok_or(gimli::Error::UnsupportedOffset)?;
        self.section.cie_from_offset(&self.bases, offset)
    }

    /// Looks at every FDE once.
    pub(super) fn index(&self) -> Vec<IndexEntry> {
        let mut index = Vec::new();
        let mut entries = self.section.entries(&self.bases);
        let (mut last, mut cie_bytes): (Option<(usize, gimli::Result<Cie<'a>>)>, _) = (None, 0);
        // An entry that does not parse ends the section: what follows has no known place.
        for _ in 0..MAX_INDEX {
            let Ok(Some(entry)) = entries.next() else { break };
            let gimli::CieOrFde::Fde(partial) = entry else { continue };
            let offset = partial.offset();
            // One that would not be executed has no place in the index, nor has one whose CIE does
            // not parse.
            if self.entry_bytes(offset).is_none() {
                continue;
            }
            let named = partial.cie_offset();
            let cie_offset: usize = UnwindOffset::into(named);
            let cie = match &last {
                Some((at, cie)) if *at == cie_offset => cie.clone(),
                _ => {
                    cie_bytes += self.entry_bytes(cie_offset).unwrap_or(0);
                    if cie_bytes > MAX_INDEX_CIE_BYTES {
                        break;
                    }
                    let cie = self.cie(named);
                    last = Some((cie_offset, cie.clone()));
                    cie
                }
            };
            let Ok(fde) = partial.parse(|_, _, _| cie.clone()) else { continue };
            let (start, end) = (fde.initial_address(), fde.end_address());
            if start < end {
                index.push(IndexEntry { start, end, offset });
            }
        }
        index.sort_unstable_by_key(|e| e.start);
        index
    }

    pub(super) fn by_index<A: FdeQuery>(
        &self,
        machine: &TargetMachine,
        index: &[IndexEntry],
        address: u64,
    ) -> Result<A, RuleRefusal> {
        let after = index.partition_point(|e| e.start <= address);
        let entry = after.checked_sub(1).and_then(|i| index.get(i)).ok_or(RuleRefusal::NoEntry)?;
        if address >= entry.end {
            return Err(RuleRefusal::NoEntry);
        }
        self.ask(machine, entry.offset, address)
    }

    /// What the FDE at `offset` says of `address`.
    pub(super) fn ask<A: FdeQuery>(
        &self,
        machine: &TargetMachine,
        offset: usize,
        address: u64,
    ) -> Result<A, RuleRefusal> {
        self.entry_bytes(offset).ok_or(RuleRefusal::Unsupported)?;
        let fde = self
            .section
            .fde_from_offset(&self.bases, S::Offset::from(offset), |_, _, at| self.cie(at));
        let fde = fde.map_err(|error| match error {
            gimli::Error::UnsupportedOffset => RuleRefusal::Unsupported,
            _ => RuleRefusal::Malformed,
        })?;
        if !fde.contains(address) {
            return Err(RuleRefusal::NoEntry);
        }
        A::of(machine, self, &fde, address)
    }
}

/// What is asked of the FDE that covers an address.
pub(super) trait FdeQuery: Sized {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        machine: &TargetMachine,
        dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        address: u64,
    ) -> Result<Self, RuleRefusal>;
}

impl FdeQuery for Range<u64> {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        _machine: &TargetMachine,
        _dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        _address: u64,
    ) -> Result<Self, RuleRefusal> {
        Ok(fde.initial_address()..fde.end_address())
    }
}

impl FdeQuery for Option<u64> {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        _machine: &TargetMachine,
        _dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        _address: u64,
    ) -> Result<Self, RuleRefusal> {
        match fde.lsda() {
            Some(gimli::Pointer::Direct(address)) => Ok(Some(address)),
            _ => Ok(None),
        }
    }
}

impl FdeQuery for FdeRule {
    fn of<'a, S: UnwindSection<SectionBytes<'a>>>(
        machine: &TargetMachine,
        dwarf: &Dwarf<'a, S>,
        fde: &FrameDescriptionEntry<SectionBytes<'a>>,
        address: u64,
    ) -> Result<Self, RuleRefusal> {
        let rule = fde_rule(machine, &dwarf.section, &dwarf.bases, fde, address)?;
        Ok(Self { rule, function: fde.initial_address()..fde.end_address(), table: dwarf.table })
    }
}

/// The rule at `address` by the program of the FDE that covers it.
fn fde_rule<'a, S: UnwindSection<SectionBytes<'a>>>(
    machine: &TargetMachine,
    section: &S,
    bases: &BaseAddresses,
    fde: &FrameDescriptionEntry<SectionBytes<'a>>,
    address: u64,
) -> Result<Rule, RuleRefusal> {
    let return_address = gimli::Register(machine.dwarf.return_column);
    if fde.cie().return_address_register() != return_address {
        return Err(RuleRefusal::Unsupported);
    }
    let mut context = UnwindContext::new();
    let row = fde
        .unwind_info_for_address(section, bases, &mut context, address)
        .map_err(|_| RuleRefusal::Malformed)?;
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            Cfa::Register { base: general(machine, *register)?, offset: narrow(*offset)? }
        }
        CfaRule::Expression(expression) => {
            let expression = expression.get(section).map_err(|_| RuleRefusal::Malformed)?;
            match evaluate(machine, expression, fde.cie().encoding(), address)? {
                ExpressionValue::Register { base, offset } => {
                    Cfa::Register { base, offset: narrow(offset)? }
                }
                ExpressionValue::Deref { base, offset, add } => {
                    Cfa::Deref { base, offset: narrow(offset)?, add: narrow(add)? }
                }
                ExpressionValue::Constant(_) => return Err(RuleRefusal::Unsupported),
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
                let expression = expression.get(section).map_err(|_| RuleRefusal::Malformed)?;
                match evaluate(machine, expression, fde.cie().encoding(), address)? {
                    ExpressionValue::Register { base, offset } => {
                        Saved::AtRegister { base, offset: narrow(offset)? }
                    }
                    ExpressionValue::Deref { .. } | ExpressionValue::Constant(_) => Saved::Lost,
                }
            }
            RegisterRule::ValExpression(_)
            | RegisterRule::Architectural
            | RegisterRule::Constant(_) => Saved::Lost,
        };
        if *register == return_address {
            // A return address that is saved in a way not understood must not look like the start
            // of the thread.
            if saved == Saved::Lost && !matches!(how, RegisterRule::Undefined) {
                return Err(RuleRefusal::Unsupported);
            }
            rule.return_address = match (saved, machine.link) {
                (Saved::Same, Some(link)) => Saved::InRegister(link),
                _ => saved,
            };
        } else if let Some(register) = machine.registers.by_dwarf(register.0) {
            rule.registers[register.index()] = saved;
        }
    }
    // `Same` for the return address would mean the frame has none of its own: a loop.
    if rule.return_address == Saved::Same {
        return Err(RuleRefusal::Malformed);
    }
    Ok(rule)
}
