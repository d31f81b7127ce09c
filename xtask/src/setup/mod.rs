//! `cargo xtask setup`: installs what is missing, says so before it touches anything outside the
//! target folder, and prints versions. With everything there it needs no network and changes
//! nothing. Each command asks for what it needs: everything is built without .NET, the demo runs on
//! any, the tests on pinned ones.

mod csharp;
pub(crate) mod debian;
mod dotnet;
mod ebpf;
pub(crate) mod go;
mod musl;
pub(crate) mod package;
mod sdk;
mod single_file;

use std::{
    fs::{self, File},
    process::Command,
    thread,
};

use anyhow::{Context, Result};

use self::sdk::Sdk;
pub(crate) use self::{ebpf::EbpfToolchain, sdk::Dotnet};

use crate::{
    exec::{StepLog, joined, version},
    paths::WorkspacePaths,
};

/// `cargo xtask setup`.
pub(crate) fn everything(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    build_tools(paths, steps)?;
    any_dotnet(paths, steps)?;
    show("go", Command::new("go").arg("version"));
    show("python", Command::new("python3").arg("--version"));
    show("node", Command::new("node").arg("--version"));
    Ok(())
}

/// What everything is built with.
pub(crate) fn build_tools(paths: &WorkspacePaths, steps: &StepLog) -> Result<EbpfToolchain> {
    let _lock = lock(paths)?;
    debian::install(steps, &debian::BUILD)?;
    compilers(paths, steps)
}

/// The compilers, once Debian's packages are there.
fn compilers(paths: &WorkspacePaths, steps: &StepLog) -> Result<EbpfToolchain> {
    let ebpf = ebpf::install(paths, steps)?;
    show("rustc", Command::new("rustc").arg("--version"));
    show("rustc for BPF", Command::new(&ebpf.rustc).arg("--version"));
    show("bpf-linker", Command::new(&ebpf.linker).arg("--version"));
    Ok(ebpf)
}

/// A .NET that compiles and runs a program: what is on PATH, else one pinned runtime and the pinned
/// compiler.
pub(crate) fn any_dotnet(paths: &WorkspacePaths, steps: &StepLog) -> Result<Dotnet> {
    let _lock = lock(paths)?;
    let chosen = ChosenDotnet::choose(steps);
    debian::install(steps, chosen.packages())?;
    chosen.install(paths, steps)
}

/// What is built with, and a .NET, which is fetched while the compiler is at work.
pub(crate) fn build_tools_and_dotnet(
    paths: &WorkspacePaths,
    steps: &StepLog,
) -> Result<(EbpfToolchain, Dotnet)> {
    let _lock = lock(paths)?;
    let chosen = ChosenDotnet::choose(steps);
    // At once: two of these commands cannot run side by side.
    debian::install(steps, &[&debian::BUILD, chosen.packages()].concat())?;
    let (ebpf, dotnet) = thread::scope(|scope| {
        let dotnet = scope.spawn(|| chosen.install(paths, steps));
        (compilers(paths, steps), joined(dotnet))
    });
    Ok((ebpf?, dotnet?))
}

/// Where the .NET for a program of ours comes from.
enum ChosenDotnet {
    OnPath(Sdk),
    Pinned,
}

impl ChosenDotnet {
    fn choose(steps: &StepLog) -> ChosenDotnet {
        match Dotnet::on_path() {
            Ok(sdk) => ChosenDotnet::OnPath(sdk),
            Err(reason) => {
                steps.step(&format!("{reason}: a pinned .NET is used"));
                ChosenDotnet::Pinned
            }
        }
    }

    /// What it needs to be installed.
    fn packages(&self) -> &'static [debian::DebianPackage] {
        match self {
            ChosenDotnet::OnPath(_) => &[],
            ChosenDotnet::Pinned => &debian::DOTNET,
        }
    }

    fn install(self, paths: &WorkspacePaths, steps: &StepLog) -> Result<Dotnet> {
        let dotnet = match self {
            ChosenDotnet::OnPath(sdk) => Dotnet::Installed(sdk),
            ChosenDotnet::Pinned => {
                dotnet::install(paths, steps, &[sdk::PINNED])?;
                csharp::install(paths, steps)?;
                Dotnet::pinned(paths)
            }
        };
        dotnet.describe(steps);
        Ok(dotnet)
    }
}

/// The runtimes 8, 9 and 10 that tests and benchmarks run on, 11 where there is a copy of it, those
/// on musl that can be had, and their compiler: the same everywhere, whatever is on PATH.
pub(crate) fn pinned_dotnets(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    let _lock = lock(paths)?;
    debian::install(steps, &[&debian::DOTNET[..], &debian::MUSL].concat())?;
    dotnet::install(paths, steps, &dotnet::MAJORS)?;
    dotnet::install_beside(paths, steps)?;
    single_file::install(paths, steps)?;
    musl::install(paths, steps)?;
    csharp::install(paths, steps)?;
    for major in ["8", "9", "10", "11", "11-musl"] {
        show(&format!(".NET {major}"), Command::new(paths.dotnet(major)).arg("--list-runtimes"));
    }
    show("C# compiler", Command::new(paths.csc()).arg("--version"));
    Ok(())
}

/// Two commands may share the folder: the second one waits, then finds everything there.
fn lock(paths: &WorkspacePaths) -> Result<File> {
    fs::create_dir_all(&paths.toolchain)
        .with_context(|| format!("{}: cannot be made", paths.toolchain.display()))?;
    let path = paths.toolchain.join("lock");
    let lock =
        File::create(&path).with_context(|| format!("{}: cannot be made", path.display()))?;
    lock.lock().with_context(|| format!("{}: cannot be locked", path.display()))?;
    Ok(lock)
}

fn show(name: &str, command: &mut Command) {
    println!("  {name:<14} {}", version(command).unwrap_or_else(|| "not found".to_owned()));
}
