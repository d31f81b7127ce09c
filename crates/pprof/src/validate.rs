//! The rules every reader relies on: those of google/pprof's `CheckValid` and decoder
//! (`profile/profile.go`, `profile/encode.go`), and what the .proto asks for beyond them (one value
//! per label key, dense string indices).

use super::proto::{Profile, Sample};
use std::collections::HashSet;

/// A broken rule.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// `string_table[0]` must be empty.
    #[error("string table does not begin with the empty string")]
    FirstString,
    /// A string index outside the table.
    #[error("string index {found} in {place}, but the table has {len} strings")]
    String {
        /// The field.
        place: &'static str,
        /// The index.
        found: i64,
        /// Table size.
        len: usize,
    },
    /// Samples without sample types, or a sample with another number of values.
    #[error("a sample has {found} values, expected {expected}")]
    Values {
        /// Values found.
        found: usize,
        /// Sample types.
        expected: usize,
    },
    /// Id 0 is reserved, and each id may be used once.
    #[error("{table} id {id} is reserved or used twice")]
    Id {
        /// The table.
        table: &'static str,
        /// The id.
        id: u64,
    },
    /// A reference to an entry that does not exist.
    #[error("{place} refers to {table} {id}, which does not exist")]
    Reference {
        /// The field.
        place: &'static str,
        /// To which table.
        table: &'static str,
        /// The id.
        id: u64,
    },
    /// A label with text and number, without key, or with a key used before in the sample.
    #[error("a sample has an ambiguous label (key string {key})")]
    Label {
        /// String index of the key.
        key: i64,
    },
    /// `default_sample_type` names no sample type.
    #[error("the default sample type is not among the sample types")]
    DefaultSampleType,
    /// A message longer than protobuf allows.
    #[error("larger than a protobuf message can be")]
    TooLarge,
}

/// Checks samples one by one as they are made or read, then the tables they refer to.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    values: Option<usize>,
    max_string: i64,
    max_location: u64,
}

impl Checker {
    /// Looks at one sample.
    ///
    /// # Errors
    /// The rule it breaks.
    pub(crate) fn sample(&mut self, sample: &Sample) -> Result<(), Invalid> {
        let expected = *self.values.get_or_insert(sample.value.len());
        if sample.value.len() != expected {
            return Err(Invalid::Values { found: sample.value.len(), expected });
        }
        for (position, label) in sample.label.iter().enumerate() {
            let both = label.str != 0 && (label.num != 0 || label.num_unit != 0);
            let again = sample.label[..position].iter().any(|other| other.key == label.key);
            if label.key == 0 || both || again {
                return Err(Invalid::Label { key: label.key });
            }
            for index in [label.key, label.str, label.num_unit] {
                if index < 0 {
                    return Err(Invalid::String { place: "label", found: index, len: 0 });
                }
                self.max_string = self.max_string.max(index);
            }
        }
        for &id in &sample.location_id {
            if id == 0 {
                return Err(Invalid::Reference { place: "sample", table: "location", id });
            }
            self.max_location = self.max_location.max(id);
        }
        Ok(())
    }

    /// Checks the tables of a profile, and the samples seen against them where location ids are 1,
    /// 2, 3, ….
    ///
    /// # Errors
    /// The rule that is broken.
    pub(crate) fn finish(&self, profile: &Profile) -> Result<(), Invalid> {
        let expected = profile.sample_type.len();
        if let Some(found) = self.values.filter(|&found| found != expected || found == 0) {
            return Err(Invalid::Values { found, expected });
        }
        if profile.string_table.first().is_none_or(|first| !first.is_empty()) {
            return Err(Invalid::FirstString);
        }
        strings(profile, self.max_string)?;
        let mappings = ids("mapping", profile.mapping.iter().map(|mapping| mapping.id))?;
        let functions = ids("function", profile.function.iter().map(|function| function.id))?;
        let locations = ids("location", profile.location.iter().map(|location| location.id))?;
        for location in &profile.location {
            let id = location.mapping_id;
            if id != 0 && !mappings.contains(&id) {
                return Err(Invalid::Reference { place: "location", table: "mapping", id });
            }
            for id in location.line.iter().map(|line| line.function_id) {
                if !functions.contains(&id) {
                    return Err(Invalid::Reference { place: "line", table: "function", id });
                }
            }
        }
        let default = profile.default_sample_type;
        if default != 0
            && !profile.sample_type.iter().any(|sample_type| sample_type.r#type == default)
        {
            return Err(Invalid::DefaultSampleType);
        }
        let id = self.max_location;
        if id != 0 && !locations.contains(&id) {
            return Err(Invalid::Reference { place: "sample", table: "location", id });
        }
        Ok(())
    }
}

/// Checks a whole profile.
///
/// # Errors
/// The first rule that is broken.
pub fn validate(profile: &Profile) -> Result<(), Invalid> {
    let mut checker = Checker::default();
    for sample in &profile.sample {
        checker.sample(sample)?;
    }
    checker.finish(profile)?;
    let locations: HashSet<u64> = profile.location.iter().map(|location| location.id).collect();
    for &id in profile.sample.iter().flat_map(|sample| &sample.location_id) {
        if !locations.contains(&id) {
            return Err(Invalid::Reference { place: "sample", table: "location", id });
        }
    }
    Ok(())
}

/// All string indices of the tables, and the highest one of the samples.
fn strings(profile: &Profile, max_in_samples: i64) -> Result<(), Invalid> {
    let len = profile.string_table.len();
    let check = |place, found: i64| match usize::try_from(found) {
        Ok(index) if index < len => Ok(()),
        _ => Err(Invalid::String { place, found, len }),
    };
    check("label", max_in_samples)?;
    for value_type in profile.sample_type.iter().chain(&profile.period_type) {
        check("value type", value_type.r#type)?;
        check("value type", value_type.unit)?;
    }
    for mapping in &profile.mapping {
        check("mapping", mapping.filename)?;
        check("mapping", mapping.build_id)?;
    }
    for function in &profile.function {
        check("function", function.name)?;
        check("function", function.system_name)?;
        check("function", function.filename)?;
    }
    for &comment in &profile.comment {
        check("comment", comment)?;
    }
    for field in
        [profile.drop_frames, profile.keep_frames, profile.default_sample_type, profile.doc_url]
    {
        check("profile", field)?;
    }
    Ok(())
}

fn ids(table: &'static str, all: impl Iterator<Item = u64>) -> Result<HashSet<u64>, Invalid> {
    let mut seen = HashSet::new();
    for id in all {
        if id == 0 || !seen.insert(id) {
            return Err(Invalid::Id { table, id });
        }
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{Function, Label, Line, Location, Mapping, ValueType};

    /// (message, field, type, repeated, number), from the .proto.
    fn fields_of_proto(text: &str) -> Vec<(String, String, String, bool, String)> {
        let mut fields = Vec::new();
        let mut message = "";
        for line in text.lines().map(|line| line.split("//").next().unwrap_or_default().trim()) {
            let words: Vec<&str> = line.trim_end_matches([';', '{']).split_whitespace().collect();
            match words.as_slice() {
                ["message", name] => message = name,
                ["repeated", kind, name, "=", number] => {
                    fields.push((
                        message.into(),
                        (*name).into(),
                        (*kind).into(),
                        true,
                        (*number).into(),
                    ));
                }
                [kind, name, "=", number] if !message.is_empty() => {
                    fields.push((
                        message.into(),
                        (*name).into(),
                        (*kind).into(),
                        false,
                        (*number).into(),
                    ));
                }
                _ => {}
            }
        }
        fields
    }

    /// The same from the attributes of the generated file.
    fn fields_of_rust(text: &str) -> Vec<(String, String, String, bool, String)> {
        let mut fields = Vec::new();
        let (mut message, mut attribute) = ("", "");
        for line in text.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("pub struct ") {
                message = name.trim_end_matches(" {");
            } else if let Some(inside) = line.strip_prefix("#[prost(") {
                attribute = inside.trim_end_matches(")]");
            } else if let Some((name, kind)) =
                line.strip_prefix("pub ").and_then(|line| line.split_once(": "))
            {
                let number = attribute.split("tag = ").nth(1).unwrap().trim_matches('"');
                let scalar = attribute.split(',').next().unwrap();
                let kind = kind.trim_end_matches(['>', ',']).rsplit(['<', ':']).next().unwrap();
                let kind = if scalar == "message" { kind } else { scalar };
                let name = name.trim_start_matches("r#");
                fields.push((
                    message.into(),
                    name.into(),
                    kind.into(),
                    attribute.contains("repeated"),
                    number.into(),
                ));
            }
        }
        fields
    }

    #[test]
    fn the_generated_messages_are_those_of_the_proto() {
        let expected = fields_of_proto(include_str!("profile.proto"));
        assert_eq!(expected.len(), 15 + 2 + 3 + 4 + 10 + 5 + 3 + 5);
        assert_eq!(fields_of_rust(include_str!("proto.rs")), expected);
    }

    fn good() -> Profile {
        Profile {
            string_table: ["", "cpu", "nanoseconds", "f", "key"].map(str::to_owned).to_vec(),
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            default_sample_type: 1,
            mapping: vec![Mapping { id: 1, ..Mapping::default() }],
            function: vec![Function { id: 1, name: 3, ..Function::default() }],
            location: vec![Location {
                id: 1,
                mapping_id: 1,
                line: vec![Line { function_id: 1, ..Line::default() }],
                ..Location::default()
            }],
            sample: vec![Sample {
                location_id: vec![1],
                value: vec![1],
                label: vec![Label { key: 4, num: 5, ..Label::default() }],
            }],
            ..Profile::default()
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        assert_eq!(validate(&good()), Ok(()));
        let broken = |change: fn(&mut Profile)| {
            let mut profile = good();
            change(&mut profile);
            validate(&profile).unwrap_err()
        };
        assert_eq!(broken(|p| p.string_table[0] = "x".into()), Invalid::FirstString);
        assert_eq!(broken(|p| p.string_table.clear()), Invalid::FirstString);
        assert!(matches!(broken(|p| p.function[0].name = 5), Invalid::String { found: 5, .. }));
        assert!(matches!(broken(|p| p.comment.push(-1)), Invalid::String { found: -1, .. }));
        assert!(matches!(
            broken(|p| p.sample[0].value.push(1)),
            Invalid::Values { found: 2, expected: 1 }
        ));
        assert!(matches!(broken(|p| p.sample_type.clear()), Invalid::Values { .. }));
        assert!(matches!(
            broken(|p| p.location[0].id = 0),
            Invalid::Id { table: "location", id: 0 }
        ));
        assert!(matches!(
            broken(|p| p.mapping.push(p.mapping[0])),
            Invalid::Id { table: "mapping", .. }
        ));
        assert!(matches!(
            broken(|p| p.location[0].mapping_id = 9),
            Invalid::Reference { table: "mapping", .. }
        ));
        assert!(matches!(
            broken(|p| p.location[0].line[0].function_id = 0),
            Invalid::Reference { .. }
        ));
        assert!(matches!(broken(|p| p.sample[0].location_id.push(2)), Invalid::Reference { .. }));
        assert!(matches!(broken(|p| p.sample[0].label[0].str = 3), Invalid::Label { .. }));
        assert!(matches!(broken(|p| p.sample[0].label[0].key = 0), Invalid::Label { .. }));
        let twice = |p: &mut Profile| {
            let label = p.sample[0].label[0];
            p.sample[0].label.push(label);
        };
        assert!(matches!(broken(twice), Invalid::Label { .. }));
        assert_eq!(broken(|p| p.default_sample_type = 3), Invalid::DefaultSampleType);
    }

    #[test]
    fn a_gap_in_location_ids_is_found() {
        let mut profile = good();
        profile.location[0].id = 3;
        profile.sample[0].location_id = vec![3, 2];
        assert!(matches!(validate(&profile), Err(Invalid::Reference { id: 2, .. })));
    }
}
