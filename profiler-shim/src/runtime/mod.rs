//! Calls into the runtime: COM by hand, by the numbers of slots. Interfaces and slot numbers:
//! dotnet/runtime `src/coreclr/inc/corprof.idl`, `cor.h`.

pub(crate) mod describe;
pub(crate) mod guid;
pub(crate) mod heap;
pub(crate) mod hresult;
pub(crate) mod info;
pub(crate) mod metadata;
mod slot;
