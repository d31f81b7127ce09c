//! The findings for people: verdict and trend, then why, then where.

use super::judge::{LeakVerdict, seconds};
use super::series::Stretch;
use super::snapshot::NamedPid;
use super::snapshot::{LiveGroup, Snapshot};
use super::{HoldersResult, LeakFinding, LeakHolders};
use perfusion_model::units::{counted, human, percent};
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;

/// Ways in which objects of a place are held that are shown.
const WAYS: usize = 3;
/// Frames that are shown of a stack.
const FRAMES: usize = 4;

/// The whole text; at most `rows` findings.
pub fn text(
    snapshots: &[Snapshot],
    stretches: &HashMap<NamedPid, Stretch>,
    findings: &[LeakFinding],
    holders: Option<&HoldersResult>,
    rows: usize,
) -> String {
    let mut text = String::new();
    let longest = stretches
        .values()
        .map(|stretch| stretch.moments.as_slice())
        .max_by_key(|moments| moments.len());
    let longest = longest.unwrap_or_default();
    let at = |place: Option<&usize>| {
        place.and_then(|place| snapshots.get(*place)).map_or(0.0, |of| of.at_s)
    };
    let length = at(longest.last()) - at(longest.first());
    let shown: Vec<&LeakFinding> =
        findings.iter().filter(|finding| !finding.judgement.minor).collect();
    let count =
        |verdict| shown.iter().filter(|finding| finding.judgement.verdict == verdict).count();
    let moments =
        counted(if longest.is_empty() { snapshots.len() } else { longest.len() }, "moment");
    let moments = if length > 0.0 { format!("{moments} in {}", seconds(length)) } else { moments };
    // Writing to a String cannot fail.
    if findings.is_empty() {
        writeln!(
            text,
            "{moments}: no live object was seen in any of them, so nothing is known of leaks"
        )
        .ok();
    } else {
        writeln!(
            text,
            "{moments}: {}, {}, {} steady, {} too early to tell",
            counted(count(LeakVerdict::Leak), "leak"),
            counted(count(LeakVerdict::Refreshed), "cache"),
            count(LeakVerdict::Steady),
            count(LeakVerdict::TooEarly)
        )
        .ok();
    }
    let lacks: BTreeSet<&String> = snapshots.iter().flat_map(|of| &of.lacks).collect();
    for lacks in lacks.into_iter().take(rows) {
        writeln!(text, "{lacks}").ok();
    }
    for ((pid, name), of) in stretches.iter().filter(|(_, of)| of.left_out > 0) {
        writeln!(
            text,
            "{name} {pid}: left out: {} before a break of {}, in which nothing was recorded: live \
             objects are not known to be the same",
            counted(of.left_out, "earlier moment"),
            seconds(of.break_s)
        )
        .ok();
    }
    let lossy: Vec<&Snapshot> = snapshots.iter().filter(|of| !of.losses.is_empty()).collect();
    if let Some(last) = lossy.last() {
        writeln!(
            text,
            "losses in {}, so that less may be seen than there is; the last: {}",
            counted(lossy.len(), "moment"),
            last.losses.join("; ")
        )
        .ok();
    }
    for finding in shown.iter().take(rows) {
        one(&mut text, finding).ok();
        let is_of_it = |other: &&&LeakFinding| {
            let (place, other) = (&finding.place, &other.place);
            (place.pid, &place.process, &place.type_name)
                == (other.pid, &other.process, &other.type_name)
        };
        let leaks = |other: &&LeakFinding| other.judgement.verdict == LeakVerdict::Leak;
        if finding.judgement.verdict == LeakVerdict::Steady
            && shown.iter().filter(is_of_it).any(leaks)
        {
            writeln!(
                text,
                "  note    objects of this type leak at another place; where a method \
                 was compiled anew meanwhile, that may be this one"
            )
            .ok();
        }
        if let Some(Ok(holders)) = holders {
            held(&mut text, holders, finding).ok();
        }
    }
    let (more, hidden) = (shown.len().saturating_sub(rows), findings.len() - shown.len());
    if more > 0 {
        writeln!(text, "\n{more} more: --rows").ok();
    }
    if hidden > 0 {
        let bytes: f64 =
            findings.iter().filter(|of| of.judgement.minor).map(|of| of.last.bytes()).sum();
        writeln!(
            text,
            "\nnot shown: {}, {}, where nothing is left or fewer than 10 objects that were seen \
             have outlived a collection; what a few large ones take is in `perfusion heap`",
            counted(hidden, "place"),
            of_bytes(bytes)
        )
        .ok();
    }
    let mut leaking: Vec<i64> = shown
        .iter()
        .filter(|finding| finding.judgement.verdict == LeakVerdict::Leak)
        .map(|finding| finding.place.pid)
        .collect();
    leaking.sort_unstable();
    leaking.dedup();
    if let Some(Err(why)) = holders {
        writeln!(text, "\nwhat holds the objects is not known: {why}").ok();
    }
    for pid in leaking.iter().take(rows).filter(|_| holders.is_none()) {
        writeln!(
            text,
            "\nwhat holds it, while it runs: perfusion leaks --heap --pid {pid}, and of \
             the largest types at once: perfusion heap --pid {pid}"
        )
        .ok();
    }
    let no_interval = |finding: &LeakFinding| {
        finding.last.stride || finding.judgement.trend.is_ok_and(|rate| rate.interval.is_none())
    };
    if shown.into_iter().take(rows).any(no_interval) {
        writeln!(
            text,
            "\n(fixed stride): .NET 6 to 9 do not choose by chance what they tell of, so sizes and \
             rates may be wrong many times over, and no interval exists; see docs/allocations.md"
        )
        .ok();
    }
    text
}

fn of_bytes(value: f64) -> String {
    human(value.round() as i64, "bytes")
}

fn one(text: &mut String, finding: &LeakFinding) -> std::fmt::Result {
    let (place, last, found) = (&finding.place, &finding.last, &finding.judgement);
    let method = place.stack.iter().find(|frame| !frame.starts_with('['));
    let at = method.map(|method| format!(" at {method}")).unwrap_or_default();
    writeln!(
        text,
        "\n{}: {}{at} [{} {}]",
        found.verdict, place.type_name, place.process, place.pid
    )?;
    let young = last.bytes() - last.survivors().bytes();
    writeln!(
        text,
        "  alive   {} in {}{}, {:.0} seen; {}{}",
        of_bytes(last.bytes()),
        counted(last.objects().round() as i64, "object"),
        if last.stride { " (fixed stride)" } else { "" },
        last.seen(),
        if young >= 0.5 {
            format!("{} of it not known to have been through a collection; ", of_bytes(young))
        } else {
            String::new()
        },
        ages(last)
    )?;
    let minute = |value: f64| of_bytes(value * 60.0);
    match &found.trend {
        Ok(rate) => {
            let interval = match rate.interval {
                Some(interval) => {
                    format!("95 %: {} … {}", minute(interval.low), minute(interval.high))
                }
                None => "fixed stride: 95 % interval not known".to_owned(),
            };
            writeln!(
                text,
                "  trend   {} a minute ({interval}) in the second half",
                minute(rate.per_second)
            )?;
        }
        Err(why) => writeln!(text, "  trend   not known: {why}")?,
    }
    writeln!(text, "  why     {}", found.reason)?;
    for (at, frame) in place.stack.iter().take(FRAMES).enumerate() {
        writeln!(text, "  {:<7} {frame}", if at == 0 { "where" } else { "" })?;
    }
    Ok(())
}

/// What holds the objects that were seen of a place.
fn held(text: &mut String, holders: &LeakHolders, finding: &LeakFinding) -> std::fmt::Result {
    let (handles, given_up) = holders
        .handles
        .get(&*finding.place)
        .map_or((&[][..], 0), |(handles, given_up)| (&**handles, *given_up));
    let ways = holders.survey.ways(handles);
    let all: usize = ways.iter().map(|way| way.objects).sum();
    match (all, given_up) {
        (0, 0) => {
            return writeln!(
                text,
                "  held    none of those seen has survived the survey's full collection"
            );
        }
        (0, _) => {
            return writeln!(
                text,
                "  held    not known: other objects have been watched since, in place of \
                 {given_up} of them"
            );
        }
        _ => {}
    }
    let seen = finding.last.seen();
    for (at, way) in ways.iter().take(WAYS).enumerate() {
        let share = percent(count(way.objects), count(all));
        let of = format!(
            "{share} of the {all} that have survived the survey's full collection, of {seen:.0} \
             seen"
        );
        let of = if at == 0 { of } else { share };
        writeln!(text, "  {:<7} {of}", if at == 0 { "held" } else { "" })?;
        let mut steps = String::new();
        perfusion_heap::text::way(&mut steps, holders.survey.steps(*way).into_iter());
        steps.lines().try_for_each(|step| writeln!(text, "      {step}"))?;
    }
    let rest: usize = ways.iter().skip(WAYS).map(|way| way.objects).sum();
    if rest > 0 {
        let share = percent(count(rest), count(all));
        writeln!(text, "          {share} in {}", counted(ways.len() - WAYS, "other way"))?;
    }
    if given_up > 0 {
        writeln!(
            text,
            "          {given_up} more are not known: other objects have been watched since, in \
             place of them"
        )?;
    }
    // Two types of one name are told apart by their modules here, and there not.
    let (objects, bytes) = holders.survey.of_type(&finding.place.type_name);
    if objects > 0 {
        writeln!(
            text,
            "  counted {} of this type live, {}, of all places and from before",
            counted(objects, "object"),
            of_bytes(bytes as f64)
        )?;
    }
    Ok(())
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// How old objects are, as far as it is known: by powers of two.
fn ages(group: &LiveGroup) -> String {
    match (group.oldest_s(), group.half_at_least_s()) {
        (..1.0, _) => "all less than 1 s old".to_owned(),
        (oldest, ..1.0) => format!("oldest at least {}, most less than 1 s", seconds(oldest)),
        (oldest, half) => {
            format!("oldest at least {}, half at least {}", seconds(oldest), seconds(half))
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::leaks::findings;
    use crate::leaks::series::stretches;
    use crate::leaks::snapshot::{AgeCell, AllocationSite, LiveGroup, Snapshot};
    use std::sync::Arc;

    /// What is printed of a type of which so many are alive at each of these seconds.
    fn text(looks: &[f64], stride: bool, cells: impl Fn(f64) -> Vec<AgeCell>) -> String {
        let process = (7, "shop".to_owned());
        let place = AllocationSite {
            pid: process.0,
            process: process.1.clone(),
            type_name: "Order".into(),
            stack: vec!["Buy".into()],
        };
        let look = |&at_s: &f64| Snapshot {
            at_s,
            length_s: at_s,
            processes: [process.clone()].into(),
            proven_at_s: [(process.clone(), at_s)].into(),
            groups: [(Arc::new(place.clone()), LiveGroup { cells: cells(at_s), stride })].into(),
            ..Snapshot::default()
        };
        let snapshots: Vec<Snapshot> = looks.iter().map(look).collect();
        let stretches = stretches(&snapshots);
        super::text(&snapshots, &stretches, &findings(&snapshots, &stretches), None, 10)
    }

    fn cell(age_s: f64, seen: f64) -> AgeCell {
        AgeCell {
            age_s,
            seen,
            objects: seen * 10.0,
            bytes: seen * 1024.0,
            survived: true,
            proven: true,
            size: 0.0,
        }
    }

    /// One object more is seen each second.
    fn leak(now: f64) -> Vec<AgeCell> {
        let born = |at: i32| (now - f64::from(at)).log2().floor().max(0.0).exp2();
        (0..now as i32).map(|at| cell(born(at), 1.0)).collect()
    }

    const LOOKS: [f64; 4] = [30.0, 60.0, 90.0, 120.0];

    #[test]
    fn an_interval_is_shown_where_chance_has_chosen_and_a_caveat_elsewhere() {
        let by_chance = text(&LOOKS, false, leak);
        assert!(
            by_chance.starts_with("4 moments in 90 s: 1 leak, 0 caches, 0 steady, 0 too"),
            "{by_chance}"
        );
        assert!(
            by_chance.ends_with(", and of the largest types at once: perfusion heap --pid 7\n"),
            "{by_chance}"
        );
        assert!(
            by_chance.contains(" a minute (95 %: ") && !by_chance.contains("stride"),
            "{by_chance}"
        );
        let by_stride = text(&LOOKS, true, leak);
        assert!(
            by_stride.contains(" a minute (fixed stride: 95 % interval not known) in"),
            "{by_stride}"
        );
        assert!(by_stride.contains(" objects (fixed stride), 120 seen; "), "{by_stride}");
        assert!(!by_stride.contains('…'), "{by_stride}");
        assert!(by_stride.contains("\n(fixed stride): .NET 6 to 9 "), "{by_stride}");
    }

    #[test]
    fn ages_are_told_as_what_they_are_at_least() {
        let text = text(&LOOKS, false, leak);
        assert!(text.contains("; the oldest are at least 64 s old. "), "{text}");
        assert!(text.contains(" seen; oldest at least 64 s, half at least 32 s\n"), "{text}");
    }

    #[test]
    fn where_nothing_is_known_of_live_objects_there_is_no_count_of_leaks() {
        let lacks = vec!["inuse: not available of .NET 6.0.36".to_owned()];
        let look = |&at_s: &f64| Snapshot { at_s, lacks: lacks.clone(), ..Snapshot::default() };
        let snapshots: Vec<Snapshot> = LOOKS.iter().map(look).collect();
        let text = super::text(&snapshots, &stretches(&snapshots), &[], None, 10);
        assert_eq!(
            text,
            "4 moments: no live object was seen in any of them, so nothing is known of \
             leaks\ninuse: not available of .NET 6.0.36\n"
        );
    }

    #[test]
    fn one_moment_has_no_trend() {
        let text = text(&[120.0], false, leak);
        assert!(
            text.starts_with("1 moment: 0 leaks, 0 caches, 0 steady, 1 too early to tell\n"),
            "{text}"
        );
        assert!(text.contains("\n  trend   not known: it takes two moments\n"), "{text}");
        assert!(
            text.contains("  why     watched for 0 s at 1 moment; it takes 60 s and 4\n"),
            "{text}"
        );
    }

    #[test]
    fn what_no_collection_has_looked_at_is_told_apart() {
        let young =
            |bytes: f64| AgeCell { bytes, survived: false, proven: false, ..cell(0.0, 12.0) };
        let text = text(&LOOKS, false, |_| vec![cell(0.0, 12.0), young(512.0 * 1024.0)]);
        assert!(
            text.contains(
                "; 512 KiB of it not known to have been through a collection; all less than 1 s \
                 old\n"
            ),
            "{text}"
        );
    }
}
