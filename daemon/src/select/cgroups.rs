//! The cgroups of the host: where each is, and its id, by which the probes know it.

use perfusion_host::process::hierarchy::Hierarchy;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;

/// Most cgroups; the probes know no more.
pub const MOST: usize = 16_384;

/// The cgroups of version 2.
#[derive(Debug)]
pub struct Cgroups {
    hierarchy: Option<Hierarchy>,
    /// It was said that there are too many.
    said: bool,
}

impl Default for Cgroups {
    fn default() -> Self {
        Self { hierarchy: Hierarchy::host().cloned(), said: false }
    }
}

impl Cgroups {
    /// The hierarchy mounted there.
    #[cfg(test)]
    pub(super) fn below(mount: PathBuf) -> Self {
        Self { hierarchy: Some(Hierarchy::whole(mount)), said: false }
    }

    /// True when there are any.
    #[must_use]
    pub fn are_known(&self) -> bool {
        self.hierarchy.is_some()
    }

    /// Id and path of each there is now.
    pub fn scan(&mut self) -> Vec<(u64, String)> {
        let (mut found, mut next) = (Vec::new(), vec![PathBuf::from("/")]);
        let Some(hierarchy) = &self.hierarchy else { return found };
        while let Some(path) = next.pop() {
            let place = hierarchy.place(&path);
            // One that was removed meanwhile.
            let Ok(directory) = fs::metadata(&place) else { continue };
            if found.len() >= MOST {
                if !std::mem::replace(&mut self.said, true) {
                    tracing::warn!("more than {MOST} cgroups: rules do not know those beyond");
                }
                break;
            }
            // The id of a cgroup is the inode number of its directory, and a directory has a link
            // more for each below it (kernfs_iop_getattr, fs/kernfs/inode.c): most have none.
            found.push((directory.ino(), path.to_string_lossy().into_owned()));
            if directory.nlink() == 2 {
                continue;
            }
            let entries = fs::read_dir(&place).into_iter().flatten().flatten();
            let directories =
                entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            next.extend(directories.map(|entry| path.join(entry.file_name())));
        }
        found
    }
}

/// What was given is no cgroup v2 directory.
#[derive(Debug, thiserror::Error)]
#[error("cgroup {}: expected a cgroup v2 directory, found {found}", path.display())]
pub struct NoCgroup {
    /// What was given.
    pub path: PathBuf,
    /// What it is.
    pub found: String,
}

/// The id of the cgroup v2 directory at `path`.
pub(crate) fn cgroup_id(path: &Path) -> Result<u64, NoCgroup> {
    let refused = |found: String| NoCgroup { path: path.to_owned(), found };
    // Every cgroup v2 directory has this file, and nothing else does.
    if !path.join("cgroup.controllers").exists() {
        return Err(refused(if path.exists() {
            "something else".to_owned()
        } else {
            "nothing there".to_owned()
        }));
    }
    // The id the kernel's helper answers is the directory's inode number
    // (bpf_get_current_cgroup_id).
    std::fs::metadata(path).map(|found| found.ino()).map_err(|error| refused(error.to_string()))
}
