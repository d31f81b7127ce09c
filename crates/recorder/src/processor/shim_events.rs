//! What shims tell: names, and events of the runtimes.

use super::Processor;
use super::questions::StackTimes;
use super::regions::ShimRuntime;
use perfusion_aggregate::exceptions_and_contentions::RuntimeEventSite;
use perfusion_model::event::{
    Allocation, Contention, Exception, MonotonicNs, RegionId, RuntimeSample, ShimEvent, ThreadId,
};
use profiler_protocol::record::NOT_NOW;

impl Processor {
    pub(super) fn shim(&mut self, time: MonotonicNs, pid: u32, region: RegionId, event: ShimEvent) {
        self.names_of_shim(time, pid, region, &event);
        if self.rotation.is_closed(time) {
            return self.count_late(&event);
        }
        match event {
            ShimEvent::Allocation(allocation) => self.allocation(time, pid, region, &allocation),
            ShimEvent::Exception(exception) => self.exception(time, pid, region, &exception),
            ShimEvent::Contention(contention) => self.contention(time, pid, region, &contention),
            ShimEvent::ThreadAt { tid, address } => {
                self.identities.pre_attach.add(ThreadId { pid, tid }, address);
            }
            ShimEvent::ThreadName { tid, name } => {
                let (thread, accounts) = (ThreadId { pid, tid }, &mut self.values.accounts);
                self.identities.named_by_runtime(thread, &name, accounts);
            }
            ShimEvent::Mark => self.questions.mark_heard(region),
            ShimEvent::Bye => self.regions.ends(region, time),
            event => {
                if let ShimEvent::Hello { runtime: version, watches } = event {
                    self.regions.set_runtime(region, ShimRuntime { version, watches });
                }
                self.values.observe(time, pid, region, &event);
            }
        }
    }

    /// Takes up the names that the event tells or revokes. It may lead to further questions.
    fn names_of_shim(&mut self, time: MonotonicNs, pid: u32, region: RegionId, event: &ShimEvent) {
        let is_new = self.regions.observe(region, pid);
        if let ShimEvent::TypeName { type_id, module_id, name, module } = event {
            self.values.heap.types.learn(region, *type_id, name, (module, *module_id));
        }
        let (process, is_living) = match self.identities.retired.of_region(region) {
            Some(retired) => (retired.process, false),
            None => (self.processes.adopt(pid).ok(), true),
        };
        let Some(process) = process else { return };
        match *event {
            ShimEvent::NoMethod { asked, hresult: NOT_NOW, seen }
                if self.symbolizer.is_waiting(process, asked)
                    && self.questions.repeat_if_seen_since(pid, asked, seen) => {}
            _ if is_living => self.symbolizer.observe_living(process, pid, event),
            _ => self.symbolizer.observe(process, event),
        }
        if let ShimEvent::NoMethod { asked, .. } = *event {
            self.questions.refused(pid, asked);
        }
        if let ShimEvent::Method(method) = event {
            self.questions.ask_neighbours(process, pid, method, &self.symbolizer);
        }
        if is_new {
            self.questions.ask_new_shim(process, pid, time, &self.symbolizer);
        }
    }

    /// An event after the recording's end is only counted.
    fn count_late(&mut self, event: &ShimEvent) {
        match event {
            ShimEvent::Allocation(_) => self.counters.allocations_after_end += 1,
            ShimEvent::Exception(_) | ShimEvent::Contention(_) => {
                self.counters.runtime_events_after_end += 1;
            }
            _ => {}
        }
    }

    fn allocation(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        allocation: &Allocation,
    ) {
        self.counters.allocations += 1;
        let times = StackTimes { now: time, seen: allocation.seen };
        let stack = self.event_stack(pid, times, &allocation.user);
        let name = self.identities.names.id(ThreadId { pid, tid: allocation.tid });
        self.values.add_allocation(region, time, allocation, (stack, name));
    }

    fn exception(&mut self, time: MonotonicNs, pid: u32, region: RegionId, exception: &Exception) {
        self.counters.exceptions += 1;
        let RuntimeSample { tid, seen, ref user, .. } = exception.at;
        let name = self.identities.names.id(ThreadId { pid, tid });
        let stack = self.event_stack(pid, StackTimes { now: time, seen }, user);
        self.values.add_exception(exception, RuntimeEventSite { region, tid, name, stack });
    }

    fn contention(
        &mut self,
        time: MonotonicNs,
        pid: u32,
        region: RegionId,
        contention: &Contention,
    ) {
        self.counters.contentions += 1;
        let RuntimeSample { tid, seen, ref user, .. } = contention.at;
        let mut frames = Vec::new();
        self.unwind(pid, StackTimes { now: time, seen }, user, &mut frames);
        self.values.lock_events.note(&frames);
        let stack = self.intern_event(frames);
        let name = self.identities.names.id(ThreadId { pid, tid });
        let place = RuntimeEventSite { region, tid, name, stack };
        self.values.add_contention(pid, time, contention, place);
    }
}
