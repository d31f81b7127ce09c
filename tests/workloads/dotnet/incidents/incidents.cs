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
            Workload.On("contend-pairs", ContendInPairs);
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
            // It is still there when the last wait is told of: on .NET 11 nobody else knows who it was.
            Thread.Sleep(200);
        }

        // Four waiters with a lock each that a locker of their own holds for 20 ms, twenty times. The lockers of the first two go on from round to
        // round. Those of the others end with their round, so the runtime's numbers of threads are used again all the time.
        static void ContendInPairs()
        {
            var threads = new Thread[8];
            for (int i = 0; i < 4; i++)
            {
                int pair = i;
                var own = new object();
                int held = 0, done = 0;
                Thread waiter = null;
                void Lock(int round)
                {
                    lock (own)
                    {
                        Volatile.Write(ref held, round);
                        while ((waiter.ThreadState & System.Threading.ThreadState.WaitSleepJoin) == 0)
                            Thread.Sleep(1);
                        Thread.Sleep(20);
                    }
                }
                void Wait(int round)
                {
                    while (Volatile.Read(ref done) != round)
                        Thread.Sleep(1);
                }
                threads[2 * i] = waiter = new Thread(() =>
                {
                    for (int round = 1; round <= 20; round++)
                    {
                        // Nothing else that it does counts as a wait.
                        while (Volatile.Read(ref held) != round)
                            Thread.Yield();
                        WaitInPair(own);
                        Volatile.Write(ref done, round);
                    }
                }) { Name = "waiter-" + pair };
                threads[2 * i + 1] = new Thread(() =>
                {
                    for (int round = 1; round <= 20; round++)
                    {
                        int now = round;
                        if (pair < 2)
                            Lock(round);
                        else
                            new Thread(() => Lock(now)) { Name = "locker-" + pair }.Start();
                        Wait(round);
                    }
                }) { Name = pair < 2 ? "locker-" + pair : "starter-" + pair };
            }
            foreach (var thread in threads)
                thread.Start();
            foreach (var thread in threads)
                thread.Join();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitInPair(object own)
        {
            lock (own)
                turn++;
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
