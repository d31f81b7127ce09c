//! What a thread is for, by the name the runtime gives it.

/// The `thread_role` label (D10). Names are those the .NET runtime sets (`src/coreclr/vm` and `src/coreclr/gc` of dotnet/runtime), cut to
/// the kernel's 15 bytes.
#[must_use]
pub fn thread_role(comm: &str) -> &'static str {
    match comm {
        ".NET Server GC" | ".NET BGC" => "gc",
        ".NET Finalizer" => "finalizer",
        ".NET Tiered Com" => "tiered_jit",
        ".NET Timer" => "timer",
        ".NET SigHandler" | ".NET EventPipe" | ".NET SynchManag" | ".NET Sockets" | ".NET TP Gate"
        // The transport and the helper thread of the debugger (src/coreclr/debug), which every process has.
        | ".NET DebugPipe" | ".NET Debugger"
        // The reader of inotify behind FileSystemWatcher.
        | ".NET File Watch"
        // Who reads event counters for whoever asked for them: that can be us.
        | ".NET Counter Po" => "runtime",
        // The shim's own thread: in the sums, because it runs in the process, and known for what it is.
        "perfusion-shim" => "profiler",
        _ if comm.starts_with(".NET TP Wor") => "threadpool",
        _ => "app",
    }
}

/// True for threads that do nothing but collect: all their CPU time is the collector's.
#[must_use]
pub fn is_collector(comm: &str) -> bool {
    thread_role(comm) == "gc"
}

/// Methods in which the framework's own threads wait for work (src/libraries of dotnet/runtime: `LowLevelLifoSemaphore`,
/// `PortableThreadPool`, `TimerQueue` and `CounterGroup` of System.Private.CoreLib, `SocketAsyncEngine` of System.Net.Sockets, `FileSystemWatcher`).
const PARKING: [&str; 9] = [
    "System.Threading.LowLevelLifoSemaphore.",
    "System.Threading.LowLevelMonitor.",
    "System.Threading.PortableThreadPool.GateThread.",
    "System.Threading.PortableThreadPool.WorkerThread.",
    "System.Threading.TimerQueue.TimerThread",
    "System.Diagnostics.Tracing.CounterGroup.PollForValues",
    "System.Net.Sockets.SocketAsyncEngine.EventLoop",
    "System.IO.FileSystemWatcher.RunningInstance.",
    "System.IO.FileSystemWatcher.INotify.",
];

/// Methods by which anyone may wait, and stubs, which may have no name: who waits is their caller.
const MEANS: [&str; 4] = ["IL_STUB", "[", "Interop.", "System.Threading.WaitHandle."];

/// True for a thread that waits for work, not for something the program does (D13): one of the runtime's own without managed code on
/// its stack, or one in a method where the framework parks its threads. `methods` are the managed ones of its stack as the runtime
/// calls them, innermost first.
pub fn is_parked<M: AsRef<str>>(role: Option<&str>, methods: impl IntoIterator<Item = M>) -> bool {
    let mut methods = methods.into_iter().peekable();
    if methods.peek().is_none() {
        return !matches!(role, Some("app") | None);
    }
    // Nested types come with either sign.
    let is_in = |list: &[&str], method: &str| {
        let method = method.replace('+', ".");
        list.iter().any(|prefix| method.starts_with(prefix))
    };
    let waiter = methods.find(|method| !is_in(&MEANS, method.as_ref()));
    waiter.is_some_and(|method| is_in(&PARKING, method.as_ref()))
}

/// True for a wait in the runtime's files and the C library's alone, from the thread's start on: whose thread it is has no business of the
/// program's, whatever it is called. Where a profiler is loaded the runtime starts one that waits for it to be unloaded
/// (`ProfilingAPIDetach::CreateDetachThread`, src/coreclr/vm/profdetach.cpp) and gives it no name, so it is called like the one that started it.
/// `files` are those of the stack's native frames, innermost first, by their names; `None` for one that is in no file.
pub fn is_of_the_runtime_alone<'a>(files: impl Iterator<Item = Option<&'a str>>) -> bool {
    let (mut in_runtime, mut outermost_is_libc) = (false, false);
    for file in files {
        let Some(file) = file else { return false };
        outermost_is_libc =
            ["libc.so", "libc-", "libpthread", "ld-musl-"].iter().any(|libc| file.starts_with(libc));
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
        // As .NET 8 and 10 show them.
        const WAIT_ONE: &str = "System.Threading.WaitHandle.WaitOneNoCheck(System.Int32)";
        let parked: [(&str, &[&str]); 9] = [
            (".NET Debugger", &[]),
            (".NET DebugPipe", &[]),
            (".NET SigHandler", &[]),
            (".NET TP Worker", &["System.Threading.LowLevelLifoSemaphore.WaitForSignal(System.Int32)"]),
            (".NET TP Gate", &[WAIT_ONE, "System.Threading.PortableThreadPool.GateThread.GateThreadStart()"]),
            (".NET Counter Po", &[WAIT_ONE, "System.Diagnostics.Tracing.CounterGroup.PollForValues()"]),
            (".NET Timer", &[WAIT_ONE, "System.Threading.TimerQueue.TimerThread()"]),
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
            assert!(is_parked(Some(thread_role(comm)), methods.iter().copied()), "{comm}");
        }
    }

    #[test]
    fn what_the_program_waits_for_is_shown_on_whatever_thread() {
        let waits: [(&str, &[&str]); 5] = [
            ("dotnet", &[]),
            ("main", &["System.Threading.WaitHandle.WaitOneNoCheck(System.Int32)", "Shop.Program.Main()"]),
            (
                ".NET TP Worker",
                &["Shop.Work.Lock()", "System.Threading.PortableThreadPool+WorkerThread.WorkerThreadStart()"],
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
            assert!(!is_parked(Some(thread_role(comm)), methods.iter().copied()), "{comm} {methods:?}");
        }
    }
}
