//! `.eh_frame_hdr`, `.eh_frame` and `.debug_frame` → rule.

use crate::input::Input;
use perfusion::unwind::eh_frame::{Section, UnwindSections};
use perfusion::unwind::encode::encode;
use perfusion::unwind::machine::{ALL, Machine};
use perfusion::unwind::rule::Saved;
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    for machine in ALL {
        run_on(machine, data);
    }
}

fn run_on(machine: &'static Machine, data: &[u8]) {
    let mut input = Input::new(data);
    let addresses = [input.u64(), input.u64()];
    let mut section = |part: fn(&mut Input<'_>) -> Vec<u8>| {
        let address = input.u64();
        let bytes = part(&mut input);
        (!bytes.is_empty()).then_some(Section { address, bytes })
    };
    let (hdr, eh) = (section(|i| i.part().to_vec()), section(|i| i.part().to_vec()));
    let debug = section(|i| i.rest().to_vec());
    let sections = UnwindSections::of(machine, hdr, eh, debug);
    for address in addresses {
        if let Ok(found) = sections.rule(address) {
            assert!(found.function.contains(&address), "{address:#x}: {found:?}");
            assert!(found.rule.return_address != Saved::Same, "{found:?}");
            black_box((found.saves_below_stack(), encode(machine, &found.rule)));
        }
    }
}
