// Threads with names that are longer than the kernel keeps, in several alphabets, and with control characters. Those of `old` live before the line
// `later` and those of `new` begin with it; all compute a little, allocate and wait. The OS ids are in the ready line by number, and those of the
// new ones in the truth line.
using System;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Titles
{
    static class Program
    {
        public static readonly string[] Names =
        {
            "Обработчик-заказов", "日本語スレッド名前", "line\nbreak\ttab\u001b[31mred", "key=value=x", "plain-ascii-name-longer-than-15", "😀😀😀😀😀",
        };
        static object kept;
        static int sink;

        static int Main()
        {
            for (int n = 0; n < Names.Length; n++)
            {
                int number = n;
                Workload.Start("old" + n, () => { Thread.CurrentThread.Name = Names[number]; Loop(); });
            }
            Workload.On("later", () =>
            {
                using var started = new CountdownEvent(Names.Length);
                for (int n = 0; n < Names.Length; n++)
                {
                    int number = n;
                    new Thread(() =>
                    {
                        Workload.Truth("new" + number, Workload.CurrentThreadId());
                        started.Signal();
                        Loop();
                    })
                    { Name = Names[n], IsBackground = true }.Start();
                }
                started.Wait();
                Thread.Sleep(1000);
            });
            Workload.Ready();
            Workload.WaitForStop();
            Workload.Truth("sink", sink);
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Loop()
        {
            while (!Workload.Stopping)
            {
                for (int i = 0; i < 2_000_000; i++)
                    sink += i;
                kept = new byte[200_000];
                Thread.Sleep(5);
            }
        }
    }
}
