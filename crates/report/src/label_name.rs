//! Names of labels as they are typed, where a comma or a `=` stands behind them. In a name each of
//! these has a backslash before it.

use perfusion_model::text::clean;
use std::borrow::Cow;

/// What can have a backslash before it.
const ESCAPED: [char; 3] = [',', '=', '\\'];

/// The name before `mark`, and what stands behind the mark. A backslash before a comma, a `=` or a
/// backslash is none of the name. Other backslashes are.
#[must_use]
pub fn split_label(text: &str, mark: char) -> (String, Option<&str>) {
    let (mut name, mut letters) = (String::new(), text.chars());
    while let Some(letter) = letters.next() {
        let mut ahead = letters.clone();
        match ahead.next() {
            Some(next) if letter == '\\' && ESCAPED.contains(&next) => {
                name.push(next);
                letters = ahead;
            }
            _ if letter == mark => return (name, Some(letters.as_str())),
            _ => name.push(letter),
        }
    }
    (name, None)
}

/// A name as it is to be typed, fit to be shown.
pub(crate) fn as_typed(name: &str) -> Cow<'_, str> {
    if !name.contains(ESCAPED) {
        return clean(name);
    }
    let mut typed = String::with_capacity(name.len() + 1);
    for letter in name.chars() {
        if ESCAPED.contains(&letter) {
            typed.push('\\');
        }
        typed.push(letter);
    }
    Cow::Owned(clean(&typed).into_owned())
}

#[cfg(test)]
mod tests {
    use super::{as_typed, split_label};

    #[test]
    fn each_name_can_be_typed_as_it_is_listed() {
        for name in ["thread", "region, zone", "a=b", r"C:\x", r"a\,b", r"\", r"a\", ",", "=", ""] {
            let typed = as_typed(name);
            assert_eq!(split_label(&typed, ','), (name.to_owned(), None), "{typed}");
            let filter = format!("{typed}=v,w=x");
            assert_eq!(split_label(&filter, '='), (name.to_owned(), Some("v,w=x")), "{typed}");
        }
        assert_eq!(as_typed("thread"), "thread");
        assert_eq!(as_typed("region, zone"), r"region\, zone");
    }

    #[test]
    fn a_backslash_before_another_letter_is_the_names() {
        assert_eq!(split_label(r"C:\x,y", ','), (r"C:\x".to_owned(), Some("y")));
        assert_eq!(split_label(r"a\", ','), (r"a\".to_owned(), None));
    }
}
