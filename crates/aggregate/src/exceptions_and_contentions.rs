//! Exceptions and waits for locks, by where they happened. Each that was told of stands for others
//! of its kind (`Downsampler` in the shim).

use perfusion_model::event::RegionId;
use perfusion_model::labels::NameId;
use perfusion_model::stack::{StackId, StackTable};
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

/// Places kept of one region, of each kind; what comes after that is one place. A shim tells of
/// some hundred events a second.
const MAX_OF_REGION: usize = 1 << 15;
/// The most places of all regions.
const MAX_OF_ALL: usize = 1 << 18;

/// A thread of a runtime and its stack: the place of an exception or a contention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RuntimeEventSite {
    /// The runtime that told.
    pub region: RegionId,
    /// The thread; 0 in the place that takes all the rest.
    pub tid: u32,
    /// The thread's name at that moment.
    pub name: NameId,
    /// Its stack.
    pub stack: StackId,
}

/// The key of a sum of exceptions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Throw {
    /// The place of the event.
    pub place: RuntimeEventSite,
    /// The type; `None` in the place that takes all the rest.
    pub type_name: Option<Arc<str>>,
    /// The message of the exception, where messages were requested.
    pub message: Option<Arc<str>>,
    /// Thrown again from a handler.
    pub rethrown: bool,
}

/// The key of a sum of waits for locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockWait {
    /// The place of the event.
    pub place: RuntimeEventSite,
    /// The thread that held the lock.
    pub owner: Option<u32>,
    /// The owner's stack meanwhile.
    pub held_at: Option<StackId>,
}

/// Exceptions together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ExceptionSum {
    /// The estimated number.
    pub count: f64,
    /// The number of reported ones.
    pub told: f64,
}

/// Waits for locks together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LockWaitSum {
    /// The estimated number.
    pub count: f64,
    /// Their estimated length, nanoseconds.
    pub ns: f64,
    /// The number of reported ones.
    pub told: f64,
    /// The length of the reported ones, nanoseconds.
    pub told_ns: f64,
}

/// Sums by place of one kind of event.
struct CappedSums<K, V> {
    sums: HashMap<K, V>,
    of_region: HashMap<RegionId, usize>,
    refused: u64,
}

impl<K, V> Default for CappedSums<K, V> {
    fn default() -> Self {
        Self { sums: HashMap::new(), of_region: HashMap::new(), refused: 0 }
    }
}

impl<K: Eq + Hash, V: Default> CappedSums<K, V> {
    /// The sum of `key`, or when there are too many of its region that of `rest`.
    fn of(&mut self, region: RegionId, key: K, rest: impl FnOnce() -> K) -> &mut V {
        let known = self.sums.contains_key(&key);
        let of_region = self.of_region.entry(region).or_default();
        let room = *of_region < MAX_OF_REGION && self.sums.len() < MAX_OF_ALL;
        self.refused += u64::from(!known && !room);
        *of_region += usize::from(!known && room);
        self.sums.entry(if known || room { key } else { rest() }).or_default()
    }

    fn take(&mut self) -> HashMap<K, V> {
        self.of_region.clear();
        std::mem::take(&mut self.sums)
    }
}

/// The exceptions and contentions of a window.
#[derive(Default)]
pub struct ExceptionsAndContentions {
    throws: CappedSums<Throw, ExceptionSum>,
    waits: CappedSums<LockWait, LockWaitSum>,
}

impl ExceptionsAndContentions {
    /// An exception that stands for `weight`.
    pub fn thrown(&mut self, throw: Throw, weight: f64) {
        let Throw { place, rethrown, .. } = throw;
        let rest = || Throw { place: rest(place), type_name: None, message: None, rethrown };
        let sum = self.throws.of(place.region, throw, rest);
        sum.count += weight;
        sum.told += 1.0;
    }

    /// A wait for a lock that stands for `weight`.
    pub fn waited(&mut self, wait: LockWait, waited_ns: u64, weight: f64) {
        let rest = || LockWait { place: rest(wait.place), owner: None, held_at: None };
        let sum = self.waits.of(wait.place.region, wait, rest);
        sum.count += weight;
        sum.ns += waited_ns as f64 * weight;
        sum.told += 1.0;
        sum.told_ns += waited_ns as f64;
    }

    /// A window ends: all of it.
    pub fn take(&mut self) -> (HashMap<Throw, ExceptionSum>, HashMap<LockWait, LockWaitSum>) {
        (self.throws.take(), self.waits.take())
    }

    /// Events counted under the rest of their region, because there were too many places.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.throws.refused + self.waits.refused
    }
}

fn rest(place: RuntimeEventSite) -> RuntimeEventSite {
    RuntimeEventSite { tid: 0, name: NameId::default(), stack: StackTable::OVERFLOW, ..place }
}

#[cfg(test)]
mod tests {
    use super::{
        Arc, ExceptionsAndContentions, LockWait, MAX_OF_REGION, NameId, RuntimeEventSite, Throw,
    };
    use perfusion_model::event::RegionId;
    use perfusion_model::stack::{StackId, StackTable};

    fn place(region: u32, tid: u32) -> RuntimeEventSite {
        RuntimeEventSite {
            region: RegionId(region),
            tid,
            name: NameId::default(),
            stack: StackId(5),
        }
    }

    fn wait(region: u32, tid: u32, held_at: Option<u32>) -> LockWait {
        LockWait { place: place(region, tid), owner: Some(3), held_at: held_at.map(StackId) }
    }

    #[test]
    fn the_same_event_at_the_same_place_adds_up() {
        let mut sums = ExceptionsAndContentions::default();
        for (type_name, message, rethrown, weight) in [
            ("A", None, false, 1.0),
            ("A", None, false, 4.0),
            ("A", None, true, 1.0),
            ("B", None, false, 1.0),
            ("B", Some("no"), false, 2.0),
        ] {
            let (type_name, message) = (Some(type_name.into()), message.map(Arc::from));
            sums.thrown(Throw { place: place(1, 2), type_name, message, rethrown }, weight);
        }
        sums.waited(wait(1, 2, Some(7)), 100, 2.0);
        sums.waited(wait(1, 2, Some(7)), 50, 1.0);
        sums.waited(wait(1, 2, None), 20, 1.0);
        let (throws, waits) = sums.take();
        let mut counts: Vec<f64> = throws.into_values().map(|sum| sum.count).collect();
        counts.sort_by(f64::total_cmp);
        assert_eq!(counts, [1.0, 1.0, 2.0, 5.0]);
        let mut waits: Vec<_> =
            waits.into_iter().map(|(of, sum)| (of.held_at, sum.count, sum.ns)).collect();
        waits.sort_by_key(|(held_at, ..)| *held_at);
        assert_eq!(waits, [(None, 1.0, 20.0), (Some(StackId(7)), 3.0, 250.0)]);
        assert_eq!(sums.take().0.len(), 0);
    }

    #[test]
    fn a_region_that_invents_places_takes_its_share_and_no_more() {
        let mut sums = ExceptionsAndContentions::default();
        for tid in 0..MAX_OF_REGION as u32 + 10 {
            sums.waited(wait(1, tid, None), 1, 1.0);
        }
        sums.waited(wait(1, 0, None), 1, 1.0);
        sums.waited(wait(2, 0, None), 1, 1.0);
        assert_eq!(sums.refused(), 10);
        let (_, waits) = sums.take();
        let rest = waits.iter().find(|(wait, _)| wait.place.stack == StackTable::OVERFLOW);
        assert_eq!(rest.map(|(_, waited)| waited.count), Some(10.0));
        assert_eq!(waits.len(), MAX_OF_REGION + 2);
    }
}
