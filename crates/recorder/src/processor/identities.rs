//! Who threads and processes are: the labels that their values are counted under.

use crate::names::{ThreadNames, comm_text};
use crate::pre_attach_names::PreAttachNames;
use crate::retired_programs::{RetiredProgram, RetiredPrograms};
use crate::starts::ThreadStarts;
use foldhash::{HashMap, HashMapExt as _};
use perfusion_aggregate::threads::{ThreadAccounts, Waker};
use perfusion_dotnet::attach::shim_copy;
use perfusion_host::pods::Pods;
use perfusion_host::process::ProcessTable;
use perfusion_host::process::container::ContainerIdentity;
use perfusion_host::process::service::ServiceNames;
use perfusion_host::process::table::ProcessStatus;
use perfusion_model::event::{MonotonicNs, RegionId, Rename, ThreadId, ThreadTimes};
use perfusion_model::frame::FrameKey;
use perfusion_model::labels::{Labels, NameId, OTHER, PodLabels};
use perfusion_model::text::clean;
use perfusion_model::thread_role::{RoleEvidence, StartFile};
use perfusion_symbolize::file_name;
use std::collections::HashSet;
use std::sync::Arc;

/// A thread younger than this that gets its first name was made for it. It gets it with its first
/// instructions, and waits that long for a CPU at most.
const YOUNG_NS: u64 = 1_000_000_000;

/// A process that runs a CLR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagedProcess {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// The service it belongs to; its command name where services are not told apart.
    pub service: Arc<str>,
    /// False while it is so young that it may still name itself otherwise.
    pub is_named: bool,
}

/// Labels of threads that have ended, by id and when they entered the recording.
pub(super) type LabelsOfThreads = HashMap<(u32, MonotonicNs), Labels>;

/// Names, roles, services and pods, and how finely values are told apart.
pub(super) struct Identities {
    pub(super) names: ThreadNames,
    pub(super) starts: ThreadStarts,
    /// Threads whose runtime has told no name of them.
    pub(super) pre_attach: PreAttachNames,
    pub(super) retired: RetiredPrograms,
    ended: LabelsOfThreads,
    /// Where the values of each process go; `None` when all go to one profile.
    services: Option<ServiceNames>,
    /// The pods that processes run in.
    pods: Option<Arc<Pods>>,
    /// Threads and wakers are told apart.
    is_detailed: bool,
}

impl Default for Identities {
    fn default() -> Self {
        Self {
            names: ThreadNames::default(),
            starts: ThreadStarts::default(),
            pre_attach: PreAttachNames::default(),
            retired: RetiredPrograms::default(),
            ended: HashMap::new(),
            services: None,
            pods: None,
            is_detailed: true,
        }
    }
}

impl Identities {
    /// Tells services apart from now on, and shows the pods of processes.
    pub(super) fn tell_services(&mut self, pods: Arc<Pods>) {
        self.services = Some(ServiceNames::with(Arc::clone(&pods)));
        self.pods = Some(pods);
    }

    /// True when services are told apart.
    pub(super) fn has_services(&self) -> bool {
        self.services.is_some()
    }

    /// Tells neither threads nor wakers apart from now on.
    pub(super) fn hide_threads(&mut self) {
        self.is_detailed = false;
    }

    /// True when threads and wakers are told apart.
    pub(super) fn is_detailed(&self) -> bool {
        self.is_detailed
    }

    /// The processes that run a CLR.
    pub(super) fn managed(&mut self, processes: &ProcessTable) -> Vec<ManagedProcess> {
        let managed = processes.managed().map(|(pid, start_ticks)| {
            let info = processes.id(pid).and_then(|id| processes.info(id));
            let name = info.map_or_else(|| self.names.comm(pid), |info| info.name.as_str());
            let service = self
                .services
                .as_mut()
                .map_or_else(|| name.into(), |services| services.of(pid, name).0);
            let is_named = self.services.as_ref().is_none_or(|services| services.is_sure(pid));
            ManagedProcess { pid, start_ticks, service, is_named }
        });
        managed.collect()
    }

    /// How the processes stand, with their services.
    pub(super) fn standings(&self, processes: &ProcessTable) -> Vec<ProcessStatus> {
        let mut standings = processes.standings();
        for standing in &mut standings {
            let service = self.services.as_ref().and_then(|services| services.known(standing.pid));
            standing.service = service.map(|service| service.to_string());
        }
        standings
    }

    /// The service of a process, as far as it is known.
    pub(super) fn known_service(&self, pid: u32) -> Option<Arc<str>> {
        self.services.as_ref()?.known(pid)
    }

    /// A sample of the thread was taken when the kernel called it `comm`.
    pub(super) fn sampled(
        &mut self,
        thread: ThreadId,
        comm: &[u8; 16],
        at: MonotonicNs,
        accounts: &mut ThreadAccounts,
    ) {
        let comm = comm_text(comm);
        if !self.names.is_known(thread.tid, &comm, at) {
            self.missed_rename(thread, &comm, at, accounts);
            self.names.sampled(thread.tid, &comm);
        }
    }

    /// A record says that the kernel calls the thread `comm`.
    pub(super) fn named(
        &mut self,
        thread: ThreadId,
        comm: &str,
        at: MonotonicNs,
        accounts: &mut ThreadAccounts,
    ) {
        self.missed_rename(thread, comm, at, accounts);
        self.names.kernel(thread.tid, comm);
    }

    /// The kernel calls the thread `comm`. If that is news, no record has told since when.
    fn missed_rename(
        &self,
        thread: ThreadId,
        comm: &str,
        at: MonotonicNs,
        accounts: &mut ThreadAccounts,
    ) {
        let tid = thread.tid;
        if !self.names.is_known(tid, comm, at)
            && !self.names.is_inherited(tid)
            && let Some(name) = self.names.shown(thread)
        {
            accounts.renamed(thread, &name, None);
        }
    }

    /// A thread gets another name: what it did until now is that of the old one.
    pub(super) fn renamed(
        &mut self,
        time: MonotonicNs,
        rename: &Rename,
        accounts: &mut ThreadAccounts,
    ) {
        let Rename { thread, from, to, until, skipped } = rename;
        let (tid, from, to) = (thread.tid, comm_text(from), comm_text(to));
        self.missed_rename(*thread, &from, time, accounts);
        let since = until.as_ref().map(|until| until.times.since);
        let young = since.is_some_and(|since| time.0.saturating_sub(since.0) < YOUNG_NS);
        // A new thread's first name is the one it was made for. Until that is told, it has the name
        // of its maker.
        if !(young && self.names.is_inherited(tid)) {
            let name = self.names.shown(*thread).unwrap_or_else(|| clean(&from).into());
            accounts.renamed(*thread, &name, until.as_ref());
        }
        if *skipped {
            accounts.missed_rename(*thread);
        }
        self.names.renamed(tid, &from, &to, time);
    }

    /// A runtime names its thread. The kernel was not told of it: to the kernel, the first thread's
    /// name is that of the process.
    pub(super) fn named_by_runtime(
        &mut self,
        thread: ThreadId,
        name: &str,
        accounts: &mut ThreadAccounts,
    ) {
        if let Some(before) = self.names.managed(thread, name) {
            accounts.renamed(thread, &before, None);
        }
    }

    /// A thread or a process was made.
    pub(super) fn forked(&mut self, parent: ThreadId, thread: ThreadId) {
        self.names.forked(parent.tid, thread.tid);
        self.starts.forget(thread.tid);
        if parent.pid != thread.pid
            && let Some(services) = &mut self.services
        {
            services.forked(parent.pid, thread.pid);
        }
    }

    /// `pid` is about to become another program, which the kernel calls `comm`. What there is of it
    /// and of `regions` belongs to the program that it was.
    pub(super) fn retire(
        &mut self,
        pid: u32,
        comm: &str,
        at: MonotonicNs,
        regions: &[RegionId],
        processes: &ProcessTable,
    ) {
        self.names.becomes(pid, comm);
        let mut labels = self.labels(ThreadId { pid, tid: pid }, self.is_detailed, processes);
        if let Some(services) = &self.services {
            // Where it was not asked for in time, only its name is left.
            labels.service = services.known(pid).or_else(|| labels.process.clone());
            labels.published = services.published(pid);
        }
        self.retired
            .retire(RetiredProgram { pid, at, process: processes.id(pid), labels }, regions);
    }

    /// `pid` has become another program, which the kernel calls `comm`.
    pub(super) fn became_another(&mut self, pid: u32, comm: &str) {
        self.names.became(pid, comm);
        self.starts.forget(pid);
        if let Some(services) = &mut self.services {
            services.became_another(pid);
        }
    }

    /// Records of processes were lost: what is known of services may be out of date.
    pub(super) fn doubt(&mut self) {
        if let Some(services) = &mut self.services {
            services.doubt();
        }
    }

    /// A thread ends. Its values are counted under these labels, because its ids may be another's
    /// later.
    pub(super) fn thread_ends(
        &mut self,
        times: ThreadTimes,
        labels: Labels,
        accounts: &mut ThreadAccounts,
    ) {
        let ThreadTimes { thread, since, .. } = times;
        // Of the program that its process was, if that is another one by now.
        let retired = self.retired.of_thread(thread, since);
        let retired = retired.filter(|_| thread.tid == thread.pid);
        let retired = retired.and_then(|retired| retired.labels.thread_name.clone());
        accounts.name_one(thread, || retired.or_else(|| self.names.shown(thread)));
        if accounts.thread_end(times) {
            self.ended.insert((thread.tid, since), labels);
        }
    }

    /// Takes the labels of the threads that ended in the window that ends.
    pub(super) fn take_ended(&mut self) -> LabelsOfThreads {
        std::mem::take(&mut self.ended)
    }

    /// `frames` are a whole stack of the thread.
    pub(super) fn saw_start(
        &mut self,
        thread: ThreadId,
        frames: &[FrameKey],
        processes: &ProcessTable,
    ) {
        let comm = self.names.comm(thread.tid);
        self.starts.saw(thread, frames, |frame| {
            let FrameKey::Native { image, .. } = frame else { return None };
            let image = processes.image(image)?;
            let name = file_name(&image.path);
            let file = StartFile::of(name, shim_copy::is_ours(name));
            let is_aot =
                || thread.pid != thread.tid && comm.starts_with(".NET ") && image.is_native_aot();
            if file == Some(StartFile::Program) && is_aot() {
                Some(StartFile::Runtime)
            } else {
                file
            }
        });
    }

    /// What tells the purpose of a thread.
    fn role_evidence(&self, thread: ThreadId, processes: &ProcessTable) -> RoleEvidence {
        let info = processes.id(thread.pid).and_then(|id| processes.info(id));
        self.starts.evidence(
            thread,
            self.names.comm(thread.tid),
            info.is_some_and(|info| info.is_clr),
        )
    }

    /// Whether the thread does nothing but collect garbage.
    pub(super) fn is_collector(&self, thread: ThreadId, processes: &ProcessTable) -> bool {
        RoleEvidence::may_collect(self.names.comm(thread.tid))
            && self.role_evidence(thread, processes).is_collector()
    }

    /// What a thread's values are counted under, without its service.
    pub(super) fn labels(
        &self,
        thread: ThreadId,
        is_detailed: bool,
        processes: &ProcessTable,
    ) -> Labels {
        let info = processes.id(thread.pid).and_then(|id| processes.info(id));
        let evidence = self.role_evidence(thread, processes);
        Labels {
            pid: Some(thread.pid),
            thread_id: is_detailed.then_some(thread.tid),
            thread_name: self.names.shown(thread),
            thread_role: Some(evidence.role()),
            role_evidence: (!evidence.unnamed().is_empty()).then(|| Arc::new(evidence)),
            process: info.map(|info| info.name.as_str().into()),
            container_id: info.and_then(|info| info.home.container.clone()),
            pod: info.and_then(|info| self.pod(&info.home)),
            ..Labels::default()
        }
    }

    /// What is shown of the pod.
    fn pod(&self, home: &ContainerIdentity) -> Option<Arc<PodLabels>> {
        let pods = self.pods.as_ref()?;
        let pod = pods.get(home.pod.as_deref()?)?;
        Some(Arc::new(pods.shown().of(&pod, home.container.as_deref())))
    }

    fn labels_with_service(&mut self, thread: ThreadId, processes: &ProcessTable) -> Labels {
        let mut labels = self.labels(thread, self.is_detailed, processes);
        if let Some(services) = &mut self.services {
            let comm = labels.process.as_deref().unwrap_or_else(|| self.names.comm(thread.pid));
            let (service, published) = services.of(thread.pid, comm);
            (labels.service, labels.published) = (Some(service), published);
        }
        labels
    }

    /// What the values of a thread that entered the recording at `since` are counted under, with
    /// its service, and with as much detail as this recording has.
    pub(super) fn labels_of(
        &mut self,
        thread: ThreadId,
        since: MonotonicNs,
        processes: &ProcessTable,
    ) -> Labels {
        let mut labels = self.labels_with_service(thread, processes);
        if let Some(retired) = self.retired.of_thread(thread, since) {
            retired.relabel(&mut labels, thread);
        }
        labels
    }

    /// What the values of a runtime's thread are counted under; those of its process without one.
    pub(super) fn region_labels(
        &mut self,
        region: RegionId,
        pid: u32,
        tid: Option<u32>,
        processes: &ProcessTable,
    ) -> Labels {
        let thread = ThreadId { pid, tid: tid.unwrap_or(pid) };
        let mut labels = self.labels_with_service(thread, processes);
        if let Some(retired) = self.retired.of_region(region) {
            retired.relabel(&mut labels, thread);
        }
        labels
    }

    /// What a thread was called when the name was noted, as whole as it is known by now.
    pub(super) fn name_then(&self, thread: ThreadId, name: NameId) -> Option<Arc<str>> {
        self.names.text(name).map(|name| self.names.completed(thread, &name))
    }

    /// The owner of a lock as labels' values, with ids and without, like those of wakers.
    pub(super) fn owner_texts(&self, pid: Option<u32>, owner: u32) -> (Arc<str>, Arc<str>) {
        let thread = ThreadId { pid: pid.unwrap_or(0), tid: owner };
        let name = self.names.shown(thread).unwrap_or_default();
        (format!("{name} {}/{owner}", thread.pid).into(), name)
    }

    /// Who ended a wait as labels' values, with ids and without.
    pub(super) fn waker_texts(&self, waker: Waker) -> (Arc<str>, Arc<str>) {
        let same = |text: &str| {
            let text: Arc<str> = text.into();
            (Arc::clone(&text), text)
        };
        match waker {
            Waker::Timer => same("timer"),
            Waker::Interrupt => same("interrupt"),
            Waker::Other => same(OTHER),
            Waker::Thread { id, comm, .. } => {
                let name = self.names.completed(id, &comm_text(&comm));
                (format!("{name} {}/{}", id.pid, id.tid).into(), name)
            }
        }
    }

    /// Forgets all threads and processes but these, all names but these, and the regions that are
    /// gone.
    pub(super) fn keep(
        &mut self,
        tids: &HashSet<u32>,
        pids: &HashSet<u32>,
        names: &HashSet<NameId>,
        gone: &HashSet<RegionId>,
    ) {
        self.names.keep(tids, names);
        self.starts.keep(tids);
        if let Some(services) = &mut self.services {
            services.keep(pids);
        }
        for &region in gone {
            self.retired.forget(region);
        }
    }
}
