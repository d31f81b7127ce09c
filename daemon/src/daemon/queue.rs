//! Finished windows on their way to one sink. They wait as the bytes of their files, so the queue
//! is bounded by those: a disk that is slow for a while costs no window as long as there is room.
//! What waits for several sinks is there once.

use perfusion_export::FinishedProfile;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What one service did in one window takes so much beside its profile: names, labels, times.
const BESIDE: u64 = 1 << 10;

/// The profiles of one window, of each service one.
pub type WindowProfiles = Vec<Arc<FinishedProfile>>;

/// Why there is no window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoWindow {
    /// None came in that time.
    Yet,
    /// None comes any more, or they are for whoever has the next turn.
    Over,
}

/// Windows that wait for a sink. Those who take them have turns, one after the other.
#[derive(Default)]
pub struct WindowQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Set while a window waits.
    waits: Arc<AtomicBool>,
}

#[derive(Default)]
struct QueueState {
    windows: VecDeque<WindowProfiles>,
    /// Of those, and of what is being worked at.
    bytes: u64,
    /// Profiles that found no room.
    dropped: u64,
    turn: u64,
    is_closed: bool,
}

impl WindowQueue {
    /// One that sets `waits` while a window waits.
    pub fn with(waits: Arc<AtomicBool>) -> Self {
        Self { waits, ..Self::default() }
    }

    /// Says whether a window waits.
    fn tell(&self, state: &QueueState) {
        // Pairs with the load in `Hurry::gives_way`.
        self.waits.store(!state.windows.is_empty(), Ordering::Relaxed);
    }

    /// Hands a window over; false when it was dropped. A window is dropped when more than `limit`
    /// bytes would wait, unless none waits, and when nobody takes any more.
    pub fn give(&self, window: &WindowProfiles, limit: u64) -> bool {
        let bytes: u64 = window.iter().map(|finished| bytes_of(finished)).sum();
        let mut state = self.lock();
        let fits = state.bytes == 0 || state.bytes.saturating_add(bytes) <= limit;
        if state.is_closed || !fits {
            state.dropped += u64::try_from(window.len()).unwrap_or(u64::MAX);
            return false;
        }
        state.bytes += bytes;
        state.windows.push_back(window.clone());
        self.tell(&state);
        self.changed.notify_all();
        true
    }

    /// The next window, for whoever has this turn; each of its profiles counts as waiting until it
    /// is [`done`](Self::done).
    ///
    /// # Errors
    /// Why there is none.
    pub fn next(&self, turn: u64, until: Instant) -> Result<WindowProfiles, NoWindow> {
        let none = |state: &mut QueueState| {
            state.turn == turn && state.windows.is_empty() && !state.is_closed
        };
        let wait = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), wait, none);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.turn != turn {
            return Err(NoWindow::Over);
        }
        let window = state.windows.pop_front();
        self.tell(&state);
        window.ok_or(if state.is_closed { NoWindow::Over } else { NoWindow::Yet })
    }

    /// The sink has had this one.
    pub fn done(&self, finished: &FinishedProfile) {
        self.lock().bytes -= bytes_of(finished);
    }

    /// Begins the next turn: what waits is for it, and what comes.
    pub fn take_turn(&self) -> u64 {
        let mut state = self.lock();
        state.turn += 1;
        state.is_closed = false;
        self.changed.notify_all();
        state.turn
    }

    /// Has what waits there wait here, and takes over what was counted there. Nothing comes there
    /// any more.
    pub fn take_over(&self, other: &Self) {
        let (windows, dropped) = {
            let mut state = other.lock();
            state.is_closed = true;
            let windows = std::mem::take(&mut state.windows);
            state.bytes -= windows.iter().flatten().map(|finished| bytes_of(finished)).sum::<u64>();
            other.tell(&state);
            (windows, std::mem::take(&mut state.dropped))
        };
        other.changed.notify_all();
        let mut state = self.lock();
        state.bytes += windows.iter().flatten().map(|finished| bytes_of(finished)).sum::<u64>();
        state.windows.extend(windows);
        state.dropped += dropped;
        self.tell(&state);
        self.changed.notify_all();
    }

    /// Windows come again.
    pub fn open(&self) {
        self.lock().is_closed = false;
    }

    /// No more windows come for now.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    /// Profiles that found no room.
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Profiles that wait.
    pub fn waiting(&self) -> usize {
        self.lock().windows.iter().map(Vec::len).sum()
    }

    /// True when nobody has taken a turn since this one.
    pub fn has_turn(&self, turn: u64) -> bool {
        self.lock().turn == turn
    }

    /// The services of the profiles that wait.
    pub fn services(&self) -> Vec<Arc<str>> {
        let state = self.lock();
        state.windows.iter().flatten().map(|finished| Arc::clone(&finished.service)).collect()
    }

    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What it takes of the memory for those that wait.
pub fn bytes_of(finished: &FinishedProfile) -> u64 {
    u64::try_from(finished.profile.bytes().len()).unwrap_or(u64::MAX).saturating_add(BESIDE)
}

#[cfg(test)]
mod tests {
    use super::{BESIDE, NoWindow, WindowProfiles, WindowQueue};
    use perfusion_export::{FinishedProfile, Packed};
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::time::{Duration, Instant, SystemTime};

    fn window(profiles: usize) -> WindowProfiles {
        let finished = || {
            Arc::new(FinishedProfile {
                service: "web".into(),
                labels: BTreeMap::new(),
                start: SystemTime::now(),
                duration: Duration::from_secs(10),
                profile: Packed::new(vec![0; 1000]),
            })
        };
        std::iter::repeat_with(finished).take(profiles).collect()
    }

    #[test]
    fn windows_wait_as_long_as_there_is_room_and_one_always_may() {
        let (queue, each) = (WindowQueue::default(), 1000 + BESIDE);
        let next = || queue.next(0, Instant::now()).unwrap();
        assert!(queue.give(&window(9), 5 * each), "nothing else waits");
        assert!(!queue.give(&window(1), 9 * each));
        assert!(queue.give(&window(1), 10 * each) && !queue.give(&window(1), 10 * each));
        let mut taken = next().into_iter();
        // The sink is at work with it: its room comes back profile by profile.
        queue.done(&taken.next().unwrap());
        assert!(!queue.give(&window(2), 10 * each) && queue.give(&window(1), 10 * each));
        assert_eq!(queue.dropped(), 1 + 1 + 2);
        taken.for_each(|finished| queue.done(&finished));
        for _ in 0..2 {
            next().iter().for_each(|finished| queue.done(finished));
        }
        assert_eq!(queue.next(0, Instant::now()).unwrap_err(), NoWindow::Yet);
        assert!(queue.give(&window(9), 0), "all is done");
        queue.close();
        assert!(!queue.give(&window(1), u64::MAX));
        assert_eq!(next().len(), 9, "what waited is still there");
        assert_eq!(queue.next(0, Instant::now()).unwrap_err(), NoWindow::Over);
    }

    #[test]
    fn what_waits_is_for_whoever_has_the_turn() {
        let queue = Arc::new(WindowQueue::default());
        let far = Instant::now() + Duration::from_secs(600);
        let first = std::thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.next(0, far)
        });
        assert_eq!(queue.take_turn(), 1);
        assert_eq!(first.join().unwrap().unwrap_err(), NoWindow::Over, "at once");
        assert!(queue.give(&window(2), 0));
        assert_eq!(queue.next(0, far).unwrap_err(), NoWindow::Over);
        let taken = queue.next(1, far).unwrap();
        assert!(queue.give(&window(3), u64::MAX) && !queue.give(&window(1), 0));
        let other = WindowQueue::default();
        other.take_over(&queue);
        assert_eq!((queue.waiting(), queue.dropped()), (0, 0));
        assert_eq!((other.waiting(), other.dropped()), (3, 1));
        assert_eq!(queue.next(1, far).unwrap_err(), NoWindow::Over, "nothing comes any more");
        assert_eq!(other.next(0, far).unwrap().len(), 3);
        assert_eq!(queue.take_turn(), 2);
        assert!(!queue.give(&window(1), 1), "two are being worked at");
        taken.iter().for_each(|finished| queue.done(finished));
        assert!(queue.give(&window(1), 0));
    }
}
