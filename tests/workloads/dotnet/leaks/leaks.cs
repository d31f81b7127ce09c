// Memory that is used in five ways: a leak of 200 objects of 10 KB a second, a slow leak of 10 a second, a cache that is made anew every 5 s, a pool that is
// made once, and a cache that warms up, by 50 a second, until three quarters of the time are over that it is watched: so many seconds, which is the argument;
// beside them a million small objects a second that die at once. A full collection runs every 2 s.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Leaks
{
    sealed class Small { public long Value; }
    struct Fast { public byte Value; }
    struct Slow { public byte Value; }
    struct Cached { public byte Value; }
    struct Pooled { public byte Value; }
    struct Warming { public byte Value; }

    static class Program
    {
        static readonly List<object> fast = new List<object>();
        static readonly List<object> slow = new List<object>();
        static readonly List<object> warming = new List<object>();
        static volatile bool watched;
        static volatile object[] cache;
        static object[] pool;
        static volatile object sink;

        static int Main(string[] arguments)
        {
            double seconds = arguments.Length > 0 ? double.Parse(arguments[0]) : 120;
            Workload.On("pool", () => { MakePool(); watched = true; });
            Workload.Start("warming", () =>
            {
                while (!watched && !Workload.Stopping)
                    Thread.Sleep(5);
                Paced(50, WarmUp, seconds * 0.75);
            });
            Workload.Start("fast", () => Paced(200, LeakFast));
            Workload.Start("slow", () => Paced(10, LeakSlow));
            Workload.Start("garbage", () => Paced(1000000, Waste));
            Workload.Start("cache", () => { while (!Workload.Stopping) { Refresh(); Thread.Sleep(5000); } });
            Workload.Start("collector", () => { while (!Workload.Stopping) { Thread.Sleep(2000); GC.Collect(); } });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("fast", fast.Count);
            Workload.Truth("slow", slow.Count);
            Workload.Truth("warming", warming.Count);
            Workload.PrintTruth();
            GC.KeepAlive(pool);
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void LeakFast() { fast.Add(new Fast[10000]); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void LeakSlow() { slow.Add(new Slow[10000]); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WarmUp() { warming.Add(new Warming[10000]); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Waste() { sink = new Small(); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Refresh()
        {
            var fresh = new object[1000];
            for (int i = 0; i < fresh.Length; i++)
                fresh[i] = new Cached[10000];
            cache = fresh;
        }

        // 10 MB: about 100 of its objects are sampled.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void MakePool()
        {
            var fresh = new object[1000];
            for (int i = 0; i < fresh.Length; i++)
                fresh[i] = new Pooled[10000];
            pool = fresh;
        }

        static void Paced(int perSecond, Action step, double seconds = double.PositiveInfinity)
        {
            var clock = Stopwatch.StartNew();
            long done = 0;
            while (!Workload.Stopping && clock.Elapsed.TotalSeconds < seconds)
            {
                long due = clock.ElapsedMilliseconds * perSecond / 1000;
                // A busy machine gives up what it cannot do, but not what must be told apart.
                if (perSecond > 1000)
                    done = Math.Max(done, due - perSecond / 20);
                for (; done < due; done++)
                    step();
                Thread.Sleep(5);
            }
        }
    }
}
