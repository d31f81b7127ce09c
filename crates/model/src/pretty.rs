//! Managed names for people: what the C# compiler made of a method is told back as the method that
//! was written. Total functions over hostile text; the raw name stays in the profile as
//! `system_name`.

use crate::text::clean;
use std::borrow::Cow;
use std::fmt::Write as _;

/// Deepest nesting of generic arguments and generated names that is rewritten.
const MAX_DEPTH: usize = 16;

/// The readable form of `Namespace.Type+Nested.Method(parameters)`; nested types may be written
/// with `.` or `/` too.
///
/// | compiled | shown |
/// |---|---|
/// | `Ns.Orders+<Load>d__3.MoveNext()` | `Ns.Orders.Load(…)+async` |
/// | `Ns.Type+<>c__DisplayClass5_0.<Run>b__1(System.Int32)` | `Ns.Type.Run(…)+lambda` |
/// | `Ns.Type.<Run>g__Inner\|0_1(System.Int32)` | `Ns.Type.Run(…)+Inner` |
/// | ``Ns.List`1[System.Int32].Add(T)`` | `Ns.List<System.Int32>.Add(T)` |
/// | `Ns.<Orders>F0A…5B__Cache.Get()`, of a type that only its file knows | `Ns.Cache.Get()` |
///
/// `+async` also marks iterators: the compiler gives both the same names.
#[must_use]
pub fn managed(raw: &str) -> String {
    // Bounded first: some steps below look ahead to the end.
    let raw = clean(raw);
    let name = generics(&without_files(&raw), 0);
    let (path, parameters) = split_parameters(&name);
    let segments = segments(path);
    let shown = match segments.as_slice() {
        [.., owner, method] if method.text == "MoveNext" => {
            state_machine(owner.text).map(|(method, arguments)| {
                let written = written(method, 0).unwrap_or_else(|| SourceName::plain(method));
                format!(
                    "{}{}+async",
                    declaring(path, &segments, owner.start),
                    written.show(arguments)
                )
            })
        }
        [.., method] => written(method.text, 0).map(|written| {
            format!("{}{}", declaring(path, &segments, method.start), written.show(""))
        }),
        [] => None,
    };
    clean(&outermost_first(&shown.unwrap_or_else(|| format!("{path}{parameters}")))).into_owned()
}

/// The readable form of a type's name: as the runtime writes it (`TypeString` with namespaces and
/// all arguments) or as the shim does (arguments in `<…>` after the level they belong to, nested
/// types after a dot). Both give the same, so that a type is called alike wherever it is told of.
///
/// | runtime | shim | shown |
/// |---|---|---|
/// | ``Ns.Map`2[System.String,Ns.A[]]`` | `Ns.Map<string, Ns.A[]>` | `Ns.Map<string, Ns.A[]>` |
/// | `Ns.Outer+Inner` | `Ns.Outer.Inner` | `Ns.Outer.Inner` |
/// | `System.Int32[][,]` | `int[][,]` | `int[,][]` |
/// | ``System.Nullable`1[System.Int32]`` | `System.Nullable<int>` | `int?` |
/// | ``System.ValueTuple`2[System.Int32,Ns.A]`` | `System.ValueTuple<int, Ns.A>` | `(int, Ns.A)` |
/// | `Ns.Orders+<Load>d__3` | `Ns.Orders.<Load>d__3` | `Ns.Orders.Load(…)+async` |
/// | the object it is kept in, `…AsyncStateMachineBox` | the same | `Ns.Orders.Load(…)+async` |
/// | `Ns.Type+<>c__DisplayClass5_0` | `Ns.Type.<>c__DisplayClass5_0` | `Ns.Type+closure` |
/// | `Ns.Type+<>c` | `Ns.Type.<>c` | `Ns.Type+lambdas` |
#[must_use]
pub fn type_name(raw: &str) -> String {
    clean(&outermost_first(&type_within(&without_files(&clean(raw)), 0))).into_owned()
}

/// Of arrays of arrays the runtime writes the innermost rank first, and C# the outermost:
/// `int[][,]` of the one is `int[,][]` of the other.
fn outermost_first(name: &str) -> Cow<'_, str> {
    if !name.contains("][") {
        return Cow::Borrowed(name);
    }
    let (mut shown, mut rest) = (String::with_capacity(name.len()), name);
    while let Some(open) = rest.find('[') {
        shown.push_str(&rest[..open]);
        rest = &rest[open..];
        let mut ranks = Vec::new();
        while let Some(inside) = rest.strip_prefix('[') {
            let commas = inside.len() - inside.trim_start_matches(',').len();
            if !inside[commas..].starts_with(']') {
                break;
            }
            ranks.push(&rest[..commas + 2]);
            rest = &rest[commas + 2..];
        }
        if ranks.is_empty() {
            shown.push('[');
            rest = &rest[1..];
        }
        shown.extend(ranks.into_iter().rev());
    }
    shown.push_str(rest);
    Cow::Owned(shown)
}

/// Without what the compiler puts before the name of a type that only its file knows (`file class`,
/// most of them made by generators): the file's name, `F`, the SHA-256 of its path in 64 digits,
/// and `__`.
fn without_files(name: &str) -> Cow<'_, str> {
    const DIGITS: usize = 64;
    let (mut shown, mut rest) = (String::new(), name);
    while let Some(at) = rest.find(">F") {
        let digits = rest.get(at + 2..at + 2 + DIGITS);
        let is_hash =
            digits.is_some_and(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let file =
            rest[..at].rfind('<').filter(|_| is_hash && rest[at + 2 + DIGITS..].starts_with("__"));
        shown.push_str(&rest[..file.unwrap_or(at + 2)]);
        rest = &rest[file.map_or(at + 2, |_| at + 2 + DIGITS + 2)..];
    }
    if rest.len() == name.len() {
        return Cow::Borrowed(name);
    }
    shown.push_str(rest);
    Cow::Owned(shown)
}

/// One level of a nested type's name, or a part of its namespace.
struct Level<'a> {
    name: Cow<'a, str>,
    /// Its own type arguments, as they are shown.
    arguments: Vec<String>,
}

impl Level<'_> {
    fn list(&self) -> String {
        match self.arguments.as_slice() {
            [] => String::new(),
            arguments => format!("<{}>", arguments.join(", ")),
        }
    }

    /// Made by the compiler for closures: `<>c__DisplayClass5_0`, `<>c`, and generic ones like
    /// `<>c__5<T>`.
    fn is_closure(&self) -> bool {
        self.name.strip_prefix("<>c").is_some_and(|rest| rest.is_empty() || rest.starts_with("__"))
    }
}

fn type_within(name: &str, depth: usize) -> String {
    // Arrays, pointers and by-refs, from the end.
    let mut element = name;
    loop {
        let shorter = element.strip_suffix(['*', '&']).or_else(|| {
            let open = element.strip_suffix(']')?.rfind('[')?;
            element[open + 1..element.len() - 1]
                .bytes()
                .all(|b| b == b',')
                .then(|| &element[..open])
        });
        match shorter {
            Some(shorter) if !shorter.is_empty() => element = shorter,
            _ => break,
        }
    }
    shown_type(&levels(element, depth)) + &name[element.len()..]
}

fn levels(element: &str, depth: usize) -> Vec<Level<'_>> {
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
    // What is bracketed as a whole is a name that is none, such as `[unknown type]`.
    let open = open.filter(|open| *open > 0);
    let (path, listed) =
        match open.and_then(|open| Some((&element[..open], bracketed(&element[open..])?))) {
            Some((path, (arguments, ""))) => (path, arguments),
            _ => (element, Vec::new()),
        };
    let shown = listed.iter().map(|argument| type_within(without_assembly(argument), depth + 1));
    let mut left = shown.collect::<Vec<_>>().into_iter();
    let segments = segments(path);
    let count = segments.len();
    let levels = segments.iter().enumerate().map(|(at, segment)| {
        let (name, own) = own_arguments(segment.text, depth);
        // The runtime lists arguments for all levels together, outermost first: each level gets its
        // own, and the innermost what is left.
        let arity = if at + 1 == count { usize::MAX } else { arity(name) };
        let arguments = own.into_iter().chain(left.by_ref().take(arity)).collect();
        Level { name: without_arity(name), arguments }
    });
    levels.collect()
}

/// A segment's name, and the arguments behind it as the shim writes them.
fn own_arguments(segment: &str, depth: usize) -> (&str, Vec<String>) {
    let none = (segment, Vec::new());
    // What the compiler made begins with a bracket, which is a part of its name.
    let from = angled(segment).map_or(0, |(inside, _)| inside.len() + 2);
    let Some(open) = segment[from..].find('<').map(|at| from + at).filter(|_| depth < MAX_DEPTH)
    else {
        return none;
    };
    match (&segment[..open], angled(&segment[open..])) {
        (name, Some((inside, ""))) if !name.is_empty() => (
            name,
            split_list(inside).iter().map(|argument| type_within(argument, depth + 1)).collect(),
        ),
        _ => none,
    }
}

/// The items between commas that stand outside of brackets.
fn split_list(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut items) = (0usize, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '[' | '<' | '(' => depth += 1,
            ']' | '>' | ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                items.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(list[start..].trim());
    items
}

fn shown_type(levels: &[Level<'_>]) -> String {
    let Some((last, before)) = levels.split_last() else { return String::new() };
    if let Some(machine) = boxed(before, last) {
        return machine.clone();
    }
    if let Some((method, "")) = state_machine(&last.name) {
        let written = written(method, 0).unwrap_or_else(|| SourceName::plain(method));
        let declaring = without_closures(before);
        let dot = if declaring.is_empty() { "" } else { "." };
        return format!("{}{dot}{}+async", joined(declaring), written.show(&last.list()));
    }
    if last.is_closure() {
        let what = if last.name.starts_with("<>c__DisplayClass") { "closure" } else { "lambdas" };
        return format!("{}+{what}{}", joined(without_closures(before)), last.list());
    }
    if let ([Level { name, .. }], "ValueTuple", [_, _, ..]) =
        (before, &*last.name, last.arguments.as_slice())
        && name == "System"
    {
        return tuple(&last.arguments);
    }
    if let ([Level { name, .. }], "Nullable", [of]) =
        (before, &*last.name, last.arguments.as_slice())
        && name == "System"
    {
        return format!("{of}?");
    }
    let whole = joined(levels);
    keyword(&whole).map_or(whole, str::to_owned)
}

/// What an async method keeps its state in while it waits, where it is known: the object that the
/// builder makes for that, `AsyncTaskMethodBuilder<TResult>.AsyncStateMachineBox<TStateMachine>`
/// and the like, is the method's and nobody else's.
fn boxed<'a>(before: &[Level<'_>], last: &'a Level<'_>) -> Option<&'a String> {
    let [system, runtime, services, builder] = before else { return None };
    let is_builder = [system, runtime, services].map(|level| &*level.name)
        == ["System", "Runtime", "CompilerServices"]
        && builder.name.ends_with("MethodBuilder")
        && last.name.ends_with("StateMachineBox");
    last.arguments.last().filter(|machine| is_builder && machine.ends_with("+async"))
}

/// `(A, B)`. The eighth of more than seven is a tuple of the rest.
fn tuple(arguments: &[String]) -> String {
    let items = arguments.join(", ");
    match arguments {
        [seven @ .., rest] if seven.len() == 7 => {
            let of_one =
                rest.strip_prefix("System.ValueTuple<").and_then(|rest| rest.strip_suffix('>'));
            let of_more = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')'));
            match of_more.or(of_one) {
                Some(rest) => format!("({}, {rest})", seven.join(", ")),
                None => format!("({items})"),
            }
        }
        _ => format!("({items})"),
    }
}

fn joined(levels: &[Level<'_>]) -> String {
    let levels: Vec<String> =
        levels.iter().map(|level| format!("{}{}", level.name, level.list())).collect();
    levels.join(".")
}

/// Without the classes of closures at the end.
fn without_closures<'a, 'b>(levels: &'a [Level<'b>]) -> &'a [Level<'b>] {
    let outer = levels.iter().rposition(|level| !level.is_closure());
    levels.get(..outer.map_or(0, |at| at + 1)).unwrap_or(levels)
}

/// The number of type parameters behind a tick.
fn arity(name: &str) -> usize {
    name.rsplit_once('`').and_then(|(_, digits)| digits.parse().ok()).unwrap_or(0)
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
        "Void" => "void",
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
        "__Canon" => "__Canon",
        _ => return None,
    })
}

/// A piece of a qualified name between `.`, `+` and `/`.
struct NameSegment<'a> {
    text: &'a str,
    start: usize,
}

fn segments(path: &str) -> Vec<NameSegment<'_>> {
    let mut segments = Vec::new();
    let (mut depth, mut start) = (0usize, 0);
    for (at, c) in path.char_indices() {
        match c {
            '<' | '[' | '(' => depth += 1,
            '>' | ']' | ')' => depth = depth.saturating_sub(1),
            // `Type..ctor`: the second dot belongs to the method's name.
            '.' | '+' | '/' if depth == 0 && at > start => {
                segments.push(NameSegment { text: &path[start..at], start });
                start = at + 1;
            }
            _ => {}
        }
    }
    segments.push(NameSegment { text: &path[start..], start });
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

/// The type that declares what was written at byte `end` of `path`, with its dot: closure classes
/// are left out.
fn declaring<'a>(path: &'a str, segments: &[NameSegment<'_>], mut end: usize) -> Cow<'a, str> {
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
    let rest =
        rest.strip_prefix("__").unwrap_or(rest).trim_start_matches(|c: char| c.is_ascii_digit());
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
struct SourceName {
    method: String,
    inner: String,
}

impl SourceName {
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

/// `<Run>b__5_0` -> Run(…)+lambda, `<Run>g__Inner|0_1` -> Run(…)+Inner, `<Main>$` -> Main(…);
/// nested ones from the outside in.
fn written(method: &str, depth: usize) -> Option<SourceName> {
    let (inside, rest) = angled(method)?;
    if inside.is_empty() || depth > MAX_DEPTH {
        return None;
    }
    let mut written = written(inside, depth + 1).unwrap_or_else(|| SourceName::plain(inside));
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

/// Metadata's generic forms turned into C#'s: ``List`1[System.Int32]``, ``List`1[[System.Int32,
/// System.Private.CoreLib]]``, ``List`1<System.Int32>``; an open ``List`1`` stays.
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
            let arguments: Vec<String> = arguments
                .iter()
                .map(|argument| generics(without_assembly(argument), depth + 1))
                .collect();
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

/// The comma-separated items of a leading `[`…`]`, and the rest. An array's `[]` or `[,]` is no
/// list.
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
    use crate::text::MAX_BYTES;
    use proptest::prelude::{ProptestConfig, prop_assert, proptest};

    #[test]
    fn compiler_made_names_are_told_back_as_what_was_written() {
        for (raw, shown) in [
            ("Ns.Orders.Load(System.Int32)", "Ns.Orders.Load(System.Int32)"),
            ("Ns.Orders+<Load>d__3.MoveNext()", "Ns.Orders.Load(…)+async"),
            (
                "Ns.Orders+<Load>d__3<System.Int32>.MoveNext()",
                "Ns.Orders.Load<System.Int32>(…)+async",
            ),
            (
                "Ns.Orders+<Load>d__3`1[System.Int32].MoveNext()",
                "Ns.Orders.Load<System.Int32>(…)+async",
            ),
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
    fn a_type_that_only_its_file_knows_has_its_own_name() {
        let of = |digits: &str| format!("<Regex_g>F{digits}__");
        let file = of(&"0A".repeat(32));
        for (raw, shown) in [
            (format!("Ns.{file}Cache.Get(Ns.{file}Key)"), "Ns.Cache.Get(Ns.Key)"),
            (format!("Ns.{file}Cache`1[Ns.{file}Key].Get()"), "Ns.Cache<Ns.Key>.Get()"),
            (format!("Ns.{file}Cache+<Load>d__3.MoveNext()"), "Ns.Cache.Load(…)+async"),
        ] {
            assert_eq!(managed(&raw), shown, "of {raw}");
        }
        assert_eq!(
            type_name(&format!("Ns.Map<Ns.{file}Key, {file}Value[]>")),
            "Ns.Map<Ns.Key, Value[]>"
        );
        // Something else, cut short, and hostile text.
        for raw in [
            of(&"0A".repeat(31)),
            of("é"),
            ">F".repeat(99),
            format!(">F{}__A", "0A".repeat(32)),
            "<>F{1}".into(),
        ] {
            assert_eq!(type_name(&raw), raw);
        }
    }

    #[test]
    fn types_are_shown_as_they_are_written_whoever_tells_of_them() {
        // The runtime's name, the shim's, and what both become.
        for (raw, of_shim, shown) in [
            ("System.Byte[]", "byte[]", "byte[]"),
            ("System.Int32[,][]", "int[,][]", "int[][,]"),
            ("System.Int32[][,][,,]*[][,]", "int[][,][,,]*[][,]", "int[,,][,][]*[,][]"),
            ("A.List`1[System.Int32[][,]][]", "A.List<int[][,]>[]", "A.List<int[,][]>[]"),
            ("System.Nullable`1[System.Int32][]", "System.Nullable<int>[]", "int?[]"),
            ("System.Nullable`1[System.__Canon]", "System.Nullable<__Canon>", "__Canon?"),
            ("System.Int32*[]", "int*[]", "int*[]"),
            ("Ns.Order", "Ns.Order", "Ns.Order"),
            ("Ns.Outer+Inner", "Ns.Outer.Inner", "Ns.Outer.Inner"),
            ("A.List`1[System.__Canon]", "A.List<__Canon>", "A.List<__Canon>"),
            (
                "System.Collections.Generic.List`1[System.String]",
                "System.Collections.Generic.List<string>",
                "System.Collections.Generic.List<string>",
            ),
            (
                "A.Map`2[System.String,A.List`1[Ns.Item[]]][]",
                "A.Map<string, A.List<Ns.Item[]>>[]",
                "A.Map<string, A.List<Ns.Item[]>>[]",
            ),
            (
                "A.Outer`1+Inner`1[System.Int32,Ns.Item]",
                "A.Outer<int>.Inner<Ns.Item>",
                "A.Outer<int>.Inner<Ns.Item>",
            ),
            ("A.Outer`1+Inner[System.Int32]", "A.Outer<int>.Inner", "A.Outer<int>.Inner"),
            ("A.List`1[[System.Int32, System.Private.CoreLib]]", "A.List<int>", "A.List<int>"),
            (
                "System.ValueTuple`2[System.Int32,Ns.A]",
                "System.ValueTuple<int, Ns.A>",
                "(int, Ns.A)",
            ),
            (
                "System.ValueTuple`1[System.Int32]",
                "System.ValueTuple<int>",
                "System.ValueTuple<int>",
            ),
            (
                "A.List`1[System.ValueTuple`2[Ns.A,System.ValueTuple`2[Ns.B,System.Int32[]]]][]",
                "A.List<System.ValueTuple<Ns.A, System.ValueTuple<Ns.B, int[]>>>[]",
                "A.List<(Ns.A, (Ns.B, int[]))>[]",
            ),
            (
                "System.ValueTuple`8[A,B,C,D,E,F,G,System.ValueTuple`2[H,I]]",
                "System.ValueTuple<A, B, C, D, E, F, G, System.ValueTuple<H, I>>",
                "(A, B, C, D, E, F, G, H, I)",
            ),
            (
                "System.ValueTuple`8[A,B,C,D,E,F,G,System.ValueTuple`1[H]]",
                "System.ValueTuple<A, B, C, D, E, F, G, System.ValueTuple<H>>",
                "(A, B, C, D, E, F, G, H)",
            ),
            ("System.Tuple`2[A,B]", "System.Tuple<A, B>", "System.Tuple<A, B>"),
            ("Ns.Orders+<Load>d__3", "Ns.Orders.<Load>d__3", "Ns.Orders.Load(…)+async"),
            (
                "Ns.Orders+<Load>d__3`1[System.Int32]",
                "Ns.Orders.<Load>d__3<int>",
                "Ns.Orders.Load<int>(…)+async",
            ),
            (
                "Ns.Table`1+<Rows>d__3[System.Int32][]",
                "Ns.Table<int>.<Rows>d__3[]",
                "Ns.Table<int>.Rows(…)+async[]",
            ),
            ("Program+<<Main>$>d__0", "Program.<<Main>$>d__0", "Program.Main(…)+async"),
            ("Ns.Type+<>c__DisplayClass5_0", "Ns.Type.<>c__DisplayClass5_0", "Ns.Type+closure"),
            (
                "Ns.Type`1+<>c__DisplayClass5_0`1[System.Int32,Ns.A]",
                "Ns.Type<int>.<>c__DisplayClass5_0<Ns.A>",
                "Ns.Type<int>+closure<Ns.A>",
            ),
            (
                "A.List`1[Ns.Type+<>c__DisplayClass5_0]",
                "A.List<Ns.Type.<>c__DisplayClass5_0>",
                "A.List<Ns.Type+closure>",
            ),
            ("Ns.Type+<>c", "Ns.Type.<>c", "Ns.Type+lambdas"),
            ("Ns.Type+<>c__5`1[System.Int32]", "Ns.Type.<>c__5<int>", "Ns.Type+lambdas<int>"),
            (
                "Ns.Type+<>c+<<Run>b__0_0>d",
                "Ns.Type.<>c.<<Run>b__0_0>d",
                "Ns.Type.Run(…)+lambda+async",
            ),
            (
                "Ns.T+<A.IEnumerable<System.Int32>.Get>d__1",
                "Ns.T.<A.IEnumerable<System.Int32>.Get>d__1",
                "Ns.T.A.IEnumerable<System.Int32>.Get(…)+async",
            ),
            (
                "System.Runtime.CompilerServices.AsyncTaskMethodBuilder`1+AsyncStateMachineBox`1\
                 [A.Void,Ns.Orders+<Load>d__3]",
                "System.Runtime.CompilerServices.AsyncTaskMethodBuilder<A.Void>\
                 .AsyncStateMachineBox<Ns.Orders.<Load>d__3>",
                "Ns.Orders.Load(…)+async",
            ),
            (
                "A.Builder`1+Box`1[A.Void,Ns.Orders+<Load>d__3]",
                "A.Builder<A.Void>.Box<Ns.Orders.<Load>d__3>",
                "A.Builder<A.Void>.Box<Ns.Orders.Load(…)+async>",
            ),
            (
                "<>f__AnonymousType0`2[System.Int32,Ns.A]",
                "<>f__AnonymousType0<int, Ns.A>",
                "<>f__AnonymousType0<int, Ns.A>",
            ),
            ("<>c", "<>c", "+lambdas"),
            ("[]", "[]", "[]"),
            ("[other types]", "[other types]", "[other types]"),
            ("?", "?", "?"),
            ("", "", ""),
        ] {
            assert_eq!(type_name(raw), shown, "of {raw}");
            assert_eq!(type_name(of_shim), shown, "of the shim's {of_shim}");
        }
        // Cut in the middle: as it is.
        assert_eq!(type_name("A.List<B.C<D…"), "A.List<B.C<D…");
        for hostile in ["A`1[", "[", "A<", "<", "<>c.", "System.ValueTuple<A, "] {
            assert!(type_name(&hostile.repeat(1 << 14)).len() <= MAX_BYTES, "{hostile}");
        }
    }

    #[test]
    fn names_of_any_depth_have_a_bounded_length() {
        assert!(managed(&"<".repeat(1 << 16)).len() <= MAX_BYTES);
        assert!(managed(&"A`1[".repeat(1 << 14)).len() <= MAX_BYTES);
    }

    /// Any text, more often than not with what names of types and methods are made of.
    const NAME_LIKE: &str = "([A-Z<>\\[\\]`.+/(),|$_0-9é\n]|MoveNext|d__|b__|g__|<>c|[^a])*";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_text_gives_a_clean_bounded_name(raw in NAME_LIKE) {
            prop_assert!(type_name(&raw).len() <= MAX_BYTES);
            let shown = managed(&raw);
            prop_assert!(shown.len() <= MAX_BYTES && !shown.contains(char::is_control));
        }
    }
}
