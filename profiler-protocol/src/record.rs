//! Records ↔ bytes. Encoding writes words through [`Put`]; decoding is total: any bytes give a
//! record, "unknown" or an error.

use crate::producer::Grant;

/// Longest name or module name in a record, bytes.
pub const MAX_NAME_BYTES: usize = 2_048;
/// Most ranges in one record.
pub const MAX_RANGES: usize = 256;
/// Most objects in one record.
pub const MAX_OBJECTS: usize = 512;
/// Highest level of a [`StackHead`].
pub const MAX_LEVEL: u8 = 31;

/// `NoMethod` with this HRESULT (CORPROF_E_DATAINCOMPLETE) means "not now": code was unloaded and
/// the address may lie in it, or the type arguments of shared code cannot be told yet. Ask again
/// when it is seen running again.
pub const NOT_NOW: i32 = 0x8013_1351_u32.cast_signed();

/// Where an encoder's words go.
pub trait Put {
    /// Appends a word.
    fn put(&mut self, word: u64);
}

impl Put for Grant<'_> {
    fn put(&mut self, word: u64) {
        Grant::put(self, word);
    }
}

/// Registers captured inside the shim's callback: eight words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Registers {
    /// Instruction pointer.
    pub pc: u64,
    /// Stack pointer; the copied stack starts here.
    pub sp: u64,
    /// Frame pointer: rbp, x29.
    pub fp: u64,
    /// Callee-saved registers: rbx, r12 to r15; x19 to x23.
    pub saved: [u64; 5],
}

/// All of an allocation record but its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationHead {
    /// Identity of the sample; below 2⁵⁶.
    pub sample: u64,
    /// ClassID.
    pub type_id: u64,
    /// Object size, bytes.
    pub size: u64,
    /// Bytes an AllocationTick stands for; of an object that exact mode has chosen, those that
    /// chance had to choose from; 0 for others.
    pub amount: u64,
    /// 0 small, 1 large, 2 pinned.
    pub heap: u8,
    /// True for AllocationSampled.
    pub sampled: bool,
    /// True for a large object, of which the runtime tells one by one: it stands for itself, and
    /// for the 2^level of which it was chosen.
    pub exact: bool,
    /// 0: not watched; n: a weak handle watches the object, and the level was n − 1 then
    /// ([`crate::live`]).
    pub watched: u8,
    /// The sample stands for 2^level of its kind: it was chosen with that probability.
    pub level: u8,
    /// True when the copy of the stack ended because of its limit.
    pub limited: bool,
    /// Bytes of stack that follow.
    pub stack_bytes: u32,
    /// Registers.
    pub registers: Registers,
}

impl AllocationHead {
    /// Number of the record's kind.
    pub const KIND: u16 = 2;
    /// Words of the body before the stack.
    pub const WORDS: u64 = 13;

    /// Writes the body before the stack.
    pub fn encode(&self, out: &mut dyn Put) {
        out.put(self.sample);
        out.put(self.type_id);
        out.put(self.size);
        out.put(self.amount);
        let [a, b, c, d] = self.stack_bytes.to_le_bytes();
        out.put(u64::from_le_bytes([
            self.heap,
            u8::from(self.sampled) | u8::from(self.limited) << 1 | u8::from(self.exact) << 2,
            self.watched,
            self.level,
            a,
            b,
            c,
            d,
        ]));
        let r = &self.registers;
        for word in [r.pc, r.sp, r.fp].into_iter().chain(r.saved) {
            out.put(word);
        }
    }
}

/// Where a thread was when something happened to it, in words of a record: its registers, and how
/// much of its stack follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackHead {
    /// The event stands for 2^level of its kind: it was chosen with that probability.
    pub level: u8,
    /// True when the copy of the stack ended because of its limit.
    pub limited: bool,
    /// Bytes of stack that follow.
    pub stack_bytes: u32,
    /// Registers.
    pub registers: Registers,
}

impl StackHead {
    /// Its words.
    pub const WORDS: u64 = 9;

    /// Writes it.
    pub fn encode(&self, out: &mut dyn Put) {
        let [a, b, c, d] = self.stack_bytes.to_le_bytes();
        out.put(u64::from_le_bytes([self.level, u8::from(self.limited), 0, 0, a, b, c, d]));
        let r = &self.registers;
        for word in [r.pc, r.sp, r.fp].into_iter().chain(r.saved) {
            out.put(word);
        }
    }
}

/// All of a record about an exception but its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionHead<'a> {
    /// Where it was thrown.
    pub at: StackHead,
    /// Thrown again from a handler.
    pub rethrown: bool,
    /// The exception's type.
    pub type_name: &'a str,
    /// What it says, as far as that is told; only to who asked for it.
    pub message: Option<&'a str>,
}

impl ExceptionHead<'_> {
    /// Number of the record's kind.
    pub const KIND: u16 = 18;

    /// Words before the stack.
    #[must_use]
    pub const fn words(&self) -> u64 {
        let message = match self.message {
            Some(message) => padded_words(message.len()).wrapping_add(1),
            None => 0,
        };
        StackHead::WORDS
            .wrapping_add(1)
            .wrapping_add(padded_words(self.type_name.len()))
            .wrapping_add(message)
    }

    /// Writes the body before the stack.
    pub fn encode(&self, out: &mut dyn Put) {
        self.at.encode(out);
        let flags = u32::from(self.rethrown) | u32::from(self.message.is_some()) << 1;
        out.put(two(length(self.type_name.len()), flags));
        put_bytes(out, self.type_name.as_bytes());
        if let Some(message) = self.message {
            out.put(two(length(message.len()), 0));
            put_bytes(out, message.as_bytes());
        }
    }
}

/// All of a record about a wait for a lock that another thread held, but its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContentionHead {
    /// Where the thread waited.
    pub at: StackHead,
    /// How long, nanoseconds.
    pub waited_ns: u64,
    /// The thread that held the lock when the wait began, as the process sees it; 0 when that is
    /// not known.
    pub owner: u32,
}

impl ContentionHead {
    /// Number of the record's kind.
    pub const KIND: u16 = 19;
    /// Words before the stack.
    pub const WORDS: u64 = StackHead::WORDS + 2;

    /// Writes the body before the stack.
    pub fn encode(&self, out: &mut dyn Put) {
        self.at.encode(out);
        out.put(self.waited_ns);
        out.put(u64::from(self.owner));
    }
}

/// A list of words inside a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordList<'a>(&'a [u8]);

impl<'a> WordList<'a> {
    /// A list over `bytes`; a tail shorter than a word is ignored.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The words in order.
    pub fn iter(self) -> impl Iterator<Item = u64> + use<'a> {
        let (words, _) = self.0.as_chunks();
        words.iter().map(|word| u64::from_le_bytes(*word))
    }

    /// The words two by two.
    pub fn pairs(self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let (words, _) = self.0.as_chunks::<8>();
        let (pairs, _) = words.as_chunks();
        pairs.iter().map(|[one, other]| (u64::from_le_bytes(*one), u64::from_le_bytes(*other)))
    }
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordBody<'a> {
    /// Nothing: space given up by a producer.
    Skip,
    /// The instance is up.
    Hello {
        /// [`crate::layout::pack_runtime`].
        runtime: u64,
    },
    /// A sampled allocation with its stack (from `registers.sp` upwards).
    Allocation(AllocationHead, &'a [u8]),
    /// A type's name.
    TypeName {
        /// ClassID.
        type_id: u64,
        /// ModuleID of the module; 0 when the runtime did not tell. Two modules of one file are of
        /// two load contexts.
        module_id: u64,
        /// Name with generic arguments.
        name: &'a str,
        /// Module's simple file name.
        module: &'a str,
    },
    /// A method body.
    Method {
        /// The address that was asked about.
        asked: u64,
        /// ModuleID.
        module_id: u64,
        /// MethodDef token; 0 for a dynamic method.
        token: u32,
        /// True for a dynamic method.
        dynamic: bool,
        /// (start, bytes) pairs, hot part first.
        ranges: WordList<'a>,
        /// Full name.
        name: &'a str,
        /// Module's simple file name.
        module: &'a str,
    },
    /// The runtime does not know the address.
    NoMethod {
        /// The address that was asked about.
        asked: u64,
        /// Why.
        hresult: i32,
    },
    /// Code is gone.
    CodeUnloaded {
        /// All code of this module, unless 0.
        module_id: u64,
        /// And these (start, bytes) pairs.
        ranges: WordList<'a>,
    },
    /// A collection began.
    GcStart {
        /// The runtime's count.
        number: u32,
        /// Generation.
        generation: u8,
        /// The runtime's reason code.
        reason: u8,
        /// 0 blocking, 1 background, 2 foreground during background.
        kind: u8,
    },
    /// A collection ended.
    GcEnd {
        /// The runtime's count.
        number: u32,
    },
    /// Managed threads are being suspended.
    PauseBegin {
        /// The runtime's reason code.
        reason: u64,
    },
    /// Managed threads run again.
    PauseEnd,
    /// Sampled objects that died.
    ObjectsDead(WordList<'a>),
    /// Sampled objects that live: sample << 8 | generation.
    ObjectsAlive(WordList<'a>),
    /// Watched objects that are not watched any more, dead or alive: there are too many. Those that
    /// still are were above the level, too.
    ObjectsDropped {
        /// The level ([`crate::live`]).
        level: u8,
        /// Sample numbers.
        samples: WordList<'a>,
    },
    /// A managed thread.
    ThreadName {
        /// Its id as the process sees it.
        os_tid: u32,
        /// Its name, or empty.
        name: &'a str,
    },
    /// A managed thread that runs.
    ThreadAt {
        /// Its id as the process sees it.
        os_tid: u32,
        /// Where the runtime's own structure of it is.
        address: u64,
    },
    /// Nothing more comes.
    Bye,
    /// What a collection left: follows its end.
    GcHeap {
        /// The runtime's count.
        number: u32,
        /// Bytes that survived it, in the generations it collected.
        promoted: u64,
    },
    /// CPU time of the thread that suspended the others, between the beginning of the pause and its
    /// end, which follows.
    PauseCpu {
        /// The thread, as the process sees it.
        suspender: u32,
        /// Nanoseconds.
        cpu_ns: u64,
    },
    /// The runtime changed how many workers of its thread pool may run at a time.
    PoolAdjusted {
        /// So many.
        workers: u32,
        /// The runtime's reason code.
        reason: u32,
    },
    /// What waited for a worker of the thread pool when the runtime looked, as it does once a
    /// second.
    PoolQueue {
        /// Items of work.
        items: u64,
    },
    /// A sampled exception, with the stack it was thrown from (from `at.registers.sp` upwards).
    Exception(ExceptionHead<'a>, &'a [u8]),
    /// A sampled wait for a lock, with its stack.
    Contention(ContentionHead, &'a [u8]),
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Thread that wrote it, as the process sees it.
    pub tid: u32,
    /// When, by the process's CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// What.
    pub body: RecordBody<'a>,
}

/// Why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordError {
    /// Fewer bytes than the kind's fixed part, or than its own lengths say.
    Short {
        /// Record kind.
        kind: u16,
        /// Bytes there were.
        bytes: usize,
    },
    /// A count or length above its limit.
    TooMany {
        /// Record kind.
        kind: u16,
        /// The count.
        count: u64,
    },
    /// A string that is not UTF-8.
    NotUtf8 {
        /// Record kind.
        kind: u16,
    },
    /// A field with a value it cannot have.
    BadField {
        /// Record kind.
        kind: u16,
        /// The value.
        value: u64,
    },
}

impl core::fmt::Display for RecordError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Short { kind, bytes } => {
                write!(f, "record of kind {kind} does not fit in its {bytes} bytes")
            }
            Self::TooMany { kind, count } => {
                write!(f, "record of kind {kind} claims {count} elements")
            }
            Self::NotUtf8 { kind } => {
                write!(f, "record of kind {kind} has a string that is not UTF-8")
            }
            Self::BadField { kind, value } => {
                write!(f, "record of kind {kind} has a field of value {value}")
            }
        }
    }
}

impl core::error::Error for RecordError {}

/// Words of a record before its body.
pub const PREFIX_WORDS: u64 = 2;

const fn padded_words(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(8)
}

fn put_bytes(out: &mut dyn Put, bytes: &[u8]) {
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        for (to, from) in word.iter_mut().zip(chunk) {
            *to = *from;
        }
        out.put(u64::from_le_bytes(word));
    }
}

const fn two(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Writes a record's prefix.
pub fn encode_prefix(out: &mut dyn Put, kind: u16, tid: u32, time_ns: u64) {
    out.put(two(u32::from(kind), tid));
    out.put(time_ns);
}

impl RecordBody<'_> {
    /// The number that stands for the kind in the region.
    #[must_use]
    pub const fn kind(&self) -> u16 {
        match self {
            Self::Skip => 0,
            Self::Hello { .. } => 1,
            Self::Allocation(..) => AllocationHead::KIND,
            Self::TypeName { .. } => 3,
            Self::Method { .. } => 4,
            Self::NoMethod { .. } => 5,
            Self::CodeUnloaded { .. } => 6,
            Self::GcStart { .. } => 7,
            Self::GcEnd { .. } => 8,
            Self::PauseBegin { .. } => 9,
            Self::PauseEnd => 10,
            Self::ObjectsDead(_) => 11,
            Self::ObjectsAlive(_) => 12,
            Self::ThreadName { .. } => 13,
            Self::Bye => 14,
            Self::ObjectsDropped { .. } => 15,
            Self::GcHeap { .. } => 16,
            Self::PauseCpu { .. } => 17,
            Self::Exception(..) => ExceptionHead::KIND,
            Self::Contention(..) => ContentionHead::KIND,
            Self::PoolAdjusted { .. } => 20,
            Self::PoolQueue { .. } => 21,
            Self::ThreadAt { .. } => 22,
        }
    }

    /// Bytes a record with this body takes.
    #[must_use]
    pub fn record_bytes(&self) -> u64 {
        let words = match self {
            Self::Skip | Self::PauseEnd | Self::Bye => 0,
            Self::Hello { .. }
            | Self::GcStart { .. }
            | Self::GcEnd { .. }
            | Self::PauseBegin { .. }
            | Self::PoolAdjusted { .. }
            | Self::PoolQueue { .. } => 1,
            Self::NoMethod { .. }
            | Self::GcHeap { .. }
            | Self::PauseCpu { .. }
            | Self::ThreadAt { .. } => 2,
            Self::Exception(head, stack) => head.words().wrapping_add(padded_words(stack.len())),
            Self::Contention(_, stack) => {
                ContentionHead::WORDS.wrapping_add(padded_words(stack.len()))
            }
            Self::Allocation(_, stack) => {
                AllocationHead::WORDS.wrapping_add(padded_words(stack.len()))
            }
            Self::TypeName { name, module, .. } => {
                3u64.wrapping_add(padded_words(name.len())).wrapping_add(padded_words(module.len()))
            }
            Self::Method { ranges, name, module, .. } => 4u64
                .wrapping_add(padded_words(ranges.0.len()))
                .wrapping_add(padded_words(name.len()))
                .wrapping_add(padded_words(module.len())),
            Self::CodeUnloaded { ranges, .. } => 2u64.wrapping_add(padded_words(ranges.0.len())),
            Self::ObjectsDead(words) | Self::ObjectsAlive(words) => {
                1u64.wrapping_add(padded_words(words.0.len()))
            }
            Self::ObjectsDropped { samples, .. } => {
                2u64.wrapping_add(padded_words(samples.0.len()))
            }
            Self::ThreadName { name, .. } => 1u64.wrapping_add(padded_words(name.len())),
        };
        PREFIX_WORDS.wrapping_add(words).wrapping_mul(8)
    }
}

impl Record<'_> {
    /// Writes the record as words.
    pub fn encode(&self, out: &mut dyn Put) {
        encode_prefix(out, self.body.kind(), self.tid, self.time_ns);
        match self.body {
            RecordBody::Skip | RecordBody::PauseEnd | RecordBody::Bye => {}
            RecordBody::Hello { runtime } => out.put(runtime),
            RecordBody::Allocation(head, stack) => {
                head.encode(out);
                put_bytes(out, stack);
            }
            RecordBody::TypeName { type_id, module_id, name, module } => {
                out.put(type_id);
                out.put(module_id);
                out.put(two(length(name.len()), length(module.len())));
                put_bytes(out, name.as_bytes());
                put_bytes(out, module.as_bytes());
            }
            RecordBody::Method { asked, module_id, token, dynamic, ranges, name, module } => {
                out.put(asked);
                out.put(module_id);
                out.put(two(token, u32::from(dynamic)));
                let count = u32::try_from(ranges.0.len() >> 4).unwrap_or(u32::MAX);
                out.put(two(length(name.len()), (length(module.len()) & 0xffff) | count << 16));
                put_bytes(out, ranges.0);
                put_bytes(out, name.as_bytes());
                put_bytes(out, module.as_bytes());
            }
            RecordBody::NoMethod { asked, hresult } => {
                out.put(asked);
                out.put(u64::from(hresult.cast_unsigned()));
            }
            RecordBody::CodeUnloaded { module_id, ranges } => {
                out.put(module_id);
                out.put(ranges.0.len() as u64 >> 4);
                put_bytes(out, ranges.0);
            }
            RecordBody::GcStart { number, generation, reason, kind } => {
                out.put(two(number, u32::from_le_bytes([generation, reason, kind, 0])));
            }
            RecordBody::GcEnd { number } => out.put(u64::from(number)),
            RecordBody::PauseBegin { reason } => out.put(reason),
            RecordBody::ObjectsDead(words) | RecordBody::ObjectsAlive(words) => {
                out.put(words.0.len() as u64 >> 3);
                put_bytes(out, words.0);
            }
            RecordBody::ObjectsDropped { level, samples } => {
                out.put(u64::from(level));
                out.put(samples.0.len() as u64 >> 3);
                put_bytes(out, samples.0);
            }
            RecordBody::ThreadName { os_tid, name } => {
                out.put(two(os_tid, length(name.len())));
                put_bytes(out, name.as_bytes());
            }
            RecordBody::GcHeap { number, promoted } => {
                out.put(u64::from(number));
                out.put(promoted);
            }
            RecordBody::ThreadAt { os_tid, address } => {
                out.put(u64::from(os_tid));
                out.put(address);
            }
            RecordBody::PauseCpu { suspender, cpu_ns } => {
                out.put(u64::from(suspender));
                out.put(cpu_ns);
            }
            RecordBody::PoolAdjusted { workers, reason } => out.put(two(workers, reason)),
            RecordBody::PoolQueue { items } => out.put(items),
            RecordBody::Exception(head, stack) => {
                head.encode(out);
                put_bytes(out, stack);
            }
            RecordBody::Contention(head, stack) => {
                head.encode(out);
                put_bytes(out, stack);
            }
        }
    }
}

/// Reads words and byte strings off the front of a body.
struct RecordCursor<'a> {
    kind: u16,
    rest: &'a [u8],
    total: usize,
}

impl<'a> RecordCursor<'a> {
    fn word(&mut self) -> Result<u64, RecordError> {
        let Some((word, rest)) = self.rest.split_first_chunk::<8>() else {
            return Err(self.short());
        };
        self.rest = rest;
        Ok(u64::from_le_bytes(*word))
    }

    fn halves(&mut self) -> Result<(u32, u32), RecordError> {
        let word = self.word()?;
        // Both halves fit in u32 by construction.
        Ok(((word & 0xffff_ffff) as u32, (word >> 32) as u32))
    }

    /// `bytes` bytes, padded to words.
    fn bytes(&mut self, bytes: usize) -> Result<&'a [u8], RecordError> {
        let padded = bytes.checked_next_multiple_of(8).ok_or(self.short())?;
        let (taken, rest) = self.rest.split_at_checked(padded).ok_or(self.short())?;
        self.rest = rest;
        taken.get(..bytes).ok_or(self.short())
    }

    fn text(&mut self, bytes: usize) -> Result<&'a str, RecordError> {
        if bytes > MAX_NAME_BYTES {
            return Err(RecordError::TooMany { kind: self.kind, count: bytes as u64 });
        }
        core::str::from_utf8(self.bytes(bytes)?)
            .map_err(|_| RecordError::NotUtf8 { kind: self.kind })
    }

    fn list(
        &mut self,
        count: u64,
        limit: usize,
        words_each: usize,
    ) -> Result<WordList<'a>, RecordError> {
        match usize::try_from(count) {
            Ok(count) if count <= limit => {
                Ok(WordList(self.bytes(count.saturating_mul(words_each).saturating_mul(8))?))
            }
            _ => Err(RecordError::TooMany { kind: self.kind, count }),
        }
    }

    fn registers(&mut self) -> Result<Registers, RecordError> {
        let mut registers =
            Registers { pc: self.word()?, sp: self.word()?, fp: self.word()?, saved: [0; 5] };
        for word in &mut registers.saved {
            *word = self.word()?;
        }
        Ok(registers)
    }

    fn stack_head(&mut self) -> Result<StackHead, RecordError> {
        let [level, limited, _, _, a, b, c, d] = self.word()?.to_le_bytes();
        if level > MAX_LEVEL {
            return Err(RecordError::BadField { kind: self.kind, value: u64::from(level) });
        }
        let (limited, stack_bytes) = (self.flag(limited)?, u32::from_le_bytes([a, b, c, d]));
        Ok(StackHead { level, limited, stack_bytes, registers: self.registers()? })
    }

    fn stack(&mut self, bytes: u32) -> Result<&'a [u8], RecordError> {
        self.bytes(usize::try_from(bytes).map_err(|_| self.short())?)
    }

    fn short(&self) -> RecordError {
        RecordError::Short { kind: self.kind, bytes: self.total }
    }

    fn flag(&self, value: u8) -> Result<bool, RecordError> {
        match value {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(RecordError::BadField { kind: self.kind, value: u64::from(value) }),
        }
    }
}

/// A record out of its bytes; `Ok(None)` for a kind this version does not know.
///
/// # Errors
/// The bytes contradict themselves.
pub fn decode(bytes: &[u8]) -> Result<Option<Record<'_>>, RecordError> {
    let mut cursor = RecordCursor { kind: 0, rest: bytes, total: bytes.len() };
    let (kind_and_flags, tid) = cursor.halves()?;
    let kind = (kind_and_flags & 0xffff) as u16;
    cursor.kind = kind;
    if kind == 0 {
        return Ok(Some(Record { tid, time_ns: 0, body: RecordBody::Skip }));
    }
    let time_ns = cursor.word()?;
    let body = match kind {
        1 => RecordBody::Hello { runtime: cursor.word()? },
        2 => decode_allocation(&mut cursor)?,
        3 => {
            let (type_id, module_id) = (cursor.word()?, cursor.word()?);
            let (name, module) = cursor.halves()?;
            RecordBody::TypeName {
                type_id,
                module_id,
                name: cursor.text(name as usize)?,
                module: cursor.text(module as usize)?,
            }
        }
        4 => {
            let asked = cursor.word()?;
            let module_id = cursor.word()?;
            let (token, flags) = cursor.halves()?;
            let (name, module_and_ranges) = cursor.halves()?;
            RecordBody::Method {
                asked,
                module_id,
                token,
                dynamic: flags & 1 != 0,
                ranges: cursor.list(u64::from(module_and_ranges >> 16), MAX_RANGES, 2)?,
                name: cursor.text(name as usize)?,
                module: cursor.text((module_and_ranges & 0xffff) as usize)?,
            }
        }
        5 => RecordBody::NoMethod {
            asked: cursor.word()?,
            hresult: cursor.halves()?.0.cast_signed(),
        },
        6 => {
            let module_id = cursor.word()?;
            let count = cursor.word()?;
            RecordBody::CodeUnloaded { module_id, ranges: cursor.list(count, MAX_RANGES, 2)? }
        }
        7 => {
            let (number, rest) = cursor.halves()?;
            let [generation, reason, gc_kind, _] = rest.to_le_bytes();
            RecordBody::GcStart { number, generation, reason, kind: gc_kind }
        }
        8 => RecordBody::GcEnd { number: cursor.halves()?.0 },
        9 => RecordBody::PauseBegin { reason: cursor.word()? },
        10 => RecordBody::PauseEnd,
        11 | 12 => {
            let count = cursor.word()?;
            let words = cursor.list(count, MAX_OBJECTS, 1)?;
            if kind == 11 {
                RecordBody::ObjectsDead(words)
            } else {
                RecordBody::ObjectsAlive(words)
            }
        }
        13 => {
            let (os_tid, name) = cursor.halves()?;
            RecordBody::ThreadName { os_tid, name: cursor.text(name as usize)? }
        }
        14 => RecordBody::Bye,
        15 => {
            let [level, ..] = cursor.word()?.to_le_bytes();
            let count = cursor.word()?;
            RecordBody::ObjectsDropped { level, samples: cursor.list(count, MAX_OBJECTS, 1)? }
        }
        16 => RecordBody::GcHeap { number: cursor.halves()?.0, promoted: cursor.word()? },
        17 => RecordBody::PauseCpu { suspender: cursor.halves()?.0, cpu_ns: cursor.word()? },
        22 => RecordBody::ThreadAt { os_tid: cursor.halves()?.0, address: cursor.word()? },
        18 => {
            let at = cursor.stack_head()?;
            let (name, flags) = cursor.halves()?;
            let type_name = cursor.text(name as usize)?;
            let message = match flags & 2 {
                0 => None,
                _ => {
                    let bytes = cursor.halves()?.0;
                    Some(cursor.text(bytes as usize)?)
                }
            };
            let head = ExceptionHead { at, rethrown: flags & 1 != 0, type_name, message };
            RecordBody::Exception(head, cursor.stack(at.stack_bytes)?)
        }
        19 => {
            let at = cursor.stack_head()?;
            let head = ContentionHead { at, waited_ns: cursor.word()?, owner: cursor.halves()?.0 };
            RecordBody::Contention(head, cursor.stack(at.stack_bytes)?)
        }
        20 => {
            let (workers, reason) = cursor.halves()?;
            RecordBody::PoolAdjusted { workers, reason }
        }
        21 => RecordBody::PoolQueue { items: cursor.word()? },
        _ => return Ok(None),
    };
    Ok(Some(Record { tid, time_ns, body }))
}

fn decode_allocation<'a>(cursor: &mut RecordCursor<'a>) -> Result<RecordBody<'a>, RecordError> {
    let (sample, type_id, size, amount) =
        (cursor.word()?, cursor.word()?, cursor.word()?, cursor.word()?);
    let [heap, flags, watched, level, a, b, c, d] = cursor.word()?.to_le_bytes();
    for (value, most) in [(heap, 2), (flags, 7), (level, MAX_LEVEL)] {
        if value > most {
            return Err(RecordError::BadField { kind: cursor.kind, value: u64::from(value) });
        }
    }
    let stack_bytes = u32::from_le_bytes([a, b, c, d]);
    let registers = cursor.registers()?;
    let head = AllocationHead {
        sample,
        type_id,
        size,
        amount,
        heap,
        sampled: flags & 1 != 0,
        exact: flags & 4 != 0,
        watched,
        level,
        limited: flags & 2 != 0,
        stack_bytes,
        registers,
    };
    Ok(RecordBody::Allocation(head, cursor.stack(stack_bytes)?))
}
