//! A profile as reports see it: samples as stacks of named frames with their kind, values of one or
//! all types, labels.

use super::ReportError;
use super::label_name::as_typed;
use perfusion_model::frame::Marker;
use perfusion_model::text::clean;
use perfusion_pprof::proto::{Label, Line, Location, Profile, Sample};
use perfusion_pprof::{KERNEL_MAPPING, LIMITED, LOSS_PREFIX, MANAGED_MAPPING, WITHOUT_SHIM, read};
use perfusion_sources::shim::{NOT_ALL_RECORDED, NOT_RECORDED};
use perfusion_symbolize::marker_name;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

/// What kind of code a frame is, by its mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CodeKind {
    /// Kernel code.
    Kernel,
    /// Native code of a file.
    Native,
    /// Managed code and runtime stubs.
    Managed,
    /// Not code: the collector's parent frame, the profiler's remarks.
    Note,
    /// Code of which another tool's profile names no file.
    Code,
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReportFrame<'a> {
    /// Function name, control characters escaped.
    pub name: Cow<'a, str>,
    /// File name of the mapping, without directories; empty when there is none.
    pub module: &'a str,
    /// Kind of code.
    pub kind: CodeKind,
    /// Where its source is, in what [`ProfileStacks::of_sources`] makes.
    pub source: Option<FrameSource<'a>>,
}

/// A line of source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameSource<'a> {
    /// The file, as the compiler was told it.
    pub file: &'a str,
    /// The line.
    pub line: i64,
    /// The first line of the function; 0 where the profile does not say.
    pub start_line: i64,
}

/// How functions and their lines are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineDetail {
    /// Lines are not.
    None,
    /// By the frame's name.
    Name,
    /// By the frame's source.
    Source,
}

/// What of a profile to show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileView {
    /// Parked threads (`wait_kind=idle`) too.
    pub idle: bool,
    /// Only samples with these labels.
    pub only: Vec<LabelFilter>,
    /// Labels to group by, the outermost first.
    pub by: Vec<String>,
    /// Lines of functions apart.
    pub lines: bool,
}

/// A label and the value it must have; an empty value asks for samples without the label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelFilter {
    /// Name of the label, or `thread` or `process`.
    pub label: String,
    /// Its value.
    pub value: String,
}

/// What stands for several labels, name before number: a name alone need not be unique, and a
/// number says little.
const TOGETHER: [(&str, [&str; 2]); 2] =
    [("thread", ["thread_name", "thread_id"]), ("process", ["process", "pid"])];

/// Beyond these frames of a wait are those of another thread: who ended it, who held the lock.
const EDGES: [&str; 2] = [marker_name(Marker::WokenBy), marker_name(Marker::HeldBy)];

/// Most values named where one is asked for that is not there.
const VALUES_SHOWN: usize = 20;

/// How samples without the label are called that one groups by.
pub(crate) const WITHOUT: &str = "(none)";

/// How a sample type without a name and a text label without text are called.
const EMPTY: &str = "(empty)";

/// How pprof calls a function of which nothing is known.
const UNKNOWN: &str = "<unknown>";

/// The label that `go tool pprof -diff_base` puts on the samples that were subtracted.
const BASE: &str = "pprof::base";

/// Sums of a sample type over some samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignedTotal {
    /// Sum of the values above zero.
    pub up: i128,
    /// Sum of the values below zero: a profile may be the difference of two.
    pub down: i128,
    /// Sum without signs of those that were subtracted, where samples say so.
    base: i128,
}

impl SignedTotal {
    fn add(&mut self, value: i64, is_base: bool) {
        let value = i128::from(value);
        if value < 0 {
            self.down += value;
        } else {
            self.up += value;
        }
        if is_base {
            self.base += value.abs();
        }
    }

    /// What percentages are of. As `go tool pprof` has it: the sum without signs; of a difference
    /// to a known base, the base.
    #[must_use]
    pub const fn whole(&self) -> i128 {
        if self.base > 0 { self.base } else { self.up - self.down }
    }

    /// The sum with signs.
    #[must_use]
    pub const fn net(&self) -> i128 {
        self.up + self.down
    }
}

/// The samples of a view with their values.
#[derive(Debug, Default)]
pub struct ViewedSamples<'a> {
    /// Each sample that has a value, and its value.
    pub values: Vec<(&'a Sample, i64)>,
    /// Their sums.
    pub total: SignedTotal,
    /// The sum of those that are left out because their thread was parked.
    pub idle: i128,
}

/// A profile with its tables indexed.
pub struct ProfileStacks<'a> {
    profile: &'a Profile,
    /// This program has recorded it.
    ours: bool,
    /// Frames of each location, innermost first, by location id.
    locations: HashMap<u64, Vec<ReportFrame<'a>>>,
}

impl<'a> ProfileStacks<'a> {
    /// Indexes a profile that was validated.
    #[must_use]
    pub fn new(profile: &'a Profile) -> Self {
        Self::with_lines(profile, LineDetail::None)
    }

    /// The same for a view: where it has lines, they are in the names of frames.
    #[must_use]
    pub fn viewed(profile: &'a Profile, view: &ProfileView) -> Self {
        Self::with_lines(profile, if view.lines { LineDetail::Name } else { LineDetail::None })
    }

    /// The same with frames that say where their source is.
    #[must_use]
    pub fn of_sources(profile: &'a Profile) -> Self {
        Self::with_lines(profile, LineDetail::Source)
    }

    fn with_lines(profile: &'a Profile, lines: LineDetail) -> Self {
        let functions: HashMap<u64, &str> = profile
            .function
            .iter()
            .map(|function| (function.id, text(profile, function.name)))
            .collect();
        let sources: HashMap<u64, (&str, i64)> = match lines {
            LineDetail::None => HashMap::new(),
            LineDetail::Name | LineDetail::Source => profile
                .function
                .iter()
                .map(|function| {
                    (function.id, (text(profile, function.filename), function.start_line))
                })
                .filter(|(_, (file, _))| !file.is_empty())
                .collect(),
        };
        let source = |line: &Line| {
            let &(file, start_line) = sources.get(&line.function_id)?;
            (line.line > 0).then_some(FrameSource { file, line: line.line, start_line })
        };
        let with_source = |mut frame: ReportFrame<'a>, line: &Line| {
            match (lines, source(line)) {
                (LineDetail::Name, Some(FrameSource { file, line, .. })) => {
                    let name = file.rsplit(['/', '\\']).next().unwrap_or(file);
                    frame.name = format!("{} {}:{line}", frame.name, clean(name)).into();
                }
                (LineDetail::Source, source) => frame.source = source,
                _ => {}
            }
            frame
        };
        let mappings: HashMap<u64, &str> = profile
            .mapping
            .iter()
            .map(|mapping| (mapping.id, text(profile, mapping.filename)))
            .collect();
        let ours = read::is_ours(profile);
        // To pprof a function is its name. What has one name is one function here, too, if it is
        // another tool's: in the first of its files.
        let mut of_names: HashMap<&str, (CodeKind, &str)> = HashMap::new();
        let mut frames = |location: &Location| -> Vec<ReportFrame<'a>> {
            let file = mappings.get(&location.mapping_id).copied();
            let module = file.map_or("", |file| file.rsplit('/').next().unwrap_or(file));
            if ours {
                let kind = file.map_or(CodeKind::Note, kind);
                let frame = |name| ReportFrame { name, module, kind, source: None };
                if location.line.is_empty() {
                    return vec![frame(Cow::Owned(format!("0x{:x}", location.address)))];
                }
                let name = |id| functions.get(&id).copied().unwrap_or_default();
                return location
                    .line
                    .iter()
                    .map(|line| with_source(frame(clean(name(line.function_id))), line))
                    .collect();
            }
            let kind = foreign_kind(file.unwrap_or_default());
            let unnamed = || ReportFrame { name: unnamed(module), module, kind, source: None };
            let mut named = |name: &'a str| {
                let (kind, module) = *of_names.entry(name).or_insert((kind, module));
                ReportFrame { name: distinct(name), module, kind, source: None }
            };
            let mut named_frame = |line: &Line| {
                let name = functions.get(&line.function_id).copied();
                let name = name.filter(|name| !name.is_empty());
                with_source(name.map_or_else(unnamed, &mut named), line)
            };
            let mut frames: Vec<ReportFrame<'a>> =
                location.line.iter().map(&mut named_frame).collect();
            if frames.is_empty() {
                frames.push(unnamed());
            }
            frames
        };
        let locations =
            profile.location.iter().map(|location| (location.id, frames(location))).collect();
        Self { profile, ours, locations }
    }

    /// True where this program has recorded the profile: what it says of .NET is not true of
    /// others'.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        self.ours
    }

    /// Position of a sample type in the values of a sample.
    ///
    /// # Errors
    /// When the profile has no such type; the error lists those it has.
    pub fn sample_type(&self, name: &str) -> Result<usize, ReportError> {
        let found = self.sample_types().position(|(found, _)| found == name);
        found.ok_or_else(|| ReportError::NoSampleType {
            asked: clean(name).into_owned(),
            available: match self.sample_types().count() {
                0 => "none".to_owned(),
                _ => {
                    let names = self.sample_types().map(|(name, _)| shown_name(name));
                    names.collect::<Vec<_>>().join(", ")
                }
            },
        })
    }

    /// (name, unit) of each sample type.
    pub fn sample_types(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let profile = self.profile;
        profile
            .sample_type
            .iter()
            .map(move |each| (text(profile, each.r#type), text(profile, each.unit)))
    }

    /// Name of the sample type to show first.
    #[must_use]
    pub fn default_sample_type(&self) -> &'a str {
        let default = text(self.profile, self.profile.default_sample_type);
        let exists = self.sample_types().any(|(name, _)| name == default);
        // profile.proto: without a default it is the last one. A tool may name one that is not
        // there.
        match exists && !default.is_empty() {
            true => default,
            false => self.sample_types().last().map_or("", |(name, _)| name),
        }
    }

    /// All samples.
    pub fn samples(&self) -> impl Iterator<Item = &'a Sample> {
        self.profile.sample.iter()
    }

    /// The samples that have a value of one type and that `view` shows.
    #[must_use]
    pub fn values(&self, column: usize, view: &ProfileView) -> ViewedSamples<'a> {
        let mut values = ViewedSamples::default();
        for sample in self.samples() {
            let value = sample.value.get(column).copied().unwrap_or(0);
            if value == 0 || !self.is_asked(sample, &view.only) {
                continue;
            }
            if !view.idle && self.is_idle(sample) {
                values.idle += i128::from(value);
            } else {
                values.total.add(value, self.label(sample, BASE) == Some("true"));
                values.values.push((sample, value));
            }
        }
        values
    }

    /// Frames of a sample, innermost first.
    pub fn frames(&self, sample: &Sample) -> impl Iterator<Item = &ReportFrame<'a>> {
        sample.location_id.iter().filter_map(|id| self.locations.get(id)).flatten()
    }

    /// Frames of a sample as people want them, innermost first: neighbours without a name in one
    /// file become one frame with the file's name. (The runtime's libraries are stripped: ten
    /// addresses in a row would tell nobody anything.)
    pub(crate) fn readable_frames(&self, sample: &Sample) -> impl Iterator<Item = ReportFrame<'a>> {
        let mut last: Option<ReportFrame<'a>> = None;
        self.frames(sample).filter_map(move |frame| {
            let frame = ReportFrame { name: without_address(frame), ..frame.clone() };
            if frame.name.starts_with('[') && last.as_ref() == Some(&frame) {
                return None;
            }
            last = Some(frame.clone());
            Some(frame)
        })
    }

    /// The same without those of another thread, which stand beyond a waiting stack.
    #[must_use]
    pub(crate) fn own_readable_frames(&self, sample: &Sample) -> Vec<ReportFrame<'a>> {
        let mut frames: Vec<ReportFrame<'a>> = self.readable_frames(sample).collect();
        let is_edge = |frame: &ReportFrame<'_>| {
            self.ours && frame.kind == CodeKind::Note && EDGES.contains(&&*frame.name)
        };
        if let Some(edge) = frames.iter().rposition(is_edge) {
            frames.drain(..=edge);
        }
        frames
    }

    /// Text of a label, if the sample has it.
    #[must_use]
    pub fn label(&self, sample: &Sample, key: &str) -> Option<&'a str> {
        let label = sample.label.iter().find(|label| text(self.profile, label.key) == key)?;
        Some(text(self.profile, label.str))
    }

    /// Number of a label, if the sample has it as a number.
    #[must_use]
    pub fn number(&self, sample: &Sample, key: &str) -> Option<i64> {
        let label = sample.label.iter().find(|label| text(self.profile, label.key) == key)?;
        (label.str == 0).then_some(label.num)
    }

    /// Value of a label as people read it; `thread` and `process` are name and number.
    #[must_use]
    pub fn group(&self, sample: &Sample, by: &str) -> Option<Cow<'a, str>> {
        let Some((_, parts)) = TOGETHER.iter().find(|(name, _)| *name == by) else {
            return self.shown(sample, by);
        };
        let [name, number] = parts.map(|part| self.shown(sample, part));
        match (name, number) {
            // Another tool may have a label of that name.
            (name, None) => name.or_else(|| self.shown(sample, by)),
            (name, Some(number)) => {
                Some(Cow::Owned(format!("{} {number}", name.as_deref().unwrap_or(by))))
            }
        }
    }

    /// Values of several labels as people read them.
    #[must_use]
    pub fn groups(&self, sample: &Sample, by: &[String]) -> Vec<Cow<'a, str>> {
        by.iter().map(|label| self.group(sample, label).unwrap_or(WITHOUT.into())).collect()
    }

    /// Value of one label, control characters escaped; of several labels of one name texts before
    /// numbers, as pprof has them.
    fn shown(&self, sample: &Sample, key: &str) -> Option<Cow<'a, str>> {
        let mut values = self.values_of(sample, key);
        let first = values.next()?;
        let Some(second) = values.next() else { return Some(first) };
        Some(Cow::Owned([first, second].into_iter().chain(values).collect::<Vec<_>>().join(", ")))
    }

    /// The values of all labels of one name.
    fn values_of<'s>(
        &'s self,
        sample: &'s Sample,
        key: &'s str,
    ) -> impl Iterator<Item = Cow<'a, str>> + 's {
        let labels =
            move || sample.label.iter().filter(move |label| text(self.profile, label.key) == key);
        let texts = labels().filter(|label| label.str != 0);
        texts.chain(labels().filter(|label| label.str == 0)).map(|label| self.value_of(label))
    }

    fn value_of(&self, label: &Label) -> Cow<'a, str> {
        if label.str != 0 {
            return match text(self.profile, label.str) {
                "" => Cow::Borrowed(EMPTY),
                text => clean(text),
            };
        }
        Cow::Owned(match text(self.profile, label.num_unit) {
            "" => label.num.to_string(),
            unit => format!("{} {}", label.num, clean(unit)),
        })
    }

    /// True where a sample is as asked.
    #[must_use]
    pub fn is_asked(&self, sample: &Sample, only: &[LabelFilter]) -> bool {
        only.iter().all(|LabelFilter { label, value }| {
            let whole = self.group(sample, label);
            let parts =
                TOGETHER.iter().find(|(name, _)| name == label).map_or(&[][..], |(_, parts)| parts);
            match &whole {
                None => value.is_empty(),
                Some(whole) => {
                    whole == value
                        || self
                            .number(sample, label)
                            .is_some_and(|number| number.to_string() == *value)
                        || parts
                            .iter()
                            .any(|part| self.shown(sample, part).is_some_and(|part| part == *value))
                        || self.values_of(sample, label).any(|one| one == *value)
                }
            }
        })
    }

    /// Checks that the profile has the labels and values `view` asks for.
    ///
    /// # Errors
    /// For one that no sample has; the error lists those there are.
    pub fn check(&self, view: &ProfileView) -> Result<(), ReportError> {
        let mut labels: BTreeSet<&str> = self
            .samples()
            .flat_map(|sample| &sample.label)
            .map(|label| text(self.profile, label.key))
            .collect();
        for (name, parts) in TOGETHER {
            if parts.iter().any(|part| labels.contains(part)) {
                labels.insert(name);
            }
        }
        let mut asked = view.only.iter().map(|only| &only.label).chain(&view.by);
        match asked.find(|label| !labels.contains(label.as_str())) {
            None => view.only.iter().try_for_each(|only| self.check_value(only)),
            Some(label) => Err(ReportError::NoLabel {
                asked: clean(label).into_owned(),
                available: match labels.is_empty() {
                    true => "none".to_owned(),
                    false => labels.into_iter().map(as_typed).collect::<Vec<_>>().join(", "),
                },
            }),
        }
    }

    fn check_value(&self, only: &LabelFilter) -> Result<(), ReportError> {
        let found = self.samples().any(|sample| self.is_asked(sample, std::slice::from_ref(only)));
        // Without a value: samples that have no such label. That there are none is an answer.
        if found || only.value.is_empty() {
            return Ok(());
        }
        let values: BTreeSet<_> =
            self.samples().filter_map(|sample| self.group(sample, &only.label)).collect();
        let more = values.len().saturating_sub(VALUES_SHOWN);
        let mut available = values.into_iter().take(VALUES_SHOWN).collect::<Vec<_>>().join(", ");
        if more > 0 {
            write!(available, " and {more} more (--by {})", as_typed(&only.label))
                .unwrap_or_default();
        }
        let (label, asked) = (clean(&only.label).into_owned(), clean(&only.value).into_owned());
        Err(ReportError::NoValue { label, asked, available })
    }

    /// What the recording says it lacks, of rights and of processes without a shim.
    pub fn lacks(&self) -> impl Iterator<Item = Cow<'a, str>> {
        self.comments()
            .filter(|comment| comment.starts_with(LIMITED) || comment.starts_with(WITHOUT_SHIM))
    }

    /// True for the time of a thread that was parked for want of work.
    #[must_use]
    pub(crate) fn is_idle(&self, sample: &Sample) -> bool {
        self.ours && self.label(sample, "wait_kind") == Some("idle")
    }

    /// All comments, control characters escaped.
    pub fn comments(&self) -> impl Iterator<Item = Cow<'a, str>> {
        let profile = self.profile;
        profile.comment.iter().map(move |&comment| clean(text(profile, comment)))
    }

    /// What the comments say of a counter, all of them together.
    fn counter(&self, name: &str) -> u64 {
        let of = |comment: Cow<'_, str>| -> Option<u64> {
            let (key, value) = comment.split_once(": ")?;
            (key == name).then(|| value.split(' ').next()?.parse().ok()).flatten()
        };
        self.comments().filter_map(of).fold(0, u64::saturating_add)
    }

    /// That numbers of a sample type are estimates, since of so many that there were some stand for
    /// others. Of allocations and waits other parts of the profile say so.
    #[must_use]
    pub fn estimated(&self, sample_type: &str) -> Option<String> {
        let (what, all, downsampled) = match sample_type {
            "exceptions" => ("exceptions", "shim_exceptions", "shim_exceptions_downsampled"),
            "contentions" | "delay" => {
                ("waits for locks", "shim_contentions", "shim_contentions_downsampled")
            }
            _ => return None,
        };
        let (all, downsampled) = (self.counter(all), self.counter(downsampled));
        let told = all.saturating_sub(downsampled);
        // The column sums to what the runtimes counted, where all of that is in it. Nobody counts
        // the delay.
        let is_exact = sample_type != "delay" && self.sum(sample_type) == i64::try_from(all).ok();
        let sum = if is_exact { "the sum is exact, its parts are " } else { "" };
        (downsampled > 0).then(|| {
            format!(
                "{sum}an estimate: of {all} {what} chance chose {told} to be told of, each of \
                 which stands \
                 for others, too"
            )
        })
    }

    /// The sum of a column.
    fn sum(&self, sample_type: &str) -> Option<i64> {
        let at = self.sample_type(sample_type).ok()?;
        let values = self.profile.sample.iter().filter_map(|sample| sample.value.get(at));
        Some(values.fold(0, |sum: i64, value| sum.saturating_add(*value)))
    }

    /// The comment that nothing of a sample type was recorded.
    #[must_use]
    pub(crate) fn not_recorded(&self, sample_type: &str) -> Option<Cow<'a, str>> {
        self.comments().find(|comment| is_about(comment, NOT_RECORDED, sample_type))
    }

    /// The comments that a sample type was not recorded of everything, or not all the time.
    pub(crate) fn partly_recorded(&self, sample_type: &str) -> impl Iterator<Item = Cow<'a, str>> {
        self.comments().filter(move |comment| {
            [NOT_RECORDED, NOT_ALL_RECORDED].iter().any(|what| is_about(comment, what, sample_type))
        })
    }

    /// What the loss lines say: of a profile that has one, and of each one of several that are
    /// shown together.
    pub fn losses(&self) -> impl Iterator<Item = String> {
        self.comments().filter_map(|comment| Some(comment.strip_prefix(LOSS_PREFIX)?.to_owned()))
    }

    /// Length of the recording, nanoseconds; `None` where the profile does not say.
    #[must_use]
    pub fn duration_ns(&self) -> Option<i64> {
        Some(self.profile.duration_nanos).filter(|&duration| duration > 0)
    }
}

/// `[libfoo.so]+0x1234` -> `[libfoo.so]`; any other name as it is.
fn without_address<'a>(frame: &ReportFrame<'a>) -> Cow<'a, str> {
    match frame.name.strip_prefix('[').and_then(|name| name.split_once("]+0x")) {
        Some((file, _)) if frame.kind == CodeKind::Native => Cow::Owned(format!("[{file}]")),
        _ => frame.name.clone(),
    }
}

/// True for a comment that says this of columns, the sample type's among them.
fn is_about(comment: &str, what: &str, sample_type: &str) -> bool {
    let columns = comment.split_once(what).map_or("", |(columns, _)| columns);
    columns.split(", ").any(|column| column == sample_type)
}

/// An entry of the string table; empty for an index outside it.
fn text(profile: &Profile, index: i64) -> &str {
    usize::try_from(index)
        .ok()
        .and_then(|index| profile.string_table.get(index))
        .map_or("", String::as_str)
}

/// Name or unit of a sample type, control characters escaped.
pub(crate) fn shown_name(name: &str) -> Cow<'_, str> {
    if name.is_empty() { Cow::Borrowed(EMPTY) } else { clean(name) }
}

/// What pprof calls a function without a name.
fn unnamed(module: &str) -> Cow<'_, str> {
    if module.is_empty() {
        Cow::Borrowed(UNKNOWN)
    } else {
        Cow::Owned(format!("[{}]", clean(module)))
    }
}

/// A name with control characters escaped, as [`clean`] does. What looks like such an escape
/// already is escaped itself: two names stay two.
fn distinct(name: &str) -> Cow<'_, str> {
    const ESCAPE: &str = "\\u{";
    // Blanks alone would be seen as no name at all.
    if name.trim().is_empty() {
        return Cow::Owned(name.chars().flat_map(char::escape_unicode).collect());
    }
    if name.contains(ESCAPE) {
        Cow::Owned(clean(&name.replace(ESCAPE, "\\u{5c}u{")).into_owned())
    } else {
        clean(name)
    }
}

/// The same of another tool's profile.
fn foreign_kind(file: &str) -> CodeKind {
    match file {
        "" => CodeKind::Code,
        _ if file.starts_with("[kernel") => CodeKind::Kernel,
        _ => CodeKind::Native,
    }
}

/// Native files have a path or a name in brackets; a managed module is a bare file name.
fn kind(file: &str) -> CodeKind {
    match file {
        KERNEL_MAPPING => CodeKind::Kernel,
        MANAGED_MAPPING => CodeKind::Managed,
        "" => CodeKind::Note,
        _ if file.starts_with("[kernel") => CodeKind::Kernel,
        _ if file.contains('/') || file.starts_with('[') => CodeKind::Native,
        _ => CodeKind::Managed,
    }
}
