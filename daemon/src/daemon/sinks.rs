//! The sinks of a configuration, on a thread of their own.

use super::neighbour;
use super::queue::{self, In, Out};
use crate::config::Config;
use crate::sink::deliver::Backlog;
use crate::sink::directory::Directory;
use crate::sink::http::Version;
use crate::sink::orphans::Orphans;
use crate::sink::otlp::Otlp;
use crate::sink::pyroscope::Pyroscope;
use crate::sink::receiver;
#[cfg(feature = "object-storage")]
use crate::sink::s3::S3;
use crate::sink::{Finished, Sink, SinkError};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the sinks are given for the windows that wait for them when the daemon ends, the last one too.
const LAST_WINDOWS: Duration = Duration::from_secs(10);
/// How long they are given then for what is to be sent.
const LAST: Duration = Duration::from_secs(5);
/// They are not waited for longer than this: who ends a daemon gives it 30 seconds (Kubernetes, and the unit), and a recording's end takes some of
/// those. A disk that does not answer has no limit of its own.
pub const END_WITHIN: Duration = Duration::from_secs(20);
/// How soon another set of sinks is put in place.
const LOOK: Duration = Duration::from_millis(200);
/// What sinks count between two windows, such as what a receiver took or refused, is published so often.
const PUBLISH_EVERY: Duration = Duration::from_secs(1);
/// Where no windows come, such as while recording is switched off, sinks have their moment so often: what is too old goes then, too.
const NO_WINDOW: Duration = Duration::from_secs(60);
/// A sink that fails is reported so often at most.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// How a sink stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What messages call it.
    pub sink: String,
    /// Name and value of each of its counters.
    pub counters: Vec<(&'static str, u64)>,
    /// What waits to be sent, of one that has a spool.
    pub backlog: Option<Backlog>,
}

impl Standing {
    /// Name and value of each counter and gauge.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.counters.iter().copied().chain(self.backlog.iter().flat_map(Backlog::gauges))
    }
}

/// The sinks of a configuration, and the spools of earlier ones.
#[derive(Default)]
pub struct Opened {
    sinks: Vec<Box<dyn Sink>>,
    orphans: Orphans,
}

#[derive(Default)]
struct Shared {
    /// What is to take the place of the sinks at work.
    next: Option<Opened>,
    /// What a sink is doing, and since when: a disk that does not answer holds up all of them.
    busy: Option<(String, Instant)>,
    /// The daemon ends: what is not put by then is lost.
    closing: Option<Instant>,
    standing: Vec<Standing>,
}

/// The sinks at work.
pub struct Sinks {
    thread: JoinHandle<()>,
    out: Out,
    shared: Arc<Mutex<Shared>>,
}

/// Reads how the sinks stand.
#[derive(Clone)]
pub struct SinkWatcher(Arc<Mutex<Shared>>);

impl SinkWatcher {
    /// Each sink, as of the last window or second.
    #[must_use]
    pub fn standing(&self) -> Vec<Standing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).standing.clone()
    }

    /// The sink that is at work with a profile or the end of a window, and how long it has been.
    #[must_use]
    pub fn busy(&self) -> Option<(String, Duration)> {
        let shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.busy.as_ref().map(|(sink, since)| (sink.clone(), since.elapsed()))
    }
}

/// Opens the sinks a configuration asks for.
///
/// # Errors
/// When one cannot be opened.
pub fn open(config: &Config) -> Result<Opened, SinkError> {
    let mut sinks: Vec<Box<dyn Sink>> = Vec::new();
    if let Some(root) = &config.files.directory {
        sinks.push(Box::new(Directory::open(root, &config.files)?));
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
    Ok(Opened { sinks, orphans: orphans(config) })
}

/// The same, within so much time: a disk or mount that does not answer holds up the thread that asks it, for as long as it likes.
///
/// # Errors
/// When one cannot be opened, or not in that time.
pub fn open_within(config: &Config, time: Duration) -> Result<Opened, SinkError> {
    let refused = |reason| SinkError::Refused { reason };
    let ((tell, told), config) = (channel(), config.clone());
    let opening = std::thread::Builder::new().name("sinks".into());
    // Where nobody waits any more what it opened is closed again.
    let spawned = opening.spawn(move || tell.send(open(&config)).ok());
    spawned.map_err(|error| refused(format!("no thread to open the sinks: {error}")))?;
    let late = |_| {
        Err(refused(format!(
            "a directory of profiles or spools does not answer within {time:?}: is its disk or mount well?"
        )))
    };
    told.recv_timeout(time).unwrap_or_else(late)
}

/// What is wrong with the files of receivers, one line each: none of it keeps the daemon from starting.
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
    let in_use = in_use.iter().filter_map(|(kind, place)| spool.directory_of(kind, place).ok()).collect();
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
    /// When the thread cannot be made.
    pub fn start(opened: Opened) -> io::Result<Self> {
        let (out, finished) = queue::new();
        let shared = Arc::new(Mutex::new(Shared::default()));
        let Opened { sinks, orphans } = opened;
        let at_work = Work::of(sinks, orphans, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("sinks".into())
            .spawn(move || at_work.until_closed(&finished))?;
        Ok(Self { thread, out, shared })
    }

    /// Where finished windows go.
    #[must_use]
    pub fn out(&self) -> Out {
        self.out.clone()
    }

    /// A handle on how they stand.
    #[must_use]
    pub fn watcher(&self) -> SinkWatcher {
        SinkWatcher(Arc::clone(&self.shared))
    }

    /// Puts others in their place, between two windows.
    pub fn replace(&self, opened: Opened) {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).next = Some(opened);
    }

    /// Waits until all that was handed over is done or time is up. Nobody else may have an [`out`](Self::out) any more.
    pub fn close(self) {
        let closing = Instant::now() + LAST_WINDOWS;
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).closing = Some(closing);
        drop(self.out);
        // A sink that panicked has said so.
        self.thread.join().ok();
    }
}

struct Work {
    sinks: Vec<Box<dyn Sink>>,
    orphans: Orphans,
    shared: Arc<Mutex<Shared>>,
    /// When each that failed was last reported, by its name: one that always fails does not hide the others.
    reported: HashMap<String, Instant>,
    /// What earlier sinks counted, by their names: one that takes another's place goes on from there, since counters grow only.
    former: BTreeMap<(String, &'static str), u64>,
    /// When that is published next, where no window comes before.
    publish_at: Instant,
    /// When the sinks have their moment next, likewise.
    moment_at: Instant,
}

impl Work {
    fn of(sinks: Vec<Box<dyn Sink>>, orphans: Orphans, shared: Arc<Mutex<Shared>>) -> Self {
        Self {
            sinks,
            orphans,
            shared,
            reported: HashMap::new(),
            former: BTreeMap::new(),
            publish_at: Instant::now(),
            moment_at: Instant::now() + NO_WINDOW,
        }
    }

    fn until_closed(mut self, finished: &In) {
        neighbour::wait_for_others();
        loop {
            let window = finished.next(LOOK);
            let next = self.shared.lock().unwrap_or_else(PoisonError::into_inner).next.take();
            if let Some(next) = next {
                self.replace(next);
            }
            match window {
                Ok(window) => self.put(window, finished),
                Err(RecvTimeoutError::Timeout) => {
                    if Instant::now() >= self.moment_at {
                        self.windows_over();
                    }
                    if Instant::now() >= self.publish_at {
                        self.publish();
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.orphans.look();
        }
        let deadline = Instant::now() + LAST;
        for sink in &mut self.sinks {
            sink.close(deadline);
        }
        self.publish();
    }

    fn replace(&mut self, next: Opened) {
        self.orphans = next.orphans.after(std::mem::take(&mut self.orphans));
        let deadline = Instant::now() + LAST;
        for mut old in std::mem::replace(&mut self.sinks, next.sinks) {
            old.close(deadline);
            for (counter, value) in old.counters() {
                *self.former.entry((old.name().to_owned(), counter)).or_default() += value;
            }
        }
        self.reported.clear();
        self.publish();
    }

    fn put(&mut self, window: Vec<Finished>, queue: &In) {
        let profiles = window.len();
        let (mut failed, mut late) = (0, 0);
        // One after the other is given to all and let go: as messages they are large.
        for finished in window {
            if self.closing().is_some_and(|closing| Instant::now() >= closing) {
                late += 1;
                continue;
            }
            for sink in &mut self.sinks {
                if let Err(error) = timed(&self.shared, &mut **sink, |sink| sink.put(&finished)) {
                    failed += 1;
                    if self.reported.get(sink.name()).is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
                        self.reported.insert(sink.name().to_owned(), Instant::now());
                        tracing::error!(sink = sink.name(), service = %finished.service, %error, "a profile is lost");
                    }
                }
            }
            queue.done(finished);
        }
        tracing::debug!(profiles, failed, "window handed over");
        // Whatever was said of earlier ones.
        if failed > 0 && self.closing().is_some() {
            tracing::error!(profiles = failed, "lost: the sinks did not take them, and this is the end");
        }
        if late > 0 {
            tracing::error!(
                profiles = late,
                "lost: the sinks were not done with the last windows within {LAST_WINDOWS:?}; a disk is very busy or does not answer"
            );
        }
        self.windows_over();
        self.publish();
    }

    /// Until when there is time, where the daemon ends.
    fn closing(&self) -> Option<Instant> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).closing
    }

    fn windows_over(&mut self) {
        self.moment_at = Instant::now() + NO_WINDOW;
        for sink in &mut self.sinks {
            timed(&self.shared, &mut **sink, |sink| sink.window_over());
        }
    }

    /// Counters with those of the sinks whose place it took.
    fn standing(&self, sink: &dyn Sink) -> Standing {
        let mut counters = sink.counters();
        for (counter, value) in &mut counters {
            *value += self.former.get(&(sink.name().to_owned(), *counter)).copied().unwrap_or_default();
        }
        Standing { sink: sink.name().to_owned(), counters, backlog: sink.backlog() }
    }

    fn publish(&mut self) {
        self.publish_at = Instant::now() + PUBLISH_EVERY;
        let standing = self.sinks.iter().map(|sink| self.standing(&**sink)).collect();
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).standing = standing;
    }
}

/// Has a sink do something, and says so meanwhile.
fn timed<T>(shared: &Mutex<Shared>, sink: &mut dyn Sink, work: impl FnOnce(&mut dyn Sink) -> T) -> T {
    let is = |busy| shared.lock().unwrap_or_else(PoisonError::into_inner).busy = busy;
    is(Some((sink.name().to_owned(), Instant::now())));
    let done = work(sink);
    is(None);
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pprof::proto::Profile;
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc::Sender;
    use std::time::SystemTime;

    struct Broken(&'static str);

    impl Sink for Broken {
        fn name(&self) -> &str {
            self.0
        }

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
            Err(SinkError::Refused { reason: "it is broken".to_owned() })
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    fn finished(service: &str) -> Finished {
        Finished {
            service: service.into(),
            labels: BTreeMap::new(),
            start: SystemTime::now(),
            duration: Duration::from_secs(60),
            profile: Profile::default().into(),
        }
    }

    #[test]
    fn each_sink_that_fails_is_reported_once_in_a_while() {
        let sinks: Vec<Box<dyn Sink>> = vec![Box::new(Broken("a")), Box::new(Broken("b"))];
        let mut work = Work::of(sinks, Orphans::default(), Arc::default());
        let finished = finished("web");
        let (_, queue) = queue::new();
        work.put(vec![finished.clone(), finished.clone()], &queue);
        let first = work.reported.clone();
        assert!(first.contains_key("a") && first.contains_key("b"), "{first:?}");
        work.put(vec![finished], &queue);
        assert_eq!(work.reported, first);
    }

    /// Says what it was given, and comes to the end of its time with the second.
    struct Late(Sender<Arc<str>>, Arc<Mutex<Shared>>);

    impl Sink for Late {
        fn name(&self) -> &str {
            "late"
        }

        fn put(&mut self, finished: &Finished) -> Result<(), SinkError> {
            self.0.send(Arc::clone(&finished.service)).unwrap();
            if &*finished.service == "b" {
                self.1.lock().unwrap().closing = Some(Instant::now());
            }
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn the_end_waits_for_no_more_than_is_done_in_its_time() {
        let ((tell, told), shared) = (channel(), Arc::<Mutex<Shared>>::default());
        let late = Late(tell, Arc::clone(&shared));
        let work = Work::of(vec![Box::new(late)], Orphans::default(), shared);
        let (out, queue) = queue::new();
        out.give(["a", "b", "c"].map(finished).to_vec(), u64::MAX).unwrap();
        out.give(vec![finished("d")], u64::MAX).unwrap();
        drop(out);
        work.until_closed(&queue);
        assert_eq!(told.into_iter().collect::<Vec<_>>(), ["a".into(), "b".into()]);
    }

    struct Moments(Sender<()>);

    impl Sink for Moments {
        fn name(&self) -> &str {
            "moments"
        }

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
            Ok(())
        }

        fn window_over(&mut self) {
            self.0.send(()).unwrap();
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    #[test]
    fn sinks_have_their_moment_where_no_window_comes() {
        let (tell, moments) = channel();
        let mut work = Work::of(vec![Box::new(Moments(tell))], Orphans::default(), Arc::default());
        work.moment_at = Instant::now();
        let (windows, finished) = queue::new();
        let at_work = std::thread::spawn(move || work.until_closed(&finished));
        moments.recv_timeout(NO_WINDOW).unwrap();
        assert!(moments.try_recv().is_err(), "the next one is a minute later");
        drop(windows);
        at_work.join().unwrap();
    }

    /// Counts what it is told, and one more when it is closed.
    struct Counting(&'static str, Arc<AtomicU64>);

    impl Sink for Counting {
        fn name(&self) -> &str {
            self.0
        }

        fn put(&mut self, _: &Finished) -> Result<(), SinkError> {
            Ok(())
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            vec![("requests_sent", self.1.load(Ordering::Relaxed))]
        }

        fn close(&mut self, _: Instant) {
            self.1.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counting(names: &[&'static str], value: u64) -> Opened {
        let of = |name| Box::new(Counting(name, Arc::new(AtomicU64::new(value))));
        Opened { sinks: names.iter().map(|name| of(*name) as Box<dyn Sink>).collect(), ..Opened::default() }
    }

    /// One that has sent so much.
    fn sent(sink: &str, value: u64) -> Standing {
        Standing { sink: sink.to_owned(), counters: vec![("requests_sent", value)], backlog: None }
    }

    #[test]
    fn counters_go_on_when_other_sinks_take_the_place() {
        let mut work = Work::of(counting(&["a", "b"], 5).sinks, Orphans::default(), Arc::default());
        let published = |work: &Work| work.shared.lock().unwrap().standing.clone();
        work.replace(counting(&["a"], 2));
        assert_eq!(published(&work), [sent("a", 5 + 1 + 2)]);
        work.replace(counting(&["a", "b"], 0));
        assert_eq!(published(&work), [sent("a", 5 + 1 + 2 + 1), sent("b", 5 + 1)]);
    }

    #[test]
    fn counters_are_published_without_a_window() {
        let count = Arc::new(AtomicU64::new(0));
        let sink: Box<dyn Sink> = Box::new(Counting("a", Arc::clone(&count)));
        let sinks = Sinks::start(Opened { sinks: vec![sink], ..Opened::default() }).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        for value in [3, 4] {
            count.store(value, Ordering::Relaxed);
            while sinks.watcher().standing() != [sent("a", value)] {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
        }
        sinks.close();
    }

    #[test]
    fn spools_of_all_receivers_there_are_stay() {
        let folder = tempfile::tempdir().unwrap();
        let spool = folder.path().to_str().unwrap();
        let text = format!(
            "spool: {{directory: {spool:?}}}\notlp: [{{url: \"http://a:4317/\"}}]\npyroscope: [{{url: \"http://b/x\"}}]\n"
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
