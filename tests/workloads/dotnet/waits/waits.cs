// Threads that wait in the three ways a .NET program waits: for a lock, asleep, and in a system call. Each waits inside a
// chain of NoInlining methods, whole down to the thread's start. Truth: how long each waited by its own clock.
using System;
using System.Diagnostics;
using System.IO.Pipes;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Waits
{
    static class Program
    {
        static readonly object contended = new object();
        static AnonymousPipeServerStream writer;
        static AnonymousPipeClientStream reader;
        static long monitorTicks, sleepTicks, pipeTicks;
        static int bytes;

        static int Main()
        {
            writer = new AnonymousPipeServerStream(PipeDirection.Out);
            reader = new AnonymousPipeClientStream(PipeDirection.In, writer.ClientSafePipeHandle);
            Workload.Start("lock-holder", HoldLock);
            Workload.Start("pipe-writer", WritePipe);
            Workload.Start("wait-monitor", MonitorLoop);
            Workload.Start("wait-sleep", SleepLoop);
            Workload.Start("wait-pipe", PipeLoop);
            Workload.Ready();
            Workload.WaitForStop();
            double toNs = 1e9 / Stopwatch.Frequency;
            Workload.Truth("monitor_ns", Volatile.Read(ref monitorTicks) * toNs);
            Workload.Truth("sleep_ns", Volatile.Read(ref sleepTicks) * toNs);
            Workload.Truth("pipe_ns", Volatile.Read(ref pipeTicks) * toNs);
            Workload.PrintTruth();
            return 0;
        }

        // Held 80 ms of every 90. The pause is long enough for the waiter to get in.
        static void HoldLock()
        {
            while (true)
            {
                lock (contended)
                    Thread.Sleep(80);
                Thread.Sleep(10);
            }
        }

        static void WritePipe()
        {
            while (true)
            {
                Thread.Sleep(40);
                writer.WriteByte(1);
            }
        }

        static void MonitorLoop()
        {
            while (true)
            {
                long start = Stopwatch.GetTimestamp();
                MonitorOuter();
                monitorTicks += Stopwatch.GetTimestamp() - start;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void MonitorOuter() { MonitorInner(); bytes++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void MonitorInner()
        {
            Monitor.Enter(contended);
            Monitor.Exit(contended);
            // Waits for the holder to take the lock again, so that the next Enter waits too.
            Thread.Sleep(12);
        }

        static void SleepLoop()
        {
            while (true)
            {
                long start = Stopwatch.GetTimestamp();
                SleepOuter();
                sleepTicks += Stopwatch.GetTimestamp() - start;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void SleepOuter() { SleepInner(); bytes++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void SleepInner() { Thread.Sleep(50); bytes++; }

        static void PipeLoop()
        {
            while (true)
            {
                long start = Stopwatch.GetTimestamp();
                PipeOuter();
                pipeTicks += Stopwatch.GetTimestamp() - start;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void PipeOuter() { PipeInner(); bytes++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void PipeInner() { bytes += reader.ReadByte(); }
    }
}
