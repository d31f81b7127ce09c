//! Code of a process, read a block at a time and decoded within a budget, and all paths through it.

use super::path::{CodePath, Successor};
use crate::machine::ReadCode;
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
};
use std::collections::HashSet;
use std::ops::Deref;

/// Most instructions decoded for one answer, on all paths and in the padding between functions; and
/// the words of a path's frame that are copied at a branch for as much as one.
const MAX_DECODED: usize = 32 << 10;
const WORDS_PER_INSTRUCTION: usize = 16;
/// Bytes read at once, and how often.
const BLOCK_BYTES: u64 = 1 << 10;
const MAX_BLOCKS: usize = 512;
/// Longest instruction.
const INSTRUCTION_BYTES: usize = 15;

/// An instruction's bytes.
pub(super) struct InstructionBytes {
    bytes: [u8; INSTRUCTION_BYTES],
    filled: usize,
}

impl Deref for InstructionBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes.get(..self.filled).unwrap_or_default()
    }
}

/// Code, a block at a time.
pub(super) struct CodeBlocks<'a, 'b> {
    read: &'a mut ReadCode<'b>,
    /// By their first address, in the order of reading.
    blocks: Vec<(u64, Vec<u8>)>,
    /// The one looked at last.
    last: usize,
    info: InstructionInfoFactory,
    /// Instructions that may still be decoded.
    left: usize,
}

impl<'a, 'b> CodeBlocks<'a, 'b> {
    pub(super) fn new(read: &'a mut ReadCode<'b>) -> Self {
        Self {
            read,
            blocks: Vec::new(),
            last: 0,
            info: InstructionInfoFactory::new(),
            left: MAX_DECODED,
        }
    }

    /// The bytes at `address`, as many as an instruction has at most, or fewer where they end.
    pub(super) fn bytes(&mut self, address: u64) -> InstructionBytes {
        let mut bytes = InstructionBytes { bytes: [0; INSTRUCTION_BYTES], filled: 0 };
        while let Some(free) = bytes.bytes.get_mut(bytes.filled..).filter(|free| !free.is_empty()) {
            let Some(at) = address.checked_add(bytes.filled as u64) else { break };
            let start = at - at % BLOCK_BYTES;
            let Some(block) = self.block(start) else { break };
            let offset = usize::try_from(at - start).unwrap_or(usize::MAX);
            let rest = block.get(offset..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            free.iter_mut().zip(rest).for_each(|(to, byte)| *to = *byte);
            bytes.filled += rest.len().min(free.len());
        }
        bytes
    }

    /// The block that begins at `start`. Instructions follow each other: it is mostly the one of
    /// the last time.
    fn block(&mut self, start: u64) -> Option<&[u8]> {
        if self.blocks.get(self.last).is_none_or(|(at, _)| *at != start) {
            self.last = match self.blocks.iter().position(|(at, _)| *at == start) {
                Some(known) => known,
                None if self.blocks.len() >= MAX_BLOCKS => return None,
                None => {
                    let mut read = vec![0; usize::try_from(BLOCK_BYTES).unwrap_or(0)];
                    let length = (self.read)(start, &mut read);
                    read.truncate(length);
                    self.blocks.push((start, read));
                    self.blocks.len() - 1
                }
            };
        }
        self.blocks.get(self.last).map(|(_, block)| block.as_slice())
    }

    /// Whether nothing more will be decoded: what was found until then may be a part of what there
    /// is.
    pub(super) fn is_used_up(&self) -> bool {
        self.left == 0
    }

    pub(super) fn decode(&mut self, address: u64) -> Option<Instruction> {
        self.left = self.left.checked_sub(1)?;
        let bytes = self.bytes(address);
        let mut decoder = Decoder::with_ip(64, &bytes, address, DecoderOptions::NONE);
        Some(decoder.decode()).filter(|instruction| !instruction.is_invalid())
    }

    /// True when nothing comes back from this call: it leads to a trap, or no code is behind it.
    fn is_last_call(&mut self, call: &Instruction) -> bool {
        let into = if call.flow_control() == FlowControl::Call {
            self.decode(call.near_branch_target())
        } else {
            None
        };
        into.is_some_and(|first| matches!(first.mnemonic(), Mnemonic::Hlt | Mnemonic::Ud2))
            || self.is_filled(call.next_ip())
    }

    /// True when only padding is at `address`, up to where a function can begin.
    pub(super) fn is_filled(&mut self, address: u64) -> bool {
        let mut at = address;
        while let Some(padding) = self.decode(at).filter(is_padding) {
            at = padding.next_ip();
        }
        at != address && at.is_multiple_of(16)
    }

    /// Follows all paths from `path` on until `arrive` says so or none is left.
    pub(super) fn follow(
        &mut self,
        path: CodePath,
        most: usize,
        arrive: &mut dyn FnMut(&CodePath, &Instruction) -> Arrival,
    ) {
        let mut seen = HashSet::new();
        let mut open = vec![path];
        let mut steps = 0;
        while let Some(mut path) = open.pop() {
            while steps < most && seen.insert(path.at) {
                steps += 1;
                let Some(instruction) = self.decode(path.at) else { break };
                match arrive(&path, &instruction) {
                    Arrival::Enough => return,
                    Arrival::Here => break,
                    Arrival::NotYet => {}
                }
                match path.apply(&instruction, &mut self.info) {
                    Successor::On => path.at = instruction.next_ip(),
                    Successor::Jump(to) => path.at = to,
                    Successor::Branch(to) => {
                        self.left =
                            self.left.saturating_sub(path.words.len() / WORDS_PER_INSTRUCTION);
                        let mut taken = path.clone();
                        taken.at = to;
                        open.push(taken);
                        path.at = instruction.next_ip();
                    }
                    Successor::Return | Successor::End => break,
                }
                if instruction.mnemonic() == Mnemonic::Call {
                    // Who looks for an address behind the last call finds it there.
                    if matches!(arrive(&path, &Instruction::default()), Arrival::Enough) {
                        return;
                    }
                    if self.is_last_call(&instruction) {
                        break;
                    }
                }
            }
        }
    }
}

/// Whether a path is where it was to lead.
pub(super) enum Arrival {
    NotYet,
    /// This one; others are to be followed.
    Here,
    Enough,
}

fn is_padding(instruction: &Instruction) -> bool {
    matches!(instruction.mnemonic(), Mnemonic::Nop | Mnemonic::Int3)
}
