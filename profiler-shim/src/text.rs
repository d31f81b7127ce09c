//! Text of bounded length, built without an allocator. Always UTF-8; what does not fit is cut at a
//! character.

/// At most `N` bytes of UTF-8.
pub(crate) struct BoundedText<const N: usize> {
    bytes: [u8; N],
    len: usize,
    cut: bool,
}

/// A place in a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextMark {
    len: usize,
    cut: bool,
}

impl<const N: usize> BoundedText<N> {
    /// Empty.
    #[must_use]
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0, cut: false }
    }

    /// Empties it.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
        self.cut = false;
    }

    /// What there is.
    #[must_use]
    pub(crate) fn as_str(&self) -> &str {
        let bytes = self.bytes.get(..self.len).unwrap_or(&[]);
        core::str::from_utf8(bytes).unwrap_or("")
    }

    /// True when nothing was written.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// True when something did not fit.
    #[must_use]
    pub(crate) fn was_cut(&self) -> bool {
        self.cut
    }

    /// What there is now, for [`BoundedText::back_to`].
    #[must_use]
    pub(crate) fn mark(&self) -> TextMark {
        TextMark { len: self.len, cut: self.cut }
    }

    /// Forgets everything since `mark` was taken.
    pub(crate) fn back_to(&mut self, mark: TextMark) {
        self.len = self.len.min(mark.len);
        self.cut = mark.cut;
    }

    /// Appends a character.
    pub(crate) fn push(&mut self, character: char) {
        append(&mut self.bytes, &mut self.len, &mut self.cut, character);
    }

    /// Appends a string.
    pub(crate) fn push_str(&mut self, text: &str) {
        for character in text.chars() {
            self.push(character);
        }
    }

    /// Appends UTF-16 up to its first zero; lone surrogates become U+FFFD.
    pub(crate) fn push_utf16(&mut self, units: &[u16]) {
        self.push_units(units.iter().copied());
    }

    /// The same, unit by unit.
    pub(crate) fn push_units(&mut self, units: impl IntoIterator<Item = u16>) {
        for character in char::decode_utf16(units.into_iter().take_while(|&unit| unit != 0)) {
            self.push(character.unwrap_or(char::REPLACEMENT_CHARACTER));
            if self.cut {
                break;
            }
        }
    }
}

/// One function for texts of all sizes.
#[inline(never)]
fn append(bytes: &mut [u8], len: &mut usize, cut: &mut bool, character: char) {
    let mut buffer = [0; 4];
    let encoded = character.encode_utf8(&mut buffer).as_bytes();
    let end = len.saturating_add(encoded.len());
    match bytes.get_mut(*len..end) {
        Some(room) if !*cut => {
            for (to, from) in room.iter_mut().zip(encoded) {
                *to = *from;
            }
            *len = end;
        }
        _ => *cut = true,
    }
}

impl<const N: usize> Default for BoundedText<N> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::BoundedText;

    #[test]
    fn text_is_cut_at_a_character_and_says_so() {
        let mut text = BoundedText::<5>::new();
        text.push_str("aäö");
        assert_eq!((text.as_str(), text.was_cut()), ("aäö", false));
        text.push_str("b");
        assert_eq!((text.as_str(), text.was_cut()), ("aäö", true));
        text.clear();
        text.push('a');
        let mark = text.mark();
        text.push_str("bcdefg");
        assert!(text.was_cut());
        text.back_to(mark);
        assert_eq!((text.as_str(), text.was_cut()), ("a", false));
        text.clear();
        text.push_str("abcdä");
        assert_eq!((text.as_str(), text.was_cut()), ("abcd", true));
        text.push_str("e");
        assert_eq!(text.as_str(), "abcd", "nothing is added behind a gap");
    }

    #[test]
    fn utf16_with_lone_surrogates_becomes_utf8() {
        let mut text = BoundedText::<32>::new();
        text.push_utf16(&[0x61, 0xd800, 0x62, 0xd83d, 0xde00, 0, 0x63]);
        assert_eq!(text.as_str(), "a\u{fffd}b😀");
    }
}
