//! The daemon's own log: on stderr, for people or one JSON object a line. Each place in the code
//! has so many lines a minute; what was left out is said in one line instead, so that nothing that
//! goes wrong again and again fills a disk.

use super::nonblocking_writer::NonblockingWriter;
use crate::config::{LogConfig as Options, LogFormat, LogLevel};
use crate::error::Error;
use crate::log_filter;
use perfusion_export::failure_states::SAID;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

/// Lines that one place in the code may write in a period.
const LINES: u64 = 10;
/// From its first line on.
const PERIOD: Duration = Duration::from_secs(60);
/// Characters of a line by which it is named when others like it are left out.
const NAMED_BY: usize = 80;

/// How long whoever reads the log is waited for when the daemon ends.
const LAST: Duration = Duration::from_secs(1);
/// And when it is to end at once.
const AT_ONCE: Duration = Duration::from_millis(100);

/// The log of this program, however many have it.
#[derive(Clone)]
pub(super) struct DaemonLog {
    limiter: Limiter,
    output: NonblockingWriter,
}

/// Begins to log, as configured; once in the life of the program. Lines wait until they are
/// [written](DaemonLog::write). What the command line says of the level goes before the
/// environment.
pub(super) fn start(log: &Options, level_by_flag: bool) -> DaemonLog {
    let level = match log.level {
        LogLevel::Error => "error",
        LogLevel::Warn => "warn",
        LogLevel::Info => "info",
        LogLevel::Debug => "debug",
    };
    let (filter, problem) = log_filter::filter(level, level_by_flag);
    let (limiter, output) = (Limiter::default(), NonblockingWriter::default());
    let writer = output.clone();
    let form =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || writer.clone());
    match log.format {
        LogFormat::Json => form.json().flatten_event(true).finish().with(limiter.clone()).init(),
        LogFormat::Text => form
            .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
            .with_target(false)
            .finish()
            .with(limiter.clone())
            .init(),
    }
    if let Some(problem) = problem {
        tracing::error!("{problem}");
    }
    DaemonLog { limiter, output }
}

impl DaemonLog {
    /// Lines are written from now on, by another thread.
    ///
    /// # Errors
    /// When there can be none.
    pub(super) fn write(&self) -> io::Result<()> {
        self.output.begin(io::stderr())
    }

    /// To be called now and then: says what was left out where a period is over, and what was lost.
    /// That is handed back, to be counted.
    pub(super) fn look(&self, now: Instant) -> u64 {
        self.limiter.sum_up(now);
        if let Some(lines) = self.output.unsaid() {
            tracing::warn!(
                lines,
                "lines of this log are lost: whoever reads it was too slow, or they could not be \
                 written"
            );
        }
        self.output.lost()
    }

    /// See [`Limiter::begin_anew`].
    pub(super) fn begin_anew(&self) {
        self.limiter.begin_anew();
    }

    /// The last there is to say, and the daemon's exit code.
    pub(super) fn end(&self, ended: Result<u8, Error>) -> u8 {
        let code = ended.unwrap_or_else(|error| {
            // By way of the queue: a reader that has stalled would hold the end up.
            let mut output = self.output.clone();
            output.write_all(format!("perfusion: {error}\n").as_bytes()).ok();
            error.exit_code()
        });
        self.begin_anew();
        // Without a thread nobody is told.
        self.write().ok();
        self.output.flush(LAST);
        code
    }

    /// Ends the process, whatever its threads are at.
    pub(super) fn exit(&self, code: i32) -> ! {
        self.begin_anew();
        self.output.flush(AT_ONCE);
        std::process::exit(code);
    }
}

/// Counts lines, and leaves out those of places that have had theirs. Lines of the level `debug`
/// are not counted: who asks for them wants all.
#[derive(Clone, Default)]
struct Limiter(Arc<Mutex<HashMap<Identifier, CallsiteLimit>>>);

/// A place in the code that writes lines. There are as many as the program has.
struct CallsiteLimit {
    since: Instant,
    lines: u64,
    /// The first line that was left out.
    named: String,
}

impl CallsiteLimit {
    fn left_out(&self) -> u64 {
        self.lines.saturating_sub(LINES)
    }
}

impl Limiter {
    /// Says what was left out where a period is over. To be called now and then.
    fn sum_up(&self, now: Instant) {
        self.end_periods(|place| now.saturating_duration_since(place.since) >= PERIOD);
    }

    /// Says what was left out until now; each place has a new period. Whatever went on before, what
    /// is said at the daemon's end is not left out.
    fn begin_anew(&self) {
        self.end_periods(|_| true);
    }

    fn end_periods(&self, is_over: impl Fn(&CallsiteLimit) -> bool) {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over: Vec<CallsiteLimit> =
            places.extract_if(|_, place| is_over(place)).map(|(_, place)| place).collect();
        // The line below comes here, too.
        drop(places);
        for place in over.iter().filter(|place| place.left_out() > 0) {
            tracing::warn!(
                "{} more of these lines were left out: {}",
                place.left_out(),
                place.named
            );
        }
    }

    /// True when one more line may come from this place.
    fn take(&self, place: Identifier, now: Instant, name: impl FnOnce() -> String) -> bool {
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.entry(place).or_insert(CallsiteLimit {
            since: now,
            lines: 0,
            named: String::new(),
        });
        place.lines = place.lines.saturating_add(1);
        if place.left_out() == 1 {
            place.named = name();
        }
        place.left_out() == 0
    }
}

impl<S: Subscriber> Layer<S> for Limiter {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        // States of receivers are few by their own rule: one receiver's lines must not take
        // another's.
        *metadata.level() >= Level::DEBUG
            || metadata.target() == SAID
            || self.take(metadata.callsite(), Instant::now(), || name(event))
    }
}

/// The beginning of a line's text.
fn name(event: &Event<'_>) -> String {
    struct MessageText(String);
    impl Visit for MessageText {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}").chars().take(NAMED_BY).collect();
            }
        }
    }
    let mut message = MessageText(String::new());
    event.record(&mut message);
    message.0
}

#[cfg(test)]
mod tests {
    use super::{LINES, Limiter, PERIOD};
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};
    use std::time::Instant;
    use tracing_subscriber::layer::SubscriberExt as _;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Lines {
        /// What was written since the last call.
        fn take(&self) -> Vec<String> {
            let text = std::mem::take(&mut *self.0.lock().unwrap());
            String::from_utf8(text).unwrap().lines().map(str::to_owned).collect()
        }
    }

    #[test]
    fn each_place_has_ten_lines_a_minute_and_says_how_many_more_there_were() {
        let (lines, limiter) = (Lines::default(), Limiter::default());
        let writer = lines.clone();
        let form = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
        let log = form.with_writer(move || writer.clone()).finish().with(limiter.clone());
        tracing::subscriber::with_default(log, || {
            let often = |times: u64| (0..times).for_each(|time| tracing::error!(time, "it fails"));
            often(LINES + 30);
            tracing::error!("the first of another place");
            (0..2 * LINES).for_each(|_| tracing::debug!("who asks for these wants all"));
            let said = lines.take();
            let count = |said: &[String], text: &str| {
                said.iter().filter(|line| line.contains(text)).count()
            };
            assert_eq!(count(&said, "it fails"), 10, "{said:#?}");
            assert_eq!(count(&said, "the first of another place"), 1);
            assert_eq!(count(&said, "wants all"), 20);
            // Its minute is not over.
            limiter.sum_up(Instant::now());
            assert!(lines.take().is_empty());
            limiter.sum_up(Instant::now() + PERIOD);
            let said = lines.take();
            assert!(
                said.len() == 1
                    && said[0].contains("30 more of these lines were left out: it fails"),
                "{said:?}"
            );

            often(LINES + 5);
            assert_eq!(lines.take().len(), 10, "a new minute");
            // At the end nothing is left out, whatever went on before.
            limiter.begin_anew();
            often(1);
            let said = lines.take();
            assert!(
                said[0].contains("5 more of these lines") && said[1].contains("it fails"),
                "{said:?}"
            );
            limiter.begin_anew();
            assert!(lines.take().is_empty());
        });
    }
}
