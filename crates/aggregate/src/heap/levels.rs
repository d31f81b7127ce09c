//! Levels of samples: one in 2^level was chosen by chance.

use perfusion_model::event::HeapKind;

/// How a region's level was raised. It holds for every object that was alive then, and a process
/// may raise as often as it likes: so the objects are not gone through, but each remembers how
/// often it had been raised before.
#[derive(Default)]
pub(super) struct RaisedLevels {
    pub(super) count: u64,
    /// How often it had been raised, this time included, and to what level: higher ones before
    /// lower ones, so a level at most once.
    pub(super) steps: Vec<(u64, u8)>,
}

impl RaisedLevels {
    pub(super) fn to(&mut self, level: u8) {
        self.count += 1;
        while self.steps.pop_if(|(_, lower)| *lower <= level).is_some() {}
        self.steps.push((self.count, level));
    }

    /// The highest level since it had been raised `before` times.
    pub(super) fn since(&self, before: u64) -> u8 {
        let index = self.steps.partition_point(|&(count, _)| count <= before);
        self.steps.get(index).map_or(0, |&(_, level)| level)
    }
}

/// Levels of samples, of small objects and of large ones.
#[derive(Clone, Copy, Default)]
pub(super) struct RarestLevels([u8; 2]);

impl RarestLevels {
    pub(super) fn at_least(&mut self, heap: HeapKind, level: u8) {
        let [small, large] = &mut self.0;
        let rarest = if heap == HeapKind::Large { large } else { small };
        *rarest = (*rarest).max(level);
    }

    /// Of one in how many was told; `None` where of each.
    pub(super) fn one_in(self, heap: HeapKind) -> Option<u64> {
        let [small, large] = self.0;
        let level = if heap == HeapKind::Large { large } else { small };
        (level > 0).then(|| 1u64.checked_shl(level.into()).unwrap_or(u64::MAX))
    }
}
