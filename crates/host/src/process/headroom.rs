//! How much more memory a process may use before the kernel kills, throttles or swaps it: the
//! tightest of the limits of every cgroup above it, of version 1 and 2, and of the machine.
//!
//! Only files of the kernel are read, so the process has no say in what they hold. A file that is
//! missing sets no limit. Page cache counts as available where the kernel drops it first: pages on
//! the inactive list of files that are neither dirty nor being written. Swap is not counted: an app
//! that is swapped out for our sake is harmed, too.

use crate::process::handle::ProcessHandle;
use crate::process::hierarchy::Hierarchy;
use std::fmt;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Version 1 says a number that no machine has where there is no limit.
const NO_LIMIT: u64 = 1 << 60;
/// Cgroups above a process that are looked at, at most. The kernel's default (`cgroup.max.depth`)
/// has no bound.
const MOST_ANCESTORS: usize = 64;

/// What sets a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Version 1, `memory.limit_in_bytes`.
    Limit,
    /// Version 1, `memory.memsw.limit_in_bytes`: memory and swap together.
    LimitWithSwap,
    /// Version 2, `memory.max`.
    Max,
    /// Version 2, `memory.high`: beyond it the kernel slows the processes down.
    High,
    /// `MemAvailable` of the machine.
    Machine,
}

impl LimitKind {
    /// The file that has the limit.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::Limit => "memory.limit_in_bytes",
            Self::LimitWithSwap => "memory.memsw.limit_in_bytes",
            Self::Max => "memory.max",
            Self::High => "memory.high",
            Self::Machine => "MemAvailable",
        }
    }
}

/// How much more a process may use, and what says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headroom {
    /// So many bytes more.
    pub bytes: u64,
    /// What sets the limit.
    pub kind: LimitKind,
    /// The limit, bytes; all memory of the machine for [`LimitKind::Machine`].
    pub limit: u64,
    /// What is used of it, bytes, page cache included.
    pub used: u64,
    /// Page cache that the kernel gives up first, bytes, which is counted as available.
    pub reclaimable: u64,
    /// The cgroup, as `/proc/PID/cgroup` names it; empty for the machine.
    pub cgroup: PathBuf,
}

impl Headroom {
    fn of(kind: LimitKind, limit: u64, used: u64, reclaimable: u64, cgroup: &Path) -> Self {
        let bytes = limit.saturating_sub(used.saturating_sub(reclaimable));
        Self { bytes, kind, limit, used, reclaimable, cgroup: cgroup.to_owned() }
    }
}

impl fmt::Display for Headroom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, kind, limit, used, reclaimable, cgroup } = self;
        if *kind == LimitKind::Machine {
            return write!(
                f,
                "the machine has {} of {} left (MemAvailable)",
                mib(*bytes),
                mib(*limit)
            );
        }
        write!(
            f,
            "its cgroup {} has {} left ({} is {}, {} are used, {} of these are page cache that can \
             be dropped)",
            cgroup.display(),
            mib(*bytes),
            kind.file(),
            mib(*limit),
            mib(*used),
            mib(*reclaimable)
        )
    }
}

/// `12.3 MiB`.
#[must_use]
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A cgroup above a process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CgroupDirectory {
    is_v1: bool,
    /// Where its files are.
    files: PathBuf,
    /// Its name.
    cgroup: PathBuf,
}

impl CgroupDirectory {
    fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.files.join(name)).ok()
    }

    /// A number; `None` also for `max`.
    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok().filter(|bytes| *bytes < NO_LIMIT)
    }

    /// Bytes of page cache that the kernel drops first.
    fn reclaimable(&self) -> u64 {
        let stat = self.text("memory.stat").unwrap_or_default();
        let value = |name: &str| {
            let found = stat
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
            found.unwrap_or(0_u64)
        };
        // Those of version 1 that begin with total_ are of all cgroups below, as the limit is.
        let [inactive, dirty, writeback] = if self.is_v1 {
            ["total_inactive_file", "total_dirty", "total_writeback"].map(value)
        } else {
            ["inactive_file", "file_dirty", "file_writeback"].map(value)
        };
        inactive.saturating_sub(dirty.saturating_add(writeback))
    }

    fn headrooms(&self) -> Vec<Headroom> {
        let pairs: &[(LimitKind, &str)] = if self.is_v1 {
            &[
                (LimitKind::Limit, "memory.usage_in_bytes"),
                (LimitKind::LimitWithSwap, "memory.memsw.usage_in_bytes"),
            ]
        } else {
            &[(LimitKind::Max, "memory.current"), (LimitKind::High, "memory.current")]
        };
        let limits: Vec<(LimitKind, u64, u64)> = pairs
            .iter()
            .filter_map(|&(kind, usage)| {
                Some((kind, self.number(kind.file())?, self.number(usage)?))
            })
            .collect();
        // Most have no limit, and the kernel sums over all CPUs for its statistics.
        let reclaimable = if limits.is_empty() { 0 } else { self.reclaimable() };
        let headroom =
            |(kind, limit, used)| Headroom::of(kind, limit, used, reclaimable, &self.cgroup);
        limits.into_iter().map(headroom).collect()
    }

    /// How many processes the kernel has killed here for want of memory.
    fn oom_kills(&self) -> Option<u64> {
        let text = self.text(if self.is_v1 { "memory.oom_control" } else { "memory.events" })?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
    }
}

/// The cgroups above a process, its own ones first.
#[derive(Clone, Debug, Default)]
pub struct MemoryCgroups {
    directories: Vec<CgroupDirectory>,
    meminfo: Option<PathBuf>,
}

/// A hierarchy that is mounted.
#[derive(Clone, Debug)]
struct MountedHierarchy {
    /// Where.
    at: PathBuf,
    /// The cgroup that stands there.
    root: PathBuf,
}

impl MemoryCgroups {
    /// Those of a process.
    #[must_use]
    pub fn of(target: &ProcessHandle) -> Self {
        let text = target.cgroup().unwrap_or_default();
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let v2 = Hierarchy::host().and_then(|hierarchy| {
            let cgroup = hierarchy.of(target.pid())?;
            Some((hierarchy.place(Path::new("/")), cgroup))
        });
        Self::from(&text, &v1_mounts(&mounts), v2, PathBuf::from("/proc/meminfo"))
    }

    /// Those of this process, which a program that it starts has too.
    #[must_use]
    pub fn own() -> Self {
        ProcessHandle::open(std::process::id()).map(|me| Self::of(&me)).unwrap_or_default()
    }

    /// `text` is a `/proc/PID/cgroup`; `v2` is where the hierarchy of version 2 is seen whole, and
    /// the process's cgroup in it.
    fn from(
        text: &str,
        v1: &[MountedHierarchy],
        v2: Option<(PathBuf, PathBuf)>,
        meminfo: PathBuf,
    ) -> Self {
        let mut directories = Vec::new();
        let cgroup = text.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            controllers
                .split(',')
                .any(|controller| controller == "memory")
                .then(|| PathBuf::from(path))
        });
        if let Some(cgroup) = cgroup {
            // A container may see its own part at one place and the host's tree at another.
            let seen =
                v1.iter().map(|MountedHierarchy { at, root }| above(true, at, root, &cgroup));
            directories.extend(seen.max_by_key(Vec::len).unwrap_or_default());
        }
        if let Some((at, cgroup)) = v2 {
            directories.extend(above(false, &at, Path::new("/"), &cgroup));
        }
        Self { directories, meminfo: Some(meminfo) }
    }

    /// The tightest limit as it stands now; `None` where nothing is known, not even of the machine.
    #[must_use]
    pub fn headroom(&self) -> Option<Headroom> {
        let machine =
            self.meminfo.as_ref().and_then(|path| machine(&fs::read_to_string(path).ok()?));
        let of_cgroups = self.directories.iter().flat_map(CgroupDirectory::headrooms);
        of_cgroups.chain(machine).min_by_key(|headroom| headroom.bytes)
    }

    /// How many processes the kernel has killed for want of memory, in each of these cgroups.
    #[must_use]
    pub fn oom_kills(&self) -> OomKills {
        OomKills(self.directories.iter().map(CgroupDirectory::oom_kills).collect())
    }

    /// The nearest cgroup that still counts, if the kernel has killed more there since. A kill
    /// elsewhere below one that is farther up is another program's.
    #[must_use]
    pub fn killed_since(&self, before: &OomKills) -> Option<PathBuf> {
        let mut pairs = self.directories.iter().zip(&before.0);
        let (directory, rose) = pairs.find_map(|(directory, before)| {
            let (now, before) = (directory.oom_kills()?, (*before)?);
            Some((directory, now > before))
        })?;
        rose.then(|| directory.cgroup.clone())
    }
}

/// What the kernel had killed in each cgroup.
#[derive(Clone, Debug, Default)]
pub struct OomKills(Vec<Option<u64>>);

/// A cgroup and those above it, as far as they are seen at this mount.
fn above(is_v1: bool, at: &Path, root: &Path, cgroup: &Path) -> Vec<CgroupDirectory> {
    // One outside of what is mounted here, which the kernel writes with `..`, is not seen.
    let Ok(inside) = cgroup.strip_prefix(root) else { return Vec::new() };
    // Nor is one of the host's where the host's tree is not seen: its path means another directory
    // here, or none.
    let is_outside = inside.components().any(|part| matches!(part, Component::ParentDir));
    if is_outside || !at.join(inside).is_dir() {
        return Vec::new();
    }
    let directory = |inside: &Path| CgroupDirectory {
        is_v1,
        files: at.join(inside),
        cgroup: root.join(inside),
    };
    inside.ancestors().take(MOST_ANCESTORS).map(directory).collect()
}

/// Where version 1 of the memory controller is mounted, of a `mountinfo` (proc_pid_mountinfo(5)).
fn v1_mounts(mountinfo: &str) -> Vec<MountedHierarchy> {
    let mounted = |line: &str| {
        let (own, of_type) = line.split_once(" - ")?;
        let mut own = own.split(' ').skip(3);
        let (root, at) = (own.next()?, own.next()?);
        let mut of_type = of_type.split(' ');
        let (kind, _source, options) = (of_type.next()?, of_type.next()?, of_type.next()?);
        let has_memory = options.split(',').any(|option| option == "memory");
        (kind == "cgroup" && has_memory)
            .then(|| MountedHierarchy { at: at.into(), root: root.into() })
    };
    mountinfo.lines().filter_map(mounted).collect()
}

fn machine(meminfo: &str) -> Option<Headroom> {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (total, available) = (bytes("MemTotal:")?, bytes("MemAvailable:")?);
    let used = total.saturating_sub(available);
    Some(Headroom::of(LimitKind::Machine, total, used, 0, Path::new("")))
}

#[cfg(test)]
mod tests {
    use super::{Headroom, LimitKind, MemoryCgroups, MountedHierarchy, mib, v1_mounts};
    use std::fs;
    use std::path::{Path, PathBuf};

    const MIB: u64 = 1 << 20;

    fn write(root: &Path, files: &[(&str, String)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn meminfo(root: &Path, available: u64) -> PathBuf {
        let text = format!(
            "MemTotal:       {} kB\nMemFree:  1 kB\nMemAvailable:   {} kB\n",
            8192 * 1024,
            available * 1024
        );
        write(root, &[("meminfo", text)]);
        root.join("meminfo")
    }

    fn v2(root: &Path, cgroup: &str) -> MemoryCgroups {
        MemoryCgroups::from("0::/x\n", &[], Some((root.into(), cgroup.into())), meminfo(root, 6000))
    }

    #[test]
    fn the_tightest_of_the_limits_above_counts_in_version_2() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let bytes = |mib: u64| format!("{}\n", mib * MIB);
        let stat = |inactive: u64, dirty: u64| {
            format!(
                "anon 1\nfile 5\ninactive_anon 99\ninactive_file {}\nactive_file 77\nfile_dirty \
                 {}\n\
                 file_writeback 0\n",
                inactive * MIB,
                dirty * MIB
            )
        };
        write(
            root,
            &[
                ("kube/memory.max", "max\n".to_owned()),
                ("kube/memory.current", bytes(3000)),
                ("kube/memory.stat", stat(500, 0)),
                ("kube/pod/memory.max", bytes(512)),
                ("kube/pod/memory.high", "max\n".to_owned()),
                ("kube/pod/memory.current", bytes(500)),
                ("kube/pod/memory.stat", stat(60, 10)),
                ("kube/pod/app/memory.max", bytes(512)),
                ("kube/pod/app/memory.current", bytes(400)),
                ("kube/pod/app/memory.stat", stat(0, 0)),
                ("slice/memory.max", bytes(1000)),
                ("slice/memory.high", bytes(320)),
                ("slice/memory.current", bytes(310)),
                ("high/memory.high", bytes(100)),
                ("high/memory.current", bytes(150)),
            ],
        );
        let found = v2(root, "/kube/pod/app").headroom().unwrap();
        let expected = Headroom {
            bytes: 62 * MIB,
            kind: LimitKind::Max,
            limit: 512 * MIB,
            used: 500 * MIB,
            reclaimable: 50 * MIB,
            cgroup: "/kube/pod".into(),
        };
        assert_eq!(found, expected, "dirty pages are not dropped at once");
        let throttled = v2(root, "/slice").headroom().unwrap();
        assert_eq!((throttled.bytes, throttled.kind), (10 * MIB, LimitKind::High));
        assert_eq!(
            v2(root, "/high").headroom().unwrap().bytes,
            0,
            "more is used than there should be"
        );
        let machine = v2(root, "/nothing").headroom().unwrap();
        assert_eq!((machine.bytes, machine.kind), (6000 * MIB, LimitKind::Machine));
    }

    #[test]
    fn version_1_counts_swap_limits_and_what_is_below() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let bytes = |mib: u64| format!("{}\n", mib * MIB);
        let files = |at: &str, limit: u64, used: u64, with_swap: u64| {
            let name = |file: &str| format!("{at}{file}");
            let limit = if limit == 0 { "9223372036854771712\n".to_owned() } else { bytes(limit) };
            [
                (name("memory.limit_in_bytes"), limit),
                (name("memory.usage_in_bytes"), bytes(used)),
                (name("memory.memsw.limit_in_bytes"), bytes(with_swap)),
                (name("memory.memsw.usage_in_bytes"), bytes(used + 5)),
                (
                    name("memory.stat"),
                    format!("inactive_file 1\ntotal_inactive_file {}\ntotal_dirty 0\n", 8 * MIB),
                ),
            ]
        };
        for (name, text) in [files("", 0, 6000, 9000), files("docker/", 400, 380, 390)].concat() {
            write(root, &[(&name, text)]);
        }
        let of = |text: &str, root_of_mount: &str| {
            let mount = MountedHierarchy { at: root.into(), root: root_of_mount.into() };
            // Another one of the same hierarchy, which shows less.
            let less = MountedHierarchy { at: root.join("docker"), root: "/elsewhere".into() };
            MemoryCgroups::from(text, &[less, mount], None, meminfo(root, 7000)).headroom().unwrap()
        };
        let found = of("9:name=systemd:/\n4:cpuset,memory:/docker\n0::/\n", "/");
        assert_eq!((found.bytes, found.kind), (13 * MIB, LimitKind::LimitWithSwap));
        assert_eq!(found.cgroup, Path::new("/docker"));
        // A container that sees its own part of the tree.
        let inside = of("4:memory:/kube/docker\n", "/kube");
        assert_eq!((inside.bytes, inside.cgroup.as_path()), (13 * MIB, Path::new("/kube/docker")));
        let outside = of("4:memory:/../other\n", "/");
        assert_eq!(outside.kind, LimitKind::Machine);
        let unseen = of("4:memory:/host/pod\n", "/");
        assert_eq!(unseen.kind, LimitKind::Machine, "the root's limits seen here may be another's");
    }

    #[test]
    fn a_host_with_both_versions_has_the_limits_of_both() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let bytes = |mib: u64| format!("{}\n", mib * MIB);
        write(
            root,
            &[
                ("v1/a/memory.limit_in_bytes", bytes(100)),
                ("v1/a/memory.usage_in_bytes", bytes(90)),
                ("v2/b/memory.max", bytes(100)),
                ("v2/b/memory.current", bytes(95)),
            ],
        );
        let mount = MountedHierarchy { at: root.join("v1"), root: "/".into() };
        let v2 = Some((root.join("v2"), PathBuf::from("/b")));
        let cgroups = MemoryCgroups::from("4:memory:/a\n", &[mount], v2, meminfo(root, 900));
        let found = cgroups.headroom().unwrap();
        assert_eq!((found.bytes, found.kind, found.cgroup), (5 * MIB, LimitKind::Max, "/b".into()));
    }

    #[test]
    fn kills_are_those_of_the_nearest_cgroup_that_still_says() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let events = |kills: u32| format!("low 0\nhigh 3\nmax 9\noom 1\noom_kill {kills}\n");
        write(root, &[("s/memory.events", events(4)), ("s/app/memory.events", events(1))]);
        let cgroups = v2(root, "/s/app");
        let before = cgroups.oom_kills();
        assert_eq!(cgroups.killed_since(&before), None);
        write(root, &[("s/memory.events", events(5))]);
        assert_eq!(cgroups.killed_since(&before), None, "a neighbour was killed");
        write(root, &[("s/app/memory.events", events(2)), ("s/memory.events", events(6))]);
        assert_eq!(cgroups.killed_since(&before), Some("/s/app".into()));
        fs::remove_dir_all(root.join("s/app")).unwrap();
        assert_eq!(
            cgroups.killed_since(&before),
            Some("/s".into()),
            "it is gone with what was in it"
        );
    }

    #[test]
    fn the_mount_of_version_1_is_that_with_memory() {
        let text = "32 24 0:28 / /sys/fs/cgroup/cpu rw shared:5 - cgroup cgroup rw,cpu\n\
             33 24 0:29 /docker/1 /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n\
             34 24 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = v1_mounts(text);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].at.as_path(), found[0].root.as_path()),
            (Path::new("/sys/fs/cgroup/memory"), Path::new("/docker/1"))
        );
        assert!(
            v1_mounts("34 24 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,memory\n").is_empty()
        );
    }

    #[test]
    fn what_is_said_has_the_figures_and_the_limit() {
        let headroom =
            Headroom::of(LimitKind::Max, 400 * MIB, 390 * MIB, 2 * MIB, Path::new("/a/b"));
        let said = headroom.to_string();
        for part in
            ["/a/b", "12.0 MiB left", "memory.max is 400.0 MiB", "390.0 MiB", "2.0 MiB of these"]
        {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(mib(MIB / 2), "0.5 MiB");
    }
}
