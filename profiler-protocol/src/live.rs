//! Which sampled objects are watched when there is not room for all: what both sides compute alike.
//!
//! Every sampled object draws a number v, evenly from 1 to 2³²−1, and has the key
//! `importance · 2³² / v` (priority sampling). It is watched while its key is above the threshold
//! of the *level*, which rises when the set is full and falls when it has room again. So an object
//! that is alive is watched with the probability `min(1, importance / threshold)` of the highest
//! level it has seen, whatever else the program does, and stands for the inverse of that.

/// Highest level at which events are chosen: such an event stands for 2^level of its kind.
pub const MAX_LEVEL: u8 = 31;
/// Bytes between two samples in the mean.
pub const SAMPLING_BYTES: u64 = 102_400;
/// Largest importance: the key must fit 64 bits.
const MOST_IMPORTANT: u64 = 1 << 31;

/// The highest level: its threshold is above every key.
pub const TOP_LEVEL: u8 = 184;
/// Levels in which the threshold doubles, and by how much each raises it, in 65,536ths.
pub const LEVELS_OF_OCTAVE: u8 = 4;
const STEPS: [u64; LEVELS_OF_OCTAVE as usize] = [65_536, 77_936, 92_682, 110_218];

/// Words of the slot of a watched object: its handle, 0 while the slot watches nothing; sample << 8
/// | generation; its key. They lie in the process and not in the region: who may read its memory
/// learns whose a handle is, and so finds the object in a walk of the runtime's.
pub const SLOT_WORDS: usize = 3;
/// Between two looks of the service thread there is room for so many more objects than may be
/// watched: an eighth.
pub const SPARE: usize = 8;
/// Slots are claimed by groups.
pub const GROUP: usize = 64;

/// How many groups of slots there are when `most` objects may be watched.
#[must_use]
pub const fn groups(most: usize) -> usize {
    most.saturating_add(most / SPARE).div_ceil(GROUP)
}

/// How much an object of `size` bytes matters whose sample was chosen at `level` of all samples:
/// about the bytes it stands for.
#[must_use]
pub const fn importance(size: u64, level: u8) -> u64 {
    let bytes = size.saturating_add(SAMPLING_BYTES);
    let level = if level > MAX_LEVEL { MAX_LEVEL } else { level } as u32;
    if bytes > MOST_IMPORTANT >> level { MOST_IMPORTANT } else { bytes << level }
}

/// Keys up to this are not watched at `level`. Level 0 watches everything.
#[must_use]
pub const fn threshold(level: u8) -> u64 {
    let level = if level > TOP_LEVEL { TOP_LEVEL } else { level };
    let Some(above) = level.checked_sub(1) else { return 0 };
    let step = match above & (LEVELS_OF_OCTAVE - 1) {
        0 => STEPS[0],
        1 => STEPS[1],
        2 => STEPS[2],
        _ => STEPS[3],
    };
    // At level 1 131,072, a little above the least importance.
    step << ((above >> 2) as u32).wrapping_add(1)
}

/// The key of an object that drew `draw`, 1 to 2³²−1.
#[must_use]
pub const fn key(importance: u64, draw: u32) -> u64 {
    let Some(key) = (importance << 32).checked_div(draw as u64) else { return u64::MAX };
    key
}

/// The lowest level at which `key` is not watched.
#[must_use]
pub fn level_above(key: u64) -> u8 {
    // Four levels an octave, from 2^17 on: begin just below the key's own octave.
    let octaves = key.checked_ilog2().unwrap_or(0).saturating_sub(17);
    let mut level = u8::try_from(octaves).unwrap_or(0).saturating_mul(LEVELS_OF_OCTAVE);
    while level < TOP_LEVEL && key > threshold(level) {
        level = level.saturating_add(1);
    }
    level
}

/// The probability that an object of this importance is watched at `level`: a key is above t when
/// the draw is at most importance · 2³² / (t + 1).
#[must_use]
pub fn chance(importance: u64, level: u8) -> f64 {
    let above = threshold(level).saturating_add(1);
    (importance as f64 / above as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::{MOST_IMPORTANT, TOP_LEVEL, chance, importance, key, level_above, threshold};

    #[test]
    fn thresholds_rise_by_a_quarter_of_an_octave_and_never_wrap() {
        assert_eq!((threshold(0), threshold(1), threshold(5)), (0, 131_072, 262_144));
        for level in 1..TOP_LEVEL {
            let ratio = threshold(level + 1) as f64 / threshold(level) as f64;
            assert!((1.18..1.20).contains(&ratio), "{level}: {ratio}");
        }
        assert_eq!(threshold(u8::MAX), threshold(TOP_LEVEL));
        assert!(threshold(TOP_LEVEL) > key(MOST_IMPORTANT, 2));
    }

    #[test]
    fn a_key_is_below_the_level_above_it_and_not_below_the_one_before() {
        for draw in [1, 2, 77, 1 << 20, u32::MAX] {
            let key = key(importance(24, 0), draw);
            let level = level_above(key);
            assert!(key <= threshold(level) && key > threshold(level - 1), "{draw}");
        }
    }

    #[test]
    fn the_chance_is_the_share_of_draws_that_are_watched() {
        for (size, downsampled, level) in
            [(24, 0, 1), (24, 0, 9), (300_000, 0, 9), (300_000, 4, 22), (5_000_000, 0, 20)]
        {
            // Draws are evenly spread: their share is that of the largest one that is watched.
            let (mut low, mut high) = (0u64, 1 << 32);
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if key(importance(size, downsampled), middle as u32) > threshold(level) {
                    low = middle
                } else {
                    high = middle
                }
            }
            let share = low as f64 / (1u64 << 32) as f64;
            assert!(
                (share - chance(importance(size, downsampled), level)).abs() < 1e-6,
                "{size} at {level}: {share}"
            );
        }
        assert_eq!(chance(importance(24, 0), 0), 1.0);
    }
}
