//! Why a runtime has no diagnostics socket where it should be, from what can be seen of its
//! process.
//!
//! The runtime makes the socket as it starts, in `TMPDIR` or `/tmp`
//! (src/native/eventpipe/ds-ipc-pal-socket.c of dotnet/runtime). Where it cannot, it goes on
//! without one and says nothing that anybody could read later.

use perfusion_host::process::guarded_io::{IoPeer, wait_for};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::ticks_before_now;
use rustix::fs::{FileType, OFlags, Stat, StatVfsMountFlags, fstat, fstatvfs};
use rustix::io::Errno;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kernel's bound on the path of a socket (`sun_path`, unix(7)), the byte that ends it
/// included.
const MAX_SOCKET_PATH: usize = 108;
/// `dotnet-diagnostic-PID-TICKS-socket` behind the directory, with the longest numbers that there
/// usually are.
const NAME_BYTES: usize = "/dotnet-diagnostic-4194304-4294967295-socket".len();
/// A runtime that is younger may not have come to it.
const YOUNG: Duration = Duration::from_secs(2);
/// Bytes of the kernel's list of sockets that are read.
const LIST_BYTES: u64 = 8 << 20;
/// What helps in the end, whatever is repaired before.
const START_AGAIN: &str = "start it again: a runtime makes its socket only as it starts";
/// What a process needs in a directory to make a file there, and to come through it (inode(7)).
const WRITE_AND_SEARCH: u32 = 3;
const SEARCH: u32 = 1;

/// What is known of the reason, most certain first, in words.
#[must_use]
pub fn reason(target: &ProcessHandle) -> String {
    let directory =
        target.environment("TMPDIR").ok().flatten().filter(|directory| !directory.is_empty());
    if let Some(path) = listed_by_the_kernel(target) {
        return format!(
            "it made {path} as it started, and that was deleted since, or a mount hides it; \
             {START_AGAIN}"
        );
    }
    if let Some(known) = of_directory(target, directory.as_deref()) {
        return known;
    }
    let looked_in =
        directory.map_or_else(|| "/tmp".to_owned(), |directory| format!("{directory} and /tmp"));
    if target.start_ticks().is_ok_and(|start| start > ticks_before_now(YOUNG)) {
        return format!(
            "it is younger than {} s and has made none in {looked_in} yet",
            YOUNG.as_secs()
        );
    }
    if target.has_seccomp_filter() {
        return format!(
            "none in {looked_in}; a seccomp filter is in force (Seccomp: 2 in /proc/{}/status), \
             which may forbid socket(2), bind(2) or \
             listen(2): allow them",
            target.pid()
        );
    }
    format!(
        "none in {looked_in}, and nothing that is visible forbids it there: diagnostics may be \
         switched off in its runtimeconfig.json"
    )
}

/// The path that the runtime gave to its socket, if the kernel still lists it. The socket lives
/// as long as its process, whatever becomes of the file.
fn listed_by_the_kernel(target: &ProcessHandle) -> Option<String> {
    let pid = target.namespace_pid().ok()?;
    // Another process of the same network may have the pid in a pid namespace of its own.
    let name = format!("dotnet-diagnostic-{pid}-{}-socket", target.start_ticks().ok()?);
    listed(target.file(&target.in_common("net/unix")).ok()?, &name)
}

/// The path with this file name in a list such as `/proc/net/unix`, without control characters.
fn listed(list: File, name: &str) -> Option<String> {
    let lines = BufReader::new(list.take(LIST_BYTES)).split(b'\n').map_while(Result::ok);
    let mut lines = lines.map(|line| String::from_utf8_lossy(&line).into_owned());
    let line = lines.find(|line| line.ends_with(name))?;
    // Seven columns of numbers are in front of the path.
    let path = line.split_ascii_whitespace().skip(7).collect::<Vec<_>>().join(" ");
    Some(path.chars().filter(|letter| !letter.is_control()).collect())
}

/// What is wrong with the directory that its environment names, or with `/tmp` where it names none.
fn of_directory(target: &ProcessHandle, named: Option<&str>) -> Option<String> {
    let (directory, what) = match named {
        Some(named) => (named, format!("its TMPDIR is {named}")),
        None => ("/tmp", "it has no TMPDIR, so its directory is /tmp".to_owned()),
    };
    if directory.len() + NAME_BYTES >= MAX_SOCKET_PATH {
        return Some(format!(
            "its TMPDIR has {} bytes: a socket's path may have {}, and its name takes \
             {NAME_BYTES}; start it with a shorter TMPDIR",
            directory.len(),
            MAX_SOCKET_PATH - 1
        ));
    }
    if !directory.starts_with('/') {
        return Some(format!(
            "{what}, which is relative to the directory it was started in and does not exist in \
             its present one: start it with an absolute path"
        ));
    }
    let path = Path::new(directory);
    let file = match target.open_in_root(path, OFlags::PATH) {
        Ok(file) => file,
        Err(Errno::NOENT) => {
            return Some(format!(
                "{what}, which does not exist [ENOENT]: make the directory, and {START_AGAIN}"
            ));
        }
        Err(Errno::NOTDIR) => {
            return Some(format!(
                "{what}, and a part of that path is a file and no directory [ENOTDIR]: name a \
                 directory, and {START_AGAIN}"
            ));
        }
        Err(_) => return None,
    };
    let parents = path.ancestors().skip(1).filter_map(|parent| {
        Some((parent.to_owned(), target.open_in_root(parent, OFlags::PATH).ok()?))
    });
    let parents: Vec<(PathBuf, OwnedFd)> = parents.collect();
    let user = DirectoryUser::of(target)?;
    let path = path.to_owned();
    // Its file system may never answer.
    let look = move || wrong_with(&path, &file, &parents, &user);
    let wrong = wait_for(IoPeer::Process(target.pid()), look)??;
    Some(format!("{what}, {wrong}, and {START_AGAIN}"))
}

/// Whose permissions count in a directory.
struct DirectoryUser {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    /// Permissions are nothing to it.
    overrides: bool,
}

impl DirectoryUser {
    fn of(target: &ProcessHandle) -> Option<Self> {
        let (uid, gid) = target.file_owner().ok()?;
        let groups = target.groups().ok()?;
        Some(Self { uid, gid, groups, overrides: target.overrides_permissions() })
    }

    /// Whether the mode grants it all of these bits.
    fn has(&self, wanted: u32, status: &Stat) -> bool {
        let granted = if status.st_uid == self.uid {
            status.st_mode >> 6
        } else if status.st_gid == self.gid || self.groups.contains(&status.st_gid) {
            status.st_mode >> 3
        } else {
            status.st_mode
        };
        self.overrides || granted & wanted == wanted
    }
}

/// Why nobody, or not this user, can make a file in this directory, and what to do.
fn wrong_with(
    path: &Path,
    directory: &OwnedFd,
    parents: &[(PathBuf, OwnedFd)],
    user: &DirectoryUser,
) -> Option<String> {
    let status = fstat(directory).ok()?;
    if FileType::from_raw_mode(status.st_mode) != FileType::Directory {
        return Some("which is a file and no directory [ENOTDIR]: name a directory".to_owned());
    }
    // The first on the way that it cannot come through.
    let closed = parents.iter().rev().find_map(|(parent, file)| {
        Some((parent.as_path(), fstat(file).ok()?)).filter(|(_, status)| !user.has(SEARCH, status))
    });
    let own = (!user.has(WRITE_AND_SEARCH, &status)).then_some((path, status));
    if let Some((place, status)) = closed.or(own) {
        return Some(format!(
            "in which its user ({}:{}) may make no file [EACCES]: {} has the mode {:04o} and the \
             owner {}:{}; give it a directory that it may write to",
            user.uid,
            user.gid,
            place.display(),
            status.st_mode & 0o7777,
            status.st_uid,
            status.st_gid
        ));
    }
    let is_read_only = fstatvfs(directory).ok()?.f_flag.contains(StatVfsMountFlags::RDONLY);
    is_read_only.then(|| {
        "which is on a read-only file system [EROFS]: give it a directory that it may write to"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::{DirectoryUser, SEARCH, WRITE_AND_SEARCH, listed, wrong_with};
    use rustix::fs::{Mode, OFlags, fstat, open};
    use std::fs::{self, File, Permissions};
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};

    fn opened(path: &Path) -> OwnedFd {
        open(path, OFlags::PATH, Mode::empty()).unwrap()
    }

    #[test]
    fn a_directory_that_cannot_be_written_has_its_permissions_or_its_kind_as_the_reason() {
        let scratch = tempfile::tempdir().unwrap();
        let (inner, file) = (scratch.path().join("inner"), scratch.path().join("file"));
        fs::create_dir(&inner).unwrap();
        fs::write(&file, "").unwrap();
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        let owner = fstat(opened(&inner)).unwrap();
        let user = |uid, gid, groups: &[u32], overrides| DirectoryUser {
            uid,
            gid,
            groups: groups.to_vec(),
            overrides,
        };
        let stranger = user(owner.st_uid + 1, owner.st_gid + 1, &[], false);
        let member = user(owner.st_uid + 1, owner.st_gid + 1, &[owner.st_gid], false);
        let root = user(owner.st_uid + 1, owner.st_gid + 1, &[], true);
        let said = |path: &Path, user: &DirectoryUser| {
            let parents: Vec<(PathBuf, OwnedFd)> =
                vec![(scratch.path().to_owned(), opened(scratch.path()))];
            wrong_with(path, &opened(path), &parents, user)
        };
        mode(scratch.path(), 0o755);
        mode(&inner, 0o775);
        assert_eq!((said(&inner, &member), said(&inner, &root)), (None, None));
        let reason = said(&inner, &stranger).unwrap();
        for words in [
            format!("({}:{})", owner.st_uid + 1, owner.st_gid + 1),
            format!("{} has the mode 0775", inner.display()),
            format!("owner {}:{};", owner.st_uid, owner.st_gid),
        ] {
            assert!(reason.contains(&words), "no {words} in {reason}");
        }
        mode(&inner, 0o777);
        assert_eq!(said(&inner, &stranger), None);
        // It may write there, and does not get there.
        mode(scratch.path(), 0o700);
        let reason = said(&inner, &stranger).unwrap();
        let closed = format!("{} has the mode 0700", scratch.path().display());
        assert!(reason.contains(&closed), "no {closed} in {reason}");
        assert!(said(&file, &root).unwrap().contains("is a file and no directory"));
        let status = fstat(opened(scratch.path())).unwrap();
        assert!(!stranger.has(SEARCH, &status) && root.has(WRITE_AND_SEARCH, &status));
    }

    #[test]
    fn a_socket_that_the_kernel_lists_is_found_by_its_name() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("list");
        let list = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03 170\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01 171 /a b/c-1-2-socket\n";
        fs::write(&path, list).unwrap();
        let found = |name| listed(File::open(&path).unwrap(), name);
        assert_eq!(found("c-1-2-socket"), Some("/a b/c-1-2-socket".to_owned()));
        assert_eq!(found("c-1-3-socket"), None);
    }
}
