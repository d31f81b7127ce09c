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
