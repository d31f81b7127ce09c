//! UNWIND_INFO, chained ones too → rule.

use crate::input::Input;
use perfusion::unwind::encode::encode;
use perfusion::unwind::rule::{Cfa, Register, Saved};
use perfusion::unwind::unwind_info::{MAX_BYTES, RuntimeFunction, rule};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let offset = match input.u8() {
        255 => input.u32(),
        near => u32::from(near),
    };
    let info = input.rest();
    let function = RuntimeFunction { begin: 0, end: u32::MAX, unwind: 0 };
    let read = |at: u32| {
        let there = info.get(usize::try_from(at).ok()?..)?;
        Some(there.get(..MAX_BYTES).unwrap_or(there).to_vec())
    };
    if let Ok(rule) = rule(function, offset, read) {
        assert!(matches!(rule.cfa, Cfa::Register { .. }), "{rule:?}");
        assert_eq!(rule.return_address, Saved::AtCfa(-8), "{rule:?}");
        assert_eq!(rule.registers[Register::RSP.index()], Saved::CfaPlus(0), "{rule:?}");
        black_box(encode(&rule));
    }
}
