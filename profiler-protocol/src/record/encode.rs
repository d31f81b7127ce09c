//! Records to bytes: words, written through [`Put`].

use super::{AllocationHead, ContentionHead, ExceptionHead, Record, RecordBody, StackHead};
use crate::producer::Grant;

/// Words of a record before its body.
pub const PREFIX_WORDS: u64 = 2;

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
            Self::Method { ranges, name, module, il_map, .. } => 4u64
                .wrapping_add(padded_words(ranges.0.len()))
                .wrapping_add(padded_words(name.len()))
                .wrapping_add(padded_words(module.len()))
                .wrapping_add(match il_map {
                    Some(map) => padded_words(map.entries.len()).wrapping_add(2),
                    None => 0,
                }),
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
            RecordBody::Method {
                asked,
                module_id,
                token,
                dynamic,
                ranges,
                name,
                module,
                il_map,
            } => {
                out.put(asked);
                out.put(module_id);
                out.put(two(token, u32::from(dynamic) | u32::from(il_map.is_some()) << 1));
                let count = u32::try_from(ranges.0.len() >> 4).unwrap_or(u32::MAX);
                out.put(two(length(name.len()), (length(module.len()) & 0xffff) | count << 16));
                put_bytes(out, ranges.0);
                put_bytes(out, name.as_bytes());
                put_bytes(out, module.as_bytes());
                if let Some(map) = il_map {
                    out.put(map.base);
                    out.put(map.entries.len() as u64);
                    put_bytes(out, map.entries);
                }
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

/// Writes a record's prefix.
pub fn encode_prefix(out: &mut dyn Put, kind: u16, tid: u32, time_ns: u64) {
    out.put(two(u32::from(kind), tid));
    out.put(time_ns);
}

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
