//! Whose turn it is: all tests begin at once and wait here. First come those that may run beside
//! others, a few at a time, then those that must be alone, one after the other.

use std::collections::BTreeSet;
use std::env;
use std::io::Write as _;
use std::process;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// The turn of one test, which ends with it; how long it took is said then.
#[derive(Debug)]
pub struct Turn {
    name: String,
    sort: Sort,
    began: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    /// Nothing else of ours runs.
    Alone,
    /// Others of this sort may run.
    Beside,
}

/// Who has a turn, and who waits for one.
struct Turns {
    alone: bool,
    beside: usize,
    waiting_beside: usize,
}

static TURNS: Mutex<Turns> = Mutex::new(Turns { alone: false, beside: 0, waiting_beside: 0 });
static A_TURN_ENDED: Condvar = Condvar::new();

/// A failed test poisons a lock; the next one goes on all the same.
fn turns() -> MutexGuard<'static, Turns> {
    TURNS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of those that may run beside others, how many do at a time: they wait most of the time, for what
/// they record.
fn most_beside() -> usize {
    thread::available_parallelism().map_or(1, |cpus| 2 * cpus.get()).min(8)
}

/// Waits until a test of this sort may run. Those alone come last: each would have to wait for all
/// that run when it comes. The runner is told to begin all tests at once, so nobody waits for a
/// test that has no thread yet.
fn await_turn(sort: Sort) {
    let mut turns = turns();
    if sort == Sort::Beside {
        turns.waiting_beside += 1;
    }
    let may_not = |turns: &mut Turns| match sort {
        Sort::Alone => turns.alone || turns.beside > 0 || turns.waiting_beside > 0,
        Sort::Beside => turns.alone || turns.beside >= most_beside(),
    };
    turns = A_TURN_ENDED.wait_while(turns, may_not).unwrap_or_else(PoisonError::into_inner);
    match sort {
        Sort::Alone => turns.alone = true,
        Sort::Beside => {
            turns.beside += 1;
            turns.waiting_beside -= 1;
        }
    }
}

fn end_turn(sort: Sort) {
    let mut turns = turns();
    match sort {
        Sort::Alone => turns.alone = false,
        Sort::Beside => turns.beside -= 1,
    }
    A_TURN_ENDED.notify_all();
}

/// Waits for the turn of the test `name`; `None`, which is said, where the time for tests is over.
pub(crate) fn take(name: &str, sort: Sort) -> Option<Turn> {
    end_what_hangs();
    await_turn(sort);
    if until().is_some_and(|until| until < SystemTime::now()) {
        end_turn(sort);
        say(&format!(
            "SKIPPED {name}: the time for tests is over on this machine (PERFUSION_TESTS_UNTIL)"
        ));
        return None;
    }
    running().insert(name.to_owned());
    Some(Turn { name: name.to_owned(), sort, began: Instant::now() })
}

/// Those that have begun and not ended.
static RUNNING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn running() -> MutexGuard<'static, BTreeSet<String>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Turn {
    fn drop(&mut self) {
        running().remove(&self.name);
        end_turn(self.sort);
        let how = if self.sort == Sort::Alone { "alone" } else { "beside others" };
        say(&format!("TOOK {:.1} s, {how}: {}", self.began.elapsed().as_secs_f64(), self.name));
    }
}

/// Past the capture of the test runner, so that nobody takes a skipped test for a passed one, on a
/// line of its own, in one write.
pub(crate) fn say(line: &str) {
    // Nothing to do if stderr is closed.
    std::io::stderr().write_all(format!("\n{line}\n").as_bytes()).ok();
}

/// When no test may begin any more (`PERFUSION_TESTS_UNTIL`, seconds since 1970).
fn until() -> Option<SystemTime> {
    let seconds = env::var("PERFUSION_TESTS_UNTIL").ok()?.parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

/// A test that hangs would take all words of the run with it when somebody ends that from outside:
/// names those that have not ended, and ends it as failed.
fn end_what_hangs() {
    /// More than any test takes on a slow machine.
    const AT_MOST: Duration = Duration::from_secs(120);
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let Some(end) = until().and_then(|until| until.checked_add(AT_MOST)) else { return };
        thread::spawn(move || {
            while let Ok(left) = end.duration_since(SystemTime::now()) {
                thread::sleep(left);
            }
            let names = running().iter().cloned().collect::<Vec<_>>().join(", ");
            say(&format!(
                "FAILING: two minutes after the time for tests was over these have not ended: \
                 {names}"
            ));
            process::exit(101);
        });
    });
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::{Sort, await_turn, end_turn, most_beside};

    #[test]
    fn whoever_is_alone_is_alone_and_of_the_others_few_run_at_a_time() {
        // Only compared with itself: the lock of the turns orders what the threads do.
        let running = AtomicUsize::new(0);
        let most = AtomicUsize::new(0);
        thread::scope(|scope| {
            for number in 0..60 {
                let sort = if number % 3 == 0 { Sort::Alone } else { Sort::Beside };
                let (running, most) = (&running, &most);
                scope.spawn(move || {
                    await_turn(sort);
                    let now = running.fetch_add(1, Ordering::Relaxed) + 1;
                    thread::yield_now();
                    assert!(
                        sort == Sort::Beside || (now == 1 && running.load(Ordering::Relaxed) == 1)
                    );
                    most.fetch_max(now, Ordering::Relaxed);
                    running.fetch_sub(1, Ordering::Relaxed);
                    end_turn(sort);
                });
            }
        });
        assert!((1..=most_beside()).contains(&most.into_inner()));
    }
}
