// Large objects of known types, sizes and counts, made in all the ways there are to make one, by two threads and beside small garbage. `make` makes them
// and keeps the first half of each type, `free` lets go of those, `collect` runs a full collection, `background` one while the program goes on and then one of young
// objects, `flood` makes more of one type at once than can be told
// of one by one, `small` makes garbage alone. With the argument `once` it does `make` and ends. Truth: none but the counts that tests/tests/large.rs has, too.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Large
{
    struct Oak { public byte Value; }
    struct Ash { public byte Value; }
    struct Elm { public byte Value; }
    struct Fir { public long Value; }
    struct Yew { public byte Value; }
    struct Pin { public byte Value; }
    [InlineArray(100000)]
    struct Field { public byte Value; }
    sealed class Whole { public Field Field; }
    sealed class Leaf { public long A, B; }

    static class Program
    {
        static readonly List<object> kept = new List<object>();
        [ThreadStatic]
        static object sink;

        static int Main(string[] args)
        {
            if (args.Length > 0 && args[0] == "once")
            {
                Make();
                Workload.PrintTruth();
                return 0;
            }
            Workload.On("make", Make);
            Workload.On("small", Small);
            Workload.On("flood", Flood);
            Workload.On("free", () => kept.Clear());
            Workload.On("collect", () => GC.Collect());
            Workload.On("background", CollectInBackground);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        // On threads of their own, so that no stack of a thread that goes on holds what was let go of.
        static void Make()
        {
            var threads = new Thread[2];
            for (int n = 0; n < threads.Length; n++)
            {
                threads[n] = new Thread(MakeAll);
                threads[n].Start();
            }
            foreach (var thread in threads)
                thread.Join();
        }

        // The young one is not before it, as the runtime decides by itself where it needs room for young objects: it begins as a background collection.
        static void CollectInBackground()
        {
            long before = GC.GetGCMemoryInfo(GCKind.Background).Index;
            GC.Collect(2, GCCollectionMode.Forced, blocking: false);
            while (GC.GetGCMemoryInfo(GCKind.Background).Index == before)
                Thread.Sleep(1);
            GC.Collect(0);
        }

        static readonly int[] counts = { 20, 15, 10, 5, 4, 6, 10, 30 };

        static void MakeAll()
        {
            for (int kind = 0; kind < counts.Length; kind++)
            {
                for (int n = 0; n < counts[kind]; n++)
                {
                    object made = MakeOne(kind, n);
                    if (n < counts[kind] / 2)
                        lock (kept)
                            kept.Add(made);
                    Garbage();
                }
            }
        }

        // An array takes 24 bytes more than its elements (one of two dimensions 40), a string 22, an object 16.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static object MakeOne(int kind, int n)
        {
            switch (kind)
            {
                // The smallest there is; half of them as copies of small ones that grow.
                case 0: return n % 2 == 0 ? new Oak[85000 - 24] : Grown();
                // Not a multiple of 8.
                case 1: return new Ash[100001];
                case 2: return new Elm[400, 300];
                case 3: return new Fir[131072];
                case 4: return GC.AllocateUninitializedArray<Yew>(200000 - 24);
                case 5: return new Whole();
                case 6: return new string('x', 50000);
                // These are large, but lie elsewhere.
                default: return GC.AllocateArray<Pin>(100000 - 24, pinned: true);
            }
        }

        static Oak[] Grown()
        {
            var grows = new Oak[1000];
            Array.Resize(ref grows, 85000 - 24);
            return grows;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Garbage()
        {
            for (int n = 0; n < 2000; n++)
                sink = new Leaf();
        }

        static void Small()
        {
            for (int n = 0; n < 20; n++)
                Garbage();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Flood()
        {
            for (int n = 0; n < 3000; n++)
            {
                long made = Stopwatch.GetTimestamp();
                sink = new Oak[85000 - 24];
                // Without a pause a fast machine fills the library's ring before the reader's next look.
                while (Stopwatch.GetElapsedTime(made).TotalMicroseconds < 50)
                    Thread.SpinWait(10);
            }
        }
    }
}
