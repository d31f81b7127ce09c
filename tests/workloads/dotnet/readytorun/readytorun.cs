// Precompiled framework code between methods of the program: sorting with a comparison that sorts with a comparison, four deep. Run with
// tiered compilation off, so that the framework's ReadyToRun code is never compiled anew.
using System;
using System.Runtime.CompilerServices;

namespace ReadyToRun
{
    static class Program
    {
        static int sink;

        static int Main()
        {
            const string P = "ReadyToRun.Program.";
            Workload.Chain("sorter", P + "Loop", "...", P + "Compare1", "...", P + "Compare2", "...", P + "Compare3", "...", P + "Compare4", P + "Work");
            Workload.Start("sorter", Loop);
            return Workload.Settle(500, () => Workload.Truth("sum", sink));
        }

        static void Loop()
        {
            while (!Workload.Stopping)
                Array.Sort(new[] { "b", "a", "d", "c" }, Compare1);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Compare1(string a, string b) { Array.Sort(new[] { "b", "a" }, Compare2); return string.CompareOrdinal(a, b); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Compare2(string a, string b) { Array.Sort(new[] { "b", "a" }, Compare3); return string.CompareOrdinal(a, b); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Compare3(string a, string b) { Array.Sort(new[] { "b", "a" }, Compare4); return string.CompareOrdinal(a, b); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Compare4(string a, string b) { sink += Work(sink); return string.CompareOrdinal(a, b); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Work(int x)
        {
            for (int i = 0; i < 5000; i++)
                x = x * 31 + i;
            return x;
        }
    }
}
