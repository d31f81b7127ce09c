//! What the runtime calls: COM by hand. Thunks of a few lines, safe code behind them. Interfaces
//! and slot numbers: dotnet/runtime `src/coreclr/inc/corprof.idl`.

pub mod callback;
pub mod exact;
pub mod factory;
pub mod host;
pub mod object;
mod unknown;
pub mod vtable;
