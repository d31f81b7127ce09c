//! Ranges of addresses, collected in any order and by several threads, then sorted and asked about
//! objects that come in about the order of their addresses.

use crate::region::lasting::{self, GrowableWords};
use core::sync::atomic::{AtomicU64, Ordering};

/// Digits of a radix sort over 48 bits of address.
const PASSES: u32 = 4;
const DIGIT_BITS: u32 = 12;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Fewer are sorted by insertion.
const FEW: usize = 64;

/// Rows of `W` words, of which word `FIRST` is the first address and word `BYTES` the length.
pub(crate) struct Ranges<const W: usize, const FIRST: usize, const BYTES: usize> {
    words: GrowableWords,
    scratch: GrowableWords,
    digits: &'static [AtomicU64],
    count: AtomicU64,
}

impl<const W: usize, const FIRST: usize, const BYTES: usize> Ranges<W, FIRST, BYTES> {
    /// Room for `most` rows, or `least` where address space is counted (see `lasting::Room`).
    #[must_use]
    pub(crate) fn new(most: usize, least: usize) -> Option<Self> {
        let words = GrowableWords::new(most.wrapping_mul(W), least.wrapping_mul(W));
        Some(Self {
            scratch: GrowableWords::new(words.most(), words.most()),
            words,
            digits: lasting::whole(DIGITS)?,
            count: AtomicU64::new(0),
        })
    }

    /// Rows there is room for now.
    fn room(&self) -> usize {
        self.words.words().len() / W
    }

    /// Makes room for so many rows, and for sorting them. False: there is none.
    #[must_use]
    pub(crate) fn makes_room(&self, rows: usize) -> bool {
        let words = rows.wrapping_mul(W);
        // Rows for which there is nothing to sort them in would be sorted wrongly.
        self.scratch.opens(words) && self.words.opens(words)
    }

    /// Rows there are.
    #[must_use]
    pub(crate) fn len(&self) -> usize {
        (self.count.load(Ordering::Acquire) as usize).min(self.room())
    }

    /// Forgets all.
    pub(crate) fn clear(&self) {
        self.count.store(0, Ordering::Relaxed);
    }

    /// The memory behind the rows, for who fills it otherwise and then says how many there are.
    #[must_use]
    pub(crate) fn memory(&self) -> &[AtomicU64] {
        self.words.words()
    }

    /// How many rows were filled in otherwise.
    pub(crate) fn set_len(&self, count: usize) {
        self.count.store(count as u64, Ordering::Release);
    }

    /// Adds rows; any thread may. Answers how many there was room for.
    pub(crate) fn add(&self, rows: impl ExactSizeIterator<Item = [u64; W]>) -> u64 {
        let asked = rows.len();
        let first = self.count.fetch_add(asked as u64, Ordering::AcqRel) as usize;
        let mut noted = 0u64;
        if !self.makes_room(first.wrapping_add(asked)) && first >= self.room() {
            return 0;
        }
        let words = self.words.words();
        for (at, row) in rows.enumerate() {
            let begin = first.wrapping_add(at).wrapping_mul(W);
            let Some(place) = words.get(begin..begin.wrapping_add(W)) else { break };
            for (to, from) in place.iter().zip(row) {
                to.store(from, Ordering::Relaxed);
            }
            noted = noted.wrapping_add(1);
        }
        noted
    }

    fn first_of(words: &[AtomicU64], row: usize) -> u64 {
        words
            .get(row.wrapping_mul(W).wrapping_add(FIRST))
            .map_or(u64::MAX, |w| w.load(Ordering::Relaxed))
    }

    /// Word `word` of row `row`.
    #[must_use]
    pub(crate) fn word(&self, row: usize, word: usize) -> u64 {
        self.words
            .words()
            .get(row.wrapping_mul(W).wrapping_add(word))
            .map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// Sorts the rows by their first address. They mostly are already.
    pub(crate) fn sort(&self) {
        let count = self.len();
        let (mut last, words) = (0, self.words.words());
        let is_sorted = (0..count).all(|row| {
            let first = Self::first_of(words, row);
            let in_order = first >= last;
            last = first;
            in_order
        });
        match () {
            () if is_sorted => {}
            () if count <= FEW => self.insertion_sort(count),
            () => self.radix_sort(count),
        }
    }

    fn insertion_sort(&self, count: usize) {
        let words = self.words.words();
        for from in 1..count {
            let mut at = from;
            while at > 0 && Self::first_of(words, at.wrapping_sub(1)) > Self::first_of(words, at) {
                for word in 0..W {
                    let (low, high) = (at.wrapping_sub(1).wrapping_mul(W), at.wrapping_mul(W));
                    let (Some(low), Some(high)) =
                        (words.get(low.wrapping_add(word)), words.get(high.wrapping_add(word)))
                    else {
                        return;
                    };
                    let kept = low.load(Ordering::Relaxed);
                    low.store(high.load(Ordering::Relaxed), Ordering::Relaxed);
                    high.store(kept, Ordering::Relaxed);
                }
                at = at.wrapping_sub(1);
            }
        }
    }

    /// An even number of passes leaves the rows where they were.
    fn radix_sort(&self, count: usize) {
        let (mut from, mut to) = (self.words.words(), self.scratch.words());
        for pass in 0..PASSES {
            let digit = |row: usize| {
                (Self::first_of(from, row) >> (pass.wrapping_mul(DIGIT_BITS))) as usize % DIGITS
            };
            for word in self.digits {
                word.store(0, Ordering::Relaxed);
            }
            for row in 0..count {
                if let Some(word) = self.digits.get(digit(row)) {
                    word.store(word.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
                }
            }
            let mut before = 0u64;
            for word in self.digits {
                let here = word.load(Ordering::Relaxed);
                word.store(before, Ordering::Relaxed);
                before = before.wrapping_add(here);
            }
            for row in 0..count {
                let Some(place) = self.digits.get(digit(row)) else { continue };
                let at = place.load(Ordering::Relaxed) as usize;
                place.store(at.wrapping_add(1) as u64, Ordering::Relaxed);
                for word in 0..W {
                    let source = from.get(row.wrapping_mul(W).wrapping_add(word));
                    let target = to.get(at.wrapping_mul(W).wrapping_add(word));
                    if let (Some(source), Some(target)) = (source, target) {
                        target.store(source.load(Ordering::Relaxed), Ordering::Relaxed);
                    }
                }
            }
            core::mem::swap(&mut from, &mut to);
        }
    }

    /// Looks addresses up in the sorted rows.
    #[must_use]
    pub(crate) fn cursor(&self) -> RangeCursor<'_, W, FIRST, BYTES> {
        RangeCursor { ranges: self, count: self.len(), low: 1, high: 0, row: None }
    }
}

/// Remembers the range, or the gap, that the last address was in.
pub(crate) struct RangeCursor<'a, const W: usize, const FIRST: usize, const BYTES: usize> {
    ranges: &'a Ranges<W, FIRST, BYTES>,
    count: usize,
    low: u64,
    high: u64,
    row: Option<usize>,
}

impl<const W: usize, const FIRST: usize, const BYTES: usize> RangeCursor<'_, W, FIRST, BYTES> {
    /// The row that `address` is in.
    #[inline]
    pub(crate) fn find(&mut self, address: usize) -> Option<usize> {
        let address = address as u64;
        if address.wrapping_sub(self.low) >= self.high.wrapping_sub(self.low)
            || self.low > self.high
        {
            self.look(address);
        }
        self.row
    }

    #[inline(never)]
    fn look(&mut self, address: u64) {
        // Rows whose first address is not above this one.
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = low.wrapping_add(high) / 2;
            if self.ranges.word(middle, FIRST) <= address {
                low = middle.wrapping_add(1)
            } else {
                high = middle
            }
        }
        let above = if low < self.count { self.ranges.word(low, FIRST) } else { u64::MAX };
        let row = low.checked_sub(1);
        let (first, end) = match row {
            Some(row) => {
                let first = self.ranges.word(row, FIRST);
                (first, first.saturating_add(self.ranges.word(row, BYTES)))
            }
            None => (0, 0),
        };
        if row.is_some() && address < end {
            (self.low, self.high, self.row) = (first, end.min(above), row);
        } else {
            (self.low, self.high, self.row) = (end, above, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    type Three = Ranges<3, 0, 1>;

    fn find_plainly(rows: &[[u64; 3]], address: u64) -> Option<u64> {
        rows.iter().find(|row| (row[0]..row[0] + row[1]).contains(&address)).map(|row| row[2])
    }

    proptest! {
        #[test]
        fn an_address_is_found_in_its_range_and_nowhere_else(
            mut steps in prop::collection::vec((0u64..1 << 30, 1u64..1 << 12), 0..400),
            asked in prop::collection::vec(any::<prop::sample::Index>(), 1..200),
            turn in any::<u64>(),
        ) {
            let mut at = 8;
            let mut rows: Vec<[u64; 3]> = Vec::new();
            for (number, (gap, bytes)) in steps.drain(..).enumerate() {
                at += gap;
                rows.push([at, bytes, number as u64]);
                at += bytes;
            }
            // Any order.
            let mut mixed = rows.clone();
            mixed.sort_by_key(|row| crate::repeat::mix(row[0] ^ turn));
            let ranges = Three::new(1 << 10, 1 << 10).unwrap();
            prop_assert_eq!(ranges.add(mixed.into_iter()), rows.len() as u64);
            ranges.sort();
            let firsts: Vec<u64> = (0..ranges.len()).map(|row| ranges.word(row, 0)).collect();
            prop_assert_eq!(firsts, rows.iter().map(|row| row[0]).collect::<Vec<_>>());
            let mut cursor = ranges.cursor();
            for index in asked {
                let places = [0, at, at + 5].into_iter();
                let edges_of = |&[first, length, _]: &[u64; 3]| {
                    [first - 1, first, first + length - 1, first + length]
                };
                let edges = rows.iter().flat_map(edges_of);
                let all: Vec<u64> = places.chain(edges).collect();
                let address = *index.get(&all);
                let found = cursor.find(address as usize).map(|row| ranges.word(row, 2));
                prop_assert_eq!(found, find_plainly(&rows, address), "{}", address);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let ranges = Three::new(4, 4).unwrap();
        assert_eq!(ranges.add((0u32..3).map(|n| [n.into(), 1, 0])), 3);
        assert_eq!(ranges.add((3u32..9).map(|n| [n.into(), 1, 0])), 1);
        assert_eq!(ranges.len(), 4);
        ranges.clear();
        assert_eq!(ranges.len(), 0);
    }
}
