//! C++ and Rust names made readable.

use cpp_demangle::{DemangleNodeType, DemangleOptions, DemangleWrite};
use std::fmt;
use std::panic::{UnwindSafe, catch_unwind};

/// The whole name, with parameters and template arguments; `None` for a name of neither language.
#[must_use]
pub fn whole(system_name: &str) -> Option<String> {
    guarded(|| {
        if let Ok(rust) = rustc_demangle::try_demangle(system_name) {
            return Some(format!("{rust:#}"));
        }
        if !system_name.starts_with("_Z") {
            return None;
        }
        cpp_demangle::Symbol::new(system_name.as_bytes()).ok()?.demangle().ok()
    })
}

/// The name as `go tool pprof` shows it by default (`internal/symbolizer`): without parameters,
/// return type, template arguments and the compiler's suffixes. `None` for a name of neither
/// language.
#[must_use]
pub fn simple(system_name: &str) -> Option<String> {
    let readable = guarded(|| {
        if !system_name.starts_with('_') {
            return None;
        }
        if let Ok(rust) = rustc_demangle::try_demangle(system_name) {
            let name = format!("{rust:#}");
            // Names of the older form have arguments only where they tell implementations apart.
            let name = if system_name.starts_with("_R") { without_generics(&name) } else { name };
            return Some(name.split(".llvm.").next().unwrap_or_default().to_owned());
        }
        if !system_name.starts_with("_Z") {
            return None;
        }
        let symbol = cpp_demangle::Symbol::new(system_name.as_bytes()).ok()?;
        let mut name = NameWithoutTemplates::default();
        let options = DemangleOptions::new().no_params().no_return_type();
        symbol.structured_demangle(&mut name, &options).ok()?;
        let text = name.text.split(" [clone ").next().unwrap_or_default();
        // The qualifier of a local class's method stands behind its name.
        Some(text.strip_suffix(" const").unwrap_or(text).to_owned())
    });
    // Tables and thunks are written in braces, in words that pprof does not use.
    readable.filter(|name| !name.starts_with('{'))
}

/// What a demangler answers, if it is a name. A library's bug must not end the program: names are
/// hostile input.
fn guarded(demangle: impl FnOnce() -> Option<String> + UnwindSafe) -> Option<String> {
    catch_unwind(demangle).ok().flatten().filter(|name| !name.is_empty())
}

/// A C++ name while it is written. The demangler writes `<` before it enters template arguments,
/// and `>` once it has left them.
#[derive(Default)]
struct NameWithoutTemplates {
    text: String,
    /// The nodes around what is written, and whether each is one of template arguments.
    nodes: Vec<bool>,
    /// Inside so many template arguments.
    depth: usize,
    /// The `>` of arguments that were left out comes next.
    is_closing: bool,
}

impl DemangleWrite for NameWithoutTemplates {
    fn push_demangle_node(&mut self, node: DemangleNodeType) {
        let is_arguments = node == DemangleNodeType::TemplateArgs;
        if is_arguments && self.depth == 0 && self.text.ends_with('<') {
            self.text.pop();
            // `operator< <int>`.
            if self.text.ends_with("< ") {
                self.text.pop();
            }
        }
        self.depth += usize::from(is_arguments);
        self.nodes.push(is_arguments);
    }

    fn write_string(&mut self, text: &str) -> fmt::Result {
        if self.depth > 0 {
            return Ok(());
        }
        let mut text = text;
        if std::mem::take(&mut self.is_closing) {
            text = text.strip_prefix('>').unwrap_or(text);
        }
        self.text.push_str(text);
        Ok(())
    }

    fn pop_demangle_node(&mut self) {
        if self.nodes.pop() == Some(true) {
            self.depth = self.depth.saturating_sub(1);
            self.is_closing = self.depth == 0;
        }
    }
}

/// A Rust name with nothing between the brackets of generic arguments, as pprof has it. A `<` that
/// begins a path stands behind no name and no `::`.
fn without_generics(name: &str) -> String {
    let (mut text, mut depth, mut before) = (String::with_capacity(name.len()), 0_usize, ' ');
    // Whether each open bracket is one of arguments.
    let mut open = Vec::new();
    for character in name.chars() {
        match character {
            '<' => {
                let is_arguments = before.is_alphanumeric() || matches!(before, '_' | ':' | '}');
                if depth == 0 {
                    text.push('<');
                }
                depth += usize::from(is_arguments);
                open.push(is_arguments);
            }
            // Else no bracket: `fn() -> T`.
            '>' if before != '-' => {
                depth = depth.saturating_sub(usize::from(open.pop() == Some(true)));
                if depth == 0 {
                    text.push('>');
                }
            }
            _ if depth == 0 => text.push(character),
            _ => {}
        }
        before = character;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::simple;

    #[test]
    fn simple_names_are_those_that_pprof_shows() {
        // Expected: github.com/ianlancetaylor/demangle with pprof's options.
        for (mangled, expected) in [
            ("_ZN3foo3barEv", "foo::bar"),
            ("_ZN3fooE", "foo"),
            ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector::push_back"),
            ("_ZNK3foo3bazIiEEvT_", "foo::baz"),
            ("_ZN3foo3barEv.cold", "foo::bar"),
            ("_ZN3fooltIiEEbT_", "foo::operator<"),
            ("_ZNSt6vectorIS_IiSaIiEESaIS1_EE4sizeEv", "std::vector::size"),
            ("_ZN4core3fmt5write17h0123456789abcdefE", "core::fmt::write"),
            (
                "_ZN58_$LT$alloc..string..String$u20$as$u20$core..fmt..Debug$GT$3fmt\
                 17h0123456789abcdefE",
                "<alloc::string::String as core::fmt::Debug>::fmt",
            ),
            ("_RINvNtC3std3mem8align_ofdE", "std::mem::align_of::<>"),
            ("_ZN3foo3barEi", "foo::bar"),
            ("_ZZN3foo3barEvENKUliE_clEi", "foo::bar()::{lambda(int)#1}::operator()"),
            ("_ZN3fooC1Ev", "foo::foo"),
            ("_ZNSt8functionIFviEEC2EOS1_", "std::function::function"),
            ("_ZN12_GLOBAL__N_13fooEv", "(anonymous namespace)::foo"),
            ("_ZNKSt4lessIiEclERKiS2_", "std::less::operator()"),
            ("_RNvNtCs1234_7mycrate3foo3bar", "mycrate::foo::bar"),
            (
                "_RNvXCs15kBYyAo9fc_7mycrateNtB2_7ExampleNtB2_5Trait3foo",
                "<mycrate::Example as mycrate::Trait>::foo",
            ),
            (
                "_RINvXCs15kBYyAo9fc_7mycrateINtB3_7ExampleyENtB3_5Trait3foohE",
                "<mycrate::Example<> as mycrate::Trait>::foo::<>",
            ),
            ("_ZlsIiERSoS0_T_", "operator<<"),
            ("_ZN3foocvT_IiEEv", "foo::operator int"),
            ("_ZStrsIcSt11char_traitsIcEERSt13basic_istreamIT_T0_ES6_RS3_", "std::operator>>"),
            ("_ZN3foo3barEv.llvm.123", "foo::bar"),
            ("_ZN3fooptEv", "foo::operator->"),
            ("_ZN3foogtIiEEbv", "foo::operator>"),
            ("_ZNK3foo3barEv", "foo::bar"),
            ("_Z3fooIiEvT_", "foo"),
            ("_Z3foov", "foo"),
            (
                "_ZN4core3ptr85drop_in_place$LT$std..rt..lang_start$LT$$LP$$RP$$GT$..\
                 $u7b$$u7b$closure$u7d$$u7d$$GT$17h0123456789abcdefE",
                "core::ptr::drop_in_place<std::rt::lang_start<()>::{{closure}}>",
            ),
            ("_ZGVZN3foo3barEvE1x", "guard variable for foo::bar()::x"),
            ("_Z1fIXadL_Z1gvEEEvv", "f"),
            ("_ZN1AIiE1BIfE1cIcEEvv", "A::B::c"),
            ("_ZN3foo3barB5cxx11Ev", "foo::bar[abi:cxx11]"),
            ("_ZSt4moveIRiEONSt16remove_referenceIT_E4typeEOS2_", "std::move"),
        ] {
            assert_eq!(simple(mangled).as_deref(), Some(expected), "{mangled}");
        }
        for name in [
            "_ZTV3foo",
            "_ZThn8_N3foo3barEv",
            "malloc",
            "_start",
            "_Zgarbage",
            "_Rx",
            "Run",
            "System.String.Concat",
            "",
        ] {
            assert_eq!(simple(name), None, "{name}");
        }
    }
}
