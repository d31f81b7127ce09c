//! Source lines of functions with what each takes: its own (flat), and with what it calls (cum). As
//! `go tool pprof -list` shows it.
//!
//! The profile names source files as the compiler was told them. They are looked for at that path,
//! and below the directories that are given, there by ever shorter ends of the path. A file that is
//! not to be had is no error: its lines are shown by their numbers.

use super::ReportError;
use super::stacks::{FrameSource, ProfileStacks, ProfileView, ReportFrame, ViewedSamples};
use super::top::flat;
use perfusion_model::text::clean;
use perfusion_model::units::{human, percent};
use perfusion_pprof::proto::Profile;
use perfusion_pprof::read;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Lines shown before the first and behind the last one with a value.
const AROUND: i64 = 5;
/// Longest source file that is read.
const MAX_SOURCE_BYTES: u64 = 16 << 20;
/// Most lines of one function that are shown without a value of their own, one after another.
const MOST_BETWEEN: i64 = 50;

/// What to list.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    /// Functions whose names match, as RE2 reads it.
    pub functions: String,
    /// Directories with sources.
    pub sources: Vec<PathBuf>,
    /// What to show.
    pub view: ProfileView,
}

/// Values of a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LineTotals {
    flat: i128,
    cum: i128,
}

/// A function in one of its files.
#[derive(Clone, Debug, Default)]
struct ListedFunction {
    start_line: i64,
    own: LineTotals,
    lines: BTreeMap<i64, LineTotals>,
}

/// The listing of one sample type.
///
/// # Errors
/// When there is no such sample type or label, the expression is none, or no function matches.
pub fn text(
    profile: &Profile,
    sample_type: &str,
    options: &ListOptions,
) -> Result<String, ReportError> {
    let stacks = ProfileStacks::of_sources(profile);
    let column = stacks.sample_type(sample_type)?;
    stacks.check(&options.view)?;
    let expression = || options.functions.clone();
    let wanted = read::regex(&options.functions)
        .map_err(|why| ReportError::Expression { expression: expression(), why })?;
    let mut found: BTreeMap<(&str, String), ListedFunction> = BTreeMap::new();
    let mut matches: HashMap<String, bool> = HashMap::new();
    let mut is_listed = |frame: &ReportFrame<'_>| {
        frame.source.is_some()
            && *matches
                .entry(frame.name.to_string())
                .or_insert_with(|| wanted.is_match(&frame.name))
    };
    let ViewedSamples { values, total, .. } = stacks.values(column, &options.view);
    for (sample, value) in values {
        let value = i128::from(value);
        let frames = stacks.own_readable_frames(sample);
        let (own, _) = flat(&stacks, sample, sample_type, &frames);
        if let Some(frame) = own.filter(|frame| is_listed(frame))
            && let Some((function, line)) = place(&mut found, frame)
        {
            function.own.flat += value;
            function.lines.entry(line).or_default().flat += value;
        }
        // What calls itself is counted once, and so is a line of it.
        let mut functions = HashSet::new();
        for frame in frames.iter().collect::<HashSet<_>>() {
            if is_listed(frame)
                && let Some((function, line)) = place(&mut found, frame)
            {
                function.lines.entry(line).or_default().cum += value;
                if functions.insert((&frame.name, frame.source.map(|source| source.file))) {
                    function.own.cum += value;
                }
            }
        }
    }
    if found.is_empty() {
        let has_lines = profile.location.iter().any(|at| at.line.iter().any(|line| line.line > 0));
        let why = if has_lines {
            "`perfusion report --lines` shows those that have"
        } else {
            "it has no lines at all: `perfusion record` finds them of assemblies with a PDB and \
             of native files with debug information, but not with `--no-lines`"
        };
        return Err(ReportError::NotListed { expression: expression(), why });
    }
    let (_, unit) = stacks.sample_types().nth(column).unwrap_or_default();
    let mut text = format!("Total: {}\n", human(total.net(), unit));
    let mut files: HashMap<&str, Option<Vec<String>>> = HashMap::new();
    for ((file, name), function) in &found {
        let source = files.entry(file).or_insert_with(|| source(file, &options.sources));
        writeln!(text, "ROUTINE ======================== {name} in {}", clean(file))
            .unwrap_or_default();
        let LineTotals { flat, cum } = function.own;
        let number = |value: i128| if value == 0 { ".".to_owned() } else { human(value, unit) };
        writeln!(
            text,
            "{:>10} {:>10} (flat, cum) {} of Total",
            number(flat),
            number(cum),
            percent(cum, total.whole()).trim()
        )
        .unwrap_or_default();
        for (line, totals) in shown(function) {
            let Some(totals) = totals else {
                text.push_str("         .          .        …\n");
                continue;
            };
            let of_file = source.as_ref().and_then(|source| {
                source.get(usize::try_from(line).ok()?.checked_sub(1)?).map(String::as_str)
            });
            // Behind the end of the file there is nothing to show.
            if of_file.is_none() && totals == LineTotals::default() {
                continue;
            }
            let LineTotals { flat, cum } = totals;
            let code = of_file.unwrap_or("???");
            let row = format!("{:>10} {:>10} {line:>6}:{code}", number(flat), number(cum));
            writeln!(text, "{}", row.trim_end()).unwrap_or_default();
        }
        if source.is_none() {
            text.push_str("the source file is not here; --source DIR names where it is\n");
        }
    }
    Ok(text)
}

/// The function of a frame, and the frame's line.
fn place<'f, 'a>(
    found: &'f mut BTreeMap<(&'a str, String), ListedFunction>,
    frame: &ReportFrame<'a>,
) -> Option<(&'f mut ListedFunction, i64)> {
    let FrameSource { file, line, start_line } = frame.source?;
    let function = found.entry((file, frame.name.to_string())).or_default();
    function.start_line = start_line;
    Some((function, line))
}

/// The lines to show, in order; `None` stands for many that are left out.
fn shown(function: &ListedFunction) -> Vec<(i64, Option<LineTotals>)> {
    let mut rows = Vec::new();
    let mut next = None;
    for (&line, &totals) in &function.lines {
        // The head of the function is shown, where it is near.
        let from = match next {
            None if (1..=line).contains(&function.start_line) => {
                (function.start_line - AROUND).max(line - MOST_BETWEEN)
            }
            None => line - AROUND,
            Some(next) => next,
        };
        let from = from.max(1);
        if line - from > MOST_BETWEEN {
            rows.extend((from..from + AROUND).map(|line| (line, Some(LineTotals::default()))));
            rows.push((line, None));
            rows.extend((line - AROUND..line).map(|line| (line, Some(LineTotals::default()))));
        } else {
            rows.extend((from..line).map(|line| (line, Some(LineTotals::default()))));
        }
        rows.push((line, Some(totals)));
        next = Some(line + 1);
    }
    if let Some(next) = next {
        rows.extend((next..next + AROUND).map(|line| (line, Some(LineTotals::default()))));
    }
    rows
}

/// The lines of a source file, control characters escaped.
fn source(file: &str, folders: &[PathBuf]) -> Option<Vec<String>> {
    // A compiler on another system writes its own separators.
    let path = file.replace('\\', "/");
    let parts: Vec<&str> =
        path.split('/').filter(|part| !matches!(*part, "" | "." | ".." | "_")).collect();
    let ends = |folder: &PathBuf| {
        let folder = folder.clone();
        (0..parts.len()).map(|at| folder.join(parts[at..].join("/"))).collect::<Vec<_>>()
    };
    let below = folders.iter().flat_map(ends);
    below.chain([PathBuf::from(file)]).find_map(|path| read_source(&path))
}

fn read_source(path: &Path) -> Option<Vec<String>> {
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_SOURCE_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    // A tab is none to be afraid of.
    let line = |line: &str| clean(&line.replace('\t', "    ")).into_owned();
    Some(text.lines().map(line).collect())
}

#[cfg(test)]
mod tests {
    use super::{ListOptions, text};
    use perfusion_pprof::proto::{Function, Line, Location, Mapping, Profile, Sample, ValueType};

    /// Samples of these stacks, innermost first, as (function, line): `Work` is function 1 and
    /// begins in line 3, `Main` is 2, and `Native` is 3 and has no file.
    fn profile(stacks: &[&[(u64, i64)]]) -> Profile {
        let strings = ["", "samples", "count", "/src/Work.cs", "Work", "Main", "Native", "a.dll"];
        let mut profile = Profile {
            sample_type: vec![ValueType { r#type: 1, unit: 2 }],
            string_table: strings.map(str::to_owned).to_vec(),
            mapping: vec![Mapping { id: 1, filename: 7, ..Mapping::default() }],
            ..Profile::default()
        };
        for (id, name, filename, start_line) in [(1, 4, 3, 3), (2, 5, 3, 20), (3, 6, 0, 0)] {
            let function = Function { id, name, filename, start_line, ..Function::default() };
            profile.function.push(function);
        }
        for stack in stacks {
            let mut sample = Sample { value: vec![10], ..Sample::default() };
            for &(function_id, line) in *stack {
                let id = profile.location.len() as u64 + 1;
                let line = vec![Line { function_id, line, ..Line::default() }];
                profile.location.push(Location { id, mapping_id: 1, line, ..Location::default() });
                sample.location_id.push(id);
            }
            profile.sample.push(sample);
        }
        profile
    }

    fn options(functions: &str, folder: Option<&std::path::Path>) -> ListOptions {
        ListOptions {
            functions: functions.to_owned(),
            sources: folder.map(std::path::Path::to_owned).into_iter().collect(),
            ..ListOptions::default()
        }
    }

    #[test]
    fn each_line_has_its_own_and_with_what_it_calls() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("src")).unwrap();
        let source: String = (1..=30).map(|line| format!("\tcode {line}\n")).collect();
        std::fs::write(folder.path().join("src/Work.cs"), source).unwrap();
        let profile = profile(&[
            &[(1, 5), (2, 21)],
            &[(3, 0), (1, 5), (2, 21)],
            &[(1, 7), (1, 5), (1, 5), (2, 22)],
            &[(2, 22)],
        ]);
        let listed = text(&profile, "samples", &options("^Work$", Some(folder.path()))).unwrap();
        let rows: Vec<&str> = listed.lines().collect();
        assert_eq!(
            rows[..3],
            [
                "Total: 40",
                "ROUTINE ======================== Work in /src/Work.cs",
                "        20         30 (flat, cum) 75.0% of Total",
            ]
        );
        let row = |line: &str| rows.iter().find(|row| row.contains(line)).copied();
        assert_eq!(row(" 3:"), Some("         .          .      3:    code 3"));
        assert_eq!(row(" 5:"), Some("        10         30      5:    code 5"), "itself but once");
        assert_eq!(row(" 7:"), Some("        10         10      7:    code 7"));
        assert_eq!(rows.last().copied(), Some("         .          .     12:    code 12"));
        assert!(!listed.contains("Main"));
    }

    #[test]
    fn a_source_that_is_not_here_is_said_and_its_numbers_are_shown() {
        let listed = text(&profile(&[&[(1, 5)]]), "samples", &options("Work", None)).unwrap();
        assert!(listed.contains("        10         10      5:???"), "{listed}");
        assert!(listed.contains("--source"), "{listed}");
    }

    #[test]
    fn what_cannot_be_listed_is_said() {
        let profile = profile(&[&[(3, 0)]]);
        let said = |functions| {
            text(&profile, "samples", &options(functions, None)).unwrap_err().to_string()
        };
        assert!(said("Native").contains("--no-lines"), "{}", said("Native"));
        assert!(said("(").contains("--list ("), "{}", said("("));
    }
}
