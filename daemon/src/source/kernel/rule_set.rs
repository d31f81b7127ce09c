//! Who is recorded, as the probes look it up: by cgroup, user and command. The rules behind it are `select`'s.

use super::hierarchy::Hierarchy;
use ebpf_common::config::{RULES_BY_CGROUP, RULES_BY_COMMAND, RULES_BY_USER};
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

pub use ebpf_common::config::{RULE_EXCEPT as EXCEPT, RULE_ONLY as ONLY};

/// What is said of cgroups, users and commands: [`ONLY`] for those to record, [`EXCEPT`] for those not to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuleSet {
    /// Whether those are recorded of whom nothing is said.
    pub others: bool,
    /// By id, of all cgroups there are; `None` when they do not matter. One that is not in it was not looked at yet, and is not recorded.
    pub cgroups: Option<HashMap<u64, u32>>,
    /// By number of the real user.
    pub users: HashMap<u32, u32>,
    /// By the command name of the process's first thread.
    pub commands: HashMap<[u8; 16], u32>,
}

impl RuleSet {
    /// What the probes look at at all.
    #[must_use]
    pub fn looks_at(&self) -> u32 {
        let part = |is: bool, bit: u32| if is { bit } else { 0 };
        part(self.cgroups.is_some(), RULES_BY_CGROUP)
            | part(!self.users.is_empty(), RULES_BY_USER)
            | part(!self.commands.is_empty(), RULES_BY_COMMAND)
    }

    /// Whether a process is recorded, as the probes decide it.
    fn chooses(&self, cgroup: Option<u64>, user: Option<u32>, command: Option<[u8; 16]>) -> bool {
        let mut said = 0;
        if let Some(cgroups) = &self.cgroups {
            match cgroup.and_then(|id| cgroups.get(&id)) {
                Some(bits) => said |= bits,
                None => return false,
            }
        }
        said |= user.and_then(|user| self.users.get(&user)).copied().unwrap_or(0);
        said |= command.and_then(|command| self.commands.get(&command)).copied().unwrap_or(0);
        said & EXCEPT == 0 && (self.others || said & ONLY != 0)
    }
}

/// Tells which processes a selection holds, from /proc. What it found it keeps: made anew for each look.
pub struct Filter<'a> {
    rules: &'a RuleSet,
    hierarchy: Option<&'static Hierarchy>,
    /// Ids of cgroups, by path.
    cgroups: HashMap<PathBuf, Option<u64>>,
    known: HashMap<u32, bool>,
}

impl<'a> Filter<'a> {
    /// By these rules.
    #[must_use]
    pub fn new(rules: &'a RuleSet) -> Self {
        let hierarchy = if rules.cgroups.is_some() { Hierarchy::host() } else { None };
        Self { rules, hierarchy, cgroups: HashMap::new(), known: HashMap::new() }
    }

    /// Whether `tgid` is recorded.
    pub fn holds(&mut self, tgid: u32) -> bool {
        if let Some(known) = self.known.get(&tgid) {
            return *known;
        }
        let looks_at = self.rules.looks_at();
        let cgroup = if looks_at & RULES_BY_CGROUP == 0 { None } else { self.cgroup(tgid) };
        let user = if looks_at & RULES_BY_USER == 0 { None } else { user(tgid) };
        let command = if looks_at & RULES_BY_COMMAND == 0 { None } else { command(tgid) };
        let chosen = self.rules.chooses(cgroup, user, command);
        self.known.insert(tgid, chosen);
        chosen
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
    use super::{EXCEPT, Filter, ONLY, RuleSet, command};
    use std::collections::HashMap;

    #[test]
    fn an_exception_goes_before_what_is_wanted_and_unknown_cgroups_are_not_recorded() {
        let set = RuleSet {
            others: false,
            cgroups: Some(HashMap::from([(1, ONLY), (2, EXCEPT), (3, 0)])),
            users: HashMap::from([(7, ONLY), (8, EXCEPT)]),
            commands: HashMap::new(),
        };
        let chosen = |cgroup, user| set.chooses(Some(cgroup), Some(user), None);
        assert!(chosen(1, 0) && chosen(3, 7) && chosen(1, 7));
        assert!(!chosen(2, 7) && !chosen(1, 8) && !chosen(3, 0) && !chosen(4, 7));
        let others = RuleSet { others: true, ..set };
        assert!(others.chooses(Some(3), Some(0), None) && !others.chooses(Some(2), Some(0), None));
    }

    #[test]
    fn this_process_is_found_by_what_it_is() {
        let own = std::process::id();
        let name = command(own).unwrap();
        let mut set = RuleSet { commands: HashMap::from([(name, ONLY)]), ..RuleSet::default() };
        assert!(Filter::new(&set).holds(own));
        set.users.insert(rustix::process::getuid().as_raw(), EXCEPT);
        assert!(!Filter::new(&set).holds(own));
    }
}
