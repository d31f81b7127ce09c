//! 3. SAMPLE: an event's context becomes a stack ([`stack::StackId`]) of [`frame::FrameKey`]s: addresses are fixed to (file or method body,
//!    process epoch) here, because JIT addresses get reused. No names here.

pub mod frame;
pub mod stack;
