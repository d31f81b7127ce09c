// Generic methods of generic types, over value types (code of their own) and over reference types (code shared by all, the type arguments
// found through a hidden parameter).
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;

namespace GenericChain
{
    static class Step<T>
    {
        [MethodImpl(MethodImplOptions.NoInlining)]
        public static int First<U>(T t, U u, int x) { return Second<T>(t, x) + (u == null ? 1 : 2); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static int Second<V>(V v, int x) { return Program.Work(v, x) + typeof(V).Name.Length; }
    }

    static class Program
    {
        static int sink;

        static int Main()
        {
            Workload.Chain("values", "GenericChain.Program.Values", "GenericChain.Step<int>.First<double>", "GenericChain.Step<int>.Second<int>",
                "GenericChain.Program.Work<int>");
            Workload.Chain("references", "GenericChain.Program.References", "GenericChain.Step<__Canon>.First<__Canon>",
                "GenericChain.Step<__Canon>.Second<__Canon>", "GenericChain.Program.Work<__Canon>");
            Workload.Start("values", Values);
            Workload.Start("references", References);
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void Values() { while (!Workload.Stopping) sink += Step<int>.First(1, 2.5, sink); }

        static void References()
        {
            var list = new List<string>();
            while (!Workload.Stopping)
                sink += Step<string>.First("a", list, sink);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static int Work<W>(W w, int x)
        {
            for (int i = 0; i < 2000; i++)
                x = x * 31 + i;
            return x;
        }
    }
}
