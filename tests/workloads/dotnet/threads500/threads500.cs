// 500 threads, each in a chain of its own: mostly asleep, now and then at work.
using System;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Threads500
{
    static class Program
    {
        static int sink;

        static int Main()
        {
            for (int i = 0; i < 500; i++)
            {
                string name = "t" + i;
                Workload.Chain(name, "Threads500.Program.Loop", "Threads500.Program.Outer", "Threads500.Program.Inner", "Threads500.Program.Nap");
                Workload.Chain(name, "Threads500.Program.Loop", "Threads500.Program.Outer", "Threads500.Program.Inner", "Threads500.Program.Work");
                Workload.Start(name, Loop);
            }
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("sum", sink);
            Workload.PrintTruth();
            return 0;
        }

        static void Loop() { while (!Workload.Stopping) sink += Outer(); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Outer() { return Inner() + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Inner() { return Work() + Nap() + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Work()
        {
            int x = 1;
            for (int i = 0; i < 400000; i++)
                x = x * 31 + i;
            return x;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Nap() { Thread.Sleep(400); return 1; }
    }
}
