// Counts its own objects, to the object. THREADS threads make ROUNDS rounds of objects of known types; all stand still while the main thread
// looks at every object it holds, forces a collection, and looks again: what was in a collected generation has survived it, and where it is
// now says whether it was moved and promoted. With DOTNET_GCgen0size large enough no other collection happens; `collections` is for
// whoever wants to be sure. Then, if `busy` is given, the threads allocate garbage until the runtime has collected some times by itself.
// With `held` in place of the numbers it makes objects that are held in ways it knows, and has the runtime look once; with `holes` it makes holes in its
// heap and fills them again, and says what the runtime knows of the free space before and after each collection; with `boxes` it boxes values by the runtime's helper
// and by itself; with `tight` it fills a heap that has an end.
// Truth: of each type objects, bytes, survivors, survivals, moves, promotions, the dead by the collections they lived through, those queued for
// finalizers, those alive after that. Three of the types are values that are boxed.
#pragma warning disable 0649 // fields that only make objects larger
using System;
using System.Collections.Generic;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Text;
using System.Threading;

namespace Counted
{
    sealed class Dead { public long A; }
    sealed class Kept { public long A, B; }
    sealed class Brief { public long A, B, C; }
    sealed class Generic<T> { public T A; }
    // Boxed: .NET 10 tells no profiler of such objects.
    struct Loose { public long A; }
    struct Crate { public long A, B; }
    struct Parcel<T> { public T A; public long B, C; }
    struct Cell { public byte A; }
    struct Big { public byte A; }
    struct Pin { public byte A; }
    sealed class Buried { ~Buried() { Interlocked.Increment(ref Count); } public static int Count; }
    sealed class Phoenix
    {
        public static readonly List<Phoenix> Risen = new List<Phoenix>();
        ~Phoenix() { lock (Risen) Risen.Add(this); }
    }

    sealed class Leaf { public long A; }
    sealed class Node { public Leaf A, B; public Node Next; }
    sealed class Static { public static readonly Static Only = new Static(); }

    // What is true of one type.
    sealed class Of
    {
        public long Objects, Bytes, Survivors, Survivals, SurvivalBytes, Moves, Promoted1, Promoted2, Finalizable, Resurrected;
        public bool Followed = true;
        // The dead by the collections they lived through, in powers of two: from 0, 1, 2, 4, … on.
        public readonly SortedDictionary<int, long> Died = new SortedDictionary<int, long>();

        public void Dies(int lived, long objects)
        {
            var from = lived == 0 ? 0 : 1 << (31 - System.Numerics.BitOperations.LeadingZeroCount((uint)lived));
            Died[from] = Died.GetValueOrDefault(from) + objects;
        }
    }

    // An object that nobody holds any more: its weak handle says when it is gone. Born after so many collections.
    struct Leaving { public GCHandle Handle; public Of Type; public int Born; }

    // An object that is looked at before and after each collection: where it was, and in which generation.
    struct Held { public object Object; public Of Type; public int Bytes, Generation, Born; public bool Survived; public long Address; }

    // So many of them, in pieces: an array of all would be a large object, and 3 MB of those are enough for the runtime to collect by itself.
    sealed class Holder
    {
        const int Piece = 1000;
        readonly Held[][] pieces;
        public int Count;

        public Holder(int most)
        {
            pieces = new Held[most / Piece + 1][];
            for (var n = 0; n < pieces.Length; n++)
                pieces[n] = new Held[Piece];
        }

        public ref Held this[int n] { get { return ref pieces[n / Piece][n % Piece]; } }

        public void Clear()
        {
            foreach (var piece in pieces)
                Array.Clear(piece);
            Count = 0;
        }
    }

    static class Program
    {
        static int threads, rounds, scale;
        static readonly SortedDictionary<string, Of> truth = new SortedDictionary<string, Of>(StringComparer.Ordinal);
        static readonly Dictionary<Type, Of> ofType = new Dictionary<Type, Of>();
        static volatile object sink;
        static Barrier barrier;
        static volatile bool stop;

        // Each thread's objects: those it keeps, by round, and those it keeps for one round. And what is known of both.
        static object[][][] kept;
        static object[][] brief;
        static Holder lasting, passing;
        // In pieces, like what is held.
        static readonly LinkedList<Leaving> leaving = new LinkedList<Leaving>();
        static int collections;

        static int Main(string[] args)
        {
            if (args[0] == "held")
                return Hold();
            if (args[0] == "holes")
                return Holes();
            if (args[0] == "boxes")
                return Boxes();
            if (args[0] == "tight")
                return Tight();
            threads = int.Parse(args[0], CultureInfo.InvariantCulture);
            rounds = int.Parse(args[1], CultureInfo.InvariantCulture);
            scale = int.Parse(args[2], CultureInfo.InvariantCulture);
            kept = new object[threads][][];
            brief = new object[threads][];
            lasting = new Holder(threads * rounds * scale * 2);
            passing = new Holder(threads * (scale * 2 + 5));
            foreach (var name in new[] { "Dead", "Kept", "Brief", "Loose", "Crate", "Parcel<string>", "Generic<Counted.Kept>", "Generic<int>", "Cell[]", "Big[]", "Pin[]", "Buried", "Phoenix" })
                truth["Counted." + name] = new Of();
            ofType[typeof(Kept)] = truth["Counted.Kept"];
            ofType[typeof(Brief)] = truth["Counted.Brief"];
            ofType[typeof(Crate)] = truth["Counted.Crate"];
            ofType[typeof(Parcel<string>)] = truth["Counted.Parcel<string>"];
            ofType[typeof(Generic<Kept>)] = truth["Counted.Generic<Counted.Kept>"];
            ofType[typeof(Generic<int>)] = truth["Counted.Generic<int>"];
            ofType[typeof(Cell[])] = truth["Counted.Cell[]"];
            ofType[typeof(Big[])] = truth["Counted.Big[]"];
            ofType[typeof(Pin[])] = truth["Counted.Pin[]"];
            truth["Counted.Buried"].Followed = truth["Counted.Phoenix"].Followed = false;
            barrier = new Barrier(threads + 1);
            var all = new List<Thread>();
            for (var n = 0; n < threads; n++)
            {
                var number = n;
                var thread = new Thread(() => Live(number)) { IsBackground = true };
                thread.Start();
                all.Add(thread);
            }
            var before = GC.CollectionCount(0);
            for (var round = 0; round < rounds; round++)
            {
                barrier.SignalAndWait(); // They allocate.
                barrier.SignalAndWait(); // They have.
                Follow(round);
                Collect(round % 3 == 2 ? 2 : round % 3);
                GC.WaitForPendingFinalizers();
            }
            // Everything in generation 0 to 2 is looked at twice more: the finalizers of the last round have run in between.
            Collect(2);
            GC.WaitForPendingFinalizers();
            Collect(2);
            var forced = GC.CollectionCount(0) - before;
            stop = true;
            barrier.SignalAndWait();
            foreach (var thread in all)
                thread.Join();
            if (args.Length > 3)
                Busy(int.Parse(args[3], CultureInfo.InvariantCulture));
            Print(forced);
            GC.KeepAlive(kept);
            return 0;
        }

        // A list of a hundred nodes, each with two leaves but the last with one twice, in an array that a handle holds; fifty leaves with a handle each, seven
        // weak ones, and one on the stack.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Hold()
        {
            var handles = new List<GCHandle>();
            Build(handles);
            var local = new Leaf();
            GC.KeepAlive(Static.Only);
            GC.Collect();
            GC.KeepAlive(local);
            Console.WriteLine("truth {\"Counted.Leaf\":{\"alive\":250,\"referenced\":200,\"references\":0,\"handle_roots\":50},"
                + "\"Counted.Node\":{\"alive\":100,\"referenced\":199,\"references\":299,\"handle_roots\":0,\"stack_roots\":0},"
                + "\"Counted.Node[]\":{\"alive\":1,\"referenced\":0,\"references\":100,\"handle_roots\":1,\"stack_roots\":0},"
                + "\"Counted.Static\":{\"alive\":1,\"referenced\":1,\"references\":0,\"handle_roots\":0,\"stack_roots\":0}}");
            foreach (var handle in handles)
                handle.Free();
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Build(List<GCHandle> handles)
        {
            var nodes = new Node[100];
            for (var n = 0; n < nodes.Length; n++)
                nodes[n] = new Node { A = new Leaf(), B = new Leaf(), Next = n > 0 ? nodes[n - 1] : null };
            nodes[99].B = nodes[99].A;
            handles.Add(GCHandle.Alloc(nodes));
            for (var n = 0; n < 50; n++)
                handles.Add(GCHandle.Alloc(new Leaf()));
            for (var n = 0; n < 7; n++)
                handles.Add(GCHandle.Alloc(nodes[n].A, GCHandleType.Weak));
        }

        // Most of what there is of the heap stays, and what is new stays for a while: memory is short (DOTNET_GCHeapHardLimit, DOTNET_GCHighMemPercent), so collections stop half-way
        // and full ones follow at once.
        static int Tight()
        {
            const int Stays = 120 * 1024, Lasts = 20000, Made = 1000000;
            var stays = new byte[Stays][];
            for (var n = 0; n < Stays; n++)
                stays[n] = new byte[1000];
            GC.Collect();
            var lasts = new object[Lasts];
            for (var n = 0; n < Made; n++)
            {
                lasts[n % Lasts] = new Cell[200];
                BoxByHelper(5);
                if (n % 50 == 0)
                    stays[n % Stays] = new byte[1000];
            }
            truth["Counted.Cell[]"] = new Of();
            truth["Counted.Loose"] = new Of();
            Count("Cell[]", Made, Round(24 + 200));
            Count("Loose", 5 * Made, 24);
            Print(GC.CollectionCount(0));
            GC.KeepAlive(stays);
            GC.KeepAlive(lasts);
            return 0;
        }

        const int ByHelper = 2000000, Inline = 1000000;

        static int Boxes()
        {
            BoxByHelper(ByHelper);
            BoxInline(Inline);
            Console.WriteLine("truth {\"Counted.Loose\":{\"helper\":" + ByHelper + ",\"inline\":" + Inline + "}}");
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining | MethodImplOptions.NoOptimization)]
        static void BoxByHelper(int count)
        {
            for (var n = 0; n < count; n++)
                sink = new Loose();
        }

        [MethodImpl(MethodImplOptions.NoInlining | MethodImplOptions.AggressiveOptimization)]
        static void BoxInline(int count)
        {
            for (var n = 0; n < count; n++)
                sink = new Loose();
        }

        // Large objects stay where they are, so every second one that goes leaves a hole.
        static int Holes()
        {
            var collections = new List<string>();
            var large = new byte[400][];
            for (var n = 0; n < large.Length; n++)
                large[n] = new byte[100000];
            Weigh(collections);
            Release(large);
            Weigh(collections);
            Weigh(collections);
            Refill(large);
            Weigh(collections);
            GC.KeepAlive(large);
            Console.WriteLine("truth [" + string.Join(",", collections) + "]");
            return 0;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Release(byte[][] large)
        {
            for (var n = 0; n < large.Length; n += 2)
                large[n] = null;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Refill(byte[][] large)
        {
            for (var n = 0; n < large.Length; n += 2)
                large[n] = new byte[90000];
        }

        // Collects, and notes what the runtime knows of it.
        static void Weigh(List<string> collections)
        {
            GC.Collect(2, GCCollectionMode.Forced, true, false);
            var info = GC.GetGCMemoryInfo(GCKind.FullBlocking);
            long heapBefore = 0, freeBefore = 0, heapAfter = 0, freeAfter = 0;
            foreach (var generation in info.GenerationInfo)
            {
                heapBefore += generation.SizeBeforeBytes;
                freeBefore += generation.FragmentationBeforeBytes;
                heapAfter += generation.SizeAfterBytes;
                freeAfter += generation.FragmentationAfterBytes;
            }
            collections.Add("{\"number\":" + info.Index + ",\"heap_before\":" + heapBefore + ",\"free_before\":" + freeBefore
                + ",\"heap_after\":" + heapAfter + ",\"free_after\":" + freeAfter + "}");
        }

        static void Live(int number)
        {
            kept[number] = new object[rounds][];
            var round = 0;
            while (true)
            {
                barrier.SignalAndWait();
                if (stop)
                    return;
                Work(number, round++);
                barrier.SignalAndWait();
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Work(int number, int round)
        {
            brief[number] = null;
            var here = new object[scale * 2 + 5];
            var mine = kept[number][round] = new object[scale * 2];
            for (var n = 0; n < scale; n++)
            {
                for (var d = 0; d < 30; d++)
                    sink = new Dead();
                for (var d = 0; d < 10; d++)
                    sink = new Loose();
                mine[n] = new Kept();
                mine[scale + n] = new Crate();
                here[n] = new Brief();
                here[5 + scale + n] = new Parcel<string>();
            }
            here[scale] = new Generic<Kept>();
            here[scale + 1] = new Generic<int>();
            here[scale + 2] = new Cell[1000 + round];
            here[scale + 3] = new Big[100000 + 100 * round];
            here[scale + 4] = GC.AllocateArray<Pin>(5000 + round, pinned: true);
            brief[number] = here;
            for (var n = 0; n < 10; n++)
                Bury();
            sink = null;
            lock (truth)
            {
                Count("Dead", 30 * scale, 24);
                Count("Kept", scale, 32);
                Count("Brief", scale, 40);
                Count("Loose", 10 * scale, 24);
                Count("Crate", scale, 32);
                Count("Parcel<string>", scale, 40);
                Count("Generic<Counted.Kept>", 1, 24);
                Count("Generic<int>", 1, 24);
                Count("Cell[]", 1, Round(24 + 1000 + round));
                Count("Big[]", 1, Round(24 + 100000 + 100 * round));
                Count("Pin[]", 1, Round(24 + 5000 + round));
                Count("Buried", 10, 24);
                Count("Phoenix", 10, 24);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Bury()
        {
            new Buried();
            new Phoenix();
        }

        static int Round(int bytes)
        {
            return (bytes + 7) / 8 * 8;
        }

        static void Count(string name, int objects, int bytes)
        {
            var of = truth["Counted." + name];
            of.Objects += objects;
            of.Bytes += (long)objects * bytes;
            if (name == "Buried" || name == "Phoenix")
                of.Finalizable += objects;
            if (name == "Phoenix")
                of.Resurrected += objects;
        }

        // Looks at all that is held, collects, and looks again.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Collect(int generation)
        {
            Look(lasting);
            Look(passing);
            int full = GC.CollectionCount(2), half = GC.CollectionCount(1);
            GC.Collect(generation, GCCollectionMode.Forced, true, generation == 2);
            // The runtime may collect more than it was asked for.
            var collected = GC.CollectionCount(2) > full ? 2 : GC.CollectionCount(1) > half ? 1 : 0;
            Compare(lasting, collected);
            Compare(passing, collected);
            for (LinkedListNode<Leaving> one = leaving.First, next; one != null; one = next)
            {
                next = one.Next;
                if (IsGone(one.Value))
                    leaving.Remove(one);
            }
            collections++;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static bool IsGone(Leaving one)
        {
            if (one.Handle.Target != null)
                return false;
            one.Handle.Free();
            one.Type.Dies(collections - one.Born, 1);
            return true;
        }

        // Takes up what this round has made, and lets go of what nobody else holds any more.
        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Follow(int round)
        {
            for (var n = 0; n < passing.Count; n++)
            {
                var gone = passing[n];
                leaving.AddLast(new Leaving { Handle = GCHandle.Alloc(gone.Object, GCHandleType.Weak), Type = gone.Type, Born = gone.Born });
            }
            passing.Clear();
            // Nobody has ever held them when the next collection comes.
            truth["Counted.Dead"].Dies(0, 30L * scale * threads);
            truth["Counted.Loose"].Dies(0, 10L * scale * threads);
            for (var n = 0; n < threads; n++)
            {
                foreach (var one in kept[n][round])
                    Add(lasting, one);
                foreach (var one in brief[n])
                    Add(passing, one);
            }
        }

        static void Add(Holder to, object one)
        {
            var bytes = one is Kept || one is Crate ? 32 : one is Brief || one is Parcel<string> ? 40 : one is Array array ? Round(24 + array.Length) : 24;
            to[to.Count++] = new Held { Object = one, Type = ofType[one.GetType()], Bytes = bytes, Born = collections };
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Look(Holder at)
        {
            for (var n = 0; n < at.Count; n++)
            {
                ref var one = ref at[n];
                one.Generation = GC.GetGeneration(one.Object);
                one.Address = Unsafe.As<object, long>(ref one.Object);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Compare(Holder at, int collected)
        {
            for (var n = 0; n < at.Count; n++)
            {
                ref var one = ref at[n];
                if (one.Generation > collected)
                    continue;
                var of = one.Type;
                of.Survivals++;
                of.SurvivalBytes += one.Bytes;
                if (!one.Survived)
                {
                    of.Survivors++;
                    one.Survived = true;
                }
                var now = GC.GetGeneration(one.Object);
                if (Unsafe.As<object, long>(ref one.Object) != one.Address)
                    of.Moves++;
                if (now == 1 && one.Generation == 0)
                    of.Promoted1++;
                if (now == 2 && one.Generation < 2)
                    of.Promoted2++;
            }
        }

        // Garbage from all threads at once, until the runtime has collected so often by itself.
        static void Busy(int collections)
        {
            var until = GC.CollectionCount(0) + collections;
            var counts = new long[threads];
            var all = new List<Thread>();
            for (var n = 0; n < threads; n++)
            {
                var number = n;
                var thread = new Thread(() =>
                {
                    while (GC.CollectionCount(0) < until)
                        counts[number] += Litter();
                });
                thread.Start();
                all.Add(thread);
            }
            foreach (var thread in all)
                thread.Join();
            foreach (var count in counts)
            {
                Count("Dead", (int)count, 24);
                Count("Loose", (int)count, 24);
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Litter()
        {
            for (var n = 0; n < 1000; n++)
            {
                sink = new Dead();
                sink = new Loose();
            }
            return 1000;
        }

        static void Print(int forced)
        {
            var text = new StringBuilder("truth {\"collections\":" + forced + ",\"types\":{");
            var first = true;
            foreach (var pair in truth)
            {
                var of = pair.Value;
                text.Append(first ? "" : ",").Append('"').Append(pair.Key).Append("\":{");
                text.Append("\"objects\":" + of.Objects + ",\"bytes\":" + of.Bytes);
                if (of.Followed)
                    text.Append(",\"survivors\":" + of.Survivors + ",\"survivals\":" + of.Survivals + ",\"survival_bytes\":" + of.SurvivalBytes
                        + ",\"moves\":" + of.Moves + ",\"promoted_to_1\":" + of.Promoted1 + ",\"promoted_to_2\":" + of.Promoted2);
                var died = new List<string>();
                foreach (var lived in of.Died)
                    died.Add("\"" + lived.Key + "\":" + lived.Value);
                if (of.Followed)
                    text.Append(",\"died\":{" + string.Join(",", died) + "}");
                text.Append(",\"finalizable\":" + of.Finalizable + ",\"resurrected\":" + of.Resurrected + "}");
                first = false;
            }
            Console.WriteLine(text.Append("}}"));
        }
    }
}
