// Two threads of which each holds the lock that the other waits for, for ever, from before the program is ready on. Nothing else waits by
// the runtime's means.
using System.Runtime.CompilerServices;
using System.Threading;

namespace Deadlock
{
    static class Program
    {
        static readonly object left = new object(), right = new object();
        static int holding;
        static int got;

        static int Main()
        {
            var first = Workload.Start("first", () => Take(left, right));
            var second = Workload.Start("second", () => Take(right, left));
            while (((first.ThreadState & second.ThreadState) & ThreadState.WaitSleepJoin) == 0)
                Thread.Yield();
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Take(object own, object others)
        {
            lock (own)
            {
                Interlocked.Increment(ref holding);
                while (Volatile.Read(ref holding) < 2)
                    Thread.Yield();
                TakeOther(others);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void TakeOther(object others)
        {
            lock (others)
                got++;
        }
    }
}
