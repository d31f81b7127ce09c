//! A managed heap as a graph of objects, references and roots.
//!
//! [`collect`] asks a runtime for a survey and [`walk`] reads its events into a [`graph`].
//! [`paths`] finds what retains objects, [`dominators`] what goes when one object goes. [`text`]
//! prints both.

pub mod collect;
pub mod dominators;
pub mod graph;
pub mod memory_plan;
pub mod paths;
pub mod read_ahead;
pub mod retained;
pub mod text;
pub mod walk;
