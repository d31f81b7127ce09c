//! Symbols of native files that this host does not have: what servers are asked for by build id,
//! and where their answers are kept. A build id is all that a server is told.

mod cache;
mod servers;

pub use cache::{CacheError, SymbolCache};
pub use servers::{FetchLimits, FetchReport, SymbolServers, UnusableUrl};

use std::path::PathBuf;

/// Names servers for every tool that asks debuginfod, separated by spaces.
pub const VARIABLE: &str = "DEBUGINFOD_URLS";

/// The servers that the environment names.
#[must_use]
pub fn servers_of_environment() -> Vec<String> {
    let urls = std::env::var(VARIABLE).unwrap_or_default();
    urls.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Where root keeps what servers have sent.
pub const CACHE: &str = "/var/lib/perfusion/symbols";

/// Where this user keeps it.
#[must_use]
pub fn default_cache() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from(CACHE);
    }
    let of = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")));
    caches.unwrap_or_else(std::env::temp_dir).join("perfusion/symbols")
}

/// The build id of these hexadecimal digits.
#[must_use]
pub fn build_id(hex: &str) -> Option<Vec<u8>> {
    if hex.len() < 4 || hex.len() > 128 || !hex.len().is_multiple_of(2) {
        return None;
    }
    let digits = hex.bytes().map(|byte| char::from(byte).to_digit(16));
    let digits = digits.collect::<Option<Vec<u32>>>()?;
    let byte = |pair: &[u32]| u8::try_from(pair.iter().fold(0, |all, digit| all << 4 | digit)).ok();
    digits.chunks(2).map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::build_id;
    use perfusion_model::text::hex;

    #[test]
    fn build_ids_are_written_and_read_in_hexadecimal() {
        let id = [0x00, 0x9f, 0xab];
        assert_eq!(build_id(&hex(&id)).as_deref(), Some(&id[..]));
        for wrong in ["", "ab", "abc", "zz00", &"ab".repeat(65)] {
            assert_eq!(build_id(wrong), None, "{wrong}");
        }
    }
}
