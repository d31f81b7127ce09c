//! Where the threads of a process publish what they work for.

use super::ProcessTable;
use crate::process::budget::cpu_time;
use crate::process::handle::ProcessHandle;
use crate::process::mapping::{Mapping, MappingKind};
use crate::process::published;
use crate::process::rule_update::RuleUpdate;
use crate::process::thread_contexts::ThreadContextLookup;
use crate::process::thread_variable::ThreadVariable;
use ebpf_common::key::{
    SPAN_DESCRIPTOR, SPAN_DISTANCE, SPAN_INDEX, SPAN_MODULE, SPAN_STATIC, SpanPlace,
};
use std::time::Instant;

impl ProcessTable {
    /// Looks whether the threads of `pid` publish what they work for, and tells the probes where.
    /// It comes out of the process's share of work, as far as that goes: what a process maps
    /// decides how much there is to look at.
    pub fn find_spans(&mut self, pid: u32) -> ThreadContextLookup {
        // The access models of thread-local variables are those of x86-64.
        if !cfg!(target_arch = "x86_64") {
            return ThreadContextLookup::Nothing;
        }
        let publishes = |_: &mut Self| {
            let published =
                ProcessHandle::open(pid).ok().and_then(|target| published::read(&target));
            published.is_some_and(|published| published.threads)
        };
        match self.within_share(pid, publishes) {
            None => return ThreadContextLookup::PutOff,
            Some(false) => return ThreadContextLookup::Nothing,
            Some(true) => {}
        }
        match self.thread_pointers(pid) {
            None => ThreadContextLookup::PutOff,
            Some(None) => ThreadContextLookup::Nothing,
            Some(Some(place)) => {
                self.updates.push(RuleUpdate::Spans { pid, place });
                ThreadContextLookup::There
            }
        }
    }

    /// Where the threads of `pid` have the variable that points to what they publish, if one of its
    /// files defines it; `None` when its share of work is used up before that is known. What was
    /// found out until then need not be found out again.
    pub(super) fn thread_pointers(&mut self, pid: u32) -> Option<Option<SpanPlace>> {
        let mappings: Vec<Mapping> = self
            .mappings(pid)
            .filter(|mapping| mapping.region == MappingKind::File)
            .cloned()
            .collect();
        // Debian's musl is called by the C library's name, of which its loader's is a link.
        let is_musl = |path: &str| path.contains("/ld-musl") || path.contains("-linux-musl/");
        let entry_bytes =
            if mappings.iter().any(|mapping| is_musl(&mapping.path)) { 8 } else { 16 };
        for mapping in mappings {
            let found = self.within_share(pid, |table| table.thread_pointer_in(pid, &mapping))?;
            if let Some(place) = found {
                return Some(Some(SpanPlace { entry_bytes, ..place }));
            }
        }
        Some(None)
    }

    /// The same by one of its mappings.
    fn thread_pointer_in(&mut self, pid: u32, mapping: &Mapping) -> Option<SpanPlace> {
        let process = self.registry.live.get_mut(&pid)?;
        let key = mapping.file();
        let asked = match process.space.images.get(&key) {
            // It could not be opened.
            Some(None) => return None,
            Some(Some(id)) if self.images.is_asked(*id) => Some(*id),
            _ => None,
        };
        let id = match asked {
            Some(id) => id,
            None => {
                let id = self.images.resolve(pid, mapping, process.elsewhere).ok()?;
                process.set_image(key, Some(id));
                id
            }
        };
        let variable = self.images.thread_variable(id)?;
        let image = self.images.get(id)?;
        let bias = mapping.range.start.wrapping_sub(image.mapped_address(mapping.file_offset)?);
        let at = |address: u64| bias.wrapping_add(address);
        let (kind, address, offset) = match variable {
            ThreadVariable::Static(offset) => (SPAN_STATIC, 0, offset.cast_unsigned()),
            ThreadVariable::Distance(address) => (SPAN_DISTANCE, at(address), 0),
            ThreadVariable::Descriptor(address) => (SPAN_DESCRIPTOR, at(address), 0),
            ThreadVariable::Index(address) => (SPAN_INDEX, at(address), 0),
            ThreadVariable::Module(address, offset) => (SPAN_MODULE, at(address), offset),
        };
        Some(SpanPlace { address, offset, kind, entry_bytes: 0 })
    }

    /// Does what the process's share of work has room for.
    fn within_share<T>(&mut self, pid: u32, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let process = self.registry.live.get_mut(&pid)?;
        process.refill(&mut self.common, Instant::now());
        if !self.common.has_time(&process.share) {
            self.counters.budget_refusals += 1;
            return None;
        }
        let before = cpu_time();
        let done = work(self);
        if let Some(process) = self.registry.live.get_mut(&pid) {
            self.common.spend(&mut process.share, cpu_time().saturating_sub(before));
        }
        Some(done)
    }

    /// The threads of `pid` are gone, or publish nothing any more.
    pub fn forget_spans(&mut self, pid: u32) {
        self.updates.push(RuleUpdate::NoSpans { pid });
    }
}
