//! What types are called: readable, as their runtime has it, and of which module where nothing else
//! tells two apart.

use perfusion_model::event::RegionId;
use perfusion_model::pretty;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

/// Modules of one file name that are told apart in a process. A program that loads an assembly anew
/// all the time has one module after the other.
pub const MOST_CONTEXTS: usize = 64;

/// File names of modules that are known of a process. One that compiles all the time may name each
/// assembly anew.
const MOST_FILES: usize = 4096;

/// A type's names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TypeName {
    /// The readable one ([`pretty::type_name`]).
    pub shown: Arc<str>,
    /// As its runtime has it, where that is another one.
    pub raw: Option<Arc<str>>,
    /// Its module ([`ModuleLabels::label`]).
    pub module: Option<Arc<str>>,
}

impl TypeName {
    /// Of a name as its runtime, or the shim, has it.
    #[must_use]
    pub fn of(raw: &str) -> Self {
        let raw = perfusion_model::text::clean(raw);
        let shown = pretty::type_name(&raw);
        let differs = shown != raw;
        Self { shown: shown.into(), raw: differs.then(|| raw.as_ref().into()), module: None }
    }

    /// The name its runtime has for it.
    #[must_use]
    pub fn system_name(&self) -> &str {
        self.raw.as_deref().unwrap_or(&self.shown)
    }
}

/// Modules of one runtime that come from files of the same name: one assembly in two load contexts
/// is two modules.
#[derive(Clone, Debug, Default)]
pub struct ModuleLabels {
    of_file: HashMap<Arc<str>, Vec<u64>>,
}

impl ModuleLabels {
    /// What a module is called: its file's name, and from the second module of that name on `#2`,
    /// `#3`, … in the order they were met. Modules of very many files are not told apart beyond
    /// these.
    pub fn label(&mut self, file: &str, module_id: u64) -> Arc<str> {
        let file: Arc<str> = perfusion_model::text::clean(file).as_ref().into();
        if self.of_file.len() >= MOST_FILES && !self.of_file.contains_key(&file) {
            return file;
        }
        let known = self.of_file.entry(Arc::clone(&file)).or_default();
        let at = known.iter().position(|id| *id == module_id).unwrap_or_else(|| {
            if known.len() < MOST_CONTEXTS {
                known.push(module_id);
            }
            known.len().saturating_sub(1)
        });
        if at == 0 { file } else { format!("{file}#{}", at + 1).into() }
    }
}

/// The types of all runtimes, as their libraries told of them.
#[derive(Default)]
pub struct TypeNameTable {
    names: HashMap<(RegionId, u64), TypeName>,
    contexts: HashMap<RegionId, ModuleLabels>,
}

impl TypeNameTable {
    /// A runtime calls a type so.
    pub fn learn(
        &mut self,
        region: RegionId,
        type_id: u64,
        name: &str,
        (module, module_id): (&str, u64),
    ) {
        let module = (!module.is_empty())
            .then(|| self.contexts.entry(region).or_default().label(module, module_id));
        self.names.insert((region, type_id), TypeName { module, ..TypeName::of(name) });
    }

    /// The modules of a runtime.
    #[must_use]
    pub fn contexts(&self, region: RegionId) -> ModuleLabels {
        self.contexts.get(&region).cloned().unwrap_or_default()
    }

    /// Forgets runtimes that are gone.
    pub fn forget(&mut self, gone: &HashSet<RegionId>) {
        self.names.retain(|(region, _), _| !gone.contains(region));
        self.contexts.retain(|region, _| !gone.contains(region));
    }

    /// All of them, as labels show them.
    #[must_use]
    pub fn told_apart(&self) -> DistinctTypeNames<'_> {
        let names = self
            .names
            .iter()
            .map(|((region, _), name)| ((*region, name.system_name()), &name.module));
        DistinctTypeNames { types: self, ambiguous: ambiguous(names) }
    }
}

/// What occurs with several modules.
pub fn ambiguous<K: Eq + Hash, M: Eq>(names: impl Iterator<Item = (K, M)>) -> HashSet<K> {
    let (mut first, mut ambiguous) = (HashMap::new(), HashSet::new());
    for (name, module) in names {
        match first.get(&name) {
            None => drop(first.insert(name, module)),
            Some(known) if *known == module => {}
            Some(_) => drop(ambiguous.insert(name)),
        }
    }
    ambiguous
}

/// Types with their modules where two of a process have the same name.
pub struct DistinctTypeNames<'a> {
    types: &'a TypeNameTable,
    ambiguous: HashSet<(RegionId, &'a str)>,
}

impl DistinctTypeNames<'_> {
    /// The names of a type, if its runtime has told.
    #[must_use]
    pub fn get(&self, region: RegionId, type_id: u64) -> Option<TypeName> {
        let mut name = self.types.names.get(&(region, type_id))?.clone();
        if !self.ambiguous.contains(&(region, name.system_name())) {
            name.module = None;
        }
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_CONTEXTS, MOST_FILES, ModuleLabels, TypeName, TypeNameTable};
    use perfusion_model::event::RegionId;
    use std::collections::HashSet;

    #[test]
    fn types_of_one_name_have_their_modules_and_others_do_not() {
        let (mut types, region, other) = (TypeNameTable::default(), RegionId(1), RegionId(2));
        types.learn(region, 0x10, "Plugin.Order", ("plugin.dll", 0x100));
        types.learn(region, 0x20, "Plugin.Order", ("plugin.dll", 0x200));
        types.learn(region, 0x30, "Plugin.Order", ("copy.dll", 0x300));
        types.learn(region, 0x40, "Plugin.Basket", ("plugin.dll", 0x200));
        types.learn(region, 0x50, "Plugin.Shop.<>c__DisplayClass1_0", ("plugin.dll", 0x100));
        types.learn(region, 0x60, "Plugin.Shop.<>c__DisplayClass2_0", ("plugin.dll", 0x100));
        types.learn(other, 0x10, "Plugin.Order", ("plugin.dll", 0x900));
        let told = types.told_apart();
        let of =
            |region, id| told.get(region, id).map(|name| (name.shown.to_string(), name.module));
        let with =
            |name: &str, module: Option<&str>| Some((name.to_owned(), module.map(Into::into)));
        assert_eq!(of(region, 0x10), with("Plugin.Order", Some("plugin.dll")));
        assert_eq!(of(region, 0x20), with("Plugin.Order", Some("plugin.dll#2")));
        assert_eq!(of(region, 0x30), with("Plugin.Order", Some("copy.dll")));
        assert_eq!(of(region, 0x40), with("Plugin.Basket", None));
        assert_eq!(
            of(other, 0x10),
            with("Plugin.Order", None),
            "it is the only one of its process"
        );
        assert_eq!(of(region, 0x99), None);
        // Two closures of one class have the same readable name, and each its own beside it.
        assert_eq!(of(region, 0x50), of(region, 0x60));
        assert_ne!(told.get(region, 0x50), told.get(region, 0x60));
        types.forget(&HashSet::from([region]));
        assert_eq!(types.told_apart().get(region, 0x10), None);
        assert!(types.told_apart().get(other, 0x10).is_some());
    }

    #[test]
    fn a_raw_name_is_kept_where_it_is_another_one() {
        let raw = |name| TypeName::of(name).raw.map(|raw| raw.to_string());
        assert_eq!(raw("Ns.Order"), None);
        assert_eq!(raw("Ns.Outer.Inner<int>[]"), None);
        assert_eq!(
            raw("Ns.Type.<>c__DisplayClass5_0").as_deref(),
            Some("Ns.Type.<>c__DisplayClass5_0")
        );
        assert_eq!(TypeName::of("Ns.Outer+Inner").system_name(), "Ns.Outer+Inner");
    }

    #[test]
    fn modules_of_one_file_are_numbered_up_to_a_bound() {
        let mut contexts = ModuleLabels::default();
        let labels = [7, 8, 7, 9].map(|id| contexts.label("a.dll", id).to_string());
        assert_eq!(labels, ["a.dll", "a.dll#2", "a.dll", "a.dll#3"]);
        assert_eq!(&*contexts.label("b.dll", 8), "b.dll");
        let last = (10..10_000).map(|id| contexts.label("a.dll", id)).last();
        assert_eq!(last.as_deref(), Some(format!("a.dll#{MOST_CONTEXTS}").as_str()));
        let many = (0..2 * MOST_FILES)
            .map(|number| contexts.label(&format!("script{number}.dll"), 1))
            .last();
        assert_eq!(many.as_deref(), Some(format!("script{}.dll", 2 * MOST_FILES - 1).as_str()));
        assert_eq!(contexts.of_file.len(), MOST_FILES);
    }
}
