//! Memory of a process, read page by page and not twice, up to a limit.

use crate::data_descriptor::RuntimeMemory;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

const PAGE_BYTES: u64 = 4096;
/// Most pages kept.
const MOST_PAGES: usize = 2048;

/// A page; `None` for one that cannot be read.
type Page = Option<Box<[u8]>>;

/// What of a process's memory was read in one go.
pub(super) struct PagedMemory<'a> {
    source: &'a dyn RuntimeMemory,
    pages: RefCell<HashMap<u64, Page>>,
    /// Bytes that may still be read.
    left: Cell<u64>,
}

impl<'a> PagedMemory<'a> {
    /// At most `limit` bytes of it are read.
    pub(super) fn new(source: &'a dyn RuntimeMemory, limit: u64) -> Self {
        Self { source, pages: RefCell::default(), left: Cell::new(limit) }
    }

    fn spend(&self, bytes: u64) -> Option<()> {
        self.left.set(self.left.get().checked_sub(bytes)?);
        Some(())
    }

    /// Reads what is not looked at again: it is not kept.
    pub(super) fn read_once(&self, address: u64, into: &mut [u8]) -> Option<()> {
        self.spend(into.len() as u64)?;
        self.source.read(address, into)
    }

    fn page(&self, at: u64) -> Option<Page> {
        self.spend(PAGE_BYTES)?;
        let mut bytes = vec![0; usize::try_from(PAGE_BYTES).ok()?].into_boxed_slice();
        Some(self.source.read(at, &mut bytes).map(|()| bytes))
    }
}

impl RuntimeMemory for PagedMemory<'_> {
    fn read(&self, address: u64, into: &mut [u8]) -> Option<()> {
        let (mut address, mut into) = (address, into);
        let mut pages = self.pages.borrow_mut();
        while !into.is_empty() {
            let within = address % PAGE_BYTES;
            let length = usize::try_from(PAGE_BYTES - within).ok()?.min(into.len());
            let (part, rest) = into.split_at_mut_checked(length)?;
            let at = address - within;
            if !pages.contains_key(&at) {
                if pages.len() >= MOST_PAGES {
                    pages.clear();
                }
                pages.insert(at, self.page(at)?);
            }
            let from = usize::try_from(within).ok()?;
            part.copy_from_slice(pages.get(&at)?.as_ref()?.get(from..from.checked_add(length)?)?);
            (address, into) = (address.checked_add(length as u64)?, rest);
        }
        Some(())
    }
}
