//! A name in the making: of bounded length, cut at a character, as the shim's are
//! (`profiler-shim/src/text.rs`), so that both write the same.

/// A record of the shim's takes so many bytes of a name.
const MOST_BYTES: usize = 2_040;
/// UTF-16 units that the metadata interface of the runtime gives of a name.
const MOST_UNITS: usize = 511;

/// The text so far.
#[derive(Default)]
pub(super) struct NameText {
    text: String,
    was_cut: bool,
}

/// A place in a text.
#[derive(Clone, Copy)]
pub(super) struct TextMark {
    length: usize,
    was_cut: bool,
}

impl NameText {
    /// The text.
    pub(super) fn into_string(self) -> String {
        self.text
    }

    /// True when something did not fit.
    pub(super) fn was_cut(&self) -> bool {
        self.was_cut
    }

    /// What there is now, for [`NameText::back_to`].
    pub(super) fn mark(&self) -> TextMark {
        TextMark { length: self.text.len(), was_cut: self.was_cut }
    }

    /// Forgets everything since `mark` was taken.
    pub(super) fn back_to(&mut self, mark: TextMark) {
        self.text.truncate(mark.length);
        self.was_cut = mark.was_cut;
    }

    /// Appends a character.
    pub(super) fn push(&mut self, character: char) {
        self.was_cut |= self.text.len() + character.len_utf8() > MOST_BYTES;
        if !self.was_cut {
            self.text.push(character);
        }
    }

    /// Appends a string.
    pub(super) fn push_str(&mut self, text: &str) {
        text.chars().for_each(|character| self.push(character));
    }
}

/// A name as the runtime's metadata interface gives it.
pub(super) fn as_given(name: &str) -> &str {
    let mut units = 0;
    let end = name.char_indices().find(|(_, character)| {
        units += character.len_utf16();
        units > MOST_UNITS
    });
    end.and_then(|(at, _)| name.get(..at)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::{MOST_BYTES, MOST_UNITS, NameText, as_given};

    #[test]
    fn a_text_is_cut_at_a_character_and_nothing_is_added_behind_the_gap() {
        let mut text = NameText::default();
        text.push_str(&"a".repeat(MOST_BYTES - 1));
        let mark = text.mark();
        text.push_str("öb");
        assert!(text.was_cut());
        text.back_to(mark);
        assert!(!text.was_cut());
        text.push('b');
        assert_eq!(text.into_string().len(), MOST_BYTES);
    }

    #[test]
    fn a_long_name_is_as_long_as_the_runtime_gives_it() {
        let (short, long) = ("ö".repeat(MOST_UNITS), "ö".repeat(MOST_UNITS + 1));
        assert_eq!((as_given(&short), as_given(&long)), (&*short, &*short));
    }
}
