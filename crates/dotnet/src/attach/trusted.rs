//! Directories in which nobody but their owners can change what a name stands for: what root (or a
//! target) loads by path must lie in one.
//!
//! A path is followed here name by name, and every directory and link on the way is looked at by
//! descriptor: whoever owns one of them, or may rename in it, decides what the rest of the path
//! means to whoever follows it later. What comes out has no links in it any more.

use rustix::fs::{FileType, Mode, OFlags, fstat, openat, readlinkat};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use super::unusable_directory::UnusableDirectory;

/// Links on the way, at most (the kernel's MAXSYMLINKS), and names.
const LINKS: usize = 40;
const NAMES: usize = 256;

/// Opens the directory `path` below `root`, when nobody but `owners` can put anything else in its
/// place or rename files in it. Answers it with its path below `root` without links.
///
/// # Errors
/// Which directory is unfit, and why; or the system call's.
pub(super) fn open(
    root: OwnedFd,
    path: &Path,
    owners: &[u32],
) -> Result<(OwnedFd, PathBuf), UnusableDirectory> {
    let mut walk = PathWalk { root, owners, below: Vec::new() };
    check(walk.here(), owners, Path::new("/"))?;
    let mut left: VecDeque<OsString> = names(path).collect();
    let (mut links, mut seen) = (0, 0);
    while let Some(name) = left.pop_front() {
        seen += 1;
        if seen > NAMES {
            return Err(UnusableDirectory::System("open", Errno::NAMETOOLONG));
        }
        if let Some(target) = walk.step(&name)? {
            links += 1;
            if links > LINKS {
                return Err(UnusableDirectory::System("open", Errno::LOOP));
            }
            if target.is_absolute() {
                walk.below.clear();
            }
            for name in names(&target).collect::<Vec<_>>().into_iter().rev() {
                left.push_front(name);
            }
        }
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let directory = openat(walk.here(), ".", flags, Mode::empty())
        .map_err(|error| UnusableDirectory::System("open", error))?;
    Ok((directory, walk.path()))
}

/// The names of a path that mean a step.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::ParentDir => Some("..".into()),
        Component::Normal(name) => Some(name.to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

struct PathWalk<'a> {
    root: OwnedFd,
    owners: &'a [u32],
    /// Each directory below the root on the way here.
    below: Vec<(OsString, OwnedFd)>,
}

impl PathWalk<'_> {
    fn here(&self) -> BorrowedFd<'_> {
        self.below.last().map_or_else(|| self.root.as_fd(), |(_, directory)| directory.as_fd())
    }

    fn path(&self) -> PathBuf {
        Path::new("/").join(self.below.iter().map(|(name, _)| name).collect::<PathBuf>())
    }

    /// Goes into the directory `name`; answers where it leads instead when it is a link.
    fn step(&mut self, name: &OsStr) -> Result<Option<PathBuf>, UnusableDirectory> {
        if name == ".." {
            // As in any root: above it is itself.
            self.below.pop();
            return Ok(None);
        }
        let system = |step| move |error| UnusableDirectory::System(step, error);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = openat(self.here(), name, flags, Mode::empty()).map_err(system("open"))?;
        let path = self.path().join(name);
        let kind = check(found.as_fd(), self.owners, &path)?;
        match kind {
            FileType::Directory => {
                self.below.push((name.to_owned(), found));
                Ok(None)
            }
            FileType::Symlink => {
                let target = readlinkat(&found, "", Vec::new()).map_err(system("readlink"))?;
                Ok(Some(PathBuf::from(OsStr::from_bytes(target.to_bytes()))))
            }
            _ => Err(UnusableDirectory::System("open", Errno::NOTDIR)),
        }
    }
}

/// Looks at a directory or link on the way. Rights that are given by an access control list show in
/// the group's bits (acl(5)).
fn check(
    found: BorrowedFd<'_>,
    owners: &[u32],
    path: &Path,
) -> Result<FileType, UnusableDirectory> {
    let status = fstat(found).map_err(|error| UnusableDirectory::System("stat", error))?;
    let (kind, mode) =
        (FileType::from_raw_mode(status.st_mode), Mode::from_raw_mode(status.st_mode));
    if !owners.contains(&status.st_uid) {
        return Err(UnusableDirectory::Owner { path: path.to_owned(), uid: status.st_uid });
    }
    // A link's own mode means nothing.
    let open_to_others = kind == FileType::Directory && mode.intersects(Mode::WGRP | Mode::WOTH);
    if open_to_others && !mode.contains(Mode::SVTX) {
        return Err(UnusableDirectory::NotSticky { path: path.to_owned() });
    }
    Ok(kind)
}

#[cfg(test)]
mod tests {
    use super::{UnusableDirectory, open};
    use rustix::fs::{Mode, OFlags};
    use std::fs::{Permissions, create_dir, create_dir_all, set_permissions};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::{Path, PathBuf};

    fn root() -> OwnedFd {
        rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap()
    }

    fn owners() -> [u32; 2] {
        [0, rustix::process::geteuid().as_raw()]
    }

    fn path_of(path: &Path) -> Result<PathBuf, UnusableDirectory> {
        open(root(), path, &owners()).map(|(_, path)| path)
    }

    #[test]
    fn links_are_followed_and_gone_from_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        create_dir_all(real.join("a/b")).unwrap();
        symlink("a/b", real.join("relative")).unwrap();
        symlink(real.join("relative/.."), real.join("absolute")).unwrap();
        symlink("loop", real.join("loop")).unwrap();
        assert_eq!(path_of(&real.join("relative")).unwrap(), real.join("a/b"));
        assert_eq!(path_of(&real.join("absolute")).unwrap(), real.join("a"));
        assert_eq!(path_of(Path::new("/../..")).unwrap(), Path::new("/"));
        assert!(matches!(
            path_of(&real.join("loop")),
            Err(UnusableDirectory::System(_, rustix::io::Errno::LOOP))
        ));
        assert!(matches!(
            path_of(&real.join("none")),
            Err(UnusableDirectory::System(_, rustix::io::Errno::NOENT))
        ));
    }

    #[test]
    fn a_directory_on_the_way_that_others_can_write_is_refused_wherever_it_lies() {
        let folder = tempfile::tempdir().unwrap();
        let (upper, lower) = (folder.path().join("a"), folder.path().join("a/b"));
        create_dir(&upper).unwrap();
        create_dir(&lower).unwrap();
        for (mode, fit) in
            [(0o755, true), (0o775, false), (0o757, false), (0o1777, true), (0o1775, true)]
        {
            for changed in [&upper, &lower] {
                set_permissions(changed, Permissions::from_mode(mode)).unwrap();
                let found = path_of(&lower);
                assert_eq!(found.is_ok(), fit, "{mode:o} {}: {found:?}", changed.display());
                assert!(
                    fit || matches!(
                        found,
                        Err(UnusableDirectory::NotSticky { path }) if path == *changed
                    )
                );
                set_permissions(changed, Permissions::from_mode(0o755)).unwrap();
            }
        }
    }

    #[test]
    fn directories_and_links_of_others_are_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (upper, lower) = (folder.path().join("a"), folder.path().join("a/b"));
        create_dir_all(&lower).unwrap();
        symlink(&lower, folder.path().join("link")).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::lchown(&link, Some(1234), None).unwrap();
        assert!(
            matches!(path_of(&link), Err(UnusableDirectory::Owner { uid: 1234, .. })),
            "its owner may let it lead elsewhere"
        );
        std::os::unix::fs::chown(&upper, Some(1234), None).unwrap();
        let refused = path_of(&lower);
        assert!(
            matches!(&refused, Err(UnusableDirectory::Owner { uid: 1234, path }) if *path == upper),
            "{refused:?}"
        );
        open(root(), &lower, &[0, 1234]).unwrap();
    }
}
