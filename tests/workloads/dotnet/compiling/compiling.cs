// A program that has much compiled. `compile` has the thread `compiler` make large methods at run time, one after the other, until a second of its CPU time
// has gone into having them compiled; then it calls instantiations of a generic method so often that the runtime compiles them again, on a thread of its own.
// Truth: what the thread's own clock said around having the methods compiled.
using System;
using System.Collections.Generic;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Compiling
{
    struct A { } struct B { } struct C { } struct D { } struct E { } struct F { } struct G { } struct H { }
    struct Pair<TFirst, TSecond> { }

    static class Hot<T>
    {
        [MethodImpl(MethodImplOptions.NoInlining)]
        public static long Run(long x)
        {
            x = Eight(x); x = Eight(x); x = Eight(x); x = Eight(x);
            return typeof(T) == typeof(string) ? -x : x;
        }

        [MethodImpl(MethodImplOptions.AggressiveInlining)]
        static long Eight(long x) { return Mix(Mix(Mix(Mix(Mix(Mix(Mix(Mix(x)))))))); }

        [MethodImpl(MethodImplOptions.AggressiveInlining)]
        static long Mix(long x) { return (x ^ x >> 7) * 31 + (x % 13 > 5 ? x << 3 : x >> 2); }
    }

    static class Program
    {
        const int Operations = 4000;
        static readonly SemaphoreSlim asked = new SemaphoreSlim(0), answered = new SemaphoreSlim(0);
        static long compiling, sink;

        static int Main()
        {
            Workload.Start("compiler", () =>
            {
                while (true)
                {
                    asked.Wait();
                    if (Workload.Stopping)
                        return;
                    while (compiling < 1_000_000_000)
                        Make();
                    answered.Release();
                }
            });
            Workload.On("compile", () =>
            {
                asked.Release();
                answered.Wait();
                CallOften();
            });
            Workload.Ready();
            Workload.WaitForStop();
            asked.Release();
            Workload.Truth("compiling_cpu_ns", compiling);
            Workload.PrintTruth();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Make()
        {
            var method = new DynamicMethod("Made", typeof(long), new[] { typeof(long) }, typeof(Program).Module, true);
            var il = method.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            for (int n = 0; n < Operations; n++)
            {
                il.Emit(OpCodes.Ldarg_0);
                il.Emit(n % 3 == 0 ? OpCodes.Xor : n % 3 == 1 ? OpCodes.Add : OpCodes.Mul);
            }
            il.Emit(OpCodes.Ret);
            var made = (Func<long, long>)method.CreateDelegate(typeof(Func<long, long>));
            // The first call has it compiled; it runs for microseconds.
            long before = Workload.ThreadCpuNanoseconds();
            sink += made(before);
            compiling += Workload.ThreadCpuNanoseconds() - before;
        }

        // The runtime begins to count calls when nothing was called for the first time for 100 ms, and compiles in the background what was then called 30 times.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void CallOften()
        {
            var types = new[] { typeof(A), typeof(B), typeof(C), typeof(D), typeof(E), typeof(F), typeof(G), typeof(H) };
            var all = new List<Func<long, long>>();
            foreach (var first in types)
                foreach (var second in types)
                    foreach (var third in types)
                    {
                        var pair = typeof(Pair<,>).MakeGenericType(first, typeof(Pair<,>).MakeGenericType(second, third));
                        var run = typeof(Hot<>).MakeGenericType(pair).GetMethod("Run", BindingFlags.Public | BindingFlags.Static);
                        all.Add((Func<long, long>)run.CreateDelegate(typeof(Func<long, long>)));
                    }
            for (int round = 0; round < 80; round++)
            {
                foreach (var run in all)
                    sink += run(round);
                Thread.Sleep(20);
            }
        }
    }
}
