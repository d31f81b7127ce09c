//! What is read of processes and of the machine from outside.
//!
//! [`process`] has the handle of a process, guarded reads, its mappings and images, its name and
//! service, and the table of all processes. `process::code_view` decides which unwind rule an
//! address has. [`cpus`], [`system_limits`] and [`pods`] describe the machine and the node.
//! [`abandoned`] keeps threads that nobody can end.

pub mod abandoned;
pub mod cpus;
mod io_priority;
pub mod locked_files;
pub mod pods;
pub mod priority;
pub mod process;
pub mod system_limits;
