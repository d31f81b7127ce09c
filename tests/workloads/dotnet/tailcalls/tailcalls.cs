// Explicit tail calls (`tail.` of IL, which the C# compiler never writes), in methods of an assembly made at run time. A method that made one
// has no frame any more. Where the callee's arguments do not fit into the caller's own, the runtime goes by a dispatcher of its own
// (docs/design/features/tailcalls-with-helpers.md of dotnet/runtime): the first caller stays, and what it called and left by tail calls
// is called by the dispatcher.
using System;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime.CompilerServices;

namespace TailCalls
{
    public class Node
    {
        public virtual int Next(int x) { throw new NotSupportedException(); }
    }

    public sealed class Last : Node
    {
        [MethodImpl(MethodImplOptions.NoInlining)]
        public override int Next(int x) { return Program.Work(x) + 1; }
    }

    public static class Program
    {
        static int sink;
        static Func<Node, int, int> fast;
        static Func<int, int> slow;

        static int Main()
        {
            Make();
            foreach (string link in new[] { "Links.Even", "Links.Odd", "TailCalls.Last.Next" })
                Workload.Chain("tailcalls", "TailCalls.Program.Loop", "TailCalls.Program.Fast", link, "TailCalls.Program.Work");
            Workload.Chain("tailcalls", "TailCalls.Program.Loop", "TailCalls.Program.Slow", "Links.Few", "TailCalls.Program.Work");
            foreach (string link in new[] { "Links.Many", "Links.More" })
                Workload.Chain("tailcalls", "TailCalls.Program.Loop", "TailCalls.Program.Slow", "Links.Few", "...", link, "TailCalls.Program.Work");
            Workload.Start("tailcalls", Loop);
            return Workload.Settle(1500, () => Workload.Truth("sum", sink));
        }

        static void Loop()
        {
            var last = new Last();
            for (int round = 0; !Workload.Stopping; round++)
                sink += Fast(last, round) + Slow(round);
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Fast(Node last, int x) { return fast(last, x & 7) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Slow(int x) { return slow(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static int Work(int x)
        {
            for (int i = 0; i < 100000; i++)
                x = x * 31 + i;
            return x;
        }

        static void Make()
        {
            var assembly = AssemblyBuilder.DefineDynamicAssembly(new AssemblyName("links"), AssemblyBuilderAccess.Run);
            var links = assembly.DefineDynamicModule("links").DefineType("Links", TypeAttributes.Public | TypeAttributes.Abstract | TypeAttributes.Sealed);
            var even = Define(links, "Even", typeof(Node), typeof(int));
            var odd = Define(links, "Odd", typeof(Node), typeof(int));
            Bounce(even, odd);
            Bounce(odd, even);

            // Each has more arguments on the stack than the one before: 6 go in registers.
            var few = Define(links, "Few", typeof(int));
            var many = Define(links, "Many", Integers(12));
            var more = Define(links, "More", Integers(20));
            Widen(few, 1, many, 12);
            Widen(many, 12, more, 20);
            var il = more.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Call, typeof(Program).GetMethod("Work"));
            il.Emit(OpCodes.Ldarg_S, (byte)19);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Ret);

            var made = links.CreateType();
            fast = (Func<Node, int, int>)made.GetMethod("Even").CreateDelegate(typeof(Func<Node, int, int>));
            slow = (Func<int, int>)made.GetMethod("Few").CreateDelegate(typeof(Func<int, int>));
        }

        static Type[] Integers(int count)
        {
            var types = new Type[count];
            Array.Fill(types, typeof(int));
            return types;
        }

        static MethodBuilder Define(TypeBuilder type, string name, params Type[] arguments)
        {
            var method = type.DefineMethod(name, MethodAttributes.Public | MethodAttributes.Static, typeof(int), arguments);
            method.SetImplementationFlags(MethodImplAttributes.NoInlining);
            return method;
        }

        // static int Even(Node last, int n) { Work(n); return n == 0 ? tail. last.Next(n) : tail. Odd(last, n - 1); }
        static void Bounce(MethodBuilder method, MethodBuilder other)
        {
            var il = method.GetILGenerator();
            var end = il.DefineLabel();
            il.Emit(OpCodes.Ldarg_1);
            il.Emit(OpCodes.Call, typeof(Program).GetMethod("Work"));
            il.Emit(OpCodes.Pop);
            il.Emit(OpCodes.Ldarg_1);
            il.Emit(OpCodes.Brfalse, end);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Ldarg_1);
            il.Emit(OpCodes.Ldc_I4_1);
            il.Emit(OpCodes.Sub);
            il.Emit(OpCodes.Tailcall);
            il.Emit(OpCodes.Call, other);
            il.Emit(OpCodes.Ret);
            il.MarkLabel(end);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Ldarg_1);
            il.Emit(OpCodes.Tailcall);
            il.Emit(OpCodes.Callvirt, typeof(Node).GetMethod("Next"));
            il.Emit(OpCodes.Ret);
        }

        // static int Few(int a) { return tail. Many(Work(a), 1, 2, …); }
        static void Widen(MethodBuilder method, int own, MethodBuilder callee, int arguments)
        {
            var il = method.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Call, typeof(Program).GetMethod("Work"));
            for (int i = 1; i < arguments; i++)
            {
                if (i < own)
                    il.Emit(OpCodes.Ldarg_S, (byte)i);
                else
                    il.Emit(OpCodes.Ldc_I4, i);
            }
            il.Emit(OpCodes.Tailcall);
            il.Emit(OpCodes.Call, callee);
            il.Emit(OpCodes.Ret);
        }
    }
}
