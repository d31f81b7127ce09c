//! Values of arguments: lengths of time, addresses, labels.

use perfusion_export::quantity::HumanDuration;
use perfusion_report::stacks::LabelFilter;
use std::time::Duration;

/// Reads `label=value`.
///
/// # Errors
/// Says what is expected.
pub(super) fn parse_only(text: &str) -> Result<LabelFilter, String> {
    match text.split_once('=') {
        Some((label, value)) if !label.is_empty() => {
            Ok(LabelFilter { label: label.to_owned(), value: value.to_owned() })
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
    use super::parse_address;

    #[test]
    fn addresses_are_hexadecimal_with_0x_only() {
        assert_eq!(parse_address("0x1f"), Ok(31));
        assert_eq!(parse_address("31"), Ok(31));
        for bad in ["1f", "0x", "", "-1", "0x1_0000_0000_0000_0000", "x1"] {
            assert!(parse_address(bad).is_err(), "{bad}");
        }
    }
}
