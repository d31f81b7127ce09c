// Methods made at run time (DynamicMethod), three that call each other and then a method of the program; made anew every few rounds, so
// that the collector unloads the old ones while the recording goes on.
using System;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;

namespace DynamicMethods
{
    static class Program
    {
        static int sink;

        static int Main()
        {
            Workload.Chain("dynamic", "DynamicMethods.Program.Loop", "DynamicMethods.Program.Round",
                "D1", "D2", "D3", "DynamicMethods.Program.Work");
            Workload.Chain("dynamic", "DynamicMethods.Program.Loop", "DynamicMethods.Program.Make", "DynamicMethods.Program.Method");
            Workload.Start("dynamic", Loop);
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void Loop()
        {
            for (int round = 0; !Workload.Stopping; round++)
                sink += Round(Make());
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Round(Func<int, int> first)
        {
            int sum = 0;
            for (int i = 0; i < 50; i++)
                sum += first(i);
            return sum;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static Func<int, int> Make()
        {
            var work = typeof(Program).GetMethod("Work", System.Reflection.BindingFlags.NonPublic | System.Reflection.BindingFlags.Static);
            var d1 = Method("D1", Method("D2", Method("D3", work)));
            return (Func<int, int>)d1.CreateDelegate(typeof(Func<int, int>));
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static DynamicMethod Method(string name, System.Reflection.MethodInfo callee)
        {
            var method = new DynamicMethod(name, typeof(int), new[] { typeof(int) }, typeof(Program).Module, true);
            var il = method.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Call, callee);
            il.Emit(OpCodes.Ldc_I4_1);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Ret);
            return method;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Work(int x)
        {
            for (int i = 0; i < 1000000; i++)
                x = x * 31 + i;
            return x;
        }
    }
}
