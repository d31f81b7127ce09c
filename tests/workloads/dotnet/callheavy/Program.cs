// Stacks that frame pointers get wrong: a loop over a chain of tiny methods that the optimising JIT gives rsp-based frames or
// none, and threads that wait in three ways. Each chain is its own truth: Root > L1 > ... > L8 > Tiny, nothing left out.
// Arguments: seconds to run (default 60). Prints one JSON line when everything is in place.
using System;
using System.Diagnostics;
using System.IO.Pipes;
using System.Runtime.CompilerServices;
using System.Threading;

static class CallHeavy
{
    static int counter;
    static volatile bool stop;

    // The increment after each call keeps it from being a tail call, which would have no frame of its own.
    [MethodImpl(MethodImplOptions.NoInlining)] static int Tiny(int x) { counter += x; return counter ^ x; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L8(int x) { int r = Tiny(x + 1); return r + 1; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L7(int x) { int r = L8(x + 1); return r + 2; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L6(int x) { int r = L7(x + 1); return r + 3; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L5(int x) { int r = L6(x + 1); return r + 4; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L4(int x) { int r = L5(x + 1); return r + 5; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L3(int x) { int r = L4(x + 1); return r + 6; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L2(int x) { int r = L3(x + 1); return r + 7; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int L1(int x) { int r = L2(x + 1); return r + 8; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int Root(int x) { int r = L1(x + 1); return r + 9; }

    static void Busy()
    {
        int x = 0;
        while (!stop) x = Root(x);
        GC.KeepAlive(x);
    }

    [MethodImpl(MethodImplOptions.NoInlining)] static void WaitLock(object gate) { lock (gate) { GC.KeepAlive(gate); } }
    [MethodImpl(MethodImplOptions.NoInlining)] static void WaitSleep() { Thread.Sleep(5); counter++; }
    [MethodImpl(MethodImplOptions.NoInlining)] static int WaitPipe(AnonymousPipeServerStream pipe) { int b = pipe.ReadByte(); counter++; return b; }

    static Thread Start(string name, ThreadStart body)
    {
        var thread = new Thread(body) { IsBackground = true, Name = name };
        thread.Start();
        return thread;
    }

    static int Main(string[] args)
    {
        int seconds = args.Length > 0 ? int.Parse(args[0]) : 60;
        var gate = new object();
        var server = new AnonymousPipeServerStream(PipeDirection.In);
        var client = new AnonymousPipeClientStream(PipeDirection.Out, server.ClientSafePipeHandle);

        Start("busy", Busy);
        Start("lock", () => { while (!stop) WaitLock(gate); });
        Start("sleep", () => { while (!stop) WaitSleep(); });
        Start("pipe", () => { while (!stop) WaitPipe(server); });

        var clock = Stopwatch.StartNew();
        bool told = false;
        while (clock.Elapsed.TotalSeconds < seconds)
        {
            // Hold the lock so that "lock" waits, and feed the pipe so that "pipe" waits again.
            lock (gate) Thread.Sleep(10);
            client.WriteByte(1);
            // Two seconds of calls are enough for every tier: the counting delay is 100 ms.
            if (!told && clock.Elapsed.TotalSeconds > 2)
            {
                told = true;
                Console.WriteLine("{\"ready\":true,\"pid\":" + Environment.ProcessId + ",\"chain\":[\"Root\",\"L1\",\"L2\",\"L3\",\"L4\",\"L5\",\"L6\",\"L7\",\"L8\",\"Tiny\"]}");
            }
        }
        stop = true;
        return 0;
    }
}
