// Four threads that allocate all the time and check what they allocated: the app that must not notice a profiler's death.
// Usage: allocator.dll [flat-out]: with it no thread ever pauses (some 4 GB/s), more than anyone can record completely.
// Truth: rounds done, mistakes found (must be 0), the longest pause between two rounds of a thread, all bytes allocated.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Allocator
{
    static class Program
    {
        static long rounds, mistakes, longestPauseTicks;
        static bool flatOut;

        static int Main(string[] args)
        {
            flatOut = args.Length > 0 && args[0] == "flat-out";
            var threads = new List<Thread>();
            for (int i = 0; i < 4; i++)
            {
                int seed = i;
                threads.Add(Workload.Start("alloc-" + i, () => Run(seed)));
            }
            Workload.Ready();
            Workload.WaitForStop();
            foreach (var thread in threads)
                thread.Join();
            Workload.Truth("rounds", rounds);
            Workload.Truth("mistakes", mistakes);
            Workload.Truth("longest_pause_ms", longestPauseTicks * 1000.0 / Stopwatch.Frequency);
            Workload.Truth("allocated_bytes", GC.GetTotalAllocatedBytes(true));
            Workload.PrintTruth();
            return mistakes == 0 ? 0 : 9;
        }

        static void Run(int seed)
        {
            long last = Stopwatch.GetTimestamp();
            for (int round = seed; !Workload.Stopping; round++)
            {
                if (Sum(Make(round)) != Expected(round))
                    Interlocked.Increment(ref mistakes);
                Interlocked.Increment(ref rounds);
                // About 200 MB/s in all: a busy service, and 2000 allocation samples a second, which nothing needs to drop.
                if (round % 4 == 0 && !flatOut)
                    Thread.Sleep(1);
                long now = Stopwatch.GetTimestamp();
                long pause = now - last;
                last = now;
                long longest = Volatile.Read(ref longestPauseTicks);
                while (pause > longest)
                    longest = Interlocked.CompareExchange(ref longestPauseTicks, pause, longest) == longest
                        ? pause : Volatile.Read(ref longestPauseTicks);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static List<int[]> Make(int round)
        {
            var list = new List<int[]>();
            for (int i = 0; i < 64; i++)
            {
                var array = new int[16 + i];
                Array.Fill(array, round + i);
                list.Add(array);
            }
            return list;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Sum(List<int[]> list)
        {
            long sum = 0;
            foreach (var array in list)
                foreach (int value in array)
                    sum += value;
            return sum;
        }

        static long Expected(int round)
        {
            long sum = 0;
            for (int i = 0; i < 64; i++)
                sum += (16L + i) * (round + i);
            return sum;
        }
    }
}
