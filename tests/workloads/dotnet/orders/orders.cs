// A heap of very many objects: so many orders (the first argument), each of four objects, 424 bytes in all: itself, two lines that know it, and a text.
// Truth: `orders`, and bytes of the heap before `ready`.
using System;
using System.Globalization;
using System.Runtime.CompilerServices;

namespace Orders
{
    sealed class Line { public readonly Order Of; public long Item, Count; public Line(Order of) { Of = of; } }

    sealed class Order
    {
        public readonly Line First, Second;
        public readonly byte[] Text = new byte[264];
        public long Number, Customer;

        public Order(long number)
        {
            Number = number;
            First = new Line(this);
            Second = new Line(this);
        }
    }

    static class Program
    {
        // In pieces, none of which is a large object.
        static Order[][] all;

        static int Main(string[] args)
        {
            Fill(int.Parse(args[0], CultureInfo.InvariantCulture));
            Workload.Truth("heap_bytes", GC.GetTotalMemory(false));
            Workload.Ready();
            Workload.WaitForStop();
            long orders = 0;
            foreach (var piece in all)
                foreach (var order in piece)
                    if (order.First.Of == order && order.Second.Of == order && order.Text.Length == 264)
                        orders++;
            Workload.Truth("orders", orders);
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Fill(int orders)
        {
            const int Piece = 1000;
            all = new Order[orders / Piece][];
            for (int n = 0; n < all.Length; n++)
            {
                all[n] = new Order[Piece];
                for (int i = 0; i < Piece; i++)
                    all[n][i] = new Order((long)n * Piece + i);
            }
        }
    }
}
