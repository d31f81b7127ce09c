//! Several profiles -> one, for reports of more than a window: a daemon writes a file for each
//! service and minute.
//!
//! Samples stay apart, each with a label `window`: when its profile began. Their other labels say
//! how many objects a sample was made from and how sure that is, which must not be lost. What was
//! alive is no sum over moments: it is kept of the last one, unless each is shown by itself.

use super::survey_profile::TYPES as SURVEYED;
use perfusion_model::clock::Utc;
use perfusion_model::labels::SampleType;
use perfusion_pprof::proto::{
    Function, Label, Line, Location, Mapping, Profile, Sample, ValueType,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::Hash;
use std::ops::Range;
use std::time::Duration;

/// The label that says which profile a sample is of.
pub const WINDOW: &str = "window";

/// Windows that end within so much of the last one end with it. The last one may be short: it ends
/// when the daemon does.
const SAME_MOMENT_NS: i64 = 500_000_000;

/// Windows and their lengths in nanoseconds, by the value of the label.
pub type WindowLengths = BTreeMap<String, i64>;

/// When a profile began, as the label has it.
#[must_use]
pub(crate) fn window_of(profile: &Profile) -> String {
    Utc::of(Duration::from_nanos(u64::try_from(profile.time_nanos).unwrap_or(0))).iso()
}

/// True for what is true of a moment, the end of a window: there is no sum of it over windows, and
/// no rate.
#[must_use]
pub(crate) fn is_of_moments(sample_type: &str) -> bool {
    let of_moments = [SampleType::InuseObjects, SampleType::InuseSpace].map(SampleType::name);
    of_moments
        .into_iter()
        .chain(SURVEYED.map(|(name, _)| name))
        .any(|of_moment| of_moment == sample_type)
}

/// Profiles that are made one.
pub(crate) struct ProfileMerger {
    whole: MergedTables,
    spans: Vec<WindowSamples>,
    windows: WindowLengths,
}

/// One of the profiles: when it was recorded, and where its samples lie.
struct WindowSamples {
    window: String,
    from_ns: i64,
    to_ns: i64,
    samples: Range<usize>,
    comments: Vec<i64>,
}

impl ProfileMerger {
    /// None yet.
    #[must_use]
    pub(crate) fn new() -> Self {
        let mut whole = MergedTables::default();
        // An empty string is the table's first.
        whole.text("");
        Self { whole, spans: Vec::new(), windows: WindowLengths::new() }
    }

    /// One more, which was validated.
    pub(crate) fn add(&mut self, profile: &Profile) {
        let window = window_of(profile);
        let before = self.whole.profile.sample.len();
        let comments = self.whole.add(profile, &window);
        self.spans.push(WindowSamples {
            window: window.clone(),
            from_ns: profile.time_nanos,
            to_ns: profile.time_nanos.saturating_add(profile.duration_nanos),
            samples: before..self.whole.profile.sample.len(),
            comments,
        });
        let length = self.windows.entry(window).or_insert(0);
        *length = profile.duration_nanos.max(*length);
    }

    /// One profile with all their samples, and how long each window was. With `each_moment` what
    /// was alive is there for each window, else for the last one alone. If only one window is shown
    /// its time alone counts.
    #[must_use]
    pub(crate) fn finish(self, each_moment: bool, only: Option<&str>) -> (Profile, WindowLengths) {
        let Self { whole: MergedTables { mut profile, of_moments, .. }, mut spans, mut windows } =
            self;
        let last = spans.iter().map(|span| span.to_ns).max().unwrap_or(0);
        for span in &spans {
            // What ends in the same moment does so but for the time it takes to write windows of
            // many services.
            let is_last = span.to_ns >= last.saturating_sub(SAME_MOMENT_NS);
            let samples = profile.sample.get_mut(span.samples.clone()).unwrap_or_default();
            for sample in samples.iter_mut().filter(|_| !each_moment && !is_last) {
                let of_moment = |(at, _): &(usize, &mut i64)| of_moments.contains(at);
                sample
                    .value
                    .iter_mut()
                    .enumerate()
                    .filter(of_moment)
                    .for_each(|(_, value)| *value = 0);
            }
        }
        profile.sample.retain(|sample| sample.value.iter().any(|value| *value != 0));
        let columns = profile.sample_type.len();
        profile.sample.iter_mut().for_each(|sample| sample.value.resize(columns, 0));
        if let Some(only) = only.filter(|only| windows.contains_key(*only)) {
            windows.retain(|window, _| window == only);
            spans.retain(|span| span.window == only);
        }
        // Files of one window share those that are of the whole recording.
        let mut known = HashSet::new();
        let comments = spans.iter().flat_map(|span| &span.comments).copied();
        profile.comment = comments.filter(|comment| known.insert(*comment)).collect();
        profile.time_nanos = spans.iter().map(|span| span.from_ns).min().unwrap_or(0);
        profile.duration_nanos = covered(&mut spans);
        (profile, windows)
    }
}

impl Default for ProfileMerger {
    fn default() -> Self {
        Self::new()
    }
}

/// How long at least one of them was recorded.
fn covered(spans: &mut [WindowSamples]) -> i64 {
    spans.sort_unstable_by_key(|span| span.from_ns);
    let (mut sum, mut until) = (0i64, i64::MIN);
    for span in spans {
        sum = sum.saturating_add(span.to_ns.saturating_sub(span.from_ns.max(until)).max(0));
        until = until.max(span.to_ns);
    }
    sum
}

/// What was added so far. Ids are positions plus one.
#[derive(Default)]
struct MergedTables {
    profile: Profile,
    texts: HashMap<String, i64>,
    mappings: HashMap<(i64, i64), u64>,
    functions: HashMap<Function, u64>,
    locations: HashMap<(u64, u64, Vec<Line>), u64>,
    /// Columns that tell of a moment.
    of_moments: HashSet<usize>,
}

impl MergedTables {
    fn text(&mut self, text: &str) -> i64 {
        if let Some(&place) = self.texts.get(text) {
            return place;
        }
        let place = i64::try_from(self.profile.string_table.len()).unwrap_or(0);
        self.profile.string_table.push(text.to_owned());
        self.texts.insert(text.to_owned(), place);
        place
    }

    /// Answers its comments.
    fn add(&mut self, from: &Profile, window: &str) -> Vec<i64> {
        let texts: Vec<i64> = from.string_table.iter().map(|text| self.text(text)).collect();
        let text = |place: i64| {
            usize::try_from(place).ok().and_then(|at| texts.get(at)).copied().unwrap_or(0)
        };
        let mappings: HashMap<u64, u64> =
            from.mapping.iter().map(|mapping| (mapping.id, self.mapping(mapping, &text))).collect();
        let functions: HashMap<u64, u64> = from
            .function
            .iter()
            .map(|function| (function.id, self.function(function, &text)))
            .collect();
        let mut locations = HashMap::new();
        for location in &from.location {
            let line = location.line.iter().map(|line| Line {
                function_id: functions.get(&line.function_id).copied().unwrap_or(0),
                ..*line
            });
            let mapping = mappings.get(&location.mapping_id).copied().unwrap_or(0);
            locations.insert(location.id, self.location(location, mapping, line.collect()));
        }
        let columns: Vec<usize> = from
            .sample_type
            .iter()
            .map(|each| self.column(text(each.r#type), text(each.unit)))
            .collect();
        let width = self.profile.sample_type.len();
        let label = Label { key: self.text(WINDOW), str: self.text(window), ..Label::default() };
        for sample in &from.sample {
            let mut value = vec![0; width];
            for (&column, &of_sample) in columns.iter().zip(&sample.value) {
                if let Some(value) = value.get_mut(column) {
                    *value = of_sample;
                }
            }
            let labels = sample.label.iter().map(|label| Label {
                key: text(label.key),
                str: text(label.str),
                num: label.num,
                num_unit: text(label.num_unit),
            });
            self.profile.sample.push(Sample {
                location_id: sample
                    .location_id
                    .iter()
                    .filter_map(|id| locations.get(id))
                    .copied()
                    .collect(),
                value,
                label: labels.chain([label]).collect(),
            });
        }
        if self.profile.default_sample_type == 0 {
            self.profile.default_sample_type = text(from.default_sample_type);
        }
        from.comment.iter().map(|comment| text(*comment)).collect()
    }

    /// Position of a column.
    fn column(&mut self, name: i64, unit: i64) -> usize {
        let column = ValueType { r#type: name, unit };
        if let Some(known) = self.profile.sample_type.iter().position(|known| *known == column) {
            return known;
        }
        let place = self.profile.sample_type.len();
        self.profile.sample_type.push(column);
        let name = usize::try_from(name).ok().and_then(|at| self.profile.string_table.get(at));
        if name.is_some_and(|name| is_of_moments(name)) {
            self.of_moments.insert(place);
        }
        place
    }

    /// A file is one mapping, wherever code of it was seen.
    fn mapping(&mut self, mapping: &Mapping, text: &impl Fn(i64) -> i64) -> u64 {
        let (filename, build_id) = (text(mapping.filename), text(mapping.build_id));
        let (known, new) = number(&mut self.mappings, (filename, build_id));
        if new {
            self.profile.mapping.push(Mapping { id: known, filename, build_id, ..*mapping });
        }
        known
    }

    fn function(&mut self, function: &Function, text: &impl Fn(i64) -> i64) -> u64 {
        let new = Function {
            id: 0,
            name: text(function.name),
            system_name: text(function.system_name),
            filename: text(function.filename),
            start_line: function.start_line,
        };
        let (known, is_new) = number(&mut self.functions, new);
        if is_new {
            self.profile.function.push(Function { id: known, ..new });
        }
        known
    }

    fn location(&mut self, location: &Location, mapping_id: u64, line: Vec<Line>) -> u64 {
        let (known, new) =
            number(&mut self.locations, (mapping_id, location.address, line.clone()));
        if new {
            let Location { address, is_folded, .. } = *location;
            self.profile.location.push(Location {
                id: known,
                mapping_id,
                address,
                line,
                is_folded,
            });
        }
        known
    }
}

/// The number of what is in a table, and whether it is new there.
fn number<K: Hash + Eq>(table: &mut HashMap<K, u64>, key: K) -> (u64, bool) {
    let next = u64::try_from(table.len()).unwrap_or(u64::MAX).saturating_add(1);
    let known = *table.entry(key).or_insert(next);
    (known, known == next)
}

#[cfg(test)]
mod tests {
    use super::{ProfileMerger, WindowLengths};
    use crate::stacks::ProfileStacks;
    use crate::{groups, top};
    use perfusion_pprof::proto::{
        Function, Label, Line, Location, Mapping, Profile, Sample, ValueType,
    };
    use perfusion_pprof::validate;
    use std::iter;

    const SECOND: i64 = 1_000_000_000;

    /// One that began after so many seconds, with one sample of a function: bytes allocated and
    /// alive. Its tables are in an order of its own.
    fn profile(from_s: i64, function: &str, allocated: i64, alive: i64, turned: bool) -> Profile {
        let mut texts = [
            "alloc_space",
            "inuse_space",
            "bytes",
            "app.dll",
            "sampled_objects",
            "loss: none",
            function,
        ];
        if turned {
            texts.reverse();
        }
        let place = |text: &str| {
            let at = texts.iter().position(|known| *known == text).unwrap();
            i64::try_from(at + 1).unwrap()
        };
        let id = if turned { 7 } else { 1 };
        let column = |name| ValueType { r#type: place(name), unit: place("bytes") };
        let (columns, value) = match turned {
            true => (["inuse_space", "alloc_space"], vec![alive, allocated]),
            false => (["alloc_space", "inuse_space"], vec![allocated, alive]),
        };
        let profile = Profile {
            sample_type: columns.map(column).to_vec(),
            sample: vec![Sample {
                location_id: vec![id],
                value,
                label: vec![Label { key: place("sampled_objects"), num: 3, ..Label::default() }],
            }],
            mapping: vec![Mapping { id, filename: place("app.dll"), ..Mapping::default() }],
            location: vec![Location {
                id,
                mapping_id: id,
                address: 16,
                line: vec![Line { function_id: id, ..Line::default() }],
                is_folded: false,
            }],
            function: vec![Function { id, name: place(function), ..Function::default() }],
            string_table: iter::once("").chain(texts).map(str::to_owned).collect(),
            time_nanos: from_s * SECOND,
            duration_nanos: 10 * SECOND,
            comment: vec![place("loss: none")],
            ..Profile::default()
        };
        validate(&profile).unwrap();
        profile
    }

    fn together(each_moment: bool) -> (Profile, WindowLengths) {
        let mut all = ProfileMerger::new();
        // Two services of the last window, out of order, and a gap of ten seconds.
        all.add(&profile(30, "Load", 8, 16, true));
        all.add(&profile(0, "Load", 1, 2, false));
        all.add(&profile(10, "Save", 4, 8, true));
        all.add(&profile(30, "Save", 32, 64, false));
        all.finish(each_moment, None)
    }

    /// What the rows of a report say.
    fn lines(
        profile: &Profile,
        windows: &WindowLengths,
        sample_type: &str,
        by: &[&str],
        limit: usize,
    ) -> Vec<String> {
        let options =
            top::TableOptions { limit, windows: windows.clone(), ..top::TableOptions::default() };
        let by: Vec<String> = by.iter().map(|label| (*label).to_owned()).collect();
        let text = match by.is_empty() {
            true => top::table(profile, sample_type, &options).unwrap(),
            false => groups::table(profile, sample_type, &by, &options).unwrap(),
        };
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn what_was_allocated_is_the_sum_of_windows_and_what_is_alive_that_of_the_last() {
        let (all, windows) = together(false);
        validate(&all).unwrap();
        assert_eq!(
            (all.function.len(), all.location.len(), all.mapping.len(), all.comment.len()),
            (2, 2, 1, 1)
        );
        let allocated = lines(&all, &windows, "alloc_space", &[], 9);
        assert_eq!(allocated[0], "alloc_space: total 45 B in 30 s, 2 of 2 functions");
        assert_eq!(allocated[2], "36 B 80.0% 36 B 80.0% Save [app.dll]");
        assert_eq!(allocated[3], "9 B 20.0% 9 B 20.0% Load [app.dll]");
        let alive = lines(&all, &windows, "inuse_space", &[], 9);
        assert_eq!(alive[0], "inuse_space: total 80 B, 2 of 2 functions");
        assert_eq!(ProfileStacks::new(&all).losses().collect::<Vec<_>>(), ["none"]);
    }

    #[test]
    fn one_window_alone_has_its_own_length() {
        let mut all = ProfileMerger::new();
        all.add(&profile(0, "Load", 1, 2, false));
        all.add(&profile(10, "Save", 4, 8, true));
        let mut lowered = profile(20, "Save", 4, 8, true);
        lowered.comment = vec![4];
        all.add(&lowered);
        let (one, windows) = all.finish(true, Some("1970-01-01T00:00:10.000Z"));
        assert_eq!(ProfileStacks::new(&one).comments().collect::<Vec<_>>(), ["loss: none"]);
        assert_eq!(
            (one.time_nanos, one.duration_nanos, windows.len()),
            (10 * SECOND, 10 * SECOND, 1)
        );
    }

    #[test]
    fn by_window_each_has_its_rate_and_its_moment() {
        let (all, windows) = together(true);
        let alive = lines(&all, &windows, "inuse_space", &["window"], 9);
        let moments = ["00", "10", "30"].map(|second| format!("1970-01-01T00:00:{second}.000Z"));
        assert_eq!(alive[0], "inuse_space by window: at the end of each, 3 of 3 values");
        let each = [("2 B", &moments[0]), ("8 B", &moments[1]), ("80 B", &moments[2])];
        assert_eq!(alive[2..5], each.map(|(bytes, moment)| format!("{bytes} 100.0% {moment}")));
        let alive = lines(&all, &windows, "inuse_space", &["window", "sampled_objects"], 9);
        assert_eq!(alive[4], format!("80 B 100.0% {} 3", moments[2]), "{alive:#?}");
        // One row of each window, the largest.
        let few = lines(&all, &windows, "alloc_space", &["window", "sampled_objects"], 1);
        assert_eq!(few[4], "40 B 88.9% 4 B 1970-01-01T00:00:30.000Z 3", "{few:#?}");
        // A window without any is a row of its own, where windows alone are asked for.
        let windows =
            [windows, WindowLengths::from([("1970-01-01T00:00:20.000Z".to_owned(), SECOND)])];
        let windows: WindowLengths = windows.into_iter().flatten().collect();
        let allocated = lines(&all, &windows, "alloc_space", &["window"], 9);
        assert_eq!(allocated[4], "0 0.0% 0 1970-01-01T00:00:20.000Z", "{allocated:#?}");
    }
}
