//! Names from the assemblies that the process has mapped: the class of each static field, looked up by the field's name, and by its type
//! where several classes have a field of the name; and the classes around nested types, of which the runtime tells the innermost only.

use super::metadata::{Assembly, Field};
use super::walk::{Survey, Type};
use crate::attach::target::Target;
use rustix::fs::{FileType, OFlags, fstat};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Assemblies that are read, the bytes of one, and of all. What is beyond has no names.
const MAX_FILES: usize = 2048;
const MAX_FILE_BYTES: u64 = 64 << 20;
const MAX_BYTES: u64 = 1 << 30;

/// Fills in what the survey's names lack.
pub(super) fn complete_names(target: &Target, survey: &mut Survey) {
    // The types of each module, to tell by which assembly is which module.
    let mut modules: HashMap<u64, Vec<usize>> = HashMap::new();
    for (number, found) in survey.types.iter().enumerate().filter(|(_, found)| found.has_token()) {
        modules.entry(found.module).or_default().push(number);
    }
    let mut fields: HashMap<String, Vec<Field>> = HashMap::new();
    let mut left = MAX_BYTES;
    for path in assemblies(target) {
        let bytes = read(target, &path, MAX_FILE_BYTES.min(left)).unwrap_or_default();
        left = left.saturating_sub(bytes.len() as u64);
        let Some(assembly) = Assembly::of(&bytes) else { continue };
        let wanted: HashSet<&str> = survey.fields.iter().map(|field| field.name.as_str()).collect();
        assembly.static_fields(&wanted, &mut fields);
        // What was found is not looked for again.
        modules.retain(|_, types| !name_nested(&assembly, types, &mut survey.types));
    }
    name_arrays(&mut survey.types);
    name_classes(survey, &fields);
}

/// Names the nested ones among the types of a module, if it is this assembly: if most of its types are found here by their tokens.
/// (The runtime escapes some characters of names, so that not all may be.)
fn name_nested(assembly: &Assembly<'_>, numbers: &[usize], types: &mut [Type]) -> bool {
    let names: Vec<(usize, String)> = numbers
        .iter()
        .filter_map(|&number| {
            let found = types.get(number)?;
            let (own, whole) = assembly.class_names(found.token)?;
            (own == found.open_name()).then_some((number, whole))
        })
        .collect();
    if names.len() * 2 <= numbers.len() {
        return false;
    }
    for (number, whole) in names {
        if let Some(found) = types.get_mut(number) {
            found.name = whole + found.name.get(found.open_name().len()..).unwrap_or_default();
        }
    }
    true
}

/// An array's name begins with that of its elements' type.
fn name_arrays(types: &mut [Type]) {
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
            let suffix = name.name.rfind('[').and_then(|at| name.name.get(at..)).unwrap_or_default();
            let whole = format!("{}{suffix}", element.name);
            if let Some(found) = types.get_mut(array) {
                found.name = whole;
            }
        }
    }
}

fn name_classes(survey: &mut Survey, found: &HashMap<String, Vec<Field>>) {
    let types = &survey.types;
    for field in &mut survey.fields {
        let Some(candidates) = found.get(&field.name) else { continue };
        let open = types.get(field.type_index as usize).map_or("", Type::open_name);
        let fits: Vec<&Field> =
            candidates.iter().filter(|candidate| candidate.type_name.as_deref() == Some(open)).collect();
        field.class = match (fits.as_slice(), candidates.as_slice()) {
            ([one], _) => Some(one.class.clone()),
            ([], [one]) => Some(one.class.clone()),
            _ => None,
        };
    }
}

fn read(target: &Target, path: &Path, most: u64) -> Option<Vec<u8>> {
    let file = target.open_in_root(path, OFlags::RDONLY | OFlags::NONBLOCK).ok()?;
    if FileType::from_raw_mode(fstat(&file).ok()?.st_mode) != FileType::RegularFile {
        return None;
    }
    let mut bytes = Vec::new();
    File::from(file).take(most).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// Paths of the mapped files that are called assemblies.
fn assemblies(target: &Target) -> Vec<PathBuf> {
    let (mut seen, mut paths) = (HashSet::new(), Vec::new());
    let listed = target.maps(|line| {
        if line.inode != 0 && line.name.ends_with(".dll") && seen.insert((line.device, line.inode)) {
            paths.push(PathBuf::from(line.name));
        }
        paths.len() < MAX_FILES
    });
    // A process that is gone has none.
    if listed.is_ok() { paths } else { Vec::new() }
}
