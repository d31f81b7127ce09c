//! `cargo xtask truth [--seconds N] [--repetitions N] [WORKLOAD… | downsampling | published]`: how
//! true profiles of programs with known stacks and times are. The judging is done by the program
//! `truth` of the system tests; a run of all workloads writes docs/truth.md. `cargo xtask memory
//! [--windows N]`: the same for known allocations; writes the figures in docs/memory.md. `cargo
//! xtask leaks [--runs N] [--at-once N]`: the same for verdicts of `perfusion leaks`, in
//! docs/leaks.md.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::{
    build,
    exec::{StepLog, cargo, need_root, run},
    paths::WorkspacePaths,
    setup::{self, debian},
};

const HEAD: &str = "# How true the profiles are

Written by `cargo xtask truth`; `tests/src/truth` defines the rules. Each workload runs functions \
     in call chains that it declares itself. It is recorded twice:
while the chains run (`record --pid`), and from its first instruction to its last (`record -- \
     CMD`).

- **Complete**: the stack reaches the thread's start and no part is marked as missing.
- **Exact**: complete, nothing guessed, and the declared chain is there whole, in order, with \
     every physical frame and nothing else. Two parts may surround the
  chain. Before it are the frames from the thread's start to it, which must be the same in every \
     stack of the workload. Behind it may be frames of the runtime
  or the C library that was called. **In the runtime** is the share of exact stacks with such \
     frames; only their kind is checked.
- **Wrong frames**: frames where the chain has none or another one. **Guessed frames**: those that \
     the profiler itself marks as guessed.
- **Unseen**: waits in progress at the start of the recording whose stack was not taken in time. \
     They are part of what is not complete. The time in which new
  threads waited for their first CPU is unseen too, because a thread has no stack yet. It is not \
     judged.
- Promised: 99.9 % exact, 99.99 % complete, no wrong frames, at most 0.1 % guessed. On-CPU + \
     runnable + blocked = wall, and on-CPU time = schedstat, within 1 %.
  Waits are as long as by the program's own clock, within 2 %.
- Not judged: a thread that is exiting and has given its memory back (the kernel's `do_exit` is on \
     its stack), and a thread that runs a collection, whose
  callers a profile omits on purpose.

## Known causes of missing parts
- *Go*: the scheduler's own work runs on a stack of its own (`mcall`, `morestack`, `systemstack`). \
     Nothing links it to the goroutine's stack.
- *C++ exceptions*: at the end of `_Unwind_RaiseException` and `_Unwind_Resume` libgcc has \
     overwritten its own frame with that of the landing pad. No rule
  describes these few instructions.
- *From a program's start*: stacks can be deeper than the 128 KiB that are copied (`--stack-kib`). \
     IL stubs of the runtime can be gone before their name is
  requested, and a frame without a name counts as wrong (exceptions-8: one wait of 0.7 ms of all \
     86 ms).
- *New threads*: before its first function a thread is in `clone`. Its stack may not be in memory \
     yet and then cannot be read. That is one sample in some
  hundred of truthwaits, which computes little. A wait there is whole, and has no chain to be \
     exact about.
- *Attached*: waits in progress at the first moment that end before the first scan have no stack \
     (unseen, parts of a millisecond). While the probes have no
  rules, each stack is a copy and the budget keeps fewer of them. A thread's first waits may not \
     be kept, and then no other wait stands for them
  (recursion-9 and -10: 20 of 10,038 ms; threads500: 1 wait in some hundred).
- *Little waiting*: a program that computes all the time waits for some 10 ms in 10 s. One wait of \
     2 ms is much of that (readytorun-10, dynamicmethods-9,
  churn-8).
- *500 threads*: a thread's on-CPU time is some 20 ms of 10 s. It is compared with a schedstat \
     that is read for all 500 one after another, before and after the
  recording.
- *Dynamic methods* and methods of load contexts that were collected have no name if the runtime \
     could not be asked in time without danger. These are the
  methods seen only before the attach, and some in their last moments.
- *`perf record -g`* uses frame pointers. `Loop` is there twice while it is an OSR body. The \
     methods that it calls have no frame pointers, so only the innermost
  of them is there.

Single-file programs: the hosts are those of programs that an npm package contains, of 9.0.7 and \
     10.0.9. The frameworks are those of the roots, 9.0.5 and
10.0.13. The registries that setup uses have no hosts of NuGet, and so none of .NET 8.

";

pub(crate) fn memory(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<()> {
    steps.step("recording known allocations");
    figures(paths, steps, "memory", arguments)
}

pub(crate) fn leaks(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<()> {
    steps.step("watching known leaks");
    figures(paths, steps, "leaks", arguments)
}

/// Runs the program with the word `what`, and puts what it wrote between two lines of
/// docs/`what`.md.
fn figures(paths: &WorkspacePaths, steps: &StepLog, what: &str, arguments: &[&str]) -> Result<()> {
    need_root("attaching")?;
    setup::pinned_dotnets(paths, steps)?;
    let folder = measure(paths, steps, &[&[what], arguments].concat())?;
    let figures = folder.join(format!("{what}.md"));
    let figures = fs::read_to_string(&figures)
        .with_context(|| format!("{}: cannot be read", figures.display()))?;
    let document = paths.root.join(format!("docs/{what}.md"));
    let name = document.display();
    let text = fs::read_to_string(&document).with_context(|| format!("{name}: cannot be read"))?;
    let begin = format!("<!-- figures: cargo xtask {what} -->\n");
    let end = "<!-- end of figures -->\n";
    let (before, rest) =
        text.split_once(&begin).with_context(|| format!("{name}: no line {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("{name}: no line {end}"))?;
    fs::write(&document, [before, &begin, &figures, end, after].concat())
        .with_context(|| format!("{name}: cannot be written"))?;
    steps.step(&format!("wrote {name}"));
    Ok(())
}

/// Builds everything and runs the program; the folder with what it wrote.
fn measure(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<PathBuf> {
    let perfusion = build::build(paths, steps)?;
    let folder = paths.target.join("truth");
    run(cargo(paths)
        .args(["run", "--quiet", "--package", "system-tests", "--bin", "truth", "--"])
        .arg(&folder)
        .args(arguments)
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim())
        .env("PERFUSION_BIN", &perfusion)
        .env("PERFUSION_DOTNET_ROOTS", paths.dotnet_roots())
        .env("PERFUSION_CSC", paths.csc()))?;
    Ok(folder)
}

pub(crate) fn truth(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<()> {
    need_root("recording")?;
    debian::install(
        steps,
        &[("linux-perf", "`perf record -g` beside it"), ("g++", "C++ exceptions")],
    )?;
    steps.step("recording workloads with known truth");
    let folder = measure(paths, steps, arguments)?;
    if arguments.iter().all(|word| word.starts_with("--") || word.parse::<f64>().is_ok()) {
        let tables = folder.join("truth.md");
        let tables = fs::read_to_string(&tables)
            .with_context(|| format!("{}: cannot be read", tables.display()))?;
        let document = paths.root.join("docs/truth.md");
        fs::write(&document, HEAD.to_owned() + &tables)
            .with_context(|| format!("{}: cannot be written", document.display()))?;
        steps.step(&format!("wrote {}", document.display()));
    }
    Ok(())
}
