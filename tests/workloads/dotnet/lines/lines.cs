// Hot loops on known lines. Each thread is always in one loop of `Hot`: the lines that end in `// in NAME` are the lines that the
// thread NAME may be on in there, and `// call NAME` is the line where it called it.
//
//     lines once     each thread calls `Hot` once, and stays in it
//     lines often    each thread calls `Hot` again and again
using System;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;

static class Lines
{
    static long sum;

    static int Main(string[] args)
    {
        bool once = args.Length > 0 && args[0] == "once";
        int rounds = once ? int.MaxValue : 20_000;
        Workload.Start("multiply", () =>
        {
            while (!Workload.Stopping)
                Interlocked.Add(ref sum, Hot(0, rounds)); // call multiply
        });
        Workload.Start("divide", () =>
        {
            while (!Workload.Stopping)
                Interlocked.Add(ref sum, Hot(1, rounds)); // call divide
        });
        Workload.Start("inlined", () =>
        {
            while (!Workload.Stopping)
                Interlocked.Add(ref sum, Hot(2, rounds)); // call inlined
        });
        Workload.Start("generic", () =>
        {
            while (!Workload.Stopping)
                Interlocked.Add(ref sum, new Loop<string>().Hot(rounds)); // call generic
        });
        Workload.Start("later", () =>
        {
            while (!Workload.Stopping)
                Interlocked.Add(ref sum, HotAsync(rounds).Result); // call later
        });
        return Workload.Settle(2000, () => { });
    }

    [MethodImpl(MethodImplOptions.NoInlining)]
    static long Hot(int which, int rounds)
    {
        long result = which;
        if (which == 0)
        {
            for (int i = 0; i < rounds && !Workload.Stopping; i++) // in multiply
                result = result * 31 + i; // in multiply
        }
        else if (which == 1)
        {
            for (int i = 0; i < rounds && !Workload.Stopping; i++) // in divide
            { // in divide
                result += 1_000_003 / (i % 7 + 1); // in divide

                // A comment between.
                result ^= i; // in divide
            } // in divide
        }
        else
        {
            for (int i = 0; i < rounds && !Workload.Stopping; i++) // in inlined
                result += Small(result, i); // in inlined
        }
        return result;
    }

    [MethodImpl(MethodImplOptions.AggressiveInlining)]
    static long Small(long result, int i)
    {
        return (result >> 3) * 7 + i;
    }

    sealed class Loop<T>
    {
        [MethodImpl(MethodImplOptions.NoInlining)]
        public long Hot(int rounds)
        {
            long result = typeof(T).Name.Length;
            for (int i = 0; i < rounds && !Workload.Stopping; i++) // in generic
                result = result * 33 ^ i; // in generic
            return result;
        }
    }

    static async Task<long> HotAsync(int rounds)
    {
        long result = 0;
        await Task.CompletedTask;
        for (int i = 0; i < rounds && !Workload.Stopping; i++) // in later
            result = result * 37 + i; // in later
        return result;
    }
}
