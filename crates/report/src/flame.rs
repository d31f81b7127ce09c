//! A flame graph of all sample types as one HTML file that loads nothing: d3-flame-graph inside,
//! data as JSON.
//!
//! The page's policy (CSP) allows its own scripts by a nonce and nothing else. Names are hostile:
//! in JSON every `<` is escaped, and the script sets texts only, never markup.

use super::ReportError;
use super::stacks::{CodeKind, ProfileStacks, ProfileView, ReportFrame};
use super::top::NO_DURATION;
use super::tree::{Tree, tree};
use perfusion_model::text::clean;
use perfusion_model::units::{base, human};
use perfusion_pprof::proto::Profile;
use serde::Serialize;
use std::borrow::Cow;
use std::hash::{BuildHasher, RandomState};

const TEMPLATE: &str = include_str!("assets/page.html");
const CSS: &str = include_str!("assets/page.css");
const SCRIPT: &str = include_str!("assets/page.js");
/// The modules of d3 7 that d3-flame-graph needs, as npm has them: dispatch 3.0.2, color 3.1.1,
/// interpolate 3.0.2, ease 3.0.2, timer 3.0.2, selection 3.0.1, transition 3.0.2, array 3.2.5,
/// format 3.1.3, time 3.1.1, time-format 4.1.1, scale 4.0.3, hierarchy 3.1.3, each `dist/*.min.js`,
/// joined in this order.
const D3: &str = include_str!("assets/d3.min.js");
const D3_LICENCE: &str = include_str!("assets/LICENSE-d3");
/// npm's d3-flame-graph 5.0.0, `dist/d3-flamegraph.umd.min.js`.
const FLAMEGRAPH: &str = include_str!("assets/d3-flamegraph.umd.min.js");

/// The data of the page. Nodes are numbered parents first; node 0 is the root.
#[derive(Serialize)]
struct FlameData<'a> {
    about: String,
    default: &'a str,
    /// Show parked threads from the start.
    idle: bool,
    loss: Option<String>,
    comments: Vec<String>,
    types: Vec<FlameColumn<'a>>,
    /// (name, module, kind).
    frames: Vec<(&'a str, &'a str, u8)>,
    /// Index in `frames` of each node.
    nodes: Vec<usize>,
    parents: Vec<usize>,
    /// node, number, node, number, …: nodes that stand for so many call paths.
    more: Vec<usize>,
    left_out: usize,
}

#[derive(Serialize)]
struct FlameColumn<'a> {
    name: &'a str,
    /// What values are shown in, and how many of it one of the profile's unit is.
    unit: &'a str,
    factor: f64,
    /// node, value, node, value, …: how wide each is.
    busy: Vec<i128>,
    idle: Vec<i128>,
    /// The same with signs, where some values are below zero: the profile is a difference.
    busy_net: Vec<i128>,
    idle_net: Vec<i128>,
}

/// The page. `title` is shown as it is, so it should say what was recorded. `sample_type` is the
/// one to begin with.
///
/// # Errors
/// When there is no such sample type or label.
pub fn page(
    profile: &Profile,
    title: &str,
    sample_type: Option<&str>,
    view: &ProfileView,
) -> Result<String, ReportError> {
    let stacks = ProfileStacks::viewed(profile, view);
    stacks.check(view)?;
    let tree = tree(&stacks, view);
    let mut data = data(&stacks, view, &tree);
    if let Some(first) = sample_type {
        stacks.sample_type(first)?;
        data.default = first;
    }
    // In a script element only `</` and `<!--` could end or change the data.
    let data = serde_json::to_string(&data).map_err(std::io::Error::from)?.replace('<', "\\u003c");
    // Unguessable is enough: it keeps a name that became markup by a fault of ours from running.
    let nonce =
        format!("{:016x}{:016x}", RandomState::new().hash_one(0), RandomState::new().hash_one(1));
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

/// Puts values in place of `{{name}}`, in one pass: a value that looks like a place is not filled
/// again.
fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut page = String::with_capacity(
        template.len() + values.iter().map(|(_, value)| value.len()).sum::<usize>(),
    );
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

fn data<'a>(
    stacks: &'a ProfileStacks<'a>,
    view: &ProfileView,
    tree: &'a Tree<'a>,
) -> FlameData<'a> {
    let column = |(name, unit)| {
        let (unit, factor) = base(unit);
        let [busy, idle, busy_net, idle_net] = [const { Vec::new() }; 4];
        FlameColumn { name, unit, factor, busy, idle, busy_net, idle_net }
    };
    let mut types: Vec<FlameColumn<'_>> = stacks.sample_types().map(column).collect();
    let mut signed = vec![false; types.len()];
    for value in tree.nodes.iter().flat_map(|node| &node.values) {
        if let Some(signed) = signed.get_mut(value.column) {
            *signed |= value.net != value.width;
        }
    }
    for (node, number) in tree.nodes.iter().zip(0i128..) {
        for value in &node.values {
            let Some(column) = types.get_mut(value.column) else { continue };
            let (widths, nets) = match value.idle {
                true => (&mut column.idle, &mut column.idle_net),
                false => (&mut column.busy, &mut column.busy_net),
            };
            widths.extend([number, value.width]);
            if signed.get(value.column) == Some(&true) {
                nets.extend([number, value.net]);
            }
        }
    }
    let frame =
        |frame: &'a ReportFrame<'a>| (frame.name.as_ref(), frame.module, kind_number(frame.kind));
    let more = tree.nodes.iter().zip(0..).filter(|(node, _)| node.more > 0);
    FlameData {
        about: match stacks.duration_ns() {
            Some(duration) => format!("recorded for {}", human(duration, "nanoseconds")),
            None => NO_DURATION.to_owned(),
        },
        default: stacks.default_sample_type(),
        idle: view.idle,
        loss: loss(stacks.losses().collect()),
        comments: stacks.comments().map(Cow::into_owned).collect(),
        types,
        frames: tree.frames.iter().map(frame).collect(),
        nodes: tree.nodes.iter().map(|node| node.frame).collect(),
        parents: tree.nodes.iter().map(|node| node.parent).collect(),
        more: more.flat_map(|(node, number)| [number, node.more]).collect(),
        left_out: tree.left_out,
    }
}

const fn kind_number(kind: CodeKind) -> u8 {
    match kind {
        CodeKind::Kernel => 0,
        CodeKind::Native => 1,
        CodeKind::Managed => 2,
        CodeKind::Note => 3,
        // 4 is the collector's, which the page finds itself.
        CodeKind::Code => 5,
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
    use super::super::tree::{MAX_DRAWN, MAX_LEVELS};
    use super::*;
    use perfusion_pprof::proto::{Function, Label, Line, Location, Sample, ValueType};

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
        let stacks = ProfileStacks::new(&profile);
        let tree = tree(&stacks, &ProfileView::default());
        let data = data(&stacks, &ProfileView::default(), &tree);
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
        let stacks = ProfileStacks::new(&profile);
        let tree = tree(&stacks, &ProfileView::default());
        let data = data(&stacks, &ProfileView::default(), &tree);
        let name = |node: usize| data.frames[data.nodes[node]].0;
        assert_eq!([0, 1, 2, 3, 4].map(name), ["all", "process 7", "main", "process 8", "main"]);
    }

    #[test]
    fn small_paths_are_left_out_and_counted_but_stay_in_their_callers() {
        let names: Vec<String> = (0..MAX_DRAWN + 10).map(|n| format!("f{n}")).collect();
        let mut stacks: Vec<(&[&str], i64)> = vec![(&["big"], 1_000)];
        let paths: Vec<[&str; 2]> = names.iter().map(|name| ["big", name.as_str()]).collect();
        stacks.extend(paths.iter().map(|path| (&path[..], 1)));
        let profile = profile(&stacks);
        let stacks = ProfileStacks::new(&profile);
        let tree = tree(&stacks, &ProfileView::default());
        let data = data(&stacks, &ProfileView::default(), &tree);
        // The root, `big`, the first of its equal children, and one for the rest.
        assert_eq!(data.nodes.len(), MAX_DRAWN + 2);
        assert_eq!(data.left_out, 11);
        assert_eq!(data.more, [MAX_DRAWN + 1, 11]);
        assert_eq!(data.frames[data.nodes[MAX_DRAWN + 1]].0, "[11 more …]");
        assert_eq!(data.types[0].busy[..6], [0, 41_010, 1, 41_010, 2, 1]);
        let children = data.types[0].busy.chunks(2).skip(2).map(|pair| pair[1]).sum::<i128>();
        assert_eq!(children, 40_010, "what is not drawn is in the rest");
    }

    #[test]
    fn what_is_below_the_last_level_is_one_node_that_says_how_deep_it_was() {
        let names: Vec<String> = (0..MAX_LEVELS + 8_000).map(|n| format!("f{}", n % 10)).collect();
        let deep: Vec<&str> = names.iter().map(String::as_str).collect();
        let profile =
            profile(&[(&deep, 5), (&deep[..MAX_LEVELS + 1], 2), (&deep[..MAX_LEVELS], 1)]);
        let stacks = ProfileStacks::new(&profile);
        let tree = tree(&stacks, &ProfileView::default());
        let data = data(&stacks, &ProfileView::default(), &tree);
        assert_eq!(data.nodes.len(), 1 + MAX_LEVELS + 1);
        assert_eq!(data.frames[data.nodes[MAX_LEVELS + 1]].0, "[8,000 deeper levels]");
        let last = i128::try_from(MAX_LEVELS).unwrap();
        assert!(data.types[0].busy.ends_with(&[last, 8, last + 1, 7]));
    }

    #[test]
    fn a_difference_has_widths_without_signs_and_values_with_them() {
        let profile = profile(&[(&["a", "b"], 30), (&["a", "c"], -20), (&["a", "c"], 5)]);
        let stacks = ProfileStacks::new(&profile);
        let tree = tree(&stacks, &ProfileView::default());
        let data = data(&stacks, &ProfileView::default(), &tree);
        assert_eq!(data.types[0].busy, [0, 55, 1, 55, 2, 30, 3, 25]);
        assert_eq!(data.types[0].busy_net, [0, 15, 1, 15, 2, 30, 3, -15]);
    }

    #[test]
    fn hostile_names_cannot_leave_the_data() {
        let name = "</script><script>alert(1)</script><!--{{js}}";
        let page = page(&profile(&[(&[name], 1)]), name, None, &ProfileView::default()).unwrap();
        assert!(!page.contains("<script>alert"));
        assert!(page.contains("\\u003c/script>"));
        assert!(page.contains("<title>&lt;/script&gt;"));
        assert_eq!(page.matches("function describe(node)").count(), 1);
        assert_eq!(page.matches("<script").count(), 4);
        assert!(!page.contains("http://") || !page.contains("src="), "nothing is loaded");
    }
}
