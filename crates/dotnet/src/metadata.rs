//! Names that the runtime's events lack: the class of a static field, and the classes around a
//! nested one. The assembly's metadata has them. Layouts: ECMA-335, II.24 (tables and streams),
//! II.25 (PE). An assembly is the profiled process's file: every number in it is checked, and what
//! is wrong with one makes its names missing, nothing else.

use crate::fields::PayloadFields;
use crate::pe_head::{self, PeHead};
use profiler_protocol::signature::SignatureReader;
use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};

/// Flag of a static field, and of one that is a constant and has no place.
const STATIC: u16 = 0x10;
const LITERAL: u16 = 0x40;
/// Classes that are named for one field name.
const MAX_CLASSES: usize = 16;
/// Longest name that is believed, bytes.
const MAX_NAME: usize = 1024;
/// Types that are looked for in assemblies, each in all of them until its own is found.
const MOST_LOOKS: usize = 1 << 24;
/// Nesting of classes that is followed.
const MAX_NESTING: usize = 16;

/// What is left of what names from assemblies may take, and of the types that may be looked for in
/// them: a process can map files that were made for nothing else.
#[derive(Clone, Copy, Debug)]
pub struct NameBudget {
    bytes: usize,
    looks: usize,
}

impl NameBudget {
    /// So many bytes.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self { bytes, looks: MOST_LOOKS }
    }

    /// How many are left.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes some; `None` where there are not enough.
    pub fn take(&mut self, bytes: usize) -> Option<()> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(())
    }

    /// Looks for a type; `None` when that has been done too often.
    pub fn look(&mut self) -> Option<()> {
        self.looks = self.looks.checked_sub(1)?;
        Some(())
    }
}

/// A static field.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeclaredField {
    /// Its class with namespace, nested ones after `+`.
    pub class: String,
    /// Its type where that is a class, structure or generic instance of one, without arguments:
    /// `System.Collections.Generic.List`1`.
    pub type_name: Option<String>,
}

/// Tables of the metadata, by number.
mod table {
    pub(super) const MODULE: usize = 0x00;
    pub(super) const TYPE_REF: usize = 0x01;
    pub(super) const TYPE_DEF: usize = 0x02;
    pub(super) const FIELD: usize = 0x04;
    pub(super) const METHOD: usize = 0x06;
    pub(super) const TYPE_SPEC: usize = 0x1b;
    pub(super) const ASSEMBLY: usize = 0x20;
    pub(super) const NESTED_CLASS: usize = 0x29;
    pub(super) const COUNT: usize = 0x2d;
}

/// A column of a table.
#[derive(Clone, Copy)]
enum MetadataColumn {
    /// So many bytes.
    Bytes(u8),
    /// Place in the strings, GUIDs or blobs.
    Text,
    Guid,
    Blob,
    /// Row of a table.
    Row(u8),
    /// Row of one of some tables, and which in so many bits.
    Coded(u8, &'static [u8]),
}

use MetadataColumn::{Blob, Bytes, Coded, Guid, Row, Text};

const TYPE_DEF_OR_REF: MetadataColumn = Coded(2, &[0x02, 0x01, 0x1b]);
const HAS_ATTRIBUTE: MetadataColumn = Coded(
    5,
    &[
        0x06, 0x04, 0x01, 0x02, 0x08, 0x09, 0x0a, 0x00, 0x0e, 0x17, 0x14, 0x11, 0x1a, 0x1b, 0x20,
        0x23, 0x26, 0x27, 0x28, 0x2a, 0x2c, 0x2b,
    ],
);
const IMPLEMENTATION: MetadataColumn = Coded(2, &[0x26, 0x23, 0x27]);
const METHOD_DEF_OR_REF: MetadataColumn = Coded(1, &[0x06, 0x0a]);

/// Columns of the tables up to the nested classes (II.22).
const COLUMNS: [&[MetadataColumn]; table::NESTED_CLASS + 1] = [
    &[Bytes(2), Text, Guid, Guid, Guid],
    &[Coded(2, &[0x00, 0x1a, 0x23, 0x01]), Text, Text],
    &[Bytes(4), Text, Text, TYPE_DEF_OR_REF, Row(0x04), Row(0x06)],
    &[Row(0x04)],
    &[Bytes(2), Text, Blob],
    &[Row(0x06)],
    &[Bytes(4), Bytes(2), Bytes(2), Text, Blob, Row(0x08)],
    &[Row(0x08)],
    &[Bytes(2), Bytes(2), Text],
    &[Row(0x02), TYPE_DEF_OR_REF],
    &[Coded(3, &[0x02, 0x01, 0x1a, 0x06, 0x1b]), Text, Blob],
    &[Bytes(2), Coded(2, &[0x04, 0x08, 0x17]), Blob],
    &[HAS_ATTRIBUTE, Coded(3, &[0x06, 0x0a]), Blob],
    &[Coded(1, &[0x04, 0x08]), Blob],
    &[Bytes(2), Coded(2, &[0x02, 0x06, 0x20]), Blob],
    &[Bytes(2), Bytes(4), Row(0x02)],
    &[Bytes(4), Row(0x04)],
    &[Blob],
    &[Row(0x02), Row(0x14)],
    &[Row(0x14)],
    &[Bytes(2), Text, TYPE_DEF_OR_REF],
    &[Row(0x02), Row(0x17)],
    &[Row(0x17)],
    &[Bytes(2), Text, Blob],
    &[Bytes(2), Row(0x06), Coded(1, &[0x14, 0x17])],
    &[Row(0x02), METHOD_DEF_OR_REF, METHOD_DEF_OR_REF],
    &[Text],
    &[Blob],
    &[Bytes(2), Coded(1, &[0x04, 0x06]), Text, Row(0x1a)],
    &[Bytes(4), Row(0x04)],
    &[Bytes(4), Bytes(4)],
    &[Bytes(4)],
    &[Bytes(4), Bytes(8), Bytes(4), Blob, Text, Text],
    &[Bytes(4)],
    &[Bytes(4), Bytes(4), Bytes(4)],
    &[Bytes(8), Bytes(4), Blob, Text, Text, Blob],
    &[Bytes(4), Row(0x23)],
    &[Bytes(4), Bytes(4), Bytes(4), Row(0x23)],
    &[Bytes(4), Text, Blob],
    &[Bytes(4), Bytes(4), Text, Text, IMPLEMENTATION],
    &[Bytes(4), Bytes(4), Text, IMPLEMENTATION],
    &[Row(0x02), Row(0x02)],
];

/// Where a table is.
#[derive(Clone, Copy, Default)]
struct MetadataTable {
    begin: usize,
    row_bytes: usize,
    rows: u32,
}

/// What metadata says of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeclaredMethod<'a> {
    /// Token of its class.
    pub class: u32,
    /// Its name.
    pub name: &'a str,
    /// Its signature (II.23.2.1).
    pub signature: &'a [u8],
}

/// The metadata of an assembly.
pub struct Assembly<'a> {
    strings: &'a [u8],
    blobs: &'a [u8],
    /// The GUIDs, and where they begin.
    guids: (usize, &'a [u8]),
    /// The rows of all tables.
    rows: &'a [u8],
    places: [MetadataTable; table::NESTED_CLASS + 1],
    counts: [u32; table::COUNT],
    /// Bits 0, 1 and 2: places in strings, GUIDs and blobs have four bytes.
    wide: u8,
}

impl<'a> Assembly<'a> {
    /// Reads where its tables are; `None` when the file is no assembly.
    #[must_use]
    pub fn of(file: &'a [u8]) -> Option<Self> {
        Self::of_metadata(metadata(file)?)
    }

    /// The same of the metadata alone, as a process has it in its memory.
    #[must_use]
    pub fn of_metadata(metadata: &'a [u8]) -> Option<Self> {
        let mut fields = PayloadFields(metadata);
        // "BSJB", version, reserved.
        if fields.u32()? != 0x424a_5342 {
            return None;
        }
        fields.take(8)?;
        let version_bytes = usize::try_from(fields.u32()?).ok()?;
        fields.take(version_bytes)?;
        let (_flags, streams) = (fields.u16()?, fields.u16()?);
        let (mut strings, mut blobs, mut tables) = (None, None, None);
        let mut guids = (0, &[][..]);
        for _ in 0..streams {
            let (offset, size) =
                (usize::try_from(fields.u32()?).ok()?, usize::try_from(fields.u32()?).ok()?);
            let length = fields.0.iter().take(32).position(|&byte| byte == 0)?;
            let name = fields.0.get(..length)?;
            fields.take((length + 1).next_multiple_of(4))?;
            let stream = metadata.get(offset..offset.checked_add(size)?)?;
            match name {
                b"#Strings" => strings = Some(stream),
                b"#Blob" => blobs = Some(stream),
                b"#GUID" => guids = (offset, stream),
                b"#~" => tables = Some(stream),
                _ => {}
            }
        }
        let (strings, blobs, mut fields) = (strings?, blobs?, PayloadFields(tables?));
        fields.take(6)?;
        let wide = fields.u8()?;
        fields.take(1)?;
        let (valid, _sorted) = (fields.u64()?, fields.u64()?);
        let mut counts = [0; table::COUNT];
        for number in (0..64).filter(|number| valid & 1 << number != 0) {
            let rows = fields.u32()?;
            // A table that does not exist would shift the others.
            *counts.get_mut(number)? = rows;
        }
        // Bit 6: another four bytes.
        if wide & 0x40 != 0 {
            fields.take(4)?;
        }
        let mut tables = Self {
            strings,
            blobs,
            guids,
            rows: fields.0,
            places: [MetadataTable::default(); table::NESTED_CLASS + 1],
            counts,
            wide,
        };
        let mut begin = 0usize;
        for (number, (columns, rows)) in COLUMNS.iter().zip(counts).enumerate() {
            let row_bytes = columns.iter().map(|&column| tables.width(column)).sum();
            *tables.places.get_mut(number)? = MetadataTable { begin, row_bytes, rows };
            begin = begin.checked_add(row_bytes.checked_mul(usize::try_from(rows).ok()?)?)?;
        }
        (begin <= tables.rows.len()).then_some(tables)
    }

    /// Bytes of a column.
    fn width(&self, column: MetadataColumn) -> usize {
        let count = |table: u8| self.counts.get(usize::from(table)).copied().unwrap_or(0);
        let narrow = match column {
            Bytes(bytes) => return usize::from(bytes),
            Text => self.wide & 1 == 0,
            Guid => self.wide & 2 == 0,
            Blob => self.wide & 4 == 0,
            Row(table) => count(table) < 1 << 16,
            Coded(bits, tables) => tables.iter().all(|&table| count(table) < 1 << (16 - bits)),
        };
        if narrow { 2 } else { 4 }
    }

    /// A column of a row; rows count from 1.
    fn get(&self, number: usize, row: u32, column: usize) -> Option<u32> {
        let place = self.places.get(number)?;
        if row == 0 || row > place.rows {
            return None;
        }
        let columns = COLUMNS.get(number)?;
        let before: usize = columns.get(..column)?.iter().map(|&column| self.width(column)).sum();
        let at = place.begin + usize::try_from(row - 1).ok()? * place.row_bytes + before;
        let mut fields = PayloadFields(self.rows.get(at..)?);
        match self.width(*columns.get(column)?) {
            2 => fields.u16().map(u32::from),
            _ => fields.u32(),
        }
    }

    fn text(&self, at: u32) -> Option<&'a str> {
        let from = self.strings.get(usize::try_from(at).ok()?..)?;
        let length = from.iter().take(MAX_NAME).position(|&byte| byte == 0)?;
        std::str::from_utf8(from.get(..length)?).ok()
    }

    fn blob(&self, at: u32) -> Option<&'a [u8]> {
        let mut blob = PayloadFields(self.blobs.get(usize::try_from(at).ok()?..)?);
        let length = compressed(&mut blob)?;
        blob.take(usize::try_from(length).ok()?)
    }

    /// Name of a row of `TypeDef` or `TypeRef`, which have theirs in the same columns.
    fn name(&self, number: usize, row: u32) -> Option<String> {
        let name = self.text(self.get(number, row, 1)?)?;
        let namespace = self.text(self.get(number, row, 2)?)?;
        Some(if namespace.is_empty() { name.to_owned() } else { format!("{namespace}.{name}") })
    }

    /// The class with a token of `TypeDef`: its name alone, with namespace, and with those of the
    /// classes around it.
    #[must_use]
    pub fn class_names(&self, token: u32) -> Option<(String, String)> {
        let row = token & 0xff_ffff;
        if token >> 24 != 0x02 {
            return None;
        }
        Some((self.name(table::TYPE_DEF, row)?, self.class(row)?))
    }

    /// The method with a token of `MethodDef`.
    #[must_use]
    pub fn method(&self, token: u32) -> Option<DeclaredMethod<'a>> {
        let row = row_of(token, table::METHOD)?;
        let name = self.text(self.get(table::METHOD, row, 3)?)?;
        let signature = self.blob(self.get(table::METHOD, row, 4)?)?;
        // Classes have their methods one after the other, in the order of classes: it is of the
        // last one whose first method is not behind it.
        let (mut from, mut to) = (1, self.counts[table::TYPE_DEF].checked_add(1)?);
        while from < to {
            let middle = from + (to - from) / 2;
            if self.get(table::TYPE_DEF, middle, 5)? <= row {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        let class = from.checked_sub(1).filter(|&class| class > 0)?;
        Some(DeclaredMethod { class: token_of(table::TYPE_DEF, class), name, signature })
    }

    /// The class with a token of `TypeDef`: its name with namespace, and whether it is nested.
    #[must_use]
    pub fn type_def(&self, token: u32) -> Option<(String, bool)> {
        let row = row_of(token, table::TYPE_DEF)?;
        // Visibility, the low three bits, is 2 or more for nested types (II.23.1.15).
        let is_nested = self.get(table::TYPE_DEF, row, 0)? & 7 >= 2;
        Some((self.name(table::TYPE_DEF, row)?, is_nested))
    }

    /// Token of the class around that of a nested one.
    #[must_use]
    pub fn enclosing(&self, token: u32) -> Option<u32> {
        Some(token_of(table::TYPE_DEF, self.around(row_of(token, table::TYPE_DEF)?)?))
    }

    /// A class of another assembly: its name with namespace, and the token of the class around it
    /// if it is nested.
    #[must_use]
    pub fn type_ref(&self, token: u32) -> Option<(String, Option<u32>)> {
        let row = row_of(token, table::TYPE_REF)?;
        let scope = self.get(table::TYPE_REF, row, 0)?;
        let outer = (scope & 3 == 3).then(|| token_of(table::TYPE_REF, scope >> 2));
        Some((self.name(table::TYPE_REF, row)?, outer))
    }

    /// Signature of a constructed type.
    #[must_use]
    pub fn type_spec(&self, token: u32) -> Option<&'a [u8]> {
        self.blob(self.get(table::TYPE_SPEC, row_of(token, table::TYPE_SPEC)?, 0)?)
    }

    /// The number that its compilation was given, and where that is in the metadata.
    #[must_use]
    pub fn identity(&self) -> Option<(usize, &'a [u8])> {
        let (at, guids) = self.guids;
        Some((at, guids.get(..16)?))
    }

    /// The file name that its module was compiled with.
    #[must_use]
    pub fn module_name(&self) -> Option<&'a str> {
        self.text(self.get(table::MODULE, 1, 1)?)
    }

    /// Its own simple name.
    #[must_use]
    pub fn simple_name(&self) -> Option<&'a str> {
        self.text(self.get(table::ASSEMBLY, 1, 4)?)
    }

    /// Adds the static fields with the names in `wanted` that it declares, by name, as long as
    /// there is room for them.
    pub fn static_fields(
        &self,
        wanted: &HashSet<&str>,
        found: &mut HashMap<String, Vec<DeclaredField>>,
        room: &mut NameBudget,
    ) {
        // Where a number is wrong, the rest is missing.
        self.add_static_fields(wanted, found, room);
    }

    fn add_static_fields(
        &self,
        wanted: &HashSet<&str>,
        found: &mut HashMap<String, Vec<DeclaredField>>,
        room: &mut NameBudget,
    ) -> Option<()> {
        let fields = self.counts[table::FIELD];
        let classes = self.counts[table::TYPE_DEF];
        // Classes have their fields one after the other, in the order of classes.
        let first =
            |class: u32| self.get(table::TYPE_DEF, class, 4).unwrap_or(fields.saturating_add(1));
        let mut class = 1;
        for field in 1..=fields {
            while class < classes && first(class + 1) <= field {
                class += 1;
            }
            let flags = u16::try_from(self.get(table::FIELD, field, 0)?).ok()?;
            if flags & (STATIC | LITERAL) != STATIC {
                continue;
            }
            let Some(name) =
                self.text(self.get(table::FIELD, field, 1)?).filter(|name| wanted.contains(name))
            else {
                continue;
            };
            let list = found.entry(name.to_owned()).or_default();
            if list.len() < MAX_CLASSES {
                let type_name = self.type_of(self.get(table::FIELD, field, 2)?);
                let class = self.class(class)?;
                room.take(
                    size_of::<DeclaredField>()
                        + class.len()
                        + type_name.as_ref().map_or(0, String::len),
                )?;
                list.push(DeclaredField { class, type_name });
            }
        }
        Some(())
    }

    fn class(&self, mut class: u32) -> Option<String> {
        let mut name = self.name(table::TYPE_DEF, class)?;
        for _ in 0..MAX_NESTING {
            let Some(outer) = self.around(class) else { break };
            let around = self.name(table::TYPE_DEF, outer)?;
            if around.len() + name.len() > MAX_NAME {
                return None;
            }
            name = format!("{around}+{name}");
            class = outer;
        }
        Some(name)
    }

    /// The class around a nested one. The table is sorted by the nested ones (II.22).
    fn around(&self, class: u32) -> Option<u32> {
        let (mut from, mut to) = (1, self.counts[table::NESTED_CLASS].checked_add(1)?);
        while from < to {
            let middle = from + (to - from) / 2;
            match self.get(table::NESTED_CLASS, middle, 0)?.cmp(&class) {
                Ordering::Less => from = middle + 1,
                Ordering::Equal => return self.get(table::NESTED_CLASS, middle, 1),
                Ordering::Greater => to = middle,
            }
        }
        None
    }

    /// The type in the signature of a field (II.23.2.4).
    fn type_of(&self, at: u32) -> Option<String> {
        let mut signature = PayloadFields(self.blob(at)?);
        if signature.u8()? != 0x06 {
            return None;
        }
        loop {
            return match signature.u8()? {
                // Modifiers, each with a type.
                0x1f | 0x20 => {
                    compressed(&mut signature)?;
                    continue;
                }
                // A generic instance of what follows.
                0x15 => continue,
                0x11 | 0x12 => {
                    let coded = compressed(&mut signature)?;
                    match coded & 3 {
                        0 => self.name(table::TYPE_DEF, coded >> 2),
                        1 => self.name(table::TYPE_REF, coded >> 2),
                        _ => None,
                    }
                }
                _ => None,
            };
        }
    }
}

/// The row of a token, if it is of this table.
fn row_of(token: u32, number: usize) -> Option<u32> {
    (usize::try_from(token >> 24) == Ok(number)).then_some(token & 0xff_ffff)
}

/// The token of a row. Tokens have no room for rows beyond 24 bits, and tables none for them.
fn token_of(number: usize, row: u32) -> u32 {
    u32::try_from(number).unwrap_or(0) << 24 | row & 0xff_ffff
}

/// A number of one, two or four bytes, highest first (II.23.2).
fn compressed(fields: &mut PayloadFields<'_>) -> Option<u32> {
    let mut reader = SignatureReader(fields.0);
    let number = reader.number()?;
    fields.0 = reader.0;
    Some(number)
}

/// The number of the directory of the runtime's part.
pub(crate) const RUNTIME_DIRECTORY: u32 = 14;

/// The metadata of a PE file.
fn metadata(file: &[u8]) -> Option<&[u8]> {
    let head = PeHead::read(file, u16::MAX)?;
    let (runtime, _) = head.directory(file, RUNTIME_DIRECTORY)?;
    // The third entry of the runtime's head.
    let mut runtime = pe_head::from(file, head.file_offset(file, runtime)?)?;
    runtime.take(8)?;
    let (address, size) = (runtime.u32()?, usize::try_from(runtime.u32()?).ok()?);
    pe_head::from(file, head.file_offset(file, address)?)?.take(size)
}
