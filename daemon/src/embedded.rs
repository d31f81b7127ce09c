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
    use object::{Object as _, ObjectSection as _};

    /// `lock *(u64 *)(dst + off) = xchg(src)`: BPF_STX | BPF_ATOMIC | BPF_DW and, in the constant, BPF_XCHG (include/uapi/linux/bpf.h).
    const XCHG_64: (u8, u32) = (0xdb, 0xe1);

    /// The iterator notes its visit and then looks at the state, a switch-in stores the state and then looks for a visit: without a full
    /// barrier in both, each can miss the other. No test can win that race, so the barriers themselves are looked for.
    #[test]
    fn a_visit_and_the_end_of_a_wait_have_a_barrier_each() {
        // Built alone, as `cargo check` does it.
        let Some(probes) = super::probes() else { return };
        let object = object::File::parse(probes).unwrap();
        for section in ["tp_btf/sched_switch", "iter.s/task"] {
            let code = object.section_by_name(section).unwrap().data().unwrap();
            let (instructions, _) = code.as_chunks::<8>();
            let is_barrier =
                |&[code, _, _, _, constant @ ..]: &[u8; 8]| (code, u32::from_le_bytes(constant)) == XCHG_64;
            assert!(instructions.iter().any(is_barrier), "{section}");
        }
    }
}
