//! `cargo xtask fuzz`: the targets of `fuzz/` under libFuzzer, with coverage counters in the code
//! under test, built by stable Rust.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    exec::{StepLog, cargo, run},
    paths::WorkspacePaths,
    setup::debian,
};

/// libFuzzer is C++; its crate compiles it.
const PACKAGES: [debian::DebianPackage; 1] = [("g++", "libFuzzer, the engine of the fuzz targets")];

/// What the engine needs of the compiler: counters per branch, and every comparison reported. All
/// stable flags.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Bounds that are part of every target's promise: seconds for one input, MiB for the process, MiB
/// for one allocation.
const BOUNDS: [&str; 3] = ["-timeout=10", "-rss_limit_mb=512", "-malloc_limit_mb=64"];

/// Longest input, bytes: the seeds are shorter, and short inputs are tried more often.
const MAX_INPUT: &str = "-max_len=4096";

/// Executions per target that `docs/fuzzing.md` states.
pub(crate) const LONG: u64 = 10_000_000;

/// Runs one target or all, each for this many executions, beginning with its corpus.
pub(crate) fn fuzz(
    paths: &WorkspacePaths,
    steps: &StepLog,
    target: Option<&str>,
    executions: u64,
) -> Result<()> {
    let targets = targets(paths)?;
    let chosen: Vec<&String> =
        targets.iter().filter(|name| target.is_none_or(|t| t == *name)).collect();
    if chosen.is_empty() {
        bail!("no fuzz target `{}`; there are {}", target.unwrap_or_default(), targets.join(", "));
    }
    debian::install(steps, &PACKAGES)?;
    let engine = build(paths, steps)?;
    let mut lines = Vec::new();
    for name in chosen {
        steps.step(&format!("fuzzing {name}: {executions} executions"));
        lines.push(run_target(paths, &engine, name, executions)?);
    }
    println!(
        "| target | executions | s | edges reached | features | peak MiB \
         |\n|---|---|---|---|---|---|"
    );
    for line in lines {
        println!("{line}");
    }
    Ok(())
}

/// The folders of `fuzz/corpus`, sorted; a test holds them equal to the targets.
fn targets(paths: &WorkspacePaths) -> Result<Vec<String>> {
    let folder = paths.root.join("fuzz/corpus");
    let mut names = Vec::new();
    for entry in
        fs::read_dir(&folder).with_context(|| format!("{}: cannot be listed", folder.display()))?
    {
        let entry = entry.with_context(|| format!("{}: cannot be listed", folder.display()))?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Its own target folder: the flags hold for every crate, and everything else would be built anew
/// after each run.
fn build(paths: &WorkspacePaths, steps: &StepLog) -> Result<PathBuf> {
    const TRIPLE: &str = "x86_64-unknown-linux-gnu";
    steps.step("building the fuzz targets");
    let folder = paths.target.join("fuzz");
    let mut flags = env::var("RUSTFLAGS").unwrap_or_default();
    flags.push(' ');
    flags.push_str(FLAGS);
    run(cargo(paths)
        .args([
            "build",
            "--package",
            "fuzz",
            "--features",
            "engine",
            "--bin",
            "fuzz",
            "--profile",
            "fuzz",
        ])
        // Named, so that the flags are not for build scripts and macros.
        .args(["--target", TRIPLE, "--target-dir"])
        .arg(&folder)
        // What is fuzzed has neither inside; an empty file stands for both.
        .env("RUSTFLAGS", flags))?;
    Ok(folder.join(TRIPLE).join("fuzz/fuzz"))
}

/// Runs a target and returns its line of the table. New inputs are kept below the target folder,
/// for the next run.
fn run_target(
    paths: &WorkspacePaths,
    engine: &Path,
    name: &str,
    executions: u64,
) -> Result<String> {
    let folder = paths.target.join("fuzz/found");
    let found = folder.join(name);
    fs::create_dir_all(&found).with_context(|| format!("{}: cannot be made", found.display()))?;
    // libFuzzer says a line for each new input: thousands.
    let log = folder.join(format!("{name}.log"));
    let open = File::create(&log).with_context(|| format!("{}: cannot be made", log.display()))?;
    let status = Command::new(engine)
        .args(BOUNDS)
        .args([MAX_INPUT, "-print_final_stats=1"])
        .arg(format!("-runs={executions}"))
        .arg(format!("-artifact_prefix={}", folder.join(format!("{name}-finding-")).display()))
        .arg(&found)
        .arg(paths.root.join("fuzz/corpus").join(name))
        .env("PERFUSION_FUZZ_TARGET", name)
        .env("RUST_BACKTRACE", "1")
        .stderr(open)
        .status()
        .with_context(|| format!("{} did not start", engine.display()))?;
    let said = fs::read(&log).with_context(|| format!("{}: cannot be read", log.display()))?;
    let mut outcome = FuzzOutcome::default();
    let said = String::from_utf8_lossy(&said);
    said.lines().for_each(|line| outcome.see(line));
    if !status.success() || outcome.executions < executions {
        let lines: Vec<&str> = said.lines().filter(|line| !line.starts_with('#')).collect();
        bail!(
            "fuzz target {name}: a finding after {} of {executions} executions; \
             `PERFUSION_FUZZ_TARGET={name} {} INPUT` runs \
             it alone\n{}",
            outcome.executions,
            engine.display(),
            lines.get(lines.len().saturating_sub(60)..).unwrap_or_default().join("\n")
        );
    }
    Ok(format!(
        "| `{name}` | {} | {} | {} | {} | {} |",
        outcome.executions, outcome.seconds, outcome.edges, outcome.features, outcome.peak_mib
    ))
}

/// What libFuzzer says at the end.
#[derive(Debug, Default, PartialEq, Eq)]
struct FuzzOutcome {
    executions: u64,
    seconds: u64,
    edges: u64,
    features: u64,
    peak_mib: u64,
}

impl FuzzOutcome {
    fn see(&mut self, line: &str) {
        let after = |word: &str| {
            let rest = line.split_once(word)?.1.trim_start();
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        if line.contains("DONE") {
            self.edges = after("cov: ").unwrap_or(0);
            self.features = after("ft: ").unwrap_or(0);
        } else if line.starts_with("Done ") {
            self.seconds = after(" runs in ").unwrap_or(0);
        } else if let Some(count) = after("stat::number_of_executed_units:") {
            self.executions = count;
        } else if let Some(mib) = after("stat::peak_rss_mb:") {
            self.peak_mib = mib;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FuzzOutcome;

    #[test]
    fn the_engines_last_words_are_read() {
        let mut outcome = FuzzOutcome::default();
        for line in [
            "#2\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 27Mb",
            "#10000000\tDONE   cov: 107 ft: 375 corp: 186/7699b lim: 8192 exec/s: 181818 rss: 27Mb",
            "Done 10000000 runs in 55 second(s)",
            "stat::number_of_executed_units: 10000000",
            "stat::peak_rss_mb:              27",
        ] {
            outcome.see(line);
        }
        let expected = FuzzOutcome {
            executions: 10_000_000,
            seconds: 55,
            edges: 107,
            features: 375,
            peak_mib: 27,
        };
        assert_eq!(outcome, expected);
    }
}
