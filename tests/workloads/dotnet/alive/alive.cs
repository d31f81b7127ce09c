// Objects of four sizes of which the program knows how many are alive. `clear` lets go of all. `fill` makes some, lets go of a quarter of all there are,
// chosen at random, and now and then runs a collection. `collect` runs a full collection, after which what is not alive is gone. The answer
// to `alive` is the counts.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;

namespace Alive
{
    sealed class Node { public long Value; }
    struct Page { public byte Value; }
    struct Block { public byte Value; }
    struct Huge { public byte Value; }

    static class Program
    {
        static readonly List<object>[] kept = { new List<object>(), new List<object>(), new List<object>(), new List<object>() };
        static readonly int[] made = { 50000, 1600, 160, 10 };
        static int rounds;
        static readonly Random random = new Random();

        static int Main()
        {
            Workload.On("clear", Clear);
            Workload.On("fill", Fill);
            Workload.On("collect", () => GC.Collect());
            Workload.On("alive", Tell);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        static void Tell()
        {
            Console.Out.WriteLine("counts [" + string.Join(",", kept[0].Count, kept[1].Count, kept[2].Count, kept[3].Count) + "]");
        }

        // An array of bytes takes 24 bytes more than its elements.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static object Make(int kind)
        {
            switch (kind)
            {
                case 0: return new Node();
                case 1: return new Page[2048 - 24];
                case 2: return new Block[20000 - 24];
                default: return new Huge[300000 - 24];
            }
        }

        static void Clear()
        {
            foreach (var list in kept)
                list.Clear();
            rounds = 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Fill()
        {
            for (int kind = 0; kind < 4; kind++)
                for (int i = 0; i < made[kind]; i++)
                    kept[kind].Add(Make(kind));
            foreach (var list in kept)
                LetGo(list, list.Count / 4);
            if (++rounds % 4 == 3)
                GC.Collect(rounds % 3 % 2);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void LetGo(List<object> list, int count)
        {
            for (; count > 0; count--)
            {
                int at = random.Next(list.Count);
                list[at] = list[list.Count - 1];
                list.RemoveAt(list.Count - 1);
            }
        }
    }
}
