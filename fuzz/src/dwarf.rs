//! An ELF file with debug information, and addresses in it → lines and inlined functions.

use crate::input::Input;
use perfusion_symbolize::dwarf;

/// Functions at one address, at most.
const MAX_DEPTH: usize = 64;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let first = u64::from(input.u16());
    let addresses: Vec<u64> = (0..64).map(|at| first + at).collect();
    let found = dwarf::lines_in(input.rest(), &addresses);
    assert_eq!(found.len(), addresses.len());
    for (inlined, line) in &found {
        assert!(inlined.len() <= MAX_DEPTH, "{} functions at one address", inlined.len());
        let lines = inlined.iter().filter_map(|function| function.line.as_ref()).chain(line);
        assert!(lines.into_iter().all(|line| line.line > 0), "lines begin at 1");
        assert!(inlined.iter().all(|function| !function.name.is_empty()), "all have names");
    }
}
