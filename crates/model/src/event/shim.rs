//! What shims report.

use super::context::UserContext;
use super::time::MonotonicNs;

/// Identity of one shim region in this daemon's life; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u32);

/// How many exceptions and contentions one region has counted since this recorder reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeEventCounts {
    /// The region.
    pub region: RegionId,
    /// How many.
    pub counts: [u64; 2],
    /// False where records were left out since the last look: then the profile does not cover what
    /// was counted.
    pub covered: [bool; 2],
}

/// Which heap an object went to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeapKind {
    /// Small object heap.
    Small,
    /// Large object heap.
    Large,
    /// Pinned object heap.
    Pinned,
}

/// How an allocation was chosen, which says what it stands for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AllocationKind {
    /// AllocationTick (.NET 6–9): a fixed stride of about 100 KiB; it stands for `amount` bytes. No
    /// unbiased estimator exists.
    Tick {
        /// Bytes allocated on this heap since the last tick.
        amount: u64,
    },
    /// AllocationSampled (.NET 10+): each byte is an independent trial with p = 1/102400.
    Sampled,
    /// The same, by exact mode: an object that stands for others of its class, too, which nobody is
    /// told of, is chosen as if it were larger.
    Chosen {
        /// Bytes that chance had to choose from, its own included.
        bytes: u64,
    },
    /// A large object: the runtime tells of each of them.
    Exact,
}

/// One sampled allocation.
#[derive(Clone, Debug)]
pub struct Allocation {
    /// Identity of the sample within its region; later `ObjectsDead`/`ObjectsAlive` name it.
    pub sample: u64,
    /// Allocating thread.
    pub tid: u32,
    /// The runtime's ClassID; its name comes as `TypeName`.
    pub type_id: u64,
    /// Object size in bytes.
    pub size: u64,
    /// Which heap.
    pub heap: HeapKind,
    /// How it was chosen.
    pub kind: AllocationKind,
    /// It was told of with the probability 2^-level.
    pub level: u8,
    /// When a weak handle watches it, the level it was chosen at (`profiler_protocol::live`).
    pub watched: Option<u8>,
    /// Registers and stack of the allocating thread, inside the shim's callback.
    pub user: UserContext,
    /// When they were taken, or earlier: unlike the event's time never later, whatever became of
    /// the record.
    pub seen: MonotonicNs,
}

/// Where a thread was in the middle of something the runtime told of; chosen by chance to stand for
/// others of its kind.
#[derive(Clone, Debug)]
pub struct RuntimeSample {
    /// The thread.
    pub tid: u32,
    /// One over the probability with which it was chosen; at least 1.
    pub weight: f64,
    /// Registers and stack of the thread, inside the shim's callback.
    pub user: UserContext,
    /// When they were taken, or earlier ([`Allocation::seen`]).
    pub seen: MonotonicNs,
}

/// An exception that was thrown.
#[derive(Clone, Debug)]
pub struct Exception {
    /// Where.
    pub at: RuntimeSample,
    /// Thrown again from a handler.
    pub rethrown: bool,
    /// Its type.
    pub type_name: String,
    /// What it says, where that was asked for.
    pub message: Option<String>,
}

/// A wait for a lock that another thread held, which is over.
#[derive(Clone, Debug)]
pub struct Contention {
    /// Where the thread waited.
    pub at: RuntimeSample,
    /// How long, nanoseconds.
    pub waited_ns: u64,
    /// Who held the lock when the wait began, as far as the runtime said.
    pub owner: Option<u32>,
}

/// Name and code of one managed method body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MethodBody {
    /// The address that was asked about.
    pub asked: u64,
    /// Module identity inside the process (ModuleID), with `token` and `instantiation` the
    /// function's identity.
    pub module_id: u64,
    /// MethodDef token; 0 for dynamic methods.
    pub token: u32,
    /// True for dynamic methods (LCG, IL stubs).
    pub dynamic: bool,
    /// `Namespace.Type<Args>.Method<Args>(ParameterTypes)`.
    pub name: String,
    /// Simple name of the module's file, or empty.
    pub module: String,
    /// Code ranges of this body: (start, length in bytes); hot part first.
    pub ranges: Vec<(u64, u32)>,
    /// Which IL its code comes from, where that was asked for.
    pub il_map: Option<Box<IlMap>>,
}

/// Which IL the code of a method body comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IlMap {
    /// Where the module's file is in the process's memory.
    pub module_base: u64,
    /// In no order.
    pub entries: Vec<IlMapEntry>,
}

/// Code of one place in the IL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IlMapEntry {
    /// IL offset, or one of the constants below.
    pub il: u32,
    /// First byte of the code, counted from the body's first.
    pub start: u32,
    /// The byte behind the last; 0 when the runtime does not say.
    pub end: u32,
}

impl IlMapEntry {
    /// Code of no place in the IL (`CorDebugIlToNativeMappingTypes`).
    pub const NO_MAPPING: u32 = u32::MAX;
    /// Code by which the method begins.
    pub const PROLOG: u32 = u32::MAX - 1;
    /// Code by which the method ends.
    pub const EPILOG: u32 = u32::MAX - 2;
}

/// What a shim says, decoded and bounds-checked, still only believed about its own process.
#[derive(Clone, Debug)]
pub enum ShimEvent {
    /// The instance is up: runtime version as (major, minor, build) and the instance's number in
    /// its process.
    Hello {
        /// Runtime version.
        runtime: (u16, u16, u16),
        /// It can watch objects: the runtime has weak handles for profilers.
        watches: bool,
    },
    /// A sampled allocation.
    Allocation(Box<Allocation>),
    /// Name of a type, sent before or after the first allocation that needs it.
    TypeName {
        /// ClassID.
        type_id: u64,
        /// ModuleID of its module; 0 when the runtime did not tell.
        module_id: u64,
        /// Name with generic arguments; what the compiler has made is as it is called in the
        /// metadata.
        name: String,
        /// Module's simple file name.
        module: String,
    },
    /// Answer to a name request.
    Method(Box<MethodBody>),
    /// The runtime does not know the address; the HRESULT says why.
    NoMethod {
        /// The address asked about.
        asked: u64,
        /// The runtime's answer.
        hresult: i32,
        /// When the question said that it was seen; later than all when it could not say so.
        seen: MonotonicNs,
    },
    /// Code in these ranges is gone (dynamic method collected, module unloaded): names and rules
    /// die.
    CodeUnloaded {
        /// (start, length).
        ranges: Vec<(u64, u64)>,
    },
    /// A collection began.
    GcStart {
        /// The runtime's count of collections.
        number: u32,
        /// Generation condemned.
        generation: u8,
        /// The runtime's reason code (`reference` A7: 0 small alloc, 1 induced, …).
        reason: u8,
        /// 0 blocking, 1 background, 2 foreground during background.
        kind: u8,
        /// Thread that started it.
        tid: u32,
    },
    /// A collection ended.
    GcEnd {
        /// The runtime's count of collections.
        number: u32,
    },
    /// All managed threads are being suspended.
    PauseBegin {
        /// The runtime's suspension reason (1 = GC, 6 = GC preparation, …).
        reason: u8,
        /// Thread that suspends.
        tid: u32,
    },
    /// Managed threads run again.
    PauseEnd {
        /// Thread that resumed them.
        tid: u32,
    },
    /// What a collection left.
    GcHeap {
        /// The runtime's count of collections.
        number: u32,
        /// Bytes that survived it, in the generations it collected.
        promoted: u64,
    },
    /// CPU time of the thread that suspended the others, during the pause that ends now.
    PauseCpu {
        /// The thread.
        tid: u32,
        /// Nanoseconds.
        cpu_ns: u64,
    },
    /// The runtime changed how many workers of its thread pool may run at a time.
    PoolAdjusted {
        /// How many workers.
        workers: u32,
        /// The runtime's reason code.
        reason: u32,
    },
    /// What waited for a worker of the thread pool when the runtime looked.
    PoolQueue {
        /// Items of work.
        items: u64,
    },
    /// An exception.
    Exception(Box<Exception>),
    /// A wait for a lock.
    Contention(Box<Contention>),
    /// These sampled objects were found dead at a collection's end.
    ObjectsDead {
        /// Their `Allocation::sample`.
        samples: Vec<u64>,
    },
    /// These sampled objects survived, with the generation they are in now.
    ObjectsAlive {
        /// (sample, generation).
        samples: Vec<(u64, u8)>,
    },
    /// These sampled objects are not watched any more: chance chose others, which were all above
    /// the level.
    ObjectsDropped {
        /// The level (`profiler_protocol::live`).
        level: u8,
        /// Their `Allocation::sample`.
        samples: Vec<u64>,
    },
    /// A managed thread that was there when the shim was loaded.
    ThreadAt {
        /// Its id in the initial pid namespace.
        tid: u32,
        /// Address of the runtime's structure of it, as the shim says.
        address: u64,
    },
    /// The instance waits to hear that all it has said up to this was looked at.
    Mark,
    /// A managed thread's OS id and name.
    ThreadName {
        /// OS thread id in the initial pid namespace (translated by the reader when it can), else
        /// as the process sees it.
        tid: u32,
        /// The name.
        name: String,
    },
    /// The instance says goodbye: detach finished or the process shuts down.
    Bye,
}

impl ShimEvent {
    /// About how much memory it takes beside its own size.
    pub(super) fn bytes_behind(&self) -> usize {
        match self {
            Self::Allocation(allocation) => size_of::<Allocation>() + allocation.user.bytes(),
            Self::Exception(exception) => {
                let message = exception.message.as_ref().map_or(0, String::len);
                let texts = exception.type_name.len() + message;
                size_of::<Exception>() + texts + exception.at.user.bytes()
            }
            Self::Contention(contention) => size_of::<Contention>() + contention.at.user.bytes(),
            Self::TypeName { name, module, .. } => name.len() + module.len(),
            Self::ThreadName { name, .. } => name.len(),
            Self::Method(method) => {
                let texts = method.name.len() + method.module.len();
                size_of::<MethodBody>() + texts + size_of_val(&*method.ranges)
            }
            Self::CodeUnloaded { ranges } => size_of_val(&**ranges),
            Self::ObjectsDead { samples } => size_of_val(&**samples),
            Self::ObjectsAlive { samples } => size_of_val(&**samples),
            Self::ObjectsDropped { samples, .. } => size_of_val(&**samples),
            _ => 0,
        }
    }
}
