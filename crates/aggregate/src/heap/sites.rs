//! What was allocated in a window, by site.

use super::levels::RarestLevels;
use super::weight::Weight;
use super::{MAX_OF_ALL, MAX_OF_REGION};
use foldhash::HashMap;
use perfusion_model::event::{HeapKind, RegionId};
use perfusion_model::labels::{NameId, Sampling};
use perfusion_model::stack::{StackId, StackTable};

/// Fewest sites of a region that there is memory for.
const LEAST_SITES: usize = 1 << 15;
/// A window's samples for each that is told of in a second: a minute's of small objects, one of
/// large ones, and some that were told of beyond that.
const SECONDS_OF_SITES: usize = 128;

/// The key of a sum of allocations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// Region the sample came through; with `type_id` it names the type.
    pub region: RegionId,
    /// Allocating thread.
    pub tid: u32,
    /// The thread's name at that moment.
    pub name: NameId,
    /// Allocation stack.
    pub stack: StackId,
    /// ClassID.
    pub type_id: u64,
    /// The heap of the objects.
    pub heap: HeapKind,
    /// Size, rounded down to a power of two: objects of one site are alike enough for one interval.
    pub size_class: u64,
    /// The way its samples were chosen.
    pub sampling: Sampling,
}

/// Sums of a window by site. A region has a bounded number of them.
pub(super) struct SiteTotals {
    sums: HashMap<Site, Weight>,
    /// The number of each region's `sums`.
    of_region: HashMap<RegionId, usize>,
    most_of_region: usize,
    /// By region: the highest level at which one was told of in this window.
    rarest: HashMap<RegionId, RarestLevels>,
    refused: u64,
}

impl Default for SiteTotals {
    fn default() -> Self {
        Self {
            sums: HashMap::default(),
            of_region: HashMap::default(),
            most_of_region: MAX_OF_REGION,
            rarest: HashMap::default(),
            refused: 0,
        }
    }
}

impl SiteTotals {
    /// A region tells so many samples in a second; `None` for a recording without windows.
    pub(super) fn expect(&mut self, samples: Option<u32>) {
        let sites = samples.map_or(MAX_OF_REGION, |samples| {
            usize::try_from(samples).unwrap_or(usize::MAX).saturating_mul(SECONDS_OF_SITES)
        });
        self.most_of_region = sites.clamp(LEAST_SITES, MAX_OF_REGION);
    }

    /// Adds one sample, which was told of at this level.
    pub(super) fn add(&mut self, site: Site, weight: Weight, level: u8) {
        let counted = self.site_or_rest(site);
        *self.sums.entry(counted).or_default() += weight;
        self.rarest.entry(site.region).or_default().at_least(site.heap, level);
    }

    /// `site`, or when there are too many the one that takes all the rest of its region.
    fn site_or_rest(&mut self, site: Site) -> Site {
        if self.sums.contains_key(&site) {
            return site;
        }
        let of_region = self.of_region.entry(site.region).or_default();
        if *of_region < self.most_of_region && self.sums.len() < MAX_OF_ALL {
            *of_region += 1;
            return site;
        }
        self.refused += 1;
        Site {
            tid: 0,
            name: NameId::default(),
            stack: StackTable::OVERFLOW,
            type_id: 0,
            size_class: 0,
            ..site
        }
    }

    /// Of one in how many samples like the site's was told when that was least often.
    pub(super) fn told_one_in(&self, site: &Site) -> Option<u64> {
        self.rarest.get(&site.region)?.one_in(site.heap)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Site, &Weight)> {
        self.sums.iter()
    }

    /// Forgets all sums, with their memory: a busy window's is not kept.
    pub(super) fn next_window(&mut self) {
        self.sums = HashMap::default();
        self.of_region = HashMap::default();
        self.rarest = HashMap::default();
    }

    /// Samples counted under the rest of their region.
    pub(super) fn refused(&self) -> u64 {
        self.refused
    }
}
