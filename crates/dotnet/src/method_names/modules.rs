//! Modules of a runtime: the metadata that it has mapped or holds, and their file names.

use super::layout::{FUNCTION_BYTES, ImagePlace, ModuleLayout};
use super::paged_memory::PagedMemory;
use crate::data_descriptor::RuntimeMemory;
use crate::metadata::{Assembly, RUNTIME_DIRECTORY};
use crate::pe_head::PeHead;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Most bytes of one module's metadata (those of System.Private.CoreLib have four megabytes), and
/// of all that are kept.
const MOST_METADATA: usize = 64 << 20;
const MOST_KEPT: usize = 48 << 20;
/// Most bytes of an image's head, most sections, and most UTF-16 units of a path.
const HEAD_BYTES: u64 = 4096;
const MOST_SECTIONS: u16 = 96;
const MOST_PATH_UNITS: usize = 4096;
/// Where an assembly has its image, and a layout the place where it is mapped: in all versions.
const ASSEMBLY_IMAGE: u64 = 8;
const LAYOUT_BASE: u64 = 8;
/// How much of a `Module` and of an image is searched, bytes.
const MODULE_BYTES: u64 = 400;
const IMAGE_BYTES: u64 = 256;
/// The number of the directory of functions.
const FUNCTION_DIRECTORY: u32 = 3;
/// Bytes of the head that the runtime's part of an image begins with.
const RUNTIME_HEAD_BYTES: u32 = 72;
/// `BSJB`.
const METADATA_MAGIC: u32 = 0x424a_5342;

/// A module that was read.
pub(super) struct KnownModule {
    /// File name without directories; that of the assembly where it has no file.
    pub(super) name: String,
    /// Where its metadata is.
    at: u64,
    metadata: Vec<u8>,
}

impl KnownModule {
    /// Its metadata.
    pub(super) fn assembly(&self) -> Option<Assembly<'_>> {
        Assembly::of_metadata(&self.metadata)
    }

    /// Whether it is still there: at the same place, and with the identity that each compilation
    /// gives its module.
    fn is_current(&self, memory: &PagedMemory<'_>, place: (u64, usize)) -> bool {
        let (at, size) = place;
        if (at, size) != (self.at, self.metadata.len()) {
            return false;
        }
        let Some((offset, identity)) = self.assembly().and_then(|known| known.identity()) else {
            return false;
        };
        let mut now = [0; 16];
        let read = at
            .checked_add(offset as u64)
            .and_then(|at| memory.read(at, now.get_mut(..identity.len())?));
        read.is_some() && now.get(..identity.len()) == Some(identity)
    }
}

/// Those that were read, by address; `None` for one that has no metadata that can be read.
#[derive(Default)]
pub(super) struct KnownModules {
    known: HashMap<u64, Option<Arc<KnownModule>>>,
    /// Those that were looked at since the batch began.
    current: HashSet<u64>,
    bytes: usize,
}

impl KnownModules {
    /// Another batch of names begins: a module may have been unloaded since the last, and another
    /// be where it was.
    pub(super) fn begin_batch(&mut self) {
        self.current.clear();
        self.known.retain(|_, module| module.is_some());
    }

    /// The module at this address.
    pub(super) fn get(
        &mut self,
        memory: &PagedMemory<'_>,
        layout: &ModuleLayout,
        address: u64,
    ) -> Option<Arc<KnownModule>> {
        let place = if self.current.insert(address) {
            Some(metadata_place(memory, layout, address))
        } else {
            None
        };
        if let Some(known) = self.known.get(&address) {
            let is_current = |known: &Arc<KnownModule>| match place {
                Some(place) => place.is_some_and(|place| known.is_current(memory, place)),
                None => true,
            };
            if known.as_ref().is_none_or(is_current) {
                return known.clone();
            }
        }
        let module = read(memory, layout, address).map(Arc::new);
        if let Some(Some(before)) = self.known.remove(&address) {
            self.bytes = self.bytes.saturating_sub(before.metadata.len());
        }
        if let Some(module) = &module {
            if self.bytes + module.metadata.len() > MOST_KEPT {
                self.clear();
            }
            self.bytes += module.metadata.len();
        }
        self.known.insert(address, module.clone());
        module
    }

    /// What their metadata takes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.known.clear();
        self.current.clear();
        self.bytes = 0;
    }
}

/// Where the metadata of a module is, and their size.
fn metadata_place(
    memory: &PagedMemory<'_>,
    layout: &ModuleLayout,
    address: u64,
) -> Option<(u64, usize)> {
    if address == 0 || !address.is_multiple_of(8) {
        return None;
    }
    let place = match layout.image {
        ImagePlace::Unknown => return None,
        ImagePlace::Layouts { assembly, layout } => in_layouts(memory, address, assembly, layout)?,
        ImagePlace::Field(at) => match memory.word(address.checked_add(at)?)? {
            0 => own_metadata(memory, layout, address)?,
            base => of_image(memory, base)?,
        },
    };
    (place.1 <= MOST_METADATA).then_some(place)
}

/// The metadata of a module by one of its image's layouts.
fn in_layouts(
    memory: &PagedMemory<'_>,
    module: u64,
    assembly: u64,
    layout: u64,
) -> Option<(u64, usize)> {
    let word = |at: u64, offset: u64| memory.word(at.checked_add(offset)?).filter(|&at| at != 0);
    let image = word(word(module, assembly)?, ASSEMBLY_IMAGE)?;
    // One as the file is, one as it is mapped; a module need not have both.
    [layout, layout + 8]
        .into_iter()
        .find_map(|layout| of_image(memory, word(word(image, layout)?, LAYOUT_BASE)?))
}

/// Searches for how this module leads to its image; each place that leads to an image with metadata
/// is asked whether it is right.
pub(super) fn search_image(
    memory: &PagedMemory<'_>,
    module: u64,
    is_right: impl Fn(ImagePlace) -> bool,
) -> Option<ImagePlace> {
    let places = (8..MODULE_BYTES)
        .step_by(8)
        .flat_map(|assembly| (0..IMAGE_BYTES).step_by(8).map(move |layout| (assembly, layout)));
    let leads_to_image =
        |&(assembly, layout): &(u64, u64)| in_layouts(memory, module, assembly, layout).is_some();
    places
        .filter(leads_to_image)
        .map(|(assembly, layout)| ImagePlace::Layouts { assembly, layout })
        .find(|place| is_right(place.clone()))
}

fn read(memory: &PagedMemory<'_>, layout: &ModuleLayout, address: u64) -> Option<KnownModule> {
    let word = |at: u64| memory.word(address.checked_add(at)?);
    let (at, size) = metadata_place(memory, layout, address)?;
    let mut metadata = vec![0; size];
    memory.read_once(at, &mut metadata)?;
    let path = layout.path.and_then(word).and_then(|at| file_name(memory, at));
    let assembly = Assembly::of_metadata(&metadata)?;
    let name = match (path.filter(|path| !path.is_empty()), layout.path) {
        (Some(path), _) => path,
        (None, Some(_)) => assembly.simple_name()?.to_owned(),
        // Where it is not known how a module has its path: the name that it was compiled with.
        (None, None) => assembly.module_name()?.to_owned(),
    };
    Some(KnownModule { name, at, metadata })
}

/// Metadata of a module that is no image (Reflection.Emit), where the runtime keeps them in one
/// piece.
fn own_metadata(
    memory: &PagedMemory<'_>,
    layout: &ModuleLayout,
    address: u64,
) -> Option<(u64, usize)> {
    let (place, size, data) = layout.own_metadata?;
    let at = memory.word(address.checked_add(place)?).filter(|&at| at != 0)?;
    let size = usize::try_from(memory.half(at.checked_add(size)?)?).ok()?;
    Some((at.checked_add(data)?, size))
}

/// The first bytes of an image, as it is mapped.
struct ImageHead {
    bytes: Vec<u8>,
    head: PeHead,
}

impl ImageHead {
    fn read(memory: &PagedMemory<'_>, base: u64) -> Option<Self> {
        let mut bytes = vec![0; usize::try_from(HEAD_BYTES).ok()?];
        memory.read(base, &mut bytes)?;
        let head = PeHead::read(&bytes, MOST_SECTIONS)?;
        Some(Self { bytes, head })
    }

    /// A directory: address and size.
    fn directory(&self, number: u32) -> Option<(u32, u32)> {
        self.head.directory(&self.bytes, number)
    }

    fn file_offset(&self, address: u32) -> Option<u32> {
        self.head.file_offset(&self.bytes, address)
    }
}

/// The metadata of the image at `base`: place and size. An image is mapped section by section, or
/// as its file is.
fn of_image(memory: &PagedMemory<'_>, base: u64) -> Option<(u64, usize)> {
    let head = ImageHead::read(memory, base)?;
    let (runtime, _) = head.directory(RUNTIME_DIRECTORY)?;
    let mapped = |address: u32| Some(address);
    let in_file = |address: u32| head.file_offset(address);
    let places: [&dyn Fn(u32) -> Option<u32>; 2] = [&mapped, &in_file];
    places.into_iter().find_map(|place| {
        let at = |address: u32| base.checked_add(u64::from(place(address)?));
        let runtime = at(runtime)?;
        let half = |offset: u64| memory.half(runtime.checked_add(offset)?);
        if half(0)? != RUNTIME_HEAD_BYTES {
            return None;
        }
        let (metadata, size) = (at(half(8)?)?, usize::try_from(half(12)?).ok()?);
        (memory.half(metadata)? == METADATA_MAGIC).then_some((metadata, size))
    })
}

/// Where the functions of the image at `base` are listed, relative to that, and how many they are.
pub(super) fn function_table(memory: &PagedMemory<'_>, base: u64) -> Option<(u32, u64)> {
    let (address, bytes) = ImageHead::read(memory, base)?.directory(FUNCTION_DIRECTORY)?;
    Some((address, u64::from(bytes) / FUNCTION_BYTES)).filter(|&(_, count)| count > 0)
}

/// The last part of a path in UTF-16.
fn file_name(memory: &PagedMemory<'_>, at: u64) -> Option<String> {
    if at == 0 {
        return None;
    }
    let mut units = Vec::new();
    for index in 0..MOST_PATH_UNITS as u64 {
        let mut unit = [0; 2];
        memory.read(at.checked_add(index * 2)?, &mut unit)?;
        match u16::from_le_bytes(unit) {
            0 => {
                let path = String::from_utf16_lossy(&units);
                return path.rsplit('/').next().map(str::to_owned);
            }
            unit => units.push(unit),
        }
    }
    None
}
