//! `.eh_frame_hdr`, `.eh_frame` and `.debug_frame` → rule.

use crate::input::Input;
use perfusion_unwind::eh_frame::{
    CfiSection, FarSections, FdeRule, FileBytes, FileSection, UnwindSections,
};
use perfusion_unwind::encode::encode;
use perfusion_unwind::machine::TargetMachine;
use perfusion_unwind::native::ALL;
use perfusion_unwind::rule::{RuleRefusal, Saved};
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    for machine in ALL {
        run_on(machine, data);
    }
}

fn run_on(machine: &'static TargetMachine, data: &[u8]) {
    let mut input = Input::new(data);
    let addresses = [input.u64(), input.u64()];
    let mut section = |part: fn(&mut Input<'_>) -> Vec<u8>| {
        let address = input.u64();
        let bytes = part(&mut input);
        (!bytes.is_empty()).then_some(CfiSection { address, bytes })
    };
    let (hdr, eh) = (section(|i| i.part().to_vec()), section(|i| i.part().to_vec()));
    let debug = section(|i| i.rest().to_vec());
    let far = hdr.as_ref().zip(eh.as_ref()).and_then(|(hdr, eh)| far(machine, hdr, eh));
    let sections = UnwindSections::of(machine, hdr, eh, debug);
    for address in addresses {
        check(machine, address, sections.rule(address));
        if let Some((file, sections)) = &far {
            check(machine, address, sections.rule_in(file, address));
        }
    }
}

fn check(machine: &TargetMachine, address: u64, found: Result<FdeRule, RuleRefusal>) {
    if let Ok(found) = found {
        assert!(found.function.contains(&address), "{address:#x}: {found:?}");
        assert!(found.rule.return_address != Saved::Same, "{found:?}");
        black_box((found.saves_below_stack(), encode(machine, &found.rule)));
    }
}

/// A file of these bytes.
struct File(Vec<u8>);

impl FileBytes for File {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> usize {
        let there =
            usize::try_from(offset).ok().and_then(|at| self.0.get(at..)).unwrap_or_default();
        let length = there.len().min(into.len());
        into[..length].copy_from_slice(&there[..length]);
        length
    }
}

/// The two sections left in a file.
fn far(
    machine: &'static TargetMachine,
    hdr: &CfiSection,
    eh: &CfiSection,
) -> Option<(File, UnwindSections)> {
    let file = File([&hdr.bytes[..], &eh.bytes].concat());
    let place = |section: &CfiSection, offset: usize| FileSection {
        address: section.address,
        offset: offset as u64,
        bytes: section.bytes.len() as u64,
    };
    let mut sections = UnwindSections::of(machine, None, None, None);
    sections.far = Some(FarSections::new(place(hdr, 0), place(eh, hdr.bytes.len()), &file)?);
    Some((file, sections))
}
