//! Where the code of one process is: its executable mappings, and the files behind them.

use super::mapping::{FileKey, Mapping, MappingKind, Mappings, Replaced};
use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::backoff::Backoff;
use perfusion_model::frame::ImageId;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Files known beside those that are mapped now.
const FEW_IMAGES: usize = 64;
/// Shortest time between two readings of a process's maps because of an address no mapping covers;
/// it doubles up to the longest while they find nothing.
const REFRESH: Duration = Duration::from_millis(100);
const LONGEST_REFRESH: Duration = Duration::from_secs(5);

/// The executable mappings of one process.
#[derive(Debug)]
pub(super) struct AddressSpace {
    pub(super) mappings: Arc<Mappings>,
    /// Files of its mappings, once resolved; `None` for those that cannot be.
    pub(super) images: HashMap<FileKey, Option<ImageId>>,
    pub(super) vdso: Option<ImageId>,
    /// True when one of the mappings belongs to a CLR.
    pub(super) is_clr: bool,
    /// An exec or a mapping of it may be unknown: it is to be read anew before its next stack is
    /// walked.
    pub(super) in_doubt: bool,
    /// When its maps were read last because an address was in no mapping.
    refreshed: Option<Instant>,
    refresh_after: Backoff,
}

impl AddressSpace {
    /// These mappings, of which no file is known.
    pub(super) fn new(mappings: Arc<Mappings>) -> Self {
        let is_clr = mappings.iter().any(belongs_to_clr);
        Self {
            mappings,
            images: HashMap::new(),
            vdso: None,
            is_clr,
            in_doubt: false,
            refreshed: None,
            refresh_after: Backoff::new(REFRESH, LONGEST_REFRESH),
        }
    }

    /// Takes up a mapping; answers what became of those that were in its place.
    pub(super) fn insert(&mut self, mapping: Mapping) -> Replaced {
        self.is_clr |= belongs_to_clr(&mapping);
        let key = mapping.file();
        let replaced = Arc::make_mut(&mut self.mappings).insert(mapping);
        // A file that could not be opened may be another by now.
        if self.images.get(&key) == Some(&None) {
            self.images.remove(&key);
        }
        // A file it has mapped once and does no more takes no room for ever.
        if self.images.len() > 2 * self.mappings.len() + FEW_IMAGES {
            let mapped: HashSet<FileKey> = self.mappings.iter().map(Mapping::file).collect();
            self.images.retain(|key, _| mapped.contains(key));
        }
        replaced
    }

    /// Forgets where the code is, until that is read anew.
    pub(super) fn clear(&mut self) {
        (self.mappings, self.images, self.in_doubt) = (Arc::default(), HashMap::new(), true);
    }

    /// The file of these mappings, where it was found.
    pub(super) fn known_image(&self, key: FileKey) -> Option<ImageId> {
        self.images.get(&key).copied().flatten()
    }

    /// Where a file is mapped.
    pub(super) fn ranges_of(&self, key: FileKey) -> Vec<Range<u64>> {
        let of_file =
            self.mappings.iter().filter(|m| m.region == MappingKind::File && m.file() == key);
        of_file.map(|mapping| mapping.range.clone()).collect()
    }

    /// The program it runs: the file mapped at its lowest address, where the kernel puts the
    /// executable.
    pub(super) fn main_image(&self) -> Option<ImageId> {
        let first = self.mappings.iter().find(|mapping| mapping.region == MappingKind::File)?;
        self.known_image(first.file())
    }

    /// The maps were read, or need not be for a while.
    pub(super) fn set_refreshed(&mut self, now: Instant) {
        self.refreshed = Some(now);
    }

    /// True when the maps may be read `now` to look for an address; then they count as read.
    pub(super) fn begin_refresh(&mut self, now: Instant) -> bool {
        let after = self.refresh_after.delay();
        let recent = self.refreshed.is_some_and(|at| now.duration_since(at) < after);
        if !recent {
            self.refreshed = Some(now);
        }
        !recent
    }

    /// The maps were read to look for an address.
    pub(super) fn end_refresh(&mut self, found: bool) {
        if found {
            self.refresh_after.reset();
        } else {
            self.refresh_after.failed();
        }
    }
}

fn belongs_to_clr(mapping: &Mapping) -> bool {
    mapping.region == MappingKind::Jit { doublemapped: true }
        || mapping.path.ends_with("/libcoreclr.so")
}
