//! A process's memory, mapping by mapping, as the kernel counts it: /proc/PID/smaps
//! (proc_pid_smaps(5)).

use std::fs;

use anyhow::{Context, Result};

/// One mapping. Page tables are not in it.
pub(super) struct SmapsEntry {
    /// Its first line, which ends with its path.
    pub(super) name: String,
    /// Bytes that are in memory.
    pub(super) rss: u64,
    /// Of those, bytes that belong to no file.
    anonymous: u64,
    /// The first, those that are mapped several times shared out among the mappings.
    pss: u64,
}

impl SmapsEntry {
    /// Bytes that belong to no file of a file system: not the kernel's to drop. What the runtime
    /// compiles it maps twice.
    pub(super) fn own(&self) -> u64 {
        if self.name.contains("/memfd:") { self.pss } else { self.anonymous }
    }
}

pub(super) fn mappings(pid: u32) -> Result<Vec<SmapsEntry>> {
    let path = format!("/proc/{pid}/smaps");
    parse(&fs::read_to_string(&path).with_context(|| path.clone())?).with_context(|| path)
}

fn parse(text: &str) -> Result<Vec<SmapsEntry>> {
    let mut all: Vec<SmapsEntry> = Vec::new();
    for line in text.lines() {
        // A mapping's first line is "from-to perms offset device inode path", the others are "Key:
        // value".
        let Some((key, value)) = line.split_once(": ") else {
            all.push(SmapsEntry { name: line.to_owned(), rss: 0, anonymous: 0, pss: 0 });
            continue;
        };
        let mapping = all.last_mut().context("no mapping before the first value")?;
        let place = match key {
            "Rss" => &mut mapping.rss,
            "Pss" => &mut mapping.pss,
            "Anonymous" => &mut mapping.anonymous,
            _ => continue,
        };
        let kibibytes = value.trim().trim_end_matches(" kB");
        *place = kibibytes.parse::<u64>().with_context(|| line.to_owned())? * 1024;
    }
    Ok(all)
}

/// Bytes in memory of those mappings that are wanted.
pub(super) fn rss(mappings: &[SmapsEntry], wanted: impl Fn(&str) -> bool) -> u64 {
    mappings.iter().filter(|mapping| wanted(&mapping.name)).map(|mapping| mapping.rss).sum()
}

#[cfg(test)]
mod tests {
    use super::{SmapsEntry, mappings, rss};

    #[test]
    fn what_this_process_writes_is_its_own_and_in_memory() {
        let sums = || {
            let all = mappings(std::process::id()).unwrap();
            (rss(&all, |_| true), all.iter().map(SmapsEntry::own).sum::<u64>())
        };
        let before = sums();
        let written = vec![1u8; 64 << 20];
        let after = sums();
        // Other tests may give memory back meanwhile.
        let least = u64::try_from(std::hint::black_box(written).len()).unwrap() / 2;
        assert!(after.0 > before.0 + least && after.1 > before.1 + least, "{before:?}, {after:?}");
        let all = mappings(std::process::id()).unwrap();
        assert!(rss(&all, |name| name.ends_with("[stack]")) > 0);
    }
}
