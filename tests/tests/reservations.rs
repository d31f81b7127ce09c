//! The address space that exact mode reserves costs a program nothing: no dump has it, no lock
//! fills it, no limit turns it into an error of the program's.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use system_tests::app::compile_c;
use system_tests::environment::{Need, begin, record_on};
use system_tests::perfusion::{Outcome, Scratch, command, run};
use system_tests::{Runtime, Workload, on_runtimes};

/// For a machine that is busy with other things, too.
const DEADLINE: Duration = Duration::from_secs(180);
/// What a dump may have more than the program's own: exact mode's tables of what is alive, and the
/// shim's ring.
const MORE_DUMP: u64 = 64 << 20;
/// KiB that a program whose memory is locked may have more in memory.
const MORE_RESIDENT_KIB: u64 = 48 << 10;

fn app(runtime: Runtime, end: &str, milliseconds: u32) -> Workload {
    Workload::dotnet(runtime, "ends", &[]).unwrap().arg(end).arg(milliseconds.to_string())
}

/// Runs a program, with or without exact mode, below a shell that first does `before`.
fn start(scratch: &Scratch, app: &Workload, before: &str, is_exact: bool) -> Outcome {
    let script = format!("{before}; exec \"$@\"");
    let below = |command: &mut Command| {
        command
            .args(["sh", "-c", &script, "sh"])
            .args(app.command_line())
            .current_dir(scratch.path(""));
    };
    let mut line = if is_exact {
        let mut recording = command(["record", "--exact", "-o"]);
        recording.arg(scratch.path("app.pb.gz")).arg("--");
        recording
    } else {
        Command::new("env")
    };
    below(&mut line);
    run(&mut line, DEADLINE).unwrap()
}

fn account(scratch: &Scratch) -> Value {
    serde_json::from_slice(&std::fs::read(scratch.path("app.exact.json")).unwrap()).unwrap()
}

fn blocks(path: &Path) -> [u64; 2] {
    use std::os::unix::fs::MetadataExt as _;
    let found = std::fs::metadata(path).unwrap();
    [found.len(), found.blocks() * 512]
}

on_runtimes!(a_crash_dump_has_no_reserved_address_space: net8 Net8, net10 Net10);

fn a_crash_dump_has_no_reserved_address_space(runtime: Runtime) {
    let name = format!("reservations::dump on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    // 2: all memory that a debugger of managed code may ask for, of private mappings that can be
    // read and written.
    let found = [false, true].map(|is_exact| {
        let scratch = Scratch::new().unwrap();
        let dump = scratch.path("d.dmp");
        // A disk that fills up is none of this test's business. .NET 8 maps its code by a file of
        // more than that.
        let before = format!(
            "ulimit -f 16777216; export DOTNET_EnableWriteXorExecute=0 DOTNET_DbgEnableMiniDump=1 \
             DOTNET_DbgMiniDumpType=2 DOTNET_DbgMiniDumpName={}",
            dump.display()
        );
        let begin = Instant::now();
        let outcome = start(&scratch, &app(runtime, "throw", 300), &before, is_exact);
        let took = begin.elapsed();
        assert!(
            outcome.stderr.contains("as told"),
            "{is_exact}: {} {}",
            outcome.stdout,
            outcome.stderr
        );
        (blocks(&dump)[0], took)
    });
    let [(alone, took_alone), (exact, took_exact)] = found;
    println!(
        "{name}: {alone} bytes in {took_alone:.2?} alone, {exact} bytes in {took_exact:.2?} in \
         exact mode"
    );
    assert!(exact < alone + MORE_DUMP, "{exact} and {alone} alone");
    assert!(
        took_exact < took_alone + Duration::from_secs(15),
        "{took_exact:?} and {took_alone:?} alone"
    );
}

on_runtimes!(a_core_file_has_no_reserved_address_space: net8 Net8, net10 Net10);

fn a_core_file_has_no_reserved_address_space(runtime: Runtime) {
    let name = format!("reservations::core on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.contains(['/', '|', '%']) {
        println!(
            "{name}: skipped: kernel.core_pattern is {}: expected a plain file name",
            pattern.trim()
        );
        return;
    }
    let found = [false, true].map(|is_exact| {
        let scratch = Scratch::new().unwrap();
        let outcome = start(&scratch, &app(runtime, "throw", 300), "ulimit -c unlimited", is_exact);
        assert!(
            outcome.stderr.contains("as told"),
            "{is_exact}: {} {}",
            outcome.stdout,
            outcome.stderr
        );
        let cores = std::fs::read_dir(scratch.path("")).unwrap().map_while(Result::ok);
        let core =
            cores.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains("/core"));
        blocks(&core.expect("a core file"))
    });
    let [[alone, alone_used], [exact, exact_used]] = found;
    println!(
        "{name}: {alone} ({alone_used} on disk) alone, {exact} ({exact_used} on disk) in exact \
         mode"
    );
    // The runtime's own reservations have no size there either.
    assert!(exact < alone + MORE_DUMP, "{exact} and {alone} alone");
    assert!(exact_used < alone_used + MORE_DUMP, "{exact_used} and {alone_used} alone");
}

on_runtimes!(a_program_that_locks_all_its_memory_is_counted: net8 Net8, net10 Net10);

fn a_program_that_locks_all_its_memory_is_counted(runtime: Runtime) {
    let name = format!("reservations::lock on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    // What locks 256 GiB of the collector's by itself tells nothing about us.
    let before = "export DOTNET_GCHeapHardLimit=10000000";
    let alone = start(&scratch, &app(runtime, "lock", 300), before, false);
    assert!(alone.stdout.contains("done"), "{} {}", alone.stdout, alone.stderr);
    let exact = start(&scratch, &app(runtime, "lock", 300), before, true);
    assert!(
        exact.code() == 0 && exact.stdout.contains("done"),
        "{} {}",
        exact.stdout,
        exact.stderr
    );
    let account = account(&scratch);
    assert_eq!(account["processes"][0]["ending"], "ended", "{}", exact.stderr);
}

on_runtimes!(
    a_program_whose_memory_to_come_is_locked_pays_for_what_is_used: net8 Net8, net10 Net10
);

fn a_program_whose_memory_to_come_is_locked_pays_for_what_is_used(runtime: Runtime) {
    let name = format!("reservations::lock_before on {runtime}");
    let needs = [&record_on(runtime)[..], &[Need::C]].concat();
    let Some(_turn) = begin(&name, &needs) else { return };
    let scratch = Scratch::new().unwrap();
    // Before the runtime is loaded, and with it the profiler's library.
    let library = compile_c("lock_all", "lock_all.so", &["-shared", "-fPIC"]).unwrap();
    let before =
        format!("export DOTNET_GCHeapHardLimit=10000000; export LD_PRELOAD={}", library.display());
    let [alone, exact] = [false, true].map(|is_exact| {
        let outcome = start(&scratch, &app(runtime, "end", 300), &before, is_exact);
        assert!(
            outcome.code() == 0 && outcome.stdout.contains("done"),
            "{} {}",
            outcome.stdout,
            outcome.stderr
        );
        let resident =
            outcome.stdout.lines().find_map(|line| line.strip_prefix("resident ")).unwrap();
        resident.parse::<u64>().unwrap()
    });
    println!("{name}: {alone} KiB are resident alone, {exact} in exact mode");
    // The library itself, its thread's stack, and what is in its tables.
    assert!(exact < alone + MORE_RESIDENT_KIB, "{exact} KiB, and {alone} alone");
    assert_eq!(account(&scratch)["processes"][0]["ending"], "ended");
}

on_runtimes!(
    a_limit_of_address_space_is_the_reason_for_which_a_program_is_not_counted:
    net8 Net8, net10 Net10
);

fn a_limit_of_address_space_is_the_reason_for_which_a_program_is_not_counted(runtime: Runtime) {
    let name = format!("reservations::limit on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    for gib in [1, 2, 4, 7, 8, 16, 400] {
        let scratch = Scratch::new().unwrap();
        let before = format!("ulimit -v {}", gib << 20);
        let alone = start(&scratch, &app(runtime, "end", 300), &before, false);
        let exact = start(&scratch, &app(runtime, "end", 300), &before, true);
        let ends_well = |outcome: &Outcome| outcome.stdout.contains("done");
        assert_eq!(ends_well(&exact), ends_well(&alone), "{gib} GiB: {}", exact.stderr);
        if !ends_well(&alone) {
            println!("{name}: .NET itself does not start with {gib} GiB");
            continue;
        }
        let ending = &account(&scratch)["processes"][0]["ending"];
        if gib < 8 {
            assert_eq!(*ending, "declined", "{gib} GiB: {}", exact.stderr);
            assert!(
                exact.stderr.contains("too little address space (`ulimit -v`"),
                "{}",
                exact.stderr
            );
        } else {
            assert_eq!(*ending, "ended", "{gib} GiB: {}", exact.stderr);
        }
    }
}

on_runtimes!(a_child_that_is_a_copy_has_no_part_of_it: net8 Net8, net10 Net10);

fn a_child_that_is_a_copy_has_no_part_of_it(runtime: Runtime) {
    let name = format!("reservations::fork on {runtime}");
    let Some(_turn) = begin(&name, &record_on(runtime)) else { return };
    let scratch = Scratch::new().unwrap();
    let outcome = start(&scratch, &app(runtime, "fork", 300), "true", true);
    assert!(
        outcome.code() == 0 && outcome.stdout.contains("child 7 0"),
        "{} {}",
        outcome.stdout,
        outcome.stderr
    );
    assert_eq!(account(&scratch)["processes"][0]["ending"], "ended", "{}", outcome.stderr);
}
