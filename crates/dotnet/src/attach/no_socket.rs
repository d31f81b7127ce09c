//! Why a runtime has no diagnostics socket where it should be, from what can be seen of its
//! process.
//!
//! The runtime makes the socket as it starts, in `TMPDIR` or `/tmp`
//! (src/native/eventpipe/ds-ipc-pal-socket.c of dotnet/runtime). Where it cannot, it goes on
//! without one and says nothing that anybody could read later.

use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::ticks_before_now;
use perfusion_host::system_limits::name;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::path::Path;
use std::time::Duration;

/// The kernel's bound on the path of a socket (`sun_path`, unix(7)), the byte that ends it
/// included.
const MAX_SOCKET_PATH: usize = 108;
/// `dotnet-diagnostic-PID-TICKS-socket` behind the directory, with the longest numbers that there
/// usually are.
const NAME_BYTES: usize = "/dotnet-diagnostic-4194304-4294967295-socket".len();
/// A runtime that is younger may not have come to it.
const YOUNG: Duration = Duration::from_secs(2);

/// What is known of the reason, most certain first, in words.
#[must_use]
pub fn reason(target: &ProcessHandle) -> String {
    let directory =
        target.environment("TMPDIR").ok().flatten().filter(|directory| !directory.is_empty());
    if let Some(known) = directory.as_deref().and_then(|directory| of_directory(target, directory))
    {
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
        "none in {looked_in}, and nothing forbids it from outside: diagnostics are switched off in \
         its runtimeconfig.json, or the file was \
         deleted"
    )
}

/// What is wrong with the directory that its environment names.
fn of_directory(target: &ProcessHandle, directory: &str) -> Option<String> {
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
            "its TMPDIR is {directory}, which is relative to the directory it was started in and \
             does not exist in its present one: \
             start it with an absolute path"
        ));
    }
    match target.open_in_root(Path::new(directory), OFlags::PATH | OFlags::DIRECTORY) {
        Err(error @ (Errno::NOENT | Errno::NOTDIR)) => {
            let name = name(error.raw_os_error()).unwrap_or_default();
            Some(format!(
                "its TMPDIR is {directory}, which it cannot use: {error} [{name}]; make the \
                 directory"
            ))
        }
        _ => None,
    }
}
