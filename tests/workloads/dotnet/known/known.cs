// Eight types of five sizes (24 bytes to 300 KB), so many of each in a batch, in an order that repeats only after millions of objects. The command
// `batch` makes one batch, `steps` one whose order is in step with the stride of .NET 6 to 9. Truth: none but the counts that
// tests/src/truth/allocations.rs has, too.
using System;
using System.Runtime.CompilerServices;

namespace Known
{
    sealed class Tiny { public long Value; }
    sealed class TinyRef { public object Value; }
    struct Ash { public byte Value; }
    struct Birch { public byte Value; }
    struct Cedar { public byte Value; }
    struct Elm { public byte Value; }
    struct Fir { public byte Value; }
    struct Mixed { public byte Value; }
    sealed class Filler { public long Value; }
    struct Wide { public byte Value; }

    static class Program
    {
        static volatile object sink;
        static ulong random = 88172645463325252;

        static int Main()
        {
            Workload.On("batch", Batch);
            Workload.On("steps", Steps);
            Workload.On("collect", () => GC.Collect());
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        // An array of bytes takes 24 bytes more than its elements.
        static void Make(int kind)
        {
            switch (kind)
            {
                case 0: sink = new Tiny(); break;
                case 1: sink = new TinyRef(); break;
                case 2: sink = new Ash[128 - 24]; break;
                case 3: sink = new Birch[128 - 24]; break;
                case 4: sink = new Cedar[2048 - 24]; break;
                case 5: sink = new Elm[20000 - 24]; break;
                case 6: sink = new Fir[300000 - 24]; break;
                case 7: sink = new Mixed[32 - 24]; break;
                case 8: sink = new Mixed[128 - 24]; break;
                case 9: sink = new Mixed[2048 - 24]; break;
                case 10: sink = new Mixed[20000 - 24]; break;
                default: sink = new Mixed[300000 - 24]; break;
            }
        }

        static readonly int[] counts = { 100000, 25000, 40000, 5000, 400, 25, 6, 4000, 1000, 100, 10, 2 };

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Batch()
        {
            var left = (int[])counts.Clone();
            int all = 0;
            foreach (int count in left)
                all += count;
            while (all > 0)
            {
                // Any object that is still to be made, with the same chance for each.
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                int at = (int)(random % (ulong)all);
                int kind = 0;
                while (at >= left[kind])
                    at -= left[kind++];
                left[kind]--;
                all--;
                Make(kind);
            }
        }

        // 100 times one object of 50,000 bytes and 2,250 of 24: 104,000 bytes, a little more than the runtime's stride of 102,400. It is
        // nearly always one of the small ones that goes beyond it.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Steps()
        {
            for (int i = 0; i < 100; i++)
            {
                sink = new Wide[50000 - 24];
                for (int j = 0; j < 2250; j++)
                    sink = new Filler();
            }
        }
    }
}
