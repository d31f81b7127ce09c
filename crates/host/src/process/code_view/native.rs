//! Frames in mapped files and in the vDSO.

use super::{CodeView, Resolved};
use crate::process::mapping::Mapping;
use perfusion_model::frame::{FrameKey, ImageId};
use perfusion_unwind::native::NATIVE;
use perfusion_unwind::rule::{FrameKind, Rule, RuleRefusal};

/// Most bytes of a vDSO.
const MAX_VDSO_BYTES: u64 = 64 << 10;

impl CodeView<'_> {
    /// The frame and rule at `pc` in a mapped file.
    pub(super) fn in_file(&mut self, mapping: &Mapping, pc: u64, exact: bool) -> Resolved {
        let Some(id) = self.image(mapping) else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let Some(image) = self.images.get(id) else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let offset = mapping.file_offset_of(pc);
        if let Some(address) = image.elf_address(offset) {
            return self.in_elf(id, address, offset, exact);
        }
        // An assembly, by itself or inside a single-file program.
        let directory = self.images.exceptions(id, offset);
        let Some((rva, pe)) = self.images.get(id).and_then(|image| image.pe_at(offset)) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        let Some(directory) = directory else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        // Who runs such code is the CLR, also where it is linked into the program and makes its
        // code in memory that has no name (`DOTNET_EnableWriteXorExecute=0`).
        self.process.space.is_clr = true;
        let Some(function) = directory.function(NATIVE, &pe, rva) else {
            return self.stub(pc, &self.code(id, offset));
        };
        let start = pc.wrapping_sub(u64::from(rva - function.begin));
        let frame = self.managed(start, 0, pc);
        (frame, directory.rule(NATIVE, &pe, function, rva, exact))
    }

    /// The frame and rule at `address` of an ELF image, which is at `offset` in the file.
    fn in_elf(&mut self, id: ImageId, address: u64, offset: u64, exact: bool) -> Resolved {
        let frame = FrameKey::Native { image: id, address };
        // A return address is looked up one byte before, but the code to look at is behind it.
        if let Some(signal_return) = NATIVE.code.signal_return
            && let Some(rule) =
                signal_return(&self.code(id, offset.wrapping_add(u64::from(!exact))))
        {
            return (frame, Ok(rule));
        }
        // The return address of a context's first function is the beginning of another one, behind
        // whose last byte nothing is called.
        if !exact && (NATIVE.code.is_context_start)(&self.code(id, offset.wrapping_add(1))) {
            let frame = FrameKey::Native { image: id, address: address.wrapping_add(1) };
            return (frame, Ok(NATIVE.thread_start()));
        }
        self.images.keep(id);
        let Some(unwind) = self.images.unwind(id) else {
            return (frame, Err(RuleRefusal::Unreadable));
        };
        let rule = |address| {
            self.images
                .get(id)
                .map_or(Err(RuleRefusal::Unreadable), |image| image.rule(&unwind, address))
        };
        // The signal-return stub ends with its system call: in it, the next instruction is past the
        // stub's table entry.
        let in_signal_return = || {
            let before = address.checked_sub(1).filter(|_| exact)?;
            rule(before).ok().filter(|found| found.rule.kind == FrameKind::Signal)
        };
        let found = rule(address);
        let found = match found {
            Err(RuleRefusal::NoEntry) => in_signal_return().ok_or(RuleRefusal::NoEntry),
            found => found,
        };
        let found = match found {
            Ok(found) => found,
            Err(RuleRefusal::NoEntry)
                if self.images.get(id).is_some_and(|i| i.is_loaders_start(address)) =>
            {
                return (frame, Ok(NATIVE.thread_start()));
            }
            Err(RuleRefusal::NoEntry) if exact && unwind.is_plt(address) => {
                return (frame, (NATIVE.code.stub)(&self.code(id, offset), address));
            }
            Err(refusal) => {
                if !exact && self.is_hijack(id, offset.wrapping_add(1)) {
                    let start = address.wrapping_add(1);
                    return (FrameKey::Native { image: id, address: start }, Err(refusal));
                }
                let rule = match refusal {
                    RuleRefusal::NoEntry => {
                        self.by_code(id, address.wrapping_add(u64::from(!exact)), exact)
                    }
                    _ => Err(refusal),
                };
                return (frame, rule);
            }
        };
        let function = &found.function;
        if self.is_hijack(id, offset.wrapping_sub(address - function.start)) {
            return (frame, (NATIVE.code.hijack)(found.rule, address - function.start));
        }
        // A return address that is the first instruction of `OnHijackTripThread` belongs to that,
        // not to the function before it.
        if !exact
            && function.end == address.wrapping_add(1)
            && self.is_hijack(id, offset.wrapping_add(1))
        {
            return (
                FrameKey::Native { image: id, address: function.end },
                Err(RuleRefusal::Unsupported),
            );
        }
        if exact
            && found.saves_below_stack()
            && let Some(rule) = (NATIVE.code.epilogue)(&self.code(id, offset), address, function)
        {
            return (frame, Ok(rule));
        }
        (frame, Ok(found.rule))
    }

    /// The rule of the frame whose next instruction is at `address` of an ELF image that has no
    /// unwind data for it.
    fn by_code(&self, id: ImageId, address: u64, exact: bool) -> Result<Rule, RuleRefusal> {
        let (Some(decoder), Some(image)) = (NATIVE.code.body, self.images.get(id)) else {
            return Err(RuleRefusal::NoEntry);
        };
        let mut read = |address: u64, into: &mut [u8]| image.read_code(address, into);
        if image.entry().is_some_and(|entry| (decoder.is_behind_entry)(&mut read, entry, address)) {
            return Ok(NATIVE.thread_start());
        }
        (decoder.rule)(&mut read, address, exact)
    }

    /// True when the function that begins at `offset` in the file is the CLR's return-address
    /// hijack.
    fn is_hijack(&self, id: ImageId, offset: u64) -> bool {
        let mut code = [0u8; 16];
        let Some(code) = code.get_mut(..NATIVE.code.hijack_prologue.len()) else { return false };
        self.process.space.is_clr
            && !code.is_empty()
            && self.images.get(id).is_some_and(|i| i.read_at(offset, code) == code.len())
            && code == NATIVE.code.hijack_prologue
    }

    /// The frame and rule at `pc` in the vDSO.
    pub(super) fn in_vdso(&mut self, mapping: &Mapping, pc: u64, exact: bool) -> Resolved {
        if self.process.space.vdso.is_none() {
            let length = (mapping.range.end - mapping.range.start).min(MAX_VDSO_BYTES);
            let mut bytes = vec![0u8; usize::try_from(length).unwrap_or(0)];
            if self.process.read(mapping.range.start, &mut bytes) == bytes.len() {
                self.process.space.vdso = self.images.vdso(bytes).ok();
            }
        }
        let Some(id) = self.process.space.vdso else {
            return (self.unknown(pc), Err(RuleRefusal::Unreadable));
        };
        let offset = pc - mapping.range.start;
        let Some(address) = self.images.get(id).and_then(|i| i.elf_address(offset)) else {
            return (self.unknown(pc), Err(RuleRefusal::NoEntry));
        };
        self.in_elf(id, address, offset, exact)
    }
}
