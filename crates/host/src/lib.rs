//! What is read of processes and of the machine from outside.

pub mod cpus;
pub mod io_priority;
pub mod leftover;
pub mod pods;
pub mod priority;
pub mod process;
pub mod system_limits;
