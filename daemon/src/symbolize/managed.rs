//! Names of managed code, as shims tell them: code range -> function, by process and generation.
//!
//! A process is believed about itself only: everything is kept under the [`ProcessId`] the finder established. What is
//! kept is bounded, and two methods that claim the same code make it nameless rather than wrong.

use super::perf_map::PerfMapName;
use super::{FunctionId, Module, Symbol, pretty};
use crate::sample::frame::ProcessId;
use crate::source::{Method, ShimEvent};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Code ranges kept per process.
const MAX_RANGES: usize = 300_000;
/// Functions kept of all processes.
const MAX_FUNCTIONS: usize = 1_000_000;
/// Boundaries of unloaded ranges kept per process; past it the process has no managed names any more.
const MAX_UNLOAD_BOUNDARIES: usize = 200_000;

/// Why an address has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Nobody answered for it.
    NotAnswered,
    /// The runtime said it has no method there.
    NoMethod,
    /// Two methods claim it.
    Conflict,
    /// The store was full.
    StoreFull,
}

/// The identity of a function: without tier, so that all bodies of a method share it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FunctionKey {
    process: ProcessId,
    /// Module and MethodDef token; zero for dynamic methods and for names from a perf map.
    module_id: u64,
    token: u32,
    /// The name with its type arguments: the instantiation, and all there is for a dynamic method.
    name: Arc<str>,
}

#[derive(Clone, Copy)]
struct Range {
    end: u64,
    /// `None` after a second method claimed the range.
    function: Option<FunctionId>,
}

#[derive(Default)]
struct Process {
    /// By (generation, first address).
    ranges: BTreeMap<(u32, u64), Range>,
    /// Step function: from this address on, code was unloaded so many times.
    unloaded: BTreeMap<u64, u32>,
    /// (generation, address) pairs the runtime has no method for.
    no_method: HashSet<(u32, u64)>,
    full: bool,
}

/// The store.
#[derive(Default)]
pub(super) struct ManagedNames {
    processes: HashMap<ProcessId, Process>,
    ids: HashMap<FunctionKey, FunctionId>,
    symbols: HashMap<FunctionId, Symbol>,
    next_id: u32,
    refused: u64,
    conflicts: u64,
}

impl ManagedNames {
    /// Takes what a shim of `process` said.
    pub(super) fn observe(&mut self, process: ProcessId, event: &ShimEvent) {
        match event {
            ShimEvent::Method(method) => self.learn(process, method),
            ShimEvent::NoMethod { asked, .. } => {
                let entry = self.processes.entry(process).or_default();
                if entry.no_method.len() < MAX_RANGES {
                    entry.no_method.insert((entry.generation(*asked), *asked));
                }
            }
            ShimEvent::CodeUnloaded { ranges } => {
                let entry = self.processes.entry(process).or_default();
                for &(start, len) in ranges {
                    entry.unload(start, start.saturating_add(len));
                }
            }
            _ => {}
        }
    }

    fn learn(&mut self, process: ProcessId, method: &Method) {
        let raw = if method.name.is_empty() { "[nameless method]" } else { &method.name };
        let module = (!method.module.is_empty()).then(|| module_name(&method.module));
        let module_id = if method.dynamic { 0 } else { method.module_id };
        let token = if method.dynamic { 0 } else { method.token };
        let id = self.function(process, (module_id, token), raw, module);
        let entry = self.processes.entry(process).or_default();
        let Some(id) = id else {
            self.refused = self.refused.saturating_add(1);
            entry.full = true;
            return;
        };
        for &(start, len) in &method.ranges {
            let end = start.saturating_add(u64::from(len));
            match entry.insert(start, end, id) {
                Inserted::Yes => {}
                Inserted::Full => self.refused = self.refused.saturating_add(1),
                Inserted::Conflict => self.conflicts = self.conflicts.saturating_add(1),
            }
        }
    }

    /// The function with this identity, made if there is room.
    fn function(
        &mut self,
        process: ProcessId,
        (module_id, token): (u64, u32),
        raw: &str,
        module: Option<Arc<str>>,
    ) -> Option<FunctionId> {
        let system_name: Arc<str> = pretty::clean(raw).as_ref().into();
        let key = FunctionKey { process, module_id, token, name: Arc::clone(&system_name) };
        if let Some(&id) = self.ids.get(&key) {
            return Some(id);
        }
        if self.ids.len() >= MAX_FUNCTIONS {
            return None;
        }
        let id = FunctionId(self.next_id);
        self.next_id = self.next_id.checked_add(1)?;
        let symbol = Symbol {
            name: pretty::managed(&system_name).into(),
            system_name,
            module: module.map_or(Module::Jit, Module::Managed),
            function: Some(id),
            resolved: true,
        };
        self.symbols.insert(id, symbol);
        self.ids.insert(key, id);
        Some(id)
    }

    /// A function that is only known from a perf map.
    pub(super) fn named_by_perf_map(&mut self, process: ProcessId, name: &PerfMapName) -> Option<FunctionId> {
        let module = name.module.as_deref().map(module_name);
        self.function(process, (0, 0), &name.name, module)
    }

    /// The function whose code was at `address` in `generation`.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn find(
        &self,
        process: ProcessId,
        address: u64,
        generation: u32,
    ) -> Result<FunctionId, Missing> {
        let entry = self.processes.get(&process).ok_or(Missing::NotAnswered)?;
        let last = entry.ranges.range((generation, 0)..=(generation, address)).next_back();
        if let Some((_, range)) = last.filter(|(_, range)| address < range.end) {
            return range.function.ok_or(Missing::Conflict);
        }
        if entry.no_method.contains(&(generation, address)) {
            return Err(Missing::NoMethod);
        }
        Err(if entry.full { Missing::StoreFull } else { Missing::NotAnswered })
    }

    /// The symbol of a function.
    pub(super) fn symbol(&self, id: FunctionId) -> Option<Symbol> {
        self.symbols.get(&id).cloned()
    }

    /// How often code at `address` was unloaded.
    pub(super) fn generation(&self, process: ProcessId, address: u64) -> u32 {
        self.processes.get(&process).map_or(0, |entry| entry.generation(address))
    }

    /// Drops all that is known of a process.
    pub(super) fn forget(&mut self, process: ProcessId) {
        self.processes.remove(&process);
        let symbols = &mut self.symbols;
        self.ids.retain(|key, id| {
            let keep = key.process != process;
            if !keep {
                symbols.remove(id);
            }
            keep
        });
    }

    /// Names refused because a store was full, and ranges two methods claimed.
    pub(super) fn counters(&self) -> [(&'static str, u64); 2] {
        [("managed_names_refused", self.refused), ("managed_ranges_claimed_twice", self.conflicts)]
    }
}

enum Inserted {
    Yes,
    Full,
    Conflict,
}

impl Process {
    fn generation(&self, address: u64) -> u32 {
        self.unloaded.range(..=address).next_back().map_or(0, |(_, &count)| count)
    }

    fn unload(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        if self.unloaded.len() >= MAX_UNLOAD_BOUNDARIES {
            self.ranges.clear();
            self.full = true;
            return;
        }
        for boundary in [start, end] {
            let count = self.generation(boundary);
            self.unloaded.insert(boundary, count);
        }
        for (_, count) in self.unloaded.range_mut(start..end) {
            *count = count.saturating_add(1);
        }
    }

    fn insert(&mut self, start: u64, end: u64, function: FunctionId) -> Inserted {
        if start >= end {
            return Inserted::Yes;
        }
        if self.full || self.ranges.len() >= MAX_RANGES {
            self.full = true;
            return Inserted::Full;
        }
        let generation = self.generation(start);
        // A neighbour that overlaps and is another function: the code was replaced and nobody said so.
        let mut conflict = false;
        let overlapping: Vec<u64> = self
            .ranges
            .range((generation, 0)..(generation, end))
            .rev()
            .take_while(|(_, range)| range.end > start)
            .map(|(&(_, first), _)| first)
            .collect();
        for first in overlapping {
            if let Some(range) = self.ranges.get_mut(&(generation, first))
                && range.function != Some(function)
            {
                range.function = None;
                conflict = true;
            }
        }
        let function = (!conflict).then_some(function);
        let entry = self.ranges.entry((generation, start)).or_insert(Range { end, function });
        entry.end = entry.end.max(end);
        if conflict { Inserted::Conflict } else { Inserted::Yes }
    }
}

/// File name of a module, without directories.
fn module_name(path: &str) -> Arc<str> {
    let name = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let name = pretty::clean(name);
    // Brackets are for modules that are not files.
    name.trim_start_matches('[').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: ProcessId = ProcessId(7);

    fn method(token: u32, name: &str, ranges: &[(u64, u32)]) -> ShimEvent {
        ShimEvent::Method(Box::new(Method {
            asked: ranges[0].0,
            module_id: 1,
            token,
            dynamic: false,
            name: name.to_owned(),
            module: "/app/App.dll".to_owned(),
            ranges: ranges.to_vec(),
        }))
    }

    fn name(names: &ManagedNames, address: u64, generation: u32) -> Result<String, Missing> {
        let id = names.find(PROCESS, address, generation)?;
        Ok(names.symbol(id).unwrap().name.to_string())
    }

    #[test]
    fn bodies_of_one_method_share_its_identity_and_instantiations_do_not() {
        let mut names = ManagedNames::default();
        names.observe(PROCESS, &method(1, "A.B<System.Int32>.M()", &[(0x1000, 0x100), (0x9000, 0x10)]));
        names.observe(PROCESS, &method(1, "A.B<System.Int32>.M()", &[(0x2000, 0x100)]));
        names.observe(PROCESS, &method(1, "A.B<System.String>.M()", &[(0x3000, 0x100)]));
        let id = |address| names.find(PROCESS, address, 0);
        assert_eq!(id(0x1000), id(0x2000));
        assert_eq!(id(0x1000), id(0x900f));
        assert_ne!(id(0x1000), id(0x3000));
        assert_eq!(id(0x1100), Err(Missing::NotAnswered));
        assert_eq!(names.symbol(id(0x1000).unwrap()).unwrap().module, Module::Managed("App.dll".into()));
        assert_eq!(names.find(ProcessId(8), 0x1000, 0), Err(Missing::NotAnswered));
    }

    #[test]
    fn code_that_replaced_unloaded_code_has_its_own_name_and_the_old_keeps_its() {
        let mut names = ManagedNames::default();
        names.observe(PROCESS, &method(1, "Old.M()", &[(0x1000, 0x100)]));
        names.observe(PROCESS, &method(3, "Stays.M()", &[(0x2000, 0x100)]));
        names.observe(PROCESS, &ShimEvent::CodeUnloaded { ranges: vec![(0x1000, 0x100)] });
        assert_eq!(names.generation(PROCESS, 0x1000), 1);
        assert_eq!(names.generation(PROCESS, 0x1100), 0);
        assert_eq!(name(&names, 0x1000, 1), Err(Missing::NotAnswered));
        names.observe(PROCESS, &method(2, "New.M()", &[(0x1000, 0x80)]));
        assert_eq!(name(&names, 0x1000, 0).as_deref(), Ok("Old.M()"));
        assert_eq!(name(&names, 0x1000, 1).as_deref(), Ok("New.M()"));
        assert_eq!(name(&names, 0x2000, 0).as_deref(), Ok("Stays.M()"));
    }

    #[test]
    fn code_claimed_by_two_methods_has_no_name() {
        let mut names = ManagedNames::default();
        names.observe(PROCESS, &method(1, "A.M()", &[(0x1000, 0x100)]));
        names.observe(PROCESS, &method(2, "B.M()", &[(0x1080, 0x100)]));
        assert_eq!(name(&names, 0x1000, 0), Err(Missing::Conflict));
        assert_eq!(name(&names, 0x1100, 0), Err(Missing::Conflict));
        assert_eq!(names.counters()[1].1, 1);
    }

    #[test]
    fn no_method_is_its_own_reason_and_forgetting_a_process_frees_its_names() {
        let mut names = ManagedNames::default();
        names.observe(PROCESS, &ShimEvent::NoMethod { asked: 0x5000, hresult: -1 });
        assert_eq!(name(&names, 0x5000, 0), Err(Missing::NoMethod));
        names.observe(PROCESS, &method(1, "A.M()", &[(0x1000, 0x100)]));
        names.forget(PROCESS);
        assert!(names.ids.is_empty() && names.symbols.is_empty() && names.processes.is_empty());
    }

    #[test]
    fn overlapping_unloads_add_up() {
        let mut process = Process::default();
        process.unload(10, 20);
        process.unload(15, 30);
        process.unload(0, 100);
        process.unload(5, 5);
        let counts: Vec<u32> =
            [0, 9, 10, 15, 19, 20, 29, 30, 99, 100].map(|at| process.generation(at)).into();
        assert_eq!(counts, [1, 1, 2, 3, 3, 2, 2, 1, 1, 0]);
    }
}
