//! What one process has allocated, by its events: each tells of a type how many objects were made
//! since the last event, and how many bytes they have. Layouts: GCSampledObjectAllocationHigh,
//! GCSampledObjectAllocationLow and BulkType in `ClrEtwAll.man` of dotnet/runtime.

use crate::declared::Assemblies;
use crate::fields::PayloadFields;
use crate::nettrace::NettraceEvent;
use crate::types::{RuntimeTypes, TypeBudget};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::labels::UNKNOWN_TYPE;
use perfusion_model::units::{counted, grouped, human};
use perfusion_pprof::LOST_PREFIX;
use perfusion_symbolize::types::TypeName;
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Events of the runtime.
mod id {
    pub(super) const TYPES: u32 = 15;
    pub(super) const HIGH: u32 = 20;
    pub(super) const LOW: u32 = 32;
}

const ROOM: TypeBudget = TypeBudget { types: 16_384, name_bytes: 2 << 20 };
/// Assemblies of a process that are kept open for the names in them.
const ASSEMBLIES: usize = 512;
/// Between looks at which assemblies it has mapped.
const LOOK: Duration = Duration::from_millis(20);

/// Counts.
#[derive(Debug)]
pub struct Tally {
    target: Option<ProcessHandle>,
    types: RuntimeTypes,
    assemblies: Assemblies,
    /// A type came since the last look at the assemblies.
    new_types: bool,
    looked: Option<Instant>,
    malformed: u64,
}

impl Tally {
    /// Nothing yet.
    #[must_use]
    pub fn new(target: Option<ProcessHandle>) -> Self {
        Self {
            target,
            types: RuntimeTypes::new(ROOM),
            assemblies: Assemblies::default(),
            new_types: false,
            looked: None,
            malformed: 0,
        }
    }

    /// Takes one event.
    pub fn event(&mut self, event: NettraceEvent<'_>) {
        let fields = PayloadFields(event.payload);
        let understood = match event.id {
            id::HIGH | id::LOW => self.allocated(fields),
            id::TYPES => {
                self.new_types = true;
                self.types.learn(fields)
            }
            _ => Some(()),
        };
        self.malformed = self.malformed.saturating_add(u64::from(understood.is_none()));
    }

    fn allocated(&mut self, mut fields: PayloadFields<'_>) -> Option<()> {
        let (_address, id, objects, bytes) =
            (fields.u64()?, fields.u64()?, fields.u32()?, fields.u64()?);
        let number = self.types.number(id);
        let of = self.types.get_mut(number)?;
        of.objects = of.objects.saturating_add(u64::from(objects));
        // As it is allocated, where that is known: of several objects there is only the sum.
        let bytes = if objects == 1 { bytes.checked_next_multiple_of(8)? } else { bytes };
        of.bytes = of.bytes.saturating_add(bytes);
        Some(())
    }

    /// Opens the assemblies that came with new types, while the process is there.
    pub fn look(&mut self) {
        if !self.new_types || self.looked.is_some_and(|at| at.elapsed() < LOOK) {
            return;
        }
        (self.new_types, self.looked) = (false, Some(Instant::now()));
        if let Some(target) = &self.target {
            self.assemblies.look(target, ASSEMBLIES);
        }
    }

    /// The sums. `lost` events of the stream are missing, and `broken` says why it has no proper
    /// end.
    #[must_use]
    pub fn finish(mut self, lost: u64, broken: Option<String>) -> ProcessTally {
        self.looked = None;
        self.look();
        let (mut list, numbers) = self.types.into_parts();
        self.assemblies.complete(&mut list);
        let ids: HashMap<u32, u64> = numbers.into_iter().map(|(id, number)| (number, id)).collect();
        let types =
            (0..).zip(list).filter(|(_, found)| found.objects > 0).map(|(number, found)| {
                TypeTally {
                    id: ids.get(&number).copied(),
                    name: TypeName::of(if found.name.is_empty() {
                        UNKNOWN_TYPE
                    } else {
                        &found.name
                    }),
                    objects: found.objects,
                    bytes: found.bytes,
                }
            });
        ProcessTally {
            types: types.collect(),
            lost,
            malformed: self.malformed,
            broken,
            is_late: false,
        }
    }
}

/// One type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeTally {
    /// What the runtime calls it.
    pub id: Option<u64>,
    /// Its names.
    pub name: TypeName,
    /// Objects that were made.
    pub objects: u64,
    /// Their bytes; up to 7 more for each array and string that was told of together with others.
    pub bytes: u64,
}

/// What one process has allocated.
#[derive(Debug, Default)]
pub struct ProcessTally {
    /// By type.
    pub types: Vec<TypeTally>,
    /// Events the runtime had no room for.
    pub lost: u64,
    /// Events that do not have the layout they should.
    pub malformed: u64,
    /// Why the stream has no proper end.
    pub broken: Option<String>,
    /// The session was opened after the runtime had gone on.
    pub is_late: bool,
}

impl fmt::Display for ProcessTally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = |of: fn(&TypeTally) -> u64| {
            let sum = self.types.iter().map(of).fold(0, u64::saturating_add);
            i64::try_from(sum).unwrap_or(i64::MAX)
        };
        let (objects, bytes) = (sum(|of| of.objects), sum(|of| of.bytes));
        let (objects, types) = (counted(objects, "object"), counted(self.types.len(), "type"));
        write!(f, "{objects}, {}, {types}", human(bytes, "bytes"))?;
        for (number, what) in [
            (self.lost, "events of the runtime are missing"),
            (self.malformed, "events make no sense"),
        ] {
            if number > 0 {
                write!(
                    f,
                    "; {LOST_PREFIX}{} {what}",
                    grouped(i64::try_from(number).unwrap_or(i64::MAX))
                )?;
            }
        }
        if self.is_late {
            write!(
                f,
                "; {LOST_PREFIX}what it made first is missing: it started before its session was \
                 open"
            )?;
        }
        if let Some(why) = &self.broken {
            write!(f, "; {LOST_PREFIX}what it made last is missing: {why}")?;
        }
        f.write_str("; where that is .NET 10, without most of what is boxed (docs/alloc-counts.md)")
    }
}

#[cfg(test)]
mod tests {
    use super::{Tally, id};
    use crate::nettrace::NettraceEvent;

    fn allocated(kind: u64, objects: u32, bytes: u64) -> Vec<u8> {
        [
            &7u64.to_le_bytes()[..],
            &kind.to_le_bytes(),
            &objects.to_le_bytes(),
            &bytes.to_le_bytes(),
            &[0; 2],
        ]
        .concat()
    }

    #[test]
    fn counts_add_up_and_names_come_before_or_after_them() {
        let mut tally = Tally::new(None);
        let mut send =
            |id, payload: &[u8]| tally.event(NettraceEvent { id, thread: 1, time_ns: 0, payload });
        send(id::HIGH, &allocated(70, 3, 72));
        let mut types = [&1u32.to_le_bytes()[..], &[0; 2], &70u64.to_le_bytes(), &[0; 17]].concat();
        types.extend(
            "Shop.Orders+Map`1[System.Int32]".encode_utf16().chain([0]).flat_map(u16::to_le_bytes),
        );
        types.extend(0u32.to_le_bytes());
        send(id::TYPES, &types);
        send(id::LOW, &allocated(70, 2, 48));
        send(id::LOW, &allocated(71, 1, 25));
        send(id::HIGH, &allocated(71, 1, 25)[..20]);
        send(1, b"");
        let tallied = tally.finish(4, None);
        let told: Vec<_> =
            tallied.types.iter().map(|of| (of.id, &*of.name.shown, of.objects, of.bytes)).collect();
        assert_eq!(
            told,
            [(Some(70), "Shop.Orders.Map<int>", 5, 120), (Some(71), "[unknown type]", 1, 32)]
        );
        let said = tallied.to_string();
        assert_eq!(
            said,
            "6 objects, 152 B, 2 types; LOST: 4 events of the runtime are missing; LOST: 1 events \
             make no sense; where that is .NET 10, without most of what is boxed \
             (docs/alloc-counts.md)"
        );
    }
}
