//! A packed profile read in two passes: first its tables, then its samples, one at a time. Memory
//! is the tables and one sample. A whole message would hold each stack once for each set of labels,
//! which nothing bounds.

use super::error::PprofError;
use super::proto::{Profile, Sample};
use flate2::read::MultiGzDecoder;
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use std::io::{self, BufRead, BufReader, Read};
use std::ops::ControlFlow;

/// Field number of `Profile.sample`.
const SAMPLE_FIELD: u64 = 2;
/// The decompressor hands over pieces of this size.
const PIECE_BYTES: usize = 32 << 10;
/// An entry of the tables takes more memory than its bytes in the file: its own fields, and its
/// place in a vector.
const ENTRY_BYTES: usize = 96;

/// All of a packed profile but its samples, and how many bytes of memory that takes.
///
/// # Errors
/// When it cannot be read, or its tables take more than `most_bytes` of memory.
pub fn tables(packed: &[u8], most_bytes: usize) -> Result<(Profile, usize), PprofError> {
    let (mut profile, mut bytes, mut one) = (Profile::default(), 0_usize, Vec::new());
    fields(packed, |field, source| {
        let FieldHeader::Bytes { number, length } = field else {
            let FieldHeader::Number { number, value } = field else {
                return Ok(ControlFlow::Continue(()));
            };
            one.clear();
            encode_key(narrow(number)?, WireType::Varint, &mut one);
            encode_varint(value, &mut one);
            profile.merge(one.as_slice())?;
            return Ok(ControlFlow::Continue(()));
        };
        if number == SAMPLE_FIELD {
            io::copy(&mut source.take(length), &mut io::sink())?;
            return Ok(ControlFlow::Continue(()));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        bytes = bytes.saturating_add(length).saturating_add(ENTRY_BYTES);
        if bytes > most_bytes {
            return Err(PprofError::LargeTables(most_bytes));
        }
        one.clear();
        encode_key(narrow(number)?, WireType::LengthDelimited, &mut one);
        encode_varint(length.try_into().unwrap_or(u64::MAX), &mut one);
        let head = one.len();
        one.resize(head.saturating_add(length), 0);
        source.read_exact(one.get_mut(head..).unwrap_or_default())?;
        profile.merge(one.as_slice())?;
        Ok(ControlFlow::Continue(()))
    })?;
    Ok((profile, bytes))
}

/// Each sample of a packed profile with its position, from the one at `first` on, until `each`
/// breaks.
///
/// # Errors
/// When it cannot be read; the first of `each`.
pub fn samples<E: From<PprofError>>(
    packed: &[u8],
    first: u64,
    mut each: impl FnMut(u64, Sample) -> Result<ControlFlow<()>, E>,
) -> Result<(), E> {
    let (mut position, mut one, mut failed) = (0_u64, Vec::new(), None);
    let read = fields(packed, |field, source| {
        let FieldHeader::Bytes { number, length } = field else {
            return Ok(ControlFlow::Continue(()));
        };
        if number != SAMPLE_FIELD || position < first {
            position += u64::from(number == SAMPLE_FIELD);
            io::copy(&mut source.take(length), &mut io::sink())?;
            return Ok(ControlFlow::Continue(()));
        }
        one.clear();
        source.take(length).read_to_end(&mut one)?;
        let found = each(position, Sample::decode(one.as_slice())?);
        position += 1;
        Ok(found.unwrap_or_else(|error| {
            failed = Some(error);
            ControlFlow::Break(())
        }))
    });
    read.map_err(E::from)?;
    failed.map_or(Ok(()), Err)
}

/// How many bytes a gzip file of one member unpacks to, by its own account; 0 of anything else.
#[must_use]
pub fn unpacked_bytes(packed: &[u8]) -> usize {
    let length = packed.last_chunk::<4>().filter(|_| packed.starts_with(&[0x1f, 0x8b]));
    length.map_or(0, |length| usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX))
}

/// The number and type in front of a field's bytes.
enum FieldHeader {
    Bytes { number: u64, length: u64 },
    Number { number: u64, value: u64 },
    Other,
}

fn fields(
    packed: &[u8],
    mut each: impl FnMut(FieldHeader, &mut dyn BufRead) -> Result<ControlFlow<()>, PprofError>,
) -> Result<(), PprofError> {
    let mut source: Box<dyn BufRead> = if packed.starts_with(&[0x1f, 0x8b]) {
        Box::new(BufReader::with_capacity(PIECE_BYTES, MultiGzDecoder::new(packed)))
    } else {
        Box::new(packed)
    };
    while !source.fill_buf()?.is_empty() {
        let key = varint(&mut *source)?;
        let number = key >> 3;
        let field = match key & 7 {
            0 => FieldHeader::Number { number, value: varint(&mut *source)? },
            2 => FieldHeader::Bytes { number, length: varint(&mut *source)? },
            kind @ (1 | 5) => {
                let skipped = io::copy(
                    &mut (&mut *source).take(if kind == 1 { 8 } else { 4 }),
                    &mut io::sink(),
                );
                skipped.map(|_| FieldHeader::Other)?
            }
            kind => return Err(broken(&format!("a field of wire type {kind}")).into()),
        };
        if each(field, &mut *source)?.is_break() {
            break;
        }
    }
    Ok(())
}

fn varint(source: &mut dyn BufRead) -> io::Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let mut byte = [0];
        source.read_exact(&mut byte)?;
        value |= u64::from(byte[0] & 0x7f) << shift;
        if byte[0] < 0x80 {
            return Ok(value);
        }
    }
    Err(broken("a number of more than ten bytes"))
}

fn narrow(number: u64) -> io::Result<u32> {
    let known = u32::try_from(number).ok().filter(|number| (1..1 << 29).contains(number));
    known.ok_or_else(|| broken(&format!("field number {number}")))
}

fn broken(found: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("expected a pprof message, found {found}"))
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Label, Line, Location, Mapping, Profile, Sample, ValueType};
    use super::super::{PprofError, pack, unpack};
    use super::{samples, tables, unpacked_bytes};
    use std::ops::ControlFlow;

    fn profile() -> Profile {
        let sample = |id: u64| Sample {
            location_id: vec![id, 1],
            value: vec![i64::try_from(id).unwrap(), -1],
            label: vec![Label { key: 1, str: 2, ..Label::default() }],
        };
        Profile {
            sample_type: vec![ValueType { r#type: 1, unit: 2 }, ValueType { r#type: 2, unit: 1 }],
            sample: (1..=100).map(sample).collect(),
            mapping: vec![Mapping { id: 1, filename: 2, ..Mapping::default() }],
            location: (1..=100)
                .map(|id| Location {
                    id,
                    line: vec![Line { function_id: id, ..Line::default() }],
                    ..Location::default()
                })
                .collect(),
            string_table: vec![String::new(), "cpu".to_owned(), "é".repeat(1000)],
            comment: vec![1, 2],
            period: 7,
            period_type: Some(ValueType { r#type: 1, unit: 2 }),
            ..Profile::default()
        }
    }

    #[test]
    fn both_passes_together_are_the_whole_profile() {
        let whole = profile();
        let packed = pack(&whole).unwrap();
        let (mut read, bytes) = tables(&packed, usize::MAX).unwrap();
        assert!(matches!(tables(&packed, bytes - 1), Err(PprofError::LargeTables(_))));
        assert!(read.sample.is_empty());
        samples(&packed, 0, |_, sample| {
            read.sample.push(sample);
            Ok::<_, PprofError>(ControlFlow::Continue(()))
        })
        .unwrap();
        assert_eq!(read, whole);
        assert_eq!(unpack(&packed).unwrap(), whole);
        assert_eq!(unpacked_bytes(&packed), prost::Message::encoded_len(&whole));
    }

    #[test]
    fn samples_are_read_from_a_position_on_until_told_to_stop() {
        let packed = pack(&profile()).unwrap();
        let mut found = Vec::new();
        samples(&packed, 40, |position, sample| {
            found.push((position, sample.location_id[0]));
            let go_on =
                if position < 42 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
            Ok::<_, PprofError>(go_on)
        })
        .unwrap();
        assert_eq!(found, [(40, 41), (41, 42), (42, 43)]);
    }

    #[test]
    fn tables_beyond_the_bound_and_bytes_that_are_no_profile_are_refused() {
        let packed = pack(&profile()).unwrap();
        let error = tables(&packed, 5000).unwrap_err();
        assert!(matches!(error, PprofError::LargeTables(5000)), "{error}");
        for bad in
            [&packed[..packed.len() / 2], b"\x0f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]
        {
            assert!(tables(bad, usize::MAX).is_err());
        }
    }
}
