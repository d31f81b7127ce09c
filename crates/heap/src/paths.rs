//! How each object is held: the shortest way to it from a root, and all such ways together as a
//! tree of types. Objects that are held in the same way, type by type, are one node of it.
//!
//! References between the nodes of the runtime's doubly linked lists ([`LISTS`]) are followed last,
//! and from the nearest node on through the whole list: whoever holds one timer does not hold the
//! others in any sense that helps.
//!
//! Ways of recursive structures are folded: where the last types of a way repeat the ones before
//! them (a list's nodes, a tree's nodes and arrays by turns), the repetition is left out, so a list
//! of a million is one node.

use crate::graph::{Graph, NOWHERE};
use crate::walk::{HeapSurvey, Root, RootKind};
use foldhash::fast::RandomState;
use perfusion_dotnet::declared::StaticField;
use perfusion_dotnet::types::RuntimeType;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// Longest repetition that is folded.
const FOLDED: usize = 4;
/// Longest way. What lies deeper is put below [`PathStep::Deeper`] at its end.
const MAX_DEPTH: u16 = 256;
/// Most nodes. Objects of further ways are counted under one of their type.
const MAX_NODES: usize = 1 << 18;

/// Numbers of types that are nodes of lists. Asked of each object there is: with a hash that costs
/// little.
pub type Lists = HashSet<u32, RandomState>;

/// What stands at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathStep {
    /// The root of all.
    Top,
    /// A kind of root, with the name of a static field.
    Root(RootKind, Option<u32>),
    /// Objects of a type.
    Type(u32),
    /// A dependent handle: what is below is a value of a `ConditionalWeakTable`, or the like, whose
    /// key is above.
    Dependent,
    /// Objects that no root leads to.
    Unreached,
    /// What lies between an object and a way that is too long to be kept.
    Deeper,
    /// Objects held in ways too many to be kept.
    Further,
}

/// A node: all objects that are held in one way.
#[derive(Clone, Debug)]
pub struct PathNode {
    /// What stands here.
    pub step: PathStep,
    /// What holds it.
    pub parent: u32,
    /// Objects that end here.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    depth: u16,
}

/// Bytes that [`RetentionPaths::find`] takes beside the graph.
#[must_use]
pub fn bytes_needed(graph: &Graph) -> usize {
    graph.len().saturating_mul(8).saturating_add(graph.len() / 8)
}

/// The tree.
#[derive(Debug)]
pub struct RetentionPaths {
    nodes: Vec<PathNode>,
    numbers: HashMap<(u32, PathStep), u32, RandomState>,
}

impl RetentionPaths {
    /// Finds the ways to all objects of a survey.
    #[must_use]
    pub fn find(graph: &Graph, roots: &[Root]) -> Self {
        Self::find_with(graph, roots, &Lists::default(), &[]).0
    }

    /// The same where objects of the types `lists` are nodes of lists ([`HeapSurvey::lists`]), with
    /// the node at which each of these objects ends.
    #[must_use]
    pub fn find_with(
        graph: &Graph,
        roots: &[Root],
        lists: &Lists,
        objects: &[u32],
    ) -> (Self, Vec<u32>) {
        let top = PathNode { step: PathStep::Top, parent: 0, objects: 0, bytes: 0, depth: 0 };
        let mut paths = Self { nodes: vec![top], numbers: HashMap::default() };
        // Node of each object, or NOWHERE before it is reached.
        let mut at = vec![NOWHERE; graph.len()];
        // Objects in the order in which they are reached: a level of the search after the other.
        let mut reached = Vec::with_capacity(graph.len());
        // In order of kinds: what a static field refers to is held by it, whatever else refers to
        // it.
        for root in roots {
            let parent = paths.child(0, PathStep::Root(root.kind, root.field));
            paths.reach(graph, root.object, parent, &mut at, &mut reached);
        }
        let mut next = 0;
        let mut linked = vec![0u64; if lists.is_empty() { 0 } else { graph.len().div_ceil(64) }];
        let mut first = 0;
        loop {
            while let Some(&object) = reached.get(next) {
                next += 1;
                paths.spread(graph, object, lists, &mut at, &mut reached);
            }
            let Some(&object) = reached.get(first) else { break };
            first += 1;
            if lists.contains(&graph.shape(object).type_index) {
                paths.follow_list(graph, object, &mut linked, &mut at, &mut reached);
            }
        }
        for (object, node) in (0..).zip(&mut at).filter(|(_, node)| **node == NOWHERE) {
            let parent = paths.child(0, PathStep::Unreached);
            *node = paths.end(graph, object, parent);
        }
        let node = |object: &u32| at.get(*object as usize).copied().unwrap_or(0);
        let nodes = objects.iter().map(node).collect();
        (paths, nodes)
    }

    /// Reaches what an object holds, but for its neighbours in a list.
    fn spread(
        &mut self,
        graph: &Graph,
        object: u32,
        lists: &Lists,
        at: &mut [u32],
        reached: &mut Vec<u32>,
    ) {
        let parent = at.get(object as usize).copied().unwrap_or(0);
        let own = graph.shape(object).type_index;
        let list = lists.contains(&own).then_some(own);
        for held in graph.direct(object) {
            if list.is_none_or(|list| graph.shape(held).type_index != list) {
                self.reach(graph, held, parent, at, reached);
            }
        }
        for held in graph.dependents(object) {
            if at.get(held as usize) == Some(&NOWHERE) {
                let handle = self.child(parent, PathStep::Dependent);
                self.reach(graph, held, handle, at, reached);
            }
        }
    }

    /// Reaches all nodes of the list of which an object is one, also beyond those that are held
    /// otherwise themselves.
    fn follow_list(
        &mut self,
        graph: &Graph,
        object: u32,
        linked: &mut [u64],
        at: &mut [u32],
        reached: &mut Vec<u32>,
    ) {
        let mut is_new = |object: u32| {
            let (word, bit) = (object as usize / 64, 1 << (object % 64));
            linked.get_mut(word).is_some_and(|word| std::mem::replace(word, *word | bit) & bit == 0)
        };
        if !is_new(object) {
            return;
        }
        let node = at.get(object as usize).copied().unwrap_or(0);
        let own = graph.shape(object).type_index;
        let mut chain = vec![object];
        while let Some(object) = chain.pop() {
            for other in graph.direct(object).filter(|&other| graph.shape(other).type_index == own)
            {
                if is_new(other) {
                    self.reach(graph, other, node, at, reached);
                    chain.push(other);
                }
            }
        }
    }

    fn reach(
        &mut self,
        graph: &Graph,
        object: u32,
        parent: u32,
        at: &mut [u32],
        reached: &mut Vec<u32>,
    ) {
        if let Some(place) = at.get_mut(object as usize)
            && *place == NOWHERE
        {
            *place = self.end(graph, object, parent);
            reached.push(object);
        }
    }

    /// Counts an object below what holds it.
    fn end(&mut self, graph: &Graph, object: u32, parent: u32) -> u32 {
        let shape = graph.shape(object);
        let number = self.child(parent, PathStep::Type(shape.type_index));
        if let Some(node) = self.nodes.get_mut(number as usize) {
            node.objects += 1;
            node.bytes = node.bytes.saturating_add(shape.bytes());
        }
        number
    }

    fn node(&self, number: u32) -> Option<&PathNode> {
        self.nodes.get(number as usize)
    }

    fn parent(&self, number: u32) -> u32 {
        self.node(number).map_or(0, |node| node.parent)
    }

    fn child(&mut self, parent: u32, step: PathStep) -> u32 {
        if let Some(&known) = self.numbers.get(&(parent, step)) {
            return known;
        }
        let number = self.folded(parent, step).unwrap_or_else(|| self.new_child(parent, step));
        // To be found again without looking for repetitions.
        if self.numbers.len() < 4 * MAX_NODES {
            self.numbers.insert((parent, step), number);
        }
        number
    }

    /// The node one repetition up, if this step would end a second one.
    fn folded(&self, parent: u32, step: PathStep) -> Option<u32> {
        // The way to the new node, from its end.
        let mut way = vec![(NOWHERE, step)];
        let mut number = parent;
        while way.len() < 2 * FOLDED && number != 0 {
            let node = self.node(number)?;
            way.push((number, node.step));
            number = node.parent;
        }
        (1..=FOLDED).find_map(|period| {
            let (last, before) = (way.get(..period)?, way.get(period..2 * period)?);
            let repeats = last
                .iter()
                .zip(before)
                .all(|((_, a), (_, b))| a == b && !matches!(a, PathStep::Root(..)));
            repeats.then(|| before.first().map(|&(number, _)| number))?
        })
    }

    fn new_child(&mut self, parent: u32, step: PathStep) -> u32 {
        let parent = match self.node(parent) {
            // Below the mark, which stands for any number of steps, lies what is deeper, side by
            // side.
            Some(node) if node.depth >= MAX_DEPTH => node.parent,
            Some(node) if node.depth == MAX_DEPTH - 2 && step != PathStep::Deeper => {
                self.child(parent, PathStep::Deeper)
            }
            _ => parent,
        };
        if let Some(&known) = self.numbers.get(&(parent, step)) {
            return known;
        }
        let is_full = self.nodes.len() >= MAX_NODES;
        if is_full && (parent, step) != (0, PathStep::Further) {
            let further = self.child(0, PathStep::Further);
            if parent != further {
                return self.child(further, step);
            }
        }
        // One of each type may come on top.
        let depth = self.node(parent).map_or(0, |node| node.depth + 1);
        let number = u32::try_from(self.nodes.len()).unwrap_or(0);
        self.nodes.push(PathNode { step, parent, objects: 0, bytes: 0, depth });
        self.numbers.insert((parent, step), number);
        number
    }

    /// Nodes where objects end, with their numbers.
    pub fn ends(&self) -> impl Iterator<Item = (u32, &PathNode)> {
        (0..).zip(&self.nodes).filter(|(_, node)| node.objects > 0)
    }

    /// The way to a node, from the root on.
    #[must_use]
    pub fn way(&self, mut number: u32) -> Vec<PathStep> {
        let mut way = Vec::new();
        while let Some(node) = self.node(number).filter(|_| number != 0) {
            way.push(node.step);
            number = self.parent(number);
        }
        way.reverse();
        way
    }
}

/// The property that has a field made by the compiler, `<Name>k__BackingField`.
fn written(field: &str) -> &str {
    field.strip_prefix('<').and_then(|rest| rest.strip_suffix(">k__BackingField")).unwrap_or(field)
}

/// A step that is named when it is shown: a way has up to 256.
#[derive(Clone, Copy)]
pub struct NamedStep<'a>(pub &'a HeapSurvey, pub PathStep);

impl fmt::Display for NamedStep<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.step_name(self.1))
    }
}

/// Characters of a name; no name of a program that means well has more.
const MOST_NAME: usize = 2048;

fn shortened(name: String) -> String {
    match name.char_indices().nth(MOST_NAME) {
        Some((end, _)) => format!("{}…", name.get(..end).unwrap_or_default()),
        None => name,
    }
}

/// Nodes of lists in which the runtime keeps what is waited for, each of which knows its neighbours
/// (System.Private.CoreLib: Timer.cs, CancellationTokenSource.cs), and those of `LinkedList<T>`; of
/// a nested type the runtime tells the innermost name.
const LISTS: [&str; 4] = [
    "System.Threading.TimerQueueTimer",
    "System.Threading.CancellationTokenSource+CallbackNode",
    "CallbackNode",
    "System.Collections.Generic.LinkedListNode`1",
];

impl HeapSurvey {
    /// The numbers of types that are nodes of lists.
    #[must_use]
    pub fn lists(&self) -> Lists {
        let is_list = |(_, of): &(u32, &RuntimeType)| LISTS.contains(&of.open_name());
        (0..).zip(&self.types).filter(is_list).map(|(number, _)| number).collect()
    }

    /// What a step is called.
    #[must_use]
    pub fn step_name(&self, step: PathStep) -> String {
        shortened(self.whole_step_name(step))
    }

    fn whole_step_name(&self, step: PathStep) -> String {
        match step {
            PathStep::Top => "root".to_owned(),
            PathStep::Root(kind, field) => {
                match field.and_then(|field| self.fields.get(field as usize)) {
                    Some(StaticField { name, class: Some(class), .. }) => {
                        let class = perfusion_model::pretty::type_name(class);
                        format!("{} {class}.{}", kind.name(), written(name))
                    }
                    Some(StaticField { name, .. }) if !name.is_empty() => {
                        format!("{} {}", kind.name(), written(name))
                    }
                    _ => kind.name().to_owned(),
                }
            }
            PathStep::Type(number) => self.type_name(number),
            PathStep::Dependent => "dependent handle (ConditionalWeakTable)".to_owned(),
            PathStep::Unreached => "[not reached from a root]".to_owned(),
            PathStep::Deeper => "[more steps than are kept]".to_owned(),
            PathStep::Further => "[held in further ways]".to_owned(),
        }
    }

    /// What a type is called.
    #[must_use]
    pub fn type_name(&self, number: u32) -> String {
        match self.types.get(number as usize) {
            Some(found) if !found.name.is_empty() => {
                shortened(perfusion_model::pretty::type_name(&found.name))
            }
            _ => "[type without a name]".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PathStep, RetentionPaths};
    use crate::graph::GraphBuilder;
    use crate::walk::{Root, RootKind, tests::small};

    #[test]
    fn the_shortest_way_and_the_best_root_are_found() {
        let survey = small(0);
        let paths = RetentionPaths::find(survey.graph.as_ref().unwrap(), &survey.roots);
        let ways: Vec<(Vec<String>, u64)> = paths
            .ends()
            .map(|(number, node)| {
                (
                    paths.way(number).iter().map(|&step| survey.step_name(step)).collect(),
                    node.objects,
                )
            })
            .collect();
        let table = "dependent handle (ConditionalWeakTable)";
        let way =
            |steps: &[&str]| (steps.iter().map(|&step| step.to_owned()).collect::<Vec<_>>(), 1);
        let expected = [
            way(&["static field cache", "Shop.Cache"]),
            way(&["static field cache", "Shop.Cache", "string"]),
            way(&["static field cache", "Shop.Cache", "string", table, "string"]),
            way(&["[not reached from a root]", "[type without a name]"]),
        ];
        assert_eq!(ways, expected);
    }

    /// Types of a chain of objects, each of which holds the next; and what its ways become.
    fn chain(types: &[u32]) -> Vec<(Vec<u32>, u64)> {
        let mut builder = GraphBuilder::new(1 << 30);
        for (at, &kind) in (1..).zip(types) {
            builder.object(at * 64, 24, kind, u64::from(at < types.len() as u64)).unwrap();
            if at > 1 {
                builder.reference(at * 64).unwrap();
            }
        }
        let graph = builder.finish(&mut []).unwrap();
        let paths =
            RetentionPaths::find(&graph, &[Root { kind: RootKind::Other, field: None, object: 0 }]);
        paths.ends().map(|(number, node)| (types_of(paths.way(number)), node.objects)).collect()
    }

    fn types_of(way: Vec<PathStep>) -> Vec<u32> {
        way.into_iter()
            .filter_map(|step| if let PathStep::Type(kind) = step { Some(kind) } else { None })
            .collect()
    }

    #[test]
    fn who_holds_one_node_of_a_list_does_not_hold_the_others() {
        // A queue (1) holds the first of three timers (3) that are linked both ways, and each holds
        // a state (4); another one (2, 5) holds the second timer.
        let (queue, another, timer, state, wrapper) = (1, 2, 3, 4, 5);
        let objects: [(u32, &[u64]); 9] = [
            (queue, &[2]),
            (another, &[8]),
            (timer, &[3, 5]),
            (timer, &[2, 4, 6]),
            (timer, &[3, 7]),
            (state, &[]),
            (state, &[]),
            (state, &[]),
            (wrapper, &[3]),
        ];
        let at = |object: u64| (object + 1) * 64;
        let mut builder = GraphBuilder::new(1 << 20);
        for (number, (kind, held)) in (0..).zip(objects) {
            builder.object(at(number), 24, kind, held.len() as u64).unwrap();
            held.iter().for_each(|&held| builder.reference(at(held)).unwrap());
        }
        let graph = builder.finish(&mut []).unwrap();
        let root = |object| Root { kind: RootKind::Other, field: None, object };
        let (paths, nodes) = RetentionPaths::find_with(
            &graph,
            &[root(0), root(1)],
            &[timer].into_iter().collect(),
            &[5, 6, 7],
        );
        let ways: Vec<Vec<u32>> = nodes.into_iter().map(|node| types_of(paths.way(node))).collect();
        assert_eq!(
            ways,
            [
                vec![queue, timer, state],
                vec![another, wrapper, timer, state],
                vec![queue, timer, state]
            ]
        );
    }

    #[test]
    fn repetitions_are_folded_and_nothing_else() {
        assert_eq!(chain(&[1; 1000]), [(vec![1], 1000)]);
        assert_eq!(
            chain(&[1, 2, 1, 3]).last().unwrap().0,
            [1, 2, 1, 3],
            "one return is no repetition"
        );
        let by_turns = chain(&[9, 1, 2, 1, 2, 1, 2, 3]);
        assert_eq!(by_turns.last().unwrap().0, [9, 1, 2, 3]);
        assert_eq!(by_turns.iter().map(|(_, objects)| objects).sum::<u64>(), 8);
        let deep: Vec<u32> = (0..2000).collect();
        let ways = chain(&deep);
        assert_eq!(ways.iter().map(|(_, objects)| objects).sum::<u64>(), 2000);
        assert!(ways.iter().all(|(way, _)| way.len() <= 256), "{}", ways.len());
    }
}
