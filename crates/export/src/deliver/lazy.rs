//! A delivery that begins when it is first needed.

use super::Delivery;
use super::figures::{DeliveryCounters, SpoolBacklog};
use super::remote::Remote;
use crate::failure_states::DeliveryEvent;
use crate::file::FileError;
use crate::spool::{self, Item, ItemKind, SpoolLimits, Taken};
use perfusion_pprof::split::PartBounds;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// A delivery that begins when it is first needed: until then the one whose place it takes may
/// still be at work in the same spool. One that cannot begin is tried again with each payload: what
/// is in its way, such as a disk that is full or read-only, may pass.
pub struct LazyDelivery {
    /// What messages call the sink.
    sink: String,
    directory: PathBuf,
    limits: SpoolLimits,
    timeout: Duration,
    /// There until the delivery begins.
    remote: Option<Box<dyn Remote>>,
    delivery: Option<Delivery>,
    /// Payloads lost because it could not begin.
    lost: u64,
    /// Why it could not.
    trouble: Option<String>,
}

impl LazyDelivery {
    /// See [`Delivery::start`].
    #[must_use]
    pub fn new(
        sink: &str,
        directory: PathBuf,
        limits: SpoolLimits,
        timeout: Duration,
        remote: impl Remote,
    ) -> Self {
        let (sink, remote): (_, Option<Box<dyn Remote>>) =
            (sink.to_owned(), Some(Box::new(remote)));
        Self { sink, directory, limits, timeout, remote, delivery: None, lost: 0, trouble: None }
    }

    /// The spool's directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Begins with what an earlier daemon left, if it has not begun and there is any. Where that
    /// cannot be, it is told once.
    pub fn take_up(&mut self) {
        if self.delivery.is_some() || !spool::holds_any(&self.directory) {
            return;
        }
        let before = self.trouble.take();
        let begun = self.started().map(drop);
        if let Err(error) = begun
            && before.is_none_or(|before| before != error.to_string())
        {
            tracing::warn!(sink = self.sink, %error, "what an earlier daemon left is not sent; it \
                 is tried again every minute");
        }
    }

    /// See [`Delivery::put`]; begins, if it has not.
    ///
    /// # Errors
    /// When the payload is lost, which is counted.
    pub fn put(
        &mut self,
        at: SystemTime,
        kind: ItemKind,
        service: &str,
        payload: &[u8],
    ) -> Result<(), FileError> {
        match self.started() {
            Ok(delivery) => delivery.put(at, kind, service, payload),
            Err(error) => {
                self.lost += 1;
                Err(error)
            }
        }
    }

    /// See [`Delivery::window`]; none of one that has not begun.
    #[must_use]
    pub fn window(&self) -> Option<Taken> {
        self.delivery.as_ref().and_then(Delivery::window)
    }

    /// See [`Delivery::has_windows`]; false of one that has not begun.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        self.delivery.as_ref().is_some_and(Delivery::has_windows)
    }

    /// See [`Delivery::glance`]; none of one that has not begun.
    #[must_use]
    pub fn glance(&self) -> Option<(DeliveryCounters, SpoolBacklog)> {
        let (mut figures, backlog) = self.delivery.as_ref()?.glance()?;
        figures.lost.refused += self.lost;
        Some((figures, backlog))
    }

    /// See [`Delivery::done`].
    pub fn done(&self, window: Item) {
        if let Some(delivery) = &self.delivery {
            delivery.done(window);
        }
    }

    /// See [`Delivery::bounds`].
    #[must_use]
    pub fn bounds(&self, most: usize) -> PartBounds {
        let all = PartBounds { samples: usize::MAX, bytes: most, lone_bytes: most };
        self.delivery.as_ref().map_or(all, |delivery| delivery.bounds(most))
    }

    /// See [`Delivery::event`]; begins, if it has not.
    pub fn event(&mut self, event: DeliveryEvent<'_>) {
        // What is in its way is told with the next request.
        if let Ok(delivery) = self.started() {
            delivery.event(event);
        }
    }

    fn started(&mut self) -> Result<&Delivery, FileError> {
        let delivery = match self.delivery.take() {
            Some(delivery) => delivery,
            None => {
                let start = Delivery::start(&self.sink, &self.directory, self.limits, self.timeout);
                let (delivery, employ) =
                    start.inspect_err(|error| self.trouble = Some(error.to_string()))?;
                if let Some(remote) = self.remote.take() {
                    // The thread waits for it.
                    employ.send(remote).ok();
                }
                delivery
            }
        };
        Ok(self.delivery.insert(delivery))
    }

    /// See [`Delivery::figures`].
    #[must_use]
    pub fn figures(&self) -> DeliveryCounters {
        let mut figures = self.delivery.as_ref().map(Delivery::figures).unwrap_or_default();
        figures.lost.refused += self.lost;
        figures
    }

    /// See [`Delivery::backlog`]. Of one that has not begun nothing is known but why.
    #[must_use]
    pub fn backlog(&self) -> SpoolBacklog {
        let unknown = || SpoolBacklog { trouble: self.trouble.clone(), ..SpoolBacklog::default() };
        self.delivery.as_ref().map_or_else(unknown, Delivery::backlog)
    }

    /// What is said of what happened.
    #[cfg(test)]
    pub fn reasons(&self) -> Vec<String> {
        self.delivery.as_ref().map(Delivery::reasons).unwrap_or_default()
    }

    /// See [`Delivery::close`].
    pub fn close(&mut self, deadline: Instant) {
        if let Some(delivery) = &mut self.delivery {
            delivery.close(deadline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LIMITS, scripted};
    use super::*;
    use crate::deliver::SendOutcome;
    use crate::spool::Spool;

    #[test]
    fn what_an_earlier_daemon_left_is_sent_without_a_new_profile() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        let (remote, answer, saw) = scripted();
        let mut lazy =
            LazyDelivery::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        lazy.take_up();
        assert!(lazy.delivery.is_none() && !directory.exists(), "there is nothing to begin for");
        let mut earlier = Spool::open(&directory, LIMITS).unwrap();
        lazy.take_up();
        assert!(lazy.delivery.is_none(), "an empty one is nothing to begin for either");
        earlier.put(SystemTime::now(), b"left").unwrap();
        drop(earlier);
        let lock = directory.join(crate::lock::NAME);
        std::fs::remove_file(&lock).and_then(|()| std::fs::create_dir(&lock)).unwrap();
        lazy.take_up();
        let trouble = lazy.backlog().trouble.unwrap();
        assert!(trouble.contains(lock.to_str().unwrap()), "{trouble}");
        std::fs::remove_dir(&lock).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        lazy.take_up();
        assert_eq!(saw.recv().unwrap(), b"left");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.backlog().requests), (1, 0));
    }

    #[test]
    fn a_spool_that_cannot_be_opened_is_tried_again_and_what_is_lost_meanwhile_counted() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("spool");
        std::fs::write(&directory, "in the way").unwrap();
        let (remote, answer, saw) = scripted();
        let mut lazy =
            LazyDelivery::new("test", directory.clone(), LIMITS, Duration::from_secs(1), remote);
        for _ in 0..2 {
            let error = lazy
                .put(SystemTime::now(), ItemKind::Request, "web", b"lost")
                .unwrap_err()
                .to_string();
            assert!(error.contains(directory.to_str().unwrap()), "{error}");
            assert_eq!(lazy.backlog().trouble, Some(error));
        }
        assert_eq!(lazy.figures().lost.refused, 2);
        std::fs::remove_file(&directory).unwrap();
        answer.send(SendOutcome::Accepted { rejected: 0, remark: None }).unwrap();
        lazy.put(SystemTime::now(), ItemKind::Request, "web", b"sent").unwrap();
        assert_eq!(saw.recv().unwrap(), b"sent");
        lazy.close(Instant::now() + Duration::from_secs(60));
        assert_eq!((lazy.figures().sent, lazy.figures().lost.refused), (1, 2));
    }
}
