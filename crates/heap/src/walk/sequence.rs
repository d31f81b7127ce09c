//! Which events of a stream belong to the first walk: one thread writes it, and its events of each
//! kind are numbered from 0 on.

use perfusion_dotnet::fields::PayloadFields;

/// Kinds of numbered events.
#[derive(Clone, Copy)]
pub(super) enum BulkEvent {
    Roots,
    Dependents,
    Objects,
    References,
}

/// How far the first walk has come.
#[derive(Debug, Default)]
pub(super) struct WalkSequence {
    /// The thread that walks, once it has begun.
    thread: Option<u64>,
    /// Another walk has followed this one.
    is_over: bool,
    /// Numbers of the next events of each [`BulkEvent`].
    next: [u32; 4],
    missing: u64,
}

impl WalkSequence {
    /// True when an event of this thread is part of the walk. The first thread that asks is the
    /// one that walks.
    pub(super) fn takes(&mut self, thread: u64) -> bool {
        *self.thread.get_or_insert(thread) == thread && !self.is_over
    }

    /// True when there was a numbered event.
    pub(super) fn has_begun(&self) -> bool {
        self.next != [0; 4]
    }

    /// Another walk begins.
    pub(super) fn end(&mut self) {
        self.is_over = true;
    }

    /// Events that did not come, by their numbers.
    pub(super) fn missing(&self) -> u64 {
        self.missing
    }

    /// Takes the number and the count from an event's fields. The count is 0 for the first event of
    /// another walk.
    pub(super) fn expect(
        &mut self,
        kind: BulkEvent,
        fields: &mut PayloadFields<'_>,
    ) -> Option<u32> {
        let (number, count, _runtime) = (fields.u32()?, fields.u32()?, fields.u16()?);
        let next = self.next.get_mut(kind as usize)?;
        if number == 0 && *next > 0 {
            self.is_over = true;
            return Some(0);
        }
        self.missing += u64::from(number.abs_diff(*next));
        *next = number.wrapping_add(1);
        Some(count)
    }
}
