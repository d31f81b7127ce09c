//! The tables of a profile while it is made: strings, functions, mappings, locations, each stored
//! once.

use super::proto::{Function, Line, Location, Mapping, Profile, ValueType};
use super::{KERNEL_MAPPING, MANAGED_MAPPING};
use foldhash::fast::RandomState;
use perfusion_model::frame::FrameKey;
use perfusion_model::text::hex;
use perfusion_symbolize::{
    FunctionId, ImageResolver, SourceLine, Symbol, SymbolModule, Symbolizer, kernel, native,
};
use std::collections::HashMap;
use std::sync::Arc;

/// Identity of a location: an address, or a managed function, or a line of one in a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum LocationKey {
    Address(FrameKey),
    Function(FunctionId),
    Line(FunctionId, i64, u32),
}

/// Tables and the ids given so far. Ids are positions plus one.
pub(super) struct ProfileBuilder<'a> {
    symbolizer: &'a Symbolizer,
    directory: &'a dyn ImageResolver,
    strings: HashMap<Arc<str>, i64>,
    /// By name, system name and file.
    functions: HashMap<(i64, i64, i64), u64>,
    mappings: HashMap<SymbolModule, usize>,
    /// Asked for every frame of every sample.
    frames: HashMap<FrameKey, u64, RandomState>,
    places: HashMap<LocationKey, u64>,
    profile: Profile,
}

impl<'a> ProfileBuilder<'a> {
    pub(super) fn new(symbolizer: &'a Symbolizer, directory: &'a dyn ImageResolver) -> Self {
        Self {
            symbolizer,
            directory,
            strings: HashMap::from([("".into(), 0)]),
            functions: HashMap::new(),
            mappings: HashMap::new(),
            frames: HashMap::default(),
            places: HashMap::new(),
            profile: Profile { string_table: vec![String::new()], ..Profile::default() },
        }
    }

    /// Index of `text` in the string table.
    pub(super) fn string(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = i64::try_from(self.profile.string_table.len()).unwrap_or(i64::MAX);
        self.profile.string_table.push(text.to_owned());
        self.strings.insert(text.into(), index);
        index
    }

    pub(super) fn value_type(&mut self, name: &str, unit: &str) -> ValueType {
        ValueType { r#type: self.string(name), unit: self.string(unit) }
    }

    /// Location id of a frame.
    pub(super) fn location(&mut self, frame: FrameKey) -> u64 {
        if let Some(&id) = self.frames.get(&frame) {
            return id;
        }
        let symbol = self.symbolizer.symbol(frame);
        let source = self.symbolizer.line(frame);
        let place = match (symbol.function, &source) {
            (Some(function), Some(source)) => {
                LocationKey::Line(function, self.string(&source.file), source.line)
            }
            (Some(function), None) => LocationKey::Function(function),
            (None, _) => LocationKey::Address(frame),
        };
        let id = match self.places.get(&place) {
            Some(&id) => id,
            None => {
                let id = self.new_location(frame, &symbol, source.as_ref());
                self.places.insert(place, id);
                id
            }
        };
        self.frames.insert(frame, id);
        id
    }

    fn new_location(
        &mut self,
        frame: FrameKey,
        symbol: &Symbol,
        source: Option<&SourceLine>,
    ) -> u64 {
        let address = match frame {
            FrameKey::Kernel(address)
            | FrameKey::Native { address, .. }
            | FrameKey::Stub { address, .. }
            | FrameKey::Unknown { address, .. } => address,
            FrameKey::Managed { start, offset, .. } => {
                start.saturating_add(offset.map_or(0, |offset| u64::from(offset.get() - 1)))
            }
            FrameKey::Marker(_) => 0,
        };
        let mapping = self.mapping(&symbol.module);
        let mapping_id = mapping.map_or(0, next_id);
        if let Some(mapping) = mapping.and_then(|index| self.profile.mapping.get_mut(index)) {
            // Where the code lies is known from the file; for other code it is where code was seen.
            if mapping.memory_limit == 0 {
                mapping.memory_start = address;
            }
            mapping.memory_start = mapping.memory_start.min(address);
            mapping.memory_limit = mapping.memory_limit.max(address.saturating_add(1));
            mapping.has_functions &= symbol.unresolved.is_none();
        }
        // Functions that are part of this one come first, innermost before outermost.
        let symbolizer = self.symbolizer;
        let inlined = symbolizer.inlined(frame);
        let mut line = Vec::with_capacity(inlined.len() + 1);
        for function in inlined {
            let names = (&*function.name, Some(&*function.system_name));
            line.push(self.line(names, function.line.as_ref()));
        }
        line.push(self.line((&symbol.name, system_name(symbol)), source));
        if let Some(mapping) = mapping.and_then(|index| self.profile.mapping.get_mut(index)) {
            // Tells `go tool pprof` that there is nothing to be looked up in the file.
            let has_lines = source.is_some() || !inlined.is_empty();
            mapping.has_filenames |= has_lines;
            mapping.has_line_numbers |= has_lines;
            mapping.has_inline_frames |= has_lines;
        }
        let id = next_id(self.profile.location.len());
        self.profile.location.push(Location { id, mapping_id, address, line, is_folded: false });
        id
    }

    fn line(&mut self, names: (&str, Option<&str>), source: Option<&SourceLine>) -> Line {
        let line = source.map_or(0, |source| i64::from(source.line));
        Line { function_id: self.function(names, source), line, ..Line::default() }
    }

    fn function(
        &mut self,
        (name, system_name): (&str, Option<&str>),
        source: Option<&SourceLine>,
    ) -> u64 {
        let name = self.string(name);
        let system_name = system_name.map_or(0, |name| self.string(name));
        let id = next_id(self.profile.function.len());
        let filename = source.map_or(0, |source| self.string(&source.file));
        let known = *self.functions.entry((name, system_name, filename)).or_insert(id);
        if known == id {
            let start_line = source.map_or(0, |source| i64::from(source.start_line));
            let function = Function { id, name, system_name, filename, start_line };
            self.profile.function.push(function);
        }
        known
    }

    /// Index of a module's mapping, made if new; `None` for what is no code.
    pub(super) fn mapping(&mut self, module: &SymbolModule) -> Option<usize> {
        if let Some(&index) = self.mappings.get(module) {
            return Some(index);
        }
        let mut mapping = Mapping { has_functions: true, ..Mapping::default() };
        match module {
            SymbolModule::Kernel => {
                mapping.filename = self.string(KERNEL_MAPPING);
                mapping.build_id = self.string(&kernel::build_id().map_or_else(String::new, hex));
            }
            SymbolModule::Managed(name) => mapping.filename = self.string(name),
            SymbolModule::Jit => mapping.filename = self.string(MANAGED_MAPPING),
            SymbolModule::None => return None,
            SymbolModule::Image(image) => {
                let image = self.directory.image(*image);
                mapping.filename = self.string(&perfusion_model::text::clean(
                    image.map_or("[unknown image]", |image| image.path),
                ));
                let build_id = image.and_then(|image| image.build_id);
                mapping.build_id = self.string(&build_id.map_or_else(String::new, hex));
                if let Some(text) =
                    image.and_then(|image| image.file).and_then(native::text_segment)
                {
                    mapping.memory_start = text.start;
                    mapping.memory_limit = text.limit;
                    mapping.file_offset = text.file_offset;
                }
            }
        }
        let index = self.profile.mapping.len();
        mapping.id = next_id(index);
        self.profile.mapping.push(mapping);
        self.mappings.insert(module.clone(), index);
        Some(index)
    }

    /// The message without samples, to be filled in.
    pub(super) fn profile(&mut self) -> &mut Profile {
        &mut self.profile
    }
}

/// The system name of a symbol, if it is to be in the profile. Go's pprof takes a name with `<`,
/// `[` or `::` that equals its system name for C++ and cuts type arguments and parameters away
/// (`looksLikeDemangledCPlusPlus`, internal/symbolizer of google/pprof).
fn system_name(symbol: &Symbol) -> Option<&str> {
    let is_managed = matches!(symbol.module, SymbolModule::Managed(_) | SymbolModule::Jit);
    let is_left_out = is_managed && symbol.name == symbol.system_name;
    (!is_left_out).then_some(&*symbol.system_name)
}

/// Id of the entry that comes to stand at `index`: zero is reserved.
fn next_id(index: usize) -> u64 {
    u64::try_from(index).map_or(u64::MAX, |index| index.saturating_add(1))
}
