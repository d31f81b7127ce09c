//! Addresses to names: each [`FrameKey`] gets one [`Symbol`], and where they are wanted lines of
//! source ([`Symbolizer::line`]).
//!
//! ```text
//! let mut symbolizer = Symbolizer::default();
//! if symbolizer.wants_answer(frame, true) { /* ask the shim of its process */ } // when first seen
//! symbolizer.observe(process, &shim_event); // methods, and code that was unloaded
//! symbolizer.resolve(window.frames(), &directory); // at the window's end, one batch per image
//! let symbol = symbolizer.symbol(frame); // always answers, and never with a wrong name
//! ```
//! [`ImageResolver`] is what this step must know about processes and files. The process table
//! implements it. Only `kernel.rs` and `native.rs` use blazesym. Frames without a name are counted
//! by reason ([`Symbolizer::counters`]).

pub mod demangle;
pub mod dwarf;
mod elf_sections;
mod error;
mod image_resolver;
mod image_symbols;
pub mod kernel;
pub mod managed;
mod managed_lines;
pub mod native;
mod native_aot;
mod native_lines;
pub mod pe_debug;
pub mod perf_map;
pub mod portable_pdb;
pub mod separate;
mod source_line;
pub mod types;
pub mod wait_functions;

use image_symbols::{ImageBudget, ImageSymbols};
use managed::{ManagedNames, MissingName};
use managed_lines::ManagedLines;
use perf_map::PerfMap;
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_host::process::mapped_file::MappedFile;
use perfusion_model::event::{MethodBody, ShimEvent};
use perfusion_model::frame::{FrameKey, ImageId, Marker, ProcessId};
pub use source_line::{InlinedFunction, SourceLine};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Cached symbols beyond this number are dropped when a later window does not use them.
const MAX_CACHED: usize = 500_000;

/// A mapped file, as the process table knows it.
#[derive(Clone, Copy, Debug)]
pub struct ImageFile<'a> {
    /// Path as its process saw it, or a name in brackets such as `[vdso]`.
    pub path: &'a str,
    /// The file, open for reading since it was mapped; `None` when it could not be opened.
    pub file: Option<&'a ForeignFile>,
    /// The GNU build id, if it has one.
    pub build_id: Option<&'a [u8]>,
}

/// Where names come from that only the process table can tell.
pub trait ImageResolver {
    /// The file behind `image`.
    fn image(&self, image: ImageId) -> Option<ImageFile<'_>>;
    /// A process that maps the image, or did: its root may have the separate debug file.
    fn mapped_by(&self, _image: ImageId) -> Option<u32> {
        None
    }
    /// The bytes of an image that is no file: the vDSO.
    fn image_bytes(&self, _image: ImageId) -> Option<&[u8]> {
        None
    }
    /// Where the function that holds `address` begins, by the image's unwind data: what no symbol
    /// names is at least told apart function by function.
    fn function_start(&self, _image: ImageId, _address: u64) -> Option<u64> {
        None
    }
    /// Where the data is that the image's unwind data at `address` names for the language of the
    /// function.
    fn language_data(&self, _image: ImageId, _address: u64) -> Option<u64> {
        None
    }
    /// The pid, in the initial pid namespace, of a process that is still the same one; `None` when
    /// it is gone.
    fn live_pid(&self, process: ProcessId) -> Option<u32>;
}

/// Identity of a managed function within a [`Symbolizer`]: all code bodies and tiers of a method
/// share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FunctionId(pub u32);

/// What a frame's code belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SymbolModule {
    /// The kernel.
    Kernel,
    /// A native file.
    Image(ImageId),
    /// A managed module, by its simple file name.
    Managed(Arc<str>),
    /// Managed code of unknown module, stubs.
    Jit,
    /// No code: the profiler's own remarks.
    None,
}

/// A frame's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// For people: demangled, control characters escaped, bounded in length.
    pub name: Arc<str>,
    /// As the symbol table or the runtime has it (escaped and bounded too).
    pub system_name: Arc<str>,
    /// What it belongs to.
    pub module: SymbolModule,
    /// Set for managed code whose function is known.
    pub function: Option<FunctionId>,
    /// Why `name` only says where the code is; `None` for a real name.
    pub unresolved: Option<Unresolved>,
}

/// Why a frame has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unresolved {
    /// Kernel addresses are hidden (`kptr_restrict`) or no symbol covers the address.
    Kernel,
    /// The file could not be opened when it was mapped.
    ImageNotOpen,
    /// The file's symbol tables could not be read.
    ImageUnreadable,
    /// No symbol of the file covers the address.
    NoSymbol,
    /// Managed: nobody answered for the address.
    NotAnswered,
    /// Managed: the runtime said it has no method there.
    NoMethod,
    /// Managed: the code was unloaded before the answer came.
    Unloaded,
    /// Managed: two different methods claim the address.
    Conflict,
    /// Managed: the store of names was full.
    StoreFull,
    /// No mapping explains the address.
    NoMapping,
    /// Nobody resolved the frame before its name was needed.
    NotLookedUp,
}

impl Unresolved {
    /// Name of the counter.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kernel => "symbolize_kernel_unknown",
            Self::ImageNotOpen => "symbolize_image_not_open",
            Self::ImageUnreadable => "symbolize_image_unreadable",
            Self::NoSymbol => "symbolize_no_symbol",
            Self::NotAnswered => "symbolize_managed_not_answered",
            Self::NoMethod => "symbolize_managed_no_method",
            Self::Unloaded => "symbolize_managed_unloaded",
            Self::Conflict => "symbolize_managed_conflict",
            Self::StoreFull => "symbolize_managed_store_full",
            Self::NoMapping => "symbolize_no_mapping",
            Self::NotLookedUp => "symbolize_not_looked_up",
        }
    }
}

/// A native file of which frames have no name, and whose symbols are nowhere on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingSymbols {
    /// As its process saw it.
    pub path: String,
    /// Names the build.
    pub build_id: Vec<u8>,
    /// Distinct frames without a name.
    pub frames: usize,
}

/// What the symbolizer of a recording in progress is to know of symbols: told by any thread.
#[derive(Debug, Default)]
pub struct SymbolNews {
    directories: Mutex<Option<Vec<PathBuf>>>,
    arrived: Mutex<Vec<Vec<u8>>>,
}

impl SymbolNews {
    /// Debug files are to be looked for in these directories of ours, too.
    pub fn look_in(&self, directories: Vec<PathBuf>) {
        *self.directories.lock().unwrap_or_else(PoisonError::into_inner) = Some(directories);
    }

    /// The symbols of this build are in one of the directories now.
    pub fn arrived(&self, build_id: Vec<u8>) {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).push(build_id);
    }

    fn take(&self) -> (Option<Vec<PathBuf>>, Vec<Vec<u8>>) {
        let directories = self.directories.lock().unwrap_or_else(PoisonError::into_inner).take();
        let arrived =
            std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner));
        (directories, arrived)
    }
}

/// Names of frames, kept from window to window.
#[derive(Default)]
pub struct Symbolizer {
    news: Option<Arc<SymbolNews>>,
    managed: ManagedNames,
    images: ImageSymbols,
    /// `None` where no lines are wanted.
    lines: Option<ManagedLines>,
    cache: HashMap<FrameKey, Arc<Symbol>>,
    perf_maps: perf_map::PerfMapCounters,
    kernel_ahead: Option<kernel::ReadAhead>,
}

impl Symbolizer {
    /// Has the first batch of the kernel's addresses answered from a table that is read until then.
    pub fn read_ahead(&mut self, kernel: kernel::ReadAhead) {
        self.kernel_ahead = Some(kernel);
    }

    /// Looks at what others tell of symbols before it looks names up.
    pub fn follow(&mut self, news: Arc<SymbolNews>) {
        self.news = Some(news);
    }

    /// Looks for debug files in these directories of ours, too. Each has `.build-id` in it.
    pub fn look_in(&mut self, directories: Vec<PathBuf>) {
        self.images.look_in(directories);
    }

    /// The files whose symbols are missing, those of most frames first.
    #[must_use]
    pub fn missing(&self, directory: &dyn ImageResolver) -> Vec<MissingSymbols> {
        let mut frames: BTreeMap<ImageId, usize> = BTreeMap::new();
        for (frame, symbol) in &self.cache {
            if let (FrameKey::Native { image, .. }, Some(Unresolved::NoSymbol)) =
                (frame, symbol.unresolved)
            {
                *frames.entry(*image).or_default() += 1;
            }
        }
        let lacking = frames.into_iter().filter(|(image, _)| self.images.lacks(*image));
        let mut missing: Vec<MissingSymbols> = lacking
            .filter_map(|(image, frames)| {
                let file = directory.image(image)?;
                let build_id = file.build_id?.to_vec();
                Some(MissingSymbols { path: file.path.to_owned(), build_id, frames })
            })
            .collect();
        missing.sort_by_key(|file| Reverse(file.frames));
        missing
    }

    /// Looks for the symbols of these builds anew, and for the names that they may give.
    pub fn look_again(&mut self, build_ids: &[Vec<u8>], directory: &dyn ImageResolver) {
        let is_of = |image: &ImageId| {
            let build_id = directory.image(*image).and_then(|file| file.build_id);
            build_id.is_some_and(|build_id| build_ids.iter().any(|of| of == build_id))
        };
        let images: HashSet<ImageId> = self
            .cache
            .keys()
            .filter_map(|frame| match frame {
                FrameKey::Native { image, .. } => Some(*image),
                _ => None,
            })
            .collect();
        for image in images.into_iter().filter(is_of) {
            self.images.forget(image);
            self.cache.retain(
                |frame, _| !matches!(frame, FrameKey::Native { image: of, .. } if *of == image),
            );
        }
        self.forget_lines();
    }

    /// From now on lines are found, too, and of native code the functions that are part of others.
    pub fn find_lines(&mut self) {
        self.lines = Some(ManagedLines::default());
        self.images.find_lines();
    }

    /// Forgets lines of native frames whose names were forgotten.
    fn forget_lines(&mut self) {
        let cache = &self.cache;
        if let Some(lines) = self.images.lines_mut() {
            lines.retain(|image, address| cache.contains_key(&FrameKey::Native { image, address }));
        }
    }

    /// True where lines are found.
    #[must_use]
    pub fn finds_lines(&self) -> bool {
        self.lines.is_some()
    }

    /// Takes what a shim said about code of its own process.
    pub fn observe(&mut self, process: ProcessId, event: &ShimEvent) {
        self.managed.observe(process, event);
    }

    /// The same, of a process that still has this pid: lines are looked for in its files.
    pub fn observe_living(&mut self, process: ProcessId, pid: u32, event: &ShimEvent) {
        match (event, &mut self.lines) {
            (ShimEvent::Method(method), Some(lines)) => {
                let found = lines.of(process, pid, method, &|base| MappedFile::at(pid, base));
                self.managed.learn(process, method, found);
            }
            _ => self.observe(process, event),
        }
    }

    /// The source line of a frame in the function that [`Symbolizer::symbol`] names: of a managed
    /// frame if it says where in its method's body it is. Where other functions are part of that
    /// one, it is the line where the outermost of them is called.
    #[must_use]
    pub fn line(&self, frame: FrameKey) -> Option<SourceLine> {
        match frame {
            FrameKey::Managed { process, start, generation, offset } => {
                let address = start.checked_add(u64::from(offset?.get() - 1))?;
                self.managed.lines(process, start, generation)?.line(address)
            }
            FrameKey::Native { image, address } => {
                self.images.lines()?.line(image, address).cloned()
            }
            _ => None,
        }
    }

    /// The functions at a frame that the compiler has put into the one that [`Symbolizer::symbol`]
    /// names, innermost first.
    #[must_use]
    pub fn inlined(&self, frame: FrameKey) -> &[InlinedFunction] {
        match (frame, self.images.lines()) {
            (FrameKey::Native { image, address }, Some(lines)) => lines.inlined(image, address),
            _ => &[],
        }
    }

    /// The frame that stands for all frames of the same line of its body; for all of the body,
    /// where no line is known. One whose body has no name yet stays as it is.
    #[must_use]
    pub fn line_frame(&self, frame: FrameKey) -> FrameKey {
        let FrameKey::Managed { process, start, generation, offset: Some(offset) } = frame else {
            return frame;
        };
        let lines = match self.managed.told(process, start, generation) {
            Ok(_) => self.managed.lines(process, start, generation),
            Err(MissingName::NotAnswered) => return frame,
            Err(_) => None,
        };
        let address = start.checked_add(u64::from(offset.get() - 1));
        let first = lines.zip(address).and_then(|(lines, at)| lines.first_of_line(at));
        let Some(first) = first else { return frame.at(None) };
        // A body that begins before its frame stands for itself.
        let offset = first.checked_sub(start).and_then(|offset| u32::try_from(offset).ok());
        if offset.is_some() { frame.at(offset) } else { frame }
    }

    /// The same, of the last moment: of a body without a name no line is known.
    #[must_use]
    pub fn last_line_frame(&self, frame: FrameKey) -> FrameKey {
        let FrameKey::Managed { process, start, generation, .. } = frame else { return frame };
        match self.managed.told(process, start, generation) {
            Ok(_) => self.line_frame(frame),
            Err(_) => frame.at(None),
        }
    }

    /// Takes the name of a body of this generation that was read from its process's memory. What a
    /// shim says of it goes before.
    pub fn learn_read(&mut self, process: ProcessId, generation: u32, method: &MethodBody) {
        self.managed.learn_read(process, generation, method);
    }

    /// True when [`Symbolizer::learn_read`] was told of this body.
    #[must_use]
    pub fn is_read(&self, process: ProcessId, start: u64, generation: u32) -> bool {
        self.managed.is_read(process, start, generation)
    }

    /// Notes that `frame` will need a name. True when it is managed, the name is not known and
    /// nobody was asked for it yet: then the shim of its process should be, about its start. True
    /// again when that said "not now" and the frame was `surely` seen since.
    pub fn wants_answer(&mut self, frame: FrameKey, surely: bool) -> bool {
        match frame {
            FrameKey::Managed { process, start, generation, .. } => {
                self.managed.want(process, start, generation, surely)
            }
            _ => false,
        }
    }

    /// True while a question about this address has no answer.
    #[must_use]
    pub fn is_waiting(&self, process: ProcessId, address: u64) -> bool {
        self.managed.is_waiting(process, address)
    }

    /// Addresses of a process that were asked about and not answered yet, to ask again where a
    /// question was lost.
    pub fn unanswered(&self, process: ProcessId) -> impl Iterator<Item = u64> {
        self.managed.waiting(process)
    }

    /// Addresses of a process, within a range, that its shim would not ask about when it was asked.
    pub fn withheld(
        &self,
        process: ProcessId,
        within: RangeInclusive<u64>,
    ) -> impl Iterator<Item = u64> {
        self.managed.withheld(process, within)
    }

    /// True when there are any of those.
    #[must_use]
    pub fn has_withheld(&self, process: ProcessId) -> bool {
        self.managed.has_withheld(process)
    }

    /// Looks up all `frames` that are not known yet, in one batch per image.
    pub fn resolve(
        &mut self,
        frames: impl IntoIterator<Item = FrameKey>,
        directory: &dyn ImageResolver,
    ) {
        if let Some((directories, arrived)) = self.news.as_ref().map(|news| news.take()) {
            if let Some(directories) = directories {
                self.look_in(directories);
            }
            if !arrived.is_empty() {
                self.look_again(&arrived, directory);
            }
        }
        // One name is that of the whole body.
        let frames: HashSet<FrameKey> = frames.into_iter().map(FrameKey::body).collect();
        if self.cache.len() > MAX_CACHED {
            self.cache.retain(|frame, _| frames.contains(frame));
            self.forget_lines();
        }
        let mut kernel = Vec::new();
        let mut images: BTreeMap<ImageId, Vec<u64>> = BTreeMap::new();
        // Frames come sorted by process, so one process's map is held at a time.
        let mut map = LazyPerfMap::default();
        let mut budget = ImageBudget::default();
        // The name of a managed frame may come later than the first window that needs it.
        let again = |frame: &FrameKey, symbol: &Symbol| {
            symbol.unresolved.is_some() && matches!(frame, FrameKey::Managed { .. })
        };
        let new =
            |frame: &FrameKey| self.cache.get(frame).is_none_or(|symbol| again(frame, symbol));
        let mut todo: Vec<FrameKey> = frames.into_iter().filter(new).collect();
        todo.sort_unstable();
        for frame in todo {
            match frame {
                FrameKey::Kernel(address) => kernel.push(address),
                FrameKey::Native { image, address } => {
                    images.entry(image).or_default().push(address)
                }
                FrameKey::Managed { process, start, generation, .. } => {
                    self.managed.want(process, start, generation, false);
                    self.managed_symbol(frame, (process, start, generation), &mut map, directory);
                }
                FrameKey::Stub { .. } => {
                    self.put(frame, plain("[runtime stub]", SymbolModule::Jit))
                }
                FrameKey::Unknown { address, .. } => {
                    let name = format!("[unknown] 0x{address:x}");
                    self.put(frame, unnamed(&name, SymbolModule::None, Unresolved::NoMapping));
                }
                // Its name is known without.
                FrameKey::Marker(_) => {}
            }
        }
        self.kernel_symbols(&kernel);
        for (image, addresses) in images {
            self.native_symbols(image, &addresses, directory, &mut budget);
        }
    }

    /// Forgets names in all files that are not known any more, and in all processes but these.
    pub fn keep(&mut self, directory: &dyn ImageResolver, processes: &HashSet<ProcessId>) {
        self.managed.keep(processes);
        self.images.keep(directory);
        if let Some(lines) = &mut self.lines {
            lines.keep(processes);
        }
        self.cache.retain(|frame, _| match frame {
            FrameKey::Native { image, .. } => directory.image(*image).is_some(),
            FrameKey::Managed { process, .. }
            | FrameKey::Stub { process, .. }
            | FrameKey::Unknown { process, .. } => processes.contains(process),
            FrameKey::Kernel(_) | FrameKey::Marker(_) => true,
        });
        self.forget_lines();
    }

    /// Memory is short: forgets the names of all but these frames.
    pub fn shed(&mut self, keep: &HashSet<FrameKey>) {
        let keep: HashSet<FrameKey> = keep.iter().map(|frame| frame.body()).collect();
        self.cache.retain(|frame, _| keep.contains(frame));
        self.cache.shrink_to_fit();
        self.forget_lines();
        if let Some(lines) = &mut self.lines {
            lines.shed();
        }
        if let Some(lines) = self.images.lines_mut() {
            lines.shed();
        }
    }

    /// The name of a frame; one that was never resolved says so.
    #[must_use]
    pub fn symbol(&self, frame: FrameKey) -> Arc<Symbol> {
        let unknown = || {
            Arc::new(match frame {
                // Nothing has to be looked up for it, and not all are in a window's frames: what
                // stands for stacks without room has none itself.
                FrameKey::Marker(marker) => plain(marker_name(marker), SymbolModule::None),
                _ => unnamed("[not resolved]", SymbolModule::None, Unresolved::NotLookedUp),
            })
        };
        self.cache.get(&frame.body()).cloned().unwrap_or_else(unknown)
    }

    /// Distinct frames without a name by reason, perf-map lines skipped, and names a shim sent that
    /// were refused.
    #[must_use]
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut unnamed: BTreeMap<Unresolved, u64> = BTreeMap::new();
        for why in self.cache.values().filter_map(|symbol| symbol.unresolved) {
            *unnamed.entry(why).or_insert(0) += 1;
        }
        let mut counters: Vec<_> =
            unnamed.into_iter().map(|(why, count)| (why.name(), count)).collect();
        counters.extend(self.images.counters());
        counters.extend(self.perf_maps.list());
        counters.extend(self.managed.counters());
        // Where no lines are wanted, nothing became of them.
        let lines = self.lines.as_ref().map(ManagedLines::counters);
        counters.extend(lines.unwrap_or_else(|| ManagedLines::default().counters()));
        counters
    }

    fn put(&mut self, frame: FrameKey, symbol: Symbol) {
        self.cache.insert(frame, Arc::new(symbol));
    }

    fn kernel_symbols(&mut self, addresses: &[u64]) {
        if addresses.is_empty() {
            return;
        }
        let names = match self.kernel_ahead.take() {
            Some(ahead) => ahead.names(addresses),
            None => kernel::names(addresses),
        };
        for (&address, name) in addresses.iter().zip(names) {
            let symbol = match name {
                Some(name) => plain(&name, SymbolModule::Kernel),
                None => unnamed(
                    &format!("[kernel] 0x{address:x}"),
                    SymbolModule::Kernel,
                    Unresolved::Kernel,
                ),
            };
            self.put(FrameKey::Kernel(address), symbol);
        }
    }

    fn native_symbols(
        &mut self,
        image: ImageId,
        addresses: &[u64],
        directory: &dyn ImageResolver,
        budget: &mut ImageBudget,
    ) {
        let described = directory.image(image);
        let path = described.map_or("[unknown image]", |image| image.path);
        let file = described.and_then(|image| Some((image, image.file?)));
        let found = match (file, directory.image_bytes(image)) {
            (Some(file), _) => Some(self.images.names(image, file, addresses, (directory, budget))),
            (None, Some(bytes)) => Some(native::names_in(bytes, addresses, &mut budget.copied)),
            (None, None) => None,
        };
        let (names, why) = match found {
            None => (Vec::new(), Unresolved::ImageNotOpen),
            Some(found) => match found {
                Ok(names) => (names, Unresolved::NoSymbol),
                Err(error) => {
                    tracing::debug!(path = %perfusion_model::text::clean(path), %error, "symbols \
                         not read");
                    (Vec::new(), Unresolved::ImageUnreadable)
                }
            },
        };
        let mut names = names.into_iter();
        let module = SymbolModule::Image(image);
        for &address in addresses {
            let symbol = match names.next().flatten() {
                Some(native::NativeName { name, system_name, .. }) => Symbol {
                    name: perfusion_model::text::clean(&name).as_ref().into(),
                    system_name: perfusion_model::text::clean(&system_name).as_ref().into(),
                    module: module.clone(),
                    function: None,
                    unresolved: None,
                },
                None => {
                    let start = directory.function_start(image, address).unwrap_or(address);
                    unnamed(&format!("[{}]+0x{start:x}", file_name(path)), module.clone(), why)
                }
            };
            self.put(FrameKey::Native { image, address }, symbol);
        }
    }

    fn managed_symbol(
        &mut self,
        frame: FrameKey,
        (process, start, generation): (ProcessId, u64, u32),
        map: &mut LazyPerfMap,
        directory: &dyn ImageResolver,
    ) {
        let found = match self.managed.find(process, start, generation) {
            // A perf map has no generations: it can only speak for code that was never replaced.
            Err(MissingName::NotAnswered | MissingName::NoMethod) if generation == 0 => {
                match map
                    .of(process, directory, &mut self.perf_maps)
                    .and_then(|map| map.name(start))
                {
                    Some(name) => {
                        self.managed.named_by_perf_map(process, name).ok_or(MissingName::StoreFull)
                    }
                    None => self.managed.find(process, start, generation),
                }
            }
            found => found,
        };
        let symbol = match found {
            Ok(id) => self.managed.symbol(id).ok_or(MissingName::NotAnswered),
            Err(missing) => Err(missing),
        };
        let unknown = |missing: MissingName| {
            unnamed(&format!("[managed] 0x{start:x}"), SymbolModule::Jit, missing.into())
        };
        self.put(frame, symbol.unwrap_or_else(unknown));
    }
}

/// The perf map of one process, read when the first of its frames has no other name.
#[derive(Default)]
struct LazyPerfMap(Option<(ProcessId, Option<PerfMap>)>);

impl LazyPerfMap {
    fn of(
        &mut self,
        process: ProcessId,
        directory: &dyn ImageResolver,
        counters: &mut perf_map::PerfMapCounters,
    ) -> Option<&PerfMap> {
        if self.0.as_ref().is_none_or(|(of, _)| *of != process) {
            // The previous process's map is freed before the next is read.
            self.0 = None;
            let map = directory.live_pid(process).and_then(|pid| perf_map::open(pid, counters));
            self.0 = Some((process, map));
        }
        self.0.as_ref()?.1.as_ref()
    }
}

impl From<MissingName> for Unresolved {
    fn from(missing: MissingName) -> Self {
        match missing {
            MissingName::NotAnswered => Self::NotAnswered,
            MissingName::NoMethod => Self::NoMethod,
            MissingName::Unloaded => Self::Unloaded,
            MissingName::Conflict => Self::Conflict,
            MissingName::StoreFull => Self::StoreFull,
        }
    }
}

fn plain(name: &str, module: SymbolModule) -> Symbol {
    let name: Arc<str> = perfusion_model::text::clean(name).as_ref().into();
    Symbol { system_name: Arc::clone(&name), name, module, function: None, unresolved: None }
}

fn unnamed(name: &str, module: SymbolModule, why: Unresolved) -> Symbol {
    Symbol { unresolved: Some(why), ..plain(name, module) }
}

/// Last component of a path, without the kernel's ` (deleted)`.
#[must_use]
pub fn file_name(path: &str) -> &str {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    let name = path.rsplit('/').next().unwrap_or(path);
    if name.is_empty() { path } else { name.trim_matches(['[', ']']) }
}

/// What a synthetic frame is called in a profile.
#[must_use]
pub const fn marker_name(marker: Marker) -> &'static str {
    match marker {
        Marker::TruncatedCopy => "[truncated: stack copy ended]",
        Marker::TruncatedDepth => "[truncated: too deep]",
        Marker::TruncatedNoRule => "[truncated: no unwind rule]",
        Marker::TruncatedUnreadable => "[truncated: memory unreadable]",
        Marker::TruncatedProcessGone => "[truncated: process gone]",
        Marker::TruncatedNotKnown => "[truncated: too many processes]",
        Marker::TruncatedStale => "[truncated: code replaced]",
        Marker::Exiting => "[exiting: memory given back]",
        Marker::Guessed => "[guessed caller]",
        Marker::WaitingSinceBefore => "[waiting since before the recording]",
        Marker::NotYetRun => "[not yet run]",
        Marker::NotSampled => "[not sampled]",
        Marker::StackLost => "[stack lost]",
        Marker::GarbageCollector => "Garbage Collector",
        Marker::Overflow => "[other stacks]",
        Marker::WokenBy => "[woken by]",
        Marker::WokenByTimer => "[timer]",
        Marker::WokenByInterrupt => "[interrupt]",
        Marker::HeldBy => "[held by]",
        Marker::WakerUnknown => "[stack not known]",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Knows every process as this one, and how often it was asked.
    #[derive(Default)]
    struct Own(std::cell::Cell<u32>);

    impl ImageResolver for Own {
        fn image(&self, _: ImageId) -> Option<ImageFile<'_>> {
            None
        }

        fn live_pid(&self, _: ProcessId) -> Option<u32> {
            self.0.set(self.0.get() + 1);
            None
        }
    }

    #[test]
    fn a_perf_map_is_looked_for_once_per_process_and_only_where_a_name_is_missing() {
        let frame = |process, start| FrameKey::Managed {
            process: ProcessId(process),
            start,
            generation: 0,
            offset: None,
        };
        let method = MethodBody {
            asked: 0x1000,
            module_id: 1,
            token: 1,
            dynamic: false,
            name: "A.M()".to_owned(),
            module: String::new(),
            ranges: vec![(0x1000, 16)],
            il_map: None,
        };
        let mut symbolizer = Symbolizer::default();
        symbolizer.observe(ProcessId(1), &ShimEvent::Method(Box::new(method)));
        let own = Own::default();
        symbolizer.resolve([frame(1, 0x1000)], &own);
        assert_eq!((own.0.get(), symbolizer.symbol(frame(1, 0x1000)).name.as_ref()), (0, "A.M()"));
        symbolizer.resolve([frame(1, 0x2000), frame(2, 0x2000), frame(1, 0x3000)], &own);
        assert_eq!(own.0.get(), 2);
    }

    struct Nothing;

    impl ImageResolver for Nothing {
        fn image(&self, _: ImageId) -> Option<ImageFile<'_>> {
            None
        }

        fn live_pid(&self, _: ProcessId) -> Option<u32> {
            None
        }
    }

    #[test]
    fn a_frame_without_a_name_is_counted_once_and_named_when_the_answer_comes() {
        let process = ProcessId(1);
        let managed = FrameKey::Managed { process, start: 0x1000, generation: 0, offset: None };
        let unknown = FrameKey::Unknown { process, address: 0x77 };
        let mut symbolizer = Symbolizer::default();
        for _ in 0..2 {
            symbolizer.resolve([managed, unknown], &Nothing);
        }
        let count = |symbolizer: &Symbolizer, why: Unresolved| {
            symbolizer
                .counters()
                .into_iter()
                .find(|(name, _)| *name == why.name())
                .map(|(_, count)| count)
        };
        assert_eq!(symbolizer.symbol(managed).name.as_ref(), "[managed] 0x1000");
        assert_eq!(count(&symbolizer, Unresolved::NotAnswered), Some(1));
        assert_eq!(count(&symbolizer, Unresolved::NoMapping), Some(1));
        let method = MethodBody {
            asked: 0x1000,
            module_id: 1,
            token: 1,
            dynamic: false,
            name: "A.M()".to_owned(),
            module: String::new(),
            ranges: vec![(0x1000, 16)],
            il_map: None,
        };
        symbolizer.observe(process, &ShimEvent::Method(Box::new(method)));
        symbolizer.resolve([managed, unknown], &Nothing);
        assert_eq!(symbolizer.symbol(managed).name.as_ref(), "A.M()");
        assert_eq!(count(&symbolizer, Unresolved::NotAnswered), None);
    }

    #[test]
    fn what_stands_for_stacks_without_room_has_its_name_though_no_window_asks_for_it() {
        let mut symbolizer = Symbolizer::default();
        for marker in [Marker::Overflow, Marker::TruncatedDepth] {
            let symbol = symbolizer.symbol(FrameKey::Marker(marker));
            assert_eq!((&*symbol.name, symbol.unresolved), (marker_name(marker), None));
        }
        symbolizer.resolve([FrameKey::Marker(Marker::Overflow)], &Own::default());
        assert_eq!(symbolizer.counters().iter().map(|(_, count)| count).sum::<u64>(), 0);
    }

    #[test]
    fn file_names_are_told_from_paths_and_brackets() {
        for (path, name) in [
            ("/usr/lib/libc.so.6", "libc.so.6"),
            ("/a/b (deleted)", "b"),
            ("[vdso]", "vdso"),
            ("", ""),
        ] {
            assert_eq!(file_name(path), name);
        }
    }
}
