//! The table of functions: how much of a sample type is in each itself (flat) and in what it calls
//! (cum).
//!
//! Every wait ends in the kernel's scheduler and every allocation in the runtime, which says
//! nothing, and which helpers of the framework are in between differs from runtime to runtime. So a
//! wait's or allocation's own function is the innermost managed one that is not the framework's;
//! without one the innermost managed one, or the innermost outside the kernel. The table says so. A
//! wait is the doing of the functions that waited: who ended it has no part in the table.

use super::ReportError;
use super::merge::{WindowLengths, is_of_moments};
use super::stacks::{
    CodeKind, ProfileStacks, ProfileView, ReportFrame, SignedTotal, ViewedSamples, shown_name,
};
use perfusion_aggregate::pool::STARVATION;
use perfusion_model::text::clean;
use perfusion_model::units::{human, percent};
use perfusion_pprof::proto::{Profile, Sample};
use perfusion_pprof::{POOL_PREFIX, RATES_LOWERED_PREFIX, WAIT_STACKS_PREFIX};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::io::IsTerminal;

/// How to print.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Rows.
    pub limit: usize,
    /// Columns of the terminal; `None`: lines may be as long as names are.
    pub width: Option<usize>,
    /// ANSI colours.
    pub colour: bool,
    /// Most cumulative first, not most of its own.
    pub cumulative: bool,
    /// What to show.
    pub view: ProfileView,
    /// The windows of several profiles that are shown as one, and their lengths.
    pub windows: WindowLengths,
}

impl Default for TableOptions {
    fn default() -> Self {
        let (view, windows) = (ProfileView::default(), WindowLengths::new());
        Self { limit: 30, width: None, colour: false, cumulative: false, view, windows }
    }
}

impl TableOptions {
    /// Defaults for standard output: as wide as the terminal and in colour where it is one and
    /// `NO_COLOR` is not set.
    #[must_use]
    pub fn for_stdout() -> Self {
        let stdout = std::io::stdout();
        let terminal = stdout.is_terminal();
        let width =
            rustix::termios::tcgetwinsize(&stdout).ok().map(|size| usize::from(size.ws_col));
        Self {
            width: width.filter(|&width| terminal && width > 0),
            colour: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            ..Self::default()
        }
    }
}

#[derive(Default)]
struct FunctionTotals {
    flat: i128,
    cum: i128,
}

/// The table of one sample type, with a heading and, where something was left out, lines that say
/// what.
///
/// # Errors
/// When there is no such sample type or label.
pub fn table(
    profile: &Profile,
    sample_type: &str,
    options: &TableOptions,
) -> Result<String, ReportError> {
    let stacks = ProfileStacks::viewed(profile, &options.view);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(&options.view)?;
    let mut rows: HashMap<ReportFrame<'_>, FunctionTotals> = HashMap::new();
    let mut owned = false;
    let ViewedSamples { values, total, idle } = stacks.values(column, &options.view);
    let whole = total.whole();
    for (sample, value) in values {
        let value = i128::from(value);
        let frames = stacks.own_readable_frames(sample);
        let (frame, has_owner) = flat(&stacks, sample, sample_type, &frames);
        owned |= has_owner;
        if let Some(frame) = frame {
            rows.entry(frame.clone()).or_default().flat += value;
        }
        for frame in frames.into_iter().collect::<HashSet<_>>() {
            rows.entry(frame).or_default().cum += value;
        }
    }
    // What adds up to nothing has not changed.
    rows.retain(|_, row| (row.flat, row.cum) != (0, 0));
    let count = rows.len();
    let mut rows: Vec<_> = rows.into_iter().collect();
    let order = |row: &FunctionTotals| {
        let (flat, cum) = (row.flat.abs(), row.cum.abs());
        if options.cumulative { (cum, flat) } else { (flat, cum) }
    };
    rows.sort_by(|(a, x), (b, y)| order(y).cmp(&order(x)).then_with(|| a.cmp(b)));
    rows.truncate(options.limit);

    let mut table = TopTable::new(&stacks, column, options);
    table.heading(&shown_name(sample_type), total, rows.len(), count, "functions");
    table.dim(&format!("{:>10} {:>6} {:>10} {:>6}  function", "flat", "", "cum", ""));
    let mut unnamed = false;
    for (frame, row) in &rows {
        let numbers = format!(
            "{:>10} {:>6} {:>10} {:>6}  ",
            human(row.flat, table.unit),
            percent(row.flat, whole),
            human(row.cum, table.unit),
            percent(row.cum, whole)
        );
        unnamed |= frame.kind == CodeKind::Native && frame.name.starts_with('[');
        let module = match frame.kind {
            CodeKind::Note | CodeKind::Code => String::new(),
            CodeKind::Kernel => " [kernel]".to_owned(),
            // A frame without a name is called by its file already.
            _ if frame.name.starts_with('[') => String::new(),
            CodeKind::Native | CodeKind::Managed => {
                format!(" [{}]", clean(frame.module.trim_matches(['[', ']'])))
            }
        };
        table.row(&numbers, &frame.name, &module);
    }
    if owned {
        table.remark(
            "flat of waits and allocations: the innermost method outside the framework (System.*, \
             Microsoft.*); where there is none, \
             the innermost managed one, else the innermost outside the kernel",
        );
    }
    if unnamed && stacks.is_ours() {
        table.remark(
            "a file in brackets stands for all its functions without a name: it has no symbols of \
             them",
        );
    }
    if matches!(sample_type, "samples" | "cpu" | "wall") {
        table.remarks(
            stacks.comments().filter(|comment| comment.starts_with(RATES_LOWERED_PREFIX)).collect(),
        );
    }
    if matches!(sample_type, "runnable" | "blocked" | "wall") {
        table.remarks(
            stacks.comments().filter(|comment| comment.starts_with(WAIT_STACKS_PREFIX)).collect(),
        );
    }
    if matches!(sample_type, "blocked" | "wall") {
        let pools: Vec<_> =
            stacks.comments().filter(|comment| comment.starts_with(POOL_PREFIX)).collect();
        let starved = pools.iter().any(|comment| comment.contains(STARVATION));
        table.remarks(pools);
        if starved {
            table.remark(
                "starvation: work had waited for half a second, and no worker had taken any; \
                 --only thread_role=threadpool shows what the workers did",
            );
        }
    }
    table.left_out(total, idle);
    Ok(table.text)
}

/// A table while it is printed.
pub(super) struct TopTable<'a> {
    options: &'a TableOptions,
    /// In which time it happened; empty for what was there at a moment.
    length: String,
    /// Unit of the values.
    pub(super) unit: &'a str,
    /// Why there are none.
    not_recorded: Option<Cow<'a, str>>,
    /// That its numbers are estimates.
    estimated: Option<String>,
    /// Of what, or of which time, there are too few.
    partly: Vec<Cow<'a, str>>,
    /// What the recording says it lacks.
    lacks: Vec<Cow<'a, str>>,
    /// What was printed.
    pub(super) text: String,
}

impl<'a> TopTable<'a> {
    pub(super) fn new(
        stacks: &ProfileStacks<'a>,
        column: usize,
        options: &'a TableOptions,
    ) -> Self {
        let (name, unit) = stacks.sample_types().nth(column).unwrap_or_default();
        let (not_recorded, partly) =
            (stacks.not_recorded(name), stacks.partly_recorded(name).collect());
        let length = match stacks.duration_ns() {
            _ if is_of_moments(name) => String::new(),
            Some(ns) => format!(" in {}", human(ns, "nanoseconds")),
            None => format!(", {NO_DURATION}"),
        };
        let lacks = stacks.lacks().collect();
        let estimated = stacks.estimated(name);
        Self { options, length, unit, not_recorded, estimated, partly, lacks, text: String::new() }
    }

    fn line(&mut self, parts: &[&str]) {
        self.text.extend(parts.iter().copied().chain(["\n"]));
    }

    /// ANSI code of bold, dim and plain text.
    const fn codes(&self) -> [&'static str; 3] {
        if self.options.colour { ["\x1b[1m", "\x1b[2m", "\x1b[0m"] } else { [""; 3] }
    }

    pub(super) fn heading(
        &mut self,
        what: &str,
        total: SignedTotal,
        rows: usize,
        count: usize,
        things: &str,
    ) {
        let [bold, _, plain] = self.codes();
        let human = |value: i128| human(value, self.unit);
        let sum = match total.down {
            0 => format!("total {}", human(total.up)),
            down => format!(
                "difference {} (+{} {}), percentages of {}",
                signed(&human(total.net())),
                human(total.up),
                human(down),
                human(total.whole())
            ),
        };
        let rest = format!(": {sum}{}, {rows} of {count} {things}", self.length);
        self.line(&[bold, what, plain, &rest]);
    }

    /// Of what has no sum.
    pub(super) fn heading_of_moments(
        &mut self,
        what: &str,
        rows: usize,
        count: usize,
        things: &str,
    ) {
        let [bold, _, plain] = self.codes();
        self.line(&[
            bold,
            what,
            plain,
            &format!(": at the end of each, {rows} of {count} {things}"),
        ]);
    }

    /// Name and module as far as there is room behind the numbers.
    pub(super) fn row(&mut self, numbers: &str, name: &str, module: &str) {
        let [_, dim, plain] = self.codes();
        let room = self.options.width.map(|width| width.saturating_sub(numbers.chars().count()));
        let (name, module) = fit(name, module, room);
        self.line(&[numbers, &name, dim, &module, plain]);
    }

    pub(super) fn dim(&mut self, text: &str) {
        let [_, dim, plain] = self.codes();
        self.line(&[dim, text, plain]);
    }

    /// A sentence below the rows, on as many lines as it takes.
    pub(super) fn remark(&mut self, text: &str) {
        let width = self.options.width.unwrap_or(REMARK_WIDTH).min(REMARK_WIDTH);
        let mut line = String::new();
        for word in text.split(' ') {
            if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
                self.dim(&std::mem::take(&mut line));
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        self.dim(&line);
    }

    /// Comments of the profile that are of one kind: the first of them.
    fn remarks(&mut self, comments: Vec<Cow<'a, str>>) {
        comments.iter().take(REMARKS_SHOWN).for_each(|comment| self.remark(comment));
        if let Some(more) = comments.len().checked_sub(REMARKS_SHOWN).filter(|&more| more > 0) {
            self.remark(&format!("and {more} more such comments in the profile"));
        }
    }

    /// What is not in the table, and why it may be empty.
    pub(super) fn left_out(&mut self, total: SignedTotal, idle: i128) {
        let total = total.whole();
        if let Some(estimated) = self.estimated.take().filter(|_| total > 0) {
            self.remark(&estimated);
        }
        if total > 0 {
            let windows =
                if self.options.windows.len() > 1 { "in a part of these windows: " } else { "" };
            let partly = std::mem::take(&mut self.partly);
            self.remarks(
                partly.into_iter().map(|comment| format!("{windows}{comment}").into()).collect(),
            );
        }
        if idle > 0 {
            self.remark(&parked(idle, self.unit));
        } else if total == 0 {
            let why = self.not_recorded.take();
            self.remark(why.as_deref().unwrap_or("nothing was counted"));
            if why.is_none() {
                let lacks = std::mem::take(&mut self.lacks);
                self.remarks(lacks);
            }
        }
    }
}

/// Said where a profile has no duration: nothing can be said per second, then.
pub(super) const NO_DURATION: &str = "the profile names no duration";

/// A number with its sign.
fn signed(number: &str) -> String {
    if number.starts_with('-') || number == "0" { number.to_owned() } else { format!("+{number}") }
}

/// Most comments of a kind repeated below a table.
const REMARKS_SHOWN: usize = 5;

/// Columns of what is said below a table.
const REMARK_WIDTH: usize = 110;

/// What is said of parked threads that are not shown.
#[must_use]
pub fn parked(idle: i128, unit: &str) -> String {
    format!("not shown: {} of parked threads (wait_kind=idle); --idle adds them", human(idle, unit))
}

/// Sample types whose values belong to a method as waits do: what the framework does inside is not
/// what one looks for.
const OWNED: [&str; 7] = [
    "alloc_objects",
    "alloc_space",
    "inuse_objects",
    "inuse_space",
    "exceptions",
    "contentions",
    "delay",
];

/// The frame that a sample counts as flat, and whether that need not be the innermost one: it is of
/// a wait or an allocation.
pub(crate) fn flat<'f, 'a>(
    stacks: &ProfileStacks<'a>,
    sample: &Sample,
    sample_type: &str,
    frames: &'f [ReportFrame<'a>],
) -> (Option<&'f ReportFrame<'a>>, bool) {
    let has_owner = stacks.is_ours()
        && (OWNED.contains(&sample_type) || stacks.label(sample, "wait_reason").is_some());
    (if has_owner { owner(frames) } else { frames.first() }, has_owner)
}

/// The function a wait or an allocation belongs to.
fn owner<'f, 'a>(frames: &'f [ReportFrame<'a>]) -> Option<&'f ReportFrame<'a>> {
    let written = |frame: &&ReportFrame<'_>| {
        frame.kind == CodeKind::Managed
            && !frame.name.starts_with('[')
            && !frame.name.starts_with("IL_STUB")
    };
    let user = |frame: &&ReportFrame<'_>| frame.kind != CodeKind::Kernel;
    frames
        .iter()
        .find(|frame| written(frame) && !is_framework(frame.module))
        .or_else(|| frames.iter().find(written))
        .or_else(|| frames.iter().find(user))
        .or(frames.first())
}

/// True for modules of .NET, and for code without a module, which something generated when it ran.
fn is_framework(module: &str) -> bool {
    const NAMES: [&str; 4] = ["System.dll", "mscorlib.dll", "netstandard.dll", "WindowsBase.dll"];
    module.starts_with("System.")
        || module.starts_with("Microsoft.")
        || module.starts_with('[')
        || NAMES.contains(&module)
}

/// Name and module cut to `room` characters: the module goes first, then the name's middle.
pub fn fit(name: &str, module: &str, room: Option<usize>) -> (String, String) {
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
