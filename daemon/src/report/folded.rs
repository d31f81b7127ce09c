//! One stack a line: frames from the root, `;` between them, a space, the value.

use super::ReportError;
use super::stacks::Stacks;
use crate::pprof::proto::Profile;
use std::collections::BTreeMap;
use std::io::Write;

/// Writes all stacks with a value of `sample_type`, sorted; equal ones are added up. `;` in a name becomes `:`, line ends were escaped.
///
/// # Errors
/// When there is no such sample type, or `output` fails.
pub fn write(profile: &Profile, sample_type: &str, output: &mut dyn Write) -> Result<(), ReportError> {
    let stacks = Stacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    let mut lines: BTreeMap<String, i64> = BTreeMap::new();
    for sample in stacks.samples() {
        let value = sample.value.get(column).copied().unwrap_or(0);
        if value == 0 {
            continue;
        }
        let mut names: Vec<String> =
            stacks.frames(sample).map(|frame| frame.name.replace(';', ":")).collect();
        names.reverse();
        let sum = lines.entry(names.join(";")).or_insert(0);
        *sum = sum.saturating_add(value);
    }
    for (line, value) in lines {
        writeln!(output, "{line} {value}")?;
    }
    Ok(())
}
