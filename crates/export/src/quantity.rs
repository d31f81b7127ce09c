//! Values with units, the same everywhere in the configuration: `90s`, `512MiB`.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A length of time: `500ms`, `90s`, `5m`, `12h`, `7d`; a plain number is seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HumanDuration(pub Duration);

/// A number of bytes: `512MiB`, `10GB`, `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// A part of a whole: `5%`, `0.5%`; a plain number is percent. Holds 0.05 for 5%.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Percentage(pub f64);

/// Units of time and their milliseconds, largest first.
const TIMES: [(&str, u64); 5] =
    [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
/// Units of size and their bytes: powers of two, largest first, then those of ten. Kubernetes
/// writes them without the B.
const SIZES: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("B", 1),
];
/// Most of a span: ten years.
const MOST_MS: f64 = 10.0 * 366.0 * 86_400_000.0;

/// Number and unit of a text; fractions are allowed.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number: f64 = text.strip_suffix(unit)?.parse().ok()?;
    number.is_finite().then_some((number, unit.trim_start()))
}

impl FromStr for HumanDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!("`{text}` is no length of time: expected for example 500ms, 90s, 5m, 12h, 7d")
        };
        let (number, unit) = split(text).ok_or_else(expected)?;
        let unit = if unit.is_empty() { "s" } else { unit };
        let (_, ms) = TIMES.iter().find(|(name, _)| *name == unit).ok_or_else(expected)?;
        let ms = number * *ms as f64;
        if !(1.0..=MOST_MS).contains(&ms) {
            return Err(format!("`{text}` is out of range: expected from 1ms to ten years"));
        }
        Ok(Self(Duration::from_millis(ms.round() as u64)))
    }
}

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let (name, unit) =
            TIMES.iter().find(|(_, unit)| ms.is_multiple_of(*unit)).unwrap_or(&("ms", 1));
        write!(f, "{}{name}", ms / unit)
    }
}

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("`{text}` is no size: expected for example 64KiB, 512MiB, 10GB");
        let (number, unit) = split(text).ok_or_else(expected)?;
        let unit = unit.to_ascii_lowercase();
        let unit = if unit.ends_with('b') { unit } else { format!("{unit}b") };
        let (_, bytes) =
            SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(&unit)).ok_or_else(expected)?;
        let bytes = number * *bytes as f64;
        // 2^53: whole numbers are exact up to there.
        if bytes > 9_007_199_254_740_992.0 {
            return Err(format!("`{text}` is out of range: expected at most 8192TiB"));
        }
        Ok(Self(bytes.round() as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fits = |(_, unit): &&(&str, u64)| self.0 > 0 && self.0.is_multiple_of(*unit);
        let (name, unit) = SIZES.iter().take(4).find(fits).unwrap_or(&("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

impl FromStr for Percentage {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match split(text) {
            Some((percent, "" | "%")) if percent <= 100.0 => Ok(Self(percent / 100.0)),
            _ => Err(format!("`{text}` is no share: expected for example 5%, 0.5%, at most 100%")),
        }
    }
}

impl fmt::Display for Percentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As it was written: a hundredth and back is not always the same number.
        write!(f, "{}%", (self.0 * 1e8).round() / 1e6)
    }
}

/// Text, or a plain number as text.
struct TextVisitor<T>(std::marker::PhantomData<T>, &'static str);

impl<T: FromStr<Err = String>> Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.1)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        number.to_string().parse().map_err(E::custom)
    }
}

macro_rules! unit {
    ($type:ident $name:literal $expected:literal $pattern:literal) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any(TextVisitor::<Self>(std::marker::PhantomData, $expected))
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": ["string", "number"],
                    "pattern": $pattern,
                    "description": $expected
                })
            }
        }
    };
}

unit!(
    HumanDuration
    "Span"
    "a length of time such as 500ms, 90s, 5m, 12h, 7d; a plain number is seconds"
    "^([0-9]+[.]?[0-9]*|[.][0-9]+) *(ms|s|m|h|d)?$"
);
unit!(
    ByteSize
    "Bytes"
    "a size such as 64KiB, 512MiB, 10GB"
    "^([0-9]+[.]?[0-9]*|[.][0-9]+) *([kKmMgGtT][iI]?)?[bB]?$"
);
unit!(
    Percentage
    "Share"
    "a part such as 5% or 0.5%; a plain number is percent"
    "^([0-9]+[.]?[0-9]*|[.][0-9]+) *%?$"
);

#[cfg(test)]
mod tests {
    use super::{ByteSize, HumanDuration, Percentage};
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};
    use proptest::string::string_regex;
    use schemars::{JsonSchema, SchemaGenerator};
    use std::str::FromStr;
    use std::time::Duration;

    #[test]
    fn units_are_read_and_what_has_none_is_refused_with_an_example() {
        assert_eq!("1.5m".parse(), Ok(HumanDuration(Duration::from_secs(90))));
        assert_eq!("250ms".parse(), Ok(HumanDuration(Duration::from_millis(250))));
        assert_eq!("10".parse(), Ok(HumanDuration(Duration::from_secs(10))));
        assert_eq!("512 MiB".parse(), Ok(ByteSize(512 << 20)));
        assert_eq!("10GB".parse(), Ok(ByteSize(10_000_000_000)));
        assert_eq!("4096".parse(), Ok(ByteSize(4096)));
        assert_eq!(
            ["2Gi", "512M", "64k", ".5 mib", "7b"].map(|text| text.parse::<ByteSize>().unwrap().0),
            [2 << 30, 512_000_000, 64_000, 512 << 10, 7]
        );
        for bad in ["", "0", "0s", "-1s", "1 day", "s", "1e9d", "99999d", "nan", "inf", "10é", "é"]
        {
            assert!(bad.parse::<HumanDuration>().is_err(), "{bad}");
        }
        assert_eq!(
            ["5%", "0.1 %", "100", "0.05"]
                .map(|text| text.parse::<Percentage>().unwrap().to_string()),
            ["5%", "0.1%", "100%", "0.05%"]
        );
        for bad in ["", "-1%", "101%", "1e3%", "%", "5 per cent"] {
            assert!(bad.parse::<Percentage>().is_err(), "{bad}");
        }
        for bad in ["", "-1", "1 apple", "9999TiB", "1.2.3kB"] {
            assert!(bad.parse::<ByteSize>().is_err(), "{bad}");
        }
    }

    /// The pattern that the schema has of a value, and the chart with it.
    fn pattern<T: JsonSchema>() -> String {
        let schema = T::json_schema(&mut SchemaGenerator::default());
        let whole = schema.get("pattern").unwrap().as_str().unwrap();
        whole.strip_prefix('^').and_then(|rest| rest.strip_suffix('$')).unwrap().to_owned()
    }

    /// Number and unit may both be good and yet too much together.
    fn is_good<T: FromStr<Err = String>>(text: &str, beyond: &str) -> bool {
        text.parse::<T>().err().is_none_or(|error| error.contains(beyond))
    }

    proptest! {
        #[test]
        fn what_the_schema_takes_the_daemon_takes(
            span in string_regex(&pattern::<HumanDuration>()).unwrap(),
            bytes in string_regex(&pattern::<ByteSize>()).unwrap(),
            share in string_regex(&pattern::<Percentage>()).unwrap(),
        ) {
            prop_assert!(is_good::<HumanDuration>(&span, "out of range"), "{span}");
            prop_assert!(is_good::<ByteSize>(&bytes, "out of range"), "{bytes}");
            let percent: f64 = share.trim_end_matches(['%', ' ']).parse().unwrap();
            prop_assert_eq!(share.parse::<Percentage>().is_ok(), percent <= 100.0, "{}", share);
        }

        #[test]
        fn what_is_shown_is_read_back(ms in 1u64..1_000_000_000, bytes in 0u64..1 << 53) {
            let span = HumanDuration(Duration::from_millis(ms));
            prop_assert_eq!(span.to_string().parse(), Ok(span));
            prop_assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }

        #[test]
        fn no_text_makes_it_panic(text in ".*") {
            drop((text.parse::<HumanDuration>(), text.parse::<ByteSize>()));
            drop(text.parse::<Percentage>());
        }
    }
}
