//! What a series of snapshots says about one place: leak, cache, steady, or too early to tell, and
//! why in words.
//!
//! Sampled objects are compared with themselves: of those alive at one moment, how many are left at
//! a later one, and how many came since? Both are counts of things that happen one by one, so that
//! the error of `came − went` is about √(came + went) (Poisson). Only what a full collection has
//! left alive counts as growth: what is dead and not collected yet looks alive to everybody.
//!
//! The set of watched objects has an end. Once it is full the shim watches a smaller and smaller
//! share of what is alive, so an object that is no longer seen may still be there; when there is
//! room again, a greater share of new ones is seen. Growth is therefore that of what the seen stand
//! for, and both moments are counted by the smaller of their shares.

use super::snapshot::{AgeCell, LiveGroup};
use perfusion_aggregate::interval::Interval;
use perfusion_model::units::counted;
use std::fmt;

/// Shortest time and fewest moments for a verdict about growth.
pub const SHORTEST_S: f64 = 60.0;
/// See [`SHORTEST_S`].
pub const FEWEST_SNAPSHOTS: usize = 4;
/// Fewest objects that must have been seen.
const FEWEST_SEEN: f64 = 10.0;
/// Standard errors from which on a change is taken for one: each of two independent halves has 1
/// chance in 160 to be mistaken upwards.
const SURE: f64 = 2.5;
/// Of what was alive in the middle of the time, the share that stays where nothing goes.
const MOST_STAY: f64 = 0.7;
/// How many times as many as it had been before a cache has at most when it is full again.
const MOST_REFILLED: f64 = 2.0;
/// So many that half as many are hardly chance.
const FEWEST_EXPECTED: f64 = 16.0;
/// Half the width of a 95 % interval of a normal distribution, in standard errors.
const HALF_WIDTH_95: f64 = 1.96;

/// The verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LeakVerdict {
    /// Number and age grow, and nothing goes.
    Leak,
    /// The objects that were there are gone and were replaced.
    Refreshed,
    /// Neither grows nor shrinks.
    Steady,
    /// Not known.
    TooEarly,
}

impl fmt::Display for LeakVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leak => "leak",
            Self::Refreshed => "cache refreshed",
            Self::Steady => "steady",
            Self::TooEarly => "too early to tell",
        })
    }
}

/// A rate per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrowthRate {
    /// The rate.
    pub per_second: f64,
    /// Its 95 % interval; `None` where a fixed stride, and not chance, has chosen the objects:
    /// there is none.
    pub interval: Option<Interval>,
}

/// The verdict on one place, and its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// The verdict.
    pub verdict: LeakVerdict,
    /// The reason, in words.
    pub reason: String,
    /// How fast the bytes that are proven to be alive grow, in the second half of the time; or why
    /// that is not known.
    pub trend: Result<GrowthRate, &'static str>,
    /// True when hardly any of it was ever left alive by a collection: the ordinary life of
    /// objects, or too few to speak of. Also when nothing is left and nothing can be said of it:
    /// such is a place of which a frame had no name at first, and is another since it has.
    pub minor: bool,
}

/// One moment of one place.
#[derive(Clone, Copy, Debug)]
pub struct SiteMoment<'a> {
    /// The moment, in seconds.
    pub at_s: f64,
    /// Until when what was old by then is proven to be alive, on the same clock; `None` before
    /// there were two full collections.
    pub proven_at_s: Option<f64>,
    /// The objects that were alive.
    pub group: &'a LiveGroup,
}

/// How many objects one stands for at the moment at which fewer are watched; 1 where none was seen.
fn unit(first: &SiteMoment<'_>, last: &SiteMoment<'_>) -> f64 {
    let most = first
        .group
        .stands_for()
        .into_iter()
        .chain(last.group.stands_for())
        .fold(f64::NAN, f64::max);
    if most > 0.0 { most } else { 1.0 }
}

/// What became of the objects of one moment until another, all counted as many as would be seen by
/// the smaller share of both.
#[derive(Clone, Copy, Debug)]
struct ObjectTurnover {
    /// At the first moment.
    before: f64,
    /// Those that are still there.
    stayed: f64,
    /// New ones.
    came: f64,
    /// Variance of `stayed` by what is not watched any more, which is chance.
    unwatched: f64,
}

impl ObjectTurnover {
    fn between(first: &SiteMoment<'_>, last: &SiteMoment<'_>) -> Self {
        Self::with(first, last, AgeCell::share_older)
    }

    /// The same with the most that may have stayed: ages are known as powers of two only.
    fn at_most(first: &SiteMoment<'_>, last: &SiteMoment<'_>) -> Self {
        Self::with(first, last, AgeCell::share_perhaps_older)
    }

    /// The change by the fewest objects.
    fn at_least(first: &SiteMoment<'_>, last: &SiteMoment<'_>) -> Self {
        Self::with(first, last, AgeCell::share_surely_older)
    }

    /// `older`: the share of alike objects that is older than an age.
    fn with(first: &SiteMoment<'_>, last: &SiteMoment<'_>, older: fn(AgeCell, f64) -> f64) -> Self {
        let age_s = last.at_s - first.at_s;
        let (then, now) = (first.group.stands_for(), last.group.stands_for());
        let unit = unit(first, last);
        let before = first.group.told() / unit;
        let stayed = (last.group.told_older(age_s, older) / unit).min(before);
        let came = (last.group.told() / unit - stayed).max(0.0);
        // Of what is still there fewer are seen, each of which stands for more.
        let more = last.group.stands_for_older(age_s, older).or(now).zip(then);
        let more = more.map_or(0.0, |(now, then)| (now - then).max(0.0) / unit);
        Self { before, stayed, came, unwatched: before * more }
    }

    fn after(self) -> f64 {
        self.stayed + self.came
    }

    fn went(self) -> f64 {
        self.before - self.stayed
    }

    fn growth(self) -> f64 {
        self.came - self.went()
    }

    /// Standard error of the growth.
    fn error(self) -> f64 {
        (self.came + self.went() + self.unwatched + 1.0).sqrt()
    }

    fn kept(self) -> f64 {
        if self.before > 0.0 { self.stayed / self.before } else { 0.0 }
    }
}

/// Judges one place by its moments, oldest first.
#[must_use]
pub fn judge(moments: &[SiteMoment<'_>]) -> Judgement {
    let proven: Vec<LiveGroup> = moments.iter().map(|moment| moment.group.proven()).collect();
    let alive: Vec<SiteMoment<'_>> = moments
        .iter()
        .zip(&proven)
        .map(|(moment, group)| SiteMoment { group, ..*moment })
        .collect();
    let minor = moments.iter().all(|moment| moment.group.survivors().seen() < FEWEST_SEEN);
    let (Some(first), Some(half), Some(last)) = (alive.first(), middle(&alive), alive.last())
    else {
        let reason = "nothing was seen".to_owned();
        return Judgement { verdict: LeakVerdict::TooEarly, reason, trend: Err(ONE_MOMENT), minor };
    };
    let (verdict, reason) = verdict(moments, &alive, last.at_s - first.at_s);
    let nothing_left = moments.last().is_none_or(|moment| moment.group.seen() == 0.0);
    let minor = minor || nothing_left && verdict == LeakVerdict::TooEarly;
    let stride = moments.iter().any(|moment| moment.group.stride);
    let second_half = alive.iter().skip_while(|moment| moment.at_s < half.at_s);
    Judgement { verdict, reason, trend: trend(second_half, last, stride), minor }
}

/// The reason why there is no trend.
const ONE_MOMENT: &str = "it takes two moments";
const NOT_PROVEN: &str = "none of it is proven to have outlived a full collection";

const FEW_COLLECTIONS: &str = "it takes two full collections, and one more in the second half";

/// How fast the bytes grow that are proven to be alive. They do so when a full collection proves
/// it: what was proven at two moments was made by the beginning of two collections, and in the time
/// between these.
fn trend<'m, 'a: 'm>(
    mut moments: impl Iterator<Item = &'m SiteMoment<'a>>,
    last: &SiteMoment<'_>,
    stride: bool,
) -> Result<GrowthRate, &'static str> {
    let with_time = |moment: &'m SiteMoment<'a>| Some((moment, moment.proven_at_s?));
    let Some((first, from_s)) = moments.find_map(with_time) else { return Err(FEW_COLLECTIONS) };
    if last.at_s <= first.at_s {
        return Err(ONE_MOMENT);
    }
    let length_s = last.proven_at_s.unwrap_or(from_s) - from_s;
    if length_s <= 0.0 {
        return Err(FEW_COLLECTIONS);
    }
    let change = ObjectTurnover::between(first, last);
    let (was, is) = (first.group.bytes(), last.group.bytes());
    // What one that is counted stands for.
    let each = match (change.before, change.after()) {
        (_, after) if after > 0.0 => is / after,
        (before, _) if before > 0.0 => was / before,
        _ => return Err(NOT_PROVEN),
    };
    let per_second = (is - was) / length_s;
    let half = HALF_WIDTH_95 * change.error() * each / length_s;
    let interval = Interval { low: per_second - half, high: per_second + half };
    Ok(GrowthRate { per_second, interval: (!stride).then_some(interval) })
}

/// The middle moment by time.
fn middle<'m, 'a>(moments: &'m [SiteMoment<'a>]) -> Option<&'m SiteMoment<'a>> {
    let (first, last) = (moments.first()?, moments.last()?);
    let half = (first.at_s + last.at_s) / 2.0;
    moments.iter().min_by(|a, b| (a.at_s - half).abs().total_cmp(&(b.at_s - half).abs()))
}

fn verdict(
    all: &[SiteMoment<'_>],
    alive: &[SiteMoment<'_>],
    length_s: f64,
) -> (LeakVerdict, String) {
    let (Some(first), Some(half), Some(last)) = (alive.first(), middle(alive), alive.last()) else {
        return (LeakVerdict::TooEarly, "nothing was seen".to_owned());
    };
    let (early, late) = (ObjectTurnover::between(first, half), ObjectTurnover::between(half, last));
    let grows = |change: ObjectTurnover| change.growth() >= SURE * change.error();
    let whole = all.len() >= FEWEST_SNAPSHOTS && length_s.round() >= SHORTEST_S;
    let since = |moment: &SiteMoment<'_>| seconds(moment.at_s - first.at_s);
    let stays = grows(early) && grows(late) || some_stay(ObjectTurnover::at_least(half, last));
    if !stays && let Some((gone, from, to)) = turnover(all) {
        let reason = format!(
            "of {gone:.0} seen that a collection had left alive at {}, at {} at most one in ten \
             was left, and others had taken their place",
            seconds(from - first.at_s),
            seconds(to - first.at_s)
        );
        return (LeakVerdict::Refreshed, reason);
    }
    if !whole {
        let reason = format!(
            "watched for {} at {}; it takes {} and {FEWEST_SNAPSHOTS}",
            seconds(length_s),
            counted(all.len(), "moment"),
            seconds(SHORTEST_S)
        );
        return (LeakVerdict::TooEarly, reason);
    }
    let seen = all.last().map_or(0.0, |moment| moment.group.seen());
    if seen < FEWEST_SEEN && last.group.seen() < FEWEST_SEEN {
        return (
            LeakVerdict::TooEarly,
            format!("only {seen:.0} of its objects were seen; it takes {FEWEST_SEEN}"),
        );
    }
    if last.group.seen() < FEWEST_SEEN {
        let rare = match last.proven_at_s {
            None => "; there were fewer than two full collections: -d",
            Some(_) => "",
        };
        let reason = format!(
            "{seen:.0} of its objects were seen, but only {:.0} have gone through a full \
             collection since they are in generation 2 or a heap of large or pinned objects: the \
             others may be dead already{rare}",
            last.group.seen()
        );
        return (LeakVerdict::TooEarly, reason);
    }
    let (fewest, most) =
        (ObjectTurnover::at_least(half, last).kept(), ObjectTurnover::at_most(half, last).kept());
    let kept = || {
        let (fewest, most) = ((fewest * 100.0).round(), (most * 100.0).round());
        let share =
            if fewest < most { format!("between {fewest} and {most}") } else { format!("{most}") };
        format!(
            "of {:.0} seen alive at {}, {share} % still are at {}",
            late.before,
            since(half),
            since(last)
        )
    };
    if grows(early) && grows(late) {
        if late.kept() >= MOST_STAY {
            if let Some(RecentGrowth { within_s, came, expected }) =
                all.last().and_then(|now| slowed(half, last, now))
            {
                let reason = format!(
                    "it grew in both halves, but hardly does any more: {came:.0} came within the \
                     last {}, where {expected:.0} would have if it went on so",
                    seconds(within_s)
                );
                return (LeakVerdict::TooEarly, reason);
            }
            let reason = format!(
                "{:.0} more in the first half and {:.0} in the second, all through full \
                 collections; {}; the oldest are at least {} old. A cache that is emptied more \
                 rarely looks the same",
                early.growth(),
                late.growth(),
                kept(),
                seconds(last.group.oldest_s())
            );
            return (LeakVerdict::Leak, reason);
        }
        let but = match most < MOST_STAY {
            true => "but objects go, too",
            false => "and whether objects go, too, their ages do not tell",
        };
        return (LeakVerdict::TooEarly, format!("it grows, {but}: {}", kept()));
    }
    // A slow leak is hidden by chance in each half; in both, one after the other, chance seldom
    // looks like growth. What filled up and then grew by chance once more is none: a leak goes on
    // as it began.
    let may_grow = |change: ObjectTurnover| change.growth() > change.error();
    let goes_on = may_grow(early) && may_grow(late) && late.growth() >= early.growth() / 2.0;
    let most_growth = late.growth() + HALF_WIDTH_95 * late.error();
    if most_growth <= late.after() / 2.0 && !grows(late) && !goes_on {
        if most < MOST_STAY
            && let Some(OldObjectGrowth { older_s, was, is }) = piles_up(half, last)
        {
            let reason = format!(
                "about as many go as come, but those that stay become more: {was:.0} seen older \
                 than {} at {}, {is:.0} at {}",
                seconds(older_s),
                since(half),
                since(last)
            );
            return (LeakVerdict::TooEarly, reason);
        }
        if late.growth() <= -SURE * late.error() {
            return (LeakVerdict::Steady, format!("it shrinks; {}", kept()));
        }
        let replaced = if most < MOST_STAY { "about as many go as come: " } else { "" };
        let percent = (100.0 * most_growth / late.before.max(1.0)).max(0.0).ceil();
        let reason = format!(
            "{replaced}in the second half it grew by no more than {percent} %, if at all; {}",
            kept()
        );
        return (LeakVerdict::Steady, reason);
    }
    let reason = match (grows(early), grows(late)) {
        (true, _) => "it grew in the first half, and whether it still does cannot be told yet",
        (_, true) if half.proven_at_s.is_none() => {
            "it grows in the second half; in the first there were fewer than two full collections, \
             which alone would prove that"
        }
        (_, true) => "it has begun to grow in the second half",
        _ if goes_on => "it seems to grow in both halves, but so slowly that it may be chance",
        _ => "it seems to grow, but so few came that it may be chance",
    };
    (LeakVerdict::TooEarly, reason.to_owned())
}

/// What came at the end of the time, and how much would have, had growth gone on.
struct RecentGrowth {
    within_s: f64,
    came: f64,
    expected: f64,
}

/// What fills until shortly before the end (a cache that warms up, a pool) grows in both halves and
/// loses nothing, as a leak does; but there are hardly any young ones of it. `half` and `last` are
/// of what is proven, which none of them can be yet; `now` is all there is at the last moment. Ages
/// are known as powers of two. Objects may come in bursts, so not too short a time counts.
fn slowed(
    half: &SiteMoment<'_>,
    last: &SiteMoment<'_>,
    now: &SiteMoment<'_>,
) -> Option<RecentGrowth> {
    let half_s = last.at_s - half.at_s;
    let unit = now.group.stands_for().filter(|unit| *unit > 0.0).unwrap_or(1.0);
    let per_second = (last.group.told() - half.group.told()) / half_s / unit;
    let shortest = (half_s / 5.0).log2().ceil();
    let times = (0..3)
        .map(|more| 2f64.powf(shortest + f64::from(more)))
        .filter(|time| *time <= half_s * 2.0 / 3.0);
    let within_s = times
        .reduce(|time, longer| if per_second * time < FEWEST_EXPECTED { longer } else { time })?;
    let older = now.group.told_older(within_s, AgeCell::share_older);
    let (came, expected) = ((now.group.told() - older) / unit, per_second * within_s);
    let is_less = came < expected / 2.0 && came < expected - SURE * expected.sqrt();
    is_less.then_some(RecentGrowth { within_s, came, expected })
}

/// Of a cache that was refreshed hardly any is left of what was there in the middle of the time.
/// Where some stay, one in twenty and more, they may be what leaks among what comes and goes at the
/// same place. One or two of few are chance.
fn some_stay(since_half: ObjectTurnover) -> bool {
    let few = since_half.before / 20.0;
    since_half.stayed > few + 2.0 * few.sqrt()
}

/// How many are older than a time, at two moments.
struct OldObjectGrowth {
    older_s: f64,
    was: f64,
    is: f64,
}

/// Where most go and some stay for ever, the sum hardly grows for a long time, but those that are
/// old do.
fn piles_up(half: &SiteMoment<'_>, last: &SiteMoment<'_>) -> Option<OldObjectGrowth> {
    let older_s = ((last.at_s - half.at_s) / 2.0).log2().floor().exp2();
    let unit = unit(half, last);
    let older = |moment: &SiteMoment<'_>| {
        moment.group.told_older(older_s, AgeCell::share_surely_older) / unit
    };
    let (was, is) = (older(half), older(last));
    (is - was >= SURE * (was + is + 1.0).sqrt()).then_some(OldObjectGrowth { older_s, was, is })
}

/// Two moments, the earlier of which has lost nine in ten of its objects by the later, though there
/// are about as many: how many there were, and when; the latest such. Only of what a collection has
/// left alive: what dies at once is there until the next one, and is no cache. Nor is one what was
/// refreshed once and by now has grown far beyond what it was.
fn turnover(moments: &[SiteMoment<'_>]) -> Option<(f64, f64, f64)> {
    let kept: Vec<LiveGroup> = moments.iter().map(|moment| moment.group.survivors()).collect();
    let moments: Vec<SiteMoment<'_>> =
        moments.iter().zip(&kept).map(|(moment, group)| SiteMoment { group, ..*moment }).collect();
    let (middle_s, now) = (middle(&moments)?.at_s, moments.last()?.group.told());
    let most_until = |at_s: f64| {
        let until = moments.iter().take_while(|moment| moment.at_s <= at_s);
        until.map(|moment| moment.group.told()).fold(0.0, f64::max)
    };
    // As many seen are no fewer counted: without them there is no pair, and most places have too
    // few.
    let some =
        moments.iter().enumerate().rev().filter(|(_, first)| first.group.seen() >= FEWEST_SEEN);
    let (before, from_s, to_s) = some.into_iter().find_map(|(at, first)| {
        let later = moments.get(at + 1..).unwrap_or_default();
        later.iter().find_map(|last| {
            let change = ObjectTurnover::at_most(first, last);
            let replaced = change.came >= 0.3 * change.before;
            (change.before >= FEWEST_SEEN && change.kept() <= 0.1 && replaced).then_some((
                change.before,
                first.at_s,
                last.at_s,
            ))
        })
    })?;
    (now <= MOST_REFILLED * most_until(middle_s.max(to_s))).then_some((before, from_s, to_s))
}

/// A time for people: `75 s`, `12 min`.
#[must_use]
pub fn seconds(value: f64) -> String {
    match value {
        ..600.0 => format!("{value:.0} s"),
        ..36_000.0 => format!("{:.0} min", value / 60.0),
        _ => format!("{:.0} h", value / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::{FEW_COLLECTIONS, LeakVerdict, NOT_PROVEN, ONE_MOMENT, SiteMoment, judge};
    use crate::leaks::snapshot::{AgeCell, LiveGroup};

    /// What is seen of objects born at these seconds and alive at `now`, when so many can be
    /// watched at most.
    fn group(births: &[f64], now: f64, most: f64) -> LiveGroup {
        let seen = (most / births.len() as f64).min(1.0);
        let cell = |&born: &f64| {
            let age = now - born;
            let age_s = if age < 1.0 { 0.0 } else { 2f64.powf(age.log2().floor()) };
            // A full collection every 10 s.
            AgeCell {
                age_s,
                seen,
                objects: 100.0,
                bytes: 1e5,
                survived: true,
                proven: age >= 20.0,
                size: 0.0,
            }
        };
        LiveGroup { cells: births.iter().map(cell).collect(), stride: false }
    }

    fn moment(at_s: f64, group: &LiveGroup) -> SiteMoment<'_> {
        SiteMoment { at_s, proven_at_s: Some(at_s - 20.0), group }
    }

    fn verdict(until: f64, births: impl Fn(f64) -> Vec<f64>) -> (LeakVerdict, String) {
        verdict_of_most(f64::INFINITY, until, births)
    }

    fn verdict_of_most(
        most: f64,
        until: f64,
        births: impl Fn(f64) -> Vec<f64>,
    ) -> (LeakVerdict, String) {
        let mut groups = Vec::new();
        let mut now = 10.0;
        while now <= until {
            groups.push((now, group(&births(now), now, most)));
            now += 10.0;
        }
        let moments: Vec<SiteMoment<'_>> =
            groups.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
        let found = judge(&moments);
        (found.verdict, found.reason)
    }

    fn every(step: f64, from: f64, to: f64) -> Vec<f64> {
        let mut births = Vec::new();
        let mut at = from;
        while at < to {
            births.push(at);
            at += step;
        }
        births
    }

    #[test]
    fn a_leak_is_told_after_two_minutes_and_not_after_half_a_minute() {
        for step in [1.0, 0.1] {
            let leak = |now: f64| every(step, 0.0, now);
            assert_eq!(verdict(120.0, leak).0, LeakVerdict::Leak, "{:?}", verdict(120.0, leak));
            assert_eq!(verdict(30.0, leak).0, LeakVerdict::TooEarly);
        }
    }

    #[test]
    fn a_cache_is_told_from_a_leak_once_it_was_refreshed() {
        for period in [3.7, 27.0, 43.0] {
            let cache = |now: f64| every(0.05, (now / period).floor() * period, now);
            assert_eq!(
                verdict(120.0, cache).0,
                LeakVerdict::Refreshed,
                "{period}: {:?}",
                verdict(120.0, cache)
            );
        }
        // All at once, and long after.
        let cache = |now: f64| vec![(now / 30.0).floor() * 30.0; 50];
        assert_eq!(verdict(120.0, cache).0, LeakVerdict::Refreshed, "{:?}", verdict(120.0, cache));
    }

    #[test]
    fn what_leaks_among_what_comes_and_goes_is_neither_a_cache_nor_steady() {
        // Each lives for ten seconds, but one in so many for ever.
        for (rate, one_in) in [(500.0, 50), (300.0, 30), (100.0, 20), (50.0, 10)] {
            let sessions = |now: f64| {
                let all = every(1.0 / rate, 0.0, now).into_iter().enumerate();
                let alive = all.filter(|(n, born)| n % one_in == 0 || *born > now - 10.0);
                alive.map(|(_, born)| born).collect()
            };
            for most in [f64::INFINITY, 500.0] {
                for until in [120.0, 300.0] {
                    let (found, reason) = verdict_of_most(most, until, sessions);
                    let is_told = matches!(found, LeakVerdict::TooEarly | LeakVerdict::Leak);
                    assert!(is_told, "{rate} {most} {until}: {found}: {reason}");
                }
            }
        }
        // Without those that stay it is what it is.
        let queue = |now: f64| every(0.01, now - 10.0, now);
        for until in [120.0, 300.0] {
            let (found, reason) = verdict(until, queue);
            assert!(
                matches!(
                    found,
                    LeakVerdict::Refreshed | LeakVerdict::Steady | LeakVerdict::TooEarly
                ),
                "{found}: {reason}"
            );
        }
    }

    #[test]
    fn a_cache_that_nobody_empties_any_more_is_none() {
        for (period, ends, until) in
            [(40.0, 400.0, 600.0), (40.0, 80.0, 120.0), (40.0, 2400.0, 3600.0)]
        {
            let cache = |now: f64| {
                let begun =
                    if now < ends { (now / period).floor() * period } else { ends - period };
                every(1.0, begun, now)
            };
            let (found, reason) = verdict(until, cache);
            assert_eq!(found, LeakVerdict::TooEarly, "{reason}");
            assert!(reason.contains("has begun to grow in the second half"), "{reason}");
            // Until then it was one, and the reason is of its last time.
            let (found, reason) = verdict(ends - period / 2.0, cache);
            assert_eq!(found, LeakVerdict::Refreshed, "{reason}");
            assert!(ends < 200.0 || !reason.contains(" at 0 s"), "{reason}");
        }
    }

    #[test]
    fn a_pool_is_steady_and_so_is_what_comes_and_goes() {
        let pool = |_: f64| vec![0.0; 50];
        assert_eq!(verdict(120.0, pool).0, LeakVerdict::Steady, "{:?}", verdict(120.0, pool));
        // Each second one, and each lives for 70 s.
        let queue = |now: f64| every(0.5, (now - 70.0).max(-70.0), now);
        assert_ne!(verdict(120.0, queue).0, LeakVerdict::Leak, "{:?}", verdict(120.0, queue));
    }

    #[test]
    fn a_leak_stays_one_when_more_is_alive_than_can_be_watched() {
        for step in [0.5, 0.05, 0.01] {
            for until in [120.0, 600.0] {
                let leak = |now: f64| every(step, 0.0, now);
                let found = verdict_of_most(100.0, until, leak);
                assert_eq!(found.0, LeakVerdict::Leak, "{step}, {until}: {found:?}");
                let pool = |_: f64| vec![0.0; 5000];
                assert_eq!(verdict_of_most(100.0, until, pool).0, LeakVerdict::Steady);
            }
        }
        let cache = |now: f64| every(0.01, (now / 27.0).floor() * 27.0, now);
        assert_eq!(verdict_of_most(100.0, 120.0, cache).0, LeakVerdict::Refreshed);
    }

    /// Of 160 objects more and more are seen: there is room again for a greater share.
    #[test]
    fn a_pool_of_which_a_greater_share_is_watched_than_before_is_no_leak() {
        let pool = vec![0.0; 160];
        let looks: Vec<(f64, LiveGroup)> = (1..=12)
            .map(|look| {
                (
                    f64::from(look) * 10.0,
                    group(&pool, f64::from(look) * 10.0, 4.0 + 6.0 * f64::from(look)),
                )
            })
            .collect();
        let moments: Vec<SiteMoment<'_>> =
            looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
        let found = judge(&moments);
        assert_eq!(found.verdict, LeakVerdict::Steady, "{found:?}");
        assert!(found.trend.as_ref().unwrap().per_second.abs() < 1.0, "{found:?}");
        // Half of them are others by then, which alone are seen more often.
        let replaced = |now: f64, share: f64| {
            let mut group = group(&pool, now, f64::INFINITY);
            for (at, cell) in group.cells.iter_mut().enumerate() {
                (cell.age_s, cell.seen) = if at % 2 == 0 { (32.0, share) } else { (128.0, 0.0625) };
            }
            group
        };
        let looks = [(0.0, 0.0625), (40.0, 0.3), (80.0, 0.9), (120.0, 0.9)];
        let looks = looks.map(|(now, share)| (now, replaced(now, share)));
        let moments: Vec<SiteMoment<'_>> =
            looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
        let found = judge(&moments);
        assert_ne!(found.verdict, LeakVerdict::Leak, "{found:?}");
        assert!(found.trend.as_ref().unwrap().per_second.abs() < 1.0, "{found:?}");
    }

    #[test]
    fn objects_of_another_size_do_not_change_what_share_is_watched() {
        // A hundred of 64 KB stay, and one of 24 bytes, which stands for thousands, comes and goes.
        let large = |age_s| AgeCell {
            age_s,
            seen: 1.0,
            objects: 2.1,
            bytes: 2.1 * 65_536.0,
            survived: true,
            proven: true,
            size: 0.0,
        };
        let small = AgeCell { age_s: 16.0, objects: 4_267.0, bytes: 102_408.0, ..large(0.0) };
        let looks = [10.0, 40.0, 65.0, 90.0, 120.0].map(|now| {
            let mut cells = vec![large(128.0); 100];
            cells.extend((now != 65.0).then_some(small));
            (now, LiveGroup { cells, stride: false })
        });
        let moments: Vec<SiteMoment<'_>> =
            looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
        let found = judge(&moments);
        assert_eq!(found.verdict, LeakVerdict::Steady, "{found:?}");
    }

    #[test]
    fn what_grows_slowly_in_both_halves_is_not_called_steady() {
        for there in [12, 1000] {
            let slow = |now: f64| {
                let mut births = vec![-100.0; there];
                births.extend(every(10.0, 0.0, now));
                births
            };
            let (found, reason) = verdict(120.0, slow);
            assert_eq!(found, LeakVerdict::TooEarly, "{there}: {reason}");
            assert!(reason.contains("in both halves"), "{there}: {reason}");
        }
        // It filled up, and is what it is.
        let (found, reason) = verdict(120.0, |now| every(0.5, 0.0, now.min(25.0)));
        assert_eq!(found, LeakVerdict::Steady, "{reason}");
        assert!(
            reason.starts_with("in the second half it grew by no more than 4 %, if at all; of 50 "),
            "{reason}"
        );
    }

    #[test]
    fn what_has_just_filled_up_is_no_leak() {
        for filled in [70.0, 80.0, 90.0, 100.0] {
            let (found, reason) = verdict(120.0, |now| every(0.1, 0.0, now.min(filled)));
            assert_ne!(found, LeakVerdict::Leak, "{filled}: {reason}");
        }
        let (_, reason) = verdict(120.0, |now| every(0.1, 0.0, now.min(100.0)));
        assert!(reason.contains("hardly does any more: 0 came within the last 16 s"), "{reason}");
        // Ten every ten seconds: it goes on.
        let (found, reason) = verdict(120.0, |now| {
            every(1.0, 0.0, now).iter().map(|at| (at / 10.0).floor() * 10.0).collect()
        });
        assert_eq!(found, LeakVerdict::Leak, "{reason}");
    }

    #[test]
    fn that_objects_went_is_said_where_their_ages_prove_it() {
        // More each time; 40 s old at most, or perhaps as old as the half.
        let queue = |oldest_s: f64| {
            let looks: Vec<(f64, LiveGroup)> = (1..=12)
                .map(|look| f64::from(look) * 10.0)
                .map(|now| {
                    let cell = AgeCell {
                        age_s: oldest_s,
                        seen: 1.0,
                        objects: 100.0,
                        bytes: 1e5,
                        survived: true,
                        proven: true,
                        size: 0.0,
                    };
                    (now, LiveGroup { cells: vec![cell; (now * 5.0) as usize], stride: false })
                })
                .collect();
            let moments: Vec<SiteMoment<'_>> =
                looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
            let found = judge(&moments);
            (found.verdict, found.reason)
        };
        let (found, reason) = queue(16.0);
        assert_eq!(found, LeakVerdict::TooEarly);
        assert!(
            reason.starts_with("it grows, but objects go, too: of ")
                && reason.contains(", 0 % still are"),
            "{reason}"
        );
        let (found, reason) = queue(32.0);
        assert_eq!(found, LeakVerdict::TooEarly);
        assert!(
            reason.starts_with("it grows, and whether objects go")
                && reason.contains("between 0 and 100 %"),
            "{reason}"
        );
    }

    #[test]
    fn what_was_there_for_a_moment_only_is_not_spoken_of() {
        let births: Vec<f64> = (0..50).map(|_| 0.0).collect();
        let (some, none) = (group(&births, 20.0, f64::INFINITY), LiveGroup::default());
        let moments = [(20.0, &some), (30.0, &some), (60.0, &none), (90.0, &none), (120.0, &none)];
        let moments = moments.map(|(at_s, group)| SiteMoment { at_s, proven_at_s: None, group });
        let found = judge(&moments);
        assert!(found.minor && found.verdict == LeakVerdict::TooEarly, "{found:?}");
        let found = judge(&moments[..2]);
        assert!(!found.minor, "{found:?}");
    }

    #[test]
    fn garbage_that_no_collection_has_looked_at_is_no_cache() {
        // A thousand die at once and are there until the next collection; one in three hundred
        // happens to be in use when it comes.
        let looks: Vec<(f64, LiveGroup)> = (1..=24)
            .map(|look| f64::from(look) * 5.0)
            .map(|now| {
                let mut group = group(&every(0.005, now - 5.0, now), now, f64::INFINITY);
                for (at, cell) in group.cells.iter_mut().enumerate() {
                    (cell.survived, cell.proven) = (at % 300 == 0, false);
                }
                (now, group)
            })
            .collect();
        let moments: Vec<SiteMoment<'_>> =
            looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
        let found = judge(&moments);
        assert!(found.minor && found.verdict == LeakVerdict::TooEarly, "{found:?}");
        assert_eq!(found.trend, Err(NOT_PROVEN));
    }

    #[test]
    fn a_trend_takes_two_moments_and_its_interval_chance() {
        let looks =
            [60.0, 120.0].map(|now| (now, group(&every(1.0, 0.0, now), now, f64::INFINITY)));
        let trend = |looks: &[(f64, LiveGroup)]| {
            let moments: Vec<SiteMoment<'_>> =
                looks.iter().map(|(at_s, group)| moment(*at_s, group)).collect();
            judge(&moments).trend
        };
        // An object of 100 kB a second, of which those of the last 20 s are not counted yet.
        let by_chance = trend(&looks).unwrap();
        assert!((by_chance.per_second / 1e5 - 1.0).abs() < 0.05, "{by_chance:?}");
        assert!(by_chance.interval.is_some_and(|interval| interval.holds(1e5)), "{by_chance:?}");
        let by_stride =
            trend(&looks.clone().map(|(at_s, group)| (at_s, LiveGroup { stride: true, ..group })));
        assert_eq!(by_stride, Ok(super::GrowthRate { interval: None, ..by_chance }));
        assert_eq!(trend(&looks[1..]), Err(ONE_MOMENT));
        assert_eq!(trend(&[]), Err(ONE_MOMENT));
        // All of it went.
        let gone = trend(&[looks[1].clone(), (180.0, LiveGroup::default())]).unwrap();
        assert!(
            gone.per_second < 0.0 && gone.interval.is_some_and(|interval| interval.high < 0.0),
            "{gone:?}"
        );
    }

    #[test]
    fn a_trend_is_that_of_the_time_between_collections() {
        // An object of 100 kB a second, and full collections that come seldom.
        let found = |full: &[f64]| {
            let looks: Vec<(f64, Option<f64>, LiveGroup)> = (1..=26)
                .map(|look| f64::from(look) * 5.0)
                .map(|now| {
                    let begun: Vec<f64> = full.iter().copied().filter(|at| *at <= now).collect();
                    let proven_at_s = begun.len().checked_sub(2).map(|at| begun[at]);
                    let births = every(1.0, 0.0, now);
                    let mut group = group(&births, now, f64::INFINITY);
                    for (cell, born) in group.cells.iter_mut().zip(&births) {
                        cell.proven = proven_at_s.is_some_and(|at| *born < at);
                    }
                    (now, proven_at_s, group)
                })
                .collect();
            let moments = looks.iter().map(|(at_s, proven_at_s, group)| SiteMoment {
                at_s: *at_s,
                proven_at_s: *proven_at_s,
                group,
            });
            judge(&moments.collect::<Vec<_>>())
        };
        let trend = |full: &[f64]| found(full).trend;
        let late = found(&[70.0, 80.0, 100.0]);
        assert!(late.reason.contains("fewer than two full collections"), "{late:?}");
        for full in [
            &[10.0, 40.0, 75.0, 110.0][..],
            &[1.0, 20.0, 66.0],
            &[70.0, 80.0, 100.0],
            &[5.0, 64.0, 66.0],
        ] {
            let rate = trend(full).unwrap();
            assert!((rate.per_second / 1e5 - 1.0).abs() < 0.06, "{full:?}: {rate:?}");
            assert!(
                rate.interval.is_some_and(|interval| interval.holds(1e5)),
                "{full:?}: {rate:?}"
            );
        }
        for full in [&[10.0][..], &[10.0, 60.0], &[10.0, 70.0], &[]] {
            assert_eq!(trend(full), Err(FEW_COLLECTIONS), "{full:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        assert_eq!(verdict(120.0, |_| vec![0.0; 3]).0, LeakVerdict::TooEarly);
        let garbage = |now: f64| every(0.01, now - 5.0, now);
        assert_ne!(verdict(120.0, garbage).0, LeakVerdict::Leak);
        assert_eq!(judge(&[]).verdict, LeakVerdict::TooEarly);
    }
}
