//! What tests of source lines share, of managed and of native code: a program is in loops on lines
//! that bear a comment.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::gotool::pprof_says;
use crate::perfusion::{self, SLACK};
use crate::profile::Frame;
use crate::{Profile, Sample};

/// The lines of a source that end in this comment, from 1 on.
///
/// # Errors
/// When the source cannot be read.
pub fn marked(source: &Path, comment: &str) -> anyhow::Result<Vec<i64>> {
    let text = fs::read_to_string(source).with_context(|| format!("{}", source.display()))?;
    let lines = (1..).zip(text.lines());
    Ok(lines.filter(|(_, line)| line.ends_with(comment)).map(|(number, _)| number).collect())
}

/// What samples are on, most first: of each the frames that `shown` chooses, innermost first.
pub fn picture<'a>(
    profile: &Profile,
    samples: impl IntoIterator<Item = &'a Sample>,
    shown: impl Fn(&'a Sample) -> Vec<&'a Frame>,
) -> String {
    let mut sums = BTreeMap::<String, i64>::new();
    for sample in samples {
        let frames = shown(sample).into_iter();
        let frames = frames.map(|frame| format!("{}:{}", frame.function, frame.source.line));
        *sums.entry(frames.collect::<Vec<_>>().join(" < ")).or_default() +=
            profile.value(sample, "samples");
    }
    let mut sums: Vec<_> = sums.into_iter().filter(|(_, value)| *value > 0).collect();
    sums.sort_by_key(|(_, value)| -value);
    sums.iter().take(8).map(|(text, value)| format!("\n  {value} {text}")).collect()
}

/// A report of a profile's CPU time.
///
/// # Errors
/// When it fails.
pub fn report(file: &Path, arguments: &[&str]) -> anyhow::Result<String> {
    let mut command = perfusion::command(["report"]);
    command.arg(file).args(arguments).arg("-t").arg("cpu");
    let outcome = perfusion::run(&mut command, SLACK)?;
    ensure!(outcome.code() == 0, "{}", outcome.stderr);
    Ok(outcome.stdout)
}

/// Checks the source of the functions that a pattern names, as `report --list` and `go tool pprof
/// -list` have it: the row with `hot` has what the line takes itself and with what it calls, the
/// row with `comment` has nothing.
///
/// # Errors
/// When one of them fails, or lists something else.
pub fn check_listed(
    file: &Path,
    source: &Path,
    pattern: &str,
    (hot, comment): (&str, &str),
) -> anyhow::Result<()> {
    let folder = source.parent().and_then(Path::to_str).context("a folder in UTF-8")?;
    let ours = report(file, &["--list", pattern, "--source", folder])?;
    let theirs =
        pprof_says(file, &["-list", pattern, "-sample_index=cpu", "-source_path", folder])?;
    let theirs = theirs.map_err(anyhow::Error::msg)?;
    for (what, listed) in [("report --list", ours), ("go tool pprof -list", theirs)] {
        let row = |code: &str| listed.lines().find(|row| row.contains(code)).unwrap_or_default();
        let words: Vec<&str> = row(hot).split_whitespace().collect();
        let takes = words.len() > 2 && words[0] != "." && words[1] != ".";
        ensure!(takes, "{what}: {:?}\n{listed}", row(hot));
        let comment = row(comment);
        ensure!(comment.trim_start().starts_with(". "), "{what}: {comment:?}\n{listed}");
    }
    Ok(())
}
