//! The eBPF object and the shim inside the program's file.

use perfusion_artefacts::Artefacts;

/// Bytes aligned as the ELF reader wants them.
#[repr(C, align(32))]
struct Aligned<T: ?Sized>(T);

static PROBES: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/probes.o")));

/// What `build.rs` found. A file that was left out of the build is empty.
pub(crate) fn artefacts() -> Artefacts {
    Artefacts { probes: &PROBES.0, shim: include_bytes!(concat!(env!("OUT_DIR"), "/shim.so")) }
}

#[cfg(test)]
mod tests {
    use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget};

    /// BPF_STX | BPF_ATOMIC | BPF_DW, which was BPF_XADD before 5.12 (include/uapi/linux/bpf.h).
    const ATOMIC_64: u8 = 0xdb;
    /// Which atomic instruction is the probes' barrier, by its constant: BPF_ADD, and BPF_XCHG
    /// where that is none (`machine::barrier` there).
    const BARRIER: u32 = if cfg!(target_arch = "x86_64") { 0 } else { 0xe1 };
    /// BPF_LD | BPF_IMM | BPF_DW.
    const LOAD_64: u8 = 0x18;

    /// The object, unless this was built alone, as `cargo check` does it.
    fn probes() -> Option<&'static [u8]> {
        Some(super::artefacts().probes).filter(|bytes| !bytes.is_empty())
    }

    /// A program's instructions: code and constant.
    fn instructions(name: &str) -> Option<Vec<(u8, u32)>> {
        let object = object::File::parse(probes()?).unwrap();
        let symbol = object.symbol_by_name(name).unwrap();
        let section = object.section_by_index(symbol.section_index().unwrap()).unwrap();
        let code = section.data_range(symbol.address(), symbol.size()).unwrap().unwrap();
        let read = |&[code, _, _, _, constant @ ..]: &[u8; 8]| (code, u32::from_le_bytes(constant));
        Some(code.as_chunks::<8>().0.iter().map(read).collect())
    }

    /// How often a program loads the address of a function: what comes from where functions are, by
    /// an instruction that is no call.
    fn functions_named(name: &str) -> Option<usize> {
        let object = object::File::parse(probes()?).unwrap();
        let symbol = object.symbol_by_name(name).unwrap();
        let section = object.section_by_index(symbol.section_index().unwrap()).unwrap();
        let functions = object.section_by_name(".text").unwrap().index();
        let is_function = |offset: u64, target: RelocationTarget| {
            let RelocationTarget::Symbol(index) = target else { return false };
            let code = section.data_range(offset, 8).unwrap().unwrap();
            code.first() == Some(&LOAD_64)
                && object.symbol_by_index(index).unwrap().section_index() == Some(functions)
        };
        let range = symbol.address()..symbol.address() + symbol.size();
        let all = section.relocations().filter(|(offset, _)| range.contains(offset));
        Some(all.filter(|(offset, relocation)| is_function(*offset, relocation.target())).count())
    }

    /// The kernel and aya read types and lines (BTF). DWARF was most of the object.
    #[test]
    fn the_object_has_types_and_no_other_debug_information() {
        let Some(probes) = probes() else { return };
        let object = object::File::parse(probes).unwrap();
        let names: Vec<&str> = object.sections().map(|section| section.name().unwrap()).collect();
        assert!(names.contains(&".BTF") && names.contains(&".BTF.ext"), "{names:?}");
        assert!(!names.iter().any(|name| name.contains(".debug_")), "{names:?}");
    }

    /// The iterator notes its scan and then looks at the state, a switch-in stores the state and
    /// then looks for a scan: without a full barrier in both, each can miss the other. No test can
    /// win that race, so the barriers themselves are looked for.
    #[test]
    fn a_scan_and_the_end_of_a_wait_have_a_barrier_each() {
        for program in ["sched_switch", "off_cpu_threads"] {
            let Some(instructions) = instructions(program) else { return };
            assert!(instructions.contains(&(ATOMIC_64, BARRIER)), "{program}");
        }
    }

    /// What 5.10 refuses before it looks whether it is ever reached (`resolve_pseudo_ldimm64`,
    /// kernel/bpf/verifier.c).
    #[test]
    fn programs_for_older_kernels_have_nothing_those_do_not_know() {
        let programs = [
            "copying_sample",
            "copying_switch",
            "copying_waking",
            "sched_wakeup_new",
            "sched_process_fork",
            "sched_process_exec",
            "sched_process_free",
            "task_rename",
        ];
        // Elsewhere the oldest kernel is one that has the barrier.
        let programs = if cfg!(target_arch = "x86_64") { &programs[..] } else { &[] };
        for program in programs {
            let Some(instructions) = instructions(program) else { return };
            for (code, constant) in instructions {
                assert!(
                    code != ATOMIC_64 || constant == 0,
                    "{program}: an atomic instruction of 5.12"
                );
            }
            assert_eq!(functions_named(program), Some(0), "{program}");
        }
        // It is found where it is.
        assert!(functions_named("sched_switch").is_none_or(|functions| functions > 0));
    }
}
