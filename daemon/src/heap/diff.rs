//! Two surveys compared: types and ways that have grown.

use super::print;
use super::profile::TYPES;
use crate::pprof::proto::Profile;
use crate::report::ReportError;
use crate::report::stacks::Stacks;
use crate::report::units::{grouped, human};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Objects and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    objects: i64,
    bytes: i64,
}

/// Before and after.
type Both = [Amount; 2];

fn growth(both: &Both) -> Amount {
    let [before, after] = both;
    Amount {
        objects: after.objects.saturating_sub(before.objects),
        bytes: after.bytes.saturating_sub(before.bytes),
    }
}

/// By type, and by the way from the root to the type.
#[derive(Default)]
struct Sums {
    types: BTreeMap<String, Both>,
    ways: BTreeMap<Vec<String>, Both>,
    all: Both,
}

impl Sums {
    fn add(&mut self, profile: &Profile, which: usize) -> Result<(), ReportError> {
        let stacks = Stacks::new(profile);
        let [objects, bytes] = [stacks.sample_type(TYPES[0].0)?, stacks.sample_type(TYPES[1].0)?];
        for sample in &profile.sample {
            let value = |column: usize| sample.value.get(column).copied().unwrap_or(0);
            let amount = Amount { objects: value(objects), bytes: value(bytes) };
            let mut way: Vec<String> = stacks.frames(sample).map(|frame| frame.name.to_string()).collect();
            way.reverse();
            let Some(leaf) = way.last().cloned() else { continue };
            for both in
                [self.types.entry(leaf).or_default(), self.ways.entry(way).or_default(), &mut self.all]
            {
                if let Some(sum) = both.get_mut(which) {
                    sum.objects = sum.objects.saturating_add(amount.objects);
                    sum.bytes = sum.bytes.saturating_add(amount.bytes);
                }
            }
        }
        Ok(())
    }
}

/// What has changed from one survey to another, as text: `rows` types and ways that have grown most, then types that have shrunk most.
///
/// # Errors
/// When one is no profile of a survey.
pub(super) fn text(before: &Profile, after: &Profile, rows: usize) -> Result<String, ReportError> {
    let mut sums = Sums::default();
    sums.add(before, 0)?;
    sums.add(after, 1)?;
    let mut text = String::new();
    let [was, is] = sums.all;
    // Writing to a String cannot fail.
    writeln!(
        text,
        "{} in {} objects before, {} in {} objects after: {}, {} objects",
        human(was.bytes, "bytes"),
        grouped(was.objects),
        human(is.bytes, "bytes"),
        grouped(is.objects),
        signed(human(growth(&sums.all).bytes, "bytes")),
        signed(grouped(growth(&sums.all).objects)),
    )
    .ok();
    let mut types: Vec<(&String, &Both)> = sums.types.iter().filter(|(_, both)| both[0] != both[1]).collect();
    types.sort_by_key(|(name, both)| (std::cmp::Reverse(growth(both).bytes), *name));
    let grown = types.iter().take_while(|(_, both)| growth(both).bytes > 0).count();
    let shrunk: Vec<_> = types.iter().rev().take_while(|(_, both)| growth(both).bytes < 0).collect();
    let changed = |text: &mut String,
                   what: &str,
                   some: &mut dyn Iterator<Item = &(&String, &Both)>,
                   all: usize| {
        writeln!(text, "\n{what} most: {} of {all} types", all.min(rows)).ok();
        writeln!(text, "{:>12} {:>14} {:>12} {:>14}  type", "bytes", "objects", "bytes now", "objects now")
            .ok();
        for (name, both) in some.take(rows) {
            let (by, now) = (growth(both), both[1]);
            writeln!(
                text,
                "{:>12} {:>14} {:>12} {:>14}  {name}",
                signed(human(by.bytes, "bytes")),
                signed(grouped(by.objects)),
                human(now.bytes, "bytes"),
                grouped(now.objects),
            )
            .ok();
        }
    };
    changed(&mut text, "grown", &mut types.iter(), grown);
    let mut ways: Vec<(&Vec<String>, &Both)> =
        sums.ways.iter().filter(|(_, both)| growth(both).bytes > 0).collect();
    ways.sort_by_key(|(way, both)| (std::cmp::Reverse(growth(both).bytes), *way));
    if !ways.is_empty() {
        writeln!(text, "\nwhat holds them: {} of {} ways that have grown", ways.len().min(rows), ways.len())
            .ok();
    }
    for (way, both) in ways.into_iter().take(rows) {
        let by = growth(both);
        let amount =
            format!("{} in {} objects", signed(human(by.bytes, "bytes")), signed(grouped(by.objects)));
        writeln!(text, "\n{amount}").ok();
        print::way(&mut text, way.iter().map(String::as_str));
    }
    if !shrunk.is_empty() {
        changed(&mut text, "shrunk", &mut shrunk.iter().copied(), shrunk.len());
    }
    Ok(text)
}

/// With a plus where it grew.
fn signed(amount: String) -> String {
    if amount.starts_with('-') || amount == "0" { amount } else { format!("+{amount}") }
}
