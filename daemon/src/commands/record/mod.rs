//! `perfusion record`: targets in, one file out.

mod attaching;
mod ending;
mod native_symbols;
mod profile;

use super::target::{check_seen, check_target};
use crate::cli::{AllocCounts, RecordArgs, exit};
use crate::end_signals::EndSignals;
use crate::error::{Error, say};
use crate::memory_guard::{self, AttachedProcesses};
use crate::select::cgroups::cgroup_id;
use attaching::{LateAttaches, follow};
use ending::{EndWatch, RecordEnd, exit_code, leave_on_second_signal};
use perfusion_dotnet::attach::{self, AttachError};
use perfusion_dotnet::counts::{self, Counting, TypeEventRate};
use perfusion_dotnet::exact;
use perfusion_export::file;
use perfusion_host::process::ProcessTable;
use perfusion_host::system_limits::raise_open_files;
use perfusion_recorder::Recording;
use perfusion_recorder::follow::{AttachTargets, Follower};
use perfusion_report::exact_merge;
use perfusion_sources::kernel::features::{self, FeatureLimit};
use perfusion_sources::kernel::{KernelError, KernelOptions, KernelSelection, KernelSource};
use perfusion_sources::launch::{self, GatedChild};
use perfusion_sources::shim::{COLUMNS, ExactTables, NOT_RECORDED, ShimSettings, ShimSource};
use profile::{RecordedProfile, account, write_account};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant, SystemTime};

/// How long running processes are read at the start of a recording of the whole host. The others
/// are when they are first seen.
const READING: Duration = Duration::from_millis(200);

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
    let mut signals =
        EndSignals::listen_at_terminal().map_err(Error::internal("signal handler"))?;
    let account_path = check(options)?;
    let limits = missing_rights(say);
    attach::shim_copy::begin_sweep();
    let settings = ShimSettings::new(options.subscriptions())
        .map_err(|source| Error::internal("random number")(source.into()))?
        .forced(options.force);
    // A shim whose region cannot be opened would only be a burden to the process.
    let with_shim = !options.no_attach
        && !limits.iter().any(|limit| matches!(limit, FeatureLimit::MappedFiles { .. }));

    let mut program = Program::prepare(options, &settings, with_shim, say)?;
    let mut targets = options.pid.clone();
    targets.extend(program.pid());
    raise_open_files();
    let kernel = KernelSource::start(&kernel_options(options, &targets, program.pid())?)?;
    let (began, began_wall, began_ns) = (Instant::now(), SystemTime::now(), kernel.started());
    let processes = adopted(options, &targets, began);
    let tables = ExactTables::default();
    let shims = shim_source(options, &settings, &program, &tables);
    let recording =
        Recording::start(kernel, shims, processes).map_err(Error::internal("starting a thread"))?;
    let watcher = recording.watcher();
    if program.pid().is_some() && signals.come().is_some() {
        return Err(Error::NotStarted { command: options.command.join(" ") });
    }
    let child = program.release()?;
    let late = LateAttaches::since(began);
    let attached = AttachedProcesses::default();
    let telling = (late.clone(), attached.clone(), say);
    let mut follower = attach_targets(options, child.as_ref(), with_shim)
        .map(|targets| follow(targets, settings, watcher, telling));

    say.line(&format!("recording {}; Ctrl-C ends it", describe(options, child.as_ref())));
    if with_shim && follower.is_none() {
        say.line(
            "without --attach: allocations only of .NET processes that have a shim already; \
             managed names are read from memory",
        );
    }
    let watch = EndWatch {
        options,
        recording: &recording,
        began,
        follower: follower.as_ref(),
        attached: &attached,
        say,
    };
    let (end, child) = watch.wait(child, &mut signals)?;
    // First: whoever starts from now on finds no library, and nobody waits for a recording that is
    // over.
    let counting = program.cease();
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
    let mut recorded = recording.stop().ok_or(Error::Failed)?;
    native_symbols::complete(&mut recorded, &options.symbols, say)?;
    if let Some((_, account)) = &mut account {
        exact_merge::number_modules(account, |pid| recorded.processor.contexts(pid));
    }
    let duration = Duration::from_nanos(recorded.ended.0.saturating_sub(began_ns.0));
    {
        // A pipe nobody reads must not keep this program alive; what is written into one is never
        // half a file.
        let _held = (!file::is_special(&options.output)).then(|| writing.lock());
        let mut columns = late.comments(duration);
        if options.no_attach {
            columns
                .push(format!("{COLUMNS}{NOT_RECORDED}: --no-attach lets nobody load the library"));
        }
        let profile = RecordedProfile {
            options,
            recorded: &recorded,
            start: began_wall,
            duration,
            main: targets.first().copied(),
            account: account.as_ref().map(|(_, account)| account),
            counted: counted.as_ref(),
            limits: &limits,
            without_shim: &without_shim,
            columns,
            say,
        };
        profile.write()?;
        if let Some((path, account)) = &account {
            write_account(path, account, say)?;
        }
    }
    finish(options, end, child, &attached, say)
}

/// Checks what can be before anything is started. The path of the second file of exact mode, where
/// there is to be one.
fn check(options: &RecordArgs) -> Result<Option<PathBuf>, Error> {
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
    features::check().map_err(KernelError::from)?;
    if options.exact || options.alloc_counts.is_some() {
        // Else its tables could not be opened.
        features::mapped_files()
            .map_err(|source| AttachError::Unreadable { pid: std::process::id(), source })?;
    }
    for &pid in &options.pid {
        check_seen(pid)?;
    }
    Ok(account_path)
}

/// What a recording lacks for want of rights, which is said.
fn missing_rights(say: StatusLines) -> Vec<FeatureLimit> {
    let limits: Vec<FeatureLimit> = features::limits(attach::helper::is_used())
        .into_iter()
        .filter_map(|(_, result)| result.err())
        .collect();
    for limit in &limits {
        say.line(&format!("{}{limit}", perfusion_pprof::LIMITED));
    }
    limits
}

/// The program to start, which waits at its gate because its pid must be known to select it. What
/// its start takes is kept while it is recorded. Without a program there is only what counts.
struct Program {
    gated: Option<GatedChild>,
    pid: Option<u32>,
    counting: Option<Counting>,
    /// Its children may load it at any time. They look at its lock and at nothing else to see
    /// whether this process lives.
    library: Option<attach::shim_copy::ShimCopy>,
}

impl Program {
    fn prepare(
        options: &RecordArgs,
        settings: &ShimSettings,
        with_shim: bool,
        say: StatusLines,
    ) -> Result<Self, Error> {
        // Else a typo would be found when the file of an earlier recording is about to be replaced.
        launch::check(&options.command)?;
        if options.exact {
            memory_guard::check_start("--exact", memory_guard::EXACT_BYTES, options.force)?;
        }
        let counting =
            options.alloc_counts.map(|often| counting(often, options.force, say)).transpose()?;
        let mut program = Self { gated: None, pid: None, counting, library: None };
        if !options.command.is_empty() {
            let counting = program.counting.iter();
            let mut environment: Vec<_> = counting.flat_map(Counting::environment).collect();
            if with_shim {
                let launch = attach::launch::launch(settings, options.exact)?;
                environment.extend(launch.environment);
                program.library = Some(launch.library);
            }
            let gated = GatedChild::spawn(&options.command, &environment)?;
            program.pid = Some(gated.pid());
            program.gated = Some(gated);
        }
        Ok(program)
    }

    fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Lets the program go.
    fn release(&mut self) -> Result<Option<Child>, Error> {
        Ok(self.gated.take().map(GatedChild::release).transpose()?)
    }

    /// Whoever starts from now on is not recorded. What counts is to be finished.
    fn cease(self) -> Option<Counting> {
        drop(self.library);
        let mut counting = self.counting;
        if let Some(counting) = &mut counting {
            counting.cease();
        }
        counting
    }
}

/// What has runtimes count from their start on.
fn counting(often: AllocCounts, force: bool, say: StatusLines) -> Result<Counting, Error> {
    let buffer_mib = memory_guard::counts_buffer(counts::BUFFER_MIB, force)?;
    if buffer_mib < counts::BUFFER_MIB {
        say.line(&format!(
            "each runtime keeps up to {buffer_mib} MiB of its events instead of {}, for no \
             more memory is left; \
             what finds no room is lost and counted",
            counts::BUFFER_MIB
        ));
    }
    let rate = match often {
        AllocCounts::Low => TypeEventRate::Low,
        AllocCounts::High => TypeEventRate::High,
    };
    Ok(Counting::open(rate, buffer_mib)?)
}

fn kernel_options(
    options: &RecordArgs,
    targets: &[u32],
    from_exec: Option<u32>,
) -> Result<KernelOptions, Error> {
    let selection = match &options.cgroup {
        Some(path) => KernelSelection::Cgroup(cgroup_id(path)?),
        None if options.all => KernelSelection::All,
        None => KernelSelection::Pids(targets.to_vec()),
    };
    Ok(KernelOptions {
        frequency_hz: options.frequency,
        selection,
        // What it does at its gate is this program's.
        from_exec,
        stack_copy_bytes: options.stack_kib * 1024,
        wait_stack_budget_bytes_per_s: u64::from(options.wait_stack_mib) << 20,
        wait_stacks_one_in: options.wait_stacks_one_in,
        waker_stacks: options.waker_stacks,
        spans: options.spans,
        times_stages: options.time_stages,
        ..KernelOptions::default()
    })
}

/// The processes that run already. Those nobody named too, as far as time allows: one that ends
/// before its first stack is looked at has no maps to be read then.
fn adopted(options: &RecordArgs, targets: &[u32], began: Instant) -> ProcessTable {
    let mut processes = ProcessTable::new();
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
    processes
}

fn shim_source(
    options: &RecordArgs,
    settings: &ShimSettings,
    program: &Program,
    tables: &ExactTables,
) -> ShimSource {
    let mut shims = ShimSource::new(settings.owner, options.limits.limits());
    if options.exact {
        shims = shims.with_exact(tables.clone());
    }
    if let Some(counting) = &program.counting {
        shims = shims.with_counts(Box::new(counting.starts()));
    }
    // Before it is let go: a shell has children within a millisecond, and those of a process that
    // is not watched are not either.
    if let Some(pid) = program.pid() {
        shims.watch(pid);
    }
    shims
}

/// Who gets the shim.
fn attach_targets(
    options: &RecordArgs,
    child: Option<&Child>,
    with_shim: bool,
) -> Option<AttachTargets> {
    match (child, &options.cgroup) {
        _ if !with_shim => None,
        (Some(child), _) => Some(AttachTargets::Started(child.id())),
        (None, Some(path)) => options.attach.then(|| AttachTargets::Cgroup(path.clone())),
        (None, None) if options.all => options.attach.then_some(AttachTargets::All),
        (None, None) => Some(AttachTargets::Named(options.pid.clone())),
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

/// The exit code, when a program that still runs has ended.
fn finish(
    options: &RecordArgs,
    end: RecordEnd,
    child: Option<Child>,
    attached: &AttachedProcesses,
    say: StatusLines,
) -> Result<u8, Error> {
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
            let status = child.wait().map_err(Error::internal("waiting for the program"))?;
            Ok(exit_code(status))
        }
        _ => Ok(0),
    }
}
