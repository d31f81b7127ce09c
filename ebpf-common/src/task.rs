//! What the state of a task says that leaves its CPU.

/// `TASK_WAKING` of include/linux/sched.h, the same in all kernels that are supported: another CPU
/// is about to put the task on a run queue.
const TASK_WAKING: u32 = 0x200;

/// The state in which a task leaves its CPU, as it is in the task when the tracepoint is called:
/// kernels before 5.18 do not hand it over. By then another CPU may have begun to wake the task,
/// which is told of before its state changes (`try_to_wake_up`, kernel/sched/core.c). The task was
/// still on its CPU then, so nobody took note, and what it waits for from here on is a CPU.
#[inline(always)]
#[must_use]
pub const fn left_in(state: u32) -> u32 {
    if state == TASK_WAKING { 0 } else { state }
}

#[cfg(test)]
mod tests {
    use super::left_in;

    #[test]
    fn a_task_that_is_being_woken_waits_for_a_cpu_only() {
        assert_eq!(left_in(0x200), 0);
        // Runnable, the two sleeps, killable, idle, dead.
        for state in [0, 1, 2, 0x102, 0x402, 0x80] {
            assert_eq!(left_in(state), state);
        }
    }
}
