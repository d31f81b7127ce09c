//! The table of types: what was allocated or is alive of each, and how sure that is
//! (`aggregate::interval`). Estimates of a type are sums over the profile's samples, each of which
//! stands for alike objects: one stack, one size class, one age, one generation.

use super::stacks::ProfileStacks;
use super::top::{NO_DURATION, TableOptions, fit};
use crate::exact_merge::{COUNTED, EXACT};
use perfusion_aggregate::heap::{SAMPLED_BYTE_PROBABILITY, has_survived};
use perfusion_aggregate::interval::Estimate;
use perfusion_model::labels::{SampleType, Sampling, UNKNOWN_TYPE};
use perfusion_model::text::clean;
use perfusion_model::units::{counted, grouped, human, percent};
use perfusion_pprof::loss;
use perfusion_pprof::proto::{Profile, Sample};
use perfusion_pprof::tells_of_uncounted;
use std::collections::HashMap;
use std::fmt::Write;

/// What is said in place of `counted` where a part is estimated.
const IN_PART: &str = "counted in part";
/// What is said in place of `exact` where records were dropped.
const AT_LEAST: &str = "at least";

/// A type's name, and its module where its process has another type of that name.
type ShownTypeName<'a> = (&'a str, Option<&'a str>);

/// One type's sums.
#[derive(Default)]
struct TypeSums {
    seen: i64,
    objects: Estimate,
    bytes: Estimate,
    seen_bytes: f64,
    /// A part of it has no interval: sampled by a fixed stride, or the number of samples was lost.
    unsure: bool,
    /// A part of it was not sampled but counted by the runtime.
    counted: bool,
    /// A part of it was sampled: of a process that was not counted, say.
    sampled: bool,
    oldest: i64,
    young: [f64; 2],
    left_out: bool,
    /// The `unwatched` of its samples that is most.
    unwatched: i64,
}

/// What is known of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct TypeRow {
    /// Its name, and in brackets its module, where there is another type of that name.
    pub name: String,
    /// Objects of it that were seen.
    pub seen: i64,
    /// All of them.
    pub objects: Estimate,
    /// Their bytes.
    pub bytes: Estimate,
    /// Bytes that were seen themselves.
    pub seen_bytes: f64,
    /// False where the runtime sampled by a fixed stride: then the variances mean nothing.
    pub has_interval: bool,
    /// Where it was not sampled but counted: `exact`, `counted` where the last objects of a type
    /// were not told of, or `counted in part` where a part was sampled.
    pub counted: Option<&'static str>,
    /// Oldest age, rounded down to a power of two, seconds; 0 for allocations.
    pub oldest_seconds: i64,
    /// Objects and bytes that count as alive and that no collection is known to have looked at.
    pub young: [f64; 2],
    /// Chance left out some that were like its objects, perhaps its own.
    pub left_out: bool,
    /// Large objects of a process that has some of it are not watched: so many, of whatever types.
    pub unwatched: i64,
}

/// True for a sample type that [`rows`] and [`table`] know, of a profile that has what they need:
/// our labels, and both columns.
#[must_use]
pub fn is_known(stacks: &ProfileStacks<'_>, sample_type: &str) -> bool {
    let has = |column: SampleType| stacks.sample_type(column.name()).is_ok();
    stacks.is_ours() && columns(sample_type).is_some_and(|columns| columns.into_iter().all(has))
}

fn columns(sample_type: &str) -> Option<[SampleType; 2]> {
    let pairs = [
        [SampleType::AllocObjects, SampleType::AllocSpace],
        [SampleType::InuseObjects, SampleType::InuseSpace],
    ];
    pairs.into_iter().find(|pair| pair.iter().any(|column| column.name() == sample_type))
}

/// All types of the pair of columns that `sample_type` belongs to, most bytes first, or most
/// objects when that was asked for.
#[must_use]
pub fn rows(profile: &Profile, sample_type: &str, options: &TableOptions) -> Vec<TypeRow> {
    let stacks = ProfileStacks::new(profile);
    let Some(columns) = columns(sample_type) else { return Vec::new() };
    let [Ok(objects_at), Ok(bytes_at)] = columns.map(|column| stacks.sample_type(column.name()))
    else {
        return Vec::new();
    };
    let mut types: HashMap<ShownTypeName<'_>, TypeSums> = HashMap::new();
    for sample in stacks.samples() {
        let value = |at: usize| sample.value.get(at).copied().unwrap_or(0);
        let (objects, bytes) = (value(objects_at), value(bytes_at));
        if objects == 0 && bytes == 0 || !stacks.is_asked(sample, &options.view.only) {
            continue;
        }
        add(&mut types, &stacks, sample, (objects as f64, bytes as f64));
    }
    let mut rows: Vec<TypeRow> = types.into_iter().map(|(name, of)| row(name, &of)).collect();
    let by_objects = sample_type == columns[0].name();
    let rank = |row: &TypeRow| if by_objects { row.objects.value } else { row.bytes.value };
    rows.sort_by(|a, b| rank(b).total_cmp(&rank(a)).then_with(|| a.name.cmp(&b.name)));
    rows
}

fn add<'a>(
    types: &mut HashMap<ShownTypeName<'a>, TypeSums>,
    stacks: &ProfileStacks<'a>,
    sample: &Sample,
    (objects, bytes): (f64, f64),
) {
    let name =
        (stacks.label(sample, "type").unwrap_or(UNKNOWN_TYPE), stacks.label(sample, "type_module"));
    let of = types.entry(name).or_default();
    let number = |key| stacks.number(sample, key);
    let seen = number("sampled_objects").filter(|&seen| seen > 0);
    let sampling = stacks.label(sample, "sampling");
    let exact = sampling == Some(EXACT);
    of.counted |= sampling == Some(COUNTED);
    of.sampled |= !exact && sampling != Some(COUNTED);
    of.unsure |= !exact && (seen.is_none() || sampling != Some(Sampling::Random.name()));
    of.oldest = of.oldest.max(number("age_seconds").unwrap_or(0));
    // Other profilers' profiles do not say.
    if let (Some(generation), Some(survived)) = (number("generation"), number("gcs_survived"))
        && !has_survived(generation, survived)
    {
        of.young = [of.young[0] + objects, of.young[1] + bytes];
    }
    let (seen, positive) = (seen.unwrap_or(0), |key| number(key).filter(|&number| number > 0));
    of.seen = of.seen.saturating_add(seen);
    let seen = seen as f64;
    let (of_objects, of_bytes) = match number("space_stderr").filter(|_| bytes > 0.0) {
        Some(stderr) => {
            // Alike objects: both are off by the same share. Numbers of objects are rounded to
            // whole ones, and one of 300 KB, which stands for 1.06, is there as 1 or 2: bytes tell
            // better what it is.
            let variance = (stderr as f64).powi(2);
            let alike = positive("sampled_bytes").map_or(objects, |sampled| {
                (bytes / sampled as f64 * seen).clamp(objects - 1.0, objects + 1.0)
            });
            (
                Estimate {
                    value: objects,
                    variance: variance * (alike / bytes).powi(2),
                    seen,
                    missed: 0.0,
                },
                Estimate { value: bytes, variance, seen, missed: 0.0 },
            )
        }
        // Exact mode knows the sum, and has seen a part of the stacks.
        None if exact => {
            (Estimate::of_alike(objects, seen, seen), Estimate::of_alike(bytes, seen, seen))
        }
        None => {
            (Estimate::of_alike(objects, seen, objects), Estimate::of_alike(bytes, seen, objects))
        }
    };
    of.left_out |= number("told_one_in").is_some();
    of.unwatched = of.unwatched.max(number("unwatched").unwrap_or(0));
    let (missed_objects, missed_bytes) = match (number("told_one_in"), positive("sampled_bytes")) {
        (Some(one_in), Some(sampled)) if seen > 0.0 => {
            let size = sampled as f64 / seen;
            let objects = one_in as f64 / -(-size * SAMPLED_BYTE_PROBABILITY).exp_m1();
            (objects, objects * size)
        }
        _ => (0.0, 0.0),
    };
    of.objects.add(Estimate { missed: missed_objects, ..of_objects });
    of.bytes.add(Estimate { missed: missed_bytes, ..of_bytes });
    let share = if objects > 0.0 { (seen / objects).min(1.0) } else { 0.0 };
    of.seen_bytes += positive("sampled_bytes").map_or(bytes * share, |bytes| bytes as f64);
}

fn row((name, module): ShownTypeName<'_>, of: &TypeSums) -> TypeRow {
    let name = clean(name);
    TypeRow {
        name: match module {
            Some(module) => format!("{name} ({})", clean(module)),
            None => name.into_owned(),
        },
        seen: of.seen,
        objects: of.objects,
        bytes: of.bytes,
        seen_bytes: of.seen_bytes,
        has_interval: !of.unsure,
        counted: match (of.counted, of.sampled) {
            (true, true) => Some(IN_PART),
            (true, false) => Some(COUNTED),
            (false, false) => Some(EXACT),
            (false, true) => None,
        },
        oldest_seconds: of.oldest,
        young: of.young,
        left_out: of.left_out,
        unwatched: of.unwatched,
    }
}

/// The table, with a heading and, where something has no interval, a line that says why.
#[must_use]
pub fn table(profile: &Profile, sample_type: &str, options: &TableOptions) -> String {
    let all = rows(profile, sample_type, options);
    let alive = columns(sample_type) == columns(SampleType::InuseSpace.name());
    let by_objects = columns(sample_type).is_some_and(|[objects, _]| objects.name() == sample_type);
    let seconds = Some(profile.duration_nanos as f64 / 1e9).filter(|&seconds| seconds > 0.0);
    let total: f64 =
        all.iter().map(|row| if by_objects { row.objects.value } else { row.bytes.value }).sum();
    let unit = if by_objects { "count" } else { "bytes" };
    let (bold, dim, plain) =
        if options.colour { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    // Lines of losses are of the whole recording: whose objects they were is not known.
    let stacks = ProfileStacks::new(profile);
    let lost =
        stacks.losses().fold(TableLosses::default(), |sum, line| sum.and(TableLosses::of(&line)));
    let uncounted = stacks.comments().any(|comment| tells_of_uncounted(&comment));
    let lost = TableLosses { uncounted, ..lost }.of_column(alive);
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{content}").unwrap_or_default();
    let shown = all.len().min(options.limit);
    line(format!(
        "{bold}{sample_type} by type{plain}: total {}, {shown} of {} types",
        human(round(total), unit),
        all.len()
    ));
    line(format!(
        "{dim}{:>10} {:>6}  {:<22} {:>12}  {:<25} {:>8} {:>10}  type{plain}",
        "bytes",
        "",
        "95 % interval",
        "objects",
        "95 % interval",
        "sampled",
        if alive { "oldest" } else { "per second" },
    ));
    for row in all.iter().take(options.limit) {
        let span = |estimate: Estimate, at_least: f64, unit: &str| {
            let interval = estimate.interval95(at_least);
            format!("{} … {}", human(round(interval.low), unit), human(round(interval.high), unit))
        };
        let (bytes, objects) = match (row.counted, row.has_interval) {
            (Some(COUNTED), _) if lost.uncounted => (AT_LEAST.to_owned(), AT_LEAST.to_owned()),
            (Some(EXACT), _)
                if lost.uncounted
                    || (row.left_out || row.unwatched > 0 || lost.any()) && is_of_records(row) =>
            {
                (AT_LEAST.to_owned(), AT_LEAST.to_owned())
            }
            (Some(counted), _) => (counted.to_owned(), counted.to_owned()),
            (None, true) => (
                span(row.bytes, row.seen_bytes, "bytes"),
                span(row.objects, row.seen as f64, "count"),
            ),
            (None, false) => ("not known".to_owned(), "not known".to_owned()),
        };
        let value = if by_objects { row.objects.value } else { row.bytes.value };
        let numbers = format!(
            "{:>10} {:>6}  {bytes:<22} {:>12}  {objects:<25} {:>8} {:>10}  ",
            human(round(row.bytes.value), "bytes"),
            percent(round(value), round(total)),
            grouped(round(row.objects.value)),
            grouped(row.seen),
            match seconds {
                _ if alive => age(row.oldest_seconds),
                Some(seconds) => human(round(value / seconds), unit),
                None => "?".to_owned(),
            },
        );
        let room = options.width.map(|width| width.saturating_sub(numbers.chars().count()));
        line(format!("{numbers}{}", fit(&row.name, "", room).0));
    }
    if seconds.is_none() && !alive {
        line(format!("{dim}?: {NO_DURATION}{plain}"));
    }
    let young = all
        .iter()
        .fold([0.0; 2], |[objects, bytes], row| [objects + row.young[0], bytes + row.young[1]]);
    if young.iter().any(|value| *value > 0.0) {
        line(format!(
            "{dim}{} of it, {}, not known to have been through a collection: until one has looked, \
             what is dead counts as alive{plain}",
            human(round(young[1]), "bytes"),
            counted(round(young[0]), "object"),
        ));
    }
    let at_least = |row: &TypeRow| row.counted == Some(EXACT) && is_of_records(row);
    if lost.dropped > 0 && all.iter().take(options.limit).any(at_least) {
        line(format!(
            "{dim}at least: {} more found no room in the ring; of which types is not known{plain}",
            counted(lost.dropped, "allocation"),
        ));
    }
    if lost.unread > 0 && all.iter().take(options.limit).any(at_least) {
        line(format!(
            "{dim}at least: {} of what a runtime's library told could not be read, or did not \
             arrive; whether it was about objects is not known{plain}",
            counted(lost.unread, "piece"),
        ));
    }
    if lost.downsampled > 0 && all.iter().take(options.limit).any(at_least) {
        line(format!(
            "{dim}at least: chance left out {} when many came at once; of which types is not \
             known{plain}",
            counted(lost.downsampled, "large object"),
        ));
    } else if all.iter().take(options.limit).any(|row| row.left_out && at_least(row)) {
        line(format!(
            "{dim}at least: of large objects that were made earlier, when many came at once, \
             chance left out some{plain}"
        ));
    }
    // Those of this window are among them.
    let unwatched =
        all.iter().take(options.limit).filter(|row| at_least(row)).map(|row| row.unwatched).max();
    let unwatched = unwatched.unwrap_or(0).max(i64::try_from(lost.unwatched).unwrap_or(i64::MAX));
    if unwatched > 0 && all.iter().take(options.limit).any(at_least) {
        line(format!(
            "{dim}at least: {} not watched, for want of a weak handle or of room; of which types \
             is not known{plain}",
            match unwatched {
                1 => "1 object is".to_owned(),
                number => format!("{} are", counted(number, "object")),
            },
        ));
    }
    if lost.uncounted && all.iter().take(options.limit).any(|row| row.counted == Some(EXACT)) {
        line(format!(
            "{dim}at least: exact mode has not counted all; what is missing says `report \
             --exact`{plain}"
        ));
    }
    if lost.silent > 0 {
        line(format!(
            "{dim}a runtime was not listened to {}, for the recorder got no CPU: what was \
             allocated meanwhile is missing, and what was alive before is no longer watched{plain}",
            counted(lost.silent, "time"),
        ));
    }
    if lost.uncounted && all.iter().take(options.limit).any(|row| row.counted == Some(COUNTED)) {
        line(format!(
            "{dim}at least: not all that the runtime has counted was heard of; the profile's \
             comments that begin with `counts:` say what is missing{plain}"
        ));
    }
    if all.iter().take(options.limit).any(|row| row.counted == Some(IN_PART)) {
        line(format!(
            "{dim}counted in part: the rest is estimated, of processes that were not counted (the \
             profile's comments that begin with `counts:`), and has no interval here: --only \
             process=… or pid=…{plain}"
        ));
    }
    if all.iter().take(options.limit).any(|row| row.counted.is_some_and(|how| how != EXACT)) {
        line(format!(
            "{dim}counted: by the runtime; of each type the last objects of each thread that made \
             some, up to 999 for each thread of the runtime, and on .NET 10 most of what is boxed, \
             are not in it; see docs/alloc-counts.md{plain}"
        ));
    }
    if all.iter().take(options.limit).any(|row| !row.has_interval && row.counted.is_none()) {
        line(format!(
            "{dim}not known: of small and pinned objects .NET 6 to 9 tell of one per 100 KiB at a \
             fixed stride, for which no interval exists; see docs/allocations.md{plain}"
        ));
    }
    text
}

/// True of objects that were told of one by one; exact mode sees a part of what it counts.
fn is_of_records(row: &TypeRow) -> bool {
    row.seen >= round(row.objects.value)
}

/// What the table is without, by the loss line (`perfusion_pprof::loss`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TableLosses {
    /// Allocations that found the ring full.
    dropped: u64,
    /// What was told and could not be read, or is nowhere.
    unread: u64,
    /// Times a runtime told nothing for a while.
    silent: u64,
    /// Large objects that chance left out.
    downsampled: u64,
    /// Objects that are not watched for want of a handle or of room: of those that are alive.
    unwatched: u64,
    /// Exact mode has not counted all.
    uncounted: bool,
}

impl TableLosses {
    fn of(line: &str) -> Self {
        let number = |name| loss::number(line, name);
        let [dropped, unaccounted] = loss::allocations(line);
        Self {
            dropped,
            unread: loss::UNREAD.into_iter().map(number).fold(unaccounted, u64::saturating_add),
            silent: number(loss::LEASES_LOST),
            downsampled: number(loss::LARGE_DOWNSAMPLED),
            unwatched: loss::UNWATCHED.into_iter().map(number).fold(0, u64::saturating_add),
            uncounted: false,
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            dropped: self.dropped.saturating_add(other.dropped),
            unread: self.unread.saturating_add(other.unread),
            silent: self.silent.saturating_add(other.silent),
            downsampled: self.downsampled.saturating_add(other.downsampled),
            unwatched: self.unwatched.saturating_add(other.unwatched),
            uncounted: self.uncounted || other.uncounted,
        }
    }

    /// What matters to objects that are alive, or to all that were allocated.
    fn of_column(self, alive: bool) -> Self {
        match alive {
            true => Self { uncounted: false, ..self },
            false => Self { unwatched: 0, ..self },
        }
    }

    fn any(self) -> bool {
        self != Self::default()
    }
}

/// An age of which only the power of two below it is known.
fn age(seconds: i64) -> String {
    match seconds {
        0 => "< 1 s".to_owned(),
        _ => format!("≥ {seconds} s"),
    }
}

fn round(value: f64) -> i64 {
    value.round() as i64
}

#[cfg(test)]
mod tests {
    use super::{TableOptions, rows, table};
    use crate::exact_summary as summary;
    use perfusion_aggregate::heap::{Weight, weight};
    use perfusion_aggregate::window::{Window, WindowLimits};
    use perfusion_dotnet::exact::{Ending, ExactAccount, ExactProcess};
    use perfusion_host::process::ProcessTable;
    use perfusion_model::event::AllocationKind;
    use perfusion_model::frame::FrameKey;
    use perfusion_model::labels::{Labels, SampleType, Sampling};
    use perfusion_pprof::loss;
    use perfusion_pprof::{self, ProfileInfo};
    use perfusion_symbolize::Symbolizer;
    use std::time::{Duration, SystemTime};

    /// A profile with a stack for each of these samples of one type, allocated.
    fn profile(samples: &[Weight]) -> perfusion_pprof::proto::Profile {
        let samples: Vec<_> = samples.iter().map(|weight| (*weight, None)).collect();
        of_fates(&samples)
    }

    /// The same of samples that are alive, in a generation and through so many collections, where
    /// these are told. What stands for itself is exact.
    fn of_fates(samples: &[(Weight, Option<(u8, u64)>)]) -> perfusion_pprof::proto::Profile {
        let mut window = Window::new(WindowLimits::default());
        for (address, (weight, alive)) in (1..).zip(samples) {
            let labels = Labels {
                generation: alive.map(|(generation, _)| generation),
                survived: alive.map(|(_, survived)| survived),
                type_name: Some("Huge".into()),
                sampling: Some(if weight.objects > 1.0 {
                    Sampling::Random
                } else {
                    Sampling::Exact
                }),
                sampled_objects: Some(weight.seen),
                sampled_bytes: Some(weight.seen_bytes),
                space_stderr: (weight.objects > 1.0)
                    .then_some(weight.variance.sqrt().round() as u64),
                ..Labels::default()
            };
            let [objects, bytes] = match alive {
                Some(_) => [SampleType::InuseObjects, SampleType::InuseSpace],
                None => [SampleType::AllocObjects, SampleType::AllocSpace],
            };
            let values = [(objects, weight.objects), (bytes, weight.bytes)];
            window.add_all(&[FrameKey::Kernel(address)], &labels, &values);
        }
        let about = ProfileInfo {
            start: SystemTime::UNIX_EPOCH,
            duration: Duration::from_secs(1),
            period_ns: 1,
            main_image: None,
            comments: Vec::new(),
        };
        let encoded =
            perfusion_pprof::encode(&window, &Symbolizer::default(), &ProcessTable::new(), &about);
        perfusion_pprof::decode(&encoded.unwrap()).unwrap()
    }

    #[test]
    fn what_no_collection_has_looked_at_is_said_to_be_in_it() {
        let (small, large) =
            (weight(AllocationKind::Sampled, 24, 0), weight(AllocationKind::Sampled, 300_000, 0));
        let said = |samples: &[_], column| {
            let text = table(&of_fates(samples), column, &TableOptions::default());
            let found = text
                .lines()
                .find(|line| line.contains("not known to have been through a collection"));
            found.map(str::to_owned)
        };
        // Two small ones of 100 KiB each, dead or not, beside one that has survived; and a large
        // one that a collection may just look at.
        let alive = [
            (small, Some((0, 0))),
            (small, Some((0, 1))),
            (small, Some((1, 1))),
            (large, Some((3, 4))),
        ];
        for column in ["inuse_space", "inuse_objects"] {
            let line = said(&alive, column).unwrap();
            assert!(
                line.starts_with("200 KiB of it, 8,53") && line.contains(" objects, not known"),
                "{line}"
            );
        }
        assert!(said(&[(large, Some((3, 1)))], "inuse_space").is_some());
        assert_eq!(said(&alive[2..], "inuse_space"), None);
        assert_eq!(said(&[(small, None)], "alloc_space"), None);
    }

    #[test]
    fn large_objects_that_are_all_told_of_are_exact_and_beside_others_add_no_doubt() {
        let large = weight(AllocationKind::Exact, 300_000, 0);
        let exact = profile(&[large, large, large]);
        let shown = rows(&exact, "alloc_space", &TableOptions::default());
        let [row] = shown.as_slice() else { panic!("{shown:?}") };
        assert_eq!((row.counted, row.has_interval), (Some("exact"), true));
        let interval = row.bytes.interval95(row.seen_bytes);
        assert_eq!((interval.low, interval.high), (900_000.0, 900_000.0));
        let text = table(&exact, "alloc_space", &TableOptions::default());
        let cells: Vec<_> = text.lines().nth(2).unwrap().split_whitespace().collect();
        assert_eq!(cells[3..7], ["exact", "3", "exact", "3"], "{text}");
        // As many of them and a small one: the doubt is the small one's alone.
        let small = weight(AllocationKind::Sampled, 24, 0);
        let mixed =
            rows(&profile(&[large, large, large, small]), "alloc_space", &TableOptions::default());
        assert_eq!((mixed[0].counted, mixed[0].has_interval), (None, true));
        assert!((mixed[0].bytes.variance / small.variance - 1.0).abs() < 0.01, "{mixed:?}");
    }

    #[test]
    fn where_records_were_dropped_nothing_is_exact() {
        let large = weight(AllocationKind::Exact, 300_000, 0);
        let said = |counters: &[(&str, u64)]| {
            let counters: Vec<_> =
                counters.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
            let mut profile = profile(&[large, large]);
            profile.comment.push(profile.string_table.len() as i64);
            profile.string_table.push(format!(
                "{}{}",
                perfusion_pprof::LOSS_PREFIX,
                loss::line(&counters)
            ));
            table(&profile, "alloc_space", &TableOptions::default())
        };
        let whole = said(&[("shim_allocation_samples", 2), ("events_allocations", 2)]);
        assert!(whole.contains(" exact ") && !whole.contains("at least"), "{whole}");
        let dropped = [
            ("cpu_samples_ring_full", 3),
            ("shim_allocation_samples", 9),
            ("events_allocations", 2),
        ];
        let lossy = said(&[&dropped[..], &[("shim_allocations_dropped_full", 5)]].concat());
        assert!(!lossy.contains("exact") && lossy.contains(" at least  "), "{lossy}");
        assert!(lossy.contains("at least: 5 allocations more found no room"), "{lossy}");
        for unread in [("shim_allocation_samples", 3), ("shim_holes", 1)] {
            let mut counters = vec![("shim_allocation_samples", 2), ("events_allocations", 2)];
            counters.retain(|(name, _)| *name != unread.0);
            let text = said(&[&counters[..], &[unread]].concat());
            assert!(
                !text.contains(" exact ")
                    && text.contains("at least: 1 piece of what a runtime's library"),
                "{text}"
            );
        }
        let silent = said(&[
            ("shim_allocation_samples", 2),
            ("events_allocations", 2),
            ("shim_leases_lost", 1),
        ]);
        assert!(!silent.contains(" exact ") && silent.contains(" at least  "), "{silent}");
        assert!(silent.contains("a runtime was not listened to 1 time,"), "{silent}");
        let downsampled = said(&[
            ("shim_allocation_samples", 2),
            ("events_allocations", 2),
            (loss::LARGE_DOWNSAMPLED, 3),
        ]);
        assert!(
            !downsampled.contains(" exact ")
                && downsampled.contains("at least: chance left out 3 large objects"),
            "{downsampled}"
        );
    }

    #[test]
    fn what_is_alive_and_not_watched_and_what_exact_mode_has_lost_is_not_called_exact() {
        let large = weight(AllocationKind::Exact, 300_000, 0);
        let said = |alive: bool, comment: String| {
            let mut profile = of_fates(&[(large, alive.then_some((3, 4)))]);
            profile.comment.push(profile.string_table.len() as i64);
            profile.string_table.push(comment);
            let column = if alive { "inuse_space" } else { "alloc_space" };
            table(&profile, column, &TableOptions::default())
        };
        let refused = [("shim_handles_full".to_owned(), 1), ("shim_handles_refused".to_owned(), 2)];
        let refused = format!("{}{}", perfusion_pprof::LOSS_PREFIX, loss::line(&refused));
        let text = said(true, refused.clone());
        assert!(
            text.contains("at least: 3 objects are not watched") && !text.contains(" exact "),
            "{text}"
        );
        assert!(said(false, refused).contains(" exact "));
        let killed = ExactProcess { ending: Ending::Killed, ..ExactProcess::default() };
        let lines =
            summary::lines(&ExactAccount { processes: vec![killed], ..ExactAccount::default() });
        let text = said(false, lines[0].clone());
        assert!(
            text.contains("at least: exact mode has not counted all") && !text.contains("  exact "),
            "{text}"
        );
        assert!(said(true, lines[0].clone()).contains(" exact "));
    }

    #[test]
    fn few_large_objects_have_an_interval_although_values_are_whole_numbers() {
        const SIZE: f64 = 300_000.0;
        let one = weight(AllocationKind::Sampled, 300_000, 0);
        for seen in [1_u32, 2, 20] {
            let profile = profile(&vec![one; seen as usize]);
            let rows = rows(&profile, "alloc_space", &TableOptions::default());
            let [row] = rows.as_slice() else { panic!("{rows:?}") };
            let seen = f64::from(seen);
            // Each was told of with a probability of 0.95.
            let variance = seen * one.objects * (one.objects - 1.0);
            assert!((row.objects.variance / variance - 1.0).abs() < 0.4, "{row:?}, {variance}");
            assert!(
                (row.bytes.variance / (variance * SIZE * SIZE) - 1.0).abs() < 0.1,
                "{row:?}, {variance}"
            );
            assert!((row.objects.value - seen * one.objects).abs() < 1.0, "{row:?}");
            assert_eq!(row.seen_bytes, seen * SIZE);
            // All there were, or one more, may well be the truth.
            for truth in [seen, seen + 1.0] {
                assert!(row.objects.interval95(seen).holds(truth), "{truth}: {row:?}");
                assert!(
                    row.bytes.interval95(row.seen_bytes).holds(truth * SIZE),
                    "{truth}: {row:?}"
                );
            }
        }
    }
}
