//! Names in signatures, as the shim gives them: C# words and type parameters.

use profiler_protocol::signature::WORDS;

/// The C# word for a type's full name.
pub(super) fn word(full_name: &str) -> Option<&'static str> {
    WORDS.iter().find(|(name, _)| *name == full_name).map(|(_, word)| *word)
}

/// Splits `` Name`2 `` into the name and its number of type parameters.
pub(super) fn arity(name: &str) -> (&str, usize) {
    let Some((front, digits)) = name.rsplit_once('`') else { return (name, 0) };
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return (name, 0);
    }
    (front, digits.parse().map_or(64, |count: usize| count.min(64)))
}

/// A name without its namespace. Compiler-made names may hold dots inside `<…>`; those do not
/// count.
pub(super) fn without_namespace(name: &str) -> &str {
    let before = name.split('<').next().unwrap_or(name);
    before.rfind('.').and_then(|dot| name.get(dot + 1..)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::{arity, without_namespace, word};

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(arity("Dictionary`2"), ("Dictionary", 2));
        assert_eq!(arity("Plain"), ("Plain", 0));
        assert_eq!(arity("Odd`x"), ("Odd`x", 0));
        assert_eq!(arity("Odd`"), ("Odd`", 0));
        assert_eq!(arity("Odd`99999999999999999999"), ("Odd", 64));
        assert_eq!(without_namespace("A.B.C"), "C");
        assert_eq!(without_namespace("<A.B>d__1"), "<A.B>d__1");
        assert_eq!(word("System.Int32"), Some("int"));
        assert_eq!(word("System.Int3"), None);
    }
}
