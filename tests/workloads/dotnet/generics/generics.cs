// Methods that burn CPU in turn, each of them generic in another way: by its type, by itself, by both, by the type around its own.
using System;
using System.Runtime.CompilerServices;

namespace Generics
{
    struct Price { public double Cents; }

    // Value types as arguments have code of their own; reference types share theirs, in which the argument is called System.__Canon.
    sealed class Table<T>
    {
        readonly T[] cells = new T[512];

        [MethodImpl(MethodImplOptions.NoInlining)]
        public double Fill(T value)
        {
            double sum = 0;
            for (int round = 0; round < 400; round++)
                for (int i = 0; i < cells.Length; i++)
                {
                    cells[i] = value;
                    sum = sum * 0.9999 + i;
                }
            return sum;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public double Convert<TTo>(TTo[] to)
        {
            double sum = 0;
            for (int round = 0; round < 400; round++)
                for (int i = 0; i < to.Length; i++)
                {
                    to[i] = default(TTo);
                    sum = sum * 0.9999 + i;
                }
            return sum;
        }

        public sealed class Row<TCell>
        {
            readonly TCell[] cells = new TCell[512];

            [MethodImpl(MethodImplOptions.NoInlining)]
            public double Walk(T seed)
            {
                double sum = 0;
                for (int round = 0; round < 400; round++)
                    for (int i = 0; i < cells.Length; i++)
                    {
                        cells[i] = default(TCell);
                        sum = sum * 0.9999 + i;
                    }
                return sum;
            }
        }
    }

    static class Program
    {
        static double sink;

        static int Main()
        {
            Workload.Start("generics", Loop);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        static void Loop()
        {
            var prices = new Table<Price>();
            var numbers = new Table<long>();
            var texts = new Table<string>();
            var row = new Table<int>.Row<Price>();
            var shorts = new short[512];
            while (!Workload.Stopping)
            {
                sink += prices.Fill(default(Price));
                sink += numbers.Convert(shorts);
                sink += texts.Fill("text");
                sink += row.Walk(1);
            }
        }
    }
}
