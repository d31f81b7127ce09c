//! Puts exact values into a profile: per process and type the allocated objects and bytes become
//! the exact ones, split among the stacks of the objects that the runtime told of by itself. Which
//! stack made which object is known of those only: walking a stack for each would take some ten
//! times as long as making the object.

use perfusion_dotnet::exact::{Ending, ExactAccount, ExactCount, ExactProcess, ExactType};
use perfusion_model::labels::{OTHER, SampleType, Sampling, UNKNOWN_TYPE};
use perfusion_model::text::clean;
use perfusion_pprof::proto::{Function, Label, Line, Location, Profile, Sample};
use perfusion_symbolize::types::ModuleLabels;
use perfusion_symbolize::types::{self, TypeName};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Value of the label `sampling` where values are exact.
pub const EXACT: &str = Sampling::Exact.name();
/// The same where the runtime has counted, and the last objects of each type were not told of
/// (`record --alloc-counts`).
pub const COUNTED: &str = "counted";
/// In place of a stack, for types of which no object was told of.
pub(crate) const NO_STACK: &str = "[no stack sampled]";
/// What the code that makes objects without telling a profiler calls when the thread's buffer is
/// full, and that tells: whoever calls it has made the others, too (`RuntimeTypeHandle`,
/// System.Private.CoreLib of .NET 10).
const SILENT: &str = "System.RuntimeTypeHandle.InternalAllocNoChecks";

/// Interns strings of a profile.
struct Strings {
    known: HashMap<String, i64>,
}

impl Strings {
    fn new(profile: &Profile) -> Self {
        let numbered = profile.string_table.iter().enumerate();
        Self {
            known: numbered
                .map(|(at, text)| (text.clone(), i64::try_from(at).unwrap_or(0)))
                .collect(),
        }
    }

    fn number(&mut self, profile: &mut Profile, text: &str) -> i64 {
        if let Some(&number) = self.known.get(text) {
            return number;
        }
        let number = i64::try_from(profile.string_table.len()).unwrap_or(0);
        profile.string_table.push(text.to_owned());
        self.known.insert(text.to_owned(), number);
        number
    }
}

/// Splits `total` in proportion to `weights`; the parts add up to it.
fn split(total: u64, weights: &[i64]) -> Vec<i64> {
    let sum: u128 = weights.iter().map(|&weight| u128::from(weight.max(0).unsigned_abs())).sum();
    // Weights that somebody has invented are beyond what can be multiplied.
    let shift = if sum > u128::from(u64::MAX) { 32 } else { 0 };
    let share = |until: u128| match sum {
        0 => 0,
        _ => {
            u64::try_from(u128::from(total) * (until >> shift) / (sum >> shift)).unwrap_or(u64::MAX)
        }
    };
    let (mut until, mut given) = (0u128, 0u64);
    let parts = weights.iter().map(|&weight| {
        until += u128::from(weight.max(0).unsigned_abs());
        let now = share(until);
        let part = now.saturating_sub(given);
        given = now;
        i64::try_from(part).unwrap_or(i64::MAX)
    });
    parts.collect()
}

/// All objects of a type that were made.
#[derive(Clone, Copy, Default)]
struct ExactTotals {
    all: ExactCount,
    /// Of all, those that the runtime told no profiler of.
    unseen: ExactCount,
}

impl ExactTotals {
    fn of(of: &ExactType) -> Self {
        let all = of.allocated;
        let objects = of.unseen.min(all.objects);
        // They are of one size, since what has components is told of; but for types beyond the
        // table, which share a row.
        let bytes = u128::from(all.bytes) * u128::from(objects) / u128::from(all.objects.max(1));
        Self {
            all,
            unseen: ExactCount { objects, bytes: u64::try_from(bytes).unwrap_or(u64::MAX) },
        }
    }

    fn add(&mut self, other: Self) {
        self.all.add(other.all);
        self.unseen.add(other.unseen);
    }
}

/// Locations of functions of this name.
fn locations_of(profile: &Profile, name: &str) -> HashSet<u64> {
    let text = |at: i64| usize::try_from(at).ok().and_then(|at| profile.string_table.get(at));
    let is_it = |of: &&Function| text(of.name).is_some_and(|text| text.starts_with(name));
    let functions: HashSet<u64> = profile.function.iter().filter(is_it).map(|of| of.id).collect();
    let calls = |of: &&Location| of.line.iter().any(|line| functions.contains(&line.function_id));
    profile.location.iter().filter(calls).map(|of| of.id).collect()
}

/// True for a sample that one of these locations made: it is the last frame, or has called a helper
/// of its own.
fn is_made_by(profile: &Profile, place: usize, locations: &HashSet<u64>) -> bool {
    let of = profile.sample.get(place);
    of.is_some_and(|of| of.location_id.iter().take(2).any(|id| locations.contains(id)))
}

/// What samples of one type bear: numbers of its readable name, of the runtime's and of its module;
/// 0 for none.
type TypeNameIds = [i64; 3];

/// Puts the exact values of `account` into `profile`; `sampling` says how exact. `known` is what
/// the samples of a process call its types, by their ClassIDs. Samples of the same processes whose
/// type is not told (beyond the most types of a window, or unknown) lose theirs: the same objects
/// are in the account under their type. A comment says how many.
pub fn merge(
    profile: &mut Profile,
    account: &ExactAccount,
    sampling: &str,
    known: impl Fn(u32, u64) -> Option<TypeName>,
) {
    let strings = &mut Strings::new(profile);
    let column = |profile: &Profile, wanted: SampleType| {
        let name = |at: i64| usize::try_from(at).ok().and_then(|at| profile.string_table.get(at));
        profile
            .sample_type
            .iter()
            .position(|of| name(of.r#type).is_some_and(|name| name == wanted.name()))
    };
    let (Some(objects_at), Some(bytes_at)) =
        (column(profile, SampleType::AllocObjects), column(profile, SampleType::AllocSpace))
    else {
        return;
    };
    let keys = ["pid", "process", "sampling", "space_stderr", sampling];
    let [pid_key, process_key, sampling_key, stderr_key, exact] =
        keys.map(|text| strings.number(profile, text));
    let one_by_one = strings.number(profile, EXACT);
    let name_keys = ["type", "type_raw", "type_module"].map(|text| strings.number(profile, text));
    // What the profile calls each process.
    let mut processes: HashMap<i64, i64> = HashMap::new();
    let mut places: HashMap<(i64, TypeNameIds), Vec<usize>> = HashMap::new();
    for (place, sample) in profile.sample.iter().enumerate() {
        let value = |at: usize| sample.value.get(at).copied().unwrap_or(0);
        let label = |key: i64| sample.label.iter().find(|label| label.key == key);
        if let (Some(name), Some(pid)) = (label(process_key), label(pid_key)) {
            processes.insert(pid.num, name.str);
        }
        let of = name_keys.map(|key| label(key).map_or(0, |label| label.str));
        if let Some(pid) = label(pid_key)
            && of[0] != 0
            && (value(objects_at) > 0 || value(bytes_at) > 0)
        {
            places.entry((pid.num, of)).or_default().push(place);
        }
    }
    // How samples have a readable name without a module; `None` where in several ways.
    let mut shown_as: HashMap<(i64, i64), Option<TypeNameIds>> = HashMap::new();
    for (pid, names) in places.keys().filter(|(_, [_, _, module])| *module == 0) {
        shown_as.entry((*pid, names[0])).and_modify(|known| *known = None).or_insert(Some(*names));
    }
    let silent_locations = locations_of(profile, SILENT);
    let mut no_stack = None;
    let mut untold = 0_i64;
    // One that became another program by exec has a table of each, and the profile one process.
    let mut of_pids: BTreeMap<u32, Vec<&ExactProcess>> = BTreeMap::new();
    for process in &account.processes {
        of_pids.entry(process.pid).or_default().push(process);
    }
    // What a program allocated that is not counted has its samples alone to tell of it.
    of_pids.retain(|_, programs| programs.iter().all(|program| program.ending != Ending::Declined));
    for (pid, programs) in of_pids {
        let of_process = processes.get(&i64::from(pid)).copied();
        let last = programs.last().map_or("", |process| &process.name);
        let of_process = match (of_process, last) {
            (None, name) if !name.is_empty() => Some(strings.number(profile, name)),
            (known, _) => known,
        };
        let mut sums: BTreeMap<TypeName, ExactTotals> = BTreeMap::new();
        for process in &programs {
            for (name, made) in by_name(process, programs.len() > 1, &known) {
                sums.entry(name).or_default().add(made);
            }
        }
        let mut all: BTreeMap<TypeNameIds, ExactTotals> = BTreeMap::new();
        for (TypeName { shown, raw, module }, made) in sums {
            let names = [Some(shown), raw, module];
            let names =
                names.map(|name| name.map_or(0, |name| strings.number(profile, &clean(&name))));
            // A name that C# has a word for is told without the runtime's own by the library.
            let told = match (places.contains_key(&(i64::from(pid), names)), names) {
                (false, [shown, _, 0]) => shown_as.get(&(i64::from(pid), shown)).copied().flatten(),
                _ => None,
            };
            all.entry(told.unwrap_or(names)).or_default().add(made);
        }
        let in_account: HashSet<TypeNameIds> = all.keys().copied().collect();
        for ((_, of), found) in places.iter().filter(|((of, _), _)| *of == i64::from(pid)) {
            let placeholder =
                [OTHER, UNKNOWN_TYPE].map(|name| strings.number(profile, name)).contains(&of[0]);
            // What the runtime has counted leaves out types whose objects were too few to be told
            // of.
            if in_account.contains(of) || sampling != EXACT && !placeholder {
                continue;
            }
            for place in found {
                let Some(sample) = profile.sample.get_mut(*place) else { continue };
                for (column, sum) in [(objects_at, Some(&mut untold)), (bytes_at, None)] {
                    if let Some(value) = sample.value.get_mut(column) {
                        if let Some(sum) = sum {
                            *sum = sum.saturating_add(*value);
                        }
                        *value = 0;
                    }
                }
            }
        }
        for (of, made) in all {
            let pid = i64::from(pid);
            let found = places.get(&(pid, of)).map_or(&[][..], Vec::as_slice);
            let is_silent = |place: &usize| {
                made.unseen.objects > 0 && is_made_by(profile, *place, &silent_locations)
            };
            let (silent, others): (Vec<usize>, Vec<usize>) =
                found.iter().copied().partition(is_silent);
            let (told, none) = (made.all.less(made.unseen), ExactCount::default());
            // Those who call the helper are told of too seldom to matter beside others, so what was
            // told of is the others'. And nobody knows whose the unseen ones are where no such
            // stack was sampled.
            let (of_silent, of_others, stackless) = match (&*silent, &*others) {
                ([], []) => (none, none, made.all),
                ([], _) => (none, told, made.unseen),
                (_, []) => (made.all, none, none),
                _ => (made.unseen, told, none),
            };
            if stackless.objects > 0 {
                let location = *no_stack.get_or_insert_with(|| add_location(profile, strings));
                let mut value = vec![0; profile.sample_type.len()];
                for (at, amount) in [(objects_at, stackless.objects), (bytes_at, stackless.bytes)] {
                    if let Some(value) = value.get_mut(at) {
                        *value = i64::try_from(amount).unwrap_or(i64::MAX);
                    }
                }
                let mut label = vec![Label { key: pid_key, num: pid, ..Label::default() }];
                let texts = name_keys.into_iter().zip(of).chain([(sampling_key, exact)]);
                let texts = texts.chain(of_process.map(|name| (process_key, name)));
                label.extend(texts.filter(|(_, text)| *text != 0).map(|(key, str)| Label {
                    key,
                    str,
                    ..Label::default()
                }));
                profile.sample.push(Sample { location_id: vec![location], value, label });
            }
            if found.is_empty() {
                continue;
            }
            let value = |profile: &Profile, place: usize, column: usize| {
                profile
                    .sample
                    .get(place)
                    .and_then(|sample| sample.value.get(column))
                    .copied()
                    .unwrap_or(0)
            };
            // Large objects are told of one by one: counts that may lack the last ones of a type
            // add nothing.
            let is_told = |place: &usize| {
                let labels = profile.sample.get(*place).map_or(&[][..], |sample| &sample.label);
                labels.iter().any(|label| label.key == sampling_key && label.str == one_by_one)
            };
            let known = found
                .iter()
                .fold(0i64, |sum, place| sum.saturating_add(value(profile, *place, objects_at)));
            if sampling != EXACT
                && found.iter().all(is_told)
                && known.max(0).unsigned_abs() >= made.all.objects
            {
                continue;
            }
            for (total, places) in [(of_others, &others), (of_silent, &silent)] {
                for (column, total) in [(objects_at, total.objects), (bytes_at, total.bytes)] {
                    let weight = |place: &usize| value(profile, *place, column);
                    let weights: Vec<i64> = places.iter().map(weight).collect();
                    for (place, part) in places.iter().zip(split(total, &weights)) {
                        let sample = profile.sample.get_mut(*place);
                        if let Some(value) = sample.and_then(|sample| sample.value.get_mut(column))
                        {
                            *value = part;
                        }
                    }
                }
            }
            for place in found {
                let Some(sample) = profile.sample.get_mut(*place) else { continue };
                // That of the estimate.
                sample.label.retain(|label| label.key != stderr_key);
                let labels = sample.label.iter_mut();
                labels
                    .filter(|label| label.key == sampling_key)
                    .for_each(|label| label.str = exact);
            }
        }
    }
    say_untold(profile, strings, untold);
}

/// The sums of a process by what its samples call the types; a type of which there is none has its
/// module where another one has its name. Where the process was several programs, ClassIDs of one
/// may be the other's: then the names must be the same.
fn by_name(
    process: &ExactProcess,
    one_of_several: bool,
    known: impl Fn(u32, u64) -> Option<TypeName>,
) -> impl IntoIterator<Item = (TypeName, ExactTotals)> {
    fn system_name(of: &ExactType) -> &str {
        of.type_raw.as_deref().unwrap_or(&of.name)
    }
    let ambiguous = types::ambiguous(process.types.iter().map(|of| (system_name(of), &of.module)));
    let mut sums: BTreeMap<TypeName, ExactTotals> = BTreeMap::new();
    for of in &process.types {
        let is_same = |name: &TypeName| {
            let raw = name.raw.as_ref().unwrap_or(&name.shown);
            !one_of_several || raw.as_ref() == system_name(of) || name.shown.as_ref() == of.name
        };
        let name = known(process.pid, of.class).filter(is_same).unwrap_or_else(|| TypeName {
            shown: of.name.as_str().into(),
            raw: of.type_raw.as_deref().map(Into::into),
            module: ambiguous.contains(system_name(of)).then(|| of.module.as_str().into()),
        });
        sums.entry(name).or_default().add(ExactTotals::of(of));
    }
    sums
}

/// The comment of [`merge`].
fn say_untold(profile: &mut Profile, strings: &mut Strings, objects: i64) {
    if objects > 0 {
        let text = format!(
            "about {objects} objects were sampled without a type of their own; they are counted \
             under their types at `{NO_STACK}`"
        );
        let comment = strings.number(profile, &text);
        profile.comment.push(comment);
    }
}

fn add_location(profile: &mut Profile, strings: &mut Strings) -> u64 {
    let name = strings.number(profile, NO_STACK);
    let function = profile.function.iter().map(|function| function.id).max().unwrap_or(0) + 1;
    let location = profile.location.iter().map(|location| location.id).max().unwrap_or(0) + 1;
    profile.function.push(Function {
        id: function,
        name,
        system_name: name,
        ..Function::default()
    });
    let line = vec![Line { function_id: function, ..Line::default() }];
    profile.location.push(Location { id: location, line, ..Location::default() });
    location
}

/// Tells modules of one file name apart, by the numbers that `contexts` has for those of a process
/// already, and on from there.
pub fn number_modules(account: &mut ExactAccount, contexts: impl Fn(u32) -> ModuleLabels) {
    for process in &mut account.processes {
        let mut contexts = contexts(process.pid);
        for of in process.types.iter_mut().filter(|of| !of.module.is_empty()) {
            of.module = contexts.label(&of.module, of.module_id).to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNTED, EXACT, NO_STACK, SILENT, merge, number_modules, split};
    use crate::exact_summary::lines;
    use crate::stacks::ProfileStacks;
    use perfusion_dotnet::exact::{Ending, ExactAccount, ExactCount, ExactProcess, ExactType};
    use perfusion_pprof::proto::{Function, Label, Line, Location, Profile, Sample, ValueType};
    use perfusion_pprof::tells_of_uncounted;
    use perfusion_symbolize::types::{ModuleLabels, TypeName};
    use proptest::prelude::{Strategy as _, any, prop, prop_assert, prop_assert_eq, proptest};

    proptest! {
        #[test]
        fn parts_add_up_to_the_whole(
            total in any::<u64>().prop_map(|n| n >> 1),
            weights in prop::collection::vec(0..=i64::MAX, 1..50),
            smaller in 0..63u32,
        ) {
            let weights: Vec<i64> = weights.into_iter().map(|weight| weight >> smaller).collect();
            let parts = split(total, &weights);
            let sum: i128 = parts.iter().map(|&part| i128::from(part)).sum();
            let any = weights.iter().any(|&weight| weight > 0);
            prop_assert_eq!(sum, if any { i128::from(total) } else { 0 });
            let mut all = parts.iter().zip(&weights);
            prop_assert!(all.all(|(&part, &weight)| weight > 0 || part == 0));
        }
    }

    #[test]
    fn modules_of_one_file_name_have_the_numbers_that_samples_have() {
        let of =
            |module_id| ExactType { module: "m.dll".to_owned(), module_id, ..ExactType::default() };
        let process =
            ExactProcess { pid: 1, types: vec![of(0x100), of(0x200)], ..ExactProcess::default() };
        let mut account = ExactAccount { processes: vec![process], ..ExactAccount::default() };
        // The second one was met first where samples were named.
        number_modules(&mut account, |_| {
            let mut contexts = ModuleLabels::default();
            contexts.label("m.dll", 0x200);
            contexts
        });
        let modules: Vec<_> =
            account.processes[0].types.iter().map(|of| of.module.as_str()).collect();
        assert_eq!(modules, ["m.dll#2", "m.dll"]);
    }

    #[test]
    fn counts_that_may_lack_the_last_objects_replace_no_exact_ones() {
        let strings = [
            "",
            "alloc_objects",
            "alloc_space",
            "type",
            "pid",
            "sampling",
            "exact",
            "A",
            "B",
            "cpu",
        ];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = |of| Sample {
            value: vec![0, 10, 1_000_000],
            label: vec![label(4, 0, 9), label(3, of, 0), label(5, 6, 0)],
            ..Sample::default()
        };
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [9, 1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            sample: vec![sample(7), sample(8)],
            ..Profile::default()
        };
        // Of the second type there are small ones, too, of which none was sampled.
        let counted =
            [("A", 9, 900_000), ("B", 500, 1_010_000)].map(|(name, objects, bytes)| ExactType {
                name: name.to_owned(),
                allocated: ExactCount { objects, bytes },
                ..ExactType::default()
            });
        let account = ExactAccount {
            processes: vec![ExactProcess {
                pid: 9,
                types: counted.to_vec(),
                ..ExactProcess::default()
            }],
            ..ExactAccount::default()
        };
        merge(&mut profile, &account, COUNTED, |_, _| None);
        let values: Vec<&[i64]> = profile.sample.iter().map(|sample| &sample.value[1..]).collect();
        assert_eq!(values, [&[10, 1_000_000][..], &[500, 1_010_000]]);
        let stacks = ProfileStacks::new(&profile);
        let of: Vec<_> = stacks.samples().map(|sample| stacks.label(sample, "sampling")).collect();
        assert_eq!(of, [Some(EXACT), Some(COUNTED)]);
    }

    #[test]
    fn what_was_not_counted_keeps_what_its_samples_tell() {
        let strings =
            ["", "alloc_objects", "alloc_space", "type", "pid", "sampling", "random", "A"];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = Sample {
            value: vec![10, 1_000_000],
            label: vec![label(4, 0, 9), label(3, 7, 0), label(5, 6, 0)],
            ..Sample::default()
        };
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            sample: vec![sample],
            ..Profile::default()
        };
        let declined = ExactProcess { pid: 9, ending: Ending::Declined, ..ExactProcess::default() };
        let account = ExactAccount { processes: vec![declined], ..ExactAccount::default() };
        merge(&mut profile, &account, EXACT, |_, _| None);
        assert_eq!(profile.sample[0].value, [10, 1_000_000]);
        let lines = lines(&account);
        assert!(lines.len() == 1 && tells_of_uncounted(&lines[0]), "{lines:?}");
    }

    #[test]
    fn a_process_that_was_two_programs_has_the_sum_of_both() {
        let strings = [
            "",
            "alloc_objects",
            "alloc_space",
            "type",
            "pid",
            "sampling",
            "random",
            "A",
            "B",
            "C",
        ];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = |of| Sample {
            value: vec![10, 100],
            label: vec![label(4, 0, 9), label(3, of, 0), label(5, 6, 0)],
            ..Sample::default()
        };
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            sample: vec![sample(7), sample(8), sample(9)],
            ..Profile::default()
        };
        let of = |class, name: &str, objects| ExactType {
            class,
            name: name.to_owned(),
            allocated: ExactCount { objects, bytes: 10 * objects },
            ..ExactType::default()
        };
        let program = |types| ExactProcess { pid: 9, types, ..ExactProcess::default() };
        // The second program has C where the first had A.
        let programs = vec![
            program(vec![of(1, "A", 3), of(2, "B", 4)]),
            program(vec![of(1, "C", 5), of(3, "B", 6)]),
        ];
        let account = ExactAccount { processes: programs, ..ExactAccount::default() };
        let known = |_, class| {
            let name = match class {
                1 => "C",
                _ => "B",
            };
            Some(TypeName { shown: name.into(), raw: None, module: None })
        };
        merge(&mut profile, &account, EXACT, known);
        let values: Vec<&[i64]> = profile.sample.iter().map(|sample| &sample.value[..]).collect();
        assert_eq!(values, [[3, 30], [10, 100], [5, 50]]);
    }

    #[test]
    fn sampled_stacks_get_exact_values_and_types_without_a_sample_a_place() {
        let strings = [
            "",
            "alloc_objects",
            "alloc_space",
            "type",
            "pid",
            "sampling",
            "random",
            "A",
            "cpu",
            "[other]",
        ];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = |objects, bytes| Sample {
            value: vec![0, objects, bytes],
            label: vec![label(4, 0, 9), label(3, 7, 0), label(5, 6, 0)],
            ..Sample::default()
        };
        let mut untold = sample(5, 50);
        untold.label[1].str = 9;
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [8, 1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            // The last one is of objects alive.
            sample: vec![sample(10, 100), sample(30, 300), sample(0, 0), untold],
            ..Profile::default()
        };
        let of = |name: &str, objects, bytes| ExactType {
            name: name.to_owned(),
            allocated: ExactCount { objects, bytes },
            ..ExactType::default()
        };
        let types = vec![of("A", 4, 1001), of("B", 7, 70)];
        let account = ExactAccount {
            processes: vec![ExactProcess {
                pid: 9,
                name: "shop".to_owned(),
                types,
                ..ExactProcess::default()
            }],
            ..ExactAccount::default()
        };
        merge(&mut profile, &account, EXACT, |_, _| None);
        let values: Vec<&[i64]> = profile.sample.iter().map(|sample| &sample.value[1..]).collect();
        assert_eq!(values, [&[1, 250][..], &[3, 751], &[0, 0], &[0, 0], &[7, 70]]);
        assert!(profile.string_table.iter().any(|text| text.starts_with("about 5 objects")));
        let stacks = ProfileStacks::new(&profile);
        let of: Vec<_> = stacks.samples().map(|sample| stacks.label(sample, "sampling")).collect();
        assert_eq!(of, [Some(EXACT), Some(EXACT), Some("random"), Some("random"), Some(EXACT)]);
        let last = profile.sample.last().unwrap();
        assert_eq!(stacks.label(last, "process"), Some("shop"));
        assert_eq!(stacks.frames(last).map(|frame| &*frame.name).collect::<Vec<_>>(), [NO_STACK]);
    }

    #[test]
    fn objects_that_nobody_was_told_of_go_to_stacks_of_their_makers() {
        let strings =
            ["", "alloc_objects", "alloc_space", "type", "pid", "A", "B", "Shop.Load", SILENT];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = |of, location| Sample {
            value: vec![10, 240],
            location_id: vec![location, 1],
            label: vec![label(4, 0, 9), label(3, of, 0)],
        };
        let function = |id, name| Function { id, name, ..Function::default() };
        let location = |id| Location {
            id,
            line: vec![Line { function_id: id, ..Line::default() }],
            ..Location::default()
        };
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            sample: vec![sample(5, 1), sample(5, 2), sample(6, 1)],
            location: vec![location(1), location(2)],
            function: vec![function(1, 7), function(2, 8)],
            ..Profile::default()
        };
        let of = |name: &str, objects, unseen| ExactType {
            name: name.to_owned(),
            allocated: ExactCount { objects, bytes: objects * 24 },
            unseen,
            ..ExactType::default()
        };
        let types = vec![of("A", 1020, 1000), of("B", 7, 3)];
        let account = ExactAccount {
            processes: vec![ExactProcess { pid: 9, types, ..ExactProcess::default() }],
            ..ExactAccount::default()
        };
        merge(&mut profile, &account, EXACT, |_, _| None);
        let values: Vec<&[i64]> = profile.sample.iter().map(|sample| &sample.value[..]).collect();
        assert_eq!(values, [[20, 480], [1000, 24000], [4, 96], [3, 72]]);
        let stacks = ProfileStacks::new(&profile);
        let last = profile.sample.last().unwrap();
        assert_eq!(stacks.label(last, "type"), Some("B"));
        assert_eq!(stacks.frames(last).map(|frame| &*frame.name).collect::<Vec<_>>(), [NO_STACK]);
    }

    #[test]
    fn types_of_one_name_get_their_own_values() {
        let strings = [
            "",
            "alloc_objects",
            "alloc_space",
            "type",
            "pid",
            "type_module",
            "type_raw",
            "A",
            "m.dll",
            "m.dll#2",
            "A.<>c",
        ];
        let label = |key, str, num| Label { key, str, num, ..Label::default() };
        let sample = |more: Label| Sample {
            value: vec![10, 100],
            label: vec![label(4, 0, 9), label(3, 7, 0), more],
            ..Sample::default()
        };
        let mut profile = Profile {
            string_table: strings.map(str::to_owned).to_vec(),
            sample_type: [1, 2].map(|r#type| ValueType { r#type, unit: 0 }).to_vec(),
            sample: vec![sample(label(5, 8, 0)), sample(label(5, 9, 0)), sample(label(6, 10, 0))],
            ..Profile::default()
        };
        let of = |class, module: &str, raw: Option<&str>, objects| ExactType {
            name: "A".to_owned(),
            type_raw: raw.map(str::to_owned),
            module: module.to_owned(),
            class,
            allocated: ExactCount { objects, bytes: objects * 24 },
            ..ExactType::default()
        };
        let types = vec![
            of(1, "m.dll", None, 3),
            of(2, "m.dll#2", None, 4),
            of(3, "m.dll#3", None, 5),
            of(4, "m.dll", Some("A.<>c"), 6),
        ];
        let account = ExactAccount {
            processes: vec![ExactProcess { pid: 9, types, ..ExactProcess::default() }],
            ..ExactAccount::default()
        };
        // Of the third no sample was taken, and its name is not known where they are.
        let known = |_, class: u64| {
            let module = ["m.dll", "m.dll#2"].get(usize::try_from(class).unwrap() - 1)?;
            Some(TypeName { shown: "A".into(), raw: None, module: Some((*module).into()) })
        };
        merge(&mut profile, &account, EXACT, known);
        let objects: Vec<i64> = profile.sample.iter().map(|sample| sample.value[0]).collect();
        assert_eq!(objects, [3, 4, 6, 5]);
        let stacks = ProfileStacks::new(&profile);
        let last = profile.sample.last().unwrap();
        assert_eq!(
            [stacks.label(last, "type"), stacks.label(last, "type_module")],
            [Some("A"), Some("m.dll#3")]
        );
    }
}
