//! `record --alloc-counts`: what each .NET process of a started program allocates, counted per type by the runtime itself
//! (GCSampledObjectAllocation events). It counts only for a session that is there before it starts, so each process waits for us at a port of
//! ours (`attach::port`). One thread a process reads its stream into a [`tally`].

pub mod tally;

use crate::attach::ipc::{self, Events, Listen};
use crate::attach::port::{Cookie, Port, PortError, Visit};
use crate::attach::target::Target;
use crate::exact::{Account, Count, Ending, Process, Type};
use crate::heap::nettrace::{NettraceError, Reader};
use crate::pprof::COUNTS_PREFIX;
use crate::process::start_ticks;
use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tally::{Tallied, Tally};

/// Keywords: types, and with their names.
const TYPES: u64 = 0x8_0000 | 0x100_0000;
/// Informational.
const LEVEL: u32 = 4;
/// Most memory a process takes for events that were not read yet; the rest is dropped and counted.
const BUFFER_MIB: u32 = 64;
/// Processes that are counted, at most.
const PROCESSES: usize = 256;
/// Processes that are known, at most; of more than these each waits until another one has ended.
const KNOWN: usize = 16_384;
const READ_BYTES: usize = 256 << 10;
/// Between looks at whether all is over.
const LOOK: Duration = Duration::from_millis(100);
/// The runtime is back at once when it has been answered.
const SOON: Duration = Duration::from_millis(1);
/// For a runtime to end its session, and to send what it still has.
const ENDING: Duration = Duration::from_secs(15);
/// Visitors that are answered or read at once, at most: each has a thread. Twice those that are counted, for each comes again while it is.
const SERVED: usize = 2 * PROCESSES;
/// Of these at most so many of one process, and runtimes that are counted in one: it has one after the other, by exec.
const OF_ONE: usize = 8;
/// Between looks at whether those who wait in vain still do.
const PARKED: Duration = Duration::from_secs(1);

/// How often the runtime tells of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rate {
    /// 5 times a second.
    Low,
    /// 100 times a second.
    High,
}

impl Rate {
    /// Keywords GCSampledObjectAllocationHigh and GCSampledObjectAllocationLow.
    fn keyword(self) -> u64 {
        match self {
            Self::Low => 0x200_0000,
            Self::High => 0x20_0000,
        }
    }
}

/// One runtime: told from one in a later process of the same pid, and from one in the program that a process was before it called exec.
type Key = (u32, Option<u64>, Cookie);

/// How far a process is.
#[derive(Debug, Default)]
struct Known {
    /// It was asked for its events, or will not be.
    asked: bool,
    /// It has not answered yet.
    asking: bool,
    /// It knows no events without stacks.
    old: bool,
    /// It runs.
    resumed: bool,
    /// Its session while its events are read.
    session: Option<u64>,
    /// Its name, where it is counted.
    name: Option<String>,
    /// What was counted, or why nothing was.
    result: Option<Result<Tallied, String>>,
}

#[derive(Debug, Default)]
struct Shared {
    known: Mutex<HashMap<Key, Known>>,
    /// Who has nothing more to be answered; a runtime that is hung up on comes again at once. One of each: a runtime makes one connection at a time.
    parked: Mutex<HashMap<Key, Visit>>,
    /// How many visits of each process are being answered.
    served: Mutex<HashMap<u32, usize>>,
    over: AtomicBool,
    give_up: Arc<AtomicBool>,
}

/// What a visitor has come for.
enum Step {
    Listen {
        stacks: bool,
    },
    Resume,
    /// Another visit is being answered.
    Wait,
    Nothing,
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, HashMap<Key, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What comes next for a process; `None`: there is no room for it now.
    fn step(&self, key: Key) -> Option<Step> {
        let mut known = self.known();
        let is_new = !known.contains_key(&key);
        if is_new && known.len() >= KNOWN {
            return None;
        }
        let is_left_out = is_new && {
            let counted = || known.iter().filter(|(_, of)| of.name.is_some());
            counted().count() >= PROCESSES
                || counted().filter(|((pid, ..), _)| *pid == key.0).count() >= OF_ONE
        };
        let of = known.entry(key).or_default();
        Some(match (of.asked, of.resumed) {
            _ if of.asking => Step::Wait,
            (false, _) => {
                of.asked = true;
                if is_left_out {
                    of.resumed = true;
                    return Some(Step::Resume);
                }
                of.asking = true;
                of.name = Some(name(key.0));
                Step::Listen { stacks: of.old }
            }
            (true, false) => {
                of.resumed = true;
                Step::Resume
            }
            (true, true) => Step::Nothing,
        })
    }

    fn parked(&self) -> MutexGuard<'_, HashMap<Key, Visit>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn served(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, key: Key, change: impl FnOnce(&mut Known)) {
        if let Some(of) = self.known().get_mut(&key) {
            change(of);
        }
    }
}

fn name(pid: u32) -> String {
    Target::open(pid).and_then(|target| target.comm()).unwrap_or_default()
}

/// The counting of one recording.
#[derive(Debug)]
pub struct Counting {
    port: Arc<Port>,
    rate: Rate,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Counting {
    /// Opens the port.
    ///
    /// # Errors
    /// See [`PortError`].
    pub fn open(rate: Rate) -> Result<Self, PortError> {
        Ok(Self { port: Arc::new(Port::open()?), rate, shared: Arc::default(), accepting: None })
    }

    /// What the program must have in its environment.
    #[must_use]
    pub fn environment(&self) -> (OsString, OsString) {
        self.port.environment()
    }

    /// Begins to answer those who come.
    ///
    /// # Errors
    /// When a thread cannot be started.
    pub fn start(&mut self) -> io::Result<()> {
        let (port, shared, rate) = (Arc::clone(&self.port), Arc::clone(&self.shared), self.rate);
        let run = move || {
            let mut looked = Instant::now();
            // Pairs with the store in `finish`; nothing else is told by it.
            while !shared.over.load(Ordering::Relaxed) {
                if looked.elapsed() >= PARKED {
                    shared.parked().retain(|_, visit| !visit.is_over(Duration::ZERO));
                    looked = Instant::now();
                }
                let Some(visit) = port.accept(LOOK) else { continue };
                // Without a thread it comes again.
                if let Some(served) = Served::one_more(&shared, visit.pid()) {
                    let serve = move || serve(visit, rate, &served.shared);
                    thread::Builder::new().name("runtime".into()).spawn(serve).ok();
                }
            }
            shared.parked().clear();
        };
        self.accepting = Some(thread::Builder::new().name("port".into()).spawn(run)?);
        Ok(())
    }

    /// Ends the counting in all processes. Whoever starts from now on is let go on by the port's keeper.
    #[must_use]
    pub fn finish(self) -> Counted {
        self.shared.over.store(true, Ordering::Relaxed);
        self.accepting.map(JoinHandle::join);
        let until = Instant::now() + ENDING;
        let open: Vec<(u32, u64)> =
            self.shared.known().iter().filter_map(|(key, of)| Some((key.0, of.session?))).collect();
        let stopping: Vec<_> = open
            .into_iter()
            .map(|(pid, session)| {
                let stop = move || {
                    let target = Target::open(pid).ok()?;
                    // One that has ended, or does not answer, ends its stream by that.
                    ipc::stop_listening(&target, session, ENDING).ok()
                };
                thread::Builder::new().name("stop".into()).spawn(stop)
            })
            .collect();
        let is_read = || self.shared.known().values().all(|of| of.session.is_none());
        while !is_read() && Instant::now() < until {
            thread::sleep(LOOK / 10);
        }
        self.shared.give_up.store(true, Ordering::Relaxed);
        // A reader looks at that ten times a second.
        let until = Instant::now() + LOOK * 20;
        while !is_read() && Instant::now() < until {
            thread::sleep(LOOK / 10);
        }
        drop(stopping);
        let known = std::mem::take(&mut *self.shared.known());
        let mut counted = Counted { processes: Vec::new(), left_out: 0 };
        for ((pid, ticks, _), of) in known {
            match (of.name, of.result) {
                (Some(name), Some(result)) => counted.processes.push((ticks, Of { pid, name, result })),
                (Some(name), None) => {
                    let result = Err("its events did not end".to_owned());
                    counted.processes.push((ticks, Of { pid, name, result }));
                }
                (None, _) => counted.left_out += 1,
            }
        }
        counted.processes.sort_by_key(|(ticks, of)| (*ticks, of.pid));
        counted
    }
}

/// A visit that is being answered, until it is dropped.
struct Served {
    shared: Arc<Shared>,
    pid: u32,
}

impl Served {
    /// One more of this process; `None` where there are too many, of it or in all.
    fn one_more(shared: &Arc<Shared>, pid: u32) -> Option<Self> {
        let mut all = shared.served();
        let own = all.get(&pid).copied().unwrap_or(0);
        if own >= OF_ONE || all.values().sum::<usize>() >= SERVED {
            return None;
        }
        all.insert(pid, own + 1);
        Some(Self { shared: Arc::clone(shared), pid })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut all = self.shared.served();
        match all.get_mut(&self.pid) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(all.remove(&self.pid)),
        }
    }
}

/// Does for a visitor what comes next, on a thread of its own.
fn serve(mut visit: Visit, rate: Rate, shared: &Shared) {
    let pid = visit.pid();
    let Ok(cookie) = visit.greet() else { return };
    let key = (pid, start_ticks(pid), cookie);
    let mut step = shared.step(key);
    while matches!(step, Some(Step::Wait)) {
        thread::sleep(SOON);
        step = shared.step(key);
    }
    match step {
        Some(Step::Listen { stacks }) => {
            let what = Listen { keywords: rate.keyword() | TYPES, level: LEVEL, buffer_mib: BUFFER_MIB };
            let result = match visit.listen(&what, stacks, Arc::clone(&shared.give_up)) {
                Ok(events) => {
                    shared.change(key, |of| (of.session, of.asking) = (Some(events.session()), false));
                    read(events, pid).map_err(|why| {
                        format!("its events stopped to make sense, and what they had told is left out: {why}")
                    })
                }
                // It comes again.
                Err(error) if error.is_unknown_command() && !stacks => {
                    return shared.change(key, |of| (of.asked, of.asking, of.old) = (false, false, true));
                }
                Err(error) => Err(error.to_string()),
            };
            shared.change(key, |of| (of.session, of.asking, of.result) = (None, false, Some(result)));
        }
        Some(Step::Resume) => {
            if visit.resume().is_err() {
                shared.change(key, |of| of.resumed = false);
            }
        }
        Some(Step::Wait | Step::Nothing) => drop(shared.parked().insert(key, visit)),
        None => {
            shared.known().retain(|_, of| of.name.is_some() || !of.resumed);
        }
    }
}

/// # Errors
/// When events cannot be read any more though they go on: what was counted until then is of a part of the process's time.
fn read(events: Events, pid: u32) -> Result<Tallied, NettraceError> {
    let mut tally = Tally::new(Target::open(pid).ok());
    let mut reader = match Reader::new(BufReader::with_capacity(READ_BYTES, events)) {
        Ok(reader) => reader,
        Err(NettraceError::Read(ended)) => return Ok(tally.finish(0, Some(why_ended(&ended)))),
        Err(malformed) => return Err(malformed),
    };
    let end = loop {
        match reader.read(&mut |event| tally.event(event)) {
            Ok(true) => tally.look(),
            Ok(false) => break None,
            Err(NettraceError::Read(ended)) => break Some(why_ended(&ended)),
            Err(malformed) => return Err(malformed),
        }
    };
    Ok(tally.finish(reader.lost(), end))
}

fn why_ended(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it was killed, crashed or became another program".to_owned(),
        _ => error.to_string(),
    }
}

/// One process.
#[derive(Debug)]
pub struct Of {
    /// Its pid.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// What it allocated, or why that is not known.
    pub result: Result<Tallied, String>,
}

/// What was counted.
#[derive(Debug)]
pub struct Counted {
    /// The processes in the order they started, with when that was.
    pub processes: Vec<(Option<u64>, Of)>,
    /// Processes beyond those that are counted.
    pub left_out: usize,
}

impl Counted {
    /// As exact mode has it, for the profile.
    #[must_use]
    pub fn account(&self) -> Account {
        let process = |of: &Of| {
            let process = Process { pid: of.pid, name: of.name.clone(), ..Process::default() };
            let Ok(tallied) = &of.result else { return Process { ending: Ending::Declined, ..process } };
            let types = tallied.types.iter().map(|found| Type {
                name: found.name.shown.to_string(),
                type_raw: found.name.raw.as_deref().map(str::to_owned),
                class: found.id.unwrap_or(0),
                allocated: Count { objects: found.objects, bytes: found.bytes },
                ..Type::default()
            });
            Process { types: types.collect(), ..process }
        };
        let processes = self.processes.iter().map(|(_, of)| process(of)).collect();
        Account { processes, ..Account::default() }
    }

    /// What a person is told right after the recording, and what stands in the profile's comments: a line a process.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.processes.iter().map(|(_, of)| line(of)).collect();
        if self.processes.is_empty() {
            lines.push(
                "no .NET runtime came to the diagnostic port: no .NET program, or one with DOTNET_EnableDiagnostics(_IPC)=0".to_owned(),
            );
        }
        if self.left_out > 0 {
            lines.push(format!("{} more processes are not counted", self.left_out));
        }
        lines.into_iter().map(|line| format!("{COUNTS_PREFIX}{line}")).collect()
    }
}

fn line(of: &Of) -> String {
    let who = format!("pid {} ({})", of.pid, of.name);
    match &of.result {
        Ok(tallied) => format!("{who}: {tallied}"),
        Err(why) => format!("{who}: not counted: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Counted, Of};
    use crate::counts::tally::{Tallied, Type};
    use crate::exact::Ending;
    use crate::pprof::tells_of_uncounted;
    use crate::symbolize::types::TypeName;

    #[test]
    fn what_was_counted_in_part_says_so_and_what_was_not_leaves_estimates_alone() {
        let types = vec![Type { id: Some(7), name: TypeName::of("Order"), objects: 5, bytes: 120 }];
        let of = |pid, result| (Some(u64::from(pid)), Of { pid, name: "shop".to_owned(), result });
        let whole = Tallied { types: types.clone(), ..Tallied::default() };
        let killed = Tallied { types, broken: Some("it ended".to_owned()), ..Tallied::default() };
        let processes =
            vec![of(1, Ok(whole)), of(2, Ok(killed)), of(3, Err("its events make no sense".to_owned()))];
        let counted = Counted { processes, left_out: 0 };
        let lossy: Vec<bool> = counted.lines().iter().map(|line| tells_of_uncounted(line)).collect();
        assert_eq!(lossy, [false, true, false], "{:?}", counted.lines());
        let found = counted.account().processes;
        let found: Vec<_> = found.iter().map(|of| (of.pid, of.types.len(), of.ending)).collect();
        assert_eq!(found, [(1, 1, Ending::Ended), (2, 1, Ending::Ended), (3, 0, Ending::Declined)]);
    }
}
