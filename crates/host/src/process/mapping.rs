//! The executable mappings of one process: what each is, and which one an address is in. Text of
//! `/proc/PID/maps` is parsed here; nothing is opened.

use perfusion_model::event::Mmap;
use std::ops::Range;
use std::sync::Arc;

/// Most executable mappings kept of one process: a runtime with write-xor-execute has a few
/// thousand.
pub(crate) const MAX_MAPPINGS: usize = 16_384;

/// Most memory the mappings of one process take, bytes.
pub(crate) const MAX_MAPPING_BYTES: usize = 4 << 20;

/// A mapped file by its device (major, minor) and inode, as the mapping states them.
pub type FileKey = ((u32, u32), u64);

/// What an executable mapping holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MappingKind {
    /// Part of a file: native code or a ReadyToRun image; the file's first bytes say which.
    File,
    /// Memory a JIT writes code to: the CLR's `/memfd:doublemapper`
    /// (src/coreclr/minipal/Unix/doublemapping.cpp), or anonymous.
    Jit {
        /// True for the CLR's own.
        doublemapped: bool,
    },
    /// The kernel's vDSO.
    Vdso,
    /// Anything else (vsyscall, shared memory, devices).
    Other,
}

/// One executable mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses in the process.
    pub range: Range<u64>,
    /// Offset of its first byte in the file, bytes.
    pub file_offset: u64,
    /// Device (major, minor) of the file.
    pub device: (u32, u32),
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path as the process's mount namespace shows it.
    pub path: Arc<str>,
    /// What it holds.
    pub region: MappingKind,
}

impl Mapping {
    /// The mapping a record describes; `None` when its range is empty or wraps.
    #[must_use]
    pub fn new(mmap: &Mmap) -> Option<Self> {
        let end = mmap.start.checked_add(mmap.len).filter(|&end| end > mmap.start)?;
        let doublemapped = mmap.path.starts_with("/memfd:doublemapper");
        let region = if mmap.path == "[vdso]" {
            MappingKind::Vdso
        } else if doublemapped || is_anonymous(mmap) {
            MappingKind::Jit { doublemapped }
        } else if mmap.inode != 0 && mmap.path.starts_with('/') {
            MappingKind::File
        } else {
            MappingKind::Other
        };
        Some(Self {
            range: mmap.start..end,
            file_offset: mmap.file_offset,
            device: mmap.device,
            inode: mmap.inode,
            path: mmap.path.as_str().into(),
            region,
        })
    }

    /// Its file.
    #[must_use]
    pub fn file(&self) -> FileKey {
        (self.device, self.inode)
    }

    /// Memory it takes, the path included, which others may have as well.
    fn held_bytes(&self) -> usize {
        size_of::<Self>() + self.path.len()
    }

    /// Offset in the file of what is at `address`, which the mapping covers.
    #[must_use]
    pub(crate) fn file_offset_of(&self, address: u64) -> u64 {
        address.wrapping_sub(self.range.start).wrapping_add(self.file_offset)
    }

    /// True when `self` is `other` grown, shrunk or seen again: the same bytes at the same
    /// addresses where both are.
    fn continues(&self, other: &Self) -> bool {
        self.region == other.region
            && (self.device, self.inode) == (other.device, other.inode)
            && self.range.start.wrapping_sub(self.file_offset)
                == other.range.start.wrapping_sub(other.file_offset)
            && self.path == other.path
            && self.inode != 0
    }
}

fn is_anonymous(mmap: &Mmap) -> bool {
    mmap.inode == 0
        && (mmap.path.is_empty()
            || mmap.path == "//anon"
            || mmap.path.starts_with("[anon:")
            || mmap.path == "[heap]"
            || mmap.path == "[stack]")
}

/// What an insertion did to code that was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// Nothing was there, or the same file at the same place.
    Nothing,
    /// Anonymous or JIT memory lies over JIT memory: it may be the old memory with new protections,
    /// or new.
    Perhaps,
    /// Other code was there.
    Certainly,
    /// The table is full: the mapping was not taken.
    Refused,
}

/// All executable mappings of a process, sorted, without overlaps.
#[derive(Clone, Debug, Default)]
pub struct Mappings {
    sorted: Vec<Mapping>,
    held_bytes: usize,
}

impl Mappings {
    /// The mapping that covers `address`.
    #[must_use]
    pub fn find(&self, address: u64) -> Option<&Mapping> {
        let after = self.sorted.partition_point(|m| m.range.start <= address);
        self.sorted.get(after.checked_sub(1)?).filter(|m| address < m.range.end)
    }

    /// All mappings by address.
    pub fn iter(&self) -> impl Iterator<Item = &Mapping> {
        self.sorted.iter()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// True when there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// Memory they take.
    #[must_use]
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// The parts of `range` that none covers.
    #[must_use]
    pub fn uncovered(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let from = self.sorted.partition_point(|m| m.range.end <= range.start);
        let (mut parts, mut at) = (Vec::new(), range.start);
        for covered in self.sorted.iter().skip(from).take_while(|m| m.range.start < range.end) {
            if at < covered.range.start {
                parts.push(at..covered.range.start);
            }
            at = covered.range.end;
        }
        if at < range.end {
            parts.push(at..range.end);
        }
        parts
    }

    /// True when `seen`, read from /proc, says nothing new.
    #[must_use]
    pub fn has(&self, seen: &Mapping) -> bool {
        self.find(seen.range.start).is_some_and(|known| {
            // Path and offset of anonymous memory are written differently by perf and by /proc.
            let same = known.inode == 0 && seen.inode == 0 || known.continues(seen);
            known.range == seen.range && known.region == seen.region && same
        })
    }

    /// `range` and all of the mappings that it meets.
    pub fn met(&self, range: &Range<u64>) -> Range<u64> {
        let from = self.sorted.partition_point(|m| m.range.end <= range.start);
        let met = self.sorted.iter().skip(from).take_while(|m| m.range.start < range.end);
        met.fold(range.clone(), |all, m| all.start.min(m.range.start)..all.end.max(m.range.end))
    }

    /// Puts `new` in place of whatever was in its range; all that it meets is gone when there is no
    /// room.
    pub fn insert(&mut self, new: Mapping) -> Replaced {
        let from = self.sorted.partition_point(|m| m.range.end <= new.range.start);
        let to = self.sorted.partition_point(|m| m.range.start < new.range.end).max(from);
        // At most it cuts one in two.
        let full = self.sorted.len() + 2 > MAX_MAPPINGS + (to - from)
            || self.held_bytes + 2 * new.held_bytes() > MAX_MAPPING_BYTES;
        if full {
            // What was there is there no more: no mapping rather than the wrong one. What sticks
            // out goes, too, which takes no room.
            let gone = self.sorted.drain(from..to).map(|old| old.held_bytes()).sum::<usize>();
            self.held_bytes -= gone;
            return Replaced::Refused;
        }
        let over = self.sorted.get(from..to).unwrap_or_default();
        let replaced = if over.iter().all(|old| new.continues(old)) {
            Replaced::Nothing
        } else if over.iter().all(|old| {
            matches!(new.region, MappingKind::Jit { .. })
                && matches!(old.region, MappingKind::Jit { .. })
                || new.continues(old)
        }) {
            Replaced::Perhaps
        } else {
            Replaced::Certainly
        };
        // The parts of old mappings that stick out on either side stay.
        let below = over.first().filter(|old| old.range.start < new.range.start).map(|old| {
            let mut part = old.clone();
            part.range.end = new.range.start;
            part
        });
        let above = over.last().filter(|old| old.range.end > new.range.end).map(|old| {
            let mut part = old.clone();
            part.file_offset = old.file_offset_of(new.range.end);
            part.range.start = new.range.end;
            part
        });
        let parts = || below.iter().chain([&new]).chain(&above);
        let gone: usize = over.iter().map(Mapping::held_bytes).sum();
        self.held_bytes = self.held_bytes + parts().map(Mapping::held_bytes).sum::<usize>() - gone;
        self.sorted.splice(from..to, below.into_iter().chain([new]).chain(above));
        replaced
    }
}

/// One line of `/proc/PID/maps`, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapsFields<'a> {
    /// Addresses.
    pub range: Range<u64>,
    /// True when it can be executed.
    pub executable: bool,
    /// Offset of its first byte in the file, bytes.
    pub file_offset: u64,
    /// Device (major, minor) of the file.
    pub device: (u32, u32),
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path as the kernel prints it, escapes and ` (deleted)` included.
    pub path: &'a str,
}

/// Parses one line of `/proc/PID/maps`; `None` when it is malformed or empty.
#[must_use]
pub fn parse_fields(line: &str) -> Option<MapsFields<'_>> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let executable = fields.next()?.as_bytes().get(2) == Some(&b'x');
    let file_offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = fields.next()?.parse().ok()?;
    let path = fields.next().unwrap_or("").trim_start_matches(' ');
    (start < end).then_some(MapsFields {
        range: start..end,
        executable,
        file_offset,
        device,
        inode,
        path,
    })
}

/// The range of a mapping whose pages come from no file system: nothing else has device 0:0, and
/// `shared` is where the kernel keeps memfds. Never by name: a file may be called anything.
#[must_use]
pub fn anonymous_range(fields: &MapsFields<'_>, shared: (u32, u32)) -> Option<Range<u64>> {
    let anonymous = fields.device == (0, 0) && fields.inode == 0;
    // The kernel's own, which a read by others cannot reach or need not.
    let special = fields.path.starts_with("[vvar") || fields.path == "[vsyscall]";
    (anonymous && !special || fields.device == shared).then(|| fields.range.clone())
}

/// Parses one line of `/proc/PID/maps`; `None` when it is malformed or the mapping is not
/// executable.
#[must_use]
pub fn parse_maps_line(pid: u32, line: &str) -> Option<Mmap> {
    let MapsFields { range, file_offset, device, inode, path, .. } =
        parse_fields(line).filter(|fields| fields.executable)?;
    // The kernel pads before the path, and writes a newline in it as \012 (fs/proc/task_mmu.c,
    // `show_map_vma`).
    let path = path.replace("\\012", "\n");
    Some(Mmap {
        pid,
        start: range.start,
        len: range.end - range.start,
        file_offset,
        device,
        inode,
        path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop, proptest};

    fn mapping(start: u64, len: u64, inode: u64) -> Mapping {
        let path = if inode == 0 { String::new() } else { format!("/lib/{inode}.so") };
        Mapping::new(&Mmap { pid: 1, start, len, file_offset: 0x1000, device: (8, 1), inode, path })
            .unwrap()
    }

    fn ranges(mappings: &Mappings) -> Vec<(u64, u64, u64)> {
        mappings.iter().map(|m| (m.range.start, m.range.end, m.inode)).collect()
    }

    #[test]
    fn a_line_of_maps_is_read_and_data_is_skipped() {
        let line = "7f10a000-7f10c000 r-xp 00001000 fd:01 1234                       /usr/lib/a \
             b.so (deleted)";
        let mmap = parse_maps_line(7, line).unwrap();
        assert_eq!((mmap.start, mmap.len, mmap.file_offset), (0x7f10_a000, 0x2000, 0x1000));
        assert_eq!(
            (mmap.device, mmap.inode, mmap.path.as_str()),
            ((0xfd, 1), 1234, "/usr/lib/a b.so (deleted)")
        );
        assert_eq!(parse_maps_line(7, &line.replace("r-xp", "rw-p")), None);
        assert_eq!(parse_maps_line(7, "7ffd-7fff r-xp 00000000 00:00 0").unwrap().path, "");
    }

    #[test]
    fn memory_without_a_file_is_told_by_its_device_and_not_by_its_name() {
        let safe = |rest: &str| {
            let line = format!("1000-3000 rw-p 00000000 {rest}");
            anonymous_range(&parse_fields(&line).unwrap(), (0, 1)).is_some()
        };
        assert!(safe("00:00 0") && safe("00:00 0     [heap]") && safe("00:00 0     [vdso]"));
        assert!(safe("00:01 77     /memfd:doublemapper (deleted)"));
        assert!(!safe("00:2f 77     /memfd:doublemapper (deleted)"), "a FUSE file with that name");
        assert!(!safe("00:2f 0     [heap]"));
        assert!(!safe("00:00 0     [vvar]"));
    }

    #[test]
    fn regions_are_told_apart() {
        let region = |path: &str, inode| {
            let mmap = Mmap {
                pid: 1,
                start: 0x1000,
                len: 16,
                file_offset: 0,
                device: (0, 1),
                inode,
                path: path.into(),
            };
            Mapping::new(&mmap).unwrap().region
        };
        assert_eq!(
            region("/memfd:doublemapper (deleted)", 9),
            MappingKind::Jit { doublemapped: true }
        );
        assert_eq!(region("//anon", 0), MappingKind::Jit { doublemapped: false });
        assert_eq!(region("[vdso]", 0), MappingKind::Vdso);
        assert_eq!(region("/lib/libc.so.6", 3), MappingKind::File);
        assert_eq!(region("[vsyscall]", 0), MappingKind::Other);
    }

    #[test]
    fn a_new_mapping_cuts_a_hole_in_an_old_one() {
        let mut mappings = Mappings::default();
        mappings.insert(mapping(0x1_0000, 0x1_0000, 1));
        assert_eq!(mappings.insert(mapping(0x1_4000, 0x1000, 2)), Replaced::Certainly);
        assert_eq!(
            ranges(&mappings),
            [(0x1_0000, 0x1_4000, 1), (0x1_4000, 0x1_5000, 2), (0x1_5000, 0x2_0000, 1)]
        );
        assert_eq!(mappings.find(0x1_5000).unwrap().file_offset, 0x6000);
        assert_eq!(mappings.find(0x2_0000), None);
    }

    #[test]
    fn the_same_file_at_the_same_place_replaces_nothing() {
        let mut mappings = Mappings::default();
        mappings.insert(mapping(0x1_0000, 0x1000, 1));
        assert_eq!(mappings.insert(mapping(0x1_0000, 0x2000, 1)), Replaced::Nothing);
        assert_eq!(mappings.insert(mapping(0x1_0000, 0x2000, 0)), Replaced::Certainly);
        assert_eq!(mappings.insert(mapping(0x1_0000, 0x3000, 0)), Replaced::Perhaps);
        assert!(mappings.has(&mapping(0x1_0000, 0x3000, 0)));
        assert!(
            !mappings.has(&mapping(0x1_0000, 0x2000, 0))
                && !mappings.has(&mapping(0x1_0000, 0x3000, 1))
        );
    }

    #[test]
    fn what_no_mapping_covers_is_told() {
        let mut mappings = Mappings::default();
        mappings.insert(mapping(0x2000, 0x1000, 1));
        mappings.insert(mapping(0x4000, 0x1000, 2));
        assert_eq!(
            mappings.uncovered(&(0x1000..0x6000)),
            [0x1000..0x2000, 0x3000..0x4000, 0x5000..0x6000]
        );
        assert_eq!(mappings.uncovered(&(0x2800..0x3000)), []);
        assert_eq!(mappings.uncovered(&(0x3800..0x5800)), [0x3800..0x4000, 0x5000..0x5800]);
    }

    #[test]
    fn the_memory_of_mappings_is_bounded() {
        let mut mappings = Mappings::default();
        let long = "x".repeat(4000);
        for i in 0..4000 {
            let path = format!("/{i}{long}");
            mappings
                .insert(Mapping { path: path.as_str().into(), ..mapping(i * 0x2000, 0x1000, 1) });
        }
        assert!(mappings.len() < 1100 && mappings.held_bytes() <= MAX_MAPPING_BYTES);
    }

    #[test]
    fn what_finds_no_room_leaves_nothing_wrong_in_its_place() {
        let mut mappings = Mappings::default();
        let mut at = |n: u64| mappings.insert(mapping(n * 0x3000, 0x2000, n + 1));
        assert_eq!(
            (0..).map(&mut at).take_while(|done| *done != Replaced::Refused).count(),
            MAX_MAPPINGS - 1
        );
        assert_eq!(mappings.met(&(0x3000..0x4000)), 0x3000..0x5000);
        let two = mapping(0x4000, 0x3000, 9);
        assert_eq!(mappings.insert(two), Replaced::Certainly, "in place of two there is room");
        let inside = mapping(0x9800, 0x100, 9);
        assert_eq!(mappings.insert(inside), Replaced::Refused);
        assert!(mappings.find(0x9000).is_none() && mappings.find(0x9880).is_none());
    }

    #[test]
    fn the_number_of_mappings_is_bounded() {
        let mut mappings = Mappings::default();
        for i in 0..u64::try_from(MAX_MAPPINGS).unwrap() + 10 {
            mappings.insert(mapping(i * 0x2000, 0x1000, 1));
        }
        assert!(mappings.iter().count() <= MAX_MAPPINGS);
    }

    proptest! {
        #[test]
        fn random_lines_end_in_an_answer(line in ".*") {
            std::hint::black_box(parse_maps_line(1, &line));
        }

        #[test]
        fn mappings_stay_sorted_and_apart(
            all in prop::collection::vec((0u64..64, 1u64..16, 0u64..4), 1..40),
            probe in any::<u64>(),
        ) {
            let mut mappings = Mappings::default();
            for (start, len, inode) in all {
                mappings.insert(mapping(start << 12, len << 12, inode));
                assert_eq!(mappings.find(start << 12).unwrap().inode, inode);
            }
            let sorted = ranges(&mappings);
            assert!(sorted.windows(2).all(|w| w[0].1 <= w[1].0));
            let held = mappings.iter().map(Mapping::held_bytes).sum::<usize>();
            assert_eq!(mappings.held_bytes(), held);
            std::hint::black_box(mappings.find(probe));
        }
    }
}
