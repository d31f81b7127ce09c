//! The stack of a context: the copy that came with it, and what was read beyond that copy.

use super::CodeLookup;
use super::trace::word_in;
use perfusion_model::event::UserContext;
use perfusion_model::frame::Marker;
use std::cell::Cell;
use std::rc::Rc;

/// How far a frame may reach beyond where the copy began, bytes: a whole stack by default
/// (`RLIMIT_STACK`, and with it glibc's threads).
const MAX_STACK_BYTES: usize = 8 << 20;
/// Most pieces of a stack that are read beyond its copy.
pub(super) const MAX_PIECES: usize = 16;
const PAGE_BYTES: u64 = 4096;

/// The word at `address` in what was read from an address on.
fn word_of((from, bytes): &(u64, Rc<[u8]>), address: u64) -> Option<u64> {
    word_in(bytes, usize::try_from(address.checked_sub(*from)?).ok()?)
}

/// Where a register's value is from. It matters to the walk only once something is found by it.
#[derive(Clone, Copy)]
pub(super) enum ValueOrigin {
    /// The context's register.
    Context(usize),
    /// The word at an offset in the copy.
    Word(usize, u64),
    /// What the walk went by already.
    Known,
}

/// Why a value is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MissingValue {
    /// Above the end of a copy that was cut.
    BeyondCopy,
    /// Above the end of a copy that memory ended: the stack's, or a page that was not there.
    NotThere,
    /// Nothing could be copied: the memory was not there any more, or not yet.
    NoCopy,
    /// What there is could be it or not: that takes a look at code that was not to be had.
    NotSeen,
    /// Elsewhere, or in a register that is not known.
    Unknown,
}

impl From<MissingValue> for Marker {
    fn from(missing: MissingValue) -> Self {
        match missing {
            MissingValue::BeyondCopy => Self::TruncatedCopy,
            MissingValue::NotThere | MissingValue::NoCopy | MissingValue::NotSeen => {
                Self::TruncatedUnreadable
            }
            MissingValue::Unknown => Self::TruncatedNoRule,
        }
    }
}

/// The stack of one context.
pub(super) struct CapturedStack<'a> {
    context: &'a UserContext,
    /// Address of the first byte of the copy.
    start: u64,
    /// The walk is on a stack that a signal handler on another one has interrupted, and of which
    /// nothing is in the copy.
    is_elsewhere: bool,
    /// What was read beyond the copy, each with its address.
    pieces: Vec<(u64, Rc<[u8]>)>,
    /// The last word that was beyond.
    wanted: Cell<Option<u64>>,
}

impl<'a> CapturedStack<'a> {
    /// The stack whose pointer was here when it was copied.
    pub(super) fn new(context: &'a UserContext, stack_pointer: u64) -> Self {
        Self {
            context,
            start: stack_pointer.wrapping_add(context.skipped),
            is_elsewhere: false,
            pieces: Vec::new(),
            wanted: Cell::new(None),
        }
    }

    /// The same stack, to try where a walk leads.
    pub(super) fn copied(&self) -> Self {
        Self { pieces: self.pieces.clone(), wanted: Cell::new(None), ..*self }
    }

    /// True on a stack of which nothing is in the copy.
    pub(super) fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    /// The walk goes to the stack that a signal handler has interrupted, which may be another one.
    pub(super) fn go_to(&mut self, stack_pointer: u64) {
        let length = u64::try_from(self.context.stack.len()).unwrap_or(0);
        let end = self.start.saturating_add(length);
        self.is_elsewhere = !(self.start..end).contains(&stack_pointer);
    }

    /// The word at `address` is to be read on from.
    pub(super) fn want(&self, address: u64) {
        self.wanted.set(Some(address));
    }

    /// The word at `address` in the copy, which the walk may or may not go by. Below the frame,
    /// which begins at `floor`, nothing is kept: what the copy holds there is of calls made from
    /// it, and where the walk began says nothing about it.
    pub(super) fn peek(
        &self,
        address: u64,
        floor: u64,
    ) -> Result<(u64, ValueOrigin), MissingValue> {
        let not_written = self.context.skipped != 0 && address < self.start;
        let below = if not_written { MissingValue::NoCopy } else { MissingValue::Unknown };
        if address < floor {
            return Err(below);
        }
        let offset = address
            .checked_sub(self.start)
            .map(|offset| usize::try_from(offset).unwrap_or(usize::MAX));
        if let Some(offset) = offset.filter(|_| !self.is_elsewhere)
            && let Some(word) = word_in(&self.context.stack, offset)
        {
            return Ok((word, ValueOrigin::Word(offset, word)));
        }
        if let Some(word) = self.pieces.iter().find_map(|piece| word_of(piece, address)) {
            return Ok((word, ValueOrigin::Known));
        }
        let missing = match offset {
            _ if self.is_elsewhere => MissingValue::BeyondCopy,
            None => below,
            Some(_) if self.context.stack.is_empty() => MissingValue::NoCopy,
            // A wild address is no reason to say that the copy was too short: only one that may be
            // on this stack.
            Some(offset) if offset >= MAX_STACK_BYTES => MissingValue::Unknown,
            Some(_) if self.context.limited => MissingValue::BeyondCopy,
            Some(_) => MissingValue::NotThere,
        };
        if matches!(missing, MissingValue::BeyondCopy | MissingValue::NotThere) {
            self.wanted.set(Some(address));
        }
        Err(missing)
    }

    /// Has the word that was missing last read, with what is about it; false when it is not to be
    /// had.
    pub(super) fn read_on(&mut self, floor: u64, code: &mut dyn CodeLookup) -> bool {
        let Some(wanted) = self.wanted.take().filter(|_| self.pieces.len() < MAX_PIECES) else {
            return false;
        };
        // What the frame has saved is below its return address, if it is to be had.
        let page = (wanted & !(PAGE_BYTES - 1)).saturating_sub(PAGE_BYTES);
        let mut pieces = [page.max(floor), wanted]
            .into_iter()
            .filter_map(|from| Some((from, code.stack(from)?.into())));
        let Some(piece) = pieces.find(|piece| word_of(piece, wanted).is_some()) else {
            return false;
        };
        self.pieces.push(piece);
        true
    }
}
