//! A profile of any tool -> a [`Profile`] as `go tool pprof` would see it, or the reason pprof
//! gives for refusing it.
//!
//! What this program writes is strict ([`super::validate()`]); what it reads follows google/pprof's
//! reader (`profile/encode.go`, `profile/profile.go`, `profile/prune.go`,
//! `internal/driver/fetch.go`), since a file that opens there is expected to open here:
//! - a label may stand several times, with text and number, without key; a mapping that is not in
//!   the table is none;
//! - a default type that does not exist is none; a type that stands twice is dropped; frames that
//!   the profile wants dropped are;
//! - a function that has only a mangled name is shown with it demangled, and without parameters and
//!   template arguments;
//! - strings are bytes: those that are not UTF-8 are shown as `\xe9`, and stay different from each
//!   other.
//!
//! Where something is dropped or changed on the way, [`ReadProfile::remarks`] says so.

mod check;
mod expression;
mod prune;
mod wire;

use super::error::{PprofError, ReadRefusal, gunzip};
use super::proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};
use super::{LOSS_PREFIX, PERFUSION_PREFIX};
use perfusion_model::text::clean;
pub use prune::regex;
use std::collections::HashSet;
use std::fmt::Write as _;
use wire::{WireFields, WireValue};

/// Characters of a text that a refusal shows.
const SHOWN_CHARACTERS: usize = 60;

/// A profile that was read.
#[derive(Debug)]
pub struct ReadProfile {
    /// As pprof would see it. Labels may stand several times: it need not be valid in the sense of
    /// [`super::validate()`].
    pub profile: Profile,
    /// One sentence for each kind of thing that was dropped or changed.
    pub remarks: Vec<String>,
}

/// Reads a profile, gzipped or not.
///
/// # Errors
/// When pprof refuses it, too, or when it unpacks to more than 2 GiB.
pub fn read(bytes: &[u8]) -> Result<ReadProfile, PprofError> {
    let unpacked = gunzip(bytes)?;
    let mut reading = message(&unpacked)?;
    drop(unpacked);
    check::check(&mut reading)?;
    prune::prune(&mut reading);
    Ok(reading)
}

/// True for a profile that this program has written.
#[must_use]
pub fn is_ours(profile: &Profile) -> bool {
    profile.comment.iter().any(|&comment| {
        let comment = usize::try_from(comment).ok().and_then(|at| profile.string_table.get(at));
        comment.is_some_and(|text| {
            [PERFUSION_PREFIX, LOSS_PREFIX].iter().any(|ours| text.starts_with(ours))
        })
    })
}

fn message(bytes: &[u8]) -> Result<ReadProfile, ReadRefusal> {
    if bytes.is_empty() {
        return Err(ReadRefusal::Empty);
    }
    let (mut profile, mut strings) = (Profile::default(), Vec::new());
    let mut fields = WireFields(bytes);
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => profile.sample_type.push(value_type(value)?),
            2 => profile.sample.push(sample(value)?),
            3 => profile.mapping.push(mapping(value)?),
            4 => profile.location.push(location(value)?),
            5 => profile.function.push(function(value)?),
            6 => {
                strings.push(value.bytes()?);
                if let Some(first) = strings.first().filter(|first| !first.is_empty()) {
                    let text = String::from_utf8_lossy(first);
                    let found = clean(&text).chars().take(SHOWN_CHARACTERS).collect();
                    return Err(ReadRefusal::FirstString { found });
                }
            }
            7 => profile.drop_frames = value.signed()?,
            8 => profile.keep_frames = value.signed()?,
            9 if profile.time_nanos != 0 => return Err(ReadRefusal::Concatenated),
            9 => profile.time_nanos = value.signed()?,
            10 => profile.duration_nanos = value.signed()?,
            11 => profile.period_type = Some(value_type(value)?),
            12 => profile.period = value.signed()?,
            13 => value.signeds(&mut profile.comment)?,
            14 => profile.default_sample_type = value.signed()?,
            15 => profile.doc_url = value.signed().unwrap_or(0),
            _ => {}
        }
    }
    let mut remarks = Vec::new();
    profile.string_table = texts(&strings, &mut remarks);
    Ok(ReadProfile { profile, remarks })
}

/// Strings that are not UTF-8 with `\xe9` in place of each wrong byte. One that would be another
/// string of the table then gets a mark more.
fn texts(strings: &[&[u8]], remarks: &mut Vec<String>) -> Vec<String> {
    let is_wrong = |bytes: &&[u8]| std::str::from_utf8(bytes).is_err();
    let wrong = strings.iter().filter(|bytes| is_wrong(bytes)).count();
    if wrong == 0 {
        return strings.iter().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).collect();
    }
    remarks.push(format!(
        "{} not UTF-8: wrong bytes are shown as \\xNN",
        are(wrong, "name or text", "names and texts")
    ));
    let valid: HashSet<&str> =
        strings.iter().filter_map(|bytes| std::str::from_utf8(bytes).ok()).collect();
    let text = |bytes: &&[u8]| {
        let mut text = String::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            for byte in chunk.invalid() {
                write!(text, "\\x{byte:02x}").unwrap_or_default();
            }
        }
        while is_wrong(bytes) && valid.contains(text.as_str()) {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        text
    };
    strings.iter().map(text).collect()
}

/// `1 location is`, `3 locations are`.
fn are(number: usize, one: &str, many: &str) -> String {
    if number == 1 { format!("1 {one} is") } else { format!("{number} {many} are") }
}

fn value_type(value: WireValue<'_>) -> Result<ValueType, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), ValueType::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.r#type = value.signed()?,
            2 => of.unit = value.signed()?,
            _ => {}
        }
    }
    Ok(of)
}

fn sample(value: WireValue<'_>) -> Result<Sample, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Sample::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => value.unsigneds(&mut of.location_id)?,
            2 => value.signeds(&mut of.value)?,
            3 => of.label.push(label(value)?),
            _ => {}
        }
    }
    Ok(of)
}

fn label(value: WireValue<'_>) -> Result<Label, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Label::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.key = value.signed()?,
            2 => of.str = value.signed()?,
            3 => of.num = value.signed()?,
            4 => of.num_unit = value.signed()?,
            _ => {}
        }
    }
    Ok(of)
}

fn mapping(value: WireValue<'_>) -> Result<Mapping, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Mapping::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.id = value.unsigned()?,
            2 => of.memory_start = value.unsigned()?,
            3 => of.memory_limit = value.unsigned()?,
            4 => of.file_offset = value.unsigned()?,
            5 => of.filename = value.signed()?,
            6 => of.build_id = value.signed()?,
            7 => of.has_functions = value.bool()?,
            8 => of.has_filenames = value.bool()?,
            9 => of.has_line_numbers = value.bool()?,
            10 => of.has_inline_frames = value.bool()?,
            _ => {}
        }
    }
    Ok(of)
}

fn location(value: WireValue<'_>) -> Result<Location, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Location::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.id = value.unsigned()?,
            2 => of.mapping_id = value.unsigned()?,
            3 => of.address = value.unsigned()?,
            4 => of.line.push(line(value)?),
            5 => of.is_folded = value.bool()?,
            _ => {}
        }
    }
    Ok(of)
}

fn line(value: WireValue<'_>) -> Result<Line, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Line::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.function_id = value.unsigned()?,
            2 => of.line = value.signed()?,
            3 => of.column = value.signed()?,
            _ => {}
        }
    }
    Ok(of)
}

fn function(value: WireValue<'_>) -> Result<Function, ReadRefusal> {
    let (mut fields, mut of) = (WireFields(value.bytes()?), Function::default());
    while let Some((number, value)) = fields.next()? {
        match number {
            1 => of.id = value.unsigned()?,
            2 => of.name = value.signed()?,
            3 => of.system_name = value.signed()?,
            4 => of.filename = value.signed()?,
            5 => of.start_line = value.signed()?,
            _ => {}
        }
    }
    Ok(of)
}

#[cfg(test)]
mod tests;
