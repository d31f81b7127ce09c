//! Managed names for people: what the C# compiler made of a method is told back as the method that was written. Total
//! functions over hostile text; the raw name stays in the profile as `system_name`.

use std::borrow::Cow;
use std::fmt::Write;

/// Longest name, in bytes, that goes into a profile.
const MAX_BYTES: usize = 2048;
/// Deepest nesting of generic arguments and generated names that is rewritten.
const MAX_DEPTH: usize = 16;

/// Control characters and direction overrides escaped, length bounded.
#[must_use]
pub fn clean(text: &str) -> Cow<'_, str> {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if text.len() <= MAX_BYTES && !text.contains(hidden) {
        return Cow::Borrowed(text);
    }
    let mut cleaned = String::new();
    for c in text.chars() {
        if cleaned.len() + 12 > MAX_BYTES {
            cleaned.push('…');
            break;
        }
        if hidden(c) { cleaned.extend(c.escape_unicode()) } else { cleaned.push(c) }
    }
    Cow::Owned(cleaned)
}

/// The readable form of `Namespace.Type+Nested.Method(parameters)`; nested types may be written with `.` or `/` too.
///
/// | compiled | shown |
/// |---|---|
/// | `Ns.Orders+<Load>d__3.MoveNext()` | `Ns.Orders.Load(…)+async` |
/// | `Ns.Type+<>c__DisplayClass5_0.<Run>b__1(System.Int32)` | `Ns.Type.Run(…)+lambda` |
/// | `Ns.Type.<Run>g__Inner\|0_1(System.Int32)` | `Ns.Type.Run(…)+Inner` |
/// | ``Ns.List`1[System.Int32].Add(T)`` | `Ns.List<System.Int32>.Add(T)` |
///
/// `+async` also marks iterators: the compiler gives both the same names.
#[must_use]
pub fn managed(raw: &str) -> String {
    // Bounded first: some steps below look ahead to the end.
    let raw = clean(raw);
    let name = generics(&raw, 0);
    let (path, parameters) = split_parameters(&name);
    let segments = segments(path);
    let shown = match segments.as_slice() {
        [.., owner, method] if method.text == "MoveNext" => {
            state_machine(owner.text).map(|(method, arguments)| {
                let written = written(method, 0).unwrap_or_else(|| Written::plain(method));
                format!("{}{}+async", declaring(path, &segments, owner.start), written.show(arguments))
            })
        }
        [.., method] => written(method.text, 0)
            .map(|written| format!("{}{}", declaring(path, &segments, method.start), written.show(""))),
        [] => None,
    };
    clean(&shown.unwrap_or_else(|| format!("{path}{parameters}"))).into_owned()
}

/// The readable form of a type's name as the runtime writes it (`TypeString` with namespaces and all arguments).
///
/// | runtime | shown |
/// |---|---|
/// | ``Ns.Map`2[System.String,Ns.Item[]]`` | `Ns.Map<string, Ns.Item[]>` |
/// | `Ns.Orders+<Load>d__3` | `Ns.Orders.Load(…)+async` |
/// | `Ns.Type+<>c__DisplayClass5_0` | `Ns.Type+closure` |
#[must_use]
pub fn type_name(raw: &str) -> String {
    clean(&type_within(&clean(raw), 0)).into_owned()
}

fn type_within(name: &str, depth: usize) -> String {
    // Arrays, pointers and by-refs, from the end.
    let mut element = name;
    loop {
        let shorter = element.strip_suffix(['*', '&']).or_else(|| {
            let open = element.strip_suffix(']')?.rfind('[')?;
            element[open + 1..element.len() - 1].bytes().all(|b| b == b',').then(|| &element[..open])
        });
        match shorter {
            Some(shorter) if !shorter.is_empty() => element = shorter,
            _ => break,
        }
    }
    let suffix = &name[element.len()..];
    // The list of arguments is the last bracket that opens outside of others.
    let mut level = 0usize;
    let open = element.char_indices().rev().find_map(|(at, c)| {
        match c {
            ']' => level += 1,
            '[' => level = level.saturating_sub(1),
            _ => {}
        }
        (c == '[' && level == 0).then_some(at)
    });
    let open = open.filter(|_| element.ends_with(']') && depth < MAX_DEPTH);
    let (path, arguments) = match open.and_then(|open| Some((&element[..open], bracketed(&element[open..])?)))
    {
        Some((path, (arguments, ""))) => {
            let shown: Vec<String> =
                arguments.iter().map(|argument| type_within(without_assembly(argument), depth + 1)).collect();
            divided(path, &shown)
        }
        _ => (without_arity(element).into_owned(), String::new()),
    };
    let segments = segments(&path);
    let last = segments.last().map_or(Segment { text: "", start: 0 }, |last| Segment { ..*last });
    let shown = if let Some((method, _)) = state_machine(last.text) {
        let written = written(method, 0).unwrap_or_else(|| Written::plain(method));
        format!("{}{}+async", declaring(&path, &segments, last.start), written.show(&arguments))
    } else if last.text.starts_with("<>c") {
        let what = if last.text == "<>c" { "lambdas" } else { "closure" };
        let declaring = declaring(&path, &segments, last.start);
        format!("{}+{what}{arguments}", declaring.trim_end_matches('.'))
    } else {
        format!("{}{arguments}", keyword(&path).unwrap_or(&path))
    };
    shown + suffix
}

/// Arguments are listed for all levels of a nested type together, outermost first: each level gets its own, and those of the innermost stand apart.
fn divided(path: &str, arguments: &[String]) -> (String, String) {
    let list = |arguments: &[String]| match arguments {
        [] => String::new(),
        arguments => format!("<{}>", arguments.join(", ")),
    };
    let mut pieces = path.split('`');
    let mut shown = pieces.next().unwrap_or_default().to_owned();
    let mut left = arguments;
    for piece in pieces {
        let rest = piece.trim_start_matches(|c: char| c.is_ascii_digit());
        let arity: usize = piece[..piece.len() - rest.len()].parse().unwrap_or(0);
        if rest.contains(['.', '+', '/'])
            && let Some((own, others)) = left.split_at_checked(arity)
        {
            shown.push_str(&list(own));
            left = others;
        }
        shown.push_str(rest);
    }
    (shown, list(left))
}

/// Without the numbers of type parameters, `` `2 ``.
fn without_arity(path: &str) -> Cow<'_, str> {
    if !path.contains('`') {
        return Cow::Borrowed(path);
    }
    let mut pieces = path.split('`');
    let mut shown = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        shown.push_str(piece.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    Cow::Owned(shown)
}

/// C#'s word for a type, as the shim has them (`profiler-shim/src/signature.rs`).
fn keyword(path: &str) -> Option<&'static str> {
    Some(match path.strip_prefix("System.")? {
        "Boolean" => "bool",
        "Char" => "char",
        "SByte" => "sbyte",
        "Byte" => "byte",
        "Int16" => "short",
        "UInt16" => "ushort",
        "Int32" => "int",
        "UInt32" => "uint",
        "Int64" => "long",
        "UInt64" => "ulong",
        "Single" => "float",
        "Double" => "double",
        "Decimal" => "decimal",
        "String" => "string",
        "Object" => "object",
        "IntPtr" => "nint",
        "UIntPtr" => "nuint",
        _ => return None,
    })
}

/// A piece of a qualified name between `.`, `+` and `/`.
struct Segment<'a> {
    text: &'a str,
    start: usize,
}

fn segments(path: &str) -> Vec<Segment<'_>> {
    let mut segments = Vec::new();
    let (mut depth, mut start) = (0usize, 0);
    for (at, c) in path.char_indices() {
        match c {
            '<' | '[' | '(' => depth += 1,
            '>' | ']' | ')' => depth = depth.saturating_sub(1),
            // `Type..ctor`: the second dot belongs to the method's name.
            '.' | '+' | '/' if depth == 0 && at > start => {
                segments.push(Segment { text: &path[start..at], start });
                start = at + 1;
            }
            _ => {}
        }
    }
    segments.push(Segment { text: &path[start..], start });
    segments
}

/// `(`…`)` of the parameters, told from brackets inside generic arguments.
fn split_parameters(name: &str) -> (&str, &str) {
    let mut depth = 0usize;
    for (at, c) in name.char_indices() {
        match c {
            '<' | '[' => depth += 1,
            '>' | ']' => depth = depth.saturating_sub(1),
            '(' if depth == 0 => return name.split_at(at),
            _ => {}
        }
    }
    (name, "")
}

/// The type that declares what was written at byte `end` of `path`, with its dot: closure classes are left out.
fn declaring<'a>(path: &'a str, segments: &[Segment<'_>], mut end: usize) -> Cow<'a, str> {
    for segment in segments.iter().rev() {
        if segment.start < end {
            if !segment.text.starts_with("<>c") {
                break;
            }
            end = segment.start;
        }
    }
    let declaring = path[..end].trim_end_matches(['.', '+', '/']);
    if declaring.is_empty() { Cow::Borrowed("") } else { Cow::Owned(format!("{declaring}.")) }
}

/// `<Load>d__3<T>` -> (`Load`, `<T>`); `<<Run>b__0>d<T>` -> (`<Run>b__0`, `<T>`).
fn state_machine(owner: &str) -> Option<(&str, &str)> {
    let (inside, rest) = angled(owner)?;
    let rest = rest.strip_prefix('d')?;
    let rest = rest.strip_prefix("__").unwrap_or(rest).trim_start_matches(|c: char| c.is_ascii_digit());
    (!inside.is_empty() && (rest.is_empty() || rest.starts_with('<'))).then_some((inside, rest))
}

/// What stands between a leading `<` and its `>`, and the rest.
fn angled(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0usize;
    if !text.starts_with('<') {
        return None;
    }
    for (at, c) in text.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return Some((&text[1..at], &text[at + 1..]));
        }
    }
    None
}

/// A method as written, with the closures around the code.
struct Written {
    method: String,
    inner: String,
}

impl Written {
    fn plain(method: &str) -> Self {
        Self {
            method: method.strip_suffix('$').unwrap_or(method).trim_matches(['<', '>']).to_owned(),
            inner: String::new(),
        }
    }

    fn show(&self, arguments: &str) -> String {
        format!("{}{arguments}(…){}", self.method, self.inner)
    }
}

/// `<Run>b__5_0` -> Run(…)+lambda, `<Run>g__Inner|0_1` -> Run(…)+Inner, `<Main>$` -> Main(…); nested ones from the outside in.
fn written(method: &str, depth: usize) -> Option<Written> {
    let (inside, rest) = angled(method)?;
    if inside.is_empty() || depth > MAX_DEPTH {
        return None;
    }
    let mut written = written(inside, depth + 1).unwrap_or_else(|| Written::plain(inside));
    if rest.starts_with("b__") {
        written.inner.push_str("+lambda");
    } else if let Some(inner) = rest.strip_prefix("g__") {
        let (inner, tail) = inner.split_once('|')?;
        let arguments = tail.find('<').map_or("", |at| &tail[at..]);
        write!(written.inner, "+{inner}{arguments}").ok()?;
    } else if rest != "$" {
        return None;
    }
    Some(written)
}

/// Metadata's generic forms turned into C#'s: ``List`1[System.Int32]``, ``List`1[[System.Int32, System.Private.CoreLib]]``,
/// ``List`1<System.Int32>``; an open ``List`1`` stays.
fn generics(text: &str, depth: usize) -> String {
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(tick) = rest.find('`') {
        let (before, after) = rest.split_at(tick);
        shown.push_str(before);
        let digits = after[1..].chars().take_while(char::is_ascii_digit).count();
        let tail = &after[1 + digits..];
        let list = if depth < MAX_DEPTH && digits > 0 { bracketed(tail) } else { None };
        if let Some((arguments, tail)) = list {
            let arguments: Vec<String> =
                arguments.iter().map(|argument| generics(without_assembly(argument), depth + 1)).collect();
            write!(shown, "<{}>", arguments.join(", ")).unwrap_or_default();
            rest = tail;
        } else if digits > 0 && tail.starts_with('<') {
            rest = tail;
        } else {
            shown.push_str(&after[..1 + digits]);
            rest = tail;
        }
    }
    shown.push_str(rest);
    shown
}

/// The comma-separated items of a leading `[`…`]`, and the rest. An array's `[]` or `[,]` is no list.
fn bracketed(text: &str) -> Option<(Vec<&str>, &str)> {
    let inside = text.strip_prefix('[')?;
    if inside.starts_with([']', ',']) {
        return None;
    }
    let (mut depth, mut start, mut items) = (0usize, 0, Vec::new());
    for (at, c) in inside.char_indices() {
        match c {
            '[' | '<' | '(' => depth += 1,
            ']' if depth == 0 => {
                items.push(inside[start..at].trim());
                return Some((items, &inside[at + 1..]));
            }
            ']' | '>' | ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                items.push(inside[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    None
}

/// `[System.Int32, System.Private.CoreLib, Version=…]` -> `System.Int32`.
fn without_assembly(argument: &str) -> &str {
    match bracketed(argument) {
        Some((items, "")) => items.first().copied().unwrap_or(argument),
        _ => argument,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{ProptestConfig, prop_assert, proptest};

    #[test]
    fn compiler_made_names_are_told_back_as_what_was_written() {
        for (raw, shown) in [
            ("Ns.Orders.Load(System.Int32)", "Ns.Orders.Load(System.Int32)"),
            ("Ns.Orders+<Load>d__3.MoveNext()", "Ns.Orders.Load(…)+async"),
            ("Ns.Orders+<Load>d__3<System.Int32>.MoveNext()", "Ns.Orders.Load<System.Int32>(…)+async"),
            ("Ns.Orders+<Load>d__3`1[System.Int32].MoveNext()", "Ns.Orders.Load<System.Int32>(…)+async"),
            ("Ns.Outer+Inner+<Load>d__3.MoveNext()", "Ns.Outer+Inner.Load(…)+async"),
            ("Ns.Type+<>c__DisplayClass5_0.<Run>b__1(System.Int32)", "Ns.Type.Run(…)+lambda"),
            ("Ns.Type+<>c.<Run>b__5_0()", "Ns.Type.Run(…)+lambda"),
            ("Ns.Type+<>c__5<System.Int32>.<Run>b__5_0()", "Ns.Type.Run(…)+lambda"),
            ("Ns.Type+<>c.<.ctor>b__5_0()", "Ns.Type..ctor(…)+lambda"),
            ("Ns.Type.<Run>g__Inner|0_1(System.Int32)", "Ns.Type.Run(…)+Inner"),
            ("Ns.Type.<Run>g__Inner|0_1<System.Int32>()", "Ns.Type.Run(…)+Inner<System.Int32>"),
            ("Ns.Type+<>c__DisplayClass5_0.<Run>g__Inner|1()", "Ns.Type.Run(…)+Inner"),
            ("Ns.Type+<>c+<<Run>b__0_0>d.MoveNext()", "Ns.Type.Run(…)+lambda+async"),
            ("Ns.Type+<<Run>g__Inner|0_0>d.MoveNext()", "Ns.Type.Run(…)+Inner+async"),
            ("Ns.Type.<<Run>g__Inner|0_0>b__2()", "Ns.Type.Run(…)+Inner+lambda"),
            ("Program.<Main>$(System.String[])", "Program.Main(…)"),
            ("Program+<<Main>$>d__0.MoveNext()", "Program.Main(…)+async"),
            ("Program.<<Main>$>g__Work|0_0()", "Program.Main(…)+Work"),
            ("<Load>d__3.MoveNext()", "Load(…)+async"),
            ("Ns.Orders.<Load>d__3<int>.MoveNext()", "Ns.Orders.Load<int>(…)+async"),
            ("Ns.Type<int>.<>c__DisplayClass5_0.<Run>b__1(int)", "Ns.Type<int>.Run(…)+lambda"),
            ("Ns.Type.<>c.<<Run>b__0_0>d.MoveNext()", "Ns.Type.Run(…)+lambda+async"),
            ("Ns.Type..ctor()", "Ns.Type..ctor()"),
            ("Ns.Mine+Enumerator.MoveNext()", "Ns.Mine+Enumerator.MoveNext()"),
            ("A.List`1[System.Int32].Add(T)", "A.List<System.Int32>.Add(T)"),
            ("A.List`1<System.Int32>.Add(T)", "A.List<System.Int32>.Add(T)"),
            (
                "A.Map`2[A.List`1[System.Int32],System.String[]].Get()",
                "A.Map<A.List<System.Int32>, System.String[]>.Get()",
            ),
            (
                "A.List`1[[System.Int32, System.Private.CoreLib, Version=9]].Add(T)",
                "A.List<System.Int32>.Add(T)",
            ),
            ("A.List`1[].Add(T)", "A.List`1[].Add(T)"),
            (
                "A.T.System.Collections.Generic.IEnumerable<System.Int32>.GetEnumerator()",
                "A.T.System.Collections.Generic.IEnumerable<System.Int32>.GetEnumerator()",
            ),
            ("", ""),
        ] {
            assert_eq!(managed(raw), shown, "of {raw}");
        }
    }

    #[test]
    fn types_are_shown_as_they_are_written() {
        for (raw, shown) in [
            ("System.Byte[]", "byte[]"),
            ("System.Int32[,][]", "int[,][]"),
            ("Ns.Order", "Ns.Order"),
            ("Ns.Outer+Inner", "Ns.Outer+Inner"),
            ("System.Collections.Generic.List`1[System.String]", "System.Collections.Generic.List<string>"),
            ("A.Map`2[System.String,A.List`1[Ns.Item[]]][]", "A.Map<string, A.List<Ns.Item[]>>[]"),
            ("A.Outer`1+Inner`1[System.Int32,Ns.Item]", "A.Outer<int>+Inner<Ns.Item>"),
            ("A.Outer`1+Inner[System.Int32]", "A.Outer<int>+Inner"),
            ("A.List`1[[System.Int32, System.Private.CoreLib]]", "A.List<int>"),
            ("Ns.Orders+<Load>d__3", "Ns.Orders.Load(…)+async"),
            ("Ns.Orders+<Load>d__3`1[System.Int32]", "Ns.Orders.Load<int>(…)+async"),
            ("Ns.Type+<>c__DisplayClass5_0", "Ns.Type+closure"),
            ("Ns.Type+<>c", "Ns.Type+lambdas"),
            ("Ns.Type+<>c+<<Run>b__0_0>d", "Ns.Type.Run(…)+lambda+async"),
            (
                "A.Builder`1+Box`1[A.Void,Ns.Orders+<Load>d__3]",
                "A.Builder<A.Void>+Box<Ns.Orders.Load(…)+async>",
            ),
            ("[]", "[]"),
            ("", ""),
        ] {
            assert_eq!(type_name(raw), shown, "of {raw}");
        }
        assert!(type_name(&"A`1[".repeat(1 << 14)).len() <= MAX_BYTES);
        assert!(type_name(&"[".repeat(1 << 14)).len() <= MAX_BYTES);
    }

    #[test]
    fn control_characters_are_escaped_and_length_is_bounded() {
        assert_eq!(clean("a\x1b[31m\nb\u{202e}"), "a\\u{1b}[31m\\u{a}b\\u{202e}");
        assert!(clean(&"x".repeat(1 << 20)).len() <= MAX_BYTES);
        assert!(managed(&"<".repeat(1 << 16)).len() <= MAX_BYTES);
        assert!(managed(&"A`1[".repeat(1 << 14)).len() <= MAX_BYTES);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_text_gives_a_clean_bounded_name(raw in "([A-Z<>\\[\\]`.+/(),|$_0-9é\n]|MoveNext|d__|b__|g__|<>c|[^a])*") {
            prop_assert!(type_name(&raw).len() <= MAX_BYTES);
            let shown = managed(&raw);
            prop_assert!(shown.len() <= MAX_BYTES && !shown.contains(char::is_control));
        }
    }
}
