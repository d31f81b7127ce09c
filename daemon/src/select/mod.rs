//! Who is recorded, as rules of the configuration: what of a process they look at, and how they become what the probes look up before any
//! other work. `cgroups` finds the cgroups there are, `kubernetes` knows the pods they belong to.

pub mod cgroups;

use crate::kubernetes::Source;
use crate::kubernetes::object::Wanted;
use crate::kubernetes::pods::Pods;
use crate::process::container::{container_in, pod_in};
use crate::source::kernel::rule_set::{EXCEPT, ONLY, RuleSet};
use cgroups::Cgroups;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

/// Users or commands that rules may name.
const MOST_RULES: usize = 1000;
/// The users of the host.
const USERS: &str = "/etc/passwd";

/// Who is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Selection {
    /// Only those that one of these is true of; none: everybody.
    pub only: Vec<Who>,
    /// And nobody that one of these is true of: neither recorded nor attached to.
    pub except: Vec<Who>,
}

/// One thing that is true of some processes. In names of cgroups, namespaces and pods, and in values, `*` stands for anything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Who {
    /// Path of a cgroup below the mount of cgroup v2, those below it included: `/system.slice/*.service`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Beginning of a container's id, at least 12 digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// Namespace of a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name of a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Label of a pod, `KEY=VALUE` or, whatever its value, `KEY`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Annotation of a pod, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub annotation: Option<String>,
    /// Name or number of the (real) user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command name of the process, as in `ps -o comm`; 15 bytes of it count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// [`Who`], with the one thing it says.
enum Rule<'a> {
    Cgroup(&'a str),
    Container(&'a str),
    Namespace(&'a str),
    Pod(&'a str),
    Label(&'a str, &'a str),
    Annotation(&'a str, &'a str),
    User(u32),
    Command([u8; 16]),
}

impl Who {
    fn rule(&self) -> Result<Rule<'_>, String> {
        let Self { cgroup, container, namespace, pod, label, annotation, user, command } = self;
        let mut said: Vec<Rule<'_>> = Vec::new();
        said.extend(cgroup.as_deref().map(Rule::Cgroup));
        said.extend(container.as_deref().map(Rule::Container));
        said.extend(namespace.as_deref().map(Rule::Namespace));
        said.extend(pod.as_deref().map(Rule::Pod));
        let pair = |text| str::split_once(text, '=').unwrap_or((text, "*"));
        said.extend(label.as_deref().map(pair).map(|(key, value)| Rule::Label(key, value)));
        said.extend(annotation.as_deref().map(pair).map(|(key, value)| Rule::Annotation(key, value)));
        if let Some(user) = user {
            let found = user
                .parse()
                .ok()
                .or_else(|| uid(user))
                .ok_or_else(|| format!("there is no user `{user}`"))?;
            said.push(Rule::User(found));
        }
        said.extend(command.as_deref().map(|command| Rule::Command(comm(command))));
        let count = said.len();
        let mut said = said.into_iter();
        match (said.next(), count) {
            (Some(Rule::Container(id)), 1) if id.len() < 12 || !id.bytes().all(|c| c.is_ascii_hexdigit()) => {
                Err(format!("container: expected at least 12 hexadecimal digits, found `{id}`"))
            }
            (Some(Rule::Cgroup(path)), 1) if !path.starts_with('/') => {
                Err(format!("cgroup: expected a path such as /system.slice/app.service, found `{path}`"))
            }
            (Some(Rule::Label("", _) | Rule::Annotation("", _)), 1) => {
                Err("label and annotation: expected KEY=VALUE or KEY, found no key".to_owned())
            }
            (Some(rule), 1) => Ok(rule),
            _ => Err(format!(
                "expected one of cgroup, container, namespace, pod, label, annotation, user, command in each rule, found {count}"
            )),
        }
    }
}

impl Selection {
    /// True when everybody is recorded.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.only.is_empty() && self.except.is_empty()
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self, source: Source) -> Result<(), String> {
        if self.only.len() + self.except.len() > MOST_RULES {
            return Err(format!("expected at most {MOST_RULES} rules"));
        }
        self.only.iter().chain(&self.except).try_for_each(|who| match (who.rule()?, source) {
            (Rule::Label(..) | Rule::Annotation(..), Source::Logs) => {
                Err("label and annotation: expected kubernetes.pods to be api: the names of logs do not tell them".to_owned())
            }
            _ => Ok(()),
        })
    }

    /// True when some rule is about pods.
    #[must_use]
    pub fn names_pods(&self) -> bool {
        let of_pods = |who: &Who| {
            let Who { namespace, pod, label, annotation, .. } = who;
            [namespace, pod, label, annotation].iter().any(|said| said.is_some())
        };
        self.only.iter().chain(&self.except).any(of_pods)
    }

    /// The labels and annotations that rules look at.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        let mut wanted = Wanted::default();
        for who in self.only.iter().chain(&self.except) {
            match who.rule() {
                Ok(Rule::Label(key, _)) => drop(wanted.labels.insert(key.to_owned())),
                Ok(Rule::Annotation(key, _)) => drop(wanted.annotations.insert(key.to_owned())),
                _ => {}
            }
        }
        wanted
    }

    /// The rules as the probes know them, with what is there of cgroups now. Where pods are known from the API server, they can except themselves.
    pub fn rules(&self, cgroups: &mut Cgroups, pods: &Pods, source: Source) -> RuleSet {
        let mut set = RuleSet { others: self.only.is_empty(), ..RuleSet::default() };
        let mut of_cgroups = Vec::new();
        for (who, bits) in self.bits() {
            match who.rule() {
                Ok(Rule::User(uid)) => *set.users.entry(uid).or_default() |= bits,
                Ok(Rule::Command(comm)) => *set.commands.entry(comm).or_default() |= bits,
                Ok(rule) => of_cgroups.push((rule, bits)),
                // A user that was there when the configuration was checked, and is nobody now.
                Err(_) => {}
            }
        }
        let needs_pods = self.names_pods() || source == Source::Api;
        if needs_pods || !of_cgroups.is_empty() {
            set.cgroups = Some(verdicts(cgroups, pods, needs_pods, &of_cgroups));
        }
        set
    }

    fn bits(&self) -> impl Iterator<Item = (&Who, u32)> {
        self.only.iter().map(|who| (who, ONLY)).chain(self.except.iter().map(|who| (who, EXCEPT)))
    }
}

/// What the rules say of each cgroup.
fn verdicts(
    cgroups: &mut Cgroups,
    pods: &Pods,
    needs_pods: bool,
    rules: &[(Rule<'_>, u32)],
) -> HashMap<u64, u32> {
    let found = cgroups.scan();
    let verdict = |path: &str| {
        let container = container_in(path);
        let uid = pod_in(path);
        let pod = uid.as_ref().and_then(|uid| pods.get(uid));
        if needs_pods && uid.is_some() && pod.is_none() {
            // It may be one that is not to be recorded: not looked at yet.
            return None;
        }
        let fits = |rule: &Rule<'_>| match rule {
            Rule::Cgroup(pattern) => {
                Path::new(path).ancestors().any(|part| part.to_str().is_some_and(|part| fits(pattern, part)))
            }
            Rule::Container(id) => container.is_some_and(|found| found.starts_with(id)),
            Rule::Namespace(pattern) => pod.as_ref().is_some_and(|pod| fits(pattern, &pod.namespace)),
            Rule::Pod(pattern) => pod.as_ref().is_some_and(|pod| fits(pattern, &pod.name)),
            Rule::Label(key, pattern) => {
                pod.as_ref().and_then(|pod| pod.labels.get(*key)).is_some_and(|value| fits(pattern, value))
            }
            Rule::Annotation(key, pattern) => pod
                .as_ref()
                .and_then(|pod| pod.annotations.get(*key))
                .is_some_and(|value| fits(pattern, value)),
            Rule::User(_) | Rule::Command(_) => false,
        };
        let own = if pod.as_ref().is_some_and(|pod| pod.wants_no_profile()) { EXCEPT } else { 0 };
        Some(rules.iter().filter(|(rule, _)| fits(rule)).fold(own, |bits, (_, bit)| bits | bit))
    };
    found.into_iter().filter_map(|(id, path)| Some((id, verdict(&path)?))).collect()
}

/// `*` in the pattern stands for any characters.
fn fits(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut in_text) = (0, 0);
    // Behind the last `*`, and where the text goes on that it does not take.
    let mut star: Option<(usize, usize)> = None;
    while let Some(letter) = text.get(in_text) {
        match (pattern.get(at), star) {
            (Some(b'*'), _) => {
                at += 1;
                star = Some((at, in_text));
            }
            (Some(expected), _) if expected == letter => (at, in_text) = (at + 1, in_text + 1),
            (_, Some((behind, from))) => {
                (at, in_text) = (behind, from + 1);
                star = Some((behind, from + 1));
            }
            (_, None) => return false,
        }
    }
    pattern.iter().skip(at).all(|letter| *letter == b'*')
}

fn comm(command: &str) -> [u8; 16] {
    let mut comm = [0; 16];
    for (to, from) in comm.iter_mut().take(15).zip(command.bytes()) {
        *to = from;
    }
    comm
}

/// The number of a user of the host.
fn uid(name: &str) -> Option<u32> {
    let users = std::fs::read_to_string(USERS).ok()?;
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::{Selection, Who, comm, fits};
    use crate::kubernetes::Source;
    use crate::kubernetes::logs::Logs;
    use crate::kubernetes::pods::{Pod, Pods};
    use crate::select::cgroups::Cgroups;
    use crate::source::kernel::rule_set::{EXCEPT, ONLY};
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text) in [
            ("payments", "payments"),
            ("*", ""),
            ("pay*", "payments"),
            ("*ments", "payments"),
            ("/a/*.service", "/a/b.c.service"),
            ("a*b*c", "aXbXbXc"),
            ("*a*a", "aaaa"),
        ] {
            assert!(fits(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in
            [("", "x"), ("pay", "payments"), ("a*b", "ba"), ("*a*a", "a"), ("*.service", "x.slice")]
        {
            assert!(!fits(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn each_rule_says_one_thing_that_can_be_looked_up() {
        let rule = |who: Who| Selection { only: vec![who], ..Selection::default() }.check(Source::Api);
        let text = |text: &str| Some(text.to_owned());
        assert!(rule(Who { user: text("root"), ..Who::default() }).is_ok());
        for (who, said) in [
            (Who::default(), "found 0"),
            (Who { user: text("0"), command: text("x"), ..Who::default() }, "found 2"),
            (Who { user: text("nobody at all"), ..Who::default() }, "no user"),
            (Who { container: text("0123"), ..Who::default() }, "12 hexadecimal"),
            (Who { cgroup: text("system.slice"), ..Who::default() }, "expected a path"),
            (Who { label: text("=x"), ..Who::default() }, "found no key"),
        ] {
            assert!(rule(who.clone()).unwrap_err().contains(said), "{who:?}");
        }
    }

    #[test]
    fn rules_become_what_the_probes_look_up() {
        let folder = tempfile::tempdir().unwrap();
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let pod = "kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice";
        let container = folder.path().join("cgroup").join(pod).join(format!("cri-containerd-{id}.scope"));
        std::fs::create_dir_all(&container).unwrap();
        std::fs::create_dir_all(folder.path().join("cgroup/system.slice/ssh.service")).unwrap();
        let logs = folder.path().join("pods");
        std::fs::create_dir_all(logs.join("shop_web-7d9_11111111-2222-3333-4444-555555555555")).unwrap();
        let who = |who: fn(&mut Who) -> &mut Option<String>, text: &str| {
            let mut new = Who::default();
            *who(&mut new) = Some(text.to_owned());
            new
        };
        let selection = Selection {
            only: vec![who(|w| &mut w.namespace, "sh*"), who(|w| &mut w.command, "a-very-long-command-name")],
            except: vec![who(|w| &mut w.container, &id[..12]), who(|w| &mut w.user, "4242")],
        };
        let mut cgroups = Cgroups::below(folder.path().join("cgroup"));
        let pods = Pods::default();
        Logs::of(logs).read(&pods, true);
        let set = selection.rules(&mut cgroups, &pods, Source::Logs);
        assert!(!set.others && set.users[&4242] == EXCEPT && set.commands[&comm("a-very-long-comm")] == ONLY);
        let verdicts = set.cgroups.unwrap();
        let of = |path: &std::path::Path| verdicts[&path.metadata().unwrap().ino()];
        // Where the name of a pod matters and is not known, nothing of it is recorded.
        let unnamed = selection.rules(&mut cgroups, &Pods::default(), Source::Logs).cgroups.unwrap();
        assert!(!unnamed.contains_key(&container.metadata().unwrap().ino()));
        assert_eq!(unnamed.len() + 2, verdicts.len());
        assert_eq!(of(&container), ONLY | EXCEPT);
        assert_eq!(of(container.parent().unwrap()), ONLY);
        assert_eq!(of(&folder.path().join("cgroup/system.slice/ssh.service")), 0);
    }

    #[test]
    fn pods_are_chosen_by_label_and_annotation_and_except_themselves() {
        let folder = tempfile::tempdir().unwrap();
        let uid = |n: u32| format!("11111111-2222-3333-4444-{n:012}");
        let cgroup = |n: u32| {
            let path = folder.path().join(format!("kubepods/pod{}", uid(n)));
            std::fs::create_dir_all(&path).unwrap();
            path.metadata().unwrap().ino()
        };
        let pods = Pods::default();
        let add = |n: u32, labels: &[(&str, &str)], annotations: &[(&str, &str)]| {
            let map = |pairs: &[(&str, &str)]| {
                pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
            };
            let pod = Pod { labels: map(labels), annotations: map(annotations), ..Pod::default() };
            pods.put(uid(n), pod, std::time::Instant::now());
            cgroup(n)
        };
        let web = add(1, &[("tier", "web-front")], &[]);
        let batch = add(2, &[("tier", "batch")], &[("example.com/profile", "")]);
        let out = add(3, &[("tier", "web-back")], &[("perfusion/profile", "off")]);
        let unknown = cgroup(4);
        let mut cgroups = Cgroups::below(folder.path().to_owned());
        let mut verdicts = |yaml: &str| {
            let selection: Selection = serde_yaml::from_str(yaml).unwrap();
            selection.check(Source::Api).unwrap();
            let set = selection.rules(&mut cgroups, &pods, Source::Api);
            let of = set.cgroups.unwrap();
            assert!(!of.contains_key(&unknown), "it may be one that wants no profile");
            [web, batch, out].map(|id| of[&id])
        };
        assert_eq!(verdicts("only: [{label: tier=web-*}]"), [ONLY, 0, ONLY | EXCEPT]);
        assert_eq!(verdicts("only: [{annotation: example.com/profile}]"), [0, ONLY, EXCEPT]);
        assert_eq!(verdicts("except: [{label: tier=batch}]"), [0, EXCEPT, EXCEPT]);
        // Without a rule there is still who excepts itself.
        assert_eq!(verdicts("{}"), [0, 0, EXCEPT]);
        let by_label: Selection = serde_yaml::from_str("only: [{label: tier}]").unwrap();
        assert!(by_label.check(Source::Logs).unwrap_err().contains("kubernetes.pods"));
        assert_eq!(by_label.wanted().labels.iter().collect::<Vec<_>>(), ["tier"]);
    }
}
