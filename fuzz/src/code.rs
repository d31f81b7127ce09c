//! Machine code → rule: epilogues, stubs, code without unwind data, and the call before a return
//! address.

use crate::input::Input;
use perfusion_unwind::encode::encode;
use perfusion_unwind::machine::TargetMachine;
use perfusion_unwind::managed::CODE_BYTES;
use perfusion_unwind::native::ALL;
use perfusion_unwind::rule::{Cfa, Rule};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let address = input.u64();
    let start = address.wrapping_sub(u64::from(input.u16()));
    let function = start..start.saturating_add(u64::from(input.u16()));
    let code = input.take(CODE_BYTES);
    for machine in ALL {
        let rules = [
            (machine.code.epilogue)(code, address, &function),
            (machine.code.stub)(code, address).ok(),
        ];
        for rule in rules.into_iter().flatten() {
            check(machine, &rule);
        }
        if let Some(body) = machine.code.body {
            let mut read = |at: u64, into: &mut [u8]| {
                let from = at
                    .checked_sub(address)
                    .and_then(|offset| code.get(usize::try_from(offset).ok()?..));
                let length = from.map_or(0, |from| from.len().min(into.len()));
                into.iter_mut().zip(from.unwrap_or_default()).for_each(|(to, byte)| *to = *byte);
                length
            };
            for exact in [true, false] {
                let at = address.wrapping_add(code.len() as u64 / 2);
                if let Ok(rule) = (body.rule)(&mut read, at, exact)
                    && !rule.is_thread_start()
                {
                    check(machine, &rule);
                }
                black_box((body.is_behind_entry)(&mut read, address, at));
            }
        }
        black_box((machine.code.ends_with_call)(code));
        black_box(machine.code.signal_return.and_then(|signal_return| signal_return(code)));
    }
}

/// Code is only ever left by a register plus an offset, and has a caller.
fn check(machine: &TargetMachine, rule: &Rule) {
    assert!(matches!(rule.cfa, Cfa::Register { .. }), "{rule:?}");
    assert!(!rule.is_thread_start(), "{rule:?}");
    black_box(encode(machine, rule));
}
