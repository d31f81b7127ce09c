//! What waits to be sent, in files of a directory: it survives the daemon, keeps its order, and has
//! an end. When it is full the oldest goes; whatever goes unsent is counted by its cause. Most of
//! it is gone again before a disk would have it, so the disk is not waited for: a machine that
//! fails may leave less of the newest than their names say, and those are not sent, and counted.
//! Times are handed in, so that a day's outage can be tested in a moment.

use super::age::Now;
use super::file::{self, FileError};
use super::lock::{self, Lock};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

const SUFFIX: &str = ".spooled";
/// Digits of a sequence number in a name: names in their order are numbers in theirs.
const DIGITS: usize = 20;
/// So often in a row one file may not be readable before it is given up.
const MOST_READS: u32 = 8;

/// How much may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpoolLimits {
    /// Of all files together.
    pub bytes: u64,
    /// An older one is worth nothing to its receiver.
    pub age: Duration,
    /// What must stay free on the file system.
    pub free_bytes: u64,
}

/// What went without being sent; each grows only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpoolLosses {
    /// To make room for newer ones.
    pub evicted: u64,
    /// Older than the limit.
    pub expired: u64,
    /// Longer than the spool, or the disk had no room or failed: they never waited.
    pub refused: u64,
    /// Somebody took the file away, or the disk does not give it back or never had it whole.
    pub gone: u64,
}

/// What a file holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ItemKind {
    /// A request as it is sent.
    #[default]
    Request,
    /// A window of which requests are to be made.
    Window,
}

/// One that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// What names it.
    pub sequence: u64,
    /// What it holds.
    pub kind: ItemKind,
    /// The [`group_of`] its service; 0 when that is not known.
    pub group: u64,
    /// When it was made, seconds since the epoch.
    pub at: u64,
    /// Bytes that were put.
    pub length: u64,
    /// Bytes that its file takes.
    pub bytes: u64,
}

/// Those that wait, by their sequence numbers: the oldest first.
pub type Items = BTreeMap<u64, Item>;

/// One that is being sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken {
    /// Which.
    pub item: Item,
    /// What was put.
    pub payload: Vec<u8>,
}

/// One is there and cannot be read now.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}: {source}", path.display())]
pub struct Unreadable {
    /// Its file.
    pub path: PathBuf,
    /// Why not.
    pub source: io::Error,
}

/// One receiver's spool. One process at a time uses a directory.
#[derive(Debug)]
pub struct Spool {
    /// Held, not looked at.
    lock: Arc<Lock>,
    directory: PathBuf,
    limits: SpoolLimits,
    /// Oldest first.
    items: Items,
    /// Done with, but their files could not be removed: they are not sent again, and removed as
    /// soon as that is possible.
    left: Vec<Item>,
    /// Of the files of both.
    bytes: u64,
    next: u64,
    /// Being sent: neither counts as lost nor goes while its receiver may be taking it.
    busy: Option<u64>,
    /// The second of the last look for what is too old.
    looked: Option<u64>,
    /// Sequence number of the one that could not be read, and how often in a row.
    unread: Option<(u64, u32)>,
    lost: SpoolLosses,
}

impl Spool {
    /// Opens the directory, making it if needed, and takes what an earlier daemon left there.
    ///
    /// # Errors
    /// When it cannot be made or listed, or is another process's.
    pub fn open(directory: &Path, limits: SpoolLimits) -> Result<Self, FileError> {
        let fail = |step| move |source| FileError { path: directory.to_owned(), step, source };
        let lock = make(directory)?;
        file::sweep(directory);
        let mut items = Vec::new();
        for entry in fs::read_dir(directory).map_err(fail("list the directory"))? {
            let entry = entry.map_err(fail("list the directory"))?;
            let Some(item) = entry.file_name().to_str().and_then(parse) else {
                if entry
                    .path()
                    .extension()
                    .is_some_and(|kind| SUFFIX.ends_with(&*kind.to_string_lossy()))
                {
                    tracing::warn!(path = %entry.path().display(), "is no request of this version: \
                         it is not sent, and stays; remove it");
                }
                continue;
            };
            match entry.metadata() {
                Ok(facts) if facts.is_file() => items.push(Item { bytes: facts.len(), ..item }),
                _ => {}
            }
        }
        items.sort_unstable_by_key(|item| item.sequence);
        let next = items.last().map_or(0, |item| item.sequence.saturating_add(1));
        let (items, left): (Vec<Item>, Vec<Item>) =
            items.into_iter().partition(|item| item.bytes == item.length);
        let torn = left.iter().filter(|item| item.bytes != done_length(item.length)).count();
        if torn > 0 {
            let path = directory.display();
            tracing::warn!(%path, torn, "what waited to be sent is not as it was put (the machine \
                 failed, or somebody wrote there): it is not sent");
        }
        Ok(Self {
            lock,
            directory: directory.to_owned(),
            limits,
            bytes: items.iter().chain(&left).map(|item| item.bytes).sum(),
            next,
            items: items.into_iter().map(|item| (item.sequence, item)).collect(),
            left,
            busy: None,
            looked: None,
            unread: None,
            lost: SpoolLosses {
                gone: u64::try_from(torn).unwrap_or(u64::MAX),
                ..SpoolLosses::default()
            },
        })
    }

    /// Takes what was made at `at`. Of the oldest so many go as make room for it; none where all of
    /// them together would not.
    ///
    /// # Errors
    /// When it does not fit or the disk refuses it; it is counted.
    pub fn put_as(
        &mut self,
        at: SystemTime,
        kind: ItemKind,
        group: u64,
        payload: &[u8],
    ) -> Result<(), FileError> {
        let bytes = u64::try_from(payload.len()).unwrap_or(u64::MAX);
        let item = Item { sequence: self.next, kind, group, at: seconds(at), length: bytes, bytes };
        let name = name(item);
        let path = self.directory.join(&name);
        if bytes > self.limits.bytes {
            self.lost.refused += 1;
            let source = io::Error::other(format!(
                "{bytes} bytes, and the spool holds {}",
                self.limits.bytes
            ));
            return Err(FileError { path, step: "spool", source });
        }
        self.remove_left();
        let over = self.bytes.saturating_add(bytes).saturating_sub(self.limits.bytes);
        // A file system that does not tell is taken for one with room: writing tells.
        let short = file::shortfall(&self.directory, bytes, self.limits.free_bytes).unwrap_or(0);
        if !self.make_room(over.max(short)) {
            self.lost.refused += 1;
            let found = if short > over {
                let floor = self.limits.free_bytes;
                format!("less than {floor} bytes would stay free, also without all that waits here")
            } else {
                format!("what is being sent or cannot be removed leaves no room for {bytes} bytes")
            };
            let source = io::Error::new(io::ErrorKind::StorageFull, found);
            return Err(FileError { path, step: "spool", source });
        }
        let (mut made_again, mut made_room) = (false, false);
        loop {
            match file::write_into(&self.directory, &name, payload) {
                Ok(()) => break,
                // Others fill the disk, too, or it has no more inodes. As much as this one takes is
                // given for it, and no more if that does not help.
                Err(error)
                    if error.source.kind() == io::ErrorKind::StorageFull
                        && !made_room
                        && self.make_room(bytes.max(1)) =>
                {
                    made_room = true;
                }
                // Somebody has removed the directory. What was in it is counted when its turn
                // comes.
                Err(error) if error.source.kind() == io::ErrorKind::NotFound && !made_again => {
                    made_again = true;
                    let lock = make(&self.directory).inspect_err(|_| self.lost.refused += 1)?;
                    drop(std::mem::replace(&mut self.lock, lock));
                }
                Err(error) => {
                    self.lost.refused += 1;
                    return Err(error);
                }
            }
        }
        self.next = self.next.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
        self.items.insert(item.sequence, item);
        Ok(())
    }

    /// The one that `pick` names of those that are not too old at `now`; what is too old goes. It
    /// stays, whatever is put, until [`done`](Self::done) or [`later`](Self::later).
    ///
    /// # Errors
    /// When it cannot be read. What is in the way, such as too many open files, is most likely in
    /// the way of all and may pass, so all stay. One that cannot be read again and again goes, and
    /// is counted.
    pub fn take(
        &mut self,
        now: Now,
        mut pick: impl FnMut(&Items) -> Option<u64>,
    ) -> Result<Option<Taken>, Unreadable> {
        loop {
            self.expire(now);
            let Some(&item) = pick(&self.items).and_then(|sequence| self.items.get(&sequence))
            else {
                return Ok(None);
            };
            // It may have been put since the last look.
            if now.tells_age && self.is_too_old(item, seconds(now.wall)) {
                self.remove(item.sequence);
                self.lost.expired += 1;
                continue;
            }
            let path = self.path(item);
            match fs::read(&path) {
                Ok(payload) if u64::try_from(payload.len()) != Ok(item.length) => {
                    tracing::warn!(path = %path.display(), found = payload.len(), "is not as it \
                         was put: it is not sent");
                }
                Ok(payload) => {
                    self.unread = None;
                    self.busy = Some(item.sequence);
                    return Ok(Some(Taken { item, payload }));
                }
                // Somebody took it away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    let before = self.unread.filter(|(sequence, _)| *sequence == item.sequence);
                    let times = before.map_or(0, |(_, times)| times) + 1;
                    if times < MOST_READS {
                        self.unread = Some((item.sequence, times));
                        return Err(Unreadable { path, source });
                    }
                    tracing::warn!(path = %path.display(), error = %source, "cannot be read \
                         {times} times in a row; it is dropped");
                }
            }
            self.remove(item.sequence);
            self.lost.gone += 1;
        }
    }

    /// The oldest window that requests are to be made of. It stays until
    /// [`drop_item`](Self::drop_item) and may be evicted meanwhile. One that is gone, or not as it
    /// was put, is counted. One that cannot be read now stays until it is too old: what is in the
    /// way, such as too many open files, may pass.
    pub fn window(&mut self, now: Now) -> Option<Taken> {
        self.expire(now);
        let windows: Vec<Item> =
            self.items.values().filter(|item| item.kind == ItemKind::Window).copied().collect();
        for item in windows {
            let path = self.path(item);
            match fs::read(&path) {
                Ok(payload) if u64::try_from(payload.len()) == Ok(item.length) => {
                    return Some(Taken { item, payload });
                }
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot be read: requests are \
                         made of it later");
                }
                found => {
                    let error = found.err().map_or_else(String::new, |error| error.to_string());
                    tracing::warn!(path = %path.display(), error, "was changed in the spool: no \
                         requests are made of it");
                    self.remove(item.sequence);
                    self.lost.gone += 1;
                }
            }
        }
        None
    }

    /// This one is of no more use. Another one may be on its way to the receiver.
    pub fn drop_item(&mut self, sequence: u64) {
        self.remove(sequence);
    }

    fn is_too_old(&self, item: Item, now: u64) -> bool {
        now.saturating_sub(item.at) > self.limits.age.as_secs()
    }

    /// What is too old at `now` goes.
    pub fn expire(&mut self, now: Now) {
        self.remove_left();
        if !now.tells_age {
            return;
        }
        let now = seconds(now.wall);
        // Once a second: most often the first are the oldest, but what was put while the clock was
        // ahead keeps none behind it.
        if self.looked.replace(now) == Some(now) {
            return;
        }
        let busy = self.busy;
        let is_over = |item: &Item| self.is_too_old(*item, now) && busy != Some(item.sequence);
        let over: Vec<u64> =
            self.items.values().filter(|item| is_over(item)).map(|item| item.sequence).collect();
        for sequence in over {
            self.remove(sequence);
            self.lost.expired += 1;
        }
    }

    /// Removes the directory when nothing is in it any more; true when it is gone.
    pub fn remove_if_empty(self) -> bool {
        if !(self.items.is_empty() && self.left.is_empty()) {
            return false;
        }
        // Whoever waits for the lock makes both anew.
        fs::remove_file(self.directory.join(lock::NAME)).ok();
        fs::remove_dir(&self.directory).is_ok()
    }

    /// This one was sent, or never will be.
    pub fn done(&mut self, sequence: u64) {
        self.later();
        self.remove(sequence);
    }

    /// What was taken was not sent: it waits like the others.
    pub fn later(&mut self) {
        self.busy = None;
    }

    /// Those that wait.
    #[must_use]
    pub fn items(&self) -> &Items {
        &self.items
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// True when nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes of all files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What went unsent so far.
    #[must_use]
    pub fn lost(&self) -> SpoolLosses {
        self.lost
    }

    /// The oldest go, until their files had so many bytes; false, and none goes, where that is more
    /// than all of them have. By our own account: a file system may say much later what became
    /// free, or others may take it at once, and that is no reason to give all there is.
    fn make_room(&mut self, bytes: u64) -> bool {
        let busy = self.busy.and_then(|sequence| self.items.get(&sequence));
        let most: u64 = self.items.values().map(|item| item.bytes).sum();
        if bytes > most - busy.map_or(0, |item| item.bytes) {
            return false;
        }
        let end = self.bytes - bytes;
        while self.bytes > end {
            if !self.evict() {
                return false;
            }
        }
        true
    }

    fn evict(&mut self) -> bool {
        let mut oldest = self.items.values().filter(|item| self.busy != Some(item.sequence));
        let Some(&item) = oldest.next() else { return false };
        // What cannot be removed makes no room: it still waits.
        if !self.unlink(item) {
            return false;
        }
        self.items.remove(&item.sequence);
        self.lost.evicted += 1;
        true
    }

    fn remove(&mut self, sequence: u64) {
        if let Some(mut item) = self.items.remove(&sequence)
            && !self.unlink(item)
        {
            // Whoever opens this spool next would send it again: what is longer than it was, and a
            // hole, is done with.
            let opened = OpenOptions::new().write(true).truncate(true).open(self.path(item));
            if opened.and_then(|file| file.set_len(done_length(item.length))).is_ok() {
                self.bytes = self.bytes.saturating_sub(item.bytes);
                item.bytes = 0;
            }
            self.left.push(item);
        }
    }

    /// Until the first that cannot be removed either: whatever is in the way of one is most likely
    /// in the way of all.
    fn remove_left(&mut self) {
        while let Some(&item) = self.left.last()
            && self.unlink(item)
        {
            self.left.pop();
        }
    }

    /// True when the file is gone.
    fn unlink(&mut self, item: Item) -> bool {
        let path = self.path(item);
        if let Err(error) = file::remove(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot be removed from the spool; it \
                 is tried again");
            return false;
        }
        self.bytes = self.bytes.saturating_sub(item.bytes);
        true
    }

    fn path(&self, item: Item) -> PathBuf {
        self.directory.join(name(item))
    }
}

/// True when something waits in a spool's directory, whoever put it there.
#[must_use]
pub fn holds_any(directory: &Path) -> bool {
    // Where it cannot be listed, whoever opens it is told.
    let names =
        fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.into_iter().any(|name| name.to_str().and_then(parse).is_some())
}

/// Makes the directory, if it is not there, and takes its lock.
fn make(directory: &Path) -> Result<Arc<Lock>, FileError> {
    file::make_directory(directory)?;
    lock::hold(directory)
}

fn name(item: Item) -> String {
    let Item { sequence, at, length, group, .. } = item;
    let tail = match (item.kind, group) {
        // As in earlier versions, which knew no others.
        (ItemKind::Request, 0) => String::new(),
        (ItemKind::Request, _) => format!("-r{group:016x}"),
        (ItemKind::Window, _) => format!("-w{group:016x}"),
    };
    format!("{sequence:0DIGITS$}-{at}-{length}{tail}{SUFFIX}")
}

/// Names a service in names of files: FNV-1a of 64 bits, never 0. Requests of services that share
/// one by chance take turns together, which costs no more than time.
#[must_use]
pub fn group_of(service: &str) -> u64 {
    let hash = service.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    hash.max(1)
}

/// Length of a file that is done with and could not be removed.
fn done_length(length: u64) -> u64 {
    length.saturating_add(1)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// What a file's name says.
fn parse(name: &str) -> Option<Item> {
    let mut parts = name.strip_suffix(SUFFIX)?.split('-');
    let sequence = parts.next().filter(|sequence| sequence.len() == DIGITS)?.parse().ok()?;
    let (at, length) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let (kind, group) = match parts.next() {
        None => (ItemKind::Request, 0),
        Some(tail) => {
            let kind = match tail.as_bytes().first()? {
                b'r' => ItemKind::Request,
                b'w' => ItemKind::Window,
                _ => return None,
            };
            (kind, u64::from_str_radix(tail.get(1..).filter(|hash| hash.len() == 16)?, 16).ok()?)
        }
    };
    parts.next().is_none().then_some(Item { sequence, kind, group, at, length, bytes: length })
}

#[cfg(test)]
impl Spool {
    /// Takes a request of no service that is known.
    ///
    /// # Errors
    /// See [`put_as`](Self::put_as).
    pub fn put(&mut self, at: SystemTime, payload: &[u8]) -> Result<(), FileError> {
        self.put_as(at, ItemKind::Request, 0, payload)
    }

    fn oldest(&mut self, now: Now) -> Result<Option<Taken>, Unreadable> {
        self.take(now, |items| items.keys().next().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{ProptestConfig, any, prop, prop_assert, prop_assert_eq, proptest};

    const ALL: SpoolLimits =
        SpoolLimits { bytes: 1000, age: Duration::from_secs(3600), free_bytes: 0 };

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + seconds)
    }

    /// The same, and its clock is believed.
    fn now(seconds: u64) -> Now {
        Now { wall: at(seconds), tells_age: true }
    }

    /// All but the lock's.
    fn files(directory: &Path) -> Vec<PathBuf> {
        let found = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<PathBuf> = found.filter(|path| !path.ends_with(lock::NAME)).collect();
        found.sort();
        found
    }

    fn drain(spool: &mut Spool, now: Now) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        while let Some(oldest) = spool.oldest(now).unwrap() {
            found.push(oldest.payload);
            spool.done(oldest.item.sequence);
        }
        found
    }

    #[test]
    fn what_waits_survives_a_restart_in_its_order() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        for number in 0..12_u8 {
            spool.put(at(u64::from(number)), &[number]).unwrap();
        }
        let first = spool.oldest(now(20)).unwrap().unwrap();
        spool.done(first.item.sequence);
        drop(spool);
        fs::write(directory.path().join("somebody's file"), "x").unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(30), &[12]).unwrap();
        assert_eq!(
            drain(&mut spool, now(40)),
            (1..=12).map(|number| vec![number]).collect::<Vec<_>>()
        );
        assert_eq!((spool.bytes(), spool.lost()), (0, SpoolLosses::default()));
        assert!(directory.path().join("somebody's file").exists());
    }

    #[test]
    fn names_say_the_service_and_what_a_file_holds_and_older_ones_are_understood() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        let groups = ["web", "shop"].map(group_of);
        assert!(groups[0] != groups[1] && !groups.contains(&0));
        spool.put(at(0), b"of an earlier version").unwrap();
        spool.put_as(at(0), ItemKind::Request, groups[0], b"one").unwrap();
        spool.put_as(at(0), ItemKind::Window, groups[1], b"two").unwrap();
        drop(spool);
        let spool = Spool::open(directory.path(), ALL).unwrap();
        let found: Vec<(ItemKind, u64)> =
            spool.items().values().map(|item| (item.kind, item.group)).collect();
        assert_eq!(
            found,
            [(ItemKind::Request, 0), (ItemKind::Request, groups[0]), (ItemKind::Window, groups[1])]
        );
        for bad in
            ["-x0123456789abcdef", "-r0123", "-r0123456789abcdeg", "-r0123456789abcdef-1", "-"]
        {
            assert_eq!(parse(&format!("{:020}-1-1{bad}.spooled", 1)), None, "{bad}");
        }
    }

    #[test]
    fn the_oldest_goes_when_it_is_full_and_each_is_counted() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        for number in 0..5_u8 {
            spool.put(at(0), &[number; 300]).unwrap();
        }
        assert!(spool.put(at(0), &[9; 1001]).is_err());
        assert_eq!(spool.lost(), SpoolLosses { evicted: 2, refused: 1, ..SpoolLosses::default() });
        assert_eq!((spool.bytes(), spool.len()), (900, 3));
        assert_eq!(spool.oldest(now(0)).unwrap().unwrap().payload, [2; 300]);
    }

    #[test]
    fn what_was_put_while_the_clock_was_ahead_keeps_nothing_too_old_behind_it() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(1_000_000), b"ahead").unwrap();
        spool.put(at(0), b"old").unwrap();
        spool.put(at(3000), b"new").unwrap();
        spool.expire(now(3700));
        assert_eq!(
            (spool.lost(), spool.len()),
            (SpoolLosses { expired: 1, ..SpoolLosses::default() }, 2)
        );
        assert_eq!(drain(&mut spool, now(3701)), [b"ahead".to_vec(), b"new".to_vec()]);
    }

    #[test]
    fn what_is_too_old_when_it_is_put_is_not_sent() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        assert_eq!(spool.oldest(now(3700)).unwrap(), None);
        // In the same second.
        spool.put(at(0), b"old").unwrap();
        spool.put(at(3000), b"new").unwrap();
        assert_eq!(spool.oldest(now(3700)).unwrap().unwrap().payload, b"new");
        assert_eq!(spool.lost(), SpoolLosses { expired: 1, ..SpoolLosses::default() });
    }

    #[test]
    fn while_the_clock_tells_no_ages_nothing_is_too_old() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"kept").unwrap();
        spool.expire(Now { tells_age: false, ..now(1_000_000) });
        assert_eq!((spool.lost(), spool.len()), (SpoolLosses::default(), 1));
        // The clock may be believed within the same second.
        spool.expire(now(1_000_000));
        assert_eq!(spool.lost(), SpoolLosses { expired: 1, ..SpoolLosses::default() });
    }

    #[test]
    fn a_day_without_a_receiver_costs_what_is_older_than_the_limit() {
        let directory = tempfile::tempdir().unwrap();
        let limits = SpoolLimits { bytes: 1 << 20, ..ALL };
        let mut spool = Spool::open(directory.path(), limits).unwrap();
        let day = 24 * 60;
        for minute in 0..day {
            spool.put(at(minute * 60), &minute.to_le_bytes()).unwrap();
        }
        let sent = drain(&mut spool, now((day - 1) * 60));
        // The last hour, both ends in it.
        let expected: Vec<Vec<u8>> =
            (day - 61..day).map(|minute| minute.to_le_bytes().to_vec()).collect();
        assert_eq!(sent, expected);
        assert_eq!(spool.lost(), SpoolLosses { expired: day - 61, ..SpoolLosses::default() });
        assert_eq!(files(directory.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_day_without_a_receiver_costs_the_oldest_that_find_no_room() {
        let directory = tempfile::tempdir().unwrap();
        let limits =
            SpoolLimits { bytes: 8 << 20, age: Duration::from_secs(86_400), free_bytes: 0 };
        let mut spool = Spool::open(directory.path(), limits).unwrap();
        // A profile of one service every five minutes, of 30 to 350 KB, for a day.
        let profiles: Vec<Vec<u8>> = (0..288_u64)
            .map(|number| {
                let bytes = 30_000 + number * 7919 % 320_000;
                number
                    .to_le_bytes()
                    .into_iter()
                    .cycle()
                    .take(usize::try_from(bytes).unwrap())
                    .collect()
            })
            .collect();
        for (number, profile) in (0..).zip(&profiles) {
            spool.put(at(number * 300), profile).unwrap();
            assert!(spool.bytes() <= limits.bytes, "{}", spool.bytes());
        }
        let sent = drain(&mut spool, now(287 * 300));
        let (mut bytes, most) = (0, usize::try_from(limits.bytes).unwrap());
        let newest = profiles.iter().rev().take_while(|profile| {
            bytes += profile.len();
            bytes <= most
        });
        let lost = profiles.len() - newest.count();
        assert!(
            sent == profiles[lost..],
            "{} of {} sent, {lost} expected to be lost",
            sent.len(),
            profiles.len()
        );
        assert_eq!(
            spool.lost(),
            SpoolLosses { evicted: u64::try_from(lost).unwrap(), ..SpoolLosses::default() }
        );
        assert!(lost > 200 && sent.len() > 20, "{lost}");
    }

    #[test]
    fn the_disk_keeps_what_must_stay_free() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"old").unwrap();
        spool.limits.free_bytes = u64::MAX / 2;
        let error = spool.put(at(0), b"new").unwrap_err();
        assert!(error.to_string().contains("would stay free"), "{error}");
        assert_eq!(spool.lost(), SpoolLosses { refused: 1, ..SpoolLosses::default() });
        spool.limits.free_bytes = 0;
        assert_eq!(drain(&mut spool, now(0)), [b"old"], "what would not have helped was not given");
    }

    #[test]
    fn the_oldest_make_as_much_room_as_lacks_and_no_more() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        for number in 0..4_u8 {
            spool.put(at(0), &[number; 100]).unwrap();
        }
        assert!(spool.make_room(0) && !spool.make_room(401));
        assert_eq!(spool.lost(), SpoolLosses::default());
        assert!(spool.make_room(150));
        assert_eq!(
            (spool.lost(), spool.bytes()),
            (SpoolLosses { evicted: 2, ..SpoolLosses::default() }, 200)
        );
        let sending = spool.oldest(now(0)).unwrap().unwrap();
        assert!(!spool.make_room(101), "what is being sent makes none");
        assert!(spool.make_room(100));
        assert_eq!((sending.payload, spool.len()), (vec![2; 100], 1));
    }

    #[test]
    fn what_is_being_sent_is_not_evicted() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), &[0; 600]).unwrap();
        spool.put(at(0), &[1; 300]).unwrap();
        let sending = spool.oldest(now(0)).unwrap().unwrap();
        spool.put(at(0), &[2; 400]).unwrap();
        assert_eq!((spool.len(), spool.lost().evicted), (2, 1));
        assert!(spool.put(at(0), &[3; 500]).is_err(), "what is not being sent is too little");
        spool.done(sending.item.sequence);
        assert_eq!(drain(&mut spool, now(0)), [[2; 400]]);
        assert_eq!(spool.lost(), SpoolLosses { evicted: 1, refused: 1, ..SpoolLosses::default() });
    }

    #[test]
    fn a_file_that_somebody_took_is_passed_over() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"one").unwrap();
        spool.put(at(0), b"two").unwrap();
        fs::remove_file(&files(directory.path())[0]).unwrap();
        assert_eq!(spool.oldest(now(0)).unwrap().unwrap().payload, b"two");
        assert_eq!(spool.lost(), SpoolLosses { gone: 1, ..SpoolLosses::default() });
    }

    #[test]
    fn a_file_that_cannot_be_read_costs_itself_alone_and_not_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"one").unwrap();
        spool.put(at(0), b"two").unwrap();
        let path = spool.path(*spool.items.values().next().unwrap());
        fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).unwrap();
        for _ in 1..MOST_READS {
            let error = spool.oldest(now(0)).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
            assert_eq!((spool.len(), spool.lost()), (2, SpoolLosses::default()));
        }
        assert_eq!(drain(&mut spool, now(0)), [b"two"]);
        assert_eq!(spool.lost(), SpoolLosses { gone: 1, ..SpoolLosses::default() });
    }

    #[test]
    fn a_file_that_can_be_read_again_is_sent() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"one").unwrap();
        let path = spool.path(*spool.items.values().next().unwrap());
        fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).unwrap();
        assert!(spool.oldest(now(0)).is_err());
        fs::remove_dir(&path).and_then(|()| fs::write(&path, b"one")).unwrap();
        assert_eq!(
            (drain(&mut spool, now(0)), spool.lost()),
            (vec![b"one".to_vec()], SpoolLosses::default())
        );
    }

    #[test]
    fn a_directory_that_somebody_removes_is_made_again_and_what_was_in_it_is_counted() {
        let outside = tempfile::tempdir().unwrap();
        let directory = outside.path().join("spool");
        let mut spool = Spool::open(&directory, ALL).unwrap();
        spool.put(at(0), b"gone").unwrap();
        fs::remove_dir_all(&directory).unwrap();
        spool.put(at(0), b"new").unwrap();
        assert_eq!(drain(&mut spool, now(0)), [b"new"]);
        assert_eq!(
            (spool.lost(), spool.bytes()),
            (SpoolLosses { gone: 1, ..SpoolLosses::default() }, 0)
        );
        assert!(directory.join(lock::NAME).exists(), "others are kept out again");
    }

    #[test]
    fn what_cannot_be_removed_is_not_sent_twice_and_goes_when_it_can() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), &[0; 600]).unwrap();
        spool.put(at(0), &[1; 100]).unwrap();
        let path = spool.path(*spool.items.values().next().unwrap());
        // Nobody removes a directory as a file, root neither.
        let make_lasting = || fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).unwrap();
        let sent = spool.oldest(now(0)).unwrap().unwrap();
        make_lasting();
        spool.done(sent.item.sequence);
        assert_eq!(
            (spool.len(), spool.bytes()),
            (1, 700),
            "it takes its room as long as it is there"
        );
        assert_eq!(drain(&mut spool, now(0)), [[1; 100]]);
        assert!(spool.put(at(0), &[2; 500]).is_err());
        fs::remove_dir(&path).unwrap();
        spool.put(at(0), &[3; 500]).unwrap();
        assert_eq!(
            (spool.bytes(), spool.lost()),
            (500, SpoolLosses { refused: 1, ..SpoolLosses::default() })
        );
    }

    #[test]
    fn what_was_sent_and_cannot_be_removed_is_not_sent_by_the_next_daemon() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let allow =
            |mode| fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), b"sent").unwrap();
        // Root removes it all the same.
        allow(0o500);
        assert_eq!(drain(&mut spool, now(0)), [b"sent"]);
        drop(spool);
        // By hand, for root's sake.
        allow(0o700);
        let done = Item {
            sequence: 7,
            kind: ItemKind::Request,
            group: 0,
            at: 1_700_000_000,
            length: 4,
            bytes: 0,
        };
        fs::write(directory.path().join(name(done)), "\0\0\0\0\0").unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        assert_eq!(
            (drain(&mut spool, now(0)), spool.lost(), spool.bytes()),
            (Vec::new(), SpoolLosses::default(), 0)
        );
        assert_eq!(files(directory.path()), Vec::<PathBuf>::new());
        spool.put(at(0), b"new").unwrap();
        assert_eq!(spool.oldest(now(0)).unwrap().unwrap().item.sequence, 8);
    }

    #[test]
    fn what_a_machine_that_failed_left_in_part_is_counted_and_not_sent() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        for text in ["whole", "half", "nothing"] {
            spool.put(at(0), text.as_bytes()).unwrap();
        }
        let cut = |number: usize, length| {
            let file = OpenOptions::new()
                .write(true)
                .open(spool.path(*spool.items.values().nth(number).unwrap()))
                .unwrap();
            file.set_len(length).unwrap();
        };
        cut(1, 2);
        cut(2, 0);
        drop(spool);
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        assert_eq!((drain(&mut spool, now(0)), spool.bytes()), (vec![b"whole".to_vec()], 0));
        assert_eq!(spool.lost(), SpoolLosses { gone: 2, ..SpoolLosses::default() });
        assert_eq!(files(directory.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_is_not_as_it_was_put_is_counted_and_not_sent() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        for text in ["shortened", "made longer", "whole"] {
            spool.put(at(0), text.as_bytes()).unwrap();
        }
        fs::write(spool.path(*spool.items.values().next().unwrap()), "").unwrap();
        fs::write(spool.path(*spool.items.values().nth(1).unwrap()), "somebody else's text")
            .unwrap();
        assert_eq!(drain(&mut spool, now(0)), [b"whole"]);
        assert_eq!(
            (spool.lost(), spool.bytes()),
            (SpoolLosses { gone: 2, ..SpoolLosses::default() }, 0)
        );
        spool.put(at(0), b"longer").unwrap();
        fs::write(spool.path(*spool.items.values().next().unwrap()), "longer by five").unwrap();
        drop(spool);
        let spool = Spool::open(directory.path(), ALL).unwrap();
        assert_eq!(
            (spool.lost(), spool.len()),
            (SpoolLosses { gone: 1, ..SpoolLosses::default() }, 0)
        );
    }

    #[test]
    fn what_cannot_be_evicted_still_waits_and_counts_as_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(directory.path(), ALL).unwrap();
        spool.put(at(0), &[0; 600]).unwrap();
        let path = spool.path(*spool.items.values().next().unwrap());
        fs::remove_file(&path).and_then(|()| fs::create_dir(&path)).unwrap();
        assert!(spool.put(at(0), &[1; 500]).is_err());
        assert_eq!(
            (spool.len(), spool.lost()),
            (1, SpoolLosses { refused: 1, ..SpoolLosses::default() })
        );
    }

    proptest! {
        // Each is many files.
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Against the simplest model: a list.
        #[test]
        fn put_equals_sent_plus_lost_plus_waiting(
            steps in prop::collection::vec((any::<bool>(), 1_usize..400, 0_u64..2000), 1..60),
        ) {
            let directory = tempfile::tempdir().unwrap();
            let mut spool = Spool::open(directory.path(), ALL).unwrap();
            let (mut passed, mut put, mut sent, mut newest) = (0, 0_u64, 0_u64, None);
            for (send, len, passes) in steps {
                passed += passes;
                if send {
                    if let Some(oldest) = spool.oldest(now(passed)).unwrap() {
                        prop_assert!(newest < Some(oldest.item.sequence), "order");
                        newest = Some(oldest.item.sequence);
                        spool.done(oldest.item.sequence);
                        sent += 1;
                    }
                } else {
                    spool.put(at(passed), &vec![0; len]).unwrap();
                    put += 1;
                }
                prop_assert!(spool.bytes() <= ALL.bytes);
                let files = files(directory.path());
                let on_disk: u64 = files.iter().map(|file| file.metadata().unwrap().len()).sum();
                prop_assert_eq!(on_disk, spool.bytes());
            }
            let lost = spool.lost();
            let lost = lost.evicted + lost.expired + lost.refused + lost.gone;
            prop_assert_eq!(put, sent + lost + u64::try_from(spool.len()).unwrap());
        }
    }
}
