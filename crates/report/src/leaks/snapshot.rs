//! What was alive at one moment, by process, type and allocation stack: read from a profile.

use crate::stacks::{CodeKind, ProfileStacks};
use perfusion_aggregate::heap::{SAMPLED_BYTE_PROBABILITY, has_survived};
use perfusion_model::labels::HANDLE;
use perfusion_model::text::clean;
use perfusion_pprof::INUSE_NOT_AVAILABLE;
use perfusion_pprof::loss;
use perfusion_pprof::proto::{Profile, Sample};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A process: its pid and name.
pub type NamedPid = (i64, String);

/// Frames of a stack that are kept, innermost first: enough to tell places apart and to recognise
/// one.
const FRAMES: usize = 32;

/// An async method that goes on after it has waited: who does that for it is chance, and the place
/// is the same.
fn is_resumption(frame: &str) -> bool {
    frame.contains("StateMachineBox<")
}

/// The place where objects come from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationSite {
    /// The process.
    pub pid: i64,
    /// Its name.
    pub process: String,
    /// The type, and in brackets its module, where the process has another type of that name.
    pub type_name: String,
    /// The functions that allocated them, innermost first, as far as an async method that went on
    /// after it had waited.
    pub stack: Vec<String>,
}

/// Objects of one place that are alike in age and fate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AgeCell {
    /// Their age, rounded down to a power of two, seconds; 0 below 1.
    pub age_s: f64,
    /// The number of objects that were seen.
    pub seen: f64,
    /// The number that these stand for.
    pub objects: f64,
    /// Their bytes.
    pub bytes: f64,
    /// Bytes of one of those that were seen; 0 when that is not known.
    pub size: f64,
    /// A collection is known to have looked at them and left them alive.
    pub survived: bool,
    /// They have been in the oldest generation during at least one full collection: alive for sure,
    /// not only not collected yet.
    pub proven: bool,
}

/// All that is alive of one place.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LiveGroup {
    /// Its parts.
    pub cells: Vec<AgeCell>,
    /// Sampled by a fixed stride: figures may be biased, and have no interval.
    pub stride: bool,
}

/// Everything at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The moment, in seconds since the epoch.
    pub at_s: f64,
    /// How long allocations had been listened to by then at the least, seconds.
    pub length_s: f64,
    /// The processes that were recorded.
    pub processes: HashSet<NamedPid>,
    /// Since when live objects of a process have been watched without a break, seconds since the
    /// epoch, where something is alive.
    pub watched_since_s: HashMap<NamedPid, f64>,
    /// Until when what was old by then is proven to be alive, where something is: the last full
    /// collection but one began.
    pub proven_at_s: HashMap<NamedPid, f64>,
    /// The living objects by site.
    pub groups: HashMap<Arc<AllocationSite>, LiveGroup>,
    /// What of allocations and live objects is known to be missing, as the profile's loss line says
    /// it.
    pub losses: Vec<String>,
    /// Why there may be live objects that cannot be told of at all, as the profile's comments say
    /// it.
    pub lacks: Vec<String>,
}

/// Places, each kept once however many moments have it.
#[derive(Debug, Default)]
pub struct AllocationSites(HashSet<Arc<AllocationSite>>);

impl AllocationSites {
    fn one(&mut self, place: AllocationSite) -> Arc<AllocationSite> {
        if let Some(known) = self.0.get(&place) {
            return Arc::clone(known);
        }
        let place = Arc::new(place);
        self.0.insert(Arc::clone(&place));
        place
    }
}

impl AgeCell {
    /// The age above which none of them is, seconds.
    fn below_s(self) -> f64 {
        if self.age_s < 1.0 { 1.0 } else { self.age_s * 2.0 }
    }

    /// The share of them that is older than `age_s`, as if ages were evenly spread over the cell.
    #[must_use]
    pub(crate) fn share_older(self, age_s: f64) -> f64 {
        let (low, high) = (self.age_s, self.below_s());
        ((high - age_s) / (high - low)).clamp(0.0, 1.0)
    }

    /// The most that may be.
    #[must_use]
    pub(crate) fn share_perhaps_older(self, age_s: f64) -> f64 {
        f64::from(u8::from(self.below_s() > age_s))
    }

    /// The fewest that are.
    #[must_use]
    pub(crate) fn share_surely_older(self, age_s: f64) -> f64 {
        f64::from(u8::from(self.age_s >= age_s))
    }

    /// Of the objects that they stand for, how many the runtime tells of: as many as would be seen
    /// if all of those were watched. It does not depend on their size, of which each of few objects
    /// may have another. By bytes: the number of objects is rounded in the file, and one that
    /// stands for 1.5 is there as 1 or 2.
    fn told(self) -> f64 {
        let size = if self.size > 0.0 { self.size } else { self.bytes / self.objects.max(1.0) };
        if size > 0.0 {
            -self.bytes / size * (-size * SAMPLED_BYTE_PROBABILITY).exp_m1()
        } else {
            self.seen
        }
    }
}

impl LiveGroup {
    fn sum(&self, of: impl Fn(&AgeCell) -> f64) -> f64 {
        self.cells.iter().map(of).fold(0.0, |sum, value| sum + value)
    }

    /// Objects that were seen.
    #[must_use]
    pub fn seen(&self) -> f64 {
        self.sum(|cell| cell.seen)
    }

    /// Of what is alive, as many as the runtime told of.
    #[must_use]
    pub fn told(&self) -> f64 {
        self.sum(|cell| cell.told())
    }

    /// How many of those one that is seen stands for; `None` of nothing.
    #[must_use]
    pub fn stands_for(&self) -> Option<f64> {
        let seen = self.seen();
        (seen > 0.0).then(|| self.told() / seen)
    }

    /// Objects.
    #[must_use]
    pub fn objects(&self) -> f64 {
        self.sum(|cell| cell.objects)
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        self.sum(|cell| cell.bytes)
    }

    fn only(&self, which: impl Fn(&AgeCell) -> bool) -> Self {
        Self { cells: self.cells.iter().copied().filter(which).collect(), stride: self.stride }
    }

    /// Only what a collection is known to have left alive.
    #[must_use]
    pub fn survivors(&self) -> Self {
        self.only(|cell| cell.survived)
    }

    /// Only what is proven to be alive.
    #[must_use]
    pub fn proven(&self) -> Self {
        self.only(|cell| cell.proven)
    }

    /// As [`LiveGroup::told`] of what is older than `age_s`, by this share of alike objects.
    #[must_use]
    pub(crate) fn told_older(&self, age_s: f64, older: fn(AgeCell, f64) -> f64) -> f64 {
        self.sum(|cell| cell.told() * older(*cell, age_s))
    }

    /// As [`LiveGroup::stands_for`] of these.
    #[must_use]
    pub(crate) fn stands_for_older(
        &self,
        age_s: f64,
        older: fn(AgeCell, f64) -> f64,
    ) -> Option<f64> {
        let seen = self.seen_older(age_s, older);
        (seen > 0.0).then(|| self.told_older(age_s, older) / seen)
    }

    /// Of what was seen, how many are older than `age_s`, by this share of alike objects.
    fn seen_older(&self, age_s: f64, older: fn(AgeCell, f64) -> f64) -> f64 {
        self.sum(|cell| cell.seen * older(*cell, age_s))
    }

    /// The oldest age, rounded down to a power of two, seconds.
    #[must_use]
    pub(crate) fn oldest_s(&self) -> f64 {
        self.cells.iter().map(|cell| cell.age_s).fold(0.0, f64::max)
    }

    /// An age that half of the objects have reached for sure, seconds: the highest power of two, or
    /// 0.
    #[must_use]
    pub(crate) fn half_at_least_s(&self) -> f64 {
        let half = self.objects() / 2.0;
        let reached = |age_s: f64| {
            self.sum(|cell| if cell.age_s >= age_s { cell.objects } else { 0.0 }) >= half
        };
        self.cells.iter().map(|cell| cell.age_s).filter(|age_s| reached(*age_s)).fold(0.0, f64::max)
    }
}

fn place(stacks: &ProfileStacks<'_>, sample: &Sample) -> AllocationSite {
    let text = |key| clean(stacks.label(sample, key).unwrap_or_default()).into_owned();
    let type_name = match stacks.label(sample, "type_module") {
        Some(module) => format!("{} ({})", text("type"), clean(module)),
        None => text("type"),
    };
    let frames = stacks.readable_frames(sample).filter(|frame| frame.kind != CodeKind::Kernel);
    let frames =
        frames.map(|frame| frame.name.into_owned()).take_while(|name| !is_resumption(name));
    AllocationSite {
        pid: stacks.number(sample, "pid").unwrap_or(0),
        process: text("process"),
        type_name,
        stack: frames.take(FRAMES).collect(),
    }
}

/// The weak handles that watch the objects of each place, where a profile tells them apart by
/// these.
#[must_use]
pub fn handles(profile: &Profile) -> HashMap<AllocationSite, Vec<u64>> {
    let stacks = ProfileStacks::new(profile);
    let mut handles: HashMap<AllocationSite, Vec<u64>> = HashMap::new();
    for sample in stacks.samples() {
        if let Some(handle) = stacks.number(sample, HANDLE) {
            handles.entry(place(&stacks, sample)).or_default().push(handle.cast_unsigned());
        }
    }
    handles
}

impl Snapshot {
    /// What was alive at the end of a profile.
    #[must_use]
    pub fn read(profile: &Profile, places: &mut AllocationSites) -> Self {
        let stacks = ProfileStacks::new(profile);
        let mut groups: HashMap<Arc<AllocationSite>, LiveGroup> = HashMap::new();
        let mut processes = HashSet::new();
        let at_s = profile.time_nanos.saturating_add(profile.duration_nanos) as f64 / 1e9;
        let mut watched_since_s: HashMap<NamedPid, f64> = HashMap::new();
        let mut proven_at_s: HashMap<NamedPid, f64> = HashMap::new();
        for sample in stacks.samples() {
            if let (Some(pid), name) =
                (stacks.number(sample, "pid"), stacks.label(sample, "process"))
            {
                processes.insert((pid, clean(name.unwrap_or_default()).into_owned()));
            }
        }
        let columns = (stacks.sample_type("inuse_objects"), stacks.sample_type("inuse_space"));
        if let (Ok(objects_at), Ok(bytes_at)) = columns {
            for sample in stacks.samples() {
                let value = |at: usize| sample.value.get(at).copied().unwrap_or(0) as f64;
                let (objects, bytes) = (value(objects_at), value(bytes_at));
                if objects <= 0.0 && bytes <= 0.0 {
                    continue;
                }
                let number = |key| stacks.number(sample, key).unwrap_or(0);
                let place = place(&stacks, sample);
                if let Some(watched_ms) = stacks.number(sample, "watched_for") {
                    // Of several libraries in a process, the last that began.
                    let since = at_s - watched_ms as f64 / 1e3;
                    let latest =
                        watched_since_s.entry((place.pid, place.process.clone())).or_insert(since);
                    *latest = latest.max(since);
                }
                if let Some(proven_ms) = stacks.number(sample, "proven_before") {
                    proven_at_s
                        .insert((place.pid, place.process.clone()), at_s - proven_ms as f64 / 1e3);
                }
                let seen = number("sampled_objects").max(1) as f64;
                let group = groups.entry(places.one(place)).or_default();
                group.stride |= stacks.label(sample, "sampling") == Some("stride");
                group.cells.push(AgeCell {
                    age_s: number("age_seconds").max(0) as f64,
                    seen,
                    objects,
                    bytes,
                    size: number("sampled_bytes").max(0) as f64 / seen,
                    survived: has_survived(number("generation"), number("gcs_survived")),
                    proven: is_proven(
                        number("generation"),
                        number("gcs_survived"),
                        stacks.number(sample, "full_gcs_survived"),
                    ),
                });
            }
        }
        let of_objects =
            |line: String| loss::of_objects(&line).map(str::to_owned).collect::<Vec<_>>();
        let losses = stacks.losses().flat_map(of_objects).collect();
        let without = stacks.comments().filter(|comment| comment.starts_with(INUSE_NOT_AVAILABLE));
        let lacks = stacks.partly_recorded("inuse_objects").chain(without);
        Self {
            at_s,
            length_s: profile.duration_nanos as f64 / 1e9,
            processes,
            watched_since_s,
            proven_at_s,
            groups,
            losses,
            lacks: lacks.map(Cow::into_owned).collect(),
        }
    }
}

/// Of the full collections since an object is old the last may be going on still. Older profiles do
/// not tell their number: an object of generation 2 was looked at twice on its way there, if it was
/// never made young again, and since then by full collections only; a large or pinned one by full
/// collections from the first. `survived` is rounded down to a power of two.
fn is_proven(generation: i64, survived: i64, full: Option<i64>) -> bool {
    if let Some(full) = full {
        return generation >= 2 && full >= 2;
    }
    match generation {
        2 => survived >= 4,
        3.. => has_survived(generation, survived),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{AgeCell, LiveGroup, is_proven};

    fn group(cells: &[(f64, f64)]) -> LiveGroup {
        let cell = |&(age_s, seen): &(f64, f64)| AgeCell {
            age_s,
            seen,
            objects: seen * 10.0,
            bytes: seen * 1e4,
            survived: true,
            proven: true,
            size: 0.0,
        };
        LiveGroup { cells: cells.iter().map(cell).collect(), stride: false }
    }

    #[test]
    fn ages_are_read_out_of_powers_of_two() {
        let group = group(&[(0.0, 4.0), (8.0, 8.0), (16.0, 4.0)]);
        assert_eq!((group.seen(), group.objects(), group.bytes()), (16.0, 160.0, 160_000.0));
        assert_eq!(group.oldest_s(), 16.0);
        assert_eq!(
            [0.5, 1.0, 8.0, 12.0, 24.0, 32.0, 99.0]
                .map(|s| group.seen_older(s, AgeCell::share_older)),
            [14.0, 12.0, 12.0, 8.0, 2.0, 0.0, 0.0]
        );
        assert_eq!(group.half_at_least_s(), 8.0);
        assert_eq!(LiveGroup::default().half_at_least_s(), 0.0);
    }

    #[test]
    fn how_many_were_told_of_does_not_depend_on_rounded_numbers_of_objects() {
        let cell = |objects| AgeCell {
            seen: 1.0,
            objects,
            bytes: 65_536.0 * 2.116,
            size: 65_536.0,
            ..AgeCell::default()
        };
        let told = |objects| LiveGroup { cells: vec![cell(objects)], stride: false }.told();
        assert!((told(2.0) - 1.0).abs() < 0.01 && told(2.0) == told(3.0), "{}", told(2.0));
    }

    #[test]
    fn cells_of_one_age_are_one_and_no_age_is_made_up_in_between() {
        // Generations and sites are cells of their own: 46 and 48 s were said of the first two, by
        // their order.
        for (cells, half_s) in [
            (&[(32.0, 1.0), (32.0, 9.0)][..], 32.0),
            (&[(32.0, 9.0), (32.0, 1.0)], 32.0),
            (&[(64.0, 3.0), (32.0, 4.0), (64.0, 2.0), (0.0, 1.0)], 64.0),
            (&[(64.0, 4.0), (32.0, 3.0), (0.0, 3.0)], 32.0),
            (&[(64.0, 4.0), (0.0, 6.0)], 0.0),
        ] {
            let group = group(cells);
            assert_eq!(group.half_at_least_s(), half_s, "{cells:?}");
            assert!(
                group.seen_older(half_s, AgeCell::share_older) >= group.seen() / 2.0,
                "{cells:?}"
            );
        }
    }

    #[test]
    fn only_a_full_collection_proves_life() {
        for (generation, survived, proven) in
            [(0, 9, false), (1, 9, false), (2, 2, false), (2, 4, true), (3, 1, false), (3, 2, true)]
        {
            assert_eq!(is_proven(generation, survived, None), proven, "{generation} {survived}");
        }
        // It was young for long.
        assert!(
            !is_proven(2, 64, Some(1)) && is_proven(2, 64, Some(2)) && is_proven(4, 2, Some(2))
        );
        assert!(!is_proven(1, 64, Some(2)));
    }
}
