//! Who is recorded, as rules of the configuration: what of a process they look at, and how they become what the probes look up before any
//! other work. `cgroups` finds the cgroups there are, `pods` says which pod one belongs to.

pub mod cgroups;
pub mod pods;

use crate::source::kernel::rule_set::{EXCEPT, ONLY, RuleSet};
use cgroups::Cgroups;
use pods::{Pods, pod_uid};
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

/// One thing that is true of some processes. In names of cgroups, namespaces and pods `*` stands for anything.
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
    User(u32),
    Command([u8; 16]),
}

impl Who {
    fn rule(&self) -> Result<Rule<'_>, String> {
        let Self { cgroup, container, namespace, pod, user, command } = self;
        let mut said: Vec<Rule<'_>> = Vec::new();
        said.extend(cgroup.as_deref().map(Rule::Cgroup));
        said.extend(container.as_deref().map(Rule::Container));
        said.extend(namespace.as_deref().map(Rule::Namespace));
        said.extend(pod.as_deref().map(Rule::Pod));
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
            (Some(rule), 1) => Ok(rule),
            _ => Err(format!(
                "expected one of cgroup, container, namespace, pod, user, command in each rule, found {count}"
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
    pub fn check(&self) -> Result<(), String> {
        if self.only.len() + self.except.len() > MOST_RULES {
            return Err(format!("expected at most {MOST_RULES} rules"));
        }
        self.only.iter().chain(&self.except).try_for_each(|who| who.rule().map(drop))
    }

    /// The rules as the probes know them, with what is there of cgroups now.
    pub fn rules(&self, cgroups: &mut Cgroups, pods: &mut Pods) -> RuleSet {
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
        if !of_cgroups.is_empty() {
            let needs_pods =
                of_cgroups.iter().any(|(rule, _)| matches!(rule, Rule::Namespace(_) | Rule::Pod(_)));
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
    pods: &mut Pods,
    needs_pods: bool,
    rules: &[(Rule<'_>, u32)],
) -> HashMap<u64, u32> {
    let found = cgroups.scan();
    if needs_pods {
        pods.read();
    }
    let verdict = |path: &str| {
        let container = crate::process::container::container_in(path);
        let uid = pod_uid(path);
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
            Rule::Namespace(pattern) => pod.is_some_and(|pod| fits(pattern, &pod.namespace)),
            Rule::Pod(pattern) => pod.is_some_and(|pod| fits(pattern, &pod.name)),
            Rule::User(_) | Rule::Command(_) => false,
        };
        Some(rules.iter().filter(|(rule, _)| fits(rule)).fold(0, |bits, (_, bit)| bits | bit))
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
    use crate::select::cgroups::Cgroups;
    use crate::select::pods::Pods;
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
        let rule = |who: Who| Selection { only: vec![who], ..Selection::default() }.check();
        let text = |text: &str| Some(text.to_owned());
        assert!(rule(Who { user: text("root"), ..Who::default() }).is_ok());
        for (who, said) in [
            (Who::default(), "found 0"),
            (Who { user: text("0"), command: text("x"), ..Who::default() }, "found 2"),
            (Who { user: text("nobody at all"), ..Who::default() }, "no user"),
            (Who { container: text("0123"), ..Who::default() }, "12 hexadecimal"),
            (Who { cgroup: text("system.slice"), ..Who::default() }, "expected a path"),
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
        let set = selection.rules(&mut cgroups, &mut Pods::of(Some(logs)));
        assert!(!set.others && set.users[&4242] == EXCEPT && set.commands[&comm("a-very-long-comm")] == ONLY);
        let verdicts = set.cgroups.unwrap();
        let of = |path: &std::path::Path| verdicts[&path.metadata().unwrap().ino()];
        // Where the name of a pod matters and is not known, nothing of it is recorded.
        let unnamed = selection.rules(&mut cgroups, &mut Pods::of(None)).cgroups.unwrap();
        assert!(!unnamed.contains_key(&container.metadata().unwrap().ino()));
        assert_eq!(unnamed.len() + 2, verdicts.len());
        assert_eq!(of(&container), ONLY | EXCEPT);
        assert_eq!(of(container.parent().unwrap()), ONLY);
        assert_eq!(of(&folder.path().join("cgroup/system.slice/ssh.service")), 0);
    }
}
