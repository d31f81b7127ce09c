//! Tests: profiles of other tools as people see them, in the table, by label and as folded text.

use super::stacks::{LabelFilter, ProfileStacks, ProfileView};
use super::top::TableOptions;
use super::{folded, groups, top, types};
use perfusion_pprof::proto::{
    Function, Label, Line, Location, Mapping, Profile, Sample, ValueType,
};

/// Samples with names from the leaf on and values; one column for each sample type.
fn profile(types: &[(&str, &str)], samples: &[(&[&str], &[i64])]) -> Profile {
    let mut profile = Profile { string_table: vec![String::new()], ..Profile::default() };
    for (name, unit) in types {
        let [r#type, unit] = [name, unit].map(|text| string(&mut profile, text));
        profile.sample_type.push(ValueType { r#type, unit });
    }
    for (names, values) in samples {
        let location_id = names.iter().map(|name| location(&mut profile, name)).collect();
        profile.sample.push(Sample { location_id, value: values.to_vec(), label: Vec::new() });
    }
    profile
}

fn string(profile: &mut Profile, text: &str) -> i64 {
    profile.string_table.push(text.to_owned());
    i64::try_from(profile.string_table.len() - 1).unwrap()
}

fn location(profile: &mut Profile, name: &str) -> u64 {
    let id = u64::try_from(profile.function.len() + 1).unwrap();
    let name = string(profile, name);
    profile.function.push(Function { id, name, ..Function::default() });
    let line = vec![Line { function_id: id, ..Line::default() }];
    profile.location.push(Location { id, line, ..Location::default() });
    id
}

fn label(profile: &mut Profile, sample: usize, key: &str, value: &str) {
    let [key, str] = [key, value].map(|text| string(profile, text));
    profile.sample[sample].label.push(Label { key, str, ..Label::default() });
}

fn table(profile: &Profile, sample_type: &str) -> String {
    top::table(profile, sample_type, &TableOptions::default()).unwrap()
}

fn by(profile: &Profile, label: &str) -> String {
    groups::table(profile, "cpu", &[label.to_owned()], &TableOptions::default()).unwrap()
}

const CPU: &[(&str, &str)] = &[("cpu", "nanoseconds")];

#[test]
fn values_below_zero_are_a_difference_with_its_signs_and_sums() {
    let mut profile = profile(
        CPU,
        &[
            (&["a", "main"], &[30]),
            (&["b", "main"], &[-50]),
            (&["c", "main"], &[20]),
            (&["c"], &[-20]),
        ],
    );
    let shown = table(&profile, "cpu");
    assert!(
        shown.starts_with("cpu: difference -20 ns (+50 ns -70 ns), percentages of 120 ns"),
        "{shown}"
    );
    assert!(!shown.contains("nothing was counted"), "{shown}");
    let rows: Vec<Vec<&str>> =
        shown.lines().skip(2).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["-50", "ns", "-41.7%", "-50", "ns", "-41.7%", "b"]);
    assert_eq!(rows[1], ["30", "ns", "25.0%", "30", "ns", "25.0%", "a"]);
    assert_eq!(rows.len(), 2, "what adds up to nothing is no row: {shown}");
    // Of a difference to a known base percentages are of the base.
    label(&mut profile, 1, "pprof::base", "true");
    assert!(table(&profile, "cpu").contains("percentages of 50 ns"));
}

#[test]
fn sums_beyond_64_bits_are_right() {
    let profile = profile(
        &[("n", "count")],
        &[(&["a"], &[i64::MAX]), (&["a"], &[i64::MAX]), (&["b"], &[i64::MIN])],
    );
    let mut lines = Vec::new();
    folded::write(&profile, "n", &ProfileView::default(), &mut lines).unwrap();
    assert_eq!(
        String::from_utf8(lines).unwrap(),
        "a 18446744073709551614\nb -9223372036854775808\n"
    );
}

#[test]
fn without_a_duration_there_are_no_rates_and_it_is_said() {
    let mut profile =
        profile(&[("alloc_objects", "count"), ("alloc_space", "bytes")], &[(&["f"], &[8, 1000])]);
    assert!(table(&profile, "alloc_space").contains("total 1000 B, the profile names no duration"));
    let comment = string(&mut profile, "perfusion 1.0");
    profile.comment.push(comment);
    let shown = types::table(&profile, "alloc_space", &TableOptions::default());
    assert!(
        shown.contains("?  [unknown type]") && shown.contains("?: the profile names no duration"),
        "{shown}"
    );
    profile.duration_nanos = 2_000_000_000;
    assert!(table(&profile, "alloc_space").contains("total 1000 B in 2 s"));
    assert!(
        types::table(&profile, "alloc_space", &TableOptions::default())
            .contains("500 B  [unknown type]")
    );
}

#[test]
fn a_lone_column_of_a_pair_has_no_table_of_types() {
    let mut profile = profile(&[("inuse_space", "bytes")], &[(&["f"], &[100])]);
    assert!(!types::is_known(&ProfileStacks::new(&profile), "inuse_space"));
    let comment = string(&mut profile, "perfusion 1.0");
    profile.comment.push(comment);
    assert!(!types::is_known(&ProfileStacks::new(&profile), "inuse_space"));
    assert!(
        table(&profile, "inuse_space").starts_with("inuse_space: total 100 B, 1 of 1 functions")
    );
}

#[test]
fn nothing_is_said_of_dotnet_below_the_profile_of_another_tool() {
    let mut profile =
        profile(&[("alloc_space", "bytes")], &[(&["runtime.mallocgc", "main.work"], &[100])]);
    label(&mut profile, 0, "wait_kind", "idle");
    let shown = table(&profile, "alloc_space");
    assert!(!shown.contains("System.") && !shown.contains("framework"), "{shown}");
    let first = shown.lines().nth(2).unwrap();
    assert!(
        first.contains("100 B 100.0%") && first.contains("runtime.mallocgc"),
        "flat is the leaf's: {shown}"
    );
}

#[test]
fn functions_without_names_are_called_as_pprof_calls_them() {
    let mut profile =
        profile(CPU, &[(&["", "main"], &[1]), (&["", "main"], &[2]), (&["x", " "], &[4])]);
    let filename = string(&mut profile, "/usr/lib/libwork.so.1");
    profile.mapping.push(Mapping { id: 1, filename, ..Mapping::default() });
    profile.location[2].mapping_id = 1;
    profile.location[4].line.clear();
    profile.location[4].address = 0x5000;
    let mut lines = Vec::new();
    folded::write(&profile, "cpu", &ProfileView::default(), &mut lines).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    assert_eq!(lines, "\\u{20};<unknown> 4\nmain;<unknown> 1\nmain;[libwork.so.1] 2\n");
}

#[test]
fn one_name_is_one_function_whatever_file_it_is_in() {
    let mut profile = profile(CPU, &[(&["f"], &[1]), (&["f"], &[2])]);
    let filename = string(&mut profile, "/bin/a");
    profile.mapping.push(Mapping { id: 1, filename, ..Mapping::default() });
    profile.location[1].mapping_id = 1;
    assert!(table(&profile, "cpu").contains("1 of 1 functions"));
}

#[test]
fn names_that_look_alike_once_escaped_stay_apart() {
    let long = "x".repeat(70_000);
    let [one, other] = ["1", "2"].map(|end| format!("{long}{end}"));
    let names = ["a\nb", "a\\u{a}b", "c;d", "c:d", "c\\u{3b}d", "[no stack]", &one, &other];
    let samples: Vec<_> = names.iter().map(|name| vec![*name]).collect();
    let samples: Vec<(&[&str], &[i64])> =
        samples.iter().map(|names| (&names[..], &[1][..])).collect();
    let mut profile = profile(CPU, &samples);
    profile.sample.push(Sample { value: vec![1], ..Sample::default() });
    let mut lines = Vec::new();
    folded::write(&profile, "cpu", &ProfileView::default(), &mut lines).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    assert_eq!(lines.lines().count(), names.len() + 1, "{lines}");
    assert!(lines.lines().all(|line| line.ends_with(" 1") && line.len() < 3_000));
}

#[test]
fn labels_of_one_name_are_all_shown_and_an_empty_text_is_no_number() {
    let mut profile = profile(CPU, &[(&["f"], &[10]), (&["f"], &[5]), (&["f"], &[3])]);
    label(&mut profile, 0, "thread", "a");
    label(&mut profile, 0, "thread", "b");
    label(&mut profile, 1, "thread", "");
    let shown = by(&profile, "thread");
    for row in ["10 ns  55.6%  a, b", "5 ns  27.8%  (empty)", "3 ns  16.7%  (none)"] {
        assert!(shown.contains(row), "no `{row}`: {shown}");
    }
    let only =
        |value: &str| vec![LabelFilter { label: "thread".to_owned(), value: value.to_owned() }];
    let stacks = ProfileStacks::new(&profile);
    for (value, expected) in [("a", 10), ("b", 10), ("a, b", 10), ("", 3)] {
        let view = ProfileView { only: only(value), ..ProfileView::default() };
        assert_eq!(stacks.values(0, &view).total.net(), expected, "{value}");
    }
}

#[test]
fn a_sample_type_without_a_name_has_a_heading_that_says_so() {
    let profile = profile(&[("", "count"), ("n", "count")], &[(&["f"], &[5, 6])]);
    assert!(table(&profile, "").starts_with("(empty): total 5, "));
    let error = top::table(&profile, "x", &TableOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "the profile has no sample type `x`; it has (empty), n");
}
