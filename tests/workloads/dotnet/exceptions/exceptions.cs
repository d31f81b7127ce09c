// Exceptions in flight: work in the function that throws, in a finally block on the way and in the catch block. The blocks are funclets: while
// they run, the frames of the functions that were left are still on the stack, the runtime's dispatcher above them.
using System;
using System.Runtime.CompilerServices;

namespace Exceptions
{
    static class Program
    {
        static long sink;

        static int Main()
        {
            const string P = "Exceptions.Program.";
            Workload.Chain("thrower", P + "Loop", P + "Catcher", P + "Middle", P + "Thrower", P + "BeforeThrow");
            Workload.Chain("thrower", P + "Loop", P + "Catcher", P + "Middle", P + "Thrower", "...", P + "Middle", P + "InFinally");
            Workload.Chain("thrower", P + "Loop", P + "Catcher", P + "Middle", P + "Thrower", "...", P + "Catcher", P + "InCatch");
            Workload.Chain("thrower", P + "Loop", P + "Catcher", P + "AfterCatch");
            Workload.Start("thrower", Loop);
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void Loop() { while (!Workload.Stopping) sink += Catcher(); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Catcher()
        {
            int sum = 0;
            try { sum += Middle(); }
            catch (InvalidOperationException) { sum += InCatch() + 1; }
            return sum + AfterCatch();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Middle()
        {
            try { return Thrower() + 1; }
            finally { sink += InFinally(); }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Thrower()
        {
            if (BeforeThrow() != 0)
                throw new InvalidOperationException();
            return 1;
        }

        // The work is written out in each: at tier 0 nothing is inlined, and a helper would be a frame more.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int BeforeThrow()
        {
            int x = 1;
            for (int i = 0; i < 100000; i++)
                x = x * 31 + i;
            return x | 1;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int InFinally()
        {
            int x = 2;
            for (int i = 0; i < 100000; i++)
                x = x * 31 + i;
            return x;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int InCatch()
        {
            int x = 3;
            for (int i = 0; i < 100000; i++)
                x = x * 31 + i;
            return x;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int AfterCatch()
        {
            int x = 4;
            for (int i = 0; i < 100000; i++)
                x = x * 31 + i;
            return x;
        }
    }
}
