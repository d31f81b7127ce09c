//! perf's own records (mmap2, comm, fork, exit), which aya cannot ask for. The only system calls
//! and the only mapped memory of this source that need `unsafe` are here; what the bytes mean is in
//! `decode`.

use perf_event_open_sys::bindings as sys;
use perf_event_open_sys::perf_event_open;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Data pages of one ring. 256 KiB with the control page stay below `kernel.perf_event_mlock_kb`
/// (516 KiB a CPU), so that everybody who may open the event may map it; 1 MiB, which needs
/// CAP_IPC_LOCK, outlasts a burst of new processes better.
const DATA_PAGES: [usize; 2] = [256, 64];

/// One CPU's ring.
pub(super) struct PerfRing {
    base: NonNull<u8>,
    map_len: usize,
    data_offset: usize,
    data_len: usize,
    tail: u64,
    /// How long it had been open when that was last asked.
    enabled_ns: u64,
    event: OwnedFd,
}

/// The system call that failed, and what it answered.
#[derive(Debug)]
pub(super) enum RingError {
    /// `perf_event_open`, or `epoll_ctl` on what it gave.
    Event(io::Error),
    /// `mmap`.
    Map(io::Error),
}

// SAFETY: the mapping belongs to this value alone and is not tied to a thread.
unsafe impl Send for PerfRing {}

/// A software event that never counts, for the sake of the records that come with it.
fn attributes() -> sys::perf_event_attr {
    let mut attributes = sys::perf_event_attr {
        type_: sys::PERF_TYPE_SOFTWARE,
        size: u32::try_from(size_of::<sys::perf_event_attr>()).unwrap_or(0),
        config: u64::from(sys::PERF_COUNT_SW_DUMMY),
        sample_type: u64::from(sys::PERF_SAMPLE_TID | sys::PERF_SAMPLE_TIME),
        read_format: u64::from(sys::PERF_FORMAT_TOTAL_TIME_ENABLED),
        ..Default::default()
    };
    attributes.set_mmap(1); // executable mappings
    attributes.set_mmap2(1); // with device and inode
    attributes.set_comm(1);
    attributes.set_comm_exec(1); // tells execve from prctl
    attributes.set_task(1); // fork and exit
    attributes.set_sample_id_all(1); // a time on each record
    attributes.set_use_clockid(1); // CLOCK_MONOTONIC, the probes' clock
    attributes.clockid = 1;
    // Each record rings, having more than one byte. `wakeup_events` counts samples only
    // (`perf_output_sample`, kernel/events/core.c).
    attributes.set_watermark(1);
    attributes.__bindgen_anon_2.wakeup_watermark = 1;
    attributes
}

fn open(cpu: u32) -> io::Result<OwnedFd> {
    let mut attributes = attributes();
    let cpu = i32::try_from(cpu).map_err(io::Error::other)?;
    let flags = u64::from(sys::PERF_FLAG_FD_CLOEXEC);
    // SAFETY: the attributes live through the call and carry their own size.
    let fd = unsafe {
        perf_event_open(&raw mut attributes, -1, cpu, -1, std::ffi::c_ulong::from(flags))
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether this process may watch all processes of a CPU.
///
/// # Errors
/// What `perf_event_open` answered.
pub(super) fn permitted(cpu: u32) -> io::Result<()> {
    open(cpu).map(drop)
}

impl PerfRing {
    /// Opens and maps the ring of `cpu`.
    ///
    /// # Errors
    /// What the system calls answered.
    pub(super) fn open(cpu: u32) -> Result<Self, RingError> {
        let event = open(cpu).map_err(RingError::Event)?;
        let page = rustix::param::page_size();
        let map = |pages: usize| {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe {
                mmap(std::ptr::null_mut(), page * (pages + 1), access, MapFlags::SHARED, &event, 0)
            }
        };
        let [large, small] = DATA_PAGES;
        let (base, pages) = match map(large) {
            Ok(base) => (base, large),
            Err(_) => (map(small).map_err(|error| RingError::Map(error.into()))?, small),
        };
        let base = NonNull::new(base.cast::<u8>());
        let base = base.ok_or_else(|| RingError::Map(io::ErrorKind::InvalidData.into()))?;
        // The data start behind the control page (man 2 perf_event_open, "MMAP layout").
        let (map_len, data_len) = (page * (pages + 1), page * pages);
        Ok(Self { base, map_len, data_offset: page, data_len, tail: 0, enabled_ns: 0, event })
    }

    /// False when its CPU was away since the last call: then nothing comes any more.
    pub(super) fn is_alive(&mut self) -> bool {
        // The value, which is 0, and the time.
        let mut read = [0u64; 2];
        let whole = rustix::io::read(&self.event, bytemuck::bytes_of_mut(&mut read))
            == Ok(size_of_val(&read));
        let [_, enabled_ns] = read;
        std::mem::replace(&mut self.enabled_ns, enabled_ns) != enabled_ns && whole
    }

    /// Appends to `into` all bytes written since the last call, and gives their room back.
    pub(super) fn read(&mut self, into: &mut Vec<u8>) {
        let control = self.base.cast::<sys::perf_event_mmap_page>().as_ptr();
        // SAFETY: the control page is mapped as long as `self` lives.
        let head = unsafe { &raw mut (*control).data_head };
        // SAFETY: aligned, mapped, and only ever changed atomically by the kernel.
        let head = unsafe { AtomicU64::from_ptr(head) };
        // Pairs with the kernel's barrier before it moves data_head (kernel/events/ring_buffer.c).
        let head = head.load(Ordering::Acquire);
        let available =
            usize::try_from(head.wrapping_sub(self.tail)).unwrap_or(usize::MAX).min(self.data_len);
        let start = usize::try_from(self.tail).unwrap_or(0) % self.data_len;
        let first = available.min(self.data_len - start);
        for (at, len) in [(start, first), (0, available - first)] {
            // SAFETY: `at` lies inside the data area.
            let data = unsafe { self.base.as_ptr().add(self.data_offset + at) };
            // SAFETY: `at + len` lies inside the data area, and the kernel does not write to what
            // the tail has not released.
            into.extend_from_slice(unsafe { std::slice::from_raw_parts(data, len) });
        }
        self.tail = head;
        // SAFETY: as for the head.
        let tail = unsafe { &raw mut (*control).data_tail };
        // SAFETY: aligned, mapped; the kernel reads it atomically.
        let tail = unsafe { AtomicU64::from_ptr(tail) };
        // Pairs with the kernel's control dependency on data_tail: the copy is done before the room
        // is given back.
        tail.store(head, Ordering::Release);
    }
}

impl AsFd for PerfRing {
    /// Readable after a record, until asked.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for PerfRing {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `open`, of that length, which nothing borrows any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.map_len) };
        // Fails for a wrong address or length only.
        unmapped.ok();
    }
}
