//! Payloads of the runtime's events, read with bounds (layouts: docs.microsoft.com
//! "garbage-collection-events", ClrEtwAll.man of dotnet/runtime).

use crate::text::BoundedText;

/// Bytes of a payload that are looked at.
pub(crate) const MOST_PAYLOAD: u32 = 1 << 16;

/// Reads a packed little-endian payload from the front.
pub(crate) struct Payload<'a>(pub(crate) &'a [u8]);

impl Payload<'_> {
    pub(crate) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    /// Passes a zero-terminated UTF-16 string.
    pub(crate) fn string(&mut self) -> Option<()> {
        while self.u16()? != 0 {}
        Some(())
    }

    /// Reads one; its beginning also where its end is missing.
    pub(crate) fn text<const N: usize>(&mut self, to: &mut BoundedText<N>) -> Option<()> {
        to.push_units(self.0.as_chunks().0.iter().copied().map(u16::from_le_bytes));
        self.string()
    }
}

/// An allocation, as either event tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AllocationEvent {
    pub(crate) type_id: u64,
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) amount: u64,
    pub(crate) heap: u8,
    pub(crate) sampled: bool,
    pub(crate) exact: bool,
}

/// AllocationTick, version 4 (.NET 6–10): amount u32, kind u32, clr u16, amount64 u64, type u64,
/// name z, heap index u32, address u64, size u64.
pub(crate) fn tick(payload: &[u8], version: u32) -> Option<AllocationEvent> {
    if version < 4 {
        return None;
    }
    let mut payload = Payload(payload);
    payload.u32()?;
    let kind = payload.u32()?;
    payload.u16()?;
    let amount = payload.u64()?;
    let type_id = payload.u64()?;
    payload.string()?;
    payload.u32()?;
    let address = payload.u64()?;
    let size = payload.u64()?;
    Some(AllocationEvent {
        type_id,
        address,
        size,
        amount,
        heap: heap(kind)?,
        sampled: false,
        exact: false,
    })
}

/// AllocationSampled, version 0 (.NET 10): kind u32, clr u16, type u64, name z, address u64, size
/// u64, offset u64.
pub(crate) fn sampled(payload: &[u8]) -> Option<AllocationEvent> {
    let mut payload = Payload(payload);
    let kind = payload.u32()?;
    payload.u16()?;
    let type_id = payload.u64()?;
    payload.string()?;
    let address = payload.u64()?;
    let size = payload.u64()?;
    payload.u64()?;
    Some(AllocationEvent {
        type_id,
        address,
        size,
        amount: 0,
        heap: heap(kind)?,
        sampled: true,
        exact: false,
    })
}

/// GCHeapStats version 1 or 2: size and promoted bytes of generations 0 to 2 and of large objects,
/// u64 each; finalizable bytes and objects u64, pinned objects, sync blocks and handles u32, clr
/// u16; from version 2 on size and promoted bytes of pinned objects. Answers all promoted bytes.
pub(crate) fn promoted(payload: &[u8]) -> Option<u64> {
    let mut payload = Payload(payload);
    let mut total = 0u64;
    for _ in 0..4 {
        payload.u64()?;
        total = total.wrapping_add(payload.u64()?);
    }
    payload.take::<30>()?;
    payload.u64();
    Some(total.wrapping_add(payload.u64().unwrap_or(0)))
}

/// What is told of an exception beside its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThrowKind {
    First,
    Again,
    /// The message ends beyond what is looked at, and behind it stands which of the two it is.
    Cut,
}

/// ExceptionThrown version 1: type z, message z, address u64, hresult u32, flags u16. The message,
/// which may hold anything, is passed over unless it is asked for.
pub(crate) fn thrown<const N: usize, const M: usize>(
    payload: &[u8],
    type_name: &mut BoundedText<N>,
    message: Option<&mut BoundedText<M>>,
) -> Option<ThrowKind> {
    const RETHROWN: u16 = 4;
    let is_cut = payload.len() >= MOST_PAYLOAD as usize;
    let mut payload = Payload(payload);
    payload.text(type_name)?;
    let flags = || {
        match message {
            Some(message) => payload.text(message)?,
            None => payload.string()?,
        }
        payload.u64()?;
        payload.u32()?;
        payload.u16()
    };
    match flags() {
        Some(flags) if flags & RETHROWN != 0 => Some(ThrowKind::Again),
        Some(_) => Some(ThrowKind::First),
        None => is_cut.then_some(ThrowKind::Cut),
    }
}

/// ContentionStart: flags u8 (0 managed), clr u16; from version 2 on (.NET 8) lock u64, object u64,
/// owner's thread u64. Answers the owner, 0 when it is not told.
pub(crate) fn contention_start(payload: &[u8]) -> Option<u32> {
    let mut payload = Payload(payload);
    payload.u8()?;
    payload.u16()?;
    payload.u64();
    payload.u64();
    Some(payload.u64().and_then(|owner| u32::try_from(owner).ok()).unwrap_or(0))
}

/// ContentionStop version 1: flags u8, clr u16, duration f64 in nanoseconds.
pub(crate) fn contention_stop(payload: &[u8]) -> Option<u64> {
    let mut payload = Payload(payload);
    payload.u8()?;
    payload.u16()?;
    let waited_ns = f64::from_le_bytes(payload.take()?);
    (waited_ns >= 0.0).then_some(waited_ns as u64)
}

/// ThreadPoolWorkerThreadAdjustmentAdjustment: throughput f64, workers u32, reason u32.
pub(crate) fn pool_adjusted(payload: &[u8]) -> Option<(u32, u32)> {
    let mut payload = Payload(payload);
    payload.u64()?;
    Some((payload.u32()?, payload.u32()?))
}

/// `EventCounters` of the provider System.Runtime: name z, name to be shown z, value f64, …, the
/// same for all counters that are read and not counted up. Answers the value of this counter;
/// `None` of another one.
pub(crate) fn counter(payload: &[u8], name: &str) -> Option<Option<u64>> {
    let mut payload = Payload(payload);
    if !name.bytes().map(u16::from).chain([0]).all(|unit| payload.u16() == Some(unit)) {
        return None;
    }
    let mut value = || {
        payload.string()?;
        payload.take().map(f64::from_le_bytes).filter(|value| *value >= 0.0)
    };
    Some(value().map(|value| value as u64))
}

pub(crate) fn heap(kind: u32) -> Option<u8> {
    u8::try_from(kind).ok().filter(|k| *k <= 2)
}

#[cfg(test)]
mod tests {
    use super::{
        AllocationEvent, MOST_PAYLOAD, ThrowKind, contention_start, contention_stop, counter,
        pool_adjusted, promoted, sampled, thrown, tick,
    };
    use crate::text::BoundedText;
    use proptest::prelude::{any, proptest};

    fn payload(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn an_allocation_tick_of_version_4_is_read_and_older_ones_are_not() {
        let name = [b'A', 0, b'b', 0, 0, 0];
        let bytes = payload(&[
            &100_u32.to_le_bytes(),
            &1_u32.to_le_bytes(),
            &9_u16.to_le_bytes(),
            &106_496_u64.to_le_bytes(),
            &0x7f00_u64.to_le_bytes(),
            &name,
            &0_u32.to_le_bytes(),
            &0xabc0_u64.to_le_bytes(),
            &85_024_u64.to_le_bytes(),
        ]);
        let read = AllocationEvent {
            type_id: 0x7f00,
            address: 0xabc0,
            size: 85_024,
            amount: 106_496,
            heap: 1,
            sampled: false,
            exact: false,
        };
        assert_eq!(tick(&bytes, 4), Some(read));
        assert_eq!(tick(&bytes, 3), None);
        assert_eq!(tick(&bytes[..bytes.len() - 1], 4), None);
    }

    #[test]
    fn an_allocation_sample_is_read() {
        let bytes = payload(&[
            &2_u32.to_le_bytes(),
            &9_u16.to_le_bytes(),
            &0x7f00_u64.to_le_bytes(),
            &[0, 0],
            &0xabc0_u64.to_le_bytes(),
            &48_u64.to_le_bytes(),
            &17_u64.to_le_bytes(),
        ]);
        let read = AllocationEvent {
            type_id: 0x7f00,
            address: 0xabc0,
            size: 48,
            amount: 0,
            heap: 2,
            sampled: true,
            exact: false,
        };
        assert_eq!(sampled(&bytes), Some(read));
    }

    #[test]
    fn promoted_bytes_of_all_generations_are_summed() {
        let pairs = |generations: &[(u64, u64)]| -> Vec<u8> {
            generations
                .iter()
                .flat_map(|(size, promoted)| [size.to_le_bytes(), promoted.to_le_bytes()])
                .flatten()
                .collect()
        };
        let first =
            payload(&[&pairs(&[(1_000, 1), (1_000, 20), (1_000, 300), (1_000, 4_000)]), &[9; 30]]);
        assert_eq!(promoted(&first), Some(4_321));
        assert_eq!(promoted(&payload(&[&first, &pairs(&[(1_000, 50_000)])])), Some(54_321));
        assert_eq!(promoted(&first[..93]), None);
    }

    const NO_MESSAGE: Option<&mut BoundedText<1>> = None;

    #[test]
    fn an_exceptions_type_is_read_and_its_message_where_that_is_asked_for() {
        let rethrown = |flags: u16| {
            let bytes = payload(&[
                &[b'O', 0, b'h', 0, 0, 0],
                &[b's', 0, b'e', 0, b'c', 0, 0, 0],
                &[0; 12],
                &flags.to_le_bytes(),
                &[9, 0],
            ]);
            let (mut name, mut message) = (BoundedText::<16>::new(), BoundedText::<8>::new());
            let rethrown = thrown(&bytes, &mut name, NO_MESSAGE);
            assert_eq!(name.as_str(), "Oh");
            assert_eq!(thrown(&bytes, &mut BoundedText::<16>::new(), Some(&mut message)), rethrown);
            assert_eq!(message.as_str(), "sec");
            assert_eq!(
                thrown(&bytes[..bytes.len() - 4], &mut BoundedText::<16>::new(), NO_MESSAGE),
                None
            );
            rethrown
        };
        assert_eq!([0x10, 0x14].map(rethrown), [Some(ThrowKind::First), Some(ThrowKind::Again)]);
        let endless = payload(&[&[b'O', 0, b'h', 0, 0, 0], &[b's', 0].repeat(40_000)]);
        let of =
            |bytes: usize| thrown(&endless[..bytes], &mut BoundedText::<16>::new(), NO_MESSAGE);
        let mut message = BoundedText::<8>::new();
        let begun = thrown(
            &endless[..MOST_PAYLOAD as usize],
            &mut BoundedText::<16>::new(),
            Some(&mut message),
        );
        assert_eq!((begun, message.as_str()), (Some(ThrowKind::Cut), "ssssssss"));
        let most = MOST_PAYLOAD as usize;
        assert_eq!((of(most), of(most - 1), of(100)), (Some(ThrowKind::Cut), None, None));
    }

    #[test]
    fn a_lock_s_owner_and_a_wait_s_length_are_read() {
        let start = payload(&[&[0, 9, 0], &[1; 16], &4242u64.to_le_bytes()]);
        assert_eq!(
            (contention_start(&start), contention_start(&start[..3])),
            (Some(4242), Some(0))
        );
        let stop = |ns: f64| contention_stop(&payload(&[&[0, 9, 0], &ns.to_le_bytes()]));
        assert_eq!(
            [1_500.7, 0.0, -1.0, f64::NAN, f64::INFINITY].map(stop),
            [Some(1_500), Some(0), None, None, Some(u64::MAX)]
        );
        assert_eq!(contention_stop(&[0; 10]), None);
    }

    #[test]
    fn the_number_of_workers_and_why_it_changed_are_read() {
        let adjusted =
            payload(&[&7.5f64.to_le_bytes(), &12u32.to_le_bytes(), &6u32.to_le_bytes(), &[9, 0]]);
        assert_eq!(
            (pool_adjusted(&adjusted), pool_adjusted(&adjusted[..15])),
            (Some((12, 6)), None)
        );
        let text = |text: &str| {
            text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect::<Vec<_>>()
        };
        let told =
            payload(&[&text("queue"), &text("Queue Length"), &41.0f64.to_le_bytes(), &[0; 8]]);
        assert_eq!(
            (counter(&told, "queue"), counter(&told, "que"), counter(&told, "queues")),
            (Some(Some(41)), None, None)
        );
        let short = told.len() - 9;
        assert_eq!(
            (counter(&told[..short], "queue"), counter(&told[..9], "queue")),
            (Some(None), None)
        );
        let negative = payload(&[&text("queue"), &text(""), &(-1.0f64).to_le_bytes()]);
        assert_eq!(counter(&negative, "queue"), Some(None));
    }

    proptest! {
        #[test]
        fn any_payload_is_read_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            version: u32,
        ) {
            std::hint::black_box((tick(&bytes, version).is_some(), sampled(&bytes).is_some()));
            let (mut name, mut message) = (BoundedText::<8>::new(), BoundedText::<8>::new());
            std::hint::black_box(promoted(&bytes));
            std::hint::black_box(thrown(&bytes, &mut name, Some(&mut message)));
            std::hint::black_box((contention_start(&bytes), contention_stop(&bytes)));
            std::hint::black_box(pool_adjusted(&bytes));
        }
    }
}
