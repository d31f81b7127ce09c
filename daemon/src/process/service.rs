//! Which service a process belongs to: the name its profile is filed under.
//!
//! Taken from the first of: `OTEL_SERVICE_NAME`, `DD_SERVICE`, the label of its pod that names the application (`app.kubernetes.io/name`, `app`),
//! the .NET entry assembly, the executable's name, the command name. A process that is gone before it was asked about has the last of
//! these. A process chooses its own name, and only its own: the name is cut, cleaned, and never taken for a path.

use crate::attach::target::{Target, printable};
use crate::kubernetes::pods::Pods;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// Characters of a name at most.
const NAME_CHARACTERS: usize = 100;
/// The kernel's threads together.
pub const KERNEL: &str = "[kernel]";
/// Variables that name the service, in the order they count.
const VARIABLES: [&str; 2] = ["OTEL_SERVICE_NAME", "DD_SERVICE"];

/// Service names by pid, each looked up once in the life of a program.
#[derive(Debug, Default)]
pub struct Services {
    by_pid: HashMap<u32, Known>,
    /// Equal names are one string.
    names: HashSet<Arc<str>>,
    pods: Arc<Pods>,
}

#[derive(Clone, Debug)]
struct Known {
    name: Arc<str>,
    /// The pod that may name it better, of which nothing is known yet.
    waits_for: Option<Arc<str>>,
}

impl Services {
    /// With the pods that name some.
    #[must_use]
    pub fn with(pods: Arc<Pods>) -> Self {
        Self { pods, ..Self::default() }
    }

    /// The service of the process that has `pid` now; `comm` names it when it is gone.
    pub fn of(&mut self, pid: u32, comm: &str) -> Arc<str> {
        if let Some(known) = self.by_pid.get(&pid)
            && known.waits_for.as_ref().is_none_or(|uid| self.pods.get(uid).is_none())
        {
            return Arc::clone(&known.name);
        }
        let mut waits_for = None;
        let found = match Target::open(pid) {
            Ok(target) => {
                let uid = target.pod().ok().flatten();
                let pod = uid.as_deref().and_then(|uid| self.pods.get(uid));
                waits_for = uid.filter(|_| pod.is_none()).map(Into::into);
                look(&target, pod.as_deref().and_then(|pod| pod.app()))
            }
            // Workers come and go as they are needed (kernel/workqueue.c); no other thread of the kernel does.
            Err(_) => comm.starts_with("kworker/").then(|| KERNEL.to_owned()),
        };
        let name = found.or_else(|| clean(comm)).unwrap_or_else(|| "[unknown]".to_owned());
        let name: Arc<str> = match self.names.get(name.as_str()) {
            Some(known) => Arc::clone(known),
            None => name.into(),
        };
        self.names.insert(Arc::clone(&name));
        self.by_pid.insert(pid, Known { name: Arc::clone(&name), waits_for });
        name
    }

    /// The same if it was looked up before.
    #[must_use]
    pub fn known(&self, pid: u32) -> Option<Arc<str>> {
        self.by_pid.get(&pid).map(|known| Arc::clone(&known.name))
    }

    /// `child` was forked from `parent`, and belongs where that does until it becomes another program.
    pub fn forked(&mut self, parent: u32, child: u32) {
        match self.by_pid.get(&parent).cloned() {
            Some(known) => drop(self.by_pid.insert(child, known)),
            None => drop(self.by_pid.remove(&child)),
        }
    }

    /// `pid` became another program.
    pub fn became_another(&mut self, pid: u32) {
        self.by_pid.remove(&pid);
    }

    /// Forgets all processes but these.
    pub fn keep(&mut self, alive: &HashSet<u32>) {
        self.by_pid.retain(|pid, _| alive.contains(pid));
        let used: HashSet<&Arc<str>> = self.by_pid.values().map(|known| &known.name).collect();
        self.names.retain(|name| used.contains(name));
    }

    /// Forgets all: any of them may be another program by now.
    pub fn doubt(&mut self) {
        self.by_pid.clear();
    }
}

/// The service of a process, as far as it can be seen; `app` is what its pod calls itself.
fn look(target: &Target, app: Option<&str>) -> Option<String> {
    if target.is_kernel_thread() {
        return Some(KERNEL.to_owned());
    }
    let named = VARIABLES.iter().find_map(|name| clean(&target.environment(name).ok()??));
    named.or_else(|| clean(app?)).or_else(|| {
        let executable = target.executable_name()?;
        let assembly = if executable == "dotnet" { entry_assembly(&target.arguments().ok()?) } else { None };
        clean(&assembly.unwrap_or(executable))
    })
}

/// `App` of `dotnet [options] /app/App.dll …`. Nothing else of the arguments is used.
fn entry_assembly(arguments: &[String]) -> Option<String> {
    let assembly = arguments.iter().skip(1).map(Path::new).find(|argument| {
        argument.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("dll"))
    })?;
    assembly.file_stem()?.to_str().map(str::to_owned)
}

/// A name that may be shown, or nothing.
fn clean(name: &str) -> Option<String> {
    let name: String = printable(name.trim()).chars().take(NAME_CHARACTERS).collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::{Services, clean, entry_assembly};
    use std::collections::HashSet;
    use std::process::{Child, Command};

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().ok();
            self.0.wait().ok();
        }
    }

    /// A child that has become `sleep`: the parent of a spawn goes on a moment before the kernel shows the new environment.
    fn sleeper(variables: &[(&str, &str)]) -> Sleeper {
        let mut command = Command::new("sleep");
        command.arg("600").env_remove("OTEL_SERVICE_NAME").env_remove("DD_SERVICE").env("READY", "1");
        let child = Sleeper(command.envs(variables.iter().copied()).spawn().unwrap());
        let environment = || std::fs::read(format!("/proc/{}/environ", child.0.id())).unwrap();
        while !environment().windows(7).any(|part| part == b"READY=1") {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_name_of_opentelemetry_comes_before_datadogs_and_both_before_the_executables() {
        let mut services = Services::default();
        for (variables, name) in [
            (&[("OTEL_SERVICE_NAME", "orders"), ("DD_SERVICE", "old")][..], "orders"),
            (&[("OTEL_SERVICE_NAME", "  "), ("DD_SERVICE", "carts")], "carts"),
            (&[], "sleep"),
        ] {
            let child = sleeper(variables);
            assert_eq!(&*services.of(child.0.id(), "comm"), name);
        }
    }

    #[test]
    fn a_pods_label_names_what_no_variable_does_and_better_than_the_executable() {
        let child = sleeper(&[("DD_SERVICE", "carts")]);
        let target = |child: &Sleeper| crate::attach::target::Target::open(child.0.id()).unwrap();
        assert_eq!(super::look(&target(&child), Some("web")).as_deref(), Some("carts"));
        let child = sleeper(&[]);
        assert_eq!(super::look(&target(&child), Some("web")).as_deref(), Some("web"));
        assert_eq!(super::look(&target(&child), Some(" ")).as_deref(), Some("sleep"));
        assert_eq!(super::look(&target(&child), None).as_deref(), Some("sleep"));
    }

    #[test]
    fn a_child_belongs_to_its_parents_service_until_it_becomes_another_program() {
        let mut services = Services::default();
        let child = sleeper(&[("DD_SERVICE", "parent")]);
        let pid = child.0.id();
        assert_eq!(&*services.of(pid, ""), "parent");
        services.forked(pid, u32::MAX);
        assert_eq!(&*services.of(u32::MAX, "gone"), "parent");
        services.became_another(u32::MAX);
        assert_eq!(&*services.of(u32::MAX, "gone"), "gone");
        services.keep(&HashSet::from([pid]));
        assert_eq!((services.by_pid.len(), services.names.len()), (1, 1));
    }

    #[test]
    fn the_entry_assembly_is_the_first_library_among_the_arguments() {
        let of = |text: &str| {
            let arguments: Vec<String> = text.split(' ').map(str::to_owned).collect();
            entry_assembly(&arguments)
        };
        assert_eq!(of("dotnet /srv/My.App.dll --secret=x.dll").as_deref(), Some("My.App"));
        assert_eq!(of("dotnet exec --depsfile a.json App.DLL").as_deref(), Some("App"));
        assert_eq!(of("dotnet build"), None);
    }

    #[test]
    fn names_are_cut_and_have_no_control_characters() {
        assert_eq!(clean("\u{1b}[31mred\n").as_deref(), Some("\u{fffd}[31mred"));
        assert_eq!(clean(&"é".repeat(300)).map(|name| name.chars().count()), Some(100));
        assert_eq!(clean(" \t"), None);
    }
}
