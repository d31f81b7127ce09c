//! What the table of processes counts.

/// What the table lost or gave up, and why; each grows only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessTableCounters {
    /// Times a process was not taken up because the table was full: at its start, and at each of
    /// its stacks.
    pub processes_refused: u64,
    /// Mappings not taken because a process had too many.
    pub mappings_refused: u64,
    /// Mapped files that could not be opened or identified.
    pub images_failed: u64,
    /// Times some of a process's remembered rules or methods were dropped because they were too
    /// many.
    pub steps_cleared: u64,
    /// Times what was remembered of the process sampled longest ago was dropped, because that of
    /// all was too much.
    pub caches_evicted: u64,
    /// Look-ups put off because a process had used its share of work.
    pub budget_refusals: u64,
    /// Times maps were read again because no mapping covered an address.
    pub refreshes: u64,
    /// Method bodies found replaced by others without notice.
    pub bodies_replaced: u64,
    /// Stacks of processes that were gone.
    pub stacks_of_gone_processes: u64,
    /// Times records of processes were lost, so that all that run were read anew.
    pub doubts: u64,
    /// Times the mappings of the process sampled longest ago were dropped, because those of all
    /// were too much.
    pub mappings_evicted: u64,
    /// Rules pushed to the probes.
    pub rules_pushed: u64,
    /// Rules not pushed because a process had its share.
    pub rules_refused: u64,
    /// Stacks the probes walked by rules of code that was replaced meanwhile.
    pub stacks_stale: u64,
    /// Pieces of sleeping threads' stacks read beyond their copies.
    pub stack_pieces: u64,
    /// Stacks finished.
    pub stacks: u64,
    /// Of these, stacks that did not reach the thread's start, but for those of the next line.
    pub stacks_broken: u64,
    /// Of these, stacks of threads that the kernel was ending, whose memory was gone.
    pub stacks_exiting: u64,
    /// Of these, stacks that reached the thread's start, but over at least one guessed caller.
    pub stacks_guessed: u64,
}
