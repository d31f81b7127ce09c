//! `cargo xtask setup`: installs what is missing, says so before it touches anything outside the target folder, and prints versions.
//! With everything there it needs no network and changes nothing.

mod csharp;
pub(crate) mod debian;
mod dotnet;
mod ebpf;
mod package;

use std::{
    fs::{self, File},
    process::Command,
};

use anyhow::{Context, Result};

pub(crate) use ebpf::EbpfToolchain;

use crate::{
    exec::{Steps, version},
    paths::Paths,
};

/// Lays out all tools and returns what the eBPF build needs.
pub(crate) fn setup(paths: &Paths, steps: &Steps) -> Result<EbpfToolchain> {
    fs::create_dir_all(&paths.toolchain)
        .with_context(|| format!("{}: cannot be made", paths.toolchain.display()))?;
    // Two commands may share the folder: the second one waits, then finds everything there.
    let lock_path = paths.toolchain.join("lock");
    let lock =
        File::create(&lock_path).with_context(|| format!("{}: cannot be made", lock_path.display()))?;
    lock.lock().with_context(|| format!("{}: cannot be locked", lock_path.display()))?;

    debian::install(steps, &debian::PACKAGES)?;
    dotnet::install(paths, steps)?;
    csharp::install(paths, steps)?;
    let ebpf = ebpf::install(paths, steps)?;
    print_versions(paths, &ebpf);
    Ok(ebpf)
}

fn print_versions(paths: &Paths, ebpf: &EbpfToolchain) {
    let show = |name: &str, command: &mut Command| {
        println!("  {name:<14} {}", version(command).unwrap_or_else(|| "not found".to_owned()));
    };
    show("rustc", Command::new("rustc").arg("--version"));
    show("rustc for BPF", Command::new(&ebpf.rustc).arg("--version"));
    show("bpf-linker", Command::new(&ebpf.linker).arg("--version"));
    for (name, major) in [(".NET 8", "8"), (".NET 9", "9"), (".NET 10", "10")] {
        show(name, Command::new(paths.dotnet(major)).arg("--list-runtimes"));
    }
    show("C# compiler", Command::new(paths.csc()).arg("--version"));
    show("go", Command::new("go").arg("version"));
    show("python", Command::new("python3").arg("--version"));
    show("node", Command::new("node").arg("--version"));
}
