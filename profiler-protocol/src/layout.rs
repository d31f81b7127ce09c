//! Offsets and sizes of the region, as in `docs/shim-protocol.md` (compared by `tests/layout.rs`).
//! No access here.

/// First word of a region that is ready to be read: `PERFSHIM`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PERFSHIM");
/// Version of this layout and of what records and requests mean (`tests/roundtrip.rs` holds their
/// bytes).
pub const VERSION: u32 = 4;
/// Name given to `memfd_create`.
pub const REGION_NAME: &str = "perfusion-shim";
/// How such a mapping reads in `/proc/PID/maps`.
pub const MAPS_NAME: &str = "/memfd:perfusion-shim (deleted)";

/// Bytes of the header (one page).
pub const HEADER_BYTES: u64 = 4096;
/// Bytes of one unit of event data.
pub const UNIT_BYTES: u64 = 64;
/// Bytes of one request slot.
pub const REQUEST_BYTES: u64 = 32;
/// Longest record, in units (128 KiB).
pub const MAX_RECORD_UNITS: u64 = 2_048;
/// Longest record, in bytes.
pub const MAX_RECORD_BYTES: u64 = MAX_RECORD_UNITS * UNIT_BYTES;
/// Units of a region made with defaults: 2 MiB of event data.
pub const DEFAULT_UNITS: u64 = 32_768;
/// Request slots of a region made with defaults.
pub const DEFAULT_REQUEST_SLOTS: u64 = 2_048;
/// Fewest units: two of the longest records (but loom's model is kept tiny).
pub const MIN_UNITS: u64 = if cfg!(loom) { 2 } else { 4_096 };
/// Most units: 64 MiB of event data.
pub const MAX_UNITS: u64 = 1 << 20;
/// Most request slots.
pub const MAX_REQUEST_SLOTS: u64 = 1 << 16;

/// Offset of the magic word.
pub const MAGIC_AT: u64 = 0x000;
/// Offset of version and header size.
pub const VERSION_AT: u64 = 0x008;
/// Offset of the region's length.
pub const REGION_BYTES_AT: u64 = 0x010;
/// Offset of the request ring's offset.
pub const REQUEST_OFFSET_AT: u64 = 0x018;
/// Offset of the number of request slots.
pub const REQUEST_SLOTS_AT: u64 = 0x020;
/// Offset of the commit words' offset.
pub const COMMIT_OFFSET_AT: u64 = 0x028;
/// Offset of the data's offset.
pub const DATA_OFFSET_AT: u64 = 0x030;
/// Offset of the number of units.
pub const UNITS_AT: u64 = 0x038;
/// Offset of the instance's random number.
pub const INSTANCE_AT: u64 = 0x040;
/// Offset of the pid as seen inside.
pub const PID_AT: u64 = 0x048;
/// Offset of the time the region was made.
pub const CREATED_AT: u64 = 0x050;
/// Offset of the packed runtime version.
pub const RUNTIME_AT: u64 = 0x058;
/// Offset of the feature bits.
pub const FEATURES_AT: u64 = 0x060;
/// Offset of the recorder's number the region was made for.
pub const OWNER_AT: u64 = 0x068;
/// Offset of the address of the watched objects' slots (`live::SLOT_WORDS`).
pub const SLOTS_AT: u64 = 0x070;
/// Offset of the units ever reserved.
pub const EVENT_HEAD_AT: u64 = 0x080;
/// Offset of the requests ever taken.
pub const REQUEST_TAIL_AT: u64 = 0x0c0;
/// Offset of the instance's state.
pub const STATE_AT: u64 = 0x0c8;
/// Offset of the units ever consumed.
pub const EVENT_TAIL_AT: u64 = 0x100;
/// Offset of the listener's number.
pub const LISTENER_AT: u64 = 0x140;
/// Offset of the heartbeat.
pub const HEARTBEAT_AT: u64 = 0x148;
/// Offset of the heartbeat's period.
pub const PERIOD_AT: u64 = 0x150;
/// Offset of the requests ever written.
pub const REQUEST_HEAD_AT: u64 = 0x180;
/// Offset of the first counter.
pub const COUNTERS_AT: u64 = 0x200;
/// Room for this many counters.
pub const COUNTER_WORDS: u64 = 64;
/// Bytes of the header that are in use.
pub const HEADER_USED_BYTES: usize = 0x400;

/// Feature bit: live objects are tracked by weak handles (.NET 7+).
pub const FEATURE_LIVE_OBJECTS: u64 = 1;
/// Feature bit: allocations come as AllocationSampled (.NET 10+).
pub const FEATURE_ALLOCATION_SAMPLED: u64 = 2;
/// Feature bit: a question may say when its address was seen on a stack.
pub const FEATURE_SEEN_TIMES: u64 = 4;
/// Feature bit: the process was loaded by environment, and waits at its start for the first beat.
pub const FEATURE_WAITS_AT_START: u64 = 8;

/// What an instance is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// Being set up.
    Starting,
    /// At work, or quiet because nobody listens.
    Ready,
    /// The process ends or the instance detaches: last questions now.
    Closing,
    /// Nothing more comes; the region goes away.
    Gone,
}

impl InstanceState {
    /// The word in the header.
    #[must_use]
    pub const fn word(self) -> u64 {
        match self {
            Self::Starting => 0,
            Self::Ready => 1,
            Self::Closing => 2,
            Self::Gone => 3,
        }
    }

    /// The state a word stands for.
    #[must_use]
    pub const fn from_word(word: u64) -> Option<Self> {
        match word {
            0 => Some(Self::Starting),
            1 => Some(Self::Ready),
            2 => Some(Self::Closing),
            3 => Some(Self::Gone),
            _ => None,
        }
    }
}

/// Where the parts of a region lie. All of it follows from two numbers, so a header is checked by
/// equality.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Units of event data, a power of two.
    pub units: u64,
    /// Request slots, a power of two.
    pub request_slots: u64,
}

impl Geometry {
    /// The default: 2 MiB of event data.
    pub const DEFAULT: Self = Self { units: DEFAULT_UNITS, request_slots: DEFAULT_REQUEST_SLOTS };

    /// A region of `units` and `request_slots`; `None` unless both are powers of two within their
    /// limits.
    #[must_use]
    pub const fn new(units: u64, request_slots: u64) -> Option<Self> {
        let units_fit = units.is_power_of_two() && units >= MIN_UNITS && units <= MAX_UNITS;
        let slots_fit = request_slots.is_power_of_two() && request_slots <= MAX_REQUEST_SLOTS;
        if units_fit && slots_fit { Some(Self { units, request_slots }) } else { None }
    }

    /// Offset of the request ring.
    #[must_use]
    pub const fn request_offset(self) -> u64 {
        HEADER_BYTES
    }

    /// Offset of the commit words.
    #[must_use]
    pub const fn commit_offset(self) -> u64 {
        self.request_offset().wrapping_add(self.request_slots.wrapping_mul(REQUEST_BYTES))
    }

    /// Offset of the event data.
    #[must_use]
    pub const fn data_offset(self) -> u64 {
        self.commit_offset().wrapping_add(self.units.wrapping_mul(8))
    }

    /// Length of the region.
    #[must_use]
    pub const fn region_bytes(self) -> u64 {
        self.data_offset().wrapping_add(self.units.wrapping_mul(UNIT_BYTES))
    }
}

// The largest region stays far from any overflow, and its parts are aligned to words.
const _: () = {
    let largest = Geometry { units: MAX_UNITS, request_slots: MAX_REQUEST_SLOTS };
    assert!(largest.region_bytes() < 1 << 27);
    assert!(Geometry::DEFAULT.data_offset().is_multiple_of(UNIT_BYTES));
    assert!(COUNTERS_AT + COUNTER_WORDS * 8 == HEADER_USED_BYTES as u64);
    assert!(cfg!(loom) || MIN_UNITS >= 2 * MAX_RECORD_UNITS);
};

/// The runtime's version as one word: u16 each of major, minor, build and the CLR instance id.
#[must_use]
pub const fn pack_runtime(major: u16, minor: u16, build: u16, clr_instance: u16) -> u64 {
    let [a, b] = major.to_le_bytes();
    let [c, d] = minor.to_le_bytes();
    let [e, f] = build.to_le_bytes();
    let [g, h] = clr_instance.to_le_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The parts of [`pack_runtime`]: major, minor, build, CLR instance id.
#[must_use]
pub const fn unpack_runtime(word: u64) -> (u16, u16, u16, u16) {
    let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
    (
        u16::from_le_bytes([a, b]),
        u16::from_le_bytes([c, d]),
        u16::from_le_bytes([e, f]),
        u16::from_le_bytes([g, h]),
    )
}
