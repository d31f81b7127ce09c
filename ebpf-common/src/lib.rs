//! See the crate description.
#![cfg_attr(not(test), no_std)]
