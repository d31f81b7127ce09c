// An ordinary loop (thread "work": Root > B > A > Burn) and a thread that allocates, beside assemblies that are made, run and unloaded all the time.
// Each of those runs code of its own that allocates, and is found dead by a collection that the program asks for.
//
// Usage: unloading.dll PAUSE_MS BATCH [COUNT]: BATCH assemblies at a time, PAUSE_MS between two batches; with COUNT it exits with code 7 by
// itself when so many are gone (9 when anything was computed wrongly), else on `stop`.
// `ready` comes when the loop has run for a second and something has been unloaded.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;
using System.Threading;

namespace Unloading
{
    static class Program
    {
        const int Rounds = 2000;
        static long unloaded, mistakes;
        static int sink;
        static readonly ManualResetEventSlim warm = new ManualResetEventSlim();

        static int Main(string[] args)
        {
            Workload.Chain("work", "Unloading.Program.Loop", "Unloading.Program.Root", "Unloading.Program.B", "Unloading.Program.A",
                "Unloading.Program.Burn");
            int pause = int.Parse(args[0], CultureInfo.InvariantCulture);
            int batch = int.Parse(args[1], CultureInfo.InvariantCulture);
            long count = args.Length > 2 ? long.Parse(args[2], CultureInfo.InvariantCulture) : long.MaxValue;
            var unloader = Workload.Start("unloader", () => Unload(pause, batch, count));
            Workload.Start("work", Loop);
            Workload.Start("alloc", Allocate);
            warm.Wait();
            Workload.Ready();
            if (args.Length > 2)
                unloader.Join();
            else
                Workload.WaitForStop();
            Workload.Truth("unloaded", Volatile.Read(ref unloaded));
            Workload.Truth("mistakes", Volatile.Read(ref mistakes));
            Workload.PrintTruth();
            return mistakes != 0 ? 9 : args.Length > 2 ? 7 : 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Loop()
        {
            var clock = Stopwatch.StartNew();
            while (!Workload.Stopping)
            {
                if (Root(3) != 3 * 31 + 7 + 3)
                    Interlocked.Increment(ref mistakes);
                // Past the timer of tiering, as far as one can wait for that where new code comes all the time.
                if (!warm.IsSet && clock.ElapsedMilliseconds > 1000 && Volatile.Read(ref unloaded) > 0)
                    warm.Set();
            }
        }

        // Each uses its callee's result after the call, so that none is a tail call.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Root(int x) { return B(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int B(int x) { return A(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int A(int x) { return Burn(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Burn(int x)
        {
            int y = x;
            for (int i = 0; i < 200000; i++)
                y = y * 31 + i;
            sink = y;
            return x * 31 + 7;
        }

        static void Allocate()
        {
            while (!Workload.Stopping)
            {
                var lists = new List<int[]>();
                for (int i = 0; i < 200; i++)
                    lists.Add(new int[100 + i]);
                long sum = 0;
                foreach (var list in lists)
                    sum += list.Length;
                if (sum != 200 * 100 + 199 * 200 / 2)
                    Interlocked.Increment(ref mistakes);
                Thread.Sleep(1);
            }
        }

        static void Unload(int pause, int batch, long count)
        {
            var made = new List<WeakReference>();
            while (!Workload.Stopping && Volatile.Read(ref unloaded) < count)
            {
                for (int i = 0; i < batch; i++)
                    made.Add(Run(i));
                GC.Collect();
                GC.WaitForPendingFinalizers();
                GC.Collect();
                Interlocked.Add(ref unloaded, made.RemoveAll(type => !type.IsAlive));
                Thread.Sleep(pause);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static WeakReference Run(int seed)
        {
            var type = Make();
            var run = (Func<int, int>)type.GetMethod("Sum").CreateDelegate(typeof(Func<int, int>));
            int expected = seed;
            for (int i = 0; i < Rounds; i++)
                expected = expected * 31 + 25;
            if (run(seed) != expected)
                Interlocked.Increment(ref mistakes);
            return new WeakReference(type);
        }

        // static int Sum(int x) { for (int i = 0; i < Rounds; i++) x = x * 31 + new byte[25].Length; return x; }
        static Type Make()
        {
            var assembly = AssemblyBuilder.DefineDynamicAssembly(new AssemblyName("Passing"), AssemblyBuilderAccess.RunAndCollect);
            var type = assembly.DefineDynamicModule("Passing").DefineType("Passing.Type", TypeAttributes.Public);
            var method = type.DefineMethod("Sum", MethodAttributes.Public | MethodAttributes.Static, typeof(int), new[] { typeof(int) });
            var il = method.GetILGenerator();
            var i = il.DeclareLocal(typeof(int));
            var again = il.DefineLabel();
            il.MarkLabel(again);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Ldc_I4, 31);
            il.Emit(OpCodes.Mul);
            il.Emit(OpCodes.Ldc_I4, 25);
            il.Emit(OpCodes.Newarr, typeof(byte));
            il.Emit(OpCodes.Ldlen);
            il.Emit(OpCodes.Conv_I4);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Starg_S, (byte)0);
            il.Emit(OpCodes.Ldloc, i);
            il.Emit(OpCodes.Ldc_I4_1);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Stloc, i);
            il.Emit(OpCodes.Ldloc, i);
            il.Emit(OpCodes.Ldc_I4, Rounds);
            il.Emit(OpCodes.Blt, again);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Ret);
            return type.CreateType();
        }
    }
}
