// Small objects, as many MB of them as its argument says, all alive from `ready` on; one thread goes on allocating a little. Truth: how many
// objects there are.
using System;
using System.Globalization;
using System.Threading;

namespace SmallObjects
{
    sealed class Node { public object Next; public long Value; }

    static class Program
    {
        const int NodeBytes = 32;
        static Node[][] kept;
        static volatile object sink;

        static int Main(string[] args)
        {
            long megabytes = long.Parse(args[0], CultureInfo.InvariantCulture);
            kept = new Node[megabytes * 1000 * 1000 / (NodeBytes + 8) / 1000][];
            for (int row = 0; row < kept.Length; row++)
            {
                kept[row] = new Node[1000];
                for (int at = 0; at < 1000; at++)
                    kept[row][at] = new Node { Value = at };
            }
            GC.Collect();
            GC.Collect();
            Workload.Start("allocator", () =>
            {
                while (!Workload.Stopping)
                {
                    for (int at = 0; at < 100; at++)
                        sink = new byte[64];
                    Thread.Sleep(5);
                }
            });
            Workload.Truth("objects", kept.Length * 1000.0);
            Workload.Ready();
            Workload.WaitForStop();
            GC.KeepAlive(kept);
            Workload.PrintTruth();
            return 0;
        }
    }
}
