// The program that `cargo xtask bench` measures with. Half of its threads work through deep call chains and allocate; the others hand a
// token to each other, so that threads switch all the time. Each line on standard input is answered with "OPERATIONS NANOSECONDS":
// work done by all threads since the start, and when it was read. "exit" or the end of the input ends it. With the argument "allocate"
// it allocates about forty times as much for the same work, so that time in the shim can be seen; with "work" nobody hands tokens; with
// "stream N" the deepest calls go through N MB of memory for each thread, which leaves nothing else in the CPU's caches; with
// "switch N" nobody works, and threads switch N times a second; with "micro" or "micro N" they, or N of them, do nothing but make small objects; with "idle" there are no threads. The line "fill" makes it allocate 1 GB and
// keep most of it.
using System;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;

static class Load
{
    // Depth of the call chains: with the frames of Main and of the runtime about 40 in all.
    const int Depth = 32;
    // One counter per cache line.
    const int Stride = 16;

    static readonly long[] Operations = new long[64 * Stride];
    static byte[] kept = new byte[0];
    static byte[][] all;
    static int rounds = 8000;
    static int size = 1000;
    static int streamed;
    [ThreadStatic] static byte[] stream;
    [ThreadStatic] static int streamAt;

    static void Main(string[] args)
    {
        string what = args.Length > 0 ? args[0] : "";
        if (what == "allocate") (rounds, size) = (2000, 10_000);
        if (what == "stream") streamed = int.Parse(args[1]) << 20;
        if (what == "switch") Switch(int.Parse(args[1]));
        else if (what == "micro")
        {
            int threads = args.Length > 1 ? int.Parse(args[1]) : Environment.ProcessorCount;
            for (int i = 0; i < threads; i++)
            {
                int slot = (i + 1) * Stride;
                new Thread(() => Make(slot)) { IsBackground = true, Name = "maker" }.Start();
            }
        }
        else if (what != "idle")
        {
            for (int i = 0; i < Environment.ProcessorCount; i++)
            {
                int slot = (i + 1) * Stride;
                new Thread(() => Work(slot)) { IsBackground = true, Name = "worker" }.Start();
            }
            if (what != "work" && what != "stream")
            {
                var ping = new SemaphoreSlim(0);
                var pong = new SemaphoreSlim(0);
                new Thread(() => Hand(ping, pong, 0)) { IsBackground = true, Name = "ping" }.Start();
                new Thread(() => Hand(pong, ping, 1)) { IsBackground = true, Name = "pong" }.Start();
                ping.Release();
            }
        }

        Console.WriteLine("ready");
        for (string line = Console.ReadLine(); line != null && line != "exit"; line = Console.ReadLine())
        {
            if (line == "fill") Fill();
            long sum = 0;
            for (int slot = 0; slot < Operations.Length; slot += Stride) sum += Volatile.Read(ref Operations[slot]);
            Console.WriteLine(sum + " " + (long)(Stopwatch.GetTimestamp() * (1e9 / Stopwatch.Frequency)));
        }
    }

    // 7,000 objects that stay, each larger than what one sample stands for (100 KiB) and written to nowhere but at its start, and garbage among them. Not
    // so fast that nobody could read of them meanwhile.
    static void Fill()
    {
        all = new byte[7000][];
        for (int i = 0; i < all.Length; i++)
        {
            all[i] = GC.AllocateUninitializedArray<byte>(130_000);
            for (int small = 0; small < 16; small++) kept = new byte[size];
            if (i % 50 == 0) Thread.Sleep(10);
        }
        GC.Collect();
    }

    static void Work(int slot)
    {
        ulong seed = (ulong)slot;
        while (true)
        {
            seed = Down<byte>(seed, Depth);
            Volatile.Write(ref Operations[slot], Operations[slot] + 1);
        }
    }

    sealed class Small { public long One, Two; }

    // A micro-benchmark of allocation: objects of 32 bytes as fast as they can be had, of which the last 64 live.
    static void Make(int slot)
    {
        var last = new Small[64];
        for (long made = 0; ; made++)
        {
            last[made & 63] = new Small { One = made, Two = made };
            if ((made & 1023) == 0) Volatile.Write(ref Operations[slot], made);
        }
    }

    struct Below<T> { }

    // Not inlined and not a tail call: each level is a frame. And each is a method of its own, as in programs that do not call themselves.
    [MethodImpl(MethodImplOptions.NoInlining)]
    static ulong Down<T>(ulong seed, int depth)
    {
        ulong below = depth == 0 ? Leaf(seed) : Down<Below<T>>(seed + 1, depth - 1);
        return below ^ (ulong)depth;
    }

    // About 10 µs of work and 1 KB allocated, or 3 µs and 10 KB.
    [MethodImpl(MethodImplOptions.NoInlining)]
    static ulong Leaf(ulong seed)
    {
        if (streamed != 0) return seed + Stream();
        var buffer = new byte[size];
        for (int i = 0; i < rounds; i++)
        {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            buffer[seed % 1000] = (byte)seed;
        }
        kept = buffer;
        return seed;
    }

    // Writes a byte of each of the next cache lines.
    static byte Stream()
    {
        byte[] all = stream ??= new byte[streamed];
        int at = streamAt;
        for (int i = 0; i < rounds; i++)
        {
            all[at]++;
            at = at + 64 < all.Length ? at + 64 : 0;
        }
        streamAt = at;
        return all[at];
    }

    // Two of these make about 2,000 switches a second: a pause keeps them from taking the CPUs for themselves.
    static void Hand(SemaphoreSlim mine, SemaphoreSlim other, int pause)
    {
        while (true)
        {
            mine.Wait();
            if (pause != 0) Thread.Sleep(pause);
            other.Release();
        }
    }
    [DllImport("libc", SetLastError = true)]
    static extern int pipe(int[] ends);
    [DllImport("libc", SetLastError = true)]
    static extern nint read(int file, byte[] into, nint bytes);
    [DllImport("libc", SetLastError = true)]
    static extern nint write(int file, byte[] from, nint bytes);
    [DllImport("libc", SetLastError = true)]
    static extern int sched_setaffinity(int thread, nint bytes, ulong[] cpus);

    // On each CPU two threads that hand a byte to and fro through pipes: each hand-over is one switch from the one to the other.
    static void Switch(int perSecond)
    {
        int cpus = Math.Min(Environment.ProcessorCount, 64);
        for (int cpu = 0; cpu < cpus; cpu++)
        {
            int[] there = new int[2], back = new int[2];
            if (pipe(there) != 0 || pipe(back) != 0) throw new InvalidOperationException("pipe");
            int slot = (cpu % 32 + 1) * Stride;
            ulong only = 1UL << cpu;
            double roundsPerTick = (double)perSecond / 2 / cpus / Stopwatch.Frequency;
            new Thread(() => { Pin(only); Echo(there[0], back[1]); }) { IsBackground = true, Name = "echo" }.Start();
            new Thread(() => { Pin(only); Call(there[1], back[0], slot, roundsPerTick); }) { IsBackground = true, Name = "call" }.Start();
        }
    }

    static void Pin(ulong cpus)
    {
        if (sched_setaffinity(0, sizeof(ulong), new[] { cpus }) != 0) throw new InvalidOperationException("sched_setaffinity");
    }

    static void Echo(int from, int to)
    {
        var token = new byte[1];
        while (read(from, token, 1) == 1 && write(to, token, 1) == 1) { }
    }

    // Rounds as many as the clock says; between two bursts it sleeps.
    static void Call(int to, int from, int slot, double roundsPerTick)
    {
        var token = new byte[1];
        long began = Stopwatch.GetTimestamp(), rounds = 0;
        while (true)
        {
            long due = (long)((Stopwatch.GetTimestamp() - began) * roundsPerTick);
            for (; rounds < due; rounds++)
                if (write(to, token, 1) != 1 || read(from, token, 1) != 1) return;
            Volatile.Write(ref Operations[slot], rounds);
            Thread.Sleep(1);
        }
    }
}
