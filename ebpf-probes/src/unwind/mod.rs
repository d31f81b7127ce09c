//! User stacks: copied here, walked by the daemon.

pub(crate) mod copy;
