//! [`Window`]: the values of one recording interval. Bounded in keys and in distinct values per
//! label; every loss of detail is counted, no value is lost.

use super::chance::Chances;
use super::pool::PoolSum;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_model::labels::{Labels, OTHER, SampleType, SpanLabels};
use perfusion_model::stack::{StackId, StackTable};
use perfusion_model::text::clean;
use std::collections::HashSet;
use std::sync::Arc;

/// Bounds of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLimits {
    /// Distinct (stack, labels) pairs. Spans are told apart while there are half as many.
    pub max_keys: usize,
    /// Distinct values of each open-ended label (waker, type, type_raw, type_module, container_id,
    /// exception_type, exception_message, lock_owner, thread_name, and the names in waker_name and
    /// lock_owner_name).
    pub max_label_values: usize,
    /// Bytes of those together, of one label, beyond the first [`FEW_VALUES`].
    pub max_label_bytes: usize,
}

/// Distinct values of a label that are told apart however long they are.
const FEW_VALUES: usize = 2_000;

impl Default for WindowLimits {
    fn default() -> Self {
        Self { max_keys: 200_000, max_label_values: 32_768, max_label_bytes: 1 << 20 }
    }
}

/// Values of one (stack, labels) pair, as [`Window::entries`] shows them.
#[derive(Clone, Copy, Debug)]
pub struct WindowEntry<'a> {
    /// Innermost first.
    pub frames: &'a [FrameKey],
    /// The labels, but those of `sampled`.
    pub labels: &'a Labels,
    /// How many samples are behind the values, where they are estimates of memory.
    pub sampled: Option<Sampled>,
    /// By [`SampleType::index`]; finite, not negative.
    pub values: &'a [f64; SampleType::COUNT],
}

/// Labels that say how sure a value is, and not what it is of: they add up with it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    objects: u64,
    bytes: u64,
    /// Of the bytes; where chance has chosen the objects.
    variance: Option<f64>,
}

impl Sampled {
    /// These labels and the rest of all labels.
    fn take(labels: &Labels) -> Option<(Self, Labels)> {
        let sampled = Self {
            objects: labels.sampled_objects?,
            bytes: labels.sampled_bytes.unwrap_or(0),
            variance: labels.space_stderr.map(|stderr| (stderr as f64).powi(2)),
        };
        let rest = Labels {
            sampled_objects: None,
            sampled_bytes: None,
            space_stderr: None,
            ..labels.clone()
        };
        Some((sampled, rest))
    }

    fn add(&mut self, other: Self) {
        self.objects = self.objects.saturating_add(other.objects);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.variance = self.variance.zip(other.variance).map(|(one, other)| one + other);
    }

    /// As labels, and nothing else.
    #[must_use]
    pub fn labels(self) -> Labels {
        Labels {
            sampled_objects: Some(self.objects),
            sampled_bytes: Some(self.bytes),
            space_stderr: self.variance.map(|variance| variance.sqrt().round() as u64),
            ..Labels::default()
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LabelsId(usize);

struct WindowRow {
    stack: StackId,
    labels: LabelsId,
    sampled: Option<Sampled>,
    values: [f64; SampleType::COUNT],
}

/// Distinct values seen of one label.
#[derive(Default)]
struct Cap {
    seen: HashSet<Arc<str>>,
    bytes: usize,
}

impl Cap {
    /// Puts [`OTHER`] in place of a value beyond the cap; true when it did.
    fn apply(&mut self, value: &mut Option<Arc<str>>, limits: &WindowLimits) -> bool {
        let Some(text) = value else { return false };
        if self.seen.contains(text) {
            return false;
        }
        let bytes = self.bytes.saturating_add(text.len());
        let fits = self.seen.len() < FEW_VALUES || bytes <= limits.max_label_bytes;
        if self.seen.len() < limits.max_label_values && fits {
            self.bytes = bytes;
            self.seen.insert(Arc::clone(text));
            return false;
        }
        *text = OTHER.into();
        true
    }
}

/// The additions that a window could not keep apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowCounters {
    /// Additions that went to an overflow entry because `max_keys` was reached or the stack table
    /// was full.
    pub overflowed: u64,
    /// Additions one of whose labels became [`OTHER`].
    pub capped_labels: u64,
    /// Values refused because they were negative or not finite.
    pub refused: u64,
}

/// Values per (stack, labels).
pub struct Window {
    limits: WindowLimits,
    stacks: StackTable,
    labels: Vec<Arc<Labels>>,
    label_ids: HashMap<Arc<Labels>, LabelsId>,
    rows: Vec<WindowRow>,
    row_ids: HashMap<(StackId, LabelsId), usize>,
    caps: [Cap; 11],
    counters: WindowCounters,
    /// What became of thread pools, each with its process's labels.
    pub pools: Vec<(Labels, PoolSum)>,
    /// With what probability waits kept their stacks.
    pub wait_chances: Chances,
}

impl Window {
    /// An empty window.
    #[must_use]
    pub fn new(limits: WindowLimits) -> Self {
        Self {
            limits,
            stacks: StackTable::default(),
            labels: Vec::new(),
            label_ids: HashMap::new(),
            rows: Vec::new(),
            row_ids: HashMap::new(),
            caps: Default::default(),
            counters: WindowCounters::default(),
            pools: Vec::new(),
            wait_chances: Chances::default(),
        }
    }

    /// In words, what became of the thread pools of a service; of all without one.
    pub fn pool_lines(&self, service: Option<&str>) -> impl Iterator<Item = String> {
        let asked = self.pools.iter().filter(move |(labels, _)| {
            service.is_none_or(|service| labels.service.as_deref() == Some(service))
        });
        asked.map(|(labels, sum)| {
            let process = clean(labels.process.as_deref().unwrap_or(""));
            format!("{process} {}: {}", labels.pid.unwrap_or(0), sum.text())
        })
    }

    /// Adds `value` to one column of (frames, labels). Frames are innermost first.
    pub fn add(
        &mut self,
        frames: &[FrameKey],
        labels: &Labels,
        sample_type: SampleType,
        value: f64,
    ) {
        self.add_all(frames, labels, &[(sample_type, value)]);
    }

    /// Adds several columns of the same (frames, labels) at once.
    pub fn add_all(&mut self, frames: &[FrameKey], labels: &Labels, values: &[(SampleType, f64)]) {
        let good = |value: f64| value.is_finite() && value >= 0.0;
        let refused = values.iter().filter(|(_, value)| !good(*value)).count();
        self.counters.refused =
            self.counters.refused.saturating_add(u64::try_from(refused).unwrap_or(u64::MAX));
        if values.iter().all(|(_, value)| !good(*value) || *value == 0.0) {
            return;
        }
        let (sampled, rest) = Sampled::take(labels).unzip();
        let row = self.row(frames, rest.as_ref().unwrap_or(labels));
        let Some(row) = self.rows.get_mut(row) else { return };
        // The overflow entry has values of all kinds, and says nothing of them.
        let says_so = self.labels.get(row.labels.0).is_some_and(|labels| labels.sampling.is_some());
        if let Some(sampled) = sampled.filter(|_| says_so) {
            match &mut row.sampled {
                Some(sum) => sum.add(sampled),
                none => *none = Some(sampled),
            }
        }
        for &(sample_type, value) in values.iter().filter(|(_, value)| good(*value)) {
            row.values[sample_type.index()] += value;
        }
    }

    /// Index of the row of (frames, labels), made if there is room, else the overflow row.
    fn row(&mut self, frames: &[FrameKey], labels: &Labels) -> usize {
        let capped = self.capped(labels);
        let labels = capped.as_ref().unwrap_or(labels);
        if let (Some(stack), Some(&labels)) = (self.stacks.find(frames), self.label_ids.get(labels))
            && let Some(&row) = self.row_ids.get(&(stack, labels))
        {
            return row;
        }
        // There are as many spans as an app has requests: they take no room from what has none.
        if self.rows.len() >= self.limits.max_keys / 2
            && labels.span.as_deref().is_some_and(SpanLabels::is_of_one)
        {
            self.counters.capped_labels = self.counters.capped_labels.saturating_add(1);
            let other = Labels { span: Some(Arc::new(SpanLabels::other())), ..labels.clone() };
            return self.row(frames, &other);
        }
        if self.rows.len() < self.limits.max_keys {
            return self.insert(frames, labels);
        }
        self.counters.overflowed = self.counters.overflowed.saturating_add(1);
        let key = self
            .stacks
            .find(&[FrameKey::Marker(Marker::Overflow)])
            .zip(self.label_ids.get(&Labels::default()).copied());
        match key.and_then(|key| self.row_ids.get(&key)) {
            Some(&row) => row,
            None => self.insert(&[FrameKey::Marker(Marker::Overflow)], &Labels::default()),
        }
    }

    fn insert(&mut self, frames: &[FrameKey], labels: &Labels) -> usize {
        let stack = self.stacks.intern(frames);
        if stack == StackTable::OVERFLOW && self.stacks.frames(stack) != frames {
            self.counters.overflowed = self.counters.overflowed.saturating_add(1);
        }
        let labels = match self.label_ids.get(labels) {
            Some(&id) => id,
            None => {
                let id = LabelsId(self.labels.len());
                let labels = Arc::new(labels.clone());
                self.labels.push(Arc::clone(&labels));
                self.label_ids.insert(labels, id);
                id
            }
        };
        let (new, rows) = (self.rows.len(), &mut self.rows);
        // The overflow stack may have a row with these labels already.
        *self.row_ids.entry((stack, labels)).or_insert_with(|| {
            rows.push(WindowRow { stack, labels, sampled: None, values: [0.0; SampleType::COUNT] });
            new
        })
    }

    /// `labels` with values beyond their caps replaced, or `None` when nothing had to be.
    fn capped(&mut self, labels: &Labels) -> Option<Labels> {
        if self.label_ids.contains_key(labels) {
            return None;
        }
        let mut changed = labels.clone();
        let limit = &self.limits;
        let [
            waker,
            type_name,
            container,
            exception,
            message,
            owner,
            thread,
            waker_name,
            owner_name,
            type_raw,
            type_module,
        ] = &mut self.caps;
        let replaced = [
            waker.apply(&mut changed.waker, limit),
            type_name.apply(&mut changed.type_name, limit),
            container.apply(&mut changed.container_id, limit),
            exception.apply(&mut changed.exception_type, limit),
            message.apply(&mut changed.exception_message, limit),
            owner.apply(&mut changed.lock_owner, limit),
            thread.apply(&mut changed.thread_name, limit),
            waker_name.apply(&mut changed.waker_name, limit),
            owner_name.apply(&mut changed.lock_owner_name, limit),
        ];
        if (&changed.type_name, &changed.exception_type)
            != (&labels.type_name, &labels.exception_type)
        {
            // As many as there are types.
            (changed.type_raw, changed.type_module) = (None, None);
        }
        let of_type = [
            type_raw.apply(&mut changed.type_raw, limit),
            type_module.apply(&mut changed.type_module, limit),
        ];
        if !replaced.contains(&true) && !of_type.contains(&true) {
            return None;
        }
        if changed.container_id != labels.container_id {
            // As many as there are containers.
            changed.pod = None;
        }
        self.counters.capped_labels = self.counters.capped_labels.saturating_add(1);
        Some(changed)
    }

    /// All rows, in the order they were first seen.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = WindowEntry<'_>> {
        self.rows.iter().map(|row| WindowEntry {
            frames: self.stacks.frames(row.stack),
            labels: &self.labels[row.labels.0],
            sampled: row.sampled,
            values: &row.values,
        })
    }

    /// Every distinct frame of the window.
    #[must_use]
    pub fn frames(&self) -> HashSet<FrameKey> {
        self.stacks.iter().flatten().copied().collect()
    }

    /// Sets column `target` of each row to the sum of the columns `parts`.
    pub fn sum_into(&mut self, target: SampleType, parts: &[SampleType]) {
        for row in &mut self.rows {
            row.values[target.index()] = parts.iter().map(|part| row.values[part.index()]).sum();
        }
    }

    /// The additions that could not be kept apart.
    #[must_use]
    pub fn counters(&self) -> WindowCounters {
        self.counters
    }

    /// True when nothing was added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfusion_model::event::TraceSpan;
    use perfusion_model::labels::Sampling;
    use perfusion_model::stack::StackSpan;

    fn thread(tid: u32) -> Labels {
        Labels { pid: Some(1), thread_id: Some(tid), ..Labels::default() }
    }

    /// Sum of one column over a thread's rows.
    fn total(window: &Window, sample_type: SampleType, tid: u32) -> f64 {
        let own = window.entries().filter(|entry| entry.labels.thread_id == Some(tid));
        own.map(|entry| entry.values[sample_type.index()]).sum()
    }

    #[test]
    fn equal_keys_add_up_and_others_stay_apart() {
        let mut window = Window::new(WindowLimits::default());
        let stack = [FrameKey::Kernel(1), FrameKey::Kernel(2)];
        window.add(&stack, &thread(1), SampleType::Cpu, 2.0);
        window.add(&stack, &thread(1), SampleType::Cpu, 3.0);
        window.add(&stack, &thread(2), SampleType::Cpu, 7.0);
        window.add(&stack[..1], &thread(1), SampleType::Blocked, 1.0);
        assert_eq!(window.entries().len(), 3);
        assert_eq!(total(&window, SampleType::Cpu, 1), 5.0);
        assert_eq!(total(&window, SampleType::Cpu, 2), 7.0);
        assert_eq!(window.frames().len(), 2);
    }

    #[test]
    fn past_the_limit_values_go_to_the_overflow_entry_and_sums_hold() {
        let mut window = Window::new(WindowLimits { max_keys: 10, ..WindowLimits::default() });
        for address in 0..1000 {
            window.add(&[FrameKey::Kernel(address)], &thread(1), SampleType::Cpu, 1.0);
        }
        let sum: f64 = window.entries().map(|entry| entry.values[SampleType::Cpu.index()]).sum();
        assert_eq!(sum, 1000.0);
        assert_eq!(window.counters().overflowed, 990);
        assert_eq!(window.entries().len(), 11);
        let overflow =
            window.entries().find(|entry| entry.frames == [FrameKey::Marker(Marker::Overflow)]);
        assert_eq!(overflow.map(|entry| entry.values[SampleType::Cpu.index()]), Some(990.0));
        window.add(&[FrameKey::Kernel(3)], &thread(1), SampleType::Cpu, 1.0);
        assert_eq!(window.counters().overflowed, 990, "a known key is never pushed out");
    }

    #[test]
    fn stacks_that_find_no_room_share_a_row_for_each_labels() {
        let mut window = Window::new(WindowLimits::default());
        window.stacks = StackTable::with_room(1_000);
        for first in 0..200 {
            let stack: Vec<FrameKey> = (first..first + 8).map(FrameKey::Kernel).collect();
            window.add(&stack, &thread((first % 2) as u32), SampleType::Cpu, 1.0);
        }
        assert_eq!(total(&window, SampleType::Cpu, 0) + total(&window, SampleType::Cpu, 1), 200.0);
        let rest =
            window.entries().filter(|entry| entry.frames == [FrameKey::Marker(Marker::Overflow)]);
        let rest: Vec<f64> = rest.map(|entry| entry.values[SampleType::Cpu.index()]).collect();
        assert_eq!((rest.len(), rest[0] + rest[1]), (2, window.counters().overflowed as f64));
    }

    #[test]
    fn a_label_with_too_many_values_gets_a_named_rest() {
        let mut window =
            Window::new(WindowLimits { max_label_values: 2, ..WindowLimits::default() });
        for waker in ["a", "b", "c", "d", "a", "d"] {
            let labels = Labels { waker: Some(waker.into()), ..Labels::default() };
            window.add(&[FrameKey::Kernel(1)], &labels, SampleType::Blocked, 1.0);
        }
        let mut by_waker: Vec<_> = window
            .entries()
            .map(|entry| (entry.labels.waker.clone().unwrap().to_string(), entry.values[3]))
            .collect();
        by_waker.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(
            by_waker,
            [(OTHER.to_owned(), 3.0), ("a".to_owned(), 2.0), ("b".to_owned(), 1.0)]
        );
        assert_eq!(window.counters().capped_labels, 3);
    }

    #[test]
    fn types_beyond_the_cap_do_not_bring_their_other_names_along() {
        let mut window =
            Window::new(WindowLimits { max_label_values: 2, ..WindowLimits::default() });
        for n in 0..6 {
            let labels = Labels {
                type_name: Some(format!("T{}", n / 2).into()),
                type_raw: Some(format!("raw {n}").into()),
                type_module: Some("a.dll".into()),
                ..Labels::default()
            };
            window.add(&[FrameKey::Kernel(1)], &labels, SampleType::AllocObjects, 1.0);
        }
        let mut told: Vec<_> = window
            .entries()
            .map(|entry| {
                [&entry.labels.type_name, &entry.labels.type_raw, &entry.labels.type_module]
            })
            .map(|names| names.map(|name| name.as_deref().unwrap_or("none").to_owned()))
            .collect();
        told.sort();
        assert_eq!(
            told,
            [
                ["T0", "raw 0", "a.dll"],
                ["T0", "raw 1", "a.dll"],
                ["T1", OTHER, "a.dll"],
                [OTHER, "none", "none"]
            ]
        );
    }

    #[test]
    fn how_many_samples_are_behind_a_value_adds_up_with_it() {
        let mut window =
            Window::new(WindowLimits { max_label_values: 1, ..WindowLimits::default() });
        for (type_name, sampled) in [("A", 5), ("B", 1), ("C", 1), ("D", 2)] {
            let labels = Labels {
                type_name: Some(type_name.into()),
                sampling: Some(Sampling::Random),
                sampled_objects: Some(sampled),
                sampled_bytes: Some(sampled * 10),
                space_stderr: Some(if type_name == "D" { 7 } else { 6 }),
                ..Labels::default()
            };
            window.add(&[FrameKey::Kernel(1)], &labels, SampleType::AllocObjects, 8.0);
        }
        let told: Vec<_> = window
            .entries()
            .map(|entry| {
                (entry.values[SampleType::AllocObjects.index()], entry.sampled.unwrap().labels())
            })
            .map(|(value, of)| (value, of.sampled_objects, of.sampled_bytes, of.space_stderr))
            .collect();
        // 6² + 6² + 7² = 11².
        assert_eq!(
            told,
            [(8.0, Some(5), Some(50), Some(6)), (24.0, Some(4), Some(40), Some(11))],
            "the rest of the types is one row"
        );
    }

    #[test]
    fn very_many_spans_leave_room_for_what_has_none() {
        let mut window = Window::new(WindowLimits { max_keys: 20, ..WindowLimits::default() });
        let in_span = |id: u64| {
            let span = StackSpan::Of(TraceSpan { trace: [1; 16], id: id.to_le_bytes() });
            Labels { span: Some(Arc::new(SpanLabels::of(span))), ..thread(1) }
        };
        for id in 0..1000 {
            window.add(&[FrameKey::Kernel(id % 2)], &in_span(id), SampleType::Cpu, 1.0);
        }
        for tid in 2..9 {
            window.add(&[FrameKey::Kernel(1)], &thread(tid), SampleType::Cpu, 1.0);
        }
        assert!((2..9).all(|tid| total(&window, SampleType::Cpu, tid) == 1.0));
        assert_eq!(total(&window, SampleType::Cpu, 1), 1000.0);
        let other = Some(Arc::new(SpanLabels::other()));
        let rest: Vec<f64> = window
            .entries()
            .filter(|entry| entry.labels.span == other)
            .map(|entry| entry.values[SampleType::Cpu.index()])
            .collect();
        assert_eq!((rest, window.entries().len()), (vec![495.0, 495.0], 10 + 2 + 7));
        let WindowCounters { overflowed, capped_labels, .. } = window.counters();
        assert_eq!((overflowed, capped_labels), (0, 990));
        let before = window.entries().len();
        window.add(&[FrameKey::Kernel(1)], &in_span(9), SampleType::Cpu, 1.0);
        assert_eq!(window.entries().len(), before, "one that is known stays itself");
        assert_eq!(window.counters().capped_labels, 990);
    }

    #[test]
    fn bad_values_are_refused_and_counted() {
        let mut window = Window::new(WindowLimits::default());
        for value in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            window.add(&[FrameKey::Kernel(1)], &thread(1), SampleType::Cpu, value);
        }
        assert!(window.is_empty());
        assert_eq!(window.counters().refused, 3);
    }

    #[test]
    fn a_column_can_be_the_sum_of_others() {
        let mut window = Window::new(WindowLimits::default());
        window.add(&[FrameKey::Kernel(1)], &thread(1), SampleType::Cpu, 1.0);
        window.add(&[FrameKey::Kernel(1)], &thread(1), SampleType::Blocked, 20.0);
        window.sum_into(SampleType::Wall, &[SampleType::Cpu, SampleType::Blocked]);
        assert_eq!(total(&window, SampleType::Wall, 1), 21.0);
    }
}
