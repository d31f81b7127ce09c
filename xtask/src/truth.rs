//! `cargo xtask truth [--seconds N] [--repetitions N] [WORKLOAD… | thinning]`: how true profiles of programs with known stacks and times are. The judging is done by the
//! program `truth` of the system tests; a run of all workloads writes docs/truth.md. `cargo xtask memory [--windows N]`: the same for known
//! allocations; writes the figures in docs/memory.md. `cargo xtask leaks [--runs N] [--at-once N]`: the same for verdicts of `perfusion leaks`, in docs/leaks.md.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::{
    build,
    exec::{Steps, cargo, need_root, run},
    paths::Paths,
    setup::{self, debian},
};

const HEAD: &str = "# How true the profiles are
Written by `cargo xtask truth`; tests/src/truth says how. Each workload runs functions in call chains it declares itself, and is recorded twice:
while the chains run (`record --pid`), and from its first instruction to its last (`record -- CMD`).

- **complete**: the stack reaches the thread's start and nothing is said to be missing.
- **exact**: complete, nothing guessed, and the declared chain is there whole, in order, and nothing else: every physical frame. Before the chain stands
  the way from the thread's start to it, which must be the same in every stack of the workload; behind it may stand frames of the runtime or the C
  library that was called (**in the runtime**: how many of the exact stacks are so; of those frames only the kind is checked).
- **wrong frames**: frames where the chain has none or another one; **guessed frames**: those the profiler itself marks as guessed.
- **unseen**: waits in progress when the recording began whose stack nobody took in time; part of what is not complete. And the time new threads waited for
  their first CPU, when a thread has no stack yet; not judged.
- Promised: 99.9 % exact, 99.99 % complete, no wrong frames, at most 0.1 % guessed; on-CPU + runnable + blocked = wall and on-CPU time = schedstat within
  1 %; waits as long as by the program's own clock within 2 %.
- Not judged: a thread that is exiting and has given its memory back (the kernel's `do_exit` is on its stack); a thread that
  runs a collection, whose callers a profile leaves out on purpose.

Causes of what is missing, as far as they are known:
- *Go*: the scheduler's own work runs on a stack of its own (`mcall`, `morestack`, `systemstack`), which nothing links to the goroutine's.
- *C++ exceptions*: for some instructions at the end of `_Unwind_RaiseException` and `_Unwind_Resume` libgcc has overwritten its own frame with that of the landing
  pad; no rule describes that.
- *From a program's start*: stacks can be deeper than the 128 KiB that are copied (`--stack-kib`); IL stubs of the runtime can be gone before their name is asked for, and a frame
  without a name counts as wrong (exceptions-8: one wait of 0.7 ms of all 86 ms).
- *New threads*: before its first function a thread is in `clone`, on a stack that may not be in memory yet and then cannot be read (one sample in some hundred of
  truthwaits, which computes little); a wait there is whole, and has no chain to be exact about.
- *Attached*: waits in progress at the first moment that are over before the first look have no stack (unseen, parts of a millisecond). While the probes
  know no code each stack is a copy, the budget keeps fewer of them, and a thread's first waits may be among those that are not kept, with nothing to stand for them
  (recursion-9 and -10: 20 of 10,038 ms; threads500: 1 wait in some hundred).
- *Little waiting*: a program that computes all the time waits for some 10 ms in 10 s, in which one wait of 2 ms is much (readytorun-10, dynamicmethods-9, churn-8).
- *500 threads*: a thread's on-CPU time is some 20 ms of 10 s, and is compared with a schedstat that is read for all 500 one after another, before and
  after the recording.
- *Dynamic methods* and methods of load contexts that were collected have no name if the runtime could not be asked in time without danger: those seen only before the attach, and some
  in their last moments.
- *`perf record -g`* goes by frame pointers: `Loop` is there twice while it is an OSR body, and of the methods it calls, which have no frame pointers, only the innermost
  is there.

Single-file programs: the hosts are those of programs that an npm package carries, of 9.0.7 and 10.0.9, the frameworks those of the roots, 9.0.5 and 10.0.13.
NuGet's hosts, and with them one of .NET 8, are not to be had from the registries that setup uses.

";

pub(crate) fn memory(paths: &Paths, steps: &Steps, arguments: &[&str]) -> Result<()> {
    steps.step("recording known allocations");
    figures(paths, steps, "memory", arguments)
}

pub(crate) fn leaks(paths: &Paths, steps: &Steps, arguments: &[&str]) -> Result<()> {
    steps.step("watching known leaks");
    figures(paths, steps, "leaks", arguments)
}

/// Runs the program with the word `what`, and puts what it wrote between two lines of docs/`what`.md.
fn figures(paths: &Paths, steps: &Steps, what: &str, arguments: &[&str]) -> Result<()> {
    need_root("attaching")?;
    setup::pinned_dotnets(paths, steps)?;
    let folder = measure(paths, steps, &[&[what], arguments].concat())?;
    let figures = folder.join(format!("{what}.md"));
    let figures =
        fs::read_to_string(&figures).with_context(|| format!("{}: cannot be read", figures.display()))?;
    let document = paths.root.join(format!("docs/{what}.md"));
    let name = document.display();
    let text = fs::read_to_string(&document).with_context(|| format!("{name}: cannot be read"))?;
    let begin = format!("<!-- figures: cargo xtask {what} -->\n");
    let end = "<!-- end of figures -->\n";
    let (before, rest) = text.split_once(&begin).with_context(|| format!("{name}: no line {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("{name}: no line {end}"))?;
    fs::write(&document, [before, &begin, &figures, end, after].concat())
        .with_context(|| format!("{name}: cannot be written"))?;
    steps.step(&format!("wrote {name}"));
    Ok(())
}

/// Builds everything and runs the program; the folder with what it wrote.
fn measure(paths: &Paths, steps: &Steps, arguments: &[&str]) -> Result<PathBuf> {
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

pub(crate) fn truth(paths: &Paths, steps: &Steps, arguments: &[&str]) -> Result<()> {
    need_root("recording")?;
    debian::install(steps, &[("linux-perf", "`perf record -g` beside it"), ("g++", "C++ exceptions")])?;
    steps.step("recording workloads with known truth");
    let folder = measure(paths, steps, arguments)?;
    if arguments.iter().all(|word| word.starts_with("--") || word.parse::<f64>().is_ok()) {
        let tables = folder.join("truth.md");
        let tables =
            fs::read_to_string(&tables).with_context(|| format!("{}: cannot be read", tables.display()))?;
        let document = paths.root.join("docs/truth.md");
        fs::write(&document, HEAD.to_owned() + &tables)
            .with_context(|| format!("{}: cannot be written", document.display()))?;
        steps.step(&format!("wrote {}", document.display()));
    }
    Ok(())
}
