// Threads that allocate in a chain, so much that collections follow each other and stop them at any point.
using System;
using System.Runtime.CompilerServices;

namespace GcHeavy
{
    static class Program
    {
        [ThreadStatic]
        static object[] kept;

        static int Main()
        {
            foreach (string name in new[] { "first", "second" })
            {
                Workload.Chain(name, "GcHeavy.Program.Loop", "GcHeavy.Program.Outer", "GcHeavy.Program.Middle", "GcHeavy.Program.Allocate");
                Workload.Chain(name, "GcHeavy.Program.Loop", "GcHeavy.Program.Outer", "GcHeavy.Program.Middle", "GcHeavy.Program.Allocate", "GcHeavy.Program.Node..ctor");
                Workload.Start(name, Loop);
            }
            return Workload.Settle(1500, () => Workload.Truth("collections", GC.CollectionCount(0)));
        }

        static void Loop()
        {
            kept = new object[1000];
            int sum = 0;
            while (!Workload.Stopping)
                sum += Outer(sum);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Outer(int x) { return Middle(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Middle(int x) { return Allocate(x & 0xffff) + 2; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Allocate(int x)
        {
            for (int i = 0; i < 1000; i++)
                kept[(x + i) % kept.Length] = i % 10 == 0 ? new byte[2000] : (object)new Node { Next = kept[i] as Node, Value = i };
            return x + 3;
        }

        sealed class Node
        {
            public Node Next;
            public int Value;
        }
    }
}
