//! The probes' rules, written from here. They are a cache: whatever is missing, the unwinder does.
//!
//! Places and rules are arrays of the probes that are mapped here, and nobody else writes entries
//! (`ebpf_common::rule`). A rule is in its array once, counted by the places that name it. When
//! none does its room is given to another one, but not before whoever has just read a place must be
//! done with it.
//!
//! The probes also keep which rules a thread's last walk used (`ebpf_common::last_walk`). They are
//! told by a number of the address space that an entry of it is gone or another one.

use super::maps::MappedWords;
use aya::maps::{HashMap as BpfHashMap, MapData, MapError};
use ebpf_common::last_walk::GENERATIONS;
use ebpf_common::rule::{CachedPlace, PlaceSet, RuleKey, Spot, TAG_USED, UnwindRule, WAYS};
use perfusion_host::process::RuleUpdate;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a rule that no place names is left alone. A probe reads it within a microsecond of its
/// place, unless its CPU is taken from it meanwhile.
const REST: Duration = Duration::from_secs(2);

/// Words of an entry of either array.
const PLACE_WORDS: usize = size_of::<CachedPlace>() / 8;
const RULE_WORDS: usize = size_of::<UnwindRule>() / 8;

type RuleWords = [u64; RULE_WORDS];

/// The maps `PLACES`, `RULES`, `GENERATIONS` and `SPACES`.
#[derive(Debug)]
pub struct RuleCache {
    places: CachedPlaces,
    spaces: BpfHashMap<MapData, u32, u32>,
    refused: u64,
    /// Held for as long as they are mapped, so that they are among this process's maps for whoever
    /// counts their memory.
    _maps: [MapData; 3],
}

impl RuleCache {
    /// `arrays`: places, rules and generations.
    pub(super) fn new(
        arrays: [MapData; 3],
        spaces: BpfHashMap<MapData, u32, u32>,
    ) -> io::Result<Self> {
        let entries = |map: &MapData| {
            let info = map.info().map_err(io::Error::other)?;
            usize::try_from(info.max_entries()).map_err(io::Error::other)
        };
        let [places, rules, generations] = &arrays;
        let places = CachedPlaces::new(
            MappedWords::map(places.fd(), entries(places)? * WAYS * PLACE_WORDS)?,
            MappedWords::map(rules.fd(), entries(rules)? * RULE_WORDS)?,
            MappedWords::map(generations.fd(), entries(generations)?)?,
        );
        Ok(Self { places, spaces, refused: 0, _maps: arrays })
    }

    /// Brings what updates say of rules to the probes, in order.
    pub fn push_rules(&mut self, updates: impl IntoIterator<Item = RuleUpdate>) {
        for update in updates {
            let is_pushed = match update {
                RuleUpdate::Rule { key, rule } => self.places.push_rules(key, &rule),
                RuleUpdate::Space { pid, space } => self.spaces.insert(pid, space, 0).is_ok(),
                RuleUpdate::Forget { key } => {
                    self.places.forget(key);
                    true
                }
                RuleUpdate::NoSpace { pid } => gone(self.spaces.remove(&pid)),
                // In a map of its own (`spans`).
                RuleUpdate::Spans { .. } | RuleUpdate::NoSpans { .. } => true,
            };
            self.refused += u64::from(!is_pushed);
        }
    }

    /// Updates the maps had no room for.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

/// An entry that has left by itself is as good as removed.
pub(super) fn gone(removed: Result<(), MapError>) -> bool {
    match removed {
        Err(MapError::SyscallError(error)) => error.io_error.kind() == io::ErrorKind::NotFound,
        Err(MapError::KeyNotFound) | Ok(()) => true,
        Err(_) => false,
    }
}

/// What the probes know: which rule holds where.
#[derive(Debug)]
struct CachedPlaces {
    sets: MappedWords,
    rules: MappedWords,
    /// How often entries of an address space went or changed.
    generations: MappedWords,
    shift: u32,
    /// The rules that are in their array, by what they are.
    indexes: HashMap<RuleWords, u16, foldhash::fast::RandomState>,
    /// How many places name each, and since when none does.
    uses: Vec<RuleUses>,
    /// Those no place names, or named none when they were put here, each once; about in the order
    /// in which that began.
    unused: VecDeque<u16>,
    /// Which entry of a set is looked at first for one that can go.
    hand: usize,
}

#[derive(Clone, Copy, Debug)]
struct RuleUses {
    count: u32,
    ended: Instant,
    /// It is among the `unused`.
    queued: bool,
}

impl CachedPlaces {
    /// `sets` hold a power of two of sets, at least 2.
    fn new(sets: MappedWords, rules: MappedWords, generations: MappedWords) -> Self {
        let count = sets.all().len() / (WAYS * PLACE_WORDS);
        let shift = u64::BITS - count.max(2).ilog2();
        Self {
            sets,
            rules,
            generations,
            shift,
            indexes: HashMap::default(),
            uses: Vec::new(),
            unused: VecDeque::new(),
            hand: 0,
        }
    }

    /// False when there is no room for the rule.
    fn push_rules(&mut self, key: RuleKey, rule: &UnwindRule) -> bool {
        let spot = Spot::of(key.place, key.space, self.shift);
        let Some(index) = self.index_of(rule) else {
            // Somebody has all the rules there can be. They become free as their places go.
            if let Some((way, old)) = self.victim(spot, false) {
                self.clear(spot, way, old);
            }
            return false;
        };
        let known = self.find(key.place, spot);
        let Some((way, old)) = known.or_else(|| self.victim(spot, true)) else { return false };
        let Some([place, tag]) = entry(&self.sets, spot, way) else { return false };
        if let Some(uses) = self.uses.get_mut(usize::from(index)) {
            uses.count += 1;
        }
        let mut new = spot.tag_with(index);
        if known.is_some() {
            // The same place: probes find the old rule or the new one.
            new |= old & TAG_USED;
        } else {
            // Nobody's while it becomes another place's.
            tag.store(0, Ordering::Relaxed);
            place.store(key.place, Ordering::Release);
        }
        tag.store(new, Ordering::Release);
        if known.is_some() && old & !TAG_USED == new & !TAG_USED {
            self.end_use(index);
        } else {
            self.release(old);
        }
        true
    }

    fn forget(&mut self, key: RuleKey) {
        let spot = Spot::of(key.place, key.space, self.shift);
        if let Some((way, old)) = self.find(key.place, spot) {
            self.clear(spot, way, old);
        }
    }

    fn clear(&mut self, spot: Spot, way: usize, old: u64) {
        if let Some([_, tag]) = entry(&self.sets, spot, way) {
            tag.store(0, Ordering::Relaxed);
            self.release(old);
        }
    }

    /// The entry of a place, and its tag.
    fn find(&self, place: u64, spot: Spot) -> Option<(usize, u64)> {
        (0..WAYS).find_map(|way| {
            let [known, tag] = entry(&self.sets, spot, way)?;
            let tag = tag.load(Ordering::Relaxed);
            (known.load(Ordering::Relaxed) == place && spot.rule(tag).is_some())
                .then_some((way, tag))
        })
    }

    /// The entry that makes room in a set, and its tag: one that is empty, if that will do, or that
    /// no probe has used since all had been, in turn.
    fn victim(&mut self, spot: Spot, empty: bool) -> Option<(usize, u64)> {
        self.hand = self.hand.wrapping_add(1);
        let tags: Vec<(usize, u64)> = (0..WAYS)
            .map(|way| (self.hand.wrapping_add(way)) % WAYS)
            .filter_map(|way| Some((way, entry(&self.sets, spot, way)?[1].load(Ordering::Relaxed))))
            .filter(|(_, tag)| empty || is_taken(*tag))
            .collect();
        let free = tags.iter().find(|(_, tag)| !is_taken(*tag));
        let idle = || tags.iter().find(|(_, tag)| tag & TAG_USED == 0);
        if let Some(found) = free.or_else(idle) {
            return Some(*found);
        }
        for (way, _) in &tags {
            if let Some([_, tag]) = entry(&self.sets, spot, *way) {
                tag.fetch_and(!TAG_USED, Ordering::Relaxed);
            }
        }
        tags.first().copied()
    }

    /// Where a rule is, or has been put now.
    fn index_of(&mut self, rule: &UnwindRule) -> Option<u16> {
        let words: RuleWords = bytemuck::cast(*rule);
        if let Some(index) = self.indexes.get(&words) {
            return Some(*index);
        }
        let index = if self.uses.len() < self.rules.all().len() / RULE_WORDS {
            let index = u16::try_from(self.uses.len()).ok()?;
            self.uses.push(RuleUses { count: 0, ended: Instant::now(), queued: false });
            index
        } else {
            self.unused_index()?
        };
        self.write(index, words);
        self.indexes.insert(words, index);
        Some(index)
    }

    /// Takes the room of a rule that no place has named for long.
    fn unused_index(&mut self) -> Option<u16> {
        for _ in 0..self.unused.len() {
            let index = self.unused.pop_front()?;
            let uses = self.uses.get_mut(usize::from(index))?;
            uses.queued = uses.count == 0 && uses.ended.elapsed() < REST;
            if uses.queued {
                // Since it came here it was used, and is not any more. Then others may have rested
                // longer, but seldom: the next time will do.
                self.unused.push_back(index);
                return None;
            }
            if uses.count == 0 {
                let old: RuleWords = std::array::from_fn(|word| {
                    let at = usize::from(index) * RULE_WORDS + word;
                    self.rules.all().get(at).map_or(0, |word| word.load(Ordering::Relaxed))
                });
                self.indexes.remove(&old);
                return Some(index);
            }
        }
        None
    }

    fn write(&self, index: u16, words: RuleWords) {
        let room = self.rules.all().iter().skip(usize::from(index) * RULE_WORDS);
        for (room, word) in room.zip(words) {
            room.store(word, Ordering::Release);
        }
    }

    /// An entry with this tag is gone. From here on no walk begins that knows its rule by an
    /// earlier one.
    fn release(&mut self, tag: u64) {
        if is_taken(tag) {
            let space = (tag >> 32) as u32;
            // Pairs with the probes' load before a walk; what has gone was stored before it.
            if let Some(generation) = self.generations.all().get((space % GENERATIONS) as usize) {
                generation.fetch_add(1, Ordering::Release);
            }
            self.end_use((tag & 0xffff) as u16);
        }
    }

    /// One entry less names a rule.
    fn end_use(&mut self, index: u16) {
        if let Some(uses) = self.uses.get_mut(usize::from(index)) {
            uses.count = uses.count.saturating_sub(1);
            if uses.count == 0 {
                uses.ended = Instant::now();
                if !std::mem::replace(&mut uses.queued, true) {
                    self.unused.push_back(index);
                }
            }
        }
    }
}

/// Whether a tag is that of an entry. Address space 0 there is not; a probe may leave its mark of
/// use on a tag that has just been cleared.
fn is_taken(tag: u64) -> bool {
    tag >> 32 != 0
}

/// Place and tag of an entry.
fn entry(sets: &MappedWords, spot: Spot, way: usize) -> Option<[&AtomicU64; 2]> {
    const { assert!(PLACE_WORDS == 2 && size_of::<PlaceSet>() == WAYS * PLACE_WORDS * 8) };
    let at = (usize::try_from(spot.set).ok()? * WAYS + way) * PLACE_WORDS;
    match sets.all().get(at..at + PLACE_WORDS)? {
        [place, tag] => Some([place, tag]),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn words(count: usize) -> MappedWords {
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, (count * 8).next_multiple_of(4096) as u64).unwrap();
        MappedWords::map(&file, count).unwrap()
    }

    fn places(sets: usize, rules: usize) -> CachedPlaces {
        CachedPlaces::new(
            words(sets * WAYS * PLACE_WORDS),
            words(rules * RULE_WORDS),
            words(GENERATIONS as usize),
        )
    }

    fn key(place: u64) -> RuleKey {
        RuleKey { place, space: 3, reserved: 0 }
    }

    fn rule(cfa_offset: i32) -> UnwindRule {
        UnwindRule { cfa_offset, kind: ebpf_common::rule::RULE_CALL, ..UnwindRule::default() }
    }

    /// What a probe finds; it marks the entry.
    fn probe(places: &CachedPlaces, place: u64) -> Option<i32> {
        let spot = Spot::of(place, 3, places.shift);
        let (way, tag) = places.find(place, spot)?;
        entry(&places.sets, spot, way).unwrap()[1].fetch_or(1 << 24, Ordering::Relaxed);
        let index = spot.rule(tag).unwrap() as usize;
        let words: RuleWords = std::array::from_fn(|word| {
            places.rules.all()[index * RULE_WORDS + word].load(Ordering::Relaxed)
        });
        Some(bytemuck::cast::<RuleWords, UnwindRule>(words).cfa_offset)
    }

    #[test]
    fn a_pushed_rule_is_found_at_its_place_until_it_is_forgotten_or_another() {
        let mut places = places(16, 8);
        assert!(places.push_rules(key(10), &rule(1)) && places.push_rules(key(20), &rule(1)));
        assert_eq!(
            (probe(&places, 10), probe(&places, 20), probe(&places, 30)),
            (Some(1), Some(1), None)
        );
        assert!(places.push_rules(key(10), &rule(2)));
        assert_eq!((probe(&places, 10), probe(&places, 20)), (Some(2), Some(1)));
        places.forget(key(10));
        places.forget(key(30));
        assert_eq!((probe(&places, 10), probe(&places, 20)), (None, Some(1)));
        assert_eq!(places.uses.iter().map(|uses| uses.count).collect::<Vec<_>>(), [1, 0]);
    }

    #[test]
    fn an_entry_that_goes_or_changes_is_told_to_those_that_keep_its_rule() {
        let mut places = places(2, 8);
        let generation =
            |places: &CachedPlaces| places.generations.all()[3].load(Ordering::Relaxed);
        assert!(places.push_rules(key(10), &rule(1)) && places.push_rules(key(10), &rule(1)));
        assert_eq!(generation(&places), 0, "nothing went");
        assert!(places.push_rules(key(10), &rule(2)));
        assert_eq!(generation(&places), 1, "another rule");
        places.forget(key(10));
        places.forget(key(10));
        assert_eq!(generation(&places), 2, "it was removed once");
        let same = (1..10_000).filter(|place| Spot::of(*place, 3, 63).set == 0);
        for place in same.take(WAYS + 1) {
            assert!(places.push_rules(key(place), &rule(1)));
        }
        assert_eq!(generation(&places), 3, "one had to make room");
    }

    #[test]
    fn a_mark_of_use_on_an_entry_that_has_just_been_cleared_is_none() {
        let mut places = places(16, 8);
        assert!(places.push_rules(key(10), &rule(1)));
        assert!(places.push_rules(key(20), &rule(1)));
        let spot = Spot::of(20, 3, places.shift);
        let (way, _) = places.find(20, spot).unwrap();
        places.forget(key(20));
        entry(&places.sets, spot, way).unwrap()[1].fetch_or(1 << 24, Ordering::Relaxed);
        // Others take its room: rule 0 is place 10's alone all the time.
        let shift = places.shift;
        let same = (1_000..).filter(|place| Spot::of(*place, 3, shift).set == spot.set);
        for place in same.take(2 * WAYS) {
            assert!(places.push_rules(key(place), &rule(2)));
        }
        assert_eq!(places.uses[0].count, 1);
        assert_eq!(probe(&places, 10), Some(1));
    }

    #[test]
    fn what_probes_use_stays_in_a_full_set() {
        let mut places = places(2, 8);
        let all = |set| (1..10_000).filter(move |place| Spot::of(*place, 3, 63).set == set);
        let same: Vec<u64> = all(0).take(40).collect();
        for place in &same[..3] {
            assert!(places.push_rules(key(*place), &rule(1)));
            assert_eq!(probe(&places, *place), Some(1));
        }
        for place in &same[3..] {
            assert!(places.push_rules(key(*place), &rule(2)));
        }
        let found =
            same.iter().filter(|place| places.find(**place, Spot::of(**place, 3, 63)).is_some());
        assert_eq!(found.count(), WAYS);
        assert_eq!(same[..3].iter().filter_map(|place| probe(&places, *place)).count(), 3);
        // Once all of them are in use one has to go, and after it those that were not used since.
        assert_eq!(probe(&places, same[39]), Some(2));
        assert!(
            places.push_rules(key(same[5]), &rule(3)) && places.push_rules(key(same[6]), &rule(3))
        );
        assert_eq!(probe(&places, same[6]), Some(3));
    }

    #[test]
    fn places_go_when_they_have_all_the_rules_there_can_be() {
        let mut places = places(2, 4);
        for number in 1..=8 {
            places.push_rules(key(number), &rule(number as i32));
        }
        assert_eq!(places.uses.len(), 4);
        let long_ago = Instant::now().checked_sub(REST).unwrap();
        for uses in &mut places.uses {
            uses.ended = long_ago;
        }
        assert!((9..=16).any(|number| places.push_rules(key(number), &rule(number as i32))));
    }

    #[test]
    fn a_rule_whose_places_come_and_go_waits_once_for_its_room_to_be_taken() {
        let mut places = places(16, 4);
        for _ in 0..1000 {
            assert!(places.push_rules(key(1), &rule(1)) && places.push_rules(key(2), &rule(2)));
            places.forget(key(1));
            places.forget(key(2));
        }
        assert_eq!(places.unused, [0, 1]);
        // One that is used when its turn comes is put there again when it is not any more.
        assert!(places.push_rules(key(1), &rule(1)));
        assert_eq!(places.unused_index(), None);
        places.forget(key(1));
        assert_eq!(places.unused.len(), 2);
    }

    #[test]
    fn a_rule_leaves_its_array_only_long_after_its_last_place() {
        let mut places = places(1 << 10, 2);
        assert!(places.push_rules(key(1), &rule(1)) && places.push_rules(key(2), &rule(2)));
        places.forget(key(1));
        assert!(places.push_rules(key(4), &rule(1)), "known yet");
        places.forget(key(4));
        places.uses[0].ended = Instant::now() + REST;
        assert!(!places.push_rules(key(3), &rule(3)), "a probe may be reading it");
        let long_ago = Instant::now().checked_sub(REST).unwrap();
        places.uses[0].ended = long_ago;
        assert!(places.push_rules(key(3), &rule(3)));
        assert_eq!(
            (probe(&places, 3), probe(&places, 2), probe(&places, 1)),
            (Some(3), Some(2), None)
        );
        // It is among the unused, and used now.
        places.forget(key(2));
        places.uses[1].ended = long_ago;
        assert!(places.push_rules(key(5), &rule(5)));
        assert_eq!((probe(&places, 5), probe(&places, 3)), (Some(5), Some(3)));
    }
}
