//! Unwind information of both machines, chained and packed too → rule.

use crate::input::Input;
use perfusion_unwind::encode::encode;
use perfusion_unwind::managed::{FunctionOffset, RuntimeFunction};
use perfusion_unwind::native::ALL;
use perfusion_unwind::rule::{Cfa, Saved};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let offset = match input.u8() {
        255 => input.u32(),
        near => u32::from(near),
    };
    let info = input.rest();
    let read = |at: u32, into: &mut [u8]| {
        let there = usize::try_from(at).ok().and_then(|at| info.get(at..)).unwrap_or_default();
        let length = there.len().min(into.len());
        into[..length].copy_from_slice(&there[..length]);
        length
    };
    for machine in ALL {
        let format = &machine.unwind_info;
        let unwind = |at: u32| (format.info)(at, &read);
        let entry = (format.entry)(info, &read);
        let whole = RuntimeFunction { begin: 0, end: u32::MAX, unwind: 0 };
        for function in [Some(whole), entry].into_iter().flatten() {
            let at = FunctionOffset { function, offset, exact: false, base: 0 };
            let Ok(rule) = (format.rule)(at, &unwind, &read) else { continue };
            assert!(matches!(rule.cfa, Cfa::Register { .. }), "{rule:?}");
            assert!(!rule.is_thread_start(), "{rule:?}");
            if machine.link.is_none() {
                assert_eq!(rule.return_address, Saved::AtCfa(-8), "{rule:?}");
            }
            assert_eq!(
                rule.registers[machine.stack_pointer.index()],
                Saved::CfaPlus(0),
                "{rule:?}"
            );
            black_box(encode(machine, &rule));
        }
    }
}
