//! Which service a process belongs to: the name its profile is filed under.
//!
//! Taken from the first of: the name its OpenTelemetry SDK publishes ([`published`]), which has
//! made up its mind from code, configuration and environment; `OTEL_SERVICE_NAME`, `DD_SERVICE`,
//! the label of its pod that names the application (`app.kubernetes.io/name`, `app`), the name of
//! its process ([`super::name`]). A process that is gone before it was asked about has its command
//! name. A process chooses its own name, and only its own: the name is cut, cleaned, and never
//! taken for a path.
//!
//! An SDK publishes when the program has set it up, so a process is asked again, less and less
//! often; what was counted before stays under the name before.

use super::name::CHARACTERS;
use super::published::{self, Published};
use super::ticks_before_now;
use crate::pods::Pods;
use crate::process::handle::ProcessHandle;
use perfusion_model::backoff::Backoff;
use perfusion_model::labels::PublishedLabels;
use perfusion_model::text::printable;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The kernel's threads together.
pub const KERNEL: &str = "[kernel]";
/// Variables that name the service, in the order they count.
const VARIABLES: [&str; 2] = ["OTEL_SERVICE_NAME", "DD_SERVICE"];
/// A process that is younger is not asked what it publishes: most that end soon never do, and to
/// look takes a reading of its mappings.
const YOUNG: Duration = Duration::from_secs(3);
/// Longest time between two looks at what a process publishes. It doubles from [`YOUNG`] on.
const LONGEST: Duration = Duration::from_secs(600);

/// Delays after the first one, which was [`YOUNG`].
fn asked_once() -> Backoff {
    let mut backoff = Backoff::new(YOUNG, LONGEST);
    backoff.failed();
    backoff
}

/// Service names by pid, each looked up once in the life of a program.
#[derive(Debug, Default)]
pub struct ServiceNames {
    by_pid: HashMap<u32, KnownService>,
    /// Equal names are one string.
    names: HashSet<Arc<str>>,
    pods: Arc<Pods>,
}

#[derive(Clone, Debug)]
struct KnownService {
    name: Arc<str>,
    /// The pod that may name it better, of which nothing is known yet.
    waits_for: Option<Arc<str>>,
    /// What it publishes of itself.
    published: Option<Arc<PublishedLabels>>,
    /// It was looked at for that when it was no longer young.
    asked: bool,
    /// When it is asked for that again.
    next: Instant,
    backoff: Backoff,
}

impl ServiceNames {
    /// With the pods that name some.
    #[must_use]
    pub fn with(pods: Arc<Pods>) -> Self {
        Self { pods, ..Self::default() }
    }

    /// The service of the process that has `pid` now, and what it publishes; `comm` names it when
    /// it is gone.
    pub fn of(&mut self, pid: u32, comm: &str) -> (Arc<str>, Option<Arc<PublishedLabels>>) {
        let now = Instant::now();
        let known = self.by_pid.get(&pid);
        let known = known.filter(|known| {
            known.waits_for.as_ref().is_none_or(|uid| self.pods.get(uid).is_none())
        });
        if let Some(known) = known.filter(|known| now < known.next) {
            return (Arc::clone(&known.name), known.published.clone());
        }
        let known = match known.cloned() {
            Some(known) => self.ask_again(pid, known, now),
            None => self.look(pid, comm, now),
        };
        let answer = (Arc::clone(&known.name), known.published.clone());
        self.by_pid.insert(pid, known);
        answer
    }

    /// Looks for the first time.
    fn look(&mut self, pid: u32, comm: &str, now: Instant) -> KnownService {
        let (mut waits_for, mut published, mut asked) = (None, None, true);
        let found = match ProcessHandle::open(pid) {
            Ok(target) => {
                let uid = target.pod().ok().flatten();
                let pod = uid.as_deref().and_then(|uid| self.pods.get(uid));
                waits_for = uid.filter(|_| pod.is_none()).map(Into::into);
                asked = !is_young(&target);
                published = asked.then(|| published::read(&target)).flatten();
                let named =
                    published.as_ref().and_then(|published| clean(published.service.as_deref()?));
                named.or_else(|| look(&target, pod.as_deref().and_then(|pod| pod.app())))
            }
            // Workers come and go as they are needed (kernel/workqueue.c); no other thread of the
            // kernel does.
            Err(_) => comm.starts_with("kworker/").then(|| KERNEL.to_owned()),
        };
        let name = found.or_else(|| clean(comm)).unwrap_or_else(|| "[unknown]".to_owned());
        let published = published.map(|published| labels(pid, published));
        KnownService {
            name: self.shared(name),
            waits_for,
            published,
            asked,
            next: now + YOUNG,
            backoff: asked_once(),
        }
    }

    /// Looks once more at what it publishes. That it publishes nothing changes nothing: a child has
    /// its parent's name without publishing it.
    fn ask_again(&mut self, pid: u32, mut known: KnownService, now: Instant) -> KnownService {
        let next = now + known.backoff.failed();
        let known = KnownService { asked: true, next, ..known };
        let Some(published) =
            ProcessHandle::open(pid).ok().and_then(|target| published::read(&target))
        else {
            return known;
        };
        let name = match published.service.as_deref().and_then(clean) {
            Some(name) => self.shared(name),
            None => Arc::clone(&known.name),
        };
        let same = known.published.as_ref().is_some_and(|known| known.shown == published.shown);
        let published = if same { known.published } else { Some(labels(pid, published)) };
        KnownService { name, published, ..known }
    }

    fn shared(&mut self, name: String) -> Arc<str> {
        let name: Arc<str> = match self.names.get(name.as_str()) {
            Some(known) => Arc::clone(known),
            None => name.into(),
        };
        self.names.insert(Arc::clone(&name));
        name
    }

    /// Its name if it was looked up before.
    #[must_use]
    pub fn known(&self, pid: u32) -> Option<Arc<str>> {
        self.by_pid.get(&pid).map(|known| Arc::clone(&known.name))
    }

    /// False while it is so young that it was not looked at for what it publishes: it may name
    /// itself otherwise then.
    #[must_use]
    pub fn is_sure(&self, pid: u32) -> bool {
        self.by_pid.get(&pid).is_none_or(|known| known.asked)
    }

    /// What it published when it was looked at last.
    #[must_use]
    pub fn published(&self, pid: u32) -> Option<Arc<PublishedLabels>> {
        self.by_pid.get(&pid)?.published.clone()
    }

    /// `child` was forked from `parent`, and belongs where that does until it becomes another
    /// program.
    pub fn forked(&mut self, parent: u32, child: u32) {
        match self.by_pid.get(&parent).cloned() {
            Some(known) => {
                // The mapping is not inherited (MADV_DONTFORK): what it says of its parent's
                // instance is not so of the child.
                let known = KnownService {
                    published: None,
                    next: Instant::now() + YOUNG,
                    backoff: asked_once(),
                    ..known
                };
                self.by_pid.insert(child, known);
            }
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

/// Whether it has just begun; one that cannot say so has.
fn is_young(target: &ProcessHandle) -> bool {
    target.start_ticks().map_or(true, |start| start > ticks_before_now(YOUNG))
}

fn labels(pid: u32, published: Published) -> Arc<PublishedLabels> {
    Arc::new(PublishedLabels { pid, shown: published.shown })
}

/// The service of a process, as far as it can be seen; `app` is what its pod calls itself.
fn look(target: &ProcessHandle, app: Option<&str>) -> Option<String> {
    if target.is_kernel_thread() {
        return Some(KERNEL.to_owned());
    }
    let named = VARIABLES.iter().find_map(|name| clean(&target.environment(name).ok()??));
    named.or_else(|| clean(app?)).or_else(|| clean(&super::name::of_program(target)?))
}

/// A name that may be shown, or nothing. What is in brackets has that name from us (`[kernel]`,
/// `[other]`): nobody takes it for himself.
fn clean(name: &str) -> Option<String> {
    let name: String = printable(name.trim()).chars().take(CHARACTERS).collect();
    let inner = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let name = inner.map(|inner| format!("({inner})")).unwrap_or(name);
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::{ServiceNames, clean};
    use std::collections::HashSet;
    use std::process::{Child, Command};
    use std::time::Instant;

    struct Sleeper(Child);

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().ok();
            self.0.wait().ok();
        }
    }

    /// A child that has become `sleep`: the parent of a spawn goes on a moment before the kernel
    /// shows the new environment.
    fn sleeper(variables: &[(&str, &str)]) -> Sleeper {
        let mut command = Command::new("sleep");
        command
            .arg("600")
            .env_remove("OTEL_SERVICE_NAME")
            .env_remove("DD_SERVICE")
            .env("READY", "1");
        let child = Sleeper(command.envs(variables.iter().copied()).spawn().unwrap());
        let environment = || std::fs::read(format!("/proc/{}/environ", child.0.id())).unwrap();
        while !environment().windows(7).any(|part| part == b"READY=1") {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn a_name_of_opentelemetry_comes_before_datadogs_and_both_before_the_executables() {
        let mut services = ServiceNames::default();
        for (variables, name) in [
            (&[("OTEL_SERVICE_NAME", "orders"), ("DD_SERVICE", "old")][..], "orders"),
            (&[("OTEL_SERVICE_NAME", "  "), ("DD_SERVICE", "carts")], "carts"),
            (&[], "sleep"),
        ] {
            let child = sleeper(variables);
            assert_eq!(&*services.of(child.0.id(), "comm").0, name);
        }
    }

    #[test]
    fn a_pods_label_names_what_no_variable_does_and_better_than_the_executable() {
        let child = sleeper(&[("DD_SERVICE", "carts")]);
        let target =
            |child: &Sleeper| crate::process::handle::ProcessHandle::open(child.0.id()).unwrap();
        assert_eq!(super::look(&target(&child), Some("web")).as_deref(), Some("carts"));
        let child = sleeper(&[]);
        assert_eq!(super::look(&target(&child), Some("web")).as_deref(), Some("web"));
        assert_eq!(super::look(&target(&child), Some(" ")).as_deref(), Some("sleep"));
        assert_eq!(super::look(&target(&child), None).as_deref(), Some("sleep"));
    }

    #[test]
    fn a_child_belongs_to_its_parents_service_until_it_becomes_another_program() {
        let mut services = ServiceNames::default();
        let child = sleeper(&[("DD_SERVICE", "parent")]);
        let pid = child.0.id();
        assert_eq!(&*services.of(pid, "").0, "parent");
        services.forked(pid, u32::MAX);
        assert_eq!(&*services.of(u32::MAX, "gone").0, "parent");
        services.became_another(u32::MAX);
        assert_eq!(&*services.of(u32::MAX, "gone").0, "gone");
        services.keep(&HashSet::from([pid]));
        assert_eq!((services.by_pid.len(), services.names.len()), (1, 1));
    }

    #[test]
    fn a_young_process_may_name_itself_otherwise_until_it_was_asked() {
        let mut services = ServiceNames::default();
        let child = sleeper(&[("DD_SERVICE", "young")]);
        let pid = child.0.id();
        let mut known = services.look(pid, "", Instant::now());
        // However long it took to come here.
        known.asked = false;
        services.by_pid.insert(pid, known.clone());
        assert!(!services.is_sure(pid));
        services.forked(pid, u32::MAX);
        assert!(!services.is_sure(u32::MAX), "its parent may get another name, and so may it");
        let known = services.ask_again(pid, known, Instant::now());
        services.by_pid.insert(pid, known);
        assert!(services.is_sure(pid));
        assert_eq!(services.known(pid).as_deref(), Some("young"));
        services.of(u32::MAX - 1, "gone");
        assert!(services.is_sure(u32::MAX - 1), "nobody is there to be asked");
    }

    #[test]
    fn names_are_cut_and_have_no_control_characters() {
        assert_eq!(clean("\u{1b}[31mred\n").as_deref(), Some("\u{fffd}[31mred"));
        assert_eq!(clean(&"é".repeat(300)).map(|name| name.chars().count()), Some(100));
        assert_eq!(clean(" \t"), None);
        assert_eq!(clean(" [kernel] ").as_deref(), Some("(kernel)"));
        assert_eq!(clean("[a] b").as_deref(), Some("[a] b"));
    }
}
