//! The runtime's types: `MethodTable` and `TypeDesc` (dotnet/runtime src/coreclr/vm/methodtable.h,
//! typedesc.h).

use super::layout::{TypeHome, TypeLayout};
use crate::data_descriptor::RuntimeMemory;

/// Type arguments that are looked at. The largest the framework has are the 17 of `Func`; the shim
/// looks at as many.
pub(super) const MOST_ARGUMENTS: usize = 32;
/// Bit of a handle that makes it a `TypeDesc`'s.
const TYPE_DESC: u64 = 2;
/// Bits of the first flags.
const HAS_COMPONENT_SIZE: u32 = 0x8000_0000;
const CATEGORY_ARRAY_MASK: u32 = 0xc_0000;
const CATEGORY_ARRAY: u32 = 0x8_0000;
const ONE_DIMENSION: u32 = 0x2_0000;
const GENERICS: u32 = 0x30;
/// Bytes of an array's base without bounds, and of the bounds of one dimension.
const ARRAY_BASE_BYTES: u32 = 24;
const BOUNDS_BYTES: u32 = 8;
/// `GenericsDictInfo` stands before what it counts; its number of dictionaries before that of type
/// arguments.
const DICTIONARY_INFO_BYTES: u64 = 8;
const MOST_DICTIONARIES: u64 = 64;

/// What a type handle stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TypeShape {
    /// An array of a type, with so many dimensions.
    Array { element: u64, rank: u32 },
    /// A class, structure or interface: its module, the token there, and its type arguments, of all
    /// enclosing types together.
    Class { module: u64, token: u32, arguments: Vec<u64> },
    /// A pointer, function pointer or type variable, by its element type.
    Constructed { element_type: u8 },
}

impl TypeLayout {
    /// The type with this handle; `None` when it cannot be read or is none.
    pub(super) fn shape(&self, memory: &dyn RuntimeMemory, handle: u64) -> Option<TypeShape> {
        if handle & TYPE_DESC != 0 {
            let kind = memory.half((handle & !TYPE_DESC).checked_add(self.kind)?)?;
            return Some(TypeShape::Constructed { element_type: u8::try_from(kind & 0xff).ok()? });
        }
        if handle == 0 || !handle.is_multiple_of(8) {
            return None;
        }
        let half = |at: u64| memory.half(handle.checked_add(at)?);
        let word = |at: u64| memory.word(handle.checked_add(at)?);
        let flags = half(self.flags)?;
        let has_components = flags & HAS_COMPONENT_SIZE != 0;
        if has_components && flags & CATEGORY_ARRAY_MASK == CATEGORY_ARRAY {
            let rank = if flags & ONE_DIMENSION != 0 {
                1
            } else {
                half(self.base_bytes)?.checked_sub(ARRAY_BASE_BYTES)? / BOUNDS_BYTES
            };
            let element = word(self.arguments)?;
            return (1..=32).contains(&rank).then_some(TypeShape::Array { element, rank });
        }
        self.check(memory, handle)?;
        let arguments = if !has_components && flags & GENERICS != 0 {
            self.arguments(memory, word(self.arguments)?)?
        } else {
            Vec::new()
        };
        let (module, row) = self.home(memory, handle, flags)?;
        Some(TypeShape::Class { module, token: 0x0200_0000 | row, arguments })
    }

    /// The module of a class, or of an array's elements as the runtime has it.
    pub(super) fn module(&self, memory: &dyn RuntimeMemory, handle: u64) -> Option<u64> {
        if handle == 0 || !handle.is_multiple_of(8) {
            return None;
        }
        self.check(memory, handle)?;
        let flags = memory.half(handle.checked_add(self.flags)?)?;
        Some(self.home(memory, handle, flags)?.0)
    }

    /// Module and row of a class.
    fn home(&self, memory: &dyn RuntimeMemory, handle: u64, flags: u32) -> Option<(u64, u32)> {
        match self.home {
            TypeHome::Fields { token_flags, module } => {
                let row = memory.half(handle.checked_add(token_flags)?)? >> 8;
                Some((memory.word(handle.checked_add(module)?)?, row))
            }
            TypeHome::Loader { token, module, .. } => {
                // The low half of what is there; all ones mean that it is elsewhere.
                let row = memory.half(handle.checked_add(token)?)? & 0xffff;
                if row == 0xffff {
                    return None;
                }
                let is_plain = flags & (HAS_COMPONENT_SIZE | GENERICS) == 0;
                let owner = if is_plain { handle } else { self.canonical(memory, handle)? };
                let own = if is_plain { None } else { self.own_module_at(memory, owner)? };
                let at = own.map_or_else(|| owner.checked_add(module), Some)?;
                Some((memory.word(at)?, row))
            }
        }
    }

    fn canonical(&self, memory: &dyn RuntimeMemory, handle: u64) -> Option<u64> {
        let class = memory.word(handle.checked_add(self.class)?)?;
        Some(if class & 1 == 0 { handle } else { class & !1 })
    }

    /// Where a type of .NET 8 has the module that is not its loader's (`GetMultipurposeSlotPtr`):
    /// `Some(None)` when it has none.
    fn own_module_at(&self, memory: &dyn RuntimeMemory, handle: u64) -> Option<Option<u64>> {
        const OWN_MODULE: u32 = 0x10;
        let TypeHome::Loader { flags, virtuals, slots, bytes, .. } = self.home else {
            return Some(None);
        };
        let flags = memory.half(handle.checked_add(flags)?)?;
        if flags & OWN_MODULE == 0 {
            return Some(None);
        }
        // The slots before it that are in use. The first two are fixed, and the first of them is
        // taken before the second.
        let before = flags & (OWN_MODULE - 1);
        let count = u64::from(before.count_ones());
        let index = if before & 3 == 2 && count == 1 { 0 } else { count };
        let at = if index < 2 {
            slots + index * 8
        } else {
            // Behind the fixed part are the pointers to pieces of the table of virtual methods.
            let virtuals = memory.half(handle.checked_add(virtuals)?)? & 0xffff;
            bytes + (index - 2) * 8 + u64::from(virtuals.div_ceil(8)) * 8
        };
        Some(Some(handle.checked_add(at)?))
    }

    /// The class of a type says which it is the class of: what is none does not.
    fn check(&self, memory: &dyn RuntimeMemory, handle: u64) -> Option<()> {
        let class_of = |handle: u64| memory.word(handle.checked_add(self.class)?);
        let mut class = class_of(handle)?;
        let mut canonical = handle;
        if class & 1 != 0 {
            canonical = class & !1;
            class = class_of(canonical)?;
        }
        let owner = memory.word(class.checked_add(self.class_type)?)?;
        (class & 1 == 0 && owner == canonical).then_some(())
    }

    fn arguments(&self, memory: &dyn RuntimeMemory, dictionaries: u64) -> Option<Vec<u64>> {
        let info = dictionaries.checked_sub(DICTIONARY_INFO_BYTES)?;
        // Both are 16 bits; the number of dictionaries comes first.
        let counts = memory.half(info.checked_add(self.argument_count.checked_sub(2)?)?)?;
        let (count, own) = (usize::try_from(counts >> 16).ok()?, u64::from(counts & 0xffff));
        if !(1..=MOST_DICTIONARIES).contains(&own) || !(1..=MOST_ARGUMENTS).contains(&count) {
            return None;
        }
        handles(memory, memory.word(dictionaries.checked_add((own - 1) * 8)?)?, count)
    }
}

/// So many type handles at a place.
pub(super) fn handles(memory: &dyn RuntimeMemory, at: u64, count: usize) -> Option<Vec<u64>> {
    (0..count.min(MOST_ARGUMENTS) as u64)
        .map(|index| memory.word(at.checked_add(index * 8)?).filter(|&handle| handle != 0))
        .collect()
}
