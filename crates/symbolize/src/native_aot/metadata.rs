//! Types and methods in the metadata that NativeAOT puts into a program for stack traces and
//! reflection (dotnet/runtime src/coreclr/tools/Common/Internal/Metadata/NativeFormat/
//! NativeFormatReaderGen.cs).

use super::reader::{Handle, Reader};
use perfusion_model::pretty;
use std::cell::Cell;
use std::collections::HashSet;

/// First word of the metadata.
const SIGNATURE: u32 = 0xdead_dffd;

/// Values of `HandleType`.
pub(crate) mod kind {
    pub(crate) const ARRAY: u8 = 0x01;
    pub(crate) const BY_REFERENCE: u8 = 0x02;
    pub(crate) const STRING: u8 = 0x1a;
    pub(crate) const FUNCTION_POINTER: u8 = 0x25;
    pub(crate) const METHOD_VARIABLE: u8 = 0x2c;
    pub(crate) const MODIFIED: u8 = 0x2d;
    pub(crate) const NAMESPACE: u8 = 0x2f;
    pub(crate) const NAMESPACE_REFERENCE: u8 = 0x30;
    pub(crate) const POINTER: u8 = 0x32;
    pub(crate) const VECTOR: u8 = 0x37;
    pub(crate) const SCOPE: u8 = 0x38;
    pub(crate) const SCOPE_REFERENCE: u8 = 0x39;
    pub(crate) const TYPE: u8 = 0x3a;
    pub(crate) const INSTANCE: u8 = 0x3c;
    pub(crate) const TYPE_REFERENCE: u8 = 0x3d;
    pub(crate) const SPECIFICATION: u8 = 0x3e;
    pub(crate) const TYPE_VARIABLE: u8 = 0x3f;
}

/// Deepest nesting of types and namespaces.
const MAX_DEPTH: u32 = 32;
/// Longest list in a record.
const MAX_LIST: u32 = 1 << 16;
/// Most type arguments and parameters.
const MAX_PARAMETERS: u32 = 256;
/// Most records that are read for one name, and to find all types.
const MAX_RECORDS_OF_NAME: u32 = 2_000;
const MAX_RECORDS_OF_TYPES: u32 = 2_000_000;
/// Most types that are taken.
const MAX_TYPES: usize = 200_000;

/// One level of a type's name, without the number of its own type parameters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct TypeLevel {
    pub(super) name: String,
    pub(super) arity: usize,
}

/// A type's name without type arguments, outermost level first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct TypePath {
    pub(super) assembly: String,
    pub(super) namespace: String,
    pub(super) levels: Vec<TypeLevel>,
}

impl TypePath {
    /// Type parameters of all levels.
    pub(super) fn arity(&self) -> usize {
        self.levels.iter().map(|level| level.arity).sum()
    }

    /// With these type arguments, outermost level first.
    pub(super) fn text(&self, arguments: &[String]) -> String {
        let mut left = arguments.iter();
        let levels: Vec<String> = self
            .levels
            .iter()
            .map(|level| {
                let own: Vec<&str> = left.by_ref().take(level.arity).map(String::as_str).collect();
                let list =
                    if own.is_empty() { String::new() } else { format!("<{}>", own.join(", ")) };
                format!("{}{list}", level.name)
            })
            .collect();
        let dot = if self.namespace.is_empty() { "" } else { "." };
        let text = format!("{}{dot}{}", self.namespace, levels.join("."));
        // C#'s words.
        let is_plain = self.namespace == "System" && self.levels.len() == 1 && arguments.is_empty();
        if is_plain { pretty::type_name(&text) } else { text }
    }
}

/// What type variables stand for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TypeArguments<'a> {
    pub(super) of_type: &'a [String],
    pub(super) of_method: &'a [String],
}

/// The metadata of one program.
#[derive(Debug)]
pub(super) struct Metadata {
    bytes: Vec<u8>,
    /// Records that may still be read for what is asked now.
    left: Cell<u32>,
}

impl Metadata {
    /// `None` where the signature is another one.
    pub(super) fn new(bytes: Vec<u8>) -> Option<Self> {
        let signature = u32::from_le_bytes(*bytes.first_chunk::<4>()?);
        (signature == SIGNATURE).then_some(Self { bytes, left: Cell::new(0) })
    }

    /// Before each name.
    pub(super) fn begin_name(&self) {
        self.left.set(MAX_RECORDS_OF_NAME);
    }

    /// A record, of which only a bounded number is read.
    fn record(&self, at: u32) -> Option<Reader<'_>> {
        let left = self.left.get().checked_sub(1)?;
        self.left.set(left);
        let at = usize::try_from(at).ok().filter(|at| *at != 0)?;
        Some(Reader::new(&self.bytes, at))
    }

    pub(super) fn string(&self, at: u32) -> Option<&str> {
        self.record(at)?.text()
    }

    /// The name of a definition or of a reference to one.
    pub(super) fn path(&self, handle: Handle) -> Option<TypePath> {
        self.path_within(handle, 0)
    }

    fn path_within(&self, handle: Handle, depth: u32) -> Option<TypePath> {
        if depth > MAX_DEPTH {
            return None;
        }
        let (outer, name) = match handle.kind {
            kind::TYPE => {
                let mut record = self.record(handle.at)?;
                record.unsigned()?;
                record.handle()?;
                let (namespace, name) = (record.unsigned()?, record.unsigned()?);
                record.unsigned()?;
                record.unsigned()?;
                match record.unsigned()? {
                    0 => (Handle { kind: kind::NAMESPACE, at: namespace }, name),
                    enclosing => (Handle { kind: kind::TYPE, at: enclosing }, name),
                }
            }
            kind::TYPE_REFERENCE => {
                let mut record = self.record(handle.at)?;
                (record.handle()?, record.unsigned()?)
            }
            _ => return None,
        };
        let mut path = match outer.kind {
            kind::TYPE | kind::TYPE_REFERENCE => self.path_within(outer, depth + 1)?,
            _ => {
                let (assembly, namespace) = self.namespace(outer, depth + 1)?;
                TypePath { assembly, namespace, levels: Vec::new() }
            }
        };
        let name = self.string(name).filter(|name| !name.is_empty())?;
        let (name, arity) = match name.rsplit_once('`') {
            Some((name, digits)) => (name, digits.parse().ok().filter(|arity| *arity < 256)?),
            None => (name, 0),
        };
        path.levels.push(TypeLevel { name: name.to_owned(), arity });
        Some(path)
    }

    /// Assembly and full name of a namespace.
    fn namespace(&self, handle: Handle, depth: u32) -> Option<(String, String)> {
        if depth > MAX_DEPTH {
            return None;
        }
        let mut record = self.record(handle.at)?;
        match handle.kind {
            kind::NAMESPACE | kind::NAMESPACE_REFERENCE => {
                let (parent, name) = (record.handle()?, record.unsigned()?);
                let (assembly, outer) = self.namespace(parent, depth + 1)?;
                // The root of all namespaces has no name.
                let name = if name == 0 { "" } else { self.string(name)? };
                let dot = if outer.is_empty() || name.is_empty() { "" } else { "." };
                Some((assembly, format!("{outer}{dot}{name}")))
            }
            kind::SCOPE | kind::SCOPE_REFERENCE => {
                // Flags.
                record.unsigned()?;
                Some((self.string(record.unsigned()?)?.to_owned(), String::new()))
            }
            _ => None,
        }
    }

    /// The names of a definition's type parameters, those of its outer types first. `None` for a
    /// reference, which has none.
    pub(super) fn parameter_names(&self, handle: Handle) -> Option<Vec<String>> {
        if handle.kind != kind::TYPE {
            return None;
        }
        let mut record = self.record(handle.at)?;
        record.unsigned()?;
        record.handle()?;
        for _ in 0..5 {
            record.unsigned()?;
        }
        // Nested types, methods, fields, properties, events.
        for _ in 0..5 {
            record.skip_list(MAX_LIST)?;
        }
        let parameters = record.list(MAX_PARAMETERS, Reader::unsigned)?;
        let name = |at: u32| {
            let mut record = self.record(at)?;
            for _ in 0..3 {
                record.unsigned()?;
            }
            Some(self.string(record.unsigned()?)?.to_owned())
        };
        parameters.into_iter().map(name).collect()
    }

    /// A list of strings: the names of a method's type parameters.
    pub(super) fn strings(&self, at: u32) -> Option<Vec<String>> {
        let handles = self.record(at)?.list(MAX_PARAMETERS, Reader::handle)?;
        let text = |handle: Handle| {
            let text = self.string(handle.at).filter(|_| handle.kind == kind::STRING)?;
            Some(text.to_owned())
        };
        handles.into_iter().map(text).collect()
    }

    /// Any type, as C# writes it.
    pub(super) fn type_text(&self, handle: Handle, of: TypeArguments<'_>) -> Option<String> {
        self.text_within(handle, of, 0)
    }

    fn text_within(&self, handle: Handle, of: TypeArguments<'_>, depth: u32) -> Option<String> {
        if depth > MAX_DEPTH {
            return None;
        }
        if matches!(handle.kind, kind::TYPE | kind::TYPE_REFERENCE) {
            return Some(self.path(handle)?.text(&[]));
        }
        let mut record = self.record(handle.at)?;
        let element = |record: &mut Reader<'_>| {
            let element = record.handle()?;
            self.text_within(element, of, depth + 1)
        };
        Some(match handle.kind {
            kind::SPECIFICATION => element(&mut record)?,
            kind::INSTANCE => {
                let path = self.path(record.handle()?)?;
                let arguments = record.list(MAX_PARAMETERS, element)?;
                path.text(&arguments)
            }
            kind::VECTOR => format!("{}[]", element(&mut record)?),
            kind::ARRAY => {
                let element = element(&mut record)?;
                let commas = usize::try_from(record.index()?.checked_sub(1)?).ok()?;
                format!("{element}[{}]", ",".repeat(commas.min(32)))
            }
            kind::BY_REFERENCE => format!("{}&", element(&mut record)?),
            kind::POINTER => format!("{}*", element(&mut record)?),
            kind::MODIFIED => {
                record.byte()?;
                record.handle()?;
                element(&mut record)?
            }
            kind::FUNCTION_POINTER => "delegate*".to_owned(),
            kind::TYPE_VARIABLE => variable(of.of_type, record.index()?)?,
            kind::METHOD_VARIABLE => variable(of.of_method, record.index()?)?,
            _ => return None,
        })
    }

    /// The parameters of a method, as C# writes them.
    pub(super) fn parameters(&self, signature: u32, of: TypeArguments<'_>) -> Option<String> {
        let parameters = self.signature(signature)?;
        let texts: Option<Vec<String>> =
            parameters.into_iter().map(|handle| self.type_text(handle, of)).collect();
        Some(texts?.join(", "))
    }

    fn signature(&self, at: u32) -> Option<Vec<Handle>> {
        let mut record = self.record(at)?;
        record.unsigned()?;
        record.unsigned()?;
        record.handle()?;
        record.list(MAX_PARAMETERS, Reader::handle)
    }

    /// All types: those that are defined, and those that these owners and signatures refer to.
    pub(super) fn types(
        &self,
        owners: impl Iterator<Item = Handle>,
        signatures: impl Iterator<Item = u32>,
    ) -> Vec<TypePath> {
        self.left.set(MAX_RECORDS_OF_TYPES);
        let mut handles = HashSet::new();
        let mut namespaces: Vec<u32> = Vec::new();
        // The scopes are listed behind the signature.
        for scope in
            Reader::new(&self.bytes, 4).list(MAX_LIST, Reader::unsigned).unwrap_or_default()
        {
            namespaces.extend(self.root_namespace(scope));
        }
        let mut seen: HashSet<u32> = namespaces.iter().copied().collect();
        while let Some(namespace) = namespaces.pop() {
            let Some((types, inner)) = self.members(namespace) else { continue };
            namespaces.extend(inner.into_iter().filter(|inner| seen.insert(*inner)));
            let mut types: Vec<Handle> =
                types.into_iter().map(|at| Handle { kind: kind::TYPE, at }).collect();
            while let Some(defined) = types.pop() {
                if handles.len() < MAX_TYPES && handles.insert(defined) {
                    let nested = self.nested(defined.at).unwrap_or_default();
                    types.extend(nested.into_iter().map(|at| Handle { kind: kind::TYPE, at }));
                }
            }
        }
        let mut todo: Vec<Handle> = owners.collect();
        let signatures: HashSet<u32> = signatures.collect();
        todo.extend(signatures.into_iter().filter_map(|at| self.signature(at)).flatten());
        let mut visited = HashSet::new();
        while let Some(handle) = todo.pop() {
            if handles.len() >= MAX_TYPES || !visited.insert(handle) {
                continue;
            }
            match handle.kind {
                kind::TYPE | kind::TYPE_REFERENCE => drop(handles.insert(handle)),
                _ => todo.extend(self.parts(handle).unwrap_or_default()),
            }
        }
        handles.into_iter().filter_map(|handle| self.path(handle)).collect()
    }

    /// The types that a type is made of.
    fn parts(&self, handle: Handle) -> Option<Vec<Handle>> {
        let mut record = self.record(handle.at)?;
        Some(match handle.kind {
            kind::SPECIFICATION
            | kind::VECTOR
            | kind::ARRAY
            | kind::BY_REFERENCE
            | kind::POINTER => vec![record.handle()?],
            kind::INSTANCE => {
                let mut parts = vec![record.handle()?];
                parts.extend(record.list(MAX_PARAMETERS, Reader::handle)?);
                parts
            }
            kind::MODIFIED => {
                record.byte()?;
                vec![record.handle()?, record.handle()?]
            }
            _ => Vec::new(),
        })
    }

    /// The namespace of an assembly that all others of it are in.
    fn root_namespace(&self, scope: u32) -> Option<u32> {
        let mut record = self.record(scope)?;
        // Flags, name, algorithm, version.
        for _ in 0..7 {
            record.unsigned()?;
        }
        // The public key, byte by byte.
        record.list(MAX_LIST, Reader::byte)?;
        record.unsigned()?;
        record.unsigned()
    }

    /// Types and namespaces that a namespace has.
    fn members(&self, namespace: u32) -> Option<(Vec<u32>, Vec<u32>)> {
        let mut record = self.record(namespace)?;
        record.handle()?;
        record.unsigned()?;
        let types = record.list(MAX_LIST, Reader::unsigned)?;
        record.skip_list(MAX_LIST)?;
        Some((types, record.list(MAX_LIST, Reader::unsigned)?))
    }

    /// Types inside a type.
    fn nested(&self, defined: u32) -> Option<Vec<u32>> {
        let mut record = self.record(defined)?;
        record.unsigned()?;
        record.handle()?;
        for _ in 0..5 {
            record.unsigned()?;
        }
        record.list(MAX_LIST, Reader::unsigned)
    }
}

fn variable(arguments: &[String], index: u32) -> Option<String> {
    arguments.get(usize::try_from(index).ok()?).cloned()
}

/// Metadata written by hand.
#[cfg(test)]
pub(super) mod written {
    use super::SIGNATURE;
    pub(crate) use super::kind;

    /// Metadata whose records are written one behind the other.
    pub(crate) struct Writer(pub(crate) Vec<u8>);

    impl Writer {
        /// Without scopes.
        pub(crate) fn new() -> Self {
            Self([&SIGNATURE.to_le_bytes()[..], &[0]].concat())
        }

        /// A number in four bytes.
        fn number(&mut self, value: u32) {
            assert!(value < 1 << 28);
            self.0.extend((value << 4 | 7).to_le_bytes());
        }

        pub(crate) fn record(&mut self, numbers: &[u32]) -> u32 {
            let at = self.0.len() as u32;
            numbers.iter().for_each(|number| self.number(*number));
            at
        }

        pub(crate) fn string(&mut self, text: &str) -> u32 {
            let at = self.record(&[text.len() as u32]);
            self.0.extend(text.as_bytes());
            at
        }
    }

    pub(crate) fn handle(kind: u8, at: u32) -> u32 {
        at << 7 | u32::from(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::written::{Writer, handle};
    use super::{Metadata, SIGNATURE, TypeArguments, TypeLevel, TypePath, kind};
    use crate::native_aot::reader::Handle;
    use proptest::prelude::{ProptestConfig, any, prop, proptest};

    #[test]
    fn types_and_parameters_are_written_as_in_csharp() {
        let mut writer = Writer::new();
        let [assembly, system, shop, list, int] =
            ["Work", "System", "Shop", "List`1", "Int32"].map(|text| writer.string(text));
        let scope = writer.record(&[0, assembly]);
        let namespace = writer.record(&[handle(kind::SCOPE_REFERENCE, scope), system]);
        let of_system = handle(kind::NAMESPACE_REFERENCE, namespace);
        let int = writer.record(&[of_system, int]);
        let list = writer.record(&[of_system, list]);
        let shop = writer.record(&[handle(kind::TYPE_REFERENCE, list), shop]);
        let variable = writer.0.len() as u32;
        writer.0.push(0);
        let instance = writer.record(&[
            handle(kind::TYPE_REFERENCE, list),
            1,
            handle(kind::TYPE_VARIABLE, variable),
        ]);
        let vector = writer.record(&[handle(kind::INSTANCE, instance)]);
        let signature = writer.record(&[
            0,
            0,
            handle(kind::TYPE_REFERENCE, int),
            2,
            handle(kind::TYPE_REFERENCE, int),
            handle(kind::VECTOR, vector),
        ]);
        let metadata = Metadata::new(writer.0).unwrap();
        metadata.begin_name();
        let path = metadata.path(Handle { kind: kind::TYPE_REFERENCE, at: shop }).unwrap();
        let level = |name: &str, arity| TypeLevel { name: name.to_owned(), arity };
        assert_eq!(
            path,
            TypePath {
                assembly: "Work".to_owned(),
                namespace: "System".to_owned(),
                levels: vec![level("List", 1), level("Shop", 0)],
            }
        );
        assert_eq!(path.text(&["int".to_owned()]), "System.List<int>.Shop");
        let of_type = ["T".to_owned()];
        let of = TypeArguments { of_type: &of_type, of_method: &[] };
        let parameters = metadata.parameters(signature, of);
        assert_eq!(parameters.as_deref(), Some("int, System.List<T>[]"));
        assert_eq!(metadata.parameters(signature, TypeArguments::default()), None);
    }

    #[test]
    fn a_type_that_is_inside_itself_ends() {
        let mut writer = Writer::new();
        let name = writer.string("A");
        let at = writer.0.len() as u32;
        writer.record(&[handle(kind::TYPE_REFERENCE, at), name]);
        let vector = writer.0.len() as u32;
        writer.record(&[handle(kind::VECTOR, vector)]);
        let metadata = Metadata::new(writer.0).unwrap();
        metadata.begin_name();
        assert_eq!(metadata.path(Handle { kind: kind::TYPE_REFERENCE, at }), None);
        let vector = Handle { kind: kind::VECTOR, at: vector };
        assert_eq!(metadata.type_text(vector, TypeArguments::default()), None);
        assert_eq!(metadata.types([vector].into_iter(), [1, 2].into_iter()), []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_bytes_give_names_or_none(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            at in 0_u32..400,
            kind in any::<u8>(),
        ) {
            let bytes = [&SIGNATURE.to_le_bytes()[..], &bytes].concat();
            let metadata = Metadata::new(bytes).unwrap();
            let handle = Handle { kind, at };
            metadata.begin_name();
            metadata.path(handle);
            metadata.type_text(handle, TypeArguments::default());
            metadata.parameters(at, TypeArguments::default());
            metadata.parameter_names(handle);
            metadata.strings(at);
            metadata.types([handle].into_iter(), [at].into_iter());
        }
    }
}
