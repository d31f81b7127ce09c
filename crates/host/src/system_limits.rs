//! What a system call's error means here: its name, the limit that is in force, and what to do. The
//! one place that knows which limit of the system stands behind which error, and the one that
//! raises limits of this process.

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::error::Error;
use std::sync::OnceLock;
use std::{fs, io};

/// Descriptors that a recording needs without any process: maps, programs and links of the probes,
/// channels between threads; the shim of one .NET process, its event session and the files that
/// names are read from; and those that loading and an attach take for a moment. With two CPUs
/// recordings of one .NET app had descriptors up to 87 and no EMFILE where 84 or more were allowed.
/// Only with `--alloc-counts` 92 did not suffice.
const OPEN_FILES: u64 = 84;
/// The same for each CPU: perf's ring, and the sampling timer with its link.
const OPEN_FILES_OF_CPU: u64 = 3;
/// Below this fewer files are kept open than would be of use.
pub const MANY_OPEN_FILES: u64 = 1_024;

/// The kernel's bound on sampling timers, per second and CPU.
const MAX_SAMPLE_RATE: &str = "kernel.perf_event_max_sample_rate";

/// Names of the errors that the system calls of this program can end with (errno(3)).
const NAMES: [(i32, &str); 49] = [
    (1, "EPERM"),
    (2, "ENOENT"),
    (3, "ESRCH"),
    (4, "EINTR"),
    (5, "EIO"),
    (6, "ENXIO"),
    (7, "E2BIG"),
    (8, "ENOEXEC"),
    (9, "EBADF"),
    (10, "ECHILD"),
    (11, "EAGAIN"),
    (12, "ENOMEM"),
    (13, "EACCES"),
    (14, "EFAULT"),
    (16, "EBUSY"),
    (17, "EEXIST"),
    (18, "EXDEV"),
    (19, "ENODEV"),
    (20, "ENOTDIR"),
    (21, "EISDIR"),
    (22, "EINVAL"),
    (23, "ENFILE"),
    (24, "EMFILE"),
    (25, "ENOTTY"),
    (26, "ETXTBSY"),
    (27, "EFBIG"),
    (28, "ENOSPC"),
    (29, "ESPIPE"),
    (30, "EROFS"),
    (31, "EMLINK"),
    (32, "EPIPE"),
    (36, "ENAMETOOLONG"),
    (38, "ENOSYS"),
    (39, "ENOTEMPTY"),
    (40, "ELOOP"),
    (61, "ENODATA"),
    (71, "EPROTO"),
    (75, "EOVERFLOW"),
    (95, "EOPNOTSUPP"),
    (98, "EADDRINUSE"),
    (99, "EADDRNOTAVAIL"),
    (104, "ECONNRESET"),
    (105, "ENOBUFS"),
    (110, "ETIMEDOUT"),
    (111, "ECONNREFUSED"),
    (113, "EHOSTUNREACH"),
    (116, "ESTALE"),
    (122, "EDQUOT"),
    (524, "ENOTSUPP"),
];

/// The name of an error number, where it is one that programs know.
#[must_use]
pub fn name(errno: i32) -> Option<&'static str> {
    NAMES.iter().find(|(number, _)| *number == errno).map(|(_, name)| *name)
}

/// An error with all that is behind it: the text of each cause that the text before does not have,
/// the name of the system's error, the limit in force and the remedy.
#[must_use]
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let (mut errno, mut next) = (errno_of(error), error.source());
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        errno = errno_of(cause).or(errno);
        next = cause.source();
    }
    let Some(errno) = errno else { return text };
    if let Some(name) = name(errno).filter(|name| !text.contains(name)) {
        text = format!("{text} [{name}]");
    }
    match remedy(errno) {
        Some(remedy) if !text.contains(&remedy) => format!("{text}: {remedy}"),
        _ => text,
    }
}

fn errno_of(error: &(dyn Error + 'static)) -> Option<i32> {
    // Memory that the allocator could not get has no number.
    let of_io = |error: &io::Error| {
        let is_memory = error.kind() == io::ErrorKind::OutOfMemory;
        error.raw_os_error().or_else(|| is_memory.then_some(Errno::NOMEM.raw_os_error()))
    };
    error
        .downcast_ref::<io::Error>()
        .and_then(of_io)
        .or_else(|| error.downcast_ref::<Errno>().map(|errno| errno.raw_os_error()))
}

/// The limit behind an error that only a limit gives, and what to do.
#[must_use]
pub fn remedy(errno: i32) -> Option<String> {
    let remedy = match errno {
        // EMFILE
        24 => format!(
            "RLIMIT_NOFILE is {}: a recording on this host needs at least {}, and more with each \
             process: allow more (ulimit -n, LimitNOFILE=)",
            limit(Resource::Nofile),
            needed_open_files()
        ),
        // ENFILE
        23 => format!("fs.file-max is {}: raise it (sysctl fs.file-max)", sysctl("fs.file-max")),
        // EAGAIN, of the calls whose errors are told: making a thread or a process.
        11 => format!(
            "no thread or process could be made: RLIMIT_NPROC is {}, kernel.threads-max is {}, and \
             the cgroup may have a \
             pids.max: allow more (ulimit -u, LimitNPROC=, TasksMax=)",
            limit(Resource::Nproc),
            sysctl("kernel.threads-max")
        ),
        // EFBIG
        27 => format!(
            "RLIMIT_FSIZE is {} bytes: allow longer files (ulimit -f unlimited, \
             LimitFSIZE=infinity)",
            limit(Resource::Fsize)
        ),
        // ENOMEM
        12 => format!(
            "no memory is left for it: RLIMIT_AS is {}, and the host and this process's cgroup \
             have limits, too: allow more (ulimit -v, LimitAS=, MemoryMax=)",
            limit(Resource::As)
        ),
        // ENOSPC
        28 => "the file system is full: make room, or name a file elsewhere".to_owned(),
        // EDQUOT
        122 => {
            "this user's quota on the file system is used up: make room, or name a file elsewhere"
                .to_owned()
        }
        // EROFS
        30 => "the file system is mounted read-only: name a file elsewhere".to_owned(),
        _ => return None,
    };
    Some(remedy)
}

/// A limit of this process, soft, in words.
#[must_use]
pub fn limit(resource: Resource) -> String {
    getrlimit(resource).current.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
}

/// The value of a setting of the kernel, in words.
#[must_use]
pub fn sysctl(name: &str) -> String {
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    fs::read_to_string(path).map_or_else(|_| "unreadable".to_owned(), |text| text.trim().to_owned())
}

/// Most samples per second and CPU that the kernel allows; `None` where it does not say.
#[must_use]
pub fn max_sample_rate() -> Option<u64> {
    sysctl(MAX_SAMPLE_RATE).parse().ok()
}

/// What to do where a sampling timer was refused that was to ring so often.
#[must_use]
pub fn sampler_advice(frequency_hz: u32, error: &(dyn Error + 'static)) -> String {
    let mut errno = errno_of(error);
    let mut next = error.source();
    while let Some(cause) = next {
        errno = errno_of(cause).or(errno);
        next = cause.source();
    }
    match (errno, max_sample_rate()) {
        (Some(22), Some(most)) if u64::from(frequency_hz) > most => format!(
            "; {MAX_SAMPLE_RATE} is {most}, and {frequency_hz} samples per second were asked for: \
             ask for less (--frequency, \
             recording.frequency), or raise it (sysctl -w {MAX_SAMPLE_RATE}=100000). The kernel \
             lowers it by itself where samples take \
             more than kernel.perf_cpu_time_max_percent ({})",
            sysctl("kernel.perf_cpu_time_max_percent")
        ),
        (Some(1 | 13), _) => format!(
            "; kernel.perf_event_paranoid is {}: grant CAP_PERFMON, and allow the system call \
             where a seccomp profile forbids it",
            sysctl("kernel.perf_event_paranoid")
        ),
        _ => String::new(),
    }
}

/// Descriptors that a recording needs on this host.
#[must_use]
pub fn needed_open_files() -> u64 {
    static NEEDED: OnceLock<u64> = OnceLock::new();
    *NEEDED.get_or_init(|| {
        let cpus = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let online = crate::cpus::online().map_or_else(|_| cpus(), |online| online.len());
        OPEN_FILES + OPEN_FILES_OF_CPU * online as u64
    })
}

/// Allows this process as many open files as it may have, and [`MANY_OPEN_FILES`] where it has the
/// right to (CAP_SYS_RESOURCE). A program that it starts keeps the limits that this one was started
/// with, if it is started before. Answers the limit in force.
pub fn raise_open_files() -> u64 {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, ..before };
    // Below the limit less is kept open.
    setrlimit(Resource::Nofile, raised).ok();
    if before.maximum.is_some_and(|most| most < MANY_OPEN_FILES) {
        let many = Some(MANY_OPEN_FILES);
        setrlimit(Resource::Nofile, Rlimit { current: many, maximum: many }).ok();
    }
    open_files()
}

/// How many files this process may have open.
#[must_use]
pub fn open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// How many files a cache may keep open that would keep `most`: with few descriptors its part of
/// those that a recording does not need.
#[must_use]
pub(crate) fn share_of_open_files(most: usize) -> usize {
    let free = open_files().saturating_sub(needed_open_files());
    let share = free.saturating_mul(most as u64) / MANY_OPEN_FILES;
    usize::try_from(share).unwrap_or(usize::MAX).clamp(2, most.max(2))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, explain, name, open_files, share_of_open_files};
    use rustix::io::Errno;
    use std::io;

    #[test]
    fn names_are_those_of_the_system() {
        for (number, name) in NAMES.into_iter().filter(|(number, _)| *number < 500) {
            assert!(
                !io::Error::from_raw_os_error(number).to_string().contains("Unknown"),
                "{name}"
            );
        }
        for (errno, expected) in [
            (Errno::MFILE, "EMFILE"),
            (Errno::NFILE, "ENFILE"),
            (Errno::INVAL, "EINVAL"),
            (Errno::PERM, "EPERM"),
            (Errno::NOSPC, "ENOSPC"),
            (Errno::FBIG, "EFBIG"),
            (Errno::AGAIN, "EAGAIN"),
            (Errno::DQUOT, "EDQUOT"),
            (Errno::STALE, "ESTALE"),
        ] {
            assert_eq!(name(errno.raw_os_error()), Some(expected));
        }
    }

    #[test]
    fn an_error_has_its_name_its_limit_and_its_remedy() {
        #[derive(Debug, thiserror::Error)]
        #[error("a test: {0}")]
        struct Failed(#[source] io::Error);
        let told = |errno: Errno| explain(&Failed(errno.into()));
        let text = told(Errno::MFILE);
        let limit = format!("RLIMIT_NOFILE is {}", open_files());
        assert!(
            text.starts_with("a test: ") && text.contains("[EMFILE]") && text.contains(&limit),
            "{text}"
        );
        assert!(text.contains("ulimit -n"), "{text}");
        // What the standard library says of an allocation that failed has no number.
        for memory in [Errno::NOMEM.into(), io::Error::from(io::ErrorKind::OutOfMemory)] {
            let text = explain(&Failed(memory));
            assert!(text.contains("[ENOMEM]") && text.contains("RLIMIT_AS is "), "{text}");
        }
        assert!(told(Errno::FBIG).contains("RLIMIT_FSIZE"));
        assert!(told(Errno::NFILE).contains("fs.file-max is "));
        assert!(told(Errno::AGAIN).contains("RLIMIT_NPROC is "));
        assert_eq!(told(Errno::NOENT), "a test: No such file or directory (os error 2) [ENOENT]");
    }

    #[test]
    fn a_cause_that_the_error_does_not_tell_is_told() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] io::Error);
        let text = explain(&Outer(Errno::MFILE.into()));
        assert!(
            text.starts_with("outer: Too many open files (os error 24) [EMFILE]: RLIMIT"),
            "{text}"
        );
    }

    #[test]
    fn a_cache_keeps_at_least_a_few_and_never_more_than_it_would() {
        assert!((2..=512).contains(&share_of_open_files(512)));
        assert_eq!(share_of_open_files(0), 2);
    }
}
