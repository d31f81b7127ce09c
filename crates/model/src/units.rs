//! Values for people.

use crate::text::clean;

/// What a unit measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    Time,
    Memory,
}

/// The names of units that `go tool pprof` knows (`internal/measurement`), without a plural's s,
/// and what one is in nanoseconds or bytes.
const UNITS: [(&[&str], Measure, f64); 11] = [
    (&["ns", "nanosecond"], Measure::Time, 1.0),
    (&["us", "μs", "microsecond"], Measure::Time, 1e3),
    (&["ms", "millisecond"], Measure::Time, 1e6),
    (&["s", "sec", "second"], Measure::Time, 1e9),
    (&["hr", "hour"], Measure::Time, 3.6e12),
    (&["b", "byte"], Measure::Memory, 1.0),
    (&["kb", "kbyte", "kilobyte"], Measure::Memory, 1024.0),
    (&["mb", "mbyte", "megabyte"], Measure::Memory, 1_048_576.0),
    (&["gb", "gbyte", "gigabyte"], Measure::Memory, 1_073_741_824.0),
    (&["tb", "tbyte", "terabyte"], Measure::Memory, 1_099_511_627_776.0),
    (&["pb", "pbyte", "petabyte"], Measure::Memory, 1_125_899_906_842_624.0),
];

/// Units of what is counted: a number says it all.
const COUNTS: [&str; 4] = ["", "count", "sample", "unit"];

fn singular(unit: &str) -> String {
    let unit = unit.to_lowercase();
    if unit.len() > 2 { unit.strip_suffix('s').unwrap_or(&unit).to_owned() } else { unit }
}

fn measure(unit: &str) -> Option<(Measure, f64)> {
    let unit = singular(unit);
    let known = UNITS.iter().find(|(names, ..)| names.contains(&unit.as_str()));
    known.map(|(_, measure, factor)| (*measure, *factor))
}

/// `nanoseconds` or `bytes` and how many of them one of `unit` is; any other unit as it is, and 1.
#[must_use]
pub fn base(unit: &str) -> (&str, f64) {
    match measure(unit) {
        Some((Measure::Time, factor)) => ("nanoseconds", factor),
        Some((Measure::Memory, factor)) => ("bytes", factor),
        None => (unit, 1.0),
    }
}

/// `value` of `unit` with three significant digits or so: `1.23 s`, `45.6 MiB`, `1,234`,
/// `1,234 requests`.
#[must_use]
pub fn human(value: impl Into<i128>, unit: &str) -> String {
    let value = value.into();
    let scaled = |factor: f64, steps: &[(f64, &str)]| {
        let value = value as f64 * factor;
        let step = steps.iter().copied().find(|(size, _)| value.abs() >= *size);
        let (size, name) = step.unwrap_or((1.0, steps_end(steps)));
        format!("{} {name}", digits(value / size))
    };
    match measure(unit) {
        _ if value == 0 => "0".to_owned(),
        Some((Measure::Time, factor)) => {
            scaled(factor, &[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")])
        }
        Some((Measure::Memory, factor)) => scaled(
            factor,
            &[
                (1024.0 * 1024.0 * 1024.0, "GiB"),
                (1024.0 * 1024.0, "MiB"),
                (1024.0, "KiB"),
                (1.0, "B"),
            ],
        ),
        None if COUNTS.contains(&singular(unit).as_str()) => grouped(value),
        None => format!("{} {}", grouped(value), clean(unit)),
    }
}

fn steps_end<'a>(steps: &[(f64, &'a str)]) -> &'a str {
    steps.last().map_or("", |(_, name)| name)
}

/// Three significant digits below a thousand.
fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        _ if value.fract() == 0.0 => 0,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// Thousands separated by commas.
#[must_use]
pub fn grouped(value: impl Into<i128>) -> String {
    let value = value.into();
    let digits = value.unsigned_abs().to_string();
    let mut shown = if value < 0 { "-".to_owned() } else { String::new() };
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

/// A number of things whose name forms its plural with an s: `1 leak`, `1,234 objects`.
#[must_use]
pub fn counted(number: impl TryInto<i64>, thing: &str) -> String {
    let number = number.try_into().unwrap_or(i64::MAX);
    format!("{} {thing}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// `part` of `whole` in percent, one decimal.
#[must_use]
pub fn percent(part: impl Into<i128>, whole: impl Into<i128>) -> String {
    match (part.into(), whole.into()) {
        (_, 0) => "0.0%".to_owned(),
        (part, whole) => format!("{:.1}%", part as f64 / whole as f64 * 100.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_in_units_people_use() {
        for (value, unit, shown) in [
            (0, "nanoseconds", "0"),
            (999, "nanoseconds", "999 ns"),
            (1_500, "nanoseconds", "1.50 µs"),
            (12_345_678, "nanoseconds", "12.3 ms"),
            (9_876_543_210, "nanoseconds", "9.88 s"),
            (1024, "bytes", "1 KiB"),
            (1_500_000, "bytes", "1.43 MiB"),
            (1234, "count", "1,234"),
            (-1_234_567, "count", "-1,234,567"),
            (i64::MIN, "bytes", "-8589934592 GiB"),
            (1_500, "milliseconds", "1.50 s"),
            (2, "MB", "2 MiB"),
            (3, "seconds", "3 s"),
            (7_000, "requests", "7,000 requests"),
            (7_000, "samples", "7,000"),
        ] {
            assert_eq!(human(value, unit), shown);
        }
        let counts = [0_usize, 1, 2, 1234].map(|number| counted(number, "leak"));
        assert_eq!(counts, ["0 leaks", "1 leak", "2 leaks", "1,234 leaks"]);
        assert_eq!(percent(1, 3), "33.3%");
        assert_eq!(percent(1, 0), "0.0%");
    }
}
