//! What the runtime calls: COM by hand. Thunks of a few lines, safe code behind them. Interfaces
//! and slot numbers: dotnet/runtime `src/coreclr/inc/corprof.idl`.

pub(crate) mod callback;
pub(crate) mod exact;
pub mod factory;
pub(crate) mod host;
pub(crate) mod object;
mod unknown;
pub(crate) mod vtable;
