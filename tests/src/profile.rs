//! A decoded pprof and questions to it. The message types are written down here again on purpose
//! (field numbers of google/pprof's `profile.proto`): a test that reads with the code that wrote
//! would not see a wrong field number.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, ensure};
use prost::Message as _;

mod proto {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Profile {
        #[prost(message, repeated, tag = "1")]
        pub(super) sample_type: Vec<ValueType>,
        #[prost(message, repeated, tag = "2")]
        pub(super) sample: Vec<Sample>,
        #[prost(message, repeated, tag = "3")]
        pub(super) mapping: Vec<Mapping>,
        #[prost(message, repeated, tag = "4")]
        pub(super) location: Vec<Location>,
        #[prost(message, repeated, tag = "5")]
        pub(super) function: Vec<Function>,
        #[prost(string, repeated, tag = "6")]
        pub(super) string_table: Vec<String>,
        #[prost(int64, tag = "9")]
        pub(super) time_nanos: i64,
        #[prost(int64, tag = "10")]
        pub(super) duration_nanos: i64,
        #[prost(int64, repeated, tag = "13")]
        pub(super) comment: Vec<i64>,
        #[prost(int64, tag = "14")]
        pub(super) default_sample_type: i64,
    }
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct ValueType {
        #[prost(int64, tag = "1")]
        pub(super) r#type: i64,
        #[prost(int64, tag = "2")]
        pub(super) unit: i64,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Sample {
        #[prost(uint64, repeated, tag = "1")]
        pub(super) location_id: Vec<u64>,
        #[prost(int64, repeated, tag = "2")]
        pub(super) value: Vec<i64>,
        #[prost(message, repeated, tag = "3")]
        pub(super) label: Vec<Label>,
    }
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Label {
        #[prost(int64, tag = "1")]
        pub(super) key: i64,
        #[prost(int64, tag = "2")]
        pub(super) str: i64,
        #[prost(int64, tag = "3")]
        pub(super) num: i64,
    }
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Mapping {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(int64, tag = "5")]
        pub(super) filename: i64,
        #[prost(int64, tag = "6")]
        pub(super) build_id: i64,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Location {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(uint64, tag = "2")]
        pub(super) mapping_id: u64,
        #[prost(uint64, tag = "3")]
        pub(super) address: u64,
        #[prost(message, repeated, tag = "4")]
        pub(super) line: Vec<Line>,
    }
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Line {
        #[prost(uint64, tag = "1")]
        pub(super) function_id: u64,
        #[prost(int64, tag = "2")]
        pub(super) line: i64,
    }
    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub(super) struct Function {
        #[prost(uint64, tag = "1")]
        pub(super) id: u64,
        #[prost(int64, tag = "2")]
        pub(super) name: i64,
        #[prost(int64, tag = "3")]
        pub(super) system_name: i64,
        #[prost(int64, tag = "4")]
        pub(super) filename: i64,
        #[prost(int64, tag = "5")]
        pub(super) start_line: i64,
    }
}

/// One frame of a stack.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Frame {
    /// Function name; empty when the location has no line.
    pub function: String,
    /// File of the location's mapping; empty without one.
    pub mapping: String,
    /// Location id within the profile.
    pub location: u64,
    /// Where its source is.
    pub source: Source,
}

/// A place in a source file.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    /// The file; empty when the profile does not say.
    pub file: String,
    /// The first line of the function; 0 when the profile does not say.
    pub start_line: i64,
    /// The line; 0 when the profile does not say.
    pub line: i64,
}

impl Frame {
    /// True in the C library, whichever it is: glibc's, Debian's musl by the C library's name, or
    /// Alpine's by its loader's.
    pub fn is_of_libc(&self) -> bool {
        is_libc(&self.mapping)
    }
}

/// True for the path, or for the name, of a C library: see [`Frame::is_of_libc`].
pub fn is_libc(mapping: &str) -> bool {
    ["libc.so", "libc-", "ld-musl-"].iter().any(|name| mapping.contains(name))
}

/// One sample: a stack, its labels and a value per sample type.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Root first.
    pub stack: Vec<Frame>,
    /// String labels, and numeric ones as decimal text.
    pub labels: BTreeMap<String, String>,
    values: Vec<i64>,
}

impl Sample {
    /// A sample from elsewhere: root first, values in the profile's order of types.
    pub fn new(stack: Vec<Frame>, labels: BTreeMap<String, String>, values: Vec<i64>) -> Self {
        Self { stack, labels, values }
    }

    /// The label `key`, or "".
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }

    /// True when a frame's function contains `part`.
    pub fn has(&self, part: &str) -> bool {
        self.stack.iter().any(|frame| frame.function.contains(part))
    }

    /// Function names joined by `;`, root first.
    pub fn text(&self) -> String {
        let names: Vec<&str> = self.stack.iter().map(|frame| frame.function.as_str()).collect();
        names.join(";")
    }

    /// Positions in the stack of the frames whose function contains each of `parts`, in order root
    /// to leaf; `None` when they are not all there in this order.
    pub fn positions(&self, parts: &[&str]) -> Option<Vec<usize>> {
        let mut found = Vec::new();
        let mut from = 0;
        for part in parts {
            let at = self
                .stack
                .iter()
                .enumerate()
                .skip(from)
                .find(|(_, frame)| frame.function.contains(part))?
                .0;
            found.push(at);
            from = at + 1;
        }
        Some(found)
    }
}

/// Where code is that a profile names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedCode {
    /// Its address, as the location has it.
    pub address: u64,
    /// File of the location's mapping; empty without one.
    pub mapping: String,
    /// The name as the symbol table or the runtime has it.
    pub system_name: String,
}

/// A decoded profile.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name and unit of each column, in the file's order.
    pub types: Vec<(String, String)>,
    /// The column shown first.
    pub default_type: String,
    /// All samples.
    pub samples: Vec<Sample>,
    /// Comment lines.
    pub comments: Vec<String>,
    /// When the recording began, in nanoseconds of wall-clock time.
    pub time_ns: i64,
    /// Length of the recording in nanoseconds.
    pub duration_ns: i64,
    /// The code that its locations are, and the function of each that a symbol names: others may be
    /// part of it.
    pub code: Vec<NamedCode>,
}

impl Profile {
    /// A profile from elsewhere: columns that count something.
    pub fn from_samples(types: &[&str], samples: Vec<Sample>) -> Self {
        Self {
            types: types.iter().map(|name| ((*name).to_owned(), "count".to_owned())).collect(),
            default_type: String::new(),
            samples,
            comments: Vec::new(),
            time_ns: 0,
            duration_ns: 0,
            code: Vec::new(),
        }
    }

    /// Reads a gzipped pprof file.
    ///
    /// # Errors
    /// When the file cannot be read, is no gzip, no pprof, or refers to what is not there.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let packed = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(packed.as_slice())
            .read_to_end(&mut bytes)
            .context("not gzip")?;
        let raw = proto::Profile::decode(bytes.as_slice()).context("not a pprof")?;
        Self::build(&raw)
    }

    fn build(raw: &proto::Profile) -> anyhow::Result<Self> {
        let text = |index: i64| -> anyhow::Result<String> {
            let index = usize::try_from(index)?;
            raw.string_table
                .get(index)
                .cloned()
                .with_context(|| format!("string {index} is not in the table"))
        };
        let functions = raw
            .function
            .iter()
            .map(|f| Ok((f.id, (text(f.name)?, text(f.filename)?, f.start_line))))
            .collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        let mappings = raw
            .mapping
            .iter()
            .map(|m| Ok((m.id, text(m.filename)?)))
            .collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        // Inlined native callers come as further lines of one location, innermost first: each is a
        // frame here.
        let mut locations: BTreeMap<u64, Vec<Frame>> = BTreeMap::new();
        let mut code = Vec::new();
        let system_names = raw
            .function
            .iter()
            .map(|f| Ok((f.id, text(if f.system_name == 0 { f.name } else { f.system_name })?)))
            .collect::<anyhow::Result<BTreeMap<_, _>>>()?;
        for location in &raw.location {
            let mapping = match location.mapping_id {
                0 => String::new(),
                id => mappings
                    .get(&id)
                    .cloned()
                    .with_context(|| format!("mapping {id} is not there"))?,
            };
            let function =
                location.line.last().and_then(|line| system_names.get(&line.function_id));
            if let Some(system_name) = function.cloned() {
                let (address, mapping) = (location.address, mapping.clone());
                code.push(NamedCode { address, mapping, system_name });
            }
            let mut frames = Vec::new();
            for line in location.line.iter().rev() {
                let function = functions.get(&line.function_id).cloned();
                let (function, file, start_line) = function
                    .with_context(|| format!("function {} is not there", line.function_id))?;
                let source = Source { file, start_line, line: line.line };
                let (mapping, location) = (mapping.clone(), location.id);
                frames.push(Frame { function, mapping, location, source });
            }
            if frames.is_empty() {
                frames.push(Frame {
                    function: String::new(),
                    mapping,
                    location: location.id,
                    source: Source::default(),
                });
            }
            locations.insert(location.id, frames);
        }
        let mut samples = Vec::with_capacity(raw.sample.len());
        for sample in &raw.sample {
            ensure!(
                sample.value.len() == raw.sample_type.len(),
                "{} values, {} types",
                sample.value.len(),
                raw.sample_type.len()
            );
            let mut stack = Vec::new();
            for id in sample.location_id.iter().rev() {
                stack.extend(
                    locations
                        .get(id)
                        .with_context(|| format!("location {id} is not there"))?
                        .iter()
                        .cloned(),
                );
            }
            let mut labels = BTreeMap::new();
            for label in &sample.label {
                let value = if label.str == 0 { label.num.to_string() } else { text(label.str)? };
                labels.insert(text(label.key)?, value);
            }
            samples.push(Sample { stack, labels, values: sample.value.clone() });
        }
        Ok(Self {
            types: raw
                .sample_type
                .iter()
                .map(|t| Ok((text(t.r#type)?, text(t.unit)?)))
                .collect::<anyhow::Result<_>>()?,
            default_type: text(raw.default_sample_type)?,
            samples,
            comments: raw
                .comment
                .iter()
                .map(|index| text(*index))
                .collect::<anyhow::Result<_>>()?,
            time_ns: raw.time_nanos,
            duration_ns: raw.duration_nanos,
            code,
        })
    }

    /// The value of `sample` in the column `sample_type`; 0 when there is no such column.
    pub fn value(&self, sample: &Sample, sample_type: &str) -> i64 {
        let column = self.types.iter().position(|(name, _)| name == sample_type);
        column.and_then(|column| sample.values.get(column)).copied().unwrap_or(0)
    }

    /// Sum of a column over the samples that fit.
    pub fn sum(&self, sample_type: &str, fits: impl Fn(&Sample) -> bool) -> i64 {
        self.samples
            .iter()
            .filter(|sample| fits(sample))
            .map(|sample| self.value(sample, sample_type))
            .sum()
    }

    /// Sum of a column per value of a label.
    pub fn sum_by(&self, sample_type: &str, label: &str) -> BTreeMap<String, i64> {
        let mut sums = BTreeMap::new();
        for sample in &self.samples {
            *sums.entry(sample.label(label).to_owned()).or_insert(0) +=
                self.value(sample, sample_type);
        }
        sums
    }

    /// Sum of a column per stack text among the samples that fit, largest first.
    pub fn stacks(&self, sample_type: &str, fits: impl Fn(&Sample) -> bool) -> Vec<(String, i64)> {
        let mut sums: BTreeMap<String, i64> = BTreeMap::new();
        for sample in self.samples.iter().filter(|sample| fits(sample)) {
            *sums.entry(sample.text()).or_insert(0) += self.value(sample, sample_type);
        }
        let mut list: Vec<(String, i64)> =
            sums.into_iter().filter(|(_, value)| *value != 0).collect();
        list.sort_by_key(|(_, value)| std::cmp::Reverse(*value));
        list
    }

    /// Ids of the locations in samples with a value in `sample_type` whose function contains
    /// `part`.
    pub fn locations(&self, sample_type: &str, part: &str) -> BTreeSet<u64> {
        let with_value = self.samples.iter().filter(|sample| self.value(sample, sample_type) > 0);
        let frames = with_value.flat_map(|sample| &sample.stack);
        frames.filter(|frame| frame.function.contains(part)).map(|frame| frame.location).collect()
    }

    /// All function names.
    pub fn functions(&self) -> BTreeSet<&str> {
        self.samples
            .iter()
            .flat_map(|sample| &sample.stack)
            .map(|frame| frame.function.as_str())
            .collect()
    }

    /// The number in the comment line `name: value`; 0 for a counter of docs/metrics.md without
    /// one, since those at 0 are left out.
    pub fn counter(&self, name: &str) -> Option<i64> {
        let stated = self.comments.iter().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            let number = value.split_whitespace().next()?;
            (key.trim() == name).then(|| number.parse().ok()).flatten()
        });
        let is_counter =
            || include_str!("../../docs/metrics.md").contains(&format!("| `{name}` |"));
        stated.or_else(|| is_counter().then_some(0))
    }

    /// A picture for failure messages: columns, comments and the largest stacks of `sample_type`
    /// among those that fit.
    pub fn describe(&self, sample_type: &str, fits: impl Fn(&Sample) -> bool) -> String {
        let mut text = format!("{} samples, {} ns\n", self.samples.len(), self.duration_ns);
        for comment in &self.comments {
            text += &format!("  # {comment}\n");
        }
        for (stack, value) in self.stacks(sample_type, fits).into_iter().take(25) {
            text += &format!("{value:>14} {stack}\n");
        }
        text
    }
}
