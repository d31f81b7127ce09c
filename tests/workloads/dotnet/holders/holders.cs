// Objects that stay because something holds them: a static event, the closure of a timer, a ConditionalWeakTable, a thread-static field, a
// ThreadLocal, an async method that waits. Each class is held by one of these only. `grow` adds 500 subscribers of the event. Truth: full
// collections before `ready` and at the end.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace Holders
{
    sealed class ByEvent { public readonly byte[] Body = new byte[100]; public void OnChanged(object sender, EventArgs e) { } }
    sealed class ByTimer { public readonly byte[] Body = new byte[100]; }
    sealed class ByTable { public readonly byte[] Body = new byte[100]; }
    sealed class ByThreadStatic { public readonly byte[] Body = new byte[100]; }
    sealed class ByThreadLocal { public readonly byte[] Body = new byte[100]; }
    sealed class ByAsync { public readonly byte[] Body = new byte[100]; }
    sealed class TableKey { }

    static class Feed
    {
        public static event EventHandler Changed;
        public static void Raise() { Changed?.Invoke(null, EventArgs.Empty); }
    }

    static class Program
    {
        static readonly List<TableKey> keys = new List<TableKey>();
        static readonly ConditionalWeakTable<TableKey, ByTable> table = new ConditionalWeakTable<TableKey, ByTable>();
        static readonly ThreadLocal<ByThreadLocal[]> local = new ThreadLocal<ByThreadLocal[]>();
        static readonly TaskCompletionSource<bool> gate = new TaskCompletionSource<bool>();
        static readonly ManualResetEventSlim parked = new ManualResetEventSlim();

        [ThreadStatic]
        static ByThreadStatic[] mine;

        static int Main()
        {
            Subscribe(1000);
            StartTimers(200);
            FillTable(300);
            StartHolding(500);
            var filled = new CountdownEvent(1);
            Workload.Start("keeper", () =>
            {
                FillThread();
                filled.Signal();
                parked.Wait();
                GC.KeepAlive(mine);
            });
            filled.Wait();
            Workload.On("grow", () => Subscribe(500));
            Workload.Truth("collections_before", GC.CollectionCount(2));
            Workload.Ready();
            Workload.WaitForStop();
            Feed.Raise();
            Workload.Truth("collections", GC.CollectionCount(2));
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Subscribe(int count)
        {
            for (int i = 0; i < count; i++)
                Feed.Changed += new ByEvent().OnChanged;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void StartTimers(int count)
        {
            for (int i = 0; i < count; i++)
                StartTimer(new ByTimer());
        }

        // The queue of timers holds the callback, and that the timer, which nobody else does.
        static void StartTimer(ByTimer held)
        {
            Timer timer = null;
            timer = new Timer(_ => { GC.KeepAlive(held); GC.KeepAlive(timer); }, null, TimeSpan.FromHours(1), Timeout.InfiniteTimeSpan);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void FillTable(int count)
        {
            for (int i = 0; i < count; i++)
            {
                var key = new TableKey();
                keys.Add(key);
                table.Add(key, new ByTable());
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void FillThread()
        {
            mine = new ByThreadStatic[400];
            for (int i = 0; i < mine.Length; i++)
                mine[i] = new ByThreadStatic();
            var values = new ByThreadLocal[600];
            for (int i = 0; i < values.Length; i++)
                values[i] = new ByThreadLocal();
            local.Value = values;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void StartHolding(int count)
        {
            for (int i = 0; i < count; i++)
                _ = Hold(new ByAsync());
        }

        static async Task Hold(ByAsync held)
        {
            await gate.Task;
            GC.KeepAlive(held);
        }
    }
}
