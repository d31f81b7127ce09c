//! The table of groups: how much of a sample type each value of a label has, for example each
//! `wait_reason`, `waker` or `type`; of several labels each combination of values. By window it
//! says how much that is per second, window after window.

use super::ReportError;
use super::merge::{WINDOW, is_of_moments};
use super::stacks::{ProfileStacks, ProfileView, ViewedSamples, shown_name};
use super::top::{NO_DURATION, TableOptions, TopTable};
use perfusion_model::text::clean;
use perfusion_model::units::{human, percent};
use perfusion_pprof::proto::Profile;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;

/// The table of one sample type by the labels `by`.
///
/// # Errors
/// When there is no such sample type or label.
pub fn table(
    profile: &Profile,
    sample_type: &str,
    by: &[String],
    options: &TableOptions,
) -> Result<String, ReportError> {
    let stacks = ProfileStacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(&ProfileView { by: by.to_owned(), ..options.view.clone() })?;
    let mut groups: HashMap<Vec<Cow<'_, str>>, i128> = HashMap::new();
    let mut of_windows = HashMap::<String, i128>::new();
    let by_window = by.iter().position(|label| label == WINDOW);
    let window = |names: &[Cow<'_, str>]| {
        by_window.and_then(|at| names.get(at)).map(|window| window.to_string())
    };
    let ViewedSamples { values, total, idle } = stacks.values(column, &options.view);
    for (sample, value) in values {
        let value = i128::from(value);
        let names = stacks.groups(sample, by);
        if let Some(window) = window(&names) {
            *of_windows.entry(window).or_insert(0) += value;
        }
        *groups.entry(names).or_insert(0) += value;
    }
    if by.len() == 1 && by_window.is_some() {
        // A window in which there was nothing is a row, too.
        options.windows.keys().for_each(|window| {
            groups.entry(vec![Cow::Owned(window.clone())]).or_insert(0);
        });
    }
    let count = groups.len();
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups
        .sort_by_cached_key(|(names, value)| (window(names), Reverse(value.abs()), names.clone()));
    // So many of each window.
    let (mut last, mut rows) = (None, 0);
    groups.retain(|(names, _)| {
        let window = Some(window(names));
        rows = if last == window { rows + 1 } else { 1 };
        last = window;
        rows <= options.limit
    });

    let mut table = TopTable::new(&stacks, column, options);
    let labels: Vec<Cow<'_, str>> = by.iter().map(|label| clean(label)).collect();
    let what = format!("{} by {}", shown_name(sample_type), labels.join(", "));
    // Each window has a moment of its own, of which there is no sum and no rate.
    let moments = by_window.is_some() && is_of_moments(sample_type);
    if moments {
        table.heading_of_moments(&what, groups.len(), count, "values");
    } else {
        table.heading(&what, total, groups.len(), count, "values");
    }
    let widths: Vec<usize> = (0..labels.len())
        .map(|at| {
            let names = groups.iter().map(|(names, _)| names).chain([&labels]);
            names
                .filter_map(|names| Some(names.get(at)?.chars().count()))
                .max()
                .unwrap_or(0)
                .min(WIDEST)
        })
        .collect();
    let rate = |text: &str| {
        if by_window.is_some() && !moments { format!(" {text:>10}") } else { String::new() }
    };
    if labels.len() > 1 || by_window.is_some() {
        table.dim(&format!("{:>17}{}  {}", "", rate("per second"), columns(&labels, &widths)));
    }
    let mut without_rate = false;
    for (names, sum) in &groups {
        let length_ns =
            window(names).and_then(|window| options.windows.get(&window)).copied().unwrap_or(0);
        let per_second = match length_ns {
            ..=0 => "?".to_owned(),
            _ => human((*sum as f64 * 1e9 / length_ns as f64).round() as i128, table.unit),
        };
        without_rate |= by_window.is_some() && !moments && length_ns <= 0;
        let whole = window(names)
            .filter(|_| moments)
            .map_or(total.whole(), |window| of_windows.get(&window).copied().unwrap_or(0));
        let (value, share) = (human(*sum, table.unit), percent(*sum, whole));
        let numbers = format!("{value:>10} {share:>6}{}  ", rate(&per_second));
        table.row(&numbers, &columns(names, &widths), "");
    }
    if without_rate {
        table.remark(&format!("?: {NO_DURATION}"));
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
