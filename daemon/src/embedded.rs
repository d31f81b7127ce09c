//! The two parts that live in other worlds and travel inside this binary.

/// Bytes aligned as the ELF reader wants them.
#[repr(C, align(32))]
struct Aligned<T: ?Sized>(T);

static PROBES: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/probes.o")));
static SHIM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shim.so"));

/// The eBPF object, or `None` when this binary was built without it.
#[must_use]
pub fn probes() -> Option<&'static [u8]> {
    Some(&PROBES.0).filter(|bytes| !bytes.is_empty())
}

/// The shim library, or `None` when this binary was built without it.
#[must_use]
pub fn shim() -> Option<&'static [u8]> {
    Some(SHIM).filter(|bytes| !bytes.is_empty())
}

#[cfg(test)]
mod tests {
    use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

    /// BPF_STX | BPF_ATOMIC | BPF_DW, which was BPF_XADD before 5.12 (include/uapi/linux/bpf.h).
    const ATOMIC_64: u8 = 0xdb;
    /// Which atomic instruction is the probes' barrier, by its constant: BPF_ADD, and BPF_XCHG where that is none (`machine::barrier` there).
    const BARRIER: u32 = if cfg!(target_arch = "x86_64") { 0 } else { 0xe1 };
    /// BPF_LD | BPF_IMM | BPF_DW, and the register that makes it the address of a function.
    const LOAD_64: u8 = 0x18;
    const PSEUDO_FUNC: u8 = 4;

    /// A program's instructions: code, registers, constant.
    fn instructions(name: &str) -> Option<Vec<(u8, u8, u32)>> {
        // Built alone, as `cargo check` does it.
        let object = object::File::parse(super::probes()?).unwrap();
        let symbol = object.symbol_by_name(name).unwrap();
        let section = object.section_by_index(symbol.section_index().unwrap()).unwrap();
        let code = section.data_range(symbol.address(), symbol.size()).unwrap().unwrap();
        let read = |&[code, registers, _, _, constant @ ..]: &[u8; 8]| {
            (code, registers, u32::from_le_bytes(constant))
        };
        Some(code.as_chunks::<8>().0.iter().map(read).collect())
    }

    /// The iterator notes its visit and then looks at the state, a switch-in stores the state and then looks for a visit: without a full
    /// barrier in both, each can miss the other. No test can win that race, so the barriers themselves are looked for.
    #[test]
    fn a_visit_and_the_end_of_a_wait_have_a_barrier_each() {
        for program in ["sched_switch", "sleepers"] {
            let Some(instructions) = instructions(program) else { return };
            let is_barrier = |&(code, _, constant): &(u8, u8, u32)| (code, constant) == (ATOMIC_64, BARRIER);
            assert!(instructions.iter().any(is_barrier), "{program}");
        }
    }

    /// What 5.10 refuses before it looks whether it is ever reached (`resolve_pseudo_ldimm64`, kernel/bpf/verifier.c).
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
        ];
        // Elsewhere the oldest kernel is one that has the barrier.
        let programs = if cfg!(target_arch = "x86_64") { &programs[..] } else { &[] };
        for program in programs {
            let Some(instructions) = instructions(program) else { return };
            for (code, registers, constant) in instructions {
                assert!(code != ATOMIC_64 || constant == 0, "{program}: an atomic instruction of 5.12");
                assert!(code != LOAD_64 || registers >> 4 != PSEUDO_FUNC, "{program}: a function's address");
            }
        }
        // It is found where it is.
        let Some(walks) = instructions("sched_switch") else { return };
        assert!(walks.iter().any(|(code, registers, _)| *code == LOAD_64 && registers >> 4 == PSEUDO_FUNC));
    }
}
