//! Regular expressions of profiles: RE2's syntax, as Go's `regexp` reads it, in that of the `regex`
//! crate. Most of the two is alike. Where they differ the text is written anew:
//! - `\Q...\E` quotes; `\101` is an octal number; `\<` and `\>` are brackets;
//! - `\d`, `\s`, `\w` and `\b` mean ASCII alone;
//! - in a class `[`, `&` and `~` are themselves; `{` is itself where no repetition follows.

use std::fmt::Write as _;

/// The same expression for the `regex` crate. What is wrong stays wrong.
pub(super) fn translated(re2: &str) -> String {
    let (mut text, mut rest, mut in_class) = (String::with_capacity(re2.len()), re2, false);
    while let Some(character) = rest.chars().next() {
        let after = rest.get(character.len_utf8()..).unwrap_or_default();
        rest = match character {
            '\\' => escape(&mut text, after, in_class),
            '[' if !in_class => {
                in_class = true;
                class_start(&mut text, after)
            }
            '[' if named_class(rest).is_some() => {
                let name = named_class(rest).unwrap_or_default();
                text.push_str(name);
                rest.get(name.len()..).unwrap_or_default()
            }
            '[' | '&' | '~' if in_class => {
                text.extend(['\\', character]);
                after
            }
            '{' if !in_class && !is_repetition(after) => {
                text.push_str("\\{");
                after
            }
            _ => {
                in_class &= character != ']';
                text.push(character);
                after
            }
        };
    }
    text
}

/// `after` a backslash; answers what is behind the escape.
fn escape<'r>(text: &mut String, after: &'r str, in_class: bool) -> &'r str {
    let Some(character) = after.chars().next() else {
        text.push('\\');
        return after;
    };
    let rest = after.get(character.len_utf8()..).unwrap_or_default();
    let class = |ascii: &str| match in_class {
        true => ascii.to_owned(),
        false => format!("[{ascii}]"),
    };
    match character {
        'Q' if !in_class => {
            let (quoted, rest) = rest.split_once("\\E").unwrap_or((rest, ""));
            text.push_str(&regex::escape(quoted));
            return rest;
        }
        // A single digit but 0 would be a back reference, which neither knows.
        '0'..='7' if character == '0' || rest.starts_with(|c| matches!(c, '0'..='7')) => {
            let len = after.chars().take(3).take_while(|c| matches!(c, '0'..='7')).count();
            let (digits, rest) = after.split_at(len);
            let code = u32::from_str_radix(digits, 8).unwrap_or(0);
            write!(text, "\\x{{{code:x}}}").unwrap_or_default();
            return rest;
        }
        'p' | 'P' | 'x' if rest.starts_with('{') => {
            let end = rest.find('}').map_or(rest.len(), |end| end + 1);
            let (name, rest) = rest.split_at(end);
            text.extend(['\\', character]);
            text.push_str(name);
            return rest;
        }
        '<' | '>' => text.push(character),
        'd' => text.push_str(&class("0-9")),
        's' => text.push_str(&class("\\t\\n\\f\\r ")),
        'w' => text.push_str(&class("0-9A-Za-z_")),
        'D' => text.push_str("[^0-9]"),
        'S' => text.push_str("[^\\t\\n\\f\\r ]"),
        'W' => text.push_str("[^0-9A-Za-z_]"),
        'b' if !in_class => text.push_str("(?-u:\\b)"),
        'B' if !in_class => text.push_str("(?-u:\\B)"),
        _ => text.extend(['\\', character]),
    }
    rest
}

/// The start of a class, in which a bracket that comes first is itself.
fn class_start<'r>(text: &mut String, after: &'r str) -> &'r str {
    text.push('[');
    let mut rest = after;
    if let Some(after) = rest.strip_prefix('^') {
        text.push('^');
        rest = after;
    }
    match rest.strip_prefix(']') {
        Some(after) => {
            text.push_str("\\]");
            after
        }
        None => rest,
    }
}

/// `[:alpha:]` at the start of `rest`.
fn named_class(rest: &str) -> Option<&str> {
    let end = rest.strip_prefix("[:")?.find(":]")?;
    rest.get(..end + 4)
}

/// True for `3}`, `3,}` and `3,5}`.
fn is_repetition(after: &str) -> bool {
    let Some((inside, _)) = after.split_once('}') else { return false };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match inside.split_once(',') {
        None => is_number(inside),
        Some((least, most)) => is_number(least) && (most.is_empty() || is_number(most)),
    }
}

#[cfg(test)]
mod tests {
    use super::translated;
    use regex::Regex;

    #[test]
    fn expressions_match_what_they_match_in_go() {
        for (re2, matches, others) in [
            (r"\Qoperator new[](\E.*", &["operator new[](int)"][..], &["operator new"][..]),
            (r"a|\Qb.c\E|d", &["a", "b.c", "d"], &["bxc"]),
            (r"\Qa.b", &["a.b"], &["axb"]),
            (r"\Q\E", &[""], &["Q"]),
            (r"std::vector\<.*\>", &["std::vector<int>"], &["std::vector"]),
            (r"\101\x41\060", &["AA0"], &["101"]),
            (r"\w+\d", &["a1"], &["ä1", "a٣"]),
            (r"[\w:]+", &["a::b"], &["a.b"]),
            (r"[[a]", &["[", "a"], &["[a"]),
            (r"[]a]+", &["]a"], &["b"]),
            (r"[^]a]", &["b"], &["]"]),
            (r"[a&&b]", &["a", "&", "b"], &["c"]),
            (r"[[:alpha:]_]+", &["a_"], &["1"]),
            (r"[\Wa]", &["a", "."], &["b"]),
            (r"f{}|a{2}|b{1,}", &["f{}", "aa", "bb"], &["f", "a"]),
            (r"\pL+\.", &["ä."], &["1."]),
            (r"\p{Greek}\x{41}", &["πA"], &["aA"]),
        ] {
            let regex = Regex::new(&format!("^({})$", translated(re2))).unwrap();
            for text in matches {
                assert!(regex.is_match(text), "{re2} does not match {text}: {regex}");
            }
            for text in others {
                assert!(!regex.is_match(text), "{re2} matches {text}: {regex}");
            }
        }
        for wrong in ["*(", r"a\", "[a", r"\1", "(", r"a\E"] {
            assert!(Regex::new(&translated(wrong)).is_err(), "{wrong}");
        }
    }
}
