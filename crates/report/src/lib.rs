//! Profiles for people: reads a pprof file back and shows it.
//!
//! ```text
//! let profile = report::load(path)?;
//! let (profile, windows) = report::load_all(&[one, another], false, None)?;
//! let options = report::top::TableOptions { limit: 10, ..Default::default() };
//! print!("{}", report::top::table(&profile, "cpu", &options)?);
//! print!("{}", report::types::table(&profile, "alloc_space", &options));
//! print!("{}", report::collections::table(&profile, &options));
//! report::folded::write(&profile, "blocked", &ProfileView::default(), &mut std::io::stdout())?;
//! let html = report::flame::page(&profile, "shop, pid 4242", None, &ProfileView::default())?;
//! ```
//! Works on any pprof that `go tool pprof` reads ([`perfusion_pprof::read`]), not only our own.
//! Names in a file are data: control characters are escaped wherever they are shown.

pub mod collections;
pub mod exact_merge;
pub mod exact_summary;
pub mod flame;
pub mod folded;
mod foreign;
pub mod groups;
pub mod label_name;
pub mod leaks;
pub mod list;
pub mod merge;
#[cfg(test)]
mod odd;
pub mod stacks;
pub mod survey_diff;
pub mod survey_profile;
pub mod top;
mod tree;
pub mod types;

use merge::{ProfileMerger, WindowLengths};
use perfusion_dotnet::exact::{self, ExactAccount, path_beside};
use perfusion_pprof::proto::Profile;
use perfusion_pprof::read;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Largest file read.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// The reason why a report cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", shown(path))]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The file is larger than any profile.
    #[error("{} has more than {MAX_FILE_BYTES} bytes: not a profile", shown(path))]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// A directory.
    #[error(
        "{}: expected a profile, found a directory: name one of the files in it",
        path.display()
    )]
    Directory {
        /// The directory.
        path: PathBuf,
    },
    /// It is not a valid profile.
    #[error("{}: expected a pprof profile, gzipped or not, found {found}: {todo}", shown(path))]
    NoProfile {
        /// The file.
        path: PathBuf,
        /// The format of the file.
        found: String,
        /// Advice for the user.
        todo: Cow<'static, str>,
    },
    /// Files that no report can show as one.
    #[error(
        "{file} cannot be shown with the files before it: no sample type is in common; it has \
         {available}, all of them have {before}"
    )]
    NothingInCommon {
        /// The first file that has nothing in common with those before.
        file: String,
        /// Its sample types.
        available: String,
        /// The sample types that those before have in common.
        before: String,
    },
    /// Files that were sampled in different ways.
    #[error(
        "{file} cannot be shown with the files before it: its period is of type {period}, theirs \
         of type {before}"
    )]
    UnlikePeriods {
        /// The first file whose period is of another type.
        file: String,
        /// That type, or `none`.
        period: String,
        /// The type of the files before.
        before: String,
    },
    /// A sample type that does not measure the same in all files.
    #[error(
        "{file} cannot be shown with the files before it: its `{sample_type}` is in {unit}, theirs \
         in {before}, and none can be converted"
    )]
    UnlikeUnits {
        /// The name that the files have in common.
        sample_type: String,
        /// The first file with a unit of another kind.
        file: String,
        /// Its unit.
        unit: String,
        /// The unit of the files before.
        before: String,
    },
    /// No such sample type.
    #[error("the profile has no sample type `{asked}`; it has {available}")]
    NoSampleType {
        /// The name that was requested.
        asked: String,
        /// The names that are there.
        available: String,
    },
    /// A profile, but of something else.
    #[error("{}: expected {expected}, found a profile with {available}", shown(path))]
    OfAnother {
        /// The file.
        path: PathBuf,
        /// The kind of profile that was expected.
        expected: &'static str,
        /// The names that are there.
        available: String,
    },
    /// No such label.
    #[error("no sample of the profile has the label `{asked}`; there are {available}")]
    NoLabel {
        /// The name that was requested.
        asked: String,
        /// The names that are there.
        available: String,
    },
    /// No sample has the value.
    #[error(
        "--only {label}={asked}: no sample of the profile has that value; there are {available}"
    )]
    NoValue {
        /// The label.
        label: String,
        /// The name that was requested.
        asked: String,
        /// The names that are there.
        available: String,
    },
    /// A profile that exact mode has not made.
    #[error(
        "{}: not recorded with --exact: there is no {} beside it",
        path.display(),
        beside.display()
    )]
    NotExact {
        /// The profile.
        path: PathBuf,
        /// What is missing.
        beside: PathBuf,
    },
    /// Several files where one is shown.
    #[error("--exact shows one FILE at a time, found {found}")]
    OneAtATime {
        /// How many.
        found: usize,
    },
    /// What can be read once.
    #[error("`-` is there more than once: standard input can be read as one FILE only")]
    StdinTwice,
    /// Nothing is in the file.
    #[error(
        "{}: expected a pprof profile, found nothing: the file is empty, no profile was written \
         into it",
        shown(path)
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// No account of exact mode.
    #[error("{}: no account of exact mode, which `record --exact` writes beside its profile: \
         {why}", path.display())]
    NoAccount {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What is to be listed is no expression.
    #[error("--list {expression}: not a regular expression: {why}")]
    Expression {
        /// The expression.
        expression: String,
        /// What is wrong with it.
        why: String,
    },
    /// No function to list.
    #[error("--list {expression}: no function of that name has source lines in the profile; {why}")]
    NotListed {
        /// The expression.
        expression: String,
        /// Why that may be.
        why: &'static str,
    },
    /// The output cannot be written.
    #[error("cannot write the report: {0}")]
    Write(#[from] std::io::Error),
}

/// Reads and checks a profile; `-` is standard input.
///
/// # Errors
/// When the file cannot be read or pprof would refuse it, too.
pub fn load(path: &Path) -> Result<Profile, ReportError> {
    decoded(path, &contents(path)?)
}

/// The same of one that has this sample type, as what is `expected` has.
///
/// # Errors
/// See [`load`], and when it is something else.
pub fn load_with(
    path: &Path,
    sample_type: &str,
    expected: &'static str,
) -> Result<Profile, ReportError> {
    let profile = load(path).map_err(|error| match error {
        ReportError::NoProfile { path, found, todo } if todo == foreign::RECORD => {
            ReportError::NoProfile { path, found, todo: format!("name {expected}").into() }
        }
        other => other,
    })?;
    match stacks::ProfileStacks::new(&profile).sample_type(sample_type) {
        Err(ReportError::NoSampleType { available, .. }) => {
            Err(ReportError::OfAnother { path: path.to_owned(), expected, available })
        }
        other => other.map(|_| profile),
    }
}

/// As pprof reads it. What was dropped or changed on the way is said.
fn decoded(path: &Path, bytes: &[u8]) -> Result<Profile, ReportError> {
    match read::read(bytes) {
        Ok(read::ReadProfile { profile, remarks }) => {
            for remark in remarks {
                tracing::warn!("{}: {remark}", shown(path));
            }
            Ok(profile)
        }
        Err(source) => {
            let (found, todo) = foreign::answer(bytes, &source);
            Err(ReportError::NoProfile { path: path.to_owned(), found, todo: todo.into() })
        }
    }
}

/// Reads several as one: see [`merge`]. One that is there twice counts
/// once.
///
/// # Errors
/// When one of them cannot be read or is no valid pprof, when they have no sample type in common,
/// or standard input is asked for twice.
pub fn load_all(
    paths: &[PathBuf],
    each_moment: bool,
    only: Option<&str>,
) -> Result<(Profile, WindowLengths), ReportError> {
    if paths.iter().filter(|path| path.as_os_str() == "-").count() > 1 {
        return Err(ReportError::StdinTwice);
    }
    let mut all = ProfileMerger::new();
    let (mut known, hasher) = (HashSet::new(), RandomState::new());
    let (mut again, mut gone) = (Vec::new(), Vec::new());
    for path in paths {
        let bytes = match contents(path) {
            // A daemon keeps so much and no more: of many files the oldest may go before they are
            // read.
            Err(ReportError::Read { source, .. })
                if source.kind() == ErrorKind::NotFound && paths.len() > 1 =>
            {
                gone.push(path);
                continue;
            }
            read => read?,
        };
        if known.insert((bytes.len(), hasher.hash_one(&bytes))) {
            all.add(&decoded(path, &bytes)?, &shown(path))?;
        } else {
            again.push(path);
        }
    }
    if let Some(first) = gone.first() {
        if known.is_empty() {
            let source = ErrorKind::NotFound.into();
            return Err(ReportError::Read { path: first.to_path_buf(), source });
        }
        tracing::warn!("{}{}: not there, left out", shown(first), and_more(gone.len()));
    }
    if let Some(first) = again.first() {
        let more = and_more(again.len());
        tracing::warn!("{}{more}: the same as a profile before, counted once", shown(first));
    }
    let merge::MergedProfile { profile, windows, remarks } = all.finish(each_moment, only)?;
    for remark in remarks {
        tracing::warn!("{remark}");
    }
    Ok((profile, windows))
}

/// Behind the first of so many.
fn and_more(of: usize) -> String {
    match of.saturating_sub(1) {
        0 => String::new(),
        more => format!(" and {more} more"),
    }
}

/// The path as people know it.
fn shown(path: &Path) -> std::borrow::Cow<'_, str> {
    if path == Path::new("-") { "standard input".into() } else { path.to_string_lossy() }
}

/// Reads what exact mode has written: the JSON file itself, or the one beside the profile that is
/// named.
///
/// # Errors
/// When the file cannot be read or is something else.
pub fn load_account(path: &Path) -> Result<ExactAccount, ReportError> {
    let is_json = path == Path::new("-") || path.extension().is_some_and(|end| end == "json");
    let profile = path;
    let path = if is_json { path.to_owned() } else { path_beside(path) };
    let bytes = match contents(&path) {
        Err(ReportError::Read { source, .. })
            if source.kind() == ErrorKind::NotFound && !is_json && profile.exists() =>
        {
            return Err(ReportError::NotExact { path: profile.to_owned(), beside: path });
        }
        read => read?,
    };
    let account: ExactAccount = serde_json::from_slice(&bytes)
        .map_err(|error| ReportError::NoAccount { path: path.clone(), why: error.to_string() })?;
    match account.version {
        exact::VERSION => Ok(account),
        other => Err(ReportError::NoAccount {
            path,
            why: format!("version {other}, expected {}", exact::VERSION),
        }),
    }
}

fn contents(path: &Path) -> Result<Vec<u8>, ReportError> {
    let fail = |source: std::io::Error| match source.kind() {
        ErrorKind::IsADirectory => ReportError::Directory { path: path.to_owned() },
        _ => ReportError::Read { path: path.to_owned(), source },
    };
    let mut bytes = Vec::new();
    let input: Box<dyn Read> = match path.to_str() {
        Some("-") => Box::new(std::io::stdin().lock()),
        _ => Box::new(File::open(path).map_err(fail)?),
    };
    input.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.is_empty() {
        return Err(ReportError::Empty { path: path.to_owned() });
    }
    if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_FILE_BYTES) {
        return Err(ReportError::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}
