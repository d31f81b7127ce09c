//! Calls into the runtime: COM by hand, by the numbers of slots. Interfaces and slot numbers:
//! dotnet/runtime `src/coreclr/inc/corprof.idl`, `cor.h`.

pub mod describe;
pub mod guid;
pub mod heap;
pub mod hresult;
pub mod info;
pub mod metadata;
mod slot;
