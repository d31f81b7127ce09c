//! The judges from outside: google/pprof's `CheckValid` and `go tool pprof`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, ensure};

use crate::environment::{cache_dir, sources};

/// Applies google/pprof's `CheckValid` to `profile`.
///
/// # Errors
/// What the parser refused.
pub fn check_valid(profile: &Path) -> anyhow::Result<String> {
    let program = checkvalid()?;
    let output = Command::new(program).arg(profile).output()?;
    ensure!(output.status.success(), "CheckValid: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Builds `checkvalid` (Go's own build cache makes this quick), once: another test may be running it.
fn checkvalid() -> anyhow::Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = &*built {
        return Ok(program.clone());
    }
    let program = cache_dir().join("checkvalid");
    let output = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(".")
        .current_dir(sources().join("checkvalid"))
        .output()
        .context("cannot run go")?;
    ensure!(output.status.success(), "go build: {}", String::from_utf8_lossy(&output.stderr));
    *built = Some(program.clone());
    Ok(program)
}

/// `go tool pprof -top -sample_index=T`: its table.
///
/// # Errors
/// When pprof refuses the file or the type.
pub fn pprof_top(profile: &Path, sample_type: &str) -> anyhow::Result<String> {
    let output = Command::new("go")
        .args(["tool", "pprof", "-top", "-nodecount=20", &format!("-sample_index={sample_type}")])
        .arg(profile)
        // It would look for binaries and symbol servers otherwise.
        .env("PPROF_BINARY_PATH", "/nonexistent")
        .output()
        .context("cannot run go tool pprof")?;
    ensure!(
        output.status.success(),
        "go tool pprof -sample_index={sample_type}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
