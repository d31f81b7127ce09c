// Allocations in places that a profiler may miss, each of a type of its own and of a known number of bytes: in a static constructor, in methods made at
// run time, in a finalizer, on threads on which nothing of the program's runs, by the runtime's own native code, and while a method is compiled.
// Each place is a command. Truth: the bytes of each.
using System;
using System.Collections.Generic;
using System.Linq.Expressions;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

namespace Attribution
{
    struct ByStatic { public byte A; }
    struct ByDynamic { public byte A; }
    struct ByExpression { public byte A; }
    struct ByFinalizer { public byte A; }
    struct ByFramework { public byte A; }
    struct ByRuntime { public byte A; }

    static class InStatic
    {
        public static readonly object Last;

        static InStatic()
        {
            for (int i = 0; i < Program.Objects; i++)
                Last = new ByStatic[Program.Size];
        }
    }

    sealed class Buried
    {
        static volatile object last;

        ~Buried()
        {
            last = new ByFinalizer[Program.Size];
        }
    }

    static class Program
    {
        public const int Objects = 100;
        // With the array's own 24 bytes; below the 85,000 from which on objects are large.
        public const int Size = 60_000;
        // A character has two bytes.
        const int Characters = 30_000;
        static volatile object sink;
        // Kept: a method that is collected may be asked about too late.
        static readonly Func<int, object> made = Made(), compiled = Compiled();
        // Its own room is taken before anybody listens.
        static readonly List<ByFramework> list = new List<ByFramework>(new ByFramework[Size]);

        static int Main()
        {
            // Their static constructor runs now.
            sink = list;
            foreach (var type in new[] { "ByStatic", "ByDynamic", "ByExpression", "ByFinalizer", "ByFramework", "ByRuntime" })
                Workload.Truth("Attribution." + type + "[]", Objects * (24.0 + Size));
            Workload.Truth("string", Objects * (24.0 + 2 * Characters));
            Workload.On("static", () => sink = InStatic.Last);
            Workload.On("dynamic", () => InDynamic(made));
            Workload.On("expression", () => InExpression(compiled));
            Workload.On("finalizer", () =>
            {
                Bury();
                GC.Collect();
                GC.WaitForPendingFinalizers();
            });
            Workload.On("framework", OnThreads);
            Workload.On("runtime", InRuntime);
            Workload.On("compile", WhileCompiling);
            Workload.Ready();
            Workload.WaitForStop();
            Workload.PrintTruth();
            return 0;
        }

        static Func<int, object> Made()
        {
            var method = new DynamicMethod("MadeAtRunTime", typeof(object), new[] { typeof(int) }, typeof(Program).Module, true);
            var il = method.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Newarr, typeof(ByDynamic));
            il.Emit(OpCodes.Ret);
            return (Func<int, object>)method.CreateDelegate(typeof(Func<int, object>));
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void InDynamic(Func<int, object> make)
        {
            for (int i = 0; i < Objects; i++)
                sink = make(Size);
        }

        static Func<int, object> Compiled()
        {
            var size = Expression.Parameter(typeof(int));
            return Expression.Lambda<Func<int, object>>(Expression.NewArrayBounds(typeof(ByExpression), size), size).Compile();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void InExpression(Func<int, object> make)
        {
            for (int i = 0; i < Objects; i++)
                sink = make(Size);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Bury()
        {
            for (int i = 0; i < Objects; i++)
                new Buried();
        }

        // The thread pool calls the list itself. (A wait for the task could do that, too.)
        static void OnThreads()
        {
            for (int i = 0; i < Objects; i++)
            {
                var task = Task.Run(new Func<ByFramework[]>(list.ToArray));
                ((IAsyncResult)task).AsyncWaitHandle.WaitOne();
                sink = task;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void InRuntime()
        {
            for (int i = 0; i < Objects; i++)
                sink = Array.CreateInstance(typeof(ByRuntime), Size);
        }

        // What a literal is of in code that can be unloaded is made when the code is compiled, on the ordinary heap.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void WhileCompiling()
        {
            var assembly = AssemblyBuilder.DefineDynamicAssembly(new AssemblyName("literals"), AssemblyBuilderAccess.RunAndCollect);
            var type = assembly.DefineDynamicModule("literals").DefineType("Literals", TypeAttributes.Public);
            for (int i = 0; i < Objects; i++)
            {
                var method = type.DefineMethod("Get" + i, MethodAttributes.Public | MethodAttributes.Static, typeof(string), Type.EmptyTypes);
                var il = method.GetILGenerator();
                il.Emit(OpCodes.Ldstr, new string((char)('a' + i % 26), Characters - 3) + i.ToString("D3"));
                il.Emit(OpCodes.Ret);
            }
            foreach (var method in type.CreateType().GetMethods(BindingFlags.Public | BindingFlags.Static))
                RuntimeHelpers.PrepareMethod(method.MethodHandle);
        }
    }
}
