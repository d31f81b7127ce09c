//! BTF → offsets and prototypes.

use perfusion_sources::kernel::btf::KernelBtf;
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    if let Ok(btf) = KernelBtf::parse(data) {
        for (name, field) in [("outer", "a"), ("outer", "b"), ("", "")] {
            black_box(btf.offset_of(name, field).ok());
        }
        for name in ["t", ""] {
            black_box(btf.tracepoint(name).ok());
        }
    }
}
