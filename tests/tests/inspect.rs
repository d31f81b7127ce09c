//! `perfusion inspect unwind`: which rule an address has and where it comes from, in files and in
//! running CLRs.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use perfusion_host::process::ProcessTable;
use perfusion_host::process::explain::RuleOrigin;
use perfusion_host::process::mapping::{Mapping, MappingKind};
use serde_json::Value;
use system_tests::environment::{Need, begin_beside, record_on};
use system_tests::perfusion::{Outcome, Scratch, command, run};
use system_tests::{Runtime, Workload, on_runtimes};

const DEADLINE: Duration = Duration::from_secs(120);
/// Addresses looked at per mapping.
const PROBES: u64 = 600;

fn inspect(target: &str, address: u64, json: bool) -> Outcome {
    let address = format!("{address:#x}");
    let arguments =
        ["inspect", "unwind", target, &address].into_iter().chain(json.then_some("--json"));
    run(&mut command(arguments), DEADLINE).unwrap()
}

/// The C library this test runs on, and the address of a symbol in it.
fn libc_symbol(symbol: &str) -> (String, u64) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains("libc.so"));
    let path = path.expect("a C library").to_owned();
    let listed = Command::new("nm").args(["-D", "--defined-only", &path]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let line = listed
        .lines()
        .find(|line| line.split(' ').nth(2).is_some_and(|n| n.split('@').next() == Some(symbol)));
    let address = line.and_then(|line| line.split(' ').next()).expect("the symbol");
    (path, u64::from_str_radix(address, 16).unwrap())
}

#[test]
fn a_real_libc_says_where_frames_are_and_where_threads_start() {
    let Some(_turn) = begin_beside("inspect::a_real_libc", &[Need::Perfusion]) else { return };
    let (libc, getenv) = libc_symbol("getenv");
    let text = inspect(&libc, getenv, false);
    assert_eq!(text.code(), 0, "{}", text.stderr);
    for line in
        ["CFA             rsp + 8", "return address  [CFA - 8]", "from            .eh_frame"]
    {
        assert!(text.stdout.contains(line), "no `{line}`:\n{}", text.stdout);
    }
    let json: Value = serde_json::from_str(&inspect(&libc, getenv, true).stdout).unwrap();
    assert_eq!(json["next_instruction"]["rule"]["cfa"], "rsp + 8");
    assert_eq!(json["next_instruction"]["origin"], "eh_frame");
    assert_eq!(json["next_instruction"]["entry_covers"][0], getenv);

    // Behind its system call clone() is two threads, and the new one starts there.
    let (libc, clone) = libc_symbol("clone");
    let mut table = ProcessTable::new();
    let starts = (clone..clone + 0x80).filter(|address| {
        let explained = table.explain_file(Path::new(&libc), *address, true);
        explained.is_ok_and(|explained| explained.rule.is_ok_and(|rule| rule.is_thread_start()))
    });
    assert!(starts.count() > 0, "no thread starts in clone");
}

#[test]
fn what_cannot_be_looked_up_is_said() {
    let Some(_turn) = begin_beside("inspect::what_cannot_be_looked_up", &[Need::Perfusion]) else {
        return;
    };
    let (libc, _) = libc_symbol("getenv");
    let scratch = Scratch::new().unwrap();
    let assembly = scratch.path("il.dll");
    // As the compiler makes them for any CPU: a PE file, and of a 32-bit machine.
    std::fs::write(&assembly, b"MZ\x90\0").unwrap();
    for (target, address, code, word) in [
        (assembly.to_str().unwrap(), 0x2050, 1, "a .NET assembly of IL gets its code when it runs"),
        ("4194305", 0x1000, 3, "no such process"),
        ("/no/such/file", 0x1000, 1, "/no/such/file"),
        ("/etc/passwd", 0x1000, 1, "expected an ELF or PE file"),
        ("/tmp", 0x1000, 1, "no regular file"),
        (&libc, 0x10, 1, "0x10 is in no code"),
    ] {
        let outcome = inspect(target, address, false);
        assert_eq!(outcome.code(), code, "{target}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(word), "{target}: no `{word}`: {}", outcome.stderr);
    }
    // Of a process: where the address is, or what is next to it. Itself is one that has both code
    // and data.
    let own = std::process::id().to_string();
    let data = std::ptr::from_ref(&own).addr() as u64;
    for (target, address, words) in [
        (own.as_str(), 1, &["0x1 is in no mapping of process", "below is nothing; above, 0x"][..]),
        (
            &own,
            data,
            &["is in no code of process", "(data); the nearest code below is 0x", "(code)"],
        ),
        // Pid 2 is the kernel's thread that starts others, unless this is a container.
        ("2", 1, &["0x1 is in no "]),
    ] {
        let outcome = inspect(target, address, false);
        assert_eq!(outcome.code(), 1, "{target}: {}", outcome.stderr);
        for word in words {
            assert!(outcome.stderr.contains(word), "{target}: no `{word}`: {}", outcome.stderr);
        }
    }
    let outcome = run(&mut command(["inspect", "unwind", &libc, "1f"]), DEADLINE).unwrap();
    assert_eq!(outcome.code(), 2, "{}", outcome.stderr);
}

on_runtimes!(every_sort_of_code_of_a_clr_has_rules: net8 Net8, net10 Net10; long: net9 Net9);

fn every_sort_of_code_of_a_clr_has_rules(runtime: Runtime) {
    let name = format!("inspect::every_sort_of_code of {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "callheavy", &[]).unwrap().start().unwrap();
    let mut table = ProcessTable::new();
    table.adopt(app.pid()).unwrap();
    let mappings: Vec<Mapping> = table.mappings(app.pid()).cloned().collect();
    // By sort of code: how many addresses have a rule from where, with one address of each.
    let mut seen: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for mapping in &mappings {
        let file = mapping.path.rsplit('/').next().unwrap_or_default();
        let sort = match mapping.region {
            MappingKind::Jit { .. } => "jit",
            MappingKind::Vdso => "vdso",
            MappingKind::File if file.ends_with(".dll") => "dll",
            MappingKind::File if file == "libcoreclr.so" => "coreclr",
            MappingKind::File if file.starts_with("libc.so") => "libc",
            _ => continue,
        };
        // A new one each time: a process's budget of searched memory is for a second of walks.
        let mut table = ProcessTable::new();
        let length = mapping.range.end - mapping.range.start;
        for address in
            mapping.range.clone().step_by(usize::try_from((length / PROBES).max(1)).unwrap())
        {
            let Ok(explained) = table.explain_process(app.pid(), address, true) else { continue };
            let origin = match explained.origin {
                RuleOrigin::None => "none".to_owned(),
                origin => serde_json::to_value(origin).unwrap().as_str().unwrap().to_owned(),
            };
            seen.entry(format!("{sort} {origin}")).or_insert((0, address)).0 += 1;
        }
    }
    println!("{runtime}: {seen:?}");
    for (sort, origin) in [
        ("jit", "jit_unwind_info"),
        ("jit", "stub"),
        ("dll", "ready_to_run"),
        ("coreclr", "eh_frame"),
        ("libc", "eh_frame"),
        ("vdso", "eh_frame"),
    ] {
        let (_, address) = *seen
            .get(&format!("{sort} {origin}"))
            .unwrap_or_else(|| panic!("no {sort} {origin}: {seen:?}"));
        // The command says the same.
        let outcome = inspect(&app.pid().to_string(), address, true);
        assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
        // Of managed code that may have moved on meanwhile only the form is asked for.
        let json: Value = serde_json::from_str(&outcome.stdout).unwrap();
        if sort != "jit" {
            assert_eq!(json["next_instruction"]["origin"], origin, "{json:#}");
        }
    }
    let epilogues: u64 = seen
        .iter()
        .filter(|(key, _)| key.ends_with(" epilogue"))
        .map(|(_, (count, _))| count)
        .sum();
    assert!(epilogues > 0, "no epilogue among {seen:?}");
    app.stop().unwrap();
}
