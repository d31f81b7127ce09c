//! Spools of receivers that are configured no more, or have theirs elsewhere since
//! `spool.directory` was changed. What waits there is for nobody, but the receiver may come back (a
//! reload with a mistake in it), so it goes by its age, as it would with the receiver, and the
//! directory with the last of it.

use super::age::Now;
use super::spool::{Spool, SpoolLimits};
use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What spools' names begin with, see [`super::receiver::SpoolOptions::directory_of`].
const KINDS: [&str; 3] = ["otlp-", "pyroscope-", "s3-"];
/// How often they are looked at.
const EVERY: Duration = Duration::from_secs(600);

/// Those in the directory of spools, and in earlier ones.
#[derive(Debug, Default)]
pub struct Orphans {
    directories: BTreeSet<PathBuf>,
    age: Duration,
    /// Spools of configured receivers.
    in_use: Vec<PathBuf>,
    looked: Option<Instant>,
    said: HashSet<PathBuf>,
}

impl Orphans {
    /// Those in `directory` but `in_use`, of which nothing older than `age` is kept.
    #[must_use]
    pub fn of(directory: Option<PathBuf>, in_use: Vec<PathBuf>, age: Duration) -> Self {
        Self {
            directories: directory.into_iter().collect(),
            age,
            in_use,
            looked: None,
            said: HashSet::new(),
        }
    }

    /// Looks after what earlier ones looked after, too: a reload may have moved the directory, and
    /// what waits in the old one is in nobody's spool.
    #[must_use]
    pub fn after(mut self, earlier: Self) -> Self {
        self.directories.extend(earlier.directories);
        self.said = earlier.said;
        self
    }

    /// True when it is time to look for them.
    #[must_use]
    pub fn is_due(&self) -> bool {
        self.looked.is_none_or(|at| at.elapsed() >= EVERY)
    }

    /// Looks for them. No sink of an earlier configuration may be at work any more.
    pub fn look(&mut self) {
        self.looked = Some(Instant::now());
        self.expire(Now::read());
    }

    fn expire(&mut self, now: Now) {
        // Without a directory nothing waits.
        let entries = self.directories.iter().filter_map(|directory| fs::read_dir(directory).ok());
        for entry in entries.flatten().flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            let spool =
                name.to_str().is_some_and(|name| KINDS.iter().any(|kind| name.starts_with(kind)));
            if spool
                && !self.in_use.contains(&path)
                && entry.file_type().is_ok_and(|kind| kind.is_dir())
            {
                let first = self.said.insert(path.clone());
                expire(&path, self.age, now, first);
            }
        }
    }
}

fn expire(path: &Path, age: Duration, now: Now, first: bool) {
    let limits = SpoolLimits { bytes: u64::MAX, age, free_bytes: 0 };
    let mut spool = match Spool::open(path, limits) {
        Ok(spool) => spool,
        // Another daemon's, with receivers of its own.
        Err(error) => {
            return tracing::debug!(%error, "a spool that no receiver here has is left alone");
        }
    };
    spool.expire(now);
    let (expired, waiting) = (spool.lost().expired, spool.len());
    if spool.remove_if_empty() {
        tracing::info!(path = %path.display(), expired, "a spool that no receiver has any more is \
             removed");
    } else if first || expired > 0 {
        tracing::warn!(
            path = %path.display(),
            expired,
            waiting,
            "no receiver has this spool any more, or spool.directory is another now: what waits \
             goes by spool.max_age"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn what_waits_for_nobody_goes_by_its_age_and_its_directory_with_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let hour = Duration::from_secs(3600);
        let all = SpoolLimits { bytes: 1000, age: hour, free_bytes: 0 };
        for name in ["otlp-old", "otlp-new", "s3-x", "pyroscope-y", "somebody's"] {
            let mut spool = Spool::open(&at(name), all).unwrap();
            spool.put(made, b"early").unwrap();
            spool.put(made + hour, b"late").unwrap();
        }
        fs::write(at("pyroscope-y").join("somebody's"), "x").unwrap();
        std::os::unix::fs::symlink(at("somebody's"), at("otlp-link")).unwrap();
        let mut orphans = Orphans::of(
            Some(folder.path().to_owned()),
            vec![at("otlp-new"), at("otlp-away")],
            hour,
        );
        let waiting = |name: &str| Spool::open(&at(name), all).unwrap().len();
        orphans.expire(Now { wall: made + hour + Duration::from_secs(1), tells_age: true });
        assert_eq!(["otlp-old", "otlp-new", "s3-x", "somebody's"].map(waiting), [1, 2, 1, 2]);
        orphans.expire(Now { wall: made + 3 * hour, tells_age: true });
        assert!(!at("otlp-old").exists() && !at("s3-x").exists());
        assert_eq!(["otlp-new", "somebody's"].map(waiting), [2, 2]);
        assert!(at("pyroscope-y").join("somebody's").exists());
    }

    #[test]
    fn spools_of_an_earlier_directory_are_looked_after_too() {
        let (old, new) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let made = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let hour = Duration::from_secs(3600);
        let all = SpoolLimits { bytes: 1000, age: hour, free_bytes: 0 };
        for folder in [&old, &new] {
            Spool::open(&folder.path().join("otlp-a"), all).unwrap().put(made, b"waits").unwrap();
        }
        let of = |folder: &tempfile::TempDir| {
            Orphans::of(Some(folder.path().to_owned()), vec![folder.path().join("otlp-a")], hour)
        };
        // By way of a configuration without receivers.
        let mut orphans = of(&new).after(Orphans::default().after(of(&old)));
        orphans.expire(Now { wall: made + hour, tells_age: true });
        assert!(old.path().join("otlp-a").exists());
        orphans.expire(Now { wall: made + 2 * hour, tells_age: true });
        assert!(!old.path().join("otlp-a").exists());
        assert_eq!(Spool::open(&new.path().join("otlp-a"), all).unwrap().len(), 1);
    }
}
