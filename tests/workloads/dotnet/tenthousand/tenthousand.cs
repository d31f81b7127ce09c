// Ten thousand threads, or as many as its argument says, that wait for a pulse, each with a name of its own, and four that compute.
using System;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Threading;

namespace TenThousand
{
    static class Program
    {
        static readonly object gate = new object();
        static int waiting;
        static volatile int sink;

        static int Main(string[] arguments)
        {
            int waiters = arguments.Length > 0 ? int.Parse(arguments[0], CultureInfo.InvariantCulture) : 10_000;
            for (int i = 0; i < waiters; i++)
                new Thread(WaitForPulse, 64 * 1024) { Name = "waiter-" + i, IsBackground = true }.Start();
            for (int i = 0; i < 4; i++)
                new Thread(Compute) { Name = "busy-" + i, IsBackground = true }.Start();
            // Whoever holds the gate after all have counted sees all of them wait.
            for (bool all = false; !all; Thread.Sleep(10))
                lock (gate)
                    all = waiting == waiters;
            Workload.On("pulse", () => { lock (gate) Monitor.PulseAll(gate); });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WaitForPulse()
        {
            lock (gate)
            {
                waiting++;
                while (!Workload.Stopping)
                    Monitor.Wait(gate);
            }
        }

        static void Compute()
        {
            while (!Workload.Stopping)
                for (int i = 0; i < 200_000; i++)
                    sink ^= i * 31;
        }
    }
}
