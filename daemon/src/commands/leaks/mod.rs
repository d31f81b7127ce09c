//! `perfusion leaks`: what stays in memory, by type and allocation stack, over several moments: a
//! leak, a cache, steady, or too early to tell. Moments come from a running process, or from
//! profiles of it. `perfusion_report::leaks` judges and prints them.

use crate::cli::{self, exit};
use crate::commands::heap::held::{self, SurveyBounds};
use crate::commands::heap::{WATCHED, check_surveyable};
use crate::commands::target::{check_managed, check_target, open_target};
use crate::end_signals::end_on_signal;
use crate::error::{Error, say};
use perfusion_dotnet::attach;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::survival::{DeathAfterRequest, SurvivalCheck};
use perfusion_host::process::{ExitPoller, ProcessTable, name};
use perfusion_host::system_limits::raise_open_files;
use perfusion_model::event::MonotonicNs;
use perfusion_pprof::proto::Profile;
use perfusion_pprof::{self, LOSS_PREFIX, ProfileInfo};
use perfusion_recorder::counter_values::{self, CounterBaseline};
use perfusion_recorder::processor::Processor;
use perfusion_report::leaks::series::stretches;
use perfusion_report::leaks::snapshot::{AllocationSites, NamedPid, Snapshot};
use perfusion_report::leaks::{
    HoldersResult, LeakHolders, MOMENTS, NoHolders, findings, judge, print, snapshot,
};
use perfusion_report::{self, ReportError};
use perfusion_sources::order::EventOrder;
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use perfusion_sources::shim::{ShimSource, same};
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Time between two rounds of reading.
const ROUND: Duration = Duration::from_millis(5);
/// How long the shim is given to leave at the end.
const LEAVE_SOON: Duration = Duration::from_millis(700);
/// Between looks at whether the shim is still there.
const STILL_THERE: Duration = Duration::from_secs(2);
/// Most groups of like objects that are kept of a process that is watched, in at most [`MOMENTS`]
/// moments (some 100 MB). Of more every second moment goes.
const CELLS: usize = 2 << 20;
/// So many are kept whatever they take.
const FEWEST_MOMENTS: usize = 16;

/// `perfusion leaks`.
///
/// # Errors
/// See [`Error`].
pub fn leaks(options: &cli::LeaksArgs, quiet: bool) -> Result<u8, Error> {
    let (snapshots, holders, death) = match options.pid {
        Some(pid) => {
            let LeakObservation { snapshots, holders, death } = watch(pid, options, quiet)?;
            (snapshots, holders, death)
        }
        None => {
            let expected =
                "a profile with live objects, as `perfusion record` and the daemon write them";
            let mut places = AllocationSites::default();
            let read = |path: &PathBuf| {
                let profile = perfusion_report::load_with(path, "inuse_objects", expected)?;
                Ok::<_, ReportError>(Snapshot::read(&profile, &mut places))
            };
            (options.files.iter().map(read).collect::<Result<Vec<_>, _>>()?, None, None)
        }
    };
    let stretches = stretches(&snapshots);
    let findings = findings(&snapshots, &stretches);
    let text = print::text(&snapshots, &stretches, &findings, holders.as_ref(), options.rows);
    crate::commands::output::to_stdout(text.as_bytes())?;
    match (death, holders) {
        (Some(death), _) => Err(death.into()),
        // The text says why.
        (None, Some(Err(NoHolders::Failed(_)))) => Ok(exit::OTHER),
        _ => Ok(0),
    }
}

/// Forgets every second moment when there are too many, but not the last one; true when it did.
fn downsample(snapshots: &mut Vec<Snapshot>) -> bool {
    let cells: usize =
        snapshots.iter().flat_map(|of| of.groups.values()).map(|of| of.cells.len()).sum();
    if snapshots.len() <= FEWEST_MOMENTS || snapshots.len() <= MOMENTS && cells <= CELLS {
        return false;
    }
    let (last, mut at) = (snapshots.len() - 1, 0);
    snapshots.retain(|_| {
        at += 1;
        at % 2 == 1 || at - 1 == last
    });
    true
}

/// A process that is watched: nothing but its shim is read.
struct LeakWatch {
    pid: u32,
    began: MonotonicNs,
    /// The same by the clock that people set: it may be set again meanwhile.
    began_wall: SystemTime,
    /// As of the last look.
    before: CounterBaseline,
    processor: Processor,
    shims: ShimSource,
    order: EventOrder,
}

impl LeakWatch {
    /// One round of reading.
    fn round(&mut self) {
        let start = MonotonicNs::now();
        self.shims.drain(&mut |event| self.order.push(event));
        let mut events = Vec::new();
        self.order.end_round(start, &mut events);
        for event in events {
            self.processor.event(event);
        }
        self.processor.processes.push_rules(drop);
        self.processor.take_questions().put_to(&mut self.shims);
    }

    /// What is alive now: the way of a recording's end, so that files and running processes are
    /// judged alike.
    fn look(&mut self) -> Result<Profile, Error> {
        let now = MonotonicNs::now();
        let counters =
            [self.shims.counters(), counter_values::daemon_counters(&self.processor)].concat();
        let since = self.before.since(&counters, |_| false);
        let window = self.processor.close(now, &[]);
        let mut comments =
            vec![format!("{LOSS_PREFIX}{}", perfusion_pprof::loss::line_of_window(&since))];
        comments.extend(self.processor.estimator_comments());
        let about = ProfileInfo {
            start: self.began_wall,
            duration: Duration::from_nanos(now.0.saturating_sub(self.began.0)),
            period_ns: 1,
            main_image: None,
            comments,
        };
        let bytes = perfusion_pprof::encode(
            &window,
            &self.processor.symbolizer,
            &self.processor.processes,
            &about,
        )?;
        Ok(perfusion_pprof::decode(&bytes)?)
    }

    /// What holds the objects that are watched now.
    ///
    /// # Errors
    /// Why that is not known, for people.
    fn holders(
        &mut self,
        target: &Arc<ProcessHandle>,
        over: &Arc<AtomicBool>,
        bounds: SurveyBounds,
        quiet: bool,
    ) -> HoldersResult {
        const NOT_SAID: &str = "which objects are watched cannot be read";
        let before = self.shims.watched(self.pid).ok_or(NOT_SAID)?;
        let by_sample =
            before.iter().map(|watched| ((watched.region, watched.sample), watched.handle));
        self.processor.tell_handles(by_sample.collect());
        let handles = snapshot::handles(&self.look().map_err(|error| error.to_string())?);
        let all: HashSet<u64> = handles.values().flatten().copied().collect();
        if all.is_empty() {
            return Err(NoHolders::NotAsked("no object is watched".to_owned()));
        }
        let (interrupted, walked) = (Arc::clone(over), Arc::new(AtomicBool::new(false)));
        let walked_too = Arc::clone(&walked);
        let target = Arc::clone(target);
        let tell = move |line: &str| {
            if !quiet {
                say(line);
            }
        };
        let survey = std::thread::Builder::new()
            .name("survey".into())
            .spawn(move || held::find(&target, all, bounds, (&interrupted, walked_too), tell))
            .map_err(|error| error.to_string())?;
        let mut after = None;
        // A library that hears of nobody meanwhile would give its handles up.
        while !survey.is_finished() {
            // At once: by and by it watches others. Pairs with the store in `heap::collect`;
            // nothing else is told by it.
            if walked.load(Ordering::Relaxed) && after.is_none() {
                after = Some(self.shims.watched(self.pid));
            }
            self.round();
            std::thread::sleep(ROUND);
        }
        let held = survey.join().map_err(|_| "a thread of perfusion panicked".to_owned())??;
        let after = after.unwrap_or_else(|| self.shims.watched(self.pid)).ok_or(NOT_SAID)?;
        let same = same(&before, &after);
        let of_place = |handles: Vec<u64>| {
            let (sure, others): (Vec<u64>, Vec<u64>) =
                handles.into_iter().partition(|handle| same.contains(handle));
            let given_up = others.into_iter().filter(|handle| held.has(*handle)).count();
            (sure, given_up)
        };
        let handles =
            handles.into_iter().map(|(place, handles)| (place, of_place(handles))).collect();
        Ok(LeakHolders { survey: held, handles })
    }
}

/// What a process was seen to have.
struct LeakObservation {
    snapshots: Vec<Snapshot>,
    holders: Option<HoldersResult>,
    /// It ended soon after it was asked for a survey.
    death: Option<DeathAfterRequest>,
}

/// Attaches to a process and looks at what is alive once a window.
fn watch(pid: u32, options: &cli::LeaksArgs, quiet: bool) -> Result<LeakObservation, Error> {
    check_target(pid)?;
    let target = Arc::new(open_target(pid)?);
    check_managed(&target)?;
    let bounds = SurveyBounds::from(options);
    if options.heap {
        check_surveyable(&target, &name::of(&target))?;
        held::check_headroom(&target, bounds)?;
    }
    let internal = |what| move |source| Error::Internal { what, source };
    attach::shim_copy::begin_sweep();
    // Only allocations are looked at.
    let settings = ShimSettings::new(Subscriptions {
        exceptions: false,
        contention: false,
        ..Subscriptions::default()
    })
    .map_err(|source| Error::Internal { what: "random number", source: source.into() })?;
    raise_open_files();
    let over = end_on_signal().map_err(internal("signal handler"))?;
    let mut processes = ProcessTable::new();
    // One that cannot be read has stacks that say so.
    processes.adopt(pid).ok();
    let processor = Processor::new(processes).without_threads();
    attach::attach_until(pid, settings.forced(options.force), &over)?;
    let mut shims = ShimSource::new(settings.owner, options.limits.limits());
    shims.watch(pid);
    let tell = |line: &str| {
        if !quiet {
            say(line);
        }
    };
    tell(&format!("watching pid {pid} for {:?}; Ctrl-C ends it", options.duration));
    if options.duration.as_secs_f64() < judge::SHORTEST_S {
        tell(&format!(
            "a verdict about growth takes {} at least: a longer --duration",
            judge::seconds(judge::SHORTEST_S)
        ));
    } else if options.duration.as_secs_f64() / options.window.as_secs_f64()
        < judge::FEWEST_SNAPSHOTS as f64 - 1.0
    {
        tell(&format!(
            "a verdict about growth takes {} moments at least: a shorter --window",
            judge::FEWEST_SNAPSHOTS
        ));
    }
    let process = ExitPoller::new(pid);
    let began = Instant::now();
    let mut watch = LeakWatch {
        pid,
        began: MonotonicNs::now(),
        began_wall: SystemTime::now(),
        before: CounterBaseline::default(),
        processor,
        shims,
        order: EventOrder::default(),
    };
    // From the first moment on, in which nothing is seen yet.
    let (mut snapshots, mut places) = (Vec::new(), AllocationSites::default());
    let (mut next, mut window) = (Duration::ZERO, options.window);
    let (mut is_gone, mut looked) = (false, began);
    loop {
        watch.round();
        if looked.elapsed() >= STILL_THERE {
            looked = Instant::now();
            is_gone = !watch.shims.is_mapped(pid);
        }
        if is_gone && process.is_running() {
            break;
        }
        // Pairs with the store of the signal's thread; nothing else is told by it.
        let ends = over.load(Ordering::Relaxed)
            || began.elapsed() >= options.duration
            || !process.is_running();
        if ends || began.elapsed() >= next {
            next += window;
            snapshots.push(Snapshot::read(&watch.look()?, &mut places));
            if downsample(&mut snapshots) {
                window *= 2;
            }
        }
        if ends {
            break;
        }
        std::thread::sleep(ROUND);
    }
    if !process.is_running() {
        tell(&format!("process {pid} has ended, after {:.1?}", began.elapsed()));
    } else if is_gone {
        tell(&format!(
            "process {pid} no longer has the library that tells of its objects, after {:.1?}: it \
             has become another program, or what the library told made no sense; \
             what it told before is judged",
            began.elapsed()
        ));
    }
    // The verdicts are known, whatever becomes of the survey.
    let aftermath = SurvivalCheck::of(&target, "a survey of its heap");
    let lived = process.is_running();
    let not_asked = |why: String| Err(NoHolders::NotAsked(why));
    let is_over = over.load(Ordering::Relaxed);
    let holders = options.heap.then(|| match (is_over, lived, is_gone) {
        (true, ..) => not_asked("interrupted".to_owned()),
        (_, false, _) => not_asked(format!("process {pid} has ended")),
        (_, _, true) => not_asked("the library that watched them is gone".to_owned()),
        _ => {
            watch.holders(&target, &over, bounds, quiet).map_err(|why| match process.is_running() {
                true if over.load(Ordering::Relaxed) => NoHolders::NotAsked(why.to_string()),
                true => why,
                false => NoHolders::Failed(format!("process {pid} has ended")),
            })
        }
    });
    let death = (options.heap && lived && !over.load(Ordering::Relaxed))
        .then(|| aftermath.death(WATCHED))
        .flatten();
    // One that is not there any more obeys nobody.
    if !is_gone && !watch.shims.detach_all_within(LEAVE_SOON).is_empty() {
        tracing::warn!(
            pid,
            "the shim has not left the process yet; it will when its lease runs out"
        );
    }
    if let Some(Ok(holders)) = &holders {
        holders.survey.notes().iter().for_each(|note| tell(note));
    }
    // It was looked at each time, also where nothing was alive.
    let processes: HashSet<NamedPid> =
        snapshots.iter().flat_map(|of| &of.processes).cloned().collect();
    for snapshot in &mut snapshots {
        snapshot.processes.clone_from(&processes);
    }
    Ok(LeakObservation { snapshots, holders, death })
}
