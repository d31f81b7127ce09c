// Managed code on threads of 128 KiB that C has made: they allocate, throw, and wait for each other's lock. `go` has four of them do so, with the
// argument `once` it is done once, without a word, and then it ends. Truth: the bytes of stack that one has used at most.
using System;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace SmallStacks
{
    static class Program
    {
        delegate void Call();

        static readonly Call call = Use;
        static readonly object gate = new object();
        static long used, caught;

        [DllImport("libsmallstacks.so")]
        static extern nuint on_small_stacks(Call call, uint count);

        static int Main(string[] args)
        {
            if (args.Length == 0)
            {
                Workload.On("go", Go);
                Workload.Ready();
                Workload.WaitForStop();
            }
            else
                Go();
            Workload.Truth("used", used);
            Workload.Truth("caught", caught);
            Workload.PrintTruth();
            return 0;
        }

        static void Go()
        {
            used = Math.Max(used, (long)on_small_stacks(call, 4));
        }

        static void Use()
        {
            for (int i = 0; i < 400; i++)
            {
                Make();
                try { Throw(i); }
                catch (InvalidOperationException) { Interlocked.Increment(ref caught); }
                if (i % 100 == 0)
                    lock (gate)
                        Thread.Sleep(1);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Make()
        {
            for (int i = 0; i < 40; i++)
                GC.KeepAlive(new Item[125]);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Throw(int number) { throw new InvalidOperationException(number.ToString()); }
    }

    struct Item { public long Value; }
}
