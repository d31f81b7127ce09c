// Exceptions thrown and locks waited for, on command, in numbers and for times the program knows.
using System;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Incidents
{
    sealed class RareException : Exception { public RareException() : base("a secret") { } }

    sealed class FrequentException : Exception { }

    static class Program
    {
        static readonly object gate = new object();
        static long waited;
        static volatile int turn;

        static int Main()
        {
            Workload.On("throw", Throw);
            Workload.On("throw-many", ThrowMany);
            Workload.On("contend", () => Contend(asleep: false));
            Workload.On("contend-asleep", () => Contend(asleep: true));
            Workload.On("contend-crowd", Crowd);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("waited_ns", waited * (1e9 / Stopwatch.Frequency));
            Workload.PrintTruth();
            return 0;
        }

        // 20, of which 8 are thrown again.
        static void Throw()
        {
            for (int i = 0; i < 20; i++)
            {
                try { Catcher(i < 8); }
                catch (RareException) { }
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Catcher(bool again)
        {
            try { return Thrower() + 1; }
            catch (RareException)
            {
                if (again)
                    throw;
                return 0;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Thrower() { throw new RareException(); }

        static void ThrowMany()
        {
            for (int i = 0; i < 20_000; i++)
            {
                try { Frequent(); }
                catch (FrequentException) { }
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Frequent() { throw new FrequentException(); }

        // Ten times another thread takes the lock, and lets go of it 20 ms after this one has begun to wait.
        static void Contend(bool asleep)
        {
            var waiter = Thread.CurrentThread;
            var owner = new Thread(() => Own(waiter, asleep)) { Name = "lock-owner" };
            turn = 0;
            owner.Start();
            for (int i = 1; i <= 10; i++)
            {
                while (turn != 2 * i - 1)
                    Thread.Yield();
                WaitForLock();
                turn = 2 * i;
            }
            // No Join: the only waits through the runtime's waiting function are those for the lock.
            while (owner.IsAlive)
                Thread.Yield();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForLock()
        {
            long began = Stopwatch.GetTimestamp();
            lock (gate)
                waited += Stopwatch.GetTimestamp() - began;
        }

        static void Own(Thread waiter, bool asleep)
        {
            for (int i = 1; i <= 10; i++)
            {
                lock (gate)
                {
                    turn = 2 * i - 1;
                    while ((waiter.ThreadState & System.Threading.ThreadState.WaitSleepJoin) == 0)
                        Thread.Yield();
                    if (asleep)
                        HoldAsleep();
                    else
                        Hold();
                }
                while (turn != 2 * i)
                    Thread.Yield();
            }
        }

        // 1,200 threads wait for one lock at once, each for more than 10 ms, and have it for a moment one after the other.
        static void Crowd()
        {
            var crowd = new Thread[1200];
            for (int i = 0; i < crowd.Length; i++)
                crowd[i] = new Thread(WaitInCrowd, 128 * 1024) { Name = "crowd" };
            lock (gate)
            {
                foreach (var thread in crowd)
                    thread.Start();
                foreach (var thread in crowd)
                    while ((thread.ThreadState & System.Threading.ThreadState.WaitSleepJoin) == 0)
                        Thread.Yield();
                HoldAsleep();
            }
            foreach (var thread in crowd)
                thread.Join();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitInCrowd()
        {
            lock (gate)
                Thread.Sleep(1);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Hold()
        {
            long began = Stopwatch.GetTimestamp();
            while (Stopwatch.GetTimestamp() - began < Stopwatch.Frequency / 50)
                Thread.Yield();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void HoldAsleep()
        {
            Thread.Sleep(20);
        }
    }
}
