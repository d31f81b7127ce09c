//! Names that are read from a process's memory, where no shim can be loaded, are as complete as a
//! shim's, and are the same.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use perfusion_dotnet::method_names::process::ProcessMethodNames;
use perfusion_dotnet::method_names::{NoName, UnnamedCode};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::memory::ProcessMemory;
use perfusion_unwind::managed::{JitBody, SearchBudget};
use perfusion_unwind::native::NATIVE;
use system_tests::environment::{Need, begin_beside, long_form, record_on};
use system_tests::perfusion::{SLACK, record_pid};
use system_tests::profile::NamedCode;
use system_tests::single_file::Packing;
use system_tests::{App, Profile, Runtime, Sample, Workload, on_runtimes};

/// Workloads with methods of many kinds: plain, generic, of nested types, asynchronous, of the
/// framework, and made at run time.
const WORKLOADS: [&str; 6] =
    ["callheavy", "generics", "genericchain", "asyncchain", "readytorun", "dynamicmethods"];

fn is_managed(code: &NamedCode) -> bool {
    code.mapping.to_lowercase().ends_with(".dll") || code.mapping == "[managed]"
}

/// Of the managed frames in samples that fit, how many there are and how many have no name.
fn managed_frames(profile: &Profile, fits: impl Fn(&Sample) -> bool) -> (i64, i64) {
    let (mut all, mut unnamed) = (0, 0);
    for sample in profile.samples.iter().filter(|sample| fits(sample)) {
        let weight = profile.value(sample, "samples");
        for frame in &sample.stack {
            let named = frame.mapping.to_lowercase().ends_with(".dll");
            let is_unnamed = frame.function.starts_with("[managed]");
            if named || is_unnamed {
                all += weight;
                unnamed += i64::from(is_unnamed) * weight;
            }
        }
    }
    (all, unnamed)
}

on_runtimes!(
    a_program_that_takes_no_shim_has_its_names: net8 Net8, net9 Net9, net10 Net10, net11 Net11
);

fn a_program_that_takes_no_shim_has_its_names(runtime: Runtime) {
    let name = format!("names_read::a_program_that_takes_no_shim on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let (mut all, mut unnamed) = (0, 0);
    for workload in WORKLOADS {
        let app = Workload::dotnet(runtime, workload, &[])
            .unwrap()
            .env("DOTNET_EnableDiagnostics", "0")
            .start()
            .unwrap();
        let (profile, _) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
        app.stop().unwrap();
        let (frames, without) = managed_frames(&profile, |_| true);
        let counters: Vec<_> =
            profile.comments.iter().filter(|line| line.contains("names_")).collect();
        println!("{runtime} {workload}: {without} of {frames} frames unnamed; {counters:?}");
        assert!(frames > 0, "{workload} has no managed frames");
        (all, unnamed) = (all + frames, unnamed + without);
        if workload == "generics" {
            for method in [
                "Generics.Table<Generics.Price>.Fill(Price)",
                "Generics.Table<long>.Convert<short>(short[])",
                "Generics.Table<__Canon>.Fill(__Canon)",
                "Generics.Table<int>.Row<Generics.Price>.Walk(int)",
            ] {
                let picture = || profile.describe("cpu", |_| true);
                assert!(profile.sum("samples", |s| s.has(method)) > 0, "{method}: {}", picture());
            }
        }
    }
    assert!(all > 300, "{runtime}: {all} managed frames");
    assert!(unnamed * 100 <= all, "{runtime}: {unnamed} of {all} managed frames have no name");
}

on_runtimes!(a_single_file_that_takes_no_shim_has_its_names: net9 Net9, net10 Net10);

fn a_single_file_that_takes_no_shim_has_its_names(runtime: Runtime) {
    let name = format!("names_read::a_single_file_that_takes_no_shim on {runtime}");
    let needs = [&record_on(runtime)[..], &[Need::SingleFile(runtime)]].concat();
    let Some(_turn) = begin_beside(&name, &needs) else { return };
    let app = Workload::single_file(runtime, "callheavy", Packing::Plain)
        .unwrap()
        .env("DOTNET_EnableDiagnostics", "0")
        .start()
        .unwrap();
    let (profile, _) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
    app.stop().unwrap();
    let (chain, unnamed) = (["CallHeavy.Program.Loop", "CallHeavy.Program.Root"], "[managed]");
    let named = profile.sum("samples", |sample| sample.positions(&chain).is_some());
    let without = profile.sum("samples", |sample| sample.has(unnamed));
    let picture = || profile.describe("cpu", |_| true);
    assert!(named > 5 && without * 100 <= named, "{without}, {named}: {}", picture());
}

on_runtimes!(
    names_that_are_read_are_those_that_the_shim_tells: net8 Net8, net9 Net9, net10 Net10,
    net11 Net11
);

fn names_that_are_read_are_those_that_the_shim_tells(runtime: Runtime) {
    let name = format!("names_read::names_that_are_read on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let mut names = ComparedNames::default();
    for workload in WORKLOADS {
        let app = Workload::dotnet(runtime, workload, &[]).unwrap().start().unwrap();
        // Methods made at run time may be gone by now, and others be where they were.
        let told = told_names(&app, Duration::from_secs(2), &[]);
        names.compare(&app, &told, |code| {
            workload != "dynamicmethods" || code.mapping.ends_with(".dll")
        });
        app.stop().unwrap();
    }
    names.assert_same(runtime, 50);
}

/// Methods of the long comparison: with those of the other workloads and runtimes some 10,000.
const MANY: usize = 3_000;

on_runtimes!(
    thousands_of_names_that_are_read_are_the_shims: net8 Net8, net9 Net9, net10 Net10, net11 Net11
);

/// The short form has a tenth.
fn thousands_of_names_that_are_read_are_the_shims(runtime: Runtime) {
    let name = format!("names_read::thousands_of_names on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let count = if long_form() { MANY } else { MANY / 10 };
    let app = Workload::made(runtime, "manymethods", &many_methods(count));
    let app = app.unwrap().start().unwrap();
    let mut names = ComparedNames::default();
    // Until it was met in nearly all of its methods: on a busy machine it comes through them late.
    let fewest = count * 9 / 10;
    let mut told = BTreeMap::new();
    let deadline = Instant::now() + SLACK;
    while told.len() <= fewest && Instant::now() < deadline {
        let some = told_names(&app, Duration::from_secs(4), &["-F", "1999"]);
        told.extend(some.into_iter().map(|code| (code.address, code)));
    }
    let told: Vec<NamedCode> = told.into_values().collect();
    names.compare(&app, &told, |_| true);
    app.stop().unwrap();
    names.assert_same(runtime, fewest);
}

/// A program that is in each of so many methods in turn. No two have the same type, parameters and
/// type arguments.
fn many_methods(count: usize) -> String {
    const TYPES: [&str; 14] = [
        "int",
        "string",
        "object",
        "List<long>",
        "Dictionary<string, int[]>",
        "byte[]",
        "double[,]",
        "KeyValuePair<int, string>",
        "int?",
        "Func<string, bool>",
        "Guid",
        "Kind",
        "Outer<short>.Inner<string>",
        "decimal[][]",
    ];
    let of = |number: usize| TYPES[number % TYPES.len()];
    let (mut types, mut calls) = (String::new(), String::new());
    for number in 0..count {
        let (first, second, third) =
            (of(number), of(number / TYPES.len()), of(number / TYPES.len() / TYPES.len()));
        let body = "{ return Program.Work(seed); }";
        let mark = "[MethodImpl(MethodImplOptions.NoInlining)] public";
        match number % 6 {
            0 => {
                types += &format!(
                    "static class Plain{number} {{ {mark} static long Step(long seed, {first} a, \
                     {second} b) {body} }}\n"
                );
                calls += &format!(
                    "seed = Plain{number}.Step(seed, default({first}), default({second}));\n"
                );
            }
            1 => {
                types += &format!(
                    "static class ByType{number}<T> {{ {mark} static long Step(long seed, T a, \
                     List<T> b, T[] c) {body} }}\n"
                );
                calls += &format!(
                    "seed = ByType{number}<{first}>.Step(seed, default({first}), null, null);\n"
                );
            }
            2 => {
                types += &format!(
                    "static class ByMethod{number} {{ {mark} static long Step<T, U>(long seed, \
                     T a, Dictionary<T, U> b) {body} }}\n"
                );
                calls += &format!(
                    "seed = ByMethod{number}.Step<{first}, {second}>(seed, default({first}), \
                     null);\n"
                );
            }
            3 => {
                types += &format!(
                    "sealed class Nest{number}<T> {{ public sealed class Egg<U> {{ {mark} long \
                     Step<V>(long seed, T a, U b, V c, ref int d, out {second} e) \
                     {{ e = default({second}); return Program.Work(seed); }} }} }}\n"
                );
                calls += &format!(
                    "{{ int d = 0; {second} e; seed = new Nest{number}<{first}>.Egg<{second}>()\
                     .Step<{third}>(seed, default({first}), default({second}), \
                     default({third}), ref d, out e); }}\n"
                );
            }
            4 => {
                types += &format!(
                    "struct Value{number} {{ int own; {mark} unsafe long Step(long seed, {first}[] \
                     a, int* b, void** c) {{ own++; return Program.Work(seed); }} }}\n"
                );
                calls += &format!(
                    "unsafe {{ seed = new Value{number}().Step(seed, null, null, null); }}\n"
                );
            }
            _ => {
                types += &format!(
                    "namespace Deep.Space{number} {{ static class Lambdas {{ public static \
                     readonly Func<long, {first}, long> Step = (seed, a) => {{ return \
                     Program.Work(seed); }}; }} }}\n"
                );
                calls +=
                    &format!("seed = Deep.Space{number}.Lambdas.Step(seed, default({first}));\n");
            }
        }
        // A method of thousands of calls takes long to compile.
        if number % 100 == 99 {
            calls += "return seed; } static long More";
            calls += &format!("{number}(long seed) {{\n");
        }
    }
    let parts: String = (0..count)
        .filter(|number| number % 100 == 99)
        .map(|number| format!("seed = More{number}(seed);\n"))
        .collect();
    format!(
        "using System; using System.Collections.Generic; using System.Diagnostics; \
         using System.Runtime.CompilerServices;\n\
         enum Kind : byte {{ One }}\n\
         sealed class Outer<T> {{ public struct Inner<U> {{ public T A; public U B; }} }}\n\
         {types}\n\
         static class Program {{\n\
         static long sink;\n\
         [MethodImpl(MethodImplOptions.NoInlining)] public static long Work(long seed) {{ \
         long end = Stopwatch.GetTimestamp() + Stopwatch.Frequency / 1000; \
         while (Stopwatch.GetTimestamp() < end) seed = seed * 31 + 7; return seed; }}\n\
         static int Main() {{ Workload.Start(\"worker\", () => {{ \
         while (!Workload.Stopping) sink = All(sink); }}); Workload.Ready(); \
         Workload.WaitForStop(); Workload.PrintTruth(); return 0; }}\n\
         static long All(long seed) {{ seed = First(seed); {parts} return seed; }}\n\
         static long First(long seed) {{\n{calls} return seed; }} }}\n"
    )
}

/// Managed code in a recording of the app that the shim has told the names of.
fn told_names(app: &App, length: Duration, arguments: &[&str]) -> Vec<NamedCode> {
    let (profile, _) = record_pid(app.pid(), length, arguments).unwrap();
    let is_told = |code: &NamedCode| is_managed(code) && !code.system_name.starts_with('[');
    profile.code.into_iter().filter(is_told).collect()
}

/// Names as they are read, compared with those that the shim tells.
#[derive(Default)]
struct ComparedNames {
    compared: usize,
    unread: Vec<(NamedCode, NoName)>,
    wrong: Vec<(NamedCode, (String, String))>,
}

impl ComparedNames {
    /// Compares those that the shim has told of the app. What is not there to stay may have another
    /// name by now.
    fn compare(&mut self, app: &App, told: &[NamedCode], is_there: impl Fn(&NamedCode) -> bool) {
        for (told, read) in told.iter().zip(read_names(app, told)) {
            self.compared += 1;
            match read {
                Ok((name, module))
                    if name == told.system_name
                        && (module == told.mapping || told.mapping == "[managed]") => {}
                Ok(read) if is_there(told) => self.wrong.push((told.clone(), read)),
                Ok(_) => {}
                Err(why) => self.unread.push((told.clone(), why)),
            }
        }
    }

    fn assert_same(&self, runtime: Runtime, fewest: usize) {
        let Self { compared, unread, wrong } = self;
        println!("{runtime}: {compared} compared, {} not read: {unread:#?}", unread.len());
        assert!(*compared > fewest, "{runtime}: only {compared} names");
        let count = wrong.len();
        assert!(wrong.is_empty(), "{runtime}: {count} of {compared} are others: {wrong:#?}");
        assert!(unread.len() * 50 <= *compared, "{runtime}: {} of {compared}", unread.len());
    }
}

/// Names and modules as they are read of these codes.
fn read_names(app: &App, codes: &[NamedCode]) -> Vec<Result<(String, String), NoName>> {
    read_names_of(app.pid(), codes)
}

fn read_names_of(pid: u32, codes: &[NamedCode]) -> Vec<Result<(String, String), NoName>> {
    let target = ProcessHandle::open(pid).unwrap();
    let start_ticks = target.start_ticks().unwrap();
    let memory = ProcessMemory::open(pid, start_ticks).unwrap();
    let mut jit = Vec::new();
    target
        .maps(|line| {
            if line.executable && (line.inode == 0 || line.name.contains("doublemapper")) {
                jit.push(line.start..line.end);
            }
            true
        })
        .unwrap();
    let unnamed = |code: &NamedCode| {
        let heap = jit.iter().find(|range| range.contains(&code.address));
        let body = heap.and_then(|range| {
            let mut budget = SearchBudget { bytes: 64 << 20 };
            JitBody::find(NATIVE, &memory, code.address, range.start, &mut budget).ok().flatten()
        });
        UnnamedCode { start: code.address, body }
    };
    let unnamed: Vec<UnnamedCode> = codes.iter().map(unnamed).collect();
    let read = ProcessMethodNames::open(pid, start_ticks).unwrap().read(&unnamed);
    assert_eq!(read.len(), codes.len(), "held up");
    read.into_iter()
        .map(|name| name.map(|method| (shown(&method.name), shown(&method.module_name))))
        .collect()
}

fn shown(text: &str) -> String {
    perfusion_model::text::clean(text).into_owned()
}
