//! (DWARF call frame information, address) → rule, for native code. One address at a time: no table
//! is compiled.
//!
//! `.eh_frame` is found through the sorted table of `.eh_frame_hdr` (LSB 5.0, 10.6.2); where that
//! table is missing, and for `.debug_frame`, an index of (start, end, offset) is made once by
//! reading the section from end to end. Where the sections are large (megabytes in browsers and
//! compilers) they stay in the file, and of both only what one look-up needs is read. Facts relied
//! on: a CIE with augmentation `S` marks a signal frame (gcc unwind-dw2.c); glibc's `clone3`,
//! `_start` and the vDSO state the end of the stack by an undefined return address (glibc
//! sysdeps/unix/sysv/linux/x86_64/clone3.S). Of DWARF expressions those that occur are evaluated:
//! PLT entries (binutils elf_x86_64_eh_frame_plt: the place in the 16-byte entry decides, and the
//! address is known here), signal frames (glibc sigaction.c: register plus offset, one dereference)
//! and hand-written assembly that keeps the CFA in its frame (OpenSSL). On aarch64 the return
//! address stays in x30 unless it says otherwise, and whether it is signed
//! (`DW_CFA_AARCH64_negate_ra_state`) need not be known: signatures are always taken off.

mod expression;
mod fde;
mod search_table;

pub use self::fde::{CfiTable, FdeRule};
pub use self::search_table::{CfiSection, FarSections, FileBytes, FileSection};

use self::fde::{Dwarf, FdeQuery, IndexEntry};
use self::search_table::by_table;
use super::machine::TargetMachine;
use super::native::NATIVE;
use super::rule::RuleRefusal;
use gimli::{BaseAddresses, DebugFrame, EhFrame, LittleEndian};
use std::ops::Range;
use std::sync::OnceLock;

/// No file: all that is known is in memory.
struct NoFile;

impl FileBytes for NoFile {
    fn read_at(&self, _offset: u64, _into: &mut [u8]) -> usize {
        0
    }
}

/// The unwind sections of one ELF image; each may be missing.
#[derive(Debug)]
pub struct UnwindSections {
    machine: &'static TargetMachine,
    /// Instead of `eh_frame_hdr` and `eh_frame`.
    pub far: Option<FarSections>,
    /// `.eh_frame_hdr`.
    pub eh_frame_hdr: Option<CfiSection>,
    /// `.eh_frame`.
    pub eh_frame: Option<CfiSection>,
    /// `.debug_frame`.
    pub debug_frame: Option<CfiSection>,
    /// Addresses of `.plt`, `.plt.got` and `.plt.sec`: lld writes no call frame information for
    /// them.
    pub plt: Vec<Range<u64>>,
    eh_index: OnceLock<Vec<IndexEntry>>,
    debug_index: OnceLock<Vec<IndexEntry>>,
}

impl UnwindSections {
    /// Sections of this machine with the given contents.
    #[must_use]
    pub fn new(
        eh_frame_hdr: Option<CfiSection>,
        eh_frame: Option<CfiSection>,
        debug_frame: Option<CfiSection>,
    ) -> Self {
        Self::of(NATIVE, eh_frame_hdr, eh_frame, debug_frame)
    }

    /// The same of another machine.
    #[must_use]
    pub fn of(
        machine: &'static TargetMachine,
        eh_frame_hdr: Option<CfiSection>,
        eh_frame: Option<CfiSection>,
        debug_frame: Option<CfiSection>,
    ) -> Self {
        Self {
            machine,
            far: None,
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
        let starts = self.far.as_ref().and_then(|far| far.starts.get());
        let index_bytes = indexes
            .iter()
            .filter_map(|i| i.get())
            .map(|i| i.len() * size_of::<IndexEntry>())
            .sum::<usize>();
        sections.iter().filter_map(|s| s.as_ref()).map(|s| s.bytes.len()).sum::<usize>()
            + index_bytes
            + starts.map_or(0, |starts| size_of_val(&**starts))
    }

    /// True when `address` is in a procedure linkage table: straight code of which a replay finds
    /// the rule.
    #[must_use]
    pub fn is_plt(&self, address: u64) -> bool {
        self.plt.iter().any(|range| range.contains(&address))
    }

    /// The rule at `address` (the file's numbering) by the sections in memory.
    ///
    /// # Errors
    /// [`RuleRefusal`] when no table covers it or what covers it cannot be used.
    pub fn rule(&self, address: u64) -> Result<FdeRule, RuleRefusal> {
        self.rule_in(&NoFile, address)
    }

    /// The same, with the image's file for what was left in it.
    ///
    /// # Errors
    /// As [`UnwindSections::rule`], and [`RuleRefusal::Unreadable`] when the file does not give it.
    pub fn rule_in(&self, file: &dyn FileBytes, address: u64) -> Result<FdeRule, RuleRefusal> {
        self.ask(file, address)
    }

    /// The range of the FDE that covers `address`: what an address costs that needs no rule, for a
    /// rule's program may be long.
    ///
    /// # Errors
    /// As [`UnwindSections::rule_in`].
    pub fn function_in(
        &self,
        file: &dyn FileBytes,
        address: u64,
    ) -> Result<Range<u64>, RuleRefusal> {
        self.ask(file, address)
    }

    /// Where the data is that the FDE which covers `address` names for its language (LSDA).
    #[must_use]
    pub fn language_data_in(&self, file: &dyn FileBytes, address: u64) -> Option<u64> {
        self.ask(file, address).ok()?
    }

    fn ask<A: FdeQuery>(&self, file: &dyn FileBytes, address: u64) -> Result<A, RuleRefusal> {
        let found = match &self.far {
            Some(far) => far.ask(self.machine, file, address),
            None => self.eh_frame(address),
        };
        match found {
            Err(RuleRefusal::NoEntry) => self.debug_frame(address),
            found => found,
        }
    }

    fn eh_frame<A: FdeQuery>(&self, address: u64) -> Result<A, RuleRefusal> {
        let section = self.eh_frame.as_ref().ok_or(RuleRefusal::NoEntry)?;
        let mut eh_frame = EhFrame::new(&section.bytes, LittleEndian);
        eh_frame.set_vendor(self.machine.dwarf.vendor);
        let mut bases = BaseAddresses::default().set_eh_frame(section.address);
        if let Some(hdr) = &self.eh_frame_hdr {
            bases = bases.set_eh_frame_hdr(hdr.address);
        }
        let dwarf =
            Dwarf { table: CfiTable::EhFrame, section: eh_frame, bytes: &section.bytes, bases };
        if let Some(hdr) = &self.eh_frame_hdr
            && let Some(found) = by_table(self.machine, hdr, &dwarf, section.address, address)
        {
            return found;
        }
        let index = self.eh_index.get_or_init(|| dwarf.index());
        dwarf.by_index(self.machine, index, address)
    }

    fn debug_frame<A: FdeQuery>(&self, address: u64) -> Result<A, RuleRefusal> {
        let section = self.debug_frame.as_ref().ok_or(RuleRefusal::NoEntry)?;
        let mut debug_frame = DebugFrame::new(&section.bytes, LittleEndian);
        debug_frame.set_address_size(8);
        debug_frame.set_vendor(self.machine.dwarf.vendor);
        let bases = BaseAddresses::default();
        let dwarf = Dwarf {
            table: CfiTable::DebugFrame,
            section: debug_frame,
            bytes: &section.bytes,
            bases,
        };
        let index = self.debug_index.get_or_init(|| dwarf.index());
        dwarf.by_index(self.machine, index, address)
    }
}

#[cfg(test)]
mod tests {
    use super::fde::MAX_ENTRY_BYTES;
    use super::*;
    use crate::rule::FrameKind;
    use crate::x86_64::X86_64;
    use proptest::prelude::{any, prop, proptest};

    /// One FDE for 0x5000..0x5010 behind one CIE, as gcc writes them, at 0x2000.
    fn eh_frame() -> CfiSection {
        let mut bytes = vec![
            20, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1,
            0, 0,
        ];
        bytes.extend([20, 0, 0, 0, 28, 0, 0, 0]);
        bytes.extend((0x5000i32 - 0x2020).to_le_bytes());
        bytes.extend(0x10u32.to_le_bytes());
        bytes.extend([0; 8]);
        bytes.extend([0; 4]);
        CfiSection { address: 0x2000, bytes }
    }

    #[test]
    fn the_table_is_searched_and_its_count_not_believed() {
        for count in [1, 0, 2, u32::MAX] {
            let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
            hdr.extend(count.to_le_bytes());
            for place in [0x5000i32, 0x2018] {
                hdr.extend((place - 0x3000).to_le_bytes());
            }
            let hdr = Some(CfiSection { address: 0x3000, bytes: hdr });
            let sections = UnwindSections::of(&X86_64, hdr, Some(eh_frame()), None);
            let found = sections.rule(0x500f).unwrap();
            assert_eq!((found.function, found.rule), (0x5000..0x5010, X86_64.frameless()));
            assert_eq!(sections.rule(0x5010), Err(RuleRefusal::NoEntry));
            assert_eq!(sections.rule(0x4fff), Err(RuleRefusal::NoEntry));
        }
    }

    #[test]
    fn where_a_function_begins_is_known_without_its_program() {
        let mut section = eh_frame();
        // No such instruction.
        section.bytes[24 + 17] = 0x3f;
        let sections = UnwindSections::of(&X86_64, None, Some(section), None);
        assert_eq!(sections.rule(0x5008), Err(RuleRefusal::Malformed));
        assert_eq!(sections.function_in(&NoFile, 0x5008), Ok(0x5000..0x5010));
        assert_eq!(sections.function_in(&NoFile, 0x5010), Err(RuleRefusal::NoEntry));
    }

    /// A file of these bytes.
    impl FileBytes for Vec<u8> {
        fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
            let there =
                usize::try_from(offset).ok().and_then(|at| self.get(at..)).unwrap_or_default();
            let length = there.len().min(into.len());
            into[..length].copy_from_slice(&there[..length]);
            length
        }
    }

    /// `count` functions of 16 bytes from 0x5000 on, each with a CFA of its own, some with a CIE
    /// between them; table and sections as one file, at 0x3000 and 0x2000.
    fn many(count: u32) -> (Vec<u8>, FileSection, FileSection) {
        let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
        hdr.extend(count.to_le_bytes());
        let (mut eh, mut cie) = (Vec::new(), 0);
        for function in 0..count {
            if function % 7 == 0 {
                cie = eh.len();
                eh.extend([
                    20, 0, 0, 0, 0, 0, 0, 0, 1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8,
                ]);
                eh.extend([0x90, 1, 0, 0]);
            }
            let (at, start) = (eh.len(), 0x5000 + function * 16);
            // DW_CFA_def_cfa_offset with two bytes of LEB128.
            let instructions = [0x0e, (8 + function % 100) as u8 | 0x80, 1, 0, 0, 0, 0];
            eh.extend([24, 0, 0, 0]);
            eh.extend(((at + 4 - cie) as u32).to_le_bytes());
            eh.extend((start.wrapping_sub(0x2000 + at as u32 + 8)).to_le_bytes());
            eh.extend(16u32.to_le_bytes());
            eh.push(0);
            eh.extend(instructions);
            eh.extend([0; 4]);
            for place in [start, 0x2000 + at as u32] {
                hdr.extend(place.wrapping_sub(0x3000).to_le_bytes());
            }
        }
        eh.extend([0; 4]);
        let hdr_place = FileSection { address: 0x3000, offset: 0, bytes: hdr.len() as u64 };
        let eh_place =
            FileSection { address: 0x2000, offset: hdr.len() as u64, bytes: eh.len() as u64 };
        hdr.extend(eh);
        (hdr, hdr_place, eh_place)
    }

    fn near_and_far((file, hdr, eh): &(Vec<u8>, FileSection, FileSection)) -> [UnwindSections; 2] {
        let section = |place: &FileSection| {
            let bytes = file[place.offset as usize..][..place.bytes as usize].to_vec();
            Some(CfiSection { address: place.address, bytes })
        };
        let near = UnwindSections::of(&X86_64, section(hdr), section(eh), None);
        let mut far = UnwindSections::of(&X86_64, None, None, None);
        far.far = FarSections::new(*hdr, *eh, file);
        assert!(far.far.is_some());
        [near, far]
    }

    #[test]
    fn sections_left_in_the_file_give_the_same_rules() {
        // Between two rows that are remembered lie as many as are read at once, and in the last one
        // more.
        for (count, step) in
            [(1, 3), (7, 3), (255, 3), (256, 3), (257, 3), (3000, 3), (300_000, 9973)]
        {
            let file = many(count);
            let [near, far] = near_and_far(&file);
            for address in (0x4ff0..0x5010 + u64::from(count) * 16).step_by(step) {
                let rule = far.rule_in(&file.0, address);
                assert_eq!(rule, near.rule(address), "{address:#x} of {count}");
                let function = far.function_in(&file.0, address);
                assert_eq!(function, rule.map(|found| found.function), "{address:#x} of {count}");
            }
            let last = 0x5000 + u64::from(count - 1) * 16;
            assert_eq!(far.rule_in(&file.0, last).unwrap().function, last..last + 16);
            assert_eq!(far.rule(last), Err(RuleRefusal::Unreadable), "the file is closed");
        }
    }

    /// A CIE whose augmentation is `z`, so many `S` and `R`, then `fdes`, each of whose first word
    /// is to be its distance from its CIE.
    fn signals(letters: usize, fdes: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut body = vec![0, 0, 0, 0, 1, b'z'];
        body.resize(body.len() + letters, b'S');
        body.extend([b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1]);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body);
        for fde in fdes {
            bytes.extend((fde.len() as u32 + 4).to_le_bytes());
            bytes.extend((bytes.len() as u32).to_le_bytes());
            bytes.extend(*fde);
        }
        bytes
    }

    #[test]
    fn what_is_too_long_is_refused_unparsed() {
        let cie = |letters| signals(letters, &[]).len();
        let fde = |at: usize| {
            let place = (0x5000u32.wrapping_sub(0x2000 + at as u32 + 8)).to_le_bytes();
            [place, 0x10u32.to_le_bytes(), [0; 4]].concat()
        };
        let of = |letters| {
            let bytes = signals(letters, &[&fde(cie(letters))]);
            UnwindSections::of(&X86_64, None, Some(CfiSection { address: 0x2000, bytes }), None)
        };
        assert_eq!(of(0).rule(0x5000).unwrap().rule, X86_64.frameless());
        assert_eq!(of(100).rule(0x5000).unwrap().rule.kind, FrameKind::Signal);
        assert_eq!(of(MAX_ENTRY_BYTES).rule(0x5000), Err(RuleRefusal::NoEntry), "in no index");
        let mut hdr = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0, 1, 0, 0, 0];
        hdr.extend((0x5000i32 - 0x3000).to_le_bytes());
        hdr.extend((0x2000 + cie(MAX_ENTRY_BYTES) as i32 - 0x3000).to_le_bytes());
        let mut with_table = of(MAX_ENTRY_BYTES);
        with_table.eh_frame_hdr = Some(CfiSection { address: 0x3000, bytes: hdr });
        assert_eq!(with_table.rule(0x5000), Err(RuleRefusal::Unsupported));
    }

    #[test]
    fn very_many_entries_of_a_very_long_one_take_no_longer_than_others() {
        // Sixteen million letters a million times, which no test would see the end of. The eight
        // bytes of each FDE do not parse.
        let all = vec![&[][..]; 1 << 20];
        for letters in [16 << 20, MAX_ENTRY_BYTES - 64] {
            let eh_frame = CfiSection { address: 0x2000, bytes: signals(letters, &all) };
            let sections = UnwindSections::of(&X86_64, None, Some(eh_frame), None);
            assert_eq!(sections.rule(0x5000), Err(RuleRefusal::NoEntry));
        }
        // The same where each names another one than the one before.
        let long = signals(MAX_ENTRY_BYTES - 64, &[]);
        let mut bytes = [long.clone(), long.clone()].concat();
        for fde in 0..1 << 20 {
            bytes.extend(4u32.to_le_bytes());
            bytes.extend((bytes.len() as u32 - fde % 2 * long.len() as u32).to_le_bytes());
        }
        let sections =
            UnwindSections::of(&X86_64, None, Some(CfiSection { address: 0x2000, bytes }), None);
        assert_eq!(sections.rule(0x5000), Err(RuleRefusal::NoEntry));
    }

    #[test]
    fn a_table_of_another_form_is_passed_over() {
        // DW_EH_PE_udata8 as count, and so many rows that their bytes overflow: found by the fuzzer
        // in gimli's reader.
        let mut hdr = vec![1, 0x1b, 0x04, 0x3b, 0, 0, 0, 0];
        hdr.extend(u64::MAX.to_le_bytes());
        hdr.extend([0xff; 8]);
        let sections = UnwindSections::of(
            &X86_64,
            Some(CfiSection { address: 0x3000, bytes: hdr }),
            Some(eh_frame()),
            None,
        );
        assert!(sections.rule(0x5000).is_ok());
    }

    proptest! {
        #[test]
        fn random_sections_give_a_rule_or_a_refusal(
            hdr in any::<Vec<u8>>(),
            eh in any::<Vec<u8>>(),
            debug in any::<Vec<u8>>(),
            address in any::<u64>(),
        ) {
            let section = |bytes| Some(CfiSection { address: 0x1000, bytes });
            let sections = UnwindSections::of(&X86_64, section(hdr), section(eh), section(debug));
            sections.rule(address).ok();
        }

        #[test]
        fn random_bytes_in_a_file_give_a_rule_or_a_refusal(
            at in any::<prop::sample::Index>(),
            bytes in any::<[u8; 4]>(),
            address in 0x5000u64..0x5400,
        ) {
            let mut file = many(64);
            let at = at.index(file.0.len() - 4);
            file.0[at..at + 4].copy_from_slice(&bytes);
            if let Some(far) = FarSections::new(file.1, file.2, &file.0) {
                let mut sections = UnwindSections::of(&X86_64, None, None, None);
                sections.far = Some(far);
                sections.rule_in(&file.0, address).ok();
            }
        }
    }
}
