// New code all the time: every round makes an assembly with a chain of new methods and runs it a few times, never often enough to leave
// tier 0.
using System;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;

namespace Churn
{
    public static class Program
    {
        static int sink;
        static int rounds;

        static int Main()
        {
            Workload.Chain("churn", "Churn.Program.Loop", "Churn.Program.Round", "Made.Type.M1", "Made.Type.M2", "Made.Type.M3", "Churn.Program.Work");
            Workload.Chain("churn", "Churn.Program.Loop", "Churn.Program.Make");
            Workload.Start("churn", Loop);
            return Workload.Settle(1500, () => Workload.Truth("rounds", rounds));
        }

        static void Loop()
        {
            while (!Workload.Stopping)
            {
                sink += Round(Make());
                rounds++;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Round(Func<int, int> first)
        {
            int sum = 0;
            for (int i = 0; i < 10; i++)
                sum += first(i);
            return sum;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static Func<int, int> Make()
        {
            var type = AssemblyBuilder.DefineDynamicAssembly(new AssemblyName("Made"), AssemblyBuilderAccess.Run)
                .DefineDynamicModule("Made").DefineType("Made.Type", TypeAttributes.Public);
            var next = typeof(Program).GetMethod("Work");
            for (int i = 3; i >= 1; i--)
            {
                var method = type.DefineMethod("M" + i, MethodAttributes.Public | MethodAttributes.Static, typeof(int), new[] { typeof(int) });
                method.SetImplementationFlags(MethodImplAttributes.NoInlining);
                var il = method.GetILGenerator();
                il.Emit(OpCodes.Ldarg_0);
                il.Emit(OpCodes.Call, next);
                il.Emit(OpCodes.Ldc_I4_1);
                il.Emit(OpCodes.Add);
                il.Emit(OpCodes.Ret);
                next = method;
            }
            return (Func<int, int>)type.CreateType().GetMethod("M1").CreateDelegate(typeof(Func<int, int>));
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static int Work(int x)
        {
            for (int i = 0; i < 1000000; i++)
                x = x * 31 + i;
            return x;
        }
    }
}
