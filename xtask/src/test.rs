//! `cargo xtask test [FILTER]`: every test, from plain ones without privilege to real CLRs under a
//! real kernel, and one sum at the end.

use std::{
    env,
    path::Path,
    process::Command,
    time::{Duration, SystemTime},
};

use anyhow::{Result, bail};

use crate::{
    build,
    exec::{StepLog, cargo, is_root, run, watch},
    paths::WorkspacePaths,
    setup::{self, debian},
};

/// What became of the tests of all runs so far.
#[derive(Default)]
struct TestTotals {
    /// As libtest counts: skipped ones of our harness are among them.
    passed: usize,
    failed: usize,
    /// How many of those.
    skipped_as_passed: usize,
    /// "name: reason" each.
    skipped: Vec<String>,
    /// Runs that ended badly without a failed test, such as one that did not compile.
    broken: Vec<&'static str>,
    /// System tests with their time, in seconds.
    took: Vec<(f64, String)>,
    /// Failed tests by name.
    failures: Vec<String>,
    /// Those of them that passed again and again when they were alone.
    unsteady: Vec<String>,
}

/// So many system tests at most may fail beside others and be tried again alone; more than that is
/// no accident.
const UNSTEADY_AT_MOST: usize = 2;
/// How often such a test must pass then, one time after the other.
const PASSES_ALONE: usize = 3;
/// At least so long for all of that, whatever the time is.
const TO_TRY_AGAIN: Duration = Duration::from_secs(150);

/// How the system tests are run.
#[derive(Clone, Copy)]
pub(crate) struct TestMode {
    /// A system test whose needs are not met fails instead of being skipped.
    pub(crate) required: bool,
    /// The durations and counts the promises are stated with, instead of the shortest the
    /// statistics allow.
    pub(crate) long: bool,
    /// System tests that have not begun by then are skipped, which is said and counted; what hangs
    /// then is ended as failed.
    pub(crate) until: Option<SystemTime>,
}

pub(crate) fn test(
    paths: &WorkspacePaths,
    steps: &StepLog,
    filter: Option<&str>,
    mode: TestMode,
) -> Result<()> {
    let mut sum = TestTotals::default();

    let perfusion = build::build(paths, steps)?;
    setup::pinned_dotnets(paths, steps)?;
    let needs = [
        ("libcap2-bin", "a program with capabilities"),
        ("strace", "which processes the daemon touches"),
        ("bpftool", "entries of maps"),
        ("chromium-headless-shell", "flame graphs in a browser"),
    ];
    debian::install(steps, &needs)?;
    steps.step("tests without privilege");
    let mut plain = plain(paths);
    plain.args(filter);
    if mode.long {
        plain.env("PERFUSION_TESTS_LONG", "1");
    }
    sum.run("plain tests", &mut plain)?;

    steps.step("model checking of the shared ring (loom)");
    sum.run("loom tests", loom(paths).args(filter))?;

    steps.step("system tests: real kernel, real CLRs");
    let settings = |system: &mut Command, until: Option<SystemTime>| {
        system
            .env("PERFUSION_BIN", &perfusion)
            .env("PERFUSION_DOTNET_ROOTS", paths.dotnet_roots())
            .env("PERFUSION_CSC", paths.csc());
        if mode.long {
            system.env("PERFUSION_TESTS_LONG", "1");
        }
        if mode.required {
            system.env("PERFUSION_TESTS_REQUIRED", "1");
        }
        if let Some(until) =
            until.and_then(|until| until.duration_since(SystemTime::UNIX_EPOCH).ok())
        {
            system.env("PERFUSION_TESTS_UNTIL", until.as_secs().to_string());
        }
    };
    let mut system = system(paths);
    // All begin, and wait for their turn (`environment::begin` of the tests): few run at a time,
    // and those that measure time alone.
    system.args(filter).args(["--", "--test-threads=1000"]);
    settings(&mut system, mode.until);
    let failed_before = sum.failures.len();
    sum.run("system tests", &mut system)?;
    // Where the time for tests is over by now, what failed on a slow machine would fail for that
    // alone.
    let until_again = mode.until.map(|until| until.max(SystemTime::now() + TO_TRY_AGAIN));
    for name in sum.to_try_again(failed_before) {
        steps.step(&format!("{name} failed beside others: {PASSES_ALONE} times alone"));
        let mut system = self::system(paths);
        system.args(["--", "--exact", &name, "--test-threads=1"]);
        settings(&mut system, until_again);
        // One whose time is over would be skipped, which is no pass.
        if (0..PASSES_ALONE).all(|_| run_some(&mut system).is_ok()) {
            sum.unsteady.push(name);
        }
    }

    for unsteady in &sum.unsteady {
        println!(
            "UNSTEADY {unsteady}: failed beside others (above), passed {PASSES_ALONE} times out of \
             {PASSES_ALONE} alone"
        );
    }
    for skipped in &sum.skipped {
        println!("SKIPPED {skipped}");
    }
    if !sum.skipped.is_empty() && !is_root()? {
        println!("run `cargo xtask test` as root to run all of them");
    }
    println!("the longest:");
    for (seconds, name) in sum.longest() {
        println!("{seconds:>8.1} s {name}");
    }
    println!(
        "{} passed, {} failed, {} unsteady, {} skipped",
        sum.passed.saturating_sub(sum.skipped_as_passed),
        sum.failed_for_good(),
        sum.unsteady.len(),
        sum.skipped.len()
    );
    if sum.failed_for_good() > 0 || !sum.broken.is_empty() {
        bail!(
            "tests failed{}",
            sum.broken.iter().map(|run| format!("; {run} ended badly")).collect::<String>()
        );
    }
    Ok(())
}

/// Compiles all tests and runs none. Probes and shim have to be there.
pub(crate) fn compile(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    steps.step("compiling the tests");
    for mut tests in [plain(paths), system(paths), loom(paths)] {
        run(tests.arg("--no-run"))?;
    }
    Ok(())
}

fn plain(paths: &WorkspacePaths) -> Command {
    let mut command = cargo_test(paths);
    command.args(["--workspace", "--exclude", "ebpf-probes", "--exclude", "system-tests"]);
    command
}

fn loom(paths: &WorkspacePaths) -> Command {
    let mut command = cargo_test(paths);
    command
        .args(["--package", "profiler-protocol", "--test", "loom", "--target-dir"])
        .arg(paths.target.join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    command
}

fn system(paths: &WorkspacePaths) -> Command {
    let mut command = cargo_test(paths);
    command.args(["--package", "system-tests"]);
    command
}

/// Runs the system tests of one subject that are ignored without a server of somebody else's, whose
/// program or programs `servers` are, by the variable that names each. `PERFUSION_BIN` names a
/// program to test in place of one that is built now.
pub(crate) fn with_servers(
    paths: &WorkspacePaths,
    steps: &StepLog,
    (what, filter): (&str, &str),
    servers: &[(&str, &Path)],
) -> Result<()> {
    let perfusion = match env::var_os("PERFUSION_BIN") {
        Some(program) => paths.root.join(program),
        None => build::build(paths, steps)?,
    };
    steps.step(&format!("tests with {what}"));
    let mut tests = cargo(paths);
    tests
        .args(["test", "--package", "system-tests", filter, "--", "--ignored", "--test-threads=1"])
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim())
        .env("PERFUSION_BIN", perfusion)
        .envs(servers.iter().copied())
        .env("PERFUSION_TESTS_REQUIRED", "1");
    run_some(&mut tests)
}

/// Runs tests, of which there has to be one: a filter that fits none any more would be good news
/// for ever.
pub(crate) fn run_some(tests: &mut Command) -> Result<()> {
    let mut sum = TestTotals::default();
    if !watch(tests, |line| sum.see(line))? {
        bail!("tests failed");
    }
    sum.some()
}

/// `--no-fail-fast`: one failed test must not hide the next one. All runs have the same probes and
/// shim inside: the daemon's library would be built anew for each run otherwise.
fn cargo_test(paths: &WorkspacePaths) -> Command {
    let mut command = cargo(paths);
    command
        .args(["test", "--no-fail-fast"])
        .env("PERFUSION_PROBES", paths.probes())
        .env("PERFUSION_SHIM", paths.shim());
    if let Some(profile) = &paths.profile {
        command.args(["--profile", profile]);
    }
    command
}

impl TestTotals {
    /// Runs one `cargo test` and adds what it says of its tests.
    fn run(&mut self, name: &'static str, command: &mut Command) -> Result<()> {
        let failed_before = self.failed;
        let succeeded = watch(command, |line| self.see(line))?;
        if !succeeded && self.failed == failed_before {
            self.broken.push(name);
        }
        Ok(())
    }

    /// Those that have failed after the first `before` and get a second chance: a test that judges
    /// statistics or time beside others, on a machine that is not ours alone, may fail once without
    /// a defect in what it tests. None if they are too many, or if not all have a name.
    fn to_try_again(&self, before: usize) -> Vec<String> {
        let named = self.failures.get(before..).unwrap_or_default();
        let all_named = self.failures.len() == self.failed && self.broken.is_empty();
        if all_named && named.len() <= UNSTEADY_AT_MOST { named.to_vec() } else { Vec::new() }
    }

    fn failed_for_good(&self) -> usize {
        self.failed.saturating_sub(self.unsteady.len())
    }

    /// Refuses none.
    fn some(&self) -> Result<()> {
        if self.passed == self.skipped_as_passed {
            bail!("expected tests that run, found none: are they called otherwise now?");
        }
        Ok(())
    }

    fn longest(&self) -> impl Iterator<Item = &(f64, String)> {
        const SHOWN: usize = 20;
        let mut took: Vec<_> = self.took.iter().collect();
        took.sort_by(|one, other| other.0.total_cmp(&one.0));
        took.into_iter().take(SHOWN)
    }

    /// Reads libtest's sum, `test NAME ... ignored, REASON`, and of our harness
    /// `TOOK SECONDS s, HOW: NAME` and `SKIPPED NAME: REASON`, which is printed for a test whose
    /// needs are not met (libtest counts it as passed). Returns whether a person should see the
    /// line: that a test has waited a minute for its turn says nothing.
    fn see(&mut self, line: &str) -> bool {
        if let Some((seconds, name)) =
            line.strip_prefix("TOOK ").and_then(|rest| rest.split_once(" s, "))
        {
            self.took.push((seconds.parse().unwrap_or_default(), name.to_owned()));
        }
        if let Some(reason) = line.find("SKIPPED ").and_then(|at| line.get(at + "SKIPPED ".len()..))
        {
            self.skipped.push(reason.to_owned());
            self.skipped_as_passed += 1;
        } else if let Some((name, reason)) =
            line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ignored"))
        {
            self.skipped.push(format!("{name}: ignored{reason}"));
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        } else if let Some((_, counts)) = line.split_once("test result: ") {
            self.passed += count(counts, "passed");
            self.failed += count(counts, "failed");
        }
        !line.ends_with(" has been running for over 60 seconds")
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
    use super::TestTotals;

    #[test]
    fn sums_what_libtest_and_the_harness_say() {
        let mut sum = TestTotals::default();
        for line in [
            "test a ... ok",
            "test b ... ignored, takes an hour",
            "test c ... FAILED",
            "test d::net8 ... FAILED",
            "SKIPPED stacks::exact: no .NET 10 below PERFUSION_DOTNET_ROOTS",
            "test result: FAILED. 3 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; \
             finished in 0.00s",
        ] {
            sum.see(line);
        }
        assert_eq!((sum.passed, sum.skipped_as_passed, sum.failed), (3, 1, 2));
        assert!(sum.some().is_ok());
        assert_eq!(sum.to_try_again(0), ["c", "d::net8"]);
        assert_eq!(sum.to_try_again(1), ["d::net8"]);
        sum.unsteady.push("c".to_owned());
        assert_eq!(sum.failed_for_good(), 1);
        sum.see("test e ... FAILED");
        assert!(sum.to_try_again(0).is_empty(), "two of three are known by the runner's own count");
        sum.see("test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out");
        assert!(sum.to_try_again(0).is_empty(), "three are too many");
        assert_eq!(sum.to_try_again(1), ["d::net8", "e"]);
        let mut none = TestTotals::default();
        none.see(
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 267 filtered out; \
             finished in 0.00s",
        );
        assert!(none.some().is_err());
        assert_eq!(
            sum.skipped,
            ["b: ignored, takes an hour", "stacks::exact: no .NET 10 below PERFUSION_DOTNET_ROOTS"]
        );
    }
}
