//! `cargo xtask ci`: all that must hold before a change lands. CI adds nothing of its own.

use std::{
    process::Command,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Result, anyhow, bail};

use crate::{
    build::{bpf_cargo, bpf_clippy},
    deny,
    exec::{StepLog, cargo, run, told},
    monitoring, package,
    paths::WorkspacePaths,
    setup::{self, EbpfToolchain, debian},
    test, tidy,
};

/// Commands of ours that have little to do with the rest, and leave CPUs idle where they wait for
/// the network or for one core. `run` is among them as newcomers have it: with nothing fetched but
/// what it fetches.
const BESIDE: [&str; 3] = ["helm", "image", "run"];

/// CI has 40 minutes. A slow machine may not finish the system tests in that time. Tests that have
/// not begun by then are skipped and named.
const TESTS_BEGIN_WITHIN: Duration = Duration::from_secs(33 * 60);

pub(crate) fn ci(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    let until = SystemTime::now().checked_add(TESTS_BEGIN_WITHIN);
    steps.step("format");
    run(cargo(paths).args(["fmt", "--all", "--check"]))?;
    tidy::tidy(paths, steps, false)?;
    monitoring::check(paths, steps)?;
    deny::offline(paths, steps)?;
    let ebpf = setup::build_tools(paths, steps)?;

    // The tests measure time, so they come when all else is over. What is only checked and what is
    // built are in two target folders of cargo's, of which each is used by one at a time.
    thread::scope(|scope| {
        let beside = scope.spawn(|| beside(paths, steps));
        let checks = checks(paths, steps, &ebpf);
        let beside = beside.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")));
        checks.and(beside)
    })?;

    // Here everything a test needs is installed: one that skips itself is a failure. The fuzz
    // targets run on their corpus among them; the engine would have everything built a third time
    // (`cargo xtask fuzz`).
    test::test(paths, steps, None, test::TestMode { required: true, long: false, until })
}

fn checks(paths: &WorkspacePaths, steps: &StepLog, ebpf: &EbpfToolchain) -> Result<()> {
    steps.step("lints");
    run(cargo(paths).args([
        "clippy",
        "--workspace",
        "--exclude",
        "ebpf-probes",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;

    steps.step("documentation");
    run(cargo(paths)
        .args([
            "doc",
            "--workspace",
            "--exclude",
            "ebpf-probes",
            "--no-deps",
            "--document-private-items",
        ])
        // Private items are documented too, so a link to one leads somewhere.
        .env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links"))?;

    debian::install(steps, &[("rust-web-clippy", "lints of the eBPF crate")])?;
    steps.step("lints of the eBPF crate");
    run(&mut bpf_clippy(paths, ebpf, "ebpf-probes"))?;

    // That target has `core` and nothing else: no std, no alloc. `profiler-protocol` wants more of
    // atomics than it has; the shim's build links it without std.
    steps.step("ebpf-common without std");
    run(&mut bpf_cargo(paths, ebpf, "check", "ebpf-common"))?;

    package::check_unit(paths, steps)?;
    setup::pinned_dotnets(paths, steps)
}

/// Runs [`BESIDE`], one after the other, prints what each said when it is over, and compiles the
/// tests.
fn beside(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    for word in BESIDE {
        // This program, also when a build has put another one in its place.
        let (succeeded, said) = told(Command::new("/proc/self/exe").arg(word))?;
        steps.step(&format!("`cargo xtask {word}`, beside this, has said:\n{said}"));
        if !succeeded {
            bail!("`cargo xtask {word}` failed");
        }
    }
    test::compile(paths, steps)
}
