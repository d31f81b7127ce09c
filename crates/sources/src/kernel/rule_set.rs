//! Who is recorded and with which features, as the probes look it up: by cgroup, user and command.
//! The rules behind it are `select`'s.

use ebpf_common::config::{
    RULE_DOWNSAMPLES, RULE_FEATURES, RULE_TAKES, RULES_BY_CGROUP, RULES_BY_COMMAND, RULES_BY_USER,
    left_out,
};
use perfusion_host::process::hierarchy::Hierarchy;
use perfusion_model::feature::{ExcludedFeatures, OF_KERNEL};
use std::collections::HashMap;
use std::fs;
use std::hash::BuildHasher;
use std::path::PathBuf;
use std::sync::Arc;

/// What is left out of the processes of one service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceExclusions {
    /// Of all.
    pub all: ExcludedFeatures,
    /// Of at least one.
    pub some: ExcludedFeatures,
}

impl ServiceExclusions {
    /// A process more.
    pub fn add<S: BuildHasher>(
        services: &mut HashMap<Arc<str>, Self, S>,
        service: &Arc<str>,
        left_out: ExcludedFeatures,
    ) {
        let known =
            services.entry(Arc::clone(service)).or_insert(Self { all: left_out, some: left_out });
        (known.all, known.some) = (known.all.and(left_out), known.some.or(left_out));
    }
}

/// What the probes see to: of the features, and of the rest.
const SAID_TO_KERNEL: u32 = OF_KERNEL | OF_KERNEL << RULE_TAKES | 0xff << RULE_DOWNSAMPLES;

/// What is said of cgroups, users and commands: bits of
/// [`Feature::given`](perfusion_model::feature::Feature::given),
/// [`Feature::taken`](perfusion_model::feature::Feature::taken) and
/// [`downsampled`](perfusion_model::feature::downsampled).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleSet {
    /// What those have of whom nothing is said.
    pub others: u32,
    /// By id, of all cgroups there are; `None` when they do not matter. One that is not in it was
    /// not looked at yet, and is not recorded.
    pub cgroups: Option<HashMap<u64, u32>>,
    /// By number of the real user.
    pub users: HashMap<u32, u32>,
    /// By the command name of the process's first thread.
    pub commands: HashMap<[u8; 16], u32>,
    /// Of the names of services, which the probes do not know: patterns, and what is said of those
    /// they fit.
    pub services: Vec<(String, u32)>,
}

impl RuleSet {
    /// By which nobody is treated in another way than others.
    #[must_use]
    pub fn of_everybody() -> Self {
        Self { others: RULE_FEATURES, ..Self::default() }
    }

    /// What the probes are told of it; `by_cgroup`: whether they are to look at cgroups.
    #[must_use]
    pub fn of_kernel(&self, by_cgroup: bool) -> Self {
        fn told<K: Copy + Eq + std::hash::Hash>(
            said: &HashMap<K, u32>,
            all: bool,
        ) -> HashMap<K, u32> {
            let told = said.iter().map(|(key, said)| (*key, said & SAID_TO_KERNEL));
            told.filter(|(_, said)| all || *said != 0).collect()
        }
        Self {
            others: self.others & OF_KERNEL | RULE_FEATURES & !OF_KERNEL,
            cgroups: self.cgroups.as_ref().filter(|_| by_cgroup).map(|cgroups| told(cgroups, true)),
            users: told(&self.users, false),
            commands: told(&self.commands, false),
            services: Vec::new(),
        }
    }

    /// What the probes look at at all.
    #[must_use]
    pub(crate) fn looks_at(&self) -> u32 {
        let part = |is: bool, bit: u32| if is { bit } else { 0 };
        part(self.cgroups.is_some(), RULES_BY_CGROUP)
            | part(!self.users.is_empty(), RULES_BY_USER)
            | part(!self.commands.is_empty(), RULES_BY_COMMAND)
    }

    /// What is said of a process, as the probes look it up; `None` when it was not looked at yet.
    fn said(
        &self,
        cgroup: Option<u64>,
        user: Option<u32>,
        command: Option<[u8; 16]>,
    ) -> Option<u32> {
        let mut said = 0;
        if let Some(cgroups) = &self.cgroups {
            said |= cgroup.and_then(|id| cgroups.get(&id))?;
        }
        said |= user.and_then(|user| self.users.get(&user)).copied().unwrap_or(0);
        said |= command.and_then(|command| self.commands.get(&command)).copied().unwrap_or(0);
        Some(said)
    }

    fn left_out(&self, said: u32) -> Option<ExcludedFeatures> {
        left_out(said, self.others).map(ExcludedFeatures)
    }
}

/// Tells which processes a selection holds, from /proc. What it found it keeps: made anew for each
/// look.
pub struct RuleSetFilter<'a> {
    rules: &'a RuleSet,
    hierarchy: Option<&'static Hierarchy>,
    /// Ids of cgroups, by path.
    cgroups: HashMap<PathBuf, Option<u64>>,
    known: HashMap<u32, Option<u32>>,
}

impl<'a> RuleSetFilter<'a> {
    /// By these rules.
    #[must_use]
    pub fn new(rules: &'a RuleSet) -> Self {
        let hierarchy = if rules.cgroups.is_some() { Hierarchy::host() } else { None };
        Self { rules, hierarchy, cgroups: HashMap::new(), known: HashMap::new() }
    }

    /// Whether `tgid` is recorded.
    pub fn holds(&mut self, tgid: u32) -> bool {
        self.said(tgid).is_some_and(|said| self.rules.left_out(said).is_some())
    }

    /// What is left out of `tgid`, which belongs to this service; `None` when it is not recorded.
    pub fn left_out(&mut self, tgid: u32, service: &str) -> Option<ExcludedFeatures> {
        let rules = self.rules;
        let of_services = rules
            .services
            .iter()
            .filter(|(pattern, _)| perfusion_model::text::fits(pattern, service));
        let said = of_services.fold(self.said(tgid)?, |said, (_, bits)| said | bits);
        rules.left_out(said)
    }

    fn said(&mut self, tgid: u32) -> Option<u32> {
        if let Some(known) = self.known.get(&tgid) {
            return *known;
        }
        let looks_at = self.rules.looks_at();
        let cgroup = if looks_at & RULES_BY_CGROUP == 0 { None } else { self.cgroup(tgid) };
        let user = if looks_at & RULES_BY_USER == 0 { None } else { user(tgid) };
        let command = if looks_at & RULES_BY_COMMAND == 0 { None } else { command(tgid) };
        let said = self.rules.said(cgroup, user, command);
        self.known.insert(tgid, said);
        said
    }

    fn cgroup(&mut self, tgid: u32) -> Option<u64> {
        let hierarchy = self.hierarchy?;
        let path = hierarchy.of(tgid)?;
        *self.cgroups.entry(path).or_insert_with_key(|path| hierarchy.id(path))
    }
}

/// The real user.
fn user(tgid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{tgid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn command(tgid: u32) -> Option<[u8; 16]> {
    let text = fs::read(format!("/proc/{tgid}/comm")).ok()?;
    let name = text.strip_suffix(b"\n").unwrap_or(&text);
    let mut comm = [0; 16];
    comm.get_mut(..name.len().min(15))?.copy_from_slice(name.get(..name.len().min(15))?);
    Some(comm)
}

#[cfg(test)]
mod tests {
    use super::{ExcludedFeatures, RULE_FEATURES, RuleSet, RuleSetFilter, command};
    use perfusion_model::feature::{Feature, downsampled};
    use std::collections::HashMap;

    const ONLY: u32 = Feature::Recorded.given();
    const EXCEPT: u32 = Feature::Recorded.taken();

    #[test]
    fn an_exception_goes_before_what_is_wanted_and_unknown_cgroups_are_not_recorded() {
        let set = RuleSet {
            others: RULE_FEATURES & !ONLY,
            cgroups: Some(HashMap::from([(1, ONLY), (2, EXCEPT), (3, 0)])),
            users: HashMap::from([(7, ONLY), (8, EXCEPT)]),
            ..RuleSet::default()
        };
        let chosen = |set: &RuleSet, cgroup, user| {
            set.said(Some(cgroup), Some(user), None)
                .is_some_and(|said| set.left_out(said).is_some())
        };
        assert!(chosen(&set, 1, 0) && chosen(&set, 3, 7) && chosen(&set, 1, 7));
        assert!(
            !chosen(&set, 2, 7)
                && !chosen(&set, 1, 8)
                && !chosen(&set, 3, 0)
                && !chosen(&set, 4, 7)
        );
        let others = RuleSet { others: RULE_FEATURES, ..set };
        assert!(chosen(&others, 3, 0) && !chosen(&others, 2, 0));
    }

    #[test]
    fn what_several_rules_leave_out_is_left_out_together() {
        let own = std::process::id();
        let name = command(own).unwrap();
        let mut set = RuleSet::of_everybody();
        assert_eq!(
            RuleSetFilter::new(&set).left_out(own, "web"),
            Some(ExcludedFeatures::default())
        );
        set.commands.insert(name, Feature::Waits.taken() | downsampled(1));
        set.users.insert(rustix::process::getuid().as_raw(), downsampled(3));
        set.services = vec![("we*".to_owned(), Feature::Allocations.taken())];
        let left_out = |service| RuleSetFilter::new(&set).left_out(own, service).unwrap();
        let (web, bank) = (left_out("web"), left_out("bank"));
        assert!([web, bank].iter().all(|of| of.has(Feature::Waits) && of.one_sample_in() == 8));
        assert!(web.has(Feature::Allocations) && !bank.has(Feature::Allocations));
        assert!(!web.all_of_shim() && ExcludedFeatures(RULE_FEATURES & !ONLY).all_of_shim());
        assert_eq!(web.or(bank), web);
    }

    #[test]
    fn this_process_is_found_by_what_it_is() {
        let own = std::process::id();
        let name = command(own).unwrap();
        let mut set = RuleSet { commands: HashMap::from([(name, ONLY)]), ..RuleSet::default() };
        assert!(RuleSetFilter::new(&set).holds(own));
        set.users.insert(rustix::process::getuid().as_raw(), EXCEPT);
        assert!(!RuleSetFilter::new(&set).holds(own));
    }
}
