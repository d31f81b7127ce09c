//! Load-time settings of the probes, written into their read-only data before they are verified: to
//! the verifier they are constants, so that branches not taken cost nothing and field offsets are
//! checked against the kernel's types.

use crate::plain;

/// Everything is selected.
pub const SELECT_ALL: u32 = 0;
/// Only processes in the map `SELECTED`, which grows by fork.
pub const SELECT_PIDS: u32 = 1;
/// Only threads of one cgroup v2 directory (not of its children).
pub const SELECT_CGROUP: u32 = 2;

/// Threads that rules choose, by their process's cgroup, user and command.
pub const SELECT_RULES: u32 = 3;

/// `Config::rules_by`: rules look at the cgroup.
pub const RULES_BY_CGROUP: u32 = 1;
/// `Config::rules_by`: rules look at the real user.
pub const RULES_BY_USER: u32 = 2;
/// `Config::rules_by`: rules look at the command name.
pub const RULES_BY_COMMAND: u32 = 4;

/// Bit of what rules say: being recorded at all.
pub const RULE_RECORDED: u32 = 1;
/// Bit of what rules say: CPU samples.
pub const RULE_CPU: u32 = 2;
/// Bit of what rules say: the stacks of waits.
pub const RULE_WAITS: u32 = 4;
/// Bits of what can be given to some and taken from others: the three above, and those that only
/// the daemon knows.
pub const RULE_FEATURES: u32 = 0xff;
/// A feature's bit in the upper half of a word takes it, whatever others say; in the lower half it
/// gives it, where not everybody has it.
pub const RULE_TAKES: u32 = 16;
/// Above the features: n bits set from here on keep one CPU sample in 2ⁿ. Of several rules the one
/// with the fewest samples holds: words are put together by "or".
pub const RULE_DOWNSAMPLES: u32 = 8;

/// The kernel has no such field (`on_cpu` without CONFIG_SMP).
pub const NO_FIELD: u32 = u32::MAX;

/// What is left out, of somebody of whom rules say `said`, when `others` have these features: the
/// features, and above them which CPU samples. `None` when they are not recorded.
#[inline(always)]
#[must_use]
pub const fn left_out(said: u32, others: u32) -> Option<u32> {
    let has = (said | others) & !(said >> RULE_TAKES);
    if has & RULE_RECORDED == 0 {
        return None;
    }
    Some((has ^ RULE_FEATURES) & 0xffff)
}

plain! {
    /// The settings.
    pub struct ProbeConfig {
        /// Bits of a word that are an address: on a machine that signs return addresses not all.
        pub address_mask: u64,
        /// The cgroup's id (inode of its directory), for `SELECT_CGROUP`.
        pub cgroup_id: u64,
        /// How long one probability is kept, at least, unless the budget runs out first;
        /// nanoseconds.
        pub sampler_interval_ns: u64,
        /// Probability with which every wait's stack is kept, in units of 2⁻³², whatever it costs;
        /// 0 to follow the budget.
        pub sampler_fixed: u64,
        /// One of the `SELECT_` values.
        pub selection: u32,
        /// The `RULES_BY_` bits that matter, for `SELECT_RULES`.
        pub rules_by: u32,
        /// The features of those of whom no rule says anything.
        pub rules_others: u32,
        /// Process that is never recorded; 0 for none.
        pub excluded_tgid: u32,
        /// Most bytes of user stack to copy, at most `MAX_STACK_COPY_BYTES`.
        pub stack_copy_bytes: u32,
        /// 1 to send registers and copy of each user stack from its innermost frame on, walked or
        /// not: to compare the two.
        pub copies_all: u32,
        /// 1 to send the stacks of threads that end kept waits.
        pub waker_stacks: u32,
        /// 1 to send with each stack which span its thread worked for, where threads publish that.
        pub spans: u32,
        /// Named padding.
        pub reserved: u32,
        /// 1 to measure what the stages of a stack record take ([`crate::stage`]).
        pub times_stages: u32,
        /// 1 when the `sched_switch` tracepoint hands over `prev_state` (since 5.18).
        pub has_prev_state: u32,
        /// `task_struct.pid`.
        pub task_pid: u32,
        /// `task_struct.tgid`.
        pub task_tgid: u32,
        /// `task_struct.flags`.
        pub task_flags: u32,
        /// `task_struct.comm`.
        pub task_comm: u32,
        /// `task_struct.__state`.
        pub task_state: u32,
        /// `task_struct.cgroups`.
        pub task_cgroups: u32,
        /// `task_struct.real_cred`.
        pub task_cred: u32,
        /// `cred.uid`.
        pub cred_uid: u32,
        /// `task_struct.group_leader`.
        pub task_leader: u32,
        /// `css_set.dfl_cgrp`.
        pub css_set_dfl_cgrp: u32,
        /// `cgroup.kn`.
        pub cgroup_kn: u32,
        /// `kernfs_node.id`.
        pub kernfs_node_id: u32,
        /// `task_struct.on_cpu`, or [`NO_FIELD`].
        pub task_on_cpu: u32,
        /// `task_struct.se.sum_exec_runtime`.
        pub task_exec: u32,
        /// `task_struct.se.prev_sum_exec_runtime`: `task_exec` when it last got a CPU as a thread
        /// of the fair class.
        pub task_exec_before: u32,
        /// `task_struct.se.cfs_rq`, or [`NO_FIELD`] without CONFIG_FAIR_GROUP_SCHED.
        pub task_cfs_rq: u32,
        /// `cfs_rq.throttle_count`, or [`NO_FIELD`] without CONFIG_CFS_BANDWIDTH.
        pub cfs_rq_throttle_count: u32,
        /// `task_struct.throttled`, or [`NO_FIELD`] before 6.18.
        pub task_throttled: u32,
        /// `task_struct.sched_info.last_arrival`, or [`NO_FIELD`] without CONFIG_SCHED_INFO, or
        /// where `task_exec_before` says nothing.
        pub task_last_arrival: u32,
        /// Byte of `task_struct` with the bit `in_iowait`.
        pub task_in_iowait: u32,
        /// That bit.
        pub task_in_iowait_mask: u32,
        /// Byte of `task_struct` with the bit `in_execve`.
        pub task_in_execve: u32,
        /// That bit.
        pub task_in_execve_mask: u32,
        /// `task_struct.stack`.
        pub task_stack: u32,
        /// From there to the user registers; only where `bpf_task_pt_regs` is missing.
        pub task_registers: u32,
        /// `vm_area_struct.vm_end`.
        pub vma_end: u32,
        /// `vm_area_struct.vm_file`.
        pub vma_file: u32,
        /// Of `ebpf_common::rule::Spot::of`.
        pub place_shift: u32,
        /// `task_struct.prio`.
        pub task_prio: u32,
        /// `task_struct.thread`.
        pub task_thread: u32,
        /// In it the thread pointer as the scheduler saved it (x86-64: `thread_struct.fsbase`), or
        /// `NO_FIELD`.
        pub thread_pointer: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_stays_away_and_what_is_given_comes_where_others_have_it_not() {
        let others = RULE_FEATURES & !RULE_WAITS;
        assert_eq!(left_out(0, others), Some(RULE_WAITS));
        assert_eq!(left_out(RULE_WAITS, others), Some(0));
        assert_eq!(left_out(RULE_WAITS | RULE_WAITS << RULE_TAKES, others), Some(RULE_WAITS));
        assert_eq!(left_out(RULE_RECORDED << RULE_TAKES, others), None);
        assert_eq!(left_out(RULE_WAITS, 0), None);
        assert_eq!(
            left_out(0b11 << RULE_DOWNSAMPLES, RULE_FEATURES),
            Some(0b11 << RULE_DOWNSAMPLES)
        );
        assert_eq!(
            left_out(RULE_CPU << RULE_TAKES | 1 << RULE_DOWNSAMPLES, RULE_FEATURES),
            Some(RULE_CPU | 1 << RULE_DOWNSAMPLES)
        );
    }
}
