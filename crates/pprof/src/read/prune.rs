//! `drop_frames` and `keep_frames`: frames below the function that a person asked for, an
//! allocator's for example, which tools leave out (`profile/prune.go`). The leaf end of a stack
//! goes from the outermost frame on that is to be dropped, but never down to its root.

use super::ReadProfile;
use super::expression::translated;
use crate::proto::Profile;
use perfusion_model::text::clean;
use perfusion_model::units::counted;
use regex::{Regex, RegexBuilder};
use std::collections::{HashMap, HashSet};

/// Most memory that an expression of a file may take.
const MAX_EXPRESSION_BYTES: usize = 4 << 20;

/// Drops what the profile wants dropped, and says so.
pub(super) fn prune(reading: &mut ReadProfile) {
    let ReadProfile { profile, remarks } = reading;
    let (drop, keep) = (text(profile, profile.drop_frames), text(profile, profile.keep_frames));
    if drop.is_empty() {
        return;
    }
    let (drop_shown, keep_shown) = (clean(drop).into_owned(), clean(keep).into_owned());
    let drop = compile("drop_frames", drop);
    let keep = if keep.is_empty() { Ok(None) } else { compile("keep_frames", keep).map(Some) };
    let (drop, keep) = match (drop, keep) {
        (Ok(drop), Ok(keep)) => (drop, keep),
        (drop, keep) => {
            remarks.extend([drop.err(), keep.err()].into_iter().flatten());
            return;
        }
    };
    let shortened = apply(profile, &drop, keep.as_ref());
    if shortened > 0 {
        let kept = if keep_shown.is_empty() {
            String::new()
        } else {
            format!(", keep_frames `{keep_shown}`")
        };
        remarks.push(format!(
            "the innermost frames of {shortened} of {} are not shown, as the profile asks: \
             drop_frames `{drop_shown}`{kept}",
            counted(profile.sample.len(), "stack")
        ));
    }
}

/// The error is a remark.
fn compile(field: &str, expression: &str) -> Result<Regex, String> {
    // pprof wraps it before it reads it: a quotation without an end takes the bracket in.
    regex(&format!("^({expression})$")).map_err(|why| {
        format!(
            "{field} `{}` is no regular expression that can be used ({why}): nothing is dropped",
            clean(expression)
        )
    })
}

/// A regular expression as pprof reads it.
///
/// # Errors
/// What is wrong with it.
pub fn regex(expression: &str) -> Result<Regex, String> {
    let built = RegexBuilder::new(&translated(expression))
        .size_limit(MAX_EXPRESSION_BYTES)
        .dfa_size_limit(MAX_EXPRESSION_BYTES)
        .build();
    built.map_err(|error| {
        // The lines above the last one show the place in the translated expression.
        let error = error.to_string();
        let why = error.lines().last().unwrap_or_default();
        clean(why.strip_prefix("error: ").unwrap_or(why)).into_owned()
    })
}

/// Answers how many stacks became shorter.
fn apply(profile: &mut Profile, drop: &Regex, keep: Option<&Regex>) -> usize {
    let is_dropped = |name: &str| {
        let name = simplified(name);
        drop.is_match(name) && keep.is_none_or(|keep| !keep.is_match(name))
    };
    let names = profile.function.iter().map(|function| {
        let name = text(profile, function.name);
        (function.id, !name.is_empty() && is_dropped(name))
    });
    let dropped: HashMap<u64, bool> = names.collect();
    // Locations that go, and those of which the inlined frames go.
    let (mut whole, mut inlined) = (HashSet::new(), HashSet::new());
    for location in &mut profile.location {
        let is_dropped = |id: u64| dropped.get(&id).copied().unwrap_or(false);
        match location.line.iter().rposition(|line| is_dropped(line.function_id)) {
            Some(at) if at + 1 == location.line.len() => {
                whole.insert(location.id);
            }
            Some(at) => {
                inlined.insert(location.id);
                location.line.drain(..=at);
            }
            None => {}
        }
    }
    let mut shortened = 0;
    for sample in &mut profile.sample {
        let mut has_user = false;
        let cut = sample.location_id.iter().enumerate().rev().find_map(|(at, id)| {
            let (is_whole, is_inlined) = (whole.contains(id), inlined.contains(id));
            let is_dropped = is_whole || is_inlined;
            has_user |= !is_dropped;
            (is_dropped && has_user).then_some(if is_whole { at + 1 } else { at })
        });
        let is_shortened = sample.location_id.iter().any(|id| inlined.contains(id));
        if let Some(cut) = cut {
            sample.location_id.drain(..cut);
        }
        shortened += usize::from(is_shortened || cut.is_some_and(|cut| cut > 0));
    }
    shortened
}

/// A name without its parameters.
fn simplified(name: &str) -> &str {
    const RESERVED: [&str; 2] = ["(anonymous namespace)", "operator()"];
    let name = name.strip_prefix('.').unwrap_or(name);
    let mut at = 0;
    while let Some(rest) = name.get(at..) {
        let reserved =
            RESERVED.iter().filter_map(|word| Some((rest.find(word)?, word.len()))).min();
        match (rest.find('('), reserved) {
            (Some(bracket), Some((from, len))) if from <= bracket => at += from + len,
            (Some(bracket), _) => return name.get(..at + bracket).unwrap_or(name),
            (None, _) => break,
        }
    }
    name
}

fn text(profile: &Profile, index: i64) -> &str {
    let text = usize::try_from(index).ok().and_then(|index| profile.string_table.get(index));
    text.map_or("", String::as_str)
}
