//! Names of managed methods, read from outside of their process: where a runtime takes no shim
//! (`DOTNET_EnableDiagnostics=0`), and before it has one.
//!
//! A JIT body's header has the address of its MethodDesc; the runtime's own tables have that of
//! ReadyToRun code. From there it goes by chunk, class and module to the metadata, which has the
//! name. All of it is memory of the process and may hold anything, or change meanwhile. Every step
//! is bounded and checked: the method's chunk and its class fit together, class and metadata agree
//! on whose method it is, and the body is still the same when its name was read. What fails a check
//! has no name.

mod discovery;
mod images;
mod layout;
mod methods;
mod modules;
mod name_text;
mod paged_memory;
pub mod process;
mod signature;
mod spelling;
#[cfg(test)]
mod tests;
mod types;

use self::discovery::Known;
use self::layout::{ImagePlace, RuntimeLayout};
use self::modules::{KnownModules, search_image};
use self::paged_memory::PagedMemory;
use self::spelling::TypeWriter;
use crate::data_descriptor::{ProcessMemoryFile, RuntimeMemory};
use perfusion_unwind::TargetMemory;
use perfusion_unwind::managed::JitBody;
use perfusion_unwind::native::NATIVE;
use std::cell::RefCell;

/// Bytes that are read of a process for one batch of names.
const MOST_READ: u64 = 256 << 20;

/// A method, named as the shim would.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedMethod {
    /// `Namespace.Type.Method(parameters)`.
    pub name: String,
    /// File name of its module.
    pub module_name: String,
    /// What the runtime calls the module: its address.
    pub module: u64,
    /// Its token there; 0 for dynamic methods.
    pub token: u32,
    /// True when it was made at run time.
    pub dynamic: bool,
}

/// Why a method has no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NoName {
    /// The runtime does not say where its data is: .NET 8 and older.
    NotDescribed,
    /// Nothing says which method has this code.
    NoMethod,
    /// What was read does not fit together.
    Inconsistent,
    /// The method's module has no metadata that can be read, or they lack it.
    NoMetadata,
    /// There is other code now.
    Replaced,
}

/// Code that a name is wanted for.
#[derive(Clone, Debug)]
pub struct UnnamedCode {
    /// Its first address.
    pub start: u64,
    /// The body it was when it was met; `None` for code in an image.
    pub body: Option<JitBody>,
}

/// Times that it is searched for how ReadyToRun code leads to its method, each with another method.
const MOST_SEARCHES: u32 = 16;

/// What is known of one runtime.
pub struct RuntimeNames {
    /// `None` where the runtime does not say.
    layout: Option<RuntimeLayout>,
    /// Where its library is mapped, and has its table of variables for debuggers.
    table: Option<(u64, u64)>,
    module_searches: u32,
    image_searches: u32,
    modules: RefCell<KnownModules>,
}

impl RuntimeNames {
    /// Reads how the runtime whose file is mapped at `base` describes itself.
    #[must_use]
    pub fn of(memory: &ProcessMemoryFile, base: u64) -> Self {
        let descriptor = memory.descriptor(base);
        let table = memory.exported(base, "g_dacTable").map(|table| (base, table));
        let memory = PagedMemory::new(memory, MOST_READ);
        let layout = RuntimeLayout::of(&memory, base, descriptor);
        Self { layout, table, module_searches: 0, image_searches: 0, modules: RefCell::default() }
    }

    /// Names of these codes, in their order.
    pub fn names(
        &mut self,
        memory: &dyn RuntimeMemory,
        codes: &[UnnamedCode],
    ) -> Vec<Result<NamedMethod, NoName>> {
        let paged = PagedMemory::new(memory, MOST_READ);
        self.modules.borrow_mut().begin_batch();
        codes
            .iter()
            .map(|code| {
                match &code.body {
                    Some(body) => self.search_modules(&paged, body.method()),
                    None => self.search_images(&paged, code.start),
                }
                self.name(memory, &paged, code)
            })
            .collect()
    }

    /// Bytes that are kept of modules.
    #[must_use]
    pub fn kept_bytes(&self) -> usize {
        self.modules.borrow().bytes()
    }

    /// Forgets what was read of modules.
    pub fn forget_modules(&mut self) {
        self.modules.borrow_mut().clear();
    }

    /// Searches for how modules lead to their images, where that is not known.
    fn search_modules(&mut self, memory: &PagedMemory<'_>, method: u64) {
        let is_unknown = |layout: &&RuntimeLayout| layout.module.image == ImagePlace::Unknown;
        let Some(layout) = self.layout.as_ref().filter(is_unknown) else { return };
        if self.module_searches < MOST_SEARCHES {
            self.module_searches += 1;
            if let Some(layout) = naming(memory, layout, method) {
                self.layout = Some(layout);
                self.modules.borrow_mut().clear();
            }
        }
    }

    /// Searches for how ReadyToRun code leads to its method, where that is not known.
    fn search_images(&mut self, memory: &PagedMemory<'_>, start: u64) {
        let is_unknown = |layout: &&RuntimeLayout| layout.images.is_none();
        let Some(layout) = self.layout.as_ref().filter(is_unknown) else { return };
        let Some((base, table)) = self.table.filter(|_| self.image_searches < MOST_SEARCHES) else {
            return;
        };
        self.image_searches += 1;
        let mut found = None;
        let images = Known { memory, base, table }.find(start, |method| {
            found = naming(memory, layout, method);
            found.is_some()
        });
        if let Some(layout) = found {
            self.layout = Some(RuntimeLayout { images, ..layout });
            self.modules.borrow_mut().clear();
        }
    }

    fn name(
        &self,
        memory: &dyn RuntimeMemory,
        paged: &PagedMemory<'_>,
        code: &UnnamedCode,
    ) -> Result<NamedMethod, NoName> {
        let layout = self.layout.as_ref().ok_or(NoName::NotDescribed)?;
        let writer = TypeWriter { memory: paged, layout, modules: &self.modules };
        let Some(body) = &code.body else {
            let images = layout.images.as_ref().ok_or(NoName::NotDescribed)?;
            let method = images.method_at(paged, code.start).ok_or(NoName::NoMethod)?;
            let named = writer.method(method)?;
            // The table may have been made anew while it was read, and lack a method for a moment:
            // what stands before it would be found then. It is looked at once more.
            let now = PagedMemory::new(memory, MOST_READ);
            let is_same = images.method_at(&now, code.start) == Some(method);
            return if is_same { Ok(named) } else { Err(NoName::Replaced) };
        };
        let method = writer.method(body.method())?;
        match body.is_current(NATIVE, &Unpaged(memory)) {
            Some(true) => Ok(method),
            _ => Err(NoName::Replaced),
        }
    }
}

/// The layout by which this method has a name: this one, or with the place of images that had to be
/// searched for.
fn naming(memory: &PagedMemory<'_>, layout: &RuntimeLayout, method: u64) -> Option<RuntimeLayout> {
    let names = |layout: &RuntimeLayout| {
        TypeWriter { memory, layout, modules: &RefCell::default() }.method(method).is_ok()
    };
    if layout.module.image != ImagePlace::Unknown {
        return names(layout).then(|| layout.clone());
    }
    let module = TypeWriter { memory, layout, modules: &RefCell::default() }.module_of(method)?;
    let with = |image: ImagePlace| {
        let mut layout = layout.clone();
        layout.module.image = image;
        layout
    };
    search_image(memory, module, |image| names(&with(image))).map(with)
}

/// Memory as bodies are read from it.
struct Unpaged<'a>(&'a dyn RuntimeMemory);

impl TargetMemory for Unpaged<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> usize {
        self.0.read(address, into).map_or(0, |()| into.len())
    }
}
