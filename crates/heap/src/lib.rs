//! A heap as a graph: objects, references, roots, by events; retention paths and dominators.

pub mod collect;
pub mod dominators;
pub mod graph;
pub mod held;
pub mod memory_plan;
pub mod paths;
pub mod read_ahead;
pub mod text;
pub mod walk;
