//! What holds objects that weak handles watch: a survey for those few, of which `perfusion leaks`
//! has seen where they were made.

use super::survey_messages::SurveyMessages;
use super::{check_surveyable, of_mib};
use crate::cli;
use crate::error::Error;
use perfusion_dotnet::declared;
use perfusion_heap::collect::{
    SurveyError, SurveySettings, planned, planned_for, survey, unless_interrupted,
};
use perfusion_heap::retained::RetainedObjects;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::name;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// How to survey.
#[derive(Clone, Copy, Debug)]
pub struct SurveyBounds {
    /// Most memory for the survey, MiB.
    pub memory_mib: u32,
    /// Most memory for the runtime's buffer, MiB.
    pub buffer_mib: u32,
    /// True to go on where the process has too little memory left.
    pub force: bool,
}

impl From<&cli::LeaksArgs> for SurveyBounds {
    fn from(options: &cli::LeaksArgs) -> Self {
        Self { memory_mib: options.memory, buffer_mib: options.buffer, force: options.force }
    }
}

/// Refuses a process that has too little memory left for a survey, however narrow its objects are.
///
/// # Errors
/// [`SurveyError::NoHeadroom`].
pub fn check_headroom(target: &ProcessHandle, bounds: SurveyBounds) -> Result<(), SurveyError> {
    planned_for(target, bounds.buffer_mib, bounds.force, 0).map(drop)
}

/// Surveys the heap, which pauses the process for a full collection and a walk. `say` is told what
/// is asked and what is seen, and `walked` is raised when the walk is over. Raising `interrupted`
/// ends it early.
///
/// # Errors
/// Why it is not known, for people: the runtime cannot be asked, or does not answer, or there is no
/// room for what it tells.
pub fn find(
    target: &Arc<ProcessHandle>,
    handles: HashSet<u64>,
    bounds: SurveyBounds,
    (interrupted, walked): (&Arc<AtomicBool>, Arc<AtomicBool>),
    say: impl Fn(&str),
) -> Result<RetainedObjects, String> {
    let said = |error: Error| error.to_string();
    let name = name::of(target);
    check_surveyable(target, &name).map_err(said)?;
    let plan = planned(target, bounds.buffer_mib, bounds.force, interrupted);
    let plan = plan.map_err(|error| error.to_string())?;
    plan.note.iter().for_each(|note| say(note));
    let mut telling = SurveyMessages::begin(target.pid(), &name, say);
    let limit_bytes = of_mib(bounds.memory_mib);
    let settings = SurveySettings { limit_bytes, plan, handles: Arc::new(handles), walked };
    let survey = survey(target, &settings, interrupted, &mut |progress| telling.see(progress));
    let mut survey = survey.map_err(|error| error.to_string())?;
    survey.type_bytes +=
        declared::complete_names(target, &mut survey.types, &mut survey.fields, limit_bytes);
    unless_interrupted(target.pid(), interrupted).map_err(|error| error.to_string())?;
    RetainedObjects::of(survey, limit_bytes)
}
