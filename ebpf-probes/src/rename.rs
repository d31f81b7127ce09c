//! Sends a thread's times until now when it gets another name: they belong to the old one.
//!
//! A thread may rename itself a million times a second. So only a number of renames a second is
//! sent for each thread. The daemon attributes what comes after that by the names in the samples.

use crate::config::Task;
use crate::emit::small_record;
use crate::log::lost;
use crate::maps::{THREADS, count};
use crate::sched::{get, put, state_of};
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_probe_read_kernel_str};
use aya_ebpf::programs::BtfTracePointContext;
use core::ffi::c_void;
use core::mem::size_of;
use ebpf_common::counter::Counter;
use ebpf_common::event::{FLAG_SKIPPED, KIND_RENAME, RecordHeader, RenameRecord};
use ebpf_common::key::STATE_DEAD;
use ebpf_common::limits::{COMM_BYTES, MAX_RENAMES};

/// `void task_rename(struct task_struct *task, const char *comm)`: `task` is about to be called
/// `comm`. In `execve` it comes before the thread has become another program, of which
/// `sched_process_exec` tells.
#[inline(always)]
pub(crate) fn renamed(ctx: &BtfTracePointContext) {
    let task = Task::typed(ctx.arg(0));
    let (tid, tgid) = (task.tid(), task.tgid());
    let Some(thread) = THREADS.get_ptr_mut(tid) else { return };
    // SAFETY: an entry of the map, which outlives the program. The two fields that are written here
    // are this hook's alone.
    let thread = unsafe { &mut *thread };
    let own = thread.stack == task.stack() || thread.stack == 0;
    if thread.tgid != tgid || !own || state_of(thread) == STATE_DEAD || task.in_execve() {
        return;
    }
    if task.recording(tgid).is_none() {
        return;
    }
    count(Counter::Renames);
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let second = (now >> 30) as u32;
    let mut renames = get(&thread.renames);
    let mut flags = 0;
    if get(&thread.renamed_in) != second {
        if renames > MAX_RENAMES {
            flags = FLAG_SKIPPED;
        }
        put(&mut thread.renamed_in, second);
        renames = 0;
    }
    if renames >= MAX_RENAMES {
        put(&mut thread.renames, MAX_RENAMES + 1);
        return count(Counter::RenamesSkipped);
    }
    put(&mut thread.renames, renames + 1);
    let mut record = RenameRecord {
        header: RecordHeader {
            kind: KIND_RENAME,
            len: size_of::<RenameRecord>() as u32,
            time_ns: now,
        },
        tid,
        flags,
        from: task.comm(),
        to: [0; COMM_BYTES],
        thread: *thread,
    };
    let name: *const c_void = ctx.arg(1);
    // SAFETY: the buffer has so many bytes, and the helper stands any address.
    let read = unsafe {
        bpf_probe_read_kernel_str(record.to.as_mut_ptr().cast(), COMM_BYTES as u32, name)
    };
    if read > 0 && small_record(&mut record) {
        count(Counter::RenamesStored);
    } else {
        // The next one says that one is missing.
        put(&mut thread.renames, MAX_RENAMES + 1);
        lost(Counter::RenamesRingFull, tid, 0);
    }
}
