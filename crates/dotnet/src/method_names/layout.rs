//! Where fields are in the runtime's structures, as far as names need them. .NET 9 and newer say it
//! themselves ([`DataDescriptor`]); of .NET 8 it is known.

use crate::data_descriptor::{DataDescriptor, RuntimeMemory, major_version};

/// Offsets in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RuntimeLayout {
    pub(super) method: MethodLayout,
    pub(super) types: TypeLayout,
    pub(super) module: ModuleLayout,
    /// Where it is told how ReadyToRun code is found.
    pub(super) images: Option<ImageLayout>,
}

/// Of `MethodDesc` and what it is part of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MethodLayout {
    pub(super) token_remainder: u64,
    pub(super) chunk_index: u64,
    pub(super) flags: u64,
    /// Bits of a token that are in the method; the others are in its chunk.
    pub(super) remainder_bits: u32,
    pub(super) alignment: u64,
    pub(super) chunk_bytes: u64,
    pub(super) chunk_type: u64,
    pub(super) chunk_size: u64,
    pub(super) chunk_token_range: u64,
    pub(super) arguments: u64,
    pub(super) argument_count: u64,
    pub(super) signature: u64,
    pub(super) signature_bytes: u64,
    pub(super) dynamic_name: u64,
}

/// Of `MethodTable`, `EEClass` and `TypeDesc`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TypeLayout {
    pub(super) flags: u64,
    pub(super) base_bytes: u64,
    pub(super) home: TypeHome,
    pub(super) class: u64,
    pub(super) arguments: u64,
    pub(super) class_type: u64,
    pub(super) argument_count: u64,
    pub(super) kind: u64,
}

/// How a type says which module it is of, and its token there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TypeHome {
    /// By fields; the token is in the upper 24 bits of flags.
    Fields { token_flags: u64, module: u64 },
    /// As .NET 8: the token has 16 bits, and the module is the loader's or in a slot of its own.
    Loader { flags: u64, token: u64, virtuals: u64, module: u64, slots: u64, bytes: u64 },
}

/// How a module leads to its image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ImagePlace {
    /// By a field with the place where it is mapped.
    Field(u64),
    /// By its assembly, that one's image, and one of its layouts.
    Layouts { assembly: u64, layout: u64 },
    /// By its assembly at a place that has to be searched for.
    Unknown,
}

/// Of `Module`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModuleLayout {
    pub(super) image: ImagePlace,
    pub(super) path: Option<u64>,
    /// Metadata of a module that is no image: its size and place.
    pub(super) own_metadata: Option<(u64, u64, u64)>,
}

/// Of what leads from ReadyToRun code to its method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImageLayout {
    /// Where the code range map begins: its top level is there.
    pub(super) top_level: u64,
    pub(super) fragment_begin: u64,
    pub(super) fragment_end: u64,
    pub(super) fragment_range: u64,
    pub(super) fragment_next: u64,
    pub(super) range_begin: u64,
    pub(super) range_end: u64,
    pub(super) range_deleted: Option<u64>,
    pub(super) range_module: u64,
    pub(super) module_info: u64,
    pub(super) info_header: u64,
    pub(super) info_composite: Option<u64>,
    pub(super) info_functions: u64,
    pub(super) info_function_count: u64,
    pub(super) info_base: Option<u64>,
    pub(super) info_methods: u64,
    pub(super) map_buckets: u64,
    pub(super) value_mask: u64,
}

/// Slots of a bucket, and where its parts are: the same in all versions.
pub(super) const BUCKET_BYTES: u64 = 64;
pub(super) const BUCKET_SLOTS: u64 = 4;

impl RuntimeLayout {
    /// That of the runtime that is mapped at `base` and describes itself at `descriptor`; `None`
    /// where it is not known.
    pub(super) fn of(
        memory: &dyn RuntimeMemory,
        base: u64,
        descriptor: Option<u64>,
    ) -> Option<Self> {
        let known = || match major_version(memory, base)? {
            8 => Some(Self::of_8()),
            9 => Some(Self::of_9()),
            _ => None,
        };
        descriptor.and_then(|at| Self::read(memory, at)).or_else(known)
    }

    /// .NET 8 does not describe itself. These are the fields of its headers (src/coreclr/vm/
    /// method.hpp, methodtable.h, class.h, typehandle.h, at the tag v8.0.0); a servicing release
    /// does not change them, for it must be read by the debuggers of the others.
    pub(super) fn of_8() -> Self {
        Self {
            method: MethodLayout {
                token_remainder: 0,
                chunk_index: 2,
                flags: 6,
                remainder_bits: 12,
                alignment: 8,
                chunk_bytes: 24,
                chunk_type: 0,
                chunk_size: 16,
                chunk_token_range: 18,
                arguments: 16,
                argument_count: 26,
                signature: 8,
                signature_bytes: 16,
                dynamic_name: 24,
            },
            types: TypeLayout {
                flags: 0,
                base_bytes: 4,
                home: TypeHome::Loader {
                    flags: 8,
                    token: 10,
                    virtuals: 12,
                    module: 24,
                    slots: 48,
                    bytes: 64,
                },
                class: 40,
                arguments: 48,
                class_type: 16,
                argument_count: 6,
                kind: 0,
            },
            module: ModuleLayout { image: ImagePlace::Unknown, path: None, own_metadata: None },
            images: None,
        }
    }

    /// .NET 9 inside a single-file program does not export its description. This is what that of
    /// `libcoreclr.so` says.
    fn of_9() -> Self {
        let eight = Self::of_8();
        Self {
            method: MethodLayout {
                arguments: 24,
                argument_count: 34,
                signature: 16,
                signature_bytes: 24,
                dynamic_name: 32,
                ..eight.method
            },
            types: TypeLayout {
                home: TypeHome::Fields { token_flags: 8, module: 24 },
                ..eight.types
            },
            module: ModuleLayout {
                image: ImagePlace::Field(288),
                path: Some(272),
                own_metadata: Some((1120, 0, 4)),
            },
            images: None,
        }
    }

    /// Reads it from the runtime's description, which is at this address.
    fn read(memory: &dyn RuntimeMemory, at: u64) -> Option<Self> {
        let described = DataDescriptor::read(memory, at)?;
        let of = |of: &str, field: &str| described.offset(of, field);
        let alignment = described.number("MethodDescAlignment").filter(|&bytes| bytes > 0)?;
        let remainder_bits =
            u32::try_from(described.number("MethodDescTokenRemainderBitCount")?).ok()?;
        // A token has 24 bits in all, and each part of it is one of 16.
        if !(8..=16).contains(&remainder_bits) {
            return None;
        }
        Some(Self {
            method: MethodLayout {
                token_remainder: of("MethodDesc", "Flags3AndTokenRemainder")?,
                chunk_index: of("MethodDesc", "ChunkIndex")?,
                flags: of("MethodDesc", "Flags")?,
                remainder_bits,
                alignment,
                chunk_bytes: of("MethodDescChunk", "!")?,
                chunk_type: of("MethodDescChunk", "MethodTable")?,
                chunk_size: of("MethodDescChunk", "Size")?,
                chunk_token_range: of("MethodDescChunk", "FlagsAndTokenRange")?,
                arguments: of("InstantiatedMethodDesc", "PerInstInfo")?,
                argument_count: of("InstantiatedMethodDesc", "NumGenericArgs")?,
                signature: of("StoredSigMethodDesc", "Sig")?,
                signature_bytes: of("StoredSigMethodDesc", "cSig")?,
                dynamic_name: of("DynamicMethodDesc", "MethodName")?,
            },
            types: TypeLayout {
                flags: of("MethodTable", "MTFlags")?,
                base_bytes: of("MethodTable", "BaseSize")?,
                home: TypeHome::Fields {
                    token_flags: of("MethodTable", "MTFlags2")?,
                    module: of("MethodTable", "Module")?,
                },
                class: of("MethodTable", "EEClassOrCanonMT")?,
                arguments: of("MethodTable", "PerInstInfo")?,
                class_type: of("EEClass", "MethodTable")?,
                argument_count: of("GenericsDictInfo", "NumTypeArgs")?,
                kind: of("TypeDesc", "TypeAndFlags")?,
            },
            module: ModuleLayout {
                image: ImagePlace::Field(of("Module", "Base")?),
                path: of("Module", "Path"),
                own_metadata: of("Module", "DynamicMetadata")
                    .zip(of("DynamicMetadata", "Size"))
                    .zip(of("DynamicMetadata", "Data"))
                    .map(|((at, size), data)| (at, size, data)),
            },
            images: ImageLayout::read(memory, &described),
        })
    }
}

impl ImageLayout {
    fn read(memory: &dyn RuntimeMemory, described: &DataDescriptor) -> Option<Self> {
        let of = |of: &str, field: &str| described.offset(of, field);
        // Where these are said to be elsewhere, it is another table.
        if of("Bucket", "!")? != BUCKET_BYTES
            || of("Bucket", "Keys")? != 0
            || of("Bucket", "Values")? != BUCKET_SLOTS * 8
            || described.number("HashMapSlotsPerBucket")? != BUCKET_SLOTS
            || of("RuntimeFunction", "!")? != FUNCTION_BYTES
        {
            return None;
        }
        let map = described.variable(memory, "ExecutionManagerCodeRangeMapAddress")?;
        Some(Self {
            top_level: map.checked_add(of("RangeSectionMap", "TopLevelData")?)?,
            fragment_begin: of("RangeSectionFragment", "RangeBegin")?,
            fragment_end: of("RangeSectionFragment", "RangeEndOpen")?,
            fragment_range: of("RangeSectionFragment", "RangeSection")?,
            fragment_next: of("RangeSectionFragment", "Next")?,
            range_begin: of("RangeSection", "RangeBegin")?,
            range_end: of("RangeSection", "RangeEndOpen")?,
            range_deleted: of("RangeSection", "NextForDelete"),
            range_module: of("RangeSection", "R2RModule")?,
            module_info: of("Module", "ReadyToRunInfo")?,
            info_header: of("ReadyToRunInfo", "ReadyToRunHeader")?,
            info_composite: of("ReadyToRunInfo", "CompositeInfo"),
            info_functions: of("ReadyToRunInfo", "RuntimeFunctions")?,
            info_function_count: of("ReadyToRunInfo", "NumRuntimeFunctions")?,
            info_base: of("ReadyToRunInfo", "LoadedImageBase"),
            info_methods: of("ReadyToRunInfo", "EntryPointToMethodDescMap")?,
            map_buckets: of("HashMap", "Buckets")?,
            value_mask: described.number("HashMapValueMask")?,
        })
    }
}

/// Bytes of a RUNTIME_FUNCTION.
pub(super) const FUNCTION_BYTES: u64 = 12;
