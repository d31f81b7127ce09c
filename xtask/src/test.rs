//! `cargo xtask test [FILTER]`: every test, from plain ones without privilege to real CLRs under a real kernel, and one sum at the end.

use std::{env, path::Path, process::Command};

use anyhow::{Result, bail};

use crate::{
    build,
    exec::{Steps, is_root, run, watch},
    paths::Paths,
    setup::{self, debian},
};

/// What became of the tests of all runs so far.
#[derive(Default)]
struct Sum {
    /// As libtest counts: skipped ones of our harness are among them.
    passed: usize,
    failed: usize,
    /// How many of those.
    skipped_as_passed: usize,
    /// "name: reason" each.
    skipped: Vec<String>,
    /// Runs that ended badly without a failed test, such as one that did not compile.
    broken: Vec<&'static str>,
}

/// How the system tests are run.
#[derive(Clone, Copy)]
pub(crate) struct Mode {
    /// A system test whose needs are not met fails instead of being skipped.
    pub(crate) required: bool,
    /// The durations and counts the promises are stated with, instead of the shortest the statistics allow.
    pub(crate) long: bool,
}

pub(crate) fn test(paths: &Paths, steps: &Steps, filter: Option<&str>, mode: Mode) -> Result<()> {
    let mut sum = Sum::default();

    let perfusion = build::build(paths, steps)?;
    setup::pinned_dotnets(paths, steps)?;
    let needs = [
        ("musl-tools", "a musl process to profile"),
        ("libcap2-bin", "a program with capabilities"),
        ("strace", "which processes the daemon touches"),
    ];
    debian::install(steps, &needs)?;
    steps.step("tests without privilege");
    sum.run("plain tests", plain(paths).args(filter))?;

    steps.step("model checking of the shared ring (loom)");
    sum.run("loom tests", loom(paths).args(filter))?;

    steps.step("system tests: real kernel, real CLRs");
    let mut system = system(paths);
    system
        .args(filter)
        // Those that measure time wait until they are alone (`environment::begin` of the tests).
        .args(["--", "--test-threads=3"])
        .env("PERFUSION_BIN", &perfusion)
        .env("PERFUSION_DOTNET_ROOTS", paths.dotnet_roots())
        .env("PERFUSION_CSC", paths.csc());
    if mode.long {
        system.env("PERFUSION_TESTS_LONG", "1");
    }
    if mode.required {
        system.env("PERFUSION_TESTS_REQUIRED", "1");
    }
    sum.run("system tests", &mut system)?;

    for skipped in &sum.skipped {
        println!("SKIPPED {skipped}");
    }
    if !sum.skipped.is_empty() && !is_root()? {
        println!("run `cargo xtask test` as root to run all of them");
    }
    println!(
        "{} passed, {} failed, {} skipped",
        sum.passed.saturating_sub(sum.skipped_as_passed),
        sum.failed,
        sum.skipped.len()
    );
    if sum.failed > 0 || !sum.broken.is_empty() {
        bail!(
            "tests failed{}",
            sum.broken.iter().map(|run| format!("; {run} ended badly")).collect::<String>()
        );
    }
    Ok(())
}

/// Compiles all tests and runs none. Probes and shim have to be there.
pub(crate) fn compile(paths: &Paths, steps: &Steps) -> Result<()> {
    steps.step("compiling the tests");
    for mut tests in [plain(paths), system(paths), loom(paths)] {
        run(tests.arg("--no-run"))?;
    }
    Ok(())
}

fn plain(paths: &Paths) -> Command {
    let mut command = cargo_test(paths);
    command.args(["--workspace", "--exclude", "ebpf-probes", "--exclude", "system-tests"]);
    command
}

fn loom(paths: &Paths) -> Command {
    let mut command = cargo_test(paths);
    command
        .args(["--release", "--package", "profiler-protocol", "--test", "loom", "--target-dir"])
        .arg(paths.target.join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    command
}

fn system(paths: &Paths) -> Command {
    let mut command = cargo_test(paths);
    command.args(["--package", "system-tests"]);
    command
}

/// Runs the system tests of one subject that are ignored without a server of somebody else's, whose program or programs `servers` are, by the
/// variable that names each. `PERFUSION_BIN` names a program to test in place of one that is built now.
pub(crate) fn with_servers(
    paths: &Paths,
    steps: &Steps,
    (what, filter): (&str, &str),
    servers: &[(&str, &Path)],
) -> Result<()> {
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    steps.step(&format!("tests with {what}"));
    run(Command::new("cargo")
        .args(["test", "--package", "system-tests", filter, "--", "--ignored", "--test-threads=1"])
        .current_dir(&paths.root)
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim())
        .env("PERFUSION_BIN", perfusion)
        .envs(servers.iter().copied())
        .env("PERFUSION_TESTS_REQUIRED", "1"))
}

/// `--no-fail-fast`: one failed test must not hide the next one. All runs have the same probes and shim inside: the daemon's library would
/// be built anew for each run otherwise.
fn cargo_test(paths: &Paths) -> Command {
    let mut command = Command::new("cargo");
    command
        .args(["test", "--no-fail-fast"])
        .current_dir(&paths.root)
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim());
    command
}

impl Sum {
    /// Runs one `cargo test` and adds what it says of its tests.
    fn run(&mut self, name: &'static str, command: &mut Command) -> Result<()> {
        let failed_before = self.failed;
        let succeeded = watch(command, |line| self.see(line))?;
        if !succeeded && self.failed == failed_before {
            self.broken.push(name);
        }
        Ok(())
    }

    /// Reads libtest's sum, `test NAME ... ignored, REASON`, and `SKIPPED NAME: REASON`, which our harness prints for a test whose needs
    /// are not met (libtest counts it as passed).
    fn see(&mut self, line: &str) {
        if let Some(reason) = line.find("SKIPPED ").and_then(|at| line.get(at + "SKIPPED ".len()..)) {
            self.skipped.push(reason.to_owned());
            self.skipped_as_passed += 1;
        } else if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored"))
        {
            self.skipped.push(format!("{name}: ignored{reason}"));
        } else if let Some((_, counts)) = line.split_once("test result: ") {
            self.passed += count(counts, "passed");
            self.failed += count(counts, "failed");
        }
    }
}

/// The number before `word` in "ok. 3 passed; 0 failed; …".
fn count(counts: &str, word: &str) -> usize {
    let words: Vec<&str> = counts.split([' ', ';', '.']).filter(|part| !part.is_empty()).collect();
    words
        .windows(2)
        .find(|pair| pair.get(1) == Some(&word))
        .and_then(|pair| pair.first()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::Sum;

    #[test]
    fn sums_what_libtest_and_the_harness_say() {
        let mut sum = Sum::default();
        for line in [
            "test a ... ok",
            "test b ... ignored, takes an hour",
            "SKIPPED stacks::exact: no .NET 10 below PERFUSION_DOTNET_ROOTS",
            "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ] {
            sum.see(line);
        }
        assert_eq!((sum.passed, sum.skipped_as_passed, sum.failed), (3, 1, 2));
        assert_eq!(
            sum.skipped,
            ["b: ignored, takes an hour", "stacks::exact: no .NET 10 below PERFUSION_DOTNET_ROOTS"]
        );
    }
}
