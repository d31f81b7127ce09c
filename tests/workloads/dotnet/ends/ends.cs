// Allocates small objects for some milliseconds and ends as told: `end`, or `throw` with an exception that nobody catches. `lock` locks all its
// memory of now and later first. `fork` has a child that is a copy of it, runs no managed code and ends. The line `up` is its first
// managed code, and `resident` says how many KiB of it are in memory at the end.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Runtime.InteropServices;
using System.Threading;

namespace Ends
{
    static class Program
    {
        const int Everything = 3; // MCL_CURRENT | MCL_FUTURE

        [DllImport("libc", SetLastError = true)]
        static extern int mlockall(int flags);
        [DllImport("libc")]
        static extern int fork();
        [DllImport("libc")]
        static extern int waitpid(int pid, out int status, int options);
        [DllImport("libc")]
        static extern void _exit(int code);

        static object last;

        static int Main(string[] arguments)
        {
            Console.WriteLine("up");
            var (end, milliseconds) = (arguments[0], int.Parse(arguments[1]));
            if (end == "lock" && mlockall(Everything) != 0)
            {
                Console.WriteLine("not locked: errno " + Marshal.GetLastWin32Error());
                return 3;
            }
            if (end == "fork")
            {
                // Resolved before, for the child may run nothing that takes a lock.
                waitpid(-1, out _, 1);
                Marshal.PrelinkAll(typeof(Program));
                var child = fork();
                if (child == 0) _exit(7);
                waitpid(child, out var status, 0);
                Console.WriteLine("child " + (status >> 8) + " " + (status & 0x7f));
            }
            var kept = new List<string>();
            for (var n = 0; n < 100000; n++) kept.Add("s" + n);
            for (var clock = Stopwatch.StartNew(); clock.ElapsedMilliseconds < milliseconds;)
            {
                for (var n = 0; n < 1000; n++) last = new byte[200];
                Thread.Sleep(2);
            }
            if (end == "throw") throw new InvalidOperationException("as told");
            GC.KeepAlive(kept);
            foreach (var line in File.ReadLines("/proc/self/status"))
                if (line.StartsWith("VmRSS:")) Console.WriteLine("resident " + line.Split((char[])null, StringSplitOptions.RemoveEmptyEntries)[1]);
            Console.WriteLine("done");
            return 0;
        }
    }
}
