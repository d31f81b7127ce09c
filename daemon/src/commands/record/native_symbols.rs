//! Names that a recording lacks because its native files have no symbols: looked for in the
//! directories that were named, and asked of servers when the recording is over.

use super::StatusLines;
use crate::cli::SymbolArgs;
use crate::error::Error;
use crate::symbols::{FetchLimits, SymbolCache, SymbolServers};
use perfusion_recorder::RecordingResult;
use std::time::{Duration, Instant};

/// How long servers may take together: a person waits for the file.
const MOST_TIME: Duration = Duration::from_secs(60);
/// Longest file: a debug file of libcoreclr.so has some 100 MB.
const MOST_BYTES: u64 = 512 << 20;
const CACHE_BYTES: u64 = 4 << 30;

/// Looks for the symbols of files that have none, and names their frames.
///
/// # Errors
/// When a URL is none. What servers do is said, and no error.
pub(super) fn complete(
    recorded: &mut RecordingResult,
    options: &SymbolArgs,
    say: StatusLines,
) -> Result<(), Error> {
    let missing = |recorded: &RecordingResult| -> Vec<Vec<u8>> {
        let processor = &recorded.processor;
        let missing = processor.symbolizer.missing(&processor.processes);
        missing.into_iter().map(|file| file.build_id).collect()
    };
    let look_again = |recorded: &mut RecordingResult, builds: &[Vec<u8>]| {
        let processor = &mut recorded.processor;
        processor.symbolizer.look_again(builds, &processor.processes);
        recorded.name_again();
    };
    let lacking = missing(recorded);
    if lacking.is_empty() {
        return Ok(());
    }
    recorded.processor.symbolizer.look_in(options.places());
    look_again(recorded, &lacking);
    let (lacking, urls) = (missing(recorded), options.servers());
    if lacking.is_empty() || urls.is_empty() {
        return Ok(());
    }
    let cache = match SymbolCache::open(&options.cache(), CACHE_BYTES) {
        Ok(cache) => cache,
        Err(error) => {
            say.line(&format!("symbols: not fetched: {error}"));
            return Ok(());
        }
    };
    let servers = if urls.len() == 1 { "server" } else { "servers" };
    say.line(&format!(
        "asking {} symbol {servers} for {} files (--no-symbol-server leaves that out)",
        urls.len(),
        lacking.len()
    ));
    let limits = FetchLimits { file_bytes: MOST_BYTES, timeout: MOST_TIME };
    let mut servers = SymbolServers::new(&urls, cache, limits)?;
    let report = servers.fetch(&lacking, Instant::now() + MOST_TIME);
    if !report.kept.is_empty() {
        look_again(recorded, &report.kept);
    }
    report.lines().iter().for_each(|line| say.line(line));
    Ok(())
}
