//! Bytes to records. Total: any bytes give a record, "unknown" or an error.

use super::{
    AllocationHead, ContentionHead, ExceptionHead, IlMapList, MAX_IL_MAP, MAX_NAME_BYTES,
    MAX_OBJECTS, MAX_RANGES, Record, RecordBody, Registers, StackHead, WordList,
};
use crate::live::MAX_LEVEL;

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

    fn il_map(&mut self) -> Result<IlMapList<'a>, RecordError> {
        let (base, bytes) = (self.word()?, self.word()?);
        match usize::try_from(bytes) {
            Ok(bytes) if bytes <= MAX_IL_MAP * IlMapList::ENTRY_BYTES => {
                Ok(IlMapList { base, entries: self.bytes(bytes)? })
            }
            _ => Err(RecordError::TooMany { kind: self.kind, count: bytes }),
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
                il_map: if flags & 2 == 0 { None } else { Some(cursor.il_map()?) },
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
