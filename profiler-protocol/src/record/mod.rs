//! Records ↔ bytes: what a record says ([`RecordBody`]), to bytes and back.

mod decode;
mod encode;

pub use decode::{RecordError, decode};
pub use encode::{PREFIX_WORDS, Put, encode_prefix};

/// Longest name or module name in a record, bytes.
pub const MAX_NAME_BYTES: usize = 2_048;
/// Most ranges in one record.
pub const MAX_RANGES: usize = 256;
/// Most objects in one record.
pub const MAX_OBJECTS: usize = 512;
/// Most entries of an IL map in one record.
pub const MAX_IL_MAP: usize = 1_024;

/// `NoMethod` with this HRESULT (CORPROF_E_DATAINCOMPLETE) means "not now": code was unloaded and
/// the address may lie in it, or the type arguments of shared code cannot be told yet. Ask again
/// when it is seen running again.
pub const NOT_NOW: i32 = 0x8013_1351_u32.cast_signed();

/// Registers captured inside the shim's callback: eight words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Registers {
    /// Instruction pointer.
    pub pc: u64,
    /// Stack pointer; the copied stack starts here.
    pub sp: u64,
    /// Frame pointer: rbp, x29.
    pub fp: u64,
    /// Callee-saved registers: rbx, r12 to r15; x19 to x23.
    pub saved: [u64; 5],
}

/// All of an allocation record but its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationHead {
    /// Identity of the sample; below 2⁵⁶.
    pub sample: u64,
    /// ClassID.
    pub type_id: u64,
    /// Object size, bytes.
    pub size: u64,
    /// Bytes an AllocationTick stands for; of an object that exact mode has chosen, those that
    /// chance had to choose from; 0 for others.
    pub amount: u64,
    /// 0 small, 1 large, 2 pinned.
    pub heap: u8,
    /// True for AllocationSampled.
    pub sampled: bool,
    /// True for a large object, of which the runtime tells one by one: it stands for itself, and
    /// for the 2^level of which it was chosen.
    pub exact: bool,
    /// 0: not watched; n: a weak handle watches the object, and the level was n − 1 then
    /// ([`crate::live`]).
    pub watched: u8,
    /// The sample stands for 2^level of its kind: it was chosen with that probability.
    pub level: u8,
    /// True when the copy of the stack ended because of its limit.
    pub limited: bool,
    /// Bytes of stack that follow.
    pub stack_bytes: u32,
    /// Registers.
    pub registers: Registers,
}

/// Where a thread was when something happened to it, in words of a record: its registers, and how
/// much of its stack follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackHead {
    /// The event stands for 2^level of its kind: it was chosen with that probability.
    pub level: u8,
    /// True when the copy of the stack ended because of its limit.
    pub limited: bool,
    /// Bytes of stack that follow.
    pub stack_bytes: u32,
    /// Registers.
    pub registers: Registers,
}

/// All of a record about an exception but its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionHead<'a> {
    /// Where it was thrown.
    pub at: StackHead,
    /// Thrown again from a handler.
    pub rethrown: bool,
    /// The exception's type.
    pub type_name: &'a str,
    /// What it says, as far as that is told; only to who asked for it.
    pub message: Option<&'a str>,
}

/// All of a record about a wait for a lock that another thread held, but its stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContentionHead {
    /// Where the thread waited.
    pub at: StackHead,
    /// How long, nanoseconds.
    pub waited_ns: u64,
    /// The thread that held the lock when the wait began, as the process sees it; 0 when that is
    /// not known.
    pub owner: u32,
}

/// A list of words inside a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WordList<'a>(&'a [u8]);

impl<'a> WordList<'a> {
    /// A list over `bytes`; a tail shorter than a word is ignored.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The words in order.
    pub fn iter(self) -> impl Iterator<Item = u64> + use<'a> {
        let (words, _) = self.0.as_chunks();
        words.iter().map(|word| u64::from_le_bytes(*word))
    }

    /// The words two by two.
    pub fn pairs(self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let (words, _) = self.0.as_chunks::<8>();
        let (pairs, _) = words.as_chunks();
        pairs.iter().map(|[one, other]| (u64::from_le_bytes(*one), u64::from_le_bytes(*other)))
    }
}

/// Which IL the code of a method body comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IlMapList<'a> {
    /// Where the module's image is mapped; 0 when the runtime does not say.
    pub base: u64,
    /// Entries of twelve bytes: IL offset, first byte of the code, the byte behind the last, as
    /// the runtime has them (COR_DEBUG_IL_TO_NATIVE_MAP).
    entries: &'a [u8],
}

impl<'a> IlMapList<'a> {
    /// Bytes of an entry.
    pub const ENTRY_BYTES: usize = 12;

    /// A map of so many entries; a tail shorter than one is ignored.
    #[must_use]
    pub const fn new(base: u64, entries: &'a [u8]) -> Self {
        Self { base, entries }
    }

    /// The entries, in the runtime's order.
    pub fn iter(self) -> impl Iterator<Item = [u32; 3]> + use<'a> {
        let (numbers, _) = self.entries.as_chunks::<4>();
        let (entries, _) = numbers.as_chunks::<3>();
        entries.iter().map(|entry| entry.map(u32::from_le_bytes))
    }
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordBody<'a> {
    /// Nothing: space given up by a producer.
    Skip,
    /// The instance is up.
    Hello {
        /// [`crate::layout::pack_runtime`].
        runtime: u64,
    },
    /// A sampled allocation with its stack (from `registers.sp` upwards).
    Allocation(AllocationHead, &'a [u8]),
    /// A type's name.
    TypeName {
        /// ClassID.
        type_id: u64,
        /// ModuleID of the module; 0 when the runtime did not tell. Two modules of one file are of
        /// two load contexts.
        module_id: u64,
        /// Name with generic arguments.
        name: &'a str,
        /// Module's simple file name.
        module: &'a str,
    },
    /// A method body.
    Method {
        /// The address that was asked about.
        asked: u64,
        /// ModuleID.
        module_id: u64,
        /// MethodDef token; 0 for a dynamic method.
        token: u32,
        /// True for a dynamic method.
        dynamic: bool,
        /// (start, bytes) pairs, hot part first.
        ranges: WordList<'a>,
        /// Full name.
        name: &'a str,
        /// Module's simple file name.
        module: &'a str,
        /// Which IL its code comes from; only to who asked for it.
        il_map: Option<IlMapList<'a>>,
    },
    /// The runtime does not know the address.
    NoMethod {
        /// The address that was asked about.
        asked: u64,
        /// Why.
        hresult: i32,
    },
    /// Code is gone.
    CodeUnloaded {
        /// All code of this module, unless 0.
        module_id: u64,
        /// And these (start, bytes) pairs.
        ranges: WordList<'a>,
    },
    /// A collection began.
    GcStart {
        /// The runtime's count.
        number: u32,
        /// Generation.
        generation: u8,
        /// The runtime's reason code.
        reason: u8,
        /// 0 blocking, 1 background, 2 foreground during background.
        kind: u8,
    },
    /// A collection ended.
    GcEnd {
        /// The runtime's count.
        number: u32,
    },
    /// Managed threads are being suspended.
    PauseBegin {
        /// The runtime's reason code.
        reason: u64,
    },
    /// Managed threads run again.
    PauseEnd,
    /// Sampled objects that died.
    ObjectsDead(WordList<'a>),
    /// Sampled objects that live: sample << 8 | generation.
    ObjectsAlive(WordList<'a>),
    /// Watched objects that are not watched any more, dead or alive: there are too many. Those that
    /// still are were above the level, too.
    ObjectsDropped {
        /// The level ([`crate::live`]).
        level: u8,
        /// Sample numbers.
        samples: WordList<'a>,
    },
    /// A managed thread.
    ThreadName {
        /// Its id as the process sees it.
        os_tid: u32,
        /// Its name, or empty.
        name: &'a str,
    },
    /// A managed thread that runs.
    ThreadAt {
        /// Its id as the process sees it.
        os_tid: u32,
        /// Where the runtime's own structure of it is.
        address: u64,
    },
    /// Nothing more comes.
    Bye,
    /// What a collection left: follows its end.
    GcHeap {
        /// The runtime's count.
        number: u32,
        /// Bytes that survived it, in the generations it collected.
        promoted: u64,
    },
    /// CPU time of the thread that suspended the others, between the beginning of the pause and its
    /// end, which follows.
    PauseCpu {
        /// The thread, as the process sees it.
        suspender: u32,
        /// Nanoseconds.
        cpu_ns: u64,
    },
    /// The runtime changed how many workers of its thread pool may run at a time.
    PoolAdjusted {
        /// So many.
        workers: u32,
        /// The runtime's reason code.
        reason: u32,
    },
    /// What waited for a worker of the thread pool when the runtime looked, as it does once a
    /// second.
    PoolQueue {
        /// Items of work.
        items: u64,
    },
    /// A sampled exception, with the stack it was thrown from (from `at.registers.sp` upwards).
    Exception(ExceptionHead<'a>, &'a [u8]),
    /// A sampled wait for a lock, with its stack.
    Contention(ContentionHead, &'a [u8]),
}

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// Thread that wrote it, as the process sees it.
    pub tid: u32,
    /// When, by the process's CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// What.
    pub body: RecordBody<'a>,
}
