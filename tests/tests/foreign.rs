//! Profiles of other tools: what pprof, built from its module, makes of a file, `perfusion report`
//! makes of it, too.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::Path;

use perfusion_model::units;
use perfusion_pprof::read::read;
use perfusion_report::stacks::{ProfileStacks, ProfileView};
use perfusion_report::top::{self, TableOptions};
use perfusion_report::{self, folded};
use system_tests::foreign::{Kind, file};
use system_tests::gotool::{Judged, judge};
use system_tests::perfusion as harness;
use system_tests::{Need, begin_beside, long_form};

/// Names longer than this are cut: of those the beginning is compared.
const COMPARED: usize = 1000;

/// What we make of a file in the form of the judge's answer, and the table that a person sees.
fn ours(path: &Path) -> Result<(Judged, String, String), String> {
    let profile = perfusion_report::load(path).map_err(|error| error.to_string())?;
    let stacks = ProfileStacks::new(&profile);
    let name = stacks.default_sample_type();
    let unit =
        stacks.sample_types().find(|(of, _)| *of == name).map_or("", |(_, unit)| unit).to_owned();
    let mut lines = Vec::new();
    folded::write(&profile, name, &ProfileView::default(), &mut lines)
        .map_err(|error| error.to_string())?;
    let column = stacks.sample_type(name).map_err(|error| error.to_string())?;
    let mut judged = Judged {
        total: stacks.values(column, &ProfileView::default()).total.whole(),
        ..Judged::default()
    };
    for line in String::from_utf8(lines).map_err(|error| error.to_string())?.lines() {
        let (stack, value) = line.rsplit_once(' ').ok_or_else(|| format!("no value: {line}"))?;
        let value: i128 = value.parse().map_err(|error| format!("{line}: {error}"))?;
        if stack == "[no stack]" {
            continue;
        }
        let frames: Vec<String> = stack.split(';').rev().map(unescaped).collect();
        judged.functions.entry(frames[0].clone()).or_default().0 += value;
        for frame in frames.iter().collect::<HashSet<_>>() {
            judged.functions.entry(frame.clone()).or_default().1 += value;
        }
        *judged.stacks.entry(frames).or_default() += value;
    }
    judged.functions.retain(|_, sums| *sums != (0, 0));
    let table =
        top::table(&profile, name, &TableOptions { limit: usize::MAX, ..TableOptions::default() });
    Ok((judged, unit, table.map_err(|error| error.to_string())?))
}

/// A name as it was before it was escaped.
fn unescaped(text: &str) -> String {
    let (mut name, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once("\\u{") {
        let (code, after) = after.split_once('}').unwrap();
        name.push_str(before);
        name.push(char::from_u32(u32::from_str_radix(code, 16).unwrap()).unwrap());
        rest = after;
    }
    name + rest
}

/// What both must have alike: long names by their beginnings.
fn comparable(judged: Judged) -> Judged {
    let short = |name: String| name.chars().take(COMPARED).collect::<String>();
    Judged {
        total: judged.total,
        functions: judged.functions.into_iter().map(|(name, sums)| (short(name), sums)).collect(),
        stacks: judged
            .stacks
            .into_iter()
            .map(|(stack, value)| (stack.into_iter().map(short).collect(), value))
            .collect(),
    }
}

/// The table that people see has the judge's functions with the judge's values, as people read
/// them.
fn check_table(table: &str, judged: &Judged, unit: &str, what: &str) {
    let mut rows: BTreeMap<(String, String), usize> = BTreeMap::new();
    for row in table.lines().skip(2).filter(|row| row.contains('%')) {
        // A value and its percentage, twice.
        let mut columns = row.split('%').map(|column| {
            column.trim_end().rsplit_once(' ').map_or("", |(value, _)| value.trim()).to_owned()
        });
        let (own, whole) = (columns.next().unwrap_or_default(), columns.next().unwrap_or_default());
        *rows.entry((own, whole)).or_default() += 1;
    }
    let mut expected: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (own, whole) in judged.functions.values() {
        let shown = |value: i128| units::human(value, unit);
        *expected.entry((shown(*own), shown(*whole))).or_default() += 1;
    }
    assert_eq!(rows, expected, "{what}:\n{table}");
}

fn compare(kind: Kind, seeds: std::ops::Range<u64>) -> (usize, usize) {
    let scratch = harness::Scratch::new().unwrap();
    let (mut read, mut refused) = (0, 0);
    for seed in seeds {
        let path = scratch.path(&format!("{kind:?}-{seed}.pb.gz"));
        fs::write(&path, file(kind, seed)).unwrap();
        let what = format!("{kind:?} {seed}");
        let (mine, unit, table) = match ours(&path) {
            Ok(ours) => ours,
            Err(refusal) => {
                let judged = judge(&path, "nanoseconds").unwrap();
                assert!(
                    judged.is_err(),
                    "{what}: refused with `{refusal}`, pprof reads {judged:?}"
                );
                refused += 1;
                continue;
            }
        };
        let judged = judge(&path, &unit).unwrap();
        let judged = judged.unwrap_or_else(|refusal| panic!("{what}: pprof refuses it: {refusal}"));
        check_table(&table, &judged, &unit, &what);
        assert_eq!(comparable(mine), comparable(judged), "{what}, {unit}");
        read += 1;
    }
    (read, refused)
}

#[test]
fn every_kind_of_foreign_file_is_read_as_pprof_reads_it_or_refused_as_pprof_refuses_it() {
    let Some(_turn) = begin_beside("foreign::every_kind", &[Need::Go]) else { return };
    let seeds = if long_form() { 60 } else { 12 };
    for kind in Kind::ALL {
        let (read, refused) = compare(kind, 0..seeds);
        println!("{kind:?}: {read} alike, {refused} refused by both");
        assert!(read > 0, "{kind:?}: nothing to compare");
        if matches!(kind, Kind::Tables | Kind::Types | Kind::Bytes | Kind::Container) {
            assert!(refused > 0, "{kind:?}: nothing that is refused");
        }
    }
}

#[test]
fn a_file_that_is_cut_or_changed_anywhere_is_read_or_refused_and_never_ends_the_program() {
    let Some(_turn) = begin_beside("foreign::cut_or_changed", &[]) else { return };
    for kind in Kind::ALL {
        let bytes = file(kind, 3);
        let steps = (bytes.len() / 200).max(1);
        for at in (0..bytes.len()).step_by(steps) {
            let mut changed = bytes.clone();
            changed[at] ^= 0x55;
            for bytes in [&bytes[..at], &changed[..]] {
                if let Ok(reading) = read(bytes) {
                    let stacks = ProfileStacks::new(&reading.profile);
                    let name = stacks.default_sample_type();
                    top::table(&reading.profile, name, &TableOptions::default()).unwrap();
                    folded::write(&reading.profile, name, &ProfileView::default(), &mut Vec::new())
                        .unwrap();
                    perfusion_report::flame::page(
                        &reading.profile,
                        "x",
                        None,
                        &ProfileView::default(),
                    )
                    .unwrap();
                }
            }
        }
    }
}

/// What the frames of each name add up to in a flame graph. inferno parts a frame in two where
/// other names begin with its own, since it sorts lines: so the sum.
fn sums(nodes: impl IntoIterator<Item = (String, i128)>) -> BTreeMap<String, i128> {
    let mut sums = BTreeMap::new();
    for (name, value) in nodes {
        *sums.entry(name.chars().take(COMPARED).collect()).or_default() += value;
    }
    // pprof leaves out samples without a stack.
    sums.remove("[no stack]");
    sums
}

/// Every node of the flame graph that the stacks make, and its value.
fn nodes(stacks: &BTreeMap<Vec<String>, i128>) -> Vec<(String, i128)> {
    let mut paths: BTreeMap<Vec<&str>, i128> = BTreeMap::new();
    for (stack, value) in stacks {
        let root_first: Vec<&str> = stack.iter().rev().map(String::as_str).collect();
        for depth in 1..=root_first.len() {
            *paths.entry(root_first[..depth].to_vec()).or_default() += value;
        }
    }
    paths.iter().map(|(path, value)| (path[path.len() - 1].to_owned(), *value)).collect()
}

#[test]
fn inferno_reads_each_function_of_folded_text_with_its_own_name_and_value() {
    let Some(_turn) = begin_beside("foreign::inferno", &[Need::Go]) else { return };
    let scratch = harness::Scratch::new().unwrap();
    for seed in 0..if long_form() { 60 } else { 10 } {
        let path = scratch.path(&format!("{seed}.pb.gz"));
        fs::write(&path, file(Kind::Names, seed)).unwrap();
        let profile = perfusion_report::load(&path).unwrap();
        let mut folded = Vec::new();
        folded::write(&profile, "cpu", &ProfileView::default(), &mut folded).unwrap();
        let folded = String::from_utf8(folded).unwrap();
        let mut options = inferno::flamegraph::Options::default();
        options.min_width = 0.0;
        let mut svg = Vec::new();
        inferno::flamegraph::from_lines(&mut options, folded.lines(), &mut svg).unwrap();
        let svg = String::from_utf8(svg).unwrap();
        let title = |title: &str| {
            let title = title.split("</title>").next()?;
            let (name, numbers) = title.rsplit_once(" (")?;
            let value = numbers.split(' ').next()?.replace(',', "").parse::<i128>().ok()?;
            let text =
                [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
            let name = text.iter().fold(name.to_owned(), |name, (of, is)| name.replace(of, is));
            Some((unescaped(&name), value))
        };
        let read =
            sums(svg.split("<title>").skip(1).filter_map(title).filter(|(name, _)| name != "all"));
        let judged = judge(&path, "nanoseconds").unwrap().unwrap();
        assert_eq!(read, sums(nodes(&judged.stacks)), "{seed}");
    }
}
