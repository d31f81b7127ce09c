//! Fuzz targets for all that reads what a profiled process, its files or the kernel hand us. Each
//! takes any bytes and panics when a promise is broken: that reading ends, within bounds, with an
//! answer that can be true. `cargo xtask fuzz` lets the engine look for such bytes (`main.rs`);
//! `cargo test` runs every target on the corpus (`tests/corpus.rs`).

mod btf;
mod code;
mod dwarf;
mod eh_frame;
mod elf;
mod finish;
mod heap;
mod input;
mod jit;
mod maps;
mod pdb;
mod pe;
mod records;
mod region;
mod unwind_info;

/// A target runs on the fuzzer's bytes.
pub type Target = fn(&[u8]);

/// All targets; the corpus of each is the folder of its name.
pub const TARGETS: [(&str, Target); 14] = [
    ("btf", btf::run),
    ("code", code::run),
    ("dwarf", dwarf::run),
    ("eh_frame", eh_frame::run),
    ("elf", elf::run),
    ("finish", finish::run),
    ("heap", heap::run),
    ("jit", jit::run),
    ("maps", maps::run),
    ("pdb", pdb::run),
    ("pe", pe::run),
    ("records", records::run),
    ("region", region::run),
    ("unwind_info", unwind_info::run),
];
