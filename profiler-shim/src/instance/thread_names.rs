//! Names of managed threads.

use super::Instance;
use crate::text::BoundedText;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use profiler_protocol::counter::Counter;
use profiler_protocol::record::RecordBody;

/// Threads that were named before they had an OS id, and the bytes of a name that are kept.
const PENDING_NAMES: usize = 64;
const NAME_BYTES: usize = 120;

/// Names that came before their threads' OS ids.
pub(super) struct ThreadNames {
    pending: [PendingName; PENDING_NAMES],
}

/// A managed thread's name that came before its OS id. `thread` is claimed first, `bytes` are words
/// of UTF-8.
struct PendingName {
    thread: AtomicUsize,
    words: [AtomicU64; NAME_BYTES / 8],
}

impl Instance {
    /// A managed thread runs on this OS thread.
    pub(crate) fn on_thread_assigned(&self, thread: usize, os_thread: u32) {
        let (mut name, mut len) = ([0u8; NAME_BYTES], 0usize);
        for pending in &self.thread_names.pending {
            if pending.thread.load(Ordering::Acquire) == thread {
                let bytes = pending
                    .words
                    .iter()
                    .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
                for (to, byte) in name.iter_mut().zip(bytes.take_while(|byte| *byte != 0)) {
                    *to = byte;
                    len = len.wrapping_add(1);
                }
                pending.thread.store(0, Ordering::Release);
                break;
            }
        }
        if self.is_listening() {
            let name =
                name.get(..len).and_then(|name| core::str::from_utf8(name).ok()).unwrap_or("");
            self.send(RecordBody::ThreadName { os_tid: os_thread, name });
        }
    }

    /// A managed thread has a name. When it does not run yet, the name is kept until it does.
    pub(crate) fn on_thread_named(&self, thread: usize, name: &[u16]) {
        let os_thread = self.info().and_then(|info| info.os_thread(thread)).unwrap_or(0);
        let mut text = BoundedText::<NAME_BYTES>::new();
        text.push_utf16(name);
        if os_thread != 0 {
            if self.is_listening() {
                self.send(RecordBody::ThreadName { os_tid: os_thread, name: text.as_str() });
            }
            return;
        }
        // A thread is named by one thread at a time, so an earlier name of its is not in use.
        self.on_thread_destroyed(thread);
        let free = self.thread_names.pending.iter().find(|p| {
            p.thread.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let Some(pending) = free else { return self.count(Counter::NamesCut) };
        let mut told = text.as_str().bytes();
        for word in &pending.words {
            let mut bytes = [0u8; 8];
            for (byte, of_name) in bytes.iter_mut().zip(&mut told) {
                *byte = of_name;
            }
            word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        }
        // Release: pairs with the acquire in `on_thread_assigned`.
        pending.thread.store(thread, Ordering::Release);
    }

    /// A managed thread is no more: had it a name and never ran, the name goes.
    pub(crate) fn on_thread_destroyed(&self, thread: usize) {
        for pending in &self.thread_names.pending {
            pending.thread.compare_exchange(thread, 0, Ordering::AcqRel, Ordering::Relaxed).ok();
        }
    }

    /// Tells the OS ids of the managed threads there are, and where the runtime has them: after an
    /// attach, before any event is asked for.
    pub(crate) fn list_threads(&self) {
        let Some(info) = self.info() else { return };
        info.each_thread(|thread| {
            if let Some(os_tid) = info.os_thread(thread) {
                self.send(RecordBody::ThreadAt { os_tid, address: thread as u64 });
            }
        });
    }
}
