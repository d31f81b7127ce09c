//! Collections of the garbage collector, and the pauses that are theirs.
//!
//! The runtime stops all managed threads, begins a collection and lets them run again: the pause is
//! that collection's. A background collection makes two pauses, at its beginning and in its middle,
//! and lets the threads run in between. A collection of the young generations that precedes a
//! background one shares its first pause: it has the part until the other begins.

use perfusion_model::event::{MonotonicNs, RegionId, ThreadId};
use std::collections::{HashMap, VecDeque};

/// Collections of a runtime of which more may be told beside the one in the background: those just
/// over, and one that is not.
const RECENT: usize = 8;

/// What a collection is counted by. Words for all the runtime's codes, so their number is bounded
/// whatever a process says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CollectionKind {
    /// The oldest generation it looked at: 0 to 2.
    pub generation: u8,
    /// The reason of the collection.
    pub reason: &'static str,
    /// `blocking`, `background`, or `foreground` for one while another goes on in the background.
    pub kind: &'static str,
}

/// `gc_reason` of gc/gc.h in dotnet/runtime, by number.
const REASONS: [&str; 18] = [
    "alloc_small",
    "induced",
    "low_memory",
    "empty",
    "alloc_large",
    "out_of_space_small",
    "out_of_space_large",
    "induced_not_forced",
    "stress",
    "low_memory_blocking",
    "induced_compacting",
    "low_memory_host",
    "provisional_full",
    "low_memory_host_blocking",
    "background_tuning_small",
    "background_tuning_large",
    "background_stepping",
    "induced_aggressive",
];

/// Why a collection was made, of the runtime's code.
#[must_use]
pub fn reason_name(code: u8) -> Option<&'static str> {
    REASONS.get(usize::from(code)).copied()
}

impl CollectionKind {
    /// From the runtime's codes: `GCStart`'s Depth, Reason and Type (`gc_etw_type` of
    /// gc/gcinterface.h in dotnet/runtime).
    #[must_use]
    pub fn of(generation: u8, reason: u8, kind: u8) -> Self {
        let reason = reason_name(reason).unwrap_or("other");
        let kind = match kind {
            0 => "blocking",
            1 => "background",
            2 => "foreground",
            _ => "other",
        };
        Self { generation: generation.min(2), reason, kind }
    }
}

/// The sums of all collections of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectionSum {
    /// The number of collections that began.
    pub count: u64,
    /// Their pauses together, nanoseconds.
    pub pause_ns: u64,
    /// The longest one.
    pub longest_ns: u64,
    /// Bytes that survived them, in the generations they collected.
    pub promoted: u64,
}

/// A collection that began.
#[derive(Clone, Copy)]
struct StartedCollection {
    number: u32,
    kind: CollectionKind,
    counted: bool,
}

/// All managed threads stand still.
#[derive(Clone, Copy)]
struct Pause {
    by: ThreadId,
    /// The moment when the present collection's part begins.
    part: MonotonicNs,
    /// The one that began in it last.
    collection: Option<u32>,
    /// A window ended meanwhile.
    cut: bool,
}

#[derive(Default)]
struct RuntimePauses {
    pause: Option<Pause>,
    /// A foreign suspension goes on: not for a collection.
    foreign: bool,
    /// The one in the background: any number of others may begin before its second pause.
    background: Option<StartedCollection>,
    recent: VecDeque<StartedCollection>,
}

impl RuntimePauses {
    fn remember(&mut self, collection: StartedCollection) {
        if self.recent.len() >= RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(collection);
    }

    fn collection(&mut self, number: u32) -> Option<&mut StartedCollection> {
        let background = self.background.as_mut().filter(|each| each.number == number);
        background.or_else(|| self.recent.iter_mut().rfind(|each| each.number == number))
    }
}

/// Sums by runtime and kind; `None` for pauses without a collection.
pub type CollectionSums = HashMap<(RegionId, Option<CollectionKind>), CollectionSum>;

/// Collections and pauses of all runtimes.
#[derive(Default)]
pub struct GarbageCollections {
    runtimes: HashMap<RegionId, RuntimePauses>,
    sums: CollectionSums,
    unmatched: u64,
}

impl GarbageCollections {
    /// `by` begins to stop all managed threads for a collection. Answers who had stopped them
    /// before, if that never ended.
    pub fn pause_begins(
        &mut self,
        region: RegionId,
        by: ThreadId,
        at: MonotonicNs,
    ) -> Option<ThreadId> {
        let runtime = self.runtimes.entry(region).or_default();
        runtime.foreign = false;
        let pause = Pause { by, part: at, collection: None, cut: false };
        let before = runtime.pause.replace(pause);
        self.unmatched += u64::from(before.is_some());
        before.map(|pause| pause.by)
    }

    /// Managed threads begin to be stopped for something else: what is told of the end is not about
    /// a collection.
    pub fn foreign_pause_begins(&mut self, region: RegionId) {
        self.runtimes.entry(region).or_default().foreign = true;
    }

    /// Whether the threads stand still for something else.
    #[must_use]
    pub fn is_in_foreign_pause(&self, region: RegionId) -> bool {
        self.runtimes.get(&region).is_some_and(|runtime| runtime.foreign)
    }

    /// A collection begins.
    pub fn begins(&mut self, region: RegionId, number: u32, kind: CollectionKind, at: MonotonicNs) {
        let runtime = self.runtimes.entry(region).or_default();
        let collection = StartedCollection { number, kind, counted: false };
        let over = match kind.kind {
            "background" => runtime.background.replace(collection),
            _ => Some(collection),
        };
        if let Some(collection) = over {
            runtime.remember(collection);
        }
        match &mut runtime.pause {
            Some(pause) => {
                let part = (pause.part, pause.collection.replace(number));
                if let (from, Some(before)) = part {
                    pause.part = at;
                    self.add(region, Some(before), at.0.saturating_sub(from.0));
                }
            }
            None => self.unmatched += 1,
        }
    }

    /// A collection is over.
    pub fn ends(&mut self, region: RegionId, number: u32) {
        if let Some(runtime) = self.runtimes.get_mut(&region)
            && let Some(collection) = runtime.background.take_if(|each| each.number == number)
        {
            // What it left is told next.
            runtime.remember(collection);
        }
    }

    /// So much survived a collection.
    pub fn left(&mut self, region: RegionId, number: u32, promoted: u64) {
        let Some(runtime) = self.runtimes.get_mut(&region) else { return };
        if let Some(collection) = runtime.collection(number) {
            let sum = self.sums.entry((region, Some(collection.kind))).or_default();
            sum.promoted = sum.promoted.saturating_add(promoted);
        }
    }

    /// All managed threads run again.
    pub fn pause_ends(&mut self, region: RegionId, at: MonotonicNs) {
        let Some(runtime) = self.runtimes.get_mut(&region) else { return };
        if std::mem::take(&mut runtime.foreign) {
            return;
        }
        let Some(pause) = runtime.pause.take() else {
            self.unmatched += 1;
            return;
        };
        let whose = pause.collection.or(runtime.background.map(|each| each.number));
        self.add(region, whose, at.0.saturating_sub(pause.part.0));
    }

    /// A pause of a collection, or its part of one.
    fn add(&mut self, region: RegionId, number: Option<u32>, pause_ns: u64) {
        let runtime = self.runtimes.get_mut(&region).zip(number);
        let known = runtime.and_then(|(runtime, number)| runtime.collection(number));
        let kind = known.as_ref().map(|collection| collection.kind);
        let first =
            known.is_some_and(|collection| !std::mem::replace(&mut collection.counted, true));
        let sum = self.sums.entry((region, kind)).or_default();
        sum.count += u64::from(first);
        sum.pause_ns = sum.pause_ns.saturating_add(pause_ns);
        sum.longest_ns = sum.longest_ns.max(pause_ns);
    }

    /// Runtimes whose managed threads stand still.
    pub fn paused(&self) -> impl Iterator<Item = RegionId> {
        self.runtimes
            .iter()
            .filter(|(_, runtime)| runtime.pause.is_some())
            .map(|(region, _)| *region)
    }

    /// Whether a pause goes on that began in this window.
    #[must_use]
    pub fn is_in_whole_pause(&self, region: RegionId) -> bool {
        let pause = self.runtimes.get(&region).and_then(|runtime| runtime.pause.as_ref());
        pause.is_some_and(|pause| !pause.cut)
    }

    /// A window ends: its sums, and who stops others over its end. What a collection left whose
    /// pauses were in the window before goes to the next pauses of its kind: a sum is told beside
    /// pauses.
    pub fn cut(&mut self) -> (CollectionSums, Vec<ThreadId>) {
        let pauses = self.runtimes.values_mut().filter_map(|runtime| runtime.pause.as_mut());
        let stopping = pauses.map(|pause| {
            pause.cut = true;
            pause.by
        });
        let stopping = stopping.collect();
        let runtimes = &self.runtimes;
        let without_pause = self
            .sums
            .extract_if(|(region, _), sum| sum.pause_ns == 0 && runtimes.contains_key(region));
        let later = without_pause.collect();
        (std::mem::replace(&mut self.sums, later), stopping)
    }

    /// The runtime is gone.
    pub fn region_gone(&mut self, region: RegionId) {
        self.runtimes.remove(&region);
    }

    /// Pauses and collections of which only the beginning or only the end was told.
    #[must_use]
    pub fn unmatched(&self) -> u64 {
        self.unmatched
    }
}

#[cfg(test)]
mod tests {
    use super::{CollectionKind, CollectionSum, GarbageCollections};
    use perfusion_model::event::{MonotonicNs, RegionId, ThreadId};

    const R: RegionId = RegionId(3);
    const T: ThreadId = ThreadId { pid: 7, tid: 8 };

    fn at(ns: u64) -> MonotonicNs {
        MonotonicNs(ns)
    }

    fn sum(count: u64, pause_ns: u64, longest_ns: u64, promoted: u64) -> CollectionSum {
        CollectionSum { count, pause_ns, longest_ns, promoted }
    }

    #[test]
    fn a_blocking_collection_has_its_pause_and_what_it_left() {
        let (mut collections, kind) = (GarbageCollections::default(), CollectionKind::of(1, 0, 0));
        for (number, length) in [(1, 50), (2, 20)] {
            assert_eq!(collections.pause_begins(R, T, at(100)), None);
            collections.begins(R, number, kind, at(110));
            collections.ends(R, number);
            collections.left(R, number, 1_000);
            assert_eq!(collections.paused().collect::<Vec<_>>(), [R]);
            collections.pause_ends(R, at(100 + length));
        }
        let (sums, _) = collections.cut();
        assert_eq!(sums, [((R, Some(kind)), sum(2, 70, 50, 2_000))].into());
        assert_eq!(
            (kind.reason, kind.kind, collections.unmatched()),
            ("alloc_small", "blocking", 0)
        );
    }

    #[test]
    fn a_background_collection_has_two_pauses_and_shares_the_first_one() {
        let mut collections = GarbageCollections::default();
        let (young, background, during) =
            (CollectionKind::of(1, 1, 0), CollectionKind::of(2, 1, 1), CollectionKind::of(0, 0, 2));
        collections.pause_begins(R, T, at(100));
        collections.begins(R, 5, young, at(101));
        collections.ends(R, 5);
        collections.left(R, 5, 7);
        collections.begins(R, 6, background, at(130));
        collections.pause_ends(R, at(150));
        collections.pause_begins(R, T, at(200));
        collections.begins(R, 7, during, at(201));
        collections.ends(R, 7);
        collections.pause_ends(R, at(205));
        collections.pause_begins(R, T, at(300));
        collections.pause_ends(R, at(340));
        collections.ends(R, 6);
        collections.left(R, 6, 900);
        let expected = [
            ((R, Some(young)), sum(1, 30, 30, 7)),
            ((R, Some(background)), sum(1, 60, 40, 900)),
            ((R, Some(during)), sum(1, 5, 5, 0)),
        ];
        assert_eq!(collections.cut().0, expected.into());
        collections.pause_begins(R, T, at(400));
        collections.pause_ends(R, at(410));
        assert_eq!(collections.cut().0, [((R, None), sum(0, 10, 10, 0))].into(), "it is nobody's");
    }

    #[test]
    fn a_background_collection_is_known_however_many_others_there_are_meanwhile() {
        let mut collections = GarbageCollections::default();
        let (background, during) = (CollectionKind::of(2, 0, 1), CollectionKind::of(0, 0, 2));
        collections.pause_begins(R, T, at(100));
        collections.begins(R, 6, background, at(101));
        collections.pause_ends(R, at(120));
        for number in 7..27 {
            collections.pause_begins(R, T, at(200));
            collections.begins(R, number, during, at(200));
            collections.ends(R, number);
            collections.pause_ends(R, at(201));
        }
        collections.pause_begins(R, T, at(300));
        collections.pause_ends(R, at(340));
        collections.ends(R, 6);
        collections.left(R, 6, 900);
        let expected =
            [((R, Some(background)), sum(1, 60, 40, 900)), ((R, Some(during)), sum(20, 20, 1, 0))];
        assert_eq!(collections.cut().0, expected.into());
    }

    #[test]
    fn what_a_collection_left_after_its_pauses_window_is_told_beside_the_next_pause() {
        let (mut collections, background) =
            (GarbageCollections::default(), CollectionKind::of(2, 0, 1));
        for number in [1, 2] {
            collections.pause_begins(R, T, at(100));
            collections.begins(R, number, background, at(100));
            collections.pause_ends(R, at(110));
            let promoted = u64::from(number - 1) * 900;
            assert_eq!(
                collections.cut().0,
                [((R, Some(background)), sum(1, 10, 10, promoted))].into()
            );
            collections.ends(R, number);
            collections.left(R, number, 900);
            assert_eq!(collections.cut().0, [].into());
        }
        collections.region_gone(R);
        assert_eq!(collections.cut().0.len(), 1, "nothing is kept of who is gone");
        assert_eq!(collections.cut().0.len(), 0);
    }

    #[test]
    fn a_pause_for_something_else_is_none_and_no_loss() {
        let (mut collections, kind) = (GarbageCollections::default(), CollectionKind::of(0, 0, 0));
        collections.foreign_pause_begins(R);
        assert!(collections.is_in_foreign_pause(R));
        collections.pause_ends(R, at(10));
        assert!(!collections.is_in_foreign_pause(R));
        // Its end was lost.
        collections.foreign_pause_begins(R);
        collections.pause_begins(R, T, at(20));
        collections.begins(R, 1, kind, at(21));
        assert!(!collections.is_in_foreign_pause(R) && collections.is_in_whole_pause(R));
        collections.pause_ends(R, at(25));
        assert_eq!(collections.unmatched(), 0);
        assert_eq!(collections.cut().0, [((R, Some(kind)), sum(1, 5, 5, 0))].into());
    }

    #[test]
    fn what_was_lost_is_counted_and_a_pause_over_a_cut_is_no_whole_one() {
        let mut collections = GarbageCollections::default();
        collections.pause_ends(R, at(5));
        collections.pause_begins(R, T, at(10));
        collections.pause_ends(R, at(12));
        collections.pause_ends(R, at(15));
        collections.pause_begins(R, T, at(20));
        assert!(collections.is_in_whole_pause(R));
        assert_eq!(collections.pause_begins(R, T, at(30)), Some(T));
        assert_eq!(collections.cut().1, [T]);
        assert!(!collections.is_in_whole_pause(R));
        collections.begins(R, 1, CollectionKind::of(9, 99, 99), at(31));
        collections.pause_ends(R, at(40));
        let lasting = collections.cut();
        assert_eq!((lasting.0.len(), lasting.1.len(), collections.unmatched()), (1, 0, 2));
        collections.begins(R, 2, CollectionKind::of(0, 0, 0), at(50));
        assert_eq!(collections.unmatched(), 3);
        collections.region_gone(R);
        assert!(!collections.is_in_whole_pause(R));
    }
}
