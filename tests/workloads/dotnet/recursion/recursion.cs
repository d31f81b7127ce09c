// Deep stacks: one thread works below 400 frames of one method, another sleeps below 350.
using System;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Recursion
{
    static class Program
    {
        static long sink;

        static int Main()
        {
            Workload.Chain("worker", "Recursion.Program.WorkLoop", "Recursion.Program.Down*400", "Recursion.Program.Bottom");
            Workload.Chain("sleeper", "Recursion.Program.SleepLoop", "Recursion.Program.DownToSleep*350", "Recursion.Program.Nap");
            Workload.Start("worker", WorkLoop);
            Workload.Start("sleeper", SleepLoop);
            // Past the delay of tiered compilation.
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void WorkLoop() { while (!Workload.Stopping) sink += Down(399); }

        // The sum comes after the call, so that it is no tail call.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Down(int left) { return (left == 0 ? Bottom() : Down(left - 1)) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Bottom()
        {
            int x = 1;
            for (int i = 0; i < 200000; i++)
                x = x * 31 + i;
            return x;
        }

        static void SleepLoop() { while (!Workload.Stopping) sink += DownToSleep(349); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int DownToSleep(int left) { return (left == 0 ? Nap() : DownToSleep(left - 1)) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Nap() { Thread.Sleep(5); return 1; }
    }
}
