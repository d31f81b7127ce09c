//! The runtime's walk over its heap, event by event: what is there by type is counted always, the
//! graph is kept as far as memory allows.
//!
//! A walk is part of a blocking collection of all generations that an event session asked for
//! (`GCHeapCollect`). One thread writes it, in order: static fields, then objects, references,
//! roots, each sort numbered from 0 on. Up to .NET 9 a second walk may follow, of the same thread
//! or, with server collections, another one; what other threads write stands anywhere in the
//! stream. The first walk is taken, and a number 0 that comes again ends it. Layouts:
//! `ClrEtwAll.man` and `eventtrace_gcheap.cpp` of dotnet/runtime. What a process sends is bounded,
//! and believed about nothing but itself.

mod pauses;
mod sequence;

use self::pauses::{PauseMark, PauseMarks};
use self::sequence::{BulkEvent, WalkSequence};
use crate::graph::{Graph, GraphBuilder, NOWHERE, NoGraph};
use perfusion_dotnet::declared::StaticField;
use perfusion_dotnet::fields::PayloadFields;
use perfusion_dotnet::nettrace::NettraceEvent;
use perfusion_dotnet::types::{RuntimeType, RuntimeTypes, TypeBudget};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

/// Events of the runtime.
mod id {
    pub(super) const GC_START: u32 = 1;
    pub(super) const RESTARTED: u32 = 3;
    pub(super) const SUSPENDING: u32 = 9;
    pub(super) const TYPES: u32 = 15;
    pub(super) const ROOTS: u32 = 16;
    pub(super) const DEPENDENT_HANDLES: u32 = 17;
    pub(super) const OBJECTS: u32 = 18;
    pub(super) const REFERENCES: u32 = 19;
    pub(super) const STATICS: u32 = 38;
}

/// Roots that are kept.
const MAX_ROOTS: usize = 1 << 24;
/// Static fields with names.
const MAX_STATICS: usize = 1 << 18;

/// Flags of roots.
const PINNING: u32 = 1;
const WEAK: u32 = 2;
const COUNTED: u32 = 8;

/// What makes an object live, by kind. In order of preference where an object has several roots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RootKind {
    /// A static field.
    Static,
    /// A thread-static field (.NET 9 and newer). They are told after a thread's frames, with the
    /// method of the last of these, which is none where a thread begins in the runtime; the main
    /// thread's are as variables of its outermost method, and cannot be told from such.
    ThreadStatic,
    /// A local variable.
    Stack,
    /// A strong handle: `GCHandle`, and the runtime's own tables, in which are the static fields of
    /// generic types and, before .NET 9, the thread-static ones.
    StrongHandle,
    /// A pinning handle.
    PinningHandle,
    /// A handle that counts references of native code.
    CountedHandle,
    /// The queue of objects whose finalizers are to run.
    FinalizerQueue,
    /// What the runtime does not say more about.
    Other,
}

impl RootKind {
    /// All, in order.
    pub const ALL: [Self; 8] = [
        Self::Static,
        Self::ThreadStatic,
        Self::Stack,
        Self::StrongHandle,
        Self::PinningHandle,
        Self::CountedHandle,
        Self::FinalizerQueue,
        Self::Other,
    ];

    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Static => "static field",
            Self::ThreadStatic => "thread-static field",
            Self::Stack => "stack",
            Self::StrongHandle => "handle (strong)",
            Self::PinningHandle => "handle (pinned)",
            Self::CountedHandle => "handle (ref-counted)",
            Self::FinalizerQueue => "finalizer queue",
            Self::Other => "other root",
        }
    }

    /// Of the runtime's kinds (`EtwGCRootKind`) and flags; `None` for what holds nothing. A
    /// variable of a stack comes with its method.
    fn of(kind: u8, flags: u32, id: u64) -> Option<Self> {
        Some(match (kind, flags) {
            (_, flags) if flags & WEAK != 0 => return None,
            (0, _) if id == 0 => Self::ThreadStatic,
            (0, _) => Self::Stack,
            (1, _) => Self::FinalizerQueue,
            (_, flags) if flags & COUNTED != 0 => Self::CountedHandle,
            (2, flags) if flags & PINNING != 0 => Self::PinningHandle,
            (2, _) => Self::StrongHandle,
            _ => Self::Other,
        })
    }
}

/// A root of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Root {
    /// Its kind.
    pub kind: RootKind,
    /// Which static field, for one that has a name.
    pub field: Option<u32>,
    /// What it refers to.
    pub object: u32,
}

/// What was found.
#[derive(Debug)]
pub struct HeapSurvey {
    /// Types by their numbers.
    pub types: Vec<RuntimeType>,
    /// Static fields by their numbers.
    pub fields: Vec<StaticField>,
    /// The graph, or why there is none.
    pub graph: Result<Graph, NoGraph>,
    /// What holds it, without doubles; empty without a graph.
    pub roots: Vec<Root>,
    /// Roots of each kind, as they came.
    pub root_counts: [u64; RootKind::ALL.len()],
    /// The objects that are watched by those weak handles that were asked for, each with its
    /// handle.
    pub watched: Vec<(u64, u32)>,
    /// Bytes of types and names.
    pub type_bytes: usize,
    /// Weak handles, which hold nothing.
    pub weak: u64,
    /// Dependent handles (`ConditionalWeakTable`), each of which lets its key hold its value.
    pub dependents: u64,
    /// For how long the survey stopped the managed threads, in all.
    pub pause: Duration,
    /// How many collections it made the runtime run.
    pub collections: u32,
    /// Events of the walk that do not have the layout they should.
    pub malformed: u64,
    /// Events the runtime had no room for. With a graph none with objects or references, except
    /// perhaps the walk's last objects where these refer to nothing.
    pub lost: u64,
}

impl HeapSurvey {
    /// Objects of all types.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.types.iter().map(|found| found.objects).fold(0, u64::saturating_add)
    }

    /// Their bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.types.iter().map(|found| found.bytes).fold(0, u64::saturating_add)
    }

    /// What is kept beside the graph, in bytes.
    #[must_use]
    pub(crate) fn bytes_beside(&self) -> usize {
        self.type_bytes + bytes_of(&self.fields, &self.roots)
    }
}

/// What static fields take beside their names, and roots with the places that become objects in the
/// end.
fn bytes_of(fields: &[StaticField], roots: &[Root]) -> usize {
    size_of_val(fields) + size_of_val(roots) + roots.len() * size_of::<u32>()
}

/// Takes the events of a walk and builds the survey from them.
#[derive(Debug)]
pub struct HeapWalk {
    sequence: WalkSequence,
    pauses: PauseMarks,
    types: RuntimeTypes,
    objects: u64,
    fields: Vec<StaticField>,
    graph: Result<GraphBuilder, NoGraph>,
    /// With the object's place, to become its number.
    roots: Vec<Root>,
    root_counts: [u64; RootKind::ALL.len()],
    /// Weak handles that are asked for, and those that were met with the object's place.
    handles: Arc<HashSet<u64>>,
    watched: Vec<(u64, u32)>,
    weak: u64,
    dependents: u64,
    malformed: u64,
}

impl HeapWalk {
    /// Takes events of a walk that has not begun. All that is kept of it may take so much memory.
    #[must_use]
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            sequence: WalkSequence::default(),
            pauses: PauseMarks::default(),
            types: RuntimeTypes::new(TypeBudget::within(limit_bytes)),
            objects: 0,
            fields: Vec::new(),
            graph: Ok(GraphBuilder::new(limit_bytes)),
            roots: Vec::new(),
            root_counts: Default::default(),
            handles: Arc::default(),
            watched: Vec::new(),
            weak: 0,
            dependents: 0,
            malformed: 0,
        }
    }

    /// Notes which objects these weak handles watch.
    #[must_use]
    pub(crate) fn with_handles(mut self, handles: Arc<HashSet<u64>>) -> Self {
        self.handles = handles;
        self
    }

    /// Objects counted so far.
    #[must_use]
    pub fn objects(&self) -> u64 {
        self.objects
    }

    /// True when a full collection that was asked for has begun, for which managed threads are
    /// stopped.
    #[must_use]
    pub(crate) fn has_stopped_threads(&self) -> bool {
        self.has_begun() || self.pauses.has_induced()
    }

    /// True when there was a walk.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.sequence.has_begun()
    }

    /// Takes one event. Those that are not part of a walk are passed over.
    pub fn event(&mut self, event: NettraceEvent<'_>) {
        let fields = PayloadFields(event.payload);
        let understood = match event.id {
            id::SUSPENDING => {
                self.pauses.mark(event.time_ns, PauseMark::Suspending);
                Some(())
            }
            id::GC_START => self.pauses.collection(fields, event.time_ns),
            id::RESTARTED => {
                self.pauses.mark(event.time_ns, PauseMark::Restarted);
                Some(())
            }
            // A type is told of when it is first met, in whatever walk that is.
            id::TYPES => self.types.learn(fields),
            id::ROOTS | id::DEPENDENT_HANDLES | id::OBJECTS | id::REFERENCES | id::STATICS => {
                if self.sequence.takes(event.thread) {
                    self.step(event.id, fields)
                } else {
                    Some(())
                }
            }
            _ => Some(()),
        };
        self.malformed += u64::from(understood.is_none());
        let beside = self.bytes_beside();
        self.build(|graph| graph.beside(beside));
    }

    /// What is kept beside the graph.
    fn bytes_beside(&self) -> usize {
        self.types.bytes() + bytes_of(&self.fields, &self.roots)
    }

    fn step(&mut self, id: u32, fields: PayloadFields<'_>) -> Option<()> {
        match id {
            id::ROOTS => self.add_roots(fields),
            id::DEPENDENT_HANDLES => self.add_dependents(fields),
            id::OBJECTS => self.add_objects(fields),
            id::REFERENCES => self.add_references(fields),
            // Static fields come first.
            _ if self.has_begun() => {
                self.sequence.end();
                Some(())
            }
            _ => self.add_statics(fields),
        }
    }

    fn add_objects(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let count = self.sequence.expect(BulkEvent::Objects, &mut fields)?;
        for _ in 0..count {
            let (address, bytes, id, references) =
                (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
            let type_index = self.types.number(id);
            self.objects += 1;
            // As the runtime allocates it: a multiple of 8.
            let bytes = bytes.checked_next_multiple_of(8)?;
            if let Some(found) = self.types.get_mut(type_index) {
                found.objects += 1;
                found.bytes = found.bytes.saturating_add(bytes);
            }
            self.build(|graph| graph.object(address, bytes, type_index, references));
        }
        Some(())
    }

    fn add_references(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let count = self.sequence.expect(BulkEvent::References, &mut fields)?;
        for _ in 0..count {
            let (address, _field) = (fields.u64()?, fields.u32()?);
            self.build(|graph| graph.reference(address));
        }
        Some(())
    }

    fn add_roots(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let count = self.sequence.expect(BulkEvent::Roots, &mut fields)?;
        for _ in 0..count {
            let (address, kind, flags, id) =
                (fields.u64()?, fields.u8()?, fields.u32()?, fields.u64()?);
            match RootKind::of(kind, flags, id) {
                _ if address == 0 => {}
                Some(kind) => self.add_root(kind, None, address),
                None => {
                    self.weak += 1;
                    self.add_watched(id, address);
                }
            }
        }
        Some(())
    }

    fn add_watched(&mut self, handle: u64, address: u64) {
        // A handle that is told of again and again is no reason to keep more.
        if self.handles.contains(&handle)
            && self.watched.len() < self.handles.len()
            && let Ok(graph) = &mut self.graph
        {
            match graph.place(address) {
                Ok(place) => self.watched.push((handle, place)),
                Err(why) => self.give_up(why),
            }
        }
    }

    fn add_dependents(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let count = self.sequence.expect(BulkEvent::Dependents, &mut fields)?;
        for _ in 0..count {
            let (key, value, _id) = (fields.u64()?, fields.u64()?, fields.u64()?);
            if key != 0 && value != 0 {
                self.dependents += 1;
                self.build(|graph| graph.dependent(key, value));
            }
        }
        Some(())
    }

    fn add_statics(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let (count, _domain, _runtime) = (fields.u32()?, fields.u64()?, fields.u16()?);
        for _ in 0..count {
            let (_root, object, id, _flags) =
                (fields.u64()?, fields.u64()?, fields.u64()?, fields.u32()?);
            let name = fields.text()?;
            let field = (self.fields.len() < MAX_STATICS).then(|| {
                let (name, type_index) = (self.types.keep_name(&name), self.types.number(id));
                self.fields.push(StaticField { name, type_index, class: None });
                u32::try_from(self.fields.len() - 1).unwrap_or(u32::MAX)
            });
            self.add_root(RootKind::Static, field, object);
        }
        Some(())
    }

    fn add_root(&mut self, kind: RootKind, field: Option<u32>, address: u64) {
        if let Some(count) = self.root_counts.get_mut(kind as usize) {
            *count += 1;
        }
        if self.roots.len() >= MAX_ROOTS {
            self.give_up(NoGraph::Many);
        }
        if let Ok(graph) = &mut self.graph {
            match graph.place(address) {
                Ok(object) => self.roots.push(Root { kind, field, object }),
                Err(why) => self.give_up(why),
            }
        }
    }

    fn build(&mut self, add: impl FnOnce(&mut GraphBuilder) -> Result<(), NoGraph>) {
        if let Ok(graph) = &mut self.graph
            && let Err(why) = add(graph)
        {
            self.give_up(why);
        }
    }

    fn give_up(&mut self, why: NoGraph) {
        self.graph = Err(why);
        (self.roots, self.watched) = (Vec::new(), Vec::new());
    }

    /// What was found; `lost` events of the stream are missing.
    #[must_use]
    pub fn finish(self, lost: u64) -> HeapSurvey {
        let (pause, collections) = self.pauses.pause();
        let (mut roots, mut watched) = (self.roots, self.watched);
        let graph = self.graph.and_then(|graph| match (self.sequence.missing(), self.malformed) {
            (0, 0) => {
                let of_watched = watched.iter().map(|(_, place)| *place);
                let mut places: Vec<u32> =
                    roots.iter().map(|root| root.object).chain(of_watched).collect();
                let graph = graph.finish(&mut places)?;
                let of_watched = watched.iter_mut().map(|(_, place)| place);
                let held = roots.iter_mut().map(|root| &mut root.object).chain(of_watched);
                held.zip(places).for_each(|(place, object)| *place = object);
                Ok(graph)
            }
            (0, _) => Err(NoGraph::Disorder),
            (missing, _) => Err(NoGraph::Lost { lost: missing }),
        });
        if graph.is_err() {
            roots.clear();
            watched.clear();
        }
        roots.retain(|root| root.object != NOWHERE);
        watched.retain(|(_, object)| *object != NOWHERE);
        roots.sort_unstable();
        roots.dedup();
        HeapSurvey {
            type_bytes: self.types.bytes(),
            types: self.types.into_list(),
            fields: self.fields,
            graph,
            roots,
            root_counts: self.root_counts,
            watched,
            weak: self.weak,
            dependents: self.dependents,
            pause,
            collections,
            malformed: self.malformed,
            lost: lost.max(self.sequence.missing()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{HeapSurvey, HeapWalk, NettraceEvent, Root, RootKind, id};
    use crate::graph::NoGraph;
    use crate::text::{SurveyFindings, text};
    use perfusion_dotnet::declared::StaticField;
    use std::sync::Arc;

    /// A payload of numbers with their sizes.
    struct Payload(Vec<u8>);

    impl Payload {
        fn u8(mut self, value: u8) -> Self {
            self.0.push(value);
            self
        }
        fn u16(mut self, value: u16) -> Self {
            self.0.extend(value.to_le_bytes());
            self
        }
        fn u32(mut self, value: u32) -> Self {
            self.0.extend(value.to_le_bytes());
            self
        }
        fn u64(mut self, value: u64) -> Self {
            self.0.extend(value.to_le_bytes());
            self
        }
        fn text(mut self, text: &str) -> Self {
            self.0.extend(text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes));
            self
        }
    }

    fn payload() -> Payload {
        Payload(Vec::new())
    }

    fn send(walk: &mut HeapWalk, id: u32, time_ns: u64, payload: Payload) {
        walk.event(NettraceEvent { id, thread: 7, time_ns, payload: &payload.0 });
    }

    fn collection(walk: &mut HeapWalk, time_ns: u64, generation: u32) {
        send(
            walk,
            id::GC_START,
            time_ns,
            payload().u32(5).u32(generation).u32(1).u32(0).u16(0).u64(0),
        );
    }

    fn numbered(number: u32, count: u32) -> Payload {
        payload().u32(number).u32(count).u16(0)
    }

    /// A heap of four: a static field and a stack hold object 0, which holds 1 and itself; 1 is the
    /// key of 2; nobody holds 3.
    pub(crate) fn small(objects_event: u32) -> HeapSurvey {
        let mut walk = HeapWalk::new(1 << 20);
        let at = |object: u64| 0x10_0000 + object * 0x40;
        send(&mut walk, id::SUSPENDING, 1_000, payload().u32(1).u32(5).u16(0));
        // Of young objects.
        collection(&mut walk, 500, 0);
        let statics = payload().u32(1).u64(0).u16(0).u64(1).u64(at(0)).u64(70).u32(0).text("cache");
        send(&mut walk, id::STATICS, 0, statics);
        let roots = numbered(0, 4).u64(at(0)).u8(0).u32(0).u64(9).u64(at(2)).u8(2).u32(2).u64(0);
        let roots = roots.u64(at(7)).u8(2).u32(1).u64(0).u64(0).u8(2).u32(0).u64(0);
        send(&mut walk, id::ROOTS, 0, roots);
        send(&mut walk, id::DEPENDENT_HANDLES, 0, numbered(0, 1).u64(at(1)).u64(at(2)).u64(0));
        let mut objects = numbered(objects_event, 4);
        for (object, (bytes, kind, references)) in
            (0..).zip([(40, 70, 2), (22, 71, 0), (24, 71, 0), (64, 72, 0)])
        {
            objects = objects.u64(at(object)).u64(bytes).u64(kind).u64(references);
        }
        send(&mut walk, id::OBJECTS, 0, objects);
        send(&mut walk, id::REFERENCES, 0, numbered(0, 2).u64(at(1)).u32(0).u64(at(0)).u32(0));
        let types = payload().u32(2).u16(0);
        let types = types.u64(70).u64(1).u32(0).u32(0).u8(0).text("Shop.Cache").u32(1).u64(71);
        let types = types.u64(71).u64(1).u32(0).u32(0).u8(0).text("System.String").u32(0);
        send(&mut walk, id::TYPES, 0, types);
        send(&mut walk, id::RESTARTED, 2_000_001_000, payload().u16(0));
        // Another thread's event, and the next walk; the collection's own event may come at any
        // time.
        let other = numbered(0, 1).u64(at(9)).u64(24).u64(77).u64(0).0;
        walk.event(NettraceEvent { id: id::OBJECTS, thread: 8, time_ns: 0, payload: &other });
        send(&mut walk, id::STATICS, 0, payload().u32(0).u64(0).u16(0));
        walk.event(NettraceEvent { id: id::OBJECTS, thread: 7, time_ns: 0, payload: &other });
        collection(&mut walk, 2_000, 2);
        assert!(walk.has_begun() && walk.objects() == 4);
        walk.finish(0)
    }

    #[test]
    fn a_walk_gives_types_roots_and_the_graph() {
        let survey = small(0);
        let names: Vec<_> = survey
            .types
            .iter()
            .map(|found| (found.name.as_str(), found.objects, found.bytes))
            .collect();
        // 22 bytes are 24 on the heap.
        assert_eq!(
            names,
            [("", 0, 0), ("Shop.Cache", 1, 40), ("System.String", 2, 48), ("", 1, 64)]
        );
        let expected = [
            Root { kind: RootKind::Static, field: Some(0), object: 0 },
            Root { kind: RootKind::Stack, field: None, object: 0 },
        ];
        assert_eq!(survey.roots, expected);
        let field = StaticField { name: "cache".to_owned(), type_index: 1, class: None };
        assert_eq!((survey.fields.as_slice(), survey.weak), (&[field][..], 1));
        // One pinned object is nowhere.
        assert_eq!(survey.root_counts, [1, 0, 1, 0, 1, 0, 0, 0]);
        let graph = survey.graph.as_ref().unwrap();
        assert_eq!(graph.direct(0).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(graph.dependents(1).collect::<Vec<_>>(), [2]);
        assert_eq!((survey.pause.as_secs(), survey.collections), (2, 1));
        assert_eq!((survey.malformed, survey.lost, survey.dependents), (0, 0, 1));
    }

    #[test]
    fn what_weak_handles_watch_is_known_of_those_that_were_asked_for() {
        let mut walk = HeapWalk::new(1 << 20).with_handles(Arc::new([0x500, 0x508].into()));
        let at = |object: u64| 0x10_0000 + object * 0x40;
        let weak = |roots: Payload, object, handle| roots.u64(at(object)).u8(2).u32(2).u64(handle);
        // One that was not asked for, one of which nothing is left, one of what is no object, and
        // one that is told of too often.
        let roots = weak(weak(numbered(0, 5), 0, 0x4f8), 1, 0x500);
        let roots = roots.u64(0).u8(2).u32(2).u64(0x508);
        let roots = weak(weak(roots, 7, 0x508), 0, 0x500);
        send(&mut walk, id::ROOTS, 0, roots);
        let objects =
            numbered(0, 2).u64(at(0)).u64(24).u64(70).u64(0).u64(at(1)).u64(24).u64(70).u64(0);
        send(&mut walk, id::OBJECTS, 0, objects);
        let survey = walk.finish(0);
        assert_eq!((survey.watched.as_slice(), survey.weak), (&[(0x500, 1)][..], 4));
        assert!(survey.roots.is_empty() && survey.graph.is_ok());
    }

    #[test]
    fn without_all_its_events_a_walk_counts_types_only() {
        let survey = small(3);
        assert_eq!(survey.graph.as_ref().unwrap_err(), &NoGraph::Lost { lost: 3 });
        assert_eq!((survey.objects(), survey.bytes(), survey.lost), (4, 152, 3));
        assert!(survey.roots.is_empty());
        let mut walk = HeapWalk::new(1 << 20);
        send(&mut walk, id::OBJECTS, 0, numbered(0, 9).u64(1));
        assert_eq!(walk.finish(0).graph.unwrap_err(), NoGraph::Disorder);
    }

    #[test]
    fn a_part_of_a_heap_is_called_one_whatever_else_there_was_no_room_for() {
        let mut survey = small(3);
        survey.graph = Err(NoGraph::Memory { limit_mib: 1 });
        let findings = SurveyFindings { paths: None, dominated: None };
        let text = text(&survey, &findings, 10);
        assert!(text.starts_with("NOT ALL of the heap, 3 events or more are missing"), "{text}");
    }

    #[test]
    fn roots_and_types_have_no_more_room_than_all_may_take() {
        const LIMIT: usize = 1 << 20;
        let mut walk = HeapWalk::new(LIMIT);
        let roots = |count: u32| {
            let each = payload().u64(0x10_0000).u8(2).u32(0).u64(0).0;
            Payload([numbered(0, count).0, each.repeat(count as usize)].concat())
        };
        send(&mut walk, id::ROOTS, 0, roots(40_000));
        assert!(walk.graph.is_ok() && walk.bytes_beside() > LIMIT / 2);
        let mut walk = HeapWalk::new(LIMIT);
        send(&mut walk, id::ROOTS, 0, roots(60_000));
        assert_eq!(walk.graph.as_ref().unwrap_err(), &NoGraph::Memory { limit_mib: 1 });
        // Then there is no use for them.
        assert!(walk.bytes_beside() < 1024 && walk.root_counts[3] == 60_000);
        let mut walk = HeapWalk::new(LIMIT);
        for id in 1..100_000 {
            let types = payload()
                .u32(1)
                .u16(0)
                .u64(id)
                .u64(1)
                .u32(0)
                .u32(0)
                .u8(0)
                .text("Shop.Order")
                .u32(0);
            send(&mut walk, id::TYPES, 0, types);
        }
        assert!((LIMIT / 16..LIMIT / 4).contains(&walk.bytes_beside()), "{}", walk.bytes_beside());
        assert!(walk.graph.is_ok());
    }
}
