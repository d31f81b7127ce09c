//! Names of methods that NativeAOT compiled, as C# writes them.
//!
//! A program has a list of its methods for its own stack traces: first address, type, name and
//! parameters of each. It is there without any debug file. The symbol table adds the type arguments
//! of generic code, and names what the list leaves out. What neither says for certain keeps the
//! name of its symbol.

mod image;
mod mangled;
mod metadata;
mod reader;

pub(crate) use image::code;

use crate::elf_sections::Sections;
use image::Method;
use mangled::MangledTypes;
use metadata::{Metadata, TypeArguments, TypePath};
use perfusion_host::process::guarded_io::ForeignFile;
use std::collections::HashMap;
use std::ops::Range;

/// The methods of one program.
#[derive(Debug)]
pub(crate) struct AotMethods {
    code: Range<u64>,
    metadata: Metadata,
    methods: HashMap<u64, Method>,
    types: MangledTypes,
}

impl AotMethods {
    /// Reads what a program says of its methods; `None` when it is no such program, or says nothing
    /// that can be read.
    pub(crate) fn read(file: &ForeignFile, sections: &Sections) -> Option<Self> {
        let (code, tables) = (code(sections)?, image::read(file, sections)?);
        let metadata = Metadata::new(tables.metadata)?;
        let methods = || tables.methods.values();
        let types = metadata
            .types(methods().map(|method| method.owner), methods().map(|method| method.signature));
        Some(Self { code, metadata, methods: tables.methods, types: MangledTypes::new(types) })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.methods.len()
    }

    /// Whether an address is in managed code.
    pub(crate) fn holds(&self, address: u64) -> bool {
        self.code.contains(&address)
    }

    /// Where the method begins whose code an unwind entry is for. Parts of a method that handle
    /// exceptions have entries of their own. The data that those name for the language say where
    /// the method is (dotnet/runtime src/coreclr/nativeaot/Runtime/unix/UnixNativeCodeManager.cpp,
    /// `FindMethodInfo`).
    pub(crate) fn start(
        &self,
        (file, sections): (&ForeignFile, &Sections),
        entry: u64,
        language_data: Option<u64>,
    ) -> Option<u64> {
        const KIND: u8 = 0x03;
        if self.methods.contains_key(&entry) {
            return Some(entry);
        }
        let data = language_data?;
        let section = sections.at(data)?;
        let mut bytes = [0; 9];
        file.read_exact_at(&mut bytes, section.offset.checked_add(data - section.address)?).ok()?;
        let [flags, _, _, _, _, distance @ ..] = bytes;
        let distance = i64::from(i32::from_le_bytes(distance));
        let start = entry.checked_add_signed(-distance).filter(|_| flags & KIND != 0)?;
        (distance > 0 && self.methods.contains_key(&start)).then_some(start)
    }

    /// The name of the method that begins at `start`, in the form in which runtimes tell names.
    /// `symbol` is its symbol, if there is one.
    pub(crate) fn name(&self, start: u64, symbol: Option<&str>) -> Option<String> {
        self.metadata.begin_name();
        match self.methods.get(&start) {
            Some(method) => self.listed(method, symbol),
            None => self.types.method(symbol?),
        }
    }

    fn listed(&self, method: &Method, symbol: Option<&str>) -> Option<String> {
        let metadata = &self.metadata;
        let name = metadata.string(method.name).filter(|name| !name.is_empty())?;
        let parameters = match method.parameters {
            0 => Vec::new(),
            at => metadata.strings(at)?,
        };
        let path = metadata.path(method.owner);
        let exact = symbol
            .zip(path.as_ref())
            .and_then(|(symbol, path)| self.arguments(symbol, path, name, parameters.len()));
        let (of_type, of_method) = exact.unwrap_or_else(|| {
            let of_type = path.as_ref().map_or_else(Vec::new, |path| {
                // Where they are not known, the type's own parameters.
                let names = metadata.parameter_names(method.owner);
                names.filter(|names| names.len() == path.arity()).unwrap_or_else(|| {
                    let only = path.arity() == 1;
                    (1..=path.arity())
                        .map(|number| if only { "T".to_owned() } else { format!("T{number}") })
                        .collect()
                })
            });
            (of_type, parameters)
        });
        let of = TypeArguments { of_type: &of_type, of_method: &of_method };
        let owner = match path {
            Some(path) => path.text(&of_type),
            None => metadata.type_text(method.owner, of)?,
        };
        let list = match of_method.as_slice() {
            [] => String::new(),
            arguments => format!("<{}>", arguments.join(", ")),
        };
        let parameters = metadata.parameters(method.signature, of)?;
        Some(format!("{owner}.{name}{list}({parameters})"))
    }

    /// The type arguments in a symbol, of the type and of the method. The symbol must be that of
    /// this method, part by part.
    fn arguments(
        &self,
        symbol: &str,
        path: &TypePath,
        name: &str,
        of_method: usize,
    ) -> Option<(Vec<String>, Vec<String>)> {
        let rest = symbol.strip_prefix(&mangled::mangled(path))?;
        let (of_type, rest) = match path.arity() {
            0 => (Vec::new(), rest),
            count => {
                let (list, rest) = mangled::bracketed(rest)?;
                (self.types.arguments(list, count)?, rest)
            }
        };
        let rest = rest.strip_prefix("__")?.strip_prefix(&mangled::sanitized(name))?;
        // Overloads are numbered.
        let rest = match rest.strip_prefix('_') {
            Some(number) => number.trim_start_matches(|c: char| c.is_ascii_digit()),
            None => rest,
        };
        if of_method == 0 {
            return rest.is_empty().then_some((of_type, Vec::new()));
        }
        let (list, rest) = mangled::bracketed(rest)?;
        let of_method = self.types.arguments(list, of_method)?;
        rest.is_empty().then_some((of_type, of_method))
    }
}

#[cfg(test)]
mod tests {
    use super::AotMethods;
    use super::metadata::written::{Writer, handle, kind};
    use crate::elf_sections::Sections;
    use perfusion_host::process::guarded_io::ForeignFile;
    use proptest::prelude::{ProptestConfig, any, proptest};
    use std::io::Write as _;

    const CODE: u64 = 0x1000;
    const METADATA: u64 = 0x2000;
    const METHODS: u64 = 0x3000;
    const HEADER: u64 = 0x4000;
    const MODULES: u64 = 0x5000;
    const DATA: u64 = 0x6000;

    /// `Work.dll` with the class `Shop` and its methods: `Parse(int)` at 0x1000, with a handler of
    /// exceptions at 0x1020, and `Hash<T>(T, List<T>)` at 0x1040, of `Table<T>`.
    fn program(version: u16) -> Vec<u8> {
        let mut writer = Writer::new();
        let [work, core, system, shop, table, int, list, parse, hash, t] = [
            "Work",
            "System.Private.CoreLib",
            "System",
            "Shop",
            "Table`1",
            "Int32",
            "List`1",
            "Parse",
            "Hash",
            "T",
        ]
        .map(|text| writer.string(text));
        let reference = |writer: &mut Writer, scope, name| {
            let scope = writer.record(&[0, scope]);
            let root = writer.record(&[handle(kind::SCOPE_REFERENCE, scope), name]);
            handle(kind::NAMESPACE_REFERENCE, root)
        };
        let (own, of_system) =
            (reference(&mut writer, work, 0), reference(&mut writer, core, system));
        let shop = writer.record(&[own, shop]);
        let table = writer.record(&[own, table]);
        let int = writer.record(&[of_system, int]);
        let list = writer.record(&[of_system, list]);
        let int = handle(kind::TYPE_REFERENCE, int);
        let parse_signature = writer.record(&[0, 0, int, 1, int]);
        let variable = writer.0.len() as u32;
        writer.0.push(0);
        let of_type = handle(kind::TYPE_VARIABLE, variable);
        let of_method = handle(kind::METHOD_VARIABLE, variable);
        let instance = writer.record(&[handle(kind::TYPE_REFERENCE, list), 1, of_type]);
        let hash_signature =
            writer.record(&[0, 1, int, 2, of_method, handle(kind::INSTANCE, instance)]);
        let names = writer.record(&[1, handle(kind::STRING, t)]);
        let metadata = writer.0;

        let mut methods = 2_u32.to_le_bytes().to_vec();
        let mut method = |command: u8, owner: u32, numbers: &[u32], start: u64| {
            methods.push(command | 1);
            methods.extend((u32::from(kind::TYPE_REFERENCE) << 25 | owner).to_le_bytes());
            for number in numbers {
                methods.extend((((number << 2) | 1) as u16).to_le_bytes());
            }
            let at = METHODS + methods.len() as u64;
            methods.extend(i32::try_from(start as i64 - at as i64).unwrap().to_le_bytes());
        };
        method(0x06, shop, &[parse, parse_signature], CODE);
        method(0x0a, table, &[hash, hash_signature, names], CODE + 0x40);

        let mut header = b"RTR\0".to_vec();
        header.extend(version.to_le_bytes());
        header.extend([0; 6]);
        header.extend(2_u16.to_le_bytes());
        header.extend([24, 1]);
        let mut relocations = Vec::new();
        let mut relocation = |place: u64, value: u64| {
            for word in [place, 8, value] {
                relocations.extend(word.to_le_bytes());
            }
        };
        relocation(MODULES, HEADER);
        for (row, (number, start, bytes)) in
            [(313_u32, METADATA, metadata.len()), (327, METHODS, methods.len())].iter().enumerate()
        {
            header.extend(number.to_le_bytes());
            header.extend([1, 0, 0, 0]);
            header.extend([0; 16]);
            let at = HEADER + 16 + 24 * row as u64;
            relocation(at + 8, *start);
            relocation(at + 16, start + *bytes as u64);
        }
        // A handler of exceptions, 0x20 behind its method.
        let data = [&[1_u8][..], &0_i32.to_le_bytes(), &0x20_i32.to_le_bytes()].concat();
        elf(&[
            ("__managedcode", CODE, vec![0x90; 0x100]),
            (".rodata", METADATA, metadata),
            (".methods", METHODS, methods),
            (".data", HEADER, header),
            ("__modules", MODULES, vec![0; 8]),
            (".dotnet_eh_table", DATA, data),
            (".rela.dyn", 0, relocations),
        ])
    }

    /// An ELF file of these sections.
    fn elf(sections: &[(&str, u64, Vec<u8>)]) -> Vec<u8> {
        let mut names = vec![0];
        let mut file = vec![0; 64];
        let mut headers = vec![0; 64];
        let names_of = [(".shstrtab", 0, Vec::new())];
        for (name, address, bytes) in sections.iter().chain(&names_of) {
            let name_at = names.len() as u32;
            names.extend(name.bytes().chain([0]));
            let bytes = if *name == ".shstrtab" { names.clone() } else { bytes.clone() };
            let mut header = [name_at.to_le_bytes(), 1_u32.to_le_bytes()].concat();
            for word in [0, *address, file.len() as u64, bytes.len() as u64, 0, 1, 0] {
                header.extend(word.to_le_bytes());
            }
            headers.extend(header);
            file.extend(bytes);
        }
        file[..6].copy_from_slice(&crate::elf_sections::ELF_IDENT);
        let at = file.len() as u64;
        file[40..48].copy_from_slice(&at.to_le_bytes());
        file[58..60].copy_from_slice(&64_u16.to_le_bytes());
        let count = (headers.len() / 64) as u16;
        file[60..62].copy_from_slice(&count.to_le_bytes());
        file[62..64].copy_from_slice(&(count - 1).to_le_bytes());
        file.extend(headers);
        file
    }

    fn opened(bytes: &[u8]) -> (ForeignFile, Option<Sections>) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let file = ForeignFile::own(file);
        let sections = Sections::read(&file).ok();
        (file, sections)
    }

    #[test]
    fn methods_have_the_names_that_the_program_gives_them() {
        let (file, sections) = opened(&program(16));
        let sections = sections.unwrap();
        let methods = AotMethods::read(&file, &sections).unwrap();
        let name = |start, symbol| methods.name(start, symbol);
        assert_eq!((methods.count(), methods.holds(CODE + 0xff)), (2, true));
        assert_eq!(name(CODE, None).as_deref(), Some("Shop.Parse(int)"));
        assert_eq!(name(CODE, Some("Work_Shop__Parse_0")).as_deref(), Some("Shop.Parse(int)"));
        assert_eq!(name(CODE + 0x40, None).as_deref(), Some("Table<T>.Hash<T>(T, System.List<T>)"));
        let symbol = "Work_Table_1<System___Canon>__Hash<S_P_CoreLib_System_List_1<Int32>>";
        assert_eq!(
            name(CODE + 0x40, Some(symbol)).as_deref(),
            Some("Table<__Canon>.Hash<System.List<int>>(System.List<int>, System.List<__Canon>)")
        );
        // Of another method: what it says of type arguments is not of this one.
        assert_eq!(
            name(CODE + 0x40, Some("Work_Table_1<Int32>__Other<Int32>")).as_deref(),
            Some("Table<T>.Hash<T>(T, System.List<T>)")
        );
        assert_eq!(name(CODE + 0x10, None), None);
        assert_eq!(name(CODE + 0x60, Some("Work_Shop___ctor")).as_deref(), Some("Shop..ctor"));
        assert_eq!(name(CODE + 0x60, Some("Work_Shop__Parse_0")), None);
    }

    #[test]
    fn a_handler_of_exceptions_belongs_to_its_method() {
        let (file, sections) = opened(&program(16));
        let sections = sections.unwrap();
        let methods = AotMethods::read(&file, &sections).unwrap();
        let start = |entry, data| methods.start((&file, &sections), entry, data);
        assert_eq!(start(CODE, None), Some(CODE));
        assert_eq!(start(CODE + 0x20, Some(DATA)), Some(CODE));
        assert_eq!(start(CODE + 0x60, Some(DATA)), Some(CODE + 0x40));
        for (entry, data) in [
            (CODE + 0x20, None),
            (CODE + 0x21, Some(DATA)),
            (CODE + 0x20, Some(DATA + 1)),
            (CODE + 0x20, Some(0x9000)),
            (0, Some(DATA)),
        ] {
            assert_eq!(start(entry, data), None, "{entry:x} {data:x?}");
        }
    }

    #[test]
    fn a_version_that_is_not_known_gives_no_names() {
        let (file, sections) = opened(&program(15));
        assert!(AotMethods::read(&file, &sections.unwrap()).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn a_program_that_was_scribbled_on_gives_names_or_none(
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut bytes = program(16);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let (file, sections) = opened(&bytes);
            if let Some(sections) = sections
                && let Some(methods) = AotMethods::read(&file, &sections)
            {
                for start in [CODE, CODE + 0x40] {
                    methods.name(start, Some("Work_Table_1<Int32>__Hash<Int32>"));
                }
                methods.start((&file, &sections), CODE + 0x20, Some(DATA));
            }
        }
    }
}
