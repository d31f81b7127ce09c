// A family of processes that know what they have made. `CHILDREN OBJECTS THREADS`: makes so many objects of each of its types on so many threads, one after
// another, then starts so many children of its own program one after another, each of which makes twice, three times, … as many and has no children. Each
// prints its truth: pid, and of each type the objects and bytes. With `wait` as a fourth argument it waits for a line on stdin before it starts children; with
// `become` it has none, and becomes what its child would be, by exec.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Text;
using System.Threading;

namespace Family
{
    sealed class Small { public long A; }
    struct Cell { public byte A; }
    static class Outer<T>
    {
        public sealed class Inner<U> { public T A; public U B; }
    }

    static class Program
    {
        static volatile object sink;

        static int Main(string[] args)
        {
            int children = int.Parse(args[0], CultureInfo.InvariantCulture), objects = int.Parse(args[1], CultureInfo.InvariantCulture);
            int threads = int.Parse(args[2], CultureInfo.InvariantCulture);
            for (var n = 0; n < threads; n++)
            {
                var thread = new Thread(() => Make(objects));
                thread.Start();
                thread.Join();
            }
            long all = (long)objects * threads;
            var text = new StringBuilder("truth {\"pid\":" + Environment.ProcessId + ",\"types\":{");
            text.Append("\"Family.Small\":[" + all + "," + all * 24 + "],");
            text.Append("\"Family.Cell[]\":[" + all + "," + all * 32 + "],");
            text.Append("\"Family.Outer<int>.Inner<string[]>\":[" + all + "," + all * 32 + "],");
            text.Append("\"Family.Cell[,]\":[" + threads + "," + threads * 40040L + "]}}");
            Console.WriteLine(text);
            if (args.Length > 3 && args[3] == "become")
            {
                var again = new[] { Environment.ProcessPath, typeof(Program).Assembly.Location, "0", (2 * objects).ToString(CultureInfo.InvariantCulture), args[2], null };
                execv(again[0], again);
                return 1;
            }
            if (args.Length > 3)
            {
                Console.WriteLine("waits");
                Console.ReadLine();
            }
            for (var n = 0; n < children; n++)
            {
                var start = new ProcessStartInfo(Environment.ProcessPath) { UseShellExecute = false };
                start.ArgumentList.Add(typeof(Program).Assembly.Location);
                foreach (var arg in new[] { 0, objects * (n + 2), threads })
                    start.ArgumentList.Add(arg.ToString(CultureInfo.InvariantCulture));
                using (var child = Process.Start(start))
                    child.WaitForExit();
            }
            return 0;
        }

        [DllImport("libc")]
        static extern int execv(string path, string[] arguments);

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Make(int objects)
        {
            for (var n = 0; n < objects; n++)
            {
                sink = new Small();
                sink = new Cell[3];
                sink = new Outer<int>.Inner<string[]>();
            }
            // Two dimensions: 16 bytes for their lengths and lower bounds more.
            sink = new Cell[200, 200];
        }
    }
}
