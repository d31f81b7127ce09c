//! Memory that a command makes a program use, when the program has little left. No command kills
//! it, and each reports what it found.

use std::path::{Path, PathBuf};
use std::time::Duration;

use system_tests::cgroup::Group;
use system_tests::environment::{Need, begin, long_form};
use system_tests::perfusion::{SLACK, command, run};
use system_tests::{App, Outcome, Runtime, Workload, on_runtimes, wait_until};

const MIB: u64 = 1 << 20;
/// Objects in an array, of which the runtime copies the references.
const NARROW: u32 = 1000;
/// The same in one of 20 MB.
const WIDE: u32 = 2_500_000;

/// An app of so many MB of small objects, in a group of its own.
struct Confined {
    app: App,
    group: Group,
}

impl Confined {
    /// In arrays of `width`. With `dotnet` instead of the one of `runtime`, where it is given.
    fn start(
        runtime: Runtime,
        dotnet: Option<&Path>,
        megabytes: u32,
        width: u32,
    ) -> anyhow::Result<Self> {
        let of_workload = Workload::dotnet(runtime, "smallobjects", &[])?.command_line();
        let group = Group::of_memory(&format!("perfusion-test-headroom-{}", std::process::id()))?;
        // It enters before it has memory of its own.
        let enter =
            format!("echo $$ > {} && exec \"$@\"", group.path().join("cgroup.procs").display());
        let mut workload = Workload::program("/bin/sh").arg("-c").arg(enter).arg("sh");
        let mut words = of_workload.into_iter();
        let program = words.next().unwrap_or_default();
        workload = workload.arg(dotnet.map_or(program, |path| path.into()));
        workload = words.fold(workload, |workload, word| workload.arg(word));
        let app = workload.arg(megabytes.to_string()).arg(width.to_string()).start()?;
        Ok(Self { app, group })
    }

    /// Leaves it so many bytes, once what it uses has come to rest.
    fn leave(&self, bytes: u64) -> anyhow::Result<()> {
        let mut last = 0;
        let used = wait_until("an app whose memory is at rest", SLACK, || {
            let used = self.group.memory_used().ok()?;
            (std::mem::replace(&mut last, used).abs_diff(used) < MIB / 4).then_some(used)
        })?;
        Ok(self.group.limit_memory(used + bytes)?)
    }

    /// What became of a survey: taken, in whole or in part, or refused with its figures.
    fn survey(&self, args: &[&str]) -> (&'static str, Outcome) {
        let pid = self.app.pid().to_string();
        let outcome = run(command([args[0], "--pid", &pid]).args(&args[1..]), SLACK).unwrap();
        let said = outcome.stderr.clone() + &outcome.stdout;
        let is_refused =
            ["has ", " MiB left", "memory.", "--force"].iter().all(|part| said.contains(part));
        let lacks = said.contains("events of the walk are missing");
        let what = match (outcome.code(), is_refused, lacks) {
            (0, false, false) => "taken",
            // What holds objects is not known then, which is all that `leaks --heap` asks for.
            (0 | 1, false, true) => "taken in part",
            (1, true, false) => "refused",
            other => panic!("{args:?}: {other:?}: {said}"),
        };
        (what, outcome)
    }

    fn is_well(&mut self) {
        self.app.ensure_alive().unwrap();
        assert_eq!(self.group.ended_for_memory().unwrap(), 0);
    }
}

/// The row of a table: what became of a survey of each kind.
fn cell(
    runtime: Runtime,
    dotnet: Option<&Path>,
    (megabytes, width): (u32, u32),
    left: u64,
) -> String {
    let mut confined = Confined::start(runtime, dotnet, megabytes, width).unwrap();
    confined.leave(left).unwrap();
    let (of_heap, outcome) = confined.survey(&["heap", "--rows", "3"]);
    confined.is_well();
    let smaller =
        if outcome.stderr.contains(" MiB instead of ") { " with a smaller buffer" } else { "" };
    confined.leave(left).unwrap();
    let (of_leaks, _) = confined.survey(&["leaks", "--duration", "3s", "--window", "1s", "--heap"]);
    confined.is_well();
    confined.app.stop().unwrap();
    format!("{of_heap}{smaller}; `leaks --heap` {of_leaks}")
}

on_runtimes!(no_program_is_killed_by_a_survey_that_its_limits_do_not_allow: net8 Net8, net10 Net10);

/// Some cells of the table.
fn no_program_is_killed_by_a_survey_that_its_limits_do_not_allow(runtime: Runtime) {
    let name = format!("headroom::some on {runtime}");
    let Some(_turn) = begin(&name, &[Need::Root, Need::Perfusion, Need::Clr(runtime)]) else {
        return;
    };
    for (megabytes, left) in [(50, 4), (300, 16), (300, 64)] {
        let row = cell(runtime, None, (megabytes, NARROW), left * MIB);
        let expected = if left == 64 { "taken" } else { "refused" };
        assert!(row.starts_with(expected), "{megabytes} MB, {left} MiB left: {row}");
        assert_eq!(row.contains("a smaller buffer"), left == 64, "{row}");
    }
}

on_runtimes!(
    a_wide_object_is_no_programs_end: net10 Net10; long: net8 Net8, net9 Net9, net11 Net11
);

/// The runtime copies its references before it tells of them: 20 MB that no buffer has.
fn a_wide_object_is_no_programs_end(runtime: Runtime) {
    let name = format!("headroom::wide on {runtime}");
    let Some(_turn) = begin(&name, &[Need::Root, Need::Perfusion, Need::Clr(runtime)]) else {
        return;
    };
    for left in [24, 64] {
        let row = cell(runtime, None, (100, WIDE), left * MIB);
        let expected = if left == 64 { "taken" } else { "refused" };
        assert!(row.starts_with(expected), "{left} MiB left: {row}");
    }
}

/// All of it, on all runtimes there are: the table of docs/heap.md.
#[test]
fn no_program_of_any_size_is_killed_on_any_runtime() {
    if !long_form() {
        return system_tests::environment::only_in_the_long_form("headroom::all");
    }
    let needs = [Need::Root, Need::Perfusion, Need::Clr(Runtime::Net10)];
    let Some(_turn) = begin("headroom::all", &needs) else { return };
    let newest = Runtime::Net10.dotnet().and_then(|dotnet| newer_than(&dotnet));
    let all = Runtime::ALL.iter().map(|&runtime| (runtime, None, runtime.major()));
    let all = all.chain(newest.map(|dotnet| (Runtime::Net10, Some(dotnet), 11)));
    for (runtime, dotnet, major) in all {
        for megabytes in [50, 300, 2000] {
            for left in [4, 16, 64, 320] {
                let row = cell(runtime, dotnet.as_deref(), (megabytes, NARROW), left * MIB);
                eprintln!("| {major} | {megabytes} MB | +{left} MiB | {row} |");
            }
        }
    }
}

/// The muxer of .NET 11, where it lies beside that of .NET 10.
fn newer_than(dotnet: &Path) -> Option<PathBuf> {
    let newer = dotnet.parent()?.parent()?.join("11/dotnet");
    newer.exists().then_some(newer)
}

/// What `--force` does to a program that has too little is said to be what it is.
#[test]
fn a_program_that_dies_of_a_survey_is_said_to_have() {
    let needs = [Need::Root, Need::Perfusion, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin("headroom::forced", &needs) else { return };
    for args in [
        &["heap", "--force"][..],
        &["leaks", "--duration", "3s", "--window", "1s", "--heap", "--force"],
    ] {
        let mut confined = Confined::start(Runtime::Net9, None, 300, NARROW).unwrap();
        confined.leave(6 * MIB).unwrap();
        let pid = confined.app.pid().to_string();
        let outcome = run(command([args[0], "--pid", &pid]).args(&args[1..]), SLACK).unwrap();
        assert_eq!(outcome.code(), 3, "{args:?}: {}", outcome.stderr);
        for part in [&format!("process {pid} was killed"), "oom_kill", "perfusion-test-headroom"] {
            assert!(outcome.stderr.contains(part), "{args:?}: {}", outcome.stderr);
        }
        confined.app.await_exit(SLACK).unwrap();
        assert!(confined.group.ended_for_memory().unwrap() > 0);
    }
}

/// The shim is memory, too.
#[test]
fn a_shim_is_not_loaded_where_there_is_no_memory_for_it() {
    let needs = [Need::Root, Need::Btf, Need::Perfusion, Need::Clr(Runtime::Net9)];
    let Some(_turn) = begin("headroom::shim", &needs) else { return };
    let mut confined = Confined::start(Runtime::Net9, None, 50, NARROW).unwrap();
    confined.leave(4 * MIB).unwrap();
    let scratch = system_tests::perfusion::Scratch::new().unwrap();
    let length = Duration::from_secs(2);
    let record = |args: &[&str]| {
        let (pid, output) = (confined.app.pid().to_string(), scratch.path("profile.pb.gz"));
        let mut record = command(["record", "--duration", "2s", "--pid", &pid, "--output"]);
        run(record.arg(output).args(args), length + SLACK).unwrap()
    };
    let refused = record(&[]);
    assert_eq!(refused.code(), 0, "{}", refused.stderr);
    for part in ["the shim was not loaded", " MiB left", "memory.", "--force"] {
        assert!(refused.stderr.contains(part), "{}", refused.stderr);
    }
    confined.leave(16 * MIB).unwrap();
    let loaded = record(&[]);
    assert!(!loaded.stderr.contains("the shim was not loaded"), "{}", loaded.stderr);
    confined.is_well();
}
