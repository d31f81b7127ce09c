// On `stick`, a thread named `holder` sleeps in native code without letting the runtime know (SuppressGCTransition), and a thread named `collector`
// asks for a collection: its suspension is pending until the sleep ends. The answer comes when both have begun. Truth: the rounds of a thread that
// allocates, before and after.
using System;
using System.Diagnostics;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace HeldUp
{
    static class Program
    {
        [DllImport("libholdup.so"), SuppressGCTransition]
        static extern void hold_up(int seconds);

        static long rounds;
        static long before;
        static volatile object sink;
        static int seconds;

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Hold()
        {
            hold_up(seconds);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Collect()
        {
            GC.Collect();
        }

        static int Main(string[] args)
        {
            seconds = int.Parse(args[0], CultureInfo.InvariantCulture);
            // The first call of a method compiles it, which needs the runtime.
            hold_up(0);
            Workload.Start("worker", () =>
            {
                while (!Workload.Stopping)
                {
                    Interlocked.Increment(ref rounds);
                    sink = new object();
                    Thread.Sleep(5);
                }
            });
            Workload.On("stick", () =>
            {
                before = Interlocked.Read(ref rounds);
                new Thread(Hold) { Name = "holder" }.Start();
                var clock = Stopwatch.StartNew();
                while (clock.ElapsedMilliseconds < 200)
                    Thread.Sleep(10);
                // Says so itself: this thread stands still like all others once the collection is asked for.
                Console.Out.WriteLine("done stick");
                Console.Out.Flush();
                new Thread(Collect) { Name = "collector" }.Start();
            });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("rounds", Interlocked.Read(ref rounds));
            Workload.Truth("rounds_before", before);
            Workload.PrintTruth();
            return 0;
        }
    }
}
