//! Profiles as files: `DIRECTORY/SERVICE/TIME.pb.gz`, and one line each in `DIRECTORY/index.jsonl`.
//!
//! A file appears whole or not at all, and those of a window together, up to 64 of them: a disk
//! that is busy with other things is waited for at once, not one after the other. The oldest go
//! when there are too many, they are too large together or too old, or the file system has too
//! little room left. The directory's names tell all that the index does, so the index is made anew
//! from them at the start, and whenever it could not be written.

use super::age::{self, Now};
use super::file;
use super::lock::{self, Lock};
use super::{FinishedProfile, Sink, SinkError};
use crate::quantity::{ByteSize, HumanDuration};
use perfusion_model::clock::{self, Utc};
use rustix::fs::{CWD, Mode, OFlags, openat};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs::{self, DirEntry};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

const INDEX: &str = "index.jsonl";
const SUFFIX: &str = ".pb.gz";
/// Profiles as files, one directory per service. Whatever limit is met first, the oldest files go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Files {
    /// Where; absent: no files are written.
    pub directory: Option<PathBuf>,
    /// Most bytes of all files.
    pub max_size: ByteSize,
    /// Oldest file.
    pub max_age: HumanDuration,
    /// Most files.
    pub max_count: usize,
    /// Free space of the file system below which nothing is written.
    pub keep_free: ByteSize,
}

impl Default for Files {
    fn default() -> Self {
        Self {
            directory: None,
            max_size: ByteSize(2 << 30),
            max_age: HumanDuration(Duration::from_secs(7 * 86_400)),
            max_count: 100_000,
            keep_free: ByteSize(1 << 30),
        }
    }
}

/// The index is written anew when so many of its lines, and a quarter of all, are of files that are
/// gone.
const STALE_LINES: usize = 256;
/// A directory's name takes 255 bytes at most (NAME_MAX); longer ones are cut and get a hash.
const NAME_BYTES: usize = 200;

/// So many of them are waited for at once: what the disk does for one it has done for others by
/// then (each flushes all that was written before).
const WAITED_FOR: usize = 8;
/// So many files wait for the end of their window at most: each takes two descriptors.
const MOST_STAGED: usize = 64;

/// One file: when its window began in milliseconds since 1970, and which of those of that moment it
/// is.
type ProfileFileKey = (u64, Arc<str>, u32);

/// A line of the index.
#[derive(Serialize)]
struct IndexLine<'a> {
    start: String,
    service: &'a str,
    file: String,
    bytes: u64,
}

/// One that does not have its name yet.
struct StagedProfile<F = file::Staged> {
    key: ProfileFileKey,
    bytes: u64,
    file: F,
}

/// How much is known of what was there before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListingState {
    /// Nobody has looked.
    Nothing,
    /// Some of it could not be listed: until the next look it is nobody's to keep within limits.
    Part,
    All,
}

/// The files of one directory.
pub struct ProfileDirectory {
    /// Held, not looked at.
    lock: Arc<Lock>,
    options: Files,
    root: PathBuf,
    name: String,
    known: ListingState,
    /// By time; the second part of the key is the service's directory.
    files: BTreeMap<ProfileFileKey, u64>,
    bytes: u64,
    /// Of the window that is being written.
    staged: Vec<StagedProfile>,
    /// Directory names of services, as long as they have files.
    names: HashMap<Arc<str>, usize>,
    /// When the window began that was last written.
    last: Option<u64>,
    stale_lines: usize,
    /// It lacks lines or has half ones: nothing is appended until it is written anew.
    index_broken: bool,
    written: u64,
    written_bytes: u64,
    failed: u64,
    no_room: u64,
    evicted: u64,
}

impl ProfileDirectory {
    /// Takes up the directory, made if it is not there. What is in it is listed with the first
    /// profile or window: until then the sink whose place this one takes may still be at work
    /// there, and its files would be in nobody's list.
    ///
    /// # Errors
    /// When it cannot be made or read, or is another process's.
    pub fn open(root: &Path, options: &Files) -> Result<Self, SinkError> {
        let lock = make(root)?;
        Ok(Self {
            lock,
            options: options.clone(),
            root: root.to_owned(),
            name: format!("files {}", root.display()),
            known: ListingState::Nothing,
            files: BTreeMap::new(),
            bytes: 0,
            staged: Vec::new(),
            names: HashMap::new(),
            last: None,
            stale_lines: 0,
            index_broken: false,
            written: 0,
            written_bytes: 0,
            failed: 0,
            no_room: 0,
            evicted: 0,
        })
    }

    /// True when somebody has removed the directory, or put another in its place: then what locked
    /// it is not there any more.
    fn is_gone(&self) -> bool {
        let there = fs::symlink_metadata(self.root.join(lock::NAME));
        match there {
            Ok(there) => !self.lock.is_file(&there),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Somebody has removed the directory, or its lock: it is made anew, and what was known of it
    /// is forgotten.
    fn make_again(&mut self) -> Result<(), file::FileError> {
        drop(std::mem::replace(&mut self.lock, make(&self.root)?));
        tracing::warn!(path = %self.root.display(), "the directory of profiles was gone or is \
             another one: it is made, locked and listed anew");
        self.forget();
        self.known = ListingState::Nothing;
        Ok(())
    }

    fn forget(&mut self) {
        self.files.clear();
        self.names.clear();
        self.bytes = 0;
    }

    /// Looks at what is there, if not all of it is known. What cannot be listed is in the way of
    /// nothing else.
    fn list(&mut self) {
        if self.known == ListingState::All {
            return;
        }
        self.known = ListingState::Part;
        let found = fs::read_dir(&self.root).map_err(listing(&self.root));
        match found.and_then(|found| self.take_up(found)) {
            Ok(()) => {
                self.known = ListingState::All;
                self.renew_index();
            }
            Err(error) => {
                tracing::warn!(%error, "not all profiles there are known: some may stay longer \
                     than they should; it is tried again");
            }
        }
    }

    /// Takes up what is in the root, as it is found there; what was known of it is forgotten.
    fn take_up(
        &mut self,
        found: impl Iterator<Item = io::Result<DirEntry>>,
    ) -> Result<(), file::FileError> {
        self.forget();
        let mut all = Ok(());
        for entry in found {
            all = all.and(
                entry.map_err(listing(&self.root)).and_then(|entry| self.take_up_entry(&entry)),
            );
        }
        file::sweep(&self.root);
        all
    }

    /// Takes up a service's files. What can be no service's is somebody else's, such as
    /// `lost+found`.
    fn take_up_entry(&mut self, entry: &DirEntry) -> Result<(), file::FileError> {
        let path = entry.path();
        let Some(service) =
            entry.file_name().to_str().filter(|name| is_encoded(name)).map(Arc::from)
        else {
            return Ok(());
        };
        if !entry.file_type().map_err(listing(&path))?.is_dir() {
            return Ok(());
        }
        file::sweep(&path);
        let found = match fs::read_dir(&path) {
            // Gone since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found.map_err(listing(&path))?,
        };
        for entry in found {
            let entry = entry.map_err(listing(&path))?;
            let Some((start, number)) = entry.file_name().to_str().and_then(parse_name) else {
                continue;
            };
            match entry.metadata() {
                Ok(status) if status.is_file() => {
                    self.note((start, Arc::clone(&service), number), status.len());
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(listing(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn note(&mut self, (start, service, number): ProfileFileKey, bytes: u64) {
        // All files of a service share one name: one each, made between all that a window makes and
        // frees, would hold a page of that each.
        let known = self.names.get_key_value(&service).map(|(name, _)| Arc::clone(name));
        let service = known.unwrap_or(service);
        *self.names.entry(Arc::clone(&service)).or_default() += 1;
        self.bytes += bytes;
        self.files.insert((start, service, number), bytes);
    }

    /// What goes first to make room: what the clock says is still to come, then the oldest, and the
    /// last window's only when nothing else is left.
    fn first(&self, now: SystemTime) -> Option<ProfileFileKey> {
        let is_last = |key: &&ProfileFileKey| self.last == Some(key.0);
        // Of a clock that was wrong, and is right again.
        let to_come = moment(now).saturating_add(millis(age::JUMP));
        let future = self.files.keys().next_back().filter(|key| key.0 > to_come && !is_last(key));
        let older = || self.files.keys().find(|key| !is_last(key));
        future.or_else(older).or_else(|| self.files.keys().next()).cloned()
    }

    /// Removes a file; false when it cannot be removed.
    fn evict(&mut self, key: &ProfileFileKey) -> bool {
        let path = self.root.join(&*key.1).join(file_name(key.0, key.2));
        // Whoever removed it before us did the same.
        if let Err(error) = file::remove(&path) {
            tracing::warn!(path = %path.display(), %error, "the oldest profile cannot be removed, \
                 and stays");
            return false;
        }
        let Some((key, bytes)) = self.files.remove_entry(key) else { return false };
        self.bytes -= bytes;
        if let Some(left) = self.names.get_mut(&key.1) {
            *left -= 1;
            if *left == 0 {
                self.names.remove(&key.1);
                // It stays when somebody has put something else there.
                fs::remove_dir(self.root.join(&*key.1)).ok();
            }
        }
        self.stale_lines += 1;
        self.evicted += 1;
        true
    }

    /// The oldest go, until their files had so many bytes; false, and none goes, where that is more
    /// than all of them have. By our own account: a file system may say much later what became
    /// free, or others may take it at once, and that is no reason to give all there is.
    fn make_room(&mut self, bytes: u64, now: SystemTime) -> bool {
        let Some(end) = self.bytes.checked_sub(bytes) else { return false };
        while self.bytes > end {
            if !self.first(now).is_some_and(|key| self.evict(&key)) {
                return false;
            }
        }
        true
    }

    fn keep_within_limits(&mut self, now: Now) {
        let oldest = if now.tells_age { moment(now.wall) } else { 0 };
        let oldest = oldest.saturating_sub(millis(self.options.max_age.0));
        loop {
            let full =
                self.bytes > self.options.max_size.0 || self.files.len() > self.options.max_count;
            let too_old = self.files.keys().next().filter(|key| key.0 < oldest).cloned();
            let goes = too_old.or_else(|| if full { self.first(now.wall) } else { None });
            if !goes.is_some_and(|key| self.evict(&key)) {
                break;
            }
        }
        if self.index_broken || self.stale_lines > STALE_LINES.max(self.files.len() / 4) {
            self.renew_index();
        }
    }

    /// No profile is lost when it fails.
    fn renew_index(&mut self) {
        // It would lack what is not known.
        if self.known != ListingState::All {
            return;
        }
        let was_broken = self.index_broken;
        match self.write_index() {
            Ok(()) if was_broken => tracing::info!("the index of profiles is complete again"),
            Ok(()) => {}
            Err(error) => {
                self.index_broken = true;
                tracing::warn!(%error, "the index of profiles is out of date; it is tried again");
            }
        }
    }

    fn line(&self, key: &ProfileFileKey, bytes: u64) -> Vec<u8> {
        let (start, service, number) = key;
        let line = IndexLine {
            start: Utc::of(Duration::from_millis(*start)).iso(),
            service: &decode(service),
            file: format!("{service}/{}", file_name(*start, *number)),
            bytes,
        };
        // Such a line cannot fail to be JSON.
        let mut text = serde_json::to_vec(&line).unwrap_or_default();
        text.push(b'\n');
        text
    }

    fn write_index(&mut self) -> Result<(), SinkError> {
        let text: Vec<u8> =
            self.files.iter().flat_map(|(key, bytes)| self.line(key, *bytes)).collect();
        file::write(&self.root.join(INDEX), &text)?;
        self.stale_lines = 0;
        self.index_broken = false;
        Ok(())
    }

    fn write(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
        // Once, so that no file takes the place of one that is there.
        if self.known == ListingState::Nothing {
            self.list();
        }
        let packed = finished.profile.bytes();
        let length = u64::try_from(packed.len()).unwrap_or(u64::MAX);
        let failed = |step, path: &Path| {
            let path = path.to_owned();
            move |source| file::FileError { path, step, source }
        };
        let lacks = file::shortfall(&self.root, length, self.options.keep_free.0)
            .map_err(failed("look for free space", &self.root))?;
        if !self.make_room(lacks, SystemTime::now()) {
            self.no_room += 1;
            let found = format!(
                "the file system has less free space than files.keep_free: {lacks} bytes less than \
                 it should, and all profiles here are {}",
                self.bytes
            );
            return Err(SinkError::Refused { reason: found });
        }
        let service: Arc<str> = encode(&finished.service).into();
        let directory = self.root.join(&*service);
        let start = moment(finished.start);
        let mut key = (start, service, 0);
        while self.files.contains_key(&key) || self.staged.iter().any(|new| new.key == key) {
            key.2 += 1;
        }
        let name = file_name(key.0, key.2);
        let stage = || {
            file::make_directory(&directory)?;
            file::stage(&directory, &name, packed)
        };
        let file = match stage() {
            // Others fill the disk, too, or it has no more inodes. As much as this one takes is
            // given for it, and no more if that does not help.
            Err(error)
                if error.source.kind() == io::ErrorKind::StorageFull
                    && self.make_room(length.max(1), SystemTime::now()) =>
            {
                stage()?
            }
            staged => staged?,
        };
        self.staged.push(StagedProfile { key, bytes: length, file });
        if self.staged.len() >= MOST_STAGED {
            self.publish();
        }
        Ok(())
    }

    /// Gives the files of this window their names.
    fn publish(&mut self) {
        let mut lines = Vec::new();
        for (StagedProfile { key, bytes, .. }, published) in
            published(std::mem::take(&mut self.staged))
        {
            if let Err(error) = published {
                self.failed += 1;
                tracing::error!(sink = self.name, %error, "a profile is lost");
                continue;
            }
            lines.extend(self.line(&key, bytes));
            self.last = Some(key.0);
            self.note(key, bytes);
            self.written += 1;
            self.written_bytes += bytes;
        }
        if !lines.is_empty()
            && !self.index_broken
            && let Err(error) = self.append(&lines)
        {
            // The files are there.
            self.index_broken = true;
            tracing::warn!(%error, "the index of profiles is out of date; it is written anew after \
                 this window");
        }
    }

    fn append(&self, lines: &[u8]) -> Result<(), file::FileError> {
        let path = self.root.join(INDEX);
        // Who may write here leads nobody elsewhere by a link.
        let flags =
            OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(CWD, &path, flags, Mode::from_raw_mode(0o644)).map(fs::File::from);
        opened
            .map_err(io::Error::from)
            .and_then(|mut index| index.write_all(lines))
            .map_err(|source| file::FileError { path, step: "append", source })
    }
}

impl Sink for ProfileDirectory {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> &Path {
        &self.root
    }

    fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
        let written = match self.is_gone() {
            true => self.make_again().map_err(SinkError::from).and_then(|()| self.write(finished)),
            false => self.write(finished),
        };
        self.failed += u64::from(written.is_err());
        written
    }

    fn window_over(&mut self) {
        self.publish();
        self.list();
        self.keep_within_limits(Now::read());
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("files_written", self.written),
            ("files_written_bytes", self.written_bytes),
            ("files_failed", self.failed),
            ("files_no_room", self.no_room),
            ("files_evicted", self.evicted),
        ]
    }
}

/// Gives files their names, in any order, and says what came of it, in theirs.
fn published(files: Vec<StagedProfile>) -> Vec<(StagedProfile<()>, Result<(), file::FileError>)> {
    let waiters = files.len().min(WAITED_FOR);
    let (work, done) = (Mutex::new(files.into_iter()), Mutex::new(Vec::new()));
    let wait = || {
        loop {
            let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(StagedProfile { key, bytes, file }) = next else { break };
            let published = file.publish();
            let done = &mut *done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push((StagedProfile { key, bytes, file: () }, published));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..waiters {
            // Where there can be no thread it takes longer.
            std::thread::Builder::new().name("sync".into()).spawn_scoped(scope, wait).ok();
        }
        wait();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by(|(a, _), (b, _)| a.key.cmp(&b.key));
    done
}

/// Makes the directory, if it is not there, and takes its lock.
fn make(root: &Path) -> Result<Arc<Lock>, file::FileError> {
    file::make_directory(root)?;
    fs::read_dir(root).map_err(listing(root))?;
    lock::hold(root)
}

/// What stood in the way of a look at a directory.
fn listing(path: &Path) -> impl Fn(io::Error) -> file::FileError + use<> {
    let path = path.to_owned();
    move |source| file::FileError { path: path.clone(), step: "read the directory", source }
}

/// As files are named by it: milliseconds since 1970.
pub(super) fn moment(time: SystemTime) -> u64 {
    millis(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// `20261121T213700.000Z.pb.gz`; `-1` and so on before the suffix for further ones of the same
/// moment.
pub(super) fn file_name(start: u64, number: u32) -> String {
    let time = Utc::of(Duration::from_millis(start)).compact();
    if number == 0 { format!("{time}{SUFFIX}") } else { format!("{time}-{number}{SUFFIX}") }
}

fn parse_name(name: &str) -> Option<(u64, u32)> {
    let name = name.strip_suffix(SUFFIX)?;
    let (time, number) = match name.split_once('-') {
        Some((time, number)) => (time, number.parse().ok()?),
        None => (name, 0),
    };
    let start = millis(clock::parse_compact(time)?);
    (file_name(start, number) == format!("{name}{SUFFIX}")).then_some((start, number))
}

/// A service's name as a directory's: letters, digits, `-`, `_` and inner dots stay, all else
/// becomes `%` and two digits. So does the first letter of the index's own name.
pub(super) fn encode(service: &str) -> String {
    let mut name = String::new();
    for (at, byte) in service.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || b"-_".contains(&byte) || byte == b'.' && at > 0;
        if plain && (at > 0 || service != INDEX) {
            name.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            write!(name, "%{byte:02X}").ok();
        }
    }
    if name.len() <= NAME_BYTES && !name.is_empty() {
        return name;
    }
    // FNV-1a: the same in every run.
    let hash = service.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    name.truncate(NAME_BYTES);
    format!("{name}%~{hash:016x}")
}

/// True for what [`encode`] may make of a service's name.
fn is_encoded(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.%~".contains(&byte);
    !name.starts_with('.') && name.bytes().all(plain)
}

fn decode(directory: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = directory.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.filter(|_| first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok())
        {
            Some(byte) => {
                bytes.push(byte);
                rest = after.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::{ByteSize, HumanDuration};
    use perfusion_pprof::proto::Profile;
    use proptest::prelude::{prop_assert, prop_assert_eq, proptest};

    fn options(max_count: usize, keep_free: u64) -> Files {
        Files { max_count, keep_free: ByteSize(keep_free), ..Files::default() }
    }

    fn finished(service: &str, minute: u64) -> FinishedProfile {
        // Of today, so that its age is no reason to remove it.
        let today = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        FinishedProfile {
            service: service.into(),
            labels: BTreeMap::new(),
            start: SystemTime::UNIX_EPOCH
                + Duration::from_secs(today - today % 60 - 600 + 60 * minute),
            duration: Duration::from_secs(60),
            profile: Profile { string_table: vec![String::new()], ..Profile::default() }.into(),
        }
    }

    /// As a window of its own, but for what follows one.
    fn put(directory: &mut ProfileDirectory, finished: &FinishedProfile) {
        directory.put(finished).unwrap();
        directory.publish();
    }

    fn lines(root: &Path) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(root.join(INDEX)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn files_and_index_agree_and_a_restart_finds_both() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        for minute in 0..3 {
            for service in ["web", "../../etc/passwd"] {
                put(&mut directory, &finished(service, minute));
            }
        }
        put(&mut directory, &finished("web", 0));
        drop(directory);
        fs::write(root.path().join("web/.perfusion-0123456789abcdef.tmp"), "half").unwrap();
        let before = lines(root.path());
        let mut again = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        again.window_over();
        assert_eq!((again.files.len(), before.len(), lines(root.path()).len()), (7, 7, 7));
        for line in lines(root.path()) {
            let file = root.path().join(line["file"].as_str().unwrap());
            assert_eq!(fs::metadata(file).unwrap().len(), line["bytes"].as_u64().unwrap());
            assert!(["web", "../../etc/passwd"].contains(&line["service"].as_str().unwrap()));
        }
        assert_eq!(fs::read_dir(root.path().join("web")).unwrap().count(), 4);
    }

    #[test]
    fn the_files_of_a_window_appear_together_and_not_more_wait_than_have_descriptors() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(1000, 0)).unwrap();
        let there = || {
            fs::read_dir(root.path().join("a"))
                .unwrap()
                .flatten()
                .filter(|file| parse_name(file.file_name().to_str().unwrap()).is_some())
                .count()
        };
        for _ in 1..MOST_STAGED {
            directory.put(&finished("a", 0)).unwrap();
        }
        assert_eq!((there(), lines(root.path()).len(), directory.written), (0, 0, 0));
        directory.put(&finished("a", 0)).unwrap();
        directory.put(&finished("a", 0)).unwrap();
        assert_eq!((there(), lines(root.path()).len()), (MOST_STAGED, MOST_STAGED));
        directory.window_over();
        assert_eq!(
            (there(), lines(root.path()).len(), directory.files.len()),
            (MOST_STAGED + 1, MOST_STAGED + 1, MOST_STAGED + 1)
        );
        // Somebody takes the service away while its window is written.
        directory.put(&finished("a", 1)).unwrap();
        fs::remove_dir_all(root.path().join("a")).unwrap();
        directory.put(&finished("b", 1)).unwrap();
        directory.window_over();
        assert_eq!(
            (directory.failed, lines(root.path()).last().unwrap()["service"].as_str()),
            (1, Some("b"))
        );
    }

    #[test]
    fn the_oldest_go_first_and_an_empty_service_with_its_last() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(2, 0)).unwrap();
        put(&mut directory, &finished("old", 0));
        put(&mut directory, &finished("new", 1));
        put(&mut directory, &finished("new", 2));
        directory.window_over();
        assert!(!root.path().join("old").exists());
        assert_eq!(directory.files.len(), 2);
        directory.options.max_age = HumanDuration(Duration::from_millis(1));
        directory.window_over();
        assert_eq!((directory.files.len(), directory.bytes, directory.names.len()), (0, 0, 0));
        assert_eq!(directory.counters()[4], ("files_evicted", 3));
    }

    #[test]
    fn files_of_a_clock_that_was_ahead_go_before_those_of_now() {
        let root = tempfile::tempdir().unwrap();
        let year = 366 * 24 * 60;
        let mut directory = ProfileDirectory::open(root.path(), &options(5, 0)).unwrap();
        (0..5).for_each(|minute| put(&mut directory, &finished("ahead", 14 * year + minute)));
        directory.window_over();
        let mut directory = ProfileDirectory::open(root.path(), &options(5, 0)).unwrap();
        for minute in 0..3 {
            put(&mut directory, &finished("now", minute));
            directory.window_over();
            assert_eq!(
                directory.files.keys().filter(|key| &*key.1 == "now").count() as u64,
                minute + 1
            );
        }
        assert_eq!(directory.files.len(), 5);
        // A little ahead: what was just written stays.
        let mut directory = ProfileDirectory::open(root.path(), &options(1, 0)).unwrap();
        put(&mut directory, &finished("soon", 15));
        directory.window_over();
        put(&mut directory, &finished("now", 9));
        directory.window_over();
        assert!(directory.files.keys().all(|key| &*key.1 == "now"));
    }

    #[test]
    fn without_free_space_nothing_is_written_and_what_would_not_make_it_stays() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(10, 0)).unwrap();
        put(&mut directory, &finished("a", 0));
        directory.options.keep_free = ByteSize(1 << 52);
        let error = directory.put(&finished("a", 1)).unwrap_err().to_string();
        assert!(error.contains("files.keep_free"), "{error}");
        assert_eq!((directory.files.len(), directory.no_room, directory.evicted), (1, 1, 0));
        directory.options.keep_free = ByteSize(0);
        put(&mut directory, &finished("a", 2));
    }

    #[test]
    fn while_the_clock_tells_no_ages_only_bounds_of_size_and_number_hold() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(2, 0)).unwrap();
        (0..3).for_each(|minute| put(&mut directory, &finished("a", minute)));
        let wall = SystemTime::now() + Duration::from_secs(366 * 86_400);
        directory.keep_within_limits(Now { wall, tells_age: false });
        assert_eq!(directory.files.len(), 2);
        directory.keep_within_limits(Now { wall, tells_age: true });
        assert_eq!(directory.files.len(), 0);
    }

    #[test]
    fn older_files_make_as_much_room_as_lacks_and_no_more() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(10, 0)).unwrap();
        (0..4).for_each(|minute| put(&mut directory, &finished("a", minute)));
        let (now, each) = (SystemTime::now(), directory.bytes / 4);
        assert!(directory.make_room(0, now) && !directory.make_room(4 * each + 1, now));
        assert_eq!(directory.files.len(), 4);
        assert!(directory.make_room(each + 1, now));
        assert_eq!((directory.bytes, directory.evicted), (2 * each, 2));
        assert_eq!(
            directory.files.keys().map(|key| key.0).max(),
            directory.last,
            "the newest stay"
        );
    }

    #[test]
    fn the_index_is_written_anew_when_much_of_it_is_stale() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(1, 0)).unwrap();
        for minute in 0..300 {
            put(&mut directory, &finished("a", minute));
            directory.window_over();
        }
        assert!(lines(root.path()).len() < 100, "{}", lines(root.path()).len());
    }

    #[test]
    fn what_was_written_until_another_takes_over_is_in_its_list() {
        let root = tempfile::tempdir().unwrap();
        let mut old = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        put(&mut old, &finished("a", 0));
        let mut new = ProfileDirectory::open(root.path(), &options(2, 0)).unwrap();
        put(&mut old, &finished("b", 1));
        old.window_over();
        drop(old);
        put(&mut new, &finished("a", 2));
        assert_eq!((new.files.len(), lines(root.path()).len()), (3, 3));
        new.window_over();
        assert_eq!(new.files.len(), 2);
    }

    #[test]
    fn what_cannot_be_listed_is_looked_for_again_and_in_nobodys_way() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        for service in ["a", "b"] {
            (0..2).for_each(|minute| put(&mut directory, &finished(service, minute)));
        }
        fs::create_dir(root.path().join("lost+found")).unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(3, 0)).unwrap();
        // The disk fails on the last one.
        let (whole, broken) = (fs::read_dir(root.path()).unwrap(), Err(io::Error::other("broken")));
        let found =
            whole.filter(|entry| entry.as_ref().unwrap().file_name() != "b").chain([broken]);
        let error = directory.take_up(found).unwrap_err().to_string();
        assert!(
            error.contains("broken") && error.contains(root.path().to_str().unwrap()),
            "{error}"
        );
        directory.known = ListingState::Part;
        assert_eq!(directory.files.len(), 2, "what could be listed is known");
        directory.keep_within_limits(Now { wall: SystemTime::now(), tells_age: true });
        put(&mut directory, &finished("a", 2));
        assert_eq!(
            (directory.files.len(), lines(root.path()).len()),
            (3, 5),
            "no line is lost meanwhile"
        );
        directory.window_over();
        assert_eq!((directory.known, directory.files.len()), (ListingState::All, 3));
        assert!(root.path().join("lost+found").exists());
    }

    #[test]
    fn a_directory_that_somebody_removes_is_made_again_and_no_profile_is_lost() {
        let outside = tempfile::tempdir().unwrap();
        let root = outside.path().join("profiles");
        let mut directory = ProfileDirectory::open(&root, &options(100, 0)).unwrap();
        put(&mut directory, &finished("a", 0));
        fs::remove_dir_all(&root).unwrap();
        directory.window_over();
        put(&mut directory, &finished("a", 1));
        directory.window_over();
        assert_eq!((directory.files.len(), lines(&root).len(), directory.failed), (1, 1, 0));
        assert!(root.join(lock::NAME).exists(), "others are kept out again");
    }

    #[test]
    fn another_directory_in_its_place_is_locked_and_listed_anew() {
        let outside = tempfile::tempdir().unwrap();
        let (root, other) = (outside.path().join("profiles"), outside.path().join("other"));
        let mut directory = ProfileDirectory::open(&root, &options(2, 0)).unwrap();
        (0..2).for_each(|minute| put(&mut directory, &finished("a", minute)));
        fs::rename(&root, &other).and_then(|()| fs::create_dir(&root)).unwrap();
        put(&mut directory, &finished("a", 2));
        directory.window_over();
        assert_eq!((directory.files.len(), lines(&root).len(), directory.evicted), (1, 1, 0));
        assert!(root.join(lock::NAME).exists(), "others are kept out");
        assert_eq!(
            fs::read_dir(other.join("a")).unwrap().count(),
            2,
            "what was there is nobody's to remove"
        );
    }

    #[test]
    fn links_of_others_lead_nowhere() {
        use std::os::unix::fs::symlink;
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut directory = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        put(&mut directory, &finished("a", 0));
        symlink(elsewhere.path(), root.path().join("b")).unwrap();
        assert!(directory.put(&finished("b", 0)).is_err());
        fs::remove_file(root.path().join(INDEX)).unwrap();
        symlink(elsewhere.path().join("made"), root.path().join(INDEX)).unwrap();
        put(&mut directory, &finished("a", 1));
        directory.window_over();
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
        assert_eq!(lines(root.path()).len(), 2, "the index is a file again");
    }

    #[test]
    fn what_cannot_be_removed_is_not_forgotten() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(1, 0)).unwrap();
        put(&mut directory, &finished("a", 0));
        let file = root.path().join(lines(root.path())[0]["file"].as_str().unwrap());
        // Nobody removes a directory as a file, root neither.
        fs::remove_file(&file).and_then(|()| fs::create_dir(&file)).unwrap();
        put(&mut directory, &finished("a", 1));
        directory.window_over();
        assert_eq!((directory.files.len(), directory.evicted), (2, 0));
        fs::remove_dir(&file).unwrap();
        directory.window_over();
        assert_eq!((directory.files.len(), directory.evicted), (1, 1));
    }

    #[test]
    fn an_index_that_cannot_be_written_loses_no_profile_and_is_made_good() {
        let root = tempfile::tempdir().unwrap();
        let index = root.path().join(INDEX);
        let mut directory = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        put(&mut directory, &finished("a", 0));
        fs::remove_file(&index).and_then(|()| fs::create_dir(&index)).unwrap();
        put(&mut directory, &finished("a", 1));
        directory.window_over();
        assert_eq!((directory.written, directory.failed), (2, 0));
        // Half a line, and nobody appends to it.
        fs::remove_dir(&index).and_then(|()| fs::write(&index, "{\"start\":")).unwrap();
        put(&mut directory, &finished("a", 2));
        directory.window_over();
        put(&mut directory, &finished("a", 3));
        assert_eq!((lines(root.path()).len(), directory.failed), (4, 0));
    }

    #[test]
    fn no_service_takes_the_name_of_what_is_beside_the_services() {
        let root = tempfile::tempdir().unwrap();
        let mut directory = ProfileDirectory::open(root.path(), &options(100, 0)).unwrap();
        for service in [INDEX, lock::NAME] {
            assert_eq!(decode(&encode(service)), service);
            put(&mut directory, &finished(service, 0));
        }
        directory.window_over();
        let listed: Vec<_> =
            lines(root.path()).iter().map(|line| line["service"].clone()).collect();
        assert_eq!((listed.len(), directory.index_broken), (2, false));
        assert!(
            listed.contains(&INDEX.into()) && listed.contains(&lock::NAME.into()),
            "{listed:?}"
        );
    }

    proptest! {
        #[test]
        fn any_service_has_a_directory_of_its_own_that_tells_its_name(
            name in "\\PC{1,80}",
            other in "\\PC{1,80}",
        ) {
            let directory = encode(&name);
            prop_assert!(is_encoded(&directory) && directory.len() <= 255);
            prop_assert!(!directory.contains('/') && !directory.starts_with('.'));
            prop_assert!(name == other || directory != encode(&other));
            if !directory.contains('~') {
                prop_assert_eq!(decode(&directory), name);
            }
        }

        #[test]
        fn file_names_are_read_back(start in 0u64..4_000_000_000_000, number in 0u32..100) {
            prop_assert_eq!(parse_name(&file_name(start, number)), Some((start, number)));
        }
    }
}
