//! Source lines of managed code. The runtime says which IL a body's code comes from, the PDB says
//! which lines that IL comes from. Both are joined when a method is named, and the result is kept
//! with the name; the PDB is kept only to be quick.
//!
//! The process whose code it is provides all of it. So what is kept is bounded, and a PDB must have
//! the id that the assembly states, which tells old PDBs from right ones, and no liar from others:
//! lines of a process are shown with its own frames only.

use super::pe_debug::{DebugDirectory, MAX_PDB_BYTES};
use super::portable_pdb::{PortablePdb, SequencePoint};
use super::source_line::SourceLine;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_host::process::mapped_file::{FileVersion, MappedFile, open_beneath, read_whole};
use perfusion_model::event::{IlMap, IlMapEntry, MethodBody};
use perfusion_model::frame::ProcessId;
use perfusion_model::text::clean;
use std::collections::HashSet;
use std::sync::Arc;

/// What lines of bodies may take, of all processes and of one.
const MAX_BYTES: usize = 64 << 20;
const MAX_PROCESS_BYTES: usize = 16 << 20;
/// What PDBs may take that are kept to be quick.
const MAX_HELD_BYTES: usize = 64 << 20;
/// Modules of one process whose PDBs are looked for.
const MAX_MODULES: usize = 2_048;
/// Most source files of one method.
const MAX_FILES: usize = 64;

/// Code from here on is of this line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LineEntry {
    /// First byte, counted from the body's first.
    from: u32,
    /// The first byte of all code of the line in this body.
    first: u32,
    /// 0 for none.
    line: u32,
    file: u16,
}

/// The lines of a body.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BodyLines {
    /// Where the body begins in the process.
    start: u64,
    start_line: u32,
    files: Box<[Arc<str>]>,
    entries: Box<[LineEntry]>,
}

impl BodyLines {
    /// Of the body that begins at `start`, whose method has these points.
    fn new(
        start: u64,
        map: &IlMap,
        points: &[SequencePoint],
        mut document: impl FnMut(u32) -> Option<Arc<str>>,
    ) -> Option<Self> {
        let visible = |points: &[SequencePoint]| {
            points.iter().rev().find_map(|point| Some((point.line?, point.document)))
        };
        let first = points.iter().find_map(|point| Some((point.line?, point.document)))?;
        let last = visible(points)?;
        let (mut files, mut rows) = (Vec::new(), HashMap::new());
        let mut file_of = |row: u32| {
            *rows.entry(row).or_insert_with(|| {
                let name = document(row).filter(|_| files.len() < MAX_FILES)?;
                files.push(name);
                u16::try_from(files.len() - 1).ok()
            })
        };
        let mut code: Vec<IlMapEntry> = map.entries.clone();
        // Of several places with no code but that of the next one nothing is ever met.
        code.retain(|entry| entry.end == 0 || entry.start < entry.end);
        code.sort_by_key(|entry| entry.start);
        let mut entries: Vec<LineEntry> = Vec::with_capacity(code.len());
        let mut firsts: HashMap<(u32, u16), u32> = HashMap::new();
        let mut push = |entries: &mut Vec<LineEntry>, from: u32, line: u32, file: u16| {
            let first = *firsts.entry((line, file)).or_insert(from);
            let entry = LineEntry { from, first, line, file };
            match entries.last_mut() {
                Some(last) if (last.line, last.file) == (line, file) => {}
                Some(last) if last.from == from => *last = entry,
                _ => entries.push(entry),
            }
        };
        let mut current = first;
        let mut code = code.into_iter().peekable();
        while let Some(entry) = code.next() {
            current = match entry.il {
                IlMapEntry::PROLOG => first,
                IlMapEntry::EPILOG => last,
                // Moved there from nowhere in particular, mostly from nearby.
                IlMapEntry::NO_MAPPING => current,
                il => {
                    let until = points.partition_point(|point| point.il <= il);
                    visible(points.get(..until)?).unwrap_or(first)
                }
            };
            let file = file_of(current.1)?;
            push(&mut entries, entry.start, current.0, file);
            let next = code.peek().map(|next| next.start);
            if entry.end != 0 && next.is_some_and(|next| next > entry.end) {
                push(&mut entries, entry.end, 0, file);
            }
        }
        (!entries.is_empty()).then(|| Self {
            start,
            start_line: first.0,
            files: files.into(),
            entries: entries.into(),
        })
    }

    fn entry(&self, address: u64) -> Option<&LineEntry> {
        let offset = u32::try_from(address.checked_sub(self.start)?).ok()?;
        let after = self.entries.partition_point(|entry| entry.from <= offset);
        self.entries.get(after.checked_sub(1)?).filter(|entry| entry.line != 0)
    }

    /// The line of the code at an address of the process.
    pub(super) fn line(&self, address: u64) -> Option<SourceLine> {
        let entry = self.entry(address)?;
        let file = Arc::clone(self.files.get(usize::from(entry.file))?);
        Some(SourceLine { file, line: entry.line, start_line: self.start_line })
    }

    /// One address that stands for all code of the same line of this body.
    pub(super) fn first_of_line(&self, address: u64) -> Option<u64> {
        Some(self.start.saturating_add(self.entry(address)?.first.into()))
    }

    fn held_bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&*self.entries)
            + self.files.iter().map(|file| size_of_val(file) + file.len()).sum::<usize>()
    }
}

/// A PDB that was read, and when it was last of use.
struct HeldPdb {
    pdb: Arc<PortablePdb>,
    used: u64,
}

/// Joins IL maps and PDBs.
#[derive(Default)]
pub(super) struct ManagedLines {
    /// Of each process, the modules that were looked at: the version of the file with the PDB.
    modules: HashMap<ProcessId, HashMap<u64, Option<FileVersion>>>,
    pdbs: HashMap<FileVersion, HeldPdb>,
    held_bytes: usize,
    clock: u64,
    /// What lines take, of all processes and of each.
    bytes: usize,
    bytes_of: HashMap<ProcessId, usize>,
    counters: LineCounters,
}

/// What became of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LineCounters {
    /// PDBs read.
    pdbs_read: u64,
    /// Modules for which none was found.
    modules_without_pdb: u64,
    /// Bodies whose lines are known.
    bodies: u64,
    /// Bodies whose lines found no room.
    refused: u64,
}

impl ManagedLines {
    /// The lines of a body of `process`, which still has this pid. `open` opens the file that the
    /// process has mapped at an address.
    pub(super) fn of(
        &mut self,
        process: ProcessId,
        pid: u32,
        method: &MethodBody,
        open: &dyn Fn(u64) -> Option<MappedFile>,
    ) -> Option<Arc<BodyLines>> {
        let map = method.il_map.as_deref()?;
        let (start, _) = *method.ranges.first()?;
        let pdb = self.pdb(process, pid, map.module_base, open)?;
        let points = pdb.sequence_points(method.token)?;
        let lines = BodyLines::new(start, map, &points, |row| {
            Some(clean(&pdb.document(row)?).as_ref().into())
        })?;
        let bytes = lines.held_bytes();
        let of_process = self.bytes_of.entry(process).or_default();
        if *of_process + bytes > MAX_PROCESS_BYTES || self.bytes + bytes > MAX_BYTES {
            self.counters.refused += 1;
            return None;
        }
        *of_process += bytes;
        self.bytes += bytes;
        self.counters.bodies += 1;
        Some(Arc::new(lines))
    }

    /// The PDB of the module that is mapped at `base`.
    fn pdb(
        &mut self,
        process: ProcessId,
        pid: u32,
        base: u64,
        open: &dyn Fn(u64) -> Option<MappedFile>,
    ) -> Option<Arc<PortablePdb>> {
        self.clock += 1;
        let modules = self.modules.entry(process).or_default();
        match modules.get(&base) {
            Some(None) => return None,
            Some(Some(version)) => {
                if let Some(held) = self.pdbs.get_mut(version) {
                    held.used = self.clock;
                    return Some(Arc::clone(&held.pdb));
                }
            }
            None if modules.len() >= MAX_MODULES => return None,
            None => {}
        }
        let found = open(base).and_then(|assembly| find(pid, &assembly));
        let version = found.as_ref().map(|found| found.0);
        self.counters.modules_without_pdb += u64::from(version.is_none());
        modules.insert(base, version);
        let (version, pdb) = found?;
        // Another process may have brought it already.
        if let Some(held) = self.pdbs.get_mut(&version).filter(|held| held.pdb.id() == pdb.id()) {
            held.used = self.clock;
            return Some(Arc::clone(&held.pdb));
        }
        self.counters.pdbs_read += 1;
        let pdb = Arc::new(pdb);
        self.held_bytes += pdb.held_bytes();
        let held = HeldPdb { pdb: Arc::clone(&pdb), used: self.clock };
        if let Some(before) = self.pdbs.insert(version, held) {
            self.held_bytes -= before.pdb.held_bytes();
        }
        while self.held_bytes > MAX_HELD_BYTES
            && let Some((&oldest, _)) = self.pdbs.iter().min_by_key(|(_, held)| held.used)
            && let Some(dropped) = self.pdbs.remove(&oldest)
        {
            self.held_bytes -= dropped.pdb.held_bytes();
        }
        Some(pdb)
    }

    /// Forgets all processes but these.
    pub(super) fn keep(&mut self, processes: &HashSet<ProcessId>) {
        self.modules.retain(|process, _| processes.contains(process));
        let bytes = &mut self.bytes;
        self.bytes_of.retain(|process, of| {
            let kept = processes.contains(process);
            *bytes -= if kept { 0 } else { *of };
            kept
        });
    }

    /// Memory is short: drops what can be read again.
    pub(super) fn shed(&mut self) {
        self.pdbs.clear();
        self.held_bytes = 0;
    }

    pub(super) fn counters(&self) -> [(&'static str, u64); 4] {
        let LineCounters { pdbs_read, modules_without_pdb, bodies, refused } = self.counters;
        [
            ("pdbs_read", pdbs_read),
            ("modules_without_pdb", modules_without_pdb),
            ("methods_with_lines", bodies),
            ("method_lines_refused", refused),
        ]
    }
}

/// The PDB of an assembly of `pid`, and what it was read from: the assembly itself, else a file
/// beside it, else the place where the compiler left it.
fn find(pid: u32, assembly: &MappedFile) -> Option<(FileVersion, PortablePdb)> {
    let MappedFile { file, path, offset } = assembly;
    let read = |at: u64, into: &mut [u8]| {
        offset.checked_add(at).is_some_and(|at| file.read_exact_at(into, at).is_ok())
    };
    let directory = DebugDirectory::read(&read)?;
    let (id, built) = directory.pdb.as_ref()?;
    let is_its = |pdb: &PortablePdb| pdb.id() == id;
    if let Some(pdb) = directory.embedded_pdb(&read).and_then(PortablePdb::parse).filter(is_its) {
        // A file may carry several assemblies: the place in it tells them apart.
        let version = FileVersion::of(file)?.part(*offset);
        return Some((version, pdb));
    }
    // A compiler on another system writes its own separators.
    let name = built.rsplit(['/', '\\']).next().filter(|name| !name.is_empty())?;
    let (folder, _) = path.rsplit_once('/')?;
    let beside = format!("{folder}/{name}");
    let candidates = [Some(beside), built.starts_with('/').then(|| built.clone())];
    candidates.into_iter().flatten().find_map(|path| {
        let file: ForeignFile = open_beneath(pid, &path)?;
        let version = FileVersion::of(&file)?;
        let pdb = PortablePdb::parse(read_whole(&file, MAX_PDB_BYTES.into())?).filter(is_its)?;
        Some((version, pdb))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pe_debug::tests::assembly;
    use crate::portable_pdb::tests::{method, pdb};

    fn entry(il: u32, start: u32, end: u32) -> IlMapEntry {
        IlMapEntry { il, start, end }
    }

    fn point(il: u32, line: Option<u32>) -> SequencePoint {
        SequencePoint { il, line, document: 1 }
    }

    fn lines(entries: Vec<IlMapEntry>) -> BodyLines {
        let points = [
            point(0, None),
            point(2, Some(10)),
            point(5, Some(11)),
            point(9, None),
            point(20, Some(12)),
        ];
        let map = IlMap { module_base: 0, entries };
        BodyLines::new(0x1000, &map, &points, |_| Some("/src/Work.cs".into())).unwrap()
    }

    #[test]
    fn code_is_of_the_line_that_its_il_comes_from() {
        let body = lines(vec![
            entry(20, 0x40, 0x50),
            entry(IlMapEntry::EPILOG, 0x50, 0x58),
            entry(IlMapEntry::PROLOG, 0, 8),
            entry(2, 8, 0x10),
            entry(6, 0x10, 0x20),
            entry(IlMapEntry::NO_MAPPING, 0x20, 0x24),
            entry(2, 0x24, 0x28),
            entry(9, 0x28, 0x30),
            entry(5, 0x30, 0x30),
        ]);
        let line = |at: u64| body.line(at).map(|line| line.line);
        for (at, expected, why) in [
            (0xfff, None, "before the body"),
            (0x1000, Some(10), "the prolog is of the first line"),
            (0x100f, Some(10), "a line"),
            (0x1010, Some(11), "the next one"),
            (0x1020, Some(11), "code of no place stays with what is before it"),
            (0x1024, Some(10), "a line again"),
            (0x1028, Some(11), "what the compiler made belongs to the line before"),
            (0x1030, None, "nobody says"),
            (0x1040, Some(12), "the last"),
            (0x1050, Some(12), "the epilog is of the last line"),
        ] {
            assert_eq!(line(at), expected, "{at:x}: {why}");
        }
        let found = body.line(0x1012).unwrap();
        assert_eq!((&*found.file, found.start_line), ("/src/Work.cs", 10));
        // The same line, twice in the body.
        assert_eq!(body.first_of_line(0x1027), Some(0x1000));
        assert_eq!(body.first_of_line(0x1015), Some(0x1010));
        assert_eq!(body.first_of_line(0x1032), None);
    }

    #[test]
    fn a_method_of_which_no_line_is_known_has_none() {
        let map = IlMap { module_base: 0, entries: vec![entry(0, 0, 9)] };
        let file = |_| Some("a".into());
        assert_eq!(BodyLines::new(0, &map, &[], file), None);
        assert_eq!(BodyLines::new(0, &map, &[point(0, None)], file), None);
        assert_eq!(BodyLines::new(0, &map, &[point(0, Some(1))], |_| None), None);
        let empty = IlMap { module_base: 0, entries: vec![] };
        assert_eq!(BodyLines::new(0, &empty, &[point(0, Some(1))], file), None);
    }

    /// A folder with an assembly in it.
    struct BuiltAssembly(tempfile::TempDir);

    impl BuiltAssembly {
        fn new(content: &[u8]) -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("Work.dll"), content).unwrap();
            Self(folder)
        }

        fn open(&self) -> MappedFile {
            let path = self.0.path().canonicalize().unwrap().join("Work.dll");
            let file = ForeignFile::own(std::fs::File::open(&path).unwrap());
            MappedFile { file, path: path.to_str().unwrap().to_owned(), offset: 0 }
        }

        fn first_lines(&self, lines: &mut ManagedLines, token: u32) -> Option<[Option<u32>; 2]> {
            let entries = vec![entry(0, 0, 0x10), entry(4, 0x10, 0x20)];
            let method = MethodBody {
                asked: 0x5000,
                module_id: 1,
                token,
                dynamic: false,
                name: "Work.Run()".to_owned(),
                module: "Work.dll".to_owned(),
                ranges: vec![(0x5000, 0x20)],
                il_map: Some(Box::new(IlMap { module_base: 0x7000, entries })),
            };
            let open = |base| (base == 0x7000).then(|| self.open());
            let body = lines.of(PROCESS, std::process::id(), &method, &open)?;
            Some([0x5008, 0x5018].map(|at| body.line(at).map(|line| line.line)))
        }
    }

    const PROCESS: ProcessId = ProcessId(3);
    const ID: [u8; 20] = [6; 20];

    fn work(id: [u8; 20]) -> Vec<u8> {
        pdb(id, &[method(&[(0, Some(7)), (4, Some(8))]), vec![]])
    }

    #[test]
    fn a_pdb_beside_its_assembly_is_found_and_another_one_there_is_not_believed() {
        let built = BuiltAssembly::new(&assembly(ID, "C:\\obj\\Work.pdb", None));
        let beside = built.0.path().join("Work.pdb");
        let mut lines = ManagedLines::default();
        std::fs::write(&beside, work([7; 20])).unwrap();
        assert_eq!(built.first_lines(&mut lines, 0x0600_0001), None, "of another build");
        assert_eq!(lines.counters.modules_without_pdb, 1);
        std::fs::write(&beside, work(ID)).unwrap();
        assert_eq!(built.first_lines(&mut lines, 0x0600_0001), None, "asked once");
        lines.keep(&HashSet::new());
        let found = built.first_lines(&mut lines, 0x0600_0001);
        assert_eq!(found, Some([Some(7), Some(8)]));
        assert_eq!(built.first_lines(&mut lines, 0x0600_0002), None, "without lines");
        // It is not read again.
        std::fs::remove_file(&beside).unwrap();
        assert!(built.first_lines(&mut lines, 0x0600_0001).is_some());
        assert_eq!((lines.counters.pdbs_read, lines.counters.bodies), (1, 2));
        lines.keep(&HashSet::new());
        assert_eq!(lines.bytes, 0);
    }

    #[test]
    fn a_pdb_inside_its_assembly_is_found() {
        let built = BuiltAssembly::new(&assembly(ID, "Work.pdb", Some(&work(ID))));
        let found = built.first_lines(&mut ManagedLines::default(), 0x0600_0001);
        assert_eq!(found, Some([Some(7), Some(8)]));
    }

    #[test]
    fn lines_take_bounded_memory() {
        let built = BuiltAssembly::new(&assembly(ID, "Work.pdb", Some(&work(ID))));
        let mut lines = ManagedLines::default();
        while lines.counters.refused == 0 {
            built.first_lines(&mut lines, 0x0600_0001);
        }
        assert!(lines.bytes <= MAX_PROCESS_BYTES && lines.bytes > MAX_PROCESS_BYTES / 2);
    }
}
