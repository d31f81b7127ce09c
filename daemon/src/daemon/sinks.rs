//! The sinks of a configuration, each in its [`SinkWorker`].

use super::end_losses::EndLosses;
use super::queue::{WindowProfiles, bytes_of};
use super::sink_worker::{PreviousWorker, SinkStatus, SinkWorker};
use crate::config::Config;
use perfusion_export::directory::ProfileDirectory;
use perfusion_export::http::Version;
use perfusion_export::orphans::Orphans;
use perfusion_export::otlp::Otlp;
use perfusion_export::pyroscope::Pyroscope;
use perfusion_export::receiver;
#[cfg(feature = "object-storage")]
use perfusion_export::s3::S3;
use perfusion_export::{FinishedProfile, Sink, SinkError};
use perfusion_host::abandoned::AbandonedThreads;
use perfusion_host::priority;
use std::io;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Sinks are not waited for longer than this at the end: who ends a daemon gives it 30 seconds
/// (Kubernetes, and the unit), and a recording's end takes some of those. A disk that does not
/// answer has no limit of its own.
pub const END_WITHIN: Duration = Duration::from_secs(20);

/// The sinks of a configuration, and the spools of earlier ones.
#[derive(Default)]
pub struct OpenedSinks {
    sinks: Vec<Box<dyn Sink>>,
    orphans: Orphans,
}

#[derive(Default)]
struct SinkWorkers {
    at_work: Vec<SinkWorker>,
    /// Of sinks that no configuration has any more. One that is configured again goes on from where
    /// it was.
    previous: Vec<SinkWorker>,
    /// Profiles that were handed over: they take memory once, whoever else they wait for.
    given: Vec<Weak<FinishedProfile>>,
}

#[derive(Clone, Default)]
struct SharedWorkers(Arc<Mutex<SinkWorkers>>);

impl SharedWorkers {
    /// Nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, SinkWorkers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sinks at work.
pub struct Sinks {
    workers: SharedWorkers,
    /// One could not be put to work.
    is_incomplete: bool,
    /// Looked after by a thread of their own, which is there now and then: their disk may not
    /// answer.
    orphans: Option<Orphans>,
    looking: Option<JoinHandle<Orphans>>,
}

/// Where finished windows go.
#[derive(Clone)]
pub struct WindowSender(SharedWorkers);

impl WindowSender {
    /// Hands a window to each sink, which may let windows of `limit` bytes wait between them. Tells
    /// which were too busy to take it. Each sink has an equal share of that. A window that is
    /// larger may wait by itself, as long as all that is there has room: the sink puts what it is
    /// at into its spool, and takes it.
    #[must_use]
    pub fn give(&self, window: &WindowProfiles, limit: u64) -> Vec<String> {
        let mut workers = self.0.lock();
        let SinkWorkers { at_work, given, .. } = &mut *workers;
        given.retain(|finished| finished.strong_count() > 0);
        let of_earlier: u64 =
            given.iter().filter_map(Weak::upgrade).map(|finished| bytes_of(&finished)).sum();
        let of_window: u64 = window.iter().map(|finished| bytes_of(finished)).sum();
        let fits = of_earlier.saturating_add(of_window) <= limit;
        let share = limit / u64::try_from(at_work.len()).unwrap_or(u64::MAX).max(1);
        let limit_of =
            |worker: &SinkWorker| if fits && worker.none_waits() { u64::MAX } else { share };
        let busy = at_work.iter().filter(|worker| !worker.give(window, limit_of(worker)));
        let busy = busy.map(|worker| worker.name().to_owned()).collect();
        given.extend(window.iter().map(Arc::downgrade));
        busy
    }
}

/// Reads how the sinks stand.
#[derive(Clone)]
pub struct SinkWatcher(SharedWorkers);

impl SinkWatcher {
    /// Gives up the sinks that are still at work when the daemon ends, and says what is lost.
    pub fn give_up(&self) {
        let workers = self.0.lock();
        for worker in workers.at_work.iter().chain(&workers.previous) {
            let still = worker.standing().still;
            if still.is_zero() {
                continue;
            }
            let mut losses = EndLosses::default();
            let cause = format!("the sink does not come back from one write for {still:.0?}");
            worker.unfinished().iter().for_each(|service| losses.add(&cause, service));
            tracing::error!(
                sink = worker.name(),
                "does not come back from one write for {still:.0?}: the profile is lost that it \
                 is at"
            );
            losses.say(worker.name());
        }
    }

    /// Each sink, as of the last window or second, and those that are to go and have not come to an
    /// end; of one name one.
    #[must_use]
    pub fn standing(&self) -> Vec<SinkStatus> {
        let mut workers = self.0.lock();
        let SinkWorkers { at_work, previous, .. } = &mut *workers;
        let goes_on =
            |worker: &SinkWorker| at_work.iter().any(|other| other.name() == worker.name());
        let going = previous.iter_mut().filter(|worker| !worker.is_replaced() && !goes_on(worker));
        let going = going.filter_map(|worker| worker.is_at_work().then_some(&*worker));
        at_work.iter().chain(going).map(SinkWorker::standing).collect()
    }
}

/// Opens the sinks a configuration asks for.
///
/// # Errors
/// When one cannot be opened.
pub fn open(config: &Config) -> Result<OpenedSinks, SinkError> {
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    if let Some(root) = &config.files.directory {
        sinks.push(Box::new(ProfileDirectory::open(root, &config.files)?));
    }
    for receiver in &config.otlp {
        sinks.push(Box::new(Otlp::open(receiver, &config.spool)?));
    }
    for server in &config.pyroscope {
        sinks.push(Box::new(Pyroscope::open(server, &config.spool)?));
    }
    #[cfg(feature = "object-storage")]
    for store in &config.s3 {
        sinks.push(Box::new(S3::open(store, &config.spool)?));
    }
    for sink in &mut sinks {
        sink.within(config.limits.memory.0);
    }
    Ok(OpenedSinks { sinks, orphans: orphans(config) })
}

/// Opens sinks on a thread of its own: a disk or mount that does not answer holds up the thread
/// that asks it, for as long as it likes.
#[derive(Default)]
pub struct SinkOpener {
    abandoned: AbandonedThreads<()>,
}

impl SinkOpener {
    /// The sinks a configuration asks for.
    ///
    /// # Errors
    /// When one cannot be opened, or not in that time.
    pub fn open(&mut self, config: &Config, time: Duration) -> Result<OpenedSinks, SinkError> {
        let config = config.clone();
        self.open_by(move || open(&config), time)
    }

    fn open_by(
        &mut self,
        open: impl FnOnce() -> Result<OpenedSinks, SinkError> + Send + 'static,
        time: Duration,
    ) -> Result<OpenedSinks, SinkError> {
        let refused = |reason| SinkError::Refused { reason };
        // However often that is tried there is one such thread.
        if self.abandoned.holders().len() > 0 {
            let reason = "a directory of profiles or spools has not answered since the sinks were \
                 to be opened last: is its disk or mount well?";
            return Err(refused(reason.to_owned()));
        }
        let (tell, told) = channel();
        let opening = std::thread::Builder::new().name("sinks".into());
        // Where nobody waits any more what it opened is closed again.
        let thread = opening
            .spawn(move || tell.send(open()).unwrap_or_default())
            .map_err(|error| refused(format!("no thread to open the sinks: {error}")))?;
        told.recv_timeout(time).unwrap_or_else(|_| {
            self.abandoned.add((), thread);
            Err(refused(format!(
                "a directory of profiles or spools does not answer within {time:?}: is its disk or \
                 mount well?"
            )))
        })
    }
}

/// What is wrong with the files of receivers, one line each: none of it keeps the daemon from
/// starting.
pub fn check_files(config: &Config) -> impl Iterator<Item = String> {
    let otlp = config.otlp.iter().map(|of| ("otlp", of.place(), &of.url, &of.reach, of.version()));
    let pyroscope = config.pyroscope.iter();
    let pyroscope = pyroscope.map(|of| ("pyroscope", of.place(), &of.url, &of.reach, Version::One));
    otlp.chain(pyroscope).filter_map(|(kind, place, url, reach, version)| {
        let trouble = receiver::trouble_of_files(&reach.settings(url).ok()?, version)?;
        Some(format!("{kind} {place}: {trouble}"))
    })
}

fn orphans(config: &Config) -> Orphans {
    let mut in_use: Vec<(&str, String)> = Vec::new();
    in_use.extend(config.otlp.iter().map(|receiver| ("otlp", receiver.place().to_owned())));
    in_use.extend(config.pyroscope.iter().map(|server| ("pyroscope", server.place().to_owned())));
    #[cfg(feature = "object-storage")]
    in_use.extend(config.s3.iter().map(|store| ("s3", store.place())));
    let spool = &config.spool;
    // One without a directory was not opened.
    let in_use =
        in_use.iter().filter_map(|(kind, place)| spool.directory_of(kind, place).ok()).collect();
    Orphans::of(spool.directory.clone(), in_use, spool.max_age.0)
}

/// True when the sinks of two configurations differ.
#[must_use]
pub fn differ(a: &Config, b: &Config) -> bool {
    #[cfg(feature = "object-storage")]
    if a.s3 != b.s3 {
        return true;
    }
    (&a.files, &a.otlp, &a.pyroscope, &a.spool) != (&b.files, &b.otlp, &b.pyroscope, &b.spool)
}

impl Sinks {
    /// Puts these to work.
    ///
    /// # Errors
    /// When a thread cannot be made.
    pub fn start(opened: OpenedSinks) -> io::Result<Self> {
        let mut sinks = Self {
            workers: SharedWorkers::default(),
            is_incomplete: false,
            orphans: None,
            looking: None,
        };
        sinks.replace(opened).map(|()| sinks)
    }

    /// Where finished windows go.
    #[must_use]
    pub fn out(&self) -> WindowSender {
        WindowSender(self.workers.clone())
    }

    /// A handle on how they stand.
    #[must_use]
    pub fn watcher(&self) -> SinkWatcher {
        SinkWatcher(self.workers.clone())
    }

    /// True when one of those that were opened last is not at work.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// Puts others in their place, each between two windows. What waits for one that is there no
    /// more it has yet.
    ///
    /// # Errors
    /// When a thread cannot be made: that sink is as it was.
    pub fn replace(&mut self, opened: OpenedSinks) -> io::Result<()> {
        let OpenedSinks { sinks, orphans } = opened;
        self.orphans = Some(match self.orphans.take() {
            Some(previous) => orphans.after(previous),
            None => orphans,
        });
        let mut workers = self.workers.lock();
        let mut before = std::mem::take(&mut workers.at_work);
        before.append(&mut workers.previous);
        // What one has counted that was replaced and has ended is in the other's figures.
        before.retain_mut(|worker| !worker.is_replaced() || worker.is_at_work());
        let mut started = Ok(());
        let mut ended = Vec::new();
        for sink in sinks {
            let is_its =
                |worker: &SinkWorker| worker.name() == sink.name() && !worker.is_replaced();
            let here = before
                .iter()
                .position(|worker| worker.name() == sink.name() && worker.place() == sink.place());
            let previous = match (here, before.iter().position(is_its)) {
                (Some(at), _) => PreviousWorker::Here(before.swap_remove(at)),
                (None, Some(at)) => PreviousWorker::Elsewhere(before.swap_remove(at)),
                (None, None) => PreviousWorker::None,
            };
            match SinkWorker::start(sink, previous) {
                Ok((worker, previous)) => {
                    workers.at_work.push(worker);
                    ended.extend(previous);
                }
                Err((error, previous)) => {
                    started = Err(error);
                    match previous {
                        PreviousWorker::None => {}
                        PreviousWorker::Here(worker) | PreviousWorker::Elsewhere(worker) => {
                            workers.at_work.push(worker)
                        }
                    }
                }
            }
        }
        before.append(&mut ended);
        before.iter().for_each(SinkWorker::leave);
        workers.previous = before;
        self.is_incomplete = started.is_err();
        started
    }

    /// Looks after spools that no sink has, now and then.
    pub fn look(&mut self) {
        if let Some(looking) = self.looking.take_if(|looking| looking.is_finished())
            && let Ok(previous) = looking.join()
        {
            self.orphans = Some(match self.orphans.take() {
                // Others took their place meanwhile.
                Some(orphans) => orphans.after(previous),
                None => previous,
            });
        }
        // A spool is looked after by one at a time.
        let is_free = self.looking.is_none()
            && !self.workers.lock().previous.iter_mut().any(SinkWorker::is_at_work);
        if let Some(mut orphans) = self.orphans.take_if(|orphans| is_free && orphans.is_due()) {
            let look = move || {
                priority::wait_for_others();
                orphans.look();
                orphans
            };
            // Without a thread they are looked after from the next reload on.
            self.looking = std::thread::Builder::new().name("spools".into()).spawn(look).ok();
        }
    }

    /// The daemon was told to end at `told`, see [`SinkWorker::hasten`].
    pub fn hasten(&mut self, told: Instant) {
        let mut workers = self.workers.lock();
        let SinkWorkers { at_work, previous, .. } = &mut *workers;
        at_work.iter_mut().chain(previous).for_each(|worker| worker.hasten(told));
    }

    /// Waits until all that was handed over is done or time is up, since the daemon was told to end
    /// at `told`.
    pub fn close(self, told: Instant) {
        let mut workers = self.workers.lock();
        let SinkWorkers { at_work, previous, .. } = &mut *workers;
        // They stay where they are: how they stand is asked until the end.
        let threads: Vec<_> =
            at_work.iter_mut().chain(previous).filter_map(|worker| worker.close(told)).collect();
        drop(workers);
        for thread in threads {
            // What panicked has said so.
            thread.join().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::sink_worker::tests::{Counting, Slow, finished, until};
    use std::sync::atomic::AtomicU64;

    fn opened(sinks: Vec<Box<dyn Sink>>) -> OpenedSinks {
        OpenedSinks { sinks, ..OpenedSinks::default() }
    }

    fn counting(names: &[&'static str], value: u64) -> OpenedSinks {
        let of = |name| Box::new(Counting(name, Arc::new(AtomicU64::new(value))));
        opened(names.iter().map(|name| of(*name) as Box<dyn Sink>).collect())
    }

    #[test]
    fn sinks_that_do_not_open_are_not_waited_for_and_hold_up_one_thread() {
        let (mut opener, (opens, open)) = (SinkOpener::default(), channel::<()>());
        let hangs = move || {
            open.recv().unwrap_or_default();
            Ok(OpenedSinks::default())
        };
        let error = opener.open_by(hangs, Duration::from_millis(10)).err().unwrap();
        assert!(error.to_string().contains("does not answer within 10ms"), "{error}");
        let other = || Ok(OpenedSinks::default());
        let error = opener.open_by(other, Duration::from_secs(60)).err().unwrap();
        assert!(error.to_string().contains("has not answered since"), "{error}");
        drop(opens);
        until(|| opener.abandoned.holders().len() == 0);
        assert!(opener.open_by(other, Duration::from_secs(60)).is_ok());
    }

    #[test]
    fn counters_go_on_when_other_sinks_take_the_place() {
        let mut sinks = Sinks::start(counting(&["a", "b"], 5)).unwrap();
        let watcher = sinks.watcher();
        let sent = |expected: &[(&str, u64)]| {
            until(|| {
                let of = |standing: &SinkStatus| (standing.sink.clone(), standing.counters.clone());
                let sent =
                    |&(sink, sent): &(&str, u64)| (sink.to_owned(), vec![("requests_sent", sent)]);
                watcher.standing().iter().map(of).eq(expected.iter().map(sent))
            });
        };
        sent(&[("a", 5), ("b", 5)]);
        sinks.replace(counting(&["a"], 2)).unwrap();
        sent(&[("a", 5 + 1 + 2)]);
        sinks.replace(counting(&["a", "b"], 0)).unwrap();
        sent(&[("a", 5 + 1 + 2 + 1), ("b", 5 + 1)]);
        sinks.close(Instant::now());
    }

    #[test]
    fn a_sink_that_hangs_holds_up_no_other() {
        let slow = |name| {
            let ((given, heard), (go_on, told)) = (channel(), channel());
            (Box::new(Slow { name, place: "/", given, go_on: told }) as Box<dyn Sink>, heard, go_on)
        };
        let ((hangs, of_hanging, goes_on), (works, of_working, working)) =
            (slow("hangs"), slow("works"));
        drop(working);
        let mut sinks = Sinks::start(opened(vec![hangs, works])).unwrap();
        let (out, watcher) = (sinks.out(), sinks.watcher());
        assert!(out.give(&vec![finished("0")], 0).is_empty());
        assert_eq!(&*of_hanging.recv().unwrap(), "0");
        for window in ["1", "2", "3"] {
            // The other one is done with the window before.
            until(|| watcher.standing()[1].busy.is_zero());
            let busy = || out.give(&vec![finished(window)], 0);
            until(|| busy() == ["hangs"]);
        }
        let heard: Vec<_> = of_working.try_iter().collect();
        assert!(heard.len() >= 3, "{heard:?}");
        let standing = watcher.standing();
        assert!(standing[0].dropped >= 3 && !standing[0].busy.is_zero(), "{standing:?}");
        // One that is gone from the configuration is told of until it ends.
        sinks.replace(counting(&["other"], 0)).unwrap();
        let names =
            || watcher.standing().into_iter().map(|standing| standing.sink).collect::<Vec<_>>();
        assert_eq!((names()[0].as_str(), names().contains(&"hangs".to_owned())), ("other", true));
        drop(goes_on);
        until(|| names() == ["other"]);
        sinks.close(Instant::now());
    }

    #[test]
    fn a_window_that_is_larger_than_a_sinks_share_waits_while_there_is_memory() {
        let slow = |name| {
            let ((given, heard), (go_on, told)) = (channel(), channel());
            (Box::new(Slow { name, place: "/", given, go_on: told }) as Box<dyn Sink>, heard, go_on)
        };
        let all: Vec<_> = ["a", "b", "c", "d"].into_iter().map(slow).collect();
        let (sinks, ends): (Vec<_>, Vec<_>) =
            all.into_iter().map(|(sink, heard, go_on)| (sink, (heard, go_on))).unzip();
        let sinks = Sinks::start(opened(sinks)).unwrap();
        let out = sinks.out();
        let window = || vec![finished("web")];
        // A share is less than a window, and all of it is two.
        let limit = 2 * bytes_of(&finished("web"));
        assert!(out.give(&window(), limit).is_empty());
        ends.iter().for_each(|(heard, _)| drop(heard.recv().unwrap()));
        // All are at work on the first, which is in memory once.
        assert!(out.give(&window(), limit).is_empty());
        assert_eq!(out.give(&window(), limit).len(), 4, "no memory is left");
        assert_eq!(
            out.give(&window(), 4 * limit).len(),
            4,
            "one waits already, and a share is less"
        );
        drop(ends);
        sinks.close(Instant::now());
    }

    #[test]
    fn spools_of_all_receivers_there_are_stay() {
        let folder = tempfile::tempdir().unwrap();
        let spool = folder.path().to_str().unwrap();
        let text = format!(
            "spool: {{directory: {spool:?}}}\notlp: [{{url: \"http://a:4317/\"}}]\npyroscope: \
             [{{url: \"http://b/x\"}}]\n"
        );
        #[cfg(feature = "object-storage")]
        let text = text + "s3: [{bucket: profiles, prefix: /x/}]\n";
        let config: Config = serde_yaml::from_str(&text).unwrap();
        let mut opened = open(&config).unwrap();
        let spools = || std::fs::read_dir(folder.path()).unwrap().count();
        let in_use = spools();
        assert!(in_use >= 2);
        std::fs::create_dir(folder.path().join("otlp-gone")).unwrap();
        opened.orphans.look();
        assert_eq!(spools(), in_use);
        assert!(!folder.path().join("otlp-gone").exists());
    }
}
