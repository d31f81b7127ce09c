//! Portable PDBs: which source lines a method's IL comes from (the format's specification is
//! docs/design/specs/PortablePdb-Metadata.md of dotnet/runtime; II is ECMA-335).
//!
//! A PDB is metadata without types: the streams `#Pdb`, `#~` and `#Blob`. Two of its tables matter
//! here. `Document` names source files. `MethodDebugInformation` has a row for each method of the
//! assembly, with the method's sequence points: IL offsets and the lines they come from. Nothing is
//! read before it is asked for.
//!
//! Anybody may have written such a file: every number is checked against what is there.

use profiler_protocol::signature::SignatureReader;
use std::ops::Range;

/// Tables, by number. No other stands before these two.
const DOCUMENT: u32 = 0x30;
const METHOD_DEBUG_INFORMATION: u32 = 0x31;
/// Most streams a file may list; there are six.
const MAX_STREAMS: u16 = 16;
/// Most points of a method that are read.
const MAX_POINTS: usize = 1 << 16;
/// Longest name of a document, in bytes, and most parts of it.
const MAX_NAME_BYTES: usize = 4096;
const MAX_NAME_PARTS: usize = 256;
/// The last line there can be.
const MAX_LINE: u32 = 0x1fff_ffff;

/// What ties a PDB to its assembly: the GUID and the stamp of the assembly's debug directory.
pub type PdbId = [u8; 20];

/// From this IL offset on code is of this line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequencePoint {
    /// IL offset, bytes.
    pub il: u32,
    /// The line where the statement begins, from 1 on; `None` for what the compiler made.
    pub line: Option<u32>,
    /// Row of `Document`, from 1 on.
    pub document: u32,
}

/// Where a table is in the file.
#[derive(Clone, Copy, Debug, Default)]
struct TablePlace {
    begin: usize,
    rows: u32,
}

/// A PDB.
#[derive(Debug)]
pub struct PortablePdb {
    bytes: Vec<u8>,
    id: PdbId,
    blobs: Range<usize>,
    documents: TablePlace,
    methods: TablePlace,
    /// Bytes of a place in the GUIDs, in the blobs, and of a row of `Document`.
    guid_bytes: usize,
    blob_bytes: usize,
    row_bytes: usize,
}

impl PortablePdb {
    /// Finds the tables; `None` when it is no portable PDB.
    #[must_use]
    pub fn parse(bytes: Vec<u8>) -> Option<Self> {
        let mut root = PdbBytes(&bytes);
        // "BSJB", version, reserved, and the runtime's version as text (II.24.2.1).
        if root.u32()? != 0x424a_5342 {
            return None;
        }
        root.take(8)?;
        let version_bytes = root.u32()?;
        root.take(usize::try_from(version_bytes).ok()?)?;
        let (_flags, streams) = (root.u16()?, root.u16()?);
        let (mut pdb, mut tables, mut blobs) = (None, None, None);
        for _ in 0..streams.min(MAX_STREAMS) {
            let (offset, size) = (root.u32()?, root.u32()?);
            let length = root.0.iter().take(32).position(|&byte| byte == 0)?;
            let name = root.take((length + 1).next_multiple_of(4))?.get(..length)?;
            let begin = usize::try_from(offset).ok()?;
            let place = begin..begin.checked_add(usize::try_from(size).ok()?)?;
            bytes.get(place.clone())?;
            match name {
                b"#Pdb" => pdb = Some(place),
                b"#~" => tables = Some(place),
                b"#Blob" => blobs = Some(place),
                _ => {}
            }
        }
        let (pdb, tables, blobs) = (pdb?, tables?, blobs?);
        let id = *bytes.get(pdb)?.first_chunk()?;
        let mut head = PdbBytes(bytes.get(tables.clone())?);
        head.take(6)?;
        let wide = head.take(1)?.first().copied()?;
        head.take(1)?;
        let (valid, _sorted) = (head.u64()?, head.u64()?);
        // Tables of types would come first, and only an assembly has them.
        if valid & ((1 << DOCUMENT) - 1) != 0 {
            return None;
        }
        let (mut documents, mut methods) = (0, 0);
        for number in (DOCUMENT..64).filter(|number| valid & 1 << number != 0) {
            let rows = head.u32()?;
            match number {
                DOCUMENT => documents = rows,
                METHOD_DEBUG_INFORMATION => methods = rows,
                _ => {}
            }
        }
        // Another four bytes (II.24.2.6 does not have them, the runtime does).
        if wide & 0x40 != 0 {
            head.take(4)?;
        }
        let begin = tables.end.checked_sub(head.0.len())?;
        let width = |is_wide: bool| if is_wide { 4 } else { 2 };
        let (guid_bytes, blob_bytes) = (width(wide & 2 != 0), width(wide & 4 != 0));
        let mut found = Self {
            id,
            blobs,
            documents: TablePlace { begin, rows: documents },
            methods: TablePlace::default(),
            guid_bytes,
            blob_bytes,
            row_bytes: width(documents >= 1 << 16),
            bytes,
        };
        let end = found.documents.end(found.document_bytes())?;
        found.methods = TablePlace { begin: end, rows: methods };
        (found.methods.end(found.method_bytes())? <= tables.end).then_some(found)
    }

    /// What the assembly must say its PDB is.
    #[must_use]
    pub fn id(&self) -> &PdbId {
        &self.id
    }

    /// Memory it takes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The points of the method with this token, by IL offset; `None` where it has none: it is
    /// abstract, made by the compiler, or the file is broken there.
    #[must_use]
    pub fn sequence_points(&self, token: u32) -> Option<Vec<SequencePoint>> {
        let row = token & 0xff_ffff;
        if token >> 24 != 0x06 {
            return None;
        }
        let mut columns = PdbBytes(self.row(self.methods, self.method_bytes(), row)?);
        let document = columns.number(self.row_bytes)?;
        let blob = self.blob(columns.number(self.blob_bytes)?)?;
        if blob.is_empty() {
            return None;
        }
        points(blob, document)
    }

    /// The path of a document as the compiler was told it; `None` where there is none.
    #[must_use]
    pub fn document(&self, row: u32) -> Option<String> {
        let mut columns = PdbBytes(self.row(self.documents, self.document_bytes(), row)?);
        let mut name = PdbBytes(self.blob(columns.number(self.blob_bytes)?)?);
        // A separator, 0 for none, and then the parts, each a place in the blobs.
        let separator = char::from(name.take(1)?.first().copied().filter(u8::is_ascii)?);
        let mut text = String::new();
        for part in 0..=MAX_NAME_PARTS {
            if name.0.is_empty() {
                return Some(text);
            }
            if part > 0 && separator != '\0' {
                text.push(separator);
            }
            let part = self.blob(name.compressed()?)?;
            if text.len() + part.len() > MAX_NAME_BYTES {
                return None;
            }
            text.push_str(std::str::from_utf8(part).ok()?);
        }
        None
    }

    /// Name, kind of hash, hash and language.
    fn document_bytes(&self) -> usize {
        2 * (self.blob_bytes + self.guid_bytes)
    }

    /// Document and points.
    fn method_bytes(&self) -> usize {
        self.row_bytes + self.blob_bytes
    }

    fn row(&self, table: TablePlace, row_bytes: usize, row: u32) -> Option<&[u8]> {
        let index = row.checked_sub(1).filter(|&index| index < table.rows)?;
        let begin =
            table.begin.checked_add(usize::try_from(index).ok()?.checked_mul(row_bytes)?)?;
        self.bytes.get(begin..begin.checked_add(row_bytes)?)
    }

    /// A blob: its length, and so many bytes (II.24.2.4).
    fn blob(&self, at: u32) -> Option<&[u8]> {
        let all = self.bytes.get(self.blobs.clone())?;
        let mut from = PdbBytes(all.get(usize::try_from(at).ok()?..)?);
        let length = from.compressed()?;
        from.take(usize::try_from(length).ok()?)
    }
}

impl TablePlace {
    fn end(self, row_bytes: usize) -> Option<usize> {
        self.begin.checked_add(usize::try_from(self.rows).ok()?.checked_mul(row_bytes)?)
    }
}

/// The points in a blob, of a method in `document`, 0 where the blob says in which it begins.
fn points(blob: &[u8], document: u32) -> Option<Vec<SequencePoint>> {
    let mut fields = PdbBytes(blob);
    let _locals = fields.compressed()?;
    let mut document = if document == 0 { fields.compressed()? } else { document };
    let mut points: Vec<SequencePoint> = Vec::new();
    // Line and column of the last one that has a line.
    let mut last: Option<(u32, u32)> = None;
    let mut il = 0u32;
    while !fields.0.is_empty() {
        if points.len() >= MAX_POINTS {
            return None;
        }
        let step = fields.compressed()?;
        // Another point of the same offset cannot be: it says that what follows is of another
        // document.
        if step == 0 && !points.is_empty() {
            document = fields.compressed()?;
            continue;
        }
        il = il.checked_add(step)?;
        let lines = fields.compressed()?;
        let columns = match lines {
            0 => i64::from(fields.compressed()?),
            _ => i64::from(fields.compressed_signed()?),
        };
        if (lines, columns) == (0, 0) {
            points.push(SequencePoint { il, line: None, document });
            continue;
        }
        let (line, column) = match last {
            None => (fields.compressed()?, fields.compressed()?),
            Some((line, column)) => (
                line.checked_add_signed(fields.compressed_signed()?)?,
                column.checked_add_signed(fields.compressed_signed()?)?,
            ),
        };
        if line == 0 || line > MAX_LINE {
            return None;
        }
        last = Some((line, column));
        points.push(SequencePoint { il, line: Some(line), document });
    }
    Some(points)
}

/// Reads fields off the front of bytes.
struct PdbBytes<'a>(&'a [u8]);

impl<'a> PdbBytes<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// A column of two or four bytes.
    fn number(&mut self, bytes: usize) -> Option<u32> {
        if bytes == 2 { self.u16().map(u32::from) } else { self.u32() }
    }

    /// A number of one, two or four bytes, highest first (II.23.2), and how many bits it has.
    fn compressed_bits(&mut self) -> Option<(u32, u32)> {
        let mut reader = SignatureReader(self.0);
        let number = reader.number()?;
        let bits = match self.0.len() - reader.0.len() {
            1 => 7,
            2 => 14,
            _ => 29,
        };
        self.0 = reader.0;
        Some((number, bits))
    }

    fn compressed(&mut self) -> Option<u32> {
        self.compressed_bits().map(|(number, _)| number)
    }

    /// A signed one: rotated left by one bit, so that the sign is the lowest.
    fn compressed_signed(&mut self) -> Option<i32> {
        let (number, bits) = self.compressed_bits()?;
        let low = (number >> 1).cast_signed();
        Some(if number & 1 == 0 { low } else { low - (1 << (bits - 1)) })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes of a compressed number.
    fn compressed(number: u32) -> Vec<u8> {
        match number {
            0..0x80 => vec![u8::try_from(number).unwrap()],
            0x80..0x4000 => (0x8000 | number).to_be_bytes()[2..].to_vec(),
            _ => (0xc000_0000 | number).to_be_bytes().to_vec(),
        }
    }

    /// The same of a signed one.
    fn compressed_signed(number: i32) -> Vec<u8> {
        let (bits, lead) = match number {
            -0x40..0x40 => (7, 0u32),
            -0x2000..0x2000 => (14, 0x8000),
            _ => (29, 0xc000_0000),
        };
        let mask = (1u32 << bits) - 1;
        let rotated = (number.cast_unsigned() << 1 | u32::from(number < 0)) & mask;
        let bytes = (rotated | lead).to_be_bytes();
        bytes[match bits {
            7 => 3,
            14 => 2,
            _ => 0,
        }..]
            .to_vec()
    }

    /// A point: IL step, and line and column, or none.
    fn point(il: u32, line: Option<(i32, i32)>, is_first: bool) -> Vec<u8> {
        let mut bytes = compressed(il);
        let Some((line, column)) = line else {
            bytes.extend([0, 0]);
            return bytes;
        };
        // It ends ten columns further on.
        bytes.extend([0, 10]);
        if is_first {
            bytes.extend(compressed(line.cast_unsigned()));
            bytes.extend(compressed(column.cast_unsigned()));
        } else {
            bytes.extend(compressed_signed(line));
            bytes.extend(compressed_signed(column));
        }
        bytes
    }

    /// A PDB of one document, `/src/Work.cs`, whose methods have these points; an empty one has
    /// none.
    pub(crate) fn pdb(id: PdbId, methods: &[Vec<u8>]) -> Vec<u8> {
        let mut blobs = vec![0];
        let mut blob = |bytes: &[u8]| {
            let at = u16::try_from(blobs.len()).unwrap();
            blobs.extend(compressed(u32::try_from(bytes.len()).unwrap()));
            blobs.extend(bytes);
            at
        };
        let (src, work) = (blob(b"src"), blob(b"Work.cs"));
        let name: Vec<u8> =
            [vec![b'/', 0], compressed(src.into()), compressed(work.into())].concat();
        let name = blob(&name);
        let mut tables = vec![0, 0, 0, 0, 2, 0, 0, 1];
        tables.extend((3u64 << DOCUMENT).to_le_bytes());
        tables.extend(0u64.to_le_bytes());
        tables.extend(1u32.to_le_bytes());
        tables.extend(u32::try_from(methods.len()).unwrap().to_le_bytes());
        for column in [name, 0, 0, 0] {
            tables.extend(column.to_le_bytes());
        }
        for method in methods {
            let points = if method.is_empty() { 0 } else { blob(method) };
            tables.extend([1u16, points].map(u16::to_le_bytes).concat());
        }
        let mut bytes = 0x424a_5342_u32.to_le_bytes().to_vec();
        bytes.extend([1, 0, 1, 0, 0, 0, 0, 0]);
        bytes.extend(12u32.to_le_bytes());
        bytes.extend(b"PDB v1.0\0\0\0\0");
        bytes.extend([0, 0, 3, 0]);
        let pdb_stream = [&id[..], &[0; 12]].concat();
        let streams: [(&[u8], &[u8]); 3] =
            [(b"#Pdb\0\0\0\0", &pdb_stream), (b"#~\0\0", &tables), (b"#Blob\0\0\0", &blobs)];
        let head: usize = streams.iter().map(|(name, _)| 8 + name.len().next_multiple_of(4)).sum();
        let mut at = bytes.len() + head;
        for (name, content) in streams {
            bytes.extend(u32::try_from(at).unwrap().to_le_bytes());
            bytes.extend(u32::try_from(content.len()).unwrap().to_le_bytes());
            bytes.extend(name);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            at += content.len();
        }
        streams.iter().for_each(|(_, content)| bytes.extend(*content));
        bytes
    }

    /// Points of a method: (IL offset, line), lines and offsets growing or not.
    pub(crate) fn method(points: &[(u32, Option<i32>)]) -> Vec<u8> {
        let (mut bytes, mut il, mut last) = (vec![0], 0, None);
        for &(at, line) in points {
            let step =
                line.map(|line| (line - last.unwrap_or(0), if last.is_none() { 9 } else { 0 }));
            bytes.extend(point(at - il, step, last.is_none()));
            il = at;
            last = line.or(last);
        }
        bytes
    }

    fn lines(pdb: &PortablePdb, token: u32) -> Option<Vec<(u32, Option<u32>)>> {
        let points = pdb.sequence_points(token)?;
        Some(points.iter().map(|point| (point.il, point.line)).collect())
    }

    const POINTS: [(u32, Option<i32>); 6] = [
        (0, Some(12)),
        (7, None),
        (9, Some(200)),
        (0x90, Some(13)),
        (0x5000, Some(20_000)),
        (0x5001, Some(1)),
    ];

    #[test]
    fn points_are_read_forwards_backwards_and_hidden_ones_too() {
        let bytes = pdb([7; 20], &[vec![], method(&POINTS)]);
        let pdb = PortablePdb::parse(bytes).unwrap();
        assert_eq!(pdb.id(), &[7; 20]);
        let expected = POINTS.map(|(il, line)| (il, line.map(i32::cast_unsigned)));
        assert_eq!(lines(&pdb, 0x0600_0002).as_deref(), Some(&expected[..]));
        assert_eq!(pdb.document(1).as_deref(), Some("/src/Work.cs"));
        for (token, why) in [
            (0x0600_0001, "a method without lines"),
            (0x0600_0000, "no row"),
            (0x0600_0003, "behind the last"),
            (0x0200_0002, "a type"),
        ] {
            assert_eq!(lines(&pdb, token), None, "{why}");
        }
        assert_eq!([0, 2].map(|row| pdb.document(row)), [None, None]);
    }

    #[test]
    fn a_method_may_go_on_in_another_document() {
        // Its document is in the blob: 5 first, then 9.
        let mut blob = vec![0, 5];
        blob.extend(point(0, Some((3, 1)), true));
        blob.extend([0, 9]);
        blob.extend(point(4, Some((-1, 0)), false));
        let points = points(&blob, 0).unwrap();
        let found: Vec<_> = points.iter().map(|p| (p.il, p.line, p.document)).collect();
        assert_eq!(found, [(0, Some(3), 5), (4, Some(2), 9)]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let with = |points: &[u8]| {
            PortablePdb::parse(pdb([0; 20], &[points.to_vec()]))
                .unwrap()
                .sequence_points(0x0600_0001)
        };
        let zero_line = [vec![0], point(0, Some((0, 1)), true)].concat();
        let before_the_first =
            [vec![0], point(0, Some((2, 1)), true), point(1, Some((-2, 0)), false)].concat();
        assert_eq!(with(&zero_line), None);
        assert_eq!(with(&before_the_first), None);
        assert_eq!(with(&[0, 0]), None, "it ends within a point");
        let one = |_| method(&[(0, Some(1))]);
        let whole = pdb([0; 20], &[one(0)]);
        assert!(PortablePdb::parse(whole.clone()).is_some());
        for cut in 0..whole.len() - 1 {
            let found = PortablePdb::parse(whole[..cut].to_vec());
            assert!(found.is_none(), "cut at {cut}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_signed_number_comes_back(number in -0x1000_0000i32..0x1000_0000) {
            let bytes = compressed_signed(number);
            proptest::prop_assert_eq!(PdbBytes(&bytes).compressed_signed(), Some(number));
        }
    }
}
