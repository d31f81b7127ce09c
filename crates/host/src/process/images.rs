//! All mapped files of a run: found behind mappings, opened, told apart, and dropped when there are
//! too many.

use super::guarded_io::{ForeignFile, IoPeer, wait_for};
use super::image::{ExecutableImage, FileIdentity, ImageError};
use super::mapping::{FileKey, Mapping};
use super::published::THREAD_VARIABLE;
use super::thread_variable::ThreadVariable;
use crate::system_limits::{explain, share_of_open_files};
use foldhash::HashMap;
use perfusion_model::event::MonotonicNs;
use perfusion_model::frame::ImageId;
use perfusion_unwind::eh_frame::UnwindSections;
use perfusion_unwind::managed::ExceptionDirectory;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use std::collections::HashSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Most images known at once, and most bytes their descriptions take: those of a usual one are some
/// hundred.
const MAX_IMAGES: usize = 16_384;
const MAX_BYTES: usize = 16 << 20;
/// Of these, most that one pid brings: whoever maps very many files takes no room from others.
const SHARE_OF_PID: usize = 8;
/// So many are dropped at once where there is no room, one part of all.
const DROPPED_PART: usize = 16;
/// Most files kept open; fewer where this process may have few open files.
const MAX_OPEN: usize = 512;
/// Most bytes of unwind data held at once; that of large files is not.
const MAX_HELD_BYTES: usize = 16 << 20;

/// Where else a mapping's file may be found when its process is gone before anybody looked.
#[derive(Clone, Copy, Debug)]
pub struct ParentFallback {
    /// The process's parent.
    pub parent: u32,
    /// When the mapping was made, or a time when it was there.
    pub at: MonotonicNs,
}

/// EMFILE and ENFILE.
fn is_for_want_of_descriptors(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(23 | 24))
}

/// One image and who was the first to map it.
#[derive(Debug)]
struct CachedImage {
    image: ExecutableImage,
    /// `None` for images that are nobody's.
    brought_by: Option<u32>,
    /// Highest when used last.
    used: u64,
    /// It stands in a stack, which will need its name.
    in_stacks: bool,
    /// The variable its threads publish in, once somebody has asked.
    variable: Option<Option<ThreadVariable>>,
}

/// What there is of images, against the bounds.
#[derive(Clone, Copy, Debug, Default)]
struct CacheBudget {
    images: usize,
    bytes: usize,
}

impl CacheBudget {
    fn add(&mut self, image: &ExecutableImage) {
        self.images += 1;
        self.bytes += image.described_bytes();
    }

    fn remove(&mut self, image: &ExecutableImage) {
        self.images = self.images.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(image.described_bytes());
    }

    fn is_full(self, part: usize) -> bool {
        self.images >= MAX_IMAGES / part || self.bytes >= MAX_BYTES / part
    }
}

/// All images of a run.
#[derive(Debug, Default)]
pub struct ImageCache {
    images: HashMap<ImageId, CachedImage>,
    next_id: u32,
    by_identity: HashMap<FileIdentity, ImageId>,
    /// Last image seen for (device, inode) of a mapping: for processes that are gone before their
    /// file could be opened.
    by_mapping: HashMap<FileKey, ImageId>,
    all: CacheBudget,
    /// Of each pid, the images it was the first to map.
    brought: HashMap<u32, CacheBudget>,
    clock: u64,
    open: usize,
    held_bytes: usize,
    /// Times a file was not taken up because there were too many.
    pub refused: u64,
    /// Images dropped to make room for others; none that stands in a stack.
    pub evicted: u64,
    /// Times an image's unwind data was dropped to stay within memory.
    pub evictions: u64,
    /// Times a file was not opened because this process may have no more open.
    pub descriptors_short: u64,
}

impl ImageCache {
    /// The image; `None` for an id of another run, or when it was dropped.
    #[must_use]
    pub fn get(&self, id: ImageId) -> Option<&ExecutableImage> {
        self.images.get(&id).map(|known| &known.image)
    }

    /// The image behind a file mapping of `pid`.
    ///
    /// # Errors
    /// [`ImageError`] when it cannot be opened and is not known to be one that was seen before, or
    /// there is no room.
    pub fn resolve(
        &mut self,
        pid: u32,
        mapping: &Mapping,
        elsewhere: Option<ParentFallback>,
    ) -> Result<ImageId, ImageError> {
        let key = mapping.file();
        let known = self.by_mapping.get(&key).copied();
        // Where mappings state the device that files have, nothing else can have this inode while
        // it is open. Where they do not, as on btrfs, whose subvolumes are all of one device there,
        // another process may have made a file of its own with the same numbers.
        let is_it = |image: &ExecutableImage| {
            image.is_unchanged() && image.identity_device() == Some(mapping.device)
        };
        if let Some(id) = known.filter(|id| self.get(*id).is_some_and(is_it)) {
            self.touch(id);
            return Ok(id);
        }
        let file = match open(pid, mapping, elsewhere) {
            Err(ImageError::Open { source, .. }) if is_for_want_of_descriptors(&source) => {
                // Others give theirs: what is known of a file stays known when it is closed.
                self.close_all_but(0);
                let again = open(pid, mapping, elsewhere);
                self.note_want_of_descriptors(&again);
                again?
            }
            opened => opened?,
        };
        let open_error = |source| ImageError::Open { pid, path: Arc::clone(&mapping.path), source };
        let identity = FileIdentity::of(&file.metadata().map_err(open_error)?);
        let id = match self.by_identity.get(&identity).copied() {
            Some(id) => {
                if let Some(known) = self.images.get_mut(&id)
                    && known.image.is_closed()
                {
                    known.image.reopen(file);
                    self.open += 1;
                }
                id
            }
            None => {
                let image = ExecutableImage::of_file(
                    Arc::clone(&mapping.path),
                    mapping.device,
                    mapping.inode,
                    file,
                );
                // The file may have been written to since it was asked what it is: what the image
                // says of it is by what it is forgotten.
                let identity = image.identity().copied().unwrap_or(identity);
                let id = self.add(image, Some(pid))?;
                self.by_identity.insert(identity, id);
                id
            }
        };
        self.touch(id);
        self.by_mapping.insert(key, id);
        self.close_least_used();
        Ok(id)
    }

    /// The pid that was the first to map an image; it may be gone, or another process's by now.
    #[must_use]
    pub fn mapped_by(&self, id: ImageId) -> Option<u32> {
        self.images.get(&id)?.brought_by
    }

    /// True while the file of an image is open and nobody wrote to it.
    pub(super) fn is_unchanged(&self, id: ImageId) -> bool {
        self.get(id).is_some_and(ExecutableImage::is_unchanged)
    }

    /// The same mapping, with the path of its image where that is the same: hundreds of processes
    /// map the same libraries.
    pub(super) fn share_path(&self, mut mapping: Mapping) -> Mapping {
        let known = self.by_mapping.get(&mapping.file()).and_then(|id| self.get(*id));
        if let Some(image) = known.filter(|image| image.path == mapping.path) {
            mapping.path = Arc::clone(&image.path);
        }
        mapping
    }

    /// The image in a file that nobody needs to map.
    ///
    /// # Errors
    /// [`ImageError::Full`].
    pub fn open(
        &mut self,
        file: File,
        path: Arc<str>,
        device: (u32, u32),
        inode: u64,
    ) -> Result<ImageId, ImageError> {
        self.add(ExecutableImage::of_file(path, device, inode, ForeignFile::own(file)), None)
    }

    /// The vDSO with these bytes.
    ///
    /// # Errors
    /// [`ImageError::Full`].
    pub fn vdso(&mut self, bytes: Vec<u8>) -> Result<ImageId, ImageError> {
        let mut all = self.images.iter();
        match all.find(|(_, known)| known.image.bytes() == Some(&bytes)).map(|(id, _)| *id) {
            Some(id) => Ok(id),
            None => self.add(ExecutableImage::of_vdso(bytes), None),
        }
    }

    /// A stack has a frame in this image: it is kept as long as there are stacks.
    pub fn keep(&mut self, id: ImageId) {
        if let Some(known) = self.images.get_mut(&id) {
            known.in_stacks = true;
        }
    }

    /// Those are the images in which stacks still have a frame; all others are kept only as long as
    /// there is room.
    pub(crate) fn keep_only(&mut self, stacked: &HashSet<ImageId>) {
        for (id, known) in &mut self.images {
            known.in_stacks = stacked.contains(id);
        }
    }

    fn add(
        &mut self,
        image: ExecutableImage,
        brought_by: Option<u32>,
    ) -> Result<ImageId, ImageError> {
        if let Some(pid) = brought_by
            && self.brought.get(&pid).is_some_and(|room| room.is_full(SHARE_OF_PID))
        {
            self.evict(Some(pid));
            if self.brought.get(&pid).is_some_and(|room| room.is_full(SHARE_OF_PID)) {
                self.refused += 1;
                return Err(ImageError::Share { pid });
            }
        }
        if self.all.is_full(1) {
            self.evict(None);
        }
        let Some(next) = self.next_id.checked_add(1).filter(|_| !self.all.is_full(1)) else {
            self.refused += 1;
            return Err(ImageError::Full);
        };
        let id = ImageId(self.next_id);
        self.next_id = next;
        self.all.add(&image);
        if let Some(pid) = brought_by {
            self.brought.entry(pid).or_default().add(&image);
        }
        self.open += usize::from(image.file().is_some());
        self.images.insert(
            id,
            CachedImage { image, brought_by, used: self.clock, in_stacks: false, variable: None },
        );
        Ok(id)
    }

    /// Drops some of the images used longest ago that stand in no stack; only those `of` has
    /// brought, if it is given. Whoever maps one of them again has it opened again.
    fn evict(&mut self, of: Option<u32>) {
        let droppable =
            |known: &CachedImage| !known.in_stacks && (of.is_none() || known.brought_by == of);
        let mut oldest: Vec<(u64, ImageId)> = self
            .images
            .iter()
            .filter(|(_, known)| droppable(known))
            .map(|(id, known)| (known.used, *id))
            .collect();
        oldest.sort_unstable();
        let part = if of.is_some() { SHARE_OF_PID * DROPPED_PART } else { DROPPED_PART };
        oldest.truncate(MAX_IMAGES / part);
        for (_, id) in oldest {
            let Some(known) = self.images.remove(&id) else { continue };
            self.evicted += 1;
            self.open -= usize::from(known.image.file().is_some());
            self.all.remove(&known.image);
            if let Some(pid) = known.brought_by
                && let Some(room) = self.brought.get_mut(&pid)
            {
                room.remove(&known.image);
                if room.images == 0 {
                    self.brought.remove(&pid);
                }
            }
        }
        let images = &self.images;
        self.by_identity.retain(|_, id| images.contains_key(id));
        self.by_mapping.retain(|_, id| images.contains_key(id));
    }

    fn touch(&mut self, id: ImageId) {
        self.clock += 1;
        if let Some(known) = self.images.get_mut(&id) {
            known.used = self.clock;
        }
    }

    fn note_want_of_descriptors(&mut self, opened: &Result<ForeignFile, ImageError>) {
        if let Err(ImageError::Open { source, .. }) = opened
            && is_for_want_of_descriptors(source)
        {
            if self.descriptors_short == 0 {
                tracing::warn!(
                    "mapped files cannot be opened, and their functions have no names: {}",
                    explain(source)
                );
            }
            self.descriptors_short += 1;
        }
    }

    fn close_least_used(&mut self) {
        self.close_all_but(share_of_open_files(MAX_OPEN));
    }

    fn close_all_but(&mut self, most: usize) {
        while self.open > most {
            let open = self.images.values_mut().filter(|known| known.image.file().is_some());
            if let Some(known) = open.min_by_key(|known| (known.in_stacks, known.used)) {
                known.image.close();
            }
            self.open -= 1;
        }
    }

    /// Whether it is known if an image has the variable that threads publish what they work for in.
    pub(super) fn is_asked(&self, id: ImageId) -> bool {
        self.images.get(&id).is_some_and(|known| known.variable.is_some())
    }

    /// That variable, if its file defines it for everybody. A file is asked once, however many
    /// processes map it, and however often: to find the relocation it may take megabytes of it.
    pub(super) fn thread_variable(&mut self, id: ImageId) -> Option<ThreadVariable> {
        let CachedImage { image, variable, .. } = self.images.get_mut(&id)?;
        if variable.is_none() && image.is_closed() {
            return None;
        }
        *variable
            .get_or_insert_with(|| image.thread_variable(THREAD_VARIABLE, size_of::<u64>() as u64))
    }

    /// The unwind sections of an ELF image, loaded now if they were not.
    pub fn unwind(&mut self, id: ImageId) -> Option<Arc<UnwindSections>> {
        self.touch(id);
        let (unwind, loaded) = self.images.get_mut(&id)?.image.unwind()?;
        if loaded {
            self.make_room(id);
        }
        Some(unwind)
    }

    /// The exception directory of the PE image that holds the byte at `offset` of a file, loaded
    /// now if it was not.
    pub fn exceptions(&mut self, id: ImageId, offset: u64) -> Option<Arc<ExceptionDirectory>> {
        self.touch(id);
        let (directory, loaded) = self.images.get_mut(&id)?.image.exceptions(offset)?;
        if loaded {
            self.make_room(id);
        }
        Some(directory)
    }

    /// Memory is short: drops all unwind data, and the images used longest ago that stand in no
    /// stack.
    pub fn shed(&mut self) {
        for known in self.images.values_mut().filter(|known| known.image.held_bytes() > 0) {
            known.image.release();
            self.evictions += 1;
        }
        self.held_bytes = 0;
        self.evict(None);
    }

    /// Drops the unwind data least recently used until all fits again; never that of `keep`.
    fn make_room(&mut self, keep: ImageId) {
        self.held_bytes = self.images.values().map(|known| known.image.held_bytes()).sum();
        while self.held_bytes > MAX_HELD_BYTES {
            let others = self.images.iter_mut();
            let others = others.filter(|(id, known)| **id != keep && known.image.held_bytes() > 0);
            let Some((_, known)) = others.min_by_key(|(_, known)| known.used) else { return };
            self.held_bytes -= known.image.held_bytes();
            known.image.release();
            self.evictions += 1;
        }
    }
}

/// Opens the file behind a mapping, which its file system may hold up.
fn open(
    pid: u32,
    mapping: &Mapping,
    elsewhere: Option<ParentFallback>,
) -> Result<ForeignFile, ImageError> {
    let wanted = mapping.clone();
    let opened = wait_for(IoPeer::Process(pid), move || {
        let opened = open_mapped(pid, &wanted);
        let opened = opened.or_else(|error| {
            elsewhere.and_then(|elsewhere| open_elsewhere(&wanted, elsewhere)).ok_or(error)
        });
        let failed = |source| ImageError::Open { pid, path: Arc::clone(&wanted.path), source };
        opened.and_then(|file| ForeignFile::opened(file).map_err(failed))
    });
    opened.unwrap_or_else(|| {
        Err(ImageError::Open {
            pid,
            path: Arc::clone(&mapping.path),
            source: ErrorKind::TimedOut.into(),
        })
    })
}

/// Opens the file behind a mapping for reading, never a device or a pipe, and never one the mapping
/// does not hold.
pub(super) fn open_mapped(pid: u32, mapping: &Mapping) -> Result<File, ImageError> {
    let error = |source: rustix::io::Errno| ImageError::Open {
        pid,
        path: Arc::clone(&mapping.path),
        source: source.into(),
    };
    // The kernel's own link to the mapped file: right even when the path names something else by
    // now. Each thread's id is that of such a directory, though it is not listed; and while the
    // thread is one of the process, it is not another process's.
    let thread = super::living_thread(pid).unwrap_or(pid);
    let link =
        format!("/proc/{thread}/map_files/{:x}-{:x}", mapping.range.start, mapping.range.end);
    let linked = rustix::fs::openat(CWD, link, HANDLE, Mode::empty());
    let is_its = || thread == pid || Path::new(&format!("/proc/{pid}/task/{thread}")).exists();
    let (handle, by_link) = match linked.ok().filter(|_| is_its()) {
        Some(handle) => (handle, true),
        // The mapping was split or grew, or the process is in exec: by path below the process's
        // root, with nothing followed.
        None => {
            let root = format!("{}/root", super::in_common(pid));
            (beneath(&root, &mapping.path).map_err(error)?, false)
        }
    };
    let found = found(&handle, mapping, by_link).map_err(error)?;
    if found != Some(mapping.inode) {
        let path = Arc::clone(&mapping.path);
        let found = found.unwrap_or(0);
        return Err(ImageError::Changed { pid, path, expected: mapping.inode, found });
    }
    readable(&handle).map_err(error)
}

/// Opens the file of a mapping whose process is gone, by its path in the mount namespaces it most
/// likely was in. The inode alone would not do, since its number may be another file's by now: but
/// one that last changed before the mapping was made is what was mapped.
fn open_elsewhere(mapping: &Mapping, elsewhere: ParentFallback) -> Option<File> {
    let since = Duration::from_nanos(MonotonicNs::now().0.saturating_sub(elsewhere.at.0));
    let mapped =
        SystemTime::now().checked_sub(since)?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let roots = [format!("/proc/{}/root", elsewhere.parent), "/".to_owned()];
    roots.iter().find_map(|root| {
        let handle = beneath(root, &mapping.path).ok()?;
        if found(&handle, mapping, false).ok()? != Some(mapping.inode) {
            return None;
        }
        let file = readable(&handle).ok()?;
        let meta = file.metadata().ok()?;
        let changed = Duration::new(
            u64::try_from(meta.ctime()).ok()?,
            u32::try_from(meta.ctime_nsec()).ok()?,
        );
        (changed < mapped).then_some(file)
    })
}

/// Flags of a handle that can be looked at and is not opened: opening a device or a pipe may do
/// something.
const HANDLE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// A handle of `path` beneath the directory `root`, with nothing followed.
pub(super) fn beneath(root: &str, path: &str) -> rustix::io::Result<OwnedFd> {
    let root = rustix::fs::openat(CWD, root, HANDLE | OFlags::DIRECTORY, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(root, path, HANDLE | OFlags::NOFOLLOW, Mode::empty(), resolve)
}

/// Inode of a handle, `None` when it is no regular file of the mapping's device. Behind the
/// kernel's own link that is not asked: maps and stat state different devices on overlayfs and
/// btrfs.
fn found(handle: &OwnedFd, mapping: &Mapping, by_link: bool) -> rustix::io::Result<Option<u64>> {
    let stat = rustix::fs::fstat(handle)?;
    let regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    Ok((regular && (by_link || device == mapping.device)).then_some(stat.st_ino))
}

/// The file of a handle, for reading.
pub(super) fn readable(handle: &OwnedFd) -> rustix::io::Result<File> {
    let reopen = format!("/proc/self/fd/{}", handle.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::openat(CWD, reopen, flags, Mode::empty()).map(File::from)
}

#[cfg(test)]
mod tests {
    use super::super::thread_variable::tests::library;
    use super::*;
    use perfusion_model::event::Mmap;
    use std::io::Write;

    /// A pid no process can have (kernel limit 2^22).
    const NOBODY: u32 = 5_000_000;

    fn mapping_of(path: &Path) -> Mapping {
        let meta = path.metadata().unwrap();
        Mapping::new(&Mmap {
            pid: NOBODY,
            start: 0x1000,
            len: 0x1000,
            file_offset: 0,
            device: (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev())),
            inode: meta.ino(),
            path: path.to_str().unwrap().to_owned(),
        })
        .unwrap()
    }

    #[test]
    fn a_file_of_a_process_that_is_gone_is_a_known_one_only_while_that_is_unchanged() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"first").unwrap();
        let mapping = mapping_of(file.path());
        let own = std::process::id();
        let mut images = ImageCache::default();
        let first = images.resolve(own, &mapping, None).unwrap();
        assert_eq!(images.resolve(NOBODY, &mapping, None).unwrap(), first);
        file.write_all(b" and second").unwrap();
        file.flush().unwrap();
        assert!(images.resolve(NOBODY, &mapping, None).is_err(), "rewritten in place");
        assert_ne!(images.resolve(own, &mapping, None).unwrap(), first);
    }

    #[test]
    fn a_file_is_not_anothers_that_has_its_inode_on_another_device() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mapping = mapping_of(file.path());
        let mut images = ImageCache::default();
        let own = images.resolve(std::process::id(), &mapping, None).unwrap();
        // As maps state it on btrfs: the file system's own device, which no file has.
        let elsewhere = Mapping { device: (0, 9999), ..mapping.clone() };
        images.by_mapping.insert((elsewhere.device, elsewhere.inode), own);
        assert!(images.resolve(NOBODY, &elsewhere, None).is_err());
        assert_eq!(images.resolve(NOBODY, &mapping, None).unwrap(), own);
    }

    #[test]
    fn a_file_of_a_process_that_was_never_looked_at_is_found_by_its_path_while_it_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("short");
        std::fs::write(&path, "lived").unwrap();
        let mapping = mapping_of(&path);
        let changed = path.metadata().unwrap();
        let changed = Duration::new(changed.ctime() as u64, changed.ctime_nsec() as u32);
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let age = u64::try_from((wall - changed).as_nanos()).unwrap();
        let at = |ns_after_change: i64| ParentFallback {
            parent: NOBODY,
            at: MonotonicNs((MonotonicNs::now().0 - age).strict_add_signed(ns_after_change)),
        };
        let resolve = |elsewhere| ImageCache::default().resolve(NOBODY, &mapping, elsewhere);
        assert!(resolve(None).is_err());
        assert!(resolve(Some(at(20_000_000_000))).is_ok());
        assert!(resolve(Some(at(-20_000_000_000))).is_err(), "written after it was mapped");
        let another = Mapping { inode: mapping.inode + 1, ..mapping.clone() };
        assert!(ImageCache::default().resolve(NOBODY, &another, Some(at(20_000_000_000))).is_err());
    }

    #[test]
    fn a_file_is_asked_for_its_variable_once() {
        let own = (0x3000, object::elf::R_X86_64_TLSDESC, 1, 0);
        let mut images = ImageCache::default();
        let mut resolve = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            images.resolve(std::process::id(), &mapping_of(file.path()), None).unwrap()
        };
        let has = resolve(&library(THREAD_VARIABLE, &[own], &[]));
        let has_not = resolve(&library("another", &[own], &[]));
        let unasked = resolve(&library(THREAD_VARIABLE, &[own], &[own]));
        let found = Some(ThreadVariable::Descriptor(0x3000));
        assert!(!images.is_asked(has));
        assert_eq!([has, has_not].map(|id| images.thread_variable(id)), [found, None]);
        // Nothing of it can be read any more.
        images.images.values_mut().for_each(|known| known.image.close());
        assert_eq!(
            [has, has_not, unasked].map(|id| images.thread_variable(id)),
            [found, None, None]
        );
        assert_eq!([has, has_not, unasked].map(|id| images.is_asked(id)), [true, true, false]);
    }

    #[test]
    fn a_process_that_maps_very_many_files_leaves_room_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let mapping = |name: usize| {
            let path = folder.path().join(name.to_string());
            File::create(&path).unwrap();
            mapping_of(&path)
        };
        let share = MAX_IMAGES / SHARE_OF_PID;
        let (mut images, own) = (ImageCache::default(), std::process::id());
        let files: Vec<Mapping> = (0..share + 1).map(mapping).collect();
        let ids: Vec<ImageId> =
            files[..share].iter().map(|file| images.resolve(own, file, None).unwrap()).collect();
        assert_eq!((images.images.len(), images.open), (share, MAX_OPEN));
        // The two used longest ago, but one of them stands in a stack.
        images.keep(ids[0]);
        images.resolve(own, &files[share], None).unwrap();
        assert!(
            images.get(ids[0]).is_some()
                && images.get(ids[1]).is_none()
                && images.get(ids[share - 1]).is_some()
        );
        let dropped = MAX_IMAGES / (SHARE_OF_PID * DROPPED_PART);
        assert_eq!((images.evicted, images.images.len()), (dropped as u64, share + 1 - dropped));
        assert_ne!(
            images.resolve(own, &files[1], None).unwrap(),
            ids[1],
            "it comes back as another one"
        );
    }

    #[test]
    fn files_of_frames_are_not_dropped_and_those_of_others_find_room() {
        let folder = tempfile::tempdir().unwrap();
        let mapping = |name: usize| {
            let path = folder.path().join(name.to_string());
            File::create(&path).unwrap();
            mapping_of(&path)
        };
        let share = MAX_IMAGES / SHARE_OF_PID;
        let (mut images, own) = (ImageCache::default(), std::process::id());
        let files: Vec<Mapping> = (0..share + 1).map(mapping).collect();
        for file in &files[..share] {
            let id = images.resolve(own, file, None).unwrap();
            images.keep(id);
        }
        assert!(matches!(images.resolve(own, &files[share], None), Err(ImageError::Share { .. })));
        assert_eq!((images.refused, images.evicted), (1, 0));
        assert!(images.resolve(own, &files[0], None).is_ok(), "a known one needs no room");
        // As if another process had brought them.
        let room = images.brought.remove(&own).unwrap();
        images.brought.insert(NOBODY, room);
        assert!(images.resolve(own, &files[share], None).is_ok());
    }
}
