//! The table of functions: how much of a sample type is in each itself (flat) and in what it calls (cum).
//!
//! Every wait ends in the kernel's scheduler, which says nothing. So a wait's own function is the innermost managed one, or, where
//! there is none, the innermost outside the kernel; the table says so.

use super::ReportError;
use super::stacks::{Frame, Kind, Stacks};
use super::units::{human, percent};
use crate::pprof::proto::Profile;
use crate::symbolize::pretty::clean;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::io::IsTerminal;

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Rows.
    pub limit: usize,
    /// Columns of the terminal; `None`: lines may be as long as names are.
    pub width: Option<usize>,
    /// ANSI colours.
    pub colour: bool,
    /// Count parked threads (`wait_kind=idle`) too.
    pub idle: bool,
    /// Only this process.
    pub pid: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { limit: 30, width: None, colour: false, idle: false, pid: None }
    }
}

impl Options {
    /// Defaults for standard output: as wide as the terminal and in colour where it is one and `NO_COLOR` is not set.
    #[must_use]
    pub fn for_stdout() -> Self {
        let stdout = std::io::stdout();
        let terminal = stdout.is_terminal();
        let width = rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col));
        Self {
            width: width.filter(|&width| terminal && width > 0),
            colour: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            ..Self::default()
        }
    }
}

#[derive(Default)]
struct Row {
    flat: i64,
    cum: i64,
}

/// The table of one sample type, with a heading and, where something was left out, lines that say what.
///
/// # Errors
/// When there is no such sample type.
pub fn table(profile: &Profile, sample_type: &str, options: &Options) -> Result<String, ReportError> {
    let stacks = Stacks::new(profile);
    let column = stacks.sample_type(sample_type)?;
    let unit = stacks.sample_types().nth(column).map_or("", |(_, unit)| unit);
    let mut rows: HashMap<Frame<'_>, Row> = HashMap::new();
    let (mut total, mut idle, mut waits) = (0i64, 0i64, false);
    for sample in stacks.samples() {
        let value = sample.value.get(column).copied().unwrap_or(0);
        let other = options.pid.is_some_and(|pid| stacks.number(sample, "pid") != Some(i64::from(pid)));
        if value == 0 || other {
            continue;
        }
        if !options.idle && stacks.is_idle(sample) {
            idle = idle.saturating_add(value);
            continue;
        }
        total = total.saturating_add(value);
        let frames: Vec<Frame<'_>> = stacks.readable_frames(sample).collect();
        let is_wait = stacks.label(sample, "wait_reason").is_some();
        waits |= is_wait;
        if let Some(frame) = if is_wait { waiting(&frames) } else { frames.first() } {
            let row = rows.entry(frame.clone()).or_default();
            row.flat = row.flat.saturating_add(value);
        }
        for frame in frames.into_iter().collect::<HashSet<_>>() {
            let row = rows.entry(frame).or_default();
            row.cum = row.cum.saturating_add(value);
        }
    }
    let count = rows.len();
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|(a, x), (b, y)| (y.flat, y.cum).cmp(&(x.flat, x.cum)).then_with(|| a.cmp(b)));
    rows.truncate(options.limit);

    let (bold, dim, plain) = if options.colour { ("\x1b[1m", "\x1b[2m", "\x1b[0m") } else { ("", "", "") };
    let mut text = String::new();
    let mut line = |content: String| {
        writeln!(text, "{content}").unwrap_or_default();
    };
    line(format!(
        "{bold}{}{plain}: total {} in {}, {} of {count} functions",
        clean(sample_type),
        human(total, unit),
        human(stacks.duration_ns(), "nanoseconds"),
        rows.len(),
    ));
    line(format!("{dim}{:>10} {:>6} {:>10} {:>6}  function{plain}", "flat", "", "cum", ""));
    for (frame, row) in &rows {
        let numbers = format!(
            "{:>10} {:>6} {:>10} {:>6}  ",
            human(row.flat, unit),
            percent(row.flat, total),
            human(row.cum, unit),
            percent(row.cum, total)
        );
        let module = match frame.kind {
            Kind::Note => String::new(),
            Kind::Kernel => " [kernel]".to_owned(),
            // A frame without a name is called by its file already.
            _ if frame.name.starts_with('[') => String::new(),
            Kind::Native | Kind::Managed => format!(" [{}]", clean(frame.module.trim_matches(['[', ']']))),
        };
        let room = options.width.map(|width| width.saturating_sub(numbers.chars().count()));
        let (name, module) = fit(&frame.name, &module, room);
        line(format!("{numbers}{name}{dim}{module}{plain}"));
    }
    if waits {
        line(format!(
            "{dim}flat of a wait: its innermost managed function, else the innermost outside the kernel{plain}"
        ));
    }
    if idle > 0 {
        line(format!("{dim}not shown: {} of parked threads (wait_kind=idle){plain}", human(idle, unit)));
    }
    Ok(text)
}

/// The function a wait belongs to.
fn waiting<'f, 'a>(frames: &'f [Frame<'a>]) -> Option<&'f Frame<'a>> {
    let written = |frame: &&Frame<'_>| {
        frame.kind == Kind::Managed && !frame.name.starts_with('[') && !frame.name.starts_with("IL_STUB")
    };
    let user = |frame: &&Frame<'_>| frame.kind != Kind::Kernel;
    frames.iter().find(written).or_else(|| frames.iter().find(user)).or(frames.first())
}

/// Name and module cut to `room` characters: the module goes first, then the name's middle.
pub(super) fn fit(name: &str, module: &str, room: Option<usize>) -> (String, String) {
    let whole = || (name.to_owned(), module.to_owned());
    let Some(room) = room else { return whole() };
    let name_len = name.chars().count();
    if name_len + module.chars().count() <= room {
        return whole();
    }
    if name_len <= room {
        return (name.to_owned(), String::new());
    }
    let keep = room.saturating_sub(1).max(2);
    let (front, back) = (keep / 2, keep - keep / 2);
    let cut: String =
        name.chars().take(front).chain(['…']).chain(name.chars().skip(name_len - back)).collect();
    (cut, String::new())
}
