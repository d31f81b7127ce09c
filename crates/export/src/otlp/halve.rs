//! A request that is longer than its receiver takes -> two that have half of its samples each, with
//! tables of their own. Pure.

use super::proto::{
    ExportProfilesServiceRequest, Function, KeyValueAndUnit, Line, Location, Mapping, Profile,
    ProfilesDictionary, ResourceProfiles, Sample, ScopeProfiles, Stack, ValueType,
};
use std::collections::HashMap;

/// Two requests that together have all samples; none where all samples are of one stack with the
/// same attributes: those stay together.
#[must_use]
pub fn halve(
    request: &ExportProfilesServiceRequest,
    fresh_id: fn() -> [u8; 16],
) -> Vec<ExportProfilesServiceRequest> {
    let Some(tables) = &request.dictionary else { return Vec::new() };
    let scopes = request.resource_profiles.iter().flat_map(|resource| &resource.scope_profiles);
    let mut places: HashMap<SampleKey<'_>, usize> = HashMap::new();
    for sample in scopes.flat_map(|scope| &scope.profiles).flat_map(|profile| &profile.samples) {
        let next = places.len();
        places.entry(key(sample)).or_insert(next);
    }
    if places.len() < 2 {
        return Vec::new();
    }
    let middle = places.len() / 2;
    [false, true]
        .into_iter()
        .map(|second| {
            let is_in = |sample: &Sample| {
                places.get(&key(sample)).is_some_and(|&at| (at >= middle) == second)
            };
            Half::new(tables).of(request, is_in, fresh_id)
        })
        .collect()
}

/// What samples of different types have in common.
type SampleKey<'a> = (i32, i32, &'a [i32]);

fn key(sample: &Sample) -> SampleKey<'_> {
    (sample.stack_index, sample.link_index, &sample.attribute_indices)
}

/// One table of a half: where entries of the whole's table stand in it.
type NewIndices = HashMap<i32, i32>;

struct Half<'a> {
    whole: &'a ProfilesDictionary,
    tables: ProfilesDictionary,
    strings: NewIndices,
    attributes: NewIndices,
    functions: NewIndices,
    mappings: NewIndices,
    locations: NewIndices,
    stacks: NewIndices,
    links: NewIndices,
}

fn entry<T>(table: &[T], index: i32) -> Option<&T> {
    usize::try_from(index).ok().and_then(|index| table.get(index))
}

/// Puts an entry at the end of a table.
fn push<T>(table: &mut Vec<T>, places: &mut NewIndices, old: i32, new: T) -> i32 {
    let at = i32::try_from(table.len()).unwrap_or(0);
    table.push(new);
    places.insert(old, at);
    at
}

impl<'a> Half<'a> {
    fn new(whole: &'a ProfilesDictionary) -> Self {
        let zero = || HashMap::from([(0, 0)]);
        Self {
            whole,
            tables: super::proto::empty_dictionary(),
            strings: zero(),
            attributes: zero(),
            functions: zero(),
            mappings: zero(),
            locations: zero(),
            stacks: zero(),
            links: zero(),
        }
    }

    fn of(
        mut self,
        request: &ExportProfilesServiceRequest,
        is_in: impl Fn(&Sample) -> bool,
        fresh_id: fn() -> [u8; 16],
    ) -> ExportProfilesServiceRequest {
        let mut resource_profiles = Vec::new();
        for resource in &request.resource_profiles {
            let mut scope_profiles = Vec::new();
            for scope in &resource.scope_profiles {
                let profiles = scope.profiles.iter().filter_map(|profile| {
                    let samples: Vec<&Sample> =
                        profile.samples.iter().filter(|sample| is_in(sample)).collect();
                    (!samples.is_empty()).then(|| self.profile(profile, &samples, fresh_id))
                });
                let profiles = profiles.collect();
                scope_profiles.push(ScopeProfiles {
                    scope: scope.scope.clone(),
                    profiles,
                    schema_url: scope.schema_url.clone(),
                });
            }
            resource_profiles.push(ResourceProfiles {
                resource: resource.resource.clone(),
                scope_profiles,
                schema_url: resource.schema_url.clone(),
            });
        }
        ExportProfilesServiceRequest { resource_profiles, dictionary: Some(self.tables) }
    }

    fn profile(
        &mut self,
        whole: &Profile,
        samples: &[&Sample],
        fresh_id: fn() -> [u8; 16],
    ) -> Profile {
        Profile {
            sample_type: whole.sample_type.map(|kind| self.value_type(kind)),
            samples: samples.iter().map(|sample| self.sample(sample)).collect(),
            time_unix_nano: whole.time_unix_nano,
            duration_nano: whole.duration_nano,
            period_type: whole.period_type.map(|kind| self.value_type(kind)),
            period: whole.period,
            profile_id: fresh_id().to_vec(),
            attribute_indices: self.all_attributes(&whole.attribute_indices),
            ..Profile::default()
        }
    }

    fn sample(&mut self, whole: &Sample) -> Sample {
        Sample {
            stack_index: self.stack(whole.stack_index),
            attribute_indices: self.all_attributes(&whole.attribute_indices),
            link_index: self.link(whole.link_index),
            values: whole.values.clone(),
            timestamps_unix_nano: whole.timestamps_unix_nano.clone(),
        }
    }

    fn value_type(&mut self, whole: ValueType) -> ValueType {
        ValueType {
            type_strindex: self.string(whole.type_strindex),
            unit_strindex: self.string(whole.unit_strindex),
        }
    }

    fn string(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.strings.get(&old) {
            return known;
        }
        let text = entry(&self.whole.string_table, old).cloned().unwrap_or_default();
        push(&mut self.tables.string_table, &mut self.strings, old, text)
    }

    fn all_attributes(&mut self, old: &[i32]) -> Vec<i32> {
        old.iter().map(|&old| self.attribute(old)).collect()
    }

    fn attribute(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.attributes.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.attribute_table, old) else { return 0 };
        let new = KeyValueAndUnit {
            key_strindex: self.string(whole.key_strindex),
            value: whole.value.clone(),
            unit_strindex: self.string(whole.unit_strindex),
        };
        push(&mut self.tables.attribute_table, &mut self.attributes, old, new)
    }

    fn link(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.links.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.link_table, old) else { return 0 };
        push(&mut self.tables.link_table, &mut self.links, old, whole.clone())
    }

    fn stack(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.stacks.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.stack_table, old) else { return 0 };
        let location_indices =
            whole.location_indices.iter().map(|&old| self.location(old)).collect();
        push(&mut self.tables.stack_table, &mut self.stacks, old, Stack { location_indices })
    }

    fn location(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.locations.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.location_table, old) else { return 0 };
        let lines = whole.lines.iter().map(|line| Line {
            function_index: self.function(line.function_index),
            line: line.line,
            column: line.column,
        });
        let new = Location {
            lines: lines.collect(),
            mapping_index: self.mapping(whole.mapping_index),
            address: whole.address,
            attribute_indices: self.all_attributes(&whole.attribute_indices),
        };
        push(&mut self.tables.location_table, &mut self.locations, old, new)
    }

    fn function(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.functions.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.function_table, old) else { return 0 };
        let new = Function {
            name_strindex: self.string(whole.name_strindex),
            system_name_strindex: self.string(whole.system_name_strindex),
            filename_strindex: self.string(whole.filename_strindex),
            start_line: whole.start_line,
        };
        push(&mut self.tables.function_table, &mut self.functions, old, new)
    }

    fn mapping(&mut self, old: i32) -> i32 {
        if let Some(&known) = self.mappings.get(&old) {
            return known;
        }
        let Some(whole) = entry(&self.whole.mapping_table, old) else { return 0 };
        let new = Mapping {
            memory_start: whole.memory_start,
            memory_limit: whole.memory_limit,
            file_offset: whole.file_offset,
            filename_strindex: self.string(whole.filename_strindex),
            attribute_indices: self.all_attributes(&whole.attribute_indices),
        };
        push(&mut self.tables.mapping_table, &mut self.mappings, old, new)
    }
}
