// A Kestrel app that `cargo xtask bench` puts under load: each request is read, as many orders are made as its path says, summed and answered as JSON. Lines on
// standard input as in Load.cs: answered with "REQUESTS NANOSECONDS", and "exit" or the end of the input ends it. Its first line of output is the port.
using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Linq;
using System.Text.Json;
using System.Threading;
using System.Threading.Tasks;
using Microsoft.AspNetCore.Builder;
using Microsoft.AspNetCore.Hosting;
using Microsoft.AspNetCore.Http;
using Microsoft.Extensions.Logging;

record Line(string Article, int Count, decimal Price);
record Order(int Number, string Customer, List<Line> Lines);

static class Web
{
    static long requests;

    static async Task Main()
    {
        var builder = WebApplication.CreateSlimBuilder();
        builder.Logging.ClearProviders();
        builder.WebHost.UseUrls("http://127.0.0.1:0");
        var app = builder.Build();
        app.Use(async (context, next) => { await next(); Interlocked.Increment(ref requests); });
        app.Run(Answer);
        await app.StartAsync();
        Console.WriteLine(new Uri(app.Urls.First()).Port);
        for (string line = Console.ReadLine(); line != null && line != "exit"; line = Console.ReadLine())
            Console.WriteLine(Volatile.Read(ref requests) + " " + (long)(Stopwatch.GetTimestamp() * (1e9 / Stopwatch.Frequency)));
        Environment.Exit(0);
    }

    static async Task Answer(HttpContext context)
    {
        var orders = new List<Order>();
        int count = int.Parse(context.Request.Path.Value.AsSpan(1));
        for (int i = 0; i < count; i++) orders.Add(Take(i));
        var largest = orders.GroupBy(o => o.Customer)
            .Select(g => new { Customer = g.Key, Total = g.Sum(o => o.Lines.Sum(l => l.Price * l.Count)) })
            .OrderByDescending(t => t.Total).Take(5).ToArray();
        await Task.Yield();
        byte[] json = JsonSerializer.SerializeToUtf8Bytes(largest);
        context.Response.ContentType = "application/json";
        context.Response.ContentLength = json.Length;
        await context.Response.Body.WriteAsync(json);
    }

    static Order Take(int number)
    {
        var lines = new List<Line>();
        for (int i = 0; i < 5; i++) lines.Add(new Line("article " + (number * 7 + i), i + 1, 9.95m + i));
        return new Order(number, "customer " + number % 8, lines);
    }
}
