// One of very many processes of a host: ten times a second it allocates a little, 2 MB a second in all.
using System;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Trickle
{
    static class Program
    {
        static object last;

        static int Main()
        {
            Workload.Start("trickle", Run);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        static void Run()
        {
            while (!Workload.Stopping)
            {
                for (int i = 0; i < 100; i++)
                    last = Make(2000);
                Thread.Sleep(100);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static object Make(int bytes)
        {
            return new byte[bytes];
        }
    }
}
