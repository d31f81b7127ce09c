//! What the targets share: the fuzzer's bytes taken apart, and memory of a process that consists of
//! them.

use perfusion_unwind::TargetMemory;

/// The fuzzer's bytes, taken from the front. What is not there reads as zero, so that every input
/// is a valid one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// All of `bytes`.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// At most `count` bytes.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// All that is left.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        self.take(self.0.len())
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let taken = self.take(N);
        if let Some(front) = array.get_mut(..taken.len()) {
            front.copy_from_slice(taken);
        }
        array
    }

    /// The next byte.
    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    /// The next two bytes, little endian.
    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next four bytes, little endian.
    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next eight bytes, little endian.
    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A part with its length (16 bits) in front.
    pub(crate) fn part(&mut self) -> &'a [u8] {
        let length = usize::from(self.u16());
        self.take(length)
    }
}

/// Memory of a made-up process: one block.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    /// Where it begins.
    pub(crate) address: u64,
    /// What is in it.
    pub(crate) bytes: &'a [u8],
}

impl TargetMemory for Block<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        let from = address.checked_sub(self.address).and_then(|from| usize::try_from(from).ok());
        let there = from.and_then(|from| self.bytes.get(from..)).unwrap_or_default();
        into.iter_mut().zip(there).map(|(to, from)| *to = *from).count()
    }
}
