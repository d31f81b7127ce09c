//! A survey as text: types, roots, and what holds the largest types.

use crate::dominators::DominatedBytes;
use crate::paths::{NamedStep, PathNode, PathStep, RetentionPaths};
use crate::walk::{HeapSurvey, RootKind};
use perfusion_model::units::{counted, grouped, human, percent};
use std::collections::HashMap;
use std::fmt::{self, Write as _};

/// Ways shown of one type, and the least share of its bytes that a further one has.
const WAYS: usize = 3;
const SHARE: f64 = 0.1;
/// Steps shown of a way; the middle of a longer one is left out.
const STEPS: usize = 16;
/// Objects shown that nothing else dominates.
const LARGEST: usize = 10;

/// What was worked out of a survey, as far as it could be.
#[derive(Debug)]
pub struct SurveyFindings {
    /// The ways.
    pub paths: Option<RetentionPaths>,
    /// What goes with what.
    pub dominated: Option<DominatedBytes>,
}

fn amount(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn bytes(value: u64) -> String {
    human(amount(value), "bytes")
}

fn count(value: u64) -> String {
    grouped(amount(value))
}

/// The whole text; at most `rows` types, and ways of so many of them.
pub fn text(survey: &HeapSurvey, findings: &SurveyFindings, rows: usize) -> String {
    let mut text = String::new();
    let order = types(survey, findings, rows, &mut text);
    roots(survey, findings, &mut text);
    if let Ok(graph) = &survey.graph
        && let Some(dominated) = &findings.dominated
    {
        // Writing to a String cannot fail.
        writeln!(
            text,
            "\nlargest holders: what goes when one object does, and no other object holds"
        )
        .ok();
        writeln!(text, "{:>10}  object", "dominated").ok();
        for &(object, size) in dominated.largest.iter().take(rows.min(LARGEST)) {
            let name = survey.type_name(graph.shape(object).type_index);
            let root = survey.roots.iter().find(|root| root.object == object);
            let root = root.map_or_else(
                || "held in several ways".to_owned(),
                |root| survey.step_name(PathStep::Root(root.kind, root.field)),
            );
            writeln!(text, "{:>10}  {name}  ({root})", bytes(size)).ok();
        }
    }
    if let Some(paths) = &findings.paths {
        ways(survey, paths, &order, rows, &mut text);
    }
    text
}

/// The table of types; their numbers in its order.
fn types(
    survey: &HeapSurvey,
    findings: &SurveyFindings,
    rows: usize,
    text: &mut String,
) -> Vec<u32> {
    let mut order: Vec<u32> = (0..)
        .zip(&survey.types)
        .filter(|(_, found)| found.objects > 0)
        .map(|(number, _)| number)
        .collect();
    let found = |number: u32| survey.types.get(number as usize);
    order.sort_by_key(|&number| {
        (std::cmp::Reverse(found(number).map_or(0, |found| found.bytes)), number)
    });
    let (objects, all) = (survey.objects(), survey.bytes());
    let sum = format!(
        "{} in {} of {}",
        bytes(all),
        counted(objects, "object"),
        counted(order.len(), "type")
    );
    match survey.lost {
        0 if survey.malformed == 0 => writeln!(text, "{sum}").ok(),
        // What is behind the bad place of an event was not counted.
        0 => writeln!(text, "at least {sum}").ok(),
        // All but perhaps the walk's last objects are there: references could not have been told
        // apart otherwise.
        _ if survey.graph.is_ok() => writeln!(text, "at least {sum}").ok(),
        lost => writeln!(
            text,
            "NOT ALL of the heap, {} or more are missing, each of up to thousands of objects: at \
             least {sum}",
            counted(lost, "event")
        )
        .ok(),
    };
    let dominated = findings.dominated.as_ref();
    let head = if dominated.is_some() { "dominated" } else { "" };
    writeln!(text, "\n{:>10} {:>6} {:>14} {head:>10}  type", "bytes", "", "objects").ok();
    for &number in order.iter().take(rows) {
        let Some(found) = found(number) else { continue };
        let goes = dominated.and_then(|dominated| dominated.by_type.get(number as usize));
        writeln!(
            text,
            "{:>10} {:>6} {:>14} {:>10}  {}",
            bytes(found.bytes),
            percent(amount(found.bytes), amount(all)),
            count(found.objects),
            goes.map_or_else(String::new, |&goes| bytes(goes)),
            survey.type_name(number)
        )
        .ok();
    }
    if order.len() > rows {
        writeln!(text, "{} more: --rows", order.len() - rows).ok();
    }
    order
}

/// The table of roots by kind.
fn roots(survey: &HeapSurvey, findings: &SurveyFindings, text: &mut String) {
    // What is reached first from each kind.
    let mut reached: HashMap<PathStep, (u64, u64)> = HashMap::new();
    for (number, node) in findings.paths.iter().flat_map(RetentionPaths::ends) {
        let top = findings.paths.as_ref().and_then(|paths| paths.way(number).first().copied());
        let kind = match top {
            Some(PathStep::Root(kind, _)) => PathStep::Root(kind, None),
            Some(step) => step,
            None => continue,
        };
        let sum = reached.entry(kind).or_default();
        *sum = (sum.0 + node.objects, sum.1 + node.bytes);
    }
    let known = findings.paths.is_some();
    writeln!(
        text,
        "\n{:>10} {:>14} {:>10}  root",
        if known { "bytes" } else { "" },
        if known { "objects" } else { "" },
        "roots"
    )
    .ok();
    let mut line = |step: PathStep, roots: Option<u64>, name: &str| {
        let (objects, size) = reached.get(&step).copied().unwrap_or_default();
        if roots.unwrap_or(objects) == 0 {
            return;
        }
        let (size, objects) =
            if known { (bytes(size), count(objects)) } else { Default::default() };
        writeln!(
            text,
            "{size:>10} {objects:>14} {:>10}  {name}",
            roots.map_or_else(String::new, count)
        )
        .ok();
    };
    for (kind, &roots) in RootKind::ALL.into_iter().zip(&survey.root_counts) {
        line(PathStep::Root(kind, None), Some(roots), kind.name());
    }
    line(PathStep::Unreached, None, "not reached from a root");
    line(PathStep::Further, None, "[held in further ways]");
    let (dependents, weak) = (count(survey.dependents), count(survey.weak));
    writeln!(
        text,
        "and {dependents} dependent handles (ConditionalWeakTable: the key holds the \
         value), {weak} weak ones, which hold nothing"
    )
    .ok();
}

/// The ways of the largest types.
fn ways(
    survey: &HeapSurvey,
    paths: &RetentionPaths,
    order: &[u32],
    rows: usize,
    text: &mut String,
) {
    let mut of_type: HashMap<u32, Vec<(u32, &PathNode)>> = HashMap::new();
    for (number, node) in paths.ends() {
        if let PathStep::Type(kind) = node.step {
            of_type.entry(kind).or_default().push((number, node));
        }
    }
    writeln!(
        text,
        "\nwhat holds the largest types: the shortest way from a root, and its share of the type's \
         bytes"
    )
    .ok();
    for &kind in order.iter().take(rows) {
        let Some(mut found) = of_type.remove(&kind) else { continue };
        found.sort_by_key(|(number, node)| (std::cmp::Reverse(node.bytes), *number));
        let all: u64 = found.iter().map(|(_, node)| node.bytes).fold(0, u64::saturating_add);
        let objects: u64 = found.iter().map(|(_, node)| node.objects).fold(0, u64::saturating_add);
        writeln!(
            text,
            "\n{}: {} in {}",
            survey.type_name(kind),
            bytes(all),
            counted(objects, "object")
        )
        .ok();
        let shown: Vec<_> = found
            .iter()
            .enumerate()
            .take(WAYS)
            .take_while(|(at, (_, node))| *at == 0 || node.bytes as f64 >= all as f64 * SHARE)
            .map(|(_, found)| found)
            .collect();
        for (number, node) in &shown {
            let way = paths.way(*number);
            let share = percent(amount(node.bytes), amount(all));
            writeln!(text, "  {share} ({})", counted(node.objects, "object")).ok();
            self::way(text, way.iter().map(|&step| NamedStep(survey, step)));
        }
        if found.len() > shown.len() {
            writeln!(text, "  and {}", counted(found.len() - shown.len(), "other way")).ok();
        }
    }
}

/// A way from its root on, a line a step.
pub fn way(text: &mut String, steps: impl ExactSizeIterator<Item = impl fmt::Display>) {
    let left_out = steps.len().saturating_sub(STEPS);
    // More of the root's end, where the holder is.
    let from = STEPS * 3 / 4;
    for (at, step) in steps.enumerate() {
        if left_out > 0 && (from..from + left_out).contains(&at) {
            if at == from {
                writeln!(text, "      … {left_out} steps …").ok();
            }
            continue;
        }
        let arrow = if at == 0 { "    " } else { "     → " };
        writeln!(text, "{arrow}{step}").ok();
    }
}
