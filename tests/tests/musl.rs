//! What is special about programs on musl, Alpine's C library: containers that have no other one,
//! small stacks, and the files that the C library is in. Other tests run on these runtimes as on
//! those of glibc (`on_runtimes!`).

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use system_tests::environment::{Need, begin_beside, musl_libraries, record_on};
use system_tests::perfusion::{SLACK, Scratch, command, record_pid, run};
use system_tests::profile::Frame;
use system_tests::{Profile, Recording, Runtime, Sample, Workload, on_runtimes};

/// Runs a program in a mount namespace of its own, whose root has what the arguments before `--`
/// name and nothing else: no other C library, no shell.
const IN_A_ROOT: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def ask(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def mount(what, where, kind, flags):
    ask(libc.mount(what.encode(), where.encode(), kind and kind.encode(), ctypes.c_ulong(flags), None))
BIND, RECURSIVE, PRIVATE, NEWNS, DETACH = 4096, 16384, 1 << 18, 0x20000, 2
end = sys.argv.index("--")
root, kept, program = sys.argv[1], sys.argv[2:end], sys.argv[end + 1:]
ask(libc.unshare(NEWNS))
mount("none", "/", None, RECURSIVE | PRIVATE)
mount(root, root, None, BIND)
for folder in kept:
    os.makedirs(root + folder, exist_ok=True)
    mount(folder, root + folder, None, BIND)
for kind, where in ("tmpfs", "/tmp"), ("tmpfs", "/dev"), ("proc", "/proc"):
    os.makedirs(root + where, exist_ok=True)
    mount(kind, root + where, kind, 0)
for device, number in ("null", 3), ("urandom", 9):
    os.mknod(root + "/dev/" + device, 0o20666, os.makedev(1, number))
os.chdir(root)
SYS_pivot_root = 155
ask(libc.syscall(SYS_pivot_root, b".", b"."))
ask(libc.umount2(b".", DETACH))
os.chdir("/")
os.execv(program[0], program)
"#;

/// The workload in such a root.
fn in_a_root(workload: &Workload, root: &Path, runtime: Runtime) -> Workload {
    let line = workload.command_line();
    let of_runtime = runtime.dotnet().unwrap();
    let program = Path::new(line.last().unwrap());
    let kept = [of_runtime.parent(), program.parent(), musl_libraries().as_deref()]
        .map(|folder| fs::canonicalize(folder.unwrap()).unwrap());
    let python = Workload::program("python3").arg("-c").arg(IN_A_ROOT).arg(root);
    let python = kept.into_iter().fold(python, |python, folder| python.arg(folder)).arg("--");
    line.into_iter().fold(python, |python, word| python.arg(word))
}

#[test]
fn a_program_in_a_root_that_has_no_other_c_library_is_profiled_dumped_and_surveyed() {
    let runtime = Runtime::Net11Musl;
    let needs = [&record_on(runtime)[..], &[Need::Program("python3")]].concat();
    let Some(_turn) = begin_beside("musl::root", &needs) else { return };
    let (scratch, root) = (Scratch::new().unwrap(), Scratch::new().unwrap());
    let root = root.path("root");
    fs::create_dir(&root).unwrap();
    let holders = Workload::dotnet(runtime, "holders", &[]).unwrap();
    let app = in_a_root(&holders, &root, runtime).start().unwrap();
    let pid = app.pid().to_string();
    assert!(fs::metadata(format!("/proc/{pid}/root/bin/sh")).is_err());

    let survey = run(&mut command(["heap", "--rows", "1000", "--pid", &pid]), SLACK).unwrap();
    let row = survey.stdout.lines().find(|line| line.ends_with("  Holders.ByEvent"));
    assert!(row.is_some_and(|row| row.contains(" 1,000 ")), "{}{}", survey.stdout, survey.stderr);
    let dumped = run(&mut command(["dump", "--json", "--pid", &pid]), SLACK).unwrap();
    let dumped: Value = serde_json::from_str(&dumped.stdout).unwrap();
    let first = &dumped["threads"][0]["stack"];
    let has = |name: &str| {
        let stack = first.as_array().unwrap().iter();
        stack.filter_map(|frame| frame["function"].as_str()).any(|function| function.contains(name))
    };
    assert!(has("Workload.WaitForStop") && has("Holders.Program.Main"), "{first:#}");
    app.stop().unwrap();

    let app = in_a_root(&Workload::dotnet(runtime, "allocator", &[]).unwrap(), &root, runtime);
    let app = app.start().unwrap();
    let file = scratch.path("root.pb.gz");
    let recording = Recording::of_pid(app.pid(), &file, &["--duration", "3s"]).unwrap();
    let outcome = recording.finish_well(SLACK).unwrap();
    let truth = app.stop().unwrap();
    assert_eq!(truth["mistakes"].as_f64(), Some(0.0), "{truth}");
    let profile = Profile::read(&file).unwrap();
    let picture = || format!("{}\n{}", outcome.stderr, profile.describe("cpu", |_| true));
    let made =
        |sample: &Sample| sample.has("Allocator.Program.Make") && sample.label("type") == "int[]";
    assert!(profile.sum("alloc_space", made) > 0, "{}", picture());
    let of_loop = |sample: &Sample| sample.has("Allocator.Program.");
    let whole = |sample: &Sample| {
        of_loop(sample)
            && sample.stack.first().is_some_and(Frame::is_of_libc)
            && sample.positions(&["Workload.Start", "Allocator.Program.Run"]).is_some()
    };
    let (all, whole) = (profile.sum("samples", of_loop), profile.sum("samples", whole));
    assert!(all > 20 && whole * 100 >= all * 99, "{whole} of {all}: {}", picture());
}

on_runtimes!(
    threads_of_128_kib_have_room_for_the_shim:
    net10 Net10, net11_musl Net11Musl; long: net8 Net8, net9 Net9, net11 Net11
);

/// Such threads are few on glibc, where nobody makes them unless asked.
fn threads_of_128_kib_have_room_for_the_shim(runtime: Runtime) {
    let name = format!("musl::small_stacks on {runtime}");
    let needs = [&record_on(runtime)[..], &[Need::C]].concat();
    let Some(_turn) = begin_beside(&name, &needs) else { return };
    let workload = Workload::dotnet(runtime, "smallstacks", &["smallstacks"]).unwrap();
    let used = |truth: &Value| {
        assert!(truth["caught"].as_f64() >= Some(1600.0), "{truth}");
        truth["used"].as_f64().unwrap()
    };

    let mut app = workload.start().unwrap();
    app.perform("go").unwrap();
    app.perform("go").unwrap();
    let alone = used(&app.stop().unwrap());

    let mut app = workload.start().unwrap();
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("small.pb.gz");
    let recording = Recording::of_pid(app.pid(), &file, &[]).unwrap();
    recording.await_session(&app).unwrap();
    for _ in 0..3 {
        app.perform("go").unwrap();
    }
    recording.signal(rustix::process::Signal::INT).unwrap();
    let outcome = recording.finish_well(SLACK).unwrap();
    let recorded = used(&app.stop().unwrap());
    let profile = Profile::read(&file).unwrap();
    for (column, method) in [
        ("alloc_space", "SmallStacks.Program.Make"),
        ("exceptions", "SmallStacks.Program.Throw"),
        ("contentions", "SmallStacks.Program.Use"),
    ] {
        let there = profile.sum(column, |sample| sample.has(method));
        assert!(there > 0, "no {column} of {method}: {}", outcome.stderr);
    }

    let mut exact = command(["record", "--exact", "-o"]);
    exact.arg(scratch.path("exact.pb.gz")).arg("--").args(workload.command_line()).arg("once");
    let outcome = run(&mut exact, SLACK * 2).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    let truth = outcome.stdout.lines().find_map(|line| line.strip_prefix("truth ")).unwrap();
    let counted = used(&serde_json::from_str(truth).unwrap());
    println!("{name}: {alone} bytes of stack alone, {recorded} recorded, {counted} in exact mode");
    // Half of it: what the program itself has on its stack is its own affair.
    assert!(
        recorded <= alone + 64.0 * 1024.0 && counted <= alone + 64.0 * 1024.0,
        "{alone} bytes alone, {recorded} recorded, {counted} in exact mode"
    );
}

on_runtimes!(
    functions_of_the_c_library_have_their_names: net10_musl Net10Musl, net11_musl Net11Musl
);

/// The C library is the loader's file on Alpine, and called by its own name in Debian: one of these
/// programs has each.
fn functions_of_the_c_library_have_their_names(runtime: Runtime) {
    let name = format!("musl::names on {runtime}");
    let Some(_turn) = begin_beside(&name, &record_on(runtime)) else { return };
    let app = Workload::dotnet(runtime, "timedwaits", &[]).unwrap().start().unwrap();
    let (profile, outcome) = record_pid(app.pid(), Duration::from_secs(3), &[]).unwrap();
    app.stop().unwrap();
    let file = if runtime == Runtime::Net10Musl { "/libc.so" } else { "/ld-musl-x86_64.so.1" };
    let functions: std::collections::BTreeSet<&str> = profile
        .samples
        .iter()
        .flat_map(|sample| &sample.stack)
        .filter(|frame| frame.mapping.ends_with(file))
        .map(|frame| frame.function.as_str())
        .collect();
    for expected in ["pthread_cond_timedwait", "read"] {
        assert!(functions.contains(expected), "no {expected} in {functions:?}: {}", outcome.stderr);
    }
}
