//! The .NET that programs of ours are compiled with and run on when any will do: the SDK of the
//! `dotnet` on PATH if it is a usable one, else what [`super::dotnet`] and [`super::csharp`] lay
//! out.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    exec::{StepLog, outcome, output, write_if_changed},
    paths::WorkspacePaths,
};

/// Major versions of the runtime that the shim knows.
const MAJORS: std::ops::RangeInclusive<u32> = 8..=10;

/// Major version of the pinned runtime that the pinned compiler and the demo run on.
pub(super) const PINNED: &str = "9";

/// A .NET that compiles and runs.
pub(crate) enum Dotnet {
    /// Of PATH.
    Installed(Sdk),
    /// Laid out by setup: its `dotnet` and its compiler.
    Pinned { dotnet: PathBuf, csc: PathBuf },
}

/// What the `dotnet` on PATH has.
#[derive(Debug, PartialEq)]
pub(crate) struct Sdk {
    /// Version of the SDK whose compiler is used.
    version: String,
    csc: PathBuf,
    /// Version of the newest runtime that the shim knows.
    runtime: String,
    /// Its assemblies.
    framework: PathBuf,
}

impl Dotnet {
    /// The SDK of PATH, or why there is no usable one.
    pub(crate) fn on_path() -> Result<Sdk, String> {
        let list = |what: &str| match outcome(Command::new("dotnet").arg(what)) {
            Err(_) => Err("there is no `dotnet` on PATH".to_owned()),
            Ok(said) if !said.status.success() => {
                Err(format!("the `dotnet` on PATH ended with {} when asked {what}", said.status))
            }
            Ok(said) => Ok(String::from_utf8_lossy(&said.stdout).into_owned()),
        };
        choose(&list("--list-sdks")?, &list("--list-runtimes")?, Path::exists)
    }

    pub(crate) fn pinned(paths: &WorkspacePaths) -> Dotnet {
        Dotnet::Pinned { dotnet: paths.dotnet(PINNED), csc: paths.csc() }
    }

    /// The command that runs a program.
    pub(crate) fn command(&self) -> Command {
        match self {
            Dotnet::Installed(_) => Command::new("dotnet"),
            Dotnet::Pinned { dotnet, .. } => Command::new(dotnet),
        }
    }

    /// Tells what is compiled by one .NET from what is compiled by another; fit for a folder's
    /// name.
    pub(crate) fn id(&self) -> String {
        match self {
            Dotnet::Installed(sdk) => format!("sdk-{}-{}", sdk.version, sdk.runtime),
            Dotnet::Pinned { .. } => "pinned".to_owned(),
        }
    }

    /// Compiles one source file to a program.
    pub(crate) fn compile(&self, source: &Path, program: &Path) -> Result<()> {
        match self {
            Dotnet::Installed(sdk) => sdk.compile(source, program),
            Dotnet::Pinned { csc, .. } => {
                // Only this runtime is laid out for the demo, and it is what the program runs on.
                let framework = ["--framework", PINNED];
                output(Command::new(csc).args(framework).arg(program).arg(source)).map(drop)
            }
        }
    }

    pub(crate) fn describe(&self, steps: &StepLog) {
        match self {
            Dotnet::Installed(sdk) => {
                steps.step(&format!(
                    ".NET: SDK {} and runtime {} on PATH",
                    sdk.version, sdk.runtime
                ));
            }
            Dotnet::Pinned { dotnet, .. } => steps.step(&format!(".NET: {}", dotnet.display())),
        }
    }
}

impl Sdk {
    fn compile(&self, source: &Path, program: &Path) -> Result<()> {
        let assemblies = fs::read_dir(&self.framework)
            .with_context(|| format!("{}: cannot be listed", self.framework.display()))?;
        let assemblies = assemblies
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.extension().is_some_and(|ending| ending == "dll"))
            .map(|path| format!("-reference:{}", path.display()));
        output(
            Command::new("dotnet")
                .arg("exec")
                .arg(&self.csc)
                .args([
                    "-noconfig",
                    "-nostdlib",
                    "-nologo",
                    "-optimize+",
                    "-unsafe",
                    "-langversion:latest",
                ])
                .args(["-debug:portable", "-deterministic"])
                .args(assemblies)
                .arg(format!("-out:{}", program.display()))
                .arg(source)
                // No ICU library has to be installed, here and for the program below.
                .env("DOTNET_SYSTEM_GLOBALIZATION_INVARIANT", "1"),
        )?;
        let config = serde_json::json!({ "runtimeOptions": {
            "framework": { "name": "Microsoft.NETCore.App", "version": self.runtime },
            "configProperties": { "System.Globalization.Invariant": true },
        } });
        write_if_changed(
            &program.with_extension("runtimeconfig.json"),
            config.to_string().as_bytes(),
        )
    }
}

/// Takes the newest SDK that has a compiler and the newest runtime that the shim knows, from what
/// `dotnet --list-sdks` (`VERSION [FOLDER]`) and `dotnet --list-runtimes` (`NAME VERSION [FOLDER]`)
/// say.
fn choose(sdks: &str, runtimes: &str, exists: impl Fn(&Path) -> bool) -> Result<Sdk, String> {
    let found = |line: &str| {
        let (version, folder) = line.trim().split_once(" [")?;
        Some((version.to_owned(), PathBuf::from(folder.strip_suffix(']')?)))
    };
    let compilers = sdks.lines().filter_map(found).map(|(version, folder)| {
        let csc = folder.join(&version).join("Roslyn/bincore/csc.dll");
        (version, csc)
    });
    let (version, csc) = compilers
        .filter(|(_, csc)| exists(csc))
        .max_by_key(|(version, _)| numbers(version))
        .ok_or("the `dotnet` on PATH has no SDK with a C# compiler")?;
    let frameworks =
        runtimes.lines().filter_map(|line| found(line.strip_prefix("Microsoft.NETCore.App ")?));
    let (runtime, folder) = frameworks
        .filter(|(version, _)| numbers(version).first().is_some_and(|major| MAJORS.contains(major)))
        .max_by_key(|(version, _)| numbers(version))
        .ok_or("the `dotnet` on PATH has no runtime 8, 9 or 10")?;
    let framework = folder.join(&runtime);
    Ok(Sdk { version, csc, runtime, framework })
}

/// The numbers of a version. A preview counts as what it comes before.
fn numbers(version: &str) -> Vec<u32> {
    let release = version.split('-').next().unwrap_or_default();
    release.split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::{choose, numbers};
    use std::path::Path;

    const SDKS: &str = "8.0.404 [/usr/lib/dotnet/sdk]\n10.0.100-rc.1.2 \
         [/usr/lib/dotnet/sdk]\n9.0.101 [/usr/lib/dotnet/sdk]\n";
    const RUNTIMES: &str = "Microsoft.AspNetCore.App 10.0.0 \
         [/usr/lib/dotnet/shared/Microsoft.AspNetCore.App]\n\
        Microsoft.NETCore.App 6.0.36 [/usr/lib/dotnet/shared/Microsoft.NETCore.App]\n\
        Microsoft.NETCore.App 9.0.9 [/usr/lib/dotnet/shared/Microsoft.NETCore.App]\n\
        Microsoft.NETCore.App 9.0.10 [/usr/lib/dotnet/shared/Microsoft.NETCore.App]\n\
        Microsoft.NETCore.App 11.0.0 [/usr/lib/dotnet/shared/Microsoft.NETCore.App]\n";

    #[test]
    fn the_newest_compiler_and_the_newest_known_runtime_are_taken() {
        let sdk =
            choose(SDKS, RUNTIMES, |path| !path.starts_with("/usr/lib/dotnet/sdk/10.0.100-rc.1.2"))
                .unwrap();
        assert_eq!(sdk.csc, Path::new("/usr/lib/dotnet/sdk/9.0.101/Roslyn/bincore/csc.dll"));
        assert_eq!(sdk.framework, Path::new("/usr/lib/dotnet/shared/Microsoft.NETCore.App/9.0.10"));
        assert_eq!((sdk.version.as_str(), sdk.runtime.as_str()), ("9.0.101", "9.0.10"));
        assert!(numbers("10.0.100-rc.1.2") > numbers("9.0.101"));
    }

    #[test]
    fn a_dotnet_that_lacks_something_is_not_used() {
        let reason = |sdks: &str, runtimes: &str, there: bool| {
            choose(sdks, runtimes, |_| there).unwrap_err()
        };
        assert!(reason("", RUNTIMES, true).contains("no SDK"));
        assert!(reason(SDKS, RUNTIMES, false).contains("no SDK"));
        assert!(reason(SDKS, "Microsoft.NETCore.App 6.0.36 [/x]\n", true).contains("no runtime"));
    }
}
