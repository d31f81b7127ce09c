//! A recording of one process's shim alone, in windows of which the beginning and the end are known
//! to the object: the app is told what to do, and a window ends when every record of it was read.
//! From the records on it is the way of `perfusion record`: processor, profile, file.

use std::collections::HashSet;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, ensure};
use perfusion_dotnet::attach;
use perfusion_host::process::ProcessTable;
use perfusion_model::event::{Event, EventKind, MonotonicNs, ShimEvent};
use perfusion_pprof::proto::Profile;
use perfusion_pprof::{self, ProfileInfo};
use perfusion_recorder::processor::Processor;
use perfusion_sources::order::EventOrder;
use perfusion_sources::shim::{ShimLimits, ShimSource};
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use profiler_protocol::counter::Counter;

use crate::app::App;
use crate::region::{counted, regions, unread};

/// Time between two looks; a shim's ring holds some hundred allocations.
const ROUND: Duration = Duration::from_millis(2);
/// Longest wait for something that takes moments, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// So many allocations were lost, for nobody read the ring in time: a machine so busy tells nothing
/// about estimates.
#[derive(Debug)]
pub struct RingFull(u64);

impl std::fmt::Display for RingFull {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "the ring was full: {} allocations were lost", self.0)
    }
}

impl std::error::Error for RingFull {}

/// What `measure` found, the first time that no allocation was lost.
///
/// # Errors
/// Those of `measure`, and its loss of allocations when that is so four times.
pub fn without_loss<T>(measure: impl Fn() -> anyhow::Result<T>) -> anyhow::Result<T> {
    for _ in 0..3 {
        match measure() {
            Err(error) if error.is::<RingFull>() => println!("again: {error}"),
            result => return result,
        }
    }
    measure()
}

/// The process and what listens to it. The shim leaves it when this is dropped.
pub struct Tap {
    app: App,
    shims: ShimSource,
    order: EventOrder,
    processor: Processor,
    /// Names of types are told once.
    names: Vec<Event>,
    allocations: u64,
    /// Types met, and types named.
    met: HashSet<u64>,
    named: HashSet<u64>,
    began: MonotonicNs,
}

impl Tap {
    /// Attaches to `app`, and has it do `command` until its allocations are heard of. The first
    /// window begins then.
    ///
    /// # Errors
    /// When that does not come about.
    pub fn attach(app: App, limits: ShimLimits, command: &str) -> anyhow::Result<Self> {
        let mut tap = Self::attach_whole(app, limits, command)?;
        tap.next();
        Ok(tap)
    }

    /// The same, and all is one window, for live objects.
    ///
    /// # Errors
    /// The same.
    pub fn attach_whole(app: App, limits: ShimLimits, command: &str) -> anyhow::Result<Self> {
        let settings = ShimSettings::new(Subscriptions::default())?;
        attach::attach(app.pid(), settings)?;
        let mut shims = ShimSource::new(settings.owner, limits);
        shims.watch(app.pid());
        let (order, processor) = (EventOrder::default(), processor(&app));
        let began = MonotonicNs::now();
        let mut tap = Self {
            app,
            shims,
            order,
            processor,
            names: Vec::new(),
            allocations: 0,
            met: HashSet::new(),
            named: HashSet::new(),
            began,
        };
        let begin = Instant::now();
        while tap.allocations < 25 {
            ensure!(begin.elapsed() < DEADLINE, "no allocations are heard of");
            tap.perform(command)?;
        }
        Ok(tap)
    }

    /// Has the app do `command`, and reads all that its shim says of it.
    ///
    /// # Errors
    /// When the app or its shim fails, or records were lost.
    pub fn perform(&mut self, command: &str) -> anyhow::Result<()> {
        let Self { app, shims, order, .. } = self;
        std::thread::scope(|scope| {
            let performing = scope.spawn(|| app.perform(command));
            // It is listened to only while somebody reads.
            while !performing.is_finished() {
                shims.drain(&mut |event| order.push(event));
                std::thread::sleep(ROUND);
            }
            performing
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("a thread of the test failed")))
        })?;
        self.catch_up()
    }

    /// What the app answers to `line`, in the line that begins with `word`.
    ///
    /// # Errors
    /// When it does not.
    pub fn ask(&mut self, line: &str, word: &str) -> anyhow::Result<serde_json::Value> {
        self.app.ask(line, word)
    }

    /// A counter of the shim.
    pub fn counted(&self, counter: Counter) -> u64 {
        counted(&regions(&self.app), counter)
    }

    /// Reads until every record that was written, every allocation the shim has counted and the
    /// name of every type were read.
    fn catch_up(&mut self) -> anyhow::Result<()> {
        let begin = Instant::now();
        loop {
            let regions = regions(&self.app);
            // The one that is downsampled is counted as a sample before.
            let downsampled = counted(&regions, Counter::AllocationsDownsampled);
            let told = counted(&regions, Counter::AllocationSamples).saturating_sub(downsampled);
            let lost = counted(&regions, Counter::AllocationsDroppedFull);
            if lost != 0 {
                return Err(RingFull(lost).into());
            }
            let unread = unread(&regions);
            let order = &mut self.order;
            self.shims.drain(&mut |event| order.push(event));
            let mut events = Vec::new();
            order.finish(&mut events);
            for event in events {
                if let EventKind::Shim { event: shim, .. } = &event.kind {
                    match shim {
                        ShimEvent::Allocation(allocation) => {
                            self.allocations += 1;
                            self.met.insert(allocation.type_id);
                        }
                        ShimEvent::TypeName { type_id, .. } => {
                            self.named.insert(*type_id);
                            self.names.push(event.clone());
                        }
                        _ => {}
                    }
                }
                self.processor.event(event);
            }
            if unread == 0 && self.allocations >= told && self.met.is_subset(&self.named) {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < DEADLINE,
                "{} of {told} allocations were read",
                self.allocations
            );
            std::thread::sleep(ROUND);
        }
    }

    /// The profile of the window so far. Allocations begin at zero in the next one, live objects go
    /// on.
    ///
    /// # Errors
    /// When the profile cannot be made.
    pub fn profile(&mut self) -> anyhow::Result<Profile> {
        let now = MonotonicNs::now();
        let window = self.processor.close(now, &[]);
        let about = ProfileInfo {
            start: SystemTime::now(),
            duration: Duration::from_nanos(now.0.saturating_sub(self.began.0)),
            period_ns: 1,
            main_image: None,
            comments: self.processor.estimator_comments(),
        };
        let bytes = perfusion_pprof::encode(
            &window,
            &self.processor.symbolizer,
            &self.processor.processes,
            &about,
        )?;
        perfusion_pprof::decode(&bytes).context("a profile of our own")
    }

    /// Forgets the window and begins the next one, live objects included.
    pub fn next(&mut self) {
        self.processor = processor(&self.app);
        self.began = MonotonicNs::now();
        for name in &self.names {
            self.processor.event(name.clone());
        }
    }

    /// Lets go of the process and stops it.
    ///
    /// # Errors
    /// When it ends badly.
    pub fn stop(mut self) -> anyhow::Result<serde_json::Value> {
        self.shims.detach_all();
        self.app.stop()
    }
}

fn processor(app: &App) -> Processor {
    let mut processes = ProcessTable::new();
    // One that cannot be read has stacks that say so.
    processes.adopt(app.pid()).ok();
    Processor::new(processes).without_threads()
}
