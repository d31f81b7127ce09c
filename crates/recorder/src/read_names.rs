//! Names of managed methods that are read from their processes' memory, on a thread of their own.
//! The processor asks for them as soon as it has met a method of a process without a shim: the
//! process may soon be gone.

use perfusion_dotnet::method_names::process::ProcessMethodNames;
use perfusion_dotnet::method_names::{NamedMethod, NoName, UnnamedCode};
use perfusion_model::event::MethodBody;
use perfusion_model::frame::ProcessId;
use std::collections::HashMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, Instant};

/// Batches on their way to the thread.
const BATCHES: usize = 256;
/// Most processes whose runtimes are known at once.
const MOST_PROCESSES: usize = 64;
/// What was read of a process's modules is forgotten when no name of it was wanted for so long.
const FORGET_MODULES: Duration = Duration::from_secs(3);
/// And the process itself after this.
const FORGET_PROCESS: Duration = Duration::from_secs(60);
/// Most bytes of modules' metadata that are kept, of all processes.
const MOST_KEPT: usize = 64 << 20;

/// A process whose memory is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ReadProcess {
    pub(crate) id: ProcessId,
    pub(crate) pid: u32,
    pub(crate) start_ticks: u64,
}

/// A body that a name is wanted for.
#[derive(Clone, Debug)]
pub(crate) struct UnreadName {
    pub(crate) process: ReadProcess,
    pub(crate) generation: u32,
    pub(crate) code: UnnamedCode,
}

/// What was found.
#[derive(Debug)]
pub(crate) struct ReadName {
    pub(crate) process: ProcessId,
    pub(crate) generation: u32,
    pub(crate) method: MethodBody,
}

/// What became of names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadNameCounters {
    read: u64,
    not_described: u64,
    no_method: u64,
    inconsistent: u64,
    no_metadata: u64,
    replaced: u64,
    held_up: u64,
    lost: u64,
}

impl ReadNameCounters {
    /// As (name, count).
    pub(crate) fn list(&self) -> [(&'static str, u64); 8] {
        [
            ("names_read", self.read),
            ("names_not_described", self.not_described),
            ("names_without_method", self.no_method),
            ("names_inconsistent", self.inconsistent),
            ("names_without_metadata", self.no_metadata),
            ("names_of_replaced_code", self.replaced),
            ("names_held_up", self.held_up),
            ("names_lost", self.lost),
        ]
    }

    fn count(&mut self, found: Option<&Result<NamedMethod, NoName>>) {
        let counter = match found {
            Some(Ok(_)) => &mut self.read,
            Some(Err(NoName::NotDescribed)) => &mut self.not_described,
            Some(Err(NoName::NoMethod)) => &mut self.no_method,
            Some(Err(NoName::Inconsistent)) => &mut self.inconsistent,
            Some(Err(NoName::NoMetadata)) => &mut self.no_metadata,
            Some(Err(NoName::Replaced)) => &mut self.replaced,
            None => &mut self.held_up,
        };
        *counter += 1;
    }
}

/// A batch that was read.
struct ReadBatch {
    names: Vec<(UnreadName, Option<Result<NamedMethod, NoName>>)>,
}

/// The processor's end. The thread ends with it.
pub(crate) struct NameReader {
    wanted: SyncSender<Vec<UnreadName>>,
    read: Receiver<ReadBatch>,
    pending: usize,
    counters: ReadNameCounters,
}

impl NameReader {
    /// Starts the thread.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn start() -> io::Result<Self> {
        let (wanted, wants) = sync_channel(BATCHES);
        // No more than was asked for comes back.
        let (reads, read) = channel();
        let run = move || NameReaderThread::default().run(&wants, &reads);
        std::thread::Builder::new().name("names".into()).spawn(run)?;
        Ok(Self { wanted, read, pending: 0, counters: ReadNameCounters::default() })
    }

    /// Wants these names. What finds no room is counted, and wanted again when it is met again.
    pub(crate) fn want(&mut self, names: Vec<UnreadName>) {
        let count = names.len();
        if count == 0 {
            return;
        }
        match self.wanted.try_send(names) {
            Ok(()) => self.pending += count,
            Err(_) => self.counters.lost += count as u64,
        }
    }

    /// The names that were read since the last call.
    pub(crate) fn take(&mut self) -> Vec<ReadName> {
        let mut all = Vec::new();
        while let Ok(ReadBatch { names }) = self.read.try_recv() {
            self.pending = self.pending.saturating_sub(names.len());
            for (wanted, found) in names {
                self.counters.count(found.as_ref());
                if let Some(Ok(method)) = found {
                    all.push(read_name(&wanted, method));
                }
            }
        }
        all
    }

    /// How many were wanted and are not here.
    pub(crate) fn pending(&self) -> usize {
        self.pending
    }

    /// What became of them.
    pub(crate) fn counters(&self) -> ReadNameCounters {
        self.counters
    }
}

fn read_name(wanted: &UnreadName, method: NamedMethod) -> ReadName {
    let NamedMethod { name, module_name, module, token, dynamic } = method;
    let method = MethodBody {
        asked: wanted.code.start,
        module_id: module,
        token,
        dynamic,
        name,
        module: module_name,
        ranges: Vec::new(),
        il_map: None,
    };
    ReadName { process: wanted.process.id, generation: wanted.generation, method }
}

/// A process as the thread knows it.
struct KnownProcess {
    /// `None` where there is nothing to be read.
    names: Option<ProcessMethodNames>,
    used: Instant,
}

#[derive(Default)]
struct NameReaderThread {
    processes: HashMap<ReadProcess, KnownProcess>,
}

impl NameReaderThread {
    fn run(mut self, wants: &Receiver<Vec<UnreadName>>, reads: &Sender<ReadBatch>) {
        loop {
            match wants.recv_timeout(FORGET_MODULES) {
                Ok(names) => {
                    if reads.send(self.read(names)).is_err() {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.forget();
        }
    }

    fn read(&mut self, mut names: Vec<UnreadName>) -> ReadBatch {
        names.sort_by_key(|name| name.process.id);
        let mut all = Vec::new();
        for names in names.chunk_by(|a, b| a.process == b.process) {
            let codes: Vec<UnnamedCode> = names.iter().map(|name| name.code.clone()).collect();
            let found = names.first().map(|first| self.read_of(first.process, &codes));
            let mut found = found.unwrap_or_default().into_iter();
            all.extend(names.iter().map(|name| (name.clone(), found.next())));
        }
        ReadBatch { names: all }
    }

    fn read_of(
        &mut self,
        process: ReadProcess,
        codes: &[UnnamedCode],
    ) -> Vec<Result<NamedMethod, NoName>> {
        let now = Instant::now();
        if self.processes.len() >= MOST_PROCESSES && !self.processes.contains_key(&process) {
            let oldest = self.processes.iter().min_by_key(|(_, known)| known.used);
            if let Some(oldest) = oldest.map(|(process, _)| *process) {
                self.processes.remove(&oldest);
            }
        }
        let known = self.processes.entry(process).or_insert_with(|| KnownProcess {
            names: ProcessMethodNames::open(process.pid, process.start_ticks),
            used: now,
        });
        known.used = now;
        let read = known.names.as_mut().map(|names| names.read(codes)).unwrap_or_default();
        self.forget_modules();
        read
    }

    /// Bounds what is kept of the modules of all processes: what was used longest ago is read again
    /// when it is needed.
    fn forget_modules(&mut self) {
        let mut all: Vec<(Instant, &mut ProcessMethodNames)> = self
            .processes
            .values_mut()
            .filter_map(|known| Some((known.used, known.names.as_mut()?)))
            .collect();
        all.sort_unstable_by_key(|(used, _)| std::cmp::Reverse(*used));
        let mut kept = 0;
        for (_, names) in all {
            kept += names.kept_bytes();
            if kept > MOST_KEPT {
                kept -= names.kept_bytes();
                names.forget_modules();
            }
        }
    }

    fn forget(&mut self) {
        self.processes.retain(|_, known| known.used.elapsed() < FORGET_PROCESS);
        for known in self.processes.values_mut() {
            if known.used.elapsed() >= FORGET_MODULES
                && let Some(names) = &mut known.names
            {
                names.forget_modules();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        NameReader, NameReaderThread, ReadNameCounters, ReadProcess, UnnamedCode, UnreadName,
    };
    use crate::counters::DAEMON;
    use perfusion_host::process::start_ticks;
    use perfusion_model::frame::ProcessId;
    use std::time::{Duration, Instant};

    #[test]
    fn its_counters_are_described_and_no_others_are() {
        let described = DAEMON.iter().map(|(name, _)| *name);
        let described: Vec<&str> = described.filter(|name| name.starts_with("names_")).collect();
        assert_eq!(ReadNameCounters::default().list().map(|(name, _)| name).to_vec(), described);
    }

    fn wanted(pid: u32, start_ticks: u64, start: u64) -> UnreadName {
        let process = ReadProcess { id: ProcessId(1), pid, start_ticks };
        UnreadName { process, generation: 0, code: UnnamedCode { start, body: None } }
    }

    #[test]
    fn a_process_without_a_runtime_and_one_that_is_gone_have_no_names_and_hold_nobody_up() {
        let me = std::process::id();
        let mut reader = NameReader::start().unwrap();
        reader.want(Vec::new());
        assert_eq!(reader.pending(), 0);
        reader.want(vec![wanted(me, start_ticks(me).unwrap(), 0x1000), wanted(me, 1, 0x2000)]);
        assert_eq!(reader.pending(), 2);
        let begun = Instant::now();
        while reader.pending() > 0 {
            assert!(reader.take().is_empty() && begun.elapsed() < Duration::from_secs(60));
        }
        let counters = reader.counters();
        assert_eq!((counters.not_described, counters.held_up, counters.read), (1, 1, 0));
    }

    #[test]
    fn no_more_processes_are_known_than_there_is_room_for() {
        let (me, mut thread) = (std::process::id(), NameReaderThread::default());
        let all = (0..2 * super::MOST_PROCESSES as u64).map(|ticks| wanted(me, ticks, 0x1000));
        let read = thread.read(all.collect());
        assert_eq!(read.names.len(), 2 * super::MOST_PROCESSES);
        assert!(thread.processes.len() <= super::MOST_PROCESSES);
    }
}
