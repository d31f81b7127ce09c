//! Two surveys compared: types and ways that have grown.

use super::ReportError;
use super::survey_profile::TYPES;
use crate::stacks::ProfileStacks;
use perfusion_model::units::{counted, grouped, human};
use perfusion_pprof::NO_LOSS;
use perfusion_pprof::proto::Profile;
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
struct SurveySums {
    types: BTreeMap<String, Both>,
    ways: BTreeMap<Vec<String>, Both>,
    all: Both,
}

impl SurveySums {
    fn add(&mut self, profile: &Profile, which: usize) -> Result<(), ReportError> {
        let stacks = ProfileStacks::new(profile);
        let [objects, bytes] = [stacks.sample_type(TYPES[0].0)?, stacks.sample_type(TYPES[1].0)?];
        for sample in &profile.sample {
            let value = |column: usize| sample.value.get(column).copied().unwrap_or(0);
            let amount = Amount { objects: value(objects), bytes: value(bytes) };
            let mut way: Vec<String> =
                stacks.frames(sample).map(|frame| frame.name.to_string()).collect();
            way.reverse();
            let Some(leaf) = way.last().cloned() else { continue };
            for both in [
                self.types.entry(leaf).or_default(),
                self.ways.entry(way).or_default(),
                &mut self.all,
            ] {
                if let Some(sum) = both.get_mut(which) {
                    sum.objects = sum.objects.saturating_add(amount.objects);
                    sum.bytes = sum.bytes.saturating_add(amount.bytes);
                }
            }
        }
        Ok(())
    }
}

/// What has changed from one survey to another, as text: `rows` types that have grown most and
/// types that have shrunk most, then ways that have grown most.
///
/// # Errors
/// When one is no profile of a survey.
pub fn text(before: &Profile, after: &Profile, rows: usize) -> Result<String, ReportError> {
    let mut sums = SurveySums::default();
    sums.add(before, 0)?;
    sums.add(after, 1)?;
    let mut text = String::new();
    let [was, is] = sums.all;
    // Writing to a String cannot fail.
    let whose =
        |profile| ProfileStacks::new(profile).comments().next().unwrap_or_default().into_owned();
    if whose(before) != whose(after) {
        writeln!(text, "of two processes: {}, and {}", whose(before), whose(after)).ok();
    }
    for (profile, which) in [(before, "first"), (after, "second")] {
        for lacks in ProfileStacks::new(profile).losses().filter(|line| line != NO_LOSS) {
            writeln!(text, "the {which} one is not whole: {lacks}").ok();
        }
    }
    if before.time_nanos > after.time_nanos {
        writeln!(text, "the first one is the later one: what is called before was after").ok();
    }
    writeln!(
        text,
        "{} in {} before, {} in {} after: {}, {}",
        human(was.bytes, "bytes"),
        counted(was.objects, "object"),
        human(is.bytes, "bytes"),
        counted(is.objects, "object"),
        signed(human(growth(&sums.all).bytes, "bytes")),
        signed(counted(growth(&sums.all).objects, "object")),
    )
    .ok();
    let mut types: Vec<(&String, &Both)> =
        sums.types.iter().filter(|(_, both)| both[0] != both[1]).collect();
    types.sort_by_key(|(name, both)| (std::cmp::Reverse(growth(both).bytes), *name));
    let grown = types.iter().take_while(|(_, both)| growth(both).bytes > 0).count();
    let shrunk: Vec<_> =
        types.iter().rev().take_while(|(_, both)| growth(both).bytes < 0).collect();
    let changed = |text: &mut String,
                   what: &str,
                   some: &mut dyn Iterator<Item = &(&String, &Both)>,
                   all: usize| {
        if all == 0 {
            writeln!(text, "\n{what}: no type").ok();
            return;
        }
        writeln!(text, "\n{what} most: {} of {}", all.min(rows), counted(all, "type")).ok();
        writeln!(
            text,
            "{:>12} {:>14} {:>12} {:>14}  type",
            "bytes", "objects", "bytes now", "objects now"
        )
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
    changed(&mut text, "grown", &mut types.iter().take(grown), grown);
    if !shrunk.is_empty() {
        changed(&mut text, "shrunk", &mut shrunk.iter().copied(), shrunk.len());
    }
    let mut ways: Vec<(&Vec<String>, &Both)> =
        sums.ways.iter().filter(|(_, both)| growth(both).bytes > 0).collect();
    ways.sort_by_key(|(way, both)| (std::cmp::Reverse(growth(both).bytes), *way));
    if !ways.is_empty() {
        let (shown, all) = (ways.len().min(rows), counted(ways.len(), "way"));
        let have = if ways.len() == 1 { "has" } else { "have" };
        writeln!(text, "\nwhat holds them: {shown} of {all} that {have} grown").ok();
    }
    for (way, both) in ways.into_iter().take(rows) {
        let by = growth(both);
        let amount = format!(
            "{} in {}",
            signed(human(by.bytes, "bytes")),
            signed(counted(by.objects, "object"))
        );
        writeln!(text, "\n{amount}").ok();
        perfusion_heap::text::way(&mut text, way.iter());
    }
    Ok(text)
}

/// With a plus where it grew.
fn signed(amount: String) -> String {
    if amount.starts_with('-') || amount == "0" || amount.starts_with("0 ") {
        amount
    } else {
        format!("+{amount}")
    }
}

#[cfg(test)]
mod tests {
    use super::{TYPES, text};
    use perfusion_pprof::proto::{Function, Line, Location, Profile, Sample, ValueType};

    /// A survey of types that a static field holds, each with its objects and bytes.
    fn survey(types: &[(&str, i64, i64)]) -> Profile {
        let names = types.iter().map(|(name, ..)| *name).chain(["static field Shop.Orders"]);
        let texts = TYPES.iter().flat_map(|(name, unit)| [*name, *unit]).chain(names);
        let column = |at| ValueType { r#type: at, unit: at + 1 };
        let ids = 1..=types.len() as u64 + 1;
        let root = *ids.end();
        let location = |id| Location {
            id,
            line: vec![Line { function_id: id, ..Line::default() }],
            ..Location::default()
        };
        Profile {
            sample_type: vec![column(1), column(3)],
            string_table: [""].into_iter().chain(texts).map(str::to_owned).collect(),
            // The names come after the empty text and four of the columns.
            function: ids
                .clone()
                .zip(5..)
                .map(|(id, name)| Function { id, name, ..Function::default() })
                .collect(),
            location: ids.map(location).collect(),
            sample: (1..)
                .zip(types)
                .map(|(id, (_, objects, bytes))| Sample {
                    location_id: vec![id, root],
                    value: vec![*objects, *bytes],
                    label: Vec::new(),
                })
                .collect(),
            ..Profile::default()
        }
    }

    #[test]
    fn what_has_shrunk_has_not_grown() {
        let before = survey(&[("Order", 10, 1000), ("Line", 30, 3000), ("Same", 1, 24)]);
        let after = survey(&[("Order", 9, 900), ("Line", 10, 1000), ("Same", 1, 24)]);
        let said = text(&before, &after, 10).unwrap();
        let (grown, shrunk) = said.split_once("\nshrunk most: 2 of 2 types\n").expect(&said);
        assert!(grown.ends_with("\ngrown: no type\n") && !grown.contains("Order"), "{said}");
        assert_eq!(
            shrunk.matches("  Line\n").count() + shrunk.matches("  Order\n").count(),
            2,
            "{said}"
        );
        assert!(!said.contains("what holds them"), "{said}");
    }

    #[test]
    fn surveys_of_two_processes_and_in_the_wrong_order_are_said_to_be() {
        let survey = |whose: &str, time_nanos| {
            let mut profile = survey(&[("Order", 1, 24)]);
            profile.comment = vec![profile.string_table.len() as i64];
            profile.string_table.push(whose.to_owned());
            Profile { time_nanos, ..profile }
        };
        let said = text(&survey("heap of pid 7 (shop)", 5), &survey("heap of pid 7 (shop)", 9), 10)
            .unwrap();
        assert!(said.starts_with("24 B in 1 object before"), "{said}");
        let said = text(&survey("heap of pid 7 (shop)", 9), &survey("heap of pid 8 (bank)", 5), 10)
            .unwrap();
        let (first, rest) = said.split_once('\n').unwrap();
        assert_eq!(first, "of two processes: heap of pid 7 (shop), and heap of pid 8 (bank)");
        assert!(rest.starts_with("the first one is the later one"), "{said}");
    }

    #[test]
    fn what_a_survey_lacks_is_said_of_both() {
        let survey = |lacks: &str| {
            let mut profile = survey(&[("Order", 1, 24)]);
            let comments = ["heap of pid 7 (shop)", lacks];
            profile.comment = (0..2).map(|at| profile.string_table.len() as i64 + at).collect();
            profile.string_table.extend(comments.map(str::to_owned));
            profile
        };
        let said =
            text(&survey("loss: none"), &survey("loss: 3 objects of types without a name"), 10)
                .unwrap();
        assert!(
            said.starts_with(
                "the second one is not whole: 3 objects of types without a name\n24 B in"
            ),
            "{said}"
        );
    }

    #[test]
    fn one_that_has_grown_is_one() {
        let (before, after) = (
            survey(&[("Order", 1, 24), ("Line", 5, 99)]),
            survey(&[("Order", 2, 48), ("Line", 4, 90)]),
        );
        let said = text(&before, &after, 10).unwrap();
        assert!(
            said.starts_with(
                "123 B in 6 objects before, 138 B in 6 objects after: +15 B, 0 objects\n"
            ),
            "{said}"
        );
        let (_, grown) = said.split_once("\ngrown most: 1 of 1 type\n").expect(&said);
        let (grown, held) =
            grown.split_once("\nwhat holds them: 1 of 1 way that has grown\n").expect(&said);
        let (grown, shrunk) = grown.split_once("\nshrunk most: 1 of 1 type\n").expect(&said);
        assert!(shrunk.contains("  Line\n"), "{said}");
        assert!(grown.contains("  Order\n") && !grown.contains("  Line\n"), "{said}");
        assert!(held.contains("+24 B in +1 object\n") && held.contains("Shop.Orders"), "{said}");
    }
}
