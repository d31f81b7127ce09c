//! A window that is over → one finished profile per service, handed to each sink.

use super::sinks::WindowSender;
use super::{families, memory_budget, state::DaemonState};
use crate::config::RecordingConfig;
use perfusion_aggregate::window::WindowEntry;
use perfusion_export::quantity::ByteSize;
use perfusion_export::{FinishedProfile, Packed};
use perfusion_model::feature::{ExcludedFeatures, Feature};
use perfusion_model::labels::{OTHER, SampleType};
use perfusion_pprof::{self, ProfileInfo};
use perfusion_recorder::ClosedWindow;
use perfusion_recorder::counter_values::{self, CounterBaseline};
use perfusion_sources::SourceRates;
use perfusion_sources::kernel::rule_set::ServiceExclusions;
use perfusion_sources::shim::AS_ASKED;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Encodes windows, on the processor's thread.
pub struct WindowEncoder {
    state: Arc<DaemonState>,
    out: WindowSender,
    /// Counters when the window before ended.
    before: CounterBaseline,
}

/// The part of a window that is one service's.
struct ServicePart<'a> {
    entries: Vec<WindowEntry<'a>>,
    cpu: f64,
    wall: f64,
}

impl WindowEncoder {
    /// Hands finished windows to `out`.
    #[must_use]
    pub fn new(state: Arc<DaemonState>, out: WindowSender) -> Self {
        // These are of the whole process, the others of the recording that begins.
        Self { state, out, before: CounterBaseline::of(counter_values::process_counters()) }
    }

    /// Encodes one window. What finds no room among those that wait for the sinks is dropped and
    /// counted: waiting would hold up the next one.
    pub fn take(&mut self, over: ClosedWindow<'_>) {
        // Those of a window itself begin at zero with it, and what is in a cache now is no
        // difference.
        let is_own = |name: &str| name.starts_with("window_") || families::may_fall(name);
        let counters = self.before.since(&over.counters, is_own);
        let config = self.state.config();
        let duration = Duration::from_nanos(over.ended.0.saturating_sub(over.began.0));
        let frequency = over.rates.kernel.frequency_hz;
        let comments = self.comments(&over, &counters, duration);
        let labels = self.state.labels(&config);
        let (parts, folded) = parts(over.window.entries(), config.services.max);
        self.state.counters.services_folded.add(folded);
        let mut finished = Vec::with_capacity(parts.len());
        for (service, part) in parts {
            let pid = part.entries.iter().find_map(|entry| entry.labels.pid);
            let about = ProfileInfo {
                start: over.ended_wall.checked_sub(duration).unwrap_or(over.ended_wall),
                duration,
                period_ns: 1_000_000_000 / u64::from(frequency.max(1)),
                main_image: pid.and_then(|pid| over.processor.processes.main_image(pid)),
                comments: [
                    with_pools(&comments, &over, &service),
                    self.left_out(&over, &service, frequency),
                    self.state
                        .attaches
                        .coverage(&service)
                        .comments(Instant::now(), duration)
                        .collect(),
                ]
                .concat(),
            };
            let (symbolizer, directory) = (&over.processor.symbolizer, &over.processor.processes);
            match perfusion_pprof::encode_entries(part.entries, symbolizer, directory, &about) {
                Ok(bytes) => {
                    let labels: BTreeMap<String, String> = labels.clone();
                    let profile = Packed::new(bytes);
                    finished.push(Arc::new(FinishedProfile {
                        service,
                        labels,
                        start: about.start,
                        duration,
                        profile,
                    }));
                }
                Err(error) => {
                    self.state.counters.profiles_failed.add(1);
                    tracing::error!(service = %service, %error, "a profile was not encoded");
                }
            }
        }
        if !config.symbols.urls.is_empty() {
            let missing = over.processor.symbolizer.missing(&over.processor.processes);
            self.state.symbols.ask(&config.symbols, missing, &self.state.counters);
        }
        self.state.counters.windows.add(1);
        self.state.counters.profiles.add(count(finished.len()));
        // After the very last one none follows, and what it takes is soon free.
        let limit = if over.is_last && self.state.is_ending() {
            u64::MAX
        } else {
            memory_budget::for_windows(self.state.mode().memory)
        };
        for sink in self.out.give(&finished, limit) {
            tracing::warn!(
                sink,
                profiles = finished.len(),
                "still busy with earlier windows: dropped"
            );
        }
    }

    /// What rules leave out of a service, in words.
    fn left_out(&self, over: &ClosedWindow<'_>, service: &str, frequency: u32) -> Vec<String> {
        let nothing = || ServiceExclusions {
            all: ExcludedFeatures::default(),
            some: ExcludedFeatures::default(),
        };
        let of_kernel = over.processor.left_out(service).unwrap_or_else(nothing);
        let of_shim = self.state.attaches.excluded(service).unwrap_or_else(nothing);
        left_out_comments(of_kernel.all.or(of_shim.all), of_kernel.some.or(of_shim.some), frequency)
    }

    fn comments(
        &self,
        over: &ClosedWindow<'_>,
        counters: &[(String, u64)],
        duration: Duration,
    ) -> Vec<String> {
        let mut comments = vec![
            format!("perfusion {}", env!("CARGO_PKG_VERSION")),
            format!(
                "{}{} (the whole node in this window)",
                perfusion_pprof::LOSS_PREFIX,
                perfusion_pprof::loss::line_of_window(counters)
            ),
            format!(
                "cpu: {} samples per second and CPU say where; each thread's sum is its exact \
                 on-CPU time",
                over.rates.kernel.frequency_hz
            ),
            "runnable, blocked: exact per thread; split among stacks by waits kept with known \
             probability"
                .to_owned(),
            format!(
                "{}{} (the whole node in this window)",
                perfusion_pprof::WAIT_STACKS_PREFIX,
                over.window.wait_chances.text(None)
            ),
        ];
        comments.extend(self.state.remarks());
        let asked = self.state.mode().recording(&self.state.config().recording);
        comments.extend(asked.subscriptions().comments());
        comments.extend(lowered(over.rates, &asked));
        comments.extend(over.processor.estimator_comments());
        comments.push(self.state.cost.comment(duration));
        let counted = counters.iter().filter(|(_, value)| *value > 0);
        comments.extend(counted.map(|(name, value)| format!("{name}: {value}")));
        comments
    }
}

/// The comments of all profiles, and what became of the thread pools of this service.
fn with_pools(comments: &[String], over: &ClosedWindow<'_>, service: &str) -> Vec<String> {
    let pools = over
        .window
        .pool_lines(Some(service))
        .map(|line| format!("{}{line}", perfusion_pprof::POOL_PREFIX));
    comments.iter().cloned().chain(pools).collect()
}

/// What rules leave out of all processes of a service, and of some of them.
fn left_out_comments(all: ExcludedFeatures, some: ExcludedFeatures, frequency: u32) -> Vec<String> {
    let columns = |left_out: ExcludedFeatures| {
        let of = |feature: Feature, columns| left_out.has(feature).then_some(columns);
        [
            of(Feature::Cpu, "samples, cpu"),
            of(Feature::Waits, "runnable, blocked"),
            of(Feature::Allocations, "alloc_objects, alloc_space, inuse_objects, inuse_space"),
            of(Feature::LiveObjects, "inuse_objects, inuse_space")
                .filter(|_| !left_out.has(Feature::Allocations)),
            of(Feature::Exceptions, "exceptions"),
            of(Feature::Contention, "contentions, delay"),
        ]
        .into_iter()
        .flatten()
    };
    let mut comments: Vec<String> =
        columns(all).map(|columns| format!("{columns}{AS_ASKED}")).collect();
    let partly = ExcludedFeatures(some.0 & !all.0);
    comments.extend(
        columns(partly)
            .map(|columns| format!("{columns}: not recorded of some of its processes, as asked")),
    );
    if some.has(Feature::Names) {
        comments.push("names of managed code: not asked for, as asked".to_owned());
    }
    if some.one_sample_in() > 1 {
        comments.push(format!(
            "samples: one in {} of {frequency} per second and CPU, as asked; cpu is exact all the \
             same",
            some.one_sample_in()
        ));
    }
    comments
}

/// That a window was recorded at other rates than was asked for.
fn lowered(rates: SourceRates, asked: &RecordingConfig) -> Option<String> {
    let SourceRates { kernel, allocation_samples } = rates;
    let is_lower = kernel.frequency_hz < asked.frequency
        || kernel.wait_stack_budget_bytes_per_s < asked.wait_stacks.0
        || allocation_samples < asked.allocation_samples;
    is_lower.then(|| {
        format!(
            "{}to stay within the profiler's limits: {} CPU samples per second and CPU instead of \
             {}, \
             wait stacks of {} a second instead of {}, {allocation_samples} samples of allocations \
             of each process a second instead of {}",
            perfusion_pprof::RATES_LOWERED_PREFIX,
            kernel.frequency_hz,
            asked.frequency,
            ByteSize(kernel.wait_stack_budget_bytes_per_s),
            asked.wait_stacks,
            asked.allocation_samples
        )
    })
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// The entries of each service, and how many services were folded into the one for all others:
/// those with the least CPU time, then the least time.
fn parts<'a>(
    entries: impl Iterator<Item = WindowEntry<'a>>,
    max_services: usize,
) -> (BTreeMap<Arc<str>, ServicePart<'a>>, u64) {
    let other: Arc<str> = OTHER.into();
    let mut parts: BTreeMap<Arc<str>, ServicePart<'a>> = BTreeMap::new();
    for entry in entries {
        let service = entry.labels.service.clone().unwrap_or_else(|| Arc::clone(&other));
        let part = parts.entry(service).or_insert(ServicePart {
            entries: Vec::new(),
            cpu: 0.0,
            wall: 0.0,
        });
        part.cpu += entry.values[SampleType::Cpu.index()];
        part.wall += entry.values[SampleType::Wall.index()];
        part.entries.push(entry);
    }
    let own = parts.keys().filter(|service| **service != other).count();
    let Some(too_many) = own.checked_sub(max_services).filter(|many| *many > 0) else {
        return (parts, 0);
    };
    let mut by_cost: Vec<(f64, f64, Arc<str>)> = parts
        .iter()
        .filter(|(service, _)| **service != other)
        .map(|(service, part)| (part.cpu, part.wall, Arc::clone(service)))
        .collect();
    by_cost.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
    let mut rest =
        parts.remove(&other).unwrap_or(ServicePart { entries: Vec::new(), cpu: 0.0, wall: 0.0 });
    for (_, _, service) in by_cost.into_iter().take(too_many) {
        if let Some(part) = parts.remove(&service) {
            rest.entries.extend(part.entries);
        }
    }
    parts.insert(other, rest);
    (parts, count(too_many))
}

#[cfg(test)]
mod tests {
    use super::parts;
    use perfusion_aggregate::window::{Window, WindowLimits};
    use perfusion_model::frame::FrameKey;
    use perfusion_model::labels::{Labels, OTHER, SampleType};

    #[test]
    fn services_beyond_the_limit_share_one_that_is_named_and_no_value_is_lost() {
        let mut window = Window::new(WindowLimits::default());
        for (service, cpu) in [("busy", 9.0), ("idle", 1.0), ("idler", 0.5), ("middle", 5.0)] {
            let labels = Labels { service: Some(service.into()), ..Labels::default() };
            window.add(&[FrameKey::Kernel(1)], &labels, SampleType::Cpu, cpu);
        }
        window.add(&[FrameKey::Kernel(2)], &Labels::default(), SampleType::Cpu, 0.25);
        let names = |max: usize| {
            let (parts, folded) = parts(window.entries(), max);
            let cpu = |part: &super::ServicePart<'_>| {
                part.entries.iter().map(|e| e.values[SampleType::Cpu.index()]).sum::<f64>()
            };
            let named: Vec<(String, f64)> =
                parts.iter().map(|(name, part)| (name.to_string(), cpu(part))).collect();
            (named, folded)
        };
        let of = |list: &[(&str, f64)]| {
            list.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<Vec<_>>()
        };
        assert_eq!(names(2), (of(&[(OTHER, 1.75), ("busy", 9.0), ("middle", 5.0)]), 2));
        let all =
            of(&[(OTHER, 0.25), ("busy", 9.0), ("idle", 1.0), ("idler", 0.5), ("middle", 5.0)]);
        assert_eq!(names(4), (all, 0));
    }
}
