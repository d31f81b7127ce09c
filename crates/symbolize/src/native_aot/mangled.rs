//! Names in the symbol table of a NativeAOT program, taken apart as far as that is certain.
//!
//! The compiler joins assembly, namespace and types by `_`, a type and its method by `__`, and
//! writes `_` for each character that C does not know (dotnet/runtime src/coreclr/tools/aot/
//! ILCompiler.Compiler/Compiler/NativeAotNameMangler.cs). So a symbol alone does not say where its
//! parts begin. The names of the program's types do: each is mangled the same way, and looked up.

use super::metadata::TypePath;
use std::cell::Cell;
use std::collections::HashMap;

/// Longest symbol that is taken apart.
const MAX_SYMBOL_BYTES: usize = 4096;
/// Most attempts at one symbol.
const MAX_STEPS: u32 = 20_000;
const MAX_DEPTH: u32 = 16;

/// Types of System.Private.CoreLib that have short names.
const SHORT: [(&str, &str); 16] = [
    ("Boolean", "Bool"),
    ("Byte", "UInt8"),
    ("SByte", "Int8"),
    ("UInt16", "UInt16"),
    ("Int16", "Int16"),
    ("UInt32", "UInt32"),
    ("Int32", "Int32"),
    ("UInt64", "UInt64"),
    ("Int64", "Int64"),
    ("Char", "Char"),
    ("Double", "Double"),
    ("Single", "Single"),
    ("IntPtr", "IntPtr"),
    ("UIntPtr", "UIntPtr"),
    ("Object", "Object"),
    ("String", "String"),
];
const CORE_LIBRARY: &str = "System.Private.CoreLib";
/// What stands for all reference types in shared code; the compiler's own type, of no assembly.
const CANON: &str = "System___Canon";

/// A name as a C identifier.
pub(super) fn sanitized(name: &str) -> String {
    let first = name.chars().next();
    let digit = first.filter(char::is_ascii_digit).map(|_| '_');
    let valid = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    digit.into_iter().chain(name.chars().map(valid)).collect()
}

/// A type's name in symbols, without type arguments.
pub(super) fn mangled(path: &TypePath) -> String {
    if let [level] = path.levels.as_slice()
        && path.assembly == CORE_LIBRARY
        && path.namespace == "System"
        && let Some((_, short)) =
            SHORT.iter().find(|(name, _)| level.arity == 0 && *name == level.name)
    {
        return (*short).to_owned();
    }
    let assembly = match path.assembly.strip_prefix("System.Private.") {
        Some(rest) => format!("S.P.{rest}"),
        None => path.assembly.clone(),
    };
    let mut name = sanitized(&assembly);
    if !path.namespace.is_empty() {
        name = format!("{name}_{}", sanitized(&path.namespace));
    }
    for level in &path.levels {
        name = format!("{name}_{}", sanitized(&level.name));
        if level.arity > 0 {
            name = format!("{name}_{}", level.arity);
        }
    }
    name
}

/// The types of a program by their mangled names.
#[derive(Debug, Default)]
pub(super) struct MangledTypes {
    /// `None` where several have one name.
    known: HashMap<String, Option<TypePath>>,
    /// Assembly and namespace, mangled, by which a type without methods is told.
    prefixes: HashMap<String, (String, String)>,
}

impl MangledTypes {
    pub(super) fn new(types: Vec<TypePath>) -> Self {
        let mut all = Self::default();
        for core in SHORT {
            let level = super::metadata::TypeLevel { name: core.0.to_owned(), arity: 0 };
            let path = TypePath {
                assembly: CORE_LIBRARY.to_owned(),
                namespace: "System".to_owned(),
                levels: vec![level],
            };
            all.known.insert(core.1.to_owned(), Some(path));
        }
        for path in types {
            let whole = mangled(&path);
            let outer = TypePath { levels: Vec::new(), ..path.clone() };
            all.prefixes.insert(
                format!("{}_", mangled(&outer)),
                (path.assembly.clone(), path.namespace.clone()),
            );
            let known = all.known.entry(whole).or_insert_with(|| Some(path.clone()));
            if known.as_ref() != Some(&path) {
                *known = None;
            }
        }
        all
    }

    /// A type, as C# writes it; `None` where that is not certain.
    fn resolve(&self, name: &str, steps: &Cell<u32>, depth: u32) -> Option<String> {
        steps.set(steps.get().checked_sub(1)?);
        if depth > MAX_DEPTH {
            return None;
        }
        if name == CANON {
            return Some("__Canon".to_owned());
        }
        let within = |inside: &str| self.resolve(inside, steps, depth + 1);
        if let Some(element) = name.strip_prefix("__Array<").and_then(|rest| rest.strip_suffix('>'))
        {
            return Some(format!("{}[]", within(element)?));
        }
        if let Some(element) = name.strip_suffix("<ByRef>") {
            return Some(format!("{}&", within(element)?));
        }
        if let Some(element) = name.strip_suffix("<Pointer>") {
            return Some(format!("{}*", within(element)?));
        }
        match name.split_once('<') {
            None => Some(self.definition(name)?.text(&[])).filter(|_| self.arity(name) == Some(0)),
            Some((base, list)) => {
                let path = self.definition(base)?;
                let arguments =
                    self.arguments_within(list.strip_suffix('>')?, path.arity(), steps, depth)?;
                Some(path.text(&arguments))
            }
        }
    }

    fn arity(&self, name: &str) -> Option<usize> {
        Some(self.definition(name)?.arity())
    }

    /// The type of this name without arguments.
    fn definition(&self, name: &str) -> Option<TypePath> {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        // A type that nothing else tells of, directly in a namespace that others are in. Without
        // another `_` there is only one way to read it.
        let (prefix, simple) = name.split_at(name.rfind('_')? + 1);
        let (assembly, namespace) = self.prefixes.get(prefix)?;
        let is_simple = simple.starts_with(|c: char| c.is_ascii_alphabetic());
        is_simple.then(|| TypePath {
            assembly: assembly.clone(),
            namespace: namespace.clone(),
            levels: vec![super::metadata::TypeLevel { name: simple.to_owned(), arity: 0 }],
        })
    }

    /// So many type arguments, which stand between `__`.
    fn arguments_within(
        &self,
        list: &str,
        count: usize,
        steps: &Cell<u32>,
        depth: u32,
    ) -> Option<Vec<String>> {
        let mut found = None;
        if count == 1 {
            return Some(vec![self.resolve(list, steps, depth + 1)?]);
        }
        for at in separators(list) {
            let Some(first) = self.resolve(list.get(..at)?, steps, depth + 1) else { continue };
            let rest = list.get(at + 2..)?;
            if let Some(rest) = self.arguments_within(rest, count.checked_sub(1)?, steps, depth) {
                if found.is_some() {
                    return None;
                }
                found = Some([vec![first], rest].concat());
            }
        }
        found
    }

    /// So many type arguments from between their brackets.
    pub(super) fn arguments(&self, list: &str, count: usize) -> Option<Vec<String>> {
        if list.len() > MAX_SYMBOL_BYTES || count == 0 {
            return None;
        }
        self.arguments_within(list, count, &Cell::new(MAX_STEPS), 0)
    }

    /// `Type.Method` of a symbol whose method the program says nothing of: a thunk, or a method
    /// that is left out of stack traces. `None` where there is not exactly one way to read it.
    pub(super) fn method(&self, symbol: &str) -> Option<String> {
        if symbol.len() > MAX_SYMBOL_BYTES {
            return None;
        }
        let (steps, mut found) = (Cell::new(MAX_STEPS), None);
        for at in separators(symbol) {
            let (owner, method) = (symbol.get(..at)?, symbol.get(at + 2..)?);
            if let Some(method) = plain_method(method)
                && let Some(owner) = self.resolve(owner, &steps, 0)
            {
                if found.is_some() {
                    return None;
                }
                found = Some(format!("{owner}.{method}"));
            }
        }
        found
    }
}

/// Where `__` is outside of brackets, with a character before it.
fn separators(text: &str) -> Vec<usize> {
    let (mut depth, mut found) = (0_usize, Vec::new());
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'<' => depth += 1,
            b'>' => depth = depth.saturating_sub(1),
            b'_' if depth == 0 && at > 0 && text[at..].starts_with("__") => found.push(at),
            _ => {}
        }
    }
    found
}

/// The part of a symbol behind the type, where it says what the method is called.
fn plain_method(text: &str) -> Option<&str> {
    let is_word = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.chars().all(|c| c.is_ascii_alphanumeric())
    };
    for (mangled, name) in [("_ctor", ".ctor"), ("_cctor", ".cctor")] {
        if let Some(rest) = text.strip_prefix(mangled) {
            let digits = rest.strip_prefix('_').unwrap_or(rest);
            let is_overload = rest.is_empty()
                || rest.starts_with('_')
                    && !digits.is_empty()
                    && digits.bytes().all(|b| b.is_ascii_digit());
            return is_overload.then_some(name);
        }
    }
    if text == "__GetFieldHelper" {
        return Some(text);
    }
    let accessor = ["get_", "set_", "add_", "remove_", "op_"]
        .iter()
        .any(|prefix| text.strip_prefix(prefix).is_some_and(is_word));
    (is_word(text) || accessor).then_some(text)
}

/// What stands between the first `<` and the `>` that closes it, and what is behind that.
pub(super) fn bracketed(text: &str) -> Option<(&str, &str)> {
    let inside = text.strip_prefix('<')?;
    let mut depth = 1_usize;
    for (at, byte) in inside.bytes().enumerate() {
        match byte {
            b'<' => depth += 1,
            b'>' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((&inside[..at], &inside[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::metadata::{TypeLevel, TypePath};
    use super::{MangledTypes, mangled, sanitized};

    fn path(assembly: &str, namespace: &str, levels: &[(&str, usize)]) -> TypePath {
        let level = |&(name, arity): &(&str, usize)| TypeLevel { name: name.to_owned(), arity };
        TypePath {
            assembly: assembly.to_owned(),
            namespace: namespace.to_owned(),
            levels: levels.iter().map(level).collect(),
        }
    }

    fn types() -> MangledTypes {
        const CORE: &str = "System.Private.CoreLib";
        MangledTypes::new(vec![
            path(CORE, "System.Collections.Generic", &[("List", 1)]),
            path(CORE, "System.Collections.Generic", &[("Dictionary", 2), ("Entry", 0)]),
            path(CORE, "System", &[("Func", 2)]),
            path(CORE, "System", &[("Boolean", 0)]),
            path(CORE, "System.Threading.Tasks", &[("VoidTaskResult", 0)]),
            path("Work", "", &[("Shop", 0)]),
            path("Work", "", &[("Shop", 0), ("<SaveOrderAsync>d__13", 0)]),
            path("Work", "A", &[("B_C", 0)]),
            path("Work", "A.B", &[("C", 0)]),
        ])
    }

    #[test]
    fn names_are_mangled_as_the_compiler_does_it() {
        for (of, expected) in [
            (
                path("Work", "", &[("Shop", 0), ("<SaveOrderAsync>d__13", 0)]),
                "Work_Shop__SaveOrderAsync_d__13",
            ),
            (path("System.Private.CoreLib", "System", &[("Byte", 0)]), "UInt8"),
            (path("System.Private.CoreLib", "System", &[("Func", 2)]), "S_P_CoreLib_System_Func_2"),
            (
                path("System.Private.CoreLib", "", &[("<>y__InlineArray4", 1)]),
                "S_P_CoreLib___y__InlineArray4_1",
            ),
            (path("7zip", "", &[("Ä", 0)]), "_7zip__"),
        ] {
            assert_eq!(mangled(&of), expected);
        }
        assert_eq!(sanitized(""), "");
    }

    #[test]
    fn type_arguments_are_read_by_what_is_known() {
        let types = types();
        let one = |list| types.arguments(list, 1).map(|all| all.concat());
        assert_eq!(one("Int32").as_deref(), Some("int"));
        assert_eq!(one("System___Canon").as_deref(), Some("__Canon"));
        assert_eq!(
            one("Work_Shop__SaveOrderAsync_d__13").as_deref(),
            Some("Shop.<SaveOrderAsync>d__13")
        );
        assert_eq!(one("Work_OrderLine").as_deref(), Some("OrderLine"), "beside Shop");
        assert_eq!(one("__Array<UInt8<Pointer>>").as_deref(), Some("byte*[]"));
        assert_eq!(
            one("S_P_CoreLib_System_Collections_Generic_Dictionary_2_Entry<Int32__Work_Shop>")
                .as_deref(),
            Some("System.Collections.Generic.Dictionary<int, Shop>.Entry")
        );
        assert_eq!(
            types.arguments(
                "System___Canon__S_P_CoreLib_System_Collections_Generic_List_1<Bool>",
                2
            ),
            Some(vec!["__Canon".to_owned(), "System.Collections.Generic.List<bool>".to_owned()])
        );
        for unknown in [
            "Work_A_B_C",
            "Other_Thing",
            "Work_Some_Thing",
            "",
            "Int32__Int32",
            "S_P_CoreLib_System_Collections_Generic_List_1",
        ] {
            assert_eq!(one(unknown), None, "{unknown}");
        }
        assert_eq!(types.arguments("Int32", 2), None);
    }

    #[test]
    fn a_symbol_that_can_be_read_in_several_ways_stays_as_it_is() {
        let types = types();
        let read = |symbol: &str| types.method(symbol);
        assert_eq!(
            read("S_P_CoreLib_System_Func_2<Int32__System___Canon>__InvokeOpenStaticThunk")
                .as_deref(),
            Some("System.Func<int, __Canon>.InvokeOpenStaticThunk")
        );
        assert_eq!(read("Work_Shop___ctor_0").as_deref(), Some("Shop..ctor"));
        assert_eq!(read("Work_Shop____GetFieldHelper").as_deref(), Some("Shop.__GetFieldHelper"));
        assert_eq!(read("Work_Shop__get_Item").as_deref(), Some("Shop.get_Item"));
        // An overload, or a method that is called so.
        assert_eq!(read("Work_Shop__Parse_0"), None);
        // A lambda, or a method that is called so.
        assert_eq!(read("Work_Shop___Main_b__0"), None);
        assert_eq!(read("Work_A_B_C__M"), None, "two types have this name");
        assert_eq!(read("RhpNewFast"), None);
        assert_eq!(read("_ZN3foo3barEv"), None);
        assert_eq!(read(&"_".repeat(4000)), None);
        assert_eq!(read(&format!("Work_Shop{}M", "<Int32__".repeat(400))), None);
    }
}
