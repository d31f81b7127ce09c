// Objects of one type that stay, made in two places and held in two ways: 200 arrays of 10 KB a second in a list, as many by handlers of a static event, and as
// many that nobody holds. Truth: how many of each stay. On `become` it becomes another program, by exec.
using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Runtime.InteropServices;
using System.Threading;

namespace Kept
{
    sealed class Listener
    {
        readonly byte[] body;
        public Listener(byte[] body) { this.body = body; }
        public void OnChanged(object sender, EventArgs e) { GC.KeepAlive(body); }
    }

    static class Feed
    {
        public static event EventHandler Changed;
        public static void Raise() { Changed?.Invoke(null, EventArgs.Empty); }
    }

    static class Program
    {
        static readonly List<byte[]> list = new List<byte[]>();
        static volatile object sink;
        static int listeners;

        static int Main()
        {
            Workload.Start("keeper", () =>
            {
                while (!Workload.Stopping)
                {
                    InList();
                    ByEvent();
                    Dropped();
                    Thread.Sleep(5);
                }
            });
            Workload.On("become", () => execv("/bin/sleep", new[] { "/bin/sleep", "600", null }));
            Workload.Ready();
            Workload.WaitForStop();
            Feed.Raise();
            Workload.Truth("list", list.Count);
            Workload.Truth("listeners", listeners);
            Workload.PrintTruth();
            return 0;
        }

        [DllImport("libc")]
        static extern int execv(string path, string[] arguments);

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void InList() { list.Add(new byte[10000]); }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void ByEvent()
        {
            Feed.Changed += new Listener(new byte[10000]).OnChanged;
            listeners++;
        }

        [MethodImpl(MethodImplOptions.NoInlining)]
        static void Dropped() { sink = new byte[10000]; }
    }
}
