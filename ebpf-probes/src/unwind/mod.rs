//! User stacks: walked here by the rules the daemon has taught, copied from the first frame without a rule on.

pub(crate) mod copy;
pub(crate) mod walk;
