//! A directory of debug files by build id, as gdb and perf read it, too: `.build-id/xx/rest.debug`.

use perfusion_host::locked_files;
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_symbolize::separate;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Begins the name of a file that is being written.
const PARTIAL: &str = ".partial-";
/// Such a file of a process that was killed is removed after this.
const ABANDONED: Duration = Duration::from_secs(3600);
/// Most entries of directories that are looked at.
const MAX_ENTRIES: usize = 100_000;

/// Why the directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// It cannot be made, read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// It, or what is in it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Somebody else could put files there.
    #[error(
        "{}: others may write there; symbols are kept only where nobody else can",
        path.display()
    )]
    Shared {
        /// The directory.
        path: PathBuf,
    },
}

/// The directory.
#[derive(Clone, Debug)]
pub struct SymbolCache {
    directory: PathBuf,
    most_bytes: u64,
}

/// A file that is being written; removed unless it is kept.
#[derive(Debug)]
pub(super) struct PartialFile {
    path: PathBuf,
    file: File,
}

impl PartialFile {
    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // One that was kept has another name by now.
        fs::remove_file(&self.path).ok();
    }
}

impl SymbolCache {
    /// Takes a directory that is this user's alone, made if need be, for so many bytes.
    ///
    /// # Errors
    /// When it cannot be made, or others may write there.
    pub fn open(directory: &Path, most_bytes: u64) -> Result<Self, CacheError> {
        let cache = Self { directory: directory.to_owned(), most_bytes };
        cache.make(directory)?;
        let meta = fs::metadata(directory).map_err(|source| cache.failed(directory, source))?;
        let own = rustix::process::geteuid().as_raw();
        if !meta.is_dir() || meta.uid() != own && meta.uid() != 0 || meta.mode() & 0o022 != 0 {
            return Err(CacheError::Shared { path: directory.to_owned() });
        }
        cache.sweep();
        Ok(cache)
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn failed(&self, path: &Path, source: io::Error) -> CacheError {
        CacheError::Io { path: path.to_owned(), source }
    }

    fn make(&self, path: &Path) -> Result<(), CacheError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.map_err(|source| self.failed(path, source))
    }

    /// Where the file of a build is, or will be.
    #[must_use]
    pub fn path(&self, build_id: &[u8]) -> Option<PathBuf> {
        Some(self.directory.join(separate::build_id_path(build_id)?))
    }

    /// Begins a file.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn begin(&self) -> Result<PartialFile, CacheError> {
        let random = locked_files::random()
            .map_err(|error| self.failed(&self.directory, io::Error::from(error)))?;
        let path = self.directory.join(format!("{PARTIAL}{random:016x}"));
        let options = File::options().read(true).write(true).create_new(true).mode(0o600).clone();
        let file = options.open(&path).map_err(|source| self.failed(&path, source))?;
        Ok(PartialFile { path, file })
    }

    /// Keeps a file as that of a build, if it is; then the oldest others go as far as they must.
    ///
    /// # Errors
    /// Why it is not that file, in words, or why it cannot be kept.
    pub(super) fn keep(
        &self,
        partial: PartialFile,
        build_id: &[u8],
    ) -> Result<Result<(), &'static str>, CacheError> {
        let copy = partial.file.try_clone().map_err(|e| self.failed(&partial.path, e))?;
        if let Err(wrong) = separate::check(&ForeignFile::own(copy), build_id) {
            return Ok(Err(wrong));
        }
        let Some(path) = self.path(build_id) else { return Ok(Err("it has no build id")) };
        self.make(path.parent().unwrap_or(&self.directory))?;
        fs::rename(&partial.path, &path).map_err(|source| self.failed(&path, source))?;
        self.trim(&path);
        Ok(Ok(()))
    }

    /// Removes the oldest files until the rest has few enough bytes; never `newest`.
    fn trim(&self, newest: &Path) {
        let folders = fs::read_dir(self.directory.join(".build-id")).into_iter().flatten();
        let files = folders
            .take(MAX_ENTRIES)
            .filter_map(|folder| fs::read_dir(folder.ok()?.path()).ok())
            .flatten()
            .take(MAX_ENTRIES);
        let mut files: Vec<(SystemTime, u64, PathBuf)> = files
            .filter_map(|file| {
                let file = file.ok()?;
                let meta: Metadata = file.metadata().ok().filter(Metadata::is_file)?;
                Some((meta.modified().ok()?, meta.len(), file.path()))
            })
            .collect();
        files.sort();
        let mut bytes: u64 = files.iter().map(|(_, length, _)| length).sum();
        for (_, length, path) in files.iter().filter(|(_, _, path)| path != newest) {
            if bytes <= self.most_bytes {
                break;
            }
            match fs::remove_file(path) {
                Ok(()) => bytes -= length,
                Err(error) => tracing::debug!(path = %path.display(), %error, "not removed"),
            }
        }
    }

    /// Removes what processes that were killed have left.
    fn sweep(&self) {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().take(MAX_ENTRIES);
        for entry in entries.filter_map(Result::ok) {
            let is_partial =
                entry.file_name().to_str().is_some_and(|name| name.starts_with(PARTIAL));
            let modified = entry.metadata().and_then(|meta| meta.modified()).ok();
            let is_old = modified
                .and_then(|modified| modified.elapsed().ok())
                .is_some_and(|age| age > ABANDONED);
            if is_partial && is_old {
                // Another process may do the same.
                fs::remove_file(entry.path()).ok();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CacheError, SymbolCache};
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_directory_that_others_can_write_into_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        SymbolCache::open(&path, 1).unwrap();
        assert_eq!(mode(&path), 0o700);
        for bits in [0o777, 0o770, 0o702] {
            fs::set_permissions(&path, fs::Permissions::from_mode(bits)).unwrap();
            let opened = SymbolCache::open(&path, 1);
            assert!(matches!(opened, Err(CacheError::Shared { .. })), "{bits:o}: {opened:?}");
        }
    }

    #[test]
    fn the_oldest_files_go_first_and_the_new_one_stays() {
        let folder = tempfile::tempdir().unwrap();
        let cache = SymbolCache::open(folder.path(), 250).unwrap();
        let paths: Vec<_> = (0..4_u8).map(|number| cache.path(&[number, 1]).unwrap()).collect();
        for (path, age) in paths.iter().zip([10, 30, 20, 40]) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, [0; 100]).unwrap();
            let time = SystemTime::now() - Duration::from_secs(age);
            fs::File::open(path).unwrap().set_modified(time).unwrap();
        }
        cache.trim(&paths[3]);
        let left: Vec<bool> = paths.iter().map(|path| path.exists()).collect();
        assert_eq!(left, [true, false, false, true]);
    }

    #[test]
    fn what_is_no_debug_file_of_the_build_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let cache = SymbolCache::open(folder.path(), 1 << 20).unwrap();
        let partial = cache.begin().unwrap();
        assert_eq!(cache.keep(partial, &[1; 20]).unwrap(), Err("it is no ELF file"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left of it");
    }
}
