//! Values of arguments: lengths of time, addresses, labels.

use perfusion_export::quantity::HumanDuration;
use perfusion_report::label_name::split_label;
use perfusion_report::stacks::LabelFilter;
use std::time::Duration;

/// Labels of one `--by`.
pub(super) type Labels = Vec<String>;

/// Reads `label,label`.
///
/// # Errors
/// Says what is expected.
pub(super) fn parse_by(text: &str) -> Result<Labels, String> {
    let (mut labels, mut rest) = (Labels::new(), Some(text));
    while let Some(text) = rest {
        let (label, after) = split_label(text, ',');
        if label.is_empty() && (after.is_some() || !labels.is_empty()) {
            return Err("expected LABEL or LABEL,LABEL, as in thread,wait_reason".to_owned());
        }
        labels.push(label);
        rest = after;
    }
    Ok(labels)
}

/// Reads `label=value`.
///
/// # Errors
/// Says what is expected.
pub(super) fn parse_only(text: &str) -> Result<LabelFilter, String> {
    match split_label(text, '=') {
        (label, Some(value)) if !label.is_empty() => {
            Ok(LabelFilter { label, value: value.to_owned() })
        }
        _ => Err(format!("`{text}`: expected LABEL=VALUE, as in wait_reason=futex")),
    }
}

/// Reads `0x7f00` or decimal digits.
///
/// # Errors
/// Says what was found and what is expected.
pub(super) fn parse_address(text: &str) -> Result<u64, String> {
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|_| {
        format!("`{text}` is no address: expected 0x and hexadecimal digits, or decimal digits")
    })
}

/// Reads a length of time as the configuration has them.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    text.parse().map(|HumanDuration(duration)| duration)
}

/// The same of a second and more.
pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if duration < Duration::from_secs(1) {
        Err("expected 1s or more".to_owned())
    } else {
        Ok(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::{parse_address, parse_by, parse_only};

    #[test]
    fn a_label_with_a_comma_or_an_equals_sign_can_be_chosen() {
        for (text, labels) in [
            ("thread", &["thread"][..]),
            ("thread,wait_reason", &["thread", "wait_reason"]),
            (r"region\, zone,thread", &["region, zone", "thread"]),
            (r"a\\,b", &[r"a\", "b"]),
            (r"C:\x", &[r"C:\x"]),
            (r"a\", &[r"a\"]),
            (r"a\=b=c", &["a=b=c"]),
            ("", &[""]),
        ] {
            assert_eq!(
                parse_by(text).as_deref(),
                Ok(&labels.iter().map(|&label| label.to_owned()).collect::<Vec<_>>()[..]),
                "{text}"
            );
        }
        for bad in [",", "a,", ",a", "a,,b"] {
            assert!(parse_by(bad).is_err(), "{bad}");
        }
        let only = |text| parse_only(text).map(|only| (only.label, only.value));
        let pair = |label: &str, value: &str| Ok((label.to_owned(), value.to_owned()));
        assert_eq!(only("a=b=c"), pair("a", "b=c"));
        assert_eq!(only(r"a\=b=c\=,d"), pair("a=b", r"c\=,d"));
        assert_eq!(only(r"C:\x="), pair(r"C:\x", ""));
        for bad in ["", "a", "=a", r"a\=b"] {
            assert!(parse_only(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_hexadecimal_with_0x_only() {
        assert_eq!(parse_address("0x1f"), Ok(31));
        assert_eq!(parse_address("31"), Ok(31));
        for bad in ["1f", "0x", "", "-1", "0x1_0000_0000_0000_0000", "x1"] {
            assert!(parse_address(bad).is_err(), "{bad}");
        }
    }
}
