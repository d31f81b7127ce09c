//! `perfusion symbols`: where the symbols of native files are, and those that are missing, fetched.

use super::output::to_stdout;
use crate::cli::{SymbolsCheckArgs, SymbolsFetchArgs, exit};
use crate::error::{Error, say};
use crate::symbols::{self, FetchLimits, SymbolCache, SymbolServers};
use perfusion_model::text::{clean, hex};
use perfusion_symbolize::separate::{self, SymbolSource};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long all files may take together, and one of them; and the longest file.
const MOST_TIME: Duration = Duration::from_secs(3600);
const FILE_TIME: Duration = Duration::from_secs(300);
const MOST_BYTES: u64 = 4 << 30;
/// What the user's own cache holds.
const CACHE_BYTES: u64 = 4 << 30;

/// A build whose symbols are asked about.
struct Build {
    /// A file on this host, or the name in a profile.
    name: String,
    build_id: Option<Vec<u8>>,
    /// Where its symbols are.
    found: String,
    is_missing: bool,
}

/// `perfusion symbols check`.
///
/// # Errors
/// When a file is none, or the output cannot be written.
pub fn check(options: &SymbolsCheckArgs) -> Result<u8, Error> {
    let mut places = options.symbol_directory.clone();
    places.push(symbols::default_cache());
    let (mut text, mut missing) = (String::new(), false);
    for build in builds(&options.files, &places)? {
        let id = build.build_id.as_deref().map_or_else(|| "no build id".to_owned(), hex);
        text.push_str(&format!("{}: {}; {}\n", clean(&build.name), id, build.found));
        missing |= build.is_missing;
    }
    to_stdout(text.as_bytes())?;
    Ok(if missing { exit::OTHER } else { 0 })
}

/// `perfusion symbols fetch`.
///
/// # Errors
/// When a file is none, no server is known, or the directory cannot be used.
pub fn fetch(options: &SymbolsFetchArgs, quiet: bool) -> Result<u8, Error> {
    let urls = options.symbols.servers();
    if urls.is_empty() {
        return Err(Error::NoSymbolServer);
    }
    let into = options.into.clone().unwrap_or_else(|| options.symbols.cache());
    let cache =
        SymbolCache::open(&into, if options.into.is_some() { u64::MAX } else { CACHE_BYTES })?;
    let mut places = options.symbols.symbol_directory.clone();
    places.push(into);
    let builds = builds(&options.files, &places)?;
    let mut wanted: Vec<Vec<u8>> = builds
        .iter()
        .filter(|build| build.is_missing)
        .filter_map(|build| build.build_id.clone())
        .collect();
    wanted.sort();
    wanted.dedup();
    let limits = FetchLimits { file_bytes: MOST_BYTES, timeout: FILE_TIME };
    let mut servers = SymbolServers::new(&urls, cache.clone(), limits)?;
    let report = servers.fetch(&wanted, Instant::now() + MOST_TIME);
    let mut text = String::new();
    let mut missing = false;
    for build in &builds {
        let name = clean(&build.name);
        let kept =
            build.build_id.as_ref().filter(|id| build.is_missing && report.kept.contains(id));
        match (kept.and_then(|id| cache.path(id)), build.is_missing) {
            (Some(path), _) => text.push_str(&format!("{name}: {}\n", path.display())),
            (None, false) => text.push_str(&format!("{name}: {}\n", build.found)),
            (None, true) => {
                text.push_str(&format!("{name}: not fetched\n"));
                missing = true;
            }
        }
    }
    to_stdout(text.as_bytes())?;
    if !quiet {
        report.lines().iter().for_each(|line| say(line));
    }
    Ok(if missing { exit::OTHER } else { 0 })
}

/// The builds that these files are, or tell of.
fn builds(files: &[PathBuf], places: &[PathBuf]) -> Result<Vec<Build>, Error> {
    let mut builds = Vec::new();
    for path in files {
        if is_elf(path) {
            builds.push(of_file(path, places)?);
        } else {
            of_profile(path, places, &mut builds)?;
        }
    }
    Ok(builds)
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).is_ok_and(|mut file| file.read_exact(&mut magic).is_ok())
        && magic == *b"\x7fELF"
}

fn of_file(path: &Path, places: &[PathBuf]) -> Result<Build, Error> {
    let report = separate::report(path, places)
        .map_err(|source| Error::SymbolsOf { path: path.to_owned(), source })?;
    let mut found = match &report.source {
        SymbolSource::Own => "its own symbol table".to_owned(),
        SymbolSource::DebugFile(path) => format!("debug file {}", path.display()),
        SymbolSource::Packed => "packed symbols of functions (.gnu_debugdata)".to_owned(),
        SymbolSource::Exports => "no symbols but those it exports".to_owned(),
    };
    if report.methods > 0 {
        found.push_str(&format!("; {} methods by NativeAOT's own list", report.methods));
    }
    if report.refused > 0 {
        found.push_str(&format!(
            "; {} debug files of another build were passed over",
            report.refused
        ));
    }
    Ok(Build {
        name: path.display().to_string(),
        build_id: report.build_id,
        found,
        is_missing: matches!(report.source, SymbolSource::Exports | SymbolSource::Packed),
    })
}

/// The files of a profile, which need not be on this host. Those with a build id are native.
fn of_profile(path: &Path, places: &[PathBuf], builds: &mut Vec<Build>) -> Result<(), Error> {
    let profile = perfusion_report::load(path)?;
    let text = |at: i64| {
        usize::try_from(at)
            .ok()
            .and_then(|at| profile.string_table.get(at))
            .map_or("", String::as_str)
    };
    for mapping in &profile.mapping {
        let name = text(mapping.filename);
        // The kernel's symbols are its own affair, and the vDSO is in no package.
        let Some(build_id) =
            symbols::build_id(text(mapping.build_id)).filter(|_| !name.starts_with('['))
        else {
            continue;
        };
        let debug_file = separate::by_build_id(&build_id, places);
        let is_missing = debug_file.is_none();
        builds.push(Build {
            name: name.to_owned(),
            build_id: Some(build_id),
            found: debug_file.map_or_else(
                || "no debug file here".to_owned(),
                |path| format!("debug file {}", path.display()),
            ),
            is_missing,
        });
    }
    Ok(())
}
