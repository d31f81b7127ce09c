// The C# compiler of the tests: Roslyn driven by its own command-line parser.
//
//     csc [--framework 8|9|10|aspnet] [-option…] OUT.dll SOURCE.cs…
//
// `cargo xtask setup` compiles this one file with Debian's `mcs`, which cannot read Roslyn's signatures (their ReadOnlySpan
// overloads); so Roslyn is reached by reflection and `dynamic` only. Assemblies of the .NET roots beside it are the references.
// OUT.runtimeconfig.json is written next to OUT.dll. Options that begin with `-` go to Roslyn as they are, after the defaults.
using System;
using System.Collections;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Reflection;
using System.Text;
using System.Threading;

static class Compiler
{
    static readonly string Home = Path.GetDirectoryName(typeof(Compiler).Assembly.Location);
    const string Roslyn = "Microsoft.CodeAnalysis";

    static int Main(string[] args)
    {
        // Default: the oldest runtime tested, so that one build runs on every root.
        string framework = "8";
        var options = new List<string>();
        var files = new List<string>();
        for (int i = 0; i < args.Length; i++)
        {
            if (args[i] == "--framework" && i + 1 < args.Length) framework = args[++i];
            else if (args[i].StartsWith("-")) options.Add(args[i]);
            else files.Add(Path.GetFullPath(args[i]));
        }
        if (args.Length == 1 && args[0] == "--version")
        {
            Console.WriteLine("Roslyn " + AssemblyName.GetAssemblyName(Path.Combine(Home, Roslyn + ".CSharp.dll")).Version);
            return 0;
        }
        if (files.Count < 2)
        {
            Console.Error.WriteLine("csc [--framework 8|9|10|aspnet] [-option...] OUT.dll SOURCE.cs...");
            return 2;
        }
        string major = framework == "aspnet" ? "9" : framework;
        string shared = Path.Combine(Home, "..", "dotnet", major, "shared");
        var names = new List<string> { "Microsoft.NETCore.App" };
        if (framework == "aspnet") names.Add("Microsoft.AspNetCore.App");

        var line = new List<string> {
            "-noconfig", "-nostdlib", "-nologo", "-optimize+", "-unsafe", "-langversion:preview", "-debug:portable", "-deterministic",
            "-nowarn:1701,1702,CS9057",
        };
        foreach (string name in names)
        {
            string folder = Path.Combine(shared, name);
            if (!Directory.Exists(folder))
            {
                Console.Error.WriteLine("csc: " + folder + ": no such framework; `cargo xtask setup` lays out 8, 9 and 10, ASP.NET Core in 9");
                return 2;
            }
            line.AddRange(Directory.GetFiles(Directory.GetDirectories(folder)[0], "*.dll").Select(path => "-r:" + path));
        }
        line.AddRange(options);
        line.Add("-out:" + files[0]);
        line.AddRange(files.Skip(1));

        bool compiled = Compile(line);
        if (compiled) WriteRuntimeConfig(files[0], major, names[names.Count - 1]);
        return compiled ? 0 : 1;
    }

    static bool Compile(List<string> line)
    {
        Assembly csharp = Assembly.LoadFrom(Path.Combine(Home, Roslyn + ".CSharp.dll"));
        Assembly common = Assembly.LoadFrom(Path.Combine(Home, Roslyn + ".dll"));
        dynamic parser = csharp.GetType(Roslyn + ".CSharp.CSharpCommandLineParser").GetProperty("Default").GetValue(null, null);
        dynamic parsed = parser.Parse(line, Directory.GetCurrentDirectory(), Home, null);
        if (Report((IEnumerable)parsed.Errors)) return false;

        Type tree = common.GetType(Roslyn + ".SyntaxTree");
        Type reference = common.GetType(Roslyn + ".MetadataReference");
        MethodInfo parseText = Static(csharp.GetType(Roslyn + ".CSharp.CSharpSyntaxTree"), "ParseText", typeof(string), 5);
        MethodInfo createFromFile = Static(reference, "CreateFromFile", typeof(string), 3);
        MethodInfo create = Static(csharp.GetType(Roslyn + ".CSharp.CSharpCompilation"), "Create", typeof(string), 4);

        var trees = new List<object>();
        foreach (dynamic source in (IEnumerable)parsed.SourceFiles)
        {
            string path = source.Path;
            if (!File.Exists(path))
            {
                Console.Error.WriteLine("csc: " + path + ": no such source file");
                return false;
            }
            // An encoding is demanded wherever debug information is made.
            trees.Add(parseText.Invoke(null, new object[] { File.ReadAllText(path), (object)parsed.ParseOptions, path, Encoding.UTF8, default(CancellationToken) }));
        }
        var references = new List<object>();
        foreach (dynamic named in (IEnumerable)parsed.MetadataReferences)
            references.Add(createFromFile.Invoke(null, new object[] { (string)named.Reference, (object)named.Properties, null }));

        string output = Path.Combine((string)parsed.OutputDirectory, (string)parsed.OutputFileName);
        dynamic compilation = create.Invoke(null, new object[] {
            Path.GetFileNameWithoutExtension(output), Typed(tree, trees), Typed(reference, references), (object)parsed.CompilationOptions });
        dynamic result;
        // A process may still map the old file: write beside it and rename, so that its pages stay as they were.
        string pdb = Path.ChangeExtension(output, ".pdb");
        using (Stream pe = File.Create(output + ".new"))
        using (Stream symbols = File.Create(pdb + ".new"))
            result = compilation.Emit(pe, symbols, null, null, null, parsed.EmitOptions, null, null, null, null, default(CancellationToken));
        bool success = result.Success;
        Report((IEnumerable)result.Diagnostics);
        Finish(output, success);
        Finish(pdb, success);
        return success;
    }

    static void Finish(string path, bool keep)
    {
        if (keep) File.Delete(path);
        if (keep) File.Move(path + ".new", path); else File.Delete(path + ".new");
    }

    // The static overload with this many parameters whose first is of type `first`.
    static MethodInfo Static(Type type, string name, Type first, int parameters)
    {
        return type.GetMethods(BindingFlags.Public | BindingFlags.Static).First(method =>
            method.Name == name && method.GetParameters().Length == parameters && method.GetParameters()[0].ParameterType == first);
    }

    static Array Typed(Type element, List<object> items)
    {
        Array array = Array.CreateInstance(element, items.Count);
        for (int i = 0; i < items.Count; i++) array.SetValue(items[i], i);
        return array;
    }

    // Prints warnings and errors; true when there was an error.
    static bool Report(IEnumerable diagnostics)
    {
        bool failed = false;
        foreach (dynamic diagnostic in diagnostics)
        {
            int severity = (int)diagnostic.Severity;
            if (severity >= 2 && !(bool)diagnostic.IsSuppressed) Console.Error.WriteLine(((object)diagnostic).ToString());
            failed |= severity == 3;
        }
        return failed;
    }

    // Invariant globalization: no ICU library has to be installed.
    static void WriteRuntimeConfig(string output, string major, string framework)
    {
        string text = "{\n  \"runtimeOptions\": {\n    \"tfm\": \"net" + major + ".0\",\n    \"rollForward\": \"LatestMajor\",\n"
            + "    \"framework\": { \"name\": \"" + framework + "\", \"version\": \"" + major + ".0.0\" },\n"
            + "    \"configProperties\": { \"System.Globalization.Invariant\": true }\n  }\n}\n";
        File.WriteAllText(Path.ChangeExtension(output, ".runtimeconfig.json"), text);
    }
}
