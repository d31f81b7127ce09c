//! Protobuf's wire format as google/pprof reads it (`profile/proto.go`): unknown fields are
//! skipped, a known field of another wire type is refused, strings are bytes. prost refuses strings
//! that are not UTF-8 and joins messages that stand twice; pprof does neither.

use super::ReadRefusal;

/// A field's value.
#[derive(Clone, Copy, Debug)]
pub(super) enum WireValue<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Of four or eight bytes: no field of a profile has it.
    Fixed,
}

/// The fields of a message, one after the other.
pub(super) struct WireFields<'a>(pub(super) &'a [u8]);

impl<'a> WireFields<'a> {
    /// Number and value of the next field; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<(u64, WireValue<'a>)>, ReadRefusal> {
        if self.0.is_empty() {
            return Ok(None);
        }
        let key = varint(&mut self.0)?;
        let value = match key & 7 {
            0 => WireValue::Varint(varint(&mut self.0)?),
            1 => self.fixed(8)?,
            2 => {
                let len = varint(&mut self.0)?;
                let len = usize::try_from(len).ok().filter(|len| *len <= self.0.len());
                let (bytes, rest) = self
                    .0
                    .split_at_checked(len.ok_or(ReadRefusal::Wire)?)
                    .ok_or(ReadRefusal::Wire)?;
                self.0 = rest;
                WireValue::Bytes(bytes)
            }
            5 => self.fixed(4)?,
            _ => return Err(ReadRefusal::Wire),
        };
        Ok(Some((key >> 3, value)))
    }

    fn fixed(&mut self, len: usize) -> Result<WireValue<'a>, ReadRefusal> {
        self.0 = self.0.get(len..).ok_or(ReadRefusal::Wire)?;
        Ok(WireValue::Fixed)
    }
}

impl<'a> WireValue<'a> {
    pub(super) fn unsigned(self) -> Result<u64, ReadRefusal> {
        match self {
            Self::Varint(value) => Ok(value),
            _ => Err(ReadRefusal::Wire),
        }
    }

    pub(super) fn signed(self) -> Result<i64, ReadRefusal> {
        Ok(self.unsigned()?.cast_signed())
    }

    pub(super) fn bool(self) -> Result<bool, ReadRefusal> {
        Ok(self.unsigned()? != 0)
    }

    pub(super) fn bytes(self) -> Result<&'a [u8], ReadRefusal> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(ReadRefusal::Wire),
        }
    }

    /// One number, or several that are packed.
    pub(super) fn unsigneds(self, into: &mut Vec<u64>) -> Result<(), ReadRefusal> {
        match self {
            Self::Varint(value) => into.push(value),
            Self::Bytes(mut packed) => {
                while !packed.is_empty() {
                    into.push(varint(&mut packed)?);
                }
            }
            Self::Fixed => return Err(ReadRefusal::Wire),
        }
        Ok(())
    }

    /// Reads repeated signed numbers.
    pub(super) fn signeds(self, into: &mut Vec<i64>) -> Result<(), ReadRefusal> {
        match self {
            Self::Varint(value) => into.push(value.cast_signed()),
            Self::Bytes(mut packed) => {
                while !packed.is_empty() {
                    into.push(varint(&mut packed)?.cast_signed());
                }
            }
            Self::Fixed => return Err(ReadRefusal::Wire),
        }
        Ok(())
    }
}

/// Ten bytes at most; bits beyond the 64th are dropped.
fn varint(bytes: &mut &[u8]) -> Result<u64, ReadRefusal> {
    let mut value = 0u64;
    for (position, &byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * position);
        if byte & 0x80 == 0 {
            *bytes = bytes.get(position + 1..).unwrap_or_default();
            return Ok(value);
        }
    }
    Err(ReadRefusal::Wire)
}
