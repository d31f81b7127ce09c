// Three threads that are busy 20, 50 and 90 % of the time, in periods of 20 ms. "Busy" is measured by the thread's own CPU
// clock, so that a preempted thread still gets its share. Truth: each thread's CPU time and wall time since `ready`.
using System;
using System.Diagnostics;
using System.Runtime.CompilerServices;
using System.Threading;

namespace DutyCycle
{
    static class Program
    {
        const long PeriodNanoseconds = 20_000_000;
        static readonly ManualResetEventSlim go = new ManualResetEventSlim();

        static int Main()
        {
            var threads = new[] { Duty(20), Duty(50), Duty(90) };
            Workload.Ready();
            go.Set();
            Workload.WaitForStop();
            foreach (var thread in threads)
                thread.Join();
            Workload.PrintTruth();
            return 0;
        }

        static Thread Duty(int percent)
        {
            return Workload.Start("duty-" + percent, () => Run(percent));
        }

        static void Run(int percent)
        {
            go.Wait();
            var clock = Stopwatch.StartNew();
            long cpuAtStart = Workload.ThreadCpuNanoseconds();
            long next = 0;
            while (!Workload.Stopping)
            {
                // The spinning target is absolute, so that an overrun is taken from the next period.
                next += PeriodNanoseconds;
                Spin(cpuAtStart + next * percent / 100);
                long left = next - clock.ElapsedTicks * (1_000_000_000 / Stopwatch.Frequency);
                if (left > 0)
                    Thread.Sleep(TimeSpan.FromMilliseconds(left / 1_000_000 + 1));
            }
            Workload.Truth("cpu_ns_" + percent, Workload.ThreadCpuNanoseconds() - cpuAtStart);
            Workload.Truth("wall_ns_" + percent, clock.ElapsedTicks * (1_000_000_000 / Stopwatch.Frequency));
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Spin(long untilCpuNanoseconds)
        {
            while (Workload.ThreadCpuNanoseconds() < untilCpuNanoseconds)
                Thread.SpinWait(20);
        }
    }
}
