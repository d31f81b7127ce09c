// Threads of the program's that bear names of the runtime's own, by Thread.Name or, without the runtime's knowledge, by prctl. On the line `work` each
// computes for half a second and sleeps for as long. Truth: `cpu_NAME`, nanoseconds by the thread's own clock. A worker of the pool takes another
// name meanwhile: `pool_thread` is its OS id.
using System;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Text;
using System.Threading;

namespace Impostors
{
    static class Program
    {
        static readonly string[] names =
            { ".NET BGC", ".NET Server GC", ".NET Finalizer", ".NET TP Worker", ".NET Timer", ".NET Tiered JIT", ".NET Tiered Com", ".NET EventPipe", "plain" };
        static readonly SemaphoreSlim go = new SemaphoreSlim(0);
        static readonly CountdownEvent done = new CountdownEvent(2 * names.Length + 1);
        static int sink;

        static int Main()
        {
            foreach (string name in names)
            {
                Workload.Start("managed " + name, () => { Thread.CurrentThread.Name = name; Work("managed " + name); });
                Workload.Start("native " + name, () => { Rename(name); Work("native " + name); });
            }
            Workload.On("work", () =>
            {
                go.Release(2 * names.Length);
                ThreadPool.UnsafeQueueUserWorkItem(_ => InPool(), null);
                done.Wait();
            });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("sink", sink);
            Workload.PrintTruth();
            return 0;
        }

        static void Work(string name)
        {
            go.Wait();
            Burn(name);
            Sleep();
            done.Signal();
            Thread.Sleep(Timeout.Infinite);
        }

        static void InPool()
        {
            Thread.CurrentThread.Name = "my own job";
            Workload.Truth("pool_thread", Workload.CurrentThreadId());
            Burn("pool");
            done.Signal();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Burn(string name)
        {
            long from = Cpu(), now;
            do
            {
                for (int i = 0; i < 3000; i++)
                    sink += i;
                now = Cpu();
            } while (now - from < 500_000_000);
            Workload.Truth("cpu_" + name, now - from);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Sleep() { Thread.Sleep(500); }

        static long Cpu()
        {
            clock_gettime(3, out Timespec time);
            return time.Seconds * 1_000_000_000 + time.Nanoseconds;
        }

        static void Rename(string name) { prctl(15, Encoding.UTF8.GetBytes(name + "\0"), 0, 0, 0); }

        struct Timespec { public long Seconds; public long Nanoseconds; }

        [DllImport("libc")]
        static extern int clock_gettime(int clock, out Timespec time);

        [DllImport("libc")]
        static extern int prctl(int option, byte[] name, ulong a, ulong b, ulong c);
    }
}
