// Objects that live and die on command: `fill` makes them, `free` lets go of them, `collect` runs one full collection. Each is answered by
// the line `done` with its name. No collection happens otherwise if the youngest generation has room enough (GCgen0size). Truth: how many
// collections there were.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;

namespace Freed
{
    sealed class Kept { public readonly byte[] Body = new byte[1000]; }

    static class Program
    {
        static List<Kept> kept;

        static int Main()
        {
            Workload.On("fill", Fill);
            Workload.On("free", Free);
            Workload.On("collect", () => GC.Collect());
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("collections", GC.CollectionCount(0));
            Workload.PrintTruth();
            return 0;
        }

        // 5 MB: some 50 samples.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Fill()
        {
            var fresh = new List<Kept>(5000);
            for (int i = 0; i < 5000; i++)
                fresh.Add(new Kept());
            kept = fresh;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Free() { kept = null; }
    }
}
