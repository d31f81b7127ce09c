//! Threads that change their names. A rename cuts a thread's account as the end of a window cuts
//! all accounts: times until then belong to the old name, exactly. All stretches under one name are
//! one account, so that few samples do not stand for many short ones.
//!
//! A rename may come without its times (very many in a second, a full ring). Then the thread's
//! whole time is shared among its names by its samples and kept waits, each of which came with the
//! name.

use super::account::{NamedAccount, ThreadAccount, no_times};
use super::estimate::WaitTimes;
use super::{ThreadAccounts, ThreadRow};
use perfusion_model::event::{ThreadId, ThreadSnapshot, ThreadTimes};
use perfusion_model::labels::OTHER;
use std::sync::Arc;

/// Names of one thread that are kept apart in a window; what comes after is under one name.
const MAX_OF_THREAD: usize = 1024;
/// The most names of all threads together.
const MAX_OF_ALL: usize = 1 << 16;

impl ThreadAccounts {
    /// The thread was called `name` until now, with these totals since the recording began; `None`
    /// where these are not known.
    pub fn renamed(&mut self, id: ThreadId, name: &Arc<str>, until: Option<&ThreadSnapshot>) {
        let tid = id.tid;
        let known = self.threads.get(&tid).is_some_and(|thread| thread.id == id);
        let Some(ThreadSnapshot { times, progress, .. }) = until else {
            if let Some(thread) = self.threads.get_mut(&tid).filter(|_| known) {
                self.names += usize::from(thread.close_account(name, self.names, None));
            }
            return;
        };
        // Its end was told.
        if self.counted.has_ended(times) {
            return;
        }
        let (wait, counted) = self.counted.wait_in(times, *progress);
        let mut thread = self.threads.remove(&tid).filter(|_| known).unwrap_or_default();
        thread.id = id;
        let open = thread.waits.open();
        let open = open.filter(|open| wait.is_some_and(|(start, ..)| start == open.start));
        thread.waits.slice_open(*progress, times.since, counted);
        let rest = self.counted.not_counted(times);
        self.counted.count(&rest, wait);
        self.names += usize::from(thread.close_account(name, self.names, Some(rest)));
        if let Some(open) = open {
            thread.waits.begin(open);
        }
        self.threads.insert(tid, thread);
    }

    /// A rename of the thread was missed: its time is shared by its samples.
    pub fn missed_rename(&mut self, id: ThreadId) {
        if let Some(thread) = self.threads.get_mut(&id.tid).filter(|thread| thread.id == id) {
            thread.shared = true;
        }
    }

    /// Says what the threads are called now that had other names in this window.
    pub fn name_renamed(&mut self, name: impl Fn(ThreadId) -> Option<Arc<str>>) {
        for thread in self.threads.values_mut().filter(|thread| !thread.named.is_empty()) {
            thread.name = name(thread.id);
        }
    }

    /// Says what one of these threads is called now.
    pub fn name_one(&mut self, id: ThreadId, name: impl FnOnce() -> Option<Arc<str>>) {
        let thread = self.threads.get_mut(&id.tid).filter(|thread| thread.id == id);
        if let Some(thread) = thread.filter(|thread| !thread.named.is_empty()) {
            thread.name = name();
        }
    }
}

impl ThreadAccount {
    /// Puts all that was counted since the last rename under `name`, and `times` with it; without
    /// them the thread's time is shared. True when the name is one more.
    fn close_account(&mut self, name: &Arc<str>, names: usize, times: Option<ThreadTimes>) -> bool {
        let account = Self {
            id: self.id,
            on_cpu: std::mem::take(&mut self.on_cpu),
            waits: self.waits.take_ended(),
            collected: std::mem::take(&mut self.collected),
            ..Self::default()
        };
        if times.is_none() && account.is_empty() {
            return false;
        }
        self.shared |= times.is_none();
        let times = times.unwrap_or_else(|| no_times(self.id));
        if let Some(named) = self.named.iter_mut().find(|named| named.name == *name) {
            named.merge(account, &times);
            return false;
        }
        if self.named.len() < MAX_OF_THREAD && names < MAX_OF_ALL {
            self.named.push(NamedAccount { name: Arc::clone(name), account, times });
            return true;
        }
        match self.named.iter_mut().find(|named| &*named.name == OTHER) {
            Some(named) => named.merge(account, &times),
            None => self.named.push(NamedAccount { name: OTHER.into(), account, times }),
        }
        false
    }

    fn is_empty(&self) -> bool {
        self.on_cpu.is_empty() && self.collected.on_cpu.is_empty() && self.waits.none_ended()
    }

    /// Rows of the thread, under each of its names.
    pub(super) fn rows_by_name(mut self, times: &ThreadTimes, rows: &mut Vec<ThreadRow>) {
        let mut named = std::mem::take(&mut self.named);
        if named.is_empty() {
            return self.all_rows(times, rows);
        }
        let shared = self.shared;
        match named.iter_mut().find(|named| Some(&named.name) == self.name.as_ref()) {
            Some(named) => named.merge(self, times),
            None => {
                let name = self.name.clone().unwrap_or_else(|| OTHER.into());
                named.push(NamedAccount { name, account: self, times: *times });
            }
        }
        for NamedAccount { times: own, .. } in &mut named {
            (own.since, own.left_out) = (times.since, times.left_out);
        }
        if shared {
            share(&mut named);
        }
        for NamedAccount { name, mut account, times } in named {
            account.name = Some(name);
            account.all_rows(&times, rows);
        }
    }
}

impl NamedAccount {
    fn merge(&mut self, other: ThreadAccount, times: &ThreadTimes) {
        let Self { account, times: own, .. } = self;
        account.on_cpu.merge(other.on_cpu);
        account.waits.merge(other.waits);
        account.collected.merge(other.collected);
        for (sum, more) in [
            (&mut own.oncpu_ns, times.oncpu_ns),
            (&mut own.runnable_ns, times.runnable_ns),
            (&mut own.stolen_ns, times.stolen_ns),
            (&mut own.blocked_ns, times.blocked_ns),
        ] {
            *sum = sum.saturating_add(more);
        }
    }
}

/// Shares the times of all accounts by what was sampled in each.
fn share(named: &mut [NamedAccount]) {
    let mut ran: Vec<f64> = named
        .iter()
        .map(|named| {
            (named.account.on_cpu.samples() + named.account.collected.on_cpu.samples()) as f64
        })
        .collect();
    if ran.iter().sum::<f64>() == 0.0 {
        ran = named
            .iter()
            .map(|named| named.account.on_cpu.ran_ns() + named.account.collected.on_cpu.ran_ns())
            .collect();
    }
    let waited = |part: fn(&WaitTimes) -> f64| {
        named.iter().map(|named| named.account.waits.estimated(part)).collect::<Vec<f64>>()
    };
    let (blocked, runnable) = (waited(|wait| wait.blocked_ns), waited(|wait| wait.runnable_ns));
    // What of its runnable time was stolen from it, it held a CPU in.
    for NamedAccount { times, .. } in named.iter_mut() {
        times.runnable_ns = times.runnable_ns.saturating_sub(times.stolen_ns);
    }
    share_column(named, &ran, |times| &mut times.oncpu_ns);
    share_column(named, &ran, |times| &mut times.stolen_ns);
    share_column(named, &blocked, |times| &mut times.blocked_ns);
    share_column(named, &runnable, |times| &mut times.runnable_ns);
    for NamedAccount { times, .. } in named.iter_mut() {
        times.runnable_ns = times.runnable_ns.saturating_add(times.stolen_ns);
    }
}

/// Shares a column's sum in proportion to `parts`; where these are all nothing it stays as it is.
fn share_column(
    named: &mut [NamedAccount],
    parts: &[f64],
    column: impl Fn(&mut ThreadTimes) -> &mut u64,
) {
    let all: f64 = parts.iter().sum();
    if all <= 0.0 {
        return;
    }
    let total: u64 =
        named.iter_mut().map(|named| *column(&mut named.times)).fold(0, u64::saturating_add);
    let (mut given, mut up_to) = (0, 0.0);
    for (NamedAccount { times, .. }, part) in named.iter_mut().zip(parts) {
        up_to += part;
        let until = if up_to >= all { total } else { (total as f64 * (up_to / all)) as u64 };
        let until = until.clamp(given, total);
        *column(times) = until - given;
        given = until;
    }
    // Rounding has left some of the last one's.
    if let Some(NamedAccount { times, .. }) = named.last_mut() {
        *column(times) += total - given;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ON_CPU, SLEEP, T, end};
    use super::super::{StackOrMarker, ThreadAccounts, ThreadRow};
    use super::*;
    use perfusion_model::event::{MonotonicNs, ThreadProgress};
    use perfusion_model::stack::StackId;

    fn name(text: &str) -> Arc<str> {
        text.into()
    }

    fn times(oncpu_ns: u64, blocked_ns: u64) -> ThreadTimes {
        ThreadTimes { oncpu_ns, blocked_ns, ..no_times(T) }
    }

    fn at(times: ThreadTimes, progress: ThreadProgress) -> ThreadSnapshot {
        ThreadSnapshot { times, at: MonotonicNs(0), progress }
    }

    fn cpu(rows: &[ThreadRow], name: Option<&str>) -> f64 {
        rows.iter().filter(|row| row.name.as_deref() == name).map(|row| row.cpu_ns).sum()
    }

    fn blocked(rows: &[ThreadRow], name: Option<&str>) -> f64 {
        rows.iter().filter(|row| row.name.as_deref() == name).map(|row| row.blocked_ns).sum()
    }

    #[test]
    fn what_a_thread_did_under_a_name_is_under_that_name_exactly() {
        let mut threads = ThreadAccounts::default();
        // Twenty stretches, of which one in five was sampled; the first name's are three times as
        // long.
        let mut total = 0;
        for stretch in 0..20 {
            let own = name(if stretch % 2 == 0 { "A" } else { "B" });
            if stretch % 5 == 0 {
                threads.cpu_sample(T, MonotonicNs(total), StackId(stretch % 2));
            }
            total += if stretch % 2 == 0 { 30 } else { 10 };
            threads.renamed(T, &own, Some(&at(times(total, 0), ON_CPU)));
        }
        total += 7;
        threads.name_renamed(|_| Some(name("end")));
        let rows = threads.finish(&[at(times(total, 0), ON_CPU)]);
        assert_eq!(
            [Some("A"), Some("B"), Some("end")].map(|name| cpu(&rows, name)),
            [300.0, 100.0, 7.0]
        );
        assert!(
            rows.iter().filter(|row| row.name.as_deref() != Some("end")).all(|row| row.place
                == StackOrMarker::Stack(StackId(u32::from(row.name.as_deref() == Some("B"))))),
            "{rows:?}"
        );
    }

    #[test]
    fn a_wait_in_which_another_thread_renames_this_one_is_split() {
        let mut threads = ThreadAccounts::default();
        threads.wait_start(T, MonotonicNs(10), StackId(5), SLEEP, 10, 1.0);
        let waiting = |blocked_ns| ThreadProgress::Waiting {
            start: MonotonicNs(10),
            blocked_ns,
            runnable_ns: 0,
            kept: true,
            new_thread: false,
            woken_throttled: false,
        };
        threads.renamed(T, &name("before"), Some(&at(times(10, 30), waiting(30))));
        threads.wait_end(&end(10, 100));
        threads.name_renamed(|_| Some(name("after")));
        let rows = threads.finish(&[at(times(15, 100), ON_CPU)]);
        let of = |name| (cpu(&rows, Some(name)), blocked(&rows, Some(name)));
        assert_eq!((of("before"), of("after")), ((10.0, 30.0), (5.0, 70.0)));
        assert!(
            rows.iter()
                .all(|row| row.blocked_ns == 0.0 || row.place == StackOrMarker::Stack(StackId(5))),
            "{rows:?}"
        );
    }

    #[test]
    fn renames_without_times_share_the_threads_time_by_its_samples() {
        let mut threads = ThreadAccounts::default();
        for n in 0..40 {
            let (own, stack) = if n % 4 == 0 { ("B", 2) } else { ("A", 1) };
            threads.cpu_sample(T, MonotonicNs(n), StackId(stack));
            threads.renamed(T, &name(own), None);
        }
        threads.name_renamed(|_| Some(name("A")));
        let rows = threads.finish(&[at(times(4_000, 11), ON_CPU)]);
        assert_eq!([Some("A"), Some("B")].map(|name| cpu(&rows, name)), [3_000.0, 1_000.0]);
        assert_eq!(rows.iter().map(|row| row.blocked_ns).sum::<f64>(), 11.0);
    }

    #[test]
    fn windows_with_renames_sum_to_the_whole_and_a_thread_without_has_no_name_of_its_own() {
        let mut threads = ThreadAccounts::default();
        threads.cpu_sample(T, MonotonicNs(1), StackId(1));
        let first = threads.cut(&[at(times(100, 0), ON_CPU)], &mut |stack| stack, false);
        assert_eq!(cpu(&first, None), 100.0);
        threads.renamed(T, &name("A"), Some(&at(times(130, 0), ON_CPU)));
        threads.name_one(T, || Some(name("B")));
        threads.thread_end(times(150, 0));
        let second = threads.cut(&[], &mut |stack| stack, false);
        assert_eq!([Some("A"), Some("B")].map(|name| cpu(&second, name)), [30.0, 20.0]);
        assert_eq!(threads.cut(&[], &mut |stack| stack, true), []);
    }

    #[test]
    fn a_name_for_each_task_does_not_grow_without_end() {
        let mut threads = ThreadAccounts::default();
        for n in 0..5_000 {
            threads.cpu_sample(T, MonotonicNs(n), StackId(1));
            threads.renamed(T, &name(&format!("task {n}")), Some(&at(times(n + 1, 0), ON_CPU)));
        }
        threads.name_renamed(|_| Some(name("end")));
        let rows = threads.finish(&[at(times(5_000, 0), ON_CPU)]);
        assert!(rows.len() <= MAX_OF_THREAD + 2, "{}", rows.len());
        assert_eq!(rows.iter().map(|row| row.cpu_ns).sum::<f64>(), 5_000.0);
        assert_eq!(cpu(&rows, Some(OTHER)), 5_000.0 - MAX_OF_THREAD as f64);
    }
}
