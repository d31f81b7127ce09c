// What every test workload shares: how it tells the harness that it is ready and what is true about it.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.Runtime.InteropServices;
using System.Threading;

static class Workload
{
    static readonly SortedDictionary<string, string> ready = new SortedDictionary<string, string>();
    static readonly SortedDictionary<string, string> truth = new SortedDictionary<string, string>();
    static readonly Dictionary<string, Action> commands = new Dictionary<string, Action>();
    static readonly SortedDictionary<string, List<string>> chains = new SortedDictionary<string, List<string>>();
    static readonly List<Waits> waits = new List<Waits>();
    static readonly CountdownGate started = new CountdownGate();
    public static volatile bool Stopping;

    // A named thread whose OS id is in the `ready` line under `name`.
    public static Thread Start(string name, Action body)
    {
        started.Expect();
        var thread = new Thread(() =>
        {
            lock (ready)
                ready[name] = CurrentThreadId().ToString(CultureInfo.InvariantCulture);
            started.Arrive();
            body();
        })
        { Name = name, IsBackground = true };
        thread.Start();
        return thread;
    }

    // Before Ready: what the line `name` on stdin does. Its answer is the line `done name`.
    public static void On(string name, Action action)
    {
        commands[name] = action;
    }

    // Prints `ready {...}` when all threads have started.
    public static void Ready()
    {
        started.Wait();
        if (chains.Count > 0)
        {
            var parts = new List<string>();
            foreach (var pair in chains)
                parts.Add("\"" + pair.Key + "\":[" + string.Join(",", pair.Value) + "]");
            ready["chains"] = "{" + string.Join(",", parts) + "}";
        }
        Print("ready", ready);
    }

    // Declares what the stack of the thread `name` is from its first function of interest on, outermost first. A name with `*300` at its
    // end stands for 300 frames, `...` for one or more of the runtime. With several chains the thread is on any of them.
    public static void Chain(string name, params string[] functions)
    {
        if (!chains.TryGetValue(name, out var list))
            chains[name] = list = new List<string>();
        list.Add("[\"" + string.Join("\",\"", functions) + "\"]");
    }

    // Tells that the calling thread was in `function`, which waits, between two times of RealtimeNanoseconds.
    public static void Waited(string function, long from, long to)
    {
        if (ownWaits == null)
        {
            ownWaits = new Waits { Thread = CurrentThreadId(), Function = function };
            lock (waits)
                waits.Add(ownWaits);
        }
        lock (ownWaits)
            ownWaits.At.Add("[" + from.ToString(CultureInfo.InvariantCulture) + "," + to.ToString(CultureInfo.InvariantCulture) + "]");
    }

    [ThreadStatic]
    static Waits ownWaits;

    sealed class Waits
    {
        public int Thread;
        public string Function;
        public readonly List<string> At = new List<string>();
    }

    // CLOCK_REALTIME, by which profiles say when they were taken.
    public static long RealtimeNanoseconds()
    {
        clock_gettime(0, out Timespec time);
        return time.Seconds * 1_000_000_000 + time.Nanoseconds;
    }

    public static void Truth(string name, double value)
    {
        lock (truth)
            truth[name] = value.ToString("R", CultureInfo.InvariantCulture);
    }

    public static void TruthList(string name, long[] values)
    {
        lock (truth)
            truth[name] = "[" + string.Join(",", values) + "]";
    }

    // Blocks until the line `stop` or the end of stdin, then raises Stopping. The line `mark` is answered with how far the
    // process has come: bytes allocated, and when; the line `abort` is the process's last. (SIGABRT from outside does not end a
    // .NET process: its handler puts the default action back and returns.)
    public static void WaitForStop()
    {
        string line;
        while ((line = Console.In.ReadLine()) != null && line != "stop")
        {
            if (commands.TryGetValue(line, out Action action))
            {
                action();
                Console.Out.WriteLine("done " + line);
                Console.Out.Flush();
            }
            if (line == "abort")
                Environment.FailFast("asked to abort");
            if (line != "mark")
                continue;
            var mark = new SortedDictionary<string, string>();
            mark["wall_ns"] = (Stopwatch.GetTimestamp() * (1e9 / Stopwatch.Frequency)).ToString("R", CultureInfo.InvariantCulture);
            mark["allocated_bytes"] = GC.GetTotalAllocatedBytes(true).ToString(CultureInfo.InvariantCulture);
            Print("mark", mark);
        }
        Stopping = true;
    }

    // All that is left to a program once its threads run: they become what they will stay (tiers, stacks), then they are measured, then `truth` adds
    // what is true of them. Answers Main's exit code.
    public static int Settle(int milliseconds, Action truth)
    {
        Thread.Sleep(milliseconds);
        Ready();
        WaitForStop();
        truth();
        PrintTruth();
        return 0;
    }

    public static void PrintTruth()
    {
        var parts = new List<string>();
        lock (waits)
            foreach (var own in waits)
                lock (own)
                    parts.Add("\"" + own.Thread.ToString(CultureInfo.InvariantCulture) + "\":{\"in\":\"" + own.Function + "\",\"at\":[" + string.Join(",", own.At) + "]}");
        lock (truth)
        {
            if (parts.Count > 0)
                truth["waits"] = "{" + string.Join(",", parts) + "}";
            Print("truth", truth);
        }
    }

    static void Print(string word, SortedDictionary<string, string> values)
    {
        var parts = new List<string>();
        lock (values)
            foreach (var pair in values)
                parts.Add("\"" + pair.Key + "\":" + pair.Value);
        Console.Out.WriteLine(word + " {" + string.Join(",", parts) + "}");
        Console.Out.Flush();
    }

    [DllImport("libc", EntryPoint = "gettid")]
    static extern int gettid();

    public static int CurrentThreadId()
    {
        return gettid();
    }

    [StructLayout(LayoutKind.Sequential)]
    struct Timespec
    {
        public long Seconds;
        public long Nanoseconds;
    }

    [DllImport("libc", EntryPoint = "clock_gettime")]
    static extern int clock_gettime(int clock, out Timespec time);

    // CLOCK_THREAD_CPUTIME_ID: what the kernel says this thread has had of a CPU.
    public static long ThreadCpuNanoseconds()
    {
        clock_gettime(3, out Timespec time);
        return time.Seconds * 1_000_000_000 + time.Nanoseconds;
    }

    sealed class CountdownGate
    {
        int missing;
        public void Expect() { lock (this) missing++; }
        public void Arrive() { lock (this) { missing--; Monitor.PulseAll(this); } }
        public void Wait() { lock (this) while (missing > 0) Monitor.Wait(this); }
    }
}
