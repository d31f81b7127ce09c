// A thread pool that has to grow, on command, until the program ends. The harness lets it begin with two workers. Truth: `workers` of the pool
// when it had what it needed, and `workers_at_end`, for a pool that is starved goes one beyond that: each worker asks for another before it begins
// to work. After `block` also what the runtime has told a listener of the program's own at both times: `told`, workers × 100 + reason, and
// `told_at_end`. After `queue` the pool has what it may have and so many items wait: `waiting`, until the program ends.
using System;
using System.Collections.Generic;
using System.Diagnostics.Tracing;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace Pool
{
    sealed class Listener : EventListener
    {
        readonly List<long> told = new List<long>();

        protected override void OnEventSourceCreated(EventSource source)
        {
            if (source.Name == "Microsoft-Windows-DotNETRuntime")
                EnableEvents(source, EventLevel.Informational, (EventKeywords)0x10000);
        }

        protected override void OnEventWritten(EventWrittenEventArgs one)
        {
            if (one.EventId != 55)
                return;
            lock (told)
                told.Add(Convert.ToInt64(one.Payload[1]) * 100 + Convert.ToInt64(one.Payload[2]));
        }

        public long[] Told()
        {
            lock (told)
                return told.ToArray();
        }
    }

    static class Program
    {
        const int Items = 4;
        static readonly ManualResetEvent gate = new ManualResetEvent(false);
        static readonly TaskCompletionSource<int> source = new TaskCompletionSource<int>(TaskCreationOptions.RunContinuationsAsynchronously);
        static int running;
        static Listener listener;

        static int Main()
        {
            Workload.On("starve", Starve);
            Workload.On("block", Block);
            Workload.On("queue", Queue);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("workers_at_end", ThreadPool.ThreadCount);
            if (listener != null)
                Workload.TruthList("told_at_end", listener.Told());
            gate.Set();
            source.SetResult(0);
            Workload.PrintTruth();
            return 0;
        }

        // More work than workers, all of which wait for what no worker can give: only starvation makes the pool grow.
        static void Starve()
        {
            for (int i = 0; i < Items; i++)
                ThreadPool.UnsafeQueueUserWorkItem(_ => Hold(), null);
            while (Volatile.Read(ref running) < Items)
                Thread.Sleep(1);
            Workload.Truth("workers", ThreadPool.ThreadCount);
        }

        // Two workers and no more, which both wait, and work that waits for them for three periods of the clock by which counters are read.
        static void Queue()
        {
            ThreadPool.SetMaxThreads(2, 2);
            for (int i = 0; i < 2; i++)
                ThreadPool.UnsafeQueueUserWorkItem(_ => Hold(), null);
            while (Volatile.Read(ref running) < 2)
                Thread.Sleep(1);
            for (int i = 0; i < 40; i++)
                ThreadPool.UnsafeQueueUserWorkItem(_ => { }, null);
            Workload.Truth("waiting", ThreadPool.PendingWorkItemCount);
            Thread.Sleep(3000);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Hold()
        {
            Interlocked.Increment(ref running);
            gate.WaitOne();
        }

        // Workers wait for a task, of which the pool knows: it wants one more for each.
        static void Block()
        {
            listener = new Listener();
            ThreadPool.GetMinThreads(out int least, out _);
            for (int i = 0; i < Items; i++)
                ThreadPool.UnsafeQueueUserWorkItem(_ => HoldTask(), null);
            long[] told;
            do
            {
                Thread.Sleep(1);
                told = listener.Told();
            }
            while (Volatile.Read(ref running) < Items || told.Length == 0 || told[told.Length - 1] / 100 < least + Items);
            Workload.Truth("workers", ThreadPool.ThreadCount);
            Workload.TruthList("told", told);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void HoldTask()
        {
            Interlocked.Increment(ref running);
            source.Task.Wait();
        }
    }
}
