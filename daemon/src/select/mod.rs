//! Who is recorded and with which features, as rules of the configuration: what of a process they
//! look at, and how they become what the probes look up before any other work. `cgroups` finds the
//! cgroups there are, `kubernetes` knows the pods they belong to.
//!
//! What the kernel decides (being recorded, CPU samples, waits, rates) can only follow from what it
//! knows of a process; what the shim does (the rest) follows from the name of its service, too.

pub mod cgroups;

use crate::kubernetes::PodSource;
use crate::kubernetes::object::UsedKeys;
use cgroups::Cgroups;
use perfusion_host::pods::Pods;
use perfusion_host::process::container::{container_in, pod_in};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::feature::{Feature, downsampled};
use perfusion_model::text::fits;
use perfusion_sources::kernel::rule_set::RuleSet;
use rustix::fs::OFlags;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Users or commands that rules may name.
const MOST_RULES: usize = 1000;
/// Where a host lists its users, and how much of it is read.
const USERS: &str = "/etc/passwd";
const MOST_USERS_BYTES: u64 = 16 << 20;

/// Who is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SelectionConfig {
    /// Only those that one of these is true of; none: everybody.
    pub only: Vec<ProcessMatcher>,
    /// And nobody that one of these is true of: neither recorded nor attached to.
    pub except: Vec<ProcessMatcher>,
    /// Which of those who are recorded have which features.
    pub features: FeatureRules,
    /// Who has fewer CPU samples than others.
    pub rates: Vec<RateRule>,
}

/// Which of those who are recorded have which features: all have what nothing is said about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FeatureRules {
    /// CPU time, and the samples that say where it went.
    pub cpu: FeatureRule,
    /// Time waited, and for what.
    pub waits: FeatureRule,
    /// Allocations, and of them the objects that live on.
    pub allocations: FeatureRule,
    /// Objects that live on.
    pub live_objects: FeatureRule,
    /// Names of managed code.
    pub names: FeatureRule,
    /// Exceptions.
    pub exceptions: FeatureRule,
    /// Waits for locks, as the runtime tells of them.
    pub contention: FeatureRule,
}

impl FeatureRules {
    fn choice(&self, feature: Feature) -> Option<&FeatureRule> {
        Some(match feature {
            Feature::Recorded => return None,
            Feature::Cpu => &self.cpu,
            Feature::Waits => &self.waits,
            Feature::Allocations => &self.allocations,
            Feature::LiveObjects => &self.live_objects,
            Feature::Names => &self.names,
            Feature::Exceptions => &self.exceptions,
            Feature::Contention => &self.contention,
        })
    }
}

/// Who has a feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct FeatureRule {
    /// Whether anybody has it.
    pub enabled: bool,
    /// Only those that one of these is true of; none: everybody.
    pub only: Vec<ProcessMatcher>,
    /// And nobody that one of these is true of.
    pub except: Vec<ProcessMatcher>,
}

impl Default for FeatureRule {
    fn default() -> Self {
        Self { enabled: true, only: Vec::new(), except: Vec::new() }
    }
}

/// Who has fewer CPU samples than others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateRule {
    /// Whom it is for.
    pub who: ProcessMatcher,
    /// CPU samples per second and CPU at most: what comes out of `recording.frequency` by halving
    /// it, up to eight times.
    pub frequency: u32,
}

/// One thing that is true of some processes. In names of cgroups, namespaces and pods, and in
/// values, `*` stands for anything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ProcessMatcher {
    /// Path of a cgroup below the mount of cgroup v2, those below it included:
    /// `/system.slice/*.service`.
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
    /// Number of the (real) user, or its name in the host's /etc/passwd. A name that is not there
    /// is true of nobody.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command name of the process, as in `ps -o comm`; 15 bytes of it count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Name of a service; for features of the shim only: allocations, live_objects, names,
    /// exceptions, contention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
}

/// [`ProcessMatcher`], with the one thing it says.
enum ParsedMatcher<'a> {
    Cgroup(&'a str),
    Container(&'a str),
    Namespace(&'a str),
    Pod(&'a str),
    Label(&'a str, &'a str),
    Annotation(&'a str, &'a str),
    /// `None`: there is no such user.
    User(Option<u32>),
    Command([u8; 16]),
    Service(&'a str),
}

impl ProcessMatcher {
    fn rule(&self) -> Result<ParsedMatcher<'_>, String> {
        let Self { cgroup, container, namespace, pod, label, annotation, user, command, service } =
            self;
        let mut said: Vec<ParsedMatcher<'_>> = Vec::new();
        said.extend(cgroup.as_deref().map(ParsedMatcher::Cgroup));
        said.extend(container.as_deref().map(ParsedMatcher::Container));
        said.extend(namespace.as_deref().map(ParsedMatcher::Namespace));
        said.extend(pod.as_deref().map(ParsedMatcher::Pod));
        let pair = |text| str::split_once(text, '=').unwrap_or((text, "*"));
        said.extend(
            label.as_deref().map(pair).map(|(key, value)| ParsedMatcher::Label(key, value)),
        );
        said.extend(
            annotation
                .as_deref()
                .map(pair)
                .map(|(key, value)| ParsedMatcher::Annotation(key, value)),
        );
        said.extend(
            user.as_deref()
                .map(|user| ParsedMatcher::User(user.parse().ok().or_else(|| uid(user)))),
        );
        said.extend(command.as_deref().map(|command| ParsedMatcher::Command(comm(command))));
        said.extend(service.as_deref().map(ParsedMatcher::Service));
        let count = said.len();
        let mut said = said.into_iter();
        match (said.next(), count) {
            (Some(ParsedMatcher::Container(id)), 1) if !is_beginning_of_id(id) => Err(format!(
                "container: expected 12 to 64 hexadecimal digits, 0-9a-f as in the name of its \
                 cgroup, found `{id}`"
            )),
            (Some(ParsedMatcher::Cgroup(path)), 1) if !path.starts_with('/') => Err(format!(
                "cgroup: expected a path such as /system.slice/app.service, found `{path}`"
            )),
            (Some(ParsedMatcher::Cgroup(path)), 1) if plain(path).as_os_str() != path => {
                Err(format!(
                    "cgroup: expected `{}`, found `{path}`, which is no cgroup's",
                    plain(path).display()
                ))
            }
            (Some(ParsedMatcher::Label("", _) | ParsedMatcher::Annotation("", _)), 1) => {
                Err("label and annotation: expected KEY=VALUE or KEY, found no key".to_owned())
            }
            (Some(rule), 1) => Ok(rule),
            _ => Err(format!(
                "expected one of cgroup, container, namespace, pod, label, annotation, user, \
                 command, service in each rule, found {count}"
            )),
        }
    }
}

/// True when a container's id can begin with it, as the names of cgroups have them.
fn is_beginning_of_id(text: &str) -> bool {
    (12..=64).contains(&text.len()) && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

/// The path as cgroups' paths are compared with it: without a slash at its end, or two in a row.
fn plain(path: &str) -> PathBuf {
    Path::new(path).components().collect()
}

impl SelectionConfig {
    /// True when everybody is recorded with all features.
    #[must_use]
    pub fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// What of it the kernel decides. A change of the rest needs no new recording.
    #[must_use]
    pub fn of_kernel(&self) -> Self {
        let FeatureRules { cpu, waits, .. } = self.features.clone();
        Self { features: FeatureRules { cpu, waits, ..FeatureRules::default() }, ..self.clone() }
    }

    /// True when some rule needs a look at cgroups.
    #[must_use]
    pub fn looks_at_cgroups(&self, source: PodSource) -> bool {
        source == PodSource::Api
            || self.names_pods()
            || self.said(1).any(|(who, _)| who.cgroup.is_some() || who.container.is_some())
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self, source: PodSource) -> Result<(), String> {
        if self.said(1).count() > MOST_RULES {
            return Err(format!("expected at most {MOST_RULES} rules"));
        }
        for RateRule { frequency, .. } in &self.rates {
            if !(1..=10_000).contains(frequency) {
                return Err(format!(
                    "rates: expected a frequency of 1 to 10000, found {frequency}"
                ));
            }
        }
        let of_kernel = self.of_kernel();
        if of_kernel.said(1).any(|(who, _)| who.service.is_some()) {
            return Err(
                "service: expected another rule for only, except, rates, features.cpu and \
                 features.waits, which the kernel decides: \
                        it does not know services"
                    .to_owned(),
            );
        }
        self.said(1).try_for_each(|(who, _)| match (who.rule()?, source) {
            (ParsedMatcher::Label(..) | ParsedMatcher::Annotation(..), PodSource::Logs) => {
                Err("label and annotation: expected kubernetes.pods to be api: the names of logs \
                     do not tell them"
                    .to_owned())
            }
            _ => Ok(()),
        })
    }

    /// What of it is true of nobody here, though it may be elsewhere or later; one line each.
    #[must_use]
    pub fn remarks(&self) -> BTreeSet<String> {
        let unknown =
            self.said(1).filter(|(who, _)| matches!(who.rule(), Ok(ParsedMatcher::User(None))));
        let names = unknown.filter_map(|(who, _)| who.user.as_deref());
        let remark = |name| {
            format!(
                "selection: user: expected one in the host's {USERS}, found no `{name}`: the rule \
                 is true of nobody; a user that is listed elsewhere is named by its number"
            )
        };
        names.map(remark).collect()
    }

    /// True when some rule is about pods.
    #[must_use]
    pub fn names_pods(&self) -> bool {
        let of_pods = |who: &ProcessMatcher| {
            let ProcessMatcher { namespace, pod, label, annotation, .. } = who;
            [namespace, pod, label, annotation].iter().any(|said| said.is_some())
        };
        self.said(1).any(|(who, _)| of_pods(who))
    }

    /// The labels and annotations that rules look at.
    #[must_use]
    pub fn wanted(&self) -> UsedKeys {
        let mut wanted = UsedKeys::default();
        for (who, _) in self.said(1) {
            match who.rule() {
                Ok(ParsedMatcher::Label(key, _)) => {
                    wanted.labels.insert(key.to_owned());
                }
                Ok(ParsedMatcher::Annotation(key, _)) => {
                    wanted.annotations.insert(key.to_owned());
                }
                _ => {}
            }
        }
        wanted
    }

    /// The rules as the probes know them, with what is there of cgroups now. Where pods are known
    /// from the API server, they can except themselves. `frequency` is that of those of whom
    /// nothing else is said.
    pub fn rules(
        &self,
        cgroups: &mut Cgroups,
        pods: &Pods,
        source: PodSource,
        frequency: u32,
    ) -> RuleSet {
        let mut set = RuleSet { others: self.of_others(), ..RuleSet::default() };
        let mut of_cgroups = Vec::new();
        for (who, bits) in self.said(frequency) {
            match who.rule() {
                Ok(ParsedMatcher::User(Some(uid))) => *set.users.entry(uid).or_default() |= bits,
                Ok(ParsedMatcher::Command(comm)) => *set.commands.entry(comm).or_default() |= bits,
                Ok(ParsedMatcher::Service(pattern)) => {
                    set.services.push((pattern.to_owned(), bits))
                }
                // True of nobody; or refused when the configuration was checked.
                Ok(ParsedMatcher::User(None)) | Err(_) => {}
                Ok(rule) => of_cgroups.push((rule, bits)),
            }
        }
        let needs_pods = self.names_pods() || source == PodSource::Api;
        if needs_pods || !of_cgroups.is_empty() {
            set.cgroups = Some(verdicts(cgroups, pods, needs_pods, &of_cgroups));
        }
        set
    }

    /// What those have of whom nothing is said.
    fn of_others(&self) -> u32 {
        let everybodys = |feature: Feature| match self.features.choice(feature) {
            Some(choice) => choice.enabled && choice.only.is_empty(),
            None => self.only.is_empty(),
        };
        let all = Feature::NAMED.into_iter().map(|(feature, _)| feature).chain([Feature::Recorded]);
        all.filter(|feature| everybodys(*feature)).fold(0, |bits, feature| bits | feature.given())
    }

    /// Each rule, and what it says.
    fn said(&self, frequency: u32) -> impl Iterator<Item = (&ProcessMatcher, u32)> {
        let of_features = Feature::NAMED.into_iter().filter_map(|(feature, _)| {
            let choice = self.features.choice(feature)?;
            choice.enabled.then(|| lists(feature, &choice.only, &choice.except))
        });
        let rates = self
            .rates
            .iter()
            .map(move |rate| (&rate.who, downsampled(halvings(frequency, rate.frequency))));
        lists(Feature::Recorded, &self.only, &self.except).chain(of_features.flatten()).chain(rates)
    }
}

/// The rules about a feature, and what each says.
fn lists<'a>(
    feature: Feature,
    only: &'a [ProcessMatcher],
    except: &'a [ProcessMatcher],
) -> impl Iterator<Item = (&'a ProcessMatcher, u32)> {
    let only = only.iter().map(move |who| (who, feature.given()));
    only.chain(except.iter().map(move |who| (who, feature.taken())))
}

/// How often a frequency is halved to be no more than another.
fn halvings(frequency: u32, most: u32) -> u32 {
    (0..32).find(|halvings| frequency >> halvings <= most).unwrap_or(32)
}

/// What the rules say of each cgroup.
fn verdicts(
    cgroups: &mut Cgroups,
    pods: &Pods,
    needs_pods: bool,
    rules: &[(ParsedMatcher<'_>, u32)],
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
        let fits = |rule: &ParsedMatcher<'_>| match rule {
            ParsedMatcher::Cgroup(pattern) => Path::new(path)
                .ancestors()
                .any(|part| part.to_str().is_some_and(|part| fits(pattern, part))),
            ParsedMatcher::Container(id) => container.is_some_and(|found| found.starts_with(id)),
            ParsedMatcher::Namespace(pattern) => {
                pod.as_ref().is_some_and(|pod| fits(pattern, &pod.namespace))
            }
            ParsedMatcher::Pod(pattern) => pod.as_ref().is_some_and(|pod| fits(pattern, &pod.name)),
            ParsedMatcher::Label(key, pattern) => pod
                .as_ref()
                .and_then(|pod| pod.labels.get(*key))
                .is_some_and(|value| fits(pattern, value)),
            ParsedMatcher::Annotation(key, pattern) => pod
                .as_ref()
                .and_then(|pod| pod.annotations.get(*key))
                .is_some_and(|value| fits(pattern, value)),
            ParsedMatcher::User(_) | ParsedMatcher::Command(_) | ParsedMatcher::Service(_) => false,
        };
        let own = pod.as_ref().is_some_and(|pod| pod.wants_no_profile());
        let own = if own { Feature::Recorded.taken() } else { 0 };
        Some(rules.iter().filter(|(rule, _)| fits(rule)).fold(own, |bits, (_, bit)| bits | bit))
    };
    found.into_iter().filter_map(|(id, path)| Some((id, verdict(&path)?))).collect()
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
    number_in(&users().ok()?, name)
}

/// The host's list of users. In a container ours is another, so it is that of the first process,
/// which is the host's; where we may not look at that, ours.
fn users() -> io::Result<String> {
    // Whatever stands there in a file's place is not waited for.
    let hosts = ProcessHandle::open(1)
        .and_then(|first| first.open_in_root(Path::new(USERS), OFlags::RDONLY | OFlags::NONBLOCK));
    let list = hosts.map(File::from).or_else(|_| File::open(USERS))?;
    let mut bytes = Vec::new();
    list.take(MOST_USERS_BYTES).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The number of a user in a list such as /etc/passwd (passwd(5)).
fn number_in(users: &str, name: &str) -> Option<u32> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::{ProcessMatcher, SelectionConfig, comm, fits, halvings, number_in};
    use crate::kubernetes::PodSource;
    use crate::kubernetes::logs::PodLogs;
    use crate::select::cgroups::Cgroups;
    use perfusion_host::pods::{Pod, Pods};
    use perfusion_model::feature::{Feature, downsampled};
    use std::os::unix::fs::MetadataExt as _;

    const ONLY: u32 = Feature::Recorded.given();
    const EXCEPT: u32 = Feature::Recorded.taken();

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
        let rule = |who: ProcessMatcher| {
            SelectionConfig { only: vec![who], ..SelectionConfig::default() }.check(PodSource::Api)
        };
        let text = |text: &str| Some(text.to_owned());
        assert!(rule(ProcessMatcher { user: text("root"), ..ProcessMatcher::default() }).is_ok());
        for path in ["/", "/system.slice", "/*", "/a/*.service"] {
            assert_eq!(
                rule(ProcessMatcher { cgroup: text(path), ..ProcessMatcher::default() }),
                Ok(())
            );
        }
        assert_eq!(
            rule(ProcessMatcher { container: text(&"a".repeat(64)), ..ProcessMatcher::default() }),
            Ok(())
        );
        for (who, said) in [
            (ProcessMatcher::default(), "found 0"),
            (
                ProcessMatcher { user: text("0"), command: text("x"), ..ProcessMatcher::default() },
                "found 2",
            ),
            (ProcessMatcher { container: text("0123"), ..ProcessMatcher::default() }, "12 to 64"),
            (
                ProcessMatcher { container: text("ABCDEF012345"), ..ProcessMatcher::default() },
                "0-9a-f",
            ),
            (
                ProcessMatcher { container: text(&"a".repeat(65)), ..ProcessMatcher::default() },
                "12 to 64",
            ),
            (
                ProcessMatcher { cgroup: text("/system.slice/"), ..ProcessMatcher::default() },
                "expected `/system.slice`",
            ),
            (
                ProcessMatcher { cgroup: text("/a//b/./*"), ..ProcessMatcher::default() },
                "expected `/a/b/*`",
            ),
            (
                ProcessMatcher { cgroup: text("system.slice"), ..ProcessMatcher::default() },
                "expected a path",
            ),
            (ProcessMatcher { label: text("=x"), ..ProcessMatcher::default() }, "found no key"),
        ] {
            assert!(rule(who.clone()).unwrap_err().contains(said), "{who:?}");
        }
    }

    #[test]
    fn users_are_found_by_name_and_a_rule_about_nobody_is_remarked_upon() {
        let users = "root:x:0:0:root:/root:/bin/sh\n\
             postgres:x:115:123::/var/lib/postgresql:/bin/bash\nbroken:x\n";
        assert_eq!(
            ["root", "postgres", "broken", "x"].map(|name| number_in(users, name)),
            [Some(0), Some(115), None, None]
        );
        let text = "{only: [{user: root}, {user: nobody at all}], \
             features: {waits: {except: [{user: nobody at all}, {user: '4242'}]}}}";
        let selection: SelectionConfig = serde_yaml::from_str(text).unwrap();
        selection.check(PodSource::Logs).unwrap();
        let remarks = selection.remarks();
        assert!(
            remarks.len() == 1 && remarks.first().unwrap().contains("found no `nobody at all`"),
            "{remarks:?}"
        );
        let nobody = Cgroups::below(tempfile::tempdir().unwrap().path().to_owned());
        let users = selection.rules(&mut { nobody }, &Pods::default(), PodSource::Logs, 99).users;
        assert_eq!(users.len(), 2, "{users:?}");
    }

    #[test]
    fn rules_become_what_the_probes_look_up() {
        let folder = tempfile::tempdir().unwrap();
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let pod = "kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice";
        let container =
            folder.path().join("cgroup").join(pod).join(format!("cri-containerd-{id}.scope"));
        std::fs::create_dir_all(&container).unwrap();
        std::fs::create_dir_all(folder.path().join("cgroup/system.slice/ssh.service")).unwrap();
        let logs = folder.path().join("pods");
        std::fs::create_dir_all(logs.join("shop_web-7d9_11111111-2222-3333-4444-555555555555"))
            .unwrap();
        let who = |who: fn(&mut ProcessMatcher) -> &mut Option<String>, text: &str| {
            let mut new = ProcessMatcher::default();
            *who(&mut new) = Some(text.to_owned());
            new
        };
        let selection = SelectionConfig {
            only: vec![
                who(|w| &mut w.namespace, "sh*"),
                who(|w| &mut w.command, "a-very-long-command-name"),
            ],
            except: vec![who(|w| &mut w.container, &id[..12]), who(|w| &mut w.user, "4242")],
            ..SelectionConfig::default()
        };
        let mut cgroups = Cgroups::below(folder.path().join("cgroup"));
        let pods = Pods::default();
        PodLogs::of(logs).read(&pods, true);
        let set = selection.rules(&mut cgroups, &pods, PodSource::Logs, 99);
        assert!(
            set.others & ONLY == 0
                && set.users[&4242] == EXCEPT
                && set.commands[&comm("a-very-long-comm")] == ONLY
        );
        let verdicts = set.cgroups.unwrap();
        let of = |path: &std::path::Path| verdicts[&path.metadata().unwrap().ino()];
        // Where the name of a pod matters and is not known, nothing of it is recorded.
        let unnamed =
            selection.rules(&mut cgroups, &Pods::default(), PodSource::Logs, 99).cgroups.unwrap();
        assert!(!unnamed.contains_key(&container.metadata().unwrap().ino()));
        assert_eq!(unnamed.len() + 2, verdicts.len());
        assert_eq!(of(&container), ONLY | EXCEPT);
        assert_eq!(of(container.parent().unwrap()), ONLY);
        assert_eq!(of(&folder.path().join("cgroup/system.slice/ssh.service")), 0);
    }

    #[test]
    fn features_and_rates_have_rules_of_their_own() {
        let selection: SelectionConfig = serde_yaml::from_str(
            "{features: {waits: {except: [{user: '0'}, {command: batch}]}, \
             allocations: {only: [{service: shop-*}, {user: '0'}]}, exceptions: {enabled: false}}, \
             rates: [{who: {command: batch}, frequency: 20}]}",
        )
        .unwrap();
        selection.check(PodSource::Logs).unwrap();
        let nobody = Cgroups::below(tempfile::tempdir().unwrap().path().to_owned());
        let set = selection.rules(&mut { nobody }, &Pods::default(), PodSource::Logs, 99);
        let (waits, allocations) = (Feature::Waits, Feature::Allocations);
        assert_eq!(set.others, 0xff & !allocations.given() & !Feature::Exceptions.given());
        assert_eq!(set.users[&0], waits.taken() | allocations.given());
        assert_eq!(
            set.commands[&comm("batch")],
            waits.taken() | downsampled(3),
            "12 is no more than 20"
        );
        assert_eq!(set.services, [("shop-*".to_owned(), allocations.given())]);
        assert!(set.cgroups.is_none());
        // What the probes are told has nothing of the shim's.
        let of_kernel = selection.of_kernel();
        assert!(of_kernel.features.allocations.only.is_empty() && !of_kernel.is_all());
        for (yaml, said) in [
            ("{only: [{service: shop}]}", "does not know services"),
            ("{rates: [{who: {service: shop}, frequency: 9}]}", "does not know services"),
            ("{features: {cpu: {except: [{service: shop}]}}}", "does not know services"),
            ("{rates: [{who: {user: root}, frequency: 0}]}", "found 0"),
            ("{rates: [{frequency: 9}]}", "found 0"),
        ] {
            let selection: SelectionConfig = serde_yaml::from_str(yaml).unwrap();
            assert!(selection.check(PodSource::Logs).unwrap_err().contains(said), "{yaml}");
        }
    }

    #[test]
    fn a_frequency_is_halved_until_it_is_no_more_than_was_asked() {
        assert_eq!([99, 50, 49, 20, 1].map(|most| halvings(99, most)), [0, 1, 1, 3, 6]);
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
            let selection: SelectionConfig = serde_yaml::from_str(yaml).unwrap();
            selection.check(PodSource::Api).unwrap();
            let set = selection.rules(&mut cgroups, &pods, PodSource::Api, 99);
            let of = set.cgroups.unwrap();
            assert!(!of.contains_key(&unknown), "it may be one that wants no profile");
            [web, batch, out].map(|id| of[&id])
        };
        assert_eq!(verdicts("only: [{label: tier=web-*}]"), [ONLY, 0, ONLY | EXCEPT]);
        assert_eq!(verdicts("only: [{annotation: example.com/profile}]"), [0, ONLY, EXCEPT]);
        assert_eq!(verdicts("except: [{label: tier=batch}]"), [0, EXCEPT, EXCEPT]);
        // Without a rule there is still who excepts itself.
        assert_eq!(verdicts("{}"), [0, 0, EXCEPT]);
        let by_label: SelectionConfig = serde_yaml::from_str("only: [{label: tier}]").unwrap();
        assert!(by_label.check(PodSource::Logs).unwrap_err().contains("kubernetes.pods"));
        assert_eq!(by_label.wanted().labels.iter().collect::<Vec<_>>(), ["tier"]);
    }
}
