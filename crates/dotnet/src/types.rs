//! Types as the runtime tells of them (BulkType events): numbered in the order they are met, named
//! when their event comes, which may be before or after the first object. Layout: `ClrEtwAll.man`
//! of dotnet/runtime.

use crate::fields::PayloadFields;
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// Flag of types.
const ARRAY: u32 = 8;

/// Objects of one type.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeType {
    /// Name as the runtime has it; empty when it did not say. Of a nested type it is the innermost.
    pub name: String,
    /// What the runtime calls the module it is from.
    pub module: u64,
    /// Its number in the module's metadata; 0 for arrays.
    pub token: u32,
    /// Number of the type of an array's elements.
    pub element: Option<u32>,
    /// How many there are.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl RuntimeType {
    /// The name without type arguments.
    #[must_use]
    pub fn open_name(&self) -> &str {
        self.name.split('[').next().unwrap_or_default()
    }

    /// True for the type that the runtime has told so of.
    fn is(&self, module: u64, token: u32, name: &str) -> bool {
        self.module == module
            && self.token == token
            && self.name == perfusion_model::text::clean(name)
    }

    /// True for a class or structure of some module's own.
    #[must_use]
    pub(crate) fn has_token(&self) -> bool {
        !self.name.is_empty() && self.token & 0xff_ffff != 0 && self.element.is_none()
    }
}

/// What a type takes beside its name: its entry, and those that say its number, half of whose
/// places are empty at worst.
const TYPE_BYTES: usize = size_of::<RuntimeType>() + 2 * (size_of::<(u64, u32)>() + 1);

/// How much is kept of what a process tells.
#[derive(Clone, Copy, Debug)]
pub struct TypeBudget {
    /// Types that are told apart; further ones count as one.
    pub types: usize,
    /// Bytes of all names together; what comes after has none.
    pub name_bytes: usize,
}

impl TypeBudget {
    /// Where `limit_bytes` are allowed for all: an eighth of them for types, another for names, and
    /// no more than any program has use for.
    #[must_use]
    pub fn within(limit_bytes: usize) -> Self {
        let part = limit_bytes / 8;
        Self { types: (part / TYPE_BYTES).min(1 << 20), name_bytes: part.min(64 << 20) }
    }
}

/// The types of one process by what the runtime calls them.
#[derive(Debug)]
pub struct RuntimeTypes {
    numbers: HashMap<u64, u32, RandomState>,
    list: Vec<RuntimeType>,
    room: TypeBudget,
    /// Bytes of all names that were kept.
    name_bytes: usize,
}

impl RuntimeTypes {
    /// None yet.
    #[must_use]
    pub fn new(room: TypeBudget) -> Self {
        Self { numbers: HashMap::default(), list: Vec::new(), room, name_bytes: 0 }
    }

    /// Bytes they take, with all names that were kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.list.len() * TYPE_BYTES + self.name_bytes
    }

    /// Number of a type; 0 is everything that has no number.
    pub fn number(&mut self, id: u64) -> u32 {
        if self.list.is_empty() {
            self.list.push(RuntimeType::default());
        }
        match self.numbers.get(&id) {
            Some(&number) => number,
            None if id == 0 => 0,
            None => self.add(id),
        }
    }

    /// A new number for what has this id from now on.
    fn add(&mut self, id: u64) -> u32 {
        let Some(number) =
            u32::try_from(self.list.len()).ok().filter(|_| self.list.len() < self.room.types)
        else {
            return 0;
        };
        self.list.push(RuntimeType::default());
        self.numbers.insert(id, number);
        number
    }

    /// A type by its number.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut RuntimeType> {
        self.list.get_mut(number as usize)
    }

    /// The types by their numbers.
    #[must_use]
    pub fn into_list(self) -> Vec<RuntimeType> {
        self.list
    }

    /// The types by their numbers, and the numbers by what the runtime calls them now.
    #[must_use]
    pub fn into_parts(self) -> (Vec<RuntimeType>, HashMap<u64, u32, RandomState>) {
        (self.list, self.numbers)
    }

    /// A name to be kept; empty when there are too many.
    pub fn keep_name(&mut self, name: &str) -> String {
        let name = perfusion_model::text::clean(name);
        let all = self.name_bytes + name.len();
        if all > self.room.name_bytes {
            return String::new();
        }
        self.name_bytes = all;
        name.into_owned()
    }

    /// Takes an event; `None` when it does not have its layout. What has the id of a type that was
    /// unloaded is a type of its own.
    pub fn learn(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let (count, _runtime) = (fields.u32()?, fields.u16()?);
        for _ in 0..count {
            let id = fields.u64()?;
            let (module, token, flags, _sort) =
                (fields.u64()?, fields.u32()?, fields.u32()?, fields.u8()?);
            let name = fields.text()?;
            let parameters = usize::try_from(fields.u32()?).ok()?;
            let mut parameters = PayloadFields(fields.take(parameters.checked_mul(8)?)?);
            let mut number = self.number(id);
            let known = self.get_mut(number).filter(|known| !known.name.is_empty());
            if number == 0 || known.as_ref().is_some_and(|known| known.is(module, token, &name)) {
                continue;
            }
            if known.is_some() {
                number = self.add(id);
            }
            let element = match flags & ARRAY {
                0 => None,
                _ => {
                    parameters.u64().map(|id| self.number(id)).filter(|&element| element != number)
                }
            };
            let name = self.keep_name(&name);
            if let Some(known) = self.get_mut(number).filter(|_| number != 0) {
                *known = RuntimeType { name, module, token, element, ..*known };
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::{RuntimeTypes, TypeBudget};
    use crate::fields::PayloadFields;

    fn event(id: u64, module: u64, name: &str) -> Vec<u8> {
        let mut event = [&1u32.to_le_bytes()[..], &0u16.to_le_bytes(), &id.to_le_bytes()].concat();
        event.extend(
            [&module.to_le_bytes()[..], &2u32.to_le_bytes(), &0u32.to_le_bytes(), &[0]].concat(),
        );
        event.extend(name.encode_utf16().chain([0]).flat_map(u16::to_le_bytes));
        event.extend(0u32.to_le_bytes());
        event
    }

    #[test]
    fn a_type_is_told_of_again_by_each_thread_and_another_one_may_get_its_place() {
        let mut types = RuntimeTypes::new(TypeBudget { types: 9, name_bytes: 99 });
        let met = types.number(0x1000);
        types.get_mut(met).unwrap().objects = 3;
        for _ in 0..2 {
            types.learn(PayloadFields(&event(0x1000, 7, "Shop.Order"))).unwrap();
        }
        assert_eq!(types.number(0x1000), met);
        types.learn(PayloadFields(&event(0x1000, 8, "Shop.Order"))).unwrap();
        let other = types.number(0x1000);
        assert_ne!(other, met);
        let (list, numbers) = types.into_parts();
        assert_eq!((list[met as usize].objects, list[other as usize].objects), (3, 0));
        assert_eq!(list[other as usize].module, 8);
        assert_eq!(numbers.get(&0x1000), Some(&other));
    }

    #[test]
    fn half_an_event_is_none() {
        let whole = event(0x1000, 7, "Shop.Order");
        for end in 0..whole.len() {
            let mut types = RuntimeTypes::new(TypeBudget { types: 9, name_bytes: 99 });
            assert_eq!(types.learn(PayloadFields(&whole[..end])), None, "{end}");
        }
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut types = RuntimeTypes::new(TypeBudget { types: 3, name_bytes: 3 });
        for id in 1..100 {
            types.learn(PayloadFields(&event(id, 7, "ab"))).unwrap();
        }
        let (list, numbers) = types.into_parts();
        let names: Vec<&str> = list.iter().map(|known| known.name.as_str()).collect();
        assert_eq!((names.as_slice(), numbers.len()), (&["", "ab", ""][..], 2));
    }
}
