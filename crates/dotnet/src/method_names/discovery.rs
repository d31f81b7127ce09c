//! Finds how ReadyToRun code leads to its method where the runtime does not describe it (.NET 8
//! and 9). Nothing is taken for granted but the order of a few fields. Each place is searched for,
//! and is right only if all that must be there is there: the code range with the address that is
//! asked about, the module's ReadyToRun information with its signature, the image's own table of
//! functions, and the hash table with that very address.

use super::layout::{FUNCTION_BYTES, ImageLayout};
use super::modules::function_table;
use super::paged_memory::PagedMemory;
use crate::data_descriptor::RuntimeMemory;

/// What of the debugger's table of variables is looked at, bytes. It has some hundred entries.
const TABLE_BYTES: usize = 2048;
/// No variable is farther from the library's begin, bytes.
const MOST_DISTANCE: u64 = 64 << 20;
/// How much of a `Module` and of its ReadyToRun information is searched, bytes.
const MODULE_BYTES: u64 = 2048;
const INFO_BYTES: u64 = 1024;
/// Where the signature of ReadyToRun information is searched.
const HEADER_PLACES: [u64; 6] = [8, 16, 24, 32, 40, 48];

/// What is known before.
pub(super) struct Known<'a> {
    pub(super) memory: &'a PagedMemory<'a>,
    /// Where the library is mapped, and its table of variables for debuggers, `g_dacTable`.
    pub(super) base: u64,
    pub(super) table: u64,
}

impl Known<'_> {
    fn word(&self, at: u64, offset: u64) -> Option<u64> {
        self.memory.word(at.checked_add(offset)?)
    }

    /// The layout by which `address`, in ReadyToRun code, has a method that `is_right` of.
    pub(super) fn find(
        &self,
        address: u64,
        mut is_right: impl FnMut(u64) -> bool,
    ) -> Option<ImageLayout> {
        let mut layout = UNKNOWN;
        layout.top_level = self.code_ranges(address)?;
        let range = layout.range_at(self.memory, address)?;
        let base = self.word(range, layout.range_begin)?;
        let module = self.word(range, layout.range_module)?;
        let (functions, count) = function_table(self.memory, base)?;
        let mut infos = (8..MODULE_BYTES).step_by(8).filter_map(|at| {
            let info = self.word(module, at).filter(|info| info % 8 == 0 && *info != 0)?;
            let header = (self.word(info, 0)? == module).then(|| self.header(info))??;
            Some((at, info, header))
        });
        let info;
        (layout.module_info, info, layout.info_header) = infos.next()?;
        let functions = base.checked_add(u64::from(functions))?;
        layout.info_functions = (8..INFO_BYTES).step_by(8).find(|&at| {
            self.word(info, at) == Some(functions)
                && self.word(info, at + 8).map(|count| count & 0xffff_ffff) == Some(count)
        })?;
        layout.info_function_count = layout.info_functions + 8;
        (layout.info_function_count..INFO_BYTES).step_by(8).find_map(|at| {
            layout.info_methods = at;
            let method = layout.method_at(self.memory, address)?;
            is_right(method).then(|| layout.clone())
        })
    }

    fn header(&self, info: u64) -> Option<u64> {
        let is_header = |at: &u64| {
            let header = self.word(info, *at).filter(|&header| header != 0);
            header.and_then(|header| self.memory.half(header)) == Some(super::images::MAGIC)
        };
        HEADER_PLACES.into_iter().find(is_header)
    }

    /// Where the code range map has its top level: the variable by which `address` has a range.
    fn code_ranges(&self, address: u64) -> Option<u64> {
        let mut table = vec![0; TABLE_BYTES];
        self.memory.read(self.table, &mut table)?;
        let entries = table.chunks_exact(8).filter_map(|entry| {
            // Where variables are, or how far from the library's begin.
            let entry = u64::from_le_bytes(*entry.first_chunk()?);
            let distance = entry.checked_sub(self.base).unwrap_or(entry);
            (1..MOST_DISTANCE).contains(&distance).then(|| self.base.checked_add(distance))?
        });
        let mut layout = UNKNOWN;
        for variable in entries {
            for top in [Some(variable), self.memory.word(variable)].into_iter().flatten() {
                layout.top_level = top;
                if let Some(range) = layout.range_at(self.memory, address)
                    && self.word(range, layout.range_module).is_some_and(|module| module != 0)
                {
                    return Some(top);
                }
            }
        }
        None
    }
}

/// The parts that have been the same since the code range map came with .NET 8; the others are
/// filled in.
const UNKNOWN: ImageLayout = ImageLayout {
    top_level: 0,
    fragment_next: 0,
    fragment_begin: 8,
    fragment_end: 16,
    fragment_range: 24,
    range_begin: 0,
    range_end: 8,
    range_deleted: None,
    range_module: 32,
    module_info: 0,
    info_header: 0,
    info_composite: None,
    info_functions: 0,
    info_function_count: 0,
    info_base: None,
    info_methods: 0,
    map_buckets: 16,
    value_mask: u64::MAX >> 1,
};

// A function is as long as `function_table` counts.
const _: () = assert!(FUNCTION_BYTES == 12);
