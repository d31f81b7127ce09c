// The demo application: a pretend web shop in which every column of a profile has something to show.
//
// Usage: dotnet demo.dll [SECONDS]      without SECONDS it runs until it is killed.
//
// What to look for, by method (each on its own named thread):
//   Orders.PriceOrders       burns CPU and allocates: cpu and alloc_space on one location
//   Statistics.Median<Money> a generic method with a real type argument
//   Frontend.HandleRequestAsync  an async method
//   Codec.Encode > shop_encode > Codec.OnBlock   managed, native, managed again
//   Stock.WaitForShelf       waits for a lock that Stock.Restock holds 30 ms of every 50
//   Mailer.WaitForSlot       sleeps
//   Audit.ReadEntry          waits in a pipe read
//   Sessions.Remember        leaks LeakBytesPerSecond
//   Catalog.Refresh          a cache that is replaced every 2 s
//   Payments.Charge          throws 50 exceptions a second
//   Housekeeping.Collect     one full garbage collection a second
// libshop_native.so (workloads/native/shop_native.c) is optional: without it the native part is left out.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.IO.Pipes;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;
using System.Threading.Tasks;

namespace Demo
{
    static class Program
    {
        static int Main(string[] args)
        {
            double seconds = args.Length > 0 ? double.Parse(args[0], CultureInfo.InvariantCulture) : double.PositiveInfinity;
            bool native = Codec.Available();

            Start("orders", Orders.Run);
            Start("statistics", Statistics.Run);
            Start("stock-owner", Stock.Restock);
            Start("stock-waiter", Stock.Run);
            Start("mailer", Mailer.Run);
            Start("audit", Audit.Run);
            Start("audit-writer", Audit.Write);
            Start("sessions", Sessions.Run);
            Start("catalog", Catalog.Run);
            Start("payments", Payments.Run);
            Start("housekeeping", Housekeeping.Run);
            if (native)
                Start("codec", Codec.Run);
            for (int client = 0; client < 4; client++)
                _ = Frontend.ServeAsync(client);

            Console.WriteLine("demo: a pretend shop: prices orders, waits for locks, pipes and sleep, leaks "
                + Sessions.LeakBytesPerSecond / 1024 + " KiB/s, replaces a cache every 2 s, throws, collects"
                + (native ? ", calls native code" : "; no native part: libshop_native.so is not beside demo.dll")
                + " (pid " + Environment.ProcessId + ")");
            Console.Out.Flush();

            if (double.IsPositiveInfinity(seconds))
                Thread.Sleep(Timeout.Infinite);
            Thread.Sleep(TimeSpan.FromSeconds(seconds));
            return 0;
        }

        static void Start(string name, Action body)
        {
            var thread = new Thread(() => body()) { Name = name, IsBackground = true };
            thread.Start();
        }
    }

    // Results go here, so that the compiler keeps the work that made them and makes no tail calls.
    static class Sink
    {
        public static volatile object Object;
        public static double Number;
    }

    sealed class Receipt
    {
        public double Total;
        public byte[] Body;
    }

    static class Orders
    {
        public static void Run()
        {
            while (true)
            {
                Sink.Object = PriceOrders(4000);
                Thread.Sleep(5);
            }
        }

        // Both the arithmetic and the `new` are this method's own.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static Receipt PriceOrders(int count)
        {
            Receipt last = null;
            for (int order = 0; order < count; order++)
            {
                double total = order;
                for (int item = 1; item < 600; item++)
                    total = total * 1.0000001 + item % 7;
                last = new Receipt { Total = total, Body = new byte[24] };
            }
            return last;
        }
    }

    readonly struct Money : IComparable<Money>
    {
        readonly long cents;
        public Money(long cents) { this.cents = cents; }
        public long Cents => cents;
        public int CompareTo(Money other) => cents.CompareTo(other.cents);
    }

    static class Statistics
    {
        public static void Run()
        {
            var prices = new Money[600];
            uint seed = 1;
            while (true)
            {
                for (int i = 0; i < prices.Length; i++)
                {
                    seed = seed * 1664525 + 1013904223;
                    prices[i] = new Money(seed >> 8);
                }
                Sink.Number = Median(prices).Cents;
                Thread.Sleep(5);
            }
        }

        // Insertion sort, so that the CPU time is this method's own.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static T Median<T>(T[] values) where T : IComparable<T>
        {
            for (int i = 1; i < values.Length; i++)
            {
                T value = values[i];
                int hole = i;
                while (hole > 0 && values[hole - 1].CompareTo(value) > 0)
                {
                    values[hole] = values[hole - 1];
                    hole--;
                }
                values[hole] = value;
            }
            return values[values.Length / 2];
        }
    }

    static class Frontend
    {
        public static async Task ServeAsync(int client)
        {
            while (true)
                Sink.Number = await HandleRequestAsync(client);
        }

        static async Task<double> HandleRequestAsync(int client)
        {
            await Task.Delay(20);
            double page = client;
            for (int i = 0; i < 400_000; i++)
                page = page * 0.9999 + i % 3;
            return page;
        }
    }

    static class Codec
    {
        delegate uint BlockCallback(uint block, uint checksum);

        [DllImport("shop_native")]
        static extern uint shop_encode(uint blocks, BlockCallback onBlock);

        static readonly BlockCallback callback = OnBlock;

        public static bool Available()
        {
            return NativeLibrary.TryLoad("shop_native", typeof(Codec).Assembly, DllImportSearchPath.AssemblyDirectory, out _);
        }

        public static void Run()
        {
            while (true)
            {
                Sink.Number = Encode(64);
                Thread.Sleep(10);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static uint Encode(uint blocks)
        {
            uint checksum = shop_encode(blocks, callback);
            return checksum + 1;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static uint OnBlock(uint block, uint checksum)
        {
            for (uint i = 0; i < 10_000; i++)
                checksum = (checksum << 5 | checksum >> 27) ^ (i + block);
            return checksum;
        }
    }

    static class Stock
    {
        static readonly object shelf = new object();
        static long taken;

        public static void Restock()
        {
            while (true)
            {
                lock (shelf)
                    Thread.Sleep(30);
                Thread.Sleep(20);
            }
        }

        public static void Run()
        {
            while (true)
            {
                WaitForShelf();
                Thread.Sleep(1);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForShelf()
        {
            lock (shelf)
                taken++;
        }
    }

    static class Mailer
    {
        static long slots;

        public static void Run()
        {
            while (true)
                WaitForSlot();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForSlot()
        {
            Thread.Sleep(100);
            slots++;
        }
    }

    static class Audit
    {
        static long entries;
        static readonly AnonymousPipeServerStream writer = new AnonymousPipeServerStream(PipeDirection.Out);

        public static void Run()
        {
            var reader = new AnonymousPipeClientStream(PipeDirection.In, writer.ClientSafePipeHandle);
            while (true)
                ReadEntry(reader);
        }

        // One thread, not a timer: on a busy machine two ticks of a timer run at once, and two first writes to a pipe at once make the
        // runtime cancel one of them.
        public static void Write()
        {
            while (true)
            {
                Thread.Sleep(50);
                writer.WriteByte(1);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void ReadEntry(AnonymousPipeClientStream reader)
        {
            int value = reader.ReadByte();
            entries += value;
        }
    }

    sealed class Session
    {
        public readonly byte[] State = new byte[984]; // 1008 bytes as an array object, with 24 of Session: 1 KiB rounded up
    }

    static class Sessions
    {
        const int PerTick = 10;
        const int TicksPerSecond = 50;
        public const int LeakBytesPerSecond = 1024 * PerTick * TicksPerSecond;
        static readonly List<Session> remembered = new List<Session>();

        public static void Run()
        {
            var clock = Stopwatch.StartNew();
            for (long tick = 1; ; tick++)
            {
                for (int i = 0; i < PerTick; i++)
                    Remember();
                long due = tick * 1000 / TicksPerSecond - clock.ElapsedMilliseconds;
                if (due > 0)
                    Thread.Sleep((int)due);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Remember()
        {
            remembered.Add(new Session());
        }
    }

    sealed class CatalogPage
    {
        public readonly byte[] Text = new byte[4000];
    }

    static class Catalog
    {
        static volatile CatalogPage[] pages;

        public static void Run()
        {
            while (true)
            {
                Refresh();
                Thread.Sleep(2000);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Refresh()
        {
            var fresh = new CatalogPage[1000];
            for (int i = 0; i < fresh.Length; i++)
                fresh[i] = new CatalogPage();
            pages = fresh;
        }
    }

    sealed class DeclinedException : Exception
    {
        public DeclinedException(string message) : base(message) { }
    }

    static class Payments
    {
        static long declined;

        public static void Run()
        {
            for (int card = 0; ; card++)
            {
                try
                {
                    Charge(card);
                }
                catch (DeclinedException)
                {
                    declined++;
                }
                Thread.Sleep(20);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Charge(int card)
        {
            throw new DeclinedException("card " + card);
        }
    }

    static class Housekeeping
    {
        static long collections;

        public static void Run()
        {
            while (true)
            {
                Thread.Sleep(1000);
                Collect();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Collect()
        {
            GC.Collect();
            collections++;
        }
    }
}
