//! `cargo xtask scale [PROCESSES CGROUPS RUNTIMES STARTS SECONDS]`: the daemon on a node with very
//! many processes; prints what it takes and loses. `cargo xtask soak [MINUTES]`: the daemon while
//! processes, .NET apps and recordings come and go for long; prints how its memory grows.

use std::env;

use anyhow::{Result, bail};

use crate::{
    build,
    exec::{StepLog, cargo, need_root},
    paths::WorkspacePaths,
    setup::{self, debian},
    test,
};

/// Fits a machine of 2 CPUs and 8 GiB.
const USUAL: [&str; 5] = ["2000", "200", "50", "100", "60"];

/// Runs it. `PERFUSION_BIN` names a program to test in place of one that is built now.
pub(crate) fn scale(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<()> {
    need_root("recording")?;
    let size = if arguments.is_empty() { &USUAL } else { arguments };
    if size.len() != USUAL.len()
        || size.iter().any(|number| !number.parse::<u32>().is_ok_and(|n| n > 0))
    {
        bail!(
            "expected {} numbers, PROCESSES CGROUPS RUNTIMES STARTS SECONDS, found `{}`",
            USUAL.len(),
            size.join(" ")
        );
    }
    run(paths, steps, "scale::", ("PERFUSION_SCALE", &size.join(" ")))
}

/// Runs it. `PERFUSION_BIN` as above.
pub(crate) fn soak(paths: &WorkspacePaths, steps: &StepLog, arguments: &[&str]) -> Result<()> {
    need_root("recording")?;
    let minutes = match arguments {
        [] => "60",
        [minutes] if minutes.parse::<u32>().is_ok_and(|n| n > 0) => minutes,
        other => bail!("expected a number of MINUTES, found `{}`", other.join(" ")),
    };
    run(paths, steps, "soak::", ("PERFUSION_SOAK", minutes))
}

/// Runs the system tests of that name with what they are to be as large as.
fn run(
    paths: &WorkspacePaths,
    steps: &StepLog,
    filter: &str,
    (variable, size): (&str, &str),
) -> Result<()> {
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    setup::pinned_dotnets(paths, steps)?;
    debian::install(steps, &[("bpftool", "entries of maps")])?;
    steps.step(&format!("{variable}={size}"));
    let mut tests = cargo(paths);
    tests
        .args(["test", "--package", "system-tests", filter, "--", "--nocapture"])
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim())
        .env("PERFUSION_BIN", perfusion)
        .env("PERFUSION_DOTNET_ROOTS", paths.dotnet_roots())
        .env("PERFUSION_CSC", paths.csc())
        .env(variable, size)
        .env("PERFUSION_TESTS_REQUIRED", "1");
    test::run_some(&mut tests)
}
