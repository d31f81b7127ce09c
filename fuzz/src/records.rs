//! Bytes of the BPF ring and of perf's rings → events.

use crate::input::Input;
use perfusion_model::event::EventKind;
use perfusion_sources::kernel::decode::{perf_records, ring_record};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    if input.u8() & 1 == 0 {
        let record = input.rest();
        if let Ok(event) = ring_record(record) {
            if let EventKind::CpuSample(sample) = &event.kind {
                let held = sample.kernel.len() * 8
                    + sample.user.as_ref().map_or(0, |user| user.stack.len());
                assert!(held <= record.len(), "no more than the record brought");
            }
            black_box(event);
        }
    } else {
        let (records, mut seen) = (input.rest(), 0);
        black_box(
            perf_records(records, &mut |record| {
                seen += 1;
                black_box(record.ok());
            })
            .ok(),
        );
        assert!(seen * 8 <= records.len(), "each record has at least its header");
    }
}
