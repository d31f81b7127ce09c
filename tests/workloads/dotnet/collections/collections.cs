// Collections of every kind on command, and what the runtime and the program itself know of them. `collect` runs them, all on the thread
// that reads commands, while another thread computes and one sleeps again and again; the truth is the difference between its beginning and its end.
// `collect-once` runs one, of each generation in turn, and `say-pause` answers how long the runtime says that was.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Collections
{
    sealed class Node { public Node Next; public long Value; }

    static class Program
    {
        static readonly List<Node> kept = new List<Node>();
        static readonly int main = Workload.CurrentThreadId();
        static long sink;

        static int Main(string[] arguments)
        {
            int rounds = int.Parse(arguments[0]);
            // Some 30 MB to mark.
            for (int i = 0; i < 1_000_000; i++)
                kept.Add(new Node { Next = i > 0 ? kept[i / 2] : null, Value = i });
            Workload.Truth("main", main);
            Workload.On("collect", () => Collect(rounds));
            int asked = 0;
            Workload.On("warm", Litter);
            Workload.On("collect-once", () => CollectOnce(asked++ % 3));
            Workload.On("say-pause", () => Console.Out.WriteLine("pause [" + string.Join(",", lastPause) + "]"));
            Workload.Start("worker", () => { while (!Workload.Stopping) Compute(1 << 20); });
            Workload.Start("sleeper", () => { while (!Workload.Stopping) Thread.Sleep(1); });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Compute(int times)
        {
            long sum = sink;
            for (int i = 0; i < times; i++)
                sum = sum * 6364136223846793005 + 1442695040888963407;
            sink = sum;
        }

        // Some garbage: 10 MB.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Litter()
        {
            for (int i = 0; i < 10_000; i++)
                garbage = new byte[1000];
        }

        static volatile object garbage;
        static long[] lastPause = new long[3];

        // What the runtime says it stood still for this one collection, how long all threads wanted a CPU meanwhile (one that computes has to have one to be
        // stopped), and how many collections there were.
        static void CollectOnce(int generation)
        {
            Compute(1 << 21);
            long queued = Queued(true), count = GC.CollectionCount(0), pause = GC.GetTotalPauseDuration().Ticks * 100;
            GC.Collect(generation, GCCollectionMode.Forced, blocking: true);
            pause = GC.GetTotalPauseDuration().Ticks * 100 - pause;
            lastPause = new[] { pause, Queued(true) - queued, GC.CollectionCount(0) - count };
        }

        static void Collect(int rounds)
        {
            var counts = Counts();
            long pause = GC.GetTotalPauseDuration().Ticks * 100, queued = Queued(), cpu = 0, longest = 0, promoted = 0, bracket = 0;
            for (int round = 0; round < rounds; round++)
            {
                for (int generation = 0; generation <= 2; generation++)
                {
                    Compute(1 << 21);
                    long before = Workload.ThreadCpuNanoseconds(), paused = GC.GetTotalPauseDuration().Ticks * 100;
                    long began = Stopwatch.GetTimestamp();
                    GC.Collect(generation, GCCollectionMode.Forced, blocking: true, compacting: generation == 2 && round % 2 == 0);
                    bracket += Stopwatch.GetTimestamp() - began;
                    cpu += Workload.ThreadCpuNanoseconds() - before;
                    longest = Math.Max(longest, GC.GetTotalPauseDuration().Ticks * 100 - paused);
                    if (generation == 2)
                        promoted += GC.GetGCMemoryInfo(GCKind.Any).PromotedBytes;
                }
            }
            // One in the background, and the end of it.
            long index = GC.GetGCMemoryInfo(GCKind.Background).Index;
            GC.Collect(2, GCCollectionMode.Forced, blocking: false);
            while (GC.GetGCMemoryInfo(GCKind.Background).Index == index)
                Thread.Sleep(1);
            pause = GC.GetTotalPauseDuration().Ticks * 100 - pause;
            queued = Queued() - queued;
            var all = Counts();
            for (int generation = 0; generation <= 2; generation++)
                Workload.Truth("count_" + generation, all[generation] - counts[generation]);
            Workload.Truth("pause_ns", pause);
            Workload.Truth("longest_ns", longest);
            Workload.Truth("bracket_ns", bracket * (1e9 / Stopwatch.Frequency));
            Workload.Truth("promoted", promoted);
            Workload.Truth("collecting_cpu_ns", cpu);
            Workload.Truth("queued_ns", queued);
        }

        static long[] Counts()
        {
            return new long[] { GC.CollectionCount(0) - GC.CollectionCount(1), GC.CollectionCount(1) - GC.CollectionCount(2), GC.CollectionCount(2) };
        }

        // How long the threads that collect, or all, have waited for a CPU: by so much the runtime's times and those of its events may differ.
        static long Queued(bool all = false)
        {
            long sum = 0;
            foreach (string task in Directory.GetDirectories("/proc/self/task"))
            {
                try
                {
                    string name = File.ReadAllText(task + "/comm");
                    if (all || task.EndsWith("/" + main) || name.StartsWith(".NET Server GC") || name.StartsWith(".NET BGC"))
                        sum += long.Parse(File.ReadAllText(task + "/schedstat").Split(' ')[1]);
                }
                catch (IOException)
                {
                    // It has ended.
                }
            }
            return sum;
        }
    }
}
