//! What a thread is for. Any program may give its threads any names, so a name alone says nothing:
//! where the thread began has to agree with it.

use crate::frame::FrameKey;
use std::sync::Arc;

/// The role of a thread of which no whole stack was seen, and whose name may be the runtime's or
/// the program's choice.
pub const UNKNOWN: &str = "unknown";

/// The role of threads that do nothing but collect.
const COLLECTOR: &str = "gc";

/// Outermost managed methods of a thread that are kept: `Thread.StartCallback`, up to five more of
/// `System.Threading`, and the method the thread was made for.
pub const START_METHODS: usize = 8;

/// Which sort of file the first function of a thread is in, the C library's left aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StartFile {
    /// The runtime: libcoreclr or a collector that it loads.
    Runtime,
    /// The native half of the framework, which starts one thread, for signals.
    SystemNative,
    /// The profiler's library.
    Profiler,
    /// The executable of the process.
    Program,
    /// Another.
    Other,
}

impl StartFile {
    /// By the file's name; `None` for the C library and the dynamic linker. `is_profiler`: the file
    /// is the profiler's own.
    #[must_use]
    pub fn of(file: &str, is_profiler: bool) -> Option<Self> {
        if ["libc.so", "libc-", "libpthread", "ld-musl-", "ld-linux"]
            .iter()
            .any(|libc| file.starts_with(libc))
        {
            return None;
        }
        Some(match file {
            _ if is_profiler => Self::Profiler,
            "libcoreclr.so" | "libclrgc.so" | "libclrgcexp.so" => Self::Runtime,
            "libSystem.Native.so" => Self::SystemNative,
            _ if !file.contains(".so") => Self::Program,
            _ => Self::Other,
        })
    }
}

/// What the managed methods next to a thread's start say.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum StartMethods {
    /// No stack of the thread had managed methods.
    None,
    /// These were outermost, the outermost one first; their names are not known yet.
    Unnamed(Vec<FrameKey>),
    /// `Thread.Start` began it, for a method with this role.
    Thread(&'static str),
    /// The runtime's own code called them: a finalizer, say, or what `Thread.Start` was given where
    /// its methods are left by a jump (.NET 8).
    CalledByRuntime,
}

/// Where a thread began, as its whole stacks show: those that a walk followed to the thread's start
/// without a guess.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ThreadStart {
    /// The outermost file.
    pub file: StartFile,
    /// A stack was seen without managed methods, and none with them before it: a thread of
    /// `Thread.Start` has such stacks at its start only.
    pub was_native: bool,
    /// The outermost managed methods.
    pub methods: StartMethods,
}

/// What decides on a thread's role.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RoleEvidence {
    /// The role that the runtime's thread of this name has.
    named: Option<NamedRole>,
    /// Where it began; `None` before a whole stack was seen.
    start: Option<ThreadStart>,
    /// The runtime is in the executable: a single-file program or NativeAOT.
    runtime_in_program: bool,
}

/// The role that belongs to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct NamedRole {
    role: &'static str,
    /// The thread is started by `Thread.Start`, like one of a program.
    managed: bool,
}

/// Names are those that the .NET runtime sets (`src/coreclr/vm`, `src/coreclr/gc` and
/// `src/libraries` of dotnet/runtime), cut to the kernel's 15 bytes.
fn named(comm: &str) -> Option<NamedRole> {
    let (role, managed) = match comm {
        ".NET Server GC" | ".NET BGC" => (COLLECTOR, false),
        ".NET Finalizer" => ("finalizer", false),
        // The first up to .NET 10, the second from 11 on.
        ".NET Tiered Com" | ".NET Tiered JIT" => ("tiered_jit", false),
        ".NET SigHandler" | ".NET EventPipe" | ".NET SynchManag"
        // The transport and the helper thread of the debugger (src/coreclr/debug), which every
        // process has.
        | ".NET DebugPipe" | ".NET Debugger" => ("runtime", false),
        ".NET Timer" => ("timer", true),
        ".NET Sockets" | ".NET TP Gate"
        // The reader of inotify behind FileSystemWatcher.
        | ".NET File Watch"
        // Who reads event counters for whoever asked for them: that can be us.
        | ".NET Counter Po" => ("runtime", true),
        _ if comm.starts_with(".NET TP Wor") => ("threadpool", true),
        _ => return None,
    };
    Some(NamedRole { role, managed })
}

impl RoleEvidence {
    /// Of a thread that the kernel calls `comm`.
    #[must_use]
    pub fn new(comm: &str, start: Option<ThreadStart>, runtime_in_program: bool) -> Self {
        Self { named: named(comm), start, runtime_in_program }
    }

    /// False for a thread that is not called like one of the collector's.
    #[must_use]
    pub fn may_collect(comm: &str) -> bool {
        comm.starts_with(".NET ") && named(comm).is_some_and(|named| named.role == COLLECTOR)
    }

    /// The `thread_role` label (D10).
    #[must_use]
    pub fn role(&self) -> &'static str {
        let Some(start) = &self.start else {
            return self.named.map_or("app", |_| UNKNOWN);
        };
        match start.file {
            StartFile::Profiler => return "profiler",
            StartFile::SystemNative => return "runtime",
            StartFile::Program if self.runtime_in_program => {}
            StartFile::Program | StartFile::Other => return "app",
            StartFile::Runtime => {}
        }
        let native = self.named.filter(|named| !named.managed).map(|named| named.role);
        match &start.methods {
            StartMethods::Thread(role) => role,
            StartMethods::CalledByRuntime => {
                native.filter(|role| start.was_native && *role != COLLECTOR).unwrap_or("app")
            }
            StartMethods::None => match self.named {
                // It waits for its start, or is over: what it is for was not seen.
                Some(named) if named.managed => UNKNOWN,
                Some(named) => named.role,
                None => "app",
            },
            // Without the methods' names: a finalizer that was seen waiting is one, a thread of the
            // pool is one by its name only.
            StartMethods::Unnamed(_) => match self.named {
                Some(named) if named.managed => named.role,
                Some(named) if start.was_native && named.role != COLLECTOR => named.role,
                _ => "app",
            },
        }
    }

    /// True for a thread that does nothing but collect: all its CPU time is the collector's.
    #[must_use]
    pub fn is_collector(&self) -> bool {
        self.role() == COLLECTOR
    }

    /// The methods that are to be named before the role is sure.
    #[must_use]
    pub fn unnamed(&self) -> &[FrameKey] {
        self.start.as_ref().map_or(&[], ThreadStart::unnamed)
    }

    /// Takes up what the methods are called, see [`ThreadStart::name`].
    pub fn name(&mut self, method: impl Fn(FrameKey) -> Option<(Arc<str>, Arc<str>)>) {
        if let Some(start) = &mut self.start {
            start.name(method);
        }
    }
}

/// The first methods of the framework's own threads, the files they are in, and what those threads
/// are for.
const FIRST_METHODS: [(&str, &str, &str); 7] = [
    (CORE, "System.Threading.PortableThreadPool.WorkerThread.", "threadpool"),
    (CORE, "System.Threading.PortableThreadPool.GateThread.", "runtime"),
    (CORE, "System.Threading.TimerQueue.TimerThread", "timer"),
    (CORE, "System.Diagnostics.Tracing.CounterGroup.PollForValues", "runtime"),
    ("System.Net.Sockets.dll", "System.Net.Sockets.SocketAsyncEngine.", "runtime"),
    ("System.IO.FileSystem.Watcher.dll", "System.IO.FileSystemWatcher.", "runtime"),
    (CORE, "System.Threading.PortableThreadPool.WaitThread.", "runtime"),
];

const CORE: &str = "System.Private.CoreLib.dll";

/// By what every thread of `Thread.Start` begins, and what may lie between that and the method it
/// was made for.
const THREAD: [&str; 3] = [
    "System.Threading.Thread.",
    "System.Threading.ThreadHelper.",
    "System.Threading.ExecutionContext.",
];

impl ThreadStart {
    /// Takes up a further whole stack of the thread, whose outermost managed methods are `methods`,
    /// the outermost first.
    pub fn saw(&mut self, methods: Vec<FrameKey>) {
        if methods.is_empty() {
            self.was_native = true;
        } else if self.methods == StartMethods::None {
            self.was_native = false;
            self.methods = StartMethods::Unnamed(methods);
        }
    }

    /// True when further stacks say nothing more.
    #[must_use]
    pub fn is_known(&self) -> bool {
        match self.methods {
            StartMethods::None => false,
            StartMethods::Unnamed(_) | StartMethods::CalledByRuntime => self.was_native,
            StartMethods::Thread(_) => true,
        }
    }

    /// The methods that are to be named before it is sure where the thread began.
    #[must_use]
    pub fn unnamed(&self) -> &[FrameKey] {
        match &self.methods {
            StartMethods::Unnamed(methods) => methods,
            _ => &[],
        }
    }

    /// Takes up what the methods are called: `method` answers a method's name as the runtime writes
    /// it and its module's file, or nothing as long as they are not known.
    pub fn name(&mut self, method: impl Fn(FrameKey) -> Option<(Arc<str>, Arc<str>)>) {
        let StartMethods::Unnamed(methods) = &self.methods else { return };
        let mut begun = false;
        for &frame in methods {
            // Stubs have no names, and none of those further in decides before the outer ones are
            // known.
            let FrameKey::Managed { .. } = frame else { continue };
            let Some((name, module)) = method(frame) else { return };
            // Nested types come with either sign.
            let name = name.replace('+', ".");
            if &*module == CORE && THREAD.iter().any(|prefix| name.starts_with(prefix)) {
                begun = true;
                continue;
            }
            let first =
                |(of, prefix, _): &&(&str, &str, &str)| *of == &*module && name.starts_with(prefix);
            self.methods = match FIRST_METHODS.iter().find(first) {
                Some((_, _, role)) => StartMethods::Thread(role),
                None if begun => StartMethods::Thread("app"),
                None => StartMethods::CalledByRuntime,
            };
            return;
        }
        if begun {
            self.methods = StartMethods::Thread("app");
        }
    }
}

/// Methods in which the framework's own threads wait for work (src/libraries of dotnet/runtime:
/// `LowLevelLifoSemaphore`, `PortableThreadPool`, `TimerQueue` and `CounterGroup` of
/// System.Private.CoreLib, `SocketAsyncEngine` of System.Net.Sockets, `FileSystemWatcher`).
const PARKING: [&str; 8] = [
    "System.Threading.LowLevelLifoSemaphore.",
    "System.Threading.PortableThreadPool.GateThread.",
    "System.Threading.PortableThreadPool.WorkerThread.",
    "System.Threading.TimerQueue.TimerThread",
    "System.Diagnostics.Tracing.CounterGroup.PollForValues",
    "System.Net.Sockets.SocketAsyncEngine.EventLoop",
    "System.IO.FileSystemWatcher.RunningInstance.",
    "System.IO.FileSystemWatcher.INotify.",
];

/// Methods by which anyone may wait, and stubs, which may have no name: who waits is their caller.
/// From .NET 11 on `WaitHandle` and more wait in managed code (`WaitSubsystem`).
const MEANS: [&str; 8] = [
    "IL_STUB",
    "[",
    "Interop.",
    "System.Threading.WaitHandle.",
    "System.Threading.WaitSubsystem.",
    "System.Threading.LowLevelMonitor.",
    "System.Threading.LowLevelFutex.",
    "System.Threading.LowLevelThreadBlocker.",
];

/// True for a thread that waits for work, not for something the program does (D13): one of the
/// runtime's own without managed code on its stack, or one in a method where the framework parks
/// its threads. `methods` are the managed ones of its stack as the runtime calls them, innermost
/// first.
pub fn is_parked<M: AsRef<str>>(role: Option<&str>, methods: impl IntoIterator<Item = M>) -> bool {
    let mut methods = methods.into_iter().peekable();
    if methods.peek().is_none() {
        return !matches!(role, Some("app" | UNKNOWN) | None);
    }
    // Nested types come with either sign.
    let is_in = |list: &[&str], method: &str| {
        let method = method.replace('+', ".");
        list.iter().any(|prefix| method.starts_with(prefix))
    };
    let waiter = methods.find(|method| !is_in(&MEANS, method.as_ref()));
    waiter.is_some_and(|method| is_in(&PARKING, method.as_ref()))
}

/// True for a wait in the runtime's files and the C library's alone, from the thread's start on:
/// whose thread it is has no business of the program's, whatever it is called. Where a profiler is
/// loaded the runtime starts one that waits for it to be unloaded
/// (`ProfilingAPIDetach::CreateDetachThread`, src/coreclr/vm/profdetach.cpp) and gives it no name,
/// so it is called like the one that started it. `files` are those of the stack's native frames,
/// innermost first, by their names; `None` for one that is in no file.
pub fn is_of_the_runtime_alone<'a>(files: impl Iterator<Item = Option<&'a str>>) -> bool {
    let (mut in_runtime, mut outermost_is_libc) = (false, false);
    for file in files {
        let Some(file) = file else { return false };
        outermost_is_libc = ["libc.so", "libc-", "libpthread", "ld-musl-"]
            .iter()
            .any(|libc| file.starts_with(libc));
        let is_runtime = file == "libcoreclr.so";
        if !is_runtime && !outermost_is_libc {
            return false;
        }
        in_runtime |= is_runtime;
    }
    in_runtime && outermost_is_libc
}

#[cfg(test)]
mod tests {
    use super::*;

    fn managed(start: u64) -> FrameKey {
        FrameKey::Managed {
            process: crate::frame::ProcessId(0),
            start,
            generation: 0,
            offset: None,
        }
    }

    /// The role of a thread with this name and file of its start, whose whole stacks had these
    /// outermost methods.
    fn role(comm: &str, file: StartFile, stacks: &[&[(&str, &str)]]) -> &'static str {
        let mut start: Option<ThreadStart> = None;
        let mut names = Vec::new();
        for stack in stacks {
            let methods = stack.iter().map(|&method| {
                names.push(method);
                managed(names.len() as u64 - 1)
            });
            let methods = methods.collect();
            let none = || ThreadStart { file, was_native: false, methods: StartMethods::None };
            start.get_or_insert_with(none).saw(methods);
        }
        let mut evidence = RoleEvidence::new(comm, start, false);
        evidence.name(|frame| {
            let FrameKey::Managed { start, .. } = frame else { return None };
            let (name, module) = names[start as usize];
            (!name.is_empty()).then(|| (name.into(), module.into()))
        });
        evidence.role()
    }

    const START: (&str, &str) = ("System.Threading.Thread.StartCallback()", CORE);
    const RUN: (&str, &str) = ("System.Threading.Thread+StartHelper.Run()", CORE);
    const WORKER: (&str, &str) =
        ("System.Threading.PortableThreadPool+WorkerThread.WorkerThreadStart()", CORE);
    const OF_PROGRAM: (&str, &str) = ("P.Main(System.String[])", "R3.dll");

    #[test]
    fn a_programs_own_thread_is_the_programs_whatever_it_is_called() {
        let runtime = StartFile::Runtime;
        for name in [
            ".NET BGC",
            ".NET Server GC",
            ".NET Finalizer",
            ".NET Tiered JIT",
            ".NET Tiered Com",
            ".NET TP Worker",
            ".NET Timer",
            ".NET SigHandler",
            "plain",
        ] {
            assert_eq!(role(name, runtime, &[&[START, OF_PROGRAM]]), "app", "{name}");
            assert_eq!(
                role(name, runtime, &[&[], &[START, RUN, OF_PROGRAM]]),
                "app",
                "{name}, seen at its start"
            );
            assert_eq!(role(name, StartFile::Other, &[&[]]), "app", "{name}, of a native library");
            assert_eq!(
                role(name, StartFile::Program, &[&[]]),
                "app",
                "{name}, of a native program"
            );
        }
        // A class of the program's may be called like the framework's.
        let own = (WORKER.0, "Faked.dll");
        assert_eq!(role(".NET TP Worker", runtime, &[&[START, own]]), "app");
    }

    #[test]
    fn the_runtimes_own_threads_are_what_they_are() {
        let runtime = StartFile::Runtime;
        for (name, role_of) in [
            (".NET BGC", "gc"),
            (".NET Server GC", "gc"),
            (".NET Finalizer", "finalizer"),
            (".NET Tiered JIT", "tiered_jit"),
            (".NET Tiered Com", "tiered_jit"),
            (".NET EventPipe", "runtime"),
        ] {
            assert_eq!(role(name, runtime, &[&[]]), role_of, "{name}");
            assert_eq!(role(name, runtime, &[]), UNKNOWN, "{name} without a stack");
        }
        let finalizes = ("System.GC.RunFinalizers()", CORE);
        assert_eq!(role(".NET Finalizer", runtime, &[&[finalizes, OF_PROGRAM], &[]]), "finalizer");
        assert_eq!(role(".NET SigHandler", StartFile::SystemNative, &[&[]]), "runtime");
        assert_eq!(role("perfusion-shim", StartFile::Profiler, &[&[]]), "profiler");
        assert_eq!(role("plain", runtime, &[]), "app");
    }

    #[test]
    fn a_thread_of_the_pool_is_one_while_it_has_another_name() {
        for name in [".NET TP Worker", "job-A"] {
            assert_eq!(role(name, StartFile::Runtime, &[&[START, RUN, WORKER]]), "threadpool");
        }
        let timer = ("System.Threading.TimerQueue.TimerThread()", CORE);
        assert_eq!(role("x", StartFile::Runtime, &[&[START, timer]]), "timer");
    }

    /// .NET 8 leaves the methods of `Thread.Start` by jumps: they are on no stack.
    #[test]
    fn a_thread_is_the_programs_or_the_pools_without_the_methods_that_started_it() {
        let of = |name, stacks: &[&[(&str, &str)]]| role(name, StartFile::Runtime, stacks);
        assert_eq!(of(".NET TP Worker", &[&[WORKER]]), "threadpool");
        for name in [".NET BGC", ".NET Finalizer", ".NET Tiered Com", ".NET TP Worker"] {
            assert_eq!(of(name, &[&[], &[OF_PROGRAM]]), "app", "{name}");
        }
    }

    #[test]
    fn before_methods_have_names_no_thread_with_managed_code_collects() {
        let nameless = ("", "");
        let of = |name, stacks: &[&[(&str, &str)]]| role(name, StartFile::Runtime, stacks);
        assert_eq!(of(".NET BGC", &[&[], &[nameless]]), "app");
        assert_eq!(of(".NET Finalizer", &[&[nameless]]), "app");
        assert_eq!(of(".NET Finalizer", &[&[], &[nameless]]), "app");
        assert_eq!(of(".NET Finalizer", &[&[nameless], &[]]), "finalizer");
        assert_eq!(of(".NET TP Worker", &[&[nameless]]), "threadpool");
    }

    #[test]
    fn a_runtime_in_the_executable_starts_its_threads_there() {
        let start =
            ThreadStart { file: StartFile::Program, was_native: true, methods: StartMethods::None };
        let of = |inside| RoleEvidence::new(".NET BGC", Some(start.clone()), inside).role();
        assert_eq!([of(true), of(false)], ["gc", "app"]);
    }

    #[test]
    fn a_thread_that_is_in_the_runtime_alone_waits_for_work_whatever_it_is_called() {
        let of = |files: &[Option<&str>]| is_of_the_runtime_alone(files.iter().copied());
        let [libc, clr] = ["libc.so.6", "libcoreclr.so"].map(Some);
        assert!(of(&[libc, clr, clr, libc, libc]));
        assert!(of(&[Some("ld-musl-x86_64.so.1"), clr, Some("ld-musl-x86_64.so.1")]));
        assert!(!of(&[libc, libc]), "a thread of somebody else's");
        assert!(!of(&[libc, clr]), "a stack that does not reach its start");
        assert!(!of(&[libc, clr, Some("libhostfxr.so"), Some("dotnet"), libc]), "the first thread");
        assert!(!of(&[libc, clr, None, clr, libc]), "managed code below");
        assert!(!of(&[]));
    }

    #[test]
    fn the_runtime_s_own_threads_are_parked_where_they_wait_for_work() {
        // As .NET 8, 10 and 11 show them.
        const WAIT_ONE: &str = "System.Threading.WaitHandle.WaitOneNoCheck(System.Int32)";
        let parked: [(&str, &[&str]); 11] = [
            (".NET Debugger", &[]),
            (".NET DebugPipe", &[]),
            (".NET SigHandler", &[]),
            (
                ".NET TP Worker",
                &["System.Threading.LowLevelLifoSemaphore.WaitForSignal(System.Int32)"],
            ),
            (
                ".NET TP Gate",
                &[WAIT_ONE, "System.Threading.PortableThreadPool.GateThread.GateThreadStart()"],
            ),
            (
                ".NET Counter Po",
                &[WAIT_ONE, "System.Diagnostics.Tracing.CounterGroup.PollForValues()"],
            ),
            (".NET Timer", &[WAIT_ONE, "System.Threading.TimerQueue.TimerThread()"]),
            (
                ".NET Timer",
                &[
                    "Interop+Sys.LowLevelMonitor_TimedWait(IntPtr, Int32)",
                    "System.Threading.WaitSubsystem+ThreadWaitInfo.Wait(System.Int32)",
                    WAIT_ONE,
                    "System.Threading.TimerQueue.TimerThread()",
                ],
            ),
            (
                ".NET TP Worker",
                &[
                    "Interop+Sys.LowLevelFutex_WaitOnAddress(System.Int32*, System.Int32)",
                    "System.Threading.LowLevelFutex.WaitOnAddress(System.Int32*, System.Int32)",
                    "System.Threading.LowLevelThreadBlocker.Wait()",
                    "System.Threading.LowLevelLifoSemaphore.WaitForSignal(System.Int32)",
                ],
            ),
            (
                ".NET Sockets",
                &[
                    "[managed] 0x7f6eefef0400",
                    "Interop.Sys.WaitForSocketEvents(System.IntPtr)",
                    "System.Net.Sockets.SocketAsyncEngine.EventLoop()",
                ],
            ),
            (
                ".NET File Watch",
                &[
                    "Interop+Sys.Read(System.IntPtr)",
                    "System.IO.FileSystemWatcher+RunningInstance.ProcessEvents()",
                ],
            ),
        ];
        for (comm, methods) in parked {
            let role = named(comm).map(|named| named.role);
            assert!(is_parked(role, methods.iter().copied()), "{comm}");
        }
    }

    #[test]
    fn what_the_program_waits_for_is_shown_on_whatever_thread() {
        let waits: [(&str, &[&str]); 6] = [
            ("dotnet", &[]),
            // .NET 11.
            (
                "main",
                &[
                    "Interop+Sys.LowLevelMonitor_Wait(System.IntPtr)",
                    "System.Threading.LowLevelMonitor.Wait()",
                    "System.Threading.WaitSubsystem+ThreadWaitInfo.Wait(System.Int32)",
                    "System.Threading.Thread.Sleep(System.Int32)",
                    "Shop.Program.Main()",
                ],
            ),
            (
                "main",
                &[
                    "System.Threading.WaitHandle.WaitOneNoCheck(System.Int32)",
                    "Shop.Program.Main()",
                ],
            ),
            (
                ".NET TP Worker",
                &[
                    "Shop.Work.Lock()",
                    "System.Threading.PortableThreadPool+WorkerThread.WorkerThreadStart()",
                ],
            ),
            // A lock on the way to a timer.
            (
                "main",
                &[
                    "Interop+Kernel32.SetEvent()",
                    "System.Threading.TimerQueue.SetTimerPortable()",
                    "Shop.Work.Delay()",
                ],
            ),
            ("main", &["Interop+Sys.Read()"]),
        ];
        for (comm, methods) in waits {
            let role = named(comm).map_or("app", |named| named.role);
            assert!(!is_parked(Some(role), methods.iter().copied()), "{comm} {methods:?}");
        }
    }
}
