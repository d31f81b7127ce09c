//! Which CPUs there are, as /sys lists them.

use std::io;

/// The CPUs cannot be listed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct CpusError {
    /// The file.
    pub path: &'static str,
    /// Why.
    pub source: io::Error,
}

/// Numbers of the CPUs at work.
///
/// # Errors
/// When the file cannot be read or is no list.
pub fn online() -> Result<Vec<u32>, CpusError> {
    list("/sys/devices/system/cpu/online")
}

/// CPUs there can be: one more than the last one's number.
///
/// # Errors
/// As [`online`].
pub fn possible() -> Result<u32, CpusError> {
    Ok(list("/sys/devices/system/cpu/possible")?.iter().max().map_or(1, |last| last + 1))
}

/// A list such as `0-3,7` in a file of /sys.
fn list(path: &'static str) -> Result<Vec<u32>, CpusError> {
    let failed = |source| CpusError { path, source };
    let text = std::fs::read_to_string(path).map_err(failed)?;
    cpu_list(&text).ok_or_else(|| {
        failed(io::Error::other(format!("expected a list such as 0-3,7, found {text:?}")))
    })
}

fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        // No kernel has more than 8192 CPUs (CONFIG_NR_CPUS).
        if first > last || last >= 8192 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::cpu_list;

    #[test]
    fn cpu_lists() {
        assert_eq!(cpu_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("3"), Some(vec![3]));
        for bad in ["", "a", "3-1", "0-99999999"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }
}
