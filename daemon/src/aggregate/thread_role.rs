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
        ".NET SigHandler" | ".NET EventPipe" | ".NET SynchManag" | ".NET Sockets" | ".NET TP Gate" => {
            "runtime"
        }
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
