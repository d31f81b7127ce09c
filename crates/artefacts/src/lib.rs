//! The eBPF object and the shim as bytes. The program carries both, loads the one into the kernel
//! and the other into .NET processes. It provides them as it starts, so that the libraries need not
//! be built anew when one of the two changes.

use std::fs;
use std::io;
use std::sync::OnceLock;

/// The two files. One that is empty was left out of the build.
#[derive(Clone, Copy, Debug)]
pub struct Artefacts {
    /// The eBPF object, aligned to eight bytes for the reader of ELF files.
    pub probes: &'static [u8],
    /// The shim library.
    pub shim: &'static [u8],
}

static PROVIDED: OnceLock<Artefacts> = OnceLock::new();

/// Provides the files to this process. The first call counts.
pub fn provide(artefacts: Artefacts) {
    PROVIDED.get_or_init(|| artefacts);
}

/// Provides the files that `PERFUSION_PROBES` and `PERFUSION_SHIM` name, for tests that load them
/// without the program. A variable that is not set leaves its file out.
///
/// # Errors
/// A file that is named and cannot be read.
pub fn provide_from_environment() -> io::Result<()> {
    if PROVIDED.get().is_some() {
        return Ok(());
    }
    let read = |variable: &str| -> io::Result<&'static [u8]> {
        let Some(path) = std::env::var_os(variable) else { return Ok(&[]) };
        Ok(fs::read(path)?.leak())
    };
    provide(Artefacts { probes: read("PERFUSION_PROBES")?, shim: read("PERFUSION_SHIM")? });
    Ok(())
}

/// The eBPF object, or `None` when this program was built without it.
#[must_use]
pub fn probes() -> Option<&'static [u8]> {
    PROVIDED.get().map(|provided| provided.probes).filter(|bytes| !bytes.is_empty())
}

/// The shim library, or `None` when this program was built without it.
#[must_use]
pub fn shim() -> Option<&'static [u8]> {
    PROVIDED.get().map(|provided| provided.shim).filter(|bytes| !bytes.is_empty())
}
