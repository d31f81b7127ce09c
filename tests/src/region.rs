//! The shim's regions in a running workload, seen from outside: where they are, and whether
//! anything is written into them.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use profiler_protocol::counter::Counter;
use profiler_protocol::layout::{EVENT_HEAD_AT, EVENT_TAIL_AT};

use crate::app::App;

/// Our regions in the app: memfds with our name, still mapped there; none when it has ended.
pub fn regions(app: &App) -> Vec<PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", app.pid())).unwrap_or_default();
    let ours = maps.lines().filter(|line| line.contains("/memfd:") && line.contains("perfusion"));
    ours.filter_map(|line| {
        Some(PathBuf::from(format!("/proc/{}/map_files/{}", app.pid(), line.split(' ').next()?)))
    })
    .collect()
}

/// A digest of all bytes of the regions: it changes whenever the shim writes anything.
pub fn digest(regions: &[PathBuf]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for region in regions {
        let Ok(file) = fs::File::open(region) else { continue };
        let mut block = vec![0; 1 << 16];
        let mut offset = 0;
        while let Ok(read @ 1..) = file.read_at(&mut block, offset) {
            block[..read].hash(&mut hasher);
            offset += read as u64;
        }
    }
    hasher.finish()
}

/// A counter of the shim, summed over the regions.
pub fn counted(regions: &[PathBuf], counter: Counter) -> u64 {
    regions.iter().filter_map(|region| word(region, counter.offset())).sum()
}

/// The regions that have counted more allocations than when they were first seen. `first` is what
/// was counted then.
pub fn counting(app: &App, first: &mut BTreeMap<PathBuf, u64>) -> Vec<PathBuf> {
    let grown = |region: &PathBuf| {
        let now = word(region, Counter::AllocationSamples.offset()).unwrap_or(0);
        now > *first.entry(region.clone()).or_insert(now)
    };
    regions(app).into_iter().filter(grown).collect()
}

/// How far a region has been written.
pub fn written(region: &Path) -> Option<u64> {
    word(region, EVENT_HEAD_AT)
}

/// How far it has been read.
pub fn read(region: &Path) -> Option<u64> {
    word(region, EVENT_TAIL_AT)
}

/// Units of records that were written and not read yet, summed over the regions.
pub fn unread(regions: &[PathBuf]) -> u64 {
    regions.iter().filter_map(|region| written(region)?.checked_sub(read(region)?)).sum()
}

fn word(region: &Path, offset: u64) -> Option<u64> {
    let mut word = [0; 8];
    fs::File::open(region).ok()?.read_exact_at(&mut word, offset).ok()?;
    Some(u64::from_le_bytes(word))
}
