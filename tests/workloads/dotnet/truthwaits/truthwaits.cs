// Three threads that wait in ways a .NET program waits (asleep, for a lock, in a system call), each inside a chain of its own. Truth: by
// the program's own clock, when each was in the function that waits.
using System;
using System.IO.Pipes;
using System.Runtime.CompilerServices;
using System.Threading;

namespace TruthWaits
{
    static class Program
    {
        static readonly object contended = new object();
        static readonly AutoResetEvent released = new AutoResetEvent(false);
        static AnonymousPipeServerStream writer;
        static AnonymousPipeClientStream reader;
        static long sink;

        static int Main()
        {
            writer = new AnonymousPipeServerStream(PipeDirection.Out);
            reader = new AnonymousPipeClientStream(PipeDirection.In, writer.ClientSafePipeHandle);
            Workload.Chain("sleeper", "TruthWaits.Program.SleepLoop", "TruthWaits.Program.SleepOuter", "TruthWaits.Program.SleepInner");
            Workload.Chain("locker", "TruthWaits.Program.LockLoop", "TruthWaits.Program.LockOuter", "TruthWaits.Program.LockInner");
            Workload.Chain("reader", "TruthWaits.Program.ReadLoop", "TruthWaits.Program.ReadOuter", "TruthWaits.Program.ReadInner");
            Workload.Start("holder", HoldLoop);
            Workload.Start("writer", WriteLoop);
            Workload.Start("sleeper", SleepLoop);
            Workload.Start("locker", LockLoop);
            Workload.Start("reader", ReadLoop);
            Thread.Sleep(500);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        // Holds the lock for 20 ms, then waits until the other has had it.
        static void HoldLoop()
        {
            while (!Workload.Stopping)
            {
                lock (contended)
                    Thread.Sleep(20);
                released.WaitOne(100);
            }
        }

        static void WriteLoop()
        {
            while (!Workload.Stopping)
            {
                Thread.Sleep(15);
                writer.WriteByte(1);
            }
        }

        static void SleepLoop()
        {
            while (!Workload.Stopping)
            {
                long from = Workload.RealtimeNanoseconds();
                SleepOuter();
                Workload.Waited("TruthWaits.Program.SleepOuter", from, Workload.RealtimeNanoseconds());
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void SleepOuter() { SleepInner(); sink++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void SleepInner() { Thread.Sleep(10); sink++; }

        static void LockLoop()
        {
            while (!Workload.Stopping)
            {
                long from = Workload.RealtimeNanoseconds();
                LockOuter();
                Workload.Waited("TruthWaits.Program.LockOuter", from, Workload.RealtimeNanoseconds());
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void LockOuter() { LockInner(); sink++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void LockInner()
        {
            Monitor.Enter(contended);
            Monitor.Exit(contended);
            released.Set();
            sink++;
        }

        static void ReadLoop()
        {
            while (!Workload.Stopping)
            {
                long from = Workload.RealtimeNanoseconds();
                ReadOuter();
                Workload.Waited("TruthWaits.Program.ReadOuter", from, Workload.RealtimeNanoseconds());
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void ReadOuter() { ReadInner(); sink++; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void ReadInner() { sink += reader.ReadByte(); }
    }
}
