//! Names of managed code, as shims tell them or as they are read from memory, bound to the frames
//! that wanted them.
//!
//! A frame is (process, first address of the body, generation), and the process table decides when
//! an address gets a new generation. So an answer is about the code that is there when it is given:
//! it names the frames that wait for it, and it is kept for other frames in its ranges until that
//! code is unloaded or a frame of a newer generation shows that it was replaced. A frame keeps its
//! name for ever; one that was still waiting when its code went stays nameless. A process is
//! believed about itself only, what is kept is bounded, and two methods that claim the same code
//! make it nameless rather than wrong.

use super::managed_lines::BodyLines;
use super::perf_map::PerfMapName;
use super::{FunctionId, Symbol, SymbolModule};
use foldhash::HashMap;
use perfusion_model::event::{MethodBody, ShimEvent};
use perfusion_model::frame::ProcessId;
use perfusion_model::pretty;
use profiler_protocol::record::NOT_NOW;
use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Code ranges, and frames, kept per process.
const MAX_RANGES: usize = 300_000;
/// What names may take, of all processes and of one: some 300,000 and 75,000 functions with names
/// as they are. A name may be as long as its process likes, up to 2 KiB (`record::MAX_NAME_BYTES`).
const MAX_BYTES: usize = 128 << 20;
const MAX_PROCESS_BYTES: usize = 32 << 20;
/// What a function takes besides its texts: a symbol, a key, and their places in two tables.
const FUNCTION_BYTES: usize = size_of::<FunctionKey>() + size_of::<Symbol>() + 64;
/// Why an address has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingName {
    /// Nobody answered for it.
    NotAnswered,
    /// The runtime said it has no method there.
    NoMethod,
    /// Its code was unloaded before the answer came.
    Unloaded,
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

#[derive(Clone)]
struct ManagedCodeRange {
    end: u64,
    /// `None` after a second method claimed the range.
    function: Option<FunctionId>,
    /// The lines of its code, where they are known.
    lines: Option<Arc<BodyLines>>,
}

impl ManagedCodeRange {
    fn binding(&self) -> Result<NamedBody, MissingName> {
        let function = self.function.ok_or(MissingName::Conflict)?;
        Ok(NamedBody { function, lines: self.lines.clone() })
    }
}

/// What a frame is bound to.
#[derive(Clone, Debug)]
struct NamedBody {
    function: FunctionId,
    lines: Option<Arc<BodyLines>>,
}

/// First address and generation of a body.
type CodeBody = (u64, u32);

#[derive(Clone, Copy)]
struct PendingFrame {
    generation: u32,
    /// The shim would not ask the runtime: not now.
    withheld: bool,
}

#[derive(Default)]
struct ProcessNames {
    /// Code that is there now, by first address.
    live: BTreeMap<u64, ManagedCodeRange>,
    /// What each frame is bound to.
    bound: HashMap<CodeBody, Result<NamedBody, MissingName>>,
    /// What was read of frames from the process's memory, for want of an answer.
    read: HashMap<CodeBody, FunctionId>,
    /// Frames that wait for an answer, by first address.
    waiting: BTreeMap<u64, PendingFrame>,
    /// How many of them are withheld.
    withheld: usize,
    /// Newest generation seen of an address, where it is not 0.
    newest: HashMap<u64, u32>,
    full: bool,
    /// What its functions take.
    bytes: usize,
}

/// The store.
#[derive(Default)]
pub(super) struct ManagedNames {
    processes: HashMap<ProcessId, ProcessNames>,
    ids: HashMap<FunctionKey, FunctionId>,
    symbols: HashMap<FunctionId, Symbol>,
    next_id: u32,
    /// What the functions of all processes take.
    bytes: usize,
    refused: u64,
    conflicts: u64,
}

impl ManagedNames {
    /// Takes what a shim of `process` said.
    pub(super) fn observe(&mut self, process: ProcessId, event: &ShimEvent) {
        match event {
            ShimEvent::Method(method) => self.learn(process, method, None),
            ShimEvent::NoMethod { asked, hresult, .. } => {
                let entry = self.processes.entry(process).or_default();
                if *hresult == NOT_NOW {
                    entry.withhold(*asked);
                } else if let Some(generation) = entry.take(*asked) {
                    entry.bound.insert((*asked, generation), Err(MissingName::NoMethod));
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

    /// Notes that a frame needs a name. True when the name is not known and the shim is to be
    /// asked: nobody was yet, or it said "not now" and the frame was `surely` on a stack since.
    pub(super) fn want(
        &mut self,
        process: ProcessId,
        start: u64,
        generation: u32,
        surely: bool,
    ) -> bool {
        self.processes.entry(process).or_default().want(start, generation, surely)
    }

    /// True while a question about this address is on its way.
    pub(super) fn is_waiting(&self, process: ProcessId, address: u64) -> bool {
        let waiting = self.processes.get(&process).and_then(|entry| entry.waiting.get(&address));
        waiting.is_some_and(|waiting| !waiting.withheld)
    }

    /// Addresses of a process nobody answered for yet.
    pub(super) fn waiting(&self, process: ProcessId) -> impl Iterator<Item = u64> {
        let all = self.processes.get(&process).into_iter().flat_map(|entry| &entry.waiting);
        all.filter(|(_, waiting)| !waiting.withheld).map(|(&start, _)| start)
    }

    /// Addresses within a range whose answer was withheld.
    pub(super) fn withheld(
        &self,
        process: ProcessId,
        within: RangeInclusive<u64>,
    ) -> impl Iterator<Item = u64> {
        let entry = self.processes.get(&process).filter(|entry| entry.withheld > 0);
        let all = entry.into_iter().flat_map(move |entry| entry.waiting.range(within.clone()));
        all.filter(|(_, waiting)| waiting.withheld).map(|(&start, _)| start)
    }

    /// True when a shim of the process said "not now" about frames that nobody has seen since.
    pub(super) fn has_withheld(&self, process: ProcessId) -> bool {
        self.processes.get(&process).is_some_and(|entry| entry.withheld > 0)
    }

    /// Takes the name of the frame at `asked` that was read from the process's memory.
    pub(super) fn learn_read(&mut self, process: ProcessId, generation: u32, method: &MethodBody) {
        let id = self.function_of(process, method);
        let entry = self.processes.entry(process).or_default();
        match id.filter(|_| entry.read.len() < MAX_RANGES) {
            Some(id) => drop(entry.read.insert((method.asked, generation), id)),
            None => {
                self.refused = self.refused.saturating_add(1);
                entry.full = true;
            }
        }
    }

    /// True when the name of this body was read.
    pub(super) fn is_read(&self, process: ProcessId, start: u64, generation: u32) -> bool {
        let entry = self.processes.get(&process);
        entry.is_some_and(|entry| entry.read.contains_key(&(start, generation)))
    }

    fn function_of(&mut self, process: ProcessId, method: &MethodBody) -> Option<FunctionId> {
        let raw = if method.name.is_empty() { "[nameless method]" } else { &method.name };
        let module = (!method.module.is_empty()).then(|| module_name(&method.module));
        let module_id = if method.dynamic { 0 } else { method.module_id };
        let token = if method.dynamic { 0 } else { method.token };
        self.function(process, (module_id, token), raw, module)
    }

    /// Takes what a shim of `process` said of a method body, whose lines are these.
    pub(super) fn learn(
        &mut self,
        process: ProcessId,
        method: &MethodBody,
        lines: Option<Arc<BodyLines>>,
    ) {
        let id = self.function_of(process, method);
        let entry = self.processes.entry(process).or_default();
        let Some(id) = id else {
            self.refused = self.refused.saturating_add(1);
            entry.full = true;
            return;
        };
        for &(start, len) in &method.ranges {
            let end = start.saturating_add(u64::from(len));
            match entry.insert(start, end, id, lines.clone()) {
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
        let system_name: Arc<str> = perfusion_model::text::clean(raw).as_ref().into();
        let key = FunctionKey { process, module_id, token, name: Arc::clone(&system_name) };
        if let Some(&id) = self.ids.get(&key) {
            return Some(id);
        }
        let name: Arc<str> = pretty::managed(&system_name).into();
        let texts =
            name.len() + system_name.len() + module.as_ref().map_or(0, |module| module.len());
        let bytes = FUNCTION_BYTES + texts;
        let of_process = &mut self.processes.entry(process).or_default().bytes;
        if *of_process + bytes > MAX_PROCESS_BYTES || self.bytes + bytes > MAX_BYTES {
            return None;
        }
        let id = FunctionId(self.next_id);
        self.next_id = self.next_id.checked_add(1)?;
        *of_process += bytes;
        self.bytes += bytes;
        let symbol = Symbol {
            name,
            system_name,
            module: module.map_or(SymbolModule::Jit, SymbolModule::Managed),
            function: Some(id),
            unresolved: None,
        };
        self.symbols.insert(id, symbol);
        self.ids.insert(key, id);
        Some(id)
    }

    /// A function that is only known from a perf map.
    pub(super) fn named_by_perf_map(
        &mut self,
        process: ProcessId,
        name: &PerfMapName,
    ) -> Option<FunctionId> {
        let module = name.module.as_deref().map(module_name);
        self.function(process, (0, 0), &name.name, module)
    }

    /// The function a frame belongs to.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn find(
        &self,
        process: ProcessId,
        start: u64,
        generation: u32,
    ) -> Result<FunctionId, MissingName> {
        let told = self.told(process, start, generation);
        let entry = self.processes.get(&process).ok_or(MissingName::NotAnswered)?;
        // Two that claim one place are not told apart by a third.
        match (told, entry.read.get(&(start, generation))) {
            (Err(MissingName::Conflict), _) | (Ok(_), _) | (_, None) => told,
            (Err(_), Some(&read)) => Ok(read),
        }
    }

    /// The same as far as the shim has told it, which is the one that knows lines.
    pub(super) fn told(
        &self,
        process: ProcessId,
        start: u64,
        generation: u32,
    ) -> Result<FunctionId, MissingName> {
        let entry = self.processes.get(&process).ok_or(MissingName::NotAnswered)?;
        let unbound = if entry.full { MissingName::StoreFull } else { MissingName::NotAnswered };
        let bound = entry.bound.get(&(start, generation));
        bound.map_or(Err(unbound), |bound| bound.as_ref().map(|b| b.function).map_err(|why| *why))
    }

    /// The lines of the body a frame belongs to.
    pub(super) fn lines(
        &self,
        process: ProcessId,
        start: u64,
        generation: u32,
    ) -> Option<&BodyLines> {
        let bound = self.processes.get(&process)?.bound.get(&(start, generation))?;
        bound.as_ref().ok()?.lines.as_deref()
    }

    /// Forgets all processes but these.
    pub(super) fn keep(&mut self, processes: &HashSet<ProcessId>) {
        let bytes = &mut self.bytes;
        self.processes.retain(|process, entry| {
            let kept = processes.contains(process);
            *bytes -= if kept { 0 } else { entry.bytes };
            kept
        });
        let symbols = &mut self.symbols;
        self.ids.retain(|key, id| {
            let kept = processes.contains(&key.process);
            if !kept {
                symbols.remove(id);
            }
            kept
        });
    }

    /// The symbol of a function.
    pub(super) fn symbol(&self, id: FunctionId) -> Option<Symbol> {
        self.symbols.get(&id).cloned()
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

impl ProcessNames {
    fn want(&mut self, start: u64, generation: u32, surely: bool) -> bool {
        if self.bound.contains_key(&(start, generation)) {
            return false;
        }
        if let Some(waiting) = self.waiting.get_mut(&start).filter(|w| w.generation == generation) {
            let again = waiting.withheld && surely;
            if again {
                waiting.withheld = false;
                self.withheld -= 1;
            }
            return again;
        }
        if self.bound.len() + self.waiting.len() >= MAX_RANGES {
            self.full = true;
            return false;
        }
        let newest = self.newest.get(&start).copied().unwrap_or(0);
        if generation < newest {
            self.bound.insert((start, generation), Err(MissingName::Unloaded));
            return false;
        }
        if generation > newest {
            self.unload(start, start.saturating_add(1));
            self.newest.insert(start, generation);
        }
        match self.live_at(start) {
            Some(range) => {
                self.bound.insert((start, generation), range.binding());
                false
            }
            None => {
                self.take(start);
                self.waiting.insert(start, PendingFrame { generation, withheld: false });
                true
            }
        }
    }

    /// The frame at `start` does not wait any more; its generation.
    fn take(&mut self, start: u64) -> Option<u32> {
        let waiting = self.waiting.remove(&start)?;
        self.withheld -= usize::from(waiting.withheld);
        Some(waiting.generation)
    }

    /// The frame at `start` waits to be seen again.
    fn withhold(&mut self, start: u64) {
        if let Some(waiting) = self.waiting.get_mut(&start) {
            self.withheld += usize::from(!std::mem::replace(&mut waiting.withheld, true));
        }
    }

    fn live_at(&self, address: u64) -> Option<ManagedCodeRange> {
        let (_, range) = self.live.range(..=address).next_back()?;
        (address < range.end).then(|| range.clone())
    }

    /// First addresses of the live ranges that overlap `start..end`; live ranges never overlap each
    /// other.
    fn overlapping(&self, start: u64, end: u64) -> Vec<u64> {
        let before = self.live.range(..start).next_back().filter(|(_, range)| range.end > start);
        before.into_iter().chain(self.live.range(start..end)).map(|(&first, _)| first).collect()
    }

    fn unload(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        for first in self.overlapping(start, end) {
            self.live.remove(&first);
        }
        let gone: Vec<CodeBody> =
            self.waiting.range(start..end).map(|(&s, w)| (s, w.generation)).collect();
        for (start, generation) in gone {
            self.take(start);
            self.bound.insert((start, generation), Err(MissingName::Unloaded));
        }
    }

    fn insert(
        &mut self,
        start: u64,
        end: u64,
        function: FunctionId,
        lines: Option<Arc<BodyLines>>,
    ) -> Inserted {
        if start >= end {
            return Inserted::Yes;
        }
        if self.live.len() >= MAX_RANGES {
            self.full = true;
            return Inserted::Full;
        }
        // A range that overlaps and is another function: the code was replaced and nobody said so,
        // or somebody lies.
        let overlapping = self.overlapping(start, end);
        let (mut first, mut last, mut agreed) = (start, end, Some(function));
        for known in overlapping {
            if let Some(range) = self.live.remove(&known) {
                (first, last) = (first.min(known), last.max(range.end));
                agreed = agreed.filter(|_| range.function == Some(function));
            }
        }
        let range = ManagedCodeRange { end: last, function: agreed, lines };
        let binding = range.binding();
        self.live.insert(first, range);
        let named: Vec<CodeBody> =
            self.waiting.range(first..last).map(|(&s, w)| (s, w.generation)).collect();
        for (start, generation) in named {
            self.take(start);
            self.bound.insert((start, generation), binding.clone());
        }
        if agreed.is_none() { Inserted::Conflict } else { Inserted::Yes }
    }
}

/// File name of a module, without directories.
fn module_name(path: &str) -> Arc<str> {
    let name = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let name = perfusion_model::text::clean(name);
    // Brackets are for modules that are not files.
    name.trim_start_matches('[').into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfusion_model::event::MonotonicNs;
    use proptest::prelude::{prop_assert, proptest};

    const PROCESS: ProcessId = ProcessId(7);

    fn method(token: u32, name: &str, ranges: &[(u64, u32)]) -> ShimEvent {
        ShimEvent::Method(Box::new(MethodBody {
            asked: ranges[0].0,
            module_id: 1,
            token,
            dynamic: false,
            name: name.to_owned(),
            module: "/app/App.dll".to_owned(),
            ranges: ranges.to_vec(),
            il_map: None,
        }))
    }

    fn name(
        names: &mut ManagedNames,
        address: u64,
        generation: u32,
    ) -> Result<String, MissingName> {
        names.want(PROCESS, address, generation, true);
        let id = names.find(PROCESS, address, generation)?;
        Ok(names.symbol(id).unwrap().name.to_string())
    }

    #[test]
    fn names_of_any_length_take_bounded_memory_and_leave_room_for_other_processes() {
        let (mut names, long) = (ManagedNames::default(), "n".repeat(2_000));
        let tell = |names: &mut ManagedNames, process, count: u32| {
            for token in 0..count {
                let at = u64::from(token) * 16;
                names.observe(
                    ProcessId(process),
                    &method(token, &format!("{long}{token}"), &[(at, 16)]),
                );
            }
        };
        tell(&mut names, 1, 9_000);
        assert!(
            names.bytes <= MAX_PROCESS_BYTES && names.refused > 0,
            "{} {}",
            names.bytes,
            names.refused
        );
        assert_eq!(name(&mut names, 0x10, 0), Err(MissingName::NotAnswered));
        names.observe(PROCESS, &method(1, "Of another", &[(0x10, 16)]));
        assert_eq!(name(&mut names, 0x10, 0).as_deref(), Ok("Of another"));
        (10..14).for_each(|process| tell(&mut names, process, 9_000));
        assert!(
            names.bytes <= MAX_BYTES && names.bytes > MAX_BYTES - MAX_PROCESS_BYTES,
            "{}",
            names.bytes
        );
        names.keep(&HashSet::from([PROCESS]));
        assert!(names.bytes < 5_000 && names.ids.len() == 1, "{}", names.bytes);
    }

    #[test]
    fn bodies_of_one_method_share_its_identity_and_instantiations_do_not() {
        let mut names = ManagedNames::default();
        for start in [0x1000, 0x900f, 0x2000, 0x3000, 0x1100] {
            assert!(names.want(PROCESS, start, 0, true), "asked once");
            assert!(!names.want(PROCESS, start, 0, true), "and not again");
        }
        names.observe(
            PROCESS,
            &method(1, "A.B<System.Int32>.M()", &[(0x1000, 0x100), (0x9000, 0x10)]),
        );
        names.observe(PROCESS, &method(1, "A.B<System.Int32>.M()", &[(0x2000, 0x100)]));
        names.observe(PROCESS, &method(1, "A.B<System.String>.M()", &[(0x3000, 0x100)]));
        let id = |address| names.find(PROCESS, address, 0);
        assert_eq!(id(0x1000), id(0x2000));
        assert_eq!(id(0x1000), id(0x900f));
        assert_ne!(id(0x1000), id(0x3000));
        assert_eq!(id(0x1100), Err(MissingName::NotAnswered));
        assert_eq!(names.waiting(PROCESS).collect::<Vec<_>>(), [0x1100]);
        assert_eq!(
            names.symbol(id(0x1000).unwrap()).unwrap().module,
            SymbolModule::Managed("App.dll".into())
        );
        assert_eq!(names.find(ProcessId(8), 0x1000, 0), Err(MissingName::NotAnswered));
        assert!(!names.want(PROCESS, 0x2010, 0, true), "an answer serves the whole method");
        assert_eq!(names.find(PROCESS, 0x2010, 0), names.find(PROCESS, 0x1000, 0));
    }

    #[test]
    fn code_that_replaced_unloaded_code_has_its_own_name_and_the_old_keeps_its() {
        let mut names = ManagedNames::default();
        names.want(PROCESS, 0x1000, 0, true);
        names.want(PROCESS, 0x1040, 0, true);
        names.observe(PROCESS, &method(1, "Old.M()", &[(0x1000, 0x40)]));
        names.observe(PROCESS, &method(3, "Stays.M()", &[(0x2000, 0x100)]));
        names.observe(PROCESS, &ShimEvent::CodeUnloaded { ranges: vec![(0x1000, 0x100)] });
        assert_eq!(name(&mut names, 0x1040, 0), Err(MissingName::Unloaded));
        assert_eq!(name(&mut names, 0x1000, 1), Err(MissingName::NotAnswered));
        names.observe(PROCESS, &method(2, "New.M()", &[(0x1000, 0x80)]));
        assert_eq!(name(&mut names, 0x1000, 0).as_deref(), Ok("Old.M()"));
        assert_eq!(name(&mut names, 0x1000, 1).as_deref(), Ok("New.M()"));
        assert_eq!(
            name(&mut names, 0x1040, 0),
            Err(MissingName::Unloaded),
            "an answer about later code is not for it"
        );
        assert_eq!(name(&mut names, 0x2000, 0).as_deref(), Ok("Stays.M()"));
    }

    #[test]
    fn a_newer_generation_is_asked_about_although_nobody_reported_an_unload() {
        let mut names = ManagedNames::default();
        names.want(PROCESS, 0x1000, 0, true);
        names.observe(PROCESS, &method(1, "Old.M()", &[(0x1000, 0x100)]));
        assert!(names.want(PROCESS, 0x1000, 1, true));
        names.observe(PROCESS, &method(2, "New.M()", &[(0x1000, 0x80)]));
        assert_eq!(name(&mut names, 0x1000, 0).as_deref(), Ok("Old.M()"));
        assert_eq!(name(&mut names, 0x1000, 1).as_deref(), Ok("New.M()"));
    }

    #[test]
    fn code_claimed_by_two_methods_has_no_name() {
        let mut names = ManagedNames::default();
        names.observe(PROCESS, &method(1, "A.M()", &[(0x1000, 0x100)]));
        names.observe(PROCESS, &method(2, "B.M()", &[(0x1080, 0x100)]));
        assert_eq!(name(&mut names, 0x1000, 0), Err(MissingName::Conflict));
        assert_eq!(name(&mut names, 0x1100, 0), Err(MissingName::Conflict));
        assert_eq!(names.counters()[1].1, 1);
    }

    #[test]
    fn a_name_that_was_read_serves_until_the_shim_tells_one() {
        let mut names = ManagedNames::default();
        let read = |names: &mut ManagedNames, generation, name: &str| {
            let ShimEvent::Method(body) = method(1, name, &[(0x1000, 0)]) else { panic!() };
            names.learn_read(PROCESS, generation, &body);
        };
        read(&mut names, 0, "Old.M()");
        assert_eq!(name(&mut names, 0x1000, 0).as_deref(), Ok("Old.M()"));
        assert_eq!(name(&mut names, 0x1000, 1), Err(MissingName::NotAnswered), "other code");
        assert_eq!(names.waiting(PROCESS).collect::<Vec<_>>(), [0x1000], "a shim is still asked");
        read(&mut names, 1, "Read.M()");
        names.observe(PROCESS, &method(2, "Told.M()", &[(0x1000, 0x10)]));
        assert_eq!(name(&mut names, 0x1000, 1).as_deref(), Ok("Told.M()"));
        assert_eq!(name(&mut names, 0x1000, 0).as_deref(), Ok("Old.M()"));
        names.observe(PROCESS, &method(3, "Other.M()", &[(0x1008, 0x10)]));
        read(&mut names, 0, "Third.M()");
        assert_eq!(name(&mut names, 0x1008, 0), Err(MissingName::Conflict));
    }

    #[test]
    fn no_method_is_its_own_reason() {
        let mut names = ManagedNames::default();
        names.want(PROCESS, 0x5000, 0, true);
        names.observe(
            PROCESS,
            &ShimEvent::NoMethod { asked: 0x5000, hresult: -1, seen: MonotonicNs(0) },
        );
        assert_eq!(name(&mut names, 0x5000, 0), Err(MissingName::NoMethod));
        assert!(names.want(PROCESS, 0x6000, 0, true) && !names.want(PROCESS, 0x6000, 0, true));
        names.observe(
            PROCESS,
            &ShimEvent::NoMethod { asked: 0x6000, hresult: NOT_NOW, seen: MonotonicNs(0) },
        );
        assert!(names.has_withheld(PROCESS) && !names.is_waiting(PROCESS, 0x6000));
        assert_eq!(names.withheld(PROCESS, 0..=0x6000).collect::<Vec<_>>(), [0x6000]);
        assert!(
            !names.want(PROCESS, 0x6000, 0, false),
            "what may not be there is not asked about again"
        );
        assert!(
            names.want(PROCESS, 0x6000, 0, true),
            "not now means: ask again when it is seen again"
        );
        assert!(!names.has_withheld(PROCESS) && names.is_waiting(PROCESS, 0x6000));
        names.observe(
            PROCESS,
            &ShimEvent::NoMethod { asked: 0x6000, hresult: NOT_NOW, seen: MonotonicNs(0) },
        );
        names.observe(PROCESS, &method(1, "A.M()", &[(0x6000, 0x10)]));
        assert!(!names.has_withheld(PROCESS));
        assert_eq!(
            name(&mut names, 0x6000, 0).as_deref(),
            Ok("A.M()"),
            "an answer to another question serves"
        );
    }

    proptest! {
        /// Whatever a process says in whatever order, live ranges stay apart, so a look-up has one
        /// answer.
        #[test]
        fn live_ranges_never_overlap(
            steps in proptest::collection::vec((0u8..3, 0u64..64, 0u64..16, 0u32..4), 0..60),
        ) {
            let mut process = ProcessNames::default();
            for (step, start, len, function) in steps {
                match step {
                    0 => process.unload(start, start + len),
                    1 => { process.insert(start, start + len, FunctionId(function), None); }
                    _ => { process.want(start, function, false); }
                }
                let ends: Vec<u64> = process.live.values().map(|range| range.end).collect();
                let starts = process.live.keys().copied().skip(1);
                prop_assert!(ends.iter().zip(starts).all(|(&end, start)| end <= start));
            }
        }
    }
}
