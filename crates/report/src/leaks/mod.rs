//! Verdicts about leaks. [`snapshot`] reads what was alive, [`series`] finds the moments of each
//! process, [`mod@judge`] compares them, [`mod@print`] shows the result.

pub mod judge;
pub mod print;
pub mod series;
pub mod snapshot;

use self::judge::{Judgement, SiteMoment, judge};
use self::series::Stretch;
use self::snapshot::{AllocationSite, LiveGroup, NamedPid, Snapshot};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

/// Most moments that are compared.
pub const MOMENTS: usize = 256;

/// One place and what is thought of it.
#[derive(Clone, Debug)]
pub struct LeakFinding {
    /// The place where the objects come from.
    pub place: Arc<AllocationSite>,
    /// The objects that were alive at the last moment.
    pub last: LiveGroup,
    /// The judgement.
    pub judgement: Judgement,
}

/// Judges every place of the snapshots by the moments of its process: leaks first, then by bytes.
#[must_use]
pub fn findings(
    snapshots: &[Snapshot],
    stretches: &HashMap<NamedPid, Stretch>,
) -> Vec<LeakFinding> {
    let none = LiveGroup::default();
    let mut places = HashSet::new();
    for stretch in stretches.values() {
        places.extend(
            stretch
                .moments
                .iter()
                .filter_map(|at| snapshots.get(*at))
                .flat_map(|of| of.groups.keys()),
        );
    }
    let finding = |place: &Arc<AllocationSite>| {
        let process = (place.pid, place.process.clone());
        let stretch = stretches.get(&process);
        let watched = stretch.map_or(&[][..], |stretch| &stretch.moments);
        let moments: Vec<SiteMoment<'_>> = evenly(watched.len(), MOMENTS)
            .filter_map(|at| snapshots.get(*watched.get(at)?))
            .map(|snapshot| SiteMoment {
                at_s: snapshot.at_s,
                proven_at_s: snapshot.proven_at_s.get(&process).copied(),
                group: snapshot.groups.get(place).unwrap_or(&none),
            })
            .collect();
        let last = moments.last().map(|moment| moment.group.clone()).unwrap_or_default();
        LeakFinding { place: Arc::clone(place), last, judgement: judge(&moments) }
    };
    let mut findings: Vec<LeakFinding> = places.into_iter().map(finding).collect();
    let rank = |finding: &LeakFinding| (finding.judgement.minor, finding.judgement.verdict);
    findings.sort_by(|a, b| {
        rank(a)
            .cmp(&rank(b))
            .then_with(|| b.last.bytes().total_cmp(&a.last.bytes()))
            .then_with(|| a.place.cmp(&b.place))
    });
    findings
}

/// Of `all` moments, `most`, the first and the last among them: those compared pairwise.
fn evenly(all: usize, most: usize) -> impl Iterator<Item = usize> {
    let shown = all.min(most);
    (0..shown).map(move |at| if shown < 2 { 0 } else { at * (all - 1) / (shown - 1) })
}

/// What holds the objects that were seen, or why that is not known.
pub type HoldersResult = Result<LeakHolders, NoHolders>;

/// Why it is not known what holds objects, for people.
#[derive(Debug)]
pub enum NoHolders {
    /// Nobody looked, because somebody ended the command before.
    NotAsked(String),
    /// The survey failed.
    Failed(String),
}

impl From<String> for NoHolders {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

impl From<&str> for NoHolders {
    fn from(why: &str) -> Self {
        Self::Failed(why.to_owned())
    }
}

impl fmt::Display for NoHolders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::NotAsked(why) | Self::Failed(why)) = self;
        f.write_str(why)
    }
}

/// The holders of the objects that were seen.
#[derive(Debug)]
pub struct LeakHolders {
    /// The survey, and what holds the objects in it.
    pub survey: perfusion_heap::retained::RetainedObjects,
    /// The handles that watch those of each place; and how many watched one that lived, or another
    /// by then, and were given up before that was sure.
    pub handles: HashMap<AllocationSite, (Vec<u64>, usize)>,
}
