//! Names from the assemblies that the process has mapped or its program carries: the class of each
//! static field, looked up by the field's name, and by its type where several classes have a field
//! of the name; and the classes around nested types, of which the runtime tells the innermost only.

use crate::bundle;
use crate::metadata::{Assembly, DeclaredField, NameBudget};
use crate::types::RuntimeType;
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_host::process::handle::ProcessHandle;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

/// Assemblies that are read, the bytes of one, and of all. What is beyond has no names.
const MAX_FILES: usize = 2048;
const MAX_FILE_BYTES: u64 = 64 << 20;
const MAX_BYTES: u64 = 1 << 30;
/// What the names may take that they have.
const MAX_NAME_BYTES: usize = 32 << 20;

/// A static field that holds an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StaticField {
    /// Its name; empty when the runtime did not say.
    pub name: String,
    /// Number of the object's type.
    pub type_index: u32,
    /// The class that declares it, when that is known.
    pub class: Option<String>,
}

/// The assemblies that a process has mapped, and those that its program carries, open: they can be
/// read when it is gone.
#[derive(Debug, Default)]
pub struct Assemblies {
    seen: HashSet<((u32, u32), u64)>,
    files: Vec<AssemblyFile>,
    /// Assemblies in all files.
    count: usize,
}

/// A file with assemblies.
#[derive(Debug)]
struct AssemblyFile {
    file: ForeignFile,
    /// Offsets and lengths of those that a single-file program carries; `None` for an assembly.
    carried: Option<Vec<(u64, u64)>>,
}

impl Assemblies {
    /// Opens those that are called assemblies and are not open yet, and the program if it carries
    /// some, `most` of them in all. A process that is gone has none.
    pub fn look(&mut self, target: &ProcessHandle, most: usize) {
        let (mut paths, mut program) = (Vec::new(), None);
        let listed = target.maps(|line| {
            let is_assembly = line.name.ends_with(".dll");
            // Of files the kernel puts the program lowest; the runtime's memory may be below.
            let is_program = program.is_none() && line.offset == 0 && line.inode != 0;
            let is_program = is_program && !line.name.starts_with("/memfd:") && !is_assembly;
            let file = (line.device, line.inode);
            if is_program {
                program = Some((self.seen.insert(file), PathBuf::from(line.name)));
            } else if line.inode != 0 && is_assembly && self.seen.insert(file) {
                paths.push(PathBuf::from(line.name));
            }
            self.seen.len() < most
        });
        if listed.is_err() {
            return;
        }
        let files = paths.iter().filter_map(|path| target.open_regular_in_root(path).ok());
        let files = files.map(|file| AssemblyFile { file, carried: None });
        let before = self.files.len();
        self.files.extend(files);
        self.count += self.files.len() - before;
        if let Some((true, program)) = program
            && let Ok(file) = target.open_regular_in_root(&program)
            && let Some(carried) = carried(&file, most.saturating_sub(self.count))
        {
            self.count += carried.len();
            self.files.push(AssemblyFile { file, carried: Some(carried) });
        }
    }

    /// Calls `each` with the content of each until it answers false.
    fn each(self, mut each: impl FnMut(&Assembly<'_>) -> bool) {
        let mut left = MAX_BYTES;
        for AssemblyFile { file, carried } in self.files {
            let whole = || file.metadata().map(|found| vec![(0, found.len())]).unwrap_or_default();
            for (at, length) in carried.unwrap_or_else(whole) {
                // What cannot be read names nothing.
                let length = length.min(MAX_FILE_BYTES).min(left);
                let Some(bytes) = content(&file, at, length) else { continue };
                left = left.saturating_sub(length);
                if Assembly::of(&bytes).is_some_and(|assembly| !each(&assembly)) {
                    return;
                }
            }
        }
    }

    /// Completes the names of nested types, and of arrays of them.
    pub fn complete(self, types: &mut [RuntimeType]) {
        let mut room = NameBudget::new(MAX_NAME_BYTES);
        let mut modules = by_module(types);
        self.each(|assembly| {
            modules.retain(|_, numbers| !name_nested(assembly, numbers, types, &mut room));
            !modules.is_empty()
        });
        name_arrays(types, &mut room);
    }
}

/// The types of each module, to tell by which assembly is which module.
fn by_module(types: &[RuntimeType]) -> HashMap<u64, Vec<usize>> {
    let mut modules: HashMap<u64, Vec<usize>> = HashMap::new();
    for (number, found) in types.iter().enumerate().filter(|(_, found)| found.has_token()) {
        modules.entry(found.module).or_default().push(number);
    }
    modules
}

/// Fills in what a survey's names lack, of types and of static fields. They may take a sixteenth of
/// what is allowed for all. Answers how many bytes they have taken.
pub fn complete_names(
    target: &ProcessHandle,
    types: &mut [RuntimeType],
    static_fields: &mut [StaticField],
    limit_bytes: usize,
) -> usize {
    let allowed = MAX_NAME_BYTES.min(limit_bytes / 16);
    let mut room = NameBudget::new(allowed);
    let mut assemblies = Assemblies::default();
    assemblies.look(target, MAX_FILES);
    let mut modules = by_module(types);
    let mut fields: HashMap<String, Vec<DeclaredField>> = HashMap::new();
    let wanted: HashSet<&str> = static_fields.iter().map(|field| field.name.as_str()).collect();
    assemblies.each(|assembly| {
        assembly.static_fields(&wanted, &mut fields, &mut room);
        // What was found is not looked for again.
        modules.retain(|_, numbers| !name_nested(assembly, numbers, types, &mut room));
        true
    });
    name_arrays(types, &mut room);
    name_classes(types, static_fields, &fields, &mut room);
    allowed - room.bytes()
}

/// Names the nested ones among the types of a module, if it is this assembly: if most of its types
/// are found here by their tokens. (The runtime escapes some characters of names, so that not all
/// may be.)
fn name_nested(
    assembly: &Assembly<'_>,
    numbers: &[usize],
    types: &mut [RuntimeType],
    room: &mut NameBudget,
) -> bool {
    let name = |types: &[RuntimeType], number: usize| -> Option<String> {
        let found = types.get(number)?;
        let (own, whole) = assembly.class_names(found.token)?;
        (own == found.open_name()).then(|| whole + found.name.get(own.len()..).unwrap_or_default())
    };
    // Counted first, and made again when it is this one: names of another assembly take no room.
    let mut unlike = 0;
    for &number in numbers {
        if room.look().is_none() {
            return false;
        }
        unlike += usize::from(name(types, number).is_none());
        if unlike * 2 >= numbers.len() {
            return false;
        }
    }
    for &number in numbers {
        if let Some(whole) = name(types, number).filter(|whole| room.take(whole.len()).is_some())
            && let Some(found) = types.get_mut(number)
        {
            found.name = whole;
        }
    }
    true
}

/// An array's name begins with that of its elements' type.
fn name_arrays(types: &mut [RuntimeType], room: &mut NameBudget) {
    for number in 0..types.len() {
        // From the innermost elements outwards; deeper arrays of arrays keep a short name.
        let mut chain = vec![number];
        while chain.len() < 8
            && let Some(element) = chain.last().and_then(|&last| types.get(last)?.element)
        {
            chain.push(element as usize);
        }
        for pair in chain.windows(2).rev() {
            let &[array, element] = pair else { continue };
            let Some((name, element)) = types.get(array).zip(types.get(element)) else { continue };
            if element.name.is_empty() {
                continue;
            }
            let suffix =
                name.name.rfind('[').and_then(|at| name.name.get(at..)).unwrap_or_default();
            let whole = format!("{}{suffix}", element.name);
            if room.take(whole.len()).is_none() {
                return;
            }
            if let Some(found) = types.get_mut(array) {
                found.name = whole;
            }
        }
    }
}

fn name_classes(
    types: &[RuntimeType],
    static_fields: &mut [StaticField],
    found: &HashMap<String, Vec<DeclaredField>>,
    room: &mut NameBudget,
) {
    for field in static_fields {
        let Some(candidates) = found.get(&field.name) else { continue };
        let open = types.get(field.type_index as usize).map_or("", RuntimeType::open_name);
        let fits: Vec<&DeclaredField> = candidates
            .iter()
            .filter(|candidate| candidate.type_name.as_deref() == Some(open))
            .collect();
        field.class = match (fits.as_slice(), candidates.as_slice()) {
            ([one], _) => Some(one.class.clone()),
            ([], [one]) => Some(one.class.clone()),
            _ => None,
        }
        .filter(|class| room.take(class.len()).is_some());
    }
}

/// The assemblies that a program carries, at most so many.
fn carried(file: &ForeignFile, most: usize) -> Option<Vec<(u64, u64)>> {
    let length = file.metadata().ok()?.len();
    bundle::carried(&|at, count| content(file, at, count), length, most)
}

/// So many bytes of a file; the file system may hold that up for a moment each time.
fn content(file: &ForeignFile, at: u64, length: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}
