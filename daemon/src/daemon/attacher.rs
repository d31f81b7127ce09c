//! Loads the shim into .NET processes as the policy says, on threads of its own: an attach may wait
//! for a runtime for seconds. And tells shims what rules leave out of their processes, as rules,
//! pods and configuration change.
//!
//! Processes are recognised by the pipeline, which sees their mappings. Each is tried at most once
//! at a time, less and less often while it fails, and never again where it cannot be done or where
//! the process wants none, as long as it runs the same program.

use super::attach_coverage::AttachCoverage;
use super::attach_report::AttachRound;
use super::state::DaemonState;
use crate::config::{AttachConfig, AttachPolicy};
use crate::kubernetes::PodSource;
use crate::memory_guard::AttachedProcesses;
use perfusion_dotnet::attach::AttachError;
use perfusion_dotnet::attach::policy::OPT_OUT;
use perfusion_dotnet::attach::policy::opted_out;
use perfusion_dotnet::attach::shim_copy;
use perfusion_dotnet::attach::workers::{self, AttachOutcome, AttachWorkers};
use perfusion_host::priority;
use perfusion_host::process::container::home;
use perfusion_host::process::handle::ProcessHandle;
use perfusion_model::backoff::Backoff;
use perfusion_model::feature::{ExcludedFeatures, Feature};
use perfusion_recorder::follow::{ProgramId, program};
use perfusion_recorder::{ManagedProcess, RecordingHandle};
use perfusion_sources::kernel::rule_set::{RuleSetFilter, ServiceExclusions};
use perfusion_sources::shim::{ShimSettings, Subscriptions};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often processes are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time between two tries.
const LONGEST: Duration = Duration::from_secs(3600);

/// What became of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessAttachState {
    Attached,
    /// After so many failures it is tried again then.
    Failed(u32, Instant),
    /// It cannot be done, or it wants none.
    Never,
    /// The policy is not for it.
    Unwanted,
}

/// What attaches came to that were not made, and why: it outlives the recordings of a daemon, each
/// of which has an attacher of its own. Whoever cannot be attached to is not tried again because
/// somebody has changed the configuration, and who failed has its wait.
#[derive(Clone, Default)]
pub struct AttachHistory(Arc<Mutex<AttachOutcomes>>);

type AttachOutcomes = HashMap<ProgramId, (ProcessAttachState, Option<String>)>;

impl AttachHistory {
    /// Of another recording than this one there is nothing to attach to any more: the shims have
    /// left with it, and what its policy was not for this one's may be for.
    fn outlives(outcome: ProcessAttachState) -> bool {
        matches!(outcome, ProcessAttachState::Never | ProcessAttachState::Failed(..))
    }

    fn keep(
        &self,
        known: &HashMap<ProgramId, ProcessAttachState>,
        reasons: &HashMap<ProgramId, String>,
    ) {
        let kept = known.iter().filter(|(_, outcome)| Self::outlives(**outcome));
        let kept =
            kept.map(|(program, outcome)| (*program, (*outcome, reasons.get(program).cloned())));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = kept.collect();
    }

    fn recall(&self) -> (HashMap<ProgramId, ProcessAttachState>, HashMap<ProgramId, String>) {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let known = kept.iter().map(|(program, (outcome, _))| (*program, *outcome)).collect();
        (known, kept.into_iter().filter_map(|(program, (_, why))| Some((program, why?))).collect())
    }
}

/// What the thread hears.
enum AttacherMessage {
    /// An attach is over.
    Done(AttachOutcome<AttachAttempt>),
    Stop,
}

/// An attach: to what, the name of its service, and after how many failures.
#[derive(Clone, PartialEq)]
struct AttachAttempt {
    program: ProgramId,
    service: Arc<str>,
    failures: u32,
    subscriptions: Subscriptions,
}

/// The thread.
pub struct Attacher {
    thread: JoinHandle<()>,
    news: Sender<AttacherMessage>,
}

impl Attacher {
    /// Begins to look.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(
        state: Arc<DaemonState>,
        watcher: RecordingHandle,
        settings: ShimSettings,
        memory: AttachHistory,
    ) -> io::Result<Self> {
        let (news, heard) = channel();
        let (tell, seen_to) = (news.clone(), watcher.clone());
        let own = move |attempt: &AttachAttempt| settings.subscribing(attempt.subscriptions);
        let workers = AttachWorkers::new(own, move |done: AttachOutcome<AttachAttempt>| {
            if done.1.is_ok() {
                seen_to.watch(done.0.program.0);
            }
            // Fails only when nobody waits for it any more.
            tell.send(AttacherMessage::Done(done)).ok();
        });
        let (known, reasons) = memory.recall();
        let work = AttacherLoop {
            state,
            watcher,
            workers,
            memory,
            known,
            reasons,
            told: HashMap::new(),
            changed: HashMap::new(),
            attached: AttachedProcesses::default(),
        };
        let thread = std::thread::Builder::new().name("attacher".into()).spawn(move || {
            priority::wait_for_others();
            work.run(&heard);
        })?;
        Ok(Self { thread, news })
    }

    /// Ends it; attaches in progress are waited for, for a while.
    pub fn stop(self) {
        // Fails only when it has panicked, which was said.
        self.news.send(AttacherMessage::Stop).ok();
        workers::join(self.thread);
    }
}

struct AttacherLoop {
    state: Arc<DaemonState>,
    watcher: RecordingHandle,
    workers: AttachWorkers<AttachAttempt>,
    memory: AttachHistory,
    /// For as long as the process lives and runs this program.
    known: HashMap<ProgramId, ProcessAttachState>,
    /// In words, why it is not attached to.
    reasons: HashMap<ProgramId, String>,
    /// What rules leave out of each, as its shim was told.
    told: HashMap<ProgramId, ExcludedFeatures>,
    /// When each that lives was last attached to or left.
    changed: HashMap<ProgramId, Instant>,
    /// Those that were attached to a moment ago.
    attached: AttachedProcesses,
}

impl AttacherLoop {
    fn run(mut self, news: &Receiver<AttacherMessage>) {
        loop {
            let managed: Vec<(ProgramId, ManagedProcess)> = self
                .watcher
                .managed()
                .into_iter()
                .filter_map(|process| Some((program(process.pid)?, process)))
                .filter(|(program, process)| program.1 == process.start_ticks)
                .collect();
            let alive: HashSet<ProgramId> = managed.iter().map(|(program, _)| *program).collect();
            // A new recording has not seen yet who was there in the one before.
            self.known.retain(|known, _| alive.contains(known) || program(known.0) == Some(*known));
            self.reasons.retain(|known, _| self.known.contains_key(known));
            self.told.retain(|program, _| alive.contains(program));
            self.changed.retain(|program, _| alive.contains(program));
            shim_copy::remove_copies_of_ended_processes();
            for death in
                self.attached.take_deaths().iter().filter(|death| death.killed_in.is_some())
            {
                self.state.counters.attached_killed.add(1);
                tracing::error!("{death}");
            }
            for (attempt, error) in self.workers.give_up() {
                self.failed(&attempt, &error);
            }
            let rules = self.state.selection();
            let mut filter = rules.as_deref().map(RuleSetFilter::new);
            let (mut of_services, mut covered) =
                (HashMap::new(), HashMap::<Arc<str>, AttachCoverage>::new());
            for (program, process) in managed {
                let left_out = match &mut filter {
                    Some(filter) => filter.left_out(process.pid, &process.service),
                    None => Some(ExcludedFeatures::default()),
                };
                if let Some(left_out) = left_out {
                    self.tell(program, &process, left_out);
                    ServiceExclusions::add(&mut of_services, &process.service, left_out.of_shim());
                }
                self.consider(program, &process, left_out);
                // What is not recorded at all is in no profile.
                if left_out.is_some() {
                    let is_attached =
                        self.known.get(&program) == Some(&ProcessAttachState::Attached);
                    let (why, changed) =
                        (self.reasons.get(&program), self.changed.get(&program).copied());
                    covered.entry(process.service).or_default().add(is_attached, why, changed);
                }
            }
            let unattached =
                self.reasons.iter().map(|(program, why)| ((program.0, program.1), why.clone()));
            self.state.attaches.publish(AttachRound {
                unattached: unattached.collect(),
                excluded: of_services,
                coverage: covered,
            });
            let mut heard = news.recv_timeout(LOOK).ok();
            while let Some(news_of) = heard {
                match news_of {
                    AttacherMessage::Done(done) => self.done(done),
                    AttacherMessage::Stop => {
                        // Before the workers are waited for: by then the next attacher may be at
                        // work.
                        self.memory.keep(&self.known, &self.reasons);
                        return self.workers.stop();
                    }
                }
                heard = news.try_recv().ok();
            }
        }
    }

    /// Has the shims of a process leave out what is left out of it now.
    fn tell(&mut self, key: ProgramId, process: &ManagedProcess, left_out: ExcludedFeatures) {
        let left_out = left_out.of_shim();
        if self.told.insert(key, left_out).unwrap_or_default() == left_out {
            return;
        }
        let subscriptions = self.state.config().recording.subscriptions().but_for(left_out);
        self.watcher.subscribe(process.pid, subscriptions, !left_out.has(Feature::Names));
        let (pid, service) = (process.pid, &process.service);
        tracing::info!(pid, %service, "left out: {}", left_out.names());
    }

    fn consider(
        &mut self,
        key: ProgramId,
        process: &ManagedProcess,
        left_out: Option<ExcludedFeatures>,
    ) {
        let config = self.state.config();
        let known = self.known.get(&key).copied();
        if let Some(reason) = self.unwanted(&config.attach, process, left_out) {
            if known == Some(ProcessAttachState::Attached) {
                tracing::info!(pid = process.pid, service = %process.service, "detached: the \
                     policy is another now");
                self.watcher.leave(process.pid);
                self.changed.insert(key, Instant::now());
            }
            // Considered anew when the policy or what is known of it changes; what cannot be done
            // stays so.
            if known.is_none_or(|known| !AttachHistory::outlives(known)) {
                self.reasons.insert(key, reason.to_owned());
                self.known.insert(key, ProcessAttachState::Unwanted);
            }
            return;
        }
        let failures = match known {
            None | Some(ProcessAttachState::Unwanted) => 0,
            Some(ProcessAttachState::Failed(failures, next)) if Instant::now() >= next => failures,
            Some(_) => return,
        };
        let subscriptions = config.recording.subscriptions().but_for(left_out.unwrap_or_default());
        let attempt = AttachAttempt {
            program: key,
            service: Arc::clone(&process.service),
            failures,
            subscriptions,
        };
        if self.workers.is_running(&attempt) {
            return;
        }
        match ProcessHandle::open(process.pid).and_then(|target| opted_out(&target)) {
            Ok(false) => {}
            Ok(true) => {
                self.known.insert(key, ProcessAttachState::Never);
                self.reasons.insert(key, format!("it opted out with {OPT_OUT}=off"));
                return;
            }
            // Whether it may be touched is to be seen another time.
            Err(source) => {
                return self.failed(&attempt, &AttachError::unread(process.pid, "environ", source));
            }
        }
        // Without a worker it has its turn when an attach is over.
        match self.workers.begin(process.pid, &attempt) {
            Ok(true) => self.attached.attaching(process.pid),
            Ok(false) => {}
            Err(error) => self.failed(&attempt, &error),
        }
    }

    fn done(&mut self, (attempt, result): AttachOutcome<AttachAttempt>) {
        let in_time = self.workers.finished(&attempt);
        match result {
            Ok(attached) => {
                self.state.counters.attached.add(1);
                let (pid, service) = (attempt.program.0, &attempt.service);
                tracing::info!(pid, %service, took = ?attached.took, "attached");
                self.reasons.remove(&attempt.program);
                self.known.insert(attempt.program, ProcessAttachState::Attached);
                self.changed.insert(attempt.program, Instant::now());
            }
            // That of one that was given up has been said.
            Err(error) if in_time => self.failed(&attempt, &error),
            Err(_) => {}
        }
    }

    fn failed(&mut self, attempt: &AttachAttempt, error: &AttachError) {
        let AttachAttempt { program: key, service, failures, .. } = attempt;
        if !error.is_after_the_request() {
            self.attached.not_asked(key.0);
        }
        self.state.counters.attach_failed.add(1);
        if matches!(error, AttachError::NoHeadroom { .. }) {
            self.state.counters.attach_no_headroom.add(1);
        }
        let (outcome, again) = after(error, self.state.config().attach.retry_after.0, *failures);
        tracing::warn!(pid = key.0, %service, %error, again, "not attached");
        self.reasons.insert(*key, error.to_string());
        self.known.insert(*key, outcome);
    }

    /// Why it is not to be attached to, as things are now.
    fn unwanted(
        &self,
        attach: &AttachConfig,
        process: &ManagedProcess,
        left_out: Option<ExcludedFeatures>,
    ) -> Option<&'static str> {
        let Some(left_out) = left_out else { return Some("not selected") };
        if left_out.all_of_shim() {
            return Some("all that needs it is left out");
        }
        if let Some(reason) = unwanted_by(attach, process) {
            return Some(reason);
        }
        let uid = home(process.pid).pod?;
        match self.state.pods.get(&uid) {
            Some(pod) if pod.wants_no_shim() => Some("its pod opted out with an annotation"),
            // It may be one that opts out.
            None if self.state.config().kubernetes.pods == PodSource::Api => {
                Some("its pod is not known yet")
            }
            _ => None,
        }
    }
}

/// Why the policy is not for this process, as far as its service is known.
fn unwanted_by(attach: &AttachConfig, process: &ManagedProcess) -> Option<&'static str> {
    if attach.policy == AttachPolicy::Off {
        return Some("attach.policy is off");
    }
    if !wants(attach, &process.service) {
        return Some("the attach policy is not for its service");
    }
    // By what it publishes it may turn out to be one that is never to be touched.
    let may_be_excepted = !attach.except.is_empty() && !process.is_named;
    may_be_excepted.then_some("its service's name is not known for sure yet")
}

/// True when the policy is for this service.
fn wants(attach: &AttachConfig, service: &str) -> bool {
    let named = |names: &[String]| names.iter().any(|name| name == service);
    !named(&attach.except)
        && match attach.policy {
            AttachPolicy::Off => false,
            AttachPolicy::Listed => named(&attach.services),
            AttachPolicy::All => true,
        }
}

/// What comes of one more failure than these, and in words when it is tried again.
fn after(error: &AttachError, first: Duration, failures: u32) -> (ProcessAttachState, String) {
    if is_final(error) {
        return (ProcessAttachState::Never, "never".to_owned());
    }
    let wait = wait(first, failures);
    (
        ProcessAttachState::Failed(failures.saturating_add(1), Instant::now() + wait),
        format!("in {wait:.0?}"),
    )
}

/// How long to wait after one more failure than these.
fn wait(first: Duration, failures: u32) -> Duration {
    Backoff::new(first, LONGEST).after(failures)
}

/// True when nothing about it can change while the process lives.
fn is_final(error: &AttachError) -> bool {
    use perfusion_dotnet::attach::policy::AttachObstacle;
    matches!(
        error,
        AttachError::NoShim
            | AttachError::Unsuitable {
                why: AttachObstacle::NotDotnet
                    | AttachObstacle::NativeAot
                    | AttachObstacle::Architecture(_)
                    | AttachObstacle::DiagnosticsOff(_)
                    | AttachObstacle::OptedOut
                    | AttachObstacle::TooOld(_),
                ..
            }
    )
}

#[cfg(test)]
mod tests {
    use super::{AttachHistory, LONGEST, ProcessAttachState, after, unwanted_by, wait, wants};
    use crate::config::{AttachConfig, AttachPolicy};
    use perfusion_dotnet::attach::AttachError;
    use perfusion_dotnet::attach::policy::AttachObstacle;
    use perfusion_recorder::ManagedProcess;
    use rustix::io::Errno;
    use std::collections::HashMap;
    use std::time::{Duration, Instant};

    #[test]
    fn the_exceptions_come_before_the_policy() {
        let attach = |policy| AttachConfig {
            policy,
            services: vec!["web".to_owned(), "bank".to_owned()],
            except: vec!["bank".to_owned()],
            ..AttachConfig::default()
        };
        let all = |policy| ["web", "bank", "other"].map(|service| wants(&attach(policy), service));
        assert_eq!(all(AttachPolicy::Off), [false, false, false]);
        assert_eq!(all(AttachPolicy::Listed), [true, false, false]);
        assert_eq!(all(AttachPolicy::All), [true, false, true]);
    }

    #[test]
    fn whoever_may_turn_out_to_be_excepted_waits_for_its_name() {
        let why = |except: &[&str], service: &str, is_named| {
            let except = except.iter().map(|name| (*name).to_owned()).collect();
            let attach =
                AttachConfig { policy: AttachPolicy::All, except, ..AttachConfig::default() };
            unwanted_by(
                &attach,
                &ManagedProcess { pid: 1, start_ticks: 1, service: service.into(), is_named },
            )
        };
        assert!(why(&["bank"], "App", false).is_some_and(|why| why.contains("not known for sure")));
        assert_eq!(why(&["bank"], "App", true), None);
        assert!(why(&["bank"], "bank", true).is_some_and(|why| why.contains("policy")));
        assert_eq!(why(&[], "App", false), None, "nobody is excepted");
    }

    #[test]
    fn the_wait_doubles_up_to_an_hour() {
        let first = Duration::from_secs(30);
        assert_eq!([0, 1, 3].map(|failures| wait(first, failures).as_secs()), [30, 60, 240]);
        assert_eq!(wait(first, 40), LONGEST);
    }

    #[test]
    fn whose_environment_cannot_be_read_is_tried_again_and_the_reason_is_the_real_one() {
        let first = Duration::from_secs(30);
        for (errno, said) in
            [(Errno::TIMEDOUT, "takes too long"), (Errno::ACCESS, "Permission denied")]
        {
            let error = AttachError::unread(7, "environ", errno);
            let (outcome, again) = after(&error, first, 1);
            assert!(
                matches!(outcome, ProcessAttachState::Failed(2, next) if next > Instant::now()),
                "{outcome:?}"
            );
            assert_eq!(again, "in 60s");
            let words = error.to_string();
            assert!(words.contains("/proc/7/environ") && words.contains(said), "{words}");
        }
        let error = AttachError::Unsuitable { pid: 7, why: AttachObstacle::NativeAot };
        assert_eq!(after(&error, first, 1), (ProcessAttachState::Never, "never".to_owned()));
    }

    #[test]
    fn the_next_recording_knows_who_failed_and_attaches_to_all_others_anew() {
        let program = |pid: u32| (pid, 1, 1, 1);
        let failed = ProcessAttachState::Failed(3, Instant::now());
        let outcomes = [
            ProcessAttachState::Never,
            failed,
            ProcessAttachState::Attached,
            ProcessAttachState::Unwanted,
        ];
        let known: HashMap<_, _> = (0..).map(program).zip(outcomes).collect();
        let reasons = (0..4).map(|pid| (program(pid), pid.to_string())).collect();
        let memory = AttachHistory::default();
        memory.keep(&known, &reasons);
        let (known, reasons) = memory.recall();
        assert_eq!(
            known,
            HashMap::from([(program(0), ProcessAttachState::Never), (program(1), failed)])
        );
        assert_eq!(reasons, HashMap::from([0, 1].map(|pid| (program(pid), pid.to_string()))));
    }
}
