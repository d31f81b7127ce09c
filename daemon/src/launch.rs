//! Starts the program of `record -- CMD` so that it is profiled from its first instruction: the child is this program again,
//! waits at a gate until the probes and the tables know its pid, and then becomes CMD. The pid stays the same.

use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// The program could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The gate could not be made.
    #[error("cannot make the start gate in {}: {source}", path.display())]
    Gate {
        /// Where.
        path: PathBuf,
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

/// A directory that goes with its guard.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is an empty directory of ours in the temporary directory: no harm.
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A child that waits at its gate. Dropping it without [`Gated::release`] ends the child, which never becomes CMD then.
pub struct Gated {
    child: Option<Child>,
    gate: PathBuf,
    _folder: Folder,
}

impl Drop for Gated {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It is still this program, not CMD; both fail only when it has ended already.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Gated {
    /// Starts the waiting child. `environment` is added to the child's own.
    ///
    /// # Errors
    /// When the gate or the child cannot be made.
    pub fn spawn(command: &[String], environment: &[(OsString, OsString)]) -> Result<Self, LaunchError> {
        let folder = free_folder();
        let gate = folder.join("gate");
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| LaunchError::Gate { path, source }
        };
        // 0700 and freshly made: nobody else can open the gate or have put something else at its place.
        std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(at(&folder))?;
        let folder = Folder(folder);
        mknodat(CWD, &gate, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).map_err(|e| at(&gate)(e.into()))?;
        let me = std::env::current_exe().map_err(at(Path::new("/proc/self/exe")))?;
        let child = Command::new(me)
            .arg("exec-when-ready")
            .arg(&gate)
            .arg("--")
            .args(command)
            .envs(environment.iter().map(|(k, v)| (k, v)))
            .spawn()
            .map_err(|source| LaunchError::Spawn { command: command.join(" "), source })?;
        Ok(Self { child: Some(child), gate, _folder: folder })
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
        let failed = |gate: &Path, source| LaunchError::Gate { path: gate.to_owned(), source };
        let Some(mut child) = self.child.take() else {
            return Err(failed(&self.gate, io::ErrorKind::NotFound.into()));
        };
        // Without O_NONBLOCK the open would wait for ever if the child had died; with it, it fails until the child has opened its
        // end (ENXIO), so try until the child is there or gone.
        let mut opened = loop {
            match OpenOptions::new().write(true).custom_flags(nonblock()).open(&self.gate) {
                Ok(file) => break file,
                Err(source) => match child.try_wait() {
                    Ok(None) => std::thread::yield_now(),
                    _ => return Err(failed(&self.gate, source)),
                },
            }
        };
        opened.write_all(b"!").map_err(|source| failed(&self.gate, source))?;
        Ok(child)
    }
}

/// A name nobody has: the pid alone could be one that a killed recorder left behind.
fn free_folder() -> PathBuf {
    let named = |n: u32| std::env::temp_dir().join(format!("perfusion-gate-{}-{n}", std::process::id()));
    (0..1_000).map(named).find(|path| path.symlink_metadata().is_err()).unwrap_or_else(|| named(0))
}

fn nonblock() -> i32 {
    i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0)
}

/// The child's side: waits at `gate`, then becomes `command`. Returns only with what went wrong.
#[must_use]
pub fn exec_when_ready(gate: &Path, command: &[String]) -> io::Error {
    let mut go = [0u8; 1];
    // End of file instead of the byte: the recorder gave up, so CMD must not run.
    if let Err(error) = File::open(gate).and_then(|mut file| file.read_exact(&mut go)) {
        return error;
    }
    let Some((program, arguments)) = command.split_first() else {
        return io::Error::other("no command");
    };
    Command::new(program).args(arguments).exec()
}
