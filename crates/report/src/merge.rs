//! Several profiles -> one, for reports of more than a window: a daemon writes a file for each
//! service and minute.
//!
//! Samples stay apart, each with a label `window`: when its profile began. Their other labels say
//! how many objects a sample was made from and how sure that is, which must not be lost. What was
//! alive is no sum over moments: it is kept of the last one, unless each is shown by itself.
//!
//! Sample types are merged as google/pprof does it (`internal/driver/fetch.go`,
//! `internal/measurement`): those that all files have, in the finest of their units. Files that
//! have none in common, or a common one in units of different kinds, are refused. So are those that
//! were sampled by periods of different types.

use super::ReportError;
use super::stacks::shown_name;
use super::survey_profile::TYPES as SURVEYED;
use perfusion_model::clock::Utc;
use perfusion_model::labels::SampleType;
use perfusion_model::units::{self, counted};
use perfusion_pprof::proto::{
    Function, Label, Line, Location, Mapping, Profile, Sample, ValueType,
};
use std::collections::btree_map::Entry;
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

/// A text of a profile.
fn text_of(profile: &Profile, index: i64) -> String {
    let text = usize::try_from(index).ok().and_then(|index| profile.string_table.get(index));
    text.cloned().unwrap_or_default()
}

/// When a profile began, as the label has it; `None` where the profile names no time.
fn window_of(profile: &Profile) -> Option<String> {
    let began = u64::try_from(profile.time_nanos).ok().filter(|&nanos| nanos > 0)?;
    Some(Utc::of(Duration::from_nanos(began)).iso())
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
    /// The type of the first one's period.
    period: Option<Option<String>>,
}

/// One of the profiles: when it was recorded, and where its samples lie.
struct WindowSamples {
    /// `None` where the profile names no time.
    window: Option<String>,
    from_ns: i64,
    /// 0 where the profile names no duration.
    length_ns: i64,
    samples: Range<usize>,
    comments: Vec<i64>,
}

impl WindowSamples {
    const fn to_ns(&self) -> i64 {
        self.from_ns.saturating_add(self.length_ns)
    }
}

/// Several profiles as one.
#[derive(Debug)]
pub(crate) struct MergedProfile {
    pub(crate) profile: Profile,
    pub(crate) windows: WindowLengths,
    /// One sentence for each kind of thing that was left out or is not known.
    pub(crate) remarks: Vec<String>,
}

impl ProfileMerger {
    /// None yet.
    #[must_use]
    pub(crate) fn new() -> Self {
        let mut whole = MergedTables::default();
        // An empty string is the table's first.
        whole.text("");
        Self { whole, spans: Vec::new(), windows: WindowLengths::new(), period: None }
    }

    /// One more, which was validated; errors call it `file`.
    ///
    /// # Errors
    /// When it has no sample type in common with those before it, or a period of another type.
    pub(crate) fn add(&mut self, profile: &Profile, file: &str) -> Result<(), ReportError> {
        let period = profile.period_type.as_ref().map(|kind| text_of(profile, kind.r#type));
        let before = self.period.get_or_insert_with(|| period.clone());
        if *before != period {
            let shown = |period: &Option<String>| period.clone().unwrap_or_else(|| "none".into());
            return Err(ReportError::UnlikePeriods {
                file: file.to_owned(),
                period: shown(&period),
                before: shown(before),
            });
        }
        let window = window_of(profile);
        let before = self.whole.profile.sample.len();
        let comments = self.whole.add(profile, window.as_deref(), file)?;
        let length_ns = profile.duration_nanos.max(0);
        if let Some(window) = &window {
            match self.windows.entry(window.clone()) {
                Entry::Vacant(new) => {
                    new.insert(length_ns);
                }
                // One file without a duration leaves the window's length unknown.
                Entry::Occupied(mut known) => {
                    let is_known = *known.get() > 0 && length_ns > 0;
                    let longest = length_ns.max(*known.get());
                    known.insert(if is_known { longest } else { 0 });
                }
            }
        }
        self.spans.push(WindowSamples {
            window,
            from_ns: profile.time_nanos,
            length_ns,
            samples: before..self.whole.profile.sample.len(),
            comments,
        });
        Ok(())
    }

    /// One profile with all their samples, and how long each window was. With `each_moment` what
    /// was alive is there for each window, else for the last one alone. If only one window is shown
    /// its time alone counts.
    ///
    /// # Errors
    /// When a sample type of all files has units of different kinds.
    pub(crate) fn finish(
        self,
        each_moment: bool,
        only: Option<&str>,
    ) -> Result<MergedProfile, ReportError> {
        let Self { mut whole, mut spans, mut windows, .. } = self;
        let mut remarks = Vec::new();
        let timed = spans.iter().filter(|span| span.window.is_some());
        let last = timed.map(WindowSamples::to_ns).max().unwrap_or(0);
        for span in &spans {
            // What ends in the same moment does so but for the time it takes to write windows of
            // many services. A file without a time is not known to be older.
            let is_last =
                span.window.is_none() || span.to_ns() >= last.saturating_sub(SAME_MOMENT_NS);
            if !each_moment && !is_last {
                whole.clear_moments(span.samples.clone());
            }
        }
        let untimed = spans.iter().filter(|span| span.window.is_none()).count();
        let orders_moments = untimed < spans.len() && whole.has_moments();
        if untimed > 0 && (each_moment || orders_moments) {
            let then = match each_moment {
                true => "without a window",
                false => "what was alive counts as of the last moment",
            };
            remarks.push(format!("{} no time: {then}", naming(untimed, spans.len())));
        }
        remarks.extend(whole.keep_common(spans.len())?);
        let mut profile = whole.profile;
        profile.sample.retain(|sample| sample.value.iter().any(|value| *value != 0));
        if let Some(only) = only.filter(|only| windows.contains_key(*only)) {
            windows.retain(|window, _| window == only);
            spans.retain(|span| span.window.as_deref() == Some(only));
        }
        // Files of one window share those that are of the whole recording.
        let mut known = HashSet::new();
        let comments = spans.iter().flat_map(|span| &span.comments).copied();
        profile.comment = comments.filter(|comment| known.insert(*comment)).collect();
        let timed = spans.iter().filter(|span| span.window.is_some());
        profile.time_nanos = timed.map(|span| span.from_ns).min().unwrap_or(0);
        let without_length = spans.iter().filter(|span| span.length_ns == 0).count();
        if without_length > 0 && without_length < spans.len() {
            remarks.push(format!(
                "{} no duration: of the whole neither time nor rate is known",
                naming(without_length, spans.len())
            ));
        }
        profile.duration_nanos = if without_length > 0 { 0 } else { covered(&mut spans) };
        Ok(MergedProfile { profile, windows, remarks })
    }
}

/// `1 of 3 files names`.
fn naming(some: usize, files: usize) -> String {
    let verb = if some == 1 { "names" } else { "name" };
    format!("{some} of {} {verb}", counted(files, "file"))
}

/// How long at least one of them was recorded. Those without a time overlap with none.
fn covered(spans: &mut [WindowSamples]) -> i64 {
    spans.sort_unstable_by_key(|span| span.from_ns);
    let (mut sum, mut until) = (0i64, i64::MIN);
    for span in spans {
        if span.window.is_none() {
            sum = sum.saturating_add(span.length_ns);
            continue;
        }
        sum = sum.saturating_add(span.to_ns().saturating_sub(span.from_ns.max(until)).max(0));
        until = until.max(span.to_ns());
    }
    sum
}

/// A column of some of the files.
struct MergedColumn {
    /// So many files have it.
    files: usize,
    /// It tells of a moment.
    is_of_moments: bool,
    /// A file that has it in a unit of another kind, and that unit.
    unlike: Option<(String, String)>,
}

/// What was added so far. Ids are positions plus one.
#[derive(Default)]
struct MergedTables {
    profile: Profile,
    texts: HashMap<String, i64>,
    mappings: HashMap<(i64, i64), u64>,
    functions: HashMap<Function, u64>,
    locations: HashMap<(u64, u64, Vec<Line>), u64>,
    /// What is known of each column of the profile.
    columns: Vec<MergedColumn>,
    /// Positions of the columns that all files have, in the order of the first file.
    common: Vec<usize>,
    files: usize,
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
    fn add(
        &mut self,
        from: &Profile,
        window: Option<&str>,
        file: &str,
    ) -> Result<Vec<i64>, ReportError> {
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
        let columns: Vec<(usize, i64)> = from
            .sample_type
            .iter()
            .map(|each| self.column(text(each.r#type), text(each.unit), file))
            .collect();
        self.narrow(&columns, file)?;
        let width = self.profile.sample_type.len();
        let label = window.map(|window| Label {
            key: self.text(WINDOW),
            str: self.text(window),
            ..Label::default()
        });
        for sample in &from.sample {
            let mut value = vec![0; width];
            for (&(column, factor), &of_sample) in columns.iter().zip(&sample.value) {
                if let Some(value) = value.get_mut(column) {
                    *value = of_sample.saturating_mul(factor);
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
                label: labels.chain(label).collect(),
            });
        }
        if self.profile.default_sample_type == 0 {
            self.profile.default_sample_type = text(from.default_sample_type);
        }
        Ok(from.comment.iter().map(|comment| text(*comment)).collect())
    }

    /// Position of a column, and what values of this unit are multiplied with there. A finer unit
    /// than the column's becomes the column's.
    fn column(&mut self, name: i64, unit: i64, file: &str) -> (usize, i64) {
        let known = self.profile.sample_type.iter().position(|known| known.r#type == name);
        let Some(at) = known else {
            let is_of_moments = is_of_moments(self.shown(name));
            self.profile.sample_type.push(ValueType { r#type: name, unit });
            self.columns.push(MergedColumn { files: 1, is_of_moments, unlike: None });
            return (self.columns.len().saturating_sub(1), 1);
        };
        let (new, old) = (self.shown(unit), self.shown(self.profile.sample_type[at].unit));
        let (new_base, new_size) = units::base(new);
        let (old_base, old_size) = units::base(old);
        let unlike = (new_base != old_base).then(|| (file.to_owned(), new.to_owned()));
        let is_unlike = unlike.is_some();
        let column = &mut self.columns[at];
        column.files += 1;
        column.unlike = column.unlike.take().or(unlike);
        if is_unlike || new_size == old_size {
            return (at, 1);
        }
        // Of any two units of a kind the larger one is a multiple of the smaller.
        if new_size > old_size {
            return (at, (new_size / old_size) as i64);
        }
        let factor = (old_size / new_size) as i64;
        self.profile.sample_type[at].unit = unit;
        for value in self.profile.sample.iter_mut().filter_map(|sample| sample.value.get_mut(at)) {
            *value = value.saturating_mul(factor);
        }
        (at, 1)
    }

    /// Counts a file with these columns.
    fn narrow(&mut self, columns: &[(usize, i64)], file: &str) -> Result<(), ReportError> {
        let of_file: Vec<usize> = columns.iter().map(|(at, _)| *at).collect();
        self.files += 1;
        if self.files == 1 {
            self.common = of_file;
            return Ok(());
        }
        let before = self.common.clone();
        self.common.retain(|at| of_file.contains(at));
        if self.common.is_empty() {
            return Err(ReportError::NothingInCommon {
                file: file.to_owned(),
                available: self.names(&of_file),
                before: self.names(&before),
            });
        }
        Ok(())
    }

    /// Leaves the columns that all files have, and says which it drops.
    fn keep_common(&mut self, files: usize) -> Result<Option<String>, ReportError> {
        for &at in &self.common {
            if let Some((file, unit)) = self.columns[at].unlike.take() {
                return Err(ReportError::UnlikeUnits {
                    sample_type: self.names(&[at]),
                    file,
                    unit: shown_name(&unit).into_owned(),
                    before: shown_name(self.shown(self.profile.sample_type[at].unit)).into_owned(),
                });
            }
        }
        let others: Vec<String> = (0..self.columns.len())
            .filter(|at| !self.common.contains(at))
            .map(|at| format!("{} (in {} of {files})", self.names(&[at]), self.columns[at].files))
            .collect();
        let types = self.common.iter().map(|&at| self.profile.sample_type[at]).collect::<Vec<_>>();
        for sample in &mut self.profile.sample {
            let value = |at: &usize| sample.value.get(*at).copied().unwrap_or(0);
            sample.value = self.common.iter().map(value).collect();
        }
        self.profile.sample_type = types;
        if others.is_empty() {
            return Ok(None);
        }
        let default = self.profile.default_sample_type;
        if !self.profile.sample_type.iter().any(|each| each.r#type == default) {
            let first = self.profile.sample_type.first();
            self.profile.default_sample_type = first.map_or(0, |first| first.r#type);
        }
        Ok(Some(format!(
            "sample types that not all files have are left out: {}",
            others.join(", ")
        )))
    }

    /// True where a column that all files have tells of a moment.
    fn has_moments(&self) -> bool {
        self.common.iter().any(|&at| self.columns[at].is_of_moments)
    }

    /// Of these samples nothing is told of moments.
    fn clear_moments(&mut self, samples: Range<usize>) {
        for sample in self.profile.sample.get_mut(samples).unwrap_or_default() {
            let columns = sample.value.iter_mut().zip(&self.columns);
            columns.filter(|(_, of)| of.is_of_moments).for_each(|(value, _)| *value = 0);
        }
    }

    fn shown(&self, text: i64) -> &str {
        let text = usize::try_from(text).ok().and_then(|at| self.profile.string_table.get(at));
        text.map_or("", String::as_str)
    }

    /// Names of columns, for people.
    fn names(&self, columns: &[usize]) -> String {
        let names = columns.iter().filter_map(|&at| self.profile.sample_type.get(at));
        let names: Vec<_> = names.map(|each| shown_name(self.shown(each.r#type))).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
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
    use super::{MergedProfile, ProfileMerger, WindowLengths};
    use crate::ReportError;
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
            // A time of 0 would be none.
            time_nanos: (60 + from_s) * SECOND,
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
        all.add(&profile(30, "Load", 8, 16, true), "x").unwrap();
        all.add(&profile(0, "Load", 1, 2, false), "x").unwrap();
        all.add(&profile(10, "Save", 4, 8, true), "x").unwrap();
        all.add(&profile(30, "Save", 32, 64, false), "x").unwrap();
        let merged = all.finish(each_moment, None).unwrap();
        assert_eq!(merged.remarks, [""; 0]);
        (merged.profile, merged.windows)
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
        all.add(&profile(0, "Load", 1, 2, false), "x").unwrap();
        all.add(&profile(10, "Save", 4, 8, true), "x").unwrap();
        let mut lowered = profile(20, "Save", 4, 8, true);
        lowered.comment = vec![4];
        all.add(&lowered, "x").unwrap();
        let merged = all.finish(true, Some("1970-01-01T00:01:10.000Z")).unwrap();
        let (one, windows) = (merged.profile, merged.windows);
        assert_eq!(ProfileStacks::new(&one).comments().collect::<Vec<_>>(), ["loss: none"]);
        assert_eq!(
            (one.time_nanos, one.duration_nanos, windows.len()),
            (70 * SECOND, 10 * SECOND, 1)
        );
    }

    #[test]
    fn by_window_each_has_its_rate_and_its_moment() {
        let (all, windows) = together(true);
        let alive = lines(&all, &windows, "inuse_space", &["window"], 9);
        let moments = ["00", "10", "30"].map(|second| format!("1970-01-01T00:01:{second}.000Z"));
        assert_eq!(alive[0], "inuse_space by window: at the end of each, 3 of 3 values");
        let each = [("2 B", &moments[0]), ("8 B", &moments[1]), ("80 B", &moments[2])];
        assert_eq!(alive[2..5], each.map(|(bytes, moment)| format!("{bytes} 100.0% {moment}")));
        let alive = lines(&all, &windows, "inuse_space", &["window", "sampled_objects"], 9);
        assert_eq!(alive[4], format!("80 B 100.0% {} 3", moments[2]), "{alive:#?}");
        // One row of each window, the largest.
        let few = lines(&all, &windows, "alloc_space", &["window", "sampled_objects"], 1);
        assert_eq!(few[4], "40 B 88.9% 4 B 1970-01-01T00:01:30.000Z 3", "{few:#?}");
        // A window without any is a row of its own, where windows alone are asked for.
        let windows =
            [windows, WindowLengths::from([("1970-01-01T00:01:20.000Z".to_owned(), SECOND)])];
        let windows: WindowLengths = windows.into_iter().flatten().collect();
        let allocated = lines(&all, &windows, "alloc_space", &["window"], 9);
        assert_eq!(allocated[4], "0 0.0% 0 1970-01-01T00:01:20.000Z", "{allocated:#?}");
    }

    /// One that began after so many seconds and took so long, with a sample of `f` that has these
    /// values.
    fn of_types(from_s: i64, length_s: i64, types: &[(&str, &str)], values: &[i64]) -> Profile {
        let mut texts = vec![String::new(), "f".to_owned()];
        let mut place = |text: &str| {
            texts.push(text.to_owned());
            i64::try_from(texts.len() - 1).unwrap()
        };
        let sample_type = types
            .iter()
            .map(|(name, unit)| ValueType { r#type: place(name), unit: place(unit) })
            .collect();
        Profile {
            sample_type,
            sample: vec![Sample { location_id: vec![1], value: values.to_vec(), label: vec![] }],
            location: vec![Location {
                id: 1,
                line: vec![Line { function_id: 1, ..Line::default() }],
                ..Location::default()
            }],
            function: vec![Function { id: 1, name: 1, ..Function::default() }],
            string_table: texts,
            time_nanos: from_s * SECOND,
            duration_nanos: length_s * SECOND,
            ..Profile::default()
        }
    }

    fn merged(profiles: &[Profile], each_moment: bool) -> Result<MergedProfile, ReportError> {
        let mut all = ProfileMerger::new();
        for (at, profile) in profiles.iter().enumerate() {
            all.add(profile, &format!("file {at}"))?;
        }
        all.finish(each_moment, None)
    }

    /// The heading of the table of the default type, and what is said.
    fn said(profiles: &[Profile]) -> (String, Vec<String>) {
        let MergedProfile { profile, windows, remarks } = merged(profiles, false).unwrap();
        let sample_type = ProfileStacks::new(&profile).default_sample_type().to_owned();
        (lines(&profile, &windows, &sample_type, &[], 9).swap_remove(0), remarks)
    }

    const NS: (&str, &str) = ("cpu", "nanoseconds");

    #[test]
    fn a_type_in_units_of_one_kind_is_summed_in_the_finest() {
        let first = of_types(10, 1, &[NS], &[SECOND]);
        let second = of_types(20, 1, &[("cpu", "milliseconds")], &[1000]);
        for files in [[first.clone(), second.clone()], [second, first]] {
            let (heading, remarks) = said(&files);
            assert_eq!(heading, "cpu: total 2 s in 2 s, 1 of 1 functions");
            assert_eq!(remarks, [""; 0]);
        }
    }

    /// As pprof does.
    #[test]
    fn periods_of_different_types_are_refused() {
        let by_time = of_types(10, 1, &[NS], &[1]);
        let kind = by_time.sample_type[0];
        let timed = Profile { period_type: Some(kind), ..by_time.clone() };
        let error = merged(&[timed.clone(), by_time], false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "file 1 cannot be shown with the files before it: its period is of type none, theirs \
             of type cpu"
        );
        assert!(merged(&[timed.clone(), timed], false).is_ok());
    }

    #[test]
    fn a_type_in_units_of_different_kinds_is_refused_unless_it_is_left_out() {
        let first = of_types(10, 1, &[NS, ("n", "count")], &[1, 2]);
        let counts = of_types(20, 1, &[("cpu", "count"), ("n", "count")], &[1, 2]);
        let error = merged(&[first.clone(), counts.clone()], false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "file 1 cannot be shown with the files before it: its `cpu` is in count, theirs in \
             nanoseconds, and none can be converted"
        );
        let (heading, remarks) = said(&[first, counts, of_types(30, 1, &[("n", "count")], &[3])]);
        assert_eq!(heading, "n: total 7 in 3 s, 1 of 1 functions");
        assert_eq!(remarks, ["sample types that not all files have are left out: cpu (in 2 of 3)"]);
    }

    #[test]
    fn types_that_all_files_have_are_shown_and_files_without_any_are_refused() {
        let cpu = of_types(10, 1, &[NS], &[SECOND]);
        let two = of_types(20, 1, &[NS, ("wall", "nanoseconds")], &[SECOND, 5 * SECOND]);
        for files in [[cpu.clone(), two.clone()], [two, cpu.clone()]] {
            let (heading, remarks) = said(&files);
            assert_eq!(heading, "cpu: total 2 s in 2 s, 1 of 1 functions");
            assert_eq!(
                remarks,
                ["sample types that not all files have are left out: wall (in 1 of 2)"]
            );
        }
        let other = of_types(20, 1, &[("alloc_space", "bytes"), ("", "count")], &[1, 2]);
        assert_eq!(
            merged(&[cpu, other], false).unwrap_err().to_string(),
            "file 1 cannot be shown with the files before it: no sample type is in common; it has \
             alloc_space, (empty), all of them have cpu"
        );
    }

    #[test]
    fn where_one_file_has_no_duration_there_are_no_rates() {
        let (heading, remarks) =
            said(&[of_types(10, 1, &[NS], &[SECOND]), of_types(20, 0, &[NS], &[SECOND])]);
        assert_eq!(heading, "cpu: total 2 s, the profile names no duration, 1 of 1 functions");
        assert_eq!(
            remarks,
            ["1 of 2 files names no duration: of the whole neither time nor rate is known"]
        );
        // Of one window, too.
        for lengths in [[1, 0], [0, 1]] {
            let files = lengths.map(|length| of_types(10, length, &[NS], &[SECOND]));
            let windows = merged(&files, true).unwrap().windows;
            assert_eq!(windows.into_values().collect::<Vec<_>>(), [0]);
        }
    }

    #[test]
    fn a_file_without_a_time_is_in_no_window_and_its_time_counts_beside_others() {
        let alive = ("inuse_space", "bytes");
        let files = [
            of_types(0, 1, &[NS, alive], &[SECOND, 1]),
            of_types(-5, 1, &[NS, alive], &[SECOND, 2]),
            of_types(10, 1, &[NS, alive], &[SECOND, 4]),
            of_types(20, 1, &[NS, alive], &[SECOND, 8]),
        ];
        let MergedProfile { profile, windows, remarks } = merged(&files, false).unwrap();
        let heading = |sample_type| lines(&profile, &windows, sample_type, &[], 9).swap_remove(0);
        assert_eq!(heading("cpu"), "cpu: total 4 s in 4 s, 1 of 1 functions");
        assert_eq!(heading("inuse_space"), "inuse_space: total 11 B, 1 of 1 functions");
        assert_eq!(
            remarks,
            ["2 of 4 files name no time: what was alive counts as of the last moment"]
        );
        assert_eq!(profile.time_nanos, 10 * SECOND);
        let by_window = lines(&profile, &windows, "cpu", &["window"], 9);
        assert_eq!(by_window[2], "2 s 50.0% ? (none)", "{by_window:#?}");
        assert_eq!(by_window[3], "1 s 25.0% 1 s 1970-01-01T00:00:10.000Z", "{by_window:#?}");
        // Nothing to order: no word of it.
        let (heading, remarks) = said(&files[..2]);
        assert_eq!(heading, "inuse_space: total 3 B, 1 of 1 functions");
        assert_eq!(remarks, [""; 0]);
    }
}
