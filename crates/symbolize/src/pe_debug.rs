//! What an assembly's debug directory says of its PDB (Microsoft PE format, and
//! docs/design/specs/PE-COFF.md of dotnet/runtime): where the compiler left it and by what it is
//! known, or the PDB itself.

use super::portable_pdb::PdbId;
use flate2::read::DeflateDecoder;
use std::io::Read;

/// Most PE sections, entries of the directory, and bytes of a path.
const MAX_SECTIONS: u16 = 96;
const MAX_ENTRIES: u32 = 32;
const MAX_PATH_BYTES: u32 = 4096;
/// Longest PDB that is read.
pub const MAX_PDB_BYTES: u32 = 32 << 20;

const CODE_VIEW: u32 = 2;
const EMBEDDED_PDB: u32 = 17;
/// Minor version of an entry about a portable PDB.
const PORTABLE: u16 = 0x504d;
/// An entry of the debug directory takes so many bytes.
const ENTRY_BYTES: u32 = 28;

/// Fills `into` from an offset of the image on; false where that is not to be had.
pub type ReadImage<'a> = &'a dyn Fn(u64, &mut [u8]) -> bool;

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DebugDirectory {
    /// By what the PDB is known, and the path that the compiler wrote it to.
    pub pdb: Option<(PdbId, String)>,
    /// Where the PDB is in the image itself, and how long it is there.
    embedded: Option<(u32, u32)>,
}

impl DebugDirectory {
    /// Reads it from an image as it lies in a file; `None` when that is none, or has none.
    #[must_use]
    pub fn read(read: ReadImage<'_>) -> Option<Self> {
        let dos: [u8; 64] = bytes(read, 0)?;
        let head = u32_at(&dos, 0x3c)?;
        let coff: [u8; 24] = bytes(read, head)?;
        if !dos.starts_with(b"MZ") || !coff.starts_with(b"PE\0\0") {
            return None;
        }
        let (sections, optional_bytes) = (u16_at(&coff, 6)?, u16_at(&coff, 20)?);
        let optional = head.checked_add(24)?;
        // The directories stand after 96 bytes of a 32-bit head, 112 of a 64-bit one, and before
        // them how many they are. The seventh is the debug directory.
        let directories = match u16::from_le_bytes(bytes(read, optional)?) {
            0x10b => 96,
            0x20b => 112,
            _ => return None,
        };
        let count: [u8; 4] = bytes(read, optional.checked_add(directories - 4)?)?;
        if u32::from_le_bytes(count) < 7 {
            return None;
        }
        let place: [u8; 8] = bytes(read, optional.checked_add(directories + 6 * 8)?)?;
        let (address, size) = (u32_at(&place, 0)?, u32_at(&place, 4)?);
        let table = optional.checked_add(optional_bytes.into())?;
        let at = (0..u32::from(sections.min(MAX_SECTIONS))).find_map(|number| {
            let section: [u8; 40] = bytes(read, table.checked_add(number * 40)?)?;
            let [begin, raw_bytes, raw] = [12, 16, 20].map(|at| u32_at(&section, at));
            let inside = address.checked_sub(begin?).filter(|&inside| Some(inside) < raw_bytes)?;
            raw?.checked_add(inside)
        })?;
        let mut found = Self::default();
        for number in 0..(size / ENTRY_BYTES).min(MAX_ENTRIES) {
            let entry: [u8; ENTRY_BYTES as usize] =
                bytes(read, at.checked_add(number * ENTRY_BYTES)?)?;
            let [stamp, kind, length, at] = [4, 12, 16, 24].map(|at| u32_at(&entry, at));
            let (stamp, kind, length, at) = (stamp?, kind?, length?, at?);
            if kind == CODE_VIEW && u16_at(&entry, 10)? == PORTABLE && found.pdb.is_none() {
                found.pdb = code_view(read, stamp, at, length);
            } else if kind == EMBEDDED_PDB {
                found.embedded = Some((at, length));
            }
        }
        (found != Self::default()).then_some(found)
    }

    /// The PDB that is in the image itself, unpacked.
    #[must_use]
    pub fn embedded_pdb(&self, read: ReadImage<'_>) -> Option<Vec<u8>> {
        let (at, length) = self.embedded?;
        let packed_bytes = length.checked_sub(8).filter(|&packed| packed <= MAX_PDB_BYTES)?;
        let head: [u8; 8] = bytes(read, at)?;
        let size = u32_at(&head, 4).filter(|&size| size <= MAX_PDB_BYTES)?;
        if !head.starts_with(b"MPDB") {
            return None;
        }
        let mut packed = vec![0; usize::try_from(packed_bytes).ok()?];
        read(u64::from(at) + 8, &mut packed).then_some(())?;
        // What it says of its size is not believed before it is so long.
        let mut unpacked = Vec::new();
        let unpack = DeflateDecoder::new(&*packed).take(size.into()).read_to_end(&mut unpacked);
        (unpack.ok()? == usize::try_from(size).ok()?).then_some(unpacked)
    }
}

/// "RSDS", a GUID, an age, and a path with a zero behind it.
fn code_view(read: ReadImage<'_>, stamp: u32, at: u32, length: u32) -> Option<(PdbId, String)> {
    let head: [u8; 24] = bytes(read, at)?;
    let path_bytes = length.checked_sub(24).filter(|&bytes| bytes <= MAX_PATH_BYTES)?;
    if !head.starts_with(b"RSDS") {
        return None;
    }
    let mut path = vec![0; usize::try_from(path_bytes).ok()?];
    read(u64::from(at) + 24, &mut path).then_some(())?;
    let end = path.iter().position(|&byte| byte == 0).unwrap_or(path.len());
    path.truncate(end);
    let mut id = [0; 20];
    let (guid, of_stamp) = id.split_at_mut(16);
    guid.copy_from_slice(head.get(4..20)?);
    of_stamp.copy_from_slice(&stamp.to_le_bytes());
    Some((id, String::from_utf8(path).ok()?))
}

fn bytes<const N: usize>(read: ReadImage<'_>, at: u32) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    read(at.into(), &mut bytes).then_some(bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::DeflateEncoder;
    use std::io::Write as _;

    /// An image of one section, which holds nothing but a debug directory: where the PDB is, and if
    /// there is one, the PDB.
    pub(crate) fn assembly(id: PdbId, path: &str, embedded: Option<&[u8]>) -> Vec<u8> {
        let mut data: Vec<(u32, u16, u32, Vec<u8>)> = Vec::new();
        let (guid, stamp) = id.split_at(16);
        let stamp = u32::from_le_bytes(stamp.try_into().unwrap());
        let code_view = [b"RSDS", guid, &[1, 0, 0, 0], path.as_bytes(), &[0]].concat();
        data.push((stamp, PORTABLE, CODE_VIEW, code_view));
        if let Some(pdb) = embedded {
            let mut packed = b"MPDB".to_vec();
            packed.extend(u32::try_from(pdb.len()).unwrap().to_le_bytes());
            let mut encoder = DeflateEncoder::new(packed, Compression::best());
            encoder.write_all(pdb).unwrap();
            data.push((0, 0x100, EMBEDDED_PDB, encoder.finish().unwrap()));
        }
        let mut bytes = vec![0u8; 0x200];
        let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
        put(0, b"MZ");
        put(0x3c, &0x80u32.to_le_bytes());
        put(0x80, b"PE\0\0");
        put(0x86, &1u16.to_le_bytes());
        put(0x94, &240u16.to_le_bytes());
        put(0x98, &0x20bu16.to_le_bytes());
        put(0x98 + 108, &16u32.to_le_bytes());
        put(0x98 + 112 + 48, &0x2010u32.to_le_bytes());
        let directory_bytes = u32::try_from(data.len()).unwrap() * ENTRY_BYTES;
        put(0x98 + 112 + 52, &directory_bytes.to_le_bytes());
        for (at, word) in [(12, 0x2000u32), (16, 0x100_0000), (20, 0x1f0)] {
            put(0x98 + 240 + at, &word.to_le_bytes());
        }
        let mut at = 0x200 + directory_bytes;
        for (stamp, minor, kind, content) in &data {
            let length = u32::try_from(content.len()).unwrap();
            bytes.extend([0, *stamp].map(u32::to_le_bytes).concat());
            bytes.extend([0, *minor].map(u16::to_le_bytes).concat());
            bytes.extend([*kind, length, 0, at].map(u32::to_le_bytes).concat());
            at += length;
        }
        data.iter().for_each(|(.., content)| bytes.extend(content));
        bytes
    }

    pub(crate) fn reading(bytes: &[u8]) -> impl Fn(u64, &mut [u8]) -> bool {
        move |at, into| {
            let from = usize::try_from(at).ok().and_then(|at| bytes.get(at..));
            let there = from.and_then(|from| from.get(..into.len()));
            there.map(|there| into.copy_from_slice(there)).is_some()
        }
    }

    #[test]
    fn an_assembly_says_by_what_its_pdb_is_known_and_where_it_was() {
        let mut id = [9; 20];
        id[16..].copy_from_slice(&0xdead_beef_u32.to_le_bytes());
        let bytes = assembly(id, "/obj/Work.pdb", None);
        let found = DebugDirectory::read(&reading(&bytes)).unwrap();
        assert_eq!(found.pdb, Some((id, "/obj/Work.pdb".to_owned())));
        assert_eq!(found.embedded_pdb(&reading(&bytes)), None);
        assert_eq!(DebugDirectory::read(&reading(b"MZ")), None);
    }

    #[test]
    fn a_pdb_in_the_assembly_is_unpacked_and_no_more_of_it_than_it_says() {
        let pdb: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        let mut bytes = assembly([1; 20], "Work.pdb", Some(&pdb));
        let found = DebugDirectory::read(&reading(&bytes)).unwrap();
        assert_eq!(found.embedded_pdb(&reading(&bytes)).as_deref(), Some(&pdb[..]));
        let at = bytes.windows(4).position(|bytes| bytes == b"MPDB").unwrap();
        let mut saying = |size: u32| {
            bytes[at + 4..at + 8].copy_from_slice(&size.to_le_bytes());
            let unpacked = found.embedded_pdb(&reading(&bytes));
            unpacked.map(|unpacked| unpacked.len())
        };
        assert_eq!(saying(1000), Some(1000), "the rest is nobody's");
        assert_eq!(saying(500_000), None, "there is less");
        assert_eq!(saying(MAX_PDB_BYTES + 1), None, "more than is read");
    }

    #[test]
    fn an_image_cut_anywhere_or_scribbled_on_is_read_or_refused() {
        let pdb = vec![5; 3000];
        let bytes = assembly([1; 20], "Work.pdb", Some(&pdb));
        let reads = |bytes: &[u8]| {
            let found = DebugDirectory::read(&reading(bytes))?;
            found.embedded_pdb(&reading(bytes))
        };
        for cut in 0..bytes.len() - 1 {
            assert_eq!(reads(&bytes[..cut]), None, "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0xff;
            assert!(reads(&bytes).is_none_or(|found| found.len() <= pdb.len()), "byte {at}");
        }
    }
}
