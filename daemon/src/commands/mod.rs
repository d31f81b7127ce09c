//! The commands, one module each. What several need stands in `output` and `target`.

pub mod config;
pub mod doctor;
pub mod dump;
pub mod heap;
pub mod inspect;
pub mod internal;
pub mod leaks;
pub mod manual;
mod output;
pub mod ps;
pub mod record;
pub mod reference;
pub mod report;
pub mod symbols;
mod target;
