//! Why a region cannot be read: it is inaccessible, or its content contradicts itself.

use crate::layout::{MAGIC, VERSION};

/// What went wrong. All but `Memory` mean that the region lies or is not one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsumerError<E> {
    /// The region could not be read or written.
    Memory(E),
    /// The first word is not the magic one (yet).
    NotARegion {
        /// What it is.
        found: u64,
    },
    /// A layout this daemon does not know.
    Version {
        /// Its number.
        found: u32,
    },
    /// The header's sizes contradict each other or the file's size.
    Geometry {
        /// Offset of the field that does.
        field: u64,
        /// Its value.
        found: u64,
    },
    /// event_head went back, or further ahead than the ring is long.
    HeadJump {
        /// Units consumed.
        tail: u64,
        /// What event_head says.
        head: u64,
    },
    /// A commit word with an impossible size.
    Commit {
        /// The record's position.
        position: u64,
        /// Units it claims.
        units: u64,
        /// Bytes it claims.
        bytes: u64,
    },
    /// request_tail is ahead of request_head, or further behind than the ring is long.
    RequestTail {
        /// Requests written.
        head: u64,
        /// What request_tail says.
        tail: u64,
    },
    /// A state that does not exist.
    State {
        /// What it says.
        found: u64,
    },
    /// The caller's scratch memory is too small.
    Scratch {
        /// Bytes given.
        bytes: usize,
    },
}

impl<E: core::fmt::Display> core::fmt::Display for ConsumerError<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Memory(error) => write!(f, "the region cannot be accessed: {error}"),
            Self::NotARegion { found } => {
                write!(f, "expected the magic word {MAGIC:#x}, found {found:#x}")
            }
            Self::Version { found } => {
                write!(f, "expected layout version {VERSION}, found {found}")
            }
            Self::Geometry { field, found } => {
                write!(f, "impossible value {found:#x} in the header at {field:#x}")
            }
            Self::HeadJump { tail, head } => {
                write!(f, "event_head {head} does not follow consumed {tail}")
            }
            Self::Commit { position, units, bytes } => {
                write!(f, "record {position} claims {units} units and {bytes} bytes")
            }
            Self::RequestTail { head, tail } => {
                write!(f, "request_tail {tail} does not fit {head} requests")
            }
            Self::State { found } => write!(f, "unknown state {found}"),
            Self::Scratch { bytes } => write!(f, "{bytes} bytes of scratch memory are too few"),
        }
    }
}

impl<E: core::error::Error + 'static> core::error::Error for ConsumerError<E> {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}
