//! One profile -> several that are each no longer than a receiver takes, made one at a time as the
//! samples come. Each stands alone: it has the strings, functions and files of its own samples, and
//! no others.
//!
//! Samples keep those text labels that are asked for, since receivers make a series of each set of
//! them. Samples of one part that are then the same become one with the sum of their values.

use super::proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};
use prost::Message as _;
use prost::encoding::encoded_len_varint;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Tags of all fields of a profile are below 16: one byte.
const TAG_BYTES: usize = 1;

/// The size limits of a part.
#[derive(Clone, Copy, Debug)]
pub struct PartBounds {
    /// Most samples.
    pub samples: usize,
    /// Most bytes before compression.
    pub bytes: usize,
    /// The same of a part of one sample. A longer one is dropped.
    pub lone_bytes: usize,
}

/// The labels that samples keep.
#[derive(Clone, Copy)]
pub struct CarriedLabels<'a> {
    /// Their new names by the old ones. No two new names are the same.
    pub names: &'a BTreeMap<&'a str, String>,
    /// The part of a value that is kept.
    pub cut: fn(&str) -> &str,
}

/// Makes parts.
pub struct Splitter<'a> {
    whole: &'a Profile,
    locations: HashMap<u64, &'a Location>,
    functions: HashMap<u64, &'a Function>,
    mappings: HashMap<u64, &'a Mapping>,
    bounds: PartBounds,
    kept: CarriedLabels<'a>,
    part: ProfilePart<'a>,
    dropped_samples: u64,
}

impl<'a> Splitter<'a> {
    /// Of a profile whose own samples, if it has any, are ignored.
    #[must_use]
    pub fn new(whole: &'a Profile, bounds: PartBounds, kept: CarriedLabels<'a>) -> Self {
        Self {
            whole,
            locations: whole.location.iter().map(|location| (location.id, location)).collect(),
            functions: whole.function.iter().map(|function| (function.id, function)).collect(),
            mappings: whole.mapping.iter().map(|mapping| (mapping.id, mapping)).collect(),
            bounds,
            kept,
            part: ProfilePart::new(whole),
            dropped_samples: 0,
        }
    }

    /// Takes one more sample. Answers the part of those before it when it does not fit into that.
    pub fn add(&mut self, sample: &Sample) -> Option<Profile> {
        if self.fits(sample, false) {
            return None;
        }
        if self.part.samples.is_empty() {
            self.add_alone(sample);
            return None;
        }
        let full = std::mem::replace(&mut self.part, ProfilePart::new(self.whole));
        if !self.fits(sample, false) {
            self.add_alone(sample);
        }
        Some(full.finish())
    }

    /// The last part, and how many samples are in none because each alone is too long.
    #[must_use]
    pub fn finish(self) -> (Option<Profile>, u64) {
        let last = (!self.part.samples.is_empty()).then(|| self.part.finish());
        (last, self.dropped_samples)
    }

    fn add_alone(&mut self, sample: &Sample) {
        if !self.fits(sample, true) {
            self.dropped_samples += 1;
        }
    }

    /// Adds a sample to the part, unless that would be too long by it.
    fn fits(&mut self, sample: &Sample, alone: bool) -> bool {
        let most = if alone { self.bounds.lone_bytes } else { self.bounds.bytes };
        let mark = self.part.mark();
        let label = self.labels(sample);
        let key = (sample.location_id.clone(), label);
        if let Some(&same) = self.part.merged.get(&key) {
            return self.part.merge(same, &sample.value, most);
        }
        for &id in &sample.location_id {
            self.location(id);
        }
        let new = Sample {
            location_id: key.0.clone(),
            value: sample.value.clone(),
            label: key.1.clone(),
        };
        self.part.bytes += field(new.encoded_len());
        if self.part.bytes > most || self.part.samples.len() >= self.bounds.samples.max(1) {
            self.part.back_to(&mark);
            return false;
        }
        if let Entry::Vacant(place) = self.part.merged.entry(key) {
            place.insert(self.part.samples.len());
        }
        self.part.samples.push(new);
        true
    }

    fn labels(&mut self, sample: &Sample) -> Vec<Label> {
        let whole = self.whole;
        let mut labels = Vec::new();
        for label in sample.label.iter().filter(|label| label.str != 0) {
            let Some(name) = self.kept.names.get(text(whole, label.key)) else { continue };
            let key = self.part.string(name);
            let str = self.part.string((self.kept.cut)(text(whole, label.str)));
            labels.push(Label { key, str, ..Label::default() });
        }
        labels.sort_unstable_by_key(|label| label.key);
        labels
    }

    fn location(&mut self, id: u64) {
        if self.part.known_locations.contains(&id) {
            return;
        }
        let Some(&location) = self.locations.get(&id) else { return };
        for line in &location.line {
            self.function(line.function_id);
        }
        self.mapping(location.mapping_id);
        let line = location.line.iter().map(|line| Line { ..*line }).collect();
        let location = Location { line, ..*location };
        self.part.bytes += field(location.encoded_len());
        self.part.known_locations.insert(id);
        self.part.locations.push(location);
    }

    fn function(&mut self, id: u64) {
        if self.part.known_functions.contains(&id) {
            return;
        }
        let Some(&function) = self.functions.get(&id) else { return };
        let mut string = |index| self.part.string(text(self.whole, index));
        let function = Function {
            name: string(function.name),
            system_name: string(function.system_name),
            filename: string(function.filename),
            ..*function
        };
        self.part.bytes += field(function.encoded_len());
        self.part.known_functions.insert(id);
        self.part.functions.push(function);
    }

    fn mapping(&mut self, id: u64) {
        if self.part.known_mappings.contains(&id) {
            return;
        }
        let Some(&mapping) = self.mappings.get(&id) else { return };
        let mut string = |index| self.part.string(text(self.whole, index));
        let mapping = Mapping {
            filename: string(mapping.filename),
            build_id: string(mapping.build_id),
            ..*mapping
        };
        self.part.bytes += field(mapping.encoded_len());
        self.part.known_mappings.insert(id);
        self.part.mappings.push(mapping);
    }
}

/// Bytes of a field with a length in front.
fn field(len: usize) -> usize {
    TAG_BYTES + encoded_len_varint(u64::try_from(len).unwrap_or(u64::MAX)) + len
}

fn text(whole: &Profile, index: i64) -> &str {
    let text = usize::try_from(index).ok().and_then(|index| whole.string_table.get(index));
    text.map_or("", String::as_str)
}

/// A part while it is made.
struct ProfilePart<'a> {
    /// All but samples and tables.
    head: Profile,
    strings: Vec<&'a str>,
    known_strings: HashMap<&'a str, i64>,
    locations: Vec<Location>,
    known_locations: HashSet<u64>,
    functions: Vec<Function>,
    known_functions: HashSet<u64>,
    mappings: Vec<Mapping>,
    known_mappings: HashSet<u64>,
    samples: Vec<Sample>,
    /// Positions of samples by what tells them apart.
    merged: HashMap<(Vec<u64>, Vec<Label>), usize>,
    /// The length of the encoded message.
    bytes: usize,
}

/// The sizes of a part at one moment, to go back to.
struct PartMark {
    strings: usize,
    locations: usize,
    functions: usize,
    mappings: usize,
    bytes: usize,
}

impl<'a> ProfilePart<'a> {
    fn new(whole: &'a Profile) -> Self {
        let mut part = Self {
            head: Profile::default(),
            strings: Vec::new(),
            known_strings: HashMap::new(),
            locations: Vec::new(),
            known_locations: HashSet::new(),
            functions: Vec::new(),
            known_functions: HashSet::new(),
            mappings: Vec::new(),
            known_mappings: HashSet::new(),
            samples: Vec::new(),
            merged: HashMap::new(),
            bytes: 0,
        };
        part.string("");
        let mut string = |index| part.string(text(whole, index));
        let mut kind =
            |kind: ValueType| ValueType { r#type: string(kind.r#type), unit: string(kind.unit) };
        let sample_type = whole.sample_type.iter().copied().map(&mut kind).collect();
        let period_type = whole.period_type.map(&mut kind);
        part.head = Profile {
            sample_type,
            period_type,
            comment: whole.comment.iter().map(|&index| string(index)).collect(),
            drop_frames: string(whole.drop_frames),
            keep_frames: string(whole.keep_frames),
            default_sample_type: string(whole.default_sample_type),
            doc_url: string(whole.doc_url),
            time_nanos: whole.time_nanos,
            duration_nanos: whole.duration_nanos,
            period: whole.period,
            ..Profile::default()
        };
        part.bytes += part.head.encoded_len();
        part
    }

    fn string(&mut self, text: &'a str) -> i64 {
        if let Some(&known) = self.known_strings.get(text) {
            return known;
        }
        let new = i64::try_from(self.strings.len()).unwrap_or(i64::MAX);
        self.bytes += field(text.len());
        self.strings.push(text);
        self.known_strings.insert(text, new);
        new
    }

    /// Adds values to a sample, unless the part would be too long by it.
    fn merge(&mut self, same: usize, values: &[i64], most: usize) -> bool {
        let Some(sample) = self.samples.get_mut(same) else { return false };
        let (before, old) = (field(sample.encoded_len()), sample.value.clone());
        for (sum, value) in sample.value.iter_mut().zip(values) {
            *sum = sum.saturating_add(*value);
        }
        let bytes = self.bytes - before + field(sample.encoded_len());
        if bytes > most {
            sample.value = old;
            return false;
        }
        self.bytes = bytes;
        true
    }

    fn mark(&self) -> PartMark {
        PartMark {
            strings: self.strings.len(),
            locations: self.locations.len(),
            functions: self.functions.len(),
            mappings: self.mappings.len(),
            bytes: self.bytes,
        }
    }

    fn back_to(&mut self, mark: &PartMark) {
        for text in self.strings.drain(mark.strings..) {
            self.known_strings.remove(text);
        }
        for location in self.locations.drain(mark.locations..) {
            self.known_locations.remove(&location.id);
        }
        for function in self.functions.drain(mark.functions..) {
            self.known_functions.remove(&function.id);
        }
        for mapping in self.mappings.drain(mark.mappings..) {
            self.known_mappings.remove(&mapping.id);
        }
        self.bytes = mark.bytes;
    }

    fn finish(self) -> Profile {
        Profile {
            sample: self.samples,
            mapping: self.mappings,
            location: self.locations,
            function: self.functions,
            string_table: self.strings.into_iter().map(str::to_owned).collect(),
            ..self.head
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{
        Function, Label, Line, Location, Mapping, Profile, Sample, ValueType,
    };
    use super::super::validate;
    use super::{CarriedLabels, PartBounds, Splitter};
    use prost::Message as _;
    use std::collections::BTreeMap;

    /// All parts, and how many samples are in none.
    struct Split {
        parts: Vec<Profile>,
        dropped_samples: u64,
    }

    fn split_keeping(whole: &Profile, bounds: PartBounds, kept: CarriedLabels<'_>) -> Split {
        let mut splitter = Splitter::new(whole, bounds, kept);
        let mut parts: Vec<Profile> =
            whole.sample.iter().filter_map(|sample| splitter.add(sample)).collect();
        let (last, dropped_samples) = splitter.finish();
        parts.extend(last);
        Split { parts, dropped_samples }
    }

    fn split(whole: &Profile, samples: usize, bytes: usize) -> Split {
        let names = BTreeMap::new();
        let bounds = PartBounds { samples, bytes, lone_bytes: bytes };
        split_keeping(whole, bounds, CarriedLabels { names: &names, cut: |text| text })
    }

    /// So many samples, each with a location, a function and a name of its own below one that all
    /// share.
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
            mapping: vec![Mapping {
                id: 1,
                filename: 5,
                has_functions: true,
                ..Mapping::default()
            }],
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
            whole.location.push(Location {
                id,
                mapping_id: 1,
                address: id,
                line,
                ..Location::default()
            });
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
                assert_eq!(
                    part.string_table[usize::try_from(part.comment[0]).unwrap()],
                    "a comment"
                );
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

    #[test]
    fn a_sample_that_is_long_has_a_part_of_its_own_where_it_may_be_sent_alone() {
        let mut whole = profile(5);
        whole.string_table[9] = "x".repeat(5000);
        let names = BTreeMap::new();
        let bounds = PartBounds { samples: 10, bytes: 1000, lone_bytes: 6000 };
        let split =
            split_keeping(&whole, bounds, CarriedLabels { names: &names, cut: |text| text });
        let samples: Vec<usize> = split.parts.iter().map(|part| part.sample.len()).collect();
        assert_eq!((samples, split.dropped_samples), (vec![2, 1, 2], 0));
        assert_eq!(split.parts.iter().map(sum).sum::<i64>(), sum(&whole));
    }

    /// Location, nanoseconds and labels of a sample.
    type Labelled<'a> = (u64, i64, &'a [(&'a str, &'a str)]);

    /// One with these samples, each of which has a number of its own, too.
    fn labelled(samples: &[Labelled<'_>]) -> Profile {
        let mut string_table: Vec<String> =
            ["", "cpu", "nanoseconds", "pid"].map(str::to_owned).to_vec();
        let mut place = |text: &str| {
            let found = string_table.iter().position(|known| known == text);
            i64::try_from(found.unwrap_or_else(|| {
                string_table.push(text.to_owned());
                string_table.len() - 1
            }))
            .unwrap()
        };
        let mut whole = Profile {
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            period_type: Some(ValueType { r#type: 1, unit: 2 }),
            default_sample_type: 1,
            comment: vec![2],
            ..Profile::default()
        };
        for (number, (location, value, labels)) in (1..).zip(samples) {
            let texts = labels.iter().map(|(name, value)| Label {
                key: place(name),
                str: place(value),
                ..Label::default()
            });
            let mut label: Vec<Label> = texts.collect();
            label.push(Label { key: 3, num: number, ..Label::default() });
            whole.sample.push(Sample { location_id: vec![*location], value: vec![*value], label });
        }
        whole.location =
            (1..=3).map(|id| Location { id, address: id, ..Location::default() }).collect();
        whole.string_table = string_table;
        whole
    }

    /// Locations, values and labels of its samples, in order.
    fn facts(profile: &Profile) -> Vec<(u64, i64, String)> {
        let text = |place: i64| profile.string_table[usize::try_from(place).unwrap()].as_str();
        let of = |sample: &Sample| {
            let labels =
                sample.label.iter().map(|label| format!("{}={}", text(label.key), text(label.str)));
            (sample.location_id[0], sample.value[0], labels.collect::<Vec<_>>().join(" "))
        };
        profile.sample.iter().map(of).collect()
    }

    #[test]
    fn what_differs_in_nothing_that_is_kept_is_one_sample_with_the_sum() {
        let whole = labelled(&[
            (1, 1, &[("thread_name", "a"), ("k8s.pod.name", "web"), ("x", "longest")]),
            (2, 2, &[("thread_name", "a")]),
            (1, 4, &[("x", "longer"), ("k8s.pod.name", "web"), ("thread_name", "b")]),
            (2, 8, &[("thread_name", "b"), ("k8s.pod.name", "web")]),
            (2, 16, &[]),
            (1, 32, &[("k8s.pod.name", "api"), ("x", "lone")]),
        ]);
        validate(&whole).unwrap();
        let kept =
            BTreeMap::from([("k8s.pod.name", "k8s_pod_name".to_owned()), ("x", "x".to_owned())]);
        let bounds = PartBounds { samples: 100, bytes: 1 << 20, lone_bytes: 1 << 20 };
        let narrow = |kept: &BTreeMap<&str, String>| {
            let kept = CarriedLabels { names: kept, cut: |text| &text[..text.len().min(4)] };
            let mut parts = split_keeping(&whole, bounds, kept).parts;
            assert_eq!(parts.len(), 1);
            parts.remove(0)
        };
        let narrowed = narrow(&kept);
        validate(&narrowed).unwrap();
        let pod = |text: &str| text.replace("pod", "k8s_pod_name");
        let expected = [
            (1, 1 + 4, pod("pod=web x=long")),
            (2, 2 + 16, String::new()),
            (2, 8, pod("pod=web")),
            (1, 32, pod("pod=api x=lone")),
        ];
        assert_eq!(facts(&narrowed), expected);
        let nothing = narrow(&BTreeMap::new());
        assert_eq!(
            facts(&nothing),
            [(1, 1 + 4 + 32, String::new()), (2, 2 + 8 + 16, String::new())]
        );
        assert_eq!(nothing.comment.len(), whole.comment.len());
    }
}
