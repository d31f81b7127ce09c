//! What holds objects that weak handles watch: a survey for those few.

use crate::graph::{Graph, NoGraph};
use crate::paths::{self, NamedStep, RetentionPaths};
use crate::walk::HeapSurvey;
use perfusion_dotnet::types::RuntimeType;
use perfusion_model::units::counted;
use std::collections::HashMap;

/// What was found.
#[derive(Debug)]
pub struct RetainedObjects {
    /// All that was found.
    pub survey: HeapSurvey,
    paths: RetentionPaths,
    /// By handle the node at which its object ends. An object that died meanwhile has none.
    nodes: HashMap<u64, u32>,
}

/// In how many objects are held alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionPath {
    /// So many.
    pub objects: usize,
    node: u32,
}

impl RetainedObjects {
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
    pub fn ways(&self, handles: &[u64]) -> Vec<RetentionPath> {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        for node in handles.iter().filter_map(|handle| self.nodes.get(handle)) {
            *counts.entry(*node).or_default() += 1;
        }
        let mut ways: Vec<RetentionPath> =
            counts.into_iter().map(|(node, objects)| RetentionPath { objects, node }).collect();
        ways.sort_by_key(|way| (std::cmp::Reverse(way.objects), way.node));
        ways
    }

    /// All living objects of the types of this name, and their bytes: counted, not estimated.
    #[must_use]
    pub fn of_type(&self, name: &str) -> (u64, u64) {
        let all = (0..).zip(&self.survey.types).filter(|(_, of)| of.objects > 0);
        all.filter(|(number, _)| self.survey.type_name(*number) == name).fold(
            (0, 0),
            |(objects, bytes), (_, of)| {
                (of.objects.saturating_add(objects), of.bytes.saturating_add(bytes))
            },
        )
    }

    /// The steps of a way, from a root on.
    #[must_use]
    pub fn steps(&self, way: RetentionPath) -> Vec<NamedStep<'_>> {
        self.paths.way(way.node).into_iter().map(|step| NamedStep(&self.survey, step)).collect()
    }

    /// Works it out of a survey.
    ///
    /// # Errors
    /// There is no graph, or no memory for the paths.
    pub fn of(survey: HeapSurvey, limit_bytes: usize) -> Result<Self, String> {
        let graph = survey.graph.as_ref().map_err(ToString::to_string)?;
        let needed = in_all(&survey, graph, paths::bytes_needed(graph));
        if needed > limit_bytes {
            return Err(format!(
                "that takes {} MiB of {} (--memory)",
                needed >> 20,
                limit_bytes >> 20
            ));
        }
        let (handles, objects): (Vec<u64>, Vec<u32>) = survey.watched.iter().copied().unzip();
        let (paths, nodes) =
            RetentionPaths::find_with(graph, &survey.roots, &survey.lists(), &objects);
        let nodes = handles.into_iter().zip(nodes).collect();
        Ok(Self { survey, paths, nodes })
    }
}

/// Bytes of all that is kept, while so many more are needed.
pub fn in_all(survey: &HeapSurvey, graph: &Graph, needed: usize) -> usize {
    needed.saturating_add(graph.bytes()).saturating_add(survey.bytes_beside())
}

/// How long the process stood still for it, for people.
#[must_use]
pub fn pause(survey: &HeapSurvey) -> String {
    let again = match survey.collections {
        several @ 2.. => format!(
            " by {several} collections: up to .NET 9 the runtime collects again when the survey \
             ends, and the app may have done so itself"
        ),
        _ => String::new(),
    };
    format!("the app was paused for {:.3} s{again}", survey.pause.as_secs_f64())
}

/// What the survey lacks.
pub fn notes(survey: &HeapSurvey) -> Vec<String> {
    let mut notes = Vec::new();
    let is_told = matches!(survey.graph, Err(NoGraph::Lost { .. }));
    if let Err(why) = &survey.graph {
        notes.push(why.to_string());
    }
    if survey.lost > 0 && !is_told {
        let what = if survey.graph.is_ok() {
            "some types may have no name, some roots be left out, and the last objects of the walk \
             not be counted"
        } else {
            "objects are not counted, and types may have no name (a larger --buffer may help)"
        };
        notes.push(format!("{} of the runtime missing: {what}", counted(survey.lost, "event")));
    }
    let unnamed = |of: &&RuntimeType| of.objects > 0 && of.name.is_empty();
    // The first takes what there is no room to tell apart.
    if let Some(rest) = survey.types.first().filter(|rest| rest.objects > 0) {
        notes.push(format!(
            "{} of more types than there is room for have none of their own (--memory)",
            counted(rest.objects, "object")
        ));
    }
    let others = survey
        .types
        .iter()
        .skip(1)
        .filter(unnamed)
        .map(|of| of.objects)
        .fold(0, u64::saturating_add);
    if others > 0 {
        notes.push(format!(
            "{} of types without a name: the runtime tells names to one survey at a time, and \
             another one was going on, or there is no room for names (--memory)",
            counted(others, "object")
        ));
    }
    if survey.malformed > 0 {
        notes.push(format!("{} events of the walk are not as they should be", survey.malformed));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::{NoGraph, RetainedObjects};

    use crate::walk::tests::small;

    #[test]
    fn objects_that_are_held_alike_are_one_way_and_the_dead_have_none() {
        let mut survey = small(0);
        // Two handles watch the object that a static field holds, one what that holds, and one what
        // nobody does.
        survey.watched = vec![(0x10, 0), (0x18, 0), (0x20, 1), (0x28, 3)];
        let held = RetainedObjects::of(survey, 1 << 20).unwrap();
        let shown = |handles: &[u64]| {
            let shown = |way| {
                held.steps(way).iter().map(ToString::to_string).collect::<Vec<_>>().join(" > ")
            };
            held.ways(handles).into_iter().map(|way| (way.objects, shown(way))).collect::<Vec<_>>()
        };
        let field = "static field cache > Shop.Cache";
        assert_eq!(
            shown(&[0x20, 0x10, 0x18, 0x99]),
            [(2, field.to_owned()), (1, format!("{field} > string"))]
        );
        assert_eq!(
            shown(&[0x28]),
            [(1, "[not reached from a root] > [type without a name]".to_owned())]
        );
        assert!(shown(&[0x99]).is_empty());
    }

    #[test]
    fn what_is_not_known_says_why() {
        let why = |survey, limit| RetainedObjects::of(survey, limit).unwrap_err();
        assert!(why(small(3), 1 << 20).contains("3 events of the walk are missing"));
        assert!(why(small(0), 1).contains("that takes 0 MiB"));
        let mut wide = small(0);
        wide.graph = Err(NoGraph::Wide);
        assert!(why(wide, 1 << 20).contains("32 GiB"));
    }
}
