//! Values for people.

/// `value` of `unit` with three significant digits or so: `1.23 s`, `45.6 MiB`, `1,234`.
#[must_use]
pub fn human(value: i64, unit: &str) -> String {
    let scaled = |steps: &[(f64, &str)]| {
        let magnitude = value.unsigned_abs() as f64;
        let (size, name) =
            steps.iter().copied().find(|(size, _)| magnitude >= *size).unwrap_or((1.0, steps_end(steps)));
        format!("{} {name}", digits(value as f64 / size))
    };
    match unit {
        _ if value == 0 => "0".to_owned(),
        "nanoseconds" => scaled(&[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")]),
        "bytes" => scaled(&[
            (1024.0 * 1024.0 * 1024.0, "GiB"),
            (1024.0 * 1024.0, "MiB"),
            (1024.0, "KiB"),
            (1.0, "B"),
        ]),
        _ => grouped(value),
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
pub fn grouped(value: i64) -> String {
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

/// So many of a thing whose name forms its plural with an s: `1 leak`, `1,234 objects`.
#[must_use]
pub fn counted(number: impl TryInto<i64>, thing: &str) -> String {
    let number = number.try_into().unwrap_or(i64::MAX);
    format!("{} {thing}{}", grouped(number), if number == 1 { "" } else { "s" })
}

/// `part` of `whole` in percent, one decimal.
#[must_use]
pub fn percent(part: i64, whole: i64) -> String {
    if whole == 0 { "0.0%".to_owned() } else { format!("{:.1}%", part as f64 / whole as f64 * 100.0) }
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
        ] {
            assert_eq!(human(value, unit), shown);
        }
        let counts = [0_usize, 1, 2, 1234].map(|number| counted(number, "leak"));
        assert_eq!(counts, ["0 leaks", "1 leak", "2 leaks", "1,234 leaks"]);
        assert_eq!(percent(1, 3), "33.3%");
        assert_eq!(percent(1, 0), "0.0%");
    }
}
