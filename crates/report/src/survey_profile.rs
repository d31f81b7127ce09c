//! A survey as pprof: a sample for each way objects are held, its stack the way from the object
//! (innermost) to the root, its values how many there are and their bytes. And back, for comparing
//! two.

use perfusion_heap::paths::{PathStep, RetentionPaths};
use perfusion_heap::walk::HeapSurvey;
use perfusion_pprof::proto::{Function, Line, Location, Mapping, Profile, Sample, ValueType};
use perfusion_pprof::{Invalid, MANAGED_MAPPING, validate};
use std::collections::HashMap;
use std::time::SystemTime;

/// Sample types and their units.
pub const TYPES: [(&str, &str); 2] = [("objects", "count"), ("space", "bytes")];
/// Id of the one mapping: readers take functions without one for native.
const MAPPING: u64 = 1;

/// Steps of all ways together. What a program holds has some millions; a chain of 255 types below
/// which all others hang has sixty, and is half a GB as a file is made of it. From there on ways
/// begin at [`PathStep::Further`].
const MOST_STEPS: usize = 1 << 23;

/// Strings, functions and locations, each once. A function and its location have the same id.
struct SurveyTables {
    profile: Profile,
    strings: HashMap<String, i64>,
    locations: HashMap<String, u64>,
}

impl SurveyTables {
    fn string(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = i64::try_from(self.profile.string_table.len()).unwrap_or(i64::MAX);
        self.profile.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn value_type(&mut self, (name, unit): (&str, &str)) -> ValueType {
        ValueType { r#type: self.string(name), unit: self.string(unit) }
    }

    fn location(&mut self, name: &str, is_type: bool) -> u64 {
        if let Some(&id) = self.locations.get(name) {
            return id;
        }
        let id = u64::try_from(self.profile.location.len()).unwrap_or(u64::MAX).saturating_add(1);
        // Without a system name, Go's pprof does not take type arguments for C++ and cut them.
        let function = Function { id, name: self.string(name), ..Function::default() };
        self.profile.function.push(function);
        let line = vec![Line { function_id: id, ..Line::default() }];
        let mapping_id = if is_type { MAPPING } else { 0 };
        self.profile.location.push(Location { id, mapping_id, line, ..Location::default() });
        self.locations.insert(name.to_owned(), id);
        id
    }
}

/// Makes the profile of a survey that was taken at `time`.
///
/// # Errors
/// When the result would break a rule of the format, which is a fault of this program.
pub fn profile(
    survey: &HeapSurvey,
    paths: &RetentionPaths,
    time: SystemTime,
    comments: &[String],
) -> Result<Profile, Invalid> {
    let mut tables = SurveyTables {
        profile: Profile::default(),
        strings: HashMap::new(),
        locations: HashMap::new(),
    };
    tables.string("");
    let sample_type = TYPES.map(|each| tables.value_type(each)).to_vec();
    let default = sample_type.last().copied().unwrap_or_default();
    let filename = tables.string(MANAGED_MAPPING);
    tables.profile.mapping.push(Mapping {
        id: MAPPING,
        filename,
        has_functions: true,
        ..Mapping::default()
    });
    tables.profile.default_sample_type = default.r#type;
    tables.profile.period_type = Some(default);
    tables.profile.period = 1;
    tables.profile.sample_type = sample_type;
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    tables.profile.time_nanos = i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX);
    let pause = survey.pause.as_nanos();
    tables.profile.duration_nanos = i64::try_from(pause).unwrap_or(i64::MAX);
    tables.profile.comment = comments.iter().map(|comment| tables.string(comment)).collect();
    let mut known: HashMap<PathStep, u64> = HashMap::new();
    let mut left = MOST_STEPS;
    for (number, node) in paths.ends() {
        let mut way = paths.way(number);
        left = left.saturating_sub(way.len());
        if left == 0 {
            way = [PathStep::Further].into_iter().chain(way.last().copied()).collect();
        }
        let mut location = |&step: &PathStep| {
            let is_type = matches!(step, PathStep::Type(_));
            *known.entry(step).or_insert_with(|| tables.location(&survey.step_name(step), is_type))
        };
        let location_id = way.iter().rev().map(&mut location).collect();
        let value = [node.objects, node.bytes]
            .map(|value| i64::try_from(value).unwrap_or(i64::MAX))
            .to_vec();
        tables.profile.sample.push(Sample { location_id, value, label: Vec::new() });
    }
    validate(&tables.profile)?;
    Ok(tables.profile)
}
