//! What events say about processes and code.

use super::ProcessTable;
use super::held_memory::MAX_MAPPING_BYTES;
use crate::process::budget::cpu_time;
use crate::process::container::home;
use crate::process::images::ParentFallback;
use crate::process::mapping::{Mapping, MappingKind};
use crate::process::name::ProcessName;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::event::{Event, EventKind, Mmap, MonotonicNs, ShimEvent, ThreadId};
use std::sync::Arc;
use std::time::Instant;

/// Most files a forked process takes over as its parent's; one with more looks for each when it is
/// needed. Copies of very many, in very many children, would be gigabytes.
pub(super) const MAX_INHERITED: usize = 256;

impl ProcessTable {
    /// Takes up what an event says about processes and code; ignores all others.
    pub fn observe(&mut self, event: &Event) {
        match &event.kind {
            EventKind::Exec { pid, comm } => self.execs(*pid, comm),
            EventKind::Fork { parent, thread } if parent.pid != thread.pid => {
                self.forks(*parent, *thread, event.time);
            }
            EventKind::Exit { thread } if thread.tid == thread.pid => {
                self.registry.exits(thread.pid, event.time);
            }
            EventKind::Comm { thread, comm } if thread.tid == thread.pid => {
                if let Some((_, info)) = self.registry.known(thread.pid) {
                    info.name.renamed(thread.pid, comm);
                }
            }
            EventKind::Mmap(mmap) => self.maps(mmap, event.time),
            EventKind::ProcessRecordsLost => self.lost.note(),
            EventKind::Shim { pid, event: ShimEvent::CodeUnloaded { ranges }, .. } => {
                self.unloads(*pid, ranges);
            }
            _ => {}
        }
        if self.lost.is_due() {
            self.doubt_all();
        }
        self.registry.drop_exited(event.time, &mut self.updates);
    }

    /// The process has become another program.
    fn execs(&mut self, pid: u32, comm: &str) {
        let old = self.registry.remove(pid, &mut self.updates);
        let (exec_count, start_ticks) = match &old {
            Some(old) => (self.info(old.id).map_or(0, |i| i.exec_count) + 1, old.start_ticks),
            None => (1, None),
        };
        // Read anew: runtimes move their child into the container's cgroup just before they let it
        // become the program.
        let home = home(pid);
        let name = ProcessName::of(pid, comm);
        let new = self.insert(pid, start_ticks, exec_count, name, home, Arc::default());
        if let (Ok(_), Some(new)) = (new, self.registry.live.get_mut(&pid)) {
            // All its mappings are about to be reported; what is in none of them is an address of
            // the program before.
            new.space.set_refreshed(Instant::now());
            if let Some(old) = old {
                (new.share, new.elsewhere) = (old.share, old.elsewhere);
            }
        }
    }

    /// A process has made another one, which has its mappings.
    fn forks(&mut self, parent: ThreadId, child: ThreadId, time: MonotonicNs) {
        let Some(from) = self.registry.live.get(&parent.pid) else {
            // A fork of a process never seen is read from /proc when its first sample comes.
            self.registry.remove(child.pid, &mut self.updates);
            return;
        };
        let in_doubt = from.space.in_doubt;
        let mappings = Arc::clone(&from.space.mappings);
        let few = from.space.images.len() <= MAX_INHERITED;
        let images = if few { from.space.images.clone() } else { HashMap::new() };
        let info = self.registry.identity(from.id);
        let name = info.map(|i| i.name.clone()).unwrap_or_default();
        let home = info.map(|i| i.home.clone()).unwrap_or_default();
        if self.insert(child.pid, None, 0, name, home, mappings).is_ok()
            && let Some(process) = self.registry.live.get_mut(&child.pid)
        {
            process.space.images = images;
            process.elsewhere = Some(ParentFallback { parent: parent.pid, at: time });
            process.space.in_doubt = in_doubt;
        }
    }

    /// A process has mapped code.
    fn maps(&mut self, mmap: &Mmap, time: MonotonicNs) {
        let Some(mapping) = Mapping::new(mmap) else { return };
        let Some(process) = self.registry.live.get_mut(&mmap.pid) else { return };
        // Its own paths are those of its files, which all processes share.
        let mapping = self.images.share_path(mapping);
        let shared = Arc::strong_count(&process.space.mappings) > 1;
        let before = if shared { 0 } else { process.space.mappings.held_bytes() };
        // Opened while the process is most likely there, and always: the inode may be another
        // file's by now.
        if mapping.region == MappingKind::File {
            let key = mapping.file();
            process.refill(&mut self.common, Instant::now());
            if self.common.has_time(&process.share) {
                let before = cpu_time();
                let elsewhere =
                    process.elsewhere.map(|elsewhere| ParentFallback { at: time, ..elsewhere });
                let known = process.space.known_image(key);
                let image = self.images.resolve(mmap.pid, &mapping, elsewhere).ok();
                // It may be gone or out of reach by now, and is the one that was known while nobody
                // wrote to that.
                let image = image.or(known.filter(|id| self.images.is_unchanged(*id)));
                process.set_image(key, image);
                self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
            } else {
                // Looked for when a stack needs it.
                self.counters.budget_refusals += 1;
                if process.space.images.remove(&key).flatten().is_some() {
                    process.forget_file(key);
                }
            }
        }
        process.map(mapping, &mut self.counters);
        process.code.pushed.take_back(&mut self.updates);
        self.held.mapping_bytes += process.space.mappings.held_bytes().saturating_sub(before);
        let (id, is_clr) = (process.id, process.space.is_clr);
        if let Some(info) = self.registry.identity_mut(id) {
            info.is_clr = is_clr;
        }
        self.evict_mappings(MAX_MAPPING_BYTES, Some(mmap.pid));
    }

    /// A process has unloaded code from these ranges: where each begins, and its length.
    fn unloads(&mut self, pid: u32, ranges: &[(u64, u64)]) {
        if let Some(process) = self.registry.live.get_mut(&pid) {
            for (start, length) in ranges {
                process.code.forget(&(*start..start.saturating_add(*length)));
            }
            process.code.pushed.take_back(&mut self.updates);
        }
    }

    /// Doubts all processes: an exec, a fork, a mapping or the end of any of them may be unknown,
    /// so each is read anew from /proc when its next stack comes.
    fn doubt_all(&mut self) {
        self.lost.doubt();
        self.counters.doubts += 1;
        for process in self.registry.live.values_mut() {
            process.space.in_doubt = true;
        }
    }
}
