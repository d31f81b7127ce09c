//! `cargo xtask ci`: all that must hold before a change lands. CI adds nothing of its own.

use std::{process::Command, thread};

use anyhow::{Result, anyhow, bail};

use crate::{
    build::{self, bpf_cargo, bpf_clippy},
    exec::{Steps, run, told},
    monitoring, package,
    paths::Paths,
    setup::{self, debian},
    test, tidy,
};

/// Commands of ours that have little to do with the rest, and leave CPUs idle where they wait for the network or for one core.
const BESIDE: [&str; 2] = ["helm", "image"];

pub(crate) fn ci(paths: &Paths, steps: &Steps) -> Result<()> {
    steps.step("format");
    run(cargo(paths).args(["fmt", "--all", "--check"]))?;
    tidy::tidy(paths, steps, false)?;
    monitoring::check(paths, steps)?;

    // The tests measure time, so they come when all else is over.
    thread::scope(|scope| {
        let beside = scope.spawn(|| beside(steps));
        let before = before_the_tests(paths, steps);
        let beside = beside.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked")));
        before.and(beside)
    })?;

    // Here everything a test needs is installed: one that skips itself is a failure.
    // The fuzz targets run on their corpus among them; the engine would have everything built a third time (`cargo xtask fuzz`).
    test::test(paths, steps, None, test::Mode { required: true, long: false })
}

fn before_the_tests(paths: &Paths, steps: &Steps) -> Result<()> {
    let ebpf = setup::build_tools(paths, steps)?;
    debian::install(steps, &[("rust-web-clippy", "lints of the eBPF crate")])?;
    steps.step("lints of the eBPF crate");
    run(&mut bpf_clippy(paths, &ebpf, "ebpf-probes"))?;

    // That target has `core` and nothing else: no std, no alloc. `profiler-protocol` wants more of atomics than it has; the shim's build
    // links it without std.
    steps.step("ebpf-common without std");
    run(&mut bpf_cargo(paths, &ebpf, "check", "ebpf-common"))?;
    build::inside(paths, steps, &ebpf)?;

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
        .args(["doc", "--workspace", "--exclude", "ebpf-probes", "--no-deps", "--document-private-items"])
        // Private items are documented too, so a link to one leads somewhere.
        .env("RUSTDOCFLAGS", "-D warnings -A rustdoc::private-intra-doc-links"))?;

    package::check_unit(paths, steps)?;
    setup::pinned_dotnets(paths, steps)?;
    test::compile(paths, steps)
}

/// Runs [`BESIDE`], one after the other, and prints what each said when it is over.
fn beside(steps: &Steps) -> Result<()> {
    for word in BESIDE {
        // This program, also when a build has put another one in its place.
        let (succeeded, said) = told(Command::new("/proc/self/exe").arg(word))?;
        steps.step(&format!("`cargo xtask {word}`, beside this, has said:\n{said}"));
        if !succeeded {
            bail!("`cargo xtask {word}` failed");
        }
    }
    Ok(())
}

fn cargo(paths: &Paths) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(&paths.root);
    command
}
