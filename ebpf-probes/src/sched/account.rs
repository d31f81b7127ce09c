//! A thread's entry: whose it is, its state and the sums of its times.

use crate::config::{Task, goes_on, has_rules, known_is_selected};
use crate::emit::{PF_EXITING, small_record};
use crate::log::lost;
use crate::machine;
use crate::maps::{THREADS, count};
use aya_ebpf::bindings::BPF_NOEXIST;
use core::mem::size_of;
use ebpf_common::counter::Counter;
use ebpf_common::event::{KIND_THREAD_END, RecordHeader, ThreadEndRecord};
use ebpf_common::key::{
    RecordingStart, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, STATE_RUNNING_OR_RUNNABLE,
    SchedulerAccount, WAIT_KEPT,
};

/// The thread's entry and its id, when it is recorded.
#[inline(always)]
pub(super) fn recorded<'a>(
    task: Task,
    tid: u32,
    tgid: u32,
    now: u64,
) -> Option<(u32, &'a mut SchedulerAccount)> {
    // Nearly all events are those of a thread that is known by its own id: one look-up is enough
    // for them.
    if known_is_selected()
        && let Some(thread) = THREADS.get_ptr_mut(tid)
    {
        // SAFETY: an entry of the map; see `sched` for who else may touch it.
        let thread = unsafe { &mut *thread };
        if thread.stack == task.stack() && thread.tgid == tgid && thread.state != STATE_DEAD {
            return goes_on().then_some((tid, thread));
        }
    }
    let recording = task.recording(tgid)?;
    let (tid, thread) = known(task, tid, tgid, &recording, now)?;
    if has_rules() {
        put(&mut thread.left_out, recording.left_out);
    }
    Some((tid, thread))
}

/// The thread's entry and its id, made when it is unknown: before seeding it was in its present
/// state since the recording began; later it was lost and starts afresh.
#[inline(always)]
fn known<'a>(
    task: Task,
    tid: u32,
    tgid: u32,
    recording: &RecordingStart,
    now: u64,
) -> Option<(u32, &'a mut SchedulerAccount)> {
    let stack = task.stack();
    let ending = task.flags() & PF_EXITING != 0;
    let Some(thread) = THREADS.get_ptr_mut(tid) else {
        if recording.seeded != 0 {
            // The first thread after an exec by another one.
            if ending {
                return None;
            }
            // One that has just taken over the first thread's id in `execve`, and switches before
            // `exec` is told, is not late: it has an entry under its old id, which nothing here
            // knows. `exec` puts the two together.
            if tid != tgid {
                count(Counter::ThreadLate);
            }
        }
        let since = if recording.seeded == 0 { recording.since_ns } else { now };
        let thread = insert(tid, &new_thread(task, tgid, since), BPF_NOEXIST)?;
        // SAFETY: an entry of the map; see `sched` for who else may touch it.
        return Some((tid, unsafe { &mut *thread }));
    };
    // SAFETY: as above.
    let thread = unsafe { &mut *thread };
    if thread.tgid == tgid && thread.state != STATE_DEAD {
        if thread.stack == 0 {
            thread.stack = stack;
        }
        if thread.stack == stack {
            return Some((tid, thread));
        }
        if tid == tgid {
            // Its id is new, and the first thread's last switch is still to come.
            end_first(tid, thread, now);
            *thread = new_thread(task, tgid, now);
            return Some((tid, thread));
        }
        if ending {
            // The first thread, with the id of the one that calls `execve`.
            let thread = THREADS.get_ptr_mut(tgid)?;
            // SAFETY: as above.
            let thread = unsafe { &mut *thread };
            return (thread.stack == stack).then_some((tgid, thread));
        }
    }
    if thread.state == STATE_DEAD {
        // As in `wakeup_new`.
        lost(Counter::ThreadMapFull, tid, 0);
        return None;
    }
    // Of an earlier thread with this id, whose end came after it had left the cgroup.
    count(Counter::ThreadLate);
    *thread = new_thread(task, tgid, now);
    Some((tid, thread))
}

#[inline(always)]
pub(super) fn new_thread(task: Task, tgid: u32, since_ns: u64) -> SchedulerAccount {
    SchedulerAccount {
        entered_ns: since_ns,
        since_ns,
        wait_start_ns: since_ns,
        tgid,
        state: STATE_RUNNING_OR_RUNNABLE,
        exec_ns: u64::MAX,
        stack: task.stack(),
        ..SchedulerAccount::default()
    }
}

#[inline(always)]
pub(super) fn insert(
    tid: u32,
    thread: &SchedulerAccount,
    flags: u32,
) -> Option<*mut SchedulerAccount> {
    if let Err(cause) = THREADS.insert(tid, thread, u64::from(flags)) {
        lost(Counter::ThreadMapFull, tid, cause.into());
        return None;
    }
    THREADS.get_ptr_mut(tid)
}

/// Ends the times of a first thread whose id another one has taken over.
#[inline(always)]
pub(super) fn end_first(tid: u32, thread: &mut SchedulerAccount, now: u64) {
    let state = if thread.state == STATE_RUNNING_OR_RUNNABLE { STATE_ON_CPU } else { thread.state };
    // A dead one's times are final.
    if state != STATE_DEAD {
        close(thread, now, state);
    }
    if !tell_end(tid, thread, now) {
        // Its place is the other one's now.
        lost(Counter::ThreadEndsRingFull, tid, 0);
        count(Counter::ThreadEndsLost);
    }
}

/// The thread's last switch, or the end of its program.
#[inline(always)]
pub(super) fn end(tid: u32, thread: &mut SchedulerAccount, now: u64) {
    if tell_end(tid, thread, now) {
        // Gone already means nothing is left to remove.
        THREADS.remove(tid).ok();
    } else {
        // The daemon takes what is left in the map: it looks for it when it sees the count.
        set_state(thread, STATE_DEAD);
        lost(Counter::ThreadEndsRingFull, tid, 0);
    }
}

/// Counts a thread's end and sends its times. False when the ring has no room, which whoever asked
/// must count.
#[inline(always)]
pub(super) fn tell_end(tid: u32, thread: &SchedulerAccount, now: u64) -> bool {
    let mut record = ThreadEndRecord {
        header: RecordHeader {
            kind: KIND_THREAD_END,
            len: size_of::<ThreadEndRecord>() as u32,
            time_ns: now,
        },
        tgid: thread.tgid,
        tid,
        entered_ns: thread.entered_ns,
        oncpu_ns: thread.oncpu_ns,
        runnable_ns: thread.runnable_ns,
        stolen_ns: thread.stolen_ns,
        blocked_ns: thread.blocked_ns,
        left_out: thread.left_out,
        reserved: 0,
    };
    count(Counter::ThreadEnds);
    let stored = small_record(&mut record);
    if stored {
        count(Counter::ThreadEndsStored);
    }
    stored
}

/// Adds the time since the last event to the sum of the state that ends. `event` is the state this
/// event proves the thread was in; it overrules a state known only vaguely, and a blocked one whose
/// waking came too early to be seen. Answers the time added.
#[inline(always)]
pub(super) fn close(thread: &mut SchedulerAccount, now: u64, event: u32) -> u64 {
    let since = thread.since_ns;
    let elapsed = now.saturating_sub(since);
    put(&mut thread.since_ns, since + elapsed);
    let sum = match event {
        STATE_ON_CPU => &mut thread.oncpu_ns,
        STATE_RUNNABLE => &mut thread.runnable_ns,
        _ => &mut thread.blocked_ns,
    };
    let before = *sum;
    put(sum, before + elapsed);
    elapsed
}

/// Whether the daemon has the stack of the thread's present wait: the sampler kept it, or the
/// iterator saw it.
#[inline(always)]
pub(super) fn is_known(thread: &SchedulerAccount, wait_flags: u32) -> bool {
    wait_flags & WAIT_KEPT != 0 || thread.scanned_start_ns == thread.wait_start_ns
}

/// Whether the daemon is to hear of the end of the thread's present wait: it has its stack, or this
/// is the one the thread was in when it entered the recording, which had no start.
#[inline(always)]
pub(super) fn is_told(thread: &SchedulerAccount, wait_flags: u32) -> bool {
    is_known(thread, wait_flags) || thread.wait_start_ns == thread.entered_ns
}

/// How long the thread ran since its last known event, by the kernel's account.
#[inline(always)]
pub(super) fn ran_since(thread: &SchedulerAccount, exec_ns: u64, now: u64) -> u64 {
    let ran = exec_ns.saturating_sub(thread.exec_ns);
    let elapsed = now.saturating_sub(thread.since_ns);
    if ran > elapsed { elapsed } else { ran }
}

/// Stores the state behind everything that was `put`: a waking on another CPU, and the iterator,
/// act on it. Pairs with [`state_of`].
#[inline(always)]
pub(super) fn set_state(thread: &mut SchedulerAccount, state: u32) {
    machine::publish(&mut thread.state, state);
}

/// The state; what is read afterwards was stored before it, or later.
#[inline(always)]
pub(crate) fn state_of(thread: &SchedulerAccount) -> u32 {
    machine::published(&thread.state)
}

/// Stores what another CPU reads: the compiler keeps volatile accesses in their order.
#[inline(always)]
pub(crate) fn put<T>(field: &mut T, value: T) {
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::write_volatile(field, value) }
}

/// Loads what another CPU writes.
#[inline(always)]
pub(crate) fn get<T: Copy>(field: &T) -> T {
    // SAFETY: a valid, aligned field.
    unsafe { core::ptr::read_volatile(field) }
}
