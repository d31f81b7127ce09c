//! Where cgroups are: the hierarchy of version 2, seen whole. A container has a cgroup namespace of
//! its own by default (cgroup_namespaces(7)): its mount shows what is below its own cgroup only,
//! and the paths in `/proc/PID/cgroup` go up from there. So the mount is that of a process outside,
//! which has all of it, and where we are in it is found by the number of our own directory.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

/// Directories looked at for our own, at most.
const MOST: usize = 65_536;
/// Number of the directory at the top (cgroup_setup_root, kernel/cgroup/cgroup.c, warns of any
/// other).
const TOP: u64 = 1;
/// Processes that are tried for their mount, at most. The first one has it, as a rule.
const MOST_TRIED: usize = 256;

/// The hierarchy of version 2.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    /// Where all of it is.
    mount: PathBuf,
    /// What paths in `/proc/PID/cgroup` begin at.
    root: PathBuf,
}

impl Hierarchy {
    /// The host's, as far as it can be seen; looked for once.
    #[must_use]
    pub fn host() -> Option<&'static Self> {
        static HOST: OnceLock<Option<Hierarchy>> = OnceLock::new();
        HOST.get_or_init(Self::find).as_ref()
    }

    fn find() -> Option<Self> {
        let own = mounted("/proc/self/mounts")?;
        let number = fs::metadata(&own).ok()?.ino();
        if number == TOP {
            return Some(Self::whole(own));
        }
        let whole = processes().find_map(|pid| {
            let mount = mounted(&format!("/proc/{pid}/mounts"))?;
            let mount = Path::new(&format!("/proc/{pid}/root"))
                .join(mount.strip_prefix("/").unwrap_or(&mount));
            (fs::metadata(&mount).ok()?.ino() == TOP).then_some(mount)
        });
        let found = whole.and_then(|mount| Some(Self { root: below(&mount, number)?, mount }));
        if found.is_none() {
            tracing::warn!(
                "the host's cgroups cannot be seen: rules know those of this container only"
            );
        }
        Some(found.unwrap_or_else(|| Self::whole(own)))
    }

    /// Mounted there, and seen from its top.
    #[must_use]
    pub fn whole(mount: PathBuf) -> Self {
        Self { mount, root: PathBuf::from("/") }
    }

    /// The directory of a cgroup.
    #[must_use]
    pub fn place(&self, cgroup: &Path) -> PathBuf {
        self.mount.join(cgroup.strip_prefix("/").unwrap_or(cgroup))
    }

    /// The cgroup of a process, from the top of the hierarchy.
    #[must_use]
    pub fn of(&self, tgid: u32) -> Option<PathBuf> {
        Some(resolved(&self.root, &path_in(&format!("/proc/{tgid}/cgroup"))?))
    }

    /// The id of a cgroup: the inode number of its directory.
    #[must_use]
    pub fn id(&self, cgroup: &Path) -> Option<u64> {
        fs::metadata(self.place(cgroup)).ok().map(|directory| directory.ino())
    }
}

/// Tells which processes are in the cgroup v2 directory with a given id.
pub struct CgroupFilter {
    id: u64,
    hierarchy: Option<&'static Hierarchy>,
    known: HashMap<PathBuf, bool>,
}

impl CgroupFilter {
    /// Of the directory whose cgroup has this `id`.
    #[must_use]
    pub fn new(id: u64) -> Self {
        Self { id, hierarchy: Hierarchy::host(), known: HashMap::new() }
    }

    /// Whether `tgid` is in it.
    pub fn holds(&mut self, tgid: u32) -> bool {
        let (id, Some(hierarchy)) = (self.id, self.hierarchy) else { return false };
        let Some(path) = hierarchy.of(tgid) else { return false };
        *self.known.entry(path).or_insert_with_key(|path| hierarchy.id(path) == Some(id))
    }
}

/// Some processes, the oldest first.
fn processes() -> impl Iterator<Item = u32> {
    let mut pids = super::seed::numbers("/proc");
    pids.sort_unstable();
    pids.into_iter().take(MOST_TRIED)
}

/// What a file like `/proc/PID/cgroup` says of version 2.
fn path_in(file: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

fn mounted(file: &str) -> Option<PathBuf> {
    mount_point(&fs::read_to_string(file).ok()?).map(PathBuf::from)
}

/// Where version 2 is mounted: `/sys/fs/cgroup`, or below it on hosts that also have version 1.
fn mount_point(mounts: &str) -> Option<&str> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (place, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then_some(place)
    })
}

/// `path`, which begins at `root` and may go up from there.
fn resolved(root: &Path, path: &str) -> PathBuf {
    let mut resolved = root.to_owned();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(resolved.pop()),
            Component::Normal(name) => resolved.push(name),
            Component::Prefix(_) | Component::RootDir | Component::CurDir => {}
        }
    }
    resolved
}

/// The path below `mount` of the directory with this number.
fn below(mount: &Path, number: u64) -> Option<PathBuf> {
    let (mut next, mut looked) = (vec![PathBuf::from("/")], 0);
    while let Some(path) = next.pop() {
        let place = mount.join(path.strip_prefix("/").unwrap_or(&path));
        let Ok(directory) = fs::metadata(&place) else { continue };
        if directory.ino() == number {
            return Some(path);
        }
        looked += 1;
        if looked > MOST {
            return None;
        }
        let entries = fs::read_dir(&place).into_iter().flatten().flatten();
        let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        next.extend(directories.map(|entry| path.join(entry.file_name())));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{below, mount_point, resolved};
    use std::os::unix::fs::MetadataExt as _;
    use std::path::{Path, PathBuf};

    #[test]
    fn the_cgroup_hierarchy_is_found_beside_version_1() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\ncgroup2 /sys/fs/cgroup/unified \
             cgroup2 rw 0 0\n";
        assert_eq!(mount_point(mounts), Some("/sys/fs/cgroup/unified"));
        assert_eq!(mount_point("proc /proc proc rw 0 0"), None);
    }

    #[test]
    fn paths_that_go_up_from_our_own_cgroup_are_the_hosts() {
        let own = Path::new("/kubepods.slice/pod1.slice/c.scope");
        for (path, whole) in [
            ("/", "/kubepods.slice/pod1.slice/c.scope"),
            ("/../../pod2.slice/d.scope", "/kubepods.slice/pod2.slice/d.scope"),
            ("/../../../init.scope", "/init.scope"),
            ("/../../../../../x", "/x"),
        ] {
            assert_eq!(resolved(own, path), PathBuf::from(whole), "{path}");
        }
        assert_eq!(resolved(Path::new("/"), "/a/b"), PathBuf::from("/a/b"));
    }

    #[test]
    fn our_own_cgroup_is_found_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("a/b/c")).unwrap();
        std::fs::create_dir_all(folder.path().join("a/d")).unwrap();
        let number = folder.path().join("a/b").metadata().unwrap().ino();
        assert_eq!(below(folder.path(), number), Some(PathBuf::from("/a/b")));
        assert_eq!(below(folder.path(), 0), None);
    }
}
