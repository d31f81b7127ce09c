//! Which threads of programs run a collection right now: workstation GC collects on the thread that
//! allocates.

use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, RegionId, ThreadId};

/// Of one process: who stopped the others, who said that a collection begins, and the same as other
/// libraries in it told of it. A process that tells of more keeps the last ones.
const MOST: usize = 8;

struct CollectingThread {
    tid: u32,
    region: RegionId,
    /// Until when, once the collection is over: what the runtime does then is to let the others run
    /// again.
    until: Option<MonotonicNs>,
}

/// All of them, by process.
#[derive(Default)]
pub struct CollectingThreads(HashMap<u32, Vec<CollectingThread>>);

impl CollectingThreads {
    /// `thread` runs a collection.
    pub fn begins(&mut self, thread: ThreadId, region: RegionId) {
        let of = self.0.entry(thread.pid).or_default();
        of.retain(|one| one.tid != thread.tid);
        if of.len() >= MOST {
            of.remove(0);
        }
        of.push(CollectingThread { tid: thread.tid, region, until: None });
    }

    /// The region's collection is over, and by `until` so is what belongs to it.
    pub fn ends(&mut self, pid: u32, region: RegionId, until: MonotonicNs) {
        for one in self.0.get_mut(&pid).into_iter().flatten().filter(|one| one.region == region) {
            one.until = Some(until);
        }
    }

    /// None that the region has told of runs one.
    pub fn none(&mut self, pid: u32, region: RegionId) {
        if let Some(of) = self.0.get_mut(&pid) {
            of.retain(|one| one.region != region);
            if of.is_empty() {
                self.0.remove(&pid);
            }
        }
    }

    /// Whether `thread` ran one at that time.
    #[must_use]
    pub fn contains(&self, thread: ThreadId, at: MonotonicNs) -> bool {
        let of = self.0.get(&thread.pid).into_iter().flatten();
        of.filter(|one| one.tid == thread.tid).any(|one| one.until.is_none_or(|until| at <= until))
    }

    /// Keeps those of these threads and not of these regions.
    pub fn keep(&mut self, is_there: impl Fn(u32) -> bool, is_gone: impl Fn(RegionId) -> bool) {
        self.0.retain(|_, of| {
            of.retain(|one| is_there(one.tid) && !is_gone(one.region));
            !of.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{CollectingThreads, MOST};
    use perfusion_model::event::{MonotonicNs, RegionId, ThreadId};

    #[test]
    fn a_thread_collects_until_its_region_says_otherwise() {
        let (mut collecting, [one, other]) =
            (CollectingThreads::default(), [RegionId(1), RegionId(2)]);
        let [first, second] = [3, 4].map(|tid| ThreadId { pid: 7, tid });
        collecting.begins(first, one);
        collecting.begins(second, other);
        collecting.ends(7, one, MonotonicNs(100));
        let is = |collecting: &CollectingThreads, at| {
            [first, second].map(|thread| collecting.contains(thread, MonotonicNs(at)))
        };
        assert_eq!((is(&collecting, 100), is(&collecting, 101)), ([true, true], [false, true]));
        assert!(!collecting.contains(ThreadId { pid: 8, tid: 4 }, MonotonicNs(1)));
        collecting.none(7, other);
        assert_eq!(is(&collecting, 100), [true, false]);
        collecting.keep(|_| true, |region| region == one);
        assert!(collecting.0.is_empty());
    }

    #[test]
    fn a_process_that_tells_of_many_keeps_the_last() {
        let mut collecting = CollectingThreads::default();
        for tid in 0..1000 {
            collecting.begins(ThreadId { pid: 7, tid }, RegionId(1));
        }
        let all =
            (0..1000).filter(|&tid| collecting.contains(ThreadId { pid: 7, tid }, MonotonicNs(1)));
        assert_eq!(all.collect::<Vec<_>>(), (1000 - MOST as u32..1000).collect::<Vec<_>>());
    }
}
