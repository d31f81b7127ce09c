//! All call paths of a profile as one tree for the flame graph, cut to what a browser can hold:
//! [`MAX_LEVELS`] deep, [`MAX_DRAWN`] nodes wide. What is cut stands in the tree as a node that
//! says how much it is.

use super::stacks::{CodeKind, ProfileStacks, ProfileView, ReportFrame};
use perfusion_model::units::grouped;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// Levels below the root. The library that draws recurses a few times for each: past some 5,000 it
/// overflows the browser's stack.
pub(super) const MAX_LEVELS: usize = 1_000;
/// Nodes kept while the tree is built; further call paths stay inside their callers.
const MAX_NODES: usize = 2_000_000;
/// Nodes with a function: what a browser reads without delay. The smallest call paths are left out
/// first.
pub(super) const MAX_DRAWN: usize = 40_000;

/// Values of a node: of one sample type, of parked threads or not.
#[derive(Clone, Copy, Debug)]
pub(super) struct NodeValues {
    pub(super) column: usize,
    pub(super) idle: bool,
    /// Sum without signs: how wide the node is.
    pub(super) width: i128,
    /// Sum with signs.
    pub(super) net: i128,
}

/// One call path.
#[derive(Debug, Default)]
pub(super) struct TreeNode {
    pub(super) parent: usize,
    /// Index in [`Tree::frames`].
    pub(super) frame: usize,
    pub(super) values: Vec<NodeValues>,
    /// Stands for so many call paths that are not drawn one by one.
    pub(super) more: usize,
    /// Stands for what is below the last level, so many levels.
    deeper: usize,
}

impl TreeNode {
    fn add(&mut self, column: usize, idle: bool, (width, net): (i128, i128)) {
        match self.values.iter_mut().find(|value| (value.column, value.idle) == (column, idle)) {
            Some(value) => {
                value.width += width;
                value.net += net;
            }
            None => self.values.push(NodeValues { column, idle, width, net }),
        }
    }
}

/// The tree. Node 0 is the root; parents stand before their children.
pub(super) struct Tree<'a> {
    pub(super) frames: Vec<ReportFrame<'a>>,
    pub(super) nodes: Vec<TreeNode>,
    /// Call paths that have no node of their own.
    pub(super) left_out: usize,
}

/// Distinct frames, numbered as they come.
#[derive(Default)]
struct Frames<'a> {
    ids: HashMap<ReportFrame<'a>, usize>,
    list: Vec<ReportFrame<'a>>,
}

impl<'a> Frames<'a> {
    fn id(&mut self, frame: ReportFrame<'a>) -> usize {
        if let Some(&id) = self.ids.get(&frame) {
            return id;
        }
        let id = self.list.len();
        self.list.push(frame.clone());
        self.ids.insert(frame, id);
        id
    }

    fn note(&mut self, name: impl Into<Cow<'a, str>>) -> usize {
        self.id(ReportFrame { name: name.into(), module: "", kind: CodeKind::Note, source: None })
    }
}

/// The tree of what `view` shows; each value of the first label to group by has a branch of its
/// own, in it each of the next, or, where there is no such label but several processes, each
/// process.
pub(super) fn tree<'a>(stacks: &'a ProfileStacks<'a>, view: &ProfileView) -> Tree<'a> {
    let mut frames = Frames::default();
    let (mut nodes, left_out) = paths(stacks, view, &mut frames);
    for node in nodes.iter_mut().filter(|node| node.deeper > 0) {
        let levels = if node.deeper == 1 { "level" } else { "levels" };
        node.frame = frames.note(format!("[{} deeper {levels}]", grouped(as_i128(node.deeper))));
    }
    let small = nodes.len().saturating_sub(MAX_DRAWN + 1);
    let nodes =
        if small > 0 { largest(&nodes, stacks.sample_types().count(), &mut frames) } else { nodes };
    Tree { frames: frames.list, nodes, left_out: left_out + small }
}

fn as_i128(number: usize) -> i128 {
    i128::try_from(number).unwrap_or(i128::MAX)
}

/// All call paths, and how many found no room.
fn paths<'a>(
    stacks: &'a ProfileStacks<'a>,
    view: &ProfileView,
    frames: &mut Frames<'a>,
) -> (Vec<TreeNode>, usize) {
    frames.note("all");
    let asked = || stacks.samples().filter(|sample| stacks.is_asked(sample, &view.only));
    let processes: HashSet<Option<i64>> =
        asked().map(|sample| stacks.number(sample, "pid")).collect();
    let by_process = view.by.is_empty() && processes.len() > 1;
    let by: Cow<'_, [String]> =
        if by_process { Cow::Owned(vec!["process".to_owned()]) } else { Cow::Borrowed(&view.by) };
    let (mut nodes, mut left_out) = (vec![TreeNode::default()], 0);
    // What is below the last level has one node under its parent, by a number that no frame has.
    let mut children: HashMap<(usize, usize), usize> = HashMap::new();
    for sample in asked() {
        let idle = stacks.is_idle(sample);
        let mut path: Vec<usize> =
            stacks.readable_frames(sample).map(|frame| frames.id(frame)).collect();
        path.extend(stacks.groups(sample, &by).into_iter().rev().map(|name| frames.note(name)));
        path.reverse();
        let deeper = path.len().saturating_sub(MAX_LEVELS);
        if deeper > 0 {
            path.truncate(MAX_LEVELS);
            path.push(usize::MAX);
        }
        let visit = |node: &mut TreeNode| {
            for (column, &value) in
                sample.value.iter().enumerate().filter(|(_, value)| **value != 0)
            {
                let value = i128::from(value);
                node.add(column, idle, (value.abs(), value));
            }
        };
        let mut at = 0;
        nodes.iter_mut().take(1).for_each(visit);
        for frame in path {
            let next = match children.get(&(at, frame)) {
                Some(&node) => node,
                None if nodes.len() >= MAX_NODES => {
                    left_out += 1;
                    break;
                }
                None => {
                    children.insert((at, frame), nodes.len());
                    nodes.push(TreeNode { parent: at, frame, ..TreeNode::default() });
                    nodes.len() - 1
                }
            };
            at = next;
            if let Some(node) = nodes.get_mut(at) {
                visit(node);
                if frame == usize::MAX {
                    node.deeper = node.deeper.max(deeper);
                }
            }
        }
    }
    (nodes, left_out)
}

/// Of too many nodes those with the largest share of any column, and under each parent one for
/// those of its children that are left out.
fn largest(nodes: &[TreeNode], columns: usize, frames: &mut Frames<'_>) -> Vec<TreeNode> {
    let mut totals = vec![0f64; columns];
    for value in nodes.first().map_or(&[][..], |root| &root.values) {
        if let Some(total) = totals.get_mut(value.column) {
            *total += value.width as f64;
        }
    }
    let share = |node: &TreeNode| {
        let share =
            |value: &NodeValues| value.width as f64 / totals.get(value.column).unwrap_or(&1.0);
        node.values.iter().map(share).fold(0.0, f64::max)
    };
    // A parent is never smaller than its child and stands before it: it is among them where its
    // child is.
    let mut order: Vec<(f64, usize)> = nodes.iter().map(share).zip(0..).collect();
    order.sort_by(|(a, at), (b, other)| b.total_cmp(a).then(at.cmp(other)));
    order.truncate(MAX_DRAWN + 1);
    let mut drawn: Vec<usize> = order.into_iter().map(|(_, at)| at).collect();
    drawn.sort_unstable();
    let numbers: HashMap<usize, usize> = drawn.iter().copied().zip(0..).collect();
    let number = |old: usize| numbers.get(&old).copied();
    // One for each parent of what is left out.
    let mut rests: HashMap<usize, TreeNode> = HashMap::new();
    for (node, _) in nodes.iter().zip(0..).filter(|(_, at)| number(*at).is_none()) {
        let Some(parent) = number(node.parent) else { continue };
        let rest =
            rests.entry(parent).or_insert_with(|| TreeNode { parent, ..TreeNode::default() });
        rest.more += 1;
        for value in &node.values {
            rest.add(value.column, value.idle, (value.width, value.net));
        }
    }
    let kept = drawn.iter().filter_map(|&at| nodes.get(at)).map(|node| TreeNode {
        parent: number(node.parent).unwrap_or(0),
        values: node.values.clone(),
        ..*node
    });
    let mut all: Vec<TreeNode> = kept.collect();
    let mut rests: Vec<TreeNode> = rests.into_values().collect();
    rests.sort_unstable_by_key(|rest| rest.parent);
    for rest in &mut rests {
        rest.frame = frames.note(format!("[{} more …]", grouped(as_i128(rest.more))));
    }
    all.append(&mut rests);
    all
}
