//! Owners of locks, on .NET 11 and newer. Their events number a thread as managed code does
//! (`Lock.ThreadId`, src/coreclr/System.Private.CoreLib/src/System/Threading/Lock.CoreCLR.cs of
//! dotnet/runtime). The runtime's own list of its threads says which thread has the number.
//!
//! A thread has its number until its end. Then another one may get it, and the list is read after
//! the wait. So a thread is the owner only when it surely had the number when the wait began. It
//! had it already: it was in a list from before, or began after the last list without it and before
//! the wait. And it had it still: it was in all lists up to one from after the wait's beginning, or
//! in the last one and ended later. Of any other wait the owner is not known.

use super::namespace::NamespaceThreads;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::backoff::Backoff;
use perfusion_model::event::MonotonicNs;
use std::collections::HashMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// The first version whose events number owners so.
pub(super) const FIRST_VERSION: u16 = 11;
/// A list is read no more often than this, and after failures less and less often ...
const READ_AGAIN_AFTER: Duration = Duration::from_millis(2);
/// ... down to this.
const READ_AGAIN_AT_LAST: Duration = Duration::from_secs(1);
/// A long list is read less often: twenty times what it takes to read a thread of it.
const READ_AGAIN_BY_LENGTH: Duration = Duration::from_micros(20);
/// A wait begins a moment after its owner was noted, and a thread gives its number back a moment
/// before its end.
const MARGIN_NS: u64 = 10_000_000;
/// Most beginnings and ends of threads that are remembered of one process.
const MOST_TIMES: usize = 4096;
/// They are forgotten after this when there are many.
const FORGET_NS: u64 = 10_000_000_000;

/// A thread of a runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ManagedThread {
    /// The number that managed code has for it.
    pub id: u32,
    /// Its id, as its process sees it.
    pub tid: u32,
}

/// The list of the threads of one runtime.
pub trait ThreadList: Debug + Send {
    /// All threads that are in it now; `None` when it cannot be read.
    fn read(&mut self) -> Option<Vec<ManagedThread>>;
}

/// Finds such lists.
pub trait ThreadLists: Debug + Send {
    /// The list of the runtime of this process; `None` when there is none that can be read.
    fn open(&self, target: &ProcessHandle) -> Option<Box<dyn ThreadList>>;
}

/// Who has a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NumberHolder {
    /// The thread, as its process sees it.
    tid: u32,
    /// The last list without it was read by then.
    not_before: Option<MonotonicNs>,
    /// The first list with it was read by then, and it was in all others since.
    since: MonotonicNs,
    /// It had the number when the reading of the last list began.
    until: MonotonicNs,
}

/// When a thread began and ended, as far as that was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ThreadLife {
    started: Option<MonotonicNs>,
    ended: Option<MonotonicNs>,
}

impl NumberHolder {
    /// True when the thread surely had the number at `began`.
    fn had_it(&self, began: MonotonicNs, life: ThreadLife) -> bool {
        let was_listed = self.since.0.saturating_add(MARGIN_NS) <= began.0
            // Else it is another thread with the same id.
            && life.started.is_none_or(|started| started <= self.since)
            && life.ended.is_none_or(|ended| ended <= self.since || ended > self.until);
        let had_begun = life.started.is_some_and(|started| {
            started <= began && self.not_before.is_some_and(|not_before| started > not_before)
        });
        let ended_later = life.ended.is_some_and(|ended| {
            ended > self.until && began.0.saturating_add(MARGIN_NS) <= ended.0
        });
        (was_listed || had_begun) && (self.until >= began || ended_later)
    }
}

/// Who has which number, by the lists read so far.
#[derive(Debug, Default)]
struct ThreadNumbers {
    holders: HashMap<u32, NumberHolder>,
    /// Those that the last lists did not have any more.
    former: HashMap<u32, NumberHolder>,
    /// When the reading of the last list began, and when it had been read.
    last: Option<(MonotonicNs, MonotonicNs)>,
}

impl ThreadNumbers {
    /// A list was read between these moments.
    fn take(&mut self, list: &[ManagedThread], began: MonotonicNs, ended: MonotonicNs) {
        let mut before = std::mem::take(&mut self.holders);
        let mut twice = Vec::new();
        for &ManagedThread { id, tid } in list {
            let known = before.get(&id).filter(|holder| holder.tid == tid);
            let new = || (self.last.map(|(_, ended)| ended), ended);
            let (not_before, since) =
                known.map_or_else(new, |holder| (holder.not_before, holder.since));
            let holder = NumberHolder { tid, not_before, since, until: began };
            if self.holders.insert(id, holder).is_some() {
                twice.push(id);
            }
        }
        // Of two with one number nobody knows which it is.
        for id in twice {
            self.holders.remove(&id);
        }
        // One that is still there under the same number is none.
        let has_ended = |id: &u32, holder: &mut NumberHolder| {
            self.holders.get(id).is_none_or(|now| now.tid != holder.tid)
        };
        before.retain(has_ended);
        if self.former.len() + before.len() > MOST_TIMES {
            self.former.clear();
        }
        self.former.extend(before);
        self.last = Some((began, ended));
    }

    /// Whether a list was read since.
    fn is_read_since(&self, time: MonotonicNs) -> bool {
        self.last.is_some_and(|(began, _)| began >= time)
    }

    /// The thread that had the number at `began`, as its process sees it. `life` tells what was
    /// seen of a thread.
    fn holder(
        &self,
        id: u32,
        began: MonotonicNs,
        mut life: impl FnMut(u32) -> ThreadLife,
    ) -> Option<u32> {
        let both = [&self.holders, &self.former];
        let mut both = both.into_iter().filter_map(|holders| holders.get(&id));
        both.find(|holder| holder.had_it(began, life(holder.tid))).map(|holder| holder.tid)
    }
}

/// What is known of the threads of one process.
#[derive(Debug)]
pub(super) struct LockOwners {
    /// The runtime's events number threads so.
    is_wanted: bool,
    list: Option<Box<dyn ThreadList>>,
    numbers: ThreadNumbers,
    next_read: Option<Instant>,
    pause: Backoff,
    /// What was seen of threads, by their ids in the initial namespace.
    lives: HashMap<u32, ThreadLife>,
}

impl Default for LockOwners {
    fn default() -> Self {
        Self {
            is_wanted: false,
            list: None,
            numbers: ThreadNumbers::default(),
            next_read: None,
            pause: Backoff::new(READ_AGAIN_AFTER, READ_AGAIN_AT_LAST),
            lives: HashMap::new(),
        }
    }
}

impl LockOwners {
    /// The runtime's events number threads so. What is known of its threads from now on tells who
    /// had a number before a wait.
    pub(super) fn expect(&mut self) {
        self.is_wanted = true;
    }

    /// A thread of the process began, `tid` in the initial namespace.
    pub(super) fn started(&mut self, tid: u32, time: MonotonicNs) {
        self.saw(tid, time, ThreadLife { started: Some(time), ended: None });
    }

    /// A thread of the process ended.
    pub(super) fn ended(&mut self, tid: u32, time: MonotonicNs) {
        let before = self.lives.get(&tid).copied().unwrap_or_default();
        self.saw(tid, time, ThreadLife { ended: Some(time), ..before });
    }

    fn saw(&mut self, tid: u32, time: MonotonicNs, life: ThreadLife) {
        if !self.is_wanted {
            return;
        }
        if self.lives.len() >= MOST_TIMES {
            self.lives.retain(|_, life| {
                let last = life.ended.or(life.started);
                last.is_some_and(|last| time.0.saturating_sub(last.0) < FORGET_NS)
            });
        }
        // What is not remembered only makes an owner unknown, unless it is another thread's.
        if self.lives.len() >= MOST_TIMES {
            self.numbers = ThreadNumbers::default();
            self.lives.clear();
        }
        self.lives.insert(tid, life);
    }

    /// Reads the first list, once there can be one.
    pub(super) fn look(
        &mut self,
        lists: Option<&dyn ThreadLists>,
        threads: &mut NamespaceThreads,
        target: &ProcessHandle,
    ) {
        if self.is_wanted && self.numbers.last.is_none() {
            self.read(lists, threads, target);
        }
    }

    /// The thread that had this number at `began`, by its id in the initial namespace.
    pub(super) fn owner(
        &mut self,
        lists: Option<&dyn ThreadLists>,
        threads: &mut NamespaceThreads,
        target: &ProcessHandle,
        (id, began): (u32, MonotonicNs),
    ) -> Option<u32> {
        if !self.numbers.is_read_since(began) {
            self.read(lists, threads, target);
        }
        let lives = &self.lives;
        let holder = self.numbers.holder(id, began, |tid| {
            let outer = threads.outer(target, tid);
            outer.and_then(|outer| lives.get(&outer).copied()).unwrap_or_default()
        });
        if holder.is_none() {
            let (now, before) = (self.numbers.holders.get(&id), self.numbers.former.get(&id));
            tracing::debug!(pid = target.pid(), id, ?began, ?now, ?before, "no owner of a lock");
        }
        threads.outer(target, holder?)
    }

    /// Reads the list, when it is time to.
    fn read(
        &mut self,
        lists: Option<&dyn ThreadLists>,
        threads: &mut NamespaceThreads,
        target: &ProcessHandle,
    ) {
        let is_due = self.next_read.is_none_or(|next| Instant::now() >= next);
        let Some(lists) = lists.filter(|_| is_due) else { return };
        let began = MonotonicNs::now();
        let mut list = self.list.take().or_else(|| lists.open(target));
        let read = list.as_mut().and_then(|list| list.read());
        let pause = match &read {
            Some(read) => {
                self.numbers.take(read, began, MonotonicNs::now());
                // Translated while they are there.
                for thread in read {
                    threads.outer(target, thread.tid);
                }
                self.list = list;
                self.pause.reset();
                let length = u32::try_from(read.len()).unwrap_or(u32::MAX);
                READ_AGAIN_AFTER.max(READ_AGAIN_BY_LENGTH.saturating_mul(length))
            }
            None => self.pause.failed(),
        };
        self.next_read = Some(Instant::now() + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::{
        LockOwners, MARGIN_NS, MOST_TIMES, ManagedThread, MonotonicNs, NamespaceThreads,
        ProcessHandle, ThreadLife, ThreadList, ThreadLists, ThreadNumbers,
    };

    const fn ms(ms: u64) -> MonotonicNs {
        MonotonicNs(ms * 1_000_000)
    }

    fn list(threads: &[(u32, u32)]) -> Vec<ManagedThread> {
        threads.iter().map(|&(id, tid)| ManagedThread { id, tid }).collect()
    }

    fn numbers(lists: &[(u64, &[(u32, u32)])]) -> ThreadNumbers {
        let mut numbers = ThreadNumbers::default();
        for &(at, threads) in lists {
            numbers.take(&list(threads), ms(at), ms(at + 1));
        }
        numbers
    }

    /// The holder of a number at a time, when its thread began and ended then.
    fn holder(
        numbers: &ThreadNumbers,
        id: u32,
        time: u64,
        [started, ended]: [Option<u64>; 2],
    ) -> Option<u32> {
        let life = ThreadLife { started: started.map(ms), ended: ended.map(ms) };
        numbers.holder(id, ms(time), |_| life)
    }

    #[test]
    fn a_number_is_its_threads_between_two_lists_that_say_so() {
        let numbers = numbers(&[(100, &[(1, 7)]), (200, &[(1, 7), (2, 8)]), (300, &[(1, 7)])]);
        let at = |time| holder(&numbers, 1, time, [None; 2]);
        assert_eq!(
            [50, 101, 111, 250, 300, 301].map(at),
            [None, None, Some(7), Some(7), Some(7), None]
        );
        assert_eq!(holder(&numbers, 2, 250, [None; 2]), None, "it is gone");
        assert!(numbers.is_read_since(ms(300)) && !numbers.is_read_since(ms(302)));
    }

    #[test]
    fn a_number_that_was_another_threads_is_nobodys_until_it_is_surely_the_new_ones() {
        let numbers = numbers(&[(100, &[(1, 7)]), (200, &[(1, 8)])]);
        let at = |time, started| holder(&numbers, 1, time, [started, None]);
        assert_eq!(at(150, None), None);
        assert_eq!(at(150, Some(160)), None, "it began after the wait");
        assert_eq!(at(170, Some(160)), Some(8));
        assert_eq!(at(170, Some(90)), None, "it was there before it had the number");
    }

    #[test]
    fn a_thread_that_has_ended_had_its_number_until_shortly_before() {
        let numbers = numbers(&[(100, &[(1, 7)]), (200, &[(1, 7), (2, 8)]), (300, &[(2, 9)])]);
        let at = |time, ended| holder(&numbers, 1, time, [None, Some(ended)]);
        assert_eq!([at(220, 250), at(240, 250)], [Some(7), Some(7)]);
        assert_eq!([at(245, 250), at(260, 250)], [None, None]);
        assert_eq!(at(190, 150), None, "another thread with the same id");
        let life = |tid| match tid {
            8 => ThreadLife { ended: Some(ms(250)), ..ThreadLife::default() },
            _ => ThreadLife { started: Some(ms(260)), ended: None },
        };
        let at = |time| numbers.holder(2, ms(time), life);
        assert_eq!([205, 215, 255, 270].map(at), [None, Some(8), None, Some(9)]);
    }

    #[test]
    fn a_threads_id_that_is_used_again_is_another_thread() {
        let numbers = numbers(&[(100, &[(1, 7)]), (200, &[(1, 7)])]);
        assert_eq!(holder(&numbers, 1, 150, [Some(120), None]), None);
        assert_eq!(holder(&numbers, 1, 150, [Some(90), None]), Some(7));
    }

    #[test]
    fn two_threads_with_one_number_have_none() {
        let numbers =
            numbers(&[(100, &[(1, 7), (1, 8), (2, 9)]), (200, &[(1, 7), (1, 8), (2, 9)])]);
        let at = |id| holder(&numbers, id, 150, [None; 2]);
        assert_eq!([1, 2, 3].map(at), [None, Some(9), None]);
    }

    /// A runtime in which this thread has the number 1.
    #[derive(Debug)]
    struct OneThread;

    impl ThreadList for OneThread {
        fn read(&mut self) -> Option<Vec<ManagedThread>> {
            Some(list(&[(1, std::process::id())]))
        }
    }

    impl ThreadLists for OneThread {
        fn open(&self, _: &ProcessHandle) -> Option<Box<dyn ThreadList>> {
            Some(Box::new(Self))
        }
    }

    #[test]
    fn a_list_is_read_again_for_a_wait_that_it_cannot_tell_of() {
        let me = std::process::id();
        let target = ProcessHandle::open(me).unwrap();
        let (mut owners, mut threads) = (LockOwners::default(), NamespaceThreads::default());
        let lists: &dyn ThreadLists = &OneThread;
        owners.look(Some(lists), &mut threads, &target);
        assert_eq!(owners.numbers.last, None, "nobody asked");
        owners.expect();
        owners.look(None, &mut threads, &target);
        assert_eq!(owners.numbers.last, None);
        owners.look(Some(lists), &mut threads, &target);
        let (_, first) = owners.numbers.last.unwrap();
        std::thread::sleep(std::time::Duration::from_nanos(2 * MARGIN_NS));
        let mut at = |time| owners.owner(Some(lists), &mut threads, &target, (1, time));
        assert_eq!(at(first), None);
        assert_eq!(at(MonotonicNs(first.0 + MARGIN_NS)), Some(me));
    }

    #[test]
    fn threads_that_come_and_go_without_end_make_owners_unknown() {
        let mut owners = LockOwners::default();
        owners.started(1, ms(1));
        assert!(owners.lives.is_empty());
        owners.expect();
        owners.numbers.take(&list(&[(1, 7)]), ms(1), ms(2));
        for tid in 0..3 * MOST_TIMES as u32 {
            owners.started(tid, ms(3));
            owners.ended(tid, ms(4));
            assert!(owners.lives.len() <= MOST_TIMES);
        }
        assert!(owners.numbers.holders.is_empty());
    }
}
