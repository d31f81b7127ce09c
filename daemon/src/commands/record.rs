//! `perfusion record`: targets in, one file out.

use super::target::{check_seen, check_target};
use crate::cli::{AllocCounts, RecordArgs, exit};
use crate::end_signals::EndSignals;
use crate::error::{Error, say};
use crate::memory_guard::{self, AttachedProcesses, Growing};
use crate::select::cgroups::cgroup_id;
use indicatif::{ProgressBar, ProgressStyle};
use perfusion_dotnet::attach::{self, AttachError};
use perfusion_dotnet::counts::{self, Counting, RecordingCounts, TypeEventRate};
use perfusion_dotnet::exact::{self, Ending, ExactAccount};
use perfusion_export::file;
use perfusion_host::process::{ExitPoller, ProcessTable, start_ticks, ticks_before_now};
use perfusion_host::system_limits::raise_open_files;
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_pprof::{self, ProfileInfo};
use perfusion_recorder::follow::{AttachEvent, AttachTargets, Follower};
use perfusion_recorder::{Recording, RecordingHandle, RecordingResult};
use perfusion_report::exact_merge::{self, COUNTED, EXACT};
use perfusion_report::exact_summary;
use perfusion_sources::kernel::features::FeatureLimit;
use perfusion_sources::kernel::{KernelError, KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::launch::{self, GatedChild};
use perfusion_sources::shim::ExactTables;
use perfusion_sources::shim::ShimSource;
use perfusion_sources::shim::{
    COLUMNS, NOT_ALL_RECORDED, NOT_RECORDED, ShimSettings, Subscriptions,
};
use std::io::IsTerminal as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// How often ended targets are looked for; nothing reports the end of a process that is not a child
/// without its help.
const LOOK: Duration = Duration::from_millis(100);

/// How long running processes are read at the start of a recording of the whole host. The others
/// are when they are first seen.
const READING: Duration = Duration::from_millis(200);

/// The exit code of a program that the kernel has ended for want of memory (SIGKILL), and of a
/// shell that ran one.
const KILLED: u8 = 128 + 9;
/// An attach that takes longer is told of: a recording with a named process is that much longer
/// than it was asked to be.
const LONG_ATTACH: Duration = Duration::from_millis(500);

/// The time of a recording begins when the named processes have the shim, and no later than this
/// after the recording did: a runtime that does not answer holds up nobody.
const LONGEST_ATTACH: Duration = LONG_ATTACH;

/// What exact values mean beside stacks that are sampled.
const EXACT_COMMENT: &str = "alloc_objects, alloc_space: exact per process and type; split among \
     stacks by the objects that were sampled";

/// The same of counts by the runtime.
const COUNTED_COMMENT: &str = "alloc_objects, alloc_space: counted by the runtime per process and \
     type; not told of are, on each thread, the last objects of a type, \
     up to 999 for each thread of its runtime, the first one where another thread made one before, \
     and on .NET 10 most of what is boxed; split among stacks by the objects that were sampled";

/// Says what happens, on stderr, unless told to be quiet.
#[derive(Clone, Copy)]
struct StatusLines(bool);

impl StatusLines {
    fn line(self, text: &str) {
        if !self.0 {
            say(text);
        }
    }
}

/// Records and writes the file; the exit code is the started program's, or 0.
///
/// # Errors
/// See [`Error`].
pub fn record(options: &RecordArgs, quiet: bool) -> Result<u8, Error> {
    let say = StatusLines(quiet);
    // From the first moment on, so that an early Ctrl-C ends the recording and not this program in
    // the middle of something.
    let mut signals = EndSignals::listen()
        .map_err(|source| Error::Internal { what: "signal handler", source })?;
    for &pid in &options.pid {
        check_target(pid)?;
    }
    file::check(&options.output)?;
    let account_path = options.exact.then(|| exact::path_beside(&options.output));
    match &account_path {
        Some(_) if file::is_stdout(&options.output) || file::is_special(&options.output) => {
            return Err(Error::ExactNeedsFile { path: options.output.clone() });
        }
        Some(path) => file::check(path)?,
        None => {}
    }
    // What is needed at all is reported first.
    perfusion_sources::kernel::features::check().map_err(KernelError::from)?;
    if options.exact || options.alloc_counts.is_some() {
        // Else its tables could not be opened.
        perfusion_sources::kernel::features::mapped_files()
            .map_err(|source| AttachError::Unreadable { pid: std::process::id(), source })?;
    }
    for &pid in &options.pid {
        check_seen(pid)?;
    }
    let limits: Vec<FeatureLimit> =
        perfusion_sources::kernel::features::limits(perfusion_dotnet::attach::helper::has_it())
            .into_iter()
            .filter_map(|(_, result)| result.err())
            .collect();
    for limit in &limits {
        say.line(&format!("{}{limit}", perfusion_pprof::LIMITED));
    }
    attach::shim_copy::begin_sweep();
    let settings = ShimSettings::new(wishes(options))
        .map_err(|source| Error::Internal { what: "random number", source: source.into() })?
        .forced(options.force);
    // A shim whose region cannot be opened would only be a burden to the process.
    let with_shim = !options.no_attach
        && !limits.iter().any(|limit| matches!(limit, FeatureLimit::MappedFiles { .. }));

    // Else a typo would be found when the file of an earlier recording is about to be replaced.
    launch::check(&options.command)?;
    // The program is started first, but waits at its gate, because its pid must be known to select
    // it. Kept while it is recorded: its children may load it at any time. They look at its lock
    // and at nothing else to see whether we live.
    let mut library = None;
    if options.exact {
        memory_guard::check_start("--exact", memory_guard::EXACT_BYTES, options.force)?;
    }
    let mut counting = match options.alloc_counts {
        Some(often) => {
            let buffer_mib = memory_guard::counts_buffer(counts::BUFFER_MIB, options.force)?;
            if buffer_mib < counts::BUFFER_MIB {
                say.line(&format!(
                    "each runtime keeps up to {buffer_mib} MiB of its events instead of {}, for no \
                     more memory is left; \
                     what finds no room is lost and counted",
                    counts::BUFFER_MIB
                ));
            }
            Some(Counting::open(rate(often), buffer_mib)?)
        }
        None => None,
    };
    let gated = if options.command.is_empty() {
        None
    } else {
        let mut environment: Vec<_> = counting.iter().flat_map(Counting::environment).collect();
        if with_shim {
            let launch = attach::launch::launch(&settings, options.exact)?;
            environment.extend(launch.environment);
            library = Some(launch.library);
        }
        Some(GatedChild::spawn(&options.command, &environment)?)
    };
    let mut targets = options.pid.clone();
    let gated_pid = gated.as_ref().map(GatedChild::pid);
    targets.extend(gated_pid);
    raise_open_files();
    let selection = match &options.cgroup {
        Some(path) => KernelSelection::Cgroup(cgroup_id(path)?),
        None if options.all => KernelSelection::All,
        None => KernelSelection::Pids(targets.clone()),
    };
    let kernel = KernelSource::start(&KernelOptions {
        frequency_hz: options.frequency,
        selection,
        // What it does at its gate is this program's.
        from_exec: gated_pid,
        stack_copy_bytes: options.stack_kib * 1024,
        wait_stack_budget_bytes_per_s: u64::from(options.wait_stack_mib) << 20,
        wait_stacks_one_in: options.wait_stacks_one_in,
        waker_stacks: options.waker_stacks,
        spans: options.spans,
        times_stages: options.time_stages,
        ..KernelOptions::default()
    })?;
    let (began, began_wall, began_ns) = (Instant::now(), SystemTime::now(), kernel.started());
    let mut processes = ProcessTable::new();
    // Those nobody named too, as far as time allows: one that ends before its first stack is looked
    // at has no maps to be read then.
    let running = if options.all {
        perfusion_host::process::all_pids().unwrap_or_default()
    } else {
        Vec::new()
    };
    for pid in
        targets.iter().copied().chain(running.into_iter().take_while(|_| began.elapsed() < READING))
    {
        // One that is gone already is found out below; one that cannot be read has stacks that say
        // so.
        processes.adopt(pid).ok();
    }
    let tables = ExactTables::default();
    let mut shims = ShimSource::new(settings.owner, options.limits.limits());
    if options.exact {
        shims = shims.with_exact(tables.clone());
    }
    if let Some(counting) = &counting {
        shims = shims.with_counts(Box::new(counting.starts()));
    }
    // Before it is let go: a shell has children within a millisecond, and those of a process that
    // is not watched are not either.
    if let Some(pid) = gated_pid {
        shims.watch(pid);
    }
    let recording = Recording::start(kernel, shims, processes)
        .map_err(|source| Error::Internal { what: "starting a thread", source })?;
    let watcher = recording.watcher();
    let child = gated.map(GatedChild::release).transpose()?;
    let whom = match (&child, &options.cgroup) {
        _ if !with_shim => None,
        (Some(child), _) => Some(AttachTargets::Started(child.id())),
        (None, Some(path)) => options.attach.then(|| AttachTargets::Cgroup(path.clone())),
        (None, None) if options.all => options.attach.then_some(AttachTargets::All),
        (None, None) => Some(AttachTargets::Named(options.pid.clone())),
    };
    let late = LateAttaches::since(began);
    let attached = AttachedProcesses::default();
    let telling = (late.clone(), attached.clone(), say);
    let mut follower = whom.map(|whom| follow(whom, settings, watcher, telling));

    say.line(&format!("recording {}; Ctrl-C ends it", describe(options, child.as_ref())));
    if with_shim && follower.is_none() {
        say.line(
            "without --attach: managed names and allocations only of .NET processes that have a \
             shim already",
        );
    }
    let (end, child) = wait_for_end(
        options,
        child,
        &recording,
        (began, follower.as_ref(), &attached),
        &mut signals,
        say,
    )?;
    // First: whoever starts from now on finds no library, and nobody waits for a recording that is
    // over.
    drop(library);
    if let Some(counting) = &mut counting {
        counting.cease();
    }
    if let Some(follower) = &mut follower {
        follower.cease();
    }
    recording.close();
    // From here on, for what follows may wait for runtimes.
    let writing = leave_on_second_signal();
    let timeout = match end {
        RecordEnd::Interrupted | RecordEnd::Terminated => counts::ENDING_ON_SIGNAL,
        RecordEnd::Child(_) | RecordEnd::Time | RecordEnd::Gone => counts::ENDING,
    };
    // Before the programs have gone further.
    let counted = counting.map(|counting| counting.finish(timeout));
    let mut account =
        account_path.as_deref().map(|path| (path, account(options, &tables, targets.first())));
    if let RecordEnd::Gone = end
        && options.duration.is_some()
    {
        say.line(&format!("every target has ended, after {:.1?}", began.elapsed()));
    }
    tracing::debug!("the recording is over");
    let without_shim = follower.map(Follower::stop).unwrap_or_default();
    tracing::debug!("the follower has ended");
    let recorded = recording.stop().ok_or(Error::Failed)?;
    if let Some((_, account)) = &mut account {
        exact_merge::number_modules(account, |pid| recorded.processor.contexts(pid));
    }
    let duration = Duration::from_nanos(recorded.ended.0.saturating_sub(began_ns.0));
    {
        // A pipe nobody reads must not keep this program alive; what is written into one is never
        // half a file.
        let _held = (!file::is_special(&options.output)).then(|| writing.lock());
        let exact = account.as_ref().map(|(_, account)| account);
        let beside = (exact, counted.as_ref());
        let mut lacks = late.comments(duration);
        if options.no_attach {
            lacks
                .push(format!("{COLUMNS}{NOT_RECORDED}: --no-attach lets nobody load the library"));
        }
        let lacks = (&limits[..], &without_shim[..], &lacks[..]);
        write(options, &recorded, &targets, lacks, (began_wall, duration), beside, say)?;
        if let Some((path, account)) = &account {
            write_account(path, account, say)?;
        }
    }
    let deaths = attached.deaths();
    deaths.iter().for_each(|death| crate::error::say(&death.to_string()));
    match (end, child) {
        (RecordEnd::Time | RecordEnd::Gone, None)
            if deaths.iter().any(|death| death.killed_in.is_some()) =>
        {
            Ok(exit::NO_TARGET)
        }
        (RecordEnd::Child(status), _) => Ok(exit_code(status)),
        (RecordEnd::Time | RecordEnd::Gone | RecordEnd::Interrupted, Some(mut child)) => {
            say.line(&format!(
                "waiting for {} to end (Ctrl-C to leave it)",
                options.command.join(" ")
            ));
            let status = child
                .wait()
                .map_err(|source| Error::Internal { what: "waiting for the program", source })?;
            Ok(exit_code(status))
        }
        _ => Ok(0),
    }
}

/// From the end of the recording on, one more Ctrl-C or SIGTERM ends this program at once, but not
/// while it holds the returned lock: a file is written whole or not at all. (tokio's handlers stay
/// in place when their runtime is gone, so somebody must listen.)
fn leave_on_second_signal() -> Arc<Mutex<()>> {
    let writing = Arc::new(Mutex::new(()));
    let held = Arc::clone(&writing);
    std::thread::spawn(move || {
        let Ok(mut signals) = EndSignals::listen() else { return };
        signals.wait();
        let _held = held.lock();
        std::process::exit(130);
    });
    writing
}

/// Why a recording ended.
enum RecordEnd {
    /// The program it started has ended.
    Child(ExitStatus),
    /// Its time was over.
    Time,
    /// All targets were gone.
    Gone,
    /// Ctrl-C, which a started program got from its terminal too.
    Interrupted,
    /// SIGTERM: a started program goes on.
    Terminated,
}

fn wishes(options: &RecordArgs) -> Subscriptions {
    Subscriptions {
        exceptions: !options.no_exceptions,
        exception_messages: options.exception_messages,
        contention: !options.no_contention,
        thread_pool: options.thread_pool,
        start_session: options.alloc_counts.is_some(),
        ..Subscriptions::default()
    }
}

fn rate(often: AllocCounts) -> TypeEventRate {
    match often {
        AllocCounts::Low => TypeEventRate::Low,
        AllocCounts::High => TypeEventRate::High,
    }
}

fn describe(options: &RecordArgs, child: Option<&Child>) -> String {
    let whom = match (child, options.all) {
        (Some(child), _) => format!("{} (pid {})", options.command.join(" "), child.id()),
        (None, true) => "the whole host".to_owned(),
        (None, false) if options.pid.is_empty() => "the cgroup".to_owned(),
        (None, false) => {
            let pids: Vec<String> = options.pid.iter().map(u32::to_string).collect();
            format!("pid {}", pids.join(", "))
        }
    };
    match options.duration {
        Some(duration) => format!("{whom} for {duration:?}"),
        None => whom,
    }
}

/// Processes that ran when the recording began and got the library well after that.
#[derive(Clone)]
struct LateAttaches {
    began: Instant,
    /// The same in the kernel's ticks since the boot.
    began_ticks: u64,
    found: Arc<Mutex<Vec<(u32, Duration)>>>,
}

impl LateAttaches {
    fn since(began: Instant) -> Self {
        Self { began, began_ticks: ticks_before_now(began.elapsed()), found: Arc::default() }
    }

    /// It has the library from now on.
    fn attached(&self, pid: u32) {
        let (after, started) = (self.began.elapsed(), start_ticks(pid));
        if after > LONG_ATTACH && started.is_some_and(|started| started < self.began_ticks) {
            self.found.lock().unwrap_or_else(PoisonError::into_inner).push((pid, after));
        }
    }

    /// What the profile of so long has to say of it.
    fn comments(&self, duration: Duration) -> Vec<String> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let comment = |(pid, after): &(u32, Duration)| {
            format!(
                "{COLUMNS}{NOT_ALL_RECORDED}the first {after:.1?} of process {pid}, which had no \
                 library then; rates are of all {duration:.1?}"
            )
        };
        found.iter().map(comment).collect()
    }
}

/// Keeps the shim in the .NET processes that are recorded.
fn follow(
    whom: AttachTargets,
    settings: ShimSettings,
    watcher: RecordingHandle,
    (late, attached, say): (LateAttaches, AttachedProcesses, StatusLines),
) -> Follower {
    let pipeline = watcher.clone();
    Follower::start(whom, settings, pipeline, move |news| match news {
        AttachEvent::Attaching { pid } => attached.attaching(pid),
        AttachEvent::NotAsked { pid } => attached.not_asked(pid),
        AttachEvent::Attached { pid, runtime, took } => {
            tracing::info!(pid, runtime, ?took, "attached");
            watcher.watch(pid);
            late.attached(pid);
            if took > LONG_ATTACH {
                say.line(&format!("loading the shim into pid {pid} took {took:.1?}"));
            }
        }
        AttachEvent::Refused { expected: true, reason, .. } => {
            say.line(&format!("{}{reason}", perfusion_pprof::WITHOUT_SHIM));
        }
        // Most processes are no .NET ones: `ps` tells about each.
        AttachEvent::Refused { pid, expected: false, reason } => {
            tracing::debug!(pid, reason, "not attached")
        }
    })
}

/// Waits for the time to be over, for Ctrl-C or SIGTERM, or for all targets to end. Gives back the
/// child unless it has ended.
fn wait_for_end(
    options: &RecordArgs,
    mut child: Option<Child>,
    recording: &Recording,
    (began, follower, attached): (Instant, Option<&Follower>, &AttachedProcesses),
    signals: &mut EndSignals,
    say: StatusLines,
) -> Result<(RecordEnd, Option<Child>), Error> {
    let internal = |what| move |source| Error::Internal { what, source };
    let bar = progress(options, say);
    let grows = options.exact || options.alloc_counts.is_some();
    let growing =
        child.as_ref().filter(|_| grows).map(|child| Growing::of(child.id(), options.force));
    let EndSignals { runtime, interrupt, terminate } = signals;
    let end = runtime.block_on(async {
        let mut look = tokio::time::interval(LOOK);
        let targets: Vec<ExitPoller> =
            options.pid.iter().map(|&pid| ExitPoller::new(pid)).collect();
        loop {
            tokio::select! {
                _ = interrupt.recv() => return Ok(RecordEnd::Interrupted),
                _ = terminate.recv() => return Ok(RecordEnd::Terminated),
                _ = look.tick() => {}
            }
            if let Some(bar) = &bar {
                bar.set_position(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX));
            }
            if let Some(child) = &mut child
                && let Some(status) =
                    child.try_wait().map_err(internal("waiting for the program"))?
            {
                if exit_code(status) == KILLED
                    && let Some(cgroup) = growing.as_ref().and_then(Growing::killed_in)
                {
                    crate::error::say(&format!(
                        "the program was killed: the kernel has killed for want of memory in its \
                         cgroup {} meanwhile (oom_kill). \
                         What the recording made the program use may be the cause",
                        cgroup.display()
                    ));
                }
                return Ok::<_, Error>(RecordEnd::Child(status));
            }
            attached.look();
            if let Some(why) = growing.as_ref().and_then(Growing::is_too_much) {
                crate::error::say(&why);
                return Ok(RecordEnd::Time);
            }
            // A zombie has ended, however long its parent takes to ask for it.
            if !targets.is_empty() && !targets.iter().any(ExitPoller::is_running) {
                return Ok(RecordEnd::Gone);
            }
            // An attach can take as long as a short recording: the time counts from when the named
            // processes have been seen to.
            let since = match follower {
                Some(follower) if !options.pid.is_empty() => {
                    let latest = began + LONGEST_ATTACH;
                    follower.complete_since().map_or(latest, |complete| complete.min(latest))
                }
                _ => began,
            };
            let is_over = options.duration.is_some_and(|time| Instant::now() >= since + time);
            if is_over || !recording.is_running() {
                return Ok(RecordEnd::Time);
            }
        }
    })?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok((end, child))
}

fn progress(options: &RecordArgs, say: StatusLines) -> Option<ProgressBar> {
    let duration = options.duration.filter(|_| !say.0 && std::io::stderr().is_terminal())?;
    let bar = ProgressBar::new(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    let style = ProgressStyle::with_template("{bar:40} {elapsed} / {eta} left").ok()?;
    bar.set_style(style);
    Some(bar)
}

/// What exact mode has counted.
fn account(options: &RecordArgs, tables: &ExactTables, program: Option<&u32>) -> ExactAccount {
    let mut account = exact::read(tables, &options.command);
    // Of a program that is no more the kernel adds its time to ours, but not apart from that of its
    // children.
    let ticks = perfusion_host::process::stat(std::process::id())
        .map(|stat| stat.cutime.saturating_add(stat.cstime));
    if let ([process], Some(ticks)) = (account.processes.as_mut_slice(), ticks)
        && program == Some(&process.pid)
        && process.ending != Ending::Running
    {
        let ticks = u64::try_from(ticks).unwrap_or(0);
        process.cpu_ns =
            ticks.saturating_mul(1_000_000_000).checked_div(procfs::ticks_per_second());
    }
    account
}

fn write_account(path: &Path, account: &ExactAccount, say: StatusLines) -> Result<(), Error> {
    let json = serde_json::to_vec(account).map_err(|error| Error::Internal {
        what: "the account of exact mode",
        source: error.into(),
    })?;
    file::write(path, &json)?;
    for line in exact_summary::lines(account) {
        say.line(&line);
    }
    say.line(&format!(
        "wrote {} ({}); `perfusion report --exact` prints it",
        shown(path),
        size(json.len())
    ));
    Ok(())
}

fn write(
    options: &RecordArgs,
    recorded: &RecordingResult,
    targets: &[u32],
    lacks: MissingParts<'_>,
    (start, duration): (SystemTime, Duration),
    (account, counted): (Option<&ExactAccount>, Option<&RecordingCounts>),
    say: StatusLines,
) -> Result<(), Error> {
    let loss_line = perfusion_pprof::loss::line(&recorded.counters);
    let about = ProfileInfo {
        start,
        duration,
        period_ns: 1_000_000_000 / u64::from(options.frequency),
        main_image: targets.first().and_then(|&pid| recorded.processor.processes.main_image(pid)),
        comments: comments(options, recorded, lacks, (account, counted), &loss_line),
    };
    let begin = MonotonicNs::now();
    let (symbolizer, processes) = (&recorded.processor.symbolizer, &recorded.processor.processes);
    let counts = counted.map(RecordingCounts::account);
    let counts =
        account.map(|account| (account, EXACT)).or(counts.as_ref().map(|of| (of, COUNTED)));
    let bytes = match counts {
        None => perfusion_pprof::encode(&recorded.window, symbolizer, processes, &about)?,
        Some((account, how)) => {
            let mut profile =
                perfusion_pprof::message(recorded.window.entries(), symbolizer, processes, &about)?;
            exact_merge::merge(&mut profile, account, how, recorded.processor.type_names());
            perfusion_pprof::pack(&profile)?
        }
    };
    tracing::info!(bytes = bytes.len(), took_ns = MonotonicNs::now().0 - begin.0, "encoded");
    file::write(&options.output, &bytes)?;
    say.line(&format!("{}{loss_line}", perfusion_pprof::LOSS_PREFIX));
    if let Some(line) = spans(options, recorded) {
        say.line(&line);
    }
    recorded
        .window
        .pool_lines(None)
        .for_each(|line| say.line(&format!("{}{line}", perfusion_pprof::POOL_PREFIX)));
    counted.iter().flat_map(|counted| counted.lines()).for_each(|line| say.line(&line));
    say.line(&format!(
        "wrote {} ({} stacks, {})",
        shown(&options.output),
        recorded.window.entries().len(),
        size(bytes.len())
    ));
    Ok(())
}

/// How many stacks say what their thread worked for, if they were to.
fn spans(options: &RecordArgs, recorded: &RecordingResult) -> Option<String> {
    let count = || {
        let found = recorded.counters.iter().find(|(name, _)| name == "spans");
        found.map_or(0, |(_, count)| *count)
    };
    options.spans.then(|| match count() {
        0 if !cfg!(target_arch = "x86_64") => {
            "spans: none; where threads publish them is known on \
             x86-64 only"
                .to_owned()
        }
        0 => {
            "spans: none; no thread published what it worked for (OpenTelemetry's thread context: \
             otel_thread_ctx_v1)"
                .to_owned()
        }
        count => format!(
            "spans: {count} stacks have trace_id and span_id, as their threads \
             published them"
        ),
    })
}

/// What there is less of than there should be: for want of rights, of processes without a library,
/// and of columns.
type MissingParts<'a> = (&'a [FeatureLimit], &'a [String], &'a [String]);

fn comments(
    options: &RecordArgs,
    recorded: &RecordingResult,
    (limits, without_shim, columns): MissingParts<'_>,
    (account, counted): (Option<&ExactAccount>, Option<&RecordingCounts>),
    loss_line: &str,
) -> Vec<String> {
    let mut comments = vec![
        format!("perfusion {}", env!("CARGO_PKG_VERSION")),
        format!("{}{loss_line}", perfusion_pprof::LOSS_PREFIX),
        format!(
            "cpu: {} samples per second and CPU say where; each thread's sum is its exact on-CPU \
             time",
            options.frequency
        ),
        "runnable, blocked: exact per thread; split among stacks by waits kept with known \
         probability"
            .to_owned(),
        format!(
            "{}{}",
            perfusion_pprof::WAIT_STACKS_PREFIX,
            recorded.window.wait_chances.text(options.wait_stacks_one_in)
        ),
    ];
    if options.waker_stacks {
        comments.push(
            "[woken by]: the frames beyond are the stack of the thread that ended the wait, its \
             innermost frame first; timers, other interrupts \
             and threads that were not recorded have none"
                .to_owned(),
        );
    }
    let held = FrameKey::Marker(Marker::HeldBy);
    if recorded.window.entries().any(|entry| entry.frames.contains(&held)) {
        comments.push(
            "[held by]: the frames beyond are where the lock's owner was most of the time while it \
             was waited for, as far as it was seen, its innermost frame first".to_owned(),
        );
    }
    comments.extend(spans(options, recorded));
    comments.extend(wishes(options).comments());
    comments.extend(
        recorded
            .window
            .pool_lines(None)
            .map(|line| format!("{}{line}", perfusion_pprof::POOL_PREFIX)),
    );
    if let Some(account) = account {
        comments.push(EXACT_COMMENT.to_owned());
        comments.extend(exact_summary::lines(account));
    }
    if let Some(counted) = counted {
        comments.push(COUNTED_COMMENT.to_owned());
        comments.extend(counted.lines());
    }
    comments.extend(limits.iter().map(|limit| format!("{}{limit}", perfusion_pprof::LIMITED)));
    comments.extend(
        without_shim.iter().map(|reason| format!("{}{reason}", perfusion_pprof::WITHOUT_SHIM)),
    );
    comments.extend(columns.iter().cloned());
    comments.extend(recorded.processor.estimator_comments());
    // docs/metrics.md has all names; the ones at zero would be most of what a pprof tool prints
    // above its table.
    let counted = recorded.counters.iter().filter(|(_, value)| *value > 0);
    comments.extend(counted.map(|(name, value)| format!("{name}: {value}")));
    comments
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn size(bytes: usize) -> String {
    perfusion_model::units::human(i64::try_from(bytes).unwrap_or(i64::MAX), "bytes")
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::OTHER)
}
