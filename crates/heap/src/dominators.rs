//! What would go with an object: the objects that every way from a root leads to through it (it
//! dominates them).
//!
//! Semi-NCA (Georgiadis, *Linear-Time Algorithms for Dominators and Related Problems*, 2005,
//! section 2.4): nearly linear whatever the graph looks like, so that no heap can be made to keep
//! us busy. Nodes are numbered in the order a depth-first search meets them; 0 is the root of all.

use crate::graph::{Graph, NOWHERE};
use crate::walk::Root;

/// Objects that stand alone at the top, at most so many of the largest.
const LARGEST: usize = 64;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DominatedBytes {
    /// Bytes dominated by objects of each type. What an object of the type dominates that is itself
    /// dominated by another of the type counts once.
    pub by_type: Vec<u64>,
    /// Objects that no other object dominates, with the bytes they dominate, largest first.
    pub largest: Vec<(u32, u64)>,
}

/// Bytes that [`find`] takes beside the graph.
#[must_use]
pub fn bytes_needed(graph: &Graph) -> usize {
    // Five numbers a node while dominators are looked for, the search's stack or the references
    // backwards beside them, and later the sums.
    graph.len().saturating_mul(40).saturating_add(graph.references().saturating_mul(12))
}

/// Finds what each object dominates.
#[must_use]
pub fn find(graph: &Graph, roots: &[Root], types: usize) -> DominatedBytes {
    let search = Search::new(graph, roots);
    let dominators = search.dominators(graph, roots);
    let Search { order, .. } = search;
    let object = |node: usize| order.get(node).copied().unwrap_or(NOWHERE);

    let mut bytes: Vec<u64> = (0..order.len())
        .map(|node| if node == 0 { 0 } else { graph.shape(object(node)).bytes() })
        .collect();
    // A node's dominator has a lower number.
    for node in (1..order.len()).rev() {
        bytes[dominators[node] as usize] += bytes[node];
    }
    let mut largest: Vec<(u32, u64)> = (1..order.len())
        .filter(|&node| dominators[node] == 0)
        .map(|node| (object(node), bytes[node]))
        .collect();
    largest.sort_unstable_by_key(|&(object, bytes)| (std::cmp::Reverse(bytes), object));
    largest.truncate(LARGEST);
    let type_of = |node: usize| graph.shape(object(node)).type_index as usize;
    DominatedBytes { by_type: by_type(&dominators, &bytes, types, &type_of), largest }
}

/// Walks the tree of dominators and counts an object where no other of its type is above it.
fn by_type(
    dominators: &[u32],
    bytes: &[u64],
    types: usize,
    type_of: &dyn Fn(usize) -> usize,
) -> Vec<u64> {
    let mut sums = vec![0u64; types];
    let mut above = vec![0u32; types];
    let (first, children) = lists(dominators.len(), &|add| {
        (1..dominators.len()).for_each(|node| add(dominators[node], node as u32));
    });
    // A node is left when it is met the second time.
    let mut stack: Vec<(u32, bool)> = vec![(0, false)];
    while let Some((node, left)) = stack.pop() {
        let at = node as usize;
        if at > 0
            && let (kind, own) = (type_of(at), bytes[at])
            && let (Some(above), Some(sum)) = (above.get_mut(kind), sums.get_mut(kind))
        {
            if left {
                *above -= 1;
                continue;
            }
            if *above == 0 {
                *sum += own;
            }
            *above += 1;
            stack.push((node, true));
        }
        let range = first[at] as usize..first[at + 1] as usize;
        stack.extend(children[range].iter().map(|&child| (child, false)));
    }
    sums
}

/// Takes (belongs to, number).
type Add<'a> = dyn FnMut(u32, u32) + 'a;

/// Lists of numbers one after the other, by the number they belong to, and where each begins.
/// `visit` is called twice with a function and must call it with the same pairs.
fn lists(count: usize, visit: &dyn Fn(&mut Add<'_>)) -> (Vec<u32>, Vec<u32>) {
    let mut first = vec![0u32; count + 2];
    visit(&mut |of, _| first[of as usize + 2] += 1);
    for at in 2..first.len() {
        first[at] += first[at - 1];
    }
    let mut all = vec![0u32; first[count + 1] as usize];
    visit(&mut |of, number| {
        // What was the begin of the next list becomes the end of this one.
        let place = &mut first[of as usize + 1];
        all[*place as usize] = number;
        *place += 1;
    });
    first.pop();
    (first, all)
}

/// A depth-first search.
struct Search {
    /// Object of each node; the first is none.
    order: Vec<u32>,
    /// Node of each object, or [`NOWHERE`].
    nodes: Vec<u32>,
    /// From which node each was met.
    parents: Vec<u32>,
}

impl Search {
    fn new(graph: &Graph, roots: &[Root]) -> Self {
        let mut search =
            Self { order: vec![NOWHERE], nodes: vec![NOWHERE; graph.len()], parents: vec![0] };
        let mut stack: Vec<(u32, u32)> = roots.iter().map(|root| (root.object, 0)).collect();
        while let Some((object, parent)) = stack.pop() {
            let Some(place) =
                search.nodes.get_mut(object as usize).filter(|place| **place == NOWHERE)
            else {
                continue;
            };
            let node = search.order.len() as u32;
            *place = node;
            search.order.push(object);
            search.parents.push(parent);
            let nodes = &search.nodes;
            let referred = graph.direct(object).chain(graph.dependents(object));
            let unmet = referred.filter(|&to| nodes.get(to as usize) == Some(&NOWHERE));
            stack.extend(unmet.map(|to| (to, node)));
        }
        search
    }

    /// The dominator of each node.
    fn dominators(&self, graph: &Graph, roots: &[Root]) -> Vec<u32> {
        let count = self.order.len();
        let (first, before) = lists(count, &|add| {
            roots.iter().for_each(|root| add(self.nodes[root.object as usize], 0));
            for (node, &object) in (1..).zip(self.order.iter().skip(1)) {
                for to in graph.direct(object).chain(graph.dependents(object)) {
                    add(self.nodes[to as usize], node);
                }
            }
        });
        let mut forest = Forest {
            parents: self.parents.clone(),
            semi: (0..count as u32).collect(),
            labels: (0..count as u32).collect(),
            path: Vec::new(),
        };
        for node in (1..count).rev() {
            let range = first[node] as usize..first[node + 1] as usize;
            let least = before[range].iter().map(|&from| forest.semi(from, node as u32 + 1)).min();
            forest.semi[node] = least.unwrap_or(u32::MAX).min(self.parents[node]);
        }
        let mut dominators = self.parents.clone();
        for node in 1..count {
            let mut dominator = dominators[node];
            while dominator > forest.semi[node] {
                dominator = dominators[dominator as usize];
            }
            dominators[node] = dominator;
        }
        dominators
    }
}

/// The search's tree as far as it was worked off, with its paths shortened.
struct Forest {
    parents: Vec<u32>,
    semi: Vec<u32>,
    /// The node with the least semidominator between a node and the end of its shortened path.
    labels: Vec<u32>,
    path: Vec<u32>,
}

impl Forest {
    /// The least semidominator on the path up from `node` through the nodes from `linked` on.
    fn semi(&mut self, mut node: u32, linked: u32) -> u32 {
        let start = node;
        while self.parents[node as usize] >= linked {
            self.path.push(node);
            node = self.parents[node as usize];
        }
        while let Some(below) = self.path.pop() {
            let (own, above) = (self.labels[below as usize], self.labels[node as usize]);
            if self.semi[above as usize] < self.semi[own as usize] {
                self.labels[below as usize] = above;
            }
            self.parents[below as usize] = self.parents[node as usize];
            node = below;
        }
        self.semi[self.labels[start as usize] as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::{Search, find};
    use crate::graph::{Graph, GraphBuilder};
    use crate::walk::{Root, RootKind};
    use proptest::{collection::vec, prop_assert_eq, proptest};

    /// Objects of 8 bytes more each, of two types by turns.
    fn graph(references: &[Vec<u32>], dependents: &[(u32, u32)]) -> Graph {
        let mut builder = GraphBuilder::new(1 << 30);
        let address = |object: u32| 0x1000 + u64::from(object) * 64;
        for (object, to) in (0..).zip(references) {
            builder.object(address(object), 24, object % 2, to.len() as u64).unwrap();
        }
        references.iter().flatten().for_each(|&to| builder.reference(address(to)).unwrap());
        dependents
            .iter()
            .for_each(|&(key, value)| builder.dependent(address(key), address(value)).unwrap());
        builder.finish(&mut []).unwrap()
    }

    fn roots(objects: &[u32]) -> Vec<Root> {
        objects.iter().map(|&object| Root { kind: RootKind::Other, field: None, object }).collect()
    }

    fn reached(references: &[Vec<u32>], roots: &[u32], without: Option<u32>) -> Vec<bool> {
        let mut seen = vec![false; references.len()];
        let mut stack: Vec<u32> = roots.to_vec();
        while let Some(object) = stack.pop() {
            if Some(object) != without && !std::mem::replace(&mut seen[object as usize], true) {
                stack.extend(&references[object as usize]);
            }
        }
        seen
    }

    #[test]
    fn what_goes_with_an_object_is_summed_once_per_type() {
        // 0 -> 1 -> 2 -> 3, and 4 -> 5 <- 6.
        let graph = graph(&[vec![1], vec![2], vec![3], vec![], vec![5], vec![], vec![]], &[(6, 5)]);
        let found = find(&graph, &roots(&[0, 4, 6]), 2);
        // 0 dominates 1, 2 and 3; 2 lies below another of its type. 4 and 6 dominate only
        // themselves.
        assert_eq!(found.by_type, [6 * 24, 4 * 24]);
        assert_eq!(found.largest, [(0, 4 * 24), (4, 24), (5, 24), (6, 24)]);
    }

    proptest! {
        #[test]
        fn an_object_dominates_what_cannot_be_reached_without_it(
            references in vec(vec(0u32..24, 0..4), 24),
            from in vec(0u32..24, 1..4),
        ) {
            let (graph, roots_) = (graph(&references, &[]), roots(&from));
            let search = Search::new(&graph, &roots_);
            let dominators = search.dominators(&graph, &roots_);
            let all = reached(&references, &from, None);
            for gone in 0..24u32 {
                let left = reached(&references, &from, Some(gone));
                for object in 0..24u32 {
                    let is_dominated = all[object as usize] && !left[object as usize];
                    // Up the tree of dominators.
                    let mut node = search.nodes[object as usize];
                    let mut found = false;
                    while node != super::NOWHERE && node != 0 {
                        found |= search.order[node as usize] == gone;
                        node = dominators[node as usize];
                    }
                    prop_assert_eq!(found, is_dominated, "{} of {}", gone, object);
                }
            }
        }
    }
}
