//! Window -> gzipped pprof, and the way back.

use super::builder::ProfileBuilder;
use super::error::{PprofError, gunzip};
use super::proto::{Label, Profile, Sample};
use super::validate::{Checker, Invalid, validate};
use flate2::Compression;
use flate2::write::GzEncoder;
use perfusion_aggregate::Window;
use perfusion_aggregate::window::WindowEntry;
use perfusion_model::frame::ImageId;
use perfusion_model::labels::{LabelValue, Labels, SampleType};
use perfusion_symbolize::{ImageResolver, SymbolModule, Symbolizer};
use prost::Message;
use prost::encoding::{WireType, encode_key};
use std::io::Write;
use std::time::{Duration, SystemTime};

/// Field number of `Profile.sample`.
const SAMPLE_FIELD: u32 = 2;
/// Encoded samples are handed to the compressor in pieces of about this size.
const PIECE_BYTES: usize = 64 << 10;

/// The profile's own time, period, main image and comments.
#[derive(Clone, Debug)]
pub struct ProfileInfo {
    /// The moment when the window began.
    pub start: SystemTime,
    /// The length of the window.
    pub duration: Duration,
    /// CPU time between samples, nanoseconds.
    pub period_ns: u64,
    /// The program, where there is one: becomes the first mapping, which readers take for the main
    /// binary.
    pub main_image: Option<ImageId>,
    /// Rates, scaling, caveats, counters; one line each. The one that begins with
    /// [`super::LOSS_PREFIX`] is the loss line.
    pub comments: Vec<String>,
}

/// Encodes a window whose frames were resolved.
///
/// # Errors
/// When the result would break a rule of the format, which is a fault of this program.
pub fn encode(
    window: &Window,
    symbolizer: &Symbolizer,
    directory: &dyn ImageResolver,
    about: &ProfileInfo,
) -> Result<Vec<u8>, PprofError> {
    encode_entries(window.entries(), symbolizer, directory, about)
}

/// Encodes some entries of a window.
///
/// # Errors
/// When the result would break a rule of the format, which is a fault of this program.
pub fn encode_entries<'a>(
    entries: impl IntoIterator<Item = WindowEntry<'a>>,
    symbolizer: &Symbolizer,
    directory: &dyn ImageResolver,
    about: &ProfileInfo,
) -> Result<Vec<u8>, PprofError> {
    let mut builder = ProfileBuilder::new(symbolizer, directory);
    head(&mut builder, about);
    let mut checker = Checker::default();
    let mut output = GzEncoder::new(Vec::new(), Compression::fast());
    let mut piece = Vec::with_capacity(PIECE_BYTES * 2);
    let mut sample = Sample::default();
    let mut carry = [0.0; SampleType::COUNT];
    for entry in entries {
        if !fill(&mut sample, entry, &mut builder, &mut carry) {
            continue;
        }
        checker.sample(&sample)?;
        encode_key(SAMPLE_FIELD, WireType::LengthDelimited, &mut piece);
        sample.encode_length_delimited(&mut piece).map_err(|_| Invalid::TooLarge)?;
        if piece.len() >= PIECE_BYTES {
            output.write_all(&piece)?;
            piece.clear();
        }
    }
    let tables = builder.profile();
    checker.finish(tables)?;
    tables.encode(&mut piece).map_err(|_| Invalid::TooLarge)?;
    output.write_all(&piece)?;
    Ok(output.finish()?)
}

/// The same as a message, for those who change it. It takes several times what its bytes do.
///
/// # Errors
/// When the result would break a rule of the format, which is a fault of this program.
pub fn message<'a>(
    entries: impl IntoIterator<Item = WindowEntry<'a>>,
    symbolizer: &Symbolizer,
    directory: &dyn ImageResolver,
    about: &ProfileInfo,
) -> Result<Profile, PprofError> {
    let mut builder = ProfileBuilder::new(symbolizer, directory);
    head(&mut builder, about);
    let mut checker = Checker::default();
    let mut carry = [0.0; SampleType::COUNT];
    let mut samples = Vec::new();
    for entry in entries {
        let mut sample = Sample::default();
        if fill(&mut sample, entry, &mut builder, &mut carry) {
            checker.sample(&sample)?;
            samples.push(sample);
        }
    }
    let tables = builder.profile();
    checker.finish(tables)?;
    let mut profile = std::mem::take(tables);
    profile.sample = samples;
    Ok(profile)
}

/// Gzips a message.
///
/// # Errors
/// When the compressor fails.
pub fn pack(profile: &Profile) -> Result<Vec<u8>, PprofError> {
    let mut output = GzEncoder::new(Vec::new(), Compression::fast());
    output.write_all(&profile.encode_to_vec())?;
    Ok(output.finish()?)
}

/// Makes the sample of an entry; false when all its values are zero.
fn fill(
    sample: &mut Sample,
    entry: WindowEntry<'_>,
    builder: &mut ProfileBuilder<'_>,
    carry: &mut [f64; SampleType::COUNT],
) -> bool {
    sample.value.clear();
    sample.value.extend(entry.values.iter().zip(carry).map(|(&value, carry)| round(value, carry)));
    if sample.value.iter().all(|&value| value == 0) {
        return false;
    }
    sample.location_id.clear();
    sample.location_id.extend(entry.frames.iter().map(|&frame| builder.location(frame)));
    sample.label.clear();
    labels(builder, entry.labels, &mut sample.label);
    if let Some(sampled) = entry.sampled {
        labels(builder, &sampled.labels(), &mut sample.label);
    }
    true
}

/// Everything that does not depend on samples.
fn head(builder: &mut ProfileBuilder<'_>, about: &ProfileInfo) {
    let sample_type = SampleType::ALL
        .map(|sample_type| builder.value_type(sample_type.name(), sample_type.unit()))
        .to_vec();
    let period_type = builder.value_type(SampleType::Cpu.name(), SampleType::Cpu.unit());
    let comment = about
        .comments
        .iter()
        .map(|comment| builder.string(&perfusion_model::text::clean(comment)))
        .collect();
    if let Some(image) = about.main_image {
        builder.mapping(&SymbolModule::Image(image));
    }
    let since_epoch = about.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let profile = builder.profile();
    profile.default_sample_type = period_type.r#type;
    profile.sample_type = sample_type;
    profile.period_type = Some(period_type);
    profile.period = i64::try_from(about.period_ns).unwrap_or(i64::MAX);
    profile.time_nanos = i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX);
    profile.duration_nanos = i64::try_from(about.duration.as_nanos()).unwrap_or(i64::MAX);
    profile.comment = comment;
}

/// Rounds to the nearest integer after adding what earlier values of the column lost, and remembers
/// what this one loses.
fn round(value: f64, carry: &mut f64) -> i64 {
    if value <= 0.0 {
        return 0;
    }
    let wanted = value + *carry;
    let rounded = wanted.round().max(0.0);
    *carry = wanted - rounded;
    #[expect(clippy::as_conversions, reason = "saturates, and the window holds finite values only")]
    let rounded = rounded as i64;
    rounded
}

/// A label of no text. The format has no room for one: it would be the number 0.
const EMPTY: &str = "(empty)";

fn labels(builder: &mut ProfileBuilder<'_>, labels: &Labels, encoded: &mut Vec<Label>) {
    labels.each(|name, value| {
        let key = builder.string(name);
        encoded.push(match value {
            LabelValue::Text(text) => Label {
                key,
                str: builder.string(match &*perfusion_model::text::clean(text) {
                    "" => EMPTY,
                    text => text,
                }),
                ..Label::default()
            },
            LabelValue::Number(num, unit) => {
                Label { key, num, num_unit: builder.string(unit), ..Label::default() }
            }
        });
    });
}

/// Reads a profile back, gzipped or not, and checks it.
///
/// # Errors
/// When it is no pprof, breaks a rule of the format, or unpacks to more than 2 GiB.
pub fn decode(bytes: &[u8]) -> Result<Profile, PprofError> {
    let profile = unpack(bytes)?;
    validate(&profile)?;
    Ok(profile)
}

/// The same without a check, for what [`encode`] made: that was checked then.
///
/// # Errors
/// When it is no message of the kind, or unpacks to more than 2 GiB.
pub fn unpack(bytes: &[u8]) -> Result<Profile, PprofError> {
    Ok(Profile::decode(&*gunzip(bytes)?)?)
}
