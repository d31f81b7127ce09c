// A collectible load context: the program loads its own assembly into one, runs a chain of it for some time, unloads it, again and again.
using System;
using System.Reflection;
using System.Runtime.CompilerServices;
using System.Runtime.Loader;

namespace Collectible
{
    public static class Plugin
    {
        // Called in the loaded copy.
        public static int Entry(int rounds)
        {
            int sum = 0;
            for (int i = 0; i < rounds; i++)
                sum += First(i);
            return sum;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int First(int x) { return Second(x) + 1; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Second(int x) { return Work(x) + 2; }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Work(int x)
        {
            for (int i = 0; i < 1000000; i++)
                x = x * 31 + i;
            return x;
        }
    }

    static class Program
    {
        static int sink;
        static int loads;

        static int Main()
        {
            Workload.Chain("loader", "Collectible.Program.Loop", "Collectible.Program.Load", "Collectible.Plugin.Entry",
                "Collectible.Plugin.First", "Collectible.Plugin.Second", "Collectible.Plugin.Work");
            Workload.Start("loader", Loop);
            return Workload.Settle(1500, () => Workload.Truth("loads", loads));
        }

        static void Loop()
        {
            while (!Workload.Stopping)
            {
                sink += Load();
                loads++;
            }
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static int Load()
        {
            var context = new AssemblyLoadContext("again", true);
            var assembly = context.LoadFromAssemblyPath(typeof(Program).Assembly.Location);
            var entry = (Func<int, int>)Delegate.CreateDelegate(typeof(Func<int, int>),
                assembly.GetType("Collectible.Plugin").GetMethod("Entry", BindingFlags.Public | BindingFlags.Static));
            int sum = entry(100);
            context.Unload();
            return sum;
        }
    }
}
