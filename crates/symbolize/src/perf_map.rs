//! The perf map a runtime writes when it is told to (`DOTNET_PerfMapEnabled`): the fallback where
//! no shim answers.
//!
//! The file lies where the profiled process can write, so it is opened below the process's own root
//! without following links out of it, must be a regular file of root or of the process's user, and
//! is read (never mapped) up to a limit; lines that are not understood are skipped and counted.

use perfusion_host::process::guarded_io::{ForeignFile, IoPeer, wait_for};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Bytes read of one map.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of one line that are looked at.
const MAX_LINE_BYTES: u64 = 16 << 10;
/// Lines kept of one map.
const MAX_LINES: usize = 1_000_000;

/// What happened to perf maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerfMapCounters {
    /// Maps read.
    pub read: u64,
    /// Maps that exist and were not trusted: not a regular file, or of another user.
    pub refused: u64,
    /// Lines skipped.
    pub bad_lines: u64,
    /// Maps longer than the limit, read up to it.
    pub cut: u64,
}

impl PerfMapCounters {
    /// As (name, count).
    #[must_use]
    pub fn list(&self) -> [(&'static str, u64); 4] {
        [
            ("perf_maps_read", self.read),
            ("perf_maps_refused", self.refused),
            ("perf_map_bad_lines", self.bad_lines),
            ("perf_maps_cut", self.cut),
        ]
    }
}

/// One name of a map, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerfMapName {
    /// `Type.Method(parameters)`, without return type and tier.
    pub name: String,
    /// The module, where the line names one.
    pub module: Option<String>,
}

struct PerfMapLine {
    start: u64,
    end: u64,
    name: PerfMapName,
}

/// A map that was read.
pub struct PerfMap {
    /// By start; where two lines cover an address, the later one of the file comes later.
    lines: Vec<PerfMapLine>,
}

impl PerfMap {
    /// The name of the code at `address`.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&PerfMapName> {
        let after = self.lines.partition_point(|line| line.start <= address);
        let line = self.lines.get(after.checked_sub(1)?)?;
        (address < line.end).then_some(&line.name)
    }

    fn read(reader: impl Read, counters: &mut PerfMapCounters) -> Self {
        let mut reader = BufReader::new(reader.take(MAX_BYTES + 1));
        let mut lines = Vec::new();
        let mut bytes_read = 0;
        let mut raw = Vec::new();
        while lines.len() < MAX_LINES {
            raw.clear();
            let got = (&mut reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut raw);
            let Ok(got @ 1..) = got else { break };
            bytes_read += got;
            let whole = raw.last() == Some(&b'\n');
            match whole.then(|| parse(&raw)).flatten() {
                Some(line) => lines.push(line),
                None => counters.bad_lines += 1,
            }
        }
        if lines.len() == MAX_LINES || u64::try_from(bytes_read).is_ok_and(|read| read > MAX_BYTES)
        {
            counters.cut += 1;
        }
        counters.read += 1;
        // Stable: of lines with one start the last one written, which is the newest code, comes
        // last.
        lines.sort_by_key(|line| line.start);
        Self { lines }
    }
}

/// Opens and reads the map of a process, or `None` when there is none that can be trusted.
#[must_use]
pub fn open(pid: u32, counters: &mut PerfMapCounters) -> Option<PerfMap> {
    match wait_for(IoPeer::Process(pid), move || find(pid))?? {
        PerfMapFile::Refused => {
            counters.refused += 1;
            None
        }
        PerfMapFile::File(file) => Some(PerfMap::read(file.reader(), counters)),
    }
}

/// What is where the map of a process should be.
enum PerfMapFile {
    File(ForeignFile),
    Refused,
}

fn find(pid: u32) -> Option<PerfMapFile> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().last()
    };
    let inner_pid: u32 = field("NSpid:")?.parse().ok()?;
    // Uid: real, effective, saved, filesystem.
    let uid: u32 = field("Uid:")?.parse().ok()?;
    let root = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(
        format!("{}/root", perfusion_host::process::in_common(pid)),
        root,
        Mode::empty(),
    )
    .ok()?;
    // O_PATH first: opening a FIFO or a device for reading would already have effects.
    let found = rustix::fs::openat2(
        &root,
        format!("tmp/perf-{inner_pid}.map"),
        OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )
    .ok()?;
    let stat = rustix::fs::fstat(&found).ok()?;
    let trusted = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && (stat.st_uid == 0 || stat.st_uid == uid);
    if !trusted {
        return Some(PerfMapFile::Refused);
    }
    let file = File::open(format!("/proc/self/fd/{}", found.as_raw_fd())).ok()?;
    let same = file.metadata().ok()?;
    if (same.dev(), same.ino()) != (stat.st_dev, stat.st_ino) {
        return Some(PerfMapFile::Refused);
    }
    ForeignFile::opened(file).ok().map(PerfMapFile::File)
}

/// `START SIZE NAME`, the numbers in hexadecimal.
fn parse(raw: &[u8]) -> Option<PerfMapLine> {
    let text = String::from_utf8_lossy(raw);
    let mut fields = text.trim_end().splitn(3, ' ');
    let mut number = || u64::from_str_radix(fields.next()?.trim_start_matches("0x"), 16).ok();
    let (start, len) = (number()?, number()?);
    let end = start.checked_add(len).filter(|end| *end > start)?;
    let name = fields.next().filter(|name| !name.is_empty())?;
    Some(PerfMapLine { start, end, name: split(name) })
}

/// Takes a name apart. The runtime writes `RETURN [MODULE] TYPE::METHOD(PARAMETERS)[TIER]`, the
/// return type with words such as `instance` before it (`PerfMap::LogJITCompiledMethod`,
/// `src/coreclr/vm/perfmap.cpp` of dotnet/runtime).
fn split(name: &str) -> PerfMapName {
    let mut rest = name;
    let mut module = None;
    if let Some(open) = rest.find('[')
        && let Some(close) = rest[open..].find("] ")
        && rest[..open].ends_with(' ')
    {
        module = Some(rest[open + 1..open + close].to_owned());
        rest = &rest[open + close + 2..];
    }
    // The tier, such as [OptimizedTier1] or [PreJIT].
    if rest.ends_with(']')
        && let Some(open) = rest.rfind('[')
        && rest[..open].ends_with(')')
    {
        rest = &rest[..open];
    }
    PerfMapName { name: rest.replace("::", "."), module }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "7f00 100 void [App] App.Orders::Load(int32)[OptimizedTier1]\n\
        not a line\n\
        8000 10 instance class X [System.Private.CoreLib] \
         System.Threading.Thread::StartCallback()[PreJIT]\n\
        8000 20 native_stub\n\
        ffffffffffffffff 10 wraps\n\
        9000 0 empty\n\
        9000 10 cut";

    #[test]
    fn names_are_found_by_range_and_bad_lines_are_counted() {
        let mut counters = PerfMapCounters::default();
        let map = PerfMap::read(MAP.as_bytes(), &mut counters);
        let name =
            |address| map.name(address).map(|name| (name.name.as_str(), name.module.as_deref()));
        assert_eq!(name(0x7fff), Some(("App.Orders.Load(int32)", Some("App"))));
        assert_eq!(name(0x8000), Some(("native_stub", None)), "the later line of the file wins");
        assert_eq!(name(0x8020), None);
        assert_eq!(name(0x7eff), None);
        assert_eq!(
            counters,
            PerfMapCounters { read: 1, bad_lines: 4, ..PerfMapCounters::default() }
        );
    }

    #[test]
    fn the_map_of_this_process_is_read_and_a_link_in_its_place_is_not() {
        let path = format!("/tmp/perf-{}.map", std::process::id());
        std::fs::write(&path, MAP).unwrap();
        let mut counters = PerfMapCounters::default();
        assert!(open(std::process::id(), &mut counters).is_some());
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(open(std::process::id(), &mut counters).is_none());
        std::fs::remove_file(&path).unwrap();
        assert_eq!((counters.read, counters.refused), (1, 1));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(
            bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..400),
        ) {
            let mut counters = PerfMapCounters::default();
            let map = PerfMap::read(&bytes[..], &mut counters);
            proptest::prop_assert!(map.name(0x1000).is_none_or(|name| name.name.len() < 2000));
        }
    }
}
