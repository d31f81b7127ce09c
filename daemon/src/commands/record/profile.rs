//! The file of a recording: what was recorded, and in comments what it lacks.

use super::StatusLines;
use crate::cli::RecordArgs;
use crate::error::Error;
use perfusion_dotnet::counts::RecordingCounts;
use perfusion_dotnet::exact::{self, Ending, ExactAccount};
use perfusion_export::file;
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::{FrameKey, Marker};
use perfusion_pprof::{self, ProfileInfo};
use perfusion_recorder::RecordingResult;
use perfusion_report::exact_merge::{self, COUNTED, EXACT};
use perfusion_report::exact_summary;
use perfusion_sources::kernel::features::FeatureLimit;
use perfusion_sources::shim::ExactTables;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// What exact values mean beside stacks that are sampled.
const EXACT_COMMENT: &str = "alloc_objects, alloc_space: exact per process and type; split among \
     stacks by the objects that were sampled";

/// The same of counts by the runtime.
const COUNTED_COMMENT: &str = "alloc_objects, alloc_space: counted by the runtime per process and \
     type; not told of are, on each thread, the last objects of a type, \
     up to 999 for each thread of its runtime, the first one where another thread made one before, \
     and on .NET 10 most of what is boxed; split among stacks by the objects that were sampled";

/// A recording that is over, to be written as a profile.
pub(super) struct RecordedProfile<'a> {
    pub(super) options: &'a RecordArgs,
    pub(super) recorded: &'a RecordingResult,
    pub(super) start: SystemTime,
    pub(super) duration: Duration,
    /// The process whose program names the profile.
    pub(super) main: Option<u32>,
    /// What exact mode has counted, and what runtimes have.
    pub(super) account: Option<&'a ExactAccount>,
    pub(super) counted: Option<&'a RecordingCounts>,
    /// Missing rights, processes without a library with the reasons, and missing columns.
    pub(super) limits: &'a [FeatureLimit],
    pub(super) without_shim: &'a [String],
    pub(super) columns: Vec<String>,
    pub(super) say: StatusLines,
}

impl RecordedProfile<'_> {
    /// Writes the file, and says what is in it.
    pub(super) fn write(&self) -> Result<(), Error> {
        let Self { options, recorded, account, counted, say, .. } = *self;
        let loss_line = perfusion_pprof::loss::line(&recorded.counters);
        let about = ProfileInfo {
            start: self.start,
            duration: self.duration,
            period_ns: 1_000_000_000 / u64::from(options.frequency),
            main_image: self.main.and_then(|pid| recorded.processor.processes.main_image(pid)),
            comments: self.comments(&loss_line),
        };
        let begin = MonotonicNs::now();
        let (symbolizer, processes) =
            (&recorded.processor.symbolizer, &recorded.processor.processes);
        let counts = counted.map(RecordingCounts::account);
        let counts =
            account.map(|account| (account, EXACT)).or(counts.as_ref().map(|of| (of, COUNTED)));
        let bytes = match counts {
            None => perfusion_pprof::encode(&recorded.window, symbolizer, processes, &about)?,
            Some((account, how)) => {
                let mut profile = perfusion_pprof::message(
                    recorded.window.entries(),
                    symbolizer,
                    processes,
                    &about,
                )?;
                exact_merge::merge(&mut profile, account, how, recorded.processor.type_names());
                perfusion_pprof::pack(&profile)?
            }
        };
        tracing::info!(bytes = bytes.len(), took_ns = MonotonicNs::now().0 - begin.0, "encoded");
        file::write(&options.output, &bytes)?;
        say.line(&format!("{}{loss_line}", perfusion_pprof::LOSS_PREFIX));
        if let Some(line) = self.spans() {
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
    fn spans(&self) -> Option<String> {
        let Self { options, recorded, .. } = *self;

        let count = || {
            let found = recorded.counters.iter().find(|(name, _)| name == "spans");
            found.map_or(0, |(_, count)| *count)
        };
        options.spans.then(|| {
            match count() {
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
    }
        })
    }

    fn comments(&self, loss_line: &str) -> Vec<String> {
        let Self { options, recorded, account, counted, limits, without_shim, .. } = *self;

        let mut comments = vec![
            format!("perfusion {}", env!("CARGO_PKG_VERSION")),
            format!("{}{loss_line}", perfusion_pprof::LOSS_PREFIX),
            format!(
                "cpu: {} samples per second and CPU say where; each thread's sum is its exact \
                 on-CPU time",
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
        comments.extend(self.spans());
        comments.extend(options.subscriptions().comments());
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
        comments.extend(self.columns.iter().cloned());
        comments.extend(recorded.processor.estimator_comments());
        // docs/metrics.md has all names; the ones at zero would be most of what a pprof tool prints
        // above its table.
        let counted = recorded.counters.iter().filter(|(_, value)| *value > 0);
        comments.extend(counted.map(|(name, value)| format!("{name}: {value}")));
        comments
    }
}

/// What exact mode has counted.
pub(super) fn account(
    options: &RecordArgs,
    tables: &ExactTables,
    program: Option<&u32>,
) -> ExactAccount {
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

/// Writes what exact mode has counted beside the profile.
pub(super) fn write_account(
    path: &Path,
    account: &ExactAccount,
    say: StatusLines,
) -> Result<(), Error> {
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

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn size(bytes: usize) -> String {
    perfusion_model::units::human(i64::try_from(bytes).unwrap_or(i64::MAX), "bytes")
}
