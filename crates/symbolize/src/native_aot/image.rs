//! The tables of a NativeAOT program that name its methods, found as the runtime finds them: the
//! section `__modules` points at a header, which lists tables by number (dotnet/runtime
//! src/coreclr/tools/Common/Internal/Runtime/ModuleHeaders.cs and MetadataBlob.cs).

use super::reader::{Handle, Reader};
use crate::elf_sections::Sections;
use perfusion_host::process::guarded_io::ForeignFile;
use std::collections::HashMap;
use std::ops::Range;

/// Managed code.
const CODE_SECTION: &str = "__managedcode";
/// `ReadyToRunHeaderConstants.Signature`.
const SIGNATURE: [u8; 4] = *b"RTR\0";
/// The version whose tables are known: of .NET 10.
const VERSION: u16 = 16;
const HEADER_BYTES: u64 = 16;
/// Bytes of a row: number, flags, first address, address after the last.
const ROW_BYTES: u8 = 24;
const MAX_ROWS: u16 = 256;
/// `ReadonlyBlobRegionStart` with `EmbeddedMetadata`, and with
/// `BlobIdStackTraceMethodRvaToTokenMapping`.
const METADATA: u32 = 313;
const METHODS: u32 = 327;
/// Most bytes of each table. A metadata offset has 25 bits.
const MAX_TABLE_BYTES: u64 = 32 << 20;
const MAX_RELOCATION_BYTES: u64 = 16 << 20;
/// `Elf64_Rela`, and the relocation that adds the load address, on x86-64 and on aarch64.
const RELOCATION_BYTES: usize = 24;
const RELATIVE: [u64; 2] = [8, 1027];
/// Commands of the list of methods (`StackTraceDataCommand`).
const UPDATE_OWNER: u8 = 0x01;
const UPDATE_NAME: u8 = 0x02;
const UPDATE_SIGNATURE: u8 = 0x04;
const UPDATE_GENERIC: u8 = 0x08;
const HIDDEN: u8 = 0x10;

/// One method body, by records of the metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Method {
    /// The type that declares it.
    pub(super) owner: Handle,
    /// Its name.
    pub(super) name: u32,
    pub(super) signature: u32,
    /// Names of its type parameters; 0 where it has none.
    pub(super) parameters: u32,
}

/// What a program says of its methods.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) metadata: Vec<u8>,
    /// By first address.
    pub(super) methods: HashMap<u64, Method>,
}

/// Where the managed code is, in a NativeAOT program.
pub(crate) fn code(sections: &Sections) -> Option<Range<u64>> {
    let code = sections.named(CODE_SECTION)?;
    Some(code.address..code.address.checked_add(code.size)?)
}

/// Reads the tables; `None` where there are none, or none of the known form.
pub(super) fn read(file: &ForeignFile, sections: &Sections) -> Option<Tables> {
    let code = code(sections)?;
    let modules = sections.named("__modules")?;
    let image = Image { file, sections };
    let header = image.pointers(modules.address..modules.address.checked_add(8)?)?;
    let header = *header.get(&modules.address)?;
    let bytes = image.bytes(header, HEADER_BYTES)?;
    let mut reader = Reader::new(&bytes, 0);
    if reader.take::<4>()? != SIGNATURE {
        return None;
    }
    let (version, _minor) = (u16::from_le_bytes(reader.take()?), reader.take::<2>()?);
    reader.take::<4>()?;
    let rows = u16::from_le_bytes(reader.take()?);
    let (row_bytes, _kind) = (reader.byte()?, reader.byte()?);
    if version != VERSION || row_bytes != ROW_BYTES || rows > MAX_ROWS {
        tracing::debug!(version, row_bytes, rows, "a NativeAOT program of an unknown form");
        return None;
    }
    let first = header.checked_add(HEADER_BYTES)?;
    let length = u64::from(rows) * u64::from(ROW_BYTES);
    let (table, pointers) =
        (image.bytes(first, length)?, image.pointers(first..first.checked_add(length)?)?);
    let mut found = HashMap::new();
    for (row, at) in table.chunks_exact(ROW_BYTES.into()).zip((first..).step_by(ROW_BYTES.into())) {
        let number = u32::from_le_bytes(*row.first_chunk()?);
        if let (Some(start), Some(end)) = (pointers.get(&(at + 8)), pointers.get(&(at + 16))) {
            found.insert(number, *start..*end);
        }
    }
    let table = |number: u32| {
        let range = found.get(&number)?;
        let length = range.end.checked_sub(range.start).filter(|l| *l <= MAX_TABLE_BYTES)?;
        Some((range.start, image.bytes(range.start, length)?))
    };
    let ((_, metadata), (address, methods)) = (table(METADATA)?, table(METHODS)?);
    Some(Tables { metadata, methods: list(&methods, address, &code)? })
}

/// An image's bytes by address.
struct Image<'a> {
    file: &'a ForeignFile,
    sections: &'a Sections,
}

impl Image<'_> {
    fn bytes(&self, address: u64, length: u64) -> Option<Vec<u8>> {
        let section = self.sections.at(address)?;
        let within = address - section.address;
        if length > MAX_TABLE_BYTES || within.checked_add(length)? > section.size {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(length).ok()?];
        self.file.read_exact_at(&mut bytes, section.offset.checked_add(within)?).ok()?;
        Some(bytes)
    }

    /// The pointers in a range, by where they are. In an image that can be loaded anywhere the
    /// loader writes them, as the relocations say; else they are in the file.
    fn pointers(&self, within: Range<u64>) -> Option<HashMap<u64, u64>> {
        let length = within.end - within.start;
        let bytes = self.bytes(within.start, length)?;
        let words = bytes.chunks_exact(8).zip((within.start..).step_by(8));
        let mut pointers: HashMap<u64, u64> = words
            .filter_map(|(word, at)| Some((at, u64::from_le_bytes(*word.first_chunk()?))))
            .filter(|(_, word)| *word != 0)
            .collect();
        let relocations = self.sections.named(".rela.dyn");
        let relocations =
            relocations.and_then(|section| section.bytes(self.file, MAX_RELOCATION_BYTES));
        for relocation in relocations.unwrap_or_default().chunks_exact(RELOCATION_BYTES) {
            let word = |at: usize| relocation.get(at..)?.first_chunk().copied();
            let [place, info, value] = [0, 8, 16].map(|at| word(at).map_or(0, u64::from_le_bytes));
            if within.contains(&place) && RELATIVE.contains(&(info & 0xffff_ffff)) {
                pointers.insert(place, value);
            }
        }
        Some(pointers)
    }
}

/// The list of methods. It states its length, and each method's first address: where one does not
/// fit, nothing of it is believed.
fn list(bytes: &[u8], address: u64, code: &Range<u64>) -> Option<HashMap<u64, Method>> {
    let mut reader = Reader::new(bytes, 0);
    let count = u32::from_le_bytes(reader.take()?);
    let mut methods = HashMap::new();
    let (mut owner, mut name, mut signature, mut parameters) = (Handle::of_token(0), 0, 0, 0);
    for _ in 0..count {
        let command = reader.byte()?;
        if command & !(UPDATE_OWNER | UPDATE_NAME | UPDATE_SIGNATURE | UPDATE_GENERIC | HIDDEN) != 0
        {
            return None;
        }
        if command & UPDATE_OWNER != 0 {
            owner = Handle::of_token(u32::from_le_bytes(reader.take()?));
        }
        if command & UPDATE_NAME != 0 {
            name = reader.unsigned()?;
        }
        if command & UPDATE_SIGNATURE != 0 {
            (signature, parameters) = (reader.unsigned()?, 0);
        }
        if command & UPDATE_GENERIC != 0 {
            (signature, parameters) = (reader.unsigned()?, reader.unsigned()?);
        }
        let at = address.checked_add(reader.position() as u64)?;
        let start = at.checked_add_signed(i32::from_le_bytes(reader.take()?).into())?;
        if !code.contains(&start) {
            return None;
        }
        // Those that are left out of stack traces have no names.
        if owner.at != 0 && name != 0 {
            methods.insert(start, Method { owner, name, signature, parameters });
        }
    }
    reader.is_at_end().then_some(methods)
}

#[cfg(test)]
mod tests {
    use super::{Handle, Method, list};

    #[test]
    fn a_list_of_methods_is_taken_as_a_whole_or_not_at_all() {
        // Two methods of one type, at 0x1000 and 0x1010; the list is at 0x5000.
        let mut bytes = 2u32.to_le_bytes().to_vec();
        bytes.push(0x07);
        bytes.extend((0x3au32 << 25 | 9).to_le_bytes());
        bytes.extend([5 << 1, 6 << 1]);
        bytes.extend((0x1000i32 - 0x5000 - 11).to_le_bytes());
        bytes.extend([0x0a, 7 << 1, 8 << 1, 3 << 1]);
        bytes.extend((0x1010i32 - 0x5000 - 19).to_le_bytes());
        let owner = Handle { kind: 0x3a, at: 9 };
        let methods = list(&bytes, 0x5000, &(0x1000..0x2000)).unwrap();
        assert_eq!(methods.len(), 2);
        let first = Method { owner, name: 5, signature: 6, parameters: 0 };
        let second = Method { owner, name: 7, signature: 8, parameters: 3 };
        assert_eq!((methods[&0x1000], methods[&0x1010]), (first, second));
        assert!(list(&bytes, 0x5000, &(0x1000..0x1010)).is_none(), "one is elsewhere");
        for cut in 0..bytes.len() {
            assert!(list(&bytes[..cut], 0x5000, &(0x1000..0x2000)).is_none(), "cut at {cut}");
        }
        bytes.push(0);
        assert!(list(&bytes, 0x5000, &(0x1000..0x2000)).is_none(), "more than it says");
        bytes[4] = 0x27;
        assert!(list(&bytes, 0x5000, &(0x1000..0x2000)).is_none(), "no such command");
    }
}
