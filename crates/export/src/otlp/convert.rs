//! A finished profile -> requests of OpenTelemetry's profiles signal, made one at a time as its
//! samples come. Pure: no network, no clock.
//!
//! - one `Profile` per sample type, the default one first, because a viewer shows the first; a
//!   sample without a value of a type is not in it;
//! - the first entry of every table is the zero value; no entry is twice in its table, and none is
//!   there that nothing refers to;
//! - a request is never longer than it may be: samples that do not fit start another one, with
//!   tables of its own. One that does not fit into a request alone is dropped and counted.

use super::proto::{
    AnyValue, ArrayValue, ExportProfilesServiceRequest, Function, InstrumentationScope, KeyValue,
    KeyValueAndUnit, Line, Link, Location, Mapping, Profile, ProfilesDictionary, Resource,
    ResourceProfiles, Sample, ScopeProfiles, Stack, ValueType, any_value::Value,
};
use crate::FinishedProfile;
use crate::parts::PartBuilder;
use perfusion_pprof::split::PartBounds;
use perfusion_pprof::{KERNEL_MAPPING, proto as pprof};
use prost::Message as _;
use prost::encoding::encoded_len_varint;
use std::collections::HashMap;
use std::hash::Hash;
use std::time::SystemTime;

/// Labels of samples that OpenTelemetry calls otherwise. Those with a dot have its name already
/// (`k8s.pod.name`, `service.version`); any other gets our prefix.
const ATTRIBUTES: [(&str, &str); 5] = [
    ("pid", "process.pid"),
    ("thread_id", "thread.id"),
    ("thread_name", "thread.name"),
    ("process", "process.executable.name"),
    ("container_id", "container.id"),
];
const PREFIX: &str = "perfusion.";
/// Tags of all fields used here are below 16: one byte.
const TAG_BYTES: usize = 1;
/// More than a `Profile` without samples, its resource apart: four indices, two times, an id.
const PROFILE_BYTES: usize = 128;

/// Makes requests of a profile's samples, one at a time.
pub struct Converter<'a> {
    source: PprofTables<'a>,
    head: RequestHead,
    bounds: PartBounds,
    /// Makes an id that no other profile has.
    fresh_id: fn() -> [u8; 16],
    request: RequestBuilder,
    dropped_samples: u64,
}

impl<'a> Converter<'a> {
    /// Of a window whose profile has these tables. Samples of `tables` are ignored.
    #[must_use]
    pub fn new(
        finished: &FinishedProfile,
        tables: &'a pprof::Profile,
        bounds: PartBounds,
        fresh_id: fn() -> [u8; 16],
    ) -> Self {
        let source = PprofTables::new(tables);
        let head = RequestHead::new(finished, &source);
        let request = RequestBuilder::new(&source, &head);
        Self { source, head, bounds, fresh_id, request, dropped_samples: 0 }
    }

    /// Adds a sample to the request, unless that would be too long by it.
    fn fits(&mut self, sample: &pprof::Sample, most_bytes: usize) -> bool {
        let before = self.request.mark();
        self.request.add(&self.source, sample);
        let fits = self.request.bytes <= most_bytes
            && self.request.samples() <= self.bounds.samples.max(self.source.order.len());
        if !fits {
            self.request.back_to(&before);
        }
        fits
    }

    fn add_alone(&mut self, sample: &pprof::Sample) {
        if !self.fits(sample, self.bounds.lone_bytes) {
            self.dropped_samples += 1;
        }
    }

    fn next_request(&mut self) -> ExportProfilesServiceRequest {
        let next = RequestBuilder::new(&self.source, &self.head);
        let request = std::mem::replace(&mut self.request, next);
        request.finish(&self.source, &self.head, self.fresh_id)
    }
}

impl PartBuilder for Converter<'_> {
    type Part = ExportProfilesServiceRequest;

    fn add(&mut self, sample: &pprof::Sample) -> Option<Self::Part> {
        if self.fits(sample, self.bounds.bytes) {
            return None;
        }
        let full = (self.request.samples() > 0).then(|| self.next_request());
        if full.is_none() || !self.fits(sample, self.bounds.bytes) {
            self.add_alone(sample);
        }
        full
    }

    fn finish(mut self) -> (Option<Self::Part>, u64) {
        let last = (self.request.samples() > 0).then(|| self.next_request());
        (last, self.dropped_samples)
    }
}

/// The pprof, with its entries by id.
struct PprofTables<'a> {
    profile: &'a pprof::Profile,
    locations: HashMap<u64, &'a pprof::Location>,
    functions: HashMap<u64, &'a pprof::Function>,
    mappings: HashMap<u64, &'a pprof::Mapping>,
    /// Positions of the sample types, the default one first.
    order: Vec<usize>,
}

impl<'a> PprofTables<'a> {
    fn new(profile: &'a pprof::Profile) -> Self {
        let mut order: Vec<usize> = (0..profile.sample_type.len()).collect();
        let default =
            profile.sample_type.iter().position(|kind| kind.r#type == profile.default_sample_type);
        if let Some(default) = default {
            order.remove(default);
            order.insert(0, default);
        }
        Self {
            profile,
            locations: profile.location.iter().map(|location| (location.id, location)).collect(),
            functions: profile.function.iter().map(|function| (function.id, function)).collect(),
            mappings: profile.mapping.iter().map(|mapping| (mapping.id, mapping)).collect(),
            order,
        }
    }

    fn text(&self, index: i64) -> &'a str {
        let text =
            usize::try_from(index).ok().and_then(|index| self.profile.string_table.get(index));
        text.map_or("", String::as_str)
    }
}

/// What all requests of a profile begin with.
struct RequestHead {
    resource: Resource,
    scope: InstrumentationScope,
    time_unix_nano: u64,
    duration_nano: u64,
    comments: Vec<String>,
    bytes: usize,
}

impl RequestHead {
    fn new(finished: &FinishedProfile, source: &PprofTables<'_>) -> Self {
        let text = |key: &str, value: &str| KeyValue {
            key: key.to_owned(),
            value: any(Datum::Text(value.to_owned())),
            key_strindex: 0,
        };
        let mut attributes = vec![text("service.name", &finished.service)];
        attributes.extend(finished.labels.iter().map(|(key, value)| text(key, value)));
        let resource = Resource { attributes, ..Resource::default() };
        let scope = InstrumentationScope {
            name: env!("CARGO_PKG_NAME").to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        // Names of the types come last, when it is known which have samples.
        let types = source.profile.sample_type.iter().chain(&source.profile.period_type);
        let names = types.map(|kind| {
            field(source.text(kind.r#type).len()) + field(source.text(kind.unit).len())
        });
        let profiles = PROFILE_BYTES * source.order.len().max(1);
        let bytes = profiles
            + names.sum::<usize>()
            + field(resource.encoded_len())
            + field(scope.encoded_len());
        let since_epoch = finished.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            resource,
            scope,
            time_unix_nano: u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX),
            duration_nano: u64::try_from(finished.duration.as_nanos()).unwrap_or(u64::MAX),
            comments: source
                .profile
                .comment
                .iter()
                .map(|&index| source.text(index).to_owned())
                .collect(),
            bytes,
        }
    }
}

/// Bytes of a field with a length in front.
fn field(len: usize) -> usize {
    TAG_BYTES + encoded_len_varint(u64::try_from(len).unwrap_or(u64::MAX)) + len
}

/// An attribute's value that can be compared.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Datum {
    Text(String),
    Number(i64),
    Texts(Vec<String>),
}

#[expect(clippy::unnecessary_wraps, reason = "every user of it is an optional field")]
fn any(datum: Datum) -> Option<AnyValue> {
    let value = match datum {
        Datum::Text(text) => Value::StringValue(text),
        Datum::Number(number) => Value::IntValue(number),
        Datum::Texts(texts) => {
            let values =
                texts.into_iter().map(|text| AnyValue { value: Some(Value::StringValue(text)) });
            Value::ArrayValue(ArrayValue { values: values.collect() })
        }
    };
    Some(AnyValue { value: Some(value) })
}

/// Where something stands in its table.
struct Indices<K>(HashMap<K, i32>);

impl<K: Eq + Hash> Indices<K> {
    /// Index of `key`; `make` puts a new one at the end of its table, whose length it is told.
    fn of(&mut self, key: K, len: usize) -> (i32, bool) {
        let next = i32::try_from(len).unwrap_or(i32::MAX);
        let index = *self.0.entry(key).or_insert(next);
        (index, index == next)
    }

    /// Forgets what stands at `len` and behind.
    fn truncate(&mut self, len: usize) {
        self.0.retain(|_, index| usize::try_from(*index).is_ok_and(|index| index < len));
    }
}

impl<K> Default for Indices<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

/// One request while it is made.
struct RequestBuilder {
    tables: ProfilesDictionary,
    strings: Indices<String>,
    functions: Indices<u64>,
    mappings: Indices<u64>,
    locations: Indices<u64>,
    stacks: Indices<Vec<i32>>,
    attributes: Indices<(i32, Datum, i32)>,
    links: Indices<Link>,
    /// Samples by type, in the order of the source's types.
    profiles: Vec<Vec<Sample>>,
    /// Comments, as an attribute of every profile.
    about: Option<i32>,
    /// No less than the request's length.
    bytes: usize,
}

/// How far a request had come.
struct BuilderMark {
    strings: usize,
    functions: usize,
    mappings: usize,
    locations: usize,
    stacks: usize,
    attributes: usize,
    links: usize,
    profiles: Vec<usize>,
    bytes: usize,
}

impl RequestBuilder {
    fn new(source: &PprofTables<'_>, head: &RequestHead) -> Self {
        let tables = super::proto::empty_dictionary();
        // Lengths of all levels of messages around the samples, once more than they can be.
        let bytes = head.bytes + tables.encoded_len() + 64;
        let mut request = Self {
            tables,
            strings: Indices::default(),
            functions: Indices::default(),
            mappings: Indices::default(),
            locations: Indices::default(),
            stacks: Indices::default(),
            attributes: Indices::default(),
            links: Indices::default(),
            profiles: vec![Vec::new(); source.order.len()],
            about: None,
            bytes,
        };
        request.strings.0.insert(String::new(), 0);
        if !head.comments.is_empty() {
            let datum = Datum::Texts(head.comments.clone());
            request.about = Some(request.attribute("pprof.profile.comment", datum, ""));
        }
        request
    }

    fn samples(&self) -> usize {
        self.profiles.iter().map(Vec::len).sum()
    }

    fn mark(&self) -> BuilderMark {
        BuilderMark {
            strings: self.tables.string_table.len(),
            functions: self.tables.function_table.len(),
            mappings: self.tables.mapping_table.len(),
            locations: self.tables.location_table.len(),
            stacks: self.tables.stack_table.len(),
            attributes: self.tables.attribute_table.len(),
            links: self.tables.link_table.len(),
            profiles: self.profiles.iter().map(Vec::len).collect(),
            bytes: self.bytes,
        }
    }

    fn back_to(&mut self, mark: &BuilderMark) {
        let tables = &mut self.tables;
        tables.string_table.truncate(mark.strings);
        self.strings.truncate(mark.strings);
        tables.function_table.truncate(mark.functions);
        self.functions.truncate(mark.functions);
        tables.mapping_table.truncate(mark.mappings);
        self.mappings.truncate(mark.mappings);
        tables.location_table.truncate(mark.locations);
        self.locations.truncate(mark.locations);
        tables.stack_table.truncate(mark.stacks);
        self.stacks.truncate(mark.stacks);
        tables.attribute_table.truncate(mark.attributes);
        self.attributes.truncate(mark.attributes);
        tables.link_table.truncate(mark.links);
        self.links.truncate(mark.links);
        for (samples, &len) in self.profiles.iter_mut().zip(&mark.profiles) {
            samples.truncate(len);
        }
        self.bytes = mark.bytes;
    }

    /// Adds one sample of the pprof to the profile of each type it has a value of.
    fn add(&mut self, source: &PprofTables<'_>, sample: &pprof::Sample) {
        let stack = sample.location_id.iter().map(|&id| self.location(source, id)).collect();
        let stack_index = self.stack(stack);
        let (mut trace_id, mut span_id) = (Vec::new(), Vec::new());
        let mut attribute_indices = Vec::with_capacity(sample.label.len());
        for label in &sample.label {
            let (name, text) = (source.text(label.key), source.text(label.str));
            match name {
                "trace_id" => trace_id = unhex(text),
                "span_id" => span_id = unhex(text),
                _ => {
                    let datum = if label.str == 0 {
                        Datum::Number(label.num)
                    } else {
                        Datum::Text(text.to_owned())
                    };
                    let known = ATTRIBUTES.iter().find(|(ours, _)| *ours == name);
                    let key = match known {
                        Some((_, theirs)) => (*theirs).to_owned(),
                        None if name.contains('.') => name.to_owned(),
                        None => format!("{PREFIX}{name}"),
                    };
                    attribute_indices.push(self.attribute(
                        &key,
                        datum,
                        source.text(label.num_unit),
                    ));
                }
            }
        }
        let link_index = if trace_id.len() == 16 && span_id.len() == 8 {
            self.link(Link { trace_id, span_id })
        } else {
            0
        };
        let template = Sample { stack_index, attribute_indices, link_index, ..Sample::default() };
        for (at, &position) in source.order.iter().enumerate() {
            let value = sample.value.get(position).copied().unwrap_or_default();
            if let Some(samples) = self.profiles.get_mut(at).filter(|_| value != 0) {
                let sample = Sample { values: vec![value], ..template.clone() };
                self.bytes += field(sample.encoded_len());
                samples.push(sample);
            }
        }
    }

    fn value_type(&mut self, source: &PprofTables<'_>, kind: pprof::ValueType) -> ValueType {
        ValueType {
            type_strindex: self.string(source.text(kind.r#type)),
            unit_strindex: self.string(source.text(kind.unit)),
        }
    }

    fn string(&mut self, text: &str) -> i32 {
        if let Some(&index) = self.strings.0.get(text) {
            return index;
        }
        let (index, _) = self.strings.of(text.to_owned(), self.tables.string_table.len());
        self.bytes += field(text.len());
        self.tables.string_table.push(text.to_owned());
        index
    }

    fn attribute(&mut self, key: &str, datum: Datum, unit: &str) -> i32 {
        let (key_strindex, unit_strindex) = (self.string(key), self.string(unit));
        let table = &mut self.tables.attribute_table;
        let (index, new) =
            self.attributes.of((key_strindex, datum.clone(), unit_strindex), table.len());
        if new {
            let attribute = KeyValueAndUnit { key_strindex, value: any(datum), unit_strindex };
            self.bytes += field(attribute.encoded_len());
            table.push(attribute);
        }
        index
    }

    fn link(&mut self, link: Link) -> i32 {
        let table = &mut self.tables.link_table;
        let (index, new) = self.links.of(link.clone(), table.len());
        if new {
            self.bytes += field(link.encoded_len());
            table.push(link);
        }
        index
    }

    fn stack(&mut self, location_indices: Vec<i32>) -> i32 {
        if location_indices.is_empty() {
            return 0;
        }
        let table = &mut self.tables.stack_table;
        let (index, new) = self.stacks.of(location_indices.clone(), table.len());
        if new {
            let stack = Stack { location_indices };
            self.bytes += field(stack.encoded_len());
            table.push(stack);
        }
        index
    }

    fn location(&mut self, source: &PprofTables<'_>, id: u64) -> i32 {
        if let Some(&index) = self.locations.0.get(&id) {
            return index;
        }
        let Some(&location) = source.locations.get(&id) else { return 0 };
        let lines = location.line.iter().map(|line| Line {
            function_index: self.function(source, line.function_id),
            line: line.line,
            column: line.column,
        });
        let lines = lines.collect();
        let mapping_index = self.mapping(source, location.mapping_id);
        let kind = source
            .mappings
            .get(&location.mapping_id)
            .map(|mapping| frame_type(source.text(mapping.filename)));
        let attribute_indices = kind
            .map(|kind| self.attribute("profile.frame.type", Datum::Text(kind.to_owned()), ""))
            .into_iter()
            .collect();
        let table = &mut self.tables.location_table;
        let (index, _) = self.locations.of(id, table.len());
        let location =
            Location { mapping_index, address: location.address, lines, attribute_indices };
        self.bytes += field(location.encoded_len());
        table.push(location);
        index
    }

    fn function(&mut self, source: &PprofTables<'_>, id: u64) -> i32 {
        if let Some(&index) = self.functions.0.get(&id) {
            return index;
        }
        let Some(&function) = source.functions.get(&id) else { return 0 };
        let function = Function {
            name_strindex: self.string(source.text(function.name)),
            system_name_strindex: self.string(source.text(function.system_name)),
            filename_strindex: self.string(source.text(function.filename)),
            start_line: function.start_line,
        };
        let table = &mut self.tables.function_table;
        let (index, _) = self.functions.of(id, table.len());
        self.bytes += field(function.encoded_len());
        table.push(function);
        index
    }

    fn mapping(&mut self, source: &PprofTables<'_>, id: u64) -> i32 {
        if let Some(&index) = self.mappings.0.get(&id) {
            return index;
        }
        let Some(&mapping) = source.mappings.get(&id) else { return 0 };
        let build_id = source.text(mapping.build_id);
        let attribute_indices = if build_id.is_empty() {
            Vec::new()
        } else {
            vec![self.attribute(
                "process.executable.build_id.gnu",
                Datum::Text(build_id.to_owned()),
                "",
            )]
        };
        let mapping = Mapping {
            memory_start: mapping.memory_start,
            memory_limit: mapping.memory_limit,
            file_offset: mapping.file_offset,
            filename_strindex: self.string(source.text(mapping.filename)),
            attribute_indices,
        };
        let table = &mut self.tables.mapping_table;
        let (index, _) = self.mappings.of(id, table.len());
        self.bytes += field(mapping.encoded_len());
        table.push(mapping);
        index
    }

    fn finish(
        mut self,
        source: &PprofTables<'_>,
        head: &RequestHead,
        fresh_id: fn() -> [u8; 16],
    ) -> ExportProfilesServiceRequest {
        let mut profiles = Vec::new();
        for (samples, &position) in
            std::mem::take(&mut self.profiles).into_iter().zip(&source.order)
        {
            let Some(&kind) =
                source.profile.sample_type.get(position).filter(|_| !samples.is_empty())
            else {
                continue;
            };
            // Sampled by time was this type only.
            let period = source.profile.period_type.filter(|period| period.r#type == kind.r#type);
            profiles.push(Profile {
                sample_type: Some(self.value_type(source, kind)),
                samples,
                time_unix_nano: head.time_unix_nano,
                duration_nano: head.duration_nano,
                period_type: period.map(|period| self.value_type(source, period)),
                period: period.map_or(0, |_| source.profile.period),
                profile_id: fresh_id().to_vec(),
                attribute_indices: self.about.into_iter().collect(),
                ..Profile::default()
            });
        }
        let scope_profiles = vec![ScopeProfiles {
            scope: Some(head.scope.clone()),
            profiles,
            schema_url: String::new(),
        }];
        let resource = Some(head.resource.clone());
        ExportProfilesServiceRequest {
            resource_profiles: vec![ResourceProfiles {
                resource,
                scope_profiles,
                schema_url: String::new(),
            }],
            dictionary: Some(self.tables),
        }
    }
}

/// OpenTelemetry's word for code of a mapping. Files have paths, modules of managed code have
/// names.
fn frame_type(mapping: &str) -> &'static str {
    match mapping {
        KERNEL_MAPPING => "kernel",
        _ if mapping.starts_with('/') || mapping == "[vdso]" || mapping == "[unknown image]" => {
            "native"
        }
        _ => "dotnet",
    }
}

/// Bytes of an id in hexadecimal; none when it is not one.
fn unhex(text: &str) -> Vec<u8> {
    let digits: Option<Vec<u32>> = text.chars().map(|letter| letter.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0).unwrap_or_default();
    let byte = |pair: &[u32]| pair.iter().fold(0, |byte, digit| byte * 16 + digit);
    digits.chunks(2).filter_map(|pair| u8::try_from(byte(pair)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::halve::halve;
    use super::*;
    use proptest::prelude::{Strategy, prop, prop_assert, prop_assert_eq, proptest};
    use std::collections::{BTreeMap, HashSet};
    use std::time::Duration;

    /// A pprof of three sample types with one sample of each (stack, label, values).
    fn finished(samples: &[(Vec<u8>, u8, [i64; 3])]) -> FinishedProfile {
        let mut strings: Vec<String> = [
            "",
            "cpu",
            "nanoseconds",
            "count",
            "samples",
            "alloc_space",
            "bytes",
            "pid",
            "wait_reason",
            "futex",
            "a comment",
            "abcd",
            "[kernel.kallsyms]",
            "/lib/libc.so.6",
            "App",
        ]
        .map(str::to_owned)
        .to_vec();
        let pod = i64::try_from(strings.len()).unwrap();
        strings.push("k8s.pod.name".to_owned());
        let (mut function, mut location) = (Vec::new(), Vec::new());
        for id in 1..=256_i64 {
            strings.push(format!("function {id}"));
            let name = i64::try_from(strings.len()).unwrap() - 1;
            let id = u64::try_from(id).unwrap();
            function.push(pprof::Function { id, name, ..Default::default() });
            let line = vec![pprof::Line { function_id: id, ..Default::default() }];
            location.push(pprof::Location {
                id,
                mapping_id: id % 4,
                address: id * 16,
                line,
                ..Default::default()
            });
        }
        let mapping = [(1, 12), (2, 13), (3, 14)];
        let profile = pprof::Profile {
            sample_type: [(4, 3), (1, 2), (5, 6)]
                .map(|(r#type, unit)| pprof::ValueType { r#type, unit })
                .to_vec(),
            default_sample_type: 1,
            period_type: Some(pprof::ValueType { r#type: 1, unit: 2 }),
            period: 10_101_010,
            sample: samples
                .iter()
                .map(|(stack, label, values)| pprof::Sample {
                    location_id: stack.iter().map(|&id| u64::from(id) + 1).collect(),
                    value: values.to_vec(),
                    label: vec![
                        pprof::Label { key: 7, num: i64::from(*label), ..Default::default() },
                        pprof::Label { key: 8, str: 9, ..Default::default() },
                        pprof::Label { key: pod, str: 9, ..Default::default() },
                    ],
                })
                .collect(),
            mapping: mapping
                .map(|(id, filename)| pprof::Mapping {
                    id,
                    filename,
                    build_id: if id == 2 { 11 } else { 0 },
                    ..Default::default()
                })
                .to_vec(),
            location,
            function,
            string_table: strings,
            comment: vec![10],
            ..Default::default()
        };
        FinishedProfile {
            service: "shop".into(),
            labels: BTreeMap::from([("host.name".to_owned(), "node-1".to_owned())]),
            start: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            duration: Duration::from_secs(60),
            profile: profile.into(),
        }
    }

    #[derive(Debug)]
    struct Converted {
        requests: Vec<ExportProfilesServiceRequest>,
        dropped_samples: u64,
    }

    fn convert_within(finished: &FinishedProfile, bounds: PartBounds) -> Converted {
        let whole = perfusion_pprof::unpack(finished.profile.bytes()).unwrap();
        let mut converter = Converter::new(finished, &whole, bounds, || [7; 16]);
        let mut requests: Vec<ExportProfilesServiceRequest> =
            whole.sample.iter().filter_map(|sample| converter.add(sample)).collect();
        let (last, dropped_samples) = converter.finish();
        requests.extend(last);
        Converted { requests, dropped_samples }
    }

    fn convert(finished: &FinishedProfile, most_bytes: usize) -> Converted {
        convert_within(
            finished,
            PartBounds { samples: usize::MAX, bytes: most_bytes, lone_bytes: most_bytes },
        )
    }

    /// Sum of each sample type over all requests.
    fn totals(converted: &Converted) -> BTreeMap<String, i64> {
        let mut totals = BTreeMap::new();
        for request in &converted.requests {
            let strings = &request.dictionary.as_ref().unwrap().string_table;
            for profile in &request.resource_profiles[0].scope_profiles[0].profiles {
                let kind = profile.sample_type.unwrap().type_strindex;
                let sum: i64 = profile.samples.iter().flat_map(|sample| &sample.values).sum();
                *totals.entry(strings[usize::try_from(kind).unwrap()].clone()).or_default() += sum;
            }
        }
        totals
    }

    /// The rules of the message's documentation.
    fn check(request: &ExportProfilesServiceRequest) {
        let tables = request.dictionary.as_ref().unwrap();
        let index = |index: i32| usize::try_from(index).unwrap();
        assert_eq!(tables.string_table[0], "");
        assert_eq!(tables.mapping_table[0], Mapping::default());
        assert_eq!(tables.location_table[0], Location::default());
        assert_eq!(tables.function_table[0], Function::default());
        assert_eq!(tables.link_table[0], Link::default());
        assert_eq!(tables.attribute_table[0], KeyValueAndUnit::default());
        assert_eq!(tables.stack_table[0], Stack::default());
        let mut strings = HashSet::from([0]);
        let mut attributes = HashSet::from([0]);
        let (mut stacks, mut locations) = (HashSet::from([0]), HashSet::from([0]));
        let (mut functions, mut mappings) = (HashSet::from([0]), HashSet::from([0]));
        for profile in &request.resource_profiles[0].scope_profiles[0].profiles {
            assert!(!profile.samples.is_empty() && profile.profile_id.len() == 16);
            for kind in profile.sample_type.iter().chain(&profile.period_type) {
                strings.extend([index(kind.type_strindex), index(kind.unit_strindex)]);
            }
            attributes.extend(profile.attribute_indices.iter().map(|&at| index(at)));
            for sample in &profile.samples {
                assert!(sample.values.len() == 1 && sample.timestamps_unix_nano.is_empty());
                attributes.extend(sample.attribute_indices.iter().map(|&at| index(at)));
                stacks.insert(index(sample.stack_index));
            }
        }
        for &stack in &stacks {
            locations
                .extend(tables.stack_table[stack].location_indices.iter().map(|&at| index(at)));
        }
        for &location in &locations {
            let location = &tables.location_table[location];
            mappings.insert(index(location.mapping_index));
            functions.extend(location.lines.iter().map(|line| index(line.function_index)));
            attributes.extend(location.attribute_indices.iter().map(|&at| index(at)));
        }
        for &mapping in &mappings {
            strings.insert(index(tables.mapping_table[mapping].filename_strindex));
            attributes.extend(
                tables.mapping_table[mapping].attribute_indices.iter().map(|&at| index(at)),
            );
        }
        for &function in &functions {
            strings.insert(index(tables.function_table[function].name_strindex));
        }
        for &attribute in &attributes {
            let attribute = &tables.attribute_table[attribute];
            strings.extend([index(attribute.key_strindex), index(attribute.unit_strindex)]);
        }
        // Each reference leads somewhere, and everything is referred to.
        let all = |found: &HashSet<usize>, len: usize| assert_eq!(found.len(), len, "{found:?}");
        all(&stacks, tables.stack_table.len());
        all(&locations, tables.location_table.len());
        all(&functions, tables.function_table.len());
        all(&mappings, tables.mapping_table.len());
        all(&attributes, tables.attribute_table.len());
        all(&strings, tables.string_table.len());
        let once: HashSet<&String> = tables.string_table.iter().collect();
        assert_eq!(once.len(), tables.string_table.len());
    }

    #[test]
    fn a_profile_becomes_one_of_each_type_with_the_default_first() {
        let finished =
            finished(&[(vec![0, 1, 2], 7, [1, 10, 0]), (vec![0, 1, 2], 8, [2, 20, 300])]);
        let converted = convert(&finished, 1 << 20);
        let [request] = converted.requests.as_slice() else { panic!("{converted:?}") };
        check(request);
        let tables = request.dictionary.as_ref().unwrap();
        let profiles = &request.resource_profiles[0].scope_profiles[0].profiles;
        let name = |at: i32| tables.string_table[usize::try_from(at).unwrap()].as_str();
        let types: Vec<&str> = profiles
            .iter()
            .map(|profile| name(profile.sample_type.unwrap().type_strindex))
            .collect();
        assert_eq!(types, ["cpu", "samples", "alloc_space"]);
        assert_eq!((profiles[0].period, profiles[1].period), (10_101_010, 0));
        assert_eq!(profiles[0].duration_nano, 60_000_000_000);
        // One stack, two samples of it; the third type has one.
        assert_eq!(
            (tables.stack_table.len(), profiles[0].samples.len(), profiles[2].samples.len()),
            (2, 2, 1)
        );
        let attribute = |at: usize| name(tables.attribute_table[at].key_strindex);
        let mut keys: Vec<&str> = (0..tables.attribute_table.len()).map(attribute).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "",
                "k8s.pod.name",
                "perfusion.wait_reason",
                "pprof.profile.comment",
                "process.executable.build_id.gnu",
                "process.pid",
                "process.pid",
                "profile.frame.type",
                "profile.frame.type",
                "profile.frame.type"
            ]
        );
        let resource = request.resource_profiles[0].resource.as_ref().unwrap();
        assert_eq!(
            resource.attributes.iter().map(|a| a.key.as_str()).collect::<Vec<_>>(),
            ["service.name", "host.name"]
        );
    }

    #[test]
    fn a_sample_that_fits_nowhere_is_dropped_and_told() {
        let finished = finished(&[((0..=255).collect(), 0, [1, 1, 1]), (vec![1], 0, [1, 1, 1])]);
        let converted = convert(&finished, 2000);
        assert_eq!((converted.dropped_samples, converted.requests.len()), (1, 1));
        assert_eq!(totals(&converted)["cpu"], 1);
        check(&converted.requests[0]);
    }

    #[test]
    fn a_sample_that_is_long_has_a_request_of_its_own_where_it_may_be_sent_alone() {
        let finished = finished(&[
            (vec![1], 0, [1; 3]),
            ((0..=255).collect(), 0, [1; 3]),
            (vec![2], 0, [1; 3]),
        ]);
        let converted = convert_within(
            &finished,
            PartBounds { samples: usize::MAX, bytes: 2000, lone_bytes: 1 << 20 },
        );
        assert_eq!((converted.dropped_samples, converted.requests.len()), (0, 3));
        assert_eq!(totals(&converted)["cpu"], 3);
        converted.requests.iter().for_each(check);
    }

    #[test]
    fn halves_of_a_request_are_requests_of_their_own_and_lose_nothing() {
        let samples: Vec<_> =
            (0..9_u8).map(|id| (vec![id, 100], id % 2, [1, 10, i64::from(id)])).collect();
        let converted = convert(&finished(&samples), 1 << 20);
        let mut ahead = converted.requests.clone();
        let mut single = Vec::new();
        while let Some(request) = ahead.pop() {
            check(&request);
            match halve(&request, || [9; 16]) {
                halves if halves.is_empty() => single.push(request),
                halves => {
                    assert!(halves.iter().all(|half| half.encoded_len() < request.encoded_len()));
                    ahead.extend(halves);
                }
            }
        }
        assert_eq!(single.len(), 9);
        let parts = Converted { requests: single, dropped_samples: 0 };
        assert_eq!(totals(&parts), totals(&converted));
    }

    #[test]
    fn a_request_has_no_more_samples_than_it_may() {
        let samples: Vec<_> = (0..100_u8).map(|id| (vec![id], 0, [1, 1, 1])).collect();
        let bounds = PartBounds { samples: 30, bytes: 1 << 20, lone_bytes: 1 << 20 };
        let converted = convert_within(&finished(&samples), bounds);
        assert_eq!((converted.dropped_samples, converted.requests.len()), (0, 10));
        assert_eq!(totals(&converted)["cpu"], 100);
    }

    #[test]
    fn ids_of_spans_are_read() {
        assert_eq!(unhex("0aFF"), [10, 255]);
        assert!(unhex("0aF").is_empty() && unhex("zz").is_empty() && unhex("+1").is_empty());
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_no_request_is_too_long(
            samples in prop::collection::vec(
                (
                    prop::collection::vec(0_u8..40, 0..12),
                    0_u8..3,
                    prop::array::uniform3(0_i64..1000),
                ),
                0..60,
            ).prop_map(|mut samples| {
                samples.iter_mut().for_each(|sample| sample.2[0] += 1);
                samples
            }),
            most_bytes in 3000_usize..9000,
        ) {
            let finished = finished(&samples);
            let converted = convert(&finished, most_bytes);
            prop_assert_eq!(converted.dropped_samples, 0);
            for request in &converted.requests {
                let bytes = request.encoded_len();
                prop_assert!(bytes <= most_bytes, "{bytes} > {most_bytes}");
                check(request);
            }
            let totals = totals(&converted);
            for (at, name) in ["samples", "cpu", "alloc_space"].iter().enumerate() {
                let expected: i64 = samples.iter().map(|sample| sample.2[at]).sum();
                prop_assert_eq!(totals.get(*name).copied().unwrap_or_default(), expected);
            }
        }
    }
}
