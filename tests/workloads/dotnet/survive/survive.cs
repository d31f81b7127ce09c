// What is hard on a runtime and on whoever is in its process. `survive.dll MODE AMOUNT`: the line `go` has it do one round of the mode, which computes the same
// each time, whatever the order in which threads, collections and finalizers get their turns. Truth: the sum of a round, the rounds, the mistakes (rounds
// with another sum, objects that are not what they were), and how much of the mode's subject there was.
//
// collections   threads make objects of every kind and read them again, while others have collections of every kind
// threads       AMOUNT threads come, allocate and go
// exceptions    nested, filtered, thrown again, through async methods, static constructors and reflection, with collections in filters and finally blocks
// code          collectible load contexts and dynamic methods are made, run and found dead
// starts        AMOUNT children by Process.Start beside threads that allocate
// forks         AMOUNT children by fork beside threads that allocate, then some that go on as managed code beside threads that wait
// busy          threads allocate and throw until the process is told how to die: `abort` (FailFast), `overflow`, `overflow-allocating`
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Globalization;
using System.Reflection;
using System.Reflection.Emit;
using System.Runtime;
using System.Runtime.CompilerServices;
using System.Runtime.ExceptionServices;
using System.Runtime.InteropServices;
using System.Runtime.Loader;
using System.Threading;
using System.Threading.Tasks;

namespace Survive
{
    static class Program
    {
        public static long Mistakes, Subjects;
        static long rounds, sum;

        static int Main(string[] arguments)
        {
            int amount = int.Parse(arguments[1], CultureInfo.InvariantCulture);
            Func<int, long> round = null;
            switch (arguments[0])
            {
                case "collections": round = Collections.Round; break;
                case "threads": round = Threads.Round; break;
                case "exceptions": round = Exceptions.Round; break;
                case "code": round = Code.Round; break;
                case "starts": round = Starts.Round; break;
                case "forks": round = Forks.Round; break;
                case "busy": Deaths.Begin(); break;
                default: return 2;
            }
            if (round != null)
                Workload.On("go", () =>
                {
                    long found = round(amount);
                    if (rounds++ == 0)
                        sum = found;
                    else if (found != sum)
                        Mistake();
                });
            Workload.Ready();
            Workload.WaitForStop();
            // In the range where a double, as which it is told, has every whole number.
            Workload.Truth("sum", sum & ((1L << 52) - 1));
            Workload.Truth("rounds", rounds);
            Workload.Truth("subjects", Interlocked.Read(ref Subjects));
            Workload.Truth("mistakes", Interlocked.Read(ref Mistakes));
            Workload.Truth("collections", GC.CollectionCount(0));
            Workload.Truth("full_collections", GC.CollectionCount(2));
            Workload.PrintTruth();
            return 0;
        }

        public static void Mistake() { Interlocked.Increment(ref Mistakes); }

        // Runs `body` on so many threads at once; the sum of what each of them has found.
        public static long OnThreads(int count, Func<int, long> body)
        {
            long all = 0;
            var threads = new Thread[count];
            for (int n = 0; n < count; n++)
            {
                int own = n;
                threads[n] = new Thread(() => Interlocked.Add(ref all, body(own)));
                threads[n].Start();
            }
            foreach (var thread in threads)
                thread.Join();
            return all;
        }

        public static uint Next(ref uint state)
        {
            state = state * 1664525 + 1013904223;
            return state >> 8;
        }
    }

    // An object of some kind, what it must read as for as long as it is held, and what else points to it.
    sealed class Kept
    {
        sealed class Node { public Node Next; public long Value; }
        sealed class Ends
        {
            public readonly byte[] Body = new byte[64];
            public static long Ended;
            ~Ends()
            {
                if (Body.Length != 64)
                    Program.Mistake();
                Interlocked.Increment(ref Ended);
            }
        }

        static readonly ConditionalWeakTable<object, long[]> attached = new ConditionalWeakTable<object, long[]>();
        readonly int kind;
        readonly uint seed;
        readonly object body;
        readonly WeakReference weak, late;
        GCHandle pin;
        IntPtr address;

        [MethodImpl(MethodImplOptions.NoInlining)]
        public Kept(int kind, uint seed)
        {
            this.kind = kind;
            this.seed = seed;
            switch (kind)
            {
                case 0:
                    Node first = null;
                    for (int i = 0; i < 20; i++)
                        first = new Node { Next = first, Value = seed + i };
                    body = first;
                    break;
                case 1: body = Filled(new byte[1000]); break;
                // Large: 85,000 bytes and more.
                case 2: body = Filled(new byte[100_000]); break;
                case 3: body = Filled(GC.AllocateArray<byte>(3000, pinned: true)); break;
                case 4: body = Filled(new byte[500]); break;
                case 5: body = seed.ToString(CultureInfo.InvariantCulture) + "/" + kind.ToString(CultureInfo.InvariantCulture); break;
                case 6:
                    body = new object();
                    attached.Add(body, new long[] { seed, seed + 1 });
                    break;
                default: body = new Ends(); break;
            }
            weak = new WeakReference(body);
            late = new WeakReference(body, true);
            if (kind == 4)
            {
                pin = GCHandle.Alloc(body, GCHandleType.Pinned);
                address = pin.AddrOfPinnedObject();
            }
            if (kind == 3)
                address = Marshal.UnsafeAddrOfPinnedArrayElement((byte[])body, 0);
        }

        byte[] Filled(byte[] bytes)
        {
            for (int i = 0; i < bytes.Length; i += 97)
                bytes[i] = (byte)(seed + i);
            return bytes;
        }

        // What it reads as; once more with the program's own eyes: nothing has moved what must not move, and who points weakly still does.
        [MethodImpl(MethodImplOptions.NoInlining)]
        public long Read()
        {
            if (weak.Target != body || late.Target != body)
                Program.Mistake();
            long read = 0, expected = 0;
            switch (kind)
            {
                case 0:
                    int i = 19;
                    for (var node = (Node)body; node != null; node = node.Next)
                    {
                        read += node.Value;
                        expected += seed + i--;
                    }
                    break;
                case 1:
                case 2:
                case 3:
                case 4:
                    var bytes = (byte[])body;
                    for (int at = 0; at < bytes.Length; at += 97)
                    {
                        read += bytes[at];
                        expected += (byte)(seed + at);
                    }
                    if (kind == 4 && (pin.AddrOfPinnedObject() != address || pin.Target != body))
                        Program.Mistake();
                    if ((kind == 3 || kind == 4) && Marshal.UnsafeAddrOfPinnedArrayElement(bytes, 0) != address)
                        Program.Mistake();
                    break;
                case 5:
                    read = long.Parse(((string)body).Split('/')[0], CultureInfo.InvariantCulture);
                    expected = seed;
                    break;
                case 6:
                    read = attached.TryGetValue(body, out long[] value) ? value[0] + value[1] : -1;
                    expected = 2L * seed + 1;
                    break;
                default:
                    read = expected = ((Ends)body).Body.Length;
                    break;
            }
            if (read != expected)
                Program.Mistake();
            return read;
        }

        public void Free()
        {
            if (pin.IsAllocated)
                pin.Free();
        }
    }

    static class Collections
    {
        const int Workers = 4, Collectors = 2;

        public static long Round(int amount)
        {
            int working = Workers;
            return Program.OnThreads(Workers + Collectors, n =>
            {
                if (n >= Workers)
                {
                    for (int i = n * 3; Volatile.Read(ref working) > 0; i++)
                        Collect(i);
                    return 0;
                }
                long found = Keep(n, amount);
                Interlocked.Decrement(ref working);
                return found;
            });
        }

        static long Keep(int worker, int amount)
        {
            uint state = (uint)worker * 7919 + 1;
            long found = 0;
            var kept = new Kept[200];
            for (int i = 0; i < amount; i++)
            {
                uint at = Program.Next(ref state) % (uint)kept.Length;
                if (kept[at] != null)
                {
                    found = found * 31 + kept[at].Read();
                    kept[at].Free();
                }
                kept[at] = new Kept((int)(Program.Next(ref state) % 8), Program.Next(ref state));
            }
            foreach (var one in kept)
            {
                if (one == null)
                    continue;
                found = found * 31 + one.Read();
                one.Free();
            }
            return found;
        }

        static void Collect(int i)
        {
            switch (i % 6)
            {
                case 0: GC.Collect(0); break;
                case 1: GC.Collect(1, GCCollectionMode.Forced, blocking: true); break;
                case 2: GC.Collect(2, GCCollectionMode.Forced, blocking: true, compacting: true); break;
                // In the background.
                case 3: GC.Collect(2, GCCollectionMode.Forced, blocking: false); break;
                case 4:
                    GC.Collect();
                    GC.WaitForPendingFinalizers();
                    break;
                default:
                    GCSettings.LargeObjectHeapCompactionMode = GCLargeObjectHeapCompactionMode.CompactOnce;
                    GC.Collect();
                    break;
            }
            Interlocked.Increment(ref Program.Subjects);
        }
    }

    static class Threads
    {
        const int AtOnce = 50;
        static readonly object door = new object();
        static long through;
        [ThreadStatic]
        static List<byte[]> own;

        public static long Round(int amount)
        {
            long found = 0;
            for (int begun = 0; begun < amount; begun += AtOnce)
            {
                int first = begun;
                found += Program.OnThreads(Math.Min(AtOnce, amount - begun), n => Live(first + n));
            }
            return found;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Live(int number)
        {
            if (number % 3 == 0)
                Thread.CurrentThread.Name = "passing " + (number % 7).ToString(CultureInfo.InvariantCulture);
            if (own != null)
                Program.Mistake();
            own = new List<byte[]>();
            for (int i = 0; i < 40; i++)
                own.Add(new byte[500 + (number + i) % 1000]);
            // Some of them wait for each other.
            lock (door)
                through++;
            long found = 0;
            foreach (var bytes in own)
                found += bytes.Length;
            Interlocked.Increment(ref Program.Subjects);
            return found;
        }
    }

    static class Exceptions
    {
        sealed class Told : Exception
        {
            public readonly int Number;
            public readonly byte[] Body = new byte[2000];
            public Told(int number, Exception inner = null) : base("told " + number.ToString(CultureInfo.InvariantCulture), inner) { Number = number; }
        }

        static class Bad<T>
        {
            public static readonly int Value = Fail();
            static int Fail() { throw new Told(typeof(T).Name.Length); }
        }

        public static long Round(int amount)
        {
            return Program.OnThreads(4, n =>
            {
                long found = 0;
                for (int i = 0; i < amount; i++)
                    found = found * 31 + One(n * amount + i, i % 12);
                return found;
            });
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static long One(int number, int kind)
        {
            try
            {
                switch (kind)
                {
                    case 0: return Nested(number);
                    case 1: return Filtered(number);
                    case 2: Deep(number, 30); break;
                    case 3: Again(number); break;
                    case 4: Pass(number).GetAwaiter().GetResult(); break;
                    case 5: return Hardware(number);
                    case 6: return Bad<int>.Value + Bad<string>.Value;
                    case 7: Collecting(number); break;
                    case 8: Task.WaitAll(Pass(number), Pass(number + 1)); break;
                    case 9: typeof(Exceptions).GetMethod("Deep", BindingFlags.Static | BindingFlags.NonPublic).Invoke(null, new object[] { number, 3 }); break;
                    case 10: return Replaced(number);
                    default: return Cancelled(number);
                }
            }
            catch (Told told) { return told.Number + told.Body.Length; }
            catch (TypeInitializationException failed) { return ((Told)failed.InnerException).Number * 3; }
            catch (TargetInvocationException failed) { return ((Told)failed.InnerException).Number * 5; }
            catch (AggregateException failed)
            {
                long all = 0;
                foreach (var inner in failed.InnerExceptions)
                    all += ((Told)inner).Number;
                return all * 7;
            }
            finally { Interlocked.Increment(ref Program.Subjects); }
            Program.Mistake();
            return -1;
        }

        static long Nested(int number)
        {
            long found = 0;
            try
            {
                try { throw new Told(number); }
                catch (Told first)
                {
                    try { throw new Told(number + 1, first); }
                    catch (Told second) { found += second.Number * 2; throw new Told(number + 2, second); }
                    finally { found += 11; }
                }
            }
            catch (Told last) { return found + last.Number + ((Told)last.InnerException.InnerException).Number; }
        }

        static long Filtered(int number)
        {
            try
            {
                // The first filter throws, which is a no; the second one says no; the third yes.
                try { try { throw new Told(number); } catch (Told) when (Throws(number)) { return -1; } }
                catch (Told told) when (told.Number != number) { return -2; }
            }
            catch (Told told) when (told.Body.Length == 2000) { return told.Number * 13; }
        }

        static bool Throws(int number) { throw new InvalidOperationException(number.ToString(CultureInfo.InvariantCulture)); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Deep(int number, int frames)
        {
            if (frames == 0)
                throw new Told(number);
            try { return Deep(number, frames - 1) + 1; }
            catch (Told) when (frames % 10 == 0) { throw; }
            finally { GC.KeepAlive(new byte[100 + frames]); }
        }

        static void Again(int number)
        {
            ExceptionDispatchInfo kept = null;
            try { Deep(number, 2); }
            catch (Told told) { kept = ExceptionDispatchInfo.Capture(told); }
            kept.Throw();
        }

        static async Task<int> Pass(int number)
        {
            await Task.Yield();
            try { return await Further(number) + 1; }
            finally { await Task.Yield(); }
        }

        static async Task<int> Further(int number)
        {
            await Task.Yield();
            throw new Told(number);
        }

        // By signals of the processor: the runtime's handler makes exceptions of them.
        static long Hardware(int number)
        {
            long found = 0;
            try { found += ((string)Nothing()).Length; } catch (NullReferenceException) { found += 1; }
            try { found += number / Zero(); } catch (DivideByZeroException) { found += 10; }
            var four = new int[4];
            try { found += four[four.Length + Zero()]; } catch (IndexOutOfRangeException) { found += 100; }
            return found + number;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static object Nothing() { return null; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Zero() { return 0; }

        static void Collecting(int number)
        {
            try { Deep(number, 4); }
            catch (Told told) when (Collects(told)) { }
            finally { GC.Collect(0); }
        }

        static bool Collects(Told told)
        {
            GC.Collect(0);
            return told.Number < 0;
        }

        // One exception takes another's place on its way.
        static long Replaced(int number)
        {
            try
            {
                try { throw new Told(number); }
                finally { Deep(number + 1, 1); }
            }
            catch (Told told) { return told.Number * 17; }
        }

        static long Cancelled(int number)
        {
            using (var source = new CancellationTokenSource())
            {
                source.Cancel();
                try { Task.Delay(Timeout.Infinite, source.Token).GetAwaiter().GetResult(); return -1; }
                catch (OperationCanceledException cancelled) { return cancelled.CancellationToken == source.Token ? number * 19L : -2; }
            }
        }
    }

    // Run in its collectible copies.
    public static class Guest
    {
        struct Pair<T> { public T First, Second; }
        static readonly List<Pair<long>> made = new List<Pair<long>>();

        public static long Run(int seed)
        {
            if (made.Count != 0)
                return -1;
            for (int i = 0; i < 500; i++)
                made.Add(new Pair<long> { First = seed + i, Second = new byte[100 + i].Length });
            try { throw new InvalidOperationException(seed.ToString(CultureInfo.InvariantCulture)); }
            catch (InvalidOperationException thrown) { seed = int.Parse(thrown.Message, CultureInfo.InvariantCulture); }
            long found = seed;
            foreach (var pair in made)
                found = found * 31 + pair.First + pair.Second;
            return found;
        }
    }

    static class Code
    {
        public static long Round(int amount)
        {
            return Program.OnThreads(3, n =>
            {
                long found = 0;
                var made = new List<WeakReference>();
                for (int i = 0; i < amount; i++)
                    found = found * 31 + (n == 0 ? Context(i, made) : Dynamic(n * amount + i, made));
                while (made.Count > 0)
                {
                    GC.Collect();
                    GC.WaitForPendingFinalizers();
                    Interlocked.Add(ref Program.Subjects, made.RemoveAll(one => !one.IsAlive));
                }
                return found;
            });
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Context(int seed, List<WeakReference> made)
        {
            var context = new AssemblyLoadContext("passing", true);
            made.Add(new WeakReference(context, true));
            var guest = context.LoadFromAssemblyPath(typeof(Program).Assembly.Location).GetType("Survive.Guest");
            var run = (Func<int, long>)Delegate.CreateDelegate(typeof(Func<int, long>), guest.GetMethod("Run"));
            long found = run(seed);
            if (found != Expected(seed))
                Program.Mistake();
            context.Unload();
            return found;
        }

        static long Expected(int seed)
        {
            long found = seed;
            for (int i = 0; i < 500; i++)
                found = found * 31 + (seed + i) + (100 + i);
            return found;
        }

        // x => (new byte[x % 64 + 100].Length + x) * 31 + Even(x), or Odd(x): which of them it calls is in its name.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Dynamic(int seed, List<WeakReference> made)
        {
            bool odd = (seed & 1) != 0;
            var method = new DynamicMethod(odd ? "passing_odd" : "passing_even", typeof(long), new[] { typeof(int) }, typeof(Program).Module, true);
            made.Add(new WeakReference(method));
            var il = method.GetILGenerator();
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Ldc_I4, 64);
            il.Emit(OpCodes.Rem);
            il.Emit(OpCodes.Ldc_I4, 100);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Newarr, typeof(byte));
            il.Emit(OpCodes.Ldlen);
            il.Emit(OpCodes.Conv_I4);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Conv_I8);
            il.Emit(OpCodes.Ldc_I8, 31L);
            il.Emit(OpCodes.Mul);
            il.Emit(OpCodes.Ldarg_0);
            il.Emit(OpCodes.Call, typeof(Code).GetMethod(odd ? "Odd" : "Even", BindingFlags.Static | BindingFlags.NonPublic));
            il.Emit(OpCodes.Add);
            il.Emit(OpCodes.Ret);
            var run = (Func<int, long>)method.CreateDelegate(typeof(Func<int, long>));
            long found = 0;
            for (int x = seed; x < seed + 1000; x++)
            {
                long one = run(x);
                if (one != (x % 64 + 100 + x) * 31L + (odd ? Odd(x) : Even(x)))
                    Program.Mistake();
                found += one;
            }
            return found;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Even(int x)
        {
            long found = x;
            for (int i = 0; i < 1000; i++)
                found = found * 31 + i;
            return found;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Odd(int x)
        {
            long found = x;
            for (int i = 0; i < 1000; i++)
                found = found * 37 + i;
            return found;
        }
    }

    static class Load
    {
        // Does the work while others allocate all the time.
        public static long Beside(Func<long> work)
        {
            bool over = false;
            return Program.OnThreads(3, n =>
            {
                if (n == 0)
                {
                    long found = work();
                    Volatile.Write(ref over, true);
                    return found;
                }
                // Some thousand samples a second: more could not be recorded.
                while (!Volatile.Read(ref over))
                {
                    Allocate(50);
                    Thread.SpinWait(5000);
                }
                return 0;
            });
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        public static long Allocate(int times)
        {
            long found = 0;
            for (int i = 0; i < times; i++)
            {
                var bytes = new byte[1000];
                bytes[i % 1000] = (byte)i;
                found += bytes[i % 1000];
            }
            return found;
        }
    }

    static class Starts
    {
        public static long Round(int amount)
        {
            return Load.Beside(() =>
            {
                long own = 0;
                for (int i = 0; i < amount; i++)
                    own = own * 31 + Started(i % 50);
                return own;
            });
        }

        static int Started(int code)
        {
            var start = new ProcessStartInfo("/bin/sh") { UseShellExecute = false };
            start.ArgumentList.Add("-c");
            start.ArgumentList.Add("exit " + code.ToString(CultureInfo.InvariantCulture));
            using (var child = Process.Start(start))
            {
                child.WaitForExit();
                if (child.ExitCode != code)
                    Program.Mistake();
                Interlocked.Increment(ref Program.Subjects);
                return child.ExitCode;
            }
        }
    }

    static class Forks
    {
        [DllImport("forks")]
        static extern int forks_has_region();
        [DllImport("forks")]
        static extern int forks_here();
        [DllImport("forks")]
        static extern int forks_away(uint seed);
        [DllImport("forks")]
        static extern void forks_leave(int code);
        [DllImport("forks")]
        static extern int forks_await(int child);

        const int Waiting = 4;
        static int withRegion;

        public static long Round(int amount)
        {
            // What the children say of themselves is worth something where the parent says the opposite.
            Workload.Truth("rounds_with_a_region", withRegion += forks_has_region());
            long found = Load.Beside(() =>
            {
                long own = 0;
                for (int i = 0; i < amount; i++)
                    own = own * 31 + Exited(forks_away((uint)i));
                return own;
            });
            return found + Managed(amount / 5);
        }

        // A child of one thread of a runtime may only do what needs no other thread, and no lock that one may have held: it computes and allocates within what
        // the youngest generation has left (GCgen0size). Nothing is compiled or looked up in it (TieredCompilation=0, and the parent has done the same before).
        // No Process here: with it the runtime runs managed code at each child's end, on a thread of its own, beside the next fork.
        static long Managed(int amount)
        {
            Marshal.Prelink(typeof(Forks).GetMethod("forks_leave", BindingFlags.Static | BindingFlags.NonPublic));
            long found = 0;
            int waiting = 0;
            using (var over = new ManualResetEventSlim(false, 0))
            {
                var threads = new Thread[Waiting];
                for (int n = 0; n < Waiting; n++)
                {
                    threads[n] = new Thread(() => { Load.Allocate(10); Interlocked.Increment(ref waiting); over.Wait(); });
                    threads[n].Start();
                }
                foreach (var thread in threads)
                    while (Volatile.Read(ref waiting) < Waiting || (thread.ThreadState & System.Threading.ThreadState.WaitSleepJoin) == 0)
                        Thread.Sleep(1);
                GC.Collect();
                GC.WaitForPendingFinalizers();
                for (int i = 0; i < amount; i++)
                {
                    int expected = Compute(i);
                    int child = forks_here();
                    if (child == 0)
                        forks_leave(Compute(i));
                    int code = Exited(child);
                    if (code != expected)
                        Program.Mistake();
                    found = found * 31 + code;
                }
                over.Set();
                foreach (var thread in threads)
                    thread.Join();
            }
            return found;
        }

        // 4 MB: some forty samples.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Compute(int seed) { return (int)((Load.Allocate(4000) + seed) & 63); }

        // The exit code of a child that ended by itself.
        static int Exited(int child)
        {
            int status = child < 0 ? -1 : forks_await(child);
            if (status < 0 || (status & 0x7f) != 0)
            {
                Console.Error.WriteLine("child " + child + " ended with status 0x" + status.ToString("x", CultureInfo.InvariantCulture));
                Program.Mistake();
                return -1;
            }
            if (status >> 8 == 127)
            {
                Console.Error.WriteLine("child " + child + " has the parent's region");
                Program.Mistake();
            }
            Interlocked.Increment(ref Program.Subjects);
            return status >> 8;
        }
    }

    static class Deaths
    {
        // Small, so that the runtime need not tell a stack of a hundred thousand frames.
        const int StackBytes = 256 * 1024;

        public static void Begin()
        {
            for (int n = 0; n < 2; n++)
            {
                int own = n;
                Workload.Start("busy-" + n.ToString(CultureInfo.InvariantCulture), () => Busy(own));
            }
            Workload.On("overflow", () => On(() => Deep(1)));
            Workload.On("overflow-allocating", () => On(() => DeepAllocating(1)));
        }

        // The kinds that collect are left out: they would have the one that is to die wait.
        static void Busy(int seed)
        {
            for (int i = 0; !Workload.Stopping; i++)
            {
                Exceptions.One(seed + i, i % 5);
                for (int n = 0; n < 200; n++)
                    GC.KeepAlive(new byte[1000]);
                // A recorder of a busy machine keeps up with a thousand samples a second.
                Thread.SpinWait(100_000);
            }
        }

        static void On(Func<long> body)
        {
            var thread = new Thread(() => GC.KeepAlive(body()), StackBytes);
            thread.Start();
            thread.Join();
        }

        // Each uses its callee's result after the call, so that none is a tail call.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static long Deep(long depth) { return Deep(depth + 1) + depth; }

        // Here it is the runtime or the profiler that finds no room, most likely.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static long DeepAllocating(long depth)
        {
            var bytes = new byte[8000];
            return DeepAllocating(depth + 1) + bytes.Length;
        }
    }
}
