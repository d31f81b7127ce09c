//! Names in signatures, in the runtime's UTF-16: C# words and type parameters.

use profiler_protocol::signature::WORDS;

/// The C# word for a type's full name.
#[must_use]
pub(crate) fn word(full_name: &[u16]) -> Option<&'static str> {
    WORDS
        .iter()
        .find(|(name, _)| name.encode_utf16().eq(full_name.iter().copied()))
        .map(|(_, word)| *word)
}

/// Splits `` Name`2 `` into the name and its number of type parameters.
#[must_use]
pub(crate) fn arity(name: &[u16]) -> (&[u16], usize) {
    let Some(tick) = name.iter().rposition(|u| *u == u16::from(b'`')) else { return (name, 0) };
    let (front, digits) = name.split_at_checked(tick).unwrap_or((name, &[]));
    let mut number = 0usize;
    for digit in digits.iter().skip(1) {
        match u8::try_from(*digit) {
            Ok(digit @ b'0'..=b'9') => {
                number =
                    number.saturating_mul(10).saturating_add(usize::from(digit.wrapping_sub(b'0')));
            }
            _ => return (name, 0),
        }
    }
    if digits.len() < 2 { (name, 0) } else { (front, number.min(64)) }
}

/// A name without its namespace. Compiler-made names may hold dots inside `<…>`; those do not
/// count.
#[must_use]
pub(crate) fn without_namespace(name: &[u16]) -> &[u16] {
    let angle = name.iter().position(|u| *u == u16::from(b'<')).unwrap_or(name.len());
    let dot = name.iter().take(angle).rposition(|u| *u == u16::from(b'.'));
    dot.and_then(|d| name.get(d.wrapping_add(1)..)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::{arity, without_namespace, word};

    fn wide(text: &str) -> Vec<u16> {
        text.encode_utf16().collect()
    }

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(arity(&wide("Dictionary`2")), (&wide("Dictionary")[..], 2));
        assert_eq!(arity(&wide("Plain")), (&wide("Plain")[..], 0));
        assert_eq!(arity(&wide("Odd`x")), (&wide("Odd`x")[..], 0));
        assert_eq!(arity(&wide("Odd`")), (&wide("Odd`")[..], 0));
        assert_eq!(without_namespace(&wide("A.B.C")), wide("C"));
        assert_eq!(without_namespace(&wide("<A.B>d__1")), wide("<A.B>d__1"));
        assert_eq!(word(&wide("System.Int32")), Some("int"));
        assert_eq!(word(&wide("System.Int3")), None);
    }
}
