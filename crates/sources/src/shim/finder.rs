//! Finds the regions of a process, and its table of exact mode, by the name of their memfd in
//! `/proc/PID/maps`.

use super::region::{RegionError, RegionKey, ShimRegion};
use perfusion_host::process::handle::{MapLine, ProcessHandle};
use profiler_protocol::exact;
use profiler_protocol::layout::MAPS_NAME;
use rustix::io::Errno;

/// Regions of one process looked at, at most: the runtime loads at most 32 notification profilers
/// (MAX_NOTIFICATION_PROFILERS).
const REGIONS_PER_PROCESS: usize = 32;

/// True for the name a region's mapping has.
#[must_use]
pub fn is_region_name(name: &str) -> bool {
    name == MAPS_NAME
}

/// What a look at one process found.
#[derive(Debug, Default)]
pub struct FoundRegions {
    /// Regions that passed all checks.
    pub regions: Vec<ShimRegion>,
    /// Tables of exact mode that passed them, too.
    pub tables: Vec<ShimRegion>,
    /// Mappings with one of the names that did not.
    pub refused: Vec<RegionError>,
}

/// All regions and tables `target` has mapped, except those in `known`.
pub fn find(
    target: &ProcessHandle,
    known: &dyn Fn(RegionKey) -> bool,
) -> Result<FoundRegions, Errno> {
    let mut lines: Vec<MapLine> = Vec::new();
    target.maps(|line| {
        // The region may be mapped in parts; the file is the same.
        if (is_region_name(&line.name) || line.name == exact::MAPS_NAME)
            && !lines.iter().any(|l| (l.device, l.inode) == (line.device, line.inode))
        {
            lines.push(line);
        }
        lines.len() < REGIONS_PER_PROCESS
    })?;
    let mut found = FoundRegions::default();
    for line in &lines {
        let is_table = line.name == exact::MAPS_NAME;
        match ShimRegion::open(target, line, if is_table { exact::MAPS_NAME } else { MAPS_NAME }) {
            Ok(region) if known(region.key()) => {}
            Ok(region) if is_table => found.tables.push(region),
            Ok(region) => found.regions.push(region),
            Err(error) => found.refused.push(error),
        }
    }
    Ok(found)
}
