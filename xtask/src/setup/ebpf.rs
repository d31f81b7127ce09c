//! The eBPF toolchain: Debian's rustc with a prebuilt `core` for BPF, and a bpf-linker with the
//! same LLVM.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};

use crate::{
    exec::{StepLog, cargo, output, run, version},
    paths::WorkspacePaths,
};

/// rustc must not be newer than the linker's LLVM; this one links what `rustc-web` makes.
const LINKER_VERSION: &str = "0.13.0";
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// What builds the probes.
pub(crate) struct EbpfToolchain {
    pub(crate) rustc: PathBuf,
    pub(crate) cargo: PathBuf,
    pub(crate) linker: PathBuf,
    /// Of the linker's LLVM: it knows the machine.
    pub(crate) objcopy: PathBuf,
    /// There after `ci` has installed `rust-web-clippy`.
    pub(crate) clippy: PathBuf,
}

pub(crate) fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<EbpfToolchain> {
    // By path: a rustup in front on PATH has another rustc, without this target.
    let rustc = PathBuf::from("/usr/bin/rustc");
    let cargo = PathBuf::from("/usr/bin/cargo");
    let library = output(Command::new(&rustc).args([
        "--print",
        "target-libdir",
        "--target",
        "bpfel-unknown-none",
    ]))?;
    if !Path::new(library.trim()).is_dir() {
        bail!(
            "{}: expected the BPF target's core library there, found nothing; install \
             libstd-rust-web-dev-bpf",
            library.trim()
        );
    }
    Ok(EbpfToolchain {
        rustc,
        cargo,
        linker: linker(paths, steps)?,
        objcopy: Path::new(LLVM_PREFIX).join("bin/llvm-objcopy"),
        clippy: PathBuf::from("/usr/bin/clippy-driver"),
    })
}

/// Ours if it is there, else a fitting one on PATH, else built now.
fn linker(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    let root = paths.toolchain.join("bpf-linker");
    let own = root.join("bin/bpf-linker");
    for candidate in [own.clone(), PathBuf::from("bpf-linker")] {
        let found = version(Command::new(&candidate).arg("--version"));
        if found.is_some_and(|line| line.split_whitespace().any(|word| word == LINKER_VERSION)) {
            return Ok(candidate);
        }
    }
    steps.step(&format!("building bpf-linker {LINKER_VERSION}"));
    run(cargo(paths)
        .args([
            "install",
            "--quiet",
            "--locked",
            "--no-default-features",
            "--features",
            "llvm-22",
            "--version",
            LINKER_VERSION,
        ])
        .arg("--root")
        .arg(&root)
        .arg("--target-dir")
        .arg(paths.target.join("bpf-linker"))
        .arg("bpf-linker")
        .env("LLVM_PREFIX", LLVM_PREFIX))?;
    Ok(own)
}
