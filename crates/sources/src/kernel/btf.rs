//! Reads what the probes need from the kernel's BTF: field offsets and tracepoint prototypes.
//!
//! aya finds types by name but keeps their members to itself, and Rust probes have no relocations,
//! so this is a small reader of its own. Format: Documentation/bpf/btf.rst. The file comes from the
//! kernel, but nothing here trusts its numbers.

use std::collections::{HashMap, HashSet};

/// Where the kernel shows its BTF.
pub const PATH: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_PTR: u32 = 2;
const KIND_INT: u32 = 1;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;
const KIND_TYPEDEF: u32 = 8;
const KIND_VOLATILE: u32 = 9;
const KIND_CONST: u32 = 10;
const KIND_RESTRICT: u32 = 11;
const KIND_FUNC_PROTO: u32 = 13;
const KIND_VAR: u32 = 14;
const KIND_DATASEC: u32 = 15;
const KIND_DECL_TAG: u32 = 17;
const KIND_TYPE_TAG: u32 = 18;
const KIND_ENUM64: u32 = 19;
const KIND_LAST: u32 = 19;

/// Nesting of anonymous structs and length of typedef chains that are followed.
const MAX_DEPTH: u32 = 16;
/// Longest name, bytes (kernel `KSYM_NAME_LEN`).
const MAX_NAME_BYTES: usize = 512;

/// Why BTF could not answer.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// A number points outside the data.
    #[error("{PATH}: {what} at byte {offset} is outside the data ({len} bytes)")]
    Truncated {
        /// What was being read.
        what: &'static str,
        /// Where.
        offset: usize,
        /// Size of the data.
        len: usize,
    },
    /// Not BTF.
    #[error("{PATH}: expected BTF magic {MAGIC:#x}, found {found:#x}")]
    Magic {
        /// First two bytes.
        found: u16,
    },
    /// A kind this reader does not know, so its length is unknown.
    #[error("{PATH}: type {id} has unknown kind {kind}; expected at most {KIND_LAST}")]
    Kind {
        /// Type number.
        id: u32,
        /// Its kind.
        kind: u32,
    },
    /// The kernel has no such struct or no such field.
    #[error("{PATH}: no field `{field}` in `struct {name}`: this kernel is not supported")]
    NoField {
        /// Struct.
        name: &'static str,
        /// Field.
        field: &'static str,
    },
    /// The kernel has no such struct.
    #[error("{PATH}: no `struct {name}`: this kernel is not supported")]
    NoStruct {
        /// Struct.
        name: &'static str,
    },
    /// A bit field where a plain one was expected.
    #[error("{PATH}: `struct {name}`.`{field}` is not at a byte boundary (bit {bits})")]
    BitField {
        /// Struct.
        name: &'static str,
        /// Field.
        field: &'static str,
        /// Its offset in bits.
        bits: u32,
    },
    /// The kernel has no such tracepoint.
    #[error("{PATH}: no tracepoint `{name}`: this kernel is not supported")]
    NoTracepoint {
        /// Its name.
        name: &'static str,
    },
}

/// Sort of a tracepoint's argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A pointer.
    Pointer,
    /// An integer, enum or bool.
    Integer,
    /// Anything else.
    Other,
}

/// One type: its header and where its details start.
#[derive(Clone, Copy)]
struct BtfType {
    name: u32,
    kind: u32,
    count: u32,
    has_bit_fields: bool,
    /// Size or type number.
    target: u32,
    details: usize,
}

/// The kernel's types.
pub struct KernelBtf<'a> {
    data: &'a [u8],
    strings: usize,
    types: Vec<usize>,
    structs: HashMap<&'a [u8], u32>,
    tracepoints: HashMap<&'a [u8], u32>,
}

impl<'a> KernelBtf<'a> {
    /// Indexes the structs and tracepoints of `data`.
    ///
    /// # Errors
    /// When the data is not well-formed BTF.
    pub fn parse(data: &'a [u8]) -> Result<Self, BtfError> {
        let magic = u16::from_ne_bytes(bytes(data, 0, "magic")?);
        if magic != MAGIC {
            return Err(BtfError::Magic { found: magic });
        }
        let header = word(data, 4, "header")?;
        let at = |field: usize| {
            Ok::<_, BtfError>(
                to_usize(header).saturating_add(to_usize(word(data, field, "header")?)),
            )
        };
        let (start, length, strings) = (at(8)?, to_usize(word(data, 12, "header")?), at(16)?);
        let end = start.saturating_add(length);
        let mut btf = Self {
            data,
            strings,
            types: vec![0],
            structs: HashMap::new(),
            tracepoints: HashMap::new(),
        };
        let mut offset = start;
        while offset < end {
            let id = u32::try_from(btf.types.len()).unwrap_or(u32::MAX);
            let one = read_type(data, offset)?;
            let size =
                details_size(one.kind, one.count).ok_or(BtfError::Kind { id, kind: one.kind })?;
            btf.types.push(offset);
            match one.kind {
                KIND_STRUCT => drop(btf.structs.entry(btf.name(one.name)?).or_insert(id)),
                KIND_TYPEDEF => {
                    if let Some(name) = btf.name(one.name)?.strip_prefix(b"btf_trace_") {
                        btf.tracepoints.insert(name, id);
                    }
                }
                _ => {}
            }
            offset = one.details.saturating_add(size);
        }
        Ok(btf)
    }

    /// Byte offset of `field` in `struct name`, also inside anonymous members.
    ///
    /// # Errors
    /// When the kernel has no such field.
    pub fn offset_of(&self, name: &'static str, field: &'static str) -> Result<u32, BtfError> {
        let bits = self.bits_to(name, field)?;
        if bits % 8 == 0 { Ok(bits / 8) } else { Err(BtfError::BitField { name, field, bits }) }
    }

    /// Byte and mask of the one-bit field `field` of `struct name`; little-endian.
    ///
    /// # Errors
    /// When the kernel has no such field.
    pub(crate) fn bit_of(
        &self,
        name: &'static str,
        field: &'static str,
    ) -> Result<(u32, u32), BtfError> {
        let bits = self.bits_to(name, field)?;
        Ok((bits / 8, 1 << (bits % 8)))
    }

    /// Bytes of `struct name`.
    ///
    /// # Errors
    /// When the kernel has no such struct.
    pub fn size_of(&self, name: &'static str) -> Result<u32, BtfError> {
        let &id = self.structs.get(name.as_bytes()).ok_or(BtfError::NoStruct { name })?;
        Ok(self.plain(id)?.target)
    }

    fn bits_to(&self, name: &'static str, field: &'static str) -> Result<u32, BtfError> {
        let id = *self.structs.get(name.as_bytes()).ok_or(BtfError::NoField { name, field })?;
        let bits = self.find_member(id, field.as_bytes(), 0, &mut HashSet::new())?;
        bits.ok_or(BtfError::NoField { name, field })
    }

    /// Sorts of the arguments of tracepoint `name`, without the leading `void *`.
    ///
    /// # Errors
    /// When the kernel has no such tracepoint.
    pub fn tracepoint(&self, name: &'static str) -> Result<Vec<Argument>, BtfError> {
        let id = *self.tracepoints.get(name.as_bytes()).ok_or(BtfError::NoTracepoint { name })?;
        // typedef void (*btf_trace_NAME)(void *, arguments…)
        let pointer = self.plain(id)?;
        let proto = self.plain(pointer.target)?;
        if pointer.kind != KIND_PTR || proto.kind != KIND_FUNC_PROTO {
            return Err(BtfError::NoTracepoint { name });
        }
        (1..proto.count)
            .map(|index| {
                let parameter = proto.details + to_usize(index) * 8;
                Ok(match self.plain(word(self.data, parameter + 4, "parameter")?)?.kind {
                    KIND_PTR => Argument::Pointer,
                    KIND_INT | KIND_ENUM | KIND_ENUM64 => Argument::Integer,
                    _ => Argument::Other,
                })
            })
            .collect()
    }

    /// Bit offset of a member of struct or union `id`. What was searched already, because structs
    /// may say that they contain each other, is not searched again: the time would grow
    /// exponentially with the depth.
    fn find_member(
        &self,
        id: u32,
        field: &[u8],
        depth: u32,
        searched: &mut HashSet<u32>,
    ) -> Result<Option<u32>, BtfError> {
        let one = self.plain(id)?;
        if depth > MAX_DEPTH
            || !searched.insert(id)
            || !matches!(one.kind, KIND_STRUCT | KIND_UNION)
        {
            return Ok(None);
        }
        for index in 0..one.count {
            let member = one.details + to_usize(index) * 12;
            let name = self.name(word(self.data, member, "member")?)?;
            let place = word(self.data, member + 8, "member")?;
            let bits = if one.has_bit_fields { place & 0x00ff_ffff } else { place };
            if name == field {
                return Ok(Some(bits));
            }
            if name.is_empty() {
                let inner = word(self.data, member + 4, "member")?;
                if let Some(inside) = self.find_member(inner, field, depth + 1, searched)? {
                    return Ok(Some(bits.saturating_add(inside)));
                }
            }
        }
        Ok(None)
    }

    /// Type `id` without typedefs and qualifiers around it.
    fn plain(&self, id: u32) -> Result<BtfType, BtfError> {
        let mut id = id;
        for _ in 0..MAX_DEPTH {
            let Some(&offset) = self.types.get(to_usize(id)) else { break };
            if id == 0 {
                break;
            }
            let one = read_type(self.data, offset)?;
            match one.kind {
                KIND_TYPEDEF | KIND_VOLATILE | KIND_CONST | KIND_RESTRICT | KIND_TYPE_TAG => {
                    id = one.target
                }
                _ => return Ok(one),
            }
        }
        Ok(BtfType { name: 0, kind: 0, count: 0, has_bit_fields: false, target: 0, details: 0 })
    }

    /// The string at `offset` of the string section.
    fn name(&self, offset: u32) -> Result<&'a [u8], BtfError> {
        let start = self.strings.saturating_add(to_usize(offset));
        let rest = self.data.get(start..).unwrap_or_default();
        let rest = rest.get(..MAX_NAME_BYTES).unwrap_or(rest);
        let end = rest.iter().position(|&byte| byte == 0);
        let end =
            end.ok_or(BtfError::Truncated { what: "name", offset: start, len: self.data.len() })?;
        Ok(rest.get(..end).unwrap_or_default())
    }
}

fn read_type(data: &[u8], offset: usize) -> Result<BtfType, BtfError> {
    let info = word(data, offset.saturating_add(4), "type")?;
    Ok(BtfType {
        name: word(data, offset, "type")?,
        kind: (info >> 24) & 0x1f,
        count: info & 0xffff,
        has_bit_fields: info >> 31 != 0,
        target: word(data, offset.saturating_add(8), "type")?,
        details: offset.saturating_add(12),
    })
}

/// Bytes that follow a type's header.
fn details_size(kind: u32, count: u32) -> Option<usize> {
    let count = to_usize(count);
    match kind {
        KIND_INT | KIND_VAR | KIND_DECL_TAG => Some(4),
        KIND_ARRAY => Some(12),
        KIND_STRUCT | KIND_UNION | KIND_DATASEC | KIND_ENUM64 => Some(count * 12),
        KIND_ENUM | KIND_FUNC_PROTO => Some(count * 8),
        1..=KIND_LAST => Some(0),
        _ => None,
    }
}

fn bytes<const N: usize>(
    data: &[u8],
    offset: usize,
    what: &'static str,
) -> Result<[u8; N], BtfError> {
    data.get(offset..)
        .and_then(|rest| rest.first_chunk::<N>())
        .copied()
        .ok_or(BtfError::Truncated { what, offset, len: data.len() })
}

fn word(data: &[u8], offset: usize, what: &'static str) -> Result<u32, BtfError> {
    bytes(data, offset, what).map(u32::from_ne_bytes)
}

/// `u32` always fits into `usize` on the platforms the daemon runs on.
fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::{Argument, BtfError, KernelBtf, PATH};
    use proptest::prelude::{any, proptest};

    /// One struct `outer { int a; struct { int b; }; }` by hand.
    fn sample() -> Vec<u8> {
        let strings = b"\0int\0outer\0a\0b\0btf_trace_t\0";
        let mut types: Vec<u32> = vec![
            1,
            0x0100_0000,
            4,
            32, // [1] int
            0,
            0x0400_0001,
            4,
            14 - 1,
            1,
            0, // [2] anonymous struct { b }
            5,
            0x0400_0002,
            8,
            11,
            1,
            0,
            0,
            2,
            32, // [3] outer
            0,
            0x0d00_0003,
            0,
            0,
            4,
            0,
            1,
            0,
            4, // [4] void (void*, int, void*)
            0,
            0x0200_0000,
            4, // [5] pointer to [4]
            15,
            0x0800_0000,
            5, // [6] typedef
        ];
        types[7] = 13;
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut data = vec![];
        data.extend(0xeb9fu16.to_ne_bytes());
        data.extend([1, 0]);
        for word in [24, 0, types.len(), types.len(), strings.len()] {
            data.extend(u32::try_from(word).unwrap().to_ne_bytes());
        }
        data.extend(types);
        data.extend(strings);
        data
    }

    #[test]
    fn finds_members_also_inside_anonymous_ones() {
        let data = sample();
        let btf = KernelBtf::parse(&data).unwrap();
        assert_eq!(btf.offset_of("outer", "a").unwrap(), 0);
        assert_eq!(btf.offset_of("outer", "b").unwrap(), 4);
        assert!(matches!(btf.offset_of("outer", "c"), Err(BtfError::NoField { .. })));
        assert_eq!(btf.size_of("outer").unwrap(), 8);
        assert!(matches!(btf.size_of("a"), Err(BtfError::NoStruct { .. })));
    }

    #[test]
    fn structs_that_contain_themselves_are_searched_once() {
        // struct outer { struct outer; … 64 times }: its members have no name.
        let mut data = vec![];
        data.extend(0xeb9fu16.to_ne_bytes());
        data.extend([1, 0]);
        let types: Vec<u32> = [1, 0x0400_0040, 4].into_iter().chain([0, 1, 0].repeat(64)).collect();
        for word in [24, 0, types.len() * 4, types.len() * 4, 7] {
            data.extend(u32::try_from(word).unwrap().to_ne_bytes());
        }
        data.extend(types.iter().flat_map(|word| word.to_ne_bytes()));
        data.extend(b"\0outer\0");
        let btf = KernelBtf::parse(&data).unwrap();
        assert!(matches!(btf.offset_of("outer", "a"), Err(BtfError::NoField { .. })));
    }

    #[test]
    fn this_kernels_btf_has_the_scheduler() {
        // Without the file (a container, an old kernel) there is nothing to check here.
        let Ok(data) = std::fs::read(PATH) else { return };
        let btf = KernelBtf::parse(&data).unwrap();
        assert!(btf.offset_of("task_struct", "tgid").unwrap() > 0);
        let (byte, mask) = btf.bit_of("task_struct", "in_iowait").unwrap();
        assert!(byte > 0 && mask.is_power_of_two() && mask < 256);
        assert_eq!(btf.offset_of("css_set", "no such field").ok(), None);
        let switch = btf.tracepoint("sched_switch").unwrap();
        assert_eq!(
            switch.get(..3),
            Some(&[Argument::Integer, Argument::Pointer, Argument::Pointer][..])
        );
    }

    proptest! {
        #[test]
        fn no_data_makes_it_panic(
            changes in proptest::collection::vec(
                (any::<proptest::sample::Index>(), any::<u8>()),
                0..8,
            ),
            cut in any::<proptest::sample::Index>(),
        ) {
            let mut data = sample();
            for (place, byte) in changes {
                let place = place.index(data.len());
                data[place] = byte;
            }
            data.truncate(cut.index(data.len() + 1));
            if let Ok(btf) = KernelBtf::parse(&data) {
                btf.offset_of("outer", "b").ok();
                btf.tracepoint("t").ok();
            }
        }
    }
}
