//! What holds objects that weak handles watch: a survey for those few, of which `perfusion leaks` has seen where they were made.

use super::collect::{Settings, survey, unless_interrupted};
use super::paths::{self, Paths};
use super::{check_surveyable, declared, notes, pause};
use crate::attach::target::Target;
use crate::error::Error;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Memory for the survey, and for the runtime's buffer, MiB, unless told otherwise.
pub const MEMORY_MIB: u32 = 1024;
/// See [`MEMORY_MIB`].
pub const BUFFER_MIB: u32 = 256;

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// What the survey cost, and what it lacks, for people.
    pub notes: Vec<String>,
    /// By handle, the number of the way in which its object is held. An object that died meanwhile has none.
    way_of: HashMap<u64, u32>,
    /// Ways from a root on by their numbers.
    ways: HashMap<u32, Vec<String>>,
}

/// In how many objects are held alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Way {
    /// So many.
    pub objects: usize,
    /// The steps, from a root on.
    pub steps: Vec<String>,
}

impl Held {
    /// The ways in which the objects of these handles are held, most objects first.
    #[must_use]
    pub fn ways(&self, handles: &[u64]) -> Vec<Way> {
        let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
        for number in handles.iter().filter_map(|handle| self.way_of.get(handle)) {
            *counts.entry(*number).or_default() += 1;
        }
        let way = |(number, objects): (u32, usize)| Way {
            objects,
            steps: self.ways.get(&number).cloned().unwrap_or_default(),
        };
        let mut ways: Vec<Way> = counts.into_iter().map(way).collect();
        ways.sort_by(|a, b| b.objects.cmp(&a.objects).then_with(|| a.steps.cmp(&b.steps)));
        ways
    }
}

/// Surveys the heap, which pauses the process for a full collection and a walk. Raising `interrupted` ends it early.
///
/// # Errors
/// When the runtime cannot be asked, or does not answer.
pub fn find(target: &Arc<Target>, handles: HashSet<u64>, interrupted: &AtomicBool) -> Result<Held, Error> {
    check_surveyable(target, &target.comm().unwrap_or_default())?;
    let limit_bytes = usize::try_from(MEMORY_MIB).unwrap_or(usize::MAX).saturating_mul(1 << 20);
    let settings = Settings { limit_bytes, buffer_mib: BUFFER_MIB, handles: Arc::new(handles) };
    let mut survey = survey(target, &settings, interrupted, &mut |_| {})?;
    declared::complete_names(target, &mut survey, limit_bytes);
    unless_interrupted(target.pid(), interrupted)?;
    let mut held = Held { notes: vec![pause(&survey)], ..Held::default() };
    held.notes.extend(notes(&survey));
    let Ok(graph) = &survey.graph else { return Ok(held) };
    let needed =
        paths::bytes_needed(graph).saturating_add(graph.bytes()).saturating_add(survey.bytes_beside());
    if needed > limit_bytes {
        held.notes.push(format!(
            "what holds the objects is left out: that takes {} MiB of {MEMORY_MIB}; `perfusion heap --memory` has more",
            needed >> 20
        ));
        return Ok(held);
    }
    let (handles, objects): (Vec<u64>, Vec<u32>) = survey.watched.iter().copied().unzip();
    let (paths, nodes) = Paths::find_with(graph, &survey.roots, &objects);
    for (handle, node) in handles.into_iter().zip(nodes) {
        held.way_of.insert(handle, node);
        held.ways
            .entry(node)
            .or_insert_with(|| paths.way(node).iter().map(|&step| survey.step_name(step)).collect());
    }
    Ok(held)
}
