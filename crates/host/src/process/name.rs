//! The name of a process: one rule for all places that show one (the label `process`, the daemon's
//! service, `ps`, `dump`, `heap`, `leaks`, errors). docs/names.md states the rule for users.
//!
//! 1. The .NET application, where the executable is `dotnet`, the host that takes an application as
//!    an argument. Its arguments are read as `hostfxr` reads them
//!    (src/native/corehost/fxr/command_line.cpp of dotnet/runtime). Where they name no application,
//!    because the program has overwritten them, the application is looked for among the mapped
//!    assemblies.
//! 2. The file name of the executable. The host of one application (`apphost`, a single file,
//!    NativeAOT) bears its name.
//! 3. The command name of the kernel, where the executable cannot be seen.
//!
//! The first two do not change when the process renames its main thread or is started by another
//! path. A process decides what its files are called, so a name is text of unknown origin:
//! printable, and at most [`CHARACTERS`] long.

use crate::process::handle::ProcessHandle;
use perfusion_model::text::printable;
use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Characters of a name at most.
pub(crate) const CHARACTERS: usize = 100;
/// File name of the host that takes an application as its argument. It refuses to run under another
/// one (src/native/corehost/corehost.cpp); a link to it is resolved by the kernel.
const MUXER: &str = "dotnet";
/// Options of the host that take a value, and whether only `dotnet exec` knows them.
const HOST_OPTIONS: [(&str, bool); 7] = [
    ("--additionalprobingpath", false),
    ("--depsfile", true),
    ("--runtimeconfig", true),
    ("--fx-version", false),
    ("--roll-forward", false),
    ("--additional-deps", false),
    ("--roll-forward-on-no-candidate-fx", false),
];
/// Ends of file names of applications.
const APPLICATIONS: [&str; 2] = [".dll", ".exe"];
/// The assembly that every framework has: others of its directory are no applications.
const CORE_LIBRARY: &str = "System.Private.CoreLib.dll";
/// Mapped assemblies that are looked at for the application at most.
const MAX_ASSEMBLIES: usize = 4096;

/// The name of a process; empty when it is gone.
#[must_use]
pub fn of(target: &ProcessHandle) -> String {
    of_program(target).or_else(|| target.comm().ok()).unwrap_or_default()
}

/// The name that its program gives it: the first two parts of the rule. `None` where the executable
/// cannot be seen.
#[must_use]
pub fn of_program(target: &ProcessHandle) -> Option<String> {
    let executable = target.executable_name()?;
    let application = if executable == MUXER { application(target) } else { None };
    let name: String =
        printable(&application.unwrap_or(executable)).chars().take(CHARACTERS).collect();
    Some(name)
}

/// The name of a process that is followed by the kernel's records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessName {
    text: String,
    /// Whether the program gave it; else it is the command name, which follows each renaming.
    of_program: bool,
}

impl ProcessName {
    /// Of the process that has `pid` now, of which a record or `/proc` has told the command name
    /// `comm`.
    ///
    /// A record may be read when the process has become another program already: then the command
    /// names differ, and what `/proc` shows is not the name of the program that the record is of.
    #[must_use]
    pub fn of(pid: u32, comm: &str) -> Self {
        let target = ProcessHandle::open(pid).ok();
        let is_it = |target: &ProcessHandle| target.comm().is_ok_and(|now| now == printable(comm));
        match target.filter(is_it).as_ref().and_then(of_program) {
            Some(text) => Self { text, of_program: true },
            None => Self { text: printable(comm), of_program: false },
        }
    }

    /// The first thread of `pid` has taken the command name `comm`.
    pub fn renamed(&mut self, pid: u32, comm: &str) {
        if !self.of_program {
            *self = Self::of(pid, comm);
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// The application that `dotnet` runs.
fn application(target: &ProcessHandle) -> Option<String> {
    let arguments = target.arguments().ok()?;
    argument(&arguments).and_then(stem).or_else(|| mapped_application(target))
}

/// The application among the arguments of `dotnet`, as the host finds it.
fn argument(arguments: &[String]) -> Option<&str> {
    let mut rest = arguments.get(1..)?;
    let is_exec = rest.first()?.eq_ignore_ascii_case("exec");
    if is_exec {
        rest = rest.get(1..)?;
    }
    loop {
        let first = rest.first()?;
        let is_option = HOST_OPTIONS
            .iter()
            .any(|(name, exec_only)| (is_exec || !exec_only) && first.eq_ignore_ascii_case(name));
        if !is_option {
            return Some(first.as_str()).filter(|argument| is_application(argument));
        }
        rest = rest.get(2..)?;
    }
}

fn is_application(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    APPLICATIONS.iter().any(|end| path.ends_with(end))
}

fn stem(path: &str) -> Option<String> {
    Path::new(path).file_stem()?.to_str().map(str::to_owned)
}

/// The one mapped assembly with a `NAME.runtimeconfig.json` beside it; else the only one outside
/// the frameworks. `None` where several could be it. An SDK command (`dotnet build`) has its own,
/// `dotnet.dll`.
fn mapped_application(target: &ProcessHandle) -> Option<String> {
    let mut assemblies: BTreeSet<PathBuf> = BTreeSet::new();
    let maps = target.maps(|line| {
        let name = line.name.strip_suffix(" (deleted)").unwrap_or(&line.name);
        if name.starts_with('/') && is_application(name) {
            assemblies.insert(PathBuf::from(name));
        }
        assemblies.len() < MAX_ASSEMBLIES
    });
    maps.ok()?;
    let root = target.root().ok()?;
    let has_configuration = |path: &&PathBuf| {
        let beside = path.with_extension("runtimeconfig.json");
        crate::process::handle::open_below(&root, &beside, OFlags::PATH).is_ok()
    };
    let configured: BTreeSet<&PathBuf> = assemblies.iter().filter(has_configuration).collect();
    if let Some(name) = only(configured.iter().copied()) {
        return Some(name);
    }
    if configured.iter().any(|path| path.file_stem().is_some_and(|stem| stem == MUXER)) {
        return Some(MUXER.to_owned());
    }
    // `…/shared/NAME/VERSION` of every framework; a self-contained application has all in one
    // directory.
    let core = assemblies.iter().find(|path| path.ends_with(CORE_LIBRARY))?;
    let frameworks = core.ancestors().nth(3)?;
    only(assemblies.iter().filter(|path| !path.starts_with(frameworks)))
}

/// The name of the only one.
fn only<'a>(mut paths: impl Iterator<Item = &'a PathBuf>) -> Option<String> {
    let first = paths.next()?;
    if paths.next().is_some() {
        return None;
    }
    first.file_stem()?.to_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::{ProcessName, argument, of, of_program, stem};
    use crate::process::handle::ProcessHandle;

    fn application(line: &str) -> Option<String> {
        let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
        argument(&arguments).and_then(stem)
    }

    #[test]
    fn the_application_is_the_argument_that_the_host_takes_for_it() {
        for (line, name) in [
            ("dotnet /srv/My.App.dll --secret=x.dll", Some("My.App")),
            ("dotnet exec --depsfile a.json App.DLL", Some("App")),
            ("dotnet EXEC App.exe", Some("App")),
            ("dotnet --additionalprobingpath /x/y.dll App.dll", Some("App")),
            ("dotnet --FX-Version 8.0.1 --roll-forward Major ./App.dll run", Some("App")),
            (
                "dotnet exec --runtimeconfig /a/b.dll --additional-deps c.dll /w/Shop.dll",
                Some("Shop"),
            ),
            // Only `exec` knows this option: the host takes it for a command of the SDK.
            ("dotnet --depsfile a.json App.dll", None),
            ("dotnet build App.dll", None),
            ("dotnet --additionalprobingpath /x/y.dll", None),
            ("dotnet exec", None),
            ("dotnet", None),
            ("", None),
        ] {
            assert_eq!(application(line).as_deref(), name, "{line}");
        }
    }

    #[test]
    fn a_process_without_an_application_is_called_as_its_executable() {
        let me = ProcessHandle::open(std::process::id()).unwrap();
        let executable = std::env::current_exe().unwrap();
        let name = executable.file_name().and_then(|name| name.to_str()).unwrap();
        assert_eq!(of(&me), name);
        assert_eq!(of_program(&me).as_deref(), Some(name));
    }

    #[test]
    fn a_record_that_is_read_late_names_the_program_it_is_of() {
        let pid = std::process::id();
        let comm = ProcessHandle::open(pid).unwrap().comm().unwrap();
        let executable = of(&ProcessHandle::open(pid).unwrap());
        let mut late = ProcessName::of(pid, "program before");
        assert_eq!(late.as_str(), "program before");
        // A thread that was renamed at once looks the same until the record of that comes.
        late.renamed(pid, &comm);
        assert_eq!(late.as_str(), executable);
        late.renamed(pid, "another");
        assert_eq!(late.as_str(), executable, "a renamed thread does not rename its process");
        let mut gone = ProcessName::of(u32::MAX, "gone");
        gone.renamed(u32::MAX, "renamed");
        assert_eq!(gone.as_str(), "renamed");
    }
}
