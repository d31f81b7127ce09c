//! Machine code → rule: epilogues, stubs, and the call before a return address.

use crate::input::Input;
use perfusion::unwind::encode::encode;
use perfusion::unwind::epilogue::{CODE_BYTES, ends_with_call, epilogue, stub};
use perfusion::unwind::rule::{Cfa, Rule};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let address = input.u64();
    let start = address.wrapping_sub(u64::from(input.u16()));
    let function = start..start.saturating_add(u64::from(input.u16()));
    let code = input.take(CODE_BYTES);
    for rule in [epilogue(code, address, &function), stub(code, address).ok()].into_iter().flatten() {
        check(&rule);
    }
    black_box(ends_with_call(code));
}

/// Code is only ever left by a register plus an offset, and has a caller.
fn check(rule: &Rule) {
    assert!(matches!(rule.cfa, Cfa::Register { .. }), "{rule:?}");
    assert!(!rule.is_thread_start(), "{rule:?}");
    black_box(encode(rule));
}
