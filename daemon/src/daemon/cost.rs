//! What the profiler itself costs: CPU time of this process and of its probes, and memory, the
//! kernel's for it included.

use perfusion_recorder::commands::CollectorStatus;
use perfusion_sources::kernel::features::PROBES_COUNTED;
use rustix::time::{ClockId, clock_gettime};
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The kernel counts the probes' run time only while it is asked to, for the counting costs up to a
/// fifth of the probes' own time: so it counts for one part of the time.
const COUNTED_FOR: Duration = Duration::from_secs(1);
const COUNT_EVERY: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Probes {
    /// The kernel counts: since when, and what each program had cost until then together.
    counting: Option<(Instant, u64)>,
    next: Option<Instant>,
    /// Part of one CPU they took when it counted last.
    rate: f64,
    /// Estimated time since the start.
    total: Duration,
    estimated: Option<Instant>,
    /// The kernel was to count and did not: see [`PROBES_COUNTED`].
    unknown: bool,
}

impl Probes {
    /// Until then, as much as when they were looked at last.
    fn until(&self, now: Instant) -> Duration {
        let since = self.estimated.map(|at| now.saturating_duration_since(at)).unwrap_or_default();
        self.total + since.mul_f64(self.rate)
    }
}

/// The costs so far.
#[derive(Debug, Default)]
pub struct Cost {
    probes: Mutex<Probes>,
    /// At the end of the last window: CPU time of daemon and probes.
    window: Mutex<(Duration, Duration)>,
    memory: Mutex<ProfilerMemory>,
}

/// CPU time taken so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// By this process.
    pub daemon: Duration,
    /// By its probes, where that is known.
    pub probes: Option<Duration>,
}

impl CpuTime {
    /// What was taken since. What probes took counts where it was known both times: to know it is
    /// no cost.
    #[must_use]
    pub fn since(self, before: Self) -> Duration {
        let probes = self.probes.zip(before.probes).map(|(now, before)| now.saturating_sub(before));
        self.daemon.saturating_sub(before.daemon) + probes.unwrap_or_default()
    }
}

/// Memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProfilerMemory {
    /// Anonymous and shared memory of this process. Pages of files are not in it: the kernel drops
    /// them when it needs room, but for those of the ring to the probes, which is one of the maps.
    pub resident: u64,
    /// Of the BPF maps, in the kernel.
    pub maps: u64,
    /// Of the rings that perf shares with this process.
    pub rings: u64,
}

impl ProfilerMemory {
    /// All together.
    #[must_use]
    pub fn total(self) -> u64 {
        self.resident.saturating_add(self.maps).saturating_add(self.rings)
    }

    /// As it is now, without the maps.
    fn of_process() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            value
                .and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok())
                .unwrap_or(0)
        };
        Self {
            resident: (kib("RssAnon:") + kib("RssShmem:")) << 10,
            maps: 0,
            rings: kib("VmPin:") << 10,
        }
    }
}

/// What the kernel has set aside for the maps this process holds, each counted once however many
/// descriptors it has.
fn map_bytes() -> u64 {
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let mut maps = std::collections::HashMap::new();
    for descriptor in descriptors {
        // Of the many files that are open only maps are looked at closer.
        if !fs::read_link(descriptor.path())
            .is_ok_and(|link| link.as_os_str() == "anon_inode:bpf-map")
        {
            continue;
        }
        let info = format!("/proc/self/fdinfo/{}", descriptor.file_name().to_string_lossy());
        let text = fs::read_to_string(info).unwrap_or_default();
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().parse::<u64>().ok()
        };
        if let (Some(id), Some(bytes)) = (field("map_id:"), field("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum()
}

/// Has the kernel count the run time of eBPF programs for as long as the answer is open
/// (BPF_ENABLE_STATS, since Linux 5.8).
pub(super) fn count_probes() -> Option<OwnedFd> {
    aya::sys::enable_stats(aya::sys::Stats::RunTime).ok()
}

/// CPU time of this process.
#[must_use]
pub fn daemon_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

impl Cost {
    /// True when the kernel should begin or end to count the probes' time: then [`Cost::observe`]
    /// is due, with counting begun before it or ended after it.
    #[must_use]
    pub fn wants_look(&self, now: Instant) -> bool {
        let probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        match probes.counting {
            Some((since, _)) => now.saturating_duration_since(since) >= COUNTED_FOR,
            None => probes.next.is_none_or(|next| now >= next),
        }
    }

    /// Takes what the programs have cost so far; true when the kernel is to go on counting.
    pub fn observe(&self, look: &CollectorStatus, now: Instant) -> bool {
        let nanos: u64 = look.costs.iter().map(|cost| cost.total_ns).sum();
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        match probes.counting.take() {
            None => {
                probes.counting = Some((now, nanos));
                true
            }
            Some((since, before)) => {
                let counted = now.saturating_duration_since(since).as_secs_f64().max(1e-3);
                let Some(taken) = nanos.checked_sub(before) else {
                    // A new recording has begun meanwhile, with programs of its own.
                    return false;
                };
                // Some probe runs at each context switch: nothing at all in a second means that
                // nobody counted.
                probes.unknown = taken == 0;
                let rate = taken as f64 / 1e9 / counted;
                if probes.estimated.is_none() {
                    (probes.estimated, probes.rate) = (Some(since), rate);
                }
                // Until now it was the rate before: what was said once is not taken back.
                probes.total = probes.until(now);
                (probes.estimated, probes.rate) = (Some(now), rate);
                probes.next = Some(now + COUNT_EVERY - COUNTED_FOR);
                false
            }
        }
    }

    /// CPU time of the probes, estimated from the parts in which the kernel counted; `None` where
    /// it does not count.
    #[must_use]
    pub fn probes_cpu(&self) -> Option<Duration> {
        let probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        (!probes.unknown).then(|| probes.until(Instant::now()))
    }

    /// A recording begins: its first window pays for itself alone.
    pub fn recording_begins(&self) {
        let now = (daemon_cpu(), self.probes_cpu().unwrap_or_default());
        *self.window.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// A recording has ended, and its programs have with it: until now they took as much as when
    /// they were looked at last, from now on nothing.
    pub fn recording_ended(&self, now: Instant) {
        let mut probes = self.probes.lock().unwrap_or_else(PoisonError::into_inner);
        *probes = Probes { total: probes.until(now), unknown: probes.unknown, ..Probes::default() };
    }

    /// Memory when it was last looked at.
    #[must_use]
    pub fn memory(&self) -> ProfilerMemory {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at it; maps only when they may have changed, for that takes a look at every open file.
    pub fn look_at_memory(&self, maps_too: bool) -> ProfilerMemory {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let maps = if maps_too { map_bytes() } else { memory.maps };
        *memory = ProfilerMemory { maps, ..ProfilerMemory::of_process() };
        *memory
    }

    /// CPU time of the daemon so far, and of the probes as far as it is known.
    #[must_use]
    pub fn spent(&self) -> CpuTime {
        CpuTime { daemon: daemon_cpu(), probes: self.probes_cpu() }
    }

    /// The costs of a window that ends now, in words.
    #[must_use]
    pub fn comment(&self, duration: Duration) -> String {
        let (daemon, probes) = (daemon_cpu(), self.probes_cpu());
        let mut before = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        let (daemon_before, probes_before) =
            std::mem::replace(&mut *before, (daemon, probes.unwrap_or_default()));
        let daemon = daemon.saturating_sub(daemon_before);
        let share = |time: Duration| 100.0 * time.as_secs_f64() / duration.as_secs_f64().max(1e-3);
        let probes = match probes.map(|probes| probes.saturating_sub(probes_before)) {
            Some(probes) => {
                format!("about {:.3} s in the probes ({:.2}%)", probes.as_secs_f64(), share(probes))
            }
            None => format!("the probes' not known ({PROBES_COUNTED})"),
        };
        let bytes = self.memory().total();
        format!(
            "cost of the profiler: {:.3} s CPU of the daemon ({:.2}% of one CPU), {probes}, {} MiB \
             with maps and rings",
            daemon.as_secs_f64(),
            share(daemon),
            bytes >> 20,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNT_EVERY, Cost};
    use perfusion_recorder::commands::CollectorStatus;
    use perfusion_sources::kernel::ProgramCost;
    use std::time::{Duration, Instant};

    fn look(total_ns: u64) -> CollectorStatus {
        let costs = vec![ProgramCost { name: "sched_switch".to_owned(), runs: 1, total_ns }];
        CollectorStatus { counters: Vec::new(), costs, shims: Vec::new() }
    }

    #[test]
    fn the_probes_time_is_estimated_from_the_part_that_was_counted() {
        let (cost, start) = (Cost::default(), Instant::now() - 2 * COUNT_EVERY);
        assert!(cost.wants_look(start));
        assert!(cost.observe(&look(5_000_000), start));
        assert!(!cost.wants_look(start + Duration::from_millis(500)));
        let second = start + Duration::from_secs(1);
        assert!(cost.wants_look(second));
        // A twentieth of a second in one second; and so, it is taken, in the nineteen since.
        assert!(!cost.observe(&look(55_000_000), second));
        let estimate = cost.probes_cpu().unwrap().as_secs_f64();
        assert!((0.99..1.2).contains(&estimate), "{estimate}");
        assert!(!cost.wants_look(second + Duration::from_secs(8)));
        assert!(cost.wants_look(second + COUNT_EVERY));
    }

    #[test]
    fn a_recording_that_has_ended_costs_no_more() {
        let (cost, start) = (Cost::default(), Instant::now() - 3 * COUNT_EVERY);
        let second = Duration::from_secs(1);
        cost.observe(&look(0), start);
        cost.observe(&look(100_000_000), start + second);
        // While the kernel counts again: a tenth of a CPU for ten seconds.
        cost.observe(&look(0), start + COUNT_EVERY);
        cost.recording_ended(start + COUNT_EVERY);
        let taken = cost.probes_cpu().unwrap();
        assert!((taken.as_secs_f64() - 1.0).abs() < 1e-6, "{taken:?}");
        // The next one is looked at anew, with programs that have taken less, and its first window
        // pays for itself alone.
        cost.recording_begins();
        assert!(cost.comment(second).contains("about 0.000 s in the probes"));
        assert!(cost.wants_look(start + COUNT_EVERY + second));
        cost.observe(&look(7), start + 2 * COUNT_EVERY);
        cost.observe(&look(7 + 10_000_000), start + 2 * COUNT_EVERY + second);
        let more = cost.probes_cpu().unwrap() - taken;
        // A hundredth of a CPU since it was looked at.
        assert!((0.09..0.2).contains(&more.as_secs_f64()), "{more:?}");
    }

    #[test]
    fn where_the_kernel_does_not_count_the_probes_time_is_not_said_to_be_zero() {
        let (cost, start) = (Cost::default(), Instant::now());
        cost.observe(&look(0), start);
        cost.observe(&look(0), start + Duration::from_secs(1));
        assert_eq!(cost.probes_cpu(), None);
        assert!(cost.comment(Duration::from_secs(1)).contains("the probes' not known"));
        // An administrator has switched it on.
        cost.observe(&look(0), start + COUNT_EVERY);
        cost.observe(&look(1_000), start + COUNT_EVERY + Duration::from_secs(1));
        assert!(cost.probes_cpu().is_some());
    }

    #[test]
    fn memory_of_this_process_is_seen() {
        let cost = Cost::default();
        let memory = cost.look_at_memory(true);
        assert!(memory.resident > 1 << 20 && cost.memory() == memory);
    }
}
