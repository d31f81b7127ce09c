// Async methods: awaits that complete at once run as calls inside each other (state machines started by the caller); awaits that do not are
// continued by a loop of the program's own, from a queue.
using System;
using System.Collections.Concurrent;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace AsyncChain
{
    static class Program
    {
        static readonly Queue queue = new Queue();
        static Task task;
        static int sink;

        static int Main()
        {
            // An async method is two functions: the stub that makes the state machine, and the state machine (`+async` when it is shown).
            const string P = "AsyncChain.Program.";
            Workload.Chain("nested", P + "Nested", P + "Outer", "...", P + "Outer+async", P + "Inner", "...", P + "Inner+async", P + "Work");
            // .NET 10 inlines what starts a state machine once the code is hot.
            Workload.Chain("nested", P + "Nested", P + "Outer", P + "Outer+async", P + "Inner", P + "Inner+async", P + "Work");
            Workload.Chain("nested", P + "Nested", P + "Outer", "...", P + "Outer+async", P + "Inner", P + "Inner+async", P + "Work");
            Workload.Chain("nested", P + "Nested", P + "Outer", P + "Outer+async", P + "Inner", "...", P + "Inner+async", P + "Work");
            Workload.Chain("continued", P + "Continued", "AsyncChain.Queue.Run", "...", P + "Resumed+async", P + "Work");
            Workload.Chain("continued", P + "Continued", "AsyncChain.Queue.Run", "...", P + "Resumed+async", "...", "AsyncChain.Queue.Post");
            Workload.Chain("continued", P + "Continued", "AsyncChain.Queue.Run", P + "First", P + "Resumed", "...", P + "Resumed+async", "...", "AsyncChain.Queue.Post");
            queue.Post(First, null);
            Workload.Start("nested", Nested);
            Workload.Start("continued", Continued);
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void Nested() { while (!Workload.Stopping) sink += Outer().Result; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static async Task<int> Outer() { return await Inner() + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static async Task<int> Inner() { await Task.CompletedTask; return Work() + 1; }

        static void Continued()
        {
            SynchronizationContext.SetSynchronizationContext(queue);
            queue.Run();
        }

        static void First(object unused) { task = Resumed(); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static async Task Resumed()
        {
            while (!Workload.Stopping)
            {
                await Task.Yield();
                sink += Work();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Work()
        {
            int x = 1;
            for (int i = 0; i < 200000; i++)
                x = x * 31 + i;
            return x;
        }
    }

    sealed class Queue : SynchronizationContext
    {
        readonly BlockingCollection<(SendOrPostCallback, object)> items = new BlockingCollection<(SendOrPostCallback, object)>();

        [MethodImpl(MethodImplOptions.NoInlining)]
        public override void Post(SendOrPostCallback callback, object state) { items.Add((callback, state)); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public void Run()
        {
            while (!Workload.Stopping)
                if (items.TryTake(out var item, 100))
                    item.Item1(item.Item2);
        }
    }
}
