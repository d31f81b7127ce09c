//! The stream of an event session, format "nettrace" version 4, as documented in microsoft/perfview
//! `src/TraceEvent/EventPipe/EventPipeFormat.md`. A process wrote it, so nothing in it is believed:
//! every length has a bound, the tables of event kinds and of threads too, and what does not follow
//! the format ends the reading with an error.
//!
//! ```text
//! "Nettrace" · 20 · "!FastSerialization.1" · object … · 1
//! object   5 · 5 · 1 · version · oldest reader · name · 6 · payload · 6
//! Trace    clock (48 bytes)
//! a block  size · zeroes up to a multiple of 4 bytes of the stream · content
//! ```

use crate::attach::ipc::RUNTIME_PROVIDER;
use crate::fields::PayloadFields;
use std::collections::HashMap;
use std::io::{self, Read};

const BEGIN: &[u8] = b"Nettrace\x14\0\0\0!FastSerialization.1";
/// Tags around objects.
const NULL: u8 = 1;
const BEGIN_OBJECT: u8 = 5;
const END_OBJECT: u8 = 6;

/// Longest name of a type of object.
const NAME_BYTES: u32 = 64;
/// The runtime begins a new block after 100 KiB, and an event is shorter than 64 KiB (`ep-block.h`,
/// `ep-event-payload.h`).
const BLOCK_BYTES: u32 = 4 << 20;
/// Kinds of events and threads that are told apart.
const TABLE_ENTRIES: usize = 65_536;

/// Event headers are in the short form.
const COMPRESSED: u16 = 1;
/// What a short header has; the rest is as in the event before.
mod has {
    pub(super) const KIND: u8 = 1;
    pub(super) const SEQUENCE: u8 = 2;
    pub(super) const THREAD: u8 = 4;
    pub(super) const STACK: u8 = 8;
    pub(super) const ACTIVITY: u8 = 16;
    pub(super) const RELATED_ACTIVITY: u8 = 32;
    pub(super) const LENGTH: u8 = 128;
}

/// Why a stream was not read to its end.
#[derive(Debug, thiserror::Error)]
pub enum NettraceError {
    /// It could not be read, or ended early.
    #[error("the event stream: {0}")]
    Read(#[from] io::Error),
    /// It does not follow the format.
    #[error("the event stream at byte {at}: expected {expected}")]
    Malformed {
        /// Bytes before the place.
        at: u64,
        /// What should be there.
        expected: &'static str,
    },
}

/// One event of the runtime.
#[derive(Clone, Copy, Debug)]
pub struct NettraceEvent<'a> {
    /// Its number in the provider.
    pub id: u32,
    /// The thread that wrote it. Events of one thread are in order; those of several are not.
    pub thread: u64,
    /// When, nanoseconds of the stream's own clock.
    pub time_ns: u64,
    /// Its fields.
    pub payload: &'a [u8],
}

/// Reads a stream object by object.
#[derive(Debug)]
pub struct NettraceReader<R> {
    input: R,
    position: u64,
    /// 0 until the clock was seen.
    ticks_per_second: u64,
    block: Vec<u8>,
    /// Event of the runtime by the number of its kind; events of other providers are not in it.
    kinds: HashMap<u32, u32>,
    /// The last event of each thread, by its sequence number.
    threads: HashMap<u64, u32>,
    lost: u64,
}

impl<R: Read> NettraceReader<R> {
    /// Reads the first bytes.
    ///
    /// # Errors
    /// When they are not a stream's.
    pub fn new(input: R) -> Result<Self, NettraceError> {
        let mut reader = Self {
            input,
            position: 0,
            ticks_per_second: 0,
            block: Vec::new(),
            kinds: HashMap::new(),
            threads: HashMap::new(),
            lost: 0,
        };
        let begin: [u8; BEGIN.len()] = reader.array()?;
        if begin == BEGIN {
            Ok(reader)
        } else {
            Err(reader.malformed("the begin of a nettrace stream"))
        }
    }

    /// Events that the runtime had no room for, as far as the sequence numbers tell by now.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Reads one object and hands on the runtime's events in it; false at the end of the stream.
    ///
    /// # Errors
    /// When it cannot be read or does not follow the format. Nothing can be read after that.
    pub fn read(&mut self, each: &mut dyn FnMut(NettraceEvent<'_>)) -> Result<bool, NettraceError> {
        match self.array()? {
            [NULL] => return Ok(false),
            [BEGIN_OBJECT] => {}
            _ => return Err(self.malformed("an object or the end")),
        }
        if self.array()? != [BEGIN_OBJECT, NULL] {
            return Err(self.malformed("a type"));
        }
        let [_version, oldest_reader] = [self.u32()?, self.u32()?];
        let length = self.u32()?;
        if length > NAME_BYTES {
            return Err(self.malformed("the name of a type"));
        }
        self.fill(length)?;
        let name = std::mem::take(&mut self.block);
        if self.array()? != [END_OBJECT] {
            return Err(self.malformed("the end of a type"));
        }
        if oldest_reader > 4 {
            return Err(self.malformed("an object for readers of version 4"));
        }
        if name == b"Trace" {
            self.trace()?;
        } else {
            self.read_block()?;
            let block = std::mem::take(&mut self.block);
            let done = match name.as_slice() {
                b"EventBlock" => self.events(&block, each),
                b"MetadataBlock" => self.kinds(&block),
                b"SPBlock" => self.sequence_point(&block),
                // Stacks are not looked at.
                _ => Some(()),
            };
            self.block = block;
            done.ok_or_else(|| self.malformed("a block of its type"))?;
        }
        match self.array()? {
            [END_OBJECT] => Ok(true),
            _ => Err(self.malformed("the end of an object")),
        }
    }

    fn malformed(&self, expected: &'static str) -> NettraceError {
        NettraceError::Malformed { at: self.position, expected }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], NettraceError> {
        let mut array = [0; N];
        self.input.read_exact(&mut array)?;
        self.position += N as u64;
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, NettraceError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Fills the block; memory is taken for what really comes.
    fn fill(&mut self, length: u32) -> Result<(), NettraceError> {
        self.block.clear();
        let read = self.input.by_ref().take(u64::from(length)).read_to_end(&mut self.block)?;
        self.position += read as u64;
        if read < length as usize {
            Err(io::Error::from(io::ErrorKind::UnexpectedEof).into())
        } else {
            Ok(())
        }
    }

    fn read_block(&mut self) -> Result<(), NettraceError> {
        let length = self.u32()?;
        if length > BLOCK_BYTES {
            return Err(self.malformed("a block of less than 4 MiB"));
        }
        while !self.position.is_multiple_of(4) {
            let [_zero] = self.array()?;
        }
        self.fill(length)
    }

    fn trace(&mut self) -> Result<(), NettraceError> {
        let _date: [u8; 16] = self.array()?;
        let _first_tick: [u8; 8] = self.array()?;
        self.ticks_per_second = u64::from_le_bytes(self.array()?);
        let [pointer_bytes, _pid, _processors, _sampling] =
            [self.u32()?, self.u32()?, self.u32()?, self.u32()?];
        match (self.ticks_per_second, pointer_bytes) {
            (1.., 8) => Ok(()),
            _ => Err(self.malformed("the clock of a 64-bit process")),
        }
    }

    fn events(&mut self, block: &[u8], each: &mut dyn FnMut(NettraceEvent<'_>)) -> Option<()> {
        let ticks_per_second = self.ticks_per_second;
        for_each_blob(block, &mut |blob| {
            self.count(blob.thread, blob.sequence);
            if let Some(&id) = self.kinds.get(&blob.kind) {
                let nanoseconds =
                    u128::from(blob.ticks) * 1_000_000_000 / u128::from(ticks_per_second).max(1);
                let time_ns = u64::try_from(nanoseconds).unwrap_or(u64::MAX);
                each(NettraceEvent { id, thread: blob.thread, time_ns, payload: blob.payload });
            }
            Some(())
        })
    }

    /// A thread numbers its events, those that are dropped too; the first is 1.
    fn count(&mut self, thread: u64, sequence: u32) {
        if self.threads.len() >= TABLE_ENTRIES && !self.threads.contains_key(&thread) {
            return;
        }
        let last = self.threads.insert(thread, sequence).unwrap_or(0);
        // A thread that got the id of one that has ended begins anew.
        if sequence > last {
            self.lost += u64::from(sequence - last - 1);
        }
    }

    fn kinds(&mut self, block: &[u8]) -> Option<()> {
        for_each_blob(block, &mut |blob| {
            let mut fields = PayloadFields(blob.payload);
            let kind = fields.u32()?;
            let provider = fields.text()?;
            let id = fields.u32()?;
            if provider == RUNTIME_PROVIDER && self.kinds.len() < TABLE_ENTRIES {
                self.kinds.insert(kind, id);
            }
            Some(())
        })
    }

    /// The number each thread has come to, so that losses are seen that no event comes after.
    fn sequence_point(&mut self, block: &[u8]) -> Option<()> {
        let mut fields = PayloadFields(block);
        let (_time, threads) = (fields.u64()?, fields.u32()?);
        for _ in 0..threads {
            let (thread, sequence) = (fields.u64()?, fields.u32()?);
            let last = self.threads.get(&thread).copied().unwrap_or(0);
            if sequence > last {
                // As if an event with the next number had come.
                self.count(thread, sequence.saturating_add(1));
                self.threads.entry(thread).and_modify(|last| *last = sequence);
            }
        }
        Some(())
    }
}

/// What an event block and a metadata block consist of.
#[derive(Clone, Copy, Debug, Default)]
struct NettraceBlob<'a> {
    kind: u32,
    sequence: u32,
    thread: u64,
    ticks: u64,
    length: u32,
    payload: &'a [u8],
}

fn for_each_blob(
    block: &[u8],
    each: &mut dyn FnMut(&NettraceBlob<'_>) -> Option<()>,
) -> Option<()> {
    let mut header = PayloadFields(block);
    let (header_bytes, flags) = (header.u16()?, header.u16()?);
    // The runtime writes no other form since version 4.
    if flags & COMPRESSED == 0 {
        return None;
    }
    let mut fields = PayloadFields(block.get(usize::from(header_bytes)..)?);
    let mut blob = NettraceBlob::default();
    while !fields.0.is_empty() {
        let flags = fields.u8()?;
        let present = |part: u8| flags & part != 0;
        if present(has::KIND) {
            blob.kind = fields.varint32()?;
        }
        if present(has::SEQUENCE) {
            blob.sequence = blob.sequence.wrapping_add(fields.varint32()?);
            blob.thread = fields.varint()?;
            let _processor = fields.varint32()?;
        }
        // Records of metadata have no kind and no number.
        if blob.kind != 0 {
            blob.sequence = blob.sequence.wrapping_add(1);
        }
        if present(has::THREAD) {
            fields.varint()?;
        }
        if present(has::STACK) {
            fields.varint32()?;
        }
        blob.ticks = blob.ticks.wrapping_add(fields.varint()?);
        if present(has::ACTIVITY) {
            fields.take(16)?;
        }
        if present(has::RELATED_ACTIVITY) {
            fields.take(16)?;
        }
        if present(has::LENGTH) {
            blob.length = fields.varint32()?;
        }
        blob.payload = fields.take(usize::try_from(blob.length).ok()?)?;
        each(&blob)?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::{BEGIN, NettraceError, NettraceEvent, NettraceReader};
    use proptest::{collection::vec, prelude::any, proptest};

    fn utf16(text: &str) -> Vec<u8> {
        text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect()
    }

    fn object(stream: &mut Vec<u8>, name: &str, payload: impl FnOnce(&mut Vec<u8>)) {
        stream.extend([5, 5, 1]);
        stream.extend([2u32, 2].map(u32::to_le_bytes).concat());
        stream.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
        stream.extend(name.bytes());
        stream.push(6);
        payload(stream);
        stream.push(6);
    }

    fn block(stream: &mut Vec<u8>, name: &str, content: &[u8]) {
        object(stream, name, |stream| {
            stream.extend(u32::try_from(content.len()).unwrap().to_le_bytes());
            stream.resize(stream.len().next_multiple_of(4), 0);
            stream.extend(content);
        });
    }

    /// Header of an event block of short event headers.
    fn head() -> Vec<u8> {
        [&20u16.to_le_bytes()[..], &1u16.to_le_bytes(), &[0; 16]].concat()
    }

    fn kind(number: u32, provider: &str, id: u32) -> Vec<u8> {
        let mut payload =
            [number.to_le_bytes().to_vec(), utf16(provider), id.to_le_bytes().to_vec()].concat();
        payload.extend(utf16("its name"));
        let length = u8::try_from(payload.len()).unwrap();
        assert!(length < 128);
        // A length; time 0.
        [vec![128, 0, length], payload].concat()
    }

    /// Two kinds, the second of another provider; thread 300 has events 1 and 2, later 5, and ends
    /// at 7; a tick is a microsecond.
    fn stream() -> Vec<u8> {
        let mut stream = BEGIN.to_vec();
        object(&mut stream, "Trace", |stream| {
            stream.extend([0; 24]);
            stream.extend(1_000_000u64.to_le_bytes());
            stream.extend([8u32, 42, 2, 1_000_000].map(u32::to_le_bytes).concat());
        });
        let kinds = [head(), kind(1, super::RUNTIME_PROVIDER, 18), kind(2, "Other", 18)].concat();
        block(&mut stream, "MetadataBlock", &kinds);
        block(&mut stream, "StackBlock", &[1, 2, 3]);
        // Kind, sequence (thread 300 = 0xac 0x02, processor 1), time and length; then only the
        // time; then another kind, a step of two in the sequence, thread, stack, activity.
        let first = [&[1 | 2 | 128, 1, 0, 0xac, 2, 1, 100, 3][..], b"abc"].concat();
        let second = [&[0, 50][..], b"def"].concat();
        let third =
            [&[1 | 2 | 4 | 8 | 16, 2, 2, 0xac, 2, 1, 9, 7][..], &[5], &[0; 16], b"ghi"].concat();
        block(&mut stream, "EventBlock", &[head(), first, second, third].concat());
        let mut point = 0u64.to_le_bytes().to_vec();
        point.extend(1u32.to_le_bytes());
        point.extend(300u64.to_le_bytes());
        point.extend(7u32.to_le_bytes());
        block(&mut stream, "SPBlock", &point);
        stream.push(1);
        stream
    }

    /// Number, thread, time and payload.
    type Seen = (u32, u64, u64, Vec<u8>);

    fn read(bytes: &[u8]) -> Result<(Vec<Seen>, u64), NettraceError> {
        let mut reader = NettraceReader::new(bytes)?;
        let mut events = Vec::new();
        let mut each = |event: NettraceEvent<'_>| {
            events.push((event.id, event.thread, event.time_ns, event.payload.to_vec()))
        };
        while reader.read(&mut each)? {}
        Ok((events, reader.lost()))
    }

    #[test]
    fn events_of_the_runtime_are_read_and_lost_ones_counted() {
        let (events, lost) = read(&stream()).unwrap();
        assert_eq!(
            events,
            [(18, 300, 100_000, b"abc".to_vec()), (18, 300, 150_000, b"def".to_vec())]
        );
        // 3 and 4, then 6 and 7.
        assert_eq!(lost, 4);
    }

    #[test]
    fn a_stream_that_ends_early_or_is_none_is_an_error() {
        let whole = stream();
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).is_err(), "{end}");
        }
        assert!(read(b"a file of another sort, long enough").is_err());
        let mut old = whole.clone();
        // The type's oldest reader, after 32 bytes of begin, three tags and a version.
        old[39] = 5;
        assert!(matches!(read(&old), Err(NettraceError::Malformed { .. })));
    }

    #[test]
    fn a_huge_length_costs_no_memory() {
        let mut stream = BEGIN.to_vec();
        object(&mut stream, "EventBlock", |stream| stream.extend(u32::MAX.to_le_bytes()));
        assert!(matches!(read(&stream), Err(NettraceError::Malformed { .. })));
    }

    proptest! {
        #[test]
        fn any_change_of_a_stream_ends_in_events_or_an_error(
            changes in vec((any::<usize>(), any::<u8>()), 1..8),
        ) {
            let mut stream = stream();
            for (at, value) in changes {
                let length = stream.len();
                stream[at % length] = value;
            }
            read(&stream).ok();
        }
    }
}
