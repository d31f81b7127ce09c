//! A shim that lies: its region has other bytes at each read → records. Also the records alone.

use crate::input::Input;
use profiler_protocol::consumer::{Consumer, MIN_SCRATCH_BYTES, Quota, RegionMemory};
use profiler_protocol::layout::{
    COMMIT_OFFSET_AT, DATA_OFFSET_AT, EVENT_HEAD_AT, EVENT_TAIL_AT, Geometry, HEADER_BYTES, MAGIC,
    MAGIC_AT, MIN_UNITS, REGION_BYTES_AT, REQUEST_OFFSET_AT, REQUEST_SLOTS_AT, UNIT_BYTES,
    UNITS_AT, VERSION, VERSION_AT,
};
use profiler_protocol::position::{Extent, commit_word, index};
use profiler_protocol::record::{Record, RecordBody, decode};
use profiler_protocol::request::Request;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::hint::black_box;

const GEOMETRY: Geometry = Geometry { units: MIN_UNITS, request_slots: 8 };

/// What it says at each read comes from the fuzzer. Headers and commit words are believable unless
/// the input says otherwise, or a reader that checks them would never be led further.
struct HostileRegion<'a> {
    input: RefCell<Input<'a>>,
    consumed: Cell<u64>,
}

impl HostileRegion<'_> {
    fn header(&self, bytes: &mut [u8]) {
        let mut input = self.input.borrow_mut();
        let mut put = |offset: u64, value: u64| {
            let at = usize::try_from(offset).unwrap_or(usize::MAX);
            if let Some(to) = bytes.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<8>()) {
                *to = value.to_le_bytes();
            }
        };
        for (offset, value) in [
            (MAGIC_AT, MAGIC),
            (VERSION_AT, u64::from(VERSION) | HEADER_BYTES << 32),
            (UNITS_AT, GEOMETRY.units),
            (REQUEST_SLOTS_AT, GEOMETRY.request_slots),
            (REGION_BYTES_AT, GEOMETRY.region_bytes()),
            (REQUEST_OFFSET_AT, GEOMETRY.request_offset()),
            (COMMIT_OFFSET_AT, GEOMETRY.commit_offset()),
            (DATA_OFFSET_AT, GEOMETRY.data_offset()),
            (EVENT_TAIL_AT, self.consumed.get()),
            (EVENT_HEAD_AT, self.consumed.get().wrapping_add(u64::from(input.u8()) * 5)),
        ] {
            put(offset, value);
        }
        for _ in 0..input.u8().saturating_sub(250) {
            let word = u64::from(input.u8());
            put(word * 8, input.u64());
        }
    }

    /// The commit word of the unit with this number in the ring: mostly pending or possible.
    fn commit(&self, unit: u64) -> u64 {
        let mut input = self.input.borrow_mut();
        let consumed = self.consumed.get();
        let ahead = unit.wrapping_sub(index(consumed, GEOMETRY.units)) & (GEOMETRY.units - 1);
        let extent = match input.u8() {
            0 => return 0,
            255 => return input.u64(),
            254 => Extent { units: u64::from(input.u16()), bytes: u64::from(input.u16()) },
            words => Extent { units: u64::from(words).div_ceil(8), bytes: u64::from(words) * 8 },
        };
        commit_word(consumed.wrapping_add(ahead), GEOMETRY.units, extent)
    }
}

impl RegionMemory for HostileRegion<'_> {
    type Error = Infallible;

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Infallible> {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        assert!(
            offset.saturating_add(length) <= GEOMETRY.region_bytes(),
            "reads {length} bytes at {offset:#x}"
        );
        bytes.fill(0);
        if offset < HEADER_BYTES {
            self.header(bytes);
        } else if offset < GEOMETRY.data_offset() {
            for (unit, word) in
                ((offset - GEOMETRY.commit_offset()) / 8..).zip(bytes.chunks_exact_mut(8))
            {
                word.copy_from_slice(&self.commit(unit).to_le_bytes());
            }
        } else {
            let there = self.input.borrow_mut().take(bytes.len());
            bytes.iter_mut().zip(there).for_each(|(to, from)| *to = *from);
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Infallible> {
        let length = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        assert!(
            offset.saturating_add(length) <= GEOMETRY.commit_offset(),
            "writes {length} bytes at {offset:#x}"
        );
        if let (EVENT_TAIL_AT, Some(word)) = (offset, bytes.first_chunk::<8>()) {
            self.consumed.set(u64::from_le_bytes(*word));
        }
        Ok(())
    }
}

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    if input.u8() & 1 == 0 {
        if let Ok(Some(record)) = decode(input.rest()) {
            see(record);
        }
        return;
    }
    let consumed = Cell::new(u64::from(input.u32()));
    let actions = input.take(6);
    let liar = HostileRegion { input: RefCell::new(input), consumed };
    let Ok(mut consumer) = Consumer::open(liar, GEOMETRY.region_bytes()) else { return };
    let mut scratch = vec![0; MIN_SCRATCH_BYTES];
    for action in actions {
        let right = match action % 5 {
            0 => consumer.skip_hole(&mut scratch, action & 64 == 0).is_ok(),
            1 => consumer
                .request(&[Request::Detach; 20])
                .map(|written| assert!(written <= 8))
                .is_ok(),
            kind => {
                let quota =
                    if kind == 2 { Quota { records: 2, bytes: 1 << 10 } } else { Quota::RING };
                consumer
                    .drain(&mut scratch, quota, &mut see)
                    .map(|drained| {
                        let records =
                            drained.records + drained.unknown + drained.skipped + drained.malformed;
                        assert!(
                            records <= drained.units && drained.units <= GEOMETRY.units,
                            "{drained:?}"
                        );
                        assert!(drained.units * UNIT_BYTES <= quota.bytes, "{drained:?}");
                    })
                    .is_ok()
            }
        };
        if !right {
            break; // the daemon gives a liar's region up
        }
    }
}

/// Looks at every part of a record.
fn see(record: Record<'_>) {
    match record.body {
        RecordBody::Method { ranges, il_map: Some(map), .. } => {
            black_box((ranges.pairs().count(), map.iter().count()));
        }
        RecordBody::Method { ranges, .. } | RecordBody::CodeUnloaded { ranges, .. } => {
            black_box(ranges.pairs().count());
        }
        RecordBody::ObjectsDead(words)
        | RecordBody::ObjectsAlive(words)
        | RecordBody::ObjectsDropped { samples: words, .. } => {
            black_box(words.iter().count());
        }
        _ => {}
    }
    black_box(record);
}
