//! What a value is counted under: the sample types and the label set. Plain data.

use crate::event::HeapKind;
use crate::stack::StackSpan;
use crate::text;
use crate::thread_role::RoleEvidence;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// The value that stands for those beyond the most that a label may have.
pub const OTHER: &str = "[other]";

/// The type's name where the runtime did not tell it.
pub const UNKNOWN_TYPE: &str = "[unknown type]";

/// One column of a profile. The order is the order in the file and part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SampleType {
    /// Times the CPU sampler found this stack.
    Samples,
    /// Nanoseconds on a CPU.
    Cpu,
    /// Nanoseconds ready to run, waiting for a CPU.
    Runnable,
    /// Nanoseconds waiting for something else.
    Blocked,
    /// The sum of the three above.
    Wall,
    /// Objects allocated.
    AllocObjects,
    /// Bytes allocated.
    AllocSpace,
    /// Objects alive at the window's end.
    InuseObjects,
    /// Bytes alive at the window's end.
    InuseSpace,
    /// Exceptions thrown.
    Exceptions,
    /// Contended lock acquisitions.
    Contentions,
    /// Nanoseconds waiting for contended locks.
    Delay,
    /// Nanoseconds managed threads were paused by the collector.
    GcPause,
}

impl SampleType {
    /// Number of sample types.
    pub const COUNT: usize = 13;
    /// All, in file order.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Samples,
        Self::Cpu,
        Self::Runnable,
        Self::Blocked,
        Self::Wall,
        Self::AllocObjects,
        Self::AllocSpace,
        Self::InuseObjects,
        Self::InuseSpace,
        Self::Exceptions,
        Self::Contentions,
        Self::Delay,
        Self::GcPause,
    ];

    /// Position in the file.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Name in the file, what `--type` takes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Samples => "samples",
            Self::Cpu => "cpu",
            Self::Runnable => "runnable",
            Self::Blocked => "blocked",
            Self::Wall => "wall",
            Self::AllocObjects => "alloc_objects",
            Self::AllocSpace => "alloc_space",
            Self::InuseObjects => "inuse_objects",
            Self::InuseSpace => "inuse_space",
            Self::Exceptions => "exceptions",
            Self::Contentions => "contentions",
            Self::Delay => "delay",
            Self::GcPause => "gc_pause",
        }
    }

    /// Unit in the file.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::Samples
            | Self::AllocObjects
            | Self::InuseObjects
            | Self::Exceptions
            | Self::Contentions => "count",
            Self::AllocSpace | Self::InuseSpace => "bytes",
            Self::Cpu
            | Self::Runnable
            | Self::Blocked
            | Self::Wall
            | Self::Delay
            | Self::GcPause => "nanoseconds",
        }
    }
}

/// Label value of a heap.
#[must_use]
const fn heap_name(heap: HeapKind) -> &'static str {
    match heap {
        HeapKind::Small => "soh",
        HeapKind::Large => "loh",
        HeapKind::Pinned => "poh",
    }
}

/// How the objects were chosen that were told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sampling {
    /// Each of them was told of and stands for itself.
    Exact,
    /// By chance, with a known probability (each byte for itself in `AllocationSampled`): estimates
    /// are unbiased and have an interval.
    Random,
    /// One per fixed number of bytes (`AllocationTick`): no unbiased estimator exists.
    Stride,
}

impl Sampling {
    /// The label's value.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Random => "random",
            Self::Stride => "stride",
        }
    }
}

/// What is told of collections beside their pauses. Of samples that are merged only the values are
/// added up, so these belong to one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CollectionLabels {
    /// `blocking`, `background` or `foreground`.
    pub kind: &'static str,
    /// How many there were.
    pub count: u64,
    /// The longest pause, nanoseconds.
    pub longest_ns: u64,
    /// Bytes that survived them, in the generations they collected.
    pub promoted: u64,
}

/// What samples of a pod show of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLabels {
    /// The pod's.
    pub uid: String,
    /// Name and value of each label.
    pub shown: Vec<(String, String)>,
}

impl Hash for PodLabels {
    /// Equal ones are of one pod, and few others are: to go through all the text for each value
    /// counted would cost more than it tells.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.uid.hash(state);
    }
}

/// What samples of a process show of what it publishes (`host::process::published`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedLabels {
    /// The process.
    pub pid: u32,
    /// Name and value of each label.
    pub shown: Vec<(&'static str, Arc<str>)>,
}

impl Hash for PublishedLabels {
    /// As with pods: few others are of one process.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.pid.hash(state);
    }
}

/// What samples of a thread show of what it worked for, in hexadecimal digits as W3C Trace Context
/// has them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SpanLabels {
    trace: String,
    span: String,
}

impl SpanLabels {
    /// Those of a span.
    #[must_use]
    pub fn of(span: StackSpan) -> Self {
        let StackSpan::Of(span) = span else { return Self::other() };
        Self { trace: text::hex(&span.trace), span: text::hex(&span.id) }
    }

    /// Those of all spans there is no room to tell apart.
    #[must_use]
    pub fn other() -> Self {
        Self { trace: OTHER.to_owned(), span: OTHER.to_owned() }
    }

    /// True when they are of one span.
    #[must_use]
    pub fn is_of_one(&self) -> bool {
        self.span != OTHER
    }
}

/// Stands for what a thread was called, among what its samples are counted by; 0 for no name
/// (`recorder::names`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NameId(pub u32);

/// All labels a value can carry. Absent ones are `None`; strings are shared, so that a clone is
/// cheap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels {
    /// Service the process belongs to: says which profile the value goes to, and is no label in it.
    pub service: Option<Arc<str>>,
    /// Process id in the initial pid namespace.
    pub pid: Option<u32>,
    /// Thread id in the initial pid namespace.
    pub thread_id: Option<u32>,
    /// The thread's name.
    pub thread_name: Option<Arc<str>>,
    /// What the thread is for (`aggregate::thread_role`).
    pub thread_role: Option<&'static str>,
    /// What decides on that once the methods near the thread's start have names; is no label.
    pub role_evidence: Option<Arc<RoleEvidence>>,
    /// Name of the process.
    pub process: Option<Arc<str>>,
    /// Container the process runs in.
    pub container_id: Option<Arc<str>>,
    /// The pod it runs in, where that is known.
    pub pod: Option<Arc<PodLabels>>,
    /// What its process publishes of itself.
    pub published: Option<Arc<PublishedLabels>>,
    /// What the thread worked for.
    pub span: Option<Arc<SpanLabels>>,
    /// What a thread waits for (`aggregate::wait_reason`).
    pub wait_reason: Option<&'static str>,
    /// Parked for want of work (`wait_kind=idle`): kept in the sums, hidden from default views.
    pub idle: bool,
    /// Who ended the wait: a thread's name and ids, or what is no thread.
    pub waker: Option<Arc<str>>,
    /// The same without ids, which threads of a pool share.
    pub waker_name: Option<Arc<str>>,
    /// Standard error of `runnable` and `blocked` together, nanoseconds, where chance chose which
    /// waits keep their stack.
    pub wait_stderr: Option<u64>,
    /// Type of the allocated object.
    pub type_name: Option<Arc<str>>,
    /// The name that the runtime has for it, or for the type of the exception, where that is
    /// another one (`symbolize::types`).
    pub type_raw: Option<Arc<str>>,
    /// Its module, where the process has another type of that name.
    pub type_module: Option<Arc<str>>,
    /// Heap of the allocated object.
    pub heap: Option<HeapKind>,
    /// Size of the objects, rounded down to a power of two, bytes (`aggregate::heap`).
    pub size_class: Option<u64>,
    /// How the runtime chose which objects to tell of.
    pub sampling: Option<Sampling>,
    /// Objects seen themselves: the values are estimates made from so many.
    pub sampled_objects: Option<u64>,
    /// Their own bytes.
    pub sampled_bytes: Option<u64>,
    /// Standard error of the bytes that were allocated or are alive, where chance chose the
    /// objects.
    pub space_stderr: Option<u64>,
    /// Age of a live object, a power of two (`aggregate::heap`).
    pub age_seconds: Option<u64>,
    /// Of one in how many such samples of its process was told when that was least often: in the
    /// window, of what is alive since it has been watched.
    pub told_one_in: Option<u64>,
    /// Of live objects that are told of one by one: how many of its process have no handle that
    /// watches them, since any are watched.
    pub unwatched: Option<u64>,
    /// How long live objects of its process have been watched without a break, milliseconds.
    pub watched_ms: Option<u64>,
    /// How long before the end the last full collection but one of its process began, milliseconds:
    /// what was old by then and is there is alive for sure.
    pub proven_ms: Option<u64>,
    /// Collections a live object has survived, rounded down to a power of two.
    pub survived: Option<u64>,
    /// Full collections that a live object has survived since it is old: 0, 1, or 2 for more.
    pub survived_old: Option<u64>,
    /// The weak handle that watches a live object: in no file, only where it is asked what holds
    /// the object (`perfusion leaks --heap`).
    pub handle: Option<u64>,
    /// Generation of a live object, or the one a collection condemned.
    pub generation: Option<u8>,
    /// Why a collection happened (`aggregate::collections`).
    pub gc_reason: Option<&'static str>,
    /// The collections of a pause.
    pub collections: Option<Arc<CollectionLabels>>,
    /// Type of an exception.
    pub exception_type: Option<Arc<str>>,
    /// What an exception says.
    pub exception_message: Option<Arc<str>>,
    /// Whether the exception was thrown again from a handler, where the runtime tells.
    pub rethrown: Option<bool>,
    /// The thread that held the lock another waited for: its name and ids.
    pub lock_owner: Option<Arc<str>>,
    /// Its name alone.
    pub lock_owner_name: Option<Arc<str>>,
}

/// The label of [`Labels::handle`].
pub const HANDLE: &str = "handle";

/// A label's value as the file stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelValue<'a> {
    /// Text.
    Text(&'a str),
    /// Number with its unit; the unit may be empty.
    Number(i64, &'static str),
}

impl Labels {
    /// Calls `emit` with name and value of each label that is set, in a fixed order.
    pub fn each<'a>(&'a self, mut emit: impl FnMut(&'a str, LabelValue<'a>)) {
        let mut number = |name, value: Option<i64>, unit| {
            if let Some(value) = value {
                emit(name, LabelValue::Number(value, unit));
            }
        };
        number("pid", self.pid.map(i64::from), "");
        number("thread_id", self.thread_id.map(i64::from), "");
        number(
            "age_seconds",
            self.age_seconds.map(|age| i64::try_from(age).unwrap_or(i64::MAX)),
            "seconds",
        );
        let count = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        number("watched_for", self.watched_ms.map(count), "milliseconds");
        number("proven_before", self.proven_ms.map(count), "milliseconds");
        number("size_class", self.size_class.map(count), "bytes");
        number("sampled_objects", self.sampled_objects.map(count), "");
        number("sampled_bytes", self.sampled_bytes.map(count), "bytes");
        number("told_one_in", self.told_one_in.map(count), "");
        number("unwatched", self.unwatched.map(count), "");
        number("space_stderr", self.space_stderr.map(count), "bytes");
        let stderr = self.wait_stderr.map(|ns| i64::try_from(ns).unwrap_or(i64::MAX));
        number("wait_stderr", stderr, "nanoseconds");
        number(
            "gcs_survived",
            self.survived.map(|count| i64::try_from(count).unwrap_or(i64::MAX)),
            "",
        );
        number("full_gcs_survived", self.survived_old.map(count), "");
        number(HANDLE, self.handle.map(count), "");
        number("generation", self.generation.map(i64::from), "");
        let collections = self.collections.as_deref();
        number("collections", collections.map(|of| count(of.count)), "");
        number("longest_pause", collections.map(|of| count(of.longest_ns)), "nanoseconds");
        number("promoted", collections.map(|of| count(of.promoted)), "bytes");
        let mut text = |name, value: Option<&'a str>| {
            if let Some(value) = value {
                emit(name, LabelValue::Text(value));
            }
        };
        text("thread_name", self.thread_name.as_deref());
        text("thread_role", self.thread_role);
        text("process", self.process.as_deref());
        text("container_id", self.container_id.as_deref());
        for (name, value) in self.pod.iter().flat_map(|pod| &pod.shown) {
            text(name, Some(value));
        }
        for (name, value) in self.published.iter().flat_map(|published| &published.shown) {
            text(name, Some(value));
        }
        let span = self.span.as_deref();
        text("trace_id", span.map(|of| of.trace.as_str()));
        text("span_id", span.map(|of| of.span.as_str()));
        text("wait_reason", self.wait_reason);
        text("wait_kind", self.idle.then_some("idle"));
        text("waker", self.waker.as_deref());
        text("waker_name", self.waker_name.as_deref());
        text("type", self.type_name.as_deref());
        text("type_raw", self.type_raw.as_deref());
        text("type_module", self.type_module.as_deref());
        text("heap", self.heap.map(heap_name));
        text("sampling", self.sampling.map(Sampling::name));
        text("gc_reason", self.gc_reason);
        text("gc_kind", collections.map(|of| of.kind));
        text("exception_type", self.exception_type.as_deref());
        text("exception_message", self.exception_message.as_deref());
        text("rethrown", self.rethrown.map(|again| if again { "yes" } else { "no" }));
        text("lock_owner", self.lock_owner.as_deref());
        text("lock_owner_name", self.lock_owner_name.as_deref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_types_stand_in_file_order() {
        for (position, sample_type) in SampleType::ALL.into_iter().enumerate() {
            assert_eq!(sample_type.index(), position);
        }
    }
}
