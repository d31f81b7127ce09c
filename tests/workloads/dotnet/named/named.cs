// A program that hides what it is called: `argv` overwrites its arguments, `rename` its first thread's name.
using System;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Runtime.InteropServices;
using System.Threading;

namespace Named
{
    static class Program
    {
        const int PR_SET_NAME = 15;
        static volatile int sink;

        [DllImport("libc")]
        static extern int prctl(int option, byte[] name, UIntPtr a, UIntPtr b, UIntPtr c);

        static int Main(string[] arguments)
        {
            if (arguments.Contains("argv"))
                OverwriteArguments("shop: serving 12 requests");
            if (arguments.Contains("rename"))
                prctl(PR_SET_NAME, new byte[] { (byte)'w', (byte)'o', (byte)'r', (byte)'k', (byte)'e', (byte)'r', 0 }, default, default, default);
            Workload.Start("busy", Busy);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        static void Busy()
        {
            while (!Workload.Stopping)
            {
                for (int i = 0; i < 2_000_000; i++)
                    sink += i;
                Thread.Sleep(2);
            }
        }

        // Fields 48 and 49 of stat are where the arguments lie (proc_pid_stat(5)).
        static void OverwriteArguments(string title)
        {
            string stat = File.ReadAllText("/proc/self/stat");
            string[] fields = stat.Substring(stat.LastIndexOf(')') + 2).Split(' ');
            long start = long.Parse(fields[48 - 3], CultureInfo.InvariantCulture), end = long.Parse(fields[49 - 3], CultureInfo.InvariantCulture);
            for (long at = start; at < end; at++)
                Marshal.WriteByte((IntPtr)at, at - start < title.Length ? (byte)title[(int)(at - start)] : (byte)0);
        }
    }
}
