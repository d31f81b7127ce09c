//! The table of groups: how much of a sample type each value of a label has, for example each `wait_reason`, `waker` or `type`; of several labels
//! each combination of values.

use super::ReportError;
use super::stacks::{Stacks, View};
use super::top::{Options, Table};
use super::units::{human, percent};
use crate::pprof::proto::Profile;
use crate::symbolize::pretty::clean;
use std::borrow::Cow;
use std::collections::HashMap;

/// The table of one sample type by the labels `by`.
///
/// # Errors
/// When there is no such sample type or label.
pub fn table(
    profile: &Profile,
    sample_type: &str,
    by: &[String],
    options: &Options,
) -> Result<String, ReportError> {
    let stacks = Stacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(&View { by: by.to_owned(), ..options.view.clone() })?;
    let mut groups: HashMap<Vec<Cow<'_, str>>, i64> = HashMap::new();
    let mut total = 0i64;
    let (values, idle) = stacks.values(column, &options.view);
    for (sample, value) in values {
        total = total.saturating_add(value);
        let sum = groups.entry(stacks.groups(sample, by)).or_insert(0);
        *sum = sum.saturating_add(value);
    }
    let count = groups.len();
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|(a, x), (b, y)| y.cmp(x).then_with(|| a.cmp(b)));
    groups.truncate(options.limit);

    let mut table = Table::new(&stacks, column, options);
    let labels: Vec<Cow<'_, str>> = by.iter().map(|label| clean(label)).collect();
    let what = format!("{} by {}", clean(sample_type), labels.join(", "));
    table.heading(&what, total, groups.len(), count, "values");
    let widths: Vec<usize> = (0..labels.len())
        .map(|at| {
            let names = groups.iter().map(|(names, _)| names).chain([&labels]);
            names.filter_map(|names| Some(names.get(at)?.chars().count())).max().unwrap_or(0).min(WIDEST)
        })
        .collect();
    if labels.len() > 1 {
        table.dim(&format!("{:>17}  {}", "", columns(&labels, &widths)));
    }
    for (names, sum) in &groups {
        let numbers = format!("{:>10} {:>6}  ", human(*sum, table.unit), percent(*sum, total));
        table.row(&numbers, &columns(names, &widths), "");
    }
    table.left_out(total, idle);
    Ok(table.text)
}

/// Columns of a value that is not the last one; a longer one moves what follows.
const WIDEST: usize = 40;

/// Values side by side.
fn columns(values: &[Cow<'_, str>], widths: &[usize]) -> String {
    let padded = values.iter().zip(widths).map(|(value, width)| format!("{value:<width$}"));
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
}
