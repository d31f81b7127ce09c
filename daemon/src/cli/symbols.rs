//! Where symbols of native files come from, and the arguments of `perfusion symbols`.

use crate::symbols::{self, SymbolServers};
use clap::{Args, Subcommand};
use std::path::PathBuf;

pub(super) const SYMBOLS_EXAMPLES: &str = "Examples:
  perfusion symbols check /usr/share/dotnet/shared/*/*/*.so  which files have no symbols here
  perfusion symbols fetch app.pb.gz                          those of the files in a profile
  perfusion symbols fetch --into /srv/symbols app.pb.gz      for a host without a network: copy the
                                                             directory there, and name it in
                                                             symbols.directories";

/// Where symbols of native files come from, besides the places on this host where debuggers look.
#[derive(Clone, Debug, Args)]
pub struct SymbolArgs {
    /// Ask this server by build id for symbols that this host does not have: a debuginfod, or a
    /// symbol store of Microsoft's layout, which has those of .NET runtimes. Given again: each of
    /// them. Default: the servers in the environment's DEBUGINFOD_URLS. A server is told build ids
    /// and nothing else.
    #[arg(long, value_name = "URL", value_parser = parse_url)]
    pub symbol_server: Vec<String>,
    /// Ask no server, whatever DEBUGINFOD_URLS says.
    #[arg(long, conflicts_with = "symbol_server")]
    pub no_symbol_server: bool,
    /// Look for debug files in this directory too, by build id (`.build-id/ab/cdef.debug`), as
    /// `perfusion symbols fetch` fills it. Given again: each of them.
    #[arg(long, value_name = "DIR")]
    pub symbol_directory: Vec<PathBuf>,
    /// Keep what servers send in this directory, where nobody else may write. Default:
    /// /var/lib/perfusion/symbols for root, else perfusion/symbols in the user's cache.
    #[arg(long, value_name = "DIR")]
    pub symbol_cache: Option<PathBuf>,
}

impl SymbolArgs {
    /// Where it is kept what servers send.
    #[must_use]
    pub fn cache(&self) -> PathBuf {
        self.symbol_cache.clone().unwrap_or_else(symbols::default_cache)
    }

    /// The servers to ask.
    #[must_use]
    pub fn servers(&self) -> Vec<String> {
        match (self.no_symbol_server, self.symbol_server.is_empty()) {
            (true, _) => Vec::new(),
            (false, false) => self.symbol_server.clone(),
            (false, true) => {
                let mut urls = symbols::servers_of_environment();
                // Tools of other kinds read it too: what is nothing to us is passed over.
                urls.retain(|url| SymbolServers::check(url).is_ok());
                urls
            }
        }
    }

    /// Where debug files are looked for.
    #[must_use]
    pub fn places(&self) -> Vec<PathBuf> {
        let mut places = self.symbol_directory.clone();
        places.push(self.cache());
        places
    }
}

/// `perfusion symbols`.
#[derive(Debug, Subcommand)]
pub enum SymbolsCommand {
    /// Fetch debug files from servers into a directory, by build id.
    Fetch(SymbolsFetchArgs),
    /// Say of each file where its symbols are. Exit code 1 when some have none.
    Check(SymbolsCheckArgs),
}

/// `perfusion symbols fetch`.
#[derive(Debug, Args)]
#[command(after_help = SYMBOLS_EXAMPLES)]
pub struct SymbolsFetchArgs {
    /// Programs and libraries, or profiles, whose files need not be on this host.
    #[arg(value_name = "FILE|PROFILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Into this directory, whose size has no limit then. Default: the cache.
    #[arg(long, value_name = "DIR", conflicts_with = "symbol_cache")]
    pub into: Option<PathBuf>,
    /// Where from.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}

/// `perfusion symbols check`.
#[derive(Debug, Args)]
#[command(after_help = SYMBOLS_EXAMPLES)]
pub struct SymbolsCheckArgs {
    /// Programs and libraries, or profiles.
    #[arg(value_name = "FILE|PROFILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Look for debug files in this directory too, by build id. Given again: each of them.
    #[arg(long, value_name = "DIR")]
    pub symbol_directory: Vec<PathBuf>,
}

fn parse_url(text: &str) -> Result<String, String> {
    SymbolServers::check(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}
