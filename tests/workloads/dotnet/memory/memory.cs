// Memory with known truth: a list that leaks at a known rate, a cache replaced every 2 s, and garbage.
// Full collections come 4 times a second, so that what is dead is known to be dead soon.
// Truth: bytes (headers included, as the runtime counts them) and objects allocated of each type, and all bytes of all threads.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Memory
{
    // 24 bytes of object header, method table and pointer, and the array it points to.
    sealed class Leaked { public readonly byte[] Body = new byte[1000]; }
    sealed class Cached { public readonly byte[] Body = new byte[1000]; }
    sealed class Garbage { public readonly byte[] Body = new byte[1000]; }

    static class Program
    {
        static readonly List<Leaked> leak = new List<Leaked>();
        static volatile Cached[] cache;
        static volatile object sink;
        static long leaked, cached, garbage;

        static int Main()
        {
            Workload.Start("leak", LeakLoop);
            Workload.Start("cache", CacheLoop);
            Workload.Start("garbage", GarbageLoop);
            Workload.Start("collector", CollectLoop);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("leaked_objects", Volatile.Read(ref leaked));
            Workload.Truth("cached_objects", Volatile.Read(ref cached));
            Workload.Truth("garbage_objects", Volatile.Read(ref garbage));
            Workload.Truth("live_cached_objects", cache.Length);
            Workload.Truth("allocated_bytes", GC.GetTotalAllocatedBytes(true));
            Workload.PrintTruth();
            GC.KeepAlive(leak);
            return 0;
        }

        // 2000 objects of about 1 KiB a second.
        static void LeakLoop()
        {
            Paced(2000, () => { Leak(); leaked++; });
        }

        // 20,000 objects a second.
        static void GarbageLoop()
        {
            Paced(20000, () => { sink = MakeGarbage(); garbage++; });
        }

        static void CacheLoop()
        {
            while (!Workload.Stopping)
            {
                RefreshCache();
                Thread.Sleep(2000);
            }
        }

        static void CollectLoop()
        {
            while (!Workload.Stopping)
            {
                Thread.Sleep(250);
                GC.Collect();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Leak() { leak.Add(new Leaked()); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static Garbage MakeGarbage() { return new Garbage(); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void RefreshCache()
        {
            var fresh = new Cached[4000];
            for (int i = 0; i < fresh.Length; i++)
                fresh[i] = new Cached();
            cached += fresh.Length;
            cache = fresh;
        }

        static void Paced(int perSecond, Action step)
        {
            var clock = Stopwatch.StartNew();
            long done = 0;
            while (!Workload.Stopping)
            {
                long due = clock.ElapsedMilliseconds * perSecond / 1000;
                for (; done < due; done++)
                    step();
                Thread.Sleep(5);
            }
        }
    }
}
