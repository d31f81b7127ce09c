//! The comment that says what was lost, written and read back: of each kind of event how many there
//! were, how many are in the profile, and what became of the rest.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Losses that have no balance of their own: shown when they happened.
const OTHER_LOSSES: [&str; 53] = [
    "descriptors_short",
    "calls_given_up",
    "calls_not_made",
    "stacks_stale",
    "rules_refused",
    "wait_ends_ring_full",
    "wakes_ring_full",
    "waker_stacks_ring_full",
    "waker_stacks_busy",
    "off_cpu_ring_full",
    "scans_refused",
    "scans_held",
    "thread_ends_ring_full",
    "thread_map_full",
    "thread_torn",
    "selected_map_full",
    "cpu_beyond_maps",
    "records_bad",
    "perf_lost",
    "perf_bad",
    "processes_refused",
    "mappings_refused",
    "images_refused",
    "stacks_refused",
    "spans_refused",
    "threads_summed_up",
    "wakers_capped",
    SITES_REFUSED,
    LIVE_REFUSED,
    "runtime_event_places_refused",
    "gc_events_unmatched",
    "window_overflowed",
    "window_labels_capped",
    "window_values_refused",
    "symbolize_managed_not_answered",
    "shim_records_dropped_full",
    RECORDS_ABANDONED,
    RECORDS_MALFORMED,
    EVENTS_MALFORMED,
    HOLES,
    "shim_exceptions_dropped_full",
    "shim_contentions_dropped_full",
    "shim_contentions_unmatched",
    HANDLES_FULL,
    HANDLES_REFUSED,
    LIVE_SET_SHRUNK,
    TYPES_QUEUE_FULL,
    TYPES_REFUSED,
    REGIONS_REFUSED,
    REGIONS_DISABLED,
    LEASES_LOST,
    "shim_sessions_refused",
    LARGE_DOWNSAMPLED,
];

const HANDLES_FULL: &str = "shim_handles_full";
const HANDLES_REFUSED: &str = "shim_handles_refused";
const LIVE_REFUSED: &str = "live_objects_refused";
const SITES_REFUSED: &str = "allocation_sites_refused";
const RECORDS_ABANDONED: &str = "shim_records_abandoned";
const RECORDS_MALFORMED: &str = "shim_records_malformed";
const EVENTS_MALFORMED: &str = "shim_events_malformed";
const HOLES: &str = "shim_holes";
const LIVE_SET_SHRUNK: &str = "shim_live_set_shrunk";
const TYPES_QUEUE_FULL: &str = "shim_types_queue_full";
const TYPES_REFUSED: &str = "shim_types_refused";
const REGIONS_REFUSED: &str = "shim_regions_refused";
const REGIONS_DISABLED: &str = "shim_regions_disabled";

/// Sampled objects that nobody watches, and not because chance has not chosen them: what is alive
/// may be more than what is watched stands for.
pub const UNWATCHED: [&str; 3] = [HANDLES_FULL, HANDLES_REFUSED, LIVE_REFUSED];

/// Large objects that chance left out: those of their types that were told of may each stand for
/// itself alone, and are not all of them then.
pub const LARGE_DOWNSAMPLED: &str = "shim_large_objects_downsampled";

/// What a process's library has told and could not be understood, or did not come whole: a record
/// each, whatever it was about, or all of a region from then on.
pub const UNREAD: [&str; 5] =
    [RECORDS_ABANDONED, RECORDS_MALFORMED, EVENTS_MALFORMED, HOLES, REGIONS_DISABLED];

/// A process's library heard nothing of us for so long that it went quiet, and told nothing until
/// it did.
pub const LEASES_LOST: &str = "shim_leases_lost";

/// Where types or stacks of objects are missing, or fewer are watched; or all of a region, which
/// may be a child's that is its parent's.
const OF_OBJECTS: [&str; 6] =
    [SITES_REFUSED, LIVE_SET_SHRUNK, TYPES_QUEUE_FULL, TYPES_REFUSED, REGIONS_REFUSED, LEASES_LOST];

const ALLOCATIONS: &str = "allocations";
const RING_FULL: &str = "ring full";
const UNACCOUNTED: &str = "unaccounted";

/// The parts of a [`line()`].
fn parts(line: &str) -> impl Iterator<Item = &str> {
    line.split("; ")
}

/// Of a [`line()`], what is about allocations and live objects.
pub fn of_objects(line: &str) -> impl Iterator<Item = &str> {
    parts(line).filter(|part| match part.split_once(' ') {
        Some((ALLOCATIONS, rest)) => rest.contains(RING_FULL) || rest.contains(UNACCOUNTED),
        Some((name, _)) => UNREAD.iter().chain(&UNWATCHED).chain(&OF_OBJECTS).any(|of| *of == name),
        None => false,
    })
}

/// What a [`line()`] says of a loss; 0 where it does not name it.
#[must_use]
pub fn number(line: &str, name: &str) -> u64 {
    let count = |part: &str| part.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    parts(line).find_map(count).unwrap_or(0)
}

/// Of the allocations that a [`line()`] tells of: how many found the ring full, and of how many it
/// is not known where they are.
#[must_use]
pub fn allocations(line: &str) -> [u64; 2] {
    let part = parts(line).find_map(|part| part.strip_prefix(ALLOCATIONS)).unwrap_or_default();
    let count = |what: &str| {
        let before = part.split_once(&format!(" {what}")).map(|(before, _)| before)?;
        before.rsplit([' ', '(']).next()?.parse().ok()
    };
    [RING_FULL, UNACCOUNTED].map(|what| count(what).unwrap_or(0))
}

/// `in = stored + dropped by cause` of each kind of event, in one line.
#[must_use]
pub fn line(counters: &[(String, u64)]) -> String {
    line_with(counters, UNACCOUNTED, None)
}

/// The same for one window of several: some events are counted at one side of its edge and stored
/// at the other.
#[must_use]
pub fn line_of_window(counters: &[(String, u64)]) -> String {
    line_with(counters, "still on their way when it ended", Some("from before it began"))
}

fn line_with(counters: &[(String, u64)], rest: &str, before: Option<&str>) -> String {
    let values: HashMap<&str, u64> =
        counters.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let of = |name: &str| values.get(name).copied().unwrap_or(0);
    let mut line = String::new();
    let mut kind = |what: &str, produced: u64, stored: u64, causes: &[(&str, u64)]| {
        let separator = if line.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        write!(line, "{separator}{what} {produced} = {stored} stored").ok();
        for (cause, count) in causes.iter().filter(|(_, count)| *count > 0) {
            write!(line, " + {count} {cause}").ok();
        }
        let accounted = stored + causes.iter().map(|(_, count)| count).sum::<u64>();
        match (produced.cmp(&accounted), before) {
            (Ordering::Equal, _) => {}
            (Ordering::Less, Some(before)) => {
                write!(line, " ({} of them {before})", accounted - produced).ok();
            }
            _ => {
                write!(line, " ({} {rest})", i128::from(produced) - i128::from(accounted)).ok();
            }
        }
    };
    kind(
        "cpu samples",
        of("cpu_samples"),
        of("events_cpu_samples"),
        &[(RING_FULL, of("cpu_samples_ring_full")), ("buffer busy", of("cpu_samples_busy"))],
    );
    kind(
        "waits",
        of("waits"),
        of("events_waits"),
        &[
            ("downsampled", of("waits_downsampled")),
            (RING_FULL, of("waits_ring_full")),
            ("buffer busy", of("waits_busy")),
        ],
    );
    kind(
        ALLOCATIONS,
        of("shim_allocation_samples"),
        of("events_allocations"),
        &[
            ("downsampled", of("shim_allocations_downsampled")),
            (RING_FULL, of("shim_allocations_dropped_full")),
            ("after the end", of("events_allocations_after_end")),
        ],
    );
    let (walked, exact, broken, guessed) =
        (of("stacks_walked"), of("stacks_exact"), of("stacks_broken"), of("stacks_guessed"));
    write!(line, "; stacks {walked}: {exact} exact, {broken} broken, {guessed} guessed").ok();
    let exiting = of("stacks_exiting");
    if exiting > 0 {
        write!(line, ", {exiting} of threads being ended").ok();
    }
    for name in OTHER_LOSSES.into_iter().filter(|name| of(name) > 0) {
        write!(line, "; {name} {}", of(name)).ok();
    }
    line
}

#[cfg(test)]
mod tests {
    use super::{allocations, line, number, of_objects};

    #[test]
    fn the_line_adds_up_or_says_what_is_missing() {
        let counters = |list: &[(&str, u64)]| {
            list.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect::<Vec<_>>()
        };
        let good = counters(&[
            ("cpu_samples", 10),
            ("events_cpu_samples", 7),
            ("cpu_samples_ring_full", 3),
        ]);
        assert!(
            line(&good).starts_with("cpu samples 10 = 7 stored + 3 ring full; waits 0 = 0 stored;"),
            "{}",
            line(&good)
        );
        let shim = counters(&[("shim_handles_refused", 3), ("shim_types_refused", 2)]);
        assert!(
            line(&shim).ends_with("; shim_handles_refused 3; shim_types_refused 2"),
            "{}",
            line(&shim)
        );
        let ended = counters(&[("stacks_walked", 5), ("stacks_exact", 4), ("stacks_exiting", 1)]);
        assert!(
            line(&ended)
                .ends_with("stacks 5: 4 exact, 0 broken, 0 guessed, 1 of threads being ended"),
            "{}",
            line(&ended)
        );
        let bad = counters(&[("cpu_samples", 10), ("events_cpu_samples", 7)]);
        assert!(line(&bad).contains("cpu samples 10 = 7 stored (3 unaccounted)"), "{}", line(&bad));
    }

    #[test]
    fn what_a_line_says_of_objects_is_read_back() {
        let counters = [
            ("cpu_samples", 10),
            ("shim_allocation_samples", 9),
            ("events_allocations", 2),
            ("shim_allocations_dropped_full", 3),
            ("shim_holes", 1),
            ("shim_handles_full", 2),
            ("wakers_capped", 5),
        ];
        let line = line(&counters.map(|(name, value)| (name.to_owned(), value)));
        assert_eq!(allocations(&line), [3, 4], "{line}");
        assert_eq!(
            ["shim_holes", "shim_handles_full", "shim_types"].map(|name| number(&line, name)),
            [1, 2, 0]
        );
        let parts: Vec<_> = of_objects(&line).collect();
        let allocations = "allocations 9 = 2 stored + 3 ring full (4 unaccounted)";
        assert_eq!(parts, [allocations, "shim_holes 1", "shim_handles_full 2"], "{line}");
        assert_eq!(of_objects("none").count(), 0);
    }
}
