//! The processor: how a system call is made and its numbers, where a thread's control block is, and
//! what captures registers and copies stack. One file each, and only here.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{call, number};
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{capture, copy_words, thread_block};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{call, number};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{capture, copy_words, thread_block};
