//! A PE file → its debug directory, and the PDB in it; a portable PDB → documents and lines.

use crate::input::Input;
use perfusion_symbolize::pe_debug::{DebugDirectory, MAX_PDB_BYTES};
use perfusion_symbolize::portable_pdb::PortablePdb;
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (row, document) = (input.u16(), input.u16());
    let file = input.rest();
    let read = |at: u64, into: &mut [u8]| {
        let from = usize::try_from(at).ok().and_then(|at| file.get(at..));
        let there = from.and_then(|from| from.get(..into.len()));
        there.map(|there| into.copy_from_slice(there)).is_some()
    };
    if let Some(directory) = DebugDirectory::read(&read) {
        black_box(&directory.pdb);
        if let Some(pdb) = directory.embedded_pdb(&read) {
            assert!(pdb.len() <= MAX_PDB_BYTES as usize, "{} bytes", pdb.len());
            look(pdb, row, document);
        }
    }
    look(file.to_vec(), row, document);
}

fn look(file: Vec<u8>, row: u16, document: u16) {
    let length = file.len();
    let Some(pdb) = PortablePdb::parse(file) else { return };
    assert_eq!(pdb.held_bytes(), length, "no more than the file");
    for token in [row, row.wrapping_add(1)].map(|row| 0x0600_0000 | u32::from(row)) {
        let Some(points) = pdb.sequence_points(token) else { continue };
        assert!(points.is_sorted_by(|one, next| one.il < next.il), "{points:?}");
        assert!(points.iter().all(|point| point.line != Some(0)), "lines begin at 1");
        assert!(points.len() <= length, "a point takes more than a byte");
        if let Some(point) = points.first() {
            black_box(pdb.document(point.document));
        }
    }
    let name = pdb.document(document.into());
    assert!(name.is_none_or(|name| name.len() <= 4096), "a bounded name");
}
