//! Text that comes from a profiled process, made fit to be shown.

use std::borrow::Cow;
use std::fmt::Write;

/// Longest name, in bytes, that goes into a profile.
pub const MAX_BYTES: usize = 2048;
/// The longest escaped character, and the end of a name that is cut.
const ROOM_BYTES: usize = 12 + 3 + 16;
/// Control characters and direction overrides escaped, length bounded. The end of one that is cut
/// is a number made of all of it: names that differ only in what is cut stay different.
#[must_use]
pub fn clean(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| {
        c.is_control()
            || matches!(
                c,
                '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            )
    };
    if text.len() <= MAX_BYTES && !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::new();
    for c in text.chars() {
        if cleaned.len() + ROOM_BYTES > MAX_BYTES {
            write!(cleaned, "…{:016x}", fingerprint(text)).unwrap_or_default();
            break;
        }
        if hidden(c) { cleaned.extend(c.escape_unicode()) } else { cleaned.push(c) }
    }
    Cow::Owned(cleaned)
}

/// Bytes as lower-case hexadecimal digits, two each.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap_or_default();
        text
    })
}

/// FNV-1a: the same in every build.
fn fingerprint(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Bytes of a command name at most (`TASK_COMM_LEN` without the terminating zero).
pub const COMM_BYTES: usize = 15;

/// The text of a command name without the part of a character at its end, if it was cut there.
#[must_use]
pub fn whole_text(comm: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(comm) {
        Ok(text) => Cow::Borrowed(text),
        // It lacks bytes of its last character, and none was wrong.
        Err(error) if error.error_len().is_none() && comm.len() >= COMM_BYTES => {
            String::from_utf8_lossy(comm.get(..error.valid_up_to()).unwrap_or_default())
        }
        Err(_) => String::from_utf8_lossy(comm),
    }
}

/// `*` in the pattern stands for any characters.
#[must_use]
pub fn fits(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut in_text) = (0, 0);
    // Behind the last `*`, and where the text goes on that it does not take.
    let mut star: Option<(usize, usize)> = None;
    while let Some(letter) = text.get(in_text) {
        match (pattern.get(at), star) {
            (Some(b'*'), _) => {
                at += 1;
                star = Some((at, in_text));
            }
            (Some(expected), _) if expected == letter => (at, in_text) = (at + 1, in_text + 1),
            (_, Some((behind, from))) => {
                (at, in_text) = (behind, from + 1);
                star = Some((behind, from + 1));
            }
            (_, None) => return false,
        }
    }
    pattern.iter().skip(at).all(|letter| *letter == b'*')
}

/// `text` without control characters, for terminals and logs.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::{MAX_BYTES, clean};

    #[test]
    fn control_characters_are_escaped_and_length_is_bounded() {
        assert_eq!(clean("a\x1b[31m\nb\u{202e}"), "a\\u{1b}[31m\\u{a}b\\u{202e}");
        assert!(clean(&"x".repeat(1 << 20)).len() <= MAX_BYTES);
    }
}
