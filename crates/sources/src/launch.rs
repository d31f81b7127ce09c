//! Starts the program of `record -- CMD` so that it is profiled from its first instruction. The
//! child is this program. It waits at a gate until the probes and the tables know its pid, then it
//! becomes CMD with the same pid.
//!
//! The gate is a socket in the place of the child's stdin. What opens it is CMD's real stdin, sent
//! over it; a recorder that gives up, or is killed, closes it. So nothing has to be made in a file
//! system, and nobody is left waiting, however the recorder ends.

use perfusion_model::text::printable;
use rustix::fs::Access;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// How much of a script the kernel reads (`BINPRM_BUF_SIZE`, linux/binfmts.h).
const LINE_BYTES: u64 = 256;

/// The program could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The gate could not be made, or the child is no longer there to pass it.
    #[error("the start gate of {command}: {source}")]
    Gate {
        /// What should have passed it.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// The program is a script for another one, which is not there.
    #[error("cannot start {command}: its interpreter {interpreter}: {source}")]
    Interpreter {
        /// What.
        command: String,
        /// The path behind `#!` in its first line.
        interpreter: String,
        /// Why.
        source: io::Error,
    },
    /// The child could not be made.
    #[error("cannot start {command}: {source}")]
    Spawn {
        /// What.
        command: String,
        /// Why.
        source: io::Error,
    },
}

/// Finds out whether CMD is there to be started, without starting it: execvp's own search
/// (execvp(3)), in the recorder's PATH, which the child will have too.
///
/// # Errors
/// As the child would find it.
pub fn check(command: &[String]) -> Result<(), LaunchError> {
    let Some(program) = command.first() else { return Ok(()) };
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let places: Vec<PathBuf> = if program.contains('/') {
        vec![PathBuf::from(program)]
    } else {
        std::env::split_paths(&path).map(|directory| directory.join(program)).collect()
    };
    let mut best = Errno::NOENT;
    for place in &places {
        match rustix::fs::access(place, Access::EXEC_OK) {
            Ok(()) if place.is_dir() => best = Errno::ISDIR,
            Ok(()) => return check_interpreter(program, place),
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => best = error,
        }
    }
    Err(LaunchError::Spawn { command: program.clone(), source: best.into() })
}

/// Finds out whether the interpreter of a script is there: else the kernel answers ENOENT for the
/// script, which is there. One that cannot be read is left to the kernel.
fn check_interpreter(program: &str, script: &Path) -> Result<(), LaunchError> {
    let mut line = Vec::new();
    let read = File::open(script).and_then(|file| file.take(LINE_BYTES).read_to_end(&mut line));
    let Some(rest) = read.ok().and_then(|_| line.strip_prefix(b"#!")) else { return Ok(()) };
    let rest = rest.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
    let path = rest.split(u8::is_ascii_whitespace).next().unwrap_or_default();
    if path.is_empty() {
        return Ok(());
    }
    rustix::fs::access(path, Access::EXEC_OK).map_err(|error| LaunchError::Interpreter {
        command: program.to_owned(),
        interpreter: printable(&String::from_utf8_lossy(path)),
        source: error.into(),
    })
}

/// A child that waits at its gate. Dropping it without [`GatedChild::release`] ends the child,
/// which never becomes CMD then.
pub struct GatedChild {
    child: Option<Child>,
    gate: UnixStream,
    command: String,
}

impl Drop for GatedChild {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It is still this program, not CMD; both fail only when it has ended already.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl GatedChild {
    /// Starts the waiting child. `environment` is added to the child's own.
    ///
    /// # Errors
    /// When the gate or the child cannot be made.
    pub fn spawn(
        command: &[String],
        environment: &[(OsString, OsString)],
    ) -> Result<Self, LaunchError> {
        let shown = command.join(" ");
        // Both ends close on exec, so that no other child can hold the recorder's end open.
        let pair = UnixStream::pair().and_then(|pair| Ok((pair, std::env::current_exe()?)));
        let ((gate, childs), me) =
            pair.map_err(|source| LaunchError::Gate { command: shown.clone(), source })?;
        let child = Command::new(me)
            .args(["exec-when-ready", "--"])
            .args(command)
            .envs(environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::from(OwnedFd::from(childs)))
            .spawn();
        match child {
            Ok(child) => Ok(Self { child: Some(child), gate, command: shown }),
            Err(source) => Err(LaunchError::Spawn { command: shown, source }),
        }
    }

    /// The pid CMD will have.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Lets the child become CMD.
    ///
    /// # Errors
    /// When the child is gone already.
    pub fn release(mut self) -> Result<Child, LaunchError> {
        // A child that has not come to its gate yet finds the message there, even if we are gone by
        // then.
        let sent = send_stdin(&self.gate);
        match (sent, self.child.take()) {
            (Ok(()), Some(child)) => Ok(child),
            (sent, child) => {
                self.child = child;
                let source = sent.err().unwrap_or(Errno::CHILD).into();
                Err(LaunchError::Gate { command: std::mem::take(&mut self.command), source })
            }
        }
    }
}

fn send_stdin(gate: &UnixStream) -> Result<(), Errno> {
    let stdin = io::stdin();
    let descriptors = [stdin.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    retry_on_intr(|| sendmsg(gate, &[IoSlice::new(b"!")], &mut control, SendFlags::NOSIGNAL))
        .map(drop)
}

/// Waits at the gate. `None`: it was closed.
fn receive_stdin(gate: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    retry_on_intr(|| {
        recvmsg(&gate, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(received)
}

/// The child's side: waits at the gate, which is its stdin, then becomes `command`. Returns only
/// with what went wrong.
#[must_use]
pub fn exec_when_ready(command: &[String]) -> io::Error {
    let stdin = match receive_stdin(io::stdin()) {
        Ok(Some(stdin)) => stdin,
        // The recorder gave up, so CMD must not run.
        Ok(None) => return io::Error::other("the recorder ended before it"),
        Err(error) => return error.into(),
    };
    let Some((program, arguments)) = command.split_first() else {
        return io::Error::other("no command");
    };
    Command::new(program).args(arguments).stdin(Stdio::from(stdin)).exec()
}

#[cfg(test)]
mod tests {
    use super::{check, receive_stdin, send_stdin};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixStream;
    use std::{fs, io};

    #[test]
    fn the_gate_opens_with_the_recorders_stdin_even_when_it_is_gone_by_then() {
        let (gate, childs) = UnixStream::pair().unwrap();
        send_stdin(&gate).unwrap();
        drop(gate);
        let received = receive_stdin(&childs).unwrap().unwrap();
        let same = |descriptor: &dyn std::os::fd::AsFd| {
            let found = rustix::fs::fstat(descriptor).unwrap();
            (found.st_dev, found.st_ino, found.st_rdev)
        };
        assert_eq!(same(&received), same(&io::stdin()));
        assert!(receive_stdin(&childs).unwrap().is_none(), "it opens once");
    }

    #[test]
    fn what_cannot_be_started_is_known_before() {
        let found = |program: &str| check(&[program.to_owned()]).map_err(|error| error.to_string());
        assert_eq!(found("sh"), Ok(()));
        assert_eq!(found("/bin/sh"), Ok(()));
        for (program, why) in [
            ("shh", "No such file"),
            ("/bin/shh", "No such file"),
            ("/bin", "Is a directory"),
            ("/etc/passwd", "Permission denied"),
        ] {
            let error = found(program).unwrap_err();
            assert!(error.starts_with(&format!("cannot start {program}: {why}")), "{error}");
        }
    }

    #[test]
    fn a_script_whose_interpreter_is_not_there_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script.sh").display().to_string();
        let check_with = |first: &str| {
            fs::write(&script, format!("{first}\necho\n")).unwrap();
            fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
            check(std::slice::from_ref(&script)).map_err(|error| error.to_string())
        };
        for good in ["#!/bin/sh", "#! /bin/sh -e", "#!", "echo"] {
            assert_eq!(check_with(good), Ok(()), "{good}");
        }
        let missing =
            format!("cannot start {script}: its interpreter /no/such/shell: No such file");
        for bad in ["#!/no/such/shell", "#! /no/such/shell -e"] {
            let error = check_with(bad).unwrap_err();
            assert!(error.starts_with(&missing), "{error}");
        }
    }

    #[test]
    fn a_closed_gate_lets_nobody_pass_and_something_else_is_no_gate() {
        let (gate, childs) = UnixStream::pair().unwrap();
        drop(gate);
        assert!(receive_stdin(&childs).unwrap().is_none());
        assert!(receive_stdin(fs::File::open("/dev/null").unwrap()).is_err());
    }
}
