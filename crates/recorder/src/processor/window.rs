//! From the estimates of a window to the window: the last names have come, or their time is over.

use super::Processor;
use super::estimates::{
    HeapEstimates, LivenessAtCut, RuntimeEventEstimates, WindowEstimates, named, unnamed,
};
use crate::naming;
use crate::starts;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_aggregate::exceptions_and_contentions::{ExceptionSum, LockWaitSum};
use perfusion_aggregate::heap::{Site, Weight, age_bucket_seconds, count_bucket};
use perfusion_aggregate::runtime_wait::StackWaits;
use perfusion_aggregate::threads::{StackOrMarker, ThreadRow, WaitStateKey, Waker};
use perfusion_aggregate::window::{Window, WindowLimits};
use perfusion_model::event::{MonotonicNs, ThreadId, ThreadSnapshot};
use perfusion_model::frame::{FrameKey, ImageId, Marker};
use perfusion_model::labels::{Labels, SampleType, Sampling, SpanLabels, UNKNOWN_TYPE};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_symbolize::file_name;
use perfusion_symbolize::types::TypeName;
use std::collections::HashSet;
use std::sync::Arc;

impl Processor {
    /// Closes the recording: the values of its only or last window. `running` are the threads that
    /// exist at the end.
    #[must_use]
    pub fn close(&mut self, now: MonotonicNs, running: &[ThreadSnapshot]) -> Window {
        let estimates = self.estimate(now, running, true);
        self.window(estimates).0
    }

    /// The window of these estimates, with all names that are known by now, and what to forget when
    /// it is encoded.
    #[must_use]
    pub(crate) fn window(&mut self, mut estimates: WindowEstimates) -> (Window, LivenessAtCut) {
        self.settle_roles(&mut estimates);
        let WindowEstimates {
            mut stacks,
            mut threads,
            heap,
            pauses,
            runtime_events,
            pools,
            exclusions,
            liveness,
        } = estimates;
        self.exclusions.window_is_over(exclusions);
        let mut window = Window::new(WindowLimits::default());
        window.pools = pools;
        window.wait_chances = threads.wait_chances;
        self.name(&stacks, &runtime_events);
        self.learn_pauses(&stacks, &threads.rows, &threads.pausers);
        // Rows of a window are of lines, not of addresses.
        if self.symbolizer.finds_lines() {
            stacks.replace_frames(|frame| self.symbolizer.last_line_frame(frame));
        }
        // What is beyond the window's bound on distinct rows is one row: the few of these families
        // would be lost among those of time.
        self.add_heap(&mut window, &stacks, heap);
        for (labels, total) in pauses {
            let frames = [FrameKey::Marker(Marker::GarbageCollector)];
            window.add(&frames, &labels, SampleType::GcPause, total as f64);
        }
        self.add_runtime_events(&mut window, &stacks, runtime_events);
        sort_by_share(&mut threads.rows);
        for row in &threads.rows {
            let labels = match threads.labels.get(&(row.thread.tid, row.since)) {
                Some(labels) => named(labels.clone(), row.name.clone()),
                None => Labels::default(),
            };
            self.add_row(&mut window, row, labels, &stacks);
        }
        let frames = window.frames();
        self.symbolizer.resolve(frames.iter().copied(), &self.processes);
        self.count_managed(&frames);
        window.sum_into(
            SampleType::Wall,
            &[SampleType::Cpu, SampleType::Runnable, SampleType::Blocked],
        );
        (window, liveness)
    }

    /// The methods near the threads' starts have the names that they will have in this window. So
    /// they decide on the threads' roles.
    fn settle_roles(&mut self, estimates: &mut WindowEstimates) {
        let starts = &mut self.identities.starts;
        let methods = estimates.labels().flat_map(unnamed).chain(starts.unnamed());
        self.symbolizer.resolve(methods, &self.processes);
        starts.name(&self.symbolizer);
        for labels in estimates.labels_mut() {
            if let Some(evidence) = labels.role_evidence.take() {
                let mut evidence = Arc::unwrap_or_clone(evidence);
                evidence.name(|frame| starts::named(&self.symbolizer, frame));
                labels.thread_role = Some(evidence.role());
            }
        }
    }

    /// Names the window's frames, and learns from the names what threads wait for.
    fn name(&mut self, stacks: &StackTable, events: &RuntimeEventEstimates) {
        let frames = stacks.iter().flatten().copied().chain(events.lock_events.frames());
        self.symbolizer.resolve(frames, &self.processes);
        let (symbolizer, processes) = (&mut self.symbolizer, &self.processes);
        self.wait_reasons.learn(stacks.iter(), &events.lock_events, symbolizer, processes);
    }

    fn learn_pauses(
        &mut self,
        stacks: &StackTable,
        rows: &[ThreadRow],
        pausers: &HashSet<ThreadId>,
    ) {
        let waits = rows.iter().filter_map(|row| match row.place {
            StackOrMarker::Stack(stack) => {
                let by_collector =
                    matches!(row.waker, Some(Waker::Thread { id, .. }) if pausers.contains(&id));
                let (stack, blocked_ns) = (stacks.frames(stack), row.blocked_ns);
                Some(StackWaits { stack, reason: row.reason?, by_collector, blocked_ns })
            }
            StackOrMarker::Marker(_) => None,
        });
        self.wait_reasons.learn_pauses(waits, &self.symbolizer);
    }

    /// Allocations, and the objects that are alive.
    fn add_heap(&self, window: &mut Window, stacks: &StackTable, heap: HeapEstimates) {
        let unknown = TypeName { shown: UNKNOWN_TYPE.into(), raw: None, module: None };
        let types = self.values.heap.types.told_apart();
        let site_labels = |site: &Site, labels: Labels| {
            let TypeName { shown, raw, module } =
                types.get(site.region, site.type_id).unwrap_or_else(|| unknown.clone());
            Labels {
                type_name: Some(shown),
                type_raw: raw,
                type_module: module,
                heap: Some(site.heap),
                size_class: (site.size_class > 0).then_some(site.size_class),
                sampling: Some(site.sampling),
                ..labels
            }
        };
        // Summed up by what the profile shows first: how many samples are behind a value is one of
        // its labels.
        let mut allocated: HashMap<(StackId, Labels), Weight> = HashMap::new();
        for (site, weight, labels) in heap.sites {
            *allocated.entry((site.stack, site_labels(&site, labels))).or_default() += weight;
        }
        let mut alive: HashMap<(StackId, Labels), Weight> = HashMap::new();
        for (object, survival, labels) in heap.live {
            let labels = Labels {
                age_seconds: Some(age_bucket_seconds(object.born, survival.until)),
                generation: Some(object.generation),
                survived: Some(count_bucket(survival.all)),
                // More than two prove no more.
                survived_old: survival.old.map(|count| u64::from(count.min(2))),
                told_one_in: survival.told_one_in,
                unwatched: survival.unwatched.filter(|_| object.site.sampling == Sampling::Exact),
                sampling: Some(object.sampling()),
                ..site_labels(&object.site, labels)
            };
            *alive.entry((object.site.stack, labels)).or_default() += object.weight();
        }
        let columns = [
            (allocated, [SampleType::AllocObjects, SampleType::AllocSpace]),
            (alive, [SampleType::InuseObjects, SampleType::InuseSpace]),
        ];
        let rows = columns
            .into_iter()
            .flat_map(|(rows, columns)| rows.into_iter().map(move |row| (row, columns)));
        let mut rows: Vec<_> = rows.collect();
        sort_by_type(&mut rows, |(((_, labels), weight), _)| (labels, weight.bytes));
        for (((stack, labels), weight), [objects, bytes]) in rows {
            let by_chance = labels.sampling == Some(Sampling::Random);
            let labels = Labels {
                sampled_objects: Some(weight.seen),
                sampled_bytes: Some(weight.seen_bytes),
                space_stderr: by_chance.then_some(weight.variance.max(0.0).sqrt().round() as u64),
                ..labels
            };
            let values = [(objects, weight.objects), (bytes, weight.bytes)];
            window.add_all(stacks.frames(stack), &labels, &values);
        }
    }

    /// Exceptions and contentions.
    fn add_runtime_events(
        &self,
        window: &mut Window,
        stacks: &StackTable,
        events: RuntimeEventEstimates,
    ) {
        for (labels, [exceptions, contentions]) in events.unsampled {
            let values = [
                (SampleType::Exceptions, exceptions as f64),
                (SampleType::Contentions, contentions as f64),
            ];
            window.add_all(&[FrameKey::Marker(Marker::NotSampled)], &labels, &values);
        }
        for (stack, labels, ExceptionSum { count, .. }) in events.throws {
            let frames = naming::from_throw(&self.symbolizer, stacks.frames(stack));
            window.add(frames, &labels, SampleType::Exceptions, count);
        }
        for (wait, labels, LockWaitSum { count, ns, .. }) in events.lock_waits {
            let values = [(SampleType::Contentions, count), (SampleType::Delay, ns)];
            let waiting = stacks.frames(wait.place.stack);
            match wait.held_at {
                Some(held_at) => {
                    let frames =
                        naming::with_owner(&self.symbolizer, waiting, stacks.frames(held_at));
                    window.add_all(&frames, &labels, &values);
                }
                None => window.add_all(waiting, &labels, &values),
            }
        }
    }

    fn file_name(&self, image: ImageId) -> Option<&str> {
        self.processes.image(image).map(|image| file_name(&image.path))
    }

    fn add_row(
        &self,
        window: &mut Window,
        row: &ThreadRow,
        mut labels: Labels,
        stacks: &StackTable,
    ) {
        let waker = row.waker.filter(|_| self.identities.is_detailed());
        let waker = waker.map(|waker| self.identities.waker_texts(waker));
        (labels.waker, labels.waker_name) = waker.unzip();
        let marker;
        let frames = match row.place {
            StackOrMarker::Stack(stack) => {
                naming::without_own_frames(&self.symbolizer, stacks.frames(stack))
            }
            StackOrMarker::Marker(what) => {
                marker = [FrameKey::Marker(what)];
                &marker[..]
            }
        };
        if let StackOrMarker::Stack(stack) = row.place {
            labels.span = stacks.span(stack).map(SpanLabels::of).map(Arc::new);
        }
        labels.wait_reason = row.reason.map(|reason| self.wait_reason(reason, frames));
        if row.reason.is_some_and(|reason| reason.state == WaitStateKey::Interruptible)
            && naming::is_parked(&self.symbolizer, labels.thread_role, frames, |image| {
                self.file_name(image)
            })
        {
            labels.idle = true;
        }
        // Rounded up: an error of a part of a nanosecond is none.
        labels.wait_stderr =
            (row.wait_stderr_ns >= 1.0).then_some(row.wait_stderr_ns.ceil() as u64);
        let values = [
            (SampleType::Samples, row.samples as f64),
            (SampleType::Cpu, row.cpu_ns),
            (SampleType::Runnable, row.runnable_ns),
            (SampleType::Blocked, row.blocked_ns),
        ];
        match row.waker.filter(|_| self.wakers.has_stacks()) {
            Some(waker) => {
                let frames = naming::with_waker(&self.symbolizer, frames, waker, stacks);
                window.add_all(&frames, &labels, &values);
            }
            None => window.add_all(frames, &labels, &values),
        }
    }
}

/// Puts all of a type in a row, and first the types of most bytes: a window keeps so many types
/// apart, in the order they come. Rounding goes on from value to value of a column
/// (`pprof::encode`): so a type is off by less than one object, and what is exact, before all
/// others, loses nothing by them.
fn sort_by_type<T>(rows: &mut [T], of: impl Fn(&T) -> (&Labels, f64)) {
    let mut sums: HashMap<Option<Arc<str>>, f64> = HashMap::new();
    for (labels, bytes) in rows.iter().map(&of) {
        *sums.entry(labels.type_name.clone()).or_default() += bytes;
    }
    let sum = |labels: &Labels| sums.get(&labels.type_name).copied().unwrap_or(0.0);
    rows.sort_by(|a, b| {
        let ((a, _), (b, _)) = (of(a), of(b));
        let order = |labels: &Labels| labels.sampling != Some(Sampling::Exact);
        let heavier = || sum(b).total_cmp(&sum(a));
        order(a).cmp(&order(b)).then_with(heavier).then_with(|| a.type_name.cmp(&b.type_name))
    });
}

/// Puts first what is most of a column, whichever: a window keeps so many rows apart, in the order
/// they come.
fn sort_by_share(rows: &mut [ThreadRow]) {
    let columns = |row: &ThreadRow| [row.cpu_ns, row.runnable_ns, row.blocked_ns];
    let mut sums = [0.0; 3];
    for row in rows.iter() {
        sums.iter_mut().zip(columns(row)).for_each(|(sum, value)| *sum += value);
    }
    let share = |row: &ThreadRow| {
        let shares = columns(row)
            .into_iter()
            .zip(sums)
            .map(|(value, sum)| if sum > 0.0 { value / sum } else { 0.0 });
        shares.fold(0.0, f64::max)
    };
    rows.sort_by(|a, b| share(b).total_cmp(&share(a)));
}

#[cfg(test)]
mod tests {
    use super::{
        Labels, MonotonicNs, SampleType, Sampling, StackOrMarker, ThreadId, ThreadRow, Window,
        WindowLimits, sort_by_share, sort_by_type,
    };
    use perfusion_model::frame::{FrameKey, Marker};
    use perfusion_model::labels::OTHER;

    #[test]
    fn the_types_of_most_bytes_keep_their_names_and_each_is_in_a_row() {
        let row = |name: &str, sampling, age_seconds, bytes: f64| {
            let labels = Labels {
                type_name: Some(name.into()),
                sampling: Some(sampling),
                ..Labels::default()
            };
            (Labels { age_seconds, ..labels }, bytes)
        };
        let mut rows = [
            row("Account", Sampling::Random, None, 1.0),
            row("byte[]", Sampling::Random, None, 4.0),
            row("string", Sampling::Random, None, 5.0),
            row("byte[]", Sampling::Random, Some(1), 9.0),
            row("Batch", Sampling::Random, None, 1.0),
            row("Exact", Sampling::Exact, None, 1.0),
        ];
        sort_by_type(&mut rows, |(labels, bytes)| (labels, *bytes));
        let names: Vec<_> =
            rows.iter().map(|(labels, _)| labels.type_name.as_deref().unwrap()).collect();
        assert_eq!(names, ["Exact", "byte[]", "byte[]", "string", "Account", "Batch"]);
        let mut window =
            Window::new(WindowLimits { max_label_values: 3, ..WindowLimits::default() });
        for (labels, bytes) in &rows {
            window.add(&[FrameKey::Kernel(1)], labels, SampleType::AllocSpace, *bytes);
        }
        let of = |name: &str| {
            let own =
                window.entries().filter(|entry| entry.labels.type_name.as_deref() == Some(name));
            own.map(|entry| entry.values[SampleType::AllocSpace.index()]).sum::<f64>()
        };
        assert_eq!([of("Exact"), of("byte[]"), of("string"), of(OTHER)], [1.0, 13.0, 5.0, 2.0]);
    }

    #[test]
    fn what_is_most_of_any_column_comes_first() {
        let row = |tid, [cpu_ns, runnable_ns, blocked_ns]: [f64; 3]| ThreadRow {
            thread: ThreadId { pid: 1, tid },
            since: MonotonicNs(0),
            name: None,
            place: StackOrMarker::Marker(Marker::Overflow),
            reason: None,
            waker: None,
            samples: 0,
            cpu_ns,
            runnable_ns,
            blocked_ns,
            wait_stderr_ns: 0.0,
        };
        // Nobody wanted a CPU, and sleep is a thousand times what was computed.
        let mut rows = [
            row(1, [1.0, 0.0, 10.0]),
            row(2, [0.0, 0.0, 4_000.0]),
            row(3, [9.0, 0.0, 0.0]),
            row(4, [0.0, 0.0, 5_990.0]),
            row(5, [0.0, 0.0, 0.0]),
        ];
        sort_by_share(&mut rows);
        assert_eq!(rows.map(|row| row.thread.tid), [3, 4, 2, 1, 5]);
    }
}
