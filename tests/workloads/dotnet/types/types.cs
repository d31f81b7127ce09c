// Types whose names the compiler makes, or that the program has several times: closures, async state machines, tuples, nested generic ones; and the
// program's own assembly in two load contexts beside the first. `first`, `second` and `others` make known numbers of each and keep them; with an argument
// the program does all that at once, says what is true and ends.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Runtime.Loader;
using System.Threading.Tasks;

namespace Types
{
    [StructLayout(LayoutKind.Sequential, Size = 1000)]
    public struct Body { public long A; }

    public sealed class Ware { public Body Body; }
    public sealed class Ticket { }

    // Arrays of its kinds are told of as arrays of their numbers by a part of the profiling interface.
    public enum Shade : long { None }

    static class Outer<T>
    {
        public sealed class Inner { public Body Body; public T Of; }
        public sealed class Failure : Exception { }
    }

    // Called in the copies.
    public static class Plugin
    {
        public static void Make(int count, List<object> kept)
        {
            for (int i = 0; i < count; i++)
                kept.Add(new Ware());
            for (int i = 0; i < count / 4; i++)
                kept.Add(new KeyValuePair<Ware, int>[100]);
        }
    }

    static class Maker
    {
        static long sum;

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static Func<long> Capture(long number)
        {
            Body body = default;
            body.A = number;
            return () => body.A;
        }

        // What is used after it has waited is in the state machine.
        public static async Task Wait(Task gate, long number)
        {
            Body body = default;
            body.A = number;
            await gate;
            sum += body.A;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static void Fail()
        {
            try
            {
                throw new Outer<int>.Failure();
            }
            catch (Outer<int>.Failure)
            {
                sum++;
            }
        }
    }

    static class Program
    {
        static readonly List<object> kept = new List<object>();
        static readonly TaskCompletionSource<bool> gate = new TaskCompletionSource<bool>();
        static Action<int, List<object>> first, second;
        static int calls;

        static int Main(string[] arguments)
        {
            first = Load("first");
            second = Load("second");
            Workload.Truth("first", 5_000);
            Workload.Truth("second", 10_000);
            Workload.Truth("others", 2_500);
            if (arguments.Length > 0)
            {
                Allocate();
                Workload.PrintTruth();
                GC.KeepAlive(kept);
                return 0;
            }
            Workload.On("first", First);
            Workload.On("second", Second);
            Workload.On("others", Others);
            Workload.Ready();
            Workload.WaitForStop();
            GC.KeepAlive(kept);
            Workload.PrintTruth();
            return 0;
        }

        static Action<int, List<object>> Load(string name)
        {
            var assembly = new AssemblyLoadContext(name).LoadFromAssemblyPath(typeof(Program).Assembly.Location);
            var make = assembly.GetType("Types.Plugin").GetMethod("Make");
            return (Action<int, List<object>>)Delegate.CreateDelegate(typeof(Action<int, List<object>>), make);
        }

        static void Allocate()
        {
            First();
            Second();
            Others();
        }

        static void Others()
        {
            for (int i = 0; i < 2_500; i++)
            {
                kept.Add(Maker.Capture(i));
                kept.Add(Maker.Wait(gate.Task, i));
                kept.Add(new (Ticket, int)[50]);
                kept.Add(new Shade[100]);
                kept.Add(new Shade?[50]);
                kept.Add(new Ticket[10, 10][]);
                kept.Add(new Outer<int>.Inner());
                // A delegate of sixteen parameters and a result has the most type arguments of the framework's types.
                kept.Add(new Func<byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, Ticket>[50]);
            }
            Maker.Fail();
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void First()
        {
            first(5_000, kept);
            calls++;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Second()
        {
            second(10_000, kept);
            calls++;
        }
    }
}
