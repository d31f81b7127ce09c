//! Names of threads by tid: the runtime's where it gave one, else the kernel's.

use foldhash::HashMap;
use perfusion_model::event::{MonotonicNs, ThreadId};
use perfusion_model::labels::NameId;
use perfusion_model::text::{COMM_BYTES, clean, whole_text};
use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;

/// A sample may still have a thread's previous name for so long after the rename. The rename is
/// reported just before it is done.
const RENAMING_NS: u64 = 1_000_000;

/// Most names that samples of other kinds are told apart by.
const MAX_IDS: usize = 1 << 16;

/// A command name without its padding. The kernel cuts names at 15 bytes, also in the middle of a
/// character: what is left of that is left out.
#[must_use]
pub(crate) fn comm_text(comm: &[u8; 16]) -> Cow<'_, str> {
    let end = comm.iter().position(|&byte| byte == 0).unwrap_or(comm.len());
    whole_text(comm.get(..end).unwrap_or_default())
}

/// Whether the kernel's name `comm` is what it keeps of `name`.
#[must_use]
pub(crate) fn is_cut_of(comm: &str, name: &str) -> bool {
    // A character has four bytes at most.
    comm == name
        || comm.len() + 3 >= COMM_BYTES && name.len() > comm.len() && name.starts_with(comm)
}

/// A name as it was given, and as it is shown: control characters would do harm in terminals.
#[derive(Clone)]
struct ShownName {
    given: Arc<str>,
    shown: Arc<str>,
}

impl ShownName {
    fn of(given: &str) -> Self {
        let as_given: Arc<str> = given.into();
        let shown = match clean(given) {
            Cow::Borrowed(_) => Arc::clone(&as_given),
            Cow::Owned(cleaned) => cleaned.into(),
        };
        Self { given: as_given, shown }
    }
}

/// What the kernel calls a thread.
struct KernelName {
    name: ShownName,
    /// Its name before, where no record has told of the new one yet.
    told: Option<ShownName>,
    /// Its name before the last rename, and when that was.
    before: Option<(Arc<str>, MonotonicNs)>,
    /// It is the name of the thread that made it.
    inherited: bool,
}

impl KernelName {
    fn of(name: ShownName) -> Self {
        Self { name, told: None, before: None, inherited: false }
    }
}

/// What a runtime calls a thread.
struct ManagedName {
    /// The process whose runtime said so: of a thread whose id is another process's by now it says
    /// nothing.
    pid: u32,
    name: ShownName,
    /// What the kernel called the thread then. Once it calls it otherwise, the name is one that the
    /// thread had before.
    comm: Option<Arc<str>>,
}

/// Names of all threads of a recording. A thread's id that is used again takes the new thread's
/// name.
#[derive(Default)]
pub(crate) struct ThreadNames {
    kernel: HashMap<u32, KernelName>,
    managed: HashMap<u32, ManagedName>,
    ids: HashMap<Arc<str>, NameId>,
    texts: HashMap<NameId, Arc<str>>,
    last_id: u32,
}

impl ThreadNames {
    /// The kernel's name of `tid` as a record tells it.
    pub(crate) fn kernel(&mut self, tid: u32, name: &str) {
        match self.kernel.get_mut(&tid) {
            Some(known) if *known.name.given == *name => {
                (known.told, known.inherited) = (None, false)
            }
            _ => drop(self.kernel.insert(tid, KernelName::of(ShownName::of(name)))),
        }
    }

    /// The kernel's name of `tid` where it was sampled.
    pub(crate) fn sampled(&mut self, tid: u32, name: &str) {
        match self.kernel.get_mut(&tid) {
            Some(known) if *known.name.given == *name => {}
            Some(known) => {
                let before = std::mem::replace(&mut known.name, ShownName::of(name));
                known.inherited = false;
                known.told.get_or_insert(before);
            }
            None => drop(self.kernel.insert(tid, KernelName::of(ShownName::of(name)))),
        }
    }

    /// Whether a sample of `at` with this kernel's name says nothing new: the name is known, or was
    /// the thread's until that moment.
    #[must_use]
    pub(crate) fn is_known(&self, tid: u32, name: &str, at: MonotonicNs) -> bool {
        self.kernel.get(&tid).is_some_and(|known| {
            *known.name.given == *name
                || known.before.as_ref().is_some_and(|(before, renamed)| {
                    **before == *name && at.0 <= renamed.0.saturating_add(RENAMING_NS)
                })
        })
    }

    /// The kernel calls the thread `to` from now on, and has called it `from`.
    pub(crate) fn renamed(&mut self, tid: u32, from: &str, to: &str, at: MonotonicNs) {
        let known = self.kernel.entry(tid).or_insert_with(|| KernelName::of(ShownName::of(from)));
        if *known.name.given != *to {
            *known =
                KernelName { before: Some((from.into(), at)), ..KernelName::of(ShownName::of(to)) };
        }
        (known.told, known.inherited) = (None, false);
    }

    /// Whether the kernel's name of the thread may be a part of one that nobody has told.
    #[must_use]
    pub(crate) fn may_be_cut(&self, thread: ThreadId) -> bool {
        let comm = self.comm(thread.tid);
        let is_told = |managed: &ManagedName| {
            managed.pid == thread.pid && is_cut_of(comm, &managed.name.given)
        };
        comm.len() + 3 >= COMM_BYTES && !self.managed.get(&thread.tid).is_some_and(is_told)
    }

    /// Whether the thread has had no other name than that of the thread that made it.
    #[must_use]
    pub(crate) fn is_inherited(&self, tid: u32) -> bool {
        self.kernel.get(&tid).is_some_and(|known| known.inherited)
    }

    /// The thread is about to become another program, which the kernel calls `name`: that is not
    /// what it was called until now. A sample may have met it under that name already, for the
    /// kernel gives it before it tells of it (`begin_new_exec`, fs/exec.c).
    pub(crate) fn becomes(&mut self, tid: u32, name: &str) {
        if let Some(known) = self.kernel.get_mut(&tid).filter(|known| *known.name.given == *name)
            && let Some(told) = known.told.take()
        {
            known.name = told;
        }
    }

    /// The runtime's name of its `thread`: not cut to 15 bytes. Answers what the thread was called
    /// until now, where that was another name: neither what the kernel keeps of this one, nor
    /// nothing.
    pub(crate) fn managed(&mut self, thread: ThreadId, name: &str) -> Option<Arc<str>> {
        let before = self.name_of(thread).cloned();
        let comm = self.kernel.get(&thread.tid).map(|known| Arc::clone(&known.name.given));
        let is_told = |comm: &Arc<str>| is_cut_of(comm, name);
        let before = before.filter(|before| {
            !is_told(&before.given)
                && !comm.as_ref().is_some_and(is_told)
                && !self.is_inherited(thread.tid)
        });
        self.managed
            .insert(thread.tid, ManagedName { pid: thread.pid, name: ShownName::of(name), comm });
        before.map(|before| before.shown)
    }

    /// `tid` is a new thread's, made by the thread `parent`, whose name it has until it takes
    /// another (`dup_task_struct`, kernel/fork.c): one that ends before it is sampled tells no
    /// other.
    pub(crate) fn forked(&mut self, parent: u32, tid: u32) {
        self.managed.remove(&tid);
        if let Some(name) = self.kernel.get(&parent).map(|known| known.name.clone()) {
            self.kernel.insert(tid, KernelName { inherited: true, ..KernelName::of(name) });
        }
    }

    /// The thread has become another program, which the kernel calls `name`.
    pub(crate) fn became(&mut self, tid: u32, name: &str) {
        self.managed.remove(&tid);
        self.kernel(tid, name);
    }

    /// Forgets all threads but these, and all ids of names but these.
    pub(crate) fn keep(&mut self, alive: &HashSet<u32>, ids: &HashSet<NameId>) {
        self.kernel.retain(|tid, _| alive.contains(tid));
        self.managed.retain(|tid, _| alive.contains(tid));
        self.ids.retain(|_, id| ids.contains(id));
        self.texts.retain(|id, _| ids.contains(id));
    }

    /// What the kernel calls it; tells the runtime's own threads.
    #[must_use]
    pub(crate) fn comm(&self, tid: u32) -> &str {
        self.kernel.get(&tid).map_or("", |known| &known.name.given)
    }

    fn name_of(&self, thread: ThreadId) -> Option<&ShownName> {
        let kernel = self.kernel.get(&thread.tid).map(|known| &known.name);
        let is_valid = |managed: &&ManagedName| {
            let told_later = |comm: &ShownName| {
                managed.comm.as_ref().is_some_and(|told_with| *told_with != comm.given)
                    && !is_cut_of(&comm.given, &managed.name.given)
            };
            managed.pid == thread.pid && !kernel.is_some_and(told_later)
        };
        self.managed.get(&thread.tid).filter(is_valid).map(|managed| &managed.name).or(kernel)
    }

    /// What to show.
    #[must_use]
    pub(crate) fn shown(&self, thread: ThreadId) -> Option<Arc<str>> {
        self.name_of(thread).map(|name| Arc::clone(&name.shown))
    }

    /// What to show of a thread that the kernel has called `comm`: the runtime's name if that is
    /// what the kernel has cut.
    #[must_use]
    pub(crate) fn completed(&self, thread: ThreadId, comm: &str) -> Arc<str> {
        let managed = self.managed.get(&thread.tid).filter(|managed| managed.pid == thread.pid);
        let is_told =
            |name: &ShownName| is_cut_of(comm, &name.given) || is_cut_of(comm, &name.shown);
        match managed.filter(|managed| is_told(&managed.name)) {
            Some(managed) => Arc::clone(&managed.name.shown),
            None => clean(comm).into(),
        }
    }

    /// Stands for what the thread is called now.
    pub(crate) fn id(&mut self, thread: ThreadId) -> NameId {
        let Some(shown) = self.shown(thread) else { return NameId::default() };
        if let Some(id) = self.ids.get(&shown) {
            return *id;
        }
        if self.ids.len() >= MAX_IDS {
            return NameId::default();
        }
        self.last_id = self.last_id.wrapping_add(1).max(1);
        let id = NameId(self.last_id);
        self.texts.insert(id, Arc::clone(&shown));
        self.ids.insert(shown, id);
        id
    }

    /// The name.
    #[must_use]
    pub(crate) fn text(&self, id: NameId) -> Option<Arc<str>> {
        self.texts.get(&id).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::{NameId, ThreadNames, comm_text};
    use perfusion_model::event::{MonotonicNs, ThreadId};
    use std::collections::HashSet;

    fn thread(tid: u32) -> ThreadId {
        ThreadId { pid: 7, tid }
    }

    #[test]
    fn a_new_thread_has_its_makers_name_until_it_has_its_own() {
        let mut names = ThreadNames::default();
        names.kernel(7, "maker");
        names.kernel(8, "who had this id before");
        names.managed(thread(8), "and was managed");
        names.forked(7, 8);
        let shown =
            |names: &ThreadNames, tid| names.shown(thread(tid)).map(|name| name.to_string());
        assert_eq!(shown(&names, 8).as_deref(), Some("maker"));
        names.kernel(8, "own");
        assert_eq!(
            (shown(&names, 7).as_deref(), shown(&names, 8).as_deref()),
            (Some("maker"), Some("own"))
        );
        names.became(8, "program");
        assert_eq!(shown(&names, 8).as_deref(), Some("program"));
        // Of a maker nobody knows nothing is known.
        names.forked(9, 10);
        assert_eq!(shown(&names, 10), None);
    }

    #[test]
    fn a_runtime_names_no_thread_of_another_process() {
        let mut names = ThreadNames::default();
        names.kernel(8, "kernel's");
        names.managed(ThreadId { pid: 6, tid: 8 }, "of one that had a thread with this id");
        assert_eq!(names.shown(thread(8)).as_deref(), Some("kernel's"));
        names.managed(thread(8), "own");
        assert_eq!(names.shown(thread(8)).as_deref(), Some("own"));
    }

    #[test]
    fn a_sample_between_a_programs_naming_and_its_record_does_not_rename_what_was() {
        let mut names = ThreadNames::default();
        let shown = |names: &ThreadNames| names.shown(thread(8)).map(|name| name.to_string());
        names.sampled(8, "before");
        names.sampled(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("after"));
        names.becomes(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("before"));
        names.became(8, "after");
        assert_eq!(shown(&names).as_deref(), Some("after"));
        // It had taken that name itself.
        names.sampled(8, "renamed");
        names.kernel(8, "renamed");
        names.becomes(8, "renamed");
        assert_eq!(shown(&names).as_deref(), Some("renamed"));
    }

    fn comm(name: &str) -> [u8; 16] {
        let mut comm = [0; 16];
        let bytes = &name.as_bytes()[..name.len().min(15)];
        comm[..bytes.len()].copy_from_slice(bytes);
        comm
    }

    #[test]
    fn a_name_that_the_kernel_cut_in_a_character_ends_before_it() {
        for (name, text) in [
            ("Обработчик-заказов", "Обработ"),
            ("日本語スレッド名前", "日本語スレ"),
            ("😀😀😀😀", "😀😀😀"),
            ("plain-ascii-name-longer-than-15", "plain-ascii-nam"),
            ("short", "short"),
        ] {
            assert_eq!(comm_text(&comm(name)), text);
        }
        // Not cut, but wrong: said so.
        let mut wrong = comm("ab");
        wrong[2] = 0xd0;
        assert_eq!(comm_text(&wrong), "ab\u{fffd}");
    }

    #[test]
    fn the_runtimes_name_completes_the_kernels_and_ends_with_it() {
        let (mut names, long) = (ThreadNames::default(), "Обработчик-заказов");
        let shown = |names: &ThreadNames| names.shown(thread(8)).map(|name| name.to_string());
        names.renamed(8, "dotnet", &comm_text(&comm(long)), MonotonicNs(5));
        assert_eq!(shown(&names).as_deref(), Some("Обработ"));
        assert_eq!(names.managed(thread(8), long), None, "no other name than before");
        assert_eq!(shown(&names).as_deref(), Some(long));
        assert_eq!(&*names.completed(thread(8), "Обработ"), long);
        assert_eq!(&*names.completed(thread(8), "job-A"), "job-A", "what it was called before");
        names.renamed(8, "Обработ", "job-A", MonotonicNs(9));
        assert_eq!(shown(&names).as_deref(), Some("job-A"));
        // The first thread's name is the process's to the kernel, whatever the runtime calls it.
        names.kernel(7, "dotnet");
        let first = ThreadId { pid: 7, tid: 7 };
        assert_eq!(names.managed(first, "Main").as_deref(), Some("dotnet"));
        assert_eq!(names.shown(first).as_deref(), Some("Main"));
        assert_eq!(names.managed(first, "Other").as_deref(), Some("Main"));
    }

    #[test]
    fn a_sample_that_was_taken_while_its_thread_was_renamed_does_not_rename_it_back() {
        let mut names = ThreadNames::default();
        names.renamed(8, "A", "B", MonotonicNs(5_000));
        assert!(
            names.is_known(8, "B", MonotonicNs(0)) && names.is_known(8, "A", MonotonicNs(5_100))
        );
        assert!(
            !names.is_known(8, "A", MonotonicNs(5_000_000))
                && !names.is_known(8, "C", MonotonicNs(5_100))
        );
    }

    #[test]
    fn control_characters_of_names_are_shown_as_text() {
        let mut names = ThreadNames::default();
        names.kernel(8, "a\nb\u{1b}[31m");
        assert_eq!(names.shown(thread(8)).as_deref(), Some("a\\u{a}b\\u{1b}[31m"));
        names.managed(thread(9), "line\nbreak");
        assert_eq!(names.shown(thread(9)).as_deref(), Some("line\\u{a}break"));
        assert_eq!(&*names.completed(thread(10), "x\ty"), "x\\u{9}y");
    }

    #[test]
    fn ids_of_names_that_nothing_is_counted_by_are_forgotten() {
        let mut names = ThreadNames::default();
        names.kernel(8, "A");
        let a = names.id(thread(8));
        names.renamed(8, "A", "B", MonotonicNs(1));
        let b = names.id(thread(8));
        assert_eq!((names.text(a).as_deref(), names.text(b).as_deref()), (Some("A"), Some("B")));
        assert_eq!((names.id(thread(8)), names.id(thread(9))), (b, NameId::default()));
        names.keep(&HashSet::from([8]), &HashSet::from([b]));
        assert_eq!((names.text(a), names.text(b).as_deref()), (None, Some("B")));
    }
}
