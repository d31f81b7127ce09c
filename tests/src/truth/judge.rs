//! Judges stacks against the call chains a workload declares about its threads. Knows nothing of
//! recording.
//!
//! A declared chain is a list of function names, outermost first. `...` stands for one frame or
//! more of a runtime or a system library. What precedes the chain's first function, the way from
//! the thread's start to it, is the same in every stack of such threads and no workload can know
//! it; it is learned: what most of the recorded time has there, and it must begin where threads
//! begin.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::profile::{Frame, Profile, Sample};

/// What stands in a declared chain for one or more frames of a runtime or a system library.
const RUNTIME: &str = "...";
/// The marker above a guessed frame.
const GUESSED: &str = "[guessed caller]";
/// The frame under which a profile gathers the collector's work; no frame of the program.
const COLLECTOR: &str = "Garbage Collector";
/// The marker of a wait in progress when the recording began.
const UNSEEN: &str = "[waiting since before";
/// The marker of a new thread's wait for its first CPU: it has no stack yet.
const NOT_YET_RUN: &str = "[not yet run]";
/// Markers of stacks that are not whole, as they begin.
const INCOMPLETE: [&str; 6] =
    ["[truncated", "[stack lost]", UNSEEN, NOT_YET_RUN, "[not sampled]", "[other stacks]"];
/// Beginnings of the file names of runtimes and system libraries.
const RUNTIME_FILES: [&str; 18] = [
    // Managed code is never said to be in that file.
    crate::app::SINGLE_FILE,
    "libcoreclr",
    "libclrjit",
    "libclrgc",
    "libhost",
    "libSystem.",
    "System.",
    "Microsoft.",
    "libc.",
    "libc-",
    "libm.",
    "libpthread",
    "libgcc_s",
    "libstdc++",
    "ld-",
    "[vdso]",
    "vdso",
    "perfusion-shim-",
];
/// Beginnings of the names of framework, language runtime and harness functions.
const RUNTIME_FUNCTIONS: [&str; 24] = [
    // musl's, where it is linked into the program.
    "sccp",
    "nanosleep",
    "sem_post",
    "__syscall_ret",
    "clock_",
    "__clock_",
    "syscall.",
    "internal/runtime/",
    "System.",
    "Interop",
    "Internal.",
    "Microsoft.",
    "Workload",
    "[runtime stub]",
    "IL_STUB",
    "dynamicClass.IL_STUB",
    "runtime.",
    "std::",
    "core::",
    "alloc::",
    "<alloc::",
    "<core::",
    "<std::",
    "__rust",
];
/// Where stacks of threads begin: files of C libraries, and functions of programs that have none.
const FIRST_FILES: [&str; 4] = ["libc.", "libc-", "libpthread", "ld-musl"];
const FIRST_FUNCTIONS: [&str; 6] = [
    "_start",
    "__clone",
    "clone",
    "runtime.goexit.abi0",
    "runtime.rt0_go.abi0",
    "runtime.mstart.abi0",
];

/// The chains of one thread: each of its stacks must be on one of them.
pub type Chains = Vec<Vec<String>>;

/// Which moments of a thread are judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moments {
    /// The thread is inside its chain all the time.
    Steady,
    /// From its first instruction to its last: on the way to the chain it is in the runtime.
    WholeLife,
}

/// What became of one stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// It reaches the thread's start and nothing was lost.
    pub complete: bool,
    /// The known chain is there whole, in order, and nothing else.
    pub exact: bool,
    /// It is no stack but the note that the wait began before the recording.
    pub unseen: bool,
    /// It is no stack but the note that the thread was new and had not run yet.
    pub not_yet_run: bool,
    /// It ends in runtime frames that no chain declares: their number and order were not checked.
    pub in_runtime: bool,
    /// Frames of the program, markers and the kernel's not counted.
    pub frames: usize,
    /// Of them, those that are not where the chain has one.
    pub wrong_frames: usize,
    /// Of them, those the profiler says it guessed.
    pub guessed_frames: usize,
    /// How many of them, from the outermost on, the best chain explains.
    pub fitting: usize,
}

/// Sums over stacks, each weighing its value in the profile (samples, or nanoseconds of waiting).
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// All stacks.
    pub total: f64,
    /// Complete ones.
    pub complete: f64,
    /// Exact ones.
    pub exact: f64,
    /// Waits nobody could see the stack of: in progress when the recording began, or, not in the
    /// total, of threads that had not run yet.
    pub unseen: f64,
    /// Exact ones that end in undeclared runtime frames.
    pub in_runtime: f64,
    /// Frames.
    pub frames: f64,
    /// Frames that do not belong there.
    pub wrong_frames: f64,
    /// Frames the profiler guessed.
    pub guessed_frames: f64,
    /// Stacks that are not exact, as text, with their sums.
    pub wrong: BTreeMap<String, f64>,
}

impl Shares {
    /// Adds a stack of this value.
    pub fn add(&mut self, verdict: Verdict, value: f64, text: impl FnOnce() -> String) {
        let when = |condition: bool| if condition { value } else { 0.0 };
        self.total += value;
        self.complete += when(verdict.complete);
        self.exact += when(verdict.exact);
        self.unseen += when(verdict.unseen);
        self.in_runtime += when(verdict.exact && verdict.in_runtime);
        self.frames += value * verdict.frames as f64;
        self.wrong_frames += value * verdict.wrong_frames as f64;
        self.guessed_frames += value * verdict.guessed_frames as f64;
        if !verdict.exact {
            *self.wrong.entry(text()).or_insert(0.0) += value;
        }
    }

    /// Of all, in percent; `None` of nothing.
    pub fn percent(&self, part: f64) -> Option<f64> {
        (self.total > 0.0).then(|| part / self.total * 100.0)
    }

    /// Of all frames, in percent.
    pub fn percent_of_frames(&self, part: f64) -> Option<f64> {
        (self.frames > 0.0).then(|| part / self.frames * 100.0)
    }

    /// The largest stacks that are not exact.
    pub fn worst(&self, most: usize) -> Vec<(&str, f64)> {
        let mut list: Vec<(&str, f64)> =
            self.wrong.iter().map(|(text, value)| (text.as_str(), *value)).collect();
        list.sort_by(|a, b| b.1.total_cmp(&a.1));
        list.truncate(most);
        list
    }
}

/// `Type.Method(int)` → `Type.Method`, `Type.Method(…)+async` → `Type.Method+async`; without the
/// hash at the end of Rust's names.
pub fn plain_name(function: &str) -> Cow<'_, str> {
    let name = match (function.find('('), function.rfind(")+")) {
        // `(anonymous namespace)::f()` begins with one.
        (Some(0) | None, _) => Cow::Borrowed(function),
        (Some(at), Some(end)) if end > at => {
            let (name, kind) = (
                function.get(..at).unwrap_or_default(),
                function.get(end + 1..).unwrap_or_default(),
            );
            Cow::Owned(format!("{name}{kind}"))
        }
        (Some(at), _) => Cow::Borrowed(function.get(..at).unwrap_or(function)),
    };
    // `::h` and 16 digits.
    match name.rfind("::h") {
        Some(at) if name.len() == at + 19 => Cow::Owned(name.get(..at).unwrap_or(&name).to_owned()),
        _ => name,
    }
}

fn file_name(mapping: &str) -> &str {
    mapping.rsplit('/').next().unwrap_or(mapping)
}

fn is_lost(frame: &Frame) -> bool {
    INCOMPLETE.iter().any(|marker| frame.function.starts_with(marker))
}

fn is_marker(frame: &Frame) -> bool {
    [GUESSED, COLLECTOR].contains(&frame.function.as_str()) || is_lost(frame)
}

fn is_runtime(frame: &Frame) -> bool {
    let file = file_name(&frame.mapping);
    RUNTIME_FILES.iter().any(|name| file.starts_with(name))
        || RUNTIME_FUNCTIONS.iter().any(|name| frame.function.starts_with(name))
}

/// A stack without the kernel's frames (they come innermost) and without markers.
fn user_frames(sample: &Sample) -> Vec<&Frame> {
    let user = sample.stack.iter().take_while(|frame| !frame.mapping.starts_with("[kernel"));
    user.filter(|frame| !is_marker(frame)).collect()
}

/// The ways from a thread's start to the first function of each chain.
#[derive(Clone, Debug, Default)]
pub struct Roots {
    /// Outermost first, by the chain's first function.
    by_first: BTreeMap<String, Vec<String>>,
}

impl Roots {
    /// Learns them from the stacks of the threads that `chains_of` knows.
    pub fn learn<'a>(profile: &Profile, chains_of: impl Fn(&Sample) -> Option<&'a Chains>) -> Self {
        let mut seen: BTreeMap<String, BTreeMap<Vec<String>, i64>> = BTreeMap::new();
        for sample in &profile.samples {
            let Some(chains) = chains_of(sample) else { continue };
            let names: Vec<String> = user_frames(sample)
                .iter()
                .map(|frame| plain_name(&frame.function).into_owned())
                .collect();
            for first in chains.iter().filter_map(|chain| chain.first()) {
                if let Some(at) = names.iter().position(|name| name == first) {
                    let root = names.get(..at).unwrap_or_default().to_vec();
                    *seen.entry(first.clone()).or_default().entry(root).or_insert(0) +=
                        profile.value(sample, "wall");
                }
            }
        }
        let usual = |roots: BTreeMap<Vec<String>, i64>| {
            roots
                .into_iter()
                .max_by_key(|(_, value)| *value)
                .map(|(root, _)| root)
                .unwrap_or_default()
        };
        Self { by_first: seen.into_iter().map(|(first, roots)| (first, usual(roots))).collect() }
    }

    /// The way to `first`; empty when no stack had it.
    pub fn to(&self, first: &str) -> &[String] {
        self.by_first.get(first).map(Vec::as_slice).unwrap_or_default()
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.by_first.iter().map(|(first, root)| (first.as_str(), root.as_slice()))
    }
}

/// Judges one stack of a thread with these chains.
pub fn judge(sample: &Sample, chains: &Chains, roots: &Roots, moments: Moments) -> Verdict {
    let user: Vec<&Frame> =
        sample.stack.iter().take_while(|frame| !frame.mapping.starts_with("[kernel")).collect();
    let guessed_frames = user.iter().filter(|frame| frame.function == GUESSED).count();
    let lost = user.iter().any(|frame| is_lost(frame));
    let frames: Vec<&Frame> = user.into_iter().filter(|frame| !is_marker(frame)).collect();
    let complete = !lost && frames.first().is_some_and(|frame| is_first(frame));
    let names: Vec<Cow<'_, str>> = frames.iter().map(|frame| plain_name(&frame.function)).collect();
    // From here on everything is a runtime's.
    let tail = frames.iter().rposition(|frame| !is_runtime(frame)).map_or(0, |at| at + 1);

    let mut best = Fit { exact: false, in_runtime: false, wrong_frames: usize::MAX, fitting: 0 };
    for chain in chains {
        let root = chain.first().map(|first| roots.to(first)).unwrap_or_default();
        let fit = fit(&frames, &names, root, chain, tail, moments);
        let rank = |fit: &Fit| {
            (fit.exact, usize::MAX - fit.wrong_frames, if fit.exact { 0 } else { fit.fitting })
        };
        if rank(&fit) > rank(&best) {
            best = fit;
        }
    }
    Verdict {
        complete,
        // A guess that happens to be right is none the less a guess.
        exact: best.exact && complete && guessed_frames == 0,
        unseen: sample.stack.first().is_some_and(|frame| frame.function.starts_with(UNSEEN)),
        not_yet_run: sample.stack.first().is_some_and(|frame| frame.function == NOT_YET_RUN),
        in_runtime: best.in_runtime,
        frames: frames.len(),
        wrong_frames: if chains.is_empty() { 0 } else { best.wrong_frames },
        guessed_frames,
        fitting: best.fitting,
    }
}

/// A stack that is not exact, for people: the last frame that fits and what follows it; all of it
/// when it is not complete.
pub fn picture(sample: &Sample, verdict: Verdict) -> String {
    const MOST: usize = 14;
    let from = if verdict.complete { verdict.fitting.saturating_sub(1) } else { 0 };
    let mut runs: Vec<(&str, usize)> = Vec::new();
    for frame in sample.stack.iter().skip(from) {
        // A function 400 times in a row is written once.
        match runs.last_mut() {
            Some((name, count)) if *name == frame.function => *count += 1,
            _ => runs.push((&frame.function, 1)),
        }
    }
    let mut words: Vec<String> = Vec::new();
    if from > 0 {
        words.push(format!("({from} that fit)"));
    }
    let more = runs.len().saturating_sub(MOST);
    let tell = |(name, count): &(&str, usize)| match count {
        1 => plain_name(name).into_owned(),
        _ => format!("{}*{count}", plain_name(name)),
    };
    words.extend(runs.iter().take(MOST / 2).map(tell));
    if more > 0 {
        words.push(format!("({more} more)"));
    }
    words.extend(runs.iter().skip(MOST / 2 + more).map(tell));
    words.join(" > ")
}

/// Judges only whether a stack is whole.
pub fn is_complete(sample: &Sample) -> bool {
    let lost = sample.stack.iter().any(is_lost);
    !lost && !user_frames(sample).is_empty()
}

/// True when the thread is exiting and may have given its memory back: it has no user stack any
/// more.
pub fn is_exiting(sample: &Sample) -> bool {
    sample
        .stack
        .iter()
        .any(|frame| frame.mapping.starts_with("[kernel") && frame.function == "do_exit")
}

/// True when the thread is in a collection: profiles gather those under a frame of their own and
/// leave out, on purpose, the method that happened to allocate and its callers.
pub fn is_collection(sample: &Sample) -> bool {
    sample.stack.first().is_some_and(|frame| frame.function == COLLECTOR)
}

/// True when the sample has a user part at all: a process without one (a kernel thread, an exiting
/// task) has no stack to be whole.
pub fn has_user_part(sample: &Sample) -> bool {
    sample.stack.first().is_some_and(|frame| !frame.mapping.starts_with("[kernel"))
}

fn is_first(frame: &Frame) -> bool {
    let file = file_name(&frame.mapping);
    FIRST_FILES.iter().any(|name| file.starts_with(name))
        || FIRST_FUNCTIONS.iter().any(|name| plain_name(&frame.function) == *name)
}

struct Fit {
    exact: bool,
    in_runtime: bool,
    wrong_frames: usize,
    fitting: usize,
}

/// Fits a stack to one chain. `tail` is where the frames begin that are all a runtime's.
fn fit(
    frames: &[&Frame],
    names: &[Cow<'_, str>],
    root: &[String],
    chain: &[String],
    tail: usize,
    moments: Moments,
) -> Fit {
    let on_root = names.iter().zip(root).take_while(|(name, expected)| *name == *expected).count();
    if on_root < root.len() {
        // Not (yet) at the chain: right only while the thread is on its way there or back.
        let exact = moments == Moments::WholeLife && on_root > 0 && tail <= on_root;
        let wrong_frames = if exact { 0 } else { wrong_frames(names, root, chain, tail) };
        return Fit { exact, in_runtime: exact, wrong_frames, fitting: on_root };
    }
    // Positions in the chain that the frames so far can have led to.
    let mut states = vec![0];
    let mut accepted = None;
    let mut fitting = root.len();
    for at in root.len()..=frames.len() {
        if !states.is_empty() {
            fitting = at;
        }
        let began = at > root.len() || moments == Moments::WholeLife;
        if !states.is_empty() && began && (at == frames.len() || at >= tail) {
            accepted = Some(at);
        }
        let (Some(frame), Some(name)) = (frames.get(at), names.get(at)) else { break };
        let mut next = Vec::new();
        for state in states {
            match chain.get(state).map(String::as_str) {
                Some(RUNTIME) if is_runtime(frame) => next.extend([state, state + 1]),
                Some(expected) if expected == name => next.push(state + 1),
                _ => {}
            }
        }
        next.sort_unstable();
        next.dedup();
        states = next;
    }
    match accepted {
        Some(at) => Fit { exact: true, in_runtime: at < frames.len(), wrong_frames: 0, fitting },
        None => {
            let wrong_frames = wrong_frames(names, root, chain, tail);
            Fit { exact: false, in_runtime: false, wrong_frames, fitting }
        }
    }
}

/// Frames that are not part of the longest common subsequence with what was expected. Runtime
/// frames at the inner end are nobody's fault.
fn wrong_frames(names: &[Cow<'_, str>], root: &[String], chain: &[String], tail: usize) -> usize {
    let expected: Vec<&str> = root.iter().chain(chain).map(String::as_str).collect();
    let judged = names.get(..tail).unwrap_or(names);
    let mut above = vec![0usize; expected.len() + 1];
    for name in judged {
        let mut row = vec![0usize; expected.len() + 1];
        for (column, other) in expected.iter().enumerate() {
            row[column + 1] =
                if name == other { above[column] + 1 } else { above[column + 1].max(row[column]) };
        }
        above = row;
    }
    judged.len() - above[expected.len()]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::collections::BTreeMap;

    use super::{Chains, Moments, Roots, Verdict, judge, plain_name};
    use crate::profile::{Frame, Profile, Sample, Source};

    fn stack(frames: &[&str]) -> Sample {
        let stack = frames
            .iter()
            .map(|text| {
                let (mapping, function) = text.split_once('!').unwrap_or(("app", text));
                Frame {
                    function: function.to_owned(),
                    mapping: mapping.to_owned(),
                    location: 0,
                    source: Source::default(),
                }
            })
            .collect();
        Sample::new(stack, BTreeMap::new(), vec![1])
    }

    fn chains() -> Chains {
        let text = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        vec![text(&["Loop", "A", "B", "C"]), text(&["Loop", "A", "...", "Catch"])]
    }

    fn verdict(frames: &[&str], moments: Moments) -> Verdict {
        let usual = stack(&["libc.so.6!clone3", "libcoreclr.so!Start", "Loop", "A", "B", "C"]);
        let profile = Profile::from_samples(&["wall"], vec![usual]);
        let chains = chains();
        let roots = Roots::learn(&profile, |_| Some(&chains));
        assert_eq!(roots.to("Loop"), ["clone3", "Start"]);
        judge(&stack(frames), &chains, &roots, moments)
    }

    fn steady(frames: &[&str]) -> Verdict {
        verdict(frames, Moments::Steady)
    }

    #[test]
    fn the_chain_and_its_beginnings_are_exact() {
        for inner in [&["Loop"][..], &["Loop", "A"], &["Loop", "A(System.Int32)", "B", "C"]] {
            let verdict = steady(&[&["libc.so.6!clone3", "libcoreclr.so!Start"], inner].concat());
            assert!(verdict.exact && verdict.complete && !verdict.in_runtime, "{inner:?}");
        }
    }

    #[test]
    fn a_missing_caller_is_found_and_is_no_wrong_frame() {
        let verdict = steady(&["libc.so.6!clone3", "libcoreclr.so!Start", "Loop", "A", "C"]);
        assert!(!verdict.exact && verdict.complete);
        assert_eq!(verdict.wrong_frames, 0);
    }

    #[test]
    fn a_frame_too_many_is_wrong() {
        let verdict =
            steady(&["libc.so.6!clone3", "libcoreclr.so!Start", "Loop", "A", "B", "B", "C"]);
        assert!(!verdict.exact);
        assert_eq!(verdict.wrong_frames, 1);
    }

    #[test]
    fn the_runtime_may_be_called_from_the_chain_but_not_stand_inside_it() {
        let root = ["libc.so.6!clone3", "libcoreclr.so!Start"];
        let good = steady(
            &[&root[..], &["Loop", "A", "libcoreclr.so!Helper", "libc.so.6!futex"]].concat(),
        );
        assert!(good.exact && good.in_runtime);
        let inside =
            steady(&[&root[..], &["Loop", "A", "B", "libcoreclr.so!Helper", "C"]].concat());
        assert!(!inside.exact);
        let declared = steady(
            &[&root[..], &["Loop", "A", "libcoreclr.so!Throw", "System.EH.Go", "Catch"]].concat(),
        );
        assert!(declared.exact && !declared.in_runtime);
        let none = steady(&[&root[..], &["Loop", "A", "Catch"]].concat());
        assert!(!none.exact);
    }

    #[test]
    fn outside_the_chain_only_a_whole_life_is_right() {
        let early = ["libc.so.6!clone3", "libcoreclr.so!Start", "libclrjit.so!compile"];
        assert!(!steady(&early).exact);
        assert!(verdict(&early, Moments::WholeLife).exact);
        assert!(!verdict(&["libc.so.6!clone3", "Loop", "A"], Moments::WholeLife).exact);
    }

    #[test]
    fn truncated_guessed_and_rootless_stacks_are_not_exact() {
        let cut = steady(&["[truncated: stack copy ended]", "Loop", "A"]);
        assert!(!cut.exact && !cut.complete);
        let root = ["libc.so.6!clone3", "libcoreclr.so!Start"];
        let guessed = steady(&[&root[..], &["Loop", "[guessed caller]", "A", "B"]].concat());
        assert_eq!((guessed.exact, guessed.complete, guessed.guessed_frames), (false, true, 1));
        assert!(!steady(&["Loop", "A"]).complete);
    }

    #[test]
    fn the_kernels_frames_are_not_judged() {
        let root = ["libc.so.6!clone3", "libcoreclr.so!Start"];
        let irq =
            steady(&[&root[..], &["Loop", "A", "B", "C", "[kernel.kallsyms]!asm_irq"]].concat());
        assert!(irq.exact && !irq.in_runtime);
    }

    #[test]
    fn names_lose_parameters_and_hashes() {
        assert_eq!(plain_name("N.T.M(System.Int32, X)"), "N.T.M");
        assert_eq!(plain_name("N.T.M(…)+async"), "N.T.M+async");
        assert_eq!(plain_name("chain::f1::h0123456789abcdef"), "chain::f1");
        assert_eq!(plain_name("(anonymous namespace)::f"), "(anonymous namespace)::f");
    }
}
