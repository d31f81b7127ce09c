//! `perfusion heap`: what is in the managed heap of a running process, and what holds it.
//!
//! ```text
//! collect (two event sessions) ─► nettrace (blocks → events) ─► walk (types, roots) ─► graph
//! graph ─► paths, dominators ─► text, survey_profile ─► survey_diff
//! declared (classes of static fields and around nested types, by metadata) ─► names of types
//! ```
//! Why the runtime's events and not the shim: docs/adr/0007-heap-by-events.md.

pub mod held;
mod survey_messages;

pub use perfusion_heap::collect::SurveyError;

use self::survey_messages::SurveyMessages;
use crate::cli;
use crate::commands::target::{check_managed, check_target, open_target};
use crate::end_signals::end_on_signal;
use crate::error::{Error, say};
use indicatif::{ProgressBar, ProgressStyle};
use perfusion_dotnet::attach::ipc;
use perfusion_dotnet::attach::no_socket;
use perfusion_dotnet::attach::policy::AttachObstacle;
use perfusion_dotnet::declared;
use perfusion_export::file;
use perfusion_heap::collect::{SurveySettings, planned, survey, unless_interrupted};

use perfusion_heap::memory_plan::MemoryPlan;
use perfusion_heap::paths::RetentionPaths;
use perfusion_heap::retained::{in_all, notes, pause};
use perfusion_heap::text::SurveyFindings;
use perfusion_heap::walk::HeapSurvey;
use perfusion_host::process::handle::{MapLine, ProcessHandle};
use perfusion_host::process::name;
use perfusion_host::process::survival::SurvivalCheck;
use perfusion_host::system_limits::raise_open_files;
use perfusion_model::units::counted;
use perfusion_pprof::{LOSS_PREFIX, NO_LOSS, PprofError, pack};
use std::io::IsTerminal as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// How long it takes to notice an interrupt in the middle of working something out.
const LEAVES: Duration = Duration::from_millis(300);
/// How long a process is watched after a survey: one that dies of it does so within this.
pub(crate) const WATCHED: Duration = Duration::from_secs(1);

/// `perfusion heap`.
///
/// # Errors
/// See [`Error`].
pub fn heap(options: &cli::HeapArgs, quiet: bool) -> Result<u8, Error> {
    match (options.pid, options.diff.as_slice()) {
        (None, [before, after]) => compare(before, after, options.rows)?,
        (Some(pid), _) => take(pid, options, quiet)?,
        // The command line asks for one of them.
        (None, _) => {}
    }
    Ok(0)
}

fn compare(before: &Path, after: &Path, rows: usize) -> Result<(), Error> {
    let load = |path| {
        perfusion_report::load_with(
            path,
            perfusion_report::survey_profile::TYPES[0].0,
            "a survey that `perfusion heap -o` wrote",
        )
    };
    let (before, after) = (load(before)?, load(after)?);
    crate::commands::output::to_stdout(
        perfusion_report::survey_diff::text(&before, &after, rows)?.as_bytes(),
    )
}

fn take(pid: u32, options: &cli::HeapArgs, quiet: bool) -> Result<(), Error> {
    check_target(pid)?;
    if let Some(output) = &options.output {
        file::check(output)?;
    }
    let internal = |what| move |source| Error::Internal { what, source };
    let interrupted = end_on_signal().map_err(internal("signal handler"))?;
    // Every assembly of the process is opened for the names in it.
    raise_open_files();
    let target = Arc::new(open_target(pid)?);
    check_surveyable(&target, &name::of(&target))?;
    let aftermath = SurvivalCheck::of(&target, "a survey of its heap");
    let plan = planned(&target, options.buffer, options.force, &interrupted)?;
    let written = survey_and_show((&target, &interrupted), options, plan, quiet);
    // Whoever interrupts waits for the end, and whoever was refused has asked for nothing.
    let wait = if interrupted.load(Ordering::Relaxed) { Duration::ZERO } else { WATCHED };
    match aftermath.death(wait) {
        Some(death) => Err(death.into()),
        None => written,
    }
}

/// Ends this program soon after an interrupt, for as long as it lives: what is worked out of a
/// survey takes long, and nothing of it has to be put right in the process.
struct LeaveWhenInterrupted(Arc<AtomicBool>);

impl LeaveWhenInterrupted {
    fn from_now_on(pid: u32, interrupted: &Arc<AtomicBool>) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (interrupted, is_over) = (Arc::clone(interrupted), Arc::clone(&over));
        std::thread::spawn(move || {
            // Pairs with the stores of the signal's thread and of `drop`; nothing else is told by
            // them.
            while !is_over.load(Ordering::Relaxed) {
                if let Err(error) = unless_interrupted(pid, &interrupted) {
                    std::thread::sleep(LEAVES);
                    if !is_over.load(Ordering::Relaxed) {
                        say(&format!("perfusion: {error}"));
                        std::process::exit(i32::from(cli::exit::OTHER));
                    }
                }
                std::thread::sleep(LEAVES / 10);
            }
        });
        Self(over)
    }
}

impl Drop for LeaveWhenInterrupted {
    fn drop(&mut self) {
        // Pairs with the loads of its thread; nothing else is told by it.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What is wrong in the end, after everything was shown that could be.
fn survey_and_show(
    (target, interrupted): (&Arc<ProcessHandle>, &Arc<AtomicBool>),
    options: &cli::HeapArgs,
    plan: MemoryPlan,
    quiet: bool,
) -> Result<(), Error> {
    let (pid, name) = (target.pid(), name::of(target));
    let say_line = |line: &str| {
        if !quiet {
            say(line);
        }
    };
    let limit_bytes = of_mib(options.memory);
    plan.note.iter().for_each(|note| say_line(note));
    let settings =
        SurveySettings { limit_bytes, plan, handles: Arc::default(), walked: Arc::default() };
    let bar = progress(quiet);
    let time = SystemTime::now();
    let mut telling = SurveyMessages::begin(pid, &name, |line| match &bar {
        Some(bar) => bar.suspend(|| say_line(line)),
        None => say_line(line),
    });
    let survey = survey(target, &settings, interrupted, &mut |progress| {
        telling.see(progress);
        if let Some(bar) = &bar {
            bar.set_message(counted(progress.objects, "object"));
            bar.tick();
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let mut survey = survey?;
    let leaving = LeaveWhenInterrupted::from_now_on(pid, interrupted);
    survey.type_bytes +=
        declared::complete_names(target, &mut survey.types, &mut survey.fields, limit_bytes);
    unless_interrupted(pid, interrupted)?;
    let notes = notes(&survey);
    say_line(&pause(&survey));
    let (findings, left_out) = findings(&survey, limit_bytes);
    unless_interrupted(pid, interrupted)?;
    drop(leaving);
    notes.iter().chain(&left_out).for_each(|note| say_line(note));
    let written = options.output.as_deref().map_or(Ok(()), |output| {
        let Some(paths) = &findings.paths else {
            return Err(Error::NoWays { path: output.to_owned() });
        };
        let mut comments = vec![format!("heap of pid {pid} ({name})"), pause(&survey)];
        comments.push(format!(
            "{LOSS_PREFIX}{}",
            if notes.is_empty() { NO_LOSS.to_owned() } else { notes.join("; ") }
        ));
        let profile = perfusion_report::survey_profile::profile(&survey, paths, time, &comments)
            .map_err(PprofError::Invalid)?;
        Ok(file::write(output, &pack(&profile)?)?)
    });
    // Both on stdout would be neither. A file that cannot be written is no reason to lose what the
    // app was paused for.
    if options.output.as_deref().is_none_or(|output| !file::is_stdout(output)) {
        crate::commands::output::to_stdout(
            perfusion_heap::text::text(&survey, &findings, options.rows).as_bytes(),
        )?;
    }
    written
}

/// # Errors
/// When there is no runtime that could be asked.
pub(crate) fn check_surveyable(target: &ProcessHandle, name: &str) -> Result<(), Error> {
    let (pid, name) = (target.pid(), name.to_owned());
    let why_not = check_managed(target)?;
    let seen = ipc::has_socket(target);
    if !matches!(seen, Ok(true)) {
        let why = seen.map_or_else(AttachObstacle::SocketUnseen, |_| {
            AttachObstacle::NoSocket(no_socket::reason(target))
        });
        let why = match why_not {
            // Nobody would load a library here.
            Some(AttachObstacle::DiagnosticsOff(variable)) => AttachObstacle::SocketOff(variable),
            why_not => why_not.unwrap_or(why),
        };
        return Err(Error::NotManaged { pid, name, why });
    }
    if is_counted(target) {
        return Err(Error::CountedExactly { pid, name });
    }
    Ok(())
}

/// True while `record --exact` counts there: its library ends the walk that the runtime makes over
/// all objects after each collection, and a survey's events come of the same walk.
fn is_counted(target: &ProcessHandle) -> bool {
    let mut found = false;
    let look = |line: MapLine| {
        found |= line.name == profiler_protocol::exact::MAPS_NAME;
        !found
    };
    // A process that cannot be read has been refused before.
    target.maps(look).is_ok() && found
}

fn of_mib(mib: u32) -> usize {
    usize::try_from(mib).unwrap_or(usize::MAX).saturating_mul(1 << 20)
}

/// Works out what memory allows; and says what it does not.
fn findings(survey: &HeapSurvey, limit_bytes: usize) -> (SurveyFindings, Vec<String>) {
    let mut left_out = Vec::new();
    let mut findings = SurveyFindings { paths: None, dominated: None };
    let Ok(graph) = &survey.graph else { return (findings, left_out) };
    let mut has_room = |what: &str, needed: usize| {
        let needed = in_all(survey, graph, needed);
        if needed > limit_bytes {
            left_out.push(format!("{what} left out: that takes {} MiB (--memory)", needed >> 20));
        }
        needed <= limit_bytes
    };
    if has_room("what holds the objects is", perfusion_heap::paths::bytes_needed(graph)) {
        findings.paths =
            Some(RetentionPaths::find_with(graph, &survey.roots, &survey.lists(), &[]).0);
    }
    if has_room("dominated sizes are", perfusion_heap::dominators::bytes_needed(graph)) {
        findings.dominated =
            Some(perfusion_heap::dominators::find(graph, &survey.roots, survey.types.len()));
    }
    (findings, left_out)
}

/// A line that counts objects, where somebody can see it.
fn progress(quiet: bool) -> Option<ProgressBar> {
    if quiet || !std::io::stderr().is_terminal() {
        return None;
    }
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}, {elapsed}").ok()?);
    Some(bar)
}
