//! Memory of a CLR process → method body → rule.

use crate::input::{Block, Input};
use perfusion_unwind::machine::TargetMachine;
use perfusion_unwind::managed::{JitBody, MAX_BODY_BYTES, SearchBudget};
use perfusion_unwind::native::ALL;
use std::hint::black_box;

/// Where the made-up code heap is: low, so that small numbers are pointers into it.
const HEAP: u64 = 0x1_0000;
/// As many bytes as the daemon lets one process have searched at once are far more than one input
/// holds.
const BUDGET_BYTES: u64 = 64 << 10;

pub(crate) fn run(data: &[u8]) {
    for machine in ALL {
        run_on(machine, data);
    }
}

fn run_on(machine: &TargetMachine, data: &[u8]) {
    let mut input = Input::new(data);
    let pc = HEAP + u64::from(input.u16());
    let memory = Block { address: HEAP, bytes: input.rest() };
    let mut budget = SearchBudget { bytes: BUDGET_BYTES };
    let found = JitBody::find(machine, &memory, pc, HEAP, &mut budget);
    if let Ok(Some(body)) = &found {
        assert!(
            body.range.contains(&pc) && body.range.end - body.range.start <= MAX_BODY_BYTES,
            "{body:?}"
        );
        assert_eq!(body.is_current(machine, &memory), Some(true), "nothing has changed since");
        for exact in [true, false] {
            if let Ok(rule) = body.rule(machine, &memory, pc, exact) {
                black_box((machine.code.hijack)(rule, pc - body.range.start).ok());
            }
        }
    }
    let code = usize::try_from(pc - HEAP).ok().and_then(|at| memory.bytes.get(at..));
    black_box((machine.code.stub)(code.unwrap_or_default(), pc).ok());
}
