//! What there is per CPU: a sampling timer and perf's ring of process records. CPUs come and go
//! while we record.
//!
//! When a CPU goes its events are taken off it for good: neither timer nor ring speaks again when
//! it is back, and no call says so (no POLLHUP either; `perf_event_exit_cpu`,
//! kernel/events/core.c). What shows is that the event's own clock stands still.

use super::counters::ReceiveCounters;
use super::perf::{PerfRing, RingError};
use super::{KernelError, decode, load};
use aya::Ebpf;
use aya::programs::perf_event::PerfEventLinkId;
use decode::PerfRecord;
use ebpf_common::counter::Counter;
use perfusion_host::cpus;
use perfusion_model::event::Event;
use rustix::event::epoll;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

/// CPUs are looked for that often.
const LOOK_NS: u64 = 1_000_000_000;

/// All CPUs at work.
pub(super) struct CpuRings {
    /// Readable when a ring has been written to since it was last asked.
    bell: OwnedFd,
    rings: HashMap<u32, PerfRing>,
    samplers: HashMap<u32, PerfEventLinkId>,
    looked_ns: u64,
    buffer: Vec<u8>,
}

/// What has changed among the CPUs.
pub(super) struct CpuChanges {
    online: Vec<u32>,
    /// Their events are dead.
    dead: HashSet<u32>,
}

impl CpuRings {
    /// Opens the rings. Before anything else, so that no mapping made from now on is missed.
    pub(super) fn open(now_ns: u64) -> Result<Self, KernelError> {
        let online = cpus::online()?;
        let failed = |cpu| move |source| KernelError::Perf { cpu, source };
        let bell =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(0)(error.into()))?;
        let mut rings = HashMap::new();
        for cpu in online {
            let ring = open_ring(&bell, cpu).map_err(|error| match error {
                RingError::Event(source) => KernelError::Perf { cpu, source },
                RingError::Map(source) => KernelError::PerfRing { cpu, source },
            })?;
            rings.insert(cpu, ring);
        }
        Ok(Self { bell, rings, samplers: HashMap::new(), looked_ns: now_ns, buffer: Vec::new() })
    }

    /// Readable when some process has begun, ended, or changed since it was last asked.
    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn count(&self) -> usize {
        self.rings.len()
    }

    /// Starts sampling.
    pub(super) fn sample(&mut self, bpf: &mut Ebpf, frequency_hz: u32) -> Result<(), KernelError> {
        for &cpu in self.rings.keys() {
            self.samplers.insert(cpu, load::attach_sampler(bpf, cpu, frequency_hz)?);
        }
        Ok(())
    }

    /// Samples at another rate. Answers how many timers cannot be had; they are tried again with
    /// the next look.
    pub(super) fn sample_anew(&mut self, bpf: &mut Ebpf, frequency_hz: u32) -> u64 {
        for (_, timer) in self.samplers.drain() {
            load::detach_sampler(bpf, timer);
        }
        self.add_samplers(bpf, frequency_hz)
    }

    fn add_samplers(&mut self, bpf: &mut Ebpf, frequency_hz: u32) -> u64 {
        let mut failed = 0;
        for &cpu in self.rings.keys() {
            if let Entry::Vacant(place) = self.samplers.entry(cpu) {
                match load::attach_sampler(bpf, cpu, frequency_hz) {
                    Ok(timer) => drop(place.insert(timer)),
                    Err(_) => failed += 1,
                }
            }
        }
        failed
    }

    /// Looks which CPUs there are, when it is time. What dead rings hold is to be read before
    /// [`CpuRings::follow`].
    pub(super) fn look(&mut self, now_ns: u64) -> Option<CpuChanges> {
        if now_ns.saturating_sub(self.looked_ns) < LOOK_NS {
            return None;
        }
        self.looked_ns = now_ns;
        let online = cpus::online().ok()?;
        let is_dead = |cpu: u32, ring: &mut PerfRing| !online.contains(&cpu) || !ring.is_alive();
        let dead =
            self.rings.iter_mut().filter_map(|(&cpu, ring)| is_dead(cpu, ring).then_some(cpu));
        Some(CpuChanges { dead: dead.collect(), online })
    }

    /// Lets go of what is dead and begins with what is new. Answers how much of that cannot be had,
    /// and whether there may have been process records that no ring took.
    pub(super) fn follow(
        &mut self,
        bpf: &mut Ebpf,
        frequency_hz: u32,
        changes: &CpuChanges,
    ) -> (u64, bool) {
        self.rings.retain(|cpu, _| !changes.dead.contains(cpu));
        for (_, timer) in self.samplers.extract_if(|cpu, _| !self.rings.contains_key(cpu)) {
            load::detach_sampler(bpf, timer);
        }
        let (mut failed, mut missed) = (0, false);
        for &cpu in &changes.online {
            if let Entry::Vacant(place) = self.rings.entry(cpu) {
                match open_ring(&self.bell, cpu) {
                    Ok(ring) => {
                        place.insert(ring);
                        // It was at work before.
                        missed = true;
                    }
                    Err(_) => failed += 1,
                }
            }
        }
        (failed + self.add_samplers(bpf, frequency_hz), missed)
    }

    /// Reads all rings. Their records are put in order, so that a child's come after the fork that
    /// makes them wanted. Answers whether some were lost.
    pub(super) fn read(&mut self, counts: &ReceiveCounters, events: &mut Vec<Event>) -> bool {
        let mut lost = false;
        for ring in self.rings.values_mut() {
            self.buffer.clear();
            ring.read(&mut self.buffer);
            let end = decode::perf_records(&self.buffer, &mut |record| match record {
                Ok(PerfRecord::Event(event)) => {
                    counts.add(Counter::PerfRecords, 1);
                    events.push(*event);
                }
                Ok(PerfRecord::Lost(records)) => {
                    counts.add(Counter::PerfLost, records);
                    lost = true;
                }
                Ok(PerfRecord::Other) => {}
                Err(_) => {
                    counts.add(Counter::PerfBad, 1);
                    lost = true;
                }
            });
            if end.is_err() {
                counts.add(Counter::PerfBad, 1);
                lost = true;
            }
        }
        events.sort_by_key(|event| event.time);
        lost
    }
}

/// The ring of `cpu`, which rings `bell`; no more once it is closed (man 7 epoll).
fn open_ring(bell: &OwnedFd, cpu: u32) -> Result<PerfRing, RingError> {
    let ring = PerfRing::open(cpu)?;
    epoll::add(bell, &ring, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
        .map_err(|error| RingError::Event(error.into()))?;
    Ok(ring)
}
