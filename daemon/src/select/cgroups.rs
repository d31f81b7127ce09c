//! The cgroups of the host: where each is, and its id, by which the probes know it.

use crate::source::kernel::cgroup_mount;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Most cgroups; the probes know no more.
pub const MOST: usize = 16_384;

/// The hierarchy of version 2.
#[derive(Debug)]
pub struct Cgroups {
    mount: Option<PathBuf>,
    /// It was said that there are too many.
    said: bool,
}

impl Default for Cgroups {
    fn default() -> Self {
        Self { mount: cgroup_mount().map(PathBuf::from), said: false }
    }
}

impl Cgroups {
    /// The hierarchy mounted there.
    #[must_use]
    pub fn below(mount: PathBuf) -> Self {
        Self { mount: Some(mount), said: false }
    }

    /// Id and path of each there is now.
    pub fn scan(&mut self) -> Vec<(u64, String)> {
        let (mut found, mut next) = (Vec::new(), vec![PathBuf::from("/")]);
        let Some(mount) = &self.mount else { return found };
        while let Some(path) = next.pop() {
            let place = below(mount, &path);
            // One that was removed meanwhile.
            let Ok(directory) = fs::metadata(&place) else { continue };
            if found.len() >= MOST {
                if !std::mem::replace(&mut self.said, true) {
                    tracing::warn!("more than {MOST} cgroups: rules do not know those beyond");
                }
                break;
            }
            // The id of a cgroup is the inode number of its directory, and a directory has a link more for each below it
            // (kernfs_iop_getattr, fs/kernfs/inode.c): most have none.
            found.push((directory.ino(), path.to_string_lossy().into_owned()));
            if directory.nlink() == 2 {
                continue;
            }
            let entries = fs::read_dir(&place).into_iter().flatten().flatten();
            let directories = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            next.extend(directories.map(|entry| path.join(entry.file_name())));
        }
        found
    }
}

fn below(mount: &Path, path: &Path) -> PathBuf {
    mount.join(path.strip_prefix("/").unwrap_or(path))
}
