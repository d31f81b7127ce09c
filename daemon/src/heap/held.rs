//! What holds objects that weak handles watch: a survey for those few, of which `perfusion leaks` has seen where they were made.

use super::collect::{Settings, SurveyError, planned, survey, unless_interrupted};
use super::paths::{self, Named, Paths};
use super::telling::Telling;
use super::walk::Survey;
use super::{check_surveyable, declared, in_all, notes, of_mib, pause};
use crate::cli;
use crate::error::Error;
use perfusion_host::process::handle::Target;
use perfusion_host::process::name;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What was found.
#[derive(Debug)]
pub struct Held {
    survey: Survey,
    paths: Paths,
    /// By handle the node at which its object ends. An object that died meanwhile has none.
    nodes: HashMap<u64, u32>,
}

/// In how many objects are held alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// So many.
    pub objects: usize,
    node: u32,
}

impl Held {
    /// What the survey cost, and what it lacks, for people.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        [vec![pause(&self.survey)], notes(&self.survey)].concat()
    }

    /// True when the survey has met what the handle watches: it lives.
    #[must_use]
    pub fn has(&self, handle: u64) -> bool {
        self.nodes.contains_key(&handle)
    }

    /// The ways in which the objects of these handles are held, most objects first.
    #[must_use]
    pub fn ways(&self, handles: &[u64]) -> Vec<Way> {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for node in handles.iter().filter_map(|handle| self.nodes.get(handle)) {
            *counts.entry(*node).or_default() += 1;
        }
        let mut ways: Vec<Way> = counts.into_iter().map(|(node, objects)| Way { objects, node }).collect();
        ways.sort_by_key(|way| (std::cmp::Reverse(way.objects), way.node));
        ways
    }

    /// All living objects of the types of this name, and their bytes: counted, not estimated.
    #[must_use]
    pub fn of_type(&self, name: &str) -> (u64, u64) {
        let all = (0..).zip(&self.survey.types).filter(|(_, of)| of.objects > 0);
        all.filter(|(number, _)| self.survey.type_name(*number) == name)
            .fold((0, 0), |(objects, bytes), (_, of)| {
                (of.objects.saturating_add(objects), of.bytes.saturating_add(bytes))
            })
    }

    /// The steps of a way, from a root on.
    #[must_use]
    pub fn steps(&self, way: Way) -> Vec<Named<'_>> {
        self.paths.way(way.node).into_iter().map(|step| Named(&self.survey, step)).collect()
    }

    fn of(survey: Survey, limit_bytes: usize) -> Result<Self, String> {
        let graph = survey.graph.as_ref().map_err(ToString::to_string)?;
        let needed = in_all(&survey, graph, paths::bytes_needed(graph));
        if needed > limit_bytes {
            return Err(format!("that takes {} MiB of {} (--memory)", needed >> 20, limit_bytes >> 20));
        }
        let (handles, objects): (Vec<u64>, Vec<u32>) = survey.watched.iter().copied().unzip();
        let (paths, nodes) = Paths::find_with(graph, &survey.roots, &survey.lists(), &objects);
        let nodes = handles.into_iter().zip(nodes).collect();
        Ok(Self { survey, paths, nodes })
    }
}

/// How to survey.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most memory for the survey, MiB.
    pub memory_mib: u32,
    /// Most memory for the runtime's buffer, MiB.
    pub buffer_mib: u32,
    /// True to go on where the process has too little memory left.
    pub force: bool,
}

impl From<&cli::Leaks> for Bounds {
    fn from(options: &cli::Leaks) -> Self {
        Self { memory_mib: options.memory, buffer_mib: options.buffer, force: options.force }
    }
}

/// Refuses a process that has too little memory left for a survey.
///
/// # Errors
/// [`SurveyError::NoHeadroom`].
pub fn check_headroom(target: &Target, bounds: Bounds) -> Result<(), SurveyError> {
    planned(target, bounds.buffer_mib, bounds.force).map(drop)
}

/// Surveys the heap, which pauses the process for a full collection and a walk. `say` is told what is asked and what is seen, and `walked` is
/// raised when the walk is over. Raising `interrupted` ends it early.
///
/// # Errors
/// Why it is not known, for people: the runtime cannot be asked, or does not answer, or there is no room for what it tells.
pub fn find(
    target: &Arc<Target>,
    handles: HashSet<u64>,
    bounds: Bounds,
    (interrupted, walked): (&Arc<AtomicBool>, Arc<AtomicBool>),
    say: impl Fn(&str),
) -> Result<Held, String> {
    let said = |error: Error| error.to_string();
    let name = name::of(target);
    check_surveyable(target, &name).map_err(said)?;
    let plan = planned(target, bounds.buffer_mib, bounds.force).map_err(|error| error.to_string())?;
    plan.note.iter().for_each(|note| say(note));
    let mut telling = Telling::begin(target.pid(), &name, say);
    let limit_bytes = of_mib(bounds.memory_mib);
    let settings = Settings { limit_bytes, plan, handles: Arc::new(handles), walked };
    let survey = survey(target, &settings, interrupted, &mut |progress| telling.see(progress));
    let mut survey = survey.map_err(|error| error.to_string())?;
    declared::complete_names(target, &mut survey, limit_bytes);
    unless_interrupted(target.pid(), interrupted).map_err(|error| error.to_string())?;
    Held::of(survey, limit_bytes)
}

#[cfg(test)]
mod tests {
    use super::Held;
    use crate::heap::graph::NoGraph;
    use crate::heap::walk::tests::small;

    #[test]
    fn objects_that_are_held_alike_are_one_way_and_the_dead_have_none() {
        let mut survey = small(0);
        // Two handles watch the object that a static field holds, one what that holds, and one what nobody does.
        survey.watched = vec![(0x10, 0), (0x18, 0), (0x20, 1), (0x28, 3)];
        let held = Held::of(survey, 1 << 20).unwrap();
        let shown = |handles: &[u64]| {
            let shown = |way| held.steps(way).iter().map(ToString::to_string).collect::<Vec<_>>().join(" > ");
            held.ways(handles).into_iter().map(|way| (way.objects, shown(way))).collect::<Vec<_>>()
        };
        let field = "static field cache > Shop.Cache";
        assert_eq!(
            shown(&[0x20, 0x10, 0x18, 0x99]),
            [(2, field.to_owned()), (1, format!("{field} > string"))]
        );
        assert_eq!(shown(&[0x28]), [(1, "[not reached from a root] > [type without a name]".to_owned())]);
        assert!(shown(&[0x99]).is_empty());
    }

    #[test]
    fn what_is_not_known_says_why() {
        let why = |survey, limit| Held::of(survey, limit).unwrap_err();
        assert!(why(small(3), 1 << 20).contains("3 events of the walk are missing"));
        assert!(why(small(0), 1).contains("that takes 0 MiB"));
        let mut wide = small(0);
        wide.graph = Err(NoGraph::Wide);
        assert!(why(wide, 1 << 20).contains("32 GiB"));
    }
}
