//! Exact times of threads, and the stacks of their waits.
//!
//! A thread's events come in order: the scheduler serialises its switches and wake-ups. Only a
//! waking can overlap with the switch-out of the same thread on another CPU, when it comes between
//! the moment the scheduler decided to block the thread and the tracepoint. Then the waking finds
//! the thread on a CPU and only notes when it came: the thread is switched in without a waking
//! seen, and its wait counts as runnable from its start, which is the truth.
//!
//! How long a thread ran between its switch-in and its switch-out is the kernel's own account,
//! which every other tool shows too (`sum_exec_runtime`, up to date at each switch). Time that
//! passed without being run, because the hypervisor or an interrupt had the CPU
//! (`update_rq_clock_task`, kernel/sched/core.c), the thread waited for a CPU.
//!
//! A switch can be missing (a thread that was outside the selected cgroup for a while; a kernel
//! that hides some tasks from the tracepoint, as seen on 6.18 guests). It shows at the thread's
//! next one, and the same account says how much of the time between was spent on a CPU. So can a
//! waking, by such a task or by a timer whose interrupt it was that such a task had: a wait without
//! one, also without an early one, was blocked, and how much of its end was spent waiting for a CPU
//! nobody knows (`wakings_missed`).
//!
//! A thread's times end where it becomes another program, and begin anew. A thread that is not its
//! process's first takes over the first one's id in `execve` (`de_thread`, fs/exec.c), and the
//! first one, which is on its way out, gets that thread's id for its last switches. The kernel
//! tells of it only later, at `sched_process_exec`. So an entry knows whose it is by the task's
//! kernel stack.

mod account;
mod waker;

use crate::config::{Task, goes_on, has_rules, known_is_selected, setting};
use crate::emit::{HookContext, RecordLoss, small_record, stack_record};
use crate::log::{self, SetUp, lost};
use crate::machine;
use crate::maps::{THREADS, count, sampler};
use crate::sampler;
use account::{
    close, end, end_first, insert, is_told, new_thread, ran_since, recorded, set_state, tell_end,
};
pub(crate) use account::{get, put, state_of};
use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;
use aya_ebpf::programs::BtfTracePointContext;
use core::mem::size_of;
use ebpf_common::config::RULE_WAITS;
use ebpf_common::counter::Counter;
use ebpf_common::event::{
    CERTAIN, FLAG_IO, FLAG_NEW, FLAG_PREEMPTED, FLAG_THROTTLED, FLAG_WAKER, FLAG_WOKEN_THROTTLED,
    KIND_WAIT_END, KIND_WAIT_START, RecordHeader, WaitEndRecord, WakeRecord,
};
use ebpf_common::key::{
    STATE_BLOCKED, STATE_DEAD, STATE_ON_CPU, STATE_RUNNABLE, SchedulerAccount, WAIT_CERTAIN,
    WAIT_KEPT, WAIT_NEW, WAIT_WAKER_TOLD, WAIT_WAS_BLOCKED, WAIT_WOKEN_THROTTLED,
};
use ebpf_common::limits::OWN_FRAMES;
use ebpf_common::task::left_in;
use waker::{tell_wake, tell_waker};

/// `TASK_DEAD` of include/linux/sched.h: this is the thread's last switch.
const TASK_DEAD: u32 = 0x80;

/// A waking that finds the thread on a CPU belongs to a wait that begins within this time of it:
/// the rest of `__schedule`, and what a hypervisor takes of it.
const EARLY_NS: u64 = 1_000_000;

/// `void sched_switch(bool preempt, struct task_struct *prev, struct task_struct *next, unsigned
/// int prev_state)`; `prev` is current.
#[inline(always)]
pub(crate) fn switch<const LOOPS: bool>(ctx: &BtfTracePointContext) {
    let now = now_ns();
    switch_out::<LOOPS>(ctx, now);
    switch_in(Task::typed(ctx.arg(2)), now);
}

#[inline(always)]
fn now_ns() -> u64 {
    // SAFETY: a helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

#[inline(always)]
fn switch_out<const LOOPS: bool>(ctx: &BtfTracePointContext, now: u64) {
    let task = Task::typed(ctx.arg(1));
    let tid = task.tid();
    if tid == 0 {
        return;
    }
    let tgid = task.tgid();
    let Some((tid, thread)) = recorded(task, tid, tgid, now) else { return };
    let state =
        if setting!(has_prev_state) != 0 { ctx.arg::<u32>(3) } else { left_in(task.state()) };
    // A preempted thread stays runnable whatever its state says.
    let preempted = ctx.arg::<u32>(0) & 0xff != 0;
    let exec_ns = task.exec_ns();
    found_running(tid, thread, exec_ns, now);
    let ran_ns = leave(thread, exec_ns, now);
    if !preempted && state & TASK_DEAD != 0 {
        return end(tid, thread, now);
    }
    let blocked = !preempted && state != 0;
    let (waits, was) =
        if blocked { (STATE_BLOCKED, WAIT_WAS_BLOCKED) } else { (STATE_RUNNABLE, 0) };
    put(&mut thread.wait_start_ns, now);
    put(&mut thread.wait_blocked_ns, 0);
    if has_rules() && thread.left_out & RULE_WAITS != 0 {
        return without_stack(thread, waits, was);
    }
    count(Counter::Waits);
    log::began(SetUp::Scheduler, tid);
    let Some(sampler) = sampler() else { return downsampled(thread, waits, was) };
    // SAFETY: this CPU's entry; the scheduler's hooks do not nest on a CPU.
    let sampler = unsafe { &mut *sampler };
    let Some(probability) = sampler::decide(sampler, thread, now) else {
        return downsampled(thread, waits, was);
    };
    // Before anybody can end the wait: a waking that comes while its stack is still taken must tell
    // where it came from.
    put(
        &mut thread.wait_flags,
        was | if probability == CERTAIN { WAIT_KEPT | WAIT_CERTAIN } else { WAIT_KEPT },
    );
    set_state(thread, waits);
    let mut flags = if blocked { 0 } else { FLAG_PREEMPTED };
    if blocked && task.in_iowait() {
        flags |= FLAG_IO;
    }
    if !blocked && task.throttled() {
        flags |= FLAG_THROTTLED;
    }
    let hook = HookContext {
        kind: KIND_WAIT_START,
        time_ns: now,
        tgid,
        tid,
        flags,
        state,
        ran_ns,
        exec_ns: if blocked { exec_ns } else { 0 },
        probability,
        kernel_stack: Some(OWN_FRAMES),
    };
    match stack_record::<LOOPS>(ctx.as_ptr(), task, &hook) {
        Ok(bytes) => {
            let woken = if blocked { size_of::<WakeRecord>() as u32 } else { 0 };
            sampler::spend(sampler, bytes + woken + size_of::<WaitEndRecord>() as u32);
            if blocked && setting!(waker_stacks) != 0 {
                // Of whoever will end it there is to be a stack too, which costs about as much.
                sampler::spend(sampler, bytes);
            }
            count(Counter::WaitsStored);
        }
        Err(RecordLoss::RingFull(bytes)) => {
            // The work was done, and the ring has enough of it.
            sampler::spend(sampler, bytes);
            not_kept(thread);
            lost(Counter::WaitsRingFull, tid, 0);
        }
        Err(RecordLoss::Busy) => {
            not_kept(thread);
            lost(Counter::WaitsBusy, tid, 0);
        }
    }
}

/// The sampler did not keep the wait that begins.
#[inline(always)]
fn downsampled(thread: &mut SchedulerAccount, waits: u32, was: u32) {
    without_stack(thread, waits, was);
    count(Counter::WaitsDownsampled);
}

/// No stack is taken of the wait that begins.
#[inline(always)]
fn without_stack(thread: &mut SchedulerAccount, waits: u32, was: u32) {
    put(&mut thread.wait_flags, was);
    set_state(thread, waits);
}

/// The stack of the wait that begins was lost. A waking that has just found it kept has told of
/// nothing that is known; if it writes the flags at this very moment, so does the end, which counts
/// as one without a beginning.
#[inline(always)]
fn not_kept(thread: &mut SchedulerAccount) {
    let flags = thread.wait_flags & !(WAIT_KEPT | WAIT_CERTAIN);
    put(&mut thread.wait_flags, flags);
}

#[inline(always)]
fn switch_in(task: Task, now: u64) {
    let tid = task.tid();
    if tid == 0 {
        return;
    }
    let Some((tid, thread)) = recorded(task, tid, task.tgid(), now) else { return };
    let exec_ns = task.exec_ns();
    if thread.state == STATE_ON_CPU {
        count(Counter::SwitchesMissed);
        let left = thread.since_ns + ran_since(thread, exec_ns, now);
        close(thread, left, STATE_ON_CPU);
        // Another wait than the one that was told of, if one was.
        thread.wait_start_ns = left;
        // Why it left is not known; a wake-up before it came back would not have been missed by a
        // thread that was preempted.
        close(thread, now, STATE_BLOCKED);
        thread.exec_ns = exec_ns;
    } else if thread.exec_ns == u64::MAX {
        thread.exec_ns = exec_ns;
    }
    arrive(tid, thread, now);
}

/// The thread runs at `now`. If it was not seen to get the CPU, it did so when it began to run what
/// it has run since its last event.
#[inline(always)]
fn found_running(tid: u32, thread: &mut SchedulerAccount, exec_ns: u64, now: u64) {
    if thread.state == STATE_RUNNABLE || thread.state == STATE_BLOCKED {
        count(Counter::SwitchesMissed);
        let ran_ns = ran_since(thread, exec_ns, now);
        arrive(tid, thread, now - ran_ns);
        thread.exec_ns = exec_ns - ran_ns;
    }
}

/// The thread got the CPU at `now`: its wait is over.
#[inline(always)]
fn arrive(tid: u32, thread: &mut SchedulerAccount, now: u64) {
    let start = thread.wait_start_ns;
    if thread.state == STATE_BLOCKED && get(&thread.woken_early_ns) + EARLY_NS < start {
        count(Counter::WakingsMissed);
        close(thread, now, STATE_BLOCKED);
        put(&mut thread.wait_blocked_ns, now.saturating_sub(start));
    } else {
        close(thread, now, STATE_RUNNABLE);
    }
    let flags = thread.wait_flags;
    put(&mut thread.wait_flags, 0);
    set_state(thread, STATE_ON_CPU);
    if flags & WAIT_KEPT == 0 {
        // The iterator notes its scan, and then looks whether the thread still waits; here it is
        // the other way round. Without a barrier on both sides each could miss the other, and the
        // end of a wait that was told of would never be. Of a kept wait the end is told anyway.
        machine::barrier();
    }
    if is_told(thread, flags) {
        // Where a waking came from that told nothing is not known: the thread that ran then may
        // have had nothing to do with it.
        let mut end = if flags & WAIT_WAKER_TOLD != 0 { FLAG_WAKER } else { 0 };
        if flags & WAIT_WOKEN_THROTTLED != 0 {
            end |= FLAG_WOKEN_THROTTLED;
        }
        if flags & WAIT_NEW != 0 {
            end |= FLAG_NEW;
        }
        send_wait_end(tid, thread, now, end);
    }
}

/// The thread leaves its CPU at `now`. Answers how long it ran.
#[inline(always)]
fn leave(thread: &mut SchedulerAccount, exec_ns: u64, now: u64) -> u64 {
    let held = now.saturating_sub(thread.since_ns);
    let SchedulerAccount { since_ns, oncpu_ns, runnable_ns, stolen_ns, .. } = *thread;
    // The kernel charges from the last look at the run queue's clock before the switch. That can be
    // the one at the waking: `__schedule` leaves its own out when the waking made it necessary
    // (`rq_clock_skip_update` in `wakeup_preempt`, kernel/sched/core.c). So the account has up to
    // some 10 us of a wait for a CPU, of each wait: 30 to 40 % of the CPU time of a thread that
    // wakes thousands of times a second. Ours follows it, and schedstat's account of waiting is
    // without them too.
    let mut early = 0;
    let ran = if thread.exec_ns == u64::MAX {
        thread.exec_ns = exec_ns;
        held
    } else {
        let charged = exec_ns.saturating_sub(thread.exec_ns);
        if charged > held {
            let most = runnable_ns.saturating_sub(stolen_ns);
            let more = charged - held;
            early = if more > most { most } else { more };
        }
        let ran = if charged > held { held + early } else { charged };
        // Not `exec_ns`: what one slice has too much the next has too little.
        thread.exec_ns += ran;
        ran
    };
    let stolen = held.saturating_sub(ran);
    put(&mut thread.since_ns, since_ns + held);
    put(&mut thread.oncpu_ns, oncpu_ns + ran);
    put(&mut thread.runnable_ns, runnable_ns + stolen - early);
    put(&mut thread.stolen_ns, stolen_ns + stolen);
    ran
}

/// `void sched_waking(struct task_struct *p)`; the waker is current. Comes before the thread is put
/// on a run queue.
#[inline(always)]
pub(crate) fn waking<const LOOPS: bool>(ctx: &BtfTracePointContext) {
    let task = Task::typed(ctx.arg(0));
    let (tid, tgid) = (task.tid(), task.tgid());
    let thread = match THREADS.get_ptr_mut(tid) {
        Some(thread) => {
            // SAFETY: an entry of the map; it outlives the program, and this thread's last
            // switch-out cannot overlap with its waking.
            let thread = unsafe { &mut *thread };
            let state = state_of(thread);
            if state != STATE_BLOCKED {
                if state == STATE_ON_CPU {
                    put(&mut thread.woken_early_ns, now_ns());
                }
                return;
            }
            let selected = known_is_selected() && thread.tgid == tgid;
            if !(if selected { goes_on() } else { task.recording(tgid).is_some() }) {
                return;
            }
            thread
        }
        None => {
            let Some(recording) = task.recording(tgid) else { return };
            // A running thread can be woken just before it would block: no news. After seeding, its
            // switch-in makes it known.
            if recording.seeded != 0 || now_ns() < recording.since_ns || task.on_cpu() {
                return;
            }
            let mut thread = new_thread(task, tgid, recording.since_ns);
            thread.state = STATE_BLOCKED;
            thread.wait_flags = WAIT_WAS_BLOCKED;
            let Some(thread) = insert(tid, &thread, BPF_NOEXIST) else { return };
            // SAFETY: as above.
            unsafe { &mut *thread }
        }
    };
    let now = now_ns();
    close(thread, now, STATE_BLOCKED);
    let waited = now.saturating_sub(thread.wait_start_ns);
    put(&mut thread.wait_blocked_ns, waited);
    let waker = Task::current::<LOOPS>();
    thread.waker_tid = waker.tid();
    thread.waker_tgid = waker.tgid();
    thread.waker_comm = waker.comm();
    let mut flags = get(&thread.wait_flags);
    if is_told(thread, flags) {
        if task.queue_throttled() {
            flags |= WAIT_WOKEN_THROTTLED;
        }
        // To the verifier a constant: without the option none of it is there.
        let stack_told =
            setting!(waker_stacks) != 0 && tell_waker::<LOOPS>(ctx, tid, thread, waker, now);
        if stack_told || tell_wake::<LOOPS>(ctx, tid, thread, waker, now) {
            flags |= WAIT_WAKER_TOLD;
        }
        put(&mut thread.wait_flags, flags);
    }
    set_state(thread, STATE_RUNNABLE);
}

/// `void sched_wakeup_new(struct task_struct *p)`: a new thread is put on a run queue for the first
/// time.
#[inline(always)]
pub(crate) fn wakeup_new(ctx: &BtfTracePointContext) {
    let task = Task::typed(ctx.arg(0));
    let tgid = task.tgid();
    if task.recording(tgid).is_none() {
        return;
    }
    let now = now_ns();
    let mut thread = new_thread(task, tgid, now);
    thread.state = STATE_RUNNABLE;
    thread.wait_flags = WAIT_NEW;
    let tid = task.tid();
    if let Some(old) = THREADS.get_ptr_mut(tid) {
        // SAFETY: an entry of the map; see the module's text for who else may touch it.
        if state_of(unsafe { &*old }) == STATE_DEAD {
            // An earlier thread's, whose times wait for the daemon. When they are gone a switch
            // makes the new one known.
            return lost(Counter::ThreadMapFull, tid, 0);
        }
    }
    // Replaces what seeding may have put there: it can see a thread in /proc before it runs.
    insert(tid, &thread, BPF_ANY);
}

/// The current thread, whose id was `old`, has become another program: its times until now are the
/// old program's, and so are those of all other threads, which are gone.
#[inline(always)]
pub(crate) fn exec(task: Task, tgid: u32, old: u32) {
    let now = now_ns();
    let (tid, stack) = (task.tid(), task.stack());
    let mut next = new_thread(task, tgid, now);
    next.state = STATE_ON_CPU;
    if old != tid {
        // Since it has its new id its switches, if there were any, have made an entry of that.
        let until = match THREADS.get_ptr_mut(tid) {
            // SAFETY: an entry of the map; this thread is here, and nobody else changes it.
            Some(thread) if unsafe { (*thread).stack } == stack => unsafe { (*thread).entered_ns },
            _ => now,
        };
        if let Some(thread) = THREADS.get_ptr_mut(old) {
            // SAFETY: as above.
            let thread = unsafe { &mut *thread };
            if thread.tgid == tgid && (thread.stack == stack || thread.stack == 0) {
                found_running(old, thread, task.exec_ns(), until);
                next.exec_ns = run_to(thread, until);
                end(old, thread, until);
            }
        }
    }
    let Some(thread) = THREADS.get_ptr_mut(tid) else {
        insert(tid, &next, BPF_ANY);
        return;
    };
    // SAFETY: as above; the first thread, if the entry is still its, has no more than its last
    // switch to come.
    let thread = unsafe { &mut *thread };
    if thread.stack != stack && thread.stack != 0 {
        end_first(tid, thread, now);
    } else {
        found_running(tid, thread, task.exec_ns(), now);
        next.exec_ns = run_to(thread, now);
        if !tell_end(tid, thread, now) {
            lost(Counter::ThreadEndsRingFull, tid, 0);
            // Nobody would know of the times so far: they stay, and those of the new program are
            // added.
            thread.exec_ns = next.exec_ns;
            return;
        }
    }
    *thread = next;
}

/// Closes the time on a CPU of a thread that goes on running. How much of it was stolen is not
/// known before its next switch, and counts then. Answers what `exec_ns` is to be for that.
#[inline(always)]
fn run_to(thread: &mut SchedulerAccount, now: u64) -> u64 {
    let held = close(thread, now, STATE_ON_CPU);
    if thread.exec_ns == u64::MAX { u64::MAX } else { thread.exec_ns + held }
}

#[inline(always)]
fn send_wait_end(tid: u32, thread: &SchedulerAccount, now: u64, flags: u32) {
    let mut record = WaitEndRecord {
        header: RecordHeader {
            kind: KIND_WAIT_END,
            len: size_of::<WaitEndRecord>() as u32,
            time_ns: now,
        },
        tgid: thread.tgid,
        tid,
        start_ns: thread.wait_start_ns,
        blocked_ns: thread.wait_blocked_ns,
        runnable_ns: now
            .saturating_sub(thread.wait_start_ns)
            .saturating_sub(thread.wait_blocked_ns),
        flags,
        waker_tid: thread.waker_tid,
        waker_tgid: thread.waker_tgid,
        reserved: 0,
        waker_comm: thread.waker_comm,
    };
    let stored = small_record(&mut record);
    if stored {
        count(Counter::WaitEndsStored);
    } else {
        lost(Counter::WaitEndsRingFull, tid, 0);
    }
}
