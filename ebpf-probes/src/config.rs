//! Load-time settings, kernel fields at the offsets they name, and who is selected.

use crate::maps::{CGROUPS, COMMANDS, CONTROL, ENDED, SELECTED, USERS};
use aya_ebpf::bindings::task_struct;
use aya_ebpf::helpers::generated::{
    bpf_get_current_task, bpf_get_current_task_btf, bpf_probe_read_kernel,
};
use core::ffi::c_void;
use core::mem::{MaybeUninit, size_of};
use ebpf_common::config::{
    NO_FIELD, ProbeConfig, RULES_BY_CGROUP, RULES_BY_COMMAND, RULES_BY_USER, SELECT_CGROUP,
    SELECT_PIDS, SELECT_RULES, left_out,
};
use ebpf_common::key::RecordingStart;

/// Priorities below are those of real-time and deadline threads (include/linux/sched/prio.h).
const MAX_RT_PRIO: i32 = 100;

/// Overwritten by the loader before verification.
#[unsafe(no_mangle)]
pub(crate) static CONFIG: ProbeConfig = ProbeConfig {
    address_mask: 0,
    cgroup_id: 0,
    sampler_interval_ns: 0,
    sampler_fixed: 0,
    selection: 0,
    rules_by: 0,
    rules_others: 0,
    excluded_tgid: 0,
    stack_copy_bytes: 0,
    copies_all: 0,
    waker_stacks: 0,
    spans: 0,
    reserved: 0,
    times_stages: 0,
    has_prev_state: 0,
    task_pid: 0,
    task_tgid: 0,
    task_flags: 0,
    task_comm: 0,
    task_state: 0,
    task_cgroups: 0,
    task_cred: 0,
    cred_uid: 0,
    task_leader: 0,
    css_set_dfl_cgrp: 0,
    cgroup_kn: 0,
    kernfs_node_id: 0,
    task_on_cpu: 0,
    task_exec: 0,
    task_exec_before: 0,
    task_cfs_rq: 0,
    cfs_rq_throttle_count: 0,
    task_throttled: 0,
    task_last_arrival: 0,
    task_in_iowait: 0,
    task_in_iowait_mask: 0,
    task_in_execve: 0,
    task_in_execve_mask: 0,
    task_stack: 0,
    task_registers: 0,
    vma_end: 0,
    vma_file: 0,
    place_shift: 0,
    task_prio: 0,
    task_thread: 0,
    thread_pointer: 0,
};

/// Reads one setting. The read is volatile: the compiler must not use the value above. To the
/// verifier it is a constant, because the section is frozen.
macro_rules! setting {
    ($name:ident) => {{
        // SAFETY: a valid, aligned field of a static that nobody writes while programs run.
        unsafe { core::ptr::read_volatile(&raw const $crate::config::CONFIG.$name) }
    }};
}
pub(crate) use setting;

/// A thread's `task_struct`.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    pub(crate) pointer: *const task_struct,
    typed: bool,
}

impl Task {
    /// One the kernel handed to the program. Loads through it are checked by the verifier against
    /// the kernel's types and cannot fault (a bad pointer reads as zero).
    #[inline(always)]
    pub(crate) fn typed(pointer: *const task_struct) -> Self {
        Self { pointer, typed: true }
    }

    /// The current thread. Before 5.11 (`bpf_get_current_task_btf`) its address is a mere number to
    /// the verifier, and reading through it takes a helper, which reads as zero what it cannot.
    #[inline(always)]
    pub(crate) fn current<const LOOPS: bool>() -> Self {
        if LOOPS {
            // SAFETY: a helper without arguments.
            Self::typed(unsafe { bpf_get_current_task_btf() })
        } else {
            // SAFETY: a helper without arguments.
            Self { pointer: unsafe { bpf_get_current_task() } as *const task_struct, typed: false }
        }
    }

    /// Reads a field of `T`'s size.
    #[inline(always)]
    fn field<T: Copy>(self, offset: u32) -> T {
        self.behind(self.pointer.cast(), offset)
    }

    /// Reads `T` at `offset` behind a pointer that came from this task.
    #[inline(always)]
    fn behind<T: Copy>(self, pointer: *const c_void, offset: u32) -> T {
        if self.typed { read(pointer, offset) } else { read_untyped(pointer, offset) }
    }

    /// Kernel's id of the thread; 0 for the idle tasks.
    #[inline(always)]
    pub(crate) fn tid(self) -> u32 {
        self.field(setting!(task_pid))
    }

    /// Process.
    #[inline(always)]
    pub(crate) fn tgid(self) -> u32 {
        self.field(setting!(task_tgid))
    }

    /// `PF_` flags.
    #[inline(always)]
    pub(crate) fn flags(self) -> u32 {
        self.field(setting!(task_flags))
    }

    /// Raw state.
    #[inline(always)]
    pub(crate) fn state(self) -> u32 {
        self.field(setting!(task_state))
    }

    /// Whether it runs at this moment, or is just being switched out. Its lowest byte: an `int`
    /// became an `u8` in 7.x, and the verifier refuses a read past the field.
    #[inline(always)]
    pub(crate) fn on_cpu(self) -> bool {
        let offset = setting!(task_on_cpu);
        offset != NO_FIELD && self.field::<u8>(offset) != 0
    }

    /// Time it ran so far, by the scheduler's account; up to date at a switch.
    #[inline(always)]
    pub(crate) fn exec_ns(self) -> u64 {
        self.field(setting!(task_exec))
    }

    /// When it last left the CPU, by the run queues' clock: it got the CPU at `last_arrival` and
    /// then ran for what its run time has grown since. For a thread that runs, the last tick. 0
    /// when the kernel does not say: what the run time was then is noted by the fair class alone
    /// (`set_next_entity`, kernel/sched/fair.c), not for real-time and deadline threads, nor for
    /// those raised to such a priority.
    #[inline(always)]
    pub(crate) fn last_on_cpu_ns(self) -> u64 {
        let offset = setting!(task_last_arrival);
        if offset == NO_FIELD || self.field::<i32>(setting!(task_prio)) < MAX_RT_PRIO {
            return 0;
        }
        let arrival: u64 = self.field(offset);
        let ran = self.exec_ns().saturating_sub(self.field(setting!(task_exec_before)));
        if arrival == 0 { 0 } else { arrival.wrapping_add(ran) }
    }

    /// Lowest address of its kernel stack.
    #[inline(always)]
    pub(crate) fn stack(self) -> u64 {
        self.field(setting!(task_stack))
    }

    /// Bytes from `stack_pointer` to where its stack ends at the latest, at most `limit`. C
    /// libraries keep what is a thread's own right above its stack, and the thread pointer leads
    /// there (`TLS_TCB_AT_TP`; not for a process's first thread). Wherever else it leads, no stack
    /// goes on beyond it. It was saved when the thread was made or last left a CPU; programs do not
    /// change it.
    #[inline(always)]
    pub(crate) fn stack_room(self, stack_pointer: u64, limit: u32) -> u32 {
        let Some(end) = self.thread_pointer() else { return limit };
        let room = end.wrapping_sub(stack_pointer);
        if room != 0 && room < u64::from(limit) { room as u32 } else { limit }
    }

    /// Its thread pointer, as it was saved when the thread was made or last left a CPU: programs do
    /// not change it. `None` where the kernel keeps none.
    #[inline(always)]
    pub(crate) fn thread_pointer(self) -> Option<u64> {
        let offset = setting!(thread_pointer);
        (offset != NO_FIELD).then(|| self.field(setting!(task_thread).wrapping_add(offset)))
    }

    /// Whether the scheduler counts its wait as one for input or output.
    #[inline(always)]
    pub(crate) fn in_iowait(self) -> bool {
        self.field::<u8>(setting!(task_in_iowait)) & setting!(task_in_iowait_mask) as u8 != 0
    }

    /// Whether it is about to become another program.
    #[inline(always)]
    pub(crate) fn in_execve(self) -> bool {
        self.field::<u8>(setting!(task_in_execve)) & setting!(task_in_execve_mask) as u8 != 0
    }

    /// Whether the run queue of its cgroup, or of one above, has used up its CPU time
    /// (`cfs_rq.throttle_count` counts all levels).
    #[inline(always)]
    pub(crate) fn queue_throttled(self) -> bool {
        let (queue, throttled) = (setting!(task_cfs_rq), setting!(cfs_rq_throttle_count));
        if queue == NO_FIELD || throttled == NO_FIELD {
            return false;
        }
        let queue: *const c_void = self.field(queue);
        self.behind::<i32>(queue, throttled) > 0
    }

    /// Whether it may not run before its cgroup gets CPU time again. Since 6.18 a throttled thread
    /// goes on until it returns to user code, and says so itself; before, it left the CPU with the
    /// whole queue.
    #[inline(always)]
    pub(crate) fn throttled(self) -> bool {
        let offset = setting!(task_throttled);
        if offset == NO_FIELD { self.queue_throttled() } else { self.field::<u8>(offset) != 0 }
    }

    /// Command name.
    #[inline(always)]
    pub(crate) fn comm(self) -> [u8; 16] {
        let offset = setting!(task_comm);
        let low: u64 = self.field(offset);
        let high: u64 = self.field(offset.wrapping_add(8));
        let mut comm = [0; 16];
        comm[..8].copy_from_slice(&low.to_ne_bytes());
        comm[8..].copy_from_slice(&high.to_ne_bytes());
        comm
    }

    /// Id of the cgroup v2 directory it is in.
    #[inline(always)]
    fn cgroup_id(self) -> u64 {
        let css_set: *const c_void = self.field(setting!(task_cgroups));
        let cgroup: *const c_void = self.behind(css_set, setting!(css_set_dfl_cgrp));
        let node: *const c_void = self.behind(cgroup, setting!(cgroup_kn));
        self.behind(node, setting!(kernfs_node_id))
    }

    /// Number of the real user.
    #[inline(always)]
    fn user(self) -> u32 {
        let cred: *const c_void = self.field(setting!(task_cred));
        self.behind(cred, setting!(cred_uid))
    }

    /// The process's first thread.
    #[inline(always)]
    fn leader(self) -> Self {
        Self { pointer: self.field(setting!(task_leader)), typed: self.typed }
    }

    /// What rules leave out of it; `None` when they do not choose it. A cgroup nobody has looked at
    /// yet may be one that is not to be recorded.
    #[inline(always)]
    fn left_out(self) -> Option<u32> {
        let by = setting!(rules_by);
        let mut said = 0;
        if by & RULES_BY_CGROUP != 0 {
            // SAFETY: values are plain integers.
            match unsafe { CGROUPS.get(self.cgroup_id()) } {
                Some(bits) => said |= *bits,
                None => return None,
            }
        }
        if by & RULES_BY_USER != 0 {
            // SAFETY: values are plain integers.
            said |= unsafe { USERS.get(self.user()) }.copied().unwrap_or(0);
        }
        if by & RULES_BY_COMMAND != 0 {
            // SAFETY: values are plain integers.
            said |= unsafe { COMMANDS.get(self.leader().comm()) }.copied().unwrap_or(0);
        }
        left_out(said, setting!(rules_others))
    }

    /// From when on this thread is recorded; `None` when it is not selected, or the recording has
    /// not begun or is over.
    #[inline(always)]
    pub(crate) fn recording(self, tgid: u32) -> Option<RecordingStart> {
        let selection = setting!(selection);
        let recording = if selection == SELECT_PIDS {
            // SAFETY: values are plain integers; an entry replaced meanwhile gives another
            // process's valid start.
            *unsafe { SELECTED.get(tgid) }?
        } else {
            if tgid == setting!(excluded_tgid) {
                return None;
            }
            if selection == SELECT_CGROUP && self.cgroup_id() != setting!(cgroup_id) {
                return None;
            }
            let mut recording = *CONTROL.get(0)?;
            if selection == SELECT_RULES {
                recording.left_out = self.left_out()?;
            }
            recording
        };
        (recording.since_ns != 0 && goes_on()).then_some(recording)
    }
}

/// Whether it may differ from process to process what is recorded of it.
#[inline(always)]
pub(crate) fn has_rules() -> bool {
    setting!(selection) == SELECT_RULES
}

/// Whether the recording is not over.
#[inline(always)]
pub(crate) fn goes_on() -> bool {
    ENDED.get(0).is_some_and(|ended| *ended == 0)
}

/// Whether a thread that is known is one that is selected, without another look: by pid, since a
/// process leaves the selection when it is freed, after the last switch of its last thread.
#[inline(always)]
pub(crate) fn known_is_selected() -> bool {
    setting!(selection) == SELECT_PIDS
}

/// End of the mapping `mapping` (a `vm_area_struct` typed for the verifier), and whether it is one
/// of a file.
#[inline(always)]
pub(crate) fn mapping_end(mapping: *const c_void) -> (u64, bool) {
    let file: *const c_void = read(mapping, setting!(vma_file));
    (read(mapping, setting!(vma_end)), !file.is_null())
}

/// Reads `T` at `offset` behind a typed kernel pointer.
#[inline(always)]
fn read<T: Copy>(pointer: *const c_void, offset: u32) -> T {
    let field = pointer.cast::<u8>().wrapping_add(offset as usize).cast::<T>();
    // SAFETY: the offset is the field's, from this kernel's BTF; the verifier refuses any other,
    // and a fault reads as zero.
    unsafe { *field }
}

/// The same behind a pointer that is a number to the verifier.
#[inline(always)]
fn read_untyped<T: Copy>(pointer: *const c_void, offset: u32) -> T {
    let field = pointer.cast::<u8>().wrapping_add(offset as usize);
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the buffer has the field's size. A bad address is an error, and leaves zeros.
    unsafe {
        bpf_probe_read_kernel(value.as_mut_ptr().cast(), size_of::<T>() as u32, field.cast())
    };
    // SAFETY: integers and pointers, of which every pattern of bits is one.
    unsafe { value.assume_init() }
}
