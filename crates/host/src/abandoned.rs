//! Threads that nobody waits for any more, because what they wait for may never answer. No signal
//! ends them. Whoever abandons one keeps it here with its holder: who holds it up. So the number of
//! such threads can be bounded, and a holder is not asked again before its thread has ended.

use std::thread::JoinHandle;

/// Abandoned threads that have not ended yet, each with its holder.
#[derive(Debug)]
pub struct AbandonedThreads<H>(Vec<(H, JoinHandle<()>)>);

impl<H> Default for AbandonedThreads<H> {
    fn default() -> Self {
        Self::new()
    }
}

impl<H> AbandonedThreads<H> {
    /// There are none.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Nobody waits for this one from now on.
    pub fn add(&mut self, holder: H, thread: JoinHandle<()>) {
        self.0.push((holder, thread));
    }

    /// The holder of each that has not ended by now. One who holds up several is there several
    /// times.
    pub fn holders(&mut self) -> impl ExactSizeIterator<Item = &H> {
        self.0.retain(|(_, thread)| !thread.is_finished());
        self.0.iter().map(|(holder, _)| holder)
    }
}

#[cfg(test)]
mod tests {
    use super::AbandonedThreads;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    #[test]
    fn a_holder_has_its_threads_until_they_end() {
        let mut abandoned = AbandonedThreads::new();
        let mut releases = Vec::new();
        for holder in ["one", "other", "one"] {
            let (release, released) = channel::<()>();
            let thread = std::thread::spawn(move || released.recv().unwrap_or_default());
            abandoned.add(holder, thread);
            releases.push(release);
        }
        assert!(abandoned.holders().eq(&["one", "other", "one"]));
        releases.remove(0);
        let begun = Instant::now();
        while abandoned.holders().len() == 3 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        assert!(abandoned.holders().eq(&["other", "one"]));
    }
}
