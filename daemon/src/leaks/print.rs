//! The findings for people: verdict and trend, then why, then where.

use super::judge::seconds;
use super::series::{Process, Stretch};
use super::snapshot::Snapshot;
use super::{Finding, judge::Verdict};
use crate::report::units::{grouped, human};
use std::collections::HashMap;
use std::fmt::Write as _;

/// Frames that are shown of a stack.
const FRAMES: usize = 4;

/// The whole text; at most `rows` findings.
pub(super) fn text(
    snapshots: &[Snapshot],
    stretches: &HashMap<Process, Stretch>,
    findings: &[Finding],
    rows: usize,
) -> String {
    let mut text = String::new();
    let longest =
        stretches.values().map(|stretch| stretch.moments.as_slice()).max_by_key(|moments| moments.len());
    let longest = longest.unwrap_or_default();
    let at = |place: Option<&usize>| place.and_then(|place| snapshots.get(*place)).map_or(0.0, |of| of.at_s);
    let length = at(longest.last()) - at(longest.first());
    let shown: Vec<&Finding> = findings.iter().filter(|finding| !finding.judgement.minor).collect();
    let count = |verdict| shown.iter().filter(|finding| finding.judgement.verdict == verdict).count();
    // Writing to a String cannot fail.
    writeln!(
        text,
        "{} moments in {}: {} leaks, {} caches, {} steady, {} too early to tell",
        longest.len(),
        seconds(length),
        count(Verdict::Leak),
        count(Verdict::Refreshed),
        count(Verdict::Steady),
        count(Verdict::TooEarly)
    )
    .ok();
    for ((pid, name), of) in stretches.iter().filter(|(_, of)| of.left_out > 0) {
        writeln!(
            text,
            "{name} {pid}: {} earlier moments are left out: nothing was recorded for {} after them, and live objects are not known to be the same",
            of.left_out,
            seconds(of.break_s)
        )
        .ok();
    }
    for finding in shown.iter().take(rows) {
        one(&mut text, finding).ok();
    }
    let (more, hidden) = (shown.len().saturating_sub(rows), findings.len() - shown.len());
    if more > 0 {
        writeln!(text, "\n{more} more: --rows").ok();
    }
    if hidden > 0 {
        writeln!(
            text,
            "\nnot shown: {hidden} places of which no collection left 10 or more seen objects alive, or nothing is left"
        )
        .ok();
    }
    if findings.iter().any(|finding| finding.last.stride) {
        writeln!(
            text,
            "\nsampled by a fixed stride (.NET 6 to 9): sizes and rates may be biased, see docs/memory.md"
        )
        .ok();
    }
    text
}

fn one(text: &mut String, finding: &Finding) -> std::fmt::Result {
    let (place, last, found) = (&finding.place, &finding.last, &finding.judgement);
    let bytes = |value: f64| human(value.round() as i64, "bytes");
    writeln!(text, "\n{}: {} [{} {}]", found.verdict, place.type_name, place.process, place.pid)?;
    writeln!(
        text,
        "  alive   {} in {} objects, {:.0} of them seen; oldest ≥ {}, half of them older than {}",
        bytes(last.bytes()),
        grouped(last.objects().round() as i64),
        last.seen(),
        seconds(last.oldest_s()),
        seconds(last.median_s())
    )?;
    let minute = |value: f64| bytes(value * 60.0);
    writeln!(
        text,
        "  trend   {} a minute (95 %: {} … {}) in the second half",
        minute(found.bytes.per_second),
        minute(found.bytes.low),
        minute(found.bytes.high)
    )?;
    writeln!(text, "  why     {}", found.reason)?;
    for (at, frame) in place.stack.iter().take(FRAMES).enumerate() {
        writeln!(text, "  {:<7} {frame}", if at == 0 { "where" } else { "" })?;
    }
    Ok(())
}
