//! The judges from outside: google/pprof's `CheckValid` and `go tool pprof`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, ensure};

use crate::environment::{cache_dir, sources};

/// Applies google/pprof's `CheckValid` to `profile`.
///
/// # Errors
/// What the parser refused.
pub fn check_valid(profile: &Path) -> anyhow::Result<String> {
    let program = checkvalid()?;
    let output = Command::new(program).arg(profile).output()?;
    ensure!(output.status.success(), "CheckValid: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Builds `checkvalid` (Go's own build cache makes this quick), once: another test may be running
/// it.
fn checkvalid() -> anyhow::Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    built(&BUILT, "checkvalid", ".")
}

/// Builds pprof from its module.
fn pprof() -> anyhow::Result<PathBuf> {
    static BUILT: Mutex<Option<PathBuf>> = Mutex::new(None);
    built(&BUILT, "pprof", "github.com/google/pprof")
}

fn built(built: &Mutex<Option<PathBuf>>, name: &str, package: &str) -> anyhow::Result<PathBuf> {
    let mut built = built.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = &*built {
        return Ok(program.clone());
    }
    let program = cache_dir().join(name);
    let output = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(package)
        .current_dir(sources().join("checkvalid"))
        .output()
        .context("cannot run go")?;
    ensure!(output.status.success(), "go build: {}", String::from_utf8_lossy(&output.stderr));
    *built = Some(program.clone());
    Ok(program)
}

/// What pprof makes of a file: of every function its own and its whole value, and of every stack,
/// innermost frame first, its value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// What percentages are of.
    pub total: i128,
    /// Own and whole value by name; of rows of one name the sum. Without those at zero.
    pub functions: BTreeMap<String, (i128, i128)>,
    /// Without those at zero, and without samples that have no stack.
    pub stacks: BTreeMap<Vec<String>, i128>,
}

/// Asks pprof, built from its module, for the `-top` and `-traces` of a file, in the unit the file
/// has. The error is why it refuses the file.
///
/// # Errors
/// When pprof cannot be built or run.
pub fn judge(profile: &Path, unit: &str) -> anyhow::Result<Result<Judged, String>> {
    let mut judged = Judged::default();
    let top = match pprof_says(profile, &["-top", "-trim=false", &format!("-unit={unit}")])? {
        Ok(top) => top,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let mut rows =
        top.lines().skip_while(|line| !line.starts_with("Showing nodes accounting for "));
    let heading = rows.next().context("no heading")?;
    let total = heading.rsplit(" of ").next().and_then(|rest| rest.strip_suffix(" total"));
    judged.total = number(total.context("no total")?)?;
    for row in rows.skip(1) {
        let (numbers, name) = columns(row, 5).with_context(|| format!("no row: {row:?}"))?;
        let name = name.trim_end_matches(" (inline)").trim_end_matches(" (partial-inline)");
        let (own, whole) = (number(numbers[0])?, number(numbers[3])?);
        if (own, whole) != (0, 0) {
            let sums = judged.functions.entry(name.to_owned()).or_default();
            *sums = (sums.0 + own, sums.1 + whole);
        }
    }
    let traces = pprof_says(profile, &["-traces", "-trim=false", &format!("-unit={unit}")])?;
    let traces =
        traces.map_err(|refusal| anyhow::anyhow!("-top works, -traces does not: {refusal}"))?;
    for trace in traces
        .split("-----------+-------------------------------------------------------\n")
        .skip(1)
    {
        // Labels come first: `       key:  value`.
        let Some((value, stack)) = trace.lines().enumerate().find_map(|(at, line)| {
            let (value, first) = line.trim_start().split_once("   ")?;
            let value = number(value).ok().filter(|_| !value.is_empty())?;
            let rest = trace.lines().skip(at + 1).filter_map(|line| line.get(13..));
            let names = [first]
                .into_iter()
                .chain(rest)
                .map(|name| name.trim_end_matches(" (inline)").to_owned());
            Some((value, names.collect::<Vec<_>>()))
        }) else {
            continue;
        };
        *judged.stacks.entry(stack).or_default() += value;
    }
    judged.stacks.retain(|_, value| *value != 0);
    Ok(Ok(judged))
}

/// What pprof prints, or why it does not. Bytes that are no UTF-8 are shown as `\xNN`.
///
/// # Errors
/// When pprof cannot be built or run.
pub fn pprof_says(profile: &Path, args: &[&str]) -> anyhow::Result<Result<String, String>> {
    let mut command = Command::new(pprof()?);
    command.args(args).arg(profile).env("PPROF_BINARY_PATH", "/nonexistent");
    let output = command.output().context("cannot run pprof")?;
    if !output.status.success() {
        return Ok(Err(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    let mut text = String::new();
    for chunk in output.stdout.utf8_chunks() {
        text.push_str(chunk.valid());
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    Ok(Ok(text))
}

/// So many words, and what follows two blanks after them.
fn columns(row: &str, count: usize) -> Option<(Vec<&str>, &str)> {
    let (mut words, mut rest) = (Vec::new(), row);
    for _ in 0..count {
        rest = rest.trim_start_matches(' ');
        let end = rest.find(' ')?;
        words.push(&rest[..end]);
        rest = &rest[end..];
    }
    Some((words, rest.strip_prefix("  ")?))
}

/// A number without its unit.
fn number(text: &str) -> anyhow::Result<i128> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '-').unwrap_or(text.len());
    text[..end].parse().with_context(|| format!("no number: {text:?}"))
}

/// `go tool pprof -top -sample_index=T`: its table.
///
/// # Errors
/// When pprof refuses the file or the type.
pub fn pprof_top(profile: &Path, sample_type: &str) -> anyhow::Result<String> {
    let output = Command::new("go")
        .args(["tool", "pprof", "-top", "-nodecount=20", &format!("-sample_index={sample_type}")])
        .arg(profile)
        // It would look for binaries and symbol servers otherwise.
        .env("PPROF_BINARY_PATH", "/nonexistent")
        .output()
        .context("cannot run go tool pprof")?;
    ensure!(
        output.status.success(),
        "go tool pprof -sample_index={sample_type}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
