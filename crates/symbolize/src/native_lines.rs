//! Lines of native code, and the functions that are part of others there, kept with the names.

use crate::dwarf::{self, AddressLines, UnitIndex, WorkBudget};
use crate::elf_sections::Sections;
use crate::source_line::{InlinedFunction, SourceLine};
use foldhash::{HashMap, HashMapExt as _, HashSet};
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_model::frame::ImageId;
use std::sync::Arc;

/// What lines may take, and what the indices of files may take that are kept to be quick.
const MAX_BYTES: usize = 64 << 20;
const MAX_INDEX_BYTES: usize = 32 << 20;

/// Lines of addresses in native files.
#[derive(Debug, Default)]
pub(crate) struct NativeLines {
    lines: HashMap<(ImageId, u64), Box<AddressLines>>,
    /// The names of functions and files in them.
    texts: HashSet<Arc<str>>,
    bytes: usize,
    indices: HashMap<ImageId, UnitIndex>,
    /// Addresses with lines, as they were found.
    found: u64,
    refused: u64,
}

impl NativeLines {
    /// Looks up the lines of these ELF virtual addresses of an image, in the file that has its
    /// debug information.
    pub(crate) fn find(
        &mut self,
        image: ImageId,
        (file, sections): (&ForeignFile, &Sections),
        addresses: &[u64],
        budget: &mut WorkBudget,
    ) {
        let mut index = self.indices.remove(&image);
        let result =
            dwarf::lines((file, sections), &mut index, addresses, budget, |position, lines| {
                if let Some(address) = addresses.get(position) {
                    self.put((image, *address), lines);
                }
            });
        match result {
            Ok(units) => self.refused += units,
            Err(error) => {
                self.refused += 1;
                tracing::debug!(%error, "debug information not read");
            }
        }
        if let Some(index) = index {
            let held = |indices: &HashMap<ImageId, UnitIndex>| -> usize {
                indices.values().map(UnitIndex::held_bytes).sum()
            };
            if held(&self.indices) + index.held_bytes() > MAX_INDEX_BYTES {
                self.indices.clear();
            }
            if index.held_bytes() <= MAX_INDEX_BYTES {
                self.indices.insert(image, index);
            }
        }
    }

    fn put(&mut self, key: (ImageId, u64), mut lines: AddressLines) {
        let own = own_bytes(&lines);
        if self.bytes + own > MAX_BYTES {
            self.refused += 1;
            return;
        }
        self.bytes += own;
        let mut share = |text: &mut Arc<str>| share(&mut self.texts, &mut self.bytes, text);
        for function in &mut lines.inlined {
            share(&mut function.name);
            share(&mut function.system_name);
        }
        let places = lines.inlined.iter_mut().map(|function| &mut function.line);
        for line in places.chain([&mut lines.line]).flatten() {
            share(&mut line.file);
        }
        lines.inlined.shrink_to_fit();
        self.found += 1;
        self.lines.insert(key, Box::new(lines));
    }

    /// The line of an address in the function that a symbol names there.
    pub(crate) fn line(&self, image: ImageId, address: u64) -> Option<&SourceLine> {
        self.lines.get(&(image, address))?.line.as_ref()
    }

    /// The functions that are part of that one at the address, innermost first.
    pub(crate) fn inlined(&self, image: ImageId, address: u64) -> &[InlinedFunction] {
        self.lines.get(&(image, address)).map_or(&[], |lines| &lines.inlined)
    }

    /// Forgets what is not `kept`, an address in an image.
    pub(crate) fn retain(&mut self, mut kept: impl FnMut(ImageId, u64) -> bool) {
        self.lines.retain(|(image, address), _| kept(*image, *address));
        self.lines.shrink_to_fit();
        self.texts.retain(|text| Arc::strong_count(text) > 1);
        let of_lines = self.lines.values().map(|lines| own_bytes(lines));
        let of_texts = self.texts.iter().map(|text| text_bytes(text));
        self.bytes = of_lines.sum::<usize>() + of_texts.sum::<usize>();
    }

    /// Forgets where the units of images are that are not `kept`.
    pub(crate) fn retain_images(&mut self, mut kept: impl FnMut(ImageId) -> bool) {
        self.indices.retain(|image, _| kept(*image));
    }

    /// Memory is short: drops what can be read again.
    pub(crate) fn shed(&mut self) {
        self.indices = HashMap::new();
    }

    /// Addresses with lines, and files and units whose debug information was not read.
    pub(crate) fn counters(&self) -> [(&'static str, u64); 2] {
        [("native_lines", self.found), ("native_lines_refused", self.refused)]
    }
}

/// One text for all that are equal.
fn share(texts: &mut HashSet<Arc<str>>, bytes: &mut usize, text: &mut Arc<str>) {
    match texts.get(&**text) {
        Some(known) => *text = Arc::clone(known),
        None => {
            *bytes += text_bytes(text);
            texts.insert(Arc::clone(text));
        }
    }
}

/// What lines take beside their texts.
fn own_bytes(lines: &AddressLines) -> usize {
    size_of::<((ImageId, u64), AddressLines)>() + lines.inlined.len() * size_of::<InlinedFunction>()
}

fn text_bytes(text: &str) -> usize {
    size_of::<(Arc<str>, [usize; 2])>() + text.len()
}
