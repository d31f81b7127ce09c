// A loop of tiny methods that do little but call: Root > L1 > ... > L8 > Tiny. Tier-1 code for them keeps no frame pointer,
// so only a walker that obeys the runtime's unwind info sees every caller.
//
// Usage: callheavy.dll [SECONDS]: with SECONDS it exits with code 7 by itself when the loop, once `ready`, has had a CPU for that long (so that a
// busy machine changes nothing about what can be sampled), else on `stop`.
// `ready` comes when the methods have reached tier 1: their time per round has stopped falling.
using System;
using System.Diagnostics;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Threading;

namespace CallHeavy
{
    static class Program
    {
        static long rounds;
        static int sink;
        static readonly ManualResetEventSlim warm = new ManualResetEventSlim();
        static readonly ManualResetEventSlim done = new ManualResetEventSlim();
        static double seconds = double.PositiveInfinity;

        static int Main(string[] args)
        {
            Workload.Chain("callheavy",
                "CallHeavy.Program.Loop", "CallHeavy.Program.Root", "CallHeavy.Program.L1", "CallHeavy.Program.L2",
                "CallHeavy.Program.L3", "CallHeavy.Program.L4", "CallHeavy.Program.L5", "CallHeavy.Program.L6",
                "CallHeavy.Program.L7", "CallHeavy.Program.L8", "CallHeavy.Program.Tiny");
            if (args.Length > 0)
                seconds = double.Parse(args[0], CultureInfo.InvariantCulture);
            Workload.Start("callheavy", Loop);
            warm.Wait();
            Workload.Ready();
            if (args.Length > 0)
            {
                done.Wait();
                return 7;
            }
            Workload.WaitForStop();
            Workload.Truth("rounds", Volatile.Read(ref rounds));
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Loop()
        {
            var clock = Stopwatch.StartNew();
            long warmNanoseconds = 0;
            while (!Workload.Stopping)
            {
                sink += Root(1000);
                rounds++;
                // Tiering moves on a 100 ms timer that new tier-0 code restarts; a second and many thousand calls are past it.
                if (!warm.IsSet && clock.ElapsedMilliseconds > 1500 && rounds > 1000)
                {
                    warmNanoseconds = Workload.ThreadCpuNanoseconds();
                    warm.Set();
                }
                // Seldom, so that hardly a sample meets the question.
                if (seconds < 1e9 && rounds % 1000 == 0 && warm.IsSet
                    && Workload.ThreadCpuNanoseconds() - warmNanoseconds > seconds * 1e9)
                    done.Set();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Root(int count)
        {
            int sum = 0;
            for (int i = 0; i < count; i++)
                sum += L1(i);
            return sum;
        }

        // Each uses its callee's result after the call, so that none is a tail call.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L1(int x) { return L2(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L2(int x) { return L3(x) + 2; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L3(int x) { return L4(x ^ 3) + x; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L4(int x) { return L5(x) + 4; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L5(int x) { return L6(x + 5) ^ x; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L6(int x) { return L7(x) + 6; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L7(int x) { return L8(x) + 7; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int L8(int x) { return Tiny(x) + 8; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Tiny(int x) { return x * 3 + 1; }
    }
}
