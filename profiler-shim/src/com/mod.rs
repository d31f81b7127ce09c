//! The boundary to the runtime, in both directions: COM by hand. Thunks of a few lines, safe code
//! behind them. Interfaces and slot numbers: dotnet/runtime `src/coreclr/inc/corprof.idl`, `cor.h`.

pub mod callback;
pub mod exact;
pub mod factory;
pub mod guid;
pub mod hresult;
pub mod info;
pub mod metadata;
pub mod object;
mod slot;
mod unknown;
pub mod vtable;
