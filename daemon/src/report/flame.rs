//! A flame graph of all sample types as one HTML file that loads nothing: d3-flame-graph inside, data as JSON.
//!
//! The page's policy (CSP) allows its own scripts by a nonce and nothing else. Names are hostile: in JSON every `<` is
//! escaped, and the script sets texts only, never markup.

use super::ReportError;
use super::stacks::{Frame, Kind, Stacks, View};
use super::units::human;
use crate::pprof::proto::Profile;
use crate::symbolize::pretty::clean;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};

const TEMPLATE: &str = include_str!("assets/page.html");
const CSS: &str = include_str!("assets/page.css");
const SCRIPT: &str = include_str!("assets/page.js");
/// The modules of d3 7 that d3-flame-graph needs, as npm has them: dispatch 3.0.2, color 3.1.1, interpolate 3.0.2, ease 3.0.2,
/// timer 3.0.2, selection 3.0.1, transition 3.0.2, array 3.2.5, format 3.1.3, time 3.1.1, time-format 4.1.1, scale 4.0.3,
/// hierarchy 3.1.3, each `dist/*.min.js`, joined in this order.
const D3: &str = include_str!("assets/d3.min.js");
const D3_LICENCE: &str = include_str!("assets/LICENSE-d3");
/// npm's d3-flame-graph 5.0.0, `dist/d3-flamegraph.umd.min.js`.
const FLAMEGRAPH: &str = include_str!("assets/d3-flamegraph.umd.min.js");

/// Nodes kept while the tree is built; further call paths stay inside their callers.
const MAX_NODES: usize = 2_000_000;
/// Nodes written: what a browser draws without delay. The smallest call paths are left out first.
const MAX_DRAWN: usize = 40_000;

/// The data of the page. Nodes are numbered parents first; node 0 is the root.
#[derive(Serialize)]
struct Data<'a> {
    about: String,
    default: &'a str,
    /// Show parked threads from the start.
    idle: bool,
    loss: Option<String>,
    comments: Vec<String>,
    types: Vec<Column<'a>>,
    /// (name, module, kind).
    frames: Vec<(Cow<'a, str>, &'a str, u8)>,
    /// Index in `frames` of each node.
    nodes: Vec<usize>,
    parents: Vec<usize>,
    left_out: usize,
}

#[derive(Serialize)]
struct Column<'a> {
    name: &'a str,
    unit: &'a str,
    /// node, value, node, value, …
    busy: Vec<i64>,
    idle: Vec<i64>,
}

struct Node {
    parent: usize,
    frame: usize,
    /// (sample type, parked, value).
    values: Vec<(usize, bool, i64)>,
}

impl Node {
    fn add(&mut self, column: usize, idle: bool, value: i64) {
        match self.values.iter_mut().find(|(of, parked, _)| (*of, *parked) == (column, idle)) {
            Some((_, _, sum)) => *sum = sum.saturating_add(value),
            None => self.values.push((column, idle, value)),
        }
    }
}

/// The page. `title` is shown as it is, so it should say what was recorded. `sample_type` is the one to begin with.
///
/// # Errors
/// When there is no such sample type or label.
pub fn page(
    profile: &Profile,
    title: &str,
    sample_type: Option<&str>,
    view: &View,
) -> Result<String, ReportError> {
    let stacks = Stacks::new(profile);
    stacks.check(view)?;
    let mut data = data(&stacks, view);
    if let Some(first) = sample_type {
        stacks.sample_type(first)?;
        data.default = first;
    }
    // In a script element only `</` and `<!--` could end or change the data.
    let data = serde_json::to_string(&data).map_err(std::io::Error::from)?.replace('<', "\\u003c");
    // Unguessable is enough: it keeps a name that became markup by a fault of ours from running.
    let nonce = format!("{:016x}{:016x}", RandomState::new().hash_one(0), RandomState::new().hash_one(1));
    let title = markup(&clean(title));
    Ok(fill(
        TEMPLATE,
        &[
            ("nonce", &nonce),
            ("title", &title),
            ("d3_licence", D3_LICENCE),
            ("css", CSS),
            ("data", &data),
            ("d3", D3),
            ("flamegraph", FLAMEGRAPH),
            ("js", SCRIPT),
        ],
    ))
}

/// Puts values in place of `{{name}}`, in one pass: a value that looks like a place is not filled again.
fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut page =
        String::with_capacity(template.len() + values.iter().map(|(_, value)| value.len()).sum::<usize>());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        page.push_str(before);
        page.push_str(values.iter().find(|(of, _)| *of == name).map_or("", |(_, value)| value));
        rest = after;
    }
    page.push_str(rest);
    page
}

fn markup(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Distinct frames, numbered as they come.
#[derive(Default)]
struct Frames<'a> {
    ids: HashMap<Frame<'a>, usize>,
    list: Vec<(Cow<'a, str>, &'a str, u8)>,
}

impl<'a> Frames<'a> {
    fn id(&mut self, frame: &Frame<'a>) -> usize {
        if let Some(&id) = self.ids.get(frame) {
            return id;
        }
        let id = self.list.len();
        self.list.push((frame.name.clone(), frame.module, kind_number(frame.kind)));
        self.ids.insert(frame.clone(), id);
        id
    }
}

/// All call paths as one tree; each value of the first label to group by has a branch of its own, in it each of the next, or, where there is no
/// such label but several processes, each process.
fn data<'a>(stacks: &'a Stacks<'a>, view: &View) -> Data<'a> {
    let mut frames = Frames::default();
    frames.id(&Frame { name: "all".into(), module: "", kind: Kind::Note });
    let asked = || stacks.samples().filter(|sample| stacks.is_asked(sample, &view.only));
    let processes: HashSet<Option<i64>> = asked().map(|sample| stacks.number(sample, "pid")).collect();
    let by_process = view.by.is_empty() && processes.len() > 1;
    let by: Cow<'_, [String]> =
        if by_process { Cow::Owned(vec!["process".to_owned()]) } else { Cow::Borrowed(&view.by) };
    let mut nodes = vec![Node { parent: 0, frame: 0, values: Vec::new() }];
    let mut children: HashMap<(usize, usize), usize> = HashMap::new();
    let mut left_out = 0;
    for sample in asked() {
        let idle = stacks.is_idle(sample);
        let mut path: Vec<usize> = stacks.readable_frames(sample).map(|frame| frames.id(&frame)).collect();
        for name in stacks.groups(sample, &by).into_iter().rev() {
            path.push(frames.id(&Frame { name, module: "", kind: Kind::Note }));
        }
        path.reverse();
        let mut at = 0;
        let visit = |node: &mut Node| {
            for (column, &value) in sample.value.iter().enumerate().filter(|(_, value)| **value > 0) {
                node.add(column, idle, value);
            }
        };
        visit(&mut nodes[0]);
        for frame in path {
            at = match children.get(&(at, frame)) {
                Some(&node) => node,
                None if nodes.len() >= MAX_NODES => {
                    left_out += 1;
                    break;
                }
                None => {
                    children.insert((at, frame), nodes.len());
                    nodes.push(Node { parent: at, frame, values: Vec::new() });
                    nodes.len() - 1
                }
            };
            visit(&mut nodes[at]);
        }
    }
    let mut types: Vec<Column<'_>> = stacks
        .sample_types()
        .map(|(name, unit)| Column { name, unit, busy: Vec::new(), idle: Vec::new() })
        .collect();
    let (drawn, small) = largest(&nodes, types.len());
    left_out += small;
    // New numbers of the nodes that are drawn; a parent is never smaller than its child, so it is drawn too.
    let mut numbers: HashMap<usize, usize> = HashMap::new();
    let (mut frame_of, mut parents) = (Vec::new(), Vec::new());
    for (node, index) in nodes.iter().zip(0..).filter(|(_, index)| drawn(*index)) {
        let number = frame_of.len();
        numbers.insert(index, number);
        frame_of.push(node.frame);
        parents.push(numbers.get(&node.parent).copied().unwrap_or(0));
        for &(column, idle, value) in &node.values {
            if let Some(column) = types.get_mut(column) {
                let pairs = if idle { &mut column.idle } else { &mut column.busy };
                pairs.extend([i64::try_from(number).unwrap_or(i64::MAX), value]);
            }
        }
    }
    Data {
        about: format!("recorded for {}", human(stacks.duration_ns(), "nanoseconds")),
        default: stacks.default_sample_type(),
        idle: view.idle,
        loss: loss(stacks.losses().collect()),
        comments: stacks.comments().map(Cow::into_owned).collect(),
        types,
        frames: frames.list,
        nodes: frame_of,
        parents,
        left_out,
    }
}

/// Which nodes to draw, and how many are left out: of more than [`MAX_DRAWN`] those with the largest share of any column.
fn largest(nodes: &[Node], columns: usize) -> (impl Fn(usize) -> bool, usize) {
    let mut totals = vec![0f64; columns];
    for &(column, _, value) in nodes.first().map_or(&[][..], |root| &root.values) {
        if let Some(total) = totals.get_mut(column) {
            *total += value as f64;
        }
    }
    let share = |node: &Node| {
        let shares =
            node.values.iter().map(|&(column, _, value)| value as f64 / totals.get(column).unwrap_or(&1.0));
        shares.fold(0.0, f64::max)
    };
    let shares: Vec<f64> = nodes.iter().map(share).collect();
    let mut sorted = shares.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    // Strictly more than the share of the first one left out, so that equal ones go together and parents stay.
    let limit = sorted.get(MAX_DRAWN).copied().unwrap_or(-1.0);
    let small = shares.iter().skip(1).filter(|share| **share <= limit).count();
    (move |index: usize| index == 0 || shares.get(index).is_some_and(|share| *share > limit), small)
}

const fn kind_number(kind: Kind) -> u8 {
    match kind {
        Kind::Kernel => 0,
        Kind::Native => 1,
        Kind::Managed => 2,
        Kind::Note => 3,
    }
}

/// The loss line; of several profiles the first ones.
fn loss(mut lines: Vec<String>) -> Option<String> {
    const SHOWN: usize = 3;
    if let Some(more) = lines.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        lines.truncate(SHOWN);
        lines.push(format!("and {more} more lines in the comments"));
    }
    (!lines.is_empty()).then(|| lines.join(" · "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pprof::proto::{Function, Label, Line, Location, Sample, ValueType};

    /// `stacks`: names from the root, and a value.
    fn profile(stacks: &[(&[&str], i64)]) -> Profile {
        let mut profile = Profile {
            string_table: ["", "cpu", "nanoseconds"].map(str::to_owned).to_vec(),
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            ..Profile::default()
        };
        for (names, value) in stacks {
            let mut location_id = Vec::new();
            for name in names.iter().rev() {
                let id = u64::try_from(profile.function.len() + 1).unwrap();
                let name_index = i64::try_from(profile.string_table.len()).unwrap();
                profile.string_table.push((*name).to_owned());
                profile.function.push(Function { id, name: name_index, ..Function::default() });
                let line = vec![Line { function_id: id, ..Line::default() }];
                profile.location.push(Location { id, line, ..Location::default() });
                location_id.push(id);
            }
            profile.sample.push(Sample { location_id, value: vec![*value], label: Vec::new() });
        }
        profile
    }

    #[test]
    fn equal_paths_are_one_node_and_values_include_children() {
        let profile = profile(&[(&["a", "b"], 3), (&["a"], 4), (&["a", "b", "c"], 5)]);
        let stacks = Stacks::new(&profile);
        let data = data(&stacks, &View::default());
        assert_eq!(data.parents, [0, 0, 1, 2]);
        assert_eq!(data.types[0].busy, [0, 12, 1, 12, 2, 8, 3, 5]);
        assert_eq!(data.left_out, 0);
    }

    #[test]
    fn several_processes_have_a_branch_each() {
        let mut profile = profile(&[(&["main"], 3), (&["main"], 4)]);
        profile.string_table.push("pid".to_owned());
        let key = i64::try_from(profile.string_table.len() - 1).unwrap();
        for (sample, pid) in profile.sample.iter_mut().zip(7..) {
            sample.label.push(Label { key, num: pid, ..Label::default() });
        }
        let stacks = Stacks::new(&profile);
        let data = data(&stacks, &View::default());
        let name = |node: usize| data.frames[data.nodes[node]].0.as_ref();
        assert_eq!([0, 1, 2, 3, 4].map(name), ["all", "process 7", "main", "process 8", "main"]);
    }

    #[test]
    fn small_paths_are_left_out_and_counted_but_stay_in_their_callers() {
        let names: Vec<String> = (0..MAX_DRAWN + 10).map(|n| format!("f{n}")).collect();
        let mut stacks: Vec<(&[&str], i64)> = vec![(&["big"], 1_000)];
        let paths: Vec<[&str; 2]> = names.iter().map(|name| ["big", name.as_str()]).collect();
        stacks.extend(paths.iter().map(|path| (&path[..], 1)));
        let profile = profile(&stacks);
        let stacks = Stacks::new(&profile);
        let data = data(&stacks, &View::default());
        assert_eq!(data.left_out, MAX_DRAWN + 10);
        assert_eq!(data.types[0].busy, [0, 41_010, 1, 41_010]);
    }

    #[test]
    fn hostile_names_cannot_leave_the_data() {
        let name = "</script><script>alert(1)</script><!--{{js}}";
        let page = page(&profile(&[(&[name], 1)]), name, None, &View::default()).unwrap();
        assert!(!page.contains("<script>alert"));
        assert!(page.contains("\\u003c/script>"));
        assert!(page.contains("<title>&lt;/script&gt;"));
        assert_eq!(page.matches("function describe(node)").count(), 1);
        assert_eq!(page.matches("<script").count(), 4);
        assert!(!page.contains("http://") || !page.contains("src="), "nothing is loaded");
    }
}
