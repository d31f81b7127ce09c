//! Interface identities.

/// A GUID as it lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Guid {
    a: u32,
    b: u16,
    c: u16,
    d: [u8; 8],
}

impl Guid {
    /// From bytes in memory order.
    pub(crate) const fn from_bytes([a, b, c, d, e, f, g, h, rest @ ..]: [u8; 16]) -> Self {
        Self {
            a: u32::from_le_bytes([a, b, c, d]),
            b: u16::from_le_bytes([e, f]),
            c: u16::from_le_bytes([g, h]),
            d: rest,
        }
    }

    const fn new(a: u32, b: u16, c: u16, d: u64) -> Self {
        Self { a, b, c, d: d.to_be_bytes() }
    }
}

/// The class id the library answers to.
pub(crate) const CLASS: Guid = Guid::from_bytes(profiler_protocol::load::CLASS_ID);
/// The class id it answers to as a main profiler: exact mode.
pub(crate) const EXACT_CLASS: Guid = Guid::from_bytes(profiler_protocol::exact::EXACT_CLASS_ID);
/// IUnknown.
pub(crate) const IUNKNOWN: Guid = Guid::new(0, 0, 0, 0xC000_0000_0000_0046);
/// IClassFactory.
pub(crate) const ICLASS_FACTORY: Guid = Guid::new(1, 0, 0, 0xC000_0000_0000_0046);
/// IMetaDataImport2.
pub(crate) const IMETADATA_IMPORT2: Guid =
    Guid::new(0xFCE5_EFA0, 0x8BBA, 0x4F8E, 0xA036_8F20_22B0_8466);

/// ICorProfilerCallback to ICorProfilerCallback11: all slots of all of them are filled.
pub(crate) const CALLBACKS: [Guid; 11] = [
    Guid::new(0x176F_BED1, 0xA55C, 0x4796, 0x98CA_A9DA_0EF8_83E7),
    Guid::new(0x8A8C_C829, 0xCCF2, 0x49FE, 0xBBAE_0F02_2228_071A),
    Guid::new(0x4FD2_ED52, 0x7731, 0x4B8D, 0x9469_03D2_CC30_86C5),
    Guid::new(0x7B63_B2E3, 0x107D, 0x4D48, 0xB2F6_F61E_2294_70D2),
    Guid::new(0x8DFB_A405, 0x8C9F, 0x45F8, 0xBFFA_83B1_4CEF_78B5),
    Guid::new(0xFC13_DF4B, 0x4448, 0x4F4F, 0x950C_BA8D_19D0_0C36),
    Guid::new(0xF76A_2DBA, 0x1D52, 0x4539, 0x866C_2AA5_18F9_EFC3),
    Guid::new(0x5BED_9B15, 0xC079, 0x4D47, 0xBFE2_215A_140C_07E0),
    Guid::new(0x2758_3EC3, 0xC8F5, 0x482F, 0x8052_194B_8CE4_705A),
    Guid::new(0xCEC5_B60E, 0xC69C, 0x495F, 0x87F6_84D2_8EE1_6FFB),
    Guid::new(0x4235_0846, 0xAAED, 0x47F7, 0xB128_FD0C_9888_1CDE),
];

/// ICorProfilerInfo15 to 12, newest first, with their numbers.
pub(crate) const INFOS: [(Guid, u32); 4] = [
    (Guid::new(0xB446_462D, 0xBD22, 0x41DD, 0x872D_DC71_4C49_EB56), 15),
    (Guid::new(0xF460_E352, 0xD76D, 0x4FE9, 0x835F_F6AF_9D6E_862D), 14),
    (Guid::new(0x6E6C_7EE2, 0x0701, 0x4EC2, 0x9D29_2E87_33B6_6934), 13),
    (Guid::new(0x27B2_4CCD, 0x1CB1, 0x47C5, 0x96EE_9819_0DC3_0959), 12),
];
