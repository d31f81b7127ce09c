//! ReadyToRun code: from an address in it to the method, as the runtime finds it itself
//! (dotnet/runtime src/coreclr/vm/codeman.cpp, `ReadyToRunJitManager::JitCodeToMethodInfo`).

use super::layout::{BUCKET_BYTES, BUCKET_SLOTS, FUNCTION_BYTES, ImageLayout};
use crate::data_descriptor::RuntimeMemory;

/// The code range map: levels, bits of an address for each, and bits below the last.
const LEVELS: u32 = 5;
const LEVEL_BITS: u32 = 8;
const LAST_BITS: u32 = 17;
/// Most ranges of one place, functions of an image, funclets of a method, and buckets looked at.
const MOST_FRAGMENTS: usize = 1024;
const MOST_FUNCTIONS: u64 = 1 << 24;
const MOST_FUNCLETS: u64 = 4096;
const MOST_BUCKETS: u64 = 4096;
/// The table counts in 32 bits.
const LOW_HALF: u64 = 0xffff_ffff;
/// `RTR\0`.
pub(super) const MAGIC: u32 = 0x0052_5452;

impl ImageLayout {
    /// The MethodDesc of the code at `address`; `None` where no ReadyToRun code is known to be.
    pub(super) fn method_at(&self, memory: &dyn RuntimeMemory, address: u64) -> Option<u64> {
        let range = self.range_at(memory, address)?;
        let module = memory.word(range.checked_add(self.range_module)?).filter(|&m| m != 0)?;
        let info = memory.word(module.checked_add(self.module_info)?).filter(|&i| i != 0)?;
        let word = |at: u64| memory.word(info.checked_add(at)?);
        if memory.half(word(self.info_header)?)? != MAGIC {
            return None;
        }
        let told = match self.info_base {
            Some(at) => word(at)?,
            None => 0,
        };
        let base =
            if told == 0 { memory.word(range.checked_add(self.range_begin)?)? } else { told };
        let functions = word(self.info_functions)?;
        let count = u64::from(memory.half(info.checked_add(self.info_function_count)?)?);
        let begin = |index: u64| memory.half(functions.checked_add(index * FUNCTION_BYTES)?);
        let offset = u32::try_from(address.checked_sub(base)?).ok()?;
        let (mut low, mut high) = (0, count.min(MOST_FUNCTIONS));
        while low < high {
            let middle = low + (high - low) / 2;
            if begin(middle)? <= offset {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let composite = match self.info_composite {
            Some(at) => word(at)?,
            None => 0,
        };
        let methods = if composite == 0 { info } else { composite };
        let buckets_at = methods.checked_add(self.info_methods)?.checked_add(self.map_buckets)?;
        let buckets = memory.word(buckets_at)?;
        // A funclet stands behind its method, which alone is in the table.
        let last = low.checked_sub(1)?;
        let first = last.saturating_sub(MOST_FUNCLETS);
        for index in (first..=last).rev() {
            let entry = base.checked_add(u64::from(begin(index)?))?;
            if let Some(method) = self.method_of(memory, buckets, entry)? {
                return Some(method);
            }
        }
        None
    }

    /// The code range that `address` is in.
    pub(super) fn range_at(&self, memory: &dyn RuntimeMemory, address: u64) -> Option<u64> {
        let mut level = self.top_level;
        for number in (0..LEVELS).rev() {
            let index = (address >> (LAST_BITS + number * LEVEL_BITS)) & ((1 << LEVEL_BITS) - 1);
            // The lowest bit says that a collectible range is below.
            level = memory.word(level.checked_add(index * 8)?)? & !1;
            if level == 0 {
                return None;
            }
        }
        for _ in 0..MOST_FRAGMENTS {
            let word = |at: u64| memory.word(level.checked_add(at)?);
            if (word(self.fragment_begin)?..word(self.fragment_end)?).contains(&address) {
                let range = word(self.fragment_range)?;
                let word = |at: u64| memory.word(range.checked_add(at)?);
                let holds = (word(self.range_begin)?..word(self.range_end)?).contains(&address);
                let is_deleted = match self.range_deleted {
                    Some(at) => word(at)? != 0,
                    None => false,
                };
                return (holds && !is_deleted).then_some(range);
            }
            level = word(self.fragment_next)? & !1;
            if level == 0 {
                return None;
            }
        }
        None
    }

    /// The method whose code begins at `entry`, by the runtime's hash table
    /// (src/coreclr/vm/hash.cpp); `Some(None)` when that has none, `None` when it cannot be read.
    fn method_of(
        &self,
        memory: &dyn RuntimeMemory,
        buckets: u64,
        entry: u64,
    ) -> Option<Option<u64>> {
        let size = u64::from(memory.half(buckets)?);
        let first = buckets.checked_add(BUCKET_BYTES)?;
        if size < 2 {
            return Some(None);
        }
        let mut seed = (entry >> 2) & LOW_HALF;
        let step = 1 + (((entry >> 5) + 1) & LOW_HALF) % (size - 1);
        for _ in 0..size.min(MOST_BUCKETS) {
            let bucket = first.checked_add(seed % size * BUCKET_BYTES)?;
            let slot = |index: u64| memory.word(bucket.checked_add(index * 8)?);
            for index in 0..BUCKET_SLOTS {
                if slot(index)? == entry {
                    let value = slot(BUCKET_SLOTS + index)? & self.value_mask;
                    return Some(Some(value << 1));
                }
            }
            // The highest bit of the first value says that more were to be here.
            if slot(BUCKET_SLOTS)? & !self.value_mask == 0 {
                return Some(None);
            }
            seed = (seed + step) & LOW_HALF;
        }
        Some(None)
    }
}
