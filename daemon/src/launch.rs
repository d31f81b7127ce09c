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

/// A child that waits at its gate. Dropping it without [`Gated::release`] lets the child end without ever running CMD.
pub struct Gated {
    child: Child,
    gate: PathBuf,
    folder: PathBuf,
}

impl Gated {
    /// Starts the waiting child. `environment` is added to the child's own.
    ///
    /// # Errors
    /// When the gate or the child cannot be made.
    pub fn spawn(command: &[String], environment: &[(OsString, OsString)]) -> Result<Self, LaunchError> {
        let folder = std::env::temp_dir().join(format!("perfusion-gate-{}", std::process::id()));
        let gate = folder.join("gate");
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| LaunchError::Gate { path, source }
        };
        // 0700 and freshly made: nobody else can open the gate or have put something else at its place.
        std::fs::DirBuilder::new().mode(0o700).create(&folder).map_err(at(&folder))?;
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
        Ok(Self { child, gate, folder })
    }

    /// The pid CMD will have.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets the child become CMD.
    ///
    /// # Errors
    /// When the child is gone already.
    pub fn release(mut self) -> Result<Child, LaunchError> {
        let gate = self.gate.clone();
        // Without O_NONBLOCK the open would wait for ever if the child had died; with it, it fails until the child has opened its
        // end (ENXIO), so try until the child is there or gone.
        let mut opened = loop {
            match OpenOptions::new().write(true).custom_flags(nonblock()).open(&gate) {
                Ok(file) => break file,
                Err(source) => match self.child.try_wait() {
                    Ok(None) => std::thread::yield_now(),
                    _ => return Err(LaunchError::Gate { path: gate, source }),
                },
            }
        };
        opened.write_all(b"!").map_err(|source| LaunchError::Gate { path: gate, source })?;
        let _gone = std::fs::remove_dir_all(&self.folder).is_ok();
        Ok(self.child)
    }
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
