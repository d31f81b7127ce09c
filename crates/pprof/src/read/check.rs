//! What google/pprof makes of a message once it is parsed (`postDecode`, `CheckValid`,
//! `CompatibilizeSampleTypes`), in that order.

use super::{ReadProfile, ReadRefusal, are, is_ours};
use crate::proto::{Label, Profile, ValueType};
use perfusion_symbolize::demangle;
use std::collections::{HashMap, HashSet};

/// Refuses what pprof refuses and drops what it drops.
pub(super) fn check(reading: &mut ReadProfile) -> Result<(), ReadRefusal> {
    strings(&reading.profile)?;
    mappings(reading);
    names(&mut reading.profile);
    labels(reading);
    tables(&reading.profile)?;
    types(reading)
}

/// All indices that pprof looks up. Of a label with text it does not look up the unit.
fn strings(profile: &Profile) -> Result<(), ReadRefusal> {
    let len = profile.string_table.len();
    let check = |found: i64, place: &dyn Fn() -> String| match usize::try_from(found) {
        Ok(index) if index < len => Ok(()),
        _ => Err(ReadRefusal::String { place: place(), found, len }),
    };
    for (mapping, number) in profile.mapping.iter().zip(1..) {
        check(mapping.filename, &|| format!("the file name of mapping {number}"))?;
        check(mapping.build_id, &|| format!("the build id of mapping {number}"))?;
    }
    for (function, number) in profile.function.iter().zip(1..) {
        check(function.name, &|| format!("the name of function {number}"))?;
        check(function.system_name, &|| format!("the system name of function {number}"))?;
        check(function.filename, &|| format!("the file name of function {number}"))?;
    }
    let period = profile.period_type.iter().map(|each| (each, "the period".to_owned()));
    let types = profile.sample_type.iter().zip(1..);
    let types = types.map(|(each, number)| (each, format!("sample type {number}")));
    for (ValueType { r#type, unit }, place) in types.chain(period) {
        check(*r#type, &|| format!("the name of {place}"))?;
        check(*unit, &|| format!("the unit of {place}"))?;
    }
    for (sample, number) in profile.sample.iter().zip(1..) {
        for label in &sample.label {
            check(label.key, &|| format!("the key of a label of sample {number}"))?;
            check(label.str, &|| format!("the text of a label of sample {number}"))?;
            if label.str == 0 {
                check(label.num_unit, &|| format!("the unit of a label of sample {number}"))?;
            }
        }
    }
    for &comment in &profile.comment {
        check(comment, &|| "a comment".to_owned())?;
    }
    check(profile.drop_frames, &|| "drop_frames".to_owned())?;
    check(profile.keep_frames, &|| "keep_frames".to_owned())?;
    check(profile.default_sample_type, &|| "default_sample_type".to_owned())
}

/// A mapping that is not in the table is none.
fn mappings(reading: &mut ReadProfile) {
    let known: HashSet<u64> = reading.profile.mapping.iter().map(|mapping| mapping.id).collect();
    let mut unknown = 0;
    for location in &mut reading.profile.location {
        if location.mapping_id != 0 && !known.contains(&location.mapping_id) {
            location.mapping_id = 0;
            unknown += 1;
        }
    }
    if unknown > 0 {
        let what = are(unknown, "location", "locations");
        reading
            .remarks
            .push(format!("{what} of a mapping that is not in the file: shown without a file"));
    }
}

/// A function without a name of its own is called by its system name, demangled
/// (`internal/symbolizer`). Our own names are readable where they can be.
fn names(profile: &mut Profile) {
    let ours = is_ours(profile);
    let Profile { function, string_table, .. } = profile;
    let mut shown: HashMap<i64, i64> = HashMap::new();
    for function in function.iter_mut() {
        let text = |index: i64| {
            let text = usize::try_from(index).ok().and_then(|at| string_table.get(at));
            text.map_or("", String::as_str)
        };
        let (name, system_name) = (text(function.name), text(function.system_name));
        if !name.is_empty() && name != system_name {
            continue;
        }
        if let Some(&known) = shown.get(&function.system_name) {
            function.name = known;
            continue;
        }
        let demangled = if ours { None } else { demangle::simple(system_name) };
        function.name = function.system_name;
        if let Some(demangled) = demangled {
            function.name = i64::try_from(string_table.len()).unwrap_or(0);
            string_table.push(demangled);
        }
        shown.insert(function.system_name, function.name);
    }
}

/// Text and number in one label: the text counts. Neither: there is no label; our own numbers may
/// be 0 and have no unit.
fn labels(reading: &mut ReadProfile) {
    let ours = is_ours(&reading.profile);
    let (mut both, mut neither) = (0, 0);
    for sample in &mut reading.profile.sample {
        for label in &mut sample.label {
            if label.str != 0 && (label.num != 0 || label.num_unit != 0) {
                both += 1;
                *label = Label { num: 0, num_unit: 0, ..*label };
            }
        }
        if !ours {
            let before = sample.label.len();
            sample.label.retain(|label| (label.str, label.num, label.num_unit) != (0, 0, 0));
            neither += before - sample.label.len();
        }
    }
    if both > 0 {
        let what = are(both, "label", "labels");
        reading.remarks.push(format!("{what} both text and number: the number is dropped"));
    }
    if neither > 0 {
        let what = are(neither, "label", "labels");
        reading.remarks.push(format!("{what} neither text nor number: dropped"));
    }
}

fn tables(profile: &Profile) -> Result<(), ReadRefusal> {
    let types = profile.sample_type.len();
    if types == 0 && !profile.sample.is_empty() {
        return Err(ReadRefusal::SamplesWithoutTypes);
    }
    let locations: HashSet<u64> = profile.location.iter().map(|location| location.id).collect();
    for (each, sample) in profile.sample.iter().zip(1..) {
        if each.value.len() != types {
            return Err(ReadRefusal::Values { sample, found: each.value.len(), types });
        }
        if let Some(&id) = each.location_id.iter().find(|id| !locations.contains(id)) {
            return Err(ReadRefusal::NoLocation { sample, id });
        }
    }
    ids("mapping", profile.mapping.iter().map(|mapping| mapping.id))?;
    let functions = ids("function", profile.function.iter().map(|function| function.id))?;
    ids("location", profile.location.iter().map(|location| location.id))?;
    for location in &profile.location {
        let mut of_lines = location.line.iter().map(|line| line.function_id);
        if let Some(function) = of_lines.find(|function| !functions.contains(function)) {
            return Err(ReadRefusal::NoFunction { id: location.id, function });
        }
    }
    Ok(())
}

fn ids(table: &'static str, all: impl Iterator<Item = u64>) -> Result<HashSet<u64>, ReadRefusal> {
    let mut seen = HashSet::new();
    for id in all {
        if id == 0 {
            return Err(ReadRefusal::ReservedId { table });
        }
        if !seen.insert(id) {
            return Err(ReadRefusal::TwiceId { table, id });
        }
    }
    Ok(seen)
}

/// A type whose name stands several times is dropped; a default that does not exist is none.
fn types(reading: &mut ReadProfile) -> Result<(), ReadRefusal> {
    let ReadProfile { profile, remarks } = reading;
    let text = |index: i64| {
        let text = usize::try_from(index).ok().and_then(|index| profile.string_table.get(index));
        text.map_or("", String::as_str)
    };
    let mut names: HashMap<&str, usize> = HashMap::new();
    for each in &profile.sample_type {
        *names.entry(text(each.r#type)).or_insert(0) += 1;
    }
    let once: Vec<bool> =
        profile.sample_type.iter().map(|each| names.get(text(each.r#type)) == Some(&1)).collect();
    let default = text(profile.default_sample_type);
    let default_exists = names.get(default) == Some(&1);
    if !default.is_empty() && !names.contains_key(default) {
        remarks.push(format!(
            "the default sample type `{}` is not among the sample types: the last one is shown",
            perfusion_model::text::clean(default)
        ));
    }
    if !once.contains(&true) {
        return Err(ReadRefusal::NoTypes);
    }
    if once.contains(&false) {
        remarks.push(format!(
            "{} in several columns: dropped",
            are(
                names.values().filter(|&&columns| columns > 1).count(),
                "sample type",
                "sample types",
            )
        ));
        let mut kept = once.iter();
        profile.sample_type.retain(|_| kept.next() == Some(&true));
        for sample in &mut profile.sample {
            let mut kept = once.iter();
            sample.value.retain(|_| kept.next() == Some(&true));
        }
        if !default_exists {
            profile.default_sample_type =
                profile.sample_type.first().map_or(0, |first| first.r#type);
        }
    } else if !default_exists {
        profile.default_sample_type = 0;
    }
    Ok(())
}
