// Small objects, as many MB of them as its first argument says, all alive from `ready` on, in arrays of 1,000 or of as many as its second argument says;
// one thread goes on allocating a little, of which 1 MB is alive at a time, each array for some seconds. Truth: how many small objects there are.
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
        static readonly byte[][] recent = new byte[256][];

        static int Main(string[] args)
        {
            long megabytes = long.Parse(args[0], CultureInfo.InvariantCulture);
            int width = args.Length > 1 ? int.Parse(args[1], CultureInfo.InvariantCulture) : 1000;
            kept = new Node[megabytes * 1000 * 1000 / (NodeBytes + 8) / width][];
            for (int row = 0; row < kept.Length; row++)
            {
                kept[row] = new Node[width];
                for (int at = 0; at < width; at++)
                    kept[row][at] = new Node { Value = at };
            }
            GC.Collect();
            GC.Collect();
            Workload.Start("allocator", () =>
            {
                for (int round = 0; !Workload.Stopping; round++)
                {
                    recent[round % recent.Length] = new byte[4096];
                    Thread.Sleep(20);
                }
            });
            Workload.Truth("objects", kept.Length * (double)width);
            Workload.Ready();
            Workload.WaitForStop();
            GC.KeepAlive(kept);
            Workload.PrintTruth();
            return 0;
        }
    }
}
