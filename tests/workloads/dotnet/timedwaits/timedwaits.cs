// Threads that wait in known ways for known lengths, again and again, each wait written down with its begin and end by the clock. One
// more sleeps from the start to the end of the process, inside a chain of NoInlining methods, and so does the runtime's own that waits for
// sockets.
using System;
using System.Collections.Generic;
using System.Net;
using System.Net.Sockets;
using System.Reflection;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace TimedWaits
{
    static class Program
    {
        static readonly object contended = new object();
        static readonly SemaphoreSlim semaphore = new SemaphoreSlim(0);
        static readonly ManualResetEventSlim never = new ManualResetEventSlim(false, 0);
        static readonly object condition = new object();
        static readonly Thread main = Thread.CurrentThread;
        static readonly ManualResetEvent unset = new ManualResetEvent(false);
        static readonly Barrier barrier = new Barrier(2);
        static readonly ReaderWriterLockSlim written = new ReaderWriterLockSlim();
        static int depth;

        static int Main()
        {
            var logs = new Dictionary<string, WaitLog>();
            void Waiter(string name, Action wait)
            {
                var log = logs[name] = new WaitLog();
                Workload.Start(name, () => { while (!Workload.Stopping) log.Of(wait); });
            }
            Workload.Start("asleep", AsleepOuter);
            Workload.Start("lock-holder", HoldLock);
            Workload.Start("releaser", Release);
            Waiter("wait-monitor", WaitForLock);
            Waiter("wait-semaphore", WaitForSemaphore);
            Waiter("wait-delay", WaitForDelay);
            Waiter("wait-sleep", Sleep);
            Waiter("wait-condition", WaitForCondition);
            Waiter("wait-join", WaitForEnd);
            Waiter("wait-event", WaitForEvent);
            Waiter("wait-optimised", WaitForEventOptimised);
            Waiter("wait-barrier", WaitForOthers);
            written.EnterWriteLock();
            Waiter("wait-writer", WaitToWrite);
            using var socket = new Socket(AddressFamily.InterNetwork, SocketType.Dgram, ProtocolType.Udp);
            socket.Bind(new IPEndPoint(IPAddress.Loopback, 0));
            var nothing = socket.ReceiveAsync(new ArraySegment<byte>(new byte[16]), SocketFlags.None);
            Workload.Ready();
            Workload.WaitForStop();
            foreach (var pair in logs)
                Workload.TruthList(pair.Key, pair.Value.Times());
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void AsleepOuter() { AsleepInner(); depth++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void AsleepInner() { never.Wait(); depth++; }

        // Held all the time but for a moment in which the waiter gets it: it is the only one who waits.
        static void HoldLock()
        {
            while (true)
            {
                lock (contended)
                    Thread.Sleep(70);
                Thread.Sleep(5);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForLock()
        {
            lock (contended)
                depth++;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForSemaphore() { semaphore.Wait(); depth++; }

        // A semaphore spins before it waits; where CPUs are scarce, for longer than any time that could be fixed here. It counts who waits.
        static void Release()
        {
            var waiters = typeof(SemaphoreSlim).GetField("m_waitCount", BindingFlags.Instance | BindingFlags.NonPublic);
            while (true)
            {
                while ((int)waiters.GetValue(semaphore) == 0)
                    Thread.Sleep(1);
                Thread.Sleep(60);
                semaphore.Release();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForDelay() { Task.Delay(50).Wait(); depth++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Sleep() { Thread.Sleep(40); depth++; }

        // Optimised from the first call on, so the runtime's methods become a part of these: no frame says what they wait for.
        [MethodImpl(MethodImplOptions.NoInlining | MethodImplOptions.AggressiveOptimization)]
        static void WaitForCondition()
        {
            lock (condition)
                Monitor.Wait(condition, 50);
            depth++;
        }

        [MethodImpl(MethodImplOptions.NoInlining | MethodImplOptions.AggressiveOptimization)]
        static void WaitForEnd() { main.Join(45); depth++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForEvent() { unset.WaitOne(55); depth++; }

        [MethodImpl(MethodImplOptions.NoInlining | MethodImplOptions.AggressiveOptimization)]
        static void WaitForEventOptimised() { unset.WaitOne(55); depth++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForOthers() { barrier.SignalAndWait(45); depth++; }

        // Main writes all the time.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitToWrite() { written.TryEnterWriteLock(60); depth++; }
    }

    // Begin and end of each wait, in nanoseconds since 1970.
    sealed class WaitLog
    {
        readonly List<long> times = new List<long>();

        static long Now() { return (DateTime.UtcNow - DateTime.UnixEpoch).Ticks * 100; }

        public void Of(Action wait)
        {
            long begin = Now();
            wait();
            long end = Now();
            lock (times)
            {
                times.Add(begin);
                times.Add(end);
            }
        }

        public long[] Times()
        {
            lock (times)
                return times.ToArray();
        }
    }
}
