//! Names that are read from a process's memory, where no shim can be loaded, are as complete as a
//! shim's, and are the same.

use std::time::Duration;

use perfusion_dotnet::method_names::process::ProcessMethodNames;
use perfusion_dotnet::method_names::{NoName, UnnamedCode};
use perfusion_host::process::handle::ProcessHandle;
use perfusion_host::process::memory::ProcessMemory;
use perfusion_unwind::managed::{JitBody, SearchBudget};
use perfusion_unwind::native::NATIVE;
use system_tests::environment::{Need, begin_beside, record_on};
use system_tests::perfusion::record_pid;
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
    let (mut compared, mut unread, mut wrong) = (0, Vec::new(), Vec::new());
    for workload in WORKLOADS {
        let app = Workload::dotnet(runtime, workload, &[]).unwrap().start().unwrap();
        let (profile, _) = record_pid(app.pid(), Duration::from_secs(2), &[]).unwrap();
        let told: Vec<NamedCode> = profile
            .code
            .iter()
            .filter(|code| is_managed(code) && !code.system_name.starts_with('['))
            .cloned()
            .collect();
        let read = read_names(&app, &told);
        // Methods made at run time may be gone by now, and others be where they were.
        let may_be_gone =
            |code: &NamedCode| workload == "dynamicmethods" && !code.mapping.ends_with(".dll");
        for (told, read) in told.iter().zip(read) {
            compared += 1;
            match read {
                Ok((name, module))
                    if name == told.system_name
                        && (module == told.mapping || told.mapping == "[managed]") => {}
                Ok(read) if !may_be_gone(told) => wrong.push((workload, told.clone(), read)),
                Ok(_) => {}
                Err(why) => unread.push((workload, told.clone(), why)),
            }
        }
        app.stop().unwrap();
    }
    println!("{runtime}: {compared} compared, {} not read: {unread:#?}", unread.len());
    assert!(compared > 50, "{runtime}: only {compared} names");
    assert!(wrong.is_empty(), "{runtime}: {} of {compared} are others: {wrong:#?}", wrong.len());
    assert!(unread.len() * 50 <= compared, "{runtime}: {} of {compared}", unread.len());
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
