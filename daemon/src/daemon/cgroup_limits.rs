//! What the cgroup of this process allows it: CPU time and memory. A limit of a cgroup above counts
//! as well.

use std::fs;
use std::path::{Path, PathBuf};

/// Where cgroup hierarchies are mounted (file-hierarchy(7)); in a container, too.
const ROOT: &str = "/sys/fs/cgroup";
/// Without a limit version 1 says a number that no machine has.
const NO_LIMIT: u64 = 1 << 60;

/// The limits; absent where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CgroupLimits {
    /// CPUs.
    pub cpus: Option<f64>,
    /// Bytes: beyond them its processes are ended, or throttled (`memory.high`; a user's
    /// `MemoryHigh=`), which for a daemon is no better.
    pub memory: Option<u64>,
}

impl CgroupLimits {
    /// Of this process.
    #[must_use]
    pub fn read() -> Self {
        Self::of(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), Path::new(ROOT))
    }

    /// Of the process whose `/proc/PID/cgroup` is `cgroup`, with hierarchies mounted below `root`.
    fn of(cgroup: &str, root: &Path) -> Self {
        let mut limits = Self::default();
        for line in cgroup.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let has = |name| controllers.split(',').any(|controller| controller == name);
            // On hosts with both versions the second has a folder of its own.
            let unified = ["", "unified"].map(|folder| root.join(folder));
            let mut hierarchies: Vec<PathBuf> = Vec::new();
            match controllers {
                "" => hierarchies.extend(unified),
                _ if has("cpu") => hierarchies.push(root.join("cpu")),
                _ if has("memory") => hierarchies.push(root.join("memory")),
                _ => {}
            }
            for hierarchy in hierarchies {
                // A container that sees only its own part of the tree finds that part at the root.
                for ancestor in Path::new(path.trim_start_matches('/')).ancestors() {
                    limits.take(&hierarchy.join(ancestor));
                }
            }
        }
        limits
    }

    /// The limits of one directory.
    fn take(&mut self, directory: &Path) {
        let text = |name: &str| fs::read_to_string(directory.join(name)).unwrap_or_default();
        let number = |name: &str| text(name).trim().parse::<u64>().ok();
        let quota = |quota: u64, period: u64| quota as f64 / period.max(1) as f64;
        let two = text("cpu.max");
        let two = two
            .trim()
            .split_once(' ')
            .and_then(|(q, p)| Some(quota(q.parse().ok()?, p.parse().ok()?)));
        // Without a limit the quota of version 1 is -1, which is no u64.
        let one = || Some(quota(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?));
        if let Some(cpus) = two.or_else(one) {
            self.cpus = Some(self.cpus.map_or(cpus, |known| known.min(cpus)));
        }
        let limits = ["memory.max", "memory.high", "memory.limit_in_bytes"];
        for bytes in limits.into_iter().filter_map(number).filter(|bytes| *bytes < NO_LIMIT) {
            self.memory = Some(self.memory.map_or(bytes, |known| known.min(bytes)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CgroupLimits;
    use std::fs;
    use std::path::Path;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_least_limit_on_the_way_to_the_root_counts() {
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            &[
                ("kubepods/cpu.max", "400000 100000\n"),
                ("kubepods/memory.max", "max\n"),
                ("kubepods/pod1/cpu.max", "max 100000\n"),
                ("kubepods/pod1/memory.max", "402653184\n"),
                ("kubepods/pod1/c/memory.max", "536870912\n"),
                ("kubepods/pod1/c/memory.high", "max\n"),
                ("system.slice/perfusion.service/memory.max", "536870912\n"),
                ("system.slice/perfusion.service/memory.high", "268435456\n"),
                ("other/memory.max", "1\n"),
            ],
        );
        let found = CgroupLimits::of("0::/kubepods/pod1/c\n", folder.path());
        assert_eq!(found, CgroupLimits { cpus: Some(4.0), memory: Some(384 << 20) });
        let throttled = CgroupLimits::of("0::/system.slice/perfusion.service\n", folder.path());
        assert_eq!(throttled.memory, Some(256 << 20));
        assert_eq!(CgroupLimits::of("0::/\n", folder.path()), CgroupLimits::default());
        assert_eq!(CgroupLimits::of("nonsense", folder.path()), CgroupLimits::default());
    }

    #[test]
    fn a_container_finds_its_limits_at_the_root_and_version_1_has_its_own_names() {
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            &[
                ("cpu/cpu.cfs_quota_us", "50000\n"),
                ("cpu/cpu.cfs_period_us", "100000\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
                ("memory/docker/1/memory.limit_in_bytes", "268435456\n"),
            ],
        );
        let found =
            CgroupLimits::of("4:cpu,cpuacct:/docker/1\n3:memory:/docker/1\n", folder.path());
        assert_eq!(found, CgroupLimits { cpus: Some(0.5), memory: Some(256 << 20) });
        let none =
            CgroupLimits::of("4:cpu,cpuacct:/x\n3:memory:/x\n", &folder.path().join("nothing"));
        assert_eq!(none, CgroupLimits::default());
    }
}
