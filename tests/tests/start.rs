//! A short program, recorded from its first instruction to its last. The probes know none of its
//! code yet, so each stack is a first one.

use std::time::Duration;

use system_tests::environment::{Need, RECORD, Runtime, begin, csc, sources};
use system_tests::perfusion::{Scratch, command, run};
use system_tests::profile::{Profile, Sample};

/// The C# compiler compiles one file and is recorded with everything on. It runs on .NET 9
/// (`csc.runtimeconfig.json`), without precompiled code.
fn compiler() -> Profile {
    let scratch = Scratch::new().unwrap();
    let file = scratch.path("compiler.pb.gz");
    let mut command = command(["record", "-o"]);
    command.arg(&file).arg("--").arg(Runtime::Net9.dotnet().unwrap());
    command.arg(csc().unwrap().with_file_name("csc.dll")).arg(scratch.path("Workload.dll"));
    command.arg("-target:library").arg(sources().join("workloads/dotnet/Workload.cs"));
    let outcome = run(&mut command, Duration::from_secs(300)).unwrap();
    assert_eq!(outcome.code(), 0, "{}", outcome.stderr);
    Profile::read(&file).unwrap()
}

#[test]
fn the_compilers_stacks_are_exact_from_the_first_instruction_on() {
    let needs = [RECORD, &[Need::Clr(Runtime::Net9)]].concat();
    let Some(_turn) = begin("start::compiler", &needs) else { return };
    let profile = compiler();
    let counter = |name| profile.counter(name).unwrap_or(0);
    let (walked, exiting) = (counter("stacks_walked"), counter("stacks_exiting"));
    let (broken, guessed) = (counter("stacks_broken"), counter("stacks_guessed"));
    let judged = walked - exiting;
    let picture =
        || profile.describe("wall", |sample| sample.has("[truncated") || sample.has("[guessed"));
    assert_eq!(counter("stacks_exact") + broken + guessed, judged, "each stack is counted once");
    assert!(judged > 500, "{judged} stacks are too few to judge by");
    // Promised are 99.9 %. One run has some thousand stacks: 3 more than that part are two
    // deviations.
    let bad = broken + guessed;
    assert!(bad <= judged / 1000 + 3, "{bad} of {judged} are not exact:\n{}", picture());
    // No copy ends before the stack does: it has room for what the compiler's threads use.
    let short = profile.stacks("wall", |sample| sample.has("[truncated: stack copy ended]"));
    assert!(short.is_empty(), "{}", picture());
    // A dozen threads of the runtime end with the process. Some are seen while the kernel takes
    // their memory.
    assert!(exiting > 0, "no thread was seen while it was ended");
    let marked = |sample: &Sample| sample.has("[exiting: memory given back]");
    assert!(!profile.stacks("wall", marked).is_empty(), "{exiting} counted, none marked");
    let torn = profile.stacks("wall", |sample| {
        sample.has("do_exit") && sample.has("[truncated: memory unreadable]")
    });
    assert!(torn.is_empty(), "a thread that ends is no broken stack:\n{}", picture());
}
