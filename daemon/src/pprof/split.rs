//! One profile -> several that are each no longer than a receiver takes. Each stands alone: it has the strings, functions and files of its own
//! samples, and no others.

use super::proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};
use prost::Message as _;
use std::collections::{HashMap, HashSet};

/// What a profile became.
#[derive(Debug, Default)]
pub struct Split {
    /// Together they have all samples of the whole but the dropped ones, in its order.
    pub parts: Vec<Profile>,
    /// Samples that are in none, because each alone is too long.
    pub dropped_samples: u64,
}

/// Parts of at most so many samples and, before compression, bytes.
#[must_use]
pub fn split(profile: &Profile, most_samples: usize, most_bytes: usize) -> Split {
    let mut split = Split::default();
    let mut ahead: Vec<&[Sample]> = profile.sample.chunks(most_samples.max(1)).rev().collect();
    while let Some(samples) = ahead.pop() {
        let part = part(profile, samples);
        if part.encoded_len() <= most_bytes {
            split.parts.push(part);
        } else if samples.len() > 1 {
            let (first, second) = samples.split_at(samples.len() / 2);
            ahead.extend([second, first]);
        } else {
            split.dropped_samples += 1;
        }
    }
    split
}

/// The profile with these of its samples only.
fn part(whole: &Profile, samples: &[Sample]) -> Profile {
    let mut strings = Strings { whole, table: vec![String::new()], known: HashMap::from([(0, 0)]) };
    let used: HashSet<u64> = samples.iter().flat_map(|sample| &sample.location_id).copied().collect();
    let locations = || whole.location.iter().filter(|location| used.contains(&location.id));
    let functions: HashSet<u64> =
        locations().flat_map(|location| &location.line).map(|line| line.function_id).collect();
    let mappings: HashSet<u64> = locations().map(|location| location.mapping_id).collect();
    let mut kind =
        |kind: ValueType| ValueType { r#type: strings.of(kind.r#type), unit: strings.of(kind.unit) };
    let sample_type = whole.sample_type.iter().copied().map(&mut kind).collect();
    let period_type = whole.period_type.map(&mut kind);
    let mut label = |label: &Label| Label {
        key: strings.of(label.key),
        str: strings.of(label.str),
        num: label.num,
        num_unit: strings.of(label.num_unit),
    };
    let sample = samples
        .iter()
        .map(|sample| Sample {
            location_id: sample.location_id.clone(),
            value: sample.value.clone(),
            label: sample.label.iter().map(&mut label).collect(),
        })
        .collect();
    let mapping = whole.mapping.iter().filter(|mapping| mappings.contains(&mapping.id)).map(|mapping| {
        Mapping { filename: strings.of(mapping.filename), build_id: strings.of(mapping.build_id), ..*mapping }
    });
    let mapping = mapping.collect();
    let function =
        whole.function.iter().filter(|function| functions.contains(&function.id)).map(|function| Function {
            name: strings.of(function.name),
            system_name: strings.of(function.system_name),
            filename: strings.of(function.filename),
            ..*function
        });
    let function = function.collect();
    let location = locations().map(|location| Location {
        line: location.line.iter().map(|line| Line { ..*line }).collect(),
        ..location.clone()
    });
    let location = location.collect();
    let comment = whole.comment.iter().map(|&comment| strings.of(comment)).collect();
    let (drop_frames, keep_frames) = (strings.of(whole.drop_frames), strings.of(whole.keep_frames));
    let (default_sample_type, doc_url) = (strings.of(whole.default_sample_type), strings.of(whole.doc_url));
    Profile {
        sample_type,
        sample,
        mapping,
        location,
        function,
        drop_frames,
        keep_frames,
        time_nanos: whole.time_nanos,
        duration_nanos: whole.duration_nanos,
        period_type,
        period: whole.period,
        comment,
        default_sample_type,
        doc_url,
        string_table: strings.table,
    }
}

/// The strings of a part.
struct Strings<'a> {
    whole: &'a Profile,
    table: Vec<String>,
    /// By their place in the whole.
    known: HashMap<i64, i64>,
}

impl Strings<'_> {
    fn of(&mut self, place: i64) -> i64 {
        if let Some(&known) = self.known.get(&place) {
            return known;
        }
        let text = usize::try_from(place).ok().and_then(|place| self.whole.string_table.get(place));
        let new = i64::try_from(self.table.len()).unwrap_or(0);
        self.table.push(text.cloned().unwrap_or_default());
        self.known.insert(place, new);
        new
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};
    use super::super::validate;
    use super::split;
    use prost::Message as _;

    /// So many samples, each with a location, a function and a name of its own below one that all share.
    fn profile(samples: u64) -> Profile {
        let fixed = ["", "cpu", "nanoseconds", "pid", "a comment", "/bin/app", "main"];
        let mut string_table: Vec<String> = fixed.map(str::to_owned).to_vec();
        let mut whole = Profile {
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            default_sample_type: 1,
            period_type: Some(ValueType { r#type: 1, unit: 2 }),
            period: 10,
            time_nanos: 1_700_000_000_000_000_000,
            duration_nanos: 1_000_000_000,
            comment: vec![4],
            mapping: vec![Mapping { id: 1, filename: 5, has_functions: true, ..Mapping::default() }],
            ..Profile::default()
        };
        for id in 1..=samples + 1 {
            let shared = id == samples + 1;
            let name = if shared { 6 } else { i64::try_from(string_table.len()).unwrap() };
            if !shared {
                string_table.push(format!("function number {id}"));
            }
            whole.function.push(Function { id, name, system_name: name, ..Function::default() });
            let line = vec![Line { function_id: id, ..Line::default() }];
            whole.location.push(Location { id, mapping_id: 1, address: id, line, ..Location::default() });
            if !shared {
                whole.sample.push(Sample {
                    location_id: vec![id, samples + 1],
                    value: vec![i64::try_from(id).unwrap()],
                    label: vec![Label { key: 3, num: 42, ..Label::default() }],
                });
            }
        }
        whole.string_table = string_table;
        whole
    }

    fn sum(profile: &Profile) -> i64 {
        profile.sample.iter().map(|sample| sample.value[0]).sum()
    }

    #[test]
    fn each_part_is_a_profile_of_its_own_within_the_limits_and_no_value_is_lost() {
        let whole = profile(1000);
        assert!(validate(&whole).is_ok());
        for (samples, bytes) in [(1000, usize::MAX), (300, usize::MAX), (1000, 10_000), (7, 1000)] {
            let split = split(&whole, samples, bytes);
            assert_eq!(split.dropped_samples, 0);
            assert_eq!(split.parts.iter().map(sum).sum::<i64>(), sum(&whole), "{samples} {bytes}");
            for part in &split.parts {
                validate(part).unwrap();
                assert!(part.sample.len() <= samples && part.encoded_len() <= bytes);
                assert_eq!(part.function.len(), part.sample.len() + 1);
                let main = part.function.iter().find(|function| function.id == 1001).unwrap();
                assert_eq!(part.string_table[usize::try_from(main.name).unwrap()], "main");
                assert_eq!(part.string_table[usize::try_from(part.comment[0]).unwrap()], "a comment");
            }
        }
        assert_eq!(split(&whole, 1000, usize::MAX).parts.len(), 1);
    }

    #[test]
    fn a_sample_that_is_too_long_alone_is_dropped_and_counted() {
        let mut whole = profile(3);
        let long = &mut whole.string_table[8];
        *long = "x".repeat(5000);
        let split = split(&whole, 10, 1000);
        assert_eq!((split.dropped_samples, split.parts.iter().map(sum).sum::<i64>()), (1, 1 + 3));
    }
}
