//! The table of groups: how much of a sample type each value of a label has, for example each `wait_reason`, `waker` or `type`.

use super::ReportError;
use super::stacks::{Stacks, View, WITHOUT};
use super::top::{Options, Table};
use super::units::{human, percent};
use crate::pprof::proto::Profile;
use crate::symbolize::pretty::clean;
use std::borrow::Cow;
use std::collections::HashMap;

/// The table of one sample type by the label `by`.
///
/// # Errors
/// When there is no such sample type or label.
pub fn table(
    profile: &Profile,
    sample_type: &str,
    by: &str,
    options: &Options,
) -> Result<String, ReportError> {
    let stacks = Stacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(&View { by: Some(by.to_owned()), ..options.view.clone() })?;
    let mut groups: HashMap<Cow<'_, str>, i64> = HashMap::new();
    let mut total = 0i64;
    let (values, idle) = stacks.values(column, &options.view);
    for (sample, value) in values {
        total = total.saturating_add(value);
        let sum = groups.entry(stacks.group(sample, by).unwrap_or(WITHOUT.into())).or_insert(0);
        *sum = sum.saturating_add(value);
    }
    let count = groups.len();
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    groups.truncate(options.limit);

    let mut table = Table::new(&stacks, column, options);
    table.heading(&format!("{} by {}", clean(sample_type), clean(by)), total, groups.len(), count, "values");
    for (name, sum) in &groups {
        let numbers = format!("{:>10} {:>6}  ", human(*sum, table.unit), percent(*sum, total));
        table.row(&numbers, name, "");
    }
    table.left_out(total, idle);
    Ok(table.text)
}
