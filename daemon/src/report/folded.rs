//! One stack a line: frames from the root, `;` between them, a space, the value.

use super::ReportError;
use super::stacks::{Stacks, View};
use crate::pprof::proto::Profile;
use std::collections::BTreeMap;
use std::io::Write;

/// Writes the stacks with a value of `sample_type` that `view` shows, sorted; equal ones are added up. Labels to group by are the roots
/// of each. `;` in a name becomes `:`, line ends were escaped. Returns the value of parked threads that was left out.
///
/// # Errors
/// When there is no such sample type or label, or `output` fails.
pub fn write(
    profile: &Profile,
    sample_type: &str,
    view: &View,
    output: &mut dyn Write,
) -> Result<i64, ReportError> {
    let stacks = Stacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(view)?;
    let mut lines: BTreeMap<String, i64> = BTreeMap::new();
    let (values, idle) = stacks.values(column, view);
    for (sample, value) in values {
        let mut names: Vec<String> =
            stacks.frames(sample).map(|frame| frame.name.replace(';', ":")).collect();
        names.extend(stacks.groups(sample, &view.by).iter().rev().map(|value| value.replace(';', ":")));
        names.reverse();
        let sum = lines.entry(names.join(";")).or_insert(0);
        *sum = sum.saturating_add(value);
    }
    for (line, value) in lines {
        writeln!(output, "{line} {value}")?;
    }
    Ok(idle)
}
