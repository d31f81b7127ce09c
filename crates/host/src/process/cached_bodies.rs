//! The bodies of JIT methods that were met in a process, and the generations of those that are no
//! longer known. A body that was replaced gets a new generation.

use perfusion_unwind::managed::JitBody;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a look at JIT memory holds.
pub(super) const RECHECK: Duration = Duration::from_secs(1);
/// Most JIT bodies remembered per process.
const MAX_BODIES: usize = 16_384;
/// Part of all bodies that is dropped at once where there is no room.
const DROPPED_PART: usize = 4;
/// Most start addresses of retired bodies whose generation is remembered per process.
const MAX_RETIRED: usize = 16_384;

/// A body that was found.
#[derive(Debug)]
pub(super) struct CachedBody {
    pub(super) body: JitBody,
    pub(super) generation: u32,
    /// When it was last looked at.
    pub(super) checked: Instant,
    /// It was met since then.
    pub(super) is_used: bool,
}

impl CachedBody {
    /// True while the last look holds.
    pub(super) fn holds(&self, now: Instant) -> bool {
        now.duration_since(self.checked) < RECHECK
    }
}

/// What is left of a body that is not known any more.
#[derive(Clone, Copy, Debug)]
struct RetiredBody {
    /// Its generation when it may still be there, else the next one.
    generation: u32,
    /// The print of a body that may still be there, because it was dropped to save room.
    print: Option<u64>,
}

impl RetiredBody {
    /// The generation of other code in its place.
    fn next(self) -> u32 {
        self.generation.saturating_add(u32::from(self.print.is_some()))
    }
}

/// A number that is the same for the same body.
fn print(body: &JitBody) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

/// The bodies of one process.
#[derive(Debug, Default)]
pub(super) struct CachedBodies {
    /// By start address.
    known: BTreeMap<u64, CachedBody>,
    /// By start address; none is in `known`.
    retired: BTreeMap<u64, RetiredBody>,
    /// Generation of starts that are in neither: newer than any that `retired` has forgotten.
    oldest_generation: u32,
}

impl CachedBodies {
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.known.len() >= MAX_BODIES
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&u64, &CachedBody)> {
        self.known.iter()
    }

    pub(super) fn get(&self, start: u64) -> Option<&CachedBody> {
        self.known.get(&start)
    }

    pub(super) fn get_mut(&mut self, start: u64) -> Option<&mut CachedBody> {
        self.known.get_mut(&start)
    }

    /// The last body that begins at `pc` or before, and its start.
    pub(super) fn before(&self, pc: u64) -> Option<(u64, &CachedBody)> {
        self.known.range(..=pc).next_back().map(|(start, known)| (*start, known))
    }

    /// The body that covers `pc`, and its start.
    pub(super) fn at(&self, pc: u64) -> Option<(u64, &CachedBody)> {
        self.before(pc).filter(|(_, known)| known.body.range.contains(&pc))
    }

    /// The starts of the bodies that reach into `range`.
    pub(super) fn starts_in(&self, range: &Range<u64>) -> Vec<u64> {
        let first = self
            .known
            .range(..range.start)
            .next_back()
            .filter(|(_, k)| k.body.range.end > range.start);
        first.into_iter().chain(self.known.range(range.clone())).map(|(start, _)| *start).collect()
    }

    /// Remembers a body that was found `now`, with the generation it had before or a new one. No
    /// known body may reach into its range.
    pub(super) fn insert(&mut self, body: JitBody, now: Instant) {
        let start = body.range.start;
        let generation = match self.retired.remove(&start) {
            None => self.oldest_generation,
            Some(retired) if retired.print == Some(print(&body)) => retired.generation,
            Some(retired) => retired.next(),
        };
        self.forget_retired(body.range.clone());
        self.known.insert(start, CachedBody { body, generation, checked: now, is_used: true });
    }

    /// The bodies that reach into `range` are gone. Answers the ranges they had.
    pub(super) fn remove_in(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut removed = Vec::new();
        for start in self.starts_in(range) {
            if let Some(known) = self.known.remove(&start) {
                let generation = known.generation.saturating_add(1);
                self.retire(start, RetiredBody { generation, print: None });
                removed.push(known.body.range);
            }
        }
        removed
    }

    /// The bodies in `range` that were dropped are not there any more.
    pub(super) fn forget_retired(&mut self, range: Range<u64>) {
        for (_, retired) in self.retired.range_mut(range) {
            *retired = RetiredBody { generation: retired.next(), print: None };
        }
    }

    /// The bodies that reach into `range` were last looked at `past`.
    pub(super) fn recheck(&mut self, range: &Range<u64>, past: Instant) {
        for start in self.starts_in(range) {
            if let Some(known) = self.known.get_mut(&start) {
                known.checked = past;
            }
        }
    }

    /// Drops all bodies, each of which may still be there.
    pub(super) fn clear(&mut self) {
        while let Some((start, known)) = self.known.pop_first() {
            self.drop_body(start, &known);
        }
    }

    /// Drops the bodies that were looked at longest ago. Their steps stay.
    pub(super) fn evict(&mut self) {
        let mut oldest: Vec<(Instant, u64)> =
            self.known.iter().map(|(start, known)| (known.checked, *start)).collect();
        oldest.sort_unstable();
        for (_, start) in oldest.into_iter().take(MAX_BODIES / DROPPED_PART) {
            if let Some(known) = self.known.remove(&start) {
                self.drop_body(start, &known);
            }
        }
    }

    /// A body was removed that may still be there. Its name is its generation's, so whatever is
    /// found there next is compared with it.
    fn drop_body(&mut self, start: u64, known: &CachedBody) {
        let print = Some(print(&known.body));
        self.retire(start, RetiredBody { generation: known.generation, print });
    }

    fn retire(&mut self, start: u64, retired: RetiredBody) {
        if self.retired.len() >= MAX_RETIRED {
            let newest = self.retired.values().map(|retired| retired.next()).max().unwrap_or(0);
            self.oldest_generation = self.oldest_generation.max(newest);
            self.retired.clear();
        }
        self.retired.insert(start, retired);
    }
}
